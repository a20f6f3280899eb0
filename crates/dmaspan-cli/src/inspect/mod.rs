//! `dmaspan inspect` says what IO page tables map, from dumps of them.
//!
//! ```text
//! args ──► memory (raw, ELF) ─► tables (a format) ─► domain (leaves, tables, faults) ──► report
//!     └──► debugfs, lines (texts) ────────────────────►                                   │
//!                          findings, diff ◄── what they say of it ──► table, page, metrics
//! ```

pub(crate) mod args;
mod debugfs;
mod devices;
mod diff;
mod domain;
mod extract;
mod findings;
mod fit;
mod lines;
mod memory;
mod metrics;
mod page;
mod report;
mod table;
mod tables;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::output::{ReportFormat, write_whole};
use args::InspectArgs;
use domain::{Domain, MOST_RUNS};
use memory::{FileMemory, Kind};
use report::{Questions, Report, Source};

/// The longest text that is read: debugfs has 130 bytes a leaf.
const MOST_TEXT: u64 = 4 << 30;

/// Why nothing was inspected.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The command line asks for what cannot be done.
    Usage(String),
    /// The dump cannot be read.
    Dump(String),
}

/// The report as it is printed.
///
/// # Errors
///
/// [`Failed`], in one line.
pub(crate) fn run(args: &InspectArgs) -> Result<String, Failed> {
    let kind = kind(args)?;
    check(args, kind)?;
    let read = read(args, kind, &args.files)?;
    if let (Some(place), Some(memory)) = (&args.tables, &read.memory) {
        let core = extract::core(&read.domains, memory);
        let core = core.map_err(|why| cannot(&args.files[0], &why))?;
        write_whole(place, &core).map_err(Failed::Dump)?;
    }
    let before = args.diff.clone().map(|file| read_other(args, kind, file)).transpose()?;
    let source = Source {
        files: args.files.iter().map(|file| file.display().to_string()).collect(),
        kind: match kind {
            Kind::Raw => "raw",
            Kind::Elf => "elf",
            Kind::Debugfs => "debugfs",
            Kind::Lines => "lines",
        },
        memory: read
            .memory
            .iter()
            .flat_map(FileMemory::segments)
            .map(|it| [it.start, it.last])
            .collect(),
        compared_with: args.diff.as_ref().map(|file| file.display().to_string()),
    };
    let questions = Questions { iovas: &args.iova, phys: &args.phys, before: before.as_deref() };
    let mut report = Report::new(source, &read.domains, read.memory.as_ref(), &questions);
    report.notes = read.notes;
    Ok(match args.format {
        ReportFormat::Table => table::render(&report),
        ReportFormat::Json => dmaspan_cli::json::render(&report),
        ReportFormat::Html => page::render(&report),
        ReportFormat::Prometheus => metrics::render(&report),
    })
}

/// What the files are.
fn kind(args: &InspectArgs) -> Result<Kind, Failed> {
    let mut found = None;
    let is_empty = |file: &PathBuf| matches!(memory::is_empty(file), Ok(true));
    // The kernel prints nothing for a device that it does not translate.
    let all_empty = args.files.iter().all(is_empty);
    for file in args.files.iter().chain(&args.diff) {
        if !all_empty && args.files.len() > 1 && is_empty(file) {
            continue;
        }
        let kind = match (memory::recognise(file), args.kind) {
            // Whatever it looks like; but what cannot be opened is nothing.
            (_, Some(kind)) if file.is_file() => kind,
            (kind, _) => kind.map_err(Failed::Dump)?,
        };
        if found.is_some_and(|found| found != kind) {
            let what = format!("{} is a dump of another kind than the first", file.display());
            return Err(Failed::Usage(what));
        }
        found = Some(kind);
    }
    found.ok_or_else(|| Failed::Usage("no file is given".to_owned()))
}

/// Refuses options that the kind of dump does not have.
fn check(args: &InspectArgs, kind: Kind) -> Result<(), Failed> {
    let refuse = |what: &str| Err(Failed::Usage(what.to_owned()));
    match kind {
        Kind::Raw | Kind::Elf => {
            if (args.root.is_empty() && args.device_table.is_empty()) || args.iommu.is_none() {
                return refuse(
                    "a dump of memory needs --root with the address of a table, and --iommu with \
                     its format (`dmaspan inspect --help` lists them); --device-table finds roots",
                );
            }
            if args.files.len() > 1 {
                return refuse("only debugfs's texts may be several files");
            }
            if kind == Kind::Elf && args.base.is_some() {
                return refuse("--base is for raw dumps: a core file says where its memory is");
            }
        }
        Kind::Debugfs | Kind::Lines => {
            if !args.root.is_empty() || !args.device_table.is_empty() || args.base.is_some() {
                return refuse(
                    "--root and --base are for dumps of memory: a text says where roots are",
                );
            }
            if args.tables.is_some() {
                return refuse("--tables is for dumps of memory: a text has no tables to copy");
            }
            if kind == Kind::Lines && (args.iommu.is_some() || args.files.len() > 1) {
                return refuse("a dump by lines is one file, and says what its tables are");
            }
        }
    }
    Ok(())
}

/// What a dump has.
struct Dump {
    domains: Vec<Domain>,
    memory: Option<FileMemory>,
    /// What is said of devices without a table.
    notes: Vec<String>,
}

/// The dump that is compared with, without its memory.
fn read_other(args: &InspectArgs, kind: Kind, file: PathBuf) -> Result<Vec<Domain>, Failed> {
    Ok(read(args, kind, &[file])?.domains)
}

fn read(args: &InspectArgs, kind: Kind, files: &[PathBuf]) -> Result<Dump, Failed> {
    let Some(file) = files.first() else {
        return Err(Failed::Usage("no file is given".to_owned()));
    };
    match kind {
        Kind::Raw | Kind::Elf => read_memory(args, kind, file),
        Kind::Lines => {
            let domains = lines::domains(&text(file)?).map_err(|why| cannot(file, &why))?;
            Ok(Dump { domains, memory: None, notes: Vec::new() })
        }
        Kind::Debugfs => {
            let mut domains: Vec<Domain> = Vec::new();
            let mut notes = Vec::new();
            for file in files {
                let found = debugfs::domains(&text(file)?, args.iommu);
                let found = found.map_err(|why| cannot(file, &why))?;
                if found.is_empty() {
                    notes.push(format!("not translated: {}", file.display()));
                }
                for domain in found {
                    match domains.iter_mut().find(|known| known.root == domain.root) {
                        Some(known) => known.devices.extend(domain.devices),
                        None => domains.push(domain),
                    }
                }
            }
            if domains.is_empty() {
                return Err(cannot(file, "it has no device that is translated"));
            }
            Ok(Dump { domains, memory: None, notes })
        }
    }
}

fn read_memory(args: &InspectArgs, kind: Kind, file: &Path) -> Result<Dump, Failed> {
    let opened = File::open(file).map_err(|error| cannot(file, &error.to_string()))?;
    let memory = match kind {
        Kind::Elf => FileMemory::elf(opened),
        _ => FileMemory::raw(opened, args.base.unwrap_or(0)),
    };
    let memory = memory.map_err(|why| cannot(file, &why))?;
    let iommu = args.iommu.ok_or_else(|| Failed::Usage("--iommu is missing".to_owned()))?;
    let mut left = MOST_RUNS;
    let (mut domains, mut notes): (Vec<Domain>, _) = (Vec::new(), Vec::new());
    for root in &args.root {
        let tables = iommu.tables().map_err(Failed::Usage)?;
        let read = Domain::read(tables.as_ref(), root.address, &memory, &mut left);
        let mut domain = read.map_err(|why| cannot(file, &format!("{why}{}", place(&memory))))?;
        domain.devices.extend(root.name.clone());
        if let Some(better) = fit::better(iommu, root.address, &memory) {
            domain.fault("another_format", 1, || {
                format!("the entries look much more like those of --iommu {better}")
            });
        }
        domains.push(domain);
    }
    if !args.device_table.is_empty() {
        let devices = devices::read(iommu.family, &args.device_table, &memory);
        let devices = devices.map_err(|why| cannot(file, &format!("{why}{}", place(&memory))))?;
        notes = devices.notes();
        domains.extend(of_devices(devices.translated, &memory, &mut left));
    }
    Ok(Dump { domains, memory: Some(memory), notes })
}

/// The domains of devices: those with one table share one. What cannot be read is a fault of it.
fn of_devices(
    devices: Vec<devices::Translated>,
    memory: &FileMemory,
    left: &mut usize,
) -> Vec<Domain> {
    let mut domains: Vec<Domain> = Vec::new();
    let mut kinds = Vec::new();
    for devices::Translated { device, kind, root } in devices {
        let same = kinds.iter().position(|known| *known == (kind, root));
        if let Some(domain) = same.and_then(|at| domains.get_mut(at)) {
            domain.devices.push(device);
            continue;
        }
        let read = kind.tables();
        let read = read.and_then(|tables| Domain::read(tables.as_ref(), root, memory, left));
        let mut domain = read.unwrap_or_else(|why| {
            let mut domain = Domain::new(Some(root), "page tables");
            domain.fault("no_table", 1, || why);
            domain
        });
        domain.devices.push(device);
        domains.push(domain);
        kinds.push((kind, root));
    }
    domains
}

/// What memory a dump has, for who looked elsewhere.
fn place(memory: &FileMemory) -> String {
    match memory.segments() {
        [] => String::new(),
        [one] => format!(" (the dump has {:#x}..={:#x})", one.start, one.last),
        [first, .., last] => {
            let count = memory.segments().len();
            format!(" (the dump has {count} parts of {:#x}..={:#x})", first.start, last.last)
        }
    }
}

/// A text file.
fn text(file: &Path) -> Result<String, Failed> {
    let opened = File::open(file).map_err(|error| cannot(file, &error.to_string()))?;
    let mut bytes = Vec::new();
    let read = opened.take(MOST_TEXT).read_to_end(&mut bytes);
    let read = read.map_err(|error| cannot(file, &error.to_string()))?;
    if read as u64 == MOST_TEXT {
        return Err(cannot(file, "it is longer than 4 GiB"));
    }
    String::from_utf8(bytes).map_err(|error| {
        let line = error.as_bytes().iter().take(error.utf8_error().valid_up_to());
        let line = 1 + line.filter(|byte| **byte == b'\n').count();
        cannot(file, &format!("line {line}: it is no text"))
    })
}

fn cannot(file: &Path, why: &str) -> Failed {
    Failed::Dump(format!("{} cannot be inspected: {why}", file.display()))
}
