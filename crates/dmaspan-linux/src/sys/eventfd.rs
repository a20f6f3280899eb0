//! Counters that the kernel adds to and a process waits for (eventfd(2)).

#![expect(unsafe_code, reason = "eventfd and ppoll of the C library")]

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::ptr;
use std::time::{Duration, Instant};

use dmaspan::Errno;

use crate::os;

/// A counter, 0 at first.
#[derive(Debug)]
pub(crate) struct EventFd {
    file: File,
}

impl EventFd {
    pub(crate) fn new() -> Result<Self, Errno> {
        // SAFETY:
        // 1. eventfd(2) takes numbers and touches no memory of ours.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(os::last_errno());
        }
        // SAFETY:
        // 1. The kernel has just opened `fd` for us, and nobody else knows it.
        // 2. It is an ordinary file descriptor, which close(2) closes.
        Ok(Self { file: unsafe { File::from_raw_fd(fd) } })
    }

    /// Takes what was added since the last time; 0 where nothing was.
    pub(crate) fn take(&self) -> Result<u64, Errno> {
        let mut bytes = [0; 8];
        loop {
            match (&self.file).read(&mut bytes) {
                Ok(_) => return Ok(u64::from_ne_bytes(bytes)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(os::errno(&error)),
            }
        }
    }

    /// Waits until something was added, and takes it; 0 where nothing was within `timeout`.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Result<u64, Errno> {
        // A time that no clock reaches is none.
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let taken = self.take()?;
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if taken != 0 || left.is_some_and(|left| left.is_zero()) {
                return Ok(taken);
            }
            self.poll(left)?;
        }
    }

    /// Waits until something was added, the time is up or a signal came.
    fn poll(&self, timeout: Option<Duration>) -> Result<(), Errno> {
        let mut fd = libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let time = timeout.map(|timeout| libc::timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
        // SAFETY:
        // 1. `fd` is one live pollfd, which the call writes.
        // 2. `time` is null or points to a live timespec, which it reads (on Linux, the C library
        //    passes a copy to the kernel). There is no mask of signals.
        let result = unsafe { libc::ppoll(&raw mut fd, 1, time, ptr::null()) };
        match os::last_errno() {
            errno if result < 0 && errno != Errno::EINTR => Err(errno),
            _ => Ok(()),
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::thread;

    use super::*;

    fn add(event: &EventFd, count: u64) {
        assert_eq!((&event.file).write(&count.to_ne_bytes()).unwrap(), 8);
    }

    #[test]
    fn what_was_added_is_taken_once() {
        let event = EventFd::new().unwrap();
        assert_eq!(event.take(), Ok(0));
        add(&event, 2);
        add(&event, 3);
        assert_eq!(event.take(), Ok(5));
        assert_eq!(event.take(), Ok(0));
        add(&event, 1);
        assert_eq!(event.wait(Some(Duration::ZERO)), Ok(1));
        assert_eq!(event.wait(Some(Duration::ZERO)), Ok(0));
    }

    #[test]
    fn a_wait_ends_with_the_event_or_with_the_time() {
        let event = EventFd::new().unwrap();
        let begin = Instant::now();
        assert_eq!(event.wait(Some(Duration::from_millis(20))), Ok(0));
        assert!(begin.elapsed() >= Duration::from_millis(20));
        for timeout in [None, Some(Duration::MAX), Some(Duration::from_secs(100))] {
            thread::scope(|scope| {
                let waiter = scope.spawn(|| event.wait(timeout));
                thread::sleep(Duration::from_millis(5));
                add(&event, 7);
                assert_eq!(waiter.join().unwrap(), Ok(7));
            });
        }
    }
}
