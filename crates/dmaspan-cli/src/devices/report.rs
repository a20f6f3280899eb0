//! The JSON of `dmaspan devices`. Its names and units are a contract.

use std::fmt::Display;
use std::path::PathBuf;

use dmaspan_linux::pci::{
    BarInfo, BarSpace, Function, FunctionKind, Group, GroupKind, Iommu, Presence, Reason, System,
};
use dmaspan_linux::vfio::Backend;
use serde::Serialize;

/// All that is printed.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// `active`, `off` or `none`.
    pub(super) iommu: &'static str,
    /// What refuses nothing now and may later.
    pub(super) hints: Vec<String>,
    /// In the order in which they were asked for.
    pub(super) devices: Vec<Device>,
}

/// A function.
#[derive(Debug, Serialize)]
pub(super) struct Device {
    pub(super) bdf: String,
    pub(super) vendor: String,
    pub(super) device: String,
    pub(super) class: String,
    pub(super) class_name: &'static str,
    pub(super) driver: Option<String>,
    pub(super) driver_override: Option<String>,
    /// `physical` or `virtual`, of SR-IOV.
    pub(super) kind: &'static str,
    pub(super) present: bool,
    pub(super) bridge: bool,
    pub(super) numa_node: Option<u32>,
    pub(super) bars: Vec<BarRow>,
    pub(super) group: Option<GroupRow>,
    /// Where VFIO opens it, while its driver is bound.
    pub(super) group_node: Option<PathBuf>,
    /// Where iommufd opens it, where that is there.
    pub(super) cdev_node: Option<PathBuf>,
    /// What the system uses it for.
    pub(super) uses: Vec<String>,
    pub(super) type1: Verdict,
    pub(super) iommufd: Verdict,
    /// Without an IOMMU.
    pub(super) noiommu: Verdict,
    /// What gives it back to its driver.
    pub(super) give_back: Vec<String>,
}

/// A base address register.
#[derive(Debug, Serialize)]
pub(super) struct BarRow {
    pub(super) index: u8,
    pub(super) bytes: u64,
    /// `io`, `memory` or `prefetchable`.
    pub(super) space: &'static str,
}

/// A group.
#[derive(Debug, Serialize)]
pub(super) struct GroupRow {
    pub(super) number: u32,
    /// As the kernel writes it: `DMA`, `DMA-FQ`, `identity`, `blocked`.
    #[serde(rename = "type")]
    pub(super) domain: String,
    /// Whether there is no IOMMU behind it.
    pub(super) noiommu: bool,
    pub(super) members: Vec<MemberRow>,
}

/// A member of a group.
#[derive(Debug, Serialize)]
pub(super) struct MemberRow {
    pub(super) bdf: String,
    pub(super) driver: Option<String>,
    /// Whether its driver keeps the group from being used.
    pub(super) blocks: bool,
}

/// Whether one way of using a function is open.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Verdict {
    pub(super) usable: bool,
    pub(super) reasons: Vec<ReasonRow>,
    /// In order, for a shell of root; `#` begins what is to be done by hand.
    pub(super) commands: Vec<String>,
    /// What is wrong with the whole machine, which is said once.
    #[serde(skip)]
    pub(super) of_machine: bool,
}

/// Why it is not.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct ReasonRow {
    pub(super) name: &'static str,
    pub(super) text: String,
    /// The one that decides: no command changes it while this kernel runs.
    #[serde(rename = "final")]
    pub(super) is_final: bool,
}

impl Report {
    pub(super) fn new(system: &System, functions: &[Function]) -> Self {
        let iommu = match system.iommu() {
            Iommu::Active => "active",
            Iommu::SwitchedOff { .. } | Iommu::NotBuilt { .. } => "off",
            _ => "none",
        };
        Self {
            iommu,
            hints: texts(&system.hints()),
            devices: functions.iter().map(|function| device(system, function)).collect(),
        }
    }
}

impl Verdict {
    fn new(system: &System, function: &Function, backend: Backend) -> Self {
        let reasons = system.verdict(function, backend);
        let row = |reason: &Reason| ReasonRow {
            name: reason.name(),
            text: reason.to_string(),
            is_final: reason.is_final(),
        };
        Self {
            usable: reasons.is_empty(),
            of_machine: matches!(reasons[..], [Reason::NoIommu { .. }]),
            reasons: reasons.iter().map(row).collect(),
            commands: texts(&system.steps(function, backend)),
        }
    }
}

fn device(system: &System, function: &Function) -> Device {
    Device {
        bdf: function.bdf.to_string(),
        vendor: format!("{:04x}", function.vendor),
        device: format!("{:04x}", function.device),
        class: format!("{:06x}", function.class.raw()),
        class_name: function.class.name(),
        driver: function.driver.clone(),
        driver_override: function.driver_override.clone(),
        kind: match function.kind {
            FunctionKind::Physical => "physical",
            FunctionKind::Virtual => "virtual",
        },
        present: function.presence == Presence::Present,
        bridge: function.class.is_bridge(),
        numa_node: function.numa_node,
        bars: function.bars.iter().map(bar).collect(),
        group: function.group.as_ref().map(group),
        group_node: function.group_node(),
        cdev_node: function.cdev_node(),
        uses: texts(&function.uses),
        type1: Verdict::new(system, function, Backend::Vfio),
        iommufd: Verdict::new(system, function, Backend::Iommufd),
        noiommu: Verdict::new(system, function, Backend::NoIommu),
        give_back: texts(&system.give_back(function)),
    }
}

fn bar(bar: &BarInfo) -> BarRow {
    let space = match bar.space {
        BarSpace::Io => "io",
        BarSpace::Memory => "memory",
        BarSpace::Prefetchable => "prefetchable",
    };
    BarRow { index: bar.index, bytes: bar.bytes, space }
}

fn group(group: &Group) -> GroupRow {
    let members = group.members.iter().map(|member| MemberRow {
        bdf: member.bdf.to_string(),
        driver: member.driver.clone(),
        blocks: member.blocks_group(),
    });
    GroupRow {
        number: group.number,
        domain: group.domain.name().to_owned(),
        noiommu: group.kind == GroupKind::NoIommu,
        members: members.collect(),
    }
}

fn texts(all: &[impl Display]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}
