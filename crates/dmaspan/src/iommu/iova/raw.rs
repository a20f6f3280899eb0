//! IOVAs as an address and a length, for drivers that keep no more.

use core::mem::ManuallyDrop;

use super::error::{Error, Foreign, IntoRawFailed};
use super::{Iovas, Space};
use crate::platform::Platform;
use crate::range::IovaRange;

/// What is known of IOVAs that were given out raw, by their first address.
pub(super) struct Raw {
    range: IovaRange,
    class: u32,
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
        let Iovas { range, class, .. } = iovas;
        match self.raw.insert(range.start().get(), Raw { range, class }) {
            Ok(()) => {
                let _recorded = ManuallyDrop::new(iovas);
                Ok(range)
            }
            Err(_) => Err(IntoRawFailed::NoMemory { iovas }),
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
            Some(Ok(Raw { range, class })) => Ok(self.handle(range, class)),
            _ => Err(Error::NotRaw { range }),
        }
    }
}
