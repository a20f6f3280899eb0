//! Slots when something fails: given back where no device can use them, and otherwise in
//! quarantine.

use dmaspan::dma::Error;

use super::*;

for_all_granules!(
    whichever_step_fails_no_slot_is_lost_or_leaked,
    slots_of_what_was_not_synced_are_in_quarantine,
);

fn whichever_step_fails_no_slot_is_lost_or_leaked<const G: u32>() {
    let g = 1u64 << G;
    let bench = Bench::<G, Parts>::new(PoolConfig::new(2));
    let plain = DeviceConfig::bits(40);
    let (mut failed, direction) = (0, Direction::Bidirectional);
    let places = [(100, 2 * g), (0, g), (5, 10)];
    for config in [untrusted(plain), always(plain)] {
        let pools = (bench.translated(&bench.pool, config), bench.translated(&bench.sim, config));
        let in_quarantine = || (bench.pool.stats().quarantined, bench.sim.quarantined());
        let before = in_quarantine();
        failed += bench.faults.sweep(|n| {
            operations(&bench, &pools.0, &places, direction);
            operations(&bench, &pools.1, &places, direction);
            bench.domain.flush().unwrap();
            let (stats, lost) = (bench.pool.stats(), bench.sim.lost());
            assert_eq!((stats.used, lost), (stats.quarantined, 0), "step {n}");
            assert_eq!(bench.sim.held(), bench.sim.quarantined(), "step {n}");
        });
        let after = in_quarantine();
        assert!(before.0 < after.0 && before.1 < after.1, "no unmap failed");
    }
    assert!(failed > 20, "{failed} steps");
}

/// A buffer, a list and a reservation, as far as nothing fails.
fn operations<const G: u32, B: BouncePool>(
    bench: &Bench<G, Parts>,
    device: &Device<Translated<G, Parts>, B>,
    places: &[(u64, u64)],
    direction: Direction,
) {
    let mut room = [Segment::default(); 64];
    if let Ok(mapping) = device.map_single(bench.parts(&places[..1]), direction) {
        drop(device.unmap(mapping));
    }
    if let Ok(mapping) = device.map_list(bench.parts(places), direction, &mut room) {
        drop(device.unmap_list(mapping));
    }
    let request = ReserveRequest { len: 4 << G, offset: 100, pieces: 1, direction };
    let Ok(mut reservation) = device.reserve(request) else { return };
    if device.link(&mut reservation, 0, bench.parts(&places[..1])).is_ok() {
        let _ = device.announce(&mut reservation);
        let _ = device.unlink(&mut reservation, 0, 2 << G, drop);
    }
    while let Err(failed) = device.destroy(reservation, drop) {
        let Some(left) = failed.reservation else { return };
        reservation = left;
    }
}

fn slots_of_what_was_not_synced_are_in_quarantine<const G: u32>() {
    let g = 1u64 << G;
    let bench = Bench::<G, Parts>::new(PoolConfig::new(1));
    let device = bench.translated(&bench.pool, untrusted(DeviceConfig::bits(40)));
    let direction = Direction::FromDevice;
    let mut room = [Segment::default(); 64];
    let mut expected = 0;
    for (n, slots) in [(0, 2), (1, 2), (2, 3)] {
        let single = || device.map_single(bench.parts(&[(100, 2 * g)]), direction).unwrap();
        let error = match n {
            0 => {
                let mapping = single();
                bench.iotlb.fail_next_invalidations(1);
                device.unmap(mapping).unwrap_err().error
            }
            1 => {
                let mapping = single();
                bench.iotlb.fail_next_invalidations(1);
                device.unmap_written(mapping, 3).unwrap_err().error
            }
            _ => {
                let parts = bench.parts(&[(100, 2 * g), (3, 4)]);
                let mapping = device.map_list(parts, direction, &mut room).unwrap();
                bench.iotlb.fail_next_invalidations(1);
                device.unmap_list(mapping).unwrap_err().error
            }
        };
        assert!(matches!(error, Error::Quarantined { .. }), "{error}");
        expected += slots * g;
        let stats = bench.pool.stats();
        assert_eq!((stats.quarantined, stats.used), (expected, expected));
        bench.domain.flush().unwrap();
        // They stay so: a device may have written to them after the sync that failed.
        assert_eq!(bench.pool.stats().quarantined, expected);
    }
}
