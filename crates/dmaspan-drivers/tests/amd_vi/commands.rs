//! Commands are few, say what is to be forgotten, and one that fails does not keep the next.

use std::sync::Barrier;
use std::thread;

use dmaspan::iommu::{Invalidation, IommuOps as _, Scope, Tables};
use dmaspan::{Iova, IovaRange, lg2};
use dmaspan_drivers::amd_vi::AmdViConfig;

use crate::fake::{CAPABILITY, NP_CACHE, Rig, STATUS, Seen, config};

fn range(start: u64, last: u64) -> IovaRange {
    IovaRange::new(Iova::new(start), Iova::new(last)).unwrap()
}

fn of(ranges: &[IovaRange], tables: Tables) -> Invalidation<'_> {
    Invalidation { scope: Scope::Ranges(ranges), leaf_sizes: 1 << 12, tables }
}

const ALL: Invalidation<'_> =
    Invalidation { scope: Scope::All, leaf_sizes: u64::MAX, tables: Tables::Detached };

/// What an INVALIDATE_IOMMU_PAGES forgets: first address, last address (2.4.3).
fn block(seen: &Seen) -> (u64, u64) {
    assert_eq!(seen.opcode(), 3);
    let address = seen.command[1] & !0xfff;
    if seen.command[1] & 1 == 0 {
        return (address, address + 0xfff);
    }
    // The first zero from bit 12 on is the highest bit of the block.
    let zero = (address | 0xfff).trailing_ones();
    if zero >= 51 {
        return (0, u64::MAX);
    }
    let mask = lg2::mask(zero + 1);
    (address & !mask, address | mask)
}

#[test]
fn ranges_are_covered_by_two_blocks_each_at_most_and_one_wait() {
    let rig = Rig::new();
    let domain = rig.domain();
    let ops = domain.ops();
    let shapes = [
        (0, 0xfff),
        (0x1000, 0x2fff),
        (0xffff_f000, 0x1_0000_0fff),
        (1 << 30, (2 << 30) - 1),
        (0x1234_5000, 0x8765_4fff),
        (0, lg2::mask(48)),
        (0x7fff_ffff_f000, 0x8000_0000_0fff),
    ];
    for (start, last) in shapes {
        for tables in [Tables::Kept, Tables::Detached] {
            ops.invalidate(&of(&[range(start, last)], tables)).unwrap();
            let seen = rig.fake.take();
            let (wait, blocks) = seen.split_last().unwrap();
            assert_eq!(wait.opcode(), 1);
            assert!((1..=2).contains(&blocks.len()), "{blocks:x?}");
            let mut next = start;
            for seen in blocks {
                let (first, end) = block(seen);
                assert!(first <= next && next <= end, "{first:#x} {next:#x} {end:#x}");
                next = end.wrapping_add(1);
                assert_eq!(seen.command[0] >> 32 & 0xffff, ops.domain_id().into());
                let directories = seen.command[1] & 2 != 0;
                assert_eq!(directories, tables == Tables::Detached);
            }
            assert!(next == 0 || next > last);
        }
    }
    // As many as a gather has.
    let many: Vec<_> =
        (0..8).map(|nth| range((3 * nth + 1) << 12, ((3 * nth + 3) << 12) - 1)).collect();
    assert_eq!(ops.max_ranges(), many.len());
    ops.invalidate(&of(&many, Tables::Kept)).unwrap();
    let seen = rig.fake.take();
    assert!((9..=17).contains(&seen.len()), "each is named");
    assert_eq!(seen.iter().filter(|seen| seen.opcode() == 1).count(), 1);

    let more = [&many[..], &[range(1 << 40, (1 << 40) + 0xfff)]].concat();
    ops.invalidate(&of(&more, Tables::Kept)).unwrap();
    assert_eq!(rig.fake.take().len(), 2, "all of the domain, and the wait");

    ops.invalidate(&ALL).unwrap();
    let [all, wait] = rig.fake.take()[..] else { panic!("one command and the wait") };
    assert_eq!((block(&all), all.command[1] & 2, wait.opcode()), ((0, u64::MAX), 2, 1));
}

#[test]
fn mappings_are_announced_where_absent_entries_are_cached_and_nowhere_else() {
    let quiet = Rig::new();
    quiet.domain().ops().sync_map(range(0, 0xfff)).unwrap();
    assert!(quiet.fake.take().is_empty());
    let rig = Rig::with(AmdViConfig { capability: CAPABILITY | NP_CACHE, ..config() });
    rig.domain().ops().sync_map(range(0, 0xfff)).unwrap();
    let [pages, _wait] = rig.fake.take()[..] else { panic!("one command and the wait") };
    assert_eq!((block(&pages), pages.command[1] & 2), ((0, 0xfff), 2));
}

#[test]
fn a_command_at_which_hardware_stops_fails_its_batch_and_the_next_works() {
    let rig = Rig::new();
    let domain = rig.domain();
    for stops_at in [0, 1, 2] {
        rig.fake.behave(|how| how.stops_at = Some(stops_at));
        let ranges = [range(0x1000, 0x1fff), range(0x8000, 0x8fff)];
        let error = domain.ops().invalidate(&of(&ranges, Tables::Kept)).unwrap_err();
        assert!(error.what.contains("stopped at a command"), "{error}");
        rig.fake.take();
        for _ in 0..300 {
            domain.ops().invalidate(&of(&ranges, Tables::Kept)).unwrap();
        }
        assert_eq!(rig.fake.take().len(), 900);
    }
}

#[test]
fn a_wait_that_is_lost_is_an_error_in_bounded_time_and_the_next_works() {
    let rig = Rig::new();
    let domain = rig.domain();
    rig.fake.behave(|how| how.lost_waits = 1);
    let error = domain.ops().invalidate(&ALL).unwrap_err();
    assert!(error.what.contains("in time"), "{error}");
    assert_ne!(error.status, 0, "the status register says that it runs");
    domain.ops().invalidate(&ALL).unwrap();
}

#[test]
fn hardware_that_fetches_nothing_fills_the_ring_and_nobody_waits_for_ever() {
    let rig = Rig::new();
    let domain = rig.domain();
    rig.fake.behave(|how| how.slow = usize::MAX);
    rig.fake.behave(|how| how.reads = [(0x2000, 0)].into());
    rig.fake.behave(|how| how.stops_at = Some(0));
    for _ in 0..3 {
        let result = domain.ops().invalidate(&ALL);
        rig.fake.behave(|how| how.stops_at = Some(0));
        result.unwrap_err();
    }
    rig.fake.behave(|how| how.stops_at = None);
    domain.ops().invalidate(&ALL).unwrap();
}

#[test]
fn a_batch_that_was_lost_is_not_taken_for_done_when_a_later_one_is() {
    let rig = Rig::new();
    let domain = rig.domain();
    rig.fake.behave(|how| how.stops_at = Some(0));
    let (fake, iommu, other) = (rig.fake.clone(), rig.iommu.clone(), domain.clone());
    *rig.memory.meanwhile.lock() = Some(Box::new(move || {
        // Somebody hears that a command was refused, and somebody's next batch is done.
        fake.log([5 << 60, 0x1000]);
        iommu.handle_faults().unwrap_err();
        other.ops().invalidate(&ALL).unwrap();
    }));
    let error = domain.ops().invalidate(&ALL).unwrap_err();
    assert!(error.what.contains("started again"), "{error}");
    domain.ops().invalidate(&ALL).unwrap();
}

#[test]
fn hardware_that_does_not_stop_either_is_an_error_each_time_until_it_does() {
    let rig = Rig::new();
    let domain = rig.domain();
    rig.fake.behave(|how| how.lost_waits = usize::MAX);
    rig.fake.behave(|how| how.reads = [(STATUS, 1 << 4)].into());
    // More than the ring holds: it stays as it is meanwhile, and its places are used on.
    for _ in 0..300 {
        domain.ops().invalidate(&ALL).unwrap_err();
    }
    rig.fake.behave(|how| how.lost_waits = 0);
    domain.ops().invalidate(&ALL).unwrap();
    rig.fake.behave(|how| how.reads.clear());
    domain.ops().invalidate(&ALL).unwrap();
}

#[test]
fn slow_hardware_is_waited_for_by_many_threads_at_once() {
    let rig = Rig::new();
    let domain = rig.domain();
    rig.fake.behave(|how| how.slow = 3);
    let start = Barrier::new(8);
    thread::scope(|scope| {
        for nth in 0..8u64 {
            let (domain, start) = (&domain, &start);
            scope.spawn(move || {
                start.wait();
                for round in 0..200 {
                    let first = (nth << 40) + (round << 12);
                    let ranges = [range(first, first + 0x2fff)];
                    domain.ops().invalidate(&of(&ranges, Tables::Kept)).unwrap();
                }
            });
        }
    });
    let seen = rig.fake.take();
    // Batches that wait at the same time have one wait together.
    assert!((1..=1600).contains(&seen.iter().filter(|seen| seen.opcode() == 1).count()));
    assert_eq!(seen.iter().filter(|seen| seen.opcode() == 3).count(), 1600 + 8 * 100);
}

#[test]
fn hardware_that_is_gone_is_an_error_of_every_operation() {
    let rig = Rig::new();
    let (domain, stream) = (rig.domain(), rig.stream(3));
    rig.fake.behave(|how| how.gone = true);
    assert!(domain.ops().invalidate(&ALL).unwrap_err().what.contains("gone"));
    assert!(rig.iommu.handle_faults().unwrap_err().what.contains("gone"));
    stream.attach(crate::switching::paging(&domain)).unwrap_err();
    // Hardware may know the domain by now.
    assert!(domain.ops().detach().unwrap_err().what.contains("gone"));
    rig.fake.behave(|how| how.gone = false);
    rig.fake.behave(|how| how.reads = [(STATUS, u64::MAX)].into());
    assert!(rig.iommu.handle_faults().unwrap_err().what.contains("gone"));
}
