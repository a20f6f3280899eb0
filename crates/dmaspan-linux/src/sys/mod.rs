//! System calls, each wrapped so that nothing unsafe is left for its caller.
//!
//! All unsafe blocks of the crate are here. Outside it there are unsafe promises, the
//! implementations of [`Pinner`](dmaspan::pin::Pinner) in `pinner` and of
//! [`PoolMemory`](dmaspan::swiotlb::PoolMemory) in `bounce` and `physical`, of
//! [`DmaMemory`](dmaspan::dma::DmaMemory) in `physical`, and what is said of memory in
//! [`ExclusiveMemory`](crate::mem::ExclusiveMemory) and of adopted [`Memory`](crate::mem::Memory).
//! [`direct_map`] finds pinned memory by its physical addresses.
//! [`mapping`] owns memory, [`bytes`] copies it, [`uring`] pins it by the tables of [`ring`]s, and
//! [`scan`] asks the kernel which of it huge leaves map. [`slices`] hands parts of it out, and
//! [`flight`] and [`flights`] keep them while the kernel reads or writes them. [`vfio`] and
//! [`iommufd`] make the requests of a kernel that maps memory for devices, whose structures are in
//! [`uapi`]; [`kernel_mapping`] holds that memory until it is unmapped, and [`mapping_table`] knows
//! what is mapped where. [`vectored`] reads and writes files straight from and to a client's
//! memory. [`bar`] maps devices' registers, and [`eventfd`] is how they interrupt; [`aio`] signals
//! the eventfds of others. [`stdio`] is for programs.

#![expect(unsafe_code, reason = "system calls of the C library")]

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;
use std::time::Duration;

use dmaspan::Errno;

use crate::os;

pub(crate) mod aio;
pub(crate) mod bar;
pub(crate) mod bytes;
pub(crate) mod direct_map;
pub(crate) mod eventfd;
pub(crate) mod flight;
pub(crate) mod flights;
pub(crate) mod iommufd;
pub(crate) mod kernel_mapping;
pub(crate) mod mapping;
pub(crate) mod mapping_table;
pub(crate) mod perf;
mod request;
pub(crate) mod ring;
pub(crate) mod scan;
pub mod signals;
pub(crate) mod slices;
pub mod stdio;
pub(crate) mod uapi;
pub(crate) mod uring;
pub(crate) mod vectored;
pub(crate) mod vfio;

/// The size of a base page, in bytes.
pub(crate) fn page_size() -> u64 {
    static SIZE: OnceLock<u64> = OnceLock::new();
    *SIZE.get_or_init(|| {
        // SAFETY:
        // 1. sysconf(3) takes a number and touches no memory of ours.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        // POSIX requires the value; 4 KiB is the smallest page of every 64-bit Linux.
        u64::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
    })
}

/// What [`lock`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lock {
    /// It takes the lock, and fails with `EAGAIN` where another open file has it.
    Tried,
    /// It gives the lock back.
    Released,
}

/// Locks an open file against its other openings (flock(2)); `File::try_lock` came with Rust 1.89.
pub(crate) fn lock(file: &File, lock: Lock) -> Result<(), Errno> {
    let operation = match lock {
        Lock::Tried => libc::LOCK_EX | libc::LOCK_NB,
        Lock::Released => libc::LOCK_UN,
    };
    // SAFETY:
    // 1. flock(2) takes numbers and touches no memory of ours. A borrowed file is open.
    match unsafe { libc::flock(file.as_raw_fd(), operation) } {
        0 => Ok(()),
        _ => Err(os::last_errno()),
    }
}

/// Nanoseconds of `CLOCK_MONOTONIC_COARSE`: since some moment, as of the kernel's last tick.
#[inline]
pub(crate) fn coarse_time_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC_COARSE)
}

/// Returns how long this thread has had a CPU, in the kernel and outside (`CLOCK_THREAD_CPUTIME_ID`
/// of clock_gettime(2)).
///
/// ```
/// let before = dmaspan_linux::thread_cpu_time();
/// assert!(dmaspan_linux::thread_cpu_time() >= before);
/// ```
pub fn thread_cpu_time() -> Duration {
    Duration::from_nanos(clock_ns(libc::CLOCK_THREAD_CPUTIME_ID))
}

/// Returns how long all threads of this process have had a CPU, those of io_uring and those that
/// have ended too (`CLOCK_PROCESS_CPUTIME_ID` of clock_gettime(2)).
///
/// ```
/// let before = dmaspan_linux::process_cpu_time();
/// assert!(dmaspan_linux::process_cpu_time() >= before);
/// ```
pub fn process_cpu_time() -> Duration {
    Duration::from_nanos(clock_ns(libc::CLOCK_PROCESS_CPUTIME_ID))
}

/// Nanoseconds of a clock; 0 where the kernel does not have it (clock_gettime(2)).
#[inline]
pub(crate) fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY:
    // 1. `time` is a live timespec that the call may write, and nothing else refers to it.
    // Linux 2.6.32 has these clocks.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    let (seconds, ns) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec));
    seconds.unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(ns.unwrap_or(0))
}

/// The soft limit of locked memory in bytes (`RLIMIT_MEMLOCK` of getrlimit(2)); `None` without one.
pub(crate) fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY:
    // 1. `limit` is a live rlimit that the call may write, and nothing else refers to it.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Whether a file is in memory: on a tmpfs, which files of memfd_create(2) are on too, or on a
/// hugetlbfs. The kernel says so without asking the file system: others have no seals
/// (`F_GET_SEALS` of fcntl(2)), nor have devices on a tmpfs.
pub(crate) fn is_memory(file: BorrowedFd<'_>) -> bool {
    // SAFETY:
    // 1. This request takes numbers and touches no memory of ours. A borrowed file is open.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) >= 0 }
}

/// A file in memory without a name in any directory (memfd_create(2)), closed on exec.
pub(crate) fn memfd(name: &CStr, flags: libc::c_uint) -> Result<OwnedFd, Errno> {
    // SAFETY:
    // 1. `name` is a string that ends in 0 and lives until the call returns.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags | libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(os::last_errno());
    }
    // SAFETY:
    // 1. The kernel has just opened `fd` for us, and nobody else knows it.
    // 2. It is an ordinary file descriptor, which close(2) closes.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
