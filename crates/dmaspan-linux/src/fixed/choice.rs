//! This chooses the best memory that the machine gives for a pool.

use std::fmt;

use super::PoolError;
use crate::mem::{ExclusiveMemory, Memory, MemoryError, MemoryKind};
use crate::os::Size;
use crate::pagemap;

/// Says what memory a pool is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryChoice {
    /// hugetlb pages, of 1 GiB where the pool fills them, else of 2 MiB; then transparent huge
    /// pages; then base pages. What is short or not there is passed over.
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
        MemoryChoice::Best => best(needed(MemoryKind::Hugetlb1G.page_size()).ok()),
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

/// The kinds that are better than base pages. Pages of 1 GiB are not taken for a part of one.
fn best(giant_needed: Option<u64>) -> impl Iterator<Item = MemoryKind> {
    let giant = MemoryKind::Hugetlb1G;
    let fills = giant_needed.is_some_and(|len| len.is_multiple_of(giant.page_size()));
    fills.then_some(giant).into_iter().chain([MemoryKind::Hugetlb2M, MemoryKind::Thp])
}

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
