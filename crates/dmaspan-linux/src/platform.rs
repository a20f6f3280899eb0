//! The platform of a process: locks, a number for each thread, a clock, and a way to wait.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use dmaspan::Platform;
use dmaspan::container::{BusyHook, GaveUp};

use crate::sys;

/// A process of Linux: locks that sleep, threads in the place of CPUs, and the coarse clock.
///
/// A thread has the lowest number that no other one has, from the first time that it is asked for
/// until the thread ends. So caches for as many "CPUs" as there are threads are shared by none,
/// however many threads come and go.
///
/// ```
/// use dmaspan::Platform;
/// use dmaspan_linux::UserPlatform;
///
/// let here = UserPlatform.cpu();
/// assert_eq!(UserPlatform.cpu(), here);
/// let there = std::thread::spawn(|| UserPlatform.cpu()).join().unwrap();
/// assert_ne!(there, here);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct UserPlatform;

impl UserPlatform {
    /// Waits for an access of a device model that is under way, for
    /// [`SoftIommu::waiting_by`](dmaspan::iommu::SoftIommu::waiting_by): lets other threads run,
    /// then sleeps, and gives up on one access after about ten seconds.
    ///
    /// ```
    /// use dmaspan::iommu::soft::TryAgain;
    /// use dmaspan_linux::UserPlatform;
    ///
    /// const WAITING: TryAgain = UserPlatform::sleeping;
    /// assert!(WAITING(0));
    /// ```
    pub fn sleeping(tries: u64) -> bool {
        const YIELDS: u64 = 64;
        const NAP: Duration = Duration::from_micros(100);
        const NAPS: u64 = 100_000;
        match tries.checked_sub(YIELDS) {
            None => thread::yield_now(),
            Some(_) => thread::sleep(NAP),
        }
        tries < YIELDS + NAPS
    }
}

impl Platform for UserPlatform {
    type Lock = parking_lot::RawMutex;

    /// The thread's number.
    #[inline]
    fn cpu(&self) -> usize {
        let number = NUMBER.get();
        if number == NONE { take_number() } else { number }
    }

    /// Nanoseconds of `CLOCK_MONOTONIC_COARSE` (clock_gettime(2)): late by up to a tick of the
    /// kernel, which is 1 to 10 ms, and read in a few nanoseconds.
    #[inline]
    fn now(&self) -> u64 {
        sys::coarse_time_ns()
    }
}

/// Threads that use one container at the same time and sleep while another one is at work on their
/// range, as Linux's do, instead of being told `EBUSY`.
///
/// ```
/// use dmaspan::{Account, Container, HostAddr};
/// use dmaspan_linux::{LinuxPinner, SleepHook};
///
/// let container: Container<_, parking_lot::RawMutex> =
///     Container::new(LinuxPinner::<HostAddr>::new()?, Account::new(1 << 30));
/// let _container = container.with_busy_hook(Box::new(SleepHook::default()));
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct SleepHook {
    turn: parking_lot::Mutex<()>,
    ended: parking_lot::Condvar,
}

impl BusyHook for SleepHook {
    /// Never gives up.
    fn wait(&self, ready: &dyn Fn() -> bool) -> Result<(), GaveUp> {
        let mut turn = self.turn.lock();
        while !ready() {
            self.ended.wait(&mut turn);
        }
        Ok(())
    }

    fn wake(&self) {
        // A thread that found that it is not ready sleeps by now, and hears it.
        drop(self.turn.lock());
        self.ended.notify_all();
    }
}

/// The thread has no number yet.
const NONE: usize = usize::MAX;

thread_local! {
    static NUMBER: Cell<usize> = const { Cell::new(NONE) };
    static HOLD: Hold = const { Hold };
}

/// Gives the thread's number back when the thread ends.
struct Hold;

impl Drop for Hold {
    fn drop(&mut self) {
        // A caller that asks after this, in the thread's last moments, shares a place; it may.
        numbers().free.push(Reverse(NUMBER.replace(0)));
    }
}

struct Numbers {
    /// Those of threads that have ended.
    free: BinaryHeap<Reverse<usize>>,
    /// The first that no thread ever had.
    unused: usize,
}

fn numbers() -> MutexGuard<'static, Numbers> {
    static NUMBERS: Mutex<Numbers> = Mutex::new(Numbers { free: BinaryHeap::new(), unused: 0 });
    NUMBERS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cold]
fn take_number() -> usize {
    if HOLD.try_with(|_| ()).is_err() {
        return 0;
    }
    let mut numbers = numbers();
    let number = numbers.free.pop().map_or(numbers.unused, |Reverse(number)| number);
    numbers.unused = numbers.unused.max(number + 1);
    NUMBER.set(number);
    number
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    /// Numbers of threads that all live at once.
    fn at_once(threads: usize) -> Vec<usize> {
        let all_here = Barrier::new(threads);
        thread::scope(|scope| {
            let ask = || {
                let number = UserPlatform.cpu();
                all_here.wait();
                assert_eq!(UserPlatform.cpu(), number);
                number
            };
            let asking: Vec<_> = (0..threads).map(|_| scope.spawn(ask)).collect();
            asking.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn threads_that_live_at_once_have_numbers_of_their_own_and_later_ones_have_them_again() {
        for _ in 0..50 {
            let mut numbers = at_once(8);
            numbers.sort_unstable();
            numbers.dedup();
            assert_eq!(numbers.len(), 8);
            // Other tests of this process have a few threads beside these.
            assert!(numbers[7] < 8 + 64, "{numbers:?}");
        }
    }

    #[test]
    fn sleepers_wake_when_what_they_wait_for_has_ended_and_miss_nothing() {
        let (hook, turns) = (SleepHook::default(), std::sync::atomic::AtomicU64::new(0));
        let order = std::sync::atomic::Ordering::SeqCst;
        // Each waits for the turn of the one before it, over and over.
        thread::scope(|scope| {
            for me in 0..4u64 {
                let (hook, turns) = (&hook, &turns);
                scope.spawn(move || {
                    for round in 0..500 {
                        hook.wait(&|| turns.load(order) == 4 * round + me).unwrap();
                        turns.fetch_add(1, order);
                        hook.wake();
                    }
                });
            }
        });
        assert_eq!(turns.load(order), 2000);
    }

    #[test]
    fn the_clock_goes_on_and_never_back() {
        let start = UserPlatform.now();
        let mut last = start;
        // Two ticks of the coarse clock at least, which are of 10 ms at most.
        while last - start < 20_000_000 {
            let now = UserPlatform.now();
            assert!(now >= last, "{now} after {last}");
            let fine = sys::clock_ns(libc::CLOCK_MONOTONIC);
            assert!(now <= fine, "{now} is ahead of {fine}");
            last = now;
        }
    }
}
