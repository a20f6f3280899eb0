//! Leaves that are split, and permissions that change, under the eyes of a device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::io_pgtable::{DirtyBitmap, Error, Format, Gap};
use dmaspan::{Iova, IovaRange, Prot, iommu, lg2};
use parking_lot::Mutex;

use super::rig::{Rig, Tlb};
use super::space::{Space, range, span};
use super::survey::{self, Seen};
use super::tree::{PROT, Tree, granted};
use super::{Subject, codec, each, share};
use crate::fault::Faults;
use crate::iotlb::{AbsentEntries, IotlbConfig};
use crate::rng::Rng;
use crate::walker::Access;

/// The leaves that a split of a leaf at an address must leave: entries of its level where it has
/// several, and of lower levels only around the address.
fn split_at<S: Subject>(leaf: Seen, at: u64) -> Vec<Seen> {
    let lg2 = lg2::floor(leaf.range.len_less_one()) + 1;
    let mut pieces = vec![(leaf.range.start().get(), lg2)];
    let mut level = S::Format::level_of(lg2);
    loop {
        let shift = S::Format::shift(level);
        let cut = pieces
            .iter()
            .position(|&(start, lg2)| start < at && at - start <= lg2::mask(lg2) && lg2 > shift);
        if let Some(n) = cut {
            let (start, lg2) = pieces[n];
            let parts = (0..lg2::size(lg2 - shift)).map(|part| (start + (part << shift), shift));
            pieces.splice(n..=n, parts);
        }
        if level == 0 {
            break;
        }
        level -= 1;
    }
    let seen = |(start, lg2)| Seen {
        range: range(start, lg2::size(lg2)),
        paddr: leaf.paddr.wrapping_add(start - leaf.range.start().get()),
        prot: leaf.prot,
    };
    pieces.into_iter().map(seen).collect()
}

/// Borders to split at: around the ends, the middle, and where each level's entries begin.
fn borders(space: &Space, iova: u64, lg2: u32, rng: &mut Rng) -> Vec<u64> {
    let (granule, size) = (space.granule(), lg2::size(lg2));
    let mut offsets = vec![granule, size - granule, size / 2];
    for shift in (0..=space.top_level).filter_map(|level| space.shift(level)) {
        if shift < lg2 {
            let count = lg2::size(lg2 - shift);
            offsets.extend([1, rng.below(count)].map(|n| n << shift));
        }
    }
    offsets.sort_unstable();
    offsets.dedup();
    offsets.retain(|&offset| offset != 0);
    offsets.into_iter().map(|offset| iova + offset).collect()
}

/// A leaf of a size that has smaller ones, in a place where it fits.
pub(super) fn places<F: Format>(space: &Space) -> Vec<(u32, u64)> {
    let place = |lg2| Some((lg2, space.nth(lg2, 1).or_else(|| space.nth(lg2, 0))?));
    let large = space.sizes().into_iter().skip(1);
    large.filter(|&lg2| splits::<F>(space, lg2)).filter_map(place).collect()
}

/// Whether every level below a leaf's, and its own, has leaves of a single entry.
fn splits<F: Format>(space: &Space, lg2: u32) -> bool {
    (0..=F::level_of(lg2)).all(|level| space.page_sizes & lg2::size(F::shift(level)) != 0)
}

/// Permissions other than those of most mappings.
pub(super) fn other<F: Format>(format: &F) -> Prot {
    if format.refuses(Prot::READ) { Prot::READ_WRITE } else { Prot::READ }
}

/// What hardware says of an address besides where it leads.
fn attributes<S: Subject>(iotlb: &Tlb<S>, iova: u64) -> impl PartialEq + std::fmt::Debug + use<S> {
    let found = survey::translate(iotlb.walker(), iotlb.tables(), Iova::new(iova)).unwrap();
    (found.paddr, found.prot, found.attributes, found.shareability, found.clean)
}

/// Whether any page of a range is reported dirty, and whether all are; the marks stay.
fn dirty<S: Subject>(rig: &Rig<S>, range: IovaRange) -> (bool, bool) {
    let granule = lg2::size((lg2::floor(range.len_less_one()) + 1).saturating_sub(10)).max(1);
    let mut words = [0; 16];
    let mut bitmap = DirtyBitmap::new(&mut words, range, granule).unwrap();
    rig.clear_dirty(range, &mut bitmap).unwrap();
    let bits = range.len_less_one() / granule + 1;
    let set: u64 = words.iter().map(|word| u64::from(word.count_ones())).sum();
    (set > 0, set == bits)
}

/// A border inside a leaf of every size: translations, attributes and marks are as before, and the
/// leaf is split no more than that takes. Both parts can be unmapped, and no table is lost.
pub fn a_leaf_is_split_as_little_as_a_border_takes<S: Subject>() {
    each::<S>(|format| {
        let mut rng = Rng::new(17);
        let marks: &[bool] = if format.tracks_dirty() { &[false, true] } else { &[false] };
        let rig = Rig::<S>::new(format.clone());
        let base = rig.arena.tables();
        for (lg2, iova) in places::<S::Format>(&rig.space) {
            let (size, all) = (lg2::size(lg2), range(iova, lg2::size(lg2)));
            for (at, &mark) in borders(&rig.space, iova, lg2, &mut rng)
                .into_iter()
                .flat_map(|at| marks.iter().map(move |mark| (at, mark)))
            {
                let prot = if mark || rng.below(2) == 0 { PROT } else { other(&format) };
                rig.map(iova, &[span(0, size)], prot).unwrap();
                let written = iova + rng.below(size);
                if mark {
                    rig.iotlb().translate(Iova::new(written), Access::Write).unwrap();
                }
                let samples = [iova, at - 1, at, iova + (size - 1), written];
                let before: Vec<_> = rig.leaves(all);
                let said = samples.map(|iova| attributes::<S>(rig.iotlb(), iova));
                let expected = split_at::<S>(before[0], at);
                rig.hooks().forgotten();
                rig.split(at, Gap::Accept).unwrap();
                let forgotten = rig.hooks().forgotten();
                assert!(forgotten.last().is_some_and(|it| it.has(all)), "{forgotten:?}");
                assert_eq!(rig.leaves(all), expected, "2^{lg2} at {at:#x}");
                if !mark {
                    // Of a marked leaf any entry may have been the marked one.
                    assert!(samples.map(|iova| attributes::<S>(rig.iotlb(), iova)) == said);
                }
                // A border now.
                for at in [iova, at] {
                    rig.split(at, Gap::Refuse).unwrap();
                }
                assert_eq!(rig.hooks().forgotten(), []);
                if format.tracks_dirty() {
                    assert_eq!(dirty(&rig, all), (mark, mark), "2^{lg2} at {at:#x}");
                }
                let [first, second] = [range(iova, at - iova), range(at, size - (at - iova))];
                assert_eq!(rig.unmap(first).unwrap(), [span(0, at - iova)]);
                assert_eq!((rig.translate(at - 1), rig.translate(at).is_some()), (None, true));
                assert_eq!(rig.unmap(second).unwrap(), [span(at - iova, size - (at - iova))]);
            }
        }
        let arena = rig.arena.clone();
        assert!(arena.tables() >= base);
        drop(rig);
        assert_eq!(arena.tables(), 0, "no table is lost");
    });
}

/// Hardware that needs a break has no translation between break and make and at no other time, and
/// only where the caller accepts it; other hardware has one always.
pub fn a_split_breaks_only_where_hardware_needs_it<S: Subject>() {
    each::<S>(|format| {
        let breaks = format.needs_break();
        for (lg2, iova) in places::<S::Format>(&Space::of(&format)) {
            let rig = Rig::<S>::new(format.clone());
            let (size, granule) = (lg2::size(lg2), rig.space.granule());
            let (all, at) = (range(iova, size), iova + granule);
            rig.map(iova, &[span(0, size)], PROT).unwrap();
            rig.iotlb().translate(Iova::new(at), Access::Read).unwrap();
            let before = rig.leaves(all);
            rig.hooks().forgotten();
            if breaks {
                let refused = Err(Error::NeedsBreak { leaf: all }.into());
                assert_eq!(rig.split(at, Gap::Refuse), refused);
                assert_eq!((rig.leaves(all), rig.hooks().forgotten()), (before, vec![]));
            }
            let found = Arc::new(Mutex::new(Vec::new()));
            let look = Arc::clone(&found);
            rig.hooks().watch(move |iotlb| {
                let access = iotlb.translate(Iova::new(at), Access::Read);
                look.lock().push((
                    survey::leaves(iotlb.walker(), iotlb.tables(), all).len(),
                    access.is_ok(),
                ));
            });
            rig.split(at, if breaks { Gap::Accept } else { Gap::Refuse }).unwrap();
            let after = (rig.leaves(all).len(), true);
            let expected = if breaks { vec![(0, false), after] } else { vec![after] };
            assert_eq!(*found.lock(), expected, "2^{lg2}");
            rig.iotlb().translate(Iova::new(at), Access::Read).unwrap();
        }
    });
}

/// Holes, addresses inside a page, addresses out of reach, and missing tables: refused, and nothing
/// is changed or forgotten.
pub fn a_refused_split_changes_nothing<S: Subject>() {
    each::<S>(|format| {
        let faults = Faults::none();
        let rig = Rig::with_config(Tree::<S, _>::faulty(format, &faults), IotlbConfig::default());
        let granule = rig.space.granule();
        let Some(&(lg2, iova)) = places::<S::Format>(&rig.space).last() else { return };
        let (size, all) = (lg2::size(lg2), range(iova, lg2::size(lg2)));
        let hole = rig.split(iova + granule, Gap::Accept);
        assert!(matches!(hole, Err(iommu::Error::Table(Error::Hole { .. }))), "{hole:?}");
        rig.map(iova, &[span(0, size)], PROT).unwrap();
        let inside = rig.split(iova + granule / 2, Gap::Accept);
        assert!(matches!(inside, Err(iommu::Error::Table(Error::Misaligned { .. }))));
        let aperture = rig.space.aperture;
        if let Some(outside) = aperture.last().checked_add(1) {
            let outside = rig.split(outside.get(), Gap::Accept);
            assert!(matches!(outside, Err(iommu::Error::Table(Error::OutsideAperture { .. }))));
        }
        for lg2 in rig.space.sizes() {
            // The leaf has no smaller ones: a typed error, and it stays.
            let Some(iova) = rig.space.nth(lg2, 1) else { continue };
            if !splits::<S::Format>(&rig.space, lg2) {
                let leaf = range(iova, lg2::size(lg2));
                rig.map(iova, &[span(0, lg2::size(lg2))], PROT).unwrap();
                let (before, tables) = (rig.leaves(leaf), rig.arena.tables());
                let refused = Err(Error::WouldSplit { leaf }.into());
                assert_eq!(rig.split(iova + granule, Gap::Accept), refused);
                assert_eq!((rig.leaves(leaf), rig.arena.tables()), (before, tables));
                rig.unmap(leaf).unwrap();
            }
        }
        let before = (rig.leaves(all), rig.arena.tables());
        rig.hooks().forgotten();
        faults.sweep(|n| match rig.split(iova + granule, Gap::Accept) {
            Ok(()) => {}
            Err(error) => {
                assert!(matches!(error, iommu::Error::Table(Error::NoTables { .. })), "{error}");
                assert_eq!((rig.leaves(all), rig.arena.tables()), before, "step {n}");
                assert_eq!(rig.hooks().forgotten(), []);
            }
        });
        assert_ne!(rig.leaves(all), before.0, "split at last");
    });
}

/// Hardware that does not answer during a split: every page is translated as before, and after a
/// failed break the leaf is whole again.
pub fn a_split_whose_sync_fails_keeps_all_translations<S: Subject>() {
    each::<S>(|format| {
        let breaks = format.needs_break();
        for (lg2, iova) in places::<S::Format>(&Space::of(&format)) {
            for failing in 1..=if breaks { 2 } else { 1 } {
                let rig = Rig::<S>::new(format.clone());
                let (size, granule) = (lg2::size(lg2), rig.space.granule());
                let (all, at) = (range(iova, size), iova + granule);
                rig.map(iova, &[span(0, size)], PROT).unwrap();
                if format.tracks_dirty() {
                    rig.iotlb().translate(Iova::new(at), Access::Write).unwrap();
                }
                let (before, tables) = (rig.leaves(all), rig.arena.tables());
                rig.hooks().fail(failing);
                let failed = rig.split(at, Gap::Accept);
                assert!(matches!(failed, Err(iommu::Error::Hardware { .. })), "{failed:?}");
                let expected = if breaks && failing == 1 {
                    assert_eq!(rig.arena.tables(), tables, "the tables built were given back");
                    before
                } else {
                    split_at::<S>(before[0], at)
                };
                assert_eq!(rig.leaves(all), expected);
                if format.tracks_dirty() {
                    assert_eq!(dirty(&rig, all), (true, true));
                }
            }
        }
    });
}

/// From every permission to every other, for pages, large leaves and groups side by side: hardware
/// sees the new ones when the call returns, and nothing else changed.
pub fn every_permission_becomes_every_other<S: Subject>() {
    let mut rng = Rng::new(19);
    let most = usize::try_from(share::<S>(500)).unwrap();
    each::<S>(|format| {
        let prots: Vec<_> =
            codec::prots(&format).into_iter().filter(|&prot| !format.refuses(prot)).collect();
        let rig = Rig::<S>::new(format.clone());
        let all = mixed(&rig, prots[0]);
        let sizes = rig.domain.geometry().page_sizes;
        // A sequence in which each permission follows each other one, once for each distance.
        let count = prots.len();
        let steps = (1..count).flat_map(|step| (0..count).map(move |n| (n * step) % count));
        let from = usize::try_from(rng.below(1000)).unwrap();
        for prot in steps.cycle().skip(from).take(most).map(|n| prots[n]) {
            let before = rig.leaves(all);
            for leaf in &before {
                // Cached, as it is now.
                let _ = rig.iotlb().translate(leaf.range.start(), Access::Read);
            }
            rig.hooks().forgotten();
            rig.protect(all, prot).unwrap();
            let grant = granted(&format, prot);
            let expected: Vec<_> =
                before.iter().map(|leaf| Seen { prot: grant, ..*leaf }).collect();
            assert_eq!(rig.leaves(all), expected, "{prot:?}");
            let forgotten = rig.hooks().forgotten();
            for leaf in &before {
                let is_told = forgotten.iter().any(|forgot| forgot.has(leaf.range));
                assert!(is_told, "{leaf:?} in {forgotten:?}");
                assert_ne!(sizes & (leaf.range.len_less_one() + 1), 0);
            }
            assert_eq!(rig.iotlb().stale_leaves(all), []);
        }
    });
}

/// Maps scattered pages, a group where there is one, and large leaves, one behind the other.
fn mixed<S: Subject>(rig: &Rig<S>, prot: Prot) -> IovaRange {
    let space = &rig.space;
    let (granule, chunk) = (space.granule(), lg2::size(space.chunk()));
    let start = space.aperture.start().get() + 7 * chunk - 3 * granule;
    let spans = [
        span(3 * granule, granule),
        span(9 * granule, 2 * granule),
        span(4 * chunk, 2 * chunk),
        span(10 * chunk, chunk / 2),
        span(21 * chunk - 3 * granule, 3 * granule),
    ];
    rig.map(start, &spans, prot).unwrap();
    range(start, spans.iter().map(|span| span.len()).sum())
}

/// Holes and leaves that reach out of the range: refused, whatever lies before them.
pub fn a_refused_protect_changes_nothing<S: Subject>() {
    each::<S>(|format| {
        let prot = other(&format);
        let rig = Rig::<S>::new(format);
        let all = mixed(&rig, PROT);
        let granule = rig.space.granule();
        rig.hooks().forgotten();
        let before = rig.leaves(all);
        let start = all.start().get();
        let beyond = range(start, all.len_less_one() + 1 + granule);
        let hole = rig.protect(beyond, prot);
        assert!(matches!(hole, Err(iommu::Error::Table(Error::Hole { .. }))), "{hole:?}");
        for leaf in before.iter().filter(|leaf| leaf.range.len_less_one() >= granule) {
            let cut = range(start, leaf.range.last().get() - start + 1 - granule);
            let split = Err(Error::WouldSplit { leaf: leaf.range }.into());
            assert_eq!(rig.protect(cut, prot), split);
        }
        assert_eq!((rig.leaves(all), rig.hooks().forgotten()), (before, vec![]));
    });
}

/// log2 of the smallest leaf of several entries of which there is room for 64.
fn group<S: Subject>(space: &Space) -> Option<u32> {
    let is_group = |&lg2: &u32| S::Format::shift(S::Format::level_of(lg2)) != lg2;
    let fits = |&lg2: &u32| space.nth(lg2, 64).is_some() && space.has_memory(lg2, 128);
    space.sizes().into_iter().filter(fits).find(is_group)
}

/// Many groups, which some hardware needs broken: no more than a batch is away at once, each whole,
/// and a device that met the gap goes on, also where absent entries are cached.
pub fn groups_are_broken_whole_and_by_bounded_batches<S: Subject>() {
    each::<S>(|format| {
        let tree = Tree::<S>::new(format.clone());
        let Some(lg2) = group::<S>(&tree.space) else { return };
        let absent = AbsentEntries::Cached;
        let rig = Rig::with_config(tree, IotlbConfig { absent, ..IotlbConfig::default() });
        let (size, granule, breaks) = (lg2::size(lg2), rig.space.granule(), format.needs_break());
        let start = rig.space.nth(lg2, 1).unwrap() - 2 * granule;
        // Pages before and behind.
        let mut spans = vec![span(granule, 2 * granule)];
        spans.extend((0..60).map(|n| span((2 * n + 1) * size, size)));
        spans.push(span(granule, granule));
        rig.map(start, &spans, PROT).unwrap();
        let all = range(start, 60 * size + 3 * granule);
        let before = rig.leaves(all);
        assert_eq!(before.len(), 63);
        let away = Arc::new(AtomicU64::new(0));
        let most = Arc::clone(&away);
        rig.hooks().watch(move |iotlb| {
            for page in [all.start(), Iova::new(start + 3 * granule), all.last()] {
                let _ = iotlb.translate(page, Access::Read);
            }
            let there = survey::leaves(iotlb.walker(), iotlb.tables(), all).len() as u64;
            most.fetch_max(63 - there, Ordering::Relaxed);
        });
        rig.protect(all, other(&format)).unwrap();
        let away = away.load(Ordering::Relaxed);
        assert!(if breaks { (1..=32).contains(&away) } else { away == 0 }, "{away} away");
        for leaf in &before {
            let iova = leaf.range.start();
            let hit = rig.iotlb().translate(iova, Access::Read);
            assert_eq!(hit.map(|hit| hit.paddr), Ok(leaf.paddr), "after the gap");
        }
        if breaks {
            // The first batch or the second one fails.
            for failing in [1, 2] {
                let [old, new] = [rig.leaves(all)[0].prot, granted(&format, PROT)];
                rig.hooks().fail(failing);
                let failed = rig.protect(all, PROT);
                assert!(matches!(failed, Err(iommu::Error::Hardware { .. })), "{failed:?}");
                for (leaf, now) in before.iter().zip(rig.leaves(all)) {
                    assert!(now.prot == old || now.prot == new, "{now:?}");
                    assert_eq!(now, Seen { prot: now.prot, ..*leaf });
                }
                rig.hooks().fail(0);
                rig.protect(all, other(&format)).unwrap();
            }
        }
    });
}
