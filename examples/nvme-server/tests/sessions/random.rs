//! Sessions of random steps, from a seed that never changes.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, SealFlags, fcntl_setfl};
use rustix::pipe::pipe;

use crate::fuse::{Answers, Fuse};
use crate::server::*;

const SEED: u64 = 0x6c65_6176_6520_6974;
/// How many sessions there are to a client that does what it should.
const TURN: u64 = 16;

/// Numbers that follow from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// What a session sends that may stay open: a file that does not close, or the client's own end of
/// the socket. Both together take the server seconds to notice.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stuck {
    File,
    Socket,
    Both,
}

/// Files that all sessions have.
struct Files {
    others: Vec<OwnedFd>,
    events: Vec<File>,
    memory: Vec<File>,
    fuse: Option<Fuse>,
    /// The peers of sockets.
    _peers: Vec<OwnedFd>,
}

impl Files {
    fn new() -> Self {
        let events = [EventfdFlags::CLOEXEC, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE];
        let events = events.into_iter().cycle().take(4);
        let events: Vec<File> = events.map(|flags| eventfd(0, flags).unwrap().into()).collect();
        // Each set of seals, open for reading and writing, and for reading alone.
        let seals = [SealFlags::SHRINK, SealFlags::GROW, SealFlags::WRITE];
        let seals = [seals.as_slice(), &[SealFlags::FUTURE_WRITE, SealFlags::SEAL]].concat();
        let mut memory = Vec::new();
        for set in 0..1 << seals.len() {
            let chosen = seals.iter().enumerate().filter(|(n, _)| set & 1 << n != 0);
            let file = memfd(RAM_LEN, chosen.map(|(_, seal)| *seal).collect());
            memory.push(File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap());
            memory.push(file);
        }
        let (reader, writer) = pipe().unwrap();
        let (one, other) = UnixStream::pair().unwrap();
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let peers = vec![other.into(), listener.accept().unwrap().0.into()];
        let mut others: Vec<OwnedFd> = vec![reader, writer, one.into(), stream.into()];
        others.push(listener.into());
        for path in ["/dev/zero", "/dev/null", "/proc/self/exe", "/proc/self", "/tmp", "/dev/shm"] {
            others.extend(File::open(path).map(OwnedFd::from));
        }
        let fuse = Fuse::new("random");
        let fuse = fuse.inspect_err(|why| eprintln!("SKIP: no FUSE file among them: {why}")).ok();
        Self { others, events, memory, fuse, _peers: peers }
    }

    /// A file of any kind.
    fn any<'f>(
        &'f self,
        random: &mut Random,
        socket: &'f UnixStream,
        stuck: Stuck,
    ) -> BorrowedFd<'f> {
        match (random.below(8), &self.fuse) {
            (0, Some(fuse)) if stuck != Stuck::Socket => fuse.file().as_fd(),
            (0..=2, _) => random.pick(&self.events).as_fd(),
            (3, _) if stuck != Stuck::File => socket.as_fd(),
            (4, _) => random.pick(&self.others).as_fd(),
            _ => random.pick(&self.memory).as_fd(),
        }
    }
}

/// One thing that a client does, or its guest.
fn step(
    (random, stuck): (&mut Random, Stuck),
    files: &Files,
    socket: &UnixStream,
    ram: &File,
    tail: &mut u64,
) {
    let any = |random: &mut Random, most| -> Vec<_> {
        let count = random.below(most + 1);
        (0..count).map(|_| files.any(random, socket, stuck)).collect()
    };
    let flags = if random.below(2) == 0 { POSTED } else { 0 };
    match random.below(14) {
        0 => {
            let fds = any(random, 20);
            let (command, len) = (random.below(20) as u16, random.below(64));
            send(socket, command, flags, &random.bytes(len), &fds);
        }
        1..=3 => {
            let most = 1 + u64::from(random.below(8) == 0);
            let fds = any(random, most);
            let page = |random: &mut Random| random.below(20) * 0x1000;
            let (offset, at, len) = (page(random), RAM + page(random), page(random));
            let body = map_body(random.below(4) as u32, offset, at, len);
            send(socket, DMA_MAP, flags, &body, &fds);
        }
        4 => {
            let mut body = words(&[24, random.below(3) as u32]);
            let (at, len) = (RAM + random.below(20) * 0x1000, random.below(20) * 0x1000);
            body.extend([at, len].map(u64::to_le_bytes).as_flattened());
            send(socket, DMA_UNMAP, flags, &body, &[]);
        }
        5 => {
            let fds = match random.below(3) {
                0 => any(random, 17),
                _ => (0..=random.below(3)).map(|_| random.pick(&files.events).as_fd()).collect(),
            };
            let body = interrupts(random.below(3) as u32, fds.len() as u32);
            send(socket, SET_IRQS, flags, &body, &fds);
        }
        6 | 7 => {
            send(socket, DMA_MAP, flags, &map_body(3, 0, RAM, RAM_LEN), &[ram.as_fd()]);
            *tail = 0;
            enable(socket);
        }
        8 | 9 => {
            let mut command = identify(random.next() as u16);
            if random.below(2) == 0 {
                let len = random.below(64);
                command[..len as usize].copy_from_slice(&random.bytes(len));
            }
            let _ = ram.write_all_at(&command, *tail * 64);
            *tail = (*tail + 1) % 16;
            register(socket, 0x1000, *tail);
        }
        10 => register(socket, random.below(0x500) * 4, random.next()),
        11 => {
            let event = random.pick(&files.events);
            let flags = if random.below(2) == 0 { OFlags::NONBLOCK } else { OFlags::empty() };
            let mut bytes = [0; 8];
            // The counter is emptied, and may be filled: neither waits.
            fcntl_setfl(event, OFlags::NONBLOCK).unwrap();
            let _ = (&*event).read(&mut bytes);
            if random.below(3) > 0 {
                let _ = (&*event).write(&(u64::MAX - 1).to_ne_bytes());
            }
            fcntl_setfl(event, flags).unwrap();
        }
        12 => {
            let _ = random.pick(&files.memory).set_len(random.below(20) * 0x1000);
        }
        _ => {
            let mut body = random.below(0x4000).to_le_bytes().to_vec();
            body.extend(words(&[random.below(9) as u32, random.below(9) as u32]));
            send(socket, REGION_READ, flags, &body, &[]);
        }
    }
}

/// So many sessions, each of which finds a server that answers it.
pub(crate) fn run(count: u64) {
    let (server, files) = (Server::start("random"), Files::new());
    for session in 0..count {
        let mut random = Random(SEED ^ session << 20);
        let socket = server.connect();
        // It is not the one before that is served.
        ask(&socket, VERSION, b"\0\0\x01\0{}\0", &[]).unwrap_or_else(|errno| {
            panic!("session {session}: {errno}");
        });
        let (ram, mut tail) = (memfd(RAM_LEN, SealFlags::SHRINK), 0);
        let stuck = match session % 4096 {
            100 => Stuck::Both,
            n if n % 2 == 0 => Stuck::File,
            _ => Stuck::Socket,
        };
        for _ in 0..random.below(24) {
            step((&mut random, stuck), &files, &socket, &ram, &mut tail);
        }
        match random.below(4) {
            // In the middle of a message.
            0 => (&socket).write_all(&[1, 0, 2, 0, 64]).unwrap_or_default(),
            1 => socket.shutdown(std::net::Shutdown::Read).unwrap(),
            _ => {}
        }
        drop(socket);
        if session % TURN == TURN - 1 || session + 1 == count {
            serve_a_good_client(&server);
            let answer = |how| files.fuse.iter().for_each(|fuse| fuse.set(how));
            answer(Answers::AtOnce);
            server.settle(0);
            answer(Answers::Never);
        }
    }
}
