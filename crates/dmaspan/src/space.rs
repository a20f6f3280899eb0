//! [`DmaSpace`] is what user memory can be mapped into, be it the core's container or the kernel's
//! IOMMU.

use crate::addr::Iova;
use crate::error::Errno;
use crate::label::Label;
use crate::prot::Prot;
use crate::range::{IovaRange, UserRange};

/// Says what a [`DmaSpace`] can map: read it before asking for mappings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Where mappings may lie, sorted and disjoint.
    pub apertures: alloc::vec::Vec<IovaRange>,
    /// The leaf sizes, a bit each: bit n for pages of 2^n bytes. The lowest is the granule, to
    /// which every mapping is aligned.
    pub page_sizes: u64,
    /// How many more mappings there may be; `None` where nothing limits them.
    pub mappings_left: Option<u64>,
}

impl Limits {
    /// The smallest page, in bytes: the alignment of every mapping.
    pub const fn granule(&self) -> u64 {
        self.page_sizes & self.page_sizes.wrapping_neg()
    }
}

/// A device's address space: user memory is mapped into it and unmapped from it.
///
/// The container of this crate implements it by pinning and writing page tables itself; clients of
/// a kernel's VFIO implement it by asking the kernel. Planners, registries and drivers stand on
/// this trait and need not know which.
pub trait DmaSpace {
    /// Whose memory a mapping names; see [`Pinner::Space`](crate::pin::Pinner::Space).
    type Memory: ?Sized;
    /// Why an operation was refused.
    type Error: core::error::Error;

    /// Maps `user` of `memory` at `iova`, for a device that may use it as `prot` says. A space that
    /// lists its mappings keeps the caller's place for them, as a [`Label`].
    ///
    /// # Errors
    ///
    /// As of [`map_labelled`](Self::map_labelled).
    #[track_caller]
    fn map(
        &self,
        memory: &Self::Memory,
        user: UserRange,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Self::Error> {
        self.map_labelled(memory, user, iova, prot, Label::caller())
    }

    /// The same with a label of the caller's choice.
    ///
    /// # Errors
    ///
    /// All or nothing: on an error translations, pins and charges are as before.
    fn map_labelled(
        &self,
        memory: &Self::Memory,
        user: UserRange,
        iova: Iova,
        prot: Prot,
        label: Label,
    ) -> Result<(), Self::Error>;

    /// Unmaps every mapping in `range` and returns the bytes that were mapped there.
    ///
    /// When it returns no device reaches the memory and its pins are gone. A range without mappings
    /// is no error: 0 bytes.
    ///
    /// # Errors
    ///
    /// A range that begins or ends inside a mapping is refused and nothing is changed.
    fn unmap(&self, range: IovaRange) -> Result<u64, Self::Error>;

    /// The first mapping that overlaps `range`, or is being made or unmapped there, whoever asked
    /// for it; `None` where there is none.
    ///
    /// A planner asks before it chooses IOVAs, so that it passes over what others have mapped. A
    /// space that does not know says `None`, as by default: its planner learns of such a mapping
    /// when [`map`](Self::map) refuses.
    fn mapped_in(&self, range: IovaRange) -> Option<IovaRange> {
        let _ = range;
        None
    }

    /// Returns what can be mapped now.
    fn limits(&self) -> Limits;

    /// The errno of an error, for front ends that answer as Linux does.
    fn errno(&self, error: &Self::Error) -> Errno;
}
