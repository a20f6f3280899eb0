//! `struct vfio_bitmap`: where a client wants to know which pages were written.

use alloc::vec::Vec;

use super::arg::Arg;
use crate::addr::UserAddr;
use crate::error::Errno;
use crate::pin::Pinner;
use crate::range::IovaRange;

/// The longest bitmap: a bit less than 2^31 pages (`DIRTY_BITMAP_SIZE_MAX`).
pub(super) const MAX_BYTES: u64 = 1 << 28;

/// How long the structure is.
pub(super) const LEN: u32 = 24;

/// How many bytes are probed at once.
const PIECE: usize = 512;

/// A bitmap of a client, as it says.
#[derive(Clone, Copy)]
pub(super) struct Bitmap {
    /// How many bytes a bit stands for.
    pub(super) page_size: u64,
    len: u64,
    data: u64,
}

impl Bitmap {
    /// The bitmap at `at` of an argument.
    pub(super) fn read(arg: &Arg<'_>, at: usize) -> Result<Self, Errno> {
        Ok(Self { page_size: arg.u64(at)?, len: arg.u64(at + 8)?, data: arg.u64(at + 16)? })
    }

    /// Whether it has a bit for each page of `bytes`, in words of 64 bits.
    ///
    /// # Errors
    ///
    /// `EINVAL` where it does not, where it is longer than [`MAX_BYTES`], and where it wraps.
    pub(super) fn check(&self, bytes: u64) -> Result<(), Errno> {
        let wraps = self.data.checked_add(self.len).is_none();
        // As the kernel counts them: by the lowest bit of the size, before it looks at the rest.
        let pages = bytes.checked_shr(self.page_size.trailing_zeros()).unwrap_or(0);
        let needed = pages.div_ceil(64).saturating_mul(8);
        if wraps || pages == 0 || self.len < needed || self.len > MAX_BYTES {
            return Err(Errno::EINVAL);
        }
        Ok(())
    }

    /// How many words of 64 bits `range` needs.
    pub(super) fn needed(&self, range: IovaRange) -> u64 {
        range.len_less_one() / self.page_size.max(1) / 64 + 1
    }
}

/// Words of a bitmap that are written together, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Words {
    first: u64,
    last: u64,
    /// Whether the first keeps the bits that the client had set there.
    keeps: bool,
}

/// The part of a client's bitmap that Linux writes (`update_user_bitmap`): the words of 64 bits in
/// which mappings have a bit. It stores a mapping's words whole, unless one begins within a word:
/// then that keeps what is there.
pub(super) struct Delivery<'a, P: Pinner> {
    pinner: &'a P,
    space: &'a P::Space,
    bitmap: Bitmap,
    /// Sorted and disjoint.
    words: Vec<Words>,
}

impl<'a, P: Pinner> Delivery<'a, P> {
    pub(super) fn new(pinner: &'a P, space: &'a P::Space, bitmap: Bitmap) -> Self {
        Self { pinner, space, bitmap, words: Vec::new() }
    }

    /// How many bytes the bitmap has.
    pub(super) fn len(&self) -> u64 {
        self.bitmap.len
    }

    /// Adds a mapping behind all others, of the pages from `base` on.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(super) fn add(&mut self, base: u64, mapping: IovaRange) -> Result<(), Errno> {
        let bit = |address: u64| (address - base) / self.bitmap.page_size.max(1);
        let (start, last) = (bit(mapping.start().get()), bit(mapping.last().get()) / 64);
        let (first, keeps) = (start / 64, start % 64 != 0);
        match self.words.last_mut() {
            Some(words) if words.last == first || (!keeps && words.last + 1 == first) => {
                words.last = last;
            }
            _ => {
                self.words.try_reserve(1).map_err(|_| Errno::ENOMEM)?;
                self.words.push(Words { first, last, keeps });
            }
        }
        Ok(())
    }

    /// Writes all words as they are, so that it is known before anything is unmapped that they can
    /// be.
    pub(super) fn probe(&self) -> Result<(), Errno> {
        let mut room = [0; PIECE];
        for words in &self.words {
            let (mut at, end) = (words.first * 8, words.last * 8 + 8);
            while at < end {
                let len = usize::try_from(end - at).unwrap_or(PIECE).min(PIECE);
                let piece = &mut room[..len];
                self.load(at, piece)?;
                self.store(at, piece)?;
                at += len as u64;
            }
        }
        Ok(())
    }

    /// Delivers whole words of the bitmap, from byte `offset` on.
    ///
    /// # Errors
    ///
    /// `EFAULT` where the client could not write its memory.
    pub(super) fn deliver(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let end = offset.saturating_add(bytes.len() as u64);
        let before = self.words.partition_point(|words| words.last * 8 + 8 <= offset);
        for words in self.words[before..].iter().take_while(|words| words.first * 8 < end) {
            let (from, to) = ((words.first * 8).max(offset), (words.last * 8 + 8).min(end));
            let index = |at: u64| usize::try_from(at - offset).unwrap_or(usize::MAX);
            let mut fresh = bytes.get(index(from)..index(to)).unwrap_or_default();
            let mut at = from;
            if words.keeps && from == words.first * 8 {
                let mut kept = [0; 8];
                let (own, behind) = fresh.split_at(fresh.len().min(8));
                let kept = &mut kept[..own.len()];
                self.load(at, kept)?;
                kept.iter_mut().zip(own).for_each(|(byte, own)| *byte |= own);
                self.store(at, kept)?;
                (fresh, at) = (behind, at + 8);
            }
            if !fresh.is_empty() {
                self.store(at, fresh)?;
            }
        }
        Ok(())
    }

    fn load(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Errno> {
        self.pinner.read(self.space, self.at(offset), bytes).map_err(|_| Errno::EFAULT)
    }

    fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.pinner.write(self.space, self.at(offset), bytes).map_err(|_| Errno::EFAULT)
    }

    fn at(&self, offset: u64) -> UserAddr {
        UserAddr::new(self.bitmap.data).wrapping_add(offset)
    }
}
