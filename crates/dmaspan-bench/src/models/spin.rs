//! Locks that spin, as a kernel's do: who waits for one uses its CPU, however long the holder has
//! none.

use std::hint;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use dmaspan::Platform;
use dmaspan_linux::UserPlatform;
use parking_lot::lock_api::{GuardSend, RawMutex};

/// How often somebody found a lock held and waited for it.
static WAITS: AtomicU64 = AtomicU64::new(0);

/// How often a lock of this kind was waited for so far, in all of the process.
pub(crate) fn waits() -> u64 {
    WAITS.load(Ordering::Relaxed)
}

/// A lock whose waiters look at it until it is free.
#[derive(Debug)]
pub(crate) struct SpinLock(AtomicBool);

impl SpinLock {
    #[cold]
    fn wait(&self) {
        WAITS.fetch_add(1, Ordering::Relaxed);
        while !self.try_lock() {
            while self.0.load(Ordering::Relaxed) {
                hint::spin_loop();
            }
        }
    }
}

#[expect(unsafe_code, reason = "lock_api's trait for locks")]
// SAFETY: the exchange that finds the lock free and takes it is one operation, so that one thread
// at a time has it until it stores that it is free.
unsafe impl RawMutex for SpinLock {
    const INIT: Self = Self(AtomicBool::new(false));

    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.wait();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.0.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.0.store(false, Ordering::Release);
    }
}

/// A process whose threads are the CPUs of a guest, which spin and which their host may stop.
#[derive(Debug)]
pub(crate) struct Spinning;

impl Platform for Spinning {
    type Lock = SpinLock;

    fn cpu(&self) -> usize {
        UserPlatform.cpu()
    }

    fn now(&self) -> u64 {
        UserPlatform.now()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use parking_lot::lock_api::Mutex;

    use super::*;

    #[test]
    fn one_thread_at_a_time_has_it() {
        let count = Mutex::<SpinLock, u64>::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| *count.lock() += 1));
            }
        });
        assert_eq!(*count.lock(), 4000);
        let held = count.lock();
        assert!(count.try_lock().is_none());
        let before = waits();
        thread::scope(|scope| {
            let other = scope.spawn(|| *count.lock());
            while waits() == before {
                thread::yield_now();
            }
            drop(held);
            assert_eq!(other.join().unwrap(), 4000);
        });
    }
}
