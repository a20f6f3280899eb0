//! An IOMMU of software, from the manual's tables of registers, commands and structures.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::{Arena, Half, PageTable, Riscv, RiscvConfig, RiscvStage};
use dmaspan::iommu::{Domain, ReservedRegions};
use dmaspan_drivers::riscv::{RiscvIommu, RiscvIommuConfig, RiscvOps, RiscvStream};
use dmaspan_drivers::{Error, Mmio};
use parking_lot::Mutex;

use crate::host::FakeHost;

pub(crate) type Iommu = RiscvIommu<Fake, FakeHost>;
pub(crate) type Tables = Domain<Riscv, Arena, RiscvOps<Fake, FakeHost>>;
pub(crate) type Stream = RiscvStream<Tables, Fake, FakeHost>;

pub(crate) const FIRST: RiscvStage = RiscvStage::First(Half::Lower);
pub(crate) const SECOND: RiscvStage = RiscvStage::Second;

/// Version 1.0, all modes of both stages, Svpbmt, both ways of interrupts, 46 bits.
pub(crate) const BASE_FORMAT: u64 = 0x10 | 0xe << 8 | 1 << 15 | 0xe << 16 | 2 << 28 | 46 << 32;
pub(crate) const MSI_FLAT: u64 = 1 << 22;
pub(crate) const AMO_HWAD: u64 = 1 << 24;

pub(crate) const CQMF: u32 = 1 << 8;
pub(crate) const CMD_TO: u32 = 1 << 9;
pub(crate) const CMD_ILL: u32 = 1 << 10;
/// The directory that firmware left: three levels.
pub(crate) const FIRMWARE_DDTP: u64 = 0x89_1234_5678 << 10 | 4;
const ON: u32 = 1 << 16;
const BUSY: u32 = 1 << 17;

/// How the hardware misbehaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fault {
    #[default]
    None,
    /// Commands stay where they are.
    Stuck,
    /// Commands with this opcode stop the queue with these bits of `cqcsr`.
    Refuses(u64, u32),
    /// A register reads this.
    Reads(u64, u32),
    /// All registers read ones.
    Gone,
}

#[derive(Default)]
pub(crate) struct Registers {
    pub(crate) capabilities: u64,
    pub(crate) fctl: u32,
    /// Bits of `fctl` that are always set.
    pub(crate) fctl_fixed: u32,
    /// Bits of addresses that `ddtp` has.
    pub(crate) ddtp_kept: u64,
    pub(crate) ddtp: u64,
    /// The modes that `ddtp` takes, one bit each.
    pub(crate) modes: u32,
    pub(crate) ddtp_busy: bool,
    cqb: u64,
    pub(crate) cqh: u32,
    pub(crate) cqt: u32,
    fqb: u64,
    pub(crate) fqh: u32,
    pub(crate) fqt: u32,
    pub(crate) csr: [u32; 3],
    pub(crate) msi: [u32; 4],
    pub(crate) ipsr: u32,
    pub(crate) fault: Fault,
    /// What must not be written is not refused: it was read wrong.
    lenient: bool,
    /// How often stores to memory were ordered before later ones.
    pub(crate) ordered: u32,
    /// Commands that were executed.
    pub(crate) log: Vec<[u64; 2]>,
    /// The device whose context is looked at with every command, and what was seen.
    pub(crate) watched: Option<u32>,
    pub(crate) contexts: Vec<[u64; 4]>,
}

/// The hardware. Clones are the same.
#[derive(Clone)]
pub(crate) struct Fake {
    pub(crate) host: FakeHost,
    pub(crate) state: Arc<Mutex<Registers>>,
}

impl Fake {
    pub(crate) fn new(capabilities: u64) -> Self {
        // Firmware left it on, with its own directory and queues.
        let registers = Registers {
            capabilities,
            ddtp: FIRMWARE_DDTP,
            ddtp_kept: u64::MAX,
            fctl: 0b101,
            modes: 0b11111,
            cqh: 5,
            cqt: 5,
            csr: [ON | 1; 3],
            ipsr: 0b1111,
            ..Registers::default()
        };
        Self { host: FakeHost::new(0x1_2345_0000), state: Arc::new(Mutex::new(registers)) }
    }

    pub(crate) fn start(&self, config: RiscvIommuConfig) -> Result<Arc<Iommu>, Error> {
        #[expect(unsafe_code, reason = "a driver is given its hardware")]
        // SAFETY: the hardware is of software, and reaches no memory but the host's structures.
        unsafe {
            RiscvIommu::new(self.clone(), self.host.clone(), config)
        }
    }

    /// The driver with what is usual.
    pub(crate) fn driver(&self) -> Arc<Iommu> {
        let iommu = self.start(RiscvIommuConfig::default()).unwrap();
        self.take();
        iommu
    }

    /// For a driver that does not read what the registers have.
    pub(crate) fn lenient(&self) {
        self.state.lock().lenient = true;
    }

    pub(crate) fn set(&self, fault: Fault) {
        self.state.lock().fault = fault;
    }

    /// The commands executed since the last call.
    pub(crate) fn take(&self) -> Vec<[u64; 2]> {
        std::mem::take(&mut self.state.lock().log)
    }

    /// Where hardware finds the context of a device ("Device-Directory-Table").
    pub(crate) fn context_at(&self, state: &Registers, device: u32) -> Option<u64> {
        let extended = state.capabilities & MSI_FLAT != 0;
        let indices = match extended {
            true => [device & 0x3f, device >> 6 & 0x1ff, device >> 15],
            false => [device & 0x7f, device >> 7 & 0x1ff, device >> 16],
        };
        let mode = usize::try_from(state.ddtp & 0xf).unwrap();
        let mut table = (state.ddtp >> 10 & 0xfff_ffff_ffff) << 12;
        for level in (1..mode.checked_sub(1)?).rev() {
            let entry = self.host.read(table + u64::from(indices[level]) * 8)?;
            assert_eq!(entry & !(0xfff_ffff_ffff << 10), entry & 1, "reserved bits are 0");
            if entry & 1 == 0 {
                return None;
            }
            table = (entry >> 10) << 12;
        }
        Some(table + u64::from(indices[0]) * if extended { 64 } else { 32 })
    }

    /// The context of a device; zeros where no table leads to one.
    pub(crate) fn context(&self, device: u32) -> [u64; 4] {
        self.context_of(&self.state.lock(), device)
    }

    fn context_of(&self, state: &Registers, device: u32) -> [u64; 4] {
        let Some(at) = self.context_at(state, device) else { return [0; 4] };
        [0, 8, 16, 24].map(|offset| self.host.read(at + offset).unwrap())
    }

    /// Writes a record into the fault queue.
    pub(crate) fn record(&self, words: [u64; 4]) {
        let mut state = self.state.lock();
        let mask = (2 << (state.fqb & 0x1f)) - 1;
        let next = (state.fqt + 1) & mask;
        if state.csr[1] & (1 << 9 | 1 << 8) != 0 {
            return;
        }
        if next == state.fqh {
            state.csr[1] |= 1 << 9;
            return;
        }
        let at = (state.fqb >> 10 << 12) + u64::from(state.fqt) * 32;
        for (offset, word) in (0..).step_by(8).zip(words) {
            self.host.write(at + offset, word).unwrap();
        }
        state.fqt = next;
    }

    /// Executes what is in the command queue.
    fn execute(&self, state: &mut Registers) {
        let mask = (2 << (state.cqb & 0x1f)) - 1;
        while state.csr[0] & (ON | 0x700) == ON && state.cqh != state.cqt {
            let at = (state.cqb >> 10 << 12) + u64::from(state.cqh) * 16;
            let command = [0, 8].map(|offset| self.host.read(at + offset).unwrap());
            match state.fault {
                Fault::Stuck => return,
                Fault::Refuses(opcode, bits) if command[0] & 0x7f == opcode => {
                    state.csr[0] |= bits;
                    return;
                }
                _ => {}
            }
            state.log.push(command);
            if let Some(device) = state.watched {
                let context = self.context_of(state, device);
                state.contexts.push(context);
            }
            state.cqh = (state.cqh + 1) & mask;
        }
    }

    fn control(state: &mut Registers, queue: usize, value: u32) {
        let csr = state.csr[queue];
        let cleared = csr & !(value & 0xf00);
        state.csr[queue] = match (value & 1, csr & ON) {
            (1, 0) => value & 3 | ON,
            (1, _) => cleared & !3 | value & 3,
            _ => 0,
        };
        if (value & 1 != 0) != (csr & ON != 0) {
            match queue {
                0 => state.cqh = 0,
                1 => state.fqt = 0,
                _ => {}
            }
        }
    }
}

impl Mmio for Fake {
    fn read32(&self, offset: u64) -> u32 {
        let state = self.state.lock();
        let half = |value: u64, upper: u64| u32::try_from(value >> (upper * 32) & 0xffff_ffff);
        match (state.fault, offset) {
            (Fault::Gone, _) => u32::MAX,
            (Fault::Reads(at, value), _) if at == offset => value,
            (_, 0 | 4) => half(state.capabilities, offset / 4).unwrap(),
            (_, 8) => state.fctl,
            (_, 16 | 20) => {
                let busy = if state.ddtp_busy { 1 << 4 } else { 0 };
                half(state.ddtp | busy, (offset - 16) / 4).unwrap()
            }
            (_, 24 | 28) => half(state.cqb, (offset - 24) / 4).unwrap(),
            (_, 32) => state.cqh,
            (_, 36) => state.cqt,
            (_, 40 | 44) => half(state.fqb, (offset - 40) / 4).unwrap(),
            (_, 48) => state.fqh,
            (_, 52) => state.fqt,
            (_, 72 | 76 | 80) => state.csr[usize::try_from(offset - 72).unwrap() / 4],
            _ => 0,
        }
    }

    fn order_stores(&self) {
        self.state.lock().ordered += 1;
    }

    fn write32(&self, offset: u64, value: u32) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let upper = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        let lower = |old: u64| old >> 32 << 32 | u64::from(value);
        match offset {
            8 => state.fctl = value & 7 | state.fctl_fixed,
            16 | 20 if state.ddtp & 0xf >= 2 && !state.lenient => {
                // "Software must not change the PPN field value when transitioning to Off."
                let [old, new] = match offset {
                    16 => [state.ddtp & 0xffff_fc00, u64::from(value & !0x3ff)],
                    _ => [state.ddtp >> 32, u64::from(value)],
                };
                assert_eq!(old, new, "a directory that is in use stays where it is");
                if offset == 16 {
                    assert!(!state.ddtp_busy, "a register that is busy is not written");
                    assert_eq!(value & 0xf, 0, "a directory in use is turned off first");
                    state.ddtp = lower(state.ddtp);
                }
            }
            20 => state.ddtp = upper(state.ddtp),
            16 => {
                assert!(!state.ddtp_busy, "a register that is busy is not written");
                let kept = state.modes >> (value & 0xf) & 1 != 0;
                let value = if kept { value } else { value & !0xf };
                let value = u64::from(value) & (state.ddtp_kept | 0x3ff);
                state.ddtp = state.ddtp >> 32 << 32 | value;
            }
            28 => state.cqb = upper(state.cqb),
            24 => {
                state.cqb = lower(state.cqb);
                // It assumes "a valid but otherwise UNSPECIFIED value".
                state.cqt = (state.cqt | 1) & ((2 << (value & 0x1f)) - 1);
            }
            36 => {
                state.cqt = value;
                self.execute(state);
            }
            44 => state.fqb = upper(state.fqb),
            40 => {
                state.fqb = lower(state.fqb);
                state.fqh = (state.fqh | 1) & ((2 << (value & 0x1f)) - 1);
            }
            48 => state.fqh = value,
            84 => state.ipsr &= !value,
            72 | 76 | 80 => {
                let queue = usize::try_from(offset - 72).unwrap() / 4;
                assert_eq!(state.csr[queue] & BUSY, 0, "a register that is busy is not written");
                let on = state.csr[queue] & ON;
                Self::control(state, queue, value);
                if queue == 0 && on == 0 {
                    self.execute(state);
                }
            }
            768..784 => state.msi[usize::try_from(offset - 768).unwrap() / 4] = value,
            _ => {}
        }
    }
}

/// A domain with no memory behind.
pub(crate) fn domain(iommu: &Arc<Iommu>, stage: RiscvStage) -> Arc<Tables> {
    domain_of(iommu, stage, iommu.config(stage).unwrap())
}

pub(crate) fn domain_of(iommu: &Arc<Iommu>, stage: RiscvStage, config: RiscvConfig) -> Arc<Tables> {
    Arc::new(Domain::new(tables(config), iommu.ops(stage).unwrap()).unwrap())
}

/// An empty table.
pub(crate) fn tables(config: RiscvConfig) -> PageTable<Riscv, Arena> {
    // Each has its own tables.
    static NEXT: AtomicU64 = AtomicU64::new(0x10_0000_0000);
    let base = NEXT.fetch_add(1 << 24, Ordering::Relaxed);
    let arena = Arena::new(PhysAddr::new(base), 1 << 20);
    PageTable::new(Riscv::new(config).unwrap(), arena).unwrap()
}

pub(crate) fn stream(iommu: &Arc<Iommu>, device: u32) -> Stream {
    iommu.stream(device, ReservedRegions::new()).unwrap()
}
