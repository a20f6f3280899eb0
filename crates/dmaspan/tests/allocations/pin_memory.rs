//! A pin of terabytes allocates nothing.

use std::sync::Arc;

use dmaspan::pin::{Dirty, Kind, Pinner, SpanSink, Stopped};
use dmaspan::{PhysAddr, Promise, Prot, Span, UserAddr};
use dmaspan_sim::memory::{Books, MapOptions, Population, SimMemory, SimPinner, SimSpace};

use crate::allocated;

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
            #[expect(unsafe_code, reason = "the test is the pin's user")]
            // SAFETY: no device was given the spans.
            let promise = unsafe { Promise::new() };
            for folio in &folios {
                pinner.unpin(promise, &mut pin, &[*folio], Kind::Memory, Dirty::Written);
            }
            pinner.release(promise, pin);
        };
        assert_eq!(allocated(unpin).1, 0);
    }
    assert_eq!((memory.pinned_frames(), memory.violations()), (0, vec![]));
}
