//! All rows, one kind of memory after the other.

use std::collections::BTreeMap;

use dmaspan_linux::pinner::LinuxPinError;
use dmaspan_linux::{FrameMode, LinuxPinner, MemoryKind, PinMethod};

use crate::args::Granule;
use crate::measure::{self, Measured, RowError};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::report::{Figures, PerPageTimes, Phase, Report, Row, Skipped, Speedup};
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
        mismatches: Vec::new(),
        stale: Vec::new(),
        failed: Vec::new(),
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
    if !error.is_skip() {
        report.failed.push(format!("{kind}: {error}"));
    }
    report.rows.push(Row::Skipped(Skipped { memory: kind.name(), skipped: error.to_string() }));
}

fn add_measured(report: &mut Report, kind: MemoryKind, measured: &Measured) {
    let Measured { checked, stale, per_page, .. } = measured;
    if let Some(mismatch) = checked.mismatch {
        report.mismatches.push(format!("{kind}: {mismatch}"));
    }
    if let Some(first) = stale.first {
        let count = stale.translations;
        report.stale.push(format!(
            "{kind}: {count} translations are left after the unmap, the first at iova {first}"
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
    report.verified_bytes += checked.bytes;
    report.stale_translations += stale.translations;
    report.rows.push(Row::Figures(Box::new(Figures {
        memory: kind.name(),
        spans: measured.spans,
        leaves: leaves.collect::<BTreeMap<u64, u64>>(),
        table_bytes: measured.table_bytes,
        table_speedup: Speedup::of(per_page.map_ns, per_page.unmap_ns, &map, &unmap),
        map,
        unmap,
        per_page: PerPageTimes { map_table_ns: per_page.map_ns, unmap_table_ns: per_page.unmap_ns },
        verified_bytes: checked.bytes,
    })));
}
