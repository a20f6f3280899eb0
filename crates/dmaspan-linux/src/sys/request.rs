//! A request of ioctl(2) has a structure or a number as its argument, and says what memory the
//! kernel may touch.

#![expect(unsafe_code, reason = "ioctl reads and writes what its argument names")]

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use bytemuck::Pod;
use dmaspan::Errno;

use crate::os;

/// A structure that says how long it is and names no other memory.
///
/// # Safety
///
/// [`NUMBER`](Self::NUMBER) is a request that reads and writes as many bytes of its argument as
/// the first 32 bits of the argument say, or fewer, and no other memory of the process; nor does it
/// let a device use any. That holds whatever values the structure has: where the number is of a
/// family of requests, of which a field names one, it holds for each of them.
pub(super) unsafe trait Request: Pod {
    /// The request.
    const NUMBER: u32;
}

/// Declares which request each structure belongs to. The reason why that is sound stands beside
/// each use of this macro.
macro_rules! requests {
    ($(unsafe $structure:ty = $number:expr,)*) => {$(
        // SAFETY: as is said where the list is.
        unsafe impl $crate::sys::request::Request for $structure {
            const NUMBER: u32 = $number;
        }
    )*};
}

pub(super) use requests;

/// Makes a request with a structure that names no memory.
pub(super) fn with<R: Request>(fd: BorrowedFd<'_>, argument: &mut R) -> Result<i32, Errno> {
    // SAFETY:
    // 1. The argument is as long as it says, which `with_memory` writes, and names no other memory
    //    (the contract of `Request`).
    unsafe { with_memory(fd, R::NUMBER, argument) }
}

/// Makes a request with a structure that may name memory.
///
/// # Safety
///
/// `number` is a request that reads and writes as many bytes of its argument as the first 32 bits
/// of it say, or fewer. The memory that the argument names may be used as the request says, for as
/// long as it says.
pub(super) unsafe fn with_memory<T: Pod>(
    fd: BorrowedFd<'_>,
    number: u32,
    argument: &mut T,
) -> Result<i32, Errno> {
    // SAFETY: passed on; what is written is as long as it says.
    unsafe { with_words(fd, number, bytemuck::bytes_of_mut(argument)) }
}

/// Makes a request with a structure and what follows it, all in `bytes`.
///
/// # Safety
///
/// As for [`with_memory`].
pub(super) unsafe fn with_words(
    fd: BorrowedFd<'_>,
    number: u32,
    bytes: &mut [u8],
) -> Result<i32, Errno> {
    let len = u32::try_from(bytes.len()).map_err(|_| Errno::EINVAL)?;
    let size = bytes.first_chunk_mut::<4>().ok_or(Errno::EINVAL)?;
    *size = len.to_ne_bytes();
    // SAFETY:
    // 1. `bytes` are live, ours alone, and as many as the first four of them say.
    // 2. The rest is the caller's promise.
    unsafe { raw(fd, number, bytes.as_mut_ptr().cast()) }
}

/// Makes a request whose argument is a number.
///
/// # Safety
///
/// `number` is a request whose argument is a number, not an address.
pub(super) unsafe fn with_value(fd: BorrowedFd<'_>, number: u32, value: u64) -> Result<i32, Errno> {
    let value = usize::try_from(value).map_err(|_| Errno::EINVAL)?;
    // SAFETY: the request takes a number: the kernel touches no memory (the caller's promise).
    unsafe { raw(fd, number, ptr::without_provenance_mut(value)) }
}

/// Makes a request whose argument is a string.
///
/// # Safety
///
/// `number` is a request that reads a string and nothing else.
pub(super) unsafe fn with_string(
    fd: BorrowedFd<'_>,
    number: u32,
    text: &CStr,
) -> Result<i32, Errno> {
    // SAFETY: `text` ends in 0 and lives until the call returns; the request reads it alone.
    unsafe { raw(fd, number, text.as_ptr().cast_mut().cast()) }
}

/// Makes a request whose argument is an `int`.
///
/// # Safety
///
/// `number` is a request that reads an `int` and nothing else.
pub(super) unsafe fn with_int(
    fd: BorrowedFd<'_>,
    number: u32,
    mut value: libc::c_int,
) -> Result<i32, Errno> {
    // SAFETY: `value` lives until the call returns; the request reads it alone.
    unsafe { raw(fd, number, (&raw mut value).cast()) }
}

/// ioctl(2).
///
/// # Safety
///
/// The request accesses what `argument` is, or points to, as the kernel's interface says, and that
/// is live for as long.
unsafe fn raw(fd: BorrowedFd<'_>, number: u32, argument: *mut libc::c_void) -> Result<i32, Errno> {
    // SAFETY: the caller's promise. A file of another kind does not know the request: the numbers
    // of VFIO and iommufd are theirs alone.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::c_ulong::from(number), argument) };
    if result < 0 { Err(os::last_errno()) } else { Ok(result) }
}

/// Takes a file descriptor that a request returned.
///
/// # Safety
///
/// The kernel has just opened `fd` for the caller.
pub(super) unsafe fn opened(fd: i32) -> OwnedFd {
    // SAFETY: nobody else knows it (the caller's promise), and close(2) closes it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[cfg(test)]
mod tests {
    use super::super::uapi::iommufd::{HwInfo, HwptAlloc, IoasCopy, IoasMap, IoasMapFile};
    use super::super::uapi::vfio::{FeatureDmaBuf, Type1DirtyGet, Type1Map};
    use super::Request;

    /// Two implementations for what is a [`Request`], and one for all else: only there it is known
    /// which is meant.
    trait Unlike<Which> {
        const NUMBERED: bool = false;
    }

    struct Numbered;

    impl<T> Unlike<()> for T {}

    impl<T: Request> Unlike<Numbered> for T {}

    #[test]
    fn what_may_name_memory_or_let_a_device_at_it_is_no_request_of_safe_code() {
        // It would not compile.
        let numbered = [
            <FeatureDmaBuf as Unlike<_>>::NUMBERED,
            <Type1DirtyGet as Unlike<_>>::NUMBERED,
            <Type1Map as Unlike<_>>::NUMBERED,
            <IoasMap as Unlike<_>>::NUMBERED,
            <IoasMapFile as Unlike<_>>::NUMBERED,
            <IoasCopy as Unlike<_>>::NUMBERED,
            <HwptAlloc as Unlike<_>>::NUMBERED,
            <HwInfo as Unlike<_>>::NUMBERED,
        ];
        assert_eq!(numbered, [false; 8]);
    }
}
