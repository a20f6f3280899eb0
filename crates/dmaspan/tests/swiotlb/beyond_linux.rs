//! A pool does better than Linux's bounce buffers: each test fails where slots are managed as
//! there.

use dmaspan::Direction;
use dmaspan::swiotlb::{Error, Fill, Growth, PoolConfig, SlotRequest, Wipe};

use crate::common::{ORIGINALS, Rig, SLOT, original, span};
use crate::flat::{FlatRig, FlatSlot, POISON, SOURCE, locks_of};

fn any() -> SlotRequest {
    SlotRequest::default()
}

fn take(rig: &FlatRig, len: u64) -> FlatSlot {
    rig.pool.take(original(SOURCE, len), &any()).unwrap()
}

#[test]
fn the_latest_slots_are_taken_first_whatever_their_length() {
    let rig = FlatRig::simple(1024, PoolConfig::new(1));
    let mut slots: Vec<_> = (0..64).map(|_| take(&rig, 4096)).collect();
    let long: Vec<_> = (0..4).map(|_| take(&rig, 5 * SLOT)).collect();
    let (old, latest) = (slots.swap_remove(3), slots.swap_remove(40));
    let expected = latest.span();
    for slot in long {
        rig.pool.release(slot).unwrap();
    }
    rig.pool.release(old).unwrap();
    rig.pool.release(latest).unwrap();
    assert_eq!(take(&rig, 4096).span(), expected);
    // Next-fit would go on behind the last one.
    let slot = take(&rig, 5 * SLOT);
    let expected = slot.span();
    rig.pool.release(slot).unwrap();
    assert_eq!(take(&rig, 5 * SLOT).span(), expected);
}

#[test]
fn a_full_pool_refuses_without_a_lock() {
    let rig = FlatRig::simple(1024, PoolConfig::new(8));
    let slots: Vec<_> = (0..1024).map(|_| take(&rig, SLOT)).collect();
    let (locks, refused) = locks_of(|| rig.pool.take(original(SOURCE, 1), &any()));
    assert_eq!(refused.unwrap_err(), Error::Full { len: 1, free: 0 });
    assert_eq!(locks, 0);
    drop(slots);
}

#[test]
fn too_few_free_slots_are_seen_without_a_lock() {
    let rig = FlatRig::simple(1024, PoolConfig::new(8));
    let slots: Vec<_> = (0..1020).map(|_| take(&rig, SLOT)).collect();
    let (locks, refused) = locks_of(|| rig.pool.take(original(SOURCE, 5 * SLOT), &any()));
    assert_eq!(refused.unwrap_err(), Error::Full { len: 5 * SLOT, free: 4 * SLOT });
    assert_eq!(locks, 0);
    drop(slots);
}

#[test]
fn a_pool_in_pieces_is_looked_through_with_a_lock_for_each_area() {
    // That none of them has such a run is known then; one over several is looked for again.
    for (areas, then) in [(1, 0), (2, 2)] {
        let rig = FlatRig::simple(128, PoolConfig::new(areas));
        let slots: Vec<_> = (0..128).map(|_| take(&rig, SLOT)).collect();
        let is_odd = |slot: &FlatSlot| slot.span().paddr().get() / SLOT % 2 == 1;
        let (odd, even): (Vec<_>, Vec<_>) = slots.into_iter().partition(is_odd);
        odd.into_iter().for_each(|slot| rig.pool.release(slot).unwrap());
        let two = || rig.pool.take(original(SOURCE, 2 * SLOT), &any()).unwrap_err();
        assert!((1..=6).contains(&locks_of(two).0), "{areas}");
        assert_eq!(locks_of(two).0, then, "{areas}");
        drop(even);
    }
}

#[test]
fn a_mapping_may_be_longer_than_256_kib() {
    let rig = Rig::new(4096, 4);
    let len = 4096 * SLOT - 100;
    let bytes: Vec<_> = (0..len).map(|n| ((n * 7) >> 3).to_le_bytes()[0]).collect();
    rig.write(ORIGINALS, &bytes);
    let from = original(ORIGINALS, len);
    let bounced = rig.pool.map(from, Direction::Bidirectional, Fill::Copy, &any()).unwrap();
    assert_eq!(rig.read(bounced.span()), bytes);
    rig.write(bounced.span().paddr().get() + (300 << 10), &[0xee; 4096]);
    rig.pool.unmap(bounced).unwrap();
    assert_eq!(rig.read(span(ORIGINALS + (300 << 10), 4096)), [0xee; 4096]);
}

#[test]
fn slots_of_the_size_of_requests_waste_nothing() {
    for slot_bytes in [64, 4096, 65536] {
        let config = PoolConfig { slot_bytes, ..PoolConfig::new(3) };
        let rig = FlatRig::simple(100, config);
        let request = SlotRequest { keep_bits: slot_bytes - 1, ..any() };
        let take = || rig.pool.take(original(SOURCE, slot_bytes), &request);
        let slots: Vec<_> = (0..100).map(|_| take().unwrap()).collect();
        assert_eq!(rig.pool.stats().used, slot_bytes * 100);
        assert_eq!(take().unwrap_err(), Error::Full { len: slot_bytes, free: 0 });
        drop(slots);
    }
}

#[test]
fn a_pool_shrinks_and_a_slot_knows_its_memory() {
    let growth = Some(Growth::new(8 * SLOT, 1 << 20));
    let rig = FlatRig::simple(8, PoolConfig { growth, ..PoolConfig::new(1) });
    let own = take(&rig, 8 * SLOT);
    for _ in 0..20 {
        rig.pool.grow().unwrap();
    }
    let map = || {
        let from = original(SOURCE, 8 * SLOT);
        rig.pool.map(from, Direction::FromDevice, Fill::Copy, &any()).unwrap()
    };
    let mut mapped: Vec<_> = (0..20).map(|_| map()).collect();
    assert_eq!(rig.pool.stats().single, 0);
    let last = mapped.pop().unwrap();
    assert_eq!(locks_of(|| rig.pool.sync_for_cpu(&last, 1, 5).unwrap()).0, 0);
    assert_eq!(locks_of(|| rig.pool.unmap(last).unwrap()).0, 1, "its area's");
    assert_eq!(rig.pool.shrink(), 8 * SLOT);
    for bounced in mapped {
        rig.pool.unmap(bounced).unwrap();
    }
    assert_eq!(rig.pool.shrink(), 19 * 8 * SLOT);
    assert_eq!((rig.pool.stats().grown, rig.pool.stats().bytes), (0, 8 * SLOT));
    rig.pool.release(own).unwrap();
}

#[test]
fn an_original_at_address_0_keeps_its_low_bits() {
    let config = PoolConfig::new(1);
    let rig = FlatRig::new(vec![span(0x10_0000 + SLOT, 63 * SLOT)], config);
    for keep_bits in [0xfff, 0x3fff] {
        let request = SlotRequest { keep_bits, ..any() };
        let slot = rig.pool.take(original(0, 512), &request).unwrap();
        assert_eq!(slot.span().paddr().get() & keep_bits, 0);
    }
}

#[test]
fn the_last_slots_of_an_odd_pool_are_given_back() {
    for slots in [1, 63, 100, 129, 191] {
        let rig = FlatRig::simple(slots, PoolConfig::new(1));
        for last in [1, slots.min(3), slots.min(70)] {
            let rest = (last < slots).then(|| take(&rig, (slots - last) * SLOT));
            let end = take(&rig, last * SLOT);
            assert_eq!(end.span().last().get(), 0x10_0000 + slots * SLOT - 1);
            rig.pool.release(end).unwrap();
            assert_eq!(rig.pool.stats().used, (slots - last) * SLOT);
            if let Some(rest) = rest {
                rig.pool.release(rest).unwrap();
            }
        }
        let all = take(&rig, slots * SLOT);
        rig.pool.release(all).unwrap();
    }
}

#[test]
fn no_secret_of_a_former_holder_shows_or_stays() {
    for wipe in [Wipe::Never, Wipe::Release] {
        let rig = FlatRig::simple(8, PoolConfig { wipe, ..PoolConfig::new(1) });
        rig.memory.write(SOURCE, &[0x5e; 8 << 11]);
        let map = |len| {
            let from = original(SOURCE, len);
            rig.pool.map(from, Direction::ToDevice, Fill::Copy, &any()).unwrap()
        };
        rig.pool.unmap(map(8 * SLOT)).unwrap();
        let stays = rig.memory.read(span(0x10_0000, 8 * SLOT)).contains(&0x5e);
        assert_eq!(stays, wipe == Wipe::Never);
        rig.memory.write(SOURCE, &[1; 5000]);
        let short = map(5000);
        let at = short.span().paddr().get();
        let mut expected = vec![1; 5000];
        expected.resize(6144, 0);
        assert_eq!(rig.memory.read(span(at, 3 * SLOT)), expected);
        // What a device wrote behind the end is wiped as well.
        rig.memory.write(at + 6000, &[0x77; 100]);
        rig.pool.unmap(short).unwrap();
        let stays = rig.memory.read(span(0x10_0000, 8 * SLOT)).contains(&0x77);
        assert_eq!(stays, wipe == Wipe::Never);
    }
}

#[test]
fn what_a_device_overwrites_is_not_copied_in() {
    let rig = Rig::new(64, 1);
    let before = rig.pool_memory.counts();
    let from = original(ORIGINALS, 4096);
    let bounced = rig.pool.map(from, Direction::FromDevice, Fill::Overwritten, &any()).unwrap();
    assert_eq!(rig.pool_memory.counts(), before);
    rig.pool.unmap_written(bounced, 512).unwrap();
    let after = rig.pool_memory.counts();
    assert_eq!((after.copies, after.copied), (before.copies + 1, before.copied + 512));
}

#[test]
fn a_lock_is_taken_for_32_originals_at_once() {
    let rig = FlatRig::simple(1024, PoolConfig::new(4));
    let mut slots = Vec::new();
    let many = (0..64).map(|n| original(SOURCE + n * 4096, 4096));
    let (locks, taken) = locks_of(|| rig.pool.take_all(many, &any(), &mut slots));
    taken.unwrap();
    assert_eq!((locks, slots.len()), (2, 64));
}

#[test]
fn memory_of_the_cpus_node_is_taken_first() {
    let spans = vec![span(0x100_0000, 16 * SLOT), span(0x10_0000, 16 * SLOT)];
    let rig = FlatRig::new(spans.clone(), PoolConfig::new(2));
    let node_of = |slot: &FlatSlot| {
        let holds = |all: &dmaspan::Span| {
            all.paddr() <= slot.span().paddr() && slot.span().last() <= all.last()
        };
        spans.iter().position(holds).unwrap()
    };
    for node in [1, 0, 3, 2] {
        rig.place.set(0, node);
        assert_eq!(node_of(&take(&rig, SLOT)), node % 2, "there is some");
    }
    let slots: Vec<_> = (0..28).map(|_| node_of(&take(&rig, SLOT))).collect();
    assert_eq!(slots[..14], [0; 14]);
    assert_eq!(slots[14..], [1; 14], "the other node's, when there is none");
}

#[test]
fn a_pair_takes_two_locks_and_no_other() {
    let growth = Some(Growth::new(64 * SLOT, 1 << 20));
    let rig = FlatRig::simple(1024, PoolConfig { growth, ..PoolConfig::new(8) });
    let hard = SlotRequest { keep_bits: 0xfff, granule: 4096, boundary: Some(1 << 16), ..any() };
    for (cpu, request) in [(0, any()), (5, any()), (3, hard)] {
        rig.place.set(cpu, 0);
        for len in [1, 4096, 65536] {
            let pair = || {
                let slot = rig.pool.take(original(SOURCE, len), &request).unwrap();
                rig.pool.release(slot).unwrap();
            };
            // The first one may look for a run as long.
            assert!(locks_of(pair).0 <= 3);
            assert_eq!(locks_of(pair).0, 2);
            let pair = || {
                let from = original(SOURCE, len);
                let bounced = rig.pool.map(from, Direction::Bidirectional, Fill::Copy, &request);
                rig.pool.unmap(bounced.unwrap()).unwrap();
            };
            assert_eq!(locks_of(pair).0, 2);
        }
    }
    assert_eq!(rig.memory.read(span(SOURCE, 1)), [POISON]);
}
