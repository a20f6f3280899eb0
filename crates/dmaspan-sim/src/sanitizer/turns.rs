//! A bounce pool that shows what a driver did not sync.

use std::collections::BTreeMap;
use std::sync::Arc;

use dmaspan::dma::{BouncePool, CoherentFrames, CoherentRequest, NoCoherent};
use dmaspan::swiotlb::{Original, SlotRequest, To};
use dmaspan::{PhysAddr, Prot, Span};
use parking_lot::Mutex;

use super::Sanitizer;
use crate::bounce::POISON;
use crate::memory::SimMemory;
use crate::walker::Access;

/// A bounce pool that poisons buffers whose turn it is not, so that a missing sync shows: for a
/// device that [bounces all](dmaspan::dma::Bounce::Always), behind a domain whose hooks are
/// [`Sanitized`](super::Sanitized).
///
/// - A buffer that the device may write is the device's from the map to a sync for the CPU or the
///   unmap, and again once the device writes it or the CPU syncs it for the device. Meanwhile the
///   CPU finds [`POISON`] in it. What the device wrote and nobody synced, an unmap without a sync
///   included, stays so.
/// - Where the CPU wrote to a buffer and did not sync it for the device, a device that reads it
///   gets poison, and there is a [finding](super::FindingKind::MissingSync).
///
/// It follows each byte, so that a part of a buffer can be synced. A buffer that was only read by
/// the CPU needs no sync for the device.
///
/// ```
/// use std::error::Error;
/// use std::sync::Arc;
///
/// use dmaspan::dma::{Bounce, Device, DeviceConfig, DmaConfig, DmaDomain, Piece, RawMemory};
/// use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
/// use dmaspan::iommu::Domain;
/// use dmaspan::platform::OneThread;
/// use dmaspan::{Direction, Iova, PhysAddr, Span};
/// use dmaspan_sim::bounce::{POISON, SimPool};
/// use dmaspan_sim::device::SimDevice;
/// use dmaspan_sim::iotlb::Iotlb;
/// use dmaspan_sim::memory::SimMemory;
/// use dmaspan_sim::sanitizer::{Hardware, PoisonedPool, Sanitizer};
/// use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
///
/// fn main() -> Result<(), Box<dyn Error>> {
///     let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
///     let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
///     let table = PageTable::new(format, tables.clone())?;
///     let registers = table.format().registers(table.root());
///     let iommu = Iotlb::new(ArmLpaeS1Walker::new(registers.into())?, tables);
///     let sanitizer = Sanitizer::default();
///     let domain = Domain::new(table, iommu.clone().sanitized(&sanitizer))?;
///     let domain = Arc::new(DmaDomain::new(domain, DmaConfig::new(1), OneThread)?);
///
///     let ram = Arc::new(SimMemory::new(PhysAddr::new(1 << 32), 1 << 20, 12)?);
///     let slots = SimPool::new(Arc::clone(&ram), Span::new(PhysAddr::new(1 << 32), 0x8000)?)?;
///     let pool = PoisonedPool::new(slots, Arc::clone(&ram), &sanitizer);
///     let config = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(48) };
///     let driver = Device::new(domain, pool, config)?;
///     let card = SimDevice::new(iommu, Arc::clone(&ram)).sanitized(&sanitizer);
///
///     let buffer = ram.allocate(0x1000, 12)?;
///     ram.pin_frames(&[buffer]);
///     // SAFETY: the frames stay, and nobody else uses them.
///     let memory = unsafe { RawMemory::new(Piece::memory(buffer)) };
///     let mapping = driver.map_single(memory, Direction::Bidirectional)?;
///     let iova = Iova::new(mapping.addr().get());
///
///     // The driver looks at what the card wrote, and forgets the sync before.
///     card.write(iova, b"data")?;
///     let mut seen = [0; 4];
///     ram.cpu_read(buffer.paddr(), &mut seen)?;
///     assert_eq!(seen, [POISON; 4]);
///     driver.sync_for_cpu(&mapping, 0, 4)?;
///     ram.cpu_read(buffer.paddr(), &mut seen)?;
///     assert_eq!(&seen, b"data");
///
///     // It answers, and forgets the sync behind.
///     ram.cpu_write(buffer.paddr(), b"sums")?;
///     card.read(iova, &mut seen)?;
///     assert_eq!(seen, [POISON; 4]);
///     let report = sanitizer.errors()[0].to_string();
///     assert!(report.starts_with("ERROR: missing sync for the device"));
///     let _unmapped = driver.unmap(mapping)?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct PoisonedPool<B> {
    inner: B,
    turns: Arc<Turns>,
}

impl<B: BouncePool> PoisonedPool<B> {
    /// `inner`, whose slots and originals are in `memory`, of a device behind the domain that
    /// `sanitizer` looks after. An `inner` that [lends coherent memory](BouncePool::coherent) does
    /// so here.
    pub fn new(inner: B, memory: Arc<SimMemory>, sanitizer: &Sanitizer) -> Self {
        let turns = Arc::new(Turns { memory, slots: Mutex::default() });
        sanitizer.shared.state.lock().turns.push(Arc::clone(&turns));
        Self { inner, turns }
    }
}

#[expect(unsafe_code, reason = "all slots are the inner pool's")]
// SAFETY: the inner pool gives the slots and copies; what is poisoned beside that is the bytes of
// slots that are held and of their originals, in simulated memory.
unsafe impl<B: BouncePool> BouncePool for PoisonedPool<B> {
    type Slot = B::Slot;

    fn take(&self, original: Original, request: &SlotRequest) -> Option<B::Slot> {
        let of = original.span();
        let slot = self.inner.take(original, request)?;
        let span = self.inner.span(&slot);
        let bytes = vec![Byte::default(); usize::try_from(of.len()).unwrap_or(0)];
        let held = Held { original: of.paddr(), bytes, prot: Prot::empty() };
        self.turns.slots.lock().insert(span.paddr(), held);
        Some(slot)
    }

    fn release(&self, slot: B::Slot) {
        self.turns.slots.lock().remove(&self.inner.span(&slot).paddr());
        self.inner.release(slot);
    }

    fn quarantine(&self, slot: B::Slot) {
        self.turns.slots.lock().remove(&self.inner.span(&slot).paddr());
        self.inner.quarantine(slot);
    }

    fn copy(&self, slot: &B::Slot, offset: u64, len: u64, to: To) {
        let at = self.inner.span(slot).paddr().wrapping_add(offset);
        let Ok(span) = Span::new(at, len) else { return };
        if to == To::Slot {
            self.turns.each(span, |byte, _, memory, _| byte.restore(memory));
        }
        self.inner.copy(slot, offset, len, to);
        self.turns.each(span, |byte, prot, memory, _| match to {
            To::Slot => byte.give(*prot, memory),
            To::Original => *byte = Byte { left: memory.original, poisoned: None },
        });
    }

    forward! { inner:
        fn span(&self, slot: &B::Slot) -> Span;
        fn reach(&self) -> Option<Span>;
        fn owns(&self, span: Span) -> bool;
        fn max_len(&self, request: &SlotRequest) -> u64;
        fn coherent(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent>;
        fn granules(&self, granule: u64) -> u64;
    }
}

/// Whose turn it is with each byte of the slots that are held.
#[derive(Debug)]
pub(super) struct Turns {
    memory: Arc<SimMemory>,
    /// By their first addresses.
    slots: Mutex<BTreeMap<PhysAddr, Held>>,
}

#[derive(Debug)]
struct Held {
    original: PhysAddr,
    bytes: Vec<Byte>,
    /// What the device may do with it; nothing before the map and after the unmap.
    prot: Prot,
}

#[derive(Clone, Copy, Debug, Default)]
struct Byte {
    /// What the original has for as long as the CPU does not write it.
    left: u8,
    /// What there was when it became the device's, where the original is poisoned since then.
    poisoned: Option<InMemory>,
}

/// A byte in both places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct InMemory {
    original: u8,
    slot: u8,
}

impl Byte {
    /// It is the device's turn.
    fn give(&mut self, prot: Prot, memory: &mut InMemory) {
        if prot.contains(Prot::WRITE) {
            self.poisoned = Some(*memory);
            memory.original = POISON;
        }
        self.left = memory.original;
    }

    /// The original has again what it had, unless the CPU has written it.
    fn restore(&mut self, memory: &mut InMemory) {
        if let Some(given) = self.poisoned.take()
            && memory.original == POISON
        {
            memory.original = given.original;
            self.left = given.original;
        }
    }
}

impl Turns {
    /// Changes all bytes of slots that are in `span`, with what the device may do, what the memory
    /// has of them, and where they are.
    fn each(
        &self,
        span: Span,
        mut change: impl FnMut(&mut Byte, &mut Prot, &mut InMemory, PhysAddr),
    ) {
        let mut slots = self.slots.lock();
        for (start, held) in slots.range_mut(..=span.last()) {
            let Held { original, bytes, prot } = held;
            let from = span.paddr().get().saturating_sub(start.get());
            let behind = span.last().get().wrapping_sub(start.get()).saturating_add(1);
            let [first, behind] = [from, behind].map(|n| usize::try_from(n).unwrap_or(usize::MAX));
            let behind = behind.min(bytes.len());
            let Some(bytes) = bytes.get_mut(first..behind) else { continue };
            let places = [*start, *original].map(|place| place.wrapping_add(from));
            let mut memory = places.map(|place| {
                let mut memory = vec![0; bytes.len()];
                self.memory.get_bytes(place, &mut memory);
                memory
            });
            let before = memory.clone();
            for ((n, byte), at) in bytes.iter_mut().enumerate().zip(0..) {
                let mut here = InMemory { slot: memory[0][n], original: memory[1][n] };
                change(byte, prot, &mut here, places[0].wrapping_add(at));
                [memory[0][n], memory[1][n]] = [here.slot, here.original];
            }
            // Nothing else: the rest of a buffer may be written meanwhile.
            for (n, place) in places.into_iter().enumerate() {
                if memory[n] != before[n] {
                    self.memory.put_bytes(place, &memory[n]);
                }
            }
        }
    }

    /// A device may use what is mapped.
    pub(super) fn mapped(&self, span: Span, permitted: Prot) {
        self.each(span, |byte, prot, memory, _| {
            *prot = permitted;
            byte.give(permitted, memory);
        });
    }

    /// No device may use it any more. What it did not write is as it was.
    pub(super) fn unmapped(&self, span: Span) {
        self.each(span, |byte, prot, memory, _| {
            *prot = Prot::empty();
            if byte.poisoned.is_some_and(|given| given.slot == memory.slot) {
                byte.restore(memory);
            }
        });
    }

    /// A device is about to use slots. What it writes is the CPU's no more. What it reads is poison
    /// where the CPU wrote the buffer and did not sync it. Gives where the first and the last of
    /// such bytes are.
    pub(super) fn used(&self, span: Span, access: Access) -> Option<(PhysAddr, PhysAddr)> {
        let mut unsynced = None;
        self.each(span, |byte, prot, memory, at| match access {
            Access::Write if byte.poisoned.is_none() => byte.give(*prot, memory),
            Access::Read if !prot.is_empty() && memory.original != byte.left => {
                // Found once.
                byte.left = memory.original;
                memory.slot = POISON;
                unsynced = Some((unsynced.map_or(at, |(first, _)| first), at));
            }
            _ => {}
        });
        unsynced
    }
}
