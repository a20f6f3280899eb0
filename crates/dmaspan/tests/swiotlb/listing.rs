//! A pool lists the slots that are held, and what for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::Span;
use dmaspan::swiotlb::{Growth, ListedSlots, PoolConfig, SlotPlace, SlotRequest, SlotUse};
use dmaspan_sim::rng::Rng;

use crate::common::{ORIGINALS, RAM, Rig, SLOT, original, span};

fn any() -> SlotRequest {
    SlotRequest::default()
}

/// The slots around a span, all of them.
fn slots(of: Span) -> impl Iterator<Item = u64> {
    let first = of.paddr().get() & !(SLOT - 1);
    (first..=of.last().get()).step_by(usize::try_from(SLOT).unwrap())
}

fn slots_of(listed: &[ListedSlots], held: SlotUse) -> Vec<u64> {
    listed.iter().filter(|run| run.held == held).flat_map(|run| slots(run.span)).collect()
}

#[test]
fn a_listing_is_complete_sorted_and_tells_leases_and_quarantine_apart() {
    let growth = Some(Growth::new(16 * SLOT, 128 * SLOT));
    let rig = Rig::with(48, PoolConfig { growth, ..PoolConfig::new(3) });
    let (mut held, mut leases, mut kept) = (Vec::new(), Vec::new(), Vec::new());
    let mut rng = Rng::new(11);
    let mut seen = [false; 4];
    for n in 0..4000 {
        rig.cpu.set(rng.index(3));
        let len = 1 + rng.below(3 * SLOT);
        match rng.below(20) {
            0..8 if !held.is_empty() => {
                let slot = held.swap_remove(rng.index(held.len()));
                rig.pool.release(slot).unwrap();
            }
            8 | 9 => leases.extend(rig.pool.lease(len, &any())),
            10 | 11 if !leases.is_empty() => drop(leases.swap_remove(rng.index(leases.len()))),
            12 if kept.len() < 8 && !held.is_empty() => {
                let slot = held.swap_remove(rng.index(held.len()));
                kept.push(slot.span());
                rig.pool.quarantine(slot).unwrap();
            }
            13 => drop(rig.pool.grow()),
            14 if n % 5 == 0 => drop(rig.pool.shrink()),
            _ => held.extend(rig.pool.take(original(ORIGINALS, len), &any())),
        }
        if n % 20 != 0 {
            continue;
        }
        let listed: Vec<_> = rig.pool.list().collect();
        assert!(listed.is_sorted_by(|a, b| a.span.last() < b.span.paddr()));
        let sorted = |spans: Vec<Span>| {
            let mut all: Vec<_> = spans.into_iter().flat_map(slots).collect();
            all.sort_unstable();
            all
        };
        let mapped = sorted(held.iter().map(|slot| slot.span()).collect());
        assert_eq!(slots_of(&listed, SlotUse::Mapped), mapped);
        let leased = sorted(leases.iter().map(|lease| lease.span()).collect());
        assert_eq!(slots_of(&listed, SlotUse::Leased), leased);
        assert_eq!(slots_of(&listed, SlotUse::Quarantined), sorted(kept.clone()));
        let bytes: u64 = listed.iter().map(|run| run.span.len()).sum();
        assert_eq!(bytes, rig.pool.stats().used);
        for run in &listed {
            seen[match run.place {
                SlotPlace::Base { area: 0, .. } => 0,
                SlotPlace::Base { .. } => 1,
                SlotPlace::Grown { .. } => 2,
                _ => 3,
            }] = true;
        }
    }
    for (n, name) in
        ["an area", "another area", "what was added", "single memory"].iter().enumerate()
    {
        assert!(seen[n], "{name} had slots that were held");
    }
    held.into_iter().for_each(|slot| rig.pool.release(slot).unwrap());
}

#[test]
fn a_picture_has_a_line_for_each_run_and_says_how_full_the_pool_is() {
    let rig = Rig::new(64, 1);
    let first = rig.pool.take(original(ORIGINALS, 2 * SLOT), &any()).unwrap();
    let lease = rig.pool.lease(SLOT, &any()).unwrap();
    let lost = rig.pool.take(original(ORIGINALS, 1), &any()).unwrap();
    rig.pool.quarantine(lost).unwrap();
    assert_eq!(
        rig.pool.dump().to_string(),
        "0x100000..=0x100fff mapped, 2 slots in area 0 of span 0\n\
         0x101000..=0x1017ff leased, 1 slots in area 0 of span 0\n\
         0x101800..=0x101fff in quarantine, 1 slots in area 0 of span 0\n\
         0x2000 of 0x20000 bytes held, 0x800 in quarantine, 0x0 leaked\n"
    );
    assert!(format!("{:?}", rig.pool).contains("used: 8192"), "{:?}", rig.pool);
    drop(lease);
    rig.pool.release(first).unwrap();
    let listed: Vec<_> = rig.pool.list().map(|run| (run.span, run.held)).collect();
    assert_eq!(listed, [(span(RAM + 3 * SLOT, SLOT), SlotUse::Quarantined)]);
}

#[test]
fn slots_that_stay_are_listed_once_while_threads_take_and_release_others() {
    let rig = Rig::new(256, 2);
    let lease = rig.pool.lease(8 * SLOT, &any()).unwrap();
    let pool = Arc::clone(&rig.pool);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..4000 {
                let len = 1 + n % (4 * SLOT);
                let slot = pool.take(original(ORIGINALS, len), &any()).unwrap();
                pool.release(slot).unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            let listed: Vec<_> = rig.pool.list().collect();
            assert!(listed.is_sorted_by(|a, b| a.span.last() < b.span.paddr()));
            let leased = listed.iter().filter(|run| run.held == SlotUse::Leased);
            assert_eq!(leased.map(|run| run.span).collect::<Vec<_>>(), [lease.span()]);
        }
    });
}
