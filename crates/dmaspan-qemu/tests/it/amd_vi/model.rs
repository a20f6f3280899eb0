//! Limits of QEMU 11.1's model against the manual. A test that fails here says that a newer model
//! does better, and that more can be asked of it.

use dmaspan::Prot;
use dmaspan_drivers::Mmio as _;

use crate::amd_vi::rig::{
    Board, Faults, INVALIDATE_PAGES, REGISTERS, Rig, WRITERS, map, opcode, paging, unmap,
};

#[test]
fn a_page_that_is_forgotten_takes_all_of_its_domain_along() {
    let Some(rig) = Rig::start() else { return };
    let ram = rig.board.machine.ram();
    let [kept, gone] = [0, 1].map(|_| ram.allocate(0x1000).unwrap());
    let (stream, mut device) = (rig.stream(WRITERS[0]), rig.board.writer(0));
    let domain = rig.domain();
    stream.attach(paging(&domain)).unwrap();
    map(&domain, 0x1000, gone.span(), Prot::READ_WRITE);
    device.write(0x1000, gone.paddr(), 4).unwrap();
    // An invalidation of any other page does for this one: which range a command names is not
    // judged by the model, but by the fake hardware of dmaspan-drivers.
    rig.board.tap.set_edit(Some(Box::new(|command| {
        if opcode(command) == INVALIDATE_PAGES {
            command[1] = 0x5000_0000;
        }
    })));
    unmap(&domain, 0x1000, 0x1000);
    rig.board.tap.set_edit(None);
    device.write(0x1000, kept.paddr(), 4).unwrap_err();
}

#[test]
fn a_fault_names_its_address_or_none() {
    let Some(rig) = Rig::start() else { return };
    let (stream, mut device) = (rig.stream(WRITERS[0]), rig.board.writer(0));
    let faults = Faults::of(&stream);
    stream.attach(paging(&rig.domain())).unwrap();
    device.write(0x7000, rig.board.machine.ram().base(), 4).unwrap_err();
    rig.iommu.handle_faults().unwrap();
    let [report] = faults.take()[..] else { panic!("one fault") };
    assert!([0, 0x7000].contains(&report.iova.get()), "{report:x?}");
    println!("QEMU says of a fault at 0x7000 that it was at {}", report.iova);
}

#[test]
fn without_dma_remap_everything_passes_and_no_register_says_so() {
    let boards = ["on", "off"].map(|remaps| Board::with(&format!("amd-iommu,dma-remap={remaps}")));
    let [Some(remaps), Some(passes)] = boards else { return };
    let config = passes.config();
    assert_eq!(config, remaps.config());
    let said = |board: &Board, at| board.machine.mmio(REGISTERS).read64(at);
    for at in (0..0x4000).step_by(8) {
        assert_eq!(said(&passes, at), said(&remaps, at), "{at:#x}");
    }
    for (board, blocks) in [(remaps, true), (passes, false)] {
        let rig = board.drive(config);
        let page = rig.board.machine.ram().allocate(0x1000).unwrap();
        let (_blocked, mut device) = (rig.stream(WRITERS[0]), rig.board.writer(0));
        let written = device.write(page.paddr().get(), page.paddr(), 4);
        assert_eq!(written.is_err(), blocks);
        // Nor afterwards.
        assert_eq!(rig.iommu.handle_faults().unwrap().reported, u32::from(blocks));
    }
}
