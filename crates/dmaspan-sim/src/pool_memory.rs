//! The memory of a bounce pool, simulated, with a host that may refuse.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

use dmaspan::swiotlb::{HostRefused, InSlot, PoolMemory, Room, Transfer};
use dmaspan::{PhysAddr, Promise, Span, lg2};
use parking_lot::Mutex;

pub use crate::bounce::POISON;
use crate::fault::Faults;
use crate::memory::{AllocError, RealBytes, SimMemory};

/// Simulated frames for a pool. It keeps the books of what the host sees, and every fault that is
/// armed strikes an allocation, a share or an unshare. Clones are the same memory.
#[derive(Clone, Debug)]
pub struct SimPoolMemory(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    memory: Arc<SimMemory>,
    spans: Vec<Span>,
    /// Where the program reaches a span by a pointer, of each if of any.
    real: Vec<RealBytes>,
    faults: Faults,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What the host sees, by its first address.
    seen: BTreeMap<u64, Span>,
    /// What was allocated for growth and not freed, by its first address.
    grown: BTreeMap<u64, Span>,
    counts: PoolCounts,
}

/// Says what a pool asked its memory for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PoolCounts {
    /// Copies between slots and originals.
    pub copies: u64,
    /// Bytes of them.
    pub copied: u64,
    /// Bytes of zeros.
    pub zeroed: u64,
    /// How often a request pressed for growth.
    pub pressed: u64,
}

impl SimPoolMemory {
    /// Frames that nobody else uses, a span for each NUMA node. It allocates and pins them.
    ///
    /// # Errors
    ///
    /// [`AllocError`] where they are not free.
    pub fn new(memory: Arc<SimMemory>, spans: Vec<Span>) -> Result<Self, AllocError> {
        Self::with_faults(memory, spans, &Faults::none())
    }

    /// The same, whose fallible steps fail when `faults` says so.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_faults(
        memory: Arc<SimMemory>,
        spans: Vec<Span>,
        faults: &Faults,
    ) -> Result<Self, AllocError> {
        Self::reached_by(memory, spans, faults, |_, _| Vec::new())
    }

    /// The same, which a program reaches by a [pointer](PoolMemory::pointer), too.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_pointers(
        memory: Arc<SimMemory>,
        spans: Vec<Span>,
        faults: &Faults,
    ) -> Result<Self, AllocError> {
        let lend = |memory: &SimMemory, spans: &[Span]| {
            spans.iter().map(|span| memory.lend(&[*span])).collect()
        };
        Self::reached_by(memory, spans, faults, lend)
    }

    fn reached_by(
        memory: Arc<SimMemory>,
        spans: Vec<Span>,
        faults: &Faults,
        lend: impl FnOnce(&SimMemory, &[Span]) -> Vec<RealBytes>,
    ) -> Result<Self, AllocError> {
        for &span in &spans {
            memory.allocate_at(span)?;
        }
        memory.pin_frames(&spans);
        let (faults, real) = (faults.clone(), lend(&memory, &spans));
        let shared = Shared { memory, spans, real, faults, state: Mutex::default() };
        for &span in &shared.spans {
            shared.memory.fill(span, POISON);
        }
        Ok(Self(Arc::new(shared)))
    }

    /// Returns what the host sees at the moment.
    pub fn seen(&self) -> Vec<Span> {
        self.0.state.lock().seen.values().copied().collect()
    }

    /// Returns what was allocated for growth and not given back.
    pub fn grown(&self) -> Vec<Span> {
        self.0.state.lock().grown.values().copied().collect()
    }

    /// Returns what was asked for so far.
    pub fn counts(&self) -> PoolCounts {
        self.0.state.lock().counts
    }

    /// The frames around.
    pub fn memory(&self) -> &Arc<SimMemory> {
        &self.0.memory
    }
}

#[expect(unsafe_code, reason = "the frames are the pool's alone")]
// SAFETY: it allocated and pinned what `spans` gives, `allocate` allocates and pins, and both stay
// so until `free` or the end. The other methods touch what they are told to, through the simulated
// memory, which checks every address. What a pointer leads to is that memory, as atomics.
unsafe impl PoolMemory for SimPoolMemory {
    type Address = PhysAddr;

    fn spans(&self) -> &[Span] {
        &self.0.spans
    }

    fn copy(&self, transfer: Transfer) {
        let len = usize::try_from(transfer.len()).expect("memory is smaller than the process");
        let mut bytes = vec![0; len];
        self.0.memory.get_bytes(transfer.source(), &mut bytes);
        self.0.memory.put_bytes(transfer.target(), &bytes);
        let counts = &mut self.0.state.lock().counts;
        counts.copies += 1;
        counts.copied += transfer.len();
    }

    fn zero(&self, bytes: InSlot) {
        self.0.memory.fill(bytes.span(), 0);
        self.0.state.lock().counts.zeroed += bytes.span().len();
    }

    fn read(&self, bytes: InSlot, into: &mut [u8]) {
        self.0.memory.get_bytes(bytes.span().paddr(), into);
    }

    fn write(&self, bytes: InSlot, from: &[u8]) {
        self.0.memory.put_bytes(bytes.span().paddr(), from);
    }

    fn pointer(&self, bytes: InSlot) -> Option<NonNull<u8>> {
        let at = bytes.span().paddr().get();
        let mut of = self.0.spans.iter().zip(&self.0.real);
        of.find_map(|(span, real)| {
            let offset = at.checked_sub(span.paddr().get()).filter(|at| *at < span.len())?;
            real.start_at(usize::try_from(offset).ok()?)
        })
    }

    fn allocate(&self, room: Room) -> Option<Span> {
        if self.0.faults.fails() {
            return None;
        }
        let memory = &self.0.memory;
        let bytes = lg2::align_up(room.bytes, memory.granule_lg2())?;
        let whole = memory.allocate(bytes, room.align.ilog2()).ok()?;
        if whole.paddr().get().checked_add(room.bytes - 1)? > room.last {
            memory.free(&[whole]);
            return None;
        }
        memory.pin_frames(&[whole]);
        self.0.memory.fill(whole, POISON);
        let span = Span::new(whole.paddr(), room.bytes).ok()?;
        self.0.state.lock().grown.insert(span.paddr().get(), span);
        Some(span)
    }

    fn free(&self, _promise: Promise<'_>, span: Span) {
        let mut state = self.0.state.lock();
        assert_eq!(state.grown.remove(&span.paddr().get()), Some(span), "freed and not allocated");
        assert!(
            !state.seen.contains_key(&span.paddr().get()),
            "{span} is freed and the host sees it"
        );
        let bytes = lg2::align_up(span.len(), self.0.memory.granule_lg2());
        let whole = bytes.and_then(|bytes| Span::new(span.paddr(), bytes).ok());
        let whole = whole.expect("it was allocated so");
        self.0.memory.unpin_frames(&[whole], dmaspan::pin::Dirty::Written);
        self.0.memory.free(&[whole]);
    }

    fn share(&self, _promise: Promise<'_>, span: Span) -> Result<(), HostRefused> {
        if self.0.faults.fails() {
            return Err(HostRefused);
        }
        let before = self.0.state.lock().seen.insert(span.paddr().get(), span);
        assert_eq!(before, None, "{span} is shared twice");
        Ok(())
    }

    fn unshare(&self, _promise: Promise<'_>, span: Span) -> Result<(), HostRefused> {
        if self.0.faults.fails() {
            return Err(HostRefused);
        }
        let before = self.0.state.lock().seen.remove(&span.paddr().get());
        assert_eq!(before, Some(span), "{span} was not shared");
        Ok(())
    }

    fn pressed(&self) {
        self.0.state.lock().counts.pressed += 1;
    }
}
