//! The cases of the benchmark, and the buffers of each.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use dmaspan::dma::{Flush, Piece};
use dmaspan::{Direction, PhysAddr, Span, lg2};
use dmaspan_linux::{Memory, MemoryKind};

use super::args::{DmaArgs, Mode};
use crate::failed::Failed;
use crate::models::unwalked::ADDRESS_BITS;
use crate::time::Effort;

/// The pages that are mapped.
pub(crate) const PAGE: u64 = 4096;
/// A block of the tables.
pub(crate) const BLOCK: u64 = 2 << 20;

/// The threads of the grid, and log2 of its largest buffer in pages.
const GRID_THREADS: [u64; 2] = [1, 10];
const GRID_LG2: u32 = 10;

/// What Linux's tool measures when it is not told.
const THREADS: u64 = 1;
const GRANULE: u64 = 1;
const SECONDS: u64 = 20;

/// The grid, and a look at it.
const GRID: Effort = Effort::new(6, 40_000).shared(100_000);
const QUICK: Effort = Effort::new(1, 2000);

/// So many seconds for both ways together: turns of 100 ms, longer where starting the threads takes
/// a part of that.
fn for_seconds(seconds: u64, threads: u64) -> Effort {
    let rounds = if threads <= 64 { seconds * 5 } else { seconds };
    Effort::new(u32::try_from(rounds).unwrap_or(u32::MAX), seconds * 500_000 / rounds.max(1))
}

/// One line of the grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) threads: u64,
    /// Pages of a buffer.
    pub(crate) granule: u64,
    pub(crate) mode: Mode,
    pub(crate) direction: Direction,
    /// Bits of the device's addresses.
    pub(crate) bits: u32,
    pub(crate) delay: Duration,
    pub(crate) flush: Flush,
}

impl Case {
    /// An error, with the case that it met.
    pub(crate) fn refused(&self, error: impl Display) -> Failed {
        let Self { threads, granule, .. } = self;
        Failed::at(format_args!("with {threads} threads and {granule} pages"))(error)
    }

    /// Bytes of a buffer.
    pub(crate) fn bytes(&self) -> u64 {
        self.granule * PAGE
    }

    /// Bytes to which IOVAs of a buffer are aligned.
    fn aligned_bytes(&self) -> u64 {
        self.granule.next_power_of_two() * PAGE
    }

    /// Bytes of memory for each thread: a buffer as Linux's page allocator aligns it, or twice as
    /// many pages as the list has.
    fn share(&self) -> u64 {
        match self.mode {
            Mode::Single => self.aligned_bytes(),
            Mode::Sg => 2 * self.bytes(),
        }
    }

    /// How many lazy unmaps may wait with each thread that keeps them to itself: as many as Linux's
    /// queue has, or fewer where there are no IOVAs for so many.
    pub(crate) fn waiting(&self) -> usize {
        let buffers = lg2::size(self.bits.min(ADDRESS_BITS)) / self.aligned_bytes();
        let each = buffers.saturating_sub(1 + self.threads) / self.threads.max(1);
        usize::try_from(each.clamp(1, 256)).unwrap_or(256)
    }

    /// Whether each thread can have its IOVAs, besides the first that could be: 0 is never given.
    fn fits(&self) -> bool {
        let buffers = lg2::size(self.bits.min(ADDRESS_BITS)) / self.aligned_bytes();
        buffers > self.threads
    }
}

/// What is measured, and how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) cases: Vec<Case>,
    pub(crate) effort: Effort,
    /// Whether this is too short for figures.
    pub(crate) quick: bool,
    /// Seconds of a single case.
    pub(crate) seconds: Option<u64>,
}

impl Plan {
    /// What a command line asks for: the grid, unless it says threads, pages or seconds.
    ///
    /// # Errors
    ///
    /// Where not every thread can have a buffer mapped.
    pub(crate) fn new(args: &DmaArgs) -> Result<Self, Failed> {
        let case = |threads, granule| Case {
            threads,
            granule,
            mode: args.mode,
            direction: args.direction,
            bits: u32::try_from(args.bits).unwrap_or(u32::MAX),
            delay: Duration::from_nanos(args.delay),
            flush: if args.lazy { Flush::Lazy } else { Flush::Strict },
        };
        let is_grid = [args.threads, args.granule, args.seconds].iter().all(Option::is_none);
        let plan = if is_grid {
            let granules = || (0..=GRID_LG2).map(lg2::size);
            let cases = GRID_THREADS.iter().flat_map(|&t| granules().map(move |g| (t, g)));
            let cases = cases.map(|(threads, granule)| case(threads, granule)).collect();
            let effort = if args.quick { QUICK } else { GRID };
            Self { cases, effort, quick: args.quick, seconds: None }
        } else {
            let threads = args.threads.unwrap_or(THREADS);
            let seconds = args.seconds.unwrap_or(SECONDS);
            let cases = vec![case(threads, args.granule.unwrap_or(GRANULE))];
            let effort = for_seconds(seconds, threads);
            Self { cases, effort, quick: false, seconds: Some(seconds) }
        };
        match plan.cases.iter().find(|case| !case.fits()) {
            None => Ok(plan),
            Some(case) => {
                let &Case { bits, threads, granule, .. } = case;
                let needed =
                    (bits..ADDRESS_BITS).find(|&bits| Case { bits, ..case.clone() }.fits());
                Err(Failed::new(format_args!(
                    "{bits} bits (-b) of addresses are too few for {threads} buffers (-t) of \
                     {granule} pages (-g) at once: it takes {} or more",
                    needed.unwrap_or(ADDRESS_BITS)
                )))
            }
        }
    }
}

/// Memory for the buffers of all threads of a case.
pub(crate) fn memory(case: &Case) -> Result<Memory, Failed> {
    let bytes = case.share().saturating_mul(case.threads);
    // A buffer of blocks is of huge pages where the system has some.
    let kind = if bytes >= BLOCK { MemoryKind::Thp } else { MemoryKind::Base };
    let page = kind.page_size();
    Ok(Memory::new(kind, bytes.next_multiple_of(page))?)
}

/// What each thread maps, in that order. Addresses are virtual ones in the place of physical ones:
/// the kernel does not tell those, and no device needs them.
pub(crate) fn buffers(case: &Case, memory: &Memory) -> Result<Vec<Arc<[Piece]>>, Failed> {
    let base = memory.user_range().start().get();
    let piece = |at, len| Span::new(PhysAddr::new(base + at), len).map(Piece::memory);
    let buffer = |thread: u64| {
        let start = thread * case.share();
        match case.mode {
            Mode::Single => Ok(Arc::new([piece(start, case.bytes())?]) as Arc<[Piece]>),
            // Every second page, so that no two are neighbours.
            Mode::Sg => (0..case.granule).map(|n| Ok(piece(start + 2 * n * PAGE, PAGE)?)).collect(),
        }
    };
    (0..case.threads).map(buffer).collect()
}
