//! A request for IOVAs, checked and counted in granules.

use super::error::Error;
use super::magazine::CLASSES;
use crate::addr::Iova;
use crate::lg2;
use crate::range::{IovaRange, RangeError};

/// Says which IOVAs are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// How many bytes; rounded up to granules.
    pub bytes: u64,
    /// To what they are aligned.
    pub align: Align,
    /// The last IOVA that will do: what the device and its bus can address.
    pub limit: Iova,
}

/// To what IOVAs are aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// To the next power of two of their length, as Linux aligns them: then whatever divides the
    /// space into powers of two cuts no buffer that is not longer itself.
    Natural,
    /// Naturally, and to so many bytes at least, a power of two: a buffer that is physically
    /// aligned to it can have leaves as large.
    NaturalAndTo(u64),
    /// To so many bytes, a power of two, and no more.
    To(u64),
}

/// The class of ranges that no cache takes.
pub(super) const UNCACHED: u32 = u32::MAX;

/// A [`Request`] that makes sense.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// The bytes behind the first, in whole granules: the length less one, which always fits.
    pub(super) above: u64,
    /// log2 of how many granules are taken for it, or [`UNCACHED`] for exactly those of `above`.
    pub(super) class: u32,
    /// log2 of the alignment in bytes; may be 64, where nothing fits.
    pub(super) align_lg2: u32,
    pub(super) limit: u64,
}

impl Wanted {
    #[inline(always)]
    pub(super) fn new(request: Request, granule_lg2: u32) -> Result<Self, Error> {
        let Request { bytes, align, limit } = request;
        let Some(above) = bytes.checked_sub(1) else {
            return Err(RangeError::Empty { start: 0 }.into());
        };
        let granules_above = above >> granule_lg2;
        let natural = 64 - granules_above.leading_zeros();
        let (align_lg2, class) = match align {
            Align::Natural => (natural + granule_lg2, natural),
            Align::NaturalAndTo(align) => {
                ((natural + granule_lg2).max(checked_lg2(align)?), natural)
            }
            Align::To(align) => {
                let align_lg2 = checked_lg2(align)?.max(granule_lg2);
                // Otherwise it has no place of its own among powers of two.
                let is_power = granules_above & granules_above.wrapping_add(1) == 0;
                let is_natural = is_power && align_lg2 >= natural + granule_lg2;
                (align_lg2, if is_natural { natural } else { UNCACHED })
            }
        };
        let class = if (class as usize) < CLASSES { class } else { UNCACHED };
        let above = above | lg2::mask(granule_lg2);
        Ok(Self { above, class, align_lg2, limit: limit.get() })
    }

    /// What is handed out of a free range that starts there.
    #[inline(always)]
    pub(super) fn at(&self, start: u64) -> IovaRange {
        let start = Iova::new(start);
        let last = start.wrapping_add(self.above);
        IovaRange::new(start, last).unwrap_or(IovaRange::point(start))
    }

    /// Whether a free range of the class that starts there will do.
    #[inline(always)]
    pub(super) fn takes(&self, start: u64) -> bool {
        let ends_in_time = self.limit >= self.above && start <= self.limit - self.above;
        lg2::is_aligned(start, self.align_lg2) && ends_in_time
    }
}

#[inline]
fn checked_lg2(align: u64) -> Result<u32, Error> {
    if align.is_power_of_two() { Ok(lg2::alignment(align)) } else { Err(Error::Align { align }) }
}
