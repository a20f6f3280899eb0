//! A kernel whose frames are all that a driver needs.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dmaspan::io_pgtable::{FrameAlloc, FrameTables, TableShape};
use dmaspan::platform::Flag;
use dmaspan::{Coherency, PhysAddr, Promise};
use dmaspan_drivers::{FrameHost, Host, NoMemory, Structure};

const BASE: u64 = 0x10_0000;

/// 16 frames, the lowest of which is handed out.
struct Kernel {
    words: Vec<AtomicU64>,
    out: AtomicUsize,
    coherency: Coherency,
}

#[expect(unsafe_code, reason = "a test's memory")]
// SAFETY: 1. One allocation is out at a time. 2. The words live as long as this, and tests end
// before it does.
unsafe impl FrameAlloc for Kernel {
    type Lock = Flag;

    fn allocate(&self, shape: TableShape) -> Option<PhysAddr> {
        let fits = BASE + (1 << shape.lg2_size) - 1 <= shape.max_paddr.get();
        (fits && self.out.fetch_add(1, Ordering::Relaxed) == 0).then_some(PhysAddr::new(BASE))
    }

    fn free(&self, _promise: Promise<'_>, frames: PhysAddr, _shape: TableShape) {
        assert_eq!(frames.get(), BASE);
        self.out.store(0, Ordering::Relaxed);
    }

    fn pointer(&self, paddr: PhysAddr) -> NonNull<u8> {
        assert_eq!(paddr.get(), BASE);
        NonNull::from(&self.words[..]).cast()
    }

    fn coherency(&self) -> Coherency {
        self.coherency
    }
}

fn kernel(coherency: Coherency) -> Arc<FrameTables<Kernel>> {
    let words = (0..16 * 512).map(|_| AtomicU64::new(u64::MAX)).collect();
    Arc::new(FrameTables::new(Kernel { words, out: AtomicUsize::new(0), coherency }))
}

#[test]
fn frames_of_a_kernel_are_structures_of_hardware_until_they_are_dropped() {
    let tables = kernel(Coherency::Coherent);
    let host = FrameHost::new(Arc::clone(&tables));
    let max_paddr = PhysAddr::new(BASE + 0x3fff);
    let structure = host.allocate(14, max_paddr).unwrap();
    assert_eq!((structure.paddr().get(), structure.words().len()), (BASE, 4 * 512));
    assert!(structure.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
    drop(structure);
    assert_eq!(tables.frames().out.load(Ordering::Relaxed), 0);
    assert_eq!(host.allocate(15, max_paddr).err(), Some(NoMemory { lg2_size: 15, max_paddr }));
}

#[test]
fn hardware_that_does_not_see_the_caches_gets_no_cached_frames() {
    let tables = kernel(Coherency::NonCoherent);
    let host = FrameHost::new(Arc::clone(&tables));
    assert!(host.allocate(12, PhysAddr::new(u64::MAX)).is_err());
    assert_eq!(tables.frames().out.load(Ordering::Relaxed), 0);
}
