//! Emulated devices are registered here: software that uses mapped memory itself, and that an unmap
//! tells before the memory goes.

use alloc::sync::Arc;
use alloc::vec::Vec;

use lock_api::RawMutex;

use super::error::Error;
use super::mapping::overlapping;
use super::{Container, State};
use crate::leak;
use crate::pin::Pinner;
use crate::range::{IovaRange, UserRange};

/// How often devices are told of one unmap at most: Linux gives up after as many
/// (drivers/vfio/vfio_iommu_type1.c, `vfio_dma_do_unmap`), with a BUG.
const ROUNDS: u32 = 10;

/// How many unmaps tell of one mapping at a time. It ends the recursion of a device that unmaps
/// what it is told of and does not unpin it.
const AT_ONCE: u32 = 4;

/// An emulated device, as the container knows it.
pub trait UnmapNotifier: Send + Sync {
    /// The mapping at `range` is to be unmapped, or device memory behind it is to be taken away:
    /// the device unpins what it has pinned there, pins included that reach out of the mapping, and
    /// forgets what it knows of it.
    ///
    /// Called as long as there are external pins, whoever made them; a device without pins there
    /// has nothing to do.
    ///
    /// # Context
    ///
    /// No lock of the container is held: the device may call all of its functions. Called from
    /// where unmapping is allowed.
    fn unmapping(&self, range: IovaRange);
}

/// Names an emulated device: [`Container::attach_emulated`] returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EmulatedId(u64);

/// The emulated devices, by their numbers.
#[derive(Default)]
pub(super) struct Emulated {
    list: Vec<(EmulatedId, Arc<dyn UnmapNotifier>)>,
    given: u64,
}

impl Emulated {
    /// The first device behind that number.
    fn behind(&self, id: Option<EmulatedId>) -> Option<(EmulatedId, Arc<dyn UnmapNotifier>)> {
        let next = self.list.partition_point(|(own, _)| Some(*own) <= id);
        self.list.get(next).cloned()
    }
}

impl<P: Pinner> State<P> {
    /// How many emulated devices there are.
    pub(super) fn emulated(&self) -> usize {
        self.emulated.list.len()
    }

    /// Refuses to unmap a mapping that emulated devices use.
    #[inline(always)]
    pub(super) fn check_unused(
        &self,
        range: IovaRange,
        mapping: IovaRange,
        copies: u32,
    ) -> Result<(), Error<P::Error>> {
        if copies == 0 && self.external.is_empty() {
            return Ok(());
        }
        self.check_unpinned(range, mapping, copies)
    }

    #[inline(never)]
    fn check_unpinned(
        &self,
        range: IovaRange,
        mapping: IovaRange,
        copies: u32,
    ) -> Result<(), Error<P::Error>> {
        let mut pins = self.external.pins_in(mapping).peekable();
        if copies == 0 && pins.peek().is_none() {
            Ok(())
        } else if pins.any(|pin| pin.is_some()) {
            Err(Error::StillPinned { range: mapping })
        } else {
            Err(Error::Busy { range, busy: mapping })
        }
    }

    /// Refuses to revoke device memory that emulated devices have pinned.
    fn check_mmio(&self, space_id: u64, user: UserRange) -> Result<(), Error<P::Error>> {
        for (key, place) in &self.external.pins {
            let found = overlapping(&self.tree, IovaRange::point(key.0)).next();
            let Some((mapped, slot)) = found.filter(|(_, slot)| slot.space_id == space_id) else {
                continue;
            };
            match place {
                Some(held) if held.has_mmio(user) => {
                    return Err(Error::StillPinned { range: mapped });
                }
                // What it has is not known: it may be device memory of the range.
                None if slot.user.intersection(user).is_some() => {
                    return Err(Error::Busy { range: mapped, busy: mapped });
                }
                Some(_) | None => {}
            }
        }
        Ok(())
    }

    /// The first mapping in `range` that has external pins, which is about to be announced.
    fn begin_announcing(
        &mut self,
        range: IovaRange,
    ) -> Result<Option<(IovaRange, u64)>, Error<P::Error>> {
        let pinned = |mapped| self.external.pins_in(mapped).any(|pin| pin.is_some());
        let first = overlapping(&self.tree, range)
            .find(|(mapped, slot)| slot.left().is_some() && pinned(*mapped));
        let Some((mapped, _)) = first else { return Ok(None) };
        let Some(slot) = self.tree.get_mut(mapped.start()) else { return Ok(None) };
        if slot.announcing == AT_ONCE {
            return Err(Error::StillPinned { range: mapped });
        }
        slot.announcing += 1;
        Ok(Some((mapped, slot.serial)))
    }

    fn end_announcing(&mut self, mapped: IovaRange, serial: u64) {
        let slot = self.tree.get_mut(mapped.start());
        if let Some(slot) = slot.filter(|slot| slot.serial == serial) {
            slot.announcing -= 1;
        }
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Attaches an emulated device, which is told before memory is unmapped.
    ///
    /// It uses memory by [`pin_external`](Self::pin_external), [`read`](Self::read) and
    /// [`write`](Self::write). A container may have emulated devices only: then mapping pins
    /// nothing, and their pins do.
    ///
    /// # Errors
    ///
    /// As `vfio_iommu_type1_attach_group` while the user's addresses of a mapping are not known.
    ///
    /// ```
    /// use std::error::Error;
    /// use std::sync::Arc;
    ///
    /// use dmaspan::container::UnmapNotifier;
    /// use dmaspan::pin::Dirty;
    /// use dmaspan::{Account, Container, HostAddr, Iova, IovaRange, Prot, Span};
    /// use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
    ///
    /// struct Idle;
    ///
    /// impl UnmapNotifier for Idle {
    ///     fn unmapping(&self, _range: IovaRange) {}
    /// }
    ///
    /// fn main() -> Result<(), Box<dyn Error>> {
    ///     let memory = Arc::new(Memory::new(MemoryKind::Base, 0x4000)?);
    ///     let user = memory.user_range();
    ///     let container: Container<_, parking_lot::RawMutex> =
    ///         Container::new(LinuxPinner::<HostAddr>::new()?, Account::new(1 << 20));
    ///     let device = container.attach_emulated(Arc::new(Idle))?;
    ///     // Nothing is pinned: there is no domain.
    ///     container.map(&memory, user, Iova::new(0), Prot::READ_WRITE)?;
    ///
    ///     // Two pages, where they are for this process.
    ///     let mut spans: Vec<Span<HostAddr>> = Vec::new();
    ///     let pages = IovaRange::from_len(Iova::new(0x1000), 0x2000)?;
    ///     let pin = container.pin_external(pages, Prot::READ_WRITE, &mut spans)?;
    ///     assert_eq!(spans, [Span::new(HostAddr::new(user.start().get() + 0x1000), 0x2000)?]);
    ///     container.unpin_external(pin, Dirty::Written)?;
    ///
    ///     // Some bytes, without a pin.
    ///     container.write(Iova::new(0xfff), b"two pages")?;
    ///     let mut bytes = [0; 9];
    ///     container.read(Iova::new(0xfff), &mut bytes)?;
    ///     assert_eq!(&bytes, b"two pages");
    ///     container.detach_emulated(device)?;
    ///     assert_eq!(container.mappings(), 0);
    ///     Ok(())
    /// }
    /// ```
    pub fn attach_emulated(
        &self,
        notifier: Arc<dyn UnmapNotifier>,
    ) -> Result<EmulatedId, Error<P::Error>> {
        let mut all = self.state.lock();
        all.check_vaddr()?;
        let id = EmulatedId(all.emulated.given);
        all.emulated.given += 1;
        all.emulated.list.push((id, notifier));
        Ok(id)
    }

    /// Detaches an emulated device. It has unpinned before what it had pinned.
    ///
    /// The last device to leave a container without domains takes everything with it that is
    /// mapped, as in Linux (`vfio_iommu_type1_detach_group`).
    ///
    /// # Errors
    ///
    /// [`Error::NotAttached`], and what [`unmap_all`](Self::unmap_all) answers, with the device
    /// still attached.
    ///
    /// # Context
    ///
    /// A notification that has begun in another thread may outlast it.
    pub fn detach_emulated(&self, id: EmulatedId) -> Result<(), Error<P::Error>> {
        let all = self.state.lock();
        if !all.emulated.list.iter().any(|(own, _)| *own == id) {
            return Err(Error::NotAttached);
        }
        let leaves_none = all.emulated() == 1 && all.domains.is_empty();
        drop(all);
        if leaves_none {
            self.unmap_all()?;
        }
        let mut all = self.state.lock();
        let at = all.emulated.list.iter().position(|(own, _)| *own == id);
        let gone = at.map(|at| all.emulated.list.remove(at));
        drop(all);
        // Behind the lock: what a device does when it is dropped is its own affair.
        drop(gone);
        Ok(())
    }

    /// Does `attempt`, which changes nothing where external pins of mappings in `range` are in its
    /// way, until none are or devices were told often enough.
    pub(super) fn announcing<T>(
        &self,
        range: IovaRange,
        mut attempt: impl FnMut() -> Result<T, Error<P::Error>>,
    ) -> Result<T, Error<P::Error>> {
        match self.waiting(&mut attempt) {
            Err(Error::StillPinned { .. }) => self.announce(range, &mut attempt),
            result => result,
        }
    }

    /// [`announcing`](Self::announcing) behind a first attempt, in whose way external pins were.
    pub(super) fn announce<T>(
        &self,
        range: IovaRange,
        attempt: &mut dyn FnMut() -> Result<T, Error<P::Error>>,
    ) -> Result<T, Error<P::Error>> {
        for _ in 1..ROUNDS {
            self.announce_unmap(range)?;
            match self.waiting(&mut *attempt) {
                Err(Error::StillPinned { .. }) => {}
                result => return result,
            }
        }
        self.announce_unmap(range)?;
        self.waiting(attempt)
    }

    /// Tells all devices of each mapping in `range` that has external pins.
    fn announce_unmap(&self, range: IovaRange) -> Result<(), Error<P::Error>> {
        let mut rest = Some(range);
        while let Some(range) = rest {
            let next = self.state.lock().begin_announcing(range)?;
            let Some((mapped, serial)) = next else { break };
            let mut told = None;
            loop {
                let device = self.state.lock().emulated.behind(told);
                let Some((id, notifier)) = device else { break };
                notifier.unmapping(mapped);
                told = Some(id);
            }
            self.state.lock().end_announcing(mapped, serial);
            let behind = mapped.last().checked_add(1);
            rest = behind.and_then(|at| IovaRange::new(at, range.last()));
        }
        Ok(())
    }

    /// Has devices unpin the device memory that `user` leads to, by telling them of the mappings.
    pub(super) fn revoke_external(
        &self,
        space_id: u64,
        user: UserRange,
    ) -> Result<(), Error<P::Error>> {
        // Pins under way look at this before they are noted.
        self.state.lock().revokes += 1;
        for _ in 0..ROUNDS {
            match self.waiting(|| self.state.lock().check_mmio(space_id, user)) {
                Err(Error::StillPinned { range }) => self.announce_unmap(range)?,
                result => return result,
            }
        }
        self.waiting(|| self.state.lock().check_mmio(space_id, user))
    }

    /// Tells devices that the container goes, and keeps pinned and charged for ever what they have
    /// pinned: they cannot unpin it any more.
    pub(super) fn abandon_external(&mut self) {
        let _ = self.announce_unmap(IovaRange::ALL);
        let all = self.state.get_mut();
        for ((at, _), held) in core::mem::take(&mut all.external.pins) {
            let found = overlapping(&all.tree, IovaRange::point(at)).next();
            let mapping = found.and_then(|(_, slot)| slot.left());
            let space = mapping.map(|mapping| mapping.space.clone());
            if let Some(held) = held {
                let (user, range) = (held.user, held.range);
                // First, since a logger may panic.
                held.leak(space);
                leak::pin(user, range);
            }
        }
    }
}
