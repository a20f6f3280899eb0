//! An SMMUv3 as far as its registers and queues go, written from the manual (IHI 0070). It keeps
//! what it was told, and misbehaves where it is told to.

use std::collections::BTreeMap;
use std::sync::Arc;

use dmaspan_drivers::Mmio;
use parking_lot::Mutex;

use crate::host::FakeHost;

/// How it behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Well,
    /// It takes no commands.
    Stuck,
    /// It knows no commands with this opcode.
    Refuses(u64),
    /// It does not know every n-th command.
    RefusesEach(u32),
    /// It goes no further than to commands with this opcode.
    StopsAt(u64),
    /// It cannot read commands.
    Unreadable,
    /// It says that it consumed what nobody placed.
    Ahead,
    /// All registers are all ones.
    Gone,
}

/// What the registers say that differs from model to model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    pub(crate) idr0: u32,
    pub(crate) idr1: u32,
    pub(crate) idr3: u32,
    pub(crate) idr5: u32,
}

impl Model {
    /// Both stages, 64-bit tables, coherent, 16-bit numbers, two levels, terminating; 8 bits of
    /// streams more than one table has, queues of 2^19; RIL; all granules and 48 bits.
    pub(crate) const LARGE: Self = Self {
        idr0: 0b11 | 0b10 << 2 | 1 << 4 | 1 << 12 | 1 << 18 | 0b10 << 21 | 0b01 << 24 | 0b01 << 27,
        idr1: 16 | 19 << 16 | 19 << 21,
        idr3: 1 << 10,
        idr5: 0b111 << 4 | 5,
    };

    /// The least: 8-bit numbers, no ranges, a linear table, queues of 16, 4K and 32 bits; it stalls
    /// or terminates.
    pub(crate) const SMALL: Self = Self {
        idr0: 0b11 | 0b10 << 2 | 1 << 4,
        idr1: 6 | 4 << 16 | 4 << 21,
        idr3: 0,
        idr5: 1 << 4,
    };
}

struct State {
    mode: Mode,
    model: Model,
    registers: BTreeMap<u64, u64>,
    consumer: u32,
    error: u32,
    gerror: u32,
    gerrorn: u32,
    placed: u32,
    commands: Vec<[u64; 2]>,
    ordered: u32,
    writes: Vec<(u64, u64)>,
}

/// The registers. Clones are the same.
#[derive(Clone)]
pub(crate) struct TestSmmu {
    memory: FakeHost,
    state: Arc<Mutex<State>>,
}

const CMDQ_ERR: u32 = 1;
pub(crate) const EVENTQ_PROD: u64 = 0x1_00a8;
pub(crate) const EVENTQ_CONS: u64 = 0x1_00ac;

impl TestSmmu {
    pub(crate) fn new(memory: &FakeHost, model: Model) -> Self {
        let state = State {
            mode: Mode::Well,
            model,
            // SMMUEN is left set by firmware, and everything passes without it.
            registers: BTreeMap::from([(0x20, 1), (0x24, 1)]),
            consumer: 0,
            error: 0,
            gerror: 0,
            gerrorn: 0,
            placed: 0,
            commands: Vec::new(),
            ordered: 0,
            writes: Vec::new(),
        };
        Self { memory: memory.clone(), state: Arc::new(Mutex::new(state)) }
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.state.lock().mode = mode;
    }

    /// How often stores to memory were ordered before later ones.
    pub(crate) fn ordered(&self) -> u32 {
        self.state.lock().ordered
    }

    /// The commands that were consumed since the last call, without the one that waits.
    pub(crate) fn take(&self) -> Vec<[u64; 2]> {
        std::mem::take(&mut self.state.lock().commands)
    }

    /// The registers that were written since the last call.
    pub(crate) fn writes(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.state.lock().writes)
    }

    pub(crate) fn register(&self, offset: u64) -> u64 {
        self.state.lock().registers.get(&offset).copied().unwrap_or(0)
    }

    pub(crate) fn set_register(&self, offset: u64, value: u64) {
        self.state.lock().registers.insert(offset, value);
    }

    pub(crate) fn raise(&self, errors: u32) {
        let mut state = self.state.lock();
        let inactive = !(state.gerror ^ state.gerrorn) & errors;
        state.gerror ^= inactive;
    }

    pub(crate) fn active(&self) -> u32 {
        let state = self.state.lock();
        state.gerror ^ state.gerrorn
    }

    /// The events' queue: where, and log2 of its places.
    pub(crate) fn events(&self) -> (u64, u32) {
        base(self.register(0xa0))
    }

    /// Places a record, if there is room.
    pub(crate) fn record(&self, words: [u64; 4]) -> bool {
        let (start, lg2) = self.events();
        let (producer, consumer) = (self.register(EVENTQ_PROD), self.register(EVENTQ_CONS));
        let round = (2u64 << lg2) - 1;
        if (producer ^ consumer) & round == 1 << lg2 {
            // OVFLG differs from OVACKFLG until that is seen.
            let overflow = !consumer & 1 << 31;
            self.set_register(EVENTQ_PROD, producer & !(1 << 31) | overflow);
            return false;
        }
        let place = start + (producer & (round >> 1)) * 32;
        for (address, word) in (place..).step_by(8).zip(words) {
            self.memory.write(address, word);
        }
        self.set_register(EVENTQ_PROD, producer & 1 << 31 | (producer + 1) & round);
        true
    }
}

fn base(value: u64) -> (u64, u32) {
    (value & 0xf_ffff_ffff_ffe0, u32::try_from(value & 0x1f).unwrap())
}

impl State {
    fn consume(&mut self, memory: &FakeHost) {
        let register = |offset: u64| self.registers.get(&offset).copied().unwrap_or(0);
        let (start, lg2) = base(register(0x90));
        let round = (2u32 << lg2) - 1;
        let producer = u32::try_from(register(0x98) & u64::from(round)).unwrap();
        while self.consumer != producer {
            let place = start + u64::from(self.consumer & (round >> 1)) * 16;
            let words = [0, 8].map(|word| memory.read(place + word));
            let stopped = (self.gerror ^ self.gerrorn) & CMDQ_ERR != 0;
            let [Some(first), Some(second)] = words else { panic!("commands are nowhere") };
            self.placed = self.placed.wrapping_add(1);
            let error = match self.mode {
                _ if stopped => return,
                Mode::Stuck | Mode::Ahead | Mode::Gone => return,
                Mode::StopsAt(opcode) if first & 0xff == opcode => return,
                Mode::Unreadable => 2,
                Mode::Refuses(opcode) if first & 0xff == opcode => 1,
                Mode::RefusesEach(n) if self.placed.is_multiple_of(n) => 1,
                _ => 0,
            };
            if error != 0 {
                self.error = error;
                self.gerror ^= CMDQ_ERR;
                return;
            }
            if first & 0xff != 0x46 {
                self.commands.push([first, second]);
            }
            self.consumer = (self.consumer + 1) & round;
        }
    }
}

impl Mmio for TestSmmu {
    fn read32(&self, offset: u64) -> u32 {
        let mut state = self.state.lock();
        if state.mode == Mode::Gone {
            return u32::MAX;
        }
        state.consume(&self.memory);
        match offset {
            0x0 => state.model.idr0,
            0x4 => state.model.idr1,
            0xc => state.model.idr3,
            0x14 => state.model.idr5,
            0x60 => state.gerror,
            0x64 => state.gerrorn,
            0x9c if state.mode == Mode::Ahead => state.consumer.wrapping_add(3) & 0xf_ffff,
            0x9c => state.consumer | state.error << 24,
            _ => u32::try_from(state.registers.get(&offset).copied().unwrap_or(0)).unwrap(),
        }
    }

    fn order_stores(&self) {
        self.state.lock().ordered += 1;
    }

    fn write32(&self, offset: u64, value: u32) {
        let mut state = self.state.lock();
        state.writes.push((offset, value.into()));
        if state.mode == Mode::Gone {
            return;
        }
        match offset {
            0x20 => drop(state.registers.insert(0x24, value.into())),
            0x50 => drop(state.registers.insert(0x54, value.into())),
            0x64 => state.gerrorn = value,
            0x9c => state.consumer = value,
            _ => {}
        }
        // UPDATE of GBPA is clear when it is done.
        let value = if offset == 0x44 { value & !(1 << 31) } else { value };
        state.registers.insert(offset, value.into());
        state.consume(&self.memory);
    }

    fn write64(&self, offset: u64, value: u64) {
        let mut state = self.state.lock();
        state.writes.push((offset, value));
        state.registers.insert(offset, value);
    }
}
