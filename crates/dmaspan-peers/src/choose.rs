//! Random and boundary operations, within what both sides promise.
//!
//! Linux's io-pgtable takes leaves away that a larger one is mapped over, and stops in the middle
//! of a leaf that is unmapped in part: nothing here asks for that.

use dmaspan::io_pgtable::Format;
use dmaspan::{Prot, lg2};

use crate::formats::{Subject, chance, one_of};
use crate::linux::Marks;
use crate::model::Mapping;
use crate::run::Run;

/// Where most mappings of a configuration are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    start: u64,
    last: u64,
}

/// The most pages of a mapping whose leaves are all of the smallest size.
const MOST_PAGES: u64 = 1500;

impl<S: Subject> Run<'_, S> {
    fn granule(&self) -> u64 {
        lg2::size(<S::Format as Format>::GRANULE_LG2)
    }

    /// The first and the last address that the table translates.
    fn ends(&self) -> (u64, u64) {
        let aperture = self.geometry().aperture;
        (aperture.start().get(), aperture.last().get())
    }

    /// Regions at the ends of what is translated, at a power of two, and anywhere.
    pub(crate) fn regions(&mut self) -> Vec<Region> {
        let (first, last) = self.ends();
        let leaf_level = <S::Format as Format>::shift(1);
        let highest = lg2::floor((last - first).max(1));
        let powers: Vec<u32> = (leaf_level..=highest).collect();
        let mut regions = Vec::new();
        for n in 0..4 {
            let bytes = (1 + self.rng.below(3)) << leaf_level;
            let bytes = bytes.min((last - first) / 2 + 1);
            let power = if powers.is_empty() { 0 } else { one_of(&mut self.rng, &powers) };
            let power = if n == 3 && highest > 48 { 48 } else { power };
            let start = match n {
                0 => first,
                1 => last - (bytes - 1),
                2 | 3 if power > 0 => first + lg2::size(power).saturating_sub(bytes / 2),
                _ => first + self.rng.below(last - first),
            };
            let start = lg2::align_down(start.clamp(first, last), self.granule_lg2());
            let end = start.saturating_add(bytes - 1).min(last);
            regions.push(Region { start, last: end });
        }
        regions
    }

    fn granule_lg2(&self) -> u32 {
        <S::Format as Format>::GRANULE_LG2
    }

    /// One of the leaf sizes.
    fn size(&mut self) -> u64 {
        let sizes = self.geometry().page_sizes;
        let all: Vec<u64> = (0..64).map(lg2::size).filter(|size| sizes & size != 0).collect();
        one_of(&mut self.rng, &all)
    }

    fn prot(&mut self) -> Prot {
        match self.rng.below(10) {
            0..3 => Prot::READ_WRITE | Prot::CACHE,
            3 => Prot::READ_WRITE,
            _ => {
                let bits = Prot::all().bits();
                let some = Prot::from_bits_truncate(one_of(&mut self.rng, &RANDOM) & bits);
                if some.permits_access() { some } else { some | Prot::READ }
            }
        }
    }

    /// Memory of `bytes` whose address is that of `iova` below `2^lg2`.
    fn memory(&mut self, iova: u64, bytes: u64, lg2: u32) -> Option<u64> {
        let top = lg2::mask(self.geometry().output_bits);
        let highest = top.checked_sub(bytes - 1)?;
        let any = if chance(&mut self.rng, 15) {
            highest
        } else {
            self.rng.next() & lg2::mask(lg2::floor(highest.max(1)) + 1)
        };
        let any = any.min(highest);
        let paddr = lg2::align_down(any, lg2) | iova & lg2::mask(lg2);
        if paddr <= highest { Some(paddr) } else { paddr.checked_sub(lg2::size(lg2)) }
    }

    /// A range of addresses in a region, and how far memory's address is to agree with it.
    fn range(&mut self, regions: &[Region]) -> Option<(u64, u64, u32)> {
        let (first, last) = self.ends();
        let granule = self.granule();
        let region = one_of(&mut self.rng, regions);
        let inside = (region.last - region.start) / granule + 1;
        let iova = region.start + self.rng.below(inside) * granule;
        let size = self.size();
        let (start, bytes, agree) = match self.rng.below(100) {
            0..25 => (iova, (1 + self.rng.below(16)) * granule, self.granule_lg2()),
            25..55 => {
                let pages = 1 + self.rng.below(MOST_PAGES.min(inside * 2));
                (iova, pages * granule, lg2::floor(size).min(63))
            }
            _ => {
                // Large leaves, and a few small ones before and behind them.
                let [before, behind] = [0, 1].map(|_| self.edge(granule));
                let most = if size <= granule << 16 { 8 } else { 2 };
                let bytes = (1 + self.rng.below(most)).checked_mul(size)?;
                let start = lg2::align_down(iova, lg2::floor(size));
                let start = start.checked_sub(before).filter(|&start| start >= first)?;
                (start, bytes.checked_add(before + behind)?, lg2::floor(size))
            }
        };
        let reach = bytes - 1;
        (reach <= last - start).then_some((start, bytes, agree))
    }

    fn edge(&mut self, granule: u64) -> u64 {
        if chance(&mut self.rng, 50) { 0 } else { self.rng.below(6) * granule }
    }

    /// Maps something where nothing is.
    pub(crate) fn map_some(&mut self, regions: &[Region]) -> Result<(), String> {
        for _ in 0..8 {
            let Some((iova, bytes, agree)) = self.range(regions) else { continue };
            if !self.model.is_free(iova, iova + (bytes - 1)) {
                continue;
            }
            let prot = self.prot();
            if S::HAS_PAGES && chance(&mut self.rng, 30) {
                return self.map_some_pages(iova, bytes, prot);
            }
            let mut spans: Vec<(u64, u64)> = Vec::new();
            let mut left = bytes;
            let mut at = iova;
            while left > 0 {
                // A part of a large leaf may be all of small ones.
                let few = left / self.granule() <= 2 * MOST_PAGES;
                let split = few && spans.len() < 4 && chance(&mut self.rng, 40);
                let part = if split {
                    (1 + self.rng.below(left / self.granule())) * self.granule()
                } else {
                    left
                };
                let Some(paddr) = self.memory(at, part, agree) else { return Ok(()) };
                // Spans are maximal, or Linux would not know that leaves may go over both.
                match spans.last_mut() {
                    Some((before, bytes)) if *before + *bytes == paddr => *bytes += part,
                    _ => spans.push((paddr, part)),
                }
                left -= part;
                at = at.wrapping_add(part);
            }
            return self.map(iova, spans, prot).map(|_| ());
        }
        Ok(())
    }

    /// Maps as much of a free range as pages of one size fill.
    fn map_some_pages(&mut self, iova: u64, bytes: u64, prot: Prot) -> Result<(), String> {
        let size = self.size();
        let lg2 = lg2::floor(size);
        let Some(start) = lg2::align_up(iova, lg2) else { return Ok(()) };
        let count = (iova + (bytes - 1)).checked_sub(start).map_or(0, |reach| (reach + 1) >> lg2);
        let count = count.min(MOST_PAGES);
        let agree = self.memory(start, count.max(1) << lg2, lg2);
        match agree {
            Some(paddr) if count > 0 => {
                self.map_pages(start, paddr, (size, count), prot).map(|_| ())
            }
            _ => Ok(()),
        }
    }

    /// Any mapping.
    fn mapping(&mut self) -> Option<Mapping> {
        let nth = self.rng.index(self.model.len());
        self.model.nth(nth)
    }

    /// Unmaps whole leaves, of one mapping or of neighbours.
    pub(crate) fn unmap_some(&mut self) -> Result<(), String> {
        let Some(mapping) = self.mapping() else { return Ok(()) };
        let end = self.model.run_end(mapping.start).unwrap_or(mapping.last);
        if chance(&mut self.rng, 40) {
            let last = if chance(&mut self.rng, 50) { end } else { mapping.last };
            return self.unmap(mapping.start, last);
        }
        // From any leaf of it on.
        let pages = mapping.reach() / self.granule() + 1;
        let inside = mapping.start + self.rng.below(pages) * self.granule();
        let hole = || format!("nothing is mapped here at {inside:#x}");
        let first = self.leaf_at(inside).ok_or_else(hole)?;
        let most = if chance(&mut self.rng, 50) { 4 } else { 600 };
        let (mut last, mut count) = (first.last(), 1);
        let mut alike = true;
        for _ in 0..self.rng.below(most) {
            let Some(next) = last.checked_add(1).filter(|&next| next <= end) else { break };
            let leaf = self.leaf_at(next).ok_or_else(hole)?;
            if S::HAS_PAGES && alike && leaf.lg2 != first.lg2 {
                break;
            }
            alike &= leaf.lg2 == first.lg2;
            count += 1;
            last = leaf.last();
        }
        if S::HAS_PAGES && chance(&mut self.rng, 50) {
            return self.unmap_pages(first.start, (lg2::size(first.lg2), count));
        }
        self.unmap(first.start, last)
    }

    /// Maps over a page that is mapped, perhaps behind some that are not: both sides refuse.
    pub(crate) fn collide(&mut self) -> Result<(), String> {
        let Some(mapping) = self.mapping() else { return Ok(()) };
        let granule = self.granule();
        let (first, _) = self.ends();
        let room = (mapping.start - first) / granule;
        let before = self.rng.below(9).min(room) * granule;
        let start = mapping.start - before;
        if before > 0 && !self.model.is_free(start, mapping.start - 1) {
            return Ok(());
        }
        // Never aligned alike, so that all leaves are of the smallest size.
        let lg2 = self.granule_lg2() + 1;
        let Some(paddr) = self.memory(start ^ granule, before + granule, lg2) else {
            return Ok(());
        };
        let prot = self.prot();
        if self.map(start, vec![(paddr, before + granule)], prot)? {
            return Err("both sides mapped over what is mapped".to_owned());
        }
        Ok(())
    }

    /// Empties a block of a larger leaf's size, and maps that leaf over the tables left behind.
    pub(crate) fn replace(&mut self) -> Result<(), String> {
        let size = self.size();
        let lg2 = lg2::floor(size);
        let Some(mapping) = self.mapping() else { return Ok(()) };
        let start = lg2::align_down(mapping.start, lg2);
        let last = start | lg2::mask(lg2);
        let (first, end) = self.ends();
        if <S::Format as Format>::level_of(lg2) == 0 || start < first || last > end {
            return Ok(());
        }
        let pieces: Vec<(u64, u64)> = self
            .model
            .within(start, last)
            .map(|mapping| (mapping.start.max(start), mapping.last.min(last)))
            .collect();
        let reaches_out = |run: &Self, at: u64| {
            run.leaf_at(at).is_none_or(|leaf| leaf.start < start || leaf.last() > last)
        };
        if pieces.iter().any(|&(from, to)| reaches_out(self, from) || reaches_out(self, to)) {
            return Ok(());
        }
        for (from, to) in pieces {
            self.unmap(from, to)?;
        }
        let Some(paddr) = self.memory(start, size, lg2) else { return Ok(()) };
        let prot = self.prot();
        self.map(start, vec![(paddr, size)], prot).map(|_| ())
    }

    /// Maps outside of what the table translates, or of memory, or without permission: both sides
    /// refuse.
    pub(crate) fn out_of_bounds(&mut self) -> Result<(), String> {
        let (first, last) = self.ends();
        let granule = self.granule();
        let beyond = 1u64.checked_shl(self.geometry().output_bits).unwrap_or(0);
        let free = self.model.is_free(first, first + (granule - 1));
        let (iova, paddr, prot) = match self.rng.below(3) {
            0 if last < u64::MAX => (last + 1, 0, Prot::READ),
            // Linux takes addresses below the upper half of sign-extended ones for its own.
            0 if first > 0 && S::HAS_PAGES => (first - granule, 0, Prot::READ),
            1 if free => (first, beyond, Prot::READ_WRITE),
            2 if free => (first, 0, Prot::empty()),
            _ => return Ok(()),
        };
        if self.map(iova, vec![(paddr, granule)], prot)? {
            return Err("both sides mapped what is out of bounds".to_owned());
        }
        Ok(())
    }

    /// Lets hardware write in a mapping, and asks where.
    pub(crate) fn dirty_some(&mut self) -> Result<(), String> {
        let Some(mapping) = self.mapping() else { return Ok(()) };
        if mapping.reach() == u64::MAX {
            return Ok(());
        }
        if mapping.asked.fresh {
            self.read_dirty(mapping, Marks::Cleared)?;
        }
        let Some(mapping) = self.model.at(mapping.start) else { return Ok(()) };
        let pages = mapping.reach() / self.granule() + 1;
        for _ in 0..1 + self.rng.below(4) {
            let page = self.rng.below(pages);
            if mapping.asked.prot.contains(Prot::WRITE) {
                self.mark(mapping.start + page * self.granule())?;
            }
        }
        let marks = one_of(&mut self.rng, &[Marks::Cleared, Marks::Kept]);
        self.read_dirty(mapping, marks)
    }
}

/// All combinations of permissions and memory types.
const RANDOM: [u32; 64] = {
    let mut all = [0; 64];
    let mut n = 0;
    while n < 64 {
        all[n as usize] = n;
        n += 1;
    }
    all
};
