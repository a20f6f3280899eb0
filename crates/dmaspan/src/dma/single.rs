//! One contiguous buffer.

use core::fmt;
use core::mem::ManuallyDrop;

use super::attrs::{Attrs, CpuSync, Privilege};
use super::bounce::{BouncePool, NoPool, SlotRequest, To};
use super::device::{Device, DeviceLimits, Trust};
use super::domain::{Flush, Translation, map_into};
use super::error::Error;
use super::memory::{DmaMemory, Piece, Via};
use crate::addr::{DmaAddr, Iova, PhysAddr};
use crate::iommu::iova::{self, Align, Iovas, Request};
use crate::lg2;
use crate::platform::Id;
use crate::prot::{Coherency, Direction, Prot};
use crate::range::IovaRange;
use crate::span::Span;

/// A buffer that a device may use. It owns the memory: [`Device::unmap`] gives it back.
///
/// Dropped, it leaks the memory and the IOVAs, and the device goes on using them.
#[must_use = "a mapping that is dropped is never unmapped, and its memory leaks"]
pub struct Mapping<T: Translation, B: BouncePool = NoPool> {
    pub(super) addr: DmaAddr,
    pub(super) len: u64,
    pub(super) direction: Direction,
    flush: Flush,
    sync: CpuSync,
    pub(super) device: Id,
    pub(super) slot: Option<B::Slot>,
    pub(super) iovas: Option<Iovas>,
    /// Taken by the unmap; leaked where there was none.
    pub(super) memory: Option<T::Memory>,
}

impl<T: Translation, B: BouncePool> Mapping<T, B> {
    /// What the device is given.
    #[inline(always)]
    pub fn addr(&self) -> DmaAddr {
        self.addr
    }

    /// How many bytes are mapped.
    #[inline(always)]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// No: a mapping has a byte at least.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Which way the data goes.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// When hardware is told about its unmap.
    pub fn flush(&self) -> Flush {
        self.flush
    }

    /// Whether a slot stands in for the memory.
    pub fn is_bounced(&self) -> bool {
        self.slot.is_some()
    }
}

impl<T: Translation, B: BouncePool> Drop for Mapping<T, B> {
    fn drop(&mut self) {
        // A device may still use them.
        core::mem::forget((self.slot.take(), self.memory.take()));
    }
}

/// What became of memory that was unmapped.
#[derive(Debug)]
#[must_use = "the memory is in it"]
pub enum Unmapped<H> {
    /// No device reaches it any more.
    Released(H),
    /// The flush queue owns it, and drops it when it has been synced.
    Queued,
}

/// A mapping that was refused.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct Refused<H> {
    /// Why.
    pub error: Error,
    /// What was to be mapped, which no device reaches. `None` where hardware was not seen to forget
    /// what had been mapped before the error: the memory is in quarantine.
    pub memory: Option<H>,
}

/// How a device comes to a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Through translations.
    Translated,
    /// By the piece's own address.
    Straight,
    /// By way of a slot, translated or not.
    Bounced,
}

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// Maps memory of one piece, as [`map_single_with`](Self::map_single_with) does by default.
    ///
    /// # Errors
    ///
    /// [`Refused`], with nothing changed.
    #[inline]
    pub fn map_single(
        &self,
        memory: T::Memory,
        direction: Direction,
    ) -> Result<Mapping<T, B>, Refused<T::Memory>> {
        self.map_single_with(memory, direction, Attrs::default())
    }

    /// Maps memory of one piece: translated, by its own address, or bounced, as the device needs
    /// it. A slot is filled from the memory whatever the direction, so that what the device does
    /// not write is as it was.
    ///
    /// # Errors
    ///
    /// [`Refused`], with nothing changed: [`Error::NotSingle`]; [`Error::Unreachable`],
    /// [`Error::NoSlot`] and [`Error::NotMemory`] where the device cannot have the memory itself
    /// and it cannot be bounced; [`Error::Iova`] and [`Error::Domain`] where there are no IOVAs or
    /// tables; [`Error::Quarantined`] with the memory, and the slot for ever, gone.
    ///
    /// # Context
    ///
    /// Takes no lock and allocates nothing itself; the pool, the IOVAs and the tables may.
    #[inline]
    pub fn map_single_with(
        &self,
        memory: T::Memory,
        direction: Direction,
        attrs: Attrs,
    ) -> Result<Mapping<T, B>, Refused<T::Memory>> {
        let &[piece] = memory.pieces() else {
            let pieces = memory.pieces().len();
            return refuse(Error::NotSingle { pieces }, memory);
        };
        let slot = match self.way(piece) {
            Ok(Way::Translated) => None,
            Ok(Way::Straight) => return Ok(self.straight(piece, None, memory, direction, attrs)),
            Ok(Way::Bounced) => match self.bounce(piece.span) {
                Ok(slot) if self.is_direct() => {
                    return Ok(self.straight(piece, Some(slot), memory, direction, attrs));
                }
                Ok(slot) => Some(slot),
                Err(error) => return refuse(error, memory),
            },
            Err(error) => return refuse(error, memory),
        };
        let span = slot.as_ref().map_or(piece.span, |slot| self.pool.span(slot));
        let (whole, offset) = match self.granules(span) {
            Ok(granules) => granules,
            Err(error) => return refuse(error, memory),
        };
        if self.config.coherency == Coherency::NonCoherent {
            // A slot always, and its padding too: their content is what the device is to read.
            let (given, sync) = match &slot {
                Some(_) => (whole, CpuSync::Sync),
                None => (span, attrs.sync),
            };
            self.give_caches(Piece { span: given, via: piece.via }, sync);
        }
        let limit = Iova::new(self.config.limits.last);
        let request = Request { bytes: whole.len(), align: Align::Natural, limit };
        let iovas = match self.translation.alloc(request) {
            Ok(iovas) => iovas,
            Err(error) => return refuse(error, memory),
        };
        let prot = self.prot(piece.via, direction, attrs.privilege);
        let fill = |translation: &T, _: &T::Memory, _: &Option<B::Slot>, range: IovaRange| {
            translation.map(range.start(), &[whole], prot)
        };
        let (iovas, memory, slot) = map_into(&*self.translation, iovas, memory, slot, fill)?;
        Ok(Mapping {
            addr: DmaAddr::new(iovas.range().start().get() + offset),
            len: piece.span.len(),
            direction,
            flush: if slot.is_some() { Flush::Strict } else { self.flush(attrs.flush) },
            sync: attrs.sync,
            device: self.id(),
            slot,
            iovas: Some(iovas),
            memory: Some(memory),
        })
    }

    /// Ends a mapping. What was bounced is copied back when no device can change it any more.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a mapping of another device, which is given back by
    /// [`UnmapFailed`]; [`Error::Quarantined`] where hardware does not answer: the memory is held
    /// until a [flush](super::DmaDomain::flush) succeeds, and a slot for ever.
    ///
    /// # Context
    ///
    /// As [`map_single_with`](Self::map_single_with); and it never fails for want of memory.
    #[inline]
    pub fn unmap(
        &self,
        mut mapping: Mapping<T, B>,
    ) -> Result<Unmapped<T::Memory>, UnmapFailed<T, B>> {
        if mapping.device != self.id() {
            let error = Error::Foreign { addr: mapping.addr };
            return Err(UnmapFailed { error, mapping: Some(mapping) });
        }
        // Every mapping has it until here.
        let Some(memory) = mapping.memory.take() else { return Ok(Unmapped::Queued) };
        let Some(iovas) = mapping.iovas.take() else {
            self.finish(&mut mapping, &memory);
            return Ok(Unmapped::Released(memory));
        };
        // Where a hook panics, a device may still use it.
        let memory = ManuallyDrop::new(memory);
        if mapping.flush == Flush::Lazy {
            // The memory is the queue's after the unmap.
            self.finish(&mut mapping, &memory);
        }
        let memory = ManuallyDrop::into_inner(memory);
        match self.translation.unmap(iovas, memory, mapping.flush) {
            Ok(Unmapped::Released(memory)) => {
                if mapping.flush == Flush::Strict {
                    self.finish(&mut mapping, &memory);
                }
                Ok(Unmapped::Released(memory))
            }
            Ok(Unmapped::Queued) => Ok(Unmapped::Queued),
            Err(error) => Err(UnmapFailed { error, mapping: None }),
        }
    }

    /// Which way a device comes to a piece.
    #[inline(always)]
    pub(super) fn way(&self, piece: Piece) -> Result<Way, Error> {
        let Piece { span, via } = piece;
        let last = self.config.limits.last;
        if self.is_direct() || via == Via::Bus {
            return match via {
                _ if span.last().get() <= last => Ok(Way::Straight),
                Via::Memory => Ok(Way::Bounced),
                Via::HostBridge => Err(Error::NotMemory { span }),
                Via::Bus => Err(Error::PeerUnreachable { span, last }),
            };
        }
        if self.config.trust == Trust::Trusted {
            return Ok(Way::Translated);
        }
        let ends = span.paddr().get() | span.len();
        match via {
            _ if lg2::is_aligned(ends, self.translation.granule_lg2()) => Ok(Way::Translated),
            Via::Memory => Ok(Way::Bounced),
            Via::HostBridge | Via::Bus => Err(Error::NotMemory { span }),
        }
    }

    /// A slot for memory that the device must not or cannot have itself, filled.
    #[cold]
    pub(super) fn bounce(&self, span: Span) -> Result<B::Slot, Error> {
        self.bounce_keeping(span, self.config.limits.keep_bits)
    }

    /// As [`bounce`](Self::bounce), with more bits of the address kept than the device needs.
    #[cold]
    pub(super) fn bounce_keeping(&self, span: Span, keep_bits: u64) -> Result<B::Slot, Error> {
        let DeviceLimits { last, boundary, .. } = self.config.limits;
        let is_direct = self.is_direct();
        let request = SlotRequest {
            original: span,
            keep_bits,
            granule: lg2::size(self.translation.granule_lg2()),
            last: if is_direct { last } else { u64::MAX },
            boundary: boundary.filter(|_| is_direct),
        };
        if is_direct && self.pool.reach().is_none_or(|slots| slots.paddr().get() > last) {
            return Err(Error::Unreachable { span, last });
        }
        let slot = self.pool.take(request).ok_or(Error::NoSlot { span, len: span.len() })?;
        self.pool.copy(&slot, 0, span.len(), To::Slot);
        Ok(slot)
    }

    /// What is used by its own address or by that of its slot.
    #[cold]
    fn straight(
        &self,
        piece: Piece,
        slot: Option<B::Slot>,
        memory: T::Memory,
        direction: Direction,
        attrs: Attrs,
    ) -> Mapping<T, B> {
        let (span, sync) = match &slot {
            Some(slot) => (self.pool.span(slot), CpuSync::Sync),
            None => (piece.span, attrs.sync),
        };
        self.give_caches(Piece { span, via: piece.via }, sync);
        Mapping {
            addr: DmaAddr::new(span.paddr().get()),
            len: piece.span.len(),
            direction,
            flush: Flush::Strict,
            sync: attrs.sync,
            device: self.id(),
            slot,
            iovas: None,
            memory: Some(memory),
        }
    }

    /// Lets the CPU see what the device wrote, and gives the slot back, when no device uses the
    /// mapping any more.
    #[inline(always)]
    fn finish(&self, mapping: &mut Mapping<T, B>, memory: &T::Memory) {
        if self.config.coherency == Coherency::NonCoherent || mapping.slot.is_some() {
            self.finish_slowly(mapping, memory);
        }
    }

    #[cold]
    fn finish_slowly(&self, mapping: &mut Mapping<T, B>, memory: &T::Memory) {
        let slot = mapping.slot.take();
        if mapping.sync == CpuSync::Sync
            && let &[piece] = memory.pieces()
        {
            self.part_for_cpu(piece, slot.as_ref(), mapping.direction, 0, mapping.len);
        }
    }

    /// The granules around a span, and where it begins in them.
    #[inline(always)]
    pub(super) fn granules(&self, span: Span) -> Result<(Span, u64), Error> {
        let granule_lg2 = self.translation.granule_lg2();
        let offset = span.paddr().get() & lg2::mask(granule_lg2);
        let start = PhysAddr::new(span.paddr().get() - offset);
        let bytes = lg2::align_up(offset.saturating_add(span.len()), granule_lg2);
        let whole = Span::new(start, bytes.unwrap_or(u64::MAX)).map_err(iova::Error::from)?;
        Ok((whole, offset))
    }

    /// What the device is permitted.
    #[inline(always)]
    pub(super) fn prot(&self, via: Via, direction: Direction, privilege: Privilege) -> Prot {
        let mut prot = direction.prot(self.config.coherency);
        if via == Via::HostBridge {
            prot |= Prot::MMIO;
        }
        if privilege == Privilege::Privileged {
            prot |= Prot::PRIV;
        }
        prot
    }
}

#[cold]
fn refuse<M, H>(error: Error, memory: H) -> Result<M, Refused<H>> {
    Err(Refused { error, memory: Some(memory) })
}

/// An unmap that was refused or could not be synced.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct UnmapFailed<T: Translation, B: BouncePool = NoPool> {
    /// Why.
    pub error: Error,
    /// The mapping, where nothing was changed. `None` where it is in quarantine, memory and all,
    /// until a [flush](super::DmaDomain::flush) succeeds.
    pub mapping: Option<Mapping<T, B>>,
}

impl<T: Translation, B: BouncePool> fmt::Debug for Mapping<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("addr", &self.addr)
            .field("len", &self.len)
            .field("direction", &self.direction)
            .finish_non_exhaustive()
    }
}

// Of any memory: a boxed trait has no `Debug`, and whoever unwraps wants the error.
impl<H> fmt::Debug for Refused<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = if self.memory.is_some() { "given back" } else { "in quarantine" };
        f.debug_struct("Refused").field("error", &self.error).field("memory", &memory).finish()
    }
}

impl<T: Translation, B: BouncePool> fmt::Debug for UnmapFailed<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnmapFailed")
            .field("error", &self.error)
            .field("mapping", &self.mapping)
            .finish()
    }
}
