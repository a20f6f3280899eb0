//! QEMU's AMD-Vi.

use std::sync::Arc;

use dmaspan::io_pgtable::AmdV1;
use dmaspan::iommu::{FaultReason, ReservedRegions};
use dmaspan_drivers::Handled;
use dmaspan_drivers::amd_vi::{AmdVi, AmdViConfig, AmdViOps, AmdViStream};
use dmaspan_qemu::{Arch, CommandQueue, Pci, QemuHost, Tap};
use dmaspan_sim::walker::amd_v1::{AmdV1WalkRegisters, AmdV1Walker};

use crate::judge::planted::Bug;
use crate::judge::rig::{DomainOf, Rig, machine};

/// The class of an IOMMU, and its capability (48882, 3.1, 3.2).
const CLASS: u32 = 0x08_0600;
const CAPABILITY: u8 = 0x0f;

/// Tables of version 1.
pub(crate) struct AmdViRig {
    pci: Pci,
    tap: Tap,
    iommu: Arc<AmdVi<Tap, QemuHost>>,
}

impl Rig for AmdViRig {
    type Format = AmdV1;
    type Walker = AmdV1Walker;
    type Ops = AmdViOps<Tap, QemuHost>;
    type Port = AmdViStream<DomainOf<Self>, Tap, QemuHost>;

    const NAME: &'static str = "AMD-Vi";
    /// It says 0 (and `a_fault_names_its_address_or_none` says when it does better).
    const NAMES_ADDRESSES: bool = false;

    fn start() -> Option<Self> {
        let pci = machine(Arch::X86_64, "q35", &["amd-iommu,dma-remap=on"])?;
        let slot = pci.find_class(CLASS).expect("it is on bus 0");
        let block = pci.capability(slot, CAPABILITY).expect("it has its capability");
        let (header, miscellaneous) = (pci.read(slot, block), pci.read(slot, block + 0x10));
        let config = AmdViConfig::new(header, miscellaneous);
        let tap = Tap::new(pci.machine(), pci.machine().mmio(0xfed8_0000), CommandQueue::AMD_VI);
        let host = QemuHost::new(pci.machine());
        #[expect(unsafe_code, reason = "drives hardware")]
        // SAFETY: 1. The registers are the IOMMU's, and nobody else drives it. 2. The host's memory
        // and that of tables is the machine's RAM. 3. All devices of bus 0 are behind it.
        let iommu = unsafe { AmdVi::new(tap.clone(), host, config) };
        Some(Self { pci, tap, iommu: iommu.expect("hardware starts") })
    }

    fn pci(&self) -> &Pci {
        &self.pci
    }

    fn tap(&self) -> &Tap {
        &self.tap
    }

    fn format(&self) -> AmdV1 {
        AmdV1::new(self.iommu.v1_config()).expect("there are such tables")
    }

    fn ops(&self) -> Self::Ops {
        self.iommu.ops().expect("numbers are left")
    }

    fn port(&self, slot: u8) -> Self::Port {
        self.iommu.stream(Pci::requester(slot), ReservedRegions::new()).expect("it is free")
    }

    fn handle_faults(&self) -> Handled {
        self.iommu.handle_faults().expect("hardware answers")
    }

    /// INVALIDATE_DEVTAB_ENTRY, INVALIDATE_IOMMU_PAGES and its domain, and a COMPLETION_WAIT that
    /// stores nothing (48882, 2.4).
    fn plant(bug: Bug, command: &mut [u64]) {
        let nothing = [1 << 60, 0];
        match (bug, command[0] >> 60) {
            (Bug::NoInvalidation, 3) | (Bug::NoConfiguration, 2) => {
                command.copy_from_slice(&nothing);
            }
            (Bug::WrongDomain, 3) => command[0] ^= 1 << 32,
            _ => {}
        }
    }

    /// The model never says that something is mapped there (48882, 2.5.3, PR).
    fn read_only() -> FaultReason {
        FaultReason::Translation
    }

    fn walker(&self, domain: &DomainOf<Self>) -> Self::Walker {
        let (root, level) = domain.root_and_level();
        let dte = domain.format().registers(root, level).dte;
        AmdV1Walker::new(AmdV1WalkRegisters { dte }).expect("the format made the entry")
    }
}
