//! The guest's memory, as the client gives it and takes it back.

use std::fmt;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use dmaspan::regbuf::RegionError;
use dmaspan::{Iova, Prot};
use dmaspan_linux::client::{self, ClientMemory};
use dmaspan_vfio_user::{ClientDma, ClientDmaError};
use parking_lot::Mutex;
use vfio_user::{DmaMapFlags, DmaUnmapFlags};

/// Hears what happens to a client's memory, in the order in which it happens: a test may judge it.
pub trait Observer: Send + Sync {
    /// The client gave memory.
    fn gave(&self, address: u64, len: u64, access: Prot);

    /// The controller has done with memory what `access` says.
    fn used(&self, address: u64, len: u64, access: Prot);

    /// The client took back what is there, and is told next that nothing uses it any more.
    fn took(&self, address: u64, len: u64);
}

/// The memory of a client, and who hears of it.
pub struct GuestMemory {
    dma: ClientDma,
    /// Under this lock memory is given, and nobody says before that he used it.
    observer: Option<Mutex<Arc<dyn Observer>>>,
}

impl From<ClientDma> for GuestMemory {
    fn from(dma: ClientDma) -> Self {
        Self { dma, observer: None }
    }
}

impl fmt::Debug for GuestMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestMemory").field("dma", &self.dma).finish_non_exhaustive()
    }
}

impl GuestMemory {
    /// The same, with somebody who hears of it.
    #[must_use]
    pub fn observed(self, observer: Arc<dyn Observer>) -> Self {
        Self { observer: Some(Mutex::new(observer)), ..self }
    }

    pub(crate) fn regions(&self) -> usize {
        self.dma.regions().count()
    }

    /// DMA_MAP.
    pub(crate) fn map(
        &self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        file: Option<OwnedFd>,
    ) -> Result<(), ClientDmaError> {
        let observer = self.observer.as_ref().map(Mutex::lock);
        self.dma.map(flags, offset, address, size, file)?;
        if let Some(observer) = observer {
            let mut access = Prot::empty();
            access.set(Prot::READ, flags.contains(DmaMapFlags::READ));
            access.set(Prot::WRITE, flags.contains(DmaMapFlags::WRITE));
            observer.gave(address, size, access);
        }
        Ok(())
    }

    /// DMA_UNMAP, which waits until nothing uses the memory, for `bound` at most.
    pub(crate) fn unmap(
        &self,
        flags: DmaUnmapFlags,
        address: u64,
        size: u64,
        bound: Duration,
    ) -> Result<(), ClientDmaError> {
        let unmapping = self.dma.unmap(flags, address, size)?;
        client::wait(unmapping, bound)?;
        if let Some(observer) = &self.observer {
            let (address, size) = match flags.contains(DmaUnmapFlags::UNMAP_ALL) {
                true => (0, u64::MAX),
                false => (address, size),
            };
            observer.lock().took(address, size);
        }
        Ok(())
    }

    /// Holds memory, as [`ClientDma::hold`] does.
    pub(crate) fn hold(
        &self,
        address: u64,
        len: u64,
        access: Prot,
    ) -> Result<Piece<'_>, RegionError<Iova>> {
        let held = self.dma.hold(address, len, access)?;
        Ok(Piece { held, address, access, of: self })
    }

    /// The same, as [`ClientDma::hold_settled`] does.
    pub(crate) fn hold_settled(
        &self,
        address: u64,
        len: u64,
        access: Prot,
    ) -> Result<Piece<'_>, RegionError<Iova>> {
        let held = self.dma.hold_settled(address, len, access)?;
        Ok(Piece { held, address, access, of: self })
    }
}

/// Memory that one operation holds.
pub(crate) struct Piece<'m> {
    held: ClientMemory,
    address: u64,
    access: Prot,
    of: &'m GuestMemory,
}

impl Deref for Piece<'_> {
    type Target = ClientMemory;

    fn deref(&self) -> &ClientMemory {
        &self.held
    }
}

impl Drop for Piece<'_> {
    /// The memory is let go after this.
    fn drop(&mut self) {
        if let Some(observer) = &self.of.observer {
            observer.lock().used(self.address, self.held.len(), self.access);
        }
    }
}
