//! Threads that begin at the same time.

use std::panic;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::RwLock;

use crate::failed::Failed;

/// Where threads wait for each other.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    arrived: AtomicUsize,
    /// Held for writing while it is closed.
    closed: RwLock<()>,
}

impl Gate {
    /// Waits until it opens.
    pub(crate) fn pass(&self) {
        self.arrived.fetch_add(1, Ordering::Relaxed);
        drop(self.closed.read());
    }
}

/// Does `work` with every item at once until `length` is over, when the flag is set.
///
/// # Errors
///
/// As [`at_once`].
pub(crate) fn for_a_while<T: Send, R: Send>(
    items: impl ExactSizeIterator<Item = T>,
    length: Duration,
    work: impl Fn(T, &Gate, &AtomicBool) -> Result<R, Failed> + Sync,
) -> Result<Vec<R>, Failed> {
    let stop = AtomicBool::new(false);
    let meanwhile = || {
        thread::sleep(length);
        stop.store(true, Ordering::Relaxed);
    };
    at_once(items, |item, gate| work(item, gate, &stop), meanwhile)
}

/// Does `work` with every item at once, each in a thread of its own, which passes the gate when it
/// is ready: it opens when all are. Then this thread does something, too.
///
/// # Errors
///
/// The first thread's that failed, and the system's where it gives no thread.
pub(crate) fn at_once<T: Send, R: Send>(
    items: impl ExactSizeIterator<Item = T>,
    work: impl Fn(T, &Gate) -> Result<R, Failed> + Sync,
    meanwhile: impl FnOnce(),
) -> Result<Vec<R>, Failed> {
    let (count, work, gate) = (items.len(), &work, &Gate::default());
    thread::scope(|scope| {
        // Opened by any return, so that a thread that cannot be had leaves no other one waiting.
        let closed = gate.closed.write();
        let spawn = |item| thread::Builder::new().spawn_scoped(scope, move || work(item, gate));
        let mut running: Vec<thread::ScopedJoinHandle<'_, _>> = Vec::with_capacity(count);
        for item in items {
            match spawn(item) {
                Ok(thread) => running.push(thread),
                Err(error) => {
                    // Those that wait at an open gate are told to stop, too.
                    meanwhile();
                    return Err(Failed::at("there is no thread")(error));
                }
            }
        }
        // A thread that ends before the gate opens has failed, and will not come.
        let is_ready = || gate.arrived.load(Ordering::Relaxed) == count;
        while !is_ready() && !running.iter().any(|thread| thread.is_finished()) {
            thread::yield_now();
        }
        drop(closed);
        meanwhile();
        let joined = running.into_iter().map(|thread| thread.join());
        joined.map(|done| done.unwrap_or_else(|panic| panic::resume_unwind(panic))).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_begin_when_the_last_one_is_ready_and_one_that_fails_keeps_nobody_waiting() {
        let passed = AtomicUsize::new(0);
        let work = |item, gate: &Gate| {
            if item != 1 {
                gate.pass();
                passed.fetch_add(1, Ordering::Relaxed);
            }
            Ok(item * 10)
        };
        let found = at_once([0, 1, 2].into_iter(), work, || ()).unwrap();
        assert_eq!((found, passed.into_inner()), (vec![0, 10, 20], 2));
    }
}
