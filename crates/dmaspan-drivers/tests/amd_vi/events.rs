//! Every record is understood or counted, and none of them does harm.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use dmaspan::Iova;
use dmaspan::iommu::{
    FaultAccess, FaultHandler, FaultReason, FaultReport, FaultResponse, FaultState, Port as _,
};
use dmaspan_drivers::Handled;
use dmaspan_sim::rng::Rng;
use parking_lot::Mutex;

use crate::fake::{EVENT_TAIL, Rig, Stream};
use crate::switching::paging;

#[derive(Default)]
struct Faults(Mutex<Vec<FaultReport>>);

impl Faults {
    fn of(stream: &Stream) -> Arc<Self> {
        let faults = Arc::new(Self::default());
        stream.port().faults().set(Some(faults.clone()));
        faults
    }
}

impl FaultHandler for Faults {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        self.0.lock().push(*report);
        FaultResponse::Terminate
    }
}

const ADDRESS: u64 = 0x12_3456_7890;
const PRESENT: u64 = 1 << 52;
const WRITE: u64 = 1 << 53;
const PERMISSION: u64 = 1 << 54;
const RESERVED: u64 = 1 << 55;
const DEVICE: u64 = 7;

fn event(code: u64, flags: u64) -> [u64; 2] {
    [code << 60 | flags | 5 << 32 | DEVICE, ADDRESS]
}

#[test]
fn each_kind_of_event_is_reported_as_what_it_is() {
    let rig = Rig::new();
    let (domain, stream) = (rig.domain(), rig.stream(7));
    let faults = Faults::of(&stream);
    stream.attach(paging(&domain)).unwrap();
    let (read, write) = (FaultAccess::Read, FaultAccess::Write);
    let cases = [
        (event(2, 0), ADDRESS, read, FaultReason::Translation),
        (event(2, WRITE), ADDRESS, write, FaultReason::Translation),
        (event(2, PRESENT | PERMISSION | WRITE), ADDRESS, write, FaultReason::Permission),
        (event(2, PRESENT | RESERVED), ADDRESS, read, FaultReason::Tables),
        (event(1, WRITE), ADDRESS, write, FaultReason::Tables),
        (event(3, 0), 0, read, FaultReason::Tables),
        (event(4, WRITE), 0, write, FaultReason::Tables),
        (event(8, 0), ADDRESS, read, FaultReason::Other(8)),
        (event(9, 0), ADDRESS, read, FaultReason::Other(9)),
        (event(13, 0), ADDRESS, read, FaultReason::Other(13)),
        (event(14, 0), ADDRESS, read, FaultReason::Other(14)),
        ([event(2, 1 << 51)[0], 0xfee0_1000], 0xfee0_1000, read, FaultReason::Other(2)),
    ];
    for (record, iova, access, reason) in cases {
        rig.fake.log(record);
        let handled = rig.iommu.handle_faults().unwrap();
        assert_eq!(handled, Handled { reported: 1, ..Handled::default() }, "{record:x?}");
        let (stream, iova, state) = (7, Iova::new(iova), FaultState::Ended);
        let expected = FaultReport { stream, iova, access, reason, state };
        assert_eq!(faults.0.lock().pop(), Some(expected), "{record:x?}");
    }
    stream.detach().unwrap();
    rig.fake.log(event(2, PRESENT | PERMISSION));
    rig.iommu.handle_faults().unwrap();
    assert_eq!(faults.0.lock().pop().unwrap().reason, FaultReason::Blocked);

    // A counter says nothing of a device.
    rig.fake.log(event(10, 0));
    assert_eq!(rig.iommu.handle_faults().unwrap(), Handled::default());
}

#[test]
fn refused_commands_are_an_error_and_start_the_buffer_again() {
    let rig = Rig::new();
    let domain = rig.domain();
    for code in [5, 6, 7] {
        rig.fake.log(event(code, 0));
        rig.fake.log(event(2, 0));
        let error = rig.iommu.handle_faults().unwrap_err();
        assert_eq!(error.status, ADDRESS);
        assert_eq!(rig.iommu.handle_faults().unwrap(), Handled::default(), "both were taken");
    }
    drop(domain);
}

#[test]
fn garbage_is_counted_and_passed_over() {
    let rig = Rig::new();
    let stream = rig.stream(7);
    let mut rng = Rng::new(48882);
    let mut counted = Handled::default();
    for _ in 0..200 {
        let length = rng.next() % 255;
        for _ in 0..length {
            // No refused commands among them, which are an error, and no counters, which count
            // nothing.
            let word = rng.next();
            let code =
                [0, 1, 2, 3, 4, 8, 9, 11, 12, 13, 14, 15][usize::try_from(word % 12).unwrap()];
            rig.fake.log([word & !(0xf << 60) | code << 60, rng.next()]);
        }
        let handled = rig.iommu.handle_faults().unwrap();
        let records = handled.reported + handled.unclaimed + handled.malformed;
        assert_eq!(u64::from(records), length);
        assert!(!handled.overflowed && !handled.more);
        counted.malformed += handled.malformed;
        counted.unclaimed += handled.unclaimed;
    }
    assert!(counted.malformed > 0 && counted.unclaimed > 0);
    drop(stream);
}

#[test]
fn an_overflow_is_acknowledged_and_events_are_logged_again() {
    let rig = Rig::new();
    let _stream = rig.stream(7);
    for _ in 0..3 {
        for _ in 0..1000 {
            rig.fake.log(event(2, 0));
        }
        let handled = rig.iommu.handle_faults().unwrap();
        assert_eq!(handled, Handled { reported: 255, overflowed: true, ..Handled::default() });
        rig.fake.log(event(2, 0));
        let handled = rig.iommu.handle_faults().unwrap();
        assert_eq!(handled, Handled { reported: 1, ..Handled::default() });
    }
}

#[test]
fn each_event_is_taken_by_one_of_those_who_look_at_once() {
    let rig = Rig::new();
    let stream = rig.stream(7);
    let faults = Faults::of(&stream);
    let logged = 20_000;
    let done = AtomicBool::new(false);
    let total = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                // Once more when all are logged.
                let mut last = false;
                while !last {
                    last = done.load(Ordering::SeqCst);
                    let handled = rig.iommu.handle_faults().unwrap();
                    assert_eq!((handled.malformed, handled.unclaimed), (0, 0));
                    total.fetch_add(handled.reported, Ordering::SeqCst);
                }
            });
        }
        for nth in 0..logged {
            while !rig.fake.has_room() {
                thread::yield_now();
            }
            rig.fake.log([2 << 60 | DEVICE, nth << 12]);
        }
        done.store(true, Ordering::SeqCst);
    });
    assert_eq!(u64::from(total.into_inner()), logged);
    let mut seen: Vec<_> = faults.0.lock().iter().map(|report| report.iova.get() >> 12).collect();
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..logged));
}

#[test]
fn a_tail_that_is_nowhere_is_an_error() {
    let rig = Rig::new();
    for tail in [256 << 4, 1 << 40, u64::MAX] {
        rig.fake.behave(|how| how.reads = [(EVENT_TAIL, tail)].into());
        rig.iommu.handle_faults().unwrap_err();
    }
    // One that always runs ahead is followed once round.
    rig.fake.behave(|how| how.reads = [(EVENT_TAIL, 255 << 4)].into());
    assert_eq!(rig.iommu.handle_faults().unwrap().malformed, 255);
    rig.fake.behave(|how| how.reads.clear());
}

#[test]
fn an_event_in_registers_is_taken_too() {
    const UPPER: u64 = 0x40;
    const LOWER: u64 = 0x48;
    const VALID: u64 = 0x50;
    let rig = Rig::new();
    let stream = rig.stream(7);
    let faults = Faults::of(&stream);
    let [word, address] = event(3, 0);
    rig.fake.poke(UPPER, word);
    rig.fake.poke(LOWER, address);
    rig.fake.poke(VALID, 0b11);
    let handled = rig.iommu.handle_faults().unwrap();
    assert_eq!(handled, Handled { reported: 1, overflowed: true, ..Handled::default() });
    assert_eq!(faults.0.lock().pop().unwrap().reason, FaultReason::Tables);
    assert!(rig.fake.take_writes().contains(&(VALID, 0b11)), "both bits are cleared by ones");
}
