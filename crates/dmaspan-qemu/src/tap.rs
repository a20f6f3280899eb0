//! A tap stands between a driver and its hardware: it sees the commands, and can change them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dmaspan::{PhysAddr, lg2};
use dmaspan_drivers::Mmio;
use parking_lot::Mutex;

use crate::machine::{Machine, QtestMmio};
use crate::ram::Ram;

/// Where hardware finds its commands.
#[derive(Clone, Copy, Debug)]
pub struct CommandQueue {
    /// The register of 64 bits with the queue's address and size.
    pub base: u64,
    /// The register that says how far commands were placed.
    pub tail: u64,
    /// What the base register says.
    pub ring: fn(u64) -> Ring,
    /// The offset in bytes of the first place without a command, from the tail register and the
    /// ring.
    pub end: fn(u64, Ring) -> u64,
}

impl CommandQueue {
    /// SMMUv3's: SMMU_CMDQ_BASE with the address in 51:5 and log2 of the places in 4:0, and
    /// SMMU_CMDQ_PROD, whose bit above the place changes with each round (IHI 0070, 6.3.26 and
    /// 6.3.27).
    pub const SMMU_V3: Self = Self {
        base: 0x90,
        tail: 0x98,
        ring: |base| Ring {
            paddr: PhysAddr::new(base & lg2::mask(52) & !lg2::mask(5)),
            bytes: 16 << (base & 0x1f),
            entry: 16,
        },
        end: |prod, ring| prod * 16 % ring.bytes,
    };

    /// VT-d's: IQA with the address in 63:12, commands of 256 bits with bit 11 and log2 of the
    /// pages in 2:0, and IQT with the offset in 18:4 (VT-d, 11.4.9).
    pub const VT_D: Self = Self {
        base: 0x90,
        tail: 0x88,
        ring: |base| Ring {
            paddr: PhysAddr::new(base & !lg2::mask(12)),
            bytes: 0x1000 << (base & 7),
            entry: if base & 1 << 11 == 0 { 16 } else { 32 },
        },
        end: |tail, ring| tail % ring.bytes,
    };

    /// AMD-Vi's: Command Buffer Base Address with the address in 51:12 and log2 of the entries in
    /// 59:56, and Command Buffer Tail Pointer with the offset (48882, 3.4).
    pub const AMD_VI: Self = Self {
        base: 0x08,
        tail: 0x2008,
        ring: |base| Ring {
            paddr: PhysAddr::new(base & lg2::mask(52) & !lg2::mask(12)),
            bytes: 16 << (base >> 56 & 0xf),
            entry: 16,
        },
        end: |tail, ring| tail % ring.bytes,
    };

    /// RISC-V's: `cqb` with the page of the address in 53:10 and log2 of the places less one in
    /// 4:0, and `cqt` with the place ("Command-queue base", "Command-queue tail").
    pub const RISC_V: Self = Self {
        base: 0x18,
        tail: 0x24,
        ring: |cqb| Ring {
            paddr: PhysAddr::new((cqb >> 10 & lg2::mask(44)) << 12),
            bytes: 16 << ((cqb & 0x1f) + 1),
            entry: 16,
        },
        end: |cqt, ring| cqt * 16 % ring.bytes,
    };
}

/// A queue in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Where it begins.
    pub paddr: PhysAddr,
    /// Its bytes.
    pub bytes: u64,
    /// The bytes of a command: 16 or 32.
    pub entry: u64,
}

/// What is done to a command, in words of 8 bytes, before hardware sees it.
pub type Edit = Box<dyn FnMut(&mut [u64]) + Send>;

/// Registers of an IOMMU that counts the commands which pass, and may change them: to learn whether
/// a driver that forgets one would be found out. Clones are the same.
#[derive(Clone)]
pub struct Tap {
    registers: QtestMmio,
    ram: Ram,
    queue: CommandQueue,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    ring: Option<Ring>,
    /// Where the next command is placed, in bytes.
    next: u64,
    seen: Vec<Vec<u64>>,
    doorbells: u64,
    edit: Option<Edit>,
    /// A register, and bits that it has besides.
    also: Option<(u64, u64)>,
}

impl Tap {
    /// On these registers of the machine.
    pub fn new(machine: &Machine, registers: QtestMmio, queue: CommandQueue) -> Self {
        Self { registers, ram: machine.ram().clone(), queue, state: Arc::default() }
    }

    /// Changes commands from now on, or no more.
    pub fn set_edit(&self, edit: Option<Edit>) {
        self.state.lock().edit = edit;
    }

    /// Gives the register of 64 bits at `offset` more bits than hardware has: for a driver that is
    /// to use what the model lacks, by commands which an edit makes those of the model.
    pub fn set_also(&self, offset: u64, bits: u64) {
        self.state.lock().also = Some((offset, bits));
    }

    fn also(&self, offset: u64) -> u64 {
        self.state.lock().also.filter(|also| also.0 == offset).map_or(0, |also| also.1)
    }

    /// The commands that passed since the last call, as the driver made them.
    pub fn take(&self) -> Vec<Vec<u64>> {
        std::mem::take(&mut self.state.lock().seen)
    }

    /// How often hardware was told of new commands since the queue was there.
    pub fn doorbells(&self) -> u64 {
        self.state.lock().doorbells
    }

    fn based(&self, value: u64) {
        let mut state = self.state.lock();
        state.ring = Some((self.queue.ring)(value));
        state.next = 0;
    }

    fn placed(&self, value: u64) {
        let mut state = self.state.lock();
        let State { ring: Some(ring), next, seen, doorbells, edit, .. } = &mut *state else {
            return;
        };
        let end = (self.queue.end)(value, *ring);
        if *next != end {
            *doorbells += 1;
        }
        // Not for ever, whatever the driver writes.
        for _ in 0..ring.bytes / ring.entry {
            if *next == end {
                break;
            }
            let words = self.ram.words_at(ring.paddr.wrapping_add(*next), ring.entry);
            let of = words.iter().map(|word| u64::from_le(word.load(Ordering::Acquire)));
            let mut command: Vec<u64> = of.collect();
            seen.push(command.clone());
            if let Some(edit) = edit {
                edit(&mut command);
                for (word, value) in words.iter().zip(command) {
                    word.store(value.to_le(), Ordering::Release);
                }
            }
            *next = (*next + ring.entry) % ring.bytes;
        }
    }
}

impl Mmio for Tap {
    fn read32(&self, offset: u64) -> u32 {
        self.registers.read32(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        if offset == self.queue.tail {
            self.placed(value.into());
        }
        self.registers.write32(offset, value);
    }

    fn read64(&self, offset: u64) -> u64 {
        self.registers.read64(offset) | self.also(offset)
    }

    fn write64(&self, offset: u64, value: u64) {
        if offset == self.queue.base {
            self.based(value);
        }
        if offset == self.queue.tail {
            self.placed(value);
        }
        self.registers.write64(offset, value);
    }
}

impl fmt::Debug for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tap").field("registers", &self.registers).finish_non_exhaustive()
    }
}
