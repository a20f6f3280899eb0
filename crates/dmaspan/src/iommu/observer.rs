//! An [`Observer`] hears what a domain does, and [`Observed`] lets it.

use alloc::sync::Arc;

use super::event::Event;
use super::ops::{DriverOps, HardwareError, Invalidation, IommuOps};
use crate::addr::PhysAddr;
use crate::io_pgtable::TableRoot;
use crate::promise::Promise;
use crate::range::IovaRange;

/// Hears what a domain does, for tools that watch: nothing depends on it.
pub trait Observer: Send + Sync {
    /// The domain did this, or was asked for it.
    ///
    /// # Context
    ///
    /// Called where memory is mapped and unmapped, perhaps with interrupts off. It calls nothing of
    /// the domain.
    fn event(&self, event: &Event<'_>);
}

impl<W: Observer + ?Sized> Observer for &W {
    fn event(&self, event: &Event<'_>) {
        (**self).event(event);
    }
}

impl<W: Observer + ?Sized> Observer for Arc<W> {
    fn event(&self, event: &Event<'_>) {
        (**self).event(event);
    }
}

/// The hooks of an IOMMU driver for a domain that `W` observes. Two observers are one around the
/// other.
///
/// A domain whose hooks are not observed pays nothing for observers.
#[derive(Clone, Debug)]
pub struct Observed<O, W> {
    inner: O,
    observer: W,
}

impl<O, W> Observed<O, W> {
    /// `inner`, whose domain `observer` hears.
    pub const fn new(inner: O, observer: W) -> Self {
        Self { inner, observer }
    }

    /// Returns what is observed.
    pub const fn inner(&self) -> &O {
        &self.inner
    }

    /// Returns what hears it.
    pub const fn observer(&self) -> &W {
        &self.observer
    }
}

#[expect(unsafe_code, reason = "everything but the events is the inner driver's")]
// SAFETY: every hook calls the inner driver's with the same arguments and answers what it answered.
unsafe impl<O: IommuOps, W: Observer> IommuOps for Observed<O, W> {
    type Address = O::Address;

    fn begin(&self, promise: Promise<'_>, root: &TableRoot) -> Result<(), HardwareError> {
        self.inner.begin(promise, root)
    }

    #[inline]
    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.inner.invalidate(what)
    }

    #[inline]
    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.inner.sync_map(range)
    }

    fn root_changed(
        &self,
        promise: Promise<'_>,
        current: &dyn Fn() -> (PhysAddr, u32),
    ) -> Result<(), HardwareError> {
        self.inner.root_changed(promise, current)
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.inner.detach()
    }

    fn observe(&self, event: &Event<'_>) {
        self.observer.event(event);
        self.inner.observe(event);
    }

    #[inline]
    fn max_ranges(&self) -> usize {
        self.inner.max_ranges()
    }
}

#[expect(unsafe_code, reason = "everything but the events is the inner driver's")]
// SAFETY: every hook asks the inner one's, and answers what it answered.
unsafe impl<O: DriverOps, W: Observer> DriverOps for Observed<O, W> {
    type Driver = O::Driver;

    fn driver(&self) -> &O::Driver {
        self.inner.driver()
    }
}
