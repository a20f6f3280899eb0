//! A plan passes over ranges that others map in a space, or use beside it.

use std::sync::Arc;

use dmaspan::space::Limits;
use dmaspan::{DmaSpace, Errno, Iova, IovaRange};
use dmaspan_linux::plan::{MapError, Mapper, MmioSpace, PlanError, Region};

use crate::plan::kernel::{Kernel, RW, file, g1, m2, memory, page_size, x86};

fn iovas(start: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), len).unwrap()
}

fn rig() -> (Arc<Kernel>, Mapper<Kernel>) {
    let kernel = Kernel::new(x86());
    (kernel.clone(), Mapper::shared(kernel).unwrap())
}

#[test]
fn what_somebody_else_mapped_is_not_planned_wherever_it_lies() {
    for (start, pages) in
        [(0, 4), (page_size(), 1), (2 * page_size(), 64), (m2() - page_size(), 2), (0, 1024)]
    {
        let (kernel, mapper) = rig();
        let others = memory(pages);
        kernel.map(&others, others.user_range(), Iova::new(start), RW).unwrap();
        let taken = iovas(start, pages * page_size());
        // One map, a block of maps, and a large one.
        let all = [vec![memory(1)], (0..20).map(|_| memory(3)).collect(), vec![file(4 * m2())]];
        let mapped = all
            .each_ref()
            .map(|memories| mapper.map(memories.iter().map(|of| Region::whole(of, RW))).unwrap());
        for map in mapped.iter().flat_map(|mapped| mapped.plan().maps()) {
            assert!(map.iova().intersection(taken).is_none(), "{} {taken}", map.iova());
        }
        drop(mapped);
        assert_eq!(kernel.entries().len(), 1);
    }
}

#[test]
fn a_bar_that_was_mapped_by_the_space_itself_is_passed_over() {
    let (kernel, mapper) = rig();
    let (registers, buffers) = (memory(16), memory(16));
    MmioSpace::map_bar(&*kernel, &registers, 0..16 * page_size(), Iova::new(page_size()), RW)
        .unwrap();
    let mapped = mapper.map([Region::whole(&buffers, RW)]).unwrap();
    assert!(mapped.iova(0) >= Some(Iova::new(17 * page_size())));
    drop(mapped);
}

#[test]
fn what_asks_for_iovas_of_others_is_refused_by_the_plan_and_all_of_them_are_named() {
    let (kernel, mapper) = rig();
    let others = [memory(2), memory(1), memory(2)];
    for (of, start) in
        others.iter().zip([m2() - page_size(), m2() + page_size(), m2() + 4 * page_size()])
    {
        kernel.map(of, of.user_range(), Iova::new(start), RW).unwrap();
    }
    let own = memory(1);
    let own = mapper.map([Region::whole(&own, RW).at(Iova::new(m2() + 2 * page_size()))]).unwrap();
    let wanted = memory(8);
    let error = mapper.plan([Region::whole(&wanted, RW).at(Iova::new(m2()))]).unwrap_err();
    // Neighbours are one, whoever has them.
    let taken = vec![
        iovas(m2() - page_size(), 4 * page_size()),
        iovas(m2() + 4 * page_size(), 2 * page_size()),
    ];
    let range = iovas(m2(), 8 * page_size());
    assert_eq!(error, PlanError::InUse { region: 0, range, taken });
    assert_eq!(error.errno(), Errno::EEXIST);
    assert_eq!(kernel.state().map_calls, 4);
    kernel.unmap(iovas(m2() + 4 * page_size(), 2 * page_size())).unwrap();
    let rest = Region::part(&wanted, 0, 4 * page_size(), RW)
        .unwrap()
        .at(Iova::new(m2() + 3 * page_size()));
    drop(mapper.map([rest]).unwrap());
    drop(own);
}

#[test]
fn iovas_that_others_gave_back_are_used_before_there_is_no_room() {
    let kernel = Kernel::new(Limits { apertures: vec![iovas(m2(), 8 * page_size())], ..x86() });
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let (others, own, page) = (memory(7), memory(8), memory(1));
    kernel.map(&others, others.user_range(), Iova::new(m2()), RW).unwrap();
    let last = mapper.map([Region::whole(&page, RW)]).unwrap();
    assert_eq!(last.iova(0), Some(Iova::new(m2() + 7 * page_size())));
    let error = mapper.map([Region::whole(&page, RW)]).unwrap_err();
    assert!(matches!(error, MapError::Plan(PlanError::NoRoom { .. })), "{error}");
    kernel.unmap(iovas(m2(), 7 * page_size())).unwrap();
    drop(last);
    // Anywhere, and at certain IOVAs.
    drop(mapper.map([Region::whole(&own, RW)]).unwrap());
    kernel.map(&others, others.user_range(), Iova::new(m2()), RW).unwrap();
    drop(mapper.map([Region::whole(&page, RW)]).unwrap());
    kernel.unmap(iovas(m2(), 7 * page_size())).unwrap();
    drop(mapper.map([Region::whole(&own, RW).at(Iova::new(m2()))]).unwrap());
}

#[test]
fn a_terabyte_of_others_is_passed_over_at_once() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    // Mapped over and over from its start: 64 times 16 GiB.
    let huge = file(16 * g1());
    for n in 0..64 {
        let at = Iova::new(g1() * 4 + n * 16 * g1());
        kernel.map(&huge, huge.user_range(), at, RW).unwrap();
    }
    let rest = file(4 * g1());
    for start in [0, 0xfef0_0000] {
        let last = if start == 0 { 0xfedf_ffff } else { 4 * g1() - 1 };
        let user = rest.sub_range(0, last - start + 1).unwrap();
        kernel.map(&rest, user, Iova::new(start), RW).unwrap();
    }
    let mapped = mapper.map([Region::whole(&memory(1), RW)]).unwrap();
    assert_eq!(mapped.iova(0), Some(Iova::new(4 * g1() + 64 * 16 * g1())));
}

#[test]
fn a_space_that_does_not_say_what_is_mapped_refuses_the_map() {
    let (kernel, mapper) = rig();
    kernel.state().is_silent = true;
    let others = memory(4);
    kernel.map(&others, others.user_range(), Iova::new(page_size()), RW).unwrap();
    let error = mapper.map([Region::whole(&memory(1), RW)]).unwrap_err();
    assert!(matches!(error, MapError::Refused { .. }), "{error}");
    // Then it can be excluded.
    mapper.exclude(iovas(page_size(), 4 * page_size())).unwrap();
    drop(mapper.map([Region::whole(&memory(1), RW)]).unwrap());
}

#[test]
fn nothing_is_planned_in_what_is_excluded() {
    let (kernel, mapper) = rig();
    let memories: Vec<_> = (0..8).map(|_| memory(2)).collect();
    let regions = || memories.iter().map(|of| Region::whole(of, RW));
    // At the end of an aperture, with the two pages of a region at least.
    let last = 0xfedf_0000.min(0xfee0_0000 - 2 * page_size());
    // The page of IOVA 0 too, a part of a page, twice, and what is in no aperture.
    for range in [
        iovas(0, 4 * page_size()),
        iovas(6 * page_size() + 1, 1),
        iovas(6 * page_size(), page_size()),
        iovas(2 * page_size(), 5 * page_size()),
        iovas(last, 0x20_0000),
        iovas(1 << 60, 1 << 20),
    ] {
        mapper.exclude(range).unwrap();
    }
    let mapped = mapper.map(regions()).unwrap();
    let excluded = iovas(0, 7 * page_size());
    assert!(mapped.plan().maps().iter().all(|map| map.iova().intersection(excluded).is_none()));
    for start in [0, page_size(), 6 * page_size(), last] {
        let region = Region::whole(&memories[0], RW).at(Iova::new(start));
        let error = mapper.plan([region]).unwrap_err();
        let PlanError::InUse { taken, .. } = &error else { panic!("{error}") };
        assert!(taken[0].contains(Iova::new(start)), "{error}");
    }
    let error =
        mapper.map_bar(&memories[0], 0..page_size(), Some(Iova::new(page_size())), RW).unwrap_err();
    assert!(matches!(error, MapError::Plan(PlanError::InUse { .. })), "{error}");
    drop(mapped);
    assert!(kernel.is_empty());
}

#[test]
fn what_the_mapper_has_cannot_be_excluded_and_is_named() {
    let (_, mapper) = rig();
    let (first, second) = (memory(1), memory(2));
    let region = |of: &Arc<_>, start| Region::whole(of, RW).at(Iova::new(start));
    let mapped = mapper.map([region(&first, 0), region(&second, m2())]).unwrap();
    let planned = mapper.plan([region(&second, 2 * m2())]).unwrap();
    let bar = mapper.map_bar(&first, 0..page_size(), Some(Iova::new(3 * m2())), RW).unwrap();
    mapper.exclude(iovas(m2() + 2 * page_size(), page_size())).unwrap();
    let range = iovas(0, 4 * m2());
    let error = mapper.exclude(range).unwrap_err();
    let taken = vec![
        iovas(0, page_size()),
        iovas(m2(), 2 * page_size()),
        iovas(2 * m2(), 2 * page_size()),
        iovas(3 * m2(), page_size()),
    ];
    let (second, third) = (m2(), 2 * m2());
    let said = format!("{second:#x}..={:#x} and {third:#x}", second + 2 * page_size() - 1);
    assert!(error.to_string().contains(&said), "{error}");
    assert_eq!(error.errno(), Errno::EEXIST);
    assert_eq!(error, PlanError::Held { range, taken });
    for part in [
        iovas(m2() + page_size(), page_size()),
        iovas(m2() - page_size(), page_size() + 1),
        iovas(0, 1),
        iovas(3 * m2(), 1),
    ] {
        assert!(matches!(mapper.exclude(part), Err(PlanError::Held { .. })), "{part}");
    }
    // Nothing has changed: what was free is, and what was excluded is.
    drop(mapper.plan([region(&first, page_size()), region(&first, m2() - page_size())]).unwrap());
    assert!(mapper.plan([region(&first, m2() + 2 * page_size())]).is_err());
    drop((mapped, planned, bar));
    mapper.exclude(range).unwrap();
    assert!(mapper.plan([region(&first, 0)]).is_err());
}

#[test]
fn what_others_have_mapped_can_be_excluded() {
    let (kernel, mapper) = rig();
    let others = memory(2);
    kernel.map(&others, others.user_range(), Iova::new(page_size()), RW).unwrap();
    drop(mapper.map([Region::whole(&others, RW)]).unwrap());
    mapper.exclude(iovas(0, 3 * page_size())).unwrap();
    kernel.unmap(iovas(page_size(), 2 * page_size())).unwrap();
    let mapped = mapper.map([Region::whole(&others, RW)]).unwrap();
    assert!(mapped.iova(0) >= Some(Iova::new(3 * page_size())));
    drop(mapped);
}
