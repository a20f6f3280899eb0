//! A run of `map`: all rows, one kind of memory after the other.

use std::error::Error;

use dmaspan::{HostAddr, PhysAddr};
use dmaspan_linux::pagemap::NoFrames;
use dmaspan_linux::pinner::LinuxPinError;
use dmaspan_linux::{FrameAddress, FrameMode, FrameSource, LinuxPinner, MemoryKind, PinMethod};

use crate::args::{BackendArg, Granule};
use crate::map_plan::MapPlan;
use crate::measure::{self, Real, RowError, Soft};
use crate::pinned::Witness;
use crate::real_iommu::RealIommu;
use crate::report::{Figures, Iommu, RealDevice, Report, Row};
use dmaspan_cli::left_over;
use dmaspan_cli::progress::Progress;
use dmaspan_cli::size::ByteSize;

/// Why nothing can be mapped here: nothing can be pinned, or the device cannot be used.
pub(crate) type RunError = Box<dyn Error>;

/// Does what `plan` says.
///
/// # Errors
///
/// [`RunError`] where nothing can be pinned or mapped here. What goes wrong with one kind of memory
/// is in the report.
pub(crate) fn run(plan: &MapPlan, progress: &Progress) -> Result<Report, RunError> {
    match plan.backend {
        BackendArg::Soft => match LinuxPinner::<PhysAddr>::new() {
            Ok(pinner) => Ok(soft(plan, &pinner, None, progress)),
            Err(LinuxPinError::NoFrames(why)) => {
                let pinner = LinuxPinner::<HostAddr>::new()?;
                Ok(soft(plan, &pinner, Some(why), progress))
            }
            Err(error) => Err(error.into()),
        },
        BackendArg::Real(backend, bdf) => {
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
    plan: &MapPlan,
    pinner: &LinuxPinner<A>,
    why_virtual: Option<NoFrames>,
    progress: &Progress,
) -> Report {
    let (bytes, size) = (plan.bytes, plan.granule.bytes());
    let mut report = empty_report::<A>(plan, "soft", size);
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
    rows(plan, report, progress, |kind| match plan.granule {
        Granule::K4 => measure::row(plan, kind, size, || Soft::<A, 12>::new(bytes), progress),
        Granule::K16 => measure::row(plan, kind, size, || Soft::<A, 14>::new(bytes), progress),
        Granule::K64 => measure::row(plan, kind, size, || Soft::<A, 16>::new(bytes), progress),
    })
}

/// Measures with the kernel's IOMMU.
fn real<A: FrameAddress>(
    plan: &MapPlan,
    iommu: &RealIommu,
    frames: &FrameSource<A>,
    why_virtual: Option<NoFrames>,
    progress: &Progress,
) -> Report {
    let limits = iommu.limits();
    let mut report = empty_report::<A>(plan, iommu.backend.name(), limits.granule());
    let device = iommu.bdf.to_string();
    report.notes.extend(why_virtual.map(virtual_note));
    report.notes.push(format!(
        "no DMA was tried, because this program has no driver for {device}; the example \
         `dmaspan-nvme` reads and writes the disk of an NVMe controller"
    ));
    report.real = Some(RealDevice::of(iommu, device, None));
    rows(plan, report, progress, |kind| {
        let size = iommu.limits().granule();
        measure::row(plan, kind, size, || Ok(Real::new(iommu, frames)), progress)
    })
}

/// Adds a row for each kind of memory to a report.
fn rows(
    plan: &MapPlan,
    mut report: Report,
    progress: &Progress,
    row: impl Fn(MemoryKind) -> Result<(Figures, u64), RowError>,
) -> Report {
    report.notes.extend(left_over::notes());
    let mut memlock = None;
    for &kind in &plan.kinds {
        match row(kind) {
            Ok((figures, not_huge)) => add_figures(&mut report, kind, figures, not_huge),
            Err(error) => add_error(&mut report, kind, &error, &mut memlock),
        }
    }
    progress.clear();
    report
}

impl RealDevice {
    pub(crate) fn of(iommu: &RealIommu, device: String, bar: Option<u32>) -> Self {
        let limits = iommu.limits();
        let ends = |range: &dmaspan::IovaRange| [range.start().get(), range.last().get()];
        let sizes = (0..u64::BITS).map(|lg2| 1u64 << lg2);
        let can = Iommu {
            apertures: limits.apertures.iter().map(ends).collect(),
            page_sizes: sizes.filter(|size| limits.page_sizes & size != 0).collect(),
            mappings_limit: limits.mappings_left,
        };
        Self { device, bar, backend: iommu.backend, iommu: can }
    }
}

/// A report of memory, without rows.
fn empty_report<A: FrameAddress>(plan: &MapPlan, backend: &'static str, granule: u64) -> Report {
    let frames = match A::MODE {
        FrameMode::Physical => "physical",
        FrameMode::Virtual => "virtual",
    };
    let (frames, notes) = (Some(frames), plan.notes.clone());
    let report = Report::new(backend, granule, plan.runs);
    Report { size_bytes: plan.bytes, frames, notes, ..report }
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
        return report.rows.push(Row::Skipped { memory, skipped: why });
    }
    if let (RowError::Remains(remains), Some(stale)) = (error, &mut report.stale_translations) {
        *stale += remains.count();
    }
    report.rows.push(Row::Failed { memory, failed: why });
}

fn add_figures(report: &mut Report, kind: MemoryKind, figures: Figures, not_huge_bytes: u64) {
    if let Some(Witness::Accepted(why)) = figures.witness {
        report
            .notes
            .push(format!("{kind}: the program did not check how much of it is pinned: {why}"));
    }
    if not_huge_bytes > 0 {
        report.notes.push(format!(
            "{kind}: {} got no transparent huge pages: let /sys/kernel/mm/transparent_hugepage/\
             enabled say madvise or always; memory may also be fragmented",
            ByteSize::new(not_huge_bytes)
        ));
    }
    report.verified_bytes += figures.verified_bytes;
    report.rows.push(Row::Figures(Box::new(figures)));
}
