//! The clocks of one thread, and summaries of many turns.

use std::thread;
use std::time::{Duration, Instant};

use dmaspan_cli::stats::{median, nanoseconds};
use dmaspan_linux::{Instructions, thread_cpu_time};

/// How long a case is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Effort {
    /// How many times each way has its turn.
    pub(crate) rounds: u32,
    /// How long a turn is.
    pub(crate) turn: Duration,
}

impl Effort {
    /// So many turns of so many microseconds.
    pub(crate) const fn new(rounds: u32, turn_us: u64) -> Self {
        Self { rounds, turn: Duration::from_micros(turn_us) }
    }
}

/// What one thing took in each turn, in thousandths, so that what is short counts too.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series(Vec<u64>);

impl Series {
    /// Adds a turn in which `count` things took `sum` together.
    pub(crate) fn add(&mut self, sum: u64, count: u64) {
        let each = u128::from(sum) * 1000 / u128::from(count.max(1));
        self.0.push(u64::try_from(each).unwrap_or(u64::MAX));
    }

    /// The median, in thousandths.
    pub(crate) fn thousandths(&self) -> u64 {
        median(&self.0)
    }

    /// The same as a number of things.
    pub(crate) fn each(&self) -> f64 {
        self.thousandths() as f64 / 1000.0
    }

    /// The same; of no turns nothing.
    pub(crate) fn counted(&self) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.each())
    }
}

/// The clocks of the thread that made it.
#[derive(Debug)]
pub(crate) struct Meter {
    /// None where this machine does not count.
    counter: Option<Instructions>,
}

/// What the clocks said when something began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Begun {
    cpu: Duration,
    instructions: Option<u64>,
    begin: Instant,
}

/// What it took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Took {
    pub(crate) begin: Instant,
    pub(crate) end: Instant,
    pub(crate) cpu_ns: u64,
    pub(crate) instructions: Option<u64>,
}

impl Meter {
    pub(crate) fn of_this_thread() -> Self {
        Self { counter: Instructions::of_this_thread().ok() }
    }

    fn count(&self) -> Option<u64> {
        self.counter.as_ref().and_then(|counter| counter.read().ok())
    }

    /// Looks at all clocks, last at that of the wall.
    pub(crate) fn begin(&self) -> Begun {
        let (cpu, instructions) = (thread_cpu_time(), self.count());
        Begun { cpu, instructions, begin: Instant::now() }
    }

    /// Looks again, the other way round.
    pub(crate) fn end(&self, begun: Begun) -> Took {
        let end = Instant::now();
        let instructions = self.count().zip(begun.instructions);
        let cpu = thread_cpu_time().saturating_sub(begun.cpu);
        Took {
            begin: begun.begin,
            end,
            cpu_ns: nanoseconds(cpu),
            instructions: instructions.map(|(after, before)| after - before),
        }
    }
}

impl Took {
    pub(crate) fn ns(&self) -> u64 {
        nanoseconds(self.end - self.begin)
    }
}

/// Why this machine does not count instructions, where it does not.
pub(crate) fn uncounted() -> Option<String> {
    Instructions::of_this_thread().err().map(|error| error.to_string())
}

/// How many CPUs this process may use.
pub(crate) fn cpus() -> u64 {
    thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64)
}
