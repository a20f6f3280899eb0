//! The DMA API under the sanitizer: four threads map and unmap single buffers, lists, reservations
//! and buffers of which they keep the address, lazily and strictly, sync them, let a device at
//! them, and flush, while hardware fails now and then. Memory gets its next owner, and a table its
//! next use, as soon as it is released.
//!
//! `DMASPAN_SOAK` is the number of operations; without it there are few. The whole of it:
//! `DMASPAN_SOAK=10000000 cargo test --release -p dmaspan --test simulation dma_soak`.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::dma::{
    Attrs, Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Error, Flush, ListMapping,
    Mapping, NoPool, Piece, Refused, Reservation, ReserveRequest, ScopeFailed, Segment, Trust,
    Unmapped,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, Event, HardwareError, Invalidation, IommuOps, Tables, flush_queue};
use dmaspan::{Direction, DmaAddr, Iova, IovaRange, PhysAddr, Platform, Span};
use dmaspan_sim::iotlb::{AbsentEntries, Iotlb, IotlbConfig};
use dmaspan_sim::rng::Rng;
use dmaspan_sim::sanitizer::{
    Cached, Cause, Finding, FindingKind, Sanitized, SanitizedTables, Sanitizer, SanitizerConfig,
    Tracked,
};
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
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
    fn take(&self, offset: u64, bytes: u64) -> (Piece, Frame) {
        let pages = (offset + bytes).div_ceil(PAGE).next_power_of_two();
        let size = usize::try_from(pages.ilog2()).unwrap();
        let free = self.free.lock()[size].pop();
        let start = free.unwrap_or_else(|| {
            PhysAddr::new((1 << 32) + self.unused.fetch_add(pages * PAGE, Ordering::Relaxed))
        });
        self.out.fetch_add(1, Ordering::Relaxed);
        let span = Span::new(PhysAddr::new(start.get() + offset), bytes).unwrap();
        (Piece::memory(span), Frame { start, size })
    }
}

/// Pages of one size, log2 of their number.
#[derive(Clone, Copy, Debug)]
struct Frame {
    start: PhysAddr,
    size: usize,
}

/// Some memory; dropped, somebody else's.
#[derive(Debug)]
struct Owned {
    pieces: Vec<Piece>,
    held: Vec<Frame>,
    frames: Arc<Frames>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        for frame in &self.held {
            self.frames.out.fetch_sub(1, Ordering::Relaxed);
            self.frames.free.lock()[frame.size].push(frame.start);
        }
    }
}

#[expect(unsafe_code, reason = "a promise about memory that there is none of")]
// SAFETY: the addresses are made up: there is no memory.
unsafe impl DmaMemory for Owned {
    fn pieces(&self) -> &[Piece] {
        &self.pieces
    }
}

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;

/// What a driver has of bugs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// It leaves out every hundredth invalidation.
    Forgets,
    /// It never says that tables were detached.
    KeepsWalks,
    /// Of several sizes of leaves it leaves out the smallest.
    LosesSize,
}

/// A driver with a bug.
struct Buggy<O> {
    inner: O,
    bug: Bug,
    count: AtomicU64,
}

#[expect(unsafe_code, reason = "a promise about devices that there are none of")]
// SAFETY: nothing is behind the addresses that devices would use.
unsafe impl<O: IommuOps> IommuOps for Buggy<O> {
    type Address = O::Address;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        match self.bug {
            Bug::Forgets if count % 100 == 99 && what.tables == Tables::Kept => Ok(()),
            Bug::KeepsWalks => {
                self.inner.invalidate(&Invalidation { tables: Tables::Kept, ..*what })
            }
            Bug::LosesSize if what.leaf_sizes.count_ones() > 1 => {
                let leaf_sizes = what.leaf_sizes & (what.leaf_sizes - 1);
                self.inner.invalidate(&Invalidation { leaf_sizes, ..*what })
            }
            _ => self.inner.invalidate(what),
        }
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.inner.sync_map(range)
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.inner.detach()
    }

    fn observe(&self, event: &Event<'_>) {
        self.inner.observe(event);
    }

    fn max_ranges(&self) -> usize {
        self.inner.max_ranges()
    }
}

type Memory = Tracked<Owned>;
type Dma = DmaDomain<ArmLpaeS1<12>, SanitizedTables<Arena>, Buggy<Sanitized<Tlb>>, Machine, Memory>;

struct Soak {
    sanitizer: Sanitizer,
    iotlb: Tlb,
    tables: Arena,
    domain: Arc<Dma>,
    devices: [Device<Dma>; 2],
    frames: Arc<Frames>,
    /// Whether hardware fails now and then.
    fails: Fails,
    /// Translations that were not what was mapped.
    wrong: AtomicU64,
    /// What was refused because hardware failed.
    refused: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fails {
    Never,
    NowAndThen,
}

fn soak(bug: Bug, fails: Fails) -> Soak {
    let absent = AbsentEntries::Cached;
    let sanitizer = Sanitizer::new(SanitizerConfig { absent, ..SanitizerConfig::default() });
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 256 << 20);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let memory = SanitizedTables::new(tables.clone(), &sanitizer);
    let table = PageTable::new(format, memory).unwrap();
    let registers = table.format().registers(table.root());
    let walker = ArmLpaeS1Walker::new(registers.into()).unwrap();
    let config = IotlbConfig { absent, ..IotlbConfig::default() };
    let iotlb = Iotlb::with_config(walker, tables.clone(), config);
    let inner = Sanitized::new(iotlb.clone(), &sanitizer);
    let ops = Buggy { inner, bug, count: AtomicU64::new(0) };
    let queue = flush_queue::Config { entries: 64, max_age: 1_000_000 };
    let config = DmaConfig { cpus: 2, flush: Flush::Lazy, queue };
    let domain = Domain::new(table, ops).unwrap();
    let domain = Arc::new(DmaDomain::new(domain, config, Machine::default()).unwrap());
    let device = |trust| {
        let config = DeviceConfig { trust, ..DeviceConfig::bits(40) };
        Device::new(Arc::clone(&domain), NoPool, config).unwrap()
    };
    let devices = [device(Trust::Trusted), device(Trust::Untrusted)];
    let (frames, wrong, refused) = Default::default();
    Soak { sanitizer, iotlb, tables, domain, devices, frames, fails, wrong, refused }
}

/// A part of what is mapped: where the device finds it, and where it is.
#[derive(Clone, Copy)]
struct Part {
    addr: DmaAddr,
    memory: Span,
}

enum Mapped {
    Single(Mapping<Dma>),
    Raw(DmaAddr, u64),
    List(ListMapping<Dma>),
    Reserved(Reservation<Dma>),
}

/// What a thread has mapped, and by which device.
struct Held {
    mapped: Mapped,
    parts: Vec<Part>,
    direction: Direction,
    device: usize,
}

const DIRECTIONS: [Direction; 3] =
    [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional];

fn attrs(rng: &mut Rng) -> Attrs {
    let flush = [None, None, Some(Flush::Strict), Some(Flush::Lazy)][rng.index(4)];
    Attrs { flush, ..Attrs::default() }
}

impl Soak {
    fn owned(&self, all: impl IntoIterator<Item = (Piece, Frame)>) -> Memory {
        let (pieces, held) = all.into_iter().unzip();
        Tracked::new(Owned { pieces, held, frames: Arc::clone(&self.frames) }, &self.sanitizer)
    }

    /// What failed because hardware did, which it must be allowed to.
    fn refuse(&self, error: Error) {
        let of_hardware = matches!(error, Error::Quarantined { .. } | Error::Domain(_));
        assert!(of_hardware && self.fails == Fails::NowAndThen, "{error}");
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Of what the memory's owner gets back, nothing is to be done: it is dropped.
    fn mapped<M, R>(&self, mapped: Result<M, Refused<R>>) -> Option<M> {
        mapped.map_err(|refused| self.refuse(refused.error)).ok()
    }

    fn buffer(&self, rng: &mut Rng, device: usize) -> (Piece, Frame) {
        // Small ones mostly, and up to 1024 pages. What is not trusted shares no page.
        let most = 1 << rng.below(11);
        let (pages, offset) = (1 + rng.below(most), rng.below(PAGE) * (1 - rng.below(2)));
        match device {
            0 => {
                let bytes = (pages * PAGE - offset).saturating_sub(rng.below(PAGE)).max(1);
                self.frames.take(offset, bytes)
            }
            _ => self.frames.take(0, pages * PAGE),
        }
    }

    fn map(&self, rng: &mut Rng) -> Option<Held> {
        let (device, direction) = (rng.index(2), DIRECTIONS[rng.index(3)]);
        let (mapped, parts) = match rng.below(8) {
            0..4 => self.map_single(rng, device, direction)?,
            4 => match self.map_single(rng, device, direction)? {
                (Mapped::Single(mapping), parts) => {
                    let (addr, len) = self.devices[device].into_raw(mapping).unwrap();
                    (Mapped::Raw(addr, len), parts)
                }
                other => other,
            },
            5 | 6 => self.map_list(rng, device, direction)?,
            _ => self.reserve(rng, device, direction)?,
        };
        Some(Held { mapped, parts, direction, device })
    }

    fn map_single(
        &self,
        rng: &mut Rng,
        device: usize,
        direction: Direction,
    ) -> Option<(Mapped, Vec<Part>)> {
        let buffer = self.buffer(rng, device);
        let (memory, device) = (self.owned([buffer]), &self.devices[device]);
        let mapping = self.mapped(device.map_single_with(memory, direction, attrs(rng)))?;
        let part = Part { addr: mapping.addr(), memory: buffer.0.span };
        Some((Mapped::Single(mapping), vec![part]))
    }

    fn map_list(
        &self,
        rng: &mut Rng,
        device: usize,
        direction: Direction,
    ) -> Option<(Mapped, Vec<Part>)> {
        let count = 1 + rng.index(6);
        // Pieces that are no longer than a segment.
        let all: Vec<_> = (0..count)
            .map(|_| match device {
                0 => self.frames.take(rng.below(PAGE), 1 + rng.below(8 * PAGE)),
                _ => self.frames.take(0, PAGE * (1 + rng.below(8))),
            })
            .collect();
        let (device, memory) = (&self.devices[device], self.owned(all.iter().copied()));
        let mut segments = [Segment::default(); 16];
        let mapped = device.map_list_with(memory, direction, &mut segments, attrs(rng));
        let mapping = self.mapped(mapped)?;
        let mut segments = segments[..mapping.segment_count()].iter().copied();
        let mut segment = segments.next().unwrap();
        let mut parts = Vec::new();
        for (piece, _) in all {
            // A piece lies in one segment whole, or in several.
            let (mut at, mut left) = (piece.span.paddr().get(), piece.span.len());
            while left > 0 {
                if segment.len == 0 {
                    segment = segments.next().unwrap();
                }
                let len = left.min(segment.len);
                let memory = Span::new(PhysAddr::new(at), len).unwrap();
                parts.push(Part { addr: segment.addr, memory });
                let addr = DmaAddr::new(segment.addr.get() + len);
                segment = Segment { addr, len: segment.len - len };
                (at, left) = (at + len, left - len);
            }
        }
        Some((Mapped::List(mapping), parts))
    }

    fn reserve(
        &self,
        rng: &mut Rng,
        device: usize,
        direction: Direction,
    ) -> Option<(Mapped, Vec<Part>)> {
        let pieces = 1 + rng.index(4);
        let request = ReserveRequest { len: 64 * PAGE, offset: 0, pieces, direction };
        let device = &self.devices[device];
        let mut reservation = device.reserve(request).unwrap();
        let (mut parts, mut offset) = (Vec::new(), 0);
        for _ in 0..pieces {
            // With holes in between.
            offset += PAGE * rng.below(4);
            let buffer = self.frames.take(0, PAGE * (1 + rng.below(8)));
            let memory = self.owned([buffer]);
            if self.mapped(device.link(&mut reservation, offset, memory)).is_some() {
                let addr = DmaAddr::new(reservation.addr().get() + offset);
                parts.push(Part { addr, memory: buffer.0.span });
            }
            offset += buffer.0.span.len();
        }
        if let Err(error) = device.announce(&mut reservation) {
            self.refuse(error);
            parts.clear();
        }
        Some((Mapped::Reserved(reservation), parts))
    }

    /// Gives back what is to be tried again.
    fn unmap(&self, held: Held) -> Option<Held> {
        let device = &self.devices[held.device];
        let unmapped = match held.mapped {
            Mapped::Single(mapping) => device.unmap(mapping).map_err(Error::from),
            Mapped::Raw(addr, len) => device.unmap_raw(addr, len, held.direction),
            Mapped::List(mapping) => device.unmap_list(mapping).map_err(Error::from),
            Mapped::Reserved(reservation) => {
                let failed = device.destroy(reservation, drop).err()?;
                self.refuse(failed.error);
                let mapped = Mapped::Reserved(failed.reservation?);
                return Some(Held { mapped, parts: Vec::new(), ..held });
            }
        };
        match unmapped {
            Ok(Unmapped::Released(memory)) => drop(memory),
            Ok(Unmapped::Queued) => {}
            Err(error) => self.refuse(error),
        }
        None
    }

    /// Takes one piece out of a reservation.
    fn unlink(&self, held: &mut Held) {
        if let Mapped::Reserved(reservation) = &mut held.mapped
            && let Some(part) = held.parts.pop()
        {
            let offset = part.addr.get() - reservation.addr().get();
            let device = &self.devices[held.device];
            if let Err(error) = device.unlink(reservation, offset, part.memory.len(), drop) {
                self.refuse(error);
            }
        }
    }

    fn sync(&self, held: &Held, rng: &mut Rng) {
        let device = &self.devices[held.device];
        let direction = held.direction;
        let part = |rng: &mut Rng, len: u64| {
            let offset = rng.below(len);
            (offset, 1 + rng.below(len - offset))
        };
        let synced = match &held.mapped {
            Mapped::Single(mapping) => {
                let (offset, len) = part(rng, mapping.len());
                device
                    .sync_for_cpu(mapping, offset, len)
                    .and_then(|()| device.sync_for_device(mapping, offset, len))
            }
            &Mapped::Raw(addr, len) => {
                let (offset, len) = part(rng, len);
                device
                    .sync_raw_for_cpu(addr, offset, len, direction)
                    .and_then(|()| device.sync_raw_for_device(addr, offset, len, direction))
            }
            Mapped::List(mapping) => device
                .sync_list_for_cpu(mapping)
                .and_then(|()| device.sync_list_for_device(mapping)),
            Mapped::Reserved(_) => Ok(()),
        };
        synced.unwrap();
    }

    /// The device uses a byte, and all of the part as far as the sanitizer is concerned.
    fn dma(&self, part: Part, direction: Direction, rng: &mut Rng) {
        let access = match direction {
            Direction::ToDevice => Access::Read,
            Direction::FromDevice | Direction::Bidirectional => Access::Write,
        };
        let (start, offset) = (part.addr.get(), rng.below(part.memory.len()));
        self.sanitizer.on_dma(Iova::new(start), part.memory.len(), access);
        let hit = self.iotlb.translate(Iova::new(start + offset), access);
        let expected = part.memory.paddr().get() + offset;
        if hit.map(|hit| hit.paddr.get()) != Ok(expected) {
            self.wrong.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn with_mapped(&self, rng: &mut Rng) {
        let buffer = self.buffer(rng, 0);
        let (memory, direction) = (self.owned([buffer]), DIRECTIONS[rng.index(3)]);
        let run = |mapping: &Mapping<Dma>| {
            let part = Part { addr: mapping.addr(), memory: buffer.0.span };
            self.dma(part, direction, rng);
        };
        match self.devices[0].with_mapped(memory, direction, Attrs::default(), run) {
            Ok((memory, ())) => drop(memory),
            Err(ScopeFailed { error, .. }) => self.refuse(error),
        }
    }

    fn housekeep(&self, rng: &mut Rng) {
        let failed = match rng.below(8192) {
            0 => self.domain.flush().is_err(),
            1..16 => self.domain.expire().is_err(),
            16 if self.fails == Fails::NowAndThen => {
                self.iotlb.fail_next_invalidations(1 + rng.below(8));
                self.iotlb.fail_next_sync_maps(rng.below(3));
                false
            }
            _ => false,
        };
        assert!(!failed || self.fails == Fails::NowAndThen);
    }

    fn thread(&self, number: u64, operations: u64) {
        // Two threads to a CPU: they meet in its caches and queues.
        CPU.set(usize::try_from(number).unwrap() / 2);
        let mut rng = Rng::new(number);
        let mut held: Vec<Held> = Vec::new();
        for _ in 0..operations {
            let at = rng.index(held.len().max(1));
            match rng.below(16) {
                0..6 if held.len() < HOLDS => held.extend(self.map(&mut rng)),
                0..11 if !held.is_empty() => {
                    let again = self.unmap(held.swap_remove(at));
                    held.extend(again);
                }
                11 if !held.is_empty() => self.unlink(&mut held[at]),
                12 if !held.is_empty() => self.sync(&held[at], &mut rng),
                13 => self.with_mapped(&mut rng),
                _ => {
                    if let Some(one) = held.get(at).filter(|held| !held.parts.is_empty()) {
                        let part = one.parts[rng.index(one.parts.len())];
                        self.dma(part, one.direction, &mut rng);
                    }
                }
            }
            self.housekeep(&mut rng);
        }
        while let Some(last) = held.pop() {
            held.extend(self.unmap(last));
        }
    }

    fn run(&self, operations: u64) {
        std::thread::scope(|scope| {
            for number in 0..THREADS {
                scope.spawn(move || self.thread(number, operations / THREADS));
            }
        });
        // Hardware recovers after a few.
        let recovered = (0..1000).any(|_| self.domain.flush().is_ok());
        assert!(recovered);
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
    let soak = soak(Bug::None, Fails::NowAndThen);
    soak.run(operations);
    assert_eq!(soak.wrong.load(Ordering::Relaxed), 0);
    assert_eq!(soak.domain.waiting(), (0, 0));
    assert_eq!(soak.frames.out.load(Ordering::Relaxed), 0, "memory was not released");
    assert_eq!(soak.stale(), 0);
    let refused = soak.refused.load(Ordering::Relaxed);
    assert!(refused > 0, "hardware never failed");
    let Soak { sanitizer, tables, domain, devices, .. } = soak;
    drop((devices, domain));
    assert_eq!(tables.tables(), 0, "tables were not freed");
    let found = sanitizer.finish();
    assert!(found.is_empty(), "{} findings\n{}", sanitizer.found(), reports(&found));
    println!("{operations} operations, {refused} refused, {} events", sanitizer.events());
}

#[test]
fn flushes_of_a_queue_that_race_are_not_pointless() {
    let soak = soak(Bug::None, Fails::Never);
    soak.run(100_000);
    soak.sanitizer.finish();
    let found = soak.sanitizer.findings();
    assert!(found.is_empty(), "{}", reports(&found));
    assert!(soak.iotlb.counters().invalidations_of_all > 100, "no flush was for all CPUs");
}

#[test]
fn a_flush_in_a_hundred_left_out_does_not_go_unnoticed() {
    let soak = soak(Bug::Forgets, Fails::Never);
    soak.run(20_000);
    let found = soak.sanitizer.finish();
    assert!(
        found.iter().any(|f| matches!(f.kind, FindingKind::LateFlush { .. })),
        "{}",
        reports(&found)
    );
    let unflushed =
        |kind| matches!(kind, FindingKind::LateFlush { .. } | FindingKind::MissingFlush { .. });
    assert!(found.iter().all(|f| unflushed(f.kind)), "{}", reports(&found));
}

#[test]
fn walks_that_are_never_flushed_do_not_go_unnoticed() {
    let soak = soak(Bug::KeepsWalks, Fails::Never);
    soak.run(2000);
    let found = soak.sanitizer.finish();
    let (cached, cause) = (Cached::Walk, Cause::TablesKept);
    for finding in &found {
        let FindingKind::LateFlush { freed: Some(freed), .. } = finding.kind else {
            panic!("{finding}");
        };
        assert_eq!(finding.kind, FindingKind::LateFlush { cached, cause, freed: Some(freed) });
    }
    assert!(!found.is_empty());
}

#[test]
fn a_size_of_leaves_that_is_left_out_does_not_go_unnoticed() {
    let soak = soak(Bug::LosesSize, Fails::Never);
    // A third of the runs meet nothing that is stale.
    let met = (0..40).any(|_| {
        soak.run(20_000);
        soak.wrong.load(Ordering::Relaxed) > 0
    });
    assert!(met, "no device met what was stale");
    let found = soak.sanitizer.finish();
    for finding in &found {
        // Nobody flushes what is unmapped last.
        let (FindingKind::LateFlush { cached, cause, .. }
        | FindingKind::MissingFlush { cached, cause }) = finding.kind
        else {
            panic!("{finding}")
        };
        assert_eq!((cached, cause), (Cached::Leaf, Cause::LeafSizes), "{finding}");
    }
    assert!(!found.is_empty());
}
