//! The errors of memory that has to be somewhere.

use std::fmt;

use dmaspan::regbuf::PinBufferError;
use dmaspan::{Errno, PhysAddr, Span};

use crate::hugetlb;
use crate::mem::{MemoryError, MemoryKind};
use crate::os::{Size, Words};
use crate::pinner::LinuxPinError;
use crate::vfio::NoIommuPinError;

/// The reason why there is no such memory. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PhysicalError {
    /// No bytes.
    #[error("0 bytes of contiguous memory cannot be allocated: ask for at least one")]
    Empty,
    /// The alignment is no power of two.
    #[error("memory cannot be aligned to {align:#x}, which is not a power of two: use one")]
    Alignment {
        /// What was asked for, in bytes.
        align: u64,
    },
    /// A pool is of whole pages.
    #[error("a bounce pool of {len:#x} bytes is not whole pages of {page_size:#x}")]
    Length {
        /// The bytes asked for.
        len: u64,
        /// The size of a page, in bytes.
        page_size: u64,
    },
    /// The kernel did not pin it.
    #[error(transparent)]
    Pin(#[from] PinBufferError<LinuxPinError>),
    /// iommufd did not pin it.
    #[error(transparent)]
    NoIommuPin(#[from] PinBufferError<NoIommuPinError>),
    /// Memory is pinned there already by the same [`PhysicalMemory`](super::PhysicalMemory).
    #[error("the memory at {span} is pinned already: take parts of what pin returned then")]
    Known {
        /// Where it is.
        span: Span,
    },
    /// No memory is as it was asked for.
    #[error(
        "no {} of contiguous memory, aligned to {align:#x}, were found up to {last}: {}; {}",
        Size(*len), Words(tried), advice(*len, *align, tried)
    )]
    None {
        /// The bytes asked for.
        len: u64,
        /// To what they were to be aligned.
        align: u64,
        /// The last address that would have done.
        last: PhysAddr,
        /// What was tried, in this order.
        tried: Vec<Tried>,
    },
}

/// Says what became of an attempt to get contiguous memory of some pages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Tried {
    /// There is no such memory.
    #[error("{source}")]
    Memory {
        /// Which pages.
        kind: MemoryKind,
        /// Why not.
        source: MemoryError,
    },
    /// It was not pinned.
    #[error("{source}")]
    Pin {
        /// Which pages.
        kind: MemoryKind,
        /// Why not.
        source: Box<PhysicalError>,
    },
    /// It was pinned, and lies elsewhere, or in pieces.
    #[error(
        "{} of {kind} memory, pinned {times} times, lay in {pieces} pieces at last, the longest of \
         {} from {} on",
        Size(*len), Size(longest.len()), longest.start()
    )]
    Elsewhere {
        /// Which pages.
        kind: MemoryKind,
        /// How many bytes there were.
        len: u64,
        /// How often that was tried.
        times: u32,
        /// In how many pieces the last ones were.
        pieces: usize,
        /// The longest piece of the last ones.
        longest: Span,
    },
}

impl PhysicalError {
    /// The errno.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Empty | Self::Alignment { .. } | Self::Length { .. } => Errno::EINVAL,
            Self::Pin(error) => error.errno(),
            Self::NoIommuPin(error) => error.errno(),
            Self::Known { .. } => Errno::EEXIST,
            Self::None { .. } => Errno::ENOMEM,
        }
    }

    /// The same without numbers, as the DMA API says it.
    pub(super) fn why(&self) -> &'static str {
        match self {
            Self::Empty => "no bytes were asked for",
            Self::Length { .. } => "a bounce pool is of whole pages",
            Self::Alignment { .. } => "the alignment is not a power of two",
            Self::Known { .. } => "the memory is pinned already",
            Self::Pin(_) | Self::NoIommuPin(_) if self.errno() == Errno::ENOMEM => {
                "memory could not be pinned: raise the limit of locked memory (ulimit -l)"
            }
            Self::Pin(_) | Self::NoIommuPin(_) => {
                "memory could not be pinned: PhysicalMemory::pin says why"
            }
            Self::None { tried, .. } => {
                let none = "no huge page is free that is as long and as low: reserve hugetlb pages \
                            (PhysicalMemory::allocate says how many)";
                let pin = tried.iter().find_map(|it| match it {
                    Tried::Pin { source, .. } => Some(source.why()),
                    _ => None,
                });
                pin.unwrap_or(none)
            }
        }
    }
}

/// What a user does who wants `len` contiguous bytes.
fn advice(len: u64, align: u64, tried: &[Tried]) -> String {
    let is_elsewhere = |it: &Tried| match it {
        Tried::Elsewhere { kind, longest, .. } => kind.is_hugetlb() && longest.len() >= len,
        _ => false,
    };
    if tried.iter().any(is_elsewhere) {
        return "all of it lay too high: use a device that addresses more, or bounce".to_owned();
    }
    let sizes = hugetlb::page_sizes();
    match sizes.iter().find(|size| **size >= len.max(align)) {
        Some(&size) => format!("reserve a hugetlb page: {}", hugetlb::advice(size, 1)),
        None => "ask for less: no page of this machine is as long".to_owned(),
    }
}

/// What [`Words`] joins.
impl fmt::Display for Words<'_, Tried> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, one) in self.0.iter().enumerate() {
            write!(f, "{}{one}", if n == 0 { "" } else { "; " })?;
        }
        if self.0.is_empty() { f.write_str("nothing could be tried") } else { Ok(()) }
    }
}
