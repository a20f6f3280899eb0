//! A device reaches mapped memory, and nothing else.

use dmaspan::iommu::{FaultAccess, FaultReason, Target};
use dmaspan::{PhysAddr, Prot, Span};

use crate::vtd::rig::{Kind, RW, Rig, map, of_every_kind, to, unmap};

of_every_kind!(
    mapped_memory_is_written_and_the_rest_faults,
    what_is_read_only_is_not_written,
    large_leaves_are_honoured,
    a_stale_entry_is_used_until_the_sync_and_never_after,
);

const IOVA: u64 = 0x12_3456_7000;

fn mapped_memory_is_written_and_the_rest_faults<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let (stream, heard) = rig.stream::<K::Format>(1);
    let domain = rig.domain::<K>();
    let buffer = rig.buffer(0x1000);
    assert!(!rig.reaches(IOVA, &buffer), "blocked by default");
    let faults = rig.faults(&heard);
    assert_eq!(faults.len(), 1);
    assert_eq!((faults[0].stream, faults[0].iova.get()), (8, IOVA));
    assert_eq!(faults[0].reason, FaultReason::Blocked);

    stream.attach(to(&domain)).expect("it is attached");
    map(&domain, IOVA, buffer.span(), RW);
    assert!(rig.reaches(IOVA, &buffer));
    assert_eq!(rig.faults(&heard), []);
    for beside in [IOVA - 0x1000, IOVA + 0x1000, 0, IOVA ^ 1 << 37] {
        assert!(!rig.reaches(beside, &buffer));
        let faults = rig.faults(&heard);
        assert_eq!(faults.len(), 1, "{beside:#x}");
        assert_eq!((faults[0].stream, faults[0].iova.get()), (8, beside));
        assert_eq!(faults[0].access, FaultAccess::Write);
        assert!(matches!(faults[0].reason, FaultReason::Translation | FaultReason::Permission));
    }
    stream.detach().expect("it is detached");
    assert!(!rig.reaches(IOVA, &buffer));
    assert_eq!(rig.faults(&heard)[0].reason, FaultReason::Blocked);
}

fn what_is_read_only_is_not_written<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let (stream, heard) = rig.stream::<K::Format>(1);
    let domain = rig.domain::<K>();
    stream.attach(to(&domain)).expect("it is attached");
    let buffer = rig.buffer(0x1000);
    map(&domain, IOVA, buffer.span(), Prot::READ);
    assert!(!rig.reaches(IOVA, &buffer));
    let faults = rig.faults(&heard);
    assert_eq!((faults[0].iova.get(), faults[0].reason), (IOVA, FaultReason::Permission));
}

fn large_leaves_are_honoured<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let (stream, _) = rig.stream::<K::Format>(1);
    let domain = rig.domain::<K>();
    stream.attach(to(&domain)).expect("it is attached");
    let buffer = rig.buffer(4 << 20);
    let before = rig.tables.tables();
    map(&domain, 1 << 30, buffer.span(), RW);
    let tables = rig.tables.tables() - before;
    assert!(tables <= 2, "two leaves of 2M need no last-level table, and there are {tables}");
    let words = buffer.words();
    for place in [0u64, 0x1ff_f000, 0x20_0000, 0x3f_f000].map(|place| place & 0x3f_ffff) {
        let paddr = buffer.paddr().wrapping_add(place);
        rig.devices[0].write((1 << 30) + place, paddr, 4).expect("it is mapped");
        let index = usize::try_from(place / 8).expect("it is in the buffer");
        assert_ne!(words[index].load(std::sync::atomic::Ordering::Relaxed), 0);
    }
    // All of the machine's memory, and what is not there, by leaves of 1G where there are such.
    let has = rig.iommu.features();
    let gigabyte = match K::STAGE {
        dmaspan_drivers::vtd::Stage::First => has.first_stage_sizes() >> 30 & 1 != 0,
        dmaspan_drivers::vtd::Stage::Second => has.second_stage_sizes() >> 30 & 1 != 0,
    };
    assert!(gigabyte, "the model has leaves of 1G");
    let all = Span::new(PhysAddr::new(0), 1 << 30).expect("a span");
    map(&domain, 4 << 30, all, RW);
    assert!(rig.reaches((4 << 30) + buffer.paddr().get(), &buffer));
    unmap(&domain, 4 << 30, 1 << 30);
    assert!(!rig.reaches((4 << 30) + buffer.paddr().get(), &buffer));
}

fn a_stale_entry_is_used_until_the_sync_and_never_after<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let (stream, heard) = rig.stream::<K::Format>(1);
    let domain = rig.domain::<K>();
    stream.attach(to(&domain)).expect("it is attached");
    let buffer = rig.buffer(0x4000);
    map(&domain, IOVA, buffer.span(), RW);
    assert!(rig.reaches(IOVA, &buffer));
    // The commands are made harmless on their way: the model goes on using what it knows.
    rig.tap.set_edit(Some(Box::new(|command| {
        if matches!(command[0] & 0xf, 0x2 | 0x6) {
            // A domain that nobody has.
            command[0] |= 0xffff << 16;
        }
    })));
    unmap(&domain, IOVA, 0x4000);
    assert!(rig.reaches(IOVA, &buffer), "the model has a cache");
    rig.tap.set_edit(None);
    map(&domain, IOVA, buffer.span(), RW);
    unmap(&domain, IOVA, 0x4000);
    assert!(!rig.reaches(IOVA, &buffer));
    assert_eq!(rig.faults(&heard).len(), 1);
    stream.detach().expect("it is detached");
    assert!(stream.attach(Target::Blocked).is_ok());
}
