//! Lists for devices that may see nothing but what they were given.

use std::sync::Arc;

use dmaspan::dma::{Device, DeviceConfig, Error, Flush, Trust, Unmapped};
use dmaspan::{Direction, Iova, PhysAddr};
use dmaspan_sim::bounce::{POISON, SimPool};
use dmaspan_sim::device::SimDevice;
use dmaspan_sim::memory::SimMemory;

use super::{G, Pieces, Rig, Space, config, memory, refused, rig, room};
use crate::common::span;

/// Where its memory begins.
const RAM: u64 = 0x100_0000;

/// A megabyte, the pool in its first 16 granules, everything else full of secrets.
fn untrusted(rig: &Rig) -> (Device<Space, SimPool>, SimPool, Arc<SimMemory>) {
    let ram = Arc::new(SimMemory::new(PhysAddr::new(RAM), 1 << 20, 12).unwrap());
    let pool = SimPool::new(Arc::clone(&ram), span(RAM, 16 * G)).unwrap();
    let rest = span(RAM + 16 * G, (1 << 20) - 16 * G);
    ram.allocate_at(rest).unwrap();
    ram.pin_frames(&[rest]);
    let secrets = vec![0x77; usize::try_from(rest.len()).unwrap()];
    ram.cpu_write(rest.paddr(), &secrets).unwrap();
    let config = DeviceConfig { trust: Trust::Untrusted, ..config(None, 1 << 16) };
    let device = Device::new(Arc::clone(&rig.domain), pool.clone(), config).unwrap();
    (device, pool, ram)
}

/// A list whose first and third pieces share granules with secrets, and its bytes.
fn list(ram: &SimMemory) -> (Pieces, Vec<u8>) {
    let at = |offset: u64| RAM + 0x8_0000 + offset;
    let pieces = [(0x0100, 0x1234), (0x4000, 0x2000), (0x8000, 0x0800), (0xa000, 0x1000)];
    let mut bytes = Vec::new();
    for (offset, len) in pieces {
        let piece: Vec<u8> =
            (0..len).map(|n| u8::try_from((n * 7 + offset) % 64 + 1).unwrap()).collect();
        ram.cpu_write(PhysAddr::new(at(offset)), &piece).unwrap();
        bytes.extend(piece);
    }
    (Pieces(pieces.iter().map(|&(offset, len)| memory(at(offset), len)).collect()), bytes)
}

fn contents(ram: &SimMemory, list: &Pieces) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in &list.0 {
        let mut part = vec![0; usize::try_from(piece.span.len()).unwrap()];
        ram.cpu_read(piece.span.paddr(), &mut part).unwrap();
        bytes.extend(part);
    }
    bytes
}

#[test]
fn an_untrusted_device_sees_the_list_and_zeros_and_nothing_else() {
    let rig = rig(Flush::Lazy);
    let (device, pool, ram) = untrusted(&rig);
    let sim = SimDevice::new(rig.iotlb.clone(), Arc::clone(&ram));
    let (list, bytes) = list(&ram);
    let mut buf = room(4);
    let mapping = device.map_list(list.clone(), Direction::Bidirectional, &mut buf).unwrap();
    assert_eq!((mapping.bounced(), pool.held()), (2, 2), "what is on granules has no slot");
    let segments = &buf[..mapping.segment_count()];
    let mut seen = Vec::new();
    for segment in segments {
        let mut part = vec![0; usize::try_from(segment.len).unwrap()];
        sim.read(Iova::new(segment.addr.get()), &mut part).unwrap();
        seen.extend(part);
    }
    assert_eq!(seen, bytes);
    // All that it can read, over the whole range of IOVAs: the list's bytes and zeros.
    let iovas = mapping.iovas().unwrap();
    let mut all = Vec::new();
    for iova in (iovas.start().get()..=iovas.last().get()).step_by(4096) {
        let mut granule = [0; 4096];
        if sim.read(Iova::new(iova), &mut granule).is_ok() {
            all.extend(granule);
        }
    }
    assert!(all.len() > bytes.len());
    all.retain(|&byte| byte != 0);
    assert_eq!(all, bytes, "neither secrets nor {POISON:#x}");

    // What it writes arrives, by a sync or by the unmap, and nowhere else.
    let mut written = bytes;
    written.iter_mut().for_each(|byte| *byte ^= 0x80);
    let write = |bytes: &[u8]| {
        let mut rest = bytes;
        for segment in segments {
            let (part, behind) = rest.split_at(usize::try_from(segment.len).unwrap());
            sim.write(Iova::new(segment.addr.get()), part).unwrap();
            rest = behind;
        }
    };
    write(&written);
    assert_ne!(contents(&ram, &list), written);
    device.sync_list_for_cpu(&mapping).unwrap();
    assert_eq!(contents(&ram, &list), written);
    for piece in &list.0 {
        let len = usize::try_from(piece.span.len()).unwrap();
        ram.cpu_write(piece.span.paddr(), &vec![0x11; len]).unwrap();
    }
    device.sync_list_for_device(&mapping).unwrap();
    for segment in segments {
        let mut part = vec![0; usize::try_from(segment.len).unwrap()];
        sim.read(Iova::new(segment.addr.get()), &mut part).unwrap();
        assert!(part.iter().all(|&byte| byte == 0x11));
    }
    written.reverse();
    write(&written);
    let Ok(Unmapped::Released(list)) = device.unmap_list(mapping) else { panic!("not lazy") };
    assert_eq!(contents(&ram, &list), written);
    assert_eq!(pool.held(), 0);
    let mut before = [0; 0x100];
    ram.cpu_read(PhysAddr::new(RAM + 0x8_0000), &mut before).unwrap();
    assert_eq!(before, [0x77; 0x100]);
    assert_eq!(ram.violations(), []);
}

#[test]
fn a_list_whose_slots_do_not_suffice_is_refused_and_gives_them_back() {
    let rig = rig(Flush::Strict);
    let (device, pool, _ram) = untrusted(&rig);
    let at = |n: u64| RAM + 0x8_0000 + n * G;
    let list = Pieces((0..17).map(|n| memory(at(n), 100)).collect());
    let error = refused(&device, &list, 17);
    assert_eq!(error, Error::NoSlot { span: list.0[16].span, len: 100 });
    assert_eq!((pool.held(), rig.iotlb.counters().sync_maps), (0, 0));
    let list = Pieces(list.0[..9].to_vec());
    assert_eq!(refused(&device, &list, 8), Error::SegmentRoom { room: 8, needed: 9 });
    assert_eq!(pool.held(), 0);
}

#[test]
fn slots_stay_where_hardware_may_use_them() {
    let rig = rig(Flush::Strict);
    let (device, pool, ram) = untrusted(&rig);
    let (list, _) = list(&ram);
    let mut buf = room(4);
    let mapping = device.map_list(list, Direction::FromDevice, &mut buf).unwrap();
    rig.iotlb.fail_next_invalidations(1);
    let failed = device.unmap_list(mapping).unwrap_err();
    assert!(matches!(failed.error, Error::Quarantined { .. }) && failed.mapping.is_none());
    assert_eq!((pool.held(), pool.quarantined(), pool.lost()), (2, 2, 0));
    assert_eq!(rig.domain.waiting().1, 1);
}
