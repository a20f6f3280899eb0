//! The model knows what page tables should say, as an interval map, and the fewest leaves that can
//! say it.
//!
//! Both are plain and slow, and share no idea with what they check: the model has no tables, and
//! the census asks of every block whether it could be one leaf.

use std::collections::BTreeMap;

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, RangeError, Span, lg2};

#[cfg(test)]
mod tests;

/// The reason why the model cannot map. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// Something is mapped there already.
    #[error("{asked} overlaps {mapped}, which is mapped")]
    Overlap {
        /// What was to be mapped.
        asked: IovaRange,
        /// The first mapped run in it.
        mapped: IovaRange,
    },
    /// The spans are none, or do not fit below the top of the address space.
    #[error(transparent)]
    Range(#[from] RangeError),
}

/// Says how much of a range is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// Nothing.
    None,
    /// All of it.
    All,
    /// Some of it; not this address, the first that is not.
    FirstHole(Iova),
}

/// A maximal run of addresses mapped to contiguous memory with the same permissions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The addresses.
    pub iova: IovaRange,
    /// What the first of them is mapped to.
    pub paddr: PhysAddr,
    /// What is permitted.
    pub prot: Prot,
}

impl Run {
    /// The part of the run in `range`.
    fn cut(self, range: IovaRange) -> Option<Self> {
        let iova = self.iova.intersection(range)?;
        let paddr = self.paddr.wrapping_add(iova.start().get() - self.iova.start().get());
        Some(Self { iova, paddr, ..self })
    }

    /// Both runs as one, where `next` goes on in both address spaces.
    fn join(self, next: Self) -> Option<Self> {
        let follows = self.iova.last().checked_add(1) == Some(next.iova.start())
            && self.last_paddr().checked_add(1) == Some(next.paddr)
            && self.prot == next.prot;
        let iova = IovaRange::new(self.iova.start(), next.iova.last())?;
        follows.then_some(Self { iova, ..self })
    }

    fn last_paddr(self) -> PhysAddr {
        self.paddr.wrapping_add(self.iova.len_less_one())
    }
}

/// An interval map from addresses of a device to memory: what any page table should agree with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IntervalModel {
    /// Disjoint, by the first address; not coalesced.
    runs: BTreeMap<u64, Run>,
}

impl IntervalModel {
    /// Nothing mapped.
    pub fn new() -> Self {
        Self::default()
    }

    /// Maps spans one behind the other from `iova` on.
    ///
    /// # Errors
    ///
    /// [`ModelError`]; then nothing was changed.
    pub fn map(&mut self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), ModelError> {
        let runs = lay_out(iova, spans, prot)?;
        for run in &runs {
            if let Some(mapped) = self.overlapping(run.iova).next() {
                return Err(ModelError::Overlap { asked: run.iova, mapped: mapped.iova });
            }
        }
        self.runs.extend(runs.into_iter().map(|run| (run.iova.start().get(), run)));
        Ok(())
    }

    /// Unmaps whatever is mapped in `range`, and returns the memory in the order of the addresses,
    /// coalesced also over holes.
    pub fn unmap(&mut self, range: IovaRange) -> Vec<Span> {
        let affected: Vec<Run> = self.overlapping(range).collect();
        let mut spans: Vec<Span> = Vec::new();
        for run in affected {
            self.runs.remove(&run.iova.start().get());
            for kept in without(run.iova, range).filter_map(|part| run.cut(part)) {
                self.runs.insert(kept.iova.start().get(), kept);
            }
            // A run is no longer than the span that it came from, so its length is one of a span.
            let gone =
                run.cut(range).and_then(|run| Span::new(run.paddr, run.iova.checked_len()?).ok());
            spans.extend(gone);
        }
        coalesce(spans)
    }

    /// Returns what an address is mapped to.
    pub fn lookup(&self, iova: Iova) -> Option<(PhysAddr, Prot)> {
        let run = self.overlapping(IovaRange::new(iova, iova)?).next()?;
        let offset = iova.get() - run.iova.start().get();
        Some((run.paddr.wrapping_add(offset), run.prot))
    }

    /// Returns how much of `range` is mapped.
    pub fn covered(&self, range: IovaRange) -> Coverage {
        let mut next = Some(range.start());
        let mut any = false;
        for run in self.overlapping(range) {
            any = true;
            match next {
                Some(iova) if run.iova.contains(iova) => next = run.iova.last().checked_add(1),
                _ => break,
            }
        }
        match next {
            _ if !any => Coverage::None,
            Some(hole) if range.contains(hole) => Coverage::FirstHole(hole),
            _ => Coverage::All,
        }
    }

    /// Returns what is mapped in `range`, as maximal runs cut to it.
    pub fn runs(&self, range: IovaRange) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for run in self.overlapping(range).filter_map(|run| run.cut(range)) {
            match runs.last().and_then(|last| last.join(run)) {
                Some(joined) => {
                    runs.pop();
                    runs.push(joined);
                }
                None => runs.push(run),
            }
        }
        runs
    }

    /// Returns whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    fn overlapping(&self, range: IovaRange) -> impl Iterator<Item = Run> + '_ {
        let before = self.runs.range(..range.start().get()).next_back();
        let inside = self.runs.range(range.start().get()..=range.last().get());
        let runs = before.into_iter().chain(inside).map(|(_, run)| *run);
        runs.filter(move |run| run.iova.intersection(range).is_some())
    }
}

/// The rest of `whole` beside a part of it.
pub(crate) fn without(whole: IovaRange, part: IovaRange) -> impl Iterator<Item = IovaRange> {
    let before = part.start().get().checked_sub(1).map(Iova::new);
    let before = before.and_then(|last| IovaRange::new(whole.start(), last));
    let behind = part.last().checked_add(1);
    let behind = behind.and_then(|first| IovaRange::new(first, whole.last()));
    before.into_iter().chain(behind)
}

/// The reason why spans cannot be mapped with leaves of the given sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CensusError {
    /// The smallest leaf around an address would cover something else too.
    #[error("no leaf of 2^{lg2} bytes fits at {iova}")]
    Unaligned {
        /// The first address of the block.
        iova: Iova,
        /// log2 of the smallest leaf.
        lg2: u32,
    },
    /// There are no leaf sizes.
    #[error("no leaf sizes are given")]
    NoSizes,
    /// The spans are none, or do not fit below the top of the address space.
    #[error(transparent)]
    Range(#[from] RangeError),
}

/// Returns how many leaves of each size map spans one behind the other from `iova` on, with as few
/// leaves as possible: by log2 of the size, of the sizes in the bitmap `page_sizes` (bit n for 2^n
/// bytes).
///
/// Sizes are powers of two and leaves aligned to them, so blocks nest: one that can be a single
/// leaf is never better as several. The census asks that of every block, the largest first.
///
/// # Errors
///
/// [`CensusError`] where leaves cannot map exactly these bytes.
pub fn optimal_leaf_census(
    iova: Iova,
    spans: &[Span],
    page_sizes: u64,
) -> Result<BTreeMap<u32, u64>, CensusError> {
    let runs = lay_out(iova, &coalesce(spans.to_vec()), Prot::empty())?;
    let sizes: Vec<u32> = (0..64).rev().filter(|lg2| page_sizes & lg2::size(*lg2) != 0).collect();
    let (Some(largest), Some(first), Some(last)) = (sizes.first(), runs.first(), runs.last())
    else {
        return Err(CensusError::NoSizes);
    };
    let mut census = Census { runs: &runs, sizes: &sizes, counts: BTreeMap::new() };
    let (from, to) = (first.iova.start().get() >> largest, last.iova.last().get() >> largest);
    for block in from..=to {
        census.count(block << largest, 0)?;
    }
    Ok(census.counts)
}

struct Census<'a> {
    runs: &'a [Run],
    /// Descending.
    sizes: &'a [u32],
    counts: BTreeMap<u32, u64>,
}

impl Census<'_> {
    /// Counts the leaves of the block at `start` of the size with this place in `sizes`.
    fn count(&mut self, start: u64, place: usize) -> Result<(), CensusError> {
        let lg2 = self.sizes[place];
        let last = start | lg2::mask(lg2);
        let at = self.runs.partition_point(|run| run.iova.last().get() < start);
        let Some(run) = self.runs.get(at).filter(|run| run.iova.start().get() <= last) else {
            return Ok(());
        };
        if run.iova.start().get() <= start && last <= run.iova.last().get() {
            let paddr = run.paddr.wrapping_add(start - run.iova.start().get());
            if lg2::is_aligned(paddr.get(), lg2) {
                *self.counts.entry(lg2).or_default() += 1;
                return Ok(());
            }
        }
        let Some(smaller) = self.sizes.get(place + 1) else {
            return Err(CensusError::Unaligned { iova: Iova::new(start), lg2 });
        };
        for block in 0..=lg2::mask(lg2) >> smaller {
            self.count(start | (block << smaller), place + 1)?;
        }
        Ok(())
    }
}

/// Spans one behind the other. Neighbours are not joined.
fn lay_out(iova: Iova, spans: &[Span], prot: Prot) -> Result<Vec<Run>, RangeError> {
    let mut runs = Vec::with_capacity(spans.len());
    // `None` behind the top address.
    let mut next = Some(iova);
    for span in spans {
        let wraps = RangeError::Wraps { start: iova.get(), len: span.len() };
        let range = IovaRange::from_len(next.ok_or(wraps)?, span.len())?;
        runs.push(Run { iova: range, paddr: span.paddr(), prot });
        next = range.last().checked_add(1);
    }
    if runs.is_empty() { Err(RangeError::Empty { start: iova.get() }) } else { Ok(runs) }
}

/// Neighbours joined.
fn coalesce(spans: Vec<Span>) -> Vec<Span> {
    let mut joined: Vec<Span> = Vec::with_capacity(spans.len());
    for span in spans {
        match joined.last().and_then(|last| last.join(span)) {
            Some(both) => {
                joined.pop();
                joined.push(both);
            }
            None => joined.push(span),
        }
    }
    joined
}
