//! A ring that keeps what its operations use, until they have completed.

#![expect(unsafe_code, reason = "queues operations on memory")]

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{CancelBuilder, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, Submitter};

use crate::os;
use crate::sys::flight::{self, RingFile, Way};
use crate::sys::slices::Slice;

/// How long a dropped ring waits for operations that were asked to end.
const LINGER: Duration = Duration::from_secs(2);

/// What the kernel uses until an operation is done.
#[derive(Debug)]
struct Flight {
    /// Given back on completion, or when it is known that there will be none.
    slice: ManuallyDrop<Slice>,
    /// Open until then, so that the entry finds no other file.
    _file: Arc<File>,
    token: u64,
}

/// An operation that is done.
#[derive(Debug)]
pub(crate) struct Landed {
    pub(crate) slice: Slice,
    pub(crate) token: u64,
    pub(crate) result: io::Result<usize>,
}

/// An operation to begin.
#[derive(Debug)]
pub(crate) struct Op<'file> {
    pub(crate) way: Way,
    /// Of the slice.
    pub(crate) bytes: Range<usize>,
    /// The slot of the slice's chunk in the ring's table.
    pub(crate) slot: u16,
    pub(crate) file: &'file Arc<File>,
    pub(crate) offset: u64,
    pub(crate) token: u64,
}

/// A ring of this crate, whose operations own their slices and files.
///
/// # Invariant
///
/// Every operation of the ring that may not be done has a flight in `table`, at the place and with
/// the generation that its user data says.
pub(crate) struct Flights {
    ring: IoUring,
    table: Vec<FlightSlot>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct FlightSlot {
    flight: Option<Flight>,
    /// Raised by each flight.
    generation: u32,
}

impl Flights {
    /// A ring for `depth` operations at a time.
    pub(crate) fn new(depth: u32) -> io::Result<Self> {
        let ring = IoUring::new(depth)?;
        let no_memory = |_| io::Error::from_raw_os_error(libc::ENOMEM);
        let count = usize::try_from(depth).unwrap_or(usize::MAX);
        let (mut table, mut free) = (Vec::new(), Vec::new());
        table.try_reserve_exact(count).map_err(no_memory)?;
        free.try_reserve_exact(count).map_err(no_memory)?;
        table.extend((0..depth).map(|_| FlightSlot { flight: None, generation: 0 }));
        free.extend((0..depth).rev());
        Ok(Self { ring, table, free })
    }

    /// The ring's system calls.
    pub(crate) fn submitter(&self) -> Submitter<'_> {
        self.ring.submitter()
    }

    /// How many operations there can be at a time.
    pub(crate) fn depth(&self) -> usize {
        self.table.len()
    }

    /// How many there are now.
    pub(crate) fn in_flight(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// Queues an operation. Gives the slice back where `op.bytes` are not all in it, or where
    /// there are as many operations as there can be.
    pub(crate) fn start(&mut self, slice: Slice, op: Op<'_>) -> Result<(), Slice> {
        let target = RingFile::Fd(op.file.as_raw_fd());
        let entry = flight::entry(&slice, &op.bytes, op.way, op.slot, target, op.offset);
        let Some(entry) = entry else { return Err(slice) };
        let Some(&index) = self.free.last() else { return Err(slice) };
        let place = usize::try_from(index).ok().and_then(|index| self.table.get_mut(index));
        let Some(place) = place else { return Err(slice) };
        place.generation = place.generation.wrapping_add(1);
        let entry = entry.user_data(u64::from(place.generation) << 32 | u64::from(index));
        // SAFETY:
        // 1. The bytes belong to `slice`, which nobody accesses until the completion of this
        //    entry: it goes into the table below, or stays with the caller where the queue is
        //    full, and then the kernel has no entry.
        // 2. The file is open until then, as the table holds it too.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            return Err(slice);
        }
        let (slice, file) = (ManuallyDrop::new(slice), Arc::clone(op.file));
        place.flight = Some(Flight { slice, _file: file, token: op.token });
        self.free.pop();
        Ok(())
    }

    /// Takes one operation that is done; `None` where none is.
    pub(crate) fn land(&mut self) -> Option<Landed> {
        loop {
            let done = self.ring.completion().next()?;
            let data = done.user_data();
            let index = u32::try_from(data & u64::from(u32::MAX)).ok()?;
            let place = usize::try_from(index).ok().and_then(|index| self.table.get_mut(index));
            // The kernel completes each operation once; anything else is not of this table.
            let Some(place) = place else { continue };
            if u64::from(place.generation) != data >> 32 {
                continue;
            }
            let Some(flight) = place.flight.take() else { continue };
            self.free.push(index);
            return Some(Landed {
                slice: ManuallyDrop::into_inner(flight.slice),
                token: flight.token,
                result: flight::result_of(done.result()),
            });
        }
    }

    /// Waits for a completion until `deadline`, and submits nothing.
    fn wait(&self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
        let args = SubmitArgs::new().timespec(&left);
        let flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
        // SAFETY:
        // 1. With `IORING_ENTER_EXT_ARG` the argument is a `struct io_uring_getevents_arg`, which
        //    `SubmitArgs` is; it and the time that it points to live until the call returns.
        // 2. Nothing is submitted.
        unsafe { self.ring.submitter().enter(0, 1, flags.bits(), Some(&args)) }.map(drop)
    }
}

impl Drop for Flights {
    /// Cancels what is in flight and waits for a while. What is not done then keeps its slice for
    /// ever.
    fn drop(&mut self) {
        self.settle();
        if self.in_flight() > self.ring.submission().len() {
            return;
        }
        // Closing the ring would let the buffers go too, but later.
        let _ = self.ring.submitter().unregister_buffers();
        // What is left was never submitted, and is not any more: the ring ends here.
        for flight in self.table.iter_mut().filter_map(|place| place.flight.take()) {
            drop(ManuallyDrop::into_inner(flight.slice));
        }
    }
}

impl Flights {
    /// Ends what is submitted, as far as it ends in time.
    fn settle(&mut self) {
        let queued = self.ring.submission().len();
        if self.in_flight() <= queued {
            return;
        }
        // It fails where nothing is found any more (Linux 6.0). Operations on files end by
        // themselves; a read of a pipe does not, and stays in flight on older kernels.
        let timeout = Timespec::new().sec(LINGER.as_secs());
        let _ = self.ring.submitter().register_sync_cancel(Some(timeout), CancelBuilder::any());
        let deadline = Instant::now() + LINGER;
        loop {
            while self.land().is_some() {}
            if self.in_flight() <= queued {
                return;
            }
            match self.wait(deadline) {
                Ok(()) => {}
                Err(error) if os::errno(&error) == dmaspan::Errno::EINTR => {}
                Err(_) => return,
            }
        }
    }
}

impl std::fmt::Debug for Flights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flights").field("table", &self.table).finish_non_exhaustive()
    }
}
