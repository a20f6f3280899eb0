//! Spaces list what the kernel has mapped for them.

use std::fmt;

use dmaspan::{IovaRange, Label, Prot, UserRange};

use super::{Ioas, VfioContainer, VfioSpace};
use crate::list::{self, Picture};

/// Says what is behind a mapping of a space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SpaceSource {
    /// Memory of the process.
    Memory,
    /// Registers of a device, also by a dma-buf.
    Bar,
    /// A file in memory.
    File,
    /// What another space has mapped.
    Copy,
}

/// Says what becomes of a mapping of a space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SpaceState {
    /// The kernel has mapped it.
    Mapped,
    /// A thread maps or unmaps it at the moment.
    Busy,
    /// The kernel did not unmap all of it: its memory leaks, and nobody maps there again.
    Lost,
}

/// A mapping of a space, from [`VfioSpace::list`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpaceMapping {
    /// Where devices see it.
    pub range: IovaRange,
    /// Where the process has it; `None` where it need not.
    pub user: Option<UserRange>,
    /// What devices may do.
    pub prot: Prot,
    /// What it is.
    pub source: SpaceSource,
    /// The caller that mapped it.
    pub label: Label,
    /// What becomes of it.
    pub state: SpaceState,
}

impl fmt::Display for SpaceMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { range, user, prot, source, label, state } = self;
        let source = match source {
            SpaceSource::Memory => "memory",
            SpaceSource::Bar => "registers",
            SpaceSource::File => "a file",
            SpaceSource::Copy => "a copy of another space",
        };
        write!(f, "{range} {prot:?}, {source}")?;
        if let Some(user) = user {
            write!(f, " at {user}")?;
        }
        let state = match state {
            SpaceState::Mapped => "mapped",
            SpaceState::Busy => "busy",
            SpaceState::Lost => "lost",
        };
        write!(f, ", {state}: {label}")
    }
}

macro_rules! lists {
    ($($space:ident)*) => {$(
        impl $space {
            /// What is mapped, by IOVA. The space is used meanwhile: a mapping that stays is listed
            /// once, and one that comes or goes is listed or not.
            ///
            /// # Context
            ///
            /// Takes a lock for each mapping, and holds none while one is looked at.
            pub fn list(&self) -> impl Iterator<Item = SpaceMapping> {
                self.list_in(IovaRange::ALL)
            }

            /// What is mapped with an address in `range`, whole; see [`list`](Self::list).
            pub fn list_in(&self, range: IovaRange) -> impl Iterator<Item = SpaceMapping> {
                list::each(range, |rest| self.listed_in(rest).map(|found| (found.range, found)))
            }

            /// A picture for people: a line for each mapping.
            ///
            /// # Context
            ///
            /// As [`list`](Self::list).
            pub fn dump(&self) -> impl fmt::Display {
                Picture(|f: &mut fmt::Formatter<'_>| {
                    self.list().try_for_each(|mapping| writeln!(f, "{mapping}"))
                })
            }
        }
    )*};
}

lists! { VfioContainer Ioas VfioSpace }

impl VfioSpace {
    fn listed_in(&self, range: IovaRange) -> Option<SpaceMapping> {
        match self {
            Self::Type1(space) => space.listed_in(range),
            Self::Ioas(space) => space.listed_in(range),
        }
    }
}
