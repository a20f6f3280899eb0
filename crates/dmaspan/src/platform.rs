//! [`Platform`] is what the core asks of a kernel or process that runs it: locks, a number for the
//! CPU, a clock, caches.

use alloc::sync::Arc;
use core::fmt;
use core::ops::{Deref, DerefMut};

use lock_api::{GuardSend, RawMutex};

#[cfg(not(loom))]
use crate::atomic::{AtomicBool, Ordering};
use crate::span::Span;

/// The place where the code runs: a kernel, or a process.
///
/// Nothing here is a matter of memory safety: a wrong answer makes it slow, late, or, where caches
/// are not maintained, leaves a device with old data.
pub trait Platform: Send + Sync {
    /// The lock around what is shared and used rarely. A kernel's keeps interrupts off where
    /// mappings are made or ended in interrupts.
    type Lock: RawMutex + Send + Sync;

    /// The number of the CPU, or of the thread's place in user space: a hint. Threads with the same
    /// number share caches, and are slower for it, but no less right.
    fn cpu(&self) -> usize;

    /// The number of the CPU's NUMA node: a hint, too.
    fn node(&self) -> usize {
        0
    }

    /// Nanoseconds since any fixed moment. It never goes back, and may be coarse: what has a bound
    /// in time is late by as much.
    fn now(&self) -> u64;

    /// Writes the CPU's caches of `span` back to memory, for a device that does not see them.
    /// Nothing, where all devices do.
    fn write_back(&self, _span: Span) {}

    /// Makes the CPU's caches forget `span`, which a device wrote that does not see them. Lines
    /// that reach beyond it are written back first, for the neighbour's sake (as arm64's
    /// `dcache_inval_poc`). Nothing, where all devices do.
    fn invalidate(&self, _span: Span) {}
}

/// A machine of one thread, whose clock stands still: the smallest [`Platform`], for tests, for
/// examples, and for kernels that have one CPU and no lazy unmaps.
///
/// It takes several threads to no harm: they share the caches of one CPU, and the locks are real.
/// What has a bound in time waits for its bound in number instead, since no time passes. A process
/// of Linux has `dmaspan_linux::UserPlatform`.
///
/// ```
/// use dmaspan::Platform;
/// use dmaspan::platform::OneThread;
///
/// assert_eq!(OneThread.cpu(), 0);
/// assert_eq!(OneThread.now(), OneThread.now());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OneThread;

impl Platform for OneThread {
    type Lock = Flag;

    #[inline]
    fn cpu(&self) -> usize {
        0
    }

    #[inline]
    fn now(&self) -> u64 {
        0
    }
}

/// A lock that is a flag: an exchange to take it, a plain store to leave it.
///
/// It guards what belongs to one CPU, and there it is only *tried*: a caller that finds it taken
/// goes elsewhere instead of waiting. So it takes part in no deadlock, also not with an interrupt
/// that comes while it is held. As any other lock it serves where it is held for a few steps and
/// nothing that interrupts its holder takes it: [`lock`](RawMutex::lock) spins.
pub struct Flag(#[cfg(not(loom))] AtomicBool, #[cfg(loom)] std::sync::OnceLock<usize>);

#[cfg(not(loom))]
#[expect(unsafe_code, reason = "a lock is a promise to keep others out")]
// SAFETY: whoever sets the flag that was clear, by an exchange, holds the lock until it clears the
// flag. The exchange acquires what the clearing store released.
unsafe impl RawMutex for Flag {
    const INIT: Self = Self(AtomicBool::new(false));

    type GuardMarker = GuardSend;

    #[inline(always)]
    fn lock(&self) {
        if !self.try_lock() {
            self.spin();
        }
    }

    #[inline(always)]
    fn try_lock(&self) -> bool {
        !self.0.swap(true, Ordering::Acquire)
    }

    #[inline(always)]
    fn is_locked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    #[inline(always)]
    unsafe fn unlock(&self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(not(loom))]
impl Flag {
    /// Takes the flag, which somebody else has.
    #[cold]
    fn spin(&self) {
        // Looked at between the exchanges, each of which takes the line from whoever has the flag.
        while self.is_locked() || !self.try_lock() {
            core::hint::spin_loop();
        }
    }
}

#[cfg(loom)]
#[expect(unsafe_code, reason = "a lock is a promise to keep others out")]
// SAFETY: the lock is a lock of loom's, whose guard is kept until it is unlocked.
unsafe impl RawMutex for Flag {
    const INIT: Self = Self(std::sync::OnceLock::new());

    type GuardMarker = GuardSend;

    fn lock(&self) {
        let lock = self.lock_of_loom();
        let guard = lock.mutex.lock().expect("a panic ends the test");
        lock.guard.replace(Some(guard));
    }

    fn try_lock(&self) -> bool {
        let lock = self.lock_of_loom();
        let guard = lock.mutex.try_lock().ok();
        let taken = guard.is_some();
        if taken {
            lock.guard.replace(guard);
        }
        taken
    }

    unsafe fn unlock(&self) {
        // Only then may another take it and put its own guard there.
        let guard = self.lock_of_loom().guard.take();
        drop(guard);
    }
}

/// Loom's locks cannot be made in a constant, and have to be made before any thread meets them: a
/// [`Flag`] becomes one of these with its first use.
#[cfg(loom)]
struct LoomLock {
    mutex: loom::sync::Mutex<()>,
    guard: core::cell::RefCell<Option<loom::sync::MutexGuard<'static, ()>>>,
}

#[cfg(loom)]
loom::lazy_static! {
    static ref LOCKS: ([LoomLock; 64], core::cell::Cell<usize>) = {
        let lock = |_| LoomLock { mutex: loom::sync::Mutex::new(()), guard: None.into() };
        (core::array::from_fn(lock), 0.into())
    };
}

#[cfg(loom)]
impl Flag {
    fn lock_of_loom(&self) -> &'static LoomLock {
        let (locks, used): &'static ([LoomLock; 64], _) = &LOCKS;
        &locks[*self.0.get_or_init(|| used.replace(used.get() + 1))]
    }
}

impl fmt::Debug for Flag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flag").finish_non_exhaustive()
    }
}

/// A value on cache lines of its own: 128 bytes, since neighbouring lines of 64 are fetched in
/// pairs.
#[repr(align(128))]
#[derive(Debug)]
pub(crate) struct Apart<T>(pub(crate) T);

impl<T> Deref for Apart<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Apart<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// What tells an object from all others that handles of it may meet.
///
/// Handles carry the number. It is unique among the objects that live; an object that is dropped
/// while handles are out keeps its number for ever, by [`keep`](Self::keep) or a clone that is
/// leaked.
#[derive(Clone, Debug)]
pub(crate) struct Identity(Arc<()>);

/// The number of an [`Identity`].
pub(crate) type Id = usize;

impl Identity {
    pub(crate) fn new() -> Self {
        Self(Arc::new(()))
    }

    #[inline(always)]
    pub(crate) fn id(&self) -> Id {
        Arc::as_ptr(&self.0).addr()
    }

    /// Nobody else will have this number.
    pub(crate) fn keep(&self) {
        core::mem::forget(Arc::clone(&self.0));
    }
}
