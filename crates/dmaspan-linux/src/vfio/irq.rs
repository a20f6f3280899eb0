//! The interrupts of a device, as events.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dmaspan::Errno;

use super::device::Shared;
use super::device_error::DeviceError;
use crate::pci::Bdf;
use crate::sys::eventfd::EventFd;
use crate::sys::uapi::vfio::PCI_MSIX_IRQ;

/// An interrupt of a device: a counter that each one adds 1 to (eventfd(2)).
#[derive(Debug)]
pub struct IrqEvent {
    fd: EventFd,
    bdf: Bdf,
}

impl IrqEvent {
    /// Returns how many interrupts there were since the last time; 0 where there was none.
    ///
    /// # Errors
    ///
    /// [`DeviceError::System`], of read(2).
    pub fn try_read(&self) -> Result<u64, DeviceError> {
        self.fd.take().map_err(|errno| self.failed("a read of an interrupt's eventfd", errno))
    }

    /// Waits for an interrupt, no longer than `timeout` where there is one. Returns how many there
    /// were since the last time, 0 where the time is up.
    ///
    /// # Errors
    ///
    /// [`DeviceError::System`], of poll(2) or read(2).
    pub fn wait(&self, timeout: Option<Duration>) -> Result<u64, DeviceError> {
        self.fd.wait(timeout).map_err(|errno| self.failed("a wait for an interrupt", errno))
    }

    fn failed(&self, request: &'static str, errno: Errno) -> DeviceError {
        DeviceError::System { request, bdf: self.bdf, errno }
    }
}

/// For event loops: readable when there was an interrupt. It does not block.
impl AsFd for IrqEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The MSI-X interrupts of a device that are on, each with its [`IrqEvent`]. Dropped, they are off.
#[derive(Debug)]
pub struct Msix {
    events: Vec<IrqEvent>,
    device: Arc<Shared>,
}

impl Msix {
    /// Switches vectors 0 to `count - 1` on.
    pub(super) fn enable(device: &Arc<Shared>, count: u32) -> Result<Self, DeviceError> {
        let bdf = device.bdf;
        let has = vectors(device)?;
        if count == 0 || count > has {
            return Err(DeviceError::NoVectors { bdf, asked: count, has });
        }
        if device.msix.swap(true, Ordering::AcqRel) {
            return Err(DeviceError::MsixIsOn { bdf });
        }
        // From here on the drop switches them off where something fails.
        let mut msix = Self { events: Vec::new(), device: Arc::clone(device) };
        for _ in 0..count {
            let fd = EventFd::new().map_err(device.failed("eventfd for an interrupt"))?;
            msix.events.push(IrqEvent { fd, bdf });
        }
        let fds: Vec<BorrowedFd<'_>> = msix.events.iter().map(AsFd::as_fd).collect();
        let set = device.fd.set_irqs(PCI_MSIX_IRQ, &fds);
        set.map_err(device.failed("VFIO_DEVICE_SET_IRQS"))?;
        Ok(msix)
    }

    /// The events, in the order of the vectors.
    pub fn events(&self) -> &[IrqEvent] {
        &self.events
    }

    /// Has the kernel signal the event of a vector, as an interrupt of the device would.
    ///
    /// # Errors
    ///
    /// [`DeviceError::NoVectors`] where the vector is not on.
    pub fn signal(&self, vector: u32) -> Result<(), DeviceError> {
        let has = u32::try_from(self.events.len()).unwrap_or(u32::MAX);
        if vector >= has {
            let asked = vector.saturating_add(1);
            return Err(DeviceError::NoVectors { bdf: self.device.bdf, asked, has });
        }
        let signal = self.device.fd.signal_irq(PCI_MSIX_IRQ, vector);
        signal.map_err(self.device.failed("VFIO_DEVICE_SET_IRQS"))
    }
}

impl Drop for Msix {
    fn drop(&mut self) {
        // The kernel keeps the counters for as long as it needs them. A device that is gone has no
        // interrupts.
        let _ = self.device.fd.set_irqs(PCI_MSIX_IRQ, &[]);
        self.device.msix.store(false, Ordering::Release);
    }
}

/// How many MSI-X vectors a device has.
pub(super) fn vectors(device: &Shared) -> Result<u32, DeviceError> {
    let info = device.fd.irq(PCI_MSIX_IRQ);
    info.map(|info| info.count).map_err(device.failed("VFIO_DEVICE_GET_IRQ_INFO"))
}
