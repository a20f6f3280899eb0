//! The mapping of a list ends here, and is handed to and fro between CPU and device.

use core::mem::ManuallyDrop;
use core::{fmt, mem};

use super::ListMapping;
use crate::dma::any::AnyTranslation;
use crate::dma::attrs::CpuSync;
use crate::dma::bounce::BouncePool;
use crate::dma::device::Device;
use crate::dma::domain::translation::Sealed;
use crate::dma::domain::{Flush, Translation};
use crate::dma::error::Error;
use crate::dma::memory::{DmaMemory, Piece};
use crate::dma::single::{Unmapped, check_written};
use crate::dma::slots::Slots;
use crate::iommu::Event;
use crate::promise::Promise;
use crate::prot::Direction;
use crate::swiotlb::Fill;

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// Ends the mapping of a list. What was bounced is copied back when no device can change it any
    /// more.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a mapping of another device, and [`Error::Unreported`] for one that
    /// the device overwrites, which [`unmap_list_written`](Self::unmap_list_written) ends: both are
    /// given back by [`UnmapListFailed`]. [`Error::Quarantined`] where hardware does not answer:
    /// the memory is held until a [flush](crate::dma::DmaDomain::flush) succeeds, and slots for
    /// ever.
    ///
    /// # Context
    ///
    /// As [`unmap`](Self::unmap).
    #[track_caller]
    pub fn unmap_list(
        &self,
        mapping: ListMapping<T, B>,
    ) -> Result<Unmapped<T::Memory>, UnmapListFailed<T, B>> {
        let len = mapping.len;
        let refused = match (self.check_list(&mapping), mapping.fill) {
            (Ok(()), Fill::Copy) => return self.end_list(mapping, len),
            (Ok(()), Fill::Overwritten) => Error::Unreported { len },
            (Err(error), _) => error,
        };
        Err(UnmapListFailed { error: refused, mapping: Some(mapping) })
    }

    /// Ends the mapping of a list of which the device has written the first `written` bytes, as
    /// [`unmap_written`](Self::unmap_written) does.
    ///
    /// # Errors
    ///
    /// As of [`unmap_list`](Self::unmap_list), but for [`Error::Unreported`]; with the mapping
    /// given back also [`Error::OutsideMapping`] and [`Error::OtherDirection`] where so many cannot
    /// have been written.
    ///
    /// # Context
    ///
    /// As [`unmap`](Self::unmap).
    #[track_caller]
    pub fn unmap_list_written(
        &self,
        mapping: ListMapping<T, B>,
        written: u64,
    ) -> Result<Unmapped<T::Memory>, UnmapListFailed<T, B>> {
        let (addr, len, direction) = (mapping.first(), mapping.len, mapping.direction);
        let checked = self.check_list(&mapping);
        match checked.and_then(|()| check_written(addr, len, direction, written)) {
            Ok(()) => self.end_list(mapping, written),
            Err(error) => Err(UnmapListFailed { error, mapping: Some(mapping) }),
        }
    }

    /// Ends a mapping of this device, of which so many bytes are to be seen by the CPU.
    #[inline(always)]
    #[track_caller]
    fn end_list(
        &self,
        mapping: ListMapping<T, B>,
        written: u64,
    ) -> Result<Unmapped<T::Memory>, UnmapListFailed<T, B>> {
        // Nothing is left in it at the end, and where a hook panics it leaks.
        let mut mapping = ManuallyDrop::new(mapping);
        // Every mapping has it until here.
        let Some(memory) = mapping.memory.take() else { return Ok(Unmapped::Queued) };
        let Some(iovas) = mapping.iovas.take() else {
            self.finish_list(&mut mapping, memory.pieces(), written);
            return Ok(Unmapped::Released(memory));
        };
        // Where an observer or a hook panics, a device may still use it.
        let memory = ManuallyDrop::new(memory);
        self.translation.observe(&Event::Unmapping { range: iovas.range(), by: self.caller() });
        if mapping.flush == Flush::Lazy {
            // The memory is the queue's after the unmap.
            self.finish_list(&mut mapping, memory.pieces(), written);
        }
        let memory = ManuallyDrop::into_inner(memory);
        match self.translation.unmap(Promise::kept(), iovas, memory, mapping.flush) {
            Ok(Unmapped::Released(memory)) => {
                if mapping.flush == Flush::Strict {
                    self.finish_list(&mut mapping, memory.pieces(), written);
                }
                Ok(Unmapped::Released(memory))
            }
            Ok(Unmapped::Queued) => Ok(Unmapped::Queued),
            Err(error) => {
                mem::take(&mut mapping.slots).into_iter().for_each(|of| self.quarantine(of));
                Err(UnmapListFailed { error, mapping: None })
            }
        }
    }

    /// Lets the CPU see what the device has written to a list (`dma_sync_sg_for_cpu`). Nothing,
    /// where the device only reads.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a mapping of another device, with nothing done.
    ///
    /// # Context
    ///
    /// The device does not write the list until it is handed back to it.
    pub fn sync_list_for_cpu(&self, mapping: &ListMapping<T, B>) -> Result<(), Error> {
        self.check_list(mapping)?;
        self.list_for_cpu(mapping.pieces(), &mapping.slots, mapping.direction, mapping.len);
        Ok(())
    }

    /// Lets the device see what the CPU has written to a list (`dma_sync_sg_for_device`).
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a mapping of another device, with nothing done.
    ///
    /// # Context
    ///
    /// The CPU does not write the list until it is handed back to it.
    pub fn sync_list_for_device(&self, mapping: &ListMapping<T, B>) -> Result<(), Error> {
        self.check_list(mapping)?;
        if self.cares(&mapping.slots) {
            for (piece, slots) in self.with_slots(mapping.pieces(), &mapping.slots) {
                self.part_for_device(piece, slots, mapping.direction, 0, piece.span.len());
            }
        }
        Ok(())
    }

    /// Lets the CPU see what the device wrote, and gives slots back, when no device uses the list
    /// any more.
    #[inline(always)]
    fn finish_list(&self, mapping: &mut ListMapping<T, B>, pieces: &[Piece], written: u64) {
        if self.cares(&mapping.slots) {
            if mapping.sync == CpuSync::Sync {
                self.list_for_cpu(pieces, &mapping.slots, mapping.direction, written);
            }
            mem::take(&mut mapping.slots).into_iter().for_each(|of| self.release(of));
        }
    }

    /// The first `len` bytes of a list.
    fn list_for_cpu(
        &self,
        pieces: &[Piece],
        slots: &[Slots<B::Slot>],
        direction: Direction,
        len: u64,
    ) {
        if self.cares(slots) {
            let mut left = len;
            for (piece, slots) in self.with_slots(pieces, slots) {
                let len = left.min(piece.span.len());
                self.part_for_cpu(piece, slots, direction, 0, len);
                left -= len;
            }
        }
    }
}

/// An unmap of a list that was refused or could not be synced.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct UnmapListFailed<T: Translation = AnyTranslation, B: BouncePool = <T as Sealed>::Pool> {
    /// The reason.
    pub error: Error,
    /// The mapping, where nothing was changed. `None` where it is in quarantine, memory and all,
    /// until a [flush](crate::dma::DmaDomain::flush) succeeds.
    pub mapping: Option<ListMapping<T, B>>,
}

impl<T: Translation, B: BouncePool> From<UnmapListFailed<T, B>> for Error {
    /// The reason alone. A mapping that was given back is dropped, and so it leaks: the device goes
    /// on using its memory, which is never freed.
    #[cold]
    fn from(failed: UnmapListFailed<T, B>) -> Self {
        failed.error
    }
}

impl<T: Translation, B: BouncePool> fmt::Debug for UnmapListFailed<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnmapListFailed")
            .field("error", &self.error)
            .field("mapping", &self.mapping)
            .finish()
    }
}
