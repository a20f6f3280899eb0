//! A [`FixedPool`] is memory cut into slices, and attached to rings.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use dmaspan::UserRange;
use io_uring::Submitter;
use parking_lot::Mutex;

use super::attach::{self, RingAttachment, Sharing, Source};
use super::choice::{self, MemoryChoice, Provenance};
use super::{AllTaken, FixedBuf, PoolError, RingAttachError, Taking};
use crate::mem::ExclusiveMemory;
use crate::os;
use crate::registration::{CHUNK, SLOTS};
use crate::sys;
use crate::sys::ring::Ring;
use crate::sys::slices::{Layout, Slices, SlicesError};
use crate::wait;

/// Says what a pool shall be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolOptions {
    /// The bytes of a slice: a multiple of the base page, at most 1 GiB.
    pub slice_len: u64,
    /// How many slices.
    pub slices: u32,
    /// What memory they are of.
    pub memory: MemoryChoice,
    /// The longest registered buffer, in bytes: at least a slice, at most 1 GiB, and a multiple of
    /// the memory's pages. A ring has 16384 buffers.
    pub buffer_len: u64,
}

impl PoolOptions {
    /// `slices` slices of `slice_len` bytes, of the best memory that there is.
    pub const fn new(slice_len: u64, slices: u32) -> Self {
        Self { slice_len, slices, memory: MemoryChoice::Best, buffer_len: CHUNK }
    }

    /// The same, of this memory.
    #[must_use]
    pub const fn memory(self, memory: MemoryChoice) -> Self {
        Self { memory, ..self }
    }

    /// The same, registered as buffers of at most so many bytes.
    #[must_use]
    pub const fn buffer_len(self, buffer_len: u64) -> Self {
        Self { buffer_len, ..self }
    }

    /// The layout with pages of `page` bytes.
    fn layout(&self, page: u64) -> Result<Layout, PoolError> {
        let Self { slice_len, slices, buffer_len, .. } = *self;
        if buffer_len < slice_len || buffer_len > CHUNK || !buffer_len.is_multiple_of(page) {
            return Err(PoolError::BufferLength { buffer_len, slice_len, page_size: page });
        }
        let sizes = [slice_len, page, buffer_len].map(usize::try_from);
        let [Ok(slice_len), Ok(page), Ok(buffer_len)] = sizes else {
            return Err(PoolError::TooLarge);
        };
        let layout = Layout::new(slice_len, slices, page, buffer_len).ok_or(PoolError::TooLarge)?;
        fits_a_ring(&layout).map(|()| layout)
    }
}

/// Memory cut into equal slices, for fixed reads and writes of any number of rings.
///
/// A clone is the same pool. Its memory goes when the last of them, of its slices and of its
/// attachments goes; what rings have registered stays pinned until they let it go.
#[derive(Clone)]
pub struct FixedPool {
    inner: Arc<Inner>,
}

struct Inner {
    slices: Arc<Slices>,
    provenance: Provenance,
    source: Mutex<Source>,
}

impl FixedPool {
    /// Maps memory for a pool, all of whose pages are there then, zeroed. Nothing is registered
    /// before the pool is attached.
    ///
    /// # Errors
    ///
    /// [`PoolError`]: slices that cannot be, or no memory. Of [`MemoryChoice::Best`] only too
    /// little memory of base pages is an error.
    pub fn new(options: &PoolOptions) -> Result<Self, PoolError> {
        checked_slice_len(options.slice_len)?;
        let count = options.slices;
        if count == 0 {
            return Err(PoolError::SliceCount { slices: count.into(), limit: u32::MAX.into() });
        }
        let needed = |page| {
            let len = options.layout(page)?.memory_len();
            len.and_then(|len| u64::try_from(len).ok()).ok_or(PoolError::TooLarge)
        };
        let (memory, provenance) = choice::map(options.memory, needed)?;
        let page = provenance.kind.map_or(sys::page_size(), |kind| kind.page_size());
        Self::of(memory, provenance, options.layout(page)?)
    }

    /// Cuts memory that the application brings into as many slices as there is room for.
    ///
    /// Memory should begin at a huge page if it has any: a registered buffer ends at multiples of
    /// one, of 2 MiB on most systems, from the beginning.
    ///
    /// ```
    /// use dmaspan_linux::fixed::FixedPool;
    /// use dmaspan_linux::{Memory, MemoryKind};
    ///
    /// let memory = Memory::new(MemoryKind::Memfd, 1 << 20)?;
    /// let pool = FixedPool::over(memory.try_into()?, 12 << 10)?;
    /// assert_eq!(pool.slices(), 85);
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PoolError`]: memory that does not begin at a page, or slices that cannot be.
    pub fn over(memory: ExclusiveMemory, slice_len: u64) -> Result<Self, PoolError> {
        let bytes = checked_slice_len(slice_len)?;
        let range = memory.user_range();
        let start = range.start().get();
        if !start.is_multiple_of(sys::page_size()) {
            return Err(PoolError::Misaligned { start });
        }
        let len = range.checked_len().unwrap_or(u64::MAX);
        let page = memory.kind().map_or(os::thp_size(), |kind| kind.leaf_size());
        let sizes = usize::try_from(page).ok().zip(usize::try_from(CHUNK).ok());
        let layout =
            sizes.and_then(|(page, chunk)| Layout::fitting(bytes, memory.len(), page, chunk));
        let layout = layout.ok_or(PoolError::TooShort { len, slice_len })?;
        fits_a_ring(&layout)?;
        let (kind, passed_over) = (memory.kind(), Vec::new());
        Self::of(memory, Provenance { kind, len, huge_bytes: None, passed_over }, layout)
    }

    fn of(
        memory: ExclusiveMemory,
        provenance: Provenance,
        layout: Layout,
    ) -> Result<Self, PoolError> {
        let len = provenance.len;
        // `usize` has 64 bits wherever the crate builds.
        let slice_len = u64::try_from(layout.slice_len()).unwrap_or(u64::MAX);
        let slices = Slices::new(memory, layout).map_err(|error| match error {
            SlicesError::TooShort => PoolError::TooShort { len, slice_len },
            SlicesError::NoMemory => PoolError::NoMemory { slices: layout.count().into() },
        })?;
        let source = Mutex::new(Source::Untried);
        Ok(Self { inner: Arc::new(Inner { slices, provenance, source }) })
    }

    /// Takes a slice; `None` where all are taken. Its bytes are as its last owner left them, zero
    /// at first.
    ///
    /// # Context
    ///
    /// Allocates nothing. Takes a lock for a few instructions, as giving back does; no call of the
    /// kernel is made under it. The slice given back last is taken first.
    #[inline]
    pub fn take(&self) -> Option<FixedBuf> {
        self.inner.slices.take().map(FixedBuf::new)
    }

    /// Takes a slice, and sleeps where all are taken until one comes back, for `bound` at most.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use dmaspan_linux::fixed::{FixedPool, PoolOptions};
    ///
    /// let pool = FixedPool::new(&PoolOptions::new(4096, 1))?;
    /// let buffer = pool.take_timeout(Duration::from_secs(1))?;
    /// std::thread::spawn(move || drop(buffer)); // an operation that ends
    /// let _again = pool.take_timeout(Duration::from_secs(10))?;
    /// assert!(pool.take_timeout(Duration::ZERO).is_err());
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AllTaken`] where none came back in time.
    ///
    /// # Context
    ///
    /// As [`take`](Self::take) where a slice is free. Else it allocates and sleeps; the thread that
    /// reaps completions does not wait here for one of them.
    pub fn take_timeout(&self, bound: Duration) -> Result<FixedBuf, AllTaken> {
        let mut taking = self.take_async();
        wait::within(&mut taking, bound).ok_or(AllTaken { slices: self.slices(), bound })
    }

    /// Takes a slice, as a future for any runtime: ready when there is one. The task that waited
    /// longest is woken first; a [`take`](Self::take) may be faster than it, and then it waits on.
    ///
    /// # Context
    ///
    /// As [`take`](Self::take) where a slice is free. Else a poll allocates, once; without memory
    /// for that the task is woken at once, to look again.
    pub fn take_async(&self) -> Taking {
        Taking::new(Arc::clone(&self.inner.slices))
    }

    /// Returns how many slices there are.
    pub fn slices(&self) -> u32 {
        self.inner.slices.count()
    }

    /// Returns how many are free; other threads may take and give back at any moment.
    pub fn free_slices(&self) -> u32 {
        self.inner.slices.free()
    }

    /// The bytes of a slice.
    pub fn slice_len(&self) -> usize {
        self.inner.slices.slice_len()
    }

    /// Returns how many registered buffers the pool is in a ring: one for each GiB or less.
    pub fn buffers(&self) -> u32 {
        self.inner.slices.layout().chunks()
    }

    /// Returns what memory it has, and why no better one.
    pub fn provenance(&self) -> &Provenance {
        &self.inner.provenance
    }

    /// Returns where it is in this process.
    pub fn user_range(&self) -> UserRange {
        self.inner.slices.memory().user_range()
    }

    /// Puts the pool's buffers into slots `first_slot..first_slot + buffers()` of a ring.
    ///
    /// The ring may have a sparse table, with other buffers in other slots, or none yet. What these
    /// slots hold is replaced. The first time the memory is registered, with a ring of the pool's
    /// own; then each ring shares that registration. Where it cannot (before Linux 6.12, or a ring
    /// of another user), the memory is registered again, and pinned and charged again, and
    /// [`RingAttachment::method`] says so.
    ///
    /// # Errors
    ///
    /// [`RingAttachError`]; each of the slots is empty then, or holds what it held, and the ring
    /// can be used. [`RegisterError`] says which limit to raise.
    ///
    /// # Context
    ///
    /// The thread may register with the ring, so it is the ring's own where that was made with
    /// `IORING_SETUP_SINGLE_ISSUER`. System calls, and pinning the first time.
    ///
    /// [`RegisterError`]: crate::registration::RegisterError
    pub fn attach(
        &self,
        ring: &Submitter<'_>,
        first_slot: u32,
    ) -> Result<RingAttachment, RingAttachError> {
        self.attach_by(ring, first_slot, Sharing::Auto)
    }

    /// The same, with a say in whether the registration is shared.
    ///
    /// # Errors
    ///
    /// As [`attach`](Self::attach), and [`RingAttachError::Clone`] where sharing is demanded and
    /// cannot be.
    ///
    /// # Context
    ///
    /// As [`attach`](Self::attach).
    pub fn attach_by(
        &self,
        ring: &Submitter<'_>,
        first_slot: u32,
        sharing: Sharing,
    ) -> Result<RingAttachment, RingAttachError> {
        self.attach_to(Ring::Submitter(ring), first_slot, sharing)
    }

    pub(crate) fn attach_to(
        &self,
        ring: Ring<'_>,
        first_slot: u32,
        sharing: Sharing,
    ) -> Result<RingAttachment, RingAttachError> {
        let method = self.fill(ring, first_slot, sharing)?;
        Ok(RingAttachment::new(self.clone(), first_slot, method))
    }

    pub(super) fn fill(
        &self,
        ring: Ring<'_>,
        first_slot: u32,
        sharing: Sharing,
    ) -> Result<attach::AttachMethod, RingAttachError> {
        attach::fill(&self.inner.slices, &self.inner.source, ring, first_slot, sharing)
    }

    pub(super) fn own_slices(&self) -> &Arc<Slices> {
        &self.inner.slices
    }
}

/// A length that slices can have.
fn checked_slice_len(slice_len: u64) -> Result<usize, PoolError> {
    let wrong = PoolError::SliceLength { slice_len, limit: CHUNK };
    if slice_len == 0 || slice_len > CHUNK || !slice_len.is_multiple_of(sys::page_size()) {
        return Err(wrong);
    }
    usize::try_from(slice_len).map_err(|_| wrong)
}

/// Whether a ring has so many buffers.
fn fits_a_ring(layout: &Layout) -> Result<(), PoolError> {
    match layout.chunks() {
        needed if needed > SLOTS => Err(PoolError::TooManyBuffers { needed }),
        _ => Ok(()),
    }
}

impl fmt::Debug for FixedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedPool")
            .field("slices", &self.slices())
            .field("slice_len", &self.slice_len())
            .field("provenance", self.provenance())
            .finish_non_exhaustive()
    }
}
