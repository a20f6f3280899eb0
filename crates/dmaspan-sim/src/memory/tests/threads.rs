//! Several threads pin at once, while others change the space.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::*;

const THREADS: usize = 4;

/// A sink in which all threads meet, at the first span.
struct Meets<'a>(&'a Barrier, Vec<Span>);

impl SpanSink for Meets<'_> {
    fn push(&mut self, span: Span, kind: Kind) -> Result<(), Stopped> {
        if self.1.is_empty() {
            self.0.wait();
        }
        SpanSink::push(&mut self.1, span, kind)
    }
}

#[test]
fn threads_pin_disjoint_ranges_at_the_same_time() {
    let memory = memory(64);
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let pinner = SimPinner::new(Arc::clone(&memory));
    let spans = memory.allocate_scattered(64 << 12, 5).unwrap();
    space.map(UserAddr::new(0), &spans).unwrap();
    let barrier = Barrier::new(THREADS);
    thread::scope(|scope| {
        for number in 0..4 {
            let (pinner, space, barrier) = (&pinner, &space, &barrier);
            scope.spawn(move || {
                // Returns only where all threads are in the middle of a pin.
                let mut sink = Meets(barrier, Vec::new());
                let range = user(number << 16, 1 << 16);
                let mut pin = pinner.pin(space, range, Prot::READ_WRITE, &mut sink).unwrap();
                pinner.unpin(promise(), &mut pin, &sink.1, Kind::Memory, Dirty::Written);
                pinner.release(promise(), pin);
            });
        }
    });
    assert_eq!((memory.pinned_frames(), memory.violations()), (0, vec![]));
}

#[test]
fn ranges_come_and_go_elsewhere_while_threads_pin() {
    let memory = SimMemory::with_books(PhysAddr::new(0), 1 << 30, 12, Books::Folios).unwrap();
    let memory = Arc::new(memory);
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let pinner = SimPinner::new(Arc::clone(&memory));
    let orders = [9, 0, 4, 4, 0, 5, 9, 0].repeat(THREADS);
    let spans = memory.allocate_folios(&orders, 7).unwrap();
    let options = MapOptions { population: Population::Lazy, ..MapOptions::default() };
    let all = space.map_with(UserAddr::new(0), &spans, options).unwrap();
    let each = all.checked_len().unwrap() / 4;
    let elsewhere = memory.allocate_folio(9).unwrap().span();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let pins = (0..4).map(|number| {
            let (pinner, space) = (&pinner, &space);
            scope.spawn(move || {
                for _ in 0..200 {
                    let mut spans: Vec<Span> = Vec::new();
                    let range = user(number * each, each);
                    let mut pin = pinner.pin(space, range, Prot::READ_WRITE, &mut spans).unwrap();
                    assert_eq!(spans.iter().map(|span| span.len()).sum::<u64>(), each);
                    pinner.unpin(promise(), &mut pin, &spans, Kind::Memory, Dirty::Clean);
                    pinner.release(promise(), pin);
                }
            })
        });
        let pins: Vec<_> = pins.collect();
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let range = space.map(UserAddr::new(1 << 40), &[elsewhere]).unwrap();
                space.unmap(range);
            }
        });
        let results: Vec<_> = pins.into_iter().map(thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::Relaxed);
        assert!(results.iter().all(Result::is_ok));
    });
    assert_eq!((memory.pinned_frames(), memory.violations()), (0, vec![]));
}

#[test]
fn nothing_of_a_range_is_pushed_after_its_listener_was_called() {
    struct Until<'a> {
        begun: &'a AtomicBool,
        heard: &'a AtomicBool,
    }
    impl SpanSink for Until<'_> {
        fn push(&mut self, _span: Span, _kind: Kind) -> Result<(), Stopped> {
            assert!(!self.heard.load(Ordering::SeqCst), "pushed after the listener was called");
            if !self.begun.swap(true, Ordering::SeqCst) {
                // The tables are locked: whoever zaps waits for that by now.
                thread::sleep(Duration::from_millis(50));
            }
            Ok(())
        }
    }
    let pinner = SimPinner::new(memory(1));
    let space = Arc::new(SimSpace::new(Arc::clone(pinner.memory())));
    let device = |paddr, len| Span::new(PhysAddr::new(paddr), len).unwrap();
    // The first page is a span of its own. Of the rest, in leaves of 4K, there are more than a pin
    // holds the lock for.
    let options = MapOptions { max_leaf_lg2: 12, ..MapOptions::default() };
    space.map_device_with(UserAddr::new(0), device(1 << 44, 0x1000), options).unwrap();
    let rest = device(1 << 45, 8 << 20);
    space.map_device_with(UserAddr::new(0x1000), rest, options).unwrap();
    let (begun, heard) = (AtomicBool::new(false), Arc::new(AtomicBool::new(false)));
    let hears = Arc::clone(&heard);
    space.on_zap(Box::new(move |_| hears.store(true, Ordering::SeqCst)));
    let range = user(0, (8 << 20) + 0x1000);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !begun.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            space.zap(range);
        });
        let mut sink = Until { begun: &begun, heard: &heard };
        let failed = pinner.pin(&space, range, Prot::READ, &mut sink).unwrap_err();
        assert!(matches!(failed.error, PinError::Failed(_)), "{failed:?}");
        // What was found before is in the pin.
        assert!(failed.pin.is_some_and(|pin| pin.bytes_left() > 0x1000));
    });
    assert!(heard.load(Ordering::SeqCst));
}
