//! A [`Reason`] says why a function cannot be used, and its steps say what makes it usable.

use std::fmt;
use std::path::PathBuf;

use super::host::{Iommu, IommuTable, MachineKind, NodeOwner};
use super::uses::Use;
use super::{Bdf, Holder, Member};
use crate::os;

/// One thing that keeps a function from being used. Displayed as a sentence without a full stop;
/// [`steps`](Self::steps) is what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// sysfs has no PCI.
    #[error("/sys/bus/pci does not exist: this machine has no PCI, or sysfs is not mounted")]
    NoPci,
    /// There is no such function.
    #[error("there is no PCI function {bdf}")]
    Absent {
        /// Its address.
        bdf: Bdf,
    },
    /// It does not answer.
    #[error("{bdf} reads as all ones: it was removed, or its link is down")]
    Gone {
        /// Its address.
        bdf: Bdf,
    },
    /// VFIO gives no bridges away.
    #[error("{bdf} is a bridge, which VFIO gives to no program: use a device behind it")]
    Bridge {
        /// Its address.
        bdf: Bdf,
    },
    /// No IOMMU works.
    #[error("{}", no_iommu(iommu))]
    NoIommu {
        /// What there is of one.
        iommu: Iommu,
    },
    /// The IOMMU does not translate for it.
    #[error("{bdf} is in no IOMMU group: this machine's IOMMU does not translate its accesses")]
    NoGroup {
        /// Its address.
        bdf: Bdf,
    },
    /// VFIO was told to do without an IOMMU.
    #[error(
        "group {group} belongs to VFIO's mode without IOMMU: the function would reach all memory, \
         and nothing can be mapped for it"
    )]
    NoIommuMode {
        /// The group's number.
        group: u32,
    },
    /// An IOMMU translates for it, so that it is told no physical addresses.
    #[error(
        "an IOMMU translates the accesses of {bdf}, which VFIO gives to nobody without it: use it \
         by iommufd"
    )]
    Translated {
        /// Its address.
        bdf: Bdf,
    },
    /// iommufd has no mode without IOMMU.
    #[error("iommufd takes no function without an IOMMU: {}", no_unsafe_mode(*kernel))]
    NoUnsafeMode {
        /// Whether the kernel can have it.
        kernel: KernelSupport,
    },
    /// VFIO was not told to do without an IOMMU.
    #[error("VFIO's mode without IOMMU is off")]
    UnsafeModeOff {
        /// Whether the module vfio is there, whose parameter it is.
        state: ModuleState,
    },
    /// The process may not drive what reaches all memory.
    #[error(
        "user {uid} has not CAP_SYS_RAWIO{}, which it takes to use a function that reaches all \
         memory",
        os::outside()
    )]
    NoRawIo {
        /// The user of this process.
        uid: u32,
    },
    /// VFIO's driver for PCI functions is not there.
    #[error("the module vfio-pci is not loaded")]
    NoVfioPci,
    /// Another driver has it, or none.
    #[error("{}", not_bound(*bdf, driver.as_deref(), uses))]
    NotBound {
        /// Its address.
        bdf: Bdf,
        /// The driver that has it.
        driver: Option<String>,
        /// What the system uses it for.
        uses: Vec<Use>,
    },
    /// Other functions of the group have drivers that do DMA.
    #[error("its group {group} holds {}", members(blockers))]
    GroupNotViable {
        /// The group's number.
        group: u32,
        /// Those that are in the way.
        blockers: Vec<Member>,
    },
    /// Other processes use devices of the group. No verdict has it: it explains a refusal.
    #[error("its group {group}, which only one user can have, is in use: {}", held_by(holders))]
    GroupHeld {
        /// The group's number.
        group: u32,
        /// The processes; those of other users are seen by root alone.
        holders: Vec<Holder>,
    },
    /// VFIO has no type 1.
    #[error("the module vfio_iommu_type1 is not loaded")]
    NoType1,
    /// There is no iommufd.
    #[error("/dev/iommu does not exist: {}", no_iommufd(*kernel))]
    NoIommufd {
        /// Whether the kernel can have it.
        kernel: KernelSupport,
    },
    /// There is no character device for single functions.
    #[error(
        "the kernel has no node for each VFIO device: it is older than 6.6, or built without \
         CONFIG_VFIO_DEVICE_CDEV"
    )]
    NoCdev,
    /// Devices could forge interrupts, and the kernel refuses to risk it.
    #[error(
        "interrupts are not remapped, so the function could forge those of other devices, and the \
         kernel refuses to attach it"
    )]
    UnsafeInterrupts {
        /// The module whose parameter permits it.
        module: &'static str,
        /// Whether that module is there.
        state: ModuleState,
    },
    /// A node is not there although the driver is bound.
    #[error(
        "{} does not exist: it was not passed into this container, or the kernel was built without \
         it",
        node.display()
    )]
    NodeMissing {
        /// What must be opened.
        node: PathBuf,
    },
    /// The process may not open a node.
    #[error("{}", denied(node, *owner, *uid))]
    Permission {
        /// What it must open.
        node: DeviceNode,
        /// Whose it is; `None` where it will appear when the driver is bound, as root's.
        owner: Option<NodeOwner>,
        /// The user of this process.
        uid: u32,
    },
}

/// Says whether a kernel can get what it lacks now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelSupport {
    /// Its configuration has it, as a module.
    Module,
    /// Its configuration says no.
    Missing,
    /// It is from before the version that has it first.
    Older,
    /// No configuration was found.
    Unknown,
}

/// Says whether a module is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleState {
    /// It is.
    Loaded,
    /// It is not.
    Absent,
}

/// A node of `/dev` that must be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceNode {
    /// One with a known name.
    Path(PathBuf),
    /// The function's own, whose name VFIO chooses when its driver is bound.
    CdevOf(Bdf),
}

impl fmt::Display for DeviceNode {
    /// As a shell reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::CdevOf(bdf) => {
                write!(f, "/dev/vfio/devices/$(ls /sys/bus/pci/devices/{bdf}/vfio-dev)")
            }
        }
    }
}

/// Something to do, in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// A command for a shell of root.
    Run(String),
    /// Something that no command does. It is displayed as a comment.
    ByHand(String),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run(command) => f.pad(command),
            Self::ByHand(what) => write!(f, "# {what}"),
        }
    }
}

/// Devices of PCI, for commands.
const DEVICES: &str = "/sys/bus/pci/devices";

impl Reason {
    /// A short name that never changes: `no-iommu`, `not-bound`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::NoPci => "no-pci",
            Self::Absent { .. } => "absent",
            Self::Gone { .. } => "gone",
            Self::Bridge { .. } => "bridge",
            Self::NoIommu { .. } => "no-iommu",
            Self::NoGroup { .. } => "no-group",
            Self::NoIommuMode { .. } => "no-iommu-mode",
            Self::Translated { .. } => "translated",
            Self::NoUnsafeMode { .. } => "no-unsafe-mode",
            Self::UnsafeModeOff { .. } => "unsafe-mode-off",
            Self::NoRawIo { .. } => "no-raw-io",
            Self::NoVfioPci => "no-vfio-pci",
            Self::NotBound { .. } => "not-bound",
            Self::GroupNotViable { .. } => "group-not-viable",
            Self::GroupHeld { .. } => "group-held",
            Self::NoType1 => "no-type1",
            Self::NoIommufd { .. } => "no-iommufd",
            Self::NoCdev => "no-cdev",
            Self::UnsafeInterrupts { .. } => "unsafe-interrupts",
            Self::NodeMissing { .. } => "node-missing",
            Self::Permission { .. } => "permission",
        }
    }

    /// Returns whether no command changes it while this kernel runs: other reasons do not matter
    /// then.
    pub fn is_final(&self) -> bool {
        match self {
            Self::NoPci
            | Self::Absent { .. }
            | Self::Gone { .. }
            | Self::Bridge { .. }
            | Self::NoIommu { .. }
            | Self::NoGroup { .. }
            | Self::Translated { .. }
            | Self::NoUnsafeMode { .. }
            | Self::NoCdev
            | Self::NodeMissing { .. }
            | Self::NoIommufd { kernel: KernelSupport::Missing | KernelSupport::Older } => true,
            Self::NotBound { uses, .. } => uses.iter().any(is_kept),
            Self::GroupNotViable { blockers, .. } => {
                blockers.iter().flat_map(|member| &member.uses).any(is_kept)
            }
            _ => false,
        }
    }

    /// Returns what takes it away, in order.
    pub fn steps(&self) -> Vec<Step> {
        match self {
            Self::NoPci => vec![run("mount -t sysfs sysfs /sys")],
            Self::Absent { .. } => vec![by_hand("list the functions with `dmaspan devices --all`")],
            Self::Gone { bdf } => vec![
                run(&format!("echo 1 > {DEVICES}/{bdf}/remove")),
                run("echo 1 > /sys/bus/pci/rescan"),
            ],
            Self::Bridge { .. } => Vec::new(),
            Self::NoIommu { iommu } => vec![by_hand(&switch_on(iommu))],
            Self::NoGroup { .. } => vec![by_hand("choose a function that is in a group")],
            Self::NoIommuMode { .. } => vec![
                run("echo N > /sys/module/vfio/parameters/enable_unsafe_noiommu_mode"),
                by_hand("switch an IOMMU on, and bind the driver again"),
            ],
            Self::Translated { .. } => vec![by_hand("use it by iommufd")],
            Self::NoUnsafeMode { .. } => {
                let with = "CONFIG_IOMMUFD, CONFIG_VFIO_DEVICE_CDEV and CONFIG_VFIO_NOIOMMU";
                vec![by_hand(&format!("start a kernel from 7.3 on that was built with {with}"))]
            }
            Self::UnsafeModeOff { state } => switch_unsafe_mode_on(*state),
            Self::NoRawIo { .. } => vec![by_hand("run the program as root, or with CAP_SYS_RAWIO")],
            Self::NoVfioPci => vec![run("modprobe vfio-pci")],
            Self::NotBound { bdf, driver, uses } => bind(*bdf, driver.as_deref(), uses),
            Self::GroupNotViable { blockers, .. } => {
                let each = blockers.iter();
                each.flat_map(|member| bind(member.bdf, member.driver.as_deref(), &member.uses))
                    .collect()
            }
            Self::GroupHeld { .. } => vec![by_hand("end that process, or choose another function")],
            Self::NoType1 => vec![run("modprobe vfio_iommu_type1")],
            Self::NoIommufd { kernel: KernelSupport::Missing } => {
                vec![by_hand("start a kernel that was built with CONFIG_IOMMUFD")]
            }
            Self::NoIommufd { kernel: KernelSupport::Older } => {
                vec![by_hand("start a kernel from 6.6 on that was built with CONFIG_IOMMUFD")]
            }
            Self::NoIommufd { .. } => vec![run("modprobe iommufd")],
            Self::NoCdev => {
                let what = "start a kernel from 6.6 on that was built with CONFIG_VFIO_DEVICE_CDEV";
                vec![by_hand(what)]
            }
            Self::UnsafeInterrupts { module, state } => permit(module, *state),
            Self::NodeMissing { node } => vec![by_hand(&format!(
                "pass it into the container (docker: --device={}), or start a kernel that has it",
                node.display()
            ))],
            Self::Permission { node, uid, .. } => vec![run(&format!("chown {uid} {node}"))],
        }
    }
}

/// What takes all of them away, in order. Where one of them stays, nothing else helps.
pub(crate) fn steps(reasons: &[Reason]) -> Vec<Step> {
    if let Some(last) = reasons.iter().find(|reason| reason.is_final()) {
        return last.steps();
    }
    let mut steps: Vec<Step> = Vec::new();
    for step in reasons.iter().flat_map(Reason::steps) {
        if !steps.contains(&step) {
            steps.push(step);
        }
    }
    steps
}

fn run(command: &str) -> Step {
    Step::Run(command.to_owned())
}

fn by_hand(what: &str) -> Step {
    Step::ByHand(what.to_owned())
}

/// Whether nobody should take a function away that is used so.
fn is_kept(used: &Use) -> bool {
    used.is_vital() || used.is_unknown()
}

/// What binds a function to vfio-pci. What the system cannot do without is not taken from it, nor
/// what it may use unseen.
fn bind(bdf: Bdf, driver: Option<&str>, uses: &[Use]) -> Vec<Step> {
    if let Some(vital) = uses.iter().find(|used| used.is_vital()) {
        return vec![by_hand(&format!(
            "{vital}: the system needs {bdf}, so choose another function"
        ))];
    }
    if let Some(unknown) = uses.iter().find(|used| used.is_unknown()) {
        return vec![by_hand(&format!(
            "{unknown}: run `dmaspan devices {bdf}` on the host, outside of containers, which has \
             the commands"
        ))];
    }
    let mut steps: Vec<Step> = uses.iter().flat_map(end_use).collect();
    steps.push(run(&format!("echo vfio-pci > {DEVICES}/{bdf}/driver_override")));
    if driver.is_some() {
        steps.push(run(&format!("echo {bdf} > {DEVICES}/{bdf}/driver/unbind")));
    }
    steps.push(run(&format!("echo {bdf} > /sys/bus/pci/drivers_probe")));
    steps
}

/// What gives a function back to the driver that the kernel chooses. It may have none now: a shell
/// that ends at the first error goes on then.
pub(super) fn give_back(bdf: Bdf) -> Vec<Step> {
    vec![
        run(&format!("echo > {DEVICES}/{bdf}/driver_override")),
        run(&format!(
            "test ! -e {DEVICES}/{bdf}/driver || echo {bdf} > {DEVICES}/{bdf}/driver/unbind"
        )),
        run(&format!("echo {bdf} > /sys/bus/pci/drivers_probe")),
    ]
}

fn end_use(used: &Use) -> Vec<Step> {
    match used {
        Use::Mounted { at, .. } => vec![run(&format!("umount {}", quoted(at)))],
        Use::Swap { node } => vec![run(&format!("swapoff {}", quoted(node)))],
        Use::NetworkUp { interface } => vec![
            by_hand(&format!("{interface} is up: its connections will end, perhaps yours too")),
            run(&format!("ip link set {} down", quoted(interface))),
        ],
        Use::Held { holder, .. } => vec![by_hand(&format!("{used}: stop {holder} first"))],
        // Nothing is taken away then.
        Use::Unknown { .. } => Vec::new(),
    }
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%".contains(c);
    if word.chars().all(is_plain) { word.to_owned() } else { shell_quoted(word) }
}

fn shell_quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

fn permit(module: &str, state: ModuleState) -> Vec<Step> {
    let warning = by_hand("only if you trust the device: it can forge interrupts then");
    // A module takes parameters where it is loaded, which another step may have done before.
    let load = match state {
        ModuleState::Loaded => None,
        ModuleState::Absent => Some(run(&format!("modprobe {module}"))),
    };
    let permit = format!("echo 1 > /sys/module/{module}/parameters/allow_unsafe_interrupts");
    [Some(warning), load, Some(Step::Run(permit))].into_iter().flatten().collect()
}

fn switch_unsafe_mode_on(state: ModuleState) -> Vec<Step> {
    let warning = by_hand(
        "only if you trust device and program: they reach all memory, and taint the kernel",
    );
    let load = (state == ModuleState::Absent).then(|| run("modprobe vfio"));
    let on = run("echo Y > /sys/module/vfio/parameters/enable_unsafe_noiommu_mode");
    [Some(warning), load, Some(on)].into_iter().flatten().collect()
}

fn held_by(holders: &[Holder]) -> String {
    let each: Vec<String> = holders.iter().map(Holder::to_string).collect();
    each.join(", ")
}

fn no_iommu(iommu: &Iommu) -> String {
    match iommu {
        // Nothing is refused then; the words are for completeness.
        Iommu::Active => "the IOMMU is active".to_owned(),
        Iommu::SwitchedOff { table, parameter } => {
            let why = match (table, parameter) {
                (_, Some(parameter)) => format!("its command line says {parameter}"),
                // By default only Intel's may be off.
                (IommuTable::Dmar, None) => "its command line does not ask for it".to_owned(),
                (_, None) => {
                    format!("it is built without {}, or its driver failed", options(*table))
                }
            };
            let table = table.name();
            format!("the kernel does not use this machine's IOMMU (ACPI table {table}): {why}")
        }
        Iommu::NotBuilt { table } => format!(
            "the kernel has no driver of this machine's IOMMU (ACPI table {}): it is built without \
             {}",
            table.name(),
            options(*table)
        ),
        Iommu::NotFound { machine: MachineKind::Physical } => {
            "no IOMMU was found: the firmware's settings switch it off, or the machine has none"
                .to_owned()
        }
        Iommu::NotFound { machine: MachineKind::Virtual } => {
            "this virtual machine has no IOMMU".to_owned()
        }
    }
}

/// The names of the options that have the driver: `CONFIG_AMD_IOMMU`.
fn options(table: IommuTable) -> String {
    let each: Vec<String> = table.options().iter().map(|name| format!("CONFIG_{name}")).collect();
    each.join(" or ")
}

fn switch_on(iommu: &Iommu) -> String {
    match iommu {
        Iommu::Active => String::new(),
        Iommu::SwitchedOff { table: IommuTable::Dmar, parameter: Some(parameter) }
            if parameter.starts_with("intel_iommu=on") =>
        {
            "`dmesg | grep -i dmar` says why; the kernel needs CONFIG_INTEL_IOMMU".to_owned()
        }
        Iommu::SwitchedOff { table, parameter } => {
            let why = |word| {
                let options = options(*table);
                format!(
                    "`dmesg | grep -i {word}` says why; if it says nothing, start a kernel that is \
                     built with {options}"
                )
            };
            let add = match (table, parameter) {
                (IommuTable::Dmar, None) => "add intel_iommu=on to the kernel's command line",
                (IommuTable::Dmar, Some(_)) => {
                    "replace that by intel_iommu=on on the kernel's command line"
                }
                (_, Some(_)) => "take that off the kernel's command line",
                (IommuTable::Viot, None) => "`modprobe virtio_iommu`, early at boot",
                (IommuTable::Ivrs, None) => return why("amd-vi"),
                (IommuTable::Iort, None) => return why("smmu"),
            };
            format!("{add}, and boot again")
        }
        Iommu::NotBuilt { table } => {
            format!("start a kernel that was built with {}", options(*table))
        }
        Iommu::NotFound { machine: MachineKind::Physical } => {
            "switch VT-d (Intel), AMD-Vi or IOMMU (AMD), or the SMMU (Arm) on in the firmware's \
             settings, and on Intel boot with intel_iommu=on"
                .to_owned()
        }
        Iommu::NotFound { machine: MachineKind::Virtual } => {
            "give the virtual machine one: with QEMU `-M q35,kernel-irqchip=split -device \
             intel-iommu,intremap=on,caching-mode=on`, and boot with intel_iommu=on"
                .to_owned()
        }
    }
}

fn not_bound(bdf: Bdf, driver: Option<&str>, uses: &[Use]) -> String {
    let mut text = match driver {
        Some(driver) => format!("{bdf} is bound to {driver}, not to vfio-pci"),
        None => format!("{bdf} has no driver and needs vfio-pci"),
    };
    for used in uses {
        text = format!("{text}; {used}");
    }
    text
}

fn members(members: &[Member]) -> String {
    let mut text = String::new();
    for member in members {
        let comma = if text.is_empty() { "" } else { ", " };
        let driver = member.driver.as_deref().unwrap_or("nothing");
        text = format!("{text}{comma}{} (bound to {driver})", member.bdf);
        for used in &member.uses {
            text = format!("{text}, {used}");
        }
    }
    format!("{text}; the IOMMU cannot tell them apart")
}

const fn no_iommufd(kernel: KernelSupport) -> &'static str {
    match kernel {
        KernelSupport::Module => "the module iommufd is not loaded",
        KernelSupport::Missing => "this kernel is built without CONFIG_IOMMUFD",
        KernelSupport::Older => "this kernel is older than 6.2, the first with iommufd",
        KernelSupport::Unknown => {
            "the module iommufd is not loaded, or the kernel is built without CONFIG_IOMMUFD"
        }
    }
}

const fn no_unsafe_mode(kernel: KernelSupport) -> &'static str {
    match kernel {
        KernelSupport::Older => "this kernel is older than 7.3, the first that does",
        _ => "this kernel is built without CONFIG_VFIO_NOIOMMU",
    }
}

fn denied(node: &DeviceNode, owner: Option<NodeOwner>, uid: u32) -> String {
    let name = match node {
        DeviceNode::Path(path) => path.display().to_string(),
        DeviceNode::CdevOf(bdf) => format!("the node of {bdf} in /dev/vfio/devices"),
    };
    match owner {
        Some(owner) => format!("user {uid} may not open {name}, which belongs to {owner}"),
        None => format!("{name} will appear with the driver and belong to root, not to user {uid}"),
    }
}
