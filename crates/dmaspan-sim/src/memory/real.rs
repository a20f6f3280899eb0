//! Bytes that a program reaches by a pointer, as it does a kernel's memory or its own.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// Bytes to a page.
const PAGE: usize = 4096;

#[repr(align(4096))]
#[derive(Debug)]
struct Page([AtomicU8; PAGE]);

/// Memory of this process that stands for simulated frames: what is written by the pointer is in
/// the frames, and the other way round. Clones are the same memory.
#[derive(Clone, Debug)]
pub(crate) struct RealBytes(Arc<[Page]>);

impl RealBytes {
    /// Zeros.
    pub(super) fn new(len: usize) -> Self {
        let page = || Page([const { AtomicU8::new(0) }; PAGE]);
        Self((0..len.div_ceil(PAGE)).map(|_| page()).collect())
    }

    /// Where the program reaches the byte at an offset, and those behind it.
    pub(crate) fn start_at(&self, offset: usize) -> Option<NonNull<u8>> {
        let first = NonNull::from(&*self.0).cast::<u8>();
        NonNull::new(first.as_ptr().wrapping_add(offset)).filter(|_| offset < self.0.len() * PAGE)
    }

    fn bytes(&self, offset: usize) -> impl Iterator<Item = &AtomicU8> {
        let (page, within) = (offset / PAGE, offset % PAGE);
        self.0[page..].iter().flat_map(|page| &page.0).skip(within)
    }

    pub(super) fn read(&self, offset: usize, buf: &mut [u8]) {
        for (to, from) in buf.iter_mut().zip(self.bytes(offset)) {
            *to = from.load(Ordering::Relaxed);
        }
    }

    pub(super) fn write(&self, offset: usize, buf: &[u8]) {
        for (from, to) in buf.iter().zip(self.bytes(offset)) {
            to.store(*from, Ordering::Relaxed);
        }
    }
}
