//! A [`Buffer`] is its segments, and what keeps its memory until the last reference is gone.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::{fmt, ops::Deref};

use super::error::ImportError;
use super::import::Import;
use super::segments::Segments;
use super::vectored::VectoredImport;
use crate::addr::{Address, UserAddr};
use crate::prot::{Direction, Prot};
use crate::range::{RangeError, UserRange};

/// The most bytes of one import (`MAX_RW_COUNT` of Linux, include/linux/fs.h).
pub const MAX_IMPORT: u64 = 0x7fff_f000;

/// Keeps a buffer's memory where it is.
pub trait Keep<A: Address>: Send + Sync {
    /// Lets go of the memory: nobody uses it through the buffer any more. Called once.
    ///
    /// # Context
    ///
    /// Called by whoever lets go of the last reference to the buffer. Cannot fail.
    fn end(&mut self, segments: &Segments<A>);
}

/// Memory that is ready for devices, for as long as the buffer exists.
///
/// Its addresses are those at which a device, or a program on its behalf, reaches it: physical
/// ones, those of an IOMMU's domain, or those of this process. Registries, clones and I/O in flight
/// share it; the last of them lets go of the memory.
pub struct Buffer<A: Address> {
    segments: Segments<A>,
    user: UserRange,
    access: Prot,
    keep: Box<dyn Keep<A>>,
}

impl<A: Address> Buffer<A> {
    /// A buffer of memory that `keep` keeps, which was asked for as `user` and may be accessed as
    /// `access` says, the read and write permissions of which count.
    ///
    /// # Errors
    ///
    /// [`ImportError::Outside`] where `user` and the segments differ in length. `keep` is dropped
    /// and not asked to let go.
    ///
    /// # Safety
    ///
    /// Until [`Keep::end`] is called, every byte of the segments stays memory of the buffer:
    /// neither moved, freed nor given another use. Devices may access it as `access` says at any
    /// time, and no code holds a Rust reference to it that this would break.
    #[expect(unsafe_code, reason = "the caller promises to keep the memory")]
    pub unsafe fn new(
        segments: Segments<A>,
        user: UserRange,
        access: Prot,
        keep: Box<dyn Keep<A>>,
    ) -> Result<Self, ImportError> {
        Self::kept(segments, user, access, keep)
    }

    /// The same, of memory whose keeper makes the promise.
    #[inline(always)]
    pub(crate) fn kept(
        segments: Segments<A>,
        user: UserRange,
        access: Prot,
        keep: Box<dyn Keep<A>>,
    ) -> Result<Self, ImportError> {
        if user.checked_len() != Some(segments.len()) {
            return Err(ImportError::Outside { range: user, buffer: None, len: segments.len() });
        }
        Ok(Self { segments, user, access, keep })
    }

    /// Returns where it is.
    pub fn segments(&self) -> &Segments<A> {
        &self.segments
    }

    /// Returns what was registered.
    pub fn user(&self) -> UserRange {
        self.user
    }

    /// Returns what devices may do with it.
    pub fn access(&self) -> Prot {
        self.access
    }

    /// The length in bytes, never 0.
    #[inline(always)]
    #[expect(clippy::len_without_is_empty, reason = "there is at least one byte")]
    pub fn len(&self) -> u64 {
        self.segments.len()
    }

    /// Returns where `len` bytes from `offset` on are, for a device to which data goes as
    /// `direction` says.
    ///
    /// In a few steps where segments are [uniform](Segments::uniform_len), in O(log n) otherwise,
    /// and without allocating. The device may use what it gets while the import borrows the buffer,
    /// or a [`Node`] or `Arc` of it is kept.
    ///
    /// # Errors
    ///
    /// [`ImportError`], as `io_import_fixed` (Linux, io_uring/rsrc.c): not all bytes are in the
    /// buffer, they are more than [`MAX_IMPORT`], or the buffer was not registered for that
    /// direction.
    #[inline(always)]
    pub fn import(
        &self,
        offset: u64,
        len: u64,
        direction: Direction,
    ) -> Result<Import<'_, A>, ImportError> {
        if self.permits(direction)
            && len <= MAX_IMPORT
            && let Ok(import) = self.segments.import(offset, len)
        {
            return Ok(import);
        }
        Err(self.refusal(offset, len, direction))
    }

    /// Returns where `range` of what was registered is.
    ///
    /// # Errors
    ///
    /// As [`import`](Self::import).
    #[inline]
    pub fn import_user(
        &self,
        range: UserRange,
        direction: Direction,
    ) -> Result<Import<'_, A>, ImportError> {
        // What is below the buffer is beyond its end: offsets are modulo 2^64, and a buffer that
        // long does not exist.
        let offset = range.start().get().wrapping_sub(self.user.start().get());
        match range.checked_len() {
            Some(len) if offset < self.len() => self.import(offset, len, direction),
            _ => Err(self.outside(range)),
        }
    }

    /// The range that an `iovec` of io_uring's asks for, to be [imported](Self::import_vectored).
    ///
    /// # Errors
    ///
    /// [`ImportError::Empty`] and [`ImportError::Wraps`]. Whether the buffer has it is not looked
    /// at.
    pub fn range_from_iovec(&self, base: u64, len: u64) -> Result<UserRange, ImportError> {
        UserRange::from_len(UserAddr::new(base), len).map_err(|error| match error {
            RangeError::Empty { start } => ImportError::Empty { start },
            RangeError::Wraps { start, len } => {
                let offset = start.wrapping_sub(self.user.start().get());
                ImportError::Wraps { offset, len, user: self.user }
            }
        })
    }

    /// Returns where several ranges are, one behind the other (`io_import_reg_vec`): checked here,
    /// looked up as the iteration comes to them. Nothing is allocated.
    ///
    /// # Errors
    ///
    /// [`ImportError`] where any of them could not be imported, or all of them together are more
    /// than [`MAX_IMPORT`].
    pub fn import_vectored<'a>(
        &'a self,
        ranges: &'a [UserRange],
        direction: Direction,
    ) -> Result<VectoredImport<'a, A>, ImportError> {
        VectoredImport::new(self, ranges, direction)
    }

    #[inline(always)]
    fn permits(&self, direction: Direction) -> bool {
        let needed = match direction {
            Direction::ToDevice => Prot::READ,
            Direction::FromDevice => Prot::WRITE,
            Direction::Bidirectional => Prot::READ_WRITE,
        };
        self.access.contains(needed)
    }

    #[cold]
    fn refusal(&self, offset: u64, len: u64, direction: Direction) -> ImportError {
        if !self.permits(direction) {
            return ImportError::Direction { user: self.user, access: self.access, direction };
        }
        let start = self.user.start().checked_add(offset);
        match start.and_then(|start| UserRange::from_len(start, len.max(1)).ok()) {
            Some(range) if self.user.covers(range) => {
                ImportError::TooLong { len, limit: MAX_IMPORT }
            }
            Some(range) => self.outside(range),
            None => ImportError::Wraps { offset, len, user: self.user },
        }
    }

    #[cold]
    pub(super) fn outside(&self, range: UserRange) -> ImportError {
        ImportError::Outside { range, buffer: Some(self.user), len: self.len() }
    }
}

impl<A: Address> Drop for Buffer<A> {
    fn drop(&mut self) {
        self.keep.end(&self.segments);
    }
}

impl<A: Address> fmt::Debug for Buffer<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { user, access, .. } = self;
        let mut fields = f.debug_struct("Buffer");
        fields.field("user", user).field("access", access);
        fields.field("segments", &self.segments.count()).finish_non_exhaustive()
    }
}

/// Is told when nothing uses a registered buffer of a registry any more.
pub trait TagSink: Send + Sync {
    /// The last reference to the buffer that was registered with this tag is gone: its slot of the
    /// registry was emptied or given another, and no I/O is in flight. Clones in other registries
    /// are not counted.
    ///
    /// # Context
    ///
    /// Called by whoever lets go of the last reference, of a [`Node`] perhaps, after it was let go.
    /// That may be a change of the registry, under way: the sink does not wait for one.
    fn released(&self, tag: u64);
}

impl<F: Fn(u64) + Send + Sync> TagSink for F {
    fn released(&self, tag: u64) {
        self(tag);
    }
}

/// A buffer in a slot of a registry, to which I/O in flight holds references.
///
/// Cloning it is how I/O keeps the buffer: the slot may be emptied or given another meanwhile, and
/// the memory stays until the last reference is gone (`io_rsrc_node` of Linux's io_uring/rsrc.h).
///
/// An [`Import`] borrows the node. An operation that is put away keeps the node, the offset and the
/// length, and imports again what is left when it goes on: that takes nanoseconds.
// It counts for itself, so that registries which share a buffer count on lines of their own.
pub struct Node<A: Address>(Arc<Inner<A>>);

/// Fields are dropped in this order: the sink is told when the buffer was let go.
struct Inner<A: Address> {
    buffer: Arc<Buffer<A>>,
    tag: Option<Tag>,
}

/// Tells a sink when it is dropped.
struct Tag {
    /// 0 where nobody is to be told any more.
    tag: u64,
    sink: Arc<dyn TagSink>,
}

impl Drop for Tag {
    fn drop(&mut self) {
        if self.tag != 0 {
            self.sink.released(self.tag);
        }
    }
}

impl<A: Address> Node<A> {
    /// A node without a tag.
    pub(super) fn new(buffer: Arc<Buffer<A>>) -> Self {
        Self(Arc::new(Inner { buffer, tag: None }))
    }

    pub(super) fn tagged(buffer: Arc<Buffer<A>>, tag: u64, sink: &Arc<dyn TagSink>) -> Self {
        let tag = Tag { tag, sink: Arc::clone(sink) };
        Self(Arc::new(Inner { buffer, tag: Some(tag) }))
    }

    /// Has nobody told when this node goes, which is not shared yet.
    pub(super) fn forget_tag(&mut self) {
        if let Some(tag) = Arc::get_mut(&mut self.0).and_then(|inner| inner.tag.as_mut()) {
            tag.tag = 0;
        }
    }

    /// The buffer, which other registries may share.
    pub fn buffer(&self) -> &Arc<Buffer<A>> {
        &self.0.buffer
    }
}

impl<A: Address> Clone for Node<A> {
    #[inline]
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<A: Address> Deref for Node<A> {
    type Target = Buffer<A>;

    #[inline(always)]
    fn deref(&self) -> &Buffer<A> {
        &self.0.buffer
    }
}

impl<A: Address> fmt::Debug for Node<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
