//! A [`Single`] is one map of a space, with what has to be kept while it is there.

use std::fmt;
use std::mem;
use std::sync::Arc;

use dmaspan::{IovaRange, Label, Prot, UserRange};

use super::book::{ListedMap, MapKind, MapState};
use super::mapper::{Inner, MemorySpace};
use super::places::{PlacedIovas, Wanted};
use super::{MapError, NotUnmapped};
use crate::log;

/// One map. Dropped, it unmaps; what the space does not unmap is leaked, with what it keeps.
pub(super) struct Single<S: MemorySpace, K: Clone> {
    inner: Arc<Inner<S>>,
    range: IovaRange,
    /// `None` where it was unmapped or leaked.
    place: Option<PlacedIovas>,
    keep: K,
}

/// What is mapped, what devices may do with it, and what is listed of it.
pub(super) type SingleMap = (Wanted, Prot, MapKind, Label);

impl<S: MemorySpace, K: Clone> Single<S, K> {
    /// Finds IOVAs and lets `map` map there.
    pub(super) fn map(
        inner: &Arc<Inner<S>>,
        (wanted, prot, kind, label): SingleMap,
        keep: K,
        map: impl FnOnce(&S, &K, IovaRange) -> Result<(), S::Error>,
    ) -> Result<Self, MapError<S::Error>> {
        let place = inner.place(wanted)?;
        let (range, user) = (place.range, wanted.user);
        let state = MapState::Planned;
        inner.book.add([ListedMap { range, user, prot, kind, label, state }]);
        match map(&inner.space, &keep, range) {
            Ok(()) => {
                inner.count_mapped(range);
                inner.book.set(range, MapState::Mapped);
                Ok(Self { inner: Arc::clone(inner), range, place: Some(place), keep })
            }
            Err(source) => {
                inner.free(place);
                let user: UserRange = wanted.user;
                Err(MapError::Refused { user, iova: range, source })
            }
        }
    }

    /// Where the device sees it.
    pub(super) fn range(&self) -> IovaRange {
        self.range
    }

    /// What it keeps.
    pub(super) fn kept(&self) -> &K {
        &self.keep
    }

    /// Unmaps it, unless it was.
    pub(super) fn unmap(&mut self) -> Result<(), NotUnmapped<S::Error>> {
        if self.place.is_none() {
            return Ok(());
        }
        self.inner.unmap(self.range)?;
        if let Some(place) = self.place.take() {
            self.inner.free(place);
        }
        Ok(())
    }

    /// Gives it up; how many bytes.
    pub(super) fn leak(&mut self) -> u64 {
        let Some(place) = self.place.take() else { return 0 };
        mem::forget(self.keep.clone());
        self.inner.book.set(self.range, MapState::Leaked);
        drop(place);
        let bytes = self.range.len_less_one().saturating_add(1);
        self.inner.count_leaked(bytes);
        log::warn!(
            "{} was not unmapped and leaks, so that a device may go on using what is there",
            self.range
        );
        bytes
    }
}

impl<S: MemorySpace, K: Clone> Drop for Single<S, K> {
    fn drop(&mut self) {
        if self.unmap().is_err() {
            self.leak();
        }
    }
}

impl<S: MemorySpace, K: Clone> fmt::Debug for Single<S, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Single").field("range", &self.range).finish_non_exhaustive()
    }
}
