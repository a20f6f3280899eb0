//! A device reaches mapped memory, and nothing else.

use std::sync::atomic::Ordering::Relaxed;

use dmaspan::io_pgtable::{DirtyTracking, Half, RiscvConfig, RiscvStage};
use dmaspan::iommu::{FaultAccess, FaultReason, Target};
use dmaspan::{PhysAddr, Prot, Span};
use dmaspan_drivers::Error;
use dmaspan_drivers::riscv::{Capabilities, RiscvIommuConfig};
use dmaspan_qemu::{Pci, TestDev};

use crate::riscv::rig::{
    FIRST, KINDS, Kind, MODES, Rig, SECOND, STAGES, WRITERS, map, map_span, paging, unmap,
};

const WORD: u64 = TestDev::WRITTEN as u64 | (TestDev::WRITTEN as u64) << 32;

#[test]
fn mapped_memory_is_written_and_unmapped_addresses_fault() {
    for (kind, stage) in KINDS.into_iter().flat_map(|kind| STAGES.map(|stage| (kind, stage))) {
        let Some(rig) = Rig::start(kind, RiscvIommuConfig::default()) else { return };
        let (stream, heard) = rig.stream(WRITERS[0]);
        let mut device = rig.writer(WRITERS[0]);
        let (buffer, domain) = (rig.buffer(0x1000), rig.domain(stage));
        let iova = 0x12_3456_7000;
        map(&domain, iova, &buffer, Prot::READ_WRITE);
        stream.attach(paging(&domain)).unwrap();
        device.write(iova + 8, buffer.paddr().wrapping_add(8), 64).unwrap();
        assert_eq!((buffer.word(0), buffer.word(1), buffer.word(8)), (0, WORD, WORD));
        assert_eq!(rig.faults(&heard), [], "{kind:?} {stage:?}");

        device.write(iova + 0x1010, buffer.paddr(), 4).unwrap_err();
        let [fault] = rig.faults(&heard)[..] else { panic!("{kind:?} {stage:?}: not one fault") };
        assert_eq!(fault.iova.get(), iova + 0x1010);
        assert_eq!(fault.stream, Pci::requester(WRITERS[0]));
        assert_eq!((fault.access, fault.reason), (FaultAccess::Write, FaultReason::Translation));

        unmap(&domain, iova, 0x1000);
        buffer.set_word(1, 0);
        device.write(iova + 8, buffer.paddr().wrapping_add(8), 4).unwrap_err();
        assert_eq!((buffer.word(1), rig.faults(&heard).len()), (0, 1), "{kind:?} {stage:?}");
    }
}

#[test]
fn memory_that_is_only_to_be_read_is_not_written() {
    for (kind, stage) in KINDS.into_iter().flat_map(|kind| STAGES.map(|stage| (kind, stage))) {
        let Some(rig) = Rig::start(kind, RiscvIommuConfig::default()) else { return };
        let (stream, heard) = rig.stream(WRITERS[0]);
        let mut device = rig.writer(WRITERS[0]);
        let (buffer, domain) = (rig.buffer(0x1000), rig.domain(stage));
        map(&domain, 0x5000, &buffer, Prot::READ);
        stream.attach(paging(&domain)).unwrap();
        device.write(0x5008, buffer.paddr().wrapping_add(8), 4).unwrap_err();
        let [fault] = rig.faults(&heard)[..] else { panic!("{kind:?} {stage:?}: not one fault") };
        assert_eq!((fault.iova.get(), fault.access), (0x5008, FaultAccess::Write));
        assert_eq!(buffer.word(1), 0);
    }
}

/// Both ends and a border in the middle of what a mode translates.
fn corners(config: RiscvConfig) -> Vec<u64> {
    let format = dmaspan::io_pgtable::Riscv::new(config).unwrap();
    let aperture = dmaspan::io_pgtable::Format::geometry(&format).aperture;
    let (first, last) = (aperture.start().get(), aperture.last().get());
    vec![first, first + (aperture.len_less_one() >> 1) + 1, last - 0xfff]
}

#[test]
fn each_mode_of_each_stage_translates_all_of_its_addresses() {
    for kind in [Kind::Pci, Kind::Platform] {
        let Some(rig) = Rig::start(kind, RiscvIommuConfig::default()) else { return };
        let (stream, heard) = rig.stream(WRITERS[0]);
        let mut device = rig.writer(WRITERS[0]);
        let stages = [FIRST, RiscvStage::First(Half::Upper), SECOND];
        for (mode, stage) in MODES.into_iter().flat_map(|mode| stages.map(|stage| (mode, stage))) {
            let config = rig.iommu.config_of(stage, mode).unwrap();
            let domain = rig.domain_of(config);
            stream.replace(paging(&domain)).unwrap();
            for iova in corners(config) {
                let buffer = rig.buffer(0x1000);
                map(&domain, iova, &buffer, Prot::READ_WRITE);
                device.write(iova, buffer.paddr(), 8).unwrap();
                assert_eq!(buffer.word(0), WORD, "{mode:?} {stage:?} {iova:#x}");
                unmap(&domain, iova, 0x1000);
                device.write(iova, buffer.paddr(), 4).unwrap_err();
                let [fault] = rig.faults(&heard)[..] else { panic!("not one fault") };
                assert_eq!(fault.iova.get(), iova, "{mode:?} {stage:?}");
            }
        }
    }
}

#[test]
fn leaves_of_all_levels_are_honoured() {
    for stage in STAGES {
        let Some(rig) = Rig::start(Kind::Platform, RiscvIommuConfig::default()) else { return };
        let (stream, heard) = rig.stream(WRITERS[0]);
        let mut device = rig.writer(WRITERS[0]);
        let domain = rig.domain(stage);
        stream.attach(paging(&domain)).unwrap();
        let buffer = rig.buffer(0x1000);
        for lg2 in [12, 16, 21, 30, 39] {
            // A leaf that has the buffer somewhere in it; what else is there is not used.
            let size = 1u64 << lg2;
            let paddr = buffer.paddr().get();
            let base = Span::new(PhysAddr::new(paddr & !(size - 1)), size).unwrap();
            let iova = 3 * size;
            map_span(&domain, iova, base, Prot::READ_WRITE);
            let at = iova + (paddr & (size - 1));
            buffer.set_word(0, 0);
            device.write(at, buffer.paddr(), 8).unwrap();
            assert_eq!(buffer.word(0), WORD, "{stage:?} {lg2}");
            assert_eq!(unmap(&domain, iova, size), size, "it is one leaf");
            device.write(at, buffer.paddr(), 4).unwrap_err();
            let faults = rig.faults(&heard);
            assert_eq!((faults.len(), faults[0].iova.get()), (1, at), "{stage:?} {lg2}");
        }
    }
}

#[test]
fn a_stream_is_blocked_before_and_after() {
    for kind in KINDS {
        let Some(rig) = Rig::start(kind, RiscvIommuConfig::default()) else { return };
        let (buffer, mut device) = (rig.buffer(0x1000), rig.writer(WRITERS[0]));
        let target = buffer.paddr();
        // Nobody has claimed it.
        device.write(target.get(), target, 4).unwrap_err();
        let handled = rig.iommu.handle_faults().unwrap();
        assert_eq!((handled.reported, handled.unclaimed), (0, 1), "{kind:?}");
        let (stream, heard) = rig.stream(WRITERS[0]);
        device.write(target.get(), target, 4).unwrap_err();
        let [fault] = rig.faults(&heard)[..] else { panic!("{kind:?}: not one fault") };
        assert_eq!(fault.reason, FaultReason::Blocked);

        #[expect(unsafe_code, reason = "the device is let at all memory")]
        // SAFETY: it writes where the test tells it.
        let all = unsafe { dmaspan::iommu::AllMemory::promise() };
        stream.attach(Target::Identity(all)).unwrap();
        device.write(target.get(), target, 8).unwrap();
        assert_eq!(buffer.word(0), WORD, "{kind:?}");
        stream.detach().unwrap();
        buffer.set_word(0, 0);
        device.write(target.get(), target, 4).unwrap_err();
        assert_eq!(buffer.word(0), 0, "{kind:?}");
        assert_eq!(rig.faults(&heard).len(), 1);

        // The driver goes, and the stream stays blocked.
        drop(stream);
        let Rig { iommu, .. } = rig;
        drop(iommu);
        device.write(target.get(), target, 4).unwrap_err();
        assert_eq!(buffer.word(0), 0, "{kind:?}");
    }
}

#[test]
fn what_hardware_does_not_have_is_refused() {
    let Some(rig) = Rig::start(Kind::Pci, RiscvIommuConfig::default()) else { return };
    assert!(!rig.iommu.features().capabilities.contains(Capabilities::AMO_HWAD));
    let (stream, _) = rig.stream(WRITERS[0]);
    let config = rig.iommu.config(SECOND).unwrap();
    let dirty = RiscvConfig { dirty: DirtyTracking::Hardware, ..config };
    let refused = stream.attach(paging(&rig.domain_of(dirty))).unwrap_err();
    assert!(refused.to_string().contains("sets no dirty bits"), "{refused}");
}

#[test]
fn directories_of_all_levels_and_both_formats_lead_to_a_device() {
    for (kind, bits) in [(Kind::PciBase, [7, 16, 24]), (Kind::Pci, [6, 15, 24])] {
        for (levels, bits) in (1..).zip(bits) {
            let config = RiscvIommuConfig { device_id_bits: bits, ..Default::default() };
            let Some(rig) = Rig::start(kind, config) else { return };
            let features = rig.iommu.features();
            let extended = features.capabilities.contains(Capabilities::MSI_FLAT);
            assert_eq!(extended, kind == Kind::Pci);
            assert_eq!((features.directory_levels, features.device_id_bits), (levels, bits));
            let (buffer, domain) = (rig.buffer(0x1000), rig.domain(SECOND));
            map(&domain, 0x9000, &buffer, Prot::READ_WRITE);
            for slot in WRITERS {
                let (stream, _) = rig.stream(slot);
                stream.attach(paging(&domain)).unwrap();
                buffer.set_word(0, 0);
                rig.writer(slot).write(0x9000, buffer.paddr(), 8).unwrap();
                assert_eq!(buffer.word(0), WORD, "{kind:?} {levels}");
            }
            let error =
                rig.iommu.stream::<crate::riscv::rig::Tables>(1 << bits, Default::default());
            let expected = Error::NoStream { stream: 1 << bits, last: (1 << bits) - 1 };
            assert_eq!(error.unwrap_err(), expected);
        }
    }
}

#[test]
fn each_page_of_a_group_of_64k_is_where_it_was_mapped() {
    for stage in STAGES {
        let Some(rig) = Rig::start(Kind::Platform, RiscvIommuConfig::default()) else { return };
        let (stream, heard) = rig.stream(WRITERS[0]);
        let mut device = rig.writer(WRITERS[0]);
        let (buffer, domain) = (rig.buffer(0x10000), rig.domain(stage));
        map(&domain, 0x10000, &buffer, Prot::READ_WRITE);
        stream.attach(paging(&domain)).unwrap();
        let mut write = |page: u64| {
            let at = page * 0x1000;
            device.write(0x10000 + at, buffer.paddr().wrapping_add(at), 8)
        };
        for page in 0..16 {
            write(page).unwrap();
            let written = (0..).zip(buffer.words()).filter(|(_, word)| word.swap(0, Relaxed) != 0);
            assert_eq!(written.map(|(at, _)| at).collect::<Vec<u64>>(), [page * 512], "{stage:?}");
        }
        assert_eq!(unmap(&domain, 0x10000, 0x10000), 0x10000, "it is one group");
        assert!((0..16).all(|page| write(page).is_err()), "{stage:?}");
        assert_eq!(rig.faults(&heard).len(), 32, "one for each word");
    }
}
