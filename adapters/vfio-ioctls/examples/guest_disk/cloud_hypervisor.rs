//! The shape in which cloud-hypervisor maps for its virtual IOMMU and for virtio-mem, over dmaspan.
//!
//! [`ExternalDmaMapping`] is declared as vm-device/src/dma_mapping of cloud-hypervisor 53 has it; a
//! VMM imports its own. Here, other than there, an unmap may cover several mappings and gaps, and
//! changes nothing where it would cut one; a range across regions is mapped, all of it or nothing.

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
        let all = IovaRange::from_len(Iova::new(iova), size).map_err(io::Error::other)?;
        let (guest, mut len) = (self.guest.memory(), 0);
        let size = usize::try_from(size).map_err(io::Error::other)?;
        let mut slices = guest.get_slices(GuestAddress(gpa), size);
        let done = slices.try_for_each(|slice| {
            let slice = slice.map_err(io::Error::other)?;
            let start =
                NonNull::new(slice.ptr_guard_mut().as_ptr()).ok_or(io::ErrorKind::NotFound)?;
            // SAFETY: vm-memory accesses it as volatile, and it lives as long as the clone.
            let memory = unsafe { Memory::foreign(start, slice.len() as u64, guest.clone()) };
            let memory = Arc::new(memory.map_err(io::Error::other)?);
            let at = all.start().wrapping_add(len);
            let mapped = self.space.map(&memory, memory.user_range(), at, Prot::READ_WRITE);
            mapped.map_err(|error| io::Error::from_raw_os_error(self.space.errno(&error).get()))?;
            len += memory.len();
            Ok(())
        });
        if done.is_err() && len > 0 {
            self.unmap(iova, len)?;
        }
        done
    }

    fn unmap(&self, iova: u64, size: u64) -> io::Result<()> {
        let range = IovaRange::from_len(Iova::new(iova), size).map_err(io::Error::other)?;
        let unmapped = self.space.unmap(range).map(drop);
        unmapped.map_err(|error| io::Error::from_raw_os_error(self.space.errno(&error).get()))
    }
}
