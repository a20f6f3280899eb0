//! The inside of an address space: its ranges and the CPU's tables.

use dmaspan::{PhysAddr, UserAddr, UserRange, lg2};

use super::SimMemory;
use super::cpu_table::{CpuTable, Geometry, Leaf};
use super::vma::{Presence, Rights, Vma, Vmas};
use crate::walker::Access;

/// The reason why a user may not access an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultError {
    /// Nothing is mapped there, or it is just being unmapped.
    #[error("nothing is mapped at {at}")]
    Hole {
        /// The address.
        at: UserAddr,
    },
    /// What was mapped there was taken away.
    #[error("what was mapped at {at} was revoked")]
    Revoked {
        /// The address.
        at: UserAddr,
    },
    /// It is mapped for reading only, and the access was a write.
    #[error("{at} is mapped for reading only")]
    ReadOnly {
        /// The address.
        at: UserAddr,
    },
    /// Not now: the same fault may succeed when it is tried again (Linux's `VM_FAULT_RETRY` and
    /// `VM_FAULT_NOPAGE`).
    #[error("the fault at {at} must be tried again")]
    Again {
        /// The address.
        at: UserAddr,
    },
}

impl FaultError {
    /// The address.
    pub fn at(&self) -> UserAddr {
        match self {
            Self::Hole { at }
            | Self::Revoked { at }
            | Self::ReadOnly { at }
            | Self::Again { at } => *at,
        }
    }
}

/// What is done to a range that leaves the CPU's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Unmapped,
    Revoked,
}

#[derive(Debug)]
pub(super) struct Mm {
    pub(super) vmas: Vmas,
    pub(super) table: CpuTable,
    /// Ranges whose listeners are being called: nothing in them is found any more.
    going: Vec<UserRange>,
}

impl Mm {
    pub(super) fn new(granule_lg2: u32) -> Self {
        let table = CpuTable::new(Geometry::new(granule_lg2));
        Self { vmas: Vmas::default(), table, going: Vec::new() }
    }

    /// The range in whole granules.
    pub(super) fn outward(&self, range: UserRange) -> UserRange {
        let granule_lg2 = self.table.geometry().granule_lg2();
        let first = UserAddr::new(lg2::align_down(range.start().get(), granule_lg2));
        let last = UserAddr::new(range.last().get() | lg2::mask(granule_lg2));
        UserRange::new(first, last).unwrap_or(range)
    }

    /// Whether the whole range may be accessed, by its ranges alone. O(ranges).
    pub(super) fn check(&self, range: UserRange, access: Access) -> Result<(), FaultError> {
        let mut next = Some(range.start());
        for vma in self.vmas.overlapping(range) {
            let at = vma.user.start().max(range.start());
            if next != Some(at) {
                break;
            }
            permit(vma, at, access)?;
            next = vma.user.last().checked_add(1);
        }
        let hole = next.filter(|at| range.contains(*at));
        match (hole, self.first_going(range)) {
            (Some(hole), Some(going)) => Err(FaultError::Hole { at: hole.min(going) }),
            (Some(at), None) | (None, Some(at)) => Err(FaultError::Hole { at }),
            (None, None) => Ok(()),
        }
    }

    /// The first address of a range that is on its way out.
    pub(super) fn first_going(&self, range: UserRange) -> Option<UserAddr> {
        let starts = self.going.iter().filter_map(|going| going.intersection(range));
        starts.map(UserRange::start).min()
    }

    /// Enters the largest leaf that maps `at`.
    pub(super) fn fault(
        &mut self,
        memory: &SimMemory,
        at: UserAddr,
        access: Access,
    ) -> Result<Leaf, FaultError> {
        if self.first_going(UserRange::point(at)).is_some() {
            return Err(FaultError::Hole { at });
        }
        let vma = self.vmas.at(at).ok_or(FaultError::Hole { at })?;
        permit(vma, at, access)?;
        let (first, leaf) = vma.leaf(memory, self.table.geometry(), at);
        self.table.enter(first, leaf);
        Ok(leaf)
    }

    /// Enters all leaves of a range's own.
    pub(super) fn populate(&mut self, memory: &SimMemory, vma: &Vma) {
        let mut next = Some(vma.user.start());
        while let Some(start) = next.filter(|at| vma.user.contains(*at)) {
            let (run, paddr) = vma.run(start);
            next = run.last().checked_add(1);
            let mut at = Some(start);
            while let Some(user) = at.filter(|at| run.contains(*at)) {
                let geometry = self.table.geometry();
                let (first, leaf) = vma.leaf_of_run(memory, geometry, user, (run, paddr));
                self.table.enter(first, leaf);
                at = UserAddr::new(first).checked_add(lg2::size(u32::from(leaf.size_lg2)));
            }
        }
    }

    /// Marks a range as on its way out. `false` where nothing is mapped in it.
    pub(super) fn begin_to_go(&mut self, range: UserRange) -> bool {
        let something = self.vmas.overlapping(range).next().is_some();
        if something {
            self.going.push(range);
        }
        something
    }

    /// Undoes [`begin_to_go`](Self::begin_to_go), the range being gone now.
    pub(super) fn gone(&mut self, range: UserRange, fate: Fate) {
        let taken = self.vmas.take(range);
        if fate == Fate::Revoked {
            for vma in taken {
                self.vmas.insert(Vma { presence: Presence::Revoked, ..vma });
            }
        }
        self.table.clear(range.start().get(), range.last().get());
        if let Some(at) = self.going.iter().position(|going| *going == range) {
            self.going.swap_remove(at);
        }
    }

    /// Where a byte is; `None` where no leaf maps it.
    pub(super) fn find(&self, at: UserAddr) -> Option<(PhysAddr, Leaf)> {
        let leaf = self.table.find(at.get())?;
        let stays = self.going.is_empty() || self.first_going(UserRange::point(at)).is_none();
        stays.then(|| (leaf.at(at.get()), leaf))
    }
}

fn permit(vma: &Vma, at: UserAddr, access: Access) -> Result<(), FaultError> {
    if vma.presence == Presence::Revoked {
        return Err(FaultError::Revoked { at });
    }
    permit_rights(vma.rights, at, access)
}

pub(super) fn permit_rights(
    rights: Rights,
    at: UserAddr,
    access: Access,
) -> Result<(), FaultError> {
    match (rights, access) {
        (Rights::ReadOnly, Access::Write) => Err(FaultError::ReadOnly { at }),
        _ => Ok(()),
    }
}
