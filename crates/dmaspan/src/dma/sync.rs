//! Parts of a mapped buffer are handed to and fro here between CPU and device: caches are
//! maintained, and bounced bytes copied.
//!
//! Where caches are not coherent, this does as arm64 does (arch/arm64/mm/dma-mapping.c). It writes
//! caches back before the device gets the memory, also for a device that only writes, so that no
//! dirty line is evicted over what the device wrote. It invalidates them before the CPU reads what
//! the device wrote, since lines may have been fetched in the meantime.

use super::attrs::CpuSync;
use super::bounce::BouncePool;
use super::device::Device;
use super::domain::Translation;
use super::error::Error;
use super::memory::{DmaMemory, Piece, Via};
use super::single::Mapping;
use super::slots::Slots;
use crate::addr::{DmaAddr, Iova};
use crate::iommu::{Event, SyncFor};
use crate::label::Caller;
use crate::prot::{Coherency, Direction};
use crate::range::IovaRange;
use crate::swiotlb::To;

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// Lets the CPU see what the device has written to `len` bytes at `offset` of the buffer
    /// (`dma_sync_single_range_for_cpu`). Nothing, where the device only reads.
    ///
    /// Of a bounced buffer, these bytes are copied out of slots and no others. Of one that the
    /// device [overwrites](crate::swiotlb::Fill::Overwritten), that says that it has written them.
    ///
    /// # Errors
    ///
    /// With nothing done: [`Error::Foreign`] for a mapping of another device, and
    /// [`Error::OutsideMapping`] for no bytes and for such that are not mapped.
    ///
    /// # Context
    ///
    /// The device does not write the bytes until they are handed back to it.
    #[inline]
    #[track_caller]
    pub fn sync_for_cpu(
        &self,
        mapping: &Mapping<T, B>,
        offset: u64,
        len: u64,
    ) -> Result<(), Error> {
        self.sync_single(SyncFor::Cpu, mapping, (offset, len), self.caller())
    }

    /// Either, for this caller.
    #[inline(always)]
    pub(super) fn sync_single(
        &self,
        turn: SyncFor,
        mapping: &Mapping<T, B>,
        (offset, len): (u64, u64),
        by: Caller,
    ) -> Result<(), Error> {
        let direction = mapping.direction;
        self.observe_sync(mapping, (offset, len), (turn, direction), by);
        if let Some(piece) = self.synced_piece(mapping, offset, len)? {
            let slots = mapping.slots.as_ref();
            match turn {
                SyncFor::Cpu => self.part_for_cpu(piece, slots, direction, offset, len),
                SyncFor::Device => self.part_for_device(piece, slots, direction, offset, len),
            }
        }
        Ok(())
    }

    /// Lets the device see what the CPU has written to `len` bytes at `offset` of the buffer
    /// (`dma_sync_single_range_for_device`). Of a bounced buffer they are copied into slots,
    /// unless the device only writes.
    ///
    /// # Errors
    ///
    /// As of [`sync_for_cpu`](Self::sync_for_cpu).
    ///
    /// # Context
    ///
    /// The CPU does not write the bytes until they are handed back to it.
    #[inline]
    #[track_caller]
    pub fn sync_for_device(
        &self,
        mapping: &Mapping<T, B>,
        offset: u64,
        len: u64,
    ) -> Result<(), Error> {
        self.sync_single(SyncFor::Device, mapping, (offset, len), self.caller())
    }

    /// Says that `len` bytes at an offset are to be synced as `direction`, whether they can be or
    /// not.
    #[inline(always)]
    pub(super) fn observe_sync(
        &self,
        mapping: &Mapping<T, B>,
        (offset, len): (u64, u64),
        (turn, direction): (SyncFor, Direction),
        by: Caller,
    ) {
        let addr = mapping.addr;
        if mapping.iovas.is_some()
            && let Some(range) = bytes(addr, offset, len)
        {
            let mapping = bytes(addr, 0, mapping.len).map(|of| (of, mapping.direction));
            self.translation.observe(&Event::Sync { range, turn, direction, mapping, by });
        }
    }

    /// The memory of a mapping that is synced in part; `None` where that takes no work.
    #[inline(always)]
    fn synced_piece(
        &self,
        mapping: &Mapping<T, B>,
        offset: u64,
        len: u64,
    ) -> Result<Option<Piece>, Error> {
        if mapping.device != self.id() {
            return Err(Error::Foreign { addr: mapping.addr });
        }
        let mapped = mapping.len;
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > mapped) {
            return Err(Error::OutsideMapping { offset, len, mapped });
        }
        if self.config.coherency == Coherency::Coherent && mapping.slots.is_none() {
            return Ok(None);
        }
        Ok(mapping.memory.as_ref().and_then(|memory| memory.pieces().first()).copied())
    }

    /// Lets the CPU see a part of a piece, which is `len` bytes long at least from `offset` on.
    #[cold]
    pub(super) fn part_for_cpu(
        &self,
        piece: Piece,
        slots: Option<&Slots<B::Slot>>,
        direction: Direction,
        offset: u64,
        len: u64,
    ) {
        if direction == Direction::ToDevice {
            return;
        }
        for stretch in self.stretches(piece.span, slots, offset, len) {
            self.take_caches(Piece { span: stretch.span, ..piece });
            if let Some((slot, at)) = stretch.slot {
                self.pool.copy(slot, at, stretch.span.len(), To::Original);
            }
        }
    }

    /// Lets the device see a part of a piece; as [`part_for_cpu`](Self::part_for_cpu).
    #[cold]
    pub(super) fn part_for_device(
        &self,
        piece: Piece,
        slots: Option<&Slots<B::Slot>>,
        direction: Direction,
        offset: u64,
        len: u64,
    ) {
        for stretch in self.stretches(piece.span, slots, offset, len) {
            if let Some((slot, at)) = stretch.slot
                && direction != Direction::FromDevice
            {
                self.pool.copy(slot, at, stretch.span.len(), To::Slot);
            }
            self.give_caches(Piece { span: stretch.span, ..piece }, CpuSync::Sync);
        }
    }

    /// Writes caches back, for a device that does not see them, before it gets the memory.
    ///
    /// Not for registers, which are not cached; nor for a mapping that its driver syncs itself.
    #[inline(always)]
    pub(super) fn give_caches(&self, piece: Piece, sync: CpuSync) {
        let follows = self.config.coherency == Coherency::NonCoherent && sync == CpuSync::Sync;
        if follows && piece.via == Via::Memory {
            self.translation.write_back(piece.span);
        }
    }

    /// Makes caches forget what a device wrote that does not see them.
    fn take_caches(&self, piece: Piece) {
        if self.config.coherency == Coherency::NonCoherent && piece.via == Via::Memory {
            self.translation.invalidate(piece.span);
        }
    }
}

/// So many bytes at an offset, up to the top of the space; `None` for none.
#[inline(always)]
pub(super) fn bytes(addr: DmaAddr, offset: u64, len: u64) -> Option<IovaRange> {
    let start = addr.get().saturating_add(offset);
    let last = start.saturating_add(len.checked_sub(1)?);
    IovaRange::new(Iova::new(start), Iova::new(last))
}
