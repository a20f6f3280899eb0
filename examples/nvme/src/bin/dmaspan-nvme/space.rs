//! A controller has its memory by a [`Space`].
#![expect(unsafe_code, reason = "a controller without an IOMMU reaches all memory")]

use std::sync::Arc;

use dmaspan::Prot;
use dmaspan_linux::Memory;
use dmaspan_linux::plan::{Mapper, Region};
use dmaspan_linux::vfio::{Backend, VfioSpace};
use dmaspan_nvme::vfio::{Untranslated, VfioAccess, VfioBuffer};

use crate::args::Target;
use crate::load::Failure;

/// An address space, or pins where there is no IOMMU.
pub(crate) enum Space {
    Mapped(Mapper<VfioSpace>),
    Pinned(Untranslated),
}

impl Space {
    /// That of a controller, and what drives it.
    pub(crate) fn open(target: &Target) -> Result<(Self, VfioAccess), Failure> {
        if target.backend != Backend::NoIommu {
            let (space, access) = VfioAccess::open(target.backend, target.bdf)?;
            return Ok((Self::Mapped(space), access));
        }
        let space = Self::Pinned(Untranslated::open(target.bdf)?);
        let access = space.access(target)?;
        Ok((space, access))
    }

    /// The controller once more, which nobody has.
    pub(crate) fn access(&self, target: &Target) -> Result<VfioAccess, Failure> {
        Ok(match self {
            Self::Mapped(space) => VfioAccess::attach(space, target.bdf)?,
            // SAFETY: the bare loop and PRPs written by hand, which tell the controller of memory,
            // are not for this backend (`BenchArgs::check`); all else here is the driver.
            Self::Pinned(untranslated) => unsafe { untranslated.access()? },
        })
    }

    /// All of a memory, for the controller.
    pub(crate) fn buffer(&self, memory: &Arc<Memory>) -> Result<VfioBuffer, Failure> {
        Ok(match self {
            Self::Mapped(space) => VfioBuffer::new(space, Region::whole(memory, Prot::READ_WRITE))?,
            Self::Pinned(untranslated) => VfioBuffer::pinned(untranslated, memory)?,
        })
    }
}
