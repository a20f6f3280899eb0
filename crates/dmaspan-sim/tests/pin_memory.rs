//! What a pin of terabytes allocates: nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use dmaspan::pin::{Dirty, Kind, Pinner, SpanSink, Stopped};
use dmaspan::{PhysAddr, Prot, Span, UserAddr};
use dmaspan_sim::memory::{Books, MapOptions, Population, SimMemory, SimPinner, SimSpace};

struct Counting;

thread_local! {
    static BYTES: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is the system allocator's, but for counting.
#[expect(unsafe_code, reason = "an allocator is unsafe to implement")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let bytes = u64::try_from(layout.size()).unwrap_or(u64::MAX);
        BYTES.with(|sum| sum.set(sum.get() + bytes));
        // SAFETY: the caller promises what `System` wants.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller promises what `System` wants.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocated<R>(f: impl FnOnce() -> R) -> (R, u64) {
    let before = BYTES.with(Cell::get);
    let result = f();
    (result, BYTES.with(Cell::get) - before)
}

/// Gives every span back at once.
#[derive(Default)]
struct Sums {
    spans: u64,
    bytes: u64,
}

impl SpanSink for Sums {
    fn push(&mut self, span: Span, _kind: Kind) -> Result<(), Stopped> {
        self.spans += 1;
        self.bytes += span.len();
        Ok(())
    }
}

#[test]
fn a_pin_of_a_terabyte_allocates_nothing_and_its_map_little() {
    const BYTES: u64 = 1 << 40;
    let memory = SimMemory::with_books(PhysAddr::new(0), BYTES, 12, Books::Folios).unwrap();
    let memory = Arc::new(memory);
    let folios: Vec<Span> =
        (0..BYTES >> 21).map(|_| memory.allocate_folio(9).unwrap().span()).collect();
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let pinner = SimPinner::new(Arc::clone(&memory));
    for population in [Population::Eager, Population::Lazy] {
        let options = MapOptions { population, ..MapOptions::default() };
        let start = UserAddr::new(1 << 40);
        let (range, bytes) = allocated(|| space.map_with(start, &folios, options).unwrap());
        // Less than one bit for each page of 4K, but for the 16 bytes of each leaf's entry.
        assert!(bytes < (BYTES >> 21) * 24 + (BYTES >> 15), "{bytes}");
        let mut sums = Sums::default();
        let faulted = || pinner.pin(&space, range, Prot::READ_WRITE, &mut sums).unwrap();
        let (mut pin, bytes) = allocated(faulted);
        if population == Population::Eager {
            assert_eq!(bytes, 0);
        }
        assert_eq!(sums.bytes, BYTES);
        assert_eq!(pinner.lookups() % (BYTES >> 21), 0);
        let unpin = || {
            for folio in &folios {
                pinner.unpin(&mut pin, &[*folio], Kind::Memory, Dirty::Written);
            }
            pinner.release(pin);
        };
        assert_eq!(allocated(unpin).1, 0);
    }
    assert_eq!((memory.pinned_frames(), memory.violations()), (0, vec![]));
}
