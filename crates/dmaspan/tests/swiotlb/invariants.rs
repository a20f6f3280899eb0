//! The invariants of slots, case by case; `random` has all of them in random histories.

use dmaspan::Direction;
use dmaspan::swiotlb::{Error, Fill, PoolConfig, SlotRequest};
use proptest::prelude::*;

use crate::common::{SLOT, original, span};
use crate::flat::{FlatRig, FlatSlot, POISON, SOURCE};

fn any() -> SlotRequest {
    SlotRequest::default()
}

fn take(rig: &FlatRig, len: u64) -> FlatSlot {
    rig.pool.take(original(SOURCE, len), &any()).unwrap()
}

#[test]
fn a_run_over_more_areas_than_can_be_is_disjoint_from_others() {
    for areas in [129, 300, usize::MAX] {
        let rig = FlatRig::simple(300, PoolConfig::new(areas));
        let mut slots: Vec<_> = (0..300).map(|_| take(&rig, SLOT)).collect();
        slots.sort_by_key(|slot| slot.span().paddr());
        // As many are free, but not together.
        for slot in slots.drain(126..128) {
            rig.pool.release(slot).unwrap();
        }
        rig.pool.release(slots.remove(0)).unwrap();
        let refused = rig.pool.take(original(SOURCE, 3 * SLOT), &any()).unwrap_err();
        assert_eq!(refused, Error::Full { len: 3 * SLOT, free: 3 * SLOT });
        assert_eq!(take(&rig, 2 * SLOT).span(), span(0x10_0000 + 126 * SLOT, 2 * SLOT));
    }
}

#[test]
fn places_are_as_asked_for_at_the_top_of_the_address_space() {
    let bytes = 64 * SLOT;
    let base = 0_u64.wrapping_sub(bytes);
    let rig = FlatRig::new(vec![span(base, bytes)], PoolConfig::new(2));
    let request = |keep_bits, boundary| SlotRequest { keep_bits, boundary, ..any() };
    let at = |addr, request: &SlotRequest| rig.pool.take(original(addr, 4096), request);
    let slot = at(0xf000, &request(0xffff, Some(0x8000))).unwrap();
    assert_eq!(slot.span().paddr().get() & 0xffff, 0xf000);
    assert_eq!(
        at(0x7800, &request(0xffff, Some(0x8000))).unwrap_err(),
        Error::Unfit { original: span(0x7800, 4096), request: request(0xffff, Some(0x8000)) }
    );
    // Far below, by the low bits of the original.
    for keep_bits in [u64::MAX >> 1, u64::MAX >> 8, u64::MAX >> 21, u64::MAX] {
        for boundary in [None, Some(1 << 12), Some(1 << 63)] {
            let request = request(keep_bits, boundary);
            assert!(matches!(at(0x1000, &request), Err(Error::Unfit { .. })), "{request:x?}");
        }
    }
    let end = rig.pool.take(original(u64::MAX, 1), &request(0xffff, Some(1))).unwrap();
    assert_eq!(end.span(), span(u64::MAX, 1));
}

#[test]
fn only_the_bytes_asked_for_reach_the_original() {
    let rig = FlatRig::simple(16, PoolConfig::new(1));
    let around = span(SOURCE, 8192);
    let request = SlotRequest { keep_bits: 0xfff, granule: 4096, ..any() };
    let from = original(SOURCE + 1000, 3000);
    let bounced = rig.pool.map(from, Direction::FromDevice, Fill::Copy, &request).unwrap();
    let at = bounced.span().paddr().get();
    rig.memory.write(at & !0xfff, &[9; 4096]);
    rig.pool.unmap(bounced).unwrap();
    let mut expected = vec![POISON; 8192];
    expected[1000..4000].fill(9);
    assert_eq!(rig.memory.read(around), expected);
}

#[test]
fn a_sync_of_a_part_is_the_whole_one_of_that_part() {
    let rig = FlatRig::simple(16, PoolConfig::new(1));
    let from = original(SOURCE + 5, 6000);
    let bounced = rig.pool.map(from, Direction::Bidirectional, Fill::Copy, &any()).unwrap();
    let at = bounced.span().paddr().get();
    rig.memory.write(at, &[3; 6000]);
    rig.pool.sync_for_cpu(&bounced, 2047, 2).unwrap();
    let mut expected = vec![POISON; 6005];
    expected[5 + 2047..5 + 2049].fill(3);
    assert_eq!(rig.memory.read(span(SOURCE, 6005)), expected);
    rig.memory.write(SOURCE + 5, &[4; 6000]);
    rig.pool.sync_for_device(&bounced, 5999, 1).unwrap();
    let mut expected = vec![3; 6000];
    expected[5999] = 4;
    assert_eq!(rig.memory.read(bounced.span()), expected);
    rig.pool.unmap(bounced).unwrap();
}

#[test]
fn one_place_of_a_huge_alignment_is_found() {
    for lg2 in [40, 43, 44, 50, 62] {
        let base = 3 << lg2 | 0x10_0000;
        let rig = FlatRig::new(vec![span(base, 64 * SLOT)], PoolConfig::new(2));
        let request = SlotRequest { keep_bits: (1 << lg2) - 1, ..any() };
        let slot = rig.pool.take(original(0x10_5678, 4096), &request).unwrap();
        assert_eq!(slot.span(), span(base + 0x5678, 4096));
        let again = rig.pool.take(original(0x10_5678, 4096), &request).unwrap_err();
        assert!(matches!(again, Error::Full { .. }));
        assert!(rig.pool.take(original(0xf_f000, 4096), &request).is_err());
    }
}

#[test]
fn a_run_is_found_where_no_hint_knows_it() {
    // Single slots, given back one after the other: only the bitmap knows how they join.
    let rig = FlatRig::simple(512, PoolConfig::new(4));
    let slots: Vec<_> = (0..512).map(|_| take(&rig, SLOT)).collect();
    for (n, slot) in slots.into_iter().enumerate() {
        if n % 97 != 0 {
            rig.pool.release(slot).unwrap();
        }
    }
    for len in [96, 96, 96, 96, 96, 26] {
        let slot = take(&rig, len * SLOT);
        assert_eq!(slot.len(), len * SLOT);
    }
    assert_eq!(rig.pool.stats().free_bytes(), 0);
}

#[test]
fn padding_of_a_granule_larger_than_slots_is_zero_and_the_neighbours_are_not() {
    let rig = FlatRig::simple(32, PoolConfig::new(1));
    let granule = 8 * SLOT;
    let request = SlotRequest { keep_bits: granule - 1, granule, ..any() };
    let first = rig.pool.take(original(SOURCE + 0x1234, 100), &request).unwrap();
    let start = first.span().paddr().get() - 0x1234;
    assert_eq!(start % granule, 0);
    let mut expected = vec![0; 0x4000];
    expected[0x1234..0x1234 + 100].fill(POISON);
    expected.resize(0x8000, POISON);
    assert_eq!(rig.memory.read(span(start, 0x8000)), expected);
}

#[test]
fn a_foreign_pool_gives_everything_back() {
    let (rig, other) =
        (FlatRig::simple(8, PoolConfig::new(1)), FlatRig::simple(8, PoolConfig::new(1)));
    let map =
        |fill| rig.pool.map(original(SOURCE, 100), Direction::FromDevice, fill, &any()).unwrap();
    let (filled, overwritten) = (map(Fill::Copy), map(Fill::Overwritten));
    let slot = take(&rig, 100);
    let foreign = |at: dmaspan::Span| Error::Foreign { addr: at.paddr().get() };
    let before = (rig.pool.stats(), other.pool.stats());
    assert_eq!(other.pool.sync_for_cpu(&filled, 0, 1), Err(foreign(filled.span())));
    assert_eq!(other.pool.sync_for_device(&filled, 0, 1), Err(foreign(filled.span())));
    let kept = other.pool.unmap(filled).unwrap_err();
    assert_eq!(kept.error, foreign(kept.handle.span()));
    let filled = kept.handle;
    let kept = other.pool.unmap_written(overwritten, 100).unwrap_err();
    assert_eq!(kept.error, foreign(kept.handle.span()));
    let overwritten = kept.handle;
    let kept = other.pool.quarantine(slot).unwrap_err();
    assert_eq!(kept.error, foreign(kept.handle.span()));
    let kept = other.pool.release(kept.handle).unwrap_err();
    assert_eq!(kept.error, foreign(kept.handle.span()));
    assert_eq!((rig.pool.stats(), other.pool.stats()), before);
    rig.pool.release(kept.handle).unwrap();
    rig.pool.unmap(filled).unwrap();
    rig.pool.unmap_written(overwritten, 0).unwrap();
    assert_eq!(rig.pool.stats().used, 0);
}

#[test]
fn high_water_is_the_most_that_was_held() {
    let rig = FlatRig::simple(64, PoolConfig::new(1));
    let (a, b) = (take(&rig, 10 * SLOT), take(&rig, 20 * SLOT));
    rig.pool.release(a).unwrap();
    let c = take(&rig, 5 * SLOT);
    assert_eq!(rig.pool.stats().high_water, 30 * SLOT);
    rig.pool.reset_high_water();
    assert_eq!(rig.pool.stats().high_water, 25 * SLOT);
    for slot in [b, c] {
        rig.pool.release(slot).unwrap();
    }
    assert_eq!(rig.pool.stats().high_water, 25 * SLOT);
}

#[test]
fn each_area_counts_what_its_cpus_hold_and_held_at_most() {
    // Two areas of 128 slots, and what is left over in a third.
    let rig = FlatRig::simple(300, PoolConfig::new(3));
    let areas = || -> Vec<[u64; 3]> {
        let all = rig.pool.area_stats().enumerate().map(|(number, area)| {
            assert_eq!((area.span, area.area as usize), (0, number));
            [area.bytes, area.used, area.high_water].map(|bytes| bytes / SLOT)
        });
        all.collect()
    };
    assert_eq!(areas(), [[128, 0, 0], [128, 0, 0], [44, 0, 0]]);
    rig.place.set(1, 0);
    let (kept, gone) = (take(&rig, 10 * SLOT), take(&rig, 20 * SLOT));
    rig.place.set(2, 0);
    let other = take(&rig, SLOT);
    rig.pool.release(gone).unwrap();
    assert_eq!(areas(), [[128, 0, 0], [128, 10, 30], [44, 1, 1]]);
    let stats = rig.pool.stats();
    let sums = |at: usize| areas().iter().map(|area| area[at] * SLOT).sum::<u64>();
    assert_eq!([sums(0), sums(1), sums(2)], [stats.bytes, stats.used, stats.high_water]);
    for slot in [kept, other] {
        rig.pool.release(slot).unwrap();
    }
    // A run over several areas counts in each.
    let across = take(&rig, 200 * SLOT);
    assert_eq!(areas().iter().map(|area| area[1]).sum::<u64>(), 200);
    assert!(areas().iter().filter(|area| area[1] != 0).count() > 1);
    rig.pool.release(across).unwrap();
    rig.pool.reset_high_water();
    assert_eq!(areas(), [[128, 0, 0], [128, 0, 0], [44, 0, 0]]);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn the_longest_slot_is_there_for_every_original_and_a_longer_one_is_not(
        slot_lg2 in 6_u32..14,
        (base, slots) in (0_u64..64, 1_u64..64),
        (keep, granule) in (0_u32..16, 0_u32..16),
        boundary in prop::option::of(0_u32..20),
        reach in prop::option::of(0_u64..1 << 18),
    ) {
        let slot_bytes = 1 << slot_lg2;
        let config = PoolConfig { slot_bytes, ..PoolConfig::new(2) };
        let base = base * slot_bytes;
        let rig = FlatRig::new(vec![span(base, slots * slot_bytes)], config);
        let request = SlotRequest {
            keep_bits: (1 << keep) - 1,
            granule: 1 << granule,
            last: reach.map_or(u64::MAX, |reach| base + reach),
            boundary: boundary.map(|lg2| 1 << lg2),
        };
        let has = |low: u64, len: u64| match rig.pool.take(original(SOURCE + low, len), &request) {
            Ok(slot) => rig.pool.release(slot).is_ok(),
            Err(_) => false,
        };
        let longest = rig.pool.max_len(&request);
        let unit = slot_bytes.min(64);
        let lows: Vec<_> = (0..=request.keep_bits / unit)
            .flat_map(|n| [n * unit, (n * unit + unit - 1).min(request.keep_bits)])
            .collect();
        prop_assert!(longest == 0 || lows.iter().all(|low| has(*low, longest)));
        prop_assert!(lows.iter().any(|low| !has(*low, longest + 1)), "longer than {longest:#x}");
    }
}
