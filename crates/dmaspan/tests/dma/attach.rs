//! A stream's reach: blocked, all memory, or the mappings of a domain, and the way between them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, NoPool, Piece, RawMemory};
use dmaspan::iommu::{
    AllMemory, AttachError, AttachedTo, Attachment, FaultAccess, FaultHandler, FaultReason,
    FaultReport, FaultResponse, FaultState, Incompatible, Port, Prepared, RegionKind, Relaxable,
    ReservedRegions, Target,
};
use dmaspan::platform::OneThread;
use dmaspan::{Direction, Errno, Iova, PhysAddr, Prot};
use dmaspan_sim::bus::{Bus, BusError};
use dmaspan_sim::device::DmaError;
use dmaspan_sim::memory::SimMemory;
use dmaspan_sim::port::{Failure, Passing, SimPort};
use dmaspan_sim::walker::Access;
use parking_lot::Mutex;

use crate::common::PROT;
use crate::reserved::{SimDomain, domain, map, region, regions};

type SimTarget = Target<SimDomain>;

/// Where all of these tests' domains map something.
const IOVA: u64 = 0x5000;

fn identity() -> SimTarget {
    // SAFETY: the simulated devices touch no memory that anybody else uses.
    Target::Identity(unsafe { AllMemory::promise() })
}

/// A domain that maps `IOVA` to `paddr`.
fn mapped_to(paddr: u64) -> Arc<SimDomain> {
    let (domain, _) = domain();
    map(&domain, IOVA, paddr, 0x1000, PROT);
    Arc::new(domain)
}

fn paging(domain: &Arc<SimDomain>) -> SimTarget {
    Target::Paging(Prepared::new(Arc::clone(domain)))
}

fn stream() -> (Attachment<SimPort<SimDomain>>, SimPort<SimDomain>) {
    let port = SimPort::new(3, ReservedRegions::new());
    (Attachment::new(port.clone()).unwrap(), port)
}

/// Where an access to `IOVA` arrives.
fn reached(port: &SimPort<SimDomain>) -> Option<u64> {
    port.probe(Iova::new(IOVA), Access::Read).map(PhysAddr::get)
}

#[test]
fn a_stream_is_taken_from_whoever_had_it() {
    let port = SimPort::<SimDomain>::new(3, ReservedRegions::new());
    assert_eq!(reached(&port), Some(IOVA), "firmware let it pass");
    port.fail_next(&[Failure::NotDone]);
    let refused = Attachment::new(port).unwrap_err();
    assert_eq!(reached(&refused.port), Some(IOVA));
    let stream = Attachment::new(refused.port).unwrap();
    assert_eq!(stream.attached_to(), AttachedTo::Blocked);
    assert_eq!(reached(stream.port()), None);
}

#[test]
fn every_change_leads_where_it_says_or_changes_nothing() {
    let (one, two) = (mapped_to(0x1_0000), mapped_to(0x2_0000));
    type Change<'t> = (&'t dyn Fn() -> SimTarget, AttachedTo, Option<u64>);
    let targets: [Change<'_>; 4] = [
        (&|| Target::Blocked, AttachedTo::Blocked, None),
        (&identity, AttachedTo::Identity, Some(IOVA)),
        (&|| paging(&one), AttachedTo::Paging, Some(0x1_0000)),
        (&|| paging(&two), AttachedTo::Paging, Some(0x2_0000)),
    ];
    for (from, was, before) in &targets {
        for (to, is, after) in &targets {
            let (stream, port) = stream();
            stream.attach(from()).unwrap();
            assert_eq!((stream.attached_to(), reached(&port)), (*was, *before));
            match stream.attach(to()) {
                Ok(()) => {
                    assert_eq!(*was, AttachedTo::Blocked);
                    assert_eq!((stream.attached_to(), reached(&port)), (*is, *after));
                }
                Err(error) => {
                    assert_eq!(error, AttachError::Attached { to: *was });
                    assert_eq!(error.errno(), Errno::EBUSY);
                    assert_eq!((stream.attached_to(), reached(&port)), (*was, *before));
                }
            }
            stream.replace(to()).unwrap();
            assert_eq!((stream.attached_to(), reached(&port)), (*is, *after));
            stream.detach().unwrap();
            assert_eq!((stream.attached_to(), reached(&port)), (AttachedTo::Blocked, None));
            stream.detach().unwrap();
        }
    }
    assert_eq!((Arc::strong_count(&one), Arc::strong_count(&two)), (1, 1));
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_changes() {
    let (stream, port) = stream();
    let (one, two) = (mapped_to(0x1_0000), mapped_to(0x2_0000));
    port.set_passing(Passing::Unsupported);
    assert_eq!(stream.attach(identity()), Err(AttachError::NoIdentity));
    assert_eq!((stream.attached_to(), reached(&port)), (AttachedTo::Blocked, None));
    stream.attach(paging(&one)).unwrap();
    assert_eq!(stream.replace(identity()), Err(AttachError::NoIdentity));
    assert_eq!(AttachError::NoIdentity.errno(), Errno::EOPNOTSUPP);
    assert_eq!((stream.attached_to(), reached(&port)), (AttachedTo::Paging, Some(0x1_0000)));

    let what = Incompatible { what: "another IOMMU's" };
    port.set_refused(Some(what));
    let error = stream.replace(paging(&two)).unwrap_err();
    assert_eq!((error, error.errno()), (AttachError::Incompatible(what), Errno::EINVAL));
    assert_eq!((reached(&port), Arc::strong_count(&two)), (Some(0x1_0000), 1));
    stream.detach().unwrap();
    assert_eq!(stream.attach(paging(&two)), Err(error));
    assert_eq!((reached(&port), Arc::strong_count(&two)), (None, 1));
}

#[test]
fn a_domain_lives_while_a_stream_is_attached_to_it() {
    let (stream, port) = stream();
    let (one, two) = (mapped_to(0x1_0000), mapped_to(0x2_0000));
    let (weak_one, weak_two) = (Arc::downgrade(&one), Arc::downgrade(&two));
    let tables = one.memory().clone();
    stream.attach(paging(&one)).unwrap();
    assert!(Arc::ptr_eq(&stream.domain().unwrap(), &one));
    drop(one);
    assert_eq!(reached(&port), Some(0x1_0000));
    stream.replace(paging(&two)).unwrap();
    assert!(weak_one.upgrade().is_none(), "nothing uses the old one any more");
    assert_eq!(tables.tables(), 0);
    drop(two);
    drop(stream);
    assert!(weak_two.upgrade().is_none());
    assert_eq!(reached(&port), None, "a dropped attachment blocks");
}

#[test]
fn a_stream_that_cannot_be_blocked_keeps_its_domain_for_ever() {
    for failure in [Failure::NotDone, Failure::Unseen] {
        let (stream, port) = stream();
        let one = mapped_to(0x1_0000);
        let (weak, tables) = (Arc::downgrade(&one), one.memory().clone());
        stream.attach(paging(&one)).unwrap();
        drop(one);
        port.fail_next(&[failure]);
        drop(stream);
        assert!(weak.upgrade().is_some());
        assert!(tables.tables() > 0);
    }
}

#[test]
fn hardware_that_refuses_leaves_what_it_says() {
    use Failure::{NotDone, Unseen};
    let lists: [(&[Failure], AttachedTo); 8] = [
        (&[NotDone], AttachedTo::Paging),
        (&[Unseen], AttachedTo::Paging),
        (&[NotDone, NotDone], AttachedTo::Blocked),
        (&[Unseen, NotDone], AttachedTo::Blocked),
        (&[NotDone, Unseen], AttachedTo::Blocked),
        (&[NotDone, NotDone, NotDone], AttachedTo::Unknown),
        (&[Unseen, NotDone, NotDone], AttachedTo::Unknown),
        (&[Unseen, Unseen, Unseen], AttachedTo::Unknown),
    ];
    for (failures, expected) in lists {
        let (stream, port) = stream();
        let (one, two) = (mapped_to(0x1_0000), mapped_to(0x2_0000));
        let (weak_one, weak_two) = (Arc::downgrade(&one), Arc::downgrade(&two));
        stream.attach(paging(&one)).unwrap();
        port.fail_next(failures);
        let error = stream.replace(paging(&two)).unwrap_err();
        drop((one, two));
        assert!(matches!(error, AttachError::Hardware { left, .. } if left == expected), "{error}");
        assert_eq!((stream.attached_to(), error.errno()), (expected, Errno::EIO));
        let alive = (weak_one.upgrade().is_some(), weak_two.upgrade().is_some());
        match expected {
            AttachedTo::Paging => {
                assert_eq!((reached(&port), alive), (Some(0x1_0000), (true, false)));
            }
            AttachedTo::Blocked => assert_eq!((reached(&port), alive), (None, (false, false))),
            _ => {
                assert_eq!(alive, (true, true), "hardware may use either");
                assert!(stream.domain().is_none());
                assert_eq!(stream.attach(identity()), Err(AttachError::Unknown));
                assert_eq!(stream.replace(identity()), Err(AttachError::Unknown));
                port.fail_next(&[NotDone]);
                let left = AttachedTo::Unknown;
                let error = stream.detach().unwrap_err();
                assert!(matches!(error, AttachError::Hardware { left: l, .. } if l == left));
                assert!(weak_one.upgrade().is_some() && weak_two.upgrade().is_some());
                stream.detach().unwrap();
                assert!(weak_one.upgrade().is_none() && weak_two.upgrade().is_none());
                assert_eq!((stream.attached_to(), reached(&port)), (AttachedTo::Blocked, None));
                stream.attach(identity()).unwrap();
            }
        }
    }
}

#[test]
fn a_detach_that_hardware_refuses_leaves_the_stream_attached() {
    let (stream, port) = stream();
    let one = mapped_to(0x1_0000);
    stream.attach(paging(&one)).unwrap();
    port.fail_next(&[Failure::Unseen]);
    let error = stream.detach().unwrap_err();
    assert!(matches!(error, AttachError::Hardware { left: AttachedTo::Paging, .. }));
    assert_eq!(reached(&port), Some(0x1_0000));
    stream.detach().unwrap();
    assert_eq!((reached(&port), Arc::strong_count(&one)), (None, 1));
}

#[test]
fn a_domain_without_the_direct_regions_of_a_stream_is_refused() {
    let direct = region(RegionKind::Direct, 0x8800, 0x1000, Prot::READ_WRITE);
    let relaxable = region(RegionKind::DirectRelaxable, 0xf000, 0x1000, Prot::READ);
    let msi = region(RegionKind::Msi, 0xfee0_0000, 0x10_0000, Prot::WRITE);
    let port = SimPort::new(3, regions(&[direct, relaxable, msi]));
    let stream = Attachment::new(port.clone()).unwrap();
    // SAFETY: the test alone uses the domains, and its device touches no memory.
    let prepared = |list: &[_], relaxable| unsafe {
        Prepared::with_direct(mapped_to(0x1_0000), regions(list), relaxable).unwrap()
    };
    let lacks = |target, missing| {
        let error = stream.attach(Target::Paging(target)).unwrap_err();
        assert_eq!(error, AttachError::Direct { region: missing });
        assert_eq!((error.errno(), reached(&port)), (Errno::EINVAL, None));
        error
    };
    let error = lacks(Prepared::new(mapped_to(0x1_0000)), direct);
    assert!(error.to_string().contains("0x8800..=0x97ff"), "{error}");
    lacks(prepared(&[direct], Relaxable::Keep), relaxable);
    lacks(prepared(&[relaxable], Relaxable::Keep), direct);
    let read_only = region(RegionKind::Direct, 0x8000, 0x2000, Prot::READ);
    lacks(prepared(&[read_only, relaxable], Relaxable::Keep), direct);
    let half = region(RegionKind::Direct, 0x8000, 0x1000, Prot::READ_WRITE);
    lacks(prepared(&[half, relaxable], Relaxable::Keep), direct);

    for (list, relax, relaxed) in [
        (&[direct, relaxable][..], Relaxable::Keep, Some(0xf000)),
        (&[direct, relaxable], Relaxable::Drop, None),
        (&[direct], Relaxable::Drop, None),
    ] {
        stream.attach(Target::Paging(prepared(list, relax))).unwrap();
        let at = |iova| port.probe(Iova::new(iova), Access::Write).map(PhysAddr::get);
        assert_eq!(at(0x9123), Some(0x9123));
        let read = port.probe(Iova::new(0xf000), Access::Read).map(PhysAddr::get);
        assert_eq!(read, relaxed);
        stream.detach().unwrap();
    }
    // All memory has them.
    stream.attach(identity()).unwrap();
}

#[test]
fn buffers_of_an_attached_device_keep_clear_of_its_regions() {
    let memory = SimMemory::new(PhysAddr::new(0), 0x1_0000, 12).unwrap();
    let direct = region(RegionKind::Direct, 0x1000, 0x2000, Prot::READ_WRITE);
    let list = regions(&[direct, region(RegionKind::Reserved, 0x4000, 0x1000, Prot::empty())]);
    let dma = Arc::new(DmaDomain::new(domain().0, DmaConfig::new(1), OneThread).unwrap());
    list.reserve_in(dma.iovas(), Relaxable::Keep).unwrap();
    let port = SimPort::new(9, list.clone());
    let stream = Attachment::new(port.clone()).unwrap();
    // SAFETY: the test alone uses the domain and the simulated memory.
    let prepared = unsafe { Prepared::with_direct(Arc::clone(&dma), list, Relaxable::Keep) };
    stream.attach(Target::Paging(prepared.unwrap())).unwrap();

    let frame = memory.allocate(0x2000, 12).unwrap();
    memory.pin_frames(&[frame]);
    memory.cpu_write(frame.paddr(), b"hello").unwrap();
    let device = Device::new(dma, NoPool, DeviceConfig::bits(15)).unwrap();
    // SAFETY: only the simulated device touches it.
    let buffer = unsafe { RawMemory::new(Piece::memory(frame)) };
    let mapping = device.map_single(buffer, Direction::ToDevice).unwrap();
    assert_eq!(mapping.addr().get(), 0x6000, "the only aligned IOVAs that no region has");
    let mut bytes = [0; 5];
    let at = Iova::new(mapping.addr().get());
    port.read(&memory, at, &mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    let _ = device.unmap(mapping).unwrap();
    assert_eq!(port.probe(at, Access::Read), None);
    assert_eq!(port.probe(Iova::new(0x2fff), Access::Write), Some(PhysAddr::new(0x2fff)));
}

/// Two frames that say which they are, and domains that map `IOVA` to one each.
fn two_frames() -> (Arc<SimMemory>, [Arc<SimDomain>; 2]) {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(0x10_0000), 0x4000, 12).unwrap());
    let domains = [1u8, 2].map(|n| {
        let frame = memory.allocate(0x1000, 12).unwrap();
        memory.pin_frames(&[frame]);
        memory.cpu_write(frame.paddr(), &[n; 8]).unwrap();
        mapped_to(frame.paddr().get())
    });
    (memory, domains)
}

#[test]
fn a_device_sees_one_domain_or_the_other_while_they_are_replaced() {
    let (memory, [one, two]) = two_frames();
    let (stream, port) = stream();
    stream.attach(paging(&one)).unwrap();
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let hammer = || {
            while !stop.load(Ordering::Relaxed) {
                let mut bytes = [0; 8];
                port.read(&memory, Iova::new(IOVA), &mut bytes).unwrap();
                assert!(bytes == [1; 8] || bytes == [2; 8], "{bytes:?}");
                reads.fetch_add(1, Ordering::Relaxed);
            }
        };
        scope.spawn(hammer);
        for round in 0..400 {
            let (domain, n) = if round % 2 == 0 { (&two, 2) } else { (&one, 1) };
            stream.replace(paging(domain)).unwrap();
            let mut bytes = [0; 8];
            port.read(&memory, Iova::new(IOVA), &mut bytes).unwrap();
            assert_eq!(bytes, [n; 8], "nothing of the old one is seen any more");
            let seen = reads.load(Ordering::Relaxed);
            while reads.load(Ordering::Relaxed) == seen && round < 10 {
                thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(port.faults().reported(), 0);
    assert!(memory.violations().is_empty());
}

/// A bus on which an access takes until it is told to end.
struct Slow {
    began: mpsc::Sender<()>,
    end: Mutex<mpsc::Receiver<()>>,
}

impl Bus for Slow {
    fn read(&self, _paddr: PhysAddr, _buf: &mut [u8]) -> Result<(), BusError> {
        self.began.send(()).unwrap();
        self.end.lock().recv().unwrap();
        Ok(())
    }

    fn write(&self, paddr: PhysAddr, _buf: &[u8]) -> Result<(), BusError> {
        Err(BusError::Nobody { paddr })
    }
}

#[test]
fn a_detach_and_a_drop_wait_for_what_is_in_flight() {
    for how in ["detach", "replace", "drop"] {
        let (stream, port) = stream();
        stream.attach(paging(&mapped_to(0x1_0000))).unwrap();
        let ((began, begun), (end, ending)) = (mpsc::channel(), mpsc::channel());
        let slow = Slow { began, end: Mutex::new(ending) };
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let reader = scope.spawn(|| port.read(&slow, Iova::new(IOVA), &mut [0; 8]));
            begun.recv().unwrap();
            scope.spawn(|| {
                match how {
                    "detach" => stream.detach().unwrap(),
                    "replace" => stream.replace(identity()).unwrap(),
                    _ => drop(stream),
                }
                done.store(true, Ordering::Release);
            });
            thread::sleep(Duration::from_millis(20));
            assert!(!done.load(Ordering::Acquire), "{how} waits for the access");
            end.send(()).unwrap();
            reader.join().unwrap().unwrap();
        });
        assert!(done.load(Ordering::Acquire));
    }
}

/// Writes down what it hears, and answers.
struct Listener {
    heard: Mutex<Vec<FaultReport>>,
    answer: fn(usize) -> FaultResponse,
}

impl FaultHandler for Listener {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        let mut heard = self.heard.lock();
        heard.push(*report);
        (self.answer)(heard.len())
    }
}

fn listener(answer: fn(usize) -> FaultResponse) -> Arc<Listener> {
    Arc::new(Listener { heard: Mutex::default(), answer })
}

#[test]
fn a_handler_hears_exactly_which_accesses_were_refused() {
    let (stream, port) = stream();
    let memory = SimMemory::new(PhysAddr::new(0x10_0000), 0x1000, 12).unwrap();
    let read = |at| port.read(&memory, Iova::new(at), &mut [0; 4]);
    assert!(matches!(read(0x10), Err(DmaError::Fault { done: 0, .. })));
    assert_eq!((port.faults().reported(), port.faults().unhandled()), (1, 1));

    // To retry an access that has ended is nobody's choice.
    let ours = listener(|_| FaultResponse::Retry);
    assert!(port.faults().set(Some(ours.clone())).is_none());
    assert!(read(0x10).is_err());
    let (domain, _) = domain();
    let frame = memory.allocate(0x1000, 12).unwrap();
    memory.pin_frames(&[frame]);
    map(&domain, 0x5000, frame.paddr().get(), 0x1000, Prot::READ | Prot::CACHE);
    stream.attach(paging(&Arc::new(domain))).unwrap();
    // The first four bytes are there, the rest is not.
    let error = port.read(&memory, Iova::new(0x5ffc), &mut [0; 8]).unwrap_err();
    assert!(matches!(error, DmaError::Fault { done: 4, .. }));
    assert!(port.write(&memory, Iova::new(0x5008), &[0; 4]).is_err());
    let report = |iova, access, reason| FaultReport {
        stream: 3,
        iova: Iova::new(iova),
        access,
        reason,
        state: FaultState::Ended,
    };
    let expected = [
        report(0x10, FaultAccess::Read, FaultReason::Blocked),
        report(0x6000, FaultAccess::Read, FaultReason::Translation),
        report(0x5008, FaultAccess::Write, FaultReason::Permission),
    ];
    assert_eq!(*ours.heard.lock(), expected);
    assert_eq!((port.faults().reported(), port.faults().unhandled()), (4, 1));
    assert!(port.faults().set(None).is_some());
    assert!(read(0x10).is_err());
    assert_eq!((ours.heard.lock().len(), port.faults().unhandled()), (3, 2));
}

#[test]
fn a_stalled_access_is_tried_again_for_as_long_as_the_handler_says() {
    let (_stream, port) = stream();
    let memory = SimMemory::new(PhysAddr::new(0x10_0000), 0x1000, 12).unwrap();
    port.set_faulting(FaultState::Stalled);
    let ours = listener(|calls| match calls {
        ..3 => FaultResponse::Retry,
        _ => FaultResponse::Terminate,
    });
    port.faults().set(Some(ours.clone()));
    assert!(port.read(&memory, Iova::new(0x10), &mut [0; 4]).is_err());
    assert_eq!(ours.heard.lock().len(), 3);
    assert!(ours.heard.lock().iter().all(|report| report.state == FaultState::Stalled));
}

#[test]
fn threads_that_attach_and_detach_one_stream_take_turns() {
    let (stream, port) = stream();
    let domains = [mapped_to(0x1_0000), mapped_to(0x2_0000)];
    let attached = AtomicU64::new(0);
    thread::scope(|scope| {
        for domain in &domains {
            scope.spawn(|| {
                for _ in 0..500 {
                    match stream.attach(paging(domain)) {
                        Ok(()) => {
                            assert_eq!(attached.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
                            assert!(Arc::ptr_eq(&stream.domain().unwrap(), domain));
                            attached.fetch_sub(1, Ordering::SeqCst);
                            stream.detach().unwrap();
                        }
                        Err(error) => assert!(matches!(error, AttachError::Attached { .. })),
                    }
                }
            });
        }
    });
    assert_eq!((stream.attached_to(), reached(&port)), (AttachedTo::Blocked, None));
    assert!(domains.iter().all(|domain| Arc::strong_count(domain) == 1));
}
