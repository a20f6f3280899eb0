//! Reads and writes of files straight to and from a client's memory (preadv(2), pwritev(2)), and by
//! a copy where the client has to be asked for it.

#![expect(unsafe_code, reason = "tells the kernel where memory is")]

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use dmaspan::regbuf::{Held, HeldError};
use dmaspan::{Address, Prot};
use parking_lot::lock_api::RawMutex;

use crate::client::HeldFileError;

/// The most pieces of one system call (`IOV_MAX` of limits.h, `UIO_MAXIOV` of the kernel).
const PIECES: usize = 1024;

/// The most bytes that are copied at once: what a vfio-user client takes in a message unless it
/// says otherwise (`max_data_xfer_size`).
const COPIED: u64 = 1 << 20;

/// Has the kernel access `bytes` of what is held as `access` says, which it is held for: it writes
/// them with what it reads from the file, or reads them and writes the file.
pub(crate) fn transfer<A: Address, L: RawMutex>(
    held: &Held<A, L>,
    bytes: Range<u64>,
    access: Prot,
    fd: BorrowedFd<'_>,
    offset: u64,
) -> Result<u64, HeldFileError<A>> {
    let len = bytes.end.saturating_sub(bytes.start);
    let mut done = 0;
    // Refused before the first byte, also where there is none.
    check(held, &bytes, access)?;
    while done < len {
        let left = len - done;
        let at = offset.saturating_add(done);
        let system = |error| HeldFileError::System { offset: at, len: left, error };
        match some(held, bytes.start + done, left, access, fd, at) {
            Ok(Ok(0)) => break,
            Ok(Ok(moved)) => done += moved,
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            // What was moved before is not lost.
            Ok(Err(_)) if done > 0 => break,
            Err(_) if done > 0 => break,
            Ok(Err(error)) => return Err(system(error)),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(done)
}

fn check<A: Address, L: RawMutex>(
    held: &Held<A, L>,
    bytes: &Range<u64>,
    wanted: Prot,
) -> Result<(), HeldError<A>> {
    if bytes.start > bytes.end {
        let Range { start, end } = *bytes;
        let len = end.wrapping_sub(start);
        return Err(HeldError::Outside { offset: start, len, held: held.range() });
    }
    if !held.access().contains(wanted) {
        return Err(HeldError::Access { held: held.range(), wanted, access: held.access() });
    }
    match held.slices(bytes.start, bytes.end - bytes.start) {
        Ok(_) | Err(HeldError::NotMapped { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// How many of `len` bytes from `from` on one system call moves, and whether by a copy: those of
/// the first region that is not mapped here, or those before it.
fn first_part<A: Address, L: RawMutex>(held: &Held<A, L>, from: u64, len: u64) -> (u64, bool) {
    let Err(HeldError::NotMapped { part }) = held.slices(from, len) else { return (len, false) };
    let before = part.start().get().wrapping_sub(held.range().start().get()).saturating_sub(from);
    if before > 0 { (before, false) } else { (part.len().min(COPIED), true) }
}

/// One system call, for as many pieces as it takes, of what was checked.
fn some<A: Address, L: RawMutex>(
    held: &Held<A, L>,
    from: u64,
    len: u64,
    access: Prot,
    fd: BorrowedFd<'_>,
    offset: u64,
) -> Result<io::Result<u64>, HeldError<A>> {
    let (len, is_copied) = first_part(held, from, len);
    let mut copy = vec![0; if is_copied { usize::try_from(len).unwrap_or(usize::MAX) } else { 0 }];
    let piece = |start: *mut u8, iov_len| libc::iovec { iov_base: start.cast(), iov_len };
    let pieces: Vec<libc::iovec> = if is_copied {
        vec![piece(copy.as_mut_ptr(), copy.len())]
    } else {
        let slices = held.slices(from, len)?.take(PIECES);
        slices.map(|slice| piece(slice.as_ptr(), slice.len())).collect()
    };
    if is_copied && !access.contains(Prot::WRITE) {
        held.read(from, &mut copy)?;
    }
    // There are 1024 at most.
    let count = libc::c_int::try_from(pieces.len()).unwrap_or(libc::c_int::MAX);
    let Ok(at) = libc::off_t::try_from(offset) else {
        return Ok(Err(io::Error::from_raw_os_error(libc::EINVAL)));
    };
    let (fd, pieces) = (fd.as_raw_fd(), pieces.as_ptr());
    let moved = if access.contains(Prot::WRITE) {
        // SAFETY:
        // 1. `pieces` are so many live `iovec`s.
        // 2. They are `copy`, or memory that `held` keeps until the call returns, and which may be
        //    written at any time (the contract of `HostMemory`), as it is held for writes.
        unsafe { libc::preadv(fd, pieces, count, at) }
    } else {
        // SAFETY:
        // 1. `pieces` are so many live `iovec`s.
        // 2. They are `copy`, or memory that `held` keeps until the call returns, and which may be
        //    read at any time (the contract of `HostMemory`).
        unsafe { libc::pwritev(fd, pieces, count, at) }
    };
    let moved = usize::try_from(moved).map_err(|_| io::Error::last_os_error());
    if let (true, Ok(moved)) = (is_copied && access.contains(Prot::WRITE), &moved) {
        held.write(from, copy.get(..*moved).unwrap_or_default())?;
    }
    // No more than was asked for.
    Ok(moved.map(|moved| u64::try_from(moved).unwrap_or(len)))
}
