//! Random operations: what is reported is what was written.

use std::collections::{BTreeMap, BTreeSet};

use dmaspan::container::{DirtyRead, Error};
use dmaspan::{Iova, UserAddr, UserRange};
use dmaspan_sim::rng::Rng;

use super::{Broken, Hardware, World, bits, words_for};
use crate::common::{PROT, for_all_granules};

for_all_granules!(
    pages_are_reported_when_they_were_written_and_only_then,
    large_leaves_are_reported_when_they_were_written,
);

/// How the memory lies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// Each page is a leaf: what is reported is exactly what was written.
    Scattered,
    /// Leaves of several sizes: at least that.
    Contiguous,
}

const PLACES: u64 = 24;

struct Model {
    world: World,
    layout: Layout,
    rng: Rng,
    /// Pages of a place: the largest mapping.
    stride: u64,
    users: Vec<UserRange>,
    /// First page and number of pages.
    mapped: BTreeMap<u64, u64>,
    written: BTreeSet<u64>,
    /// Written anew since hardware was told wrongly; or may be reported too much.
    reported: u64,
}

impl Model {
    fn new<const G: u32>(layout: Layout, seed: u64) -> Self {
        let stride = match layout {
            Layout::Scattered => 100,
            Layout::Contiguous => 3 << (G - 3),
        };
        let world = World::new::<G>(Hardware::Marks, 2 * PLACES * stride);
        let users = (0..PLACES).map(|n| match layout {
            Layout::Scattered => world.scattered(stride, n),
            Layout::Contiguous => {
                let span = world.memory.allocate(stride << G, 2 * G - 3).unwrap();
                world.space.map(UserAddr::new((n + 1) << 40), &[span]).unwrap()
            }
        });
        let users = users.collect();
        let (mapped, written) = (BTreeMap::new(), BTreeSet::new());
        Self { world, layout, rng: Rng::new(seed), stride, users, mapped, written, reported: 0 }
    }

    fn any(&mut self) -> Option<(u64, u64)> {
        let n = self.rng.below(u64::max(self.mapped.len() as u64, 1));
        let nth = usize::try_from(n).unwrap();
        self.mapped.iter().nth(nth).map(|(&first, &count)| (first, count))
    }

    fn map(&mut self) {
        let place = self.rng.below(PLACES);
        let first = place * self.stride;
        let count = 1 + self.rng.below(self.stride);
        let user = self.users[usize::try_from(place).unwrap()];
        let user = UserRange::from_len(user.start(), count * self.world.g).unwrap();
        let iova = Iova::new(first * self.world.g);
        if self.world.container.map(&self.world.space, user, iova, PROT).is_ok() {
            self.mapped.insert(first, count);
        } else {
            assert!(self.mapped.contains_key(&first));
        }
    }

    fn write(&mut self) {
        if let Some((first, count)) = self.any() {
            let page = first + self.rng.below(count);
            self.world.write(page);
            self.written.insert(page);
        }
    }

    /// A range that cuts no mapping: its first page and their number.
    fn uncut(&mut self) -> (u64, u64) {
        let mut ends = [self.rng.below(PLACES), self.rng.below(PLACES)];
        ends.sort_unstable();
        let [first, last] = ends.map(|place| place * self.stride);
        let behind = self.mapped.get(&last).copied().unwrap_or(0);
        let into_gap = self.rng.below(self.stride - behind + 1);
        (first, last - first + u64::max(behind + into_gap, 1))
    }

    /// Looks at what was reported of a range, and what is to be reported of it later.
    fn check(&mut self, first: u64, count: u64, found: &[u64]) {
        let expected: Vec<u64> =
            self.written.range(first..first + count).map(|page| page - first).collect();
        match self.layout {
            Layout::Scattered => assert_eq!(found, expected),
            Layout::Contiguous => {
                let found: BTreeSet<u64> = found.iter().copied().collect();
                assert!(expected.iter().all(|page| found.contains(page)));
                let is_mapped = |page: &u64| {
                    let before = self.mapped.range(..=page + first).next_back();
                    before.is_some_and(|(start, count)| page + first < start + count)
                };
                assert!(found.iter().all(is_mapped));
            }
        }
        self.reported += found.len() as u64;
    }

    fn forget(&mut self, first: u64, count: u64) {
        self.written.retain(|page| !(first..first + count).contains(page));
    }

    fn get(&mut self) {
        let (first, count) = self.uncut();
        let (asked, g) = (self.world.pages(first, count), self.world.g);
        let how = if self.rng.below(3) == 0 { DirtyRead::Keep } else { DirtyRead::Clear };
        let container = &self.world.container;
        let mut words = vec![self.rng.next(); words_for(count)];
        let result = match self.rng.below(5) {
            0 => container.dirty_bitmap_to(asked, g, &mut Broken { takes: 0 }, how),
            1 => {
                self.world.iotlb.fail_next_invalidations(1);
                let result = container.dirty_bitmap(asked, g, &mut words, how);
                self.world.iotlb.fail_next_invalidations(0);
                result
            }
            2 => {
                let mut bytes = vec![0; 8 * words.len()];
                let result = container.dirty_bitmap_to(asked, g, &mut bytes[..], how);
                for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
                    *word = u64::from_le_bytes(bytes.try_into().unwrap());
                }
                result
            }
            _ => container.dirty_bitmap(asked, g, &mut words, how),
        };
        match result {
            Ok(()) => {
                self.check(first, count, &bits(&words));
                if how == DirtyRead::Clear {
                    self.forget(first, count);
                }
            }
            Err(Error::MarksUnsynced { .. }) => self.check(first, count, &bits(&words)),
            Err(Error::Undelivered { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn unmap(&mut self) {
        let (first, count) = self.uncut();
        let asked = self.world.pages(first, count);
        let bytes = if self.rng.below(3) == 0 {
            self.world.container.unmap(asked).unwrap()
        } else {
            let mut words = vec![self.rng.next(); words_for(count)];
            let bytes = self.world.container.unmap_dirty(asked, self.world.g, &mut words);
            self.check(first, count, &bits(&words));
            bytes.unwrap()
        };
        self.forget(first, count);
        let gone: Vec<u64> = self.mapped.range(first..first + count).map(|(k, _)| *k).collect();
        let pages: u64 = gone.iter().map(|first| self.mapped.remove(first).unwrap()).sum();
        assert_eq!(bytes, pages * self.world.g);
    }

    fn restart(&mut self) {
        self.world.container.stop_dirty().unwrap();
        for _ in 0..self.rng.below(4) {
            self.write();
        }
        self.world.container.start_dirty().unwrap();
        self.written.clear();
    }
}

fn run<const G: u32>(layout: Layout, rounds: u64) {
    for seed in 0..3 {
        let mut model = Model::new::<G>(layout, seed);
        model.world.container.start_dirty().unwrap();
        for _ in 0..rounds {
            match model.rng.below(40) {
                0 => model.restart(),
                1..4 => model.unmap(),
                4..12 => model.map(),
                12..20 => model.get(),
                _ => model.write(),
            }
        }
        assert!(model.reported > rounds / 20, "{} pages", model.reported);
        assert_eq!(model.world.memory.violations(), []);
    }
}

fn pages_are_reported_when_they_were_written_and_only_then<const G: u32>() {
    run::<G>(Layout::Scattered, 3000);
}

fn large_leaves_are_reported_when_they_were_written<const G: u32>() {
    run::<G>(Layout::Contiguous, if G == 12 { 1500 } else { 150 });
}
