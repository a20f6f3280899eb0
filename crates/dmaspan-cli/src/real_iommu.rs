//! The kernel's IOMMU: the address space of a real device.

use std::fmt;
use std::sync::Arc;

use dmaspan::{DmaSpace, Iova, IovaRange, Limits, UserRange, lg2};
use dmaspan_linux::vfio::{Device, Error, Interface, Ioas, OpenError, Requests, Type1};
use dmaspan_linux::{Bdf, Memory};

use crate::size::ByteSize;

/// What the kernel is asked by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    /// VFIO's containers and groups.
    Vfio,
    /// iommufd's address spaces, and the device's own file.
    Iommufd,
    /// VFIO's containers and groups, which iommufd answers for.
    Compat,
}

impl Api {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Vfio, Self::Iommufd, Self::Compat];

    /// As it stands on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Vfio => "vfio",
            Self::Iommufd => "iommufd",
            Self::Compat => "compat",
        }
    }

    /// Where the kernel counts what it pins (`vfio_lock_acct` of drivers/vfio/vfio_iommu_type1.c,
    /// `do_update_pinned` of drivers/iommu/iommufd/pages.c).
    pub(crate) const fn counter(self) -> &'static str {
        match self {
            Self::Vfio => "VmLck:",
            Self::Iommufd | Self::Compat => "VmPin:",
        }
    }
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vfio => "VFIO type 1",
            Self::Iommufd => "iommufd",
            Self::Compat => "iommufd's VFIO mode",
        })
    }
}

/// The address space of a device, and the device, which may not access memory.
#[derive(Debug)]
pub(crate) struct RealIommu {
    api: Api,
    space: Space,
    device: Device,
}

#[derive(Debug)]
enum Space {
    Type1(Type1),
    Ioas(Ioas),
}

/// An address space of the kernel, of either kind.
pub(crate) type DynSpace = dyn DmaSpace<Memory = Arc<Memory>, Error = Error>;

/// The device has no room for the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no aperture of the IOMMU has room for {}: ask for less", ByteSize::new(*bytes))]
pub(crate) struct NoRoom {
    bytes: u64,
}

impl RealIommu {
    /// Opens a device, in an address space of its own.
    ///
    /// # Errors
    ///
    /// [`OpenError`], which says what to do.
    pub(crate) fn open(api: Api, bdf: Bdf) -> Result<Self, OpenError> {
        let type1 = |interface| {
            let (space, device) = Type1::open_by(interface, bdf)?;
            Ok((Space::Type1(space), device))
        };
        let (space, device) = match api {
            Api::Vfio => type1(Interface::Vfio)?,
            Api::Compat => type1(Interface::IommufdCompatible)?,
            Api::Iommufd => {
                let (space, device) = Ioas::open(bdf)?;
                (Space::Ioas(space), device)
            }
        };
        Ok(Self { api, space, device })
    }

    /// What the kernel is asked by.
    pub(crate) fn api(&self) -> Api {
        self.api
    }

    /// The device.
    pub(crate) fn bdf(&self) -> Bdf {
        self.device.bdf()
    }

    /// What maps.
    pub(crate) fn space(&self) -> &DynSpace {
        match &self.space {
            Space::Type1(space) => space,
            Space::Ioas(space) => space,
        }
    }

    /// What can be mapped now.
    pub(crate) fn limits(&self) -> Limits {
        self.space().limits()
    }

    /// The requests so far.
    pub(crate) fn requests(&self) -> Requests {
        match &self.space {
            Space::Type1(space) => space.requests(),
            Space::Ioas(space) => space.requests(),
        }
    }

    /// How many mappings there are.
    pub(crate) fn mappings(&self) -> u64 {
        match &self.space {
            Space::Type1(space) => space.mappings(),
            Space::Ioas(space) => space.mappings(),
        }
    }

    /// Unmaps everything.
    ///
    /// # Errors
    ///
    /// Where the kernel refuses; what stays mapped keeps its memory.
    pub(crate) fn unmap_all(&self) -> Result<u64, Error> {
        match &self.space {
            Space::Type1(space) => space.unmap_all(),
            Space::Ioas(space) => space.unmap_all(),
        }
    }
}

/// The largest leaf that tables of IOMMUs have, as a power of two.
const LARGEST_LEAF_LG2: u32 = 30;

/// Where IOVAs begin where there is room: above what a device with 32-bit addresses reaches.
const FIRST_IOVA: u64 = 4 << 30;

/// An IOVA for `user` in one of `apertures`, with the same place in the largest leaf.
///
/// # Errors
///
/// [`NoRoom`] where it fits in none.
pub(crate) fn iova_for(apertures: &[IovaRange], user: UserRange) -> Result<Iova, NoRoom> {
    let place = user.start().get() & lg2::mask(LARGEST_LEAF_LG2);
    for first in [FIRST_IOVA, 0] {
        for aperture in apertures {
            let from = aperture.start().get().max(first);
            let ahead = place.wrapping_sub(from) & lg2::mask(LARGEST_LEAF_LG2);
            let last = |start: u64| start.checked_add(user.len_less_one());
            let start = from.checked_add(ahead);
            if let Some(start) = start
                && last(start).is_some_and(|last| last <= aperture.last().get())
            {
                return Ok(Iova::new(start));
            }
        }
    }
    Err(NoRoom { bytes: user.checked_len().unwrap_or(u64::MAX) })
}

#[cfg(test)]
mod tests {
    use dmaspan::UserAddr;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn iova(apertures: &[(u64, u64)], start: u64, len: u64) -> Option<u64> {
        let range = |&(first, last): &(u64, u64)| IovaRange::new(Iova::new(first), Iova::new(last));
        let apertures: Vec<IovaRange> = apertures.iter().filter_map(range).collect();
        let user = UserRange::from_len(UserAddr::new(start), len).unwrap();
        iova_for(&apertures, user).ok().map(Iova::get)
    }

    #[test]
    fn memory_has_the_same_place_in_the_largest_leaf_above_4_gib() {
        let intel = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];
        assert_eq!(iova(&intel, 0x7fff_1234_5000, GIB), Some(4 * GIB + 0x3f12_3450_00 % GIB));
        assert_eq!(iova(&intel, 0, GIB), Some(4 * GIB));
        assert_eq!(iova(&intel, 0x1000, (1 << 39) - 4 * GIB), None);
    }

    #[test]
    fn lower_iovas_are_used_where_there_are_no_others() {
        assert_eq!(iova(&[(0, 0xfedf_ffff)], GIB - 4096, GIB), Some(GIB - 4096));
        assert_eq!(iova(&[(4096, 0xfedf_ffff)], 0, GIB), Some(GIB));
        assert_eq!(iova(&[(4096, 0xfedf_ffff)], 0, 3 * GIB), None);
        assert_eq!(iova(&[(u64::MAX - 4095, u64::MAX)], 0, 4096), None);
        assert_eq!(iova(&[], 0, 4096), None);
    }
}
