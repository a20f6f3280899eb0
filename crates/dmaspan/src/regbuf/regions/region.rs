//! A [`Region`] is shared by the table and by all that hold part of it. The last of them says that
//! it is gone.

use alloc::sync::Arc;
use core::task::{Context, Poll, Waker};

use lock_api::{Mutex, RawMutex};

use super::memory::{HostMemory, RemoteMemory};
use crate::addr::Address;
use crate::prot::Prot;
use crate::span::Span;

/// Memory that a client shares.
pub(super) struct Region<A: Address, L: RawMutex> {
    pub(super) range: Span<A>,
    pub(super) access: Prot,
    /// Let go before `end` says so: fields are dropped in their order.
    pub(super) backing: Backing,
    pub(super) end: RegionEnd<A, L>,
}

/// How a region is reached.
pub(super) enum Backing {
    Mapped(Arc<dyn HostMemory>),
    Remote(Arc<dyn RemoteMemory>),
}

/// Says that its region is gone when it is dropped.
pub(super) struct RegionEnd<A: Address, L: RawMutex>(Arc<Fate<A, L>>);

/// What becomes of a region, for those who wait until it is gone.
pub(super) struct Fate<A: Address, L: RawMutex> {
    pub(super) range: Span<A>,
    state: Mutex<L, State<A, L>>,
}

struct State<A: Address, L: RawMutex> {
    is_gone: bool,
    waiter: Option<Waker>,
    /// The next one that goes by the same unmap: a list that needs no memory.
    next: Option<Arc<Fate<A, L>>>,
    /// The table's reference to the region, between leaving the table and being dropped.
    going: Option<Arc<Region<A, L>>>,
}

impl<A: Address, L: RawMutex> Region<A, L> {
    pub(super) fn new(range: Span<A>, access: Prot, backing: Backing) -> Arc<Self> {
        let state = State { is_gone: false, waiter: None, next: None, going: None };
        let end = RegionEnd(Arc::new(Fate { range, state: Mutex::new(state) }));
        Arc::new(Self { range, access, backing, end })
    }
}

impl<A: Address, L: RawMutex> RegionEnd<A, L> {
    pub(super) fn fate(&self) -> &Arc<Fate<A, L>> {
        &self.0
    }
}

impl<A: Address, L: RawMutex> Drop for RegionEnd<A, L> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_gone = true;
        let waiter = state.waiter.take();
        // A waker is code of somebody else's.
        drop(state);
        if let Some(waiter) = waiter {
            waiter.wake();
        }
    }
}

impl<A: Address, L: RawMutex> Fate<A, L> {
    pub(super) fn is_gone(&self) -> bool {
        self.state.lock().is_gone
    }

    /// Ready when the region is gone; else its end wakes the context's task.
    pub(super) fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()> {
        // Cloned and dropped without the lock, as both are code of somebody else's.
        let waiter = context.waker().clone();
        let mut state = self.state.lock();
        if state.is_gone {
            return Poll::Ready(());
        }
        let former = state.waiter.replace(waiter);
        drop(state);
        drop(former);
        Poll::Pending
    }

    /// Keeps the table's reference to its region, and the next region to go.
    pub(super) fn retire(&self, region: Arc<Region<A, L>>, next: Option<Arc<Self>>) {
        let mut state = self.state.lock();
        (state.going, state.next) = (Some(region), next);
    }

    /// Drops the table's reference, and returns the next region to go.
    pub(super) fn let_go(&self) -> Option<Arc<Self>> {
        let mut state = self.state.lock();
        let (going, next) = (state.going.take(), state.next.clone());
        // Its end takes the lock.
        drop(state);
        drop(going);
        next
    }

    pub(super) fn take_next(&self) -> Option<Arc<Self>> {
        self.state.lock().next.take()
    }
}
