//! Descriptors that a client sent, of which nobody here waits for whoever is behind them.
//!
//! The client decides how long a system call on its file takes: it serves the file system (FUSE),
//! it reads the pipe, it changes the flags of the open file at any moment, since both ends share
//! them. That goes for fstat(2) and mmap(2), and for close(2), which flushes the file or waits
//! until a socket has sent all. Here a descriptor of unknown kind is asked no more than this kernel
//! answers alone.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use dmaspan::Errno;
use parking_lot::Mutex;

use crate::os;
use crate::sys;
use crate::sys::aio;

/// The most threads of a process that close descriptors of clients. Each client has one at most,
/// and one that is stuck ends when whoever is behind the file answers or goes.
const MOST_THREADS: usize = 256;
/// Bytes of their stacks.
const STACK: usize = 64 << 10;
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// The descriptors of one client that are being closed.
///
/// One thread closes those that may wait, and lives for as long as there are any; nobody joins it.
/// A process has 256 such threads at most. With all of them stuck, further descriptors stay open.
/// A server ends the session of a client for which [`unclosed`](Self::unclosed) stays above 0: that
/// is what it costs such a client.
#[derive(Clone, Debug, Default)]
pub struct ClientDescriptors(Arc<Mutex<Closing>>);

#[derive(Debug, Default)]
struct Closing {
    waiting: Vec<OwnedFd>,
    unclosed: usize,
    has_thread: bool,
}

impl ClientDescriptors {
    /// How many descriptors are not closed yet.
    pub fn unclosed(&self) -> usize {
        self.0.lock().unclosed
    }

    fn close(&self, fd: OwnedFd) {
        let mut closing = self.0.lock();
        closing.waiting.push(fd);
        closing.unclosed += 1;
        let room = |threads| (threads < MOST_THREADS).then_some(threads + 1);
        let order = Ordering::Relaxed;
        if closing.has_thread || THREADS.fetch_update(order, order, room).is_err() {
            return;
        }
        let all = self.clone();
        let thread = thread::Builder::new().name("client-close".to_owned()).stack_size(STACK);
        closing.has_thread = thread.spawn(move || all.close_all()).is_ok();
        if !closing.has_thread {
            THREADS.fetch_sub(1, order);
        }
    }

    fn close_all(&self) {
        loop {
            let mut closing = self.0.lock();
            let Some(fd) = closing.waiting.pop() else {
                closing.has_thread = false;
                THREADS.fetch_sub(1, Ordering::Relaxed);
                return;
            };
            drop(closing);
            // May wait for ever, and only this thread does.
            drop(fd);
            self.0.lock().unclosed -= 1;
        }
    }
}

impl Drop for Closing {
    /// What no thread closes stays open: a close would wait here.
    fn drop(&mut self) {
        for fd in self.waiting.drain(..) {
            let _ = fd.into_raw_fd();
        }
    }
}

/// A descriptor that a client sent. Dropping it waits for nobody: what may wait is closed by a
/// thread of its own.
///
/// A server takes each descriptor as one of these as soon as it has received it, its end of the
/// client's socket too, in which descriptors may lie that nobody has received.
///
/// ```
/// use dmaspan_linux::client::{ClientDescriptor, ClientDescriptors};
/// use dmaspan_linux::{Memory, MemoryKind};
///
/// let (of_client, ram) = (ClientDescriptors::default(), Memory::new(MemoryKind::Memfd, 1 << 20)?);
/// let (fd, offset) = ram.file().ok_or("a memfd has a file")?;
/// let sent = ClientDescriptor::new(fd.try_clone_to_owned()?, &of_client);
/// let file = sent.into_memory().ok_or("no memory")?;
/// assert_eq!(Memory::from_file(file, offset, 1 << 20)?.len(), 1 << 20);
///
/// let device = ClientDescriptor::new(std::fs::File::open("/dev/null")?, &of_client);
/// assert!(device.into_event().is_err());
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ClientDescriptor {
    /// There until it is dropped or taken.
    fd: Option<OwnedFd>,
    of: ClientDescriptors,
}

impl ClientDescriptor {
    /// A descriptor of a client whose descriptors are counted by `of`.
    pub fn new(fd: impl Into<OwnedFd>, of: &ClientDescriptors) -> Self {
        Self { fd: Some(fd.into()), of: of.clone() }
    }

    /// The descriptor, where it is of a file in memory: of memfd_create(2), or on a tmpfs or
    /// hugetlbfs. No system call on it asks anybody.
    pub fn into_memory(mut self) -> Option<OwnedFd> {
        self.fd.take_if(|fd| sys::is_memory(fd.as_fd()))
    }

    /// The eventfd that it is of.
    ///
    /// # Errors
    ///
    /// [`EventError`] where it is of another file, or no eventfd of others can be signalled here.
    pub fn into_event(mut self) -> Result<ClientEvent, EventError> {
        let fd = self.fd.take_if(|fd| is_event(fd.as_fd())).ok_or(EventError::Other)?;
        aio::context().map_err(|errno| EventError::NoSignals { errno })?;
        Ok(ClientEvent(fd))
    }
}

impl From<OwnedFd> for ClientDescriptor {
    fn from(fd: OwnedFd) -> Self {
        Self::new(fd, &ClientDescriptors::default())
    }
}

impl Drop for ClientDescriptor {
    fn drop(&mut self) {
        // The last descriptor of memory or of an eventfd ends what is this kernel's own.
        if let Some(fd) = self.fd.take_if(|fd| !sys::is_memory(fd.as_fd()) && !is_event(fd.as_fd()))
        {
            self.of.close(fd);
        }
    }
}

/// Whether a descriptor is of an eventfd. Its name comes from the kernel's own tables of names, and
/// those of files in directories begin with `/` (proc_pid_fd(5)).
fn is_event(fd: BorrowedFd<'_>) -> bool {
    let name = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    name.is_ok_and(|name| name.as_os_str() == "anon_inode:[eventfd]")
}

/// The reason why a descriptor is no [`ClientEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    /// It is of another file.
    #[error("the descriptor for an interrupt is of no eventfd: make one by eventfd(2)")]
    Other,
    /// The kernel does not let this process signal without waiting.
    #[error(
        "eventfds cannot be signalled by io_submit(2): {}; let a seccomp filter pass it, or raise \
         /proc/sys/fs/aio-max-nr",
        os::words(*errno)
    )]
    NoSignals {
        /// What io_setup(2) answered.
        errno: Errno,
    },
}

impl EventError {
    /// The errno.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Other => Errno::EINVAL,
            Self::NoSignals { errno } => *errno,
        }
    }
}

/// An eventfd of a client, which a server signals.
#[derive(Debug)]
pub struct ClientEvent(OwnedFd);

impl ClientEvent {
    /// Adds 1 to the counter; one that is full stays as it is.
    ///
    /// A write(2) would wait while the counter is full, unless the open file has `O_NONBLOCK`. The
    /// client clears that as it likes, and eventfds do not take `RWF_NOWAIT`. So the kernel adds:
    /// it signals the end of an asynchronous read of nothing (`IOCB_FLAG_RESFD` of io_submit(2)),
    /// as its drivers signal interrupts.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, where the kernel has no memory for it.
    ///
    /// # Context
    ///
    /// A system call that waits for nobody.
    pub fn signal(&self) -> Result<(), Errno> {
        aio::signal(self.0.as_fd())
    }
}
