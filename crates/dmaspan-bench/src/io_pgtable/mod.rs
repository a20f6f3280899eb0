//! `dmaspan-bench io-pgtable`: what one call for a range saves against a call for each page.
//!
//! ```text
//! formats (by name) ──► cases (of its pages) ──► timing (threads, rounds) ──► report
//!                                                  └─ work: maps and unmaps, checks
//! ```

mod cases;
pub(crate) mod formats;
mod report;
mod timing;
mod work;

use dmaspan::io_pgtable::{ConfigError, Format};
use dmaspan_cli::progress::Progress;

use crate::args::{IoPgtableArgs, sorted};
use crate::failed::Failed;
use crate::report::{Fields, Report};
use crate::time;
use cases::Shape;
use formats::{FORMATS, NamedFormat};
use timing::Load;

/// What is measured of every format.
#[derive(Debug)]
pub(crate) struct Plan {
    formats: Vec<&'static NamedFormat>,
    threads: Vec<u64>,
    load: Load,
}

impl Plan {
    /// What `args` ask for.
    pub(crate) fn new(args: &IoPgtableArgs) -> Self {
        let mut formats: Vec<&'static NamedFormat> = Vec::new();
        for &format in &args.format_names {
            if !formats.iter().any(|other| other.name == format.name) {
                formats.push(format);
            }
        }
        if formats.is_empty() {
            formats.extend(FORMATS);
        }
        let load = if args.quick { timing::QUICK } else { timing::FULL };
        Self { formats, threads: sorted(&args.threads), load }
    }
}

/// Measures what is planned.
///
/// # Errors
///
/// For the first format that does not do what it should.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, Failed> {
    let mut rows = Vec::new();
    for format in &plan.formats {
        let measured = formats::measure(plan, format, progress);
        rows.extend(measured.map_err(Failed::at(format.name))?);
    }
    Ok(report::report(plan, time::cpus(), rows))
}

/// Measures one format.
fn measure<F: Format>(
    plan: &Plan,
    named: &'static NamedFormat,
    progress: &Progress,
    new_format: fn() -> Result<F, ConfigError>,
) -> Result<Vec<Fields>, Failed> {
    let shape = Shape::of(&new_format()?);
    let cases = |&threads: &u64| {
        let cases = shape.cases(threads, plan.load.extent);
        cases.into_iter().map(move |case| (threads, case))
    };
    let work: Vec<_> = plan.threads.iter().flat_map(cases).collect();
    let steps = u64::try_from(work.len()).unwrap_or(u64::MAX);
    progress.begin(format!("{}: {}", named.name, named.about), steps);
    let mut rows = Vec::new();
    for (threads, case) in &work {
        let times = timing::measure(new_format, case, *threads, plan.load)?;
        rows.extend(report::rows(named, case, *threads, &times));
        progress.advance(1);
    }
    Ok(rows)
}
