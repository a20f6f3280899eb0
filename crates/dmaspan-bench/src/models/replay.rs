//! A pinner that has pinned already: what is done with spans, without the time that finding them
//! takes.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink, Stopped};
use dmaspan::{Address, Errno, Promise, Prot, Span, UserAddr, UserRange};
use parking_lot::Mutex;

/// Why there was nothing to replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReplayError<E> {
    /// The pinner inside failed.
    #[error(transparent)]
    Inner(E),
    /// Device registers are among the range.
    #[error("{0} is not all memory")]
    NotMemory(UserRange),
    /// Another range than the one that was pinned, or for more than it was pinned for.
    #[error("{asked} was asked for, and {pinned} is pinned")]
    Other {
        /// What was asked for.
        asked: UserRange,
        /// What is pinned.
        pinned: UserRange,
    },
}

/// Pins one range when it is made, by another pinner, and until it is dropped; and pushes the spans
/// of then whenever that range is pinned again.
///
/// It is for measuring: what a pin then takes is what the sink takes.
pub(crate) struct Replay<P: Pinner>(Arc<Held<P>>);

/// What a [`Replay`] keeps pinned.
///
/// Dropped without a [release](Pinner::release) the range stays pinned.
#[must_use = "what is dropped stays pinned"]
pub(crate) struct ReplayPin<P: Pinner>(ManuallyDrop<Arc<Held<P>>>);

struct Held<P: Pinner> {
    pinner: P,
    space: P::Space,
    range: UserRange,
    prot: Prot,
    /// As they were pushed.
    spans: Vec<Span<P::Address>>,
    /// `None` where it was never had, or is given back.
    pin: Mutex<Option<P::Pin>>,
}

impl<P: Pinner> Replay<P> {
    /// Pins `range` of `space` for a device that may use it as `prot` says.
    ///
    /// # Errors
    ///
    /// [`ReplayError`], with nothing pinned.
    pub(crate) fn new(
        pinner: P,
        space: P::Space,
        range: UserRange,
        prot: Prot,
    ) -> Result<Self, ReplayError<P::Error>> {
        let mut kept = Kept(Vec::new());
        let (pin, error) = match pinner.pin(&space, range, prot, &mut kept) {
            Ok(pin) => (Some(pin), None),
            Err(PinFailed { error, pin }) => (pin, Some(error)),
        };
        // Dropped, it unpins.
        let held = Held { pinner, space, range, prot, spans: kept.0, pin: Mutex::new(pin) };
        match error {
            None => Ok(Self(Arc::new(held))),
            Some(PinError::Failed(error)) => Err(ReplayError::Inner(error)),
            Some(PinError::Stopped) => Err(ReplayError::NotMemory(range)),
        }
    }

    /// The pinner inside.
    pub(crate) fn inner(&self) -> &P {
        &self.0.pinner
    }

    /// Ends a pin; there is none any more.
    fn give_back(pin: ReplayPin<P>) -> Option<ReplayPin<P>> {
        drop(ManuallyDrop::into_inner(pin.0));
        None
    }
}

impl<P: Pinner> Drop for Held<P> {
    #[expect(unsafe_code, reason = "ends the pin that it made")]
    fn drop(&mut self) {
        let Some(mut pin) = self.pin.get_mut().take() else { return };
        // SAFETY: each pin that the spans were pushed for keeps this and was released, so that no
        // device reaches them.
        let promise = unsafe { Promise::new() };
        self.pinner.unpin(promise, &mut pin, &self.spans, Kind::Memory, Dirty::after(self.prot));
        self.pinner.release(promise, pin);
    }
}

/// Keeps spans as they are pushed, where they are of memory.
struct Kept<A>(Vec<Span<A>>);

impl<A: Address> SpanSink<A> for Kept<A> {
    fn push(&mut self, span: Span<A>, kind: Kind) -> Result<(), Stopped> {
        match kind {
            Kind::Memory => self.0.push(span),
            Kind::Mmio => return Err(Stopped),
        }
        Ok(())
    }
}

#[expect(unsafe_code, reason = "the promises are those of the pinner inside")]
// SAFETY:
// 1. Pushed spans are those that `P` pushed for the same range of the same space, for a device that
//    may do as much. `P` promises them until its pin is told that they are unpinned, which
//    only the drop of `Held` does. A pin keeps `Held`, and dropping it leaks it.
// 2. They cover the range exactly and in order: all that `P` pushed is kept, and nothing else.
unsafe impl<P: Pinner> Pinner for Replay<P> {
    type Address = P::Address;
    type Space = P::Space;
    type Pin = ReplayPin<P>;
    type Error = ReplayError<P::Error>;

    fn pin(
        &self,
        space: &P::Space,
        range: UserRange,
        prot: Prot,
        sink: &mut dyn SpanSink<P::Address>,
    ) -> Result<ReplayPin<P>, PinFailed<ReplayPin<P>, Self::Error>> {
        let Held { pinner, space: pinned, range: whole, prot: may, .. } = &*self.0;
        let same_space = pinner.space_id(space) == pinner.space_id(pinned);
        if range != *whole || !same_space || !may.contains(prot) {
            let error = ReplayError::Other { asked: range, pinned: *whole };
            return Err(PinFailed { error: PinError::Failed(error), pin: None });
        }
        let pin = ReplayPin(ManuallyDrop::new(Arc::clone(&self.0)));
        for (taken, span) in self.0.spans.iter().enumerate() {
            if let Err(stopped) = sink.push(*span, Kind::Memory) {
                let pin = if taken > 0 { Some(pin) } else { Self::give_back(pin) };
                return Err(PinFailed { error: stopped.into(), pin });
            }
        }
        Ok(pin)
    }

    fn unpin(
        &self,
        _promise: Promise<'_>,
        _pin: &mut ReplayPin<P>,
        _spans: &[Span<P::Address>],
        _kind: Kind,
        _dirty: Dirty,
    ) {
    }

    fn release(&self, _promise: Promise<'_>, pin: ReplayPin<P>) {
        Self::give_back(pin);
    }

    fn space_id(&self, space: &P::Space) -> u64 {
        self.inner().space_id(space)
    }

    fn chargeable(&self, space: &P::Space, range: UserRange) -> u64 {
        self.inner().chargeable(space, range)
    }

    fn knows_frames(&self) -> bool {
        self.inner().knows_frames()
    }

    fn read(&self, space: &P::Space, at: UserAddr, bytes: &mut [u8]) -> Result<(), Self::Error> {
        self.inner().read(space, at, bytes).map_err(ReplayError::Inner)
    }

    fn write(&self, space: &P::Space, at: UserAddr, bytes: &[u8]) -> Result<(), Self::Error> {
        self.inner().write(space, at, bytes).map_err(ReplayError::Inner)
    }

    fn errno(&self, error: &Self::Error) -> Errno {
        match error {
            ReplayError::Inner(error) => self.inner().errno(error),
            ReplayError::NotMemory(_) => Errno::EFAULT,
            ReplayError::Other { .. } => Errno::EINVAL,
        }
    }
}

impl<P: Pinner> fmt::Debug for ReplayPin<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReplayPin").field(&self.0.range).finish()
    }
}

#[cfg(test)]
mod tests {
    use dmaspan::{PhysAddr, UserAddr};

    use super::*;
    use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};

    #[test]
    fn the_spans_of_then_are_pushed_without_looking_them_up_again() {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(0), 1 << 20, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let pages = memory.allocate_scattered(4 << 12, 1).unwrap();
        let user = space.map(UserAddr::new(0x1000), &pages).unwrap();
        let pinner = SimPinner::new(Arc::clone(&memory));
        let replay = Replay::new(pinner, Arc::clone(&space), user, Prot::READ_WRITE).unwrap();
        let looked_up = replay.inner().lookups();
        let mut spans = Vec::new();
        let pin = replay.pin(&space, user, Prot::READ, &mut spans).unwrap();
        assert_eq!((spans, replay.inner().lookups()), (pages, looked_up));
        #[expect(unsafe_code, reason = "a test is the pin's user")]
        // SAFETY: no device was given the spans.
        replay.release(unsafe { Promise::new() }, pin);
        drop(replay);
        assert_eq!(memory.pinned_frames(), 0);
    }

    #[test]
    fn only_what_is_pinned_is_replayed_and_only_for_what_it_is_pinned() {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(0), 1 << 20, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let pages = memory.allocate_scattered(4 << 12, 1).unwrap();
        let user = space.map(UserAddr::new(0x1000), &pages).unwrap();
        let pinner = SimPinner::new(Arc::clone(&memory));
        let replay = Replay::new(pinner, Arc::clone(&space), user, Prot::READ).unwrap();
        let refused = |space: &Arc<SimSpace>, range, prot| {
            let failed = replay.pin(space, range, prot, &mut Vec::new()).unwrap_err();
            assert!(failed.pin.is_none());
            let PinError::Failed(error) = failed.error else { panic!("{failed:?}") };
            assert!(matches!(error, ReplayError::Other { .. }), "{error}");
            assert_eq!(replay.errno(&error), Errno::EINVAL);
        };
        refused(&space, UserRange::new(user.start(), user.start()).unwrap(), Prot::READ);
        refused(&space, user, Prot::READ_WRITE);
        refused(&Arc::new(SimSpace::new(Arc::clone(&memory))), user, Prot::READ);
    }

    #[test]
    fn what_is_pinned_outlives_the_pinner_for_its_pins() {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(0), 1 << 20, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let pages = memory.allocate_scattered(4 << 12, 1).unwrap();
        let user = space.map(UserAddr::new(0x1000), &pages).unwrap();
        let new = || {
            let pinner = SimPinner::new(Arc::clone(&memory));
            Replay::new(pinner, Arc::clone(&space), user, Prot::READ_WRITE).unwrap()
        };
        let (replay, other) = (new(), new());
        let pin = replay.pin(&space, user, Prot::READ_WRITE, &mut Vec::new()).unwrap();
        drop(replay);
        assert_eq!(memory.pinned_frames(), 4);
        #[expect(unsafe_code, reason = "a test is the pin's user")]
        // SAFETY: no device was given the spans.
        other.release(unsafe { Promise::new() }, pin);
        drop(other);
        assert_eq!(memory.pinned_frames(), 0);
        assert!(memory.violations().is_empty());
    }

    #[test]
    fn what_cannot_be_pinned_leaves_nothing_pinned() {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(0), 1 << 20, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let pages = memory.allocate_scattered(4 << 12, 1).unwrap();
        let user = space.map(UserAddr::new(0x1000), &pages).unwrap();
        let longer =
            UserRange::new(user.start(), user.last().checked_add(0x1000).unwrap()).unwrap();
        let pinner = SimPinner::new(Arc::clone(&memory));
        let refused = Replay::new(pinner, space, longer, Prot::READ_WRITE);
        assert!(matches!(refused, Err(ReplayError::Inner(_))));
        assert_eq!(memory.pinned_frames(), 0);
    }
}
