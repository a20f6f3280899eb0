//! `?` converts errors that hand something back, and loses nothing.

use std::error;

use dmaspan::io_pgtable::{self, Arena, ArmLpaeS1, PageTable};
use dmaspan::iommu::soft::{SoftIommu, SoftStream};
use dmaspan::iommu::{
    AttachError, AttachedTo, Attachment, DirectError, Domain, Error, HardwareError, IommuOps,
    MapFailed, Port as _, RegionKind, Relaxable, ReservedRegion, ReservedRegions, SyncFailed,
};
use dmaspan::{Errno, Iova, IovaRange, PhysAddr, Prot, SpanBuf};
use dmaspan_sim::fault::{Faults, Faulty};

use crate::common::{PROT, format, range, span, table};

type Hooks = Faulty<SoftIommu<ArmLpaeS1<12>>>;
type Faltering = Domain<ArmLpaeS1<12>, Arena, Hooks>;

fn domain() -> (Faltering, Faults) {
    let (table, faults) = (table::<12>(), Faults::default());
    let iommu = SoftIommu::over(&table);
    (Domain::new(table, Faulty::new(iommu, &faults)).unwrap(), faults)
}

/// As a user writes it.
fn map(domain: &Faltering, iova: u64, len: u64) -> Result<(), Error> {
    // SAFETY: nobody else works on the domain, and its devices touch no memory.
    unsafe { domain.map_spans(Iova::new(iova), &[span(0x10_0000, len)], PROT) }?;
    Ok(())
}

fn unmap(domain: &Faltering, range: IovaRange) -> Result<(), Error> {
    let mut room = SpanBuf::room::<4>();
    // SAFETY: as above.
    let unsynced = unsafe { domain.unmap(range, &mut SpanBuf::new(&mut room)) }?;
    let (synced, _) = unsynced.sync()?;
    assert!(synced.covers(range));
    Ok(())
}

/// The same with any error, for threads too.
fn both(domain: &Faltering) -> Result<(), Box<dyn error::Error + Send + Sync>> {
    // SAFETY: as above.
    unsafe { domain.map_spans(Iova::new(0x1000), &[span(0x10_0000, 0x1000)], PROT) }?;
    let mut room = SpanBuf::room::<4>();
    // SAFETY: as above.
    let unsynced = unsafe { domain.unmap(range(0x1000, 0x1000), &mut SpanBuf::new(&mut room)) }?;
    let (_synced, _) = unsynced.sync()?;
    Ok(())
}

#[test]
fn a_refused_mapping_becomes_its_reason() {
    let (domain, _) = domain();
    map(&domain, 0x5000, 0x1000).unwrap();
    let again = map(&domain, 0x4000, 0x2000).unwrap_err();
    assert!(matches!(again, Error::Table(io_pgtable::Error::Occupied { .. })), "{again}");
    assert_eq!(again.errno(), Errno::EEXIST);
    both(&domain).unwrap();
    assert!(both(&domain).is_ok());
    unmap(&domain, range(0x5000, 0x1000)).unwrap();
}

#[test]
fn a_mapping_that_was_not_taken_back_stays_one_that_was_not() {
    let (domain, faults) = domain();
    // The announcement fails, and then the sync of what is taken back.
    let hardware = HardwareError { what: "a test", status: 3 };
    let (one, other) = (range(0x5000, 0x1000), range(0x9000, 0x2000));
    let mut gather = domain.gather();
    for range in [other, one] {
        map(&domain, range.start().get(), range.len_less_one() + 1).unwrap();
        let mut room = SpanBuf::room::<4>();
        // SAFETY: as above.
        let unsynced = unsafe { domain.unmap(range, &mut SpanBuf::new(&mut room)) }.unwrap();
        let (more, _) = unsynced.into_gather();
        // SAFETY: both are this domain's.
        unsafe { domain.merge(&mut gather, more) };
    }
    let error = Error::Hardware { range: one, source: hardware };
    let failed = MapFailed { error, unsynced: Some(gather) };
    assert_eq!(failed.errno(), Errno::EIO);
    let plain = Error::from(failed);
    assert_eq!(plain, Error::NotTakenBack { range: range(0x5000, 0x6000) });
    assert_eq!(plain.errno(), Errno::EIO);
    assert!(plain.to_string().contains("0x5000..=0xafff"), "{plain}");
    assert_eq!(Error::from(MapFailed::<()> { error, unsynced: None }), error);

    // What no range is known of is everything.
    let everything = dmaspan::iommu::Gather::<()>::new(0);
    let failed = SyncFailed { gather: everything, error: hardware };
    let all = IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).unwrap();
    assert_eq!(Error::from(failed), Error::Hardware { range: all, source: hardware });
    drop(faults);
}

#[test]
fn a_sync_that_failed_names_what_it_was_of_and_leaks_its_tables() {
    let (domain, faults) = domain();
    let arena = domain.memory().clone();
    // All of a table, so that the unmap takes it away.
    map(&domain, 0, 2 << 20 | 0x1000).unwrap();
    unmap(&domain, range(0, 2 << 20 | 0x1000)).unwrap();
    let before = arena.tables();
    map(&domain, 0x20_0000, 0x1000).unwrap();
    faults.arm(1);
    let gone = range(0x20_0000, 0x1000);
    let failed = unmap(&domain, gone).unwrap_err();
    let Error::Hardware { range, source } = failed else { panic!("{failed:?}") };
    assert_eq!(range, gone);
    assert!(failed.to_string().contains(source.what), "{failed}");
    // What nobody can sync any more is used by nobody: the domain goes on.
    map(&domain, 0x20_0000, 0x1000).unwrap();
    unmap(&domain, gone).unwrap();
    assert!(arena.tables() >= before);
    assert_eq!(HardwareError::from(SyncFailed { gather: domain.gather(), error: source }), source);
}

/// As a user writes it.
fn attach(port: Faulted) -> Result<(), AttachError> {
    let stream = Attachment::new(port)?;
    stream.detach()
}

type Faulted = SoftStream<Domain<ArmLpaeS1<12>>>;

#[test]
fn a_stream_that_was_not_blocked_is_one_of_which_nothing_is_known() {
    let port = Faulted::new(3, ReservedRegions::new()).waiting_by(|_| false);
    assert!(attach(port.clone()).is_ok());
    let mut device = port.device();
    let access = dmaspan::iommu::FaultAccess::Read;
    let table = PageTable::new(format::<12>(48, 48), crate::common::arena()).unwrap();
    let iommu = SoftIommu::over(&table);
    let domain = Domain::new(table, iommu).unwrap();
    // SAFETY: nobody else works on the domain, and its devices touch no memory.
    unsafe { domain.map_spans(Iova::new(0), &[span(0, 0x1000)], PROT) }.unwrap();
    port.translate(&domain).unwrap();
    let done = device.access(range(0, 1), access, |_| {
        let error = attach(port.clone()).unwrap_err();
        let AttachError::Hardware { left, .. } = error else { panic!("{error:?}") };
        assert_eq!(left, AttachedTo::Unknown);
        assert_eq!(error.errno(), Errno::EIO);
        Ok::<_, ()>(())
    });
    assert_eq!(done, Ok(()));
    domain.ops().detach().unwrap();
}

/// As a user writes it.
fn direct(domain: &Faltering, regions: &ReservedRegions) -> Result<(), DirectError> {
    // SAFETY: nobody else works on the domain, and its devices touch no memory.
    unsafe { domain.map_direct(regions, Relaxable::Keep) }?;
    Ok(())
}

#[test]
fn direct_regions_that_were_refused_become_their_reason() {
    let (domain, _) = domain();
    map(&domain, 0x5000, 0x1000).unwrap();
    let mut regions = ReservedRegions::new();
    let region = ReservedRegion {
        range: range(0x5000, 0x1000),
        kind: RegionKind::Direct,
        prot: Prot::READ_WRITE,
    };
    regions.insert(region).unwrap();
    let error = direct(&domain, &regions).unwrap_err();
    let elsewhere = DirectError::Elsewhere {
        region: range(0x5000, 0x1000),
        mapped: range(0x5000, 0x1000),
        paddr: PhysAddr::new(0x10_0000),
    };
    assert_eq!(error, elsewhere);
}
