//! The bytes of the heap that a reservation takes.
#![expect(unsafe_code, reason = "no memory is touched")]

use std::sync::Arc;

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, NoPool, Piece, RawMemory, Reservation,
    ReserveRequest,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1};
use dmaspan::platform::OneThread;
use dmaspan::{Direction, PhysAddr, Span};

use crate::{Iommu, allocated, domain};

type Dma = DmaDomain<ArmLpaeS1<12>, Arena, Iommu, OneThread, RawMemory>;

/// A reservation for so many pieces, of which one is linked, and the bytes that it took.
fn reserve(device: &Device<Dma>, pieces: usize) -> (Reservation<Dma>, u64) {
    let request = ReserveRequest { len: 0x1000, offset: 0, pieces, direction: Direction::ToDevice };
    allocated(|| {
        let mut reservation = device.reserve(request).unwrap();
        let piece = Piece::memory(Span::new(PhysAddr::new(0x8000_0000), 0x1000).unwrap());
        // SAFETY: nobody touches the memory.
        let memory = unsafe { RawMemory::new(piece) };
        device.link(&mut reservation, 0, memory).unwrap();
        reservation
    })
}

#[test]
fn a_reservation_for_one_piece_takes_nothing_from_the_heap() {
    let domain = DmaDomain::new(domain(1 << 20).0, DmaConfig::new(1), OneThread).unwrap();
    let device = Device::new(Arc::new(domain), NoPool, DeviceConfig::bits(48)).unwrap();
    // The first one fills the caches of IOVAs.
    for _ in 0..2 {
        device.destroy(reserve(&device, 1).0, drop).unwrap();
    }
    let [(one, of_one), (two, of_two)] = [1, 2].map(|pieces| reserve(&device, pieces));
    assert_eq!(of_one, 0);
    assert_ne!(of_two, 0, "the test sees what is allocated");
    device.destroy(one, drop).unwrap();
    device.destroy(two, drop).unwrap();
}
