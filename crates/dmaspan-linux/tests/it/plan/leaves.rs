//! IOVAs permit large leaves.

use dmaspan::space::Limits;
use dmaspan::{Iova, IovaRange};
use dmaspan_linux::plan::{Mapper, Plan, Region};

use crate::plan::kernel::{Kernel, RW, file, g1, m2, memory, page_size, x86};

#[test]
fn iovas_are_congruent_to_the_memory_modulo_the_largest_leaf_that_fits() {
    let large = file(3 * g1());
    let start = large.user_range().start().get();
    let to_gib = start.next_multiple_of(g1()) - start;
    for (offset, len, leaf) in [
        (to_gib, g1(), g1()),
        (0, 3 * g1(), g1()),
        (to_gib + page_size(), g1(), m2()),
        (to_gib + 5 * page_size(), 4 * m2(), m2()),
        (to_gib + m2(), m2(), m2()),
        (to_gib + page_size(), m2(), page_size()),
    ] {
        let region = Region::part(&large, offset, len, RW).unwrap();
        let user = region.user.start().get();
        let plan = Plan::new(&x86(), [region]).unwrap();
        let iova = plan.iova_of(0).unwrap().get();
        assert_eq!((iova ^ user) & (leaf - 1), 0, "{iova:#x} {user:#x} {leaf:#x}");
        assert!(iova >= page_size() && iova + len <= 0xfee0_0000 || iova >= 0xfef0_0000);
        let permitted = plan.leaves().find(|(_, bytes)| *bytes > 0).unwrap();
        assert_eq!(permitted.0, leaf);
        assert_eq!(plan.leaves().map(|(_, bytes)| bytes).sum::<u64>(), len);
    }
}

#[test]
fn where_there_is_no_room_for_large_leaves_smaller_ones_do() {
    let range = |start, len| IovaRange::from_len(Iova::new(start), len).unwrap();
    let large = file(3 * g1());
    let start = large.user_range().start().get();
    let offset = start.next_multiple_of(g1()) - start;
    let region = || Region::part(&large, offset, g1(), RW).unwrap();
    for (first, leaf) in
        [(4 * g1(), g1()), (4 * g1() + m2(), m2()), (4 * g1() + page_size(), page_size())]
    {
        let limits = Limits { apertures: vec![range(first, g1())], ..x86() };
        let plan = Plan::new(&limits, [region()]).unwrap();
        assert_eq!(plan.iova_of(0), Some(Iova::new(first)));
        assert_eq!(plan.leaves().find(|(_, bytes)| *bytes > 0), Some((leaf, g1())));
    }
}

#[test]
fn hardware_that_says_what_it_has_gets_that() {
    let large = file(1 << 30);
    let limits = Limits { page_sizes: (64 << 10) | (512 << 20), ..x86() };
    let whole = Region::whole(&large, RW);
    let user = whole.user.start().get();
    let plan = Plan::new(&limits, [whole]).unwrap();
    assert_eq!((plan.iova_of(0).unwrap().get() ^ user) % (512 << 20), 0);
    assert_eq!(plan.leaves().map(|(size, _)| size).collect::<Vec<_>>(), [512 << 20, 64 << 10]);
}

#[test]
fn what_was_unmapped_is_handed_out_again_and_nothing_else_twice() {
    let mapper = Mapper::shared(Kernel::new(x86())).unwrap();
    let memory = memory(3);
    let map = || mapper.map([Region::whole(&memory, RW)]).unwrap();
    let iova = |mapped: &dmaspan_linux::plan::MappedRegions<_>| mapped.iova(0).unwrap();
    let [first, second] = [map(), map()];
    assert!(iova(&second).get() >= iova(&first).get() + 3 * page_size());
    let freed = iova(&first);
    first.unmap().unwrap();
    assert_eq!(iova(&map()), freed);
}

#[test]
fn a_plan_that_is_dropped_gives_its_iovas_back() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let memory = memory(4);
    let at = || Region::whole(&memory, RW).at(Iova::new(0));
    let planned = mapper.plan([at()]).unwrap();
    assert!(mapper.plan([at()]).is_err());
    assert_eq!(planned.iova_of(0), Some(Iova::new(0)));
    drop(planned);
    let planned = mapper.plan([at()]).unwrap();
    assert!(kernel.is_empty());
    let mapped = planned.map().unwrap();
    assert_eq!(mapped.iova(0), Some(Iova::new(0)));
}

#[test]
fn a_plan_without_room_gives_what_it_took_back() {
    let apertures = vec![IovaRange::from_len(Iova::new(m2()), 4 * page_size()).unwrap()];
    let mapper = Mapper::shared(Kernel::new(Limits { apertures, ..x86() })).unwrap();
    let memory = memory(4);
    let other = self::memory(3);
    let too_much =
        [Region::whole(&other, RW), Region::part(&memory, 0, 2 * page_size(), RW).unwrap()];
    assert!(mapper.plan(too_much).is_err());
    drop(mapper.map([Region::whole(&memory, RW)]).unwrap());
}
