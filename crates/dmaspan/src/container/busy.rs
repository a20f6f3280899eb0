//! Waiting for other operations, for front ends that must look like Linux, which waits.

use core::sync::atomic::Ordering;

use lock_api::RawMutex;

use super::Container;
use super::error::Error;
use crate::pin::Pinner;

/// A [`BusyHook`] does not wait any longer: the caller is told [`Error::Busy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GaveUp;

/// How callers wait while another operation is at work on their range.
///
/// Without one they are told [`Error::Busy`]. Linux serialises what is done with a container, so a
/// front end that must look like it waits: a thread sleeps until it is woken, a kernel's task in a
/// wait queue.
pub trait BusyHook: Send + Sync {
    /// Returns when `ready` does not answer `false` any more. It may do so earlier: then the
    /// operation waits again.
    ///
    /// # Context
    ///
    /// No lock of the container is held. The operation that is waited for may be pinning memory:
    /// the caller of the container holds nothing that a pinner waits for. `ready` may be called any
    /// number of times, and under a lock of the hook's own.
    ///
    /// # Errors
    ///
    /// [`GaveUp`], for instance since a signal came.
    fn wait(&self, ready: &dyn Fn() -> bool) -> Result<(), GaveUp>;

    /// An operation has ended that others may wait for: what `ready` answers may have changed.
    ///
    /// # Context
    ///
    /// No lock of the container is held. Called from where unmapping is allowed: it does not
    /// allocate.
    fn wake(&self);
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Does `attempt`, which changes nothing where another operation is in its way, until none is
    /// or the hook gives up.
    pub(super) fn waiting<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T, Error<P::Error>>,
    ) -> Result<T, Error<P::Error>> {
        loop {
            // Before the attempt: what ends from here on is not waited for.
            let seen = self.ended.load(Ordering::Acquire);
            let busy = match attempt() {
                Err(error @ (Error::Busy { .. } | Error::Changing)) => error,
                result => return result,
            };
            let ready = || self.ended.load(Ordering::Acquire) != seen;
            match &self.hook {
                Some(hook) if hook.wait(&ready).is_ok() => {}
                _ => return Err(busy),
            }
        }
    }

    /// Says that an operation has ended that others may wait for.
    pub(super) fn wake(&self) {
        self.ended.fetch_add(1, Ordering::Release);
        if let Some(hook) = &self.hook {
            hook.wake();
        }
    }
}
