//! The CPU that a thread runs on.

use std::mem;
use std::sync::{Barrier, OnceLock};
use std::thread;
use std::time::Duration;

use super::contention;

/// CPUs that threads of the benchmark run on at the same time.
pub(crate) const MAX: usize = 2;

/// The CPUs that what is measured is made for.
pub(crate) fn count() -> usize {
    if contention::is_asked() { contention::CPUS } else { MAX }
}

/// The CPUs that this process was allowed at first.
pub(crate) fn allowed() -> &'static [usize] {
    static ALLOWED: OnceLock<Vec<usize>> = OnceLock::new();
    ALLOWED.get_or_init(|| {
        // SAFETY: a set of CPUs is plain bits; all clear is the empty one.
        let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
        // SAFETY: the set is writable and of that size.
        let result = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) };
        assert_eq!(result, 0, "sched_getaffinity");
        // SAFETY: the CPU is below the set's size.
        let is_set = |&cpu: &usize| unsafe { libc::CPU_ISSET(cpu, &set) };
        (0..libc::CPU_SETSIZE as usize).filter(is_set).collect()
    })
}

/// Runs this thread on the nth of them, where the system lets it.
pub(crate) fn pin(nth: usize) {
    let allowed = allowed();
    // SAFETY: as above.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: the CPU is below the set's size.
    unsafe { libc::CPU_SET(allowed[nth % allowed.len()], &mut set) };
    // SAFETY: the set is readable and of that size.
    let _ = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) };
    super::memory::run_on(nth);
}

/// Runs `work` on so many threads at once, each with its number and the barrier that it waits at
/// when it is prepared; the longest time that one of them took.
pub(crate) fn race(threads: usize, work: impl Fn(usize, &Barrier) -> Duration + Sync) -> Duration {
    let (work, barrier) = (&work, &Barrier::new(threads));
    let slowest = thread::scope(|scope| {
        let run = |nth| scope.spawn(move || work(nth, barrier));
        let running: Vec<_> = (0..threads).map(run).collect();
        running.into_iter().map(|thread| thread.join().expect("no panic")).max()
    });
    slowest.unwrap_or_default()
}
