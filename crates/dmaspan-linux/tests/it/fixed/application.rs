//! Rings that belong to the application.

#![expect(unsafe_code, reason = "operations of raw rings")]

use std::fs;
use std::os::fd::AsRawFd;
use std::thread;

use dmaspan::Errno;
use dmaspan_linux::fixed::{
    AttachMethod, FixedBuf, FixedPool, InFlight, RingAttachError, RingAttachment, RingFile, Sharing,
};
use io_uring::register::Restriction;
use io_uring::{IoUring, types};

use crate::fixed::support::{again, base, file_with, pinned};

fn ring() -> Option<IoUring> {
    IoUring::new(8).inspect_err(|error| eprintln!("SKIP: {error}")).ok()
}

/// Does one operation, which is the only one of the ring.
fn run(ring: &mut IoUring, operation: InFlight) -> (FixedBuf, std::io::Result<usize>) {
    let entry = operation.entry().user_data(99);
    // SAFETY:
    // 1. The operation owns the buffer, and the files of these tests stay open.
    unsafe { ring.submission().push(&entry) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    let done = ring.completion().next().unwrap();
    assert_eq!(done.user_data(), 99);
    // SAFETY:
    // 1. The ring had this operation alone.
    unsafe { operation.complete(&done) }
}

fn read(
    ring: &mut IoUring,
    at: &RingAttachment,
    file: impl Into<RingFile>,
) -> std::io::Result<Vec<u8>> {
    let buffer = at.pool().take().unwrap();
    let (buffer, result) = run(ring, buffer.read(at, file, 2, 3..7).unwrap());
    result.map(|len| buffer[3..3 + len].to_vec())
}

#[test]
fn a_pool_shares_a_table_with_other_buffers() {
    let Some(mut ring) = ring() else { return };
    ring.submitter().register_buffers_sparse(8).unwrap();
    let (first, second) = (base(4096, 2), base(8192, 2));
    let file = file_with(b"0123456789", 0).unwrap();
    let target = types::Fd(file.as_raw_fd());
    for sharing in [Sharing::Register, Sharing::Auto] {
        let one = first.attach_by(&ring.submitter(), 1, sharing).unwrap();
        let other = second.attach_by(&ring.submitter(), 7, sharing).unwrap();
        assert_eq!((one.first_slot(), other.first_slot()), (1, 7));
        for at in [&one, &other] {
            assert_eq!(read(&mut ring, at, target).unwrap(), b"2345");
        }
        one.detach(&ring.submitter()).unwrap();
        let error = read(&mut ring, &one, target).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::EFAULT.get()));
        assert_eq!(read(&mut ring, &other, target).unwrap(), b"2345");
        other.detach(&ring.submitter()).unwrap();
    }
}

#[test]
fn registered_files_are_read_and_written() {
    let Some(mut ring) = ring() else { return };
    let pool = base(4096, 2);
    let at = pool.attach(&ring.submitter(), 0).unwrap();
    let file = file_with(b"0123456789", 0).unwrap();
    ring.submitter().register_files(&[-1, file.as_raw_fd()]).unwrap();
    assert_eq!(read(&mut ring, &at, types::Fixed(1)).unwrap(), b"2345");
    let mut buffer = pool.take().unwrap();
    buffer[1..4].copy_from_slice(b"abc");
    let (_, result) = run(&mut ring, buffer.write(&at, types::Fixed(1), 3, 1..4).unwrap());
    assert_eq!(result.unwrap(), 3);
    assert_eq!(read(&mut ring, &at, types::Fixed(1)).unwrap(), b"2abc");
}

#[test]
fn a_table_that_is_too_short_is_named_and_the_ring_works_on() {
    if again("application::a_table_that_is_too_short_is_named_and_the_ring_works_on").is_some() {
        return;
    }
    let Some(mut ring) = ring() else { return };
    ring.submitter().register_buffers_sparse(2).unwrap();
    let (pool, before) = (base(4096, 2), pinned());
    let error = pool.attach_by(&ring.submitter(), 2, Sharing::Register).unwrap_err();
    assert_eq!(error, RingAttachError::TableTooShort { first: 2, needed: 1 });
    assert!(error.to_string().contains("slots 2 to 2"), "{error}");
    assert_eq!(pinned(), before);
    let error = pool.attach(&ring.submitter(), 1 << 14).unwrap_err();
    assert!(matches!(error, RingAttachError::BeyondTable { needed: 1, .. }), "{error}");
    assert!(error.to_string().contains("16384"), "{error}");
    let at = pool.attach_by(&ring.submitter(), 1, Sharing::Register).unwrap();
    let file = file_with(b"0123456789", 0).unwrap();
    assert_eq!(read(&mut ring, &at, types::Fd(file.as_raw_fd())).unwrap(), b"2345");
    // Shared buffers make the table as long as they need it.
    match pool.attach_by(&ring.submitter(), 5, Sharing::Clone) {
        Ok(at) => assert_eq!(read(&mut ring, &at, types::Fd(file.as_raw_fd())).unwrap(), b"2345"),
        Err(error) => eprintln!("SKIP: {error}"),
    }
}

#[test]
fn a_ring_of_another_thread_is_named_as_such() {
    let mut builder = IoUring::builder();
    builder.setup_single_issuer();
    let ring: IoUring = match builder.build(2) {
        Ok(ring) => ring,
        Err(error) => return eprintln!("SKIP: {error}"),
    };
    let pool = base(4096, 1);
    for sharing in [Sharing::Auto, Sharing::Register] {
        let result = thread::scope(|scope| {
            scope.spawn(|| pool.attach_by(&ring.submitter(), 0, sharing)).join().unwrap()
        });
        let error = result.unwrap_err();
        assert_eq!(error, RingAttachError::Ring { errno: Errno::EEXIST });
        assert!(error.to_string().contains("by another thread"), "{error}");
    }
    let at = pool.attach(&ring.submitter(), 0).unwrap();
    at.detach(&ring.submitter()).unwrap();
}

#[test]
fn a_ring_that_may_register_but_not_share_registers() {
    // IORING_REGISTER_BUFFERS_UPDATE (include/uapi/linux/io_uring.h).
    const UPDATE: u8 = 16;
    let mut builder = IoUring::builder();
    builder.setup_r_disabled();
    let ring: IoUring = match builder.build(2) {
        Ok(ring) => ring,
        Err(error) => return eprintln!("SKIP: {error}"),
    };
    let submitter = ring.submitter();
    submitter.register_buffers_sparse(1).unwrap();
    submitter.register_restrictions(&mut [Restriction::register_op(UPDATE)]).unwrap();
    submitter.register_enable_rings().unwrap();
    let pool = base(4096, 1);
    let error = pool.attach_by(&submitter, 0, Sharing::Clone).unwrap_err();
    assert!(matches!(error, RingAttachError::Clone { .. }), "{error}");
    let at = pool.attach(&submitter, 0).unwrap();
    assert!(matches!(at.method(), AttachMethod::Registered { refused: Some(_) }));
}

#[test]
fn an_operation_that_is_dropped_leaks_its_buffer_and_the_memory() {
    let Some(mut ring) = ring() else { return };
    let pool = base(4096, 2);
    let range = pool.user_range();
    let at = pool.attach(&ring.submitter(), 0).unwrap();
    let file = file_with(b"0123456789", 0).unwrap();
    let target = RingFile::Fd(file.as_raw_fd());
    let operation = pool.take().unwrap().read(&at, target, 0, 0..10).unwrap();
    let entry = operation.entry();
    drop(operation);
    // SAFETY:
    // 1. The slice is taken for ever, and the file stays open.
    unsafe { ring.submission().push(&entry) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), 10);
    assert_eq!(pool.free_slices(), 1);
    let other = pool.take().unwrap();
    assert!(pool.take().is_none());
    assert!(other.iter().all(|byte| *byte == 0));
    drop((other, at, pool));
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
    assert!(maps.lines().any(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        let end = hex(rest.split_once(' ').unwrap().0);
        hex(start) <= range.start().get() && range.last().get() < end
    }));
}

#[test]
fn an_operation_that_never_was_gives_its_buffer_back() {
    let Some(ring) = ring() else { return };
    let pool = base(4096, 1);
    let at = pool.attach(&ring.submitter(), 0).unwrap();
    let operation = pool.take().unwrap().write(&at, RingFile::Registered(0), 0, 0..10).unwrap();
    assert_eq!(pool.free_slices(), 0);
    // SAFETY:
    // 1. Nobody has asked for its entry.
    drop(unsafe { operation.abandon() });
    assert_eq!(pool.free_slices(), 1);
}

#[test]
fn demanding_to_share_with_a_plain_table_works_or_says_which_kernel_can() {
    let Some(mut ring) = ring() else { return };
    let mut own = vec![0_u8; 4096];
    let buffer = libc::iovec { iov_base: own.as_mut_ptr().cast(), iov_len: 4096 };
    // SAFETY:
    // 1. The vector outlives the ring's operations, none of which uses it.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
    let pool: FixedPool = base(4096, 1);
    match pool.attach_by(&ring.submitter(), 1, Sharing::Clone) {
        Ok(at) => {
            let file = file_with(b"0123456789", 0).unwrap();
            assert_eq!(read(&mut ring, &at, types::Fd(file.as_raw_fd())).unwrap(), b"2345");
        }
        Err(error) => assert!(error.to_string().contains("6.1"), "{error}"),
    }
}
