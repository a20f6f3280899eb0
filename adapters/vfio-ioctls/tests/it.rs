//! A guest's memory as regions, mapped into a container of this process, which pins it and writes
//! page tables without any device.

#![expect(unsafe_code, reason = "a VMM answers for its guest's memory")]

#[path = "../examples/guest_disk/cloud_hypervisor.rs"]
mod cloud_hypervisor;

use std::fs::File;
use std::sync::Arc;

use cloud_hypervisor::{ExternalDmaMapping, GuestDma};
use dmaspan::{Account, Container, HostAddr, Iova, IovaRange, Prot};
use dmaspan_linux::LinuxPinner;
use dmaspan_linux::mem::AdoptError;
use dmaspan_linux::plan::{Mapper, Region};
use dmaspan_vfio_ioctls::{GuestError, guest_region, guest_regions};
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryAtomic, GuestMemoryMmap, GuestRegionMmap,
};

const MIB: u64 = 1 << 20;
const HIGH: u64 = 4 << 30;

type Space = Container<LinuxPinner<HostAddr>, parking_lot::RawMutex>;

fn space() -> Space {
    Container::new(LinuxPinner::new().unwrap(), Account::new(1 << 30))
}

fn file(len: u64) -> File {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(len).unwrap();
    file
}

/// A region of a guest, of a file from an offset on or without one.
fn region(at: u64, len: u64, file: Option<(&File, u64)>) -> GuestRegionMmap {
    let file = file.map(|(file, offset)| FileOffset::new(file.try_clone().unwrap(), offset));
    GuestRegionMmap::from_range(GuestAddress(at), usize::try_from(len).unwrap(), file).unwrap()
}

fn guest(regions: Vec<GuestRegionMmap>) -> GuestMemoryMmap {
    GuestMemoryMmap::from_regions(regions).unwrap()
}

fn regions(guest: &GuestMemoryMmap) -> Vec<Region> {
    // SAFETY: it is memory of vm-memory.
    unsafe { guest_regions(guest) }.unwrap()
}

fn places(regions: &[Region]) -> Vec<(u64, u64)> {
    let place = |region: &Region| (region.iova.unwrap().get(), region.user.checked_len().unwrap());
    regions.iter().map(place).collect()
}

#[test]
fn a_guest_is_mapped_at_its_own_addresses_and_keeps_its_memory() {
    let ram = file(2 * MIB);
    let guest = guest(vec![region(MIB, 2 * MIB, Some((&ram, 0))), region(HIGH, MIB, None)]);
    guest.write_slice(b"low", GuestAddress(MIB + 5)).unwrap();
    guest.write_slice(b"high", GuestAddress(HIGH + 7)).unwrap();
    let regions = regions(&guest);
    assert_eq!(places(&regions), [(MIB, 2 * MIB), (HIGH, MIB)]);
    assert_eq!(regions[0].memory.file().map(|(_, offset)| offset), Some(0));
    assert!(regions[1].memory.file().is_none());
    assert!(regions.iter().all(|region| region.prot == Prot::READ_WRITE));
    let mapper = Mapper::new(space()).unwrap();
    let mapped = mapper.map(regions).unwrap();
    // It lives on without the guest.
    drop(guest);
    for (place, bytes) in [(MIB + 5, b"low\0"), (HIGH + 7, b"high")] {
        let maps = mapped.plan().maps();
        let map = maps.iter().find(|map| map.iova().contains(Iova::new(place))).unwrap();
        let skip = place - map.iova().start().get();
        let mut there = [0; 4];
        map.memory().read(map.memory().offset_of(map.user()).unwrap() + skip, &mut there).unwrap();
        assert_eq!(&there, bytes);
    }
    mapped.unmap().unwrap();
    assert_eq!(mapper.leaked_bytes(), 0);
}

#[test]
fn neighbours_of_one_file_are_one_map_and_no_others() {
    let [ram, other] = [file(8 * MIB), file(8 * MIB)];
    let of = |file, offset| Some((file, offset * MIB));
    for (second, is_one) in [
        (region(MIB, MIB, of(&ram, 1)), true),
        // Elsewhere in the file, of another file, without one, behind a hole.
        (region(MIB, MIB, of(&ram, 2)), false),
        (region(MIB, MIB, of(&other, 1)), false),
        (region(MIB, MIB, None), false),
        (region(2 * MIB, MIB, of(&ram, 1)), false),
    ] {
        let guest = guest(vec![region(0, MIB, of(&ram, 0)), second]);
        guest.write_obj(7_u64, GuestAddress(8)).unwrap();
        let found = regions(&guest);
        assert_eq!(found.len() == 1, is_one);
        if is_one {
            assert_eq!(places(&found), [(0, 2 * MIB)]);
            // It is the same memory.
            assert_eq!(found[0].memory.read_u64(8), Ok(7));
            guest.write_obj(9_u64, GuestAddress(2 * MIB - 8)).unwrap();
            assert_eq!(found[0].memory.read_u64(2 * MIB - 8), Ok(9));
        }
    }
}

#[test]
fn private_memory_of_a_file_is_mapped_by_its_address() {
    let ram = file(MIB);
    let private = MmapRegionBuilder::new(usize::try_from(MIB).unwrap())
        .with_mmap_prot(libc_prot())
        .with_mmap_flags(MAP_PRIVATE)
        .with_file_offset(FileOffset::new(ram.try_clone().unwrap(), 0))
        .build()
        .unwrap();
    let guest = guest(vec![GuestRegionMmap::new(private, GuestAddress(0)).unwrap()]);
    guest.write_obj(7_u64, GuestAddress(0)).unwrap();
    let found = regions(&guest);
    assert!(found[0].memory.file().is_none());
    assert_eq!(found[0].memory.read_u64(0), Ok(7));
}

/// `PROT_READ | PROT_WRITE`, and `MAP_PRIVATE` (mmap(2)).
const fn libc_prot() -> i32 {
    3
}
const MAP_PRIVATE: i32 = 2;

#[test]
fn a_region_that_cannot_be_mapped_is_named_and_nothing_is_mapped() {
    let guest = guest(vec![region(0, MIB, None), region(HIGH, 4096 + 512, None)]);
    // SAFETY: it is memory of vm-memory.
    let refused = unsafe { guest_regions(&guest) }.unwrap_err();
    let GuestError::Region { start: HIGH, len: 4608, source } = &refused else {
        panic!("{refused}")
    };
    assert!(matches!(source, AdoptError::Unaligned { .. }));
    assert!(refused.to_string().contains("0x100000000"), "{refused}");
}

#[test]
fn whichever_map_is_refused_nothing_is_left() {
    let ram = file(3 * MIB);
    let layout = [0, HIGH, 2 * HIGH];
    let all = layout.iter().zip(0..).map(|(&at, n)| region(at, MIB, Some((&ram, n * MIB))));
    let guest = guest(all.collect());
    for refused in layout {
        let mapper = Mapper::new(space()).unwrap();
        let page =
            Arc::new(dmaspan_linux::Memory::new(dmaspan_linux::MemoryKind::Base, 4096).unwrap());
        let in_the_way =
            mapper.map([Region::whole(&page, Prot::READ).at(Iova::new(refused))]).unwrap();
        assert!(mapper.map(regions(&guest)).is_err());
        assert_eq!(mapper.mapped_bytes(), 4096);
        in_the_way.unmap().unwrap();
        let mapped = mapper.map(regions(&guest)).unwrap();
        assert_eq!(mapped.bytes(), 3 * MIB);
        mapped.unmap().unwrap();
    }
}

#[test]
fn a_dimm_comes_and_goes_with_its_memory() {
    let mapper = Mapper::new(space()).unwrap();
    let dimm = Arc::new(region(HIGH, MIB, None));
    // SAFETY: it is memory of vm-memory.
    let mapped = mapper.map([unsafe { guest_region(&dimm) }.unwrap()]).unwrap();
    assert_eq!(Arc::strong_count(&dimm), 2);
    mapped.unmap().unwrap();
    assert_eq!(Arc::strong_count(&dimm), 1);
}

#[test]
fn a_virtual_iommu_maps_across_regions_and_unmaps_over_gaps() {
    let space = space();
    let guest = guest(vec![region(0, MIB, None), region(MIB, MIB, None), region(HIGH, MIB, None)]);
    let dma = GuestDma { space: &space, guest: GuestMemoryAtomic::new(guest) };
    let mapped = || space.list().count();
    dma.map(16 * MIB, MIB / 2, MIB).unwrap();
    assert_eq!(mapped(), 2);
    dma.map(20 * MIB, HIGH, MIB / 2).unwrap();
    // The second half of it is in a hole, or already mapped.
    assert!(dma.map(32 * MIB, MIB + MIB / 2, MIB).is_err());
    let overlap = dma.map(20 * MIB - MIB / 2, MIB / 2, MIB).unwrap_err();
    assert_eq!(overlap.raw_os_error(), Some(17));
    assert_eq!(mapped(), 3);
    assert!(dma.unmap(16 * MIB, MIB / 4).is_err());
    assert_eq!(mapped(), 3);
    dma.unmap(15 * MIB, 16 * MIB).unwrap();
    assert_eq!(mapped(), 0);
    dma.unmap(15 * MIB, 16 * MIB).unwrap();
    let range = IovaRange::from_len(Iova::new(0), 64 * MIB).unwrap();
    assert_eq!(dmaspan::DmaSpace::unmap(&space, range).unwrap(), 0);
}
