use std::sync::Arc;

use dmaspan::Span;
use dmaspan::dma::DeviceLimits;

use super::*;

#[derive(Debug)]
struct OneThread;

impl Platform for OneThread {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        0
    }

    fn now(&self) -> u64 {
        0
    }
}

type Dma = UnwalkedDma<OneThread>;

const MEMORY: PhysAddr = PhysAddr::new(1 << 30);

fn piece(pages: u64) -> Piece {
    Piece::memory(Span::new(MEMORY, pages * 4096).unwrap())
}

fn dma(by: MappedBy, flush: Flush, table_bytes: u64) -> Dma {
    let config = DmaConfig { flush, ..DmaConfig::new(1) };
    let device = DeviceConfig { coherency: Coherency::Coherent, ..DeviceConfig::bits(32) };
    assert_eq!(device.limits, DeviceLimits::bits(32));
    UnwalkedDma::new(by, table_bytes, (config, device), OneThread).unwrap()
}

/// Domains for one way of mapping and for the other.
fn both(flush: Flush) -> [Dma; 2] {
    [MappedBy::Device, MappedBy::Calls].map(|by| dma(by, flush, 1 << 20))
}

/// Maps a buffer and unmaps it again, and says where the bytes at some offsets were meanwhile.
fn pair<const N: usize, M: Mapper>(
    dma: &Dma,
    mapper: &mut M,
    offsets: [u64; N],
) -> [Option<PhysAddr>; N] {
    let mapped = mapper.map().unwrap();
    let at = offsets.map(|offset| DmaAddr::new(mapper.addr(&mapped).get() + offset));
    let found = at.map(|addr| dma.found(addr, Access::Write));
    mapper.unmap(mapped).unwrap();
    assert_eq!(at.map(|addr| dma.found(addr, Access::Write)), [None; N]);
    found
}

fn told(work: impl FnOnce()) -> Told {
    let before = Told::by_this_thread();
    work();
    Told::by_this_thread().since(before)
}

#[test]
fn a_buffer_is_one_command_batched_and_one_for_each_page_otherwise() {
    let piece = piece(600);
    let [mut whole, mut pages] = both(Flush::Strict);
    let offsets = [0, 0x5123, 599 * 4096, 600 * 4096 - 1];
    let expected = offsets.map(|offset| Some(MEMORY.wrapping_add(offset)));
    let direction = Direction::Bidirectional;
    let batched = told(|| {
        let mut single = Single { dma: &whole, piece: &piece, direction };
        assert_eq!(pair(&whole, &mut single, offsets), expected);
    });
    assert_eq!(batched, Told { commands: 1, syncs: 1 });
    // A block of 2 MiB and 88 pages.
    let by_page = told(|| {
        let mut caller = Caller::new(&pages, slice::from_ref(&piece), direction, 256);
        assert_eq!(pair(&pages, &mut caller, offsets), expected);
    });
    assert_eq!(by_page, Told { commands: 89, syncs: 1 });
    whole.check_empty().unwrap();
    pages.check_empty().unwrap();
}

#[test]
fn a_list_is_one_command_and_pages_of_it_one_each_also_where_a_block_would_fit() {
    // Every second page; together a block of IOVAs.
    let page = |n: u64| Piece::memory(Span::new(MEMORY.wrapping_add(2 * n * 4096), 4096).unwrap());
    let pieces: Arc<[Piece]> = (0..512).map(page).collect();
    let [mut whole, mut pages] = both(Flush::Strict);
    let (offsets, last) = ([0, 511 * 4096], MEMORY.wrapping_add(2 * 511 * 4096));
    let direction = Direction::Bidirectional;
    let batched = told(|| {
        let segments = vec![Segment::default(); 512];
        let mut list = List { dma: &whole, pieces: &pieces, segments, direction };
        assert_eq!(pair(&whole, &mut list, offsets), [Some(MEMORY), Some(last)]);
        let len: u64 = list.segments.iter().map(|segment| segment.len).sum();
        assert_eq!(len, 512 * 4096);
    });
    assert_eq!(batched, Told { commands: 1, syncs: 1 });
    let by_page = told(|| {
        let mut caller = Caller::new(&pages, &pieces, direction, 256);
        assert_eq!(pair(&pages, &mut caller, offsets), [Some(MEMORY), Some(last)]);
    });
    assert_eq!(by_page, Told { commands: 512, syncs: 1 });
    whole.check_empty().unwrap();
    pages.check_empty().unwrap();
}

#[test]
fn what_waits_is_synced_by_256_and_not_free_before() {
    let piece = piece(2);
    let dma = dma(MappedBy::Calls, Flush::Lazy, 1 << 20);
    let mut caller = Caller::new(&dma, slice::from_ref(&piece), Direction::ToDevice, 256);
    let mut pair = || {
        let mapped = caller.map().unwrap();
        let addr = caller.addr(&mapped);
        caller.unmap(mapped).unwrap();
        addr
    };
    let mut addrs = Vec::new();
    assert_eq!(told(|| addrs.extend((0..255).map(|_| pair()))), Told::default());
    addrs.sort_unstable();
    addrs.dedup();
    assert_eq!(addrs.len(), 255);
    let mut last = None;
    assert_eq!(told(|| last = Some(pair())), Told { commands: 1, syncs: 1 });
    assert!(!addrs.contains(&last.unwrap()));
    addrs.extend(last);
    assert!(addrs.contains(&pair()));
}

#[test]
fn a_refused_mapping_leaves_nothing_and_a_foreign_one_is_refused() {
    let pieces = [piece(8)];
    // The root, and two tables below it.
    let mut small = dma(MappedBy::Calls, Flush::Strict, 3 * 4096);
    let other = dma(MappedBy::Calls, Flush::Strict, 1 << 20);
    let mut caller = Caller::new(&small, &pieces, Direction::ToDevice, 256);
    assert!(matches!(caller.map(), Err(Error::Domain(_))));
    let mapped = Caller::new(&other, &pieces, Direction::ToDevice, 256).map().unwrap();
    assert!(matches!(caller.unmap(mapped), Err(Error::Foreign { .. })));
    small.check_empty().unwrap();
}
