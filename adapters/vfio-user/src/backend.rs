//! A device behind the server of the crate `vfio_user`.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use dmaspan_linux::client;
use vfio_user::{DmaMapFlags, DmaUnmapFlags, ServerBackend};

use crate::{ClientDma, ClientDmaError};

/// A device: what a [`ServerBackend`] is without its memory.
pub trait DeviceModel {
    /// Reads from a region of the device, such as a BAR, into `data`.
    ///
    /// # Errors
    ///
    /// What the client is told; `vfio_user` 0.1.7 tells it only that there was an error.
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()>;

    /// Writes `data` to a region of the device.
    ///
    /// # Errors
    ///
    /// As [`region_read`](Self::region_read).
    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Brings the device into the state in which it was at first.
    ///
    /// # Errors
    ///
    /// As [`region_read`](Self::region_read).
    fn reset(&mut self) -> io::Result<()>;

    /// Says which descriptors signal `count` interrupts from `start` on, of `index`, as
    /// `VFIO_DEVICE_SET_IRQS` of `linux/vfio.h` has them.
    ///
    /// # Errors
    ///
    /// As [`region_read`](Self::region_read).
    fn set_irqs(
        &mut self,
        index: u32,
        flags: u32,
        start: u32,
        count: u32,
        fds: Vec<File>,
    ) -> io::Result<()>;

    /// The client takes memory back: the device lets go of what it holds beyond an operation, such
    /// as queues, and holds it again when it needs it next. An unmap waits behind this for the
    /// operations.
    fn let_go(&mut self) {}
}

/// A [`ServerBackend`] that is a [`DeviceModel`] and the memory of its client.
///
/// `vfio_user` answers DMA_UNMAP when `dma_unmap` returns. That is when the device holds nothing of
/// it any more, or after a bound.
#[derive(Debug)]
pub struct ModelBackend<D> {
    device: D,
    dma: Arc<ClientDma>,
    bound: Duration,
}

impl<D: DeviceModel> ModelBackend<D> {
    /// How long an unmap waits, unless [`with_bound`](Self::with_bound) says another time: less
    /// than QEMU waits for an answer, which is 5 s.
    pub const BOUND: Duration = Duration::from_secs(4);

    /// `device`, whose threads hold memory of `dma`.
    pub fn new(device: D, dma: Arc<ClientDma>) -> Self {
        Self { device, dma, bound: Self::BOUND }
    }

    /// The same with another bound for unmaps.
    #[must_use]
    pub fn with_bound(self, bound: Duration) -> Self {
        Self { bound, ..self }
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The client is gone: the device lets go, and its memory is unmapped.
    ///
    /// # Errors
    ///
    /// [`ClientDmaError::Held`] where something holds some of it after the bound.
    pub fn end(&mut self) -> Result<(), ClientDmaError> {
        let unmapping = self.dma.unmap_all();
        self.device.let_go();
        client::wait(unmapping, self.bound)?;
        Ok(())
    }
}

impl<D: DeviceModel> ServerBackend for ModelBackend<D> {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.device.region_read(region, offset, data)
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        self.device.region_write(region, offset, data)
    }

    fn dma_map(
        &mut self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        fd: Option<File>,
    ) -> io::Result<()> {
        Ok(self.dma.map(flags, offset, address, size, fd.map(Into::into))?)
    }

    fn dma_unmap(&mut self, flags: DmaUnmapFlags, address: u64, size: u64) -> io::Result<()> {
        let unmapping = self.dma.unmap(flags, address, size)?;
        self.device.let_go();
        client::wait(unmapping, self.bound).map_err(ClientDmaError::from)?;
        Ok(())
    }

    fn reset(&mut self) -> io::Result<()> {
        self.device.reset()
    }

    fn set_irqs(
        &mut self,
        index: u32,
        flags: u32,
        start: u32,
        count: u32,
        fds: Vec<File>,
    ) -> io::Result<()> {
        self.device.set_irqs(index, flags, start, count, fds)
    }
}
