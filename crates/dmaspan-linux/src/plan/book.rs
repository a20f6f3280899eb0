//! A [`Mapper`] keeps book of what is planned and mapped through it, and lists it.

use std::collections::BTreeMap;
use std::fmt;

use dmaspan::{IovaRange, Label, Prot, UserRange};
use parking_lot::Mutex;

use super::mapper::{Mapper, MemorySpace};
use crate::list::{self, Picture};

/// Says what became of a map of a mapper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MapState {
    /// Its IOVAs are held, and the space was not asked yet, or is asked for it and for those that
    /// are mapped with it.
    Planned,
    /// The space has mapped it.
    Mapped,
    /// The space did not unmap it: its memory is never freed, nor are its IOVAs used again.
    Leaked,
}

impl fmt::Display for MapState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Planned => "planned",
            Self::Mapped => "mapped",
            Self::Leaked => "leaked",
        })
    }
}

/// Says what is behind a map of a mapper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MapKind {
    /// Memory of a [`Region`](super::Region).
    Region,
    /// Memory that the mapper allocated.
    Shared,
    /// Registers of a device.
    Bar,
}

impl fmt::Display for MapKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Region => "memory",
            Self::Shared => "shared memory",
            Self::Bar => "registers",
        })
    }
}

/// A map of a mapper, from [`Mapper::list`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListedMap {
    /// Where the device sees it.
    pub range: IovaRange,
    /// Where the process has it.
    pub user: UserRange,
    /// What the device may do.
    pub prot: Prot,
    /// What it is.
    pub kind: MapKind,
    /// The caller that mapped it: of several regions that are one map, the first one's.
    pub label: Label,
    /// What became of it.
    pub state: MapState,
}

impl fmt::Display for ListedMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { range, user, prot, kind, label, state } = self;
        write!(f, "{range} {prot:?}, {kind} at {user}, {state}: {label}")
    }
}

/// All maps, by their first IOVA.
#[derive(Debug, Default)]
pub(super) struct Book(Mutex<BTreeMap<u64, ListedMap>>);

impl Book {
    /// Notes maps that are planned.
    pub(super) fn add(&self, maps: impl IntoIterator<Item = ListedMap>) {
        let maps = maps.into_iter().map(|map| (map.range.start().get(), map));
        let mut all = self.0.lock();
        if all.is_empty() {
            // As a whole, which costs less than one after the other: most mappers map once.
            *all = maps.collect();
        } else {
            all.extend(maps);
        }
    }

    /// Notes what became of one.
    pub(super) fn set(&self, range: IovaRange, state: MapState) {
        if let Some(map) = self.0.lock().get_mut(&range.start().get()) {
            map.state = state;
        }
    }

    /// Notes that several are mapped.
    pub(super) fn set_mapped(&self, ranges: impl IntoIterator<Item = IovaRange>) {
        let mut maps = self.0.lock();
        for range in ranges {
            if let Some(map) = maps.get_mut(&range.start().get()) {
                map.state = MapState::Mapped;
            }
        }
    }

    /// Forgets one, whose IOVAs are the caller's still.
    pub(super) fn remove(&self, range: IovaRange) {
        self.0.lock().remove(&range.start().get());
    }

    /// The first that has an address in `range`.
    fn first_in(&self, range: IovaRange) -> Option<ListedMap> {
        let maps = self.0.lock();
        // Disjoint, so that of those that begin before the range only the last can reach into it.
        let before = maps.range(..range.start().get()).next_back().map(|(_, map)| *map);
        let before = before.filter(|map| map.range.last() >= range.start());
        before.or_else(|| {
            maps.range(range.start().get()..=range.last().get()).next().map(|(_, map)| *map)
        })
    }
}

impl<S: MemorySpace> Mapper<S> {
    /// What is planned and mapped through the mapper and its clones, by IOVA, and what is leaked.
    ///
    /// The mapper is used meanwhile: a map that stays is listed once, and one that comes or goes is
    /// listed or not.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use dmaspan::{Account, Container, HostAddr, Prot};
    /// use dmaspan_linux::plan::{MapState, Mapper, Region};
    /// use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
    ///
    /// let container: Container<_, parking_lot::RawMutex> =
    ///     Container::new(LinuxPinner::<HostAddr>::new()?, Account::new(1 << 30));
    /// let mapper = Mapper::new(container)?;
    /// let queues = Arc::new(Memory::new(MemoryKind::Base, 1 << 16)?);
    /// let planned = mapper.plan([Region::whole(&queues, Prot::READ_WRITE).label("queues")])?;
    /// assert_eq!(mapper.list().next().map(|map| map.state), Some(MapState::Planned));
    /// let mapped = planned.map()?;
    /// print!("{}", mapper.dump());
    /// mapped.unmap()?;
    /// assert_eq!(mapper.list().count(), 0);
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Context
    ///
    /// Takes a lock for each map, and holds none while one is looked at.
    pub fn list(&self) -> impl Iterator<Item = ListedMap> {
        self.list_in(IovaRange::ALL)
    }

    /// Those that have an address in `range`, whole; see [`list`](Self::list).
    pub fn list_in(&self, range: IovaRange) -> impl Iterator<Item = ListedMap> {
        list::each(range, |rest| self.book().first_in(rest).map(|map| (map.range, map)))
    }

    /// A picture for people: a line for each map, and how many bytes there are.
    ///
    /// # Context
    ///
    /// As [`list`](Self::list).
    pub fn dump(&self) -> impl fmt::Display {
        Picture(|f: &mut fmt::Formatter<'_>| {
            self.list().try_for_each(|map| writeln!(f, "{map}"))?;
            let (mapped, leaked) = (self.mapped_bytes(), self.leaked_bytes());
            writeln!(f, "{mapped:#x} bytes mapped, {leaked:#x} bytes leaked")
        })
    }
}
