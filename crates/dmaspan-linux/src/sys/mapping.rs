//! Memory mappings, owned or adopted (mmap(2), madvise(2), mlock(2)).

#![expect(unsafe_code, reason = "maps memory and makes a slice of it")]

use std::any::Any;
use std::mem::{self, ManuallyDrop};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicU8, Ordering};

use dmaspan::bytes::{self, SharedWord};
use dmaspan::swiotlb::Original;
use dmaspan::{Errno, HostAddr, Span};

use crate::os;

/// What backs a mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Backing<'fd> {
    /// Private memory, with flags that say which pages (`MAP_HUGETLB` and the like).
    Anonymous(libc::c_int),
    /// The bytes of a file in memory from an offset, shared with whoever else maps it.
    Shared(BorrowedFd<'fd>, u64),
    /// The same, which this process only reads.
    ReadOnly(BorrowedFd<'fd>, u64),
}

/// How memory is mapped: the arguments of mmap(2) behind its length.
#[derive(Clone, Copy, Debug)]
struct How {
    prot: libc::c_int,
    flags: libc::c_int,
    fd: i32,
    at: libc::off_t,
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

/// Where memory begins.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Alignment {
    /// Where the kernel puts it: at a multiple of the base page, or of the hugetlb page.
    Kernel,
    /// At a multiple of this, a power of two. Not for hugetlb pages.
    To(usize),
}

/// A part of the address space, unmapped on drop.
///
/// # Invariant
///
/// `start..start + len` is mapped, begins and ends between pages, and only this value unmaps it or
/// maps anything over it.
#[derive(Debug)]
pub(super) struct Region {
    start: NonNull<libc::c_void>,
    len: usize,
}

impl Region {
    /// Maps `len` bytes where the kernel finds room.
    fn new(len: usize, How { prot, flags, fd, at }: How) -> Result<Self, Errno> {
        debug_assert_eq!(flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE), 0);
        // SAFETY:
        // 1. With no address and without `MAP_FIXED`, mmap(2) replaces no mapping, whether it
        //    succeeds or not. No caller in this file passes `MAP_FIXED`.
        // 2. An `fd` that is not open is an error and nothing else.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, fd, at) };
        if start == libc::MAP_FAILED {
            return Err(os::last_errno());
        }
        // The address is not null: mmap(2) chooses none below vm.mmap_min_addr, nor below a page.
        NonNull::new(start).map(|start| Self { start, len }).ok_or(Errno::ENOMEM)
    }

    /// Reserves `len` bytes that begin at a multiple of `align`, a power of two, without access to
    /// them. Returns where in the region they begin.
    pub(super) fn reserve(len: usize, align: usize) -> Result<(Self, usize), Errno> {
        let region_len = len.checked_add(align).ok_or(Errno::ENOMEM)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let region = Self::new(region_len, How { prot: libc::PROT_NONE, flags, fd: -1, at: 0 })?;
        let skip = region.start.addr().get().wrapping_neg() & (align - 1);
        Ok((region, skip))
    }

    /// Where `skip` bytes from the start are.
    pub(super) fn at(&self, skip: usize) -> *mut libc::c_void {
        self.start.as_ptr().wrapping_byte_add(skip)
    }

    /// Maps `len` bytes of `fd` from `offset` on, readable and writable, at `skip` in the region.
    /// Where that fails the region is given up.
    pub(super) fn place(
        self,
        skip: usize,
        len: usize,
        flags: libc::c_int,
        fd: i32,
        offset: libc::off_t,
    ) -> Result<Self, Errno> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        self.place_as(skip, len, How { prot, flags, fd, at: offset })
    }

    fn place_as(self, skip: usize, len: usize, how: How) -> Result<Self, Errno> {
        let How { prot, flags, fd, at } = how;
        let inside = skip.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside {
            return Err(Errno::EFAULT);
        }
        // `at` needs no proof; the result lies in the region.
        let wanted = self.at(skip);
        // SAFETY:
        // 1. `wanted..wanted + len` lies in the region, which is ours and has nothing in it that
        //    anybody refers to: what refers to it owns it, or borrows who does. So `MAP_FIXED`
        //    replaces no memory in use.
        // 2. An `fd` that is not open is an error and nothing else.
        let placed = unsafe { libc::mmap(wanted, len, prot, flags | libc::MAP_FIXED, fd, at) };
        if placed == libc::MAP_FAILED {
            let errno = os::last_errno();
            // The kernel may have unmapped `wanted..wanted + len` before it failed, and another
            // thread mapped something there since. It touched nothing else of the region.
            self.forget_middle(skip, len);
            return Err(errno);
        }
        Ok(self)
    }

    /// Gives the part before and the part behind `len` bytes from `skip` back, and forgets those
    /// bytes: whether they are mapped, and by whom, is not known.
    fn forget_middle(self, skip: usize, len: usize) {
        let region = ManuallyDrop::new(self);
        let start = region.start.as_ptr();
        let behind = skip + len;
        for (offset, part_len) in [(0, skip), (behind, region.len - behind)] {
            if part_len != 0 {
                // SAFETY:
                // 1. The part is of the region, which is ours, and outside the bytes that are
                //    forgotten; nobody has a reference to it, as the region has been no `Mapping`.
                // 2. It is unmapped once: the region is not dropped.
                // What cannot be unmapped stays reserved, without access.
                let _ = unsafe { libc::munmap(start.wrapping_byte_add(offset), part_len) };
            }
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY:
        // 1. The whole region is mapped and ours (the invariant).
        // 2. Slices of a `Mapping` borrow it, and it owns its region: there are none any more.
        let result = unsafe { libc::munmap(self.start.as_ptr(), self.len) };
        debug_assert_eq!(result, 0, "munmap of a whole region of ours: {}", os::last_errno());
    }
}

/// What keeps memory mapped.
#[derive(Debug)]
enum Keep {
    /// Ours, unmapped on drop.
    Region { _region: Region },
    /// Memory of another owner, who promised to keep it.
    Foreign { _keep: Box<dyn Any + Send + Sync> },
}

/// Memory of this process, kept until this is dropped: readable, and writable unless it is
/// [`Backing::ReadOnly`].
///
/// # Invariant
///
/// `start` is aligned to 8 bytes, and the `words` words from there are so until `_keep` is dropped.
/// Whoever makes a mapping that is only read keeps it from all that writes, as
/// [`ReadOnlyMemory`](crate::mem::ReadOnlyMemory) does.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<SharedWord>,
    words: usize,
    _keep: Keep,
}

// SAFETY:
// 1. The mapping belongs to the process, not to a thread: any thread may use and unmap it. What
//    keeps memory of somebody else is `Send`.
unsafe impl Send for Mapping {}

// SAFETY:
// 1. Through `&Mapping` memory is accessed by `dmaspan::bytes` alone, as any threads may at once.
// 2. The other calls on `&Mapping` are system calls, which the kernel serialises.
// 3. What keeps memory of somebody else is `Sync`, and nobody reaches it.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes, a multiple of the size of the pages.
    pub(crate) fn new(
        backing: Backing<'_>,
        len: usize,
        alignment: Alignment,
    ) -> Result<Self, Errno> {
        let both = libc::PROT_READ | libc::PROT_WRITE;
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let (prot, flags, fd, offset) = match backing {
            Backing::Anonymous(flags) => (both, anonymous | flags, -1, 0),
            Backing::Shared(fd, offset) => (both, libc::MAP_SHARED, fd.as_raw_fd(), offset),
            Backing::ReadOnly(fd, offset) => {
                (libc::PROT_READ, libc::MAP_SHARED, fd.as_raw_fd(), offset)
            }
        };
        let at = libc::off_t::try_from(offset).map_err(|_| Errno::EOVERFLOW)?;
        let how = How { prot, flags, fd, at };
        match Self::mapped(how, len, alignment) {
            // Linux before 6.7 has no shared mapping of a file that is sealed against writes. Its
            // bytes do not change, and a private one has them, too.
            Err(Errno::EPERM) if prot == libc::PROT_READ => {
                Self::mapped(How { flags: libc::MAP_PRIVATE, ..how }, len, alignment)
            }
            mapped => mapped,
        }
    }

    fn mapped(how: How, len: usize, alignment: Alignment) -> Result<Self, Errno> {
        match alignment {
            Alignment::Kernel => {
                let region = Region::new(len, how)?;
                Ok(Self::of(region.start, len, region))
            }
            Alignment::To(align) => Self::aligned(how, len, align),
        }
    }

    /// Memory of somebody else, of whole words from `start`, aligned to them.
    ///
    /// # Safety
    ///
    /// Until `keep` is dropped, `len` bytes from `start` are readable and writable, and other code
    /// of this process accesses them by [`dmaspan::bytes`], as atomic bytes, or not at the same
    /// time as this one and pools. `start` may be used for all of them.
    pub(crate) unsafe fn foreign(
        start: NonNull<u8>,
        len: usize,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Option<Self> {
        let start = start.cast::<SharedWord>();
        let whole = start.is_aligned() && len.is_multiple_of(size_of::<SharedWord>());
        let keep = Keep::Foreign { _keep: keep };
        whole.then_some(Self { start, words: len / size_of::<SharedWord>(), _keep: keep })
    }

    /// Puts the memory over an aligned part of a larger region.
    fn aligned(how: How, len: usize, align: usize) -> Result<Self, Errno> {
        let (region, skip) = Region::reserve(len, align)?;
        let region = region.place_as(skip, len, how)?;
        let start = NonNull::new(region.at(skip)).ok_or(Errno::ENOMEM)?;
        Ok(Self::of(start, len, region))
    }

    /// Memory of `len` bytes from `start` of `region`, where they are as the invariant says.
    fn of(start: NonNull<libc::c_void>, len: usize, region: Region) -> Self {
        let keep = Keep::Region { _region: region };
        Self { start: start.cast(), words: len / size_of::<SharedWord>(), _keep: keep }
    }

    /// The memory, as words: whoever else writes it, a load is a value that the word has had. Words
    /// of a mapping that is only read are loaded alone.
    pub(crate) fn words(&self) -> &[SharedWord] {
        // SAFETY:
        // 1. `start` is aligned and `words` words from there stay mapped and readable for as long
        //    as `self` is borrowed, and writable where anybody stores to them (the invariant).
        //    Relaxed loads of bytes may be of memory that cannot be written (std::sync::atomic).
        // 2. Every bit pattern is a word, and what is mapped is initialised: zeroes at first.
        // 3. The kernel, devices and other processes may change the words meanwhile: they are
        //    atomic bytes, and so is whatever else of this process accesses them.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }

    /// Copies bytes out, all of the mapping; whether they are.
    #[inline]
    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), Errno> {
        let from = self.part(offset, into.len())?;
        // SAFETY:
        // 1. So many bytes are readable there (the invariant), and nobody has a reference to them
        //    but to atomic bytes.
        unsafe { bytes::read(from.cast(), into) };
        Ok(())
    }

    /// Copies bytes in, all of the mapping; whether they are.
    #[inline]
    pub(crate) fn write(&self, offset: usize, from: &[u8]) -> Result<(), Errno> {
        let to = self.part(offset, from.len())?;
        // SAFETY:
        // 1. So many bytes are writable there, as for `read`.
        unsafe { bytes::write(from, to.cast()) };
        Ok(())
    }

    /// Writes a byte as it is, so that its page is there.
    pub(crate) fn touch(&self, offset: usize) -> Result<(), Errno> {
        let byte = self.part(offset, 1)?;
        // SAFETY:
        // 1. The byte is readable and writable, as for `read`, and of the size of all accesses.
        unsafe { AtomicU8::from_ptr(byte.cast()) }.fetch_or(0, Ordering::Relaxed);
        Ok(())
    }

    /// The address of the first byte, whose provenance is exposed.
    pub(crate) fn addr(&self) -> usize {
        self.start.as_ptr().expose_provenance()
    }

    /// The first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start.cast()
    }

    /// The length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.words * size_of::<SharedWord>()
    }

    /// Advises the kernel about `len` bytes from `offset` (madvise(2)).
    pub(crate) fn advise(&self, offset: usize, len: usize, advice: Advice) -> Result<(), Errno> {
        let start = self.part(offset, len)?;
        // SAFETY:
        // 1. `start..start + len` is memory of this mapping.
        // 2. No advice unmaps it or takes away access; `Discard` changes its content, which the
        //    atomic bytes allow at any time.
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

    /// Bytes that a slot of a bounce pool of this process may stand in for; `None` where they are
    /// not all in the mapping, or none.
    #[inline]
    pub(crate) fn original(&'static self, offset: usize, len: usize) -> Option<Original<HostAddr>> {
        let start = self.part(offset, len).ok()?.expose_provenance();
        let span = Span::new(HostAddr::new(u64::try_from(start).ok()?), len.try_into().ok()?);
        // SAFETY:
        // 1. The bytes are of this mapping, which is never unmapped: a `&'static` of it says that
        //    it is not dropped.
        // 2. No code has a reference to them but to atomic bytes, which others may write.
        // 3. They are found by their addresses in this process, whose provenance is exposed.
        span.ok().map(|span| unsafe { Original::new(span) })
    }

    /// The address of `len` bytes from `offset`, for system calls.
    #[inline]
    pub(crate) fn part(&self, offset: usize, len: usize) -> Result<*mut libc::c_void, Errno> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len());
        if !fits {
            return Err(Errno::EFAULT);
        }
        Ok(self.start.as_ptr().wrapping_byte_add(offset).cast())
    }
}

/// The type of the file system that an open file is on, and the size of its blocks (fstatfs(2)).
pub(crate) fn file_system(fd: BorrowedFd<'_>) -> Result<(u64, u64), Errno> {
    // SAFETY:
    // 1. The structure is of numbers alone, for which zeroes are values.
    let mut found: libc::statfs = unsafe { mem::zeroed() };
    // SAFETY:
    // 1. `found` is a live statfs that the call may write, and nothing else refers to it.
    let result = unsafe { libc::fstatfs(fd.as_raw_fd(), &raw mut found) };
    if result != 0 {
        return Err(os::last_errno());
    }
    // Their types differ from CPU to CPU.
    let (kind, block) = (u64::try_from(found.f_type), u64::try_from(found.f_bsize));
    Ok((kind.unwrap_or(0), block.unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::sys;

    const M2: usize = 2 << 20;

    #[test]
    fn a_mapping_is_aligned_and_zero() {
        let page = usize::try_from(sys::page_size()).unwrap();
        for (alignment, align) in
            [(Alignment::Kernel, page), (Alignment::To(page), page), (Alignment::To(M2), M2)]
        {
            let mapping = Mapping::new(Backing::Anonymous(0), 3 * page, alignment).unwrap();
            assert_eq!(mapping.addr() % align, 0);
            assert_eq!(mapping.len(), 3 * page);
            assert!(mapping.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
        }
    }

    #[test]
    fn a_part_beyond_the_end_is_refused() {
        let page = usize::try_from(sys::page_size()).unwrap();
        let mapping = Mapping::new(Backing::Anonymous(0), page, Alignment::Kernel).unwrap();
        assert!(mapping.part(0, page).is_ok());
        assert_eq!(mapping.part(1, page), Err(Errno::EFAULT));
        assert_eq!(mapping.part(usize::MAX, 2), Err(Errno::EFAULT));
    }

    #[test]
    fn more_than_the_address_space_is_an_error() {
        let page = usize::try_from(sys::page_size()).unwrap();
        for alignment in [Alignment::Kernel, Alignment::To(page)] {
            for len in [usize::MAX - 8 * page + 1, usize::MAX] {
                assert!(Mapping::new(Backing::Anonymous(0), len, alignment).is_err());
            }
        }
    }

    #[test]
    fn what_is_forgotten_stays_mapped() {
        let page = usize::try_from(sys::page_size()).unwrap();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let region =
            Region::new(5 * page, How { prot: libc::PROT_NONE, flags, fd: -1, at: 0 }).unwrap();
        let first = region.start.addr().get() + page;
        region.forget_middle(page, 3 * page);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let hex = |text: &str| usize::from_str_radix(text, 16).unwrap();
        let covers = maps.lines().any(|line| {
            let (start, rest) = line.split_once('-').unwrap();
            let end = rest.split_once(' ').unwrap().0;
            hex(start) <= first && first + 3 * page <= hex(end)
        });
        assert!(covers, "{first:#x}: {maps}");
    }

    #[test]
    fn a_file_that_cannot_be_mapped_is_an_error() {
        let page = usize::try_from(sys::page_size()).unwrap();
        let file = std::fs::File::open("/proc/self/status").unwrap();
        for alignment in [Alignment::Kernel, Alignment::To(page), Alignment::To(M2)] {
            assert!(Mapping::new(Backing::Shared(file.as_fd(), 0), page, alignment).is_err());
        }
    }
}
