//! The bounce pool as Linux 5.19 had it: what [`Pool`](dmaspan::swiotlb::Pool) is measured against.
//!
//! It follows the algorithm of `kernel/dma/swiotlb.c` before the lock was split: slots of 2 KiB in
//! segments of 128, and for each slot a record of 24 bytes, with what it stands in for, how many
//! bytes of that are left, and how many slots from it to the end of its segment are free in a row.
//!
//! - One lock guards the whole pool: the records' runs, where the next search begins, and how many
//!   slots are used.
//! - A search goes round from where the last one ended, by the alignment asked for, and takes the
//!   first slot whose run is long enough.
//! - Taking a run writes a record for each of its slots, and the run lengths of the free slots
//!   before it in its segment. Releasing it writes all of these again.
//! - A mapping is known by its address, copied in whatever the direction, and copied out at its end
//!   where the device writes. Copies and what slots stand in for are outside of the lock.
//!
//! It is honest, so no slower than it must be: it writes as many records as Linux does, allocates
//! nothing, and uses the same [`PoolMemory`] and locks as what it is measured against. It is right
//! where Linux 5.19 was not: a search for an address whose low bits are kept ends even if no slot
//! has them, and a part of a mapping can be synced wherever it begins.
//!
//! [`Patches`] change it as the series does, each alone or together: the lock is split by areas, a
//! bitmap takes the place of the run lengths, and the slots released last are taken first. All else
//! stays the same, so that a patch's own share shows. Linux took the first of them with 6.0 and has
//! neither of the others, which is why a model stands here and not Linux's code.
//!
//! What a driver passes with each call of Linux's API comes with the request here. Left out are
//! pools of devices, pools that grow, hosts that have to be asked, debugfs, and padding that is
//! zeroed (dma-iommu.c does that). A [granule](SlotRequest::granule) is counted from the beginning
//! of the pool, and is no more than a stride.

mod mapped;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use dmaspan::swiotlb::{Error, Original, PoolMemory, SlotRequest, To, Transfer};
use dmaspan::{Address, Direction, PhysAddr, Platform, Span};
use dmaspan_linux::UserPlatform;
use parking_lot::lock_api::{Mutex, RawMutex};

pub(crate) use mapped::MappedBefore;

/// log2 of a slot (`IO_TLB_SHIFT`).
const SLOT_LG2: u32 = 11;
/// The bytes of a slot.
pub(crate) const SLOT: u64 = 1 << SLOT_LG2;
/// How many slots a segment has (`IO_TLB_SEGSIZE`): no run crosses the end of one.
pub(crate) const SEGMENT: usize = 128;
/// The longest mapping in bytes.
pub(crate) const MAX_LEN: u64 = SLOT * SEGMENT as u64;
/// From so many bytes on a mapping begins on a multiple of it.
const PAGE: u64 = 4096;

/// What is known of a slot. Runs are written under the lock, the rest by whoever holds the slot.
#[derive(Debug, Default)]
struct Record {
    /// What the first byte of the slot stands in for.
    original: AtomicU64,
    /// How many bytes from there to the end of the mapping; 0 where there is none.
    bytes: AtomicU64,
    /// How many slots from this one on are free, to the end of the segment; 0 where it is not.
    run: AtomicU32,
}

const _: () = assert!(size_of::<Record>() == 24);

/// The patches of the series that a pool has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Patches {
    /// In how many areas it is divided, with a lock each.
    pub(crate) areas: usize,
    /// Whether a bitmap says which slots are free, and not run lengths.
    pub(crate) bitmap: bool,
    /// Whether the slots released last are taken first.
    pub(crate) latest: bool,
}

impl Patches {
    /// Nothing of it.
    pub(crate) const NONE: Self = Self { areas: 1, bitmap: false, latest: false };
}

/// A pool of one span of memory, under one lock unless it is patched.
pub(crate) struct PoolBefore<M, L> {
    memory: M,
    base: u64,
    records: Vec<Record>,
    /// A bit for each slot that is free; nothing without the bitmap. A segment has two words.
    bits: Vec<AtomicU64>,
    patches: Patches,
    per_area: usize,
    areas: Vec<Area<L>>,
}

/// The slots under one lock, on cache lines of its own.
#[repr(align(128))]
struct Area<L> {
    /// Written under the lock, read without.
    used: AtomicUsize,
    places: Mutex<L, Places>,
}

/// Where slots are looked for.
struct Places {
    /// The slot that the next search begins with.
    next: usize,
    /// Where runs began that were released, the latest last: what is not free any more is passed
    /// over.
    latest: Vec<usize>,
}

/// How many runs an area remembers.
const LATEST: usize = 4096;

/// A run that is looked for.
struct Wanted {
    slots: usize,
    /// The bits of a slot's address above those within it that matter, and what they are.
    mask: u64,
    bits: u64,
    /// A power of two, in slots.
    stride: usize,
    /// In slots, a power of two; a run does not cross a multiple.
    boundary: u64,
}

impl Wanted {
    #[inline]
    fn new(len: u64, addr: u64, request: &SlotRequest) -> Option<Self> {
        let mask = request.keep_bits & !(SLOT - 1);
        let mut stride = (mask >> SLOT_LG2) + 1;
        if len >= PAGE {
            stride <<= (PAGE / SLOT).ilog2();
        }
        stride = stride.max(request.granule >> SLOT_LG2);
        let boundary = request.boundary.map_or(1 << (64 - SLOT_LG2), |bytes| bytes >> SLOT_LG2);
        Some(Self {
            slots: usize::try_from(len.div_ceil(SLOT)).ok()?,
            mask,
            bits: addr & mask,
            stride: usize::try_from(stride).ok().filter(|stride| stride.is_power_of_two())?,
            boundary: Some(boundary).filter(|boundary| *boundary != 0)?,
        })
    }
}

impl Wanted {
    /// Whether a run may begin with the slot of this number.
    fn suits(&self, place: u64) -> bool {
        place << SLOT_LG2 & self.mask == self.bits && self.stays_within(place)
    }

    /// Whether a run that begins there crosses no boundary.
    fn stays_within(&self, place: u64) -> bool {
        (place & (self.boundary - 1)) + self.slots as u64 <= self.boundary
    }
}

impl<M: PoolMemory, L: RawMutex> PoolBefore<M, L> {
    /// A pool of the one span that the memory begins with, all free, with some of the series. There
    /// are as many areas as have a segment each.
    ///
    /// # Errors
    ///
    /// [`Error::Spans`] for more spans or none; [`Error::PoolSpan`] for one that does not begin on
    /// a page of 4 KiB and have whole segments; [`Error::NoMemory`].
    pub(crate) fn patched(memory: M, patches: Patches) -> Result<Self, Error> {
        let &[span] = memory.spans() else { return Err(Error::Spans { max: 1 }) };
        let base = span.start().get();
        if !base.is_multiple_of(PAGE) || !span.len().is_multiple_of(MAX_LEN) {
            let span = Span::new(PhysAddr::new(base), span.len());
            let span = span.map_err(|_| Error::Spans { max: 1 })?;
            return Err(Error::PoolSpan { span, slot: MAX_LEN });
        }
        let no_memory = Error::NoMemory { bytes: span.len() };
        let slots = usize::try_from(span.len() >> SLOT_LG2).map_err(|_| no_memory)?;
        let mut records = Vec::new();
        records.try_reserve_exact(slots).map_err(|_| no_memory)?;
        records.resize_with(slots, Record::default);
        for segment in records.chunks_exact(SEGMENT) {
            for (run, record) in (1..).zip(segment.iter().rev()) {
                record.run.store(run, Ordering::Relaxed);
            }
        }
        let words = if patches.bitmap { slots / 64 } else { 0 };
        let bits = (0..words).map(|_| AtomicU64::new(u64::MAX)).collect();
        let segments = slots / SEGMENT;
        let count = patches.areas.clamp(1, segments);
        let per_area = segments.div_ceil(count) * SEGMENT;
        let room = if patches.latest { LATEST } else { 0 };
        let area = |first| Area {
            used: AtomicUsize::new(0),
            places: Mutex::new(Places { next: first, latest: Vec::with_capacity(room) }),
        };
        let areas = (0..slots).step_by(per_area).map(area).collect();
        Ok(Self { memory, base, records, bits, patches, per_area, areas })
    }

    /// The memory, to look at it.
    pub(crate) fn memory(&self) -> &M {
        &self.memory
    }

    /// How many slots are held.
    pub(crate) fn used(&self) -> usize {
        self.areas.iter().map(|area| area.used.load(Ordering::Relaxed)).sum()
    }

    /// A slot for a buffer, filled from it whatever the direction, which the device is to use
    /// instead; `None` where no free run fits, and for masks that are no masks.
    ///
    /// # Context
    ///
    /// Takes the lock.
    pub(crate) fn map(
        &self,
        original: Original<M::Address>,
        direction: Direction,
        request: &SlotRequest,
    ) -> Option<M::Address> {
        let _ = direction;
        let (addr, len) = (original.span().start().get(), original.span().len());
        let inner = addr & request.keep_bits & (SLOT - 1);
        let whole = inner.checked_add(len)?;
        let wanted = Wanted::new(whole, addr, request)?;
        let first = self.take(&wanted, whole)?;
        let mut start = addr.wrapping_sub(inner);
        for record in &self.records[first..first + wanted.slots] {
            record.original.store(start, Ordering::Relaxed);
            start = start.wrapping_add(SLOT);
        }
        let slot = self.base + ((first as u64) << SLOT_LG2) + inner;
        if slot + (len - 1) > request.last {
            self.give(first);
            return None;
        }
        self.copy(slot, original.span().start(), len, To::Slot);
        Some(M::Address::new(slot))
    }

    /// Ends a mapping: copies it back where the device writes, and releases its slots.
    ///
    /// # Safety
    ///
    /// [`map`](Self::map) of this pool gave `addr` for `len` bytes and this direction, nothing
    /// ended that mapping so far, and no other call for it runs at the same time.
    ///
    /// # Context
    ///
    /// Takes the lock. No device uses the slot any more.
    #[expect(unsafe_code, reason = "addresses name mappings, as in Linux")]
    pub(crate) unsafe fn unmap(&self, addr: M::Address, len: u64, direction: Direction) {
        if direction != Direction::ToDevice {
            self.bounce(addr, len, To::Original);
        }
        self.give(self.index(addr));
    }

    /// Copies what the device wrote to `len` bytes from `addr` on out of the slot; nothing where it
    /// only reads.
    ///
    /// # Safety
    ///
    /// The bytes are of a mapping of this pool with this direction, and nothing ends that mapping
    /// meanwhile.
    #[cfg(test)]
    #[expect(unsafe_code, reason = "addresses name mappings, as in Linux")]
    pub(crate) unsafe fn sync_for_cpu(&self, addr: M::Address, len: u64, direction: Direction) {
        if direction != Direction::ToDevice {
            self.bounce(addr, len, To::Original);
        }
    }

    /// Copies what the CPU wrote to the original of `len` bytes from `addr` on into the slot;
    /// nothing where the device only writes.
    ///
    /// # Safety
    ///
    /// As [`sync_for_cpu`](Self::sync_for_cpu).
    #[cfg(test)]
    #[expect(unsafe_code, reason = "addresses name mappings, as in Linux")]
    pub(crate) unsafe fn sync_for_device(&self, addr: M::Address, len: u64, direction: Direction) {
        if direction != Direction::FromDevice {
            self.bounce(addr, len, To::Slot);
        }
    }

    /// Copies a part of a mapping, as its records say.
    fn bounce(&self, addr: M::Address, len: u64, to: To) {
        let record = &self.records[self.index(addr)];
        let inner = (addr.get() - self.base) & (SLOT - 1);
        let left = record.bytes.load(Ordering::Relaxed).saturating_sub(inner);
        let original = record.original.load(Ordering::Relaxed).wrapping_add(inner);
        let len = len.min(left);
        if len != 0 {
            self.copy(addr.get(), M::Address::new(original), len, to);
        }
    }

    #[expect(unsafe_code, reason = "the pool's own slots")]
    fn copy(&self, slot: u64, original: M::Address, len: u64, to: To) {
        // SAFETY:
        // 1. The slot is held: `map` has just taken it, and elsewhere the caller has the mapping.
        // 2. The bytes are those of the `Original` that `map` was given, in the same order, which
        //    holds until the slot is released.
        let transfer = unsafe { Transfer::between(M::Address::new(slot), original, len, to) };
        self.memory.copy(transfer);
    }

    /// The slot of an address.
    fn index(&self, addr: M::Address) -> usize {
        ((addr.get() - self.base) >> SLOT_LG2) as usize
    }

    /// Takes a run for so many bytes (`swiotlb_find_slots`), of the thread's own area first; its
    /// first slot.
    fn take(&self, wanted: &Wanted, bytes: u64) -> Option<usize> {
        let count = self.areas.len();
        if count == 1 {
            return self.take_in(0, wanted, bytes);
        }
        let own = UserPlatform.cpu() % count;
        (0..count).find_map(|n| self.take_in((own + n) % count, wanted, bytes))
    }

    /// The same in one area.
    fn take_in(&self, number: usize, wanted: &Wanted, bytes: u64) -> Option<usize> {
        let area = &self.areas[number];
        let slots = self.slots_of(number);
        let mut places = area.places.lock();
        let used = area.used.load(Ordering::Relaxed);
        if wanted.slots > slots.len() - used {
            return None;
        }
        let latest = if self.patches.latest { self.latest(&mut places, wanted) } else { None };
        let first = match latest {
            Some(first) => first,
            None => self.search(wanted, &slots, places.next)?,
        };
        let end = first + wanted.slots;
        let mut left = bytes;
        for record in &self.records[first..end] {
            record.bytes.store(left, Ordering::Relaxed);
            left = left.saturating_sub(SLOT);
        }
        if self.patches.bitmap {
            self.flip(first, wanted.slots);
        } else {
            for record in &self.records[first..end] {
                record.run.store(0, Ordering::Relaxed);
            }
            self.count_down(first, 0);
        }
        if latest.is_none() {
            places.next = if end < slots.end { end } else { slots.start };
        }
        area.used.store(used + wanted.slots, Ordering::Relaxed);
        Some(first)
    }

    /// The slots of an area.
    fn slots_of(&self, number: usize) -> Range<usize> {
        let first = number * self.per_area;
        first..(first + self.per_area).min(self.records.len())
    }

    /// The run released last, if it is free still and as it has to be.
    fn latest(&self, places: &mut Places, wanted: &Wanted) -> Option<usize> {
        while let Some(&first) = places.latest.last() {
            let is_free = self.is_free(first, wanted.slots);
            if is_free && !(wanted.suits(self.place(first)) && first.is_multiple_of(wanted.stride))
            {
                // For another request.
                return None;
            }
            places.latest.pop();
            if is_free {
                return Some(first);
            }
        }
        None
    }

    /// A slot's number from address 0 on.
    fn place(&self, index: usize) -> u64 {
        (self.base >> SLOT_LG2) + index as u64
    }

    /// Whether so many slots from one on are free, and of one segment.
    fn is_free(&self, first: usize, slots: usize) -> bool {
        if !self.patches.bitmap {
            return self.records[first].run.load(Ordering::Relaxed) as usize >= slots;
        }
        let inner = first % SEGMENT;
        let mask = if slots >= SEGMENT { u128::MAX } else { (1 << slots) - 1 };
        inner + slots <= SEGMENT && self.free_bits(first) >> inner & mask == mask
    }

    /// The bits of the segment that a slot is in.
    fn free_bits(&self, slot: usize) -> u128 {
        let words = &self.bits[slot / SEGMENT * 2..][..2];
        let [low, high] = [&words[0], &words[1]].map(|word| word.load(Ordering::Relaxed));
        u128::from(high) << 64 | u128::from(low)
    }

    /// Turns the bits of so many slots of one segment.
    fn flip(&self, first: usize, slots: usize) {
        let mask = if slots >= SEGMENT { u128::MAX } else { (1 << slots) - 1 };
        let mask = mask << (first % SEGMENT);
        let words = &self.bits[first / SEGMENT * 2..][..2];
        for (word, shift) in words.iter().zip([0, 64]) {
            // One of the halves.
            #[expect(clippy::cast_possible_truncation, reason = "it takes a half of the bits")]
            let half = (mask >> shift) as u64;
            if half != 0 {
                word.store(word.load(Ordering::Relaxed) ^ half, Ordering::Relaxed);
            }
        }
    }

    /// The first slot of a free run, going round in some slots from `next` on.
    fn search(&self, wanted: &Wanted, slots: &Range<usize>, next: usize) -> Option<usize> {
        let mut index = next.checked_add(wanted.stride - 1)? & !(wanted.stride - 1);
        if index >= slots.end {
            index = slots.start;
        }
        let mut seen = 0;
        while seen < slots.len() {
            let mut step = wanted.stride;
            let place = self.place(index);
            if place << SLOT_LG2 & wanted.mask != wanted.bits {
                step = 1;
            } else if wanted.stays_within(place) && self.is_free(index, wanted.slots) {
                return Some(index);
            } else if self.patches.bitmap {
                // On to the next free slot of the segment, or to the next segment.
                let rest = self.free_bits(index) >> (index % SEGMENT) & !1;
                let free = if rest == 0 { SEGMENT } else { rest.trailing_zeros() as usize };
                step = free.min(SEGMENT - index % SEGMENT).next_multiple_of(wanted.stride);
            }
            seen += step;
            index += step;
            if index >= slots.end {
                index = slots.start;
            }
        }
        None
    }

    /// Releases the mapping that begins in slot `first` (`swiotlb_release_slots`).
    fn give(&self, first: usize) {
        let bytes = self.records[first].bytes.load(Ordering::Relaxed);
        let slots = usize::try_from(bytes.div_ceil(SLOT)).unwrap_or(usize::MAX);
        let end = first + slots;
        let area = &self.areas[first / self.per_area];
        let mut places = area.places.lock();
        let mut run = 0;
        if !self.patches.bitmap && end < (first | (SEGMENT - 1)) + 1 {
            run = self.records[end].run.load(Ordering::Relaxed);
        }
        for record in self.records[first..end].iter().rev() {
            if !self.patches.bitmap {
                run += 1;
                record.run.store(run, Ordering::Relaxed);
            }
            record.original.store(u64::MAX, Ordering::Relaxed);
            record.bytes.store(0, Ordering::Relaxed);
        }
        if self.patches.bitmap {
            self.flip(first, slots);
        } else {
            self.count_down(first, run);
        }
        if self.patches.latest {
            if places.latest.len() == LATEST {
                // The older half is in no cache any more.
                places.latest.drain(..LATEST / 2);
            }
            places.latest.push(first);
        }
        area.used.store(area.used.load(Ordering::Relaxed) - slots, Ordering::Relaxed);
        drop(places);
    }

    /// Writes the run lengths of the free slots right before `end`, in its segment: `run` are free
    /// from there on.
    fn count_down(&self, end: usize, mut run: u32) {
        let segment = end & !(SEGMENT - 1);
        for record in self.records[segment..end].iter().rev() {
            if record.run.load(Ordering::Relaxed) == 0 {
                break;
            }
            run += 1;
            record.run.store(run, Ordering::Relaxed);
        }
    }
}
