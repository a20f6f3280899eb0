//! The same table work one page at a time.
//!
//! This is the best case of that work: the frame numbers were read in bulk before, one sync at the
//! end covers the whole range, and tables stay from run to run.

use std::hint::black_box;
use std::time::Instant;

use dmaspan::io_pgtable;
use dmaspan::iommu::Gather;
#[cfg(doc)]
use dmaspan::iommu::IommuOps;
use dmaspan::{Iova, PhysAddr};

use crate::report::PerPageTimes;
use crate::soft_iommu::{self, BuildError, PROT, Table};
use dmaspan_cli::stats::{median, nanoseconds};

/// Why pages could not be mapped one at a time.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PerPageError {
    /// There is no table.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The table refused a page.
    #[error("mapping page by page failed: {0}")]
    Table(#[from] io_pgtable::Error),
    /// A page leads elsewhere than where it was mapped.
    #[error("mapped page by page, iova {iova} leads to {found:x?} instead of {frame}")]
    Elsewhere {
        /// The page.
        iova: Iova,
        /// Where it was mapped.
        frame: PhysAddr,
        /// Where it leads.
        found: Option<PhysAddr>,
    },
    /// Unmapping one page took a table away.
    #[error("unmapping the page at iova {iova} took a table away")]
    TookTable {
        /// The page.
        iova: Iova,
    },
}

/// Maps and unmaps `frames`, one for each granule of `2^G` bytes from `iova` on, `runs` times, and
/// returns medians of the time that tables took. The sync at the end names `max_ranges` at most, as
/// for the container's ([`IommuOps::max_ranges`]).
///
/// # Errors
///
/// [`PerPageError`].
pub(crate) fn measure<const G: u32>(
    frames: &[PhysAddr],
    iova: Iova,
    runs: u32,
    max_ranges: usize,
    after_run: impl Fn(),
) -> Result<PerPageTimes, PerPageError> {
    let count = u64::try_from(frames.len()).unwrap_or(u64::MAX);
    let (mut table, _arena) = soft_iommu::new_table::<G>(count << G)?;
    // The first run is not timed: it allocates the tables.
    map::<G>(&mut table, frames, iova)?;
    check::<G>(&mut table, frames, iova)?;
    unmap::<G>(&mut table, frames.len(), iova, max_ranges)?;
    let (mut map_ns, mut unmap_ns) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        map_ns.push(map::<G>(&mut table, frames, iova)?);
        unmap_ns.push(unmap::<G>(&mut table, frames.len(), iova, max_ranges)?);
        after_run();
    }
    Ok(PerPageTimes { map_table_ns: median(&map_ns), unmap_table_ns: median(&unmap_ns) })
}

/// One call for each page, whose frame number is read from a list. Returns nanoseconds.
fn map<const G: u32>(
    table: &mut Table<G>,
    frames: &[PhysAddr],
    iova: Iova,
) -> Result<u64, PerPageError> {
    let whole = table.whole();
    let mut at = iova;
    let begin = Instant::now();
    for frame in frames {
        let (_, result) = whole.map_pages(at, *frame, 1 << G, 1, PROT);
        result?;
        at = at.wrapping_add(1 << G);
    }
    Ok(nanoseconds(begin.elapsed()))
}

/// For each page where it leads, one call, and one entry in the gather; one sync at the end, whose
/// hardware costs nothing. Returns nanoseconds.
fn unmap<const G: u32>(
    table: &mut Table<G>,
    pages: usize,
    iova: Iova,
    max_ranges: usize,
) -> Result<u64, PerPageError> {
    let whole = table.whole();
    let mut at = iova;
    let begin = Instant::now();
    let mut gather = Gather::new(max_ranges);
    for _ in 0..pages {
        black_box(whole.iova_to_phys(at));
        let unmapped = whole.unmap_pages(at, 1 << G, 1);
        unmapped.result?;
        gather.add(unmapped.retired).map_err(|_| PerPageError::TookTable { iova: at })?;
        at = at.wrapping_add(1 << G);
    }
    black_box(gather.invalidation());
    Ok(nanoseconds(begin.elapsed()))
}

/// Whether every page leads to its frame.
fn check<const G: u32>(
    table: &mut Table<G>,
    frames: &[PhysAddr],
    iova: Iova,
) -> Result<(), PerPageError> {
    let whole = table.whole();
    let mut at = iova;
    for &frame in frames {
        let found = whole.iova_to_phys(at);
        if found != Some(frame) {
            return Err(PerPageError::Elsewhere { iova: at, frame, found });
        }
        at = at.wrapping_add(1 << G);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn pages_are_mapped_and_unmapped_with_every_granule() {
        fn check<const G: u32>() {
            // Every second frame, so that no two are contiguous.
            let frames: Vec<PhysAddr> = (0..100).map(|n| PhysAddr::new(n << (G + 1))).collect();
            let runs = Cell::new(0);
            let after_run = || runs.set(runs.get() + 1);
            let times = measure::<G>(&frames, Iova::new(1 << 32), 3, 64, after_run).unwrap();
            assert!(times.map_table_ns > 0 && times.unmap_table_ns > 0);
            assert_eq!(runs.get(), 3);
        }
        check::<12>();
        check::<14>();
        check::<16>();
    }

    #[test]
    fn a_frame_between_granules_is_refused() {
        let error = measure::<14>(&[PhysAddr::new(4096)], Iova::new(0), 1, 64, || ()).unwrap_err();
        assert!(matches!(error, PerPageError::Table(io_pgtable::Error::MisalignedSpan { .. })));
    }
}
