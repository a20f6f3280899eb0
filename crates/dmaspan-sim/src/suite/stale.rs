//! Random operations on a domain whose unmaps are gathered, and what hardware keeps of them behind
//! the sync.

use dmaspan::io_pgtable::{DirtyBitmap, Format};
use dmaspan::{Iova, IovaRange, Prot, Span, lg2};

use super::rig::Rig;
use super::space::{range, span};
use super::{Subject, each, share};
use crate::iotlb::Planted;
use crate::model::without;
use crate::rng::Rng;
use crate::walker::Access;

/// A domain with a device, and what is mapped.
struct World<S: Subject> {
    rig: Rig<S>,
    rng: Rng,
    /// What operations reach: some pieces of [`chunk`](super::space::Space::chunk).
    window: IovaRange,
    chunk_lg2: u32,
    prots: Vec<Prot>,
    tracks_dirty: bool,
    mapped: Vec<IovaRange>,
}

impl<S: Subject> World<S> {
    const CHUNKS: u64 = 16;

    fn new(format: S::Format, seed: u64) -> Self {
        let some = [Prot::READ, Prot::READ_WRITE, Prot::READ_WRITE | Prot::CACHE];
        let prots = some.into_iter().filter(|&prot| !format.refuses(prot)).collect();
        let tracks_dirty = format.tracks_dirty();
        let rig = Rig::new(format);
        let chunk_lg2 = rig.space.chunk();
        let bytes = Self::CHUNKS << chunk_lg2;
        let start = match seed % 2 {
            0 => rig.space.aperture.start().get(),
            _ => rig.space.aperture.last().get() - (bytes - 1),
        };
        let (window, mapped) = (range(start, bytes), Vec::new());
        Self { rig, rng: Rng::new(seed), window, chunk_lg2, prots, tracks_dirty, mapped }
    }

    /// Granules, a few or about as many as a chunk has, in bytes.
    fn len(&mut self) -> u64 {
        let chunk = lg2::size(self.chunk_lg2);
        let granule = self.rig.space.granule();
        match self.rng.below(4) {
            0 => granule * (1 + self.rng.below(40)),
            1 => chunk,
            2 => chunk + granule * self.rng.below(20),
            _ => (2 * chunk).saturating_sub(granule * self.rng.below(20)).max(granule),
        }
    }

    fn prot(&mut self) -> Prot {
        self.prots[self.rng.index(self.prots.len())]
    }

    /// Maps up to three spans where nothing is mapped; mostly memory that lies in its blocks as the
    /// IOVAs do in theirs.
    fn map(&mut self) {
        let (granule, chunk) = (self.rig.space.granule(), lg2::size(self.chunk_lg2));
        let offset = match self.rng.below(2) {
            0 => 0,
            _ => self.rng.below(chunk / granule) * granule,
        };
        let iova = self.window.start().get() + (self.rng.below(Self::CHUNKS) * chunk) + offset;
        let mut spans: Vec<Span> = Vec::new();
        let mut next = iova;
        for _ in 0..=self.rng.below(3) {
            let bytes = self.len();
            let within = next & lg2::mask(self.chunk_lg2);
            let within = if self.rng.below(4) == 0 { 0 } else { within };
            spans.push(span(self.rng.below(8) * 2 * chunk + within, bytes));
            next = next.wrapping_add(bytes);
        }
        let Some(all) = IovaRange::new(Iova::new(iova), Iova::new(next.wrapping_sub(1))) else {
            return;
        };
        let is_taken = |mapped: &IovaRange| mapped.intersection(all).is_some();
        if self.window.covers(all) && !self.mapped.iter().any(is_taken) {
            let prot = self.prot();
            self.rig.map(iova, &spans, prot).unwrap();
            self.mapped.push(all);
        }
    }

    /// A device goes to both ends of all that is mapped, to some of the addresses between, and to
    /// some in `also`.
    fn touch(&mut self, also: &[IovaRange]) {
        for range in self.mapped.iter().chain(also) {
            let inside = (0..6).map(|_| self.rng.next() % (range.len_less_one() + 1));
            let offsets: Vec<u64> = inside.chain([0, range.len_less_one()]).collect();
            for offset in offsets {
                let access = [Access::Read, Access::Write][self.rng.index(2)];
                let _ = self.rig.iotlb().translate(range.start().wrapping_add(offset), access);
            }
        }
    }

    /// Unmaps up to four ranges, whole mappings or parts of them, by buffers that become full, and
    /// syncs all of it at once.
    #[expect(unsafe_code, reason = "one thread works on the domain")]
    fn unmap(&mut self) {
        let mut gather = self.rig.domain.gather();
        let mut gone = Vec::new();
        for _ in 0..=self.rng.below(3) {
            if self.mapped.is_empty() {
                break;
            }
            let whole = self.mapped.swap_remove(self.rng.index(self.mapped.len()));
            let range =
                if self.rng.below(2) == 0 { whole } else { self.rig.part_of(whole, &mut self.rng) };
            self.mapped.extend(without(whole, range));
            self.rig.unmap_into(range, &mut gather);
            gone.push(range);
            // Until the sync hardware may look for what is gone, and keep what it finds.
            self.touch(&gone);
        }
        // SAFETY: it was gathered from this domain.
        let synced = unsafe { self.rig.domain.sync(gather) }.unwrap();
        assert!(gone.iter().all(|&range| synced.covers(range)));
    }

    /// Other permissions for all of a mapping.
    fn protect(&mut self) {
        if !self.mapped.is_empty() {
            let (range, prot) = (self.mapped[self.rng.index(self.mapped.len())], self.prot());
            self.rig.protect(range, prot).unwrap();
        }
    }

    /// Reads and clears the marks of a mapping. A write behind that is marked again.
    fn clear(&mut self) {
        if !self.tracks_dirty || self.mapped.is_empty() {
            return;
        }
        let range = self.mapped[self.rng.index(self.mapped.len())];
        let granule = self.rig.space.granule();
        let mut words =
            vec![0u64; usize::try_from(range.len_less_one() / granule / 64).unwrap() + 1];
        let mut marks = |rig: &Rig<S>| {
            words.fill(0);
            let mut bits = DirtyBitmap::new(&mut words, range, granule).unwrap();
            rig.clear_dirty(range, &mut bits).unwrap();
            words.clone()
        };
        marks(&self.rig);
        let offset = self.rng.next() % (range.len_less_one() + 1);
        let at = range.start().wrapping_add(offset);
        let is_written = self.rig.iotlb().translate(at, Access::Write).is_ok();
        let number = offset / granule;
        let word = marks(&self.rig)[usize::try_from(number / 64).unwrap()];
        assert_eq!(word >> (number % 64) & 1 != 0, is_written, "a write at {at} got lost");
    }

    /// How many leaves and links hardware has that the tables contradict.
    fn stale(&self) -> usize {
        let iotlb = self.rig.iotlb();
        iotlb.stale_leaves(self.window).len() + iotlb.stale_links(self.window).len()
    }
}

/// What is stale behind one of many operations, if anything is. Hardware forgets as `planted` says
/// where unmaps are synced.
fn stale_after<S: Subject>(format: S::Format, seed: u64, planted: Planted) -> usize {
    let mut world = World::<S>::new(format, seed);
    for _ in 0..40 {
        world.touch(&[]);
        match world.rng.below(8) {
            0..4 => world.map(),
            4..6 => {
                world.rig.iotlb().drop_invalidations(planted);
                world.unmap();
                world.rig.iotlb().drop_invalidations(Planted::None);
            }
            6 => world.protect(),
            _ => world.clear(),
        }
        let stale = world.stale();
        if stale != 0 {
            return stale;
        }
    }
    0
}

/// Unmaps that are gathered, over buffers that become full, with splits, permissions and marks
/// between them: behind each sync hardware has nothing that the tables contradict, although it
/// forgets no leaf whose size is not named.
pub fn hardware_keeps_nothing_stale_behind_a_sync_of_what_was_gathered<S: Subject>() {
    each::<S>(|format| {
        for seed in 0..share::<S>(60) {
            let stale = stale_after::<S>(format.clone(), seed, Planted::None);
            assert_eq!(stale, 0, "seed {seed}");
        }
    });
}

/// The case before this one finds a gather that loses a size of the leaves in it, the smallest or
/// the largest, in every configuration where mappings have several.
pub fn a_size_that_a_gather_loses_is_found<S: Subject>() {
    each::<S>(|format| {
        for planted in [Planted::IgnoreSmallest, Planted::IgnoreLargest] {
            let space = super::Space::of(&format);
            let has_several = space.sizes().iter().filter(|lg2| **lg2 <= space.chunk()).count() > 1;
            if has_several {
                let after = |seed| stale_after::<S>(format.clone(), seed, planted);
                assert!((0..200).any(|seed| after(seed) != 0), "{planted:?}");
            }
        }
    });
}
