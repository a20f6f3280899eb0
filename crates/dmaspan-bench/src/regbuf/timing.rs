//! How long things take.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::plan::Io;
use super::work::RegbufBenchError;
use dmaspan_cli::stats::{median, nanoseconds};

/// What one thing took, turn by turn.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series {
    /// Picoseconds.
    ps: Vec<u64>,
}

impl Series {
    /// Nanoseconds: the median.
    pub(crate) fn ns(&self) -> f64 {
        median(&self.ps) as f64 / 1000.0
    }

    /// A turn of this length: every I/O, over and over. It adds what one took in the median pass,
    /// so that a wait for a CPU is left out.
    #[inline(always)]
    pub(crate) fn turn<R>(
        &mut self,
        length: Duration,
        ios: &[Io],
        mut each: impl FnMut(Io) -> Result<R, RegbufBenchError>,
    ) -> Result<(), RegbufBenchError> {
        let count = u64::try_from(ios.len()).unwrap_or(u64::MAX);
        self.passes(length, count, || {
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
        &mut self,
        length: Duration,
        count: u64,
        mut pass: impl FnMut() -> Result<Duration, RegbufBenchError>,
    ) -> Result<(), RegbufBenchError> {
        let (mut took, mut passes) = (Duration::ZERO, Vec::new());
        while took < length {
            let time = pass()?;
            passes.push(nanoseconds(time));
            took += time;
        }
        self.ps.push(median(&passes).saturating_mul(1000) / count.max(1));
        Ok(())
    }
}

/// What a way took for everything.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    pub(crate) register: Series,
    pub(crate) import: Series,
    pub(crate) scatter: Series,
    pub(crate) sgl: Series,
    pub(crate) prp: Series,
}
