//! QEMU's SMMUv3.

use std::sync::Arc;

use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2, ArmLpaeS2Config, Format as _};
use dmaspan::iommu::{FaultReason, ReservedRegions};
use dmaspan::lg2;
use dmaspan_drivers::Handled;
use dmaspan_drivers::arm_smmu_v3::{OnFault, SmmuV3, SmmuV3Config, SmmuV3Ops, SmmuV3Stream, Stage};
use dmaspan_qemu::{Arch, CommandQueue, Pci, QemuHost, Tap};
use dmaspan_sim::walker::arm_lpae::{ArmLpaeS1Walker, ArmLpaeS2Walker, ArmS2WalkRegisters};

use crate::judge::planted::Bug;
use crate::judge::rig::{DomainOf, Rig, machine};

const NUM: u64 = 0x1f << 12;

/// The machine, and the driver of its SMMU.
pub(crate) struct Machine {
    pci: Pci,
    tap: Tap,
    smmu: Arc<SmmuV3<Tap, QemuHost>>,
}

impl Machine {
    fn start() -> Option<Self> {
        let pci = machine(Arch::Aarch64, "virt,iommu=smmuv3", &[])?;
        let tap = Tap::new(pci.machine(), pci.machine().mmio(0x0905_0000), CommandQueue::SMMU_V3);
        let host = QemuHost::new(pci.machine());
        #[expect(unsafe_code, reason = "drives hardware")]
        // SAFETY: 1. The registers are the SMMU's, and nobody else drives it. 2. The host's memory
        // and that of tables is the machine's RAM. 3. All devices of bus 0 are behind it.
        let smmu = unsafe { SmmuV3::new(tap.clone(), host, SmmuV3Config::default()) };
        Some(Self { pci, tap, smmu: smmu.expect("hardware starts") })
    }
}

/// Opcodes of CFGI_STE to CFGI_CD_ALL and of TLBI commands, ASID and VMID, NUM of a range, and a
/// CMD_SYNC that signals nothing (IHI 0070, 4.3, 4.4, 4.7).
fn plant(bug: Bug, command: &mut [u64]) {
    let configuration = (0x03..=0x06).contains(&(command[0] & 0xff));
    let invalidation = (0x10..=0x30).contains(&(command[0] & 0xff));
    match bug {
        Bug::NoInvalidation if invalidation => command.copy_from_slice(&[0x46, 0]),
        Bug::NoConfiguration if configuration => command.copy_from_slice(&[0x46, 0]),
        Bug::WrongDomain if invalidation => command[0] ^= 1 << 48 | 1 << 32,
        Bug::TooNarrow if invalidation && command[0] & NUM != 0 => command[0] -= 1 << 12,
        _ => {}
    }
}

/// What both stages have in common; an STE that aborts is silent (IHI 0070, 5.2, Config).
macro_rules! common {
    ($stage:expr) => {
        type Ops = SmmuV3Ops<Tap, QemuHost>;
        type Port = SmmuV3Stream<DomainOf<Self>, Tap, QemuHost>;

        fn start() -> Option<Self> {
            Machine::start().map(Self)
        }

        fn pci(&self) -> &Pci {
            &self.0.pci
        }

        fn tap(&self) -> &Tap {
            &self.0.tap
        }

        fn ops(&self) -> Self::Ops {
            self.0.smmu.ops($stage, OnFault::Terminate).expect("numbers are left")
        }

        fn port(&self, slot: u8) -> Self::Port {
            self.0.smmu.stream(Pci::requester(slot), ReservedRegions::new()).expect("it is free")
        }

        fn handle_faults(&self) -> Handled {
            self.0.smmu.handle_faults().expect("hardware answers")
        }

        fn plant(bug: Bug, command: &mut [u64]) {
            plant(bug, command);
        }

        fn blocked() -> Option<FaultReason> {
            None
        }
    };
}

/// Stage 1 with a granule of `2^G` bytes.
pub(crate) struct Stage1<const G: u32>(Machine);

impl<const G: u32> Rig for Stage1<G> {
    type Format = ArmLpaeS1<G>;
    type Walker = ArmLpaeS1Walker;

    const NAME: &'static str = match G {
        12 => "SMMUv3 stage 1, 4K",
        14 => "SMMUv3 stage 1, 16K",
        _ => "SMMUv3 stage 1, 64K",
    };

    common!(Stage::First);

    fn format(&self) -> ArmLpaeS1<G> {
        let config = self.0.smmu.stage1_config(G).expect("the model has all granules");
        let singles = ArmLpaeS1::<G>::new(config).expect("there are such tables");
        let page_sizes = singles.geometry().page_sizes | ArmLpaeS1::<G>::CONTIGUOUS_SIZES;
        let config = ArmLpaeS1Config { page_sizes: Some(page_sizes), ..config };
        ArmLpaeS1::new(config).expect("there are such groups")
    }

    fn walker(&self, domain: &DomainOf<Self>) -> Self::Walker {
        let registers = domain.format().registers(domain.root());
        ArmLpaeS1Walker::new(registers.into()).expect("the format made the registers")
    }
}

/// Stage 2 with a granule of `2^G` bytes.
pub(crate) struct Stage2<const G: u32>(Machine);

impl<const G: u32> Rig for Stage2<G> {
    type Format = ArmLpaeS2<G>;
    type Walker = ArmLpaeS2Walker;

    const NAME: &'static str = match G {
        12 => "SMMUv3 stage 2, 4K",
        14 => "SMMUv3 stage 2, 16K",
        _ => "SMMUv3 stage 2, 64K",
    };
    const SILENT_WHEN_CACHED: bool = true;
    /// Of a root of several tables, one behind the other, it finds the first alone.
    const REACH: u64 = if G == 16 { lg2::mask(42) } else { u64::MAX };

    common!(Stage::Second);

    fn format(&self) -> ArmLpaeS2<G> {
        let config = self.0.smmu.stage2_config(G).expect("the model has all granules");
        let singles = ArmLpaeS2::<G>::new(config).expect("there are such tables");
        let page_sizes = singles.geometry().page_sizes | ArmLpaeS2::<G>::CONTIGUOUS_SIZES;
        let config = ArmLpaeS2Config { page_sizes: Some(page_sizes), ..config };
        ArmLpaeS2::new(config).expect("there are such groups")
    }

    fn walker(&self, domain: &DomainOf<Self>) -> Self::Walker {
        let registers = domain.format().registers(domain.root());
        let (vttbr, vtcr) = (registers.vttbr, registers.vtcr);
        let registers = ArmS2WalkRegisters { vttbr, vtcr, ..ArmS2WalkRegisters::default() };
        ArmLpaeS2Walker::new(registers).expect("the format made the registers")
    }
}
