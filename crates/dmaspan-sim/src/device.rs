//! A device that does DMA through an [`Iotlb`].

use dmaspan::{Iova, IovaRange, PhysAddr};

use crate::bus::{Bus, BusError};
use crate::iotlb::{Hit, Iotlb};
use crate::sanitizer::Sanitizer;
use crate::walker::{Access, Fault, TableWords, Walker};

/// The reason why a device's access ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DmaError {
    /// An address did not translate.
    #[error("dma stopped after {done} bytes: {fault}")]
    Fault {
        /// Bytes done before.
        done: usize,
        /// What was refused, and at which address.
        fault: Fault,
    },
    /// An address translated to where nothing answers.
    #[error("dma at iova {iova} stopped after {done} bytes: {error}")]
    Bus {
        /// The address that the device used for the failed part.
        iova: Iova,
        /// Bytes done before the failed part.
        done: usize,
        /// What the bus answered.
        error: BusError,
    },
    /// The access would wrap beyond the top of the address space. Nothing was done.
    #[error("dma of {len} bytes at iova {iova} wraps")]
    Wraps {
        /// Where it would begin.
        iova: Iova,
        /// How many bytes it would have.
        len: usize,
    },
}

/// A device behind an IOMMU.
#[derive(Clone, Debug)]
pub struct SimDevice<W, T, B> {
    iotlb: Iotlb<W, T>,
    bus: B,
    sanitizer: Option<Sanitizer>,
}

impl<W: Walker, T: TableWords, B: Bus> SimDevice<W, T, B> {
    /// A device whose addresses `iotlb` translates to addresses of `bus`.
    pub fn new(iotlb: Iotlb<W, T>, bus: B) -> Self {
        Self { iotlb, bus, sanitizer: None }
    }

    /// The same device, whose accesses `sanitizer` is told of, each before it is tried: that of the
    /// domain that it is behind, whose hooks are [`Sanitized`](crate::sanitizer::Sanitized).
    #[must_use]
    pub fn sanitized(self, sanitizer: &Sanitizer) -> Self {
        Self { sanitizer: Some(sanitizer.clone()), ..self }
    }

    /// The device's IOTLB.
    pub fn iotlb(&self) -> &Iotlb<W, T> {
        &self.iotlb
    }

    /// Reads memory from `iova` on.
    ///
    /// # Errors
    ///
    /// [`DmaError`], with the bytes that were read before.
    #[track_caller]
    pub fn read(&self, iova: Iova, buf: &mut [u8]) -> Result<(), DmaError> {
        self.pieces(iova, buf.len(), Access::Read, |paddr, from, to| {
            self.bus.read(paddr, &mut buf[from..to])
        })
    }

    /// Writes memory from `iova` on.
    ///
    /// # Errors
    ///
    /// [`DmaError`], with the bytes that were written before.
    #[track_caller]
    pub fn write(&self, iova: Iova, buf: &[u8]) -> Result<(), DmaError> {
        self.pieces(iova, buf.len(), Access::Write, |paddr, from, to| {
            self.bus.write(paddr, &buf[from..to])
        })
    }

    /// Returns where an access to `iova` would go, if anywhere. Fills the IOTLB as an access does.
    pub fn probe(&self, iova: Iova, access: Access) -> Option<PhysAddr> {
        self.iotlb.translate(iova, access).ok().map(|hit| hit.paddr)
    }

    #[track_caller]
    fn pieces(
        &self,
        iova: Iova,
        len: usize,
        access: Access,
        piece: impl FnMut(PhysAddr, usize, usize) -> Result<(), BusError>,
    ) -> Result<(), DmaError> {
        tell(self.sanitizer.as_ref(), iova, len, access);
        let translate = |at, f: Step<'_>| self.iotlb.with_translation(at, access, f);
        in_pieces(iova, len, translate, piece)
    }
}

/// Tells a sanitizer, if there is one, what a device is about to do.
#[track_caller]
pub(crate) fn tell(sanitizer: Option<&Sanitizer>, iova: Iova, len: usize, access: Access) {
    if let Some(sanitizer) = sanitizer {
        sanitizer.on_dma(iova, u64::try_from(len).unwrap_or(u64::MAX), access);
    }
}

/// What is done with a translation: the bytes done, or why the bus refused.
pub(crate) type Step<'f> = &'f mut dyn FnMut(Hit) -> Result<usize, BusError>;

/// The outcome of a step, where its address translates.
pub(crate) type Stepped = Result<Result<usize, BusError>, Fault>;

/// Does an access in pieces that end where an IOTLB entry ends. An access of no bytes does nothing.
pub(crate) fn in_pieces(
    iova: Iova,
    len: usize,
    translate: impl Fn(Iova, Step<'_>) -> Stepped,
    mut piece: impl FnMut(PhysAddr, usize, usize) -> Result<(), BusError>,
) -> Result<(), DmaError> {
    let len_bytes = u64::try_from(len).unwrap_or(u64::MAX);
    if len > 0 && IovaRange::from_len(iova, len_bytes).is_err() {
        return Err(DmaError::Wraps { iova, len });
    }
    let (mut at, mut done) = (iova, 0);
    while done < len {
        let accessed = translate(at, &mut |hit| {
            let above = hit.block.last().get() - at.get();
            let left_above = len - done - 1;
            let step = usize::try_from(above).unwrap_or(usize::MAX).min(left_above) + 1;
            piece(hit.paddr, done, done + step).map(|()| step)
        });
        let step = accessed
            .map_err(|fault| DmaError::Fault { done, fault })?
            .map_err(|error| DmaError::Bus { iova: at, done, error })?;
        done += step;
        // The position behind the last byte may be the top of the space.
        at = at.wrapping_add(u64::try_from(step).unwrap_or(u64::MAX));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
