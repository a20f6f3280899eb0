//! The IOMMUs that the kernel drives. One that is there blocks all devices that it serves, until
//! they are attached.

use alloc::format;
use alloc::sync::Arc;
use core::fmt;

use dmaspan::Coherency;
use dmaspan::dma::DeviceConfig;
use dmaspan::io_pgtable::{AmdV1, ArmLpaeS1, Half, Riscv, RiscvStage, VtdSs};
use dmaspan::iommu::{FaultHandler, HardwareError, ReservedRegions};
use dmaspan_drivers::amd_vi::{AmdVi, AmdViConfig};
use dmaspan_drivers::arm_smmu_v3::{OnFault, SmmuV3, SmmuV3Config, Stage};
use dmaspan_drivers::firmware::IommuKind;
use dmaspan_drivers::riscv::{RiscvIommu, RiscvIommuConfig};
use dmaspan_drivers::vtd::{self, Vtd, VtdConfig};
use dmaspan_drivers::{FrameHost, Handled, MmioRegion};

use crate::Result;
use crate::glue::{Attached, Frames, Memory, attach};
use crate::memory::registers;
use crate::plant::{Plants, Tapped};

type Host = FrameHost<Frames>;

/// An IOMMU.
pub(crate) enum Iommu {
    SmmuV3(Arc<SmmuV3<MmioRegion, Host>>),
    Riscv(Arc<RiscvIommu<MmioRegion, Host>>),
    Vtd(Arc<Vtd<MmioRegion, Host>>),
    AmdVi(Arc<AmdVi<MmioRegion, Host>>),
}

/// What firmware and PCI say of one.
#[derive(Clone, Copy)]
pub(crate) struct Found {
    pub(crate) kind: IommuKind,
    /// Where its registers are.
    pub(crate) base: u64,
    /// How many bits a physical address has, at most.
    pub(crate) address_bits: u32,
    /// The two words of its capability on PCI that its driver wants, where it is one of AMD's.
    pub(crate) capability: Option<(u32, u32)>,
}

impl Iommu {
    /// Starts an IOMMU.
    pub(crate) fn start(found: Found, memory: &Memory) -> Result<Self> {
        let host = FrameHost::new(Arc::clone(&memory.tables));
        let Found { kind, base, address_bits, capability } = found;
        match (kind, capability) {
            (IommuKind::SmmuV3, _) => {
                let registers = registers(base, 0x2_0000);
                // SAFETY: nobody else drives it, and it sees RAM as the CPUs do.
                let smmu = unsafe { SmmuV3::new(registers, host, SmmuV3Config::default()) };
                Ok(Self::SmmuV3(smmu?))
            }
            (IommuKind::Riscv, _) => {
                let registers = registers(base, 0x1000);
                // SAFETY: as above.
                let iommu =
                    unsafe { RiscvIommu::new(registers, host, RiscvIommuConfig::default()) };
                Ok(Self::Riscv(iommu?))
            }
            (IommuKind::Vtd, _) => {
                // QEMU's says that it does not see caches, of which it has none.
                let walks = Some(Coherency::Coherent);
                let config = VtdConfig { walks, ..VtdConfig::new(address_bits) };
                let registers = registers(base, 0x1000);
                // SAFETY: as above.
                let vtd = unsafe { Vtd::new(registers, host, config) };
                Ok(Self::Vtd(vtd?))
            }
            (IommuKind::AmdVi, Some((capability, miscellaneous))) => {
                let config = AmdViConfig::new(capability, miscellaneous);
                let registers = registers(base, 0x4000);
                // SAFETY: as above; all devices are in its table.
                let amd = unsafe { AmdVi::new(registers, host, config) };
                Ok(Self::AmdVi(amd?))
            }
            (other, _) => Err(format!("the kernel cannot drive an IOMMU of {other:?}").into()),
        }
    }

    /// Gives the stream a domain of its own.
    pub(crate) fn attach(
        &self,
        stream: u32,
        mut regions: ReservedRegions,
        config: DeviceConfig,
        faults: Arc<dyn FaultHandler>,
        (memory, plants): (&Memory, &Plants),
    ) -> Result<Attached> {
        match self {
            Self::SmmuV3(smmu) => {
                let format = ArmLpaeS1::<12>::new(smmu.stage1_config(12)?)?;
                let ops = Tapped::new(smmu.ops(Stage::First, OnFault::Terminate)?, plants);
                let port = smmu.stream(stream, regions)?;
                attach(memory, (format, ops, port), config, faults)
            }
            Self::Riscv(iommu) => {
                // By the first stage, or the second where there is no other.
                let stage = RiscvStage::First(Half::Lower);
                let stage = iommu.config(stage).map_or(RiscvStage::Second, |_| stage);
                let format = Riscv::new(iommu.config(stage)?)?;
                let ops = Tapped::new(iommu.ops(stage)?, plants);
                let port = iommu.stream(stream, regions)?;
                attach(memory, (format, ops, port), config, faults)
            }
            Self::Vtd(vtd) => {
                vtd::reserved_regions().try_for_each(|region| regions.insert(region))?;
                let format = VtdSs::new(vtd.second_stage_config()?)?;
                let ops = Tapped::new(vtd.ops(Stage::Second)?, plants);
                let port = vtd.stream(stream, regions)?;
                attach(memory, (format, ops, port), config, faults)
            }
            Self::AmdVi(amd) => {
                let format = AmdV1::new(amd.v1_config())?;
                let ops = Tapped::new(amd.ops()?, plants);
                let port = amd.stream(stream, regions)?;
                attach(memory, (format, ops, port), config, faults)
            }
        }
    }

    /// Reports what the IOMMU refused.
    pub(crate) fn handle_faults(&self) -> core::result::Result<Handled, HardwareError> {
        match self {
            Self::SmmuV3(smmu) => smmu.handle_faults(),
            Self::Riscv(iommu) => iommu.handle_faults(),
            Self::Vtd(vtd) => vtd.handle_faults(),
            Self::AmdVi(amd) => amd.handle_faults(),
        }
    }
}

impl fmt::Display for Iommu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SmmuV3(_) => "SMMUv3",
            Self::Riscv(_) => "RISC-V IOMMU",
            Self::Vtd(_) => "VT-d",
            Self::AmdVi(_) => "AMD-Vi",
        })
    }
}
