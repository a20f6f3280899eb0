//! A dropped pool leaves nothing behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use dmaspan::swiotlb::{
    Error, Growth, HostRefused, InSlot, Pool, PoolConfig, PoolMemory, Room, SlotRequest, To,
    Transfer,
};
use dmaspan::{Promise, Span};

use crate::common::{ORIGINALS, Rig, SLOT, original, span};
use crate::flat::{FlatRig, Place, SOURCE};

fn any() -> SlotRequest {
    SlotRequest::default()
}

fn growing() -> PoolConfig {
    PoolConfig { growth: Some(Growth::new(8 * SLOT, 1 << 20)), ..PoolConfig::new(2) }
}

#[test]
fn a_pool_without_slots_out_takes_its_memory_back_and_drops_it() {
    let rig = FlatRig::simple(8, growing());
    rig.pool.grow().unwrap();
    let slot = rig.pool.take(original(SOURCE, 8 * SLOT), &any()).unwrap();
    rig.pool.release(slot).unwrap();
    let FlatRig { memory, pool, .. } = rig;
    drop(pool);
    assert_eq!(memory.values(), 1);
    assert!(memory.with(|state| state.shared.is_empty()));
}

#[test]
fn a_pool_with_slots_out_leaks_its_memory() {
    let rig = FlatRig::simple(8, growing());
    let slot = rig.pool.take(original(SOURCE, 1), &any()).unwrap();
    let FlatRig { memory, pool, .. } = rig;
    drop(pool);
    assert_eq!(memory.values(), 2, "the pool's is never dropped");
    assert_eq!(memory.with(|state| state.shared.clone()), [span(0x10_0000, 8 * SLOT)]);
    // No later pool is the slot's.
    for _ in 0..100 {
        let other = FlatRig::simple(8, growing());
        assert!(matches!(other.pool.copy(&slot, 0, 1, To::Slot), Err(Error::Foreign { .. })));
    }
}

#[test]
fn slots_out_of_what_a_pool_grew_by_leak_it_too() {
    let rig = FlatRig::simple(1, growing());
    let own = rig.pool.take(original(SOURCE, SLOT), &any()).unwrap();
    let single = rig.pool.take(original(SOURCE, SLOT), &any()).unwrap();
    rig.pool.release(own).unwrap();
    let FlatRig { memory, pool, .. } = rig;
    drop(pool);
    assert_eq!(memory.values(), 2);
    assert!(memory.with(|state| state.shared.contains(&single.span())));
}

#[test]
fn frames_of_a_pool_with_slots_out_stay_pinned() {
    let rig = Rig::new(64, 1);
    let pinned = rig.memory.pinned_frames();
    let slot = rig.pool.take(original(ORIGINALS, SLOT), &any()).unwrap();
    drop(rig.pool);
    assert_eq!((rig.memory.pinned_frames(), pinned), (64, 64));
    assert_eq!(rig.pool_memory.seen().len(), 1);
    drop(slot);
}

#[test]
fn a_pool_of_which_the_host_kept_a_part_leaks_its_memory() {
    for keeps_all in [true, false] {
        let rig = FlatRig::simple(8, growing());
        rig.pool.grow().unwrap();
        rig.memory.refuse.1.store(true, Ordering::Relaxed);
        if !keeps_all {
            assert_eq!(rig.pool.shrink(), 0, "the host kept it");
            assert_eq!(rig.pool.stats().leaked, 8 * SLOT);
            rig.memory.refuse.1.store(false, Ordering::Relaxed);
        }
        let FlatRig { memory, pool, .. } = rig;
        drop(pool);
        assert_eq!(memory.values(), 2);
    }
}

#[test]
fn a_pool_that_the_host_does_not_share_leaks_its_memory() {
    let memory = crate::flat::Flat::new(vec![span(0, SLOT)], span(SOURCE, 1));
    memory.refuse.0.store(true, Ordering::Relaxed);
    let place = Place::default();
    let refused = Pool::new(memory.clone(), growing(), place).unwrap_err();
    assert_eq!(refused, Error::Host { span: span(0, SLOT) });
    assert_eq!(memory.values(), 2);
}

/// Memory that grows once, and that is not taken back: the hook panics.
struct Panics([Span; 2]);

// SAFETY: it is never accessed.
unsafe impl PoolMemory for Panics {
    type Address = dmaspan::PhysAddr;

    fn spans(&self) -> &[Span] {
        &self.0[..1]
    }

    fn copy(&self, _: Transfer) {}

    fn zero(&self, _: InSlot) {}

    fn read(&self, _: InSlot, _: &mut [u8]) {}

    fn write(&self, _: InSlot, _: &[u8]) {}

    fn allocate(&self, _: Room) -> Option<Span> {
        Some(self.0[1])
    }

    fn unshare(&self, _promise: Promise<'_>, span: Span) -> Result<(), HostRefused> {
        panic!("{span} is kept");
    }
}

#[test]
fn slots_of_a_pool_that_a_hook_interrupts_as_it_is_dropped_fit_no_other() {
    let (mut others, mut slots) = (Vec::new(), Vec::new());
    for _ in 0..64 {
        let memory = Panics([span(0, 8 * SLOT), span(0x10_0000, 8 * SLOT)]);
        let pool = Pool::new(memory, growing(), Place::default()).unwrap();
        pool.grow().unwrap();
        slots.push(pool.take(original(SOURCE, 1), &any()).unwrap());
        catch_unwind(AssertUnwindSafe(|| drop(pool))).unwrap_err();
    }
    // What was freed last is allocated first, and what tells pools apart is as small as these.
    for _ in 0..64 {
        others.push(FlatRig::simple(8, growing()));
    }
    for slot in &slots {
        let foreign = Err(Error::Foreign { addr: slot.span().paddr().get() });
        let is_foreign = |rig: &FlatRig| rig.pool.copy(slot, 0, 1, To::Slot) == foreign;
        assert!(others.iter().all(is_foreign));
    }
}
