//! The machine's memory, limits and free hugetlb pages, as a plan needs them.

use std::fs;
use std::path::Path;
use std::process;

use dmaspan_linux::MemoryKind;
use dmaspan_linux::machine::MachineFiles;

/// Says how much memory a run may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    available: u64,
    /// Whether a memory cgroup leaves less than the machine has.
    confined: bool,
    lockable: u64,
    /// Where root's rights are, as far as they are not here.
    outside: &'static str,
}

impl Machine {
    /// This machine. Where the kernel does not say what is available nothing is limited here, and
    /// the allocation itself will fail.
    pub fn read() -> Self {
        let machine = MachineFiles::new();
        let available = machine.available_bytes().unwrap_or(u64::MAX);
        let limits = machine.limits_of(process::id()).ok();
        let allowed = limits.as_ref().and_then(|limits| limits.cgroup_left).unwrap_or(u64::MAX);
        let lockable = limits.as_ref().and_then(|limits| limits.memlock).unwrap_or(u64::MAX);
        let is_inside = limits.is_some_and(|limits| limits.in_user_namespace);
        let outside = if is_inside { " outside of this user namespace" } else { "" };
        let confined = allowed < available;
        Self { available: available.min(allowed), confined, lockable, outside }
    }

    /// A machine with so many bytes available, and no limit of what is pinned.
    #[must_use]
    pub const fn with_available(available: u64) -> Self {
        Self { available, confined: false, lockable: u64::MAX, outside: "" }
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

    /// Where a process has root's rights, behind the word `root`: nothing, but in a user namespace.
    pub const fn outside(&self) -> &'static str {
        self.outside
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
    let limits = MachineFiles::new().limits_of(process::id());
    limits.is_ok_and(|limits| limits.has_ipc_lock)
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
    fn this_machine_has_memory() {
        let machine = Machine::read();
        assert!(machine.available() > 1 << 20);
        assert!(
            machine.available_for(MemoryKind::Hugetlb2M) >= machine.available_for(MemoryKind::Base)
        );
    }
}
