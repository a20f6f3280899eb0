//! DMA mapping by contiguous spans, for everything that maps memory for devices outside the Linux
//! kernel.
//!
//! The currency between all layers is the [`Span`]: a maximal run of physically contiguous bytes.
//! The cost of an operation follows the number of spans and page-table entries that it writes, and
//! not that of 4 KiB pages, but where an interface counts pages: the commands of RISC-V's IOMMUs
//! without ranges, and PRPs of NVMe.
//!
//! ```text
//!  user range ──pin──► spans ──coalesce──► spans ──map──► IO page table ──► device
//!  (container)         (Pinner)            (span.rs)      (io_pgtable)
//!                         │                                   │ unmap yields spans
//!                         │◄────── unpin after IOTLB sync ────┘ (iommu::Gather)
//! ```
//!
//! # Where to begin
//!
//! | you have | begin with | guide |
//! |---|---|---|
//! | an IOMMU of your own, and drivers that map buffers | [`dma::Device`] | [kernel] |
//! | memory of a guest or a client, at addresses that it chose | [`Container`] | [server] |
//! | buffers that are used again and again | [`regbuf::Registry`] | [objects] |
//! | devices that must not see, or cannot reach, the memory | [`swiotlb::Pool`] | [guest] |
//! | page tables to fill, and nothing else | [`io_pgtable::PageTable`] | [format] |
//! | a process on Linux, and a real device | the crate `dmaspan-linux` | [driver] |
//!
//! The guides are in `docs/src` of the repository. `cargo xtask book` builds the book that they are
//! in beside these pages, where the links lead; [objects] compares what to begin with.
//!
//! [kernel]: ../book/guides/kernel.html
//! [server]: ../book/guides/vfio_user.html
//! [objects]: ../book/objects.html
//! [guest]: ../book/guides/confidential.html
//! [format]: ../book/adding/format.html
//! [driver]: ../book/guides/driver.html
//!
//! # The systems
//!
//! Every folder is one system, and every plain file is shared by the systems:
//!
//! - [`io_pgtable`]: IO page tables. A format says how entries look, one walker does the rest.
//! - [`iommu`]: domains, the streams attached to them, and their IOVAs. Unmapped memory is released
//!   only against the proof that hardware has forgotten it.
//! - [`dma`]: the DMA API that a driver calls: buffers mapped and unmapped, strictly or lazily,
//!   translated, direct or bounced. Its page shows all of it in one example.
//! - [`swiotlb`]: bounce pools, for buffers that a device cannot reach or must not see.
//! - [`regbuf`]: buffers that are registered once and used for ever: pinned, coalesced, charged and
//!   perhaps mapped; an operation finds its part in a few steps, and makes descriptors of it.
//! - [`container`]: user memory, pinned, mapped and kept account of, as Linux's VFIO does.
//! - [`addr`], [`range`](mod@range), [`span`], [`lg2`]: addresses and what they span. Ranges are
//!   inclusive, so that the top of an address space is an address.
//! - [`bytes`]: copies of memory that devices and other threads use meanwhile.
//! - [`prot`], [`pin`], [`follow`], [`account`], [`space`], [`error`]: permissions, the supplier of
//!   pinned memory, one for kernels and VMMs that follows a CPU's page tables, the limit of what an
//!   owner may pin, the target that a driver maps into, and an errno for each error.
//! - [`platform`]: locks, a number for the CPU, a clock and caches, which a kernel or a process
//!   supplies.
//!
//! The crate has no operating system, no clock, no randomness and no globals but the counters of
//! what was [leaked]: memory, locks and hardware come through traits. Its unsafe blocks are those
//! that make tables out of memory ([`Arena`](io_pgtable::Arena),
//! [`FrameTables`](io_pgtable::FrameTables)), and those that read and write memory that devices
//! and other threads write ([`bytes`], [`CoherentFrames`](dma::CoherentFrames),
//! [`FrameBounce`](dma::FrameBounce)).
//! [`FrameAlloc`](io_pgtable::FrameAlloc),
//! [`TableMemory`](io_pgtable::TableMemory),
//! [`IommuOps`](iommu::IommuOps), [`Port`](iommu::Port), [`DmaMemory`](dma::DmaMemory),
//! [`FromRegistered`](dma::FromRegistered), [`BouncePool`](dma::BouncePool),
//! [`HostMemory`](regbuf::HostMemory), [`UserTables`](follow::UserTables) and
//! [`Pinner`](pin::Pinner) are unsafe to implement, and
//! [`PageTable::claim`](io_pgtable::PageTable::claim), the raw operations of
//! [`Domain`](iommu::Domain), and promises such as [`RawMemory::new`](dma::RawMemory::new) and
//! [`Buffer::new`](regbuf::Buffer::new) are unsafe to call, each with its contract.
//!
//! The feature `log` logs leaks, quarantine, faults and attaches by the crate `log`, some under a
//! lock of the object that they are about: a logger maps, unmaps and lists nothing by this crate.
//!
//! The simplest way to map memory is a [`Container`]:
//!
//! ```
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
//! use dmaspan::iommu::{Domain, SoftIommu};
//! use dmaspan::{Account, Container, HostAddr, Iova, PhysAddr, Prot};
//! use dmaspan_linux::{LinuxPinner, Memory, MemoryKind, UserPlatform};
//!
//! fn main() -> Result<(), Box<dyn Error>> {
//!     // A page table, and an IOMMU that walks it: here one of software, for device models of this
//!     // process. For hardware it is a driver of `dmaspan-drivers`.
//!     let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
//!     let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
//!     let table = PageTable::new(format, tables)?;
//!     let iommu = SoftIommu::over(&table).reaching::<HostAddr>();
//!     let iommu = iommu.waiting_by(UserPlatform::sleeping);
//!     let domain = Domain::new(table, iommu.clone())?;
//!     let pinner = LinuxPinner::<HostAddr>::new()?;
//!     let container: Container<_, parking_lot::RawMutex> =
//!         Container::with_domain(pinner, domain, Account::new(64 << 20));
//!
//!     // 3 MiB of this process, pinned and mapped; and a device that uses them.
//!     let memory = Arc::new(Memory::new(MemoryKind::Base, 3 << 20)?);
//!     container.map(&memory, memory.user_range(), Iova::new(0), Prot::READ_WRITE)?;
//!     let mut device = iommu.device(7);
//!     device.write(&memory.bytes(), Iova::new(0x1234), b"from the device")?;
//!     let mut bytes = [0; 15];
//!     memory.read(0x1234, &mut bytes)?;
//!     assert_eq!(&bytes, b"from the device");
//!
//!     assert_eq!(container.unmap_all()?, 3 << 20);
//!     assert!(device.read(&memory.bytes(), Iova::new(0x1234), &mut bytes).is_err());
//!     Ok(())
//! }
//! ```
#![no_std]

extern crate alloc;
#[cfg(loom)]
extern crate std;

// Emulated, as `portable-atomic` does it, an entry would be stored by halves.
#[cfg(not(target_has_atomic = "64"))]
compile_error!(
    "dmaspan needs a CPU with 64-bit atomics: entries of IO page tables have 64 bits, and an IOMMU \
     that walks while an entry is stored by halves would use an address that nobody mapped"
);

pub mod account;
pub mod addr;
mod atomic;
pub mod bytes;
pub mod container;
pub mod dma;
pub mod error;
pub mod follow;
pub mod io_pgtable;
pub mod iommu;
mod label;
mod leak;
mod ledger;
pub mod lg2;
mod list;
mod log;
pub mod pin;
pub mod platform;
mod promise;
pub mod prot;
pub mod range;
pub mod regbuf;
mod sharded_map;
pub mod space;
pub mod span;
pub mod swiotlb;

pub use account::Account;
pub use addr::{Address, DmaAddr, HostAddr, Iova, PhysAddr, UserAddr};
pub use container::Container;
pub use error::Errno;
pub use label::{Caller, Label};
pub use leak::{Leaks, leaked};
pub use platform::Platform;
pub use promise::Promise;
pub use prot::{Coherency, Direction, Prot};
pub use range::{IovaRange, RangeError, UserRange};
pub use space::{DmaSpace, Limits};
pub use span::{Full, Span, SpanBuf};

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
