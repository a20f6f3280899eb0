//! A [`VfioSpace`] is a space by the interface that a user names.

use std::ops::Range;
use std::sync::Arc;

use dmaspan::{DmaSpace, Errno, Iova, IovaRange, Label, Limits, Prot, UserRange};

use super::bar::Bar;
use super::device::VfioDevice;
use super::error::{Error, OpenError};
use super::{Backend, Ioas, Requests, VfioContainer};
use crate::mem::Memory;
use crate::pci::Bdf;

/// An address space of one or the other interface.
///
/// ```no_run
/// use dmaspan_linux::vfio::{Backend, VfioSpace};
///
/// let (space, device) = VfioSpace::open(Backend::Iommufd, "0000:00:05.0".parse()?)?;
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub enum VfioSpace {
    /// Of VFIO, or iommufd in its place.
    Type1(VfioContainer),
    /// Of iommufd.
    Ioas(Ioas),
}

/// What either interface does with its space.
macro_rules! either {
    ($self:ident, $space:ident => $does:expr) => {
        match $self {
            Self::Type1($space) => $does,
            Self::Ioas($space) => $does,
        }
    };
}

impl VfioSpace {
    /// A new address space with the device `bdf` in it.
    ///
    /// # Errors
    ///
    /// [`OpenError`], which says what to do.
    pub fn open(backend: Backend, bdf: Bdf) -> Result<(Self, VfioDevice), OpenError> {
        match backend {
            Backend::Vfio => {
                VfioContainer::open(bdf).map(|(space, device)| (Self::Type1(space), device))
            }
            Backend::Compat => {
                VfioContainer::open_compat(bdf).map(|(space, device)| (Self::Type1(space), device))
            }
            Backend::Iommufd => Ioas::open(bdf).map(|(space, device)| (Self::Ioas(space), device)),
            Backend::NoIommu => Err(OpenError::Unsupported {
                what: "without an IOMMU a device has no address space of its own",
                advice: "pin memory by NoIommuPinner, and tell the device where that is",
            }),
        }
    }

    /// Opens another device, which reaches everything that is mapped.
    ///
    /// # Errors
    ///
    /// As [`VfioContainer::attach`] and [`Ioas::attach`].
    pub fn attach(&self, bdf: Bdf) -> Result<VfioDevice, OpenError> {
        either!(self, space => space.attach(bdf))
    }

    /// The requests that mapped and unmapped so far.
    pub fn requests(&self) -> Requests {
        either!(self, space => space.requests())
    }

    /// Returns how many mappings there are.
    pub fn mappings(&self) -> u64 {
        either!(self, space => space.mappings())
    }

    /// Maps the registers of `offsets`, in bytes from the start of `bar`, for the space's devices:
    /// [`VfioContainer::map_bar`] or [`Ioas::map_bar`].
    ///
    /// # Errors
    ///
    /// As those.
    #[track_caller]
    pub fn map_bar(
        &self,
        bar: &Bar,
        offsets: Range<u64>,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Error> {
        either!(self, space => space.map_bar(bar, offsets, iova, prot))
    }

    /// Unmaps everything, and returns how many bytes that was.
    ///
    /// # Errors
    ///
    /// As [`unmap`](DmaSpace::unmap).
    pub fn unmap_all(&self) -> Result<u64, Error> {
        either!(self, space => space.unmap_all())
    }
}

impl DmaSpace for VfioSpace {
    type Memory = Arc<Memory>;
    type Error = Error;

    fn map_labelled(
        &self,
        memory: &Arc<Memory>,
        user: UserRange,
        iova: Iova,
        prot: Prot,
        label: Label,
    ) -> Result<(), Error> {
        either!(self, space => space.map_labelled(memory, user, iova, prot, label))
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, Error> {
        either!(self, space => space.unmap(range))
    }

    fn mapped_in(&self, range: IovaRange) -> Option<IovaRange> {
        either!(self, space => space.mapped_in(range))
    }

    fn limits(&self) -> Limits {
        either!(self, space => space.limits())
    }

    fn errno(&self, error: &Error) -> Errno {
        error.errno()
    }
}
