//! A [`Region`] is what a caller wants to map.

use std::sync::Arc;

use dmaspan::{Iova, Label, Prot, UserRange};

use crate::mem::{AccessError, Memory};

/// Memory that a device shall use.
#[derive(Clone, Debug)]
pub struct Region {
    /// The memory, which mappings keep.
    pub memory: Arc<Memory>,
    /// Which part of it.
    pub user: UserRange,
    /// Where the device shall see it; `None` for wherever there is room.
    pub iova: Option<Iova>,
    /// What the device may do.
    pub prot: Prot,
    /// The caller that maps it: see [`Mapper::list`](super::Mapper::list).
    pub label: Label,
    /// Which unit it is part of: regions of different units never become one map.
    pub unit: u32,
}

impl Region {
    /// All of a memory, wherever there is room. Its label is the place of this call.
    #[track_caller]
    pub fn whole(memory: &Arc<Memory>, prot: Prot) -> Self {
        let user = memory.user_range();
        let label = Label::caller();
        Self { memory: Arc::clone(memory), user, iova: None, prot, label, unit: 0 }
    }

    /// `len` bytes from `offset` of a memory, wherever there is room. Its label is the place of
    /// this call.
    ///
    /// # Errors
    ///
    /// [`AccessError::OutOfBounds`] where they are not all in the memory, or none.
    #[track_caller]
    pub fn part(
        memory: &Arc<Memory>,
        offset: u64,
        len: u64,
        prot: Prot,
    ) -> Result<Self, AccessError> {
        let user = memory.sub_range(offset, len)?;
        let label = Label::caller();
        Ok(Self { memory: Arc::clone(memory), user, iova: None, prot, label, unit: 0 })
    }

    /// The same with a name, for whoever lists the mapper or the space.
    #[must_use]
    pub fn label(self, label: impl Into<Label>) -> Self {
        Self { label: label.into(), ..self }
    }

    /// The same at `iova`.
    #[must_use]
    pub fn at(self, iova: Iova) -> Self {
        Self { iova: Some(iova), ..self }
    }

    /// The same as a part of `unit`, which can be unmapped by itself: a DIMM of a guest, say.
    ///
    /// Regions become one map within their unit alone, as no kernel unmaps a part of what it mapped
    /// at once. Units that meet between large pages cost no leaf, and one request each.
    #[must_use]
    pub fn in_unit(self, unit: u32) -> Self {
        Self { unit, ..self }
    }
}
