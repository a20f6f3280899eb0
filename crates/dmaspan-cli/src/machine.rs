//! The machine's memory, limits and free hugetlb pages, as a plan needs them.

use std::fs;
use std::path::Path;

use dmaspan_linux::MemoryKind;

/// Says how much memory a run may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    available: u64,
    /// Whether a memory cgroup leaves less than the machine has.
    confined: bool,
    lockable: u64,
}

/// `CAP_IPC_LOCK` (include/uapi/linux/capability.h): no limit of locked memory.
const CAP_IPC_LOCK: u32 = 14;

impl Machine {
    /// This machine. Where the kernel does not say what is available nothing is limited here, and
    /// the allocation itself will fail.
    pub fn read() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let available = kib_field(&meminfo, "MemAvailable:").unwrap_or(u64::MAX);
        let cgroup = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let allowed = cgroup_left(Path::new("/sys/fs/cgroup"), &cgroup).unwrap_or(u64::MAX);
        let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let lockable = memlock_limit(&limits, &status).unwrap_or(u64::MAX);
        let confined = allowed < available;
        Self { available: available.min(allowed), confined, lockable }
    }

    /// A machine with so many bytes available, and no limit of what is pinned.
    #[must_use]
    pub const fn with_available(available: u64) -> Self {
        Self { available, confined: false, lockable: u64::MAX }
    }

    /// The same machine for a process that may pin so many bytes.
    #[must_use]
    pub const fn with_lockable(self, lockable: u64) -> Self {
        Self { lockable, ..self }
    }

    /// Bytes that can be allocated without swapping, within the limits of the memory cgroup.
    pub const fn available(&self) -> u64 {
        self.available
    }

    /// What leaves no more available, for an error: the cgroup's limit or the machine.
    pub const fn limited_by(&self) -> &'static str {
        if self.confined { " within the limits of this process's memory cgroup" } else { "" }
    }

    /// Bytes that the process may pin, if nothing of it is pinned yet (`RLIMIT_MEMLOCK`).
    pub const fn lockable(&self) -> u64 {
        self.lockable
    }

    /// Bytes of a kind that are available: free pages of its pool too, where it has one.
    pub fn available_for(&self, kind: MemoryKind) -> u64 {
        let pool = if kind.is_hugetlb() { free_pool_bytes(kind.page_size()) } else { 0 };
        self.available.saturating_add(pool)
    }
}

/// The free hugetlb pages of a size, in bytes.
fn free_pool_bytes(page_size: u64) -> u64 {
    let dir = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page_size / 1024);
    let count = |name: &str| -> u64 { read_number(&Path::new(&dir).join(name)).unwrap_or(0) };
    let free = count("free_hugepages").saturating_sub(count("resv_hugepages"));
    free.saturating_mul(page_size)
}

fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// What stands behind the name of a line.
pub fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// A field of `/proc/meminfo` or `/proc/self/status`, in bytes (proc(5)).
pub fn kib_field(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.strip_suffix(" kB")?.trim_end().parse::<u64>().ok()?.checked_mul(1024)
}

/// Whether this process has `CAP_IPC_LOCK`.
pub fn has_ipc_lock() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    capabilities(&status).is_some_and(|set| set & (1 << CAP_IPC_LOCK) != 0)
}

/// The capabilities that count (capabilities(7)).
fn capabilities(status: &str) -> Option<u64> {
    u64::from_str_radix(field(status, "CapEff:")?, 16).ok()
}

/// The limit of locked memory, in bytes; `None` where there is none (proc(5)).
fn memlock_limit(limits: &str, status: &str) -> Option<u64> {
    if capabilities(status)? & (1 << CAP_IPC_LOCK) != 0 {
        return None;
    }
    field(limits, "Max locked memory")?.split_whitespace().next()?.parse().ok()
}

/// What a version of cgroups calls a limit of memory and what counts against it.
struct Files {
    limit: &'static str,
    used: &'static str,
    /// Of `memory.stat`, the cached files, which are counted and go when memory is needed.
    cached: [&'static str; 2],
}

/// Version 2 (Documentation/admin-guide/cgroup-v2.rst, "Memory").
const V2: Files = Files {
    limit: "memory.max",
    used: "memory.current",
    cached: ["inactive_file ", "active_file "],
};

/// Version 1 (Documentation/admin-guide/cgroup-v1/memory.rst). Without a limit the file has a
/// number that no machine reaches.
const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_inactive_file ", "total_active_file "],
};

/// What the limits of the process's cgroup and of those around it leave, in bytes; `None` where
/// nothing limits it. Below `root` are the cgroups of version 2, and in its folder `memory` those
/// of version 1: machines that have both limit memory by version 1 alone.
///
/// The kernel ends a process that exceeds them, without an error to catch.
fn cgroup_left(root: &Path, own_cgroups: &str) -> Option<u64> {
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, own) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        let (root, files) = match controllers {
            "" => (root.to_owned(), &V2),
            _ if controllers.split(',').any(|name| name == "memory") => (root.join("memory"), &V1),
            _ => return None,
        };
        // A container may see its own cgroup as the root, and the path as its host names it.
        let own = root.join(own);
        let around = own.ancestors().take_while(|dir| dir.starts_with(&root));
        around.filter_map(|dir| left_in(dir, files)).min()
    };
    own_cgroups.lines().filter_map(of_line).min()
}

fn left_in(dir: &Path, files: &Files) -> Option<u64> {
    let limit = read_number(&dir.join(files.limit))?;
    let used = read_number(&dir.join(files.used)).unwrap_or(0);
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let counter = |name: &&str| field(&stat, name)?.parse::<u64>().ok();
    let cached = files.cached.iter().filter_map(counter).fold(0, u64::saturating_add);
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_of_meminfo_is_in_bytes() {
        let text = "MemTotal:       24684084 kB\nMemAvailable:   100 kB\nHugePages_Total:  0\n";
        assert_eq!(kib_field(text, "MemAvailable:"), Some(102_400));
        assert_eq!(kib_field(text, "HugePages_Total:"), None);
        assert_eq!(kib_field(text, "Missing:"), None);
    }

    #[test]
    fn the_limit_of_locked_memory_is_for_those_without_the_capability() {
        let limits =
            "Max processes  1 1 processes\nMax locked memory   8388608   8388608   bytes\n";
        assert_eq!(memlock_limit(limits, "CapEff:\t0000000000000000\n"), Some(8 << 20));
        assert_eq!(memlock_limit(limits, "CapEff:\t0000000000004000\n"), None);
        let unlimited = "Max locked memory   unlimited   unlimited   bytes\n";
        assert_eq!(memlock_limit(unlimited, "CapEff:\t0\n"), None);
        assert_eq!(memlock_limit("", ""), None);
    }

    #[test]
    fn this_machine_has_memory() {
        let machine = Machine::read();
        assert!(machine.available() > 1 << 20);
        assert!(
            machine.available_for(MemoryKind::Hugetlb2M) >= machine.available_for(MemoryKind::Base)
        );
    }

    #[test]
    fn the_tightest_cgroup_counts_without_its_cached_files() {
        let root = std::env::temp_dir().join(format!("dmaspan-cgroup-{}", std::process::id()));
        let write = |dir: &str, name: &str, text: &str| {
            let dir = root.join(dir);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join(name), text).unwrap();
        };
        write("a/b", "memory.max", "max\n");
        write("a", "memory.max", "1000\n");
        write("a", "memory.current", "700\n");
        write("a", "memory.stat", "anon 300\ninactive_file 100\nactive_file 300\n");
        assert_eq!(cgroup_left(&root, "1:cpu:/x\n0::/a/b\n"), Some(700));
        assert_eq!(cgroup_left(&root, "0::/c\n"), None);
        assert_eq!(cgroup_left(&root, ""), None);
        write("memory/a/b", "memory.limit_in_bytes", "9223372036854771712\n");
        write("memory/a", "memory.limit_in_bytes", "900\n");
        write("memory/a", "memory.usage_in_bytes", "700\n");
        let stat = "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 200\n";
        write("memory/a", "memory.stat", stat);
        assert_eq!(cgroup_left(&root, "4:cpu,memory:/a/b\n1:cpu:/x\n0::/\n"), Some(500));
        assert_eq!(cgroup_left(&root, "4:memory:/a/b\n0::/a/b\n"), Some(500));
        // The host's path of a container that sees its own cgroup as the root.
        write("memory", "memory.limit_in_bytes", "300\n");
        assert_eq!(cgroup_left(&root, "4:memory:/docker/x\n"), Some(300));
        fs::remove_dir_all(root).unwrap();
    }
}
