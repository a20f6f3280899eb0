//! `VFIO_IOMMU_DIRTY_PAGES`, and unmapping with a bitmap.

use alloc::vec::Vec;

use lock_api::RawMutex;

use super::super::mapping::{SlotState, overlapping};
use super::super::{DirtyRead, DirtySink, Undelivered, Version};
use super::arg::Arg;
use super::bitmap::{self, Bitmap, Delivery};
use super::uapi::{
    VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP, VFIO_IOMMU_DIRTY_PAGES_FLAG_START,
    VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP,
};
use super::{Client, Type1};
use crate::addr::Iova;
use crate::error::Errno;
use crate::pin::Pinner;
use crate::range::IovaRange;

/// `struct vfio_iommu_type1_dirty_bitmap` without what may follow.
const LEN: u32 = 8;
/// `struct vfio_iommu_type1_dirty_bitmap_get`, which follows it.
const GET_LEN: u32 = 16 + bitmap::LEN;
const FLAGS: u32 = VFIO_IOMMU_DIRTY_PAGES_FLAG_START
    | VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP
    | VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP;

impl<P: Pinner, L: RawMutex, const BATCH: usize> Type1<'_, P, L, BATCH> {
    /// The order of the checks is that of `vfio_iommu_type1_dirty_pages`.
    pub(super) fn dirty_pages(&self, client: &Client<'_, P>, arg: &Arg<'_>) -> Result<u32, Errno> {
        if self.container.version() == Version::V1 {
            return Err(Errno::EACCES);
        }
        let (argsz, flags) = arg.header(LEN, FLAGS)?;
        let done = match flags {
            VFIO_IOMMU_DIRTY_PAGES_FLAG_START => self.container.start_dirty(),
            VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP => self.container.stop_dirty(),
            VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP if argsz - LEN >= GET_LEN => {
                return self.get_dirty(client, arg);
            }
            _ => return Err(Errno::EINVAL),
        };
        done.map(|()| 0).map_err(|error| self.errno(&error))
    }

    fn get_dirty(&self, client: &Client<'_, P>, arg: &Arg<'_>) -> Result<u32, Errno> {
        let (iova, size) = (arg.u64(8)?, arg.u64(16)?);
        let bitmap = Bitmap::read(arg, 24)?;
        let range = IovaRange::from_len(Iova::new(iova), size).map_err(|error| error.errno())?;
        bitmap.check(size)?;
        let mut delivery = self.delivery(client, range, bitmap)?;
        let read = self.container.dirty_bitmap_to(
            range,
            bitmap.page_size,
            &mut delivery,
            DirtyRead::Clear,
        );
        read.map(|()| 0).map_err(|error| self.errno(&error))
    }

    /// Nothing is unmapped where the client's bitmap cannot be written. (Linux unmaps what comes
    /// before the first mapping whose bits it cannot write.)
    pub(super) fn unmap_dirty(
        &self,
        client: &Client<'_, P>,
        range: IovaRange,
        bitmap: Bitmap,
    ) -> Result<u64, Errno> {
        let delivery = self.delivery(client, range, bitmap)?;
        delivery.probe()?;
        let count = usize::try_from(bitmap.needed(range)).map_err(|_| Errno::ENOMEM)?;
        let mut words = Vec::new();
        words.try_reserve_exact(count).map_err(|_| Errno::ENOMEM)?;
        words.resize(count, 0u64);
        let unmapped = self.container.unmap_dirty(range, bitmap.page_size, &mut words);
        let unmapped = unmapped.map_err(|error| self.errno(&error))?;
        for (n, words) in (0u64..).zip(words.chunks(64)) {
            let mut piece = [0; 512];
            for (bytes, word) in piece.chunks_exact_mut(8).zip(words) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
            delivery.deliver(512 * n, &piece[..8 * words.len()])?;
        }
        Ok(unmapped)
    }

    /// Where the bits of what is mapped in `range` go.
    ///
    /// # Errors
    ///
    /// `EINVAL` where nothing is tracked, where a bit is not for the smallest page, and where the
    /// range is not aligned or cuts a mapping.
    fn delivery<'a>(
        &'a self,
        client: &Client<'a, P>,
        range: IovaRange,
        bitmap: Bitmap,
    ) -> Result<Delivery<'a, P>, Errno> {
        let mut delivery = Delivery::new(&self.container.pinner, client.space, bitmap);
        let all = self.container.state.lock();
        let granule = self.container.granule(&all.domains);
        let ends = range.start().get() | range.last().get().wrapping_add(1);
        let tracked = self.container.tracks_dirty() && bitmap.page_size == granule;
        if !tracked || ends & granule.wrapping_sub(1) != 0 {
            return Err(Errno::EINVAL);
        }
        for (mapped, slot) in overlapping(&all.tree, range) {
            // A mapping in quarantine is not mapped, and counts as written.
            if !range.covers(mapped) && !matches!(slot.state, SlotState::Quarantined(_)) {
                return Err(Errno::EINVAL);
            }
            let reported = mapped.intersection(range).unwrap_or(range);
            delivery.add(range.start().get(), reported)?;
        }
        Ok(delivery)
    }
}

impl<P: Pinner> DirtySink for Delivery<'_, P> {
    fn room(&self) -> u64 {
        self.len()
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Undelivered> {
        self.deliver(offset, bytes).map_err(|_| Undelivered)
    }
}
