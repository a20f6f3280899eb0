//! The memory behind a region: memory that is mapped in this program, or memory that a client is
//! asked for.

use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;

use crate::addr::HostAddr;
use crate::error::Errno;
use crate::prot::Prot;
use crate::range::RangeError;
use crate::regbuf::import::Outside;
use crate::span::Span;

/// Memory of this program, as a system call or a ring takes it: where it begins and how long it is,
/// as an `iovec` has it. Others may write it at any time, so it is no `&[u8]`.
///
/// The pointer may be used for all of the bytes. They stay while `'m` lasts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct HostSlice<'m> {
    start: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'m ()>,
}

impl<'m> HostSlice<'m> {
    /// `len` bytes from `start`. This says nothing of what is there: whoever has a slice from
    /// somebody else knows what the giver promises.
    #[inline]
    pub const fn new(start: NonNull<u8>, len: usize) -> Self {
        Self { start, len, memory: PhantomData }
    }

    /// The first byte.
    #[inline]
    pub const fn as_ptr(self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// How many bytes.
    #[inline]
    pub const fn len(self) -> usize {
        self.len
    }

    /// Returns whether there are none.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// `len` bytes from `offset`; `None` where the slice has not so many.
    #[inline]
    pub fn part(self, offset: usize, len: usize) -> Option<Self> {
        offset.checked_add(len).filter(|end| *end <= self.len)?;
        // The result lies in the slice, or at its end.
        let start = NonNull::new(self.start.as_ptr().wrapping_add(offset))?;
        Some(Self { start, len, ..self })
    }

    /// The addresses. The provenance of the pointer is exposed, so that
    /// [`with_exposed_provenance`](core::ptr::with_exposed_provenance) finds the memory again.
    ///
    /// # Errors
    ///
    /// [`RangeError`] where there are no bytes, or the last one has no address.
    #[inline]
    pub fn span(self) -> Result<Span<HostAddr>, RangeError> {
        let to_u64 = |value: usize| u64::try_from(value).unwrap_or(u64::MAX);
        let start = to_u64(self.start.as_ptr().expose_provenance());
        Span::new(HostAddr::new(start), to_u64(self.len))
    }
}

impl fmt::Debug for HostSlice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostSlice({:p}, {:#x})", self.start, self.len)
    }
}

/// Memory that is mapped in this program, as long as the value exists.
///
/// `dmaspan_linux::Memory` is such memory, also of a file that a client sent.
///
/// # Safety
///
/// While the value exists, also after it has been moved,
///
/// 1. [`slice`](Self::slice) gives the same slice, and the mapping stays: neither unmapped, moved
///    nor given another use; and
/// 2. whoever has its addresses may read all of it and, where [`access`](Self::access) permits
///    writes, write it at any time: no code holds a Rust reference to it that this would break.
///    The answer of `access` never changes; and
/// 3. several threads call [`read`](Self::read) and [`write`](Self::write) at once, also for the
///    same bytes, or for some that overlap, and beside a pool that copies them: each byte is
///    accessed atomically and by itself, as by the functions of [`bytes`](crate::bytes).
#[expect(unsafe_code, reason = "a contract about memory that others write; nothing here is unsafe")]
pub unsafe trait HostMemory: Send + Sync {
    /// Returns where it is: at least one byte.
    fn slice(&self) -> HostSlice<'_>;

    /// Returns what the mapping permits. A region of it permits no more.
    fn access(&self) -> Prot {
        Prot::READ_WRITE
    }

    /// Copies the bytes from `offset` on into `bytes`, while others may write them.
    ///
    /// # Errors
    ///
    /// [`Outside`] where they are not all in the memory. Then nothing was copied.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Outside>;

    /// Copies `bytes` to `offset` and on, while others may read and write what is there.
    ///
    /// # Errors
    ///
    /// [`Outside`] where the memory has not so many bytes there that can be written. Then nothing
    /// was copied.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Outside>;
}

/// Memory of a client that is not mapped here: the client reads and writes it when it is asked to,
/// as by the messages `DMA_READ` and `DMA_WRITE` of vfio-user.
///
/// Nothing here is a matter of memory safety: a wrong answer gives a device wrong bytes.
pub trait RemoteMemory: Send + Sync {
    /// Reads the bytes from `offset` of the region on into `bytes`.
    ///
    /// # Context
    ///
    /// No lock of the regions is held; the call may wait for the client.
    ///
    /// # Errors
    ///
    /// What the client answered. The content of `bytes` does not matter then.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Errno>;

    /// Writes `bytes` to `offset` of the region and on.
    ///
    /// # Context
    ///
    /// As [`read`](Self::read).
    ///
    /// # Errors
    ///
    /// What the client answered. Some bytes may have been written then.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno>;
}
