//! A caller supplies memory here for lists that are chained.

use super::error::Error;
use crate::addr::DmaAddr;

/// Memory for a part of a list that a device reads: what it has there is written by
/// [`MemoryPageSize::write`](super::MemoryPageSize::write) and [`Sgl::write`](super::Sgl::write).
///
/// The last entry of every part but the last points to the next part.
#[derive(Debug)]
pub struct ListPage<'a, E> {
    /// Where the device finds it.
    pub addr: DmaAddr,
    /// Its entries, as the CPU writes them. What they have before does not matter.
    pub entries: &'a mut [E],
}

/// What a page of a list is in a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PagePosition {
    /// It ends with a pointer to the next one.
    Chained,
    /// All its entries are of data.
    Last,
}

/// How many of the pages `needed` entries of data take, each of which `check` has seen. It refuses
/// a page without entries that is to be chained.
#[inline(always)]
pub(super) fn pages_for<E>(
    list: &[ListPage<'_, E>],
    needed: usize,
    check: impl Fn(usize, &ListPage<'_, E>, PagePosition) -> Result<(), Error>,
) -> Result<usize, Error> {
    let mut room: usize = 0;
    for (n, page) in list.iter().enumerate() {
        let whole = room.saturating_add(page.entries.len());
        if needed <= whole {
            check(n, page, PagePosition::Last)?;
            return Ok(n + 1);
        }
        if n + 1 == list.len() {
            // Without the last page, where that has none, the one before needs no pointer.
            let without = if n > 0 { room + 1 } else { 0 };
            return Err(Error::Room { needed, room: whole.max(without) });
        }
        check(n, page, PagePosition::Chained)?;
        room = whole.saturating_sub(1);
    }
    Err(Error::Room { needed, room })
}
