//! Where QEMU 11.1's model falls short of the manual. A test that fails here says that a newer one
//! does better, and that more can be asked of it.

use dmaspan::Prot;

use crate::rig::{Faults, INVALIDATE_PAGES, Rig, WRITERS, map, opcode, paging, unmap};

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
