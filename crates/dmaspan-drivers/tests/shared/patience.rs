//! A host whose locks say who waits for them: they count, or are loom's.

use std::boxed::Box;
#[cfg(not(loom))]
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use dmaspan::{PhysAddr, lg2};
#[cfg(loom)]
use loom::thread;
#[cfg(not(loom))]
use std::thread;

use crate::host::{Again, Host, NoMemory, Structure};

#[cfg(not(loom))]
std::thread_local! {
    /// How often this thread waited for a lock, and how often it tried one.
    pub(crate) static WAITED: Cell<u32> = const { Cell::new(0) };
    pub(crate) static TRIED: Cell<u32> = const { Cell::new(0) };
}

/// A lock that counts.
#[cfg(not(loom))]
pub(crate) struct Lock(dmaspan::platform::Flag);

#[cfg(not(loom))]
#[expect(unsafe_code, reason = "a lock is a promise to keep others out")]
// SAFETY: it is the lock within.
unsafe impl lock_api::RawMutex for Lock {
    const INIT: Self = Self(dmaspan::platform::Flag::INIT);

    type GuardMarker = lock_api::GuardSend;

    fn lock(&self) {
        WAITED.set(WAITED.get() + 1);
        self.0.lock();
    }

    fn try_lock(&self) -> bool {
        TRIED.set(TRIED.get() + 1);
        self.0.try_lock()
    }

    unsafe fn unlock(&self) {
        // SAFETY: the caller holds this lock, and so the one within.
        unsafe { self.0.unlock() }
    }
}

/// A lock that may be tried. Loom's own makes a thread that tries it wait where another has it.
#[cfg(loom)]
pub(crate) struct Lock(std::sync::OnceLock<(loom::sync::Mutex<bool>, loom::sync::Condvar)>);

#[cfg(loom)]
impl Lock {
    /// Whether it is locked, and who waits for it.
    fn state(&self) -> (loom::sync::MutexGuard<'_, bool>, &loom::sync::Condvar) {
        let (is_locked, left) = self.0.get_or_init(Default::default);
        (is_locked.lock().expect("a panic ends the test"), left)
    }
}

#[cfg(loom)]
#[expect(unsafe_code, reason = "a lock is a promise to keep others out")]
// SAFETY: whoever sets the flag that was clear, under loom's lock, holds the lock until it clears
// the flag.
unsafe impl lock_api::RawMutex for Lock {
    const INIT: Self = Self(std::sync::OnceLock::new());

    type GuardMarker = lock_api::GuardSend;

    fn lock(&self) {
        let (mut is_locked, left) = self.state();
        while *is_locked {
            is_locked = left.wait(is_locked).expect("a panic ends the test");
        }
        *is_locked = true;
    }

    fn try_lock(&self) -> bool {
        !std::mem::replace(&mut *self.state().0, true)
    }

    unsafe fn unlock(&self) {
        let (mut is_locked, left) = self.state();
        *is_locked = false;
        left.notify_one();
    }
}

pub(crate) struct Memory(Box<[AtomicU64]>);

#[expect(unsafe_code, reason = "the hardware of the tests has these words alone")]
// SAFETY: the words are the structure's own, and no hardware knows the address.
unsafe impl Structure for Memory {
    fn paddr(&self) -> PhysAddr {
        PhysAddr::new(0)
    }

    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

/// A host that waits so many polls.
pub(crate) struct Patience {
    polls: u32,
    calls: AtomicU32,
}

impl Patience {
    pub(crate) fn new(polls: u32) -> Self {
        Self { polls, calls: AtomicU32::new(0) }
    }

    /// How often it was asked whether to look again.
    #[cfg(not(loom))]
    pub(crate) fn calls(&self) -> u32 {
        self.calls.load(Ordering::Relaxed)
    }
}

#[expect(unsafe_code, reason = "the hardware of the tests has these words alone")]
// SAFETY: the words are zero, and no hardware knows the address.
unsafe impl Host for Patience {
    type Lock = Lock;
    type Structure = Memory;

    fn allocate(&self, lg2_size: u32, _max_paddr: PhysAddr) -> Result<Memory, NoMemory> {
        Ok(Memory((0..lg2::size(lg2_size) / 8).map(|_| AtomicU64::new(0)).collect()))
    }

    fn again(&self, polls: u32) -> Again {
        self.calls.fetch_add(1, Ordering::Relaxed);
        thread::yield_now();
        if polls < self.polls { Again::Poll } else { Again::GiveUp }
    }
}
