//! 1 GiB mapped by requests of several sizes, by one thread and by two: by type 1 and by iommufd.
//!
//! The guest has one CPU, so two threads show what their turns add, and not whether they would wait
//! for each other.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dmaspan::{DmaSpace, Iova, IovaRange, Prot};
use dmaspan_linux::vfio::{Ioas, VfioContainer};
use dmaspan_linux::{Memory, MemoryKind};

use super::{Result, figure};
use crate::cases::Context;

const MIB: u64 = 1 << 20;
const LEN: u64 = 1 << 30;
const AT: u64 = 1 << 36;
/// How many bytes a request maps.
const SIZES: [u64; 6] = [256 << 10, 2 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, LEN];

/// Measures both of base pages and of huge ones.
pub(super) fn measure() -> Result {
    let bdf = Context::default().device.parse()?;
    for (pages, kind) in [("base", MemoryKind::Base), ("huge", MemoryKind::Hugetlb2M)] {
        let memory = Arc::new(Memory::new(kind, LEN)?);
        {
            let (space, _device) = VfioContainer::open(bdf)?;
            compare(&space, &memory, &format!("type 1, {pages} pages"))?;
        }
        let (space, _device) = Ioas::open(bdf)?;
        compare(&space, &memory, &format!("iommufd, {pages} pages"))?;
    }
    Ok(())
}

/// Says what each size and number of threads takes beside the best.
fn compare<S>(space: &S, memory: &Arc<Memory>, name: &str) -> Result
where
    S: DmaSpace<Memory = Arc<Memory>, Error: 'static> + Sync,
{
    let mut all = Vec::new();
    for size in SIZES {
        for threads in [1, 2] {
            if size * threads <= LEN {
                all.push((size, threads, time(space, memory, size, threads)?));
            }
        }
    }
    for (phase, what) in ["map", "unmap"].into_iter().enumerate() {
        let of = |times: &[Duration; 2]| times.get(phase).map_or(0.0, Duration::as_secs_f64);
        let best = all.iter().map(|(_, _, times)| of(times)).fold(f64::INFINITY, f64::min);
        figure(&format!("{name}: {what} of 1 GiB at best"), best * 1e3, "ms");
        for (size, threads, times) in &all {
            let size = match size / MIB {
                0 => format!("{} KiB", size >> 10),
                mib => format!("{mib} MiB"),
            };
            let name = format!("{name}: {what} by {size}, threads: {threads}");
            figure(&name, of(times) / best, "×");
        }
    }
    Ok(())
}

/// Maps all of the memory, and unmaps it, by requests of `size` bytes. Each thread has a part.
fn time<S>(space: &S, memory: &Arc<Memory>, size: u64, threads: u64) -> Result<[Duration; 2]>
where
    S: DmaSpace<Memory = Arc<Memory>, Error: 'static> + Sync,
{
    let map = |at: u64| {
        let user = memory.sub_range(at, size).map_err(|error| error.to_string())?;
        let mapped = space.map(memory, user, Iova::new(AT + at), Prot::READ_WRITE);
        mapped.map_err(|error| error.to_string())
    };
    let unmap = |at: u64| {
        let range =
            IovaRange::from_len(Iova::new(AT + at), size).map_err(|error| error.to_string())?;
        match space.unmap(range).map_err(|error| error.to_string())? {
            unmapped if unmapped == size => Ok(()),
            unmapped => Err(format!("{unmapped} bytes were unmapped of {size}")),
        }
    };
    Ok([by_threads(size, threads, map)?, by_threads(size, threads, unmap)?])
}

/// Makes the requests of each part by a thread, and says how long all took.
fn by_threads(
    size: u64,
    threads: u64,
    request: impl Fn(u64) -> Result<(), String> + Sync,
) -> Result<Duration> {
    let (step, request) = (usize::try_from(size)?, &request);
    let one = move |thread: u64| {
        let part = LEN / threads;
        (thread * part..(thread + 1) * part).step_by(step).try_for_each(request)
    };
    let begin = Instant::now();
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || one(thread))).collect();
        let first = one(0);
        others.into_iter().fold(first, |result, other| {
            result.and(other.join().unwrap_or_else(|_| Err("a thread panicked".to_owned())))
        })
    })?;
    Ok(begin.elapsed())
}
