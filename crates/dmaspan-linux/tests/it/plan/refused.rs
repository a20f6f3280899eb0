//! A mapper refuses and names memory that cannot be mapped, before it asks the space.

use std::sync::Arc;

use dmaspan::space::Limits;
use dmaspan::{Errno, Iova, IovaRange, Prot, RangeError, UserRange};
use dmaspan_linux::plan::{MapError, Mapper, Plan, PlanError, Region};

use crate::plan::kernel::{Kernel, RW, file, m2, memory, page_size, x86};

fn refused(limits: &Limits, regions: impl IntoIterator<Item = Region>) -> PlanError {
    Plan::new(limits, regions).unwrap_err()
}

fn iovas(start: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), len).unwrap()
}

#[test]
fn the_addresses_of_interrupts_are_refused_with_the_apertures_around_them() {
    let memory = memory(4);
    let whole = Region::whole(&memory, RW);
    let limits = x86();
    let [below, above] = [limits.apertures[0], limits.apertures[1]];
    for start in [0xfee0_0000, 0xfee0_0000 - page_size(), 0xfef0_0000 - page_size()] {
        let good = whole.clone().at(Iova::new(0x1_0000));
        let error = refused(&limits, [good, whole.clone().at(Iova::new(start))]);
        let (region, range) = (1, iovas(start, 4 * page_size()));
        let (below, above) = (Some(below), Some(above));
        let outside = vec![range.intersection(iovas(0xfee0_0000, 0x10_0000)).unwrap()];
        let text = error.to_string();
        let part = if outside == [range] { String::new() } else { format!(" of {range}") };
        let named = format!("region 1: {}{part} is in no aperture", outside[0]);
        assert!(text.starts_with(&named), "{text}");
        assert_eq!(error, PlanError::OutsideApertures { region, range, outside, below, above });
        assert!(text.contains("0x0..=0xfedfffff and 0xfef00000..=0xffffffffffff"), "{text}");
        assert_eq!(error.errno(), Errno::EINVAL);
    }
    for start in [0, 0xfee0_0000 - 4 * page_size(), 0xfef0_0000, (1 << 48) - 4 * page_size()] {
        let plan = Plan::new(&limits, [whole.clone().at(Iova::new(start))]).unwrap();
        assert_eq!(plan.iova_of(0), Some(Iova::new(start)));
    }
    let error = refused(&limits, [whole.at(Iova::new(1 << 48))]);
    assert!(error.to_string().contains("the nearest is 0xfef00000..=0xffffffffffff"), "{error}");
}

#[test]
fn each_part_that_no_aperture_has_is_named() {
    let apertures = vec![
        iovas(m2(), m2()),
        iovas(3 * m2(), m2()),
        iovas(4 * m2(), m2()),
        iovas(7 * m2(), m2()),
    ];
    let limits = Limits { apertures, ..x86() };
    let memory = file(8 * m2());
    let at = |start, len| Region::part(&memory, 0, len, RW).unwrap().at(Iova::new(start));
    let cases = [
        // Beyond both ends.
        (0, 8 * m2(), vec![iovas(0, m2()), iovas(2 * m2(), m2()), iovas(5 * m2(), 2 * m2())]),
        (7 * m2() + page_size(), m2(), vec![iovas(8 * m2(), page_size())]),
        (page_size(), m2(), vec![iovas(page_size(), m2() - page_size())]),
        // Between two, and in none.
        (2 * m2() - page_size(), m2() + 2 * page_size(), vec![iovas(2 * m2(), m2())]),
        (5 * m2(), page_size(), vec![iovas(5 * m2(), page_size())]),
        (1 << 40, page_size(), vec![iovas(1 << 40, page_size())]),
    ];
    for (start, len, expected) in cases {
        let range = iovas(start, len);
        let error = refused(&limits, [at(start, len)]);
        let text = error.to_string();
        let PlanError::OutsideApertures { outside, .. } = error else { panic!("{error:?}") };
        assert_eq!(outside, expected);
        let named: Vec<_> = expected.iter().map(ToString::to_string).collect();
        let named = match expected.len() {
            1 if expected == [range] => format!("{range} is in no aperture"),
            1 => format!("{} of {range} is in no aperture", named[0]),
            _ => format!("{} of {range} are in no aperture", named.join(" and ")),
        };
        assert!(text.contains(&named), "{text}");
    }
    // Apertures that touch are as one.
    let plan = Plan::new(&limits, [at(3 * m2(), 2 * m2())]).unwrap();
    assert_eq!(plan.iova_of(0), Some(Iova::new(3 * m2())));
}

#[test]
fn all_that_is_in_the_way_is_named_and_not_only_the_first_page() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel).unwrap();
    let dimm = file(512 << 20);
    let ram = mapper.map([Region::whole(&dimm, RW).at(Iova::new(0))]).unwrap();
    let small = memory(512);
    let error = mapper.plan([Region::whole(&small, RW).at(Iova::new(0))]).unwrap_err();
    let (range, taken) = (iovas(0, m2()), vec![iovas(0, 512 << 20)]);
    assert!(
        error.to_string().contains("0x0..=0x1fffffff is mapped, planned or excluded"),
        "{error}"
    );
    assert_eq!(error, PlanError::InUse { region: 0, range, taken });
    // Beside other maps, with holes and without.
    let page = |n: u64| Region::whole(&memory(1), RW).at(Iova::new((1 << 30) + n * page_size()));
    let pages = mapper.map([page(1), page(2), page(5), page(511), page(512)]).unwrap();
    mapper.exclude(iovas((1 << 30) + 9 * page_size(), page_size())).unwrap();
    let error = mapper.plan([Region::whole(&small, RW).at(Iova::new(1 << 30))]).unwrap_err();
    let at = |n: u64, count| iovas((1 << 30) + n * page_size(), count * page_size());
    let taken = vec![at(1, 2), at(5, 1), at(9, 1), at(511, 1)];
    assert!(error.to_string().contains(&format!("{} and {}", taken[0], taken[1])), "{error}");
    assert_eq!(error, PlanError::InUse { region: 0, range: at(0, 512), taken });
    drop((ram, pages));
}

#[test]
fn the_whole_of_64_bits_is_an_aperture() {
    let whole = IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).unwrap();
    let limits = Limits { apertures: vec![whole], page_sizes: !0 << 12, mappings_left: None };
    let memory = memory(2);
    let top = Iova::new((2 * page_size()).wrapping_neg());
    let at = |iova| Region::whole(&memory, RW).at(iova);
    let plan = Plan::new(&limits, [at(top), at(Iova::new(0))]).unwrap();
    assert_eq!((plan.iova_of(0), plan.iova_of(1)), (Some(top), Some(Iova::new(0))));
    let start = page_size().wrapping_neg();
    let source = RangeError::Wraps { start, len: 2 * page_size() };
    assert_eq!(refused(&limits, [at(Iova::new(start))]), PlanError::Wraps { region: 0, source });
}

#[test]
fn what_does_not_begin_and_end_between_pages_is_refused() {
    let memory = memory(4);
    let part = |offset, len| Region::part(&memory, offset, len, RW).unwrap();
    for region in [
        part(512, page_size()),
        part(0, page_size() + 512),
        part(0, page_size()).at(Iova::new(512)),
        part(512, page_size()).at(Iova::new(512)),
    ] {
        let (user, iova, granule) = (region.user, region.iova, page_size());
        let error = refused(&x86(), [part(2 * page_size(), page_size()), region]);
        assert_eq!(error, PlanError::Unaligned { region: 1, user, iova, granule });
    }
    // Base pages are not enough for an IOMMU with larger ones.
    let limits = Limits { page_sizes: 16 * page_size(), ..x86() };
    assert!(matches!(refused(&limits, [part(0, page_size())]), PlanError::Unaligned { .. }));
}

#[test]
fn memory_that_is_not_all_there_is_refused() {
    let memory = memory(4);
    let user = UserRange::from_len(memory.user_range().start(), 5 * page_size()).unwrap();
    let region = Region { user, ..Region::whole(&memory, RW) };
    let error = refused(&x86(), [region]);
    assert!(matches!(error, PlanError::Outside { region: 0, .. }), "{error:?}");
    assert_eq!(error.errno(), Errno::EFAULT);
}

#[test]
fn a_device_that_may_do_nothing_is_no_mapping() {
    let memory = memory(1);
    let prot = Prot::CACHE | Prot::NOEXEC;
    let error = refused(&x86(), [Region::whole(&memory, prot)]);
    assert_eq!(error, PlanError::NoAccess { region: 0, prot });
}

#[test]
fn regions_that_overlap_are_both_named() {
    let memory = memory(8);
    let at = |page: u64, count: u64, iova: u64| {
        let region = Region::part(&memory, page * page_size(), count * page_size(), RW).unwrap();
        region.at(Iova::new(iova * page_size()))
    };
    let all = [at(0, 2, 20), at(0, 2, 10), at(2, 2, 12), at(4, 1, 14), at(5, 2, 13)];
    let error = refused(&x86(), all);
    let ranges =
        [iovas(10 * page_size(), 5 * page_size()), iovas(13 * page_size(), 2 * page_size())];
    assert_eq!(error, PlanError::Overlap { regions: [2, 4], ranges });
    assert_eq!(error.errno(), Errno::EEXIST);
    let same = refused(&x86(), [at(0, 2, 20), at(0, 2, 20)]);
    assert!(matches!(same, PlanError::Overlap { regions: [0, 1], .. }), "{same}");
}

#[test]
fn too_many_maps_are_refused_before_the_first() {
    let kernel = Kernel::new(Limits { mappings_left: Some(3), ..x86() });
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let memory = memory(8);
    let page = |n: u64| Region::part(&memory, n * page_size(), page_size(), RW).unwrap();
    let error = mapper.map([0, 2, 4, 6].map(page)).unwrap_err();
    let MapError::Plan(error) = error else { panic!("{error}") };
    assert_eq!(error, PlanError::TooManyMaps { needed: 4, left: 3 });
    assert!(error.to_string().contains("dma_entry_limit"), "{error}");
    assert_eq!(error.errno(), Errno::ENOSPC);
    assert_eq!(kernel.state().map_calls, 0);
    // Neighbours are one map, so more regions do.
    let mapped = mapper.map([0, 1, 2, 4, 6, 7].map(page)).unwrap();
    assert_eq!(kernel.entries().len(), 3);
    let error = mapper.map([page(3)]).unwrap_err();
    assert!(matches!(error, MapError::Plan(PlanError::TooManyMaps { needed: 1, left: 0 })));
    drop(mapped);
    mapper.map([page(3)]).unwrap().unmap().unwrap();
}

#[test]
fn what_is_mapped_already_is_in_use_and_not_handed_out() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let memory = memory(4);
    let whole = || Region::whole(&memory, RW);
    for start in [0, 0x10_0000] {
        let first = mapper.map([whole().at(Iova::new(start))]).unwrap();
        let error = mapper.map([whole().at(Iova::new(start))]).unwrap_err();
        let MapError::Plan(error) = error else { panic!("{error:?}") };
        assert_eq!(error.errno(), Errno::EEXIST);
        let range = iovas(start, 4 * page_size());
        assert_eq!(error, PlanError::InUse { region: 0, range, taken: vec![range] });
        first.unmap().unwrap();
        mapper.map([whole().at(Iova::new(start))]).unwrap().unmap().unwrap();
    }
    assert_eq!(kernel.state().map_calls, 4);
}

#[test]
fn a_space_that_is_full_has_no_room() {
    let apertures = vec![iovas(m2(), 4 * page_size())];
    let kernel = Kernel::new(Limits { apertures, ..x86() });
    let mapper = Mapper::shared(kernel).unwrap();
    let memory = memory(5);
    let mapped = mapper.map([Region::part(&memory, 0, 2 * page_size(), RW).unwrap()]).unwrap();
    let large = || Region::part(&memory, 0, 3 * page_size(), RW).unwrap();
    let error = mapper.map([large()]).unwrap_err();
    let MapError::Plan(error @ PlanError::NoRoom { region: 0, len, .. }) = error else {
        panic!("{error:?}")
    };
    assert_eq!((len, error.errno()), (3 * page_size(), Errno::ENOSPC));
    drop(mapped);
    drop(mapper.map([large()]).unwrap());
    // All of an aperture.
    drop(mapper.map([Region::part(&memory, 0, 4 * page_size(), RW).unwrap()]).unwrap());
    let error = mapper.map([Region::whole(&memory, RW)]).unwrap_err();
    assert!(matches!(error, MapError::Plan(PlanError::NoRoom { .. })), "{error:?}");
}

#[test]
fn a_space_without_pages_or_apertures_fits_nothing() {
    let without_pages = Limits { page_sizes: 0, ..x86() };
    let without_apertures = Limits { apertures: Vec::new(), ..x86() };
    for limits in [without_pages, without_apertures] {
        let error = Mapper::shared(Kernel::new(limits)).unwrap_err();
        assert!(matches!(error, PlanError::NothingFits { .. }), "{error:?}");
    }
}

#[test]
fn iovas_are_not_handed_out_where_a_device_that_came_later_does_not_reach() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let memory = memory(1);
    let region = || Region::whole(&memory, RW);
    let early = mapper.map([region()]).unwrap();
    let zero = mapper.map([region().at(Iova::new(0))]).unwrap();
    assert_eq!(early.iova(0), Some(Iova::new(page_size())));
    kernel.state().limits.as_mut().unwrap().apertures = vec![iovas(16 * m2(), 4 * page_size())];
    let all: Vec<_> = (0..4).map(|_| mapper.map([region()]).unwrap()).collect();
    let found = all.iter().map(|mapped| mapped.iova(0).unwrap().get());
    assert_eq!(found.collect::<Vec<_>>(), [0, 1, 2, 3].map(|n| 16 * m2() + n * page_size()));
    assert!(matches!(mapper.map([region()]), Err(MapError::Plan(PlanError::NoRoom { .. }))));
    drop((early, zero));
    assert_eq!(Arc::strong_count(&memory), 1 + 2 * 4);
}

#[test]
fn iovas_that_a_later_device_does_not_reach_are_not_handed_out_when_they_come_back() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let memory = memory(1);
    let region = || Region::whole(&memory, RW);
    let dropped = mapper.plan([region()]).unwrap();
    let unmapped = mapper.map([region()]).unwrap();
    let refused = mapper.plan([region()]).unwrap();
    let fixed = mapper.plan([region().at(Iova::new(0))]).unwrap();
    kernel.state().limits.as_mut().unwrap().apertures = vec![iovas(16 * m2(), 4 * page_size())];
    let after = |mapper: &Mapper<_>| mapper.map([region()]).unwrap().iova(0);
    assert_eq!(after(&mapper), Some(Iova::new(16 * m2())));
    drop((dropped, fixed));
    assert_eq!(after(&mapper), Some(Iova::new(16 * m2())));
    unmapped.unmap().unwrap();
    assert_eq!(after(&mapper), Some(Iova::new(16 * m2())));
    assert!(matches!(refused.map(), Err(MapError::Refused { .. })));
    assert_eq!(after(&mapper), Some(Iova::new(16 * m2())));
    let whole = crate::plan::kernel::memory(4);
    drop(mapper.map([Region::whole(&whole, RW)]).unwrap());
}

#[test]
fn iovas_stay_below_what_the_device_addresses() {
    let mapper = Mapper::with_limit(Kernel::new(x86()), Iova::new(4 * page_size() - 1)).unwrap();
    let memory = memory(2);
    let first = mapper.map([Region::whole(&memory, RW)]).unwrap();
    let error = mapper.map([Region::whole(&memory, RW)]).unwrap_err();
    assert!(matches!(error, MapError::Plan(PlanError::NoRoom { .. })), "{error:?}");
    drop(first);
}
