//! A container says which ranges can be mapped, and which devices it refuses.

use std::sync::Arc;

use dmaspan::container::{Attach, CacheCoherency, DomainId, Error, Info, Interrupts};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, RegionKind, ReservedRegion, ReservedRegions};
use dmaspan::{
    Account, Container, DmaSpace as _, Errno, Iova, IovaRange, PhysAddr, Prot, UserAddr,
};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use proptest::prelude::*;

use crate::common::{PROT, range, walker};

type Tried = Container<SimPinner, parking_lot::RawMutex>;

fn container() -> (Tried, Arc<SimSpace>) {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 256 << 12, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    (Container::new(SimPinner::new(memory), Account::new(u64::MAX)), space)
}

fn domain<const G: u32>(
    input_bits: u32,
    page_sizes: Option<u64>,
) -> Domain<ArmLpaeS1<G>, Arena, Iotlb<ArmLpaeS1Walker, Arena>> {
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 4 << 20);
    let config = ArmLpaeS1Config { page_sizes, ..ArmLpaeS1Config::new(input_bits, 48) };
    let table = PageTable::new(ArmLpaeS1::<G>::new(config).unwrap(), tables.clone()).unwrap();
    let walker = walker(&table);
    Domain::new(table, Iotlb::new(walker, tables)).unwrap()
}

fn isolated() -> Attach<'static> {
    Attach::new(Interrupts::Isolated)
}

fn regions(list: &[Region]) -> ReservedRegions {
    let mut regions = ReservedRegions::new();
    for &(start, last, kind) in list {
        let range = IovaRange::new(Iova::new(start), Iova::new(last)).unwrap();
        regions.insert(ReservedRegion { range, kind, prot: Prot::READ_WRITE }).unwrap();
    }
    regions
}

#[test]
fn without_domains_all_can_be_mapped_by_the_users_pages() {
    let (container, _) = container();
    let empty = container.info();
    let Info { page_sizes, ref iova_ranges, mappings_left, coherency, ref domains, .. } = empty;
    let all = IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).unwrap();
    assert_eq!((page_sizes, iova_ranges.as_slice()), (!0xfff, [all].as_slice()));
    assert_eq!((mappings_left, domains.len()), (65535, 0));
    assert_eq!(coherency, CacheCoherency::Enforced, "as Linux says of no domains");
    assert_eq!(container.with_page_size(0x1_0000).info().page_sizes, !0xffff);
}

#[test]
fn page_sizes_are_those_of_all_domains_and_none_is_below_the_users() {
    let (container, _) = container();
    let id = container.attach(domain::<12>(48, None), isolated()).unwrap();
    assert_eq!(container.info().page_sizes, 1 << 12 | 1 << 21 | 1 << 30);
    container.attach(domain::<12>(48, Some(1 << 12 | 1 << 21)), isolated()).unwrap();
    assert_eq!(container.info().page_sizes, 1 << 12 | 1 << 21);
    assert_eq!(container.limits().page_sizes, 1 << 12 | 1 << 21);
    let error = container.attach(domain::<14>(48, None), isolated()).unwrap_err();
    let ours = 1 << 12 | 1 << 21;
    let theirs = 1 << 14 | 1 << 25;
    let named = matches!(error, Error::NoPageSize { domain, others }
        if (domain, others) == (theirs, ours));
    assert!(named, "{error}");
    assert_eq!(container.errno(&error), Errno::EINVAL);
    assert_eq!(container.info().domains.len(), 2);
    container.detach(id).unwrap();
    // Pages of 4K look as if they were of 64K, to users who have those.
    let container = container.with_page_size(0x1_0000);
    assert_eq!(container.info().page_sizes, 1 << 16 | 1 << 21);
    assert_eq!(container.limits().granule(), 1 << 16);
}

#[test]
fn coherency_is_that_of_all_domains() {
    let (container, _) = container();
    let enforced = || isolated().coherency(CacheCoherency::Enforced);
    container.attach(domain::<12>(48, None), enforced()).unwrap();
    assert_eq!(container.info().coherency, CacheCoherency::Enforced);
    let id = container.attach(domain::<12>(48, None), isolated()).unwrap();
    assert_eq!(container.info().coherency, CacheCoherency::NotEnforced);
    container.detach(id).unwrap();
    assert_eq!(container.info().coherency, CacheCoherency::Enforced);
}

#[test]
fn devices_whose_interrupts_are_not_isolated_are_refused_unless_that_is_allowed() {
    let (container, _) = container();
    let error = container.attach(domain::<12>(48, None), Attach::new(Interrupts::Unsafe));
    let error = error.unwrap_err();
    assert!(matches!(error, Error::UnsafeInterrupts), "{error}");
    assert_eq!(container.errno(&error), Errno::EPERM);
    assert_eq!(container.info().domains.len(), 0);
    let allowed = Attach::new(Interrupts::Unsafe).allow_unsafe_interrupts();
    container.attach(domain::<12>(48, None), allowed).unwrap();
}

/// A container with a mapping of 15 pages at 1 MiB, in a domain or none.
fn mapped(attached: u32) -> Tried {
    let (container, space) = container();
    for _ in 0..attached {
        container.attach(domain::<12>(48, None), isolated()).unwrap();
    }
    let span = space.memory().allocate(15 << 12, 16).unwrap();
    let user = space.map(UserAddr::new(1 << 40), &[span]).unwrap();
    container.map(&space, user, Iova::new(1 << 20), PROT).unwrap();
    container
}

#[test]
fn domains_that_do_not_go_with_a_mapping_are_refused_by_its_name() {
    let mapping = range(1 << 20, 15 << 12);
    for (attached, granule) in [(0, 1 << 16), (1, 1 << 21)] {
        let container = mapped(attached);
        let before = (container.info(), container.account().used());
        let check = |result: Result<DomainId, Error<_>>| {
            let error = result.unwrap_err();
            assert_eq!(container.errno(&error), Errno::EINVAL, "{error}");
            assert_eq!((container.info(), container.account().used()), before);
            error
        };
        for (start, last) in [(0, 1 << 20), ((1 << 20) + 0xefff, 1 << 30), (0, u64::MAX)] {
            for kind in [RegionKind::Msi, RegionKind::Direct, RegionKind::SoftwareMsi] {
                let how = isolated().regions(regions(&[(start, last, kind)]));
                let error = check(container.attach(domain::<12>(48, None), how));
                let named = matches!(error, Error::MappedReserved { mapping: m, region }
                    if m == mapping && region.range.last() == Iova::new(last));
                assert!(named, "{error}");
            }
        }
        let sizes = Some(1 << 16 | 1 << 21);
        let error = check(container.attach(domain::<16>(48, sizes), isolated()));
        let named = matches!(error, Error::MappedMisaligned { mapping: m, granule: g }
            if (m, g) == (mapping, granule));
        assert!(named, "{error}");
        // What firmware uses until a device is taken over, and neighbours, are no conflict.
        let fits = regions(&[
            (0, u64::MAX, RegionKind::DirectRelaxable),
            (0, (1 << 20) - 1, RegionKind::Msi),
            ((1 << 20) + 0xf000, 1 << 30, RegionKind::Msi),
        ]);
        container.attach(domain::<12>(48, None), isolated().regions(fits)).unwrap();
        assert_eq!(container.info().iova_ranges[0], mapping);
        assert_eq!(container.account().used(), 15 << 12);
    }
}

#[test]
fn a_mapping_that_a_new_aperture_does_not_cover_refuses_the_domain() {
    let (container, space) = container();
    let span = space.memory().allocate(2 << 12, 12).unwrap();
    let user = space.map(UserAddr::new(1 << 40), &[span]).unwrap();
    let id = container.attach(domain::<12>(48, None), isolated()).unwrap();
    // Across the end of 2^36 bytes.
    container.map(&space, user, Iova::new((1 << 36) - 4096), PROT).unwrap();
    let error = container.attach(domain::<12>(36, None), isolated()).unwrap_err();
    let (mapping, aperture) = (range((1 << 36) - 4096, 8192), range(0, 1 << 36));
    let named = matches!(error, Error::MappedOutside { mapping: m, aperture: a }
        if (m, a) == (mapping, aperture));
    assert!(named, "{error}");
    let part = range(1 << 36, 4096);
    assert!(error.to_string().starts_with(&format!("{part} of {mapping} is mapped")), "{error}");
    assert_eq!(container.errno(&error), Errno::EINVAL);
    assert_eq!(container.unmap_all().unwrap(), 8192);
    container.attach(domain::<12>(36, None), isolated()).unwrap();
    assert_eq!(container.info().iova_ranges, [aperture]);
    let error = container.map(&space, user, Iova::new((1 << 36) - 4096), PROT).unwrap_err();
    let Error::OutsideAperture { outside, .. } = &error else { panic!("{error}") };
    assert_eq!(*outside, [part]);
    assert!(error.to_string().contains(&format!("{part} of {mapping} is in no")), "{error}");
    container.detach(id).unwrap();
    assert_eq!(container.info().iova_ranges, [aperture]);
}

#[test]
fn a_domain_that_leaves_nothing_to_map_is_refused() {
    let (container, _) = container();
    container.attach(domain::<12>(36, None), isolated()).unwrap();
    let all =
        regions(&[(0, (1 << 35) - 1, RegionKind::Msi), (1 << 35, 1 << 40, RegionKind::Reserved)]);
    let error = container.attach(domain::<12>(48, None), isolated().regions(all)).unwrap_err();
    assert!(matches!(error, Error::NoAperture { .. }), "{error}");
    assert_eq!(container.errno(&error), Errno::EINVAL);
    assert_eq!(container.info().domains.len(), 1);
}

/// First and last address and kind.
type Region = (u64, u64, RegionKind);

/// A step of a history: attach a domain of so many input bits with regions, or detach one.
#[derive(Clone, Debug)]
enum Step {
    Attach(u32, Vec<Region>),
    Detach(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let kind = prop_oneof![
        Just(RegionKind::Direct),
        Just(RegionKind::DirectRelaxable),
        Just(RegionKind::Reserved),
        Just(RegionKind::Msi),
        Just(RegionKind::SoftwareMsi),
    ];
    // Near each other, and around the ends of the apertures.
    let at = prop_oneof![0..40u64, (1u64 << 32) - 9..(1 << 32) + 9, u64::MAX - 5..=u64::MAX];
    let region = (at, 0..20u64, kind)
        .prop_map(|(start, more, kind)| (start, start.saturating_add(more), kind));
    let bits = prop_oneof![Just(32), Just(36), Just(48)];
    let attach = (bits, prop::collection::vec(region, 0..6));
    let step = prop_oneof![
        2 => attach.prop_map(|(bits, regions)| Step::Attach(bits, regions)),
        1 => (0..8usize).prop_map(Step::Detach),
    ];
    prop::collection::vec(step, 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn iova_ranges_are_what_all_domains_translate_and_no_device_has_reserved(steps in steps()) {
        let (container, _) = container();
        let mut attached: Vec<(DomainId, u32, Vec<Region>)> = Vec::new();
        for step in steps {
            match step {
                Step::Attach(bits, list) => {
                    let how = isolated().regions(regions(&list));
                    let id = container.attach(domain::<12>(bits, None), how).unwrap();
                    attached.push((id, bits, list));
                }
                Step::Detach(n) if n < attached.len() => {
                    container.detach(attached.remove(n).0).unwrap();
                }
                Step::Detach(_) => {}
            }
            let free = |at: u64| attached.iter().all(|(_, bits, list)| {
                let reserved = |&(start, last, kind): &Region| {
                    kind != RegionKind::DirectRelaxable && (start..=last).contains(&at)
                };
                at >> bits == 0 && !list.iter().any(reserved)
            });
            let ranges = container.info().iova_ranges;
            let has = |at: u64| move |range: &&IovaRange| range.contains(Iova::new(at));
            let said = |at: u64| ranges.iter().filter(has(at)).count();
            let ends = (0..70).chain((1 << 32) - 40..(1 << 32) + 40);
            let ends = ends.chain([(1 << 36) - 1, 1 << 36, (1 << 48) - 1, 1 << 48]);
            for at in ends.chain(u64::MAX - 40..=u64::MAX) {
                prop_assert_eq!(said(at), usize::from(free(at)), "{:#x} of {:?}", at, &ranges);
            }
            for pair in ranges.windows(2) {
                prop_assert!(pair[0].last().checked_add(1) < Some(pair[1].start()));
            }
        }
    }
}
