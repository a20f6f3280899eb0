//! The [`Pool`]: taking, copying and releasing slots.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::ManuallyDrop;
use core::{fmt, mem};

use lock_api::Mutex;

use super::chunk::{Chunk, Taken};
use super::config::{PoolConfig, Wipe};
use super::error::Error;
use super::growth::Grown;
use super::marks::Mark;
use super::memory::{InSlot, Original, PoolMemory, To, Transfer};
use super::request::{self, Fit, Grid, SlotRequest};
use super::slot::{Bounced, Fill, NotReleased, SINGLE, Slot};
use crate::addr::{Address, PhysAddr};
use crate::atomic::AtomicU32;
use crate::leak::{self, Held};
use crate::lg2;
use crate::log;
use crate::platform::{Id, Identity, Platform};
use crate::promise::Promise;
use crate::prot::Direction;
use crate::span::Span;

/// A slot of a pool on a platform.
pub type SlotOf<P, A = PhysAddr> = Slot<<P as Platform>::Lock, A>;
/// A mapping of a pool on a platform.
pub type BouncedOf<P, A = PhysAddr> = Bounced<<P as Platform>::Lock, A>;

/// How often a request that found nothing looks again because slots were released meanwhile: see
/// the same of a chunk.
const TRIES: u32 = 4;
/// How many spans of memory a pool can begin with.
const MAX_SPANS: usize = 1 << 16;
/// How many slots a span can have: so many that sums of two numbers of slots have 32 bits.
pub(super) const MAX_SLOTS: u32 = 1 << 31;

/// Memory that devices reach, given out by slots.
///
/// Any number of threads share one. Dropped, it takes its memory back from the host and drops it;
/// where slots are still out, it leaks it instead.
pub struct Pool<M: PoolMemory, P: Platform> {
    /// Cloned only to be leaked.
    pub(super) memory: Arc<M>,
    pub(super) platform: P,
    pub(super) config: PoolConfig,
    pub(super) slot_lg2: u32,
    base: Box<[Chunk<P::Lock>]>,
    pub(super) grown: Mutex<P::Lock, Grown<P::Lock>>,
    /// How many leases there are of what was added.
    pub(super) leased: AtomicU32,
    identity: Identity,
}

impl<M: PoolMemory, P: Platform> Pool<M, P> {
    /// A pool of all that the memory begins with, which is shared with the host.
    ///
    /// # Errors
    ///
    /// [`Error::SlotSize`]; [`Error::Spans`] and [`Error::PoolSpan`] for memory that cannot be
    /// divided into slots; [`Error::NoMemory`]. [`Error::Host`] where the host refuses to share it:
    /// all of the memory leaks then.
    ///
    /// # Context
    ///
    /// Allocates. As with any [`Arc`], the program ends where there is no memory to move `memory`
    /// to.
    pub fn new(memory: M, config: PoolConfig, platform: P) -> Result<Self, Error> {
        let slot_lg2 = config.slot_lg2()?;
        let (memory, mut base) = (Arc::new(memory), Vec::new());
        let spans = memory.spans();
        if spans.is_empty() || spans.len() > MAX_SPANS {
            return Err(Error::Spans { max: MAX_SPANS });
        }
        let no_memory = |span: Span| Error::NoMemory { bytes: span.len() };
        base.try_reserve_exact(spans.len()).map_err(|_| no_memory(spans[0].output()))?;
        for span in spans.iter().map(|span| span.output()) {
            let grid = grid(span, slot_lg2)?;
            base.push(Chunk::new(span, grid, config.areas).ok_or(no_memory(span))?);
        }
        // Unless all of it is shared, it is unknown who sees the memory: also where a hook panics.
        let kept = ManuallyDrop::new(Arc::clone(&memory));
        for &span in spans {
            memory.share(Promise::kept(), span).map_err(|_| Error::Host { span: span.output() })?;
        }
        drop(ManuallyDrop::into_inner(kept));
        Ok(Self {
            platform,
            config,
            slot_lg2,
            base: base.into_boxed_slice(),
            grown: Mutex::new(Grown::default()),
            leased: AtomicU32::new(0),
            identity: Identity::new(),
            memory,
        })
    }

    /// The memory, to look at it.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns what it is like.
    pub fn config(&self) -> &PoolConfig {
        &self.config
    }

    /// What tells it from others.
    #[inline(always)]
    pub(super) fn id(&self) -> Id {
        self.identity.id()
    }

    /// What the pool began with.
    #[inline(always)]
    pub(super) fn base(&self) -> &[Chunk<P::Lock>] {
        &self.base
    }

    /// From the lowest to the highest address that a slot may have, of the memory that the pool
    /// began with; without the last one where that would be the whole address space.
    pub fn reach(&self) -> Span<M::Address> {
        let (mut lowest, mut highest) = (u64::MAX, 0);
        for chunk in &self.base {
            lowest = lowest.min(chunk.span().paddr().get());
            highest = highest.max(chunk.span().last().get());
        }
        Span::covering(M::Address::new(lowest), (highest - lowest).min(u64::MAX - 1))
    }

    /// Returns how long a slot can be that is like `request`, whatever the low bits of its
    /// original, in bytes, of the memory that the pool began with: 0 where some original has no
    /// slot at all, or the request means nothing.
    pub fn max_len(&self, request: &SlotRequest) -> u64 {
        let longest = |chunk: &Chunk<P::Lock>| request::longest(chunk.grid(), request);
        self.base.iter().map(longest).max().unwrap_or(0)
    }

    /// Slots for a piece of memory, whose padding is zeros; nothing is copied yet.
    ///
    /// The slots released last by this CPU are taken first. Where its own area has none that fit,
    /// others have to give, and runs may reach over several.
    ///
    /// # Errors
    ///
    /// [`Error::Full`] where no free run fits, nor may the pool grow: one that stays free while it
    /// is looked for is found, whatever others take and release. [`Error::TooLong`],
    /// [`Error::Unreachable`] and [`Error::Unfit`] where none would were the pool empty;
    /// [`Error::KeepBits`], [`Error::Granule`] and [`Error::Boundary`] for requests that mean
    /// nothing. [`Error::NoCopies`] for an original that the pool's memory does not
    /// [find](PoolMemory::can_copy).
    ///
    /// # Context
    ///
    /// Takes a lock of an area, for a few instructions, or for a look through it where it is nearly
    /// full; several at once only for a run over as many. Allocates nothing where the pool does not
    /// grow. Also in interrupts, if [`Platform::Lock`] keeps them off while it is held. Where a
    /// hook of the memory panics, the slots are lost to the pool.
    #[inline(always)]
    pub fn take(
        &self,
        original: Original<M::Address>,
        request: &SlotRequest,
    ) -> Result<SlotOf<P, M::Address>, Error> {
        let span = original.span();
        if !self.memory.can_copy(span) {
            return Err(Error::NoCopies { original: span.output() });
        }
        self.take_for(span, request)
    }

    /// A slot for an original that can be copied, or that never is.
    #[inline(always)]
    pub(super) fn take_for(
        &self,
        span: Span<M::Address>,
        request: &SlotRequest,
    ) -> Result<SlotOf<P, M::Address>, Error> {
        let (cpu, node) = (self.platform.cpu(), self.node());
        let latest =
            self.base.get(node).and_then(|chunk| chunk.take_plain(span.output(), request, cpu));
        match latest {
            Some(taken) => Ok(self.slot(node, taken, span)),
            None => {
                // Put together from its parts on either way, a slot stays in registers: what is
                // written word by word and read as more stalls the processor.
                let mut slot = self.take_anywhere(span, request, node, cpu)?;
                let (pool, grown, node) = (slot.pool, slot.grown.take(), slot.node);
                let (taken, original) = (slot.taken, slot.original);
                mem::forget(slot);
                let original = Span::covering(original.start(), original.len() - 1);
                Ok(Slot { pool, grown, node, taken: taken.by_parts(), original })
            }
        }
    }

    /// The chunk of this CPU's node.
    #[inline(always)]
    pub(super) fn node(&self) -> usize {
        match self.base.len() {
            1 => 0,
            nodes => self.platform.node() % nodes,
        }
    }

    /// Slots of any node, or of what the pool has grown by, or grows.
    #[inline(never)]
    fn take_anywhere(
        &self,
        span: Span<M::Address>,
        request: &SlotRequest,
        node: usize,
        cpu: usize,
    ) -> Result<SlotOf<P, M::Address>, Error> {
        request.check()?;
        let mut fits = false;
        for _ in 0..TRIES {
            let before = self.released();
            for number in (node..self.base.len()).chain(0..node) {
                let chunk = &self.base[number];
                let Some(fit) = Fit::new(chunk.grid(), span.output(), request) else { continue };
                if let Some(taken) = chunk.take(&fit, cpu) {
                    return Ok(self.slot(number, taken, span));
                }
                fits = true;
            }
            // What a node has no longer, another may have got since.
            if self.base.len() == 1 || self.released() == before {
                break;
            }
        }
        let grown = self.take_grown(span, request, cpu, &mut fits);
        grown.ok_or_else(|| match fits {
            true => Error::Full { len: span.len(), free: self.free_bytes() },
            false => self.unfit(span, request),
        })
    }

    /// How often slots were released, wrapping.
    fn released(&self) -> u32 {
        self.base.iter().fold(0, |sum, chunk| sum.wrapping_add(chunk.released()))
    }

    /// What is free: without a lock, where the pool does not grow.
    fn free_bytes(&self) -> u64 {
        let free: u64 = self.base.iter().map(|chunk| u64::from(chunk.free())).sum();
        self.config.growth.map_or(free << self.slot_lg2, |_| self.stats().free_bytes())
    }

    /// Why there would be no slot even if the pool were empty.
    fn unfit(&self, original: Span<M::Address>, request: &SlotRequest) -> Error {
        let (len, grown) = (original.len(), self.grown.lock());
        let spans = || self.base.iter().map(|chunk| chunk.span()).chain(grown.spans());
        let lowest = spans().map(|span| span.paddr().get()).min().unwrap_or(0);
        let max = spans().map(|span| span.len()).max().unwrap_or(0);
        match request.last < lowest {
            true => Error::Unreachable { last: request.last, lowest },
            false if len > max => Error::TooLong { len, max },
            false => Error::Unfit { original: original.output(), request: *request },
        }
    }

    /// The handle of a run that was taken, padded.
    #[inline(always)]
    pub(super) fn slot(
        &self,
        node: usize,
        taken: Taken,
        original: Span<M::Address>,
    ) -> SlotOf<P, M::Address> {
        if original.len() != taken.bytes(self.slot_lg2) {
            self.zero_around(taken, original.len());
        }
        // There are fewer spans than that.
        let node = u32::try_from(node).unwrap_or(SINGLE);
        Slot { pool: self.id(), grown: None, node, taken, original }
    }

    /// Writes zeros to the part of a run that does not stand in for the original.
    #[inline(never)]
    fn zero_around(&self, taken: Taken, len: u64) {
        let before = taken.data - taken.start();
        let after = taken.bytes(self.slot_lg2) - before - len;
        for (start, len) in [(taken.start(), before), (taken.data.wrapping_add(len), after)] {
            if let Ok(padding) = Span::new(M::Address::new(start), len) {
                self.memory.zero(InSlot::new(padding));
            }
        }
    }

    /// Copies `len` bytes at `offset` between a slot and its original. What nobody wrote to a slot
    /// since it was taken is former holders' data, which is not for the original.
    ///
    /// # Errors
    ///
    /// With nothing copied: [`Error::Foreign`] for a slot of another pool, [`Error::Outside`] for
    /// no bytes and such that are not the slot's.
    #[inline]
    pub fn copy(
        &self,
        slot: &SlotOf<P, M::Address>,
        offset: u64,
        len: u64,
        to: To,
    ) -> Result<(), Error> {
        self.part(slot, offset, len)?;
        self.copy_part(slot, offset, len, to);
        Ok(())
    }

    /// The same, of bytes of a slot of this pool.
    #[inline(always)]
    fn copy_part(&self, slot: &SlotOf<P, M::Address>, offset: u64, len: u64, to: To) {
        let [slot, original] = [slot.span(), slot.original].map(|all| all.start().get());
        let at = |start: u64| M::Address::new(start.wrapping_add(offset));
        self.memory.copy(Transfer::new(at(slot), at(original), len, to));
    }

    /// A part of a slot of this pool.
    #[inline(always)]
    pub(super) fn part(
        &self,
        slot: &SlotOf<P, M::Address>,
        offset: u64,
        len: u64,
    ) -> Result<Span<M::Address>, Error> {
        if slot.pool != self.id() {
            return Err(Error::Foreign { addr: slot.span().start().get() });
        }
        let mapped = slot.len();
        match offset.checked_add(len) {
            Some(end) if len != 0 && end <= mapped => {
                // It is in the slot.
                let start = slot.span().start().get() + offset;
                Ok(Span::covering(M::Address::new(start), len - 1))
            }
            _ => Err(Error::Outside { offset, len, mapped }),
        }
    }

    /// Gives a slot back, which no device uses any more. Nothing is copied.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a slot of another pool, which is given back.
    ///
    /// # Context
    ///
    /// As [`take`](Self::take).
    #[inline(always)]
    pub fn release(
        &self,
        slot: SlotOf<P, M::Address>,
    ) -> Result<(), NotReleased<SlotOf<P, M::Address>>> {
        if slot.pool != self.id() {
            let error = Error::Foreign { addr: slot.span().start().get() };
            return Err(NotReleased { error, handle: slot });
        }
        self.give(slot);
        Ok(())
    }

    /// The same, of a slot of this pool.
    #[inline(always)]
    fn give(&self, mut slot: SlotOf<P, M::Address>) {
        if self.config.wipe == Wipe::Release {
            // Padding too: a device may have written it.
            let (start, bytes) = (slot.taken.start(), slot.taken.bytes(self.slot_lg2));
            self.memory.zero(InSlot::new(Span::covering(M::Address::new(start), bytes - 1)));
        }
        let (grown, node, taken) = (slot.grown.take(), slot.node, slot.taken);
        mem::forget(slot);
        match (grown, self.base.get(node as usize)) {
            (None, Some(chunk)) => chunk.give(taken),
            (Some(chunk), _) => chunk.give(taken),
            (None, None) => self.release_single(taken),
        }
    }

    /// Keeps a slot from ever being used again: hardware was not seen to forget it.
    ///
    /// # Errors
    ///
    /// As [`release`](Self::release).
    pub fn quarantine(
        &self,
        slot: SlotOf<P, M::Address>,
    ) -> Result<(), NotReleased<SlotOf<P, M::Address>>> {
        if slot.pool != self.id() {
            let error = Error::Foreign { addr: slot.span().start().get() };
            return Err(NotReleased { error, handle: slot });
        }
        self.mark(&slot, Some(Mark::Quarantined));
        let bytes = slot.taken.bytes(self.slot_lg2);
        self.grown.lock().quarantined += bytes;
        log::warn!(
            "{bytes:#x} bytes of slots at {:#x} are in quarantine for ever, because hardware did \
             not confirm that it forgot them",
            slot.taken.start()
        );
        mem::forget(slot);
        Ok(())
    }

    /// A buffer for a device, which is to use the slot instead: filled from the original, but for
    /// one that it [overwrites](Fill::Overwritten).
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take); [`Error::Direction`] where the device overwrites what it does not
    /// write, or reads as well.
    ///
    /// # Context
    ///
    /// As [`take`](Self::take).
    #[inline]
    pub fn map(
        &self,
        original: Original<M::Address>,
        direction: Direction,
        fill: Fill,
        request: &SlotRequest,
    ) -> Result<BouncedOf<P, M::Address>, Error> {
        if fill == Fill::Overwritten && direction != Direction::FromDevice {
            return Err(Error::Direction { direction });
        }
        let slot = self.take(original, request)?;
        if fill == Fill::Copy {
            self.copy_part(&slot, 0, slot.len(), To::Slot);
        }
        Ok(Bounced { slot, direction, fill })
    }

    /// Lets the CPU see what the device wrote to `len` bytes at `offset`: they are copied out of
    /// the slot, and no others (`swiotlb_sync_single_for_cpu`). Of a slot that was not filled, that
    /// says that the device has written them.
    ///
    /// # Errors
    ///
    /// As [`copy`](Self::copy); [`Error::Direction`] where the device only reads.
    ///
    /// # Context
    ///
    /// The device does not write the bytes until they are handed back to it.
    pub fn sync_for_cpu(
        &self,
        bounced: &BouncedOf<P, M::Address>,
        offset: u64,
        len: u64,
    ) -> Result<(), Error> {
        self.part(&bounced.slot, offset, len)?;
        if bounced.direction == Direction::ToDevice {
            return Err(Error::Direction { direction: bounced.direction });
        }
        self.copy_part(&bounced.slot, offset, len, To::Original);
        Ok(())
    }

    /// Lets the device see what the CPU wrote to `len` bytes at `offset`
    /// (`swiotlb_sync_single_for_device`). Where the device only writes it hands the bytes back to
    /// it, and copies none.
    ///
    /// # Errors
    ///
    /// As [`copy`](Self::copy).
    ///
    /// # Context
    ///
    /// The CPU does not write the bytes until they are handed back to it.
    pub fn sync_for_device(
        &self,
        bounced: &BouncedOf<P, M::Address>,
        offset: u64,
        len: u64,
    ) -> Result<(), Error> {
        self.part(&bounced.slot, offset, len)?;
        if bounced.direction != Direction::FromDevice {
            self.copy_part(&bounced.slot, offset, len, To::Slot);
        }
        Ok(())
    }

    /// Ends a mapping that no device uses any more: copies all of it back, where the device writes,
    /// and releases the slot.
    ///
    /// # Errors
    ///
    /// The mapping is given back: [`Error::Foreign`]; [`Error::Unreported`] where it was not
    /// filled, which [`unmap_written`](Self::unmap_written) ends.
    ///
    /// # Context
    ///
    /// As [`take`](Self::take).
    #[inline]
    pub fn unmap(
        &self,
        bounced: BouncedOf<P, M::Address>,
    ) -> Result<(), NotReleased<BouncedOf<P, M::Address>>> {
        let written = match (bounced.fill, bounced.direction) {
            (Fill::Overwritten, _) => {
                return Err(NotReleased { error: Error::Unreported, handle: bounced });
            }
            (Fill::Copy, Direction::ToDevice) => 0,
            (Fill::Copy, _) => bounced.slot.len(),
        };
        self.end(bounced, written)
    }

    /// Ends a mapping of which the device has written the first `written` bytes: copies back those
    /// and no others.
    ///
    /// # Errors
    ///
    /// The mapping is given back: [`Error::Foreign`]; [`Error::Outside`] where it has not so many
    /// bytes; [`Error::Direction`] where the device only reads and some were written.
    ///
    /// # Context
    ///
    /// As [`take`](Self::take).
    #[inline]
    pub fn unmap_written(
        &self,
        bounced: BouncedOf<P, M::Address>,
        written: u64,
    ) -> Result<(), NotReleased<BouncedOf<P, M::Address>>> {
        if bounced.direction == Direction::ToDevice && written != 0 {
            let error = Error::Direction { direction: bounced.direction };
            return Err(NotReleased { error, handle: bounced });
        }
        self.end(bounced, written)
    }

    #[inline(always)]
    fn end(
        &self,
        bounced: BouncedOf<P, M::Address>,
        written: u64,
    ) -> Result<(), NotReleased<BouncedOf<P, M::Address>>> {
        // Nothing written is a part of any slot of this pool.
        let checked = self.part(&bounced.slot, 0, written.max(1));
        if let Err(error) = checked {
            return Err(NotReleased { error, handle: bounced });
        }
        if written != 0 {
            self.copy_part(&bounced.slot, 0, written, To::Original);
        }
        self.give(bounced.slot);
        Ok(())
    }
}

impl<M: PoolMemory, P: Platform> Drop for Pool<M, P> {
    fn drop(&mut self) {
        // Unless all is private again, devices or the host may use it, and slots that are out must
        // never fit another pool: also where a hook panics.
        let kept = ManuallyDrop::new((Arc::clone(&self.memory), self.identity.clone()));
        let mut is_private = self.stats().used == 0;
        for chunk in &self.base {
            is_private = is_private
                && self.memory.unshare(Promise::kept(), chunk.span().of_output()).is_ok();
        }
        self.shrink();
        let stats = self.stats();
        if is_private && self.grown.lock().counted == 0 {
            drop(ManuallyDrop::into_inner(kept));
        } else {
            leak::count(Held { memory: stats.bytes + stats.single, ..Held::default() });
            log::warn!(
                "a pool of {:#x} bytes was dropped and leaks, because {:#x} bytes of its slots are \
                 out or the host did not take its memory back: release all slots first",
                stats.bytes + stats.single,
                stats.used
            );
        }
    }
}

impl<M: PoolMemory, P: Platform> fmt::Debug for Pool<M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Pool");
        debug.field("config", &self.config);
        if let Some(grown) = self.grown.try_lock() {
            debug.field("stats", &self.count(&grown));
        }
        debug.finish_non_exhaustive()
    }
}

/// The slots of a span.
pub(super) fn grid(span: Span, slot_lg2: u32) -> Result<Grid, Error> {
    let slots = u32::try_from(span.len() >> slot_lg2).ok().filter(|slots| *slots <= MAX_SLOTS);
    match slots {
        Some(slots) if lg2::is_aligned(span.paddr().get() | span.len(), slot_lg2) => {
            Ok(Grid { base: span.paddr().get(), last: span.last().get(), slot_lg2, slots })
        }
        _ => Err(Error::PoolSpan { span, slot: lg2::size(slot_lg2) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_as_many_slots_as_numbers_of_them_can_be_added_and_no_more() {
        let span = |start, len| Span::new(PhysAddr::new(start), len).unwrap();
        for slot_lg2 in [6, 11, 30] {
            let most = 1 << (31 + slot_lg2);
            let slot = lg2::size(slot_lg2);
            let slots = |span| grid(span, slot_lg2).map(|grid| (grid.base, grid.last, grid.slots));
            assert_eq!(slots(span(slot, most)), Ok((slot, most + slot - 1, 1 << 31)));
            assert_eq!(slots(span(0, slot)), Ok((0, slot - 1, 1)));
            for span in [span(0, most + slot), span(0, 2 * most), span(slot, slot / 2)] {
                assert_eq!(slots(span), Err(Error::PoolSpan { span, slot }));
            }
        }
    }
}
