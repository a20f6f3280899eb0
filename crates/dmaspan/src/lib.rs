//! dmaspan
#![no_std]
extern crate alloc;

pub mod account;
pub mod addr;
pub mod container;
pub mod error;
pub mod io_pgtable;
pub mod iommu;
pub mod lg2;
pub mod pin;
pub mod prot;
pub mod range;
pub mod space;
pub mod span;

pub use account::Account;
pub use addr::{Iova, PhysAddr, UserAddr};
pub use container::Container;
pub use error::Errno;
pub use prot::{Coherency, Direction, Prot};
pub use range::{IovaRange, RangeError, UserRange};
pub use space::{DmaSpace, Limits};
pub use span::{Full, Span, SpanBuf};
