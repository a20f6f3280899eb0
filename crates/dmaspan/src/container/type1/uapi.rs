//! The numbers of Linux's interface (include/uapi/linux/vfio.h).

/// `VFIO_GET_API_VERSION`.
pub const VFIO_GET_API_VERSION: u32 = request(0);
/// `VFIO_CHECK_EXTENSION`. Its argument is a number.
pub const VFIO_CHECK_EXTENSION: u32 = request(1);
/// `VFIO_SET_IOMMU`. Its argument is a number.
pub const VFIO_SET_IOMMU: u32 = request(2);
/// `VFIO_IOMMU_GET_INFO`: `struct vfio_iommu_type1_info`.
pub const VFIO_IOMMU_GET_INFO: u32 = request(12);
/// `VFIO_IOMMU_MAP_DMA`: `struct vfio_iommu_type1_dma_map`.
pub const VFIO_IOMMU_MAP_DMA: u32 = request(13);
/// `VFIO_IOMMU_UNMAP_DMA`: `struct vfio_iommu_type1_dma_unmap`.
pub const VFIO_IOMMU_UNMAP_DMA: u32 = request(14);
/// `VFIO_IOMMU_DIRTY_PAGES`: `struct vfio_iommu_type1_dirty_bitmap`.
pub const VFIO_IOMMU_DIRTY_PAGES: u32 = request(17);

/// What [`VFIO_GET_API_VERSION`] answers.
pub const VFIO_API_VERSION: u32 = 0;

/// An extension, and a kind of IOMMU: version 1.
pub const VFIO_TYPE1_IOMMU: u64 = 1;
/// An extension, and a kind of IOMMU: version 2.
pub const VFIO_TYPE1V2_IOMMU: u64 = 3;
/// An extension: devices cannot get round the CPU's caches.
pub const VFIO_DMA_CC_IOMMU: u64 = 4;
/// A kind of IOMMU that there was once; it opens as version 2.
pub const VFIO_RESERVED_TYPE1_NESTING_IOMMU: u64 = 6;
/// An extension: [`VFIO_DMA_UNMAP_FLAG_ALL`].
pub const VFIO_UNMAP_ALL: u64 = 9;
/// An extension: [`VFIO_DMA_UNMAP_FLAG_VADDR`] and [`VFIO_DMA_MAP_FLAG_VADDR`].
pub const VFIO_UPDATE_VADDR: u64 = 10;

/// The information has page sizes.
pub const VFIO_IOMMU_INFO_PGSIZES: u32 = 1 << 0;
/// The information has a chain of capabilities.
pub const VFIO_IOMMU_INFO_CAPS: u32 = 1 << 1;
/// The capability with the ranges in which mappings may lie.
pub const VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE: u16 = 1;
/// The capability with what dirty bitmaps may be asked for.
pub const VFIO_IOMMU_TYPE1_INFO_CAP_MIGRATION: u16 = 2;
/// The capability with how many more mappings there may be.
pub const VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL: u16 = 3;

/// The device may read.
pub const VFIO_DMA_MAP_FLAG_READ: u32 = 1 << 0;
/// The device may write.
pub const VFIO_DMA_MAP_FLAG_WRITE: u32 = 1 << 1;
/// The memory of a mapping has another address now.
pub const VFIO_DMA_MAP_FLAG_VADDR: u32 = 1 << 2;

/// The bitmap behind the structure gets what devices wrote.
pub const VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP: u32 = 1 << 0;
/// Everything.
pub const VFIO_DMA_UNMAP_FLAG_ALL: u32 = 1 << 1;
/// Nothing is unmapped, but its memory has no address for a while.
pub const VFIO_DMA_UNMAP_FLAG_VADDR: u32 = 1 << 2;

/// Begin to note what devices write.
pub const VFIO_IOMMU_DIRTY_PAGES_FLAG_START: u32 = 1 << 0;
/// Do not note it any more.
pub const VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP: u32 = 1 << 1;
/// Say what devices wrote.
pub const VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP: u32 = 1 << 2;

/// `_IO(VFIO_TYPE, VFIO_BASE + number)`.
const fn request(number: u32) -> u32 {
    ((b';' as u32) << 8) | (100 + number)
}

const _: () = assert!(VFIO_GET_API_VERSION == 0x3b64);
const _: () = assert!(VFIO_IOMMU_DIRTY_PAGES == 0x3b75);
