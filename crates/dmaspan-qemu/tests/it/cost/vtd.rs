//! QEMU's VT-d.

use std::sync::Arc;

use dmaspan::io_pgtable::{VtdSs, X86_64};
use dmaspan::iommu::ReservedRegions;
use dmaspan::{Coherency, IovaRange};
use dmaspan_drivers::vtd::{Mode, Stage, Vtd, VtdConfig, VtdFormat};
use dmaspan_qemu::{Arch, CommandQueue, Pci, QemuHost, Tap};

use crate::cost::bench::{Iommu, SLOT, Started, machine};
use crate::cost::fewest::{Forget, Hardware, Kind, covering, named};

type Driver = Vtd<Tap, QemuHost>;
/// Bits of physical addresses.
const HOST_BITS: u32 = 39;

/// Bits 3:0 of the first word, the type, and 5:4, the granularity: of the IOTLB (2) and of the
/// PASID-based IOTLB (6); the wait (5) (VT-d, 6.5.2.3, 6.5.2.4, 6.5.2.8).
fn kind(command: &[u64]) -> Kind {
    match (command[0] & 0xf, command[0] >> 4 & 3) {
        (2 | 6, 3) => Kind::Named,
        (2 | 6, 2) => Kind::All,
        (5, _) => Kind::Wait,
        _ => Kind::Other,
    }
}

/// VT-d (6.5.2.3, 6.5.2.4): a page-selective command covers 2^AM pages at an address that is
/// aligned to as many, AM up to CAP.MAMV, which is 18 in QEMU: a gibibyte. Up to 16 commands name
/// addresses; one that is domain-selective is fewer than more of them.
fn fewest(ranges: &[IovaRange], _: u32) -> Forget {
    named(ranges, 16, |pages| covering(pages, 18))
}

/// A machine whose VT-d has these properties, in that mode.
fn start<F: VtdFormat<Word = u64> + 'static>(
    name: &'static str,
    properties: &str,
    mode: Mode,
    (stage, format): (Stage, fn(&Driver) -> F),
) -> Option<Started> {
    let device = format!("intel-iommu,intremap=off,{properties}");
    let pci = machine(Arch::X86_64, "q35", &[&device])?;
    let tap = Tap::new(pci.machine(), pci.machine().mmio(0xfed9_0000), CommandQueue::VT_D);
    // The model says that it sees no caches, and has none.
    let walks = Some(Coherency::Coherent);
    let config = VtdConfig { mode: Some(mode), walks, ..VtdConfig::new(HOST_BITS) };
    let host = QemuHost::new(pci.machine());
    #[expect(unsafe_code, reason = "drives hardware")]
    // SAFETY: 1. The registers are the IOMMU's, and nobody else drives it. 2. The host's memory and
    // that of tables is the machine's RAM. 3. All devices of bus 0 are behind it.
    let driver: Result<Arc<Driver>, _> = unsafe { Vtd::new(tap.clone(), host, config) };
    let driver = driver.expect("hardware starts");
    let ops = driver.ops(stage).expect("numbers are left");
    let port = driver.stream(Pci::requester(SLOT), ReservedRegions::new()).expect("it is free");
    let bench = Iommu::new((&pci, &tap), format(&driver), ops, port, kind);
    Some((Box::new(bench), Hardware { name, fewest }))
}

fn second_stage(driver: &Driver) -> VtdSs {
    let config = driver.second_stage_config().expect("the model has the stage");
    VtdSs::new(config).expect("there are such tables")
}

fn first_stage(driver: &Driver) -> X86_64 {
    let config = driver.first_stage_config().expect("the model has the stage");
    X86_64::new(config).expect("there are such tables")
}

pub(crate) fn legacy() -> Option<Started> {
    start("VT-d, legacy", "aw-bits=48", Mode::Legacy, (Stage::Second, second_stage))
}

pub(crate) fn scalable_second_stage() -> Option<Started> {
    let name = "VT-d, scalable, second stage";
    start(name, "scalable-mode=on", Mode::Scalable, (Stage::Second, second_stage))
}

pub(crate) fn scalable_first_stage() -> Option<Started> {
    let name = "VT-d, scalable, first stage";
    start(name, "scalable-mode=on,fsts=on", Mode::Scalable, (Stage::First, first_stage))
}
