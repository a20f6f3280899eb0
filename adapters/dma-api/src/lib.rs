#![doc = include_str!("../README.md")]
#![no_std]

extern crate alloc;

use alloc::collections::BTreeMap;
use alloc::collections::btree_map::Entry;
use alloc::vec::Vec;
use core::alloc::Layout;
use core::fmt;
use core::num::NonZeroUsize;
use core::ptr::NonNull;

use dma_api::{
    DmaAllocHandle, DmaCoherency, DmaConstraints, DmaDirection, DmaError, DmaMapHandle, DmaOp,
};
use dmaspan::dma::{Attrs, Coherent, CpuSync, Device, Error, Flush, Mapping, Piece, RawMemory};
use dmaspan::{Direction, DmaAddr, HostAddr, PhysAddr, Span};
use lock_api::{Mutex, RawMutex};

/// Finds the physical address of a buffer. `None` where it has no contiguous one.
type Find = fn(NonNull<[u8]>) -> Option<u64>;

/// The bytes of a page, for drivers that ask.
const PAGE: usize = 4096;

/// A device, as the handles of dma-api use it.
///
/// A handle is an address and a length, so that what it stands for is kept here, under a lock that
/// is also held while bytes are copied: nobody ends a mapping meanwhile.
pub struct DeviceOps<L: RawMutex> {
    device: Device,
    find: Find,
    refused: fn(Error),
    held: Mutex<L, Held>,
}

/// What handles stand for, by the address of the device.
#[derive(Default)]
struct Held {
    /// By their lengths, too: one mapping of each direction, and how many handles there are.
    /// Without an IOMMU a buffer has one address however often it is mapped, and the end of a
    /// handle says no direction, so that all end with the last. A mapping that has an
    /// address of its own is alone.
    mappings: BTreeMap<(u64, u64), (Vec<Mapping>, usize)>,
    memory: BTreeMap<u64, Coherent>,
}

impl<L: RawMutex> fmt::Debug for DeviceOps<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceOps").finish_non_exhaustive()
    }
}

impl<L: RawMutex> DeviceOps<L> {
    /// A device, the physical address of a buffer, and what is told of refusals. Allocations are
    /// the device's coherent memory: it needs some, see [`Device::with_coherent`].
    ///
    /// # Safety
    ///
    /// The bytes of each buffer for which `find` returns an address are at it, contiguous, and stay
    /// there for as long as the buffer is mapped.
    ///
    /// # Context
    ///
    /// `refused` runs where a driver maps and unmaps.
    #[expect(unsafe_code, reason = "it declares a contract")]
    pub unsafe fn new(device: Device, find: Find, refused: fn(Error)) -> Self {
        Self { device, find, refused, held: Mutex::new(Held::default()) }
    }

    /// How many mappings and allocations there are now: those that remain once the driver is
    /// dropped are leaks.
    pub fn live(&self) -> (usize, usize) {
        let held = self.held.lock();
        (held.mappings.values().map(|(_, handles)| handles).sum(), held.memory.len())
    }

    fn alloc(&self, constraints: DmaConstraints, layout: Layout) -> Option<DmaAllocHandle> {
        let align = layout.align().max(constraints.align) as u64;
        let memory = self.device.alloc(layout.size() as u64, align);
        let memory = memory.map_err(self.refused).ok()?;
        let (addr, start) = (memory.addr().get(), memory.as_ptr());
        self.held.lock().memory.insert(addr, memory);
        #[expect(unsafe_code, reason = "a handle of memory that is kept")]
        // SAFETY: the memory is there, at both addresses, until it is taken out of what is held.
        Some(unsafe { DmaAllocHandle::new(start, start, addr.into(), layout) })
    }

    fn dealloc(&self, handle: &DmaAllocHandle) -> Result<(), Error> {
        let addr = handle.dma_addr().as_u64();
        let memory = self.held.lock().memory.remove(&addr);
        let unknown = Error::NotMapped { addr: DmaAddr::new(addr) };
        // What hardware does not forget is kept by the device.
        self.device.free(memory.ok_or(unknown)?).map_err(|failed| failed.error)
    }

    fn map(&self, buffer: NonNull<[u8]>, direction: Direction) -> Result<u64, Error> {
        let paddr = (self.find)(buffer).map(PhysAddr::new);
        let span = paddr.and_then(|paddr| Span::new(paddr, buffer.len() as u64).ok());
        let (start, len) =
            (HostAddr::new(buffer.cast::<u8>().addr().get() as u64), buffer.len() as u64);
        let piece = Piece::memory(span.ok_or(Error::NoPhysical { start, len })?);
        #[expect(unsafe_code, reason = "a buffer of a driver")]
        // SAFETY: the bytes are there and stay until `unmap_streaming`, as `new` was promised; the
        // driver leaves them to the device meanwhile, as `DmaOp::map_streaming` wants.
        let memory = unsafe { RawMemory::new(piece) };
        let (flush, sync) = (Some(Flush::Strict), CpuSync::Skip);
        let attrs = Attrs { flush, sync, ..Attrs::default() };
        let mapping = self.device.map_single_with(memory.into(), direction, attrs)?;
        let addr = mapping.addr();
        let mut held = self.held.lock();
        let (all, handles) = held.mappings.entry((addr.get(), mapping.len())).or_default();
        *handles += 1;
        if all.iter().all(|known| known.direction() != direction) {
            all.push(mapping);
        } else {
            drop(held);
            let _unmapped = self.device.unmap(mapping)?;
        }
        Ok(addr.get())
    }

    fn unmap(&self, handle: &DmaMapHandle) -> Result<(), Error> {
        let addr = DmaAddr::new(handle.dma_addr().as_u64());
        let mut held = self.held.lock();
        let Entry::Occupied(mut of) = held.mappings.entry((addr.get(), handle.size() as u64))
        else {
            return Err(Error::NotMapped { addr });
        };
        of.get_mut().1 -= 1;
        if of.get().1 > 0 {
            return Ok(());
        }
        let (all, _) = of.remove();
        drop(held);
        let mut ended = Ok(());
        for mapping in all {
            let unmapped = self.device.unmap(mapping).map(drop);
            ended = unmapped.map_err(|failed| failed.error).and(ended);
        }
        ended
    }

    /// Syncs bytes of a mapping, by a function of the device.
    fn sync(
        &self,
        handle: &DmaMapHandle,
        bytes: (usize, usize),
        direction: DmaDirection,
        sync: fn(&Device, &Mapping, u64, u64) -> Result<(), Error>,
    ) {
        let (addr, (offset, len)) = (handle.dma_addr().as_u64(), bytes);
        // Held over the copy, since a handle names its mapping by numbers alone: who unmaps it
        // waits. A pool that copies calls nothing of the device.
        let held = self.held.lock();
        let of = held.mappings.get(&(addr, handle.size() as u64));
        let is_it = |mapping: &&Mapping| mapping.direction() == way(direction);
        let synced = match of.and_then(|(all, _)| all.iter().find(is_it)) {
            // No bytes: nothing is to be seen.
            _ if len == 0 => return,
            Some(mapping) => sync(&self.device, mapping, offset as u64, len as u64),
            None => Err(Error::NotMapped { addr: DmaAddr::new(addr) }),
        };
        drop(held);
        synced.unwrap_or_else(self.refused);
    }

    /// Waits until hardware has forgotten a buffer that a driver takes back whatever is answered.
    fn settle(&self, error: Error) {
        let is_reached = matches!(error, Error::Quarantined { .. });
        (self.refused)(error);
        while is_reached && self.device.flush().is_err() {
            core::hint::spin_loop();
        }
    }
}

fn way(direction: DmaDirection) -> Direction {
    match direction {
        DmaDirection::ToDevice => Direction::ToDevice,
        DmaDirection::FromDevice => Direction::FromDevice,
        DmaDirection::Bidirectional => Direction::Bidirectional,
    }
}

#[expect(unsafe_code, reason = "the trait has unsafe functions; none is called here")]
impl<L: RawMutex + Send + Sync + 'static> DmaOp for DeviceOps<L> {
    fn page_size(&self) -> usize {
        PAGE
    }

    unsafe fn alloc_contiguous(
        &self,
        constraints: DmaConstraints,
        layout: Layout,
    ) -> Option<DmaAllocHandle> {
        self.alloc(constraints, layout)
    }

    unsafe fn dealloc_contiguous(&self, handle: DmaAllocHandle) {
        self.dealloc(&handle).unwrap_or_else(self.refused);
    }

    unsafe fn alloc_coherent(
        &self,
        constraints: DmaConstraints,
        layout: Layout,
    ) -> Option<DmaAllocHandle> {
        self.alloc(constraints, layout)
    }

    unsafe fn dealloc_coherent(&self, handle: DmaAllocHandle) -> Result<(), DmaError> {
        self.dealloc(&handle).map_err(|error| {
            (self.refused)(error);
            DmaError::CoherentReleaseFailed
        })
    }

    unsafe fn map_streaming(
        &self,
        _constraints: DmaConstraints,
        addr: NonNull<u8>,
        size: NonZeroUsize,
        direction: DmaDirection,
    ) -> Result<DmaMapHandle, DmaError> {
        let buffer = NonNull::slice_from_raw_parts(addr, size.get());
        let mapped = self.map(buffer, way(direction)).map_err(|error| {
            self.settle(error);
            DmaError::NoMemory
        })?;
        let layout = Layout::from_size_align(size.get(), 1)?;
        // SAFETY: the buffer is mapped there until `unmap_streaming`.
        Ok(unsafe { DmaMapHandle::new(addr, mapped.into(), layout, None) })
    }

    unsafe fn unmap_streaming(&self, handle: DmaMapHandle) {
        self.unmap(&handle).unwrap_or_else(|error| self.settle(error));
    }

    // Coherent memory needs none.
    fn sync_alloc_for_device(&self, _: &DmaAllocHandle, _: usize, _: usize, _: DmaDirection) {}

    fn sync_alloc_for_cpu(&self, _: &DmaAllocHandle, _: usize, _: usize, _: DmaDirection) {}

    fn sync_map_for_device(
        &self,
        handle: &DmaMapHandle,
        offset: usize,
        size: usize,
        direction: DmaDirection,
        _: DmaCoherency,
    ) {
        self.sync(handle, (offset, size), direction, Device::sync_for_device);
    }

    fn sync_map_for_cpu(
        &self,
        handle: &DmaMapHandle,
        offset: usize,
        size: usize,
        direction: DmaDirection,
        _: DmaCoherency,
    ) {
        self.sync(handle, (offset, size), direction, Device::sync_for_cpu);
    }
}
