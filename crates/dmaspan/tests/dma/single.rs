//! Single buffers through the DMA API: data, limits, refusals and what is left.

use std::sync::Arc;

use dmaspan::dma::{
    Attrs, Bounce, BouncePool, CpuSync, Device, DeviceConfig, DeviceLimits, Direct, DmaMemory,
    Error, Flush, NoPool, Piece, Privilege, RawMemory, Translation, UnmapFailed, Unmapped, Via,
};
use dmaspan::{Direction, Errno, Iova, PhysAddr, Prot, Span};
use dmaspan_sim::memory::FrameState;
use dmaspan_sim::walker::Access;

use crate::common::{for_all_granules, range, span};
use crate::rig::{
    BYTES, Buffer, Caches, Dma, Host, Pool, RAM, Rig, non_coherent, pattern, unmap, untrusted,
};

for_all_granules!(
    data_arrives_on_every_path_in_every_direction,
    a_strict_unmap_leaves_nothing,
    every_refusal_leaves_all_as_it_was,
    every_step_may_fail,
    mappings_are_flushed_as_each_asks,
    a_dropped_mapping_leaks_and_never_frees,
    parts_outside_of_a_mapping_are_not_synced,
    caches_follow_devices_that_do_not_see_them,
    a_scope_unmaps_also_where_it_panics,
    a_device_may_do_what_its_direction_and_attributes_say,
);

const DIRECTIONS: [Direction; 3] =
    [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional];

/// Maps a buffer, has the device use all of it, and looks what arrived where.
fn round_trip<T: Translation<Memory = Buffer>, B: BouncePool>(
    device: &Device<T, B>,
    dma: &dyn Dma,
    buffer: Buffer,
    direction: Direction,
    is_bounced: impl Fn(&Buffer) -> bool,
) {
    let (len, bounced) = (buffer.span().len(), is_bounced(&buffer));
    let (frames, span) = (buffer.frames(), buffer.span());
    let mapping = device.map_single(buffer, direction).unwrap();
    let addr = mapping.addr();
    assert_eq!((mapping.len(), mapping.direction()), (len, direction));
    assert_eq!(mapping.is_bounced(), bounced, "{span} in {frames}");
    assert_eq!(mapping.flush(), Flush::Strict);
    if direction != Direction::FromDevice {
        assert_eq!(dma.read(addr, len).unwrap(), pattern(len, 1));
    }
    let written = len - len / 3;
    if direction != Direction::ToDevice {
        dma.write(addr, &pattern(written, 50)).unwrap();
    }
    let buffer = unmap(device, mapping);
    assert_eq!(buffer.span(), span);
    let mut expected = pattern(len, 1);
    if direction != Direction::ToDevice {
        let written = pattern(written, 50);
        expected[..written.len()].copy_from_slice(&written);
    }
    assert_eq!(buffer.bytes(), expected, "what was not written is as it was");
    assert!(buffer.is_whole());
}

fn data_arrives_on_every_path_in_every_direction<const G: u32>() {
    let g = 1u64 << G;
    let rig = Rig::<G>::new(Flush::Strict);
    let trusted = rig.translated(DeviceConfig::bits(40));
    let suspect = rig.translated(untrusted(DeviceConfig::bits(40)));
    let direct = rig.direct(DeviceConfig::bits(40)).unwrap();
    let mut near = DeviceConfig::bits(40);
    near.limits.last = rig.pool.span().last().get();
    near.limits.keep_bits = 0x1ff;
    let far = rig.direct(near).unwrap();
    for direction in DIRECTIONS {
        for (offset, len) in [(0, g), (0, 3 * g), (0, 1), (g - 1, 2), (g / 2 + 3, 2 * g), (7, 100)]
        {
            let buffer = || rig.buffer(offset, len);
            let is_uneven =
                |b: &Buffer| !(b.span().paddr().get() | b.span().len()).is_multiple_of(g);
            round_trip(&trusted, &rig.behind(), buffer(), direction, |_| false);
            round_trip(&suspect, &rig.behind(), buffer(), direction, is_uneven);
            round_trip(&direct, &rig.beside(), buffer(), direction, |_| false);
            round_trip(&far, &rig.beside(), buffer(), direction, |_| true);
        }
    }
    assert_eq!((rig.pool.held(), rig.memory.violations()), (0, vec![]));
}

fn a_strict_unmap_leaves_nothing<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Lazy);
    let before = rig.state();
    let dma = rig.behind();
    for config in [DeviceConfig::bits(32), untrusted(DeviceConfig::bits(32))] {
        let device = rig.translated(config);
        let attrs = Attrs { flush: Some(Flush::Strict), ..Attrs::default() };
        let buffer = rig.buffer(5, 100);
        let mapping = device.map_single_with(buffer, Direction::Bidirectional, attrs).unwrap();
        let addr = mapping.addr();
        assert!(dma.read(addr, 100).is_some());
        drop(unmap(&device, mapping));
        assert_eq!(dma.read(addr, 1), None, "neither tables nor the IOTLB translate it");
        assert_eq!(rig.iotlb.stale_leaves(range(0, 1 << 47)), []);
        let (held, _, pinned, waiting, _) = rig.state();
        assert_eq!((held, pinned, waiting), (before.0, before.2, before.3));
        // The IOVAs too: the next mapping has them again.
        let mapping = device.map_single(rig.buffer(5, 100), Direction::Bidirectional).unwrap();
        assert_eq!(mapping.addr().get() >> G, addr.get() >> G);
        let _ = device.unmap(mapping).unwrap();
        rig.domain.flush().unwrap();
    }
    assert_eq!(rig.memory.violations(), []);
}

/// Pieces that nobody keeps.
struct Pieces(Vec<Piece>);

// SAFETY: no device of these tests touches them.
unsafe impl DmaMemory for Pieces {
    fn pieces(&self) -> &[Piece] {
        &self.0
    }
}

type DirectPieces = Direct<Box<dyn DmaMemory>, Host>;

fn direct_pieces<B: BouncePool>(
    config: DeviceConfig,
    pool: B,
) -> Result<Device<DirectPieces, B>, Error> {
    let direct = Arc::new(Direct::new(span(RAM, BYTES), Host::default()));
    Device::new(direct, pool, config)
}

#[test]
fn memory_of_no_piece_or_of_several_is_refused() {
    let device = direct_pieces(DeviceConfig::bits(40), NoPool).unwrap();
    for pieces in [0, 2, 3] {
        let memory = Box::new(Pieces(vec![Piece::memory(span(RAM, 8)); pieces]));
        let refused = device.map_single(memory, Direction::ToDevice).unwrap_err();
        assert_eq!(refused.error, Error::NotSingle { pieces });
        let text = match pieces {
            0 => "a buffer without bytes cannot be mapped: leave it out".to_owned(),
            _ => format!("memory of {pieces} pieces cannot be mapped as one: map it as a list"),
        };
        assert_eq!(refused.error.to_string(), text);
        assert_eq!(refused.memory.unwrap().pieces().len(), pieces);
    }
}

#[test]
fn a_sync_of_no_bytes_says_that_and_one_of_too_many_where_the_mapping_ends() {
    let device = direct_pieces(DeviceConfig::bits(40), NoPool).unwrap();
    let memory = Box::new(Pieces(vec![Piece::memory(span(RAM, 8))]));
    let mapping = device.map_single(memory, Direction::ToDevice).unwrap();
    let sync = |offset, len| device.sync_for_device(&mapping, offset, len).unwrap_err().to_string();
    assert_eq!(sync(4, 0), "no bytes were asked for, of the 0x8 bytes mapped");
    assert_eq!(sync(4, 5), "0x5 bytes at offset 0x4 are not within the 0x8 bytes mapped");
    let _ = device.unmap(mapping).unwrap();
}

#[test]
fn every_mask_reaches_exactly_what_it_covers() {
    for bits in 20..=64u32 {
        let last = dmaspan::lg2::mask(bits);
        let direct = Direct::<RawMemory, _>::new(span(0, 1 << 63), Host::default());
        let device = Device::new(Arc::new(direct), NoPool, DeviceConfig::bits(bits)).unwrap();
        let fits = Span::new(PhysAddr::new(last - 0xff), 0x100).unwrap();
        // SAFETY: nobody touches the memory.
        let memory = unsafe { RawMemory::new(Piece::memory(fits)) };
        let mapping = device.map_single(memory, Direction::ToDevice).unwrap();
        assert_eq!(mapping.addr().get(), last - 0xff);
        let _ = device.unmap(mapping).unwrap();
        for via in [Via::Memory, Via::Bus, Via::HostBridge] {
            let Ok(above) = Span::new(PhysAddr::new(last - 0xff), 0x101) else {
                assert_eq!(bits, 64);
                continue;
            };
            // SAFETY: as above.
            let memory = unsafe { RawMemory::new(Piece { span: above, via }) };
            let refused = device.map_single(memory, Direction::ToDevice).unwrap_err();
            assert_eq!(
                refused.error,
                match via {
                    Via::HostBridge => Error::NotMemory { span: above },
                    Via::Bus => Error::PeerUnreachable { span: above, last },
                    Via::Memory => Error::Unreachable { span: above, last },
                }
            );
            assert_eq!(refused.memory.unwrap().piece().span, above);
        }
    }
    for bits in 20..=64 {
        let rig = Rig::<12>::new(Flush::Strict);
        let device = rig.translated(DeviceConfig::bits(bits));
        let mappings: Vec<_> = (0..20)
            .map(|n| device.map_single(rig.buffer(n, 5000), Direction::ToDevice).unwrap())
            .collect();
        let ends = mappings.iter().map(|m| m.addr().get() + (m.len() - 1));
        assert!(ends.max().unwrap() <= dmaspan::lg2::mask(bits));
        mappings.into_iter().for_each(|mapping| drop(unmap(&device, mapping)));
    }
}

#[test]
fn a_device_whose_limits_cannot_be_kept_is_refused() {
    let rig = Rig::<12>::new(Flush::Strict);
    let mask = |last| DeviceConfig {
        limits: DeviceLimits { last, ..DeviceLimits::bits(64) },
        ..DeviceConfig::bits(64)
    };
    let translated = |config| Device::new(Arc::clone(&rig.domain), NoPool, config).map(drop);
    let lowest = rig.domain.iovas().aperture().start().get();
    assert_eq!(translated(mask(lowest + 4094)), Err(Error::Mask { last: lowest + 4094, lowest }));
    assert_eq!(translated(mask(lowest + 4095)), Ok(()));
    // Where nothing is translated: some memory, or a slot.
    let refused = direct_pieces(mask(RAM - 1), NoPool).map(drop).unwrap_err();
    assert_eq!(refused, Error::Mask { last: RAM - 1, lowest: RAM });
    assert_eq!(refused.errno(), Errno::EIO);
    assert!(direct_pieces(mask(RAM), NoPool).is_ok());
    // Bits to keep that are not low ones.
    for keep_bits in [2, 5, !0 << 1] {
        let mut config = mask(u64::MAX);
        config.limits.keep_bits = keep_bits;
        let refused = direct_pieces(config, NoPool).map(drop).unwrap_err();
        assert!(matches!(refused, Error::Limit { value, .. } if value == keep_bits), "{refused}");
        assert_eq!(translated(config), Err(refused));
    }
    let high = Direct::<Buffer, _>::new(span(RAM + BYTES, BYTES), Host::default());
    let high = Arc::new(high);
    for (last, is_ok) in [(RAM - 1, false), (RAM, true)] {
        let device = Device::new(Arc::clone(&high), rig.pool.clone(), mask(last));
        let refused = Error::Mask { last, lowest: RAM };
        assert_eq!(device.map(drop), if is_ok { Ok(()) } else { Err(refused) });
    }
    let with = |change: fn(&mut DeviceLimits)| {
        let mut config = DeviceConfig::bits(48);
        change(&mut config.limits);
        let direct = direct_pieces(config, NoPool).map(drop);
        (translated(config), direct)
    };
    let limit = |what, value, limit| Err(Error::Limit { what, value, limit });
    assert_eq!(with(|l| l.keep_bits = 0x1fff), (limit("alignment bits", 0x1fff, 0xfff), Ok(())));
    assert_eq!(with(|l| l.keep_bits = 0xfff), (Ok(()), Ok(())));
    let crooked = 0x3000;
    assert_eq!(
        with(|l| l.boundary = Some(0x3000)),
        (limit("a boundary", crooked, 0x1000), limit("a boundary", crooked, 1))
    );
    assert_eq!(with(|l| l.boundary = Some(0x800)), (limit("a boundary", 0x800, 0x1000), Ok(())));
    assert_eq!(
        with(|l| l.max_segment = 0),
        (limit("segments", 0, 0x1000), limit("segments", 0, 1))
    );
}

fn every_refusal_leaves_all_as_it_was<const G: u32>() {
    let g = 1u64 << G;
    let rig = Rig::<G>::new(Flush::Strict);
    let suspect = rig.translated(untrusted(DeviceConfig::bits(40)));
    let trusted = rig.translated(DeviceConfig::bits(40));
    let before = rig.state();
    // More than the pool has.
    let always = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(40) };
    let buffer = rig.buffer(1, 20 * g);
    let span = buffer.span();
    let refused = rig.translated(always).map_single(buffer, Direction::FromDevice).unwrap_err();
    assert_eq!(refused.error, Error::NoSlot { span, len: 20 * g });
    assert_eq!(refused.error.errno(), Errno::ENOMEM);
    assert!(refused.memory.is_some_and(|buffer| buffer.span() == span));
    // Registers that share a granule.
    let buffer = rig.buffer(1, 20).via(Via::HostBridge);
    let span = buffer.span();
    let refused = suspect.map_single(buffer, Direction::FromDevice).unwrap_err();
    assert_eq!(refused.error, Error::NotMemory { span });
    assert_eq!(refused.error.errno(), Errno::EPERM);
    drop(refused);
    assert_eq!(rig.state(), before);
    // Another device's mapping.
    let mapping = trusted.map_single(rig.buffer(1, 20), Direction::Bidirectional).unwrap();
    let mapped = rig.state();
    let foreign = Error::Foreign { addr: mapping.addr() };
    assert_eq!(suspect.sync_for_cpu(&mapping, 0, 1), Err(foreign));
    assert_eq!(suspect.sync_for_device(&mapping, 0, 1), Err(foreign));
    let UnmapFailed { error, mapping } = suspect.unmap(mapping).unwrap_err();
    assert_eq!((error, rig.state()), (foreign, mapped));
    let mapping = mapping.unwrap();
    assert!(rig.behind().read(mapping.addr(), 20).is_some());
    drop(unmap(&trusted, mapping));
    assert_eq!((rig.state().2, rig.memory.violations()), (before.2, vec![]));
}

fn every_step_may_fail<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    let device = rig.translated(untrusted(DeviceConfig::bits(40)));
    let dma = rig.behind();
    // The tables are there, so that their number tells a leak.
    drop(unmap(&device, device.map_single(rig.buffer(0, 8), Direction::ToDevice).unwrap()));
    let before = rig.state();
    let (mut refused, mut in_quarantine, mut through, mut slots_lost) = (0, 0, 0, 0);
    rig.faults.sweep(|n| {
        // Bounced whole, and its ends.
        for (direction, (len, slots)) in
            DIRECTIONS.into_iter().flat_map(|d| [(d, (300, 1)), (d, (2 << G, 2))])
        {
            match device.map_single(rig.buffer(3, len), direction) {
                Err(failed) => {
                    refused += 1;
                    if let Error::Quarantined { .. } = failed.error {
                        assert!(failed.memory.is_none());
                        slots_lost += slots;
                    } else {
                        assert!(failed.memory.is_some_and(|b| b.bytes() == pattern(len, 1)));
                    }
                }
                Ok(mapping) => {
                    let addr = mapping.addr();
                    assert!(dma.read(addr, len).is_some());
                    match device.unmap(mapping) {
                        Ok(Unmapped::Released(buffer)) => {
                            assert_eq!(buffer.bytes(), pattern(len, 1));
                            assert_eq!(dma.read(addr, 1), None);
                            through += 1;
                        }
                        Ok(Unmapped::Queued) => panic!("strict"),
                        Err(failed) => {
                            assert!(matches!(failed.error, Error::Quarantined { .. }));
                            assert!(failed.mapping.is_none());
                            in_quarantine += 1;
                            slots_lost += slots;
                            let frames = (3 + len).div_ceil(1 << G);
                            let kept = before.2 + frames;
                            assert_eq!(rig.memory.pinned_frames(), kept, "step {n}: kept");
                        }
                    }
                }
            }
            rig.domain.flush().unwrap();
            let (held, tables, pinned, waiting, _) = rig.state();
            assert_eq!((tables, pinned, waiting), (before.1, before.2, before.3), "step {n}");
            let lost = (held, rig.pool.quarantined(), rig.pool.lost());
            assert_eq!(lost, (slots_lost, slots_lost, 0), "step {n}");
        }
    });
    assert!(refused >= 4 && in_quarantine >= 2 && through > 12);
    assert_eq!(rig.memory.violations(), []);
}

fn mappings_are_flushed_as_each_asks<const G: u32>() {
    for domain in [Flush::Lazy, Flush::Strict] {
        let rig = Rig::<G>::new(domain);
        for wish in [None, Some(Flush::Lazy), Some(Flush::Strict)] {
            for config in [DeviceConfig::bits(40), untrusted(DeviceConfig::bits(40))] {
                let device = rig.translated(config);
                let attrs = Attrs { flush: wish, ..Attrs::default() };
                let buffer = rig.buffer(0, 1 << G);
                let mapping = device.map_single_with(buffer, Direction::ToDevice, attrs).unwrap();
                let addr = mapping.addr();
                assert!(rig.behind().read(addr, 1).is_some());
                let is_untrusted = config != DeviceConfig::bits(40);
                let is_lazy = !is_untrusted && wish.unwrap_or(domain) == Flush::Lazy;
                let unmapped = device.unmap(mapping).unwrap();
                assert_eq!(matches!(unmapped, Unmapped::Queued), is_lazy);
                assert_eq!(rig.domain.waiting(), (usize::from(is_lazy), 0));
                assert_eq!(rig.behind().read(addr, 1).is_some(), is_lazy);
                rig.domain.flush().unwrap();
                assert_eq!(rig.behind().read(addr, 1), None);
                assert_eq!(rig.domain.iovas().stats().live, 0);
            }
        }
        assert_eq!(rig.memory.violations(), []);
    }
}

fn a_dropped_mapping_leaks_and_never_frees<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    let config = untrusted(DeviceConfig::bits(40));
    for (offset, slots) in [(0, 0), (1, 1)] {
        let device = rig.translated(config);
        let buffer = rig.buffer(offset, 1 << G);
        let frame = buffer.frames().paddr();
        let mapping = device.map_single(buffer, Direction::Bidirectional).unwrap();
        let addr = mapping.addr();
        drop(mapping);
        drop(device);
        assert!(rig.behind().write(addr, &[1; 8]).is_some(), "the device goes on");
        assert_eq!(rig.memory.frame_state(frame), Some(FrameState::Owned));
        assert_eq!(rig.pool.held(), slots);
    }
    assert_eq!(rig.memory.violations(), []);
}

fn parts_outside_of_a_mapping_are_not_synced<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    let device = rig.translated(non_coherent(untrusted(DeviceConfig::bits(40))));
    let mapping = device.map_single(rig.buffer(3, 100), Direction::Bidirectional).unwrap();
    let (before, copies) = (rig.state(), rig.pool.copies());
    for (offset, len) in
        [(0, 0), (100, 0), (0, 101), (99, 2), (100, 1), (u64::MAX, 1), (1, u64::MAX), (50, 51)]
    {
        let outside = Err(Error::OutsideMapping { offset, len, mapped: 100 });
        assert_eq!(device.sync_for_cpu(&mapping, offset, len), outside);
        assert_eq!(device.sync_for_device(&mapping, offset, len), outside);
    }
    assert_eq!((rig.state(), rig.pool.copies()), (before, copies));
    for (offset, len) in [(0, 100), (99, 1), (0, 1)] {
        device.sync_for_cpu(&mapping, offset, len).unwrap();
        device.sync_for_device(&mapping, offset, len).unwrap();
    }
    drop(unmap(&device, mapping));
}

fn caches_follow_devices_that_do_not_see_them<const G: u32>() {
    use Caches::{Invalidated, WrittenBack};
    let rig = Rig::<G>::new(Flush::Strict);
    let config = non_coherent(DeviceConfig::bits(40));
    let (translated, direct) = (rig.translated(config), rig.direct(config).unwrap());
    let seeing = rig.translated(DeviceConfig::bits(40));
    for direction in DIRECTIONS {
        for sync in [CpuSync::Sync, CpuSync::Skip] {
            let attrs = Attrs { sync, ..Attrs::default() };
            let buffer = rig.buffer(100, 200);
            let whole = buffer.span();
            let part = span(whole.paddr().get() + 7, 9);
            let reads = direction != Direction::ToDevice;
            let mut expected = Vec::new();
            // Also for a device that only writes.
            expected.extend((sync == CpuSync::Sync).then_some(WrittenBack(whole)));
            expected.extend(reads.then_some(Invalidated(part)));
            expected.push(WrittenBack(part));
            expected.extend((reads && sync == CpuSync::Sync).then_some(Invalidated(whole)));
            let mapping = translated.map_single_with(buffer, direction, attrs).unwrap();
            translated.sync_for_cpu(&mapping, 7, 9).unwrap();
            translated.sync_for_device(&mapping, 7, 9).unwrap();
            let buffer = unmap(&translated, mapping);
            assert_eq!(rig.host.taken(), expected);
            let mapping = direct.map_single_with(buffer, direction, attrs).unwrap();
            direct.sync_for_cpu(&mapping, 7, 9).unwrap();
            direct.sync_for_device(&mapping, 7, 9).unwrap();
            let buffer = unmap(&direct, mapping).via(Via::HostBridge);
            assert_eq!(rig.host.taken(), expected);
            // Registers have no caches, and some devices see them.
            let mapping = translated.map_single_with(buffer, direction, attrs).unwrap();
            translated.sync_for_device(&mapping, 7, 9).unwrap();
            let buffer = unmap(&translated, mapping).via(Via::Memory);
            let mapping = seeing.map_single_with(buffer, direction, attrs).unwrap();
            seeing.sync_for_cpu(&mapping, 7, 9).unwrap();
            drop(unmap(&seeing, mapping));
            assert_eq!(rig.host.taken(), []);
        }
    }
}

fn a_scope_unmaps_also_where_it_panics<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Lazy);
    let device = rig.translated(DeviceConfig::bits(40));
    let (dma, before) = (rig.behind(), rig.memory.pinned_frames());
    let run = |buffer, then: &dyn Fn()| {
        device.with_mapped(buffer, Direction::Bidirectional, Attrs::default(), |mapping| {
            dma.write(mapping.addr(), &pattern(mapping.len(), 9)).unwrap();
            then();
            mapping.addr()
        })
    };
    let (buffer, addr) = run(rig.buffer(10, 50), &|| ()).unwrap();
    assert_eq!((buffer.bytes(), dma.read(addr, 1)), (pattern(50, 9), None));
    drop(buffer);
    let panicking = || run(rig.buffer(10, 50), &|| panic!("on purpose")).map(drop);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panicking)).is_err());
    assert_eq!((dma.read(addr, 1), rig.memory.pinned_frames()), (None, before));
    // Nothing was mapped: nothing runs. Hardware does not answer: it has run.
    rig.faults.arm(1);
    let failed = run(rig.buffer(10, 50), &|| unreachable!()).unwrap_err();
    assert!(failed.memory.is_some() && failed.result.is_none(), "{}", failed.error);
    drop(failed);
    rig.faults.disarm();
    rig.iotlb.fail_next_invalidations(1);
    let failed = run(rig.buffer(10, 50), &|| ()).unwrap_err();
    assert!(matches!(failed.error, Error::Quarantined { .. }));
    assert!(failed.memory.is_none() && failed.result.is_some());
    assert_eq!(rig.memory.pinned_frames(), before + 1);
    rig.domain.flush().unwrap();
    assert_eq!((rig.memory.pinned_frames(), rig.memory.violations()), (before, vec![]));
}

fn a_device_may_do_what_its_direction_and_attributes_say<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    for (config, cached) in [
        (DeviceConfig::bits(40), Prot::CACHE),
        (non_coherent(DeviceConfig::bits(40)), Prot::empty()),
    ] {
        let device = rig.translated(config);
        for direction in DIRECTIONS {
            for privilege in [Privilege::Any, Privilege::Privileged] {
                let attrs = Attrs { privilege, ..Attrs::default() };
                let buffer = rig.buffer(0, 64);
                let mapping = device.map_single_with(buffer, direction, attrs).unwrap();
                let iova = Iova::new(mapping.addr().get());
                let hit = rig.iotlb.translate(iova, Access::Read);
                // The simulated device's accesses are not privileged.
                assert_eq!(hit.is_ok(), privilege == Privilege::Any);
                if let Ok(hit) = hit {
                    // Stage 1 has no entry that is only written.
                    let writes = direction != Direction::ToDevice;
                    assert_eq!(hit.prot.contains(Prot::WRITE), writes);
                    assert_eq!(hit.prot & Prot::CACHE, cached);
                }
                drop(unmap(&device, mapping));
            }
        }
    }
}

#[test]
fn what_can_be_mapped_at_once_is_what_a_slot_has_where_anything_may_be_bounced() {
    let rig = Rig::<12>::new(Flush::Strict);
    let pool = rig.pool.span().len();
    let aperture = rig.domain.iovas().aperture();
    // Only ends are bounced.
    let distrusted = rig.translated(untrusted(DeviceConfig::bits(30)));
    assert_eq!(distrusted.max_mapping_len(), (1 << 30) - aperture.start().get());
    let mut always = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(40) };
    assert_eq!(rig.translated(always).max_mapping_len(), pool);
    always.limits.keep_bits = 0xfff;
    assert_eq!(rig.translated(always).max_mapping_len(), pool - 0xfff);
    assert_eq!(rig.direct(always).unwrap().max_mapping_len(), pool - 0xfff);
    let trusted = rig.translated(DeviceConfig::bits(30));
    assert_eq!(trusted.max_mapping_len(), (1 << 30) - aperture.start().get());
    assert_eq!(trusted.merge_boundary(), Some(4096));
    let direct = rig.direct(DeviceConfig::bits(40)).unwrap();
    assert_eq!((direct.max_mapping_len(), direct.merge_boundary()), (BYTES, None));
    let mut near = DeviceConfig::bits(40);
    near.limits.last = RAM + BYTES - 2;
    let near: Device<_, Pool> = rig.direct(near).unwrap();
    assert_eq!(near.max_mapping_len(), pool);
}

#[test]
fn one_buffer_may_be_in_several_mappings_and_its_driver_keeps_it() {
    let direct = Arc::new(Direct::<Arc<Shared>, _>::new(span(RAM, BYTES), Host::default()));
    let device = Device::new(direct, NoPool, DeviceConfig::bits(40)).unwrap();
    let buffer = Arc::new(Shared([Piece::memory(span(RAM, 8))]));
    let map = || device.map_single(Arc::clone(&buffer), Direction::ToDevice).unwrap();
    let (one, two) = (map(), map());
    assert_eq!((one.addr(), Arc::strong_count(&buffer)), (two.addr(), 3));
    let _ = device.unmap(one).unwrap();
    let _ = device.unmap(two).unwrap();
    assert_eq!(Arc::strong_count(&buffer), 1);
}

/// A piece that nobody keeps.
#[derive(Debug)]
struct Shared([Piece; 1]);

// SAFETY: no device of these tests touches it.
unsafe impl DmaMemory for Shared {
    fn pieces(&self) -> &[Piece] {
        &self.0
    }
}

#[test]
fn a_device_whose_buffers_are_all_bounced_needs_slots() {
    let config = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(40) };
    let direct = Arc::new(Direct::<Buffer, _>::new(span(RAM, 1 << 20), Host::default()));
    assert_eq!(Device::new(direct, NoPool, config).map(|_| ()), Err(Error::NoPool));
}
