//! A [`Held`] is part of a client's memory that stays while something here uses it.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use lock_api::RawMutex;

use super::error::HeldError;
use super::memory::HostSlice;
use super::region::{Backing, Region};
use crate::addr::Address;
use crate::error::Errno;
use crate::prot::Prot;
use crate::span::Span;

/// Part of a client's memory, over as many neighbouring regions as it lies in, which stays until
/// this is dropped. It is read, written, or handed to system calls as [slices](Self::slices).
///
/// An [`Unmapping`](super::Unmapping) of a region ends when the last of these is gone. One that is
/// forgotten (`mem::forget`) keeps the memory for ever, and the unmapping never ends.
///
/// Copies are of bytes that others may write meanwhile: each byte that is read is one that the
/// memory has had, and there is no order among them.
#[must_use = "dropping this lets the memory go"]
pub struct Held<A: Address, L: RawMutex> {
    range: Span<A>,
    access: Prot,
    /// Where the range begins. Most have no more, and then nothing is allocated.
    first: Piece<A, L>,
    rest: Vec<Piece<A, L>>,
}

/// What a region has of a held range.
pub(super) struct Piece<A: Address, L: RawMutex> {
    pub(super) region: Arc<Region<A, L>>,
    /// Where it begins in the region.
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// The part of a piece that an access needs.
struct Part<'h, A: Address, L: RawMutex> {
    region: &'h Region<A, L>,
    offset: u64,
    len: u64,
}

impl<A: Address, L: RawMutex> Part<'_, A, L> {
    /// The client's addresses.
    fn range(&self) -> Span<A> {
        let start = A::new(self.region.range.start().get().wrapping_add(self.offset));
        Span::covering(start, self.len - 1)
    }
}

impl<A: Address, L: RawMutex> Held<A, L> {
    pub(super) fn new(
        range: Span<A>,
        access: Prot,
        first: Piece<A, L>,
        rest: Vec<Piece<A, L>>,
    ) -> Self {
        Self { range, access, first, rest }
    }

    /// Returns which addresses of the client are held.
    pub fn range(&self) -> Span<A> {
        self.range
    }

    /// Returns what they are held for: reads, writes, or both.
    pub fn access(&self) -> Prot {
        self.access
    }

    /// The length in bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "at least one byte is held")]
    pub fn len(&self) -> u64 {
        self.range.len()
    }

    /// Copies the bytes from `offset` on into `bytes`.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use dmaspan::{Iova, Prot};
    /// use dmaspan_linux::client::ClientRegions;
    /// use dmaspan_linux::{Memory, MemoryKind};
    ///
    /// let regions = ClientRegions::new();
    /// let memory = Arc::new(Memory::new(MemoryKind::Base, 0x2000)?);
    /// memory.write(0x1ffe, b"ab")?;
    /// regions.insert(Iova::new(0x8000), Prot::READ, memory)?;
    ///
    /// let held = regions.hold(Iova::new(0x9ff0), 0x10, Prot::READ)?;
    /// let mut bytes = [0; 2];
    /// held.read(0xe, &mut bytes)?;
    /// assert_eq!(&bytes, b"ab");
    /// assert!(held.write(0, b"no").is_err()); // held for reading only
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`HeldError::Outside`], [`HeldError::Access`] where it is not held for reads, and
    /// [`HeldError::Remote`].
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), HeldError<A>> {
        let mut rest = bytes;
        self.each(offset, rest.len(), Prot::READ, |part, len| {
            let (here, behind) = core::mem::take(&mut rest).split_at_mut(len);
            rest = behind;
            match &part.region.backing {
                Backing::Mapped(memory) => {
                    memory.read(part.offset, here).map_err(|outside| outside.errno())
                }
                Backing::Remote(client) => client.read(part.offset, here),
            }
        })
    }

    /// Copies `bytes` to `offset` and on.
    ///
    /// # Errors
    ///
    /// [`HeldError::Outside`], [`HeldError::Access`] where it is not held for writes, and
    /// [`HeldError::Remote`].
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), HeldError<A>> {
        let mut rest = bytes;
        self.each(offset, rest.len(), Prot::WRITE, |part, len| {
            let (here, behind) = rest.split_at(len);
            rest = behind;
            match &part.region.backing {
                Backing::Mapped(memory) => {
                    memory.write(part.offset, here).map_err(|outside| outside.errno())
                }
                Backing::Remote(client) => client.write(part.offset, here),
            }
        })
    }

    /// Returns where `len` bytes from `offset` on are in this program, in order: what preadv(2),
    /// pwritev(2) and io_uring take as `iovec`s. They may be read where this is held for reads, and
    /// written where it is held for writes, for as long as this is not dropped.
    ///
    /// `dmaspan_linux::client` has functions that read and write files so, without unsafe code.
    ///
    /// # Errors
    ///
    /// [`HeldError::Outside`], and [`HeldError::NotMapped`] where a region of theirs is reached by
    /// asking the client.
    pub fn slices(&self, offset: u64, len: u64) -> Result<HostSlices<'_, A, L>, HeldError<A>> {
        self.check(offset, len)?;
        for part in self.parts(offset, len) {
            if let Backing::Remote(_) = part.region.backing {
                return Err(HeldError::NotMapped { part: part.range() });
            }
        }
        Ok(HostSlices { held: self, offset, len })
    }

    /// Calls `f` with each part of an access and its length, in order.
    fn each(
        &self,
        offset: u64,
        len: usize,
        wanted: Prot,
        mut f: impl FnMut(&Part<'_, A, L>, usize) -> Result<(), Errno>,
    ) -> Result<(), HeldError<A>> {
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        self.check(offset, len)?;
        if !self.access.contains(wanted) {
            return Err(HeldError::Access { held: self.range, wanted, access: self.access });
        }
        for part in self.parts(offset, len) {
            // No longer than the bytes of the caller.
            let bytes = usize::try_from(part.len).unwrap_or(usize::MAX);
            f(&part, bytes).map_err(|errno| HeldError::Remote { part: part.range(), errno })?;
        }
        Ok(())
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), HeldError<A>> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(()),
            _ => Err(HeldError::Outside { offset, len, held: self.range }),
        }
    }

    fn pieces(&self) -> impl Iterator<Item = &Piece<A, L>> {
        core::iter::once(&self.first).chain(&self.rest)
    }

    /// The parts of `len` bytes from `offset`, which are held.
    fn parts(&self, offset: u64, len: u64) -> impl Iterator<Item = Part<'_, A, L>> {
        let (mut skip, mut left) = (offset, len);
        self.pieces().filter_map(move |piece| {
            let before = skip.min(piece.len);
            skip -= before;
            let len = left.min(piece.len - before);
            left -= len;
            let offset = piece.offset + before;
            (len > 0).then_some(Part { region: &piece.region, offset, len })
        })
    }
}

impl<A: Address, L: RawMutex> fmt::Debug for Held<A, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let regions = 1 + self.rest.len();
        let mut fields = f.debug_struct("Held");
        fields.field("range", &self.range).field("access", &self.access);
        fields.field("regions", &regions).finish()
    }
}

/// Where bytes that are held are in this program, one region after the other. See
/// [`Held::slices`].
pub struct HostSlices<'h, A: Address, L: RawMutex> {
    held: &'h Held<A, L>,
    /// The next byte.
    offset: u64,
    /// How many are left.
    len: u64,
}

impl<'h, A: Address, L: RawMutex> Iterator for HostSlices<'h, A, L> {
    type Item = HostSlice<'h>;

    fn next(&mut self) -> Option<HostSlice<'h>> {
        let held = self.held;
        let part = held.parts(self.offset, self.len).next()?;
        self.offset += part.len;
        self.len -= part.len;
        match &part.region.backing {
            Backing::Mapped(memory) => {
                let place = usize::try_from(part.offset).ok().zip(usize::try_from(part.len).ok());
                place.and_then(|(offset, len)| memory.slice().part(offset, len))
            }
            // Looked for before.
            Backing::Remote(_) => None,
        }
    }
}

impl<A: Address, L: RawMutex> fmt::Debug for HostSlices<'_, A, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { held, offset, len } = *self;
        f.debug_list().entries(HostSlices { held, offset, len }).finish()
    }
}
