//! [`Regions`] are a client's memory as a server has it mapped, and a source of buffers.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use lock_api::{Mutex, RawMutex};

use super::buffer::{Buffer, Keep};
use super::builder::{BuildError, SegmentsBuilder};
use super::segments::Segments;
use super::source::{Owner, Source};
use crate::addr::{HostAddr, UserAddr};
use crate::error::Errno;
use crate::platform::Identity;
use crate::prot::Prot;
use crate::range::UserRange;
use crate::span::Span;

/// Memory that is mapped in this process, as long as the value exists.
///
/// # Safety
///
/// While the value exists, also after it has been moved,
///
/// 1. [`span`](Self::span) gives the same span, and the mapping stays: neither unmapped, moved nor
///    given another use; and
/// 2. whoever has its addresses may read all of it and, where it is registered for writes, write
///    it at any time: no code holds a Rust reference to it that this would break.
#[expect(unsafe_code, reason = "a contract about memory that others write; nothing here is unsafe")]
pub unsafe trait HostMemory: Send + Sync {
    /// Returns where it is.
    fn span(&self) -> Span<HostAddr>;
}

/// The reason why regions were not changed, or have no buffer. Nothing is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// A region is there.
    #[error("{range} overlaps the region {existing}")]
    Overlaps {
        /// The addresses of the client.
        range: UserRange,
        /// The lowest region that has some of them.
        existing: UserRange,
    },
    /// No region has exactly this range.
    #[error("there is no region {range}")]
    NoRegion {
        /// The addresses of the client.
        range: UserRange,
    },
    /// The region would wrap.
    #[error("the region of {len:#x} bytes at {start} wraps beyond {:#x}", u64::MAX)]
    Wraps {
        /// Where it would begin.
        start: UserAddr,
        /// How many bytes it would have.
        len: u64,
    },
    /// Nobody could do anything with it.
    #[error("the region at {start} with {access:?} permits neither reads nor writes")]
    NoAccess {
        /// Where it would begin.
        start: UserAddr,
        /// What was to be permitted.
        access: Prot,
    },
    /// No region has part of a buffer.
    #[error("no region has {hole} of {user}")]
    Hole {
        /// What was to be registered.
        user: UserRange,
        /// The lowest addresses of it that no region has.
        hole: UserRange,
    },
    /// A region with part of a buffer permits less.
    #[error("{user} needs {wanted:?}, but the region {region} permits {access:?}")]
    Access {
        /// What was to be registered.
        user: UserRange,
        /// What for.
        wanted: Prot,
        /// The lowest region that does not permit it.
        region: UserRange,
        /// What that permits.
        access: Prot,
    },
    /// There is no memory to keep track of the regions.
    #[error("there is no memory for {regions} regions")]
    NoMemory {
        /// How many.
        regions: usize,
    },
    /// The segments cannot be kept track of.
    #[error("{user} was not registered: {error}")]
    Segments {
        /// What was to be registered.
        user: UserRange,
        /// Why.
        #[source]
        error: BuildError,
    },
}

impl RegionError {
    /// `EEXIST` for an overlap, `ENOENT` where there is no region, `EFAULT` where a buffer is not
    /// all in regions that permit it, `EOVERFLOW`, `EINVAL` and `ENOMEM`.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Overlaps { .. } => Errno::EEXIST,
            Self::NoRegion { .. } => Errno::ENOENT,
            Self::Wraps { .. } => Errno::EOVERFLOW,
            Self::NoAccess { .. } => Errno::EINVAL,
            Self::Hole { .. } | Self::Access { .. } => Errno::EFAULT,
            Self::NoMemory { .. } => Errno::ENOMEM,
            Self::Segments { error, .. } => error.errno(),
        }
    }
}

/// The memory of a client as this server has it mapped: which of the client's addresses are where
/// in this process.
///
/// That is all that a vfio-user or vhost-user server has of a guest's memory. The client says what
/// it shares, region by region, and takes regions back; buffers are registered by its addresses,
/// over as many neighbouring regions as they lie in, and have addresses of this process.
///
/// Nothing is pinned or charged here: that is the client's. A region's memory is kept while a
/// buffer has some of it, also after the region was [removed](Self::remove).
///
/// `L` is the kind of lock: regions may change while others register.
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::regbuf::{BufferRequest, HostMemory, Regions, Registry};
/// use dmaspan::{Direction, HostAddr, Prot, Span, UserAddr, UserRange};
///
/// /// A file of the client's that is mapped here, and unmapped when this is dropped.
/// struct Mapped(Span<HostAddr>);
///
/// // SAFETY: the mapping is this one's, and nothing refers to what is in it.
/// unsafe impl HostMemory for Mapped {
///     fn span(&self) -> Span<HostAddr> {
///         self.0
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let regions = Arc::new(Regions::<_, parking_lot::RawMutex>::new());
/// let file = Mapped(Span::new(HostAddr::new(0x7f12_0000_0000), 0x10_0000)?);
/// let ram = regions.insert(UserAddr::new(0), Prot::READ_WRITE, Arc::new(file))?;
///
/// let mut queue = Registry::new(Arc::clone(&regions));
/// queue.register(&[BufferRequest::new(UserRange::from_len(UserAddr::new(0x4200), 0x2000)?)])?;
/// // The client takes the region back: what is registered stays.
/// regions.remove(ram)?;
/// let mut pieces = queue.get(0)?.import(0x10, 0x100, Direction::ToDevice)?;
/// assert_eq!(pieces.next(), Some(Span::new(HostAddr::new(0x7f12_0000_4210), 0x100)?));
/// # Ok(())
/// # }
/// ```
pub struct Regions<M, L: RawMutex> {
    identity: Identity,
    /// In the order of their addresses, apart from each other.
    regions: Mutex<L, Vec<Region<M>>>,
}

struct Region<M> {
    user: UserRange,
    host: HostAddr,
    access: Prot,
    memory: Arc<M>,
}

impl<M, L: RawMutex> Default for Regions<M, L> {
    fn default() -> Self {
        Self { identity: Identity::new(), regions: Mutex::new(Vec::new()) }
    }
}

impl<M: HostMemory, L: RawMutex> Regions<M, L> {
    /// A client that shares nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns how many regions there are.
    pub fn count(&self) -> usize {
        self.regions.lock().len()
    }

    /// Says that `memory` is what the client has at `start`, and that it may be accessed as
    /// `access` says, the read and write permissions of which count. Returns the client's range.
    ///
    /// # Errors
    ///
    /// With nothing changed: [`RegionError::NoAccess`], [`RegionError::Wraps`],
    /// [`RegionError::Overlaps`] and [`RegionError::NoMemory`].
    ///
    /// # Context
    ///
    /// Takes a lock, and may allocate.
    pub fn insert(
        &self,
        start: UserAddr,
        access: Prot,
        memory: Arc<M>,
    ) -> Result<UserRange, RegionError> {
        let span = memory.span();
        let (host, len, access) = (span.start(), span.len(), access & Prot::READ_WRITE);
        if !access.permits_access() {
            return Err(RegionError::NoAccess { start, access });
        }
        let user =
            UserRange::from_len(start, len).map_err(|_| RegionError::Wraps { start, len })?;
        let mut regions = self.regions.lock();
        let at = first_at(&regions, start);
        if let Some(existing) = regions.get(at).filter(|next| next.user.start() <= user.last()) {
            return Err(RegionError::Overlaps { range: user, existing: existing.user });
        }
        let count = regions.len() + 1;
        regions.try_reserve(1).map_err(|_| RegionError::NoMemory { regions: count })?;
        regions.insert(at, Region { user, host, access, memory });
        Ok(user)
    }

    /// Takes a region back, and returns its memory. Buffers that have some of it keep it; no others
    /// get any. When the handle that this returns is the last one, nobody uses the memory any more,
    /// and the client can be told so.
    ///
    /// # Errors
    ///
    /// [`RegionError::NoRegion`] where no region has exactly this range. Then nothing changed.
    ///
    /// # Context
    ///
    /// Takes a lock; allocates nothing.
    pub fn remove(&self, range: UserRange) -> Result<Arc<M>, RegionError> {
        let mut regions = self.regions.lock();
        let at = first_at(&regions, range.start());
        if regions.get(at).is_none_or(|region| region.user != range) {
            return Err(RegionError::NoRegion { range });
        }
        Ok(regions.remove(at).memory)
    }

    /// Where a buffer is, and whose memory that is.
    fn look_up(
        &self,
        user: UserRange,
        wanted: Prot,
    ) -> Result<(Segments<HostAddr>, BackingMemory<M>), RegionError> {
        let regions = self.regions.lock();
        let first = first_at(&regions, user.start());
        let behind = regions.partition_point(|region| region.user.start() <= user.last());
        let covering = regions.get(first..behind).unwrap_or_default();
        let mut kept = Vec::new();
        let no_memory = |_| RegionError::NoMemory { regions: covering.len() };
        kept.try_reserve_exact(covering.len()).map_err(no_memory)?;
        let failed = |error| RegionError::Segments { user, error };
        let mut builder = SegmentsBuilder::new();
        // None behind the top of the space.
        let mut next = Some(user.start());
        for Region { user: region, host, access, memory } in covering {
            // They overlap, or it would not be among them.
            let Some(part) = region.intersection(user) else { continue };
            if next != Some(part.start()) {
                return Err(hole(user, next, Some(part.start())));
            }
            if !access.contains(wanted) {
                let (region, access) = (*region, *access);
                return Err(RegionError::Access { user, wanted, region, access });
            }
            let start = host.wrapping_add(part.start().get() - region.start().get());
            builder.push(Span::covering(start, part.len_less_one())).map_err(failed)?;
            kept.push(Arc::clone(memory));
            next = part.last().checked_add(1);
        }
        if next.is_some_and(|next| next <= user.last()) {
            return Err(hole(user, next, None));
        }
        Ok((builder.build().map_err(failed)?, BackingMemory { _memory: kept }))
    }
}

/// The first region that does not end below an address.
fn first_at<M>(regions: &[Region<M>], at: UserAddr) -> usize {
    regions.partition_point(|region| region.user.last() < at)
}

/// What of a buffer is missing: from `first` on, up to a region that begins at `behind`.
#[cold]
fn hole(user: UserRange, first: Option<UserAddr>, behind: Option<UserAddr>) -> RegionError {
    let last = behind.and_then(|behind| behind.get().checked_sub(1)).map(UserAddr::new);
    let hole = UserRange::new(first.unwrap_or(user.start()), last.unwrap_or(user.last()));
    RegionError::Hole { user, hole: hole.unwrap_or(user) }
}

/// The memory that a buffer lies in.
struct BackingMemory<M> {
    _memory: Vec<Arc<M>>,
}

impl<M: HostMemory> Keep<HostAddr> for BackingMemory<M> {
    fn end(&mut self, _segments: &Segments<HostAddr>) {
        // The memory goes with the handles of it, which are dropped with this.
    }
}

impl<M: HostMemory + 'static, L: RawMutex> Source for Regions<M, L> {
    type Addr = HostAddr;
    type Error = RegionError;

    fn buffer(&self, user: UserRange, access: Prot) -> Result<Buffer<HostAddr>, RegionError> {
        let access = access & Prot::READ_WRITE;
        let (segments, kept) = self.look_up(user, access)?;
        // As long as the range: there is no hole.
        Buffer::kept(segments, user, access, Box::new(kept))
            .map_err(|_| RegionError::Hole { user, hole: user })
    }

    fn owner(&self) -> Owner<'_> {
        let space = u64::try_from(self.identity.id()).unwrap_or(u64::MAX);
        Owner { account: None, space, device: None }
    }

    fn errno(&self, error: &RegionError) -> Errno {
        error.errno()
    }
}

impl<M, L: RawMutex> fmt::Debug for Regions<M, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let regions = self.regions.lock();
        let entries = regions.iter().map(|region| (region.user, (region.host, region.access)));
        f.debug_map().entries(entries).finish()
    }
}
