//! Bounced buffers: what a device sees beside them, and when and how much is copied.

use dmaspan::dma::{Attrs, CpuSync, DeviceConfig, Flush};
use dmaspan::{Direction, DmaAddr};
use dmaspan_sim::bounce::POISON;

use crate::common::{for_all_granules, span};
use crate::rig::{Caches, Dma as _, RAM, Rig, non_coherent, pattern, unmap, untrusted};

for_all_granules!(
    an_untrusted_device_sees_its_buffer_and_zeros_and_changes_nothing_else,
    nothing_comes_back_before_the_unmap_is_synced,
    a_part_that_is_synced_is_copied_and_no_more,
    a_device_that_writes_little_leaves_the_rest_as_it_was,
    a_slot_is_where_its_device_reaches_and_how_it_needs_it,
    caches_of_slots_follow_with_their_padding,
    buffers_of_whole_granules_are_not_bounced,
);

fn an_untrusted_device_sees_its_buffer_and_zeros_and_changes_nothing_else<const G: u32>() {
    let g = 1u64 << G;
    let rig = Rig::<G>::new(Flush::Strict);
    let mut config = untrusted(DeviceConfig::bits(40));
    let dma = rig.behind();
    for keep_bits in [0, 0x3f, 0x1ff] {
        config.limits.keep_bits = keep_bits;
        let device = rig.translated(config);
        for (offset, len) in [(1, 1), (100, g), (g - 1, 2), (g / 2, g / 2), (0, g + 1)] {
            for direction in [Direction::ToDevice, Direction::Bidirectional] {
                let mapping = device.map_single(rig.buffer(offset, len), direction).unwrap();
                assert_eq!((mapping.addr().get() ^ offset) & keep_bits, 0);
                let first = mapping.addr().get() / g * g;
                let all = (mapping.addr().get() + len).next_multiple_of(g) - first;
                let inner = usize::try_from(mapping.addr().get() - first).unwrap();
                let behind = inner + usize::try_from(len).unwrap();
                let seen = dma.read(DmaAddr::new(first), all).unwrap();
                assert_eq!(seen[inner..behind], pattern(len, 1));
                assert!(seen[..inner].iter().chain(&seen[behind..]).all(|byte| *byte == 0));
                assert_eq!(dma.read(DmaAddr::new(first + all), 1), None);
                if direction == Direction::Bidirectional {
                    dma.write(DmaAddr::new(first), &pattern(all, 60)).unwrap();
                }
                let buffer = unmap(&device, mapping);
                assert!(buffer.is_whole(), "what it wrote beside the buffer does not come back");
                if direction == Direction::Bidirectional {
                    assert_eq!(buffer.bytes(), pattern(all, 60)[inner..behind]);
                }
            }
        }
    }
    assert_eq!((rig.pool.held(), rig.memory.violations()), (0, vec![]));
}

fn nothing_comes_back_before_the_unmap_is_synced<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Lazy);
    let device = rig.translated(untrusted(DeviceConfig::bits(40)));
    let attrs = Attrs { flush: Some(Flush::Lazy), ..Attrs::default() };
    for fails in [0, 1] {
        let buffer = rig.buffer(7, 90);
        let original = buffer.span();
        let copies = rig.pool.copies().to_originals;
        let mapping = device.map_single_with(buffer, Direction::FromDevice, attrs).unwrap();
        assert_eq!(mapping.flush(), Flush::Strict, "bounced, whatever was asked for");
        rig.behind().write(mapping.addr(), &pattern(90, 77)).unwrap();
        assert_eq!(crate::rig::read(&rig.memory, original), pattern(90, 1));
        rig.iotlb.fail_next_invalidations(fails);
        let unmapped = device.unmap(mapping);
        let returned = u64::from(unmapped.is_ok());
        assert_eq!((returned, rig.pool.copies().to_originals - copies), (1 - fails, 1 - fails));
        let now = crate::rig::read(&rig.memory, original);
        assert_eq!(now, if fails == 0 { pattern(90, 77) } else { pattern(90, 1) });
    }
}

fn a_part_that_is_synced_is_copied_and_no_more<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    let device = rig.translated(untrusted(DeviceConfig::bits(40)));
    let dma = rig.behind();
    for direction in [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional] {
        let buffer = rig.buffer(33, 64);
        let original = buffer.span();
        let mapping = device.map_single(buffer, direction).unwrap();
        let addr = mapping.addr();
        let inner = DmaAddr::new(addr.get() + 10);
        let before = rig.pool.copies();
        // The CPU writes everything, and hands over a part of it.
        rig.memory.cpu_write(original.paddr(), &pattern(64, 20)).unwrap();
        device.sync_for_device(&mapping, 10, 20).unwrap();
        let mut in_slot = pattern(64, 1);
        if direction != Direction::FromDevice {
            in_slot[10..30].copy_from_slice(&pattern(64, 20)[10..30]);
        }
        assert_eq!(dma.read(addr, 64).unwrap(), in_slot, "{direction:?}");
        // The device writes a part, and the CPU takes less than that.
        let mut original_now = pattern(64, 20);
        if direction != Direction::ToDevice {
            dma.write(inner, &pattern(20, 90)).unwrap();
            original_now[12..17].copy_from_slice(&pattern(20, 90)[2..7]);
        }
        device.sync_for_cpu(&mapping, 12, 5).unwrap();
        assert_eq!(crate::rig::read(&rig.memory, original), original_now);
        let after = rig.pool.copies();
        let (ins, outs) = match direction {
            Direction::ToDevice => (1, 0),
            Direction::FromDevice => (0, 1),
            Direction::Bidirectional => (1, 1),
        };
        assert_eq!(after.to_slots - before.to_slots, ins);
        assert_eq!(after.to_originals - before.to_originals, outs);
        assert_eq!(after.bytes - before.bytes, 20 * ins + 5 * outs);
        assert!(unmap(&device, mapping).is_whole());
    }
}

fn a_device_that_writes_little_leaves_the_rest_as_it_was<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    let device = rig.translated(untrusted(DeviceConfig::bits(40)));
    for sync in [CpuSync::Sync, CpuSync::Skip] {
        let attrs = Attrs { sync, ..Attrs::default() };
        let buffer = rig.buffer(3, 500);
        let mapping = device.map_single_with(buffer, Direction::FromDevice, attrs).unwrap();
        // Where tables cannot forbid reading, a device finds no former holder's data.
        assert_eq!(rig.behind().read(mapping.addr(), 500).unwrap(), pattern(500, 1));
        rig.behind().write(mapping.addr(), &[POISON; 4]).unwrap();
        let buffer = unmap(&device, mapping);
        let mut expected = pattern(500, 1);
        if sync == CpuSync::Sync {
            expected[..4].fill(POISON);
        }
        assert_eq!(buffer.bytes(), expected);
    }
}

fn a_slot_is_where_its_device_reaches_and_how_it_needs_it<const G: u32>() {
    let g = 1u64 << G;
    let rig = Rig::<G>::new(Flush::Strict);
    let mut config = DeviceConfig::bits(40);
    // Two granules of the pool, boundaries of one.
    config.limits.last = RAM + 2 * g - 1;
    config.limits.keep_bits = 0xff;
    config.limits.boundary = Some(g);
    let device = rig.direct(config).unwrap();
    let mut mappings = Vec::new();
    let refused = loop {
        match device.map_single(rig.buffer(0x1234 % g, g / 4), Direction::Bidirectional) {
            Ok(mapping) => mappings.push(mapping),
            Err(refused) => break refused,
        }
    };
    assert!(matches!(refused.error, dmaspan::dma::Error::NoSlot { .. }), "{}", refused.error);
    drop(refused);
    assert!(mappings.len() >= 6, "{}", mappings.len());
    for mapping in &mappings {
        let (first, last) = (mapping.addr().get(), mapping.addr().get() + mapping.len() - 1);
        assert!(first >= RAM && last <= config.limits.last);
        assert_eq!((first & 0xff, first / g), (0x34, last / g));
    }
    mappings.into_iter().for_each(|mapping| drop(unmap(&device, mapping)));
    assert_eq!((rig.pool.held(), rig.memory.violations()), (0, vec![]));
}

fn caches_of_slots_follow_with_their_padding<const G: u32>() {
    use Caches::{Invalidated, WrittenBack};
    let g = 1u64 << G;
    let rig = Rig::<G>::new(Flush::Strict);
    let mut config = untrusted(non_coherent(DeviceConfig::bits(40)));
    config.limits.keep_bits = 0xff;
    let device = rig.translated(config);
    for sync in [CpuSync::Sync, CpuSync::Skip] {
        let attrs = Attrs { sync, ..Attrs::default() };
        let buffer = rig.buffer(0x21, 64);
        let mapping = device.map_single_with(buffer, Direction::FromDevice, attrs).unwrap();
        // The first slot of the pool, and the granule whose zeros the device may read.
        assert_eq!(rig.host.taken(), [WrittenBack(span(RAM, g))]);
        device.sync_for_cpu(&mapping, 1, 2).unwrap();
        device.sync_for_device(&mapping, 3, 4).unwrap();
        let parts = [Invalidated(span(RAM + 0x22, 2)), WrittenBack(span(RAM + 0x24, 4))];
        assert_eq!(rig.host.taken(), parts);
        drop(unmap(&device, mapping));
        let all = (sync == CpuSync::Sync).then_some(Invalidated(span(RAM + 0x21, 64)));
        assert_eq!(rig.host.taken(), Vec::from_iter(all));
    }
}

fn buffers_of_whole_granules_are_not_bounced<const G: u32>() {
    let g = 1u64 << G;
    let rig = Rig::<G>::new(Flush::Strict);
    let device = rig.translated(untrusted(DeviceConfig::bits(40)));
    for (offset, len, bounced) in [(0, g, false), (0, 4 * g, false), (g / 2, g, true), (0, 8, true)]
    {
        let mapping = device.map_single(rig.buffer(offset, len), Direction::ToDevice).unwrap();
        assert_eq!(mapping.is_bounced(), bounced);
        drop(unmap(&device, mapping));
    }
}
