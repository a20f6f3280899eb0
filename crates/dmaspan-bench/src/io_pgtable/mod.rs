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

use crate::args::IoPgtableArgs;
use crate::failed::Failed;
use crate::report::{Fields, Report};
use crate::time;
use cases::Shape;
use formats::{FORMATS, NamedFormat};
use timing::Load;

/// What is measured of every format.
#[derive(Debug)]
pub(crate) struct Bench<'a> {
    threads: &'a [usize],
    load: Load,
    progress: &'a Progress,
}

/// Measures what is asked for.
///
/// # Errors
///
/// For the first format that does not do what it should.
pub(crate) fn run(args: &IoPgtableArgs, progress: &Progress) -> Result<Report, Failed> {
    let load = if args.quick { timing::QUICK } else { timing::FULL };
    let mut threads = args.threads.clone();
    threads.sort_unstable();
    threads.dedup();
    let mut formats: Vec<&'static NamedFormat> = Vec::new();
    for &format in &args.format_names {
        if !formats.iter().any(|other| other.name == format.name) {
            formats.push(format);
        }
    }
    if formats.is_empty() {
        formats.extend(FORMATS);
    }
    let bench = Bench { threads: &threads, load, progress };
    let mut rows = Vec::new();
    for format in &formats {
        rows.extend((format.measure)(&bench, format).map_err(Failed::at(format.name))?);
    }
    Ok(report::report(load.effort.rounds, time::cpus(), &threads, &formats, rows))
}

impl Bench<'_> {
    /// Measures one format.
    fn format<F: Format>(
        &self,
        named: &'static NamedFormat,
        new_format: fn() -> Result<F, ConfigError>,
    ) -> Result<Vec<Fields>, Failed> {
        let shape = Shape::of(&new_format()?);
        let mut work = Vec::new();
        for &threads in self.threads {
            let count = u64::try_from(threads).unwrap_or(u64::MAX);
            let cases = shape.cases(count, self.load.extent);
            work.extend(cases.into_iter().map(|case| (threads, case)));
        }
        let steps = u64::try_from(work.len()).unwrap_or(u64::MAX);
        self.progress.begin(format!("{}: {}", named.name, named.about), steps);
        let mut rows = Vec::new();
        for (threads, case) in &work {
            let times = timing::measure(new_format, case, *threads, self.load)?;
            rows.extend(report::rows(named, case, *threads, &times));
            self.progress.advance(1);
        }
        Ok(rows)
    }
}
