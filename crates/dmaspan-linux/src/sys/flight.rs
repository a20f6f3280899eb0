//! The application's own ring does operations on fixed buffers; this keeps the buffer of each until
//! its completion.

#![expect(unsafe_code, reason = "what the kernel has done is the caller's word")]

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::RawFd;

use bytemuck::Pod;
use io_uring::{cqueue, opcode, squeue, types};

use crate::fixed::FixedBuf;
use crate::sys::slices::Slice;

/// The file that an operation on a ring reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingFile {
    /// An open file.
    Fd(RawFd),
    /// A slot of the ring's table of registered files.
    Registered(u32),
}

impl From<types::Fd> for RingFile {
    fn from(fd: types::Fd) -> Self {
        Self::Fd(fd.0)
    }
}

impl From<types::Fixed> for RingFile {
    fn from(slot: types::Fixed) -> Self {
        Self::Registered(slot.0)
    }
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the file to memory (`IORING_OP_READ_FIXED`).
    Read,
    /// The same, by the address of the memory and not by its slot (`IORING_OP_READ`).
    ReadUnregistered,
    /// From memory to the file (`IORING_OP_WRITE_FIXED`).
    Write,
    /// The same, by the address of the memory and not by its slot (`IORING_OP_WRITE`).
    WriteUnregistered,
}

/// The entry of an operation on `bytes` of `slice`, whose chunk is in `slot` of the ring's table;
/// `None` where they are not all in the slice.
pub(crate) fn entry(
    slice: &Slice,
    bytes: &Range<usize>,
    way: Way,
    slot: u16,
    target: RingFile,
    offset: u64,
) -> Option<squeue::Entry> {
    let (start, len) = slice.part(bytes)?;
    Some(match (way, target) {
        (Way::Read, RingFile::Fd(fd)) => {
            opcode::ReadFixed::new(types::Fd(fd), start, len, slot).offset(offset).build()
        }
        (Way::Read, RingFile::Registered(file)) => {
            opcode::ReadFixed::new(types::Fixed(file), start, len, slot).offset(offset).build()
        }
        (Way::ReadUnregistered, RingFile::Fd(fd)) => {
            opcode::Read::new(types::Fd(fd), start, len).offset(offset).build()
        }
        (Way::ReadUnregistered, RingFile::Registered(file)) => {
            opcode::Read::new(types::Fixed(file), start, len).offset(offset).build()
        }
        (Way::Write, RingFile::Fd(fd)) => {
            opcode::WriteFixed::new(types::Fd(fd), start, len, slot).offset(offset).build()
        }
        (Way::Write, RingFile::Registered(file)) => {
            opcode::WriteFixed::new(types::Fixed(file), start, len, slot).offset(offset).build()
        }
        (Way::WriteUnregistered, RingFile::Fd(fd)) => {
            opcode::Write::new(types::Fd(fd), start, len).offset(offset).build()
        }
        (Way::WriteUnregistered, RingFile::Registered(file)) => {
            opcode::Write::new(types::Fixed(file), start, len).offset(offset).build()
        }
    })
}

/// The result that a completion says: bytes moved, or an error.
pub(crate) fn result_of(raw: i32) -> io::Result<usize> {
    usize::try_from(raw).map_err(|_| io::Error::from_raw_os_error(raw.saturating_neg()))
}

/// A buffer that an operation of the application's own ring uses. Nobody reads, writes or reuses
/// it until [`complete`](Self::complete) gives it back. Dropping this leaks the slice: it stays
/// taken for as long as the program runs, and its pool's memory stays.
///
/// The application sets the user data of [`entry`](Self::entry), and pushes it once.
#[must_use = "dropping an operation in flight leaks its buffer"]
pub struct InFlight<T: Pod = u8> {
    slice: ManuallyDrop<Slice>,
    entry: squeue::Entry,
    _type: PhantomData<T>,
}

impl<T: Pod> InFlight<T> {
    pub(crate) fn new(slice: Slice, entry: squeue::Entry) -> Self {
        Self { slice: ManuallyDrop::new(slice), entry, _type: PhantomData }
    }

    /// Returns what to push to the submission queue, once. Its user data is 0.
    ///
    /// # Context
    ///
    /// The memory is valid for as long as this value is not completed, dropped or not, as
    /// [`push`](squeue::SubmissionQueue::push) demands. That the file stays open until the entry
    /// is submitted is up to the caller.
    pub fn entry(&self) -> squeue::Entry {
        self.entry.clone()
    }

    /// Takes the buffer back when its operation is done, and says how many bytes were moved, or
    /// why none were.
    ///
    /// # Safety
    ///
    /// `completion` is of the [`entry`](Self::entry) of this value, which was pushed once, to one
    /// ring, and it is the last one: `IORING_CQE_F_MORE` is not set.
    pub unsafe fn complete(self, completion: &cqueue::Entry) -> (FixedBuf<T>, io::Result<usize>) {
        // SAFETY: what is asked is what the caller promised.
        unsafe { self.complete_with(completion.result()) }
    }

    /// Takes the buffer back when its operation is done, by the result that the kernel gave: for
    /// runtimes that hand on no completion queue entry. `result` is how many bytes were moved, or a
    /// negative errno.
    ///
    /// # Safety
    ///
    /// Either the [`entry`](Self::entry) of this value was pushed once, to one ring, and its last
    /// completion has been seen, of which `result` is; or it was not pushed and will not be, as
    /// where a runtime's queue was full, and `result` is the negative errno of that.
    pub unsafe fn complete_with(self, result: i32) -> (FixedBuf<T>, io::Result<usize>) {
        (self.landed(), result_of(result))
    }

    /// Takes the buffer back when there is no operation.
    ///
    /// # Safety
    ///
    /// The [`entry`](Self::entry) of this value was not pushed and will not be.
    pub unsafe fn abandon(self) -> FixedBuf<T> {
        self.landed()
    }

    fn landed(self) -> FixedBuf<T> {
        FixedBuf::new(ManuallyDrop::into_inner(self.slice))
    }
}

impl<T: Pod> fmt::Debug for InFlight<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("slice", &self.slice.index()).finish_non_exhaustive()
    }
}
