//! Memory mapped for a real device by the kernel.

use std::time::Instant;

use dmaspan::{Errno, Iova, IovaRange, Limits, Prot, Span};
use dmaspan_linux::plan::{Plan, Region};
use dmaspan_linux::vfio::Requests;
use dmaspan_linux::{FrameAddress, FrameMode, FrameSource, PinnerStats};

use super::{Backend, FirstRun, RowError, Subject, Timed, unmap_all};
use crate::pinned::{Counter, Witness};
use crate::real_iommu::RealIommu;
use crate::report::{Both, By, PerPageRequests, Times};
use dmaspan_cli::progress::Progress;
use dmaspan_cli::stats::{median, nanoseconds};

/// The most pages that are mapped one at a time: more tell nothing new.
const MOST_PAGES: u64 = 8192;

/// The kernel's IOMMU, for one row: nothing stays mapped behind it.
pub(crate) struct Real<'a, A: FrameAddress> {
    iommu: &'a RealIommu,
    frames: &'a FrameSource<A>,
    /// What could be mapped before anything was.
    empty: Limits,
}

impl<A: FrameAddress> Drop for Real<'_, A> {
    fn drop(&mut self) {
        // What cannot be unmapped keeps its memory, which the row has said if it came so far.
        let _ = self.iommu.unmap(IovaRange::ALL);
    }
}

impl<'a, A: FrameAddress> Real<'a, A> {
    /// For one row. Spans are looked up in `frames`.
    pub(crate) fn new(iommu: &'a RealIommu, frames: &'a FrameSource<A>) -> Self {
        Self { iommu, frames, empty: iommu.limits() }
    }

    /// Maps all of it once more where it is mapped, which has to be refused.
    fn map_again(&self, subject: &Subject, range: IovaRange) -> Result<(), RowError> {
        match self.map(subject, range) {
            Err(RowError::KernelMap(error)) if error.errno() == Errno::EEXIST => Ok(()),
            Err(RowError::KernelMap(source)) => Err(RowError::NotAnOverlap { range, source }),
            Err(error) => Err(error),
            Ok(()) => Err(RowError::MappedTwice { range }),
        }
    }

    /// Whether the spans that the kernel told are those of pagemap, where that shows frames. How
    /// many they are.
    fn compared(&self, subject: &Subject, told: &[Span]) -> Result<usize, RowError> {
        if A::MODE == FrameMode::Physical {
            let shown = subject.spans(self.frames)?;
            let shown = shown.iter().map(|span| (span.start().get(), span.len()));
            if !shown.eq(told.iter().map(|span| (span.start().get(), span.len()))) {
                return Err(RowError::OtherSpans { user: subject.user });
            }
        }
        Ok(told.len())
    }

    /// Maps, has a look, and unmaps: what the kernel counts goes up and down again. Returns what
    /// counted it, and the requests of the map and of the unmap.
    fn checked_run(
        &self,
        subject: &Subject,
        range: IovaRange,
        unmap: &'static str,
        look: impl FnOnce() -> Result<(), RowError>,
    ) -> Result<(Witness, Requests), RowError> {
        let requests = || self.iommu.requests();
        let counter = Counter::of_kernel(self.iommu.backend);
        let before = requests();
        self.map(subject, range)?;
        let maps = since(before, requests()).maps;
        let witness = counter.after(subject.bytes())?;
        look()?;
        let before = requests();
        unmap_all(self, range)?;
        let unmaps = since(before, requests()).unmaps;
        let again = self.unmap(range)?;
        if again != 0 {
            return Err(RowError::UnmappedLen { asked: 0, unmapped: again });
        }
        counter.after_unmap()?;
        self.check_left(unmap)?;
        Ok((witness, Requests { maps, unmaps }))
    }

    /// Maps and unmaps single pages. Returns the nanoseconds of both.
    fn pages_once(
        &self,
        subject: &Subject,
        range: IovaRange,
        pages: u64,
    ) -> Result<(u64, u64), RowError> {
        let offset = subject.memory.offset_of(subject.user).unwrap_or(0);
        let page = subject.granule;
        let begin = Instant::now();
        for at in (0..pages).map(|n| n * page) {
            let user = subject.memory.sub_range(offset + at, page)?;
            let iova = range.start().wrapping_add(at);
            self.iommu.map(&subject.memory, user, iova)?;
        }
        let map_ns = nanoseconds(begin.elapsed());
        let begin = Instant::now();
        for at in (0..pages).map(|n| n * page) {
            let one = IovaRange::from_len(range.start().wrapping_add(at), page)?;
            unmap_all(self, one)?;
        }
        Ok((map_ns, nanoseconds(begin.elapsed())))
    }
}

impl<A: FrameAddress> Backend for Real<'_, A> {
    /// The requests of one map and one unmap.
    type Found = Requests;

    fn choose_iova(&self, subject: &Subject) -> Result<Iova, RowError> {
        let user = subject.user;
        let region = Region { user, ..Region::whole(&subject.memory, Prot::READ_WRITE) };
        let plan = Plan::new(&self.empty, [region])?;
        plan.iova_of(0).ok_or(RowError::Unplanned { user })
    }

    fn first_run(
        &self,
        subject: &Subject,
        range: IovaRange,
        progress: &Progress,
    ) -> Result<(FirstRun, Requests), RowError> {
        let kind = subject.memory.kind();
        progress.begin(format!("{kind}: mapping, and looking at what is pinned"), 1);
        let mut spans = 0;
        let (witness, requests) = self.checked_run(subject, range, "first unmap", || {
            spans = match self.iommu.spans(range.start()) {
                Some(told) => self.compared(subject, &told)?,
                None => {
                    self.map_again(subject, range)?;
                    subject.spans(self.frames)?.len()
                }
            };
            Ok(())
        })?;
        // Nobody can say to this program what the device would find.
        Ok((FirstRun { spans, verified_bytes: 0, witness }, requests))
    }

    fn map(&self, subject: &Subject, range: IovaRange) -> Result<(), RowError> {
        self.iommu.map(&subject.memory, subject.user, range.start())
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, RowError> {
        self.iommu.unmap(range)
    }

    /// The kernel does not tell where the time goes.
    fn take_stats(&self) -> PinnerStats {
        PinnerStats::default()
    }

    fn check_left(&self, unmap: &'static str) -> Result<(), RowError> {
        let (mappings, left) = (self.iommu.mappings(), self.iommu.limits().mappings_left);
        let expected = self.empty.mappings_left;
        if mappings == 0 && left == expected {
            return Ok(());
        }
        Err(RowError::StillMapped { unmap, mappings, left, expected })
    }

    fn last_run(&self, subject: &Subject, range: IovaRange) -> Result<(), RowError> {
        self.checked_run(subject, range, "last unmap", || Ok(()))?;
        Ok(())
    }

    /// One request for each page, to map it and to unmap it.
    fn figures(
        &self,
        subject: &Subject,
        range: IovaRange,
        requests: Requests,
        timed: &Timed,
        after_run: &dyn Fn(),
    ) -> Result<By, RowError> {
        let all = subject.bytes() / subject.granule;
        let pages = all.min(self.empty.mappings_left.unwrap_or(u64::MAX)).min(MOST_PAGES);
        // The first run is not timed: the kernel allocates its tables.
        let before = self.iommu.requests();
        self.pages_once(subject, range, pages)?;
        let ioctls = since(before, self.iommu.requests());
        let (mut map_ns, mut unmap_ns) = (Vec::new(), Vec::new());
        for _ in 0..timed.runs {
            let (map, unmap) = self.pages_once(subject, range, pages)?;
            map_ns.push(map);
            unmap_ns.push(unmap);
            after_run();
        }
        self.check_left("unmap of single pages")?;
        let per_page = PerPageRequests {
            pages,
            page_bytes: subject.granule,
            ioctls: Both::ioctls(ioctls),
            map_ns: median(&map_ns),
            unmap_ns: median(&unmap_ns),
        };
        let times = timed.series.map(|each| Times::of(each, subject.bytes()));
        let speedup = per_page.speedup(subject.bytes(), times);
        Ok(By::Requests { ioctls: Both::ioctls(requests), times, per_page, speedup })
    }
}

/// What was asked for between two counts.
pub(crate) fn since(before: Requests, after: Requests) -> Requests {
    Requests {
        maps: after.maps.saturating_sub(before.maps),
        unmaps: after.unmaps.saturating_sub(before.unmaps),
    }
}
