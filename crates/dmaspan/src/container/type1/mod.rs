//! [`Type1`] answers the requests of Linux's VFIO type1 (drivers/vfio/vfio_iommu_type1.c) from a
//! container.
//!
//! Servers of vfio-user and monitors of virtual machines get requests of the VFIO interface from a
//! client or a guest, and have to answer each as Linux would: the same bytes, and for a request
//! with several faults the same errno. [`Type1::ioctl`] does that for a container's requests.
//!
//! | request | done by |
//! |---|---|
//! | `VFIO_IOMMU_MAP_DMA` | [`Container::map_request`] |
//! | the same with `VFIO_DMA_MAP_FLAG_VADDR` | [`Container::update_vaddr`] |
//! | `VFIO_IOMMU_UNMAP_DMA` | [`Container::unmap`], [`Container::unmap_all`] |
//! | the same with `VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP` | [`Container::unmap_dirty`] |
//! | the same with `VFIO_DMA_UNMAP_FLAG_VADDR` | [`Container::invalidate_vaddr`] |
//! | `VFIO_IOMMU_DIRTY_PAGES` | [`Container::start_dirty`], [`Container::dirty_bitmap_to`] |
//! | `VFIO_IOMMU_GET_INFO`, `VFIO_CHECK_EXTENSION` | [`Container::info`] |
//!
//! # What is not here
//!
//! Groups and devices are not here: the caller has them, and attaches domains and emulated devices
//! to the container. `VFIO_SET_IOMMU` decides which [`Version`] a container has before there is
//! one, see [`version_of`]. Linux has removed nesting; its number opens version 2 and is no
//! extension. Pointers in structures have 64 bits.
//!
//! Linux lets a request wait for the one before it. So does a container with a
//! [`BusyHook`](super::BusyHook); without one, requests that get in each other's way answer
//! `EBUSY`.

mod arg;
mod bitmap;
mod client;
mod dirty;
mod info;
mod map;
pub mod uapi;
mod vaddr;

pub use client::{Client, Process};

use core::fmt;

use lock_api::RawMutex;

use super::{CacheCoherency, Container, DEFAULT_BATCH, Error, Version};
use crate::error::Errno;
use crate::pin::Pinner;
use arg::Arg;
use uapi::{
    VFIO_API_VERSION, VFIO_CHECK_EXTENSION, VFIO_DMA_CC_IOMMU, VFIO_GET_API_VERSION,
    VFIO_IOMMU_DIRTY_PAGES, VFIO_IOMMU_GET_INFO, VFIO_IOMMU_MAP_DMA, VFIO_IOMMU_UNMAP_DMA,
    VFIO_RESERVED_TYPE1_NESTING_IOMMU, VFIO_SET_IOMMU, VFIO_TYPE1_IOMMU, VFIO_TYPE1V2_IOMMU,
    VFIO_UNMAP_ALL, VFIO_UPDATE_VADDR,
};

/// The version that `VFIO_SET_IOMMU` with this number asks for; `None` for IOMMUs of another kind.
pub const fn version_of(iommu: u64) -> Option<Version> {
    match iommu {
        VFIO_TYPE1_IOMMU => Some(Version::V1),
        VFIO_TYPE1V2_IOMMU | VFIO_RESERVED_TYPE1_NESTING_IOMMU => Some(Version::V2),
        _ => None,
    }
}

/// A container that answers requests as Linux does.
///
/// It keeps nothing of its own: one may be made for each request, and a container be used beside
/// it.
///
/// ```
/// use std::error::Error;
/// use std::sync::Arc;
///
/// use dmaspan::container::type1::{Client, Type1, uapi};
/// use dmaspan::{Account, Container, Errno, HostAddr};
/// use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
///
/// fn main() -> Result<(), Box<dyn Error>> {
///     // A client's memory, here this process's own, and a container without a domain.
///     let memory = Arc::new(Memory::new(MemoryKind::Base, 0x4000)?);
///     let vaddr = memory.user_range().start().get();
///     let account = Account::new(1 << 20);
///     let container: Container<_, parking_lot::RawMutex> =
///         Container::new(LinuxPinner::<HostAddr>::new()?, Arc::clone(&account));
///
///     // `struct vfio_iommu_type1_dma_map`, as it came from the client.
///     let mut map = Vec::new();
///     map.extend([32, uapi::VFIO_DMA_MAP_FLAG_READ].map(u32::to_ne_bytes).as_flattened());
///     map.extend([vaddr, 0, 0x4000].map(u64::to_ne_bytes).as_flattened());
///
///     let (type1, client) = (Type1::new(&container), Client::new(&memory, &account));
///     assert_eq!(type1.ioctl(&client, uapi::VFIO_IOMMU_MAP_DMA, &mut map), Ok(0));
///     let again = type1.ioctl(&client, uapi::VFIO_IOMMU_MAP_DMA, &mut map);
///     assert_eq!(again, Err(Errno::EEXIST));
///     Ok(())
/// }
/// ```
pub struct Type1<'c, P: Pinner, L: RawMutex, const BATCH: usize = DEFAULT_BATCH> {
    container: &'c Container<P, L, BATCH>,
}

impl<'c, P: Pinner, L: RawMutex, const BATCH: usize> Type1<'c, P, L, BATCH> {
    /// Answers for this container.
    pub const fn new(container: &'c Container<P, L, BATCH>) -> Self {
        Self { container }
    }

    /// Does what `client` asks for and returns what the system call would, as
    /// `vfio_iommu_type1_ioctl` and, for what all containers answer, `vfio_fops_unl_ioctl`.
    ///
    /// `arg` has the bytes of the structure that the request names, in the byte order of the
    /// machine, and is written as the kernel would: never beyond the `argsz` in it. It may be
    /// longer or shorter than the structure. The argument of `VFIO_CHECK_EXTENSION` is a number, of
    /// 4 or 8 bytes. Bitmaps are written to the client's memory by [`Pinner::write`].
    ///
    /// # Errors
    ///
    /// The errno of Linux, with nothing changed; `ENOTTY` for requests that are not a container's.
    /// `EFAULT` also where `arg` is shorter than the `argsz` in it has it. Beyond Linux's, `EIO`
    /// where hardware did not confirm that it forgot what was unmapped, and `EBUSY` where that
    /// still lies, or another request is at work and the container has no
    /// [`BusyHook`](super::BusyHook).
    pub fn ioctl(
        &self,
        client: &Client<'_, P>,
        request: u32,
        arg: &mut [u8],
    ) -> Result<u32, Errno> {
        let mut arg = Arg::new(arg);
        match request {
            VFIO_GET_API_VERSION => Ok(VFIO_API_VERSION),
            VFIO_CHECK_EXTENSION => Ok(self.check_extension(arg.number()?)),
            // It is set: there is a container of that kind.
            VFIO_SET_IOMMU => Err(Errno::EINVAL),
            VFIO_IOMMU_GET_INFO => self.get_info(arg),
            VFIO_IOMMU_MAP_DMA => self.map_dma(client, &arg),
            VFIO_IOMMU_UNMAP_DMA => self.unmap_dma(client, &mut arg),
            VFIO_IOMMU_DIRTY_PAGES => self.dirty_pages(client, &arg),
            _ => Err(Errno::ENOTTY),
        }
    }

    /// Returns what `VFIO_CHECK_EXTENSION` answers: 1 for what there is, 0 for everything else.
    ///
    /// Addresses cannot be invalidated while there are emulated devices. Devices cannot get round
    /// caches if no domain lets them; without domains none does.
    pub fn check_extension(&self, extension: u64) -> u32 {
        let has = match extension {
            VFIO_TYPE1_IOMMU | VFIO_TYPE1V2_IOMMU | VFIO_UNMAP_ALL => true,
            VFIO_UPDATE_VADDR => !self.has_emulated(),
            VFIO_DMA_CC_IOMMU => self.container.info().coherency == CacheCoherency::Enforced,
            _ => false,
        };
        u32::from(has)
    }

    /// The smallest page. Unmapping asks for it, so nothing is allocated.
    fn granule(&self) -> u64 {
        let all = self.container.state.lock();
        self.container.granule(&all.domains)
    }

    fn has_emulated(&self) -> bool {
        self.container.state.lock().emulated() > 0
    }

    fn errno(&self, error: &Error<P::Error>) -> Errno {
        error.errno(|error| self.container.pinner.errno(error))
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Clone for Type1<'_, P, L, BATCH> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Copy for Type1<'_, P, L, BATCH> {}

impl<P: Pinner, L: RawMutex, const BATCH: usize> fmt::Debug for Type1<'_, P, L, BATCH> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Type1").field("container", self.container).finish()
    }
}
