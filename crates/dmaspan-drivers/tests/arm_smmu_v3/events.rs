//! The driver reports events, true and false ones.

use std::sync::Arc;

use dmaspan::Iova;
use dmaspan::iommu::{
    FaultAccess, FaultHandler, FaultReason, FaultReport, FaultResponse, FaultState, Port as _,
};
use dmaspan_drivers::Handled;
use dmaspan_drivers::arm_smmu_v3::{OnFault, SmmuV3Config, Stage, StallModel};
use dmaspan_sim::rng::Rng;
use parking_lot::Mutex;

use crate::hardware::{EVENTQ_CONS, EVENTQ_PROD, Mode, Model};
use crate::setup::{Port1, Rig, S1};

/// Keeps what it hears of and lets writes be tried again.
#[derive(Default)]
struct Listener(Mutex<Vec<FaultReport>>);

impl FaultHandler for Listener {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        self.0.lock().push(*report);
        match report.access {
            FaultAccess::Write => FaultResponse::Retry,
            _ => FaultResponse::Terminate,
        }
    }
}

fn listening(rig: &Rig, id: u32) -> (Port1<S1>, Arc<Listener>) {
    let (port, listener) = (rig.port::<S1>(id), Arc::<Listener>::default());
    port.faults().set(Some(Arc::clone(&listener) as Arc<dyn FaultHandler>));
    (port, listener)
}

const RNW: u64 = 1 << 35;
const IND: u64 = 1 << 34;
const STALL: u64 = 1 << 31;

#[test]
fn every_event_of_the_manual_is_reported_with_its_reason() {
    let rig = Rig::new(Model::LARGE);
    let (_port, listener) = listening(&rig, 5);
    let other = FaultReason::Other;
    let (some, none) = (0x1234_5678, 0);
    let cases = [
        (0x01, other(0x01), some),
        (0x02, FaultReason::Blocked, none),
        (0x03, FaultReason::Tables, none),
        (0x04, FaultReason::Tables, none),
        (0x05, other(0x05), none),
        (0x06, FaultReason::Blocked, none),
        (0x07, other(0x07), some),
        (0x08, other(0x08), none),
        (0x09, FaultReason::Tables, none),
        (0x0a, FaultReason::Tables, none),
        (0x0b, FaultReason::Tables, some),
        (0x10, FaultReason::Translation, some),
        (0x11, FaultReason::Tables, some),
        (0x12, FaultReason::Tables, some),
        (0x13, FaultReason::Permission, some),
        (0x20, other(0x20), some),
        (0x21, other(0x21), none),
        (0x25, other(0x25), none),
    ];
    for (number, reason, iova) in cases {
        assert!(rig.hardware.record([5 << 32 | number, RNW, 0x1234_5678, 0]));
        let handled = rig.smmu.handle_faults().unwrap();
        assert_eq!(handled, Handled { reported: 1, ..Default::default() }, "{number:#x}");
        let (access, state) = (FaultAccess::Read, FaultState::Ended);
        let report = FaultReport { stream: 5, iova: Iova::new(iova), access, reason, state };
        assert_eq!(std::mem::take(&mut *listener.0.lock()), [report]);
    }
    // An input that is too large is not mapped.
    rig.hardware.record([5 << 32 | 0x11, RNW | IND, 1 << 50, 0]);
    rig.smmu.handle_faults().unwrap();
    let [report] = listener.0.lock()[..] else { panic!() };
    assert_eq!(
        (report.iova.get(), report.access, report.reason),
        (1 << 50, FaultAccess::Execute, FaultReason::Translation)
    );
}

#[test]
fn garbage_in_the_queue_is_counted_and_passed_over() {
    let rig = Rig::new(Model::LARGE);
    let mut rng = Rng::new(7);
    for _ in 0..200 {
        let count = rng.below(128) + 1;
        for _ in 0..count {
            assert!(rig.hardware.record([(); 4].map(|()| rng.next())));
        }
        let handled = rig.smmu.handle_faults().unwrap();
        assert_eq!(u64::from(handled.unclaimed + handled.malformed), count);
        assert_eq!(handled.reported, 0);
    }
    // Indices that are none.
    for _ in 0..200 {
        rig.hardware.set_register(EVENTQ_PROD, rng.next() & 0x7fff_ffff);
        let handled = rig.smmu.handle_faults().unwrap();
        assert!(handled.unclaimed + handled.malformed <= 128);
    }
    let producer = rig.hardware.register(EVENTQ_CONS);
    rig.hardware.set_register(EVENTQ_PROD, producer);
    rig.hardware.record([5 << 32 | 0x10, 0, 0, 0]);
    assert_eq!(rig.smmu.handle_faults().unwrap().unclaimed, 1);
}

#[test]
fn an_overflow_is_told_and_acknowledged_each_time() {
    let rig = Rig::with(Model::LARGE, SmmuV3Config { lg2_events: 2, ..Default::default() });
    for _ in 0..5 {
        for n in 0..6 {
            assert_eq!(rig.hardware.record([5 << 32 | 0x10, 0, n << 12, 0]), n < 4);
        }
        let handled = rig.smmu.handle_faults().unwrap();
        assert_eq!((handled.unclaimed, handled.overflowed), (4, true));
        assert_eq!(rig.smmu.handle_faults().unwrap(), Handled::default());
        // OVFLG and OVACKFLG are the same.
        assert_eq!(rig.hardware.register(EVENTQ_PROD), rig.hardware.register(EVENTQ_CONS));
    }
    // A record that could not be written is lost as well: EVENTQ_ABT_ERR.
    rig.hardware.raise(1 << 2);
    assert!(rig.smmu.handle_faults().unwrap().overflowed);
    assert_eq!(rig.hardware.active(), 0);
    assert_eq!(rig.smmu.handle_faults().unwrap(), Handled::default());
}

#[test]
fn stalled_accesses_are_answered_as_the_handler_says() {
    let rig = Rig::new(Model::SMALL);
    assert_eq!(rig.smmu.features().stalls, StallModel::Both);
    let (port, listener) = listening(&rig, 5);
    rig.hardware.record([5 << 32 | 0x10, STALL | 0x1234, 0x1000, 0]);
    rig.hardware.record([5 << 32 | 0x13, STALL | RNW | 0xffff, 0x2000, 0]);
    // Of nobody: it ends.
    rig.hardware.record([6 << 32 | 0x10, STALL | 7, 0x3000, 0]);
    // Not stalled, whatever its bits: it has none.
    rig.hardware.record([6 << 32 | 0x04, STALL | 7, 0x3000, 0]);
    let handled = rig.smmu.handle_faults().unwrap();
    assert_eq!((handled.reported, handled.unclaimed), (2, 2));
    assert!(listener.0.lock().iter().all(|report| report.state == FaultState::Stalled));
    port.block().unwrap();
    let commands = rig.hardware.take();
    // CMD_RESUME with Ac or Ab and the tag; CMD_STALL_TERM when the stream is blocked.
    assert_eq!(
        commands,
        [
            [5 << 32 | 1 << 12 | 0x44, 0x1234],
            [5 << 32 | 1 << 13 | 0x44, 0xffff],
            [6 << 32 | 1 << 13 | 0x44, 7],
            [5 << 32 | 0x03, 0],
            [5 << 32 | 0x45, 0],
        ]
    );
    // A queue that stays full is an error, not a hang.
    rig.hardware.set(Mode::Stuck);
    for _ in 0..8 {
        for _ in 0..16 {
            rig.hardware.record([5 << 32 | 0x10, STALL, 0, 0]);
        }
        let _ = rig.smmu.handle_faults();
    }
    rig.hardware.record([5 << 32 | 0x10, STALL, 0, 0]);
    rig.smmu.handle_faults().unwrap_err();
}

#[test]
fn a_full_queue_is_waited_for_once_however_many_accesses_are_stalled() {
    let rig = Rig::new(Model { idr1: 6 | 7 << 16 | 4 << 21, ..Model::SMALL });
    let (_port, listener) = listening(&rig, 5);
    rig.hardware.set(Mode::Stuck);
    for n in 0..100 {
        assert!(rig.hardware.record([5 << 32 | 0x10, STALL | n, n << 12, 0]));
    }
    rig.memory.polls();
    rig.smmu.handle_faults().unwrap_err();
    assert!(rig.memory.polls() <= 100);
    // What was left in the queue is reported once there is room again.
    let heard = listener.0.lock().len();
    rig.hardware.set(Mode::Well);
    let handled = rig.smmu.handle_faults().unwrap();
    assert_eq!(handled.reported as usize + heard, 100);
    assert!(!handled.more && !handled.overflowed);
}

#[test]
fn a_queue_that_stopped_before_an_answer_goes_on() {
    let rig = Rig::new(Model::SMALL);
    let (_port, _listener) = listening(&rig, 5);
    rig.hardware.set(Mode::Unreadable);
    rig.hardware.record([5 << 32 | 0x10, STALL | 7, 0x1000, 0]);
    rig.smmu.handle_faults().unwrap();
    assert_eq!(rig.hardware.active(), 1);
    rig.hardware.set(Mode::Well);
    // Also beside other errors, of which those that are not the queue's are acknowledged.
    rig.hardware.raise(1 << 2 | 1 << 4 | 1 << 7);
    assert!(rig.smmu.handle_faults().unwrap().overflowed);
    assert_eq!(rig.hardware.active(), 0);
    assert_eq!(rig.hardware.take(), [[5 << 32 | 1 << 12 | 0x44, 7]]);
}

#[test]
fn hardware_that_does_not_stall_is_never_answered() {
    let rig = Rig::new(Model::LARGE);
    let (_port, listener) = listening(&rig, 5);
    rig.hardware.record([5 << 32 | 0x10, STALL | 1, 0x1000, 0]);
    rig.smmu.handle_faults().unwrap();
    assert_eq!(listener.0.lock()[0].state, FaultState::Ended);
    assert_eq!(rig.hardware.take(), [[0; 2]; 0]);
}

#[test]
fn a_domain_says_whether_its_accesses_stall() {
    // S of a context descriptor, by the model and what is asked for.
    let stalls = |model: Model, on_fault: OnFault| {
        let rig = Rig::new(model);
        let ops = rig.smmu.ops(Stage::First, on_fault).ok()?;
        let table = rig.table(S1::new(rig.smmu.stage1_config(12).unwrap()).unwrap());
        let domain = dmaspan::iommu::Domain::new(table, ops).unwrap();
        rig.port::<S1>(1).translate(&domain).unwrap();
        let descriptor = rig.entry(1).unwrap()[0] & 0xf_ffff_ffff_ffc0;
        Some(rig.memory.read(descriptor).unwrap() >> 44 & 1)
    };
    let forced = Model { idr0: Model::SMALL.idr0 | 0b10 << 24, ..Model::SMALL };
    assert_eq!(stalls(Model::SMALL, OnFault::Terminate), Some(0));
    assert_eq!(stalls(Model::SMALL, OnFault::Stall), Some(1));
    assert_eq!(stalls(forced, OnFault::Terminate), Some(1));
    assert_eq!(stalls(Model::LARGE, OnFault::Stall), None);
}
