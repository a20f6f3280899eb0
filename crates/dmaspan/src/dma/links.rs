//! The records of what is linked in a reservation.

use alloc::collections::TryReserveError;
use alloc::vec::Vec;
use core::mem;
use core::ops::Range;

use super::memory::{DmaMemory, Piece};
use super::queued::QueuedMemory;
use crate::addr::{DmaAddr, Iova, PhysAddr};
use crate::span::Span;

/// A piece of memory in a reservation.
#[derive(Debug)]
pub struct Link<H> {
    /// Of its first byte in the reservation.
    pub(super) offset: u64,
    /// Whether an announcement has mapped it.
    pub(super) is_mapped: bool,
    /// Of one piece.
    pub(super) memory: H,
}

impl<H: DmaMemory> Link<H> {
    /// Memory of one piece, which is not mapped yet.
    #[inline(always)]
    pub(super) fn new(offset: u64, memory: H) -> Self {
        Self { offset, is_mapped: false, memory }
    }

    /// It is not kept, so that a reservation is copied by few moves.
    #[inline(always)]
    pub(super) fn piece(&self) -> Piece {
        match self.memory.pieces() {
            [piece, ..] => *piece,
            // Never: memory gives the same pieces for as long as it is there.
            [] => Piece::memory(Span::point(PhysAddr::new(0))),
        }
    }

    #[inline(always)]
    pub(super) fn len(&self) -> u64 {
        self.piece().span.len()
    }

    /// The first IOVA of its granules, whose low bits are `granule`, in a reservation at `addr`.
    #[inline(always)]
    pub(super) fn start(&self, addr: DmaAddr, granule: u64) -> Iova {
        Iova::new(addr.get().wrapping_add(self.offset) & !granule)
    }

    /// The last one.
    #[inline(always)]
    pub(super) fn last(&self, addr: DmaAddr, granule: u64) -> Iova {
        Iova::new(addr.get().wrapping_add(self.offset + (self.len() - 1)) | granule)
    }
}

/// The granules around a span that ends below the last granule of all.
#[inline(always)]
pub(super) fn whole(span: Span, granule: u64) -> Span {
    let start = PhysAddr::new(span.paddr().get() & !granule);
    Span::covering(start, (span.last().get() | granule) - start.get())
}

/// The links of a reservation, by offset.
#[derive(Debug)]
pub(super) enum Links<H> {
    /// Of a reservation for one piece, as of a driver's buffer: nothing is taken from the heap.
    One(Option<Link<H>>),
    Many(Vec<Link<H>>),
}

impl<H> Links<H> {
    /// None, with room for so many.
    #[inline(always)]
    pub(super) fn with_room(pieces: usize) -> Result<Self, TryReserveError> {
        if pieces == 1 {
            return Ok(Self::One(None));
        }
        let mut links = Vec::new();
        links.try_reserve_exact(pieces)?;
        Ok(Self::Many(links))
    }

    #[inline(always)]
    pub(super) fn all(&self) -> &[Link<H>] {
        match self {
            Self::One(link) => link.as_slice(),
            Self::Many(links) => links,
        }
    }

    #[inline(always)]
    pub(super) fn all_mut(&mut self) -> &mut [Link<H>] {
        match self {
            Self::One(link) => link.as_mut_slice(),
            Self::Many(links) => links,
        }
    }

    /// How many there can be.
    #[inline(always)]
    pub(super) fn room(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Many(links) => links.capacity(),
        }
    }

    /// Puts a link behind all others where there is room, and it lies behind the last of them.
    #[inline(always)]
    pub(super) fn push(
        &mut self,
        link: Link<H>,
        is_behind: impl FnOnce(&Link<H>) -> bool,
    ) -> Result<(), Link<H>> {
        match self {
            Self::One(place @ None) => *place = Some(link),
            Self::Many(links)
                if links.len() < links.capacity() && links.last().is_none_or(is_behind) =>
            {
                links.push(link);
            }
            _ => return Err(link),
        }
        Ok(())
    }

    /// Puts a link behind `at` others, where there is room for it.
    #[inline(always)]
    pub(super) fn insert(&mut self, at: usize, link: Link<H>) {
        match self {
            // Nothing was in it: what a device may use is not dropped here.
            Self::One(place) => mem::forget(place.replace(link)),
            Self::Many(links) if at == links.len() => links.push(link),
            Self::Many(links) => links.insert(at, link),
        }
    }

    /// Takes those at these places out, one by one, also where `each` panics.
    pub(super) fn remove(&mut self, places: Range<usize>, mut each: impl FnMut(Link<H>)) {
        match self {
            Self::One(link) if places.contains(&0) => link.take().into_iter().for_each(each),
            Self::One(_) => {}
            Self::Many(links) => links.drain(places).for_each(&mut each),
        }
    }

    /// Takes all of them out.
    #[inline(always)]
    pub(super) fn take(&mut self) -> Self {
        mem::replace(self, Self::One(None))
    }

    /// Gives their memory away, one by one, also where `each` panics.
    #[inline(always)]
    pub(super) fn release(self, mut each: impl FnMut(H)) {
        match self {
            Self::One(link) => link.into_iter().for_each(|link| each(link.memory)),
            Self::Many(links) => links.into_iter().for_each(|link| each(link.memory)),
        }
    }

    /// What is to be released when their IOVAs are synced.
    #[inline(always)]
    pub(super) fn into_queued(self) -> QueuedMemory<H> {
        match self {
            Self::One(Some(link)) => QueuedMemory::Once(link.memory),
            Self::One(None) => QueuedMemory::Linked(Vec::new()),
            Self::Many(links) => QueuedMemory::Linked(links),
        }
    }
}
