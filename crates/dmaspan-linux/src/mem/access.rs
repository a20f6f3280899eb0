//! Copying in and out of memory that a device may access meanwhile.
//!
//! All accesses are those of [`dmaspan::bytes`]: any threads read and write any bytes at once, and
//! what a device writes beside them at that moment is not lost.

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use dmaspan::Errno;
use dmaspan::bytes::SharedWord;

use super::Memory;

/// The reason why bytes of a [`Memory`] were not accessed. Nothing was read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// Not all bytes are in the memory.
    #[error("{}", OutOfBounds { offset: *offset, len: *len, memory_len: *memory_len })]
    OutOfBounds {
        /// The offset of the first byte.
        offset: u64,
        /// The number of bytes.
        len: u64,
        /// The length of the memory, in bytes.
        memory_len: u64,
    },
    /// Words were asked for and the offset or the length is no multiple of 8.
    #[error("offset {offset:#x} or length {len:#x} is not a multiple of 8, the size of a word")]
    Misaligned {
        /// The offset of the first byte.
        offset: u64,
        /// The number of bytes.
        len: u64,
    },
}

/// The words of an access out of bounds.
struct OutOfBounds {
    offset: u64,
    len: u64,
    memory_len: u64,
}

impl fmt::Display for OutOfBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, len, memory_len } = *self;
        if len == 0 {
            write!(f, "0 bytes at offset {offset:#x} are no part of memory: name at least one")
        } else {
            write!(f, "{len:#x} bytes at offset {offset:#x} leave the memory of ")?;
            write!(f, "{memory_len:#x} bytes")
        }
    }
}

impl AccessError {
    /// The errno: `EFAULT` out of bounds, `EINVAL` misaligned.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::OutOfBounds { .. } => Errno::EFAULT,
            Self::Misaligned { .. } => Errno::EINVAL,
        }
    }
}

/// Says what a check of memory found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The words could not be read.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The first word that is not as it should be.
    #[error("the word at offset {offset:#x} is {found:#x} and should be {expected:#x}")]
    Differs {
        /// Its offset in the memory, in bytes.
        offset: u64,
        /// What it should be.
        expected: u64,
        /// What it is.
        found: u64,
    },
}

impl Memory {
    /// The first byte. The pointer may be used for all [`len`](Self::len) bytes, until the memory
    /// is dropped: keep a reference, or what keeps one.
    ///
    /// Use it as a device uses the memory, which may read and write it at any time: by
    /// [`dmaspan::bytes`] or as atomic bytes, as the methods of this type and pools do; or by
    /// copies of what neither a device, nor another thread, nor they use at that moment, of which
    /// alone a `&[u8]` or `&mut [u8]` is sound. Its provenance is exposed, so that an address that
    /// came back from a device's descriptor leads to the same bytes.
    ///
    /// ```
    /// use dmaspan_linux::{Memory, MemoryKind};
    ///
    /// let memory = Memory::new(MemoryKind::Base, 0x4000)?;
    /// let flags = memory.ptr_at(0x3ffc, 4)?.cast::<u32>();
    /// // SAFETY: the word is within the memory, aligned, and nobody else accesses it.
    /// unsafe { flags.write_volatile(7) };
    /// let mut bytes = [0; 4];
    /// memory.read(0x3ffc, &mut bytes)?;
    /// assert_eq!(u32::from_ne_bytes(bytes), 7);
    /// assert_eq!(memory.as_ptr().addr().get() as u64, memory.user_range().start().get());
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.mapping().start()
    }

    /// The first of `len` bytes from `offset` on, all of which the pointer may be used for; see
    /// [`as_ptr`](Self::as_ptr).
    ///
    /// # Errors
    ///
    /// [`AccessError::OutOfBounds`] where they are not all in the memory, or none.
    pub fn ptr_at(&self, offset: u64, len: u64) -> Result<NonNull<u8>, AccessError> {
        self.sub_range(offset, len)?;
        let outside = AccessError::OutOfBounds { offset, len, memory_len: self.len() };
        let skip = usize::try_from(offset).map_err(|_| outside)?;
        NonNull::new(self.as_ptr().as_ptr().wrapping_byte_add(skip)).ok_or(outside)
    }

    /// Copies the bytes from `offset` on into `bytes`.
    ///
    /// # Errors
    ///
    /// [`AccessError::OutOfBounds`] where they are not all in the memory.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), AccessError> {
        let (at, outside) = self.place(offset, bytes.len());
        self.mapping().read(at, bytes).map_err(|_| outside)
    }

    /// Copies `bytes` to `offset` and on.
    ///
    /// # Errors
    ///
    /// [`AccessError::OutOfBounds`] where the memory has not so many bytes there.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let (at, outside) = self.place(offset, bytes.len());
        self.mapping().write(at, bytes).map_err(|_| outside)
    }

    /// Where `len` bytes from `offset` are in the mapping, and what is said where they are not.
    fn place(&self, offset: u64, len: usize) -> (usize, AccessError) {
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        let outside = AccessError::OutOfBounds { offset, len, memory_len: self.len() };
        (usize::try_from(offset).unwrap_or(usize::MAX), outside)
    }

    /// All of it as words, in the CPU's byte order: what drivers keep their queues in. They are
    /// read and written beside all else that accesses the memory.
    #[inline]
    pub fn words(&self) -> &[SharedWord] {
        self.mapping().words()
    }

    /// The word at `offset`, in the CPU's byte order.
    ///
    /// # Errors
    ///
    /// [`AccessError`] where the offset is no multiple of 8 or not in the memory.
    #[inline]
    pub fn read_u64(&self, offset: u64) -> Result<u64, AccessError> {
        Ok(self.word(offset)?.load(Ordering::Relaxed))
    }

    /// Writes the word at `offset`, in the CPU's byte order.
    ///
    /// # Errors
    ///
    /// [`AccessError`] where the offset is no multiple of 8 or not in the memory.
    #[inline]
    pub fn write_u64(&self, offset: u64, value: u64) -> Result<(), AccessError> {
        self.word(offset)?.store(value, Ordering::Relaxed);
        Ok(())
    }

    /// Writes `value(n)` to the n-th word from `offset` on, for `len` bytes.
    ///
    /// # Errors
    ///
    /// [`AccessError`] where offset or length are no multiples of 8, or not all is in the memory.
    #[inline]
    pub fn fill_words(
        &self,
        offset: u64,
        len: u64,
        mut value: impl FnMut(u64) -> u64,
    ) -> Result<(), AccessError> {
        for (index, word) in (0..).zip(self.word_slice(offset, len)?) {
            word.store(value(index), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Checks that the n-th word from `offset` on is `expected(n)`, for `len` bytes.
    ///
    /// # Errors
    ///
    /// [`CheckError::Differs`] with the first word that is not, or [`CheckError::Access`] as
    /// [`fill_words`](Self::fill_words).
    #[inline]
    pub fn check_words(
        &self,
        offset: u64,
        len: u64,
        mut expected: impl FnMut(u64) -> u64,
    ) -> Result<(), CheckError> {
        for (index, word) in (0..).zip(self.word_slice(offset, len)?) {
            let (found, expected) = (word.load(Ordering::Relaxed), expected(index));
            if found != expected {
                return Err(CheckError::Differs { offset: offset + index * 8, expected, found });
            }
        }
        Ok(())
    }

    #[inline]
    fn word(&self, offset: u64) -> Result<&SharedWord, AccessError> {
        if !offset.is_multiple_of(8) {
            return Err(AccessError::Misaligned { offset, len: 8 });
        }
        let index = usize::try_from(offset / 8).ok();
        index.and_then(|index| self.mapping().words().get(index)).ok_or(AccessError::OutOfBounds {
            offset,
            len: 8,
            memory_len: self.len(),
        })
    }

    #[inline]
    pub(super) fn word_slice(&self, offset: u64, len: u64) -> Result<&[SharedWord], AccessError> {
        if !offset.is_multiple_of(8) || !len.is_multiple_of(8) {
            return Err(AccessError::Misaligned { offset, len });
        }
        let outside = AccessError::OutOfBounds { offset, len, memory_len: self.len() };
        let end = offset.checked_add(len).ok_or(outside)?;
        let index = |at: u64| usize::try_from(at / 8).map_err(|_| outside);
        self.mapping().words().get(index(offset)?..index(end)?).ok_or(outside)
    }
}
