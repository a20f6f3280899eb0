//! [`OneThread`] is the smallest [`Platform`].

use dmaspan::Platform;

/// A machine with one thread, whose clock stands still.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OneThread;

impl Platform for OneThread {
    type Lock = parking_lot::RawMutex;

    #[inline]
    fn cpu(&self) -> usize {
        0
    }

    #[inline]
    fn now(&self) -> u64 {
        0
    }
}
