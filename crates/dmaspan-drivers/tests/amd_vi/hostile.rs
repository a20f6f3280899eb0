//! Registers and records that say anything, at every entry point.

use std::sync::atomic::Ordering;

use dmaspan::iommu::{
    AllMemory, HardwareError, Invalidation, IommuOps as _, Port as _, ReservedRegions, Scope,
    Tables,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span};
use dmaspan_drivers::Handled;
use dmaspan_sim::rng::Rng;

use crate::fake::{CONTROL, ENABLE, EVENT_TAIL, Fake, Memory, Paging, Rig, config, start};

const RANGES: [(u64, u64); 4] =
    [(0, u64::MAX), (0x7000, 0x7fff), (u64::MAX - 0xfff, u64::MAX), (0x1000, 0x3_ffff)];

/// Each hook once.
fn use_all(rig: &Rig, id: u32) -> Result<(), HardwareError> {
    let Ok(stream) = rig.iommu.stream::<Paging>(id, ReservedRegions::new()) else { return Ok(()) };
    let domain = rig.domain();
    // SAFETY: the fake's devices do nothing.
    let all = unsafe { AllMemory::promise() };
    let mut last = Ok(());
    let mut note = |result: Result<(), HardwareError>| last = result;
    note(stream.translate(&domain));
    let page = Span::new(PhysAddr::new(0x8000), 0x1000).unwrap();
    for iova in [0, 0x7f_0000_0000, 0x3000].map(Iova::new) {
        let range = IovaRange::from_len(iova, 0x1000).unwrap();
        // SAFETY: one thread uses the domain, and there is no memory.
        if unsafe { domain.map_spans(iova, &[page], Prot::READ) }.is_ok() {
            // SAFETY: one thread uses the domain.
            let _ = unsafe { domain.remove(range) }.map(|unsynced| unsynced.sync().is_ok());
        }
    }
    for (start, last) in RANGES {
        let range = IovaRange::new(Iova::new(start), Iova::new(last)).unwrap();
        let scope = Scope::Ranges(&[range]);
        for tables in [Tables::Kept, Tables::Detached] {
            note(domain.ops().invalidate(&Invalidation { scope, leaf_sizes: 1 << 12, tables }));
        }
    }
    note(stream.pass(all));
    note(stream.translate(&domain));
    note(domain.ops().detach());
    note(stream.block());
    last
}

#[test]
fn registers_that_lie_are_survived_and_forgiven() {
    for seed in 0..300 {
        let rig = Rig::new();
        rig.fake.behave(|how| how.lies = Some(Rng::new(seed)));
        for id in [1, 0x3ff, 0x400] {
            // Any answer will do, in bounded time.
            let _ = use_all(&rig, id);
            let _ = rig.iommu.handle_faults();
        }
        rig.fake.behave(|how| how.lies = None);
        // What went wrong meanwhile is noticed by the next batches, and the one behind works.
        let works = (2..6).any(|id| use_all(&rig, id).is_ok());
        assert!(works, "seed {seed}: it does not work any more");
    }
}

#[test]
fn a_start_over_registers_that_lie_ends_and_gives_its_memory_back_or_leaks_it() {
    for seed in 0..300 {
        let memory = Memory::new();
        let fake = Fake::new(&memory);
        fake.behave(|how| how.lies = Some(Rng::new(seed)));
        let started = start(&memory, &fake, config());
        let enabled = fake.peek(CONTROL) & ENABLE != 0;
        if started.is_err() && enabled {
            assert_ne!(memory.live.load(Ordering::Relaxed), 0, "seed {seed}: hardware reads it");
        }
    }
}

#[test]
fn records_of_anything_are_reported_or_passed_over() {
    let mut random = Rng::new(5);
    for _ in 0..200 {
        let rig = Rig::new();
        let _stream = rig.stream(1);
        for _ in 0..100 {
            rig.fake.log([random.next(), random.next()]);
        }
        // One that says that a command was refused is an error of the look that finds it.
        let done = |handled| handled == Ok(Handled::default());
        let looks = (0..200).position(|_| done(rig.iommu.handle_faults()));
        assert!(looks.is_some_and(|looks| looks <= 101), "{looks:?}");
    }
}

#[test]
fn a_tail_of_the_event_log_that_is_anywhere_ends() {
    let mut random = Rng::new(6);
    for _ in 0..300 {
        let rig = Rig::new();
        rig.fake.poke(EVENT_TAIL, random.next() >> random.below(64));
        for _ in 0..3 {
            if let Ok(handled) = rig.iommu.handle_faults() {
                assert!(handled.reported + handled.unclaimed + handled.malformed <= 256);
            }
        }
    }
}
