//! The program `dmaspan-bench`: measures what `cargo xtask peers` has no code of Linux for.
//!
//! ```text
//! args ──► swiotlb (bounce buffers, as jobs of fio use them) ──► report
//! args ──► fixed (reads of this machine's kernel, registered or not) ──► report
//! ```
//!
//! Each module plans what its arguments ask for, measures it (with `crew` and `time`, against
//! `models`), and returns a `report` of rows and tables, or what `failed`. Here both are printed.
//!
//! Begin with a benchmark's `args`, which its `--help` prints. The book says how each measures
//! ([method]) and what it found; `cargo xtask book` builds the book beside these pages.
//!
//! [method]: ../book/benchmarks/method.html
//!
//! Exit codes: 0 done; 1 a check failed; 2 wrong usage.

mod args;
mod crew;
mod failed;
mod fixed;
mod models;
mod report;
mod swiotlb;
mod time;

use std::process::ExitCode;

use clap::Parser;
use dmaspan_cli::machine::Machine;
use dmaspan_cli::options::OutputFormat;
use dmaspan_cli::program::{FAILED, WRONG_USAGE, fail, not_parsed, print_text};
use dmaspan_cli::progress::Progress;
use dmaspan_cli::{hold, json};

use args::{Args, Command, Printed};
use failed::Failed;
use report::Report;

/// The benchmarks, in the order of the help.
const COMMANDS: [&str; 2] = ["swiotlb", "fixed"];

fn main() -> ExitCode {
    let command = match Args::try_parse() {
        Ok(args) => args.command,
        Err(error) => return not_parsed(&error, "dmaspan-bench", &COMMANDS),
    };
    match command {
        Command::Swiotlb(args) => {
            measure(args, |args, _| swiotlb::Plan::new(args, time::cpus()), swiotlb::run)
        }
        Command::Fixed(args) => measure(args, fixed::Plan::new, fixed::run),
        Command::HoldHugetlb { kind, bytes } => hold::hold(kind, bytes),
    }
}

/// Plans what is asked for on this machine, measures it, and prints the report.
fn measure<A: clap::Args, P>(
    Printed { args, format }: Printed<A>,
    plan: impl Fn(&A, &Machine) -> Result<P, Failed>,
    run: impl Fn(&P, &Progress) -> Result<Report, Failed>,
) -> ExitCode {
    let progress = Progress::on_stderr();
    let plan = plan(&args, &Machine::read()).map_err(|error| (WRONG_USAGE, error));
    let report = plan.and_then(|plan| run(&plan, &progress).map_err(|error| (FAILED, error)));
    let report = match report {
        Ok(report) => report,
        Err((code, error)) => return fail(code, &error.to_string()),
    };
    progress.clear();
    let text = match format {
        OutputFormat::Table => report.render(),
        OutputFormat::Json => json::render(&report),
    };
    print_text(format, &text).unwrap_or(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use dmaspan_cli::program::one_line;

    use super::*;

    #[test]
    fn every_error_of_the_command_line_is_one_line() {
        for line in [
            &["dmaspan-bench", "swiotlb", "--jobs", "0"][..],
            &["dmaspan-bench", "swiotlb", "--block", "much"],
            &["dmaspan-bench", "fixed"],
            &["dmaspan-bench", "fixed", "disk", "--depth", "0"],
            &["dmaspan-bench", "fixed", "disk", "--block", "much"],
        ] {
            let error = Args::try_parse_from(line).unwrap_err();
            assert_eq!(error.exit_code(), i32::from(WRONG_USAGE), "{line:?}");
            let text = one_line(&error.to_string(), "dmaspan-bench swiotlb");
            assert!(text.starts_with("error: ") && !text.contains('\n'), "{text}");
            assert!(!text.contains("Usage") && !text.contains("tip:"), "{text}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }
}
