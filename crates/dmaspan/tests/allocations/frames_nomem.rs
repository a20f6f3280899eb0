//! Table memory stays as it was when there is no memory.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;

use dmaspan::dma::FrameBounce;
use dmaspan::io_pgtable::{
    Arena, DirtyTracking, Error, FrameAlloc, FrameTables, PageTable, TableShape,
};
use dmaspan::platform::Flag;
use dmaspan::swiotlb::PoolMemory;
use dmaspan::{Iova, PhysAddr, Promise, Prot, Span};
use dmaspan_sim::mock::MockFormat;

use crate::failing::{self, Case, Ends, case};

/// Frames of the heap, counted.
#[derive(Default)]
struct Heap(Cell<usize>);

// SAFETY: each test has one thread.
#[expect(unsafe_code, reason = "the tests have one thread")]
unsafe impl Sync for Heap {}

fn layout(shape: TableShape) -> Layout {
    Layout::from_size_align(1 << shape.lg2_size, 1 << shape.lg2_align).unwrap()
}

// SAFETY: 1. Frames are the heap's, zeroed. 2. Physical addresses are those of the process.
#[expect(unsafe_code, reason = "frames of the heap")]
unsafe impl FrameAlloc for Heap {
    type Lock = Flag;

    fn allocate(&self, shape: TableShape) -> Option<PhysAddr> {
        // SAFETY: the size is not 0.
        let frames = NonNull::new(unsafe { alloc_zeroed(layout(shape)) })?;
        self.0.set(self.0.get() + 1);
        Some(PhysAddr::new(frames.as_ptr().expose_provenance() as u64))
    }

    fn free(&self, _promise: Promise<'_>, frames: PhysAddr, shape: TableShape) {
        self.0.set(self.0.get() - 1);
        // SAFETY: they were allocated above in this shape, and nobody uses them.
        unsafe { dealloc(self.pointer(frames).as_ptr(), layout(shape)) }
    }

    fn pointer(&self, paddr: PhysAddr) -> NonNull<u8> {
        let addr = usize::try_from(paddr.get()).unwrap();
        NonNull::new(std::ptr::with_exposed_provenance_mut(addr)).unwrap()
    }
}

/// A table whose tables are half a frame each.
struct World {
    table: PageTable<MockFormat, FrameTables<Heap>>,
}

impl World {
    fn new() -> Self {
        let format = MockFormat::new(43, DirtyTracking::Off).unwrap();
        Self { table: PageTable::new(format, FrameTables::new(Heap::default())).unwrap() }
    }

    fn map(&mut self) -> Result<(), Error> {
        let span = |at, len| Span::new(PhysAddr::new(at), len).unwrap();
        // Pieces of several tables, which have several levels of them.
        let spans = [span(0x800, 0x800), span(0x4000, 0x10_0000), span(0, 0x800)];
        Ok(self.table.whole().map_spans(Iova::new(0x7_f800), &spans, Prot::READ)?)
    }
}

impl failing::World for World {
    fn state(&self) -> impl PartialEq + std::fmt::Debug + use<> {
        let runs: Vec<_> = self.table.walk(self.table.geometry().aperture).collect();
        (runs, self.table.memory().frames().0.get())
    }

    fn end(mut self) {
        // What failed succeeds when there is memory, and takes no more of it.
        if self.table.walk(self.table.geometry().aperture).count() == 0 {
            self.map().unwrap();
        }
        let frames = self.table.memory().frames().0.get();
        assert!(frames > 1, "{frames}");
    }
}

/// Bounce memory of frames, and a pool of it.
fn bounce(n: i64) -> i64 {
    let heap = Arc::new(Heap::default());
    failing::fail(n);
    let memory = FrameBounce::new(Arc::clone(&heap), 7 << 12, PhysAddr::new(u64::MAX));
    let left = failing::fail(0);
    // Where large pieces are missing it is of smaller ones.
    let spans = memory.as_ref().map_or(&[][..], |memory| memory.spans());
    assert_eq!(heap.0.get(), spans.len());
    let bytes: u64 = spans.iter().map(|span| span.len()).sum();
    assert_eq!(bytes, if memory.is_ok() { 7 << 12 } else { 0 });
    drop(memory);
    assert_eq!(heap.0.get(), 0);
    left
}

const CASES: [Case; 3] = [
    case("bounce memory of frames", Ends::Never, bounce),
    case("a mapping into new tables", Ends::Never, |n| {
        failing::unchanged(n, World::new(), World::map)
    }),
    case("an arena", Ends::Times(1), |n| {
        failing::fail(n);
        let arena = Arena::try_new(PhysAddr::new(0), 1 << 20);
        let left = failing::fail(0);
        assert_eq!(arena.is_none(), left <= 0);
        left
    }),
];

#[test]
fn table_memory_without_memory_changes_nothing() {
    failing::sweep(module_path!(), &CASES);
}

#[test]
fn child() {
    failing::child(&CASES);
}
