//! Borders of what a pool has, answers and leaves in memory: each is met from both sides.

use dmaspan::swiotlb::{Error, Fill, PoolConfig, SlotRequest};
use dmaspan::{Direction, Span};

use crate::common::{SLOT, original, span};
use crate::flat::{FlatRig, POISON, SOURCE, locks_of};

const BASE: u64 = 0x10_0000;

fn any() -> SlotRequest {
    SlotRequest::default()
}

/// A span of 4 slots, and below it one of 8.
fn two() -> (FlatRig, Span, Span) {
    let [high, low] = [span(0x100_0000, 4 * SLOT), span(BASE, 8 * SLOT)];
    (FlatRig::new(vec![high, low], PoolConfig::new(1)), high, low)
}

#[test]
fn a_pool_reaches_from_its_lowest_byte_to_its_highest_and_is_as_long_as_its_longest_span() {
    let (rig, high, low) = two();
    let start = low.paddr().get();
    assert_eq!(rig.pool.reach(), span(start, high.last().get() - start + 1));
    assert_eq!(rig.pool.max_len(&any()), low.len());
    let near = SlotRequest { last: low.last().get() - 1, ..any() };
    assert_eq!(rig.pool.max_len(&near), low.len() - 1);
    let rig = FlatRig::simple(3, PoolConfig::new(1));
    assert_eq!(rig.pool.reach(), span(BASE, 3 * SLOT));
}

#[test]
fn a_request_is_for_any_slot_unless_it_says_more() {
    let plain = SlotRequest { keep_bits: 0, granule: 1, last: u64::MAX, boundary: None };
    assert_eq!(any(), plain);
}

#[test]
fn bits_that_are_all_kept_are_not_what_is_wrong_with_a_request() {
    let (rig, ..) = two();
    let refused = |request| rig.pool.take(original(SOURCE, 1), &request).unwrap_err();
    let all = SlotRequest { keep_bits: u64::MAX, ..any() };
    assert_eq!(refused(SlotRequest { granule: 3, ..all }), Error::Granule { granule: 3 });
    let boundary = Some(12);
    assert_eq!(refused(SlotRequest { boundary, ..all }), Error::Boundary { boundary: 12 });
}

#[test]
fn what_fits_nowhere_though_it_is_neither_too_long_nor_out_of_reach_is_unfit() {
    let (rig, ..) = two();
    let refused = |from: Span, request| {
        let refused = rig.pool.take(original(from.paddr().get(), from.len()), &request);
        (refused.unwrap_err(), Error::Unfit { original: from, request })
    };
    // One byte is in reach, and a second one is not.
    let near = SlotRequest { last: BASE, ..any() };
    let (error, unfit) = refused(span(SOURCE, 2), near);
    assert_eq!(error, unfit);
    let slot = rig.pool.take(original(SOURCE, 1), &near).unwrap();
    rig.pool.release(slot).unwrap();
    let beyond = SlotRequest { last: BASE - 1, ..any() };
    let (error, _) = refused(span(SOURCE, 1), beyond);
    assert_eq!(error, Error::Unreachable { last: BASE - 1, lowest: BASE });
    // As long as the longest span, but for the bits that are kept.
    let kept = SlotRequest { keep_bits: 0xfff, ..any() };
    let (error, unfit) = refused(span(SOURCE + 1, 8 * SLOT), kept);
    assert_eq!(error, unfit);
    let (error, _) = refused(span(SOURCE + 1, 8 * SLOT + 1), kept);
    assert_eq!(error, Error::TooLong { len: 8 * SLOT + 1, max: 8 * SLOT });
}

#[test]
fn a_pool_may_begin_with_65536_spans_and_no_more() {
    let refused = |count: u64| {
        // The first one cannot be divided into slots.
        let spans = (0..count).map(|n| span((n << 12) + 1, SLOT)).collect();
        FlatRig::try_new(spans, PoolConfig::new(1)).err()
    };
    let first = Error::PoolSpan { span: span(1, SLOT), slot: SLOT };
    assert_eq!(refused(1 << 16), Some(first));
    assert_eq!(refused((1 << 16) + 1), Some(Error::Spans { max: 1 << 16 }));
}

#[test]
fn a_run_has_as_many_slots_as_its_bytes_need() {
    for (slot_bytes, slots) in [(64, 5000), (64, 200), (2048, 5000)] {
        let rig = FlatRig::simple(slots, PoolConfig { slot_bytes, ..PoolConfig::new(1) });
        for request in [any(), SlotRequest { keep_bits: slot_bytes - 1, ..any() }] {
            let lens = [1, 2, 3, slot_bytes - 1, slot_bytes, slot_bytes + 1, 3 * slot_bytes];
            let parts =
                lens.into_iter().flat_map(|len| [0, 1, slot_bytes - 1].map(|low| (low, len)));
            for (low, len) in parts {
                // Whatever the length is of what was released last.
                for last in [1, 2, 3, 65, 129, 2049].into_iter().filter(|last| *last <= slots) {
                    let slot = rig.pool.take(original(SOURCE, last * slot_bytes), &any()).unwrap();
                    rig.pool.release(slot).unwrap();
                    let inner = low & request.keep_bits;
                    let slot = rig.pool.take(original(SOURCE + low, len), &request).unwrap();
                    let used = (inner + len).next_multiple_of(slot_bytes);
                    assert_eq!(rig.pool.stats().used, used, "{len} bytes at {low}");
                    rig.pool.release(slot).unwrap();
                }
            }
        }
    }
}

#[test]
fn a_lease_is_read_and_written_in_parts_that_are_as_long_as_was_asked_for() {
    let rig = FlatRig::simple(8, PoolConfig::new(1));
    let lease = rig.pool.lease(100, &any()).unwrap();
    let mut expected = vec![0; 100];
    for (offset, len) in [(0, 1), (5, 10), (99, 1), (0, 100)] {
        let range = offset..offset + len;
        let at = u64::try_from(offset).unwrap();
        let bytes: Vec<u8> = range.clone().map(|n| u8::try_from(n + 1).unwrap()).collect();
        lease.write(at, &bytes).unwrap();
        expected[range.clone()].copy_from_slice(&bytes);
        assert_eq!(rig.memory.read(lease.span()), expected);
        let mut read = vec![0; len];
        lease.read(at, &mut read).unwrap();
        assert_eq!(read, bytes);
    }
}

#[test]
fn no_byte_of_what_a_device_only_reads_is_copied_back() {
    let rig = FlatRig::simple(8, PoolConfig::new(1));
    let map =
        || rig.pool.map(original(SOURCE, 100), Direction::ToDevice, Fill::Copy, &any()).unwrap();
    for reports in [false, true] {
        let bounced = map();
        rig.memory.write(bounced.span().paddr().get(), &[9; 100]);
        match reports {
            true => rig.pool.unmap_written(bounced, 0).unwrap(),
            false => rig.pool.unmap(bounced).unwrap(),
        }
        assert_eq!(rig.memory.read(span(SOURCE, 100)), [POISON; 100]);
    }
}

#[test]
fn syncs_of_what_is_not_in_a_slot_are_refused_before_their_direction_is() {
    let rig = FlatRig::simple(8, PoolConfig::new(1));
    for direction in [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional] {
        let from = original(SOURCE, 100);
        let bounced = rig.pool.map(from, direction, Fill::Copy, &any()).unwrap();
        for (offset, len) in [(0, 0), (0, 101), (100, 1), (u64::MAX, 2)] {
            let outside = Err(Error::Outside { offset, len, mapped: 100 });
            assert_eq!(rig.pool.sync_for_cpu(&bounced, offset, len), outside);
            assert_eq!(rig.pool.sync_for_device(&bounced, offset, len), outside);
        }
        rig.pool.unmap(bounced).unwrap();
    }
}

#[test]
fn bytes_that_a_device_only_writes_are_handed_back_to_it_without_a_copy() {
    let rig = FlatRig::simple(8, PoolConfig::new(1));
    for (direction, byte) in [(Direction::FromDevice, 9), (Direction::Bidirectional, POISON)] {
        let from = original(SOURCE, 100);
        let bounced = rig.pool.map(from, direction, Fill::Copy, &any()).unwrap();
        rig.memory.write(bounced.span().paddr().get(), &[9; 100]);
        rig.pool.sync_for_device(&bounced, 0, 100).unwrap();
        assert_eq!(rig.memory.read(bounced.span()), [byte; 100]);
        rig.memory.write(bounced.span().paddr().get(), &[POISON; 100]);
        rig.pool.unmap(bounced).unwrap();
    }
}

#[test]
fn a_full_pool_of_several_spans_is_looked_through_once_where_nothing_is_released() {
    let spans = vec![span(BASE, 128 * SLOT), span(2 * BASE, 128 * SLOT)];
    let rig = FlatRig::new(spans, PoolConfig::new(2));
    let take = |slots| rig.pool.take(original(SOURCE, slots * SLOT), &any());
    let slots: Vec<_> = (0..256).map(|_| take(1).unwrap()).collect();
    for slot in slots {
        match slot.span().paddr().get() / SLOT % 2 {
            1 => rig.pool.release(slot).unwrap(),
            _ => std::mem::forget(slot),
        }
    }
    let free = 128 * SLOT;
    assert_eq!(take(2).unwrap_err(), Error::Full { len: 2 * SLOT, free });
    let (locks, refused) = locks_of(|| take(2).unwrap_err());
    // That no area has such a run is known then; one over several is looked for again.
    assert_eq!((locks, refused), (4, Error::Full { len: 2 * SLOT, free }));
}
