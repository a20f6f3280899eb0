//! Behind each IOMMU, by its driver: the controller reaches what is mapped for it, and no more.

use std::sync::Arc;

use dmaspan::dma::{Device, DeviceConfig, NoPool};
use dmaspan_qemu::{Machine, Pci};

use crate::iommus::{self, Behind, DomainOf, Iommu};
use crate::nvme::disk::Disk;
use crate::nvme::exercise::exercise;
use crate::nvme::rig::{DISK_BYTES, NVME, Rig, SLOT};
use crate::nvme::unmapped;

const RAM: u64 = 128 << 20;

/// A machine whose controller is behind an IOMMU.
pub(crate) struct Setup<I: Iommu> {
    pub(crate) behind: Behind<I>,
    pci: Pci,
    machine: Machine,
    disk: Disk,
}

impl<I: Iommu> Setup<I> {
    fn new() -> Option<Self> {
        let disk = Disk::new(DISK_BYTES);
        let drive = disk.drive();
        let machine = iommus::machine::<I>(|builder| {
            builder.ram(RAM).arg("-drive").arg(&drive).device(NVME)
        })?;
        let pci = Pci::new(&machine);
        let behind = Behind::<I>::new(&pci, SLOT);
        Some(Self { behind, pci, machine, disk })
    }

    fn device(&self) -> Device<DomainOf<I>, NoPool> {
        let domain = Arc::clone(&self.behind.domain);
        Device::new(domain, NoPool, DeviceConfig::bits(64)).unwrap()
    }

    /// The controller, started.
    pub(crate) fn rig(&self) -> Rig<'_, DomainOf<I>> {
        Rig::new(&self.machine, &self.pci, &self.disk, self.device())
    }

    fn exercise(&self) {
        exercise(&self.machine, &self.pci, &self.disk, self.device());
        self.behind.no_faults();
    }
}

macro_rules! behind {
    ($($name:ident is $iommu:ident,)*) => {$(
        mod $name {
            use super::*;

            fn with(test: impl FnOnce(&Setup<iommus::$iommu>)) {
                if let Some(setup) = Setup::new() {
                    test(&setup);
                }
            }

            #[test]
            fn scattered_buffers_are_read_and_written_without_a_fault() {
                with(Setup::exercise);
            }

            #[test]
            fn pages_amid_a_list_that_were_unmapped_are_neither_read_nor_written() {
                with(unmapped::amid_a_list);
            }

            #[test]
            fn a_command_whose_list_was_unmapped_fails_and_changes_nothing() {
                with(unmapped::lists);
            }

            #[test]
            fn a_completion_queue_that_was_unmapped_is_not_written() {
                with(unmapped::completions);
            }

            #[test]
            fn a_detached_controller_does_nothing_and_works_when_attached_again() {
                with(unmapped::detached);
            }
        }
    )*};
}

behind! {
    smmu_v3_stage_1 is SmmuV3Stage1,
    smmu_v3_stage_2 is SmmuV3Stage2,
    vtd_legacy is VtdLegacy,
    vtd_scalable_first_stage is VtdFirstStage,
    vtd_scalable_second_stage is VtdSecondStage,
    amd_vi is AmdVi,
    riscv_first_stage is RiscvFirst,
    riscv_second_stage is RiscvSecond,
}
