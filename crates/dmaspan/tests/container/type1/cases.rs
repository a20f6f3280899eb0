//! One case for each thing that may be wrong with a request, and for two at once.

use std::cell::Cell;
use std::sync::Arc;

use dmaspan::container::Version;
use dmaspan::container::type1::{Client, Process, uapi};
use dmaspan::{Account, Errno};

use super::oracle::{Map, Mapping, Oracle, Unmap};
use super::world::{
    Backing, LAST, PAGE, PAGES, READ_WRITE, USER, World, bytes, map_arg, unmap_arg,
};

const TOP_PAGE: u64 = u64::MAX - (PAGE - 1);
const VADDR: u32 = uapi::VFIO_DMA_MAP_FLAG_VADDR;
const BITMAP: u32 = uapi::VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP;
const ALL: u32 = uapi::VFIO_DMA_UNMAP_FLAG_ALL;
const UNMAP_VADDR: u32 = uapi::VFIO_DMA_UNMAP_FLAG_VADDR;

/// What is mapped before each case: first address and pages.
const MAPPED: [(u64, u64); 3] = [(0x10000, 4), (0x20000, 1), (0x40000, 16)];

fn prepared(version: Version, backing: Backing) -> (World, Oracle) {
    let world = World::limited(version, backing, 32 * PAGE, 4);
    for (iova, pages) in MAPPED {
        world.map(READ_WRITE, USER + PAGE, iova, pages * PAGE).unwrap();
    }
    let domain = (backing == Backing::Domain).then_some(LAST);
    let mapped = MAPPED.map(|(iova, pages)| Mapping::new(iova, pages * PAGE)).to_vec();
    (world, Oracle { v2: version == Version::V2, domain, max_mappings: 4, mapped })
}

/// argsz, flags, vaddr, iova and size of a map, and its answer with a domain.
type MapCase = (u32, u32, u64, u64, u64, Result<u32, Errno>);

const MAPS: &[MapCase] = &[
    (32, READ_WRITE, USER, 0, PAGE, Ok(0)),
    (32, 1, USER, 0, PAGE, Ok(0)),
    (32, 2, USER, 0, PAGE, Ok(0)),
    (4096, 3, USER, 0, PAGE, Ok(0)),
    (32, 3, USER, LAST - (PAGE - 1), PAGE, Ok(0)),
    (32, 3, USER, 0x21000, 2 * PAGE, Ok(0)),
    (32, 3, USER, 0xf000, PAGE, Ok(0)),
    // Lengths and flags come first.
    (0, 3, USER, 0, PAGE, Err(Errno::EINVAL)),
    (31, 3, USER, 0, PAGE, Err(Errno::EINVAL)),
    (31, 3, USER, TOP_PAGE, 2 * PAGE, Err(Errno::EINVAL)),
    (32, 8, USER, 0, PAGE, Err(Errno::EINVAL)),
    (32, 3 | 1 << 31, USER, 0, PAGE, Err(Errno::EINVAL)),
    (32, 3 | 8, USER, TOP_PAGE, 2 * PAGE, Err(Errno::EINVAL)),
    (32, 3, USER, 0, 0, Err(Errno::EINVAL)),
    (32, 3, u64::MAX, u64::MAX, 0, Err(Errno::EINVAL)),
    // Wrapping, before what the flags mean and before alignment.
    (32, 3, USER, TOP_PAGE, 2 * PAGE, Err(Errno::EOVERFLOW)),
    (32, 3, TOP_PAGE, 0, 2 * PAGE, Err(Errno::EOVERFLOW)),
    (32, 3, USER, u64::MAX, 2, Err(Errno::EOVERFLOW)),
    (32, 3, USER + 1, PAGE, u64::MAX, Err(Errno::EOVERFLOW)),
    (32, 0, USER, TOP_PAGE, 2 * PAGE, Err(Errno::EOVERFLOW)),
    (32, 3 | VADDR, USER, TOP_PAGE, 2 * PAGE, Err(Errno::EOVERFLOW)),
    // Neither or both of an access and an address.
    (32, 0, USER, 0, PAGE, Err(Errno::EINVAL)),
    (32, 0, USER, 0x10000, PAGE, Err(Errno::EINVAL)),
    (32, 1 | VADDR, USER, 0x10000, 4 * PAGE, Err(Errno::EINVAL)),
    (32, 2 | VADDR, USER, 0, PAGE, Err(Errno::EINVAL)),
    // Alignment, before overlap.
    (32, 3, USER + 1, 0, PAGE, Err(Errno::EINVAL)),
    (32, 3, USER, 1, PAGE, Err(Errno::EINVAL)),
    (32, 3, USER, 0, PAGE + 1, Err(Errno::EINVAL)),
    (32, 3, USER, 0x10800, PAGE, Err(Errno::EINVAL)),
    (32, VADDR, USER + 1, 0x10000, 4 * PAGE, Err(Errno::EINVAL)),
    // Addresses of nothing, and of mappings whose memory is known.
    (32, VADDR, USER, 0, PAGE, Err(Errno::ENOENT)),
    (32, VADDR, USER, 0x10000, 4 * PAGE, Err(Errno::EINVAL)),
    (32, VADDR, USER, 0x10000, PAGE, Err(Errno::EINVAL)),
    // Overlap, before ranges.
    (32, 3, USER, 0x10000, 4 * PAGE, Err(Errno::EEXIST)),
    (32, 3, USER, 0x13000, 2 * PAGE, Err(Errno::EEXIST)),
    (32, 3, USER, 0xf000, 2 * PAGE, Err(Errno::EEXIST)),
    (32, 3, USER, 0, u64::MAX - (PAGE - 1), Err(Errno::EOVERFLOW)),
    (32, 3, 0, 0, TOP_PAGE, Err(Errno::EEXIST)),
    // Ranges, before memory.
    (32, 3, USER, LAST + 1, PAGE, Err(Errno::EINVAL)),
    (32, 3, 0, LAST - (PAGE - 1), 2 * PAGE, Err(Errno::EINVAL)),
    // Memory.
    (32, 3, 0, 0, PAGE, Err(Errno::EFAULT)),
    (32, 3, USER + (PAGES - 1) * PAGE, 0, 2 * PAGE, Err(Errno::EFAULT)),
];

/// argsz, flags, iova and size of an unmap, and the answers of version 2 and version 1.
type UnmapCase = (u32, u32, u64, u64, Result<u64, Errno>, Result<u64, Errno>);

const BAD: Result<u64, Errno> = Err(Errno::EINVAL);
const WRAPS: Result<u64, Errno> = Err(Errno::EOVERFLOW);

const UNMAPS: &[UnmapCase] = &[
    (24, 0, 0x10000, 4 * PAGE, Ok(4 * PAGE), Ok(4 * PAGE)),
    (4096, 0, 0x10000, 4 * PAGE, Ok(4 * PAGE), Ok(4 * PAGE)),
    (24, 0, 0, 1 << 20, Ok(21 * PAGE), Ok(21 * PAGE)),
    (24, 0, 0, TOP_PAGE, Ok(21 * PAGE), Ok(21 * PAGE)),
    (24, 0, 0xf000, 0x12000, Ok(5 * PAGE), Ok(5 * PAGE)),
    (24, ALL, 0, 0, Ok(21 * PAGE), Ok(21 * PAGE)),
    // Nothing there is no error.
    (24, 0, 0, PAGE, Ok(0), Ok(0)),
    (24, 0, 0x14000, 0xc000, Ok(0), Ok(0)),
    (24, 0, TOP_PAGE, PAGE, Ok(0), Ok(0)),
    // Parts of mappings.
    (24, 0, 0x10000, PAGE, BAD, Ok(4 * PAGE)),
    (24, 0, 0x11000, PAGE, BAD, Ok(0)),
    (24, 0, 0x11000, 3 * PAGE, BAD, Ok(0)),
    (24, 0, 0x13000, 0x10000, BAD, Ok(0)),
    (24, 0, 0xf000, 2 * PAGE, BAD, Ok(4 * PAGE)),
    (24, 0, 0x20000, 0x21000, BAD, Ok(17 * PAGE)),
    (24, 0, 0x4f000, TOP_PAGE - 0x4f000, BAD, Ok(0)),
    // Lengths and flags.
    (0, 0, 0x10000, 4 * PAGE, BAD, BAD),
    (23, 0, 0x10000, 4 * PAGE, BAD, BAD),
    (23, 0, TOP_PAGE, 2 * PAGE, BAD, BAD),
    (24, 8, 0x10000, 4 * PAGE, BAD, BAD),
    (24, 1 << 31, TOP_PAGE, 2 * PAGE, BAD, BAD),
    (48, BITMAP | ALL, 0, 0, BAD, BAD),
    (48, BITMAP | UNMAP_VADDR, 0x10000, 4 * PAGE, BAD, BAD),
    (47, BITMAP, 0x10000, 4 * PAGE, BAD, BAD),
    // Alignment, before wrapping.
    (24, 0, 0x10001, 4 * PAGE, BAD, BAD),
    (24, 0, 0x10000, 4 * PAGE + 1, BAD, BAD),
    (24, 0, 0x10000, 0, BAD, BAD),
    (24, 0, u64::MAX, 2 * PAGE, BAD, BAD),
    (24, 0, TOP_PAGE, PAGE + 1, BAD, BAD),
    (24, UNMAP_VADDR, 0x10000, 0, BAD, BAD),
    (24, UNMAP_VADDR, TOP_PAGE, 2 * PAGE, WRAPS, WRAPS),
    (24, UNMAP_VADDR | ALL, PAGE, 0, BAD, BAD),
    (24, 0, TOP_PAGE, 2 * PAGE, WRAPS, WRAPS),
    (24, 0, PAGE, TOP_PAGE, Ok(21 * PAGE), Ok(21 * PAGE)),
    (24, 0, 2 * PAGE, TOP_PAGE, WRAPS, WRAPS),
    // Everything is everything.
    (24, ALL, PAGE, 0, BAD, BAD),
    (24, ALL, 0, PAGE, BAD, BAD),
];

#[test]
fn every_map_is_answered_as_linux_does() {
    for version in [Version::V1, Version::V2] {
        for &(argsz, flags, vaddr, iova, size, expected) in MAPS {
            let (world, mut oracle) = prepared(version, Backing::Domain);
            let before = world.snapshot();
            let mut arg = map_arg(argsz, flags, vaddr, iova, size);
            let sent = arg.clone();
            let result = world.ask(uapi::VFIO_IOMMU_MAP_DMA, &mut arg);
            let case = format!("argsz {argsz} flags {flags:#x} {vaddr:#x} at {iova:#x}+{size:#x}");
            assert_eq!(result, expected, "{case}");
            assert_eq!(arg, sent, "{case}: it is only read");
            let own = oracle.map(Map { argsz, flags, vaddr, iova, size });
            assert_eq!(own.map(|()| 0), expected, "{case}: the oracle");
            assert_eq!(world.snapshot() == before, expected.is_err(), "{case}");
            world.unmap_all().unwrap();
            assert_eq!((world.memory.pinned_frames(), world.account.used()), (0, 0));
        }
    }
}

#[test]
fn every_unmap_is_answered_as_linux_does() {
    for version in [Version::V1, Version::V2] {
        for &(argsz, flags, iova, size, v2, v1) in UNMAPS {
            let expected = if version == Version::V2 { v2 } else { v1 };
            let (world, mut oracle) = prepared(version, Backing::Domain);
            let before = world.snapshot();
            let mut arg = unmap_arg(argsz, flags, iova, size);
            arg.extend(bytes(&[], &[PAGE, 8, USER]));
            let mut sent = arg.clone();
            let result = world.ask(uapi::VFIO_IOMMU_UNMAP_DMA, &mut arg);
            let case = format!("{version:?} argsz {argsz} flags {flags:#x} {iova:#x}+{size:#x}");
            assert_eq!(result, expected.map(|_| 0), "{case}");
            if let Ok(unmapped) = expected {
                sent[16..24].copy_from_slice(&unmapped.to_ne_bytes());
            }
            assert_eq!(arg, sent, "{case}: the size alone is written");
            let own = oracle.unmap(Unmap { argsz, flags, iova, size });
            assert_eq!(own, expected, "{case}: the oracle");
            assert_eq!(world.snapshot() == before, !matches!(expected, Ok(1..)), "{case}");
            assert_eq!(world.container.mappings(), oracle.mapped.len(), "{case}");
        }
    }
}

#[test]
fn an_argument_cut_short_is_a_bad_address() {
    let (world, _) = prepared(Version::V2, Backing::Domain);
    let before = world.snapshot();
    let map = map_arg(32, READ_WRITE, USER, 0, PAGE);
    let unmap = unmap_arg(24, 0, 0x10000, 4 * PAGE);
    let mut with_bitmap = unmap_arg(48, BITMAP, 0x10000, 4 * PAGE);
    with_bitmap.extend(bytes(&[], &[PAGE, 8, USER]));
    let requests = [
        (uapi::VFIO_IOMMU_MAP_DMA, map),
        (uapi::VFIO_IOMMU_UNMAP_DMA, unmap),
        (uapi::VFIO_IOMMU_UNMAP_DMA, with_bitmap),
        (uapi::VFIO_IOMMU_DIRTY_PAGES, bytes(&[8, 1], &[])),
        (uapi::VFIO_IOMMU_DIRTY_PAGES, bytes(&[48, 4], &[0, PAGE, PAGE, 8, USER])),
    ];
    for (request, whole) in requests {
        for len in 0..whole.len() {
            let mut arg = whole[..len].to_vec();
            assert_eq!(world.ask(request, &mut arg), Err(Errno::EFAULT), "{request:#x} of {len}");
            assert_eq!(arg, whole[..len]);
        }
        // A length that the request could not have is what is wrong first.
        let mut short = 7u32.to_ne_bytes();
        assert_eq!(world.ask(request, &mut short), Err(Errno::EINVAL));
    }
    assert_eq!(world.snapshot(), before);
}

#[test]
fn the_last_place_is_missing_before_ranges_and_memory_are_looked_at() {
    let (world, _) = prepared(Version::V2, Backing::Domain);
    world.map(READ_WRITE, USER, 0, PAGE).unwrap();
    let before = world.snapshot();
    for (vaddr, iova) in [(USER, PAGE), (USER, LAST + 1), (0, PAGE)] {
        assert_eq!(world.map(READ_WRITE, vaddr, iova, PAGE), Err(Errno::ENOSPC));
    }
    assert_eq!(world.map(READ_WRITE, USER, 0x10000, PAGE), Err(Errno::EEXIST), "overlap is first");
    assert_eq!(world.map(READ_WRITE, USER, 1, PAGE), Err(Errno::EINVAL), "alignment too");
    assert_eq!(world.snapshot(), before);
    world.unmap(0, 0x20000, PAGE).unwrap();
    world.map(READ_WRITE, USER, PAGE, PAGE).unwrap();
}

#[test]
fn more_than_the_client_may_lock_is_no_memory() {
    let (world, _) = prepared(Version::V2, Backing::Domain);
    let before = world.snapshot();
    let all = PAGES * PAGE;
    assert_eq!(world.map(READ_WRITE, USER, 0x80000, all), Err(Errno::ENOMEM));
    assert_eq!(world.map(READ_WRITE, USER, LAST + 1, all), Err(Errno::EINVAL), "ranges are first");
    assert_eq!(world.snapshot(), before);
    // Without a domain nothing is locked.
    let (world, _) = prepared(Version::V2, Backing::None);
    assert_eq!(world.map(READ_WRITE, USER, 0x80000, all), Ok(0));
    assert_eq!(world.account.used(), 0);
}

#[test]
fn what_is_locked_is_the_clients_and_not_the_containers() {
    let (world, _) = prepared(Version::V2, Backing::Domain);
    assert_eq!(world.account.used(), 21 * PAGE);
    let privileged = Account::new(u64::MAX);
    let client = Client::new(&world.space, &privileged);
    let mut arg = map_arg(32, READ_WRITE, USER, 0x80000, PAGES * PAGE);
    let result = world.type1().ioctl(&client, uapi::VFIO_IOMMU_MAP_DMA, &mut arg);
    assert_eq!(result, Ok(0));
    assert_eq!((world.account.used(), privileged.used()), (21 * PAGE, PAGES * PAGE));
    world.unmap_all().unwrap();
    assert_eq!((world.account.used(), privileged.used()), (0, 0));
}

#[test]
fn a_client_that_has_exited_has_no_memory_to_map() {
    let (world, _) = prepared(Version::V2, Backing::Domain);
    let before = world.snapshot();
    let map = |account: &Arc<Account>, vaddr, iova| {
        let client = Client::new(&world.space, account).with_process(Process::Exited);
        let mut arg = map_arg(32, READ_WRITE, vaddr, iova, PAGE);
        world.type1().ioctl(&client, uapi::VFIO_IOMMU_MAP_DMA, &mut arg)
    };
    assert_eq!(map(&world.account, USER, 0), Err(Errno::ENODEV));
    assert_eq!(map(&world.account, 0, 0), Err(Errno::ENODEV), "before a hole is found");
    assert_eq!(map(&Account::new(0), USER, 0), Err(Errno::ENODEV), "before it is charged");
    assert_eq!(map(&world.account, USER, LAST + 1), Err(Errno::EINVAL), "the request comes first");
    assert_eq!(map(&world.account, USER, 0x10000), Err(Errno::EEXIST));
    assert_eq!(world.snapshot(), before);
    // What it has mapped can be unmapped.
    let client = world.client().with_process(Process::Exited);
    let mut arg = unmap_arg(24, ALL, 0, 0);
    assert_eq!(world.type1().ioctl(&client, uapi::VFIO_IOMMU_UNMAP_DMA, &mut arg), Ok(0));
    assert_eq!(world.memory.pinned_frames(), 0);
}

#[test]
fn a_signal_ends_a_map_and_leaves_nothing() {
    let (world, _) = prepared(Version::V2, Backing::Domain);
    let before = world.snapshot();
    let asked = Cell::new(0);
    let interrupted = || {
        asked.set(asked.get() + 1);
        true
    };
    let client = world.client().interrupted_by(&interrupted);
    let mut arg = map_arg(32, READ_WRITE, USER, 0, 8 * PAGE);
    let result = world.type1().ioctl(&client, uapi::VFIO_IOMMU_MAP_DMA, &mut arg);
    assert_eq!(result, Err(Errno::EINTR));
    assert!(asked.get() > 0);
    assert_eq!(world.snapshot(), before);
}

#[test]
fn version_1_knows_no_dirty_pages() {
    let (world, _) = prepared(Version::V1, Backing::Domain);
    for mut arg in [bytes(&[8, 1], &[]), bytes(&[8, 2], &[]), bytes(&[0, 0], &[]), Vec::new()] {
        assert_eq!(world.ask(uapi::VFIO_IOMMU_DIRTY_PAGES, &mut arg), Err(Errno::EACCES));
    }
}
