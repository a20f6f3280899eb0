//! One row: one kind of memory, mapped, checked and measured.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use dmaspan::container;
use dmaspan::io_pgtable;
use dmaspan::iommu::{self, IommuOps};
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
use crate::pinned::{Counted, Counter, NotPinned};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::size::ByteSize;
use crate::soft_iommu::{BuildError, Left, PROT, SoftIommu};
use crate::stats::Series;
use crate::verify::{self, Checked, Mismatch, PASSES, Stale};

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
    /// Bytes that the device and the CPU saw alike.
    pub(crate) verified_bytes: u64,
    /// What the kernel counts of the pins.
    pub(crate) counted: Counted,
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
    #[error(transparent)]
    NotPinned(#[from] NotPinned),
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    #[error(transparent)]
    Remains(#[from] Remains),
}

/// What should be gone after an unmap and is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) struct Remains {
    /// After which unmap.
    unmap: &'static str,
    left: Left,
    stale: Stale,
}

impl Remains {
    /// How many things remain.
    pub(crate) fn count(&self) -> u64 {
        self.left.count().saturating_add(self.stale.translations)
    }
}

impl fmt::Display for Remains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { unmap, left, stale } = self;
        write!(f, "left after the {unmap}: ")?;
        if left.count() > 0 {
            write!(f, "{left}")?;
        }
        let Some(first) = stale.first else { return Ok(()) };
        let comma = if left.count() > 0 { ", " } else { "" };
        write!(f, "{comma}{} translations, the first at iova {first}", stale.translations)
    }
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
    let mut reservation = HeldPages::for_memory(kind, bytes)?;
    let subject = Subject::allocate::<G>(kind, bytes)?;
    if let Some(reservation) = &mut reservation {
        reservation.mapped();
    }
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
    subject.last_run(&iommu, range)?;
    progress.begin(format!("{kind}: page at a time, {runs} times"), runs);
    let (iova, max_ranges) = (range.start(), iommu.iotlb.max_ranges());
    let per_page = per_page::measure::<G>(&first.frames, iova, plan.runs, max_ranges, || {
        progress.advance(1);
    })?;
    Ok(Measured {
        spans: first.spans,
        leaves: first.leaves,
        table_bytes: first.table_bytes,
        map,
        unmap,
        per_page,
        verified_bytes: first.verified_bytes,
        counted: first.counted,
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
    verified_bytes: u64,
    counted: Counted,
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
        let SoftIommu { container, tables, iotlb, .. } = iommu;
        let counter = Counter::before(container.pinner().method(), self.memory.kind());
        container
            .map(&self.memory, self.user, range.start(), PROT)
            .map_err(|error| self.refused(iommu, error))?;
        let counted = counter.after(self.user.checked_len().unwrap_or(u64::MAX))?;
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
        let Checked { bytes, mismatch } = mapped.check(&device, &|bytes| progress.advance(bytes));
        if let Some(mismatch) = mismatch {
            return Err(mismatch.into());
        }

        self.unmap(iommu, range)?;
        self.check_gone(iommu, range, "first unmap")?;
        let verified_bytes = bytes;
        Ok(FirstRun { spans: spans.len(), leaves, table_bytes, frames, verified_bytes, counted })
    }

    /// Maps, lets a device reach every granule, and unmaps, after all that was timed: whether the
    /// last unmap takes away as much as the first.
    fn last_run(&self, iommu: &SoftIommu, range: IovaRange) -> Result<(), RowError> {
        let SoftIommu { container, iotlb, .. } = iommu;
        container.map(&self.memory, self.user, range.start(), PROT).map_err(RowError::Map)?;
        verify::touch(iotlb, range, self.granule)?;
        self.unmap(iommu, range)?;
        self.check_gone(iommu, range, "last unmap")
    }

    /// Whether nothing is left of `range`, which was unmapped, and of anything else.
    fn check_gone(
        &self,
        iommu: &SoftIommu,
        range: IovaRange,
        unmap: &'static str,
    ) -> Result<(), RowError> {
        // First what is there: to try an address fills the IOTLB.
        let left = iommu.left();
        let stale = verify::stale(&iommu.iotlb, range, self.granule);
        let remains = Remains { unmap, left, stale };
        if remains.count() == 0 { Ok(()) } else { Err(remains.into()) }
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
        let (left, stale) = (iommu.left(), Stale::default());
        let remains = Remains { unmap: "unmap of a timed run", left, stale };
        if remains.count() == 0 { Ok(()) } else { Err(remains.into()) }
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
    use dmaspan_sim::iotlb::Planted;

    use super::*;
    use crate::pinned::pinning_turn;

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

    const BYTES: u64 = 2 << 20;

    /// Memory, an IOMMU for it, and where to map.
    fn subject() -> (Subject, SoftIommu, IovaRange) {
        let subject = Subject::allocate::<12>(MemoryKind::Base, BYTES).unwrap();
        let iommu = SoftIommu::new::<12>(LinuxPinner::new().unwrap(), 2 * BYTES).unwrap();
        let range = IovaRange::from_len(Iova::new(FIRST_IOVA), BYTES).unwrap();
        (subject, iommu, range)
    }

    fn remains(result: Result<(), RowError>) -> Remains {
        match result {
            Err(RowError::Remains(remains)) => remains,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_first_run_counts_pins_and_leaves_nothing() {
        let _turn = pinning_turn();
        let (subject, iommu, range) = subject();
        let first = subject.first_run::<12>(&iommu, range, &Progress::new()).unwrap();
        assert_eq!(first.verified_bytes, BYTES);
        assert_eq!(iommu.left(), Left::default());
    }

    #[test]
    fn invalidations_that_stop_before_the_last_run_are_found() {
        let _turn = pinning_turn();
        let (subject, iommu, range) = subject();
        subject.first_run::<12>(&iommu, range, &Progress::new()).unwrap();
        let (mut map, mut unmap) = (Series::default(), Series::default());
        subject.timed_run(&iommu, range, &mut map, &mut unmap).unwrap();
        subject.last_run(&iommu, range).unwrap();
        for planted in [Planted::IgnoreAll, Planted::IgnoreLeaves] {
            iommu.iotlb.drop_invalidations(planted);
            let found = remains(subject.last_run(&iommu, range));
            assert_eq!(found.stale.first, Some(range.start()), "{found}");
            assert!(found.to_string().contains("512 leaves in the IOTLB"), "{found}");
        }
    }

    #[test]
    fn links_that_are_not_forgotten_are_found() {
        let _turn = pinning_turn();
        let (subject, iommu, range) = subject();
        iommu.iotlb.drop_invalidations(Planted::IgnoreTables);
        let found = remains(subject.last_run(&iommu, range));
        assert!(found.to_string().contains("links to tables in the IOTLB"), "{found}");
    }

    #[test]
    fn a_page_that_stays_mapped_elsewhere_is_found() {
        let _turn = pinning_turn();
        let (subject, iommu, range) = subject();
        let page = Memory::new(MemoryKind::Base, 4096).map(Arc::new).unwrap();
        let elsewhere = range.start().wrapping_add(1 << 40);
        iommu.container.map(&page, page.user_range(), elsewhere, PROT).unwrap();
        let (mut map, mut unmap) = (Series::default(), Series::default());
        let found = remains(subject.timed_run(&iommu, range, &mut map, &mut unmap));
        let text = "left after the unmap of a timed run: 1 mappings, 1 leaves in the tables, \
            3 tables below the root";
        assert_eq!(found.to_string(), text);
        assert_eq!(remains(subject.last_run(&iommu, range)).stale, Stale::default());
        iommu.container.unmap_all().unwrap();
    }
}
