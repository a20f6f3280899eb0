//! The fault queue: what records say, and records that say nothing.

use std::sync::Arc;

use dmaspan::Iova;
use dmaspan::iommu::{
    FaultAccess, FaultHandler, FaultReason, FaultReport, FaultResponse, FaultState, Port as _,
};
use dmaspan_drivers::Handled;
use dmaspan_drivers::riscv::RiscvIommuConfig;
use dmaspan_sim::rng::Rng;
use parking_lot::Mutex;

use crate::hardware::{BASE_FORMAT, Fake, Fault, Stream, stream};

#[derive(Default)]
struct Heard(Mutex<Vec<FaultReport>>);

impl FaultHandler for Heard {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        self.0.lock().push(*report);
        FaultResponse::Retry
    }
}

fn heard(stream: &Stream) -> Arc<Heard> {
    let heard = Arc::new(Heard::default());
    stream.faults().set(Some(Arc::clone(&heard) as Arc<dyn FaultHandler>));
    heard
}

fn record(cause: u64, transaction: u64, device: u64, iotval: u64) -> [u64; 4] {
    // A process and a privilege, of which nothing is said.
    [cause | 0xfffff << 12 | 3 << 32 | transaction << 34 | device << 40, 0, iotval, 7]
}

#[test]
fn each_cause_of_the_manual_is_told_apart() {
    use FaultAccess::{Execute, Read, Write};
    use FaultReason::{Blocked, Other, Tables, Translation};
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    let stream = stream(&iommu, 0xabcd);
    let heard = heard(&stream);
    // By a transaction that reads.
    let known = [
        (1, Execute, Tables),
        (4, Read, Other(4)),
        (5, Read, Tables),
        (6, Write, Other(6)),
        (7, Write, Tables),
        (12, Execute, Translation),
        (13, Read, Translation),
        (15, Write, Translation),
        (20, Execute, Translation),
        (21, Read, Translation),
        (23, Write, Translation),
        (256, Read, Blocked),
        (257, Read, Tables),
        (258, Read, Blocked),
        (259, Read, Tables),
        (260, Read, Other(260)),
        (261, Read, Other(261)),
        (262, Read, Other(262)),
        (263, Read, Other(263)),
        (264, Read, Other(264)),
        (265, Read, Tables),
        (266, Read, Tables),
        (267, Read, Tables),
        (268, Read, Tables),
        (269, Read, Tables),
        (270, Read, Other(270)),
        (271, Read, Other(271)),
        (272, Read, Other(272)),
        (273, Read, Other(273)),
        (274, Read, Tables),
        (2048, Read, Other(2048)),
        (4095, Read, Other(4095)),
    ];
    for cause in 0..4096 {
        fake.record(record(cause, 2, 0xabcd, 0xffff_8000_1234_5678));
        let handled = iommu.handle_faults().unwrap();
        let found = known.iter().find(|(known, ..)| *known == cause);
        let expected = found.map(|&(_, access, reason)| FaultReport {
            stream: 0xabcd,
            iova: Iova::new(0xffff_8000_1234_5678),
            access,
            reason,
            state: FaultState::Ended,
        });
        let custom = (2048..4096).contains(&cause);
        if expected.is_some() || !custom {
            assert_eq!(heard.0.lock().pop(), expected, "{cause}");
        }
        let known = u32::from(expected.is_some() || custom);
        assert_eq!((handled.reported, handled.malformed), (known, 1 - known), "{cause}");
    }
}

#[test]
fn each_transaction_of_the_manual_is_told_apart() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    let stream = stream(&iommu, 3);
    let heard = heard(&stream);
    let known = [
        (FaultAccess::Execute, [1, 5, 1]),
        (FaultAccess::Read, [2, 6, 8]),
        (FaultAccess::Write, [3, 7, 9]),
    ];
    for transaction in 0..64 {
        fake.record(record(258, transaction, 3, 0));
        let handled = iommu.handle_faults().unwrap();
        let access = known.iter().find(|(_, of)| of.contains(&transaction)).map(|known| known.0);
        assert_eq!(heard.0.lock().pop().map(|fault| fault.access), access, "{transaction}");
        let counts = (handled.reported, handled.unclaimed, handled.malformed);
        let expected = match (access, transaction) {
            (Some(_), _) => (1, 0, 0),
            // No access caused it.
            (None, 0) => (0, 1, 0),
            (None, _) => (0, 0, 1),
        };
        assert_eq!(counts, expected, "{transaction}");
    }
}

#[test]
fn garbage_is_counted_and_never_more_than_a_queue_at_once() {
    let fake = Fake::new(BASE_FORMAT);
    let config = RiscvIommuConfig { faults_lg2: 4, ..Default::default() };
    let iommu = fake.start(config).unwrap();
    let stream = stream(&iommu, 0);
    let mut rng = Rng::new(1);
    let mut seen = Handled::default();
    for _ in 0..1000 {
        for _ in 0..=rng.below(15) {
            fake.record([(); 4].map(|()| rng.next()));
        }
        let handled = iommu.handle_faults().unwrap();
        assert!(!handled.more);
        seen.malformed += handled.malformed;
        seen.unclaimed += handled.unclaimed;
        seen.reported += handled.reported;
    }
    assert!(seen.malformed > 1000 && seen.reported == 0, "{seen:?}");
    drop(stream);
}

#[test]
fn an_overflow_is_told_once_and_recording_goes_on() {
    let fake = Fake::new(BASE_FORMAT);
    let config = RiscvIommuConfig { faults_lg2: 1, ..Default::default() };
    let iommu = fake.start(config).unwrap();
    for _ in 0..3 {
        (0..5).for_each(|_| fake.record(record(13, 2, 1, 0)));
        let expected = Handled { unclaimed: 1, overflowed: true, ..Default::default() };
        assert_eq!(iommu.handle_faults(), Ok(expected));
        fake.record(record(13, 2, 1, 0));
        let expected = Handled { unclaimed: 1, ..Default::default() };
        assert_eq!(iommu.handle_faults(), Ok(expected));
        assert_eq!(iommu.handle_faults(), Ok(Handled::default()));
    }
    // The memory of the queue could not be written.
    fake.state.lock().csr[1] |= 1 << 8;
    assert!(iommu.handle_faults().unwrap_err().what.contains("could not write"));
    assert_eq!(iommu.handle_faults(), Ok(Handled::default()));
}

#[test]
fn the_interrupt_is_acknowledged_and_a_queue_that_changes_is_not_written() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    fake.state.lock().ipsr = 0b1111;
    iommu.handle_faults().unwrap();
    assert_eq!(fake.state.lock().ipsr, 0b1101, "of the fault queue alone");
    // Overflowed, on and busy: the hardware asserts that it is left alone.
    fake.state.lock().csr[1] |= 1 << 9 | 1 << 17;
    assert!(iommu.handle_faults().unwrap().overflowed);
    fake.state.lock().csr[1] &= !(1 << 17);
    assert!(iommu.handle_faults().unwrap().overflowed);
    assert!(!iommu.handle_faults().unwrap().overflowed);
}

/// A device that causes a fault for each that is reported.
struct Storm(Fake);

impl FaultHandler for Storm {
    fn fault(&self, _: &FaultReport) -> FaultResponse {
        self.0.record(record(13, 2, 1, 0));
        FaultResponse::Terminate
    }
}

#[test]
fn a_storm_of_faults_ends_with_a_queue_of_them() {
    let fake = Fake::new(BASE_FORMAT);
    let config = RiscvIommuConfig { faults_lg2: 6, ..Default::default() };
    let iommu = fake.start(config).unwrap();
    let stream = stream(&iommu, 1);
    stream.faults().set(Some(Arc::new(Storm(fake.clone()))));
    for _ in 0..5 {
        fake.record(record(13, 2, 1, 0));
        let handled = iommu.handle_faults().unwrap();
        assert!(handled.reported <= 64, "{handled:?}");
        assert!(handled.more || handled.overflowed);
    }
}

#[test]
fn registers_that_make_no_sense_are_errors() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    let gone = "the IOMMU is gone: its registers read as all ones";
    let outside = "fqt points outside of the fault queue";
    let cases = [
        (Fault::Reads(52, 128), outside),
        (Fault::Reads(52, u32::MAX - 1), outside),
        (Fault::Reads(52, u32::MAX), gone),
        (Fault::Reads(76, u32::MAX), gone),
        (Fault::Reads(76, 0), "the fault queue is off"),
        (Fault::Gone, gone),
    ];
    for (fault, what) in cases {
        fake.set(fault);
        assert_eq!(iommu.handle_faults().unwrap_err().what, what, "{fault:?}");
        fake.set(Fault::None);
        assert_eq!(iommu.handle_faults(), Ok(Handled::default()));
    }
    // A tail that runs ahead of the records reads what is there: nothing.
    fake.set(Fault::Reads(52, 100));
    let handled = iommu.handle_faults().unwrap();
    assert_eq!((handled.malformed, handled.more), (100, false));
}
