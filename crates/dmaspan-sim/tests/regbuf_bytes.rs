//! How much memory it takes to register a terabyte: some bytes for each folio, none for each page.
//!
//! A program of its own, whose allocator counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dmaspan::pin::{Dirty, Kind, PinFailed, Pinner, SpanSink};
use dmaspan::regbuf::{Pinned, Registry, Request, Segments};
use dmaspan::{
    Account, Direction, Errno, PhysAddr, Prot, Span, UserAddr, UserRange, account::Counting,
};

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counted;

// SAFETY: everything is the system allocator's.
#[expect(unsafe_code, reason = "an allocator is unsafe to implement")]
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller promises what `System` wants.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller promises what `System` wants.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

const TERABYTE: u64 = 1 << 40;
const FOLIO: u64 = 2 << 20;
const FOLIOS: usize = 1 << 19;
const USER: u64 = 0x7000_0000_0000;

/// Pins nothing, and says that folios are far from each other.
struct Folios;

/// Where a folio is.
fn folio(number: u64) -> u64 {
    (1 << 44) + (number ^ 0x155) * 2 * FOLIO
}

#[expect(unsafe_code, reason = "the trait is a promise about memory that nothing uses")]
// SAFETY: nothing uses the memory.
unsafe impl Pinner for Folios {
    type Space = ();
    /// How many bytes are not unpinned.
    type Pin = u64;
    type Error = Infallible;

    fn pin(
        &self,
        (): &(),
        range: UserRange,
        _prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<u64, PinFailed<u64, Infallible>> {
        let (mut at, mut pinned) = (range.start().get() - USER, 0);
        let end = range.last().get() - USER + 1;
        while at < end {
            let inside = at % FOLIO;
            let len = (FOLIO - inside).min(end - at);
            let span = Span::new(PhysAddr::new(folio(at / FOLIO) + inside), len);
            let pushed = span.map(|span| sink.push(span, Kind::Memory));
            assert_eq!(pushed, Ok(Ok(())));
            at += len;
            pinned += len;
        }
        Ok(pinned)
    }

    fn unpin(&self, pin: &mut u64, spans: &[Span], _kind: Kind, _dirty: Dirty) {
        *pin -= spans.iter().map(|span| span.len()).sum::<u64>();
    }

    fn release(&self, pin: u64) {
        assert_eq!(pin, 0);
    }

    fn space_id(&self, (): &()) -> u64 {
        1
    }

    fn read(&self, (): &(), _at: UserAddr, _bytes: &mut [u8]) -> Result<(), Infallible> {
        Ok(())
    }

    fn write(&self, (): &(), _at: UserAddr, _bytes: &[u8]) -> Result<(), Infallible> {
        Ok(())
    }

    fn errno(&self, error: &Infallible) -> Errno {
        match *error {}
    }
}

/// Registers so much, and how many bytes were allocated at most, and are kept.
fn register(start: u64, len: u64) -> (Registry<Pinned<Folios>>, usize, usize) {
    let account = Account::with_counting(TERABYTE, Counting::Ranges);
    let mut registry = Registry::new(Pinned::new(Arc::new(Folios), (), account, 12));
    let user = UserRange::from_len(UserAddr::new(USER + start), len).unwrap();
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    registry.register(&[Request::new(user)]).unwrap();
    let bytes = |counter: &AtomicUsize| counter.load(Ordering::Relaxed) - before;
    (registry, bytes(&PEAK), bytes(&NOW))
}

#[test]
fn a_terabyte_takes_eight_bytes_a_folio_and_no_more_than_64_on_the_way() {
    // Whole, and entered and left in the middle of folios.
    for (start, len) in [(0, TERABYTE), (0x12_3456, TERABYTE - 0x34_5678)] {
        let (mut registry, peak, kept) = register(start, len);
        let node = registry.get(0).unwrap().clone();
        let segments = node.segments();
        assert!(FOLIOS - segments.count() <= 1, "{}", segments.count());
        assert_eq!(segments.uniform_len(), Some(FOLIO));
        let constant = size_of::<Segments<PhysAddr>>();
        assert_eq!(segments.footprint(), 8 * segments.count() + constant);
        assert!(kept <= segments.footprint() + 1024, "{kept} bytes are kept");
        println!("{peak} bytes at most, {kept} are kept");
        assert!(peak <= 16 * FOLIOS + 1024, "{peak} bytes at most");
        let before = (PEAK.swap(0, Ordering::Relaxed), NOW.load(Ordering::Relaxed));
        for n in 0..100_000 {
            let offset = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(n) % (len - FOLIO);
            let mut import = node.import(offset, FOLIO, Direction::ToDevice).unwrap();
            let at = start + offset;
            let first = import.next().unwrap();
            assert_eq!(first.paddr().get(), folio(at / FOLIO) + at % FOLIO);
            assert_eq!(first.len(), FOLIO - at % FOLIO);
            if let Some(second) = import.next() {
                assert_eq!(second.paddr().get(), folio(at / FOLIO + 1));
                assert_eq!(second.len(), at % FOLIO);
            }
            assert!(import.next().is_none());
        }
        assert_eq!(PEAK.load(Ordering::Relaxed), 0, "an import allocates nothing");
        assert_eq!(NOW.load(Ordering::Relaxed), before.1);
        registry.unregister().unwrap();
        drop(node);
        assert_eq!(registry.source().account().used(), 0);
        assert!(PEAK.load(Ordering::Relaxed) == 0, "letting go allocates nothing");
    }
}
