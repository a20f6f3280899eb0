//! This tells the controller where the bytes of a command are.
//!
//! The descriptors come from dmaspan. They are written to memory of the driver's own and copied to
//! that which the controller reads, as nobody can have a `&mut` to what a device sees.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use core::array;
use core::sync::atomic::Ordering;

use dmaspan::regbuf::descriptors::{
    Error as Refused, ListPage, MemoryPageSize, SegmentLimits, Sgl, SglDescriptor,
};
use dmaspan::{DmaAddr, Span};

use crate::access::{Access, SharedMemory};
use crate::error::Error;
use crate::queue::allocate;
use crate::spec::{DataPointer, Sgls};

/// The most pages of the list of a command: 2045 entries of PRPs, for 8 MiB in pages of 4 KiB.
pub(crate) const MAX_LIST_PAGES: usize = 4;

/// The bytes of a command, as the controller sees them.
pub(crate) trait Spans: Iterator<Item = Span<DmaAddr>> + Clone {}

impl<I: Iterator<Item = Span<DmaAddr>> + Clone> Spans for I {}

/// Lists of all commands of a queue: each slot has its own pages.
pub(crate) struct Lists<M> {
    page: MemoryPageSize,
    sgls: Sgls,
    /// Pages of one slot.
    pages: usize,
    memory: Option<M>,
    /// What is copied to a slot's pages.
    prps: Box<[u64]>,
    sgl: Box<[SglDescriptor]>,
}

impl<M: SharedMemory> Lists<M> {
    pub(crate) fn new<A: Access<Memory = M>>(
        access: &Arc<A>,
        page: MemoryPageSize,
        sgls: Sgls,
        slots: u16,
        pages: usize,
    ) -> Result<Self, Error> {
        if pages > MAX_LIST_PAGES {
            return Err(Error::ListPages { pages, max: MAX_LIST_PAGES });
        }
        let bytes = u64::from(slots) * pages as u64 * page.bytes();
        let memory = match pages {
            0 => None,
            _ => Some(allocate(&**access, bytes, page.bytes())?),
        };
        let words = pages * words_of(page);
        let sgl = if sgls == Sgls::None { 0 } else { words / 2 };
        let (prps, sgl) = (vec![0; words].into(), vec![SglDescriptor::default(); sgl].into());
        Ok(Self { page, sgls, pages, memory, prps, sgl })
    }

    /// The most bytes that PRPs of one command can always tell, wherever they begin in a page.
    pub(crate) fn max_bytes(&self) -> u64 {
        // Each page ends with a pointer but the last. One entry more is in the command, and where
        // there is no list, two. The first page may be entered at its end.
        let listed =
            (self.pages * words_of(self.page)).saturating_sub(self.pages.saturating_sub(1));
        listed.max(1) as u64 * self.page.bytes()
    }

    /// Writes where the bytes of a command are. PRPs are what every controller takes; spans that
    /// they cannot tell are told by a scatter-gather list, if it takes those.
    ///
    /// The slot is free, so the controller does not read its list.
    #[inline]
    pub(crate) fn describe(
        &mut self,
        slot: u16,
        spans: impl Spans,
    ) -> Result<DataPointer, Refused> {
        match self.describe_prps(slot, spans.clone()) {
            Err(Refused::AmidPage { .. } | Refused::Unaligned { .. }) if self.takes(&spans) => {
                self.describe_sgl(slot, spans)
            }
            described => described,
        }
    }

    #[inline]
    fn describe_prps(&mut self, slot: u16, spans: impl Spans) -> Result<DataPointer, Refused> {
        // Up to two are in the command, whatever pages there are for more.
        if let Ok(prps) = self.page.write(spans.clone(), &mut []) {
            return Ok(DataPointer::Prps([prps.prp1, prps.prp2]));
        }
        self.list_prps(slot, spans)
    }

    fn list_prps(&mut self, slot: u16, spans: impl Spans) -> Result<DataPointer, Refused> {
        let (addr, page) = (self.addr(slot), self.page);
        let mut list = pages(addr, page, &mut self.prps);
        let prps = page.write(spans.clone(), &mut list)?;
        if prps.list_pages > 0 {
            let entries = page.count(spans)? - 1 + prps.list_pages - 1;
            let words = self.prps.iter().take(entries).copied();
            copy(&self.memory, self.offset(slot), words);
        }
        Ok(DataPointer::Prps([prps.prp1, prps.prp2]))
    }

    fn describe_sgl(&mut self, slot: u16, spans: impl Spans) -> Result<DataPointer, Refused> {
        let (addr, limits) = (self.addr(slot), SegmentLimits::default());
        let mut list = pages(addr, self.page, &mut self.sgl);
        let sgl = Sgl::write(limits, spans.clone(), &mut list)?;
        if sgl.list_pages > 0 {
            let entries = limits.need(spans).entries + sgl.list_pages - 1;
            let words = self.sgl.iter().take(entries).flat_map(|entry| halves(*entry));
            copy(&self.memory, self.offset(slot), words);
        }
        Ok(DataPointer::Sgl(halves(sgl.sgl1).map(u64::from_le)))
    }

    /// Whether the controller takes a scatter-gather list of these.
    fn takes(&self, spans: &impl Spans) -> bool {
        let mut spans = spans.clone();
        match self.sgls {
            Sgls::None => false,
            Sgls::Bytes => true,
            Sgls::Dwords => spans.all(|span| (span.start().get() | span.len()) % 4 == 0),
        }
    }

    /// The first word of a slot's pages.
    fn offset(&self, slot: u16) -> usize {
        usize::from(slot) * self.prps.len()
    }

    fn addr(&self, slot: u16) -> DmaAddr {
        let start = self.memory.as_ref().map_or(DmaAddr::new(0), SharedMemory::addr);
        start.wrapping_add(8 * self.offset(slot) as u64)
    }
}

/// Words of a page.
fn words_of(page: MemoryPageSize) -> usize {
    usize::try_from(page.bytes() / 8).unwrap_or(usize::MAX)
}

/// The pages of a slot at `addr`, as they are written; those that it lacks have no entries.
fn pages<E>(
    addr: DmaAddr,
    page: MemoryPageSize,
    entries: &mut [E],
) -> [ListPage<'_, E>; MAX_LIST_PAGES] {
    let size = words_of(page) * 8 / size_of::<E>();
    let mut chunks = entries.chunks_mut(size);
    array::from_fn(|n| ListPage {
        addr: addr.wrapping_add(n as u64 * page.bytes()),
        entries: chunks.next().unwrap_or_default(),
    })
}

/// A descriptor as two words, as they lie in memory.
fn halves(descriptor: SglDescriptor) -> [u64; 2] {
    let whole = u128::from_le_bytes(descriptor.to_bytes());
    let half = |shift| u64::try_from(whole >> shift & u128::from(u64::MAX)).unwrap_or(0).to_le();
    [half(0), half(64)]
}

/// Copies words to where the controller reads them, from `offset` on.
fn copy<M: SharedMemory>(memory: &Option<M>, offset: usize, words: impl Iterator<Item = u64>) {
    let places = memory.iter().flat_map(|memory| memory.words().iter().skip(offset));
    // The words are little-endian by now.
    places.zip(words).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
}
