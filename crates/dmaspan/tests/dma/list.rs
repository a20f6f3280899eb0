//! Scatter lists: one range of IOVAs, segments within the device's limits, every byte in its place.

use std::sync::Arc;

use dmaspan::dma::{
    Attrs, BouncePool, Device, DeviceConfig, DeviceLimits, Direct, DmaConfig, DmaDomain, DmaMemory,
    Error, Flush, NoPool, Piece, Segment, Translation, Trust, Unmapped, Via,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, PageTable};
use dmaspan::iommu::Domain;
use dmaspan::{Coherency, Direction, DmaAddr, Errno, Iova, Platform, Prot, Span};
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use parking_lot::Mutex;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::common::{arena, format, span, walker};

mod bounced;

/// The granule of these tests.
const G: u64 = 4096;

/// A list of pieces that nobody touches.
#[derive(Clone, Debug, PartialEq)]
struct Pieces(Vec<Piece>);

// SAFETY: nobody touches the memory, and nothing else is made of it.
unsafe impl DmaMemory for Pieces {
    fn pieces(&self) -> &[Piece] {
        &self.0
    }
}

/// One thread, with a record of what was done to its caches.
#[derive(Clone, Debug, Default)]
struct Cpu(Arc<Mutex<Vec<(&'static str, Span)>>>);

impl Platform for Cpu {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        0
    }

    fn now(&self) -> u64 {
        0
    }

    fn write_back(&self, span: Span) {
        self.0.lock().push(("written back", span));
    }

    fn invalidate(&self, span: Span) {
        self.0.lock().push(("invalidated", span));
    }
}

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
type Space = DmaDomain<ArmLpaeS1<12>, Faulty<Arena>, Faulty<Tlb>, Cpu, Pieces>;

struct Rig {
    domain: Arc<Space>,
    iotlb: Tlb,
    arena: Arena,
    faults: Faults,
    cpu: Cpu,
}

fn rig(flush: Flush) -> Rig {
    let (faults, arena, cpu) = (Faults::none(), arena(), Cpu::default());
    let tables = Faulty::new(arena.clone(), &faults);
    let table = PageTable::new(format::<12>(48, 48), tables).unwrap();
    let iotlb = Iotlb::new(walker(table.format(), table.root()), arena.clone());
    let domain = Domain::new(table, Faulty::new(iotlb.clone(), &faults)).unwrap();
    let config = DmaConfig { flush, ..DmaConfig::new(1) };
    let domain = Arc::new(DmaDomain::new(domain, config, cpu.clone()).unwrap());
    Rig { domain, iotlb, arena, faults, cpu }
}

impl Rig {
    fn device(&self, boundary: Option<u64>, max_segment: u64) -> Device<Space> {
        Device::new(Arc::clone(&self.domain), NoPool, config(boundary, max_segment)).unwrap()
    }

    fn reads(&self, iova: u64) -> Option<(u64, Prot)> {
        let hit = self.iotlb.translate(Iova::new(iova), Access::Read).ok()?;
        Some((hit.paddr.get(), hit.prot))
    }

    fn invalidations(&self) -> u64 {
        let counters = self.iotlb.counters();
        counters.invalidations_by_range + counters.invalidations_of_all
    }
}

fn config(boundary: Option<u64>, max_segment: u64) -> DeviceConfig {
    let limits = DeviceLimits { boundary, max_segment, ..DeviceLimits::bits(44) };
    DeviceConfig { limits, ..DeviceConfig::bits(44) }
}

fn memory(paddr: u64, len: u64) -> Piece {
    Piece::memory(span(paddr, len))
}

fn pages(count: u64, apart: u64) -> Pieces {
    Pieces((0..count).map(|n| memory(0x1000_0000 + n * apart * G, G)).collect())
}

fn room(count: usize) -> Vec<Segment> {
    vec![Segment { addr: DmaAddr::new(0xdead), len: 0xbeef }; count]
}

fn segment(addr: u64, len: u64) -> Segment {
    Segment { addr: DmaAddr::new(addr), len }
}

/// The segments as they are described, step by step and without an eye on speed, and the granules
/// that are mapped for them: IOVA, physical address and way.
fn naive(
    pieces: &[Piece],
    base: u64,
    boundary: u128,
    max: u128,
) -> (Vec<Segment>, Vec<(u64, u64, Via)>) {
    let g = u128::from(G);
    let (mut runs, mut granules) = (Vec::<(u128, u128, Via)>::new(), Vec::new());
    let mut free = u128::from(base);
    for piece in pieces {
        let (paddr, len) = (u128::from(piece.span.paddr().get()), u128::from(piece.span.len()));
        if piece.via == Via::Bus {
            runs.push((paddr, len, Via::Bus));
            continue;
        }
        let crossed = |start: u128| (start + paddr % g + len - 1) / boundary - start / boundary;
        let next_boundary = free.div_ceil(boundary) * boundary;
        if crossed(free) > crossed(next_boundary) {
            free = next_boundary;
        }
        runs.push((free + paddr % g, len, piece.via));
        let start = free;
        free = (free + paddr % g + len).div_ceil(g) * g;
        for granule in (start..free).step_by(4096) {
            let at = paddr / g * g + (granule - start);
            granules.push((granule.try_into().unwrap(), at.try_into().unwrap(), piece.via));
        }
    }
    let fits =
        |start: u128, len: u128| len <= max && start / boundary == (start + len - 1) / boundary;
    let mut segments = Vec::<(u128, u128, Via)>::new();
    for (mut start, mut len, via) in runs {
        if let Some((before, sum, Via::Memory | Via::HostBridge)) = segments.last_mut()
            && via != Via::Bus
            && (*before + *sum) % g == 0
            && start == *before + *sum
            && fits(*before, *sum + len)
        {
            *sum += len;
            continue;
        }
        while !fits(start, len) {
            let granule = (start + max) / g * g;
            let end = if granule > start { granule } else { start + max };
            let end = end.min((start / boundary + 1) * boundary);
            segments.push((start, end - start, via));
            (start, len) = (end, start + len - end);
        }
        segments.push((start, len, via));
    }
    let short = |value: u128| u64::try_from(value).unwrap();
    let segments = segments.iter().map(|&(start, len, _)| segment(short(start), short(len)));
    (segments.collect(), granules)
}

/// Any piece: of whole granules, at any bytes, long, on a bus, or right behind the one before.
fn piece() -> impl Strategy<Value = (u8, u64, u64)> {
    (0u8..8, 1u64..1 << 40, 1u64..3 << 20)
}

fn pieces(seeds: &[(u8, u64, u64)]) -> Vec<Piece> {
    let mut pieces = Vec::<Piece>::new();
    for &(kind, paddr, len) in seeds {
        let behind = pieces.last().map_or(G, |piece| piece.span.last().get() + 1);
        let whole = |value: u64| value.div_ceil(G) * G;
        let (paddr, len, via) = match kind {
            0 => (paddr, len % 9000 + 1, Via::Memory),
            1 | 2 => (whole(paddr), whole(len % (4 * G) + 1), Via::Memory),
            3 => (behind, len % G + 1, Via::Memory),
            4 => (whole(behind), whole(len % (4 * G) + 1), Via::Memory),
            5 => (paddr, len, Via::Memory),
            6 => (paddr, len % 70_000 + 1, Via::Bus),
            _ => (whole(paddr), whole(len % (2 * G) + 1), Via::HostBridge),
        };
        pieces.push(Piece { span: span(paddr, len), via });
    }
    pieces
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_of_a_list_is_where_its_segments_say(
        seeds in vec(piece(), 1..12),
        boundary in prop_oneof![
            Just(None), Just(Some(G)), Just(Some(4 * G)), Just(Some(1 << 16)),
            Just(Some(1 << 20)), Just(Some(1 << 32)),
        ],
        max in prop_oneof![
            Just(G), Just(5000), Just((1 << 16) - 1), Just(1 << 16), Just(1 << 20), Just(u64::MAX),
        ],
    ) {
        let rig = rig(Flush::Strict);
        let device = rig.device(boundary, max);
        let list = Pieces(pieces(&seeds));
        let input = list.clone();
        let mut buf = room(10_000);
        let before = rig.invalidations();
        let mapping = device.map_list(list, Direction::Bidirectional, &mut buf).unwrap();
        let iovas = mapping.iovas();
        prop_assert_eq!(rig.iotlb.counters().sync_maps, u64::from(iovas.is_some()));
        prop_assert_eq!(rig.invalidations(), before);

        let count = mapping.segment_count();
        let segments = &buf[..count];
        prop_assert_eq!(&buf[count..], &room(10_000 - count)[..]);
        prop_assert_eq!(device.list_room(&input.0), Ok(count));
        prop_assert_eq!(device.segments(&mapping).unwrap().collect::<Vec<_>>(), segments);
        let boundary_size = boundary.map_or(1 << 64, u128::from);
        for segment in segments {
            let (first, last) = (segment.addr.get(), segment.addr.get() + segment.len - 1);
            prop_assert!(segment.len <= max);
            prop_assert_eq!(u128::from(first) / boundary_size, u128::from(last) / boundary_size);
        }
        let base = iovas.map_or(0, |range| range.start().get());
        let (model, granules) = naive(&input.0, base, boundary_size, max.into());
        prop_assert_eq!(segments, model);
        let bytes = input.0.iter().map(|piece| piece.span.len()).sum::<u64>();
        prop_assert_eq!(mapping.len(), bytes);
        prop_assert_eq!(segments.iter().map(|segment| segment.len).sum::<u64>(), bytes);
        let short = |piece: &Piece| {
            let (offset, len) = (piece.span.paddr().get() % G, piece.span.len());
            len <= max && u128::from(offset + len) <= boundary_size && piece.via != Via::Bus
        };
        if input.0.iter().all(short) {
            prop_assert!(count <= input.0.len());
        }

        // Through the independent walker: all granules lead where they should, and nothing else.
        let mut mapped = 0;
        for &(iova, paddr, via) in &granules {
            let (at, prot) = rig.reads(iova).unwrap();
            prop_assert_eq!(at, paddr);
            prop_assert_eq!(prot.contains(Prot::MMIO), via == Via::HostBridge);
            mapped += 1;
        }
        if let Some(iovas) = iovas {
            let all = (iovas.start().get()..=iovas.last().get()).step_by(4096);
            let reached = all.filter(|&iova| rig.reads(iova).is_some()).count();
            prop_assert_eq!(reached, mapped, "the padding leads nowhere");
            prop_assert_eq!(rig.reads(iovas.last().get() + 1), None);
        }
        let Unmapped::Released(list) = device.unmap_list(mapping).unwrap() else { panic!() };
        prop_assert_eq!(list, input, "the list is as it was");
        prop_assert_eq!(rig.invalidations() - before, u64::from(iovas.is_some()));
        for (iova, ..) in granules {
            prop_assert_eq!(rig.reads(iova), None);
        }
        if let Some(iovas) = iovas {
            prop_assert_eq!(rig.domain.domain().ops().inner().stale_leaves(iovas), []);
        }
        prop_assert_eq!(rig.domain.waiting(), (0, 0));
    }
}

#[test]
fn neighbours_on_granules_become_one_segment() {
    let rig = rig(Flush::Strict);
    let mut buf = room(4);
    let list = Pieces(vec![
        memory(0x10_0800, 0x1800), // ends on a granule
        memory(0x90_0000, 0x1000), // joins
        memory(0x20_0000, 0x0fff), // joins, and ends before a granule does
        memory(0x30_0000, 0x1000),
        memory(0x40_0001, 0x1000), // begins behind a granule
    ]);
    let device = rig.device(None, 1 << 16);
    let mapping = device.map_list(list, Direction::ToDevice, &mut buf).unwrap();
    let base = mapping.iovas().unwrap().start().get();
    let expected = [
        segment(base + 0x800, 0x37ff),
        segment(base + 0x4000, 0x1000),
        segment(base + 0x5001, 0x1000),
    ];
    assert_eq!((mapping.segment_count(), &buf[..3]), (3, &expected[..]));
    assert!(device.unmap_list(mapping).is_ok());
}

#[test]
fn nothing_is_joined_over_memory_of_another_device() {
    let rig = rig(Flush::Strict);
    let device = rig.device(None, 1 << 30);
    let bus = Piece { span: span(0x10_1000, G), via: Via::Bus };
    let list = Pieces(vec![memory(0x10_0000, G), bus, memory(0x10_2000, G)]);
    let mut buf = room(3);
    let mapping = device.map_list(list, Direction::ToDevice, &mut buf).unwrap();
    let base = mapping.iovas().unwrap().start().get();
    assert_eq!(mapping.iovas().unwrap().len_less_one(), 2 * G - 1, "the bus takes no IOVAs");
    assert_eq!(buf, [segment(base, G), segment(0x10_1000, G), segment(base + G, G)]);
    assert!(device.unmap_list(mapping).is_ok());
    // A list of nothing else needs no translation at all.
    let mapping = device.map_list(Pieces(vec![bus]), Direction::ToDevice, &mut buf).unwrap();
    assert_eq!((mapping.iovas(), buf[0]), (None, segment(0x10_1000, G)));
    assert!(matches!(device.unmap_list(mapping), Ok(Unmapped::Released(_))));
}

#[test]
fn pieces_that_are_contiguous_share_large_leaves() {
    let rig = rig(Flush::Strict);
    let device = rig.device(None, 1 << 30);
    let list = Pieces((0..512).map(|n| memory((2 << 20) + n * G, G)).collect());
    let mut buf = room(1);
    let mapping = device.map_list(list, Direction::ToDevice, &mut buf).unwrap();
    assert_eq!((mapping.segment_count(), buf[0].len), (1, 2 << 20));
    let hit = rig.iotlb.translate(Iova::new(buf[0].addr.get() + 5 * G), Access::Read).unwrap();
    assert_eq!(hit.block.len_less_one(), (2 << 20) - 1);
    assert!(device.unmap_list(mapping).is_ok());
}

#[test]
fn a_lazy_list_is_one_entry_of_the_queue() {
    let rig = rig(Flush::Lazy);
    let device = rig.device(Some(1 << 16), 1 << 16);
    let mut buf = room(200);
    let strict = Attrs { flush: Some(Flush::Strict), ..Attrs::default() };
    for (attrs, waiting) in [(Attrs::default(), 1), (strict, 1)] {
        let list = pages(200, 3);
        let mapping = device.map_list_with(list, Direction::FromDevice, &mut buf, attrs).unwrap();
        assert_eq!(mapping.segment_count(), 13, "200 pages by 16");
        assert!(device.unmap_list(mapping).is_ok());
        assert_eq!(rig.domain.waiting(), (waiting, 0));
    }
    assert!(rig.domain.flush().is_ok());
    assert_eq!(rig.domain.waiting(), (0, 0));
}

/// Maps a list that is refused, and checks that nothing has changed.
fn refused<T, B>(device: &Device<T, B>, list: &Pieces, room_for: usize) -> Error
where
    T: Translation<Memory = Pieces>,
    B: BouncePool,
{
    let mut buf = room(room_for);
    let refused = device.map_list(list.clone(), Direction::ToDevice, &mut buf).unwrap_err();
    assert_eq!(buf, room(room_for), "nothing is written");
    assert_eq!(refused.memory.as_ref(), Some(list), "the memory is given back");
    refused.error
}

#[test]
fn a_list_that_is_refused_changes_nothing() {
    let rig = rig(Flush::Strict);
    let device = rig.device(Some(1 << 32), 1 << 16);
    let tables = rig.arena.tables();
    let error = refused(&device, &Pieces(vec![]), 4);
    assert_eq!((error, error.errno()), (Error::EmptyList, Errno::EINVAL));
    let uneven = Pieces((0..9).map(|n| memory(n * G, 100)).collect());
    let error = refused(&device, &uneven, 8);
    assert_eq!(error, Error::SegmentRoom { room: 8, needed: 9 });
    let half = memory(0, 1 << 63);
    let error = refused(&device, &Pieces(vec![memory(0, G), half, half]), 4);
    assert_eq!((error, error.errno()), (Error::ListWraps { piece: 2 }, Errno::EOVERFLOW));
    let bus = Piece { span: span(0, u64::MAX), via: Via::Bus };
    let everywhere = Device::new(
        Arc::clone(&rig.domain),
        NoPool,
        DeviceConfig { limits: DeviceLimits::bits(64), ..DeviceConfig::bits(64) },
    );
    let error = refused(&everywhere.unwrap(), &Pieces(vec![bus, bus]), 4);
    assert_eq!(error, Error::ListWraps { piece: 1 });
    let far = Piece { span: span(1 << 44, G), via: Via::Bus };
    let error = refused(&device, &Pieces(vec![memory(0, G), far]), 4);
    assert!(matches!(error, Error::PeerUnreachable { span, .. } if span == far.span));
    assert_eq!(error.errno(), Errno::EREMOTEIO);
    let long = refused(&device, &Pieces(vec![memory(0, 1 << 45)]), 4);
    assert_eq!(long, Error::SegmentRoom { room: 4, needed: 1 << 29 });
    // The domain's output has 48 bits: the second stage of spans is refused, the first taken back.
    let mut list = pages(100, 2);
    list.0.push(memory(1 << 50, G));
    assert!(matches!(refused(&device, &list, 101), Error::Domain(_)));
    assert_eq!(rig.iotlb.counters().sync_maps, 0);
    assert!((0..4096).all(|n| rig.reads(n * G).is_none()));
    assert!(rig.arena.tables() <= tables + 3, "no more than the tables on the way");
    // All IOVAs are free.
    let mut buf = room(101);
    let mapping = device.map_list(pages(100, 2), Direction::ToDevice, &mut buf).unwrap();
    let first = mapping.iovas();
    assert!(device.unmap_list(mapping).is_ok());
    let mapping = device.map_list(pages(100, 2), Direction::ToDevice, &mut buf).unwrap();
    assert_eq!(mapping.iovas(), first);
    assert!(device.unmap_list(mapping).is_ok());
}

#[test]
fn a_list_without_iovas_is_refused() {
    let rig = rig(Flush::Strict);
    let limits = DeviceLimits { last: (1 << 20) - 1, ..DeviceLimits::bits(44) };
    let config = DeviceConfig { limits, ..DeviceConfig::bits(44) };
    let device = Device::new(Arc::clone(&rig.domain), NoPool, config).unwrap();
    let error = refused(&device, &pages(256, 2), 256);
    assert!(matches!(error, Error::Iova(_)), "{error}");
    assert_eq!(error.errno(), Errno::ENOMEM);
}

#[test]
fn another_devices_list_is_neither_unmapped_nor_synced() {
    let rig = rig(Flush::Strict);
    let (device, other) = (rig.device(None, G), rig.device(None, G));
    let mut buf = room(3);
    let mapping = device.map_list(pages(3, 2), Direction::Bidirectional, &mut buf).unwrap();
    let foreign = Error::Foreign { addr: buf[0].addr };
    assert_eq!(other.sync_list_for_cpu(&mapping), Err(foreign));
    assert_eq!(other.sync_list_for_device(&mapping), Err(foreign));
    assert_eq!(other.segments(&mapping).map(|_| ()), Err(foreign));
    let failed = other.unmap_list(mapping).unwrap_err();
    assert_eq!(failed.error, foreign);
    assert!(buf.iter().all(|segment| rig.reads(segment.addr.get()).is_some()));
    assert!(device.unmap_list(failed.mapping.unwrap()).is_ok());
}

#[test]
fn a_list_survives_a_failure_of_every_step() {
    let rig = rig(Flush::Strict);
    let device = rig.device(Some(1 << 20), 1 << 16);
    // More runs than a stage has, gaps before boundaries, and registers in between.
    let mut list = pages(150, 3);
    for n in 0..4 {
        list.0.push(memory(0x8000_0000 + n * (1 << 24), 0x9_0000));
        list.0.push(Piece { span: span(0x1_0000_0000 + n * G, G), via: Via::HostBridge });
    }
    let mut buf = room(400);
    let (mut through, mut held) = (0, 0);
    let steps = rig.faults.sweep(|n| {
        match device.map_list(list.clone(), Direction::Bidirectional, &mut buf) {
            Ok(mapping) => {
                through += 1;
                let iovas = mapping.iovas().unwrap();
                match device.unmap_list(mapping) {
                    Ok(Unmapped::Released(memory)) => assert_eq!(memory, list),
                    Ok(Unmapped::Queued) => panic!("step {n}: the unmap is strict"),
                    Err(failed) => {
                        assert!(matches!(failed.error, Error::Quarantined { .. }));
                        assert!(failed.mapping.is_none());
                    }
                }
                let stale = rig.iotlb.stale_leaves(iovas);
                assert!(stale.is_empty() || rig.domain.waiting().1 > 0, "step {n}");
            }
            Err(refused) => match refused.memory {
                Some(memory) => assert_eq!(memory, list, "step {n}"),
                None => held += 1,
            },
        }
        if rig.domain.waiting().1 > 0 {
            assert!(rig.domain.flush().is_ok(), "step {n}: only once");
        }
        assert_eq!(rig.domain.waiting(), (0, 0), "step {n}");
        assert!((0..2048).all(|page| rig.reads(page * G).is_none()), "step {n}");
    });
    assert!(steps >= 4 && through > 0, "{steps} steps, {through} through, {held} held");
}

#[test]
fn nothing_is_joined_where_nothing_is_translated() {
    let ram = span(0, 1 << 40);
    let direct = Arc::new(Direct::<Pieces, _>::new(ram, Cpu::default()));
    let device = Device::new(direct, NoPool, config(Some(1 << 16), 5000)).unwrap();
    let list = Pieces(vec![memory(0x1_f000, 0x1000), memory(0x2_0000, 0x1000), memory(9, 6000)]);
    let mut buf = room(4);
    let mapping = device.map_list(list.clone(), Direction::ToDevice, &mut buf).unwrap();
    let expected = [
        segment(0x1_f000, 0x1000),
        segment(0x2_0000, 0x1000),
        segment(9, 5000),
        segment(5009, 1000),
    ];
    assert_eq!((mapping.iovas(), &buf[..]), (None, &expected[..]));
    let Ok(Unmapped::Released(memory)) = device.unmap_list(mapping) else { panic!() };
    assert_eq!(memory, list);
}

#[test]
fn caches_follow_a_list_that_is_not_coherent() {
    let rig = rig(Flush::Strict);
    let coherency = Coherency::NonCoherent;
    let config = DeviceConfig { coherency, ..config(None, 1 << 16) };
    let device = Device::new(Arc::clone(&rig.domain), NoPool, config).unwrap();
    let registers = Piece { span: span(0x9000_0000, G), via: Via::HostBridge };
    let list = Pieces(vec![memory(0x10_0100, 0x80), registers, memory(0x20_0000, G)]);
    let spans = [list.0[0].span, list.0[2].span];
    let done = |what| spans.map(|span| (what, span)).to_vec();
    let take = || core::mem::take(&mut *rig.cpu.0.lock());
    let mut buf = room(3);
    let mapping = device.map_list(list, Direction::Bidirectional, &mut buf).unwrap();
    assert_eq!(take(), done("written back"));
    assert!(device.sync_list_for_cpu(&mapping).is_ok());
    assert_eq!(take(), done("invalidated"));
    assert!(device.sync_list_for_device(&mapping).is_ok());
    assert_eq!(take(), done("written back"));
    assert!(device.unmap_list(mapping).is_ok());
    assert_eq!(take(), done("invalidated"));
}

#[test]
fn a_dense_list_may_begin_and_end_within_granules_and_needs_no_more_room_than_it_has_segments() {
    let rig = rig(Flush::Strict);
    let device = rig.device(Some(1 << 32), 4 * G);
    let mut list = pages(100, 2);
    list.0[0] = memory(0x0fff_f800, 0x800);
    list.0[99] = memory(0x9000_0000, 5);
    let (segments, _) = naive(&list.0, 0, 1 << 32, 4 * u128::from(G));
    let needed = segments.len();
    assert!(needed < 27, "{needed}");
    let error = refused(&device, &list, needed - 1);
    assert_eq!(error, Error::SegmentRoom { room: needed - 1, needed });
    for room_for in [needed, 100] {
        let mut buf = room(room_for);
        let mapping = device.map_list(list.clone(), Direction::ToDevice, &mut buf).unwrap();
        let base = mapping.iovas().unwrap().start().get();
        let (segments, granules) = naive(&list.0, base, 1 << 32, 4 * u128::from(G));
        assert_eq!((mapping.segment_count(), &buf[..needed]), (needed, &segments[..]));
        for (iova, paddr, _) in granules {
            assert_eq!(rig.reads(iova).map(|(at, _)| at), Some(paddr));
        }
        assert!(device.unmap_list(mapping).is_ok());
    }
    let untrusted = DeviceConfig { trust: Trust::Untrusted, ..*device.config() };
    let untrusted = Device::new(Arc::clone(&rig.domain), NoPool, untrusted).unwrap();
    let error = refused(&untrusted, &list, 100);
    assert!(matches!(error, Error::NoSlot { span, .. } if span == list.0[0].span), "{error}");
}
