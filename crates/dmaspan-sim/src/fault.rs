//! Fault injection makes the n-th fallible step fail.
//!
//! One [`Faults`] counts the fallible steps of everything that is wrapped with it. A sweep runs an
//! operation with the first step failing, then with the second, and so on until none fires, and
//! looks after each whether everything is as before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use dmaspan::dma::{BouncePool, CoherentFrames, CoherentRequest, NoCoherent};
use dmaspan::io_pgtable::{Fresh, NoTables, TableAddr, TableMemory, TableRoot, TableShape, Word};
use dmaspan::iommu::{Event, HardwareError, Invalidation, IommuOps};
use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink, Stopped};
use dmaspan::swiotlb::{Original, SlotRequest, To};
use dmaspan::{
    Address, Coherency, Errno, IovaRange, PhysAddr, Promise, Prot, Span, UserAddr, UserRange,
};

/// Decides which step fails. Clones count together.
#[derive(Clone, Debug)]
pub struct Faults {
    /// Steps until the one that fails; 0 or below: none will.
    left: Arc<AtomicI64>,
}

impl Default for Faults {
    fn default() -> Self {
        Self { left: Arc::new(AtomicI64::new(0)) }
    }
}

impl Faults {
    /// Nothing fails.
    pub fn none() -> Self {
        Self::default()
    }

    /// Makes the `n`-th step from now on fail; `n` counts from 1.
    pub fn arm(&self, n: u32) {
        self.left.store(n.into(), Ordering::Relaxed);
    }

    /// Lets everything succeed again, and says whether the armed step was reached.
    pub fn disarm(&self) -> Fired {
        match self.left.swap(0, Ordering::Relaxed) {
            ..=0 => Fired::Yes,
            _ => Fired::No,
        }
    }

    /// Counts a step: whether it is the one that fails.
    pub(crate) fn fails(&self) -> bool {
        self.left.fetch_sub(1, Ordering::Relaxed) == 1
    }

    /// Runs `attempt` with its first step failing, its second, … until it has no more steps.
    ///
    /// `attempt` gets the number of the failing step; it sees for itself what a failure means.
    /// Returns how many steps failed.
    pub fn sweep(&self, mut attempt: impl FnMut(u32)) -> u32 {
        for n in 1.. {
            self.arm(n);
            attempt(n);
            if self.disarm() == Fired::No {
                return n - 1;
            }
        }
        unreachable!("an attempt has finitely many steps")
    }
}

/// Says whether an armed fault was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fired {
    /// A step failed.
    Yes,
    /// There were fewer steps.
    No,
}

/// Something whose fallible steps fail when [`Faults`] says so.
#[derive(Clone, Debug)]
pub struct Faulty<T> {
    inner: T,
    faults: Faults,
}

impl<T> Faulty<T> {
    /// `inner`, failing as `faults` says.
    pub fn new(inner: T, faults: &Faults) -> Self {
        Self { inner, faults: faults.clone() }
    }

    /// Returns what is wrapped.
    pub fn inner(&self) -> &T {
        &self.inner
    }
}

#[expect(unsafe_code, reason = "everything but the counting is the inner memory's")]
// SAFETY: every table comes from the inner memory and goes back to it.
unsafe impl<W: Word, M: TableMemory<W>> TableMemory<W> for Faulty<M> {
    type List = M::List;

    fn reserve(&self, shape: TableShape, count: usize) -> Result<M::List, NoTables> {
        if self.faults.fails() {
            return Err(NoTables { asked: count });
        }
        self.inner.reserve(shape, count)
    }

    forward! { inner:
        fn coherency(&self) -> Coherency;
        fn take(
            &self, promise: Promise<'_>, shape: TableShape, list: &mut M::List
        ) -> Option<Fresh<'_, W>>;
        fn publish(&self, fresh: Fresh<'_, W>);
        fn entries(&self, table: &TableAddr) -> &[W::Atomic];
        fn written(&self, promise: Promise<'_>, entries: &[W::Atomic]);
        fn retire(&self, list: &mut M::List, table: TableAddr);
        fn append(&self, promise: Promise<'_>, list: &mut M::List, other: M::List);
        fn free(&self, promise: Promise<'_>, shape: TableShape, list: M::List);
    }
}

#[expect(unsafe_code, reason = "everything but the counting is the inner hooks'")]
// SAFETY: `Ok` comes from the inner hooks only.
unsafe impl<O: IommuOps> IommuOps for Faulty<O> {
    type Address = O::Address;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        if self.faults.fails() {
            return Err(HardwareError { what: "injected failure of an invalidation", status: 0 });
        }
        self.inner.invalidate(what)
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        if self.faults.fails() {
            return Err(HardwareError { what: "injected failure of a map sync", status: 0 });
        }
        self.inner.sync_map(range)
    }

    fn detach(&self) -> Result<(), HardwareError> {
        if self.faults.fails() {
            return Err(HardwareError { what: "injected failure of a detach", status: 0 });
        }
        self.inner.detach()
    }

    forward! { inner:
        fn begin(&self, promise: Promise<'_>, root: &TableRoot) -> Result<(), HardwareError>;
        fn root_changed(
            &self, promise: Promise<'_>, current: &dyn Fn() -> (PhysAddr, u32)
        ) -> Result<(), HardwareError>;
        fn observe(&self, event: &Event<'_>);
        fn max_ranges(&self) -> usize;
    }
}

/// Whether hooks that are wrapped with it forget what they should. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Forgets {
    nothing: Arc<AtomicBool>,
}

impl Forgets {
    /// From now on invalidations answer `Ok` and do nothing: the bug of a driver, for tests of
    /// those who should notice it.
    pub fn nothing(&self) {
        self.nothing.store(true, Ordering::SeqCst);
    }
}

/// Hooks of which invalidations are lost when [`Forgets`] says so.
#[derive(Clone, Debug)]
pub struct SilentHooks<O> {
    inner: O,
    forgets: Forgets,
}

impl<O> SilentHooks<O> {
    /// `inner`, forgetting as `forgets` says.
    pub fn new(inner: O, forgets: &Forgets) -> Self {
        Self { inner, forgets: forgets.clone() }
    }
}

#[expect(unsafe_code, reason = "everything but the bug is the inner hooks'")]
// SAFETY: `Ok` comes from the inner hooks, but where the test plants the bug that it looks for, and
// has device models that touch no memory which anybody else uses.
unsafe impl<O: IommuOps> IommuOps for SilentHooks<O> {
    type Address = O::Address;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        if self.forgets.nothing.load(Ordering::SeqCst) {
            Ok(())
        } else {
            self.inner.invalidate(what)
        }
    }

    forward! { inner:
        fn begin(&self, promise: Promise<'_>, root: &TableRoot) -> Result<(), HardwareError>;
        fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError>;
        fn root_changed(
            &self, promise: Promise<'_>, current: &dyn Fn() -> (PhysAddr, u32)
        ) -> Result<(), HardwareError>;
        fn detach(&self) -> Result<(), HardwareError>;
        fn observe(&self, event: &Event<'_>);
        fn max_ranges(&self) -> usize;
    }
}

#[expect(unsafe_code, reason = "everything but the counting is the inner pool's")]
// SAFETY: every slot is the inner pool's, and so is every copy.
unsafe impl<B: BouncePool> BouncePool for Faulty<B> {
    type Slot = B::Slot;

    fn take(&self, original: Original, request: &SlotRequest) -> Option<B::Slot> {
        if self.faults.fails() { None } else { self.inner.take(original, request) }
    }

    fn take_all(
        &self,
        originals: impl Iterator<Item = Original>,
        request: &SlotRequest,
        slots: &mut Vec<B::Slot>,
    ) -> bool {
        let mut all = Vec::new();
        for original in originals {
            if self.faults.fails() {
                return false;
            }
            all.push(original);
        }
        self.inner.take_all(all.into_iter(), request, slots)
    }

    forward! { inner:
        fn release(&self, slot: B::Slot);
        fn quarantine(&self, slot: B::Slot);
        fn span(&self, slot: &B::Slot) -> Span;
        fn copy(&self, slot: &B::Slot, offset: u64, len: u64, to: To);
        fn reach(&self) -> Option<Span>;
        fn owns(&self, span: Span) -> bool;
        fn max_len(&self, request: &SlotRequest) -> u64;
        fn coherent(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent>;
        fn granules(&self, granule: u64) -> u64;
    }
}

/// The reason why a [`Faulty`] pinner failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FaultyPinError<E: std::error::Error> {
    /// On request.
    #[error("injected failure of a pin")]
    Injected,
    /// For a reason of its own.
    #[error(transparent)]
    Inner(E),
}

/// Fails in the middle of pinning, after spans were pushed.
struct FaultySink<'a, A> {
    inner: &'a mut dyn SpanSink<A>,
    faults: &'a Faults,
    injected: bool,
}

impl<A: Address> SpanSink<A> for FaultySink<'_, A> {
    fn push(&mut self, span: Span<A>, kind: Kind) -> Result<(), Stopped> {
        if self.faults.fails() {
            self.injected = true;
            return Err(Stopped);
        }
        self.inner.push(span, kind)
    }
}

#[expect(unsafe_code, reason = "everything but the counting is the inner pinner's")]
// SAFETY: pins and spans are the inner pinner's; an injected failure stops it as a full sink would.
unsafe impl<P: Pinner> Pinner for Faulty<P> {
    type Address = P::Address;
    type Space = P::Space;
    type Pin = P::Pin;
    type Error = FaultyPinError<P::Error>;

    fn pin(
        &self,
        space: &P::Space,
        range: UserRange,
        prot: Prot,
        sink: &mut dyn SpanSink<P::Address>,
    ) -> Result<P::Pin, PinFailed<P::Pin, Self::Error>> {
        if self.faults.fails() {
            let error = PinError::Failed(FaultyPinError::Injected);
            return Err(PinFailed { range, error, pin: None });
        }
        let mut sink = FaultySink { inner: sink, faults: &self.faults, injected: false };
        self.inner.pin(space, range, prot, &mut sink).map_err(|failed| {
            let error = match failed.error {
                PinError::Stopped if sink.injected => PinError::Failed(FaultyPinError::Injected),
                error => error.map(FaultyPinError::Inner),
            };
            PinFailed { range, error, pin: failed.pin }
        })
    }

    forward! { inner:
        fn unpin(
            &self, promise: Promise<'_>, pin: &mut P::Pin, spans: &[Span<P::Address>], kind: Kind,
            dirty: Dirty
        );
        fn release(&self, promise: Promise<'_>, pin: P::Pin);
        fn space_id(&self, space: &P::Space) -> u64;
        fn chargeable(&self, space: &P::Space, range: UserRange) -> u64;
        fn knows_frames(&self) -> bool;
    }

    fn read(&self, space: &P::Space, at: UserAddr, bytes: &mut [u8]) -> Result<(), Self::Error> {
        if self.faults.fails() {
            return Err(FaultyPinError::Injected);
        }
        self.inner.read(space, at, bytes).map_err(FaultyPinError::Inner)
    }

    fn write(&self, space: &P::Space, at: UserAddr, bytes: &[u8]) -> Result<(), Self::Error> {
        if self.faults.fails() {
            return Err(FaultyPinError::Injected);
        }
        self.inner.write(space, at, bytes).map_err(FaultyPinError::Inner)
    }

    fn errno(&self, error: &Self::Error) -> Errno {
        match error {
            FaultyPinError::Injected => Errno::ENOMEM,
            FaultyPinError::Inner(error) => self.inner.errno(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_fails_every_step_once_and_then_none() {
        let faults = Faults::none();
        let mut failed = Vec::new();
        let steps = faults.sweep(|n| {
            for step in 1..=3 {
                if faults.fails() {
                    failed.push((n, step));
                    return;
                }
            }
        });
        assert_eq!(steps, 3);
        assert_eq!(failed, [(1, 1), (2, 2), (3, 3)]);
        assert!(!faults.fails(), "nothing fails behind a sweep");
    }
}
