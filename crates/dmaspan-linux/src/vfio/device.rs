//! Devices.

use std::os::unix::fs::FileExt;

use dmaspan::Errno;

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

/// An open device: a PCI function that belongs to this process until it is dropped.
#[derive(Debug)]
pub struct Device {
    bdf: Bdf,
    fd: DeviceFd,
    /// Where the configuration space begins in the file.
    config: u64,
}

/// The command register of a PCI function and its bits (PCI Local Bus 3.0, section 6.2.2).
const COMMAND: u64 = 4;
const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;

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
        Ok(Self { bdf, fd, config })
    }

    /// Its address.
    pub fn bdf(&self) -> Bdf {
        self.bdf
    }

    /// Lets the device access memory, or forbids it. It may not after it was opened.
    ///
    /// # Errors
    ///
    /// The kernel's errno, where the device is gone.
    pub fn set_bus_master(&self, bus_master: BusMaster) -> Result<(), Errno> {
        let file = self.fd.file();
        let mut bytes = [0; 2];
        let failed = |error| os::errno(&error);
        file.read_exact_at(&mut bytes, self.config + COMMAND).map_err(failed)?;
        let command = u16::from_le_bytes(bytes);
        let command = match bus_master {
            BusMaster::On => command | BUS_MASTER | MEMORY_SPACE,
            BusMaster::Off => command & !BUS_MASTER,
        };
        file.write_all_at(&command.to_le_bytes(), self.config + COMMAND).map_err(failed)
    }
}
