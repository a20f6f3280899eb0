//! `dmaspan plan` says what mapping a layout will cost, and whether it will fail.

pub(crate) mod args;
mod devices;
mod layout_file;
mod metrics;
mod page;
mod process;
mod qemu;
mod report;
mod table;

use dmaspan_linux::machine::{MachineFiles, ProcessError};
use dmaspan_linux::plan::PlanError;
use dmaspan_linux::plan::forecast::{Forecast, PaperLayout, PaperLimits, PlanSeverity};

use crate::output::ReportFormat;
use args::PlanArgs;
use dmaspan_cli::json;
use dmaspan_cli::size::ByteSize;
use layout_file::LayoutError;
use qemu::QemuError;
use report::PlanReport;

/// A layout that was not planned.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanRunError {
    /// It was not read.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The device has no IOMMU that is known.
    #[error(transparent)]
    Device(#[from] dmaspan_linux::machine::DeviceIommuError),
    /// The command line was not read.
    #[error(transparent)]
    Qemu(#[from] QemuError),
    /// The process was not looked at.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The process has nothing that a device would be given.
    #[error("{0}")]
    Nothing(String),
    /// It was not planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// What is planned.
struct Source {
    /// What people call it.
    title: String,
    layout: PaperLayout,
    /// What should be known of it.
    notes: Vec<String>,
}

/// The report as it is printed, and whether mapping would do.
///
/// # Errors
///
/// [`PlanRunError`] where there is nothing to plan.
pub(crate) fn run(args: &PlanArgs) -> Result<(String, bool), PlanRunError> {
    let Source { title, layout, notes } = source(args)?;
    let forecast = Forecast::new(&layout)?;
    let text = match args.format {
        ReportFormat::Table => table::render(&title, &layout, &forecast, &notes),
        ReportFormat::Json => json::render(&PlanReport::new(&title, &layout, &forecast, &notes)),
        ReportFormat::Html => page::render(&title, &layout, &forecast, &notes),
        ReportFormat::Prometheus => metrics::render(&title, &layout, &forecast),
    };
    Ok((text, forecast.verdict() < PlanSeverity::Fails))
}

/// What the options name.
fn source(args: &PlanArgs) -> Result<Source, PlanRunError> {
    let machine = MachineFiles::at(&args.root);
    let mut source = match (&args.layout, &args.qemu_cmdline) {
        (None, Some(path)) => qemu::source(path, &machine, args)?,
        (Some(path), _) => {
            let layout = layout_file::read(path)?;
            Source { title: path.display().to_string(), layout, notes: Vec::new() }
        }
        (None, None) => process::source(args.pid.unwrap_or(0), args)?,
    };
    let layout = &mut source.layout;
    if let Some(iommu) = &args.iommu {
        layout.iommu = iommu.clone();
    }
    if let Some(bdf) = args.device {
        let found = machine.iommu_of(bdf)?;
        layout.iommu = found.iommu;
        layout.device_node = machine.node_of(bdf).or(layout.device_node);
        source.notes.extend(found.assumed);
    }
    if let Some(locked_by) = args.interface {
        layout.limits.locked_by = locked_by;
        layout.limits.mappings = PaperLimits::unlimited(locked_by).mappings;
    }
    layout.limits.memlock = args.memlock.map(ByteSize::bytes).or(layout.limits.memlock);
    layout.kernel = args.kernel.or(layout.kernel);
    // Words of a command line are anybody's, and a row of a table is a line.
    for region in &mut layout.regions {
        region.name = region.name.replace('\n', "?");
    }
    Ok(source)
}
