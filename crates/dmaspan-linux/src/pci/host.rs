//! The circumstances that the machine, its kernel and this process bring along, whatever the
//! function: the IOMMU, modules, nodes and rights.

use std::fmt;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::files::Root;
use crate::os;

/// Says what is known of the machine's IOMMU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Iommu {
    /// The kernel uses one.
    Active,
    /// The firmware describes one, and the kernel does not use it.
    SwitchedOff {
        /// By which ACPI table.
        table: IommuTable,
        /// The parameter on the kernel's command line that is about it, where there is one.
        parameter: Option<String>,
    },
    /// The firmware describes one, and the kernel's configuration has no driver of it.
    NotBuilt {
        /// By which ACPI table.
        table: IommuTable,
    },
    /// None is described.
    NotFound {
        /// Whether this is a virtual machine.
        machine: MachineKind,
    },
}

/// The ACPI table that describes an IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IommuTable {
    /// Intel VT-d.
    Dmar,
    /// AMD-Vi.
    Ivrs,
    /// Arm SMMU.
    Iort,
    /// virtio-iommu.
    Viot,
}

/// Says whether a machine is real.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineKind {
    /// It is, or does not say otherwise.
    Physical,
    /// It has a hypervisor.
    Virtual,
}

impl IommuTable {
    /// Its four letters, as in `/sys/firmware/acpi/tables`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dmar => "DMAR",
            Self::Ivrs => "IVRS",
            Self::Iort => "IORT",
            Self::Viot => "VIOT",
        }
    }

    /// The options of the kernel's configuration, one of which has its driver.
    pub(super) const fn options(self) -> &'static [&'static str] {
        match self {
            Self::Dmar => &["INTEL_IOMMU"],
            Self::Ivrs => &["AMD_IOMMU"],
            Self::Iort => &["ARM_SMMU_V3", "ARM_SMMU"],
            Self::Viot => &["VIRTIO_IOMMU"],
        }
    }

    /// Words of the kernel's command line that are about it.
    const fn parameters(self) -> &'static [&'static str] {
        match self {
            Self::Dmar => &["intel_iommu=", "iommu=off"],
            Self::Ivrs => &["amd_iommu=off", "iommu=off"],
            Self::Iort | Self::Viot => &["iommu=off"],
        }
    }
}

const TABLES: [IommuTable; 4] =
    [IommuTable::Dmar, IommuTable::Ivrs, IommuTable::Viot, IommuTable::Iort];

/// Whether the kernel was built with an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Built {
    In,
    Out,
    Unknown,
}

/// Whether messages of devices are translated, so that none can pretend to be another's interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Interrupts {
    Remapped,
    NotRemapped,
    Unknown,
}

/// The user that this process runs as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct User {
    pub(super) uid: u32,
    groups: Vec<u32>,
    capabilities: u64,
}

/// Capabilities (include/uapi/linux/capability.h).
const CAP_DAC_OVERRIDE: u64 = 1 << 1;
const CAP_SYS_RAWIO: u64 = 1 << 17;

impl User {
    /// From `/proc/self/status` (proc(5)); `None` where there is none.
    fn read(root: &Root) -> Option<Self> {
        let status = root.text("proc/self/status")?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let numbers = |name: &str| -> Vec<u32> {
            let words = field(name).unwrap_or_default().split_whitespace();
            words.filter_map(|word| word.parse().ok()).collect()
        };
        // Real, effective, saved, of the file system: the last one opens files.
        let mut groups = numbers("Groups:");
        groups.extend(numbers("Gid:").get(3));
        // Devices' nodes belong to users of the machine, whom a user namespace does not have.
        let capabilities = os::capabilities(&root.path("proc/self"));
        Some(Self { uid: *numbers("Uid:").get(3)?, groups, capabilities })
    }

    const fn has(&self, capability: u64) -> bool {
        self.capabilities & capability != 0
    }

    /// Whether it may open any file.
    pub(super) const fn opens_all(&self) -> bool {
        self.has(CAP_DAC_OVERRIDE)
    }

    /// Whether the mode of a file lets it read and write. Access control lists are not looked at.
    fn may_open(&self, file: &Metadata) -> bool {
        let class = match file {
            _ if self.opens_all() => return true,
            file if file.uid() == self.uid => 6,
            file if self.groups.contains(&file.gid()) => 3,
            _ => 0,
        };
        file.mode() >> class & 6 == 6
    }
}

/// The owner of a node of `/dev`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeOwner {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The permission bits.
    pub mode: u32,
}

impl fmt::Display for NodeOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |id: u32| if id == 0 { "root".to_owned() } else { id.to_string() };
        let (uid, gid) = (name(self.uid), name(self.gid));
        write!(f, "user {uid} and group {gid}, mode {:04o}", self.mode)
    }
}

/// Whether this process may open a node.
pub(super) enum Access {
    /// It may, or nothing says otherwise.
    Granted,
    /// It may not.
    Denied(NodeOwner),
    /// There is no such node.
    Missing,
}

/// What does not depend on the function.
#[derive(Debug)]
pub(super) struct Host {
    root: Root,
    pub(super) iommu: Iommu,
    pub(super) user: Option<User>,
    pub(super) interrupts: Interrupts,
    /// The limit of locked memory in bytes, where one applies.
    pub(super) memlock: Option<u64>,
    config: Option<String>,
    release: Option<Release>,
}

/// A version of Linux: major and minor.
pub(super) type Release = (u32, u32);

impl Host {
    pub(super) fn read(root: &Root) -> Self {
        let user = User::read(root);
        let config = config(root);
        let locks_all = user.as_ref().is_some_and(|user| user.has(os::CAP_IPC_LOCK));
        Self {
            iommu: iommu(root, config.as_deref()),
            interrupts: interrupts(root),
            memlock: if locks_all { None } else { memlock(root) },
            config,
            release: root.text(RELEASE).as_deref().and_then(release),
            user,
            root: root.clone(),
        }
    }

    /// Whether a device tree describes the machine, and not ACPI.
    pub(super) fn has_device_tree(&self) -> bool {
        self.root.has("sys/firmware/devicetree/base/compatible")
    }

    /// Whether a driver of PCI functions is loaded.
    pub(super) fn has_driver(&self, name: &str) -> bool {
        self.root.has(Path::new("sys/bus/pci/drivers").join(name))
    }

    /// Whether a module is loaded, or built in and has parameters.
    pub(super) fn has_module(&self, name: &str) -> bool {
        self.root.has(Path::new("sys/module").join(name))
    }

    /// Whether a module's parameter is on.
    pub(super) fn is_on(&self, module: &str, parameter: &str) -> bool {
        let path = format!("sys/module/{module}/parameters/{parameter}");
        self.root.text(path).is_some_and(|text| matches!(text.as_str(), "Y" | "1"))
    }

    /// Whether the kernel was built with `CONFIG_` and this name.
    pub(super) fn built(&self, name: &str) -> Built {
        built(self.config.as_deref(), name)
    }

    /// Whether the running kernel is known to be older.
    pub(super) fn is_older_than(&self, release: Release) -> bool {
        self.release.is_some_and(|own| own < release)
    }

    /// The user of this process, where that may not drive what reaches all memory.
    pub(super) fn lacks_raw_io(&self) -> Option<u32> {
        self.user.as_ref().filter(|user| !user.has(CAP_SYS_RAWIO)).map(|user| user.uid)
    }

    /// Whether this process may open a node like `/dev/vfio/7`.
    pub(super) fn access(&self, node: &Path) -> Access {
        let path = self.root.path(node.strip_prefix("/").unwrap_or(node));
        let Ok(file) = fs::metadata(path) else { return Access::Missing };
        match &self.user {
            Some(user) if !user.may_open(&file) => {
                let (uid, gid, mode) = (file.uid(), file.gid(), file.mode() & 0o7777);
                Access::Denied(NodeOwner { uid, gid, mode })
            }
            _ => Access::Granted,
        }
    }
}

/// Whether a kernel of that configuration was built with an option.
fn built(config: Option<&str>, name: &str) -> Built {
    let Some(config) = config else { return Built::Unknown };
    let line = |value| format!("CONFIG_{name}={value}");
    let (built_in, module) = (line('y'), line('m'));
    let is_in = config.lines().any(|line| line == built_in || line == module);
    if is_in { Built::In } else { Built::Out }
}

/// What sysfs, the firmware's tables, the kernel's configuration and the command line say.
fn iommu(root: &Root, config: Option<&str>) -> Iommu {
    if !root.names("sys/class/iommu").is_empty() {
        return Iommu::Active;
    }
    let tables = root.names("sys/firmware/acpi/tables");
    let described = TABLES.into_iter().find(|table| {
        // Arm machines have an IORT for their interrupts alone, too; only what is there is said.
        tables.iter().any(|name| name == table.name())
    });
    if let Some(table) = described {
        if table.options().iter().all(|option| built(config, option) == Built::Out) {
            return Iommu::NotBuilt { table };
        }
        let line = root.text("proc/cmdline").unwrap_or_default();
        let is_about = |word: &&str| table.parameters().iter().any(|about| word.starts_with(about));
        // The kernel obeys the last one.
        let parameter = line.split_whitespace().rfind(is_about).map(str::to_owned);
        return Iommu::SwitchedOff { table, parameter };
    }
    let cpu = root.text("proc/cpuinfo").unwrap_or_default();
    let is_guest = cpu.split_whitespace().any(|word| word == "hypervisor");
    let machine = if is_guest { MachineKind::Virtual } else { MachineKind::Physical };
    Iommu::NotFound { machine }
}

/// Whether x86 remaps interrupts: their controllers are then called `IR-` something. Elsewhere the
/// interrupt controller does it or not, which no file says.
fn interrupts(root: &Root) -> Interrupts {
    let Some(text) = root.text("proc/interrupts") else { return Interrupts::Unknown };
    let mut words = text.split_whitespace();
    if !words.clone().any(|word| word.contains("IO-APIC") || word.contains("PCI-MSI")) {
        return Interrupts::Unknown;
    }
    if words.any(|word| word.contains("IR-")) {
        Interrupts::Remapped
    } else {
        Interrupts::NotRemapped
    }
}

/// The soft limit of `/proc/self/limits` (proc(5)).
fn memlock(root: &Root) -> Option<u64> {
    let limits = root.text("proc/self/limits")?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// What the running kernel is called: `6.1.0-50-cloud-amd64`.
const RELEASE: &str = "proc/sys/kernel/osrelease";

/// The version in a kernel's name.
fn release(name: &str) -> Option<Release> {
    let mut numbers = name.split(|each: char| !each.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The configuration of the running kernel, where a distribution keeps one.
fn config(root: &Root) -> Option<String> {
    let release = root.text(RELEASE)?;
    let places: [PathBuf; 2] = [
        Path::new("boot").join(format!("config-{release}")),
        Path::new("lib/modules").join(&release).join("config"),
    ];
    places.into_iter().find_map(|place| root.text(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_what_a_kernels_name_begins_with() {
        assert_eq!(release("6.1.0-50-cloud-amd64"), Some((6, 1)));
        assert_eq!(release("7.2.13"), Some((7, 2)));
        assert_eq!(release("6.12-rc1"), Some((6, 12)));
        assert_eq!(release("7"), None);
        assert_eq!(release("next-20260101"), None);
    }
}
