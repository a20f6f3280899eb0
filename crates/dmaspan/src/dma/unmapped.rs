//! A [`DmaDomain`] lists what is mapped in it, and what was unmapped and is not synced yet.

use core::fmt;

use super::domain::DmaDomain;
use super::memory::DmaMemory;
use super::queued::QueuedMapping;
use crate::io_pgtable::{Format, MappedRun, TableMemory};
use crate::iommu::IommuOps;
use crate::iommu::flush_queue::QueuedFor;
use crate::list::{Picture, Rights};
use crate::platform::Platform;
use crate::range::IovaRange;

/// What IOVAs wait for that were unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnmappedState {
    /// A flush.
    Waiting {
        /// In the queue of this CPU.
        cpu: usize,
        /// For how many nanoseconds the oldest entry of that queue has waited.
        age: u64,
    },
    /// Hardware, which did not confirm a flush: they are in quarantine, with the memory that was
    /// mapped there, until a later flush succeeds.
    Quarantined,
}

impl fmt::Display for UnmappedState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waiting { cpu, age } => {
                write!(f, "waits for a flush on CPU {cpu}, whose oldest is {age} ns old")
            }
            Self::Quarantined => f.pad("in quarantine"),
        }
    }
}

/// IOVAs that were unmapped and are not free yet, from [`DmaDomain::list_unmapped`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnmappedIovas {
    /// Which.
    pub range: IovaRange,
    /// What they wait for.
    pub state: UnmappedState,
}

impl<F, M, O, P, H> DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word>,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    /// What is mapped, as maximal runs in the order of IOVAs, while it is used: a
    /// [`walk`](crate::iommu::Domain::walk) of its tables, which know no buffers. A
    /// [`Recorder`](crate::iommu::Recorder) knows who mapped what.
    pub fn list(&self) -> impl Iterator<Item = MappedRun> {
        self.list_in(self.iovas().aperture())
    }

    /// What is mapped in `range`; see [`list`](Self::list).
    pub fn list_in(&self, range: IovaRange) -> impl Iterator<Item = MappedRun> {
        self.domain().walk(range)
    }

    /// The IOVAs that were unmapped and are not free yet: what waits for a flush, by CPU and in the
    /// order of the unmaps, and then what is in quarantine. What is being flushed at the moment is
    /// neither; what changes meanwhile may be listed or not.
    ///
    /// # Context
    ///
    /// As for [`flush`](Self::flush), for a few entries at a time; nothing is held while one is
    /// looked at. Allocates nothing. An unmap that meets it is strict.
    pub fn list_unmapped(&self) -> impl Iterator<Item = UnmappedIovas> {
        self.queue.list(|held: &QueuedMapping<H>, queued| {
            let state = match queued {
                QueuedFor::Flush { cpu, since } => {
                    let age = self.iovas().platform().now().saturating_sub(since);
                    UnmappedState::Waiting { cpu, age }
                }
                QueuedFor::Hardware => UnmappedState::Quarantined,
            };
            UnmappedIovas { range: held.iovas.range, state }
        })
    }

    /// A picture for people of what is mapped, of the domain's IOVAs, and of what is unmapped and
    /// waits.
    ///
    /// # Context
    ///
    /// As [`list_unmapped`](Self::list_unmapped).
    pub fn dump(&self) -> impl fmt::Display {
        Picture(|f: &mut fmt::Formatter<'_>| {
            for MappedRun { range, paddr, prot } in self.list() {
                writeln!(f, "{range} {} to {paddr}", Rights(prot))?;
            }
            write!(f, "{}", self.iovas().dump())?;
            for UnmappedIovas { range, state } in self.list_unmapped() {
                writeln!(f, "{range} unmapped, {state}")?;
            }
            let (waiting, quarantined) = self.waiting();
            writeln!(f, "{waiting} unmaps wait for a flush, {quarantined} are in quarantine")
        })
    }
}
