//! All rows, one kind of memory after the other.

use std::collections::BTreeMap;

use dmaspan_linux::pinner::LinuxPinError;
use dmaspan_linux::{FrameMode, LinuxPinner, MemoryKind, PinMethod};

use crate::args::Granule;
use crate::measure::{self, Measured, RowError};
use crate::pinned::Counted;
use crate::plan::Plan;
use crate::progress::Progress;
use crate::report::{Failed, Figures, PerPageTimes, Phase, Report, Row, Skipped, Speedup};
use crate::size::ByteSize;

/// Does what `plan` says.
///
/// # Errors
///
/// [`LinuxPinError`] where nothing can be pinned here. What goes wrong with one kind of memory is
/// in the report.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, LinuxPinError> {
    let pinner = LinuxPinner::new()?;
    let mut report = Report {
        size_bytes: plan.bytes,
        granule: plan.granule.bytes(),
        runs: plan.runs,
        pin: match pinner.method() {
            PinMethod::IoUring => "io_uring",
            _ => "mlock",
        },
        frames: match pinner.frame_mode() {
            FrameMode::Physical => "physical",
            FrameMode::Virtual => "virtual",
        },
        rows: Vec::new(),
        verified_bytes: 0,
        stale_translations: 0,
        notes: plan.notes.clone(),
    };
    if let Some(why) = pinner.why_mlock() {
        report.notes.push(format!("memory is locked with mlock: {why}"));
    }
    if let Some(why) = pinner.why_virtual() {
        report.notes.push(format!("spans are contiguous virtual memory: {why}"));
    }
    drop(pinner);
    for &kind in &plan.kinds {
        match row(plan, kind, progress) {
            Ok(measured) => add_measured(&mut report, kind, &measured),
            Err(error) => add_error(&mut report, kind, &error),
        }
    }
    progress.clear();
    Ok(report)
}

fn row(plan: &Plan, kind: MemoryKind, progress: &Progress) -> Result<Measured, RowError> {
    match plan.granule {
        Granule::K4 => measure::row::<12>(plan, kind, progress),
        Granule::K16 => measure::row::<14>(plan, kind, progress),
        Granule::K64 => measure::row::<16>(plan, kind, progress),
    }
}

fn add_error(report: &mut Report, kind: MemoryKind, error: &RowError) {
    let (memory, why) = (kind.name(), error.to_string());
    if error.is_skip() {
        return report.rows.push(Row::Skipped(Skipped { memory, skipped: why }));
    }
    if let RowError::Remains(remains) = error {
        report.stale_translations += remains.count();
    }
    report.rows.push(Row::Failed(Failed { memory, failed: why }));
}

fn add_measured(report: &mut Report, kind: MemoryKind, measured: &Measured) {
    let Measured { per_page, verified_bytes, .. } = measured;
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
    let map = Phase::of(&measured.map, report.size_bytes);
    let unmap = Phase::of(&measured.unmap, report.size_bytes);
    let leaves = measured.leaves.iter().map(|&(lg2, count)| (1 << lg2, count));
    report.verified_bytes += verified_bytes;
    report.rows.push(Row::Figures(Box::new(Figures {
        memory: kind.name(),
        spans: measured.spans,
        leaves: leaves.collect::<BTreeMap<u64, u64>>(),
        table_bytes: measured.table_bytes,
        table_speedup: Speedup::of(per_page.map_ns, per_page.unmap_ns, &map, &unmap),
        map,
        unmap,
        per_page: PerPageTimes { map_table_ns: per_page.map_ns, unmap_table_ns: per_page.unmap_ns },
        verified_bytes: *verified_bytes,
    })));
}
