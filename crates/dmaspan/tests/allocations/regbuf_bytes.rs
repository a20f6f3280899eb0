//! Registering a terabyte takes some bytes of memory for each folio, and none for each page.

use std::convert::Infallible;
use std::sync::{Arc, Barrier};
use std::thread;

use dmaspan::pin::{Dirty, Kind, PinFailed, Pinner, SpanSink};
use dmaspan::regbuf::{BufferRequest, Node, Pinned, Registry, Segments};
use dmaspan::{
    Account, Direction, Errno, PhysAddr, Promise, Prot, Span, UserAddr, UserRange,
    account::Counting,
};
use dmaspan_sim::allocator::{Allocated, allocated};

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
    type Address = PhysAddr;
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

    fn unpin(
        &self,
        _promise: Promise<'_>,
        pin: &mut u64,
        spans: &[Span],
        _kind: Kind,
        _dirty: Dirty,
    ) {
        *pin -= spans.iter().map(|span| span.len()).sum::<u64>();
    }

    fn release(&self, _promise: Promise<'_>, pin: u64) {
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

/// Registers so much, and what that allocated.
fn register(start: u64, len: u64) -> (Registry<Pinned<Folios>>, Allocated) {
    let account = Account::with_counting(TERABYTE, Counting::Ranges);
    let mut registry = Registry::new(Pinned::new(Arc::new(Folios), (), account, 12));
    let user = UserRange::from_len(UserAddr::new(USER + start), len).unwrap();
    let ((), cost) = allocated(|| registry.register(&[BufferRequest::new(user)]).unwrap());
    (registry, cost)
}

/// Imports parts of a buffer at 100,000 places, of which each is looked at.
fn import_everywhere(node: &Node<PhysAddr>, start: u64, len: u64) {
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
}

#[test]
fn a_terabyte_takes_eight_bytes_a_folio_and_no_more_than_64_on_the_way() {
    // Whole, and entered and left in the middle of folios.
    for (start, len) in [(0, TERABYTE), (0x12_3456, TERABYTE - 0x34_5678)] {
        let (mut registry, cost) = register(start, len);
        let node = registry.get(0).unwrap().clone();
        let segments = node.segments();
        assert!(FOLIOS - segments.count() <= 1, "{}", segments.count());
        assert_eq!(segments.uniform_len(), Some(FOLIO));
        let constant = size_of::<Segments<PhysAddr>>();
        assert_eq!(segments.footprint(), 8 * segments.count() + constant);
        println!("{} bytes at most, {} are kept", cost.peak, cost.kept);
        let footprint = i64::try_from(segments.footprint()).unwrap();
        assert!(cost.kept <= footprint + 1024, "{cost:?}");
        assert!(cost.peak <= i64::try_from(16 * FOLIOS).unwrap() + 1024, "{cost:?}");
        let ((), cost) = allocated(|| import_everywhere(&node, start, len));
        assert_eq!(cost, Allocated::default(), "an import allocates nothing, and frees nothing");
        let ((), cost) = allocated(|| {
            registry.unregister().unwrap();
            drop(node);
        });
        assert_eq!(registry.source().account().used(), 0);
        assert_eq!((cost.count, cost.peak), (0, 0), "letting go allocates nothing");
    }
}

#[test]
fn what_another_thread_allocates_meanwhile_is_not_counted() {
    let turn = Barrier::new(2);
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            turn.wait();
            let bytes = vec![1_u8; 1 << 20];
            turn.wait();
            bytes
        });
        let ((), cost) = allocated(|| {
            turn.wait();
            turn.wait();
        });
        assert_eq!(cost, Allocated::default());
        drop(other.join().unwrap());
    });
}
