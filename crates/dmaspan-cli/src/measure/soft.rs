//! Memory mapped by the software IOMMU.

use std::collections::BTreeMap;
use std::sync::Arc;

use dmaspan::container;
use dmaspan::io_pgtable;
use dmaspan::iommu::{self, Gather};
use dmaspan::lg2;
use dmaspan::{Address, Iova, IovaRange, PhysAddr, Span};
use dmaspan_linux::pinner::LinuxPinError;
use dmaspan_linux::{FrameAddress, FrameMap, LinuxPinner, Lookup, MemoryKind, PinnerStats};

use super::error::{ContainerError, Remains};
use super::{Backend, FirstRun, RowError, Subject, Timed, unmap_all};
use crate::bus::MemoryBus;
use crate::per_page;
use crate::pinned::Counter;
use crate::report::{By, Phase};
use crate::soft_iommu::{PROT, SoftContainer};
use crate::verify::{self, Checked, PASSES, Stale};
use dmaspan_cli::progress::Progress;

/// A software IOMMU with a granule of `2^G` bytes, of one row.
pub(crate) struct Soft<A: FrameAddress, const G: u32> {
    iommu: SoftContainer<A, G>,
}

/// What tells how tables map, and where the memory is.
pub(crate) struct Found {
    /// By size in bytes.
    leaves: BTreeMap<u64, u64>,
    table_bytes: u64,
    /// Where each granule of the memory is.
    frames: Vec<PhysAddr>,
}

impl<A: FrameAddress, const G: u32> Backend for Soft<A, G> {
    type Found = Found;

    /// An IOVA at which the longest span gets the largest leaves. Frames may change until they are
    /// pinned, which then costs leaves and nothing else.
    fn choose_iova(&self, subject: &Subject) -> Result<Iova, RowError> {
        let mut spans = Vec::new();
        let frames = self.iommu.container.pinner().frames();
        Ok(match frames.frames(&subject.memory, subject.user, Lookup::Auto, &mut spans) {
            Ok(_) => congruent_iova(&spans, G),
            Err(_) => congruent_iova::<A>(&[], G),
        })
    }

    fn first_run(
        &self,
        subject: &Subject,
        range: IovaRange,
        progress: &Progress,
    ) -> Result<(FirstRun, Found), RowError> {
        let SoftContainer { container, tables, device, .. } = &self.iommu;
        let (kind, bytes) = (subject.memory.kind(), subject.bytes());
        progress.begin(
            format!("{kind}: a device writes and reads every byte"),
            PASSES.saturating_mul(bytes),
        );
        let counter = Counter::before(container.pinner().method(), kind);
        container
            .map(&subject.memory, subject.user, range.start(), PROT)
            .map_err(|error| self.refused(subject, error))?;
        let witness = counter.after(bytes)?;
        let census = container.census();
        let leaves = census.sizes().map(|(lg2, count)| (lg2::size(lg2), count)).collect();
        let table_bytes = tables.table_bytes();

        let source = container.pinner().frames();
        let spans = subject.spans(source)?;
        let mut pages = Vec::new();
        source.page_frames(&subject.memory, subject.user, &mut pages)?;
        let frames = frames_of_granules(subject, pages);

        let frame_map = FrameMap::new(&subject.memory, subject.user, &spans)?;
        let bus = MemoryBus::new(Arc::clone(&subject.memory), frame_map);
        let offset = subject.user.start().get() - subject.memory.user_range().start().get();
        let mapped = verify::Mapped { memory: &subject.memory, offset, range };
        let advance = |bytes| progress.advance(bytes);
        let Checked { bytes, mismatch } = mapped.check(&mut device.lock(), &bus, &advance);
        if let Some(mismatch) = mismatch {
            return Err(mismatch.into());
        }

        unmap_all(self, range)?;
        self.check_gone(subject, range, "first unmap")?;
        let first = FirstRun { spans: spans.len(), verified_bytes: bytes, witness };
        Ok((first, Found { leaves, table_bytes, frames }))
    }

    fn map(&self, subject: &Subject, range: IovaRange) -> Result<(), RowError> {
        let container = &self.iommu.container;
        let mapped = container.map(&subject.memory, subject.user, range.start(), PROT);
        mapped.map_err(RowError::Map)?;
        Ok(())
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, RowError> {
        self.iommu.container.unmap(range).map_err(RowError::Unmap)
    }

    fn take_stats(&self) -> PinnerStats {
        self.iommu.container.pinner().reset_stats()
    }

    fn check_left(&self, unmap: &'static str) -> Result<(), RowError> {
        nothing(Remains { unmap, left: self.iommu.left(), stale: Stale::default() })
    }

    /// Lets a device reach every granule meanwhile.
    fn last_run(&self, subject: &Subject, range: IovaRange) -> Result<(), RowError> {
        self.map(subject, range)?;
        verify::touch(&mut self.iommu.device.lock(), range, subject.granule)?;
        unmap_all(self, range)?;
        self.check_gone(subject, range, "last unmap")
    }

    fn figures(
        &self,
        subject: &Subject,
        range: IovaRange,
        found: Found,
        timed: &Timed,
        after_run: &dyn Fn(),
    ) -> Result<By, RowError> {
        let Found { leaves, table_bytes, frames } = found;
        let (runs, max_ranges) = (timed.runs, Gather::<()>::MAX_RANGES);
        let per_page = per_page::measure::<G>(&frames, range.start(), runs, max_ranges, after_run)?;
        let times = timed.series.map(|each| Phase::of(each, subject.bytes()));
        let table_speedup = per_page.speedup(&times);
        Ok(By::Tables { leaves, table_bytes, times, per_page, table_speedup })
    }
}

impl<A: FrameAddress, const G: u32> Soft<A, G> {
    /// One for `bytes` of memory.
    ///
    /// # Errors
    ///
    /// [`RowError`] where nothing can be pinned, or the granule is none of Arm's.
    pub(crate) fn new(bytes: u64) -> Result<Self, RowError> {
        Ok(Self { iommu: SoftContainer::new(LinuxPinner::new()?, bytes)? })
    }

    /// Whether nothing is left of `range`, which was unmapped, and of anything else.
    fn check_gone(
        &self,
        subject: &Subject,
        range: IovaRange,
        unmap: &'static str,
    ) -> Result<(), RowError> {
        // First what is there: to try an address fills the IOTLB.
        let left = self.iommu.left();
        let stale = verify::stale(&mut self.iommu.device.lock(), range, subject.granule);
        nothing(Remains { unmap, left, stale })
    }

    /// What a refused mapping means, and whether it left anything behind.
    fn refused(&self, subject: &Subject, error: ContainerError) -> RowError {
        if !self.iommu.is_empty() {
            return RowError::LeftBehind { source: error };
        }
        match error {
            container::Error::Map {
                source: iommu::Error::Table(source @ io_pgtable::Error::MisalignedSpan { .. }),
                ..
            } => {
                let page = subject.memory.page_size();
                RowError::Scattered { page, granule: subject.granule, source }
            }
            // Its message has the range.
            container::Error::Pin { source: source @ LinuxPinError::Register(_), .. } => {
                RowError::Pinner(source)
            }
            error => RowError::Map(error),
        }
    }
}

fn nothing(remains: Remains) -> Result<(), RowError> {
    if remains.count() == 0 { Ok(()) } else { Err(remains.into()) }
}

/// The address of each granule as tables have it, from those of the base pages.
fn frames_of_granules<A: Address>(subject: &Subject, pages: Vec<A>) -> Vec<PhysAddr> {
    let page = MemoryKind::Base.page_size();
    if page == subject.granule {
        return pages.into_iter().map(|page| PhysAddr::new(page.get())).collect();
    }
    let bytes = subject.user.checked_len().unwrap_or(0);
    (0..bytes / subject.granule)
        .filter_map(|n| {
            let at = n * subject.granule;
            let frame = pages.get(usize::try_from(at / page).ok()?)?;
            Some(PhysAddr::new(frame.get()).wrapping_add(at % page))
        })
        .collect()
}

/// Blocks are at most this large with every granule that has no 52-bit addresses.
const LARGEST_BLOCK_LG2: u32 = 30;

/// Where IOVAs begin: above what a device with 32-bit addresses reaches.
const FIRST_IOVA: u64 = 4 << 30;

/// An IOVA that gives the longest of `spans` the same place within the largest block as its memory
/// has. A multiple of the granule always.
fn congruent_iova<A: Address>(spans: &[Span<A>], granule_lg2: u32) -> Iova {
    let mut before = 0u64;
    let (mut longest, mut distance) = (0, 0);
    for span in spans {
        if span.len() > longest {
            longest = span.len();
            distance = span.start().get().wrapping_sub(before);
        }
        before = before.wrapping_add(span.len());
    }
    let place = lg2::align_down(distance & lg2::mask(LARGEST_BLOCK_LG2), granule_lg2);
    Iova::new(FIRST_IOVA + place)
}

#[cfg(test)]
mod tests {
    use dmaspan::HostAddr;
    use dmaspan_linux::{Memory, MemoryKind};
    use dmaspan_sim::fault::{Forgets, SilentHooks};

    use super::super::error::Remains;
    use super::*;
    use crate::pinned::pinning_turn;
    use crate::report::Both;
    use crate::soft_iommu::Left;

    fn span(paddr: u64, len: u64) -> Span {
        Span::new(PhysAddr::new(paddr), len).unwrap()
    }

    #[test]
    fn the_longest_span_is_congruent_to_its_memory() {
        let spans = [span(0x5000, 0x1000), span(0x1_2345_6000, 0x40_0000), span(0, 0x1000)];
        let iova = congruent_iova(&spans, 12).get();
        assert!(iova >= FIRST_IOVA);
        assert_eq!((iova + 0x1000) & lg2::mask(30), 0x1_2345_6000 & lg2::mask(30));
        assert_eq!(congruent_iova::<PhysAddr>(&[], 16), Iova::new(FIRST_IOVA));
        // What precedes the span may be longer than its address.
        let spans = [span(1 << 40, 0x2000), span(0x1000, 0x3000)];
        assert_eq!((congruent_iova(&spans, 12).get() + 0x2000) & lg2::mask(30), 0x1000);
        assert!(lg2::is_aligned(congruent_iova(&spans, 16).get(), 16));
    }

    const BYTES: u64 = 2 << 20;

    /// Memory, an IOMMU for it, and where to map.
    fn subject() -> (Subject, Soft<HostAddr, 12>, IovaRange) {
        let subject = Subject::allocate(MemoryKind::Base, BYTES, 4096).unwrap();
        let soft = Soft::new(2 * BYTES).unwrap();
        let range = IovaRange::from_len(Iova::new(FIRST_IOVA), BYTES).unwrap();
        (subject, soft, range)
    }

    /// The same with an IOMMU whose hooks may fall silent.
    fn silent_subject() -> (Subject, Soft<HostAddr, 12>, IovaRange, Forgets) {
        let (subject, _, range) = subject();
        let forgets = Forgets::default();
        let hooks = |iommu| SilentHooks::new(iommu, &forgets);
        let iommu = SoftContainer::with_hooks(LinuxPinner::new().unwrap(), 2 * BYTES, hooks);
        (subject, Soft { iommu: iommu.unwrap() }, range, forgets)
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
        let (subject, soft, range) = subject();
        let (first, _) = soft.first_run(&subject, range, &Progress::on_stderr()).unwrap();
        assert_eq!(first.verified_bytes, BYTES);
        assert_eq!(soft.iommu.left(), Left::default());
    }

    #[test]
    fn invalidations_that_stop_before_the_last_run_are_found() {
        let _turn = pinning_turn();
        let (subject, soft, range, forgets) = silent_subject();
        soft.first_run(&subject, range, &Progress::on_stderr()).unwrap();
        subject.timed_run(&soft, range, &mut Both::default()).unwrap();
        soft.last_run(&subject, range).unwrap();
        for _ in 0..2 {
            forgets.nothing();
            let found = remains(soft.last_run(&subject, range));
            assert_eq!(found.stale.first, Some(range.start()), "{found}");
            assert_eq!(found.stale.translations, 2 * BYTES / 4096);
            assert!(found.to_string().contains(" spans in the IOTLB"), "{found}");
        }
    }

    #[test]
    fn a_page_that_stays_mapped_elsewhere_is_found() {
        let _turn = pinning_turn();
        let (subject, soft, range) = subject();
        let page = Memory::new(MemoryKind::Base, 4096).map(Arc::new).unwrap();
        let elsewhere = range.start().wrapping_add(1 << 40);
        soft.iommu.container.map(&page, page.user_range(), elsewhere, PROT).unwrap();
        let found = remains(subject.timed_run(&soft, range, &mut Both::default()));
        let text = "left after the unmap of a timed run: 1 mappings, 1 leaves in the tables, \
            3 tables below the root";
        assert_eq!(found.to_string(), text);
        assert_eq!(remains(soft.last_run(&subject, range)).stale, Stale::default());
        soft.iommu.container.unmap_all().unwrap();
    }
}
