//! The same copy by several ways, in turns.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use dmaspan_linux::fixed::FixedPool;
use indicatif::{HumanBytes, ProgressBar};

use crate::copier::Copier;
use crate::error::CopyError;
use crate::files::{Caching, Existing, Source, Target};
use crate::plain;

/// A way to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Fixed,
    Plain(Caching),
}

const WAYS: [Way; 3] = [Way::Fixed, Way::Plain(Caching::Through), Way::Plain(Caching::Past)];

impl Way {
    fn name(self, depth: u32) -> String {
        match self {
            Self::Fixed => format!("fixed buffers, O_DIRECT, {depth} at a time"),
            Self::Plain(Caching::Through) => "plain loop, page cache".to_owned(),
            Self::Plain(Caching::Past) => "plain loop, O_DIRECT".to_owned(),
        }
    }

    fn caching(self) -> Caching {
        match self {
            Self::Fixed => Caching::Past,
            Self::Plain(caching) => caching,
        }
    }
}

/// What one copy took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Took {
    wall: Duration,
    /// Of all threads, in the kernel and outside.
    cpu: Duration,
}

/// Copies `rounds` times by each way, in turns, and prints medians. Each copy reads a file that is
/// not in the page cache and ends when the disk has all bytes (fsync(2)). One copy more, by fixed
/// buffers, stays.
pub(crate) fn run(
    copier: &mut Copier,
    pool: &FixedPool,
    source: Source,
    target: Target,
    rounds: u32,
) -> Result<(), CopyError> {
    let (path, len) = (target.path.clone(), source.len);
    // It is made anew by each copy.
    drop(target);
    let bar = crate::progress(len * 3 * u64::from(rounds));
    let mut taken = WAYS.map(|_| Vec::new());
    for round in 0..rounds {
        for turn in 0..WAYS.len() {
            // The way that is first in one round is later in the next.
            let place = (turn + usize::try_from(round).unwrap_or(0)) % WAYS.len();
            taken[place].push(once(WAYS[place], copier, pool, &source, &path, &bar)?);
        }
    }
    bar.finish_and_clear();
    let medians = taken.map(|mut taken| {
        taken.sort_unstable();
        taken[taken.len() / 2]
    });
    let base = medians[0].wall.as_secs_f64();
    let bytes = HumanBytes(len);
    println!("medians of {rounds} copies of {bytes} each way, source not cached, with fsync\n");
    println!("{:40}{:>8}{:>15}{:>8}{:>9}", "", "seconds", "rate", "CPU s", "× fixed");
    for (way, took) in WAYS.iter().zip(medians) {
        let (wall, cpu) = (took.wall.as_secs_f64(), took.cpu.as_secs_f64());
        let rate = format!("{}/s", crate::rate(len, took.wall));
        let name = way.name(pool.slices());
        println!("{name:40}{wall:8.3}{rate:>15}{cpu:8.2}{:9.2}", wall / base);
    }
    copy_last(copier, &source, &path)
}

/// One copy that does not get to its place, and is removed when it is done.
fn once(
    way: Way,
    copier: &mut Copier,
    pool: &FixedPool,
    source: &Source,
    path: &Path,
    bar: &ProgressBar,
) -> Result<Took, CopyError> {
    let source = Source::open(&source.path, way.caching())?;
    source.forget_cached();
    let (cpu, start) = (cpu_time(), Instant::now());
    let target = Target::create(path, &source, Existing::Overwrite, way.caching())?;
    match way {
        Way::Fixed => copier.copy(&source, &target, bar)?,
        Way::Plain(_) => {
            // Every slice is free between two copies.
            if let Some(mut buffer) = pool.take() {
                plain::copy(&source, &target, &mut buffer)?;
            }
            bar.inc(source.len);
        }
    }
    target.settle(source.len)?;
    Ok(Took { wall: start.elapsed(), cpu: cpu_time().saturating_sub(cpu) })
}

/// The copy that stays.
fn copy_last(copier: &mut Copier, source: &Source, path: &Path) -> Result<(), CopyError> {
    let target = Target::create(path, source, Existing::Overwrite, Caching::Past)?;
    copier.copy(source, &target, &ProgressBar::hidden())?;
    target.finish(source.len)
}

/// The CPU time of this process with all of its threads, those of io_uring too (proc(5),
/// `/proc/self/stat`); 0 where the kernel does not say.
fn cpu_time() -> Duration {
    let text = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(") ").next().unwrap_or_default().split(' ');
    // Field 14 and 15 of the line, in hundredths of a second; the third is the first here.
    let ticks = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum::<u64>();
    Duration::from_millis(ticks * 10)
}
