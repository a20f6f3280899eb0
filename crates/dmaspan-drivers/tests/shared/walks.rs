//! Hardware that keeps every leaf and every walk until a command names it, behind a driver's
//! commands: random maps and unmaps, after each of which it has nothing that the tables contradict.

use std::collections::BTreeMap;

use dmaspan::io_pgtable::{Arena, Format};
use dmaspan::iommu::{Domain, IommuOps};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span};
use dmaspan_sim::iotlb::{Iotlb, IotlbConfig};
use dmaspan_sim::rng::Rng;
use dmaspan_sim::walker::{Access, Walker};

#[path = "commands.rs"]
mod commands;

pub(crate) use commands::CacheCommand;

/// A domain and the hardware behind it.
pub(crate) struct Walked<'a, F: Format, O: IommuOps<Address = PhysAddr>, W> {
    domain: &'a Domain<F, Arena, O>,
    iotlb: Iotlb<W, Arena>,
    /// The number of the domain, and the commands since the last call.
    space: u32,
    commands: &'a dyn Fn() -> Vec<CacheCommand>,
    /// By their first addresses: bytes and memory.
    mapped: BTreeMap<u64, (u64, u64)>,
    rng: Rng,
}

/// Where is mapped: blocks of every size fit, and beside them.
const SPACE: u64 = 4 << 30;

impl<'a, F: Format, O: IommuOps<Address = PhysAddr>, W: Walker + Send + Sync> Walked<'a, F, O, W> {
    pub(crate) fn new(
        domain: &'a Domain<F, Arena, O>,
        (walker, config): (W, IotlbConfig),
        space: u32,
        commands: &'a dyn Fn() -> Vec<CacheCommand>,
        seed: u64,
    ) -> Self {
        let iotlb = Iotlb::with_config(walker, domain.memory().clone(), config);
        commands();
        Self { domain, iotlb, space, commands, mapped: BTreeMap::new(), rng: Rng::new(seed) }
    }

    /// Does what it can in any order, and looks each time.
    pub(crate) fn storm(&mut self, steps: u32) {
        for _ in 0..steps {
            match self.rng.below(8) {
                0..4 => self.map(),
                4..7 => self.unmap(),
                _ => self.unmap_several(),
            }
            self.look();
        }
        while !self.mapped.is_empty() {
            self.unmap();
            self.look();
        }
    }

    /// A size, and how many of it.
    fn shape(&mut self) -> (u32, u64) {
        let sizes = self.domain.geometry().page_sizes;
        let usual: Vec<u32> = (12..=30).filter(|lg2| sizes >> lg2 & 1 != 0).collect();
        let lg2 = usual[usize::try_from(self.rng.below(usual.len() as u64)).unwrap()];
        let most =
            (SPACE >> lg2 >> 1).min([1, 3, 40, 700][usize::try_from(self.rng.below(4)).unwrap()]);
        (lg2, 1 + self.rng.below(most))
    }

    fn map(&mut self) {
        let (lg2, count) = self.shape();
        let bytes = count << lg2;
        let first = self.rng.below(((SPACE - bytes) >> lg2) + 1) << lg2;
        let last = first + (bytes - 1);
        // What is near shares tables.
        let before = self.mapped.range(..=last).next_back();
        if before.is_some_and(|(&at, &(bytes, _))| at + bytes > first) {
            return;
        }
        let memory = (1 << 34) + (self.rng.below(64) << lg2.max(30));
        let span = Span::new(PhysAddr::new(memory), bytes).unwrap();
        #[expect(unsafe_code, reason = "there is no memory behind")]
        // SAFETY: the simulated hardware translates, and accesses nothing.
        let mapped =
            unsafe { self.domain.map_spans(Iova::new(first), &[span], Prot::READ | Prot::WRITE) };
        mapped.unwrap();
        self.mapped.insert(first, (bytes, memory));
    }

    fn any(&mut self) -> Option<(u64, u64)> {
        let nth = self.rng.below(self.mapped.len().max(1) as u64);
        self.mapped.iter().nth(usize::try_from(nth).unwrap()).map(|(&at, &(bytes, _))| (at, bytes))
    }

    fn unmap(&mut self) {
        let Some((at, bytes)) = self.any() else { return };
        self.mapped.remove(&at);
        let range = IovaRange::from_len(Iova::new(at), bytes).unwrap();
        #[expect(unsafe_code, reason = "nobody else unmaps")]
        // SAFETY: the range was mapped here, and is not used any more.
        let unsynced = unsafe { self.domain.remove(range) }.unwrap();
        let _ = unsynced.sync().unwrap();
    }

    /// Several mappings by one sync.
    #[expect(unsafe_code, reason = "nobody else unmaps")]
    fn unmap_several(&mut self) {
        let mut gather = self.domain.gather();
        for _ in 0..1 + self.rng.below(12) {
            let Some((at, bytes)) = self.any() else { break };
            self.mapped.remove(&at);
            let range = IovaRange::from_len(Iova::new(at), bytes).unwrap();
            // SAFETY: the range was mapped here, and is not used any more.
            let unsynced = unsafe { self.domain.remove(range) }.unwrap();
            let (more, _) = unsynced.into_gather();
            // SAFETY: both are of this domain.
            unsafe { self.domain.merge(&mut gather, more) };
        }
        // SAFETY: the gather is of this domain.
        let _ = unsafe { self.domain.sync(gather) }.unwrap();
    }

    /// Hardware has nothing that the tables contradict, and translates as it should.
    fn look(&mut self) {
        let commands = (self.commands)();
        for told in commands.iter().filter(|told| told.space == self.space) {
            self.iotlb.invalidate(&told.invalidation()).unwrap();
        }
        assert_eq!(self.iotlb.stale_leaves(IovaRange::ALL), [], "after {commands:x?}");
        assert_eq!(self.iotlb.stale_links(IovaRange::ALL), [], "after {commands:x?}");
        let any: Vec<u64> = (0..8).map(|_| self.rng.below(SPACE)).collect();
        let near = |(&at, &(bytes, _)): (&u64, &(u64, u64))| {
            [at, at + bytes - 1, at + bytes / 2, at.saturating_sub(1), at + bytes]
        };
        let all = self.mapped.iter().flat_map(near).chain(any).collect::<Vec<_>>();
        for at in all {
            let found =
                self.mapped.range(..=at).next_back().filter(|(start, it)| at - *start < it.0);
            let expected = found.map(|(start, it)| it.1 + (at - start));
            let hit = self.iotlb.translate(Iova::new(at), Access::Read);
            assert_eq!(
                hit.ok().map(|hit| hit.paddr.get()),
                expected,
                "{at:#x} after {commands:x?}"
            );
        }
    }
}
