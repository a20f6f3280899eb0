//! The work of jobs, and its time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::check;
use super::plan::{Case, Order};
use super::work::{Bounces, Buffers};
use crate::crew::{self, Gate};
use crate::failed::Failed;
use crate::models::spin;
use crate::time::{Meter, Series, Took};

/// A thread that maps buffers of its own and unmaps them. It shares no cache line with others, whom
/// what it has out would slow down.
#[repr(align(128))]
struct Job<'a, W: Bounces + 'a> {
    pool: &'a W,
    buffers: Buffers,
    case: &'a Case,
    /// The number of its first buffer.
    first: u64,
    /// What is mapped, the oldest first, with the numbers of the buffers.
    out: VecDeque<(u64, W::Mapped<'a>)>,
}

impl<W: Bounces> Job<'_, W> {
    /// Maps all buffers of the job, unless they are.
    fn fill(&mut self) -> Result<(), Failed> {
        let wanted = if self.out.is_empty() { self.case.depth } else { 0 };
        for number in self.first..self.first + wanted {
            self.map(number)?;
        }
        Ok(())
    }

    #[inline]
    fn map(&mut self, number: u64) -> Result<(), Failed> {
        let buffer = (self.buffers, number);
        self.pool.map(buffer, self.case, |mapped| self.out.push_back((number, mapped)))
    }

    /// Works until it is told to stop: how many I/Os that were, and what they took. All its buffers
    /// are mapped then.
    fn work(&mut self, gate: &Gate, stop: &AtomicBool) -> Result<(u64, Took), Failed> {
        let ready = match self.case.order {
            Order::Queue => self.fill(),
            Order::Burst => Ok(()),
        };
        let meter = Meter::of_this_thread();
        gate.pass();
        ready?;
        let begun = meter.begin();
        let ios = match self.case.order {
            Order::Queue => self.queue(stop)?,
            Order::Burst if self.case.depth == 1 => self.pairs(stop)?,
            Order::Burst => self.bursts(stop)?,
        };
        let took = meter.end(begun);
        self.fill()?;
        Ok((ios, took))
    }

    fn queue(&mut self, stop: &AtomicBool) -> Result<u64, Failed> {
        let mut ios = 0;
        while let Some((number, mapped)) = self.out.pop_front() {
            self.pool.unmap(mapped, self.case)?;
            self.map(number)?;
            ios += 1;
            if stop.load(Ordering::Relaxed) {
                break;
            }
        }
        Ok(ios)
    }

    fn pairs(&mut self, stop: &AtomicBool) -> Result<u64, Failed> {
        let mut ios = 0;
        loop {
            let (pool, case) = (self.pool, self.case);
            pool.map((self.buffers, self.first), case, |mapped| pool.unmap(mapped, case))??;
            ios += 1;
            if stop.load(Ordering::Relaxed) {
                return Ok(ios);
            }
        }
    }

    fn bursts(&mut self, stop: &AtomicBool) -> Result<u64, Failed> {
        let mut ios = 0;
        loop {
            self.fill()?;
            while let Some((_, mapped)) = self.out.pop_front() {
                self.pool.unmap(mapped, self.case)?;
            }
            ios += self.case.depth;
            if stop.load(Ordering::Relaxed) {
                return Ok(ios);
            }
        }
    }
}

/// What all jobs of a case did with a pool, turn by turn: of an I/O of a job.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    pub(crate) ns: Series,
    pub(crate) cpu_ns: Series,
    /// How often a lock was waited for, where locks spin.
    pub(crate) waits: Series,
    /// None where they were not counted.
    pub(crate) instructions: Series,
}

/// Lets all jobs of a case work at once, for so long, and checks what came of it.
///
/// # Errors
///
/// Where a pool refused, or something is wrong afterwards.
pub(crate) fn turn(
    pool: &impl Bounces,
    buffers: Buffers,
    case: &Case,
    length: Duration,
    measured: &mut Measured,
) -> Result<(), Failed> {
    let job = |number| {
        let out = VecDeque::with_capacity(usize::try_from(case.depth).unwrap_or(0));
        Job { pool, buffers, case, first: number * case.depth, out }
    };
    let mut jobs: Vec<_> = (0..case.threads).map(job).collect();
    let work = |job: &mut Job<'_, _>, gate: &Gate, stop: &AtomicBool| job.work(gate, stop);
    let waits = spin::waits();
    let did = crew::for_a_while(jobs.iter_mut(), length, work)?;
    let ios = did.iter().map(|did| did.0).sum();
    measured.waits.add(spin::waits() - waits, ios);
    measured.ns.add(did.iter().map(|did| did.1.ns()).sum(), ios);
    measured.cpu_ns.add(did.iter().map(|did| did.1.cpu_ns).sum(), ios);
    let instructions: Option<u64> = did.iter().map(|did| did.1.instructions).sum();
    instructions.into_iter().for_each(|sum| measured.instructions.add(sum, ios));
    check::check(pool, buffers, case, jobs.into_iter().flat_map(|job| job.out).collect())
}
