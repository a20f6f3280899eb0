//! The `Iommu` of [vm-memory](https://docs.rs/vm-memory/0.18) over page tables of dmaspan.
//!
//! A VMM that emulates an IOMMU for its guest keeps what the guest has mapped in a [`TableIommu`].
//! `vm_memory::IommuMemory` with it is the memory that a device behind that IOMMU has: the device
//! models of rust-vmm take it as they take guest memory, and give it IOVAs.
//!
//! ```
//! use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
//! use dmaspan::{Iova, IovaRange, PhysAddr, Prot};
//! use dmaspan_vm_memory::TableIommu;
//! use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, IommuMemory};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let tables = Arena::new(PhysAddr::new(1 << 40), 1 << 20);
//!     let table = PageTable::new(X86_64::new(X86_64Config::new(48, 52))?, tables)?;
//!     let iommu = TableIommu::new(table)?;
//!     let guest: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10_0000)])?;
//!     let memory = IommuMemory::new(guest, iommu.clone(), true, ());
//!
//!     // The guest asks for it by its IOMMU's interface.
//!     let range = IovaRange::from_len(Iova::new(0x4000_0000), 0x2000)?;
//!     iommu.map(range, GuestAddress(0x8000), Prot::READ_WRITE)?;
//!     memory.write_slice(b"from a device", GuestAddress(0x4000_0ff8))?;
//!     let mut there = [0; 13];
//!     memory.get_backend().read_slice(&mut there, GuestAddress(0x8ff8))?;
//!     assert_eq!(&there, b"from a device");
//!
//!     iommu.unmap(range)?;
//!     assert!(memory.write_slice(b"late", GuestAddress(0x4000_0000)).is_err());
//!     Ok(())
//! }
//! ```
//!
//! - **The caches are vm-memory's own `Iotlb`s.** Each access has one to itself, mostly that which
//!   its thread had before. A miss adds one entry for a whole run of the tables: contiguous
//!   addresses with the same permissions, whatever their leaves. Absent entries are not kept. All
//!   IOTLBs together have [`MOST_ENTRIES`] at most, before those that are not in use forget
//!   everything.
//! - **Accesses wait for nobody**, neither for other accesses nor for unmaps, whether they hit or
//!   miss. A thread may begin one in the middle of another.
//! - **Nothing is stale behind an unmap.** An access lasts as long as vm-memory's iterator over its
//!   slices. An unmap waits for accesses that began before it and meet its range. A slice that is
//!   kept longer than the iterator, as by `collect`, is not waited for: it reaches memory of the
//!   guest that the device has no more.
//! - **The table is of any format.** Its own domain alone changes it.

mod iotlbs;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use dmaspan::io_pgtable::{self, Arena, Format, MappedRun, PageTable, TableMemory, Walk};
use dmaspan::iommu::{self, Domain, Gather, HardwareError, Invalidation, IommuOps, Scope};
use dmaspan::{Iova, IovaRange, PhysAddr, Promise, Prot, Span};
use parking_lot::Mutex;
use vm_memory::iommu::{Error as Untranslated, Iotlb, IotlbIterator};
use vm_memory::{GuestAddress, Iommu, Permissions};

pub use iotlbs::IotlbGuard;
use iotlbs::Iotlbs;

/// With so many entries in all of them the IOTLBs forget, before one gets another: all but those
/// that accesses under way use. The crate's own evicts none. An access to so many runs that they do
/// not fit is refused.
pub const MOST_ENTRIES: usize = 1 << 16;

/// A run is looked for up to the next multiple of this, so that a miss in the middle of a guest's
/// terabytes does not read all of their tables.
const WINDOW: u64 = 1 << 30;

/// What the guest has mapped for devices behind an emulated IOMMU, and vm-memory's `Iommu` over it.
///
/// Clones are the same: one goes into each `IommuMemory`, and the device model of the IOMMU keeps
/// one, by which it maps and unmaps. What is mapped are addresses of the guest. Whether memory is
/// there is looked at by the `GuestMemoryBackend` of each `IommuMemory`, with each access.
///
/// # Context
///
/// Any number of threads translate at once, and wait for nobody. Maps and unmaps take turns at the
/// tables. Then an unmap waits for accesses that began before it and meet its range, as long as
/// none of them takes ten seconds; nobody else waits for that. A thread in the middle of an access
/// of its own may map, and unmap what the access does not meet.
pub struct TableIommu<F: Format, M: TableMemory<F::Word> = Arena> {
    shared: Arc<Shared<F, M>>,
}

struct Shared<F: Format, M: TableMemory<F::Word>> {
    domain: Domain<F, M, Invalidator>,
    iotlbs: Arc<Iotlbs>,
    /// Has all IOVAs of the domain: whoever maps or unmaps holds it while it works on the tables,
    /// and waits for nothing meanwhile.
    changes: Mutex<()>,
}

/// The hooks of the domain.
#[derive(Debug)]
struct Invalidator(Arc<Iotlbs>);

impl<F: Format, M: TableMemory<F::Word>> TableIommu<F, M> {
    /// An IOMMU over an empty table.
    ///
    /// # Errors
    ///
    /// As [`Domain::new`].
    pub fn new(table: PageTable<F, M>) -> Result<Self, iommu::Error> {
        let iotlbs = Arc::<Iotlbs>::default();
        let domain = Domain::new(table, Invalidator(Arc::clone(&iotlbs)))?;
        Ok(Self { shared: Arc::new(Shared { domain, iotlbs, changes: Mutex::new(()) }) })
    }

    /// What is mapped in `range`, also while others map and unmap there: see [`PageTable::walk`].
    pub fn walk(&self, range: IovaRange) -> Walk<'_, F, M> {
        self.shared.domain.walk(range)
    }

    /// Maps `range` to the guest's addresses from `to` on.
    ///
    /// # Errors
    ///
    /// [`iommu::Error`], with nothing changed: where a part of `range` is mapped or outside the
    /// aperture, or something is no multiple of the granule.
    pub fn map(&self, range: IovaRange, to: GuestAddress, prot: Prot) -> Result<(), iommu::Error> {
        let len = range.checked_len().unwrap_or(u64::MAX);
        let span = Span::new(PhysAddr::new(to.0), len).map_err(|_| self.outside(range))?;
        let _changes = self.shared.changes.lock();
        // Before anything is mapped: what is taken back is waited for, and with the lock.
        let taken = self.shared.domain.walk(range).next();
        if let Some(leaf) = taken.and_then(|run| self.leaf_at(run.range.start())) {
            return Err(io_pgtable::Error::Occupied { leaf }.into());
        }
        #[expect(unsafe_code, reason = "lets device models at memory of the guest")]
        // SAFETY:
        // 1. All maps and unmaps of the domain take the lock above.
        // 2. The devices of the domain are `IommuMemory`s, which reach what their backend has at an
        //    address, as vm-memory's volatile slices, and nothing where it has nothing.
        unsafe { self.shared.domain.map_spans(range.start(), &[span], prot) }?;
        Ok(())
    }

    /// Unmaps what is mapped in `range`, whatever holes are between, and returns how many bytes
    /// that was. When it returns, no access to it is under way.
    ///
    /// # Errors
    ///
    /// [`iommu::Error`]: with nothing changed where `range` cuts a leaf or is not of whole
    /// granules; and as [`Hardware`](iommu::Error::Hardware) where this thread is in the middle of
    /// an access that meets `range`, for which it would wait for ever. `Hardware` also where an
    /// access of another thread that meets `range` did not end in ten seconds; then `range` is
    /// unmapped, and that access may go on.
    pub fn unmap(&self, range: IovaRange) -> Result<u64, iommu::Error> {
        let domain = &self.shared.domain;
        if self.shared.iotlbs.is_within(range) {
            let what = "this thread has to end its own access there first; nothing was unmapped";
            let source = HardwareError { what, status: 0 };
            return Err(iommu::Error::Hardware { range, source });
        }
        let changes = self.shared.changes.lock();
        for end in [range.start(), range.last()] {
            if let Some(leaf) = self.leaf_at(end).filter(|&leaf| !range.covers(leaf)) {
                return Err(io_pgtable::Error::WouldSplit { leaf }.into());
            }
        }
        let runs = domain.walk(range).map(|run| run.range.checked_len().unwrap_or(u64::MAX));
        let bytes = runs.fold(0, u64::saturating_add);
        #[expect(unsafe_code, reason = "the lock is what owns the IOVAs")]
        // SAFETY:
        // 1. All maps and unmaps of the domain take the lock above, and no leaf reaches out of the
        //    range: it would have its first or its last address.
        let unsynced = unsafe { domain.remove(range) }?;
        // Accesses that are waited for are in nobody else's way. What is mapped there meanwhile is
        // no part of what was taken away.
        drop(changes);
        let (_synced, _) = unsynced.sync()?;
        Ok(bytes)
    }

    /// The leaf that translates an address, while nobody maps or unmaps.
    fn leaf_at(&self, iova: Iova) -> Option<IovaRange> {
        let domain = &self.shared.domain;
        let sizes = domain.geometry().page_sizes;
        (0..u64::BITS).filter(|lg2| sizes >> lg2 & 1 == 1).find_map(|lg2| {
            let start = Iova::new(iova.get() >> lg2 << lg2);
            let begun = domain.census(IovaRange::point(start)).count(lg2);
            IovaRange::from_len(start, 1 << lg2).ok().filter(|_| begun != 0)
        })
    }

    fn outside(&self, range: IovaRange) -> iommu::Error {
        let aperture = self.shared.domain.geometry().aperture;
        io_pgtable::Error::OutsideAperture { range, aperture }.into()
    }

    /// What is mapped in `range`, all of which permits `access`.
    fn runs(
        &self,
        range: IovaRange,
        access: Permissions,
    ) -> Result<Vec<MappedRun>, Cow<'static, str>> {
        let domain = &self.shared.domain;
        let aperture = domain.geometry().aperture;
        if !aperture.covers(range) {
            return Err("it leaves the IOMMU's aperture".into());
        }
        let mut next = range.start().get() >> F::GRANULE_LG2 << F::GRANULE_LG2;
        let mut runs = Vec::new();
        loop {
            let end = next.max(range.last().get()) | (WINDOW - 1);
            let window = IovaRange::new(Iova::new(next), aperture.last().min(Iova::new(end)));
            let run = window.and_then(|window| domain.walk(window).next());
            let run =
                run.filter(|run| run.range.start().get() == next).ok_or("a part is not mapped")?;
            if !permissions(run.prot).allow(access) {
                return Err("a part is not mapped for this access".into());
            }
            if runs.len() == MOST_ENTRIES {
                return Err(format!("it is of more than {MOST_ENTRIES} runs of memory").into());
            }
            runs.push(run);
            match run.range.last().checked_add(1) {
                Some(after) if run.range.last() < range.last() => next = after.get(),
                _ => return Ok(runs),
            }
        }
    }
}

const fn permissions(prot: Prot) -> Permissions {
    match (prot.contains(Prot::READ), prot.contains(Prot::WRITE)) {
        (false, false) => Permissions::No,
        (true, false) => Permissions::Read,
        (false, true) => Permissions::Write,
        (true, true) => Permissions::ReadWrite,
    }
}

impl<F: Format, M: TableMemory<F::Word>> Iommu for TableIommu<F, M>
where
    Self: Send + Sync,
{
    type IotlbGuard<'a>
        = IotlbGuard<'a>
    where
        Self: 'a;

    fn translate(
        &self,
        iova: GuestAddress,
        length: usize,
        access: Permissions,
    ) -> Result<IotlbIterator<Self::IotlbGuard<'_>>, Untranslated> {
        let cannot = |reason: &str| Untranslated::CannotResolve {
            iova_range: vm_memory::iommu::IovaRange { base: iova, length },
            reason: reason.to_owned(),
        };
        // The crate adds them without a look.
        let wraps = u64::try_from(length).ok().and_then(|len| iova.0.checked_add(len)).is_none();
        if wraps {
            return Err(cannot("it ends beyond 2^64 - 1"));
        }
        let begin = || self.shared.iotlbs.begin(iova.0, length);
        let too_many = || cannot("too many accesses are under way");
        let first = begin().ok_or_else(too_many)?;
        if let Ok(found) = Iotlb::lookup(first, iova, length, access) {
            return Ok(found);
        }
        let range = IovaRange::from_len(Iova::new(iova.0), length as u64);
        let range = range.map_err(|_| cannot("it is empty"))?;
        // Begun before the tables are read: an unmap that takes away what is found waits for it.
        let mut access_to = begin().ok_or_else(too_many)?;
        let runs = self.runs(range, access).map_err(|reason| cannot(&reason))?;
        self.shared.iotlbs.add(&mut access_to.cache, &runs).map_err(cannot)?;
        Iotlb::lookup(access_to, iova, length, access).map_err(|_| cannot("a part is not mapped"))
    }
}

#[expect(unsafe_code, reason = "the trait is a promise about devices, kept as said above")]
// SAFETY:
// 1. Devices translate by the IOTLB of their access alone, from its begin until the iterator over
//    the slices is dropped, and what they miss they look for within it. An invalidation enters in
//    the log what it names, and then waits for all accesses that meet it and do not know of it.
//    Others have taken it out of their IOTLBs before they look there, and walk tables that have it
//    no more: they read the count of the log after the CPU's stores to the tables.
// 2. The domain is dropped after the last `TableIommu`. Accesses borrow theirs, so none is under
//    way then; those that were forgotten do nothing any more.
// 3. Each walk asks the domain for its root.
// 4. What devices are given are the guest's addresses, which are those that were mapped.
unsafe impl IommuOps for Invalidator {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        match what.scope {
            Scope::All => self.0.forget(&[IovaRange::ALL]),
            Scope::Ranges(ranges) => self.0.forget(ranges),
        }
    }

    fn root_changed(
        &self,
        _promise: Promise<'_>,
        _current: &dyn Fn() -> (PhysAddr, u32),
    ) -> Result<(), HardwareError> {
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        Gather::<()>::MAX_RANGES
    }
}

impl<F: Format, M: TableMemory<F::Word>> Clone for TableIommu<F, M> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<F: Format, M: TableMemory<F::Word>> fmt::Debug for TableIommu<F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { domain, iotlbs, .. } = &*self.shared;
        f.debug_struct("TableIommu").field("domain", domain).field("iotlbs", iotlbs).finish()
    }
}
