//! The limits of a process's pins, and its use of them.

use std::io;
use std::path::{Path, PathBuf};

use super::{MachineFiles, field, kib_field};
use crate::os;
use crate::plan::forecast::PaperPool;

/// What the kernel allows a process, and what it has of that.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessLimits {
    /// `RLIMIT_MEMLOCK` in bytes; `None` where nothing limits the process, as with
    /// `CAP_IPC_LOCK`.
    pub memlock: Option<u64>,
    /// Whether it has `CAP_IPC_LOCK`, where that lifts the limit: not in a user namespace.
    pub has_ipc_lock: bool,
    /// Whether it is in a user namespace, as in a container that root did not start.
    pub in_user_namespace: bool,
    /// The bytes that it has locked, those that VFIO type 1 pinned among them (`VmLck`).
    pub locked: u64,
    /// The bytes that iommufd and io_uring pinned for it (`VmPin`).
    pub pinned: u64,
    /// The bytes that the limits of its memory cgroup leave; `None` where nothing limits it.
    pub cgroup_left: Option<u64>,
    /// The file that has the tightest of those limits.
    pub cgroup_file: Option<PathBuf>,
}

/// The reason why a process cannot be looked at.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// There is none of that number.
    #[error(
        "there is no process {pid}: it has ended, or it is in a container whose numbers are \
         others; {}", in_containers(*pid, inside)
    )]
    Gone {
        /// Its number.
        pid: u32,
        /// The numbers here of processes that have this number in a container.
        inside: Vec<u32>,
    },
    /// It is somebody else's.
    #[error(
        "{file} of process {pid} may not be read ({why}): it runs as another user or in a \
         container; run this as root or as that user"
    )]
    NotPermitted {
        /// Its number.
        pid: u32,
        /// The file in its folder of `/proc`.
        file: &'static str,
        /// What the system says.
        why: String,
    },
}

fn in_containers(pid: u32, inside: &[u32]) -> String {
    let numbers: Vec<String> = inside.iter().map(u32::to_string).collect();
    match numbers.is_empty() {
        true => "`pgrep -f NAME` on the host lists processes".to_owned(),
        false => format!("{} has the number {pid} in a container", numbers.join(" or ")),
    }
}

impl MachineFiles {
    /// Why a file of a process cannot be read.
    pub(super) fn process_error(
        &self,
        pid: u32,
        file: &'static str,
        error: &io::Error,
    ) -> ProcessError {
        match error.raw_os_error() {
            // Also a process that ends while its files are read.
            Some(libc::ESRCH | libc::ENOENT) => {
                ProcessError::Gone { pid, inside: self.with_inner_number(pid) }
            }
            _ => ProcessError::NotPermitted { pid, file, why: os::words(os::errno(error)) },
        }
    }

    /// Processes that have a number in a PID namespace of their own (`NSpid` of proc(5)).
    fn with_inner_number(&self, pid: u32) -> Vec<u32> {
        let has = |name: &String| {
            let outer = name.parse::<u32>().ok()?;
            let status = self.text(Path::new("proc").join(name).join("status"))?;
            let mut numbers = field(&status, "NSpid:")?.split_whitespace().skip(1);
            numbers.any(|inner| inner.parse() == Ok(pid)).then_some(outer)
        };
        self.names("proc").iter().filter_map(has).collect()
    }

    /// How many mappings a container of VFIO type 1 may have (`dma_entry_limit`); `None` where the
    /// module is not loaded.
    pub fn entry_limit(&self) -> Option<u64> {
        self.number("sys/module/vfio_iommu_type1/parameters/dma_entry_limit")
    }

    /// The pools of hugetlb pages of the machine, the smallest pages first
    /// (Documentation/admin-guide/mm/hugetlbpage.rst).
    pub fn pools(&self) -> Vec<PaperPool> {
        let folder = Path::new("sys/kernel/mm/hugepages");
        let pool = |name: &String| {
            let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let count = |file: &str| self.number(folder.join(name).join(file));
            let (all, free) = (count("nr_hugepages")?, count("free_hugepages")?);
            let more = count("nr_overcommit_hugepages").unwrap_or(0);
            // Those that somebody has mapped and not touched are not free.
            let free = free.saturating_sub(count("resv_hugepages").unwrap_or(0));
            let page = kib.saturating_mul(1024);
            let pages = all.saturating_add(more);
            Some(PaperPool { page, pages, free: free.saturating_add(more) })
        };
        let mut pools: Vec<PaperPool> = self.names(folder).iter().filter_map(pool).collect();
        pools.sort_unstable_by_key(|pool| pool.page);
        pools
    }

    /// What a process may pin and use, and what it has pinned.
    ///
    /// # Errors
    ///
    /// [`ProcessError`] where there is none, or its files may not be read.
    pub fn limits_of(&self, pid: u32) -> Result<ProcessLimits, ProcessError> {
        let folder = Path::new("proc").join(pid.to_string());
        let read = |name: &'static str| {
            self.read(folder.join(name)).map_err(|error| self.process_error(pid, name, &error))
        };
        let (status, limits) = (read("status")?, read("limits")?);
        let process = self.path(&folder);
        let has_ipc_lock = os::capabilities(&process) & os::CAP_IPC_LOCK != 0;
        let limit = field(&limits, "Max locked memory").and_then(|line| {
            let soft = line.split_whitespace().next()?;
            soft.parse().ok()
        });
        let cgroups = read("cgroup").unwrap_or_default();
        let left = self.cgroup_left(&cgroups);
        Ok(ProcessLimits {
            memlock: limit.filter(|_| !has_ipc_lock),
            has_ipc_lock,
            in_user_namespace: os::is_in_user_namespace(&process),
            locked: kib_field(&status, "VmLck:").unwrap_or(0),
            pinned: kib_field(&status, "VmPin:").unwrap_or(0),
            cgroup_left: left.as_ref().map(|(left, _)| *left),
            cgroup_file: left.map(|(_, file)| file),
        })
    }

    /// What the limits of a process's cgroup and of those around it leave, in bytes, and the file
    /// of the tightest; `None` where nothing limits it. Below the root are the cgroups of version
    /// 2, and in its folder `memory` those of version 1: machines that have both limit memory by
    /// version 1 alone.
    ///
    /// The kernel ends a process that exceeds them, without an error to catch.
    fn cgroup_left(&self, cgroups: &str) -> Option<(u64, PathBuf)> {
        let root = Path::new("sys/fs/cgroup");
        let of_line = |line: &str| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, own) = (parts.next()?, parts.next()?.trim_start_matches('/'));
            let (root, files) = match controllers {
                "" => (root.to_owned(), &V2),
                _ if controllers.split(',').any(|name| name == "memory") => {
                    (root.join("memory"), &V1)
                }
                _ => return None,
            };
            // A container may see its own cgroup as the root, and the path as its host names it.
            let own = root.join(own);
            let around = own.ancestors().take_while(|dir| dir.starts_with(&root));
            around.filter_map(|dir| self.left_in(dir, files)).min()
        };
        cgroups.lines().filter_map(of_line).min()
    }

    fn left_in(&self, dir: &Path, files: &CgroupFiles) -> Option<(u64, PathBuf)> {
        let file = dir.join(files.limit);
        let limit = self.number(&file)?;
        let used = self.number(dir.join(files.used)).unwrap_or(0);
        let stat = self.text(dir.join("memory.stat")).unwrap_or_default();
        let counter = |name: &&str| field(&stat, name)?.parse::<u64>().ok();
        let cached = files.cached.iter().filter_map(counter).fold(0, u64::saturating_add);
        let is_limit = limit < NO_LIMIT;
        let left = limit.saturating_sub(used.saturating_sub(cached));
        is_limit.then(|| (left, self.path(file)))
    }
}

/// No machine has so much memory: version 1 of cgroups writes a number above where nothing limits.
const NO_LIMIT: u64 = 1 << 60;

/// What a version of cgroups calls a limit of memory and what counts against it.
struct CgroupFiles {
    limit: &'static str,
    used: &'static str,
    /// Of `memory.stat`, the cached files, which are counted and go when memory is needed.
    cached: [&'static str; 2],
}

/// Version 2 (Documentation/admin-guide/cgroup-v2.rst, "Memory").
const V2: CgroupFiles = CgroupFiles {
    limit: "memory.max",
    used: "memory.current",
    cached: ["inactive_file ", "active_file "],
};

/// Version 1 (Documentation/admin-guide/cgroup-v1/memory.rst).
const V1: CgroupFiles = CgroupFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_inactive_file ", "total_active_file "],
};
