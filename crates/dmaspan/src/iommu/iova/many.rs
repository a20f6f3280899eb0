//! Many IOVAs are freed under few locks.

use super::{Raw, Space};
use crate::platform::Platform;
use crate::range::IovaRange;

/// How many are kept back at most.
const MANY: usize = 16;

/// Frees what is pushed, all of it at the latest when it is dropped.
///
/// It takes the flag of the CPU's magazines once for [`MANY`], where [`Space::free`] takes it for
/// each: a locked instruction costs as much as a quarter of an unmap.
pub(crate) struct FreeMany<'s, P: Platform> {
    space: &'s Space<P>,
    /// With the class of each.
    kept: [(IovaRange, u32); MANY],
    len: usize,
}

impl<P: Platform> Space<P> {
    /// Something to free many IOVAs by.
    #[inline(always)]
    pub(crate) fn free_many(&self) -> FreeMany<'_, P> {
        FreeMany { space: self, kept: [(self.aperture, 0); MANY], len: 0 }
    }
}

impl<P: Platform> FreeMany<'_, P> {
    /// As [`Space::free`], soon, of IOVAs of this space.
    #[inline(always)]
    pub(crate) fn push(&mut self, raw: Raw) {
        if self.len == MANY {
            self.free();
        }
        self.kept[self.len] = (raw.range, raw.class());
        self.len += 1;
    }

    #[inline(never)]
    fn free(&mut self) {
        let mut rest = &self.kept[..self.len];
        self.len = 0;
        while let Some(((range, class), more)) = rest.split_first() {
            // What the magazines take under one flag; of what has no room the first makes some.
            let put = self.space.put_many(rest);
            if put == 0 {
                self.space.free_shared(*range, *class);
                rest = more;
            } else {
                rest = &rest[put..];
            }
        }
    }
}

impl<P: Platform> Drop for FreeMany<'_, P> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.len > 0 {
            self.free();
        }
    }
}

impl<P: Platform> Space<P> {
    /// Puts free ranges into the magazines of this CPU, up to the first that has no room. Returns
    /// how many.
    #[inline(always)]
    fn put_many(&self, freed: &[(IovaRange, u32)]) -> usize {
        let Some(mut own) = self.own() else { return 0 };
        let has_room = |(range, class): &&(IovaRange, u32)| own.put(range.start().get(), *class);
        let put = freed.iter().take_while(has_room).count();
        if put > 0 {
            self.announce(&mut own);
        }
        put
    }
}
