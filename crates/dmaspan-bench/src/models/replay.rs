//! A pinner that has pinned already: what is done with spans, without the time that finding them
//! takes.

use std::error::Error;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink, Stopped};
use dmaspan::{Errno, PhysAddr, Promise, Prot, Span, UserAddr, UserRange};
use parking_lot::Mutex;

use crate::failed::Failed;

/// Another range than the one that is pinned, or for more than it is pinned for; or its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked} was asked for, and {pinned} is pinned")]
pub(crate) struct NotReplayed {
    /// What was asked for.
    asked: UserRange,
    /// What is pinned.
    pinned: UserRange,
}

/// Pins one range when it is made, by another pinner, and until it is dropped; and pushes the spans
/// of then whenever that range is pinned again, of the one space that there is.
///
/// It is for measuring: what a pin then takes is what the sink takes.
pub(crate) struct Replay {
    range: UserRange,
    prot: Prot,
    /// As they were pushed.
    spans: Arc<[Span]>,
    held: Arc<dyn Send + Sync>,
}

/// What a [`Replay`] keeps pinned.
///
/// Dropped without a [release](Pinner::release) the range stays pinned.
#[must_use = "what is dropped stays pinned"]
pub(crate) struct ReplayPin(ManuallyDrop<Arc<dyn Send + Sync>>);

struct Held<P: Pinner> {
    pinner: P,
    /// Whose memory it is.
    _space: P::Space,
    prot: Prot,
    spans: Arc<[Span<P::Address>]>,
    /// `None` where it was never had, or is given back.
    pin: Mutex<Option<P::Pin>>,
}

impl Replay {
    /// Pins `range` of `space` for a device that may use it as `prot` says.
    ///
    /// # Errors
    ///
    /// The pinner's, and that device registers are among the range, with nothing pinned.
    pub(crate) fn new<P: Pinner<Address = PhysAddr> + 'static>(
        pinner: P,
        space: P::Space,
        range: UserRange,
        prot: Prot,
    ) -> Result<Self, Failed> {
        let mut kept = Kept(Vec::new());
        let (pin, error) = match pinner.pin(&space, range, prot, &mut kept) {
            Ok(pin) => (Some(pin), None),
            Err(PinFailed { error, pin, .. }) => (pin, Some(error)),
        };
        let spans: Arc<[Span]> = kept.0.into();
        // Dropped, it unpins.
        let pin = Mutex::new(pin);
        let held = Held { pinner, _space: space, prot, spans: Arc::clone(&spans), pin };
        match error {
            None => Ok(Self { range, prot, spans, held: Arc::new(held) }),
            Some(error) => Err(not_pinned(error, range)),
        }
    }

    /// What is pinned.
    pub(crate) fn range(&self) -> UserRange {
        self.range
    }

    /// Where it is.
    pub(crate) fn spans(&self) -> &[Span] {
        &self.spans
    }

    fn refuse(&self, asked: UserRange) -> NotReplayed {
        NotReplayed { asked, pinned: self.range }
    }

    /// Ends a pin; there is none any more.
    fn give_back(pin: ReplayPin) -> Option<ReplayPin> {
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

/// Why a range is not pinned by who wants memory alone.
pub(crate) fn not_pinned<E: Error>(error: PinError<E>, range: UserRange) -> Failed {
    match error {
        PinError::Failed(error) => error.into(),
        _ => Failed::new(format_args!("{range} is not all memory")),
    }
}

/// Keeps spans as they are pushed, where they are of memory.
struct Kept(Vec<Span>);

impl SpanSink<PhysAddr> for Kept {
    fn push(&mut self, span: Span, kind: Kind) -> Result<(), Stopped> {
        match kind {
            Kind::Memory => self.0.push(span),
            Kind::Mmio => return Err(Stopped),
        }
        Ok(())
    }
}

#[expect(unsafe_code, reason = "the promises are those of the pinner inside")]
// SAFETY:
// 1. Pushed spans are those that the pinner inside pushed for the same range, for a device that may
//    do as much. It promises them until its pin is told that they are unpinned, which only the drop
//    of `Held` does. A pin keeps `Held`, and dropping it leaks it.
// 2. They cover the range exactly and in order: all that was pushed is kept, and nothing else.
unsafe impl Pinner for Replay {
    type Address = PhysAddr;
    type Space = ();
    type Pin = ReplayPin;
    type Error = NotReplayed;

    fn pin(
        &self,
        (): &(),
        range: UserRange,
        prot: Prot,
        sink: &mut dyn SpanSink<PhysAddr>,
    ) -> Result<ReplayPin, PinFailed<ReplayPin, NotReplayed>> {
        if range != self.range || !self.prot.contains(prot) {
            let error = PinError::Failed(self.refuse(range));
            return Err(PinFailed { range, error, pin: None });
        }
        let pin = ReplayPin(ManuallyDrop::new(Arc::clone(&self.held)));
        for (taken, span) in self.spans.iter().enumerate() {
            if let Err(stopped) = sink.push(*span, Kind::Memory) {
                let pin = if taken > 0 { Some(pin) } else { Self::give_back(pin) };
                return Err(PinFailed { range, error: stopped.into(), pin });
            }
        }
        Ok(pin)
    }

    fn unpin(&self, _: Promise<'_>, _: &mut ReplayPin, _: &[Span], _: Kind, _: Dirty) {}

    fn release(&self, _promise: Promise<'_>, pin: ReplayPin) {
        Self::give_back(pin);
    }

    fn space_id(&self, (): &()) -> u64 {
        0
    }

    fn knows_frames(&self) -> bool {
        true
    }

    fn read(&self, (): &(), at: UserAddr, _: &mut [u8]) -> Result<(), NotReplayed> {
        Err(self.refuse(UserRange::point(at)))
    }

    fn write(&self, (): &(), at: UserAddr, _: &[u8]) -> Result<(), NotReplayed> {
        Err(self.refuse(UserRange::point(at)))
    }

    fn errno(&self, _: &NotReplayed) -> Errno {
        Errno::EINVAL
    }
}

impl fmt::Debug for ReplayPin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReplayPin")
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
        assert_eq!((replay.range(), replay.spans()), (user, &pages[..]));
        // Nobody could find them there.
        space.unmap(user);
        let mut spans = Vec::new();
        let pin = replay.pin(&(), user, Prot::READ, &mut spans).unwrap();
        assert_eq!(spans, pages);
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
        let replay = Replay::new(pinner, space, user, Prot::READ).unwrap();
        let refused = |range, prot| {
            let failed = replay.pin(&(), range, prot, &mut Vec::new()).unwrap_err();
            assert!(failed.pin.is_none());
            let PinError::Failed(error) = failed.error else { panic!("{failed:?}") };
            assert_eq!(error, NotReplayed { asked: range, pinned: user });
            assert_eq!(replay.errno(&error), Errno::EINVAL);
        };
        refused(UserRange::new(user.start(), user.start()).unwrap(), Prot::READ);
        refused(user, Prot::READ_WRITE);
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
        let pin = replay.pin(&(), user, Prot::READ_WRITE, &mut Vec::new()).unwrap();
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
        let refused = Replay::new(pinner, space, longer, Prot::READ_WRITE).err().unwrap();
        assert!(refused.to_string().starts_with("no memory at "), "{refused}");
        assert_eq!(memory.pinned_frames(), 0);
    }
}
