//! Registered buffers, as `xtask/peers/bench/registered.c` has Linux's: a table of buffers is
//! registered and taken away, and parts of a buffer are imported. Each I/O keeps the buffer of a
//! slot, imports a part of it and lets go of it when it is done.
//!
//! Beside the times, `peers registered same` prints where buffers and parts of them are. Where CPUs
//! take turns, they import parts alone.

use std::arch::asm;
use std::convert::Infallible;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use dmaspan::account::Counting;
use dmaspan::error::Errno;
use dmaspan::regbuf::{
    Buffer, BufferRequest, Keep, Node, Owner, Pinned, Registry, Segments, SegmentsBuilder, Source,
};
use dmaspan::{Account, Direction, PhysAddr, Prot, Span, UserAddr, UserRange};
use parking_lot::Mutex;

use super::contention::{self, CPUS};
use super::pins::{Cost, Lie, SimulatedPins, USER, User};
use super::slab;
use super::{PROT, ROUNDS, SZ_1G, SZ_1M, SZ_2M, SZ_4K, SZ_64K};
use super::{is_wanted, measure};

const SZ_16M: u64 = 16 << 20;
const SZ_256M: u64 = 256 << 20;
/// What a process may lock, more than it has.
const LIMIT: u64 = 1 << 40;
/// Imports of a round.
const PARTS: u64 = 1024;
/// A part begins at a multiple of it.
const SECTOR: u64 = 512;

/// What is registered.
#[derive(Clone, Copy)]
struct Memory {
    name: &'static str,
    /// Of a buffer.
    bytes: u64,
    /// log2 of the pages of a folio.
    order: u32,
    lie: Lie,
    /// Of the table.
    buffers: u64,
}

const fn memory(name: &'static str, bytes: u64, order: u32, lie: Lie, buffers: u64) -> Memory {
    Memory { name, bytes, order, lie, buffers }
}

const KINDS: [Memory; 10] = [
    memory("4k", SZ_4K, 0, Lie::Scattered, 1024),
    memory("64k_base", SZ_64K, 0, Lie::Scattered, 256),
    memory("64k_folio", SZ_64K, 4, Lie::Scattered, 256),
    memory("16m_base", SZ_16M, 0, Lie::Scattered, 1),
    memory("16m_run", SZ_16M, 0, Lie::Neighbours, 1),
    memory("16m_thp", SZ_16M, 9, Lie::Scattered, 1),
    memory("256m_base", SZ_256M, 0, Lie::Scattered, 1),
    memory("256m_run", SZ_256M, 0, Lie::Neighbours, 1),
    memory("256m_thp", SZ_256M, 9, Lie::Scattered, 1),
    memory("1g_hugetlb", SZ_1G, 18, Lie::Scattered, 1),
];
/// Parts are imported of the last four.
const FIRST_IMPORTED: usize = 6;
const CHEAP: Cost = Cost { call: 100, page: 4 };
const DEAR: Cost = Cost { call: 1000, page: 200 };
/// What pins cost and what the account counts.
const REGISTERED: [(&str, Cost, Counting); 3] = [
    ("cheap", CHEAP, Counting::Mappings),
    ("dear", DEAR, Counting::Mappings),
    ("ranges", CHEAP, Counting::Ranges),
];
const SIZES: [(&str, u64); 4] = [("4k", SZ_4K), ("64k", SZ_64K), ("1m", SZ_1M), ("8m", 8 * SZ_1M)];

/// A process with a ring.
struct Ring {
    memory: Memory,
    registry: Mutex<Registry<Pinned<SimulatedPins>>>,
    requests: Vec<BufferRequest>,
    account: Arc<Account>,
    user: Arc<User>,
}

impl Ring {
    fn new(memory: Memory, cost: Cost, counting: Counting) -> Self {
        let Memory { bytes, order, lie, buffers, .. } = memory;
        let user = Arc::new(User::new(buffers * bytes, order, lie, cost));
        let account = Account::with_counting(LIMIT, counting);
        let pinned =
            Pinned::new(Arc::new(SimulatedPins::Fast), Arc::clone(&user), Arc::clone(&account), 12);
        let request = |nth| {
            let range = UserRange::from_len(UserAddr::new(USER + nth * bytes), bytes);
            BufferRequest::new(range.expect("a valid range"))
        };
        let requests = (0..buffers).map(request).collect();
        let registry = Mutex::new(Registry::new(pinned));
        Self { memory, registry, requests, account, user }
    }

    #[inline(always)]
    fn register(&self) {
        assert!(self.registry.lock().register(&self.requests).is_ok(), "a table");
    }

    #[inline(always)]
    fn unregister(&self) {
        assert!(self.registry.lock().unregister().is_ok(), "there was a table");
    }

    fn bench_register(&self, name: &str) {
        measure(name, ["pair"], (2, ROUNDS), self.memory.buffers, || {
            let start = Instant::now();
            self.register();
            self.unregister();
            [start.elapsed()]
        });
        self.check_empty();
    }

    /// Where parts of so many bytes begin: always the same places.
    fn places(&self, bytes: u64) -> Vec<u64> {
        let sectors = (self.memory.bytes - bytes) / SECTOR + 1;
        let mut state = 1u64;
        let next = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005);
            state = state.wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % sectors * SECTOR
        };
        (0..PARTS).map(next).collect()
    }

    /// Imports parts, and looks at some segments of each.
    fn bench_import(&self, name: &str, bytes: u64, look: impl Fn(&Node<PhysAddr>, u64)) {
        self.register();
        let places = self.places(bytes);
        measure(name, ["pair"], (2, ROUNDS), PARTS, || {
            let start = Instant::now();
            let registry = self.registry.lock();
            for offset in &places {
                let node = registry.get(0).expect("a buffer").clone();
                look(&node, *offset);
            }
            drop(registry);
            [start.elapsed()]
        });
        self.unregister();
        self.check_empty();
    }

    fn bench_imports(&self, name: &str, bytes: u64, wanted: &[String]) {
        let import = |node: &Node<PhysAddr>, offset| {
            let part = node.import(offset, bytes, Direction::FromDevice);
            part.expect("a part of it").next().into_iter().for_each(look_at);
        };
        let walk = |node: &Node<PhysAddr>, offset| {
            let part = node.import(offset, bytes, Direction::FromDevice);
            part.expect("a part of it").for_each(look_at);
        };
        let named = |how| format!("{how}_{name}_{}", self.memory.name);
        let names = [named("import"), named("walk")];
        if is_wanted(wanted, &names[0]) {
            self.bench_import(&names[0], bytes, import);
        }
        if is_wanted(wanted, &names[1]) {
            self.bench_import(&names[1], bytes, walk);
        }
    }

    fn print_same(&self) {
        let Memory { name, bytes, buffers, .. } = self.memory;
        self.register();
        let mut found = Found::default();
        (0..).zip(0..buffers).for_each(|(slot, _)| found.find(self, slot, 0, bytes));
        found.print(name, "registered");
        self.print_held();
        for (size, bytes) in SIZES.into_iter().filter(|_| buffers == 1) {
            let mut found = Found::default();
            self.places(bytes).into_iter().for_each(|offset| found.find(self, 0, offset, bytes));
            found.print(name, size);
        }
        self.unregister();
        self.print_held();
        self.check_empty();
    }

    fn print_held(&self) {
        let (folios, pages) = (self.user.folios_pinned(), self.account.used() / SZ_4K);
        println!("{}: {folios} folios pinned, {pages} pages charged", self.memory.name);
    }

    fn check_empty(&self) {
        assert_eq!((self.user.pins(), self.account.used()), (0, 0), "pins and charged bytes");
    }
}

/// Uses what is in two registers.
#[inline(always)]
fn look_at(segment: Span) {
    let (address, bytes) = (segment.paddr().get(), segment.len());
    // SAFETY: it does nothing.
    unsafe { asm!("/* {0} {1} */", in(reg) address, in(reg) bytes, options(nomem, nostack)) }
}

/// What was found in buffers and parts of them.
#[derive(Default)]
struct Found {
    bytes: u64,
    segments: u64,
    sum: u64,
    /// The segment that the next one may follow.
    start: u64,
    end: u64,
}

impl Found {
    fn add(&mut self, value: u64) {
        self.sum = (self.sum ^ value).wrapping_mul(0x100_0000_01b3);
    }

    fn close(&mut self) {
        self.add(self.start);
        self.add(self.end);
    }

    /// Segments that touch count as one.
    fn segment(&mut self, segment: Span) {
        self.bytes += segment.len();
        let start = segment.paddr().get();
        if start != self.end {
            self.close();
            self.segments += 1;
            self.start = start;
        }
        self.end = start + segment.len();
    }

    fn find(&mut self, ring: &Ring, slot: u32, offset: u64, bytes: u64) {
        let node = ring.registry.lock().get(slot).expect("a buffer").clone();
        let part = node.import(offset, bytes, Direction::FromDevice);
        (self.start, self.end) = (0, 0);
        part.expect("a part of it").for_each(|segment| self.segment(segment));
        self.close();
    }

    fn print(&self, name: &str, what: &str) {
        let Self { bytes, segments, sum, .. } = self;
        println!("{name} {what}: {bytes} bytes in {segments} segments that lead to {sum:016x}");
    }
}

/// There is nothing to let go of.
struct Nothing;

impl Keep<PhysAddr> for Nothing {
    fn end(&mut self, _segments: &Segments<PhysAddr>) {}
}

/// Buffers are lent, and none comes from here.
struct Nobody;

impl Source for Nobody {
    type Addr = PhysAddr;
    type Error = Infallible;

    fn buffer(&self, user: UserRange, _access: Prot) -> Result<Buffer<PhysAddr>, Infallible> {
        Ok(buffer(user))
    }

    fn owner(&self) -> Owner<'_> {
        Owner { account: None, space: 0, device: None }
    }

    fn errno(&self, error: &Infallible) -> Errno {
        match *error {}
    }
}

/// Four huge pages that are not neighbours.
fn buffer(user: UserRange) -> Buffer<PhysAddr> {
    let mut segments = SegmentsBuilder::new();
    for nth in 0..user.checked_len().expect("a buffer") / SZ_2M {
        let span = Span::new(PhysAddr::new((1 << 32) + 2 * nth * SZ_2M), SZ_2M);
        segments.push(span.expect("a valid span")).expect("room");
    }
    let segments = segments.build().expect("room");
    // SAFETY: no device uses the addresses.
    unsafe { Buffer::new(segments, user, PROT, Box::new(Nothing)) }.expect("as long as its memory")
}

/// A registry with a buffer of its own, or with one that others share.
fn registry(shared: Option<&Arc<Buffer<PhysAddr>>>) -> Registry<Nobody> {
    let user = UserRange::from_len(UserAddr::new(1 << 40), 4 * SZ_2M).expect("a valid range");
    let mut registry = Registry::new(Nobody);
    registry.register_sparse(1).expect("a table");
    let buffer = shared.map_or_else(|| Arc::new(buffer(user)), Arc::clone);
    registry.lend(0, buffer).expect("an empty slot");
    registry
}

pub(crate) fn run(wanted: &[String]) {
    if !contention::is_asked() {
        return run_alone(wanted);
    }
    if is_wanted(wanted, "own_registry") {
        let registries: Vec<_> = (0..CPUS).map(|_| registry(None)).collect();
        use_in_turn(|cpu| &registries[cpu]);
    } else if is_wanted(wanted, "shared_buffer") {
        let user = UserRange::from_len(UserAddr::new(1 << 40), 4 * SZ_2M).expect("a valid range");
        let shared = Arc::new(buffer(user));
        let registries: Vec<_> = (0..CPUS).map(|_| registry(Some(&shared))).collect();
        use_in_turn(|cpu| &registries[cpu]);
    } else if is_wanted(wanted, "one_slot") {
        let registry = registry(None);
        use_in_turn(|_| &registry);
    }
}

fn run_alone(wanted: &[String]) {
    slab::begin();
    for (nth, memory) in KINDS.into_iter().enumerate() {
        if matches!(wanted, [same] if same == "same") {
            Ring::new(memory, CHEAP, Counting::Mappings).print_same();
            continue;
        }
        for (name, cost, counting) in REGISTERED {
            let name = format!("{}_{name}", memory.name);
            if is_wanted(wanted, &name) {
                Ring::new(memory, cost, counting).bench_register(&name);
            }
        }
        for (name, bytes) in SIZES.into_iter().filter(|_| nth >= FIRST_IMPORTED) {
            Ring::new(memory, CHEAP, Counting::Mappings).bench_imports(name, bytes, wanted);
        }
    }
}

fn use_in_turn<'r>(registry: impl Fn(usize) -> &'r Registry<Nobody> + Sync) {
    contention::take_turns(|turn| {
        let registry = registry(turn.cpu);
        let keep = |nth| {
            let node = registry.get(0).expect("a buffer").clone();
            let part = node.import(nth * 3 * SZ_4K, SZ_4K, Direction::FromDevice);
            black_box(part.expect("a part of it").next());
            node
        };
        turn.batch(keep, drop);
    });
}
