//! Pools of all shapes: what can be mapped through them, and how they are asked.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dmaspan::dma::{Error, NoPool};
use dmaspan::swiotlb::SlotRequest;

use super::*;

for_all_granules!(
    the_longest_buffer_is_mapped_wherever_it_lies_and_a_longer_one_is_not_somewhere,
    slots_of_a_list_are_taken_under_one_lock_and_all_or_none,
    a_list_whose_slots_are_taken_together_is_refused_for_its_first_piece_without_one,
    a_closure_that_panics_on_its_memory_loses_no_slot,
    a_mask_that_reaches_no_slot_is_refused_by_where_they_begin,
);

/// A pool of so many bytes from `at` on, with slots of this size.
fn pool_at<const G: u32, H: DmaMemory>(
    bench: &Bench<G, H>,
    (at, bytes): (u64, u64),
    config: PoolConfig,
) -> Arc<Pool> {
    let slots = SimPoolMemory::new(Arc::clone(&bench.memory), vec![span(at, bytes)]).unwrap();
    Arc::new(Pool::new(slots, config, bench.host.clone()).unwrap())
}

/// Where the memory of other pools is.
fn beyond<const G: u32>() -> u64 {
    RAM + (64 << G)
}

fn the_longest_buffer_is_mapped_wherever_it_lies_and_a_longer_one_is_not_somewhere<const G: u32>() {
    let g = 1u64 << G;
    let bench = Bench::<G, Parts>::new(PoolConfig::new(1));
    // How many bytes, and slots of how many.
    for (number, (bytes, slot_bytes)) in [
        (g, g),
        (2 * g, g),
        (3 * g, g),
        (8 * g, 8 * g),
        (2 * g, 2 * g),
        (4 * g, 2 * g),
        (16 * g, 8 * g),
        (4 * g, g / 2),
    ]
    .into_iter()
    .enumerate()
    {
        let at = beyond::<G>() + 32 * g * u64::try_from(number).unwrap();
        let config = PoolConfig { slot_bytes, ..PoolConfig::new(1) };
        let pool = pool_at(&bench, (at, bytes), config);
        for keep_bits in [0, 0xff, g - 1] {
            let mut config = untrusted(DeviceConfig::bits(40));
            config.limits.keep_bits = keep_bits;
            let device = bench.translated(&pool, config);
            let longest = device.max_mapping_len();
            let maps = |len: u64| {
                [0, 1, g / 2, g - 2, g - 1].into_iter().all(|offset| {
                    let mapped =
                        device.map_single(bench.parts(&[(offset, len)]), Direction::ToDevice);
                    let is_mapped = mapped.is_ok();
                    drop(mapped.map(|mapping| released(device.unmap(mapping))));
                    is_mapped
                })
            };
            let some = [1, 2, g - 1, g, g + 1, g + 2, 2 * g - 2, 2 * g - 1, 2 * g, 3 * g, 5 * g];
            for len in some.into_iter().chain([longest]).filter(|len| *len <= longest.min(5 * g)) {
                assert!(len == 0 || maps(len), "{len:#x} of {longest:#x} with pool {number}");
            }
            let is_longest = longest > 5 * g || !maps(longest + 1);
            assert!(is_longest, "more than {longest:#x} with pool {number}, {keep_bits:#x}");
        }
        assert_eq!(pool.stats().used, 0);
    }
    let without = Device::new(Arc::clone(&bench.domain), NoPool, untrusted(DeviceConfig::bits(40)));
    assert_eq!(without.unwrap().max_mapping_len(), 0);
    let (sim, config) = (&bench.sim, untrusted(DeviceConfig::bits(40)));
    assert!(bench.translated(sim, config).max_mapping_len() > 1 << 38);
    assert_eq!((sim.granules(g), bench.pool.granules(g)), (16, 16));
    bench.check_end();
}

#[test]
fn granules_are_counted_that_lie_in_the_pool_as_a_whole() {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(RAM), BYTES, 12).unwrap());
    let mut next = RAM;
    for (at, bytes, slot_bytes, granules) in [
        (0, 0x8000, 2048, 0),
        (0x4000, 0x8000, 2048, 0),
        (0x8000, 0x1_0000, 2048, 0),
        (0x1000, 0x1_f000, 4096, 1),
        (0, 0x1_0000, 2048, 1),
        (0x8000, 0x3_0000, 0x8000, 2),
        (0, 0x4_0000, 0x4_0000, 1),
        (0, 0x4_0000, 0x2_0000, 2),
    ] {
        let span = span(next + at, bytes);
        next += 0x10_0000;
        let slots = SimPoolMemory::new(Arc::clone(&memory), vec![span]).unwrap();
        let config = PoolConfig { slot_bytes, ..PoolConfig::new(1) };
        let pool = Pool::new(slots, config, Host::default()).unwrap();
        assert_eq!(pool.granules(0x1_0000), granules, "{bytes:#x} at {at:#x}");
    }
}

/// A pool that counts how it is asked.
#[derive(Clone)]
struct Counting(Arc<Pool>, Arc<parking_lot::Mutex<(usize, usize)>>);

// SAFETY: the pool does everything.
unsafe impl BouncePool for Counting {
    type Slot = <Pool as BouncePool>::Slot;

    fn take(&self, original: dmaspan::dma::Original, request: &SlotRequest) -> Option<Self::Slot> {
        self.1.lock().0 += 1;
        BouncePool::take(&self.0, original, request)
    }

    fn take_all(
        &self,
        originals: impl Iterator<Item = dmaspan::dma::Original>,
        request: &SlotRequest,
        slots: &mut Vec<Self::Slot>,
    ) -> bool {
        self.1.lock().1 += 1;
        BouncePool::take_all(&self.0, originals, request, slots)
    }

    fn release(&self, slot: Self::Slot) {
        BouncePool::release(&self.0, slot);
    }

    fn span(&self, slot: &Self::Slot) -> Span {
        BouncePool::span(&self.0, slot)
    }

    fn copy(&self, slot: &Self::Slot, offset: u64, len: u64, to: dmaspan::dma::To) {
        BouncePool::copy(&self.0, slot, offset, len, to);
    }

    fn reach(&self) -> Option<Span> {
        BouncePool::reach(&self.0)
    }

    fn max_len(&self, request: &SlotRequest) -> u64 {
        BouncePool::max_len(&self.0, request)
    }
}

fn slots_of_a_list_are_taken_under_one_lock_and_all_or_none<const G: u32>() {
    let g = 1u64 << G;
    let bench = Bench::<G, Parts>::new(PoolConfig::new(1));
    let pool = Counting(Arc::clone(&bench.pool), Arc::default());
    let asked = || std::mem::take(&mut *pool.1.lock());
    let mut room = [Segment::default(); 64];
    let mut check = |device: &Device<Direct<Parts, Host>, Faulty<Counting>>, places: &[_]| {
        let (parts, direction) = (bench.parts(places), Direction::Bidirectional);
        let mapping = device.map_list(parts, direction, &mut room).unwrap();
        assert_eq!(mapping.bounced(), places.len());
        let dma = Arc::clone(&bench.memory);
        let read = |segment: &Segment| dma.read(segment.addr, segment.len).unwrap();
        let seen: Vec<_> = room[..mapping.segment_count()].iter().flat_map(read).collect();
        let parts = released(device.unmap_list(mapping));
        assert!(seen == parts.bytes());
    };
    let device = bench.beside(&pool, always(DeviceConfig::bits(40)));
    check(&device, &[(1, 30), (100, g), (0, g), (g - 1, 2)]);
    assert_eq!(asked(), (0, 1));
    check(&device, &[(1, 30)]);
    assert_eq!(asked(), (1, 0), "there is no other");
    let device = bench.beside(&pool, near::<G>());
    check(&device, &[(1, 30), (0, 20)]);
    assert_eq!(asked(), (0, 1));
    // Ends are taken one by one: they are not like whole pieces.
    let device = bench.translated(&pool, untrusted(DeviceConfig::bits(40)));
    let parts = bench.parts(&[(1, 3 * g), (7, 8)]);
    let mapping = device.map_list(parts, Direction::ToDevice, &mut room).unwrap();
    assert_eq!(asked(), (3, 0));
    drop(released(device.unmap_list(mapping)));
    bench.check_end();
}

fn a_list_whose_slots_are_taken_together_is_refused_for_its_first_piece_without_one<
    const G: u32,
>() {
    let g = 1u64 << G;
    let bench = Bench::<G, Parts>::new(PoolConfig { slot_bytes: g, ..PoolConfig::new(1) });
    let mut room = [Segment::default(); 64];
    let config = always(DeviceConfig::bits(40));
    let (real, sim) = (bench.translated(&bench.pool, config), bench.translated(&bench.sim, config));
    let mut places = vec![(0, g); 20];
    places[3] = (5, 2 * g);
    // It takes two granules.
    let parts = bench.parts(&places);
    let span = parts.spans()[15];
    let refused = real.map_list(parts, Direction::ToDevice, &mut room).unwrap_err();
    assert_eq!(refused.error, Error::NoSlot { span, len: g });
    assert_eq!(bench.pool.stats().used, 0);
    let parts = refused.memory.unwrap();
    let refused = sim.map_list(parts, Direction::ToDevice, &mut room).unwrap_err();
    assert_eq!(refused.error, Error::NoSlot { span, len: g });
    assert_eq!(room, [Segment::default(); 64]);
    bench.check_end();
}

fn a_closure_that_panics_on_its_memory_loses_no_slot<const G: u32>() {
    let g = 1u64 << G;
    let bench = Bench::<G, Parts>::new(PoolConfig::new(1));
    let device = bench.translated(&bench.sim, untrusted(DeviceConfig::bits(40)));
    for is_unlinked in [true, false] {
        let direction = Direction::FromDevice;
        let request = ReserveRequest { len: 4 * g, offset: 0, pieces: 3, direction };
        let mut reservation = device.reserve(request).unwrap();
        for n in 0..3 {
            device.link(&mut reservation, n * g, bench.parts(&[(0, 100)])).unwrap();
        }
        device.announce(&mut reservation).unwrap();
        assert_eq!(bench.sim.held(), 3);
        let panics = |_| panic!("of the driver");
        let ended = AssertUnwindSafe(|| {
            if is_unlinked {
                device.unlink(&mut reservation, 0, 3 * g, panics).unwrap();
            }
            device.destroy(reservation, panics).unwrap();
        });
        assert!(catch_unwind(ended).is_err());
        assert_eq!((bench.sim.held(), bench.sim.lost()), (0, 0));
    }
    bench.check_end();
}

fn a_mask_that_reaches_no_slot_is_refused_by_where_they_begin<const G: u32>() {
    let bench = Bench::<G, Parts>::new(PoolConfig::new(1));
    let mut config = always(DeviceConfig::bits(40));
    let lowest = RAM + (16 << G);
    config.limits.last = lowest - 1;
    let direct = Arc::clone(&bench.direct);
    let refused = Device::new(Arc::clone(&direct), Arc::clone(&bench.pool), config).unwrap_err();
    assert_eq!(refused, Error::Mask { last: lowest - 1, lowest });
    config.bounce = Bounce::AsNeeded;
    Device::new(direct, Arc::clone(&bench.pool), config).unwrap();
}
