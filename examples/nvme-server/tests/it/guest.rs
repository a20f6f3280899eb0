//! A guest: its memory is a file, and its driver has an admin queue and one for I/O.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

use dmaspan::regbuf::descriptors::{ListPage, MemoryPageSize};
use dmaspan::{DmaAddr, Span};

use crate::client::{Client, memfd};

pub(crate) const PAGE: u64 = 0x1000;
/// Where the guest's memory is.
pub(crate) const RAM: u64 = 0x4000_0000;
pub(crate) const RAM_LEN: u64 = 8 << 20;
/// Where data is in it; below are queues, and lists of PRPs, a page for each command.
pub(crate) const DATA: u64 = 0x10_0000;
const LISTS: u64 = 0x8_0000;
/// Entries of the queues.
pub(crate) const ENTRIES: u32 = 64;

/// The command register, and what is in it of a function whose memory is decoded: without bus
/// mastering and with it.
pub(crate) const COMMAND: u64 = 4;
pub(crate) const NO_MASTER: [u8; 2] = [2, 0];
pub(crate) const MASTER: [u8; 2] = [6, 0];

pub(crate) const FLUSH: u8 = 0;
pub(crate) const WRITE: u8 = 1;
pub(crate) const READ: u8 = 2;

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) id: u16,
    pub(crate) status: u16,
    pub(crate) result: u32,
}

/// The driver's side of a queue pair.
pub(crate) struct Queue {
    pub(crate) id: u16,
    commands: u64,
    completions: u64,
    entries: u32,
    completion_entries: u32,
    tail: u32,
    head: u32,
    phase: u16,
}

impl Queue {
    fn new(id: u16, entries: u32, completion_entries: u32) -> Self {
        let at = u64::from(id) * 2 * PAGE;
        let (commands, completions) = (at, at + PAGE);
        Self { id, commands, completions, entries, completion_entries, tail: 0, head: 0, phase: 1 }
    }
}

pub(crate) struct Guest {
    pub(crate) client: Client,
    pub(crate) ram: File,
    pub(crate) admin: Queue,
}

/// The bytes of a command.
pub(crate) fn command(opcode: u8, id: u16, namespace: u32, dwords: &[(usize, u32)]) -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes[0] = opcode;
    bytes[2..4].copy_from_slice(&id.to_le_bytes());
    bytes[4..8].copy_from_slice(&namespace.to_le_bytes());
    for &(dword, value) in dwords {
        bytes[4 * dword..4 * dword + 4].copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

pub(crate) fn with_prps(mut command: [u8; 64], prp1: u64, prp2: u64) -> [u8; 64] {
    command[24..32].copy_from_slice(&prp1.to_le_bytes());
    command[32..40].copy_from_slice(&prp2.to_le_bytes());
    command
}

impl Guest {
    /// A guest whose memory is mapped and whose controller is enabled.
    pub(crate) fn new(disk: &File, threads: usize) -> Self {
        let ram = memfd(RAM_LEN);
        let (client, admin) = (Client::new(disk, threads), Queue::new(0, ENTRIES, ENTRIES));
        let mut guest = Self { client, ram, admin };
        guest.map_ram(0, RAM_LEN);
        guest.enable();
        guest
    }

    pub(crate) fn map_ram(&mut self, offset: u64, len: u64) {
        let id = self.client.map(RAM + offset, len, Some((self.ram.as_fd(), offset)));
        self.client.answer(id).unwrap();
    }

    pub(crate) fn enable(&mut self) {
        self.admin = Queue::new(0, ENTRIES, ENTRIES);
        self.ram.write_all_at(&[0; 2 * PAGE as usize], 0).unwrap();
        let size = ENTRIES - 1;
        self.client.configure(COMMAND, &MASTER);
        self.client.write(0x24, &(size | size << 16).to_le_bytes());
        self.client.write(0x28, &RAM.to_le_bytes());
        self.client.write(0x30, &(RAM + PAGE).to_le_bytes());
        self.client.write(0x14, &(1_u32 | 6 << 16 | 4 << 20).to_le_bytes());
        assert_eq!(self.client.register(0x1c), 1);
    }

    /// Makes an I/O queue of its own completion queue.
    pub(crate) fn queue(&mut self, id: u16, entries: u32, completion_entries: u32) -> Queue {
        let queue = Queue::new(id, entries, completion_entries);
        self.ram.write_all_at(&[0; 2 * PAGE as usize], queue.commands).unwrap();
        let create = |opcode, size: u32, dword11, at| {
            let sizes = u32::from(id) | (size - 1) << 16;
            with_prps(command(opcode, 1, 0, &[(10, sizes), (11, dword11)]), RAM + at, 0)
        };
        let vector = 3 | u32::from(id) << 16;
        let made = self.admin(create(5, completion_entries, vector, queue.completions));
        assert_eq!(made.status, 0);
        let made = self.admin(create(1, entries, 1 | u32::from(id) << 16, queue.commands));
        assert_eq!(made.status, 0);
        queue
    }

    /// Puts a command into a queue.
    pub(crate) fn put(&mut self, queue: &mut Queue, command: [u8; 64]) {
        let at = queue.commands + 64 * u64::from(queue.tail);
        self.ram.write_all_at(&command, at).unwrap();
        queue.tail = (queue.tail + 1) % queue.entries;
    }

    pub(crate) fn ring(&mut self, queue: &Queue) {
        self.client.write(0x1000 + 8 * u64::from(queue.id), &queue.tail.to_le_bytes());
    }

    /// The next completion, if it is there.
    pub(crate) fn poll(&mut self, queue: &mut Queue) -> Option<Done> {
        let mut bytes = [0; 16];
        self.ram.read_exact_at(&mut bytes, queue.completions + 16 * u64::from(queue.head)).unwrap();
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if half(14) & 1 != queue.phase {
            return None;
        }
        queue.head = (queue.head + 1) % queue.completion_entries;
        queue.phase ^= u16::from(queue.head == 0);
        // The status without Do Not Retry.
        let status = half(14) >> 1 & 0x3fff;
        let result = u32::from(half(0)) | u32::from(half(2)) << 16;
        assert_eq!(half(10), queue.id);
        Some(Done { id: half(12), status, result })
    }

    /// Waits for the next completion, and tells the controller that it was taken.
    pub(crate) fn wait(&mut self, queue: &mut Queue) -> Done {
        let begun = Instant::now();
        loop {
            if let Some(done) = self.poll(queue) {
                self.taken(queue);
                return done;
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "there is no completion");
            thread::yield_now();
        }
    }

    pub(crate) fn taken(&mut self, queue: &Queue) {
        self.client.write(0x1004 + 8 * u64::from(queue.id), &queue.head.to_le_bytes());
    }

    pub(crate) fn admin(&mut self, command: [u8; 64]) -> Done {
        let mut queue = std::mem::replace(&mut self.admin, Queue::new(0, ENTRIES, ENTRIES));
        let done = self.run(&mut queue, command);
        self.admin = queue;
        done
    }

    pub(crate) fn put_admin(&mut self, command: [u8; 64]) {
        let mut queue = std::mem::replace(&mut self.admin, Queue::new(0, ENTRIES, ENTRIES));
        self.put(&mut queue, command);
        self.admin = queue;
    }

    /// Does one command to its end.
    pub(crate) fn run(&mut self, queue: &mut Queue, command: [u8; 64]) -> Done {
        self.put(queue, command);
        self.ring(queue);
        self.wait(queue)
    }

    /// A command for `blocks` blocks, whose data is in pages of the guest's memory, in any order.
    pub(crate) fn transfer(
        &mut self,
        opcode: u8,
        id: u16,
        first: u64,
        blocks: u32,
        pages: &[u64],
    ) -> [u8; 64] {
        let spans: Vec<_> =
            pages.iter().map(|&page| Span::new(DmaAddr::new(RAM + page), PAGE).unwrap()).collect();
        let at = LISTS + PAGE * u64::from(id);
        let mut entries = [0; 512];
        let mut list = [ListPage { addr: DmaAddr::new(RAM + at), entries: &mut entries }];
        let prps = MemoryPageSize::new(0).unwrap().write(spans, &mut list).unwrap();
        let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_ne_bytes()).collect();
        self.ram.write_all_at(&bytes, at).unwrap();
        let [low, high] = [first as u32, (first >> 32) as u32];
        let command = command(opcode, id, 1, &[(10, low), (11, high), (12, blocks - 1)]);
        with_prps(command, prps.prp1, prps.prp2)
    }
}
