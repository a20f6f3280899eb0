//! The count of what is leaked, in a program that does nothing else.

use std::env;
use std::process::Command;

use dmaspan::swiotlb::{Fill, Growth, PoolConfig, SlotRequest};
use dmaspan::{Direction, leaked};

use crate::common::{SLOT, original};
use crate::flat::{FlatRig, SOURCE};

/// What tells a program that it is the one.
const ASKED: &str = "DMASPAN_POOL_LEAKS";

#[test]
fn child() {
    if env::var_os(ASKED).is_none() {
        return;
    }
    let growth = Some(Growth::new(8 * SLOT, 20 * SLOT));
    let rig = FlatRig::simple(8, PoolConfig { growth, ..PoolConfig::new(2) });
    let before = leaked();
    let any = SlotRequest::default();
    let aligned = SlotRequest { keep_bits: 0xfff, ..any };
    let take = |len, request| rig.pool.take(original(SOURCE, len), request).unwrap();
    for request in [&any, &aligned] {
        for len in [1, SLOT, 6 * SLOT] {
            rig.pool.release(take(len, request)).unwrap();
            let from = original(SOURCE, len);
            let map = rig.pool.map(from, Direction::FromDevice, Fill::Copy, request);
            rig.pool.unmap(map.unwrap()).unwrap();
            drop(rig.pool.lease(len, request).unwrap());
        }
        rig.pool.quarantine(take(SLOT, request)).unwrap();
    }
    // Memory of its own, and what was added.
    rig.pool.release(take(8 * SLOT, &any)).unwrap();
    drop(rig.pool.lease(8 * SLOT, &any).unwrap());
    rig.pool.grow().unwrap();
    rig.pool.release(take(7 * SLOT, &aligned)).unwrap();
    drop(rig.pool.lease(7 * SLOT, &any).unwrap());
    assert_eq!(leaked(), before, "nothing was lost");

    let lost = take(8 * SLOT, &any);
    let single = take(9 * SLOT, &any);
    drop(lost);
    let now = leaked();
    assert_eq!((now.handles - before.handles, now.slots - before.slots), (1, 8 * SLOT));
    assert_eq!(now.memory, before.memory);
    drop(rig);
    let then = leaked();
    assert_eq!((then.handles - now.handles, then.slots - now.slots), (1, 0));
    assert_eq!(then.memory - now.memory, (8 + 8 + 9) * SLOT, "the pool, with all that it got");
    drop(single);
    assert_eq!(leaked().slots - then.slots, 9 * SLOT);
}

#[test]
fn handles_that_are_dropped_and_pools_with_slots_out_are_leaks_and_nothing_else_is() {
    let program = env::current_exe().unwrap();
    let mut child = Command::new(program);
    child.args(["--exact", "leaks::child", "--nocapture"]).env(ASKED, "1");
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
