//! A walk looks up a range of addresses, batch by batch.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use dmaspan::pin::{Kind, PinError, SpanSink};
use dmaspan::{Address, Errno, Span, UserAddr, UserRange};

use super::{Lookup, LookupCost, PagemapError, entry};
use crate::mem::MemoryKind;
use crate::os;
use crate::sys;
use crate::sys::scan::{self, PageRegion};

/// Entries that are read at once: they stay in the first two levels of the CPU's caches.
const BATCH_ENTRIES: u64 = 8192;

/// Huge leaves that are looked up before their spans are passed on.
const BATCH_LEAVES: u64 = 512;

/// Regions that are asked for at once.
const BATCH_REGIONS: usize = 128;

/// Where huge leaves are, and of what size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaves {
    /// Nowhere, or it does not matter.
    None,
    /// Everywhere: hugetlb memory has no other pages.
    Everywhere(u64),
    /// Where a scan finds them.
    Scan(u64),
}

impl Leaves {
    /// What to do for memory of this `kind`. The error is why a look-up by leaves cannot be done.
    pub(super) fn choose(
        kind: MemoryKind,
        lookup: Lookup,
        no_scan: Option<Errno>,
    ) -> Result<Self, Errno> {
        let size = kind.leaf_size();
        if lookup == Lookup::EveryPage || size == sys::page_size() {
            return Ok(Self::None);
        }
        if kind.is_hugetlb() {
            return Ok(Self::Everywhere(size));
        }
        match (no_scan, lookup) {
            (None, _) => Ok(Self::Scan(size)),
            (Some(errno), Lookup::HugeLeaves) => Err(errno),
            (Some(_), _) => Ok(Self::None),
        }
    }
}

/// Buffers of a walk, kept from one to the next.
#[derive(Debug)]
pub(super) struct Scratch<A: Address> {
    entries: Vec<[u8; 8]>,
    regions: Vec<PageRegion>,
    spans: Vec<Span<A>>,
}

impl<A: Address> Default for Scratch<A> {
    fn default() -> Self {
        Self { entries: Vec::new(), regions: Vec::new(), spans: Vec::new() }
    }
}

/// A part of the range whose pages are looked up the same way.
#[derive(Clone, Copy, Debug)]
enum Piece {
    /// Base pages up to this address.
    Pages(u64),
    /// Huge leaves of this size up to this address, which is the end of one or of the range.
    Leaves(u64, u64),
}

/// A cursor over the pages of a range. All addresses are of pages but those of the range.
pub(super) struct Walk<'a, A: Address> {
    pagemap: &'a File,
    range: UserRange,
    leaves: Leaves,
    page: u64,
    at: u64,
    end: u64,
    /// Regions of huge leaves before this address are known.
    scanned: u64,
    /// The next region of the scan, and how many there are.
    region: usize,
    regions: usize,
    scratch: &'a mut Scratch<A>,
    cost: LookupCost,
}

/// The addresses of the base pages that a range touches. A user's memory ends well below the top of
/// the space.
pub(super) fn pages(range: UserRange) -> impl Iterator<Item = u64> {
    let page = sys::page_size();
    let first = os::align_down(range.start().get(), page) / page;
    (first..=range.last().get() / page).map(move |number| number * page)
}

impl<'a, A: Address> Walk<'a, A> {
    pub(super) fn new(
        pagemap: &'a File,
        range: UserRange,
        leaves: Leaves,
        scratch: &'a mut Scratch<A>,
    ) -> Self {
        let page = sys::page_size();
        let at = os::align_down(range.start().get(), page);
        let end = os::align_down(range.last().get(), page).saturating_add(page);
        scratch.spans.clear();
        Self {
            pagemap,
            range,
            leaves,
            page,
            at,
            end,
            scanned: at,
            region: 0,
            regions: 0,
            scratch,
            cost: LookupCost::default(),
        }
    }

    pub(super) fn cost(&self) -> LookupCost {
        self.cost
    }

    /// Walks to the end and pushes all spans.
    pub(super) fn run(&mut self, sink: &mut dyn SpanSink<A>) -> Result<(), PinError<PagemapError>> {
        while self.at < self.end {
            let begin = Instant::now();
            let result = self.next_piece().and_then(|piece| self.look_up(piece));
            let ns = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.cost.ns = self.cost.ns.saturating_add(ns);
            result.map_err(PinError::Failed)?;
            // The last span may go on in the next batch.
            let spans = &mut self.scratch.spans;
            let closed =
                if self.at < self.end { spans.len().saturating_sub(1) } else { spans.len() };
            if sink.push_all(&spans[..closed], Kind::Memory) < closed {
                return Err(PinError::Stopped);
            }
            spans.drain(..closed);
        }
        Ok(())
    }

    /// Appends the address of every page of the range.
    pub(super) fn every_page(&mut self, pages: &mut Vec<A>) -> Result<(), PagemapError> {
        while self.at < self.end {
            let until = self.end.min(self.at + BATCH_ENTRIES * self.page);
            let count = self.read_entries(until)?;
            for (index, word) in (0..).zip(&self.scratch.entries[..count]) {
                let address = self.at + index * self.page;
                pages.push(A::new(frame(*word, address)? * self.page));
            }
            self.at = until;
        }
        Ok(())
    }

    /// What comes next, at most a batch of it.
    fn next_piece(&mut self) -> Result<Piece, PagemapError> {
        let size = match self.leaves {
            Leaves::None => return Ok(self.pages(self.end)),
            Leaves::Everywhere(size) => return Ok(leaves(self.at, self.end, size)),
            Leaves::Scan(size) => size,
        };
        if self.at >= self.scanned {
            self.scan()?;
        }
        let known = self.scratch.regions.get(self.region..self.regions).unwrap_or_default();
        Ok(match known.first() {
            Some(region) if self.at < region.start => self.pages(region.start),
            Some(region) => {
                let region_end = region.end;
                let piece = leaves(self.at, region_end, size);
                if matches!(piece, Piece::Leaves(_, until) if until >= region_end) {
                    self.region += 1;
                }
                piece
            }
            None => self.pages(self.scanned),
        })
    }

    /// Base pages from here on, at most a batch up to `until`.
    fn pages(&self, until: u64) -> Piece {
        Piece::Pages(until.min(self.at + BATCH_ENTRIES * self.page))
    }

    /// Asks the kernel where huge leaves are from here on.
    fn scan(&mut self) -> Result<(), PagemapError> {
        let regions = &mut self.scratch.regions;
        regions.resize(BATCH_REGIONS, PageRegion::default());
        let result = scan::huge_regions(self.pagemap, self.at, self.end, regions);
        let scanned = result.map_err(|errno| PagemapError::Read { range: self.range, errno })?;
        // A kernel that came nowhere told nothing: the rest is read page by page.
        let told = scanned.end > self.at;
        self.scanned = if told { scanned.end.min(self.end) } else { self.end };
        self.regions = if told { scanned.regions } else { 0 };
        self.region = 0;
        Ok(())
    }

    fn look_up(&mut self, piece: Piece) -> Result<(), PagemapError> {
        match piece {
            Piece::Pages(until) => self.look_up_pages(until),
            Piece::Leaves(size, until) => self.look_up_leaves(size, until),
        }
    }

    /// Reads the entry of every page up to `until` and adds a span for each run of frames.
    fn look_up_pages(&mut self, until: u64) -> Result<(), PagemapError> {
        let count = self.read_entries(until)?;
        let Self { scratch, range, page, .. } = self;
        let Scratch { entries, spans, .. } = &mut **scratch;
        let mut entries = entries[..count].iter();
        let (mut start, mut address) = (self.at, self.at);
        let Some(first) = entries.next() else { return Ok(()) };
        let mut run = frame(*first, address)?;
        let mut next = (run + 1) | entry::PRESENT;
        for word in entries {
            address += *page;
            // A page right behind the last one, which most are, takes one comparison.
            if u64::from_ne_bytes(*word) & (entry::PRESENT | entry::FRAME) == next {
                next += 1;
                continue;
            }
            add(spans, *range, start, address, run * *page);
            run = frame(*word, address)?;
            next = (run + 1) | entry::PRESENT;
            start = address;
        }
        add(spans, *range, start, until, run * *page);
        self.at = until;
        Ok(())
    }

    /// Reads one entry for each leaf of `size` bytes up to `until`.
    ///
    /// A system call for each: entries that are apart cannot be read in one.
    fn look_up_leaves(&mut self, size: u64, until: u64) -> Result<(), PagemapError> {
        while self.at < until {
            let leaf_end = until.min(os::align_down(self.at, size) + size);
            self.read_entries(self.at + self.page)?;
            let word = self.scratch.entries.first().copied().unwrap_or_default();
            let paddr = frame(word, self.at)? * self.page;
            // Within its leaf a byte has the same place in both address spaces. Otherwise this is
            // not a leaf of that size.
            if (paddr ^ self.at) & (size - 1) == 0 {
                add(&mut self.scratch.spans, self.range, self.at, leaf_end, paddr);
                self.at = leaf_end;
                continue;
            }
            while self.at < leaf_end {
                self.look_up(self.pages(leaf_end))?;
            }
        }
        Ok(())
    }

    /// Reads the entries of the pages from here up to `until`, and returns how many there are. They
    /// are the first ones of the buffer.
    fn read_entries(&mut self, until: u64) -> Result<usize, PagemapError> {
        let failed = |errno| PagemapError::Read { range: self.range, errno };
        let first = self.at / self.page;
        let entries = until / self.page - first;
        let count = usize::try_from(entries).map_err(|_| failed(Errno::EINVAL))?;
        let buffer = &mut self.scratch.entries;
        if buffer.len() < count {
            buffer.resize(count, [0; 8]);
        }
        let bytes = buffer[..count].as_flattened_mut();
        let result = self.pagemap.read_exact_at(bytes, first * entry::BYTES);
        result.map_err(|error| failed(os::errno(&error)))?;
        self.cost.entries += entries;
        Ok(count)
    }
}

/// Leaves of `size` bytes from `at`, at most a batch up to `until`.
fn leaves(at: u64, until: u64, size: u64) -> Piece {
    let batch_end = os::align_down(at, size).saturating_add(BATCH_LEAVES.saturating_mul(size));
    Piece::Leaves(size, until.min(batch_end))
}

/// The frame number that an entry holds for the page at `address`.
fn frame(word: [u8; 8], address: u64) -> Result<u64, PagemapError> {
    let word = u64::from_ne_bytes(word);
    let address = UserAddr::new(address);
    if word & entry::PRESENT == 0 {
        return Err(PagemapError::NotPresent { address });
    }
    // Frame 0 is never memory of a process: it is how the kernel hides a number.
    match word & entry::FRAME {
        0 => Err(PagemapError::Hidden { address }),
        frame => Ok(frame),
    }
}

/// Adds the part of `start..end`, which is at `paddr`, that is in `range`.
fn add<A: Address>(spans: &mut Vec<Span<A>>, range: UserRange, start: u64, end: u64, paddr: u64) {
    let skip = range.start().get().saturating_sub(start);
    let last = range.last().get().min(end - 1);
    let span = Span::new(A::new(paddr + skip), (last - start).saturating_sub(skip) + 1);
    if let Ok(span) = span {
        // A vector takes every span.
        let _ = SpanSink::push(spans, span, Kind::Memory);
    }
}
