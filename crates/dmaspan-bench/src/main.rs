//! The program `dmaspan-bench`: measures each part of the stack by itself.
//!
//! ```text
//! args ──► io_pgtable (page tables alone, by format) ──► report
//! args ──► dma (IOVAs, tables and flushes, as a driver's call) ──► report
//! args ──► container (user memory and BARs, as a VMM's call) ──► report
//! args ──► swiotlb (bounce buffers, as jobs of fio use them) ──► report
//! args ──► regbuf (registered buffers, as a storage engine uses them) ──► report
//! args ──► fixed (reads of this machine's kernel, registered or not) ──► report
//! ```
//!
//! Exit codes: 0 done; 1 a check failed; 2 wrong usage.

mod args;
mod container;
mod crew;
mod dma;
mod fixed;
mod io_pgtable;
mod models;
mod regbuf;
mod swiotlb;

use std::borrow::Borrow;
use std::convert::Infallible;
use std::error::Error;
use std::process::ExitCode;

use clap::Parser;
use dmaspan::Prot;
use dmaspan_cli::options::OutputFormat;
use dmaspan_cli::program::{FAILED, WRONG_USAGE, fail, not_parsed, print_text};
use dmaspan_cli::progress::Progress;
use dmaspan_cli::text::Marks;
use dmaspan_cli::{hold, json};
use serde::Serialize;

use args::{Args, Command};

/// The benchmarks, in the order of the help.
const COMMANDS: [&str; 6] = ["io-pgtable", "dma", "container", "swiotlb", "regbuf", "fixed"];

/// What a device may do with what is mapped for it.
const PROT: Prot = Prot::READ_WRITE.union(Prot::CACHE);

fn main() -> ExitCode {
    let command = match Args::try_parse() {
        Ok(args) => args.command,
        Err(error) => return not_parsed(&error, "dmaspan-bench", &COMMANDS),
    };
    match command {
        Command::IoPgtable(args) => bench(
            args.format,
            Ok::<_, Infallible>(args),
            io_pgtable::run,
            io_pgtable::report::render,
        ),
        Command::Dma(args) => {
            bench(args.format, dma::Plan::new(&args), dma::run, dma::report::render)
        }
        Command::Container(args) => {
            bench(args.format, container::plan(&args), container::run, container::report::render)
        }
        Command::Swiotlb(args) => {
            bench(args.format, swiotlb::plan(&args), swiotlb::run, swiotlb::report::render)
        }
        Command::Regbuf(args) => {
            bench(args.format, regbuf::plan(&args), regbuf::run, regbuf::report::render)
        }
        Command::Fixed(args) => {
            bench(args.format, fixed::plan(&args), fixed::run, fixed::report::render)
        }
        Command::HoldHugetlb { kind, bytes } => hold::hold(kind, bytes),
    }
}

/// Measures what is planned, where it can be, and prints the report.
fn bench<P: Borrow<Q>, Q, R: Serialize, E: Error>(
    format: OutputFormat,
    plan: Result<P, impl Error>,
    run: impl Fn(&Q, &Progress) -> Result<R, E>,
    render: impl Fn(&R, Marks) -> String,
) -> ExitCode {
    let plan = match plan {
        Ok(plan) => plan,
        Err(error) => return fail(WRONG_USAGE, &error.to_string()),
    };
    let report = match run(plan.borrow(), &Progress::on_stderr()) {
        Ok(report) => report,
        Err(error) => return fail(FAILED, &error.to_string()),
    };
    let text = match format {
        OutputFormat::Table => render(&report, Marks::of_stdout()),
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
            &["dmaspan-bench", "io-pgtable", "--format-name", "arm"][..],
            &["dmaspan-bench", "io-pgtable", "--threads", "0"],
            &["dmaspan-bench", "dma", "-t", "1025"],
            &["dmaspan-bench", "dma", "-n", "0"],
            &["dmaspan-bench", "dma", "-t", "1", "--quick"],
            &["dmaspan-bench", "dma", "--lazy", "--strict"],
            &["dmaspan-bench", "container", "--runs", "0"],
            &["dmaspan-bench", "container", "--size", "much"],
            &["dmaspan-bench", "container", "--quick", "--runs", "2"],
            &["dmaspan-bench", "swiotlb", "--jobs", "0"],
            &["dmaspan-bench", "swiotlb", "--block", "much"],
            &["dmaspan-bench", "regbuf", "--case", "paper"],
            &["dmaspan-bench", "regbuf", "--size", "much"],
            &["dmaspan-bench", "regbuf", "--quick", "--runs", "2"],
            &["dmaspan-bench", "fixed"],
            &["dmaspan-bench", "fixed", "disk", "--depth", "0"],
            &["dmaspan-bench", "fixed", "disk", "--block", "much"],
        ] {
            let error = Args::try_parse_from(line).unwrap_err();
            assert_eq!(error.exit_code(), i32::from(WRONG_USAGE), "{line:?}");
            let text = one_line(&error.to_string(), "dmaspan-bench dma");
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
