//! Random operations, against an interval map and brute force.

use dmaspan::{Iova, Prot, Span, lg2};

use super::space::{Space, span};
use super::tree::Tree;
use super::{Subject, each, share};
use crate::fuzz::Pair;
use crate::model::optimal_leaf_census;
use crate::rng::Rng;

/// Table, walker and model say the same whatever was mapped, unmapped, protected and reclaimed, and
/// no table leaks (random_map of generic_pt).
pub fn random_operations_agree_with_an_interval_map<S: Subject>() {
    each::<S>(|format| {
        let mut rng = Rng::new(5);
        for _ in 0..share::<S>(60) {
            let mut tree = Tree::<S>::new(format.clone());
            let bytes = rng.index(800);
            let bytes = rng.bytes(bytes);
            let mut pair = Pair::new(&tree.table, &bytes);
            pair.run();
            let (model, window) = (pair.model.clone(), pair.window);
            drop(pair);
            tree.check(&model, window, &mut rng);
            for run in model.runs(window) {
                tree.unmap(run.iova).unwrap();
            }
            tree.reclaim();
            let arena = tree.arena.clone();
            assert_eq!(arena.tables(), 1, "only the root is left");
            drop(tree);
            assert_eq!(arena.tables(), 0, "tables leaked");
        }
    });
}

/// A length that is small, or near the size of a chunk, in granules.
fn len(rng: &mut Rng, chunk: u64) -> u64 {
    match rng.below(7) {
        0..4 => 1 + rng.below(19),
        4..6 => chunk - 3 + rng.below(6),
        _ => 1 + rng.below(3 * chunk - 1),
    }
}

/// Any mapping is made of as few leaves as brute force finds: the sizes are chosen from the
/// alignment of both addresses, and the room (best_pgsize of generic_pt).
pub fn every_mapping_has_the_fewest_leaves<S: Subject>() {
    each::<S>(|format| {
        let space = Space::of(&format);
        let granule_lg2 = space.granule_lg2;
        let chunk = lg2::size(space.chunk() - granule_lg2);
        // Five chunks to begin in, and five spans of up to three more.
        let bytes = (22 * chunk) << granule_lg2;
        let (start, last) = (space.aperture.start().get(), space.aperture.last().get());
        let borders = [2, 1].into_iter().filter_map(|level| space.nth(space.shift(level)?, 1));
        let around = borders
            .map(|border| border.saturating_sub((2 * chunk) << granule_lg2))
            .find(|&around| around >= start && last - around >= bytes);
        let end = last - (bytes - 1);
        for seed in 0..share::<S>(60) {
            let mut tree = Tree::<S>::new(format.clone());
            let mut rng = Rng::new(seed);
            let window = if seed % 2 == 0 { around.unwrap_or(end) } else { end };
            let iova = window + (rng.below(5 * chunk) << granule_lg2);
            // Half of the cases have memory that is aligned as its IOVAs are.
            let congruent = seed % 4 < 2;
            let memory = lg2::size(space.output_bits - granule_lg2);
            let mut next = iova >> granule_lg2;
            let mut spans: Vec<Span> = Vec::new();
            for _ in 0..=rng.below(5) {
                let any = rng.below(5 * chunk);
                let paddr = if congruent { next % (2 * chunk) + (any & (7 * chunk)) } else { any };
                let len = len(&mut rng, chunk).min(memory - paddr);
                spans.push(span(paddr << granule_lg2, len << granule_lg2));
                next = next.wrapping_add(len);
            }
            tree.map(iova, &spans, Prot::READ_WRITE).unwrap();
            let census = tree.census();
            let fewest = optimal_leaf_census(Iova::new(iova), &spans, space.page_sizes).unwrap();
            assert_eq!(census, fewest.into_iter().collect::<Vec<_>>());
            let leaves = tree.leaves().len() as u64;
            assert_eq!(leaves, census.iter().map(|(_, count)| count).sum::<u64>());
        }
    });
}
