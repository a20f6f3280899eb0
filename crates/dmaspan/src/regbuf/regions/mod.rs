//! [`Regions`] are a client's memory as a server reaches it. Parts of it are held while something
//! uses them, and are a source of buffers.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use lock_api::{Mutex, RawMutex};

use super::buffer::{Buffer, Keep};
use super::builder::{BuildError, SegmentsBuilder};
use super::segments::Segments;
use super::source::{Owner, Source};
use crate::addr::{Address, HostAddr};
use crate::error::Errno;
use crate::platform::Identity;
use crate::prot::Prot;
use crate::range::{RangeError, UserRange};
use crate::span::Span;

mod error;
mod held;
mod memory;
mod region;
mod unmapping;

pub use error::{HeldError, RegionError};
pub use held::{Held, HostSlices};
pub use memory::{HostMemory, HostSlice, RemoteMemory};
pub use unmapping::Unmapping;

use held::Piece;
use region::{Backing, Region};

/// The memory of a client as this server reaches it: which of the client's addresses are where.
///
/// That is all that a vfio-user or vhost-user server has of a guest's memory. The client says what
/// it shares, region by region, and takes regions back. A region is mapped in this program
/// ([`insert`](Self::insert)), or reached by asking the client
/// ([`insert_remote`](Self::insert_remote)). A device model [holds](Self::hold) what a descriptor
/// names, over as many neighbouring regions as it lies in, and reads and writes it; buffers that
/// are used for ever are registered by a [`Registry`](super::Registry) over the regions.
///
/// Nothing is pinned or charged here: that is the client's. A region's memory stays while something
/// holds some of it, also after it was [unmapped](Self::unmap), and the client is answered when the
/// [`Unmapping`] is done.
///
/// `A` is the kind of the client's addresses: [`Iova`](crate::Iova) for vfio-user,
/// [`UserAddr`](crate::UserAddr) for vhost-user. `L` is the kind of lock: regions come and go while
/// others hold them. A process has `dmaspan_linux::client::ClientRegions`.
///
/// ```
/// use dmaspan::{Iova, Prot};
/// use dmaspan_linux::client::{self, ClientRegions};
/// use dmaspan_linux::{Memory, MemoryKind};
///
/// // DMA_MAP: a file that the client sent, here one of this process.
/// let (file_of, regions) = (Memory::new(MemoryKind::Memfd, 0x10_0000)?, ClientRegions::new());
/// let (fd, offset) = file_of.file().ok_or("a memfd has a file")?;
/// let ram = client::map_file(fd.try_clone_to_owned()?, offset, 0x10_0000, Prot::READ_WRITE)?;
/// regions.insert(Iova::new(0x4000_0000), Prot::READ_WRITE, ram)?;
///
/// // A descriptor names 0x200 bytes, into which the device model writes.
/// let held = regions.hold(Iova::new(0x4000_4200), 0x200, Prot::WRITE)?;
///
/// // DMA_UNMAP comes meanwhile: it is answered when nothing holds the region any more.
/// let mut unmapping = regions.unmap(Iova::new(0x4000_0000), 0x10_0000)?;
/// assert!(!unmapping.is_done());
/// held.write(0, b"done")?;
/// drop(held);
/// assert_eq!(client::wait(unmapping, std::time::Duration::from_secs(1))?, 0x10_0000);
/// let mut bytes = [0; 4];
/// file_of.read(0x4200, &mut bytes)?;
/// assert_eq!(&bytes, b"done");
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Regions<A: Address, L: RawMutex> {
    identity: Identity,
    /// In the order of their addresses, apart from each other.
    table: Mutex<L, Vec<Entry<A, L>>>,
}

struct Entry<A: Address, L: RawMutex> {
    /// That of the region, beside its neighbours'.
    range: Span<A>,
    region: Arc<Region<A, L>>,
}

impl<A: Address, L: RawMutex> Default for Regions<A, L> {
    fn default() -> Self {
        Self { identity: Identity::new(), table: Mutex::new(Vec::new()) }
    }
}

impl<A: Address, L: RawMutex> Regions<A, L> {
    /// A client that shares nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns how many regions there are.
    pub fn count(&self) -> usize {
        self.table.lock().len()
    }

    /// Says that `memory`, which is mapped in this program, is what the client has at `start`, and
    /// that it may be accessed as `access` says, the read and write permissions of which count.
    /// Returns the client's addresses.
    ///
    /// # Errors
    ///
    /// With nothing changed: [`RegionError::NoAccess`], [`RegionError::Empty`],
    /// [`RegionError::Wraps`], [`RegionError::Overlaps`], [`RegionError::Memory`] where the memory
    /// [permits](HostMemory::access) less, and [`RegionError::NoMemory`].
    ///
    /// # Context
    ///
    /// Takes a lock, and allocates.
    pub fn insert(
        &self,
        start: A,
        access: Prot,
        memory: Arc<dyn HostMemory>,
    ) -> Result<Span<A>, RegionError<A>> {
        let len = u64::try_from(memory.slice().len()).unwrap_or(u64::MAX);
        let mapped = memory.access() & Prot::READ_WRITE;
        if !mapped.contains(access & Prot::READ_WRITE) {
            let range = range_of(start, len)?;
            return Err(RegionError::Memory { range, wanted: access, mapped });
        }
        self.add(start, len, access, Backing::Mapped(memory))
    }

    /// Says that the client has `len` bytes at `start` that are not mapped here, and that `client`
    /// reads and writes them by asking it. They may be accessed as `access` says. Returns the
    /// client's addresses.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    ///
    /// use dmaspan::regbuf::RemoteMemory;
    /// use dmaspan::{Errno, Iova, Prot};
    /// use dmaspan_linux::client::ClientRegions;
    ///
    /// /// Sends DMA_READ and DMA_WRITE; here the client's memory is at hand.
    /// struct Messages(Mutex<Vec<u8>>);
    ///
    /// impl RemoteMemory for Messages {
    ///     fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Errno> {
    ///         let from = usize::try_from(offset).map_err(|_| Errno::EFAULT)?;
    ///         let memory = self.0.lock().map_err(|_| Errno::EIO)?;
    ///         let source = memory.get(from..from + bytes.len()).ok_or(Errno::EFAULT)?;
    ///         bytes.copy_from_slice(source);
    ///         Ok(())
    ///     }
    ///
    ///     fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
    ///         let to = usize::try_from(offset).map_err(|_| Errno::EFAULT)?;
    ///         let mut memory = self.0.lock().map_err(|_| Errno::EIO)?;
    ///         let target = memory.get_mut(to..to + bytes.len()).ok_or(Errno::EFAULT)?;
    ///         target.copy_from_slice(bytes);
    ///         Ok(())
    ///     }
    /// }
    ///
    /// let regions = ClientRegions::new();
    /// let client = Arc::new(Messages(Mutex::new(vec![0; 0x1000])));
    /// regions.insert_remote(Iova::new(0x7000), 0x1000, Prot::READ_WRITE, client)?;
    /// let held = regions.hold(Iova::new(0x7800), 0x100, Prot::READ_WRITE)?;
    /// held.write(0x10, b"asked for")?;
    /// let mut bytes = [0; 9];
    /// held.read(0x10, &mut bytes)?;
    /// assert_eq!(&bytes, b"asked for");
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert).
    ///
    /// # Context
    ///
    /// As [`insert`](Self::insert).
    pub fn insert_remote(
        &self,
        start: A,
        len: u64,
        access: Prot,
        client: Arc<dyn RemoteMemory>,
    ) -> Result<Span<A>, RegionError<A>> {
        self.add(start, len, access, Backing::Remote(client))
    }

    /// The first region that does not end below an address, and what it permits.
    fn region_from(&self, at: A) -> Option<(Span<A>, Prot)> {
        let table = self.table.lock();
        table.get(first_at(&table, at)).map(|entry| (entry.range, entry.region.access))
    }

    fn add(
        &self,
        start: A,
        len: u64,
        access: Prot,
        backing: Backing,
    ) -> Result<Span<A>, RegionError<A>> {
        let access = access & Prot::READ_WRITE;
        if !access.permits_access() {
            return Err(RegionError::NoAccess { start, access });
        }
        let range = range_of(start, len)?;
        // Made before the lock, and where it is refused dropped behind it.
        let region = Region::new(range, access, backing);
        let mut table = self.table.lock();
        let at = first_at(&table, start);
        if let Some(existing) = table.get(at).filter(|next| next.range.start() <= range.last()) {
            return Err(RegionError::Overlaps { range, existing: existing.range });
        }
        let regions = table.len() + 1;
        table.try_reserve(1).map_err(|_| RegionError::NoMemory { regions })?;
        table.insert(at, Entry { range, region });
        Ok(range)
    }

    /// Takes all regions back that lie in `len` bytes from `start` on: none, one, or several. From
    /// now on nobody gets any of them. What holds some keeps it, and the returned [`Unmapping`]
    /// says when nothing does.
    ///
    /// A range without a region is no error: nothing is unmapped then, as VFIO has it
    /// (`vfio_dma_do_unmap` of Linux, drivers/vfio/vfio_iommu_type1.c, in version 2).
    ///
    /// # Errors
    ///
    /// With nothing changed: [`RegionError::Empty`], [`RegionError::Wraps`], and
    /// [`RegionError::Cuts`] where the range has a part of a region.
    ///
    /// # Context
    ///
    /// Takes a lock; allocates nothing. Memory that nothing holds is let go at once, without the
    /// lock.
    pub fn unmap(&self, start: A, len: u64) -> Result<Unmapping<A, L>, RegionError<A>> {
        let range = range_of(start, len)?;
        let table = self.table.lock();
        let (first, behind) = (first_at(&table, start), behind(&table, range.last()));
        let covered = table.get(first..behind).unwrap_or_default();
        if let Some(cut) = covered.iter().find(|entry| !covers(range, entry.range)) {
            return Err(RegionError::Cuts { range, region: cut.range });
        }
        Ok(take(table, first..behind))
    }

    /// Takes all regions back, as [`unmap`](Self::unmap) does: what a client asks for that sets
    /// `VFIO_DMA_UNMAP_FLAG_ALL`, or that is gone.
    ///
    /// # Context
    ///
    /// As [`unmap`](Self::unmap).
    pub fn unmap_all(&self) -> Unmapping<A, L> {
        let table = self.table.lock();
        let all = 0..table.len();
        take(table, all)
    }

    /// Holds `len` bytes from `start` on, for accesses as `access` says, the read and write
    /// permissions of which count. They may lie in several neighbouring regions.
    ///
    /// # Errors
    ///
    /// [`RegionError::Empty`], [`RegionError::Wraps`], [`RegionError::NoAccess`],
    /// [`RegionError::Hole`], [`RegionError::Access`] where a region permits less, and
    /// [`RegionError::NoMemory`].
    ///
    /// # Context
    ///
    /// Takes a lock for a binary search. Allocates only for a range over several regions.
    pub fn hold(&self, start: A, len: u64, access: Prot) -> Result<Held<A, L>, RegionError<A>> {
        let access = access & Prot::READ_WRITE;
        if !access.permits_access() {
            return Err(RegionError::NoAccess { start, access });
        }
        self.hold_range(range_of(start, len)?, access)
    }

    fn hold_range(&self, range: Span<A>, access: Prot) -> Result<Held<A, L>, RegionError<A>> {
        let table = self.table.lock();
        let first = first_at(&table, range.start());
        let (first, others) = match table.get(first..).and_then(<[_]>::split_first) {
            Some((first, others)) => (first, others),
            None => return Err(hole(range, range.start(), None)),
        };
        let covering = others.partition_point(|entry| entry.range.start() <= range.last());
        let others = others.get(..covering).unwrap_or_default();
        let (first, mut next) = piece(range, access, first, Some(range.start()))?;
        let mut rest = Vec::new();
        if !others.is_empty() {
            let no_memory = |_| RegionError::NoMemory { regions: others.len() };
            rest.try_reserve_exact(others.len()).map_err(no_memory)?;
        }
        for entry in others {
            let (piece, behind) = piece(range, access, entry, next)?;
            rest.push(piece);
            next = behind;
        }
        match next.filter(|next| *next <= range.last()) {
            Some(missing) => Err(hole(range, missing, None)),
            None => Ok(Held::new(range, access, first, rest)),
        }
    }

    /// A buffer of `user`, numbers of the client's addresses: what [`Source::buffer`] does, without
    /// the trait. Its segments are addresses of this program, whose provenance is exposed; the
    /// memory is held while the buffer exists.
    ///
    /// # Errors
    ///
    /// As [`hold`](Self::hold), [`RegionError::NotMapped`], and [`RegionError::Segments`].
    ///
    /// # Context
    ///
    /// Takes a lock, and allocates.
    pub fn buffer(&self, user: UserRange, access: Prot) -> Result<Buffer<HostAddr>, RegionError<A>>
    where
        L: Send + Sync + 'static,
    {
        let start = A::new(user.start().get());
        let Some(len) = user.checked_len() else {
            // As much of it as a span can be.
            let range = Span::covering(start, u64::MAX - 1);
            return Err(RegionError::Segments { range, error: BuildError::TooLong });
        };
        let held = self.hold(start, len, access)?;
        let (range, access) = (held.range(), held.access());
        let failed = |error| RegionError::Segments { range, error };
        let mut builder = SegmentsBuilder::new();
        let slices = held.slices(0, len).map_err(|error| match error {
            HeldError::NotMapped { part } => RegionError::NotMapped { range, region: part },
            _ => hole(range, start, None),
        })?;
        for slice in slices {
            let span = slice.span().map_err(|_| hole(range, start, None))?;
            builder.push(span).map_err(failed)?;
        }
        let segments = builder.build().map_err(failed)?;
        // As long as the range: there is no hole.
        Buffer::kept(segments, user, access, Box::new(HeldMemory { _held: held }))
            .map_err(|_| hole(range, start, None))
    }
}

/// Takes entries out of the table and lets go of them without its lock.
fn take<A: Address, L: RawMutex>(
    mut table: lock_api::MutexGuard<'_, L, Vec<Entry<A, L>>>,
    places: core::ops::Range<usize>,
) -> Unmapping<A, L> {
    let (mut bytes, regions, mut first) = (0u64, places.len(), None);
    for Entry { range, region } in table.drain(places).rev() {
        bytes = bytes.saturating_add(range.len());
        let fate = Arc::clone(region.end.fate());
        fate.retire(region, first.take());
        first = Some(fate);
    }
    drop(table);
    let mut next = first.clone();
    while let Some(fate) = next {
        next = fate.let_go();
    }
    Unmapping::new(bytes, regions, first)
}

/// What an entry has of a range, up to which the range is covered before `next`, and up to where it
/// is covered with it.
#[expect(clippy::type_complexity, reason = "a piece, and where the next one begins")]
fn piece<A: Address, L: RawMutex>(
    range: Span<A>,
    wanted: Prot,
    entry: &Entry<A, L>,
    next: Option<A>,
) -> Result<(Piece<A, L>, Option<A>), RegionError<A>> {
    let (region, access) = (entry.range, entry.region.access);
    let start = region.start().max(range.start());
    if next != Some(start) || start > range.last() {
        let first = next.unwrap_or(range.start());
        return Err(hole(range, first, Some(region.start())));
    }
    if !access.contains(wanted) {
        return Err(RegionError::Access { range, wanted, region, access });
    }
    let last = region.last().min(range.last());
    let offset = start.get() - region.start().get();
    let len = last.get() - start.get() + 1;
    let piece = Piece { region: Arc::clone(&entry.region), offset, len };
    Ok((piece, last.get().checked_add(1).map(A::new)))
}

/// The range of a request.
fn range_of<A: Address>(start: A, len: u64) -> Result<Span<A>, RegionError<A>> {
    Span::new(start, len).map_err(|error| match error {
        RangeError::Empty { .. } => RegionError::Empty { start },
        RangeError::Wraps { .. } => RegionError::Wraps { start, len },
    })
}

/// The first region that does not end below an address.
fn first_at<A: Address, L: RawMutex>(table: &[Entry<A, L>], at: A) -> usize {
    table.partition_point(|entry| entry.range.last() < at)
}

/// The first region that begins behind an address.
fn behind<A: Address, L: RawMutex>(table: &[Entry<A, L>], last: A) -> usize {
    table.partition_point(|entry| entry.range.start() <= last)
}

fn covers<A: Address>(range: Span<A>, other: Span<A>) -> bool {
    range.start() <= other.start() && other.last() <= range.last()
}

/// The part of a range that is missing: from `first` on, up to a region that begins at `behind`.
#[cold]
fn hole<A: Address>(range: Span<A>, first: A, behind: Option<A>) -> RegionError<A> {
    let before = behind.and_then(|behind| behind.get().checked_sub(1)).map(A::new);
    let last = before.map_or(range.last(), |before| before.min(range.last()));
    let hole = Span::new(first, last.get().wrapping_sub(first.get()).wrapping_add(1));
    RegionError::Hole { range, hole: hole.unwrap_or(range) }
}

/// What a buffer of regions keeps.
struct HeldMemory<A: Address, L: RawMutex> {
    _held: Held<A, L>,
}

impl<A: Address, L: RawMutex + Send + Sync> Keep<HostAddr> for HeldMemory<A, L> {
    fn end(&mut self, _segments: &Segments<HostAddr>) {
        // The memory is let go by what holds it, which is dropped with this.
    }
}

impl<A: Address, L: RawMutex + Send + Sync + 'static> Source for Regions<A, L> {
    type Addr = HostAddr;
    type Error = RegionError<A>;

    fn buffer(&self, user: UserRange, access: Prot) -> Result<Buffer<HostAddr>, RegionError<A>> {
        Self::buffer(self, user, access)
    }

    fn owner(&self) -> Owner<'_> {
        let space = u64::try_from(self.identity.id()).unwrap_or(u64::MAX);
        Owner { account: None, space, device: None }
    }

    fn errno(&self, error: &RegionError<A>) -> Errno {
        error.errno()
    }
}

impl<A: Address, L: RawMutex> fmt::Debug for Regions<A, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut map = f.debug_map();
        let mut next = Some(A::new(0));
        // Each is written without the lock: a writer may hold memory of a client, too.
        while let Some((range, access)) = next.and_then(|next| self.region_from(next)) {
            map.entry(&range, &access);
            next = range.last().get().checked_add(1).map(A::new);
        }
        map.finish()
    }
}
