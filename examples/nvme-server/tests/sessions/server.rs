//! The program, and the clients that it has.

use std::fs::{self, File};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

pub(crate) const VERSION: u16 = 1;
pub(crate) const DMA_MAP: u16 = 2;
pub(crate) const DMA_UNMAP: u16 = 3;
pub(crate) const SET_IRQS: u16 = 8;
pub(crate) const REGION_READ: u16 = 9;
pub(crate) const REGION_WRITE: u16 = 10;
/// A request that is not answered.
pub(crate) const POSTED: u32 = 0x10;
/// Longer than anything takes that ends.
pub(crate) const LONG: Duration = Duration::from_secs(120);

pub(crate) const RAM: u64 = 0x4000_0000;
pub(crate) const RAM_LEN: u64 = 0x10_0000;

/// A server of its own, with a disk of 1 MiB; both are gone with the value.
pub(crate) struct Server {
    child: Child,
    folder: PathBuf,
}

impl Server {
    pub(crate) fn start(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("dmaspan-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        File::create(folder.join("disk")).unwrap().set_len(1 << 20).unwrap();
        let said = File::create(folder.join("said")).unwrap();
        let mut server = Command::new(env!("CARGO_BIN_EXE_dmaspan-nvme-server"));
        server.args(["--threads", "2"]).args([folder.join("socket"), folder.join("disk")]);
        server.stdout(Stdio::null()).stderr(said);
        let child = server.spawn().unwrap();
        Self { child, folder }
    }

    /// The socket of a client, connected.
    pub(crate) fn connect(&self) -> UnixStream {
        let begun = Instant::now();
        loop {
            match UnixStream::connect(self.folder.join("socket")) {
                Ok(socket) => {
                    socket.set_read_timeout(Some(LONG)).unwrap();
                    socket.set_write_timeout(Some(LONG)).unwrap();
                    return socket;
                }
                Err(error) => assert!(begun.elapsed() < LONG, "{error}"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn threads(&self) -> usize {
        fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap().count()
    }

    /// Waits until no more threads are there than the one that waits for clients and `most` others.
    pub(crate) fn settle(&self, most: usize) {
        let begun = Instant::now();
        while self.threads() > 1 + most {
            assert!(begun.elapsed() < LONG, "{} threads stay", self.threads() - 1);
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets it open files whose numbers are less than this, as where all others are in use.
    pub(crate) fn limit_files(&self, current: u64) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        let limit = Rlimit { current: Some(current), maximum: getrlimit(Resource::Nofile).maximum };
        prlimit(pid, Resource::Nofile, limit).unwrap();
    }

    /// What it has complained of so far.
    pub(crate) fn said(&self) -> String {
        fs::read_to_string(self.folder.join("said")).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !thread::panicking() {
            assert!(self.child.try_wait().unwrap().is_none(), "the server ended: {}", self.said());
            assert!(!self.said().contains("panicked"), "{}", self.said());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

pub(crate) fn memfd(len: u64, seals: SealFlags) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("client", flags).unwrap());
    file.set_len(len).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Sends a message, as far as the server takes it.
pub(crate) fn send(
    socket: &UnixStream,
    command: u16,
    flags: u32,
    body: &[u8],
    fds: &[BorrowedFd<'_>],
) {
    let mut bytes = vec![1, 0];
    bytes.extend(command.to_le_bytes());
    bytes.extend(words(&[u32::try_from(16 + body.len()).unwrap(), flags, 0]));
    bytes.extend(body);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let sent = sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    if let Some(rest) = sent.ok().and_then(|sent| bytes.get(sent..)) {
        let mut socket = socket;
        let _ = socket.write_all(rest);
    }
}

/// The next answer: its body, or its errno.
pub(crate) fn answer(mut socket: &UnixStream) -> Result<Vec<u8>, u32> {
    let mut header = [0; 16];
    socket.read_exact(&mut header).expect("an answer");
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
    let mut body = vec![0; word(4) as usize - 16];
    socket.read_exact(&mut body).expect("a whole answer");
    match (word(8), word(12)) {
        (1, 0) => Ok(body),
        (0x21, errno) if errno != 0 && body.is_empty() => Err(errno),
        (flags, errno) => panic!("an answer with flags {flags:#x} and {errno}"),
    }
}

pub(crate) fn ask(
    socket: &UnixStream,
    command: u16,
    body: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<Vec<u8>, u32> {
    send(socket, command, 0, body, fds);
    answer(socket)
}

pub(crate) fn map_body(flags: u32, offset: u64, address: u64, len: u64) -> Vec<u8> {
    let mut body = words(&[32, flags]);
    body.extend([offset, address, len].map(u64::to_le_bytes).as_flattened());
    body
}

pub(crate) fn write_body(region: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    let mut body = offset.to_le_bytes().to_vec();
    body.extend(words(&[region, u32::try_from(data.len()).unwrap()]));
    body.extend(data);
    body
}

/// Writes a register, without an answer.
pub(crate) fn register(socket: &UnixStream, offset: u64, value: u64) {
    let len = if (0x28..0x1000).contains(&offset) { 8 } else { 4 };
    let bytes = value.to_le_bytes();
    send(socket, REGION_WRITE, POSTED, &write_body(0, offset, &bytes[..len]), &[]);
}

/// Lets the function master its bus, and enables the controller, whose admin queue of 16 entries is
/// at the start of RAM, with completions in the page behind.
pub(crate) fn enable(socket: &UnixStream) {
    send(socket, REGION_WRITE, POSTED, &write_body(7, 4, &[6, 0]), &[]);
    register(socket, 0x14, 0);
    register(socket, 0x24, 0x000f_000f);
    register(socket, 0x28, RAM);
    register(socket, 0x30, RAM + 0x1000);
    register(socket, 0x14, 0x0046_0001);
}

/// An Identify of the controller, whose data goes to the third page of RAM.
pub(crate) fn identify(id: u16) -> [u8; 64] {
    let mut command = [0; 64];
    command[0] = 6;
    command[2..4].copy_from_slice(&id.to_le_bytes());
    command[24..32].copy_from_slice(&(RAM + 0x2000).to_le_bytes());
    command[40] = 1;
    command
}

/// A body of `DEVICE_SET_IRQS` for eventfds.
pub(crate) fn interrupts(start: u32, count: u32) -> Vec<u8> {
    words(&[20, 0x24, 2, start, count])
}

/// A client that does what it should is answered, its command done and its interrupt signalled.
pub(crate) fn serve_a_good_client(server: &Server) {
    let socket = server.connect();
    let version = ask(&socket, VERSION, b"\0\0\x01\0{}\0", &[]).expect("a version");
    assert!(version.starts_with(b"\0\0\x01\0{"));
    let ram = memfd(RAM_LEN, SealFlags::SHRINK);
    ask(&socket, DMA_MAP, &map_body(3, 0, RAM, RAM_LEN), &[ram.as_fd()]).unwrap();
    let event: OwnedFd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    ask(&socket, SET_IRQS, &interrupts(0, 1), &[event.as_fd()]).unwrap();
    ram.write_all_at(&identify(7), 0).unwrap();
    enable(&socket);
    register(&socket, 0x1000, 1);
    let mut count = [0; 8];
    assert_eq!(rustix::io::read(&event, &mut count), Ok(8));
    let mut data = [0; 7];
    ram.read_exact_at(&mut data, 0x2000 + 24).unwrap();
    assert_eq!(&data, b"dmaspan");
}
