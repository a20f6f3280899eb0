//! A request says what a slot has to be like. This turns it, once, into arithmetic on the places of
//! a pool.

use super::error::Error;
use super::pool::MAX_SLOTS;
use crate::addr::PhysAddr;
use crate::lg2;
use crate::span::Span;

/// Says what a bounce slot has to be like, beside its length.
///
/// ```
/// use dmaspan::swiotlb::SlotRequest;
///
/// // An NVMe drive keeps the offset in a page, and has 32 bits of address.
/// let request = SlotRequest { keep_bits: 0xfff, last: 0xffff_ffff, ..SlotRequest::default() };
/// assert_eq!((request.granule, request.boundary), (1, None));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotRequest {
    /// Low bits of addresses that are the same in the slot as in the original (`min_align_mask`):
    /// 2^n - 1, 0 where none matter.
    pub keep_bits: u64,
    /// The slot's whole granules of so many bytes (a power of two) are nobody else's, begin on
    /// multiples of it (`alloc_align_mask` + 1), and what of them is not the original's is zero. 1
    /// where that does not matter.
    pub granule: u64,
    /// The last address that the device can use.
    pub last: u64,
    /// No slot crosses a multiple of this power of two (`seg_boundary_mask` + 1); `None` where that
    /// does not matter.
    pub boundary: Option<u64>,
}

impl Default for SlotRequest {
    /// Any slot.
    fn default() -> Self {
        Self { keep_bits: 0, granule: 1, last: u64::MAX, boundary: None }
    }
}

impl SlotRequest {
    /// Checks what no pool could do anything with.
    pub(super) fn check(&self) -> Result<(), Error> {
        let masks = self.keep_bits & self.keep_bits.wrapping_add(1);
        if masks != 0 || !self.granule.is_power_of_two() {
            return Err(self.wrong());
        }
        match self.boundary {
            Some(boundary) if !boundary.is_power_of_two() => Err(self.wrong()),
            _ => Ok(()),
        }
    }

    #[cold]
    fn wrong(&self) -> Error {
        if !self.keep_bits.wrapping_add(1).is_power_of_two() && self.keep_bits != u64::MAX {
            return Error::KeepBits { keep_bits: self.keep_bits };
        }
        if !self.granule.is_power_of_two() {
            return Error::Granule { granule: self.granule };
        }
        Error::Boundary { boundary: self.boundary.unwrap_or(0) }
    }
}

/// Where slots are: an array of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    /// The address of the first one, a multiple of their size.
    pub(super) base: u64,
    /// The address of the last byte.
    pub(super) last: u64,
    pub(super) slot_lg2: u32,
    pub(super) slots: u32,
}

impl Grid {
    /// The address of a slot.
    #[inline(always)]
    pub(super) const fn addr(&self, slot: u32) -> u64 {
        self.base + ((slot as u64) << self.slot_lg2)
    }

    /// How many slots a request takes of which any run that long will do, and where in them the
    /// bytes are; `None` where more matters.
    #[inline(always)]
    pub(super) fn plain(&self, original: Span, request: &SlotRequest) -> Option<(u32, u64)> {
        let (keep_bits, rest) = (request.keep_bits, request.granule.wrapping_sub(1));
        let below = (keep_bits | rest) >> self.slot_lg2 == 0;
        // What `check` would refuse.
        let wrong = (keep_bits & keep_bits.wrapping_add(1)) | (request.granule & rest);
        if wrong != 0 || !(below && request.last >= self.last && request.boundary.is_none()) {
            return None;
        }
        let inner = original.paddr().get() & request.keep_bits;
        let above = inner.checked_add(original.len() - 1)? >> self.slot_lg2;
        let count = u32::try_from(above).ok()?.checked_add(1)?;
        (count <= self.slots).then_some((count, inner))
    }
}

/// Which runs of slots a request can have: arithmetic, once a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    grid: Grid,
    /// How many slots.
    pub(super) count: u32,
    /// The first one is so many more than a multiple of `step`, a power of two.
    residue: u32,
    step: u32,
    /// The highest first slot.
    highest: u32,
    /// Where in the run the bytes are.
    pub(super) inner: u64,
    /// The bytes behind the first one.
    above: u64,
    /// They cross no multiple of it; `None` where there is none in the grid.
    boundary: Option<u64>,
}

impl Fit {
    /// Where a slot for the original can be in an empty grid; `None` where that is nowhere.
    pub(super) fn new(grid: Grid, original: Span, request: &SlotRequest) -> Option<Self> {
        let &SlotRequest { keep_bits, granule, last, boundary } = request;
        let slot = lg2::size(grid.slot_lg2);
        // The bytes are `kept` behind a multiple of `align`, and the run begins `lead` behind it.
        let kept = original.paddr().get() & keep_bits;
        let align = keep_bits.checked_add(1)?.max(granule).max(slot);
        let lead = kept & !(granule.max(slot) - 1);
        let inner = kept - lead;
        let end = inner.checked_add(original.len())?;
        let whole = end.checked_add(granule - 1)? & !(granule - 1);
        let count = (whole.checked_add(slot - 1)?) >> grid.slot_lg2;
        let count = u32::try_from(count).ok().filter(|count| *count <= grid.slots)?;
        let residue = (lead.wrapping_sub(grid.base) & (align - 1)) >> grid.slot_lg2;
        let residue = u32::try_from(residue).ok().filter(|residue| *residue < grid.slots)?;
        // No two places are further apart than a grid can be long.
        let step = u32::try_from((align >> grid.slot_lg2).min(MAX_SLOTS.into())).ok()?;
        let above = original.len() - 1;
        let mut fit = Self {
            grid,
            count,
            residue,
            step,
            highest: grid.slots - count,
            inner,
            above,
            boundary: None,
        };
        if last < grid.last {
            let room = last.checked_sub(grid.base)?.checked_sub(inner.checked_add(above)?)?;
            let highest = u32::try_from(room >> grid.slot_lg2).unwrap_or(u32::MAX);
            fit.highest = fit.highest.min(highest);
        }
        if let Some(boundary) = boundary
            && (grid.base ^ grid.last) & !(boundary - 1) != 0
        {
            // The lowest offset from a boundary that the bytes can have.
            if (kept & (boundary - 1)).checked_add(above)? >= boundary {
                return None;
            }
            // Otherwise all offsets are the same.
            fit.boundary = Some(boundary).filter(|_| align < boundary);
        }
        fit.next(0).map(|_| fit)
    }

    /// Where the bytes are if the run begins with this slot.
    #[inline(always)]
    pub(super) const fn data(&self, first: u32) -> u64 {
        self.grid.addr(first) + self.inner
    }

    /// The first slot of the lowest run; there is one.
    pub(super) fn lowest(&self) -> u32 {
        self.next(0).unwrap_or(0)
    }

    /// Whether only the number of slots matters.
    #[inline(always)]
    pub(super) fn is_plain(&self) -> bool {
        self.step == 1 && self.boundary.is_none() && self.highest == self.grid.slots - self.count
    }

    /// The first slot from `from` on that a run can begin with.
    #[inline(always)]
    pub(super) fn next(&self, from: u32) -> Option<u32> {
        let mut first = self.aligned(from).filter(|first| *first <= self.highest)?;
        if let Some(boundary) = self.boundary {
            let data = self.data(first);
            let last = data + self.above;
            if (data ^ last) & !(boundary - 1) != 0 {
                // Behind the boundary it lies as close to it as it can.
                let behind = (last & !(boundary - 1)) - self.inner.min(last & !(boundary - 1));
                let from =
                    behind.saturating_sub(self.grid.base).div_ceil(lg2::size(self.grid.slot_lg2));
                first = self.aligned(u32::try_from(from).ok()?)?;
            }
        }
        (first <= self.highest).then_some(first)
    }

    #[inline(always)]
    fn aligned(&self, from: u32) -> Option<u32> {
        let ahead = self.residue.wrapping_sub(from) & (self.step - 1);
        from.checked_add(ahead)
    }

    /// The places, of 64 from slot `from` on, that alignment permits; `None` where it is no
    /// pattern of 64.
    #[inline(always)]
    pub(super) fn pattern(&self, from: u32) -> Option<u64> {
        if self.step > 64 {
            return None;
        }
        let ahead = self.residue.wrapping_sub(from) & (self.step - 1);
        // Every step-th bit from the lowest on.
        let every = u64::MAX / (u64::MAX >> (64 - self.step));
        Some(every << ahead)
    }

    /// The highest slot that a run can begin with.
    #[inline(always)]
    pub(super) const fn highest(&self) -> u32 {
        self.highest
    }
}

/// The longest slot that a grid has for every original; 0 where the request means nothing.
pub(super) fn longest(grid: Grid, request: &SlotRequest) -> u64 {
    let bytes = u64::from(grid.slots) << grid.slot_lg2;
    // Runs begin on such, and behind each they can begin on, the worst original has all lower kept
    // bits set.
    let unit = request.granule.max(lg2::size(grid.slot_lg2));
    if request.check().is_err() || request.keep_bits / unit > bytes / unit {
        // There are more than the grid has.
        return 0;
    }
    let mut longest = bytes;
    for number in 0..=request.keep_bits / unit {
        let worst = PhysAddr::new((number * unit) | (request.keep_bits & (unit - 1)));
        let fits = |len| {
            Span::new(worst, len).is_ok_and(|original| Fit::new(grid, original, request).is_some())
        };
        let (mut least, mut most) = (0, longest);
        if fits(longest) {
            continue;
        }
        while least < most {
            let middle = least + (most - least).div_ceil(2);
            if fits(middle) { least = middle } else { most = middle - 1 }
        }
        longest = least;
    }
    longest
}
