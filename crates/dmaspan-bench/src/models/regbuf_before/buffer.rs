//! A buffer and what is imported of it (`struct io_mapped_ubuf`, `io_import_fixed`).

use dmaspan::{Direction, PhysAddr, UserRange, lg2};

use super::coalesce::{Coalescing, bvecs, shape};
use super::descriptors::EntryBefore;
use super::folio::FolioBefore;
use super::{MAX_IMPORT, MAX_LEN, PAGE, RegbufBeforeError};

/// Contiguous bytes of a buffer (`struct bio_vec`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BvecBefore {
    /// A page, or the first of a folio.
    pub(crate) page: PhysAddr,
    /// How many bytes it has.
    pub(crate) len: u32,
    /// Where they begin, in bytes from the page on.
    pub(crate) offset: u32,
}

const _: () = assert!(size_of::<BvecBefore>() == 16);

/// What a buffer takes besides its own memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BytesBefore {
    /// As long as it is registered.
    pub(crate) kept: u64,
    /// The array of pages while it is.
    pub(crate) temporary: u64,
}

/// A buffer of whole folios or pages.
#[derive(Debug)]
pub(crate) struct BufferBefore {
    bvecs: Box<[BvecBefore]>,
    len: u64,
    /// log2 of the bytes of all bvecs but the first and the last; `None` where they differ.
    shift: Option<u32>,
    direction: Direction,
    pages: u64,
}

impl BufferBefore {
    /// The buffer of these pinned pages, of folios as `folios` tells.
    pub(super) fn new(
        user: UserRange,
        pages: &[PhysAddr],
        folios: &impl Fn(PhysAddr) -> FolioBefore,
        coalescing: Coalescing,
    ) -> Result<Self, RegbufBeforeError> {
        let too_long = RegbufBeforeError::TooLong { user, max: MAX_LEN };
        let len = user.checked_len().filter(|len| *len <= MAX_LEN).ok_or(too_long)?;
        let offset = user.start().get() & (PAGE - 1);
        let needed = (offset + len).div_ceil(PAGE);
        let given = u64::try_from(pages.len()).unwrap_or(u64::MAX);
        if given != needed {
            return Err(RegbufBeforeError::Pages { pages: given, needed });
        }
        let shape = shape(pages, folios, coalescing);
        Ok(Self {
            bvecs: bvecs(pages, shape, offset, len)?,
            len,
            shift: Some(shape.size_lg2()),
            direction: Direction::Bidirectional,
            pages: needed,
        })
    }

    /// A buffer of bvecs of any lengths, as the requests have that a driver of the kernel registers
    /// (`io_buffer_register_bvec`). Imports walk over it.
    #[cfg(test)]
    pub(crate) fn of_kernel(bvecs: Vec<BvecBefore>, direction: Direction) -> Self {
        let len = bvecs.iter().map(|bvec| u64::from(bvec.len)).sum();
        Self { bvecs: bvecs.into_boxed_slice(), len, shift: None, direction, pages: 0 }
    }

    /// Its bvecs.
    pub(crate) fn bvecs(&self) -> &[BvecBefore] {
        &self.bvecs
    }

    /// How many bytes it has.
    #[cfg(test)]
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// log2 of the bytes of all bvecs but the first and the last (`folio_shift`); `None` where they
    /// differ.
    #[cfg(test)]
    pub(crate) fn folio_shift(&self) -> Option<u32> {
        self.shift
    }

    /// What it takes.
    pub(crate) fn bytes(&self) -> BytesBefore {
        let of = |bytes: usize| u64::try_from(bytes).unwrap_or(u64::MAX);
        BytesBefore {
            kept: of(size_of::<Self>()) + of(size_of_val(&*self.bvecs)),
            temporary: self.pages * of(size_of::<PhysAddr>()),
        }
    }

    /// The bytes from `offset` on: to be written by a device or read.
    ///
    /// One step where all bvecs but the first and the last are equally long, else one for each
    /// before.
    ///
    /// # Errors
    ///
    /// [`RegbufBeforeError::Outside`], also for more than [`MAX_IMPORT`];
    /// [`RegbufBeforeError::Direction`].
    #[inline(always)]
    pub(crate) fn import(
        &self,
        offset: u64,
        len: u64,
        direction: Direction,
    ) -> Result<ImportBefore<'_>, RegbufBeforeError> {
        let fits = len <= self.len && offset <= self.len - len && len <= MAX_IMPORT;
        if !fits {
            let (buffer, max) = (self.len, MAX_IMPORT);
            return Err(RegbufBeforeError::Outside { offset, len, buffer, max });
        }
        if self.direction != Direction::Bidirectional && self.direction != direction {
            let has = self.direction;
            return Err(RegbufBeforeError::Direction { asked: direction, has });
        }
        let (index, skip) = match self.shift {
            Some(shift) => self.seek(offset, shift),
            None => self.walk(offset),
        };
        let bvecs = self.bvecs.get(index..).unwrap_or_default();
        Ok(ImportBefore { bvecs, skip, left: len })
    }

    /// The bvec that has the byte at `offset`, and where in it, where bvecs have `2^shift` bytes.
    #[inline(always)]
    fn seek(&self, offset: u64, shift: u32) -> (usize, u64) {
        let first = self.bvecs.first().map_or(0, |bvec| u64::from(bvec.len));
        match offset.checked_sub(first) {
            None => (0, offset),
            Some(behind) => {
                let index = usize::try_from(behind >> shift).unwrap_or(usize::MAX);
                (index.saturating_add(1), behind & lg2::mask(shift))
            }
        }
    }

    /// The same, by a walk.
    fn walk(&self, offset: u64) -> (usize, u64) {
        let mut skip = offset;
        for (index, bvec) in self.bvecs.iter().enumerate() {
            match skip.checked_sub(u64::from(bvec.len)) {
                None => return (index, skip),
                Some(behind) => skip = behind,
            }
        }
        (self.bvecs.len(), 0)
    }

    /// Unpins its pages, bvec by bvec.
    #[cfg(test)]
    pub(crate) fn unpin(
        &self,
        memory: &dmaspan_sim::memory::SimMemory,
        dirty: dmaspan::pin::Dirty,
    ) {
        for bvec in &self.bvecs {
            let (offset, len) = (u64::from(bvec.offset), u64::from(bvec.len));
            let start = lg2::align_down(offset, super::PAGE_LG2);
            let bytes = (offset + len).div_ceil(PAGE) * PAGE - start;
            if let Ok(span) = dmaspan::Span::new(bvec.page.wrapping_add(start), bytes) {
                memory.unpin_span(span, dirty);
            }
        }
    }
}

/// Bytes of a buffer, bvec by bvec (`struct iov_iter`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct ImportBefore<'a> {
    bvecs: &'a [BvecBefore],
    /// Bytes of the first bvec that come before.
    skip: u64,
    left: u64,
}

impl ImportBefore<'_> {
    /// How many bytes are left.
    #[cfg(test)]
    pub(crate) fn bytes_left(&self) -> u64 {
        self.left
    }
}

impl Iterator for ImportBefore<'_> {
    type Item = EntryBefore;

    #[inline(always)]
    fn next(&mut self) -> Option<EntryBefore> {
        if self.left == 0 {
            return None;
        }
        let (bvec, behind) = self.bvecs.split_first()?;
        let len = (u64::from(bvec.len) - self.skip).min(self.left);
        let addr = bvec.page.get() + u64::from(bvec.offset) + self.skip;
        self.bvecs = behind;
        self.skip = 0;
        self.left -= len;
        // No longer than the bvec.
        Some(EntryBefore { addr, len: u32::try_from(len).unwrap_or(bvec.len) })
    }
}
