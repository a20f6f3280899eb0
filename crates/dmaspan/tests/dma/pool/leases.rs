//! Memory that is leased from a pool: mapped once, used often, and not bounced.

use dmaspan::dma::Leased;
use dmaspan::swiotlb::SlotRequest;

use super::*;

/// What the device uses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Uses {
    Itself,
    Slots,
}

type Kept = Arc<Leased<SimPoolMemory, Host>>;

for_all_granules!(a_lease_is_mapped_itself_wherever_it_may_be);

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
