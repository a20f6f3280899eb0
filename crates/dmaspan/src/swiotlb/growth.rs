//! A pool grows here, and shrinks again: it adds memory, and shares it with the host of a
//! confidential guest.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;

use lock_api::RawMutex;

use super::chunk::{Chunk, Taken};
use super::config::Growth;
use super::error::Error;
use super::marks::Mark;
use super::memory::{PoolMemory, Room};
use super::pool::{Pool, SlotOf, grid};
use super::request::{Fit, SlotRequest};
use super::slot::SINGLE;
use crate::addr::{Address, PhysAddr};
use crate::atomic::Ordering;
use crate::lg2;
use crate::platform::Platform;
use crate::promise::Promise;
use crate::span::Span;

/// What a pool has beyond what it began with. Its lock is taken only where the pool was too small,
/// and held while slots are taken of it: so a chunk that is found unused stays so.
pub(super) struct Grown<L> {
    chunks: Vec<Arc<Chunk<L>>>,
    /// Leases in them, or in memory of their own.
    leases: Vec<Span>,
    /// The memory of single requests.
    singles: Vec<Single>,
    /// Bytes of them.
    single: u64,
    /// The most that they ever were.
    single_high: u64,
    /// The most that was held, at most, before memory was given back.
    past_high: u64,
    /// Bytes that count against the limit: chunks, single requests, and what is about to be.
    pub(super) counted: u64,
    /// Bytes that are neither the pool's nor anybody else's any more.
    leaked: u64,
    /// Bytes of slots in quarantine.
    pub(super) quarantined: u64,
}

/// Memory of a single request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Single {
    pub(super) whole: Span,
    pub(super) mark: Option<Mark>,
}

impl<L> Default for Grown<L> {
    fn default() -> Self {
        Self {
            chunks: Vec::new(),
            leases: Vec::new(),
            singles: Vec::new(),
            single: 0,
            single_high: 0,
            past_high: 0,
            counted: 0,
            leaked: 0,
            quarantined: 0,
        }
    }
}

impl<L: RawMutex> Grown<L> {
    /// What it has: bytes of chunks, used bytes of them, bytes of single requests, and of leaks.
    pub(super) fn count(&self, slot_lg2: u32) -> [u64; 4] {
        let bytes = self.chunks.iter().map(|chunk| chunk.span().len()).sum();
        let used = self.chunks.iter().map(|chunk| u64::from(chunk.used()) << slot_lg2).sum();
        [bytes, used, self.single, self.leaked]
    }

    /// The most that was ever held: a sum, which is never less than the truth.
    pub(super) fn high(&self, slot_lg2: u32) -> u64 {
        let chunks = self.chunks.iter().map(|chunk| u64::from(chunk.high()) << slot_lg2);
        self.past_high.max(chunks.sum::<u64>() + self.single_high)
    }

    /// Counts it anew.
    pub(super) fn reset_high(&mut self) {
        self.chunks.iter().for_each(|chunk| chunk.reset_high());
        (self.single_high, self.past_high) = (self.single, 0);
    }

    /// Its chunks.
    pub(super) fn chunks(&self) -> &[Arc<Chunk<L>>] {
        &self.chunks
    }

    /// The memory of single requests.
    pub(super) fn singles(&self) -> &[Single] {
        &self.singles
    }

    /// The memory of its chunks.
    pub(super) fn spans(&self) -> impl Iterator<Item = Span> {
        self.chunks.iter().map(|chunk| chunk.span())
    }
}

impl<M: PoolMemory, P: Platform> Pool<M, P> {
    /// Slots of what the pool has grown by, or of memory for this request alone. Sets `fits` where
    /// there would be some, were all free.
    pub(super) fn take_grown(
        &self,
        span: Span<M::Address>,
        request: &SlotRequest,
        cpu: usize,
        fits: &mut bool,
    ) -> Option<SlotOf<P, M::Address>> {
        let growth = self.config.growth?;
        let guard = self.grown.lock();
        for chunk in &guard.chunks {
            let Some(fit) = Fit::new(chunk.grid(), span.output(), request) else { continue };
            *fits = true;
            if let Some(taken) = chunk.take(&fit, cpu) {
                let grown = Some(Arc::clone(chunk));
                drop(guard);
                let mut slot = self.slot(0, taken, span);
                slot.grown = grown;
                return Some(slot);
            }
        }
        drop(guard);
        self.memory.pressed();
        self.take_single(growth, span, request)
    }

    /// Memory for one request.
    fn take_single(
        &self,
        growth: Growth,
        span: Span<M::Address>,
        request: &SlotRequest,
    ) -> Option<SlotOf<P, M::Address>> {
        let slot = lg2::size(self.slot_lg2);
        let align = request.keep_bits.checked_add(1)?.max(request.granule).max(slot);
        let kept = span.start().get() & request.keep_bits;
        let bytes = lg2::align_up(kept.checked_add(span.len())?, align.ilog2())?;
        // Where it is aligned to its own length it crosses no boundary that is longer.
        let align = request.boundary.map_or(align, |boundary| {
            align.max(boundary.min(bytes.checked_next_power_of_two().unwrap_or(align)))
        });
        let whole = self.obtain(growth, Room { bytes, align, last: request.last }).ok()?;
        let grid = grid(whole, self.slot_lg2).ok();
        let Some(fit) = grid.and_then(|grid| Fit::new(grid, span.output(), request)) else {
            self.dispose(whole);
            return None;
        };
        let taken = Taken::all(whole, fit.data(fit.lowest()), self.slot_lg2);
        if !self.add(|grown| &mut grown.singles, Single { whole, mark: None }) {
            self.dispose(whole);
            return None;
        }
        let mut grown = self.grown.lock();
        grown.single += whole.len();
        grown.single_high = grown.single_high.max(grown.single);
        drop(grown);
        Some(self.slot(SINGLE as usize, taken, span))
    }

    /// Gives the memory of a single request back.
    #[cold]
    pub(super) fn release_single(&self, taken: Taken) {
        // It was a span before.
        let whole = Span::new(PhysAddr::new(taken.start()), taken.bytes(self.slot_lg2));
        if let Ok(whole) = whole {
            let mut grown = self.grown.lock();
            grown.single -= whole.len();
            let at = grown.singles.iter().position(|single| single.whole == whole);
            at.map(|at| grown.singles.swap_remove(at));
            drop(grown);
            self.dispose(whole);
        }
    }

    /// Memory within the limit, shared with the host.
    fn obtain(&self, growth: Growth, room: Room) -> Result<Span, Error> {
        let beyond = Error::GrowthLimit { bytes: room.bytes, limit: growth.limit };
        {
            let mut grown = self.grown.lock();
            let counted = grown.counted.checked_add(room.bytes);
            grown.counted = counted.filter(|bytes| *bytes <= growth.limit).ok_or(beyond)?;
        }
        let Some(span) = self.memory.allocate(room).map(Span::output) else {
            self.grown.lock().counted -= room.bytes;
            return Err(Error::NoMemory { bytes: room.bytes });
        };
        if span.len() != room.bytes {
            // What is counted and given back is as long as was asked for.
            self.memory.free(Promise::kept(), span.of_output());
            self.grown.lock().counted -= room.bytes;
            return Err(Error::NoMemory { bytes: room.bytes });
        }
        if self.memory.share(Promise::kept(), span.of_output()).is_err() {
            self.leak(span);
            return Err(Error::Host { span });
        }
        Ok(span)
    }

    /// Takes memory back from the host and frees it; how many bytes. What the host does not give
    /// back leaks, since whoever got it next would share it with the host.
    fn dispose(&self, span: Span) -> u64 {
        if self.memory.unshare(Promise::kept(), span.of_output()).is_err() {
            self.leak(span);
            return 0;
        }
        self.memory.free(Promise::kept(), span.of_output());
        self.grown.lock().counted -= span.len();
        span.len()
    }

    /// Counts memory that has no owner any more. It goes on counting against the limit.
    fn leak(&self, span: Span) {
        self.grown.lock().leaked += span.len();
    }

    /// Adds memory to the pool, for good or until it [shrinks](Self::shrink): as much as
    /// [`Growth::step`]. It is divided into areas as the rest.
    ///
    /// # Errors
    ///
    /// [`Error::GrowthLimit`], [`Error::NoMemory`]; [`Error::Host`] where the host refuses to share
    /// it: it leaks then.
    ///
    /// # Context
    ///
    /// Allocates; not for where slots are taken. As with any [`Arc`], the program ends where there
    /// is no memory for what is shared of the new slots' records, some 100 bytes.
    pub fn grow(&self) -> Result<Span<M::Address>, Error> {
        let no_growth = Error::GrowthLimit { bytes: 0, limit: 0 };
        let growth = self.config.growth.ok_or(no_growth)?;
        let slot = lg2::size(self.slot_lg2);
        let bytes = lg2::align_up(growth.step.max(slot), self.slot_lg2);
        let bytes = bytes.ok_or(Error::GrowthLimit { bytes: growth.step, limit: growth.limit })?;
        let no_memory = Error::NoMemory { bytes };
        let room = Room { bytes, align: slot, last: growth.last };
        let span = self.obtain(growth, room)?;
        let chunk = grid(span, self.slot_lg2)
            .ok()
            .and_then(|grid| Chunk::new(span, grid, self.config.areas));
        if chunk.is_some_and(|chunk| self.add(|grown| &mut grown.chunks, Arc::new(chunk))) {
            return Ok(span.of_output());
        }
        self.dispose(span);
        Err(no_memory)
    }

    /// Whether there was memory for one more of a list. It is allocated without the lock, which may
    /// keep interrupts off.
    fn add<T>(&self, list: fn(&mut Grown<P::Lock>) -> &mut Vec<T>, more: T) -> bool {
        let mut room = Vec::new();
        loop {
            let mut grown = self.grown.lock();
            let list = list(&mut grown);
            let len = list.len();
            if len == list.capacity() && len < room.capacity() {
                room.append(list);
                mem::swap(&mut room, list);
            }
            if len < list.capacity() {
                list.push(more);
                return true;
            }
            drop(grown);
            if room.try_reserve(len + 4).is_err() {
                return false;
            }
        }
    }

    /// Gives memory back that was added and has no slot in use; how many bytes. What the host does
    /// not give back leaks, and is none of them.
    ///
    /// # Context
    ///
    /// As [`grow`](Self::grow).
    pub fn shrink(&self) -> u64 {
        let mut bytes = 0;
        loop {
            let mut grown = self.grown.lock();
            let unused = grown.chunks.iter().position(|chunk| chunk.used() == 0);
            let Some(index) = unused else { return bytes };
            grown.past_high = grown.high(self.slot_lg2);
            let chunk = grown.chunks.swap_remove(index);
            drop(grown);
            bytes += self.dispose(chunk.span());
        }
    }

    /// Whether memory is the pool's own for whoever sees nothing else: of what it began with, or of
    /// a lease. Takes a lock only while there are leases of what was added.
    pub(crate) fn owns(&self, span: Span) -> bool {
        let within = |own: Span| own.paddr() <= span.paddr() && span.last() <= own.last();
        self.memory.spans().iter().any(|own| within(own.output()))
            || (self.leased.load(Ordering::Acquire) != 0
                && self.grown.lock().leases.iter().any(|lease| within(*lease)))
    }

    /// Notes something of a slot for whoever lists the pool, or takes the note away.
    pub(super) fn mark(&self, slot: &SlotOf<P, M::Address>, mark: Option<Mark>) {
        match (&slot.grown, self.base().get(slot.node as usize)) {
            (None, Some(chunk)) => chunk.mark(slot.taken, mark),
            (Some(chunk), _) => chunk.mark(slot.taken, mark),
            (None, None) => {
                let mut grown = self.grown.lock();
                let is_it = |single: &&mut Single| single.whole.paddr().get() == slot.taken.start();
                if let Some(single) = grown.singles.iter_mut().find(is_it) {
                    single.mark = mark;
                }
            }
        }
    }

    /// Records a lease of what was added; whether there was memory for that.
    pub(super) fn add_lease(&self, span: Span) -> bool {
        let is_added = self.add(|grown| &mut grown.leases, span);
        if is_added {
            self.leased.fetch_add(1, Ordering::Release);
        }
        is_added
    }

    /// Forgets it.
    pub(super) fn remove_lease(&self, span: Span) {
        let mut grown = self.grown.lock();
        if let Some(index) = grown.leases.iter().position(|lease| *lease == span) {
            grown.leases.swap_remove(index);
            self.leased.fetch_sub(1, Ordering::Release);
        }
    }
}
