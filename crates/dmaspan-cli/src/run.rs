//! A run of `map`: all rows, one kind of memory after the other.

use std::collections::BTreeMap;

use dmaspan::{HostAddr, Limits, PhysAddr};
use dmaspan_linux::pagemap::NoFrames;
use dmaspan_linux::pinner::LinuxPinError;
use dmaspan_linux::vfio::OpenError;
use dmaspan_linux::{FrameAddress, FrameMode, FrameSource, LinuxPinner, MemoryKind, PinMethod};

use crate::args::Granule;
use crate::measure::{self, Measured, PageRequests, Real, RowError, Soft, Work};
use crate::pinned::Witness;
use crate::plan::{Plan, PlannedBackend};
use crate::real_iommu::RealIommu;
use crate::report::{
    By, Failed, Figures, Ioctls, Iommu, PerPageRequests, PerPageTimes, Phase, RealDevice, Report,
    Row, Skipped, Speedup, Times,
};
use dmaspan_cli::left_over;
use dmaspan_cli::progress::Progress;
use dmaspan_cli::size::ByteSize;

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

/// Does what `plan` says.
///
/// # Errors
///
/// [`RunError`] where nothing can be pinned or mapped here. What goes wrong with one kind of memory
/// is in the report.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, RunError> {
    match plan.backend {
        PlannedBackend::Soft(granule) => match LinuxPinner::<PhysAddr>::new() {
            Ok(pinner) => Ok(soft(plan, granule, &pinner, None, progress)),
            Err(LinuxPinError::NoFrames(why)) => {
                let pinner = LinuxPinner::<HostAddr>::new()?;
                Ok(soft(plan, granule, &pinner, Some(why), progress))
            }
            Err(error) => Err(error.into()),
        },
        PlannedBackend::Real(backend, bdf) => {
            let iommu = RealIommu::open(backend, bdf)?;
            // Only the figures have them: the kernel maps.
            match FrameSource::<PhysAddr>::new() {
                Ok(frames) => Ok(real(plan, &iommu, &frames, None, progress)),
                Err(why) => {
                    let frames = FrameSource::<HostAddr>::new().map_err(LinuxPinError::from)?;
                    Ok(real(plan, &iommu, &frames, Some(why), progress))
                }
            }
        }
    }
}

/// Measures with a software IOMMU. `pinner` is not mapped by: each row has its own.
fn soft<A: FrameAddress>(
    plan: &Plan,
    granule: Granule,
    pinner: &LinuxPinner<A>,
    why_virtual: Option<NoFrames>,
    progress: &Progress,
) -> Report {
    let report = soft_report(plan, granule, pinner, why_virtual);
    let (bytes, size) = (plan.bytes, granule.bytes());
    rows(plan, report, progress, |kind| match granule {
        Granule::K4 => measure::row(plan, kind, size, || Soft::<A, 12>::new(bytes), progress),
        Granule::K16 => measure::row(plan, kind, size, || Soft::<A, 14>::new(bytes), progress),
        Granule::K64 => measure::row(plan, kind, size, || Soft::<A, 16>::new(bytes), progress),
    })
}

/// Measures with the kernel's IOMMU.
fn real<A: FrameAddress>(
    plan: &Plan,
    iommu: &RealIommu,
    frames: &FrameSource<A>,
    why_virtual: Option<NoFrames>,
    progress: &Progress,
) -> Report {
    let report = real_report::<A>(plan, iommu, why_virtual);
    rows(plan, report, progress, |kind| {
        let size = iommu.limits().granule();
        measure::row(plan, kind, size, || Ok(Real::new(iommu, frames)), progress)
    })
}

/// Adds a row for each kind of memory to a report.
fn rows(
    plan: &Plan,
    mut report: Report,
    progress: &Progress,
    row: impl Fn(MemoryKind) -> Result<Measured, RowError>,
) -> Report {
    report.notes.extend(left_over::notes());
    let mut memlock = None;
    for &kind in &plan.kinds {
        match row(kind) {
            Ok(measured) => add_measured(&mut report, kind, &measured),
            Err(error) => add_error(&mut report, kind, &error, &mut memlock),
        }
    }
    progress.clear();
    report
}

/// The report of the software IOMMU, without rows.
fn soft_report<A: FrameAddress>(
    plan: &Plan,
    granule: Granule,
    pinner: &LinuxPinner<A>,
    why_virtual: Option<NoFrames>,
) -> Report {
    let mut report = empty_report::<A>(plan, "soft", granule.bytes());
    report.pin = Some(match pinner.method() {
        PinMethod::IoUring => "io_uring",
        _ => "mlock",
    });
    report.stale_translations = Some(0);
    if let Some(why) = pinner.why_mlock() {
        report
            .notes
            .push(format!("memory is locked with mlock instead of pinned by io_uring: {why}"));
    }
    report.notes.extend(why_virtual.map(virtual_note));
    report
}

/// The report of a real device, without rows.
fn real_report<A: FrameAddress>(
    plan: &Plan,
    iommu: &RealIommu,
    why_virtual: Option<NoFrames>,
) -> Report {
    let limits = iommu.limits();
    let mut report = empty_report::<A>(plan, iommu.backend().name(), limits.granule());
    let device = iommu.device().bdf().to_string();
    report.notes.extend(why_virtual.map(virtual_note));
    report.notes.push(format!(
        "no DMA was tried, because this program has no driver for {device}; the example \
         `dmaspan-nvme` reads and writes the disk of an NVMe controller"
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

fn empty_report<A: FrameAddress>(plan: &Plan, backend: &'static str, granule: u64) -> Report {
    Report {
        backend,
        real: None,
        size_bytes: plan.bytes,
        granule,
        runs: plan.runs,
        pin: None,
        frames: Some(match A::MODE {
            FrameMode::Physical => "physical",
            FrameMode::Virtual => "virtual",
        }),
        rows: Vec::new(),
        verified_bytes: 0,
        stale_translations: None,
        notes: plan.notes.clone(),
    }
}

fn virtual_note(why: NoFrames) -> String {
    format!("spans are contiguous in virtual memory only: {why}")
}

/// Adds what went wrong. That the limit of locked memory is too low is said in full once: of the
/// kind in `memlock`.
fn add_error(
    report: &mut Report,
    kind: MemoryKind,
    error: &RowError,
    memlock: &mut Option<MemoryKind>,
) {
    let memory = kind.name().to_owned();
    let why = match *memlock {
        Some(first) if error.is_memlock() => {
            format!("the limit of locked memory is too low for this kind, too: see {first}")
        }
        _ => error.to_string(),
    };
    if error.is_memlock() && memlock.is_none() {
        *memlock = Some(kind);
    }
    if error.is_skip() {
        return report.rows.push(Row::Skipped(Skipped { memory, skipped: why }));
    }
    if let (RowError::Remains(remains), Some(stale)) = (error, &mut report.stale_translations) {
        *stale += remains.count();
    }
    report.rows.push(Row::Failed(Failed { memory, failed: why }));
}

fn add_measured(report: &mut Report, kind: MemoryKind, measured: &Measured) {
    if let Witness::Accepted(why) = measured.witness {
        report
            .notes
            .push(format!("{kind}: the program did not check how much of it is pinned: {why}"));
    }
    if measured.not_huge_bytes > 0 {
        report.notes.push(format!(
            "{kind}: {} got no transparent huge pages: let /sys/kernel/mm/transparent_hugepage/\
             enabled say madvise or always; memory may also be fragmented",
            ByteSize::new(measured.not_huge_bytes)
        ));
    }
    report.verified_bytes += measured.verified_bytes;
    report.rows.push(Row::Figures(Box::new(Figures {
        memory: kind.name().to_owned(),
        spans: measured.spans,
        by: by(measured, report.size_bytes),
        verified_bytes: measured.verified_bytes,
        witness: Some(measured.witness),
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
