//! VFIO's interface (include/uapi/linux/vfio.h). The container's own numbers are those that
//! [`dmaspan::container::type1::uapi`] serves.

use super::structures;

/// `VFIO_GROUP_GET_STATUS` … `VFIO_DEVICE_RESET`, `_IO(';', 100 + n)`.
const fn number(n: u32) -> u32 {
    0x3b00 | (100 + n)
}

pub(crate) const GROUP_GET_STATUS: u32 = number(3);
pub(crate) const GROUP_SET_CONTAINER: u32 = number(4);
pub(crate) const GROUP_GET_DEVICE_FD: u32 = number(6);
pub(crate) const DEVICE_GET_INFO: u32 = number(7);
pub(crate) const DEVICE_GET_REGION_INFO: u32 = number(8);
pub(crate) const DEVICE_GET_IRQ_INFO: u32 = number(9);
pub(crate) const DEVICE_SET_IRQS: u32 = number(10);
pub(crate) const DEVICE_RESET: u32 = number(11);
pub(crate) const DEVICE_FEATURE: u32 = number(17);
pub(crate) const DEVICE_BIND_IOMMUFD: u32 = number(18);
pub(crate) const DEVICE_ATTACH_IOMMUFD_PT: u32 = number(19);
pub(crate) const DEVICE_DETACH_IOMMUFD_PT: u32 = number(20);

const _: () = assert!(GROUP_GET_STATUS == 0x3b67);
const _: () = assert!(DEVICE_DETACH_IOMMUFD_PT == 0x3b78);

pub(crate) const GROUP_VIABLE: u32 = 1 << 0;

pub(crate) const DEVICE_HAS_RESET: u32 = 1 << 0;
pub(crate) const DEVICE_IS_PCI: u32 = 1 << 1;

pub(crate) const REGION_READ: u32 = 1 << 0;
pub(crate) const REGION_WRITE: u32 = 1 << 1;
pub(crate) const REGION_MMAP: u32 = 1 << 2;
pub(crate) const REGION_CAPS: u32 = 1 << 3;

pub(crate) const REGION_CAP_SPARSE_MMAP: u16 = 1;

/// `VFIO_PCI_CONFIG_REGION_INDEX`; the BARs are 0 to 5.
pub(crate) const PCI_CONFIG_REGION: u32 = 7;
pub(crate) const PCI_BARS: u32 = 6;
pub(crate) const PCI_MSIX_IRQ: u32 = 2;

pub(crate) const IRQ_SET_DATA_NONE: u32 = 1 << 0;
pub(crate) const IRQ_SET_DATA_EVENTFD: u32 = 1 << 2;
pub(crate) const IRQ_SET_ACTION_TRIGGER: u32 = 1 << 5;

pub(crate) const FEATURE_GET: u32 = 1 << 16;
pub(crate) const FEATURE_DMA_BUF: u32 = 11;

structures! {
    /// `struct vfio_group_status`.
    GroupStatus (8) {
        argsz: u32 = 0,
        flags: u32 = 4,
    }
    /// `struct vfio_device_info` as of Linux 4.12; later ones have capabilities behind it.
    DeviceInfo (16) {
        argsz: u32 = 0,
        flags: u32 = 4,
        num_regions: u32 = 8,
        num_irqs: u32 = 12,
    }
    /// `struct vfio_region_info`, which capabilities may follow.
    RegionInfo (32) {
        argsz: u32 = 0,
        flags: u32 = 4,
        index: u32 = 8,
        cap_offset: u32 = 12,
        size: u64 = 16,
        offset: u64 = 24,
    }
    /// `struct vfio_info_cap_header`.
    CapHeader (8) {
        id: u16 = 0,
        version: u16 = 2,
        next: u32 = 4,
    }
    /// `struct vfio_irq_info`.
    IrqInfo (16) {
        argsz: u32 = 0,
        flags: u32 = 4,
        index: u32 = 8,
        count: u32 = 12,
    }
    /// `struct vfio_irq_set`, which the data follow.
    IrqSet (20) {
        argsz: u32 = 0,
        flags: u32 = 4,
        index: u32 = 8,
        start: u32 = 12,
        count: u32 = 16,
    }
    /// `struct vfio_device_feature` with `struct vfio_device_feature_dma_buf` of one range.
    FeatureDmaBuf (40) {
        argsz: u32 = 0,
        flags: u32 = 4,
        region_index: u32 = 8,
        open_flags: u32 = 12,
        dma_buf_flags: u32 = 16,
        nr_ranges: u32 = 20,
        offset: u64 = 24,
        length: u64 = 32,
    }
    /// `struct vfio_device_bind_iommufd` as of Linux 6.6.
    BindIommufd (16) {
        argsz: u32 = 0,
        flags: u32 = 4,
        iommufd: i32 = 8,
        out_devid: u32 = 12,
    }
    /// `struct vfio_device_attach_iommufd_pt` as of Linux 6.6.
    AttachIommufdPt (12) {
        argsz: u32 = 0,
        flags: u32 = 4,
        pt_id: u32 = 8,
    }
    /// `struct vfio_device_detach_iommufd_pt` as of Linux 6.6.
    DetachIommufdPt (8) {
        argsz: u32 = 0,
        flags: u32 = 4,
    }
    /// `struct vfio_iommu_type1_info`, which capabilities may follow.
    Type1Info (24) {
        argsz: u32 = 0,
        flags: u32 = 4,
        iova_pgsizes: u64 = 8,
        cap_offset: u32 = 16,
        pad: u32 = 20,
    }
    /// `struct vfio_iommu_type1_dma_map`.
    Type1Map (32) {
        argsz: u32 = 0,
        flags: u32 = 4,
        vaddr: u64 = 8,
        iova: u64 = 16,
        size: u64 = 24,
    }
    /// `struct vfio_iommu_type1_dma_unmap` without a bitmap.
    Type1Unmap (24) {
        argsz: u32 = 0,
        flags: u32 = 4,
        iova: u64 = 8,
        size: u64 = 16,
    }
    /// `struct vfio_iommu_type1_dirty_bitmap` without a range: to start and to stop.
    Type1Dirty (8) {
        argsz: u32 = 0,
        flags: u32 = 4,
    }
    /// `struct vfio_iommu_type1_dirty_bitmap` with `struct vfio_iommu_type1_dirty_bitmap_get`.
    Type1DirtyGet (48) {
        argsz: u32 = 0,
        flags: u32 = 4,
        iova: u64 = 8,
        size: u64 = 16,
        bitmap_pgsize: u64 = 24,
        bitmap_size: u64 = 32,
        bitmap_data: u64 = 40,
    }
}
