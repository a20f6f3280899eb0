//! The shape in which cloud-hypervisor maps for its virtual IOMMU and for virtio-mem, over dmaspan.
//!
//! [`ExternalDmaMapping`] is declared as vm-device/src/dma_mapping of cloud-hypervisor 53 has it; a
//! VMM imports its own. What cloud-hypervisor's own implementation does not do:
//!
//! - an unmap that covers several mappings and gaps succeeds, as the guest may ask for it; one that
//!   cuts a mapping is refused, and then nothing is unmapped;
//! - a range that crosses regions of the guest is mapped, all of it or nothing;
//! - the error is the kernel's, with its errno.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use dmaspan::{Iova, IovaRange, Prot};
use dmaspan_linux::Memory;
use dmaspan_linux::plan::MemorySpace;
use vm_memory::{
    GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryMmap,
};

/// What maps memory of a guest for devices, by guest-physical address.
pub(crate) trait ExternalDmaMapping: Send + Sync {
    fn map(&self, iova: u64, gpa: u64, size: u64) -> io::Result<()>;
    fn unmap(&self, iova: u64, size: u64) -> io::Result<()>;
}

/// A guest's memory, whose regions may come and go, and the space that is mapped into.
pub(crate) struct GuestDma<'s, S> {
    pub(crate) space: &'s S,
    pub(crate) guest: GuestMemoryAtomic<GuestMemoryMmap>,
}

impl<S: MemorySpace + Send + Sync> ExternalDmaMapping for GuestDma<'_, S> {
    fn map(&self, iova: u64, gpa: u64, size: u64) -> io::Result<()> {
        let guest = self.guest.memory();
        let mut next = Iova::new(iova);
        let length = usize::try_from(size).map_err(io::Error::other)?;
        for slice in guest.get_slices(GuestAddress(gpa), length) {
            let mapped = slice.map_err(io::Error::other).and_then(|slice| {
                let start = NonNull::new(slice.ptr_guard_mut().as_ptr());
                let start = start.ok_or_else(|| io::Error::other("no address"))?;
                // SAFETY: vm-memory accesses it as volatile, and it lives as long as the clone.
                let memory = unsafe { Memory::foreign(start, slice.len() as u64, guest.clone()) };
                let memory = Arc::new(memory.map_err(io::Error::other)?);
                let mapped = self.space.map(&memory, memory.user_range(), next, Prot::READ_WRITE);
                mapped.map_err(|error| self.error(&error)).map(|()| memory.len())
            });
            match mapped {
                Ok(len) => next = next.checked_add(len).unwrap_or(next),
                Err(error) => {
                    if next.get() != iova {
                        self.unmap(iova, next.get() - iova)?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn unmap(&self, iova: u64, size: u64) -> io::Result<()> {
        let range = IovaRange::from_len(Iova::new(iova), size).map_err(io::Error::other)?;
        self.space.unmap(range).map(drop).map_err(|error| self.error(&error))
    }
}

impl<S: MemorySpace> GuestDma<'_, S> {
    fn error(&self, error: &S::Error) -> io::Error {
        io::Error::from_raw_os_error(self.space.errno(error).get())
    }
}
