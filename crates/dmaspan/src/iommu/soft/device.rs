//! A [`SoftDevice`] is what a device model does its accesses by.

use alloc::collections::TryReserveError;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::convert::Infallible;
use core::marker::PhantomData;
use core::{fmt, mem};

use super::bus::{Bus, BusError};
use super::slot::{Route, Slot, needs};
use super::spans::Spans;
use crate::addr::{Address, Iova, PhysAddr};
use crate::atomic::Ordering;
use crate::error::Errno;
use crate::io_pgtable::{Arena, Format, MappedRun, TableMemory};
use crate::iommu::fault::{
    FaultAccess, FaultHook, FaultReason, FaultReport, FaultResponse, FaultState,
};
use crate::platform::Flag;
use crate::range::{IovaRange, RangeError};
use crate::span::Span;

/// An access of a device model that the IOMMU refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the device's {} of {range} was refused at {}: {}",
    verb(*access), range.start(), why(*reason)
)]
pub struct AccessFault {
    /// From the address that was refused to the end of the access. What lies before it was done.
    pub range: IovaRange,
    /// What the device tried.
    pub access: FaultAccess,
    /// Why that was refused.
    pub reason: FaultReason,
}

const fn verb(access: FaultAccess) -> &'static str {
    match access {
        FaultAccess::Read => "read",
        FaultAccess::Write => "write",
        FaultAccess::Execute => "fetch",
    }
}

const fn why(reason: FaultReason) -> &'static str {
    match reason {
        FaultReason::Blocked => "the device has no domain",
        FaultReason::Translation => "nothing is mapped there",
        FaultReason::Permission => "what is mapped there does not permit it",
        FaultReason::Tables => "the tables there are corrupt",
        FaultReason::Other(_) => "the hardware has its reasons",
    }
}

/// The reason why an access of a device model ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessFailed<E> {
    /// The IOMMU refused it, or the rest of it.
    #[error(transparent)]
    Fault(#[from] AccessFault),
    /// There is no such range. Nothing was done.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The memory, as the device model reaches it, stopped the access.
    #[error("the access at iova {iova} stopped after {done:#x} bytes: {error}")]
    Stopped {
        /// The address that the device used for the failed part.
        iova: Iova,
        /// Bytes done before the failed part.
        done: u64,
        /// Why.
        error: E,
    },
}

impl<E> AccessFailed<E> {
    /// `EFAULT` for what the IOMMU refused, what a range has, and `EIO` for the rest.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Fault(_) => Errno::EFAULT,
            Self::Range(error) => error.errno(),
            Self::Stopped { .. } => Errno::EIO,
        }
    }
}

/// What all handles of a device have in common.
pub(super) struct Named {
    pub(super) stream: u32,
    pub(super) faults: FaultHook<Flag>,
}

/// A device model behind a [`SoftIommu`](super::SoftIommu), with an IOTLB of its own; from
/// [`SoftIommu::device`](super::SoftIommu::device) or
/// [`SoftStream::device`](super::SoftStream::device).
///
/// An access takes `&mut self`, so that none begins within another of the same device model.
/// Several threads of a device have several of these.
pub struct SoftDevice<F: Format, M: TableMemory<F::Word> = Arena, A = PhysAddr> {
    slot: Arc<Slot<F, M>>,
    named: Arc<Named>,
    faulting: FaultState,
    addresses: PhantomData<fn() -> A>,
}

impl<F: Format, M: TableMemory<F::Word>, A> SoftDevice<F, M, A> {
    /// One that is blocked.
    pub(super) fn new(stream: u32) -> Self {
        Self::of(Arc::new(Named { stream, faults: FaultHook::new() }))
    }

    /// One more of a device.
    pub(super) fn of(named: Arc<Named>) -> Self {
        let slot = Arc::new(Slot::new(Route::Blocked));
        Self { slot, named, faulting: FaultState::Ended, addresses: PhantomData }
    }

    pub(super) fn slot(&self) -> &Arc<Slot<F, M>> {
        &self.slot
    }
}

impl<F: Format, M: TableMemory<F::Word>, A: Address> SoftDevice<F, M, A> {
    /// Does one access: calls `each` with every span of memory that `range` leads to, in the order
    /// of IOVAs, each as long as memory is contiguous.
    ///
    /// All of it is one access: no invalidation returns while `each` runs. The address of a span is
    /// good for nothing after that.
    ///
    /// A fault is [reported](Self::faults). Where it [stalls](Self::set_faulting) and the handler
    /// says so, the rest of the access is tried again.
    ///
    /// # Context
    ///
    /// `each` does not wait for an unmap, nor for anybody who does, and makes no device models.
    ///
    /// # Errors
    ///
    /// [`AccessFailed::Fault`] for the first address that is refused, and
    /// [`AccessFailed::Stopped`] with the first error of `each`. What came before was done.
    #[inline]
    pub fn access<E>(
        &mut self,
        range: IovaRange,
        access: FaultAccess,
        mut each: impl FnMut(Span<A>) -> Result<(), E>,
    ) -> Result<(), AccessFailed<E>> {
        {
            let state = self.slot.begin();
            if let Some(span) = state.spans.find(range, needs(access)) {
                let stopped = |error| AccessFailed::Stopped { iova: range.start(), done: 0, error };
                return each(span.of_output()).map_err(stopped);
            }
        }
        self.access_in_parts(range, access, &mut each)
    }

    /// Reads the bytes of memory from `iova` on. An empty buffer reads nothing.
    ///
    /// # Errors
    ///
    /// As for [`access`](Self::access), and [`AccessFailed::Range`] where `iova` and the length
    /// wrap.
    pub fn read<B: Bus<A> + ?Sized>(
        &mut self,
        bus: &B,
        iova: Iova,
        buf: &mut [u8],
    ) -> Result<(), AccessFailed<BusError>> {
        if buf.is_empty() {
            return Ok(());
        }
        let range = range_of(iova, buf.len())?;
        let mut rest = buf;
        self.access(range, FaultAccess::Read, |span| {
            let whole = mem::take(&mut rest);
            let (part, more) = whole.split_at_mut(len_of(span, whole.len()));
            rest = more;
            bus.read(span.start(), part)
        })
    }

    /// Writes the bytes of `buf` to memory from `iova` on. An empty buffer writes nothing.
    ///
    /// # Errors
    ///
    /// As for [`read`](Self::read).
    pub fn write<B: Bus<A> + ?Sized>(
        &mut self,
        bus: &B,
        iova: Iova,
        buf: &[u8],
    ) -> Result<(), AccessFailed<BusError>> {
        if buf.is_empty() {
            return Ok(());
        }
        let range = range_of(iova, buf.len())?;
        let mut rest = buf;
        self.access(range, FaultAccess::Write, |span| {
            let (part, more) = rest.split_at(len_of(span, rest.len()));
            rest = more;
            bus.write(span.start(), part)
        })
    }

    /// Returns where an access to one byte goes, for looking alone: the address is good for nothing
    /// when this returns. It fills the IOTLB, and marks and reports, as an access does.
    ///
    /// # Errors
    ///
    /// [`AccessFault`] where it is refused.
    pub fn probe(&mut self, iova: Iova, access: FaultAccess) -> Result<A, AccessFault> {
        let range = IovaRange::point(iova);
        let mut found = None;
        let done = self.access(range, access, |span| {
            found = Some(span.start());
            Ok::<_, Infallible>(())
        });
        let unmapped = AccessFault { range, access, reason: FaultReason::Translation };
        match done {
            Ok(()) => found.ok_or(unmapped),
            Err(AccessFailed::Fault(fault)) => Err(fault),
            Err(_) => Err(unmapped),
        }
    }

    /// Where faults of the device are reported: set a handler there to hear of them.
    pub fn faults(&self) -> &FaultHook<Flag> {
        &self.named.faults
    }

    /// Sets whether an access that faults is held until the handler has answered, which may map
    /// what is missing and have it tried again. At first it has ended.
    pub fn set_faulting(&mut self, faulting: FaultState) {
        self.faulting = faulting;
    }

    /// Gives the IOTLB room for so many spans, at least one, and forgets those that are in it. At
    /// first there is room for 32.
    ///
    /// # Errors
    ///
    /// [`TryReserveError`] where there is no memory for so many, with nothing changed.
    ///
    /// # Context
    ///
    /// Allocates.
    pub fn set_places(&mut self, places: usize) -> Result<(), TryReserveError> {
        // Allocated and freed without the lock, which an invalidation waits for.
        let spans = Spans::new(places)?;
        let former = mem::replace(&mut self.slot.begin().spans, spans);
        drop(former);
        Ok(())
    }

    /// Returns how often a look-up had to walk the tables, or would have had to.
    pub fn misses(&self) -> u64 {
        self.slot.begin().misses
    }

    /// The translations that the IOTLB keeps, in the order of their IOVAs.
    pub fn cached(&self) -> Vec<MappedRun> {
        self.slot.begin().spans.runs()
    }

    /// [`access`](Self::access) where more than one span may answer, or none.
    #[cold]
    #[inline(never)]
    fn access_in_parts<E>(
        &mut self,
        range: IovaRange,
        access: FaultAccess,
        each: &mut impl FnMut(Span<A>) -> Result<(), E>,
    ) -> Result<(), AccessFailed<E>> {
        let mut rest = range;
        loop {
            let fault = match self.parts(&mut rest, access, each) {
                Ok(()) => return Ok(()),
                Err(Ended::Stopped(error)) => {
                    let iova = rest.start();
                    let done = iova.get() - range.start().get();
                    return Err(AccessFailed::Stopped { iova, done, error });
                }
                Err(Ended::Refused(reason)) => AccessFault { range: rest, access, reason },
            };
            if self.report(fault) == FaultResponse::Terminate {
                return Err(fault.into());
            }
        }
    }

    /// Does what is left of an access as one; `rest` is what is not done.
    fn parts<E>(
        &mut self,
        rest: &mut IovaRange,
        access: FaultAccess,
        each: &mut impl FnMut(Span<A>) -> Result<(), E>,
    ) -> Result<(), Ended<E>> {
        let mut state = self.slot.begin();
        loop {
            let run = state.translate(*rest, access).map_err(Ended::Refused)?;
            let offset = rest.start().get() - run.range.start().get();
            let above = (run.range.len_less_one() - offset).min(rest.len_less_one());
            let span = Span::covering(run.paddr.wrapping_add(offset), above);
            each(span.of_output()).map_err(Ended::Stopped)?;
            let next = rest.start().wrapping_add(above).checked_add(1);
            match next.and_then(|next| IovaRange::new(next, rest.last())) {
                Some(more) => *rest = more,
                None => return Ok(()),
            }
        }
    }

    /// Says that an access was refused, without the lock: the handler may map and unmap.
    fn report(&self, fault: AccessFault) -> FaultResponse {
        self.named.faults.report(&FaultReport {
            stream: self.named.stream,
            iova: fault.range.start(),
            access: fault.access,
            reason: fault.reason,
            state: self.faulting,
        })
    }
}

/// Why a part of an access was not done.
enum Ended<E> {
    Refused(FaultReason),
    Stopped(E),
}

/// `len` bytes from `iova` on.
fn range_of(iova: Iova, len: usize) -> Result<IovaRange, RangeError> {
    IovaRange::from_len(iova, u64::try_from(len).unwrap_or(u64::MAX))
}

/// The bytes of a span, which are no more than `most`.
fn len_of<A: Address>(span: Span<A>, most: usize) -> usize {
    usize::try_from(span.len()).unwrap_or(most).min(most)
}

/// Nothing is cached for it any more, and its tables are not kept.
impl<F: Format, M: TableMemory<F::Word>, A> Drop for SoftDevice<F, M, A> {
    fn drop(&mut self) {
        let released = self.slot.state.lock().change(Route::Blocked);
        self.slot.gone.store(true, Ordering::Relaxed);
        // May be the last to have the memory of the tables: not under the lock.
        drop(released);
    }
}

impl<F: Format, M: TableMemory<F::Word>, A> fmt::Debug for SoftDevice<F, M, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoftDevice")
            .field("stream", &self.named.stream)
            .field("faults", &self.named.faults)
            .finish_non_exhaustive()
    }
}
