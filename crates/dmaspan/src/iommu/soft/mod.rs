//! An IOMMU for device models: software that translates their accesses through page tables, as
//! hardware would.
//!
//! [`SoftIommu::over`] makes it for a table of any format, and it is the hooks of the table's
//! domain. Each device model has a [`SoftDevice`], which translates, and reads and writes memory
//! behind a [`Bus`]. A [`SoftStream`] is a device that is attached to one domain or another.
//!
//! - **A hit is some 50 instructions**, lock included, in any of the 32 spans at the front of the
//!   IOTLB; `examples/device_model.rs` counts them.
//! - **A miss is one walk.** The walk joins leaves to the longest contiguous span around the
//!   address, whatever sizes they have, and the span is what the device's IOTLB keeps.
//! - **Nothing is stale behind a sync.** An access runs under the lock of its device's IOTLB, from
//!   the look-up to the last byte. An invalidation cuts what it names out of the spans, or has
//!   device models that are in an access do so before their next one. It returns when no access
//!   through an old translation is under way, so safe code cannot have a device model touch memory
//!   that was given back.
//! - **An invalidation waits for no access that begins after it**, however many device models do
//!   one after the other without a pause. It fails only where a single access does not end.
//! - **Tables are walked only for their own domain.** Before that begins, after it has ended, and
//!   where the hooks were given to the domain of another table, every access is a fault.
//! - **Absent entries are not kept**, so a mapping needs no sync, and a permission that a kept span
//!   lacks is looked for in the tables again.
//! - **Writes leave marks** in formats that track them.
//!
//! ```
//! use std::sync::Mutex;
//!
//! use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, PageTable};
//! use dmaspan::iommu::soft::{AccessFailed, Bus, BusError, SoftIommu};
//! use dmaspan::iommu::{Domain, FaultReason};
//! use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
//! use dmaspan::io_pgtable::Arena;
//!
//! /// 64 KiB of memory at 2 GiB.
//! struct Ram(Mutex<Vec<u8>>);
//!
//! impl Ram {
//!     const BASE: u64 = 0x8000_0000;
//!
//!     /// Calls `with` with the bytes from `at` on, if there are so many.
//!     fn with<F>(&self, at: PhysAddr, len: usize, with: F) -> Result<(), BusError>
//!     where
//!         F: FnOnce(&mut [u8]),
//!     {
//!         let nobody = BusError::Nobody { paddr: at };
//!         let start = usize::try_from(at.get().wrapping_sub(Self::BASE)).map_err(|_| nobody)?;
//!         let mut bytes = self.0.lock().unwrap();
//!         let end = start.checked_add(len).ok_or(nobody)?;
//!         with(bytes.get_mut(start..end).ok_or(nobody)?);
//!         Ok(())
//!     }
//! }
//!
//! impl Bus for Ram {
//!     fn read(&self, at: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
//!         self.with(at, buf.len(), |bytes| buf.copy_from_slice(bytes))
//!     }
//!
//!     fn write(&self, at: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
//!         self.with(at, buf.len(), |bytes| bytes.copy_from_slice(buf))
//!     }
//! }
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
//!     let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
//!     let table = PageTable::new(format, tables)?;
//!     let iommu = SoftIommu::over(&table);
//!     let domain = Domain::new(table, iommu.clone())?;
//!     let mut device = iommu.device(7);
//!
//!     let ram = Ram(Mutex::new(vec![0; 0x10000]));
//!     let buffer = Span::new(PhysAddr::new(Ram::BASE + 0x4000), 0x2000)?;
//!     // SAFETY: nothing else is mapped there, and devices reach the memory by its lock alone.
//!     unsafe { domain.map_spans(Iova::new(0x10_0000), &[buffer], Prot::READ_WRITE) }?;
//!     device.write(&ram, Iova::new(0x10_0ffc), b"over two pages")?;
//!     assert_eq!(ram.0.lock().unwrap()[0x4ffc..][..14], *b"over two pages");
//!     assert_eq!(device.misses(), 1);
//!
//!     let range = IovaRange::from_len(Iova::new(0x10_0000), 0x2000)?;
//!     let mut room = SpanBuf::room::<1>();
//!     // SAFETY: nobody else works on the domain.
//!     let unsynced = unsafe { domain.unmap(range, &mut SpanBuf::new(&mut room)) }?;
//!     // When this returns, no device model is in the middle of an access to it.
//!     let (_synced, _) = unsynced.sync()?;
//!     match device.read(&ram, Iova::new(0x10_0ffc), &mut [0; 4]) {
//!         Err(AccessFailed::Fault(fault)) => assert_eq!(fault.reason, FaultReason::Translation),
//!         other => panic!("{other:?}"),
//!     }
//!     Ok(())
//! }
//! ```

mod bus;
mod device;
mod slot;
mod spans;
mod stream;

use alloc::sync::Arc;
use core::fmt;
use core::marker::PhantomData;
use core::mem;

pub use bus::{Bus, BusError};
pub use device::{AccessFailed, AccessFault, SoftDevice};
pub use slot::TryAgain;
pub use stream::SoftStream;

use super::gather::Gather;
use super::ops::{DriverOps, HardwareError, Invalidation, IommuOps, Scope};
use crate::addr::{Address, PhysAddr};
use crate::io_pgtable::view::View;
use crate::io_pgtable::{Arena, Format, PageTable, TableMemory, TableRoot};
use crate::promise::Promise;
use slot::{Models, Phase, Route, Slot, Ticket, Walks};

/// A software IOMMU: the hooks of a domain, and what device models translate by.
///
/// Clones are the same. One goes to the domain, and the others make devices.
///
/// `A` is what the addresses are that come out of a translation: those of the bytes, as device
/// models reach them. For a VMM, or a server of somebody else's memory, they are
/// [`HostAddr`](crate::HostAddr)s: see [`reaching`](Self::reaching).
///
/// # Context
///
/// An invalidation waits for accesses that are under way, and nobody waits for that: neither
/// accesses nor other invalidations nor new device models. A device model that unmaps and syncs in
/// the middle of an access waits for itself, and so do two that wait for each other: the
/// invalidation then gives up on the access, as [`TryAgain`] says, and what was unmapped stays out
/// of use until a later sync. In a kernel whose interrupts use device models, or unmap, accesses
/// and syncs run with interrupts off.
pub struct SoftIommu<F: Format, M: TableMemory<F::Word> = Arena, A = PhysAddr> {
    walks: Arc<Walks<F, M>>,
    again: TryAgain,
    addresses: PhantomData<fn() -> A>,
}

impl<F: Format + Clone, M: TableMemory<F::Word> + Clone> SoftIommu<F, M> {
    /// A software IOMMU that walks the tables of `table`, once there is a [`Domain`] of that table
    /// with this for its hooks.
    ///
    /// [`Domain`]: super::Domain
    pub fn over(table: &PageTable<F, M>) -> Self {
        let walks = Arc::new(Walks::new(View::new(table)));
        Self { walks, again: slot::spin, addresses: PhantomData }
    }
}

impl<F: Format, M: TableMemory<F::Word>, A: Address> SoftIommu<F, M, A> {
    /// The same for a domain whose devices reach memory by addresses `B`.
    ///
    /// ```
    /// use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
    /// use dmaspan::iommu::Domain;
    /// use dmaspan::iommu::soft::SoftIommu;
    /// use dmaspan::{HostAddr, PhysAddr};
    ///
    /// let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
    /// let table = PageTable::new(X86_64::new(X86_64Config::new(48, 52))?, tables)?;
    /// let iommu = SoftIommu::over(&table).reaching::<HostAddr>();
    /// let _domain = Domain::new(table, iommu.clone())?;
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// It is another software IOMMU over the table: no device model that has addresses `A` is given
    /// those of a domain of addresses `B`, and none that was made before reaches anything.
    pub fn reaching<B: Address>(self) -> SoftIommu<F, M, B>
    where
        F: Clone,
        M: Clone,
    {
        let walks = Arc::new(Walks::new(self.walks.view().again()));
        SoftIommu { walks, again: self.again, addresses: PhantomData }
    }

    /// The same with another way to wait for accesses that are under way. Set it before the domain
    /// gets its clone.
    ///
    /// It is asked between looks at one access of one device model, and how often it goes on is the
    /// bound of that: an invalidation fails where that access did not end, and no number of
    /// accesses that do end makes it fail. The one that is there at first spins, and gives up after
    /// some seconds. In a process, where an access may take long, one that sleeps is better:
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use dmaspan::iommu::soft::TryAgain;
    ///
    /// /// Ten seconds.
    /// const PATIENT: TryAgain = |tries| {
    ///     std::thread::sleep(Duration::from_micros(50));
    ///     tries < 200_000
    /// };
    /// ```
    pub fn waiting_by(self, again: TryAgain) -> Self {
        Self { again, ..self }
    }

    /// A new device model behind this IOMMU. Faults name it by the number `stream`.
    ///
    /// Each thread of a device model has one of its own, so that no two share an IOTLB and its
    /// lock.
    pub fn device(&self, stream: u32) -> SoftDevice<F, M, A> {
        let device = SoftDevice::new(stream);
        let mut models = self.walks.models.lock();
        // Without memory for it, and once the domain has ended, the device stays blocked.
        if self.walks.phase() != Phase::Ended && models.add(device.slot()).is_ok() {
            let tables = Route::Tables(Arc::clone(&self.walks));
            device.slot().state.lock().change(tables);
        }
        device
    }

    /// Waits until the device models before the number `end` have done what they were asked.
    fn wait(&self, ticket: Ticket, end: u64) -> Result<(), HardwareError> {
        let wait = |slot: &Slot<F, M>| slot.wait(ticket, self.again);
        slot::each(&self.walks.models, |models| models, end, wait)
    }
}

#[expect(unsafe_code, reason = "the trait is a promise about devices, kept as said above")]
// SAFETY:
// 1. A translation is kept and used under its slot's lock alone, and found by a walk under it. An
//    invalidation has each slot that was given these tables remove what its scope names, of all
//    sizes: it does that itself under the lock, or the device model does, under the lock and before
//    it looks anything up. It returns when that is done. So what it named is in no IOTLB then, no
//    access that used it is under way, and no walk that began before is: there is no other cache.
//    Locks order the CPU's stores before the walks that come later.
// 2. `detach` forbids walks first, then has every slot forget everything, which it waits for as
//    above. No slot is given the tables afterwards, since the phase is looked at under the lock of
//    the device models.
// 3. A root is set under the lock under which it was asked for. A walk that began at an older one
//    holds the lock of its slot; one that begins after a later invalidation sees the newer one,
//    as that had the lock in between, or left its wish after it.
// 4. `Address` is what device models are given, and they are given nothing else: those of a domain
//    of other addresses have other `Walks`.
// Tables are walked only after `begin`, whose caller promises that the hooks are those of the
// table's own domain, and only if the view is of that table; so these promises are all that frees
// them.
unsafe impl<F: Format, M: TableMemory<F::Word>, A: Address> IommuOps for SoftIommu<F, M, A> {
    type Address = A;

    fn begin(&self, _promise: Promise<'_>, root: &TableRoot) -> Result<(), HardwareError> {
        let _one_at_a_time = self.walks.models.lock();
        if self.walks.phase() != Phase::Made || !self.walks.view().is_of(root) {
            let what = "the software IOMMU is over another table, or its domain has ended";
            return Err(HardwareError { what, status: 0 });
        }
        self.walks.view().begin_at(root.paddr(), root.level());
        self.walks.set_phase(Phase::Serves);
        Ok(())
    }

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let mut ticket = None;
        let end = {
            let models = self.walks.models.lock();
            // Each of them, before any is waited for.
            models.iter().for_each(|slot| slot.forget(what.scope, &mut ticket));
            models.end()
        };
        ticket.map_or(Ok(()), |ticket| self.wait(ticket, end))
    }

    fn root_changed(
        &self,
        _promise: Promise<'_>,
        current: &dyn Fn() -> (PhysAddr, u32),
    ) -> Result<(), HardwareError> {
        let _one_at_a_time = self.walks.models.lock();
        let (root, level) = current();
        self.walks.view().begin_at(root, level);
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        let (ticket, end) = {
            let models = self.walks.models.lock();
            self.walks.set_phase(Phase::Ended);
            let ticket = Ticket::draw();
            models.iter().for_each(|slot| slot.ask_to_forget(Scope::All, ticket));
            (ticket, models.end())
        };
        self.wait(ticket, end)?;
        let models = mem::replace(&mut *self.walks.models.lock(), Models::new());
        drop(models);
        Ok(())
    }

    /// As many as a gather has: each costs a look at every device model.
    fn max_ranges(&self) -> usize {
        Gather::<()>::MAX_RANGES
    }
}

#[expect(unsafe_code, reason = "the driver is the hooks themselves")]
// SAFETY: there is nothing in between.
unsafe impl<F: Format, M: TableMemory<F::Word>, A: Address> DriverOps for SoftIommu<F, M, A> {
    type Driver = Self;

    fn driver(&self) -> &Self {
        self
    }
}

impl<F: Format, M: TableMemory<F::Word>, A> Clone for SoftIommu<F, M, A> {
    fn clone(&self) -> Self {
        let walks = Arc::clone(&self.walks);
        Self { walks, again: self.again, addresses: PhantomData }
    }
}

impl<F: Format, M: TableMemory<F::Word>, A> fmt::Debug for SoftIommu<F, M, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("SoftIommu");
        // Whoever has the lock may be what was interrupted for this.
        if let Some(models) = self.walks.models.try_lock() {
            fields.field("phase", &self.walks.phase()).field("devices", &models.iter().count());
        }
        fields.finish_non_exhaustive()
    }
}
