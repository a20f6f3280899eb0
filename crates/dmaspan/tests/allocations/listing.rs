//! Listings allocate nothing; a recorder that has no memory for a record says so.

use std::sync::Arc;

use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, Flush, NoPool, Piece, RawMemory};
use dmaspan::iommu::{Domain, Event, Observed, Observer, Recorder};
use dmaspan::platform::OneThread;
use dmaspan::{
    Account, Caller, Container, Direction, Iova, IovaRange, Label, PhysAddr, Prot, Span, UserAddr,
    UserRange,
};
use dmaspan_sim::allocator;
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};

use crate::allocated;

fn memory(page: u64) -> RawMemory {
    let span = Span::new(PhysAddr::new(0x8000_0000 + (page << 12)), 0x1000).unwrap();
    // SAFETY: no device uses it.
    #[expect(unsafe_code, reason = "memory that is promised to be left alone")]
    unsafe {
        RawMemory::new(Piece::memory(span))
    }
}

#[test]
fn a_listing_of_a_container_allocates_nothing() {
    let sim = Arc::new(SimMemory::new(PhysAddr::new(0), 0x1000, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&sim)));
    let container: Container<_, parking_lot::RawMutex> =
        Container::new(SimPinner::new(sim), Account::new(u64::MAX));
    let user = UserRange::from_len(UserAddr::new(0x1000), 0x1000).unwrap();
    for page in 0..100 {
        container.map(&space, user, Iova::new(page << 12), Prot::READ).unwrap();
    }
    assert_eq!(allocated(|| container.list().count()), (100, 0));
}

#[test]
fn listings_of_a_domain_and_its_recorder_allocate_nothing() {
    let who = Arc::new(Recorder::<parking_lot::RawMutex>::new());
    let (table, driver, _) = crate::table(1 << 22);
    let domain = Domain::new(table, Observed::new(driver, Arc::clone(&who))).unwrap();
    let config = DmaConfig { flush: Flush::Lazy, ..DmaConfig::new(1) };
    let domain = Arc::new(DmaDomain::new(domain, config, OneThread).unwrap());
    let device = Device::new(Arc::clone(&domain), NoPool, DeviceConfig::bits(40)).unwrap();
    let map = |page| device.map_single(memory(page), Direction::ToDevice).unwrap();
    let mut mapped: Vec<_> = (0..100).map(map).collect();
    for mapping in mapped.drain(50..) {
        let _unmapped = device.unmap(mapping).unwrap();
    }
    assert_eq!(allocated(|| who.list().count()), (50, 0));
    assert_eq!(allocated(|| domain.list_unmapped().count()), (50, 0));
    assert_eq!(allocated(|| domain.iovas().list().count()), (100, 0));
    for mapping in mapped {
        let _unmapped = device.unmap(mapping).unwrap();
    }
}

#[test]
fn a_recorder_without_memory_counts_what_it_misses_and_keeps_the_rest() {
    let page = |n: u64| IovaRange::from_len(Iova::new(n << 12), 0x1000).unwrap();
    let by = Caller { device: None, label: Label::caller() };
    let (mut failures, mut missed) = (0, 0);
    for nth in 1.. {
        let who = Recorder::<parking_lot::RawMutex>::new();
        let spans = [Span::new(PhysAddr::new(0), 0x1000).unwrap()];
        allocator::fail(nth);
        // Not in order, so that blocks are split.
        for n in (0..700).map(|n| n * 11 % 700) {
            who.event(&Event::Mapping { range: page(n), by });
            who.event(&Event::Mapped { range: page(n), spans: &spans, prot: Prot::READ });
        }
        let is_over = allocator::fail(0) > 0;
        let listed: Vec<_> = who.list().map(|record| record.range.start()).collect();
        assert!(listed.is_sorted());
        // A caller that was missed has left a record without one.
        let unnamed = who.list().filter(|record| record.by.is_none()).count() as u64;
        assert_eq!(listed.len() as u64 + who.missed() - unnamed, 700, "{nth}");
        (failures, missed) = (failures + u64::from(!is_over), missed + who.missed());
        if is_over {
            break;
        }
    }
    assert!(failures > 3 && missed >= failures, "{failures} failures, {missed} missed");
}
