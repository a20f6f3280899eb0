//! Whole reads and writes of a disk whose driver bounces everything: the lock of swiotlb, split in
//! Linux 6.0.

use std::fs::{File, OpenOptions};
use std::io::{IoSlice, IoSliceMut};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::{preadv, pwritev};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::{Result, figure, host_cpu, mark};

const DISK: &str = "/dev/nvme0n1";
const DISK_BYTES: u64 = 64 << 20;
const PAGE: usize = 4096;
/// How many threads are one job, on one CPU: as many I/Os are out.
const THREADS: usize = 4;
/// How long each is measured.
const RUN: Duration = Duration::from_secs(12);

/// Pages of an I/O, each bounced by itself as none lies beside the next: one, as in the series'
/// fio, and as many as the driver takes for a request, of which the block layer is a small part.
const PIECES: [usize; 2] = [1, 127];
const JOBS: [usize; 2] = [1, 4];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Read,
    Write,
}

/// Measures each kind of I/O by one job and by four.
pub(super) fn measure() -> Result {
    for (pieces, op) in PIECES.iter().flat_map(|&pieces| [(pieces, Op::Read), (pieces, Op::Write)])
    {
        let what = format!("{} × 4K, {}", pieces, if op == Op::Read { "read" } else { "write" });
        for jobs in JOBS {
            let noun = if jobs == 1 { "job" } else { "jobs" };
            mark();
            let (count, took) = run(jobs, pieces, op)?;
            mark();
            host_cpu(count, &format!("{what}, {jobs} {noun}: host CPU of an I/O"));
            figure(&format!("{what}, {jobs} {noun}: I/Os"), count / took.as_secs_f64(), "/s");
        }
    }
    Ok(())
}

/// Does I/Os for a while, with `jobs` CPUs of threads; how many, and how long that took.
fn run(jobs: usize, pieces: usize, op: Op) -> Result<(f64, Duration)> {
    let stop = AtomicBool::new(false);
    let begin = Instant::now();
    let counts: Vec<Result<u64, String>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs * THREADS)
            .map(|thread| {
                let stop = &stop;
                scope.spawn(move || {
                    work(thread, pieces, op, stop).map_err(|error| error.to_string())
                })
            })
            .collect();
        thread::sleep(RUN);
        stop.store(true, Ordering::Relaxed);
        let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
        joined.map(|count| count.unwrap_or_else(|_| Err("a job panicked".to_owned()))).collect()
    });
    let took = begin.elapsed();
    let counts: Vec<u64> = counts.into_iter().collect::<Result<_, _>>()?;
    #[expect(clippy::cast_precision_loss, reason = "nobody counts so far in seconds")]
    Ok((counts.iter().sum::<u64>() as f64, took))
}

/// One thread's I/Os until it is told to stop; how many those were.
fn work(thread: usize, pieces: usize, op: Op, stop: &AtomicBool) -> Result<u64> {
    let mut cpus = CpuSet::new();
    cpus.set(thread / THREADS);
    sched_setaffinity(None, &cpus)?;
    let flags = i32::try_from(OFlags::DIRECT.bits())?;
    let disk = OpenOptions::new().read(true).write(true).custom_flags(flags).open(DISK)?;
    // Every second page: what lies between two pieces keeps them from being one.
    let mut memory = vec![0_u8; (2 * pieces + 1) * PAGE];
    let lead = memory.as_ptr().align_offset(PAGE);
    let memory = memory.get_mut(lead..).and_then(|memory| memory.get_mut(..2 * pieces * PAGE));
    let memory = memory.ok_or("no page begins in the memory")?;
    memory.fill(1);
    let bytes = u64::try_from(pieces * PAGE)?;
    let places = DISK_BYTES / bytes;
    let mut place = u64::try_from(thread)?;
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        // An odd number far from others: places far from each other.
        place = place.wrapping_add(0x9e37_79b1) % places;
        let moved = one(&disk, memory, op, place * bytes)?;
        if moved != pieces * PAGE {
            return Err(format!("{moved} bytes were moved").into());
        }
        count += 1;
    }
    Ok(count)
}

fn one(disk: &File, memory: &mut [u8], op: Op, offset: u64) -> Result<usize> {
    let pages = memory.chunks_exact_mut(PAGE).step_by(2);
    Ok(match op {
        Op::Read => preadv(disk, &mut pages.map(IoSliceMut::new).collect::<Vec<_>>(), offset)?,
        Op::Write => {
            pwritev(disk, &pages.map(|page| IoSlice::new(page)).collect::<Vec<_>>(), offset)?
        }
    })
}
