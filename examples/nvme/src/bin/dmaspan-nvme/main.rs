//! The program `dmaspan-nvme`: identifies, reads and measures an NVMe controller by VFIO.
//!
//! ```text
//! args ──► a space, and a controller ──► identify, read
//!             └──► bench: load ──► the driver; hand and bare in turn ──► report
//! ```
//!
//! Exit codes: 0 done; 1 something failed; 2 wrong usage.

mod args;
mod bare;
mod bench;
mod counting;
mod hand;
mod latency;
mod load;
mod report;
mod space;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use clap::error::ErrorKind;
use dmaspan_linux::replace::WholeFile;
use dmaspan_linux::stdio::{self, Printed};
use dmaspan_linux::{Memory, MemoryKind};
use dmaspan_nvme::vfio::VfioAccess;
use dmaspan_nvme::{Controller, QueueConfig};
use serde::Serialize;
use serde_json::json;

use args::{Command, Format, IdentifyArgs, Line, ReadArgs, Target};
use load::Failure;
use space::Space;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// Something failed.
const FAILED: u8 = 1;
/// The command line asks for what cannot be done.
const WRONG_USAGE: u8 = 2;
/// The most bytes that are read at once.
const AT_ONCE: u64 = 4 << 20;

fn main() -> ExitCode {
    let line = match Line::try_parse() {
        Ok(line) => line,
        Err(error) => return not_parsed(&error),
    };
    let done = match &line.command {
        Command::Identify(args) => identify(args),
        Command::Read(args) => read(args),
        Command::Bench(args) => bench::run(args).and_then(|report| match args.format {
            Format::Table => print(&report.table()),
            Format::Json => {
                if let Some(note) = report.note() {
                    let _ = writeln!(io::stderr(), "note: {}", stdio::clean_line(&note));
                }
                print_json(&report)
            }
        }),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

fn failed(error: &Failure) -> ExitCode {
    let _ = writeln!(io::stderr(), "error: {}", stdio::clean_line(&error.to_string()));
    ExitCode::from(FAILED)
}

/// The space and the controller of a target, which is started.
type Started = (Space, Controller<VfioAccess>);

fn start(target: &Target) -> Result<Started, Failure> {
    let (space, access) = Space::open(target)?;
    Ok((space, Controller::new(access, 1)?))
}

fn identify(args: &IdentifyArgs) -> Result<(), Failure> {
    let (_space, mut controller) = start(&args.target)?;
    let namespace = controller.namespace(1)?;
    let info = controller.info().clone();
    controller.shutdown([])?;
    let (blocks, block) = (namespace.blocks(), namespace.block_bytes());
    match args.format {
        Format::Json => print_json(&json!({
            "model": info.model,
            "serial": info.serial,
            "max_transfer_bytes": info.max_transfer,
            "sgls": format!("{:?}", info.sgls).to_lowercase(),
            "blocks": blocks,
            "block_bytes": block,
        })),
        Format::Table => {
            let most = info.max_transfer.map_or("any".into(), |bytes| bytes.to_string());
            print(&format!(
                "model         {}\nserial        {}\nmax transfer  {most} bytes\n\
                 SGLs          {:?}\nnamespace 1   {blocks} blocks of {block} bytes\n",
                info.model, info.serial, info.sgls
            ))
        }
    }
}

fn read(args: &ReadArgs) -> Result<(), Failure> {
    if args.out.is_none() && io::stdout().is_terminal() {
        return Err("the bytes of a disk do not go to a terminal: name a file by --out".into());
    }
    let mut file = match &args.out {
        Some(path) => Some(
            WholeFile::at(path)
                .map_err(|error| format!("{} cannot be written: {error}", path.display()))?,
        ),
        None => None,
    };
    let (space, mut controller) = start(&args.target)?;
    let namespace = controller.namespace(1)?;
    let memory = Arc::new(Memory::new(MemoryKind::thp_for(AT_ONCE), AT_ONCE)?);
    let buffer = space.buffer(&memory)?;
    let mut queue = controller.create_queue(QueueConfig::new(2))?;
    let block = namespace.block_bytes();
    let mut bytes = vec![0; usize::try_from(AT_ONCE)?];
    let (mut lba, mut left) = (args.lba, args.blocks);
    while left > 0 {
        let count = left.min(AT_ONCE / block);
        queue.read(&namespace, lba, &buffer, 0..count * block)?;
        let part = bytes.get_mut(..usize::try_from(count * block)?).unwrap_or_default();
        memory.read(0, part)?;
        match &mut file {
            Some(file) => file.write_all(part)?,
            None if stdio::write(part).map_err(not_written)? == Printed::NobodyReads => break,
            None => {}
        }
        lba += count;
        left -= count;
    }
    // All of it was read, however the controller ends.
    let ended = controller.shutdown([queue]);
    file.map_or(Ok(()), WholeFile::finish)?;
    Ok(ended?)
}

/// Prints a result. Where nobody reads it any more there is nobody to tell.
fn print(text: &str) -> Result<(), Failure> {
    stdio::print(text).map(drop).map_err(not_written)
}

/// Prints a result for programs.
fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    stdio::print_json(&report::json(value)).map(drop).map_err(not_written)
}

fn not_written(error: io::Error) -> Failure {
    format!("the output cannot be written: {error}").into()
}

/// What was asked for instead of a run, or why the command line is wrong: that in one line.
fn not_parsed(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return match print(&error.render().to_string()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(&error),
        };
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        // On standard error, where nothing can be said of a failure.
        let _ = error.print();
    } else {
        let message = error.to_string();
        let lines = message.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
        let words: Vec<&str> =
            lines.filter(|line| !line.is_empty() && !line.starts_with("tip:")).collect();
        let words = stdio::clean_line(&words.join(" "));
        let _ = writeln!(io::stderr(), "{words} (`--help` says more)");
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(WRONG_USAGE))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_read_of_no_device_leaves_the_file_as_it_was() {
        let folder = std::env::temp_dir().join(format!("dmaspan-nvme-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let path = folder.join("disk.img");
        fs::write(&path, b"before").unwrap();
        let out = path.to_str().unwrap();
        let line =
            ["dmaspan-nvme", "read", "--lba", "0", "--blocks", "1", "--out", out, "ffff:ff:1f.7"];
        let Command::Read(args) = Line::try_parse_from(line).unwrap().command else { panic!() };
        read(&args).unwrap_err();
        let names: Vec<_> =
            fs::read_dir(&folder).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!((fs::read(&path).unwrap(), names), (b"before".into(), vec!["disk.img".into()]));
        fs::remove_dir_all(&folder).unwrap();
    }
}
