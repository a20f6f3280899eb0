//! Input that no caller should give: an error that says what is wrong, and nothing changed.

use dmaspan::swiotlb::{Error, Fill, Growth, PoolConfig, PoolStats, SlotRequest, To};
use dmaspan::{Direction, Span};
use proptest::prelude::*;

use crate::common::{SLOT, original, span};
use crate::flat::{FlatRig, NOWHERE, SOURCE, small};

const BASE: u64 = 0x10_0000;

fn any() -> SlotRequest {
    SlotRequest::default()
}

/// A pool of 64 slots, one of them taken, and its statistics.
fn rig() -> (FlatRig, PoolStats) {
    let rig = FlatRig::simple(64, PoolConfig::new(2));
    let _lost = rig.pool.take(original(SOURCE, 1), &any()).unwrap();
    let stats = rig.pool.stats();
    (rig, stats)
}

/// The error of all that takes slots.
fn refusal(rig: &FlatRig, from: Span, request: &SlotRequest) -> Error {
    let promised = || original(from.paddr().get(), from.len());
    let error = rig.pool.take(promised(), request).unwrap_err();
    let mapped = rig.pool.map(promised(), Direction::ToDevice, Fill::Copy, request);
    assert_eq!(mapped.unwrap_err(), error);
    let mut slots = Vec::new();
    assert_eq!(rig.pool.take_all([promised()], request, &mut slots), Err(error));
    assert!(slots.is_empty());
    error
}

#[test]
fn masks_that_are_none_are_refused() {
    let (rig, stats) = rig();
    let one = span(SOURCE, 1);
    for keep_bits in [2, 0x1000, 0xffe, u64::MAX - 1, 1 << 63] {
        let request = SlotRequest { keep_bits, ..any() };
        assert_eq!(refusal(&rig, one, &request), Error::KeepBits { keep_bits });
        assert_eq!(rig.pool.max_len(&request), 0);
    }
    for granule in [0, 3, 4097, u64::MAX] {
        let request = SlotRequest { granule, ..any() };
        assert_eq!(refusal(&rig, one, &request), Error::Granule { granule });
        assert_eq!(rig.pool.max_len(&request), 0);
    }
    for boundary in [0, 3, 4097, u64::MAX] {
        let request = SlotRequest { boundary: Some(boundary), ..any() };
        assert_eq!(refusal(&rig, one, &request), Error::Boundary { boundary });
        assert_eq!(rig.pool.max_len(&request), 0);
    }
    assert_eq!(rig.pool.stats(), stats);
}

#[test]
fn what_fits_nowhere_is_refused_with_the_limit() {
    let (rig, stats) = rig();
    let bytes = 64 * SLOT;
    let too_long = Error::TooLong { len: bytes + 1, max: bytes };
    assert_eq!(refusal(&rig, span(SOURCE, bytes + 1), &any()), too_long);
    for from in [span(0, u64::MAX), span(1, u64::MAX)] {
        let too_long = Error::TooLong { len: u64::MAX, max: bytes };
        assert_eq!(refusal(&rig, from, &any()), too_long);
    }
    for last in [0, BASE - 1] {
        let request = SlotRequest { last, ..any() };
        let beyond = Error::Unreachable { last, lowest: BASE };
        assert_eq!(refusal(&rig, span(SOURCE, 1), &request), beyond);
        assert_eq!(rig.pool.max_len(&request), 0);
    }
    let unfit = [
        (span(SOURCE, 4), SlotRequest { last: BASE + 2, ..any() }),
        (span(SOURCE, 2), SlotRequest { boundary: Some(1), ..any() }),
        (span(SOURCE, 1), SlotRequest { granule: 1 << 63, ..any() }),
        (span(SOURCE, 1), SlotRequest { keep_bits: u64::MAX, ..any() }),
        (span(u64::MAX, 1), SlotRequest { keep_bits: u64::MAX, granule: 1 << 63, ..any() }),
        (span(0xf000, 8192), SlotRequest { keep_bits: 0xffff, boundary: Some(1 << 16), ..any() }),
    ];
    for (original, request) in unfit {
        assert_eq!(refusal(&rig, original, &request), Error::Unfit { original, request });
    }
    assert_eq!(rig.pool.stats(), stats);
}

#[test]
fn why_nothing_fits_is_told_of_all_spans() {
    let spans = vec![span(0x100_0000, 4 * SLOT), span(BASE, 8 * SLOT)];
    let rig = FlatRig::new(spans, PoolConfig::new(1));
    let request = SlotRequest { last: BASE + 100, ..any() };
    let unfit = Error::Unfit { original: span(SOURCE, 200), request };
    assert_eq!(refusal(&rig, span(SOURCE, 200), &request), unfit);
    let request = SlotRequest { last: 5, ..any() };
    let beyond = Error::Unreachable { last: 5, lowest: BASE };
    assert_eq!(refusal(&rig, span(SOURCE, 1), &request), beyond);
    let too_long = Error::TooLong { len: 9 * SLOT, max: 8 * SLOT };
    assert_eq!(refusal(&rig, span(SOURCE, 9 * SLOT), &any()), too_long);
}

#[test]
fn leases_refuse_the_same() {
    let (rig, stats) = rig();
    let refusal = |len, request: &SlotRequest| rig.pool.lease(len, request).unwrap_err();
    assert_eq!(refusal(0, &any()), Error::Outside { offset: 0, len: 0, mapped: 0 });
    let too_long = Error::TooLong { len: u64::MAX, max: 64 * SLOT };
    assert_eq!(refusal(u64::MAX, &any()), too_long);
    let request = SlotRequest { granule: 0, ..any() };
    assert_eq!(refusal(1, &request), Error::Granule { granule: 0 });
    assert_eq!(rig.pool.stats(), stats);
    let none = refusal(0, &any()).to_string();
    assert_eq!(none, "no bytes were asked for, of the 0x0 bytes of the slot");
    let lease = rig.pool.lease(100, &any()).unwrap();
    for (offset, len) in [(0, 101), (100, 1), (u64::MAX, 1), (u64::MAX - 1, 5), (101, 0)] {
        let outside = Error::Outside { offset, len: u64::try_from(len).unwrap(), mapped: 100 };
        assert_eq!(lease.read(offset, &mut vec![0; len]), Err(outside));
        assert_eq!(lease.write(offset, &vec![0; len]), Err(outside));
    }
    lease.write(100, &[]).unwrap();
}

#[test]
fn parts_that_are_none_are_not_copied() {
    let (rig, _) = rig();
    let bounced =
        rig.pool.map(original(SOURCE, 100), Direction::Bidirectional, Fill::Copy, &any()).unwrap();
    let slot = rig.pool.take(original(SOURCE, 100), &any()).unwrap();
    let bytes = rig.memory.with(|state| state.bytes.clone());
    let parts =
        [(0, 0), (0, 101), (100, 1), (99, 2), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)];
    for (offset, len) in parts {
        let outside = Err(Error::Outside { offset, len, mapped: 100 });
        assert_eq!(rig.pool.sync_for_cpu(&bounced, offset, len), outside);
        assert_eq!(rig.pool.sync_for_device(&bounced, offset, len), outside);
        assert_eq!(rig.pool.copy(&slot, offset, len, To::Slot), outside);
        assert_eq!(rig.pool.copy(&slot, offset, len, To::Original), outside);
    }
    assert!(rig.memory.with(|state| state.bytes == bytes));
}

#[test]
fn directions_that_mean_nothing_are_refused() {
    let (rig, stats) = rig();
    for direction in [Direction::ToDevice, Direction::Bidirectional] {
        let mapped = rig.pool.map(original(SOURCE, 1), direction, Fill::Overwritten, &any());
        assert_eq!(mapped.unwrap_err(), Error::Direction { direction });
    }
    assert_eq!(rig.pool.stats(), stats);
    let direction = Direction::ToDevice;
    let bounced = rig.pool.map(original(SOURCE, 8), direction, Fill::Copy, &any()).unwrap();
    let wrong = Error::Direction { direction };
    assert_eq!(rig.pool.sync_for_cpu(&bounced, 0, 1), Err(wrong));
    let kept = rig.pool.unmap_written(bounced, 1).unwrap_err();
    assert_eq!(kept.error, wrong);
    rig.pool.unmap_written(kept.handle, 0).unwrap();
    let direction = Direction::FromDevice;
    let bounced = rig.pool.map(original(SOURCE, 8), direction, Fill::Overwritten, &any()).unwrap();
    let mut bounced = Some(bounced);
    for written in [9, u64::MAX] {
        let kept = rig.pool.unmap_written(bounced.take().unwrap(), written).unwrap_err();
        assert_eq!(kept.error, Error::Outside { offset: 0, len: written, mapped: 8 });
        bounced = Some(kept.handle);
    }
    let kept = rig.pool.unmap(bounced.unwrap()).unwrap_err();
    assert_eq!(kept.error, Error::Unreported);
    rig.pool.unmap_written(kept.handle, 8).unwrap();
    assert_eq!(rig.pool.stats().used, stats.used);
}

#[test]
fn pools_that_cannot_be_are_refused() {
    let config = |slot_bytes| PoolConfig { slot_bytes, ..PoolConfig::new(1) };
    let refusal = |spans, config| FlatRig::try_new(spans, config).err();
    for bytes in [0, 1, 32, 63, 96, 4095, 1 << 31, u64::MAX] {
        let refused = refusal(vec![span(0, 1 << 20)], config(bytes));
        assert_eq!(refused, Some(Error::SlotSize { bytes }));
    }
    assert_eq!(refusal(Vec::new(), config(2048)), Some(Error::Spans { max: 1 << 16 }));
    let odd = [span(1024, 4096), span(4096, 1024), span(0, 4097), span(u64::MAX, 1), span(1, 1)];
    for span in odd {
        let refused = refusal(vec![span], config(2048));
        assert_eq!(refused, Some(Error::PoolSpan { span, slot: 2048 }));
    }
    for areas in [0, 1, 5, 64, 1000, usize::MAX] {
        let rig = FlatRig::simple(3, PoolConfig::new(areas));
        let all = rig.pool.take(original(SOURCE, 3 * SLOT), &any()).unwrap();
        rig.pool.release(all).unwrap();
    }
}

#[test]
fn growth_of_nothing_and_of_everything_is_bounded() {
    let grown = |step, limit| {
        let growth = Some(Growth::new(step, limit));
        let rig = FlatRig::simple(1, PoolConfig { growth, ..PoolConfig::new(1) });
        rig.pool.grow().map(Span::len)
    };
    assert_eq!(grown(0, 1 << 20), Ok(SLOT));
    assert_eq!(grown(1, SLOT), Ok(SLOT));
    assert_eq!(grown(1, SLOT - 1), Err(Error::GrowthLimit { bytes: SLOT, limit: SLOT - 1 }));
    let text = FlatRig::simple(1, PoolConfig::new(1)).pool.grow().unwrap_err().to_string();
    assert_eq!(text, "the pool has no room to grow: `PoolConfig::growth` gives it some");
    let most = Error::GrowthLimit { bytes: u64::MAX, limit: u64::MAX };
    assert_eq!(grown(u64::MAX, u64::MAX), Err(most));
    assert_eq!(grown(1 << 40, u64::MAX), Err(Error::NoMemory { bytes: 1 << 40 }));
    // A request that grows the pool by itself, far beyond anything.
    let growth = Some(Growth::new(1 << 20, u64::MAX));
    let rig = FlatRig::simple(1, PoolConfig { growth, ..PoolConfig::new(1) });
    for keep_bits in [0, u64::MAX >> 1, u64::MAX] {
        for granule in [1, 1 << 63] {
            for boundary in [None, Some(1), Some(1 << 63)] {
                let request = SlotRequest { keep_bits, granule, boundary, last: u64::MAX };
                assert!(rig.pool.take(original(1, u64::MAX), &request).is_err());
                if let Ok(slot) = rig.pool.take(original(u64::MAX - 5, 6), &request) {
                    assert!(keep_bits == 0 && granule == 1 && boundary != Some(1));
                    rig.pool.release(slot).unwrap();
                }
            }
        }
    }
    assert_eq!(rig.pool.stats().used, 0);
}

#[test]
fn lengths_whose_sum_is_no_number_are_refused_by_each_of_them() {
    let (rig, before) = rig();
    let mut slots = Vec::new();
    let halves = (0..3).map(|_| original(0, 1 << 63));
    let refused = rig.pool.take_all(halves, &any(), &mut slots);
    assert_eq!(refused, Err(Error::TooLong { len: 1 << 63, max: 64 * SLOT }));
    assert_eq!((slots.len(), rig.pool.stats()), (0, before));
}

#[test]
fn originals_that_nobody_can_copy_get_no_slots() {
    let pool = small(span(BASE, 64 * SLOT), SLOT);
    let no_copies = Error::NoCopies { original: span(NOWHERE, 5) };
    assert_eq!(pool.take(original(NOWHERE, 5), &any()).unwrap_err(), no_copies);
    let mut slots = Vec::new();
    let many = [original(SOURCE, 1), original(NOWHERE, 5), original(SOURCE, 1)];
    assert_eq!(pool.take_all(many, &any(), &mut slots), Err(no_copies));
    assert_eq!((slots.len(), pool.stats().used, pool.stats().high_water), (0, 0, 0));
}

#[test]
fn many_slots_need_no_more_room_than_they_are() {
    let rig = FlatRig::simple(64, PoolConfig::new(2));
    let mut slots = Vec::new();
    rig.pool.take_all((0..5).map(|_| original(SOURCE, 1)), &any(), &mut slots).unwrap();
    assert_eq!((slots.len(), slots.capacity()), (5, 5));
    for slot in slots {
        rig.pool.release(slot).unwrap();
    }
    let mut slots = Vec::with_capacity(37);
    rig.pool.take_all((0..37).map(|_| original(SOURCE, 1)), &any(), &mut slots).unwrap();
    assert_eq!((slots.len(), slots.capacity()), (37, 37));
}

#[test]
fn what_follows_the_end_of_an_iterator_is_no_original() {
    let rig = FlatRig::simple(64, PoolConfig::new(2));
    let mut calls = 0;
    let resumes = std::iter::from_fn(|| {
        calls += 1;
        (calls != 2).then(|| original(SOURCE, 1))
    });
    let mut slots = Vec::new();
    rig.pool.take_all(resumes, &any(), &mut slots).unwrap();
    assert_eq!(slots.len(), 1);
}

#[test]
fn a_pool_at_both_ends_of_the_address_space_reaches_all_but_its_last_byte() {
    let top = span(u64::MAX - (SLOT - 1), SLOT);
    let rig = FlatRig::new(vec![top, span(0, SLOT)], PoolConfig::new(1));
    assert_eq!(rig.pool.reach(), span(0, u64::MAX));
    let too_long = Error::TooLong { len: SLOT + 1, max: SLOT };
    assert_eq!(refusal(&rig, span(SOURCE, SLOT + 1), &any()), too_long);
    let both = [(); 2].map(|()| rig.pool.take(original(SOURCE, SLOT), &any()).unwrap());
    assert_eq!(both.each_ref().map(|slot| slot.span()), [top, span(0, SLOT)]);
}

#[test]
fn a_request_that_only_what_was_added_is_long_enough_for_is_told_when_that_is_full() {
    let growth = Some(Growth::new(8 * SLOT, 8 * SLOT));
    let rig = FlatRig::simple(1, PoolConfig { growth, ..PoolConfig::new(1) });
    rig.pool.grow().unwrap();
    let most = rig.pool.take(original(SOURCE, 8 * SLOT), &any()).unwrap();
    let full = Error::Full { len: 8 * SLOT, free: SLOT };
    assert_eq!(refusal(&rig, span(SOURCE, 8 * SLOT), &any()), full);
    rig.pool.release(most).unwrap();
    let too_long = Error::TooLong { len: 9 * SLOT, max: 8 * SLOT };
    assert_eq!(refusal(&rig, span(SOURCE, 9 * SLOT), &any()), too_long);
}

fn wild() -> impl Strategy<Value = u64> {
    prop_oneof![
        prop::num::u64::ANY,
        (0_u32..64).prop_map(|lg2| 1 << lg2),
        (0_u32..64).prop_map(|lg2| u64::MAX >> lg2),
        (0_u64..0x10_0000).prop_map(|below| u64::MAX - below),
        0_u64..0x20_0000,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 3000, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn wild_requests_are_refused_or_right(
        (keep_bits, granule, last) in (wild(), wild(), wild()),
        boundary in prop::option::of(wild()),
        (addr, len) in (wild(), wild()),
        (slot_lg2, base, slots) in (6_u32..=20, wild(), 1_u64..200),
    ) {
        let slot_bytes = 1 << slot_lg2;
        let most = 0_u64.wrapping_sub(slots * slot_bytes);
        let base = (base & !(slot_bytes - 1)).min(most);
        let Ok(from) = Span::new(dmaspan::PhysAddr::new(addr), len) else { return Ok(()) };
        let request = SlotRequest { keep_bits, granule, last, boundary };
        let rig = small(span(base, slots * slot_bytes), slot_bytes);
        let longest = rig.max_len(&request);
        match rig.take(original(addr, len), &request) {
            Ok(slot) => {
                let (first, end) = (slot.span().paddr().get(), slot.span().last().get());
                prop_assert!(base <= first && end - base < slots * slot_bytes && end <= last);
                prop_assert_eq!((first ^ addr) & keep_bits, 0);
                prop_assert!(boundary.is_none_or(|size| first / size == end / size));
                prop_assert_eq!(slot.len(), from.len());
                rig.release(slot).unwrap();
            }
            Err(error) => {
                let is_other = matches!(error, Error::Full { .. } | Error::Foreign { .. });
                prop_assert!(!is_other, "{}", error);
                prop_assert!(len > longest);
            }
        }
        prop_assert_eq!(rig.stats().used, 0);
    }
}

#[test]
fn many_originals_longer_than_the_address_space_are_refused() {
    let (rig, before) = rig();
    let half = || original(1 << 63, 1 << 63);
    let mut slots = Vec::new();
    let refused = rig.pool.take_all([half(), half()], &any(), &mut slots);
    assert!(matches!(refused, Err(Error::TooLong { len, .. }) if len == 1 << 63), "{refused:?}");
    assert_eq!((slots.len(), rig.pool.stats()), (0, before));
}

#[test]
fn a_vector_with_room_for_all_slots_is_not_made_longer() {
    let (rig, _) = rig();
    let mut slots = Vec::with_capacity(3);
    let room = slots.capacity();
    let originals = (0..room).map(|_| original(SOURCE, 1));
    rig.pool.take_all(originals, &any(), &mut slots).unwrap();
    assert_eq!(slots.capacity(), room);
    for slot in slots {
        rig.pool.release(slot).unwrap();
    }
}
