//! Memory that the kernel has mapped for devices: kept until it says that it is unmapped.
//!
//! [`DmaTable::map`] returns a [`KernelMapping`], which holds the memory. A mapping that is dropped
//! or forgotten leaks the memory, so a device never reaches memory that was freed. Only
//! [`KernelMapping::release`] gives it back, against the proof that the kernel unmapped the range
//! after it had mapped it.

#![expect(unsafe_code, reason = "lets devices use memory that a value owns")]

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::{Errno, IovaRange, Prot, UserAddr, UserRange};

use crate::mem::Memory;

/// What must live while a range is mapped.
pub(crate) type Owner = Arc<dyn Any + Send + Sync>;

/// What the kernel is asked to map.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    /// Memory of this process, from an address on.
    User(UserAddr),
    /// A file in memory or a dma-buf, from an offset on.
    File { fd: i32, offset: u64 },
    /// What another table of the same iommufd has from an IOVA on.
    Table { id: u32, iova: u64 },
}

/// Says what the kernel counts pinned memory against, whose limit is `RLIMIT_MEMLOCK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockedBy {
    /// What the process has locked and what VFIO has pinned for it (`VmLck` of proc(5)): VFIO's
    /// type 1, and iommufd where an option asks for it.
    Process,
    /// What all processes of the user have pinned; of this one, `VmPin` of proc(5) says it:
    /// iommufd, its compatibility mode too, and io_uring.
    User,
}

/// The kernel's side of an address space: the requests that change it.
///
/// # Safety
///
/// Devices reach nothing that they could not reach before but what `map` is asked for, as `prot`
/// says; where it fails, nothing. When `unmap` returns `Ok`, they reach nothing of what lies in the
/// range any more. Where it fails it has unmapped each mapping that lies in the range, or not; of a
/// range that is exactly one mapping's, [`NOTHING`] says that this mapping is gone. A file holds
/// the memory behind it by itself.
pub(crate) unsafe trait Kernel: fmt::Debug + Send + Sync {
    /// The names of the requests that map memory and unmap.
    const MAP: &'static str;
    /// See [`MAP`](Self::MAP).
    const UNMAP: &'static str;

    /// The name of the request that maps a source.
    fn request(source: Source) -> &'static str {
        let _ = source;
        Self::MAP
    }

    /// Maps; all or nothing.
    ///
    /// # Safety
    ///
    /// [`Source::User`] and [`Source::Table`]: the memory, or what is mapped there, stays what it
    /// is, and no code relies on it not being read and, where `prot` has `WRITE`, written at any
    /// time, until an `unmap` that covers `range` has returned `Ok`.
    unsafe fn map(&self, source: Source, range: IovaRange, prot: Prot) -> Result<(), Errno>;

    /// Unmaps what lies in the range, and returns how many bytes that was. The range of all 2^64
    /// addresses is one, too. On an error, some mappings in the range may be gone.
    fn unmap(&self, range: IovaRange) -> Result<u64, Errno>;

    /// Returns what the kernel counts pinned memory against.
    fn locked_by(&self) -> LockedBy;

    /// Whether memory that has a file is mapped by that first.
    fn maps_files(&self) -> bool {
        false
    }

    /// Whether a refusal of [`Source::File`] means that this kernel maps no files, or not this one,
    /// so that its memory is mapped by address.
    fn cannot_map_file(&self, errno: Errno) -> bool {
        let _ = errno;
        false
    }

    /// The number by which `by` names this table in [`Source::Table`]; `None` where it cannot: only
    /// tables of the same kernel, as the same open file of iommufd is one, have numbers for each
    /// other.
    fn table(&self, by: &Self) -> Option<u32> {
        let _ = by;
        None
    }
}

/// The answer to an unmap of a range in which nothing is mapped, where that is an error.
pub(crate) const NOTHING: Errno = Errno::ENOENT;

/// Says which request to map the kernel refused, and what it answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) request: &'static str,
    pub(crate) errno: Errno,
}

/// Says how many requests a table made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// To map.
    pub maps: u64,
    /// To unmap.
    pub unmaps: u64,
}

/// The kernel's table, with a clock that orders what it was asked.
#[derive(Debug)]
pub(crate) struct DmaTable<K> {
    kernel: K,
    /// Which table: no two have the same number.
    id: u64,
    clock: AtomicU64,
    maps: AtomicU64,
    unmaps: AtomicU64,
}

/// A range of a table that is mapped, and its memory. Dropped, it leaks the memory.
#[must_use = "dropped, it leaks the memory"]
pub(crate) struct KernelMapping {
    owner: ManuallyDrop<Owner>,
    range: IovaRange,
    table: u64,
    /// When the kernel had mapped it.
    mapped: u64,
}

impl fmt::Debug for KernelMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelMapping").field("range", &self.range).finish_non_exhaustive()
    }
}

/// The kernel has unmapped a range.
#[derive(Debug)]
pub(crate) struct UnmapProof {
    /// How many bytes were mapped there.
    pub(crate) bytes: u64,
    range: IovaRange,
    table: u64,
    /// When it was asked to.
    asked: u64,
}

static TABLES: AtomicU64 = AtomicU64::new(0);

impl<K: Kernel> DmaTable<K> {
    /// An empty table.
    pub(crate) fn new(kernel: K) -> Self {
        let zero = || AtomicU64::new(0);
        let id = TABLES.fetch_add(1, Ordering::Relaxed);
        Self { kernel, id, clock: zero(), maps: zero(), unmaps: zero() }
    }

    /// What the table is of.
    pub(crate) fn kernel(&self) -> &K {
        &self.kernel
    }

    /// The requests so far.
    pub(crate) fn requests(&self) -> Requests {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Requests { maps: read(&self.maps), unmaps: read(&self.unmaps) }
    }

    /// Maps `user`, which is in `memory`, at `range`, which is as long. The memory is kept until
    /// what is returned is released.
    pub(crate) fn map_memory(
        &self,
        memory: &Arc<Memory>,
        user: UserRange,
        range: IovaRange,
        prot: Prot,
    ) -> Result<KernelMapping, Refused> {
        let inside = memory.user_range().covers(user);
        if !inside || user.len_less_one() != range.len_less_one() {
            return Err(Refused { request: K::MAP, errno: Errno::EFAULT });
        }
        let owner: Owner = Arc::<Memory>::clone(memory);
        if let Some((fd, offset)) = memory.file_of(user).filter(|_| self.kernel.maps_files()) {
            let source = Source::File { fd: fd.as_raw_fd(), offset };
            // SAFETY:
            // 1. The kernel holds the memory of the file (the contract of `Kernel`), of which the
            //    process has a shared mapping at `user`, so that devices may access it as below.
            match unsafe { self.map(Arc::clone(&owner), source, range, prot) } {
                Err(Refused { errno, .. }) if self.kernel.cannot_map_file(errno) => {}
                result => return result,
            }
        }
        // SAFETY:
        // 1. All of `user` is in the memory, and the range is no longer.
        // 2. While a `Memory` lives its bytes stay mapped, and they are accessed as atomic bytes
        //    alone, which devices may read and write at any time (its module's contract).
        unsafe { self.map(owner, Source::User(user.start()), range, prot) }
    }

    /// Maps at `range` what `from` has at `source`, which is as long and all in `mapped`,
    /// neighbours in this order. What they own is kept until what is returned is released.
    ///
    /// # Safety
    ///
    /// Until this returns, what `from` has in the ranges of `mapped` is what they keep, or nothing:
    /// nothing else was mapped there after they had been, nor is meanwhile.
    pub(super) unsafe fn map_copy(
        &self,
        from: &Self,
        mapped: &[Arc<KernelMapping>],
        source: IovaRange,
        range: IovaRange,
        prot: Prot,
    ) -> Result<KernelMapping, Refused> {
        let refused = |errno| {
            let request = K::request(Source::Table { id: 0, iova: source.start().get() });
            Refused { request, errno }
        };
        let id = from.kernel.table(&self.kernel).ok_or(refused(Errno::EOPNOTSUPP))?;
        let is_theirs = mapped.iter().all(|kept| kept.table == from.id);
        let neighbours = mapped.windows(2).all(|pair| match pair {
            [one, next] => one.range.last().checked_add(1) == Some(next.range.start()),
            _ => true,
        });
        let hull = mapped.first().zip(mapped.last());
        let hull =
            hull.and_then(|(one, last)| IovaRange::new(one.range.start(), last.range.last()));
        if !is_theirs
            || !neighbours
            || hull.is_none_or(|hull| !hull.covers(source))
            || source.len_less_one() != range.len_less_one()
        {
            return Err(refused(Errno::ENOENT));
        }
        let owners: Vec<Owner> = mapped.iter().map(|kept| Owner::clone(&kept.owner)).collect();
        let source = Source::Table { id, iova: source.start().get() };
        // SAFETY:
        // 1. Devices may access what the owners hold while they live (the promise to `map` when it
        //    was mapped in `from`), and `source` names nothing else (checked above, and promised by
        //    the caller).
        unsafe { self.map(Arc::new(owners), source, range, prot) }
    }

    /// Maps at `range` what a file in memory, or a dma-buf, has from `offset` on.
    pub(crate) fn map_file(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        range: IovaRange,
        prot: Prot,
    ) -> Result<KernelMapping, Refused> {
        let source = Source::File { fd: file.as_raw_fd(), offset };
        // SAFETY:
        // 1. The kernel holds the memory of the file (the contract of `Kernel`), and that a file
        //    changes is nothing that code may rely on not to happen.
        unsafe { self.map(Arc::new(()), source, range, prot) }
    }

    /// Maps `source` at `range`, and keeps `owner` until it is released.
    ///
    /// # Safety
    ///
    /// While `owner` lives, devices may access what `source` names, `range` long, as `prot` says.
    pub(super) unsafe fn map(
        &self,
        owner: Owner,
        source: Source,
        range: IovaRange,
        prot: Prot,
    ) -> Result<KernelMapping, Refused> {
        self.maps.fetch_add(1, Ordering::Relaxed);
        // Kept also where the request panics.
        let owner = ManuallyDrop::new(owner);
        // SAFETY:
        // 1. While `owner` lives, devices may access it (the caller's promise).
        // 2. It lives until `KernelMapping::release`, which wants the proof of an unmap that was
        //    asked for after this; where there is none, for ever.
        if let Err(errno) = unsafe { self.kernel.map(source, range, prot) } {
            // A refused request mapped nothing (the contract of `Kernel`).
            drop(ManuallyDrop::into_inner(owner));
            return Err(Refused { request: K::request(source), errno });
        }
        let mapped = self.clock.fetch_add(1, Ordering::AcqRel);
        Ok(KernelMapping { owner, range, table: self.id, mapped })
    }

    /// Unmaps what lies in `range`.
    pub(super) fn unmap(&self, range: IovaRange) -> Result<UnmapProof, Errno> {
        self.unmaps.fetch_add(1, Ordering::Relaxed);
        let asked = self.clock.fetch_add(1, Ordering::AcqRel);
        let bytes = self.kernel.unmap(range)?;
        Ok(UnmapProof { bytes, range, table: self.id, asked })
    }

    /// Unmaps what one request mapped, or finds that an unmap that failed has done so: the bytes of
    /// the proof are then those that it had.
    pub(super) fn unmap_one(&self, kept: &KernelMapping) -> Result<UnmapProof, Errno> {
        self.unmaps.fetch_add(1, Ordering::Relaxed);
        let asked = self.clock.fetch_add(1, Ordering::AcqRel);
        let bytes = match self.kernel.unmap(kept.range) {
            // The range is exactly that of one mapping, which is gone (the contract of `Kernel`).
            Ok(0) | Err(NOTHING) => kept.range.checked_len().unwrap_or(u64::MAX),
            result => result?,
        };
        Ok(UnmapProof { bytes, range: kept.range, table: self.id, asked })
    }
}

impl KernelMapping {
    /// What it keeps, where that is memory.
    pub(super) fn memory(&self) -> Option<Arc<Memory>> {
        Arc::clone(&self.owner).downcast().ok()
    }

    /// Gives the memory back.
    ///
    /// # Errors
    ///
    /// This, where the proof is not of its range in its table, or older than the mapping.
    pub(crate) fn release(self, proof: &UnmapProof) -> Result<Owner, Self> {
        let covered = proof.range.covers(self.range);
        if self.table == proof.table && covered && proof.asked > self.mapped {
            // No device reaches it any more: the kernel said so of a range that covers it, after it
            // had been mapped.
            Ok(ManuallyDrop::into_inner(self.owner))
        } else {
            Err(self)
        }
    }
}

#[cfg(test)]
pub(crate) mod fake;

#[cfg(test)]
mod tests {
    use dmaspan::Iova;

    use super::*;

    /// A kernel that says yes to everything.
    #[derive(Debug)]
    struct Willing;

    // SAFETY: there is no device.
    unsafe impl Kernel for Willing {
        const MAP: &'static str = "map";
        const UNMAP: &'static str = "unmap";

        unsafe fn map(&self, _: Source, _: IovaRange, _: Prot) -> Result<(), Errno> {
            Ok(())
        }

        fn unmap(&self, _: IovaRange) -> Result<u64, Errno> {
            Ok(0)
        }

        fn locked_by(&self) -> LockedBy {
            LockedBy::Process
        }
    }

    fn range(start: u64, last: u64) -> IovaRange {
        IovaRange::new(Iova::new(start), Iova::new(last)).unwrap()
    }

    fn map(table: &DmaTable<Willing>, owner: &Arc<()>, range: IovaRange) -> KernelMapping {
        let owner: Owner = Arc::<()>::clone(owner);
        // SAFETY: nothing is mapped for any device.
        unsafe { table.map(owner, Source::User(UserAddr::new(0)), range, Prot::READ) }.unwrap()
    }

    #[test]
    fn memory_is_given_back_against_a_later_unmap_of_all_of_it_in_its_table_alone() {
        let (table, other, owner) = (DmaTable::new(Willing), DmaTable::new(Willing), Arc::new(()));
        let early = table.unmap(range(0, u64::MAX)).unwrap();
        let mut kept = map(&table, &owner, range(0x1000, 0x2fff));
        let foreign = other.unmap(range(0, u64::MAX)).unwrap();
        let narrow = table.unmap(range(0x1000, 0x1fff)).unwrap();
        for proof in [&early, &foreign, &narrow] {
            kept = kept.release(proof).unwrap_err();
        }
        assert_eq!(Arc::strong_count(&owner), 2);
        let proof = table.unmap(range(0, u64::MAX)).unwrap();
        drop(kept.release(&proof).unwrap());
        assert_eq!(Arc::strong_count(&owner), 1);
        assert_eq!(table.requests(), Requests { maps: 1, unmaps: 3 });
    }

    #[test]
    fn what_is_dropped_before_it_is_unmapped_is_leaked() {
        let (table, owner) = (DmaTable::new(Willing), Arc::new(()));
        drop(map(&table, &owner, range(0, 0xfff)));
        assert_eq!(Arc::strong_count(&owner), 2);
    }
}
