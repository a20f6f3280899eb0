//! Random operations against the interval model: after each, devices try mapped, unmapped,
//! read-only and just-unmapped addresses.
//!
//! `DMASPAN_SEED` replays one seed, `DMASPAN_TURNS` changes how many operations a seed is.

use std::cell::Cell;
use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS2, Gap, TableMemory};
use dmaspan::iommu::Target;
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
use dmaspan_drivers::arm_smmu::SmmuV2Config;
use dmaspan_sim::model::{Coverage, IntervalModel};
use dmaspan_sim::smmu_v2::{Behaviour, Smmu, SmmuConfig, SyncCompletion, TakesEffect};
use dmaspan_sim::walker::Access;

use super::host::LeftOut;
use super::rig::{Attached, Rig, Tables, TestDomain, arena, granule, range, target};
use crate::for_all_tables;

/// Turns of one seed of one format. There are nine formats, and what a turn would do may be
/// impossible.
const TURNS: u64 = 2500;

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::try_from(self.below(of.len() as u64)).unwrap()]
    }
}

/// How often each thing was done and tried, so that a test can see that nothing was left out.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    maps: u64,
    unmaps: u64,
    protects: u64,
    splits: u64,
    switches: u64,
    granted: u64,
    refused: u64,
}

struct World<F: Tables>
where
    Arena: TableMemory<F::Word>,
{
    rig: Rig,
    rng: Rng,
    domains: [Arc<TestDomain<F>>; 2],
    models: [IntervalModel; 2],
    streams: [Attached<F>; 3],
    /// The domain of each stream, if it has one.
    routes: [Option<usize>; 3],
    /// Where all IOVAs are.
    window: u64,
    /// Where something changed lately.
    recent: Vec<u64>,
    done: Done,
}

const STREAMS: [u16; 3] = [1, 2, 0x1234];
/// The bytes of IOVAs in use: with the 4K granule 32 tables of the lowest level.
const WINDOW: u64 = 64 << 20;

impl<F: Tables> World<F>
where
    Arena: TableMemory<F::Word>,
{
    fn new(seed: u64, left_out: LeftOut) -> Self {
        let mut rng = Rng(seed);
        let tables = arena();
        let vmid16 = rng.below(2) == 0;
        let hardware = SmmuConfig { vmid16, ..SmmuConfig::default() };
        let hardware = Arc::new(Smmu::new(hardware, tables.clone()).unwrap());
        let sync = SyncCompletion::AfterPolls(u32::try_from(rng.below(3)).unwrap());
        let invalidations = rng.one(&[TakesEffect::AtSync, TakesEffect::AtOnce]);
        hardware.set_behaviour(Behaviour { sync, invalidations, ..Default::default() });
        let rig = Rig::over(hardware, tables, SmmuV2Config::new(), left_out);
        let domains = [rig.domain::<F>(), rig.domain::<F>()];
        let streams = STREAMS.map(|id| rig.stream::<F>(id.into()));
        let windows = (domains[0].geometry().aperture.last().get() >> 26) + 1;
        let window = rng.below(windows) * WINDOW;
        Self {
            rig,
            rng,
            domains,
            models: Default::default(),
            streams,
            routes: [None; 3],
            window,
            recent: Vec::new(),
            done: Done::default(),
        }
    }

    /// A range of whole granules in the window, aligned to some leaf size, or not.
    fn some_range(&mut self) -> IovaRange {
        let page = granule::<F>();
        let lg2 = self.rng.one(&[F::GRANULE_LG2, F::GRANULE_LG2, 16, 20, 21, 25]);
        let align = (1u64 << lg2).max(page);
        let start = self.rng.below(WINDOW / align) * align;
        let longest = (WINDOW - start).min(self.rng.one(&[8 * page, 40 * page, 4 << 20, 32 << 20]));
        let pages = 1 + self.rng.below(longest / page);
        let len = if self.rng.below(2) == 0 { pages * page } else { align.min(WINDOW - start) };
        range(self.window + start, len)
    }

    /// A range that is mapped, or a part of it.
    fn mapped_range(&mut self, domain: usize) -> Option<IovaRange> {
        let runs = self.models[domain].runs(range(self.window, WINDOW));
        if runs.is_empty() {
            return None;
        }
        let run = self.rng.one(&runs).iova;
        if self.rng.below(2) == 0 {
            return Some(run);
        }
        let page = granule::<F>();
        let pages = run.len_less_one() / page + 1;
        let first = self.rng.below(pages);
        let len = 1 + self.rng.below(pages - first);
        Some(range(run.start().get() + first * page, len * page))
    }

    fn spans(&mut self, bytes: u64) -> Vec<Span> {
        let page = granule::<F>();
        let pieces = self.rng.one(&[1, 1, 2, 5]).min(bytes / page);
        let mut left = bytes;
        (0..pieces)
            .map(|piece| {
                let rest = left / page - (pieces - piece - 1);
                let pages = if piece + 1 == pieces { rest } else { 1 + self.rng.below(rest) };
                left -= pages * page;
                // Aligned to a block, or to a page.
                let lg2 = self.rng.one(&[F::GRANULE_LG2, 21, 25]);
                let paddr = self.rng.below(1 << (31 - lg2)) << lg2;
                Span::new(PhysAddr::new(paddr), pages * page).unwrap()
            })
            .collect()
    }

    #[expect(unsafe_code, reason = "simulated memory, one thread")]
    fn map(&mut self, domain: usize) {
        let at = self.some_range();
        if self.models[domain].covered(at) != Coverage::None {
            return;
        }
        let spans = self.spans(at.len_less_one() + 1);
        let prot = self.prot();
        // SAFETY: there is one thread, and the memory is simulated.
        unsafe { self.domains[domain].map_spans(at.start(), &spans, prot) }.unwrap();
        self.models[domain].map(at.start(), &spans, prot).unwrap();
        self.done.maps += 1;
        self.touched(at);
    }

    fn prot(&mut self) -> Prot {
        self.rng.one(&[Prot::READ, Prot::READ_WRITE, Prot::READ | Prot::CACHE])
    }

    #[expect(unsafe_code, reason = "simulated memory, one thread")]
    fn unmap(&mut self, domain: usize) {
        let Some(at) = self.mapped_range(domain) else { return };
        self.split_at_ends(domain, at);
        let mut room = SpanBuf::room::<4>();
        let mut spans = SpanBuf::new(&mut room);
        // SAFETY: there is one thread.
        let mut unmapped = unsafe { self.domains[domain].unmap(at, &mut spans) }.unwrap();
        let mut removed = Vec::new();
        loop {
            removed.extend_from_slice(spans.spans());
            let (_synced, rest) = unmapped.sync().unwrap();
            let Some(rest) = rest else { break };
            spans = SpanBuf::new(&mut room);
            // SAFETY: there is one thread.
            unmapped = unsafe { self.domains[domain].resume(rest, &mut spans) };
        }
        let bytes: u64 = removed.iter().map(|span| span.len()).sum();
        assert_eq!(bytes, at.len_less_one() + 1, "spans of {at}");
        self.models[domain].unmap(at);
        self.done.unmaps += 1;
        self.touched(at);
    }

    #[expect(unsafe_code, reason = "simulated memory, one thread")]
    fn protect(&mut self, domain: usize) {
        let Some(at) = self.mapped_range(domain) else { return };
        self.split_at_ends(domain, at);
        let prot = self.prot();
        // SAFETY: there is one thread, and the memory is simulated.
        unsafe { self.domains[domain].protect(at, prot, Gap::Accept) }.unwrap();
        let runs = self.models[domain].runs(at);
        self.models[domain].unmap(at);
        for run in runs {
            let span = Span::new(run.paddr, run.iova.len_less_one() + 1).unwrap();
            self.models[domain].map(run.iova.start(), &[span], prot).unwrap();
        }
        self.done.protects += 1;
        self.touched(at);
    }

    /// No leaf reaches out of the range any more.
    #[expect(unsafe_code, reason = "simulated memory, one thread")]
    fn split_at_ends(&mut self, domain: usize, at: IovaRange) {
        let behind =
            at.last().checked_add(1).filter(|behind| self.models[domain].lookup(*behind).is_some());
        for border in [Some(at.start()), behind].into_iter().flatten() {
            // SAFETY: there is one thread.
            unsafe { self.domains[domain].split(border, Gap::Accept) }.unwrap();
            self.done.splits += 1;
        }
    }

    fn switch(&mut self) {
        let stream = usize::try_from(self.rng.below(3)).unwrap();
        let to = self.rng.one(&[None, Some(0), Some(1)]);
        let target = match to {
            None => Target::Blocked,
            Some(domain) => target(&self.domains[domain]),
        };
        self.streams[stream].replace(target).unwrap();
        self.routes[stream] = to;
        self.done.switches += 1;
    }

    /// Remembers the ends of a range, and somewhere in it.
    fn touched(&mut self, at: IovaRange) {
        let (start, last) = (at.start().get(), at.last().get());
        let middle = start + self.rng.below(last - start);
        let around = [start, middle, last, start.wrapping_sub(1), last.wrapping_add(1)];
        self.recent.splice(0..0, around);
        self.recent.truncate(15);
    }

    /// Tries an address as each stream, both ways.
    fn check(&mut self, iova: u64) {
        let limit = self.domains[0].geometry().aperture.last().get();
        for (stream, route) in STREAMS.into_iter().zip(self.routes) {
            let found = route.and_then(|domain| self.models[domain].lookup(Iova::new(iova)));
            for access in [Access::Read, Access::Write] {
                let needed = if access == Access::Read { Prot::READ } else { Prot::WRITE };
                let expected = found.filter(|(_, prot)| prot.contains(needed));
                let expected = expected.map(|(paddr, _)| paddr.get()).filter(|_| iova <= limit);
                let reached = self.rig.probe(stream, iova, access);
                assert_eq!(
                    reached, expected,
                    "{access:?} of {iova:#x} by {stream:#x} in {route:?}, (left: hardware)"
                );
                *if expected.is_some() {
                    &mut self.done.granted
                } else {
                    &mut self.done.refused
                } += 1;
            }
        }
    }

    fn turn(&mut self) {
        let domain = usize::try_from(self.rng.below(2)).unwrap();
        match self.rng.below(10) {
            0..=3 => self.map(domain),
            4..=6 => self.unmap(domain),
            7 => self.protect(domain),
            8 => {
                if let Some(at) = self.mapped_range(domain) {
                    self.split_at_ends(domain, at);
                    self.touched(at);
                }
            }
            _ => self.switch(),
        }
        for iova in self.recent.clone() {
            self.check(iova);
        }
        for _ in 0..4 {
            let iova = self.window + self.rng.below(WINDOW);
            self.check(iova);
        }
        self.rig.driver.handle_faults().unwrap();
    }
}

/// Runs a seed. Says how to see a disagreement again.
fn run<F: Tables>(seed: u64, turns: u64, left_out: LeftOut) -> Done
where
    Arena: TableMemory<F::Word>,
{
    let mut world = World::<F>::new(seed, left_out);
    for turn in 0..turns {
        let step = AssertUnwindSafe(|| world.turn());
        if let Err(panic) = catch_unwind(step) {
            let name = F::NAME;
            eprintln!("{name}, 2^{}: turn {turn}: DMASPAN_SEED={seed:#x}", F::GRANULE_LG2);
            resume_unwind(panic);
        }
    }
    let counters = world.rig.hardware.counters();
    assert_eq!((counters.misconfigured, counters.undefined_writes), (0, 0));
    assert_ne!(counters.hits, 0);
    let World { rig, domains, streams, done, .. } = world;
    drop((streams, domains));
    assert_eq!(rig.tables.tables(), 0, "tables are left");
    assert_eq!((rig.hardware.cached_leaves(), rig.hardware.cached_links()), (0, 0));
    done
}

fn setting(name: &str) -> Option<u64> {
    let value = env::var(name).ok()?;
    let parsed = match value.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => value.parse(),
    };
    Some(parsed.unwrap_or_else(|_| panic!("{name} is no number: {value}")))
}

fn agrees<F: Tables>(all: &Cell<u64>)
where
    Arena: TableMemory<F::Word>,
{
    let turns = setting("DMASPAN_TURNS").unwrap_or(TURNS);
    let letters = F::NAME.bytes().map(u64::from);
    let name =
        letters.fold(F::GRANULE_LG2.into(), |sum: u64, letter| sum.wrapping_mul(31) ^ letter);
    let seed = setting("DMASPAN_SEED").unwrap_or(name);
    let done = run::<F>(seed, turns, LeftOut::Nothing);
    println!("{}, 2^{}: {done:?}", F::NAME, F::GRANULE_LG2);
    let least = turns / 100;
    let each = [done.maps, done.unmaps, done.protects, done.splits, done.switches];
    assert!(each.iter().all(|&count| count >= least), "{done:?}");
    assert!(done.granted > turns && done.refused > turns, "{done:?}");
    all.set(all.get() + each.iter().sum::<u64>());
}

#[test]
fn hardware_and_model_agree_whatever_is_done() {
    let all = Cell::new(0);
    for_all_tables!(agrees, &all);
    assert!(setting("DMASPAN_TURNS").is_some() || all.get() >= 10_000, "{} operations", all.get());
}

fn disagrees<F: Tables>(left_out: LeftOut)
where
    Arena: TableMemory<F::Word>,
{
    // It is a device that reached what it must not, and no other check, that has to notice.
    let caught = (0..8).any(|seed| match catch_unwind(|| run::<F>(seed, 300, left_out)) {
        Ok(_) => false,
        Err(panic) => {
            panic.downcast_ref::<String>().is_some_and(|said| said.contains("(left: hardware)"))
        }
    });
    assert!(caught, "{}: {left_out:?} was not noticed", F::NAME);
}

#[test]
fn a_driver_that_does_not_invalidate_is_caught() {
    disagrees::<ArmLpaeS1<12>>(LeftOut::Invalidations);
    disagrees::<ArmLpaeS2<12>>(LeftOut::Invalidations);
}

#[test]
fn a_driver_that_does_not_wait_is_caught() {
    disagrees::<ArmLpaeS1<12>>(LeftOut::Syncs);
    disagrees::<ArmLpaeS2<12>>(LeftOut::Syncs);
}

#[test]
fn a_driver_that_names_another_asid_or_vmid_is_caught() {
    disagrees::<ArmLpaeS1<12>>(LeftOut::LastBitOfIds);
    disagrees::<ArmLpaeS2<12>>(LeftOut::LastBitOfIds);
}
