//! Domains: page tables that devices use, and what must happen before anything of them is released.
//!
//! The order is *unmap, sync, release*, and the types keep it: a page table returns what it took
//! away as [`Retired`](crate::io_pgtable::Retired), a [`Gather`] collects any number of those, and
//! [`Domain::sync`] makes hardware forget them and returns a [`Synced`]. Pins and IOVAs are
//! released only against that proof. The sync itself frees detached tables.
//!
//! An [`Attachment`] says which domain the accesses of a device go through: none of them arrives
//! ([`Target::Blocked`]), all do ([`Target::Identity`]), or those that a domain maps
//! ([`Target::Paging`]). Regions that firmware reserved are kept out of IOVA allocation. Where the
//! device goes on using them, they are mapped one to one before the device is attached. A
//! [`FaultHandler`] hears of what the IOMMU refuses.
//!
//! # From Linux
//!
//! Of include/linux/iommu.h:
//!
//! | Linux | here |
//! |---|---|
//! | `iommu_paging_domain_alloc` | [`Domain::new`], of a page table and [`IommuOps`] |
//! | `iommu_map_nosync`, `iommu_sync_map` | [`Domain::map_spans`], which does both |
//! | `iommu_domain_ops.map_pages`, its `mapped` | [`Domain::map_pages`], [`MappedPages::bytes`] |
//! | `iommu_domain_ops.unmap_pages` | [`Domain::unmap_pages`]; a leaf is cut where it is told to |
//! | `iommu_unmap_fast` | [`Domain::unmap`], which returns spans and [`Unsynced`] |
//! | `struct iommu_iotlb_gather` | [`Gather`] |
//! | `iommu_iotlb_sync` | [`Unsynced::sync`], [`Domain::sync`]; the proof is [`Synced`] |
//! | `iommu_attach_device` | [`Attachment::attach`] |
//! | `iommu_detach_device` | [`Attachment::detach`] |
//! | `iommu_replace_group_handle` | [`Attachment::replace`] |
//! | identity and blocked domains | [`Target::Identity`], [`Target::Blocked`] |
//! | `struct iommu_ops`, `struct iommu_domain_ops` | [`Port`], [`IommuOps`] |
//! | `iommu_get_resv_regions` | [`ReservedRegions`] |
//! | `iommu_create_device_direct_mappings` | [`Prepared::with_direct`] |
//! | `iommu_set_fault_handler`, `report_iommu_fault` | [`FaultHandler`], [`FaultHook`] |
//! | `iommu_dirty_ops` | [`Domain::read_and_clear_dirty`], [`Domain::unmap_dirty`] |
//! | `struct iova_domain`, `struct iova_fq` | [`iova::Space`], [`flush_queue`] |
//!
//! ```
//! use std::error::Error;
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU64, Ordering};
//!
//! use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
//! use dmaspan::iommu::soft::{SoftIommu, SoftStream};
//! use dmaspan::iommu::{
//!     Attachment, Domain, FaultAccess, FaultHandler, FaultReport, FaultResponse, Port as _,
//!     Prepared, RegionKind, Relaxable, ReservedRegion, ReservedRegions, Target,
//! };
//! use dmaspan::{Iova, IovaRange, PhysAddr, Prot};
//!
//! struct LastFault(AtomicU64);
//!
//! impl FaultHandler for LastFault {
//!     fn fault(&self, report: &FaultReport) -> FaultResponse {
//!         self.0.store(report.iova.get(), Ordering::Relaxed);
//!         FaultResponse::Terminate
//!     }
//! }
//!
//! fn main() -> Result<(), Box<dyn Error>> {
//!     // A table, and the hooks of the IOMMU that walks it; here one of software.
//!     let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
//!     let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
//!     let table = PageTable::new(format, tables)?;
//!     let iommu = SoftIommu::over(&table);
//!     let domain = Arc::new(Domain::new(table, iommu)?);
//!     let framebuffer = IovaRange::from_len(Iova::new(0x8000_0000), 0x2000)?;
//!     let mut regions = ReservedRegions::new();
//!     regions.insert(ReservedRegion {
//!         range: framebuffer,
//!         kind: RegionKind::Direct,
//!         prot: Prot::READ_WRITE,
//!     })?;
//!     // Whoever hands out IOVAs of the domain first calls `regions.reserve_in(space, ..)`.
//!
//!     // The driver's side of the stream, and the device, which is software too.
//!     let port = SoftStream::new(7, regions.clone());
//!     let mut device = port.device();
//!     let mut writes = |at| device.probe(at, FaultAccess::Write).ok();
//!     let last = Arc::new(LastFault(AtomicU64::new(0)));
//!     port.faults().set(Some(last.clone()));
//!     let stream = Attachment::new(port)?;
//!     let unprepared = Target::Paging(Prepared::new(Arc::clone(&domain)));
//!     assert!(stream.attach(unprepared).is_err());
//!
//!     // SAFETY: nothing else is mapped there, and the frames are the device's.
//!     let prepared = unsafe { Prepared::with_direct(domain, regions, Relaxable::Keep) }?;
//!     stream.attach(Target::Paging(prepared))?;
//!     assert_eq!(writes(framebuffer.start()), Some(PhysAddr::new(0x8000_0000)));
//!     assert_eq!(writes(Iova::new(0x1000)), None);
//!     assert_eq!(last.0.load(Ordering::Relaxed), 0x1000);
//!     stream.detach()?;
//!     assert_eq!(writes(framebuffer.start()), None);
//!     Ok(())
//! }
//! ```

mod attach;
mod direct;
mod domain;
mod event;
mod fault;
pub mod flush_queue;
mod gather;
pub mod iova;
mod observer;
mod ops;
mod pages;
mod recorder;
mod reserved;
mod rewrite;
pub mod soft;

pub use attach::{
    AllMemory, AttachError, AttachedTo, Attachment, DomainOf, Incompatible, NotBlocked,
    PagingDomain, Port, Prepared, Target,
};
pub use direct::{DirectError, DirectFailed};
pub use domain::{Domain, Error, MapFailed, Unsynced};
pub use event::{Event, SyncFor};
pub use fault::{
    FaultAccess, FaultHandler, FaultHook, FaultReason, FaultReport, FaultResponse, FaultState,
};
pub use gather::{Gather, SyncFailed, Synced};
pub use observer::{Observed, Observer};
pub use ops::{DriverOps, HardwareError, Invalidation, IommuOps, Scope, Tables};
pub use pages::{MappedPages, TakenPages};
pub use recorder::{MappedBy, Recorder};
pub use reserved::{RegionKind, Relaxable, ReservedRegion, ReservedRegionError, ReservedRegions};
pub use soft::SoftIommu;
