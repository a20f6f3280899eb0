//! Signals to the eventfds of others, by asynchronous I/O (io_submit(2)).

#![expect(unsafe_code, reason = "system calls that the C library does not have")]

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::OnceLock;

use dmaspan::Errno;

use crate::os;
use crate::sys;

/// How many ended reads the kernel keeps for us, which are thrown away when there is no room.
const EVENTS: usize = 256;
/// `IOCB_CMD_PREAD` and `IOCB_FLAG_RESFD` of linux/aio_abi.h.
const PREAD: u16 = 0;
const RESFD: u32 = 1;

/// The context of this process, and an empty file to read.
pub(crate) struct Context {
    id: libc::c_ulong,
    empty: File,
}

/// `struct iocb` of linux/aio_abi.h.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    rw_flags: u32,
    #[cfg(target_endian = "big")]
    key: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}

const _: () = assert!(size_of::<Iocb>() == 64);

/// Adds 1 to the counter of an eventfd, unless it is full; never waits.
pub(crate) fn signal(eventfd: BorrowedFd<'_>) -> Result<(), Errno> {
    let context = context()?;
    let fd = |fd: i32| u32::try_from(fd).map_err(|_| os::EBADF);
    let mut request = Iocb {
        opcode: PREAD,
        fd: fd(context.empty.as_raw_fd())?,
        flags: RESFD,
        result_fd: fd(eventfd.as_raw_fd())?,
        ..Iocb::default()
    };
    loop {
        let mut requests = [&raw mut request];
        // SAFETY:
        // 1. `requests` is one pointer to a live `iocb`, of the kernel's layout, which the call
        //    reads, and whose key it writes.
        // 2. The request reads no byte, so there is no buffer. It has ended when the call returns.
        let done =
            unsafe { libc::syscall(libc::SYS_io_submit, context.id, 1_i64, requests.as_mut_ptr()) };
        match os::last_errno() {
            _ if done == 1 => return Ok(()),
            // No room for its result: those that are there are of ended reads. Each thread that
            // comes here makes room, and has one request at a time.
            os::EAGAIN => throw_away(context)?,
            errno => return Err(errno),
        }
    }
}

/// Takes the results of reads that have ended.
fn throw_away(context: &Context) -> Result<(), Errno> {
    let mut results = [[0_u64; 4]; EVENTS];
    let (most, none) = (EVENTS, ptr::null_mut::<libc::timespec>());
    // SAFETY:
    // 1. `results` has room for so many `io_event`s, which are four numbers of 64 bits each, and
    //    which the call may write. It takes what is there: it waits for none, so that it needs no
    //    time.
    let taken = unsafe {
        libc::syscall(libc::SYS_io_getevents, context.id, 0_i64, most, results.as_mut_ptr(), none)
    };
    if taken < 0 { Err(os::last_errno()) } else { Ok(()) }
}

/// The context of this process, with which eventfds can be signalled. It is made once: to end one
/// takes milliseconds.
pub(crate) fn context() -> Result<&'static Context, Errno> {
    static CONTEXT: OnceLock<Result<Context, Errno>> = OnceLock::new();
    CONTEXT.get_or_init(new_context).as_ref().map_err(|errno| *errno)
}

fn new_context() -> Result<Context, Errno> {
    let empty = File::from(sys::memfd(c"dmaspan-empty", 0)?);
    let mut id: libc::c_ulong = 0;
    // SAFETY:
    // 1. `id` is a live number, 0, which the call writes.
    let made = unsafe { libc::syscall(libc::SYS_io_setup, EVENTS, &raw mut id) };
    if made == 0 { Ok(Context { id, empty }) } else { Err(os::last_errno()) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::{AsFd, FromRawFd};
    use std::thread;

    use super::*;

    fn eventfd(flags: libc::c_int) -> File {
        // SAFETY:
        // 1. eventfd(2) takes numbers and touches no memory of ours.
        let fd = unsafe { libc::eventfd(0, flags) };
        // SAFETY:
        // 1. The kernel has just opened it for us.
        unsafe { File::from_raw_fd(fd) }
    }

    fn count(mut eventfd: &File) -> u64 {
        let mut bytes = [0; 8];
        eventfd.read_exact(&mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn each_signal_counts_from_any_thread_and_more_often_than_results_have_room() {
        let eventfd = eventfd(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..2000).for_each(|_| signal(eventfd.as_fd()).unwrap()));
            }
        });
        assert_eq!(count(&eventfd), 8000);
    }

    #[test]
    fn a_signal_to_a_full_counter_that_blocks_returns() {
        let mut eventfd = eventfd(0);
        eventfd.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        (0..3).for_each(|_| signal(eventfd.as_fd()).unwrap());
        assert_eq!(count(&eventfd), u64::MAX);
        signal(eventfd.as_fd()).unwrap();
        assert_eq!(count(&eventfd), 1);
    }

    #[test]
    fn what_is_no_eventfd_is_refused() {
        let (zero, memfd) = (File::open("/dev/zero").unwrap(), sys::memfd(c"none", 0).unwrap());
        assert_eq!(signal(zero.as_fd()), Err(Errno::EINVAL));
        assert_eq!(signal(memfd.as_fd()), Err(Errno::EINVAL));
    }
}
