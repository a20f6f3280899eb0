//! The ledger holds ranges that may overlap, and knows how many bytes they cover together. An
//! [`Account`](crate::account::Account) counts with it.
//!
//! Kept are the places where fewer or more ranges cover what is behind than what is before, in a
//! balanced tree: two for each range at most, and none between ranges that only touch. Each subtree
//! knows where the fewest ranges cover its bytes, and how many bytes those are; so the root knows
//! how many are covered by none. Adding and taking a range costs one walk for each end, however
//! many ranges lie inside it; and one walk in all where it makes a covered stretch longer or
//! shorter.
//!
//! Each range brings memory for two places along, and takes as much away: the tree allocates and
//! frees nothing, so a lock may be around it.

use alloc::boxed::Box;
use core::cmp::Ordering;
use core::mem;

/// Where a range begins, or the byte behind it: in the order of spaces, then of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Boundary {
    space: u64,
    at: u64,
}

/// A range of one address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    space: u64,
    start: u64,
    last: u64,
}

impl Stretch {
    /// From `start` to `last`, both included: fewer than 2^64 bytes.
    pub(crate) fn new(space: u64, start: u64, last: u64) -> Option<Self> {
        let fits = start <= last && (start > 0 || last < u64::MAX);
        fits.then_some(Self { space, start, last })
    }

    pub(crate) fn len(self) -> u64 {
        (self.last - self.start).wrapping_add(1)
    }

    fn begin(self) -> Boundary {
        Boundary { space: self.space, at: self.start }
    }

    /// Behind the top of a space is the bottom of the next; `None` behind all.
    fn end(self) -> Option<Boundary> {
        match self.last.checked_add(1) {
            Some(at) => Some(Boundary { space: self.space, at }),
            None => Some(Boundary { space: self.space.checked_add(1)?, at: 0 }),
        }
    }
}

/// What a row of places says about the bytes between them. Bytes are modulo 2^64, since rows reach
/// over spaces.
#[derive(Clone, Copy, Debug)]
struct Row {
    first: Boundary,
    last: Boundary,
    /// How many ranges more are open behind the row than before it.
    rise: i64,
    /// Of the gaps between its places, the least that are open more there than before the row.
    least: i64,
    /// The bytes of those gaps.
    bytes: u64,
}

impl Row {
    fn point(place: Boundary, rise: i64) -> Self {
        Self { first: place, last: place, rise, least: i64::MAX, bytes: 0 }
    }

    /// This row, and `next` behind it.
    fn then(self, next: Self) -> Self {
        let between = (self.rise, next.first.at.wrapping_sub(self.last.at));
        let behind = (self.rise.saturating_add(next.least), next.bytes);
        let (least, bytes) = lower(lower((self.least, self.bytes), between), behind);
        Self { first: self.first, last: next.last, rise: self.rise + next.rise, least, bytes }
    }
}

/// The lower of two levels, and the bytes that are on it.
fn lower(a: (i64, u64), b: (i64, u64)) -> (i64, u64) {
    match a.0.cmp(&b.0) {
        Ordering::Less => a,
        Ordering::Greater => b,
        Ordering::Equal => (a.0, a.1.wrapping_add(b.1)),
    }
}

const LEFT: usize = 0;
const RIGHT: usize = 1;

type Tree = Option<Box<Node>>;

#[derive(Debug)]
struct Node {
    place: Boundary,
    /// How many ranges more begin here than end before it; not 0 in a tree.
    rise: i64,
    below: [Tree; 2],
    /// The subtree's.
    height: u8,
    row: Row,
}

impl Node {
    fn new() -> Self {
        let place = Boundary { space: 0, at: 0 };
        let row = Row::point(place, 0);
        Self { place, rise: 0, below: [None, None], height: 1, row }
    }

    /// Sums up what changed in it or below.
    fn sum_up(&mut self) {
        let [left, right] = &self.below;
        let own = Row::point(self.place, self.rise);
        let row = left.as_ref().map_or(own, |left| left.row.then(own));
        self.row = right.as_ref().map_or(row, |right| row.then(right.row));
        self.height = height(left).max(height(right)) + 1;
    }
}

fn height(tree: &Tree) -> u8 {
    tree.as_ref().map_or(0, |node| node.height)
}

/// Turns the top down to `side`, and the node below it on the other side up.
fn rotate(tree: &mut Tree, side: usize) {
    let Some(mut top) = tree.take() else { return };
    if let Some(mut up) = top.below[1 - side].take() {
        top.below[1 - side] = up.below[side].take();
        top.sum_up();
        up.below[side] = Some(top);
        top = up;
    }
    top.sum_up();
    *tree = Some(top);
}

/// Makes subtrees differ by one level at most, after one of them changed by one (AVL), and sums up.
fn balance(tree: &mut Tree) {
    let Some(node) = tree else { return };
    let heights = [height(&node.below[LEFT]), height(&node.below[RIGHT])];
    for side in [LEFT, RIGHT] {
        if heights[side] > heights[1 - side] + 1 {
            let inner = node.below[side]
                .as_ref()
                .is_some_and(|child| height(&child.below[1 - side]) > height(&child.below[side]));
            if inner {
                rotate(&mut node.below[side], side);
            }
            rotate(tree, 1 - side);
            return;
        }
    }
    node.sum_up();
}

/// Lets so many ranges more begin at a place. A new place takes a node out of `spare`, and one that
/// is none any more leaves one there.
fn shift(tree: &mut Tree, place: Boundary, by: i64, spare: &mut Spare) {
    match tree {
        None => {
            *tree = spare.take().map(|mut node| {
                (node.place, node.rise) = (place, by);
                node
            });
        }
        Some(node) => match place.cmp(&node.place) {
            Ordering::Less => shift(&mut node.below[LEFT], place, by, spare),
            Ordering::Greater => shift(&mut node.below[RIGHT], place, by, spare),
            Ordering::Equal => {
                node.rise += by;
                if node.rise == 0 {
                    take_top(tree, spare);
                }
            }
        },
    }
    balance(tree);
}

fn take_top(tree: &mut Tree, spare: &mut Spare) {
    let Some(mut top) = tree.take() else { return };
    let [left, mut right] = top.below.each_mut().map(Option::take);
    *tree = match take_first(&mut right) {
        None => left,
        Some(mut first) => {
            first.below = [left, right];
            Some(first)
        }
    };
    spare.put(top);
}

/// Moves a place of this rise elsewhere where no other lies between or there, and returns whether
/// it did.
fn slide(tree: &mut Tree, from: Boundary, to: Boundary, rise: i64) -> bool {
    let Some(node) = tree else { return false };
    let side = match from.cmp(&node.place) {
        Ordering::Less => LEFT,
        Ordering::Greater => RIGHT,
        Ordering::Equal => {
            let [left, right] = &node.below;
            let is_free = node.rise == rise
                && left.as_ref().is_none_or(|left| left.row.last < to)
                && right.as_ref().is_none_or(|right| to < right.row.first);
            if is_free {
                node.place = to;
                node.sum_up();
            }
            return is_free;
        }
    };
    let stays = to.cmp(&node.place) == from.cmp(&node.place);
    let slid = stays && slide(&mut node.below[side], from, to, rise);
    if slid {
        node.sum_up();
    }
    slid
}

fn take_first(tree: &mut Tree) -> Tree {
    let node = tree.as_mut()?;
    if node.below[LEFT].is_some() {
        let first = take_first(&mut node.below[LEFT]);
        balance(tree);
        return first;
    }
    let rest = node.below[RIGHT].take();
    mem::replace(tree, rest)
}

/// Puts a tree where none is: there is nothing to be dropped, which the compiler does not see.
fn put_in(place: &mut Tree, tree: Tree) {
    debug_assert!(place.is_none());
    mem::forget(mem::replace(place, tree));
}

/// Memory for places: allocated before a lock is taken, and freed after it is left.
#[derive(Debug, Default)]
pub(crate) struct Spare(Tree);

impl Spare {
    /// Enough to add that many ranges.
    pub(crate) fn for_ranges(count: usize) -> Self {
        let mut spare = Self::default();
        for _ in 0..count.saturating_mul(2) {
            spare.put(Box::new(Node::new()));
        }
        spare
    }

    /// Takes a node that has none below.
    fn put(&mut self, mut node: Box<Node>) {
        put_in(&mut node.below[LEFT], self.0.take());
        put_in(&mut self.0, Some(node));
    }

    fn take(&mut self) -> Tree {
        let mut node = self.0.take()?;
        put_in(&mut self.0, node.below[LEFT].take());
        Some(node)
    }

    /// Passes on what a range needs.
    fn give(&mut self, other: &mut Self) {
        for _ in 0..2 {
            if let Some(node) = self.take() {
                other.put(node);
            }
        }
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        // One by one: the chain may be longer than the stack is deep.
        while self.take().is_some() {}
    }
}

/// Whether a range comes or goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Add,
    Take,
}

/// Ranges that may overlap, each as often as it was added.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    tree: Tree,
    /// With the nodes of the tree, two for each range.
    spare: Spare,
}

impl Ledger {
    /// Takes the memory of a range that is about to be added.
    pub(crate) fn lend(&mut self, spare: &mut Spare) {
        spare.give(&mut self.spare);
    }

    /// Gives the memory of a range back that was taken.
    pub(crate) fn give_back(&mut self, spare: &mut Spare) {
        self.spare.give(spare);
    }

    /// Adds a range, for which memory was [lent](Self::lend), or takes one that was added. Returns
    /// how many bytes are covered that were not, or not covered that were.
    pub(crate) fn change(&mut self, change: Change, range: Stretch) -> u64 {
        let by = match change {
            Change::Add => 1,
            Change::Take => -1,
        };
        let before = self.covered();
        let begin = range.begin();
        match range.end() {
            // One that ends where this one begins ends where this one ends, or the other way round.
            Some(end)
                if slide(&mut self.tree, begin, end, -by)
                    || slide(&mut self.tree, end, begin, by) => {}
            end => {
                shift(&mut self.tree, begin, by, &mut self.spare);
                if let Some(end) = end {
                    shift(&mut self.tree, end, -by, &mut self.spare);
                }
            }
        }
        // At most the range's own bytes: fewer than 2^64.
        match change {
            Change::Add => self.covered().wrapping_sub(before),
            Change::Take => before.wrapping_sub(self.covered()),
        }
    }

    /// How many bytes are covered, modulo 2^64.
    fn covered(&self) -> u64 {
        let Some(Row { first, last, rise, least, bytes }) = self.tree.as_ref().map(|root| root.row)
        else {
            return 0;
        };
        let bare = if least == 0 { bytes } else { 0 };
        // Only ranges up to the top of the last space are open behind all places.
        let behind = if rise == 0 { 0 } else { 0u64.wrapping_sub(last.at) };
        last.at.wrapping_sub(first.at).wrapping_sub(bare).wrapping_add(behind)
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeMap;
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    /// The height of a tree whose subtrees differ by one level at most, and all places in order.
    fn check(tree: &Tree, places: &mut Vec<Boundary>) -> u8 {
        let Some(node) = tree else { return 0 };
        let left = check(&node.below[LEFT], places);
        places.push(node.place);
        let right = check(&node.below[RIGHT], places);
        assert!(left.abs_diff(right) <= 1);
        assert_eq!(node.height, left.max(right) + 1);
        node.height
    }

    impl Spare {
        fn len(&self) -> usize {
            core::iter::successors(self.0.as_ref(), |node| node.below[LEFT].as_ref()).count()
        }
    }

    fn stretch(space: u64, start: u64, last: u64) -> Stretch {
        Stretch::new(space, start, last).unwrap()
    }

    #[test]
    fn a_range_to_the_top_of_the_last_space_is_counted() {
        let mut ledger = Ledger::default();
        (0..3).for_each(|_| ledger.lend(&mut Spare::for_ranges(1)));
        let top = stretch(u64::MAX, 1, u64::MAX);
        assert_eq!(ledger.change(Change::Add, top), u64::MAX);
        let other = stretch(u64::MAX - 1, u64::MAX, u64::MAX);
        assert_eq!(ledger.change(Change::Add, other), 1);
        assert_eq!(ledger.change(Change::Add, stretch(u64::MAX, 5, 9)), 0);
        assert_eq!(ledger.change(Change::Take, top), u64::MAX - 5);
        assert_eq!(Stretch::new(0, 0, u64::MAX), None);
    }

    #[test]
    fn ranges_in_ascending_order_keep_the_tree_flat_and_share_places_where_they_touch() {
        let mut ledger = Ledger::default();
        // Miri takes minutes for more.
        let count = if cfg!(miri) { 1 << 7 } else { 1 << 12 };
        let mut add = |start| {
            ledger.lend(&mut Spare::for_ranges(1));
            assert_eq!(ledger.change(Change::Add, stretch(0, start, start + 15)), 16);
            let mut places = Vec::new();
            (check(&ledger.tree, &mut places), places.len() as u64)
        };
        let last = (0..count).map(|n| add(32 * n)).last();
        assert!(last.is_some_and(|(height, places)| height <= 18 && places == 2 * count));
        // What fills a gap makes two stretches one, and leaves two places less.
        let last = (0..count - 1).map(|n| add(32 * n + 16)).last();
        assert_eq!(last, Some((2, 2)));
    }

    /// How many changes are tried, less than so many at once; few under Miri, which is slow.
    const TRIED: (u32, usize) = if cfg!(miri) { (2, 25) } else { (256, 120) };

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(TRIED.0))]

        /// Against a count for each byte.
        #[test]
        fn as_many_bytes_are_covered_as_in_a_model(
            changes in prop::collection::vec(
                (0usize..3, 0u64..24, 0u64..24, any::<usize>()),
                1..TRIED.1,
            )
        ) {
            let mut ledger = Ledger::default();
            let mut held: Vec<Stretch> = Vec::new();
            let mut model: BTreeMap<(u64, u64), u64> = BTreeMap::new();
            for (space, start, len, pick) in changes {
                if pick % 5 < 2 && !held.is_empty() {
                    let range = held.swap_remove(pick % held.len());
                    let mut bytes = 0;
                    for at in range.start..=range.last {
                        let times = model.get_mut(&(range.space, at)).unwrap();
                        *times -= 1;
                        bytes += u64::from(*times == 0);
                    }
                    prop_assert_eq!(ledger.change(Change::Take, range), bytes);
                    let mut spare = Spare::default();
                    ledger.give_back(&mut spare);
                    prop_assert_eq!(spare.len(), 2, "a range takes away what it brought");
                } else {
                    ledger.lend(&mut Spare::for_ranges(1));
                    // At the bottom of a space or at its top, behind which another begins, or none.
                    let space = [0, 1, u64::MAX][space];
                    let last = u64::MAX - start;
                    let range = match pick % 2 {
                        0 => stretch(space, start, start + len),
                        _ => stretch(space, last - len, last),
                    };
                    let mut bytes = 0;
                    for at in range.start..=range.last {
                        let times = model.entry((space, at)).or_default();
                        bytes += u64::from(*times == 0);
                        *times += 1;
                    }
                    prop_assert_eq!(ledger.change(Change::Add, range), bytes);
                    held.push(range);
                }
                let mut places = Vec::new();
                check(&ledger.tree, &mut places);
                let mut rises: BTreeMap<Boundary, i64> = BTreeMap::new();
                for range in &held {
                    *rises.entry(range.begin()).or_default() += 1;
                    if let Some(end) = range.end() {
                        *rises.entry(end).or_default() -= 1;
                    }
                }
                rises.retain(|_, rise| *rise != 0);
                let expected: Vec<Boundary> = rises.into_keys().collect();
                prop_assert_eq!(places.len() + ledger.spare.len(), 2 * held.len());
                prop_assert_eq!(places, expected, "places where coverage changes, and no others");
            }
        }
    }
}
