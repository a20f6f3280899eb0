//! Mapping in two steps, with a device that looks on.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Error, Flush, NoPool, Piece,
    Reservation, ReserveRequest, Trust, Via,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, PageTable};
use dmaspan::iommu::{Domain, flush_queue};
use dmaspan::platform::OneThread;
use dmaspan::{Direction, DmaAddr, Iova, PhysAddr};
use dmaspan_sim::iotlb::{AbsentEntries, Iotlb, IotlbConfig};
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use crate::common::{arena, format, range, span, walker};

const PAGE: u64 = 4096;

/// Memory that counts how many of its kind there are.
#[derive(Debug)]
struct Counted {
    pieces: Vec<Piece>,
    alive: Arc<AtomicUsize>,
    mood: Arc<AtomicUsize>,
}

/// What [`Counted::mood`] is of memory that panics when it is asked for its pieces.
const PANICS: usize = 1;

impl Drop for Counted {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

// SAFETY: nobody touches the memory but devices that only look where it is.
unsafe impl DmaMemory for Counted {
    fn pieces(&self) -> &[Piece] {
        assert_ne!(self.mood.load(Ordering::Relaxed), PANICS, "planted");
        &self.pieces
    }
}

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
type Translation = DmaDomain<ArmLpaeS1<12>, Arena, Tlb, OneThread, Counted>;

struct Rig {
    device: Device<Translation>,
    translation: Arc<Translation>,
    iotlb: Tlb,
    alive: Arc<AtomicUsize>,
    mood: Arc<AtomicUsize>,
}

impl Rig {
    fn new(absent: AbsentEntries) -> Self {
        Self::over(arena(), absent)
    }

    fn over(arena: Arena, absent: AbsentEntries) -> Self {
        Self::configured(arena, absent, DmaConfig::new(1), DeviceConfig::bits(48))
    }

    /// One whose unmaps wait for a flush, which comes with so many of them.
    fn lazy(entries: usize, trust: Trust) -> Self {
        let queue = flush_queue::Config { entries, max_age: u64::MAX };
        let domain = DmaConfig { flush: Flush::Lazy, queue, ..DmaConfig::new(1) };
        let device = DeviceConfig { trust, ..DeviceConfig::bits(48) };
        Self::configured(arena(), AbsentEntries::NotCached, domain, device)
    }

    fn configured(
        arena: Arena,
        absent: AbsentEntries,
        domain_config: DmaConfig,
        device_config: DeviceConfig,
    ) -> Self {
        let table = PageTable::new(format::<12>(48, 48), arena).unwrap();
        let walker = walker(table.format(), table.root());
        let config = IotlbConfig { absent, ..IotlbConfig::default() };
        let iotlb = Iotlb::with_config(walker, table.memory().clone(), config);
        let domain = Domain::new(table, iotlb.clone()).unwrap();
        let translation = DmaDomain::new(domain, domain_config, OneThread).unwrap();
        let translation = Arc::new(translation);
        let device = Device::new(Arc::clone(&translation), NoPool, device_config).unwrap();
        Self { device, translation, iotlb, alive: Arc::default(), mood: Arc::default() }
    }

    fn memory(&self, paddr: u64, len: u64) -> Counted {
        self.alive.fetch_add(1, Ordering::Relaxed);
        let pieces = vec![Piece::memory(span(paddr, len))];
        let mood = Arc::clone(&self.mood);
        Counted { pieces, alive: Arc::clone(&self.alive), mood }
    }

    fn alive(&self) -> usize {
        self.alive.load(Ordering::Relaxed)
    }

    fn reserve(&self, len: u64, offset: u64, pieces: usize) -> Reservation<Translation> {
        let direction = Direction::Bidirectional;
        self.device.reserve(ReserveRequest { len, offset, pieces, direction }).unwrap()
    }

    fn link(
        &self,
        reservation: &mut Reservation<Translation>,
        offset: u64,
        paddr: u64,
        len: u64,
    ) -> Result<(), Error> {
        let linked = self.device.link(reservation, offset, self.memory(paddr, len));
        linked.map_err(|refused| refused.error)
    }

    /// Where a reservation is put.
    fn reserve_and_end(&self, len: u64) -> DmaAddr {
        let reservation = self.reserve(len, 0, 1);
        let addr = reservation.addr();
        self.device.destroy(reservation, drop).unwrap();
        addr
    }

    /// Where the device gets for a byte of a reservation.
    fn reaches(&self, reservation: &Reservation<Translation>, offset: u64) -> Option<u64> {
        let iova = Iova::new(reservation.addr().get() + offset);
        self.iotlb.translate(iova, Access::Write).ok().map(|hit| hit.paddr.get())
    }
}

#[test]
fn pieces_are_linked_one_by_one_and_announced_once() {
    let rig = Rig::new(AbsentEntries::Cached);
    let mut reservation = rig.reserve(0x3000 - 0x234, 0x234, 3);
    assert_eq!(reservation.addr().get() & 0xfff, 0x234);
    // The device was here before: it keeps that nothing was.
    assert_eq!(rig.reaches(&reservation, 0), None);
    rig.link(&mut reservation, 0, 0x8000_0234, 0x1000 - 0x234).unwrap();
    rig.link(&mut reservation, 0x1000 - 0x234, 0x9000_0000, 0x1000).unwrap();
    rig.link(&mut reservation, 0x2000 - 0x234, 0xa000_0000, 0x800).unwrap();
    let before = rig.iotlb.counters();
    rig.device.announce(&mut reservation).unwrap();
    assert_eq!(rig.iotlb.counters().sync_maps, before.sync_maps + 1);
    assert_eq!(rig.reaches(&reservation, 0), Some(0x8000_0234));
    assert_eq!(rig.reaches(&reservation, 0x1000 - 0x234), Some(0x9000_0000));
    assert_eq!(rig.reaches(&reservation, 0x27ff - 0x234), Some(0xa000_07ff));
    let mut released = Vec::new();
    rig.device.destroy(reservation, |memory| released.push(memory)).unwrap();
    let at: Vec<u64> = released.iter().map(|m| m.pieces[0].span.paddr().get()).collect();
    assert_eq!(at, [0x8000_0234, 0x9000_0000, 0xa000_0000]);
    let invalidations = rig.iotlb.counters().invalidations_by_range;
    assert_eq!(invalidations, before.invalidations_by_range + 1);
    assert_eq!(rig.iotlb.cached_leaves(), 0);
}

#[test]
fn a_part_is_unlinked_with_one_sync_and_its_place_can_be_used_again() {
    let rig = Rig::new(AbsentEntries::NotCached);
    let mut reservation = rig.reserve(4 * PAGE, 0, 4);
    for n in 0..4 {
        rig.link(&mut reservation, n * PAGE, 0x8000_0000 + 2 * n * PAGE, PAGE).unwrap();
    }
    rig.device.announce(&mut reservation).unwrap();
    (0..4).for_each(|n| assert!(rig.reaches(&reservation, n * PAGE).is_some()));
    let mut released = 0;
    rig.device.unlink(&mut reservation, PAGE, 2 * PAGE, |_| released += 1).unwrap();
    assert_eq!((released, rig.alive(), reservation.linked()), (2, 2, 2));
    assert_eq!(rig.iotlb.counters().invalidations_by_range, 1);
    let reached = [0, 1, 2, 3].map(|n| rig.reaches(&reservation, n * PAGE).is_some());
    assert_eq!(reached, [true, false, false, true]);
    rig.link(&mut reservation, PAGE, 0xb000_0000, 2 * PAGE).unwrap();
    assert_eq!(rig.reaches(&reservation, 2 * PAGE), None, "it was not announced");
    rig.device.announce(&mut reservation).unwrap();
    assert_eq!(rig.reaches(&reservation, 2 * PAGE), Some(0xb000_1000));
    rig.device.destroy(reservation, drop).unwrap();
    assert_eq!(rig.alive(), 0);
}

#[test]
fn what_does_not_fit_its_place_is_refused_and_given_back() {
    let rig = Rig::new(AbsentEntries::NotCached);
    let mut reservation = rig.reserve(4 * PAGE, 0, 2);
    rig.link(&mut reservation, PAGE, 0x8000_0000, PAGE).unwrap();
    let link = |reservation: &mut _, offset, paddr, len| rig.link(reservation, offset, paddr, len);
    let refused = [
        (link(&mut reservation, PAGE, 0x9000_0000, PAGE), "overlap a link, and a link is not cut"),
        (link(&mut reservation, 0, 0x9000_0000, PAGE + 1), "a link is not cut"),
        (link(&mut reservation, 3 * PAGE, 0x9000_0000, PAGE + 1), "are not within"),
        (link(&mut reservation, u64::MAX, 0x9000_0fff, 1), "are not within"),
        (link(&mut reservation, 2 * PAGE, 0x9000_0010, 16), "does not lie in its granule"),
    ];
    for (result, why) in refused {
        let said = result.unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
    }
    let direction = Direction::Bidirectional;
    let request = ReserveRequest { len: 1, offset: PAGE, pieces: 1, direction };
    assert!(matches!(rig.device.reserve(request), Err(Error::Misplaced { .. })));
    let request = ReserveRequest { len: 0, offset: 0, pieces: 1, direction };
    assert!(matches!(rig.device.reserve(request), Err(Error::Iova(_))));
    let mut peer = rig.memory(0x9000_0000, PAGE);
    peer.pieces[0].via = Via::Bus;
    let error = rig.device.link(&mut reservation, 0, peer).unwrap_err().error;
    assert!(matches!(error, Error::NotTranslated { .. }));
    rig.link(&mut reservation, 3 * PAGE, 0x9000_0000, PAGE).unwrap();
    let error = rig.link(&mut reservation, 0, 0x9000_0000, PAGE).unwrap_err();
    assert_eq!(error, Error::NoRoom { pieces: 3 });
    let unlink =
        |reservation: &mut _, offset, len| rig.device.unlink(reservation, offset, len, drop);
    let cuts = Error::CutsLink { offset: PAGE, len: PAGE };
    assert_eq!(unlink(&mut reservation, PAGE + 1, PAGE), Err(cuts));
    assert!(unlink(&mut reservation, PAGE, 4 * PAGE).is_err());
    assert!(unlink(&mut reservation, 0, 0).is_err());
    unlink(&mut reservation, 0, PAGE).unwrap();
    assert_eq!((rig.alive(), reservation.linked()), (2, 2), "what was refused was given back");
    rig.device.destroy(reservation, drop).unwrap();
    assert_eq!((rig.alive(), rig.iotlb.cached_leaves()), (0, 0));
}

#[test]
fn another_device_refuses_a_reservation() {
    let rig = Rig::new(AbsentEntries::NotCached);
    let config = DeviceConfig::bits(48);
    let other = Device::new(Arc::clone(&rig.translation), NoPool, config).unwrap();
    let mut reservation = rig.reserve(PAGE, 0, 1);
    let foreign = Error::Foreign { addr: reservation.addr() };
    let memory = rig.memory(0x8000_0000, PAGE);
    assert_eq!(other.link(&mut reservation, 0, memory).unwrap_err().error, foreign);
    assert_eq!(other.announce(&mut reservation), Err(foreign));
    assert_eq!(other.unlink(&mut reservation, 0, PAGE, drop), Err(foreign));
    let failed = other.destroy(reservation, drop).unwrap_err();
    assert_eq!(failed.error, foreign);
    rig.device.destroy(failed.reservation.unwrap(), drop).unwrap();
}

#[test]
fn what_hardware_does_not_forget_is_kept_until_it_does() {
    let rig = Rig::new(AbsentEntries::NotCached);
    let mut reservation = rig.reserve(2 * PAGE, 0, 2);
    rig.link(&mut reservation, 0, 0x8000_0000, 2 * PAGE).unwrap();
    rig.device.announce(&mut reservation).unwrap();
    assert!(rig.reaches(&reservation, PAGE).is_some());
    rig.iotlb.fail_next_invalidations(1000);
    let unlinked = rig.device.unlink(&mut reservation, 0, 2 * PAGE, drop);
    assert!(matches!(unlinked, Err(Error::Quarantined { .. })));
    let failed = rig.device.destroy(reservation, drop).unwrap_err();
    assert!(matches!(failed.error, Error::Quarantined { .. }));
    assert_eq!(rig.alive(), 1);
    let reservation = failed.reservation.unwrap();
    assert_eq!(rig.reaches(&reservation, PAGE), Some(0x8000_1000), "it still does");
    rig.iotlb.fail_next_invalidations(0);
    rig.device.destroy(reservation, drop).unwrap();
    assert_eq!((rig.alive(), rig.iotlb.cached_leaves()), (0, 0));
}

#[test]
fn a_reservation_that_hardware_was_not_told_of_has_nothing_mapped() {
    let rig = Rig::new(AbsentEntries::Cached);
    let mut reservation = rig.reserve(PAGE, 0, 1);
    rig.link(&mut reservation, 0, 0x8000_0000, PAGE).unwrap();
    rig.iotlb.fail_next_sync_maps(1);
    assert!(matches!(rig.device.announce(&mut reservation), Err(Error::Domain(_))));
    assert_eq!(rig.reaches(&reservation, 0), None);
    assert_eq!(rig.alive(), 1, "the reservation keeps it");
    rig.device.destroy(reservation, drop).unwrap();
    assert_eq!(rig.alive(), 0);
}

#[test]
fn a_withdrawn_reservation_gives_memory_back_and_takes_none() {
    for fails in [0, 1] {
        let rig = Rig::new(AbsentEntries::Cached);
        let mut reservation = rig.reserve(3 * PAGE, 0, 3);
        rig.link(&mut reservation, 0, 0x8000_0000, PAGE).unwrap();
        rig.link(&mut reservation, PAGE, 0x9000_0000, PAGE).unwrap();
        rig.iotlb.fail_next_sync_maps(1);
        rig.iotlb.fail_next_invalidations(fails);
        rig.device.announce(&mut reservation).unwrap_err();
        let withdrawn = Error::Withdrawn { addr: reservation.addr() };
        assert_eq!(rig.link(&mut reservation, 2 * PAGE, 0xa000_0000, PAGE), Err(withdrawn));
        assert_eq!(rig.device.announce(&mut reservation), Err(withdrawn));
        assert_eq!((rig.alive(), reservation.linked()), (2, 2));
        rig.device.unlink(&mut reservation, 0, PAGE, drop).unwrap();
        assert_eq!((rig.alive(), reservation.linked()), (1, 1));
        rig.device.destroy(reservation, drop).unwrap();
        assert_eq!((rig.alive(), rig.translation.waiting()), (0, (0, 0)));
    }
}

#[test]
fn an_announcement_without_memory_for_tables_keeps_all_pieces_for_the_next_one() {
    // Of those that are left beside the upper levels, the first reservation needs three and the
    // second one four.
    let arena = Arena::new(PhysAddr::new(0x4000_0000), 8 * PAGE);
    let rig = Rig::over(arena, AbsentEntries::Cached);
    let link = |reservation: &mut _, pieces| {
        for n in 0..pieces {
            rig.link(reservation, n * LARGE, 0x8000_0000 + n * LARGE, PAGE).unwrap();
        }
    };
    let mut first = rig.reserve(4 * LARGE, 0, 3);
    link(&mut first, 3);
    rig.device.announce(&mut first).unwrap();
    let mut second = rig.reserve(4 * LARGE, 0, 4);
    link(&mut second, 4);
    for _ in 0..2 {
        let error = rig.device.announce(&mut second).unwrap_err();
        assert!(matches!(error, Error::Domain(_)), "{error}");
        assert_eq!((rig.alive(), second.linked()), (7, 4));
        assert!((0..3).all(|n| rig.reaches(&first, n * LARGE).is_some()));
    }
    rig.device.destroy(first, drop).unwrap();
    rig.device.announce(&mut second).unwrap();
    let reached = [0, 1, 2, 3].map(|n| rig.reaches(&second, n * LARGE));
    assert_eq!(reached, [0, 1, 2, 3].map(|n| Some(0x8000_0000 + n * LARGE)));
    rig.device.destroy(second, drop).unwrap();
    assert_eq!((rig.alive(), rig.iotlb.cached_leaves()), (0, 0));
}

#[test]
fn pieces_in_any_order_and_in_several_announcements_are_mapped_where_they_were_linked() {
    const PIECES: u64 = 150;
    let rig = Rig::new(AbsentEntries::Cached);
    let mut reservation = rig.reserve(PIECES * PAGE, 0, 150);
    let at = |n: u64| (n * PAGE, 0x8000_0000 + 3 * n * PAGE);
    // Every seventh, again and again: before what is there, behind it and in between. More than a
    // call of the table takes, with gaps and without.
    for step in 0..7 {
        for n in (0..PIECES).filter(|n| (n * 3) % 7 == step) {
            rig.link(&mut reservation, at(n).0, at(n).1, PAGE).unwrap();
            assert_eq!(rig.reaches(&reservation, at(n).0), None);
        }
        rig.device.announce(&mut reservation).unwrap();
        if step == 3 {
            // What is mapped and what is not lie as they did, behind what is gone.
            rig.device.unlink(&mut reservation, 0, 20 * PAGE, drop).unwrap();
        }
        for n in (0..PIECES).filter(|n| (n * 3) % 7 <= step) {
            let is_gone = n < 20 && (n * 3) % 7 <= 3 && step >= 3;
            let expected = Some(at(n).1).filter(|_| !is_gone);
            assert_eq!(rig.reaches(&reservation, at(n).0), expected, "{n} after {step}");
        }
    }
    let (left, mut released) = (reservation.linked(), 0);
    rig.device.destroy(reservation, |_| released += 1).unwrap();
    assert_eq!((released, rig.alive()), (left, 0));
}

#[test]
fn destroying_frees_the_tables_that_unlinking_left_empty() {
    let rig = Rig::new(AbsentEntries::NotCached);
    let mut reservation = rig.reserve(4 * LARGE, 0, 4);
    for n in 0..4 {
        rig.link(&mut reservation, n * LARGE, 0x8000_0000 + n * LARGE, PAGE).unwrap();
    }
    rig.device.announce(&mut reservation).unwrap();
    let linked = rig.iotlb.tables().tables();
    for n in 0..4 {
        rig.device.unlink(&mut reservation, n * LARGE, PAGE, drop).unwrap();
    }
    assert_eq!(rig.iotlb.tables().tables(), linked);
    rig.device.destroy(reservation, drop).unwrap();
    let left = rig.iotlb.tables().tables();
    assert!(left + 4 <= linked, "{left} of {linked} tables");
}

#[test]
fn a_dropped_reservation_leaks_its_memory() {
    let rig = Rig::new(AbsentEntries::NotCached);
    let mut reservation = rig.reserve(PAGE, 0, 1);
    rig.link(&mut reservation, 0, 0x8000_0000, PAGE).unwrap();
    rig.device.announce(&mut reservation).unwrap();
    let addr = reservation.addr();
    drop(reservation);
    assert_eq!(rig.alive(), 1);
    let hit = rig.iotlb.translate(Iova::new(addr.get()), Access::Read).unwrap();
    assert_eq!(hit.paddr.get(), 0x8000_0000);
    assert_ne!(rig.reserve(PAGE, 0, 1).addr(), addr, "nobody else gets its addresses");
}

#[test]
fn memory_that_panics_when_a_reservation_of_it_is_dropped_leaks() {
    for pieces in [1, 2] {
        let rig = Rig::new(AbsentEntries::NotCached);
        let mut reservation = rig.reserve(PAGE, 0, pieces);
        rig.link(&mut reservation, 0, 0x8000_0000, PAGE).unwrap();
        rig.device.announce(&mut reservation).unwrap();
        rig.mood.store(PANICS, Ordering::Relaxed);
        let dropped = panic::catch_unwind(AssertUnwindSafe(|| drop(reservation)));
        assert!(dropped.is_err(), "it was asked for its pieces");
        assert_eq!(rig.alive(), 1, "a device reaches it");
    }
}

const LARGE: u64 = 2 << 20;

/// Destroys a reservation whose tables were detached but not synced: hardware has to forget them
/// before memory is released.
fn assert_settled_by_destroy(rig: &Rig, reservation: Reservation<Translation>) {
    let all = range(0, 1 << 48);
    assert_ne!(rig.iotlb.stale_links(all), [], "hardware still has a table");
    rig.device.destroy(reservation, |_| assert_eq!(rig.iotlb.stale_links(all), [])).unwrap();
    assert_eq!((rig.alive(), rig.iotlb.cached_leaves()), (0, 0));
}

#[test]
fn a_failed_map_that_was_not_synced_is_settled_by_the_end() {
    let rig = Rig::new(AbsentEntries::NotCached);
    let mut reservation = rig.reserve(2 * LARGE, 0, 2);
    // A table without entries stays where the next piece is to have a large leaf.
    rig.link(&mut reservation, 0, 0x8000_0000, PAGE).unwrap();
    rig.device.announce(&mut reservation).unwrap();
    assert!(rig.reaches(&reservation, 0).is_some());
    rig.device.unlink(&mut reservation, 0, PAGE, drop).unwrap();
    rig.link(&mut reservation, 0, 0x9000_0000, LARGE).unwrap();
    rig.iotlb.fail_next_invalidations(1);
    let error = rig.device.announce(&mut reservation).unwrap_err();
    assert!(matches!(error, Error::Quarantined { .. }), "{error}");
    assert_settled_by_destroy(&rig, reservation);
}

#[test]
fn an_announcement_that_was_not_taken_back_is_settled_by_the_end() {
    let rig = Rig::new(AbsentEntries::Cached);
    let mut reservation = rig.reserve(2 * LARGE, 0, 2);
    // By pages: large leaves lie otherwise.
    rig.link(&mut reservation, 0, 0x8000_1000, LARGE).unwrap();
    rig.device.announce(&mut reservation).unwrap();
    assert!(rig.reaches(&reservation, 0).is_some());
    rig.link(&mut reservation, LARGE, 0x9000_1000, LARGE).unwrap();
    rig.iotlb.fail_next_sync_maps(1);
    rig.iotlb.fail_next_invalidations(1);
    let announced = rig.device.announce(&mut reservation);
    assert!(matches!(announced, Err(Error::Quarantined { .. })));
    assert_settled_by_destroy(&rig, reservation);
}

#[test]
fn an_unlink_that_was_not_synced_is_settled_by_the_end() {
    let rig = Rig::new(AbsentEntries::NotCached);
    let mut reservation = rig.reserve(LARGE, 0, 1);
    rig.link(&mut reservation, 0, 0x8000_1000, LARGE).unwrap();
    rig.device.announce(&mut reservation).unwrap();
    assert!(rig.reaches(&reservation, 0).is_some());
    rig.iotlb.fail_next_invalidations(1);
    let unlinked = rig.device.unlink(&mut reservation, 0, LARGE, drop);
    assert!(matches!(unlinked, Err(Error::Quarantined { .. })));
    assert_settled_by_destroy(&rig, reservation);
}

#[test]
fn destroyed_reservations_leave_their_addresses_to_the_next_ones() {
    let rig = Rig::new(AbsentEntries::NotCached);
    let config = DeviceConfig::bits(16);
    let device = Device::new(Arc::clone(&rig.translation), NoPool, config).unwrap();
    let direction = Direction::Bidirectional;
    for _ in 0..100 {
        let request = ReserveRequest { len: 4 * PAGE, offset: 0, pieces: 1, direction };
        let mut reservation = device.reserve(request).unwrap();
        device.link(&mut reservation, PAGE, rig.memory(0x8000_0000, PAGE)).unwrap();
        device.destroy(reservation, drop).unwrap();
    }
    assert_eq!(rig.translation.iovas().stats().live, 0);
}

/// Three pages that the device has used.
fn used(rig: &Rig) -> Reservation<Translation> {
    let mut reservation = rig.reserve(3 * PAGE, 0, 3);
    for n in 0..3 {
        rig.link(&mut reservation, n * PAGE, 0x8000_0000 + 2 * n * PAGE, PAGE).unwrap();
    }
    rig.device.announce(&mut reservation).unwrap();
    assert!((0..3).all(|n| rig.reaches(&reservation, n * PAGE).is_some()));
    reservation
}

#[test]
fn a_lazy_reservation_is_one_entry_of_the_queue_which_has_its_memory_until_the_flush() {
    let rig = Rig::lazy(256, Trust::Trusted);
    let reservation = used(&rig);
    let at = reservation.addr();
    rig.device.destroy(reservation, |_| panic!("it is not released yet")).unwrap();
    assert_eq!((rig.alive(), rig.translation.waiting()), (3, (1, 0)));
    let other = rig.reserve(3 * PAGE, 0, 3);
    assert_ne!(other.addr(), at, "the addresses are not free either");
    rig.translation.flush().unwrap();
    assert_eq!((rig.alive(), rig.translation.waiting()), (0, (0, 0)));
    assert_eq!(rig.iotlb.cached_leaves(), 0);
    assert_eq!(rig.reserve_and_end(3 * PAGE), at, "they are free again");
    rig.device.destroy(other, drop).unwrap();
}

#[test]
fn a_lazy_reservation_that_hardware_does_not_forget_is_in_quarantine_with_its_memory() {
    let rig = Rig::lazy(1, Trust::Trusted);
    let reservation = used(&rig);
    rig.iotlb.fail_next_invalidations(1000);
    let failed = rig.device.destroy(reservation, |_| panic!("a device may use it")).unwrap_err();
    assert!(matches!(failed.error, Error::Quarantined { .. }));
    assert!(failed.reservation.is_none());
    assert_eq!((rig.alive(), rig.translation.waiting()), (3, (0, 1)));
    assert!(rig.translation.flush().is_err());
    assert_eq!(rig.alive(), 3);
    rig.iotlb.fail_next_invalidations(0);
    rig.translation.flush().unwrap();
    assert_eq!((rig.alive(), rig.translation.waiting()), (0, (0, 0)));
}

#[test]
fn a_reservation_of_an_untrusted_device_is_forgotten_before_its_memory_is_released() {
    let rig = Rig::lazy(256, Trust::Untrusted);
    let reservation = used(&rig);
    let mut released = 0;
    let forgotten = |_| {
        assert_eq!(rig.iotlb.cached_leaves(), 0);
        released += 1;
    };
    rig.device.destroy(reservation, forgotten).unwrap();
    assert_eq!((released, rig.alive(), rig.translation.waiting()), (3, 0, (0, 0)));
}
