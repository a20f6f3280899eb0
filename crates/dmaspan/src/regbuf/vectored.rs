//! Several ranges of a buffer, one behind the other.

use core::fmt;
use core::iter::FusedIterator;
use core::slice;

use super::buffer::{Buffer, MAX_IMPORT};
use super::error::ImportError;
use super::import::Import;
use crate::addr::Address;
use crate::prot::Direction;
use crate::range::UserRange;
use crate::span::Span;

/// Ranges of a buffer in the order in which they were given, as contiguous pieces. Pieces of ranges
/// that meet are not joined here: what makes descriptors of them does that.
#[derive(Clone)]
pub struct VectoredImport<'a, A: Address> {
    buffer: &'a Buffer<A>,
    ranges: slice::Iter<'a, UserRange>,
    current: Import<'a, A>,
    bytes: u64,
}

impl<'a, A: Address> VectoredImport<'a, A> {
    pub(super) fn new(
        buffer: &'a Buffer<A>,
        ranges: &'a [UserRange],
        direction: Direction,
    ) -> Result<Self, ImportError> {
        let mut bytes: u64 = 0;
        for range in ranges {
            let range = buffer.import_user(*range, direction)?;
            bytes = bytes.saturating_add(range.bytes());
        }
        // Last, as in `io_vec_fill_bvec` (Linux, io_uring/rsrc.c).
        if bytes > MAX_IMPORT {
            return Err(ImportError::TooLongTogether { limit: MAX_IMPORT });
        }
        let current = Import::new(buffer.segments(), 0, 0);
        Ok(Self { buffer, ranges: ranges.iter(), current, bytes })
    }

    /// Returns how many bytes are left.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl<A: Address> Iterator for VectoredImport<'_, A> {
    type Item = Span<A>;

    #[inline]
    fn next(&mut self) -> Option<Span<A>> {
        loop {
            if let Some(span) = self.current.next() {
                self.bytes -= span.len();
                return Some(span);
            }
            let range = self.ranges.next()?;
            // `new` has looked: it is in the buffer.
            let offset = range.start().get() - self.buffer.user().start().get();
            self.current = self.buffer.segments().import(offset, range.checked_len()?).ok()?;
        }
    }
}

impl<A: Address> FusedIterator for VectoredImport<'_, A> {}

impl<A: Address> fmt::Debug for VectoredImport<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone()).finish()
    }
}
