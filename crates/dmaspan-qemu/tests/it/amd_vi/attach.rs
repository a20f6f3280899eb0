//! A device reaches the domain that it is attached to, from one moment on.

use dmaspan::Prot;
use dmaspan::iommu::{AllMemory, AttachError, Port as _, RegionKind, ReservedRegions, Target};
use dmaspan_drivers::amd_vi::{AmdVi, AmdViConfig};
use dmaspan_drivers::{Error, Mmio};
use dmaspan_qemu::{Pci, QemuHost};

use crate::amd_vi::rig::{
    Board, INVALIDATE_DEVICE, Paging, Rig, WRITERS, leave_out, map, opcode, paging,
};

fn all_memory() -> Target<Paging> {
    // SAFETY: the machine's devices write where the test says, in memory that is the test's.
    Target::Identity(unsafe { AllMemory::promise() })
}

#[test]
fn no_device_does_dma_before_it_is_attached_whatever_it_did_before() {
    let Some(board) = Board::start() else { return };
    let buffer = board.machine.ram().allocate(0x1000).unwrap();
    let (iova, paddr) = (buffer.paddr().get(), buffer.paddr());
    board.writer(0).write(iova, paddr, 8).expect("nothing translates yet");
    buffer.set_word(0, 0);
    let config = board.config();
    let rig = board.drive(config);
    for index in [0, 1] {
        rig.board.writer(index).write(iova, paddr, 8).unwrap_err();
    }
    assert_eq!(buffer.word(0), 0);
}

#[test]
fn a_table_of_firmware_that_lets_devices_pass_is_replaced() {
    let Some(board) = Board::start() else { return };
    let ram = board.machine.ram().clone();
    let [buffer, table, ring] = [0, 1, 2].map(|_| ram.allocate(2 << 20).unwrap());
    // V = 0 for all devices, translation and a command buffer are enabled.
    let registers = board.machine.mmio(crate::amd_vi::rig::REGISTERS);
    registers.write64(0x00, table.paddr().get() | 0x1ff);
    registers.write64(0x08, ring.paddr().get() | 8 << 56);
    registers.write64(0x18, 1 | 1 << 12);
    registers.write64(0x20, 0x3);
    registers.write64(0x28, u64::MAX);
    let (iova, paddr) = (buffer.paddr().get(), buffer.paddr());
    board.writer(0).write(iova, paddr, 8).expect("firmware lets it pass");
    buffer.set_word(0, 0);
    let config = board.config();
    let rig = board.drive(config);
    rig.board.writer(0).write(iova, paddr, 8).unwrap_err();
    assert_eq!(buffer.word(0), 0);
    assert_ne!(registers.read64(0x18) & 1, 0);
}

#[test]
fn devices_stay_blocked_when_the_driver_is_gone() {
    let Some(rig) = Rig::start() else { return };
    let buffer = rig.board.machine.ram().allocate(0x1000).unwrap();
    let stream = rig.stream(WRITERS[0]);
    stream.attach(all_memory()).unwrap();
    let Rig { board, iommu, arena } = rig;
    drop((stream, iommu, arena));
    // What the driver had is the machine's still: new memory is not the device table.
    let _fresh = [0; 64].map(|_| board.machine.ram().allocate(0x1000).unwrap());
    for index in [0, 1] {
        board.writer(index).write(buffer.paddr().get(), buffer.paddr(), 8).unwrap_err();
    }
    assert_eq!(buffer.word(0), 0);
}

#[test]
fn a_stream_is_attached_switched_and_detached() {
    let Some(rig) = Rig::start() else { return };
    let ram = rig.board.machine.ram();
    let [one, two] = [0, 1].map(|_| ram.allocate(0x1000).unwrap());
    let (stream, mut device) = (rig.stream(WRITERS[0]), rig.board.writer(0));
    let domains = [&one, &two].map(|buffer| {
        let domain = rig.domain();
        map(&domain, 0x1000, buffer.span(), Prot::READ_WRITE);
        domain
    });
    let mut expect = |iova: u64, [in_one, in_two]: [bool; 2]| {
        one.set_word(0, 0);
        two.set_word(0, 0);
        let paddr = if in_two { two.paddr() } else { one.paddr() };
        assert_eq!(device.write(iova, paddr, 8).is_ok(), in_one || in_two, "{iova:#x}");
        assert_eq!([one.word(0) != 0, two.word(0) != 0], [in_one, in_two], "{iova:#x}");
    };
    expect(0x1000, [false, false]);
    for _ in 0..3 {
        stream.attach(paging(&domains[0])).unwrap();
        expect(0x1000, [true, false]);
        stream.replace(paging(&domains[1])).unwrap();
        expect(0x1000, [false, true]);
        expect(one.paddr().get(), [false, false]);
        stream.replace(all_memory()).unwrap();
        expect(one.paddr().get(), [true, false]);
        stream.replace(paging(&domains[0])).unwrap();
        expect(0x1000, [true, false]);
        expect(two.paddr().get(), [false, false]);
        stream.replace(all_memory()).unwrap();
        expect(two.paddr().get(), [false, true]);
        stream.detach().unwrap();
        expect(0x1000, [false, false]);
        expect(two.paddr().get(), [false, false]);
    }
}

#[test]
fn devices_in_two_domains_do_not_reach_each_others_memory() {
    let Some(rig) = Rig::start() else { return };
    let ram = rig.board.machine.ram();
    let buffers = [0, 1].map(|_| ram.allocate(0x1000).unwrap());
    let streams = WRITERS.map(|slot| rig.stream(slot));
    let mut devices = [0, 1].map(|index| rig.board.writer(index));
    for (nth, stream) in streams.iter().enumerate() {
        let domain = rig.domain();
        map(&domain, 0x1000, buffers[nth].span(), Prot::READ_WRITE);
        map(&domain, 0x10_0000 << nth, buffers[nth].span(), Prot::READ_WRITE);
        stream.attach(paging(&domain)).unwrap();
    }
    for nth in [0, 1] {
        let other = 1 - nth;
        for iova in [0x1000, 0x10_0000 << nth] {
            buffers.iter().for_each(|buffer| buffer.set_word(0, 0));
            devices[nth].write(iova, buffers[nth].paddr(), 8).unwrap();
            assert_eq!(buffers[other].word(0), 0);
        }
        buffers.iter().for_each(|buffer| buffer.set_word(0, 0));
        for iova in [0x10_0000 << other, buffers[other].paddr().get()] {
            devices[nth].write(iova, buffers[other].paddr(), 8).unwrap_err();
        }
        assert_eq!(buffers[other].word(0), 0);
    }
}

#[test]
fn a_switch_that_does_not_invalidate_the_entry_is_noticed() {
    let Some(rig) = Rig::start() else { return };
    let buffer = rig.board.machine.ram().allocate(0x1000).unwrap();
    let (stream, mut device) = (rig.stream(WRITERS[0]), rig.board.writer(0));
    stream.attach(all_memory()).unwrap();
    rig.board.tap.set_edit(Some(Box::new(|command| {
        if opcode(command) == INVALIDATE_DEVICE {
            leave_out(command);
        }
    })));
    stream.detach().unwrap();
    device.write(buffer.paddr().get(), buffer.paddr(), 8).expect("the old entry is used on");
    rig.board.tap.set_edit(None);
    stream.attach(all_memory()).unwrap();
    stream.detach().unwrap();
    device.write(buffer.paddr().get(), buffer.paddr(), 8).unwrap_err();
}

#[test]
fn tables_of_another_iommu_are_refused_and_so_are_those_that_it_does_not_walk() {
    let (Some(rig), Some(other)) = (Rig::start(), Rig::start()) else { return };
    let stream = rig.stream(WRITERS[0]);
    let refused = |domain| match stream.attach(paging(&domain)).unwrap_err() {
        AttachError::Incompatible(what) => what.what,
        error => panic!("{error}"),
    };
    assert_eq!(refused(other.domain()), "it belongs to another IOMMU");
    let config = rig.iommu.v1_config();
    let wide = dmaspan::io_pgtable::AmdV1Config { input_bits: 50, ..config };
    assert!(refused(rig.domain_of(wide)).contains("addresses"));
    let wide = dmaspan::io_pgtable::AmdV1Config { output_bits: 41, ..config };
    assert!(refused(rig.domain_of(wide)).contains("physical"));
    let dirty = dmaspan::io_pgtable::DirtyTracking::Hardware;
    let dirty = dmaspan::io_pgtable::AmdV1Config { dirty, ..config };
    assert!(refused(rig.domain_of(dirty)).contains("dirty bits"));
    stream.attach(paging(&rig.domain())).unwrap();
}

#[test]
fn streams_are_claimed_once_and_keep_interrupts_out_of_their_domains() {
    let Some(board) = Board::start() else { return };
    let config = AmdViConfig { last_device: 0x7f, ..board.config() };
    let rig = board.drive(config);
    let claim = |id| rig.iommu.stream::<Paging>(id, ReservedRegions::new());
    let port = claim(Pci::requester(WRITERS[0])).unwrap();
    let kinds: Vec<_> = port.reserved_regions().as_slice().iter().map(|r| r.kind).collect();
    assert_eq!(kinds, [RegionKind::Msi, RegionKind::Reserved]);
    let again = claim(Pci::requester(WRITERS[0])).unwrap_err();
    assert_eq!(again, Error::Claimed { stream: 0x20 });
    assert_eq!(claim(0x80).unwrap_err(), Error::NoStream { stream: 0x80, last: 0x7f });
    assert_eq!(claim(1 << 20).unwrap_err(), Error::NoStream { stream: 1 << 20, last: 0x7f });
    drop(port);
    claim(Pci::requester(WRITERS[0])).unwrap();
}

#[test]
fn domain_ids_come_back_with_their_domains() {
    let Some(board) = Board::start() else { return };
    let config = AmdViConfig { last_domain: 4, ..board.config() };
    let rig = board.drive(config);
    let stream = rig.stream(WRITERS[0]);
    for _ in 0..3 {
        let domain = rig.domain();
        let ops = rig.iommu.ops().unwrap();
        let none = rig.iommu.ops().unwrap_err();
        assert_eq!(none, Error::NoIds { what: "domain IDs", limit: 2 });
        stream.attach(paging(&domain)).unwrap();
        stream.detach().unwrap();
        drop((domain, ops));
    }
}

#[test]
fn a_register_block_without_hardware_is_refused() {
    let Some(board) = Board::start() else { return };
    let nobody = board.machine.mmio(0xfd00_0000_0000);
    let host = QemuHost::new(&board.machine);
    // SAFETY: nothing answers at that address.
    let error = unsafe { AmdVi::new(nobody, host, board.config()) }.unwrap_err();
    assert!(matches!(error, Error::Hardware(_)), "{error}");
}
