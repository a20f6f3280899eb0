//! A driver reads and writes the words of a structure here, by their index.

use core::mem;
use core::sync::atomic::{AtomicU64, Ordering};

use dmaspan::PhysAddr;

use crate::host::{Host, NoMemory, Structure};

/// A structure that hardware was told of, or will be. Dropped, it leaks: it is given back with
/// [`free`](Self::free), by who knows that hardware does not use it. Once it was given back in its
/// place it has no words.
#[derive(Debug)]
pub(crate) struct Words<S>(Option<S>);

impl<S: Structure> Words<S> {
    /// A structure of `2^lg2_size` bytes, zeroed, that ends at `max_paddr` or below.
    pub(crate) fn new<H: Host<Structure = S>>(
        host: &H,
        lg2_size: u32,
        max_paddr: PhysAddr,
    ) -> Result<Self, NoMemory> {
        host.allocate(lg2_size, max_paddr).map(|structure| Self(Some(structure)))
    }

    /// Where hardware finds it.
    pub(crate) fn paddr(&self) -> PhysAddr {
        self.0.as_ref().map_or(PhysAddr::new(0), Structure::paddr)
    }

    /// The word with that index, as hardware left it. 0 behind the end.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> u64 {
        self.word(index).map_or(0, |word| u64::from_le(word.load(Ordering::Acquire)))
    }

    /// Stores a word; what was stored before is seen before it. Nothing behind the end.
    #[inline]
    pub(crate) fn set(&self, index: usize, value: u64) {
        if let Some(word) = self.word(index) {
            word.store(value.to_le(), Ordering::Release);
        }
    }

    /// Gives the memory back. Hardware does not use it any more.
    pub(crate) fn free(mut self) {
        self.free_in_place();
    }

    /// The same, for what is part of something else.
    pub(crate) fn free_in_place(&mut self) {
        drop(self.0.take());
    }

    #[inline]
    fn word(&self, index: usize) -> Option<&AtomicU64> {
        self.0.as_ref()?.words().get(index)
    }
}

impl<S> Drop for Words<S> {
    fn drop(&mut self) {
        mem::forget(self.0.take());
    }
}
