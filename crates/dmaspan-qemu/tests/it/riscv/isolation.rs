//! Devices in domains of their own, and domains that change.

use dmaspan::Prot;
use dmaspan::iommu::AttachedTo;
use dmaspan_drivers::riscv::RiscvIommuConfig;
use dmaspan_qemu::TestDev;

use crate::riscv::rig::{FIRST, KINDS, Kind, Rig, SECOND, STAGES, WRITERS, map, paging, unmap};

const WORD: u64 = TestDev::WRITTEN as u64 | (TestDev::WRITTEN as u64) << 32;
const IOVA: u64 = 0x7_0000_0000;

#[test]
fn two_devices_in_two_domains_do_not_reach_each_others_memory() {
    for (kind, stage) in KINDS.into_iter().flat_map(|kind| STAGES.map(|stage| (kind, stage))) {
        let Some(rig) = Rig::start(kind, RiscvIommuConfig::default()) else { return };
        let parts = WRITERS.map(|slot| {
            let (stream, heard) = rig.stream(slot);
            let (buffer, domain) = (rig.buffer(0x1000), rig.domain(stage));
            stream.attach(paging(&domain)).unwrap();
            (stream, heard, buffer, domain, rig.writer(slot))
        });
        let [(_, first, ours, a, mut device), (_, second, theirs, b, mut other)] = parts;
        map(&a, IOVA, &ours, Prot::READ_WRITE);
        map(&b, IOVA, &theirs, Prot::READ_WRITE);
        map(&b, IOVA + 0x1000, &theirs, Prot::READ_WRITE);
        device.write(IOVA, ours.paddr(), 8).unwrap();
        assert_eq!((ours.word(0), theirs.word(0)), (WORD, 0), "{kind:?} {stage:?}");
        other.write(IOVA + 8, theirs.paddr().wrapping_add(8), 8).unwrap();
        assert_eq!((ours.word(1), theirs.word(1)), (0, WORD), "{kind:?} {stage:?}");
        device.write(IOVA + 0x1000, theirs.paddr(), 4).unwrap_err();
        assert_eq!((rig.faults(&first).len(), second.take().len()), (1, 0));
        assert_eq!(theirs.word(0), 0);
        // What one domain unmaps, the other keeps.
        unmap(&a, IOVA, 0x1000);
        device.write(IOVA, ours.paddr(), 4).unwrap_err();
        other.write(IOVA, theirs.paddr(), 8).unwrap();
        assert_eq!((rig.faults(&first).len(), second.take().len()), (1, 0));
    }
}

#[test]
fn a_switch_between_domains_takes_effect_at_once() {
    let stages = [(FIRST, FIRST), (SECOND, SECOND), (FIRST, SECOND), (SECOND, FIRST)];
    for (kind, (from, to)) in KINDS.into_iter().flat_map(|kind| stages.map(|pair| (kind, pair))) {
        let Some(rig) = Rig::start(kind, RiscvIommuConfig::default()) else { return };
        let (stream, heard) = rig.stream(WRITERS[0]);
        let mut device = rig.writer(WRITERS[0]);
        let (a, b) = (rig.domain(from), rig.domain(to));
        let [first, second] = [0, 1].map(|_| rig.buffer(0x1000));
        map(&a, IOVA, &first, Prot::READ_WRITE);
        map(&a, IOVA + 0x1000, &first, Prot::READ_WRITE);
        map(&b, IOVA, &second, Prot::READ_WRITE);
        stream.attach(paging(&a)).unwrap();
        device.write(IOVA, first.paddr(), 8).unwrap();
        device.write(IOVA + 0x1000, first.paddr(), 8).unwrap();
        first.set_word(0, 0);

        stream.replace(paging(&b)).unwrap();
        device.write(IOVA, second.paddr(), 8).unwrap();
        assert_eq!((first.word(0), second.word(0)), (0, WORD), "{kind:?} {from:?} {to:?}");
        device.write(IOVA + 0x1000, first.paddr(), 4).unwrap_err();
        assert_eq!((first.word(0), rig.faults(&heard).len()), (0, 1));

        stream.replace(paging(&a)).unwrap();
        device.write(IOVA, first.paddr(), 8).unwrap();
        stream.detach().unwrap();
        device.write(IOVA, first.paddr(), 4).unwrap_err();
        assert_eq!(rig.faults(&heard).len(), 1, "{kind:?} {from:?} {to:?}");
    }
}

#[test]
fn a_switch_between_second_stages_is_one_word_and_one_fence() {
    let Some(rig) = Rig::start(Kind::Pci, RiscvIommuConfig::default()) else { return };
    let (stream, _) = rig.stream(WRITERS[0]);
    for (stage, fences) in [(SECOND, 1), (FIRST, 2)] {
        let (a, b) = (rig.domain(stage), rig.domain(stage));
        stream.replace(paging(&a)).unwrap();
        rig.tap.take();
        stream.replace(paging(&b)).unwrap();
        let commands = rig.tap.take();
        let count = |opcode| commands.iter().filter(|c| c[0] & 0x7f == opcode).count();
        // A fence is opcode 2, and IODIR 3: before each fence the context is forgotten.
        assert_eq!((count(2), count(3)), (fences, fences), "{stage:?} {commands:x?}");
    }
}

#[test]
fn a_domain_that_is_dropped_while_a_stream_has_it_keeps_its_tables() {
    let Some(rig) = Rig::start(Kind::Pci, RiscvIommuConfig::default()) else { return };
    let (stream, _) = rig.stream(WRITERS[0]);
    let mut device = rig.writer(WRITERS[0]);
    let (buffer, domain) = (rig.buffer(0x1000), rig.domain(SECOND));
    map(&domain, IOVA, &buffer, Prot::READ_WRITE);
    // Behind the back of the attachment, which would keep the domain.
    dmaspan::iommu::Port::translate(stream.port(), &domain).unwrap();
    assert_eq!(stream.attached_to(), AttachedTo::Blocked);
    drop(domain);
    // Tables of others do not take the place of those that hardware walks.
    let other = rig.domain(SECOND);
    map(&other, IOVA, &buffer, Prot::READ);
    device.write(IOVA, buffer.paddr(), 8).unwrap();
    assert_eq!(buffer.word(0), WORD);
}
