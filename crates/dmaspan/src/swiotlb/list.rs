//! A pool lists the slots that are held.

use alloc::sync::Arc;
use core::fmt;

use super::marks::Mark;
use super::memory::PoolMemory;
use super::pool::Pool;
use crate::addr::{Address, PhysAddr};
use crate::list::{self, Picture, Step};
use crate::platform::Platform;
use crate::span::Span;

/// Says what slots of a pool are held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SlotUse {
    /// They stand in for memory that a device uses. Slots whose handles were dropped stay so.
    Mapped,
    /// A driver keeps them by a [`Lease`](super::Lease).
    Leased,
    /// They are never used again, because hardware was not seen to forget them.
    Quarantined,
}

impl fmt::Display for SlotUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Mapped => "mapped",
            Self::Leased => "leased",
            Self::Quarantined => "in quarantine",
        })
    }
}

/// Says which part of a pool slots are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SlotPlace {
    /// An area of what the pool began with.
    Base {
        /// Of which of the spans of the pool's memory.
        span: usize,
        /// Which of its areas, counted from 0.
        area: u32,
    },
    /// An area of what was added.
    Grown {
        /// Which of its areas, counted from 0.
        area: u32,
    },
    /// Memory that was obtained for these slots alone.
    Single,
}

impl fmt::Display for SlotPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Base { span, area } => write!(f, "area {area} of span {span}"),
            Self::Grown { area } => write!(f, "area {area} of what was added"),
            Self::Single => f.pad("memory of their own"),
        }
    }
}

/// Neighbouring slots of one area that are held alike, from [`Pool::list`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListedSlots<A: Address = PhysAddr> {
    /// Where they are: whole slots.
    pub span: Span<A>,
    /// In which part of the pool.
    pub place: SlotPlace,
    /// What for.
    pub held: SlotUse,
}

/// What a step of a listing looks at.
enum Part<C> {
    Chunk(C, Option<usize>),
    Single(Span, Option<Mark>),
}

impl<M: PoolMemory, P: Platform> Pool<M, P> {
    /// The slots that are held, by address, in runs as long as one area and one use have them. A
    /// pool keeps no record of each handle, so that one run may be several of them.
    ///
    /// The pool is used meanwhile: slots that are held all the time are listed once, and those that
    /// are taken or released are listed or not.
    ///
    /// # Context
    ///
    /// Takes the lock of one area for a look at a run, and that of what was added for a look at
    /// which memory comes next; holds none while a run is looked at. Allocates nothing.
    pub fn list(&self) -> impl Iterator<Item = ListedSlots<M::Address>> {
        list::in_steps(Some(0), move |from, step| self.step(from, step))
    }

    fn step(&self, from: u64, step: &mut Step<ListedSlots<M::Address>>) -> Option<u64> {
        let (part, span) = self.next_part(from)?;
        let record = |span: Span, place, mark| ListedSlots {
            span: span.of_output(),
            place,
            held: match mark {
                None => SlotUse::Mapped,
                Some(Mark::Leased) => SlotUse::Leased,
                Some(Mark::Quarantined) => SlotUse::Quarantined,
            },
        };
        match part {
            Part::Single(whole, mark) => {
                step.push(record(whole, SlotPlace::Single, mark));
            }
            Part::Chunk(chunk, base) => {
                let mut at = from;
                while let Some((area, span, mark)) = chunk.next_held(at) {
                    let place = match base {
                        Some(span) => SlotPlace::Base { span, area },
                        None => SlotPlace::Grown { area },
                    };
                    step.push(record(span, place, mark));
                    at = span.last().get().checked_add(1)?;
                    if !step.has_room() {
                        return Some(at);
                    }
                }
            }
        }
        span.last().get().checked_add(1)
    }

    /// The lowest memory of the pool that ends at or behind `from`.
    fn next_part(&self, from: u64) -> Option<(Part<ChunkRef<'_, P::Lock>>, Span)> {
        let grown = self.grown.lock();
        let base = self.base().iter().enumerate();
        let base = base.map(|(n, chunk)| (Found::Base(n), chunk.span()));
        let added = grown.chunks().iter().enumerate();
        let added = added.map(|(n, chunk)| (Found::Grown(n), chunk.span()));
        let singles = grown.singles().iter().enumerate();
        let singles = singles.map(|(n, single)| (Found::Single(n), single.whole));
        let all = base.chain(added).chain(singles);
        let behind = all.filter(|(_, span)| span.last().get() >= from);
        let (found, span) = behind.min_by_key(|(_, span)| span.paddr())?;
        let part = match found {
            Found::Base(n) => Part::Chunk(ChunkRef::Base(self.base().get(n)?), Some(n)),
            Found::Grown(n) => {
                Part::Chunk(ChunkRef::Grown(Arc::clone(grown.chunks().get(n)?)), None)
            }
            Found::Single(n) => {
                let single = grown.singles().get(n)?;
                Part::Single(single.whole, single.mark)
            }
        };
        Some((part, span))
    }

    /// A picture for people: a line for each run of slots, and how full the pool is.
    ///
    /// # Context
    ///
    /// As [`list`](Self::list).
    pub fn dump(&self) -> impl fmt::Display {
        Picture(|f: &mut fmt::Formatter<'_>| {
            for ListedSlots { span, place, held } in self.list() {
                let (start, last) = (span.start().get(), span.last().get());
                let slots = span.len() >> self.slot_lg2;
                writeln!(f, "{start:#x}..={last:#x} {held}, {slots} slots in {place}")?;
            }
            let stats = self.stats();
            writeln!(
                f,
                "{:#x} of {:#x} bytes held, {:#x} in quarantine, {:#x} leaked",
                stats.used,
                stats.bytes + stats.single,
                stats.quarantined,
                stats.leaked
            )
        })
    }
}

/// Where memory of a pool was found.
enum Found {
    Base(usize),
    Grown(usize),
    Single(usize),
}

/// A chunk that stays while it is looked at.
enum ChunkRef<'p, L> {
    Base(&'p super::chunk::Chunk<L>),
    Grown(Arc<super::chunk::Chunk<L>>),
}

impl<L> core::ops::Deref for ChunkRef<'_, L> {
    type Target = super::chunk::Chunk<L>;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Base(chunk) => chunk,
            Self::Grown(chunk) => chunk,
        }
    }
}
