//! Descriptors tell devices where the bytes of an I/O are. They are made straight from the spans of
//! an import.
//!
//! Each kind takes an iterator of [`Span`](crate::Span)s, in the order of the bytes: spans of
//! addresses that the device uses, which are [`DmaAddr`](crate::DmaAddr)s, or
//! [`PhysAddr`](crate::PhysAddr)s where nothing translates. Spans that touch become one descriptor
//! where the hardware can have one, so the work is that of the descriptors, not of the pages behind
//! them. Nothing allocates: descriptors go to memory of the caller. A transfer that is refused is
//! refused before anything is written.
//!
//! - [`SegmentLimits`]: scatter-gather [`ScatterEntry`]s under a device's longest segment and
//!   boundary.
//! - [`MemoryPageSize`]: NVMe PRP entries and lists, one entry for each page of memory.
//! - [`Sgl`]: NVMe scatter-gather lists.
//! - [`Chain`]: virtio descriptors, for split and packed rings, in the ring or indirect.
//!
//! ```
//! use dmaspan::regbuf::descriptors::{Error, MemoryPageSize, SegmentLimits};
//! use dmaspan::{DmaAddr, Span};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     // 4 MiB of an import, by two spans; the second one touches the first.
//!     let spans = [0x8000_0000, 0x8020_0000].map(|addr| Span::new(DmaAddr::new(addr), 2 << 20));
//!     let spans = [spans[0]?, spans[1]?];
//!
//!     assert_eq!(SegmentLimits::default().entries(spans).count(), 1);
//!     assert_eq!(MemoryPageSize::new(0)?.entries(spans)?.count(), 1024);
//!     Ok(())
//! }
//! ```
//!
//! The spans are gone through twice, first to count them, by a clone of their iterator. A clone
//! that yields other spans makes descriptors that are of no use, and does no other harm.

mod error;
mod limits;
mod list;
mod packed;
mod prp;
mod run;
mod scatter;
mod sgl;
mod split;
mod virtq;

pub use error::Error;
pub use limits::{Need, SegmentLimits};
pub use list::ListPage;
pub use packed::{PackedDescriptor, PackedPosition};
pub use prp::{MemoryPageSize, PrpEntries, Prps};
pub use scatter::{ScatterEntry, ScatterGather};
pub use sgl::{Sgl, SglDescriptor};
pub use split::SplitDescriptor;
pub use virtq::Chain;
