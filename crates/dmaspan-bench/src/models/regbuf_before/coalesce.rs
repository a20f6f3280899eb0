//! The pages that one bvec stands for (`io_check_coalesce_buffer`, `io_coalesce_buffer`).

use dmaspan::{PhysAddr, lg2};

use super::buffer::BvecBefore;
use super::folio::FolioBefore;
use super::{PAGE, PAGE_LG2, RegbufBeforeError};

/// Which pages become one bvec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Coalescing {
    /// None: a bvec for each page, as in Linux 6.2.
    None,
    /// All pages of the buffer where they are neighbours in one large folio, else none: as in
    /// Linux 6.3.
    SingleHugepage,
    /// The pages of each folio where all folios are large and of the same size, each begins where
    /// the last one ends, and only the first is entered in its middle and the last left early; else
    /// none: as in Linux 7.2.
    SameFolios,
}

/// The largest folio of one bvec, whose length has 32 bits.
const MAX_ORDER: u32 = 31 - PAGE_LG2;

/// What each bvec stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Pages,
    /// A folio of `2^order` pages; the first is entered `first` pages behind its beginning.
    Folios {
        order: u32,
        first: u64,
    },
}

impl Shape {
    /// log2 of the bytes of a bvec in the middle.
    pub(super) fn size_lg2(self) -> u32 {
        match self {
            Self::Pages => PAGE_LG2,
            Self::Folios { order, .. } => order + PAGE_LG2,
        }
    }
}

/// How the pages of a buffer become bvecs.
pub(super) fn shape(
    pages: &[PhysAddr],
    folios: &impl Fn(PhysAddr) -> FolioBefore,
    coalescing: Coalescing,
) -> Shape {
    let (first, rest) = match pages {
        [first, rest @ ..] if !rest.is_empty() => (*first, rest),
        // One page is one bvec anyway.
        _ => return Shape::Pages,
    };
    let folio = match coalescing {
        Coalescing::None => return Shape::Pages,
        Coalescing::SingleHugepage | Coalescing::SameFolios => folios(first),
    };
    let coalesced = (1..=MAX_ORDER).contains(&folio.order)
        && match coalescing {
            Coalescing::SameFolios => are_same_folios(first, rest, folio, folios),
            _ => end_of_run(first, rest, folio).1.is_empty(),
        };
    if !coalesced {
        return Shape::Pages;
    }
    let first = (first.get() & lg2::mask(folio.size_lg2())) >> PAGE_LG2;
    Shape::Folios { order: folio.order, first }
}

/// The last page of the run of neighbours in a folio that `first` begins, and what follows.
#[inline]
fn end_of_run(first: PhysAddr, rest: &[PhysAddr], folio: FolioBefore) -> (PhysAddr, &[PhysAddr]) {
    let mut last = first;
    for (at, page) in rest.iter().enumerate() {
        if *page != last.wrapping_add(PAGE) || !folio.has(*page) {
            return (last, &rest[at..]);
        }
        last = *page;
    }
    (last, &[])
}

/// Whether each run of neighbours but the last ends with its folio, and each but the first begins
/// with one of the same size.
fn are_same_folios(
    mut first: PhysAddr,
    mut rest: &[PhysAddr],
    mut folio: FolioBefore,
    folios: &impl Fn(PhysAddr) -> FolioBefore,
) -> bool {
    let (order, last_in_folio) = (folio.order, folio.pages() - 1);
    loop {
        let (last, behind) = end_of_run(first, rest, folio);
        let Some((next, behind)) = behind.split_first() else { return true };
        if last != folio.head.wrapping_add(last_in_folio << PAGE_LG2) {
            return false;
        }
        folio = folios(*next);
        if folio.order != order || folio.head != *next {
            return false;
        }
        (first, rest) = (*next, behind);
    }
}

/// The bvecs of `len` bytes from `offset` into the first page on.
pub(super) fn bvecs(
    pages: &[PhysAddr],
    shape: Shape,
    offset: u64,
    len: u64,
) -> Result<Box<[BvecBefore]>, RegbufBeforeError> {
    let size = lg2::size(shape.size_lg2());
    // Of the first bvec, and where the page is that the second begins with.
    let (head, offset, second) = match shape {
        Shape::Pages => (pages.first().copied(), offset, 1),
        Shape::Folios { order, first } => {
            let head = pages.first().map(|page| PhysAddr::new(page.get() - (first << PAGE_LG2)));
            (head, offset + (first << PAGE_LG2), lg2::size(order) - first)
        }
    };
    let count = (offset + len).div_ceil(size);
    let no_memory = RegbufBeforeError::NoMemory { bytes: count.saturating_mul(16) };
    let mut bvecs = Vec::new();
    let room = usize::try_from(count).map_err(|_| no_memory)?;
    bvecs.try_reserve_exact(room).map_err(|_| no_memory)?;
    let second = usize::try_from(second).map_err(|_| no_memory)?;
    let step = usize::try_from(size >> PAGE_LG2).map_err(|_| no_memory)?;
    let others = pages.get(second..).unwrap_or_default().iter().copied().step_by(step);
    let (mut offset, mut left) = (offset, len);
    for page in head.into_iter().chain(others) {
        let len = (size - offset).min(left);
        // Both are below 2^32: so is the largest size.
        let small = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        bvecs.push(BvecBefore { page, len: small(len), offset: small(offset) });
        left -= len;
        offset = 0;
    }
    Ok(bvecs.into_boxed_slice())
}
