//! `dmaspan-bench io-pgtable`: what one call for a range saves against a call for each page.
//!
//! ```text
//! formats (by name) ──► cases (of its pages) ──► timing (threads, rounds) ──► report
//!                                                  └─ work: maps and unmaps, checks
//! ```

mod cases;
pub(crate) mod formats;
pub(crate) mod report;
mod timing;
mod work;

use std::thread;

use dmaspan::io_pgtable::{ConfigError, Format};

use crate::args::IoPgtableArgs;
use cases::Shape;
use dmaspan_cli::progress::Progress;
use formats::{FORMATS, NamedFormat};
use report::{FormatRows, Report};
use timing::Effort;
use work::BenchError;

/// What is measured of every format.
#[derive(Debug)]
pub(crate) struct Bench<'a> {
    threads: &'a [usize],
    effort: Effort,
    progress: &'a Progress,
}

/// Which format could not be measured, and why.
#[derive(Debug, thiserror::Error)]
#[error("{format}: {source}")]
pub(crate) struct FormatFailed {
    format: &'static str,
    source: BenchError,
}

/// Measures what is asked for.
///
/// # Errors
///
/// [`FormatFailed`] for the first format that does not do what it should.
pub(crate) fn run(args: &IoPgtableArgs, progress: &Progress) -> Result<Report, FormatFailed> {
    let effort = if args.quick { Effort::QUICK } else { Effort::FULL };
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
    let bench = Bench { threads: &threads, effort, progress };
    let measured = formats.into_iter().map(|format| {
        let rows = (format.measure)(&bench, format);
        rows.map_err(|source| FormatFailed { format: format.name, source })
    });
    let formats = measured.collect::<Result<_, _>>()?;
    progress.clear();
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    Ok(Report { rounds: effort.rounds, cpus, threads, formats })
}

impl Bench<'_> {
    /// Measures one format.
    fn format<F: Format>(
        &self,
        named: &'static NamedFormat,
        new_format: fn() -> Result<F, ConfigError>,
    ) -> Result<FormatRows, BenchError> {
        let shape = Shape::of(&new_format()?);
        let mut work = Vec::new();
        for &threads in self.threads {
            let count = u64::try_from(threads).unwrap_or(u64::MAX);
            let cases = shape.cases(count, self.effort.extent);
            work.extend(cases.into_iter().map(|case| (threads, case)));
        }
        let steps = u64::try_from(work.len()).unwrap_or(u64::MAX);
        self.progress.begin(format!("{}: {}", named.name, named.about), steps);
        let mut rows = FormatRows::new(named);
        for (threads, case) in &work {
            let times = timing::measure(new_format, case, *threads, self.effort)?;
            rows.add(case, *threads, times);
            self.progress.advance(1);
        }
        Ok(rows)
    }
}
