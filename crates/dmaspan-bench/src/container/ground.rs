//! The ground of a case: simulated memory or BARs in a user's space, divided among the mapping
//! threads.

use std::sync::Arc;

use dmaspan::{Iova, IovaRange, PhysAddr, RangeError, Span, UserRange};
use dmaspan_sim::memory::{AllocError, MapOptions, SimMemory, SimSpace};

use super::plan::{Case, GIB, Lie, PAGE, What};
use crate::failed::Failed;
use crate::models::simulated::{USER_AT, no_memory, placed, room_for, simulated};

/// Where everything else is: multiples of every leaf, and different, so that nothing is right by
/// accident.
const BARS_AT: PhysAddr = PhysAddr::new(1 << 46);
const IOVA_AT: Iova = Iova::new(0x0200_0000_0000);
/// log2 of the bytes of a block in which base pages are scattered (`pageblock_order`).
const BLOCK_LG2: u32 = 21;
/// By which folios are scattered; any number.
const SEED: u64 = 17;

/// A mapping to make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) user: UserRange,
    pub(crate) range: IovaRange,
    pub(crate) bytes: u64,
}

/// What a case maps: a user's memory or BARs, and where.
#[derive(Debug)]
pub(crate) struct Ground {
    pub(crate) memory: Arc<SimMemory>,
    pub(crate) space: Arc<SimSpace>,
    /// The mappings of each thread.
    pub(crate) shares: Vec<Vec<Piece>>,
    pub(crate) bytes: u64,
}

impl Ground {
    /// Allocates and maps for the user what a case is about.
    pub(crate) fn new(case: &Case) -> Result<Self, Failed> {
        let bytes = match case.what {
            What::Memory { .. } => room_for(case.bytes),
            What::Bars { .. } => GIB,
        };
        let (memory, space) = simulated(bytes)?;
        let user = match case.what {
            What::Memory { order, lie } => {
                let folios = folios(&memory, case.bytes, order, lie).map_err(no_memory)?;
                space.map(USER_AT, &folios)
            }
            What::Bars { leaf_lg2, .. } => {
                let options = MapOptions { max_leaf_lg2: leaf_lg2, ..MapOptions::default() };
                space.map_device_with(USER_AT, Span::new(BARS_AT, case.bytes)?, options)
            }
        };
        placed(user, case.bytes)?;
        let (per_thread, bytes) = match case.what {
            What::Memory { .. } => (1, case.bytes / case.threads),
            What::Bars { count, .. } => (count / case.threads, case.bytes / count),
        };
        let piece = |n: u64| {
            let user = UserRange::from_len(USER_AT.wrapping_add(n * bytes), bytes)?;
            let range = IovaRange::from_len(IOVA_AT.wrapping_add(n * bytes), bytes)?;
            Ok(Piece { user, range, bytes })
        };
        let share = |thread: u64| (0..per_thread).map(|n| piece(thread * per_thread + n)).collect();
        let shares = (0..case.threads).map(share).collect::<Result<_, RangeError>>()?;
        Ok(Self { memory, space, shares, bytes: case.bytes })
    }

    /// Whether nothing is pinned, and nothing was done that may not be.
    pub(crate) fn check(&self, leaves: u64, mappings: usize) -> Result<(), Failed> {
        if let Some(first) = self.memory.violations().first() {
            return Err(Failed::new(format_args!("memory was used wrongly: {first:?}")));
        }
        let pinned = self.memory.pinned_frames();
        if pinned > 0 || leaves > 0 || mappings > 0 {
            return Err(Failed::new(format_args!(
                "left after all unmaps: {pinned} pinned pages, {leaves} leaves, {mappings} mappings"
            )));
        }
        Ok(())
    }
}

/// Folios, as many as `bytes` take.
fn folios(memory: &SimMemory, bytes: u64, order: u32, lie: Lie) -> Result<Vec<Span>, AllocError> {
    let count = usize::try_from((bytes / PAGE) >> order).unwrap_or(usize::MAX);
    match (lie, order) {
        (Lie::Fresh, _) => (0..count).map(|_| Ok(memory.allocate_folio(order)?.span())).collect(),
        (Lie::Apart, 0) => memory.allocate_scattered(bytes, SEED),
        (Lie::InBlocks, _) => Ok(in_blocks(memory.allocate_scattered(bytes, SEED)?)),
        (Lie::Apart, _) => memory.allocate_folios(&vec![order; count], SEED),
    }
}

/// Base pages block by block, in each as scattered as before: no two neighbours follow each other.
fn in_blocks(mut pages: Vec<Span>) -> Vec<Span> {
    pages.sort_by_key(|page| page.paddr().get() >> BLOCK_LG2);
    for next in 1..pages.len() {
        // In descending order neighbours are two runs. What lies before them is no neighbour of the
        // higher one.
        if pages[next - 1].join(pages[next]).is_some() {
            pages.swap(next - 1, next);
        }
    }
    pages
}
