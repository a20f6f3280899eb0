//! The ledger holds ranges that may overlap, and knows how many bytes they cover together. An
//! [`Account`](crate::account::Account) counts with it.
//!
//! Each range is kept as its two ends, in a balanced tree of all places where ranges begin or end.
//! Each subtree knows where the fewest ranges cover its bytes, and how many bytes those are; so the
//! root knows how many are covered by none. Adding and taking a range costs one walk for each end,
//! however many ranges lie inside it.
//!
//! Each place brings its memory along, and takes it away: the tree allocates and frees nothing, so
//! a lock may be around it.

use alloc::boxed::Box;
use core::cmp::Ordering;

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
    /// How many ranges begin here, and how many end before it.
    begin: i64,
    end: i64,
    below: [Tree; 2],
    /// The subtree's.
    height: u8,
    row: Row,
}

impl Node {
    fn new() -> Self {
        let place = Boundary { space: 0, at: 0 };
        let row = Row::point(place, 0);
        Self { place, begin: 0, end: 0, below: [None, None], height: 1, row }
    }

    /// Sums up what changed in it or below.
    fn sum_up(&mut self) {
        let [left, right] = &self.below;
        let own = Row::point(self.place, self.begin - self.end);
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

/// Counts ranges that begin and end at a place, which a spare node becomes where it is new.
fn count(tree: &mut Tree, place: Boundary, (begin, end): (i64, i64), spare: &mut Spare) {
    match tree {
        None => {
            *tree = spare.take().map(|mut node| {
                (node.place, node.begin, node.end) = (place, begin, end);
                node
            });
        }
        Some(node) => match place.cmp(&node.place) {
            Ordering::Less => count(&mut node.below[LEFT], place, (begin, end), spare),
            Ordering::Greater => count(&mut node.below[RIGHT], place, (begin, end), spare),
            Ordering::Equal => {
                node.begin += begin;
                node.end += end;
            }
        },
    }
    balance(tree);
}

/// Takes a place out where no range begins or ends any more.
fn prune(tree: &mut Tree, place: Boundary, spare: &mut Spare) {
    let Some(node) = tree else { return };
    match place.cmp(&node.place) {
        Ordering::Less => prune(&mut node.below[LEFT], place, spare),
        Ordering::Greater => prune(&mut node.below[RIGHT], place, spare),
        Ordering::Equal if node.begin > 0 || node.end > 0 => return,
        Ordering::Equal => {
            let [left, right] = &mut node.below;
            let (left, mut right) = (left.take(), right.take());
            let rest = match take_first(&mut right) {
                None => left,
                Some(mut first) => {
                    first.below = [left, right];
                    Some(first)
                }
            };
            if let Some(gone) = core::mem::replace(tree, rest) {
                spare.put(gone);
            }
        }
    }
    balance(tree);
}

fn take_first(tree: &mut Tree) -> Tree {
    let node = tree.as_mut()?;
    if node.below[LEFT].is_some() {
        let first = take_first(&mut node.below[LEFT]);
        balance(tree);
        return first;
    }
    let rest = node.below[RIGHT].take();
    core::mem::replace(tree, rest)
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

    fn put(&mut self, mut node: Box<Node>) {
        node.below = [self.0.take(), None];
        self.0 = Some(node);
    }

    fn take(&mut self) -> Tree {
        let mut node = self.0.take()?;
        self.0 = node.below[LEFT].take();
        Some(node)
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
}

impl Ledger {
    /// Adds a range, for which `spare` has two nodes, or takes one that was added. Returns how many
    /// bytes are covered that were not, or not covered that were. The places of a range that was
    /// taken stay, until they are [pruned](Self::prune): to add it again needs no memory.
    pub(crate) fn change(&mut self, change: Change, range: Stretch, spare: &mut Spare) -> u64 {
        let by = match change {
            Change::Add => 1,
            Change::Take => -1,
        };
        let before = self.covered();
        count(&mut self.tree, range.begin(), (by, 0), spare);
        if let Some(end) = range.end() {
            count(&mut self.tree, end, (0, by), spare);
        }
        // At most the range's own bytes: fewer than 2^64.
        match change {
            Change::Add => self.covered().wrapping_sub(before),
            Change::Take => before.wrapping_sub(self.covered()),
        }
    }

    /// Puts the places of a range, which was taken, into `spare`, where no other has them.
    pub(crate) fn prune(&mut self, range: Stretch, spare: &mut Spare) {
        prune(&mut self.tree, range.begin(), spare);
        if let Some(end) = range.end() {
            prune(&mut self.tree, end, spare);
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

    fn stretch(space: u64, start: u64, last: u64) -> Stretch {
        Stretch::new(space, start, last).unwrap()
    }

    #[test]
    fn a_range_to_the_top_of_the_last_space_is_counted() {
        let mut ledger = Ledger::default();
        let mut spare = Spare::for_ranges(3);
        let top = stretch(u64::MAX, 1, u64::MAX);
        assert_eq!(ledger.change(Change::Add, top, &mut spare), u64::MAX);
        let other = stretch(u64::MAX - 1, u64::MAX, u64::MAX);
        assert_eq!(ledger.change(Change::Add, other, &mut spare), 1);
        assert_eq!(ledger.change(Change::Add, stretch(u64::MAX, 5, 9), &mut spare), 0);
        assert_eq!(ledger.change(Change::Take, top, &mut spare), u64::MAX - 5);
        assert_eq!(Stretch::new(0, 0, u64::MAX), None);
    }

    #[test]
    fn neighbours_in_any_order_keep_the_tree_flat() {
        let mut ledger = Ledger::default();
        // Miri takes minutes for more.
        let count = if cfg!(miri) { 1 << 7 } else { 1 << 12 };
        for n in 0..count {
            let range = stretch(0, 16 * n, 16 * n + 15);
            assert_eq!(ledger.change(Change::Add, range, &mut Spare::for_ranges(1)), 16);
        }
        let mut places = Vec::new();
        assert!(check(&ledger.tree, &mut places) <= 18);
        assert_eq!(places.len() as u64, count + 1, "neighbours share a place");
    }

    /// How many changes are tried, less than so many at once; few under Miri, which is slow.
    const TRIED: (u32, usize) = if cfg!(miri) { (2, 25) } else { (256, 120) };

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(TRIED.0))]

        /// Against a count for each byte.
        #[test]
        fn as_many_bytes_are_covered_as_in_a_model(
            changes in prop::collection::vec(
                (0u64..3, 0u64..24, 0u64..24, any::<usize>()),
                1..TRIED.1,
            )
        ) {
            let mut ledger = Ledger::default();
            let mut held: Vec<Stretch> = Vec::new();
            let mut model: BTreeMap<(u64, u64), u64> = BTreeMap::new();
            for (space, start, len, pick) in changes {
                let mut spare = Spare::default();
                if pick % 5 < 2 && !held.is_empty() {
                    let range = held.swap_remove(pick % held.len());
                    let mut bytes = 0;
                    for at in range.start..=range.last {
                        let times = model.get_mut(&(range.space, at)).unwrap();
                        *times -= 1;
                        bytes += u64::from(*times == 0);
                    }
                    prop_assert_eq!(ledger.change(Change::Take, range, &mut spare), bytes);
                    ledger.prune(range, &mut spare);
                } else {
                    spare = Spare::for_ranges(1);
                    let range = stretch(space, start, start + len);
                    let mut bytes = 0;
                    for at in range.start..=range.last {
                        let times = model.entry((space, at)).or_default();
                        bytes += u64::from(*times == 0);
                        *times += 1;
                    }
                    prop_assert_eq!(ledger.change(Change::Add, range, &mut spare), bytes);
                    held.push(range);
                }
                let mut places = Vec::new();
                check(&ledger.tree, &mut places);
                let ends = held.iter().flat_map(|range| [Some(range.begin()), range.end()]);
                let mut expected: Vec<Boundary> = ends.flatten().collect();
                expected.sort_unstable();
                expected.dedup();
                prop_assert_eq!(places, expected, "as many places as there are ends");
            }
        }
    }
}
