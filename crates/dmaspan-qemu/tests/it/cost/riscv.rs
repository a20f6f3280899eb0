//! QEMU's RISC-V IOMMU (riscv-iommu-pci).

use dmaspan::IovaRange;
use dmaspan::io_pgtable::{Half, Riscv, RiscvStage};
use dmaspan::iommu::ReservedRegions;
use dmaspan_drivers::riscv::{RiscvIommu, RiscvIommuConfig};
use dmaspan_qemu::{Arch, CommandQueue, Pci, QemuHost, Tap};

use crate::cost::bench::{Iommu, SLOT, Started, machine};
use crate::cost::fewest::{Fewest, Forget, Hardware, Kind, Pages, covering, named};

/// Where the IOMMU itself is.
const IOMMU: u8 = 3;

/// Bits 6:0 of the first word: IOTINVAL, with an address where bit 10 says so, and IOFENCE
/// ("Command-Queue").
fn kind(command: &[u64]) -> Kind {
    match (command[0] & 0x7f, command[0] >> 10 & 1) {
        (1, 1) => Kind::Named,
        (1, _) => Kind::All,
        (2, _) => Kind::Wait,
        _ => Kind::Other,
    }
}

/// RISC-V ("IOTINVAL.VMA operands and operations"): a command names one address or none. Tables
/// that went, as those of a gibibyte, are forgotten without an address alone (AV is 0).
fn fewest(ranges: &[IovaRange], _: u32) -> Forget {
    named(ranges, 32, Pages::count)
}

/// The same with ranges (S) and tables by address (NL): a command names a block of any power of
/// two. Two of them cover any range with less than twice its bytes, and a gibibyte is one.
fn fewest_blocks(ranges: &[IovaRange], _: u32) -> Forget {
    named(ranges, 32, |pages| covering(pages, 52))
}

/// `capabilities`, and what the model does not have of it: S and NL.
const CAPABILITIES: u64 = 0;
const RANGES: u64 = 1 << 43 | 1 << 42;

/// Makes of a command for hardware with ranges what the model understands: it forgets all of the
/// domain where a range is named.
fn without_ranges(command: &mut [u64]) {
    if command[0] & 0x7f == 1 {
        command[0] &= !(1 << 34);
        if command[1] & 1 << 9 != 0 {
            command[0] &= !(1 << 10);
            command[1] = 0;
        }
    }
}

fn start(
    name: &'static str,
    stage: RiscvStage,
    (fewest, has_ranges): (Fewest, bool),
) -> Option<Started> {
    let pci = machine(Arch::Riscv64, "virt", &[&format!("riscv-iommu-pci,addr={IOMMU}")])?;
    let tap =
        Tap::new(pci.machine(), pci.enable(IOMMU, 0).expect("it is there"), CommandQueue::RISC_V);
    if has_ranges {
        tap.set_also(CAPABILITIES, RANGES);
        tap.set_edit(Some(Box::new(without_ranges)));
    }
    let host = QemuHost::new(pci.machine());
    #[expect(unsafe_code, reason = "drives hardware")]
    // SAFETY: 1. The registers are the IOMMU's, and nobody else drives it. 2. The host's memory and
    // that of tables is the machine's RAM. 3. All devices of bus 0 are behind it.
    let iommu = unsafe { RiscvIommu::new(tap.clone(), host, RiscvIommuConfig::default()) };
    let iommu = iommu.expect("hardware starts");
    let config = iommu.config(stage).expect("the model has both");
    let format = Riscv::new(config).expect("there are such tables");
    let ops = iommu.ops(stage).expect("numbers are left");
    let port = iommu.stream(Pci::requester(SLOT), ReservedRegions::new()).expect("it is free");
    let bench = Iommu::new((&pci, &tap), format, ops, port, kind);
    Some((Box::new(bench), Hardware { name, fewest }))
}

pub(crate) fn first_stage() -> Option<Started> {
    start("RISC-V, first stage", RiscvStage::First(Half::Lower), (fewest, false))
}

pub(crate) fn second_stage() -> Option<Started> {
    start("RISC-V, second stage", RiscvStage::Second, (fewest, false))
}

pub(crate) fn first_stage_with_ranges() -> Option<Started> {
    start("RISC-V, first stage, ranges", RiscvStage::First(Half::Lower), (fewest_blocks, true))
}

pub(crate) fn second_stage_with_ranges() -> Option<Started> {
    start("RISC-V, second stage, ranges", RiscvStage::Second, (fewest_blocks, true))
}
