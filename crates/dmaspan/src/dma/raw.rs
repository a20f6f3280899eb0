//! Mappings that a driver keeps as an address and a length.
//!
//! The device keeps the mapping itself, and finds it by the address. At the end it checks direction
//! and length as Linux's dma-debug does (kernel/dma/debug.c), and refuses what dma-debug only
//! reports.

use super::bounce::BouncePool;
use super::device::Device;
use super::domain::Translation;
use super::error::Error;
use super::reach::Reach as _;
use super::single::{Mapping, UnmapFailed, Unmapped, check_written};
use super::sync::bytes;
use crate::addr::DmaAddr;
use crate::iommu::{Event, SyncFor};
use crate::label::Caller;
use crate::prot::Direction;
use crate::swiotlb::Fill;

/// The properties of a mapping that a driver names besides its address.
#[derive(Clone, Copy)]
enum Bytes {
    /// All: so many.
    All(u64),
    /// So many at an offset: `(offset, len)`.
    Part(u64, u64),
}

/// Whether a mapping is the one that a driver means.
fn check<T: Translation, B: BouncePool>(
    bytes: Bytes,
    direction: Direction,
) -> impl Fn(&Mapping<T, B>) -> Result<(), Error> {
    move |mapping| {
        let (addr, mapped) = (mapping.addr, mapping.len);
        match bytes {
            Bytes::All(len) if len != mapped => Err(Error::OtherLength { addr, len, mapped }),
            _ if direction != mapping.direction => {
                Err(Error::OtherDirection { addr, direction, mapped: mapping.direction })
            }
            Bytes::Part(offset, len) if offset.checked_add(len).is_none_or(|end| end > mapped) => {
                Err(Error::OutsideMapping { offset, len, mapped })
            }
            _ => Ok(()),
        }
    }
}

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// Keeps a mapping for a driver that itself keeps only its address and its length in bytes.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use dmaspan::dma::{Device, DeviceConfig, Direct, Error, NoPool, Piece, RawMemory};
    /// use dmaspan::platform::OneThread;
    /// use dmaspan::{Direction, PhysAddr, Span};
    ///
    /// fn main() -> Result<(), Error> {
    ///     let ram = Span::new(PhysAddr::new(0), 1 << 30).unwrap();
    ///     let direct = Arc::new(Direct::<RawMemory, _>::new(ram, OneThread));
    ///     let device = Device::new(direct, NoPool, DeviceConfig::bits(32))?;
    ///     let piece = Piece::memory(Span::new(PhysAddr::new(0x1000), 0x100).unwrap());
    ///     // SAFETY: nobody touches the memory.
    ///     let memory = unsafe { RawMemory::new(piece) };
    ///     let mapping = device.map_single(memory, Direction::ToDevice)?;
    ///     let (addr, len) = device.into_raw(mapping)?;
    ///     let refused = device.unmap_raw(addr, len / 2, Direction::ToDevice);
    ///     assert!(matches!(refused, Err(Error::OtherLength { mapped: 0x100, .. })));
    ///     let _unmapped = device.unmap_raw(addr, len, Direction::ToDevice)?;
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a mapping of another device and [`Error::NoRecord`] where there is
    /// no memory; the mapping is given back.
    ///
    /// # Context
    ///
    /// Takes a lock, and may allocate.
    pub fn into_raw(&self, mapping: Mapping<T, B>) -> Result<(DmaAddr, u64), UnmapFailed<T, B>> {
        let (addr, len) = (mapping.addr, mapping.len);
        if mapping.device != self.id() {
            let error = Error::Foreign { addr };
            return Err(UnmapFailed { error, mapping: Some(mapping) });
        }
        match self.reach.insert(addr.get(), mapping) {
            Ok(()) => Ok((addr, len)),
            Err(mapping) => {
                let error = Error::NoRecord { addr, len };
                Err(UnmapFailed { error, mapping: Some(mapping) })
            }
        }
    }

    /// The mapping that [`into_raw`](Self::into_raw) gave an address for.
    ///
    /// # Errors
    ///
    /// With nothing changed: [`Error::NotMapped`] for an address that was never mapped, was
    /// unmapped already, or belongs to another device; [`Error::OtherLength`] and
    /// [`Error::OtherDirection`] where it was mapped otherwise.
    ///
    /// # Context
    ///
    /// Takes a lock; allocates nothing.
    #[track_caller]
    pub fn from_raw(
        &self,
        addr: DmaAddr,
        len: u64,
        direction: Direction,
    ) -> Result<Mapping<T, B>, Error> {
        self.take_raw(addr, len, check(Bytes::All(len), direction))
    }

    /// The mapping at an address that `check` agrees to.
    #[track_caller]
    fn take_raw(
        &self,
        addr: DmaAddr,
        len: u64,
        check: impl Fn(&Mapping<T, B>) -> Result<(), Error>,
    ) -> Result<Mapping<T, B>, Error> {
        let by = self.caller();
        let removed = self.reach.remove_if(addr.get(), check);
        removed.unwrap_or(Err(Error::NotMapped { addr })).inspect_err(|_| {
            if let Some(range) = bytes(addr, 0, len) {
                self.translation.observe(&Event::RefusedUnmap { range, by });
            }
        })
    }

    /// Ends a mapping by what a driver kept of it.
    ///
    /// # Errors
    ///
    /// As of [`from_raw`](Self::from_raw), and [`Error::Unreported`], with nothing changed; and
    /// [`Error::Quarantined`] as [`unmap`](Self::unmap).
    ///
    /// # Context
    ///
    /// As [`from_raw`](Self::from_raw) and [`unmap`](Self::unmap): never fails for want of memory.
    #[track_caller]
    pub fn unmap_raw(
        &self,
        addr: DmaAddr,
        len: u64,
        direction: Direction,
    ) -> Result<Unmapped<T::Memory>, Error> {
        let is_it = check(Bytes::All(len), direction);
        let mapping = self.take_raw(addr, len, |mapping| match mapping.fill {
            Fill::Copy => is_it(mapping),
            Fill::Overwritten => is_it(mapping).and(Err(Error::Unreported { len })),
        })?;
        Ok(self.unmap(mapping)?)
    }

    /// Ends a mapping of which the device has written the first `written` bytes, as
    /// [`unmap_written`](Self::unmap_written) does.
    ///
    /// # Errors
    ///
    /// As of [`unmap_raw`](Self::unmap_raw), but for [`Error::Unreported`]; and
    /// [`Error::OutsideMapping`] and [`Error::OtherDirection`], with nothing changed, where so many
    /// cannot have been written.
    ///
    /// # Context
    ///
    /// As of [`unmap_raw`](Self::unmap_raw).
    #[track_caller]
    pub fn unmap_raw_written(
        &self,
        addr: DmaAddr,
        len: u64,
        direction: Direction,
        written: u64,
    ) -> Result<Unmapped<T::Memory>, Error> {
        let is_it = check(Bytes::All(len), direction);
        let mapping = self.take_raw(addr, len, |mapping| {
            is_it(mapping).and_then(|()| check_written(addr, len, direction, written))
        })?;
        Ok(self.unmap_written(mapping, written)?)
    }

    /// Syncs the mapping that begins at `addr`, or says that there is none to sync so.
    fn sync_raw(
        &self,
        addr: DmaAddr,
        (offset, len): (u64, u64),
        (turn, direction): (SyncFor, Direction),
        by: Caller,
    ) -> Result<(), Error> {
        let check = check(Bytes::Part(offset, len), direction);
        let sync = |mapping: &Mapping<T, B>| self.sync_single(turn, mapping, (offset, len), by);
        // Under a lock, since a driver names the mapping by a number alone: another thread that
        // unmaps it meanwhile waits for the copy. A pool that copies and an observer call nothing
        // of the device.
        let synced = self.reach.look_if(addr.get(), check, sync);
        synced.unwrap_or(Err(Error::NotMapped { addr })).unwrap_or_else(|error| {
            let known = |mapping: &Mapping<T, B>| {
                self.observe_sync(mapping, (offset, len), (turn, direction), by);
            };
            let any = |_: &Mapping<T, B>| Ok(());
            if self.reach.look_if(addr.get(), any, known).is_none()
                && let Some(range) = bytes(addr, offset, len)
            {
                let event = Event::Sync { range, turn, direction, mapping: None, by };
                self.translation.observe(&event);
            }
            Err(error)
        })
    }

    /// As [`sync_for_cpu`](Self::sync_for_cpu), of the mapping that begins at `addr`.
    ///
    /// # Errors
    ///
    /// [`Error::NotMapped`], [`Error::OtherDirection`] and [`Error::OutsideMapping`].
    ///
    /// # Context
    ///
    /// Holds a lock while it copies, so that the mapping cannot end meanwhile.
    #[track_caller]
    pub fn sync_raw_for_cpu(
        &self,
        addr: DmaAddr,
        offset: u64,
        len: u64,
        direction: Direction,
    ) -> Result<(), Error> {
        self.sync_raw(addr, (offset, len), (SyncFor::Cpu, direction), self.caller())
    }

    /// As [`sync_for_device`](Self::sync_for_device), of the mapping that begins at `addr`.
    ///
    /// # Errors
    ///
    /// As of [`sync_raw_for_cpu`](Self::sync_raw_for_cpu).
    ///
    /// # Context
    ///
    /// As of [`sync_raw_for_cpu`](Self::sync_raw_for_cpu).
    #[track_caller]
    pub fn sync_raw_for_device(
        &self,
        addr: DmaAddr,
        offset: u64,
        len: u64,
        direction: Direction,
    ) -> Result<(), Error> {
        self.sync_raw(addr, (offset, len), (SyncFor::Device, direction), self.caller())
    }
}
