//! Buffers that are mapped where they are, by the DMA API.

use alloc::collections::BTreeMap;
use core::ptr::NonNull;

use dmaspan::dma::{Attrs, Coherent, Device, Error, Flush, Piece, RawMemory, Unmapped};
use dmaspan::{Direction, DmaAddr, HostAddr, PhysAddr, Span};

use crate::{Find, PAGE, Reach};

/// A device of the DMA API, and its queues.
pub(crate) struct Mapped {
    device: Device,
    find: Find,
    queues: BTreeMap<u64, Coherent>,
}

impl Mapped {
    pub(crate) fn new(device: Device, find: Find) -> Self {
        Self { device, find, queues: BTreeMap::new() }
    }
}

#[expect(unsafe_code, reason = "the functions pass the contract of `Hal` on")]
impl Reach for Mapped {
    fn alloc(&mut self, len: u64) -> Result<(u64, NonNull<u8>), Error> {
        let queue = self.device.alloc(len, PAGE)?;
        let (addr, start) = (queue.addr(), queue.as_ptr());
        if addr.get() == 0 {
            self.device.free(queue)?;
            return Err(Error::MeansFailure { addr });
        }
        self.queues.insert(addr.get(), queue);
        Ok((addr.get(), start))
    }

    fn dealloc(&mut self, addr: DmaAddr) -> Result<(), Error> {
        let queue = self.queues.remove(&addr.get()).ok_or(Error::NotMapped { addr })?;
        Ok(self.device.free(queue)?)
    }

    /// The next release of virtio-drivers says here whether the device is behind an IOMMU, which
    /// the [`Device`] knows already.
    unsafe fn share(
        &mut self,
        buffer: NonNull<[u8]>,
        direction: Direction,
    ) -> Result<DmaAddr, Error> {
        let (start, len) =
            (HostAddr::new(buffer.cast::<u8>().addr().get() as u64), buffer.len() as u64);
        let paddr = (self.find)(buffer).map(PhysAddr::new);
        let span = paddr.and_then(|paddr| Span::new(paddr, len).ok());
        let piece = Piece::memory(span.ok_or(Error::NoPhysical { start, len })?);
        // SAFETY: the bytes are there and stay until `unshare`, as `VirtioDma::new` was promised;
        // the driver leaves them to the device meanwhile, as the caller promises.
        let memory = unsafe { RawMemory::new(piece) };
        let attrs = Attrs { flush: Some(Flush::Strict), ..Attrs::default() };
        let mapping = self.device.map_single_with(memory.into(), direction, attrs)?;
        let addr = mapping.addr();
        if addr.get() == 0 {
            let _unmapped = self.device.unmap(mapping)?;
            return Err(Error::MeansFailure { addr });
        }
        if let Err(failed) = self.device.into_raw(mapping) {
            if let Some(mapping) = failed.mapping {
                let _unmapped = self.device.unmap(mapping)?;
            }
            return Err(failed.error);
        }
        Ok(addr)
    }

    unsafe fn unshare(
        &mut self,
        addr: DmaAddr,
        buffer: NonNull<[u8]>,
        direction: Direction,
    ) -> Result<(), Error> {
        match self.device.unmap_raw(addr, buffer.len() as u64, direction)? {
            Unmapped::Released(_) | Unmapped::Queued => Ok(()),
        }
    }

    fn is_forgotten(&mut self) -> bool {
        self.device.flush().is_ok()
    }
}
