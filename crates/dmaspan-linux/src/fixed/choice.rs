//! This chooses the best memory that the machine gives for a pool.

use std::fmt;

use super::PoolError;
use crate::mem::{ExclusiveMemory, Memory, MemoryError, MemoryKind};
use crate::os::{self, Size};
use crate::{hugetlb, pagemap};

/// Says what memory a pool is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryChoice {
    /// hugetlb pages, of the largest size of the kernel that the pool fills, down to 2 MiB; then
    /// transparent huge pages, where the pool fills at least half of them all; then base pages.
    /// What is short or not there is passed over.
    #[default]
    Best,
    /// Only this kind.
    Only(MemoryKind),
}

/// The reason why a kind of memory was not had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WhyNot {
    /// There was none.
    #[error(transparent)]
    Refused(#[from] MemoryError),
    /// It was mapped, and the kernel found no huge page for it.
    #[error(
        "the kernel gave no huge page: let /sys/kernel/mm/transparent_hugepage/enabled say madvise \
         or always; memory may also be fragmented"
    )]
    NotHuge,
}

/// A better kind of memory that the pool did not get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassedOver {
    /// The kind.
    pub kind: MemoryKind,
    /// Why not.
    pub why: WhyNot,
}

impl fmt::Display for PassedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no {}: {}", self.kind, self.why)
    }
}

/// Says what memory a pool got.
///
/// Displayed, it is one line for the memory, and one for each kind that was passed over.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Provenance {
    /// The kind; `None` for memory that the application brought.
    pub kind: Option<MemoryKind>,
    /// The length in bytes.
    pub len: u64,
    /// How many of them huge leaves map; `None` where the kernel does not tell (before Linux 6.7)
    /// and for memory that the application brought.
    pub huge_bytes: Option<u64>,
    /// Better kinds, the best first.
    pub passed_over: Vec<PassedOver>,
}

impl fmt::Display for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Some(kind) => write!(f, "{} of {kind} memory", Size(self.len))?,
            None => write!(f, "{} of the application's memory", Size(self.len))?,
        }
        if let (Some(MemoryKind::Thp), Some(huge)) = (self.kind, self.huge_bytes) {
            write!(f, ", {} of it in huge pages", Size(huge))?;
        }
        self.passed_over.iter().try_for_each(|passed| write!(f, "\n{passed}"))
    }
}

/// Maps memory for a pool. `needed` says how many bytes it needs with pages of so many.
pub(super) fn map(
    choice: MemoryChoice,
    needed: impl Fn(u64) -> Result<u64, PoolError>,
) -> Result<(ExclusiveMemory, Provenance), PoolError> {
    let mut passed_over = Vec::new();
    let kinds = match choice {
        MemoryChoice::Only(kind) => return map_kind(kind, &needed, passed_over),
        MemoryChoice::Best => {
            best(&hugetlb::page_sizes(), os::thp_size(), &|size| needed(size).ok())
        }
    };
    for kind in kinds {
        let why = match map_kind(kind, &needed, Vec::new()) {
            Ok((_, got)) if kind == MemoryKind::Thp && got.huge_bytes == Some(0) => WhyNot::NotHuge,
            Ok((memory, got)) => return Ok((memory, Provenance { passed_over, ..got })),
            Err(PoolError::Memory(error)) => WhyNot::Refused(error),
            Err(error) => return Err(error),
        };
        passed_over.push(PassedOver { kind, why });
    }
    map_kind(MemoryKind::Base, &needed, passed_over)
}

/// The kinds that are better than base pages, of a kernel with these sizes of pages. Pages larger
/// than 2 MiB are taken where the pool fills them, as they are few; transparent ones, which are
/// made of what is free, where no more than half as much again is left over.
fn best(hugetlb: &[u64], thp: u64, needed: &dyn Fn(u64) -> Option<u64>) -> Vec<MemoryKind> {
    let left_over = |page: u64| {
        let len = needed(page)?;
        Some((len.checked_next_multiple_of(page)? - len, len))
    };
    let fills = |page: u64| left_over(page).is_some_and(|(more, _)| more < LITTLE);
    let fits = left_over(thp).is_some_and(|(more, len)| more < LITTLE || more <= len / 2);
    let large = hugetlb.iter().rev().filter(|&&page| page > LITTLE && fills(page));
    let mut kinds: Vec<MemoryKind> =
        large.filter_map(|&page| MemoryKind::of_hugetlb(page)).collect();
    kinds.push(MemoryKind::Hugetlb2M);
    kinds.extend(fits.then_some(MemoryKind::Thp));
    kinds
}

/// What may be left over of any page, and the smallest page that is worth a kind of its own.
const LITTLE: u64 = 2 << 20;

fn map_kind(
    kind: MemoryKind,
    needed: &impl Fn(u64) -> Result<u64, PoolError>,
    passed_over: Vec<PassedOver>,
) -> Result<(ExclusiveMemory, Provenance), PoolError> {
    let page_size = kind.page_size();
    let len = needed(page_size)?.checked_next_multiple_of(page_size);
    let memory = Memory::new(kind, len.ok_or(PoolError::TooLarge)?)?;
    let huge_bytes = pagemap::huge_bytes(&memory).ok();
    let len = memory.len();
    let memory = ExclusiveMemory::try_from(memory).map_err(|_| PoolError::TooLarge)?;
    Ok((memory, Provenance { kind: Some(kind), len, huge_bytes, passed_over }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn kinds(hugetlb: &[u64], thp: u64, len: u64) -> Vec<MemoryKind> {
        best(hugetlb, thp, &|_| Some(len))
    }

    #[test]
    fn no_pool_takes_many_times_what_it_needs_whatever_the_sizes_of_pages() {
        use MemoryKind::{Hugetlb1G, Hugetlb2M, Thp};
        let k4 = |len| kinds(&[64 << 10, 2 * MIB, 32 * MIB, 1 << 30], 2 * MIB, len);
        assert_eq!(k4(MIB), [Hugetlb2M, Thp]);
        assert_eq!(k4(64 * MIB), [MemoryKind::Hugetlb { page_lg2: 25 }, Hugetlb2M, Thp]);
        assert_eq!(k4(1 << 30)[..2], [Hugetlb1G, MemoryKind::Hugetlb { page_lg2: 25 }]);
        let k16 = |len| kinds(&[2 * MIB, 32 * MIB, 1 << 30], 32 * MIB, len);
        assert_eq!(k16(MIB), [Hugetlb2M], "31 MiB would be left over");
        assert_eq!(k16(24 * MIB), [Hugetlb2M, Thp]);
        assert_eq!(k16(33 * MIB), [Hugetlb2M]);
        let k64 = |len| kinds(&[2 * MIB, 512 * MIB, 16 << 30], 512 * MIB, len);
        assert_eq!(k64(100 * MIB), [Hugetlb2M]);
        assert_eq!(k64(512 * MIB), [MemoryKind::Hugetlb { page_lg2: 29 }, Hugetlb2M, Thp]);
    }
}
