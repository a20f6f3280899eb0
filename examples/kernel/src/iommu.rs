//! The IOMMUs that the kernel drives. One that is there blocks all devices that it serves, until
//! they are attached.

use alloc::format;
use alloc::sync::Arc;
use core::fmt;

use dmaspan::dma::DeviceConfig;
use dmaspan::io_pgtable::ArmLpaeS1;
use dmaspan::iommu::{FaultHandler, HardwareError, ReservedRegions};
use dmaspan_drivers::arm_smmu_v3::{OnFault, SmmuV3, SmmuV3Config, Stage};
use dmaspan_drivers::firmware::IommuKind;
use dmaspan_drivers::{FrameHost, Handled, MmioRegion};

use crate::Result;
use crate::glue::{Attached, Frames, Tables, attach, registers};
use crate::plant::{Plants, Tapped};

type Host = FrameHost<Frames>;

/// An IOMMU.
pub(crate) enum Iommu {
    SmmuV3(Arc<SmmuV3<MmioRegion, Host>>),
}

impl Iommu {
    /// Starts the IOMMU whose registers are at `base`.
    pub(crate) fn start(kind: IommuKind, base: u64, tables: &Tables) -> Result<Self> {
        let host = FrameHost::new(Arc::clone(tables));
        match kind {
            IommuKind::SmmuV3 => {
                let registers = registers(base, 0x2_0000);
                // SAFETY: nobody else drives it, and it sees RAM as the CPUs do.
                let smmu = unsafe { SmmuV3::new(registers, host, SmmuV3Config::default()) };
                Ok(Self::SmmuV3(smmu?))
            }
            other => Err(format!("the kernel has no driver of {other:?}").into()),
        }
    }

    /// Gives the stream a domain of its own.
    pub(crate) fn attach(
        &self,
        stream: u32,
        regions: ReservedRegions,
        config: DeviceConfig,
        faults: Arc<dyn FaultHandler>,
        (tables, plants): (&Tables, &Plants),
    ) -> Result<Attached> {
        match self {
            Self::SmmuV3(smmu) => {
                let format = ArmLpaeS1::<12>::new(smmu.stage1_config(12)?)?;
                let ops = Tapped::new(smmu.ops(Stage::First, OnFault::Terminate)?, plants);
                let port = smmu.stream(stream, regions)?;
                attach(tables, (format, ops, port), config, faults)
            }
        }
    }

    /// Reports what the IOMMU refused.
    pub(crate) fn handle_faults(&self) -> core::result::Result<Handled, HardwareError> {
        match self {
            Self::SmmuV3(smmu) => smmu.handle_faults(),
        }
    }
}

impl fmt::Display for Iommu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SmmuV3(smmu) => {
                let features = smmu.features();
                write!(f, "SMMUv3, {} bits of addresses", features.output_bits)
            }
        }
    }
}
