//! Devices.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use dmaspan::Errno;

use super::bar::Bar;
use super::device_error::DeviceError;
use super::error::OpenError;
use crate::os;
use crate::pci::Bdf;
use crate::sys::uapi::vfio as uapi;
use crate::sys::vfio::DeviceFd;

/// Whether a device may access memory at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BusMaster {
    /// It may.
    On,
    /// It may not: what it asks for fails.
    Off,
}

/// An open device: a PCI function that belongs to this process.
///
/// It may not access memory until [`set_bus_master`](Self::set_bus_master) lets it, and not any more
/// after this is dropped. The device is closed, and reset where it can be, when its [`Bar`]s are
/// dropped too.
///
/// # Context
///
/// Any number of threads use it at once.
#[derive(Debug)]
pub struct Device {
    shared: Arc<Shared>,
}

/// What a device's parts keep open.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) bdf: Bdf,
    pub(super) fd: DeviceFd,
    /// Where the configuration space begins in the file.
    config: u64,
}

impl Shared {
    /// The error of a request of the device that failed.
    pub(super) fn failed(&self, request: &'static str) -> impl Fn(Errno) -> DeviceError + use<> {
        let bdf = self.bdf;
        move |errno| DeviceError::System { request, bdf, errno }
    }

    /// Whether a BAR is of I/O ports (PCI Local Bus 3.0, section 6.2.5.1).
    pub(super) fn has_io_ports(&self, bar: u32) -> bool {
        let mut byte = [0];
        let at = self.config + BAR0 + 4 * u64::from(bar);
        self.fd.file().read_exact_at(&mut byte, at).is_ok() && byte[0] & 1 != 0
    }

    /// Sets `bits` of the command register, and clears `others`.
    fn set_command(&self, bits: u16, others: u16) -> Result<(), Errno> {
        let file = self.fd.file();
        let mut bytes = [0; 2];
        let failed = |error| os::errno(&error);
        file.read_exact_at(&mut bytes, self.config + COMMAND).map_err(failed)?;
        let command = u16::from_le_bytes(bytes) & !others | bits;
        file.write_all_at(&command.to_le_bytes(), self.config + COMMAND).map_err(failed)
    }
}

/// The command register of a PCI function and its bits (PCI Local Bus 3.0, section 6.2.2).
const COMMAND: u64 = 4;
const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;

/// The first base address register.
const BAR0: u64 = 0x10;

impl Device {
    pub(super) fn new(bdf: Bdf, fd: DeviceFd) -> Result<Self, OpenError> {
        let failed = |request| move |errno| OpenError::System { request, bdf, errno };
        let info = fd.info().map_err(failed("VFIO_DEVICE_GET_INFO"))?;
        if info.flags & uapi::DEVICE_IS_PCI == 0 {
            return Err(OpenError::Unsupported {
                what: "the device is no PCI function",
                advice: "only those of vfio-pci can be opened",
            });
        }
        let config = fd.region(uapi::PCI_CONFIG_REGION);
        let config = config.map_err(failed("VFIO_DEVICE_GET_REGION_INFO"))?.info.offset;
        let shared = Shared { bdf, fd, config };
        // BARs answer from here on, until the device is closed.
        let command = shared.set_command(MEMORY_SPACE, BUS_MASTER);
        command.map_err(failed("a write of the command register"))?;
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Its address.
    pub fn bdf(&self) -> Bdf {
        self.shared.bdf
    }

    /// Lets the device access memory, or forbids it. It may not after it was opened.
    ///
    /// # Errors
    ///
    /// The kernel's errno, where the device is gone.
    pub fn set_bus_master(&self, bus_master: BusMaster) -> Result<(), Errno> {
        match bus_master {
            BusMaster::On => self.shared.set_command(BUS_MASTER, 0),
            BusMaster::Off => self.shared.set_command(0, BUS_MASTER),
        }
    }

    /// Maps the registers of BAR `index`, 0 to 5.
    ///
    /// # Errors
    ///
    /// [`DeviceError`]: where there is no such BAR, it is of I/O ports, or the kernel does not let it
    /// be mapped.
    pub fn bar(&self, index: u32) -> Result<Bar, DeviceError> {
        Bar::map(&self.shared, index)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A device that is gone accesses nothing.
        let _ = self.set_bus_master(BusMaster::Off);
    }
}
