//! Splitting and merging nodes. Neither changes what is in use, or what an ancestor knows of it.

use core::mem;

use super::arena::NoNode;
use super::node::{FAN, Inner, LEAST, Leaf, MERGED};
use super::{HEIGHT, Path, Step, Tree};

impl Tree {
    /// Sees to it that [`make_room`](Self::make_room) needs no memory once.
    pub(super) fn reserve_nodes(&mut self) -> Result<(), NoNode> {
        if self.height == HEIGHT {
            return Err(NoNode);
        }
        self.leaves.reserve(1, || Ok(Leaf::default()))?;
        let orders = self.grid.orders;
        self.inners.reserve(self.height + 1, || Inner::new(orders))
    }

    /// The way to the leaf of `offset`, where there is room for an entry.
    ///
    /// All nodes are reserved before any is split.
    pub(super) fn make_room(&mut self, mut path: Path, offset: u64) -> Result<Path, NoNode> {
        if self.leaves[path.leaf].len < FAN {
            return Ok(path);
        }
        self.reserve_nodes()?;
        while self.leaves[path.leaf].len == FAN {
            self.split(&path)?;
            path = self.find(offset);
        }
        Ok(path)
    }

    /// Splits the highest node of the path that is full and whose parent is not, or else puts a
    /// root above the full one.
    fn split(&mut self, path: &Path) -> Result<(), NoNode> {
        let steps = &path.steps[..self.height];
        let Some(depth) = steps.iter().rposition(|step| self.inners[step.node].len < FAN) else {
            let root = self.inners.take().ok_or(NoNode)?;
            self.inners[root].insert(0, 0, self.root);
            self.root = root;
            self.height += 1;
            self.refit(root, 0, 1);
            return Ok(());
        };
        let Step { node, child } = path.steps[depth];
        let below = depth + 1;
        let behind = if below == self.height { self.leaves.take() } else { self.inners.take() };
        // What is lowest is allocated first, so the end of the ranges grows: nodes that stay behind
        // there are left fuller.
        let last = child + 1 == self.inners[node].len;
        self.inners[node].insert(child + 1, 0, behind.ok_or(NoNode)?);
        self.divide(below, node, child, if last { MERGED } else { FAN / 2 });
        Ok(())
    }

    /// Fills up the nodes of the path that have lost too much, from the leaf on. Needs no memory.
    pub(super) fn rebalance(&mut self, path: &Path) {
        for depth in (0..self.height).rev() {
            let Step { node, child } = path.steps[depth];
            let below = depth + 1;
            let parent = &self.inners[node];
            if parent.len < 2 || self.len(below, parent.child(child)) >= LEAST {
                break;
            }
            let left = child.saturating_sub(1);
            let [first, second] = [left, left + 1].map(|index| parent.child(index));
            let total = self.len(below, first) + self.len(below, second);
            if total > MERGED {
                self.divide(below, node, left, total / 2);
                break;
            }
            self.divide(below, node, left, total);
            self.inners[node].remove(left + 1);
            if below == self.height {
                self.leaves.give_back(second);
            } else {
                self.inners.give_back(second);
            }
        }
        if self.height > 0 && self.inners[self.root].len == 1 {
            let root = self.root;
            self.root = self.inners[root].child(0);
            self.inners[root].remove(0);
            self.inners.give_back(root);
            self.height -= 1;
        }
    }

    fn len(&self, depth: usize, id: u32) -> usize {
        if depth == self.height { self.leaves[id].len } else { self.inners[id].len }
    }

    /// Leaves `len` with child `left` of `node` and the rest with the next one; both lie at
    /// `depth`.
    fn divide(&mut self, depth: usize, node: u32, left: usize, len: usize) {
        let [first, second] = [left, left + 1].map(|index| self.inners[node].child(index));
        // The right one is taken out meanwhile: it may lie in the same chunk.
        let begin = if depth == self.height {
            let mut right = mem::take(&mut self.leaves[second]);
            self.leaves[first].divide(&mut right, len);
            self.leaves[second] = right;
            self.leaves[second].begin
        } else {
            let mut right = mem::take(&mut self.inners[second]);
            self.inners[first].divide(&mut right, len);
            self.inners[second] = right;
            self.inners[second].begin(0)
        };
        self.inners[node].set_begin(left + 1, begin);
        self.refit(node, left, depth);
        self.refit(node, left + 1, depth);
    }

    /// Sets what `node` knows of a child at `depth`.
    fn refit(&mut self, node: u32, child: usize, depth: usize) {
        let id = self.inners[node].child(child);
        let fits = if depth == self.height {
            self.leaves[id].fits(self.grid)
        } else {
            self.inners[id].longest()
        };
        for (order, fit) in (0..self.grid.orders).zip(fits) {
            self.inners[node].set_fit(child, order, fit);
        }
    }

    /// The longest aligned fit in a node at `depth`, which is not above `most`.
    pub(super) fn best(&self, depth: usize, id: u32, order: u32, most: u64) -> u64 {
        if depth == self.height {
            self.leaves[id].best(self.grid, order, most)
        } else {
            self.inners[id].best(order, most)
        }
    }
}
