//! Whether the kernel agrees that memory is pinned.

use std::fs;

use dmaspan_linux::vfio::Backend;
use dmaspan_linux::{MemoryKind, PinMethod};

use crate::machine::kib_field;
use crate::size::ByteSize;

/// How many bytes of this process the kernel counts as pinned (proc_pid_status(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counter {
    /// Where the kernel counts them: `None` where it does not.
    field: Option<&'static str>,
    before: Option<u64>,
}

/// What the kernel counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    /// Everything that was pinned.
    All,
    /// It does not count such pins, or does not tell.
    Untold,
}

/// The kernel counts less than what was pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the kernel counts only {} of {} as pinned ({field} in /proc/self/status)",
    ByteSize::new(*counted), ByteSize::new(*bytes)
)]
pub(crate) struct NotPinned {
    counted: u64,
    bytes: u64,
    field: &'static str,
}

/// The kernel counts something as pinned that is unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "after the unmap the kernel counts {} more as pinned than before the map ({field} in \
     /proc/self/status)",
    ByteSize::new(*more)
)]
pub(crate) struct StillPinned {
    more: u64,
    field: &'static str,
}

impl Counter {
    /// Reads what the kernel itself has pinned for a device (`vfio_lock_acct` of
    /// drivers/vfio/vfio_iommu_type1.c, `do_update_pinned` of drivers/iommu/iommufd/pages.c).
    pub(crate) fn of_kernel(backend: Backend) -> Self {
        let field = match backend {
            Backend::Vfio => "VmLck:",
            Backend::Iommufd | Backend::Compat => "VmPin:",
        };
        Self { field: Some(field), before: read(field) }
    }

    /// Reads what is pinned before memory of a kind is.
    pub(crate) fn before(method: PinMethod, kind: MemoryKind) -> Self {
        let field = match method {
            PinMethod::IoUring => Some("VmPin:"),
            // Hugetlb pages are never swapped, so the kernel marks and counts no lock of theirs.
            _ if kind.is_hugetlb() => None,
            _ => Some("VmLck:"),
        };
        Self { field, before: field.and_then(read) }
    }

    /// Whether `bytes` more are pinned now.
    ///
    /// # Errors
    ///
    /// [`NotPinned`] where the kernel counts less.
    pub(crate) fn after(self, bytes: u64) -> Result<Counted, NotPinned> {
        self.compare(bytes, self.field.and_then(read))
    }

    /// Whether nothing more is pinned than before.
    ///
    /// # Errors
    ///
    /// [`StillPinned`] where the kernel counts more.
    pub(crate) fn after_unmap(self) -> Result<(), StillPinned> {
        self.compare_unmapped(self.field.and_then(read))
    }

    fn compare_unmapped(self, after: Option<u64>) -> Result<(), StillPinned> {
        let (Some(field), Some(before), Some(after)) = (self.field, self.before, after) else {
            return Ok(());
        };
        let (more, field) = (after.saturating_sub(before), field.trim_end_matches(':'));
        if more > 0 { Err(StillPinned { more, field }) } else { Ok(()) }
    }

    fn compare(self, bytes: u64, after: Option<u64>) -> Result<Counted, NotPinned> {
        let (Some(field), Some(before), Some(after)) = (self.field, self.before, after) else {
            return Ok(Counted::Untold);
        };
        let counted = after.saturating_sub(before);
        let field = field.trim_end_matches(':');
        if counted < bytes { Err(NotPinned { counted, bytes, field }) } else { Ok(Counted::All) }
    }
}

fn read(field: &str) -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/self/status").ok()?, field)
}

/// Held by tests that pin: a process may pin little, and what it pins is counted together.
#[cfg(test)]
pub(crate) fn pinning_turn() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_that_the_kernel_does_not_count_is_refused() {
        let counter = Counter { field: Some("VmPin:"), before: Some(8192) };
        assert_eq!(counter.compare(4096, Some(12288)), Ok(Counted::All));
        let error = counter.compare(8192, Some(12288)).unwrap_err();
        let text = "the kernel counts only 4 KiB of 8 KiB as pinned (VmPin in /proc/self/status)";
        assert_eq!(error.to_string(), text);
        assert!(counter.compare(4096, Some(0)).is_err());
        assert_eq!(counter.compare(4096, None), Ok(Counted::Untold));
    }

    #[test]
    fn a_pin_that_outlives_its_mapping_is_refused() {
        let counter = Counter { field: Some("VmLck:"), before: Some(8192) };
        assert_eq!(counter.compare_unmapped(Some(8192)), Ok(()));
        assert_eq!(counter.compare_unmapped(Some(4096)), Ok(()));
        assert_eq!(counter.compare_unmapped(None), Ok(()));
        let error = counter.compare_unmapped(Some(12288)).unwrap_err();
        assert!(error.to_string().contains("counts 4 KiB more as pinned"), "{error}");
    }

    #[test]
    fn locked_hugetlb_pages_are_not_counted() {
        let counter = Counter::before(PinMethod::Mlock, MemoryKind::Hugetlb2M);
        assert_eq!(counter.after(4096), Ok(Counted::Untold));
    }

    #[test]
    fn memory_that_nobody_pinned_is_not_counted() {
        let _turn = pinning_turn();
        let counter = Counter::before(PinMethod::IoUring, MemoryKind::Base);
        if counter.before.is_none() {
            return eprintln!("SKIP: the kernel does not tell what is pinned");
        }
        assert!(counter.after(4096).is_err());
    }
}
