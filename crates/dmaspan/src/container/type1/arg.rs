//! The bytes of a request's argument, read and written field by field.

use crate::error::Errno;

/// An argument: a structure that begins with its length as the caller says, `argsz`, and flags. All
/// numbers are in the byte order of the machine.
pub(super) struct Arg<'a>(&'a mut [u8]);

impl<'a> Arg<'a> {
    #[inline(always)]
    pub(super) fn new(bytes: &'a mut [u8]) -> Self {
        Self(bytes)
    }

    /// `argsz` and the flags, of which there are those in `known`.
    ///
    /// # Errors
    ///
    /// `EINVAL` where `argsz` is below `min_len` or another flag is set, `EFAULT` where `argsz` is
    /// not, but the bytes are fewer.
    #[inline(always)]
    pub(super) fn header(&self, min_len: u32, known: u32) -> Result<(u32, u32), Errno> {
        let argsz = self.u32(0)?;
        if argsz < min_len {
            return Err(Errno::EINVAL);
        }
        // The kernel copies all of it before it looks at anything.
        self.bytes(0, index(min_len)?)?;
        let flags = self.u32(4)?;
        if flags & !known == 0 { Ok((argsz, flags)) } else { Err(Errno::EINVAL) }
    }

    #[inline(always)]
    pub(super) fn u32(&self, at: usize) -> Result<u32, Errno> {
        self.array(at).map(u32::from_ne_bytes)
    }

    #[inline(always)]
    pub(super) fn u64(&self, at: usize) -> Result<u64, Errno> {
        self.array(at).map(u64::from_ne_bytes)
    }

    /// The whole argument as a number, of 4 bytes or 8.
    pub(super) fn number(&self) -> Result<u64, Errno> {
        self.u64(0).or_else(|_| self.u32(0).map(u64::from))
    }

    /// Replaces bytes.
    ///
    /// # Errors
    ///
    /// `EFAULT` where there are not so many, with nothing changed.
    #[inline(always)]
    pub(super) fn put(&mut self, at: usize, bytes: &[u8]) -> Result<(), Errno> {
        let end = at.checked_add(bytes.len()).ok_or(Errno::EFAULT)?;
        self.0.get_mut(at..end).ok_or(Errno::EFAULT)?.copy_from_slice(bytes);
        Ok(())
    }

    #[inline(always)]
    fn bytes(&self, at: usize, len: usize) -> Result<&[u8], Errno> {
        let end = at.checked_add(len).ok_or(Errno::EFAULT)?;
        self.0.get(at..end).ok_or(Errno::EFAULT)
    }

    #[inline(always)]
    fn array<const N: usize>(&self, at: usize) -> Result<[u8; N], Errno> {
        self.bytes(at, N)?.first_chunk().copied().ok_or(Errno::EFAULT)
    }
}

/// A length as an index; no argument is longer than memory.
#[inline(always)]
pub(super) fn index(len: u32) -> Result<usize, Errno> {
    usize::try_from(len).map_err(|_| Errno::EFAULT)
}
