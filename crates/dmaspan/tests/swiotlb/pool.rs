//! Slots one by one.

use dmaspan::Direction;
use dmaspan::swiotlb::{Error, Fill, Growth, PoolConfig, SlotRequest, To, Wipe};

use crate::common::{ORIGINALS, RAM, Rig, SLOT, Slot, original, span};

#[test]
fn the_slots_released_last_are_taken_first() {
    let rig = Rig::new(1024, 1);
    let any = SlotRequest::default();
    let take = || rig.pool.take(original(ORIGINALS, 4096), &any).unwrap();
    let mut slots: Vec<Slot> = (0..100).map(|_| take()).collect();
    let mut released = Vec::new();
    for index in [70, 3, 50, 21] {
        let slot = slots.swap_remove(index);
        released.push(slot.span());
        rig.pool.release(slot).unwrap();
    }
    let again: Vec<_> = (0..4).map(|_| take().span()).collect();
    released.reverse();
    assert_eq!(again, released);
}

#[test]
fn a_run_reaches_over_all_areas() {
    let rig = Rig::new(1024, 4);
    let all = original(ORIGINALS, 1024 * SLOT);
    let slot = rig.pool.take(all, &SlotRequest::default()).unwrap();
    assert_eq!(slot.span(), span(RAM, 1024 * SLOT));
    let refused = rig.pool.take(original(ORIGINALS, 1), &SlotRequest::default());
    assert_eq!(refused.unwrap_err(), Error::Full { len: 1, free: 0 });
    rig.pool.release(slot).unwrap();
    assert_eq!(rig.pool.stats().used, 0);
}

#[test]
fn low_bits_boundary_and_reach_are_kept() {
    let rig = Rig::new(64, 1);
    let request = SlotRequest {
        keep_bits: 0xfff,
        boundary: Some(0x4000),
        last: RAM + 0xffff,
        ..SlotRequest::default()
    };
    let mut slots = Vec::new();
    while let Ok(slot) = rig.pool.take(original(ORIGINALS + 0x234, 0x2000), &request) {
        let (first, last) = (slot.span().paddr().get(), slot.span().last().get());
        assert_eq!(first & 0xfff, 0x234);
        assert_eq!(first / 0x4000, last / 0x4000);
        assert!(last <= RAM + 0xffff);
        slots.push(slot);
    }
    assert_eq!(slots.len(), 4);
}

#[test]
fn what_a_device_did_not_write_is_as_it_was_and_padding_is_zero() {
    let rig = Rig::new(64, 1);
    rig.write(ORIGINALS, &[7; 1000]);
    let any = SlotRequest::default();
    let bounced =
        rig.pool.map(original(ORIGINALS, 1000), Direction::FromDevice, Fill::Copy, &any).unwrap();
    let slot = bounced.span();
    let mut expected = vec![7; 1000];
    expected.resize(2048, 0);
    assert_eq!(rig.read(span(slot.paddr().get(), SLOT)), expected);
    rig.write(slot.paddr().get() + 10, &[9; 5]);
    rig.pool.unmap(bounced).unwrap();
    expected.truncate(1000);
    expected[10..15].fill(9);
    assert_eq!(rig.read(span(ORIGINALS, 1000)), expected);
}

#[test]
fn only_what_was_reported_written_reaches_the_original_of_a_slot_that_was_not_filled() {
    let rig = Rig::new(64, 1);
    let any = SlotRequest::default();
    let map =
        |fill| rig.pool.map(original(ORIGINALS, 4096), Direction::FromDevice, fill, &any).unwrap();
    rig.write(ORIGINALS, &[0x5e; 4096]); // a secret
    rig.pool.unmap(map(Fill::Copy)).unwrap();
    rig.write(ORIGINALS, &[1; 4096]);
    let bounced = map(Fill::Overwritten);
    assert_eq!(rig.read(bounced.span()), [0x5e; 4096], "the former holder's");
    rig.write(bounced.span().paddr().get(), &[2; 100]);
    let kept = rig.pool.unmap(bounced).unwrap_err();
    assert_eq!(kept.error, Error::Unreported);
    rig.pool.unmap_written(kept.handle, 100).unwrap();
    let mut expected = vec![1; 4096];
    expected[..100].fill(2);
    assert_eq!(rig.read(span(ORIGINALS, 4096)), expected);
}

#[test]
fn a_device_that_lies_about_what_it_overwrote_gets_zeros_copied_from_a_pool_that_wipes() {
    let rig = Rig::with(64, PoolConfig { wipe: Wipe::Release, ..PoolConfig::new(1) });
    let any = SlotRequest::default();
    let map =
        |fill| rig.pool.map(original(ORIGINALS, 4096), Direction::FromDevice, fill, &any).unwrap();
    rig.write(ORIGINALS, &[0x5e; 4096]); // a secret
    rig.pool.unmap(map(Fill::Copy)).unwrap();
    rig.write(ORIGINALS, &[1; 4096]);
    let bounced = map(Fill::Overwritten);
    rig.write(bounced.span().paddr().get(), &[2; 100]);
    rig.pool.unmap_written(bounced, 4096).unwrap();
    let mut expected = vec![0; 4096];
    expected[..100].fill(2);
    assert_eq!(rig.read(span(ORIGINALS, 4096)), expected);
}

#[test]
fn a_foreign_pool_gives_a_slot_back() {
    let (rig, other) = (Rig::new(64, 1), Rig::new(64, 1));
    let slot = rig.pool.take(original(ORIGINALS, 4096), &SlotRequest::default()).unwrap();
    let foreign = Error::Foreign { addr: slot.span().paddr().get() };
    assert_eq!(other.pool.copy(&slot, 0, 1, To::Slot), Err(foreign));
    let kept = other.pool.release(slot).unwrap_err();
    assert_eq!(kept.error, foreign);
    rig.pool.release(kept.handle).unwrap();
    assert_eq!((rig.pool.stats().used, other.pool.stats().used), (0, 0));

    // As a user writes it.
    let release = |slot| -> Result<(), Error> { Ok(other.pool.release(slot)?) };
    let slot = rig.pool.take(original(ORIGINALS, 4096), &SlotRequest::default()).unwrap();
    assert_eq!(release(slot), Err(foreign));
}

#[test]
fn a_pool_grows_for_one_request_then_for_good_and_shrinks_again() {
    let growth = Some(Growth::new(64 * SLOT, 65 * SLOT));
    let rig = Rig::with(4, PoolConfig { growth, ..PoolConfig::new(1) });
    let any = SlotRequest::default();
    let take = || rig.pool.take(original(ORIGINALS, SLOT), &any);
    let own: Vec<_> = (0..4).map(|_| take().unwrap()).collect();
    let single = take().unwrap();
    assert_eq!(rig.pool.stats().single, SLOT);
    rig.pool.grow().unwrap();
    let more: Vec<_> = (0..64).map(|_| take().unwrap()).collect();
    assert_eq!(rig.pool.stats().used, 69 * SLOT);
    assert!(take().is_err(), "the limit");
    assert_eq!(rig.pool.shrink(), 0, "slots are in use");
    for slot in more.into_iter().chain([single]).chain(own) {
        rig.pool.release(slot).unwrap();
    }
    assert_eq!(rig.pool.shrink(), 64 * SLOT);
    assert_eq!(rig.pool_memory.grown(), []);
    assert_eq!(rig.pool_memory.seen(), [span(RAM, 4 * SLOT)]);
}

#[test]
fn a_lease_is_zeros_and_goes_back_when_it_is_dropped() {
    let rig = Rig::new(64, 2);
    let lease = rig.pool.lease(5000, &SlotRequest { granule: 4096, ..Default::default() }).unwrap();
    let mut bytes = [1; 5000];
    lease.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 5000]);
    lease.write(4990, &[3; 10]).unwrap();
    assert_eq!(
        lease.write(4991, &[3; 10]).unwrap_err(),
        Error::Outside { offset: 4991, len: 10, mapped: 5000 }
    );
    drop(lease);
    assert_eq!(rig.pool.stats().used, 0);
}

#[test]
fn a_cpu_takes_of_its_own_area_and_then_of_others() {
    let rig = Rig::new(256, 4);
    let take = || rig.pool.take(original(ORIGINALS, SLOT), &SlotRequest::default()).unwrap();
    rig.cpu.set(2);
    let slots: Vec<_> = (0..256).map(|_| take()).collect();
    let areas: Vec<_> =
        slots.iter().map(|slot| (slot.span().paddr().get() - RAM) / (64 * SLOT)).collect();
    assert!(areas.chunks(64).zip([2, 3, 0, 1]).all(|(all, area)| all.iter().all(|a| *a == area)));
}

#[test]
fn what_the_host_does_not_share_leaks() {
    let growth = Some(Growth::new(64 * SLOT, 256 * SLOT));
    let rig = Rig::with(4, PoolConfig { growth, ..PoolConfig::new(1) });
    rig.faults.arm(2);
    let refused = rig.pool.grow().unwrap_err();
    assert!(matches!(refused, Error::Host { span } if rig.pool_memory.grown() == [span]));
    assert_eq!(rig.pool.stats().leaked, 64 * SLOT);
}

#[test]
fn many_slots_are_all_taken_or_none() {
    let rig = Rig::new(256, 2);
    let any = SlotRequest::default();
    let many = |count| (0..count).map(|n| original(ORIGINALS + n * 4096, 4096));
    let mut slots = Vec::new();
    rig.pool.take_all(many(100), &any, &mut slots).unwrap();
    let mut places: Vec<_> = slots.iter().map(|slot| slot.span().paddr().get()).collect();
    places.sort_unstable();
    assert!(places.windows(2).all(|two| two[0] + 4096 <= two[1]));
    let refused = rig.pool.take_all(many(29), &any, &mut slots).unwrap_err();
    assert_eq!(refused, Error::Full { len: 4096, free: 0 });
    assert_eq!((slots.len(), rig.pool.stats().used), (100, 100 * 4096));
    rig.pool.take_all(many(28), &any, &mut slots).unwrap();
    for slot in slots {
        rig.pool.release(slot).unwrap();
    }
    assert_eq!(rig.pool.stats().used, 0);
}

#[test]
fn padding_of_granules_larger_than_slots_is_zero_on_both_sides() {
    let rig = Rig::new(64, 1);
    let request = SlotRequest { keep_bits: 0xfff, granule: 4096, ..SlotRequest::default() };
    let slot = rig.pool.take(original(ORIGINALS + 0x900, 0x300), &request).unwrap();
    let (start, end) = (slot.span().paddr().get(), slot.span().last().get() + 1);
    assert_eq!((start & 0xfff, end & 0xfff), (0x900, 0xc00));
    assert_eq!(rig.read(span(start - 0x900, 0x900)), [0; 0x900]);
    assert_eq!(rig.read(span(end, 0x400)), [0; 0x400]);
    assert_ne!(rig.read(span(end + 0x400, 0x400)), [0; 0x400], "nobody's");
}

#[test]
fn no_byte_behind_bits_that_are_kept_is_beyond_the_last_address() {
    let rig = Rig::new(64, 1);
    // In the second slot the bytes would begin early enough, were it not for the bits.
    let request = SlotRequest { keep_bits: 0x7ff, last: RAM + 2048 + 99, ..SlotRequest::default() };
    let take = || rig.pool.take(original(ORIGINALS + 80, 100), &request);
    let slot = take().unwrap();
    assert_eq!(slot.span(), span(RAM + 80, 100));
    assert!(matches!(take(), Err(Error::Full { len: 100, .. })));
    let longer = SlotRequest { last: request.last + 80, ..request };
    let second = rig.pool.take(original(ORIGINALS + 80, 100), &longer).unwrap();
    assert_eq!(second.span().last().get(), longer.last);
}
