//! A controller: registers, queues, a disk, and bad habits.
//!
//! It reads commands and walks PRPs and scatter-gather lists on its own; nothing is taken from the
//! driver or from dmaspan.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::ram::Ram;

/// What a controller is like.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) cap: u64,
    pub(crate) mdts: u8,
    pub(crate) sgls: u8,
    pub(crate) blocks: u64,
    /// `FLBAS`, and the format in that place.
    pub(crate) flbas: u8,
    pub(crate) block_lg2: u8,
    pub(crate) metadata: u16,
    pub(crate) queues: u16,
}

impl Default for Model {
    /// Queues of 64 entries, 1 s, the NVM command set, and one namespace of 4 MiB.
    fn default() -> Self {
        let cap = 63 | 1 << 16 | 2 << 24 | 1 << 37;
        let (blocks, flbas, block_lg2) = (8192, 0, 9);
        Self { cap, mdts: 5, sgls: 0, blocks, flbas, block_lg2, metadata: 0, queues: 4 }
    }
}

/// What it does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Habit {
    None,
    NeverReady,
    FatalWhenEnabled,
    NeverDisabled,
    NeverShutDown,
    /// All registers read all ones.
    Gone,
    /// Commands of this queue and above are not looked at.
    SilentFrom(u16),
    /// Completions of I/O queues are of another command.
    WrongCommand(u16),
    /// Completions of I/O queues are of another queue.
    WrongQueue(u16),
    /// Completions of I/O queues have the phase tag of the pass before.
    WrongPhase,
    /// Commands with this opcode, of admin queues or of others, end with this status.
    Refuses {
        admin: bool,
        opcode: u8,
        status: u16,
    },
}

struct Submission {
    base: u64,
    depth: u32,
    head: u32,
    tail: u32,
    completion: u16,
}

struct Completion {
    base: u64,
    depth: u32,
    head: u32,
    tail: u32,
    phase: u64,
}

pub(crate) struct Fake {
    ram: Arc<Ram>,
    pub(crate) model: Model,
    pub(crate) habit: Habit,
    pub(crate) disk: Vec<u8>,
    cc: u32,
    csts: u32,
    aqa: u32,
    asq: u64,
    acq: u64,
    submissions: BTreeMap<u16, Submission>,
    completions: BTreeMap<u16, Completion>,
    /// Commands that were done, by opcode, of I/O queues.
    pub(crate) done: Vec<u8>,
    /// The longest chain of list pages that was walked.
    pub(crate) longest_chain: usize,
    /// How many transfers were told by scatter-gather lists.
    pub(crate) by_sgl: usize,
    pub(crate) doorbells: usize,
}

impl Fake {
    pub(crate) fn new(ram: Arc<Ram>, model: Model) -> Self {
        let disk = vec![0; (model.blocks << model.block_lg2) as usize];
        let (submissions, completions, done) = Default::default();
        Self {
            ram,
            model,
            habit: Habit::None,
            disk,
            cc: 0,
            csts: 0,
            aqa: 0,
            asq: 0,
            acq: 0,
            submissions,
            completions,
            done,
            longest_chain: 0,
            by_sgl: 0,
            doorbells: 0,
        }
    }

    fn stride(&self) -> u64 {
        4 << (self.model.cap >> 32 & 0xf)
    }

    pub(crate) fn read(&mut self, offset: u64) -> u64 {
        if self.habit == Habit::Gone {
            return u64::MAX;
        }
        match offset {
            0x00 => self.model.cap,
            0x14 => self.cc.into(),
            0x1c => self.csts.into(),
            _ => panic!("a read at {offset:#x}"),
        }
    }

    pub(crate) fn write(&mut self, offset: u64, value: u64) {
        match offset {
            0x14 => self.configure(value as u32),
            0x24 => self.aqa = value as u32,
            0x28 => self.asq = value,
            0x30 => self.acq = value,
            0x1000.. => self.ring(offset - 0x1000, value as u32),
            _ => panic!("a write at {offset:#x}"),
        }
    }

    fn configure(&mut self, cc: u32) {
        let was = self.cc;
        self.cc = cc;
        if cc & 1 == 0 {
            if self.habit != Habit::NeverDisabled {
                self.csts = 0;
                self.submissions.clear();
                self.completions.clear();
            }
        } else if was & 1 == 0 {
            assert_eq!(cc >> 16 & 0xff, 0x46, "sizes of entries");
            assert_eq!(cc >> 4 & 7, 0, "the NVM command set");
            let (sq, cq) = ((self.aqa & 0xfff) + 1, (self.aqa >> 16 & 0xfff) + 1);
            self.add(0, self.asq, sq, 0);
            self.completions.insert(0, completion(self.acq, cq));
            self.csts = match self.habit {
                Habit::NeverReady => 0,
                Habit::FatalWhenEnabled => 2,
                _ => 1,
            };
        }
        if cc >> 14 & 3 == 1 && self.habit != Habit::NeverShutDown {
            self.csts |= 2 << 2;
        }
    }

    fn add(&mut self, id: u16, base: u64, depth: u32, completion: u16) {
        let queue = Submission { base, depth, head: 0, tail: 0, completion };
        self.submissions.insert(id, queue);
    }

    fn ring(&mut self, offset: u64, value: u32) {
        self.doorbells += 1;
        let index = offset / self.stride();
        assert_eq!(offset % self.stride(), 0, "no doorbell");
        let id = (index / 2) as u16;
        if index.is_multiple_of(2) {
            let queue = self.submissions.get_mut(&id).expect("a doorbell of no queue");
            assert!(value < queue.depth);
            queue.tail = value;
        } else {
            let queue = self.completions.get_mut(&id).expect("a doorbell of no queue");
            assert!(value < queue.depth);
            queue.head = value;
        }
    }

    /// Does what it was told, the queues in turn.
    pub(crate) fn run(&mut self) {
        while let Some(id) = self.next_queue() {
            let queue = self.submissions.get_mut(&id).unwrap();
            let at = queue.base + u64::from(queue.head) * 64;
            queue.head = (queue.head + 1) % queue.depth;
            let words = std::array::from_fn(|n| self.ram.word_at(at + 8 * n as u64));
            let (status, result) = self.command(id, words);
            self.complete(id, (words[0] >> 16) as u16, status, result);
        }
    }

    fn next_queue(&self) -> Option<u16> {
        let heard = |id: u16| match self.habit {
            Habit::SilentFrom(first) => id < first,
            habit => habit != Habit::Gone,
        };
        let waits = |(id, queue): (&u16, &Submission)| {
            (queue.head != queue.tail && heard(*id)).then_some(*id)
        };
        if self.csts & 1 == 0 { None } else { self.submissions.iter().find_map(waits) }
    }

    fn command(&mut self, id: u16, words: [u64; 8]) -> (u16, u32) {
        let opcode = words[0] as u8;
        if let Habit::Refuses { admin, opcode: refused, status } = self.habit
            && (admin, refused) == (id == 0, opcode)
        {
            return (status, 0);
        }
        if id != 0 {
            self.done.push(opcode);
            return (self.transfer(opcode, words), 0);
        }
        let (cdw10, cdw11) = (words[5] as u32, (words[5] >> 32) as u32);
        let (queue, depth) = (cdw10 as u16, (cdw10 >> 16) + 1);
        match opcode {
            0x00 => {
                self.submissions.remove(&queue).expect("a submission queue to delete");
            }
            0x01 => {
                assert!(self.completions.contains_key(&((cdw11 >> 16) as u16)) && cdw11 & 1 == 1);
                self.add(queue, words[3], depth, (cdw11 >> 16) as u16);
            }
            0x04 => {
                assert!(self.submissions.values().all(|used| used.completion != queue));
                self.completions.remove(&queue).expect("a completion queue to delete");
            }
            0x05 => {
                assert_eq!(cdw11, 1, "contiguous, and without interrupts");
                self.completions.insert(queue, completion(words[3], depth));
            }
            0x06 => self.identify(cdw10, (words[0] >> 32) as u32, words[3]),
            0x09 => {
                assert_eq!(cdw10, 7);
                let granted = u32::from(self.model.queues - 1);
                return (0, granted << 16 | granted);
            }
            _ => return (1, 0),
        }
        (0, 0)
    }

    fn identify(&self, cns: u32, namespace: u32, at: u64) {
        let mut page = [0_u8; 4096];
        match cns {
            1 => {
                page[4..24].copy_from_slice(b"SERIAL-7            ");
                page[24..64].copy_from_slice(format!("{:40}", "A fake controller").as_bytes());
                page[77] = self.model.mdts;
                page[536] = self.model.sgls;
            }
            0 if namespace == 1 => {
                page[..8].copy_from_slice(&self.model.blocks.to_le_bytes());
                page[26] = self.model.flbas;
                let index = self.model.flbas & 0xf | (self.model.flbas & 0x60) >> 1;
                let format = 128 + 4 * usize::from(index);
                page[format..format + 2].copy_from_slice(&self.model.metadata.to_le_bytes());
                page[format + 2] = self.model.block_lg2;
            }
            _ => {}
        }
        self.ram.write(at, &page);
    }

    fn transfer(&mut self, opcode: u8, words: [u64; 8]) -> u16 {
        if opcode == 0 {
            return 0;
        }
        let count = (words[6] & 0xffff) + 1;
        let lg2 = self.model.block_lg2;
        let (first, bytes) = (words[5] << lg2, count << lg2);
        if words[5] + count > self.model.blocks {
            return 0x80;
        }
        if self.model.mdts != 0 && bytes > 4096 << self.model.mdts {
            return 0x02;
        }
        let pieces = match words[0] >> 14 & 3 {
            0 => self.walk_prps(words[3], words[4], bytes),
            _ => self.walk_sgl([words[3], words[4]]),
        };
        let mut at = first as usize;
        for (addr, len) in pieces {
            let bytes = &mut self.disk[at..at + len as usize];
            match opcode {
                1 => self.ram.read(addr, bytes),
                2 => self.ram.write(addr, bytes),
                _ => return 1,
            }
            at += len as usize;
        }
        assert_eq!(at as u64, first + bytes, "the bytes of the command are described");
        0
    }

    /// Pieces in pages of 4 KiB.
    fn walk_prps(&mut self, prp1: u64, prp2: u64, bytes: u64) -> VecDeque<(u64, u64)> {
        assert_eq!(prp1 % 4, 0);
        let first = bytes.min(4096 - prp1 % 4096);
        let mut pieces = VecDeque::from([(prp1, first)]);
        let mut left = bytes - first;
        if left == 0 {
            return pieces;
        }
        if left <= 4096 {
            assert_eq!(prp2 % 4096, 0);
            pieces.push_back((prp2, left));
            return pieces;
        }
        let (mut at, mut chain) = (prp2, 1);
        while left > 0 {
            let mut entry = self.ram.word_at(at);
            assert_eq!(entry % 4096, 0);
            if at % 4096 == 4088 && left > 4096 {
                at = entry;
                chain += 1;
                entry = self.ram.word_at(at);
            }
            pieces.push_back((entry, left.min(4096)));
            left -= left.min(4096);
            at += 8;
        }
        self.longest_chain = self.longest_chain.max(chain);
        pieces
    }

    fn walk_sgl(&mut self, first: [u64; 2]) -> VecDeque<(u64, u64)> {
        assert_ne!(self.model.sgls & 3, 0, "it takes none");
        self.by_sgl += 1;
        let (mut pieces, mut chain) = (VecDeque::new(), 0);
        let mut next = Some(first);
        while let Some([addr, rest]) = next.take() {
            let (len, kind) = (rest & 0xffff_ffff, rest >> 60);
            if kind == 0 {
                pieces.push_back((addr, len));
                continue;
            }
            chain += 1;
            for at in (addr..addr + len).step_by(16) {
                let entry = [self.ram.word_at(at), self.ram.word_at(at + 8)];
                match entry[1] >> 60 {
                    0 => pieces.push_back((entry[0], entry[1] & 0xffff_ffff)),
                    _ => {
                        assert!(kind == 2 && at + 16 == addr + len, "the last of a segment");
                        next = Some(entry);
                    }
                }
            }
        }
        self.longest_chain = self.longest_chain.max(chain);
        pieces
    }

    /// Posts a completion.
    pub(crate) fn complete(&mut self, id: u16, command: u16, status: u16, result: u32) {
        let Some(submission) = self.submissions.get(&id) else { return };
        let Some(queue) = self.completions.get_mut(&submission.completion) else { return };
        let (mut of, mut sq, mut phase) = (command, id, queue.phase);
        match self.habit {
            Habit::WrongCommand(wrong) if id != 0 => of = wrong,
            Habit::WrongQueue(wrong) if id != 0 => sq = wrong,
            Habit::WrongPhase if id != 0 => phase ^= 1,
            _ => {}
        }
        let at = queue.base + u64::from(queue.tail) * 16;
        queue.tail += 1;
        if queue.tail == queue.depth {
            queue.tail = 0;
            queue.phase ^= 1;
        }
        self.ram.set_word(at, result.into());
        let status = u64::from(status) << 1 | phase;
        let second = u64::from(submission.head) | u64::from(sq) << 16;
        self.ram.set_word(at + 8, second | u64::from(of) << 32 | status << 48);
    }

    /// How many completions the driver has not said to have read.
    pub(crate) fn unread(&self, id: u16) -> u32 {
        let queue = &self.completions[&id];
        (queue.tail + queue.depth - queue.head) % queue.depth
    }

    /// Fails, as `CSTS.CFS` tells.
    pub(crate) fn fail(&mut self) {
        self.csts |= 2;
    }

    /// Where the completions of a queue are, and how many.
    pub(crate) fn completion_memory(&self, id: u16) -> (u64, u32) {
        let queue = &self.completions[&id];
        (queue.base, queue.depth)
    }
}

fn completion(base: u64, depth: u32) -> Completion {
    Completion { base, depth, head: 0, tail: 0, phase: 1 }
}
