//! The DMA API: what a driver calls.
//!
//! A [`Device`] maps buffers and gets addresses for the device, translated, direct or bounced; the
//! driver need not know which.
//!
//! | to map | by | to end it |
//! |---|---|---|
//! | one contiguous buffer | [`Device::map_single`] | [`Device::unmap`] |
//! | a list of pieces, as few segments | [`Device::map_list`] | [`Device::unmap_list`] |
//! | pieces, one by one | [`Device::reserve`], [`link`](Device::link) | [`Device::destroy`] |
//! | a [registered buffer](crate::regbuf) | [`MappedSource`], [`Device::map_buffer`] | |
//! | memory to share for long | [`Device::alloc`], [`CoherentPool`] | [`Device::free`] |
//! | a buffer while a closure runs | [`Device::with_mapped`] | |
//! | what a driver keeps as address and length | [`Device::into_raw`] | [`Device::unmap_raw`] |
//! | what a device overwrites, by [`Attrs`] | the same | [`Device::unmap_written`] and its likes |
//!
//! | Linux's include/linux/dma-mapping.h | here |
//! |---|---|
//! | `dma_map_single`, `dma_map_page`, `dma_map_phys` | [`Device::map_single`] |
//! | `dma_unmap_single` and its likes | [`Device::unmap`] |
//! | `dma_map_sgtable`, `dma_unmap_sgtable` | [`Device::map_list`], [`Device::unmap_list`] |
//! | `dma_sync_single_for_cpu` | [`Device::sync_for_cpu`] |
//! | `dma_sync_single_for_device` | [`Device::sync_for_device`] |
//! | `dma_iova_try_alloc`, `dma_iova_link` | [`Device::reserve`], [`Device::link`] |
//! | `dma_iova_sync` | [`Device::announce`] |
//! | `dma_iova_unlink`, `dma_iova_destroy` | [`Device::unlink`], [`Device::destroy`] |
//! | `dma_map_resource`, `DMA_ATTR_MMIO` | a [`Piece`] of registers |
//! | `DMA_ATTR_SKIP_CPU_SYNC`, `DMA_ATTR_PRIVILEGED` | [`Attrs`] |
//! | `dma_set_mask`, `dma_set_max_seg_size`, `dma_set_seg_boundary` | [`DeviceConfig`] |
//! | `dma_alloc_coherent`, `dma_free_coherent` | [`Device::alloc`], [`Device::free`] |
//! | `dma_pool_create`, `dma_pool_alloc` | [`CoherentPool`] |
//! | `dma_max_mapping_size` | [`Device::max_mapping_len`] |
//! | `dma_get_merge_boundary` | [`Device::merge_boundary`] |
//! | `iommu.strict`, `iommu_dma_init_fq` | [`DmaConfig`], [`Flush`] |
//!
//! The device bounces what its hardware cannot or must not have, through a
//! [`swiotlb::Pool`](crate::swiotlb::Pool) or another [`BouncePool`]: a buffer that the hardware
//! does not reach and, [where everything is](Bounce::Always), every buffer. Of a buffer that shares
//! granules with other memory it bounces only the ends, if the hardware is not
//! [trusted](Trust::Untrusted), and maps the rest straight, at addresses that follow each other. A
//! driver [leases](Leased) from the pool what it uses again and again. A [registered](MappedSource)
//! buffer is never bounced: it is mapped once, and stays so until its last reference is gone.
//!
//! A page table and the hooks of an IOMMU make a [`Domain`](crate::iommu::Domain), a domain and a
//! [`Platform`](crate::Platform) make a [`DmaDomain`], and that makes a [`Device`]. A mapping owns
//! its memory. An unmap gives the memory back, or the flush drops it where the unmap is
//! [lazy](Flush::Lazy). A mapping that is dropped leaks, because a device may still use it.
//!
//! Errors that give memory or a mapping back are errors as others. By `?` they become a
//! `Box<dyn Error>`, or the like, with what they hold; or an [`Error`], without: memory that no
//! device reaches is dropped then, and a mapping that is still mapped leaks, as one that is dropped
//! does.
//!
//! A plain [`Device`] names neither its translation nor its pool nor the kind of its memory, so a
//! field of a driver has a short type and a function takes a `&Device`: from
//! [`Device::erased`]. What it maps is a plain [`Mapping`], of [`AnyMemory`]. The type that names
//! them saves a few nanoseconds a map.
//!
//! ```
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! use dmaspan::dma::{
//!     Attrs, Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Flush, NoPool, Piece,
//!     ReserveRequest, Segment, Unmapped,
//! };
//! use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
//! use dmaspan::iommu::{Domain, SoftIommu};
//! use dmaspan::platform::OneThread;
//! use dmaspan::{Direction, PhysAddr, RangeError, Span};
//!
//! /// The driver's frames, in any number of pieces.
//! #[derive(Debug)]
//! struct Frames(Vec<Piece>);
//!
//! // SAFETY: the frames are this driver's for good, and nothing refers to them.
//! unsafe impl DmaMemory for Frames {
//!     fn pieces(&self) -> &[Piece] {
//!         &self.0
//!     }
//! }
//!
//! fn frames(spans: &[(u64, u64)]) -> Result<Frames, RangeError> {
//!     let piece = |&(at, len)| Ok(Piece::memory(Span::new(PhysAddr::new(at), len)?));
//!     spans.iter().map(piece).collect::<Result<_, _>>().map(Frames)
//! }
//!
//! fn main() -> Result<(), Box<dyn Error>> {
//!     // What tells hardware is a driver's `IommuOps`; here of an IOMMU of software. In a process,
//!     // `dmaspan_linux::UserPlatform` is the platform.
//!     let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
//!     let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
//!     let table = PageTable::new(format, tables)?;
//!     let iommu = SoftIommu::over(&table);
//!     let config = DmaConfig { flush: Flush::Lazy, ..DmaConfig::new(1) };
//!     let domain = Arc::new(DmaDomain::new(Domain::new(table, iommu)?, config, OneThread)?);
//!     let nic = Device::new(Arc::clone(&domain), NoPool, DeviceConfig::bits(64))?;
//!
//!     // One buffer, unmapped lazily: the queue owns it until the flush.
//!     let packet = nic.map_single(frames(&[(0x8000_1200, 1500)])?, Direction::FromDevice)?;
//!     assert_eq!(packet.addr().get() & 0xfff, 0x200);
//!     assert!(matches!(nic.unmap(packet)?, Unmapped::Queued));
//!     domain.flush()?; // or `expire`, by a timer
//!
//!     // And strictly: no device reaches it any more.
//!     let strict = Attrs { flush: Some(Flush::Strict), ..Attrs::default() };
//!     let ring = frames(&[(0x8000_4000, 0x2000)])?;
//!     let ring = nic.map_single_with(ring, Direction::Bidirectional, strict)?;
//!     assert!(matches!(nic.unmap(ring)?, Unmapped::Released(_)));
//!
//!     // A list of three pieces, which the device gets as two segments.
//!     let mut segments = [Segment::default(); 3];
//!     let list = frames(&[(0x9000_0800, 0x800), (0xa000_0000, 0x1000), (0xb000_0010, 0x20)])?;
//!     let list = nic.map_list(list, Direction::ToDevice, &mut segments)?;
//!     assert_eq!(list.segment_count(), 2);
//!     assert_eq!((segments[0].len, segments[1].len), (0x1800, 0x20));
//!     let _queued = nic.unmap_list(list)?;
//!
//!     // Pieces that come one by one.
//!     let direction = Direction::ToDevice;
//!     let request = ReserveRequest { len: 0x2000, offset: 0, pieces: 2, direction };
//!     let mut reservation = nic.reserve(request)?;
//!     nic.link(&mut reservation, 0, frames(&[(0xc000_0000, 0x1000)])?)?;
//!     nic.link(&mut reservation, 0x1000, frames(&[(0xd000_0000, 0x1000)])?)?;
//!     nic.announce(&mut reservation)?;
//!     nic.destroy(reservation, drop)?;
//!     Ok(())
//! }
//! ```

mod any;
mod attach;
mod attrs;
mod bounce;
mod coherent;
mod device;
mod direct;
mod domain;
mod error;
mod links;
mod list;
mod memory;
mod queued;
mod raw;
mod reach;
mod registered;
mod reservation;
mod scope;
mod single;
mod slots;
mod stage;
mod sync;
mod unmapped;
mod way;

pub use any::{AnyMemory, AnyPool, AnySlot, AnyTranslation};
pub use attrs::{Attrs, CpuSync, Privilege};
pub use bounce::{Bounce, BouncePool, FrameBounce, NoPool, NoSlot};
pub use coherent::{
    Coherent, CoherentBlock, CoherentFrames, CoherentMemory, CoherentPool, CoherentRequest,
    Contiguity, ForeignBlock, FrameMemory, FreeFailed, NoCoherent, Scalar,
};
pub use device::{Device, DeviceConfig, DeviceLimits, Trust};
pub use direct::Direct;
pub use domain::{DmaConfig, DmaDomain, Flush, Translation};
pub use error::Error;
pub use list::{ListMapping, ListSegments, Segment, UnmapListFailed};
pub use memory::{DmaMemory, FromRegistered, Leased, Piece, RawMemory, Registered, Via};
pub use registered::{MapBufferError, MappedSource, MappedSourceError, MustBounce};
pub use reservation::{DestroyFailed, Reservation, ReserveRequest};
pub use scope::ScopeFailed;
pub use single::{Mapping, Refused, UnmapFailed, Unmapped};
pub use unmapped::{UnmappedIovas, UnmappedState};

pub use crate::swiotlb::{Fill, Original, SlotRequest, To};
