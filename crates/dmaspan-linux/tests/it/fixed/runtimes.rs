//! Rings of runtimes, of which the pool knows the file alone, and which take buffers by value.

#![expect(unsafe_code, reason = "operations of raw rings, and a runtime's traits")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

use dmaspan::Errno;
use dmaspan_linux::fixed::{
    AttachMethod, FixedBuf, FixedPool, InFlight, RingAttachError, RingAttachment, RingFile,
};
use io_uring::{IoUring, opcode, types};

use crate::fixed::support::{Random, base, file_with, pattern, ring as fixed_ring, wait};

fn ring() -> Option<IoUring> {
    IoUring::new(8).inspect_err(|error| eprintln!("SKIP: {error}")).ok()
}

/// Attaches a pool by nothing but the ring's file.
fn attach(pool: &FixedPool, ring: &IoUring, slot: u32) -> Result<RingAttachment, RingAttachError> {
    // SAFETY:
    // 1. The rings of these tests have the pools' buffers in these slots, and nobody else's.
    unsafe { pool.attach_fd(ring.as_fd(), slot) }
}

/// The result of the only operation of a ring, as a runtime hands it on: a number.
fn run(ring: &mut IoUring, operation: &InFlight) -> i32 {
    // SAFETY:
    // 1. The operation owns the buffer until it is completed, and the files of these tests stay
    //    open.
    unsafe { ring.submission().push(&operation.entry().user_data(3)) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    let done = ring.completion().next().unwrap();
    assert_eq!(done.user_data(), 3);
    done.result()
}

fn read(ring: &mut IoUring, at: &RingAttachment, file: &File) -> io::Result<Vec<u8>> {
    let buffer = at.pool().take().unwrap();
    let operation = buffer.read(at, RingFile::Fd(file.as_raw_fd()), 2, 3..7).unwrap();
    let result = run(ring, &operation);
    // SAFETY:
    // 1. The ring had this operation alone, and it is done.
    let (buffer, result) = unsafe { operation.complete_with(result) };
    result.map(|len| buffer[3..3 + len].to_vec())
}

#[test]
fn a_ring_that_is_known_by_its_file_shares_the_registration_and_reads_and_writes() {
    let (Some(mut first), Some(mut second)) = (ring(), ring()) else { return };
    let pool = base(4096, 3);
    let file = file_with(b"0123456789", 0).unwrap();
    let at = attach(&pool, &first, 0).unwrap();
    assert_eq!(read(&mut first, &at, &file).unwrap(), b"2345");
    // One with a table of its own, by a slot further on, and one attached the other way: all share.
    second.submitter().register_buffers_sparse(8).unwrap();
    let other = attach(&pool, &second, 5).unwrap();
    assert_eq!(read(&mut second, &other, &file).unwrap(), b"2345");
    let Some(third) = fixed_ring(&pool, 2) else { return };
    assert_eq!(at.method(), third.attachment().method());
    // Linux 6.12 shares with no ring that has a table (6.13).
    let refused = AttachMethod::Registered { refused: Some(Errno::EBUSY) };
    assert!([at.method(), refused].contains(&other.method()), "{}", other.method());
    let buffer = pool.take().unwrap();
    assert_eq!((at.slot(&buffer), other.slot(&buffer)), (Some(0), Some(5)));
    assert_eq!(at.slot(&base(4096, 1).take().unwrap()), None);

    let mut buffer = buffer;
    buffer[..3].copy_from_slice(b"abc");
    let target = RingFile::Fd(file.as_raw_fd());
    let operation = buffer.write(&other, target, 3, 0..3).unwrap();
    let result = run(&mut second, &operation);
    // SAFETY:
    // 1. The ring had this operation alone, and it is done.
    let (buffer, written) = unsafe { operation.complete_with(result) };
    assert_eq!((written.unwrap(), &buffer[..3]), (3, &b"abc"[..]));
    drop(buffer);
    assert_eq!(read(&mut first, &at, &file).unwrap(), b"2abc");

    // SAFETY:
    // 1. It is the ring that was attached.
    unsafe { other.detach_fd(second.as_fd()) }.unwrap();
    let error = read(&mut second, &other, &file).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::EFAULT.get()));
    assert_eq!(read(&mut first, &at, &file).unwrap(), b"2abc");
    assert_eq!(pool.free_slices(), 3);
}

#[test]
fn an_operation_that_failed_gives_the_buffer_back_with_the_errno() {
    let Some(mut ring) = ring() else { return };
    let pool = base(4096, 1);
    let at = attach(&pool, &ring, 0).unwrap();
    let buffer = pool.take().unwrap();
    let operation = buffer.read(&at, RingFile::Fd(-1), 0, 0..8).unwrap();
    let result = run(&mut ring, &operation);
    assert!(result < 0);
    // SAFETY:
    // 1. The ring had this operation alone, and it is done.
    let (buffer, read) = unsafe { operation.complete_with(result) };
    assert_eq!(read.unwrap_err().raw_os_error(), Some(-result));
    drop(buffer);
    assert_eq!(pool.free_slices(), 1);
}

#[test]
fn what_is_no_ring_or_has_no_such_slots_is_named_and_nothing_changes() {
    let Some(ring) = ring() else { return };
    let pool = base(4096, 2);
    let file = file_with(b"no ring", 0).unwrap();
    let refused = |fd: BorrowedFd<'_>, slot| {
        // SAFETY:
        // 1. Nobody relies on what these files are.
        unsafe { pool.attach_fd(fd, slot) }.unwrap_err()
    };
    let error = refused(file.as_fd(), 0);
    assert_eq!(error, RingAttachError::Ring { errno: Errno::EOPNOTSUPP });
    assert!(error.to_string().contains("no ring"), "{error}");
    let error = refused(ring.as_fd(), u32::MAX);
    assert_eq!(error, RingAttachError::BeyondTable { first: u32::MAX, needed: 1 });
    // The kernel may lengthen a table; it does not beyond its limit.
    let error = refused(ring.as_fd(), 1 << 14);
    assert_eq!(error, RingAttachError::BeyondTable { first: 1 << 14, needed: 1 });
    let at = attach(&pool, &ring, 0).unwrap();
    assert_eq!(at.first_slot(), 0);
    assert_eq!(pool.free_slices(), 2);
}

/// What runtimes with owned buffers ask of one, as `compio_buf` and `monoio` word it.
///
/// # Safety
///
/// The pointer is the same wherever the value is moved, and leads to `total` initialised bytes, for
/// as long as the value exists.
unsafe trait OwnedBuf: Send + 'static {
    fn stable_mut_ptr(&mut self) -> *mut u8;
    fn total(&self) -> usize;
    fn init(&self) -> usize;
    /// # Safety
    ///
    /// So many bytes are initialised.
    unsafe fn set_init(&mut self, len: usize);
}

/// A buffer of a pool, and how much of it is filled.
struct Block {
    buffer: FixedBuf,
    len: usize,
}

// SAFETY:
// 1. The pointer of a `FixedBuf` is stable, and all of its bytes are initialised.
unsafe impl OwnedBuf for Block {
    fn stable_mut_ptr(&mut self) -> *mut u8 {
        self.buffer.as_mut_ptr()
    }

    fn total(&self) -> usize {
        self.buffer.byte_len()
    }

    fn init(&self) -> usize {
        self.len
    }

    unsafe fn set_init(&mut self, len: usize) {
        self.len = len;
    }
}

/// A read that a runtime does: it owns the buffer until it is done.
struct Read<B> {
    buffer: B,
    file: Arc<File>,
    offset: u64,
    /// The slot of the buffer in the ring's table.
    slot: u16,
}

/// A runtime: a thread with a ring that it gives nobody but by its file.
struct Runtime<B> {
    reads: mpsc::Sender<Read<B>>,
    done: mpsc::Receiver<(B, i32)>,
}

impl<B: OwnedBuf> Runtime<B> {
    /// The runtime, and what `attach` makes of its ring's file.
    fn start<T: Send + 'static>(
        attach: impl FnOnce(BorrowedFd<'_>) -> T + Send + 'static,
    ) -> Option<(Self, T)> {
        let ((reads, queue), (completed, done)) = (mpsc::channel(), mpsc::channel());
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            let Some(mut ring) = ring() else { return };
            tell.send(attach(ring.as_fd())).unwrap();
            let mut in_flight: Vec<Option<Read<B>>> = Vec::new();
            // Two at a time.
            while let Ok(first) = queue.recv() {
                in_flight.extend([Some(first), queue.try_recv().ok()]);
                for (index, read) in (0u64..).zip(&mut in_flight) {
                    let Some(read) = read else { continue };
                    let fd = types::Fd(read.file.as_raw_fd());
                    let (start, len) = (read.buffer.stable_mut_ptr(), read.buffer.total());
                    let len = len.try_into().unwrap();
                    let entry = opcode::ReadFixed::new(fd, start, len, read.slot);
                    let entry = entry.offset(read.offset).build().user_data(index);
                    // SAFETY:
                    // 1. The buffer and the file are kept below until the completion.
                    unsafe { ring.submission().push(&entry) }.unwrap();
                }
                let count = in_flight.iter().flatten().count();
                ring.submit_and_wait(count).unwrap();
                for entry in ring.completion() {
                    let index = usize::try_from(entry.user_data()).unwrap();
                    let mut read = in_flight[index].take().unwrap();
                    if let Ok(len) = usize::try_from(entry.result()) {
                        // SAFETY:
                        // 1. The kernel has written so many.
                        unsafe { read.buffer.set_init(len) };
                    }
                    let _ = completed.send((read.buffer, entry.result()));
                }
                in_flight.clear();
            }
        });
        let attached = told.recv().ok()?;
        Some((Self { reads, done }, attached))
    }
}

#[test]
fn a_runtime_that_takes_buffers_by_value_reads_a_file_into_slices_of_a_pool() {
    // Whole pages, of whatever size.
    const BLOCK: usize = 64 << 10;
    const BLOCKS: usize = 40;
    // The last one is short.
    let bytes: Vec<u8> = (0..BLOCKS * BLOCK - 777).map(pattern).collect();
    let file = file_with(&bytes, 0).unwrap();
    let pool = base(BLOCK.try_into().unwrap(), 4);
    let shared = pool.clone();
    // SAFETY:
    // 1. The runtime has no other buffers.
    let attach = move |fd: BorrowedFd<'_>| unsafe { shared.attach_fd(fd, 0) }.unwrap();
    let Some((runtime, at)) = Runtime::<Block>::start(attach) else { return };
    assert!(matches!(at.method(), AttachMethod::Cloned | AttachMethod::Registered { .. }));
    let mut found = Vec::new();
    let mut starts = Vec::new();
    for block in 0..BLOCKS {
        // Never more in flight than there are slices: the oldest is done first.
        let buffer = match pool.take() {
            Some(buffer) => buffer,
            None => {
                let (done, result) = runtime.done.recv().unwrap();
                assert_eq!(usize::try_from(result).unwrap(), done.init());
                found.push(done.buffer[..done.len].to_vec());
                done.buffer
            }
        };
        starts.push(buffer.as_ptr().addr());
        let (slot, offset) = (at.slot(&buffer).unwrap(), (block * BLOCK).try_into().unwrap());
        let buffer = Block { buffer, len: 0 };
        let file = Arc::clone(&file);
        runtime.reads.send(Read { buffer, file, offset, slot }).unwrap();
    }
    while found.len() < BLOCKS {
        let (done, _) = runtime.done.recv().unwrap();
        found.push(done.buffer[..done.len].to_vec());
    }
    // Two are in flight together, so they may end in any order.
    let mut expected: Vec<Vec<u8>> = bytes.chunks(BLOCK).map(<[u8]>::to_vec).collect();
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
    starts.sort_unstable();
    starts.dedup();
    assert_eq!(starts.len(), 4, "pointers are those of the slices");
    assert_eq!(pool.free_slices(), 4);
}

#[test]
fn pointers_stay_the_same_wherever_buffers_go() {
    let pool = base(4096, 3);
    let Some(mut ring) = fixed_ring(&pool, 2) else { return };
    let file = file_with(&(0..4096).map(pattern).collect::<Vec<_>>(), 0).unwrap();
    let mut random = Random(5);
    for _ in 0..50 {
        let mut buffer = pool.take().unwrap().cast::<u32>();
        let (start, index) = (buffer.as_mut_ptr().addr(), buffer.index());
        assert_eq!(buffer.as_ptr().addr(), start);
        assert_eq!(buffer[..].as_ptr().addr(), start);
        let moved = Box::new(buffer);
        assert_eq!(moved.as_ptr().addr(), start);
        let offset = random.below(100).try_into().unwrap();
        ring.read((*moved).cast::<u8>(), 0..64, &file, offset, 0).unwrap();
        let done = wait(&mut ring);
        assert_eq!((done.buffer.as_ptr().addr(), done.buffer.index()), (start, index));
        drop(done);
        // The slice given back last is taken first.
        assert_eq!(pool.take().unwrap().as_ptr().addr(), start);
    }
}

#[test]
fn a_slice_whose_completion_nobody_has_seen_is_never_used_again() {
    let Some(mut ring) = ring() else { return };
    let pool = base(4096, 3);
    let at = attach(&pool, &ring, 0).unwrap();
    let (reader, writer) = io::pipe().unwrap();
    let buffer = pool.take().unwrap();
    let (lost, start) = (buffer.index(), buffer.as_ptr().addr());
    let operation = buffer.read(&at, RingFile::Fd(reader.as_raw_fd()), u64::MAX, 0..64).unwrap();
    // SAFETY:
    // 1. The operation owns the buffer for ever, and the pipe is open.
    unsafe { ring.submission().push(&operation.entry()) }.unwrap();
    ring.submit().unwrap();
    // A runtime that is cancelled drops its operation before the kernel is done.
    drop(operation);
    for _ in 0..100 {
        let taken: Vec<FixedBuf> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(taken.len(), 2);
        assert!(
            taken.iter().all(|buffer| buffer.index() != lost && buffer.as_ptr().addr() != start)
        );
    }
    // The kernel writes it after that, and nobody is hurt.
    io::Write::write_all(&mut &writer, b"late").unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), 4);
    assert_eq!(pool.free_slices(), 2);
}
