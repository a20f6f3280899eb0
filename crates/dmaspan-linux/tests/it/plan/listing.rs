//! A mapper lists what is planned, mapped and leaked, while threads use it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::{Account, Container, HostAddr, Iova, IovaRange, Label};
use dmaspan_linux::LinuxPinner;
use dmaspan_linux::plan::{ListedMap, MapKind, MapState, Mapper, Region};

use crate::plan::kernel::{Kernel, RW, memory, page_size, x86};

#[test]
fn what_is_planned_mapped_and_leaked_is_listed_with_its_label() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let (pages, other) = (memory(4), memory(1));
    let line = line!() + 1;
    let region = Region::part(&pages, 0, 2 * page_size(), RW).unwrap();
    let neighbour =
        Region::part(&pages, 2 * page_size(), 2 * page_size(), RW).unwrap().label("its neighbour");
    let named = Region::whole(&other, RW).label("queues").at(Iova::new(0x100_0000));
    let planned = mapper.plan([region, neighbour, named]).unwrap();
    let listed: Vec<ListedMap> = mapper.list().collect();
    let ranges: Vec<_> = planned.maps().iter().map(|map| (map.iova(), map.user())).collect();
    assert_eq!(listed.iter().map(|map| (map.range, map.user)).collect::<Vec<_>>(), ranges);
    assert!(listed.iter().all(|map| map.state == MapState::Planned && map.prot == RW));
    let first = listed.iter().find(|map| map.user == pages.user_range()).unwrap();
    let Label::Place(place) = first.label else { panic!("{first}") };
    assert_eq!((place.file(), place.line()), (file!(), line), "the first of those that are one");
    assert!(listed.iter().any(|map| map.label == Label::from("queues")));

    let mapped = planned.map().unwrap();
    assert!(mapper.list().all(|map| map.state == MapState::Mapped && map.kind == MapKind::Region));
    let shared = mapper.alloc(page_size(), page_size()).unwrap();
    let found: Vec<_> = mapper.list_in(IovaRange::point(shared.iova())).collect();
    assert_eq!((found.len(), found[0].kind), (1, MapKind::Shared));
    let picture = mapper.dump().to_string();
    assert!(picture.contains(", mapped: queues\n") && picture.lines().count() == 4, "{picture}");
    shared.unmap().unwrap();

    let next = kernel.state().unmap_calls + 1;
    kernel.state().failing_unmaps = vec![next];
    drop(mapped);
    let states: Vec<_> = mapper.list().map(|map| map.state).collect();
    assert_eq!(states, [MapState::Leaked], "{}", mapper.dump());
}

#[test]
fn a_listing_is_that_of_a_model_whatever_comes_and_goes() {
    let mapper = Mapper::shared(Kernel::new(x86())).unwrap();
    let memories: Vec<_> = (0..8).map(|_| memory(4)).collect();
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut below = |bound: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % bound
    };
    let mut live = BTreeMap::new();
    for _ in 0..400 {
        let key = below(16);
        match (live.remove(&key), below(2)) {
            (Some(mapped), _) => drop(mapped),
            (None, 0) => {
                let memory = &memories[usize::try_from(below(8)).unwrap()];
                let pages = 1 + below(4);
                let region =
                    Region::part(memory, 0, pages * page_size(), RW).unwrap().label("model");
                live.insert(key, mapper.map([region]).unwrap());
            }
            (None, _) => {
                // A plan that is given up, and one that is refused.
                drop(mapper.plan([Region::whole(&memories[0], RW)]).unwrap());
                mapper.plan([Region::whole(&memories[0], RW).at(Iova::new(1))]).unwrap_err();
            }
        }
        let maps = live.values().flat_map(|mapped| mapped.plan().maps());
        let mut known: Vec<_> = maps.map(|map| (map.iova(), map.user())).collect();
        known.sort_by_key(|(range, _)| range.start());
        let listed: Vec<_> = mapper.list().map(|map| (map.range, map.user)).collect();
        assert_eq!(listed, known);
    }
}

#[test]
fn a_map_that_stays_is_listed_once_while_threads_map_and_unmap() {
    let mapper = Mapper::shared(Kernel::new(x86())).unwrap();
    let pages = memory(64);
    let page = |n: u64| Region::part(&pages, n * page_size(), page_size(), RW).unwrap();
    let stay: Vec<_> = (0..20).map(|n| mapper.map([page(n)]).unwrap()).collect();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..500 {
                mapper.map([page(20 + n % 40)]).unwrap().unmap().unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            let listed: Vec<_> = mapper.list().collect();
            assert!(listed.is_sorted_by(|a, b| a.range.last() < b.range.start()));
            for mapped in &stay {
                let iova = mapped.iova(0).unwrap();
                assert_eq!(listed.iter().filter(|map| map.range.contains(iova)).count(), 1);
            }
        }
    });
}

#[test]
fn a_container_behind_a_mapper_has_the_labels_of_the_regions() {
    let container: Container<_, parking_lot::RawMutex> =
        Container::new(LinuxPinner::<HostAddr>::new().unwrap(), Account::new(1 << 30));
    let mapper = Mapper::new(container).unwrap();
    let pages = memory(1);
    let mapped = mapper.map([Region::whole(&pages, RW).label("admin queue")]).unwrap();
    let labels: Vec<_> = mapper.space().list().map(|mapping| mapping.label).collect();
    assert_eq!(labels, [Label::from("admin queue")]);
    mapped.unmap().unwrap();
}
