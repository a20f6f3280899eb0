//! The whole DMA API, as `xtask/peers/bench/dma.c` has Linux's: the same cases, buffers and device.
//!
//! Beside the times, `peers FORMAT same` prints what each kind of mapping leads to.

use std::array;
use std::env;
use std::fmt::Write as _;
use std::hint::{black_box, spin_loop};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmaspan::dma::{
    BouncePool, Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Flush, ListMapping, Mapping,
    NoPool, Piece, RawMemory, Reservation, ReserveRequest, Segment, Trust,
};
use dmaspan::io_pgtable::{
    ArmLpaeS1, ArmLpaeS1Config, Format, PageTable, TableMemory, VtdSs, VtdSsConfig,
};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::swiotlb::{Pool, PoolConfig};
use dmaspan::{Direction, DmaAddr, Iova, PhysAddr, Span};

use super::memory::{List, Memory};
use super::swiotlb::{POOL, Process, SpinPlatform, pointer};
use super::{MAX_RANGES, ROUNDS, SCATTER, SZ_4K, SZ_64K};
use super::{contention, cpu, is_wanted, measure, measure_race};

const DIRECTION: Direction = Direction::Bidirectional;
const PADDR: u64 = 0x1000_0000_0000;
/// Mappings at a time, as of a ring of descriptors.
const HELD: usize = 16;
/// How often so many are mapped and unmapped in a round.
const REPEATS: u64 = 64;
const MAX_PIECES: usize = 64;
/// Where a bounced buffer begins in its page.
const OFFSET: u64 = 0x200;
/// A reservation for all pieces of one buffer, and what bounced buffers are apart.
const APART: u64 = SZ_64K + SZ_4K;

/// With the pages of a buffer.
const SINGLES: [(&str, u64); 4] =
    [("single_1", 1), ("single_8", 8), ("single_64", 64), ("single_512", 512)];
/// With the pieces, of a page each.
const LISTS: [(&str, u64); 4] = [("list_2", 2), ("list_4", 4), ("list_8", 8), ("list_64", 64)];
const STEPS: [(&str, u64); 3] = [("steps_1", 1), ("steps_8", 8), ("steps_64", 64)];
/// With the bytes of a buffer.
const BOUNCED: [(&str, u64); 2] = [("bounced_2k", 2 << 10), ("bounced_64k", SZ_64K)];
const FLUSHES: [(&str, Flush); 2] = [("strict", Flush::Strict), ("lazy", Flush::Lazy)];

/// Hardware that takes no time, or some, for an invalidation.
pub(crate) struct Hardware(Duration);

impl Hardware {
    pub(crate) fn new() -> Self {
        let ns = env::var("PEERS_INVALIDATION_NS").ok().and_then(|ns| ns.parse().ok());
        Self(Duration::from_nanos(ns.unwrap_or(0)))
    }

    #[inline(never)]
    fn invalidate(&self, invalidation: &Invalidation<'_>) {
        black_box(invalidation);
        if self.0.is_zero() {
            return;
        }
        let start = Instant::now();
        while start.elapsed() < self.0 {
            spin_loop();
        }
    }
}

// SAFETY: there is no device.
unsafe impl IommuOps for Hardware {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.invalidate(what);
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        MAX_RANGES
    }
}

/// The pieces of a list, which a driver has at hand.
#[derive(Clone, Copy)]
struct Pieces(&'static [Piece]);

// SAFETY: there is no device, and nobody has the memory.
unsafe impl DmaMemory for Pieces {
    #[inline(always)]
    fn pieces(&self) -> &[Piece] {
        self.0
    }
}

type Dma<F, H> = DmaDomain<F, &'static Memory, Hardware, SpinPlatform, H>;

fn span(paddr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(paddr), len).expect("a valid span")
}

fn memory(span: Span) -> RawMemory {
    // SAFETY: nobody has the memory, and no device uses it.
    unsafe { RawMemory::new(Piece::memory(span)) }
}

/// Where the pieces of a list are, and those of a reservation.
fn piece(buffer: usize, n: u64) -> Span {
    span(PADDR + SCATTER * SZ_4K * ((buffer * MAX_PIECES) as u64 + n), SZ_4K)
}

/// The cases of a format of tables, or what they map.
pub(crate) fn run_lpae(tables: &'static Memory, wanted: &[String]) {
    let format = || ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).expect("a valid one");
    Bench { format, tables, wanted }.run();
}

/// The same of VT-d's.
pub(crate) fn run_vtd_ss(tables: &'static Memory, wanted: &[String]) {
    let format = || VtdSs::new(VtdSsConfig::new(48, 52)).expect("a valid configuration");
    Bench { format, tables, wanted }.run();
}

/// What a driver does with a buffer.
trait Buffers {
    type Mapped;

    fn map(&mut self, nth: usize) -> Self::Mapped;

    fn unmap(&self, mapped: Self::Mapped);

    /// What is mapped, a line each.
    fn describe(&self, mapped: &Self::Mapped) -> String;

    /// Where the device finds it.
    fn first(&self, mapped: &Self::Mapped) -> DmaAddr;

    /// Where an address of the device leads.
    fn leads(&self, addr: DmaAddr) -> Option<PhysAddr>;

    /// Writes a buffer before it is mapped.
    fn fill(&self, _nth: usize) {}

    /// How many bytes a device that wrote all brought back.
    fn written(&self, _nth: usize) -> u64 {
        0
    }
}

struct Bench<'c, N> {
    format: N,
    tables: &'static Memory,
    wanted: &'c [String],
}

impl<F: Format, N: Fn() -> F> Bench<'_, N>
where
    &'static Memory: TableMemory<F::Word, List = List>,
{
    fn run(&self) {
        if contention::is_asked() {
            for (way, flush) in FLUSHES {
                if is_wanted(self.wanted, &format!("single_1_{way}")) {
                    self.map_in_turn(flush);
                }
            }
            return;
        }
        for (way, flush) in FLUSHES {
            for threads in 1..=cpu::MAX.min(cpu::allowed().len()) {
                let name = format!("single_1_{way}_threads_{threads}");
                if is_wanted(self.wanted, &name) {
                    self.bench_threads(&name, flush, threads);
                }
            }
        }
        for (name, pages) in SINGLES {
            for flush in FLUSHES {
                let device = || Device::new(self.domain(flush.1), NoPool, config(Trust::Trusted));
                self.case(name, flush.0, || Singles {
                    device: device().expect("a device"),
                    name,
                    spans: array::from_fn(|n| {
                        span(PADDR + n as u64 * pages * SZ_4K, pages * SZ_4K)
                    }),
                });
            }
        }
        for (name, pieces) in LISTS {
            for flush in FLUSHES {
                let device = || Device::new(self.domain(flush.1), NoPool, config(Trust::Trusted));
                self.case(name, flush.0, || Lists {
                    device: device().expect("a device"),
                    name,
                    pieces: array::from_fn(|buffer| {
                        let pieces = (0..pieces).map(|n| Piece::memory(piece(buffer, n)));
                        Pieces(pieces.collect::<Vec<_>>().leak())
                    }),
                    segments: [[Segment::default(); MAX_PIECES]; HELD],
                });
            }
        }
        for (name, pieces) in STEPS {
            for flush in FLUSHES {
                let device = || Device::new(self.domain(flush.1), NoPool, config(Trust::Trusted));
                self.case(name, flush.0, || Steps {
                    device: device().expect("a device"),
                    name,
                    pieces,
                });
            }
        }
        for (name, bytes) in BOUNCED {
            self.case(name, "strict", || {
                let pool = Pool::new(Process::new(POOL), PoolConfig::new(1), SpinPlatform);
                let originals = Process::new(HELD as u64 * APART);
                let at = originals.start() + OFFSET;
                Singles {
                    device: Device::new(
                        self.domain(Flush::Strict),
                        pool.expect("a pool"),
                        config(Trust::Untrusted),
                    )
                    .expect("a device"),
                    name,
                    spans: array::from_fn(|n| span(at + n as u64 * APART, bytes)),
                }
            });
        }
    }

    /// A device that several CPUs share.
    fn shared(&self, flush: Flush) -> Of<F, RawMemory, NoPool> {
        let device = Device::new(self.domain(flush), NoPool, config(Trust::Trusted));
        device.expect("a device")
    }

    /// CPUs in turn, each with buffers of a page.
    fn map_in_turn(&self, flush: Flush) {
        let device = self.shared(flush);
        contention::take_turns(|turn| {
            let map = |nth| map_page(&device, turn.cpu, nth);
            turn.batch(map, |mapping| assert!(device.unmap(mapping).is_ok()));
        });
    }

    /// Threads at once, each with buffers of a page.
    fn bench_threads(&self, name: &str, flush: Flush, threads: usize) {
        let device = self.shared(flush);
        measure_race(name, threads, REPEATS * HELD as u64, |nth, barrier| {
            let cpu = if threads == 1 { 1 } else { nth };
            cpu::pin(cpu);
            let mut held: [Option<_>; HELD] = array::from_fn(|_| None);
            barrier.wait();
            let start = Instant::now();
            for _ in 0..REPEATS {
                for (nth, place) in (0..).zip(&mut held) {
                    *place = Some(map_page(&device, cpu, nth));
                }
                for mapping in held.iter_mut().filter_map(Option::take) {
                    assert!(device.unmap(mapping).is_ok());
                }
            }
            start.elapsed()
        });
    }

    fn domain<H: DmaMemory>(&self, flush: Flush) -> Arc<Dma<F, H>> {
        let table = PageTable::new((self.format)(), self.tables).expect("room for the root");
        let domain = Domain::new(table, Hardware::new()).expect("an empty table");
        let config = DmaConfig { flush, ..DmaConfig::new(cpu::count()) };
        Arc::new(DmaDomain::new(domain, config, SpinPlatform).expect("IOVAs"))
    }

    fn case<B: Buffers>(&self, name: &str, way: &str, buffers: impl FnOnce() -> B) {
        let full = format!("{name}_{way}");
        if matches!(self.wanted, [same] if same == "same") {
            let mut buffers = buffers();
            buffers.fill(1);
            let mapped = buffers.map(1);
            print!("{}", buffers.describe(&mapped));
            let first = buffers.first(&mapped);
            buffers.unmap(mapped);
            let there = buffers.leads(first).map_or("gone", |_| "still there");
            println!("{name} unmapped: {there}, {} bytes back", buffers.written(1));
        } else if is_wanted(self.wanted, &full) {
            bench(&full, buffers());
        }
    }
}

/// Maps a page of a CPU's own.
#[inline(always)]
fn map_page<F: Format>(
    device: &Of<F, RawMemory, NoPool>,
    cpu: usize,
    nth: u64,
) -> Mapping<Dma<F, RawMemory>, NoPool>
where
    &'static Memory: TableMemory<F::Word, List = List>,
{
    let paddr = PADDR + (cpu * HELD) as u64 * SZ_4K + nth * SZ_4K;
    let Ok(mapping) = device.map_single(memory(span(paddr, SZ_4K)), DIRECTION) else {
        panic!("no mapping");
    };
    black_box(mapping.addr());
    mapping
}

/// A device as those of NVMe are.
fn config(trust: Trust) -> DeviceConfig {
    let mut config = DeviceConfig { trust, ..DeviceConfig::bits(48) };
    config.limits.keep_bits = SZ_4K - 1;
    config
}

fn bench<B: Buffers>(name: &str, mut buffers: B) {
    let mut held: [Option<B::Mapped>; HELD] = array::from_fn(|_| None);
    measure(name, ["pair"], (2, ROUNDS), REPEATS * HELD as u64, || {
        let start = Instant::now();
        for _ in 0..REPEATS {
            turn(&mut buffers, &mut held);
        }
        [start.elapsed()]
    });
}

#[inline(never)]
fn turn<B: Buffers>(buffers: &mut B, held: &mut [Option<B::Mapped>; HELD]) {
    for (nth, place) in held.iter_mut().enumerate() {
        *place = Some(buffers.map(nth));
    }
    for place in held {
        if let Some(mapped) = place.take() {
            buffers.unmap(mapped);
        }
    }
}

/// Where `len` bytes lead, as the fewest runs.
fn runs(leads: impl Fn(DmaAddr) -> Option<PhysAddr>, addr: DmaAddr, len: u64) -> String {
    let (mut text, mut done) = (String::new(), 0);
    let mut run: Option<(u64, u64)> = None;
    while done < len {
        let at = addr.get() + done;
        let part = (SZ_4K - at % SZ_4K).min(len - done);
        let paddr = leads(DmaAddr::new(at)).map_or(0, PhysAddr::get);
        run = match run {
            Some((start, bytes)) if start + bytes == paddr => Some((start, bytes + part)),
            before => {
                if let Some((start, bytes)) = before {
                    let _ = write!(text, " {start:#x}+{bytes:#x}");
                }
                Some((paddr, part))
            }
        };
        done += part;
    }
    if let Some((start, bytes)) = run {
        let _ = write!(text, " {start:#x}+{bytes:#x}");
    }
    text
}

/// A device of these types.
type Of<F, H, B> = Device<Dma<F, H>, B>;

/// Buffers of one piece.
struct Singles<F: Format, B: BouncePool>
where
    &'static Memory: TableMemory<F::Word, List = List>,
{
    device: Of<F, RawMemory, B>,
    name: &'static str,
    spans: [Span; HELD],
}

impl<F: Format, B: BouncePool> Singles<F, B>
where
    &'static Memory: TableMemory<F::Word, List = List>,
{
    fn is_bounced(&self) -> bool {
        self.device.config().trust == Trust::Untrusted
    }

    /// A byte as the device reaches it, which nobody else uses.
    fn byte(&self, addr: u64) -> *mut u8 {
        pointer(self.leads(DmaAddr::new(addr)).expect("a translation"))
    }

    fn read(&self, addr: u64) -> u8 {
        // SAFETY: it is mapped, memory of a buffer or of a slot.
        unsafe { self.byte(addr).read_volatile() }
    }

    fn write(&self, addr: u64, byte: u8) {
        // SAFETY: as above.
        unsafe { self.byte(addr).write_volatile(byte) }
    }

    /// The bytes of a buffer, as the driver reaches them.
    fn original(&self, nth: usize) -> impl Iterator<Item = *mut u8> {
        let span = self.spans[nth];
        (0..span.len()).map(move |n| pointer(span.paddr().wrapping_add(n)))
    }
}

/// What is in the nth byte of a buffer.
fn pattern(n: u64) -> u8 {
    1 + u8::try_from(n % 0x50).expect("less than a byte")
}

impl<F: Format, B: BouncePool> Buffers for Singles<F, B>
where
    &'static Memory: TableMemory<F::Word, List = List>,
{
    type Mapped = Mapping<Dma<F, RawMemory>, B>;

    #[inline(always)]
    fn map(&mut self, nth: usize) -> Self::Mapped {
        let Ok(mapping) = self.device.map_single(memory(self.spans[nth]), DIRECTION) else {
            panic!("no mapping");
        };
        black_box(mapping.addr());
        mapping
    }

    #[inline(always)]
    fn unmap(&self, mapped: Self::Mapped) {
        assert!(self.device.unmap(mapped).is_ok());
    }

    fn describe(&self, mapped: &Self::Mapped) -> String {
        let (addr, len) = (mapped.addr(), mapped.len());
        let offset = addr.get() % SZ_4K;
        if !self.is_bounced() {
            let runs = runs(|at| self.leads(at), addr, len);
            return format!("{} at {offset:#x} of its page:{runs}\n", self.name);
        }
        let (mut same, mut zero, mut around) = (0, 0, 0);
        for n in 0..len {
            let byte = self.read(addr.get() + n);
            same += u64::from(byte == pattern(n));
            // The device writes.
            self.write(addr.get() + n, byte ^ 0x55);
        }
        let (first, end) = (addr.get() - offset, addr.get() + len);
        for at in (first..addr.get()).chain(end..end.next_multiple_of(SZ_4K)) {
            around += 1;
            zero += u64::from(self.read(at) == 0);
        }
        format!(
            "{} at {offset:#x} of its page: {same} of {len} bytes read, {zero} of {around} around \
             them zero\n",
            self.name
        )
    }

    fn first(&self, mapped: &Self::Mapped) -> DmaAddr {
        mapped.addr()
    }

    fn leads(&self, addr: DmaAddr) -> Option<PhysAddr> {
        self.device.translation().domain().iova_to_phys(Iova::new(addr.get()))
    }

    fn fill(&self, nth: usize) {
        if self.is_bounced() {
            for (n, byte) in (0..).zip(self.original(nth)) {
                // SAFETY: the buffer is memory of this process, which nobody else uses.
                unsafe { byte.write_volatile(pattern(n)) }
            }
        }
    }

    fn written(&self, nth: usize) -> u64 {
        if !self.is_bounced() {
            return 0;
        }
        // SAFETY: as above.
        let bytes = self.original(nth).map(|byte| unsafe { byte.read_volatile() });
        (0..).zip(bytes).filter(|&(n, byte)| byte == pattern(n) ^ 0x55).map(|_| 1).sum()
    }
}

/// Lists of pieces.
struct Lists<F: Format>
where
    &'static Memory: TableMemory<F::Word, List = List>,
{
    device: Of<F, Pieces, NoPool>,
    name: &'static str,
    pieces: [Pieces; HELD],
    /// What the device is given, as Linux writes it into the list.
    segments: [[Segment; MAX_PIECES]; HELD],
}

impl<F: Format> Buffers for Lists<F>
where
    &'static Memory: TableMemory<F::Word, List = List>,
{
    type Mapped = ListMapping<Dma<F, Pieces>, NoPool>;

    #[inline(always)]
    fn map(&mut self, nth: usize) -> Self::Mapped {
        let segments = &mut self.segments[nth];
        let Ok(mapping) = self.device.map_list(self.pieces[nth], DIRECTION, segments) else {
            panic!("no mapping");
        };
        black_box(&segments[..mapping.segment_count()]);
        mapping
    }

    #[inline(always)]
    fn unmap(&self, mapped: Self::Mapped) {
        assert!(self.device.unmap_list(mapped).is_ok());
    }

    fn describe(&self, mapped: &Self::Mapped) -> String {
        let segments = self.device.segments(mapped).expect("a list of the device");
        let described = segments.enumerate().map(|(n, Segment { addr, len })| {
            let runs = runs(|at| self.leads(at), addr, len);
            format!("{} segment {n} of {len:#x} bytes:{runs}\n", self.name)
        });
        described.collect()
    }

    fn first(&self, mapped: &Self::Mapped) -> DmaAddr {
        mapped.iovas().map_or(DmaAddr::new(0), |range| DmaAddr::new(range.start().get()))
    }

    fn leads(&self, addr: DmaAddr) -> Option<PhysAddr> {
        self.device.translation().domain().iova_to_phys(Iova::new(addr.get()))
    }
}

/// Reservations, into which pieces are linked.
struct Steps<F: Format>
where
    &'static Memory: TableMemory<F::Word, List = List>,
{
    device: Of<F, RawMemory, NoPool>,
    name: &'static str,
    pieces: u64,
}

impl<F: Format> Buffers for Steps<F>
where
    &'static Memory: TableMemory<F::Word, List = List>,
{
    type Mapped = Reservation<Dma<F, RawMemory>, NoPool>;

    #[inline(always)]
    fn map(&mut self, nth: usize) -> Self::Mapped {
        let pieces = usize::try_from(self.pieces).expect("few pieces");
        let len = self.pieces * SZ_4K;
        let request = ReserveRequest { len, offset: 0, pieces, direction: DIRECTION };
        let Ok(mut reservation) = self.device.reserve(request) else { panic!("no IOVAs") };
        for n in 0..self.pieces {
            let memory = memory(piece(nth, n));
            assert!(self.device.link(&mut reservation, n * SZ_4K, memory).is_ok());
        }
        assert!(self.device.announce(&mut reservation).is_ok());
        reservation
    }

    #[inline(always)]
    fn unmap(&self, mapped: Self::Mapped) {
        let ended = self.device.destroy(mapped, |memory| {
            black_box(memory);
        });
        assert!(ended.is_ok());
    }

    fn describe(&self, mapped: &Self::Mapped) -> String {
        let runs = runs(|at| self.leads(at), mapped.addr(), self.pieces * SZ_4K);
        format!("{}:{runs}\n", self.name)
    }

    fn first(&self, mapped: &Self::Mapped) -> DmaAddr {
        mapped.addr()
    }

    fn leads(&self, addr: DmaAddr) -> Option<PhysAddr> {
        self.device.translation().domain().iova_to_phys(Iova::new(addr.get()))
    }
}
