//! The cost of a page more in the tables of the kernel's IOMMU: `map_pages` of Linux 5.15.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dmaspan::{DmaSpace, Iova, IovaRange, Prot};
use dmaspan_linux::vfio::VfioSpace;
use dmaspan_linux::{Memory, MemoryKind};

use super::{Result, figure, median, microseconds};
use crate::cases::Context;

const PAGE: u64 = 4 << 10;
const HUGE: u64 = 2 << 20;
/// Where a leaf of 2M fits.
const AT: u64 = 1 << 32;
/// How often each is done, for medians; what is done first makes tables, and is not timed.
const RUNS: usize = 21;

/// Maps and unmaps contiguous memory by VFIO: as many pages as the series has rows, and 512 pages
/// both as one leaf of 2M and, a page further, as leaves of 4K. All but the tables is the same of
/// those two: memory, pins, and requests.
pub(super) fn measure() -> Result {
    let (space, _device) = Context::default().open()?;
    let memory = Arc::new(Memory::new(MemoryKind::Hugetlb2M, HUGE)?);
    for pages in (0..9).map(|power| 1 << power) {
        let [map, unmap] = both(&space, &memory, AT, pages * PAGE)?;
        figure(&format!("map of {pages} × 4K"), microseconds(map), "µs");
        figure(&format!("unmap of {pages} × 4K"), microseconds(unmap), "µs");
    }
    let pages = HUGE / PAGE;
    let leaf = both(&space, &memory, AT, HUGE)?;
    let each = both(&space, &memory, AT + PAGE, HUGE)?;
    for (what, leaf, each) in [("map", leaf[0], each[0]), ("unmap", leaf[1], each[1])] {
        figure(&format!("{what} of 2M by a leaf"), microseconds(leaf), "µs");
        figure(&format!("{what} of 2M by {pages} × 4K"), microseconds(each), "µs");
        let more = each.saturating_sub(leaf).as_secs_f64() * 1e9;
        #[expect(clippy::cast_precision_loss, reason = "it is 512")]
        figure(&format!("{what}: tables, a page of 4K"), more / (pages - 1) as f64, "ns");
    }
    Ok(())
}

/// What a map and its unmap take, the medians.
fn both(space: &VfioSpace, memory: &Arc<Memory>, at: u64, len: u64) -> Result<[Duration; 2]> {
    let range = IovaRange::from_len(Iova::new(at), len)?;
    let user = memory.sub_range(0, len)?;
    let (mut maps, mut unmaps) = (Vec::new(), Vec::new());
    for run in 0..=RUNS {
        let begin = Instant::now();
        space.map(memory, user, range.start(), Prot::READ_WRITE)?;
        let map = begin.elapsed();
        let begin = Instant::now();
        let unmapped = space.unmap(range)?;
        let unmap = begin.elapsed();
        if unmapped != len {
            return Err(format!("{unmapped} bytes of {len} were mapped").into());
        }
        if run > 0 {
            maps.push(map);
            unmaps.push(unmap);
        }
    }
    Ok([median(maps), median(unmaps)])
}
