use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::node::{FAN, LEAST};
use super::*;

fn range(start: u64, last: u64) -> IovaRange {
    IovaRange::new(Iova::new(start), Iova::new(last)).unwrap()
}

fn tree(start: u64, last: u64, granule_lg2: u32) -> Tree {
    Tree::new(range(start, last), granule_lg2).unwrap()
}

/// What a walk over all nodes finds.
#[derive(Default)]
struct Seen {
    leaves: usize,
    inners: usize,
    entries: Vec<Entry>,
}

impl Tree {
    /// Every entry, with every node checked against what it says of the nodes below.
    fn check(&self) -> Vec<Entry> {
        let mut seen = Seen::default();
        self.check_node(0, self.root, &mut seen);
        assert_eq!([seen.leaves, seen.inners], [self.leaves.taken(), self.inners.taken()]);
        let len = self.aperture.checked_len().unwrap();
        let end = Entry { start: len, end: len, kind: Kind::Reserved };
        assert_eq!(seen.entries.pop(), Some(end));
        for kind in [Kind::Allocated, Kind::Reserved] {
            let of_kind = seen.entries.iter().filter(|entry| entry.kind == kind);
            let bytes = of_kind.clone().map(|entry| entry.end - entry.start).sum();
            let usage = if kind == Kind::Allocated { self.allocated() } else { self.reserved() };
            assert_eq!(usage, Usage { ranges: of_kind.count(), bytes });
        }
        seen.entries
    }

    fn check_node(&self, depth: usize, id: u32, seen: &mut Seen) {
        let begin = seen.entries.last().map_or(0, |entry| entry.end);
        if depth == self.height {
            let leaf = &self.leaves[id];
            seen.leaves += 1;
            assert!(depth == 0 || leaf.len >= LEAST);
            assert_eq!(leaf.begin, begin);
            seen.entries.extend(leaf.entries());
            return;
        }
        let inner = &self.inners[id];
        seen.inners += 1;
        assert!(inner.len >= if depth == 0 { 2 } else { LEAST });
        for child in 0..FAN {
            if child >= inner.len {
                assert!((0..self.grid.orders).all(|order| inner.fit(child, order) == 0));
                assert_eq!(inner.begin(child), u64::MAX);
                continue;
            }
            let before = seen.entries.len();
            let begin = seen.entries.last().map_or(0, |entry| entry.end);
            assert_eq!(inner.begin(child), begin);
            self.check_node(depth + 1, inner.child(child), seen);
            for order in 0..self.grid.orders {
                let mut start = begin;
                let mut longest = 0;
                for entry in &seen.entries[before..] {
                    let gap = Gap { start, len: entry.start - start };
                    longest = longest.max(self.grid.fit(gap, order));
                    start = entry.end;
                }
                assert_eq!(inner.fit(child, order), longest, "order {order}");
            }
        }
    }
}

/// The ranges in use by their starts, each up to and with its last IOVA, searched one by one.
struct Model {
    aperture: IovaRange,
    used: BTreeMap<u64, (u64, Kind)>,
}

impl Model {
    fn new(tree: &Tree) -> Self {
        Self { aperture: tree.aperture, used: BTreeMap::new() }
    }

    fn in_the_way(&self, range: IovaRange, kinds: &[Kind]) -> Option<IovaRange> {
        let mut ranges = self.used.iter().filter(|(_, (_, kind))| kinds.contains(kind));
        let found = ranges.find(|(start, (last, _))| {
            **start <= range.last().get() && *last >= range.start().get()
        });
        found.map(|(start, (last, _))| self::range(*start, *last))
    }

    /// The first range in the way with those of its kind that follow it in `range` without a gap.
    fn stretch(&self, range: IovaRange, kinds: &[Kind]) -> Option<IovaRange> {
        let mut stretch = self.in_the_way(range, kinds)?;
        let (_, kind) = self.used[&stretch.start().get()];
        while let Some(next) = stretch.last().checked_add(1).filter(|next| *next <= range.last())
            && let Some(&(last, _)) = self.used.get(&next.get()).filter(|(_, of)| *of == kind)
        {
            stretch = self::range(stretch.start().get(), last);
        }
        Some(stretch)
    }

    fn lowest_fit(&self, len: u64, align_lg2: u32, limit: u64) -> Option<IovaRange> {
        let align = 1_u128 << align_lg2;
        let top = u128::from(limit.min(self.aperture.last().get()));
        let mut at = u128::from(self.aperture.start().get()).next_multiple_of(align);
        for (start, (last, _)) in &self.used {
            if at + u128::from(len) <= u128::from(*start) {
                break;
            }
            at = at.max((u128::from(*last) + 1).next_multiple_of(align));
        }
        let last = at + u128::from(len) - 1;
        (last <= top).then(|| range(at.try_into().unwrap(), last.try_into().unwrap()))
    }

    fn insert(&mut self, range: IovaRange, kind: Kind) {
        self.used.insert(range.start().get(), (range.last().get(), kind));
    }

    fn reserve(&mut self, range: IovaRange) {
        let mut whole = range;
        while let Some(old) = self.in_the_way(range, &[Kind::Reserved]) {
            whole = whole.join(old).unwrap();
            self.used.remove(&old.start().get());
        }
        self.insert(whole, Kind::Reserved);
    }

    fn check(&self, tree: &Tree) {
        let base = self.aperture.start().get();
        let used = self.used.iter().map(|(start, (last, kind))| Entry {
            start: start - base,
            end: last - base + 1,
            kind: *kind,
        });
        assert!(tree.check().into_iter().eq(used));
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Alloc { granules: u64, align: u32, limit: u64 },
    AllocAt { at: u64, granules: u64 },
    Reserve { at: u64, granules: u64 },
    Free { which: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    let few = prop_oneof![4 => 1..4_u64, 1 => 1..64_u64, 1 => any::<u64>()];
    let limit = prop_oneof![3 => Just(u64::MAX), 1 => any::<u64>()];
    prop_oneof![
        6 => (few.clone(), prop_oneof![4 => 0..4_u32, 1 => 0..64_u32], limit)
            .prop_map(|(granules, align, limit)| Op::Alloc { granules, align, limit }),
        2 => (any::<u64>(), 1..6_u64).prop_map(|(at, granules)| Op::AllocAt { at, granules }),
        1 => (any::<u64>(), 1..6_u64).prop_map(|(at, granules)| Op::Reserve { at, granules }),
        5 => any::<u64>().prop_map(|which| Op::Free { which }),
    ]
}

/// Apertures of few granules and of all, with a window where the random positions lie.
fn space() -> impl Strategy<Value = (IovaRange, u32, u64)> {
    let ends = prop_oneof![
        Just((1, 300)),
        Just((5, 5)),
        Just((1, (1 << 20) - 1)),
        Just((77, 2000)),
        Just((u64::MAX - 500, u64::MAX)),
        Just((1, u64::MAX)),
    ];
    (ends, prop_oneof![Just(0_u32), Just(12)], prop_oneof![Just(400_u64), Just(u64::MAX)]).prop_map(
        |((first, last), granule_lg2, window)| {
            let [first, last] = [first, last].map(|end| end & lg2::mask(64 - granule_lg2));
            let aperture = [first << granule_lg2, (last << granule_lg2) | lg2::mask(granule_lg2)];
            (range(aperture[0], aperture[1]), granule_lg2, window)
        },
    )
}

/// `granules` from a position in the window, as far as the aperture has them.
fn piece(tree: &Tree, window: u64, at: u64, granules: u64) -> IovaRange {
    let granule_lg2 = tree.grid.granule_lg2;
    let there = tree.aperture.len_less_one() >> granule_lg2;
    let first = at % there.min(window).saturating_add(1);
    let last = first.saturating_add(granules - 1).min(there);
    let base = tree.grid.base;
    range(base + (first << granule_lg2), base + ((last << granule_lg2) | lg2::mask(granule_lg2)))
}

fn step(tree: &mut Tree, model: &mut Model, window: u64, op: Op) {
    const BOTH: [Kind; 2] = [Kind::Allocated, Kind::Reserved];
    let granule_lg2 = tree.grid.granule_lg2;
    match op {
        Op::Alloc { granules, align, limit } => {
            let granules = (granules & lg2::mask(64 - granule_lg2)).max(1);
            let len = granules << granule_lg2;
            let expected = model.lowest_fit(len, align.max(granule_lg2), limit);
            assert_eq!(tree.alloc(len, align, limit), Ok(expected));
            if let Some(range) = expected {
                model.insert(range, Kind::Allocated);
            }
        }
        Op::AllocAt { at, granules } => {
            let range = piece(tree, window, at, granules);
            let taken = model.stretch(range, &BOTH);
            let expected = taken.map_or(Ok(()), |taken| Err(Error::Taken { range, taken }));
            assert_eq!(tree.alloc_at(range), expected);
            if taken.is_none() {
                model.insert(range, Kind::Allocated);
            }
        }
        Op::Reserve { at, granules } => {
            let range = piece(tree, window, at, granules);
            let taken = model.stretch(range, &[Kind::Allocated]);
            let expected = taken.map_or(Ok(()), |taken| Err(Error::Taken { range, taken }));
            assert_eq!(tree.reserve(range), expected);
            if taken.is_none() {
                model.reserve(range);
            }
        }
        Op::Free { which } => {
            let mut allocated = model.used.iter().filter(|(_, (_, kind))| *kind == Kind::Allocated);
            let count = allocated.clone().count() as u64;
            let index = usize::try_from(which % count.max(1)).unwrap();
            if let Some((start, (last, _))) = allocated.nth(index) {
                let range = range(*start, *last);
                tree.free(range);
                model.used.remove(&range.start().get());
            }
        }
    }
}

/// How many sequences are tried, and less than so many steps in each. Miri, which is hundreds of
/// times slower, has few of few.
const TRIED: (u32, usize) = if cfg!(miri) { (2, 25) } else { (300, 400) };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(TRIED.0))]

    #[test]
    fn it_does_what_a_search_one_by_one_does(
        (aperture, granule_lg2, window) in space(),
        ops in proptest::collection::vec(op(), 1..TRIED.1),
    ) {
        let mut tree = Tree::new(aperture, granule_lg2).unwrap();
        let mut model = Model::new(&tree);
        for op in ops {
            step(&mut tree, &mut model, window, op);
            model.check(&tree);
        }
        let allocated = model.used.iter().filter(|(_, (_, kind))| *kind == Kind::Allocated);
        let allocated: Vec<_> = allocated.map(|(start, (last, _))| range(*start, *last)).collect();
        for range in allocated {
            tree.free(range);
            model.used.remove(&range.start().get());
            model.check(&tree);
        }
    }
}

/// Numbers that are the same in every run.
fn numbers(mut seed: u64) -> impl FnMut() -> u64 {
    move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri takes minutes for thousands of turns")]
fn a_tall_tree_stays_exact_while_it_grows_and_shrinks() {
    let mut tree = tree(0x1000, u64::MAX, 12);
    let mut model = Model::new(&tree);
    let mut next = numbers(0x9e37_79b9_7f4a_7c15);
    let mut tallest = 0;
    for turn in 0..6000 {
        let grows = turn < 3500;
        let op = match next() % 8 {
            0..5 if grows => Op::Alloc {
                granules: 1 + next() % 5,
                align: 12 + u32::try_from(next() % 4).unwrap(),
                limit: u64::MAX,
            },
            5 if grows => Op::AllocAt { at: next(), granules: 1 + next() % 9 },
            6 => Op::Reserve { at: next(), granules: 1 + next() % 9 },
            _ => Op::Free { which: next() },
        };
        step(&mut tree, &mut model, 1 << 14, op);
        if turn % 16 == 0 {
            model.check(&tree);
        }
        tallest = tallest.max(tree.height);
    }
    model.check(&tree);
    assert!(tallest >= 4, "{tallest}");
}

#[test]
#[cfg_attr(miri, ignore = "Miri takes minutes for thousands of ranges")]
fn all_nodes_are_given_back_and_used_again() {
    let mut tree = tree(0x1000, u64::from(u32::MAX), 12);
    let mut held = 0;
    for _ in 0..3 {
        let ranges: Vec<_> =
            (0..2000).map(|_| tree.alloc(0x1000, 12, u64::MAX).unwrap().unwrap()).collect();
        let nodes = [tree.leaves.taken(), tree.inners.taken()];
        assert!(nodes[0] > 2000 / FAN);
        held = nodes[0].max(held);
        for range in ranges.iter().step_by(2).chain(ranges.iter().skip(1).step_by(2)) {
            tree.free(*range);
        }
        assert_eq!([tree.leaves.taken(), tree.inners.taken(), tree.height], [1, 0, 0]);
        assert_eq!(tree.allocated(), Usage::default());
    }
    assert!(held <= 2000 / (FAN / 2), "{held} leaves");
}

#[test]
#[cfg_attr(miri, ignore = "Miri takes minutes for 65536 ranges")]
fn a_gap_that_fits_by_size_and_not_by_alignment_is_not_taken_for_one() {
    // Pages 1 + 4 i are in use: each hole has pages 2, 3 and 4 of its four.
    let mut tree = tree(0x1000, 0x3fff_ffff, 12);
    for index in 0..0x1_0000 {
        let start = (1 + 4 * index) << 12;
        tree.alloc_at(range(start, start + 0xfff)).unwrap();
    }
    tree.alloc_at(range(0x3_ffff << 12, 0x3fff_ffff)).unwrap();
    assert_eq!(tree.alloc(0x4000, 14, u64::MAX), Ok(None));
    assert_eq!(tree.alloc(0x3000, 13, u64::MAX), Ok(Some(range(0x2000, 0x4fff))));
    assert_eq!(tree.alloc(0x3000, 14, u64::MAX), Ok(None));
    let lowest = range(0x8000, 0x8fff);
    assert_eq!(tree.alloc(0x1000, 14, u64::MAX), Ok(Some(lowest)));
    tree.free(range(0x9000, 0x9fff));
    assert_eq!(tree.alloc(0x4000, 14, u64::MAX), Ok(None), "0x8000 is in use");
    tree.free(lowest);
    assert_eq!(tree.alloc(0x4000, 14, 0xaffe), Ok(None), "it ends above");
    assert_eq!(tree.alloc(0x4000, 14, 0xbfff), Ok(Some(range(0x8000, 0xbfff))));
    tree.check();
}

#[test]
fn the_whole_64_bit_space_is_one_gap_up_to_its_last_byte() {
    let mut tree = tree(1, u64::MAX, 0);
    assert_eq!(tree.alloc(u64::MAX, 1, u64::MAX), Ok(None));
    assert_eq!(tree.alloc(1 << 63, 63, u64::MAX - 1), Ok(None));
    let half = range(1 << 63, u64::MAX);
    assert_eq!(tree.alloc(1 << 63, 63, u64::MAX), Ok(Some(half)));
    assert_eq!(tree.alloc(1, 63, u64::MAX), Ok(None));
    tree.free(half);
    assert_eq!(tree.alloc(u64::MAX, 0, u64::MAX), Ok(Some(range(1, u64::MAX))));
    assert_eq!(tree.alloc(1, 0, u64::MAX), Ok(None));
    tree.free(range(1, u64::MAX));
    tree.alloc_at(range(u64::MAX, u64::MAX)).unwrap();
    assert_eq!(
        tree.reserve(range(2, u64::MAX)).unwrap_err(),
        Error::Taken { range: range(2, u64::MAX), taken: range(u64::MAX, u64::MAX) }
    );
    assert_eq!(tree.check().len(), 1);
}

#[test]
fn reservations_are_cut_to_the_aperture_and_widened_to_granules() {
    let mut tree = tree(0x4000, 0x7fff, 12);
    tree.reserve(range(0, 0x3fff)).unwrap();
    tree.reserve(range(0x8000, u64::MAX)).unwrap();
    assert_eq!(tree.reserved(), Usage::default());
    tree.reserve(range(0, 0x4000)).unwrap();
    tree.reserve(range(0x7fff, u64::MAX)).unwrap();
    assert_eq!(tree.reserved(), Usage { ranges: 2, bytes: 0x2000 });
    assert_eq!(tree.alloc(0x2000, 0, u64::MAX), Ok(Some(range(0x5000, 0x6fff))));
    let outside = range(0x7000, 0x8fff);
    assert_eq!(tree.alloc_at(outside), Err(Error::Taken { range: outside, taken: outside }));
    assert_eq!(tree.check().len(), 3);
}

#[test]
fn an_aperture_with_iova_0_or_with_part_of_a_granule_is_refused() {
    for (start, last) in [(0, 0xffff), (0, u64::MAX), (0x1000, 0x2ffe), (0x1800, 0x1fff)] {
        let error = Tree::new(range(start, last), 12).err();
        assert_eq!(error, Some(Error::Config { aperture: range(start, last), granule_lg2: 12 }));
    }
}

#[test]
#[cfg_attr(debug_assertions, should_panic(expected = "is not allocated"))]
fn what_is_reserved_free_or_only_part_of_an_allocation_is_not_freed() {
    let mut tree = tree(0x1000, 0xffff, 12);
    tree.reserve(range(0x1000, 0x1fff)).unwrap();
    tree.alloc_at(range(0x2000, 0x3fff)).unwrap();
    let before = tree.check();
    for (start, last) in [(0x1000, 0x1fff), (0x2000, 0x2fff), (0x4000, 0x4fff), (0, 0xfff)] {
        tree.free(range(start, last));
        assert_eq!(tree.check(), before);
    }
}
