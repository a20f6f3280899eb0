//! Requests of one thread while another one flushes.

use std::sync::mpsc;
use std::time::Duration;

use dmaspan::dma::Attrs;
use dmaspan::iommu::iova;

use super::*;

/// Mostly long enough for a thread to get to where it waits; where it is not, the thread comes
/// later and what is asserted holds too.
const A_WHILE: Duration = Duration::from_millis(50);
/// After so long a thread hangs: it would have come to its end many times on the busiest machine.
const HANGS: Duration = Duration::from_secs(300);

/// Fills the queue of four while `meanwhile` runs in another thread, from the begin of its flush
/// on, which goes on once that has said that it is there; returns what it came to.
fn fill_while<T: Send + 'static>(
    bench: &Arc<Bench>,
    meanwhile: impl FnOnce(&Bench, mpsc::Sender<()>) -> T + Send + 'static,
) -> T {
    let (sender, receiver) = mpsc::channel();
    let (there, is_there) = mpsc::channel();
    let inner = Arc::clone(bench);
    *bench.hooks.meanwhile.lock() = Some(Box::new(move || {
        std::thread::spawn(move || sender.send(meanwhile(&inner, there)));
        is_there.recv_timeout(HANGS).expect("the other thread comes to its flush");
        std::thread::sleep(A_WHILE);
    }));
    for _ in 0..4 {
        let _ = bench.pass();
    }
    receiver.recv_timeout(HANGS).expect("the other thread waits for ever")
}

fn flush(bench: &Bench, there: mpsc::Sender<()>) -> Result<(), HardwareError> {
    there.send(()).unwrap();
    bench.dma.flush()
}

#[test]
fn a_flush_syncs_what_another_thread_could_not() {
    let bench = Arc::new(Bench::new(config(1, 4)));
    bench.tlb.fail_next_invalidations(1);
    assert_eq!(fill_while(&bench, flush), Ok(()));
    assert_eq!(bench.tlb.stale_leaves(range(0, 1 << 40)), []);
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 0), 4));
}

#[test]
fn a_flush_fails_where_that_of_another_thread_did_and_hardware_does_not_answer() {
    let bench = Arc::new(Bench::new(config(1, 4)));
    bench.tlb.fail_next_invalidations(2);
    assert!(fill_while(&bench, flush).is_err());
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 4), 0));
    bench.dma.flush().unwrap();
    bench.assert_nothing_is_left();
}

#[test]
fn a_flush_syncs_what_is_in_quarantine_while_another_thread_syncs_more_of_it() {
    let bench = Arc::new(Bench::new(config(1, 4)));
    bench.tlb.fail_next_invalidations(1);
    (0..4).for_each(|_| drop(bench.pass()));
    assert_eq!(bench.dma.waiting(), (0, 4));
    // The flush of the next four has the quarantine when the other thread fails to unmap.
    let result = fill_while(&bench, |bench, there| {
        let strict = Attrs { flush: Some(Flush::Strict), ..Attrs::default() };
        let buffer = bench.buffer();
        let mapping = bench.device.map_single_with(buffer, Direction::FromDevice, strict).unwrap();
        bench.tlb.fail_next_invalidations(1);
        assert!(bench.device.unmap(mapping).is_err());
        let result = flush(bench, there);
        assert_eq!(bench.tlb.stale_leaves(range(0, 1 << 40)), []);
        result
    });
    assert_eq!(result, Ok(()));
    // What the first thread was still releasing had to leave that in quarantine.
    bench.dma.flush().unwrap();
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 0), 9));
}

#[test]
fn a_panic_in_the_hook_does_not_end_the_quarantine() {
    let bench = Bench::new(config(1, 4));
    bench.tlb.fail_next_invalidations(1);
    (0..4).for_each(|_| drop(bench.pass()));
    *bench.hooks.meanwhile.lock() = Some(Box::new(|| panic!("as the test wants")));
    let flushed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bench.dma.flush()));
    assert!(flushed.is_err());
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 4), 0));
    bench.tlb.fail_next_invalidations(1);
    (0..4).for_each(|_| drop(bench.pass()));
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 8), 0));
    bench.dma.flush().unwrap();
    bench.assert_nothing_is_left();
}

#[test]
fn after_a_panic_in_the_hook_unmaps_keep_to_the_bound_again() {
    let bench = Bench::new(config(1, 4));
    (0..3).for_each(|_| pass(&bench));
    *bench.hooks.meanwhile.lock() = Some(Box::new(|| panic!("as the test wants")));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bench.pass())).is_err());
    (0..3).for_each(|_| pass(&bench));
    bench.machine.set_clock(MAX_AGE);
    pass(&bench);
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 0), 8));
}

#[test]
fn an_interrupt_that_maps_during_a_flush_waits_for_nobody() {
    let bench = Arc::new(Bench::new(config(1, 4)));
    // Fifteen or sixteen pages, of which a flush has one and another waits behind it.
    let small = Device::new(Arc::clone(&bench.dma), Default::default(), DeviceConfig::bits(16));
    let small: Arc<Dev> = Arc::new(small.unwrap());
    let map = |bench: &Bench, device: &Dev| {
        device.map_single(bench.buffer(), Direction::ToDevice).map_err(|refused| refused.error)
    };
    let mut mappings = Vec::new();
    let full = loop {
        match map(&bench, &small) {
            Ok(mapping) => mappings.push(mapping),
            Err(error) => break error,
        }
    };
    assert!(matches!(full, Error::Iova(iova::Error::Exhausted { .. })), "{full}");
    let _ = small.unmap(mappings.pop().unwrap()).unwrap();
    let next = mappings.pop().unwrap();
    let (inner, device) = (Arc::clone(&bench), Arc::clone(&small));
    let (sender, receiver) = mpsc::channel();
    *bench.hooks.meanwhile.lock() = Some(Box::new(move || {
        let _ = device.unmap(next).unwrap();
        // In another thread, so that the test ends also where it would wait for ever.
        let mapper = std::thread::spawn(move || sender.send(map(&inner, &device).err()));
        let until = std::time::Instant::now() + HANGS;
        while !mapper.is_finished() && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        assert!(mapper.is_finished(), "it waits for the flush");
    }));
    bench.dma.flush().unwrap();
    assert!(matches!(receiver.recv().unwrap(), Some(Error::Iova(_))));
    assert!(map(&bench, &small).is_ok(), "released by the flush");
}

#[test]
fn a_panic_in_a_part_of_a_flush_keeps_nobody_waiting() {
    let bench = Arc::new(Bench::new(config(2, 4)));
    (0..3).for_each(|_| pass(&bench));
    bench.machine.run_on(1);
    let inner = Arc::clone(&bench);
    *bench.hooks.meanwhile.lock() = Some(Box::new(move || {
        // Behind the flush that waits for this a page waits, which is synced apart.
        pass(&inner);
        *inner.hooks.meanwhile.lock() = Some(Box::new(|| panic!("as the test wants")));
        let flush = std::panic::AssertUnwindSafe(|| inner.dma.flush());
        assert!(std::panic::catch_unwind(flush).is_err());
    }));
    (0..4).for_each(|_| pass(&bench));
    let (sender, receiver) = mpsc::channel();
    let inner = Arc::clone(&bench);
    std::thread::spawn(move || sender.send(inner.dma.flush()));
    let flushed = receiver.recv_timeout(HANGS);
    assert_eq!(flushed.expect("it waits for a flush that is no more"), Ok(()));
    assert_eq!(bench.released(), 8);
    bench.assert_nothing_is_left();
}

/// Fills the queue of four while a flush of four others is at hardware, and runs `then`.
fn with_both_batches_in_use(then: impl FnOnce(&Bench) + Send + 'static) -> Arc<Bench> {
    let bench = Arc::new(Bench::new(config(1, 4)));
    let inner = Arc::clone(&bench);
    *bench.hooks.meanwhile.lock() = Some(Box::new(move || {
        (0..4).for_each(|_| pass(&inner));
        inner.machine.set_clock(MAX_AGE);
        then(&inner);
    }));
    (0..4).for_each(|_| pass(&bench));
    bench
}

#[test]
fn what_is_synced_in_its_place_in_vain_is_synced_again_before_it_is_released() {
    let bench = with_both_batches_in_use(|inner| {
        inner.tlb.fail_next_invalidations(1);
        assert!(inner.dma.expire().is_err());
    });
    assert_eq!((bench.dma.waiting(), bench.released()), ((4, 0), 4));
    assert_eq!(bench.tlb.stale_leaves(range(0, 1 << 40)).len(), 4);
    bench.dma.flush().unwrap();
    assert_eq!(bench.released(), 8);
    bench.assert_nothing_is_left();
}

#[test]
fn an_unmap_that_finds_a_full_slot_is_synced_together_with_it() {
    let bench = with_both_batches_in_use(|_| ());
    // The first flush is over: only the batch that fills is full.
    assert_eq!((bench.dma.waiting(), bench.released()), ((4, 0), 4));
    let before = bench.invalidations();
    pass(&bench);
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 0), 9));
    assert_eq!(bench.invalidations(), before + 1);
    bench.assert_nothing_is_left();
}

#[test]
fn an_unmap_that_finds_a_full_slot_waits_with_it_for_hardware_that_does_not_answer() {
    let bench = with_both_batches_in_use(|_| ());
    bench.tlb.fail_next_invalidations(1);
    assert!(bench.pass().is_err());
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 5), 4));
    assert_eq!(bench.tlb.stale_leaves(range(0, 1 << 40)).len(), 5);
    bench.dma.flush().unwrap();
    assert_eq!(bench.released(), 9);
    bench.assert_nothing_is_left();
}

#[test]
fn what_a_panic_tears_out_of_a_sync_in_its_place_is_forgotten_before_it_is_released() {
    let bench = with_both_batches_in_use(|inner| {
        *inner.hooks.meanwhile.lock() = Some(Box::new(|| panic!("as the test wants")));
        let expire = std::panic::AssertUnwindSafe(|| inner.dma.expire());
        assert!(std::panic::catch_unwind(expire).is_err());
    });
    assert_eq!((bench.dma.waiting(), bench.released()), ((4, 0), 4));
    assert_eq!(bench.tlb.stale_leaves(range(0, 1 << 40)).len(), 4);
    let before = bench.tlb.counters();
    // Each buffer looks whether a device reaches it when it is dropped.
    bench.dma.flush().unwrap();
    assert_eq!(bench.released(), 8);
    assert_eq!(bench.tlb.counters().invalidations_of_all, before.invalidations_of_all + 1);
    bench.assert_nothing_is_left();
}

#[test]
fn a_timer_that_finds_a_slot_taken_comes_again_at_once() {
    let bench = with_both_batches_in_use(|inner| {
        let (seen, machine, dma) = (Arc::new(AtomicU64::new(0)), inner.machine.clone(), &inner.dma);
        let (next, dma_inside) = (Arc::clone(&seen), Arc::downgrade(dma));
        *inner.hooks.meanwhile.lock() = Some(Box::new(move || {
            machine.set_clock(MAX_AGE + 7);
            let dma = dma_inside.upgrade().unwrap();
            next.store(dma.expire().unwrap().unwrap_or(0), Ordering::Relaxed);
        }));
        // It syncs with the slot taken.
        let _ = dma.expire();
        assert_eq!(seen.load(Ordering::Relaxed), MAX_AGE + 7);
    });
    bench.dma.flush().unwrap();
    bench.assert_nothing_is_left();
}
