//! The kernel's IOMMU: the address space of a real device.

use std::fmt;
use std::sync::Arc;

use dmaspan::{DmaSpace, Limits};
use dmaspan_linux::vfio::{Device, Error, Interface, Ioas, OpenError, Requests, Type1};
use dmaspan_linux::{Bdf, Memory};

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
