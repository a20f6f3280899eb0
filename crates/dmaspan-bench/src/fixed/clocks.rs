//! The costs of a run: time, CPU time, and requests to the disk.

use std::fs;
use std::time::Duration;

use dmaspan_cli::stats::nanoseconds;
use dmaspan_linux::process_cpu_time;

use super::source::Source;
use super::work::Op;
use crate::time::{Begun, Meter};

/// What a run took, in nanoseconds, and how many requests the disk got.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) wall: u64,
    pub(crate) thread: u64,
    pub(crate) cpu: u64,
    pub(crate) busy: Option<u64>,
    pub(crate) requests: Option<u64>,
}

/// All clocks at the beginning of a run.
pub(crate) struct Clocks<'a> {
    source: &'a Source,
    op: Op,
    requests: Option<u64>,
    idle: Option<Idle>,
    cpu: Duration,
    meter: Meter,
    begun: Begun,
}

impl<'a> Clocks<'a> {
    /// Starts them.
    pub(crate) fn start(source: &'a Source, op: Op) -> Self {
        let meter = Meter::of_this_thread();
        let (requests, idle, cpu) = (source.disk_requests(op), idle(), process_cpu_time());
        Self { source, op, requests, idle, cpu, begun: meter.begin(), meter }
    }

    /// Reads them.
    pub(crate) fn stop(self) -> Taken {
        let took = self.meter.end(self.begun);
        let (wall, cpu) = (took.end - took.begin, process_cpu_time().saturating_sub(self.cpu));
        let busy = self.idle.zip(idle()).map(|(before, after)| {
            let idle = after.time.saturating_sub(before.time);
            (wall * after.cpus).saturating_sub(idle)
        });
        let requests = self.requests.zip(self.source.disk_requests(self.op));
        Taken {
            wall: took.ns(),
            thread: took.cpu_ns,
            cpu: nanoseconds(cpu),
            busy: busy.map(nanoseconds),
            requests: requests.map(|(before, after)| after.saturating_sub(before)),
        }
    }
}

/// How long all CPUs together have been idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Idle {
    cpus: u32,
    time: Duration,
}

fn idle() -> Option<Idle> {
    idle_of(&fs::read_to_string("/proc/stat").ok()?)
}

/// Of `/proc/stat`: of the line of all CPUs the fourth number is idle time, and the fifth that
/// during which something waited for a disk, in hundredths of a second (proc_stat(5)).
fn idle_of(text: &str) -> Option<Idle> {
    let mut cpus = text.lines().take_while(|line| line.starts_with("cpu"));
    let mut numbers = cpus.next()?.split_whitespace().skip(4).map(str::parse::<u64>);
    let ticks = numbers.next()?.ok()?.checked_add(numbers.next()?.ok()?)?;
    let time = Duration::from_millis(ticks.checked_mul(10)?);
    Some(Idle { cpus: u32::try_from(cpus.count()).ok()?, time })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_disk_is_idle_time_and_every_cpu_is_counted() {
        let text = "cpu  10 20 30 4000 5 6 7 0 0 0\ncpu0 1 2 3 4 5\ncpu1 1 2 3 4 5\nintr 7\n";
        assert_eq!(idle_of(text), Some(Idle { cpus: 2, time: Duration::from_millis(40_050) }));
        assert_eq!(idle_of("intr 7\n"), None);
        assert_eq!(idle_of("cpu 1 2 3\n"), None);
    }
}
