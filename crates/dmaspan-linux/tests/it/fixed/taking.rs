//! Waiting for slices: by threads with a bound, and by tasks of no runtime in particular.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use dmaspan::Errno;
use dmaspan_linux::fixed::{AllTaken, FixedBuf, FixedPool, Taking};

use crate::fixed::support::base;

/// Longer than any of these waits takes.
const LONG: Duration = Duration::from_secs(600);

/// Counts how often a task is woken.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Woken {
    fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn poll(taking: &mut Taking, woken: &Arc<Woken>) -> Poll<FixedBuf> {
    let waker = Waker::from(Arc::clone(woken));
    Pin::new(taking).poll(&mut Context::from_waker(&waker))
}

#[test]
fn a_free_slice_is_taken_at_once_and_none_is_said_after_the_bound() {
    let pool = base(4096, 2);
    let held = [pool.take_timeout(Duration::ZERO).unwrap(), pool.take_timeout(LONG).unwrap()];
    for bound in [Duration::ZERO, Duration::from_millis(30)] {
        let begin = Instant::now();
        let error = pool.take_timeout(bound).unwrap_err();
        assert!(begin.elapsed() >= bound);
        assert_eq!((error, error.errno()), (AllTaken { slices: 2, bound }, Errno::EBUSY));
    }
    let text = pool.take_timeout(Duration::ZERO).unwrap_err().to_string();
    assert!(text.starts_with("all 2 slices of the pool stayed taken for 0ns: "), "{text}");
    drop(held);
    assert_eq!(pool.free_slices(), 2);
}

#[test]
fn tasks_are_woken_one_for_each_slice_the_longest_wait_first() {
    let pool = base(4096, 2);
    let (one, two) = (pool.take().unwrap(), pool.take().unwrap());
    let mut waits: Vec<_> =
        (0..3).map(|_| (pool.take_async(), Arc::new(Woken::default()))).collect();
    for (taking, woken) in &mut waits {
        assert!(poll(taking, woken).is_pending());
        assert!(poll(taking, woken).is_pending(), "asked twice, it waits once");
    }
    let woken = |waits: &[(Taking, Arc<Woken>)]| -> Vec<usize> {
        waits.iter().map(|(_, woken)| woken.count()).collect()
    };
    drop(one);
    assert_eq!(woken(&waits), [1, 0, 0]);
    // Somebody else is faster: it waits on, in the first place.
    let fast = pool.take().unwrap();
    let (taking, count) = &mut waits[0];
    assert!(poll(taking, count).is_pending());
    drop(two);
    assert_eq!(woken(&waits), [2, 0, 0]);
    drop(fast);
    assert_eq!(woken(&waits), [2, 1, 0]);
    let (first, count) = &mut waits[0];
    let Poll::Ready(buffer) = poll(first, count) else { panic!("there are two") };
    // A task that is woken and dropped passes it on.
    drop(waits.remove(1));
    assert_eq!(woken(&waits), [2, 1]);
    let (last, count) = &mut waits[1];
    assert!(poll(last, count).is_ready());
    drop(buffer);
    // Nobody waits any more.
    assert_eq!((woken(&waits), pool.free_slices()), (vec![2, 1], 2));
}

#[test]
fn a_task_that_gives_up_or_takes_early_is_not_woken_and_takes_no_others_turn() {
    let pool = base(4096, 1);
    let held = pool.take().unwrap();
    let woken: [Arc<Woken>; 3] = Default::default();
    let mut waits = [pool.take_async(), pool.take_async(), pool.take_async()];
    for (taking, woken) in waits.iter_mut().zip(&woken) {
        assert!(poll(taking, woken).is_pending());
    }
    let [first, second, mut third] = waits;
    drop(first);
    drop(held);
    assert_eq!([0, 1, 2].map(|at| woken[at].count()), [0, 1, 0]);
    // The third is polled for a reason of its own, and is faster.
    let Poll::Ready(held) = poll(&mut third, &woken[2]) else { panic!("it is free") };
    drop(second);
    drop(held);
    assert_eq!([0, 1, 2].map(|at| woken[at].count()), [0, 1, 0]);
    assert_eq!(pool.free_slices(), 1);
}

/// Drives a future on this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        thread::park();
    }
}

/// Takes a slice, writes it, and sees that it is nobody else's meanwhile.
fn use_once(mut buffer: FixedBuf, lane: u8) {
    buffer[..64].fill(lane);
    thread::yield_now();
    assert!(buffer[..64].iter().all(|byte| *byte == lane));
}

#[test]
fn more_threads_than_slices_all_get_one_each_time() {
    const LANES: u8 = 6;
    const ROUNDS: usize = 3000;
    let pool: FixedPool = base(4096, 2);
    let begin = Barrier::new(LANES.into());
    thread::scope(|scope| {
        for lane in 0..LANES {
            let (pool, begin) = (&pool, &begin);
            scope.spawn(move || {
                begin.wait();
                for round in 0..ROUNDS {
                    match (lane + u8::try_from(round % 3).unwrap()) % 3 {
                        0 => use_once(pool.take_timeout(LONG).unwrap(), lane),
                        1 => use_once(block_on(pool.take_async()), lane),
                        // Gives up at once where there is none.
                        _ => {
                            if let Ok(buffer) = pool.take_timeout(Duration::ZERO) {
                                use_once(buffer, lane);
                            }
                        }
                    }
                }
            });
        }
    });
    assert_eq!(pool.free_slices(), 2);
}
