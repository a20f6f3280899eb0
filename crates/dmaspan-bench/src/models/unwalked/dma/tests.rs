use std::sync::Arc;

use dmaspan::dma::DeviceLimits;
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config};
use dmaspan::{Coherency, Span};

use super::*;
use dmaspan_sim::walker::arm_lpae::{ArmLpaeS1Walker, ArmS1WalkRegisters};
use dmaspan_sim::walker::{Access, Walker};

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

type Dma = UnwalkedDma<ArmLpaeS1<12>, OneThread>;

const MEMORY: PhysAddr = PhysAddr::new(1 << 30);

fn piece(pages: u64) -> Piece {
    Piece::memory(Span::new(MEMORY, pages * 4096).unwrap())
}

fn dma(flush: Flush, table_bytes: u64) -> Dma {
    let format = || ArmLpaeS1::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let config = DmaConfig { flush, ..DmaConfig::new(1) };
    let room = (PhysAddr::new(1 << 40), table_bytes);
    let device = DeviceConfig { coherency: Coherency::Coherent, ..DeviceConfig::bits(32) };
    assert_eq!(device.limits, DeviceLimits::bits(32));
    UnwalkedDma::new([format(), format()], room, (config, device), OneThread).unwrap()
}

fn walker(dma: &Dma, root: PhysAddr) -> ArmLpaeS1Walker {
    let registers = dma.format().registers(root);
    let (ttbr, tcr, mair) = (registers.ttbr, registers.tcr, registers.mair);
    ArmLpaeS1Walker::new(ArmS1WalkRegisters { ttbr, tcr, mair, ..Default::default() }).unwrap()
}

fn leads_to(dma: &Dma, root: PhysAddr, addr: u64) -> Option<PhysAddr> {
    let found = walker(dma, root).walk(dma.words(), Iova::new(addr), Access::Write);
    found.ok().map(|translation| translation.paddr)
}

fn told(work: impl FnOnce()) -> Told {
    let before = Told::by_this_thread();
    work();
    Told::by_this_thread().since(before)
}

#[test]
fn a_buffer_is_one_command_batched_and_one_for_each_page_otherwise() {
    let piece = piece(600);
    let mut dma = dma(Flush::Strict, 1 << 20);
    let batched = told(|| {
        let mapped = dma.map_single(&piece, Direction::Bidirectional).unwrap();
        let addr = mapped.addr().get();
        assert_eq!(leads_to(&dma, dma.root(), addr + 0x5123), Some(MEMORY.wrapping_add(0x5123)));
        dma.unmap(mapped).unwrap();
        assert_eq!(leads_to(&dma, dma.root(), addr), None);
    });
    assert_eq!(batched, Told { commands: 1, syncs: 1 });
    // A block of 2 MiB and 88 pages.
    let by_page = told(|| {
        let mut caller = dma.caller(256);
        let mapped = caller.map(slice::from_ref(&piece), Direction::Bidirectional).unwrap();
        let addr = mapped.addr().get();
        let last = MEMORY.wrapping_add(600 * 4096 - 1);
        assert_eq!(leads_to(&dma, dma.pages_root(), addr + 600 * 4096 - 1), Some(last));
        caller.unmap(mapped).unwrap();
        assert_eq!(leads_to(&dma, dma.pages_root(), addr), None);
        assert_eq!(leads_to(&dma, dma.pages_root(), addr + 599 * 4096), None);
    });
    assert_eq!(by_page, Told { commands: 89, syncs: 1 });
    dma.check_all_free().unwrap();
}

#[test]
fn a_list_is_one_command_and_pages_of_it_one_each_also_where_a_block_would_fit() {
    // Every second page; together a block of IOVAs.
    let page = |n: u64| Piece::memory(Span::new(MEMORY.wrapping_add(2 * n * 4096), 4096).unwrap());
    let pieces: Arc<[Piece]> = (0..512).map(page).collect();
    let mut dma = dma(Flush::Strict, 1 << 20);
    let mut segments = [Segment::default(); 512];
    let batched = told(|| {
        let mapped = dma.map_list(&pieces, Direction::Bidirectional, &mut segments).unwrap();
        let len: u64 = segments[..mapped.segment_count()].iter().map(|segment| segment.len).sum();
        assert_eq!(len, 512 * 4096);
        let addr = segments[0].addr.get();
        let last = MEMORY.wrapping_add(2 * 511 * 4096);
        assert_eq!(leads_to(&dma, dma.root(), addr + 511 * 4096), Some(last));
        dma.unmap_list(mapped).unwrap();
        assert_eq!(leads_to(&dma, dma.root(), addr), None);
    });
    assert_eq!(batched, Told { commands: 1, syncs: 1 });
    let by_page = told(|| {
        let mut caller = dma.caller(256);
        let mapped = caller.map(&pieces, Direction::Bidirectional).unwrap();
        let addr = mapped.addr().get();
        let last = MEMORY.wrapping_add(2 * 511 * 4096);
        assert_eq!(leads_to(&dma, dma.pages_root(), addr + 511 * 4096), Some(last));
        caller.unmap(mapped).unwrap();
        assert_eq!(leads_to(&dma, dma.pages_root(), addr + 511 * 4096), None);
    });
    assert_eq!(by_page, Told { commands: 512, syncs: 1 });
    dma.check_all_free().unwrap();
}

#[test]
fn what_waits_is_synced_by_256_and_not_free_before() {
    let piece = piece(2);
    let dma = dma(Flush::Lazy, 1 << 20);
    let mut caller = dma.caller(256);
    let mut pair = || {
        let mapped = caller.map(slice::from_ref(&piece), Direction::ToDevice).unwrap();
        let addr = mapped.addr();
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
    let mut small = dma(Flush::Strict, 4 * 4096);
    let mut caller = small.caller(256);
    assert!(matches!(caller.map(&pieces, Direction::ToDevice), Err(Error::Domain(_))));
    let other = dma(Flush::Strict, 1 << 20);
    let mapped = other.caller(256).map(&pieces, Direction::ToDevice).unwrap();
    assert!(matches!(caller.unmap(mapped), Err(Error::Foreign { .. })));
    small.check_all_free().unwrap();
}
