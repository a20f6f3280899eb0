//! The IOMMU of a device, as far as sysfs tells.

use std::fs;

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, UserAddr, UserRange};

use super::MachineFiles;
use crate::pci::{BarInfo, BarSpace, Bdf, System};
use crate::plan::forecast::{
    Backing, IommuModel, PaperIommu, PaperRegion, RegionPages, ReservedIovas,
};
use crate::sys;

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

/// The IOMMU of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceIommu {
    /// What it can map.
    pub iommu: PaperIommu,
    /// The part that is assumed, since Linux does not tell it in sysfs, and where else it stands;
    /// `None` where all was read.
    pub assumed: Option<String>,
}

impl MachineFiles {
    /// The IOMMU that translates for a device: its kind and its reserved regions. VT-d and AMD-Vi
    /// tell their address bits, and VT-d its leaves; Linux has no file with those of SMMUv3 and
    /// RISC-V.
    ///
    /// # Errors
    ///
    /// [`DeviceIommuError`].
    pub fn iommu_of(&self, bdf: Bdf) -> Result<DeviceIommu, DeviceIommuError> {
        let folder = format!("sys/bus/pci/devices/{bdf}");
        if !self.has_device(bdf) {
            return Err(DeviceIommuError::NoDevice { bdf });
        }
        let link = fs::read_link(self.path(format!("{folder}/iommu")));
        let link = link.map_err(|_| DeviceIommuError::NoIommu { bdf })?;
        let name = link.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let kind = kind(&name).ok_or(DeviceIommuError::Unknown { bdf })?;
        let mut iommu = PaperIommu::new(kind);
        let cap = self.text(format!("{folder}/iommu/intel-iommu/cap"));
        let features = self.text(format!("{folder}/iommu/amd-iommu/features"));
        let told = match (kind, cap, features) {
            (IommuModel::Vtd, Some(cap), _) => with_capabilities(&iommu, &cap),
            (IommuModel::Amd, _, Some(features)) => with_features(&iommu, &features),
            _ => None,
        };
        let assumed = told.is_none().then(|| {
            let log = match kind {
                IommuModel::SmmuV3 => ": `dmesg | grep ias` may say it",
                _ => "",
            };
            let (bits, name) = (iommu.address_bits, kind.name());
            format!(
                "Linux does not tell how many address bits the {kind} has, and {bits} are \
                 assumed{log}; `--iommu {name},bits=N` names another number"
            )
        });
        iommu = told.unwrap_or(iommu);
        if let Some(text) = self.text(format!("{folder}/iommu_group/reserved_regions")) {
            iommu.reserved = text.lines().filter_map(reserved).collect();
        }
        Ok(DeviceIommu { iommu, assumed })
    }

    /// Whether there is such a PCI function.
    pub fn has_device(&self, bdf: Bdf) -> bool {
        self.path(format!("sys/bus/pci/devices/{bdf}")).exists()
    }

    /// Whether a driver of VFIO is bound to a device.
    pub fn is_vfio(&self, bdf: Bdf) -> bool {
        System::at(&self.0).device(bdf).is_ok_and(|function| function.has_vfio_driver())
    }

    /// The NUMA node that a device is next to; `None` where the kernel does not say.
    pub fn node_of(&self, bdf: Bdf) -> Option<u32> {
        self.number(format!("sys/bus/pci/devices/{bdf}/numa_node"))?.try_into().ok()
    }

    /// The registers of a device that a VMM maps for other devices: BARs of memory that begin and
    /// end at multiples of a page. What is smaller, VFIO lets nobody map.
    pub fn bars_of(&self, bdf: Bdf) -> Vec<PaperRegion> {
        let Ok(function) = System::at(&self.0).device(bdf) else { return Vec::new() };
        let page = sys::page_size();
        let bars = function.bars.into_iter().filter(|bar| {
            let is_whole = bar.start.is_multiple_of(page) && bar.bytes.is_multiple_of(page);
            bar.space != BarSpace::Io && bar.start != 0 && is_whole
        });
        let name = bdf.to_string();
        let name = name.strip_prefix("0000:").unwrap_or(&name);
        let region = |bar: BarInfo| {
            let registers = Span::new(PhysAddr::new(bar.start), bar.bytes).ok()?;
            Some(PaperRegion {
                name: format!("{name} BAR {}", bar.index),
                user: UserRange::from_len(UserAddr::new(bar.start), bar.bytes).ok()?,
                // No memory of a process begins there.
                memory: u64::MAX - bar.start,
                iova: None,
                prot: Prot::READ_WRITE,
                backing: Backing::Registers,
                pages: RegionPages::Of(1 << bar.bytes.trailing_zeros()),
                spans: Some(vec![registers]),
                resident: 0,
                node: function.numa_node,
            })
        };
        bars.filter_map(region).collect()
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
fn with_capabilities(iommu: &PaperIommu, cap: &str) -> Option<PaperIommu> {
    let cap = u64::from_str_radix(cap.trim_start_matches("0x"), 16).ok()?;
    let widths = [(11, 57), (10, 48), (9, 39)];
    let width = widths.into_iter().find(|(bit, _)| cap >> bit & 1 != 0).map_or(48, |(_, w)| w);
    let most = u32::try_from(cap >> 16 & 0x3f).unwrap_or(0) + 1;
    let leaves = [(34, 1_u64 << 21), (35, 1 << 30)];
    let leaves = leaves.into_iter().filter(|(bit, _)| cap >> bit & 1 != 0);
    let page_sizes = leaves.fold(1 << 12, |sizes, (_, size)| sizes | size);
    PaperIommu { page_sizes, ..iommu.clone() }.with_bits(width.min(most)).ok()
}

/// What the first word of AMD's extended features says (IOMMU specification, 3.4.13): the levels of
/// its tables, four and as many more as HATS has, of nine bits each.
fn with_features(iommu: &PaperIommu, features: &str) -> Option<PaperIommu> {
    let first = features.split(':').next()?.trim_start_matches("0x");
    let features = u64::from_str_radix(first, 16).ok()?;
    let bits = match features >> 10 & 3 {
        0 => 48,
        1 => 57,
        2 => 64,
        _ => return None,
    };
    iommu.clone().with_bits(bits).ok()
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
