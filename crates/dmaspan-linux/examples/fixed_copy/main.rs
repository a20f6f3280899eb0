//! Copies a file with fixed buffers of io_uring: several blocks at a time, past the page cache.
//!
//! ```text
//! fixed_copy SRC DST [--block 256K] [--depth 16] [--memory best] [--force] [--compare]
//! ```
//!
//! With `--compare` it copies the file by plain loops too, in turns, and prints what each took.

mod compare;
mod copier;
mod error;
mod files;
mod plain;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use dmaspan_linux::MemoryKind;
use dmaspan_linux::fixed::{FixedPool, MemoryChoice, PoolOptions};
use indicatif::{ProgressBar, ProgressStyle};

use crate::copier::Copier;
use crate::error::CopyError;
use crate::files::{Caching, Existing, Source, Target};

/// Copies a file with fixed buffers of io_uring, past the page cache.
#[derive(Debug, Parser)]
struct Arguments {
    /// The file to copy.
    source: PathBuf,
    /// The new file.
    target: PathBuf,
    /// The bytes of each read and write.
    #[arg(long, default_value = "256K", value_parser = size)]
    block: u64,
    /// How many blocks at a time.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: u32,
    /// best, hugetlb, thp, base or memfd.
    #[arg(long, default_value = "best", value_parser = memory)]
    memory: MemoryChoice,
    /// Replace the target where it exists.
    #[arg(long)]
    force: bool,
    /// Copy by plain loops too, and compare.
    #[arg(long)]
    compare: bool,
    /// How many copies each way.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
}

/// Bytes, as a number with or without a unit.
fn size(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.to_ascii_uppercase() {
        upper if upper.ends_with('K') => (upper[..upper.len() - 1].to_owned(), 1 << 10),
        upper if upper.ends_with('M') => (upper[..upper.len() - 1].to_owned(), 1 << 20),
        upper => (upper, 1),
    };
    let number = digits.parse::<u64>().map_err(|error| error.to_string())?;
    number.checked_mul(unit).ok_or_else(|| "that is too large".to_owned())
}

fn memory(name: &str) -> Result<MemoryChoice, String> {
    match name {
        "best" => Ok(MemoryChoice::Best),
        name => name.parse::<MemoryKind>().map(MemoryChoice::Only).map_err(|e| e.to_string()),
    }
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fixed_copy: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), CopyError> {
    let Arguments { block, depth, .. } = *arguments;
    let source = Source::open(&arguments.source, Caching::Past)?;
    let existing = if arguments.force { Existing::Overwrite } else { Existing::Refuse };
    let options = PoolOptions::new(block, depth).memory(arguments.memory);
    let pool = FixedPool::new(&options)?;
    eprintln!("memory: {}", pool.provenance());
    let mut copier = Copier::new(&pool, depth)?;
    let target = Target::create(&arguments.target, &source, existing, Caching::Past)?;
    eprintln!("buffers: {}", copier.method());
    for (path, caching) in [(&source.path, source.caching), (&target.path, target.caching)] {
        if caching == Caching::Through {
            let path = path.display();
            eprintln!("{path}: the file system has no O_DIRECT: through the page cache");
        }
    }
    if arguments.compare {
        compare::run(&mut copier, &pool, source, target, arguments.rounds)
    } else {
        let bar = progress(source.len);
        copier.copy(&source, &target, &bar)?;
        target.finish(source.len)?;
        bar.finish();
        Ok(())
    }
}

/// A bar on standard error; nothing where that is no terminal.
fn progress(len: u64) -> ProgressBar {
    let bar = ProgressBar::new(len);
    let template = "{wide_bar} {percent:>3} % {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}
