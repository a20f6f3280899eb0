//! The socket and the limits of a process that serves.

use std::io::{self, ErrorKind};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Listens on a socket; one that nobody listens on any more is replaced.
///
/// # Errors
///
/// Of bind(2), and of unlink(2) of the socket before it.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            let left = UnixStream::connect(path);
            if left.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
                std::fs::remove_file(path)?;
            }
            UnixListener::bind(path)
        }
        listener => listener,
    }
}

/// Raises the limit of open files as far as it goes: each region of a client has one. With a lower
/// limit the client is told where it is reached.
pub fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
