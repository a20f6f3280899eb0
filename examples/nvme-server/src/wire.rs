//! Messages on the socket (QEMU's docs/interop/vfio-user.rst, version 0.1).

use std::io::{self, ErrorKind, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;

use dmaspan::Errno;
use dmaspan_linux::client::{ClientDescriptor, ClientDescriptors};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, recvmsg, send,
};

use crate::bytes::{put, u16_at, u32_at};

/// Bytes of a header.
pub(crate) const HEADER: usize = 16;
/// The most bytes of data in a message, as VERSION says it.
pub(crate) const MAX_DATA: usize = 1 << 20;
/// The most bytes behind the header: data, and what describes it.
const MAX_BODY: usize = MAX_DATA + 64;
/// The most descriptors of a message, as VERSION says it.
pub(crate) const MAX_FDS: usize = 16;
/// The most that the kernel takes with a message (`SCM_MAX_FD` of unix(7)). All are received: the
/// kernel drops those for which there is no room on the thread that reads, which may wait for a
/// socket among them.
const SENT_FDS: usize = 253;
/// How many descriptors of a client may be open that do not close.
const MOST_UNCLOSED: usize = 64;

/// The flag of a request that is not answered.
const NO_REPLY: u32 = 1 << 4;
const REPLY: u32 = 1;
const ERROR: u32 = 1 << 5;
/// The bits that say what kind of message it is: 0 is a request.
const KIND: u32 = 0xf;

/// A message of the client.
#[derive(Debug)]
pub struct Message {
    /// What the client calls it.
    pub id: u16,
    /// What it asks for.
    pub command: u16,
    /// Whether it is a request, and whether it is to be answered.
    pub flags: u32,
    /// The bytes behind the header.
    pub body: Vec<u8>,
    /// The descriptors that came with it.
    pub fds: Vec<ClientDescriptor>,
    /// Whether there were more descriptors than this process may have, or a message.
    pub is_short_of_fds: bool,
}

impl Message {
    /// Whether it asks for something.
    pub(crate) fn is_request(&self) -> bool {
        self.flags & KIND == 0
    }

    pub(crate) fn is_answered(&self) -> bool {
        self.flags & NO_REPLY == 0
    }

    /// The bytes of an answer to it.
    pub(crate) fn answer(&self, done: &Result<Vec<u8>, Errno>) -> Vec<u8> {
        let (flags, errno, body) = match done {
            Ok(body) => (REPLY, 0, body.as_slice()),
            Err(errno) => (REPLY | ERROR, errno.get(), [].as_slice()),
        };
        let mut bytes = vec![0; HEADER];
        let len = u32::try_from(HEADER + body.len()).unwrap_or(u32::MAX);
        put(&mut bytes, 0, &self.id.to_le_bytes());
        put(&mut bytes, 2, &self.command.to_le_bytes());
        put(&mut bytes, 4, &len.to_le_bytes());
        put(&mut bytes, 8, &flags.to_le_bytes());
        put(&mut bytes, 12, &errno.to_le_bytes());
        bytes.extend(body);
        bytes
    }
}

/// The reason why no more messages can be read, or answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The socket failed, or the client took no answer for a time.
    #[error("the client's socket: {0}")]
    Socket(#[from] io::Error),
    /// It ended amid a message.
    #[error("the client's socket ended after {got} bytes of a message")]
    Ended {
        /// How many came.
        got: usize,
    },
    /// A session has no end while it waits for what the client's files do.
    #[error(
        "{unclosed} descriptors that the client sent do not close: it serves the files itself, or \
         they are sockets whose peers do not read"
    )]
    Unclosed {
        /// How many.
        unclosed: usize,
    },
    /// The descriptors of half a message are open here, and one of them may be the other end of the
    /// socket.
    #[error(
        "the client stopped in the middle of a message, after {fds} descriptors of it: send each \
         message at once"
    )]
    Stopped {
        /// How many.
        fds: usize,
    },
    /// Where the next message begins cannot be known.
    #[error("a message of {len} bytes, which are to be from {HEADER} to {}", HEADER + MAX_BODY)]
    Length {
        /// What its header says.
        len: u32,
    },
}

/// Reads the next message; `None` where the client has ended. Its descriptors are counted by `of`.
///
/// This waits as long as the client likes, unless descriptors of it do not close, or came with half
/// a message: one of them may be the other end of the socket, which then never ends. `idle` is
/// called when nothing has come for the time of the socket.
///
/// # Errors
///
/// [`WireError`]: there are no further messages.
pub(crate) fn receive(
    socket: &UnixStream,
    of: &ClientDescriptors,
    idle: &dyn Fn(),
) -> Result<Option<Message>, WireError> {
    let mut message = Message {
        id: 0,
        command: 0,
        flags: 0,
        body: Vec::new(),
        fds: Vec::new(),
        is_short_of_fds: false,
    };
    let mut header = [0; HEADER];
    let got = fill(socket, &mut header, &mut message, (of, idle))?;
    if got == 0 {
        return Ok(None);
    }
    if got < HEADER {
        return Err(WireError::Ended { got });
    }
    message.id = u16_at(&header, 0).unwrap_or_default();
    message.command = u16_at(&header, 2).unwrap_or_default();
    message.flags = u32_at(&header, 8).unwrap_or_default();
    let len = u32_at(&header, 4).unwrap_or_default();
    let body = usize::try_from(len).ok().and_then(|len| len.checked_sub(HEADER));
    let body = body.filter(|body| *body <= MAX_BODY).ok_or(WireError::Length { len })?;
    let mut bytes = vec![0; body];
    let got = fill(socket, &mut bytes, &mut message, (of, idle))?;
    if got < body {
        return Err(WireError::Ended { got: HEADER + got });
    }
    message.body = bytes;
    Ok(Some(message))
}

/// Fills bytes from a socket, less where it ends, and takes the descriptors that come with them.
fn fill(
    socket: &UnixStream,
    bytes: &mut [u8],
    message: &mut Message,
    (of, idle): (&ClientDescriptors, &dyn Fn()),
) -> Result<usize, WireError> {
    let mut done = 0;
    while done < bytes.len() {
        let rest = bytes.get_mut(done..).unwrap_or_default();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SENT_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut rest = [IoSliceMut::new(rest)];
        let received = recvmsg(socket, &mut rest, &mut control, RecvFlags::CMSG_CLOEXEC);
        for sent in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = sent {
                message.fds.extend(fds.map(|fd| ClientDescriptor::new(fd, of)));
            }
        }
        let unclosed = of.unclosed();
        let got = match received.map_err(io::Error::from) {
            // The time of the socket is over, in which all descriptors should have been closed.
            Err(error) if error.kind() == ErrorKind::WouldBlock && unclosed > 0 => {
                return Err(WireError::Unclosed { unclosed });
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock && !message.fds.is_empty() => {
                return Err(WireError::Stopped { fds: message.fds.len() });
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                idle();
                continue;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            _ if unclosed > MOST_UNCLOSED => return Err(WireError::Unclosed { unclosed }),
            got => got?,
        };
        message.is_short_of_fds |=
            got.flags.contains(ReturnFlags::CTRUNC) || message.fds.len() > MAX_FDS;
        message.fds.truncate(MAX_FDS);
        if got.bytes == 0 {
            break;
        }
        done += got.bytes;
    }
    Ok(done)
}

/// Sends an answer. A client that takes none of it in the time of the socket is gone.
///
/// # Errors
///
/// [`WireError::Socket`].
pub(crate) fn reply(socket: &UnixStream, mut answer: &[u8]) -> Result<(), WireError> {
    while !answer.is_empty() {
        // Whatever the process does with SIGPIPE.
        match send(socket, answer, SendFlags::NOSIGNAL) {
            Ok(sent) => answer = answer.get(sent..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
    Ok(())
}
