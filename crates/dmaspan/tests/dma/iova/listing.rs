//! A space lists what is handed out, cached and reserved, while it is used.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::iommu::iova::{IovaState, Iovas, ListedIovas};
use dmaspan::{Iova, IovaRange};
use dmaspan_sim::rng::Rng;

use super::{CPU, LOW_LAST, PAGE, pages, range, space};

/// The last of the granules that the allocator takes for a request of so many.
fn rounded(iovas: &Iovas, pages: u64) -> IovaRange {
    let taken = if pages <= 1024 { pages.next_power_of_two() } else { pages };
    range(iovas.range().start().get(), taken * PAGE)
}

#[test]
fn a_listing_is_complete_sorted_and_tells_what_is_cached_from_what_is_handed_out() {
    let aperture = range(0, 1 << 34);
    let space = space(aperture, 3);
    let reserved = range(0xfee0_0000, 0x10_0000);
    space.reserve(reserved).unwrap();
    let mut rng = Rng::new(5);
    let mut live = BTreeMap::new();
    for n in 0..6000 {
        CPU.set(rng.index(3));
        if rng.below(9) < 4 && !live.is_empty() {
            let key = *live.keys().nth(rng.index(live.len())).unwrap();
            let (iovas, _): (Iovas, u64) = live.remove(&key).unwrap();
            space.free(iovas).unwrap();
        } else {
            let most = if rng.below(8) == 0 { 2000 } else { 20 };
            let count = 1 + rng.below(most);
            let limit = if rng.below(2) == 0 { LOW_LAST } else { u64::MAX };
            let iovas = space.alloc(pages(count, limit)).unwrap();
            live.insert(iovas.range().start(), (iovas, count));
        }
        if n % 100 != 0 {
            continue;
        }
        let listed: Vec<ListedIovas> = space.list().collect();
        assert!(listed.is_sorted_by(|a, b| a.range.last() < b.range.start()));
        let of = |state| listed.iter().filter(move |listed| listed.state == state);
        let in_use: Vec<_> = of(IovaState::InUse).map(|listed| listed.range).collect();
        let known: Vec<_> = live.values().map(|(iovas, count)| rounded(iovas, *count)).collect();
        assert_eq!(in_use, known);
        let stats = space.stats();
        assert_eq!(of(IovaState::Cached).count(), stats.cached);
        assert_eq!(of(IovaState::Reserved).map(|r| r.range).collect::<Vec<_>>(), [reserved]);
        let taken: u64 = listed.iter().map(|listed| listed.range.len_less_one() + 1).sum();
        assert_eq!(taken + stats.free, space.aperture().len_less_one() + 1);
        let part = range(rng.below(1 << 33), 1 + rng.below(1 << 24));
        let in_part = listed.iter().filter(|listed| listed.range.intersection(part).is_some());
        assert!(space.list_in(part).eq(in_part.copied()), "{part}");
    }
    assert!(space.stats().cached > 20, "there is something to tell apart");
    for (iovas, _) in live.into_values() {
        space.free(iovas).unwrap();
    }
}

#[test]
fn a_picture_joins_neighbours_that_are_alike_and_counts() {
    let space = space(range(0, 0x10_0000), 1);
    space.reserve(range(0x8000, 0x2000)).unwrap();
    let held: Vec<_> = (0..3).map(|_| space.alloc(pages(1, u64::MAX)).unwrap()).collect();
    let cached = space.alloc(pages(1, u64::MAX)).unwrap();
    space.free(cached).unwrap();
    assert_eq!(
        space.dump().to_string(),
        "0x1000..=0x3fff in use, 3 ranges\n\
         0x4000..=0x4fff cached\n\
         0x8000..=0x9fff reserved\n\
         0x1000..=0xfffff: 3 ranges in use, 1 cached, 0xf9000 bytes free, 0x2000 bytes reserved\n"
    );
    let debug = format!("{space:?}");
    assert!(debug.contains("live: 3, cached: 1, free: 1019904, reserved: 8192"), "{debug}");
    held.into_iter().for_each(|iovas| space.free(iovas).unwrap());
}

#[test]
fn the_last_iova_of_the_space_is_listed_and_ends_it() {
    let space = space(range(u64::MAX - 0xffff, 0x1_0000), 1);
    let top = space.alloc_at(range(u64::MAX - 0xfff, 0x1000)).unwrap();
    assert_eq!(space.list().map(|listed| listed.range).collect::<Vec<_>>(), [top.range()]);
    assert_eq!(space.list_in(IovaRange::point(Iova::new(u64::MAX))).count(), 1);
    space.free(top).unwrap();
    assert_eq!(space.list().count(), 0);
}

#[test]
fn what_is_handed_out_all_the_time_is_listed_once_while_threads_take_and_give_back() {
    let space = space(range(0, 1 << 32), 4);
    let stay: Vec<_> = (0..200).map(|_| space.alloc(pages(2, u64::MAX)).unwrap()).collect();
    let known: Vec<_> = stay.iter().map(Iovas::range).collect();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for cpu in 1..3 {
            let (space, done) = (&space, &done);
            scope.spawn(move || {
                CPU.set(cpu);
                for n in 0..400 {
                    let count = 1 + n % 7;
                    let taken: Vec<_> =
                        (0..40).map(|_| space.alloc(pages(count, u64::MAX)).unwrap()).collect();
                    taken.into_iter().for_each(|iovas| space.free(iovas).unwrap());
                }
                done.store(true, Ordering::Relaxed);
            });
        }
        while !done.load(Ordering::Relaxed) {
            let listed: Vec<_> = space.list().collect();
            assert!(listed.is_sorted_by(|a, b| a.range.last() < b.range.start()));
            let in_use = |range| {
                ListedIovas::clone(
                    listed.iter().find(|listed| listed.range == range).expect("it stays"),
                )
            };
            assert!(known.iter().all(|range| in_use(*range).state == IovaState::InUse));
        }
    });
    stay.into_iter().for_each(|iovas| space.free(iovas).unwrap());
}
