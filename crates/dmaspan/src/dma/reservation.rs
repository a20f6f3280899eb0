//! Mapping in two steps: IOVAs first, and then piece by piece what they lead to.
//!
//! A driver that has many pieces, and learns of them one after the other, pays once for the IOVAs
//! and once for telling hardware (Linux: `dma_iova_try_alloc`, `dma_iova_link`, `dma_iova_sync`,
//! `dma_iova_unlink`, `dma_iova_destroy` in drivers/iommu/dma-iommu.c).

mod announce;

use alloc::vec::Vec;
use core::mem::ManuallyDrop;
use core::ops::Range;
use core::{fmt, mem};

use super::any::AnyTranslation;
use super::attrs::CpuSync;
use super::bounce::BouncePool;
use super::device::Device;
use super::domain::translation::Sealed;
use super::domain::{Flush, Translation};
use super::error::Error;
use super::links::{Link, Links, whole};
use super::memory::{DmaMemory, Piece, Via};
use super::single::Refused;
use super::slots::Slots;
use super::way::Way;
use crate::addr::{DmaAddr, Iova};
use crate::io_pgtable;
use crate::iommu::iova::{self, Align, Iovas, Request};
use crate::iommu::{self, Event};
use crate::leak::{self, Held};
use crate::lg2;
use crate::log;
use crate::platform::Id;
use crate::promise::Promise;
use crate::prot::{Coherency, Direction};
use crate::range::IovaRange;
use crate::swiotlb::Fill;

/// A range of addresses for a device, into which memory is linked. It owns that memory.
///
/// ```
/// use std::error::Error;
/// use std::sync::Arc;
///
/// use dmaspan::dma::{
///     Device, DeviceConfig, DmaConfig, DmaDomain, NoPool, Piece, RawMemory, ReserveRequest,
/// };
/// use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
/// use dmaspan::iommu::{Domain, SoftIommu};
/// use dmaspan::platform::OneThread;
/// use dmaspan::{Direction, PhysAddr, Span};
///
/// fn main() -> Result<(), Box<dyn Error>> {
///     let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
///     let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
///     let table = PageTable::new(format, tables)?;
///     let iommu = SoftIommu::over(&table);
///     let domain = DmaDomain::new(Domain::new(table, iommu)?, DmaConfig::new(1), OneThread)?;
///     let device = Device::new(Arc::new(domain), NoPool, DeviceConfig::bits(40))?;
///
///     let (pieces, direction) = (2, Direction::FromDevice);
///     let request = ReserveRequest { len: 0x3000, offset: 0, pieces, direction };
///     let mut reservation = device.reserve(request)?;
///     for (offset, paddr, len) in [(0, 0x8000_0000, 0x1000), (0x1000, 0x9000_0000, 0x2000)] {
///         let piece = Piece::memory(Span::new(PhysAddr::new(paddr), len)?);
///         // SAFETY: the memory is this driver's, which touches it only when it is given back.
///         let memory = unsafe { RawMemory::new(piece) };
///         device.link(&mut reservation, offset, memory)?;
///     }
///     device.announce(&mut reservation)?;
///     // The device may write to `reservation.addr()` and behind it, and when it is done:
///     let mut released = Vec::new();
///     device.destroy(reservation, |memory| released.push(memory))?;
///     assert_eq!(released[1].piece().span.len(), 0x2000);
///     Ok(())
/// }
/// ```
///
/// Dropped, it leaks the memory and the IOVAs, and the device goes on using them: end it by
/// [`Device::destroy`].
#[must_use = "a reservation that is dropped is never freed, and its memory leaks"]
pub struct Reservation<T: Translation = AnyTranslation, B: BouncePool = <T as Sealed>::Pool> {
    addr: DmaAddr,
    len: u64,
    direction: Direction,
    device: Id,
    iovas: Option<Iovas>,
    links: Links<T::Memory>,
    /// The slots of those that are bounced, by offset.
    bounced: Vec<BouncedLink<B>>,
    /// How many of the links, from the first one on, are known to be mapped; those of a longer
    /// list that are beyond it may be, too.
    mapped: u32,
    settled: Settled,
    state: State,
}

/// Whether the pieces of a reservation are mapped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Mapped,
    /// No longer: an announcement failed, and took all of them away.
    Withdrawn,
}

/// Whether hardware is known to have forgotten all that is not linked any more.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Settled {
    Yes,
    No,
}

/// The slots that stand in for the piece at an offset.
struct BouncedLink<B: BouncePool> {
    offset: u64,
    slots: Slots<B::Slot>,
}

/// The slots of the piece at `offset`, where it has any.
#[inline(always)]
fn slots_at<B: BouncePool>(bounced: &[BouncedLink<B>], offset: u64) -> Option<&Slots<B::Slot>> {
    if bounced.is_empty() {
        return None;
    }
    let at = bounced.binary_search_by_key(&offset, |link| link.offset).ok()?;
    bounced.get(at).map(|link| &link.slots)
}

impl<T: Translation, B: BouncePool> Reservation<T, B> {
    /// Returns what the device is given for the first byte.
    pub fn addr(&self) -> DmaAddr {
        self.addr
    }

    /// Returns how many bytes are reserved.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether nothing is linked.
    pub fn is_empty(&self) -> bool {
        self.links.all().is_empty()
    }

    /// Returns how many pieces it has, announced or not.
    pub fn linked(&self) -> usize {
        self.links.all().len()
    }

    /// Returns which way the data goes.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    #[inline(always)]
    fn mapped(&self) -> usize {
        usize::try_from(self.mapped).unwrap_or(0)
    }

    #[inline(always)]
    fn set_mapped(&mut self, mapped: usize) {
        self.mapped = u32::try_from(mapped).unwrap_or(u32::MAX);
    }

    /// Remembers what an error leaves for hardware to forget.
    #[cold]
    fn unsettled_by(&mut self, error: Error) -> Error {
        if let Error::Quarantined { .. } = error {
            self.settled = Settled::No;
        }
        error
    }

    /// The links that lie in `len` bytes from `offset` on, by their places.
    fn links_in(&self, offset: u64, len: u64) -> Result<Range<usize>, Error> {
        let end = offset.checked_add(len).filter(|end| len > 0 && *end <= self.len);
        let end = end.ok_or(Error::OutsideMapping { offset, len, mapped: self.len })?;
        let links = self.links.all();
        let first = links.partition_point(|link| link.offset + link.len() <= offset);
        let behind = links.partition_point(|link| link.offset < end);
        for link in &links[first..behind] {
            if link.offset < offset || link.offset + link.len() > end {
                return Err(Error::CutsLink { offset: link.offset, len: link.len() });
            }
        }
        Ok(first..behind)
    }
}

impl<T: Translation, B: BouncePool> Reservation<T, B> {
    /// Ends one that has no IOVAs and no memory any more: it needs not look for any.
    #[inline(always)]
    fn ended(mut self) {
        drop(mem::take(&mut self.bounced));
        mem::forget(self);
    }

    /// Leaks what it holds: a device may still use it.
    #[cold]
    fn leak(&mut self) {
        let bounced = mem::take(&mut self.bounced);
        // Never dropped: where memory panics that is asked for its pieces, too.
        let held = ManuallyDrop::new((self.links.take(), self.iovas.take(), bounced));
        let links = held.0.all();
        let lens = links.iter().map(Link::len);
        let is_bounced = |link: &&Link<T::Memory>| slots_at(&held.2, link.offset).is_some();
        let bounced = links.iter().filter(is_bounced).map(Link::len);
        let (addr, len, links) = (self.addr, self.len, links.len());
        leak::count(Held {
            iovas: held.1.as_ref().map(Iovas::range),
            memory: lens.fold(0, u64::saturating_add),
            slots: bounced.fold(0, u64::saturating_add),
        });
        log::warn!(
            "a reservation of {len:#x} bytes at {addr} with {links} pieces was dropped, so that \
             its IOVAs and memory leak and the device goes on using them: end it by Device::destroy"
        );
    }
}

impl<T: Translation, B: BouncePool> Drop for Reservation<T, B> {
    fn drop(&mut self) {
        if !self.links.all().is_empty() || self.iovas.is_some() {
            self.leak();
        }
    }
}

impl<T: Translation, B: BouncePool> fmt::Debug for Reservation<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation")
            .field("addr", &self.addr)
            .field("len", &self.len)
            .field("linked", &self.linked())
            .finish_non_exhaustive()
    }
}

/// Says what is to be reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReserveRequest {
    /// How many bytes the device will use.
    pub len: u64,
    /// Where the first of them lies in its granule: the low bits of the first piece's address.
    pub offset: u64,
    /// How many pieces there will be at most. Room is made for them at once.
    pub pieces: usize,
    /// Which way the data goes.
    pub direction: Direction,
}

/// A reservation that could not be ended: hardware was not seen to forget it.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct DestroyFailed<T: Translation = AnyTranslation, B: BouncePool = <T as Sealed>::Pool> {
    /// The reason.
    pub error: Error,
    /// The reservation, as it was. Destroy it again, or drop it: then it leaks. `None` where it is
    /// in quarantine, memory and all, until a [flush](crate::dma::DmaDomain::flush) succeeds.
    pub reservation: Option<Reservation<T, B>>,
}

impl<T: Translation, B: BouncePool> From<DestroyFailed<T, B>> for Error {
    /// The reason alone. A reservation that was given back is dropped, and so it leaks: the device
    /// may go on using its memory, which is never freed.
    #[cold]
    fn from(failed: DestroyFailed<T, B>) -> Self {
        failed.error
    }
}

impl<T: Translation, B: BouncePool> fmt::Debug for DestroyFailed<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DestroyFailed")
            .field("error", &self.error)
            .field("reservation", &self.reservation)
            .finish()
    }
}

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// Reserves addresses; nothing is mapped there yet.
    ///
    /// # Errors
    ///
    /// [`Error::Untranslated`] where there are no IOVAs at all: then map piece by piece.
    /// [`Error::Misplaced`] for an offset beyond the granule, [`Error::Iova`] for no bytes and
    /// where no IOVAs are free, and [`Error::NoRoom`] where there is no memory for the records of
    /// so many pieces.
    ///
    /// # Context
    ///
    /// Allocates room for the records; what follows, up to [`destroy`](Self::destroy), needs none
    /// but for page tables.
    #[inline(always)]
    #[track_caller]
    pub fn reserve(&self, request: ReserveRequest) -> Result<Reservation<T, B>, Error> {
        let ReserveRequest { len, offset, pieces, direction } = request;
        if self.translation.direct_memory().is_some() {
            return Err(Error::Untranslated);
        }
        let granule_lg2 = self.translation.granule_lg2();
        if offset > lg2::mask(granule_lg2) {
            return Err(Error::Misplaced { offset, granule: lg2::size(granule_lg2) });
        }
        let links = Links::with_room(pieces).map_err(|_| Error::NoRoom { pieces })?;
        let mut bounced = Vec::new();
        if self.may_bounce() {
            bounced.try_reserve_exact(pieces).map_err(|_| Error::NoRoom { pieces })?;
        }
        let whole = IovaRange::from_len(Iova::new(offset), len).map_err(iova::Error::from)?;
        let limit = Iova::new(self.config.limits.last);
        let bytes = whole.last().get().saturating_add(1);
        let iovas = self.translation.alloc(Request { bytes, align: Align::Natural, limit })?;
        Ok(Reservation {
            addr: DmaAddr::new(iovas.range().start().get() + offset),
            len,
            direction,
            device: self.id(),
            iovas: Some(iovas),
            links,
            bounced,
            mapped: 0,
            settled: Settled::Yes,
            state: State::Mapped,
        })
    }

    /// Puts memory of one piece at `offset` bytes from the reservation's first. Nothing is mapped
    /// yet: [`announce`](Self::announce) does it for all pieces, and the device may use them after
    /// that.
    ///
    /// Pieces share no granule: one that begins inside of a granule can only be the first, and one
    /// that ends inside of one only the last in its place.
    ///
    /// # Errors
    ///
    /// [`Refused`], with nothing changed: [`Error::Foreign`] for a reservation of another device,
    /// [`Error::Withdrawn`] after an [`announce`](Self::announce) that took everything away,
    /// [`Error::NotSingle`], [`Error::OutsideMapping`], [`Error::Misplaced`] for memory whose low
    /// bits are not those of its place, [`Error::CutsLink`] where something is linked,
    /// [`Error::NoRoom`] for more pieces than the reservation has room for,
    /// [`Error::NotTranslated`] for what is reached on the bus, [`Error::Domain`] for memory that
    /// page tables cannot lead to, and what [`map_single`](Self::map_single) refuses where it would
    /// bounce.
    ///
    /// # Context
    ///
    /// Takes no lock but a pool's, where the piece is bounced, and allocates nothing.
    #[inline(always)]
    pub fn link(
        &self,
        reservation: &mut Reservation<T, B>,
        offset: u64,
        memory: T::Memory,
    ) -> Result<(), Refused<T::Memory>> {
        if !self.is_plain(reservation, offset, &memory) {
            return self.link_anywhere(reservation, offset, memory);
        }
        let (addr, granule) = (reservation.addr, lg2::mask(self.translation.granule_lg2()));
        let is_behind =
            |link: &Link<_>| link.last(addr, granule).get() < addr.get().wrapping_add(offset);
        match reservation.links.push(Link::new(offset, memory), is_behind) {
            Ok(()) => Ok(()),
            Err(link) => self.link_anywhere(reservation, offset, link.memory),
        }
    }

    /// Whether memory can be linked at an offset where others permit it, and as it is: nothing is
    /// bounced or written back.
    #[inline(always)]
    fn is_plain(&self, reservation: &Reservation<T, B>, offset: u64, memory: &T::Memory) -> bool {
        let &[piece] = memory.pieces() else { return false };
        let (span, granule) = (piece.span, lg2::mask(self.translation.granule_lg2()));
        let iova = reservation.addr.get().wrapping_add(offset);
        self.own_mapped(reservation).is_ok()
            && offset.checked_add(span.len()).is_some_and(|end| end <= reservation.len)
            && (span.paddr().get() ^ iova) & granule == 0
            && span.last().get() | granule <= self.translation.last_paddr().get()
            && self.config.coherency == Coherency::Coherent
            && matches!(self.way(piece), Ok(Way::Translated))
    }

    #[cold]
    #[inline(never)]
    fn link_anywhere(
        &self,
        reservation: &mut Reservation<T, B>,
        offset: u64,
        memory: T::Memory,
    ) -> Result<(), Refused<T::Memory>> {
        match self.find_place(reservation, offset, &memory) {
            Ok(Placed { at, slots }) => {
                reservation.set_mapped(reservation.mapped().min(at));
                if let Some(slots) = slots {
                    let bounced = &mut reservation.bounced;
                    let at = bounced.partition_point(|link| link.offset < offset);
                    bounced.insert(at, BouncedLink { offset, slots });
                }
                reservation.links.insert(at, Link::new(offset, memory));
                Ok(())
            }
            Err(error) => Err(Refused { error, memory: Some(memory) }),
        }
    }

    /// Unmaps the pieces in `len` bytes from `offset` on, with one sync, and gives their memory to
    /// `release`, in its order. The addresses stay reserved.
    ///
    /// # Errors
    ///
    /// With nothing changed, [`Error::Foreign`], [`Error::OutsideMapping`], and
    /// [`Error::CutsLink`] for a piece that is only partly in the range.
    /// [`Error::Quarantined`] where hardware was not seen to forget: the pieces stay the
    /// reservation's, to be destroyed with it.
    ///
    /// # Context
    ///
    /// Waits for hardware. Allocates nothing.
    #[track_caller]
    pub fn unlink(
        &self,
        reservation: &mut Reservation<T, B>,
        offset: u64,
        len: u64,
        mut release: impl FnMut(T::Memory),
    ) -> Result<(), Error> {
        self.own(reservation)?;
        let places = reservation.links_in(offset, len)?;
        let (addr, granule) = (reservation.addr, lg2::mask(self.translation.granule_lg2()));
        let links = &reservation.links.all()[places.clone()];
        let (Some(first), Some(last)) = (links.first(), links.last()) else { return Ok(()) };
        let range = IovaRange::new(first.start(addr, granule), last.last(addr, granule));
        let (first, end) = (first.offset, last.offset + last.len());
        let mapped = reservation.mapped();
        reservation.set_mapped(mapped.min(places.start));
        let links = &mut reservation.links.all_mut()[places.clone()];
        links.iter_mut().for_each(|link| link.is_mapped = false);
        if let Some(range) = range {
            self.settle(reservation, range)?;
        }
        self.give_back(reservation, places.clone());
        let bounced = &reservation.bounced;
        let slots = bounced.partition_point(|link| link.offset < first)
            ..bounced.partition_point(|link| link.offset < end);
        // Where the pool panics, pieces without their slots must not be mapped themselves.
        let state = mem::replace(&mut reservation.state, State::Withdrawn);
        for at in slots.rev() {
            self.release(reservation.bounced.remove(at).slots);
        }
        reservation.state = state;
        let left = mapped.saturating_sub(places.len()).max(reservation.mapped());
        reservation.set_mapped(left);
        reservation.links.remove(places, |link| release(link.memory));
        Ok(())
    }

    /// Ends a reservation: unmaps all of it with one sync, gives the memory to `release`, and frees
    /// the addresses.
    ///
    /// In lazy mode it does not wait: the queue drops the memory and frees the addresses at its
    /// flush, as for [`Unmapped::Queued`](super::Unmapped), and `release` is not called. So it is
    /// where the device is trusted, no piece is bounced, and no earlier call has failed to make
    /// hardware forget. A driver that wants the memory back [unlinks](Self::unlink) it first.
    ///
    /// # Errors
    ///
    /// [`DestroyFailed`]: with the reservation where it is of another device, or hardware was not
    /// seen to forget; in lazy mode without it where a flush was due and failed.
    ///
    /// # Context
    ///
    /// As [`unmap`](Self::unmap). Allocates nothing. In lazy mode the records of its pieces go back
    /// to the global allocator where the queue is flushed.
    #[inline(always)]
    #[track_caller]
    pub fn destroy(
        &self,
        mut reservation: Reservation<T, B>,
        release: impl FnMut(T::Memory),
    ) -> Result<(), DestroyFailed<T, B>> {
        // By reference: what is moved into a function is copied.
        match self.unmap_all(&mut reservation) {
            Ok(links) => {
                reservation.ended();
                links.release(release);
                Ok(())
            }
            Err(error) => {
                let is_quarantined = reservation.iovas.is_none();
                let reservation = Some(reservation).filter(|_| !is_quarantined);
                Err(DestroyFailed { error, reservation })
            }
        }
    }

    /// Unmaps all of a reservation and takes all out of it, and returns what is to be released.
    #[track_caller]
    fn unmap_all(&self, reservation: &mut Reservation<T, B>) -> Result<Links<T::Memory>, Error> {
        let range = self.own(reservation)?;
        let is_settled = reservation.settled == Settled::Yes && reservation.bounced.is_empty();
        if is_settled && self.flush_as(None) == Flush::Lazy {
            self.translation.observe(&Event::Unmapping { range, by: self.caller() });
            // The memory is the queue's after the unmap.
            self.give_back(reservation, 0..reservation.linked());
            let links = reservation.links.take();
            if let Some(iovas) = reservation.iovas.take() {
                self.translation.unmap_linked(Promise::kept(), iovas, links.into_queued())?;
            }
            return Ok(Links::One(None));
        }
        // All of the range, for the tables in it: unlinked pieces left them empty.
        self.settle(reservation, range)?;
        if let Some(iovas) = reservation.iovas.take() {
            self.translation.free(Promise::kept(), iovas);
        }
        self.give_back(reservation, 0..reservation.linked());
        while let Some(link) = reservation.bounced.pop() {
            self.release(link.slots);
        }
        Ok(reservation.links.take())
    }

    /// Makes hardware forget `range`, and what an earlier failure left.
    #[track_caller]
    fn settle(&self, reservation: &mut Reservation<T, B>, range: IovaRange) -> Result<(), Error> {
        self.translation.observe(&Event::Unmapping { range, by: self.caller() });
        let (torn, settled) = (self.may_be_torn(), reservation.settled);
        reservation.settled = Settled::No;
        let unlinked = self.translation.unlink(Promise::kept(), range);
        torn.ended();
        unlinked?;
        if settled == Settled::No {
            self.translation.settle()?;
        }
        reservation.settled = Settled::Yes;
        Ok(())
    }

    /// A guard for an operation in which hooks may panic. What such a one has unmapped is synced
    /// before the memory goes, which the reservation keeps meanwhile: it is [`Settled::No`].
    fn may_be_torn(&self) -> Torn<'_, T> {
        Torn(&*self.translation)
    }

    /// The IOVAs of a reservation of this device.
    #[inline(always)]
    fn own(&self, reservation: &Reservation<T, B>) -> Result<IovaRange, Error> {
        let own = reservation.iovas.as_ref().filter(|_| reservation.device == self.id());
        own.map(Iovas::range).ok_or(Error::Foreign { addr: reservation.addr })
    }

    /// The same, unless an announcement took what is mapped away.
    #[inline(always)]
    fn own_mapped(&self, reservation: &Reservation<T, B>) -> Result<IovaRange, Error> {
        let range = self.own(reservation)?;
        match reservation.state {
            State::Mapped => Ok(range),
            State::Withdrawn => Err(Error::Withdrawn { addr: reservation.addr }),
        }
    }

    /// Lets the CPU see what a device wrote to the links at these places. This is done for all of
    /// them before the memory of the first one goes to its owner, whose code may panic.
    #[inline(always)]
    fn give_back(&self, reservation: &Reservation<T, B>, places: Range<usize>) {
        if self.config.coherency == Coherency::NonCoherent || !reservation.bounced.is_empty() {
            self.give_back_slowly(reservation, places);
        }
    }

    #[cold]
    fn give_back_slowly(&self, reservation: &Reservation<T, B>, places: Range<usize>) {
        let Reservation { links, bounced, direction, .. } = reservation;
        for link in &links.all()[places] {
            let slots = slots_at(bounced, link.offset);
            if self.config.coherency == Coherency::NonCoherent || slots.is_some() {
                self.part_for_cpu(link.piece(), slots, *direction, 0, link.len());
            }
        }
    }

    /// Where memory goes in a reservation.
    fn find_place(
        &self,
        reservation: &Reservation<T, B>,
        offset: u64,
        memory: &T::Memory,
    ) -> Result<Placed<B>, Error> {
        self.own_mapped(reservation)?;
        let pieces = memory.pieces();
        let &[piece] = pieces else { return Err(Error::NotSingle { pieces: pieces.len() }) };
        let (Piece { span, via }, mapped) = (piece, reservation.len);
        if via == Via::Bus {
            return Err(Error::NotTranslated { span });
        }
        let len = span.len();
        if offset.checked_add(len).is_none_or(|end| end > mapped) {
            return Err(Error::OutsideMapping { offset, len, mapped });
        }
        let (addr, iova) = (reservation.addr, reservation.addr.get() + offset);
        let granule = lg2::mask(self.translation.granule_lg2());
        // Most pieces come in their order.
        let links = reservation.links.all();
        let is_behind = |link: &Link<T::Memory>| link.last(addr, granule).get() < iova;
        let at = match links.last() {
            Some(last) if !is_behind(last) => links.partition_point(is_behind),
            _ => links.len(),
        };
        if let Some(link) = links.get(at)
            && link.start(addr, granule).get() <= iova + (len - 1)
        {
            return Err(Error::CutsLink { offset: link.offset, len: link.len() });
        }
        if links.len() == reservation.links.room() {
            return Err(Error::NoRoom { pieces: links.len() + 1 });
        }
        if (span.paddr().get() ^ iova) & granule != 0 {
            let (offset, granule) = (span.paddr().get(), granule + 1);
            return Err(Error::Misplaced { offset, granule });
        }
        let (whole, last) = (whole(span, granule), self.translation.last_paddr());
        // So that no announcement fails for it.
        if whole.last() > last {
            let beyond = io_pgtable::Error::OutsideOutput { span: whole, last };
            return Err(iommu::Error::from(beyond).into());
        }
        let slots = match self.way(piece)? {
            // As its original it has to lie as its place does.
            Way::Bounced => Some(self.bounce(span, granule, Fill::Copy)?),
            Way::Translated | Way::Straight => None,
        };
        if self.config.coherency == Coherency::NonCoherent {
            self.give_piece(piece, slots.as_ref(), CpuSync::Sync);
        }
        Ok(Placed { at, slots })
    }
}

/// Has everything synced once more, unless it is [ended](Self::ended).
struct Torn<'a, T: Sealed>(&'a T);

impl<T: Sealed> Torn<'_, T> {
    #[inline(always)]
    fn ended(self) {
        mem::forget(self);
    }
}

impl<T: Sealed> Drop for Torn<'_, T> {
    #[cold]
    fn drop(&mut self) {
        self.0.keep_torn();
    }
}

/// Where a piece goes.
struct Placed<B: BouncePool> {
    /// Its place among the links.
    at: usize,
    slots: Option<Slots<B::Slot>>,
}
