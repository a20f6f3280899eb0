//! This checks whether the kernel agrees that memory is pinned.
//!
//! ```text
//! of this process   VmPin, VmLck      exact: what grew is what was pinned
//!      │ grew by nothing, and the process has CAP_IPC_LOCK
//!      ▼
//! of the machine    nr_foll_pin_acquired   a bound: others pin too, so it grew by that or more
//!      │ cannot be read, or the process's own count cannot
//!      ▼
//! none              the kernel accepted the request, and nothing else is known
//! ```
//!
//! The io_uring of Linux 7.2 charges nothing to a process that has `CAP_IPC_LOCK`, whose `VmPin`
//! stays as it was. Older kernels charge every process.

use std::fmt;
use std::fs;
use std::io;

use dmaspan_linux::vfio::Backend;
use dmaspan_linux::{MemoryKind, PinMethod};
use serde::{Serialize, Serializer};

use dmaspan_cli::machine::{field, has_ipc_lock, kib_field};
use dmaspan_cli::size::ByteSize;

/// What the kernel counts as pinned, read before memory is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counter {
    /// What it counts of this process.
    own: Result<Own, Untold>,
    /// How many pages were pinned in the whole machine since it started; `None` where what this
    /// process pins is always charged to it.
    pages: Option<Result<u64, Untold>>,
}

/// A line of `/proc/self/status` (proc_pid_status(5)), in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Own {
    field: &'static str,
    bytes: u64,
}

/// What showed that memory was pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Witness {
    /// The kernel counts all of it as pinned by this process, in this line of `/proc/self/status`.
    Process(&'static str),
    /// As many pages or more were pinned in the whole machine meanwhile.
    Machine,
    /// The kernel accepted the request. Nothing that could be read counts such pins.
    Accepted(Untold),
}

impl Witness {
    /// Its name in reports: it never changes.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Process(field) => field,
            Self::Machine => FOLL_PIN,
            Self::Accepted(_) => "accepted",
        }
    }
}

impl fmt::Display for Witness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(field) => write!(f, "{field} in {STATUS}"),
            Self::Machine => write!(f, "{FOLL_PIN} in {VMSTAT}"),
            Self::Accepted(_) => f.write_str("the kernel's word alone"),
        }
    }
}

impl Serialize for Witness {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Why the kernel does not tell how much is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Untold {
    /// It does not count locks of hugetlb pages, which are never swapped.
    Hugetlb,
    /// A file of procfs cannot be read.
    Unread { path: &'static str, errno: Option<i32> },
    /// The file has no such line.
    NoLine { path: &'static str, name: &'static str },
}

impl fmt::Display for Untold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Hugetlb => f.write_str("the kernel counts no locks of hugetlb pages"),
            Self::Unread { path, errno: Some(libc::ENOENT) } => {
                write!(f, "{path} does not exist, because procfs is not mounted at /proc")
            }
            Self::Unread { path, errno: Some(libc::EMFILE) } => {
                write!(
                    f,
                    "{path} cannot be opened, because this process may open no more files \
                     (EMFILE): raise the limit with `ulimit -n`"
                )
            }
            Self::Unread { path, errno } => {
                let error = errno.map(io::Error::from_raw_os_error);
                let why = error.map_or_else(|| "it is not text".to_owned(), |it| it.to_string());
                write!(f, "{path} cannot be read: {why}")
            }
            Self::NoLine { path, name } => write!(f, "{path} has no line {name}"),
        }
    }
}

/// The kernel counts less than what was pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotPinned {
    /// Of this process.
    #[error(
        "the kernel counts only {} of {} as pinned ({field} in {STATUS})",
        ByteSize::new(*counted), ByteSize::new(*bytes)
    )]
    Process { counted: u64, bytes: u64, field: &'static str },
    /// Of the whole machine.
    #[error(
        "the kernel charged no pins to this process (VmPin in {STATUS} did not change, which is \
         usual with CAP_IPC_LOCK), and the whole machine pinned only {pages} of {wanted} pages \
         ({FOLL_PIN} in {VMSTAT})"
    )]
    Machine { pages: u64, wanted: u64 },
}

/// The kernel counts something as pinned that is unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "after the unmap the kernel counts {} more as pinned than before the map ({field} in {STATUS})",
    ByteSize::new(*more)
)]
pub(crate) struct StillPinned {
    more: u64,
    field: &'static str,
}

impl Counter {
    /// Reads what the kernel itself has pinned for a device (`vfio_lock_acct` of
    /// drivers/vfio/vfio_iommu_type1.c, `do_update_pinned` of drivers/iommu/iommufd/pages.c), which
    /// it charges to every process.
    pub(crate) fn of_kernel(backend: Backend) -> Self {
        let field = match backend {
            Backend::Vfio => "VmLck",
            Backend::Iommufd | Backend::Compat | Backend::NoIommu => "VmPin",
        };
        Self { own: own(field), pages: None }
    }

    /// Reads what is pinned before memory of a kind is.
    pub(crate) fn before(method: PinMethod, kind: MemoryKind) -> Self {
        match method {
            PinMethod::IoUring => {
                let pages = has_ipc_lock().then(pages_pinned);
                Self { own: own("VmPin"), pages }
            }
            _ if kind.is_hugetlb() => Self { own: Err(Untold::Hugetlb), pages: None },
            _ => Self { own: own("VmLck"), pages: None },
        }
    }

    /// What shows that `bytes` more are pinned now.
    ///
    /// # Errors
    ///
    /// [`NotPinned`] where the kernel counts less.
    pub(crate) fn after(self, bytes: u64) -> Result<Witness, NotPinned> {
        let now = self.own.and_then(|before| own(before.field));
        self.compare(bytes, now, pages_pinned)
    }

    /// Whether nothing more is pinned than before.
    ///
    /// # Errors
    ///
    /// [`StillPinned`] where the kernel counts more.
    pub(crate) fn after_unmap(self) -> Result<(), StillPinned> {
        self.compare_unmapped(self.own.and_then(|before| own(before.field)))
    }

    fn compare_unmapped(self, now: Result<Own, Untold>) -> Result<(), StillPinned> {
        let (Ok(before), Ok(now)) = (self.own, now) else { return Ok(()) };
        let more = now.bytes.saturating_sub(before.bytes);
        if more > 0 { Err(StillPinned { more, field: now.field }) } else { Ok(()) }
    }

    fn compare(
        self,
        bytes: u64,
        now: Result<Own, Untold>,
        pages_now: impl Fn() -> Result<u64, Untold>,
    ) -> Result<Witness, NotPinned> {
        let (before, now) = match (self.own, now) {
            (Ok(before), Ok(now)) => (before, now),
            (Err(untold), _) | (_, Err(untold)) => return Ok(Witness::Accepted(untold)),
        };
        let counted = now.bytes.saturating_sub(before.bytes);
        if counted >= bytes {
            return Ok(Witness::Process(now.field));
        }
        let pages_before = match self.pages {
            Some(pages) if counted == 0 => pages,
            _ => return Err(NotPinned::Process { counted, bytes, field: now.field }),
        };
        let pages = match pages_before.and_then(|before| Ok(pages_now()?.saturating_sub(before))) {
            Ok(pages) => pages,
            Err(untold) => return Ok(Witness::Accepted(untold)),
        };
        let wanted = bytes / MemoryKind::Base.page_size();
        // Others pin as well: fewer pages disprove the pins, and more do not.
        if pages < wanted {
            Err(NotPinned::Machine { pages, wanted })
        } else {
            Ok(Witness::Machine)
        }
    }
}

const STATUS: &str = "/proc/self/status";
const VMSTAT: &str = "/proc/vmstat";

/// Read or written, it makes the kernel add to the counters of [`VMSTAT`] what each CPU has noted
/// for itself, up to 125 of each (Documentation/admin-guide/sysctl/vm.rst). Root alone may.
const REFRESH: &str = "/proc/sys/vm/stat_refresh";

/// The pages that were pinned since the machine started, each as often as it was
/// (`NR_FOLL_PIN_ACQUIRED` of include/linux/mmzone.h).
const FOLL_PIN: &str = "nr_foll_pin_acquired";

fn own(field: &'static str) -> Result<Own, Untold> {
    let bytes = kib_field(&read(STATUS)?, &format!("{field}:"));
    let no_line = Untold::NoLine { path: STATUS, name: field };
    Ok(Own { field, bytes: bytes.ok_or(no_line)? })
}

fn pages_pinned() -> Result<u64, Untold> {
    read(REFRESH)?;
    let text = read(VMSTAT)?;
    let pages = field(&text, FOLL_PIN).and_then(|value| value.parse().ok());
    pages.ok_or(Untold::NoLine { path: VMSTAT, name: FOLL_PIN })
}

fn read(path: &'static str) -> Result<String, Untold> {
    let unread = |error: io::Error| Untold::Unread { path, errno: error.raw_os_error() };
    fs::read_to_string(path).map_err(unread)
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

    const UNREAD: Untold = Untold::Unread { path: STATUS, errno: Some(libc::EMFILE) };

    fn own(bytes: u64) -> Result<Own, Untold> {
        Ok(Own { field: "VmPin", bytes })
    }

    fn of_user(bytes: u64) -> Counter {
        Counter { own: own(bytes), pages: None }
    }

    fn not_asked() -> Result<u64, Untold> {
        panic!("the machine's counter is nothing to a process that is charged")
    }

    #[test]
    fn a_pin_that_the_kernel_does_not_count_is_refused() {
        let counter = of_user(8192);
        let compare = |bytes, now| counter.compare(bytes, now, not_asked);
        assert_eq!(compare(4096, own(12288)), Ok(Witness::Process("VmPin")));
        let error = compare(8192, own(12288)).unwrap_err();
        let text = "the kernel counts only 4 KiB of 8 KiB as pinned (VmPin in /proc/self/status)";
        assert_eq!(error.to_string(), text);
        assert!(compare(4096, own(0)).is_err());
        assert_eq!(compare(4096, Err(UNREAD)), Ok(Witness::Accepted(UNREAD)));
    }

    #[test]
    fn pins_that_are_not_charged_are_those_of_the_machine() {
        let counter = Counter { pages: Some(Ok(100)), ..of_user(8192) };
        let compare = |now, pages| counter.compare(1 << 20, now, || pages);
        // 1 MiB is 256 pages, and others may pin at the same time.
        assert_eq!(compare(own(8192), Ok(356)), Ok(Witness::Machine));
        assert_eq!(compare(own(8192), Ok(9000)), Ok(Witness::Machine));
        let error = compare(own(8192), Ok(355)).unwrap_err().to_string();
        let parts = ["pinned only 255 of 256 pages", "nr_foll_pin_acquired", "CAP_IPC_LOCK"];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        // A kernel that charges a part charges all.
        let partly = compare(own(12288), Ok(9000));
        assert!(matches!(partly, Err(NotPinned::Process { counted: 4096, .. })), "{partly:?}");
        assert_eq!(compare(own(8192 + (1 << 20)), Ok(100)), Ok(Witness::Process("VmPin")));
        assert_eq!(compare(own(8192), Err(UNREAD)), Ok(Witness::Accepted(UNREAD)));
        let unread = Counter { pages: Some(Err(UNREAD)), ..counter };
        let untold = unread.compare(1 << 20, own(8192), not_asked);
        assert_eq!(untold, Ok(Witness::Accepted(UNREAD)));
    }

    #[test]
    fn a_pin_that_outlives_its_mapping_is_refused() {
        let counter = of_user(8192);
        assert_eq!(counter.compare_unmapped(own(8192)), Ok(()));
        assert_eq!(counter.compare_unmapped(own(4096)), Ok(()));
        assert_eq!(counter.compare_unmapped(Err(UNREAD)), Ok(()));
        let error = counter.compare_unmapped(own(12288)).unwrap_err();
        assert!(error.to_string().contains("counts 4 KiB more as pinned"), "{error}");
    }

    #[test]
    fn locked_hugetlb_pages_are_not_counted() {
        let counter = Counter::before(PinMethod::Mlock, MemoryKind::Hugetlb2M);
        assert_eq!(counter.after(4096), Ok(Witness::Accepted(Untold::Hugetlb)));
    }

    #[test]
    fn what_keeps_a_count_from_being_read_is_named() {
        let of = |errno| Untold::Unread { path: STATUS, errno: Some(errno) }.to_string();
        assert!(of(libc::EMFILE).contains("EMFILE"), "{}", of(libc::EMFILE));
        assert!(of(libc::ENOENT).contains("procfs is not mounted at /proc"));
        assert!(of(libc::EACCES).contains("cannot be read: Permission denied"));
    }

    #[test]
    fn memory_that_nobody_pinned_is_not_counted() {
        let _turn = pinning_turn();
        let counter = Counter::before(PinMethod::IoUring, MemoryKind::Base);
        // More than all processes of a machine pin meanwhile.
        match counter.after(1 << 56) {
            Ok(Witness::Accepted(why)) => eprintln!("SKIP: {why}"),
            result => assert!(result.is_err(), "{result:?}"),
        }
    }
}
