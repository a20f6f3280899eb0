//! Hardware that refuses commands, loses faults, or goes away.

use std::sync::Arc;
use std::thread;

use dmaspan::Prot;
use dmaspan::iommu::{Invalidation, IommuOps as _, Scope, Tables};
use dmaspan_drivers::Mmio as _;
use dmaspan_drivers::riscv::RiscvIommuConfig;
use dmaspan_qemu::{Edit, Pci};

use crate::riscv::rig::{FIRST, KINDS, Kind, Rig, SECOND, WRITERS, map, paging, unmap};

const IOVA: u64 = 0x4000_0000;
const ALL: Invalidation<'static> =
    Invalidation { scope: Scope::All, leaf_sizes: 0x1000, tables: Tables::Detached };

#[test]
fn a_storm_of_faults_overflows_and_faults_are_reported_again_afterwards() {
    for kind in KINDS {
        let config = RiscvIommuConfig { faults_lg2: 2, ..Default::default() };
        let Some(rig) = Rig::start(kind, config) else { return };
        let (stream, heard) = rig.stream(WRITERS[0]);
        let domain = rig.domain(SECOND);
        stream.attach(paging(&domain)).unwrap();
        let (mut device, buffer) = (rig.writer(WRITERS[0]), rig.buffer(0x1000));
        for _ in 0..3 {
            for page in 0..20 {
                device.write(IOVA + page * 0x1000, buffer.paddr(), 4).unwrap_err();
            }
            let handled = rig.iommu.handle_faults().unwrap();
            assert!(handled.overflowed, "{kind:?}");
            assert_eq!((handled.reported, handled.malformed, handled.more), (3, 0, false));
            let pages = heard.take().into_iter().map(|fault| fault.iova.get() >> 12);
            assert_eq!(pages.collect::<Vec<_>>(), [0, 1, 2].map(|page| (IOVA >> 12) + page));

            device.write(IOVA + 0x123_4000, buffer.paddr(), 4).unwrap_err();
            let handled = rig.iommu.handle_faults().unwrap();
            assert_eq!((handled.reported, handled.overflowed), (1, false), "{kind:?}");
            assert_eq!(heard.take()[0].iova.get(), IOVA + 0x123_4000);
        }
    }
}

#[test]
fn faults_of_two_devices_come_to_their_own_streams() {
    let Some(rig) = Rig::start(Kind::Pci, RiscvIommuConfig::default()) else { return };
    let domain = rig.domain(FIRST);
    let buffer = rig.buffer(0x1000);
    let streams = WRITERS.map(|slot| rig.stream(slot));
    let mut devices = WRITERS.map(|slot| rig.writer(slot));
    for (stream, _) in &streams {
        stream.attach(paging(&domain)).unwrap();
    }
    for round in 0..200u64 {
        let which = usize::from(round % 3 == 0);
        devices[which].write(round << 12, buffer.paddr(), 4).unwrap_err();
        let faults = rig.faults(&streams[which].1);
        assert_eq!(faults.len(), 1);
        assert_eq!(
            (faults[0].stream, faults[0].iova.get()),
            (Pci::requester(WRITERS[which]), round << 12)
        );
        assert_eq!(streams[1 - which].1.take(), []);
    }
}

#[test]
fn a_command_that_hardware_refuses_or_cannot_finish_is_an_error_and_the_next_one_works() {
    for kind in KINDS {
        let Some(rig) = Rig::start(kind, RiscvIommuConfig::default()) else { return };
        let (stream, _) = rig.stream(WRITERS[0]);
        let (domain, buffer) = (rig.domain(SECOND), rig.buffer(0x1000));
        let mut device = rig.writer(WRITERS[0]);
        stream.attach(paging(&domain)).unwrap();
        // An opcode that there is not; a fence that stores where no memory is.
        let bad = [([77, 0], "refused a command"), ([2 | 1 << 10, 0x200], "could not reach")];
        for (bad, says) in bad {
            let edit: Edit = Box::new(move |command| command.copy_from_slice(&bad));
            rig.tap.set_edit(Some(edit));
            let error = domain.ops().invalidate(&ALL).unwrap_err();
            rig.tap.set_edit(None);
            assert!(error.what.contains(says), "{kind:?}: {error}");
            domain.ops().invalidate(&ALL).unwrap();
            map(&domain, IOVA, &buffer, Prot::READ_WRITE);
            device.write(IOVA, buffer.paddr(), 8).unwrap();
            unmap(&domain, IOVA, 0x1000);
            device.write(IOVA, buffer.paddr(), 4).unwrap_err();
        }
    }
}

#[test]
fn a_switch_that_fails_leaves_a_stream_that_can_be_blocked_and_attached_again() {
    let Some(rig) = Rig::start(Kind::Platform, RiscvIommuConfig::default()) else { return };
    let (stream, _) = rig.stream(WRITERS[0]);
    let (domain, other, buffer) = (rig.domain(FIRST), rig.domain(FIRST), rig.buffer(0x1000));
    let mut device = rig.writer(WRITERS[0]);
    map(&domain, IOVA, &buffer, Prot::READ_WRITE);
    stream.attach(paging(&domain)).unwrap();
    device.write(IOVA, buffer.paddr(), 4).unwrap();
    rig.tap.set_edit(Some(Box::new(|command| command[0] = 0x7f)));
    stream.replace(paging(&other)).unwrap_err();
    rig.tap.set_edit(None);
    stream.detach().unwrap();
    device.write(IOVA, buffer.paddr(), 4).unwrap_err();
    stream.attach(paging(&other)).unwrap();
    device.write(IOVA, buffer.paddr(), 4).unwrap_err();
    stream.replace(paging(&domain)).unwrap();
    device.write(IOVA, buffer.paddr(), 8).unwrap();
}

#[test]
fn threads_share_the_smallest_queue() {
    let config = RiscvIommuConfig { commands_lg2: 2, ..Default::default() };
    let Some(rig) = Rig::start(Kind::Pci, config) else { return };
    let domain = rig.domain(FIRST);
    let (stream, _) = rig.stream(WRITERS[0]);
    stream.attach(paging(&domain)).unwrap();
    let buffers: Vec<_> = (0..4u64).map(|_| rig.buffer(0x8000)).collect();
    thread::scope(|scope| {
        for (thread, buffer) in (0..).zip(&buffers) {
            let domain = &domain;
            scope.spawn(move || {
                let iova = IOVA + thread * 0x20_0000;
                for _ in 0..25 {
                    map(domain, iova, buffer, Prot::READ_WRITE);
                    unmap(domain, iova, 0x8000);
                }
            });
        }
    });
    map(&domain, IOVA, &buffers[0], Prot::READ_WRITE);
    rig.writer(WRITERS[0]).write(IOVA, buffers[0].paddr(), 8).unwrap();
}

#[test]
fn hardware_that_is_gone_is_an_error_everywhere() {
    let Some(rig) = Rig::start(Kind::Platform, RiscvIommuConfig::default()) else { return };
    let (stream, _) = rig.stream(WRITERS[0]);
    let domain = rig.domain(SECOND);
    stream.attach(paging(&domain)).unwrap();
    // The device that ends a machine: "pass".
    rig.machine.mmio(0x10_0000).write32(0, 0x5555);
    while !rig.machine.is_gone() {
        rig.tap.read32(0);
    }
    assert!(domain.ops().invalidate(&ALL).is_err());
    assert!(rig.iommu.handle_faults().is_err());
    assert!(stream.detach().is_err());
    let tables = Arc::downgrade(&domain);
    drop(domain);
    drop(stream);
    assert!(tables.upgrade().is_some(), "a domain that hardware may have is kept");
}
