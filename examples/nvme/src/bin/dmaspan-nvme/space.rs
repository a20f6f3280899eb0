//! Which interface of the kernel memory is mapped by.

use std::sync::Arc;

use dmaspan::{DmaSpace, Errno, Iova, IovaRange, Limits, Prot, UserRange};
use dmaspan_linux::vfio::{Device, Error, Interface, Ioas, OpenError, Type1};
use dmaspan_linux::{Bdf, Memory};

use crate::args::{Backend, Target};

/// An address space of one or the other.
pub(crate) enum Space {
    /// A container.
    Type1(Type1),
    /// An address space of iommufd.
    Ioas(Ioas),
}

impl Space {
    /// A space with a device in it.
    pub(crate) fn open(target: &Target) -> Result<(Self, Device), OpenError> {
        let container = |interface| {
            let (space, device) = Type1::open_by(interface, target.bdf)?;
            Ok((Self::Type1(space), device))
        };
        match target.backend {
            Backend::Vfio => container(Interface::Vfio),
            Backend::Compat => container(Interface::IommufdCompatible),
            Backend::Iommufd => {
                let (space, device) = Ioas::open(target.bdf)?;
                Ok((Self::Ioas(space), device))
            }
        }
    }

    /// Opens a device that was closed.
    pub(crate) fn attach(&self, bdf: Bdf) -> Result<Device, OpenError> {
        match self {
            Self::Type1(space) => space.attach(bdf),
            Self::Ioas(space) => space.attach(bdf),
        }
    }
}

impl DmaSpace for Space {
    type Memory = Arc<Memory>;
    type Error = Error;

    fn map(
        &self,
        memory: &Arc<Memory>,
        user: UserRange,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Error> {
        match self {
            Self::Type1(space) => space.map(memory, user, iova, prot),
            Self::Ioas(space) => space.map(memory, user, iova, prot),
        }
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, Error> {
        match self {
            Self::Type1(space) => space.unmap(range),
            Self::Ioas(space) => space.unmap(range),
        }
    }

    fn limits(&self) -> Limits {
        match self {
            Self::Type1(space) => space.limits(),
            Self::Ioas(space) => space.limits(),
        }
    }

    fn errno(&self, error: &Error) -> Errno {
        error.errno()
    }
}
