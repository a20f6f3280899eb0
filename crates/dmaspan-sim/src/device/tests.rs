//! A device over three pages of which the second lies elsewhere and the third is read-only.

use std::sync::Arc;

use dmaspan::iommu::{Invalidation, IommuOps, Scope, Tables};

use super::*;
use crate::memory::SimMemory;
use crate::walker::arm_lpae::{AddressHalf, ArmLpaeS1Walker, ArmS1WalkRegisters};
use crate::walker::{FaultKind, TableImage};

type TestDevice = SimDevice<ArmLpaeS1Walker, Arc<TableImage>, Arc<SimMemory>>;

/// 4K pages at the bottom and at the top of the 16 bits that the tables have: a root at level 3.
fn device(half: AddressHalf) -> (TestDevice, Arc<SimMemory>) {
    let image = Arc::new(TableImage::new());
    image.add_table(PhysAddr::new(0), 16);
    let words =
        [(0, 0x10_2747), (8, 0x10_0747), (16, 0x10_17c7), (24, 0x50_0747), (120, 0x10_3747)];
    for (paddr, word) in words {
        image.set(PhysAddr::new(paddr), word).unwrap();
    }
    let tcr = 5 << 32 | 2 << 30 | 48 << 16 | 48;
    let registers = ArmS1WalkRegisters { ttbr: 0, tcr, mair: 0xff00, half, ..Default::default() };
    let walker = ArmLpaeS1Walker::new(registers).unwrap();
    let memory = Arc::new(SimMemory::new(PhysAddr::new(0x10_0000), 0x4000, 12).unwrap());
    (SimDevice::new(Iotlb::new(walker, image), Arc::clone(&memory)), memory)
}

fn fault_of(error: DmaError) -> (FaultKind, u64, usize) {
    match error {
        DmaError::Fault { done, fault } => (fault.kind, fault.iova.get(), done),
        other => panic!("{other}"),
    }
}

#[test]
fn an_access_over_a_leaf_border_reaches_both_frames() {
    let (device, memory) = device(AddressHalf::Lower);
    device.write(Iova::new(0xffe), &[1, 2, 3, 4]).unwrap();
    let mut bytes = [0; 2];
    memory.cpu_read(PhysAddr::new(0x10_2ffe), &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2]);
    memory.cpu_read(PhysAddr::new(0x10_0000), &mut bytes).unwrap();
    assert_eq!(bytes, [3, 4]);
    let mut back = [0; 6];
    device.read(Iova::new(0xffd), &mut back).unwrap();
    assert_eq!(back, [0, 1, 2, 3, 4, 0]);
}

#[test]
fn an_access_ends_at_the_first_fault_with_the_bytes_before_it_done() {
    let (device, memory) = device(AddressHalf::Lower);
    let error = device.write(Iova::new(0x1ffc), &[9; 8]).unwrap_err();
    assert_eq!(fault_of(error), (FaultKind::Permission, 0x2000, 4));
    let mut bytes = [0; 4];
    memory.cpu_read(PhysAddr::new(0x10_0ffc), &mut bytes).unwrap();
    assert_eq!(bytes, [9; 4]);
    assert!(device.read(Iova::new(0x1ffc), &mut [0; 8]).is_ok());
    let error = device.read(Iova::new(0x4000), &mut [0; 8]).unwrap_err();
    assert_eq!(fault_of(error), (FaultKind::Translation, 0x4000, 0));
}

#[test]
fn a_translation_to_nowhere_is_a_bus_error() {
    let (device, _memory) = device(AddressHalf::Lower);
    let error = device.read(Iova::new(0x2ffe), &mut [0; 4]).unwrap_err();
    let nobody = BusError::Nobody { paddr: PhysAddr::new(0x50_0000) };
    assert_eq!(error, DmaError::Bus { iova: Iova::new(0x3000), done: 2, error: nobody });
}

#[test]
fn the_last_byte_of_the_space_is_reached_and_none_behind_it() {
    let (device, memory) = device(AddressHalf::Upper);
    device.write(Iova::new(u64::MAX - 1), &[5, 6]).unwrap();
    let mut bytes = [0; 2];
    memory.cpu_read(PhysAddr::new(0x10_3ffe), &mut bytes).unwrap();
    assert_eq!(bytes, [5, 6]);
    let wraps = DmaError::Wraps { iova: Iova::new(u64::MAX), len: 2 };
    assert_eq!(device.write(Iova::new(u64::MAX), &[0; 2]), Err(wraps));
    assert_eq!(device.write(Iova::new(u64::MAX), &[]), Ok(()));
}

#[test]
fn a_probe_finds_what_is_stale_and_nothing_after_the_sync() {
    let (device, _memory) = device(AddressHalf::Lower);
    let probe = || device.probe(Iova::new(0x1abc), Access::Read);
    assert_eq!(probe(), Some(PhysAddr::new(0x10_0abc)));
    device.iotlb().tables().set(PhysAddr::new(8), 0).unwrap();
    assert_eq!(probe(), Some(PhysAddr::new(0x10_0abc)));
    let ranges = [IovaRange::from_len(Iova::new(0x1000), 0x1000).unwrap()];
    let scope = Scope::Ranges(&ranges);
    let what = Invalidation { scope, leaf_sizes: 1 << 12, tables: Tables::Kept };
    device.iotlb().invalidate(&what).unwrap();
    assert_eq!(probe(), None);
}
