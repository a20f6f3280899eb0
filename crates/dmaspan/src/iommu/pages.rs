//! Mapping and unmapping by pages of one size, as far as it goes: what a driver that was written
//! for Linux asks of its domain.

use core::fmt;

use super::domain::{Domain, Error, Unsynced};
use super::event::Event;
use super::gather::Gather;
use super::ops::IommuOps;
use crate::addr::{Iova, PhysAddr};
use crate::io_pgtable::{self, Format, Gap, TableMemory, UnmappedPages, UnmappedSpans};
use crate::prot::Prot;
use crate::range::IovaRange;
use crate::span::Span;

/// Says how far a [`Domain::map_pages`] came.
#[derive(Debug)]
#[must_use = "bytes that were mapped before an error stay mapped"]
pub struct MappedPages<L> {
    /// Bytes that are mapped, from the first page on: hardware knows of them.
    pub bytes: u64,
    /// Why it stopped before the last page.
    pub result: Result<(), Error>,
    /// What hardware may use still of what was taken back: set only where that could not be synced.
    /// Then the memory stays pinned until a sync of it succeeds.
    pub unsynced: Option<Gather<L>>,
}

/// Says how far a [`Domain::unmap_pages`] came.
#[must_use = "devices may use the memory until it is synced"]
pub struct TakenPages<'d, F: Format, M: TableMemory<F::Word>, O: IommuOps> {
    /// Bytes that were taken away, from the first page on.
    pub bytes: u64,
    /// Why it stopped before the last page.
    pub result: Result<(), Error>,
    /// What is to be synced before the memory is released: dropped, it syncs at once.
    pub unsynced: Unsynced<'d, F, M, O>,
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> fmt::Debug for TakenPages<'_, F, M, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, result, unsynced } = self;
        f.debug_struct("TakenPages")
            .field("bytes", bytes)
            .field("result", result)
            .field("unsynced", unsynced)
            .finish()
    }
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> Domain<F, M, O> {
    /// Maps `page_count` pages of `page_size` bytes from `iova` on to contiguous memory at `paddr`,
    /// in one walk, and tells hardware that caches absent entries. It stops where a page
    /// cannot be mapped, or before, where it sees that ahead. What was mapped until then stays, for
    /// the caller to keep or to unmap, as Linux's `map_pages` leaves it (struct iommu_domain_ops,
    /// include/linux/iommu.h).
    ///
    /// Where nothing else than pages of one size is wanted, and all of them or none,
    /// [`map_spans`](Self::map_spans) needs no unmap behind a failure.
    ///
    /// # Errors
    ///
    /// In `result`: [`Error::Table`] for the page that was refused; a bad argument maps nothing.
    /// [`Error::Hardware`] where hardware did not take what was mapped: all of it is taken back,
    /// and `bytes` is 0.
    ///
    /// # Safety
    ///
    /// As for [`map_spans`](Self::map_spans), for all pages that are asked for.
    #[expect(unsafe_code, reason = "lets a device at raw physical addresses")]
    #[track_caller]
    pub unsafe fn map_pages(
        &self,
        iova: Iova,
        paddr: PhysAddr,
        page_size: u64,
        page_count: u64,
        prot: Prot,
    ) -> MappedPages<M::List> {
        let pages = |from: u64| {
            let (iova, paddr) = (iova.wrapping_add(from), paddr.wrapping_add(from));
            self.all().map_pages(iova, paddr, page_size, page_count - from / page_size, prot)
        };
        let mut unsynced = None;
        let (mut bytes, result) = match self.all().check_pages(iova, page_size, page_count) {
            Ok(_) => pages(0),
            Err(error) => (0, Err(error)),
        };
        let mut result = result.map_err(Error::from);
        if let Err(Error::Table(io_pgtable::Error::EmptyTable { .. })) = result
            && let Ok(rest) = IovaRange::from_len(
                iova.wrapping_add(bytes),
                // Without overflow, as was checked.
                page_size * page_count - bytes,
            )
        {
            // Empty tables are in the way of larger pages. They leave, hardware forgets them, and
            // nobody else makes new ones in the caller's range.
            result = match self.make_room(rest) {
                Ok(()) => {
                    let (more, result) = pages(bytes);
                    bytes += more;
                    result.map_err(Error::from)
                }
                Err(failed) => {
                    unsynced = failed.unsynced;
                    Err(failed.error)
                }
            };
        }
        let Ok(range) = IovaRange::from_len(iova, bytes) else {
            return MappedPages { bytes: 0, result, unsynced };
        };
        let span = Span::new(paddr, bytes).ok();
        self.ops().observe(&Event::Mapped { range, spans: span.as_slice(), prot });
        match self.sync_map(range) {
            Ok(()) => MappedPages { bytes, result, unsynced },
            Err(failed) => {
                let unsynced = match (unsynced, failed.unsynced) {
                    (Some(mut gather), Some(more)) => {
                        self.merge_own(&mut gather, more);
                        Some(gather)
                    }
                    (one, other) => one.or(other),
                };
                MappedPages { bytes: 0, result: Err(failed.error), unsynced }
            }
        }
    }

    /// Takes up to `page_count` pages of `page_size` bytes from `iova` on away, whatever leaves map
    /// them, in one walk, as Linux's `unmap_pages` does. It stops at the first hole. Which memory
    /// they led to is for the caller to know; [`unmap`](Self::unmap) tells it.
    ///
    /// A leaf that reaches out of the range ends the unmap, and stays: `split` is `None`. Otherwise
    /// both ends of the range become borders of leaves first, as by [`split`](Self::split), which
    /// says what a gap is; what of the leaves lies outside stays mapped.
    ///
    /// # Errors
    ///
    /// In `result`, beside what was done before: [`Hole`](io_pgtable::Error::Hole), and
    /// [`WouldSplit`](io_pgtable::Error::WouldSplit) for a leaf that reaches out. A bad argument
    /// changes nothing. Where an end cannot be made a border, nothing is taken away, for the
    /// reasons of [`split`](Self::split), and the other end may be one.
    ///
    /// # Safety
    ///
    /// The caller owns the IOVAs, and with `split` also all of the leaves that the range cuts:
    /// until the call returns nobody else maps, unmaps or rewrites anything there.
    #[expect(unsafe_code, reason = "the caller promises to own the range")]
    #[track_caller]
    pub unsafe fn unmap_pages(
        &self,
        iova: Iova,
        page_size: u64,
        page_count: u64,
        split: Option<Gap>,
    ) -> TakenPages<'_, F, M, O> {
        let cut = match split {
            Some(gap) => self.cut(iova, page_size, page_count, gap),
            None => Ok(()),
        };
        let (taken, result) = match cut {
            Ok(()) => {
                let UnmappedPages { bytes, result, retired } =
                    self.all().unmap_pages(iova, page_size, page_count);
                ((bytes, retired), result.map_err(Error::from))
            }
            Err(error) => ((0, io_pgtable::Retired::nothing()), Err(error)),
        };
        let (bytes, retired) = taken;
        let unsynced = self.guard(UnmappedSpans { retired, rest: None });
        TakenPages { bytes, result, unsynced }
    }

    /// Makes both ends of a range of pages borders of leaves. A hole at one of them is one.
    #[track_caller]
    fn cut(&self, iova: Iova, page_size: u64, page_count: u64, gap: Gap) -> Result<(), Error> {
        let (range, _) = self.all().check_pages(iova, page_size, page_count)?;
        let aperture = self.geometry().aperture;
        let behind = range.last().checked_add(1).filter(|at| aperture.contains(*at));
        for at in [Some(iova), behind].into_iter().flatten() {
            match self.split_owned(at, gap) {
                Ok(()) | Err(Error::Table(io_pgtable::Error::Hole { .. })) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
