//! Parts of what was mapped are unmapped, and the rest stays.

use std::sync::Arc;

use dmaspan::{Iova, IovaRange};
use dmaspan_linux::Memory;
use dmaspan_linux::plan::{MappedRegions, Mapper, NotUnmapped, PartError, Region};

use crate::plan::kernel::{Kernel, RW, Refused, file, m2, memory, page_size, x86};

const AT: u64 = 1 << 30;

fn iovas(start: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), len).unwrap()
}

fn rig() -> (Arc<Kernel>, Mapper<Kernel>) {
    let kernel = Kernel::new(x86());
    (kernel.clone(), Mapper::shared(kernel).unwrap())
}

/// Three DIMMs of 2 MiB side by side, in 512 pieces each.
fn dimms(mapper: &Mapper<Kernel>, ram: &Arc<Memory>) -> MappedRegions<Kernel> {
    let piece = |n: u64| {
        let region = Region::part(ram, n * page_size(), page_size(), RW).unwrap();
        region.at(Iova::new(AT + n * page_size())).in_unit(u32::try_from(n / 512).unwrap())
    };
    mapper.map((0..3 * 512).map(piece)).unwrap()
}

#[test]
fn a_unit_is_unmapped_and_added_again_while_the_others_stay_as_they_are() {
    let (kernel, mapper) = rig();
    let ram = file(3 * m2());
    let mut mapped = dimms(&mapper, &ram);
    // Pieces of a unit are one map, and so are its large leaves.
    assert_eq!((mapped.plan().maps().len(), kernel.state().map_calls), (3, 3));
    let leaves: Vec<_> = mapped.plan().leaves().filter(|(_, bytes)| *bytes > 0).collect();
    assert_eq!(leaves, [(m2(), 3 * m2())]);
    assert_eq!(mapped.unmap_unit(1).unwrap(), m2());
    assert_eq!(kernel.state().map_calls, 3);
    assert_eq!(kernel.state().unmap_calls, 1);
    let left: Vec<_> = kernel.entries().iter().map(|entry| entry.iova).collect();
    assert_eq!(left, [iovas(AT, m2()), iovas(AT + 2 * m2(), m2())]);
    assert_eq!((mapped.bytes(), mapper.mapped_bytes()), (2 * m2(), 2 * m2()));
    assert_eq!(
        (mapped.iova(511).is_some(), mapped.iova(512), mapped.iova(1024).is_some()),
        (true, None, true)
    );
    let user = |offset| ram.sub_range(offset, 1).unwrap().start();
    assert_eq!(mapped.translate(user(m2())), None);
    assert_eq!(mapped.translate(user(2 * m2())), Some(Iova::new(AT + 2 * m2())));
    assert_eq!(mapped.unmap_unit(1).unwrap(), 0);
    assert_eq!(mapped.unmap_unit(7).unwrap(), 0);
    let new = file(m2());
    let again =
        mapper.map([Region::part(&new, 0, m2(), RW).unwrap().at(Iova::new(AT + m2()))]).unwrap();
    mapped.unmap().unwrap();
    assert_eq!(kernel.entries().len(), 1);
    drop(again);
}

#[test]
fn a_part_is_whole_maps_and_whatever_lies_between_them() {
    let (kernel, mapper) = rig();
    let ram = file(3 * m2());
    let mut mapped = dimms(&mapper, &ram);
    assert_eq!(mapped.unmap_part(iovas(0, AT)).unwrap(), 0);
    assert_eq!(mapped.unmap_part(iovas(AT + m2(), 1 << 40)).unwrap(), 2 * m2());
    // Neighbours at once.
    assert_eq!(kernel.state().unmap_calls, 1);
    assert_eq!(mapped.unmap_part(iovas(AT, 3 * m2())).unwrap(), m2());
    assert_eq!((mapped.bytes(), kernel.is_empty()), (0, true));
    mapped.unmap().unwrap();
}

#[test]
fn a_part_that_cuts_a_map_is_refused_with_nothing_changed() {
    let (kernel, mapper) = rig();
    let ram = file(3 * m2());
    let mut mapped = dimms(&mapper, &ram);
    for (part, cut) in [
        (iovas(AT, m2() - page_size()), 0),
        (iovas(AT + page_size(), page_size()), 0),
        (iovas(AT - page_size(), page_size() + 1), 0),
        // Whole maps before it stay, too.
        (iovas(AT, 2 * m2() + 1), 2),
        (iovas(AT + m2() - 1, 2 * m2()), 0),
        (iovas(AT + m2() + page_size(), m2()), 1),
    ] {
        let error = mapped.unmap_part(part).unwrap_err();
        let text = error.to_string();
        let PartError::Cuts { part: asked, map } = error else { panic!("{error}") };
        assert_eq!((asked, map), (part, iovas(AT + cut * m2(), m2())));
        let covered = part.intersection(map).unwrap();
        let of_it = if covered == part { "" } else { &format!(", of which it covers {covered}") };
        let named = format!("{part} would cut the map of {map}{of_it}, and no kernel");
        assert!(text.contains(&named) && text.contains("in_unit"), "{text}");
        assert_eq!((mapped.bytes(), kernel.state().unmap_calls), (3 * m2(), 0));
    }
    mapped.unmap_unit(0).unwrap();
    // What is gone cannot be cut.
    assert_eq!(mapped.unmap_part(iovas(AT, page_size())).unwrap(), 0);
    mapped.unmap().unwrap();
}

#[test]
fn regions_of_different_units_are_never_one_map() {
    let memory = memory(8);
    let part = |n: u64, unit| {
        Region::part(&memory, n * page_size(), page_size(), RW).unwrap().in_unit(unit)
    };
    let (_, mapper) = rig();
    let plan = mapper.plan([part(0, 1), part(1, 1), part(2, 2), part(4, 2), part(3, 2)]).unwrap();
    let units: Vec<_> =
        plan.maps().iter().map(|map| (map.unit(), map.len() / page_size())).collect();
    assert_eq!(units, [(1, 2), (2, 3)]);
    // Memory that two units have is mapped for each.
    let both = mapper.plan([part(0, 1), part(0, 2)]).unwrap();
    assert_eq!(both.maps().len(), 2);
    // Placed side by side, units keep the leaves that their addresses permit.
    let two = file(2 * m2());
    let unit = |n: u64| {
        let region = Region::part(&two, n * m2(), m2(), RW).unwrap();
        region.in_unit(u32::try_from(n).unwrap())
    };
    let plan = mapper.plan([unit(0), unit(1)]).unwrap();
    assert_eq!(plan.leaves().find(|(_, bytes)| *bytes > 0), Some((m2(), 2 * m2())));
}

#[test]
fn the_nth_unmap_of_a_part_fails_and_what_is_left_is_owned_and_tried_again() {
    for n in 1..=3 {
        let (kernel, mapper) = rig();
        let memories: Vec<_> = (0..4).map(|_| memory(1)).collect();
        let regions = (0..).zip(&memories).map(|(n, of)| {
            Region::whole(of, RW).at(Iova::new(AT + n * m2())).in_unit(u32::from(n == 3))
        });
        let mut mapped = mapper.map(regions).unwrap();
        kernel.state().failing_unmaps = vec![n];
        let error = mapped.unmap_unit(0).unwrap_err();
        let says = format!("{} KiB of the part remain mapped: ", page_size() >> 10);
        assert!(error.to_string().starts_with(&says), "{error}");
        let PartError::Left { left, source } = error else { panic!("{error}") };
        let NotUnmapped::Refused { range, source: Refused(_) } = source else { panic!() };
        assert_eq!((left, range), (page_size(), iovas(AT + (n - 1) * m2(), page_size())));
        assert_eq!((mapped.bytes(), mapper.mapped_bytes()), (2 * page_size(), 2 * page_size()));
        // The others of the part are gone, and their memory.
        for (at, memory) in (1..).zip(&memories) {
            assert_eq!(Arc::strong_count(memory), if at == n || at == 4 { 3 } else { 2 });
        }
        assert_eq!(mapped.unmap_unit(0).unwrap(), page_size());
        assert_eq!(kernel.entries().len(), 1);
        drop(mapped);
        assert_eq!((mapper.mapped_bytes(), mapper.leaked_bytes()), (0, 0));
    }
}

#[test]
fn a_part_that_the_space_unmaps_short_stays_owned_and_leaks_with_the_rest() {
    let (kernel, mapper) = rig();
    let memory = memory(1);
    let weak = Arc::downgrade(&memory);
    let mut mapped = mapper.map([Region::whole(&memory, RW).at(Iova::new(AT))]).unwrap();
    drop(memory);
    kernel.state().is_forgetful = true;
    let error = mapped.unmap_part(iovas(AT, page_size())).unwrap_err();
    let PartError::Left { left, source: NotUnmapped::Short { .. } } = error else {
        panic!("{error}");
    };
    assert_eq!(left, page_size());
    drop(mapped);
    assert_eq!(mapper.leaked_bytes(), page_size());
    assert!(weak.upgrade().is_some());
}
