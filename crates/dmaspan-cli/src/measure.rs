//! One row of `map`: one kind of memory, mapped, checked and measured.

mod error;
mod real;
mod soft;

use std::sync::Arc;
use std::time::Instant;

use dmaspan::pin::PinError;
use dmaspan::{Iova, IovaRange, Span, UserRange};
use dmaspan_linux::pagemap::{self, PagemapError};
use dmaspan_linux::{FrameAddress, FrameSource, Lookup, Memory, MemoryKind, PinnerStats};

use crate::map_plan::MapPlan;
use crate::pinned::Witness;
use crate::report::{Both, By, Figures, series_of_memory};
use dmaspan_cli::hold::HeldPages;
use dmaspan_cli::progress::Progress;
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::stats::Series;

pub(crate) use error::RowError;
pub(crate) use real::{Real, since};
pub(crate) use soft::Soft;

/// What maps memory. Nothing of it is mapped between calls unless one says so.
pub(crate) trait Backend {
    /// What the first run finds out for the figures of single pages.
    type Found;

    /// Where the memory is mapped best.
    fn choose_iova(&self, subject: &Subject) -> Result<Iova, RowError>;

    /// Maps, looks at what came of it, lets a device use it where there is one, unmaps and looks
    /// again. Nothing of it is timed.
    fn first_run(
        &self,
        subject: &Subject,
        range: IovaRange,
        progress: &Progress,
    ) -> Result<(FirstRun, Self::Found), RowError>;

    /// Maps the memory, and leaves it mapped.
    fn map(&self, subject: &Subject, range: IovaRange) -> Result<(), RowError>;

    /// Unmaps what is in `range`, and returns how many bytes that was.
    fn unmap(&self, range: IovaRange) -> Result<u64, RowError>;

    /// Where the time went since the last call, as far as that is known.
    fn take_stats(&self) -> PinnerStats;

    /// Whether nothing is left, after everything was unmapped.
    fn check_left(&self, unmap: &'static str) -> Result<(), RowError>;

    /// Maps and unmaps after all that was timed: whether the last unmap takes away as much as the
    /// first.
    fn last_run(&self, subject: &Subject, range: IovaRange) -> Result<(), RowError>;

    /// Does the same work one page at a time, as often as it was timed, and says what `timed` tells
    /// beside that.
    fn figures(
        &self,
        subject: &Subject,
        range: IovaRange,
        found: Self::Found,
        timed: &Timed,
        after_run: &dyn Fn(),
    ) -> Result<By, RowError>;
}

/// The times of all runs.
pub(crate) struct Timed {
    runs: u32,
    series: Both<Series>,
}

/// What the run that checks everything found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstRun {
    spans: usize,
    verified_bytes: u64,
    witness: Witness,
}

/// Maps, checks and measures memory of one kind by the backend that `open` gives, whose smallest
/// page has `granule` bytes. Returns the bytes that transparent huge pages should have and do not,
/// too; 0 for other kinds.
///
/// # Errors
///
/// [`RowError`]; nothing stays allocated, pinned or mapped.
pub(crate) fn row<B: Backend>(
    plan: &MapPlan,
    kind: MemoryKind,
    granule: u64,
    open: impl FnOnce() -> Result<B, RowError>,
    progress: &Progress,
) -> Result<(Figures, u64), RowError> {
    let (bytes, runs) = (plan.bytes, u64::from(plan.runs));
    progress.begin(format!("{kind}: allocating {}", ByteSize::new(bytes)), 1);
    // Declared first, so that the pages go back to the pool before it is lowered.
    let mut reservation = HeldPages::for_memory(kind, bytes)?;
    let subject = Subject::allocate(kind, bytes, granule)?;
    if let Some(reservation) = &mut reservation {
        reservation.mapped();
    }
    let backend = open()?;
    let range = IovaRange::from_len(backend.choose_iova(&subject)?, bytes)?;
    let (first, found) = backend.first_run(&subject, range, progress)?;

    progress.begin(format!("{kind}: mapping and unmapping {runs} times"), runs);
    let mut timed = Timed { runs: plan.runs, series: Both::default() };
    for _ in 0..runs {
        subject.timed_run(&backend, range, &mut timed.series)?;
        progress.advance(1);
    }
    backend.last_run(&subject, range)?;
    progress.begin(format!("{kind}: page at a time, {runs} times"), runs);
    let after_run = || progress.advance(1);
    let by = backend.figures(&subject, range, found, &timed, &after_run)?;
    let FirstRun { spans, verified_bytes, witness } = first;
    let (memory, witness) = (kind.name().to_owned(), Some(witness));
    // A software IOMMU's times have no pins of a kernel as it maps in them.
    let series = match by {
        By::Requests { .. } => series_of_memory(&memory, bytes, kind.page_size()),
        _ => Vec::new(),
    };
    let figures = Figures { memory, spans, by, verified_bytes, witness, series };
    Ok((figures, subject.not_huge_bytes()))
}

/// The memory that is mapped.
pub(crate) struct Subject {
    memory: Arc<Memory>,
    user: UserRange,
    granule: u64,
}

impl Subject {
    /// `bytes` of memory that begin at a multiple of the granule.
    fn allocate(kind: MemoryKind, bytes: u64, granule: u64) -> Result<Self, RowError> {
        let slack = if kind.page_size() < granule { granule } else { 0 };
        let memory = Arc::new(Memory::new(kind, bytes.saturating_add(slack))?);
        let start = memory.user_range().start().get();
        let offset = start.next_multiple_of(granule) - start;
        let user = memory.sub_range(offset, bytes)?;
        Ok(Self { memory, user, granule })
    }

    /// Its length.
    fn bytes(&self) -> u64 {
        self.user.checked_len().unwrap_or(u64::MAX)
    }

    /// Its runs of contiguous frames.
    fn spans<A: FrameAddress>(&self, source: &FrameSource<A>) -> Result<Vec<Span<A>>, RowError> {
        let mut spans: Vec<Span<A>> = Vec::new();
        match source.frames(&self.memory, self.user, Lookup::EveryPage, &mut spans) {
            Ok(_) => Ok(spans),
            Err(PinError::Failed(error)) => Err(error.into()),
            // A vector takes every span.
            Err(_) => Err(PagemapError::NotPresent { address: self.user.start() }.into()),
        }
    }

    fn timed_run(
        &self,
        backend: &impl Backend,
        range: IovaRange,
        series: &mut Both<Series>,
    ) -> Result<(), RowError> {
        backend.take_stats();
        let begin = Instant::now();
        backend.map(self, range)?;
        series.map.add_map(begin.elapsed(), backend.take_stats());
        let begin = Instant::now();
        unmap_all(backend, range)?;
        series.unmap.add_unmap(begin.elapsed(), backend.take_stats());
        backend.check_left("unmap of a timed run")
    }

    /// How many bytes lack transparent huge pages. 0 where the kernel does not tell.
    fn not_huge_bytes(&self) -> u64 {
        if self.memory.kind() != MemoryKind::Thp {
            return 0;
        }
        let huge = pagemap::huge_bytes(&self.memory).unwrap_or(u64::MAX);
        self.memory.len().saturating_sub(huge)
    }
}

/// Unmaps `range`, all of which is mapped.
fn unmap_all(backend: &(impl Backend + ?Sized), range: IovaRange) -> Result<(), RowError> {
    let unmapped = backend.unmap(range)?;
    let asked = range.checked_len().unwrap_or(u64::MAX);
    if unmapped == asked { Ok(()) } else { Err(RowError::UnmappedLen { asked, unmapped }) }
}
