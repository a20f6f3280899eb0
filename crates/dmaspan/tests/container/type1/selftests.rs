//! The requests of Linux's selftests of VFIO and of iommufd's VFIO interface
//! (tools/testing/selftests/vfio and iommu/iommufd.c), against this type1.

use std::sync::Arc;

use dmaspan::container::Version;
use dmaspan::container::type1::{Client, Type1, uapi};
use dmaspan::{Account, Container, Errno, PhysAddr, UserAddr};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};

use super::world::{
    Backing, LAST, PAGE, PAGES, READ_WRITE, USER, World, map_arg, number, unmap_arg,
};
use crate::common::faulty_domain;

/// The last page of all IOVAs: of those of the domain, or of all there can be.
const TOPS: [(Backing, u64); 2] =
    [(Backing::Domain, LAST - (PAGE - 1)), (Backing::None, u64::MAX - (PAGE - 1))];

#[test]
fn map_limit_unmap_range() {
    for version in [Version::V1, Version::V2] {
        for (backing, top) in TOPS {
            let world = World::new(version, backing);
            world.map(READ_WRITE, USER, top, PAGE).unwrap();
            assert_eq!(world.unmap(0, top, PAGE), Ok(PAGE));
            assert_eq!(world.container.mappings(), 0);
            assert_eq!(world.unmap(0, top, PAGE), Ok(0));
        }
    }
}

#[test]
fn map_limit_unmap_all() {
    for version in [Version::V1, Version::V2] {
        for (backing, top) in TOPS {
            let world = World::new(version, backing);
            world.map(READ_WRITE, USER, top, PAGE).unwrap();
            world.map(READ_WRITE, USER, top - 8 * PAGE, 8 * PAGE).unwrap();
            assert_eq!(world.unmap_all(), Ok(9 * PAGE));
            assert_eq!(world.container.mappings(), 0);
            assert_eq!(world.unmap_all(), Ok(0));
        }
    }
}

#[test]
fn map_limit_overflow() {
    let (_, top) = TOPS[1];
    for version in [Version::V1, Version::V2] {
        for backing in [Backing::Domain, Backing::None] {
            let world = World::new(version, backing);
            assert_eq!(world.map(READ_WRITE, USER, top, 2 * PAGE), Err(Errno::EOVERFLOW));
            assert_eq!(world.map(READ_WRITE, top, 0, 2 * PAGE), Err(Errno::EOVERFLOW));
            if backing == Backing::None {
                world.map(READ_WRITE, USER, top, PAGE).unwrap();
            }
            assert_eq!(world.unmap(0, top, 2 * PAGE), Err(Errno::EOVERFLOW));
            assert_eq!(world.container.mappings(), usize::from(backing == Backing::None));
        }
    }
}

#[test]
fn dma_map_unmap_by_leaves_of_each_size() {
    for version in [Version::V1, Version::V2] {
        for size_lg2 in [12, 21, 30] {
            let size = 1u64 << size_lg2;
            let (domain, tables, _) = faulty_domain::<12>(&Faults::none());
            let memory = SimMemory::new(PhysAddr::new(1 << 40), 1 << 30, 12).unwrap();
            let memory = Arc::new(memory);
            let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
            let frames = memory.allocate(size, size_lg2).unwrap();
            space.map(UserAddr::new(USER), &[frames]).unwrap();
            let account = Account::new(u64::MAX);
            let pinner = SimPinner::new(Arc::clone(&memory));
            let container: Container<_, parking_lot::RawMutex> =
                Container::with_domain(pinner, domain, Arc::clone(&account));
            let container = container.with_version(version);
            let (type1, client) = (Type1::new(&container), Client::new(&space, &account));

            let mut arg = map_arg(32, READ_WRITE, USER, size, size);
            type1.ioctl(&client, uapi::VFIO_IOMMU_MAP_DMA, &mut arg).unwrap();
            assert_eq!(container.census().sizes().collect::<Vec<_>>(), [(size_lg2, 1)]);
            assert_eq!(memory.pinned_frames(), size / PAGE);

            let mut arg = unmap_arg(24, 0, size, size);
            type1.ioctl(&client, uapi::VFIO_IOMMU_UNMAP_DMA, &mut arg).unwrap();
            assert_eq!(number(&arg, 16), size);
            assert_eq!(container.census().total(), 0);
            assert_eq!((memory.pinned_frames(), account.used(), tables.tables()), (0, 0, 1));
        }
    }
}

#[test]
fn vfio_compat_map() {
    for version in [Version::V1, Version::V2] {
        let world = World::new(version, Backing::Domain);
        let all = PAGES * PAGE;
        // Once, and unmapped by what covers more.
        world.map(READ_WRITE, USER, 0x100_0000, all).unwrap();
        assert_eq!(world.unmap(0, 0, 1 << 40), Ok(all));
        // Everything at once, which needs no range.
        world.map(READ_WRITE, USER, 0x100_0000, all).unwrap();
        assert_eq!(world.unmap_all(), Ok(all));

        // Page by page, unmapped in another order.
        for page in 0..PAGES {
            let vaddr = USER + page * PAGE;
            world.map(READ_WRITE, vaddr, 0x100_0000 + page * PAGE, PAGE).unwrap();
        }
        for done in 0..PAGES {
            // 29 and 64 have no divisor in common: every page once.
            let page = (29 * done + 7) % PAGES;
            assert_eq!(world.unmap(0, 0x100_0000 + page * PAGE, PAGE), Ok(PAGE));
            let left = PAGES - done - 1;
            assert_eq!(u64::try_from(world.container.mappings()).unwrap(), left);
            assert_eq!(world.memory.pinned_frames(), left);
        }
        assert_eq!(world.account.used(), 0);
    }
}

#[test]
fn vfio_compat_huge_map() {
    let (all, half) = (PAGES * PAGE, PAGES * PAGE / 2);
    // Version 1 takes all of a mapping whose first page is named, and nothing for any other.
    let world = World::new(Version::V1, Backing::Domain);
    world.map(READ_WRITE, USER, 0, all).unwrap();
    assert_eq!(world.unmap(0, half, half), Ok(0));
    assert_eq!(world.container.mappings(), 1);
    for page in 0..PAGES {
        let expected = if page == 0 { all } else { 0 };
        assert_eq!(world.unmap(0, page * PAGE, PAGE), Ok(expected), "page {page}");
    }
    // Version 2 cuts nothing. (That of iommufd says ENOENT.)
    let world = World::new(Version::V2, Backing::Domain);
    world.map(READ_WRITE, USER, 0, all).unwrap();
    for page in 0..PAGES {
        assert_eq!(world.unmap(0, page * PAGE, PAGE), Err(Errno::EINVAL), "page {page}");
    }
    assert_eq!(world.unmap(0, 0, all), Ok(all));
}
