//! The ranges in use, by address.

use alloc::collections::BTreeMap;

use super::{Align, Error, Request};
use crate::addr::Iova;
use crate::lg2;
use crate::range::IovaRange;

pub(super) struct Tree {
    aperture: IovaRange,
    granule_lg2: u32,
    used: BTreeMap<u64, u64>,
}

impl Tree {
    pub(super) fn new(aperture: IovaRange, granule_lg2: u32) -> Self {
        Self { aperture, granule_lg2, used: BTreeMap::new() }
    }

    pub(super) fn reserve(&mut self, range: IovaRange) -> Result<(), Error> {
        let Some(range) = range.intersection(self.aperture) else { return Ok(()) };
        let start = lg2::align_down(range.start().get(), self.granule_lg2);
        let last = range.last().get() | lg2::mask(self.granule_lg2);
        self.used.insert(start, last);
        Ok(())
    }

    pub(super) fn alloc(&mut self, request: Request) -> Result<IovaRange, Error> {
        let Request { bytes, align, limit } = request;
        let len = lg2::align_up(bytes, self.granule_lg2).unwrap_or(u64::MAX);
        let natural = len.checked_next_power_of_two().unwrap_or(1 << 63);
        let align = match align {
            Align::Natural => natural,
            Align::NaturalAndTo(align) => align.max(natural),
            Align::To(align) => align,
        };
        let exhausted = Error::Exhausted { bytes, align, limit };
        let mut at = self.aperture.start().get();
        let up = |at: u64| lg2::align_up(at, lg2::alignment(align)).ok_or(exhausted);
        at = up(at)?;
        for (&start, &last) in &self.used {
            if start >= at && start - at >= len {
                break;
            }
            if last >= at {
                at = up(last.checked_add(1).ok_or(exhausted)?)?;
            }
        }
        let range = IovaRange::from_len(Iova::new(at), len)?;
        if range.last() > limit.min(self.aperture.last()) {
            return Err(exhausted);
        }
        self.used.insert(at, range.last().get());
        Ok(range)
    }

    pub(super) fn free(&mut self, range: IovaRange) {
        self.used.remove(&range.start().get());
    }
}
