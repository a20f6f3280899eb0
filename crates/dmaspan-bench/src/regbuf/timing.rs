//! The timing of passes: turns, of each of which the median counts, so that a wait for a CPU is
//! left out.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::plan::Io;
use crate::failed::Failed;
use crate::time::Series;
use dmaspan_cli::stats::{median, nanoseconds};

/// A turn of this length: every I/O, over and over.
#[inline(always)]
pub(crate) fn turn<R>(
    series: &mut Series,
    length: Duration,
    ios: &[Io],
    mut each: impl FnMut(Io) -> Result<R, Failed>,
) -> Result<(), Failed> {
    let count = u64::try_from(ios.len()).unwrap_or(u64::MAX);
    passes(series, length, count, || {
        let begin = Instant::now();
        for io in ios {
            black_box(each(*io)?);
        }
        Ok(begin.elapsed())
    })
}

/// A turn of this length of passes that time themselves, of `count` each.
#[inline(always)]
pub(crate) fn passes(
    series: &mut Series,
    length: Duration,
    count: u64,
    mut pass: impl FnMut() -> Result<Duration, Failed>,
) -> Result<(), Failed> {
    let (mut took, mut passes) = (Duration::ZERO, Vec::new());
    while took < length {
        let time = pass()?;
        passes.push(nanoseconds(time));
        took += time;
    }
    series.add(median(&passes), count);
    Ok(())
}

/// What a way took for everything.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    pub(crate) register: Series,
    pub(crate) import: Series,
    pub(crate) scatter: Series,
    pub(crate) sgl: Series,
    pub(crate) prp: Series,
}
