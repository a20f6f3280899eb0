//! Copies a file with fixed buffers of io_uring: several blocks at a time, past the page cache.
//!
//! ```text
//! fixed_copy SOURCE TARGET [--block 256K] [--depth 16] [--memory best] [--force] [--compare]
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
use std::time::{Duration, Instant};

use clap::Parser;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use dmaspan_linux::MemoryKind;
use dmaspan_linux::fixed::{FixedPool, MemoryChoice, PoolOptions};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use crate::copier::Copier;
use crate::error::CopyError;
use crate::files::{Caching, Existing, SECTOR, Source, Target};

/// The longest block: that of a registered buffer.
const LONGEST: usize = 1 << 30;

const LAST_WORDS: &str = "\
KIND: best takes hugetlb pages, else thp (transparent huge pages), else base;
the others are thp, base, hugetlb, hugetlb-1g, memfd and memfd-hugetlb.

The copy is TARGET.part until the disk has all of it, and then put in its place.
It gets the permissions of the source, but neither its owner nor its times.
Holes are read as zeros and written: a sparse source needs its full length.";

/// Copies a file past the page cache, by fixed buffers of io_uring.
#[derive(Debug, Parser)]
#[command(after_help = LAST_WORDS)]
struct Arguments {
    /// The file to copy.
    source: PathBuf,
    /// The new file.
    target: PathBuf,
    /// Bytes of each read and write.
    #[arg(long, value_name = "BYTES", default_value = "256K", value_parser = size)]
    block: u64,
    /// How many blocks at a time.
    #[arg(long, value_name = "N", default_value_t = 16)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: u32,
    /// Kind of the buffers' memory.
    #[arg(long, value_name = "KIND", default_value = "best")]
    #[arg(value_parser = memory(), hide_possible_values = true)]
    memory: MemoryChoice,
    /// Replace the target where it exists.
    #[arg(long)]
    force: bool,
    /// Copy by plain loops too, and say what each took.
    #[arg(long)]
    compare: bool,
    /// How many copies each way.
    #[arg(long, value_name = "N", default_value_t = 5, requires = "compare")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
}

/// Bytes, as a number with or without a unit.
fn size(text: &str) -> Result<u64, String> {
    let upper = text.to_ascii_uppercase();
    let (digits, unit) = match upper.strip_suffix('K') {
        Some(digits) => (digits, 1 << 10),
        None => upper.strip_suffix('M').map_or((&*upper, 1), |digits| (digits, 1 << 20)),
    };
    let bytes = digits.parse::<usize>().ok().and_then(|number| number.checked_mul(unit));
    bytes
        .filter(|bytes| (1..=LONGEST).contains(bytes) && bytes.is_multiple_of(SECTOR))
        .and_then(|bytes| u64::try_from(bytes).ok())
        .ok_or_else(|| "a multiple of 4K, as 64K or 1M, up to 1024M".to_owned())
}

/// `best`, or a kind of memory.
fn memory() -> impl TypedValueParser<Value = MemoryChoice> {
    let names = MemoryKind::ALL.map(MemoryKind::name);
    PossibleValuesParser::new(["best"].into_iter().chain(names)).try_map(|name| match &*name {
        "best" => Ok(MemoryChoice::Best),
        name => name.parse::<MemoryKind>().map(MemoryChoice::Only),
    })
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
    let mut copier = Copier::new(&pool, depth)?;
    let target = Target::create(&arguments.target, &source, existing, Caching::Past)?;
    tell(&pool, &copier, block);
    for (path, caching) in [(&source.path, source.caching), (&target.path, target.caching)] {
        if caching == Caching::Through {
            let path = path.display();
            eprintln!("note: {path}: no O_DIRECT on its file system: through the page cache");
        }
    }
    if arguments.compare {
        return compare::run(&mut copier, &pool, source, target, arguments.rounds);
    }
    let (len, start) = (source.len, Instant::now());
    let bar = progress(len);
    copier.copy(&source, &target, &bar)?;
    target.finish(len)?;
    bar.finish_and_clear();
    let (wall, bytes) = (start.elapsed(), HumanBytes(len));
    let rate = rate(len, wall);
    eprintln!("copied:  {bytes} in {:.3} s, {rate}/s, with fsync", wall.as_secs_f64());
    Ok(())
}

/// Says what the blocks go through.
fn tell(pool: &FixedPool, copier: &Copier, block: u64) {
    eprintln!("buffers: {} of {}K, {}", pool.slices(), block >> 10, copier.method());
    let memory = pool.provenance().to_string();
    let mut lines = memory.lines();
    eprintln!("memory:  {}", lines.next().unwrap_or_default());
    // Why there are no huge pages. Which kind of them there is matters little.
    if pool.provenance().kind == Some(MemoryKind::Base) {
        lines.for_each(|line| eprintln!("note: {line}"));
    }
}

/// The bytes of a second.
fn rate(len: u64, wall: Duration) -> HumanBytes {
    let each_second = u128::from(len) * 1_000_000_000 / wall.as_nanos().max(1);
    HumanBytes(u64::try_from(each_second).unwrap_or(u64::MAX))
}

/// A bar on standard error; nothing where that is no terminal.
fn progress(len: u64) -> ProgressBar {
    let bar = ProgressBar::new(len);
    let template = "{wide_bar} {percent:>3} %  {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}
