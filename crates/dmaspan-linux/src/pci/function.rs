//! A [`Function`] is one function of a PCI device, as sysfs describes it.

use std::fs;
use std::path::{Path, PathBuf};

use super::files::{self, Root};
use super::uses::{Use, Uses};
use super::{Bdf, Class};

/// A PCI function, as it was when it was read
/// (Documentation/ABI/testing/sysfs-bus-pci, sysfs-kernel-iommu_groups).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Function {
    /// Where it is.
    pub bdf: Bdf,
    /// The vendor's number.
    pub vendor: u16,
    /// The vendor's number for the device.
    pub device: u16,
    /// What kind of function it is.
    pub class: Class,
    /// The driver that is bound to it.
    pub driver: Option<String>,
    /// The only driver that may be bound to it, where one was written.
    pub driver_override: Option<String>,
    /// Its IOMMU group; `None` where no IOMMU translates for it.
    pub group: Option<Group>,
    /// The NUMA node that it is next to.
    pub numa_node: Option<u32>,
    /// Its base address registers.
    pub bars: Vec<BarInfo>,
    /// How VFIO calls it, where a VFIO driver of Linux 6.1 or newer is bound to it.
    pub vfio: Option<VfioInfo>,
    /// Whether it is a virtual function of SR-IOV.
    pub kind: FunctionKind,
    /// Whether it answers.
    pub presence: Presence,
    /// What the system uses it for.
    pub uses: Vec<Use>,
}

/// Says whether a function is part of a device or made by SR-IOV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FunctionKind {
    /// A physical function.
    Physical,
    /// A virtual function, made by a physical one.
    Virtual,
}

/// Says whether a function answers reads of its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It does, or nothing says otherwise.
    Present,
    /// All bits read as one: it was removed, or its link is down.
    Gone,
}

/// The functions that an IOMMU cannot tell apart.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Group {
    /// Its number.
    pub number: u32,
    /// What the kernel's own drivers get in it.
    pub domain: GroupDomain,
    /// Whether an IOMMU is behind it.
    pub kind: GroupKind,
    /// All functions in it, this one included, in order of addresses.
    pub members: Vec<Member>,
}

/// A member of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// Where it is.
    pub bdf: Bdf,
    /// The driver that is bound to it.
    pub driver: Option<String>,
    /// What the system uses it for.
    pub uses: Vec<Use>,
}

impl Member {
    /// Returns whether nobody but VFIO may have the group while this driver is bound: drivers that
    /// do DMA through the kernel's own domain. Bridges and placeholders do none
    /// (`driver_managed_dma`).
    pub fn blocks_group(&self) -> bool {
        self.driver.as_deref().is_some_and(|driver| {
            !is_vfio_driver(driver) && !matches!(driver, "pcieport" | "pci-stub")
        })
    }
}

/// Says what makes a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// An IOMMU translates for it.
    Iommu,
    /// VFIO made it, in its mode without IOMMU: nothing is translated.
    NoIommu,
}

/// The kind of the domain that a group has by default
/// (`/sys/kernel/iommu_groups/N/type`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupDomain {
    /// Translated, and each unmap waits for the invalidation.
    Dma,
    /// Translated, and unmaps wait in a flush queue.
    DmaFq,
    /// Not translated: IOVAs are physical addresses.
    Identity,
    /// No DMA at all.
    Blocked,
    /// Another, or the kernel does not say.
    Other(String),
}

impl GroupDomain {
    fn parse(text: &str) -> Self {
        match text {
            "DMA" => Self::Dma,
            "DMA-FQ" => Self::DmaFq,
            "identity" => Self::Identity,
            "blocked" => Self::Blocked,
            other => Self::Other(other.to_owned()),
        }
    }

    /// As sysfs writes it.
    pub fn name(&self) -> &str {
        match self {
            Self::Dma => "DMA",
            Self::DmaFq => "DMA-FQ",
            Self::Identity => "identity",
            Self::Blocked => "blocked",
            Self::Other(name) => name,
        }
    }
}

/// A base address register that decodes something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BarInfo {
    /// Its number, 0 to 5.
    pub index: u8,
    /// Where the machine has it: of memory a physical address.
    pub start: u64,
    /// Its bytes.
    pub bytes: u64,
    /// What it decodes.
    pub space: BarSpace,
}

/// Says what a base address register decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarSpace {
    /// I/O ports.
    Io,
    /// Memory.
    Memory,
    /// Memory that may be prefetched and whose writes may be merged.
    Prefetchable,
}

/// Says what VFIO has made for a function.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VfioInfo {
    /// Its name, like `vfio0`, or `noiommu-vfio0` in the mode without IOMMU.
    pub name: String,
    /// Whether it can be opened by itself, without its group.
    pub cdev: Cdev,
}

/// Says whether a VFIO device has a character device of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cdev {
    /// `/dev/vfio/devices/NAME`.
    Present,
    /// The kernel has no `CONFIG_VFIO_DEVICE_CDEV`, or is older than 6.6.
    Missing,
}

/// What the name of a VFIO device begins with that no IOMMU translates for.
const UNTRANSLATED: &str = "noiommu-";

/// `IORESOURCE_*` (include/linux/ioport.h) in the flags of `resource`.
const RESOURCE_IO: u64 = 0x100;
const RESOURCE_MEM: u64 = 0x200;
const RESOURCE_PREFETCH: u64 = 0x2000;

/// The registers of a function with header type 0.
const BARS: usize = 6;

impl Function {
    /// Reads one; `None` where it is not there (any more).
    pub(super) fn read(root: &Root, uses: &Uses, bdf: Bdf) -> Option<Self> {
        let at = folder(root, bdf);
        let number = |name: &str| files::hex(&files::text(&at.join(name))?);
        let class = u32::try_from(number("class")?).ok()?;
        let name = |name: &str| files::text(&at.join(name)).filter(|text| text != "(null)");
        let config = fs::File::open(at.join("config")).ok();
        let is_gone = config.is_some_and(|mut file| reads_ones(&mut file));
        let is_virtual = at.join("physfn").exists();
        Some(Self {
            bdf,
            vendor: u16::try_from(number("vendor")?).ok()?,
            device: u16::try_from(number("device")?).ok()?,
            class: Class::from_raw(class),
            driver: files::target(&at.join("driver")),
            driver_override: name("driver_override").filter(|text| !text.is_empty()),
            group: group(root, uses, &at),
            // -1 where it is next to none.
            numa_node: name("numa_node").and_then(|text| text.parse().ok()),
            bars: bars(&files::text(&at.join("resource")).unwrap_or_default()),
            vfio: vfio_device(&at),
            kind: if is_virtual { FunctionKind::Virtual } else { FunctionKind::Physical },
            presence: if is_gone { Presence::Gone } else { Presence::Present },
            uses: uses.of(root, bdf),
        })
    }

    /// Returns whether a VFIO driver is bound to it.
    pub fn has_vfio_driver(&self) -> bool {
        self.vfio.is_some() || self.driver.as_deref().is_some_and(is_vfio_driver)
    }

    /// The node of its group for VFIO, which is there while a VFIO driver is bound.
    pub fn group_node(&self) -> Option<PathBuf> {
        let group = self.group.as_ref()?;
        let name = match group.kind {
            GroupKind::Iommu => group.number.to_string(),
            GroupKind::NoIommu => format!("noiommu-{}", group.number),
        };
        Some(Path::new("/dev/vfio").join(name))
    }

    /// Returns whether VFIO has it in its mode without IOMMU, with a node of its own.
    pub fn has_untranslated_cdev(&self) -> bool {
        let untranslated = self.vfio.as_ref().filter(|vfio| vfio.name.starts_with(UNTRANSLATED));
        untranslated.is_some_and(|vfio| vfio.cdev == Cdev::Present)
    }

    /// Its own node, for iommufd.
    pub fn cdev_node(&self) -> Option<PathBuf> {
        let vfio = self.vfio.as_ref().filter(|vfio| vfio.cdev == Cdev::Present)?;
        Some(Path::new("/dev/vfio/devices").join(&vfio.name))
    }
}

/// Whether a driver is `vfio-pci` or a variant of it for some device, like `mlx5-vfio-pci`.
pub(super) fn is_vfio_driver(driver: &str) -> bool {
    driver.split(['-', '_']).any(|part| part == "vfio")
}

/// The folder of a function.
pub(super) fn folder(root: &Root, bdf: Bdf) -> PathBuf {
    root.path("sys/bus/pci/devices").join(bdf.to_string())
}

/// Whether vendor and device read as nothing but ones, which no function has (PCI Express Base
/// Specification, configuration reads that nobody completes).
fn reads_ones(config: &mut impl std::io::Read) -> bool {
    let mut ids = [0; 4];
    config.read_exact(&mut ids).is_ok() && ids == [0xff; 4]
}

fn group(root: &Root, uses: &Uses, at: &Path) -> Option<Group> {
    let link = at.join("iommu_group");
    let number = files::target(&link)?.parse().ok()?;
    let is_noiommu = files::text(&link.join("name")).is_some_and(|name| name == "vfio-noiommu");
    let mut members: Vec<Bdf> = files::names(&link.join("devices"))
        .unwrap_or_default()
        .iter()
        .filter_map(|name| name.parse().ok())
        .collect();
    members.sort_unstable();
    let member = |bdf| Member {
        bdf,
        driver: files::target(&folder(root, bdf).join("driver")),
        uses: uses.of(root, bdf),
    };
    Some(Group {
        number,
        domain: GroupDomain::parse(&files::text(&link.join("type")).unwrap_or_default()),
        kind: if is_noiommu { GroupKind::NoIommu } else { GroupKind::Iommu },
        members: members.into_iter().map(member).collect(),
    })
}

/// The registers that the first lines of `resource` describe: start, end and flags.
fn bars(resource: &str) -> Vec<BarInfo> {
    let lines = (0..).zip(resource.lines().take(BARS));
    lines.filter_map(|(index, line)| bar(index, line)).collect()
}

fn bar(index: u8, line: &str) -> Option<BarInfo> {
    let mut numbers = line.split_whitespace().map(files::hex);
    let (start, end, flags) = (numbers.next()??, numbers.next()??, numbers.next()??);
    let space = match flags {
        flags if flags & RESOURCE_IO != 0 => BarSpace::Io,
        flags if flags & RESOURCE_MEM == 0 => return None,
        flags if flags & RESOURCE_PREFETCH != 0 => BarSpace::Prefetchable,
        _ => BarSpace::Memory,
    };
    let bytes = end.checked_sub(start)?.checked_add(1)?;
    Some(BarInfo { index, start, bytes, space })
}

/// What VFIO has made in the folder of a function.
pub(super) fn vfio_device(at: &Path) -> Option<VfioInfo> {
    let folder = at.join("vfio-dev");
    let is_vfio =
        |name: &String| name.strip_prefix(UNTRANSLATED).unwrap_or(name).starts_with("vfio");
    let name = files::names(&folder).ok()?.into_iter().find(is_vfio)?;
    let has_cdev = folder.join(&name).join("dev").exists();
    Some(VfioInfo { name, cdev: if has_cdev { Cdev::Present } else { Cdev::Missing } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_of_vfio_pci_are_drivers_of_vfio() {
        for driver in ["vfio-pci", "mlx5-vfio-pci", "mlx5_vfio_pci", "nvgrace-gpu-vfio-pci"] {
            assert!(is_vfio_driver(driver), "{driver}");
        }
        assert!(!is_vfio_driver("nvme") && !is_vfio_driver("pci-stub"));
    }

    #[test]
    fn bars_have_the_size_that_they_decode() {
        let text = "0x00000000fe000000 0x00000000fe003fff 0x0000000000140204\n\
            0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
            0x0000000000006000 0x000000000000603f 0x0000000000040101\n\
            0x0000001000000000 0x00000017ffffffff 0x000000000014220c\n\
            0x5 0x1 0x200\nnonsense\n\
            0x0000000000000000 0x00000000000fffff 0x0000000000000200\n";
        let bar = |index, start, bytes, space| BarInfo { index, start, bytes, space };
        let expected = [
            bar(0, 0xfe00_0000, 16 << 10, BarSpace::Memory),
            bar(2, 0x6000, 64, BarSpace::Io),
            bar(3, 1 << 36, 32 << 30, BarSpace::Prefetchable),
        ];
        assert_eq!(bars(text), expected);
    }

    #[test]
    fn a_function_that_reads_as_ones_is_gone() {
        assert!(reads_ones(&mut [0xffu8; 64].as_slice()));
        assert!(!reads_ones(&mut [0x36, 0x1b, 0x10, 0].as_slice()));
        assert!(!reads_ones(&mut [0xffu8; 3].as_slice()));
    }
}
