//! [`MappedBar`]s are registers of devices that a [`Mapper`](super::Mapper) mapped.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use dmaspan::{Iova, IovaRange, Label, Prot, UserRange};

use super::book::MapKind;
use super::mapper::{Inner, MemorySpace};
use super::places::Wanted;
use super::single::Single;
use super::{MapError, PlanError, StillMapped};
use crate::vfio::{self, Bar, Ioas, VfioContainer, VfioSpace};

/// A space into which registers of devices can be mapped too, for other devices to access.
///
/// Those of the kernel's clients are [`Bar`]s; a space of another kind names its own.
pub trait MmioSpace: MemorySpace {
    /// The registers of a BAR. Clones are of the same mapping and keep it.
    type Bar: Clone;

    /// Returns where this process has the registers of `offsets`, in bytes from the start of the
    /// BAR: IOVAs that are congruent to it permit the largest leaves.
    ///
    /// # Errors
    ///
    /// Offsets that are empty or not all of the BAR, and what is not mapped into the process.
    fn bar_range(bar: &Self::Bar, offsets: Range<u64>) -> Result<UserRange, Self::Error>;

    /// Maps the registers of `offsets` at `iova`. The space keeps what it needs of the BAR until
    /// [`unmap`](dmaspan::DmaSpace::unmap) has returned.
    ///
    /// # Errors
    ///
    /// As [`map`](dmaspan::DmaSpace::map): all or nothing.
    fn map_bar(
        &self,
        bar: &Self::Bar,
        offsets: Range<u64>,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Self::Error>;
}

macro_rules! bar_space {
    ($($space:ident)*) => {$(
        impl MmioSpace for $space {
            type Bar = Bar;

            fn bar_range(bar: &Bar, offsets: Range<u64>) -> Result<UserRange, vfio::Error> {
                bar.user_range(offsets)
            }

            fn map_bar(
                &self,
                bar: &Bar,
                offsets: Range<u64>,
                iova: Iova,
                prot: Prot,
            ) -> Result<(), vfio::Error> {
                $space::map_bar(self, bar, offsets, iova, prot)
            }
        }
    )*};
}

bar_space! { VfioContainer Ioas VfioSpace }

/// Registers that devices of a space can access, from [`Mapper::map_bar`](super::Mapper::map_bar).
///
/// It keeps the BAR, and the space, until they are unmapped: by [`unmap`](Self::unmap), which says
/// what failed, or when it is dropped. What the space does not unmap is leaked, and so is it if
/// this is forgotten: the BAR stays mapped, its device open, and the IOVAs are never used again.
#[must_use = "what is mapped is unmapped when this is dropped"]
pub struct MappedBar<S: MmioSpace> {
    single: Single<S, S::Bar>,
    offsets: Range<u64>,
}

impl<S: MmioSpace> MappedBar<S> {
    pub(super) fn map(
        inner: &Arc<Inner<S>>,
        bar: &S::Bar,
        offsets: Range<u64>,
        iova: Option<Iova>,
        prot: Prot,
        label: Label,
    ) -> Result<Self, MapError<S::Error>> {
        if !prot.permits_access() {
            return Err(PlanError::NoAccess { region: 0, prot }.into());
        }
        let user = S::bar_range(bar, offsets.clone()).map_err(|source| MapError::Bar { source })?;
        let wanted = Wanted { user, iova, align: 1, region: 0 };
        if let Some(iova) = iova {
            IovaRange::from_len(iova, wanted.len())
                .map_err(|source| PlanError::Wraps { region: 0, source })?;
        }
        let map = (wanted, prot, MapKind::Bar, label);
        let single = Single::map(inner, map, bar.clone(), |space, bar, range| {
            space.map_bar(bar, offsets.clone(), range.start(), prot)
        })?;
        Ok(Self { single, offsets })
    }

    /// Returns where the devices see the first of the registers.
    pub fn iova(&self) -> Iova {
        self.single.range().start()
    }

    /// Returns where the devices see them.
    pub fn range(&self) -> IovaRange {
        self.single.range()
    }

    /// Returns which registers, in bytes from the start of the BAR.
    pub fn offsets(&self) -> Range<u64> {
        self.offsets.clone()
    }

    /// The BAR.
    pub fn bar(&self) -> &S::Bar {
        self.single.kept()
    }

    /// Unmaps them. When this returns no device of the space reaches them.
    ///
    /// # Errors
    ///
    /// [`StillMapped`] with this, to try again.
    pub fn unmap(mut self) -> Result<(), StillMapped<S, Self>> {
        match self.single.unmap() {
            Ok(()) => Ok(()),
            Err(source) => {
                let bytes = self.single.range().len_less_one().saturating_add(1);
                Err(StillMapped { left: self, bytes, source })
            }
        }
    }

    /// Gives up what is mapped: the BAR stays mapped for ever, and the IOVAs are never used again.
    /// How many bytes.
    pub fn leak(mut self) -> u64 {
        self.single.leak()
    }
}

impl<S: MmioSpace> fmt::Debug for MappedBar<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedBar")
            .field("range", &self.range())
            .field("offsets", &self.offsets)
            .finish_non_exhaustive()
    }
}
