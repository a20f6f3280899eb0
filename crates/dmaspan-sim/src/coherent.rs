//! Memory that devices and the program use at the same time, simulated.

use std::sync::Arc;

use dmaspan::dma::{CoherentFrames, CoherentMemory, CoherentRequest, Contiguity, NoCoherent};
use dmaspan::pin::Dirty;
use dmaspan::{Coherency, Span, lg2};

use crate::fault::Faults;
use crate::memory::{RealBytes, SimMemory};

/// Frames of a [`SimMemory`] that the program reaches by a pointer, and devices by the simulated
/// bus: both meet in the same bytes.
///
/// They are pinned until they are freed, so the memory's violations show a device that uses them
/// afterwards. Each fault that is armed strikes an allocation.
#[derive(Clone, Debug)]
pub struct SimCoherent {
    memory: Arc<SimMemory>,
    faults: Faults,
    scatter: Option<u64>,
    uncached: Uncached,
}

/// Whether there is memory that the CPU does not cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Uncached {
    /// There is: simulated memory has no caches.
    Available,
    /// There is none, as where the one map of memory is cached.
    Missing,
}

impl SimCoherent {
    /// Frames of `memory`, contiguous always.
    pub fn new(memory: Arc<SimMemory>, faults: &Faults) -> Self {
        Self { memory, faults: faults.clone(), scatter: None, uncached: Uncached::Available }
    }

    /// The same with frames of which no two that follow each other are neighbours, where they may
    /// be so, chosen by `seed`.
    #[must_use]
    pub fn scattered(self, seed: u64) -> Self {
        Self { scatter: Some(seed), ..self }
    }

    /// The same with or without memory that the CPU does not cache.
    #[must_use]
    pub fn uncached(self, uncached: Uncached) -> Self {
        Self { uncached, ..self }
    }

    /// Whole frames.
    fn spans(&self, request: &CoherentRequest) -> Option<Vec<Span>> {
        let CoherentRequest { len, granule, align, contiguity, last, .. } = *request;
        if contiguity == Contiguity::AnySpans
            && granule == 1 << self.memory.granule_lg2()
            && let Some(seed) = self.scatter
        {
            return self.memory.allocate_scattered(len, seed).ok();
        }
        let whole = lg2::align_up(len, self.memory.granule_lg2())?;
        let span = self.memory.allocate(whole, align.ilog2()).ok()?;
        if span.paddr().get() + (len - 1) <= last.get() {
            return Some(vec![span]);
        }
        self.memory.free(&[span]);
        None
    }
}

impl CoherentMemory for SimCoherent {
    fn allocate(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent> {
        if self.faults.fails() {
            return Err(NoCoherent { why: "injected failure of an allocation" });
        }
        if request.coherency == Coherency::NonCoherent && self.uncached == Uncached::Missing {
            return Err(NoCoherent { why: "all memory is cached" });
        }
        let none = NoCoherent { why: "no such frames are free" };
        let spans = self.spans(request).ok_or(none)?;
        self.memory.pin_frames(&spans);
        let real = self.memory.lend(&spans);
        let start = real.start_at(0).ok_or(none)?;
        let mut given = spans.clone();
        if let [whole] = given[..] {
            let part = Span::new(whole.paddr(), request.len.min(whole.len()));
            given = part.into_iter().collect();
        }
        let owner = Arc::new(Owned { memory: Arc::clone(&self.memory), spans, _real: real });
        #[expect(unsafe_code, reason = "the frames are the owner's")]
        // SAFETY: 1. The pointer leads to atomics, which any thread may access, and zeros. 2. The
        // owner keeps them, and the frames, until it is dropped. 3. References lead to atomics.
        let frames = unsafe { CoherentFrames::scattered(start, &given, owner) };
        Ok(frames)
    }
}

/// Frames that are pinned.
#[derive(Debug)]
struct Owned {
    memory: Arc<SimMemory>,
    spans: Vec<Span>,
    _real: RealBytes,
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.memory.take_back(&self.spans);
        self.memory.unpin_frames(&self.spans, Dirty::Written);
        self.memory.free(&self.spans);
    }
}
