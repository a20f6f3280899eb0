//! The program `dmaspan`: maps real memory for a device, measures and verifies.
//!
//! ```text
//! args ──► plan ──► run ──► measure (a row for each kind of memory) ──► report (table, json)
//!           ▲                 ├─ soft_iommu: container, tables, IOTLB
//!           │                 ├─ real_iommu: a device whose memory the kernel maps
//!        machine              ├─ verify, bus: a device uses what is mapped
//!                             ├─ pinned: what the kernel counts as pinned
//!                             ├─ per_page: the same table work one page at a time
//!                             └─ hold: hugetlb pages, given back however the process ends
//!           └──────► bar (a device's registers, mapped by real_iommu) ──► the same report
//! args ──► devices (PCI functions, and what using them takes) ──► its own table, json
//! args ──► bench (page tables alone, by format) ──► report
//! args ──► bench_dma (IOVAs, tables and flushes, as a driver's call) ──► report
//! args ──► bench_container (user memory and BARs, as a VMM's call) ──► report
//! args ──► bench_swiotlb (bounce buffers, as jobs of fio use them) ──► report
//! args ──► bench_regbuf (registered buffers, as a storage engine uses them) ──► report
//! args ──► bench_fixed (reads of this machine's kernel, registered or not) ──► report
//! ```
//!
//! Exit codes: 0 done; 1 the check or the mapping failed; 2 wrong usage.

mod args;
mod bar;
mod bench;
mod bench_container;
mod bench_dma;
mod bench_fixed;
mod bench_regbuf;
mod bench_swiotlb;
mod bus;
mod crew;
mod devices;
mod hold;
mod left_over;
mod machine;
mod measure;
mod per_page;
mod pinned;
mod plan;
mod progress;
mod real_iommu;
mod report;
mod run;
mod size;
mod soft_iommu;
mod stats;
mod verify;

use std::borrow::Borrow;
use std::convert::Infallible;
use std::env;
use std::error::Error;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use dmaspan_linux::stdio;
use serde::Serialize;

use args::{Args, BenchWhat, Command, Format, MapArgs};
use devices::args::DevicesArgs;
use machine::Machine;
use plan::Planned;
use progress::Progress;
use report::Report;
use report::text::Marks;

/// The check or the mapping failed.
const FAILED: u8 = 1;
/// The command line asks for what cannot be done.
const WRONG_USAGE: u8 = 2;

fn main() -> ExitCode {
    match Args::try_parse() {
        Ok(Args { command: Command::Map(args) }) => map(&args),
        Ok(Args { command: Command::Devices(args) }) => devices(&args),
        Ok(Args { command: Command::Bench { what } }) => bench(&what),
        Ok(Args { command: Command::HoldHugetlb { kind, bytes } }) => hold::hold(kind, bytes),
        Err(error) => not_parsed(&error),
    }
}

/// `dmaspan map`.
fn map(args: &MapArgs) -> ExitCode {
    let report = match Planned::new(args, &Machine::read()) {
        Ok(Planned::Memory(plan)) => run::run(&plan, &Progress::new()),
        Ok(Planned::Bar(plan)) => bar::run(&plan, &Progress::new()),
        Err(error) => return fail(WRONG_USAGE, &error.to_string()),
    };
    match report {
        Ok(report) => print(args.format, &report),
        Err(error) => fail(FAILED, &error.to_string()),
    }
}

/// `dmaspan devices`.
fn devices(args: &DevicesArgs) -> ExitCode {
    match devices::run(args) {
        Ok(text) => print_text(args.format, &text).unwrap_or(ExitCode::SUCCESS),
        Err(error) => fail(FAILED, &error.to_string()),
    }
}

/// `dmaspan bench`.
fn bench(what: &BenchWhat) -> ExitCode {
    match what {
        BenchWhat::IoPgtable(args) => {
            bench_by(args.format, Ok::<_, Infallible>(args), bench::run, bench::report::render)
        }
        BenchWhat::Dma(args) => {
            let plan = bench_dma::Plan::new(args);
            bench_by(args.format, plan, bench_dma::run, bench_dma::report::render)
        }
        BenchWhat::Container(args) => {
            let plan = bench_container::plan(args);
            bench_by(args.format, plan, bench_container::run, bench_container::report::render)
        }
        BenchWhat::Swiotlb(args) => {
            let plan = bench_swiotlb::plan(args);
            bench_by(args.format, plan, bench_swiotlb::run, bench_swiotlb::report::render)
        }
        BenchWhat::Regbuf(args) => {
            let plan = bench_regbuf::plan(args);
            bench_by(args.format, plan, bench_regbuf::run, bench_regbuf::report::render)
        }
        BenchWhat::Fixed(args) => {
            let plan = bench_fixed::plan(args);
            bench_by(args.format, plan, bench_fixed::run, bench_fixed::report::render)
        }
    }
}

/// Measures what is planned, where it can be, and prints the report.
fn bench_by<P: Borrow<Q>, Q, R: Serialize, E: Error>(
    format: Format,
    plan: Result<P, impl Error>,
    run: impl Fn(&Q, &Progress) -> Result<R, E>,
    render: impl Fn(&R, Marks) -> String,
) -> ExitCode {
    let plan = match plan {
        Ok(plan) => plan,
        Err(error) => return fail(WRONG_USAGE, &error.to_string()),
    };
    let report = match run(plan.borrow(), &Progress::new()) {
        Ok(report) => report,
        Err(error) => return fail(FAILED, &error.to_string()),
    };
    let text = match format {
        Format::Table => render(&report, Marks::of_stdout()),
        Format::Json => report::json::render(&report),
    };
    print_text(format, &text).unwrap_or(ExitCode::SUCCESS)
}

/// Prints a report, and says how it ended.
fn print(format: Format, report: &Report) -> ExitCode {
    let text = match format {
        Format::Table => report::table::render(report, Marks::of_stdout()),
        Format::Json => report::json::render(report),
    };
    if let Some(failed) = print_text(format, &text) {
        return failed;
    }
    let mut stderr = io::stderr();
    if format == Format::Json {
        for note in &report.notes {
            let _ = writeln!(stderr, "note: {note}");
        }
    }
    // In one terminal or file the table's verdict has just said it.
    if format == Format::Json || !is_one_file() {
        for failure in report.failures() {
            let _ = writeln!(stderr, "error: {failure}");
        }
    }
    if report.passed() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) }
}

/// Prints a report to standard output; the exit code where that fails.
fn print_text(format: Format, text: &str) -> Option<ExitCode> {
    let printed = match format {
        Format::Table => stdio::print(text),
        Format::Json => stdio::print_json(text),
    };
    // Where nobody listens any more there is nobody to tell.
    let error = printed.err()?;
    Some(fail(FAILED, &format!("the report cannot be written: {error}")))
}

/// Whether standard output and standard error are one terminal or file.
fn is_one_file() -> bool {
    let file = |stream: &dyn Fn() -> io::Result<File>| {
        stream().and_then(|file| file.metadata()).map(|it| (it.dev(), it.ino())).ok()
    };
    let out = file(&|| io::stdout().as_fd().try_clone_to_owned().map(File::from));
    out.is_some() && out == file(&|| io::stderr().as_fd().try_clone_to_owned().map(File::from))
}

fn fail(code: u8, why: &str) -> ExitCode {
    let _ = writeln!(io::stderr(), "error: {why}");
    ExitCode::from(code)
}

/// What was asked for instead of a run, or why the command line is wrong: that in one line.
fn not_parsed(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let text = error.render();
        let text = if Marks::of_stdout().is_coloured() {
            text.ansi().to_string()
        } else {
            text.to_string()
        };
        return print_text(Format::Table, &text).unwrap_or(ExitCode::SUCCESS);
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        // On standard error, where nothing can be said of a failure.
        let _ = error.print();
    } else {
        let is = |place, word: &str| env::args_os().nth(place).is_some_and(|found| found == word);
        let benches = ["dma", "container", "swiotlb", "regbuf", "fixed"];
        let command = match benches.iter().find(|part| is(2, part)) {
            _ if is(1, "devices") => "dmaspan devices".to_owned(),
            _ if !is(1, "bench") => "dmaspan map".to_owned(),
            part => format!("dmaspan bench {}", part.unwrap_or(&"io-pgtable")),
        };
        let _ = writeln!(io::stderr(), "{}", one_line(&error.to_string(), &command));
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(WRONG_USAGE))
}

/// The lines of a message that say what is wrong, as one, and whose help says more.
fn one_line(message: &str, command: &str) -> String {
    let lines = message.lines().map(str::trim);
    let about_it = lines.take_while(|line| {
        !line.starts_with("Usage:") && !line.starts_with("For more information")
    });
    let words: Vec<&str> =
        about_it.filter(|line| !line.is_empty() && !line.starts_with("tip:")).collect();
    format!("{} (`{command} --help` says more)", words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_of_the_command_line_is_one_line() {
        for line in [
            &["dmaspan", "map", "--granule", "8k"][..],
            &["dmaspan", "map", "--backend", "vfio:5"],
            &["dmaspan", "map", "--backend", "kvm"],
            &["dmaspan", "map", "--memory", "thp,paper"],
            &["dmaspan", "map", "lots"],
            &["dmaspan", "map", "--runs", "0"],
            &["dmaspan", "map", "--bar", "6"],
            &["dmaspan", "map", "1G", "--bar", "0"],
            &["dmaspan", "map", "--bar", "0", "--memory", "thp"],
            &["dmaspan", "map", "--speed"],
            &["dmaspan", "map", "-1"],
            &["dmaspan", "mop"],
            &["dmaspan", "devices", "5"],
            &["dmaspan", "devices", "00:05.0", "--all"],
            &["dmaspan", "bench", "io-pgtable", "--format-name", "arm"],
            &["dmaspan", "bench", "io-pgtable", "--threads", "0"],
            &["dmaspan", "bench", "dma", "-t", "1025"],
            &["dmaspan", "bench", "dma", "-n", "0"],
            &["dmaspan", "bench", "dma", "-t", "1", "--quick"],
            &["dmaspan", "bench", "dma", "--lazy", "--strict"],
            &["dmaspan", "bench", "container", "--runs", "0"],
            &["dmaspan", "bench", "container", "--size", "much"],
            &["dmaspan", "bench", "container", "--quick", "--runs", "2"],
            &["dmaspan", "bench", "swiotlb", "--jobs", "0"],
            &["dmaspan", "bench", "swiotlb", "--block", "much"],
            &["dmaspan", "bench", "regbuf", "--case", "paper"],
            &["dmaspan", "bench", "regbuf", "--size", "much"],
            &["dmaspan", "bench", "regbuf", "--quick", "--runs", "2"],
            &["dmaspan", "bench", "fixed"],
            &["dmaspan", "bench", "fixed", "disk", "--depth", "0"],
            &["dmaspan", "bench", "fixed", "disk", "--block", "much"],
        ] {
            let error = Args::try_parse_from(line).unwrap_err();
            assert_eq!(error.exit_code(), i32::from(WRONG_USAGE), "{line:?}");
            let text = one_line(&error.to_string(), "dmaspan map");
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
