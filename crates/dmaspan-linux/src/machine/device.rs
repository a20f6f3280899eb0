//! The IOMMU of a device, as far as sysfs tells.

use std::fs;

use dmaspan::{Iova, IovaRange};

use super::MachineFiles;
use crate::pci::Bdf;
use crate::plan::forecast::{IommuModel, PaperIommu, ReservedIovas};

/// The reason why nobody knows the IOMMU of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceIommuError {
    /// There is no such device.
    #[error("there is no PCI function {bdf}: `dmaspan devices` lists those that there are")]
    NoDevice {
        /// Which.
        bdf: Bdf,
    },
    /// No IOMMU translates for it.
    #[error(
        "no IOMMU translates for {bdf}: switch it on (`dmaspan devices {bdf}` says how), or name \
         one with --iommu"
    )]
    NoIommu {
        /// Which device.
        bdf: Bdf,
    },
    /// The IOMMU is of a kind that is not known.
    #[error("the IOMMU of {bdf} is of an unknown kind: name one with --iommu")]
    Unknown {
        /// Which device.
        bdf: Bdf,
    },
}

impl MachineFiles {
    /// The IOMMU that translates for a device: its kind and reserved regions, and of VT-d also its
    /// address bits and leaves.
    ///
    /// # Errors
    ///
    /// [`DeviceIommuError`].
    pub fn iommu_of(&self, bdf: Bdf) -> Result<PaperIommu, DeviceIommuError> {
        let folder = format!("sys/bus/pci/devices/{bdf}");
        if !self.path(&folder).exists() {
            return Err(DeviceIommuError::NoDevice { bdf });
        }
        let link = fs::read_link(self.path(format!("{folder}/iommu")));
        let link = link.map_err(|_| DeviceIommuError::NoIommu { bdf })?;
        let name = link.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let kind = kind(&name).ok_or(DeviceIommuError::Unknown { bdf })?;
        let mut iommu = PaperIommu::new(kind);
        if let Some(cap) = self.text(format!("{folder}/iommu/intel-iommu/cap")) {
            iommu = with_capabilities(iommu, &cap);
        }
        if let Some(text) = self.text(format!("{folder}/iommu_group/reserved_regions")) {
            iommu.reserved = text.lines().filter_map(reserved).collect();
        }
        Ok(iommu)
    }
}

/// The kind by the name that a driver gives its instances in `/sys/class/iommu`.
fn kind(name: &str) -> Option<IommuModel> {
    let begins = [
        ("dmar", IommuModel::Vtd),
        ("ivhd", IommuModel::Amd),
        ("smmu3", IommuModel::SmmuV3),
        ("riscv-iommu", IommuModel::Riscv),
    ];
    begins.into_iter().find(|(begin, _)| name.starts_with(begin)).map(|(_, kind)| kind)
}

/// What VT-d's capability register says (specification, 11.4.2): the widths of its tables (SAGAW),
/// of its addresses (MGAW), and leaves of 2 MiB and 1 GiB (SLLPS).
fn with_capabilities(iommu: PaperIommu, cap: &str) -> PaperIommu {
    let Ok(cap) = u64::from_str_radix(cap.trim_start_matches("0x"), 16) else { return iommu };
    let widths = [(11, 57), (10, 48), (9, 39)];
    let width = widths.into_iter().find(|(bit, _)| cap >> bit & 1 != 0).map_or(48, |(_, w)| w);
    let most = u32::try_from(cap >> 16 & 0x3f).unwrap_or(0) + 1;
    let leaves = [(34, 1_u64 << 21), (35, 1 << 30)];
    let leaves = leaves.into_iter().filter(|(bit, _)| cap >> bit & 1 != 0);
    let page_sizes = leaves.fold(1 << 12, |sizes, (_, size)| sizes | size);
    let iommu = PaperIommu { page_sizes, ..iommu };
    iommu.clone().with_bits(width.min(most)).unwrap_or(iommu)
}

/// A line of `reserved_regions` (Documentation/ABI/testing/sysfs-kernel-iommu_groups). What is
/// relaxable may be mapped by user space.
fn reserved(line: &str) -> Option<ReservedIovas> {
    let mut words = line.split_whitespace();
    let mut address = || {
        let digits = words.next()?.trim_start_matches("0x");
        u64::from_str_radix(digits, 16).ok().map(Iova::new)
    };
    let range = IovaRange::new(address()?, address()?)?;
    let name = match words.next()? {
        "direct-relaxable" => return None,
        "msi" => "interrupts (MSI)",
        "direct" => "the firmware",
        _ => "the IOMMU",
    };
    Some(ReservedIovas { name: name.to_owned(), range })
}
