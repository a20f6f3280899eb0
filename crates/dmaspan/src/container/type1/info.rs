//! `VFIO_IOMMU_GET_INFO`: page sizes and a chain of capabilities.

use alloc::vec::Vec;

use lock_api::RawMutex;

use super::super::Info;
use super::Type1;
use super::arg::{Arg, index};
use super::bitmap::MAX_BYTES;
use super::uapi::{
    VFIO_IOMMU_INFO_CAPS, VFIO_IOMMU_INFO_PGSIZES, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE,
    VFIO_IOMMU_TYPE1_INFO_CAP_MIGRATION, VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL,
};
use crate::error::Errno;
use crate::pin::Pinner;

/// Up to `iova_pgsizes`.
const MIN_LEN: u32 = 16;
/// All of `struct vfio_iommu_type1_info`, the padding at its end included. The capabilities lie
/// behind it.
const LEN: u32 = 24;

impl<P: Pinner, L: RawMutex, const BATCH: usize> Type1<'_, P, L, BATCH> {
    /// Fills in as much as `argsz` has room for. Where that is not all, `argsz` becomes what is
    /// needed and the chain is left out.
    pub(super) fn get_info(&self, mut arg: Arg<'_>) -> Result<u32, Errno> {
        // Whatever flags the caller left there, they are only written.
        let (argsz, _) = arg.header(MIN_LEN, u32::MAX)?;
        let has = self.container.info();
        let chain = chain(&has);
        let needed = u32::try_from(chain.len()).map_or(u32::MAX, |len| LEN.saturating_add(len));
        let (size, cap_offset) = if argsz < needed { (needed, 0) } else { (argsz, LEN) };
        let flags = VFIO_IOMMU_INFO_PGSIZES | VFIO_IOMMU_INFO_CAPS;
        let mut info = Vec::with_capacity(index(LEN)?);
        info.extend(size.to_ne_bytes());
        info.extend(flags.to_ne_bytes());
        info.extend(has.page_sizes.to_ne_bytes());
        info.extend(cap_offset.to_ne_bytes());
        info.extend(0u32.to_ne_bytes());
        if cap_offset == 0 {
            info.truncate(index(argsz)?);
        } else {
            info.extend(chain);
        }
        arg.put(0, &info)?;
        Ok(0)
    }
}

/// The capabilities, in the order of Linux, as they lie in memory from offset [`LEN`] on.
fn chain(has: &Info) -> Vec<u8> {
    let granule = has.page_sizes & has.page_sizes.wrapping_neg();
    let migration = [0, granule, MAX_BYTES].map(u64::to_ne_bytes);
    let avail = u32::try_from(has.mappings_left).unwrap_or(u32::MAX).to_ne_bytes();
    let mut bodies = alloc::vec![
        (VFIO_IOMMU_TYPE1_INFO_CAP_MIGRATION, migration.as_flattened().to_vec()),
        (VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL, avail.to_vec()),
    ];
    // Without domains mappings may lie anywhere, and Linux has no list.
    let ranges = if has.domains.is_empty() { &[][..] } else { &has.iova_ranges };
    if let Ok(count @ 1..) = u32::try_from(ranges.len()) {
        let mut body = [count, 0].map(u32::to_ne_bytes).as_flattened().to_vec();
        for range in ranges {
            body.extend(range.start().get().to_ne_bytes());
            body.extend(range.last().get().to_ne_bytes());
        }
        bodies.push((VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE, body));
    }
    let mut chain = Vec::new();
    let count = bodies.len();
    for (n, (id, body)) in bodies.into_iter().enumerate() {
        let start = chain.len();
        chain.extend(id.to_ne_bytes());
        // All capabilities are of version 1.
        chain.extend(1u16.to_ne_bytes());
        let end = (start + 8 + body.len()).next_multiple_of(8);
        let next = u32::try_from(end).map_or(0, |end| LEN.saturating_add(end));
        chain.extend((if n + 1 < count { next } else { 0 }).to_ne_bytes());
        chain.extend(body);
        chain.resize(end, 0);
    }
    chain
}
