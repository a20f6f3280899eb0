//! `FrameAlloc`: frames that are not there, and panics where they are found and freed.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, Flush, FrameBounce, FrameMemory, Trust,
};
use dmaspan::io_pgtable::{FrameAlloc, FrameTables, PageTable, TableShape};
use dmaspan::iommu::{Domain, flush_queue};
use dmaspan::platform::{Flag, OneThread};
use dmaspan::swiotlb::{Growth, Pool, PoolConfig};
use dmaspan::{PhysAddr, Promise, Prot};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use dmaspan_sim::walker::{NotATable, TableWords};
use parking_lot::Mutex;

use crate::common::{
    BITS, Books, Ends, Format, Owned, PAGE, Script, at_every_call, format, hardware, once, play,
    span,
};

/// Frames of the heap, whose addresses are those of this process.
struct Frames {
    books: Arc<Books>,
    script: Arc<Script>,
    /// What is out: the bytes of each.
    out: Mutex<BTreeMap<u64, u64>>,
    /// What originals lead to, which nobody looks at.
    other: Box<[u8]>,
}

fn layout(shape: TableShape) -> Layout {
    Layout::from_size_align(1 << shape.lg2_size, 1 << shape.lg2_align).unwrap()
}

fn pointer_to(address: u64) -> NonNull<u8> {
    NonNull::new(ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())).unwrap()
}

impl Frames {
    fn is_out(&self, at: u64) -> bool {
        let out = self.out.lock();
        out.range(..=at).next_back().is_some_and(|(start, len)| at - start < *len)
    }
}

// SAFETY: 1. The heap gives each frame once, zeroed. 2. Physical addresses are those of the
// process. 3. All other memory is a page, of which nobody has a reference.
unsafe impl FrameAlloc for Frames {
    type Lock = Flag;

    fn allocate(&self, shape: TableShape) -> Option<PhysAddr> {
        if self.script.turn() {
            return None;
        }
        // SAFETY: the size is not 0.
        let frames = NonNull::new(unsafe { alloc_zeroed(layout(shape)) })?;
        let at = frames.as_ptr().expose_provenance() as u64;
        self.out.lock().insert(at, 1 << shape.lg2_size);
        self.books.grant(span(at, 1 << shape.lg2_size), Prot::READ_WRITE);
        assert!(at < 1 << 47);
        Some(PhysAddr::new(at))
    }

    fn free(&self, _promise: Promise<'_>, frames: PhysAddr, shape: TableShape) {
        let _ = self.script.turn();
        let len = self.out.lock().remove(&frames.get());
        assert_eq!(len, Some(1 << shape.lg2_size), "what is out is freed once");
        self.books.take_back(span(frames.get(), 1 << shape.lg2_size), Prot::READ_WRITE);
        // SAFETY: they were allocated above in this shape, and nobody uses them.
        unsafe { dealloc(pointer_to(frames.get()).as_ptr(), layout(shape)) }
        let _ = self.script.turn();
    }

    fn pointer(&self, paddr: PhysAddr) -> NonNull<u8> {
        let _ = self.script.step();
        if self.is_out(paddr.get()) {
            return pointer_to(paddr.get());
        }
        let low = usize::try_from(paddr.get() % PAGE).unwrap();
        let page = self.other.as_ptr().expose_provenance().next_multiple_of(4096);
        pointer_to((page + low) as u64)
    }
}

/// Hardware, which finds a table where a frame is out.
#[derive(Clone)]
struct Hardware(Arc<Frames>);

impl TableWords for Hardware {
    fn read_u64(&self, paddr: PhysAddr) -> Result<u64, NotATable> {
        if !self.0.is_out(paddr.get()) {
            return Err(NotATable::Freed { paddr });
        }
        // SAFETY: it is a word of a frame that is out, which others change by atomic stores alone.
        let word = unsafe { AtomicU64::from_ptr(pointer_to(paddr.get()).cast().as_ptr()) };
        Ok(u64::from_le(word.load(Ordering::Acquire)))
    }
}

type Tlb = Iotlb<ArmLpaeS1Walker, Hardware>;
type Tables = Arc<FrameTables<Arc<Frames>>>;

#[test]
fn a_hostile_frame_alloc_gets_no_frame_back_that_a_device_or_a_walk_reaches() {
    at_every_call(|script| {
        let books = Arc::new(Books::default());
        let frames = Arc::new(Frames {
            books: Arc::clone(&books),
            script: Arc::clone(script),
            out: Mutex::default(),
            other: vec![0; 2 << 12].into(),
        });
        let tables = Arc::new(FrameTables::new(Arc::clone(&frames)));
        let Some(Ok(table)) = script.run(|| PageTable::new(format(), tables)) else { return };
        let tlb = hardware(table.root(), Hardware(Arc::clone(&frames)));
        let Some(Ok(domain)) = script.run(|| Domain::new(table, tlb.clone())) else { return };
        let looks = (Arc::clone(&books), tlb.clone());
        script.on_look(move || looks.0.look(&looks.1));
        let queue = flush_queue::Config { entries: 2, max_age: u64::MAX };
        let config = DmaConfig { flush: Flush::Lazy, queue, ..DmaConfig::new(1) };
        type Dma = DmaDomain<Format, Tables, Tlb, OneThread, Owned>;
        let domain = script.run(|| Dma::new(domain, config, OneThread));
        let Some(Ok(domain)) = domain else { return };
        let last = PhysAddr::new(u64::MAX);
        let slots = script.run(|| FrameBounce::new(Arc::clone(&frames), 2 * PAGE, last));
        let Some(Ok(slots)) = slots else { return };
        let growth = Some(Growth::new(PAGE, 16 * PAGE));
        let pool = PoolConfig { growth, ..PoolConfig::new(1) };
        let Some(Ok(pool)) = script.run(|| Pool::new(slots, pool, OneThread)) else { return };
        let config = DeviceConfig { trust: Trust::Untrusted, ..DeviceConfig::bits(BITS) };
        let pool = Arc::new(pool);
        let device = Device::new(Arc::new(domain), Arc::clone(&pool), config).unwrap();
        let memory = Arc::new(FrameMemory::new(Arc::clone(&frames)));
        let device = Arc::new(device.with_coherent(memory));
        let (weak, owner) = (Arc::downgrade(&device), Arc::clone(&books));
        script.on_reenter(move || {
            let Some(device) = weak.upgrade() else { return };
            once(&device, Owned::new(&owner, &[(0x10, PAGE)], Ends::Others, None));
        });
        let look = || books.look(&tlb);
        let memory = |pieces: &[_]| Owned::new(&books, pieces, Ends::Others, None);
        let coherent = script.run(|| device.alloc(PAGE, 1));
        look();
        play(&device, script, &memory, &look);
        if let Some(Ok(coherent)) = coherent {
            let _ = script.run(|| device.free(coherent).map_err(drop));
        }
        let _ = script.run(|| pool.shrink());
        look();
        assert!(!script.is_quiet() || books.reached() > 0);
        let _ = script.run(|| drop(device));
        let _ = script.run(|| drop(pool));
        script.forget_hooks();
        if script.is_quiet() {
            drop(tlb);
            assert_eq!((frames.out.lock().len(), books.granted()), (0, 0), "all came back");
        }
    });
}
