//! Words of a structure by their index.

use core::mem::ManuallyDrop;
use core::sync::atomic::Ordering;

use dmaspan::PhysAddr;

use crate::host::{Host, NoMemory, Structure};

/// A structure that hardware was told of, or will be. Dropped, it leaks: it is given back with
/// [`free`](Self::free), by who knows that hardware does not use it.
#[derive(Debug)]
pub(crate) struct Words<S>(ManuallyDrop<S>);

impl<S: Structure> Words<S> {
    /// A structure of `2^lg2_size` bytes, zeroed, that ends at `max_paddr` or below.
    pub(crate) fn new<H: Host<Structure = S>>(
        host: &H,
        lg2_size: u32,
        max_paddr: PhysAddr,
    ) -> Result<Self, NoMemory> {
        host.allocate(lg2_size, max_paddr).map(|structure| Self(ManuallyDrop::new(structure)))
    }

    /// Where hardware finds it.
    pub(crate) fn paddr(&self) -> PhysAddr {
        self.0.paddr()
    }

    /// The word with that index, as hardware left it. 0 behind the end.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> u64 {
        self.0.words().get(index).map_or(0, |word| u64::from_le(word.load(Ordering::Acquire)))
    }

    /// Stores a word; what was stored before is seen before it. Nothing behind the end.
    #[inline]
    pub(crate) fn set(&self, index: usize, value: u64) {
        if let Some(word) = self.0.words().get(index) {
            word.store(value.to_le(), Ordering::Release);
        }
    }

    /// Gives the memory back. Hardware does not use it any more.
    pub(crate) fn free(self) {
        drop(ManuallyDrop::into_inner(self.0));
    }
}
