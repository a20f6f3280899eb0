//! Over the core's container and real pins.

use std::sync::Arc;

use dmaspan::{Account, Container, Errno, HostAddr, Iova};
use dmaspan_linux::plan::{MapError, Mapper, Region};
use dmaspan_linux::{LinuxPinner, Memory};

use crate::plan::kernel::{RW, memory, page_size};

type Space = Container<LinuxPinner<HostAddr>, parking_lot::RawMutex>;

fn container(limit: u64) -> Arc<Space> {
    Arc::new(Container::new(LinuxPinner::new().unwrap(), Account::new(limit)))
}

#[test]
fn a_container_is_mapped_by_plan() {
    let space = container(1 << 20);
    let mapper = Mapper::shared(space.clone()).unwrap();
    let [first, second] = [memory(8), memory(8)];
    let page =
        |of: &Arc<Memory>, n: u64| Region::part(of, n * page_size(), page_size(), RW).unwrap();
    let regions = (0..8).flat_map(|n| [page(&first, n), page(&second, 7 - n)]);
    let mapped = mapper.map(regions).unwrap();
    assert_eq!((space.mappings(), mapped.bytes()), (2, 16 * page_size()));
    let start = mapped.iova(0).unwrap();
    assert_eq!(mapped.iova(2), Some(start.wrapping_add(page_size())));
    mapped.unmap().unwrap();
    assert_eq!(space.mappings(), 0);
}

#[test]
fn a_container_that_refuses_a_map_gets_the_others_back() {
    let space = container(1 << 20);
    let mapper = Mapper::shared(space.clone()).unwrap();
    let all = [memory(4), memory(4), memory(4)];
    // Somebody maps between the plan and the map.
    let planned = mapper.plan(all.iter().map(|of| Region::whole(of, RW))).unwrap();
    let third = planned.maps()[2].iova();
    let page = memory(1);
    space.map(&page, page.user_range(), third.start(), RW).unwrap();
    let error = planned.map().unwrap_err();
    assert!(matches!(error, MapError::Refused { iova, .. } if iova == third), "{error}");
    assert_eq!((mapper.errno(&error), space.mappings()), (Errno::EEXIST, 1));
    // A later plan passes over it.
    let again = mapper.map(all.iter().map(|of| Region::whole(of, RW))).unwrap();
    let others = third.start();
    assert!(again.plan().maps().iter().all(|map| !map.iova().contains(others)));
    drop(again);
    space.unmap(third).unwrap();
    let mapped = mapper.map(all.iter().map(|of| Region::whole(of, RW))).unwrap();
    assert_eq!(space.mappings(), 3);
    drop(mapped);
    assert_eq!(space.mappings(), 0);
}

#[test]
fn the_first_and_the_last_page_are_pages() {
    let mapper = Mapper::shared(container(1 << 20)).unwrap();
    let memory = memory(1);
    let at = |iova| Region::whole(&memory, RW).at(Iova::new(iova));
    let mapped = mapper.map([at(page_size().wrapping_neg()), at(0)]).unwrap();
    assert_eq!(mapped.iova(1), Some(Iova::new(0)));
    mapped.unmap().unwrap();
}
