//! Pinning of simulated memory.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink};
use dmaspan::{Errno, PhysAddr, Promise, Prot, Span, UserAddr, UserRange};
use parking_lot::RwLockWriteGuard;

use super::cpu_table::{Part, Walked};
use super::mm::{FaultError, Mm, permit_rights};
use super::{SimMemory, SimPin, SimSpace, Violation};
use crate::walker::Access;

/// For how many leaves a pin holds the lock of the tables at most.
const LEAVES_AT_ONCE: u32 = 1024;

/// How many runs are pinned, and spans unpinned, at once. Their records lie all over memory: asked
/// for together, the processor waits for all of them once.
const AT_ONCE: usize = 32;

/// The reason why simulated memory was not pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimPinError {
    /// The range has a hole.
    #[error("no memory at {at} of {range}")]
    Hole {
        /// What was to be pinned.
        range: UserRange,
        /// The first address without memory.
        at: UserAddr,
    },
    /// Part of the range was taken away from the user.
    #[error("{at} of {range} was revoked")]
    Revoked {
        /// What was to be pinned.
        range: UserRange,
        /// The first address that was taken away.
        at: UserAddr,
    },
    /// Part of the range may only be read, and the device may write.
    #[error("{at} of {range} may only be read")]
    ReadOnly {
        /// What was to be pinned.
        range: UserRange,
        /// The first address that may only be read.
        at: UserAddr,
    },
    /// A fault asked to be tried again each time.
    #[error("a fault at {at} of {range} came to nothing {tries} times")]
    Unsettled {
        /// What was to be pinned.
        range: UserRange,
        /// Where the fault was.
        at: UserAddr,
        /// How often it was tried.
        tries: u32,
    },
    /// The range is not memory of the pinner, but of another one.
    #[error("{user} of {range} is not memory of this pinner")]
    Foreign {
        /// What was to be pinned.
        range: UserRange,
        /// The part.
        user: UserRange,
    },
}

impl SimPinError {
    pub(super) fn new(range: UserRange, error: FaultError) -> Self {
        match error {
            FaultError::Hole { at } => Self::Hole { range, at },
            FaultError::Revoked { at } => Self::Revoked { range, at },
            FaultError::ReadOnly { at } => Self::ReadOnly { range, at },
            FaultError::Again { at } => {
                Self::Unsettled { range, at, tries: super::space::FAULT_TRIES }
            }
        }
    }
}

/// When a [`SimPinner`] finds out that a range has a hole, or may not be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Holes {
    /// Before anything is pinned, unless the space changes meanwhile.
    #[default]
    FoundFirst,
    /// After everything before the hole was pinned and pushed, as a kernel that goes page by page.
    FoundOnTheWay,
}

/// Pins frames of a [`SimMemory`]: one pin more for each frame under the range.
///
/// It walks the CPU's tables leaf by leaf, faulting in what is not there, joins what is contiguous
/// over leaves and folios, and pins each such run by folio before the sink hears of it. A run grows
/// without being kept anywhere, so that a pin of terabytes takes no memory but its sink's.
#[derive(Clone, Debug)]
pub struct SimPinner {
    memory: Arc<SimMemory>,
    holes: Holes,
    lookups: Arc<AtomicU64>,
}

impl SimPinner {
    /// A pinner of this memory, which finds holes first.
    pub fn new(memory: Arc<SimMemory>) -> Self {
        Self { memory, holes: Holes::FoundFirst, lookups: Arc::default() }
    }

    /// The same pinner, which finds holes as `holes` says.
    #[must_use]
    pub fn with_holes(self, holes: Holes) -> Self {
        Self { holes, ..self }
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<SimMemory> {
        &self.memory
    }

    /// Returns how many leaves of CPUs' tables this pinner and its clones have looked up: one for
    /// each leaf under a pinned range, of any size.
    pub fn lookups(&self) -> u64 {
        self.lookups.load(Ordering::Relaxed)
    }

    /// Whether the range may be pinned at all, as far as that is to be found out first.
    fn check(&self, space: &SimSpace, range: UserRange, access: Access) -> Result<(), SimPinError> {
        if !Arc::ptr_eq(space.memory(), &self.memory) {
            return Err(SimPinError::Foreign { range, user: range });
        }
        match self.holes {
            Holes::FoundOnTheWay => Ok(()),
            Holes::FoundFirst => {
                let checked = space.mm.read().check(range, access);
                checked.map_err(|error| SimPinError::new(range, error))
            }
        }
    }
}

/// A pin under way.
struct Pinning<'a> {
    space: &'a SimSpace,
    access: Access,
    sink: &'a mut dyn SpanSink,
    pin: SimPin,
    /// What is contiguous and may go on.
    run: Option<PinnedRun>,
    /// Runs that have ended and were not pushed yet.
    closed: [Option<PinnedRun>; AT_ONCE],
    /// How many they are.
    closed_count: usize,
    lookups: u64,
}

#[derive(Clone, Copy)]
struct PinnedRun {
    span: Span,
    kind: Kind,
    /// How many bytes of it are pinned, from the first on.
    pinned: u64,
}

type Failure = PinError<SimPinError>;

impl Pinning<'_> {
    /// Goes through the leaves of the whole range.
    fn pin_all(&mut self, range: UserRange) -> Result<(), Failure> {
        let failed = |error| PinError::Failed(SimPinError::new(range, error));
        let mut next = range.start();
        let mut mm = self.space.mm.read();
        loop {
            let rest = UserRange::new(next, range.last()).unwrap_or(UserRange::point(next));
            let walked = self.pin_some(&mm, rest);
            self.settle()?;
            drop(mm);
            match walked {
                ControlFlow::Continue(()) => return self.push_all(),
                ControlFlow::Break(Walked::Stopped(Pause::Full(at))) => {
                    next = at;
                    mm = self.space.mm.read();
                }
                ControlFlow::Break(Walked::Stopped(Pause::Stopped)) => {
                    return Err(PinError::Stopped);
                }
                ControlFlow::Break(Walked::Stopped(Pause::Refused(error))) => {
                    self.push_all()?;
                    return Err(failed(error));
                }
                ControlFlow::Break(Walked::Hole(at)) => {
                    next = UserAddr::new(at);
                    let mut writing = self.space.mm.write();
                    if let Err(error) = self.space.fault_in(&mut writing, next, self.access) {
                        drop(writing);
                        self.push_all()?;
                        return Err(failed(error));
                    }
                    // The leaf cannot go before it is walked: each fault is a step forward.
                    mm = RwLockWriteGuard::downgrade(writing);
                }
            }
        }
    }

    /// Makes the run independent of the tables, which may change when they are unlocked. Memory
    /// stays because it is pinned. Device memory is pushed, so that whoever takes it away from then
    /// on finds a sink that knows it.
    fn settle(&mut self) -> Result<(), Failure> {
        match &mut self.run {
            Some(PinnedRun { kind: Kind::Mmio, .. }) => self.push_all(),
            Some(run) => {
                run.pin(&mut self.pin, self.space.memory());
                self.push_closed()
            }
            None => self.push_closed(),
        }
    }

    /// Goes through leaves until there is none, or until others should have the lock.
    fn pin_some(&mut self, mm: &Mm, rest: UserRange) -> ControlFlow<Walked<Pause>> {
        let mut left = LEAVES_AT_ONCE;
        let going = mm.first_going(rest).map(UserAddr::get);
        // What is on its way out is no longer there, though its leaves still are.
        let last = match going {
            Some(at) if at == rest.start().get() => return ControlFlow::Break(Walked::Hole(at)),
            Some(at) => at - 1,
            None => rest.last().get(),
        };
        mm.table.walk(rest.start().get(), last, &mut |part: Part| {
            if left == 0 {
                return ControlFlow::Break(Pause::Full(UserAddr::new(part.at)));
            }
            left -= 1;
            self.take(part)
        })?;
        going.map_or(ControlFlow::Continue(()), |at| ControlFlow::Break(Walked::Hole(at)))
    }

    /// Adds a part of a leaf to the run, or closes that and begins another.
    #[inline]
    fn take(&mut self, part: Part) -> ControlFlow<Pause> {
        self.lookups += 1;
        let at = UserAddr::new(part.at);
        if let Err(error) = permit_rights(part.leaf.rights, at, self.access) {
            return ControlFlow::Break(Pause::Refused(error));
        }
        let Ok(span) = Span::new(part.leaf.at(part.at), part.last - part.at + 1) else {
            return ControlFlow::Break(Pause::Refused(FaultError::Hole { at }));
        };
        let kind = part.leaf.kind;
        if let Some(run) = &mut self.run
            && run.kind == kind
            && let Some(joined) = run.span.join(span)
        {
            run.span = joined;
            return ControlFlow::Continue(());
        }
        if self.close_run().is_err() {
            return ControlFlow::Break(Pause::Stopped);
        }
        self.run = Some(PinnedRun { span, kind, pinned: 0 });
        ControlFlow::Continue(())
    }

    /// Ends the run. It is pinned and pushed with others.
    #[inline]
    fn close_run(&mut self) -> Result<(), Failure> {
        let Some(run) = self.run.take() else { return Ok(()) };
        self.closed[self.closed_count] = Some(run);
        self.closed_count += 1;
        if self.closed_count == AT_ONCE { self.push_closed() } else { Ok(()) }
    }

    /// Ends the run, and pins and pushes all there are.
    fn push_all(&mut self) -> Result<(), Failure> {
        self.close_run()?;
        self.push_closed()
    }

    /// Pins the runs that have ended and pushes them.
    fn push_closed(&mut self) -> Result<(), Failure> {
        let memory = self.space.memory();
        let closed = &mut self.closed[..std::mem::take(&mut self.closed_count)];
        let to_pin = closed.iter().flatten().filter(|run| run.kind == Kind::Memory);
        memory.fetch_records(to_pin.map(|run| run.span));
        closed.iter_mut().flatten().for_each(|run| run.pin(&mut self.pin, memory));
        let mut runs = closed.iter_mut().filter_map(Option::take);
        while let Some(run) = runs.next() {
            if self.sink.push(run.span, run.kind).is_err() {
                let unpushed = std::iter::once(run).chain(runs).chain(self.run.take());
                unpushed.for_each(|run| run.undo_pin(&mut self.pin, memory));
                return Err(PinError::Stopped);
            }
            self.pin.took(run.span, run.kind);
        }
        Ok(())
    }
}

impl PinnedRun {
    /// Pins what is not pinned yet of memory.
    fn pin(&mut self, pin: &mut SimPin, memory: &SimMemory) {
        if self.kind == Kind::Memory
            && let Some(rest) = self.span.skip(self.pinned)
        {
            self.pinned = self.span.len();
            pin.pin(memory, rest);
        }
    }

    /// Unpins what is pinned of it, and was reported to nobody.
    fn undo_pin(self, pin: &mut SimPin, memory: &SimMemory) {
        if let Ok(pinned) = Span::new(self.span.paddr(), self.pinned) {
            pin.undo_pin(memory, pinned);
        }
    }
}

/// Why a walk over leaves ended.
enum Pause {
    /// Others want the lock. This is the first address that is left.
    Full(UserAddr),
    /// The sink wants no more.
    Stopped,
    /// The leaf does not permit it.
    Refused(FaultError),
}

// SAFETY:
// 1. The spans are frames of a `SimMemory`, whose bytes live as long as it does and are reached by
//    copies only: no Rust reference to them exists outside its lock.
// 2. Frames given another use while they are pinned are a violation that tests ask for. No device
//    but a simulated one reaches them. A space calls its listeners before device memory goes.
#[expect(unsafe_code, reason = "the trait is a promise about memory, kept as said above")]
unsafe impl Pinner for SimPinner {
    type Address = PhysAddr;
    type Space = Arc<SimSpace>;
    type Pin = SimPin;
    type Error = SimPinError;

    /// # Context
    ///
    /// The sink is called with the tables locked for reading: it must not use the space.
    fn pin(
        &self,
        space: &Arc<SimSpace>,
        range: UserRange,
        prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<SimPin, PinFailed<SimPin, SimPinError>> {
        let access = if prot.contains(Prot::WRITE) { Access::Write } else { Access::Read };
        if let Err(error) = self.check(space, range, access) {
            return Err(PinFailed { range, error: PinError::Failed(error), pin: None });
        }
        let pin = SimPin::new(range, &self.memory);
        let mut pinning = Pinning {
            space,
            access,
            sink,
            pin,
            run: None,
            closed: [None; AT_ONCE],
            closed_count: 0,
            lookups: 0,
        };
        let result = pinning.pin_all(range);
        self.lookups.fetch_add(pinning.lookups, Ordering::Relaxed);
        match (result, pinning.pin.finish()) {
            (Ok(()), Some(pin)) => Ok(pin),
            (Ok(()), None) => Err(PinFailed { range, error: PinError::Stopped, pin: None }),
            (Err(error), pin) => Err(PinFailed { range, error, pin }),
        }
    }

    fn unpin(
        &self,
        _promise: Promise<'_>,
        pin: &mut SimPin,
        spans: &[Span],
        kind: Kind,
        dirty: Dirty,
    ) {
        for spans in spans.chunks(AT_ONCE) {
            if kind == Kind::Memory {
                self.memory.fetch_records(spans.iter().copied());
            }
            spans.iter().for_each(|span| pin.unpin(&self.memory, *span, kind, dirty));
        }
    }

    fn release(&self, _promise: Promise<'_>, pin: SimPin) {
        if pin.bytes_left() > 0 {
            let bytes_left = pin.bytes_left();
            self.memory.violate(Violation::ReleasedWhilePinned { bytes_left });
        }
    }

    fn space_id(&self, space: &Arc<SimSpace>) -> u64 {
        space.id()
    }

    fn chargeable(&self, space: &Arc<SimSpace>, range: UserRange) -> u64 {
        space.memory_bytes(range)
    }

    fn knows_frames(&self) -> bool {
        true
    }

    fn read(
        &self,
        space: &Arc<SimSpace>,
        at: UserAddr,
        bytes: &mut [u8],
    ) -> Result<(), SimPinError> {
        let range = access_range(at, bytes.len());
        space.read_bytes(at, bytes).map_err(|error| SimPinError::new(range, error))
    }

    fn write(&self, space: &Arc<SimSpace>, at: UserAddr, bytes: &[u8]) -> Result<(), SimPinError> {
        let range = access_range(at, bytes.len());
        space.write_bytes(at, bytes).map_err(|error| SimPinError::new(range, error))
    }

    fn errno(&self, error: &SimPinError) -> Errno {
        match error {
            SimPinError::Hole { .. }
            | SimPinError::Revoked { .. }
            | SimPinError::ReadOnly { .. }
            | SimPinError::Unsettled { .. }
            | SimPinError::Foreign { .. } => Errno::EFAULT,
        }
    }
}

fn access_range(at: UserAddr, len: usize) -> UserRange {
    let len = u64::try_from(len).unwrap_or(u64::MAX);
    UserRange::from_len(at, len).unwrap_or(UserRange::point(at))
}
