//! Memory and registers in the place of an AMD IOMMU, by 48882, 2.4, 2.5 and 3.4.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dmaspan::io_pgtable::{AmdV1, AmdV1Config, Arena, PageTable};
use dmaspan::iommu::{Attachment, Domain, ReservedRegions};
use dmaspan::{PhysAddr, lg2};
use dmaspan_drivers::amd_vi::{AmdVi, AmdViConfig, AmdViOps, AmdViStream};
use dmaspan_drivers::{Again, Error, Host, Mmio, NoMemory, Structure};
use dmaspan_sim::rng::Rng;
use parking_lot::Mutex;

pub(crate) const DEVICE_TABLE: u64 = 0x0000;
const COMMAND_BASE: u64 = 0x0008;
const EVENT_BASE: u64 = 0x0010;
pub(crate) const CONTROL: u64 = 0x0018;
pub(crate) const EXCLUSION_BASE: u64 = 0x0020;
pub(crate) const EXTENDED_FEATURES: u64 = 0x0030;
const COMMAND_HEAD: u64 = 0x2000;
const COMMAND_TAIL: u64 = 0x2008;
const EVENT_HEAD: u64 = 0x2010;
pub(crate) const EVENT_TAIL: u64 = 0x2018;
pub(crate) const STATUS: u64 = 0x2020;

pub(crate) const ENABLE: u64 = 1 << 0;
const EVENT_LOG: u64 = 1 << 2;
const COMMANDS: u64 = 1 << 12;
const OVERFLOW: u64 = 1 << 0;
const EVENT_RUN: u64 = 1 << 3;
const COMMANDS_RUN: u64 = 1 << 4;

/// NpCache, EFRSup; 48 bits of both addresses.
pub(crate) const CAPABILITY: u32 = 1 << 27 | 0x0f;
pub(crate) const NP_CACHE: u32 = 1 << 26;
pub(crate) const MISCELLANEOUS: u32 = 48 << 8 | 48 << 15;
/// IASup, HESup, HATS = 6 levels.
pub(crate) const FEATURES: u64 = 1 << 6 | 1 << 8 | 2 << 10;

pub(crate) type Words = Arc<[AtomicU64]>;
pub(crate) type Paging = Domain<AmdV1, Arena, AmdViOps<Arc<Fake>, FakeHost>>;
pub(crate) type Driver = Arc<AmdVi<Arc<Fake>, FakeHost>>;
pub(crate) type Stream = Attachment<AmdViStream<Paging, Arc<Fake>, FakeHost>>;

pub(crate) type Meanwhile = Box<dyn FnOnce() + Send>;

/// Physical memory for structures.
pub(crate) struct Memory {
    pieces: Mutex<BTreeMap<u64, Words>>,
    /// What was allocated and not freed.
    pub(crate) live: AtomicUsize,
    /// Allocations that succeed from now on.
    pub(crate) allowed: AtomicUsize,
    /// What lets hardware go on while it is waited for.
    fake: Mutex<Option<Arc<Fake>>>,
    /// What happens while hardware is waited for the next time.
    pub(crate) meanwhile: Mutex<Option<Meanwhile>>,
}

pub(crate) struct Piece {
    paddr: u64,
    words: Words,
    memory: Arc<Memory>,
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.memory.live.fetch_sub(1, Ordering::Relaxed);
    }
}

// SAFETY: the words are at that address for the fake hardware, and nobody else's.
unsafe impl Structure for Piece {
    fn paddr(&self) -> PhysAddr {
        PhysAddr::new(self.paddr)
    }

    fn words(&self) -> &[AtomicU64] {
        &self.words
    }
}

impl Memory {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            pieces: Mutex::default(),
            live: AtomicUsize::new(0),
            allowed: AtomicUsize::new(usize::MAX),
            fake: Mutex::default(),
            meanwhile: Mutex::default(),
        })
    }

    /// The word at a physical address, which must be in a structure.
    pub(crate) fn word(&self, paddr: u64) -> u64 {
        self.with(paddr, |word| word.load(Ordering::SeqCst))
    }

    pub(crate) fn set(&self, paddr: u64, value: u64) {
        self.with(paddr, |word| word.store(value, Ordering::SeqCst));
    }

    fn with<T>(&self, paddr: u64, act: impl FnOnce(&AtomicU64) -> T) -> T {
        let pieces = self.pieces.lock();
        let (&base, words) = pieces.range(..=paddr).next_back().expect("memory of a structure");
        let word = words.get(usize::try_from((paddr - base) / 8).unwrap());
        act(word.expect("memory of a structure"))
    }
}

/// A host of that memory: an `Arc` so that tests see it, too.
pub(crate) struct FakeHost(pub(crate) Arc<Memory>);

// SAFETY: pieces are of their size, aligned to it, and below 2^48, the only limit that there is.
unsafe impl Host for FakeHost {
    type Lock = parking_lot::RawMutex;
    type Structure = Piece;

    fn allocate(&self, lg2_size: u32, max_paddr: PhysAddr) -> Result<Piece, NoMemory> {
        let refused = NoMemory { lg2_size, max_paddr };
        let take = |allowed: usize| allowed.checked_sub(1);
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        self.0.allowed.fetch_update(set, fetch, take).map_err(|_| refused)?;
        let mut pieces = self.0.pieces.lock();
        // One after the other, each in a place of its own.
        let paddr = (pieces.len() as u64 + 1) << 32;
        assert!(paddr <= max_paddr.get());
        let words: Words = (0..lg2::size(lg2_size) / 8).map(|_| AtomicU64::new(0)).collect();
        pieces.insert(paddr, Arc::clone(&words));
        self.0.live.fetch_add(1, Ordering::Relaxed);
        Ok(Piece { paddr, words, memory: Arc::clone(&self.0) })
    }

    fn again(&self, polls: u32) -> Again {
        let fake = self.0.fake.lock().clone();
        if let Some(fake) = fake {
            fake.go_on();
        }
        let meanwhile = self.0.meanwhile.lock().take();
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
        if polls < 1000 { Again::Poll } else { Again::GiveUp }
    }
}

/// How the hardware behaves.
#[derive(Default)]
pub(crate) struct Behaviour {
    /// Commands are done only while they are waited for, as many a poll; 0 for at once.
    pub(crate) slow: usize,
    /// The COMPLETION_WAITs that are fetched and not done.
    pub(crate) lost_waits: usize,
    /// The command, counted from now on, at which the command buffer stops.
    pub(crate) stops_at: Option<usize>,
    /// Everything reads all ones, and nothing has an effect.
    pub(crate) gone: bool,
    /// What a register reads, in the place of its value.
    pub(crate) reads: BTreeMap<u64, u64>,
    /// One read in four gives anything.
    pub(crate) lies: Option<Rng>,
}

/// The registers.
pub(crate) struct Fake {
    memory: Arc<Memory>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    registers: BTreeMap<u64, u64>,
    behaviour: Behaviour,
    seen: Vec<Seen>,
    writes: Vec<(u64, u64)>,
}

/// A command, and for INVALIDATE_DEVTAB_ENTRY words 0 and 1 of the entry when it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) command: [u64; 2],
    pub(crate) entry: [u64; 2],
}

impl Seen {
    pub(crate) fn opcode(&self) -> u64 {
        self.command[0] >> 60
    }
}

impl State {
    fn get(&self, register: u64) -> u64 {
        self.registers.get(&register).copied().unwrap_or(0)
    }

    fn change(&mut self, register: u64, clear: u64, set: u64) {
        let value = self.get(register) & !clear | set;
        self.registers.insert(register, value);
    }
}

impl Fake {
    pub(crate) fn new(memory: &Arc<Memory>) -> Arc<Self> {
        let fake = Arc::new(Self { memory: Arc::clone(memory), state: Mutex::default() });
        fake.poke(EXTENDED_FEATURES, FEATURES);
        *memory.fake.lock() = Some(Arc::clone(&fake));
        fake
    }

    /// Sets a register without the effects of a write.
    pub(crate) fn poke(&self, register: u64, value: u64) {
        self.state.lock().registers.insert(register, value);
    }

    pub(crate) fn peek(&self, register: u64) -> u64 {
        self.state.lock().get(register)
    }

    pub(crate) fn behave(&self, how: impl FnOnce(&mut Behaviour)) {
        how(&mut self.state.lock().behaviour);
    }

    /// The commands that were done since the last call.
    pub(crate) fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state.lock().seen)
    }

    /// The writes of registers since the last call.
    pub(crate) fn take_writes(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.state.lock().writes)
    }

    /// Words 0 and 1 of a device's entry.
    pub(crate) fn entry(&self, device: u64) -> [u64; 2] {
        let table = self.peek(DEVICE_TABLE) & !0xfff;
        [0, 8].map(|offset| self.memory.word(table + device * 32 + offset))
    }

    /// Logs an event as hardware does.
    pub(crate) fn log(&self, event: [u64; 2]) {
        let mut state = self.state.lock();
        if state.get(STATUS) & EVENT_RUN == 0 || state.get(STATUS) & OVERFLOW != 0 {
            return;
        }
        let base = state.get(EVENT_BASE);
        let bytes = 16u64 << (base >> 56);
        let tail = state.get(EVENT_TAIL);
        let next = (tail + 16) % bytes;
        if next == state.get(EVENT_HEAD) {
            // Nothing is logged any more (2.5).
            state.change(STATUS, EVENT_RUN, OVERFLOW);
            return;
        }
        let at = (base & 0x000f_ffff_ffff_f000) + tail;
        self.memory.set(at, event[0]);
        self.memory.set(at + 8, event[1]);
        state.registers.insert(EVENT_TAIL, next);
    }

    /// Whether one more event fits into the log.
    pub(crate) fn has_room(&self) -> bool {
        let state = self.state.lock();
        let bytes = 16u64 << (state.get(EVENT_BASE) >> 56);
        (state.get(EVENT_TAIL) + 16) % bytes != state.get(EVENT_HEAD)
    }

    fn go_on(&self) {
        let mut state = self.state.lock();
        let slow = state.behaviour.slow;
        if slow > 0 {
            self.fetch(&mut state, slow);
        }
    }

    fn fetch(&self, state: &mut State, at_most: usize) {
        for _ in 0..at_most {
            let (head, tail) = (state.get(COMMAND_HEAD), state.get(COMMAND_TAIL));
            if head == tail || state.get(STATUS) & COMMANDS_RUN == 0 || state.behaviour.gone {
                return;
            }
            if let Some(left) = &mut state.behaviour.stops_at {
                if *left == 0 {
                    state.behaviour.stops_at = None;
                    state.change(STATUS, COMMANDS_RUN, 0);
                    return;
                }
                *left -= 1;
            }
            let base = state.get(COMMAND_BASE);
            let at = (base & 0x000f_ffff_ffff_f000) + head;
            let command = [0, 8].map(|offset| self.memory.word(at + offset));
            self.execute(state, command);
            state.registers.insert(COMMAND_HEAD, (head + 16) % (16 << (base >> 56)));
        }
    }

    fn execute(&self, state: &mut State, command: [u64; 2]) {
        let mut entry = [0, 0];
        match command[0] >> 60 {
            1 if state.behaviour.lost_waits > 0 => state.behaviour.lost_waits -= 1,
            1 => {
                assert_eq!(command[0] & 7, 1, "a store without an interrupt");
                self.memory.set(command[0] & 0x000f_ffff_ffff_fff8, command[1]);
            }
            2 => {
                let table = state.get(DEVICE_TABLE);
                let device = command[0] & 0xffff;
                if device < ((table & 0x1ff) + 1) << 7 {
                    let at = (table & !0xfff) + device * 32;
                    entry = [0, 8].map(|offset| self.memory.word(at + offset));
                }
            }
            3 | 8 => {}
            kind => panic!("no driver here sends commands of kind {kind}"),
        }
        state.seen.push(Seen { command, entry });
    }

    fn written(&self, register: u64, value: u64) {
        let mut state = self.state.lock();
        if state.behaviour.gone {
            return;
        }
        state.writes.push((register, value));
        match register {
            STATUS => {
                state.change(STATUS, value & 0x667, 0);
                return;
            }
            COMMAND_BASE | EVENT_BASE | DEVICE_TABLE => {
                assert_ne!(value & 0x000f_ffff_ffff_f000, 0);
            }
            _ => {}
        }
        state.registers.insert(register, value);
        match register {
            CONTROL => {
                let runs = |bit| value & ENABLE != 0 && value & bit != 0;
                let commands = if runs(COMMANDS) { COMMANDS_RUN } else { 0 };
                let stopped = state.get(STATUS) & OVERFLOW != 0;
                let events = if runs(EVENT_LOG) && !stopped { EVENT_RUN } else { 0 };
                state.change(STATUS, COMMANDS_RUN | EVENT_RUN, commands | events);
            }
            COMMAND_TAIL if state.behaviour.slow == 0 => self.fetch(&mut state, usize::MAX),
            _ => {}
        }
    }

    fn read(&self, register: u64) -> u64 {
        let mut state = self.state.lock();
        if let Some(lies) = &mut state.behaviour.lies
            && lies.below(4) == 0
        {
            return lies.next() >> lies.below(64);
        }
        match state.behaviour.reads.get(&register) {
            _ if state.behaviour.gone => u64::MAX,
            Some(&value) => value,
            None => state.get(register),
        }
    }
}

impl Mmio for Fake {
    fn read32(&self, offset: u64) -> u32 {
        u32::try_from(self.read(offset) & 0xffff_ffff).unwrap()
    }

    fn write32(&self, offset: u64, value: u32) {
        self.written(offset, value.into());
    }

    fn read64(&self, offset: u64) -> u64 {
        self.read(offset)
    }

    fn write64(&self, offset: u64, value: u64) {
        self.written(offset, value);
    }
}

/// A driver over such hardware.
pub(crate) struct Rig {
    pub(crate) memory: Arc<Memory>,
    pub(crate) fake: Arc<Fake>,
    pub(crate) iommu: Driver,
    pub(crate) arena: Arena,
}

pub(crate) fn config() -> AmdViConfig {
    AmdViConfig {
        last_device: 0x3ff,
        lg2_commands: 8,
        lg2_events: 8,
        ..AmdViConfig::new(CAPABILITY, MISCELLANEOUS)
    }
}

/// Starts a driver.
pub(crate) fn start(
    memory: &Arc<Memory>,
    fake: &Arc<Fake>,
    config: AmdViConfig,
) -> Result<Driver, Error> {
    // SAFETY: the registers and the memory are of the same fake, which nobody else drives.
    unsafe { AmdVi::new(Arc::clone(fake), FakeHost(Arc::clone(memory)), config) }
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::with(config())
    }

    pub(crate) fn with(config: AmdViConfig) -> Self {
        let memory = Memory::new();
        let fake = Fake::new(&memory);
        let iommu = start(&memory, &fake, config).expect("it starts");
        fake.take();
        fake.take_writes();
        let arena = Arena::new(PhysAddr::new(0x4000_0000), 16 << 20);
        Self { memory, fake, iommu, arena }
    }

    pub(crate) fn domain(&self) -> Arc<Paging> {
        self.domain_of(self.iommu.v1_config())
    }

    pub(crate) fn domain_of(&self, config: AmdV1Config) -> Arc<Paging> {
        let format = AmdV1::new(config).unwrap();
        let table = PageTable::new(format, self.arena.clone()).unwrap();
        Arc::new(Domain::new(table, self.iommu.ops().unwrap()).unwrap())
    }

    pub(crate) fn stream(&self, id: u32) -> Stream {
        Attachment::new(self.iommu.stream(id, ReservedRegions::new()).unwrap()).unwrap()
    }
}
