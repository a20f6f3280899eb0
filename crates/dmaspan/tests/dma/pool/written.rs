//! Buffers that devices overwrite: slots are not filled, and what was written is reported.

use dmaspan::Errno;
use dmaspan::dma::{Error, ScopeFailed, UnmapFailed, UnmapListFailed};

use super::*;

const OVERWRITTEN: Attrs = Attrs {
    flush: None,
    sync: dmaspan::dma::CpuSync::Sync,
    privilege: dmaspan::dma::Privilege::Any,
    fill: Fill::Overwritten,
};

for_all_granules!(
    nothing_of_a_former_holder_reaches_a_buffer_that_was_written_in_part,
    nothing_of_a_former_holder_reaches_a_buffer_of_which_an_untrusted_device_lies,
    what_is_overwritten_is_not_copied_into_slots,
    a_mapping_that_is_overwritten_ends_by_a_report_bounced_or_not,
);

/// CVE-2022-0854: a device was said to overwrite a buffer, wrote less, and what a former holder had
/// left in the slot came back with the rest.
fn nothing_of_a_former_holder_reaches_a_buffer_that_was_written_in_part<const G: u32>() {
    let bench = Bench::<G, Parts>::new(PoolConfig::new(1));
    let device = bench.beside(&bench.pool, near::<G>());
    let dma = Arc::clone(&bench.memory);
    let len = 500;
    for written in [0, 1, 10, len - 1, len] {
        leave_secrets(&bench, &device);
        let parts = bench.parts(&[(33, len)]);
        let mapped = device.map_single_with(parts, Direction::FromDevice, OVERWRITTEN);
        let mapping = mapped.unwrap();
        let in_slot = Dma::read(&dma, mapping.addr(), 1).unwrap();
        assert_eq!(in_slot, [SECRET], "the slot was not filled, or this test shows nothing");
        if written > 0 {
            Dma::write(&dma, mapping.addr(), &pattern(written, 80)).unwrap();
        }
        let parts = released(device.unmap_written(mapping, written));
        let mut expected = pattern(len, 1);
        let written = usize::try_from(written).unwrap();
        expected[..written].copy_from_slice(&pattern(len, 80)[..written]);
        assert!(parts.bytes() == expected && parts.buffers[0].is_whole(), "{written} of {len}");
    }
    bench.check_end();
}

/// What a former holder leaves in slots.
const SECRET: u8 = 0xd5;

/// Leaves secrets in every granule of the pool.
fn leave_secrets<const G: u32, T: Translation<Memory = Parts>, B: BouncePool>(
    bench: &Bench<G, Parts>,
    device: &Device<T, B>,
) {
    let g = 1u64 << G;
    let bytes = vec![SECRET; usize::try_from(g - 1).unwrap()];
    let secret = || {
        let secret = bench.parts(&[(1, g - 1)]);
        bench.memory.cpu_write(secret.spans()[0].paddr(), &bytes).unwrap();
        device.map_single(secret, Direction::ToDevice).unwrap()
    };
    let held: Vec<_> = (0..16).map(|_| secret()).collect();
    held.into_iter().for_each(|mapping| drop(released(device.unmap(mapping))));
}

/// The device wrote `wrote` bytes of each buffer and reports that it wrote all: by itself, in parts
/// that are synced, and of a list.
fn nothing_of_a_former_holder_reaches_a_buffer_of_which_an_untrusted_device_lies<const G: u32>() {
    let bench = Bench::<G, Parts>::new(PoolConfig::new(1));
    let plain = DeviceConfig::bits(40);
    for config in [untrusted(plain), always(untrusted(plain))] {
        lies(&bench, &bench.translated(&bench.pool, config), &bench.behind());
    }
    for config in [untrusted(near::<G>()), always(untrusted(plain))] {
        lies(&bench, &bench.beside(&bench.pool, config), &Arc::clone(&bench.memory));
    }
    bench.check_end();
}

fn lies<const G: u32, T: Translation<Memory = Parts>, B: BouncePool>(
    bench: &Bench<G, Parts>,
    device: &Device<T, B>,
    dma: &impl Dma,
) {
    let (len, wrote, direction) = (500, 10, Direction::FromDevice);
    let check = |parts: &Parts| {
        assert!(!parts.bytes().contains(&SECRET), "a former holder's");
        let mut expected = pattern(len, 1);
        expected[..10].copy_from_slice(&pattern(wrote, 80));
        assert_eq!(parts.bytes()[..500], expected, "the rest is as it was");
    };
    let map = |places: &[(u64, u64)]| {
        leave_secrets(bench, device);
        bench.parts(places)
    };
    let mapping = device.map_single_with(map(&[(33, len)]), direction, OVERWRITTEN).unwrap();
    assert!(mapping.is_bounced());
    dma.write(mapping.addr(), &pattern(wrote, 80)).unwrap();
    device.sync_for_cpu(&mapping, 0, len).unwrap();
    check(&released(device.unmap_written(mapping, len)));
    for places in [&[(33, len)][..], &[(33, len), (7, 300)]] {
        let mut room = [Segment::default(); 64];
        let parts = map(places);
        let mapping = device.map_list_with(parts, direction, &mut room, OVERWRITTEN).unwrap();
        assert_eq!(mapping.bounced(), places.len());
        let total = places.iter().map(|(_, len)| len).sum();
        dma.write(room[0].addr, &pattern(wrote, 80)).unwrap();
        check(&released(device.unmap_list_written(mapping, total)));
    }
}

fn what_is_overwritten_is_not_copied_into_slots<const G: u32>() {
    let bench = Bench::<G, Parts>::new(PoolConfig::new(1));
    let device = bench.beside(&bench.pool, near::<G>());
    let copied = || bench.pool.memory().counts().copied;
    let before = copied();
    let parts = bench.parts(&[(100, 700)]);
    let mapping = device.map_single_with(parts, Direction::FromDevice, OVERWRITTEN).unwrap();
    assert_eq!((copied(), mapping.fill()), (before, Fill::Overwritten));
    Dma::write(&bench.memory, mapping.addr(), &pattern(600, 9)).unwrap();
    drop(released(device.unmap_written(mapping, 600)));
    assert_eq!(copied() - before, 600);
    let (parts, mut room) = (bench.parts(&[(100, 700), (1, 9)]), [Segment::default(); 64]);
    let direction = Direction::FromDevice;
    let mapping = device.map_list_with(parts, direction, &mut room, OVERWRITTEN).unwrap();
    assert_eq!((copied() - before, mapping.bounced()), (600, 2));
    drop(released(device.unmap_list_written(mapping, 704)));
    assert_eq!(copied() - before, 600 + 704);
    bench.check_end();
}

fn a_mapping_that_is_overwritten_ends_by_a_report_bounced_or_not<const G: u32>() {
    let bench = Bench::<G, Parts>::new(PoolConfig::new(1));
    let plain = DeviceConfig::bits(40);
    for config in [plain, untrusted(plain), always(plain)] {
        reports(&bench, &bench.translated(&bench.pool, config));
    }
    for config in [plain, near::<G>()] {
        reports(&bench, &bench.beside(&bench.pool, config));
    }
    bench.check_end();
}

fn reports<const G: u32, T: Translation<Memory = Parts>, B: BouncePool>(
    bench: &Bench<G, Parts>,
    device: &Device<T, B>,
) {
    let parts = || bench.parts(&[(100, 300)]);
    let (mut room, from) = ([Segment::default(); 64], Direction::FromDevice);
    for direction in [Direction::ToDevice, Direction::Bidirectional] {
        let single = device.map_single_with(parts(), direction, OVERWRITTEN).unwrap_err();
        let list = device.map_list_with(parts(), direction, &mut room, OVERWRITTEN).unwrap_err();
        for refused in [single, list] {
            assert_eq!(refused.error, Error::Overwrites { direction });
            assert!(refused.error.errno() == Errno::EINVAL && refused.memory.is_some());
        }
    }
    let unreported = Error::Unreported { len: 300 };
    assert_eq!(unreported.errno(), Errno::EINVAL);
    let outside = Error::OutsideMapping { offset: 0, len: 301, mapped: 300 };
    // A single one, as itself and by its address.
    let mapping = device.map_single_with(parts(), from, OVERWRITTEN).unwrap();
    let UnmapFailed { error, mapping } = device.unmap(mapping).unwrap_err();
    assert_eq!(error, unreported);
    let UnmapFailed { error, mapping } = device.unmap_written(mapping.unwrap(), 301).unwrap_err();
    assert_eq!(error, outside);
    let (addr, len) = device.into_raw(mapping.unwrap()).unwrap();
    assert_eq!(device.unmap_raw(addr, len, from).unwrap_err(), unreported);
    assert_eq!(device.unmap_raw_written(addr, len, from, 301).unwrap_err(), outside);
    drop(released(device.unmap_raw_written(addr, len, from, 300)));
    // A list.
    let mapping = device.map_list_with(parts(), from, &mut room, OVERWRITTEN).unwrap();
    let UnmapListFailed { error, mapping } = device.unmap_list(mapping).unwrap_err();
    assert_eq!(error, unreported);
    let failed = device.unmap_list_written(mapping.unwrap(), 301).unwrap_err();
    assert_eq!(failed.error, outside);
    drop(released(device.unmap_list_written(failed.mapping.unwrap(), 0)));
    // Nobody reports in a scope.
    let scope = device.with_mapped(parts(), from, OVERWRITTEN, |_| ());
    let Err(ScopeFailed { error, memory: Some(_), result: None }) = scope else { panic!() };
    assert_eq!(error, unreported);
    // A filled one may be reported, but for one that the device only reads.
    let to = Direction::ToDevice;
    let mapping = device.map_single(parts(), to).unwrap();
    let UnmapFailed { error, mapping } = device.unmap_written(mapping, 1).unwrap_err();
    assert!(matches!(error, Error::OtherDirection { mapped: Direction::ToDevice, .. }), "{error}");
    drop(released(device.unmap_written(mapping.unwrap(), 0)));
    let mapping = device.map_single(parts(), Direction::Bidirectional).unwrap();
    drop(released(device.unmap_written(mapping, 17)));
}
