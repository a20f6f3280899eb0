//! Accesses that leave a mapping for its neighbour, by whoever mapped both.

use dmaspan::container::MapRequest;
use dmaspan::{Account, Container, UserAddr, UserRange};
use dmaspan_sim::bounce::SimPool;
use dmaspan_sim::coherent::SimCoherent;
use dmaspan_sim::fault::Faults;
use dmaspan_sim::memory::{SimPinner, SimSpace};
use dmaspan_sim::sanitizer::Neighbours;

use super::*;

/// Memory of any pieces, which there is none of.
struct Pieces(Vec<Piece>);

#[expect(unsafe_code, reason = "a promise about memory that there is none of")]
// SAFETY: the addresses are made up: there is no memory.
unsafe impl DmaMemory for Pieces {
    fn pieces(&self) -> &[Piece] {
        &self.0
    }
}

/// The number of errors, all of which are of an access into the next mapping.
fn into_next(sanitizer: &Sanitizer) -> usize {
    let errors = sanitizer.errors();
    let is_it = |kind: &FindingKind| matches!(kind, FindingKind::IntoNext { .. });
    assert!(kinds(sanitizer).iter().all(is_it), "{sanitizer}");
    errors.len()
}

/// Of sorted places of so many bytes, two side by side.
fn side_by_side(mut at: Vec<u64>, len: u64) -> (u64, u64) {
    at.sort_unstable();
    let pair = at.windows(2).find(|pair| pair[1] == pair[0] + len);
    pair.map(|pair| (pair[0], pair[1])).expect("the allocator packs them")
}

#[test]
fn a_packet_longer_than_its_buffer_is_found_where_the_next_packet_is_mapped_behind_it() {
    let (sanitizer, _, _, device) = dma(Flush::Strict);
    let map = |n: u64| {
        let memory = memory(&sanitizer, frames(2 * n, 1));
        device.map_single(memory, Direction::FromDevice).unwrap()
    };
    let packets: Vec<_> = (0..8).map(map).collect();
    let (first, next) = side_by_side(packets.iter().map(|m| m.addr().get()).collect(), PAGE);
    sanitizer.on_dma(Iova::new(first), PAGE, Access::Write);
    assert_eq!(sanitizer.found(), 0);
    sanitizer.on_dma(Iova::new(first), PAGE + 60, Access::Write);
    assert_eq!(into_next(&sanitizer), 1);
    assert_eq!(sanitizer.findings()[0].iovas, IovaRange::from_len(Iova::new(next), 60).unwrap());
    packets.into_iter().for_each(|packet| drop(device.unmap(packet).unwrap()));
}

#[test]
fn a_list_and_a_reservation_are_one_buffer_each_however_many_calls_mapped_them() {
    let (sanitizer, _, _, device) = dma(Flush::Strict);
    let direction = Direction::FromDevice;
    // More runs than one call of the table maps.
    let (of_lists, _, _, lists) = dma_of::<Pieces>(Flush::Strict);
    let pieces = Pieces((0..200).map(|n| Piece::memory(frames(2 * n, 1))).collect());
    let mut segments = [Segment::default(); 200];
    let list = lists.map_list(pieces, direction, &mut segments).unwrap();
    of_lists.on_dma(Iova::new(segments[0].addr.get()), 200 * PAGE, Access::Write);
    assert_eq!(of_lists.found(), 0, "{of_lists}");
    let is_map = |of: &Record| matches!(of.op, Op::Map { .. });
    of_lists.on_dma(Iova::new(segments[0].addr.get()), 201 * PAGE, Access::Write);
    let found = of_lists.findings();
    assert!(found[0].history.iter().any(is_map), "it has several");
    drop(lists.unmap_list(list).unwrap());

    let request = ReserveRequest { len: 16 * PAGE, offset: 0, pieces: 4, direction };
    let mut reservation = device.reserve(request).unwrap();
    for (n, offset) in [(0, 0), (1, 1), (2, 2)] {
        let piece = memory(&sanitizer, frames(1000 + 2 * n, 1));
        device.link(&mut reservation, offset * PAGE, piece).unwrap();
        device.announce(&mut reservation).unwrap();
    }
    let at = Iova::new(reservation.addr().get());
    sanitizer.on_dma(at, 3 * PAGE, Access::Write);
    // A link that goes, and comes again.
    device.unlink(&mut reservation, PAGE, PAGE, drop).unwrap();
    device.link(&mut reservation, PAGE, memory(&sanitizer, frames(1010, 1))).unwrap();
    device.announce(&mut reservation).unwrap();
    sanitizer.on_dma(at, 3 * PAGE, Access::Write);
    assert_eq!(sanitizer.found(), 0, "{sanitizer}");
    device.destroy(reservation, drop).unwrap();
}

#[test]
fn the_bounced_ends_of_a_buffer_are_of_it_and_what_coherent_memory_lies_behind_is_not() {
    let (sanitizer, _, domain, _) = dma(Flush::Strict);
    let ram = Arc::new(SimMemory::new(PhysAddr::new(1 << 32), 256 * PAGE, 12).unwrap());
    let slots = SimPool::new(Arc::clone(&ram), frames(0, 64)).unwrap();
    let config = DeviceConfig { trust: Trust::Untrusted, ..DeviceConfig::bits(40) };
    let device = Device::new(domain, slots, config).unwrap();
    let device =
        device.with_coherent(Arc::new(SimCoherent::new(Arc::clone(&ram), &Faults::none())));
    let span = Span::new(PhysAddr::new((1 << 32) + 100 * PAGE + 0x100), 3 * PAGE).unwrap();
    let buffer = device.map_single(memory(&sanitizer, span), Direction::FromDevice).unwrap();
    assert!(buffer.is_bounced());
    sanitizer.on_dma(Iova::new(buffer.addr().get()), 3 * PAGE, Access::Write);
    assert_eq!(sanitizer.found(), 0, "{sanitizer}");
    drop(device.unmap(buffer).unwrap());

    let rings: Vec<_> = (0..4).map(|_| device.alloc(PAGE, PAGE).unwrap()).collect();
    let (first, _) = side_by_side(rings.iter().map(|ring| ring.addr().get()).collect(), PAGE);
    sanitizer.on_dma(Iova::new(first), PAGE, Access::Write);
    assert_eq!(sanitizer.found(), 0, "{sanitizer}");
    sanitizer.on_dma(Iova::new(first), PAGE + 4, Access::Read);
    assert_eq!(into_next(&sanitizer), 1);
    rings.into_iter().for_each(|ring| device.free(ring).unwrap());
}

#[test]
fn neighbours_in_a_container_are_one_guests_memory_unless_its_user_says_otherwise() {
    let run = |neighbours| {
        let sanitizer =
            Sanitizer::new(SanitizerConfig { neighbours, ..SanitizerConfig::default() });
        let (table, iotlb) = table();
        let domain = Domain::new(table, iotlb.sanitized(&sanitizer)).unwrap();
        let ram = Arc::new(SimMemory::new(PhysAddr::new(1 << 32), 64 * PAGE, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&ram)));
        let backing: Vec<_> = (0..8).map(|_| ram.allocate(PAGE, 12).unwrap()).collect();
        let user = UserAddr::new(1 << 40);
        space.map(user, &backing).unwrap();
        let container: Container<_, parking_lot::RawMutex> =
            Container::with_domain(SimPinner::new(ram), domain, Account::new(u64::MAX));
        for page in [0, 1] {
            let at = UserRange::from_len(user.wrapping_add(page * 4 * PAGE), 4 * PAGE).unwrap();
            let iova = Iova::new((16 + 4 * page) * PAGE);
            container.map_request(&MapRequest::new(&space, at, iova, Prot::READ_WRITE)).unwrap();
        }
        // Within the first, and over both.
        sanitizer.on_dma(Iova::new(16 * PAGE), 4 * PAGE, Access::Write);
        assert_eq!(sanitizer.found(), 0, "{sanitizer}");
        sanitizer.on_dma(Iova::new(16 * PAGE), 8 * PAGE, Access::Write);
        let found = into_next(&sanitizer);
        container.unmap_all().unwrap();
        found
    };
    assert_eq!(run(Neighbours::ByOwner), 0);
    assert_eq!(run(Neighbours::Joined), 0);
    assert_eq!(run(Neighbours::Apart), 1);
}
