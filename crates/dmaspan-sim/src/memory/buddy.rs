//! Free memory: naturally aligned blocks of `2^order` frames, in a list for each order.
//!
//! As in Linux's `mm/page_alloc.c` the lists are threaded through a record of each block, so that
//! the buddy of a block is found, and taken out of its list, in one step: whatever is done costs
//! `O(order)`. Records of single frames exist only where blocks below [`BLOCK_ORDER`] ever were.

use std::ops::Range;

use dmaspan::lg2;

#[cfg(test)]
mod tests;

/// log2 of the frames that one record stands for until they are cut up: a 2M block of 4K frames.
pub(super) const BLOCK_ORDER: u32 = 9;
/// How many frames that is.
pub(super) const BLOCK_FRAMES: usize = 1 << BLOCK_ORDER;

/// Orders from 0 to that of 2^32 frames, the most there are.
const ORDERS: usize = 33;
const NONE: u32 = u32::MAX;
const NOT_FREE: u8 = u8::MAX;

/// A buddy allocator of frames, which are named by their number in the physical space.
#[derive(Debug)]
pub(super) struct Buddy {
    pfns: Range<u64>,
    /// The first frame that has a record: that of the first block.
    origin: u64,
    blocks: Vec<Block>,
    lists: [List; ORDERS],
}

#[derive(Clone, Debug, Default)]
struct Block {
    node: Node,
    small: Option<Box<[Node; BLOCK_FRAMES]>>,
}

/// Where a free block hangs in the list of its order.
#[derive(Clone, Copy, Debug)]
struct Node {
    prev: u32,
    next: u32,
    /// Of the free block that begins here, or [`NOT_FREE`].
    order: u8,
}

#[derive(Clone, Copy, Debug)]
struct List {
    head: u32,
    blocks: u64,
}

impl Default for Node {
    fn default() -> Self {
        Self { prev: NONE, next: NONE, order: NOT_FREE }
    }
}

impl Buddy {
    /// Frames `pfns`, fewer than 2^32 - 1024, all of them free.
    pub(super) fn new(pfns: Range<u64>) -> Self {
        let (origin, blocks) = blocks_of(&pfns);
        let blocks = vec![Block::default(); blocks];
        let lists = [List { head: NONE, blocks: 0 }; ORDERS];
        let mut buddy = Self { pfns: pfns.clone(), origin, blocks, lists };
        // The lowest block of an order is pushed last, and so taken first.
        let free: Vec<_> = pieces(pfns).collect();
        free.into_iter().rev().for_each(|(pfn, order)| buddy.push(pfn, order));
        buddy
    }

    /// Takes a block of this order.
    pub(super) fn take(&mut self, order: u32) -> Option<u64> {
        let mut above = order;
        let head = loop {
            match self.lists.get(at(above))?.head {
                NONE => above += 1,
                head => break self.origin + u64::from(head),
            }
        };
        self.remove(head, above);
        self.cut(head, above, head, order);
        Some(head)
    }

    /// Takes the block of this order at `pfn`, a multiple of it; `None` where it is not free.
    pub(super) fn take_at(&mut self, pfn: u64, order: u32) -> Option<()> {
        let (head, above) = self.block_around(pfn).filter(|(_, above)| *above >= order)?;
        self.remove(head, above);
        self.cut(head, above, pfn, order);
        Some(())
    }

    /// Gives back the block of this order at `pfn`, none of which is free, and joins it with its
    /// buddies as far as they are.
    pub(super) fn give(&mut self, mut pfn: u64, mut order: u32) {
        while let buddy = pfn ^ lg2::size(order)
            && self.node(buddy, order).is_some_and(|node| u32::from(node.order) == order)
        {
            self.remove(buddy, order);
            pfn = pfn.min(buddy);
            order += 1;
        }
        self.push(pfn, order);
    }

    /// The free block that `pfn` lies in, and its order.
    pub(super) fn block_around(&self, pfn: u64) -> Option<(u64, u32)> {
        let orders = 0..u32::try_from(ORDERS).unwrap_or(0);
        orders.map(|order| (lg2::align_down(pfn, order), order)).find(|(head, order)| {
            self.node(*head, *order).is_some_and(|node| u32::from(node.order) == *order)
        })
    }

    /// The first of these frames that is not free.
    pub(super) fn first_taken(&self, pfns: Range<u64>) -> Option<u64> {
        let mut next = pfns.start;
        while next < pfns.end {
            match self.block_around(next) {
                Some((head, order)) => next = head + lg2::size(order),
                None => return Some(next),
            }
        }
        None
    }

    /// How many free blocks there are of each order, up to the highest that has one.
    pub(super) fn by_order(&self) -> Vec<u64> {
        let used = self.lists.iter().rposition(|list| list.blocks > 0).map_or(0, |last| last + 1);
        self.lists[..used].iter().map(|list| list.blocks).collect()
    }

    /// How many frames are free in blocks of order `highest` and below.
    pub(super) fn free_up_to(&self, highest: u32) -> u64 {
        let lists = self.lists.iter().enumerate().take(at(highest).saturating_add(1));
        lists.map(|(order, list)| list.blocks << order).sum()
    }

    /// The free blocks of this order, the next to be taken first.
    pub(super) fn blocks(&self, order: u32) -> impl Iterator<Item = u64> + '_ {
        let mut next = self.lists.get(at(order)).map_or(NONE, |list| list.head);
        std::iter::from_fn(move || {
            let pfn = (next != NONE).then(|| self.origin + u64::from(next))?;
            next = self.node(pfn, order).map_or(NONE, |node| node.next);
            Some(pfn)
        })
    }

    /// Bytes of records.
    pub(super) fn bytes(&self) -> usize {
        let small = self.blocks.iter().filter(|block| block.small.is_some()).count();
        size_of_val(&*self.blocks) + small * BLOCK_FRAMES * size_of::<Node>()
    }

    /// A block is in no list: pushes its parts around the block of `order` at `pfn`.
    fn cut(&mut self, mut head: u64, above: u32, pfn: u64, order: u32) {
        for half in (order..above).rev() {
            let upper = head + lg2::size(half);
            if pfn < upper {
                self.push(upper, half);
            } else {
                self.push(head, half);
                head = upper;
            }
        }
    }

    fn push(&mut self, pfn: u64, order: u32) {
        let Some(list) = self.lists.get_mut(at(order)) else { return };
        let index = u32::try_from(pfn - self.origin).unwrap_or(NONE);
        let next = std::mem::replace(&mut list.head, index);
        list.blocks += 1;
        let own = u8::try_from(order).unwrap_or(NOT_FREE);
        *self.node_mut(pfn, order) = Node { prev: NONE, next, order: own };
        if next != NONE {
            self.node_mut(self.origin + u64::from(next), order).prev = index;
        }
    }

    fn remove(&mut self, pfn: u64, order: u32) {
        let Node { prev, next, .. } = std::mem::take(self.node_mut(pfn, order));
        if next != NONE {
            self.node_mut(self.origin + u64::from(next), order).prev = prev;
        }
        if prev != NONE {
            self.node_mut(self.origin + u64::from(prev), order).next = next;
        }
        let list = &mut self.lists[at(order)];
        list.blocks -= 1;
        if prev == NONE {
            list.head = next;
        }
    }

    /// The record of a block of this order that lies in memory with all its frames.
    fn node(&self, pfn: u64, order: u32) -> Option<&Node> {
        let inside = self.pfns.start <= pfn && pfn + lg2::size(order) <= self.pfns.end;
        let index = at(inside.then(|| pfn - self.origin)?);
        let block = &self.blocks[index / BLOCK_FRAMES];
        if order >= BLOCK_ORDER {
            return Some(&block.node);
        }
        block.small.as_deref().map(|small| &small[index % BLOCK_FRAMES])
    }

    /// The same, of a block that is in memory.
    fn node_mut(&mut self, pfn: u64, order: u32) -> &mut Node {
        let index = at(pfn - self.origin);
        let block = &mut self.blocks[index / BLOCK_FRAMES];
        if order >= BLOCK_ORDER {
            return &mut block.node;
        }
        let empty = || Box::new([Node::default(); BLOCK_FRAMES]);
        &mut block.small.get_or_insert_with(empty)[index % BLOCK_FRAMES]
    }
}

/// The first frame of the first block under some frames, and how many blocks those are.
pub(super) fn blocks_of(pfns: &Range<u64>) -> (u64, usize) {
    let origin = lg2::align_down(pfns.start, BLOCK_ORDER);
    (origin, at((pfns.end - origin).div_ceil(lg2::size(BLOCK_ORDER))))
}

/// The fewest naturally aligned blocks that frames consist of, as their first frames and orders.
pub(super) fn pieces(pfns: Range<u64>) -> impl Iterator<Item = (u64, u32)> {
    let mut next = pfns.start;
    std::iter::from_fn(move || {
        let left = pfns.end.checked_sub(next).filter(|left| *left > 0)?;
        let (pfn, order) = (next, lg2::alignment(next).min(lg2::floor(left)));
        next += lg2::size(order);
        Some((pfn, order))
    })
}

/// An index; what no machine can index is behind every end.
pub(super) fn at(number: impl TryInto<usize>) -> usize {
    number.try_into().unwrap_or(usize::MAX)
}
