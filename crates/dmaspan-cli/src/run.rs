//! All rows, one kind of memory after the other.

use std::collections::BTreeMap;

use dmaspan::Limits;
use dmaspan_linux::pinner::LinuxPinError;
use dmaspan_linux::vfio::OpenError;
use dmaspan_linux::{FrameMode, FrameSource, LinuxPinner, MemoryKind, PinMethod};

use crate::args::Granule;
use crate::measure::{self, Measured, PageRequests, Real, RowError, Soft, Work};
use crate::pinned::Counted;
use crate::plan::{Plan, PlannedBackend};
use crate::progress::Progress;
use crate::real_iommu::RealIommu;
use crate::report::{
    By, Failed, Figures, Ioctls, Iommu, PerPageRequests, PerPageTimes, Phase, RealDevice, Report,
    Row, Skipped, Speedup, Times,
};
use crate::size::ByteSize;

/// Why nothing can be mapped here.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// Nothing can be pinned.
    #[error(transparent)]
    Pinner(#[from] LinuxPinError),
    /// The device cannot be used.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// What maps, while rows are measured.
enum Opened {
    Soft(Granule),
    Real(Box<RealIommu>, FrameSource),
}

/// Does what `plan` says.
///
/// # Errors
///
/// [`RunError`] where nothing can be pinned or mapped here. What goes wrong with one kind of memory
/// is in the report.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, RunError> {
    let (mut report, opened) = match plan.backend {
        PlannedBackend::Soft(granule) => {
            (soft_report(plan, granule, &LinuxPinner::new()?), Opened::Soft(granule))
        }
        PlannedBackend::Real(backend, bdf) => {
            let (iommu, frames) = (RealIommu::open(backend, bdf)?, FrameSource::detect());
            (real_report(plan, &iommu, &frames), Opened::Real(Box::new(iommu), frames))
        }
    };
    for &kind in &plan.kinds {
        match row(plan, &opened, kind, progress) {
            Ok(measured) => add_measured(&mut report, kind, &measured),
            Err(error) => add_error(&mut report, kind, &error),
        }
    }
    progress.clear();
    Ok(report)
}

/// The report of the software IOMMU, without rows.
fn soft_report(plan: &Plan, granule: Granule, pinner: &LinuxPinner) -> Report {
    let mut report = empty_report(plan, "soft", granule.bytes(), pinner.frames());
    report.pin = Some(match pinner.method() {
        PinMethod::IoUring => "io_uring",
        _ => "mlock",
    });
    report.stale_translations = Some(0);
    if let Some(why) = pinner.why_mlock() {
        report.notes.push(format!("memory is locked with mlock: {why}"));
    }
    report.notes.extend(why_virtual(pinner.frames()));
    report
}

/// The report of a real device, without rows.
fn real_report(plan: &Plan, iommu: &RealIommu, frames: &FrameSource) -> Report {
    let limits = iommu.limits();
    let mut report = empty_report(plan, iommu.backend().name(), limits.granule(), frames);
    let device = iommu.device().bdf().to_string();
    report.notes.extend(why_virtual(frames));
    report.notes.push(format!(
        "no DMA was tried, as this program has no driver for {device}: the example `dmaspan-nvme` \
         reads and writes the disk of an NVMe controller"
    ));
    let (backend, iommu) = (iommu.backend(), Iommu::of(&limits));
    report.real = Some(RealDevice { device, bar: None, backend, iommu });
    report
}

impl Iommu {
    pub(crate) fn of(limits: &Limits) -> Self {
        let ends = |range: &dmaspan::IovaRange| [range.start().get(), range.last().get()];
        let sizes = (0..u64::BITS).map(|lg2| 1u64 << lg2);
        Self {
            apertures: limits.apertures.iter().map(ends).collect(),
            page_sizes: sizes.filter(|size| limits.page_sizes & size != 0).collect(),
            mappings_limit: limits.mappings_left,
        }
    }
}

fn empty_report(plan: &Plan, backend: &'static str, granule: u64, frames: &FrameSource) -> Report {
    Report {
        backend,
        real: None,
        size_bytes: plan.bytes,
        granule,
        runs: plan.runs,
        pin: None,
        frames: Some(match frames.mode() {
            FrameMode::Physical => "physical",
            FrameMode::Virtual => "virtual",
        }),
        rows: Vec::new(),
        verified_bytes: 0,
        stale_translations: None,
        notes: plan.notes.clone(),
    }
}

fn why_virtual(frames: &FrameSource) -> Option<String> {
    let why = frames.why_virtual()?;
    Some(format!("spans are contiguous virtual memory: {why}"))
}

fn row(
    plan: &Plan,
    opened: &Opened,
    kind: MemoryKind,
    progress: &Progress,
) -> Result<Measured, RowError> {
    let bytes = plan.bytes;
    match opened {
        Opened::Soft(granule) => {
            let size = granule.bytes();
            match granule {
                Granule::K4 => measure::row(plan, kind, size, || Soft::<12>::new(bytes), progress),
                Granule::K16 => measure::row(plan, kind, size, || Soft::<14>::new(bytes), progress),
                Granule::K64 => measure::row(plan, kind, size, || Soft::<16>::new(bytes), progress),
            }
        }
        Opened::Real(iommu, frames) => {
            let size = iommu.limits().granule();
            measure::row(plan, kind, size, || Ok(Real::new(iommu, frames)), progress)
        }
    }
}

fn add_error(report: &mut Report, kind: MemoryKind, error: &RowError) {
    let (memory, why) = (kind.name().to_owned(), error.to_string());
    if error.is_skip() {
        return report.rows.push(Row::Skipped(Skipped { memory, skipped: why }));
    }
    if let (RowError::Remains(remains), Some(stale)) = (error, &mut report.stale_translations) {
        *stale += remains.count();
    }
    report.rows.push(Row::Failed(Failed { memory, failed: why }));
}

fn add_measured(report: &mut Report, kind: MemoryKind, measured: &Measured) {
    if measured.counted == Counted::Untold {
        report.notes.push(format!(
            "{kind}: this kernel does not tell how much of such memory is pinned, so that was not \
             checked"
        ));
    }
    if measured.not_huge_bytes > 0 {
        report.notes.push(format!(
            "{kind}: {} have no transparent huge pages: /sys/kernel/mm/transparent_hugepage/\
             enabled should say madvise or always, and memory may be fragmented",
            ByteSize::new(measured.not_huge_bytes)
        ));
    }
    report.verified_bytes += measured.verified_bytes;
    report.rows.push(Row::Figures(Box::new(Figures {
        memory: kind.name().to_owned(),
        spans: measured.spans,
        by: by(measured, report.size_bytes),
        verified_bytes: measured.verified_bytes,
        counted: measured.counted,
    })));
}

/// What was measured, as the backend tells it.
fn by(measured: &Measured, bytes: u64) -> By {
    let (map, unmap) = (&measured.map, &measured.unmap);
    match &measured.work {
        Work::Tables { leaves, table_bytes, per_page } => {
            let (map, unmap) = (Phase::of(map, bytes), Phase::of(unmap, bytes));
            let leaves = leaves.iter().map(|&(lg2, count)| (1 << lg2, count));
            By::Tables {
                leaves: leaves.collect::<BTreeMap<u64, u64>>(),
                table_bytes: *table_bytes,
                table_speedup: Speedup::of(per_page.map_ns, per_page.unmap_ns, &map, &unmap),
                map,
                unmap,
                per_page: PerPageTimes {
                    map_table_ns: per_page.map_ns,
                    unmap_table_ns: per_page.unmap_ns,
                },
            }
        }
        Work::Requests { requests, per_page } => {
            let PageRequests { pages, page_bytes, requests: page_requests, times } = *per_page;
            let (map, unmap) = (Times::of(map, bytes), Times::of(unmap, bytes));
            let per_page = PerPageRequests {
                pages,
                page_bytes,
                ioctls: Ioctls::of(page_requests),
                map_ns: times.map_ns,
                unmap_ns: times.unmap_ns,
            };
            let speedup = per_page.speedup(bytes, map.total_ns, unmap.total_ns);
            By::Requests { ioctls: Ioctls::of(*requests), map, unmap, per_page, speedup }
        }
    }
}
