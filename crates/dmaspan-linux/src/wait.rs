//! A thread waits here for what a future ends with, for a bounded time.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// Wakes a thread that sleeps.
struct Sleeper {
    thread: Thread,
    /// Others may wake the thread too, for reasons of theirs.
    is_woken: AtomicBool,
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.is_woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// Sleeps until the future is ready, for `bound` at most; `None` where it was not by then. It is
/// looked at once at least, and once more when the time is over.
pub(crate) fn within<F: Future + Unpin>(future: &mut F, bound: Duration) -> Option<F::Output> {
    // No deadline where the bound is longer than the clock goes.
    let deadline = Instant::now().checked_add(bound);
    let thread = thread::current();
    let sleeper = Arc::new(Sleeper { thread, is_woken: AtomicBool::new(false) });
    let waker = Waker::from(Arc::clone(&sleeper));
    let (mut future, mut context) = (pin!(future), Context::from_waker(&waker));
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
        while !sleeper.is_woken.swap(false, Ordering::Acquire) {
            match left {
                None => thread::park(),
                Some(Duration::ZERO) => return None,
                Some(left) => {
                    thread::park_timeout(left);
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{poll_fn, ready};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn what_is_ready_is_there_at_once_whatever_the_bound() {
        for bound in [Duration::ZERO, Duration::from_secs(1), Duration::MAX] {
            assert_eq!(within(&mut ready(7), bound), Some(7));
        }
    }

    #[test]
    fn what_never_is_ready_is_given_up_and_can_be_waited_for_again() {
        let mut looks = 0;
        let mut never = poll_fn(|_| {
            looks += 1;
            Poll::<()>::Pending
        });
        assert_eq!(within(&mut never, Duration::ZERO), None);
        assert_eq!(within(&mut never, Duration::from_millis(20)), None);
        assert!(looks >= 3, "{looks}");
    }

    #[test]
    fn a_sleeper_is_woken_from_another_thread_and_not_by_a_stray_unpark() {
        let (send, receive) = mpsc::channel::<Waker>();
        let is_done = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&is_done);
        let sleeper = thread::current();
        let other = thread::spawn(move || {
            let waker = receive.recv().unwrap();
            sleeper.unpark();
            thread::sleep(Duration::from_millis(5));
            seen.store(true, Ordering::Release);
            waker.wake();
        });
        let mut wait = poll_fn(|context: &mut Context<'_>| {
            let _ = send.send(context.waker().clone());
            if is_done.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
        });
        assert_eq!(within(&mut wait, Duration::MAX), Some(()));
        other.join().unwrap();
    }
}
