//! A sorted map from IOVAs, in which neighbours are next to each other and the next look-up is
//! mostly where the last one was.
//!
//! Values lie in nodes of up to [`PLACES`], in any order, and beside them their keys in order: so
//! an insertion moves keys, and half the values of a node where that was full. What goes from the
//! front moves nothing. One list has all nodes by their first key, with 16 bytes for each. It
//! changes once for a dozen mappings or more, but where all around a place is full: what is mapped
//! and unmapped there alone makes a node and drops it.
//!
//! Removing a value allocates nothing.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cell::Cell;
use core::iter;

use crate::addr::Iova;

/// How many values a node has room for.
const PLACES: usize = 32;

/// How many values the first node of a tree has room for at first.
const FIRST_PLACES: usize = 8;

/// Values by their keys.
pub(super) struct Tree<T> {
    /// In the order of their keys, none of them empty.
    nodes: Vec<Node<T>>,
    len: usize,
    /// Where the last look-up ended. It is only looked at, never relied on.
    hint: Cell<Place>,
}

/// Where a value is, or the end. It holds until something is inserted or removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    node: usize,
    /// Which one in the node, in the order of keys.
    nth: usize,
}

struct Node<T> {
    /// The first of its keys.
    first: Iova,
    body: Box<Body<T>>,
}

struct Body<T> {
    /// How many values there are.
    len: usize,
    /// Where the keys and their places begin in the lists of them.
    start: usize,
    /// As many keys as values, sorted.
    keys: [Iova; PLACES],
    /// A permutation: beside each key the place of its value, and everywhere else those that are
    /// free.
    order: [u8; PLACES],
    /// On the heap from the first on, since stacks are small. Fewer than there are places where
    /// few values were there at a time.
    values: Vec<Option<T>>,
}

impl<T> Body<T> {
    /// Room for so many values, until there are more.
    fn new(places: usize) -> Box<Self> {
        let mut order = [0; PLACES];
        order.iter_mut().zip(0..).for_each(|(place, n)| *place = n);
        let mut body =
            Self { len: 0, start: 0, keys: [Iova::new(0); PLACES], order, values: Vec::new() };
        body.grow(places);
        Box::new(body)
    }

    /// Makes room for so many values.
    #[cold]
    fn grow(&mut self, places: usize) {
        self.values.reserve_exact(places - self.values.len());
        self.values.resize_with(places, || None);
    }

    fn keys(&self) -> &[Iova] {
        &self.keys[self.start..self.start + self.len]
    }

    /// The first key, of what is not empty.
    #[inline(always)]
    fn first(&self) -> Iova {
        self.keys[self.start % PLACES]
    }

    /// The `nth` key.
    #[inline(always)]
    fn key(&self, nth: usize) -> Option<Iova> {
        // The remainder is never another number, and asks for no check.
        (nth < self.len).then(|| self.keys[(self.start + nth) % PLACES])
    }

    /// The place of the value with the `nth` key, which there is.
    #[inline(always)]
    fn place(&self, nth: usize) -> usize {
        usize::from(self.order[(self.start + nth) % PLACES])
    }

    #[inline(always)]
    fn insert(&mut self, nth: usize, key: Iova, value: T) {
        if self.start + self.len == PLACES {
            self.keys.copy_within(self.start.., 0);
            self.order.rotate_left(self.start);
            self.start = 0;
        }
        let (at, end) = (self.start + nth, self.start + self.len);
        let place = self.order[end % PLACES];
        if usize::from(place) >= self.values.len() {
            self.grow(PLACES);
        }
        let Self { len, keys, order, values, .. } = self;
        if at < end {
            keys.copy_within(at..end, at + 1);
            order.copy_within(at..end, at + 1);
        }
        (keys[at % PLACES], order[at % PLACES]) = (key, place);
        values[usize::from(place)] = Some(value);
        *len += 1;
    }

    #[inline(always)]
    fn remove(&mut self, nth: usize) -> Option<&mut Option<T>> {
        let Self { len, start, keys, order, values } = self;
        let (at, end) = (*start + nth, *start + *len);
        let place = order[at % PLACES];
        if nth == 0 {
            *start += 1;
        } else if at + 1 < end {
            keys.copy_within(at + 1..end, at);
            order.copy_within(at + 1..end, at);
            order[end - 1] = place;
        }
        *len -= 1;
        values.get_mut(usize::from(place))
    }

    /// Moves the values from the `nth` on before those of another node, which has room for them.
    fn move_to(&mut self, nth: usize, other: &mut Self) {
        while self.len > nth {
            let last = self.len - 1;
            let key = self.keys()[last];
            if let Some(value) = self.remove(last).and_then(Option::take) {
                other.insert(0, key, value);
            }
        }
    }
}

impl<T> Tree<T> {
    pub(super) const fn new() -> Self {
        Self { nodes: Vec::new(), len: 0, hint: Cell::new(Place { node: 0, nth: 0 }) }
    }

    /// How many values there are.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The place of the first value at or behind `key`.
    #[inline(always)]
    pub(super) fn seek(&self, key: Iova) -> Place {
        let place = self.near(key).unwrap_or_else(|| self.search(key));
        // What follows the last one is found from there, and not from the end.
        if place.node < self.nodes.len() {
            self.hint.set(place);
        }
        place
    }

    /// [`seek`](Self::seek) where the last look-up ended, or right behind it.
    #[inline]
    fn near(&self, key: Iova) -> Option<Place> {
        let hint = self.hint.get();
        let found = self.key(hint)?;
        if found == key {
            return Some(hint);
        }
        let next = self.next(hint);
        let follows = self.key(next).is_none_or(|next| next >= key);
        (found < key && follows).then_some(next)
    }

    #[inline(never)]
    fn search(&self, key: Iova) -> Place {
        let behind = self.nodes.partition_point(|node| node.first <= key);
        let Some(node) = behind.checked_sub(1) else { return Place::default() };
        let keys = self.nodes.get(node).map_or(&[][..], |node| node.body.keys());
        let nth = keys.partition_point(|own| *own < key);
        if nth < keys.len() { Place { node, nth } } else { Place { node: behind, nth: 0 } }
    }

    /// The key at a place; `None` at the end.
    #[inline(always)]
    pub(super) fn key(&self, place: Place) -> Option<Iova> {
        self.nodes.get(place.node)?.body.key(place.nth)
    }

    /// The place behind `place`, which is one of a value.
    #[inline(always)]
    pub(super) fn next(&self, Place { node, nth }: Place) -> Place {
        let len = self.nodes.get(node).map_or(0, |node| node.body.len);
        if nth + 1 < len { Place { node, nth: nth + 1 } } else { Place { node: node + 1, nth: 0 } }
    }

    /// The place before `place`.
    #[inline(always)]
    pub(super) fn before(&self, Place { node, nth }: Place) -> Option<Place> {
        if let Some(nth) = nth.checked_sub(1) {
            return Some(Place { node, nth });
        }
        let node = node.checked_sub(1)?;
        let nth = self.nodes.get(node)?.body.len.checked_sub(1)?;
        Some(Place { node, nth })
    }

    /// The value at a place, and its key; `None` at the end.
    #[inline(always)]
    pub(super) fn at(&self, Place { node, nth }: Place) -> Option<(Iova, &T)> {
        let body = &self.nodes.get(node)?.body;
        let key = body.key(nth)?;
        Some((key, body.values.get(body.place(nth))?.as_ref()?))
    }

    /// [`at`](Self::at), to be changed.
    #[inline(always)]
    pub(super) fn at_mut(&mut self, Place { node, nth }: Place) -> Option<(Iova, &mut T)> {
        let body = &mut self.nodes.get_mut(node)?.body;
        let (key, place) = (body.key(nth)?, body.place(nth));
        Some((key, body.values.get_mut(place)?.as_mut()?))
    }

    /// The place of the value with this key, if the last look-up ended there.
    #[inline(always)]
    pub(super) fn here(&self, key: Iova) -> Option<Place> {
        let hint = self.hint.get();
        (self.key(hint) == Some(key)).then_some(hint)
    }

    /// The place of the value with this key.
    #[inline(always)]
    pub(super) fn find(&self, key: Iova) -> Option<Place> {
        self.here(key).or_else(|| self.find_elsewhere(key))
    }

    #[inline(never)]
    fn find_elsewhere(&self, key: Iova) -> Option<Place> {
        let place = self.seek(key);
        (self.key(place) == Some(key)).then_some(place)
    }

    /// The value with this key.
    #[inline]
    pub(super) fn get(&self, key: Iova) -> Option<&T> {
        self.at(self.find(key)?).map(|(_, value)| value)
    }

    /// [`get`](Self::get), to be changed.
    #[inline(always)]
    pub(super) fn get_mut(&mut self, key: Iova) -> Option<&mut T> {
        self.at_mut(self.find(key)?).map(|(_, value)| value)
    }

    /// The values from a place on, with their keys.
    pub(super) fn iter_from(&self, place: Place) -> impl Iterator<Item = (Iova, &T)> {
        let mut place = place;
        iter::from_fn(move || {
            let found = self.at(place)?;
            place = self.next(place);
            Some(found)
        })
    }

    /// All values, with their keys.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Iova, &T)> {
        self.iter_from(Place::default())
    }

    /// All values.
    pub(super) fn values(&self) -> impl Iterator<Item = &T> {
        self.iter().map(|(_, value)| value)
    }

    /// Calls `visit` with the values from `first` to `last`, both included, until it finds
    /// something.
    pub(super) fn visit_mut<R>(
        &mut self,
        first: Iova,
        last: Iova,
        mut visit: impl FnMut(&mut T) -> Option<R>,
    ) -> Option<R> {
        let mut place = self.seek(first);
        while let Some((key, value)) = self.at_mut(place)
            && key <= last
        {
            let found = visit(value);
            if found.is_some() {
                return found;
            }
            place = self.next(place);
        }
        None
    }

    /// Adds a value at the place that [`seek`](Self::seek) has for its key, which is new.
    #[inline(always)]
    pub(super) fn insert(&mut self, place: Place, key: Iova, value: T) {
        let Place { mut node, mut nth } = place;
        let room = |node: &Node<T>| node.body.len < PLACES;
        let before = node.checked_sub(1).filter(|_| nth == 0);
        if let Some(n) = before.filter(|n| self.nodes.get(*n).is_some_and(room)) {
            (node, nth) = (n, self.nodes[n].body.len);
        } else if !self.nodes.get(node).is_some_and(room) {
            if nth == 0 {
                let places = if self.nodes.is_empty() { FIRST_PLACES } else { PLACES };
                self.nodes.insert(node, Node { first: key, body: Body::new(places) });
            } else {
                self.split(node);
                if let Some(above) = nth.checked_sub(PLACES / 2 + 1) {
                    (node, nth) = (node + 1, above + 1);
                }
            }
        }
        let Some(Node { first, body }) = self.nodes.get_mut(node) else { return };
        body.insert(nth, key, value);
        *first = body.first();
        self.len += 1;
        self.hint.set(Place { node, nth });
    }

    /// Moves half of a full node to a new one behind it.
    #[cold]
    fn split(&mut self, node: usize) {
        // What allocates does so before anything moves.
        self.nodes.reserve(1);
        let mut upper = Body::new(PLACES);
        let lower = &mut self.nodes[node].body;
        lower.move_to(PLACES / 2, &mut upper);
        self.nodes.insert(node + 1, Node { first: upper.first(), body: upper });
    }

    /// Drops the value at a place.
    #[inline(always)]
    pub(super) fn remove(&mut self, Place { node, nth }: Place) {
        let Some(Node { first, body }) = self.nodes.get_mut(node) else { return };
        if nth >= body.len {
            return;
        }
        if let Some(value) = body.remove(nth) {
            *value = None;
        }
        self.len -= 1;
        if body.len == 0 {
            drop(self.nodes.remove(node));
            return;
        }
        *first = body.first();
        if body.len < PLACES / 4 {
            self.join(node + 1);
            self.join(node);
        }
    }

    /// Makes one node of a node and the one before it, where both fill half of it at most, and it
    /// need not grow.
    #[inline(never)]
    fn join(&mut self, node: usize) {
        let Some(([.., before], [own, ..])) = self.nodes.split_at_mut_checked(node) else {
            return;
        };
        let has_room = own.body.values.len() == PLACES;
        if has_room && before.body.len + own.body.len <= PLACES / 2 {
            before.body.move_to(0, &mut own.body);
            own.first = before.first;
            self.nodes.remove(node - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeMap;

    use super::*;

    /// Numbers that look random, from a fixed seed.
    fn numbers() -> impl FnMut(u64) -> u64 {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        move |below| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        }
    }

    fn check(tree: &Tree<u64>, model: &BTreeMap<Iova, u64>, at: Iova) {
        assert_eq!(tree.len(), model.len());
        let place = tree.seek(at);
        let expected = model.range(at..).next().map(|(key, value)| (*key, value));
        assert_eq!(tree.at(place), expected);
        let before = tree.before(place).and_then(|before| tree.at(before));
        let expected = model.range(..at).next_back().map(|(key, value)| (*key, value));
        assert_eq!(before, expected);
        assert_eq!(tree.get(at), model.get(&at));
        let largest = tree.nodes.iter().map(|node| node.body.len).max();
        assert!(largest.is_none_or(|largest| largest <= PLACES));
        assert!(tree.nodes.iter().all(|node| node.body.len > 0));
    }

    fn insert(tree: &mut Tree<u64>, model: &mut BTreeMap<Iova, u64>, key: u64) {
        let key = Iova::new(key);
        if model.insert(key, key.get() + 1).is_none() {
            tree.insert(tree.seek(key), key, key.get() + 1);
        }
    }

    #[test]
    fn it_has_what_a_map_of_the_standard_library_has_whatever_comes_and_goes() {
        let mut number = numbers();
        let (mut tree, mut model) = (Tree::new(), BTreeMap::new());
        // It grows, stays, and shrinks to nothing, twice.
        for phase in [6, 5, 2, 7, 0] {
            for _ in 0..if cfg!(miri) { 100 } else { 3000 } {
                let key = number(4000);
                if number(8) < phase {
                    insert(&mut tree, &mut model, key);
                } else {
                    tree.find(Iova::new(key)).into_iter().for_each(|place| tree.remove(place));
                    model.remove(&Iova::new(key));
                }
                check(&tree, &model, Iova::new(number(4000)));
            }
            let all = tree.iter().map(|(key, value)| (key, *value));
            assert!(all.eq(model.iter().map(|(key, value)| (*key, *value))));
        }
    }

    #[test]
    fn keys_in_order_fill_nodes_whichever_way_they_come() {
        let count = 40 * PLACES as u64;
        let orders: [&dyn Fn(u64) -> u64; 2] = [&|n| n, &|n| count - n];
        for order in orders {
            let (mut tree, mut model) = (Tree::new(), BTreeMap::new());
            for n in 0..count {
                insert(&mut tree, &mut model, order(n));
                check(&tree, &model, Iova::new(order(n)));
            }
            assert_eq!(tree.nodes.len(), 40);
            let mut visited = 0;
            let found = tree.visit_mut(Iova::new(5), Iova::new(500), |value| {
                visited += 1;
                (*value == 301).then_some(*value)
            });
            assert_eq!((found, visited), (Some(301), 296));
        }
    }

    #[test]
    fn what_is_left_of_many_lies_in_few_nodes() {
        let count = 64 * PLACES as u64;
        let orders: [&dyn Fn(u64) -> u64; 2] = [&|n| n, &|n| count - 1 - n];
        for order in orders {
            let (mut tree, mut model) = (Tree::new(), BTreeMap::new());
            (0..count).for_each(|key| insert(&mut tree, &mut model, key));
            for key in (0..count).map(order).filter(|key| key % 16 != 0) {
                tree.remove(tree.find(Iova::new(key)).unwrap());
                model.remove(&Iova::new(key));
            }
            check(&tree, &model, Iova::new(777));
            assert_eq!(tree.len(), 128);
            assert!(tree.nodes.len() <= 20, "{}", tree.nodes.len());
        }
    }
}
