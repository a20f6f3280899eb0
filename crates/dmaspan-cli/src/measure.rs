//! One row: one kind of memory, mapped, checked and measured.

use std::sync::Arc;
use std::time::Instant;

use dmaspan::container;
use dmaspan::io_pgtable;
use dmaspan::iommu;
use dmaspan::lg2;
use dmaspan::{Iova, IovaRange, PhysAddr, RangeError, Span, UserRange};
use dmaspan_linux::framemap::FrameMapError;
use dmaspan_linux::mem::{AccessError, MemoryError};
use dmaspan_linux::pagemap::{self, PagemapError};
use dmaspan_linux::pinner::LinuxPinError;
use dmaspan_linux::{FrameMap, LinuxPinner, Lookup, Memory, MemoryKind};
use dmaspan_sim::device::Device;

use crate::bus::MemoryBus;
use crate::hold::{HeldPages, HoldError};
use crate::per_page::{self, PerPage, PerPageError};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::size::ByteSize;
use crate::soft_iommu::{BuildError, PROT, SoftIommu};
use crate::stats::Series;
use crate::verify::{self, Checked, PASSES, Stale};

type ContainerError = container::Error<LinuxPinError>;

/// What was measured and found.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    /// Runs of physically contiguous memory.
    pub(crate) spans: usize,
    /// The leaves that map them: log2 of the size, and how many.
    pub(crate) leaves: Vec<(u32, u64)>,
    /// Bytes of the tables, the root included.
    pub(crate) table_bytes: u64,
    pub(crate) map: Series,
    pub(crate) unmap: Series,
    pub(crate) per_page: PerPage,
    pub(crate) checked: Checked,
    pub(crate) stale: Stale,
    /// Bytes that transparent huge pages should have and do not; 0 for other kinds.
    pub(crate) not_huge_bytes: u64,
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RowError {
    #[error(transparent)]
    Reservation(#[from] HoldError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Pinner(#[from] LinuxPinError),
    #[error(
        "scattered {} frames cannot be mapped with a {} granule: {source}; use a smaller granule \
         or memory of larger pages", ByteSize::new(*page), ByteSize::new(*granule)
    )]
    Scattered { page: u64, granule: u64, source: io_pgtable::Error },
    #[error("a refused mapping left something mapped or charged behind: {source}")]
    LeftBehind { source: ContainerError },
    #[error("mapping failed: {0}")]
    Map(#[source] ContainerError),
    #[error("unmapping failed: {0}")]
    Unmap(#[source] ContainerError),
    #[error("the mapping of {asked} bytes gave {unmapped} back")]
    UnmappedLen { asked: u64, unmapped: u64 },
    #[error(transparent)]
    Frames(#[from] PagemapError),
    #[error(transparent)]
    FrameMap(#[from] FrameMapError),
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(transparent)]
    Range(#[from] RangeError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    PerPage(#[from] PerPageError),
}

impl RowError {
    /// Whether this machine, or this process on it, cannot do it: no fault of the mapping.
    pub(crate) const fn is_skip(&self) -> bool {
        matches!(
            self,
            Self::Reservation(_) | Self::Memory(_) | Self::Pinner(_) | Self::Scattered { .. }
        )
    }
}

/// Maps, checks and measures memory of one kind with a granule of `2^G` bytes.
///
/// # Errors
///
/// [`RowError`]; nothing stays allocated, pinned or mapped.
pub(crate) fn row<const G: u32>(
    plan: &Plan,
    kind: MemoryKind,
    progress: &Progress,
) -> Result<Measured, RowError> {
    let (bytes, runs) = (plan.bytes, u64::from(plan.runs));
    progress.begin(format!("{kind}: allocating {}", ByteSize::new(bytes)), 1);
    // Declared first, so that the pages go back to the pool before it is lowered.
    let _reservation = HeldPages::for_memory(kind, bytes)?;
    let subject = Subject::allocate::<G>(kind, bytes)?;
    let iommu = SoftIommu::new::<G>(LinuxPinner::new()?, bytes)?;
    let range = IovaRange::from_len(subject.choose_iova::<G>(&iommu), bytes)?;

    progress.begin(format!("{kind}: a device writes and reads every byte"), PASSES * bytes);
    let first = subject.first_run::<G>(&iommu, range, progress)?;

    progress.begin(format!("{kind}: mapping and unmapping {runs} times"), runs);
    let (mut map, mut unmap) = (Series::default(), Series::default());
    for _ in 0..runs {
        subject.timed_run(&iommu, range, &mut map, &mut unmap)?;
        progress.advance(1);
    }
    progress.begin(format!("{kind}: page at a time, {runs} times"), runs);
    let per_page =
        per_page::measure::<G>(&first.frames, range.start(), plan.runs, || progress.advance(1))?;
    Ok(Measured {
        spans: first.spans,
        leaves: first.leaves,
        table_bytes: first.table_bytes,
        map,
        unmap,
        per_page,
        checked: first.checked,
        stale: first.stale,
        not_huge_bytes: subject.not_huge_bytes(),
    })
}

/// The memory that is mapped.
struct Subject {
    memory: Arc<Memory>,
    user: UserRange,
    granule: u64,
}

/// What the run that checks everything found.
struct FirstRun {
    spans: usize,
    leaves: Vec<(u32, u64)>,
    table_bytes: u64,
    /// Where each granule of the memory is.
    frames: Vec<PhysAddr>,
    checked: Checked,
    stale: Stale,
}

impl Subject {
    /// `bytes` of memory that begin at a multiple of the granule.
    fn allocate<const G: u32>(kind: MemoryKind, bytes: u64) -> Result<Self, RowError> {
        let granule = lg2::size(G);
        let slack = if kind.page_size() < granule { granule } else { 0 };
        let memory = Arc::new(Memory::new(kind, bytes.saturating_add(slack))?);
        let start = memory.user_range().start().get();
        let offset = start.next_multiple_of(granule) - start;
        let user = memory.sub_range(offset, bytes)?;
        Ok(Self { memory, user, granule })
    }

    /// An IOVA at which the longest span gets the largest leaves. Frames may change until they are
    /// pinned, which then costs leaves and nothing else.
    fn choose_iova<const G: u32>(&self, iommu: &SoftIommu) -> Iova {
        let mut spans: Vec<Span> = Vec::new();
        let frames = iommu.container.pinner().frames();
        match frames.frames(&self.memory, self.user, Lookup::Auto, &mut spans) {
            Ok(_) => congruent_iova(&spans, G),
            Err(_) => congruent_iova(&[], G),
        }
    }

    /// Maps, looks at what came of it, lets a device use it, unmaps and looks again. Nothing of it
    /// is timed.
    fn first_run<const G: u32>(
        &self,
        iommu: &SoftIommu,
        range: IovaRange,
        progress: &Progress,
    ) -> Result<FirstRun, RowError> {
        let SoftIommu { container, tables, iotlb } = iommu;
        container
            .map(&self.memory, self.user, range.start(), PROT)
            .map_err(|error| self.refused(iommu, error))?;
        let (leaves, table_bytes) = (container.census().sizes().collect(), tables.table_bytes());

        let source = container.pinner().frames();
        let mut spans: Vec<Span> = Vec::new();
        source.frames(&self.memory, self.user, Lookup::EveryPage, &mut spans).map_err(|error| {
            match error {
                dmaspan::pin::PinError::Failed(error) => RowError::from(error),
                // A vector takes every span.
                dmaspan::pin::PinError::Stopped => {
                    RowError::Frames(PagemapError::NotPresent { address: self.user.start() })
                }
            }
        })?;
        let mut pages = Vec::new();
        source.page_frames(&self.memory, self.user, &mut pages)?;
        let frames = self.frames_of_granules(pages);

        let frame_map = FrameMap::new(&self.memory, self.user, &spans)?;
        let bus = MemoryBus::new(Arc::clone(&self.memory), frame_map);
        let device = Device::new(iotlb.clone(), bus);
        let offset = self.user.start().get() - self.memory.user_range().start().get();
        let mapped = verify::Mapped { memory: &self.memory, offset, range };
        let checked = mapped.check(&device, &|bytes| progress.advance(bytes));

        self.unmap(iommu, range)?;
        let stale = verify::stale(&device, range, self.granule);
        Ok(FirstRun { spans: spans.len(), leaves, table_bytes, frames, checked, stale })
    }

    fn timed_run(
        &self,
        iommu: &SoftIommu,
        range: IovaRange,
        map: &mut Series,
        unmap: &mut Series,
    ) -> Result<(), RowError> {
        let container = &iommu.container;
        container.pinner().reset_stats();
        let begin = Instant::now();
        container.map(&self.memory, self.user, range.start(), PROT).map_err(RowError::Map)?;
        map.add_map(begin.elapsed(), container.pinner().reset_stats());
        let begin = Instant::now();
        self.unmap(iommu, range)?;
        unmap.add_unmap(begin.elapsed(), container.pinner().reset_stats());
        Ok(())
    }

    fn unmap(&self, iommu: &SoftIommu, range: IovaRange) -> Result<(), RowError> {
        let unmapped = iommu.container.unmap(range).map_err(RowError::Unmap)?;
        let asked = range.checked_len().unwrap_or(u64::MAX);
        if unmapped == asked { Ok(()) } else { Err(RowError::UnmappedLen { asked, unmapped }) }
    }

    /// What a refused mapping means, and whether it left anything behind.
    fn refused(&self, iommu: &SoftIommu, error: ContainerError) -> RowError {
        if !iommu.is_empty() {
            return RowError::LeftBehind { source: error };
        }
        match error {
            container::Error::Map {
                source: iommu::Error::Table(source @ io_pgtable::Error::MisalignedSpan { .. }),
                ..
            } => {
                let page = self.memory.page_size();
                RowError::Scattered { page, granule: self.granule, source }
            }
            // Its message has the range.
            container::Error::Pin { source: source @ LinuxPinError::Register(_), .. } => {
                RowError::Pinner(source)
            }
            error => RowError::Map(error),
        }
    }

    /// The address of each granule, from those of the base pages.
    fn frames_of_granules(&self, pages: Vec<PhysAddr>) -> Vec<PhysAddr> {
        let page = MemoryKind::Base.page_size();
        if page == self.granule {
            return pages;
        }
        let bytes = self.user.checked_len().unwrap_or(0);
        (0..bytes / self.granule)
            .filter_map(|n| {
                let at = n * self.granule;
                let frame = pages.get(usize::try_from(at / page).ok()?)?;
                Some(frame.wrapping_add(at % page))
            })
            .collect()
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

/// Blocks are at most this large with every granule that has no 52-bit addresses.
const LARGEST_BLOCK_LG2: u32 = 30;

/// Where IOVAs begin: above what a device with 32-bit addresses reaches.
const FIRST_IOVA: u64 = 4 << 30;

/// An IOVA that gives the longest of `spans` the same place within the largest block as its memory
/// has. A multiple of the granule always.
fn congruent_iova(spans: &[Span], granule_lg2: u32) -> Iova {
    let mut before = 0u64;
    let (mut longest, mut distance) = (0, 0);
    for span in spans {
        if span.len() > longest {
            longest = span.len();
            distance = span.paddr().get().wrapping_sub(before);
        }
        before = before.wrapping_add(span.len());
    }
    let place = lg2::align_down(distance & lg2::mask(LARGEST_BLOCK_LG2), granule_lg2);
    Iova::new(FIRST_IOVA + place)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(paddr: u64, len: u64) -> Span {
        Span::new(PhysAddr::new(paddr), len).unwrap()
    }

    #[test]
    fn the_longest_span_is_congruent_to_its_memory() {
        let spans = [span(0x5000, 0x1000), span(0x1_2345_6000, 0x40_0000), span(0, 0x1000)];
        let iova = congruent_iova(&spans, 12).get();
        assert!(iova >= FIRST_IOVA);
        assert_eq!((iova + 0x1000) & lg2::mask(30), 0x1_2345_6000 & lg2::mask(30));
        assert_eq!(congruent_iova(&[], 16), Iova::new(FIRST_IOVA));
        // What precedes the span may be longer than its address.
        let spans = [span(1 << 40, 0x2000), span(0x1000, 0x3000)];
        assert_eq!((congruent_iova(&spans, 12).get() + 0x2000) & lg2::mask(30), 0x1000);
        assert!(lg2::is_aligned(congruent_iova(&spans, 16).get(), 16));
    }
}
