//! Planning what to ask of a device's address space, and owning what it gave.
//!
//! A [`Mapper`] stands on any [`DmaSpace`](dmaspan::space::DmaSpace) of [`Memory`]: the clients of
//! the kernel's VFIO and iommufd, or the core's container. It is given [`Region`]s and
//!
//! 1. checks them, all at once, before the space is asked for anything: apertures, alignment,
//!    overlap, how many maps there may be ([`PlanError`] says which region and what to do);
//! 2. merges neighbours into the fewest maps, since each costs a system call and the kernel allows
//!    only so many; it cuts none, as no request is too long (those of 16 MiB take up to 6 % more
//!    instructions than one of 1 GiB, and shorter ones up to six times as many);
//! 3. finds IOVAs that permit large leaves;
//! 4. populates memory that has no pages yet, by several threads;
//! 5. maps, and takes everything back where the space refuses one.
//!
//! It returns [`MappedRegions`], which own the memory until it is unmapped. Dropping them unmaps
//! too; forgetting them leaks the memory, and so does a space that refuses to unmap: the memory is
//! never freed then. The device uses the pages that the memory had when it was mapped: what
//! `MADV_DONTNEED` or munmap(2) of the process do to it meanwhile, the device does not see. See
//! [`Memory`].
//!
//! ```
//! use std::sync::Arc;
//!
//! use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
//! use dmaspan::iommu::{Domain, SoftIommu};
//! use dmaspan::{Account, Container, HostAddr, Iova, PhysAddr, Prot};
//! use dmaspan_linux::plan::{Mapper, Region};
//! use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
//!
//! // An IOMMU of software, behind which device models reach what is mapped; for real devices the
//! // space is a `VfioSpace`.
//! let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
//! let table = PageTable::new(X86_64::new(X86_64Config::new(48, 52))?, tables)?;
//! let iommu = SoftIommu::over(&table).reaching::<HostAddr>();
//! let domain = Domain::new(table, iommu.clone())?;
//! let pinner = LinuxPinner::<HostAddr>::new()?;
//! let container: Container<_, parking_lot::RawMutex> =
//!     Container::with_domain(pinner, domain, Account::new(1 << 30));
//! let mapper = Mapper::new(container)?;
//!
//! let buffers = Arc::new(Memory::new(MemoryKind::Base, 1 << 20)?);
//! let queues = Arc::new(Memory::new(MemoryKind::Base, 1 << 16)?);
//! let planned = mapper.plan([
//!     Region::whole(&buffers, Prot::READ_WRITE),
//!     Region::part(&queues, 0x0000, 0x1000, Prot::READ)?.at(Iova::new(0)),
//!     Region::part(&queues, 0x1000, 0x2000, Prot::READ)?.at(Iova::new(0x1000)),
//! ])?;
//! assert_eq!((planned.maps().len(), planned.bytes()), (2, (1 << 20) + 0x3000));
//!
//! let mapped = planned.map()?;
//! assert_eq!(mapped.iova(2), Some(Iova::new(0x1000)));
//! let third_page = buffers.sub_range(0x2000, 1)?.start();
//! assert_eq!(mapped.translate(third_page), mapped.iova(0).map(|iova| iova.wrapping_add(0x2000)));
//! // All of it is pinned, and in the tables.
//! assert_eq!(mapper.space().account().used(), (1 << 20) + 0x3000);
//! mapped.unmap()?;
//! Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Regions without an IOVA get the lowest that are free, 32-bit ones first, never those of the page
//! at 0, which only a region that asks for it gets. Regions with one are neither moved nor shared
//! with others. What others have mapped in the space is passed over, as is what the mapper was told
//! to [exclude](Mapper::exclude).
//!
//! [`forecast`] says what a layout will cost to map and whether it will fail, with no space at all.
//!
//! A part of what was mapped is unmapped by [`MappedRegions::unmap_part`]. Registers of devices are
//! mapped for other devices by [`Mapper::map_bar`], and memory that a driver shares with its device
//! for long, such as its queues, is allocated by [`Mapper::alloc`]. A driver that copies its
//! buffers has a pool of a [`MappedBounce`].
//!
//! [`Memory`]: crate::Memory

mod bars;
mod book;
mod bounce;
mod error;
pub mod forecast;
mod leaves;
mod mapped;
mod mapper;
mod merge;
mod places;
mod planned;
mod region;
mod shared;
mod single;

pub use bars::{MappedBar, MmioSpace};
pub use book::{ListedMap, MapKind, MapState};
pub use bounce::MappedBounce;
pub use error::{MapError, NotUnmapped, PartError, PlanError, ScopeError, StillMapped};
pub use mapped::MappedRegions;
pub use mapper::{Mapper, MemorySpace};
pub use planned::{Plan, Planned, PlannedMap};
pub use region::Region;
pub use shared::MappedMemory;
