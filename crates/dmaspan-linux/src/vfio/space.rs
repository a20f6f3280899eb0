//! A space by the interface that a user names.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use dmaspan::{DmaSpace, Errno, Iova, IovaRange, Limits, Prot, UserRange};

use super::bar::Bar;
use super::device::Device;
use super::error::{Error, OpenError};
use super::{Interface, Ioas, Requests, Type1};
use crate::mem::Memory;
use crate::pci::Bdf;

/// Which of the kernel's interfaces maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// VFIO type 1: [`Type1`] of [`Interface::Vfio`].
    Vfio,
    /// iommufd: [`Ioas`].
    Iommufd,
    /// iommufd as it serves VFIO's requests: [`Type1`] of [`Interface::IommufdCompatible`].
    Compat,
}

impl Backend {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Vfio, Self::Iommufd, Self::Compat];

    /// The name on a command line: `vfio`, `iommufd` or `compat`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vfio => "vfio",
            Self::Iommufd => "iommufd",
            Self::Compat => "compat",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// No backend has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no backend is called {name:?}: vfio, iommufd or compat")]
pub struct UnknownBackend {
    /// The name that was asked for.
    pub name: String,
}

impl FromStr for Backend {
    type Err = UnknownBackend;

    fn from_str(name: &str) -> Result<Self, UnknownBackend> {
        let found = Self::ALL.into_iter().find(|backend| backend.name() == name);
        found.ok_or_else(|| UnknownBackend { name: name.to_owned() })
    }
}

/// An address space of one or the other interface.
///
/// ```no_run
/// use dmaspan_linux::vfio::{Backend, Space};
///
/// let (space, device) = Space::open(Backend::Iommufd, "0000:00:05.0".parse()?)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub enum Space {
    /// Of VFIO, or iommufd in its place.
    Type1(Type1),
    /// Of iommufd.
    Ioas(Ioas),
}

impl Space {
    /// A new address space with the device `bdf` in it.
    ///
    /// # Errors
    ///
    /// [`OpenError`], which says what to do.
    pub fn open(backend: Backend, bdf: Bdf) -> Result<(Self, Device), OpenError> {
        let type1 = |interface| {
            Type1::open_by(interface, bdf).map(|(space, device)| (Self::Type1(space), device))
        };
        match backend {
            Backend::Vfio => type1(Interface::Vfio),
            Backend::Compat => type1(Interface::IommufdCompatible),
            Backend::Iommufd => Ioas::open(bdf).map(|(space, device)| (Self::Ioas(space), device)),
        }
    }

    /// Opens another device, which reaches everything that is mapped.
    ///
    /// # Errors
    ///
    /// As [`Type1::attach`] and [`Ioas::attach`].
    pub fn attach(&self, bdf: Bdf) -> Result<Device, OpenError> {
        match self {
            Self::Type1(space) => space.attach(bdf),
            Self::Ioas(space) => space.attach(bdf),
        }
    }

    /// The requests that mapped and unmapped so far.
    pub fn requests(&self) -> Requests {
        match self {
            Self::Type1(space) => space.requests(),
            Self::Ioas(space) => space.requests(),
        }
    }

    /// How many mappings there are.
    pub fn mappings(&self) -> u64 {
        match self {
            Self::Type1(space) => space.mappings(),
            Self::Ioas(space) => space.mappings(),
        }
    }

    /// Maps the registers of `offsets`, in bytes from the start of `bar`, for the space's devices:
    /// [`Type1::map_bar`] or [`Ioas::map_bar`].
    ///
    /// # Errors
    ///
    /// As those.
    pub fn map_bar(
        &self,
        bar: &Bar,
        offsets: Range<u64>,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Error> {
        match self {
            Self::Type1(space) => space.map_bar(bar, offsets, iova, prot),
            Self::Ioas(space) => space.map_bar(bar, offsets, iova, prot),
        }
    }

    /// Unmaps everything, and returns how many bytes that was.
    ///
    /// # Errors
    ///
    /// As [`unmap`](DmaSpace::unmap).
    pub fn unmap_all(&self) -> Result<u64, Error> {
        match self {
            Self::Type1(space) => space.unmap_all(),
            Self::Ioas(space) => space.unmap_all(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_are_found_by_their_names() {
        for backend in Backend::ALL {
            assert_eq!(backend.to_string().parse(), Ok(backend));
        }
        assert!("soft".parse::<Backend>().unwrap_err().to_string().contains("iommufd"));
    }
}
