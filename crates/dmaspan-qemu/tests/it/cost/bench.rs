//! Memory mapped by leaves of one size, unmapped, and what hardware was told.

use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, Format, PageTable};
use dmaspan::iommu::{Attachment, Domain, IommuOps, Port, Prepared, Target};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf, lg2};
use dmaspan_qemu::{Arch, Buffer, DmaRefused, Machine, Pci, Tap, TestDev, ready};

use crate::cost::fewest::{Forget, Hardware, Kind};

/// log2 of the granule of all formats here.
pub(crate) const PAGE_LG2: u32 = 12;
/// log2 of the memory that is mapped.
const MEMORY_LG2: u32 = 30;
/// The machine's RAM: all that a PC has below 4 GiB in one piece.
const RAM: u64 = 2 << 30;
/// Where the device is.
pub(crate) const SLOT: u8 = 8;
/// The tables of 2 GiB mapped by pages take 4 MiB.
const TABLES: u64 = 14 << 20;

/// What hardware was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counted {
    /// The commands to forget.
    pub(crate) forget: Forget,
    /// The commands to wait.
    pub(crate) waits: u64,
    /// How often it was told that there are commands.
    pub(crate) doorbells: u64,
}

/// A domain of an IOMMU, with a device in it.
pub(crate) trait Bench {
    /// Maps the ranges by leaves of `2^leaf_lg2` bytes, lets the device use them, unmaps them under
    /// one sync, and sees the device refused where it was before. Returns what the sync told
    /// hardware.
    fn unmap(&mut self, ranges: &[IovaRange], leaf_lg2: u32) -> Counted;

    /// Maps as many pages, and unmaps and syncs each of them on its own.
    fn unmap_by_page(&mut self, pages: u64) -> Counted;
}

/// A machine that was started, and what its IOMMU's manual says.
pub(crate) type Started = (Box<dyn Bench>, Hardware);

/// A machine with a device, and what else is behind `-device`; `None` without QEMU.
pub(crate) fn machine(arch: Arch, kind: &str, devices: &[&str]) -> Option<Pci> {
    let builder = Machine::builder(ready(arch)?, kind).ram(RAM);
    let builder = devices.iter().fold(builder, |builder, device| builder.device(device));
    let builder = builder.device(&format!("iommu-testdev,addr={SLOT:x}"));
    Some(Pci::new(&builder.start().expect("QEMU starts")))
}

/// An IOMMU by the types of its driver.
pub(crate) struct Iommu<F: Format<Word = u64>, O: IommuOps, P: Port> {
    domain: Arc<Domain<F, Arena, O>>,
    tap: Tap,
    kind: fn(&[u64]) -> Kind,
    device: TestDev,
    /// What is mapped: all of it may be written.
    memory: Buffer,
    _attached: Attachment<P>,
}

impl<F, O, P> Iommu<F, O, P>
where
    F: Format<Word = u64>,
    O: IommuOps,
    P: Port<Paging = Domain<F, Arena, O>>,
{
    /// With a new domain, to which the stream of the first device is attached.
    pub(crate) fn new(
        (pci, tap): (&Pci, &Tap),
        format: F,
        ops: O,
        port: P,
        kind: fn(&[u64]) -> Kind,
    ) -> Self {
        let ram = pci.machine().ram();
        let tables = ram.arena(TABLES).expect("there is room");
        let table = PageTable::new(format, tables).expect("there is room");
        let domain = Arc::new(Domain::new(table, ops).expect("nothing is mapped"));
        let attached = Attachment::new(port).ok().expect("hardware answers");
        let target = Target::Paging(Prepared::new(Arc::clone(&domain)));
        attached.attach(target).expect("the hardware walks such tables");
        let device = TestDev::new(pci, SLOT).expect("it is there");
        let memory = ram.reserve(lg2::size(MEMORY_LG2)).expect("there is room");
        Self { domain, tap: tap.clone(), kind, device, memory, _attached: attached }
    }

    /// What `told` tells hardware.
    fn count(&self, told: impl FnOnce()) -> Counted {
        drop(self.tap.take());
        let before = self.tap.doorbells();
        told();
        let doorbells = self.tap.doorbells() - before;
        let (mut named, mut all, mut waits) = (0, 0, 0);
        for command in self.tap.take() {
            match (self.kind)(&command) {
                Kind::Named => named += 1,
                Kind::All => all += 1,
                Kind::Wait => waits += 1,
                Kind::Other => panic!("{command:x?} is no command that an unmap needs"),
            }
        }
        let forget = match (named, all) {
            (named, 0) => Forget::Named(named),
            (0, 1) => Forget::All,
            _ => panic!("{named} commands that name ranges, and {all} that do not"),
        };
        Counted { forget, waits, doorbells }
    }

    /// Maps a range by leaves of that size, and returns the memory at each of its probes.
    fn map(&self, range: IovaRange, leaf_lg2: u32) -> Vec<(Iova, PhysAddr)> {
        let bytes = range.len_less_one() + 1;
        let (start, size) = (self.memory.paddr().get(), lg2::size(MEMORY_LG2));
        // Addresses and memory that are aligned to a page, and not to two of them alike.
        let apart = lg2::size(PAGE_LG2) & !range.start().get();
        let first = if leaf_lg2 == PAGE_LG2 { apart } else { 0 };
        let before_end = bytes.min(size - first);
        let span = |at, len| Span::new(PhysAddr::new(start + at), len).ok();
        let spans: Vec<_> =
            [span(first, before_end), span(0, bytes - before_end)].into_iter().flatten().collect();
        #[expect(unsafe_code, reason = "a device is let at the memory")]
        // SAFETY: 1. Nobody else uses the domain. 2. The memory is reached by atomics alone, and
        // lives as long as the domain.
        let mapped = unsafe { self.domain.map_spans(range.start(), &spans, Prot::READ_WRITE) };
        mapped.expect("nothing is mapped there");
        let place = |at: u64| {
            let paddr = PhysAddr::new(start + (first + at) % size);
            (range.start().wrapping_add(at), paddr)
        };
        [0, lg2::align_down(bytes / 3, 2), bytes - 4].map(place).into()
    }
}

impl<F, O, P> Bench for Iommu<F, O, P>
where
    F: Format<Word = u64>,
    O: IommuOps,
    P: Port<Paging = Domain<F, Arena, O>>,
{
    fn unmap(&mut self, ranges: &[IovaRange], leaf_lg2: u32) -> Counted {
        let probes: Vec<_> = ranges.iter().flat_map(|&range| self.map(range, leaf_lg2)).collect();
        for &(iova, paddr) in &probes {
            let said = self.device.write(iova.get(), paddr, 4);
            assert_eq!(said, Ok(()), "{iova} is mapped to {paddr}");
        }
        let mut gather = self.domain.gather();
        for &range in ranges {
            let mut room = SpanBuf::room::<2>();
            let mut spans = SpanBuf::new(&mut room);
            #[expect(unsafe_code, reason = "the bench owns all addresses")]
            // SAFETY: one thread uses the domain.
            let unmapped = unsafe { self.domain.unmap(range, &mut spans) };
            let (more, rest) = unmapped.expect("it was mapped").into_gather();
            assert!(rest.is_none(), "it was mapped to two spans at most");
            #[expect(unsafe_code, reason = "nothing shows that the gather is of the domain")]
            // SAFETY: it is of the only one that there is.
            unsafe {
                self.domain.merge(&mut gather, more);
            }
        }
        assert_eq!(gather.invalidation().leaf_sizes, lg2::size(leaf_lg2));
        let counted = self.count(|| {
            #[expect(unsafe_code, reason = "nothing shows that the gather is of the domain")]
            // SAFETY: it is of the only one that there is.
            let synced = unsafe { self.domain.sync(gather) };
            let synced = synced.expect("hardware answers");
            assert!(ranges.iter().all(|&range| synced.covers(range)));
        });
        for &(iova, paddr) in &probes {
            let said = self.device.write(iova.get(), paddr, 4);
            assert_eq!(said, Err(DmaRefused::ON_THE_WAY), "{iova} was unmapped");
        }
        counted
    }

    fn unmap_by_page(&mut self, pages: u64) -> Counted {
        let all = IovaRange::from_len(Iova::new(1 << 32), pages << PAGE_LG2);
        let all = all.expect("there are pages");
        self.map(all, PAGE_LG2);
        self.count(|| {
            for page in 0..pages {
                let start = all.start().wrapping_add(page << PAGE_LG2);
                let page = IovaRange::from_len(start, lg2::size(PAGE_LG2)).expect("it is one");
                let mut room = SpanBuf::room::<1>();
                let mut spans = SpanBuf::new(&mut room);
                #[expect(unsafe_code, reason = "the bench owns all addresses")]
                // SAFETY: one thread uses the domain.
                let unmapped = unsafe { self.domain.unmap(page, &mut spans) };
                let synced = unmapped.expect("it was mapped").sync();
                drop(synced.expect("hardware answers"));
            }
        })
    }
}
