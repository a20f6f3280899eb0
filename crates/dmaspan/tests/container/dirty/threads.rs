//! Reads beside each other, beside a device and beside unmaps.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::container::{DirtyRead, Error};
use dmaspan::{Iova, UserRange};
use dmaspan_sim::walker::Access;

use super::random::Rng;
use super::{Hardware, World, bits, words_for};
use crate::common::{PROT, for_all_granules};

for_all_granules!(reads_and_unmaps_beside_each_other_lose_nothing);

const PAGES: u64 = 400;

/// What one reader was told, until `done`.
fn read_on(world: &World, first: u64, count: u64, done: &AtomicBool) -> BTreeSet<u64> {
    let mut told = BTreeSet::new();
    let mut words = vec![0; words_for(count)];
    loop {
        // Looked at first: one more read follows.
        let last = done.load(Ordering::Acquire);
        let asked = world.pages(first, count);
        match world.container.dirty_bitmap(asked, world.g, &mut words, DirtyRead::Clear) {
            Ok(()) => told.extend(bits(&words).iter().map(|page| page + first)),
            Err(Error::Busy { .. }) => continue,
            Err(error) => panic!("{error}"),
        }
        if last {
            return told;
        }
    }
}

fn reads_and_unmaps_beside_each_other_lose_nothing<const G: u32>() {
    let world = World::new::<G>(Hardware::Marks, 4 * PAGES);
    let users: Vec<UserRange> = (0..3).map(|n| world.scattered(PAGES, n)).collect();
    let at = [0, 1000, 2000];
    world.map(users[0], at[0]);
    world.map(users[1], at[1]);
    world.container.start_dirty().unwrap();
    let done = AtomicBool::new(false);
    let (mut written, mut told) = (BTreeSet::new(), BTreeSet::new());
    thread::scope(|scope| {
        let world = &world;
        let readers = [(at[0], PAGES), (at[1], at[2] + PAGES - at[1])].map(|(first, count)| {
            scope.spawn({
                let done = &done;
                move || read_on(world, first, count, done)
            })
        });
        let device = scope.spawn(|| {
            let mut rng = Rng(1);
            let mut written = BTreeSet::new();
            for _ in 0..6000 {
                let page = at[usize::try_from(rng.below(3)).unwrap()] + rng.below(PAGES);
                // The third mapping comes and goes.
                let iova = Iova::new(page * world.g);
                if world.iotlb.translate(iova, Access::Write).is_ok() {
                    written.insert(page);
                }
            }
            written
        });
        let third = world.pages(at[2], PAGES);
        let mut words = vec![0; words_for(PAGES)];
        while !device.is_finished() {
            let iova = Iova::new(at[2] * world.g);
            match world.container.map(&world.space, users[2], iova, PROT) {
                Ok(_) => {}
                Err(error) => panic!("{error}"),
            }
            thread::yield_now();
            // A read in its way does not refuse it.
            let bytes = world.container.unmap_dirty(third, world.g, &mut words).unwrap();
            assert_eq!(bytes, PAGES * world.g);
            told.extend(bits(&words).iter().map(|page| page + at[2]));
        }
        written = device.join().unwrap();
        done.store(true, Ordering::Release);
        for reader in readers {
            told.extend(reader.join().unwrap());
        }
    });
    assert!(written.len() > 300, "{} pages", written.len());
    assert_eq!(told, written);
    assert_eq!(world.memory.violations(), []);
}
