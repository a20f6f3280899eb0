//! Counting instructions (perf_event_open(2)).

use std::fs::File;
use std::io::Read;
use std::os::fd::FromRawFd;

use dmaspan::Errno;

use crate::os;

/// `PERF_TYPE_HARDWARE` and `PERF_COUNT_HW_INSTRUCTIONS` (include/uapi/linux/perf_event.h).
const HARDWARE: u32 = 0;
const INSTRUCTIONS: u64 = 1;

/// `exclude_kernel` and `exclude_hv` of the flags.
const USER_ONLY: u64 = 1 << 5 | 1 << 6;

/// `PERF_ATTR_SIZE_VER0`: the first fields of `struct perf_event_attr`, which every Linux with
/// this call knows.
#[repr(C)]
#[derive(Debug, Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup: u32,
    breakpoint: u32,
    config1: u64,
}

const _: () = assert!(size_of::<Attributes>() == 64);

/// The reason why instructions are not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoCounter {
    /// The machine has no such counter, as many virtual ones.
    #[error("this machine has no counter of instructions ({})", os::words(*.0))]
    Missing(Errno),
    /// The system does not permit it.
    #[error(
        "the kernel does not permit counting instructions ({}): \
         /proc/sys/kernel/perf_event_paranoid should be 2 or less",
        os::words(*.0)
    )]
    Forbidden(Errno),
    /// It failed otherwise.
    #[error("{}", os::words(*.0))]
    Failed(Errno),
}

impl NoCounter {
    /// The kernel's errno.
    pub const fn errno(self) -> Errno {
        match self {
            Self::Missing(errno) | Self::Forbidden(errno) | Self::Failed(errno) => errno,
        }
    }

    fn new(errno: Errno) -> Self {
        if [Errno::ENOENT, Errno::EOPNOTSUPP, Errno::ENODEV, os::ENOSYS].contains(&errno) {
            Self::Missing(errno)
        } else if [Errno::EPERM, os::EACCES].contains(&errno) {
            Self::Forbidden(errno)
        } else {
            Self::Failed(errno)
        }
    }
}

/// Counts the instructions that the thread that made it executes, outside of the kernel.
#[derive(Debug)]
pub struct Instructions {
    counter: File,
}

impl Instructions {
    /// A counter of this thread, which runs from now on.
    ///
    /// # Errors
    ///
    /// [`NoCounter`], by the errors of perf_event_open(2).
    pub fn of_this_thread() -> Result<Self, NoCounter> {
        let size = u32::try_from(size_of::<Attributes>()).unwrap_or(0);
        let attributes = Attributes {
            kind: HARDWARE,
            size,
            config: INSTRUCTIONS,
            flags: USER_ONLY,
            ..Default::default()
        };
        let (this_thread, any_cpu, no_group, cloexec) = (0, -1, -1, 1 << 3);
        // SAFETY:
        // 1. `attributes` is as large as its `size` says and lives until the call returns, which
        //    alone reads it.
        // 2. The event has no buffer: the kernel writes nothing into memory of this process.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attributes,
                this_thread,
                any_cpu,
                no_group,
                cloexec,
            )
        };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0);
        let fd = fd.ok_or_else(|| NoCounter::new(os::last_errno()))?;
        // SAFETY:
        // 1. The kernel has just opened `fd` for us, and nobody else knows it.
        // 2. It is an ordinary file descriptor, which close(2) closes.
        Ok(Self { counter: unsafe { File::from_raw_fd(fd) } })
    }

    /// Returns how many there were so far.
    ///
    /// # Errors
    ///
    /// [`NoCounter::Failed`], by the errors of read(2).
    pub fn read(&self) -> Result<u64, NoCounter> {
        let mut count = [0; 8];
        let read = (&self.counter).read_exact(&mut count);
        read.map_err(|error| NoCounter::Failed(os::errno(&error)))?;
        Ok(u64::from_ne_bytes(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_counted_or_refused_with_a_reason() {
        match Instructions::of_this_thread() {
            Ok(counter) => {
                let before = counter.read().unwrap();
                let sum: u64 = (0..1000u64).map(std::hint::black_box).sum();
                assert_eq!(sum, 499_500);
                assert!(counter.read().unwrap() >= before + 1000);
            }
            Err(error) => assert!(!matches!(error, NoCounter::Failed(_)), "{error}"),
        }
    }
}
