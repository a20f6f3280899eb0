//! Reserved regions: IOVAs with a meaning of their own, which firmware or the IOMMU itself names.

use alloc::vec::Vec;
use core::iter;

use super::iova::{self, Space};
use crate::addr::Iova;
use crate::error::Errno;
use crate::lg2;
use crate::platform::Platform;
use crate::prot::Prot;
use crate::range::IovaRange;

/// Says what is special about a region: Linux's `enum iommu_resv_type` (include/linux/iommu.h), in
/// its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RegionKind {
    /// The device uses this memory already, by its physical addresses, and goes on doing so: it
    /// must be mapped one to one before the device is attached.
    Direct,
    /// The same, but whoever takes the device over from firmware may drop it: Linux does for
    /// devices that it gives to user space.
    DirectRelaxable,
    /// Accesses there do not arrive, or arrive elsewhere.
    Reserved,
    /// Writes there are interrupts, whatever is mapped.
    Msi,
    /// A window that software picked to map the registers in that turn writes into interrupts.
    SoftwareMsi,
}

impl RegionKind {
    /// Returns whether the region is mapped one to one for those who keep relaxable regions or drop
    /// them.
    pub const fn is_direct(self, relaxable: Relaxable) -> bool {
        match self {
            Self::Direct => true,
            Self::DirectRelaxable => matches!(relaxable, Relaxable::Keep),
            Self::Reserved | Self::Msi | Self::SoftwareMsi => false,
        }
    }
}

/// Says what becomes of regions that are [`RegionKind::DirectRelaxable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Relaxable {
    /// They are as the other direct ones: the device may use what firmware set up.
    Keep,
    /// They are no regions any more: the caller has taken the device over, reset it, and knows that
    /// nothing uses them.
    Drop,
}

/// IOVAs that no allocator may hand out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedRegion {
    /// Which; in any bytes, not in granules.
    pub range: IovaRange,
    /// The reason.
    pub kind: RegionKind,
    /// What the device needs there, for regions that are mapped.
    pub prot: Prot,
}

/// The reason why a region was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReservedRegionError {
    /// A direct region with neither reads nor writes: it could not be mapped.
    #[error("the direct region {} permits neither reads nor writes", region.range)]
    NoAccess {
        /// The region.
        region: ReservedRegion,
    },
    /// There is no memory for one more.
    #[error("no memory for the reserved region {}; the {count} before it stay", region.range)]
    NoMemory {
        /// The region.
        region: ReservedRegion,
        /// How many there are.
        count: usize,
    },
}

impl ReservedRegionError {
    /// Returns what a front end that looks like Linux answers.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::NoAccess { .. } => Errno::EINVAL,
            Self::NoMemory { .. } => Errno::ENOMEM,
        }
    }
}

/// The reserved regions of a device, or of several that share a domain.
///
/// Sorted by their first address and then by kind. Regions of one kind and with the same
/// permissions that overlap or are neighbours are one; others stay side by side, overlapping or not
/// (drivers/iommu/iommu.c, `iommu_insert_resv_region`; Linux joins whatever the permissions).
///
/// ```
/// use dmaspan::iommu::{RegionKind, Relaxable, ReservedRegion, ReservedRegions};
/// use dmaspan::{Iova, IovaRange, Prot};
///
/// let region = |start, len, kind| ReservedRegion {
///     range: IovaRange::from_len(Iova::new(start), len).unwrap(),
///     kind,
///     prot: Prot::READ_WRITE,
/// };
/// let mut regions = ReservedRegions::new();
/// regions.insert(region(0xfee0_0000, 0x10_0000, RegionKind::Msi))?;
/// regions.insert(region(0x9000, 0x1000, RegionKind::Direct))?;
/// regions.insert(region(0xa000, 0x1000, RegionKind::Direct))?;
/// assert_eq!(regions.as_slice()[0], region(0x9000, 0x2000, RegionKind::Direct));
/// assert_eq!(regions.kept_out(Relaxable::Keep).count(), 2);
/// Ok::<(), dmaspan::iommu::ReservedRegionError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservedRegions {
    regions: Vec<ReservedRegion>,
}

impl ReservedRegions {
    /// A list of no regions.
    pub const fn new() -> Self {
        Self { regions: Vec::new() }
    }

    /// Adds a region, joined with those of its kind and permissions that it meets.
    ///
    /// # Errors
    ///
    /// [`ReservedRegionError`], with nothing changed.
    pub fn insert(&mut self, region: ReservedRegion) -> Result<(), ReservedRegionError> {
        if region.kind.is_direct(Relaxable::Keep) && !region.prot.permits_access() {
            return Err(ReservedRegionError::NoAccess { region });
        }
        let count = self.regions.len();
        if self.regions.try_reserve(1).is_err() {
            return Err(ReservedRegionError::NoMemory { region, count });
        }
        let mut joined = region;
        // Those that are there do not meet each other, so one pass joins all.
        self.regions.retain(|old| {
            if (old.kind, old.prot) != (region.kind, region.prot) {
                return true;
            }
            if old.range.join(region.range).is_none() {
                return true;
            }
            joined.range = joined.range.join(old.range).unwrap_or(joined.range);
            false
        });
        let key = |region: &ReservedRegion| (region.range.start(), region.kind, region.prot);
        let at = self.regions.partition_point(|old| key(old) < key(&joined));
        self.regions.insert(at, joined);
        Ok(())
    }

    /// Adds all regions of another device, for a domain that both are attached to.
    ///
    /// # Errors
    ///
    /// [`ReservedRegionError`]; the regions before the one in it were added.
    pub fn extend(&mut self, others: &Self) -> Result<(), ReservedRegionError> {
        others.regions.iter().try_for_each(|&region| self.insert(region))
    }

    /// The regions in their order.
    pub fn as_slice(&self) -> &[ReservedRegion] {
        &self.regions
    }

    /// The first region that has an address in `range`.
    pub fn first_in(&self, range: IovaRange) -> Option<&ReservedRegion> {
        self.regions.iter().find(|region| region.range.intersection(range).is_some())
    }

    /// Returns what must be kept out of IOVA allocation: the addresses of all regions, whatever
    /// their kinds, windows of software MSIs too. Ascending, and with gaps between.
    pub fn kept_out(&self, relaxable: Relaxable) -> impl Iterator<Item = IovaRange> + '_ {
        let is_kept = move |region: &&ReservedRegion| {
            relaxable == Relaxable::Keep || region.kind != RegionKind::DirectRelaxable
        };
        let mut regions = self.regions.iter().filter(is_kept).map(|region| region.range);
        let mut next = regions.next();
        iter::from_fn(move || {
            let mut range = next.take()?;
            for more in regions.by_ref() {
                match range.join(more) {
                    Some(joined) => range = joined,
                    None => {
                        next = Some(more);
                        break;
                    }
                }
            }
            Some(range)
        })
    }

    /// Keeps the regions from being handed out by `space`, to which whoever owns a domain's IOVAs
    /// holds before it attaches a device. A part outside of the space's aperture is out already.
    ///
    /// # Context
    ///
    /// Best before any IOVA is handed out: then only memory can be short.
    ///
    /// # Errors
    ///
    /// [`iova::Error::Taken`] names the region that IOVAs in use stand in the way of, and those;
    /// [`iova::Error::NoMemory`]. The regions below it stay reserved: reserving them again does no
    /// harm.
    pub fn reserve_in<P: Platform>(
        &self,
        space: &Space<P>,
        relaxable: Relaxable,
    ) -> Result<(), iova::Error> {
        let aperture = space.aperture();
        let mut inside = self.kept_out(relaxable).filter_map(|range| range.intersection(aperture));
        inside.try_for_each(|range| space.reserve(range))
    }

    /// What must be mapped one to one, in whole granules, with what the device needs there: the
    /// lowest such range from `from` on. Regions that overlap, or share a granule, grant what any
    /// of them needs.
    pub(super) fn next_direct(
        &self,
        from: Iova,
        granule_lg2: u32,
        relaxable: Relaxable,
    ) -> Option<(IovaRange, Prot)> {
        let direct = || {
            let direct = self.regions.iter().filter(|region| region.kind.is_direct(relaxable));
            direct.map(|region| (widened(region.range, granule_lg2), region.prot))
        };
        let rest = direct().filter(|(range, _)| range.last() >= from);
        let start = rest.map(|(range, _)| range.start().max(from)).min()?;
        let mut last = Iova::new(u64::MAX);
        let mut needs = Prot::empty();
        for (range, prot) in direct() {
            if range.contains(start) {
                last = last.min(range.last());
                // The memory type is that of the first.
                let more = if needs.is_empty() { prot } else { prot & Prot::READ_WRITE };
                needs |= more;
            } else if range.start() > start {
                last = last.min(Iova::new(range.start().get() - 1));
            }
        }
        IovaRange::new(start, last).map(|range| (range, needs))
    }

    /// Whether these regions, mapped one to one, give a device what it needs of `region`.
    pub(super) fn grant(
        &self,
        region: &ReservedRegion,
        granule_lg2: u32,
        relaxable: Relaxable,
    ) -> bool {
        let mut at = region.range.start();
        loop {
            match self.next_direct(at, granule_lg2, relaxable) {
                Some((range, prot))
                    if range.start() == at && prot.contains(region.prot & Prot::READ_WRITE) =>
                {
                    if range.last() >= region.range.last() {
                        return true;
                    }
                    // Below the region's last address, so there is a next one.
                    at = range.last().wrapping_add(1);
                }
                _ => return false,
            }
        }
    }
}

/// The whole granules around a range.
fn widened(range: IovaRange, granule_lg2: u32) -> IovaRange {
    let start = Iova::new(lg2::align_down(range.start().get(), granule_lg2));
    let last = Iova::new(range.last().get() | lg2::mask(granule_lg2));
    IovaRange::new(start, last).unwrap_or(range)
}
