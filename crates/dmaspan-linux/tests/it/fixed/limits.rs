//! Limits of locked memory, in a process that has them.

#![expect(unsafe_code, reason = "limits and users of a process")]

use std::env;
use std::os::fd::AsRawFd;
use std::process;

use dmaspan::Errno;
use dmaspan_linux::MemoryKind;
use dmaspan_linux::fixed::{
    AttachMethod, FixedPool, FixedRing, MemoryChoice, PoolOptions, RingAttachError, RingFile,
    Sharing,
};
use dmaspan_linux::registration::RegisterError;
use io_uring::IoUring;

use crate::fixed::support::{again, base, file_with, pinned, wait};

/// Makes this process one that may lock `limit` bytes: of a user that no other process has, as the
/// kernel counts by user. Says why where it cannot.
fn confine(limit: u64) -> Result<(), String> {
    let both = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // SAFETY:
    // 1. `both` is a live rlimit, which the call reads.
    let set = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const both) };
    let user = 1_000_000 + process::id();
    // SAFETY:
    // 1. It changes the user of the process and no memory.
    let changed = unsafe { libc::setresuid(user, user, user) };
    if set == 0 && changed == 0 {
        return Ok(());
    }
    Err(format!("another user cannot be had: {}", std::io::Error::last_os_error()))
}

fn read_works(ring: &mut FixedRing, pool: &FixedPool) {
    let exe = env::current_exe().unwrap();
    let file = std::fs::File::open(exe).unwrap().into();
    ring.read(pool.take().unwrap(), 1..5, &file, 0, 0).unwrap();
    assert_eq!(&wait(ring).buffer[1..5], b"\x7fELF");
}

#[test]
fn more_than_the_limit_says_what_to_raise_and_leaves_the_ring_usable() {
    const NAME: &str = "limits::more_than_the_limit_says_what_to_raise_and_leaves_the_ring_usable";
    if again(NAME).is_some() {
        return;
    }
    if let Err(why) = confine(1 << 20) {
        return eprintln!("SKIP: {why}");
    }
    let (small, large) = (base(64 << 10, 4), base(64 << 10, 64));
    let mut ring = match FixedRing::with(&small, 4, Sharing::Register) {
        Ok(ring) => ring,
        Err(error) => return eprintln!("SKIP: {error}"),
    };
    let before = pinned();
    let raw = IoUring::new(4).unwrap();
    for sharing in [Sharing::Auto, Sharing::Clone, Sharing::Register] {
        let error = large.attach_by(&raw.submitter(), 0, sharing).unwrap_err();
        let RingAttachError::Register(RegisterError::MemlockExceeded { needed, limit, .. }) = error
        else {
            panic!("{error}")
        };
        assert_eq!((needed, limit, error.errno()), (4 << 20, 1 << 20, Errno::ENOMEM));
        let text = error.to_string();
        // Some of it may be in use: room for the pool besides all that there may be now.
        assert!(text.contains("RLIMIT_MEMLOCK") && text.contains("`ulimit -l 5120`"), "{text}");
        assert_eq!(pinned(), before);
    }
    read_works(&mut ring, &small);
    // The ring that was refused has no table, and takes one.
    let at = small.attach(&raw.submitter(), 0).unwrap();
    assert_eq!(at.method(), AttachMethod::Cloned);
    assert_eq!(pinned() - before, 256 << 10);
}

#[test]
fn what_was_registered_before_the_limit_is_let_go() {
    const NAME: &str = "limits::what_was_registered_before_the_limit_is_let_go";
    if again(NAME).is_some() {
        return;
    }
    // Room for two of three buffers.
    if let Err(why) = confine(5 << 20) {
        return eprintln!("SKIP: {why}");
    }
    let large = PoolOptions::new(64 << 10, 96).buffer_len(2 << 20);
    let large = FixedPool::new(&large.memory(MemoryChoice::Only(MemoryKind::Base))).unwrap();
    assert_eq!(large.buffers(), 3);
    let mut raw = IoUring::new(4).unwrap();
    let error = large.attach_by(&raw.submitter(), 0, Sharing::Register).unwrap_err();
    assert_eq!(error.errno(), Errno::ENOMEM);
    // The ring has no table, as before; with one this fails.
    raw.submitter().register_buffers_sparse(4).unwrap();
    for sharing in [Sharing::Register, Sharing::Auto] {
        let error = large.attach_by(&raw.submitter(), 1, sharing).unwrap_err();
        let is_limit = matches!(
            error,
            RingAttachError::Register(RegisterError::MemlockExceeded { needed: 0x60_0000, .. })
        );
        assert!(is_limit, "{error}");
        assert_eq!(pinned(), 0);
    }
    let small = base(4096, 1);
    let at = small.attach(&raw.submitter(), 1).unwrap();
    let file = std::fs::File::open(env::current_exe().unwrap()).unwrap();
    let target = RingFile::Fd(file.as_raw_fd());
    let operation = small.take().unwrap().read(&at, target, 0, 0..4).unwrap();
    // SAFETY:
    // 1. The operation owns the buffer, and the file stays open.
    unsafe { raw.submission().push(&operation.entry()) }.unwrap();
    raw.submit_and_wait(1).unwrap();
    let done = raw.completion().next().unwrap();
    // SAFETY:
    // 1. The ring had this operation alone.
    let (buffer, result) = unsafe { operation.complete(&done) };
    assert_eq!(result.unwrap(), 4);
    assert_eq!(&buffer[..4], b"\x7fELF");
}

#[test]
fn a_ring_of_another_user_registers_again_and_says_why() {
    const NAME: &str = "limits::a_ring_of_another_user_registers_again_and_says_why";
    if again(NAME).is_some() {
        return;
    }
    let pool = base(64 << 10, 4);
    let Some(first) = crate::fixed::support::ring(&pool, 2) else { return };
    if first.attachment().method() != AttachMethod::Cloned {
        return eprintln!("SKIP: {}", first.attachment().method());
    }
    if let Err(why) = confine(1 << 20) {
        return eprintln!("SKIP: {why}");
    }
    let error = FixedRing::with(&pool, 2, Sharing::Clone).unwrap_err();
    assert_eq!(error, RingAttachError::Clone { errno: Errno::EINVAL });
    assert!(error.to_string().contains("another user"), "{error}");
    let mut second = FixedRing::new(&pool, 2).unwrap();
    let method = second.attachment().method();
    assert_eq!(method, AttachMethod::Registered { refused: Some(Errno::EINVAL) });
    assert!(method.to_string().contains("registered again"), "{method}");
    let file = file_with(b"0123456789", 0).unwrap();
    second.read(pool.take().unwrap(), 0..10, &file, 0, 0).unwrap();
    assert_eq!(&wait(&mut second).buffer[..10], b"0123456789");
}
