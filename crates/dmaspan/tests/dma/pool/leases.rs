//! Memory that is leased from a pool: mapped once, used often, and not bounced.

use dmaspan::dma::Leased;
use dmaspan::swiotlb::{Growth, SlotRequest};

use super::*;

/// What the device uses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Uses {
    Itself,
    Slots,
}

type Kept = Arc<Leased<SimPoolMemory, Host>>;

for_all_granules!(
    a_lease_is_mapped_itself_wherever_it_may_be,
    a_lease_of_what_a_pool_grew_by_is_mapped_itself,
    a_pool_that_grows_reaches_wherever_its_devices_do,
);

fn a_lease_is_mapped_itself_wherever_it_may_be<const G: u32>() {
    let g = 1u64 << G;
    let bench = Bench::<G, Kept>::new(PoolConfig::new(2));
    let plain = DeviceConfig::bits(40);
    let granular = SlotRequest { granule: g, ..SlotRequest::default() };
    // Behind the IOMMU, a lease that shares granules is bounced where the device is not trusted.
    for (config, len, request, uses) in [
        (plain, 3000, SlotRequest::default(), Uses::Itself),
        (untrusted(plain), 2 * g, granular, Uses::Itself),
        (always(untrusted(plain)), 2 * g, granular, Uses::Itself),
        (always(plain), 3000, SlotRequest::default(), Uses::Itself),
        (untrusted(plain), 3000, SlotRequest::default(), Uses::Slots),
        (always(untrusted(plain)), 3000, SlotRequest::default(), Uses::Slots),
    ] {
        let device = bench.translated(&bench.pool, config);
        use_lease(&bench, &device, &bench.behind(), (len, request), uses);
    }
    for config in [plain, always(plain), near::<G>()] {
        let device = bench.beside(&bench.pool, config);
        let dma = Arc::clone(&bench.memory);
        use_lease(&bench, &device, &dma, (3000, SlotRequest::default()), Uses::Itself);
    }
    bench.check_end();
}

fn use_lease<const G: u32, T: Translation<Memory = Kept>, B: BouncePool>(
    bench: &Bench<G, Kept>,
    device: &Device<T, B>,
    dma: &impl Dma,
    (len, request): (u64, SlotRequest),
    uses: Uses,
) {
    let held = bench.pool.stats().used;
    let ring = Arc::new(Leased::new(bench.pool.lease(len, &request).unwrap()));
    let mapping = device.map_single(Arc::clone(&ring), Direction::Bidirectional).unwrap();
    assert_eq!(mapping.is_bounced(), uses == Uses::Slots);
    let mut bytes = vec![0; 100];
    for seed in 0..3 {
        // No sync: both see the same bytes.
        ring.lease().write(50, &pattern(100, seed)).unwrap();
        if uses == Uses::Slots {
            device.sync_for_device(&mapping, 0, len).unwrap();
        }
        let addr = DmaAddr::new(mapping.addr().get() + 50);
        assert_eq!(dma.read(addr, 100).unwrap(), pattern(100, seed));
        dma.write(addr, &pattern(100, seed + 20)).unwrap();
        if uses == Uses::Slots {
            device.sync_for_cpu(&mapping, 0, len).unwrap();
        }
        ring.lease().read(50, &mut bytes).unwrap();
        assert_eq!(bytes, pattern(100, seed + 20));
    }
    // The mapping owns it, too.
    drop(ring);
    assert!(bench.pool.stats().used > held);
    drop(released(device.unmap(mapping)));
    assert_eq!(bench.pool.stats().used, held);
}

/// A pool that may grow, all of whose own slots are held.
fn grows<const G: u32, H: DmaMemory>() -> (Bench<G, H>, swiotlb::Lease<SimPoolMemory, Host>) {
    let growth = Some(Growth::new(16 << G, 64 << G));
    let bench = Bench::<G, H>::new(PoolConfig { growth, ..PoolConfig::new(2) });
    let all = bench.pool.lease(16 << G, &SlotRequest::default()).unwrap();
    (bench, all)
}

fn a_lease_of_what_a_pool_grew_by_is_mapped_itself<const G: u32>() {
    let g = 1u64 << G;
    let (bench, all) = grows::<G, Kept>();
    let config = always(untrusted(DeviceConfig::bits(40)));
    let behind = bench.translated(&bench.pool, config);
    let beside = bench.beside(&bench.pool, config);
    let granular = SlotRequest { granule: g, ..SlotRequest::default() };
    // Memory of its own, and what is added for good.
    for grow in [false, true] {
        if grow {
            bench.pool.grow().unwrap();
        }
        use_lease(&bench, &behind, &bench.behind(), (2 * g, granular), Uses::Itself);
        let dma = Arc::clone(&bench.memory);
        use_lease(&bench, &beside, &dma, (3000, SlotRequest::default()), Uses::Itself);
        // Not a byte beyond it, nor when it has gone back.
        let lease = bench.pool.lease(2 * g, &granular).unwrap();
        let at = lease.span().paddr().get();
        assert!(bench.pool.owns(lease.span()) && bench.pool.owns(span(at + 1, g)));
        assert!(!bench.pool.owns(span(at, 2 * g + 1)) && !bench.pool.owns(span(at - 1, g)));
        drop(lease);
        assert!(!bench.pool.owns(span(at, 1)));
    }
    assert!(bench.pool.owns(all.span()));
    drop(all);
    bench.check_end();
}

fn a_pool_that_grows_reaches_wherever_its_devices_do<const G: u32>() {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(RAM), BYTES, G).unwrap());
    let slots = span(RAM + BYTES - (16 << G), 16 << G);
    let slots = SimPoolMemory::new(Arc::clone(&memory), vec![slots]).unwrap();
    let growth = Some(Growth::new(16 << G, 64 << G));
    let config = PoolConfig { growth, ..PoolConfig::new(1) };
    let pool = Arc::new(Pool::new(slots, config, Host::default()).unwrap());
    let direct = Arc::new(Direct::<Buffer, _>::new(span(RAM, BYTES), Host::default()));
    // All that the pool began with lies beyond it.
    let mut config = always(DeviceConfig::bits(40));
    config.limits.last = RAM + BYTES / 2 - 1;
    let device = Device::new(direct, Arc::clone(&pool), config).unwrap();
    let mapping = device.map_single(Buffer::new(&memory, 5, 3000), Direction::ToDevice).unwrap();
    assert!(mapping.is_bounced() && mapping.addr().get() + 2999 <= config.limits.last);
    assert_eq!((pool.stats().single, pool.memory().grown().len()), (4096, 1));
    drop(released(device.unmap(mapping)));
    assert_eq!((pool.stats().used, pool.memory().grown().len()), (0, 0));
    assert_eq!(memory.violations(), []);
}
