//! Direct regions are mapped here: memory that a device goes on reaching by its physical addresses,
//! through tables too.

use alloc::vec::Vec;

use super::domain::{self, Domain, MapFailed};
use super::gather::Gather;
use super::ops::IommuOps;
use super::reserved::{Relaxable, ReservedRegions};
use crate::addr::{Iova, PhysAddr};
use crate::error::Errno;
use crate::io_pgtable::{Format, MappedRun, TableMemory};
use crate::prot::Prot;
use crate::range::{IovaRange, RangeError};
use crate::span::Span;

/// The reason why direct regions cannot be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DirectError {
    /// The domain has no translations for all of a region.
    #[error("the direct region {region} is not within the domain's aperture {aperture}")]
    OutsideAperture {
        /// The region, in whole granules.
        region: IovaRange,
        /// What the domain translates.
        aperture: IovaRange,
    },
    /// Something else is mapped there.
    #[error("{mapped}, in the direct region {region}, is mapped to {paddr} already")]
    Elsewhere {
        /// The region, in whole granules.
        region: IovaRange,
        /// What is mapped in it.
        mapped: IovaRange,
        /// Where its first address leads.
        paddr: PhysAddr,
    },
    /// The region is mapped one to one, but for less than the device needs.
    #[error("{mapped}, in the direct region {region}, permits {permits:?}, not {needs:?}")]
    Permission {
        /// The region, in whole granules.
        region: IovaRange,
        /// What is mapped in it.
        mapped: IovaRange,
        /// What the mapping permits.
        permits: Prot,
        /// What the device needs.
        needs: Prot,
    },
    /// There is no memory for the list of what is to be mapped.
    #[error("there is no memory to list what the direct region {region} needs mapped")]
    NoMemory {
        /// The region, in whole granules.
        region: IovaRange,
    },
    /// The domain refused.
    #[error("{hole} of a direct region cannot be mapped: {source}")]
    Domain {
        /// What was to be mapped.
        hole: IovaRange,
        /// Why it was not.
        source: domain::Error,
    },
}

impl DirectError {
    /// Returns what a front end that looks like Linux answers.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::OutsideAperture { .. } => Errno::ERANGE,
            Self::Elsewhere { .. } | Self::Permission { .. } => Errno::EEXIST,
            Self::NoMemory { .. } => Errno::ENOMEM,
            Self::Domain { source, .. } => source.errno(),
        }
    }
}

/// Direct regions that were not mapped: translations are as before.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct DirectFailed<L> {
    /// The reason.
    pub error: DirectError,
    /// What hardware may use still: set only where taking back could not be synced. To release
    /// nothing is enough, since the memory is nobody's to free; dropped, tables in it leak.
    pub unsynced: Option<Gather<L>>,
}

impl<L> DirectFailed<L> {
    /// Returns what a front end that looks like Linux answers.
    pub const fn errno(&self) -> Errno {
        self.error.errno()
    }
}

/// What `?` makes of it. A gather in it is dropped, and tables in it leak.
impl<L> From<DirectFailed<L>> for DirectError {
    fn from(failed: DirectFailed<L>) -> Self {
        failed.error
    }
}

impl<L> From<DirectError> for DirectFailed<L> {
    fn from(error: DirectError) -> Self {
        Self { error, unsynced: None }
    }
}

/// What is to be mapped: ranges without translations, and what they need.
type Holes = Vec<(IovaRange, Prot)>;

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> Domain<F, M, O> {
    /// Maps the direct regions of `regions` one to one, by whole granules, with one announcement to
    /// hardware. What is mapped one to one already stays as it is (drivers/iommu/iommu.c,
    /// `iommu_create_device_direct_mappings`, which keeps any other translation too). All or
    /// nothing.
    ///
    /// # Errors
    ///
    /// [`DirectFailed`]: all regions are looked at before anything is mapped.
    ///
    /// # Safety
    ///
    /// 1. The caller owns the regions, widened to whole granules: until the call returns nobody
    ///    else maps, unmaps or rewrites anything there.
    /// 2. Until they have been unmapped and synced, devices of the domain may read that memory and,
    ///    where a region has [`Prot::WRITE`], write it at any time: whole granules of it.
    #[expect(unsafe_code, reason = "lets devices at raw physical addresses")]
    pub unsafe fn map_direct(
        &self,
        regions: &ReservedRegions,
        relaxable: Relaxable,
    ) -> Result<(), DirectFailed<M::List>> {
        self.map_direct_own(regions, relaxable)
    }

    /// [`map_direct`](Self::map_direct), for callers that keep its contract.
    pub(super) fn map_direct_own(
        &self,
        regions: &ReservedRegions,
        relaxable: Relaxable,
    ) -> Result<(), DirectFailed<M::List>> {
        let holes = self.direct_holes(regions, relaxable)?;
        let (Some(first), Some(last)) = (holes.first(), holes.last()) else { return Ok(()) };
        let all = IovaRange::new(first.0.start(), last.0.last()).unwrap_or(first.0);
        for (mapped, &(hole, prot)) in holes.iter().enumerate() {
            if let Err(failed) = self.map_hole(hole, prot) {
                return Err(self.take_back_holes(&holes[..mapped], hole, failed));
            }
        }
        self.tell_mapped(all).map_err(|source| {
            let error = domain::Error::Hardware { range: all, source };
            self.take_back_holes(&holes, all, MapFailed { error, unsynced: None })
        })
    }

    fn map_hole(&self, hole: IovaRange, prot: Prot) -> Result<(), MapFailed<M::List>> {
        let start = hole.start();
        let whole_space = RangeError::Wraps { start: start.get(), len: u64::MAX };
        let span = hole.checked_len().ok_or(whole_space);
        let span = span.and_then(|len| Span::new(PhysAddr::new(start.get()), len));
        let refused = |error: RangeError| MapFailed {
            error: domain::Error::Table(error.into()),
            unsynced: None,
        };
        self.map_pinned(start, &[span.map_err(refused)?], prot)
    }

    /// Unmaps what was mapped before `hole` was refused, with one sync.
    #[cold]
    fn take_back_holes(
        &self,
        mapped: &[(IovaRange, Prot)],
        hole: IovaRange,
        failed: MapFailed<M::List>,
    ) -> DirectFailed<M::List> {
        let mut gather = self.gather();
        for &(hole, _) in mapped {
            self.add_own(&mut gather, self.take_away(hole));
        }
        if let Some(more) = failed.unsynced {
            self.merge_own(&mut gather, more);
        }
        let unsynced = self.sync_own(gather).err().map(|failed| failed.gather);
        DirectFailed { error: DirectError::Domain { hole, source: failed.error }, unsynced }
    }

    /// What the direct regions lack in this domain, once it is known that nothing is in their way.
    fn direct_holes(
        &self,
        regions: &ReservedRegions,
        relaxable: Relaxable,
    ) -> Result<Holes, DirectError> {
        let aperture = self.geometry().aperture;
        let mut holes = Holes::new();
        let mut from = Some(Iova::new(0));
        while let Some((region, needs)) =
            from.and_then(|from| regions.next_direct(from, F::GRANULE_LG2, relaxable))
        {
            if !aperture.covers(region) {
                return Err(DirectError::OutsideAperture { region, aperture });
            }
            self.holes_in(region, needs, &mut holes)?;
            from = region.last().checked_add(1);
        }
        Ok(holes)
    }

    fn holes_in(
        &self,
        region: IovaRange,
        needs: Prot,
        holes: &mut Holes,
    ) -> Result<(), DirectError> {
        let mut add = |start: Iova, last: Option<Iova>| {
            let Some(hole) = last.and_then(|last| IovaRange::new(start, last)) else {
                return Ok(());
            };
            if let Some((last, prot)) = holes.last_mut()
                && let Some(joined) = last.join(hole).filter(|_| *prot == needs)
            {
                *last = joined;
                return Ok(());
            }
            holes.try_reserve(1).map_err(|_| DirectError::NoMemory { region })?;
            holes.push((hole, needs));
            Ok(())
        };
        let mut at = Some(region.start());
        for MappedRun { range: mapped, paddr, prot } in self.all().walk(region) {
            if paddr.get() != mapped.start().get() {
                return Err(DirectError::Elsewhere { region, mapped, paddr });
            }
            if !prot.contains(needs & Prot::READ_WRITE) {
                return Err(DirectError::Permission { region, mapped, permits: prot, needs });
            }
            if let Some(at) = at {
                add(at, mapped.start().get().checked_sub(1).map(Iova::new))?;
            }
            at = mapped.last().checked_add(1);
        }
        at.map_or(Ok(()), |at| add(at, Some(region.last())))
    }
}
