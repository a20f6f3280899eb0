//! Nodes in chunks, named by index.
//!
//! A chunk never moves, so growing copies no node while the lock is held; nodes that were given
//! back form a list through their slots, so giving back needs no memory.

use alloc::vec::Vec;
use core::ops::{Index, IndexMut};

/// There is no memory for another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoNode;

/// How many nodes a chunk has: a few tens of KiB.
const CHUNK: usize = 32;

const NONE: u32 = u32::MAX;

pub(super) struct Arena<T> {
    chunks: Vec<Vec<ArenaSlot<T>>>,
    /// The first of the spare nodes, or [`NONE`].
    spare: u32,
    spares: usize,
}

struct ArenaSlot<T> {
    /// The next spare node, while this one is spare.
    next: u32,
    node: T,
}

impl<T> Arena<T> {
    pub(super) fn new() -> Self {
        Self { chunks: Vec::new(), spare: NONE, spares: 0 }
    }

    /// Sees to it that `count` nodes can be taken; `make` makes one.
    pub(super) fn reserve(
        &mut self,
        count: usize,
        make: impl Fn() -> Result<T, NoNode>,
    ) -> Result<(), NoNode> {
        while self.spares < count {
            let id = self.add(make()?)?;
            self.give_back(id);
        }
        Ok(())
    }

    fn add(&mut self, node: T) -> Result<u32, NoNode> {
        if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
            let mut chunk = Vec::new();
            chunk.try_reserve_exact(CHUNK).map_err(|_| NoNode)?;
            self.chunks.try_reserve(1).map_err(|_| NoNode)?;
            self.chunks.push(chunk);
        }
        let full = (self.chunks.len() - 1) * CHUNK;
        let chunk = self.chunks.last_mut().ok_or(NoNode)?;
        let id = u32::try_from(full + chunk.len()).map_err(|_| NoNode)?;
        if id == NONE {
            return Err(NoNode);
        }
        chunk.push(ArenaSlot { next: NONE, node });
        Ok(id)
    }

    /// A spare node, as it was given back; `None` where fewer were reserved.
    pub(super) fn take(&mut self) -> Option<u32> {
        let id = self.spare;
        if id == NONE {
            return None;
        }
        self.spare = self.slot_mut(id).next;
        self.spares -= 1;
        Some(id)
    }

    pub(super) fn give_back(&mut self, id: u32) {
        self.slot_mut(id).next = self.spare;
        self.spare = id;
        self.spares += 1;
    }

    /// How many nodes are not spare.
    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.chunks.iter().map(Vec::len).sum::<usize>() - self.spares
    }

    fn slot_mut(&mut self, id: u32) -> &mut ArenaSlot<T> {
        &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK]
    }
}

impl<T> Index<u32> for Arena<T> {
    type Output = T;

    #[inline(always)]
    fn index(&self, id: u32) -> &T {
        &self.chunks[id as usize / CHUNK][id as usize % CHUNK].node
    }
}

impl<T> IndexMut<u32> for Arena<T> {
    #[inline(always)]
    fn index_mut(&mut self, id: u32) -> &mut T {
        &mut self.slot_mut(id).node
    }
}
