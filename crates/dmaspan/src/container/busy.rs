//! An operation waits for others here, by the hook of a front end that must look like Linux, where
//! requests wait.

use core::hint;
use core::sync::atomic::Ordering;

use lock_api::RawMutex;

use super::error::Error;
use super::{Container, State};
use crate::pin::Pinner;

/// A [`BusyHook`] does not wait any longer: the caller is told [`Error::Busy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GaveUp;

/// Lets callers wait while another operation is at work on their range.
///
/// Without one they are told [`Error::Busy`]. Linux serialises what is done with a container, so a
/// front end that must look like it waits: a thread sleeps until it is woken, a kernel's task in a
/// wait queue.
///
/// A change of domains or tracking goes first, and so does a revocation: nobody begins anything
/// while one waits for what others are at. So a sink, a pinner or a question about cancellation,
/// which are called in the middle of an operation, must not wait here for an operation of their
/// own: their hook gives up.
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

/// How often it is looked whether another operation has ended, where there is no hook: some 40 ms,
/// for all that one operation waits for together. Looks are counted as nothing here has a clock or
/// can sleep: a kernel that has either gives a hook. The bound keeps a caller that comes in the
/// middle of an operation of its own from hanging.
const MAX_SPINS: u32 = 1 << 20;

/// The claim of whoever goes first, withdrawn when it is dropped: nobody else begins meanwhile.
pub(super) struct Claim<'c, P: Pinner, L: RawMutex, const BATCH: usize> {
    container: &'c Container<P, L, BATCH>,
    /// 1 of a claim to revoke, beside whatever is elsewhere; 0 of one to work alone.
    revoking: usize,
}

impl<'c, P: Pinner, L: RawMutex, const BATCH: usize> Claim<'c, P, L, BATCH> {
    fn new(container: &'c Container<P, L, BATCH>, all: &mut State<P>, revoking: usize) -> Self {
        all.asking += 1;
        all.revoking += revoking;
        Self { container, revoking }
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Drop for Claim<'_, P, L, BATCH> {
    fn drop(&mut self) {
        let mut all = self.container.state.lock();
        all.asking -= 1;
        all.revoking -= self.revoking;
        drop(all);
        // Others may begin again, unless it works now.
        self.container.wake();
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Does `attempt`, which changes nothing where another operation is in its way, until none is
    /// or the hook gives up.
    #[inline(always)]
    pub(super) fn waiting<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T, Error<P::Error>>,
    ) -> Result<T, Error<P::Error>> {
        let seen = self.seen();
        let result = attempt();
        self.or_wait(seen, result, &mut attempt)
    }

    /// How many operations have ended: asked before an attempt, as what ends from here on is not
    /// waited for.
    #[inline(always)]
    pub(super) fn seen(&self) -> u64 {
        self.ended.load(Ordering::Acquire)
    }

    /// [`waiting`](Self::waiting) behind a first attempt with this `result`, before which so many
    /// operations were [seen](Self::seen).
    #[inline(always)]
    pub(super) fn or_wait<T>(
        &self,
        seen: u64,
        result: Result<T, Error<P::Error>>,
        attempt: &mut dyn FnMut() -> Result<T, Error<P::Error>>,
    ) -> Result<T, Error<P::Error>> {
        match result {
            Err(Error::Busy { .. } | Error::Changing) => self.wait_on(result, seen, attempt),
            _ => result,
        }
    }

    /// Goes on with `attempt`, which found another operation in its way, when `seen` was the number
    /// of those that had ended.
    #[cold]
    fn wait_on<T>(
        &self,
        mut result: Result<T, Error<P::Error>>,
        mut seen: u64,
        attempt: &mut dyn FnMut() -> Result<T, Error<P::Error>>,
    ) -> Result<T, Error<P::Error>> {
        while let Err(Error::Busy { .. } | Error::Changing) = result {
            let ready = || self.ended.load(Ordering::Acquire) != seen;
            match &self.hook {
                Some(hook) if hook.wait(&ready).is_ok() => {}
                _ => break,
            }
            seen = self.seen();
            result = attempt();
        }
        result
    }

    /// Does `attempt`, which begins what nobody else may work beside, when all others are done.
    /// From the first attempt on nobody begins anything, until one succeeds or this gives up.
    pub(super) fn waiting_alone<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T, Error<P::Error>>,
    ) -> Result<T, Error<P::Error>> {
        match attempt() {
            Err(Error::Changing) => {}
            result => return result,
        }
        let _claim = Claim::new(self, &mut self.state.lock(), 0);
        self.waiting_first(attempt)
    }

    /// Lets nobody begin any more until the claim is dropped, but whoever revokes. Those go first
    /// that wait to work alone.
    pub(super) fn claim_revoking(&self) -> Result<Claim<'_, P, L, BATCH>, Error<P::Error>> {
        self.waiting_first(|| {
            let mut all = self.state.lock();
            if all.exclusive || all.asking > all.revoking {
                return Err(Error::Changing);
            }
            Ok(Claim::new(self, &mut all, 1))
        })
    }

    /// Does `attempt` until nobody is in its way any more. There is an end to it: whoever does this
    /// has a claim, so that only those are who had begun before.
    ///
    /// Without a hook it spins a bounded time, since whoever is at work is a thread that goes on:
    /// told to come again, the caller would hardly ever find a moment in which nobody works.
    pub(super) fn waiting_first<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T, Error<P::Error>>,
    ) -> Result<T, Error<P::Error>> {
        if self.hook.is_some() {
            return self.waiting(attempt);
        }
        let mut spins = 0;
        loop {
            let seen = self.seen();
            let result = attempt();
            if !matches!(result, Err(Error::Busy { .. } | Error::Changing)) {
                return result;
            }
            // Also where something ends all the time that is not waited for.
            spins += 1;
            while self.seen() == seen && spins < MAX_SPINS {
                spins += 1;
                hint::spin_loop();
            }
            if spins >= MAX_SPINS {
                return result;
            }
        }
    }

    /// Says that an operation has ended that others may wait for.
    #[inline(always)]
    pub(super) fn wake(&self) {
        self.ended.fetch_add(1, Ordering::Release);
        if let Some(hook) = &self.hook {
            hook.wake();
        }
    }
}
