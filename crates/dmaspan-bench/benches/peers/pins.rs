//! The simulation of pins, the same as in `xtask/peers/bench/pins.h`: a process has memory in
//! folios, and a pin finds them by the leaves of its page table. For each folio it adds to a count.
//! What else a kernel does is so many instructions.

use std::arch::asm;
use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink};
use dmaspan::{Errno, PhysAddr, Promise, Prot, Span, UserAddr, UserRange};
use parking_lot::RwLock;

/// log2 of a page's bytes.
const PAGE_LG2: u32 = 12;
/// Where the user's memory is, by its own addresses and by hardware's.
pub(crate) const USER: u64 = 0x7e00_0000_0000;
const MEMORY: u64 = 0x1000_0000_0000;
/// Folios that are scattered: one of so many places is used.
const PLACES: u64 = 4;
/// Odd, so that each folio has a place of its own.
const STRIDE: u64 = 40503;

/// Where the folios are that follow each other in the user's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lie {
    Neighbours,
    Scattered,
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
    /// Where each folio begins, in the order of the user's addresses.
    leaves: Box<[u64]>,
    /// The folios, by their places.
    folios: Box<[Folio]>,
    cost: Cost,
    /// The lock of its page table, which a pin holds.
    table: RwLock<()>,
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
            Lie::Neighbours => n,
        };
        let folio = || Folio { pins: AtomicI64::new(0), dirty: AtomicBool::new(false) };
        Self {
            folio_lg2,
            leaves: (0..leaves).map(|n| MEMORY + (place(n) << folio_lg2)).collect(),
            folios: iter::repeat_with(folio).take(index(places)).collect(),
            cost,
            table: RwLock::new(()),
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

    #[inline(always)]
    fn folio(&self, paddr: u64) -> &Folio {
        &self.folios[index((paddr - MEMORY) >> self.folio_lg2)]
    }

    /// The bytes from `at` to the end of what is there, or of the folio around it.
    #[inline(always)]
    fn in_folio(&self, at: u64, left: u64) -> u64 {
        let folio = 1 << self.folio_lg2;
        (folio - (at & (folio - 1))).min(left)
    }

    /// Where the user has something, from its first byte on; nothing behind its memory.
    #[inline(always)]
    fn leaf(&self, offset: u64) -> Option<u64> {
        let first = self.leaves.get(index(offset >> self.folio_lg2))?;
        Some(first + (offset & ((1 << self.folio_lg2) - 1)))
    }

    #[inline(always)]
    fn pin(&self, span: Span) {
        let pages = (span.len() >> PAGE_LG2).cast_signed();
        self.folio(span.paddr().get()).pins.fetch_add(pages, Ordering::Relaxed);
    }

    /// Unpins a span of any number of folios.
    #[inline(always)]
    fn unpin(&self, span: Span, dirty: Dirty) {
        let (mut at, mut left) = (span.paddr().get(), span.len());
        while left > 0 {
            let bytes = self.in_folio(at, left);
            let folio = self.folio(at);
            if dirty == Dirty::Written && !folio.dirty.load(Ordering::Relaxed) {
                folio.dirty.store(true, Ordering::Relaxed);
            }
            folio.pins.fetch_sub((bytes >> PAGE_LG2).cast_signed(), Ordering::Relaxed);
            at += bytes;
            left -= bytes;
        }
    }

    /// Pins folio by folio and pushes what is contiguous as one span.
    fn pin_all(&self, range: UserRange, sink: &mut dyn SpanSink) -> Result<(), Pause> {
        let (mut next, mut left) =
            (range.start().get().wrapping_sub(USER), range.len_less_one() + 1);
        let mut run: Option<Span> = None;
        while left > 0 {
            let bytes = self.in_folio(next, left);
            let Some(span) =
                self.leaf(next).and_then(|at| Span::new(PhysAddr::new(at), bytes).ok())
            else {
                return Err(Pause { run, error: PinError::Failed(NoMemory { range }) });
            };
            self.pin(span);
            run = match run {
                None => Some(span),
                Some(before) => match before.join(span) {
                    Some(joined) => Some(joined),
                    None if sink.push(before, Kind::Memory).is_ok() => Some(span),
                    None => {
                        self.unpin(span, Dirty::Clean);
                        return Err(Pause { run: Some(before), error: PinError::Stopped });
                    }
                },
            };
            next += bytes;
            left -= bytes;
        }
        match run {
            Some(last) if sink.push(last, Kind::Memory).is_err() => {
                Err(Pause { run, error: PinError::Stopped })
            }
            _ => Ok(()),
        }
    }
}

/// A pin that went no further, with a run that is pinned and was not taken.
struct Pause {
    run: Option<Span>,
    error: PinError<NoMemory>,
}

/// The user has no memory there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the user has no memory in part of {range}")]
pub(crate) struct NoMemory {
    range: UserRange,
}

/// Pins the memory of users.
pub(crate) struct SimulatedPins;

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
        let _table = user.table.read();
        let pin = Pinned(Arc::clone(user));
        let pages = (range.len_less_one() >> PAGE_LG2) + 1;
        match user.pin_all(range, sink) {
            Ok(()) => {
                spend(user.cost.call + pages * user.cost.page);
                Ok(pin)
            }
            Err(Pause { run, error }) => {
                if let Some(run) = run {
                    user.unpin(run, Dirty::Clean);
                }
                Err(PinFailed { range, error, pin: (user.pins() > 0).then_some(pin) })
            }
        }
    }

    fn unpin(&self, _: Promise<'_>, pin: &mut Pinned, spans: &[Span], _: Kind, dirty: Dirty) {
        let mut bytes = 0;
        for span in spans {
            pin.0.unpin(*span, dirty);
            bytes += span.len();
        }
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
