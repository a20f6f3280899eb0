//! What the core asks of whoever runs it: locks, a number for the CPU, a clock, caches.

use alloc::sync::Arc;
use core::fmt;
use core::ops::{Deref, DerefMut};

use lock_api::{GuardSend, RawMutex};

use crate::atomic::{AtomicBool, Ordering};
use crate::span::Span;

/// Where the code runs: a kernel, or a process.
///
/// Nothing here is a matter of memory safety: a wrong answer makes it slow, late, or, where caches
/// are not maintained, leaves a device with old data.
pub trait Platform: Send + Sync {
    /// The lock around what is shared and used rarely. A kernel's keeps interrupts off where
    /// mappings are made or ended in interrupts.
    type Lock: RawMutex + Send + Sync;

    /// The number of the CPU, or of the thread's place in user space: a hint. Whoever shares a
    /// number shares caches, and two threads with one number are only slower.
    fn cpu(&self) -> usize;

    /// Nanoseconds since any fixed moment. It never goes back, and may be coarse: what has a bound
    /// in time is late by as much.
    fn now(&self) -> u64;

    /// Writes the CPU's caches of `span` back to memory, for a device that does not see them.
    /// Nothing, where all devices do.
    fn write_back(&self, _span: Span) {}

    /// Makes the CPU's caches forget `span`, which a device wrote that does not see them. Nothing,
    /// where all devices do.
    fn invalidate(&self, _span: Span) {}
}

/// A lock that is a flag: an exchange to take it, a plain store to leave it.
///
/// It is for what a CPU has of its own, which is only ever *tried*: who finds it taken goes
/// elsewhere instead of waiting. So it takes part in no deadlock, also not with an interrupt that
/// comes while it is held. [`lock`](RawMutex::lock) spins.
pub struct Flag(
    #[cfg(not(loom))] AtomicBool,
    // Loom's atomics cannot be made in a constant.
    #[cfg(loom)] std::sync::OnceLock<AtomicBool>,
);

impl Flag {
    #[cfg(not(loom))]
    #[inline(always)]
    fn taken(&self) -> &AtomicBool {
        &self.0
    }

    #[cfg(loom)]
    fn taken(&self) -> &AtomicBool {
        self.0.get_or_init(|| AtomicBool::new(false))
    }
}

#[expect(unsafe_code, reason = "a lock is a promise to keep others out")]
// SAFETY: whoever sets the flag that was clear, by an exchange, holds the lock until it clears the
// flag. The exchange acquires what the clearing store released.
unsafe impl RawMutex for Flag {
    const INIT: Self = Self(
        #[cfg(not(loom))]
        AtomicBool::new(false),
        #[cfg(loom)]
        std::sync::OnceLock::new(),
    );

    type GuardMarker = GuardSend;

    fn lock(&self) {
        while !self.try_lock() {
            core::hint::spin_loop();
        }
    }

    #[inline(always)]
    fn try_lock(&self) -> bool {
        !self.taken().swap(true, Ordering::Acquire)
    }

    #[inline(always)]
    unsafe fn unlock(&self) {
        self.taken().store(false, Ordering::Release);
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
/// Handles carry the number. It is unique among the objects that live; whoever is dropped while
/// handles are out keeps its number for ever, by [`keep`](Self::keep).
#[derive(Debug)]
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
