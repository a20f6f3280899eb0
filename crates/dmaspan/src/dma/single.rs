//! One contiguous buffer.

use core::fmt;

use super::bounce::{BouncePool, NoPool, SlotRequest, To};
use super::device::{Device, Trust};
use super::domain::{Flush, Translation, map_into};
use super::error::Error;
use super::memory::{DmaMemory, Piece, Via};
use crate::addr::{DmaAddr, Iova, PhysAddr};
use crate::iommu::iova::{self, Align, Iovas, Request};
use crate::lg2;
use crate::platform::Id;
use crate::prot::{Direction, Prot};
use crate::range::IovaRange;
use crate::span::Span;

/// A buffer that a device may use. It owns the memory: [`Device::unmap`] gives it back.
///
/// Dropped, it leaks the memory and the IOVAs, and the device goes on using them.
#[must_use = "a mapping that is dropped is never unmapped, and its memory leaks"]
pub struct Mapping<T: Translation, B: BouncePool = NoPool> {
    addr: DmaAddr,
    len: u64,
    direction: Direction,
    flush: Flush,
    device: Id,
    slot: Option<B::Slot>,
    iovas: Option<Iovas>,
    /// Taken by the unmap; leaked where there was none.
    memory: Option<T::Memory>,
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
#[derive(Debug)]
pub struct Refused<H> {
    /// Why.
    pub error: Error,
    /// What was to be mapped, which no device reaches. `None` where hardware was not seen to forget
    /// what had been mapped before the error: the memory is in quarantine.
    pub memory: Option<H>,
}

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// Maps memory of one piece.
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
        let refuse = |error, memory| Err(Refused { error, memory: Some(memory) });
        let &[piece] = memory.pieces() else {
            let pieces = memory.pieces().len();
            return refuse(Error::NotSingle { pieces }, memory);
        };
        let mapping = |addr, iovas, slot, memory| Mapping {
            addr,
            len: piece.span.len(),
            direction,
            flush: self.flush(),
            device: self.id(),
            slot,
            iovas,
            memory: Some(memory),
        };
        if piece.via == Via::Bus {
            let addr = DmaAddr::new(piece.span.paddr().get());
            return Ok(mapping(addr, None, None, memory));
        }
        let slot = match self.bounce(piece, direction) {
            Ok(slot) => slot,
            Err(error) => return refuse(error, memory),
        };
        let span = slot.as_ref().map_or(piece.span, |slot| self.pool.span(slot));
        let (whole, offset) = match self.granules(span) {
            Ok(granules) => granules,
            Err(error) => return refuse(error, memory),
        };
        let limit = Iova::new(self.config.limits.last);
        let request = Request { bytes: whole.len(), align: Align::Natural, limit };
        let iovas = match self.translation.alloc(request) {
            Ok(iovas) => iovas,
            Err(error) => return refuse(error, memory),
        };
        let prot = self.prot(piece.via, direction);
        let fill = |translation: &T, _: &T::Memory, range: IovaRange| {
            translation.map(range.start(), &[whole], prot)
        };
        match map_into(&*self.translation, iovas, memory, fill) {
            Ok((iovas, memory)) => {
                let addr = DmaAddr::new(iovas.range().start().get() + offset);
                Ok(mapping(addr, Some(iovas), slot, memory))
            }
            Err(refused) => {
                if refused.memory.is_none() {
                    core::mem::forget(slot);
                }
                Err(refused)
            }
        }
    }

    /// Ends a mapping.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a mapping of another device, which is given back by
    /// [`UnmapFailed`]; [`Error::Quarantined`] where hardware does not answer.
    #[inline]
    pub fn unmap(
        &self,
        mut mapping: Mapping<T, B>,
    ) -> Result<Unmapped<T::Memory>, UnmapFailed<T, B>> {
        if mapping.device != self.id() {
            let error = Error::Foreign { addr: mapping.addr };
            return Err(UnmapFailed { error, mapping: Some(mapping) });
        }
        let Some(memory) = mapping.memory.take() else { return Ok(Unmapped::Queued) };
        let Some(iovas) = mapping.iovas.take() else { return Ok(Unmapped::Released(memory)) };
        match self.translation.unmap(iovas, memory, mapping.flush) {
            Ok(Unmapped::Released(memory)) => {
                if let Some(slot) = mapping.slot.take() {
                    if mapping.direction != Direction::ToDevice {
                        self.pool.copy(&slot, 0, mapping.len, To::Original);
                    }
                    drop(slot);
                }
                Ok(Unmapped::Released(memory))
            }
            Ok(Unmapped::Queued) => Ok(Unmapped::Queued),
            Err(error) => Err(UnmapFailed { error, mapping: None }),
        }
    }

    /// A slot for a piece that the device must not have itself, filled.
    #[inline(always)]
    pub(super) fn bounce(
        &self,
        piece: Piece,
        direction: Direction,
    ) -> Result<Option<B::Slot>, Error> {
        let Piece { span, via } = piece;
        let granule_lg2 = self.translation.granule_lg2();
        let uneven = !lg2::is_aligned(span.paddr().get() | span.len(), granule_lg2);
        if !uneven || self.config.trust == Trust::Trusted || via != Via::Memory {
            return Ok(None);
        }
        let request = SlotRequest {
            original: span,
            keep_bits: self.config.limits.keep_bits,
            granule: lg2::size(granule_lg2),
            last: u64::MAX,
            boundary: None,
        };
        let slot = self.pool.take(request).ok_or(Error::NoSlot { span, len: span.len() })?;
        if direction != Direction::FromDevice {
            self.pool.copy(&slot, 0, span.len(), To::Slot);
        }
        Ok(Some(slot))
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
    pub(super) fn prot(&self, via: Via, direction: Direction) -> Prot {
        let prot = direction.prot(self.config.coherency);
        if via == Via::HostBridge { prot | Prot::MMIO } else { prot }
    }
}

/// An unmap that was refused or could not be synced.
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

impl<T: Translation, B: BouncePool> fmt::Debug for UnmapFailed<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnmapFailed")
            .field("error", &self.error)
            .field("mapping", &self.mapping)
            .finish()
    }
}
