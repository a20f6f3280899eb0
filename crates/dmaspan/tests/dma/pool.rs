//! Devices with the pool of this crate beside the one that tries every place.

use std::sync::Arc;

use dmaspan::dma::{
    Attrs, Bounce, BouncePool, Device, DeviceConfig, Direct, DmaConfig, DmaDomain, DmaMemory, Fill,
    Piece, ReserveRequest, Segment, Translation, Unmapped,
};
use dmaspan::io_pgtable::PageTable;
use dmaspan::iommu::Domain;
use dmaspan::swiotlb::{self, PoolConfig};
use dmaspan::{Direction, DmaAddr, PhysAddr, Span};
use dmaspan_sim::bounce::SimPool;
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::SimMemory;
use dmaspan_sim::pool_memory::SimPoolMemory;

use crate::common::{arena, for_all_granules, format, span, walker};
use crate::rig::{BYTES, Buffer, Dma, Host, RAM, Tlb, Translated, pattern, untrusted};

mod failures;
mod leases;
mod limits;
mod model;
mod written;

type Pool = swiotlb::Pool<SimPoolMemory, Host>;

/// Buffers as one memory, a piece each.
#[derive(Debug)]
struct Parts {
    buffers: Vec<Buffer>,
    pieces: Vec<Piece>,
}

// SAFETY: the buffers are as safe, and live as long.
unsafe impl DmaMemory for Parts {
    fn pieces(&self) -> &[Piece] {
        &self.pieces
    }
}

impl Parts {
    fn bytes(&self) -> Vec<u8> {
        self.buffers.iter().flat_map(Buffer::bytes).collect()
    }

    fn spans(&self) -> Vec<Span> {
        self.pieces.iter().map(|piece| piece.span).collect()
    }
}

/// Memory that begins with the slots of two pools, an IOMMU, and what may fail of them.
struct Bench<const G: u32, H: DmaMemory> {
    memory: Arc<SimMemory>,
    faults: Faults,
    sim: SimPool,
    pool: Arc<Pool>,
    host: Host,
    iotlb: Tlb,
    domain: Arc<Translated<G, H>>,
    direct: Arc<Direct<H, Host>>,
}

impl<const G: u32, H: DmaMemory> Bench<G, H> {
    fn new(config: PoolConfig) -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(RAM), BYTES, G).unwrap());
        let sim = SimPool::new(Arc::clone(&memory), span(RAM, 16 << G)).unwrap();
        let slots = span(RAM + (16 << G), 16 << G);
        let slots = SimPoolMemory::new(Arc::clone(&memory), vec![slots]).unwrap();
        let (faults, host) = (Faults::none(), Host::default());
        let pool = Arc::new(Pool::new(slots, config, host.clone()).unwrap());
        let tables = arena();
        let table =
            PageTable::new(format::<G>(48, 48), Faulty::new(tables.clone(), &faults)).unwrap();
        let iotlb = Iotlb::new(walker(table.format(), table.root()), tables.clone());
        let domain = Domain::new(table, Faulty::new(iotlb.clone(), &faults)).unwrap();
        let domain = Arc::new(DmaDomain::new(domain, DmaConfig::new(1), host.clone()).unwrap());
        let direct = Arc::new(Direct::new(span(RAM, BYTES), host.clone()));
        Self { memory, faults, sim, pool, host, iotlb, domain, direct }
    }

    fn translated<B: BouncePool + Clone>(
        &self,
        pool: &B,
        config: DeviceConfig,
    ) -> Device<Translated<G, H>, Faulty<B>> {
        let pool = Faulty::new(pool.clone(), &self.faults);
        Device::new(Arc::clone(&self.domain), pool, config).unwrap()
    }

    fn beside<B: BouncePool + Clone>(
        &self,
        pool: &B,
        config: DeviceConfig,
    ) -> Device<Direct<H, Host>, Faulty<B>> {
        let pool = Faulty::new(pool.clone(), &self.faults);
        Device::new(Arc::clone(&self.direct), pool, config).unwrap()
    }

    /// What a device behind the IOMMU does.
    fn behind(&self) -> impl Dma {
        dmaspan_sim::device::SimDevice::new(self.iotlb.clone(), Arc::clone(&self.memory))
    }

    /// Buffers of so many bytes at these offsets in their first frames.
    fn parts(&self, places: &[(u64, u64)]) -> Parts {
        let buffer = |&(offset, len)| Buffer::new(&self.memory, offset, len);
        let buffers: Vec<_> = places.iter().map(buffer).collect();
        let pieces = buffers.iter().map(|buffer| Piece::memory(buffer.span())).collect();
        Parts { buffers, pieces }
    }

    /// That everything ended as it should.
    fn check_end(&self) {
        assert_eq!((self.sim.held(), self.sim.lost(), self.pool.stats().used), (0, 0, 0));
        assert_eq!(self.memory.violations(), []);
    }
}

/// A device that gets everything by way of the pool.
fn always(config: DeviceConfig) -> DeviceConfig {
    DeviceConfig { bounce: Bounce::Always, ..config }
}

/// One that reaches no more than both pools.
fn near<const G: u32>() -> DeviceConfig {
    let mut config = DeviceConfig::bits(40);
    config.limits.last = RAM + (32 << G) - 1;
    config
}

fn released<H, E: std::fmt::Debug>(unmapped: Result<Unmapped<H>, E>) -> H {
    match unmapped {
        Ok(Unmapped::Released(memory)) => memory,
        Ok(Unmapped::Queued) => panic!("a strict unmap was queued"),
        Err(failed) => panic!("{failed:?}"),
    }
}

for_all_granules!(
    ends_alone_are_copied_where_the_middle_can_be_mapped,
    everything_is_copied_where_everything_is_bounced,
    an_untrusted_device_sees_granules_of_its_buffer_and_zeros,
    pieces_of_a_reservation_are_bounced_at_their_ends,
    caches_of_ends_follow_with_their_padding_and_the_middle_without,
);

/// A buffer in its first frame: offset and length, and how many bytes of it are in shared granules.
fn shared_ends(g: u64) -> [((u64, u64), u64, usize); 9] {
    [
        ((0, g), 0, 0),
        ((0, 3 * g), 0, 0),
        ((1, 3 * g - 1), g - 1, 1),
        ((0, 2 * g + 5), 5, 1),
        ((100, 3 * g), g, 2),
        ((g - 1, g + 2), 2, 2),
        ((g - 1, 2), 2, 1),
        ((7, g), g, 1),
        ((g / 2, g / 2), g / 2, 1),
    ]
}

fn ends_alone_are_copied_where_the_middle_can_be_mapped<const G: u32>() {
    let bench = Bench::<G, Parts>::new(PoolConfig::new(2));
    let device = bench.translated(&bench.pool, untrusted(DeviceConfig::bits(40)));
    let copied = || bench.pool.memory().counts().copied;
    for (place, shared, slots) in shared_ends(1 << G) {
        let before = copied();
        let mapping = device.map_single(bench.parts(&[place]), Direction::Bidirectional).unwrap();
        assert_eq!((mapping.is_bounced(), copied() - before), (slots > 0, shared), "{place:x?}");
        // A slot of its own for each end, of a granule or as many as a short buffer touches.
        let held = bench.pool.stats().used;
        assert!(held <= 2 << G && held >= shared, "{held:#x} bytes for {place:x?}");
        let offset = mapping.addr().get() & ((1 << G) - 1);
        assert!(slots == 1 || offset == place.0, "ends lie where they lay");
        let parts = released(device.unmap(mapping));
        assert_eq!(copied() - before, 2 * shared);
        assert!(parts.bytes() == pattern(place.1, 1));
        // The same in a list.
        let before = copied();
        let (parts, mut room) = (bench.parts(&[place, place]), [Segment::default(); 64]);
        let mapping = device.map_list(parts, Direction::ToDevice, &mut room).unwrap();
        assert_eq!((mapping.bounced() > 0, copied() - before), (slots > 0, 2 * shared));
        drop(released(device.unmap_list(mapping)));
        assert_eq!(copied() - before, 2 * shared, "nothing comes back from a device that reads");
    }
    bench.check_end();
}

fn everything_is_copied_where_everything_is_bounced<const G: u32>() {
    let bench = Bench::<G, Parts>::new(PoolConfig::new(2));
    let copied = || bench.pool.memory().counts().copied;
    let config = always(DeviceConfig::bits(40));
    let (translated, direct) =
        (bench.translated(&bench.pool, config), bench.beside(&bench.pool, config));
    let (distrusted, far) =
        (bench.translated(&bench.pool, untrusted(config)), bench.beside(&bench.pool, near::<G>()));
    for (place, ..) in shared_ends(1 << G) {
        let before = copied();
        let direction = Direction::Bidirectional;
        let map = || bench.parts(&[place]);
        let mapping = translated.map_single(map(), direction).unwrap();
        assert!(mapping.is_bounced());
        drop(released(translated.unmap(mapping)));
        drop(released(distrusted.unmap(distrusted.map_single(map(), direction).unwrap())));
        for device in [&direct, &far] {
            let mapping = device.map_single(map(), direction).unwrap();
            assert!(mapping.addr().get() < RAM + (32 << G) && mapping.is_bounced());
            drop(released(device.unmap(mapping)));
        }
        let mut room = [Segment::default(); 64];
        let list = translated.map_list(map(), direction, &mut room).unwrap();
        assert_eq!(list.bounced(), 1);
        drop(released(translated.unmap_list(list)));
        let list = direct.map_list(map(), direction, &mut room).unwrap();
        drop(released(direct.unmap_list(list)));
        assert_eq!(copied() - before, 2 * 6 * place.1);
    }
    bench.check_end();
}

fn an_untrusted_device_sees_granules_of_its_buffer_and_zeros<const G: u32>() {
    let g = 1u64 << G;
    let bench = Bench::<G, Parts>::new(PoolConfig::new(2));
    let pool = &bench.pool;
    let device = bench.translated(pool, untrusted(DeviceConfig::bits(40)));
    let dma = bench.behind();
    for round in 0..2 {
        for (place, ..) in shared_ends(g) {
            let mapping =
                device.map_single(bench.parts(&[place]), Direction::Bidirectional).unwrap();
            let first = mapping.addr().get() / g * g;
            let all = (mapping.addr().get() + place.1).next_multiple_of(g) - first;
            let inner = usize::try_from(mapping.addr().get() - first).unwrap();
            let behind = inner + usize::try_from(place.1).unwrap();
            let seen = dma.read(DmaAddr::new(first), all).unwrap();
            assert!(seen[inner..behind] == pattern(place.1, 1), "round {round}, {place:x?}");
            assert!(seen[..inner].iter().chain(&seen[behind..]).all(|byte| *byte == 0));
            for beyond in [first - 1, first + all] {
                assert_eq!(dma.read(DmaAddr::new(beyond), 1), None);
            }
            // What it writes there is seen by nobody, and is not there for the next one.
            dma.write(DmaAddr::new(first), &pattern(all, 60)).unwrap();
            let parts = released(device.unmap(mapping));
            assert!(parts.buffers[0].is_whole());
            assert!(parts.bytes() == pattern(all, 60)[inner..behind]);
        }
    }
    bench.check_end();
}

fn pieces_of_a_reservation_are_bounced_at_their_ends<const G: u32>() {
    let g = 1u64 << G;
    let bench = Bench::<G, Parts>::new(PoolConfig::new(2));
    let dma = bench.behind();
    let copied = || bench.pool.memory().counts().copied;
    for (config, shares) in [
        (untrusted(DeviceConfig::bits(40)), [g - 100, 0, 7]),
        (always(DeviceConfig::bits(40)), [3 * g - 100, 2 * g, g + 7]),
    ] {
        let device = bench.translated(&bench.pool, config);
        for direction in [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional] {
            // Nothing is linked between the second and the third.
            let request = ReserveRequest { len: 8 * g, offset: 100, pieces: 3, direction };
            let mut reservation = device.reserve(request).unwrap();
            let places = [(100, 3 * g - 100), (0, 2 * g), (0, g + 7)];
            let offsets = [0, 3 * g - 100, 6 * g - 100];
            for ((place, offset), share) in places.into_iter().zip(offsets).zip(shares) {
                let before = copied();
                device.link(&mut reservation, offset, bench.parts(&[place])).unwrap();
                assert_eq!(copied() - before, share);
            }
            device.announce(&mut reservation).unwrap();
            let start = reservation.addr().get() - 100;
            let seen = dma.read(DmaAddr::new(start), 5 * g).unwrap();
            let used = usize::try_from(5 * g).unwrap();
            assert!(seen[..100].iter().all(|byte| *byte == 0));
            let both = [pattern(3 * g - 100, 1), pattern(2 * g, 1)].concat();
            assert!(seen[100..used] == both);
            assert_eq!(dma.read(DmaAddr::new(start + 5 * g), 1), None);
            let last = dma.read(DmaAddr::new(start + 6 * g), 2 * g).unwrap();
            let mut expected = pattern(g + 7, 1);
            expected.resize(usize::try_from(2 * g).unwrap(), 0);
            assert!(last == expected);
            if direction != Direction::ToDevice {
                dma.write(DmaAddr::new(start), &pattern(5 * g, 30)).unwrap();
                dma.write(DmaAddr::new(start + 6 * g), &pattern(2 * g, 40)).unwrap();
            }
            let mut ended = Vec::new();
            device
                .unlink(&mut reservation, 6 * g - 100, g + 7, |memory| ended.push(memory))
                .unwrap();
            device.destroy(reservation, |memory| ended.push(memory)).unwrap();
            assert!(ended.iter().all(|parts| parts.buffers[0].is_whole()));
            if direction != Direction::ToDevice {
                assert!(ended[0].bytes() == pattern(g + 7, 40));
                let both: Vec<_> = ended[1..].iter().flat_map(Parts::bytes).collect();
                assert!(both == pattern(5 * g, 30)[100..]);
            }
        }
    }
    bench.check_end();
}

fn caches_of_ends_follow_with_their_padding_and_the_middle_without<const G: u32>() {
    use crate::rig::Caches::{Invalidated, WrittenBack};
    use crate::rig::non_coherent;
    let g = 1u64 << G;
    let bench = Bench::<G, Parts>::new(PoolConfig::new(1));
    let device = bench.translated(&bench.sim, untrusted(non_coherent(DeviceConfig::bits(40))));
    let parts = bench.parts(&[(100, 3 * g)]);
    let own = parts.spans()[0].paddr().get() - 100;
    let mapping = device.map_single(parts, Direction::Bidirectional).unwrap();
    let given = [span(RAM, g), span(own + g, 2 * g), span(RAM + g, g)].map(WrittenBack);
    assert_eq!(bench.host.taken(), given);
    // The last byte of the head to the first one of the tail.
    device.sync_for_cpu(&mapping, g - 101, 2 * g + 2).unwrap();
    let parts = || [span(RAM + g - 1, 1), span(own + g, 2 * g), span(RAM + g, 1)];
    assert_eq!(bench.host.taken(), parts().map(Invalidated));
    device.sync_for_device(&mapping, g - 101, 2 * g + 2).unwrap();
    assert_eq!(bench.host.taken(), parts().map(WrittenBack));
    device.sync_for_device(&mapping, g - 100, 5).unwrap();
    assert_eq!(bench.host.taken(), [WrittenBack(span(own + g, 5))]);
    drop(released(device.unmap_written(mapping, g)));
    let written = [span(RAM + 100, g - 100), span(own + g, 100)];
    assert_eq!(bench.host.taken(), written.map(Invalidated));
    bench.check_end();
}
