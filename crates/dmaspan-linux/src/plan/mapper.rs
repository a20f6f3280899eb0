//! A [`Mapper`] plans and maps into one space.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::space::DmaSpace;
use dmaspan::{Errno, Iova, IovaRange, Label, Prot};

use super::book::Book;
use super::places::{PlacedIovas, Places, Wanted};
use super::planned::{self, Plan, Planned, PlannedMap};
use super::{
    MapError, MappedBar, MappedMemory, MappedRegions, MmioSpace, NotUnmapped, PlanError, Region,
    ScopeError,
};
use crate::mem::Memory;

/// A [`DmaSpace`] into which [`Memory`] is mapped: a kernel's by its clients in this crate, or the
/// core's container over a [`LinuxPinner`](crate::LinuxPinner).
///
/// Implemented for all of them.
pub trait MemorySpace: DmaSpace<Memory = Arc<Memory>, Error: 'static> {}

impl<S: DmaSpace<Memory = Arc<Memory>, Error: 'static>> MemorySpace for S {}

/// Maps regions of memory into a space, whose IOVAs it hands out; see [the module](super).
///
/// It is a handle: clones map into the same space, from any number of threads.
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::{Account, Container, HostAddr, Prot};
/// use dmaspan_linux::plan::{Mapper, Region};
/// use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
///
/// let container: Container<_, parking_lot::RawMutex> =
///     Container::new(LinuxPinner::<HostAddr>::new()?, Account::new(1 << 30));
/// let mapper = Mapper::new(container)?;
/// let memory = Arc::new(Memory::new(MemoryKind::Base, 1 << 20)?);
/// let iova = mapper.scope([Region::whole(&memory, Prot::READ)], |mapped| {
///     // The device works here.
///     mapped.iova(0)
/// })?;
/// assert!(iova.is_some());
/// assert_eq!((mapper.mapped_bytes(), mapper.leaked_bytes()), (0, 0));
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Mapper<S: MemorySpace> {
    inner: Arc<Inner<S>>,
}

/// What handles of a mapper share, and what is mapped keeps.
pub(super) struct Inner<S> {
    pub(super) space: Arc<S>,
    pub(super) places: Places,
    pub(super) mapped: AtomicU64,
    pub(super) leaked: AtomicU64,
    pub(super) book: Book,
}

impl<S: MemorySpace> Inner<S> {
    /// Takes IOVAs back at which nothing is mapped any more.
    pub(super) fn free(&self, place: PlacedIovas) {
        // Before anybody else can have them.
        self.book.remove(place.range);
        self.places.free(place);
    }

    /// IOVAs for what is mapped alone, at which nobody has anything.
    pub(super) fn place(&self, wanted: Wanted) -> Result<PlacedIovas, PlanError> {
        let limits = self.space.limits();
        self.places.narrow(&limits.apertures);
        planned::check(&limits, self.places.granule().max(limits.granule()), wanted)?;
        planned::check_count(&limits, 1)?;
        self.places.take(wanted, &|range| self.space.mapped_in(range))
    }

    /// Unmaps what is mapped in all of `range`.
    pub(super) fn unmap(&self, range: IovaRange) -> Result<(), NotUnmapped<S::Error>> {
        let bytes = range.len_less_one().saturating_add(1);
        match self.space.unmap(range) {
            Ok(unmapped) if unmapped == bytes => {
                self.mapped.fetch_sub(bytes, Ordering::Relaxed);
                Ok(())
            }
            Ok(unmapped) => Err(NotUnmapped::Short { range, unmapped }),
            Err(source) => Err(NotUnmapped::Refused { range, source }),
        }
    }

    pub(super) fn count_mapped(&self, range: IovaRange) {
        self.mapped.fetch_add(range.len_less_one().saturating_add(1), Ordering::Relaxed);
    }

    /// Counts bytes that were mapped as leaked.
    pub(super) fn count_leaked(&self, bytes: u64) {
        self.mapped.fetch_sub(bytes, Ordering::Relaxed);
        self.leaked.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl<S: MemorySpace> Mapper<S> {
    /// Takes a space, and reads where mappings may lie in it. What others map there is passed over,
    /// as far as the space [knows](dmaspan::DmaSpace::mapped_in) of it.
    ///
    /// # Errors
    ///
    /// [`PlanError::NothingFits`] where nothing can be mapped, [`PlanError::NoMemory`].
    pub fn new(space: S) -> Result<Self, PlanError> {
        Self::shared(Arc::new(space))
    }

    /// As [`new`](Self::new), of a space that others have too: to attach devices, say.
    ///
    /// # Errors
    ///
    /// As those of [`new`](Self::new).
    pub fn shared(space: Arc<S>) -> Result<Self, PlanError> {
        Self::with_limit(space, Iova::new(u64::MAX))
    }

    /// As [`shared`](Self::shared), for devices that address no more than up to `limit`: IOVAs that
    /// the mapper chooses are not above it.
    ///
    /// # Errors
    ///
    /// As those of [`new`](Self::new).
    pub fn with_limit(space: Arc<S>, limit: Iova) -> Result<Self, PlanError> {
        let places = Places::new(&space.limits(), limit)?;
        let [mapped, leaked] = [0; 2].map(AtomicU64::new);
        let book = Book::default();
        Ok(Self { inner: Arc::new(Inner { space, places, mapped, leaked, book }) })
    }

    /// The space. What others map there has to lie where the mapper has nothing, and nobody else
    /// unmaps what the mapper has mapped; nothing worse than errors and leaks comes of it.
    pub fn space(&self) -> &S {
        &self.inner.space
    }

    /// Keeps the mapper from using `range`, widened to whole pages of the IOMMU, for as long as it
    /// exists: IOVAs that others use without mapping them, or will map later. What others have
    /// mapped there now stays as it is. A region that asks for IOVAs there is refused.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use dmaspan::{Account, Container, HostAddr, Iova, IovaRange, Prot};
    /// use dmaspan_linux::plan::{Mapper, PlanError, Region};
    /// use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
    ///
    /// let container: Container<_, parking_lot::RawMutex> =
    ///     Container::new(LinuxPinner::<HostAddr>::new()?, Account::new(1 << 30));
    /// let mapper = Mapper::new(container)?;
    /// let windows = IovaRange::from_len(Iova::new(0), 1 << 20)?;
    /// mapper.exclude(windows)?;
    ///
    /// let memory = Arc::new(Memory::new(MemoryKind::Base, 1 << 16)?);
    /// let mapped = mapper.map([Region::whole(&memory, Prot::READ)])?;
    /// assert!(mapped.iova(0) >= Some(Iova::new(1 << 20)));
    /// let taken = mapper.exclude(IovaRange::from_len(Iova::new(0), 1 << 30)?);
    /// assert!(matches!(taken, Err(PlanError::Held { .. })));
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PlanError::Held`] where the mapper has mapped or planned a part of it, with nothing
    /// changed; [`PlanError::NoMemory`].
    pub fn exclude(&self, range: IovaRange) -> Result<(), PlanError> {
        self.inner.places.exclude(range)
    }

    /// Plans how to map regions, and holds IOVAs for them. The limits of the space are read now: a
    /// device that was attached meanwhile may have narrowed them.
    ///
    /// # Errors
    ///
    /// [`PlanError`]: which region cannot be mapped, and why.
    pub fn plan(&self, regions: impl IntoIterator<Item = Region>) -> Result<Planned<S>, PlanError> {
        let limits = self.inner.space.limits();
        self.inner.places.narrow(&limits.apertures);
        let others = |range| self.inner.space.mapped_in(range);
        let (plan, places) = Plan::with(&self.inner.places, &limits, regions, &others)?;
        self.inner.book.add(plan.maps().iter().map(PlannedMap::listed));
        Ok(Planned { inner: Arc::clone(&self.inner), plan, places })
    }

    /// Plans and maps: all regions, or none.
    ///
    /// # Errors
    ///
    /// [`MapError`], with nothing mapped unless it says [`LeftBehind`](MapError::LeftBehind).
    pub fn map(
        &self,
        regions: impl IntoIterator<Item = Region>,
    ) -> Result<MappedRegions<S>, MapError<S::Error>> {
        self.plan(regions)?.map()
    }

    /// Maps regions while `work` runs. They are unmapped also if it panics.
    ///
    /// # Errors
    ///
    /// [`ScopeError::Map`] where they are not mapped, and [`ScopeError::Unmap`] where they stay so.
    pub fn scope<T>(
        &self,
        regions: impl IntoIterator<Item = Region>,
        work: impl FnOnce(&MappedRegions<S>) -> T,
    ) -> Result<T, ScopeError<S::Error>> {
        let mapped = self.map(regions)?;
        let result = work(&mapped);
        match mapped.unmap() {
            Ok(()) => Ok(result),
            Err(unmapped) => {
                let leaked = unmapped.left.leak();
                Err(ScopeError::Unmap { leaked, source: unmapped.source })
            }
        }
    }

    /// Maps `offsets` of a BAR, in bytes from its start, for the devices of this space: they access
    /// another device without going through memory. At `iova`, or for `None` wherever there is room
    /// that permits large leaves. The BAR stays mapped into the process, and its device open, until
    /// what is returned was unmapped.
    ///
    /// ```no_run
    /// use dmaspan::Prot;
    /// use dmaspan_linux::plan::Mapper;
    /// use dmaspan_linux::vfio::{Backend, VfioSpace};
    ///
    /// let (space, nic) = VfioSpace::open(Backend::Vfio, "0000:00:05.0".parse()?)?;
    /// let gpu = space.attach("0000:00:06.0".parse()?)?;
    /// let mapper = Mapper::new(space)?;
    /// let frames = gpu.bar(2)?;
    /// let mapped = mapper.map_bar(&frames, 0..frames.len(), None, Prot::READ_WRITE)?;
    /// println!("{nic:?} reaches them at {}", mapped.iova());
    /// mapped.unmap()?;
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`MapError::Bar`] for offsets that are empty or not all of the BAR; [`MapError::Plan`] where
    /// they cannot be mapped as asked (its region is 0); [`MapError::Refused`] where the space
    /// refuses them. Nothing is mapped then.
    #[track_caller]
    pub fn map_bar(
        &self,
        bar: &S::Bar,
        offsets: Range<u64>,
        iova: Option<Iova>,
        prot: Prot,
    ) -> Result<MappedBar<S>, MapError<S::Error>>
    where
        S: MmioSpace,
    {
        MappedBar::map(&self.inner, bar, offsets, iova, prot, Label::caller())
    }

    /// Allocates `len` bytes that the program and the devices share, and maps them at IOVAs that
    /// follow one another and begin at a multiple of `align`: Linux's `dma_alloc_coherent`. They
    /// are zeroed, pinned by the space, and freed when they were unmapped. The length is rounded up
    /// to whole pages.
    ///
    /// ```
    /// use dmaspan::{Account, Container, HostAddr};
    /// use dmaspan_linux::LinuxPinner;
    /// use dmaspan_linux::plan::Mapper;
    ///
    /// let container: Container<_, parking_lot::RawMutex> =
    ///     Container::new(LinuxPinner::<HostAddr>::new()?, Account::new(1 << 30));
    /// let mapper = Mapper::new(container)?;
    /// let ring = mapper.alloc(0x2000, 0x4000)?;
    /// assert_eq!((ring.len(), ring.iova().get() % 0x4000), (0x2000, 0));
    /// ring.memory().write_u64(0x1ff8, 7)?;
    /// ring.unmap()?;
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`MapError::Memory`] for no bytes, or where the system has too little memory;
    /// [`PlanError::Alignment`] for an alignment that is no power of two; else as
    /// [`map`](Self::map).
    #[track_caller]
    pub fn alloc(&self, len: u64, align: u64) -> Result<MappedMemory<S>, MapError<S::Error>> {
        MappedMemory::alloc(&self.inner, len, align, Label::caller())
    }

    /// What is planned and mapped.
    pub(super) fn book(&self) -> &Book {
        &self.inner.book
    }

    /// Returns how many bytes are mapped, those of forgotten [`MappedRegions`]s among them.
    pub fn mapped_bytes(&self) -> u64 {
        self.inner.mapped.load(Ordering::Relaxed)
    }

    /// Returns how many bytes could not be unmapped and are leaked: their memory is never freed,
    /// and their IOVAs are never used again.
    pub fn leaked_bytes(&self) -> u64 {
        self.inner.leaked.load(Ordering::Relaxed)
    }

    /// The errno of an error, for front ends that answer as Linux does.
    pub fn errno(&self, error: &MapError<S::Error>) -> Errno {
        error.errno_by(|error| self.inner.space.errno(error))
    }
}

impl<S: MemorySpace> Clone for Mapper<S> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<S: MemorySpace> fmt::Debug for Mapper<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl<S> fmt::Debug for Inner<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapper")
            .field("places", &self.places)
            .field("mapped", &self.mapped)
            .field("leaked", &self.leaked)
            .finish_non_exhaustive()
    }
}
