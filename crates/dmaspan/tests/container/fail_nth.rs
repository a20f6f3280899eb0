//! Every operation with its first fallible step failing, its second, and so on: pins, tables,
//! invalidations, map syncs, detaches, and copies of users' memory. As the selftest of iommufd
//! (tools/testing/selftests/iommu/iommufd_fail_nth.c) does, and looks at everything.

use dmaspan::container::{DirtyRead, Error, VaddrUpdate, Version};
use dmaspan::pin::Dirty;
use dmaspan::{Iova, UserAddr, UserRange};
use dmaspan_sim::fault::Fired;

use crate::common::PROT;
use world::pages_at;
use world::{MAPPED, MIXED, MIXED_PAGES, MOVED, NEXT, PAGE, Refused, Snapshot, USER, World};

mod world;

/// What an operation may leave when hardware does not answer once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaves {
    /// Nothing, or all of its effect.
    Nothing,
    /// Or what hardware may still use, pinned, charged and out of use.
    Quarantine,
}

struct Operation {
    name: &'static str,
    /// How many steps can fail at least.
    steps: u32,
    leaves: Leaves,
    prepare: fn() -> World,
    run: fn(&mut World) -> Result<(), Refused>,
}

const fn operation(
    name: &'static str,
    steps: u32,
    prepare: fn() -> World,
    run: fn(&mut World) -> Result<(), Refused>,
) -> Operation {
    Operation { name, steps, leaves: Leaves::Nothing, prepare, run }
}

/// One that takes translations away.
const fn removal(
    name: &'static str,
    steps: u32,
    prepare: fn() -> World,
    run: fn(&mut World) -> Result<(), Refused>,
) -> Operation {
    Operation { name, steps, leaves: Leaves::Quarantine, prepare, run }
}

fn with(domains: usize) -> World {
    World::new(domains, Version::V2).mapped()
}

fn map_next(world: &mut World) -> Result<(), Refused> {
    let (iova, pages, user) = NEXT;
    world.map(iova, USER + user * PAGE, pages, PROT)
}

fn map_mixed(world: &mut World) -> Result<(), Refused> {
    world.map(NEXT.0, MIXED, MIXED_PAGES, PROT)
}

const MAPS: &[Operation] = &[
    operation("map into no domain", 0, || with(0), map_next),
    operation("map into one domain", 17, || with(1), map_next),
    operation("map into two domains", 18, || with(2), map_next),
    operation("map of mixed kinds", 16, || with(2), map_mixed),
    operation("map while tracking", 18, || with(2).tracking(), map_next),
    operation("map with emulated devices", 17, || with(1).emulated(), map_next),
];

/// All three mappings are in it, and an end of its own.
fn unmap(world: &mut World) -> Result<(), Refused> {
    world.container.unmap(pages_at(10, 60)).map(|bytes| assert_eq!(bytes, 28 * PAGE))
}

fn unmap_all(world: &mut World) -> Result<(), Refused> {
    world.container.unmap_all().map(|_| ())
}

fn unmap_dirty(world: &mut World) -> Result<(), Refused> {
    world.words = vec![0; 1];
    let asked = pages_at(8, 64);
    let result = world.container.unmap_dirty(asked, PAGE, &mut world.words);
    // What was written is reported, also where hardware may still use it.
    let written = (16..32).chain(40..52).filter(|page| page % 3 == 0);
    for page in written {
        assert_eq!(world.words[0] >> (page - 8) & 1, 1, "page {page}");
    }
    result.map(|bytes| assert_eq!(bytes, 28 * PAGE))
}

fn unmap_v1(world: &mut World) -> Result<(), Refused> {
    world.container.unmap(pages_at(16, 1)).map(|bytes| assert_eq!(bytes, 12 * PAGE))
}

fn revoke(world: &mut World) -> Result<(), Refused> {
    let bar = MIXED_PAGES / 3 * PAGE;
    let user = UserRange::from_len(UserAddr::new(MIXED + bar), bar).unwrap();
    world.container.revoke(&world.space, user).map(|bytes| assert_eq!(bytes, bar))
}

const UNMAPS: &[Operation] = &[
    operation("unmap without domains", 0, || with(0), unmap),
    removal("unmap from one domain", 6, || with(1), unmap),
    removal("unmap from two domains", 12, || with(2), unmap),
    removal("unmap of mixed kinds", 19, || with(2).with_mixed(), unmap_all),
    removal("unmap of pinned pages", 12, || with(2).emulated().pinning(), unmap),
    removal("unmap by version 1", 2, || World::new(1, Version::V1).mapped(), unmap_v1),
    removal("unmap with a bitmap", 12, || with(2).tracking(), unmap_dirty),
    removal("unmap of everything", 12, || with(2), unmap_all),
    removal("revoke", 1, || with(2).with_mixed(), revoke),
];

fn attach(world: &mut World) -> Result<(), Refused> {
    world.attach()
}

fn detach(world: &mut World, n: usize) -> Result<(), Refused> {
    let result = world.container.detach(world.ids[n]);
    assert!(!world.container.info().domains.contains(&world.ids[n]), "it is out in any case");
    result
}

const DOMAINS: &[Operation] = &[
    operation("attach the first domain", 26, || with(0), attach),
    operation("attach the first of mixed kinds", 40, || with(0).with_mixed(), attach),
    operation("attach the second domain", 3, || with(1), attach),
    operation("attach the third of mixed kinds", 3, || with(2).with_mixed(), attach),
    operation("attach while tracking", 3, || with(1).tracking(), attach),
    operation("attach where pages are pinned", 26, || with(0).emulated().pinning(), attach),
    operation("detach the first domain", 1, || with(2), |world| detach(world, 0)),
    operation("detach the second domain", 1, || with(2), |world| detach(world, 1)),
    operation("detach the last domain", 1, || with(1), |world| detach(world, 0)),
    operation(
        "detach the last from devices",
        1,
        || with(1).emulated().pinning(),
        |world| detach(world, 0),
    ),
];

fn pin(world: &mut World) -> Result<(), Refused> {
    // Parts of two mappings that follow each other.
    let pin = world.container.pin_external(pages_at(20, 10), PROT, &mut Vec::new())?;
    world.pins.push(pin);
    Ok(())
}

fn pin_mixed(world: &mut World) -> Result<(), Refused> {
    let asked = pages_at(64, MIXED_PAGES);
    let pin = world.container.pin_external(asked, PROT, &mut Vec::new())?;
    world.pins.push(pin);
    Ok(())
}

fn pinned(domains: usize) -> World {
    let mut world = with(domains).emulated();
    pin(&mut world).unwrap();
    world
}

fn unpin(world: &mut World) -> Result<(), Refused> {
    let pin = world.pins.pop().unwrap();
    world.container.unpin_external(pin, Dirty::Written).unwrap();
    Ok(())
}

fn unpin_middle(world: &mut World) -> Result<(), Refused> {
    world.container.unpin_range(pages_at(27, 2), Dirty::Written)
}

fn read(world: &mut World) -> Result<(), Refused> {
    let mut bytes = vec![0; 5 * 4096];
    world.container.read(Iova::new(25 * PAGE + 7), &mut bytes)
}

fn write(world: &mut World) -> Result<(), Refused> {
    world.container.write(Iova::new(25 * PAGE + 7), &[9; 5 * 4096])
}

fn leave(world: &mut World) -> Result<(), Refused> {
    let (id, _) = world.device.as_ref().unwrap();
    world.container.detach_emulated(*id)
}

const DEVICES: &[Operation] = &[
    operation("pin without domains", 9, || with(0).emulated(), pin),
    operation("pin with domains", 9, || with(2).emulated(), pin),
    operation("pin mixed kinds", 13, || with(0).with_mixed().emulated(), pin_mixed),
    operation("pin while tracking", 9, || with(1).tracking().emulated(), pin),
    operation("pin a range", 4, || with(0).emulated(), |world| world.pin_range(26, 4)),
    operation("unpin", 0, || pinned(1), unpin),
    operation("unpin the middle", 0, || with(0).emulated().pinning(), unpin_middle),
    operation("read", 1, || with(1), read),
    operation("write", 1, || with(1), write),
    operation("the last device leaves", 0, || with(0).emulated().pinning(), leave),
];

fn start(world: &mut World) -> Result<(), Refused> {
    world.container.start_dirty()
}

fn stop(world: &mut World) -> Result<(), Refused> {
    world.container.stop_dirty()
}

/// Of a sync that failed bits are reported all the same.
fn get(world: &mut World, how: DirtyRead) -> Result<(), Refused> {
    world.words = vec![0; 1];
    let result = world.container.dirty_bitmap(pages_at(8, 64), PAGE, &mut world.words, how);
    for page in (16..32).chain(40..52).filter(|page| page % 3 == 0) {
        assert_eq!(world.words[0] >> (page - 8) & 1, 1, "page {page}");
    }
    result
}

fn invalidate(world: &mut World) -> Result<(), Refused> {
    world.container.invalidate_vaddr_all().map(|_| ())
}

fn invalid(domains: usize) -> World {
    let mut world = with(domains);
    invalidate(&mut world).unwrap();
    world
}

/// The memory of one mapping is another process's now.
fn update(world: &mut World) -> Result<(), Refused> {
    let (iova, pages, user) = MAPPED[0];
    let user = UserRange::from_len(UserAddr::new(MOVED + user * PAGE), pages * PAGE).unwrap();
    let update = VaddrUpdate::new(&world.moved, user, Iova::new(iova * PAGE));
    world.container.update_vaddr(&update.owner(&world.accounts[1]))
}

const MARKS: &[Operation] = &[
    operation("start to track", 1, || with(2), start),
    operation("stop to track", 0, || with(2).tracking(), stop),
    operation("read marks", 1, || with(2).tracking(), |world| get(world, DirtyRead::Clear)),
    operation("look at marks", 0, || with(2).tracking(), |world| get(world, DirtyRead::Keep)),
    operation("invalidate addresses", 0, || with(2), invalidate),
    operation("update addresses", 0, || invalid(2), update),
];

/// What an operation does when nothing fails.
fn effect(operation: &Operation) -> Snapshot {
    let mut world = (operation.prepare)();
    (operation.run)(&mut world).unwrap();
    world.snapshot()
}

/// Runs an operation with every step failing once. Returns how many there are.
fn sweep(operation: &Operation) -> u32 {
    let Operation { name, leaves, .. } = operation;
    let after = effect(operation);
    for n in 1.. {
        let mut world = (operation.prepare)();
        let before = world.snapshot();
        world.faults.arm(n);
        let result = (operation.run)(&mut world);
        let fired = world.faults.disarm();
        let what = format!("{name}, step {n}");
        world.assert_safe(&what);
        let now = world.snapshot();
        match result {
            Ok(()) => now.assert_same(&after, fired, &what),
            Err(Error::NotForgotten { .. }) if *leaves == Leaves::Quarantine => {
                now.assert_kept(&before, &after, &what);
                // Of device memory nothing is pinned or charged.
                assert!(now.holds_more_than(&after) || *name == "revoke", "{what}");
            }
            Err(error) => {
                assert_eq!(fired, Fired::Yes, "{what}: {error}");
                now.assert_same(&before, fired, &what);
                now.assert_tables(&before, &what);
            }
        }
        if fired == Fired::No {
            now.assert_tables(&after, &what);
        }
        if fired == Fired::No {
            return n - 1;
        }
    }
    unreachable!("an operation has finitely many steps")
}

/// With hardware that answers to nothing any more once a step has failed: whatever else becomes of
/// the operation, no device gets at memory that is not pinned.
fn sweep_dead(operation: &Operation, steps: u32) {
    for n in 1..=steps {
        let mut world = (operation.prepare)();
        world.faults.arm(n);
        for view in world.all_views() {
            view.iotlb.fail_next_invalidations(u64::MAX);
        }
        let _ = (operation.run)(&mut world);
        world.faults.disarm();
        let what = format!("{} with dead hardware, step {n}", operation.name);
        world.assert_safe(&what);
        let _ = world.container.unmap_all();
        world.assert_safe(&what);
    }
}

fn every(operations: &[Operation]) {
    for operation in operations {
        let steps = sweep(operation);
        assert!(steps >= operation.steps, "{}: {steps} steps", operation.name);
        sweep_dead(operation, steps);
    }
}

#[test]
fn a_map_that_fails_at_any_step_changes_nothing() {
    every(MAPS);
}

#[test]
fn an_unmap_that_fails_at_any_step_keeps_what_hardware_may_use() {
    every(UNMAPS);
}

#[test]
fn a_change_of_domains_that_fails_at_any_step_changes_nothing() {
    every(DOMAINS);
}

#[test]
fn what_an_emulated_device_does_changes_nothing_where_it_fails() {
    every(DEVICES);
}

#[test]
fn tracking_and_addresses_that_fail_at_any_step_lose_nothing() {
    every(MARKS);
}
