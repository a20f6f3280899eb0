//! The memory that a device model gets of one access.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::io_pgtable::Gap;
use dmaspan::iommu::soft::{AccessFailed, AccessFault, BusError};
use dmaspan::iommu::{
    FaultAccess, FaultHandler, FaultReason, FaultReport, FaultResponse, FaultState,
};
use dmaspan::{Errno, Iova, PhysAddr, Prot, RangeError, Span};

use super::{Ram, SoftDomain, domain, map, reach, reach_by};
use crate::common::{PROT, range, span};

#[test]
fn bytes_go_over_the_borders_of_spans_and_arrive_in_their_order() {
    let (domain, iommu) = domain();
    let mut device = iommu.device(1);
    let ram = Ram::new(0x1_0000);
    map(&domain, 0x20_0000, &[span(0x8000, 0x1000), span(0x2000, 0x2000)], PROT);
    let bytes: Vec<u8> = (0..0x2800u32).map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1]).collect();
    device.write(&ram, Iova::new(0x20_0400), &bytes).unwrap();
    let memory = ram.0.lock().unwrap().clone();
    assert_eq!(memory[0x8400..0x9000], bytes[..0xc00]);
    assert_eq!(memory[0x2000..0x3c00], bytes[0xc00..]);
    let mut back = vec![0; bytes.len()];
    device.read(&ram, Iova::new(0x20_0400), &mut back).unwrap();
    assert_eq!(back, bytes);
    let mut spans = Vec::new();
    let found = device.access(range(0x20_0fff, 2), FaultAccess::Read, |span| {
        spans.push(span);
        Ok::<_, ()>(())
    });
    assert_eq!(found, Ok(()));
    assert_eq!(spans, [span(0x8fff, 1), span(0x2000, 1)]);
}

#[test]
fn an_access_ends_where_it_is_refused_and_says_what_was_done() {
    let (domain, iommu) = domain();
    let mut device = iommu.device(1);
    let ram = Ram::new(0x4000);
    map(&domain, 0x20_0000, &[span(0x1000, 0x1000)], PROT);
    let failed = device.write(&ram, Iova::new(0x20_0ff0), &[5; 0x20]).unwrap_err();
    let fault = AccessFault {
        range: range(0x20_1000, 0x10),
        access: FaultAccess::Write,
        reason: FaultReason::Translation,
    };
    assert_eq!(failed, AccessFailed::Fault(fault));
    assert_eq!(failed.errno(), Errno::EFAULT);
    assert_eq!(
        failed.to_string(),
        "the device's write of 0x201000..=0x20100f was refused at 0x201000: nothing is mapped there"
    );
    assert_eq!(ram.0.lock().unwrap()[0x1ff0..0x2000], [5; 0x10]);
    // Mapped, but nobody answers in the middle.
    map(&domain, 0x30_0000, &[span(0x3000, 0x2000)], PROT);
    let failed = device.read(&ram, Iova::new(0x30_0000), &mut [0; 0x2000]).unwrap_err();
    let error = BusError::Nobody { paddr: PhysAddr::new(0x3000) };
    assert_eq!(failed, AccessFailed::Stopped { iova: Iova::new(0x30_0000), done: 0, error });
    map(&domain, 0x40_0000, &[span(0x1000, 0x1000), span(0x7000, 0x1000)], PROT);
    let failed = device.read(&ram, Iova::new(0x40_0800), &mut [0; 0x1000]).unwrap_err();
    let error = BusError::Nobody { paddr: PhysAddr::new(0x7000) };
    assert_eq!(failed, AccessFailed::Stopped { iova: Iova::new(0x40_1000), done: 0x800, error });
    assert_eq!(failed.errno(), Errno::EIO);
}

#[test]
fn an_access_of_no_bytes_is_none_and_one_that_wraps_does_nothing() {
    let (_domain, iommu) = domain();
    let mut device = iommu.device(1);
    let ram = Ram::new(0);
    assert_eq!(device.read(&ram, Iova::new(0), &mut []), Ok(()));
    assert_eq!(device.write(&ram, Iova::new(u64::MAX), &[]), Ok(()));
    let wraps = RangeError::Wraps { start: u64::MAX, len: 2 };
    let failed = device.write(&ram, Iova::new(u64::MAX), &[0; 2]).unwrap_err();
    assert_eq!(failed, AccessFailed::Range(wraps));
    assert_eq!(failed.errno(), Errno::EOVERFLOW);
    assert_eq!(device.faults().reported(), 0);
    // Beyond what the tables translate.
    for iova in [1 << 48, u64::MAX] {
        assert_eq!(reach(&mut device, iova), Err(FaultReason::Translation), "{iova:#x}");
    }
}

#[test]
fn a_device_does_what_it_may_and_nothing_else() {
    let (domain, iommu) = domain();
    let mut device = iommu.device(1);
    let (read, write, execute) = (FaultAccess::Read, FaultAccess::Write, FaultAccess::Execute);
    map(&domain, 0x1000, &[span(0x1000, 0x1000)], Prot::READ);
    map(&domain, 0x2000, &[span(0x2000, 0x1000)], PROT | Prot::NOEXEC);
    map(&domain, 0x3000, &[span(0x3000, 0x1000)], PROT | Prot::PRIV);
    let refused = Err(FaultReason::Permission);
    for _ in 0..2 {
        assert_eq!(reach_by(&mut device, 0x1000, read), Ok(0x1000));
        assert_eq!(reach_by(&mut device, 0x1000, write), refused);
        assert_eq!(reach_by(&mut device, 0x1000, execute), Ok(0x1000));
        assert_eq!(reach_by(&mut device, 0x2000, write), Ok(0x2000));
        assert_eq!(reach_by(&mut device, 0x2000, execute), refused);
        for access in [read, write, execute] {
            assert_eq!(reach_by(&mut device, 0x3000, access), refused);
        }
    }
    // What was granted since is seen, and what was taken away is not used.
    let protect = |prot| {
        // SAFETY: nobody else works on the domain, and there is no memory.
        unsafe { domain.protect(range(0x1000, 0x1000), prot, Gap::Accept) }.unwrap();
    };
    protect(PROT);
    assert_eq!(reach_by(&mut device, 0x1000, write), Ok(0x1000));
    protect(Prot::READ);
    assert_eq!(reach_by(&mut device, 0x1000, write), refused);
    assert_eq!(reach_by(&mut device, 0x1000, read), Ok(0x1000));
}

/// Maps a page wherever a device faults, as often as it may.
struct OnDemand {
    domain: Arc<SoftDomain>,
    left: AtomicU64,
    last: parking_lot::Mutex<Option<FaultReport>>,
}

impl FaultHandler for OnDemand {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        *self.last.lock() = Some(*report);
        if self.left.fetch_sub(1, Ordering::Relaxed) == 0 {
            return FaultResponse::Terminate;
        }
        let page = report.iova.get() & !0xfff;
        map(&self.domain, page, &[span(page & 0xffff, 0x1000)], PROT);
        FaultResponse::Retry
    }
}

#[test]
fn faults_are_reported_and_a_stalled_access_goes_on_where_it_was() {
    let (domain, iommu) = domain();
    let domain = Arc::new(domain);
    let mut device = iommu.device(42);
    let ram = Ram::new(0x1_0000);
    let last = parking_lot::Mutex::new(None);
    let handler = Arc::new(OnDemand { domain, left: AtomicU64::new(3), last });
    device.faults().set(Some(Arc::clone(&handler) as Arc<dyn FaultHandler>));
    // An access that does not stall has ended, whatever the handler says.
    assert!(device.write(&ram, Iova::new(0x70_0000), &[1]).is_err());
    device.set_faulting(FaultState::Stalled);
    let failed = device.write(&ram, Iova::new(0x70_0800), &[9; 0x3000]).unwrap_err();
    let AccessFailed::Fault(fault) = failed else { panic!("{failed:?}") };
    assert_eq!(fault.range, range(0x70_3000, 0x800));
    let report = FaultReport {
        stream: 42,
        iova: Iova::new(0x70_3000),
        access: FaultAccess::Write,
        reason: FaultReason::Translation,
        state: FaultState::Stalled,
    };
    assert_eq!(*handler.last.lock(), Some(report));
    assert_eq!(ram.0.lock().unwrap()[0x800..0x3000], [9; 0x2800]);
    assert_eq!(device.faults().reported(), 4);
}

#[test]
fn the_last_page_of_the_lower_half_is_as_any_other() {
    let (domain, iommu) = domain();
    let mut device = iommu.device(1);
    let top = (1 << 48) - 0x1000;
    map(&domain, top, &[span(0xffff_ffff_f000, 0x1000)], PROT);
    map(&domain, 0, &[span(0, 0x1000)], PROT);
    assert_eq!(reach(&mut device, top + 0xfff), Ok(0xffff_ffff_ffff));
    assert_eq!(reach(&mut device, 0), Ok(0));
    let spans: Vec<Span> =
        device.cached().iter().map(|run| span(run.paddr.get(), 0x1000)).collect();
    assert_eq!(spans, [span(0, 0x1000), span(0xffff_ffff_f000, 0x1000)]);
}
