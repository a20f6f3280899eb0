//! A [`Taking`] waits for a slice.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::FixedBuf;
use crate::sys::slices::Slices;

/// A slice that is waited for, as a future of no runtime in particular: see
/// [`FixedPool::take_async`](super::FixedPool::take_async).
///
/// Dropped, it waits no more; if it was woken for a slice, the next one is.
#[must_use = "nothing is taken before it is awaited"]
pub struct Taking {
    slices: Arc<Slices>,
    /// Its place among those who wait.
    place: Option<u64>,
}

impl Taking {
    pub(super) fn new(slices: Arc<Slices>) -> Self {
        Self { slices, place: None }
    }
}

impl Future for Taking {
    type Output = FixedBuf;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<FixedBuf> {
        let Self { slices, place } = &mut *self;
        slices.poll_take(place, context).map(FixedBuf::new)
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        self.slices.stop_waiting(self.place);
    }
}

impl fmt::Debug for Taking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (slices, free) = (self.slices.count(), self.slices.free());
        f.debug_struct("Taking").field("slices", &slices).field("free", &free).finish()
    }
}
