//! The simulation of pins, the same as in `xtask/peers/bench/pins.h`: a process has memory in
//! folios, and a pin finds them by the leaves of its page table. For each folio it adds to a count.
//! All else that a kernel does is so many instructions. Or a process has registers of a device,
//! which are followed leaf by leaf.

use std::arch::asm;
use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink, Stopped};
use dmaspan::{Errno, PhysAddr, Promise, Prot, Span, UserAddr, UserRange};
use parking_lot::RwLock;
use parking_lot::lock_api::Mutex;

use super::swiotlb::Spin;

/// log2 of a page's bytes.
const PAGE_LG2: u32 = 12;
/// Where the user's memory is, by its own addresses and by hardware's.
pub(crate) const USER: u64 = 0x7e00_0000_0000;
const MEMORY: u64 = 0x1000_0000_0000;
const REGISTERS: u64 = 0x2000_0000_0000;
/// Folios that are scattered: one of so many places is used.
const PLACES: u64 = 4;
/// Odd, so that each folio has a place of its own.
const STRIDE: u64 = 40503;

/// Where the folios are that follow each other in the user's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lie {
    Neighbours,
    Scattered,
    /// There are none: all of it is registers of a device, in leaves as large as folios.
    Registers,
}

/// What a pin costs beside what is done here, in instructions; an unpin costs its pages alone.
#[derive(Clone, Copy)]
pub(crate) struct Cost {
    pub(crate) call: u64,
    pub(crate) page: u64,
}

/// What is known of a folio, on a cache line of its own as in a kernel.
#[repr(align(64))]
struct Folio {
    pins: AtomicI64,
    dirty: AtomicBool,
}

/// A process with memory.
pub(crate) struct User {
    /// log2 of a folio's bytes.
    folio_lg2: u32,
    /// The place of each folio, in the order of the user's addresses.
    leaves: Box<[u64]>,
    /// The folios, by their places.
    folios: Box<[Folio]>,
    /// The bytes of a device that take the place of memory.
    registers: u64,
    cost: Cost,
    /// The lock of its page table, which a pin holds.
    table: RwLock<()>,
    /// The lock of the table that the registers' leaves are in.
    entries: Mutex<Spin, ()>,
}

/// So many instructions, an even number.
#[inline(always)]
fn spend(instructions: u64) {
    if instructions == 0 {
        return;
    }
    // SAFETY: a register is counted down, and nothing else changes.
    unsafe {
        asm!("2: sub {0}, 2", "ja 2b", inout(reg) instructions => _, options(nomem, nostack));
    }
}

/// A number of something that is in memory.
#[inline(always)]
fn index(number: u64) -> usize {
    usize::try_from(number).expect("memory has room for it")
}

impl User {
    /// A process with so many bytes in folios of `2^order` pages.
    pub(crate) fn new(bytes: u64, order: u32, lie: Lie, cost: Cost) -> Self {
        let folio_lg2 = PAGE_LG2 + order;
        let leaves = bytes >> folio_lg2;
        let places = leaves.next_power_of_two() * PLACES;
        let place = |n: u64| match lie {
            Lie::Scattered => (n * STRIDE) & (places - 1),
            Lie::Neighbours | Lie::Registers => n,
        };
        let (leaves, places, registers) =
            if lie == Lie::Registers { (0, 0, bytes) } else { (leaves, places, 0) };
        let folio = || Folio { pins: AtomicI64::new(0), dirty: AtomicBool::new(false) };
        Self {
            folio_lg2,
            leaves: (0..leaves).map(place).collect(),
            folios: iter::repeat_with(folio).take(index(places)).collect(),
            registers,
            cost,
            table: RwLock::new(()),
            entries: Mutex::new(()),
        }
    }

    /// How many pins its pages have.
    pub(crate) fn pins(&self) -> i64 {
        self.folios.iter().map(|folio| folio.pins.load(Ordering::Relaxed)).sum()
    }

    /// How many folios have pins.
    pub(crate) fn folios_pinned(&self) -> usize {
        self.folios.iter().filter(|folio| folio.pins.load(Ordering::Relaxed) > 0).count()
    }

    /// Where the folio of a place begins.
    #[inline(always)]
    fn address(&self, place: u64) -> u64 {
        MEMORY + (place << self.folio_lg2)
    }

    /// Unpins spans of any number of folios, and returns how many bytes they have.
    #[inline(always)]
    fn unpin(&self, spans: &[Span], dirty: Dirty) -> u64 {
        let (shift, folio, folios) = (self.folio_lg2, 1 << self.folio_lg2, &*self.folios);
        let mut all = 0;
        for span in spans {
            let (at, mut left) = (span.paddr().get() - MEMORY, span.len());
            all += left;
            let (mut place, mut inside) = (at >> shift, at & (folio - 1));
            while left > 0 {
                let bytes = (folio - inside).min(left);
                let record = folio_at(folios, place);
                if dirty == Dirty::Written && !record.dirty.load(Ordering::Relaxed) {
                    record.dirty.store(true, Ordering::Relaxed);
                }
                record.pins.fetch_sub((bytes >> PAGE_LG2).cast_signed(), Ordering::Relaxed);
                (place, inside, left) = (place + 1, 0, left - bytes);
            }
        }
        all
    }

    /// Unpins memory that nobody has seen.
    #[cold]
    fn unpin_bytes(&self, at: u64, bytes: u64) {
        let span = Span::new(PhysAddr::new(at), bytes);
        self.unpin(&[span.expect("pinned memory")], Dirty::Clean);
    }

    /// Follows registers leaf by leaf, each of which costs as much as the call of a pin, and pushes
    /// all that was followed as one span.
    fn follow(&self, range: UserRange, sink: &mut dyn SpanSink) -> Result<(), PinError<NoMemory>> {
        let (leaf, start) = (1 << self.folio_lg2, range.start().get() - USER);
        let end = start + range.len_less_one() + 1;
        if end > self.registers {
            return Err(PinError::Failed(NoMemory { range }));
        }
        let mut at = start;
        while at < end {
            let _entries = self.entries.lock();
            spend(self.cost.call);
            at = (at / leaf + 1) * leaf;
        }
        let span = Span::new(PhysAddr::new(REGISTERS + start), end - start);
        sink.push(span.expect("a valid span"), Kind::Mmio)?;
        Ok(())
    }

    /// Pins folio by folio and pushes what is contiguous as one span.
    #[inline(always)]
    fn pin_all(&self, range: UserRange, sink: &mut dyn SpanSink) -> Result<(), Pause> {
        let (shift, folio) = (self.folio_lg2, 1 << self.folio_lg2);
        let (offset, mut left) = (range.start().get().wrapping_sub(USER), range.len_less_one() + 1);
        let mut leaves = self.leaves.get(index(offset >> shift)..).unwrap_or_default().iter();
        // What is pinned and was not pushed: nothing yet, before the first folio.
        let mut inside = offset & (folio - 1);
        let mut start = leaves.as_slice().first().map_or(0, |first| self.address(*first) + inside);
        let mut end = start;
        while left > 0 {
            let Some(place) = leaves.next() else {
                return Err(Pause { start, end, error: PinError::Failed(NoMemory { range }) });
            };
            let (at, bytes) = (self.address(*place) + inside, (folio - inside).min(left));
            let record = folio_at(&self.folios, *place);
            record.pins.fetch_add((bytes >> PAGE_LG2).cast_signed(), Ordering::Relaxed);
            if at != end {
                if push(sink, start, end).is_err() {
                    self.unpin_bytes(at, bytes);
                    return Err(Pause { start, end, error: PinError::Stopped });
                }
                start = at;
            }
            end = at + bytes;
            (inside, left) = (0, left - bytes);
        }
        push(sink, start, end).map_err(|stopped| Pause { start, end, error: stopped.into() })
    }
}

/// What is known of the folio at a place: found as Linux finds a page's record, without a look at
/// how many there are.
#[inline(always)]
fn folio_at(folios: &[Folio], place: u64) -> &Folio {
    debug_assert!(index(place) < folios.len());
    // SAFETY: places are of leaves, each of which has a folio, and of pinned memory, which is of
    // leaves.
    unsafe { folios.get_unchecked(index(place)) }
}

/// Pushes memory from `start` up to `end`.
#[inline(always)]
fn push(sink: &mut dyn SpanSink, start: u64, end: u64) -> Result<(), Stopped> {
    let span = Span::new(PhysAddr::new(start), end - start).map_err(|_| Stopped)?;
    sink.push(span, Kind::Memory)
}

/// A pin that went no further, and where it has pinned what was not taken.
struct Pause {
    start: u64,
    end: u64,
    error: PinError<NoMemory>,
}

/// The user has no memory there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the user has no memory in part of {range}")]
pub(crate) struct NoMemory {
    range: UserRange,
}

/// Pins the memory of users.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SimulatedPins {
    /// Under the lock of a page table, as `pin_user_pages_remote()` is called.
    Locked,
    /// Without it, as `pin_user_pages_fast()`.
    Fast,
}

/// What a pin keeps; dropped, it leaves the pages pinned.
pub(crate) struct Pinned(Arc<User>);

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pinned")
    }
}

// SAFETY: there is no memory behind the addresses, and no device. Spans cover the range, in order:
// each folio's part of it is joined to the run before or follows it.
unsafe impl Pinner for SimulatedPins {
    type Address = PhysAddr;
    type Space = Arc<User>;
    type Pin = Pinned;
    type Error = NoMemory;

    fn pin(
        &self,
        user: &Arc<User>,
        range: UserRange,
        _prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<Pinned, PinFailed<Pinned, NoMemory>> {
        let _table = (*self == Self::Locked).then(|| user.table.read());
        let pin = Pinned(Arc::clone(user));
        if user.registers > 0 {
            let followed = user.follow(range, sink);
            return match followed {
                Ok(()) => Ok(pin),
                Err(error) => Err(PinFailed { range, error, pin: None }),
            };
        }
        let pages = (range.len_less_one() >> PAGE_LG2) + 1;
        match user.pin_all(range, sink) {
            Ok(()) => {
                spend(user.cost.call + pages * user.cost.page);
                Ok(pin)
            }
            Err(Pause { start, end, error }) => {
                if start < end {
                    user.unpin_bytes(start, end - start);
                }
                Err(PinFailed { range, error, pin: (user.pins() > 0).then_some(pin) })
            }
        }
    }

    fn unpin(&self, _: Promise<'_>, pin: &mut Pinned, spans: &[Span], kind: Kind, dirty: Dirty) {
        if kind == Kind::Mmio {
            return;
        }
        let bytes = pin.0.unpin(spans, dirty);
        spend((bytes >> PAGE_LG2) * pin.0.cost.page);
    }

    fn release(&self, _promise: Promise<'_>, _pin: Pinned) {}

    fn space_id(&self, user: &Arc<User>) -> u64 {
        Arc::as_ptr(user).addr() as u64
    }

    fn read(&self, _: &Arc<User>, at: UserAddr, _: &mut [u8]) -> Result<(), NoMemory> {
        Err(NoMemory { range: UserRange::point(at) })
    }

    fn write(&self, _: &Arc<User>, at: UserAddr, _: &[u8]) -> Result<(), NoMemory> {
        Err(NoMemory { range: UserRange::point(at) })
    }

    fn errno(&self, _: &NoMemory) -> Errno {
        Errno::EFAULT
    }
}
