//! `map --bar`: the kernel maps registers of a device for the device itself. An address that
//! reaches them from there reaches them from any other device, too.

use std::time::Instant;

use dmaspan::{DmaSpace, Iova, IovaRange, Limits, Prot, RangeError};
use dmaspan_linux::PinnerStats;
use dmaspan_linux::vfio::{self, DeviceError, Requests};

use crate::map_plan::BarPlan;
use crate::measure::since;
use crate::real_iommu::RealIommu;
use crate::report::{BarFigures, Both, By, Figures, RealDevice, Report, Row, Times, series_of_bar};
use crate::run::RunError;
use dmaspan_cli::progress::Progress;
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::stats::Series;

/// Why a BAR has no figures.
#[derive(Debug, thiserror::Error)]
enum BarError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Range(#[from] RangeError),
    #[error("without an IOMMU no device reaches registers by IOVAs: use vfio: or iommufd:")]
    NoSpace,
    #[error("no aperture of the IOMMU has room for the {} of the BAR", ByteSize::new(*bytes))]
    NoRoom { bytes: u64 },
    #[error("mapping failed: {0}")]
    Map(#[source] vfio::Error),
    #[error("unmapping failed: {0}")]
    Unmap(#[source] vfio::Error),
    #[error("the unmap of {range} took {unmapped} bytes away, and left {mappings} mappings")]
    Left { range: IovaRange, unmapped: u64, mappings: u64 },
}

/// Does what `plan` says.
///
/// # Errors
///
/// [`RunError`] where the device cannot be used. What goes wrong with the BAR is in the report.
pub(crate) fn run(plan: &BarPlan, progress: &Progress) -> Result<Report, RunError> {
    let iommu = RealIommu::open(plan.backend, plan.bdf)?;
    let limits = iommu.limits();
    let mut report = Report::new(plan.backend.name(), limits.granule(), plan.runs);
    report.real = Some(RealDevice::of(&iommu, plan.bdf.to_string(), Some(plan.index)));
    let memory = format!("bar {}", plan.index);
    progress.begin(format!("{memory}: mapping and unmapping"), u64::from(plan.runs));
    report.rows.push(match measure(&iommu, plan, &limits, progress) {
        Ok(figures) => {
            report.size_bytes = figures.bytes;
            let series = series_of_bar(figures.bytes, figures.alignment);
            let (by, witness, verified_bytes) = (By::Bar(figures), None, 0);
            let figures = Figures { memory, spans: 1, by, verified_bytes, witness, series };
            Row::Figures(Box::new(figures))
        }
        Err(error) => Row::Failed { memory, failed: error.to_string() },
    });
    progress.clear();
    Ok(report)
}

/// Maps and unmaps the BAR so often. Each run maps it into the process anew, as whoever starts to
/// use a device does: the kernel finds no page of it there.
fn measure(
    iommu: &RealIommu,
    plan: &BarPlan,
    limits: &Limits,
    progress: &Progress,
) -> Result<BarFigures, BarError> {
    let (space, device) = iommu.space().ok_or(BarError::NoSpace)?;
    let mut series = Both::<Series>::default();
    let (mut bytes, mut alignment, mut requests) = (0, 0, Requests::default());
    for _ in 0..plan.runs {
        let bar = device.bar(plan.index)?;
        (bytes, alignment) = (bar.len(), bar.alignment());
        let range = room(limits, bytes, alignment).ok_or(BarError::NoRoom { bytes })?;
        let before = space.requests();
        let begin = Instant::now();
        let mapped = space.map_bar(&bar, 0..bytes, range.start(), Prot::READ_WRITE);
        series.map.add_map(begin.elapsed(), PinnerStats::default());
        mapped.map_err(BarError::Map)?;
        let begin = Instant::now();
        let unmapped = space.unmap(range).map_err(BarError::Unmap)?;
        series.unmap.add_unmap(begin.elapsed(), PinnerStats::default());
        requests = since(before, space.requests());
        let mappings = space.mappings();
        if unmapped != bytes || mappings != 0 {
            return Err(BarError::Left { range, unmapped, mappings });
        }
        progress.advance(1);
    }
    let (ioctls, times) = (Both::ioctls(requests), series.map(|each| Times::of(each, bytes)));
    Ok(BarFigures { bytes, alignment, ioctls, times })
}

/// The first IOVAs above 0 that are aligned so and have room.
fn room(limits: &Limits, bytes: u64, alignment: u64) -> Option<IovaRange> {
    limits.apertures.iter().find_map(|aperture| {
        let first = aperture.start().get().max(1).checked_next_multiple_of(alignment)?;
        let range = IovaRange::from_len(Iova::new(first), bytes).ok()?;
        (range.last() <= aperture.last()).then_some(range)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_gets_aligned_iovas_within_an_aperture() {
        let aperture = |first, last| IovaRange::new(Iova::new(first), Iova::new(last)).unwrap();
        let limits = Limits {
            apertures: vec![aperture(0, 0xfedf_ffff), aperture(0xfef0_0000, (1 << 39) - 1)],
            page_sizes: 4096,
            mappings_left: None,
        };
        let start = |bytes, alignment| room(&limits, bytes, alignment).map(|it| it.start().get());
        assert_eq!(start(4096, 4096), Some(4096));
        assert_eq!(start(2 << 30, 1 << 30), Some(1 << 30));
        assert_eq!(start(3 << 30, 1 << 30), Some(4 << 30));
        assert_eq!(start(508 << 30, 1 << 30), Some(4 << 30));
        assert_eq!(start(509 << 30, 1 << 30), None);
        assert_eq!(start(u64::MAX, 1 << 30), None);
    }
}
