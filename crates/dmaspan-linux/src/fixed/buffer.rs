//! A [`FixedBuf`] is a slice of a pool.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};

use bytemuck::Pod;

use super::{InFlight, OperationError, RingAttachment, RingFile};
use crate::sys::flight::{self, Way};
use crate::sys::slices::Slice;

/// The base page of every system is a multiple of this, and slices begin at pages.
const LEAST_PAGE: usize = 4096;

/// A slice of a [`FixedPool`](super::FixedPool), as elements of type `T`. It belongs to its owner
/// alone, and goes back to the pool on drop.
///
/// A slice that is no multiple of the size of `T` has bytes behind its last element.
///
/// ```
/// use dmaspan_linux::fixed::{FixedPool, PoolOptions};
///
/// let pool = FixedPool::new(&PoolOptions::new(4096, 1))?;
/// let mut buffer = pool.take().ok_or("every slice is taken")?.cast::<u32>();
/// assert_eq!(buffer.len(), 1024);
/// buffer[1] = 7;
/// assert_eq!(buffer.cast::<u8>()[4..8], 7u32.to_ne_bytes());
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping a buffer gives it back to its pool"]
pub struct FixedBuf<T: Pod = u8> {
    slice: Slice,
    _type: PhantomData<T>,
}

impl<T: Pod> FixedBuf<T> {
    const FITS: () = assert!(
        size_of::<T>() != 0 && align_of::<T>() <= LEAST_PAGE,
        "elements need a size, and an alignment of at most a page"
    );

    #[inline]
    pub(crate) fn new(slice: Slice) -> Self {
        const { Self::FITS };
        Self { slice, _type: PhantomData }
    }

    #[inline]
    pub(super) fn into_slice(self) -> Slice {
        self.slice
    }

    /// The same bytes as elements of another type. `U` must not be empty, nor aligned to more than
    /// 4096 bytes: that does not compile.
    #[inline]
    pub fn cast<U: Pod>(self) -> FixedBuf<U> {
        FixedBuf::new(self.slice)
    }

    /// The length of the slice, in bytes.
    #[inline]
    pub fn byte_len(&self) -> usize {
        self.slice.len()
    }

    /// The first element, to read: as [`as_mut_ptr`](Self::as_mut_ptr).
    #[inline]
    pub fn as_ptr(&self) -> *const T {
        self.slice.start().as_ptr().cast()
    }

    /// The first element. The pointer is the same for as long as the pool lives, wherever this
    /// value is moved, and in an [`InFlight`] too; it may be used for all
    /// [`byte_len`](Self::byte_len) bytes while this value, or what owns it, exists, which are
    /// initialised. That is what runtimes with owned buffers ask of one:
    ///
    /// ```
    /// use dmaspan_linux::fixed::{FixedBuf, FixedPool, PoolOptions};
    ///
    /// // The traits of a runtime, such as `compio_buf::{IoBuf, IoBufMut}`.
    /// /// # Safety
    /// ///
    /// /// The pointer stays the same when the buffer is moved, for so many initialised bytes.
    /// unsafe trait IoBuf: 'static {
    ///     fn stable_ptr(&self) -> *const u8;
    ///     fn bytes_init(&self) -> usize;
    ///     fn bytes_total(&self) -> usize;
    /// }
    /// /// # Safety
    /// ///
    /// /// As for `IoBuf`, to write.
    /// unsafe trait IoBufMut: IoBuf {
    ///     fn stable_mut_ptr(&mut self) -> *mut u8;
    ///     /// # Safety
    ///     ///
    ///     /// So many bytes are initialised.
    ///     unsafe fn set_init(&mut self, len: usize);
    /// }
    ///
    /// struct Block {
    ///     buffer: FixedBuf,
    ///     len: usize,
    /// }
    ///
    /// // SAFETY: the pointer is stable, and all bytes are initialised.
    /// unsafe impl IoBuf for Block {
    ///     fn stable_ptr(&self) -> *const u8 {
    ///         self.buffer.as_ptr()
    ///     }
    ///     fn bytes_init(&self) -> usize {
    ///         self.len
    ///     }
    ///     fn bytes_total(&self) -> usize {
    ///         self.buffer.byte_len()
    ///     }
    /// }
    ///
    /// // SAFETY: as above.
    /// unsafe impl IoBufMut for Block {
    ///     fn stable_mut_ptr(&mut self) -> *mut u8 {
    ///         self.buffer.as_mut_ptr()
    ///     }
    ///     unsafe fn set_init(&mut self, len: usize) {
    ///         self.len = len;
    ///     }
    /// }
    ///
    /// let pool = FixedPool::new(&PoolOptions::new(4096, 1))?;
    /// let block = Block { buffer: pool.take().ok_or("every slice is taken")?, len: 0 };
    /// let before = block.stable_ptr();
    /// let moved = Box::new(block);
    /// assert_eq!(before, moved.stable_ptr());
    /// assert_eq!((moved.bytes_init(), moved.bytes_total()), (0, 4096));
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.slice.start().as_ptr().cast()
    }

    #[inline]
    pub(super) fn slice(&self) -> &Slice {
        &self.slice
    }

    /// The number of the slice in its pool.
    #[inline]
    pub fn index(&self) -> u32 {
        self.slice.index()
    }

    /// An operation that reads `bytes.len()` bytes at `offset` of the file into `bytes` of the
    /// slice (`IORING_OP_READ_FIXED`). `offset` is `u64::MAX` for files that have no position, and
    /// to read where the file's own position is.
    ///
    /// ```
    /// use std::os::fd::AsRawFd;
    ///
    /// use dmaspan_linux::fixed::{FixedPool, PoolOptions, RingFile};
    ///
    /// let pool = FixedPool::new(&PoolOptions::new(4096, 1))?;
    /// let mut ring = io_uring::IoUring::new(4)?;
    /// let attachment = pool.attach(&ring.submitter(), 0)?;
    /// let file = std::fs::File::open("/proc/self/exe")?;
    ///
    /// let buffer = pool.take().ok_or("every slice is taken")?;
    /// let operation = buffer.read(&attachment, RingFile::Fd(file.as_raw_fd()), 1, 10..13)?;
    /// let entry = operation.entry().user_data(7);
    /// // SAFETY: the operation owns the buffer until it is completed, and the file is open.
    /// unsafe { ring.submission().push(&entry)? };
    /// ring.submit_and_wait(1)?;
    /// let done = ring.completion().next().ok_or("nothing is done")?;
    /// // SAFETY: the ring had this operation alone.
    /// let (buffer, result) = unsafe { operation.complete(&done) };
    /// assert_eq!(result?, 3);
    /// assert_eq!(&buffer[10..13], b"ELF");
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`RefusedOperation`], with the buffer, where the bytes are not all in the slice, or where
    /// the attachment is of another pool.
    ///
    /// # Context
    ///
    /// The entry is for the ring that was attached.
    #[inline]
    pub fn read(
        self,
        at: &RingAttachment,
        target: impl Into<RingFile>,
        offset: u64,
        bytes: Range<usize>,
    ) -> Result<InFlight<T>, RefusedOperation<T>> {
        self.operation(at, Way::Read, target.into(), offset, bytes)
    }

    /// An operation that writes `bytes` of the slice at `offset` of the file
    /// (`IORING_OP_WRITE_FIXED`), as [`read`](Self::read) reads.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    ///
    /// # Context
    ///
    /// As [`read`](Self::read).
    #[inline]
    pub fn write(
        self,
        at: &RingAttachment,
        target: impl Into<RingFile>,
        offset: u64,
        bytes: Range<usize>,
    ) -> Result<InFlight<T>, RefusedOperation<T>> {
        self.operation(at, Way::Write, target.into(), offset, bytes)
    }

    fn operation(
        self,
        at: &RingAttachment,
        way: Way,
        target: RingFile,
        offset: u64,
        bytes: Range<usize>,
    ) -> Result<InFlight<T>, RefusedOperation<T>> {
        let Some(slot) = at.slot_of(&self.slice) else {
            return Err(RefusedOperation { buffer: self, error: OperationError::OtherPool });
        };
        match flight::entry(&self.slice, &bytes, way, slot, target, offset) {
            Some(entry) => Ok(InFlight::new(self.slice, entry)),
            None => {
                let error = OperationError::Outside { bytes, len: self.byte_len() };
                Err(RefusedOperation { buffer: self, error })
            }
        }
    }

    /// How many bytes of the slice are whole elements.
    #[inline]
    fn used(&self) -> usize {
        let len = self.slice.len();
        len - len % size_of::<T>()
    }
}

impl<T: Pod> Deref for FixedBuf<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // Whole elements, aligned to pages: it cannot fail.
        bytemuck::cast_slice(&self.slice.bytes()[..self.used()])
    }
}

impl<T: Pod> DerefMut for FixedBuf<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        let used = self.used();
        bytemuck::cast_slice_mut(&mut self.slice.bytes_mut()[..used])
    }
}

impl<T: Pod> fmt::Debug for FixedBuf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (index, len) = (self.index(), self.byte_len());
        f.debug_struct("FixedBuf").field("index", &index).field("byte_len", &len).finish()
    }
}

/// An operation that did not begin, and its buffer.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct RefusedOperation<T: Pod = u8> {
    /// As it was.
    pub buffer: FixedBuf<T>,
    /// The reason.
    pub error: OperationError,
}
