//! Commands that the driver makes are kept from the hardware, or changed, and it shows: so the
//! tests would find a driver that leaves them out.

use dmaspan::io_pgtable::RiscvConfig;
use dmaspan::{PhysAddr, Prot, Span};
use dmaspan_drivers::riscv::RiscvIommuConfig;
use dmaspan_qemu::Edit;

use crate::riscv::rig::{Kind, Rig, STAGES, WRITERS, map, map_span, paging, unmap};

const IOVA: u64 = 0x1_2345_6000;
const IOTINVAL: u64 = 1;
const IODIR: u64 = 3;
/// IOFENCE.C that does nothing.
const NOTHING: [u64; 2] = [2, 0];

/// Takes all commands with that opcode away.
fn without(opcode: u64) -> Option<Edit> {
    Some(Box::new(move |command| {
        if command[0] & 0x7f == opcode {
            command.copy_from_slice(&NOTHING);
        }
    }))
}

/// Changes bits of the invalidations.
fn with_changed(bits: u64) -> Option<Edit> {
    Some(Box::new(move |command| {
        if command[0] & 0x7f == IOTINVAL {
            command[0] ^= bits;
        }
    }))
}

#[test]
fn a_page_is_used_after_its_unmap_where_the_invalidation_is_missing_or_of_another_domain() {
    for stage in STAGES {
        let Some(rig) = Rig::start(Kind::Platform, RiscvIommuConfig::default()) else { return };
        let (stream, _) = rig.stream(WRITERS[0]);
        let mut device = rig.writer(WRITERS[0]);
        let (buffer, domain) = (rig.buffer(0x1000), rig.domain(stage));
        stream.attach(paging(&domain)).unwrap();
        // The lowest bits of a PSCID and of a GSCID, and an address that another page has.
        let number = 1 << if stage == STAGES[0] { 13 } else { 45 };
        let address: Option<Edit> = Some(Box::new(|command| command[1] ^= 1 << 14));
        let edits = [without(IOTINVAL), with_changed(number), address];
        for edit in edits.into_iter().chain([None]) {
            map(&domain, IOVA, &buffer, Prot::READ_WRITE);
            device.write(IOVA, buffer.paddr(), 4).unwrap();
            let sabotaged = edit.is_some();
            rig.tap.set_edit(edit);
            unmap(&domain, IOVA, 0x1000);
            rig.tap.set_edit(None);
            assert_eq!(device.write(IOVA, buffer.paddr(), 4).is_ok(), sabotaged, "{stage:?}");
        }
    }
}

#[test]
fn the_old_domain_is_used_after_a_switch_where_the_directory_is_not_invalidated() {
    for stage in STAGES {
        let Some(rig) = Rig::start(Kind::Pci, RiscvIommuConfig::default()) else { return };
        let (stream, _) = rig.stream(WRITERS[0]);
        let mut device = rig.writer(WRITERS[0]);
        for edit in [without(IODIR), None] {
            let (a, b) = (rig.domain(stage), rig.domain(stage));
            let [first, second] = [0, 1].map(|_| rig.buffer(0x1000));
            map(&a, IOVA, &first, Prot::READ_WRITE);
            map(&b, IOVA, &second, Prot::READ_WRITE);
            stream.replace(paging(&a)).unwrap();
            device.write(IOVA, first.paddr(), 4).unwrap();
            first.set_word(0, 0);
            let sabotaged = edit.is_some();
            rig.tap.set_edit(edit);
            stream.replace(paging(&b)).unwrap();
            rig.tap.set_edit(None);
            assert_eq!(device.write(IOVA, second.paddr(), 4).is_err(), sabotaged, "{stage:?}");
            assert_eq!(first.word(0) != 0, sabotaged, "{stage:?}");
            // Both would be dropped with hardware that has the old context: not that, too.
            stream.replace(paging(&a)).unwrap();
            stream.detach().unwrap();
        }
    }
}

#[test]
fn a_gibibyte_of_pages_is_forgotten_by_one_command() {
    for stage in STAGES {
        let Some(rig) = Rig::start(Kind::Pci, RiscvIommuConfig::default()) else { return };
        let config = rig.iommu.config(stage).unwrap();
        let domain = rig.domain_of(RiscvConfig { page_sizes: Some(0x1000), ..config });
        let (stream, _) = rig.stream(WRITERS[0]);
        stream.attach(paging(&domain)).unwrap();
        let gibibyte = Span::new(PhysAddr::new(0x8000_0000), 1 << 30).unwrap();
        map_span(&domain, 1 << 30, gibibyte, Prot::READ_WRITE);
        rig.tap.take();
        assert_eq!(unmap(&domain, 1 << 30, 1 << 30), 0x1000, "of pages");
        let commands = rig.tap.take();
        assert_eq!(commands.len(), 2, "{stage:?} {commands:x?}");

        // Few pages in a table that stays are named, and no other page is forgotten.
        map_span(&domain, 0x10_0000, Span::new(gibibyte.paddr(), 0x20000).unwrap(), Prot::READ);
        rig.tap.take();
        unmap(&domain, 0x10_3000, 0x3000);
        let addresses: Vec<_> = rig.tap.take().iter().map(|c| c[1] << 2).collect();
        assert_eq!(addresses, [0x10_3000, 0x10_4000, 0x10_5000, 0], "{stage:?}");
    }
}
