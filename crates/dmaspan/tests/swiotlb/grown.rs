//! The statistics of a pool that has grown.

use dmaspan::swiotlb::{Error, Growth, PoolConfig, SlotRequest};

use crate::common::{ORIGINALS, Rig, SLOT, Slot, original};

fn any() -> SlotRequest {
    SlotRequest::default()
}

fn take(rig: &Rig, slots: u64) -> Result<Slot, Error> {
    rig.pool.take(original(ORIGINALS, slots * SLOT), &any())
}

/// A pool of 4 slots that may grow by 64.
fn rig() -> Rig {
    let growth = Some(Growth::new(64 * SLOT, 64 * SLOT));
    Rig::with(4, PoolConfig { growth, ..PoolConfig::new(1) })
}

#[test]
fn what_fits_only_in_what_a_pool_grew_by_is_refused_because_that_is_full() {
    let rig = rig();
    rig.pool.grow().unwrap();
    let slot = take(&rig, 60).unwrap();
    let free = 8 * SLOT;
    assert_eq!(take(&rig, 5).unwrap_err(), Error::Full { len: 5 * SLOT, free });
    let max = 64 * SLOT;
    assert_eq!(take(&rig, 65).unwrap_err(), Error::TooLong { len: 65 * SLOT, max });
    rig.pool.release(slot).unwrap();
    assert_eq!(rig.pool.shrink(), max);
    let max = 4 * SLOT;
    assert_eq!(take(&rig, 65).unwrap_err(), Error::TooLong { len: 65 * SLOT, max });
}

#[test]
fn high_water_is_never_less_than_what_is_held_of_a_pool_that_grew() {
    let rig = rig();
    let high = || rig.pool.stats().high_water / SLOT;
    let own = take(&rig, 4).unwrap();
    // Memory for one request.
    let single = take(&rig, 3).unwrap();
    assert_eq!(high(), 7);
    rig.pool.release(single).unwrap();
    assert_eq!(high(), 7);
    rig.pool.grow().unwrap();
    let grown = take(&rig, 10).unwrap();
    let high_grown = high();
    assert!(high_grown >= 14);
    rig.pool.release(grown).unwrap();
    assert_eq!(rig.pool.shrink(), 64 * SLOT);
    assert_eq!(high(), high_grown, "what was is not forgotten with the memory");
    rig.pool.reset_high_water();
    assert_eq!(high(), 4);
    rig.pool.release(own).unwrap();
    assert_eq!(high(), 4);
}
