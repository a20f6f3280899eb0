//! Memory of domains, of several kinds, that holds registered buffers.

use std::cell::RefCell;
use std::sync::Arc;

use dmaspan::dma::{
    Device, DeviceConfig, Direct, DmaMemory, Error, FromRegistered, NoPool, Piece, Registered,
    Segment,
};
use dmaspan::{Direction, PhysAddr, Prot, Span};

use super::world::{BYTES, Host, RAM, USER, World, physical};

fn direct<H: DmaMemory>() -> Device<Direct<H, Host>> {
    let ram = Span::new(PhysAddr::new(RAM), BYTES).unwrap();
    Device::new(Arc::new(Direct::new(ram, Host)), NoPool, DeviceConfig::bits(48)).unwrap()
}

#[test]
fn a_domain_of_boxed_memory_holds_buffers_too() {
    let world = World::new();
    let device = direct::<Box<dyn DmaMemory>>();
    let all = world.folios(&[1], 8);
    let mapped = device.map_buffer(physical(&world, all, Prot::WRITE), Prot::WRITE).unwrap();
    assert_eq!(mapped.user().start().get(), USER);
    assert_eq!(world.held().0, 2);
    drop(mapped);
    assert_eq!(world.held(), (0, 0));
}

thread_local! {
    /// What a driver got to keep.
    static KEPT: RefCell<Option<Arc<Registered>>> = const { RefCell::new(None) };
}

/// A driver's memory that looks at the buffers in it.
struct Shared(Arc<Registered>);

// SAFETY: the buffer promised, and is dropped with this at the earliest.
unsafe impl DmaMemory for Shared {
    fn pieces(&self) -> &[Piece] {
        self.0.pieces()
    }
}

// SAFETY: it owns a handle of the buffer.
unsafe impl FromRegistered for Shared {
    fn from_registered(registered: Registered) -> Self {
        let shared = Arc::new(registered);
        KEPT.set(Some(Arc::clone(&shared)));
        Self(shared)
    }
}

#[test]
fn what_a_mapped_buffer_is_held_by_is_mapped_in_no_other_way() {
    let world = World::new();
    let device = direct::<Shared>();
    let all = world.folios(&[1], 8);
    let mapped = device.map_buffer(physical(&world, all, Prot::WRITE), Prot::WRITE).unwrap();
    let shared = KEPT.take().unwrap();
    assert_eq!(shared.buffer().user(), all);
    let direction = Direction::FromDevice;
    let single = device.map_single(Shared(Arc::clone(&shared)), direction).unwrap_err();
    assert_eq!(single.error, Error::NotSingle { pieces: 0 });
    let mut segments = [Segment::default()];
    let list = device.map_list(Shared(Arc::clone(&shared)), direction, &mut segments).unwrap_err();
    assert_eq!(list.error, Error::EmptyList);
    drop((mapped, single, list));
    assert_eq!(world.held().0, 2, "a driver may keep it longer");
    drop(shared);
    assert_eq!(world.held(), (0, 0));
}
