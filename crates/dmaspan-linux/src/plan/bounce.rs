//! [`MappedBounce`] is memory for bounce pools of devices that a space confines.

use std::fmt;
use std::ptr::NonNull;

use dmaspan::swiotlb::{InSlot, PoolMemory, Transfer};
use dmaspan::{DmaAddr, Span};

use super::shared::MappedMemory;
use super::{MapError, Mapper, MemorySpace};
use crate::mem::{AccessError, Memory};
use crate::sys;

/// The memory that a [`Pool`](dmaspan::swiotlb::Pool) is made of whose slots devices reach by IOVAs
/// of a space, as of [`VfioSpace`](crate::vfio::VfioSpace). It is mapped once, and for as long as
/// this exists: a driver that [leases](dmaspan::swiotlb::Pool::lease) its rings and copies its
/// buffers to and from leases asks the kernel for nothing meanwhile, and its device reaches nothing
/// but the pool.
///
/// Dropped, it is unmapped and then freed, or leaked and counted by the mapper where it cannot be
/// unmapped.
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::swiotlb::{Pool, PoolConfig, SlotRequest};
/// use dmaspan::{Account, Container, HostAddr};
/// use dmaspan_linux::plan::{MappedBounce, Mapper};
/// use dmaspan_linux::{LinuxPinner, UserPlatform};
///
/// let container: Container<_, parking_lot::RawMutex> =
///     Container::new(LinuxPinner::<HostAddr>::new()?, Account::new(1 << 30));
/// let mapper = Mapper::new(container)?;
/// let slots = MappedBounce::new(&mapper, 1 << 20)?;
/// let pool = Arc::new(Pool::new(slots, PoolConfig::new(1), UserPlatform)?);
///
/// let packet = pool.lease(1500, &SlotRequest::default())?;
/// packet.write(0, b"a packet to the wire")?;
/// println!("the device finds it at {}", packet.span().start());
/// drop(packet);
/// drop(pool);
/// assert_eq!(mapper.mapped_bytes(), 0);
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
///
/// Where a pool is told to copy to or from memory that is not all of this one: only unsafe code can
/// ask for that, since originals have other addresses.
pub struct MappedBounce<S: MemorySpace> {
    memory: MappedMemory<S>,
    spans: [Span<DmaAddr>; 1],
}

/// What a slot's bytes are, which the pool has promised to be its own.
const INSIDE: &str = "a slot is within its pool";

impl<S: MemorySpace> MappedBounce<S> {
    /// Allocates memory, `len` bytes rounded up to whole pages, and maps it.
    ///
    /// # Errors
    ///
    /// As [`Mapper::alloc`].
    #[track_caller]
    pub fn new(mapper: &Mapper<S>, len: u64) -> Result<Self, MapError<S::Error>> {
        let memory = mapper.alloc(len, sys::page_size())?;
        let start = DmaAddr::new(memory.iova().get());
        // Memory has at least one byte, and ends within the addresses of its space.
        let span = Span::new(start, memory.len()).expect("what is mapped is a range");
        Ok(Self { memory, spans: [span] })
    }

    /// The memory itself, as the program has it.
    fn memory(&self) -> &Memory {
        self.memory.memory()
    }

    /// Where bytes are in the memory; a wrong place for what is not all in it.
    fn offset(&self, at: DmaAddr) -> u64 {
        at.get().wrapping_sub(self.spans[0].start().get())
    }

    fn try_copy(&self, transfer: &Transfer<DmaAddr>) -> Result<(), AccessError> {
        let (mut from, mut to) = (self.offset(transfer.source()), self.offset(transfer.target()));
        let (mut left, mut bytes) = (transfer.len(), [0; 256]);
        while left > 0 {
            let len = left.min(bytes.len() as u64);
            let part = &mut bytes[..usize::try_from(len).unwrap_or_default()];
            self.memory().read(from, part)?;
            self.memory().write(to, part)?;
            (from, to, left) = (from + len, to + len, left - len);
        }
        Ok(())
    }
}

#[expect(unsafe_code, reason = "the memory is the pool's alone")]
// SAFETY:
// 1. `spans` gives a mapping of memory that this value made, owns and hands out to nobody else. It
//    is unmapped when this is dropped, or else never freed. Devices may write it: nobody has
//    references to a `Memory` but to atomic bytes.
// 2. The copies are of `Memory`, which refuses what is not in it.
// 3. Each address is looked for in the mapping, and a copy of others panics.
// 4. A pointer is to bytes of the memory, which is contiguous in the process and begins at a page
//    there and for devices.
unsafe impl<S: MemorySpace + Send + Sync> PoolMemory for MappedBounce<S> {
    type Address = DmaAddr;

    fn spans(&self) -> &[Span<DmaAddr>] {
        &self.spans
    }

    fn copy(&self, transfer: Transfer<DmaAddr>) {
        self.try_copy(&transfer).expect("originals are elsewhere");
    }

    fn zero(&self, bytes: InSlot<DmaAddr>) {
        let (mut at, mut left) = (self.offset(bytes.span().start()), bytes.span().len());
        let zeros = [0; 4096];
        while left > 0 {
            let len = left.min(zeros.len() as u64);
            let part = &zeros[..usize::try_from(len).unwrap_or_default()];
            self.memory().write(at, part).expect(INSIDE);
            (at, left) = (at + len, left - len);
        }
    }

    fn read(&self, bytes: InSlot<DmaAddr>, into: &mut [u8]) {
        self.memory().read(self.offset(bytes.span().start()), into).expect(INSIDE);
    }

    fn write(&self, bytes: InSlot<DmaAddr>, from: &[u8]) {
        self.memory().write(self.offset(bytes.span().start()), from).expect(INSIDE);
    }

    fn pointer(&self, bytes: InSlot<DmaAddr>) -> Option<NonNull<u8>> {
        let span = bytes.span();
        self.memory().ptr_at(self.offset(span.start()), span.len()).ok()
    }
}

impl<S: MemorySpace> fmt::Debug for MappedBounce<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedBounce").field("memory", &self.memory).finish()
    }
}
