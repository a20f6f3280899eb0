//! Owned memory mappings (mmap(2), madvise(2), mlock(2)).

#![expect(unsafe_code, reason = "maps memory and makes a slice of it")]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::AtomicU64;

use dmaspan::Errno;

use crate::os;

/// What backs a mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Backing<'fd> {
    /// Private memory, with flags that say which pages (`MAP_HUGETLB` and the like).
    Anonymous(libc::c_int),
    /// The first bytes of a file in memory, shared with whoever else maps it.
    Shared(BorrowedFd<'fd>),
}

/// What the kernel shall do with memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Advice {
    /// Use transparent huge pages.
    Huge,
    /// Use base pages alone.
    NoHuge,
    /// Allocate every page, as a write of each would (Linux 5.14).
    PopulateWrite,
    /// Throw the content away: the next access finds zeroes in other frames.
    #[cfg(test)]
    Discard,
}

impl Advice {
    const fn raw(self) -> libc::c_int {
        match self {
            Self::Huge => libc::MADV_HUGEPAGE,
            Self::NoHuge => libc::MADV_NOHUGEPAGE,
            Self::PopulateWrite => libc::MADV_POPULATE_WRITE,
            #[cfg(test)]
            Self::Discard => libc::MADV_DONTNEED,
        }
    }
}

/// Readable and writable memory of this process, unmapped on drop.
///
/// # Invariants
///
/// 1. `outer` is the start of a mapping of `outer_len` bytes that only this value knows and unmaps.
/// 2. `start` lies in it, aligned to 8 bytes, and the `words` words from there are readable and
///    writable until it is unmapped.
#[derive(Debug)]
pub(crate) struct Mapping {
    outer: NonNull<libc::c_void>,
    outer_len: usize,
    start: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY:
// 1. The mapping belongs to the process, not to a thread: any thread may use and unmap it.
unsafe impl Send for Mapping {}

// SAFETY:
// 1. Through `&Mapping` memory is accessed as `AtomicU64` alone, which is `Sync`.
// 2. The other calls on `&Mapping` are system calls, which the kernel serialises.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes, aligned to `align`: both multiples of the page size, `align` a power of
    /// two.
    pub(crate) fn new(backing: Backing<'_>, len: usize, align: usize) -> Result<Self, Errno> {
        let outer_len = len.checked_add(align).ok_or(Errno::ENOMEM)?;
        // SAFETY:
        // 1. Without an address and `MAP_FIXED`, mmap(2) replaces no mapping.
        // 2. Nothing can be accessed through it: `PROT_NONE`.
        let outer = unsafe {
            libc::mmap(
                ptr::null_mut(),
                outer_len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if outer == libc::MAP_FAILED {
            return Err(os::last_errno());
        }
        let outer = NonNull::new(outer).ok_or(Errno::ENOMEM)?;
        // From here on dropping it unmaps it; it has no words yet, so the invariant holds.
        let mut mapping = Self { outer, outer_len, start: NonNull::dangling(), words: 0 };
        mapping.place(backing, len, align)?;
        Ok(mapping)
    }

    /// Puts the memory over an aligned part of the outer mapping.
    fn place(&mut self, backing: Backing<'_>, len: usize, align: usize) -> Result<(), Errno> {
        let skip = self.outer.as_ptr().addr().wrapping_neg() & (align - 1);
        // `wrapping_byte_add` needs no proof; the result lies in the outer mapping: `skip < align`.
        let wanted = self.outer.as_ptr().wrapping_byte_add(skip);
        let (flags, fd) = match backing {
            Backing::Anonymous(flags) => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags, -1),
            Backing::Shared(fd) => (libc::MAP_SHARED, fd.as_raw_fd()),
        };
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY:
        // 1. `wanted..wanted + len` lies in `outer..outer + outer_len`, which is ours and has
        //    nothing in it that anybody refers to, so `MAP_FIXED` replaces no memory in use.
        // 2. `fd`, where it is one, is open: it is borrowed.
        let placed = unsafe { libc::mmap(wanted, len, prot, flags | libc::MAP_FIXED, fd, 0) };
        if placed == libc::MAP_FAILED {
            return Err(os::last_errno());
        }
        self.start = NonNull::new(placed.cast()).ok_or(Errno::ENOMEM)?;
        self.words = len / size_of::<AtomicU64>();
        Ok(())
    }

    /// The memory, as words: whoever else writes it, a load is a value that the word has had.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY:
        // 1. `start` is aligned and `words` words from there stay mapped, readable and writable,
        //    for as long as `self` is borrowed (the second invariant).
        // 2. Every bit pattern is a `u64`, and fresh pages are zeroes: initialised.
        // 3. The kernel, devices and other processes may change the words meanwhile: `AtomicU64`
        //    allows it, as an `UnsafeCell` whose loads and stores are atomic.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }

    /// The address of the first byte.
    pub(crate) fn addr(&self) -> usize {
        self.start.addr().get()
    }

    /// The length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.words * size_of::<AtomicU64>()
    }

    /// Advises the kernel about `len` bytes from `offset` (madvise(2)).
    pub(crate) fn advise(&self, offset: usize, len: usize, advice: Advice) -> Result<(), Errno> {
        let start = self.part(offset, len)?;
        // SAFETY:
        // 1. `start..start + len` is memory of this mapping.
        // 2. No advice unmaps it or takes away access; `Discard` changes its content, which the
        //    atomic words allow at any time.
        let result = unsafe { libc::madvise(start, len, advice.raw()) };
        if result == 0 { Ok(()) } else { Err(os::last_errno()) }
    }

    /// Keeps `len` bytes from `offset` resident (mlock(2)), not at the same frames.
    pub(crate) fn lock(&self, offset: usize, len: usize) -> Result<(), Errno> {
        let start = self.part(offset, len)?;
        // SAFETY:
        // 1. mlock(2) makes pages resident; their content stays.
        let result = unsafe { libc::mlock(start, len) };
        if result == 0 { Ok(()) } else { Err(os::last_errno()) }
    }

    /// Ends what [`lock`](Self::lock) did; locks do not nest (mlock(2), NOTES).
    pub(crate) fn unlock(&self, offset: usize, len: usize) -> Result<(), Errno> {
        let start = self.part(offset, len)?;
        // SAFETY:
        // 1. munlock(2) lets the kernel swap pages; their content stays.
        let result = unsafe { libc::munlock(start, len) };
        if result == 0 { Ok(()) } else { Err(os::last_errno()) }
    }

    /// The address of `len` bytes from `offset`, for system calls.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Result<*mut libc::c_void, Errno> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len());
        if !fits {
            return Err(Errno::EFAULT);
        }
        Ok(self.start.as_ptr().wrapping_byte_add(offset).cast())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY:
        // 1. The whole outer mapping is ours (the first invariant).
        // 2. Slices of its words borrow `self`, so there are none any more.
        let result = unsafe { libc::munmap(self.outer.as_ptr(), self.outer_len) };
        debug_assert_eq!(result, 0, "munmap of a whole mapping of ours: {}", os::last_errno());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::sys;

    #[test]
    fn a_mapping_is_aligned_and_zero() {
        let page = usize::try_from(sys::page_size()).unwrap();
        for align in [page, 2 << 20] {
            let mapping = Mapping::new(Backing::Anonymous(0), 3 * page, align).unwrap();
            assert_eq!(mapping.addr() % align, 0);
            assert_eq!(mapping.len(), 3 * page);
            assert!(mapping.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
        }
    }

    #[test]
    fn a_part_beyond_the_end_is_refused() {
        let page = usize::try_from(sys::page_size()).unwrap();
        let mapping = Mapping::new(Backing::Anonymous(0), page, page).unwrap();
        assert!(mapping.part(0, page).is_ok());
        assert_eq!(mapping.part(1, page), Err(Errno::EFAULT));
        assert_eq!(mapping.part(usize::MAX, 2), Err(Errno::EFAULT));
    }

    #[test]
    fn more_than_the_address_space_is_an_error() {
        let page = usize::try_from(sys::page_size()).unwrap();
        assert!(Mapping::new(Backing::Anonymous(0), usize::MAX - 8 * page + 1, page).is_err());
        assert!(Mapping::new(Backing::Anonymous(0), usize::MAX, page).is_err());
    }
}
