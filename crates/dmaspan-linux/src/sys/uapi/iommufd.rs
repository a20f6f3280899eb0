//! iommufd's interface (include/uapi/linux/iommufd.h).

use super::structures;

/// `_IO(IOMMUFD_TYPE, n)`.
const fn number(n: u32) -> u32 {
    0x3b00 | n
}

pub(crate) const DESTROY: u32 = number(0x80);
pub(crate) const IOAS_ALLOC: u32 = number(0x81);
pub(crate) const IOAS_ALLOW_IOVAS: u32 = number(0x82);
pub(crate) const IOAS_COPY: u32 = number(0x83);
pub(crate) const IOAS_IOVA_RANGES: u32 = number(0x84);
pub(crate) const IOAS_MAP: u32 = number(0x85);
pub(crate) const IOAS_UNMAP: u32 = number(0x86);
pub(crate) const OPTION: u32 = number(0x87);
pub(crate) const HWPT_ALLOC: u32 = number(0x89);
pub(crate) const GET_HW_INFO: u32 = number(0x8a);
pub(crate) const HWPT_SET_DIRTY_TRACKING: u32 = number(0x8b);
pub(crate) const HWPT_GET_DIRTY_BITMAP: u32 = number(0x8c);
pub(crate) const IOAS_MAP_FILE: u32 = number(0x8f);
pub(crate) const IOAS_NOIOMMU_GET_PA: u32 = number(0x95);

/// Flags of `IOAS_MAP`, `IOAS_MAP_FILE` and `IOAS_COPY`.
pub(crate) const MAP_FIXED_IOVA: u32 = 1 << 0;
pub(crate) const MAP_WRITEABLE: u32 = 1 << 1;
pub(crate) const MAP_READABLE: u32 = 1 << 2;

pub(crate) const OPTION_RLIMIT_MODE: u32 = 0;
pub(crate) const OPTION_HUGE_PAGES: u32 = 1;
pub(crate) const OPTION_SET: u16 = 0;
pub(crate) const OPTION_GET: u16 = 1;

pub(crate) const HWPT_ALLOC_DIRTY_TRACKING: u32 = 1 << 1;
pub(crate) const HW_CAP_DIRTY_TRACKING: u64 = 1 << 0;
pub(crate) const DIRTY_TRACKING_ENABLE: u32 = 1 << 0;
pub(crate) const DIRTY_BITMAP_NO_CLEAR: u32 = 1 << 0;

structures! {
    /// `struct iommu_destroy`.
    Destroy (8) {
        size: u32 = 0,
        id: u32 = 4,
    }
    /// `struct iommu_ioas_alloc`.
    IoasAlloc (12) {
        size: u32 = 0,
        flags: u32 = 4,
        out_ioas_id: u32 = 8,
    }
    /// `struct iommu_iova_range`.
    Range (16) {
        start: u64 = 0,
        last: u64 = 8,
    }
    /// `struct iommu_ioas_iova_ranges`.
    IovaRanges (32) {
        size: u32 = 0,
        ioas_id: u32 = 4,
        num_iovas: u32 = 8,
        reserved: u32 = 12,
        allowed_iovas: u64 = 16,
        out_iova_alignment: u64 = 24,
    }
    /// `struct iommu_ioas_allow_iovas`.
    AllowIovas (24) {
        size: u32 = 0,
        ioas_id: u32 = 4,
        num_iovas: u32 = 8,
        reserved: u32 = 12,
        allowed_iovas: u64 = 16,
    }
    /// `struct iommu_ioas_map`.
    IoasMap (40) {
        size: u32 = 0,
        flags: u32 = 4,
        ioas_id: u32 = 8,
        reserved: u32 = 12,
        user_va: u64 = 16,
        length: u64 = 24,
        iova: u64 = 32,
    }
    /// `struct iommu_ioas_map_file`.
    IoasMapFile (40) {
        size: u32 = 0,
        flags: u32 = 4,
        ioas_id: u32 = 8,
        fd: i32 = 12,
        start: u64 = 16,
        length: u64 = 24,
        iova: u64 = 32,
    }
    /// `struct iommu_ioas_copy`.
    IoasCopy (40) {
        size: u32 = 0,
        flags: u32 = 4,
        dst_ioas_id: u32 = 8,
        src_ioas_id: u32 = 12,
        length: u64 = 16,
        dst_iova: u64 = 24,
        src_iova: u64 = 32,
    }
    /// `struct iommu_ioas_unmap`.
    IoasUnmap (24) {
        size: u32 = 0,
        ioas_id: u32 = 4,
        iova: u64 = 8,
        length: u64 = 16,
    }
    /// `struct iommu_ioas_noiommu_get_pa` of Linux 7.3.
    IoasNoIommuGetPa (40) {
        size: u32 = 0,
        flags: u32 = 4,
        ioas_id: u32 = 8,
        reserved: u32 = 12,
        iova: u64 = 16,
        length: u64 = 24,
        out_phys: u64 = 32,
    }
    /// `struct iommu_option`.
    OptionValue (24) {
        size: u32 = 0,
        option_id: u32 = 4,
        op: u16 = 8,
        reserved: u16 = 10,
        object_id: u32 = 12,
        val64: u64 = 16,
    }
    /// `struct iommu_hwpt_alloc` as of Linux 6.7.
    HwptAlloc (40) {
        size: u32 = 0,
        flags: u32 = 4,
        dev_id: u32 = 8,
        pt_id: u32 = 12,
        out_hwpt_id: u32 = 16,
        reserved: u32 = 20,
        data_type: u32 = 24,
        data_len: u32 = 28,
        data_uptr: u64 = 32,
    }
    /// `struct iommu_hw_info`.
    HwInfo (40) {
        size: u32 = 0,
        flags: u32 = 4,
        dev_id: u32 = 8,
        data_len: u32 = 12,
        data_uptr: u64 = 16,
        out_data_type: u32 = 24,
        reserved: u32 = 28,
        out_capabilities: u64 = 32,
    }
    /// `struct iommu_hwpt_set_dirty_tracking`.
    HwptSetDirtyTracking (16) {
        size: u32 = 0,
        flags: u32 = 4,
        hwpt_id: u32 = 8,
        reserved: u32 = 12,
    }
    /// `struct iommu_hwpt_get_dirty_bitmap`.
    HwptGetDirtyBitmap (48) {
        size: u32 = 0,
        hwpt_id: u32 = 4,
        flags: u32 = 8,
        reserved: u32 = 12,
        iova: u64 = 16,
        length: u64 = 24,
        page_size: u64 = 32,
        data: u64 = 40,
    }
}
