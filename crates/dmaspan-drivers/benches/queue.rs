//! Threads that unmap pages by one command queue: `cargo bench -p dmaspan-drivers --bench queue`.
//!
//! The driver is that of SMMUv3. The hardware is made here: it takes so many nanoseconds for a
//! command, by this machine's clock, and says how far it is when it is asked. Each thread makes
//! hardware forget a page of a region of its own, with a sync, and waits for it, as an unmap does.
//! The numbers of threads take turns, and the medians count.
//!
//! | column | what |
//! |---|---|
//! | `work` | how many unmaps of all threads end in a time, by those of one thread |
//! | `syncs` | commands of an unmap that wait for all before them |
//! | `asked` | how often hardware was asked for an unmap how far it is |
//!
//! `-- --quick` runs it for a moment.

#![expect(unsafe_code, reason = "the hardware is made here, and reaches the driver's queue alone")]

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{env, hint, thread};

use dmaspan::io_pgtable::{Arena, ArmLpaeS1, PageTable};
use dmaspan::iommu::Tables as Detached;
use dmaspan::iommu::{Domain, Invalidation, IommuOps as _, Port as _, ReservedRegions, Scope};
use dmaspan::{Iova, IovaRange, PhysAddr, lg2};
use dmaspan_drivers::arm_smmu_v3::{OnFault, SmmuV3, SmmuV3Config, SmmuV3Ops, SmmuV3Stream, Stage};
use dmaspan_drivers::{Again, Host, Mmio, NoMemory, Structure};
use parking_lot::Mutex;

/// Nanoseconds that hardware takes for a command.
const PACES: [u64; 3] = [0, 100, 1000];
/// Threads at once. The first is what the others are compared with.
const THREADS: [u64; 4] = [1, 2, 4, 8];

/// Nanoseconds that a read of a register takes, as one of an uncached bus does.
const READ: u64 = 200;

/// An SMMUv3 with its command queue. Clones are the same.
#[derive(Clone)]
struct Paced(Arc<Shared>);

struct Shared {
    /// Nanoseconds for a command.
    pace: u64,
    start: Instant,
    /// Where memory is, and its words.
    memory: Mutex<Vec<(u64, Arc<[AtomicU64]>)>>,
    /// CR0, IRQ_CTRL and GBPA.
    control: Mutex<[u32; 3]>,
    queue: OnceLock<(u32, Arc<[AtomicU64]>)>,
    doorbell: Doorbell,
    /// Whether there are more threads than CPUs.
    is_crowded: AtomicBool,
}

/// What the driver tells hardware, one thread at a time. It has a line of the cache for itself.
#[repr(align(128))]
#[derive(Default)]
struct Doorbell {
    /// CMDQ_PROD, and above it when the last command is done, by the hardware's clock.
    told: AtomicU64,
    syncs: AtomicU64,
}

thread_local! {
    /// How often the thread asked how far hardware is.
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

/// The bits of CMDQ_PROD.
const PRODUCER: u32 = 20;

impl Paced {
    fn new(pace: u64) -> Self {
        Self(Arc::new(Shared {
            pace,
            start: Instant::now(),
            memory: Mutex::default(),
            control: Mutex::default(),
            queue: OnceLock::new(),
            doorbell: Doorbell::default(),
            is_crowded: AtomicBool::new(false),
        }))
    }

    /// The hardware's clock, in nanoseconds.
    fn now(&self) -> u64 {
        u64::try_from(self.0.start.elapsed().as_nanos()).expect("it is no age")
    }

    /// What the driver told it last: CMDQ_PROD, and when the last command is done.
    fn told(&self) -> (u64, u64) {
        let told = self.0.doorbell.told.load(Ordering::Acquire);
        (told & lg2::mask(PRODUCER), told >> PRODUCER)
    }

    /// Takes commands up to the new CMDQ_PROD.
    fn produced(&self, producer: u32) {
        let Some((lg2, words)) = self.0.queue.get() else { return };
        let (before, done) = self.told();
        let new = u64::from(producer).wrapping_sub(before) & lg2::mask(lg2 + 1);
        let is_sync = |nth: &u64| {
            let place = (before + nth) & lg2::mask(*lg2);
            let word = usize::try_from(place * 2).expect("it is short");
            u64::from_le(words[word].load(Ordering::Acquire)) & 0xff == 0x46
        };
        let syncs = (0..new).filter(is_sync).count() as u64;
        let Doorbell { told, syncs: all } = &self.0.doorbell;
        all.store(all.load(Ordering::Relaxed) + syncs, Ordering::Relaxed);
        let done = done.max(self.now()) + new * self.0.pace;
        told.store(done << PRODUCER | u64::from(producer), Ordering::Release);
    }

    /// CMDQ_CONS.
    fn consumed(&self) -> u32 {
        ASKED.set(ASKED.get() + 1);
        let Some((lg2, _)) = self.0.queue.get() else { return 0 };
        let (producer, done) = self.told();
        let now = self.now();
        while self.now() < now + READ {
            hint::spin_loop();
        }
        let left = done.saturating_sub(now).div_ceil(self.0.pace.max(1));
        u32::try_from(producer.wrapping_sub(left) & lg2::mask(lg2 + 1)).expect("it is short")
    }
}

impl Mmio for Paced {
    fn read32(&self, offset: u64) -> u32 {
        match offset {
            // Stage 1, tables of 64 bits, coherent; numbers of 16 bits.
            0x0 => 0b11 | 0b10 << 2 | 1 << 4 | 1 << 12 | 1 << 18 | 0b10 << 21 | 0b01 << 24,
            0x4 => 6 | 8 << 16 | 8 << 21,
            // Ranges.
            0xc => 1 << 10,
            0x14 => 0b111 << 4 | 5,
            0x24 => self.0.control.lock()[0],
            0x54 => self.0.control.lock()[1],
            0x44 => self.0.control.lock()[2],
            0x9c => self.consumed(),
            _ => 0,
        }
    }

    fn write32(&self, offset: u64, value: u32) {
        match offset {
            0x20 => self.0.control.lock()[0] = value,
            0x50 => self.0.control.lock()[1] = value,
            // UPDATE is clear when it is done.
            0x44 => self.0.control.lock()[2] = value & !(1 << 31),
            0x98 => self.produced(value),
            _ => {}
        }
    }

    fn write64(&self, offset: u64, value: u64) {
        if offset == 0x90 {
            let address = value & 0xf_ffff_ffff_ffe0;
            let memory = self.0.memory.lock();
            let found = memory.iter().find(|(start, _)| *start == address);
            let lg2 = u32::try_from(value & 0x1f).expect("it is short");
            let words = found.map(|(_, words)| (lg2, Arc::clone(words)));
            self.0.queue.set(words.expect("it is the driver's")).expect("it is told once");
        }
    }
}

/// A structure of the driver's.
struct Words {
    paddr: PhysAddr,
    words: Arc<[AtomicU64]>,
}

// SAFETY: the words are shared with the hardware alone, which knows them by that address.
unsafe impl Structure for Words {
    fn paddr(&self) -> PhysAddr {
        self.paddr
    }

    fn words(&self) -> &[AtomicU64] {
        &self.words
    }
}

// SAFETY: the words are zero, so many as were asked for, at an address that is aligned to their
// size, and the hardware reaches nothing else.
unsafe impl Host for Paced {
    type Lock = parking_lot::RawMutex;
    type Structure = Words;

    fn allocate(&self, lg2_size: u32, max_paddr: PhysAddr) -> Result<Words, NoMemory> {
        let mut memory = self.0.memory.lock();
        let last = memory.last().map_or(0x10_0000, |(start, words)| start + words.len() as u64 * 8);
        let start = last.next_multiple_of(1 << lg2_size);
        if start + ((1 << lg2_size) - 1) > max_paddr.get() {
            return Err(NoMemory { lg2_size, max_paddr });
        }
        let words: Arc<[AtomicU64]> =
            (0..1 << lg2_size.saturating_sub(3)).map(|_| AtomicU64::new(0)).collect();
        memory.push((start, Arc::clone(&words)));
        Ok(Words { paddr: PhysAddr::new(start), words })
    }

    fn again(&self, polls: u32) -> Again {
        // Where threads are more than CPUs, one that waits for long lets another one work, as if it
        // had a CPU.
        if polls > 4 && self.0.is_crowded.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        if polls < 100_000_000 { Again::Poll } else { Again::GiveUp }
    }
}

type Tables = Domain<ArmLpaeS1<12>, Arena, SmmuV3Ops<Paced, Paced>>;

/// A domain of hardware with that pace, which a stream has.
fn domain(hardware: &Paced) -> Arc<Tables> {
    // SAFETY: the hardware is made here.
    let smmu = unsafe { SmmuV3::new(hardware.clone(), hardware.clone(), SmmuV3Config::default()) };
    let smmu = smmu.expect("it starts");
    let config = smmu.stage1_config(12).expect("it has pages of 4 KiB");
    let format = ArmLpaeS1::new(config);
    let arena = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
    let table = PageTable::new(format.expect("it is a format"), arena).expect("there is memory");
    let ops = smmu.ops(Stage::First, OnFault::Terminate).expect("there is a number");
    let domain = Arc::new(Domain::new(table, ops).expect("it is one"));
    let stream: SmmuV3Stream<Tables, Paced, Paced> =
        smmu.stream(1, ReservedRegions::new()).expect("there is such a stream");
    // Dropped, the port leaves it there.
    stream.translate(&domain).expect("it takes the domain");
    domain
}

/// What threads did.
#[derive(Clone, Copy)]
struct Turn {
    /// Unmaps in a second, of all threads.
    rate: f64,
    syncs: f64,
    asked: f64,
}

/// Lets so many threads unmap pages for a time.
fn turn(hardware: &Paced, domain: &Tables, threads: u64, length: Duration) -> Turn {
    let cpus = thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64);
    hardware.0.is_crowded.store(threads > cpus, Ordering::Relaxed);
    let syncs = || hardware.0.doorbell.syncs.load(Ordering::Relaxed);
    let (before, start) = (syncs(), Instant::now());
    let unmap = |thread: u64| {
        let mut unmaps = 0u64;
        ASKED.set(0);
        while start.elapsed() < length {
            let iova = Iova::new((thread << 21) + ((unmaps % 512) << 12));
            let ranges = [IovaRange::from_len(iova, 4096).expect("it is a range")];
            let scope = Scope::Ranges(&ranges);
            let told = Invalidation { scope, leaf_sizes: 4096, tables: Detached::Kept };
            domain.ops().invalidate(&told).expect("hardware answers");
            unmaps += 1;
        }
        (unmaps, ASKED.get())
    };
    let done: Vec<(u64, u64)> = thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|n| scope.spawn(move || unmap(n))).collect();
        running.into_iter().map(|thread| thread.join().expect("it ends")).collect()
    });
    let seconds = start.elapsed().as_secs_f64();
    let unmaps = done.iter().map(|(unmaps, _)| unmaps).sum::<u64>() as f64;
    let asked = done.iter().map(|(_, asked)| asked).sum::<u64>() as f64 / unmaps;
    Turn { rate: unmaps / seconds, syncs: (syncs() - before) as f64 / unmaps, asked }
}

fn median(turns: &[Turn], of: impl Fn(&Turn) -> f64) -> f64 {
    let mut values: Vec<f64> = turns.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    // As criterion's benchmarks, which `cargo test` runs without that word.
    let is = |word: &str| env::args().any(|argument| argument == word);
    let quick = is("--quick") || !is("--bench");
    let (rounds, length) = if quick { (1, 5) } else { (9, 200) };
    println!("{:>12} {:>8} {:>6} {:>6} {:>6}", "ns/command", "threads", "work", "syncs", "asked");
    for pace in PACES {
        let hardware = Paced::new(pace);
        let domain = domain(&hardware);
        let mut turns = [const { Vec::new() }; THREADS.len()];
        for _ in 0..rounds {
            for (threads, turns) in THREADS.into_iter().zip(&mut turns) {
                turns.push(turn(&hardware, &domain, threads, Duration::from_millis(length)));
            }
        }
        let alone = median(&turns[0], |turn| turn.rate);
        for (threads, turns) in THREADS.into_iter().zip(&turns) {
            let work = median(turns, |turn| turn.rate) / alone;
            let [syncs, asked] =
                [median(turns, |turn| turn.syncs), median(turns, |turn| turn.asked)];
            println!("{pace:>12} {threads:>8} {work:>6.2} {syncs:>6.2} {asked:>6.2}");
        }
    }
}
