//! A controller of NVMe, made of a few lines, that reaches memory through its IOMMU alone: NVM
//! Express Base Specification 2.0.
#![expect(clippy::cast_possible_truncation, reason = "fields are as wide as the standard says")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

use dmaspan::Iova;

use crate::rig::{Iommu, Process};

pub(crate) const BLOCK: usize = 512;
pub(crate) const BLOCKS: usize = 1024;
const PAGE: u64 = 4096;

/// Registers, which the driver writes and the controller looks at when it [runs](Controller::run).
#[repr(align(4096))]
pub(crate) struct Registers([AtomicU32; 0x800]);

impl Registers {
    pub(crate) const BYTES: usize = size_of::<Self>();

    pub(crate) fn new() -> &'static Self {
        let registers = Self([const { AtomicU32::new(0) }; 0x800]);
        // 64 entries in a queue, which is contiguous; one command set; version 1.4.
        registers.set(0x00, 63 | 1 << 16 | 10 << 24);
        registers.set(0x04, 1 << 5);
        registers.set(0x08, 0x1_0400);
        Box::leak(Box::new(registers))
    }

    fn get(&self, offset: usize) -> u32 {
        self.0[offset / 4].load(Ordering::Acquire)
    }

    fn get64(&self, offset: usize) -> u64 {
        u64::from(self.get(offset)) | u64::from(self.get(offset + 4)) << 32
    }

    fn set(&self, offset: usize, value: u32) {
        self.0[offset / 4].store(value, Ordering::Release);
    }
}

/// A submission or a completion queue.
#[derive(Clone, Copy)]
struct Queue {
    base: u64,
    size: u32,
    at: u32,
    /// Of completions: the phase tag that is written now.
    phase: u32,
}

impl Queue {
    fn new(base: u64, size: u32) -> Self {
        Self { base, size, at: 0, phase: 1 }
    }
}

pub(crate) struct Controller {
    registers: &'static Registers,
    pub(crate) reach: Iommu,
    submissions: BTreeMap<u16, Queue>,
    completions: BTreeMap<u16, Queue>,
    pub(crate) blocks: Vec<u8>,
    /// Where the last command of a namespace had its data.
    pub(crate) last: Vec<(u64, usize)>,
}

impl Controller {
    pub(crate) fn new(registers: &'static Registers, reach: Iommu) -> Self {
        let blocks = (0..BLOCKS * BLOCK).map(|n| (n / BLOCK * 7 + n) as u8).collect();
        let (submissions, completions) = (BTreeMap::new(), BTreeMap::new());
        Self { registers, reach, submissions, completions, blocks, last: Vec::new() }
    }

    /// Does what the registers ask for.
    pub(crate) fn run(&mut self) {
        let (is_enabled, is_ready) = (self.registers.get(0x14) & 1, self.registers.get(0x1c) & 1);
        match (is_enabled, is_ready) {
            (1, 0) => {
                let sizes = self.registers.get(0x24);
                let submission = Queue::new(self.registers.get64(0x28), (sizes & 0xfff) + 1);
                let completion = Queue::new(self.registers.get64(0x30), (sizes >> 16 & 0xfff) + 1);
                self.submissions.insert(0, submission);
                self.completions.insert(0, completion);
                self.registers.set(0x1c, 1);
            }
            (0, _) => {
                self.submissions.clear();
                self.completions.clear();
                (0x1000..0x1100).step_by(4).for_each(|bell| self.registers.set(bell, 0));
                self.registers.set(0x1c, 0);
            }
            _ => {}
        }
        for id in self.submissions.keys().copied().collect::<Vec<_>>() {
            while let Some(command) = self.fetch(id) {
                let result = self.execute(id, &command);
                self.complete(id, &command, result);
            }
        }
    }

    fn read(&mut self, at: u64, bytes: &mut [u8]) {
        let read = self.reach.read(&Process, Iova::new(at), bytes);
        read.unwrap_or_else(|error| panic!("a read of {at:#x}: {error}"));
    }

    fn write(&mut self, at: u64, bytes: &[u8]) {
        let written = self.reach.write(&Process, Iova::new(at), bytes);
        written.unwrap_or_else(|error| panic!("a write of {at:#x}: {error}"));
    }

    fn fetch(&mut self, id: u16) -> Option<[u32; 16]> {
        let tail = self.registers.get(0x1000 + 8 * usize::from(id));
        let queue = self.submissions.get_mut(&id)?;
        if queue.at == tail {
            return None;
        }
        let at = queue.base + 64 * u64::from(queue.at);
        queue.at = (queue.at + 1) % queue.size;
        let mut bytes = [0; 64];
        self.read(at, &mut bytes);
        let mut words = bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
        Some(std::array::from_fn(|_| words.next().unwrap()))
    }

    fn complete(&mut self, id: u16, command: &[u32; 16], result: u32) {
        let head = self.submissions.get(&id).map_or(0, |queue| queue.at);
        let queue = self.completions.get_mut(&id).expect("each has its own");
        let at = queue.base + 16 * u64::from(queue.at);
        let tag = (command[0] >> 16) | queue.phase << 16;
        queue.at = (queue.at + 1) % queue.size;
        queue.phase ^= u32::from(queue.at == 0);
        let words = [result, 0, head | u32::from(id) << 16, tag];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.write(at, &bytes);
    }

    fn execute(&mut self, id: u16, command: &[u32; 16]) -> u32 {
        let prp = |n: usize| u64::from(command[n]) | u64::from(command[n + 1]) << 32;
        let queue = || {
            let (id, size) = (command[10] as u16, (command[10] >> 16) + 1);
            (id, Queue::new(prp(6), size))
        };
        match (id, command[0] & 0xff) {
            (0, 0x01) => drop(self.submissions.insert(queue().0, queue().1)),
            (0, 0x05) => drop(self.completions.insert(queue().0, queue().1)),
            (0, 0x06) => self.write(prp(6), &identify(command[10] & 0xff)),
            // As many queues as were asked for.
            (0, 0x09) => return command[11],
            (1.., 0x00) => {}
            (1.., kind @ (0x01 | 0x02)) => {
                let blocks = usize::from(command[12] as u16) + 1;
                let mut at = prp(10) as usize * BLOCK;
                self.last = self.parts(prp(6), prp(8), blocks * BLOCK);
                for (addr, len) in self.last.clone() {
                    let mut bytes = self.blocks[at..at + len].to_vec();
                    if kind == 0x02 {
                        self.write(addr, &bytes);
                    } else {
                        self.read(addr, &mut bytes);
                        self.blocks[at..at + len].copy_from_slice(&bytes);
                    }
                    at += len;
                }
            }
            (id, kind) => panic!("queue {id} has a command of kind {kind:#x}"),
        }
        0
    }

    /// The memory of two PRPs (4.1.1).
    fn parts(&mut self, first: u64, second: u64, len: usize) -> Vec<(u64, usize)> {
        let here = len.min((PAGE - first % PAGE) as usize);
        let (mut parts, mut left) = (vec![(first, here)], len - here);
        let mut list = second;
        while left > 0 {
            let len = left.min(PAGE as usize);
            let addr = if parts.len() == 1 && left <= PAGE as usize {
                second
            } else {
                let mut entry = [0; 8];
                self.read(list, &mut entry);
                list += 8;
                u64::from_le_bytes(entry)
            };
            parts.push((addr, len));
            left -= len;
        }
        parts
    }
}

/// Data structures of 5.17: a namespace, the controller, and which namespaces there are.
fn identify(what: u32) -> Vec<u8> {
    let mut data = vec![0; PAGE as usize];
    match what {
        0 => {
            for at in [0, 8, 16] {
                data[at..at + 8].copy_from_slice(&(BLOCKS as u64).to_le_bytes());
            }
            data[130] = 9;
        }
        1 => {
            data[512] = 0x66;
            data[513] = 0x44;
            data[516] = 1;
        }
        2 => data[0] = 1,
        other => panic!("the driver wants to know {other:#x}"),
    }
    data
}
