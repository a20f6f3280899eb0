//! Copying in and out of memory that a device may access meanwhile.
//!
//! All accesses are of aligned 8-byte words. A part of a word is written by exchanging the word, so
//! bytes beside it that a device writes at that moment are not lost.

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::Errno;

use super::Memory;

/// The bytes of a word.
const WORD: usize = size_of::<AtomicU64>();

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
    /// Use it as a device uses the memory, which may read and write it at any time: by volatile or
    /// atomic accesses, or by copies of what no device uses at that moment. A `&[u8]` or
    /// `&mut [u8]` of it is sound only while neither a device, nor another thread, nor the methods
    /// of this type write there. Its provenance is exposed, so that an address that came back from
    /// a device's descriptor leads to the same bytes.
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
        let (words, skew) = self.covering(offset, bytes.len())?;
        let (head, rest) = bytes.split_at_mut(head_len(skew, bytes.len()));
        let (head_words, words) = words.split_at(usize::from(!head.is_empty()));
        if let [word] = head_words {
            let value = word.load(Ordering::Relaxed).to_ne_bytes();
            head.copy_from_slice(&value[skew..skew + head.len()]);
        }
        let (whole, tail) = rest.as_chunks_mut::<WORD>();
        let (words, tail_words) = words.split_at(whole.len());
        for (chunk, word) in whole.iter_mut().zip(words) {
            *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        if let [word] = tail_words {
            let value = word.load(Ordering::Relaxed).to_ne_bytes();
            tail.copy_from_slice(&value[..tail.len()]);
        }
        Ok(())
    }

    /// Copies `bytes` to `offset` and on.
    ///
    /// # Errors
    ///
    /// [`AccessError::OutOfBounds`] where the memory has not so many bytes there.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let (words, skew) = self.covering(offset, bytes.len())?;
        let (head, rest) = bytes.split_at(head_len(skew, bytes.len()));
        let (head_words, words) = words.split_at(usize::from(!head.is_empty()));
        if let [word] = head_words {
            write_part(word, skew, head);
        }
        let (whole, tail) = rest.as_chunks::<WORD>();
        let (words, tail_words) = words.split_at(whole.len());
        for (chunk, word) in whole.iter().zip(words) {
            word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
        }
        if let [word] = tail_words {
            write_part(word, 0, tail);
        }
        Ok(())
    }

    /// All of it as words, in the CPU's byte order: what drivers keep their queues in.
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
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
    fn word(&self, offset: u64) -> Result<&AtomicU64, AccessError> {
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
    pub(super) fn word_slice(&self, offset: u64, len: u64) -> Result<&[AtomicU64], AccessError> {
        if !offset.is_multiple_of(8) || !len.is_multiple_of(8) {
            return Err(AccessError::Misaligned { offset, len });
        }
        let outside = AccessError::OutOfBounds { offset, len, memory_len: self.len() };
        let end = offset.checked_add(len).ok_or(outside)?;
        let index = |at: u64| usize::try_from(at / 8).map_err(|_| outside);
        self.mapping().words().get(index(offset)?..index(end)?).ok_or(outside)
    }

    /// The words that hold `len` bytes from `offset`, and the first byte's place in the first word.
    fn covering(&self, offset: u64, len: usize) -> Result<(&[AtomicU64], usize), AccessError> {
        let words = self.mapping().words();
        let place = usize::try_from(offset).ok().and_then(|first| {
            let end = first.checked_add(len)?;
            Some((words.get(first / WORD..end.div_ceil(WORD).max(first / WORD))?, first % WORD))
        });
        place.ok_or(AccessError::OutOfBounds {
            offset,
            len: u64::try_from(len).unwrap_or(u64::MAX),
            memory_len: self.len(),
        })
    }
}

/// How many of `len` bytes are before the first whole word, where the first byte is at `skew`.
const fn head_len(skew: usize, len: usize) -> usize {
    let to_next = (WORD - skew) % WORD;
    if to_next < len { to_next } else { len }
}

const _: () = assert!(head_len(0, 20) == 0);
const _: () = assert!(head_len(3, 20) == 5);
const _: () = assert!(head_len(3, 2) == 2);

/// Replaces the bytes of a word from `skew` on; the others stay, even if they change meanwhile.
fn write_part(word: &AtomicU64, skew: usize, bytes: &[u8]) {
    let mut old = word.load(Ordering::Relaxed);
    loop {
        let mut value = old.to_ne_bytes();
        value[skew..skew + bytes.len()].copy_from_slice(bytes);
        let new = u64::from_ne_bytes(value);
        match word.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => old = now,
        }
    }
}
