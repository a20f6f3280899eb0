//! The tests' platform: locks that loom sees, CPUs that threads say, and a clock that they set.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::Platform;
use dmaspan::platform::Flag;

loom::thread_local! {
    static CPU: Cell<usize> = Cell::new(0);
}

/// Runs the rest of the calling thread as on that CPU; threads begin on CPU 0.
pub(crate) fn run_on(cpu: usize) {
    CPU.with(|own| own.set(cpu));
}

/// A machine whose clock goes when it is told to.
#[derive(Debug, Default)]
pub(crate) struct Machine {
    /// Loom need not know: a clock synchronises nothing.
    now: AtomicU64,
}

impl Machine {
    /// Lets nanoseconds pass.
    pub(crate) fn pass(&self, nanoseconds: u64) {
        self.now.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}

impl Platform for Machine {
    type Lock = Flag;

    fn cpu(&self) -> usize {
        CPU.with(Cell::get)
    }

    fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }
}

/// What the others stand on: a lock lets one in at a time, and shows what was done before.
#[test]
fn a_flag_keeps_others_out() {
    loom::model(|| {
        let counter = loom::sync::Arc::new(lock_api::Mutex::<Flag, u32>::new(0));
        let threads = [0, 1].map(|cpu| {
            let counter = loom::sync::Arc::clone(&counter);
            loom::thread::spawn(move || {
                run_on(cpu);
                let machine = Machine::default();
                machine.pass(1);
                assert_eq!((machine.cpu(), machine.now()), (cpu, 1));
                *counter.lock() += 1;
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(*counter.lock(), 2);
    });
}
