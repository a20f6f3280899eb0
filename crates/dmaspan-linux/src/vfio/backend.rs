//! A [`Backend`] is an interface of the kernel that maps memory for devices.

use std::fmt;
use std::str::FromStr;

/// Says which of the kernel's interfaces maps memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// VFIO's own type 1, `/dev/vfio/vfio` and groups:
    /// [`VfioContainer::open`](super::VfioContainer::open).
    Vfio,
    /// iommufd, `/dev/iommu` and devices' own nodes: [`Ioas`](super::Ioas).
    Iommufd,
    /// iommufd as it serves VFIO's requests, `/dev/iommu` and groups:
    /// [`VfioContainer::open_compat`](super::VfioContainer::open_compat).
    Compat,
    /// iommufd for a device without an IOMMU, which is told physical addresses (Linux 7.3):
    /// [`NoIommuPinner`](super::NoIommuPinner).
    NoIommu,
}

impl Backend {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Vfio, Self::Iommufd, Self::Compat, Self::NoIommu];

    /// The name on a command line: `vfio`, `iommufd`, `compat` or `noiommu`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vfio => "vfio",
            Self::Iommufd => "iommufd",
            Self::Compat => "compat",
            Self::NoIommu => "noiommu",
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
#[error("no backend is called {name:?}: use vfio, iommufd, compat or noiommu")]
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
