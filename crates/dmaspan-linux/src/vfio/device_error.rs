//! Why something of an open device cannot be had.

use dmaspan::Errno;

use crate::os;
use crate::pci::Bdf;

/// Why something of an open device cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There are no registers behind the BAR.
    #[error(
        "BAR {index} of {bdf} has no registers: the device has no such BAR, it is the upper half \
         of the one before, or the firmware gave it no addresses"
    )]
    NoBar {
        /// The device.
        bdf: Bdf,
        /// The BAR asked for.
        index: u32,
    },
    /// The BAR's registers are I/O ports.
    #[error("BAR {index} of {bdf} is of I/O ports, which cannot be mapped")]
    IoPorts {
        /// The device.
        bdf: Bdf,
        /// The BAR asked for.
        index: u32,
    },
    /// The kernel does not let the BAR be mapped.
    #[error(
        "the kernel does not let BAR {index} of {bdf} be mapped: another device's registers may \
         share a page with it"
    )]
    NotMappable {
        /// The device.
        bdf: Bdf,
        /// The BAR asked for.
        index: u32,
    },
    /// The kernel refused.
    #[error("{request} of {bdf} failed: {}", os::words(*errno))]
    System {
        /// The request.
        request: &'static str,
        /// The device.
        bdf: Bdf,
        /// What the kernel answered.
        errno: Errno,
    },
}

impl DeviceError {
    /// The errno that Linux's VFIO answers with, or would.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::NoBar { .. } | Self::IoPorts { .. } | Self::NotMappable { .. } => Errno::EINVAL,
            Self::System { errno, .. } => *errno,
        }
    }
}
