//! [`ExclusiveMemory`] is memory that its owner alone accesses.

#![expect(unsafe_code, reason = "takes memory by its address on a promise")]

use std::any::Any;
use std::ptr::NonNull;

use dmaspan::{RangeError, UserAddr, UserRange};

use super::{Memory, MemoryKind};

/// Memory that only this value's owner reads and writes, besides the kernel at the owner's request:
/// what a [`FixedPool`](crate::fixed::FixedPool) hands out as slices.
///
/// # Invariant
///
/// `len` bytes from `start` are readable, writable and initialised, and nobody but the owner of
/// this value accesses them, for as long as `_keep` lives.
#[derive(Debug)]
pub struct ExclusiveMemory {
    start: NonNull<u8>,
    len: usize,
    range: UserRange,
    kind: Option<MemoryKind>,
    /// What holds the memory.
    _keep: Box<dyn Any + Send + Sync>,
}

// SAFETY:
// 1. The memory belongs to the process, not to a thread, and what holds it is `Send`.
unsafe impl Send for ExclusiveMemory {}

// SAFETY:
// 1. Through `&ExclusiveMemory` the crate gives only addresses; what holds the memory is `Sync`.
unsafe impl Sync for ExclusiveMemory {}

impl ExclusiveMemory {
    /// Takes memory of the application, such as a mapping of its own, by its address.
    ///
    /// ```
    /// use std::ptr::NonNull;
    ///
    /// use dmaspan_linux::fixed::FixedPool;
    /// use dmaspan_linux::mem::ExclusiveMemory;
    ///
    /// #[repr(align(65536))]
    /// struct Buffers([u8; 1 << 20]);
    ///
    /// let buffers: &'static mut Buffers = Box::leak(Box::new(Buffers([0; 1 << 20])));
    /// let start = NonNull::from(&mut buffers.0).cast();
    /// // SAFETY: it is never freed, and the only reference to it was given up.
    /// let memory = unsafe { ExclusiveMemory::foreign(start, 1 << 20, ())? };
    /// let pool = FixedPool::over(memory, 64 << 10)?;
    /// assert_eq!(pool.slices(), 16);
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`RangeError`] for no bytes, and for a range that ends beyond the address space.
    ///
    /// # Safety
    ///
    /// Until `keep` is dropped, `len` bytes from `start` are readable, writable and initialised,
    /// and nobody but the returned value accesses them: no reference to them is used, and no other
    /// process or device writes them. `start` may be used for all of them.
    pub unsafe fn foreign(
        start: NonNull<u8>,
        len: usize,
        keep: impl Any + Send + Sync,
    ) -> Result<Self, RangeError> {
        Self::of(start, len, None, Box::new(keep))
    }

    fn of(
        start: NonNull<u8>,
        len: usize,
        kind: Option<MemoryKind>,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, RangeError> {
        // `usize` has 64 bits wherever the crate builds.
        let to_u64 = |value: usize| u64::try_from(value).unwrap_or(u64::MAX);
        let addr = UserAddr::new(to_u64(start.addr().get()));
        let range = UserRange::from_len(addr, to_u64(len))?;
        Ok(Self { start, len, range, kind, _keep: keep })
    }

    /// Returns where it is in this process.
    pub fn user_range(&self) -> UserRange {
        self.range
    }

    /// The length in bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "memory has at least one byte")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns what kind of memory it is; `None` for the application's own.
    pub fn kind(&self) -> Option<MemoryKind> {
        self.kind
    }

    /// The address of `len` bytes from `offset`; `None` where they are not all in the memory.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !fits {
            return None;
        }
        // `wrapping_add` needs no proof; the result is in the memory or at its end.
        NonNull::new(self.start.as_ptr().wrapping_add(offset))
    }
}

/// Memory that others may access too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotExclusive {
    /// The application brought it, and may have it mapped elsewhere.
    #[error("other owners may access adopted memory: take it by ExclusiveMemory::foreign")]
    Adopted,
    /// Its file was handed out by [`Memory::file`].
    #[error("the file of this memory was handed out, so another owner may have it mapped")]
    FileShared,
    /// It is no range.
    #[error(transparent)]
    Range(#[from] RangeError),
}

impl TryFrom<Memory> for ExclusiveMemory {
    type Error = NotExclusive;

    /// Takes all of a memory, which nobody else has then.
    ///
    /// # Errors
    ///
    /// [`NotExclusive`] for memory that was adopted, or whose file was handed out.
    fn try_from(memory: Memory) -> Result<Self, NotExclusive> {
        match memory.kind() {
            MemoryKind::Adopted => return Err(NotExclusive::Adopted),
            _ if memory.is_file_shared() => return Err(NotExclusive::FileShared),
            _ => {}
        }
        // Pages are there from the beginning, zeroed: initialised.
        let (start, len) = (memory.mapping().start(), memory.mapping().len());
        Ok(Self::of(start, len, Some(memory.kind()), Box::new(memory))?)
    }
}
