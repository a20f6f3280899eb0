//! Each setting of a machine that makes mapping fail or slow, with the command that changes it.

use std::fmt;

use super::MachineFiles;
use crate::os::Size;
use crate::pci::{Iommu, IommuTable, System};
use crate::plan::forecast::LinuxVersion;

/// One thing about a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MachineCheck {
    /// A short name that never changes, for programs.
    pub name: &'static str,
    /// Whether it is as it should be.
    pub is_right: bool,
    /// What it is.
    pub text: String,
    /// What changes it: a command for root, or a sentence; `None` where it is right.
    pub change: Option<String>,
}

impl MachineCheck {
    fn right(name: &'static str, text: impl Into<String>) -> Self {
        Self { name, is_right: true, text: text.into(), change: None }
    }

    fn wrong(name: &'static str, text: impl Into<String>, change: impl Into<String>) -> Self {
        Self { name, is_right: false, text: text.into(), change: Some(change.into()) }
    }
}

impl fmt::Display for MachineCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        self.change.as_ref().map_or(Ok(()), |change| write!(f, ": {change}"))
    }
}

const THP: &str = "sys/kernel/mm/transparent_hugepage";
const NODES: &str = "sys/devices/system/node";

impl MachineFiles {
    /// Looks at transparent huge pages, the pools of hugetlb pages by node, the limits of this
    /// process, the IOMMU, VFIO and the kernel, in this order.
    pub fn checks(&self) -> Vec<MachineCheck> {
        let mut checks = vec![self.thp(), self.shmem()];
        checks.extend(self.pool_checks());
        checks.extend([self.memlock(), self.cgroup(), self.iommu(), self.mappings()]);
        checks.push(self.version());
        checks
    }

    /// The word in brackets of a setting.
    fn setting(&self, file: &str) -> Option<String> {
        let text = self.text(format!("{THP}/{file}"))?;
        let (_, rest) = text.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    }

    fn thp(&self) -> MachineCheck {
        let name = "thp";
        match self.setting("enabled").as_deref() {
            Some(set @ ("always" | "madvise")) => {
                MachineCheck::right(name, format!("transparent huge pages: {set}"))
            }
            Some(set) => MachineCheck::wrong(
                name,
                format!("transparent huge pages: {set}"),
                format!("`echo madvise > /{THP}/enabled`"),
            ),
            None => MachineCheck::wrong(
                name,
                "the kernel has no transparent huge pages",
                "take hugetlb pages, or a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
            ),
        }
    }

    fn shmem(&self) -> MachineCheck {
        let name = "thp-shmem";
        let what = "huge pages in files in memory";
        match self.setting("shmem_enabled").as_deref() {
            Some(set @ ("always" | "within_size" | "advise" | "force")) => {
                MachineCheck::right(name, format!("{what}: {set}"))
            }
            set => MachineCheck::wrong(
                name,
                format!("{what}: {}", set.unwrap_or("none")),
                format!("`echo advise > /{THP}/shmem_enabled`"),
            ),
        }
    }

    /// The pools of the usual size of each node, and those of others that have pages.
    fn pool_checks(&self) -> Vec<MachineCheck> {
        let mut checks = Vec::new();
        let is_node = |name: &String| {
            name.strip_prefix("node").is_some_and(|number| number.parse::<u32>().is_ok())
        };
        let mut nodes: Vec<String> = self.names(NODES).into_iter().filter(is_node).collect();
        nodes.sort_by_key(|name| name.trim_start_matches("node").parse::<u32>().unwrap_or(0));
        let mut folders: Vec<(String, String)> = nodes
            .into_iter()
            .map(|node| (format!("{NODES}/{node}/hugepages"), format!(" of {node}")))
            .collect();
        if folders.is_empty() {
            folders.push(("sys/kernel/mm/hugepages".to_owned(), String::new()));
        }
        for (folder, of_node) in folders {
            for pool in self.names(&folder) {
                checks.extend(self.pool(&format!("{folder}/{pool}"), &pool, &of_node));
            }
        }
        if checks.is_empty() {
            checks.push(MachineCheck::wrong(
                "hugetlb",
                "the kernel has no hugetlb pages",
                "take a kernel with CONFIG_HUGETLBFS",
            ));
        }
        checks
    }

    fn pool(&self, path: &str, pool: &str, of_node: &str) -> Option<MachineCheck> {
        let kib: u64 = pool.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let count = |file: &str| self.number(format!("{path}/{file}"));
        let (all, free) = (count("nr_hugepages")?, count("free_hugepages")?);
        let size = kib.saturating_mul(1024);
        let text = format!("hugetlb pages of {}{of_node}: {all}, of which {free} free", Size(size));
        match (all, free) {
            // Others than the usual ones are there for who asks for them.
            (0, _) if size != 2 << 20 => None,
            (_, 1..) => Some(MachineCheck::right("hugetlb", text)),
            _ => {
                let more = all.saturating_add((1 << 30) / size.clamp(1, 1 << 30));
                // A line of a terminal has room for the short way to it.
                let short = match path.strip_prefix(NODES).and_then(|rest| rest.rsplit_once('/')) {
                    Some((node, _)) => format!("sys/bus/node/devices{node}/*-{kib}kB"),
                    None => path.to_owned(),
                };
                let change = format!("`echo {more} | tee /{short}/nr_hugepages`, for 1 GiB more");
                Some(MachineCheck::wrong("hugetlb", text, change))
            }
        }
    }

    fn memlock(&self) -> MachineCheck {
        let name = "memlock";
        let limits = match self.limits_of(std::process::id()) {
            Ok(limits) => limits,
            Err(error) => {
                let change = "mount procfs at /proc";
                return MachineCheck::wrong(name, error.to_string(), change);
            }
        };
        match limits.memlock {
            None => MachineCheck::right(name, "locked memory: nothing limits this process"),
            Some(limit) if self.available_bytes().is_some_and(|available| limit >= available) => {
                MachineCheck::right(name, format!("locked memory: {} may be locked", Size(limit)))
            }
            Some(limit) if limits.in_user_namespace => MachineCheck::wrong(
                name,
                format!(
                    "locked memory: only {} may be locked (RLIMIT_MEMLOCK); this process is in a \
                     user namespace, where CAP_IPC_LOCK does not lift that",
                    Size(limit)
                ),
                "`--ulimit memlock=-1:-1` where podman or docker starts the container, or \
                 LimitMEMLOCK=infinity in the unit that does",
            ),
            Some(limit) => MachineCheck::wrong(
                name,
                format!("locked memory: only {} may be locked (RLIMIT_MEMLOCK)", Size(limit)),
                "`ulimit -l unlimited`, or LimitMEMLOCK=infinity in the unit",
            ),
        }
    }

    fn cgroup(&self) -> MachineCheck {
        let name = "cgroup";
        let limits = self.limits_of(std::process::id()).ok();
        match limits.and_then(|limits| Some((limits.cgroup_left?, limits.cgroup_file?))) {
            None => MachineCheck::right(name, "memory cgroup: nothing limits this process"),
            Some((left, _)) if self.available_bytes().is_some_and(|most| left >= most) => {
                let text = "memory cgroup: it leaves as much as the machine has";
                MachineCheck::right(name, text)
            }
            Some((left, file)) => {
                let most = if file.ends_with("memory.max") { "max" } else { "-1" };
                let change = format!("`echo {most} > {}`", file.display());
                MachineCheck::wrong(name, format!("memory cgroup: it leaves {left} bytes"), change)
            }
        }
    }

    fn iommu(&self) -> MachineCheck {
        let name = "iommu";
        match System::at(&self.0).iommu() {
            Iommu::Active => MachineCheck::right(name, "IOMMU: the kernel uses one"),
            Iommu::SwitchedOff { table, .. } => {
                let parameter = match table {
                    IommuTable::Dmar => "intel_iommu=on",
                    IommuTable::Ivrs => "amd_iommu=on",
                    _ => "iommu=on",
                };
                MachineCheck::wrong(
                    name,
                    format!("IOMMU: the firmware has one ({}), which is off", table.name()),
                    format!(
                        "add `{parameter}` to GRUB_CMDLINE_LINUX in /etc/default/grub, then \
                         `update-grub && reboot`"
                    ),
                )
            }
            Iommu::NotBuilt { table } => MachineCheck::wrong(
                name,
                format!("IOMMU: the kernel has no driver for the one of {}", table.name()),
                "boot a kernel that has it",
            ),
            _ => MachineCheck::wrong(
                name,
                "IOMMU: none is described by the firmware",
                "switch it on in the firmware (VT-d, AMD-Vi, SMMU); in a virtual machine, give it \
                 one (`-device intel-iommu`)",
            ),
        }
    }

    fn mappings(&self) -> MachineCheck {
        match self.entry_limit() {
            Some(most) => {
                let text = format!("VFIO type1: {most} mappings for each container");
                MachineCheck::right("vfio", text)
            }
            None => MachineCheck::wrong(
                "vfio",
                "VFIO type1 is not loaded",
                "`modprobe -a vfio-pci vfio_iommu_type1`",
            ),
        }
    }

    fn version(&self) -> MachineCheck {
        let name = "kernel";
        match self.kernel() {
            Some(kernel) if kernel >= LinuxVersion::BY_FOLIO => {
                MachineCheck::right(name, format!("Linux {kernel} maps huge pages as a whole"))
            }
            Some(kernel) => MachineCheck::wrong(
                name,
                format!("Linux {kernel} looks up each page of a huge page"),
                format!("boot Linux {} or newer", LinuxVersion::BY_FOLIO),
            ),
            None => MachineCheck::wrong(
                name,
                "the kernel does not say its version",
                "mount procfs at /proc",
            ),
        }
    }
}
