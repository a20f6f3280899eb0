//! A domain lists what was unmapped and waits, by CPU and by age, and what is in quarantine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::IovaRange;
use dmaspan::dma::{Unmapped, UnmappedIovas, UnmappedState};

use super::{Bench, PAGE, config, pass};
use crate::common::range;

fn listed(bench: &Bench) -> Vec<(IovaRange, UnmappedState)> {
    bench.dma.list_unmapped().map(|UnmappedIovas { range, state, .. }| (range, state)).collect()
}

/// Maps a page and unmaps it lazily; where it was.
fn passed(bench: &Bench) -> IovaRange {
    let mapping = bench.map();
    let iovas = range(mapping.addr().get(), PAGE);
    assert!(matches!(bench.device.unmap(mapping), Ok(Unmapped::Queued)));
    iovas
}

#[test]
fn what_waits_is_listed_by_cpu_in_the_order_of_the_unmaps_with_its_age() {
    let bench = Bench::new(config(2, 64));
    bench.machine.set_clock(100);
    let mut known = Vec::new();
    for cpu in [0, 1] {
        bench.machine.run_on(cpu);
        // More than a step, and no multiple of one.
        known.extend((0..37).map(|_| (cpu, passed(&bench))));
        bench.machine.set_clock(250);
    }
    bench.machine.set_clock(300);
    let age = |cpu| if cpu == 0 { 200 } else { 50 };
    let waiting = |&(cpu, range)| (range, UnmappedState::Waiting { cpu, age: age(cpu) });
    assert_eq!(listed(&bench), known.iter().map(waiting).collect::<Vec<_>>());
    let picture = bench.dma.dump().to_string();
    let line = format!(
        "{} unmapped, waits for a flush on CPU 1, whose oldest is 50 ns old\n",
        known[40].1
    );
    assert!(picture.contains(&line), "{picture}");
    assert!(picture.ends_with("74 unmaps wait for a flush, 0 are in quarantine\n"), "{picture}");
    let debug = format!("{:?}", bench.dma);
    assert!(debug.contains("waiting: 74, quarantined: 0"), "{debug}");
    bench.dma.flush().unwrap();
    assert_eq!(listed(&bench), []);
}

#[test]
fn what_is_mapped_is_listed_until_it_is_unmapped_and_the_picture_shows_it() {
    let bench = Bench::new(config(1, 8));
    let mapping = bench.map();
    let iovas = range(mapping.addr().get(), PAGE);
    let runs: Vec<_> = bench.dma.list().map(|run| (run.range, run.paddr)).collect();
    let paddr = bench.reaches(&mapping).unwrap();
    assert_eq!(runs, [(iovas, paddr)]);
    assert_eq!(bench.dma.list_in(range(iovas.start().get() + PAGE, PAGE)).count(), 0);
    let picture = bench.dma.dump().to_string();
    assert!(picture.starts_with(&format!("{iovas} rw")), "{picture}");
    assert!(picture.contains(&format!(" to {paddr}\n{iovas} in use\n")), "{picture}");
    let Ok(Unmapped::Queued) = bench.device.unmap(mapping) else { panic!("not lazy") };
    assert_eq!(bench.dma.list().count(), 0);
}

#[test]
fn what_hardware_did_not_confirm_is_listed_as_in_quarantine_until_it_does() {
    let bench = Bench::new(config(1, 64));
    let mut known: Vec<_> = (0..20).map(|_| passed(&bench)).collect();
    bench.tlb.fail_next_invalidations(1);
    bench.dma.flush().unwrap_err();
    let mut found = listed(&bench);
    found.sort_by_key(|(range, _)| range.start());
    known.sort_by_key(|range| range.start());
    let quarantined = |range| (range, UnmappedState::Quarantined);
    assert_eq!(found, known.into_iter().map(quarantined).collect::<Vec<_>>());
    bench.dma.flush().unwrap();
    assert_eq!(listed(&bench), []);
    bench.assert_nothing_is_left();
}

#[test]
fn a_listing_beside_unmaps_and_flushes_shows_only_what_was_unmapped() {
    let bench = Bench::new(config(1, 16));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..2000 {
                pass(&bench);
                if n % 50 == 0 {
                    bench.dma.flush().unwrap();
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            for (range, state) in listed(&bench) {
                assert_eq!(range.len_less_one(), PAGE - 1);
                assert!(matches!(state, UnmappedState::Waiting { cpu: 0, .. }), "{state}");
            }
        }
    });
    bench.dma.flush().unwrap();
    bench.assert_nothing_is_left();
}
