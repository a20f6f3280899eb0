//! Memory mapped for real devices by the kernel: VFIO type 1 and iommufd.
//!
//! The kernel pins the memory and writes the IOMMU's tables. This module plans what to ask of it
//! and owns what it got: [`VfioContainer`] and [`Ioas`] are each a [`DmaSpace`](dmaspan::DmaSpace),
//! and [`VfioDevice`] is a PCI function that reaches what is mapped in one of them.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use dmaspan::Prot;
//! use dmaspan_linux::plan::{Mapper, Region};
//! use dmaspan_linux::vfio::{Backend, BusMaster, VfioSpace};
//! use dmaspan_linux::{Memory, MemoryKind};
//!
//! let (space, device) = VfioSpace::open(Backend::Vfio, "0000:00:05.0".parse()?)?;
//! let mapper = Mapper::new(space)?;
//! let queues = Arc::new(Memory::new(MemoryKind::Thp, 4 << 20)?);
//! let mapped = mapper.plan([Region::whole(&queues, Prot::READ_WRITE)])?.map()?;
//!
//! let registers = device.bar(0)?; // a `Mmio`, which the drivers here run over
//! device.set_bus_master(BusMaster::On)?; // from here on it reaches `queues`, and nothing else
//! println!("{:?}, {} bytes of registers", mapped.iova(0), registers.len());
//! device.set_bus_master(BusMaster::Off)?;
//! mapped.unmap()?;
//! Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | Linux's linux/vfio.h, linux/iommufd.h | here |
//! |---|---|
//! | `VFIO_SET_IOMMU` | [`VfioContainer::open`] |
//! | `VFIO_GROUP_SET_CONTAINER` | [`VfioContainer::attach`] |
//! | `VFIO_DEVICE_BIND_IOMMUFD` | [`Ioas::open`], [`Ioas::attach`] |
//! | `VFIO_IOMMU_MAP_DMA`, `IOMMU_IOAS_MAP` | [`DmaSpace::map`]; mostly a [`Mapper`] calls it |
//! | `VFIO_IOMMU_UNMAP_DMA`, `IOMMU_IOAS_UNMAP` | [`DmaSpace::unmap`], [`VfioSpace::unmap_all`] |
//! | `VFIO_IOMMU_GET_INFO`, `IOMMU_IOAS_IOVA_RANGES` | [`DmaSpace::limits`] |
//! | `IOMMU_IOAS_MAP_FILE`, `IOMMU_IOAS_COPY` | [`Ioas::map_file`], [`Ioas::copy`] |
//! | `IOMMU_IOAS_COPY` for a virtual IOMMU | [`GuestDomain::map`] |
//! | `IOMMU_IOAS_NOIOMMU_GET_PA` | [`NoIommuPinner`] |
//! | `IOMMU_IOAS_ALLOW_IOVAS` | [`Ioas::allow_iovas`] |
//! | `IOMMU_OPTION` | [`Ioas::set_huge_pages`], [`Iommufd::set_accounting`] |
//! | `IOMMU_HWPT_ALLOC`, `IOMMU_HWPT_GET_DIRTY_BITMAP` | [`Ioas::hwpt`], [`Hwpt::read_dirty`] |
//! | `VFIO_IOMMU_DIRTY_PAGES` | [`VfioContainer::read_dirty`] |
//! | `VFIO_DEVICE_GET_REGION_INFO` | [`VfioDevice::bar`], [`VfioDevice::config`] |
//! | `VFIO_DEVICE_FEATURE_DMA_BUF` | [`VfioSpace::map_bar`] |
//! | `VFIO_DEVICE_SET_IRQS` | [`VfioDevice::enable_msix`] |
//! | `VFIO_DEVICE_RESET` | [`VfioDevice::reset`] |
//!
//! [`DmaSpace::map`]: dmaspan::DmaSpace::map
//! [`DmaSpace::unmap`]: dmaspan::DmaSpace::unmap
//! [`DmaSpace::limits`]: dmaspan::DmaSpace::limits
//! [`Mapper`]: crate::plan::Mapper
//!
//! **A mapping owns its memory.** A space keeps a reference to what is mapped until the kernel has
//! said that it is unmapped. Dropping a space unmaps everything. Memory whose unmap the kernel does
//! not confirm is leaked, and [`leaked_bytes`] says how much that is. A space that is forgotten
//! leaks its memory.

mod adopt;
mod backend;
mod bar;
mod config;
mod device;
mod device_error;
mod dirty;
mod error;
mod held;
mod hwpt;
mod ioas;
mod irq;
mod list;
mod noiommu;
mod opening;
mod space;
mod type1;

pub use crate::sys::kernel_mapping::{LockedBy, Requests};
pub use crate::sys::mapping_table::leaked_bytes;
pub use backend::{Backend, UnknownBackend};
pub use bar::Bar;
pub use config::ConfigSpace;
pub use device::{BusMaster, VfioDevice};
pub use device_error::DeviceError;
pub use dirty::{DirtyLogging, DirtyNotes, DirtyPages};
pub use error::{Error, OpenError};
pub use held::{GuestDomain, HeldGuest};
pub use hwpt::Hwpt;
pub use ioas::{HugePages, Ioas, Iommufd};
pub use irq::{IrqEvent, Msix};
pub use list::{SpaceMapping, SpaceSource, SpaceState};
pub use noiommu::{NoIommuPin, NoIommuPinError, NoIommuPinner};
pub use space::VfioSpace;
pub use type1::VfioContainer;

#[cfg(feature = "iommufd-test")]
mod mock;
#[cfg(feature = "iommufd-test")]
pub use mock::MockDevice;
