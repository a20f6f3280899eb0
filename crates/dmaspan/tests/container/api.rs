//! Odd requests through the public interface.

use std::sync::Arc;

use dmaspan::container::{Error, UnmapNotifier, VaddrUpdate};
use dmaspan::{
    Account, Container, DmaSpace, Errno, Iova, IovaRange, PhysAddr, Prot, RangeError, Span,
    UserAddr, UserRange,
};
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};

use crate::common::range;

type Plain = Container<SimPinner, parking_lot::RawMutex>;

struct Idle;

impl UnmapNotifier for Idle {
    fn unmapping(&self, _range: IovaRange) {}
}

fn memory(page_lg2: u32) -> (Arc<SimMemory>, Arc<SimSpace>, UserRange) {
    let memory = SimMemory::new(PhysAddr::new(1 << 32), 1 << 20, page_lg2).unwrap();
    let memory = Arc::new(memory);
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let frames = memory.allocate(1 << 16, page_lg2).unwrap();
    let user = space.map(UserAddr::new(0x7f00_0000_0000), &[frames]).unwrap();
    (memory, space, user)
}

#[test]
fn a_whole_space_is_refused_and_not_mapped_without_its_last_byte() {
    let (memory, space, _) = memory(12);
    let container: Plain = Container::new(SimPinner::new(memory), Account::new(0));
    let whole = UserRange::new(UserAddr::new(0), UserAddr::new(u64::MAX)).unwrap();
    let mapped = container.map(&space, whole, Iova::new(0), Prot::READ).map(|_| ());
    let moved = container.update_vaddr(&VaddrUpdate::new(&space, whole, Iova::new(0)));
    for result in [mapped, moved] {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Range(RangeError::Wraps { start: 0, .. })), "{error}");
        assert_eq!(container.errno(&error), Errno::EOVERFLOW);
    }
    assert_eq!((container.mappings(), container.unmap_all().unwrap()), (0, 0));
}

#[test]
fn emulated_devices_pin_whole_pages_of_users_of_any_size() {
    let (memory, space, user) = memory(14);
    let pinner = SimPinner::new(Arc::clone(&memory));
    let container: Plain = Container::new(pinner, Account::new(1 << 16)).with_page_size(1 << 14);
    let device = container.attach_emulated(Arc::new(Idle)).unwrap();
    container.map(&space, user, Iova::new(0), Prot::READ_WRITE).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    for part in [range(0, 0x1000), range(0x1000, 0x4000), range(0x4000, 0x5000)] {
        let error = container.pin_external(part, Prot::READ, &mut spans).unwrap_err();
        let Error::MisalignedUnmap { range, granule } = error else { panic!("{error}") };
        assert_eq!((range, granule), (part, 1 << 14));
    }
    container.pin_range(range(0x4000, 0x8000), Prot::READ, &mut spans).unwrap();
    assert_eq!((memory.pinned_frames(), container.account().used()), (2, 0x8000));
    container.unpin_range(range(0x4000, 0x8000), dmaspan::pin::Dirty::Clean).unwrap();
    container.detach_emulated(device).unwrap();
    assert_eq!((memory.pinned_frames(), memory.violations()), (0, vec![]));
}
