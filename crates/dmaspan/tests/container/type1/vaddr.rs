//! Memory that moves to another address, or to another process, while devices use it.

use std::sync::Arc;

use dmaspan::container::type1::{Client, Process, uapi};
use dmaspan::container::{Attach, Interrupts, UnmapNotifier, Version};
use dmaspan::{Account, DmaSpace as _, Errno, IovaRange, UserAddr};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::memory::SimSpace;

use super::world::{Backing, PAGE, READ_WRITE, USER, World, map_arg};
use crate::common::faulty_domain;

const VADDR: u32 = uapi::VFIO_DMA_UNMAP_FLAG_VADDR;
const ALL: u32 = uapi::VFIO_DMA_UNMAP_FLAG_ALL;
const UPDATE: u32 = uapi::VFIO_DMA_MAP_FLAG_VADDR;

fn two_mappings(version: Version) -> World {
    let world = World::new(version, Backing::Domain);
    world.map(READ_WRITE, USER, 0, 4 * PAGE).unwrap();
    world.map(READ_WRITE, USER + 4 * PAGE, 8 * PAGE, 2 * PAGE).unwrap();
    world
}

#[test]
fn memory_without_an_address_stays_mapped_and_gets_one_again() {
    for version in [Version::V1, Version::V2] {
        let world = two_mappings(version);
        let before = world.snapshot();
        assert_eq!(world.unmap(VADDR, 0, 4 * PAGE), Ok(4 * PAGE));
        assert_eq!(world.snapshot(), before);
        // Only all of it, and only what has none.
        assert_eq!(world.map(UPDATE, USER, 0, 2 * PAGE), Err(Errno::EINVAL));
        assert_eq!(world.map(UPDATE, USER, PAGE, PAGE), Err(Errno::EINVAL));
        assert_eq!(world.map(UPDATE, USER, 8 * PAGE, 2 * PAGE), Err(Errno::EINVAL));
        assert_eq!(world.map(UPDATE, USER, 6 * PAGE, PAGE), Err(Errno::ENOENT));
        assert_eq!(world.map(UPDATE, USER, 0, 4 * PAGE), Ok(0));
        assert_eq!(world.map(UPDATE, USER, 0, 4 * PAGE), Err(Errno::EINVAL), "it has one");
        assert_eq!(world.snapshot(), before);
        assert_eq!(world.unmap_all(), Ok(6 * PAGE));
        assert_eq!((world.memory.pinned_frames(), world.account.used()), (0, 0));
    }
}

#[test]
fn addresses_are_taken_from_all_mappings_or_from_none() {
    let world = two_mappings(Version::V2);
    assert_eq!(world.unmap(VADDR, 8 * PAGE, 2 * PAGE), Ok(2 * PAGE));
    assert_eq!(world.unmap(VADDR, 0, 16 * PAGE), Err(Errno::EINVAL), "the second has none");
    assert_eq!(world.unmap(VADDR | ALL, 0, 0), Err(Errno::EINVAL));
    assert_eq!(world.map(UPDATE, USER, 0, 4 * PAGE), Err(Errno::EINVAL), "the first kept its own");
    assert_eq!(world.unmap(VADDR, PAGE, PAGE), Err(Errno::EINVAL), "no mapping is cut");
    assert_eq!(world.unmap(VADDR, 1 << 30, PAGE), Ok(0));
    assert_eq!(world.map(UPDATE, USER + 4 * PAGE, 8 * PAGE, 2 * PAGE), Ok(0));
    assert_eq!(world.unmap(VADDR | ALL, 0, 0), Ok(6 * PAGE));
    // What is mapped now has an address, and what has none can be unmapped.
    assert_eq!(world.map(READ_WRITE, USER, 16 * PAGE, PAGE), Ok(0));
    assert_eq!(world.unmap(0, 0, 16 * PAGE), Ok(6 * PAGE));
    assert_eq!(world.unmap(VADDR | ALL, 0, 0), Ok(PAGE));
}

#[test]
fn version_1_takes_no_address_from_the_middle_of_a_mapping() {
    let world = two_mappings(Version::V1);
    assert_eq!(world.unmap(VADDR, PAGE, 16 * PAGE), Ok(0));
    assert_eq!(world.map(UPDATE, USER, 0, 4 * PAGE), Err(Errno::EINVAL), "it has its address");
    assert_eq!(world.unmap(VADDR, 0, PAGE), Ok(4 * PAGE));
    assert_eq!(world.map(UPDATE, USER, 0, 4 * PAGE), Ok(0));
}

#[test]
fn a_new_owner_is_charged_before_the_old_one_is_not() {
    let world = two_mappings(Version::V2);
    assert_eq!(world.unmap(VADDR, 0, 4 * PAGE), Ok(4 * PAGE));
    let before = world.snapshot();
    // The same memory in another process.
    let space = Arc::new(SimSpace::new(Arc::clone(&world.memory)));
    let segments = world.space.resolve(user(USER, 4)).unwrap();
    let mut at = UserAddr::new(1 << 40);
    for segment in segments {
        let len = segment.user.checked_len().unwrap();
        space.map(at, &[dmaspan::Span::new(segment.paddr, len).unwrap()]).unwrap();
        at = at.wrapping_add(len);
    }
    let update = |account: &Arc<Account>, process| {
        let client = Client::new(&space, account).with_process(process);
        let mut arg = map_arg(32, UPDATE, 1 << 40, 0, 4 * PAGE);
        world.type1().ioctl(&client, uapi::VFIO_IOMMU_MAP_DMA, &mut arg)
    };
    let poor = Account::new(4 * PAGE - 1);
    assert_eq!(update(&poor, Process::Alive), Err(Errno::ENOMEM));
    let rich = Account::new(4 * PAGE);
    assert_eq!(update(&rich, Process::Exited), Err(Errno::ESRCH));
    assert_eq!((poor.used(), rich.used()), (0, 0));
    assert_eq!(world.snapshot(), before);
    assert_eq!(update(&rich, Process::Alive), Ok(0));
    assert_eq!((rich.used(), world.account.used()), (4 * PAGE, 2 * PAGE));
    assert_eq!(world.unmap_all(), Ok(6 * PAGE));
    assert_eq!((rich.used(), world.account.used()), (0, 0));
}

#[test]
fn nothing_is_attached_while_memory_has_no_address() {
    let world = two_mappings(Version::V2);
    let attach = || {
        let (domain, ..) = faulty_domain::<12>(&Faults::none());
        let result = world.container.attach(domain, Attach::new(Interrupts::Isolated));
        result.map(|_| ()).map_err(|error| world.container.errno(&error))
    };
    assert_eq!(world.unmap(VADDR, 0, 4 * PAGE), Ok(4 * PAGE));
    assert_eq!(attach(), Err(Errno::EBUSY));
    assert_eq!(world.map(UPDATE, USER, 0, 4 * PAGE), Ok(0));
    assert_eq!(attach(), Ok(()));
}

fn user(start: u64, pages: u64) -> dmaspan::UserRange {
    dmaspan::UserRange::from_len(UserAddr::new(start), pages * PAGE).unwrap()
}

#[test]
fn emulated_devices_need_the_addresses_of_memory() {
    struct Idle;
    impl UnmapNotifier for Idle {
        fn unmapping(&self, _range: IovaRange) {}
    }
    let world = two_mappings(Version::V2);
    let can = || world.type1().check_extension(uapi::VFIO_UPDATE_VADDR);
    assert_eq!(can(), 1);
    let device = world.container.attach_emulated(Arc::new(Idle)).unwrap();
    assert_eq!(can(), 0);
    assert_eq!(world.unmap(VADDR, 0, 4 * PAGE), Err(Errno::EBUSY));
    assert_eq!(world.unmap(VADDR, 1, 0), Err(Errno::EBUSY), "before the range is looked at");
    assert_eq!(world.unmap(VADDR | 8, 0, 4 * PAGE), Err(Errno::EINVAL), "behind the flags");
    world.container.detach_emulated(device).unwrap();
    assert_eq!(can(), 1);
    assert_eq!(world.unmap(VADDR, 0, 4 * PAGE), Ok(4 * PAGE));
}
