//! Folios: naturally aligned frames of one owner, with the counts that keep them.
//!
//! The records are what Linux's vmemmap is to `struct folio`: one for each block of 512 frames, and
//! one for each frame only in blocks that were ever cut into smaller folios. A folio's first record
//! has its counts, and all its records have its order, by which the first is found from each frame
//! of it.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use dmaspan::{Span, lg2};

use super::buddy::{BLOCK_FRAMES, BLOCK_ORDER, at, blocks_of};

/// `2^order` frames, naturally aligned, that are allocated and freed together.
///
/// It names memory and holds nothing: see [`SimMemory::get`](super::SimMemory::get).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Folio {
    pub(super) span: Span,
    pub(super) order: u32,
}

impl Folio {
    /// Its bytes.
    pub fn span(self) -> Span {
        self.span
    }

    /// log2 of the frames that it has.
    pub fn order(self) -> u32 {
        self.order
    }
}

/// The counts that keep a folio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct FolioCounts {
    /// References. The allocator of a folio has the first.
    pub refs: u32,
    /// Pins, one for each frame of it as often as that is pinned.
    pub pins: u64,
}

/// References are the low bits of a word of counts and pins the others, so that one atomic
/// operation sees both go to zero. 2^40 pins are 256 of the largest folio that fits into memory.
const PIN: u64 = 1 << PIN_LG2;
const PIN_LG2: u32 = 24;
/// The most references of a folio.
pub(super) const MAX_REFS: u32 = (1 << 24) - 1;

impl FolioCounts {
    pub(super) const NONE: Self = Self { refs: 0, pins: 0 };

    fn of(word: u64) -> Self {
        Self { refs: u32::try_from(word % PIN).unwrap_or(MAX_REFS), pins: word >> PIN_LG2 }
    }

    fn word(self) -> u64 {
        u64::from(self.refs) | (self.pins << PIN_LG2)
    }
}

/// What is known of writes by devices to frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) enum Marks {
    #[default]
    Clean,
    /// A device wrote them and nobody said so yet.
    Written,
    /// They were unpinned as written.
    Dirty,
}

/// What memory knows of a block, or of a frame in a block that was cut up.
#[derive(Debug, Default)]
pub(super) struct Record {
    /// Of the folio that begins here.
    counts: AtomicU64,
    /// One more than the order of the folio that this belongs to; 0 for none.
    order: AtomicU8,
    marks: AtomicU8,
}

impl Record {
    pub(super) fn counts(&self) -> FolioCounts {
        FolioCounts::of(self.counts.load(Ordering::Acquire))
    }

    /// Adds pins, and returns what the counts were.
    #[inline]
    pub(super) fn pin(&self, pins: u64) -> FolioCounts {
        // The count orders nothing: a thread that pins holds the folio in another way.
        FolioCounts::of(self.counts.fetch_add(pins << PIN_LG2, Ordering::Relaxed))
    }

    /// Takes pins away, and returns what the counts are now; `None`, with nothing changed, where
    /// there are not so many.
    #[inline]
    pub(super) fn unpin(&self, pins: u64) -> Option<FolioCounts> {
        // Ordered before the folio is used again, and behind all others where this is the last.
        let before = self.counts.fetch_sub(pins << PIN_LG2, Ordering::AcqRel);
        if before >> PIN_LG2 < pins {
            // Adding undoes the wrap.
            self.counts.fetch_add(pins << PIN_LG2, Ordering::Relaxed);
            return None;
        }
        Some(FolioCounts::of(before - (pins << PIN_LG2)))
    }

    /// Adds references; `None`, with nothing changed, where nothing keeps the folio or there would
    /// be too many.
    pub(super) fn get(&self, refs: u32) -> Option<()> {
        self.change(|counts| {
            let refs = counts.refs.checked_add(refs).filter(|refs| *refs <= MAX_REFS)?;
            (counts != FolioCounts::NONE).then_some(FolioCounts { refs, ..counts })
        })?;
        Some(())
    }

    /// Takes references away, and returns what the counts are now; `None`, with nothing changed,
    /// where there are not so many.
    pub(super) fn put(&self, refs: u32) -> Option<FolioCounts> {
        self.change(|counts| Some(FolioCounts { refs: counts.refs.checked_sub(refs)?, ..counts }))
    }

    fn change(&self, to: impl Fn(FolioCounts) -> Option<FolioCounts>) -> Option<FolioCounts> {
        let mut now = self.counts.load(Ordering::Relaxed);
        loop {
            let new = to(FolioCounts::of(now))?;
            let order = (Ordering::AcqRel, Ordering::Relaxed);
            match self.counts.compare_exchange_weak(now, new.word(), order.0, order.1) {
                Ok(_) => return Some(new),
                Err(other) => now = other,
            }
        }
    }

    #[inline]
    pub(super) fn marks(&self) -> Marks {
        match self.marks.load(Ordering::Relaxed) {
            0 => Marks::Clean,
            1 => Marks::Written,
            _ => Marks::Dirty,
        }
    }

    #[inline]
    pub(super) fn mark(&self, marks: Marks) {
        // Only the first unpin of a dirty folio writes.
        if self.marks() != marks {
            self.marks.store(marks as u8, Ordering::Relaxed);
        }
    }
}

/// A folio and its record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found<'a> {
    pub(super) record: &'a Record,
    /// Its first frame.
    pub(super) pfn: u64,
    pub(super) order: u32,
}

impl Found<'_> {
    #[inline]
    pub(super) fn pfns(&self) -> Range<u64> {
        self.pfn..self.pfn + lg2::size(self.order)
    }
}

/// The records of all frames.
#[derive(Debug)]
pub(super) struct Records {
    /// The first frame of the first block.
    origin: u64,
    blocks: Box<[Block]>,
}

#[derive(Debug, Default)]
struct Block {
    /// Of no folio where the block was cut up.
    whole: Record,
    small: OnceLock<Box<[Record; BLOCK_FRAMES]>>,
}

impl Block {
    fn small(&self) -> &[Record] {
        let empty = || Box::new(std::array::from_fn(|_| Record::default()));
        &self.small.get_or_init(empty)[..]
    }
}

impl Records {
    pub(super) fn new(pfns: &Range<u64>) -> Self {
        let (origin, blocks) = blocks_of(pfns);
        Self { origin, blocks: (0..blocks).map(|_| Block::default()).collect() }
    }

    /// The folio that a frame of this memory belongs to.
    #[inline]
    pub(super) fn find(&self, pfn: u64) -> Option<Found<'_>> {
        let index = at(pfn - self.origin);
        let block = self.blocks.get(index / BLOCK_FRAMES)?;
        if let Some(order) = order(&block.whole) {
            let head = lg2::align_down(pfn, order);
            let block = self.blocks.get(at(head - self.origin) / BLOCK_FRAMES)?;
            return Some(Found { record: &block.whole, pfn: head, order });
        }
        let small = block.small.get()?;
        let order = order(&small[index % BLOCK_FRAMES])?;
        let head = lg2::align_down(pfn, order);
        let record = &small[at(head - self.origin) % BLOCK_FRAMES];
        Some(Found { record, pfn: head, order })
    }

    /// Makes frames that are no folio one, with these counts.
    pub(super) fn make(&self, pfn: u64, order: u32, counts: FolioCounts) {
        let records = self.records(pfn, order);
        let mark = u8::try_from(order).map_or(0, |order| order + 1);
        for (number, record) in records.enumerate() {
            if number == 0 {
                record.counts.store(counts.word(), Ordering::Relaxed);
                record.mark(Marks::Clean);
            }
            record.order.store(mark, Ordering::Release);
        }
    }

    /// Makes a folio frames that are none, and returns the counts that it had.
    pub(super) fn unmake(&self, pfn: u64, order: u32) -> FolioCounts {
        let mut counts = FolioCounts::NONE;
        for (number, record) in self.records(pfn, order).enumerate() {
            record.order.store(0, Ordering::Release);
            if number == 0 {
                counts = FolioCounts::of(record.counts.swap(0, Ordering::AcqRel));
            }
        }
        counts
    }

    /// All records of the folios there are, in order; `pfns` are those of this memory.
    pub(super) fn folios(&self, pfns: Range<u64>) -> impl Iterator<Item = Found<'_>> {
        let mut next = pfns.start;
        std::iter::from_fn(move || {
            while next < pfns.end {
                if let Some(found) = self.find(next) {
                    next = found.pfns().end;
                    return Some(found);
                }
                next = self.behind_free(next);
            }
            None
        })
    }

    /// The next frame that may belong to a folio, behind one that does not.
    pub(super) fn behind_free(&self, pfn: u64) -> u64 {
        let block = self.blocks.get(at(pfn - self.origin) / BLOCK_FRAMES);
        let cut_up = block.is_some_and(|block| block.small.get().is_some());
        if cut_up { pfn + 1 } else { (pfn | lg2::mask(BLOCK_ORDER)) + 1 }
    }

    /// Bytes of records.
    pub(super) fn bytes(&self) -> usize {
        let small = self.blocks.iter().filter(|block| block.small.get().is_some()).count();
        size_of_val(&*self.blocks) + small * BLOCK_FRAMES * size_of::<Record>()
    }

    /// The records of a naturally aligned block of frames.
    fn records(&self, pfn: u64, order: u32) -> impl Iterator<Item = &Record> {
        let index = at(pfn - self.origin);
        let (block, frame) = (index / BLOCK_FRAMES, index % BLOCK_FRAMES);
        let (blocks, small): (&[Block], &[Record]) = if order >= BLOCK_ORDER {
            (&self.blocks[block..block + at(lg2::size(order - BLOCK_ORDER))], &[])
        } else {
            (&[], &self.blocks[block].small()[frame..frame + at(lg2::size(order))])
        };
        blocks.iter().map(|block| &block.whole).chain(small)
    }
}

#[inline]
fn order(record: &Record) -> Option<u32> {
    u32::from(record.order.load(Ordering::Acquire)).checked_sub(1)
}
