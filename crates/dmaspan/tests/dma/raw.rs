//! Mappings kept as addresses: everything that a driver may get wrong is refused.

use std::sync::Arc;

use dmaspan::dma::{
    Device, DeviceConfig, Direct, Error, Flush, NoPool, Piece, RawMemory, UnmapFailed, Unmapped,
};
use dmaspan::{Direction, DmaAddr, Errno};

use crate::common::{for_all_granules, span};
use crate::rig::{Dma as _, Host, Rig, pattern, untrusted};

for_all_granules!(
    what_was_not_mapped_so_is_not_unmapped,
    many_raw_mappings_end_in_any_order,
    only_what_is_mapped_is_synced_raw,
    what_is_quarantined_is_not_mapped_any_more,
);

#[test]
fn buffers_with_one_address_are_told_apart() {
    let ram = span(0x8000_0000, 1 << 20);
    let direct = Arc::new(Direct::<RawMemory, _>::new(ram, Host::default()));
    let device = Device::new(direct, NoPool, DeviceConfig::bits(40)).unwrap();
    let addr = DmaAddr::new(ram.paddr().get());
    let from = Direction::FromDevice;
    for (len, direction) in [(100, from), (50, Direction::ToDevice), (100, from)] {
        let piece = Piece::memory(span(ram.paddr().get(), len));
        // SAFETY: nobody touches the memory.
        let memory = unsafe { RawMemory::new(piece) };
        let raw = device.into_raw(device.map_single(memory, direction).unwrap()).unwrap();
        assert_eq!(raw, (addr, len));
    }
    let sync = |len, direction| device.sync_raw_for_cpu(addr, 0, len, direction);
    assert_eq!(sync(100, from), Ok(()));
    assert_eq!(sync(50, Direction::ToDevice), Ok(()));
    assert!(sync(60, Direction::ToDevice).is_err());
    for (len, direction, is_ok) in [
        (50, from, false),
        (50, Direction::ToDevice, true),
        (50, Direction::ToDevice, false),
        (100, from, true),
        (100, from, true),
        (100, from, false),
    ] {
        assert_eq!(device.unmap_raw(addr, len, direction).is_ok(), is_ok, "{len} {direction:?}");
    }
}

fn what_was_not_mapped_so_is_not_unmapped<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    let device = rig.translated(DeviceConfig::bits(40));
    let other = rig.translated(DeviceConfig::bits(40));
    let to = Direction::ToDevice;
    let mapping = device.map_single(rig.buffer(9, 90), to).unwrap();
    let UnmapFailed { error, mapping } = other.into_raw(mapping).unwrap_err();
    let mapping = mapping.unwrap();
    assert_eq!(error, Error::Foreign { addr: mapping.addr() });
    let (addr, len) = device.into_raw(mapping).unwrap();
    assert_eq!(len, 90);
    let before = rig.state();
    let beside = DmaAddr::new(addr.get() + 1);
    let wrong = |by: &Device<_, _>, addr, len, direction, error: Error, errno| {
        assert_eq!(by.unmap_raw(addr, len, direction).unwrap_err(), error);
        assert_eq!(error.errno(), errno);
        assert_eq!(rig.state(), before);
        assert_eq!(rig.behind().read(DmaAddr::new(beside.get() - 1), 90), Some(pattern(90, 1)));
    };
    wrong(&device, beside, 89, to, Error::NotMapped { addr: beside }, Errno::ENOENT);
    wrong(&other, addr, 90, to, Error::NotMapped { addr }, Errno::ENOENT);
    for len in [0, 89, 91, u64::MAX] {
        let error = Error::OtherLength { addr, len, mapped: 90 };
        wrong(&device, addr, len, to, error, Errno::EINVAL);
    }
    for direction in [Direction::FromDevice, Direction::Bidirectional] {
        let error = Error::OtherDirection { addr, direction, mapped: to };
        wrong(&device, addr, 90, direction, error, Errno::EINVAL);
    }
    assert!(matches!(device.unmap_raw(addr, 90, to), Ok(Unmapped::Released(_))));
    assert_eq!(device.unmap_raw(addr, 90, to).unwrap_err(), Error::NotMapped { addr });
    assert_eq!(rig.memory.violations(), []);
}

fn many_raw_mappings_end_in_any_order<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    let device = rig.translated(untrusted(DeviceConfig::bits(40)));
    let pinned = rig.memory.pinned_frames();
    let mut raw: Vec<_> = (0..300u64)
        .map(|n| {
            let (offset, len) = if n % 50 == 0 { (1, 8 + n) } else { (0, 1 << G) };
            let mapping = device.map_single(rig.buffer(offset, len), Direction::ToDevice).unwrap();
            device.into_raw(mapping).unwrap()
        })
        .collect();
    while !raw.is_empty() {
        let (addr, len) = raw.swap_remove(raw.len() * 7 / 11);
        let mapping = device.from_raw(addr, len, Direction::ToDevice).unwrap();
        assert_eq!((mapping.addr(), mapping.len()), (addr, len));
        assert!(device.from_raw(addr, len, Direction::ToDevice).is_err());
        let again = device.into_raw(mapping).unwrap();
        assert_eq!(again, (addr, len));
        assert!(device.unmap_raw(addr, len, Direction::ToDevice).is_ok());
    }
    assert_eq!((rig.pool.held(), rig.memory.pinned_frames()), (0, pinned));
    assert_eq!(rig.memory.violations(), []);
}

fn only_what_is_mapped_is_synced_raw<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    let device = rig.translated(untrusted(DeviceConfig::bits(40)));
    let from = Direction::FromDevice;
    let mapping = device.map_single(rig.buffer(9, 90), from).unwrap();
    let (addr, len) = device.into_raw(mapping).unwrap();
    let before = (rig.state(), rig.pool.copies());
    for (offset, len) in [(0, 0), (0, 91), (90, 1), (u64::MAX, 2)] {
        let outside = Err(Error::OutsideMapping { offset, len, mapped: 90 });
        assert_eq!(device.sync_raw_for_cpu(addr, offset, len, from), outside);
        assert_eq!(device.sync_raw_for_device(addr, offset, len, from), outside);
    }
    let direction = Direction::ToDevice;
    let other = Err(Error::OtherDirection { addr, direction, mapped: from });
    assert_eq!(device.sync_raw_for_cpu(addr, 0, 1, direction), other);
    assert_eq!(device.sync_raw_for_device(addr, 0, 1, direction), other);
    let addr_beside = DmaAddr::new(addr.get() + 8);
    let missing = Err(Error::NotMapped { addr: addr_beside });
    assert_eq!(device.sync_raw_for_cpu(addr_beside, 0, 1, from), missing);
    assert_eq!((rig.state(), rig.pool.copies()), before);
    assert_eq!(device.sync_raw_for_cpu(addr, 80, 10, from), Ok(()));
    assert_eq!(rig.pool.copies().bytes - before.1.bytes, 10);
    assert!(device.unmap_raw(addr, len, from).is_ok());
}

fn what_is_quarantined_is_not_mapped_any_more<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    let device = rig.translated(DeviceConfig::bits(40));
    let mapping = device.map_single(rig.buffer(9, 90), Direction::ToDevice).unwrap();
    let (addr, len) = device.into_raw(mapping).unwrap();
    rig.iotlb.fail_next_invalidations(1);
    let error = device.unmap_raw(addr, len, Direction::ToDevice).unwrap_err();
    assert!(matches!(error, Error::Quarantined { .. }), "{error}");
    let error = device.unmap_raw(addr, len, Direction::ToDevice).unwrap_err();
    assert_eq!(error, Error::NotMapped { addr });
    rig.domain.flush().unwrap();
    assert_eq!(rig.memory.violations(), []);
}
