//! Tests of DMA-mapping code stand on this crate: it simulates memory, tables, IOMMUs and devices.
//!
//! Begin with [`sanitizer`] for a driver of yours, in whatever project, and with [`device`] for the
//! question whether a device reaches what was mapped. The guides on [testing] a driver and on
//! [reading a report] are in `docs/src` of the repository; `cargo xtask book` builds the book
//! beside these pages.
//!
//! [testing]: ../book/guides/testing.html
//! [reading a report]: ../book/guides/sanitizer.html
//!
//! - [`walker`]: table walks written from the manuals. They catch encodings that only their own
//!   decoder understands.
//! - [`iotlb`]: an IOTLB that keeps every entry it may. It catches missing, late and too narrow
//!   invalidations.
//! - [`device`] and [`bus`]: a device that reads and writes through the IOTLB. They catch data that
//!   arrives elsewhere.
//! - [`port`]: a stream of accesses that is attached to domains, or blocked. It catches domains
//!   that are used after they were detached.
//! - [`memory`]: physical memory in folios with references and pins, user spaces and a pinner. It
//!   catches memory that is freed, unpinned or touched too early.
//! - [`suite`]: one suite for every IO page-table format, and [`mock`], a format to try it on.
//! - [`model`]: an interval map, and the fewest leaves by brute force. It catches wrong look-ups
//!   and wasteful leaves.
//! - [`allocator`]: a global allocator that counts by thread and fails on demand. It catches code
//!   that allocates where it must not, and what is left where it could not.
//! - [`bounce`]: a pool of bounce slots. It catches old data in slots and slots that leak.
//! - [`smmu_v2`]: the registers of an SMMUv2 with a TLB that keeps what it may. It catches drivers
//!   that leave out a register, an invalidation or a sync, or write what is none.
//! - [`sanitizer`]: told what a driver does, it models an IOTLB that keeps what it may. It catches
//!   what is used after its unmap, flushed late or never, unmapped twice, or leaked, and shows the
//!   history that led there.
//! - [`fuzz`]: operations, and tables, made of any bytes. They catch what nobody thought of.
//! - [`fault`]: failures on demand. They catch operations that do not undo themselves.
//!
//! Nothing here shares code with what it checks, beyond addresses, ranges and spans. Where a real
//! machine would corrupt memory in silence, there is an error, a fault or an entry in a list that a
//! test asserts to be empty.
//!
//! # Example
//!
//! A device behind tables written by hand: it reads through a page, goes on doing so after the page
//! was taken out of the tables, and faults once the IOTLB was told.
//!
//! ```
//! use std::sync::Arc;
//!
//! use dmaspan::iommu::{Invalidation, IommuOps, Scope, Tables};
//! use dmaspan::{Iova, IovaRange, PhysAddr};
//! use dmaspan_sim::device::{DmaError, SimDevice};
//! use dmaspan_sim::iotlb::Iotlb;
//! use dmaspan_sim::memory::SimMemory;
//! use dmaspan_sim::walker::TableImage;
//! use dmaspan_sim::walker::arm_lpae::{ArmLpaeS1Walker, ArmS1WalkRegisters};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     // 4K pages, 16 bits of input address (T0SZ = 48), 48 bits of output address (IPS = 0b101):
//!     // one table of sixteen pages. Byte 1 of MAIR is write-back memory.
//!     let registers =
//!         ArmS1WalkRegisters { ttbr: 0, tcr: 5 << 32 | 48, mair: 0xff00, ..Default::default() };
//!     let tables = Arc::new(TableImage::new());
//!     tables.add_table(PhysAddr::new(0), 16);
//!     // Page 1 is at 0x10_0000: AF, inner shareable, AP[1], AttrIndx 1, and 0b11 for a page.
//!     tables.set(PhysAddr::new(8), 0x10_0000 | 0x747)?;
//!
//!     let memory = Arc::new(SimMemory::new(PhysAddr::new(0x10_0000), 0x4000, 12)?);
//!     let frame = memory.allocate(0x1000, 12)?;
//!     memory.pin_frames(&[frame]);
//!     memory.cpu_write(frame.paddr(), b"hello")?;
//!
//!     let iotlb = Iotlb::new(ArmLpaeS1Walker::new(registers)?, Arc::clone(&tables));
//!     let device = SimDevice::new(iotlb.clone(), Arc::clone(&memory));
//!     let mut buf = [0; 5];
//!     device.read(Iova::new(0x1000), &mut buf)?;
//!     assert_eq!(&buf, b"hello");
//!
//!     // The entry is gone, but nobody told the IOTLB.
//!     tables.set(PhysAddr::new(8), 0)?;
//!     let page = IovaRange::from_len(Iova::new(0x1000), 0x1000)?;
//!     assert!(device.read(Iova::new(0x1000), &mut buf).is_ok());
//!     assert_eq!(iotlb.stale_leaves(page).len(), 1);
//!
//!     let scope = Scope::Ranges(&[page]);
//!     iotlb.invalidate(&Invalidation { scope, leaf_sizes: 1 << 12, tables: Tables::Kept })?;
//!     let refused = device.read(Iova::new(0x1000), &mut buf);
//!     assert!(matches!(refused, Err(DmaError::Fault { done: 0, .. })));
//!     assert!(memory.violations().is_empty());
//!     Ok(())
//! }
//! ```

/// Methods that are those of what is wrapped.
macro_rules! forward {
    ($inner:ident: $(
        fn $name:ident(&self $(, $arg:ident: $type:ty)*) $(-> $out:ty)?;
    )+) => { $(
        fn $name(&self $(, $arg: $type)*) $(-> $out)? {
            self.$inner.$name($($arg),*)
        }
    )+ };
    ($inner:ident: $inner_type:ty as $trait:path: $(
        fn $name:ident(&self $(, $arg:ident: $type:ty)*) $(-> $out:ty)?;
    )+) => { $(
        fn $name(&self $(, $arg: $type)*) $(-> $out)? {
            <$inner_type as $trait>::$name(&self.$inner, $($arg),*)
        }
    )+ };
}

pub mod allocator;
pub mod bounce;
pub mod bus;
pub mod coherent;
pub mod device;
pub mod fault;
pub mod fuzz;
pub mod iotlb;
pub mod memory;
pub mod mock;
pub mod model;
mod modelled;
pub mod pool_memory;
pub mod port;
pub mod rng;
pub mod sanitizer;
pub mod smmu_v2;
pub mod suite;
pub mod walker;

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
