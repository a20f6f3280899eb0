//! Types of dma-api over a device.

use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use dma_api::{DmaDirection, DmaError};
use dmaspan::Iova;
use dmaspan::dma::Error;

use crate::rig::{Process, REFUSED, device, direct};

#[repr(align(4096))]
struct Page([u8; 4096]);

#[test]
fn a_device_writes_a_slice_of_a_page_sees_none_of_the_rest_and_faults_after_the_drop() {
    let (dma, ops, mut reach) = device(u64::MAX);
    let mut page = Box::new(Page([7; 4096]));
    page.0[100..612].fill(1);
    let map =
        dma.map_streaming_slice_for_device(&mut page.0[100..612], 1, DmaDirection::Bidirectional);
    let map = map.unwrap();
    let addr = map.dma_addr().as_u64();
    assert_eq!(ops.live(), (1, 0));
    let mut granule = vec![0; 4096];
    reach.read(&Process, Iova::new(addr & !0xfff), &mut granule).unwrap();
    assert!(!granule.contains(&7), "the device saw a neighbour");
    reach.write(&Process, Iova::new(addr & !0xfff), &[9; 4096]).unwrap();
    // Nothing is copied before the driver asks for it, and what it asks for only.
    assert_eq!(map.read_cpu(0), Some(1));
    map.complete_for_cpu(0..256);
    assert_eq!(
        (map.read_cpu(0), map.read_cpu(255), map.read_cpu(256)),
        (Some(9), Some(9), Some(1))
    );
    drop(map);
    assert_eq!(ops.live(), (0, 0));
    assert!(reach.write(&Process, Iova::new(addr), b"late").is_err());
    assert!(page.0[100..356].iter().all(|&byte| byte == 9));
    assert!(page.0[356..612].iter().all(|&byte| byte == 1));
    assert!(page.0[..100].iter().chain(&page.0[612..]).all(|&byte| byte == 7));
}

#[test]
fn what_the_cpu_writes_to_a_mapping_is_seen_once_it_is_prepared() {
    let (dma, _, mut reach) = device(u64::MAX);
    let mut page = Box::new(Page([0; 4096]));
    let mut map = dma.map_streaming_slice(&mut page.0[8..72], 1, DmaDirection::ToDevice).unwrap();
    let mut seen = [0; 4];
    map.copy_from_slice_cpu(b"packet");
    reach.read(&Process, Iova::new(map.dma_addr().as_u64()), &mut seen).unwrap();
    assert_eq!(&seen, &[0; 4]);
    map.prepare_for_device(0..6);
    reach.read(&Process, Iova::new(map.dma_addr().as_u64()), &mut seen).unwrap();
    assert_eq!(&seen, b"pack");
    assert!(reach.write(&Process, Iova::new(map.dma_addr().as_u64()), b"no").is_err());
}

#[test]
fn rings_are_zeroed_memory_of_both_until_they_are_dropped() {
    let (dma, ops, mut reach) = device(u64::MAX);
    let mut ring = dma.coherent_array_zero_with_align::<u64>(512, 4096).unwrap();
    let addr = ring.dma_addr().as_u64();
    assert_eq!((addr % 4096, ops.live()), (0, (0, 1)));
    ring.set_cpu(3, 0x0102_0304);
    let mut seen = [1; 8];
    reach.read(&Process, Iova::new(addr + 24), &mut seen).unwrap();
    assert_eq!(u64::from_le_bytes(seen), 0x0102_0304);
    reach.write(&Process, Iova::new(addr + 8), &5u64.to_le_bytes()).unwrap();
    assert_eq!((ring.read_cpu(1), ring.read_cpu(2)), (Some(5), Some(0)));
    drop(ring);
    assert_eq!(ops.live(), (0, 0));
    assert!(reach.read(&Process, Iova::new(addr), &mut seen).is_err());
}

#[test]
fn what_a_driver_cannot_use_is_given_back() {
    // No address is so low: the crate looks, and ends the mapping.
    let (dma, ops, _) = device(0x10);
    let mut page = Box::new(Page([0; 4096]));
    let map = dma.map_streaming_slice(&mut page.0, 1, DmaDirection::ToDevice);
    assert!(matches!(map, Err(DmaError::DmaMaskNotMatch { .. })));
    assert!(dma.coherent_array_zero::<u8>(4096).is_err());
    assert_eq!(ops.live(), (0, 0));
    // More than there are slots for is refused, and told.
    let (dma, ops, _) = device(u64::MAX);
    let before = REFUSED.load(Ordering::Relaxed);
    let mut pages: Vec<_> = (0..64).map(|_| Box::new(Page([0; 4096]))).collect();
    let maps: Vec<_> = pages
        .iter_mut()
        .map(|page| dma.map_streaming_slice(&mut page.0[1..], 1, DmaDirection::ToDevice))
        .collect();
    let refused = maps.iter().filter(|map| matches!(map, Err(DmaError::NoMemory))).count();
    assert!(refused > 0 && refused < 64, "{refused} of 64 were refused");
    assert_eq!(REFUSED.load(Ordering::Relaxed) - before, u32::try_from(refused).unwrap());
    assert_eq!(ops.live().0, 64 - refused);
    drop(maps);
    assert_eq!(ops.live(), (0, 0));
}

fn place(buffer: NonNull<[u8]>) -> Option<u64> {
    Some(buffer.cast::<u8>().as_ptr().expose_provenance() as u64)
}

#[test]
fn without_an_iommu_a_buffer_is_mapped_as_often_as_a_driver_wants_and_each_map_ends_once() {
    let (dma, ops) = direct(place, |error| panic!("refused: {error}"));
    let mut page = Box::new(Page([0; 4096]));
    let whole =
        |page: &mut Page| dma.map_streaming_slice(&mut page.0, 1, DmaDirection::ToDevice).unwrap();
    let (first, second) = (whole(&mut page), whole(&mut page));
    let part = dma.map_streaming_slice(&mut page.0[..512], 1, DmaDirection::FromDevice).unwrap();
    let back = dma.map_streaming_slice(&mut page.0, 1, DmaDirection::FromDevice).unwrap();
    assert_eq!(first.dma_addr(), part.dma_addr());
    assert_eq!(ops.live(), (4, 0));
    // Each is synced in its own direction, whichever ends first.
    drop(first);
    assert_eq!(ops.live(), (3, 0));
    back.complete_for_cpu(0..4096);
    second.prepare_for_device(0..4096);
    part.complete_for_cpu(0..512);
    drop(back);
    second.prepare_for_device(0..4096);
    drop(part);
    assert_eq!(ops.live(), (1, 0));
    // One that stays does not gather the records of those that come and go.
    for _ in 0..1000 {
        drop(whole(&mut page));
    }
    assert_eq!(ops.live(), (1, 0));
    drop(second);
    assert_eq!(ops.live(), (0, 0));
}

#[test]
fn a_buffer_without_a_physical_address_is_refused_by_its_own_address() {
    static TOLD: Mutex<String> = Mutex::new(String::new());
    let tell = |error: Error| *TOLD.lock().unwrap() = error.to_string();
    let (dma, ops) = direct(|_| None, tell);
    let mut page = Box::new(Page([0; 4096]));
    let start = page.0.as_ptr().addr();
    let map = dma.map_streaming_slice(&mut page.0, 1, DmaDirection::ToDevice);
    assert!(matches!(map, Err(DmaError::NoMemory)));
    let expected = format!(
        "the 0x1000 bytes at {start:#x} have no physical address, or several: map what is \
         contiguous"
    );
    assert_eq!((&*TOLD.lock().unwrap(), ops.live()), (&expected, (0, 0)));
}
