//! This reads `/proc` and `/sys`, and puts errors of system calls in words.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

use dmaspan::{Errno, IovaRange};

/// The size of transparent huge pages where the kernel does not say: x86-64's, and Arm's with 4 KiB
/// pages.
const THP_SIZE_DEFAULT: u64 = 2 << 20;

/// `CAP_IPC_LOCK` (include/uapi/linux/capability.h): no limit of locked memory.
pub(crate) const CAP_IPC_LOCK: u64 = 1 << 14;

/// Errors that the core has no name for (include/uapi/asm-generic/errno.h and errno-base.h).
pub(crate) const EAGAIN: Errno = Errno::from_raw(libc::EAGAIN);
pub(crate) const EACCES: Errno = Errno::from_raw(libc::EACCES);
pub(crate) const EMFILE: Errno = Errno::from_raw(libc::EMFILE);
pub(crate) const ENFILE: Errno = Errno::from_raw(libc::ENFILE);
pub(crate) const ENOSYS: Errno = Errno::from_raw(libc::ENOSYS);
pub(crate) const ENXIO: Errno = Errno::from_raw(libc::ENXIO);
pub(crate) const EBADF: Errno = Errno::from_raw(libc::EBADF);
pub(crate) const EBADFD: Errno = Errno::from_raw(libc::EBADFD);
pub(crate) const ENOTTY: Errno = Errno::from_raw(libc::ENOTTY);
pub(crate) const EMSGSIZE: Errno = Errno::from_raw(libc::EMSGSIZE);

/// The errno of an error that a system call gave.
pub(crate) fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

/// The errno of the system call that failed last on this thread.
pub(crate) fn last_errno() -> Errno {
    errno(&io::Error::last_os_error())
}

/// The system's sentence for an errno.
pub(crate) fn words(errno: Errno) -> String {
    let text = io::Error::from_raw_os_error(errno.get()).to_string();
    // The standard library adds the number in parentheses.
    match text.rsplit_once(" (os error ") {
        Some((words, _)) => words.to_owned(),
        None => text,
    }
}

/// A number of bytes, displayed in the largest unit of which it is a multiple.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size(pub(crate) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        match [(30, "GiB"), (20, "MiB"), (10, "KiB")]
            .into_iter()
            .find(|(lg2, _)| bytes != 0 && bytes.trailing_zeros() >= *lg2)
        {
            Some((lg2, unit)) => write!(f, "{} {unit}", bytes >> lg2),
            None if bytes == 1 => f.write_str("1 byte"),
            None => write!(f, "{bytes} bytes"),
        }
    }
}

/// Several words of a message, one behind the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words<'a, T>(pub(crate) &'a [T]);

/// The lowest and the highest address of memory, where the kernel says it (`/proc/iomem`): without
/// `CAP_SYS_ADMIN` all of them are 0.
pub(crate) fn memory_extent() -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/iomem").ok()?;
    let range = |line: &str| {
        let (range, name) = line.split_once(" : ")?;
        let (first, last) = range.split_once('-')?;
        let number = |hex| u64::from_str_radix(hex, 16).ok();
        (name == "System RAM").then_some((number(first)?, number(last)?))
    };
    let all = text.lines().filter_map(range);
    let hull = all.reduce(|(first, last), (start, end)| (first.min(start), last.max(end)));
    hull.filter(|(_, last)| *last > 0)
}

/// How many ranges a message names before it only counts.
const NAMED: usize = 8;

/// Ranges, one after the other; of many the first ones, and how many more there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ranges<'a>(pub(crate) &'a [IovaRange]);

impl fmt::Display for Ranges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (named, more) = self.0.split_at(self.0.len().min(NAMED));
        let Some((first, others)) = named.split_first() else { return f.write_str("nothing") };
        write!(f, "{first}")?;
        others.iter().try_for_each(|range| write!(f, " and {range}"))?;
        if more.is_empty() { Ok(()) } else { write!(f, " and {} more", more.len()) }
    }
}

/// The parts of a range that something is said of, with the verb: "A of B is", "A and B of C are".
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts<'a>(pub(crate) IovaRange, pub(crate) &'a [IovaRange]);

impl fmt::Display for Parts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(whole, parts) = *self;
        let named = Ranges(parts);
        match *parts {
            [part] if part == whole => write!(f, "{whole} is"),
            [_] => write!(f, "{named} of {whole} is"),
            _ => write!(f, "{named} of {whole} are"),
        }
    }
}

/// The number that a file of `/sys` or `/proc` holds.
pub(crate) fn read_number(path: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(path)?;
    text.trim().parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// The size of a transparent huge page, which a PMD entry maps.
pub(crate) fn thp_size() -> u64 {
    static SIZE: OnceLock<u64> = OnceLock::new();
    *SIZE.get_or_init(|| {
        read_number(Path::new("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"))
            .ok()
            .filter(|size| size.is_power_of_two())
            .unwrap_or(THP_SIZE_DEFAULT)
    })
}

/// Bytes that can be allocated without swapping; `None` where the kernel does not say
/// (`MemAvailable` of proc(5)).
pub(crate) fn available_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = field(&text, "MemAvailable:")?.trim_end_matches(" kB").parse().ok()?;
    kib.checked_mul(1024)
}

/// Bytes that the process has locked, what VFIO pinned for it included (`VmLck` of proc(5)).
pub(crate) fn locked_bytes() -> u64 {
    status_bytes("VmLck:")
}

/// Bytes that iommufd, io_uring and others pinned for the process (`VmPin` of proc(5)).
pub(crate) fn pinned_bytes() -> u64 {
    status_bytes("VmPin:")
}

fn status_bytes(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = field(&status, name).map(|value| value.trim_end_matches(" kB"));
    kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0).saturating_mul(1024)
}

/// Whether this thread may lock memory without limit.
pub(crate) fn may_lock_without_limit() -> bool {
    capabilities(Path::new("/proc/thread-self")) & CAP_IPC_LOCK != 0
}

/// The capabilities that a process has of the machine, of which procfs tells in the folder
/// `process`: none where it is in a user namespace.
pub(crate) fn capabilities(process: &Path) -> u64 {
    let status = fs::read_to_string(process.join("status")).unwrap_or_default();
    let effective = field(&status, "CapEff:").and_then(|hex| u64::from_str_radix(hex, 16).ok());
    effective.filter(|_| !is_in_user_namespace(process)).unwrap_or(0)
}

/// Whether a process is in another user namespace than the machine's first. Its capabilities count
/// there alone, and lift no limit of the machine (user_namespaces(7)).
pub(crate) fn is_in_user_namespace(process: &Path) -> bool {
    match fs::read_link(process.join("ns/user")) {
        // `PROC_USER_INIT_INO` (include/linux/proc_ns.h).
        Ok(namespace) => namespace != Path::new("user:[4026531837]"),
        // Its map may be read by everybody. A kernel without such namespaces has neither.
        Err(_) => match fs::read_to_string(process.join("uid_map")) {
            Ok(map) => !map.split_whitespace().eq(["0", "0", "4294967295"]),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        },
    }
}

/// What stands behind the name of a capability that this process needs: where it needs it.
pub(crate) fn outside() -> &'static str {
    match is_in_user_namespace(Path::new("/proc/self")) {
        true => " outside of this user namespace, in which it does not count",
        false => "",
    }
}

/// The value of a line `name value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// The start of the block of `size` bytes, a power of two, around `value`.
pub(crate) const fn align_down(value: u64, size: u64) -> u64 {
    value & !(size - 1)
}

const _: () = assert!(align_down(0x1fff, 0x1000) == 0x1000);
const _: () = assert!(align_down(0x2000, 0x1000) == 0x2000);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "Cap:\t1\nCapEff:\t00ff\n";
        assert_eq!(field(text, "CapEff:"), Some("00ff"));
        assert_eq!(field(text, "Missing:"), None);
    }

    #[test]
    fn sizes_are_in_the_largest_unit_that_is_exact() {
        let text = |bytes| Size(bytes).to_string();
        assert_eq!(text(2 << 20), "2 MiB");
        assert_eq!(text(3 << 30), "3 GiB");
        assert_eq!(text(1025 << 10), "1025 KiB");
        assert_eq!(text(1025), "1025 bytes");
        assert_eq!(text(0), "0 bytes");
        assert_eq!(text(1), "1 byte");
    }

    #[test]
    fn words_have_no_number() {
        assert_eq!(words(EACCES), "Permission denied");
    }

    #[test]
    fn the_kernel_says_what_is_available() {
        assert!(available_bytes().unwrap() > 1 << 20);
        assert!(thp_size().is_power_of_two());
    }
}
