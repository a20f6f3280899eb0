//! [`MappedMemory`] is memory that the program and its devices share for long.

use std::fmt;
use std::sync::Arc;

use dmaspan::{Iova, IovaRange, Label, Prot};

use super::book::MapKind;
use super::mapper::{Inner, MemorySpace};
use super::places::Wanted;
use super::single::Single;
use super::{MapError, PlanError, StillMapped};
use crate::mem::{Memory, MemoryKind};

/// Memory that devices reach at one contiguous address, from
/// [`Mapper::alloc`](super::Mapper::alloc).
///
/// It is accessed as [`Memory`] is: a device may write it at any time. It stays mapped until
/// [`unmap`](Self::unmap) or a drop; what the space does not unmap is leaked, and so is it if this
/// is forgotten: memory that a device may write is never freed.
#[must_use = "what is mapped is unmapped when this is dropped"]
pub struct MappedMemory<S: MemorySpace> {
    single: Single<S, Arc<Memory>>,
}

impl<S: MemorySpace> MappedMemory<S> {
    pub(super) fn alloc(
        inner: &Arc<Inner<S>>,
        len: u64,
        align: u64,
        label: Label,
    ) -> Result<Self, MapError<S::Error>> {
        if !align.is_power_of_two() {
            return Err(PlanError::Alignment { align }.into());
        }
        let huge = MemoryKind::Thp.page_size();
        let kind = if len >= huge { MemoryKind::Thp } else { MemoryKind::Base };
        let page = kind.page_size().max(inner.places.granule());
        // What cannot be rounded up is more than there is, rounded down.
        let whole = len.checked_next_multiple_of(page).unwrap_or(len - len % page);
        let memory = Arc::new(Memory::aligned(kind, whole, align.max(page))?);
        let wanted = Wanted { user: memory.user_range(), iova: None, align, region: 0 };
        let map = (wanted, Prot::READ_WRITE, MapKind::Shared, label);
        let single = Single::map(inner, map, memory, |space, memory, range| {
            let user = memory.user_range();
            space.map_labelled(memory, user, range.start(), Prot::READ_WRITE, label)
        })?;
        Ok(Self { single })
    }

    /// Returns where the devices see the first byte.
    pub fn iova(&self) -> Iova {
        self.single.range().start()
    }

    /// Returns where the devices see it.
    pub fn range(&self) -> IovaRange {
        self.single.range()
    }

    /// The length in bytes, never 0: what was asked for, in whole pages.
    #[expect(clippy::len_without_is_empty, reason = "memory has at least one page")]
    pub fn len(&self) -> u64 {
        self.memory().len()
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<Memory> {
        self.single.kept()
    }

    /// Unmaps it. When this returns no device reaches the memory, which is freed with the last
    /// reference to it.
    ///
    /// # Errors
    ///
    /// [`StillMapped`] with this, to try again.
    pub fn unmap(mut self) -> Result<(), StillMapped<S, Self>> {
        match self.single.unmap() {
            Ok(()) => Ok(()),
            Err(source) => Err(StillMapped { bytes: self.len(), left: self, source }),
        }
    }

    /// Gives up what is mapped: the memory is never freed, and the IOVAs are never used again. How
    /// many bytes.
    pub fn leak(mut self) -> u64 {
        self.single.leak()
    }
}

impl<S: MemorySpace> fmt::Debug for MappedMemory<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedMemory").field("range", &self.range()).finish_non_exhaustive()
    }
}
