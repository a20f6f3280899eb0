//! Without an IOMMU: the controller uses physical addresses.

use std::sync::Arc;

use dmaspan::Span;
use dmaspan::dma::{Device, DeviceConfig, Direct, NoPool, Registered};
use dmaspan::platform::OneThread;
use dmaspan_qemu::{Arch, Machine, Pci, ready};

use crate::nvme::disk::Disk;
use crate::nvme::exercise::exercise;
use crate::nvme::rig::{DISK_BYTES, NVME};

fn run(arch: Arch, machine: &str, namespace: &str) {
    let Some(qemu) = ready(arch) else { return };
    let disk = Disk::new(DISK_BYTES);
    let builder = Machine::builder(qemu, machine).arg("-drive").arg(&disk.drive());
    let machine = builder.device(&format!("{NVME}{namespace}")).start().unwrap();
    let ram = Span::new(machine.ram().base(), machine.ram().bytes()).unwrap();
    let direct = Arc::new(Direct::<Registered, _>::new(ram, OneThread));
    let device = Device::new(direct, NoPool, DeviceConfig::bits(64)).unwrap();
    exercise(&machine, &Pci::new(&machine), &disk, device);
}

#[test]
fn a_pc_reads_and_writes() {
    run(Arch::X86_64, "q35", "");
}

#[test]
fn an_arm_machine_reads_and_writes() {
    run(Arch::Aarch64, "virt", "");
}

#[test]
fn a_riscv_machine_reads_and_writes() {
    run(Arch::Riscv64, "virt", "");
}

#[test]
fn blocks_of_4_kib_are_read_and_written() {
    run(Arch::Aarch64, "virt", ",logical_block_size=4096,physical_block_size=4096");
}
