//! IOVAs as an address and a length, for drivers that keep no more.

use core::mem::ManuallyDrop;
use core::num::NonZero;

use super::error::{Error, Foreign, IntoRawFailed};
use super::request::UNCACHED;
use super::{Iovas, Space};
use crate::platform::Platform;
use crate::range::IovaRange;

/// IOVAs of a space that whoever has them knows otherwise.
///
/// An `Option` of it is no longer, and nothing in it is padding: what has IOVAs in it is copied by
/// as few moves as can be.
#[derive(Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Raw {
    pub(crate) range: IovaRange,
    /// In its upper half the class of what is taken for the range, which may be more.
    class: NonZero<u64>,
}

const _: () = assert!(size_of::<Option<Iovas>>() == size_of::<Iovas>());

impl Raw {
    #[inline(always)]
    pub(super) fn new(range: IovaRange, class: u32) -> Self {
        Self { range, class: NonZero::<u64>::MIN | u64::from(class) << 32 }
    }

    #[inline(always)]
    pub(super) fn class(&self) -> u32 {
        u32::try_from(self.class.get() >> 32).unwrap_or(UNCACHED)
    }
}

impl Iovas {
    /// Without the space, which the caller knows.
    #[inline(always)]
    pub(crate) fn into_raw(self) -> Raw {
        let Raw { range, class } = ManuallyDrop::new(self).raw;
        Raw { range, class }
    }
}

impl<P: Platform> Space<P> {
    /// Gives IOVAs out as a mere range, and keeps a record of it for [`from_raw`](Self::from_raw).
    ///
    /// ```
    /// use dmaspan::iommu::iova::{Align, Error, Request, Space};
    /// use dmaspan::platform::OneThread;
    /// use dmaspan::{Iova, IovaRange};
    ///
    /// fn main() -> Result<(), Box<dyn std::error::Error>> {
    ///     let aperture = IovaRange::from_len(Iova::new(0), 1 << 40)?;
    ///     let space = Space::new(aperture, 12, 1, OneThread)?;
    ///     let request = Request { bytes: 0x3000, align: Align::Natural, limit: aperture.last() };
    ///     let range = space.into_raw(space.alloc(request)?)?;
    ///     assert_eq!(range, IovaRange::from_len(Iova::new(0x4000), 0x3000)?);
    ///
    ///     let wrong = IovaRange::from_len(range.start(), 0x4000)?;
    ///     assert_eq!(space.from_raw(wrong), Err(Error::NotRaw { range: wrong }));
    ///     space.free(space.from_raw(range)?)?;
    ///     assert_eq!(space.from_raw(range), Err(Error::NotRaw { range }));
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`IntoRawFailed`], with the IOVAs, where they are of another space or there is no memory.
    pub fn into_raw(&self, iovas: Iovas) -> Result<IovaRange, IntoRawFailed> {
        if iovas.space != self.identity.id() {
            return Err(Foreign { iovas }.into());
        }
        let raw = iovas.into_raw();
        let range = raw.range;
        match self.raw.insert(range.start().get(), raw) {
            Ok(()) => Ok(range),
            Err(raw) => {
                Err(IntoRawFailed::NoMemory { iovas: Iovas { raw, space: self.identity.id() } })
            }
        }
    }

    /// Takes a range back that was given out raw, once. Does not allocate.
    ///
    /// # Errors
    ///
    /// [`Error::NotRaw`] where it is not exactly such a range, or was taken back before.
    pub fn from_raw(&self, range: IovaRange) -> Result<Iovas, Error> {
        let is_it = |raw: &Raw| if raw.range == range { Ok(()) } else { Err(()) };
        match self.raw.remove_if(range.start().get(), is_it) {
            Some(Ok(raw)) => Ok(Iovas { raw, space: self.identity.id() }),
            _ => Err(Error::NotRaw { range }),
        }
    }
}
