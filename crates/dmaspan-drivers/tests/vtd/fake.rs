//! Registers of a VT-d in memory: what the driver uses of them, and ways to be broken.

use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, PageTable, VtdSs, VtdSsConfig};
use dmaspan::iommu::{Attachment, Domain, Prepared, ReservedRegions, Target};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span};
use dmaspan_drivers::Mmio;
use dmaspan_drivers::vtd::{Mode, Stage, Vtd, VtdConfig, VtdOps, VtdStream};
use parking_lot::{Mutex, MutexGuard};

use crate::host::FakeHost;

pub(crate) const RECORDS: u64 = 0x200;
/// 256 domains, 3 to 5 levels, all leaf sizes, blocks of 2^9 pages, 4 records, protected memory,
/// draining.
pub(crate) const CAP: u64 = 2
    | 3 << 5
    | 7 << 9
    | 47 << 16
    | (RECORDS / 16) << 24
    | 3 << 34
    | 1 << 39
    | 3 << 40
    | 9 << 48
    | 3 << 54
    | 1 << 56;
/// Coherent walks, a queue, pass-through, snoop control, scalable mode with both stages.
pub(crate) const ECAP: u64 = 1 | 1 << 1 | 1 << 6 | 1 << 7 | 1 << 43 | 7 << 46;

/// How it is broken.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Broken {
    #[default]
    Not,
    /// It fetches no commands.
    Stuck,
    /// It fetches commands and completes none.
    Silent,
    /// It does not understand the next command.
    Refuses,
    /// It understands commands that wait, and no others.
    Picky,
    /// It aborts the next command that waits.
    TimesOut,
    /// Its registers read as ones.
    Gone,
    /// Global commands do nothing.
    Deaf,
    /// Fault records do not go away.
    Storm,
    /// Registers read as anything.
    Garbled(u64),
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) cap: u64,
    pub(crate) ecap: u64,
    pub(crate) broken: Broken,
    pub(crate) gsts: u32,
    pub(crate) rtaddr: u64,
    pub(crate) fsts: u32,
    pub(crate) pmen: u32,
    /// Translation is never enabled.
    pub(crate) interrupts_alone: bool,
    pub(crate) fectl: u32,
    /// Data, address and its upper half of the interrupt of faults.
    pub(crate) message: [u64; 3],
    pub(crate) records: [[u64; 2]; 4],
    /// What hardware records in the first place as soon as anybody has looked there.
    pub(crate) arrives: Option<[u64; 2]>,
    /// One read of eight says something else.
    pub(crate) lies: Option<u64>,
    /// Whether the bus makes two accesses of one of 64 bits.
    pub(crate) narrow_bus: bool,
    pub(crate) reads: u64,
    /// How often the write buffer was flushed.
    pub(crate) flushes: u32,
    /// The commands that were carried out.
    pub(crate) told: Vec<[u64; 2]>,
    /// Whether accesses passed at some time after the first `watch`.
    pub(crate) passed: bool,
    pub(crate) watch: bool,
    /// How often the head is looked at before a queue of somebody else is empty.
    pub(crate) busy: u32,
    /// Whether that queue was taken away before.
    pub(crate) torn: bool,
    iqa: u64,
    head: u64,
    tail: u64,
}

/// Clones are the same.
#[derive(Clone)]
pub(crate) struct Fake {
    state: Arc<Mutex<State>>,
    pub(crate) memory: FakeHost,
}

impl Fake {
    pub(crate) fn new() -> Self {
        let state = State { cap: CAP, ecap: ECAP, ..State::default() };
        Self { state: Arc::new(Mutex::new(state)), memory: FakeHost::new(0x10_0000) }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(crate) fn breaks(&self, broken: Broken) {
        let mut state = self.state();
        state.broken = broken;
        self.fetch(&mut state);
    }

    /// Commands that were carried out since the last call.
    pub(crate) fn told(&self) -> Vec<[u64; 2]> {
        std::mem::take(&mut self.state().told)
    }

    /// The page number of the tables that a device of bus 0 is translated by, if by any (9.3, 9.6).
    pub(crate) fn reaches(&self, device: u64, mode: Mode) -> Option<u64> {
        let follow = |entry: u64| self.memory.read(entry).filter(|word| word & 1 != 0);
        let contexts = follow(self.state().rtaddr & !0xfff)? & !0xfff;
        let entry = match mode {
            Mode::Legacy => follow(contexts + device * 16)?,
            Mode::Scalable => {
                let directory = follow(contexts + device * 32)? & !0xfff;
                follow(follow(directory)? & !0xfff)?
            }
        };
        Some(entry >> 12)
    }

    fn fetch(&self, state: &mut State) {
        let lg2 = if state.iqa >> 11 & 1 != 0 { 5 } else { 4 };
        let bytes = 0x1000 << (state.iqa & 7);
        while state.head != state.tail && state.fsts & 0x50 == 0 && state.gsts >> 26 & 1 != 0 {
            if state.broken == Broken::Stuck {
                return;
            }
            let paddr = (state.iqa & !0xfff) + state.head;
            let [low, high] = [0, 8].map(|word| self.memory.read(paddr + word).unwrap_or(0));
            if state.broken == Broken::Picky && low & 0xf != 5 {
                state.fsts |= 1 << 4;
                return;
            }
            if state.broken == Broken::Refuses || matches!(low & 0xf, 0 | 8..) {
                state.broken = Broken::Not;
                state.fsts |= 1 << 4;
                return;
            }
            state.head = (state.head + (1 << lg2)) % bytes;
            match (low & 0xf, state.broken) {
                (5, Broken::Silent) => {}
                (5, Broken::TimesOut) => {
                    state.broken = Broken::Not;
                    state.fsts |= 1 << 6;
                }
                (5, _) => {
                    self.memory.write(high, low >> 32);
                }
                _ => state.told.push([low, high]),
            }
        }
    }

    fn command(&self, state: &mut State, value: u32) {
        if state.broken == Broken::Deaf {
            return;
        }
        let states = if state.interrupts_alone { 1 << 26 } else { 1 << 31 | 1 << 26 };
        state.gsts = (value & states) | (state.gsts & 1 << 30) | (value & 1 << 30);
        state.flushes += value >> 27 & 1;
        if value >> 26 & 1 == 0 {
            state.torn |= state.busy > 0;
            state.head = 0;
        }
        state.passed |= state.watch && value >> 31 == 0 && state.pmen & 1 == 0;
    }

    fn write(&self, offset: u64, value: u64) {
        let low = u32::try_from(value & 0xffff_ffff).unwrap_or(0);
        let mut state = self.state();
        if state.broken == Broken::Gone {
            return;
        }
        match offset {
            0x18 => self.command(&mut state, low),
            0x20 => state.rtaddr = value,
            0x34 => {
                state.fsts &= !(low & 0xfd);
                self.fetch(&mut state);
            }
            0x38 => state.fectl = low,
            0x3c..0x48 => state.message[usize::try_from(offset / 4 - 15).unwrap_or(0)] = low.into(),
            0x64 => state.pmen = (low & 1 << 31) | low >> 31,
            0x88 => {
                state.tail = value;
                self.fetch(&mut state);
            }
            0x90 => state.iqa = value,
            RECORDS..0x240 if state.broken != Broken::Storm => {
                let record = usize::try_from((offset - RECORDS) / 16).unwrap_or(0);
                if offset % 16 == 12 && low >> 31 != 0 {
                    state.records[record][1] &= !(1 << 63);
                }
            }
            _ => {}
        }
    }

    fn read(&self, offset: u64) -> u64 {
        let mut state = self.state();
        state.reads += 1;
        if let Broken::Garbled(seed) = &mut state.broken {
            *seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            return *seed ^ (*seed >> 29);
        }
        if let Some(seed) = &mut state.lies {
            *seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            if *seed >> 61 == 0 {
                return *seed ^ (*seed >> 29);
            }
        }
        if state.broken == Broken::Gone {
            return u64::MAX;
        }
        let pending = state.records.iter().any(|record| record[1] >> 63 != 0);
        match offset {
            0x08 => state.cap,
            0x10 => state.ecap,
            0x1c => state.gsts.into(),
            0x20 => state.rtaddr,
            0x34 => u64::from(state.fsts | u32::from(pending) << 1),
            0x64 => state.pmen.into(),
            0x80 if state.busy > 0 => {
                state.busy -= 1;
                state.tail ^ 0x10
            }
            0x80 => state.head,
            0x88 => state.tail,
            RECORDS..0x240 => {
                let at = usize::try_from(offset - RECORDS).unwrap_or(0);
                let value = state.records[at / 16][at / 8 % 2] >> (at % 8 * 8);
                if let Some(record) = state.arrives.take_if(|_| at < 16) {
                    state.records[0] = record;
                }
                value
            }
            _ => 0x10,
        }
    }
}

impl Mmio for Fake {
    fn read32(&self, offset: u64) -> u32 {
        u32::try_from(self.read(offset) & 0xffff_ffff).unwrap_or(0)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.write(offset, value.into());
    }

    fn read64(&self, offset: u64) -> u64 {
        if self.state().narrow_bus {
            return u64::from(self.read32(offset)) | u64::from(self.read32(offset + 4)) << 32;
        }
        self.read(offset)
    }

    fn write64(&self, offset: u64, value: u64) {
        self.write(offset, value);
    }
}

pub(crate) type Iommu = Vtd<Fake, FakeHost>;
pub(crate) type Tables = Domain<VtdSs, Arena, VtdOps<Fake, FakeHost>>;
pub(crate) type Stream = Attachment<VtdStream<Tables, Fake, FakeHost>>;

pub(crate) fn start(fake: &Fake, mode: Mode) -> Result<Arc<Iommu>, dmaspan_drivers::Error> {
    let config = VtdConfig { mode: Some(mode), ..VtdConfig::new(39) };
    #[expect(unsafe_code, reason = "hands hardware to its driver")]
    // SAFETY: the hardware is in memory and reads the host's alone.
    unsafe {
        Vtd::new(fake.clone(), fake.memory.clone(), config)
    }
}

pub(crate) fn domain(iommu: &Arc<Iommu>) -> Result<Arc<Tables>, dmaspan_drivers::Error> {
    // One leaf a page, so that each can be unmapped alone.
    let config = VtdSsConfig { page_sizes: Some(1 << 12), ..iommu.second_stage_config()? };
    let format = VtdSs::new(config).expect("it fits");
    let arena = Arena::new(PhysAddr::new(0x1_0000_0000), 1 << 20);
    let table = PageTable::new(format, arena).expect("there is room");
    Ok(Arc::new(Domain::new(table, iommu.ops(Stage::Second)?).expect("it is empty")))
}

pub(crate) fn stream(iommu: &Arc<Iommu>, id: u32) -> Stream {
    let port = iommu.stream(id, ReservedRegions::new()).expect("nobody has it");
    Attachment::new(port).expect("it is blocked")
}

pub(crate) fn to(domain: &Arc<Tables>) -> Target<Tables> {
    Target::Paging(Prepared::new(Arc::clone(domain)))
}

pub(crate) fn map(domain: &Tables, iova: u64, bytes: u64) -> bool {
    let span = Span::new(PhysAddr::new(0), bytes).expect("a span");
    #[expect(unsafe_code, reason = "maps memory that nobody accesses")]
    // SAFETY: there is no device.
    unsafe { domain.map_spans(Iova::new(iova), &[span], Prot::READ | Prot::WRITE) }
        .inspect_err(|error| println!("{error}"))
        .is_ok()
}

/// Whether an unmap was synced.
pub(crate) fn unmap(domain: &Tables, iova: u64, bytes: u64) -> bool {
    let range = IovaRange::from_len(Iova::new(iova), bytes).expect("a range");
    #[expect(unsafe_code, reason = "the test owns the addresses")]
    // SAFETY: nobody else maps there.
    let unsynced = unsafe { domain.remove(range) };
    unsynced.expect("it is mapped").sync().is_ok()
}
