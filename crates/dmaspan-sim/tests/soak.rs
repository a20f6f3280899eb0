//! The DMA API under the sanitizer: four threads map and unmap at random, lazily and strictly, with
//! memory that gets its next owner as soon as it is released.
//!
//! `DMASPAN_SOAK` is the number of operations; without it there are few. The whole of it:
//! `DMASPAN_SOAK=10000000 cargo test --release -p dmaspan-sim --test soak`.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Flush, NoPool, Piece, Trust, Unmapped,
};
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps, Tables, flush_queue};
use dmaspan::{Direction, Iova, IovaRange, PhysAddr, Platform, Span};
use dmaspan_sim::Arena;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::sanitizer::{
    Config, Finding, Kind, Pointless, Sanitized, SanitizedDevice, SanitizedMapping, Sanitizer,
    Tracked,
};
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::{ArmLpaeS1Walker, ArmS1Registers};
use parking_lot::Mutex;

const THREADS: u64 = 4;
const FEW: u64 = 200_000;
const PAGE: u64 = 0x1000;
/// Mappings that a thread holds at most.
const HOLDS: usize = 32;

thread_local! {
    static CPU: Cell<usize> = const { Cell::new(0) };
}

/// A clock that every look at it moves on by a microsecond.
#[derive(Debug, Default)]
struct Machine(AtomicU64);

impl Platform for Machine {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        CPU.get()
    }

    fn now(&self) -> u64 {
        self.0.fetch_add(1000, Ordering::Relaxed)
    }
}

/// Memory by size, of which the part released last is used next.
#[derive(Debug, Default)]
struct Frames {
    free: Mutex<[Vec<PhysAddr>; 12]>,
    unused: AtomicU64,
    out: AtomicU64,
}

impl Frames {
    /// `bytes` bytes at `offset` of a page, in pages that are nobody else's.
    fn take(self: &Arc<Self>, offset: u64, bytes: u64) -> Owned {
        let pages = (offset + bytes).div_ceil(PAGE).next_power_of_two();
        let size = usize::try_from(pages.ilog2()).unwrap();
        let free = self.free.lock()[size].pop();
        let start = free.unwrap_or_else(|| {
            PhysAddr::new((1 << 32) + self.unused.fetch_add(pages * PAGE, Ordering::Relaxed))
        });
        self.out.fetch_add(1, Ordering::Relaxed);
        let span = Span::new(PhysAddr::new(start.get() + offset), bytes).unwrap();
        Owned { piece: Piece::memory(span), start, size, frames: Arc::clone(self) }
    }
}

/// Some of them; dropped, somebody else's.
#[derive(Debug)]
struct Owned {
    piece: Piece,
    start: PhysAddr,
    size: usize,
    frames: Arc<Frames>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.frames.out.fetch_sub(1, Ordering::Relaxed);
        self.frames.free.lock()[self.size].push(self.start);
    }
}

#[expect(unsafe_code, reason = "a promise about memory that there is none of")]
// SAFETY: the addresses are made up: there is no memory.
unsafe impl DmaMemory for Owned {
    fn pieces(&self) -> &[Piece] {
        std::slice::from_ref(&self.piece)
    }
}

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;

/// A driver that leaves out every n-th invalidation.
struct Forgetful<O> {
    inner: O,
    every: u64,
    count: AtomicU64,
}

#[expect(unsafe_code, reason = "a promise about devices that there are none of")]
// SAFETY: nothing is behind the addresses that devices would use.
unsafe impl<O: IommuOps> IommuOps for Forgetful<O> {
    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        match count.checked_rem(self.every) {
            // Tables are freed on the strength of it.
            Some(0) if what.tables == Tables::Kept => Ok(()),
            _ => self.inner.invalidate(what),
        }
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.inner.sync_map(range)
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.inner.detach()
    }

    fn max_ranges(&self) -> usize {
        self.inner.max_ranges()
    }
}

type Dma = DmaDomain<ArmLpaeS1<12>, Arena, Forgetful<Sanitized<Tlb>>, Machine, Tracked<Owned>>;

struct Soak {
    sanitizer: Sanitizer,
    iotlb: Tlb,
    domain: Arc<Dma>,
    devices: [SanitizedDevice<Dma>; 2],
    frames: Arc<Frames>,
    /// Translations that were not what was mapped.
    wrong: AtomicU64,
}

/// One that leaves out every n-th invalidation; none for 0.
fn soak(forget_every: u64) -> Soak {
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 256 << 20);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let table = PageTable::new(format, tables.clone()).unwrap();
    let registers = table.format().registers(table.root());
    let (ttbr, tcr, mair) = (registers.ttbr, registers.tcr, registers.mair);
    let registers = ArmS1Registers { ttbr, tcr, mair, ..Default::default() };
    let iotlb = Iotlb::new(ArmLpaeS1Walker::new(registers).unwrap(), tables);
    // Another thread's flush of everything may have been for this one's unmap too.
    let config = Config { pointless: Pointless::Ignore, ..Config::default() };
    let sanitizer = Sanitizer::new(config);
    let inner = Sanitized::new(iotlb.clone(), &sanitizer);
    let ops = Forgetful { inner, every: forget_every, count: AtomicU64::new(0) };
    let queue = flush_queue::Config { entries: 64, max_age: 1_000_000 };
    let config = DmaConfig { cpus: 2, flush: Flush::Lazy, queue };
    let domain = Domain::new(table, ops).unwrap();
    let domain = Arc::new(DmaDomain::new(domain, config, Machine::default()).unwrap());
    let device = |trust| {
        let config = DeviceConfig { trust, ..DeviceConfig::bits(40) };
        let device = Device::new(Arc::clone(&domain), NoPool, config).unwrap();
        SanitizedDevice::new(device, 12, &sanitizer)
    };
    let devices = [device(Trust::Trusted), device(Trust::Untrusted)];
    let frames = Arc::default();
    Soak { sanitizer, iotlb, domain, devices, frames, wrong: AtomicU64::new(0) }
}

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.next()).unwrap() % len
    }
}

/// A mapping, where it leads, and by which device.
struct Held {
    mapping: SanitizedMapping<Dma>,
    memory: Span,
    device: usize,
}

impl Soak {
    fn map(&self, rng: &mut Rng) -> Held {
        let device = rng.index(2);
        // Small ones mostly, and up to 1024 pages. What is not trusted shares no page.
        let most = 1 << rng.below(11);
        let (pages, offset) = (1 + rng.below(most), rng.below(PAGE) * (1 - rng.below(2)));
        let (offset, bytes) = match device {
            0 => (offset, (pages * PAGE - offset).saturating_sub(rng.below(PAGE)).max(1)),
            _ => (0, pages * PAGE),
        };
        let owned = self.frames.take(offset, bytes);
        let memory = owned.piece.span;
        let directions = [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional];
        let tracked = Tracked::new(owned, &self.sanitizer);
        let mapping = self.devices[device].map_single(tracked, directions[rng.index(3)]).unwrap();
        Held { mapping, memory, device }
    }

    fn unmap(&self, held: Held) {
        match self.devices[held.device].unmap(held.mapping).unwrap() {
            Unmapped::Released(memory) => drop(memory),
            Unmapped::Queued => {}
        }
    }

    /// The device uses a byte, and all of it as far as the sanitizer is concerned.
    fn dma(&self, held: &Held, offset: u64) {
        let access = match held.mapping.inner().direction() {
            Direction::ToDevice => Access::Read,
            Direction::FromDevice | Direction::Bidirectional => Access::Write,
        };
        let start = Iova::new(held.mapping.inner().addr().get());
        self.sanitizer.on_dma(start, held.mapping.inner().len(), access);
        let hit = self.iotlb.translate(Iova::new(start.get() + offset), access);
        let expected = held.memory.paddr().get() + offset;
        if hit.map(|hit| hit.paddr.get()) != Ok(expected) {
            self.wrong.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn thread(&self, number: u64, operations: u64) {
        // Two threads to a CPU: they meet in its caches and queues.
        CPU.set(usize::try_from(number).unwrap() / 2);
        let mut rng = Rng(number);
        let mut held = Vec::new();
        for _ in 0..operations {
            if held.is_empty() || held.len() < HOLDS && rng.below(2) == 0 {
                held.push(self.map(&mut rng));
            } else {
                let at = rng.index(held.len());
                self.unmap(held.swap_remove(at));
            }
            if let Some(one) = held.last().filter(|_| rng.below(4) == 0) {
                self.dma(one, rng.below(one.mapping.inner().len()));
            }
            match rng.below(4096) {
                0 => self.domain.flush().unwrap(),
                1..8 => assert!(self.domain.expire().is_ok()),
                _ => {}
            }
        }
        held.into_iter().for_each(|held| self.unmap(held));
    }

    fn run(&self, operations: u64) {
        std::thread::scope(|scope| {
            for number in 0..THREADS {
                scope.spawn(move || self.thread(number, operations / THREADS));
            }
        });
        self.domain.flush().unwrap();
    }

    /// How many translations hardware has that it should not.
    fn stale(&self) -> usize {
        let all = IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).unwrap();
        self.iotlb.stale_leaves(all).len() + self.iotlb.stale_links(all).len()
    }
}

fn reports(found: &[Finding]) -> String {
    found.iter().take(3).map(|finding| format!("{finding}\n")).collect()
}

#[test]
fn nothing_leaks_and_nothing_is_stale_after_many_operations_on_four_threads() {
    let operations = std::env::var("DMASPAN_SOAK").map_or(FEW, |count| count.parse().unwrap());
    let soak = soak(0);
    soak.run(operations);
    assert_eq!(soak.wrong.load(Ordering::Relaxed), 0);
    assert_eq!(soak.domain.waiting(), (0, 0));
    assert_eq!(soak.frames.out.load(Ordering::Relaxed), 0, "memory was not released");
    assert_eq!(soak.stale(), 0);
    let found = soak.sanitizer.finish();
    assert!(found.is_empty(), "{} findings\n{}", soak.sanitizer.found(), reports(&found));
    println!("{operations} operations, {} events", soak.sanitizer.events());
}

#[test]
fn a_flush_in_a_hundred_left_out_does_not_go_unnoticed() {
    let soak = soak(100);
    soak.run(20_000);
    let found = soak.sanitizer.finish();
    assert!(found.iter().any(|f| matches!(f.kind, Kind::LateFlush { .. })), "{}", reports(&found));
    let unflushed = |kind| matches!(kind, Kind::LateFlush { .. } | Kind::MissingFlush { .. });
    assert!(found.iter().all(|f| unflushed(f.kind)), "{}", reports(&found));
}
