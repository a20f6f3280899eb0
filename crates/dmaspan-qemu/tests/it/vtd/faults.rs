//! The model's fault records, and the faults beyond the room for them.

use dmaspan::iommu::FaultAccess;
use dmaspan_qemu::Edu;

use crate::vtd::rig::{Kind, RW, Rig, map, of_every_kind, reaches, to};

of_every_kind!(
    more_faults_than_records_are_an_overflow_and_later_ones_are_reported,
    a_storm_of_faults_is_drained_in_bounded_time,
    a_read_that_fails_is_a_read,
);

fn more_faults_than_records_are_an_overflow_and_later_ones_are_reported<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let (first, heard) = rig.stream::<K::Format>(1);
    let (_second, other) = rig.stream::<K::Format>(2);
    let domain = rig.domain::<K>();
    first.attach(to(&domain)).expect("it is attached");
    let buffer = rig.buffer(0x1000);
    let (_, records) = rig.iommu.features().fault_records();
    // Faults of one stream that nobody took are one to the model: two streams take turns.
    for fault in 0..=u64::from(records) {
        for device in &mut rig.devices {
            assert!(!reaches(device, fault << 12, &buffer));
        }
    }
    let handled = rig.iommu.handle_faults().expect("the model is there");
    assert!(handled.overflowed, "{handled:?}");
    assert_eq!(handled.reported, records);
    assert_eq!(handled.malformed + handled.unclaimed, 0);
    assert!(!handled.more);
    rig.faults(&heard);
    rig.faults(&other);
    for fault in 1..5 {
        assert!(!reaches(&mut rig.devices[0], fault << 12, &buffer));
        let faults = rig.faults(&heard);
        assert_eq!((faults.len(), faults[0].iova.get()), (1, fault << 12));
    }
    // What is mapped works on.
    map(&domain, 0x5000, buffer.span(), RW);
    assert!(rig.reaches(0x5000, &buffer));
    assert_eq!(rig.faults(&heard), []);
}

fn a_storm_of_faults_is_drained_in_bounded_time<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let (_first, heard) = rig.stream::<K::Format>(1);
    let buffer = rig.buffer(0x1000);
    for fault in 0..200 {
        for device in &mut rig.devices {
            assert!(!reaches(device, fault << 12, &buffer));
        }
    }
    let before = rig.machine.commands();
    let handled = rig.iommu.handle_faults().expect("the model is there");
    let (_, records) = rig.iommu.features().fault_records();
    assert!(handled.reported + handled.unclaimed <= records);
    let accesses = rig.machine.commands() - before;
    assert!(accesses <= 3 + 4 * u64::from(records), "{accesses} accesses to registers");
    assert!(!heard.0.lock().is_empty());
}

fn a_read_that_fails_is_a_read<K: Kind>() {
    let Some(rig) = Rig::new::<K>() else { return };
    let (stream, heard) = rig.stream::<K::Format>(3);
    let domain = rig.domain::<K>();
    stream.attach(to(&domain)).expect("it is attached");
    let mut edu = Edu::new(&rig.pci, 3).expect("it is there");
    let buffer = rig.buffer(0x1000);
    map(&domain, 0x9000, buffer.span(), RW);
    for word in 0..8 {
        buffer.set_word(word, 77 * (word as u64 + 1));
    }
    edu.read(0x9000, 64);
    edu.write(0x9800, 64);
    assert_eq!(buffer.word(0x100 + 7), 77 * 8);
    assert_eq!(rig.faults(&heard), []);
    edu.read(0xa000, 4);
    let faults = rig.faults(&heard);
    assert!(!faults.is_empty());
    assert!(faults.iter().all(|fault| fault.access == FaultAccess::Read && fault.stream == 24));
    assert_eq!(faults[0].iova.get(), 0xa000);
}
