//! This allocates the pages of memory before anybody pins them.
//!
//! To allocate and to clear pages is most of what pinning fresh memory costs, and the kernel does
//! it on the thread that asks. So large memory is populated by several.

use std::num::NonZero;
use std::sync::atomic::Ordering;
use std::thread;

use dmaspan::{Errno, UserRange};

use super::{Memory, MemoryKind, OutsideMemory, PopulateError};
use crate::os;
use crate::parts;
use crate::sys;
use crate::sys::mapping::{Advice, Mapping};

/// A thread is worth its start for so many bytes.
const PART_LEAST: u64 = 64 << 20;

/// More threads wait for the kernel's locks and for memory.
const THREADS_MOST: usize = 16;

impl Memory {
    /// Allocates every page that is not there yet, by as many threads as the machine has CPUs, up
    /// to 16: at least 64 MiB each.
    ///
    /// Memory of [`new`](Self::new) is populated; adopted memory need not be. What is in pages
    /// that are there stays.
    ///
    /// # Errors
    ///
    /// [`PopulateError`]; pages that were allocated stay.
    pub fn populate(&self) -> Result<(), PopulateError> {
        self.populate_by(thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN))
    }

    /// As [`populate`](Self::populate), by up to so many threads, the calling one among them.
    ///
    /// # Errors
    ///
    /// As those of [`populate`](Self::populate).
    pub fn populate_by(&self, threads: NonZero<usize>) -> Result<(), PopulateError> {
        if self.is_populated() {
            return Ok(());
        }
        self.populate_part(self.user_range(), threads)?;
        self.populated.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Returns whether every page has been allocated. Another process may take pages of a shared
    /// file away again.
    pub fn is_populated(&self) -> bool {
        self.populated.load(Ordering::Relaxed)
    }

    /// As [`populate`](Self::populate), only the pages of `range`.
    ///
    /// # Errors
    ///
    /// As those of [`populate`](Self::populate), and `EFAULT` where the range is not all in the
    /// memory.
    pub fn populate_range(&self, range: UserRange) -> Result<(), PopulateError> {
        if self.is_populated() {
            return Ok(());
        }
        if range == self.user_range() {
            return self.populate();
        }
        let threads = thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
        self.populate_part(range, threads)
    }

    fn populate_part(
        &self,
        range: UserRange,
        threads: NonZero<usize>,
    ) -> Result<(), PopulateError> {
        let failed = |errno| PopulateError { range, errno };
        let outside = |error: OutsideMemory| failed(error.errno());
        let offset = self.offset_of(range).map_err(outside)?;
        let page = self.page_size.max(sys::page_size());
        // madvise(2) takes whole pages; the memory is whole pages.
        let begin = os::align_down(offset, page);
        let end = (offset + range.len_less_one() + 1).next_multiple_of(page).min(self.len());
        let leaf = self.kind.leaf_size().max(page);
        let threads = threads.get().min(THREADS_MOST);
        let parts = parts::cut(begin, end, leaf, PART_LEAST.max(leaf), threads);
        let fallback = match self.kind {
            // A pin finds the pages. None is touched, because their kind is not known.
            MemoryKind::Adopted => Fallback::Leave,
            _ => Fallback::Touch,
        };
        let one = |&(offset, len): &(u64, u64)| populate(self, offset, len, fallback);
        parts::for_each("dmaspan-populate", threads, &parts, one).map_err(failed)
    }
}

/// What to do where the kernel cannot populate: before Linux 5.14, and for memory of drivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fallback {
    Leave,
    Touch,
}

/// Allocates every page of `len` bytes from `offset`.
fn populate(memory: &Memory, offset: u64, len: u64, fallback: Fallback) -> Result<(), Errno> {
    let to_usize = |value| usize::try_from(value).map_err(|_| Errno::ENOMEM);
    let (at, bytes) = (to_usize(offset)?, to_usize(len)?);
    let mapping: &Mapping = memory.mapping();
    loop {
        match mapping.advise(at, bytes, Advice::PopulateWrite) {
            Ok(()) => return Ok(()),
            Err(Errno::EINTR | os::EAGAIN) => {}
            Err(Errno::EINVAL) => break,
            Err(errno) => return Err(errno),
        }
    }
    match fallback {
        Fallback::Leave => Ok(()),
        // Linux before 5.14. hugetlb pages are reserved since mmap(2), so a touch finds them.
        Fallback::Touch => touch(mapping, at, bytes),
    }
}

/// Writes a byte of every base page, as it is.
fn touch(mapping: &Mapping, offset: usize, len: usize) -> Result<(), Errno> {
    let page = usize::try_from(sys::page_size()).unwrap_or(4096);
    (offset..offset.saturating_add(len)).step_by(page).try_for_each(|at| mapping.touch(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    const M64: u64 = 64 << 20;

    #[test]
    fn large_memory_is_all_there_whoever_populates_it() {
        let memory = Memory::new(MemoryKind::Base, 3 * M64).unwrap();
        assert!(memory.is_populated());
        let page = sys::page_size();
        let pages = usize::try_from(memory.len() / page).unwrap();
        let mut entries = vec![0; 8 * pages];
        let map = std::fs::File::open("/proc/self/pagemap").unwrap();
        let at = memory.user_range().start().get() / page * 8;
        std::os::unix::fs::FileExt::read_exact_at(&map, &mut entries, at).unwrap();
        // Bit 63 of an entry says that the page is there (pagemap.rst of Linux).
        let present = entries.as_chunks::<8>().0.iter().filter(|entry| entry[7] & 0x80 != 0);
        assert_eq!(present.count(), pages);
    }

    #[test]
    fn a_touch_keeps_what_is_there() {
        let memory = Memory::new(MemoryKind::Base, 1 << 20).unwrap();
        memory.fill_words(0, 1 << 20, |n| !n).unwrap();
        touch(memory.mapping(), 0, 1 << 20).unwrap();
        memory.check_words(0, 1 << 20, |n| !n).unwrap();
    }
}
