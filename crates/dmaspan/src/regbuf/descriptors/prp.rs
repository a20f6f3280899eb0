//! NVMe Physical Region Pages.
//!
//! NVM Express Base Specification 2.0, section 4.1.1: an entry is the address of a memory page, of
//! which only the first one may have an offset. A command has two entries; where it needs more, the
//! second one points to a list of them.

use super::error::Error;
use super::list::{ListPage, PagePosition, pages_for};
use super::run::{ByteRun, Runs};
use crate::addr::{Address, DmaAddr};
use crate::lg2;
use crate::span::Span;

/// log2 of the smallest memory page: `CC.MPS` of 0 (section 3.1.3.5, Controller Configuration).
const SMALLEST_LG2: u32 = 12;
/// The largest value of the field.
const MAX_MPS: u32 = 15;
/// log2 of the alignment of an address in an entry: its low two bits are 0 (section 4.1.1).
const DWORD_LG2: u32 = 2;
/// log2 of an entry's size.
const ENTRY_LG2: u32 = 3;
const _: () = assert!(size_of::<u64>() == 1 << ENTRY_LG2);

/// The size of a controller's memory pages, which PRP entries are the addresses of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryPageSize {
    lg2: u32,
}

/// The data pointer of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prps {
    /// PRP entry 1, as a number: where the bytes begin.
    pub prp1: u64,
    /// PRP entry 2, as a number: the second page, or the list of all further ones; 0, where there
    /// is one page only.
    pub prp2: u64,
    /// How many pages of the list the command uses.
    pub list_pages: usize,
}

impl Prps {
    /// The field DPTR of a command, bytes 24 to 39 (section 3.3.3.1).
    pub const fn to_bytes(self) -> [u8; 16] {
        (self.prp1 as u128 | (self.prp2 as u128) << 64).to_le_bytes()
    }
}

impl MemoryPageSize {
    /// Pages of 2^(12 + `mps`) bytes, which is `CC.MPS`.
    ///
    /// # Errors
    ///
    /// [`Error::MemoryPageSize`] above 15.
    pub const fn new(mps: u32) -> Result<Self, Error> {
        if mps > MAX_MPS {
            return Err(Error::MemoryPageSize { mps });
        }
        Ok(Self { lg2: SMALLEST_LG2 + mps })
    }

    /// The size of a page, in bytes.
    pub const fn bytes(self) -> u64 {
        lg2::size(self.lg2)
    }

    /// The PRP entries of `spans`, as numbers: one a page.
    ///
    /// # Errors
    ///
    /// [`Error::Empty`]; [`Error::Unaligned`] where they begin within a dword;
    /// [`Error::AmidPage`] where two of them meet inside a page without touching.
    #[inline(always)]
    pub fn entries<A: Address, I>(self, spans: I) -> Result<PrpEntries<I::IntoIter>, Error>
    where
        I: IntoIterator<Item = Span<A>, IntoIter: Clone>,
    {
        let spans = spans.into_iter();
        self.count(spans.clone())?;
        Ok(PrpEntries::new(self, spans))
    }

    /// Returns how many PRP entries `spans` have, in all; `usize::MAX` for more. This costs as much
    /// as there are spans.
    ///
    /// # Errors
    ///
    /// As of [`entries`](Self::entries).
    #[inline(always)]
    pub fn count<A: Address, I>(self, spans: I) -> Result<usize, Error>
    where
        I: IntoIterator<Item = Span<A>, IntoIter: Clone>,
    {
        let spans = spans.into_iter();
        let mut rest = spans.clone();
        let first = ByteRun::of(rest.next().ok_or(Error::Empty)?);
        if !lg2::is_aligned(first.first, DWORD_LG2) {
            let addr = DmaAddr::new(first.first);
            return Err(Error::Unaligned { addr, align: lg2::size(DWORD_LG2) });
        }
        // Low bits: a span ends or the next one begins elsewhere than on a page.
        let (mut seams, mut last) = (0, first.last);
        let mut above = u128::from(first.above());
        rest.map(ByteRun::of).for_each(|run| {
            seams |= last.wrapping_add(1) | run.first;
            last = run.last;
            above += u128::from(run.above()) + 1;
        });
        if !lg2::is_aligned(seams, self.lg2) {
            return self.count_seamed(Runs::new(spans));
        }
        let offset = u128::from(first.first & lg2::mask(self.lg2));
        let count = ((offset + above) >> self.lg2) + 1;
        Ok(usize::try_from(count).unwrap_or(usize::MAX))
    }

    /// The same for spans that meet inside pages, and have to touch there.
    #[cold]
    fn count_seamed(self, mut runs: impl Iterator<Item = ByteRun>) -> Result<usize, Error> {
        let mask = lg2::mask(self.lg2);
        let mut run = runs.next().ok_or(Error::Empty)?;
        let mut count = self.pages(run);
        for next in runs {
            if (!run.last | next.first) & mask != 0 {
                let amid = if !run.last & mask != 0 { run } else { next };
                return Err(Error::AmidPage { span: amid.span(), page: self.bytes() });
            }
            count = count.saturating_add(self.pages(next));
            run = next;
        }
        Ok(usize::try_from(count).unwrap_or(usize::MAX))
    }

    /// Returns how many whole pages of a list [`write`](Self::write) needs for so many entries in
    /// all.
    pub fn list_pages(self, entries: usize) -> usize {
        // All but the first, of which 1 needs no list.
        let listed = entries.saturating_sub(1);
        if listed <= 1 {
            return 0;
        }
        // Every page has one entry of data less than it has room for, but the last one.
        let chained = self.list_entries(0) - 1;
        (listed - 1).div_ceil(chained)
    }

    /// Writes what a command needs to transfer all bytes of `spans`: `list` has all entries but
    /// the first if they are more than two, as little-endian numbers. The pages of the list are
    /// taken from the first one on, and those that are not needed are left as they are.
    ///
    /// A page of the list may be shorter than a memory page where no other follows it. The first
    /// one may begin anywhere in a memory page, aligned to 8 bytes, and ends with it where another
    /// one follows; the others begin with a memory page.
    ///
    /// # Errors
    ///
    /// With nothing written: [`Error::Room`]; [`Error::Unaligned`] and [`Error::ListPage`] for a
    /// page of the list that is not so; and as of [`entries`](Self::entries).
    ///
    /// # Context
    ///
    /// The device does not read the list meanwhile.
    #[inline(always)]
    pub fn write<A: Address, I>(
        self,
        spans: I,
        list: &mut [ListPage<'_, u64>],
    ) -> Result<Prps, Error>
    where
        I: IntoIterator<Item = Span<A>, IntoIter: Clone>,
    {
        let spans = spans.into_iter();
        if let Some(prps) = self.in_command(spans.clone()) {
            return Ok(prps);
        }
        let listed = self.count(spans.clone())? - 1;
        let mut entries = PrpEntries::new(self, spans);
        if listed <= 1 {
            // The count is not 0.
            let prp1 = entries.next().unwrap_or(0);
            return Ok(Prps { prp1, prp2: entries.next().unwrap_or(0), list_pages: 0 });
        }
        let list_pages = pages_for(list, listed, |n, page, place| self.check(n, page, place))?;
        let prp1 = entries.next().unwrap_or(0);
        let prp2 = list.first().map_or(0, |page| page.addr.get());
        let mut left = listed;
        for n in 0..list_pages {
            let next = list.get(n + 1).map(|page| page.addr.get());
            let Some(page) = list.get_mut(n) else { break };
            match (page.entries.split_last_mut(), next) {
                (Some((pointer, data)), Some(next)) if n + 1 < list_pages => {
                    entries.fill(data);
                    left -= data.len();
                    *pointer = next.to_le();
                }
                _ => entries.fill(page.entries.get_mut(..left).unwrap_or_default()),
            }
        }
        Ok(Prps { prp1, prp2, list_pages })
    }

    /// The PRPs of a single span that lies in two pages: most commands are like that, and need no
    /// counting.
    #[inline(always)]
    fn in_command<A: Address>(self, mut spans: impl Iterator<Item = Span<A>>) -> Option<Prps> {
        let run = ByteRun::of(spans.next()?);
        let (first, last) = (run.first >> self.lg2, run.last >> self.lg2);
        if last - first > 1 || !lg2::is_aligned(run.first, DWORD_LG2) || spans.next().is_some() {
            return None;
        }
        let prp2 = if first == last { 0 } else { last << self.lg2 };
        Some(Prps { prp1: run.first, prp2, list_pages: 0 })
    }

    /// Refuses a page of a list that the controller would read otherwise than it was written.
    #[inline(always)]
    fn check(self, n: usize, page: &ListPage<'_, u64>, place: PagePosition) -> Result<(), Error> {
        let (addr, entries) = (page.addr, page.entries.len());
        let align_lg2 = if n == 0 { ENTRY_LG2 } else { self.lg2 };
        if !lg2::is_aligned(addr.get(), align_lg2) {
            return Err(Error::Unaligned { addr, align: lg2::size(align_lg2) });
        }
        let expected = self.list_entries(addr.get());
        let is_fit = match place {
            PagePosition::Chained => entries == expected,
            PagePosition::Last => entries <= expected,
        };
        if is_fit { Ok(()) } else { Err(Error::ListPage { addr, entries, expected }) }
    }

    /// How many entries a list has from `addr` to the end of the memory page.
    #[inline(always)]
    fn list_entries(self, addr: u64) -> usize {
        let bytes = lg2::size(self.lg2) - (addr & lg2::mask(self.lg2));
        usize::try_from(bytes >> ENTRY_LG2).unwrap_or(usize::MAX)
    }

    /// How many pages the bytes of a run lie in.
    #[inline(always)]
    fn pages(self, run: ByteRun) -> u64 {
        (run.last >> self.lg2) - (run.first >> self.lg2) + 1
    }
}

/// PRP entries, as numbers, from [`MemoryPageSize::entries`].
#[derive(Clone, Debug)]
pub struct PrpEntries<I> {
    page: MemoryPageSize,
    spans: I,
    /// The next entry, if `left` is not 0.
    next: u64,
    /// How many bytes of the span lie there and behind.
    left: u64,
}

impl<A: Address, I: Iterator<Item = Span<A>>> PrpEntries<I> {
    #[inline(always)]
    fn new(page: MemoryPageSize, mut spans: I) -> Self {
        let first = spans.next().map(|span| (span.start().get(), span.len()));
        let (next, left) = first.unwrap_or_default();
        Self { page, spans, next, left }
    }

    /// Goes on to the next span where one has ended; `None` behind the last one.
    #[inline(always)]
    fn enter(&mut self) -> Option<()> {
        while self.left == 0 {
            let span = self.spans.next()?;
            (self.next, self.left) = (span.start().get(), span.len());
            if !lg2::is_aligned(self.next, self.page.lg2) {
                // It touches the span before it, which has the entry of its first page.
                self.skip_page();
            }
        }
        Some(())
    }

    /// Goes on to the next page of the span.
    #[inline(always)]
    fn skip_page(&mut self) {
        let behind = (self.next | lg2::mask(self.page.lg2)).wrapping_add(1);
        self.left = self.left.saturating_sub(behind.wrapping_sub(self.next));
        self.next = behind;
    }

    /// Writes the next entries, none of which is the first, to all of `places`.
    #[inline(always)]
    fn fill(&mut self, places: &mut [u64]) {
        let size = self.page.bytes();
        let mut done = 0;
        while let Some(place) = places.get_mut(done) {
            if self.left == 0 {
                let Some(span) = self.spans.next() else { return };
                (self.next, self.left) = (span.start().get(), span.len());
                if !lg2::is_aligned(self.next, self.page.lg2) {
                    // As in `enter`.
                    self.skip_page();
                } else if self.left <= size {
                    // Most spans are of one page, or of very many.
                    *place = self.next.to_le();
                    self.left = 0;
                    done += 1;
                }
                continue;
            }
            let pages = ((self.left - 1) >> self.page.lg2) + 1;
            let most = usize::try_from(pages).unwrap_or(usize::MAX);
            let count = most.min(places.len() - done);
            for place in places.get_mut(done..done + count).unwrap_or_default() {
                *place = self.next.to_le();
                self.next = self.next.wrapping_add(size);
            }
            self.left = self.left.saturating_sub(size.saturating_mul(count as u64));
            done += count;
        }
    }
}

impl<A: Address, I: Iterator<Item = Span<A>>> Iterator for PrpEntries<I> {
    type Item = u64;

    #[inline(always)]
    fn next(&mut self) -> Option<u64> {
        self.enter()?;
        let entry = self.next;
        self.skip_page();
        Some(entry)
    }
}
