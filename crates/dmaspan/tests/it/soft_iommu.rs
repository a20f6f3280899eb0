//! The software IOMMU: what device models reach, when, and what they are told.

mod accesses;
mod streams;
mod waiting;

use std::sync::Mutex;

use dmaspan::io_pgtable::Arena;
use dmaspan::io_pgtable::ArenaList;
use dmaspan::io_pgtable::{ArmLpaeS1, MappedRun};
use dmaspan::iommu::soft::{AccessFailed, Bus, BusError, SoftDevice, SoftIommu};
use dmaspan::iommu::{self, Domain, FaultAccess, FaultReason, SyncFailed, Synced};
use dmaspan::{HostAddr, Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::sanitizer::{Sanitized, Sanitizer, SanitizerConfig};

use crate::common::{PROT, range, span, table};

type Format = ArmLpaeS1<12>;
type Iommu = SoftIommu<Format, Arena>;
type Device = SoftDevice<Format, Arena>;
type DomainOf<O> = Domain<Format, Arena, O>;
type SoftDomain = DomainOf<Iommu>;

/// A domain behind a software IOMMU.
fn domain() -> (SoftDomain, Iommu) {
    let table = table::<12>();
    let iommu = SoftIommu::over(&table);
    (Domain::new(table, iommu.clone()).unwrap(), iommu)
}

#[track_caller]
fn map<O: iommu::IommuOps>(domain: &DomainOf<O>, iova: u64, spans: &[Span], prot: Prot) {
    // SAFETY: tests work on ranges of their own, and devices reach memory by its lock.
    unsafe { domain.map_spans(Iova::new(iova), spans, prot) }.unwrap();
}

/// Unmaps and syncs.
fn unmap<O: iommu::IommuOps>(
    domain: &DomainOf<O>,
    range: IovaRange,
) -> Result<Synced, SyncFailed<ArenaList>> {
    let mut room = SpanBuf::room::<8>();
    // SAFETY: as for `map`.
    let unsynced = unsafe { domain.unmap(range, &mut SpanBuf::new(&mut room)) }.unwrap();
    unsynced.sync().map(|(synced, _)| synced)
}

/// Where a read of one byte goes.
fn reach(device: &mut Device, iova: u64) -> Result<u64, FaultReason> {
    reach_by(device, iova, FaultAccess::Read)
}

fn reach_by(device: &mut Device, iova: u64, access: FaultAccess) -> Result<u64, FaultReason> {
    let mut found = None;
    let done = device.access(range(iova, 1), access, |span| {
        found = Some(span.paddr().get());
        Ok::<_, ()>(())
    });
    match done {
        Ok(()) => Ok(found.unwrap()),
        Err(AccessFailed::Fault(fault)) => Err(fault.reason),
        Err(other) => panic!("{other:?}"),
    }
}

/// Bytes from address 0 on.
struct Ram(Mutex<Vec<u8>>);

impl Ram {
    fn new(bytes: usize) -> Self {
        Self(Mutex::new(vec![0; bytes]))
    }

    fn with(&self, at: PhysAddr, len: usize, with: impl FnOnce(&mut [u8])) -> Result<(), BusError> {
        let nobody = BusError::Nobody { paddr: at };
        let start = usize::try_from(at.get()).map_err(|_| nobody)?;
        let mut bytes = self.0.lock().unwrap();
        with(bytes.get_mut(start..).and_then(|bytes| bytes.get_mut(..len)).ok_or(nobody)?);
        Ok(())
    }
}

impl Bus for Ram {
    fn read(&self, at: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        self.with(at, buf.len(), |bytes| buf.copy_from_slice(bytes))
    }

    fn write(&self, at: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        self.with(at, buf.len(), |bytes| bytes.copy_from_slice(buf))
    }
}

#[test]
fn tables_are_walked_between_the_begin_and_the_end_of_their_own_domain() {
    let table = table::<12>();
    let iommu = SoftIommu::over(&table);
    let mut early = iommu.device(1);
    assert_eq!(reach(&mut early, 0x5000), Err(FaultReason::Blocked));
    let domain = Domain::new(table, iommu.clone()).unwrap();
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    assert_eq!(reach(&mut early, 0x5123), Ok(0x1123));
    assert_eq!(reach(&mut iommu.device(2), 0x5fff), Ok(0x1fff));
    drop(domain);
    assert_eq!(reach(&mut early, 0x5123), Err(FaultReason::Blocked));
    assert!(early.cached().is_empty());
    assert_eq!(reach(&mut iommu.device(3), 0x5123), Err(FaultReason::Blocked));
}

#[test]
fn a_device_of_other_addresses_than_the_domain_has_reaches_nothing() {
    let table = table::<12>();
    let iommu = SoftIommu::over(&table);
    let mut early = iommu.device(1);
    let hosts = iommu.clone().reaching::<HostAddr>();
    let domain = Domain::new(table, hosts.clone()).unwrap();
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    // What is an address of this process for one would be a physical one for the other.
    assert_eq!(reach(&mut early, 0x5123), Err(FaultReason::Blocked));
    assert_eq!(reach(&mut iommu.device(2), 0x5123), Err(FaultReason::Blocked));
    let range = IovaRange::from_len(Iova::new(0x5123), 1).unwrap();
    let mut found = None;
    let keep = |span: Span<HostAddr>| {
        found = Some(span.start());
        Ok::<(), ()>(())
    };
    hosts.device(3).access(range, FaultAccess::Read, keep).unwrap();
    assert_eq!(found, Some(HostAddr::new(0x1123)));
}

#[test]
fn room_for_more_spans_than_there_is_memory_for_is_refused_with_nothing_changed() {
    let (domain, iommu) = domain();
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    let mut device = iommu.device(1);
    assert_eq!(reach(&mut device, 0x5000), Ok(0x1000));
    let (cached, misses) = (device.cached(), device.misses());
    for places in [usize::MAX, usize::MAX >> 5, usize::MAX >> 12] {
        assert!(device.set_places(places).is_err(), "{places:#x}");
    }
    assert_eq!(device.cached(), cached);
    assert_eq!((reach(&mut device, 0x5fff), device.misses()), (Ok(0x1fff), misses));
}

#[test]
fn a_domain_of_another_table_is_refused_and_the_device_stays_blocked() {
    let (one, other) = (table::<12>(), table::<12>());
    let iommu = SoftIommu::over(&one);
    // The same addresses: tables of two arenas with one base.
    assert_eq!(one.root(), other.root());
    let mut device = iommu.device(1);
    let error = Domain::new(other, iommu.clone()).unwrap_err();
    assert!(matches!(error, iommu::Error::Hardware { .. }), "{error}");
    assert_eq!(reach(&mut device, 0), Err(FaultReason::Blocked));
    // The table that nobody walks may go, and the hooks serve no other.
    drop(one);
    assert_eq!(reach(&mut device, 0), Err(FaultReason::Blocked));
    assert!(Domain::new(table::<12>(), iommu).is_err());
}

#[test]
fn hooks_that_wrap_others_let_them_begin() {
    let table_of = table::<12>();
    let iommu = SoftIommu::over(&table_of);
    let sanitizer = Sanitizer::new(SanitizerConfig::default());
    let faults = Faults::default();
    let hooks = Sanitized::new(Faulty::new(iommu.clone(), &faults), &sanitizer);
    let domain = Domain::new(table_of, hooks).unwrap();
    let mut device = iommu.device(1);
    map(&domain, 0x5000, &[span(0x1000, 0x2000)], PROT);
    assert_eq!(reach(&mut device, 0x5000), Ok(0x1000));
    assert!(unmap(&domain, range(0x5000, 0x2000)).is_ok());
    assert_eq!(reach(&mut device, 0x5000), Err(FaultReason::Translation));
}

#[test]
fn a_sync_that_fails_leaves_the_device_where_it_was_until_one_succeeds() {
    let table_of = table::<12>();
    let iommu = SoftIommu::over(&table_of);
    let faults = Faults::default();
    let domain = Domain::new(table_of, Faulty::new(iommu.clone(), &faults)).unwrap();
    let mut device = iommu.device(1);
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    assert_eq!(reach(&mut device, 0x5000), Ok(0x1000));
    faults.arm(1);
    let failed = unmap(&domain, range(0x5000, 0x1000)).unwrap_err();
    assert_eq!(reach(&mut device, 0x5000), Ok(0x1000), "that is what the error says");
    // SAFETY: it was gathered from this domain.
    let synced = unsafe { domain.sync(failed.gather) }.unwrap();
    assert!(synced.covers(range(0x5000, 0x1000)));
    assert_eq!(reach(&mut device, 0x5000), Err(FaultReason::Translation));
}

#[test]
fn neighbours_are_joined_as_they_come_and_cut_as_they_go() {
    let (domain, iommu) = domain();
    let mut device = iommu.device(1);
    map(&domain, 0x10_0000, &[span(0x10_0000, 0x1000)], PROT);
    assert_eq!(reach(&mut device, 0x10_0000), Ok(0x10_0000));
    map(&domain, 0x10_1000, &[span(0x10_1000, 0x3000)], PROT);
    map(&domain, 0xf_f000, &[span(0xf_f000, 0x1000)], PROT);
    assert_eq!(reach(&mut device, 0x10_3fff), Ok(0x10_3fff));
    let all =
        MappedRun { range: range(0xf_f000, 0x5000), paddr: PhysAddr::new(0xf_f000), prot: PROT };
    let kept: Vec<_> = device.cached().iter().map(|run| (run.range, run.paddr)).collect();
    assert_eq!(kept, [(all.range, all.paddr)]);
    let misses = device.misses();
    assert!(unmap(&domain, range(0x10_1000, 0x1000)).is_ok());
    // What is left of the span answers without a walk.
    assert_eq!(reach(&mut device, 0x10_0fff), Ok(0x10_0fff));
    assert_eq!(reach(&mut device, 0x10_2000), Ok(0x10_2000));
    assert_eq!(device.misses(), misses);
    assert_eq!(reach(&mut device, 0x10_1000), Err(FaultReason::Translation));
    // An absent entry is not kept.
    map(&domain, 0x10_1000, &[span(0x7000, 0x1000)], PROT);
    assert_eq!(reach(&mut device, 0x10_1000), Ok(0x7000));
}

#[test]
fn an_iotlb_of_few_places_finds_everything_again() {
    let (domain, iommu) = domain();
    let spans: Vec<Span> = (0..64).map(|n| span(n << 13, 0x1000)).collect();
    map(&domain, 0, &spans, PROT);
    for places in [0, 1, 2, 63, 64] {
        let mut device = iommu.device(1);
        device.set_places(places).unwrap();
        for _ in 0..3 {
            for n in 0..64 {
                assert_eq!(reach(&mut device, n << 12 | 7), Ok(n << 13 | 7));
            }
        }
        assert!(device.cached().len() <= places.max(1));
        assert_eq!(device.misses() == 64, places == 64);
    }
}
