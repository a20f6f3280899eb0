//! A domain changes here what is mapped, where it is: permissions, leaves, and hardware's marks.

use super::domain::{Domain, Error, Unsynced};
use super::event::Event;
use super::gather::SyncFailed;
use super::ops::{HardwareError, IommuOps};
use crate::addr::Iova;
use crate::io_pgtable::{
    self, DirtyBitmap, Format, Gap, Rest, Retired, SplitFailed, TableMemory, UnmappedSpans,
};
use crate::prot::Prot;
use crate::range::IovaRange;
use crate::span::SpanBuf;

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> Domain<F, M, O> {
    /// Makes `at` the border between two leaves, so that what lies before it and what lies behind
    /// can be unmapped apart. The leaf around it is split as little as that takes: tables are built
    /// first, then put in its place, and hardware forgets the large leaf. Where `at` is a border
    /// already nothing is done.
    ///
    /// Hardware for which a leaf must be broken before it is made anew (Arm without FEAT_BBM level
    /// 2) has no translation in between: that needs [`Gap::Accept`].
    ///
    /// # Errors
    ///
    /// With translations as before: [`Hole`](io_pgtable::Error::Hole),
    /// [`NoTables`](io_pgtable::Error::NoTables), [`Misaligned`](io_pgtable::Error::Misaligned),
    /// [`OutsideAperture`](io_pgtable::Error::OutsideAperture),
    /// [`NeedsBreak`](io_pgtable::Error::NeedsBreak), and
    /// [`WouldSplit`](io_pgtable::Error::WouldSplit) for a leaf that the format has no smaller ones
    /// for at some level on the way, as AMD's has none of 512G. [`Error::Hardware`]
    /// where hardware was not seen to forget the leaf, which it may go on to use: the translations
    /// are the same.
    ///
    /// # Safety
    ///
    /// The caller owns the whole leaf around `at`: until the call returns nobody else maps, unmaps
    /// or rewrites anything there.
    #[expect(unsafe_code, reason = "the caller promises to own the leaf")]
    #[track_caller]
    pub unsafe fn split(&self, at: Iova, gap: Gap) -> Result<(), Error> {
        self.split_owned(at, gap)
    }

    /// [`split`](Self::split), for callers that keep its contract.
    #[track_caller]
    pub(super) fn split_owned(&self, at: Iova, gap: Gap) -> Result<(), Error> {
        let aperture = self.geometry().aperture;
        if !aperture.contains(at) {
            let range = IovaRange::point(at);
            return Err(io_pgtable::Error::OutsideAperture { range, aperture }.into());
        }
        self.table().split(at, gap, |retired| self.forget(retired, None)).map_err(|failed| {
            match failed {
                SplitFailed::Table(error) => error.into(),
                SplitFailed::Sync(source) => {
                    Error::Hardware { range: IovaRange::point(at), source }
                }
            }
        })
    }

    /// Gives all of `range` the permissions and memory type `prot`, and makes hardware forget the
    /// old ones: see [`Owned::protect`](io_pgtable::Owned::protect). With [`Gap::Accept`]
    /// leaves are broken and made anew where hardware demands it.
    ///
    /// # Errors
    ///
    /// [`Error::Table`], with nothing changed. [`Error::Hardware`] where hardware was not seen to
    /// forget: the range has old and new permissions then, and devices may use either.
    ///
    /// # Safety
    ///
    /// 1. The caller owns the range: until the call returns nobody else maps, unmaps or rewrites
    ///    anything there.
    /// 2. What [`map_spans`](Self::map_spans) asks for the memory holds for `prot` too.
    #[expect(unsafe_code, reason = "may let a device write at raw physical addresses")]
    #[track_caller]
    pub unsafe fn protect(&self, range: IovaRange, prot: Prot, gap: Gap) -> Result<(), Error> {
        let hardware = |source| Error::Hardware { range, source };
        match self.all().protect(range, prot) {
            Ok(retired) => self.forget(retired, Some(prot)).map_err(hardware),
            Err(io_pgtable::Error::NeedsBreak { .. }) if gap == Gap::Accept => self
                .table()
                .protect_broken(range, prot, |retired| self.forget(retired, Some(prot)))
                // What was made anew is announced as a new mapping is.
                .and_then(|()| self.ops().sync_map(range))
                .map_err(hardware),
            Err(error) => Err(error.into()),
        }
    }

    /// Sets the bits of `bitmap` for what devices wrote in `range` since it was mapped or last
    /// read, takes the marks away and syncs: see
    /// [`Owned::read_and_clear_dirty`](io_pgtable::Owned::read_and_clear_dirty).
    ///
    /// # Errors
    ///
    /// [`Error::Table`] with nothing changed. [`Error::Hardware`] where hardware was not seen to
    /// forget: the bits are set, but what devices write from now on may go unnoticed.
    ///
    /// # Safety
    ///
    /// The caller owns the range: until the call returns nobody else maps, unmaps or rewrites
    /// anything there.
    #[expect(unsafe_code, reason = "the caller promises to own the range")]
    #[track_caller]
    pub unsafe fn read_and_clear_dirty(
        &self,
        range: IovaRange,
        bitmap: &mut DirtyBitmap<'_>,
    ) -> Result<(), Error> {
        let retired = self.all().read_and_clear_dirty(range, bitmap)?;
        self.forget(retired, None).map_err(|source| Error::Hardware { range, source })
    }

    /// [`unmap`](Self::unmap) that also sets the bits of `bitmap` for what devices wrote until the
    /// translation was gone: see [`Owned::unmap_dirty`](io_pgtable::Owned::unmap_dirty).
    ///
    /// # Errors
    ///
    /// [`Error::Table`], with nothing changed.
    ///
    /// # Safety
    ///
    /// As for [`unmap`](Self::unmap).
    #[expect(unsafe_code, reason = "the caller promises to own the range")]
    #[track_caller]
    pub unsafe fn unmap_dirty(
        &self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
        bitmap: &mut DirtyBitmap<'_>,
    ) -> Result<Unsynced<'_, F, M, O>, Error> {
        Ok(self.guard(self.all().unmap_dirty(range, buf, bitmap)?))
    }

    /// Goes on with an [`unmap_dirty`](Self::unmap_dirty) whose buffer became full.
    ///
    /// # Safety
    ///
    /// As for [`unmap`](Self::unmap), for the rest of its range.
    #[expect(unsafe_code, reason = "the caller promises to own the range")]
    #[track_caller]
    pub unsafe fn resume_dirty(
        &self,
        rest: Rest,
        buf: &mut SpanBuf<'_>,
        bitmap: &mut DirtyBitmap<'_>,
    ) -> Unsynced<'_, F, M, O> {
        self.guard(self.all().resume_dirty(rest, buf, bitmap))
    }

    /// Calls `found` with every leaf in a range that the caller owns that devices wrote, and takes
    /// the marks of those away that `clears` says. The result is to be synced.
    #[track_caller]
    pub(crate) fn visit_dirty(
        &self,
        range: IovaRange,
        clears: impl Fn(IovaRange) -> bool,
        found: impl FnMut(IovaRange),
    ) -> Retired<M::List> {
        let retired = self.all().visit_dirty(range, clears, found);
        if let Some(range) = retired.range {
            self.ops().observe(&Event::Rewritten { range, prot: None });
        }
        retired
    }

    /// [`unmap_next`](Self::unmap_next) with the marks, where the format has any.
    #[track_caller]
    pub(crate) fn unmap_next_dirty(
        &self,
        rest: Rest,
        buf: &mut SpanBuf<'_>,
        bitmap: &mut DirtyBitmap<'_>,
    ) -> UnmappedSpans<M::List> {
        let unmapped = self.all().resume_dirty(rest, buf, bitmap);
        self.unmapped(&unmapped.retired);
        unmapped
    }

    /// [`take_away`](Self::take_away) with the marks.
    #[track_caller]
    pub(crate) fn take_away_dirty(
        &self,
        range: IovaRange,
        bitmap: &mut DirtyBitmap<'_>,
    ) -> Retired<M::List> {
        let retired = self.all().remove_dirty(range, bitmap);
        self.unmapped(&retired);
        retired
    }

    /// Makes hardware forget what was rewritten. No tables are in it.
    #[track_caller]
    fn forget(&self, retired: Retired<M::List>, prot: Option<Prot>) -> Result<(), HardwareError> {
        if let Some(range) = retired.range {
            self.ops().observe(&Event::Rewritten { range, prot });
        }
        let mut gather = self.gather();
        self.add_own(&mut gather, retired);
        match self.sync_own(gather) {
            Ok(()) => Ok(()),
            Err(SyncFailed { error, .. }) => Err(error),
        }
    }
}
