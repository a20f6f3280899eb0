//! What jobs do, and how long it takes.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dmaspan_linux::{Instructions, thread_cpu_time};

use super::check;
use super::plan::{Case, Order};
use super::work::{SwiotlbBenchError, Way};
use crate::crew::{self, Gate};
use dmaspan_cli::stats::{median, nanoseconds};

/// A thread that maps buffers of its own and unmaps them. It shares no cache line with others, whom
/// what it has out would slow down.
#[repr(align(128))]
pub(crate) struct Job<'a, W: Way> {
    way: &'a W,
    case: &'a Case,
    /// The number of its first buffer.
    first: u64,
    /// What is mapped, the oldest first, with the numbers of the buffers.
    pub(super) out: VecDeque<(u64, W::Mapped)>,
}

/// What a job did in a turn.
#[derive(Clone, Copy)]
struct Did {
    ios: u64,
    ns: u64,
    cpu_ns: u64,
    instructions: Option<u64>,
}

impl<W: Way> Job<'_, W> {
    /// Maps all buffers of the job, unless they are.
    fn fill(&mut self) -> Result<(), SwiotlbBenchError> {
        let wanted = if self.out.is_empty() { self.case.depth } else { 0 };
        for number in self.first..self.first + wanted {
            self.map(number)?;
        }
        Ok(())
    }

    #[inline]
    fn map(&mut self, number: u64) -> Result<(), SwiotlbBenchError> {
        self.way.map(number, |mapped| self.out.push_back((number, mapped)))
    }

    /// Works until it is told to stop. All its buffers are mapped then.
    fn work(&mut self, gate: &Gate, stop: &AtomicBool) -> Result<Did, SwiotlbBenchError> {
        let ready = match self.case.order {
            Order::Queue => self.fill(),
            Order::Burst => Ok(()),
        };
        let counter = Instructions::of_this_thread().ok();
        let count = || counter.as_ref().and_then(|counter| counter.read().ok());
        gate.pass();
        ready?;
        let (instructions, cpu, begin) = (count(), thread_cpu_time(), Instant::now());
        let ios = match self.case.order {
            Order::Queue => self.queue(stop)?,
            Order::Burst if self.case.depth == 1 => self.pairs(stop)?,
            Order::Burst => self.bursts(stop)?,
        };
        let ns = nanoseconds(begin.elapsed());
        let cpu_ns = nanoseconds(thread_cpu_time().saturating_sub(cpu));
        let instructions = count().zip(instructions).map(|(after, before)| after - before);
        self.fill()?;
        Ok(Did { ios, ns, cpu_ns, instructions })
    }

    fn queue(&mut self, stop: &AtomicBool) -> Result<u64, SwiotlbBenchError> {
        let mut ios = 0;
        while let Some((number, mapped)) = self.out.pop_front() {
            self.way.unmap(mapped)?;
            self.map(number)?;
            ios += 1;
            if stop.load(Ordering::Relaxed) {
                break;
            }
        }
        Ok(ios)
    }

    fn pairs(&mut self, stop: &AtomicBool) -> Result<u64, SwiotlbBenchError> {
        let mut ios = 0;
        loop {
            self.way.map(self.first, |mapped| self.way.unmap(mapped))??;
            ios += 1;
            if stop.load(Ordering::Relaxed) {
                return Ok(ios);
            }
        }
    }

    fn bursts(&mut self, stop: &AtomicBool) -> Result<u64, SwiotlbBenchError> {
        let mut ios = 0;
        loop {
            self.fill()?;
            while let Some((_, mapped)) = self.out.pop_front() {
                self.way.unmap(mapped)?;
            }
            ios += self.case.depth;
            if stop.load(Ordering::Relaxed) {
                return Ok(ios);
            }
        }
    }
}

/// What all jobs of a case did with a pool, turn by turn.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    /// Picoseconds of an I/O of a job.
    ps: Vec<u64>,
    /// Of CPU time.
    cpu_ps: Vec<u64>,
    /// Instructions of 1000 I/Os.
    instructions: Vec<u64>,
}

impl Measured {
    fn add(&mut self, jobs: &[Did]) {
        let ios: u64 = jobs.iter().map(|did| did.ios).sum();
        let each = |sum: u64| each(sum, ios);
        self.ps.push(each(jobs.iter().map(|did| did.ns).sum()));
        self.cpu_ps.push(each(jobs.iter().map(|did| did.cpu_ns).sum()));
        let instructions: Option<u64> = jobs.iter().map(|did| did.instructions).sum();
        self.instructions.extend(instructions.map(each));
    }

    /// Nanoseconds of a job's I/O.
    pub(super) fn ns(&self) -> f64 {
        median(&self.ps) as f64 / 1000.0
    }

    /// Nanoseconds of CPU time of an I/O.
    pub(super) fn cpu_ns(&self) -> f64 {
        median(&self.cpu_ps) as f64 / 1000.0
    }

    /// Instructions of an I/O, where they were counted.
    pub(super) fn instructions(&self) -> Option<f64> {
        let counted = !self.instructions.is_empty();
        counted.then(|| median(&self.instructions) as f64 / 1000.0)
    }
}

/// A thousand times the share of each of `ios`.
fn each(sum: u64, ios: u64) -> u64 {
    let each = u128::from(sum) * 1000 / u128::from(ios.max(1));
    u64::try_from(each).unwrap_or(u64::MAX)
}

/// Lets all jobs of a case work at once, for so long, and checks what came of it.
///
/// # Errors
///
/// [`SwiotlbBenchError`] where a pool refused, or something is wrong afterwards.
pub(crate) fn turn(
    way: &impl Way,
    case: &Case,
    length: Duration,
    measured: &mut Measured,
) -> Result<(), SwiotlbBenchError> {
    let job = |number| {
        let out = VecDeque::with_capacity(usize::try_from(case.depth).unwrap_or(0));
        Job { way, case, first: number * case.depth, out }
    };
    let mut jobs: Vec<_> = (0..case.threads).map(job).collect();
    let stop = AtomicBool::new(false);
    let meanwhile = || {
        thread::sleep(length);
        stop.store(true, Ordering::Relaxed);
    };
    let work = |job: &mut Job<'_, _>, gate: &Gate| job.work(gate, &stop);
    let did = crew::at_once(jobs.iter_mut(), work, meanwhile);
    let did: Vec<Did> =
        did.map_err(SwiotlbBenchError::NoThread)?.into_iter().collect::<Result<_, _>>()?;
    measured.add(&did);
    check::check(way, case, jobs.into_iter().flat_map(|job| job.out).collect())
}
