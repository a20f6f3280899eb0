//! `dmaspan devices` lists the PCI functions, and says what using each of them takes.

pub(crate) mod args;
mod report;
mod table;

use dmaspan_linux::Bdf;
use dmaspan_linux::pci::{Function, PciError, System};

use args::DevicesArgs;
use dmaspan_cli::json;
use report::Report;

use dmaspan_cli::options::OutputFormat;

/// The report as it is printed.
///
/// # Errors
///
/// [`PciError`] where there is no PCI, or no function that was asked for.
pub(crate) fn run(args: &DevicesArgs) -> Result<String, PciError> {
    let system = System::at(&args.root);
    let functions = chosen(&system, args)?;
    let report = Report::new(&system, &functions);
    Ok(match args.format {
        OutputFormat::Table => table::render(&report, args),
        OutputFormat::Json => json::render(&report),
    })
}

fn chosen(system: &System, args: &DevicesArgs) -> Result<Vec<Function>, PciError> {
    if !args.bdfs.is_empty() {
        let mut bdfs: Vec<Bdf> = Vec::new();
        for bdf in &args.bdfs {
            if !bdfs.contains(bdf) {
                bdfs.push(*bdf);
            }
        }
        return bdfs.into_iter().map(|bdf| system.device(bdf)).collect();
    }
    let mut functions = system.devices()?;
    functions.retain(|function| args.all || !function.class.is_bridge());
    Ok(functions)
}
