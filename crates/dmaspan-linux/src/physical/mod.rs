//! Memory of this process that devices reach by its physical addresses.
//!
//! A device without an IOMMU, or one whose IOMMU lets it through, is told where memory is. A
//! process that drives it ([`Direct`](dmaspan::dma::Direct)) needs memory that stays there, and for
//! rings and tables memory that is contiguous there. [`PhysicalMemory`] has both:
//!
//! | | |
//! |---|---|
//! | [`PhysicalMemory::pin`] | buffers, as scattered as they are: a [`PinnedMemory`] |
//! | [`PhysicalMemory::allocate`] | contiguous memory of huge pages: a [`ContiguousMemory`] |
//! | [`CoherentMemory`] | the same for [`Device::alloc`](dmaspan::dma::Device::alloc) |
//! | [`PhysicalMemory::bounce`] | memory for the pool of a device that must see nothing else |
//! | [`Bus`](dmaspan::iommu::soft::Bus) | all of it, as a device model reaches it |
//!
//! All of it is pinned by io_uring, and its addresses are those that the kernel tells
//! (`/proc/self/pagemap`): that takes `CAP_SYS_ADMIN`, and without it [`PhysicalMemory::new`] says
//! so. From Linux 7.3 on iommufd pins it and tells its addresses
//! ([`PhysicalMemory::pinned_by_iommufd`]), which takes `CAP_SYS_RAWIO` and a device. Behind an
//! IOMMU of the kernel's none of this is needed: [`Mapper::alloc`](crate::plan::Mapper::alloc)
//! shares memory with a device by VFIO or iommufd.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use dmaspan::dma::{Device, DeviceConfig, Direct};
//! use dmaspan::swiotlb::{Pool, PoolConfig};
//! use dmaspan::{Direction, PhysAddr};
//! use dmaspan_linux::physical::PhysicalMemory;
//! use dmaspan_linux::{Memory, MemoryKind, UserPlatform};
//!
//! let memory = PhysicalMemory::new()?;
//! // A device with 32 bits of address, whose buffers may lie above.
//! let slots = memory.bounce(4 << 20, PhysAddr::new(u64::from(u32::MAX)))?;
//! let pool = Pool::new(slots, PoolConfig::new(2), UserPlatform)?;
//! let direct = Arc::new(Direct::new(memory.extent()?, UserPlatform));
//! let device = Device::new(direct, pool, DeviceConfig::bits(32))?
//!     .with_coherent(Arc::new(memory.clone()));
//!
//! let mut ring = device.alloc(0x4000, 0x1000)?;
//! ring.write(0, 0x1234_u32)?;
//! let packets = memory.pin(&Arc::new(Memory::new(MemoryKind::Thp, 2 << 20)?))?;
//! let mapping = device.map_single(packets.part(0x200, 1500)?, Direction::ToDevice)?;
//! println!("the device reads {} and {}", ring.addr(), mapping.addr());
//! let _unmapped = device.unmap(mapping)?;
//! device.free(ring)?;
//! Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;
use std::sync::Arc;

use dmaspan::dma::{CoherentFrames, CoherentMemory, CoherentRequest, Contiguity, NoCoherent};
use dmaspan::regbuf::Buffer;
use dmaspan::{Coherency, Errno, PhysAddr, Prot, RangeError, Span};

use crate::mem::{Memory, MemoryError, MemoryKind};
use crate::pinner::{LinuxPinError, LinuxPinner};
use crate::sys::direct_map::{self, DirectMap};
use crate::vfio::NoIommuPinner;
use crate::{hugetlb, os};

mod bounce;
mod bus;
mod contiguous;
mod error;
mod pinned;

pub use bounce::PinnedBounce;
pub use contiguous::ContiguousMemory;
pub use error::{PhysicalError, Tried};
pub(crate) use pinned::FreshMemory;
pub use pinned::PinnedMemory;

use contiguous::Chunks;

/// Memory of this process, pinned and known by its physical addresses; see [the module](self).
///
/// It is a handle: clones are of the same memory, from any number of threads.
#[derive(Clone)]
pub struct PhysicalMemory {
    shared: Arc<Shared>,
}

/// What handles share, and what was allocated keeps.
pub(crate) struct Shared {
    supply: Box<dyn Supply>,
    map: DirectMap,
    chunks: Chunks,
}

/// What memory is made and pinned by.
pub(crate) trait Supply: Send + Sync {
    /// Makes memory.
    fn make(&self, kind: MemoryKind, len: u64) -> Result<Memory, MemoryError> {
        Memory::new(kind, len)
    }

    /// Pins all of it, for reading and writing, where it is.
    fn pin(&self, memory: &Arc<Memory>) -> Result<Buffer<PhysAddr>, PhysicalError>;

    /// The sizes of hugetlb pages that there are, the smallest first.
    fn page_sizes(&self) -> Vec<u64> {
        hugetlb::page_sizes()
    }
}

impl Supply for LinuxPinner<PhysAddr> {
    fn pin(&self, memory: &Arc<Memory>) -> Result<Buffer<PhysAddr>, PhysicalError> {
        Ok(self.pin_whole(memory, Prot::READ_WRITE)?)
    }
}

impl Supply for NoIommuPinner {
    fn pin(&self, memory: &Arc<Memory>) -> Result<Buffer<PhysAddr>, PhysicalError> {
        Ok(self.pin_whole(memory, Prot::READ_WRITE)?)
    }
}

impl PhysicalMemory {
    /// Memory that a pinner of its own pins.
    ///
    /// # Errors
    ///
    /// [`LinuxPinError::NoFrames`] where the process may not see physical addresses, for want of
    /// `CAP_SYS_ADMIN`, or where memory could only be locked, and the kernel might move it;
    /// [`LinuxPinError::Register`] where io_uring fails.
    pub fn new() -> Result<Self, LinuxPinError> {
        Ok(Self::pinned_by(LinuxPinner::new()?))
    }

    /// The same, that `pinner` pins.
    pub fn pinned_by(pinner: LinuxPinner<PhysAddr>) -> Self {
        Self::supplied(Box::new(pinner))
    }

    /// The same, that iommufd pins for a device without an IOMMU.
    ///
    /// ```no_run
    /// use dmaspan::PhysAddr;
    /// use dmaspan_linux::physical::PhysicalMemory;
    /// use dmaspan_linux::vfio::NoIommuPinner;
    ///
    /// let pinner = NoIommuPinner::new("0000:00:05.0".parse()?)?;
    /// let ring = PhysicalMemory::pinned_by_iommufd(pinner).allocate(
    ///     0x4000,
    ///     0x1000,
    ///     PhysAddr::new(u64::MAX),
    /// )?;
    /// println!("{ring:?}");
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pinned_by_iommufd(pinner: NoIommuPinner) -> Self {
        Self::supplied(Box::new(pinner))
    }

    pub(crate) fn supplied(supply: Box<dyn Supply>) -> Self {
        let (map, chunks) = (DirectMap::new(), Chunks::default());
        Self { shared: Arc::new(Shared { supply, map, chunks }) }
    }

    /// Pins all of a memory, for devices that use it where it is. It stays pinned until what is
    /// returned, and every [part](PinnedMemory::part) of it, is dropped.
    ///
    /// # Errors
    ///
    /// [`PhysicalError::Pin`] where the kernel does not pin it, and [`PhysicalError::Known`] for
    /// memory that is pinned here already: take parts of that.
    pub fn pin(&self, memory: &Arc<Memory>) -> Result<PinnedMemory, PhysicalError> {
        PinnedMemory::pin(&self.shared, memory)
    }

    /// Memory of `len` bytes at one range of physical addresses, the first a multiple of `align`
    /// and the last not above `last`: zeroed, pinned, and this process's alone until what is
    /// returned is dropped.
    ///
    /// It is a part of a huge page: of a transparent one where the kernel finds one, of hugetlb
    /// pages of the smallest size that holds it, whichever sizes the kernel has, and of a base page
    /// for what that holds. Where transparent huge pages have more than 32 MiB, as with base pages
    /// of 64 KiB, smaller pages come before them. Each was looked up after it was pinned. What is
    /// longer than all of them is found where pages happen to be neighbours.
    ///
    /// # Errors
    ///
    /// [`PhysicalError::Empty`], [`PhysicalError::Alignment`] and [`PhysicalError::None`], which
    /// says what was tried and what to do.
    pub fn allocate(
        &self,
        len: u64,
        align: u64,
        last: PhysAddr,
    ) -> Result<ContiguousMemory, PhysicalError> {
        contiguous::allocate(&self.shared, len, align, last)
    }

    /// Memory for a bounce pool, `len` bytes up to `last`, in as few spans as are found. A pool of
    /// it is for devices of the DMA API: slots have physical addresses, and originals are any
    /// memory that is pinned here.
    ///
    /// # Errors
    ///
    /// As [`allocate`](Self::allocate); [`PhysicalError::Length`] for what is not whole pages.
    pub fn bounce(&self, len: u64, last: PhysAddr) -> Result<PinnedBounce, PhysicalError> {
        PinnedBounce::new(self, len, last)
    }

    /// From the lowest to the highest address that memory of this machine has, as far as the kernel
    /// says (`/proc/iomem`), and else all that x86 and Arm can have: for
    /// [`Direct::new`](dmaspan::dma::Direct::new).
    ///
    /// # Errors
    ///
    /// [`RangeError`] where what the kernel says is no range, as never.
    pub fn extent(&self) -> Result<Span, RangeError> {
        let (first, last) = os::memory_extent().unwrap_or((0, (1 << 52) - 1));
        let len = last.saturating_sub(first).saturating_add(1);
        Span::new(PhysAddr::new(first), len)
    }

    /// Fresh memory for one owner, scattered as it is.
    fn scattered(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent> {
        let kind = MemoryKind::thp_for(request.len);
        let whole = request.len.checked_next_multiple_of(kind.page_size());
        let whole = whole.ok_or(NoCoherent { why: "no memory is as long" })?;
        let made = self.shared.supply.make(kind, whole);
        let made = made.map_err(|error| match error.errno() {
            Errno::ENOMEM => NoCoherent { why: "the system has too little memory" },
            _ => NoCoherent { why: "the system gives no such memory: Memory::new says why" },
        })?;
        let fresh = FreshMemory::pin(&self.shared, made);
        let fresh = fresh.map_err(|error| NoCoherent { why: error.why() })?;
        Ok(direct_map::any_spans(fresh, request.len))
    }
}

/// Coherent memory of a process: for a device that needs one span, as of
/// [`allocate`](PhysicalMemory::allocate), and for one behind an IOMMU of any pages.
impl CoherentMemory for PhysicalMemory {
    fn allocate(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent> {
        let CoherentRequest { len, granule, align, last, contiguity, coherency } = *request;
        if coherency == Coherency::NonCoherent {
            return Err(NoCoherent { why: "a process has no memory that is not cached" });
        }
        match Self::allocate(self, len, align.max(granule), last) {
            Ok(memory) => Ok(direct_map::one_span(memory, len)),
            Err(_) if contiguity == Contiguity::AnySpans => self.scattered(request),
            Err(error) => Err(NoCoherent { why: error.why() }),
        }
    }
}

impl fmt::Debug for PhysicalMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PhysicalMemory")
            .field("chunks", &self.shared.chunks)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
