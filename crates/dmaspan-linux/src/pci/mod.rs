//! PCI functions, as Linux shows them in `/sys/bus/pci`, and what keeps a process from using them.
//!
//! Nothing is opened or changed: [`System`] reads sysfs, procfs and the modes of nodes in `/dev`,
//! so what it says is what was true then. It answers for each function and [`Backend`] with
//! [`Reason`]s, each of which has the [`Step`]s that take it away.
//!
//! ```no_run
//! use dmaspan_linux::pci::System;
//! use dmaspan_linux::vfio::Backend;
//!
//! let system = System::new();
//! for function in system.devices()? {
//!     println!("{} {}", function.bdf, function.class);
//!     for reason in system.verdict(&function, Backend::Vfio) {
//!         println!("  {reason}");
//!         for step in reason.steps() {
//!             println!("    {step}");
//!         }
//!     }
//! }
//! Ok::<(), dmaspan_linux::pci::PciError>(())
//! ```

mod bdf;
mod class;
mod files;
mod function;
mod holders;
mod host;
pub(crate) mod reason;
mod uses;

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use dmaspan::Errno;

use crate::os::{self, Size};
use crate::vfio::Backend;
use files::Root;
use host::{Access, Built, Host, Interrupts};
use uses::Uses;

pub use bdf::{BadBdf, Bdf};
pub use class::Class;
pub use function::{
    BarInfo, BarSpace, Cdev, Function, FunctionKind, Group, GroupDomain, GroupKind, Member,
    Presence, VfioInfo,
};
pub use holders::Holder;
pub use host::{Iommu, IommuTable, MachineKind, NodeOwner};
pub use reason::{DeviceNode, KernelSupport, ModuleState, Reason, Step};
pub use uses::Use;

/// The reason why nothing is known of PCI functions.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PciError {
    /// sysfs has no PCI.
    #[error(
        "{} is not there: this machine has no PCI, or sysfs is not mounted (`mount -t sysfs sysfs \
         /sys`)",
        path.display()
    )]
    NoPci {
        /// The folder that is missing.
        path: PathBuf,
    },
    /// The list of functions cannot be read.
    #[error("{} cannot be read: {}", path.display(), os::words(*errno))]
    Read {
        /// The folder.
        path: PathBuf,
        /// What the kernel answered.
        errno: Errno,
    },
    /// There is no such function.
    #[error("there is no PCI function {bdf}: `dmaspan devices --all` lists those of this machine")]
    Absent {
        /// Its address.
        bdf: Bdf,
    },
}

/// Something that refuses nothing now and may later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Hint {
    /// The limit of locked memory.
    #[error(
        "this process may map {} at a time for devices (RLIMIT_MEMLOCK): to map more, {}",
        Size(*bytes),
        if *in_user_namespace { LIFTED_OUTSIDE } else { LIFTED_HERE }
    )]
    LockedMemory {
        /// The limit in bytes.
        bytes: u64,
        /// Whether the process is in a user namespace, whose root cannot lift the limit.
        in_user_namespace: bool,
    },
}

/// How the limit of locked memory is lifted.
const LIFTED_HERE: &str = "run `ulimit -l unlimited` as root first, set LimitMEMLOCK=infinity in \
    the systemd unit, or memlock in /etc/security/limits.conf";
/// The same in a user namespace.
const LIFTED_OUTSIDE: &str = "start its container with `--ulimit memlock=-1:-1`: root of a user \
    namespace cannot lift it";

/// The state of a machine: its PCI functions, and what the kernel would say to using them.
#[derive(Debug)]
pub struct System {
    root: Root,
    host: Host,
    uses: Uses,
}

impl Default for System {
    fn default() -> Self {
        Self::new()
    }
}

impl System {
    /// This machine, as it is now.
    pub fn new() -> Self {
        Self::at(Path::new("/"))
    }

    /// The machine whose `sys`, `proc`, `dev` and `boot` are below `root`, for example in a copy of
    /// another one's files. Steps name paths as that machine sees them.
    pub fn at(root: &Path) -> Self {
        let root = Root::new(root);
        let (host, uses) = (Host::read(&root), Uses::read(&root));
        Self { root, host, uses }
    }

    /// All functions, in order of addresses.
    ///
    /// # Errors
    ///
    /// [`PciError`] where the machine has no PCI or sysfs.
    pub fn devices(&self) -> Result<Vec<Function>, PciError> {
        let path = self.root.path("sys/bus/pci/devices");
        let names = files::names(&path).map_err(|error| match os::errno(&error) {
            Errno::ENOENT => PciError::NoPci { path: path.clone() },
            errno => PciError::Read { path: path.clone(), errno },
        })?;
        let mut bdfs: Vec<Bdf> = names.iter().filter_map(|name| name.parse().ok()).collect();
        bdfs.sort_unstable();
        // One that vanishes meanwhile is not there.
        let read = |bdf| Function::read(&self.root, &self.uses, bdf);
        Ok(bdfs.into_iter().filter_map(read).collect())
    }

    /// One function.
    ///
    /// # Errors
    ///
    /// [`PciError`] where it is not there, or the machine has no PCI or sysfs.
    pub fn device(&self, bdf: Bdf) -> Result<Function, PciError> {
        let path = self.root.path("sys/bus/pci/devices");
        if !path.exists() {
            return Err(PciError::NoPci { path });
        }
        Function::read(&self.root, &self.uses, bdf).ok_or(PciError::Absent { bdf })
    }

    /// Returns what there is of an IOMMU.
    pub fn iommu(&self) -> &Iommu {
        &self.host.iommu
    }

    /// Returns what may refuse something later.
    pub fn hints(&self) -> Vec<Hint> {
        let in_user_namespace = os::is_in_user_namespace(&self.root.path("proc/self"));
        let limit = |bytes| Hint::LockedMemory { bytes, in_user_namespace };
        self.host.memlock.map(limit).into_iter().collect()
    }

    /// Returns why a function cannot be used; nothing where it can. For errors of opening one.
    pub fn why_not(&self, bdf: Bdf, backend: Backend) -> Vec<Reason> {
        match self.device(bdf) {
            Ok(function) => self.verdict(&function, backend),
            Err(PciError::NoPci { .. }) => vec![Reason::NoPci],
            Err(PciError::Absent { .. } | PciError::Read { .. }) => vec![Reason::Absent { bdf }],
        }
    }

    /// Returns why a function cannot be used, in the order in which to change it; nothing where it
    /// can.
    pub fn verdict(&self, function: &Function, backend: Backend) -> Vec<Reason> {
        let bdf = function.bdf;
        if function.presence == Presence::Gone {
            return vec![Reason::Gone { bdf }];
        }
        if function.class.is_bridge() {
            return vec![Reason::Bridge { bdf }];
        }
        if backend == Backend::NoIommu {
            return self.untranslated_verdict(function);
        }
        match &function.group {
            Some(Group { number, kind: GroupKind::NoIommu, .. }) => {
                vec![Reason::NoIommuMode { group: *number }]
            }
            _ if self.host.iommu != Iommu::Active => {
                vec![Reason::NoIommu { iommu: self.host.iommu.clone() }]
            }
            None if !self.gets_group(function) => vec![Reason::NoGroup { bdf }],
            group => {
                let mut reasons = self.kernel_reasons(function, backend);
                reasons.extend(self.driver_reasons(function, group.as_ref()));
                // The module may be loaded only now.
                reasons.extend(self.module_reasons(backend));
                reasons.extend(self.permission_reasons(function, backend));
                reasons
            }
        }
    }

    /// The same, of a function that is to be told physical addresses.
    fn untranslated_verdict(&self, function: &Function) -> Vec<Reason> {
        let backend = Backend::NoIommu;
        if function.group.as_ref().is_some_and(|group| group.kind == GroupKind::Iommu) {
            return vec![Reason::Translated { bdf: function.bdf }];
        }
        if !function.has_untranslated_cdev() {
            let kernel = match self.host.built("VFIO_NOIOMMU") {
                _ if self.host.is_older_than(FIRST_UNTRANSLATED) => Some(KernelSupport::Older),
                Built::Out => Some(KernelSupport::Missing),
                Built::In | Built::Unknown => None,
            };
            if let Some(kernel) = kernel {
                return vec![Reason::NoUnsafeMode { kernel }];
            }
        }
        let mut reasons = self.kernel_reasons(function, backend);
        if !self.host.is_on("vfio", UNSAFE_MODE) {
            let is_loaded = self.host.has_module("vfio");
            let state = if is_loaded { ModuleState::Loaded } else { ModuleState::Absent };
            reasons.push(Reason::UnsafeModeOff { state });
        }
        reasons.extend(self.driver_reasons(function, None));
        reasons.extend(self.host.lacks_raw_io().map(|uid| Reason::NoRawIo { uid }));
        reasons.extend(self.permission_reasons(function, backend));
        reasons
    }

    /// Returns what makes a function usable, in order; nothing where it is.
    pub fn steps(&self, function: &Function, backend: Backend) -> Vec<Step> {
        reason::steps(&self.verdict(function, backend))
    }

    /// Returns what gives a function, and those of its group that would be taken or are, back to
    /// their drivers; nothing where the function has and needs no VFIO driver, or where one of them
    /// may be in use unseen.
    pub fn give_back(&self, function: &Function) -> Vec<Step> {
        let Some(group) = &function.group else { return Vec::new() };
        if function.class.is_bridge() {
            return Vec::new();
        }
        let taken = |member: &&Member| {
            let is_vfio = member.driver.as_deref().is_some_and(function::is_vfio_driver);
            member.bdf == function.bdf || is_vfio || member.blocks_group()
        };
        let members = group.members.iter().filter(taken);
        if members.clone().flat_map(|member| &member.uses).any(Use::is_unknown) {
            return Vec::new();
        }
        members.flat_map(|member| reason::give_back(member.bdf)).collect()
    }

    /// That other processes hold the function's group, where that can be seen.
    pub(crate) fn held(&self, function: &Function) -> Option<Reason> {
        let group = function.group.as_ref()?.number;
        let holders = holders::holders(&self.root, function);
        if holders.is_empty() { None } else { Some(Reason::GroupHeld { group, holders }) }
    }

    /// Whether this machine does not say if it keeps interrupts of devices apart.
    pub(crate) fn hides_interrupts(&self) -> bool {
        self.host.interrupts == Interrupts::Unknown
    }

    /// Whether a driver, by being bound, makes the group of a function that has none. Where a
    /// device tree says what translates for a function, the kernel reads it when the first driver
    /// is bound (Linux: drivers/iommu/of_iommu.c, `of_iommu_configure`).
    fn gets_group(&self, function: &Function) -> bool {
        self.host.has_device_tree() && function.driver.is_none()
    }

    /// What the kernel lacks.
    fn kernel_reasons(&self, function: &Function, backend: Backend) -> Vec<Reason> {
        let mut reasons = Vec::new();
        if backend != Backend::Vfio && !self.has_iommufd() {
            let kernel = match self.host.built("IOMMUFD") {
                _ if self.host.is_older_than(FIRST_IOMMUFD) => KernelSupport::Older,
                Built::In => KernelSupport::Module,
                Built::Out => KernelSupport::Missing,
                Built::Unknown => KernelSupport::Unknown,
            };
            reasons.push(Reason::NoIommufd { kernel });
        }
        if matches!(backend, Backend::Iommufd | Backend::NoIommu) {
            let is_missing = match &function.vfio {
                Some(vfio) => vfio.cdev == Cdev::Missing,
                None if function.has_vfio_driver() => true,
                None => {
                    self.host.built("VFIO_DEVICE_CDEV") == Built::Out
                        || self.host.is_older_than(FIRST_CDEV)
                }
            };
            // That is no news of a kernel without iommufd.
            if is_missing && !self.host.is_older_than(FIRST_IOMMUFD) {
                reasons.push(Reason::NoCdev);
            }
        }
        if !function.has_vfio_driver() && !self.host.has_driver("vfio-pci") {
            reasons.push(Reason::NoVfioPci);
        }
        reasons
    }

    /// What drivers are in the way.
    fn driver_reasons(&self, function: &Function, group: Option<&Group>) -> Vec<Reason> {
        let mut reasons = Vec::new();
        if !function.has_vfio_driver() {
            let (driver, uses) = (function.driver.clone(), function.uses.clone());
            reasons.push(Reason::NotBound { bdf: function.bdf, driver, uses });
        }
        let Some(group) = group else { return reasons };
        let others = group.members.iter().filter(|member| member.bdf != function.bdf);
        let blockers: Vec<Member> =
            others.filter(|member| member.blocks_group()).cloned().collect();
        if !blockers.is_empty() {
            reasons.push(Reason::GroupNotViable { group: group.number, blockers });
        }
        reasons
    }

    /// What modules are missing, or need a parameter.
    fn module_reasons(&self, backend: Backend) -> Vec<Reason> {
        let has_type1 = self.host.has_module(TYPE1);
        let has_iommufd = self.has_iommufd();
        // Where there is no type 1, iommufd can stand in for it.
        let module = match backend {
            Backend::Vfio if has_type1 || !has_iommufd => TYPE1,
            _ => "iommufd",
        };
        let is_loaded = if module == TYPE1 { has_type1 } else { has_iommufd };
        let is_safe = self.host.interrupts != Interrupts::NotRemapped
            || self.host.is_on(module, "allow_unsafe_interrupts");
        if !is_safe {
            let state = if is_loaded { ModuleState::Loaded } else { ModuleState::Absent };
            return vec![Reason::UnsafeInterrupts { module, state }];
        }
        // Loading vfio loads it too.
        let is_missing = module == TYPE1 && !has_type1 && self.host.has_module("vfio");
        if is_missing { vec![Reason::NoType1] } else { Vec::new() }
    }

    /// What this process may not open, or will not be allowed to.
    fn permission_reasons(&self, function: &Function, backend: Backend) -> Vec<Reason> {
        let (common, own) = match backend {
            Backend::Vfio => (CONTAINER, function.group_node().map(DeviceNode::Path)),
            // That /dev/iommu is missing is a reason of its own.
            Backend::Compat => (IOMMUFD, function.group_node().map(DeviceNode::Path)),
            Backend::Iommufd | Backend::NoIommu => (
                IOMMUFD,
                Some(
                    function.cdev_node().map_or(DeviceNode::CdevOf(function.bdf), DeviceNode::Path),
                ),
            ),
        };
        let common = DeviceNode::Path(PathBuf::from(common));
        let of_node = |node| self.permission(function, node);
        let reasons = [Some(common), own].into_iter().flatten().filter_map(of_node);
        reasons.filter(|reason| !is_missing_iommufd(reason)).collect()
    }

    fn permission(&self, function: &Function, node: DeviceNode) -> Option<Reason> {
        let is_own = !matches!(&node, DeviceNode::Path(path) if is_common(path));
        let uid = self.host.user.as_ref().map_or(0, |user| user.uid);
        let opens_all = self.host.user.as_ref().is_none_or(|user| user.opens_all());
        let access = match &node {
            DeviceNode::Path(path) => self.host.access(path),
            DeviceNode::CdevOf(_) => Access::Missing,
        };
        match (access, node) {
            (Access::Granted, _) => None,
            (Access::Denied(owner), node) => {
                Some(Reason::Permission { node, owner: Some(owner), uid })
            }
            (Access::Missing, DeviceNode::Path(node)) if function.has_vfio_driver() => {
                Some(Reason::NodeMissing { node })
            }
            // It will belong to root.
            (Access::Missing, node) if is_own && !opens_all => {
                Some(Reason::Permission { node, owner: None, uid })
            }
            (Access::Missing, _) => None,
        }
    }

    fn has_iommufd(&self) -> bool {
        !matches!(self.host.access(Path::new(IOMMUFD)), Access::Missing)
    }
}

/// Whether a node is of all functions.
fn is_common(node: &Path) -> bool {
    node == Path::new(CONTAINER) || node == Path::new(IOMMUFD)
}

fn is_missing_iommufd(reason: &Reason) -> bool {
    matches!(reason, Reason::NodeMissing { node } if node == Path::new(IOMMUFD))
}

/// The first Linux with iommufd.
const FIRST_IOMMUFD: host::Release = (6, 2);

/// The first Linux with a character device for each function of VFIO.
const FIRST_CDEV: host::Release = (6, 6);

/// The first Linux whose iommufd takes functions without an IOMMU.
const FIRST_UNTRANSLATED: host::Release = (7, 3);

/// The parameter of the module vfio that permits those.
const UNSAFE_MODE: &str = "enable_unsafe_noiommu_mode";

/// The module of type 1.
const TYPE1: &str = "vfio_iommu_type1";

/// The node of VFIO containers.
const CONTAINER: &str = "/dev/vfio/vfio";

/// The node of iommufd.
const IOMMUFD: &str = "/dev/iommu";
