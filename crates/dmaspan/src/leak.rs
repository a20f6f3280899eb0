//! Handles that are dropped leak what they hold: a device may still use it. Here that is counted.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::addr::DmaAddr;
use crate::log;
use crate::range::{IovaRange, UserRange};

/// Says what was leaked since the program began, by all domains, pools and containers in it.
///
/// A correct program leaks nothing: each handle is given back to what made it, and hardware
/// answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leaks {
    /// How many handles were dropped that hold something.
    pub handles: u64,
    /// Bytes of IOVAs that are never handed out again. Those of
    /// [`Iovas`](crate::iommu::iova::Iovas) that are themselves dropped are counted only with the
    /// feature `log`; [`Space::list`](crate::iommu::iova::Space::list) shows them as in use.
    pub iovas: u64,
    /// Bytes of memory that the DMA API does not give back, and the memory of pools.
    pub memory: u64,
    /// Bytes of slots of pools that are never used again.
    pub slots: u64,
    /// Bytes that containers leave pinned and charged for ever.
    pub pinned: u64,
}

static HANDLES: AtomicU64 = AtomicU64::new(0);
static IOVAS: AtomicU64 = AtomicU64::new(0);
static MEMORY: AtomicU64 = AtomicU64::new(0);
static SLOTS: AtomicU64 = AtomicU64::new(0);
static PINNED: AtomicU64 = AtomicU64::new(0);

/// Returns what was leaked since the program began. With the feature `log` each leak is also a
/// warning that names the range.
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::dma::{Device, DeviceConfig, Direct, NoPool, Piece, RawMemory};
/// use dmaspan::platform::OneThread;
/// use dmaspan::{Direction, PhysAddr, Span, leaked};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let ram = Span::new(PhysAddr::new(0), 1 << 30)?;
///     let direct = Arc::new(Direct::<RawMemory, _>::new(ram, OneThread));
///     let device = Device::new(direct, NoPool, DeviceConfig::bits(32))?;
///     let piece = Piece::memory(Span::new(PhysAddr::new(0x1000), 0x100)?);
///     // SAFETY: nobody touches the memory.
///     let memory = unsafe { RawMemory::new(piece) };
///
///     let before = leaked();
///     drop(device.map_single(memory, Direction::ToDevice)?);
///     assert_eq!(leaked().memory - before.memory, 0x100);
///     Ok(())
/// }
/// ```
pub fn leaked() -> Leaks {
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    Leaks {
        handles: of(&HANDLES),
        iovas: of(&IOVAS),
        memory: of(&MEMORY),
        slots: of(&SLOTS),
        pinned: of(&PINNED),
    }
}

/// What a handle held that was dropped.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Held {
    pub(crate) iovas: Option<IovaRange>,
    pub(crate) memory: u64,
    pub(crate) slots: u64,
}

/// Counts what a handle held that was dropped.
#[cold]
pub(crate) fn count(held: Held) {
    add(held);
}

#[inline(always)]
fn add(held: Held) {
    HANDLES.fetch_add(1, Ordering::Relaxed);
    let iovas = held.iovas.map_or(0, |range| range.len_less_one().saturating_add(1));
    for (count, bytes) in [(&IOVAS, iovas), (&MEMORY, held.memory), (&SLOTS, held.slots)] {
        count.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Counts what a mapping held that was dropped, and says so; `end` ends one.
#[cold]
#[inline(never)]
pub(crate) fn dropped(what: &str, end: &str, addr: DmaAddr, held: Held) {
    count(held);
    log::warn!(
        "{what} of {:#x} bytes at {addr} was dropped, so that its memory leaks and the device goes \
         on using it: end it by {end}",
        held.memory
    );
}

/// The same, without a call where nothing is said.
///
/// A driver that writes a place of a ring drops what was there. A call on that way, though it is
/// hardly ever taken, keeps the new mapping out of registers: a fifth of what mapping costs where
/// nothing is translated. Where an address is, this takes more registers than the call does.
#[inline(always)]
pub(crate) fn dropped_in_place(what: &str, end: &str, addr: DmaAddr, held: Held) {
    if cfg!(feature = "log") {
        dropped(what, end, addr, held);
    } else {
        add(held);
    }
}

/// Memory that leaks unless its note is [taken away](Self::done).
#[derive(Debug)]
pub(crate) struct LeakNote {
    pub(crate) what: &'static str,
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
}

impl LeakNote {
    /// It was given back.
    pub(crate) fn done(self) {
        core::mem::forget(self);
    }
}

impl Drop for LeakNote {
    fn drop(&mut self) {
        let Self { what, addr, bytes } = *self;
        count(Held { memory: bytes, ..Held::default() });
        log::warn!("{bytes:#x} bytes at {addr:#x} leak, because {what}");
    }
}

/// Counts a pin that is never released.
#[cold]
pub(crate) fn pin(user: UserRange, iovas: IovaRange) {
    HANDLES.fetch_add(1, Ordering::Relaxed);
    PINNED.fetch_add(user.len_less_one().saturating_add(1), Ordering::Relaxed);
    log::warn!(
        "{user}, which was mapped at {iovas}, stays pinned and charged for ever: hardware was not \
         seen to forget it; reset the device and its IOMMU before the memory is reused"
    );
}
