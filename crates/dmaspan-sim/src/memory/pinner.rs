//! Pinning of simulated memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink};
use dmaspan::{Errno, Prot, Span, UserAddr, UserRange, lg2};

use super::{Segment, SimMemory, SimSpace, Violation};

/// Why simulated memory was not pinned.
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
    /// Part of the range is no memory of the pinner: of another memory, or of none.
    #[error("{user} of {range} is not memory of this pinner")]
    Foreign {
        /// What was to be pinned.
        range: UserRange,
        /// The part.
        user: UserRange,
    },
}

/// When a [`SimPinner`] finds out that a range has a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Holes {
    /// Before anything is pinned.
    #[default]
    FoundFirst,
    /// After everything before the hole was pinned and pushed, as a kernel that goes page by page.
    FoundOnTheWay,
}

/// Pins frames of a [`SimMemory`]: one pin more for each frame under the range.
#[derive(Clone, Debug)]
pub struct SimPinner {
    memory: Arc<SimMemory>,
    holes: Holes,
}

/// What a [`SimPinner`] pinned.
#[derive(Debug)]
pub struct SimPin {
    range: UserRange,
    /// Sorted, disjoint and maximal, to find out what the pin has.
    spans: Vec<Span>,
    bytes_left: u64,
    /// Frames of which the pin has parts only, and frames unpinned in part so far: bytes still
    /// pinned, by frame number.
    partial: BTreeMap<usize, u64>,
}

impl SimPin {
    /// What was pinned.
    pub fn range(&self) -> UserRange {
        self.range
    }

    /// How many bytes of it are pinned.
    pub fn bytes_left(&self) -> u64 {
        self.bytes_left
    }
}

impl SimPinner {
    /// A pinner of this memory, which finds holes first.
    pub fn new(memory: Arc<SimMemory>) -> Self {
        Self { memory, holes: Holes::FoundFirst }
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

    /// The spans of a range, all of them memory of this pinner.
    fn spans(&self, space: &SimSpace, range: UserRange) -> Result<Vec<Span>, SimPinError> {
        let segments = space.resolve(range).map_err(|at| SimPinError::Hole { range, at })?;
        let same = Arc::ptr_eq(space.memory(), &self.memory);
        let span = |segment: &Segment| {
            let foreign = SimPinError::Foreign { range, user: segment.user };
            let len = segment.user.checked_len().ok_or(foreign)?;
            let span = Span::new(segment.paddr, len).map_err(|_| foreign)?;
            let known = same && self.memory.frames_under(span).is_some();
            if known { Ok(span) } else { Err(foreign) }
        };
        segments.iter().map(span).collect()
    }

    /// Calls `f` with each frame to pin: one that the pin has in parts only once. Returns the bytes
    /// of those.
    fn each_frame(&self, spans: &[Span], mut f: impl FnMut(usize)) -> BTreeMap<usize, u64> {
        let mut partial = BTreeMap::new();
        for (number, bytes) in spans.iter().flat_map(|span| self.frame_parts(*span)) {
            if bytes < self.frame_bytes() {
                let sum = partial.entry(number).or_insert(0);
                if *sum == 0 {
                    f(number);
                }
                *sum += bytes;
            } else {
                f(number);
            }
        }
        partial
    }

    fn pin_frame(&self, number: usize) {
        self.memory.pin_page(self.memory.frame_paddr(number));
    }

    fn unpin_frame(&self, number: usize, dirty: Dirty) {
        self.memory.unpin_page(self.memory.frame_paddr(number), dirty);
    }

    fn frame_bytes(&self) -> u64 {
        lg2::size(self.memory.granule_lg2)
    }

    /// The frames under a span, and how many bytes of each.
    fn frame_parts(&self, span: Span) -> impl Iterator<Item = (usize, u64)> {
        let memory = &*self.memory;
        memory.frames_under(span).into_iter().flatten().map(move |number| {
            let frame = memory.frame_paddr(number);
            let last = frame.wrapping_add(lg2::mask(memory.granule_lg2)).min(span.last());
            (number, last.get() - frame.max(span.paddr()).get() + 1)
        })
    }

    /// Pins the spans of a range and pushes them. Where the sink stops, the pin of those that it
    /// took is in the error.
    fn pin_spans(
        &self,
        range: UserRange,
        mut spans: Vec<Span>,
        sink: &mut dyn SpanSink,
    ) -> Result<SimPin, Failed> {
        // The frames are pinned before the sink hears of them: a device may use them at once.
        let mut partial = self.each_frame(&spans, |number| self.pin_frame(number));
        let taken = spans.iter().take_while(|span| sink.push(**span, Kind::Memory).is_ok()).count();
        let stopped = taken < spans.len();
        if stopped {
            // What was taken gets its own pins before the others go: it must never be without.
            partial = self.each_frame(&spans[..taken], |number| self.pin_frame(number));
            self.each_frame(&spans, |number| self.unpin_frame(number, Dirty::Clean));
            spans.truncate(taken);
        }
        let bytes_left = spans.iter().map(|span| span.len()).sum();
        let pinned = UserRange::from_len(range.start(), bytes_left);
        let pin =
            pinned.ok().map(|range| SimPin { range, spans: union(spans), bytes_left, partial });
        match pin {
            Some(pin) if !stopped => Ok(pin),
            pin => Err(Failed { error: PinError::Stopped, pin }),
        }
    }

    /// Counts a span of the pin down, and unpins each frame whose last byte that was.
    fn unpin_span(&self, pin: &mut SimPin, span: Span, dirty: Dirty) {
        for (number, bytes) in self.frame_parts(span) {
            let whole = self.frame_bytes();
            let mut left = 0;
            if bytes < whole {
                let before = pin.partial.remove(&number).unwrap_or(whole);
                left = before.saturating_sub(bytes);
            }
            if left > 0 {
                pin.partial.insert(number, left);
            } else {
                self.unpin_frame(number, dirty);
            }
        }
    }
}

type Failed = PinFailed<SimPin, SimPinError>;

// SAFETY:
// 1. The spans are frames of a `SimMemory`, whose bytes live as long as it does and are reached by
//    copies only: no Rust reference to them exists outside its lock.
// 2. Frames given another use while they are pinned are a violation that tests ask for. No device
//    but a simulated one reaches them.
#[expect(unsafe_code, reason = "the trait is a promise about memory, kept as said above")]
unsafe impl Pinner for SimPinner {
    type Space = Arc<SimSpace>;
    type Pin = SimPin;
    type Error = SimPinError;

    fn pin(
        &self,
        space: &Arc<SimSpace>,
        range: UserRange,
        _prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<SimPin, PinFailed<SimPin, SimPinError>> {
        let refused = |error, pin| Failed { error: PinError::Failed(error), pin };
        let error = match self.spans(space, range) {
            Ok(spans) => return self.pin_spans(range, spans, sink),
            Err(error) => error,
        };
        if self.holes == Holes::FoundOnTheWay
            && let SimPinError::Hole { at, .. } = error
            && let Some(before) = at.get().checked_sub(1)
            && let Some(before) = UserRange::new(range.start(), UserAddr::new(before))
        {
            let spans = self.spans(space, before).map_err(|error| refused(error, None))?;
            let pin = self.pin_spans(before, spans, sink)?;
            return Err(refused(error, Some(pin)));
        }
        Err(refused(error, None))
    }

    fn unpin(&self, pin: &mut SimPin, spans: &[Span], _kind: Kind, dirty: Dirty) {
        for span in spans {
            let before = pin.spans.partition_point(|own| own.paddr() <= span.paddr());
            let own = before.checked_sub(1).and_then(|at| pin.spans.get(at));
            if own.is_none_or(|own| own.last() < span.last()) {
                self.memory.violate(Violation::UnpinnedForeign { span: *span });
                continue;
            }
            self.unpin_span(pin, *span, dirty);
            pin.bytes_left = pin.bytes_left.saturating_sub(span.len());
        }
    }

    fn release(&self, pin: SimPin) {
        if pin.bytes_left > 0 {
            let bytes_left = pin.bytes_left;
            let released = Violation::ReleasedWhilePinned { bytes_left };
            self.memory.violate(released);
        }
    }

    fn space_id(&self, space: &Arc<SimSpace>) -> u64 {
        Arc::as_ptr(space).addr() as u64
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
        space.read(at, bytes).map_err(|hole| no_memory(at, bytes.len(), hole))
    }

    fn write(&self, space: &Arc<SimSpace>, at: UserAddr, bytes: &[u8]) -> Result<(), SimPinError> {
        space.write(at, bytes).map_err(|hole| no_memory(at, bytes.len(), hole))
    }

    fn errno(&self, error: &SimPinError) -> Errno {
        match error {
            SimPinError::Hole { .. } | SimPinError::Foreign { .. } => Errno::EFAULT,
        }
    }
}

fn no_memory(at: UserAddr, len: usize, hole: UserAddr) -> SimPinError {
    let len = u64::try_from(len).unwrap_or(u64::MAX);
    let range = UserRange::from_len(at, len).unwrap_or(UserRange::point(at));
    SimPinError::Hole { range, at: hole }
}

/// The spans' bytes as sorted, disjoint, maximal spans. A user may map the same memory twice.
fn union(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable_by_key(|span| span.paddr());
    spans.dedup_by(|next, span| {
        let touches = span.last().checked_add(1).is_none_or(|behind| next.paddr() <= behind);
        let len = next.last().max(span.last()).get() - span.paddr().get();
        match Span::new(span.paddr(), len.saturating_add(1)) {
            Ok(joined) if touches => {
                *span = joined;
                true
            }
            _ => false,
        }
    });
    spans
}
