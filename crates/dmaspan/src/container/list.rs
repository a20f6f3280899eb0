//! A container lists its mappings.

use alloc::sync::Arc;
use core::fmt;

use lock_api::RawMutex;

use super::Container;
use super::mapping::{MappingSlot, SlotState, Vaddr, overlapping};
use crate::account::Account;
use crate::iommu::HardwareError;
use crate::label::Label;
use crate::list::{self, Picture, Rights};
use crate::pin::Pinner;
use crate::prot::Prot;
use crate::range::{IovaRange, UserRange};

/// What becomes of a mapping of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MappingState {
    /// It is mapped in all domains; in a container without domains it is noted.
    Mapped,
    /// An operation maps it, unmaps it or changes it at the moment.
    Busy,
    /// It is mapped, and its user addresses are not where its memory is: nobody has said yet where
    /// that has moved to.
    Moved,
    /// It was unmapped, and hardware has not confirmed that it forgot all of it: its memory stays
    /// pinned and charged until it does.
    Quarantined(Option<HardwareError>),
}

impl fmt::Display for MappingState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mapped => f.pad("mapped"),
            Self::Busy => f.pad("busy"),
            Self::Moved => f.pad("moved"),
            Self::Quarantined(None) => f.pad("quarantined"),
            Self::Quarantined(Some(source)) => write!(f, "quarantined: {source}"),
        }
    }
}

/// A mapping of a container, from [`Container::list`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ContainerMapping {
    /// Where devices see it.
    pub range: IovaRange,
    /// The memory, as its user addresses it.
    pub user: UserRange,
    /// Whose memory it is, by [`Pinner::space_id`].
    pub space_id: u64,
    /// What devices may do.
    pub prot: Prot,
    /// The account that it is charged to.
    pub owner: Arc<Account>,
    /// The caller that mapped it: the place of the call, unless the request has a name.
    pub label: Label,
    /// What becomes of it.
    pub state: MappingState,
    /// How many domains the container had when this was read: it is mapped in all of them.
    pub domains: usize,
}

impl fmt::Display for ContainerMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { range, user, prot, label, state, .. } = self;
        write!(f, "{range} {} from {user}, {state}: {label}", Rights(*prot))
    }
}

impl<P: Pinner> MappingSlot<P> {
    fn state(&self) -> MappingState {
        match &self.state {
            SlotState::Mapped(_) if self.vaddr == Vaddr::Invalid => MappingState::Moved,
            SlotState::Mapped(_) => MappingState::Mapped,
            SlotState::Busy | SlotState::Doomed(..) | SlotState::Emptied => MappingState::Busy,
            SlotState::Quarantined(mapping) => MappingState::Quarantined(mapping.unforgotten()),
        }
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// The mappings, by IOVA, also those that another operation is at and those in quarantine.
    ///
    /// The container is used meanwhile: a mapping that stays is listed once, and one that comes or
    /// goes is listed or not.
    ///
    /// # Context
    ///
    /// Takes the container's lock for a few mappings at a time, and holds none while one is looked
    /// at: the caller may map and unmap in the loop. Allocates nothing.
    pub fn list(&self) -> impl Iterator<Item = ContainerMapping> {
        self.list_in(IovaRange::ALL)
    }

    /// The mappings that have an address in `range`, whole; see [`list`](Self::list). A
    /// [point](IovaRange::point) finds what is mapped at an address.
    pub fn list_in(&self, range: IovaRange) -> impl Iterator<Item = ContainerMapping> {
        list::in_steps(Some(range), move |rest: IovaRange, step| {
            let all = self.state.lock();
            let domains = all.domains.list.len();
            let mut last = None;
            for (range, slot) in overlapping(&all.tree, rest) {
                last = Some(range.last());
                let more = step.push(ContainerMapping {
                    range,
                    user: slot.user,
                    space_id: slot.space_id,
                    prot: slot.prot,
                    owner: Arc::clone(&slot.owner),
                    label: slot.label,
                    state: slot.state(),
                    domains,
                });
                if !more {
                    break;
                }
            }
            IovaRange::new(last?.checked_add(1)?, range.last())
        })
    }

    /// A picture for people: a line for each mapping, and how many there are.
    ///
    /// # Context
    ///
    /// As [`list`](Self::list).
    pub fn dump(&self) -> impl fmt::Display {
        Picture(|f: &mut fmt::Formatter<'_>| {
            let mut count = 0u64;
            for mapping in self.list() {
                writeln!(f, "{mapping}")?;
                count += 1;
            }
            let domains = self.state.lock().domains.list.len();
            writeln!(f, "{count} mappings in {domains} domains")
        })
    }
}
