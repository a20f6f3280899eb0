//! Reserved regions: sorted and merged, kept out of IOVAs, mapped one to one.

use dmaspan::io_pgtable::{self, Arena, ArmLpaeS1, PageTable};
use dmaspan::iommu::iova::{self, Align, Request, Space};
use dmaspan::iommu::{
    DirectError, Domain, RegionKind, Relaxable, ReservedRegion, ReservedRegionError,
    ReservedRegions,
};
use dmaspan::platform::OneThread;
use dmaspan::{Errno, Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
use dmaspan_sim::fault::{Faults, Faulty, Fired};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use proptest::prelude::*;

use crate::common::{PROT, arena, format, range, span, walker};

const KINDS: [RegionKind; 5] = [
    RegionKind::Direct,
    RegionKind::DirectRelaxable,
    RegionKind::Reserved,
    RegionKind::Msi,
    RegionKind::SoftwareMsi,
];
const PROTS: [Prot; 2] = [Prot::READ, Prot::READ_WRITE];

pub(crate) fn region(kind: RegionKind, start: u64, len: u64, prot: Prot) -> ReservedRegion {
    ReservedRegion { range: range(start, len), kind, prot }
}

pub(crate) fn regions(list: &[ReservedRegion]) -> ReservedRegions {
    let mut regions = ReservedRegions::new();
    list.iter().for_each(|&region| regions.insert(region).unwrap());
    regions
}

/// Maximal runs of the units for which `has` says so, from `base` on.
fn runs(base: u64, units: u64, has: impl Fn(u64) -> bool) -> Vec<IovaRange> {
    let mut runs: Vec<IovaRange> = Vec::new();
    for unit in (0..units).filter(|&unit| has(unit)) {
        let address = IovaRange::point(Iova::new(base + unit));
        match runs.last_mut() {
            Some(last) if last.last().checked_add(1) == Some(address.start()) => {
                *last = IovaRange::new(last.start(), address.last()).unwrap();
            }
            _ => runs.push(address),
        }
    }
    runs
}

/// First address, length, kind, permissions.
type Drawn = (u64, u64, usize, usize);

fn drawn(units: u64, max_len: u64) -> impl Strategy<Value = Vec<Drawn>> {
    let one = (0..units, 1..=max_len, 0..KINDS.len(), 0..PROTS.len());
    let one = one.prop_map(move |(at, len, kind, prot)| (at, len.min(units - at), kind, prot));
    proptest::collection::vec(one, 0..12)
}

proptest! {
    #[test]
    fn regions_are_sorted_and_merged_as_a_map_of_every_address_says(
        drawn in drawn(64, 20),
        base in prop_oneof![Just(0), Just(u64::MAX - 63)],
    ) {
        let mut regions = ReservedRegions::new();
        for &(at, len, kind, prot) in &drawn {
            let (kind, prot) = (KINDS[kind], PROTS[prot]);
            regions.insert(region(kind, base + at, len, prot)).unwrap();
        }
        let covers = |&(at, len, ..): &Drawn, unit| (at..at + len).contains(&unit);
        let mut expected = Vec::new();
        for (k, &kind) in KINDS.iter().enumerate() {
            for (p, &prot) in PROTS.iter().enumerate() {
                let has = |unit| drawn.iter().any(|d| (d.2, d.3) == (k, p) && covers(d, unit));
                let runs = runs(base, 64, has).into_iter();
                expected.extend(runs.map(|range| ReservedRegion { range, kind, prot }));
            }
        }
        expected.sort_by_key(|region| (region.range.start(), region.kind, region.prot));
        prop_assert_eq!(regions.as_slice(), &expected[..]);

        let all = runs(base, 64, |unit| drawn.iter().any(|d| covers(d, unit)));
        prop_assert_eq!(regions.kept_out(Relaxable::Keep).collect::<Vec<_>>(), all);
        let hard = runs(base, 64, |unit| drawn.iter().any(|d| d.2 != 1 && covers(d, unit)));
        prop_assert_eq!(regions.kept_out(Relaxable::Drop).collect::<Vec<_>>(), hard);
        for unit in 0..64 {
            let at = IovaRange::point(Iova::new(base + unit));
            let first = expected.iter().find(|region| region.range.covers(at));
            prop_assert_eq!(regions.first_in(at), first);
        }
    }

    #[test]
    fn direct_regions_are_mapped_as_a_map_of_every_granule_says(
        drawn in drawn(32 * 8, 60),
        mapped in proptest::collection::vec(any::<bool>(), 32),
        relaxed in any::<bool>(),
    ) {
        let relaxable = if relaxed { Relaxable::Drop } else { Relaxable::Keep };
        let (domain, iotlb) = domain();
        // An eighth of a granule is the unit, and the base no multiple of a block.
        let (base, unit) = (0x7f_f000_u64, 0x200_u64);
        let mut regions = ReservedRegions::new();
        let mut expected = [Prot::empty(); 32];
        for &(at, len, kind, prot) in &drawn {
            let (kind, prot) = (KINDS[kind], PROTS[prot]);
            regions.insert(region(kind, base + at * unit, len * unit, prot)).unwrap();
            if kind == RegionKind::Direct || (!relaxed && kind == RegionKind::DirectRelaxable) {
                let granules = at / 8..=(at + len - 1) / 8;
                for (_, has) in (0u64..).zip(&mut expected).filter(|(g, _)| granules.contains(g)) {
                    *has |= prot;
                }
            }
        }
        for granule in (0..32).filter(|&granule| mapped[granule]) {
            let at = base + granule as u64 * 0x1000;
            map(&domain, at, at, 0x1000, PROT);
            expected[granule] |= Prot::READ_WRITE;
        }
        let before = iotlb.counters().sync_maps;
        // SAFETY: the test alone uses the domain, and its device touches no memory.
        unsafe { domain.map_direct(&regions, relaxable) }.unwrap();
        prop_assert!(iotlb.counters().sync_maps - before <= 1);
        for (granule, prot) in expected.iter().enumerate() {
            let at = base + granule as u64 * 0x1000 + 0x123;
            for (access, needs) in [(Access::Read, Prot::READ), (Access::Write, Prot::WRITE)] {
                let expected = prot.contains(needs).then_some(PhysAddr::new(at));
                let found = iotlb.translate(Iova::new(at), access).ok().map(|hit| hit.paddr);
                prop_assert_eq!(found, expected, "{:?} of granule {}", access, granule);
            }
        }
        for outside in [base - 1, base + 32 * 0x1000] {
            prop_assert!(iotlb.translate(Iova::new(outside), Access::Read).is_err());
        }
    }
}

#[test]
fn a_direct_region_without_access_is_refused_and_named() {
    let mut regions = ReservedRegions::new();
    for kind in KINDS {
        let none = region(kind, 0x1000, 0x1000, Prot::CACHE);
        let direct = matches!(kind, RegionKind::Direct | RegionKind::DirectRelaxable);
        let expected =
            if direct { Err(ReservedRegionError::NoAccess { region: none }) } else { Ok(()) };
        assert_eq!(regions.insert(none), expected);
        if let Err(error) = expected {
            assert_eq!(error.errno(), Errno::EINVAL);
            assert!(error.to_string().contains("0x1000..=0x1fff"), "{error}");
        }
    }
    assert_eq!(regions.as_slice().len(), 3);
}

#[test]
fn regions_of_two_devices_are_one_list() {
    let one = regions(&[region(RegionKind::Msi, 0, 0x1000, Prot::WRITE)]);
    let mut both = regions(&[
        region(RegionKind::Msi, 0x1000, 0x1000, Prot::WRITE),
        region(RegionKind::Reserved, 0x800, 0x100, Prot::empty()),
    ]);
    both.extend(&one).unwrap();
    let expected = [
        region(RegionKind::Msi, 0, 0x2000, Prot::WRITE),
        region(RegionKind::Reserved, 0x800, 0x100, Prot::empty()),
    ];
    assert_eq!(both.as_slice(), expected);
}

/// Every granule that the space has left.
fn all_iovas(space: &Space<OneThread>) -> Vec<IovaRange> {
    let request = Request { bytes: 1, align: Align::Natural, limit: space.aperture().last() };
    let mut all = Vec::new();
    loop {
        match space.alloc(request) {
            Ok(iovas) => all.push(iovas.range()),
            Err(iova::Error::Exhausted { .. }) => return all,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn no_address_of_a_region_is_handed_out_and_every_other_is() {
    let space = Space::new(range(0, 64 << 12), 12, 1, OneThread).unwrap();
    let regions = regions(&[
        region(RegionKind::Direct, 0x2800, 0x1000, Prot::READ),
        region(RegionKind::DirectRelaxable, 0x8000, 0x1000, Prot::READ),
        region(RegionKind::Reserved, 0x10000, 0x2000, Prot::empty()),
        region(RegionKind::Msi, 0x11fff, 0x1002, Prot::WRITE),
        region(RegionKind::SoftwareMsi, 0x3_f000, 0x10_0000, Prot::WRITE),
        region(RegionKind::Msi, 0xfee0_0000, 0x10_0000, Prot::WRITE),
    ]);
    regions.reserve_in(&space, Relaxable::Drop).unwrap();
    // Again, as for another device with the same.
    regions.reserve_in(&space, Relaxable::Drop).unwrap();
    let mut granules: Vec<u64> =
        all_iovas(&space).iter().map(|range| range.start().get() >> 12).collect();
    granules.sort_unstable();
    let out = [0, 2, 3, 0x10, 0x11, 0x12, 0x13, 0x3f];
    let expected: Vec<u64> = (0..64).filter(|granule| !out.contains(granule)).collect();
    assert_eq!(granules, expected);
}

#[test]
fn a_region_that_is_in_use_is_named_with_what_uses_it() {
    let space = Space::new(range(0, 64 << 12), 12, 1, OneThread).unwrap();
    let request = Request { bytes: 0x1000, align: Align::Natural, limit: Iova::new(0x1fff) };
    let iovas = space.alloc(request).unwrap();
    assert_eq!(iovas.range(), range(0x1000, 0x1000));
    let list = regions(&[region(RegionKind::Msi, 0x1800, 0x100, Prot::WRITE)]);
    let error = list.reserve_in(&space, Relaxable::Keep).unwrap_err();
    let iova::Error::Taken { range: asked, taken } = error else { panic!("{error}") };
    assert!(asked.covers(range(0x1800, 0x100)) && taken.covers(range(0x1000, 0x1000)));
    space.free(iovas).unwrap();
}

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
pub(crate) type SimDomain = Domain<ArmLpaeS1<12>, Arena, Tlb>;

pub(crate) fn domain() -> (SimDomain, Tlb) {
    let table = PageTable::new(format::<12>(32, 40), arena()).unwrap();
    let iotlb = Iotlb::new(walker(table.format(), table.root()), table.memory().clone());
    (Domain::new(table, iotlb.clone()).unwrap(), iotlb)
}

pub(crate) fn map(domain: &SimDomain, iova: u64, paddr: u64, len: u64, prot: Prot) {
    // SAFETY: the test alone uses the domain, and its device touches no memory.
    unsafe { domain.map_spans(Iova::new(iova), &[span(paddr, len)], prot) }.unwrap();
}

/// Maps regions that are refused, and says why.
fn refused(domain: &SimDomain, list: &[ReservedRegion]) -> DirectError {
    // SAFETY: as for `map`.
    let failed = unsafe { domain.map_direct(&regions(list), Relaxable::Keep) }.unwrap_err();
    assert!(failed.unsynced.is_none());
    failed.error
}

fn reads(iotlb: &Tlb, iova: u64) -> Option<u64> {
    iotlb.translate(Iova::new(iova), Access::Read).ok().map(|hit| hit.paddr.get())
}

#[test]
fn what_stands_in_the_way_of_a_direct_region_is_named_and_nothing_is_mapped() {
    let (domain, iotlb) = domain();
    map(&domain, 0x5000, 0x9000, 0x1000, Prot::READ_WRITE);
    map(&domain, 0x7000, 0x7000, 0x1000, Prot::READ);
    let first = region(RegionKind::Direct, 0x1000, 0x1000, Prot::READ_WRITE);
    let direct = |start, len| region(RegionKind::Direct, start, len, Prot::READ_WRITE);

    let error = refused(&domain, &[first, direct(0x4800, 0x1000)]);
    let (paddr, mapped) = (PhysAddr::new(0x9000), range(0x5000, 0x1000));
    let elsewhere = DirectError::Elsewhere { region: range(0x4000, 0x2000), mapped, paddr };
    assert_eq!((error, error.errno()), (elsewhere, Errno::EEXIST));

    let error = refused(&domain, &[first, direct(0x7000, 0x1000)]);
    let DirectError::Permission { region, mapped, permits, needs } = error else {
        panic!("{error}");
    };
    assert_eq!((region, mapped), (range(0x7000, 0x1000), range(0x7000, 0x1000)));
    assert_eq!((permits & Prot::READ_WRITE, needs), (Prot::READ, Prot::READ_WRITE));

    let aperture = domain.geometry().aperture;
    let error = refused(&domain, &[first, direct((1 << 32) - 0x1000, 0x2000)]);
    let outside = range((1 << 32) - 0x1000, 0x2000);
    assert_eq!(error, DirectError::OutsideAperture { region: outside, aperture });
    assert_eq!(error.errno(), Errno::ERANGE);
    assert!(error.to_string().contains("0xfffff000..=0x100000fff"), "{error}");
    let error = refused(&domain, &[direct(0, u64::MAX)]);
    assert!(matches!(error, DirectError::OutsideAperture { .. }));

    assert_eq!(
        [0x1000, 0x4000, 0x5000, 0x7000].map(|at| reads(&iotlb, at)),
        [None, None, Some(0x9000), Some(0x7000)]
    );
}

#[test]
fn neighbouring_regions_of_both_direct_kinds_become_one_large_leaf() {
    let (domain, iotlb) = domain();
    let half = 1 << 20;
    let list = [
        region(RegionKind::Direct, 0x20_0000, half, Prot::READ_WRITE),
        region(RegionKind::DirectRelaxable, 0x20_0000 + half, half, Prot::READ_WRITE),
    ];
    // SAFETY: as for `map`.
    unsafe { domain.map_direct(&regions(&list), Relaxable::Keep) }.unwrap();
    let hit = iotlb.translate(Iova::new(0x2f_f123), Access::Write).unwrap();
    assert_eq!((hit.paddr.get(), hit.block), (0x2f_f123, range(0x20_0000, 0x20_0000)));
}

#[test]
fn direct_regions_are_all_mapped_or_none_whatever_step_fails() {
    let list = regions(&[
        region(RegionKind::Direct, 0x1000, 0x3000, Prot::READ_WRITE),
        region(RegionKind::Direct, 0x4000_0000, 0x1000, Prot::READ),
        region(RegionKind::DirectRelaxable, 0x8000_0000, 0x40_0000, Prot::READ_WRITE),
    ]);
    let faults = Faults::none();
    let mut refused = 0;
    let failed = faults.sweep(|n| {
        faults.arm(u32::MAX);
        let memory = arena();
        let table =
            PageTable::new(format::<12>(32, 40), Faulty::new(memory.clone(), &faults)).unwrap();
        let iotlb = Iotlb::new(walker(table.format(), table.root()), memory.clone());
        let domain = Domain::new(table, Faulty::new(iotlb.clone(), &faults)).unwrap();
        // What is there already stays, whatever happens.
        // SAFETY: the test alone uses the domain, and its device touches no memory.
        unsafe { domain.map_spans(Iova::new(0x2000), &[span(0x2000, 0x1000)], PROT) }.unwrap();
        faults.arm(n);
        // SAFETY: as above.
        let result = unsafe { domain.map_direct(&list, Relaxable::Keep) };
        // A step that failed may have been one that another made good.
        let fired = faults.disarm();
        refused += u32::from(result.is_err());
        let expected = |at: u64| (result.is_ok() || at == 0x2000).then_some(at);
        let unsynced = result.as_ref().is_err_and(|failed| failed.unsynced.is_some());
        for at in [0x1000, 0x2000, 0x3000, 0x4000_0000, 0x8000_0000, 0x803f_f000] {
            // The independent walk of what is in the tables.
            let fresh = Iotlb::new(walker(domain.format(), domain.root()), memory.clone());
            assert_eq!(reads(&fresh, at), expected(at), "step {n}");
            if !unsynced {
                assert_eq!(reads(&iotlb, at), expected(at), "step {n}");
            }
        }
        if let Err(failed) = &result {
            assert!(matches!(failed.error, DirectError::Domain { .. }), "{failed}");
        }
        // The domain ends before the faults do, whichever step that is.
        faults.arm(u32::MAX);
        drop(domain);
        if !unsynced {
            assert_eq!(memory.tables(), 0, "step {n}");
        }
        faults.arm(u32::from(fired == Fired::No));
    });
    assert!(refused >= 2, "{refused} of {failed} steps refused the regions");
}

#[test]
fn a_failed_announcement_takes_all_back_by_one_sync() {
    let (domain, iotlb) = domain();
    let list = regions(&[
        region(RegionKind::Direct, 0x1000, 0x1000, Prot::READ_WRITE),
        region(RegionKind::Direct, 0x4000_0000, 0x1000, Prot::READ_WRITE),
    ]);
    iotlb.fail_next_sync_maps(1);
    let before = iotlb.counters();
    // SAFETY: as for `map`.
    let failed = unsafe { domain.map_direct(&list, Relaxable::Keep) }.unwrap_err();
    let after = iotlb.counters();
    let DirectError::Domain { hole, source } = failed.error else { panic!("{failed}") };
    assert_eq!(hole, range(0x1000, 0x4000_0000));
    assert_eq!((source.errno(), failed.error.errno()), (Errno::EIO, Errno::EIO));
    assert_eq!(after.invalidations_by_range - before.invalidations_by_range, 1);
    assert_eq!([0x1000, 0x4000_0000].map(|at| reads(&iotlb, at)), [None; 2]);

    iotlb.fail_next_sync_maps(1);
    iotlb.fail_next_invalidations(1);
    // SAFETY: as for `map`.
    let failed = unsafe { domain.map_direct(&list, Relaxable::Keep) }.unwrap_err();
    // SAFETY: the gather is this domain's.
    assert!(unsafe { domain.sync(failed.unsynced.unwrap()) }.is_ok());
}

#[test]
fn memory_that_tables_cannot_express_is_refused_by_the_table() {
    // More input than output: an address that could not be its own translation.
    let table = PageTable::new(format::<12>(48, 40), arena()).unwrap();
    let iotlb = Iotlb::new(walker(table.format(), table.root()), table.memory().clone());
    let domain = Domain::new(table, iotlb).unwrap();
    let high = regions(&[region(RegionKind::Direct, 1 << 40, 0x1000, Prot::READ)]);
    // SAFETY: as for `map`.
    let failed = unsafe { domain.map_direct(&high, Relaxable::Keep) }.unwrap_err();
    let span = Span::new(PhysAddr::new(1 << 40), 0x1000).unwrap();
    let last = PhysAddr::new((1 << 40) - 1);
    let source = io_pgtable::Error::OutsideOutput { span, last }.into();
    assert_eq!(failed.error, DirectError::Domain { hole: range(1 << 40, 0x1000), source });
    assert_eq!(failed.error.errno(), Errno::ERANGE);
}

#[test]
fn what_was_mapped_one_to_one_can_be_unmapped_as_anything_else() {
    let (domain, iotlb) = domain();
    let list = regions(&[region(RegionKind::DirectRelaxable, 0x1800, 0x1000, Prot::READ)]);
    // SAFETY: as for `map`.
    unsafe { domain.map_direct(&list, Relaxable::Keep) }.unwrap();
    let mut room = SpanBuf::room::<2>();
    let mut buf = SpanBuf::new(&mut room);
    // SAFETY: as for `map`.
    drop(unsafe { domain.unmap(range(0x1000, 0x2000), &mut buf) }.unwrap());
    assert_eq!(buf.spans(), [span(0x1000, 0x2000)]);
    assert_eq!(reads(&iotlb, 0x1800), None);
}

#[test]
fn what_a_refused_region_left_unsynced_is_synced_with_those_before_it() {
    let (domain, iotlb) = domain();
    // A table without entries stays where the second region is to have a large leaf.
    let page = region(RegionKind::Direct, 0x20_0000, 0x1000, Prot::READ_WRITE);
    // SAFETY: the test alone uses the domain, and its device touches no memory.
    unsafe { domain.map_direct(&regions(&[page]), Relaxable::Keep) }.unwrap();
    // SAFETY: as above; a failed sync would fail the test.
    drop(unsafe { domain.unmap(page.range, &mut SpanBuf::new(&mut [span(0, 1); 4])) });
    let list = regions(&[
        region(RegionKind::Direct, 0x1000, 0x1000, Prot::READ_WRITE),
        region(RegionKind::Direct, 0x20_0000, 0x20_0000, Prot::READ_WRITE),
    ]);
    iotlb.fail_next_invalidations(1);
    // SAFETY: as above.
    let failed = unsafe { domain.map_direct(&list, Relaxable::Keep) }.unwrap_err();
    assert!(failed.unsynced.is_none(), "the second sync covers both");
    assert_eq!([0x1000, 0x20_0000].map(|at| reads(&iotlb, at)), [None; 2]);
    let tables = iotlb.tables().clone();
    drop(domain);
    assert_eq!(tables.tables(), 0, "a table of the first sync leaks");
}
