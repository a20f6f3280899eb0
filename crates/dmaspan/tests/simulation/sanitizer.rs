//! The sanitizer's wrappers, and that it and the simulated IOTLB agree.

use std::sync::Arc;

use dmaspan::dma::{
    Attrs, Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Flush, Mapping, NoPool, Piece,
    RawMemory, ReserveRequest, Segment, Trust, Unmapped,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, Gap, PageTable};
use dmaspan::iommu::{
    Attachment, Domain, Event, HardwareError, Invalidation, IommuOps, Prepared, ReservedRegions,
    Scope, Tables, Target, flush_queue,
};
use dmaspan::{Direction, Iova, IovaRange, PhysAddr, Platform, Promise, Prot, Span, SpanBuf};
use dmaspan_sim::device::SimDevice;
use dmaspan_sim::iotlb::{AbsentEntries, Iotlb, IotlbConfig, Planted};
use dmaspan_sim::memory::SimMemory;
use dmaspan_sim::port::SimPort;
use dmaspan_sim::sanitizer::{
    Cached, Cause, FindingKind, Hardware, Op, Outcome, Parts, Record, Sanitized, SanitizedTables,
    Sanitizer, SanitizerConfig, Tracked,
};
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use proptest::prelude::*;

mod neighbours;
mod reported;
mod unsynced;

const PAGE: u64 = 0x1000;

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
type Table = PageTable<ArmLpaeS1<12>, Arena>;

fn table() -> (Table, Tlb) {
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 64 << 20);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let table = PageTable::new(format, tables.clone()).unwrap();
    let registers = table.format().registers(table.root());
    let config = IotlbConfig { absent: AbsentEntries::Cached, ..IotlbConfig::default() };
    let iotlb = Iotlb::with_config(ArmLpaeS1Walker::new(registers.into()).unwrap(), tables, config);
    (table, iotlb)
}

fn pages(first: u64, count: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(first * PAGE), count * PAGE).unwrap()
}

fn frames(first: u64, count: u64) -> Span {
    Span::new(PhysAddr::new((1 << 32) + first * PAGE), count * PAGE).unwrap()
}

fn everything() -> IovaRange {
    IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).unwrap()
}

fn kinds(sanitizer: &Sanitizer) -> Vec<FindingKind> {
    sanitizer.findings().iter().map(|finding| finding.kind).collect()
}

#[derive(Debug)]
struct Machine;

impl Platform for Machine {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        0
    }

    fn now(&self) -> u64 {
        0
    }
}

type DmaOf<H> = DmaDomain<ArmLpaeS1<12>, Arena, Sanitized<Tlb>, Machine, H>;
type Dma = DmaOf<Tracked<RawMemory>>;

fn dma(flush: Flush) -> (Sanitizer, Tlb, Arc<Dma>, Device<Dma>) {
    dma_of(flush)
}

fn dma_of<H: DmaMemory + 'static>(
    flush: Flush,
) -> (Sanitizer, Tlb, Arc<DmaOf<H>>, Device<DmaOf<H>>) {
    let (table, iotlb) = table();
    let absent = AbsentEntries::Cached;
    let sanitizer = Sanitizer::new(SanitizerConfig { absent, ..SanitizerConfig::default() });
    let domain = Domain::new(table, Sanitized::new(iotlb.clone(), &sanitizer)).unwrap();
    let queue = flush_queue::Config { entries: 4, max_age: 1000 };
    let config = DmaConfig { cpus: 1, flush, queue };
    let domain = Arc::new(DmaDomain::new(domain, config, Machine).unwrap());
    let device = Device::new(Arc::clone(&domain), NoPool, DeviceConfig::bits(40)).unwrap();
    (sanitizer, iotlb, domain, device)
}

/// The granules of a mapping.
fn iovas(mapping: &Mapping<Dma>) -> IovaRange {
    let last = mapping.addr().get() + mapping.len() - 1;
    let first = mapping.addr().get() / PAGE;
    pages(first, last / PAGE - first + 1)
}

#[expect(unsafe_code, reason = "a promise about memory that there is none of")]
fn memory(sanitizer: &Sanitizer, span: Span) -> Tracked<RawMemory> {
    // SAFETY: the addresses are made up: there is no memory.
    Tracked::new(unsafe { RawMemory::new(Piece::memory(span)) }, sanitizer)
}

#[test]
fn the_wrappers_of_the_dma_api_see_what_it_does_and_find_nothing() {
    for flush in [Flush::Strict, Flush::Lazy] {
        let (sanitizer, _, domain, device) = dma(flush);
        for round in 0..10 {
            let bytes = Span::new(PhysAddr::new((1 << 32) + 100), 5000 + round).unwrap();
            let mapping =
                device.map_single(memory(&sanitizer, bytes), Direction::FromDevice).unwrap();
            let iovas = iovas(&mapping);
            assert_eq!(sanitizer.mapped(everything()), [iovas]);
            let addr = Iova::new(mapping.addr().get());
            sanitizer.on_dma(addr, mapping.len(), Access::Write);
            match device.unmap(mapping).unwrap() {
                Unmapped::Released(memory) => {
                    assert_eq!(sanitizer.stale(everything()), []);
                    drop(memory);
                }
                Unmapped::Queued => assert_eq!(sanitizer.mapped(everything()), []),
            }
        }
        domain.flush().unwrap();
        assert_eq!(sanitizer.stale(everything()), []);
        assert_eq!(sanitizer.finish(), [], "{flush:?}");
    }
}

#[test]
fn a_mapping_that_is_dropped_is_a_leak_and_what_is_lazily_unmapped_is_stale() {
    let (sanitizer, _, domain, device) = dma(Flush::Lazy);
    let map = |first| {
        device.map_single(memory(&sanitizer, frames(first, 2)), Direction::ToDevice).unwrap()
    };
    let leaked = map(0);
    let leaked_iovas = iovas(&leaked);
    let other = map(8);
    let iovas = iovas(&other);
    drop(leaked);
    assert!(matches!(device.unmap(other).unwrap(), Unmapped::Queued));
    assert_eq!(sanitizer.stale(everything()), [iovas]);
    sanitizer.on_dma(iovas.start(), 1, Access::Read);
    let (access, cause) = (Access::Read, Cause::NoFlush);
    assert_eq!(kinds(&sanitizer), [FindingKind::UseAfterUnmap { access, cause }]);
    domain.flush().unwrap();
    let found = sanitizer.finish();
    assert_eq!((found[1].kind, found[1].iovas), (FindingKind::Leak, leaked_iovas));
    assert_eq!(found[1].memory, Some(frames(0, 2)));
}

#[test]
fn memory_that_somebody_frees_before_the_queue_does_is_found() {
    let (sanitizer, _, domain, device) = dma(Flush::Lazy);
    let mapping = device.map_single(memory(&sanitizer, frames(0, 1)), Direction::ToDevice).unwrap();
    assert!(matches!(device.unmap(mapping).unwrap(), Unmapped::Queued));
    drop(memory(&sanitizer, frames(0, 1)));
    let (cached, cause, freed) = (Cached::Leaf, Cause::NoFlush, Some(frames(0, 1)));
    assert_eq!(kinds(&sanitizer), [FindingKind::LateFlush { cached, cause, freed }]);
    domain.flush().unwrap();
    assert_eq!(sanitizer.finish().len(), 1);
}

#[test]
fn a_mapping_of_another_device_stays_mapped() {
    let (sanitizer, _, domain, device) = dma(Flush::Strict);
    let other = Device::new(Arc::clone(&domain), NoPool, DeviceConfig::bits(40)).unwrap();
    let mapping = device.map_single(memory(&sanitizer, frames(0, 1)), Direction::ToDevice).unwrap();
    let iovas = iovas(&mapping);
    assert!(other.unmap(mapping).unwrap_err().mapping.is_some());
    assert_eq!(sanitizer.mapped(everything()), [iovas]);
    assert_eq!(kinds(&sanitizer), []);
}

#[test]
fn the_hooks_are_passed_through_and_seen() {
    let (table, iotlb) = table();
    let sanitizer = Sanitizer::default();
    let ops = Sanitized::new(iotlb.clone(), &sanitizer);
    assert_eq!(ops.max_ranges(), iotlb.max_ranges());
    sanitizer.on_map(pages(1, 1), &[], Prot::READ);
    sanitizer.on_unmap(pages(1, 1), Tables::Kept);
    let scope = Scope::Ranges(&[pages(1, 1)]);
    let what = Invalidation { scope, leaf_sizes: 1 << 12, tables: Tables::Kept };
    iotlb.fail_next_invalidations(1);
    assert!(ops.invalidate(&what).is_err());
    assert_eq!(sanitizer.stale(everything()), [pages(1, 1)]);
    assert!(ops.invalidate(&what).is_ok());
    assert_eq!(sanitizer.stale(everything()), []);
    assert_eq!(iotlb.counters().invalidations_by_range, 2);
    ops.sync_map(pages(1, 1)).unwrap();
    assert_eq!(iotlb.counters().sync_maps, 1);
    #[expect(unsafe_code, reason = "the test is in the domain's place")]
    // SAFETY: it is the root of the table that the IOTLB walks.
    let promise = unsafe { Promise::new() };
    let changed = ops.root_changed(promise, &|| (table.root(), 3));
    assert!(changed.is_err(), "this IOTLB's root is fixed");
    sanitizer.on_map(pages(1, 1), &[], Prot::READ);
    ops.detach().unwrap();
    assert_eq!(kinds(&sanitizer), [FindingKind::Leak]);
}

/// What a driver does with each of its invalidations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    AsTold,
    Nothing,
    /// Without the last page of each range.
    TooLittle,
}

struct Driver {
    inner: Sanitized<Tlb>,
    does: parking_lot::Mutex<Does>,
}

#[expect(unsafe_code, reason = "a promise about devices that there are none of")]
// SAFETY: nothing is behind the addresses that devices would use, and no table is freed in the
// test: its pages share one.
unsafe impl IommuOps for Driver {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let Invalidation { scope: Scope::Ranges(ranges), leaf_sizes, tables } = *what else {
            return self.inner.invalidate(what);
        };
        let narrower = |range: &IovaRange| {
            let last = range.last().get().checked_sub(PAGE)?;
            IovaRange::new(range.start(), Iova::new(last))
        };
        let ranges: Vec<_> = match *self.does.lock() {
            Does::AsTold => ranges.to_vec(),
            Does::Nothing => Vec::new(),
            Does::TooLittle => ranges.iter().filter_map(narrower).collect(),
        };
        let scope = Scope::Ranges(&ranges);
        self.inner.invalidate(&Invalidation { scope, leaf_sizes, tables })
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

fn stale_in(iotlb: &Tlb) -> Vec<u64> {
    let stale = iotlb.stale_leaves(everything());
    stale.iter().map(|leaf| leaf.block.start().get() / PAGE).collect()
}

fn stale_for(sanitizer: &Sanitizer) -> Vec<u64> {
    let of = |range: IovaRange| range.start().get() / PAGE..=range.last().get() / PAGE;
    sanitizer.stale(everything()).into_iter().flat_map(of).collect()
}

fn does() -> impl Strategy<Value = Does> {
    prop_oneof![3 => Just(Does::AsTold), 1 => Just(Does::Nothing), 1 => Just(Does::TooLittle)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a driver leaves out, the sanitizer, which knows no tables, holds for stale what an
    /// IOTLB holds that is stale by its tables, if devices used all of it.
    #[test]
    fn the_sanitizer_and_the_iotlb_agree_on_what_is_stale(
        steps in prop::collection::vec((0u64..8, 1u64..5, does()), 0..40),
    ) {
        let (table, iotlb) = table();
        let config = SanitizerConfig { parts: Parts::Allow, ..SanitizerConfig::default() };
        let sanitizer = Sanitizer::new(config);
        let inner = Sanitized::new(iotlb.clone(), &sanitizer);
        let driver = Driver { inner, does: parking_lot::Mutex::new(Does::AsTold) };
        let domain = Domain::new(table, driver).unwrap();
        let mut mapped = [0u64; 8];
        let mut room = SpanBuf::room::<8>();
        for (place, count, does) in steps {
            let index = usize::try_from(place).unwrap();
            let first = 1 + place * 5;
            if mapped[index] == 0 {
                let range = pages(first, count);
                if !sanitizer.stale(range).is_empty() {
                    continue;
                }
                // Scattered, so that the leaves are pages.
                let spans: Vec<_> = (0..count).map(|n| frames(64 * first + 2 * n, 1)).collect();
                #[expect(unsafe_code, reason = "maps memory that there is none of")]
                // SAFETY: the addresses are made up, and one thread maps.
                unsafe { domain.map_spans(range.start(), &spans, Prot::READ_WRITE) }.unwrap();
                for n in 0..count {
                    iotlb.translate(Iova::new((first + n) * PAGE), Access::Write).unwrap();
                }
                mapped[index] = count;
            } else {
                let range = pages(first, mapped[index]);
                *domain.ops().does.lock() = does;
                let mut buf = SpanBuf::new(&mut room);
                #[expect(unsafe_code, reason = "unmaps memory that there is none of")]
                // SAFETY: one thread unmaps.
                let unsynced = unsafe { domain.unmap(range, &mut buf) }.unwrap();
                let _synced = unsynced.sync().unwrap();
                mapped[index] = 0;
            }
            prop_assert_eq!(stale_for(&sanitizer), stale_in(&iotlb));
        }
        prop_assert_eq!(sanitizer.errors(), []);
    }
}

#[test]
fn hardware_that_forgets_nothing_is_found_by_what_a_device_can_do_with_it() {
    for (planted, found) in [(Planted::None, 0), (Planted::IgnoreLeaves, 1)] {
        let (sanitizer, iotlb, _domain, device) = dma(Flush::Strict);
        iotlb.drop_invalidations(planted);
        let mapping =
            device.map_single(memory(&sanitizer, frames(0, 1)), Direction::ToDevice).unwrap();
        let iova = iovas(&mapping).start();
        let access = Access::Read;
        let dma = || {
            if iotlb.translate(iova, access).is_ok() {
                sanitizer.on_dma(iova, 1, access);
            }
        };
        dma();
        assert!(matches!(device.unmap(mapping).unwrap(), Unmapped::Released(_)));
        dma();
        let gone = FindingKind::UseAfterFlush { access, unmapped: 4, flushed: 5 };
        assert_eq!(kinds(&sanitizer), [gone][..found]);
        assert_eq!(iotlb.stale_leaves(everything()).len(), found);
    }
}

#[test]
fn threads_may_tell_it_at_once() {
    let sanitizer = Sanitizer::default();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let sanitizer = &sanitizer;
            scope.spawn(move || {
                for round in 0..500 {
                    let range = pages(1 + thread * 64 + round % 7, 8);
                    let memory = frames(thread * 64, 8);
                    sanitizer.on_map(range, &[memory], Prot::READ);
                    sanitizer.on_dma(range.start(), 8 * PAGE, Access::Read);
                    sanitizer.on_unmap(range, Tables::Kept);
                    let scope = Scope::Ranges(&[range]);
                    let (leaf_sizes, tables) = (0, Tables::Kept);
                    let what = Invalidation { scope, leaf_sizes, tables };
                    let begun = sanitizer.on_invalidate_begin(&what);
                    sanitizer.on_invalidate_end(begun, Outcome::Done);
                    sanitizer.on_free(memory);
                    sanitizer.on_release(range);
                }
            });
        }
    });
    assert_eq!(sanitizer.finish(), []);
    assert_eq!(sanitizer.events(), 4 * 500 * 7 + 1);
}

#[test]
fn a_domain_that_is_dropped_releases_what_waits_only_when_hardware_has_let_go() {
    let (sanitizer, _, domain, device) = dma(Flush::Lazy);
    let mapping = device.map_single(memory(&sanitizer, frames(0, 1)), Direction::ToDevice).unwrap();
    assert!(matches!(device.unmap(mapping).unwrap(), Unmapped::Queued));
    drop((device, domain));
    assert_eq!(sanitizer.finish(), []);
}

#[test]
fn a_mapping_of_each_kind_is_seen_and_correct() {
    for flush in [Flush::Strict, Flush::Lazy] {
        let (sanitizer, _, domain, device) = dma(flush);
        let sized =
            || sanitizer.mapped(everything()).iter().map(|r| r.checked_len().unwrap()).sum();
        let nothing: u64 = 0;
        let attrs = Attrs { flush: Some(Flush::Lazy), ..Attrs::default() };
        let (result, mapped) = device
            .with_mapped(memory(&sanitizer, frames(0, 3)), Direction::ToDevice, attrs, |mapping| {
                (sanitizer.mapped(everything()), iovas(mapping))
            })
            .map(|(memory, result)| {
                drop(memory);
                result
            })
            .unwrap();
        assert_eq!(result, [mapped]);
        assert_eq!((sanitizer.stale(everything()), sized()), (vec![], nothing));

        let mut segments = [Segment::default(); 2];
        let list = memory(&sanitizer, frames(8, 20));
        let list = device.map_list(list, Direction::FromDevice, &mut segments).unwrap();
        assert_eq!(sized(), 20 * PAGE);
        let _ = device.unmap_list(list).unwrap();

        let (len, direction) = (16 * PAGE, Direction::ToDevice);
        let request = ReserveRequest { len, offset: 0, pieces: 2, direction };
        let mut reservation = device.reserve(request).unwrap();
        device.link(&mut reservation, 0, memory(&sanitizer, frames(40, 2))).unwrap();
        device.link(&mut reservation, 5 * PAGE, memory(&sanitizer, frames(50, 1))).unwrap();
        device.announce(&mut reservation).unwrap();
        sanitizer.on_dma(Iova::new(reservation.addr().get()), 2 * PAGE, Access::Read);
        assert_eq!(sized(), 3 * PAGE);
        device.unlink(&mut reservation, 0, 2 * PAGE, drop).unwrap();
        assert_eq!(sized(), PAGE);
        device.destroy(reservation, drop).unwrap();
        domain.flush().unwrap();
        assert_eq!((sanitizer.finish(), sized()), (vec![], nothing), "{flush:?}");
    }
}

#[test]
fn a_sync_that_the_api_refuses_is_found() {
    let (sanitizer, _, _domain, device) = dma(Flush::Strict);
    let bytes = Span::new(PhysAddr::new(1 << 32), 100).unwrap();
    let (from, both) = (Direction::FromDevice, Direction::Bidirectional);
    let mapping = device.map_single(memory(&sanitizer, bytes), from).unwrap();
    let start = mapping.addr().get();
    let of = |len| IovaRange::from_len(Iova::new(start), len).unwrap();
    device.sync_for_cpu(&mapping, 0, 100).unwrap();
    device.sync_for_device(&mapping, 99, 1).unwrap();
    assert_eq!(kinds(&sanitizer), []);
    // In its granule, and yet not of the mapping.
    assert!(device.sync_for_cpu(&mapping, 0, 101).is_err());
    assert!(device.sync_for_device(&mapping, 100, 1).is_err());
    let (addr, len) = device.into_raw(mapping).unwrap();
    device.sync_raw_for_cpu(addr, 0, len, from).unwrap();
    assert!(device.sync_raw_for_device(addr, 0, len, both).is_err());
    assert!(device.sync_raw_for_device(addr, 1, len, from).is_err());
    drop(device.unmap_raw(addr, len, from).unwrap());
    assert!(device.sync_raw_for_cpu(addr, 0, len, from).is_err());
    let outside = FindingKind::SyncOutside { mapping: Some(of(100)) };
    let direction = FindingKind::SyncDirection { direction: both, prot: Prot::WRITE };
    let gone = FindingKind::SyncOutside { mapping: None };
    assert_eq!(kinds(&sanitizer), [outside, outside, direction, outside, gone]);
    assert_eq!(sanitizer.findings()[0].iovas, of(101));
}

#[test]
fn an_unmap_that_the_api_refuses_is_found() {
    let (sanitizer, _, domain, device) = dma(Flush::Lazy);
    let direction = Direction::ToDevice;
    let mapping = device.map_single(memory(&sanitizer, frames(0, 2)), direction).unwrap();
    let mapped = iovas(&mapping);
    let (addr, len) = device.into_raw(mapping).unwrap();
    assert!(device.unmap_raw(addr, len - 1, direction).is_err());
    assert!(device.unmap_raw(addr, len, Direction::FromDevice).is_err());
    let other = FindingKind::RefusedUnmap { mapping: mapped };
    assert_eq!(kinds(&sanitizer), [other, other]);
    let _ = device.unmap_raw(addr, len, direction).unwrap();
    assert!(device.unmap_raw(addr, len, direction).is_err());
    domain.flush().unwrap();
    assert!(device.unmap_raw(addr, len, direction).is_err());
    let nowhere = dmaspan::DmaAddr::new(0x7000);
    assert!(device.unmap_raw(nowhere, len, direction).is_err());
    let twice = FindingKind::DoubleUnmap;
    assert_eq!(kinds(&sanitizer)[2..], [twice, twice, FindingKind::UnmapOfNothing]);
}

#[test]
fn what_a_failed_map_published_is_seen_until_it_is_flushed() {
    let (sanitizer, iotlb, domain, device) = dma(Flush::Strict);
    iotlb.fail_next_sync_maps(1);
    let refused = device.map_single(memory(&sanitizer, frames(0, 2)), Direction::ToDevice);
    drop(refused.unwrap_err());
    assert_eq!((sanitizer.mapped(everything()), sanitizer.stale(everything())), (vec![], vec![]));
    iotlb.fail_next_sync_maps(1);
    iotlb.fail_next_invalidations(1);
    let refused = device.map_single(memory(&sanitizer, frames(0, 2)), Direction::ToDevice);
    assert!(refused.unwrap_err().memory.is_none());
    assert!(!sanitizer.stale(everything()).is_empty());
    domain.flush().unwrap();
    assert_eq!(sanitizer.stale(everything()), []);
    sanitizer.finish();
    // What failed is looked for once more, of which nothing is left.
    assert!(kinds(&sanitizer).iter().all(|kind| *kind == FindingKind::PointlessFlush));
}

/// Drops what an invalidation says of tables.
struct KeepsWalks(Sanitized<Tlb>);

#[expect(unsafe_code, reason = "a promise about devices that there are none of")]
// SAFETY: nothing is behind the addresses that devices would use.
unsafe impl IommuOps for KeepsWalks {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.0.invalidate(&Invalidation { tables: Tables::Kept, ..*what })
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.0.detach()
    }

    fn observe(&self, event: &Event<'_>) {
        self.0.observe(event);
    }

    fn max_ranges(&self) -> usize {
        self.0.max_ranges()
    }
}

#[test]
fn a_table_that_is_freed_while_walks_into_it_are_cached_is_found() {
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 64 << 20);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let sanitizer = Sanitizer::default();
    let seen = SanitizedTables::new(tables.clone(), &sanitizer);
    let table = PageTable::new(format, seen).unwrap();
    let registers = table.format().registers(table.root());
    let iotlb = Iotlb::new(ArmLpaeS1Walker::new(registers.into()).unwrap(), tables);
    let domain = Domain::new(table, KeepsWalks(Sanitized::new(iotlb, &sanitizer))).unwrap();
    // Two whole tables of pages, by two unmaps and one sync.
    let ranges = [pages(512, 512), pages(1024, 512)];
    let spans: Vec<_> = (0..512).map(|n| frames(2 * n, 1)).collect();
    let mut gather = domain.gather();
    for range in ranges {
        #[expect(unsafe_code, reason = "maps memory that there is none of")]
        // SAFETY: the addresses are made up, and one thread maps and unmaps in one domain.
        unsafe { domain.map_spans(range.start(), &spans, Prot::READ) }.unwrap();
        #[expect(unsafe_code, reason = "unmaps what nobody uses")]
        // SAFETY: as above.
        let (removed, _) = unsafe { domain.remove(range) }.unwrap().into_gather();
        #[expect(unsafe_code, reason = "nothing shows which domain a gather belongs to")]
        // SAFETY: both are of this one.
        unsafe {
            domain.merge(&mut gather, removed)
        };
    }
    #[expect(unsafe_code, reason = "nothing shows which domain a gather belongs to")]
    // SAFETY: it is of this one.
    let _ = unsafe { domain.sync(gather) }.unwrap();
    let found = sanitizer.findings();
    assert_eq!(found.iter().map(|finding| finding.iovas).collect::<Vec<_>>(), ranges);
    for finding in found {
        let FindingKind::LateFlush { cached: Cached::Walk, cause, freed } = finding.kind else {
            panic!("{finding}");
        };
        assert_eq!(cause, Cause::TablesKept);
        assert_eq!(freed.map(|table| table.len()), Some(PAGE));
    }
}

#[test]
fn what_is_protected_in_a_domain_is_seen() {
    let (table, iotlb) = table();
    let sanitizer = Sanitizer::default();
    let domain = Domain::new(table, Sanitized::new(iotlb, &sanitizer)).unwrap();
    let range = pages(1, 4);
    #[expect(unsafe_code, reason = "maps memory that there is none of")]
    // SAFETY: the addresses are made up, and one thread maps and unmaps.
    unsafe { domain.map_spans(range.start(), &[frames(0, 4)], Prot::READ_WRITE) }.unwrap();
    #[expect(unsafe_code, reason = "changes what nobody uses")]
    // SAFETY: as above.
    unsafe { domain.protect(range, Prot::READ, Gap::Refuse) }.unwrap();
    let access = Access::Write;
    sanitizer.on_dma(range.start(), 1, access);
    assert_eq!(kinds(&sanitizer), [FindingKind::Denied { access, prot: Prot::READ }]);
    assert_eq!(sanitizer.stale(range), []);
}

/// Every line of the histories of what was found is of this file.
fn every_place_is_here(sanitizer: &Sanitizer) {
    let found = sanitizer.findings();
    for record in found.iter().flat_map(|finding| &finding.history) {
        assert_eq!(record.origin.location.file(), file!(), "{record}");
    }
}

#[test]
fn each_line_of_a_history_names_the_place_in_the_driver_and_its_device() {
    let access = Access::Read;
    for flush in [Flush::Strict, Flush::Lazy] {
        let (sanitizer, _, domain, _) = dma(flush);
        let config = DeviceConfig::bits(40).named("nic0");
        let device = Device::new(Arc::clone(&domain), NoPool, config).unwrap();
        let direction = Direction::ToDevice;
        let map = || device.map_single(memory(&sanitizer, frames(0, 1)), direction).unwrap();
        let use_it = |at: Iova| sanitizer.on_dma(at, 1, access);

        let single = map();
        let at = iovas(&single).start();
        device.sync_for_cpu(&single, 0, 1).unwrap();
        let _ = device.unmap(single).unwrap();
        use_it(at);
        domain.flush().unwrap();
        use_it(at);

        let raw = map();
        let at = iovas(&raw).start();
        let (addr, len) = device.into_raw(raw).unwrap();
        assert!(device.unmap_raw(addr, len - 1, direction).is_err());
        let _ = device.unmap_raw(addr, len, direction).unwrap();
        domain.expire().unwrap();
        domain.flush().unwrap();
        use_it(at);

        let mut segments = [Segment::default(); 2];
        let list = memory(&sanitizer, frames(8, 20));
        let list = device.map_list(list, direction, &mut segments).unwrap();
        let _ = device.unmap_list(list).unwrap();
        domain.flush().unwrap();
        use_it(Iova::new(segments[0].addr.get()));

        let request = ReserveRequest { len: 16 * PAGE, offset: 0, pieces: 2, direction };
        let mut reservation = device.reserve(request).unwrap();
        device.link(&mut reservation, 0, memory(&sanitizer, frames(40, 2))).unwrap();
        device.announce(&mut reservation).unwrap();
        device.unlink(&mut reservation, 0, 2 * PAGE, drop).unwrap();
        use_it(Iova::new(reservation.addr().get()));
        device.destroy(reservation, drop).unwrap();
        let line = line!() + 1;
        drop(map());
        let leak = sanitizer.finish().pop().unwrap();

        every_place_is_here(&sanitizer);
        assert!(sanitizer.found() >= 6, "{sanitizer}");
        assert_eq!(leak.kind, FindingKind::Leak);
        let is_map = |record: &&Record| matches!(record.op, Op::Map { .. });
        let mapped = leak.history.iter().rev().find(is_map).unwrap().origin;
        // The closure is where it is mapped.
        assert!(mapped.location.line() < line);
        assert_eq!(mapped.name, Some("nic0"));
        assert!(leak.to_string().contains(", nic0, mapped "), "{leak}");
    }
}

#[test]
fn each_line_of_a_history_names_the_place_in_whoever_uses_a_domain_by_itself() {
    let (table, iotlb) = table();
    let sanitizer = Sanitizer::default();
    let domain = Domain::new(table, Sanitized::new(iotlb, &sanitizer)).unwrap();
    let range = pages(1, 4);
    #[expect(unsafe_code, reason = "maps memory that there is none of")]
    // SAFETY: the addresses are made up, and one thread maps and unmaps.
    unsafe { domain.map_spans(range.start(), &[frames(0, 4)], Prot::READ_WRITE) }.unwrap();
    #[expect(unsafe_code, reason = "changes what nobody uses")]
    // SAFETY: as above.
    unsafe { domain.protect(range, Prot::READ, Gap::Refuse) }.unwrap();
    sanitizer.on_dma(range.start(), 1, Access::Write);
    let mut room = SpanBuf::room::<8>();
    #[expect(unsafe_code, reason = "unmaps what nobody uses")]
    // SAFETY: as above.
    let unsynced = unsafe { domain.unmap(range, &mut SpanBuf::new(&mut room)) }.unwrap();
    sanitizer.on_dma(range.start(), 1, Access::Write);
    let _ = unsynced.sync().unwrap();
    sanitizer.on_dma(range.start(), 1, Access::Write);
    assert_eq!(sanitizer.found(), 3);
    every_place_is_here(&sanitizer);
}

#[test]
fn two_packets_of_a_page_are_no_neighbours_to_each_other_and_each_is_exact() {
    let (sanitizer, iotlb, domain, device) = dma(Flush::Lazy);
    let half = |half: u64| Span::new(PhysAddr::new((1 << 32) + half * PAGE / 2), PAGE / 2).unwrap();
    let map = |span| device.map_single(memory(&sanitizer, span), Direction::FromDevice).unwrap();
    let (first, second) = (map(half(0)), map(half(1)));
    let (one, other) = (first.addr(), second.addr());
    let write =
        |at: dmaspan::DmaAddr, len| sanitizer.on_dma(Iova::new(at.get()), len, Access::Write);
    write(one, PAGE / 2);
    write(other, PAGE / 2);
    let _ = device.unmap(first).unwrap();
    domain.flush().unwrap();
    assert_eq!(sanitizer.findings(), []);
    // The other one's translation leads to the memory that is free now.
    assert!(iotlb.translate(Iova::new(other.get() - PAGE / 2), Access::Write).is_ok());
    write(dmaspan::DmaAddr::new(other.get() - 1), 1);
    let mapping = IovaRange::from_len(Iova::new(other.get()), PAGE / 2).unwrap();
    let (access, trust) = (Access::Write, Trust::Trusted);
    assert_eq!(kinds(&sanitizer), [FindingKind::BesideMapping { access, mapping, trust }]);
    write(one, 1);
    assert!(matches!(kinds(&sanitizer)[1], FindingKind::UseAfterFlush { .. }));
    drop(memory(&sanitizer, half(1)));
    let freed = Some(half(1));
    assert_eq!(kinds(&sanitizer)[2..], [FindingKind::ReleasedWhileMapped { freed }]);
    drop(second);
}

#[test]
fn devices_and_streams_tell_the_sanitizer_what_they_access() {
    let (table, iotlb) = table();
    let sanitizer = Sanitizer::default();
    let domain = Domain::new(table, iotlb.clone().sanitized(&sanitizer)).unwrap();
    let domain = Arc::new(domain);
    let ram = SimMemory::new(PhysAddr::new(1 << 32), 4 * PAGE, 12).unwrap();
    let page = ram.allocate(PAGE, 12).unwrap();
    ram.pin_frames(&[page]);
    #[expect(unsafe_code, reason = "maps simulated memory")]
    // SAFETY: one thread maps, and the memory is simulated.
    unsafe { domain.map_spans(pages(1, 1).start(), &[page], Prot::READ_WRITE) }.unwrap();
    let port = SimPort::new(3, ReservedRegions::new());
    let stream = Attachment::new(port.clone()).unwrap();
    stream.attach(Target::Paging(Prepared::new(Arc::clone(&domain)))).unwrap();
    let device = SimDevice::new(iotlb, &ram).sanitized(&sanitizer);
    let at = Iova::new(PAGE + 8);
    let (mut four, mut eight) = ([0; 4], [0; 8]);
    device.write(at, &[7; 4]).unwrap();
    port.read(&&ram, at, &mut four).unwrap();
    assert_eq!(four, [7; 4]);
    assert!(port.write(&&ram, Iova::new(3 * PAGE), &[1]).is_err());
    assert!(device.read(Iova::new(5 * PAGE), &mut eight).is_err());
    let nothing = |access| FindingKind::Unmapped { access };
    assert_eq!(kinds(&sanitizer), [nothing(Access::Write), nothing(Access::Read)]);
    let found = sanitizer.findings();
    let lens: Vec<_> = found.iter().map(|found| found.iovas.checked_len().unwrap()).collect();
    assert_eq!(lens, [1, 8]);
    every_place_is_here(&sanitizer);
    // Not what a stream does that is not behind the domain.
    let events = sanitizer.events();
    stream.detach().unwrap();
    assert!(port.read(&&ram, at, &mut four).is_err());
    assert_eq!(sanitizer.events(), events);
}
