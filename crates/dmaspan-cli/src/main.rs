//! The program `dmaspan` maps real memory for a device, measures and verifies.
//!
//! ```text
//! args ─► map_plan ─► run ──► measure (a row for each kind of memory) ──► report (table, json,
//!           ▲                 ├─ soft_iommu: container, tables, a device      page, metrics)
//!           │                 │  behind them
//!           │                 ├─ real_iommu: a device whose memory the kernel maps
//!        machine              ├─ verify, bus: a device uses what is mapped
//!                             ├─ pinned: what the kernel counts as pinned
//!                             ├─ per_page: the same table work one page at a time
//!                             └─ hold: hugetlb pages, given back however the process ends
//!           └──────► bar (a device's registers, mapped by real_iommu) ──► the same report
//! args ──► inspect (IO page tables in a dump) ──► its own table, json, page, metrics
//! args ──► plan (a layout or a process, planned on paper) ──► its own table, json, metrics
//! args ──► doctor (what of the machine makes mapping fail or slow) ──► its own list, json; the
//!                                                      first paragraph of map's report
//! args ──► devices (PCI functions, and what using them takes) ──► its own table, json
//! ```
//!
//! Exit codes: 0 done; 1 the check or the mapping failed; 2 wrong usage.

mod args;
mod bar;
mod bus;
mod devices;
mod doctor;
mod html;
mod inspect;
mod map_plan;
mod measure;
mod metrics;
mod output;
mod per_page;
mod pinned;
mod plan;
mod real_iommu;
mod report;
mod run;
mod soft_iommu;
mod verify;

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use dmaspan_cli::machine::Machine;
use dmaspan_cli::program::{FAILED, WRONG_USAGE, fail, not_parsed, print_text, tell};
use dmaspan_cli::progress::Progress;
use dmaspan_cli::{hold, json};
use dmaspan_linux::machine::MachineFiles;

use args::{Args, Command, MapArgs};
use devices::args::DevicesArgs;
use doctor::DoctorArgs;
use inspect::Failed;
use inspect::args::InspectArgs;
use map_plan::PlannedRun;
use output::{ReportFormat, write_report};
use plan::args::PlanArgs;
use report::Report;

/// The commands, in the order of the help.
const COMMANDS: [&str; 5] = ["map", "plan", "doctor", "devices", "inspect"];

fn main() -> ExitCode {
    match Args::try_parse() {
        Ok(Args { command: Command::Map(args) }) => map(&args),
        Ok(Args { command: Command::Plan(args) }) => plan(&args),
        Ok(Args { command: Command::Doctor(args) }) => doctor(&args),
        Ok(Args { command: Command::Devices(args) }) => devices(&args),
        Ok(Args { command: Command::Inspect(args) }) => inspect(&args),
        Ok(Args { command: Command::HoldHugetlb { kind, bytes } }) => hold::hold(kind, bytes),
        Err(error) => not_parsed(&error, "dmaspan", &COMMANDS),
    }
}

/// `dmaspan map`.
fn map(args: &MapArgs) -> ExitCode {
    // A run reserves pages, and so would change what is found.
    let machine = doctor::checks(&MachineFiles::new());
    let report = match PlannedRun::new(args, &Machine::read()) {
        Ok(PlannedRun::Memory(plan)) => run::run(&plan, &Progress::on_stderr()),
        Ok(PlannedRun::Bar(plan)) => bar::run(&plan, &Progress::on_stderr()),
        Err(error) => return fail(WRONG_USAGE, &error.to_string()),
    };
    match report {
        Ok(report) => {
            let report = Report { machine, ..report };
            let page = |file: &PathBuf| {
                write_report(file, ReportFormat::Html, &report::page::render(&report))
            };
            match args.report.as_ref().map(page).transpose() {
                Ok(_) => print(args.format, &report),
                Err(why) => fail(FAILED, &why),
            }
        }
        Err(error) => fail(FAILED, &error.to_string()),
    }
}

/// `dmaspan inspect`.
fn inspect(args: &InspectArgs) -> ExitCode {
    let text = match inspect::run(args) {
        Ok(text) => text,
        Err(Failed::Usage(why)) => return fail(WRONG_USAGE, &why),
        Err(Failed::Dump(why)) => return fail(FAILED, &why),
    };
    match &args.output {
        None => print_text(args.format.as_text(), &text).unwrap_or(ExitCode::SUCCESS),
        Some(file) => match write_report(file, args.format, &text) {
            Ok(()) => ExitCode::SUCCESS,
            Err(why) => fail(FAILED, &why),
        },
    }
}

/// `dmaspan plan`.
fn plan(args: &PlanArgs) -> ExitCode {
    match plan::run(args) {
        Ok((text, fits)) => {
            let done = if fits { ExitCode::SUCCESS } else { ExitCode::from(FAILED) };
            let failed = match &args.output {
                Some(path) => {
                    let written = write_report(path, args.format, &text);
                    written.err().map(|why| fail(FAILED, &why))
                }
                None => print_text(args.format.as_text(), &text),
            };
            failed.unwrap_or(done)
        }
        Err(error) => fail(WRONG_USAGE, &error.to_string()),
    }
}

/// `dmaspan doctor`.
fn doctor(args: &DoctorArgs) -> ExitCode {
    let (text, is_right) = doctor::run(args);
    let done = if is_right { ExitCode::SUCCESS } else { ExitCode::from(FAILED) };
    print_text(args.format, &text).unwrap_or(done)
}

/// `dmaspan devices`.
fn devices(args: &DevicesArgs) -> ExitCode {
    match devices::run(args) {
        Ok(text) => print_text(args.format, &text).unwrap_or(ExitCode::SUCCESS),
        Err(error) => fail(FAILED, &error.to_string()),
    }
}

/// Prints a report, and says how it ended.
fn print(format: ReportFormat, report: &Report) -> ExitCode {
    let text = match format {
        ReportFormat::Table => report::table::render(report),
        ReportFormat::Json => json::render(report),
        ReportFormat::Html => report::page::render(report),
        ReportFormat::Prometheus => report::metrics::render(report),
    };
    if let Some(failed) = print_text(format.as_text(), &text) {
        return failed;
    }
    if format != ReportFormat::Table {
        for note in &report.notes {
            tell("note", note);
        }
    }
    // In one terminal or file the table's verdict has just said it.
    if format != ReportFormat::Table || !is_one_file() {
        for failure in report.failures() {
            tell("error", &failure);
        }
    }
    if report.passed() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) }
}

/// Whether standard output and standard error are one terminal or file.
fn is_one_file() -> bool {
    let file = |stream: &dyn Fn() -> io::Result<File>| {
        stream().and_then(|file| file.metadata()).map(|it| (it.dev(), it.ino())).ok()
    };
    let out = file(&|| io::stdout().as_fd().try_clone_to_owned().map(File::from));
    out.is_some() && out == file(&|| io::stderr().as_fd().try_clone_to_owned().map(File::from))
}

#[cfg(test)]
mod tests {
    use dmaspan_cli::program::one_line;

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
            &["dmaspan", "inspect"],
            &["dmaspan", "inspect", "x", "--iommu", "intel"],
            &["dmaspan", "inspect", "x", "--root", "0xg"],
            &["dmaspan", "inspect", "x", "--iova", "-1"],
            &["dmaspan", "inspect", "x", "--format", "pdf"],
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
