//! A [`Mapper`] plans and maps into one space.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::space::DmaSpace;
use dmaspan::{Errno, Iova};

use super::places::Places;
use super::planned::{Plan, Planned};
use super::{MapError, MappedRegions, PlanError, Region, ScopeError};
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
/// # Ok::<(), Box<dyn std::error::Error>>(())
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
}

impl<S: MemorySpace> Mapper<S> {
    /// Takes a space, and reads where mappings may lie in it. What is mapped there already is not
    /// known: IOVAs of it may be planned, and the space refuses them then.
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
        Ok(Self { inner: Arc::new(Inner { space, places, mapped, leaked }) })
    }

    /// The space. What is mapped there beside the mapper has to lie where no region is, and nobody
    /// else unmaps what the mapper has mapped; nothing worse than errors and leaks comes of it.
    pub fn space(&self) -> &S {
        &self.inner.space
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
        let (plan, places) = Plan::with(&self.inner.places, &limits, regions)?;
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
        match error {
            MapError::Plan(error) => error.errno(),
            MapError::Populate(error) => error.errno,
            MapError::Refused { source, .. } | MapError::LeftBehind { source, .. } => {
                self.inner.space.errno(source)
            }
        }
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
