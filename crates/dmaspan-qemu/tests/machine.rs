//! The harness itself: machines of all architectures, without an IOMMU.

use dmaspan::PhysAddr;
use dmaspan_drivers::Mmio as _;
use dmaspan_qemu::{Arch, Edu, Machine, Pci, PciError, TestDev, ready};
use dmaspan_sim::bus::Bus as _;

fn kind(arch: Arch) -> &'static str {
    if arch == Arch::X86_64 { "q35" } else { "virt" }
}

#[test]
fn devices_write_and_read_the_memory_of_each_machine() {
    for arch in [Arch::Aarch64, Arch::Riscv64, Arch::X86_64] {
        let Some(qemu) = ready(arch) else { return };
        let machine = Machine::builder(qemu, kind(arch))
            .device("iommu-testdev,addr=2")
            .device("edu,addr=3,dma_mask=0xffffffffffffffff")
            .start()
            .unwrap();
        let pci = Pci::new(&machine);
        let mut writer = TestDev::new(&pci, 2).unwrap();
        let mut copier = Edu::new(&pci, 3).unwrap();
        let [from, to] = [0, 1].map(|_| machine.ram().allocate(4096).unwrap());
        writer.write(from.paddr().get(), from.paddr(), 8).unwrap();
        assert_eq!((from.word(0), from.word(1)), (0x1234_5678_1234_5678, 0));
        let text = b"what a device reads";
        machine.ram().write(from.paddr().wrapping_add(13), text).unwrap();
        copier.read(from.paddr().get() + 13, text.len() as u64);
        copier.write(to.paddr().get() + 5, text.len() as u64);
        let mut read = [0; 19];
        machine.ram().read(to.paddr().wrapping_add(5), &mut read).unwrap();
        assert_eq!(&read, text, "{arch:?}");
        assert!(!machine.is_gone());
    }
}

#[test]
fn a_slot_without_the_device_says_what_is_there() {
    let Some(qemu) = ready(Arch::Aarch64) else { return };
    let machine = Machine::builder(qemu, "virt").device("edu,addr=3").start().unwrap();
    let pci = Pci::new(&machine);
    let other = PciError::Other { slot: 3, id: 0x11e8_1234, expected: 0x0005_1b36 };
    assert_eq!(TestDev::new(&pci, 3).unwrap_err(), other);
    assert_eq!(TestDev::new(&pci, 4).unwrap_err(), PciError::Empty { slot: 4 });
    assert_eq!(pci.enable(3, 1).unwrap_err(), PciError::NoBar { slot: 3, bar: 1 });
}

#[test]
fn a_machine_that_does_not_start_says_why() {
    let Some(qemu) = ready(Arch::X86_64) else { return };
    let error = Machine::builder(qemu, "q35").device("no-such-device").start().unwrap_err();
    assert!(error.to_string().contains("no-such-device' is not a valid device model"), "{error}");
}

#[test]
fn a_machine_that_has_ended_reads_all_ones() {
    let Some(qemu) = ready(Arch::Riscv64) else { return };
    let machine = Machine::builder(qemu, "virt").start().unwrap();
    // The device that ends a machine (sifive_test): "pass".
    machine.mmio(0x10_0000).write32(0, 0x5555);
    let registers = machine.mmio(0x1000_0000);
    for _ in 0..1000 {
        registers.read32(0);
    }
    assert!(machine.is_gone());
    assert_eq!((registers.read32(0), registers.read64(0)), (u32::MAX, u64::MAX));
}

#[test]
fn memory_is_handed_out_once_and_comes_back() {
    let Some(qemu) = ready(Arch::Aarch64) else { return };
    let machine = Machine::builder(qemu, "virt").ram(32 << 20).start().unwrap();
    let ram = machine.ram();
    let first = ram.allocate(5000).unwrap();
    assert_eq!(first.paddr().get() % 8192, 0);
    assert_eq!(first.words().len(), 1024);
    let at = first.paddr();
    first.set_word(0, 7);
    drop(first);
    let again = ram.allocate(8192).unwrap();
    assert_eq!((again.paddr(), again.word(0)), (at, 0));
    assert!(ram.allocate(64 << 20).is_err());
    assert!(ram.arena(32 << 20).is_err());
    assert!(ram.words_at(PhysAddr::new(0), 8).is_empty());
    let end = ram.base().wrapping_add(ram.bytes());
    assert!(ram.words_at(end, 8).is_empty());
    assert!(ram.words_at(PhysAddr::new(u64::MAX - 7), 16).is_empty());
}
