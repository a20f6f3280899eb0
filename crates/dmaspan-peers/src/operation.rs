//! An operation is what both sides are told to do, as a failure names it.

use std::fmt;

use dmaspan::Prot;

/// What becomes of hardware's marks that are read, as Linux's flag `IOMMU_DIRTY_NO_CLEAR` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Marks {
    Cleared = 0,
    Kept = 1,
}

/// An operation.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    /// Spans, one behind the other, each as an address and bytes.
    Map { iova: u64, spans: Vec<(u64, u64)>, prot: Prot },
    /// Pages of one size: how large, and how many.
    MapPages { iova: u64, paddr: u64, pages: (u64, u64), prot: Prot },
    /// Whatever is mapped there.
    Unmap { iova: u64, bytes: u64 },
    /// Pages of one size.
    UnmapPages { iova: u64, pages: (u64, u64) },
    /// Hardware writes there.
    Mark { iova: u64 },
    /// What hardware wrote is read, and perhaps forgotten.
    Dirty { iova: u64, bytes: u64, marks: Marks },
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Map { iova, spans, prot } => {
                write!(f, "map {iova:#x} to")?;
                for (paddr, bytes) in spans {
                    write!(f, " {paddr:#x}+{bytes:#x}")?;
                }
                write!(f, " {prot:?}")
            }
            Self::MapPages { iova, paddr, pages: (size, count), prot } => {
                write!(f, "map {iova:#x} to {paddr:#x}, {count} pages of {size:#x}, {prot:?}")
            }
            Self::Unmap { iova, bytes } => write!(f, "unmap {iova:#x}+{bytes:#x}"),
            Self::UnmapPages { iova, pages: (size, count) } => {
                write!(f, "unmap {iova:#x}, {count} pages of {size:#x}")
            }
            Self::Mark { iova } => write!(f, "hardware writes at {iova:#x}"),
            Self::Dirty { iova, bytes, marks } => {
                let clear = if *marks == Marks::Cleared { " and clear" } else { "" };
                write!(f, "read{clear} what was written in {iova:#x}+{bytes:#x}")
            }
        }
    }
}
