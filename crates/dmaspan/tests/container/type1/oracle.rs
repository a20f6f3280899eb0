//! Linux's answers, written down once more: plain checks over a list of mappings.

use dmaspan::Errno;

use super::world::{PAGE, PAGES, USER};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Map {
    pub(super) argsz: u32,
    pub(super) flags: u32,
    pub(super) vaddr: u64,
    pub(super) iova: u64,
    pub(super) size: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unmap {
    pub(super) argsz: u32,
    pub(super) flags: u32,
    pub(super) iova: u64,
    pub(super) size: u64,
}

/// A container of pages of 4 KiB and one client with [`PAGES`] pages at [`USER`].
#[derive(Clone, Debug)]
pub(super) struct Oracle {
    pub(super) v2: bool,
    /// The last address of the domain; without one nothing is pinned and every address is fine.
    pub(super) domain: Option<u64>,
    pub(super) max_mappings: usize,
    pub(super) mapped: Vec<Mapping>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    first: u64,
    last: u64,
    /// Its memory has no address.
    invalid: bool,
}

impl Mapping {
    pub(super) fn new(iova: u64, size: u64) -> Self {
        Self { first: iova, last: last(iova, size), invalid: false }
    }

    fn has(&self, address: u64) -> bool {
        self.first <= address && address <= self.last
    }
}

const TOP: u128 = 1 << 64;

impl Oracle {
    pub(super) fn map(&mut self, request: Map) -> Result<(), Errno> {
        let Map { argsz, flags, vaddr, iova, size } = request;
        if argsz < 32 || flags > 7 || size == 0 {
            return Err(Errno::EINVAL);
        }
        if end(iova, size) > TOP || end(vaddr, size) > TOP {
            return Err(Errno::EOVERFLOW);
        }
        let (access, moves) = (flags & 3 != 0, flags & 4 != 0);
        if access && moves || !access && !moves {
            return Err(Errno::EINVAL);
        }
        if [vaddr, iova, size].iter().any(|number| !number.is_multiple_of(PAGE)) {
            return Err(Errno::EINVAL);
        }
        let new = Mapping::new(iova, size);
        let overlaps = |own: &&mut Mapping| own.first <= new.last && new.first <= own.last;
        let there = self.mapped.iter_mut().find(overlaps);
        if moves {
            let own = there.ok_or(Errno::ENOENT)?;
            let same = own.invalid && (own.first, own.last) == (new.first, new.last);
            own.invalid &= !same;
            return if same { Ok(()) } else { Err(Errno::EINVAL) };
        }
        if there.is_some() {
            return Err(Errno::EEXIST);
        }
        if self.mapped.len() == self.max_mappings {
            return Err(Errno::ENOSPC);
        }
        if let Some(top) = self.domain {
            if end(iova, size) > u128::from(top) + 1 {
                return Err(Errno::EINVAL);
            }
            let has = vaddr >= USER && end(vaddr, size) <= end(USER, PAGES * PAGE);
            if !has {
                return Err(Errno::EFAULT);
            }
        }
        self.mapped.push(new);
        Ok(())
    }

    pub(super) fn unmap(&mut self, request: Unmap) -> Result<u64, Errno> {
        let Unmap { argsz, flags, iova, size } = request;
        let (bitmap, all, vaddr) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
        if argsz < 24 || flags > 7 || bitmap && (all || vaddr || argsz < 48) {
            return Err(Errno::EINVAL);
        }
        // The argument has no bitmap.
        if bitmap {
            return Err(Errno::EFAULT);
        }
        if !iova.is_multiple_of(PAGE) || all && (iova != 0 || size != 0) {
            return Err(Errno::EINVAL);
        }
        if !all && (size == 0 || !size.is_multiple_of(PAGE)) {
            return Err(Errno::EINVAL);
        }
        if end(iova, size) > TOP {
            return Err(Errno::EOVERFLOW);
        }
        let (first, until) = if all { (0, u64::MAX) } else { (iova, last(iova, size)) };
        if self.v2 && !all {
            let at = |address| self.mapped.iter().find(|own| own.has(address));
            let cut = at(first).is_some_and(|own| own.first != first);
            if cut || at(until).is_some_and(|own| own.last != until) {
                return Err(Errno::EINVAL);
            }
        }
        if !self.v2 && self.mapped.iter().any(|own| own.has(first) && own.first < first) {
            return Ok(0);
        }
        let goes = |own: &Mapping| first <= own.first && own.first <= until;
        if vaddr && self.mapped.iter().any(|own| goes(own) && own.invalid) {
            return Err(Errno::EINVAL);
        }
        let mut bytes = 0u64;
        for own in self.mapped.iter_mut().filter(|own| goes(own)) {
            bytes = bytes.wrapping_add(own.last - own.first).wrapping_add(1);
            own.invalid = true;
        }
        if !vaddr {
            self.mapped.retain(|own| !goes(own));
        }
        Ok(bytes)
    }
}

/// Behind the last byte, without wrapping.
fn end(start: u64, size: u64) -> u128 {
    u128::from(start) + u128::from(size)
}

/// The last byte of a range that does not wrap.
fn last(start: u64, size: u64) -> u64 {
    start + (size - 1)
}
