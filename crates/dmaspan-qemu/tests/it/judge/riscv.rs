//! QEMU's RISC-V IOMMU (riscv-iommu-pci).

use std::sync::Arc;

use dmaspan::io_pgtable::{Half, Riscv, RiscvStage};
use dmaspan::iommu::{FaultReason, ReservedRegions};
use dmaspan::lg2;
use dmaspan_drivers::Handled;
use dmaspan_drivers::riscv::{RiscvIommu, RiscvIommuConfig, RiscvOps, RiscvStream};
use dmaspan_qemu::{Arch, CommandQueue, Pci, QemuHost, Tap};
use dmaspan_sim::walker::riscv::{self as walker, RiscvWalker};
use dmaspan_sim::walker::{Requester, Switch};

use crate::judge::planted::Bug;
use crate::judge::rig::{DomainOf, Rig, machine};

/// Where the IOMMU itself is.
const SLOT: u8 = 3;

/// The first stage, or the second.
pub(crate) struct RiscvRig<const SECOND: bool> {
    pci: Pci,
    tap: Tap,
    iommu: Arc<RiscvIommu<Tap, QemuHost>>,
}

impl<const SECOND: bool> RiscvRig<SECOND> {
    const STAGE: RiscvStage =
        if SECOND { RiscvStage::Second } else { RiscvStage::First(Half::Lower) };
}

impl<const SECOND: bool> Rig for RiscvRig<SECOND> {
    type Format = Riscv;
    type Walker = RiscvWalker;
    type Ops = RiscvOps<Tap, QemuHost>;
    type Port = RiscvStream<DomainOf<Self>, Tap, QemuHost>;

    const NAME: &'static str = if SECOND { "RISC-V second stage" } else { "RISC-V first stage" };
    const SILENT_WHEN_CACHED: bool = true;
    /// Its IOTLB keeps 56 bits of an address, and Sv57x4 has 59.
    const REACH: u64 = lg2::mask(56);

    fn start() -> Option<Self> {
        let pci = machine(Arch::Riscv64, "virt", &[&format!("riscv-iommu-pci,addr={SLOT}")])?;
        let tap = Tap::new(
            pci.machine(),
            pci.enable(SLOT, 0).expect("it is there"),
            CommandQueue::RISC_V,
        );
        let host = QemuHost::new(pci.machine());
        #[expect(unsafe_code, reason = "drives hardware")]
        // SAFETY: 1. The registers are the IOMMU's, and nobody else drives it. 2. The host's memory
        // and that of tables is the machine's RAM. 3. All devices of bus 0 are behind it.
        let iommu = unsafe { RiscvIommu::new(tap.clone(), host, RiscvIommuConfig::default()) };
        Some(Self { pci, tap, iommu: iommu.expect("hardware starts") })
    }

    fn pci(&self) -> &Pci {
        &self.pci
    }

    fn tap(&self) -> &Tap {
        &self.tap
    }

    fn format(&self) -> Riscv {
        let config = self.iommu.config(Self::STAGE).expect("the model has both");
        Riscv::new(config).expect("there are such tables")
    }

    fn ops(&self) -> Self::Ops {
        self.iommu.ops(Self::STAGE).expect("numbers are left")
    }

    fn port(&self, slot: u8) -> Self::Port {
        self.iommu.stream(Pci::requester(slot), ReservedRegions::new()).expect("it is free")
    }

    fn handle_faults(&self) -> Handled {
        self.iommu.handle_faults().expect("hardware answers")
    }

    /// IOTINVAL with PSCID and GSCID, IODIR, and an IOFENCE that waits for nothing ("IOMMU
    /// Page-Table cache invalidation commands" and what follows).
    fn plant(bug: Bug, command: &mut [u64]) {
        match (bug, command[0] & 0x7f) {
            (Bug::NoInvalidation, 1) | (Bug::NoConfiguration, 3) => {
                command.copy_from_slice(&[2, 0]);
            }
            (Bug::WrongDomain, 1) => command[0] ^= 1 << 12 | 1 << 44,
            // Every second page of those that are named is forgotten.
            (Bug::TooNarrow, 1) if command[0] & 1 << 10 != 0 && command[1] & 1 << 10 != 0 => {
                command.copy_from_slice(&[2, 0]);
            }
            _ => {}
        }
    }

    /// A page fault has one cause, whatever the reason.
    fn read_only() -> FaultReason {
        FaultReason::Translation
    }

    fn walker(&self, domain: &DomainOf<Self>) -> Self::Walker {
        let atp = domain.format().registers(domain.root()).atp;
        let stage = match SECOND {
            true => walker::RiscvRoot::Second { iohgatp: atp },
            false => walker::RiscvRoot::First { fsc: atp & !(lg2::mask(16) << 44) },
        };
        let registers = walker::RiscvWalkRegisters {
            stage,
            updates: Switch::Off,
            svnapot: Switch::On,
            svpbmt: Switch::On,
            requester: Requester::User,
            sum: Switch::Off,
        };
        RiscvWalker::new(registers).expect("the format made the register")
    }
}
