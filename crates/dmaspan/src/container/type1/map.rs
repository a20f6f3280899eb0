//! `VFIO_IOMMU_MAP_DMA` and `VFIO_IOMMU_UNMAP_DMA`.

use lock_api::RawMutex;

use super::super::{Error, MapRequest};
use super::arg::Arg;
use super::bitmap::{self, Bitmap};
use super::uapi::{
    VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_VADDR, VFIO_DMA_MAP_FLAG_WRITE,
    VFIO_DMA_UNMAP_FLAG_ALL, VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP, VFIO_DMA_UNMAP_FLAG_VADDR,
};
use super::{Client, Type1};
use crate::addr::{Iova, UserAddr};
use crate::error::Errno;
use crate::label::Label;
use crate::pin::Pinner;
use crate::prot::Prot;
use crate::range::{IovaRange, UserRange};

/// `struct vfio_iommu_type1_dma_map`.
const MAP_LEN: u32 = 32;
const MAP_FLAGS: u32 = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE | VFIO_DMA_MAP_FLAG_VADDR;

/// `struct vfio_iommu_type1_dma_unmap` without what may follow.
const UNMAP_LEN: u32 = 24;
const UNMAP_FLAGS: u32 =
    VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP | VFIO_DMA_UNMAP_FLAG_ALL | VFIO_DMA_UNMAP_FLAG_VADDR;

/// What an unmap is about.
#[derive(Clone, Copy)]
pub(super) enum What {
    All,
    Range(IovaRange),
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Type1<'_, P, L, BATCH> {
    /// The order of the checks is that of `vfio_dma_do_map`. The container checks again what
    /// depends on what is mapped, under its lock.
    pub(super) fn map_dma(&self, client: &Client<'_, P>, arg: &Arg<'_>) -> Result<u32, Errno> {
        let (_, flags) = arg.header(MAP_LEN, MAP_FLAGS)?;
        let (vaddr, iova, size) = (arg.u64(8)?, arg.u64(16)?, arg.u64(24)?);
        native(&[vaddr, size])?;
        let range = IovaRange::from_len(Iova::new(iova), size).map_err(|error| error.errno())?;
        let user =
            UserRange::from_len(UserAddr::new(vaddr), size).map_err(|error| error.errno())?;
        let mut prot = Prot::empty();
        prot.set(Prot::READ, flags & VFIO_DMA_MAP_FLAG_READ != 0);
        prot.set(Prot::WRITE, flags & VFIO_DMA_MAP_FLAG_WRITE != 0);
        let moves = flags & VFIO_DMA_MAP_FLAG_VADDR != 0;
        if moves == prot.permits_access() {
            return Err(Errno::EINVAL);
        }
        if moves {
            return self.update(client, range.start(), user);
        }
        let cancelled = || client.has_exited() || (client.interrupted)();
        let request = MapRequest {
            space: client.space,
            user,
            iova: range.start(),
            prot: prot.union(Prot::CACHE),
            owner: Some(client.account),
            label: Label::caller(),
            cancelled: &cancelled,
        };
        match self.container.map_request(&request) {
            Ok(_) => Ok(0),
            Err(error) if client.has_exited() && pins(&error) => Err(Errno::ENODEV),
            Err(error) => Err(self.errno(&error)),
        }
    }

    /// The order of the checks is that of `vfio_iommu_type1_unmap_dma` and `vfio_dma_do_unmap`.
    pub(super) fn unmap_dma(
        &self,
        client: &Client<'_, P>,
        arg: &mut Arg<'_>,
    ) -> Result<u32, Errno> {
        let (argsz, flags) = arg.header(UNMAP_LEN, UNMAP_FLAGS)?;
        let (iova, size) = (arg.u64(8)?, arg.u64(16)?);
        let all = flags & VFIO_DMA_UNMAP_FLAG_ALL != 0;
        let vaddr = flags & VFIO_DMA_UNMAP_FLAG_VADDR != 0;
        let mut wanted = None;
        if flags & VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP != 0 {
            if all || vaddr || argsz < UNMAP_LEN + bitmap::LEN {
                return Err(Errno::EINVAL);
            }
            let bitmap = Bitmap::read(arg, 24)?;
            bitmap.check(size)?;
            wanted = Some(bitmap);
        }
        if vaddr && self.has_emulated() {
            return Err(Errno::EBUSY);
        }
        native(&[size])?;
        let range = IovaRange::from_len(Iova::new(iova), size);
        // The container looks itself whether a range that is unmapped is of whole pages.
        if all || vaddr || wanted.is_some() || range.is_err() {
            let granule = self.granule();
            let aligned = |number: u64| number & granule.wrapping_sub(1) == 0;
            if !aligned(iova) || (all && (iova | size) != 0) || !(all || aligned(size)) {
                return Err(Errno::EINVAL);
            }
        }
        let what = if all { What::All } else { What::Range(range.map_err(|error| error.errno())?) };
        let unmapped = match (what, wanted) {
            _ if vaddr => self.invalidate(what)?,
            (What::Range(range), Some(bitmap)) => self.unmap_dirty(client, range, bitmap)?,
            (What::Range(range), None) => {
                self.container.unmap(range).map_err(|error| self.errno(&error))?
            }
            (What::All, _) => self.container.unmap_all().map_err(|error| self.errno(&error))?,
        };
        arg.put(16, &unmapped.to_ne_bytes())?;
        Ok(0)
    }
}

/// Whether a map had begun to pin when it failed.
fn pins<E: core::error::Error>(error: &Error<E>) -> bool {
    matches!(
        error,
        Error::Cancelled { .. }
            | Error::OverLimit { .. }
            | Error::Pin { .. }
            | Error::PinnedLen { .. }
            | Error::Map { .. }
    )
}

/// Whether the machine has numbers as large as these.
#[inline(always)]
fn native(numbers: &[u64]) -> Result<(), Errno> {
    let fits = |number: &u64| usize::try_from(*number).is_ok();
    if numbers.iter().all(fits) { Ok(()) } else { Err(Errno::EOVERFLOW) }
}
