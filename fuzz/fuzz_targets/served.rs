//! A client of the NVMe server, and its guest: the bytes are what they do. Each step is a byte that
//! chooses it, and the bytes that it needs; those that are missing are 0.
//!
//! | step | what is done |
//! |---|---|
//! | 0 | bytes are written to the socket, whatever they are |
//! | 1 | a message of any kind is sent, with a right header and a descriptor |
//! | 2 | a register is written |
//! | 3 | the guest writes a command into a queue, and rings |
//! | 4, 5 | the guest's memory is mapped, or unmapped |
//! | 6 | queues are set, and the controller is enabled |
//! | 7 | the command register is written, with bus mastering or without it |
#![no_main]

use std::fs::{self, File};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use dmaspan_nvme_server::{Disk, Session};
use dmaspan_vfio_user::ClientDma;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const RAM: u64 = 0x10_0000;
const RAM_LEN: u64 = 0x2_0000;
/// Descriptors of each kind that a client may send.
static FILES: LazyLock<Vec<File>> = LazyLock::new(|| {
    let open = memfd(RAM_LEN);
    let ram = memfd(RAM_LEN);
    fcntl_add_seals(&ram, SealFlags::SHRINK).expect("a seal");
    let event = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    let zero = File::open("/dev/zero").expect("a device");
    vec![ram, open, File::from(event), zero]
});

fn memfd(len: u64) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("fuzz", flags).expect("a memfd"));
    file.set_len(len).expect("its length");
    file
}

struct Steps<'b>(&'b [u8]);

impl<'b> Steps<'b> {
    fn take(&mut self, len: usize) -> &'b [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or_default()
    }

    fn word(&mut self) -> u64 {
        let mut bytes = [0; 8];
        let taken = self.take(8);
        bytes[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(bytes)
    }
}

/// Sends bytes with descriptors; a server that has gone is no matter.
fn send(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    if let Some(rest) = sent.ok().and_then(|sent| bytes.get(sent..)) {
        let mut socket = socket;
        let _ = socket.write_all(rest);
    }
}

fn message(socket: &UnixStream, command: u16, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut bytes = vec![1, 0];
    bytes.extend(command.to_le_bytes());
    bytes.extend((16 + body.len() as u32).to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(body);
    send(socket, &bytes, fds);
}

fn register(socket: &UnixStream, offset: u64, data: &[u8]) {
    write(socket, 0, offset, data);
}

fn command(socket: &UnixStream, value: u8) {
    write(socket, 7, 4, &[value, 0]);
}

fn write(socket: &UnixStream, region: u32, offset: u64, data: &[u8]) {
    let mut body = offset.to_le_bytes().to_vec();
    body.extend(region.to_le_bytes());
    body.extend((data.len() as u32).to_le_bytes());
    body.extend(data);
    message(socket, 10, 0x10, &body, &[]);
}

fn step(steps: &mut Steps<'_>, socket: &UnixStream, tails: &mut [u32; 4]) {
    let ram = &FILES[0];
    match steps.byte() % 8 {
        0 => {
            let len = usize::from(steps.byte() % 64);
            send(socket, steps.take(len), &[]);
        }
        1 => {
            let (command, kind, count) = (steps.byte() % 16, steps.byte(), steps.byte() % 24);
            let flags = if kind & 0x80 != 0 { 0x10 } else { 0 };
            let file = FILES.get(usize::from(kind & 7)).map(AsFd::as_fd);
            let fds: Vec<_> = file.into_iter().cycle().take(usize::from(count.min(20))).collect();
            let len = usize::from(steps.byte() % 64);
            message(socket, command.into(), flags, steps.take(len), &fds);
        }
        2 => {
            let offset = u64::from(steps.byte()) * 4 + u64::from(steps.byte() & 1) * 0x1000;
            let len = [4, 8, 1, 2][usize::from(steps.byte() & 3)];
            let value = steps.word().to_le_bytes();
            register(socket, offset, &value[..len]);
        }
        3 => {
            let queue = usize::from(steps.byte() & 3);
            let mut command = [0; 64];
            let taken = steps.take(64);
            command[..taken.len()].copy_from_slice(taken);
            let entry = u64::from(tails[queue]) * 64;
            ram.write_all_at(&command, queue as u64 * 0x2000 + entry).expect("memory");
            tails[queue] = (tails[queue] + 1) % 16;
            register(socket, 0x1000 + 8 * queue as u64, &tails[queue].to_le_bytes());
        }
        4 => {
            let (from, to) = (steps.byte() & 31, steps.byte() & 31);
            let (offset, len) = (u64::from(from) << 12, u64::from(to) << 12);
            let mut body = vec![32, 0, 0, 0, 3, 0, 0, 0];
            body.extend([offset, RAM + offset, len].map(u64::to_le_bytes).as_flattened());
            message(socket, 2, 0, &body, &[ram.as_fd()]);
        }
        5 => {
            let mut body = vec![24, 0, 0, 0, steps.byte() & 3, 0, 0, 0];
            let (from, to) = (u64::from(steps.byte() & 31), u64::from(steps.byte()));
            body.extend([RAM + (from << 12), to << 12].map(u64::to_le_bytes).as_flattened());
            message(socket, 3, 0, &body, &[]);
        }
        7 => command(socket, steps.byte() & 7),
        _ => {
            let mut body = vec![32, 0, 0, 0, 3, 0, 0, 0];
            body.extend([0, RAM, RAM_LEN].map(u64::to_le_bytes).as_flattened());
            message(socket, 2, 0, &body, &[ram.as_fd()]);
            *tails = [0; 4];
            command(socket, 6);
            register(socket, 0x14, &0_u32.to_le_bytes());
            register(socket, 0x24, &0x000f_000f_u32.to_le_bytes());
            register(socket, 0x28, &RAM.to_le_bytes());
            register(socket, 0x30, &(RAM + 0x1000).to_le_bytes());
            register(socket, 0x14, &0x0046_0001_u32.to_le_bytes());
        }
    }
}

/// The threads of this process.
fn threads() -> usize {
    fs::read_dir("/proc/self/task").expect("threads").count()
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let before = threads();
    let disk = Disk::new(memfd(0x1_0000)).expect("a disk");
    // No memory is waited for that a step has unmapped.
    let dma = ClientDma::default().with_settle(Duration::ZERO);
    let session = Session::new(disk, dma, 2).expect("threads");
    let (client, server) = UnixStream::pair().expect("sockets");
    let answers = thread::scope(|scope| {
        let serving = scope.spawn(move || {
            let (report, _) = session.serve(&server);
            drop(server);
            report
        });
        let reading = scope.spawn(|| {
            let mut answers = Vec::new();
            let mut socket = &client;
            // A server that has gone with requests unread resets the socket.
            let _ = socket.read_to_end(&mut answers);
            answers
        });
        let (mut steps, mut tails) = (Steps(bytes), [0; 4]);
        while !steps.0.is_empty() {
            step(&mut steps, &client, &mut tails);
        }
        let _ = client.shutdown(Shutdown::Write);
        let report = serving.join().expect("the server panicked");
        assert!(report.refused <= report.requests);
        reading.join().expect("a reader")
    });
    // Answers are whole, and each is one: with its errno where it is an error.
    let mut rest = answers.as_slice();
    while let Some((header, behind)) = rest.split_first_chunk::<16>() {
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("a word"));
        let body = word(4) as usize - 16;
        match word(8) {
            1 => assert_eq!(word(12), 0),
            0x21 => assert!(word(12) != 0 && body == 0),
            flags => panic!("an answer with flags {flags:#x}"),
        }
        let Some(next) = behind.get(body..) else { break };
        rest = next;
    }
    // Those that close descriptors end by themselves: nobody is behind one here who never answers.
    let ended = Instant::now();
    while threads() > before {
        assert!(ended.elapsed() < Duration::from_secs(60), "a thread stays behind the session");
        thread::yield_now();
    }
});
