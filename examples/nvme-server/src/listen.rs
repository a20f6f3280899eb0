//! The socket and the limits of a process that serves.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::{self, FileType};
use std::io::{self, ErrorKind, IoSliceMut};
use std::iter;
use std::mem;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use dmaspan_linux::client::{ClientDescriptor, ClientDescriptors};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, SocketAddrUnix, SocketFlags,
    SocketType, connect, recvmsg, socket_with,
};
use rustix::process::{Resource, Rlimit, getpid, getrlimit, setrlimit};

/// Listens on a socket; one that nobody listens on any more is replaced. Nothing else that has the
/// name is touched.
///
/// A socket that is to go is renamed first, and looked at once more: what another process has put
/// in its place meanwhile gets its name back.
///
/// # Errors
///
/// `AddrInUse` where somebody listens there, or something is there that is no socket, and what that
/// is; of bind(2), rename(2) and unlink(2).
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            remove_left_over(path)?;
            UnixListener::bind(path)
        }
        listener => listener,
    }
}

/// The most bytes that a client sends before it is served: no more than a socket has room for.
const UNSERVED: usize = 1 << 20;
/// The most clients that wait with a socket of this process: whoever comes in crowds takes no
/// descriptors from a client that is served.
const WAITING: usize = 256;

/// The clients of a socket, one after the other.
#[derive(Debug)]
pub struct Clients {
    listener: UnixListener,
    waiting: RefCell<VecDeque<UnixStream>>,
    /// The sockets of those that were sent away.
    away: ClientDescriptors,
}

impl Clients {
    /// Those that come to `listener`.
    pub fn of(listener: UnixListener) -> Self {
        Self { listener, waiting: RefCell::default(), away: ClientDescriptors::default() }
    }

    /// The next one, when it has come.
    ///
    /// # Errors
    ///
    /// Of accept(2).
    pub fn accept(&self) -> io::Result<UnixStream> {
        match self.waiting.borrow_mut().pop_front() {
            Some(client) => Ok(client),
            None => Ok(self.listener.accept()?.0),
        }
    }

    /// Sends those away that have sent descriptors before they are served: what lies unread in a
    /// socket is open, and may be the end of the socket of a client that is served and is gone. So
    /// that nothing lies where nobody looks, those go, too, for whom there is no room to wait, and
    /// those that are gone.
    pub fn look_at_waiting(&self) {
        let mut waiting = self.waiting.borrow_mut();
        let mut bytes = vec![0; UNSERVED];
        let mut stays = |client: &UnixStream| {
            let (mut none, mut all) =
                (RecvAncillaryBuffer::default(), [IoSliceMut::new(&mut bytes)]);
            match recvmsg(client, &mut all, &mut none, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Ok(sent) => {
                    let has_fds = sent.flags.contains(ReturnFlags::CTRUNC);
                    !has_fds && (1..UNSERVED).contains(&sent.bytes)
                }
                Err(error) => error == Errno::AGAIN,
            }
        };
        let mut keep = |waiting: &mut VecDeque<UnixStream>, client| {
            if waiting.len() < WAITING && stays(&client) {
                waiting.push_back(client);
            } else {
                drop(ClientDescriptor::new(OwnedFd::from(client), &self.away));
            }
        };
        for client in mem::take(&mut *waiting) {
            keep(&mut waiting, client);
        }
        if self.listener.set_nonblocking(true).is_ok() {
            // As many come while this looks, and there is another look.
            for (client, _) in iter::from_fn(|| self.listener.accept().ok()).take(WAITING) {
                keep(&mut waiting, client);
            }
        }
        let _ = self.listener.set_nonblocking(false);
    }
}

/// Removes a socket that nobody listens on.
fn remove_left_over(path: &Path) -> io::Result<()> {
    let inode = |path: &Path| fs::symlink_metadata(path).map(|at| (at.dev(), at.ino()));
    let examined = inode(path)?;
    check(path)?;
    let mut aside = PathBuf::from(path).into_os_string();
    aside.push(format!(".{}.left-over", getpid().as_raw_nonzero()));
    let aside = PathBuf::from(aside);
    let rename = |from: &Path, to: &Path| {
        match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            // The file system has no such flag.
            Err(Errno::INVAL) if !to.exists() => fs::rename(from, to),
            renamed => Ok(renamed?),
        }
    };
    rename(path, &aside)?;
    if inode(&aside)? == examined && check(&aside).is_ok() {
        return fs::remove_file(&aside);
    }
    rename(&aside, path)
        .map_err(|error| in_use(format!("it changed, and is {aside:?} now: {error}")))?;
    Err(in_use("somebody else makes it at this moment".to_owned()))
}

/// Refuses what is not a socket that nobody listens on.
fn check(path: &Path) -> io::Result<()> {
    let metadata = fs::symlink_metadata(path)?;
    if !metadata.file_type().is_socket() {
        let (kind, len) = (name(metadata.file_type()), metadata.len());
        return Err(in_use(format!("{kind} of {len} bytes is there, which stays")));
    }
    // Without waiting: a server that accepts nobody has no room for one more.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&client, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => Ok(()),
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => {
            Err(in_use("another process listens there".to_owned()))
        }
        Err(error) => Err(in_use(format!("whether somebody listens there is unknown: {error}"))),
    }
}

fn in_use(why: String) -> io::Error {
    io::Error::new(ErrorKind::AddrInUse, format!("{why}: name another place for the socket"))
}

fn name(kind: FileType) -> &'static str {
    match () {
        () if kind.is_file() => "a regular file",
        () if kind.is_dir() => "a directory",
        () if kind.is_symlink() => "a symbolic link",
        () if kind.is_block_device() => "a block device",
        () => "a pipe or a device",
    }
}

/// Raises the limit of open files as far as it goes. With a lower limit the client is told where it
/// is reached.
pub fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
