//! The errors of an open device.

use dmaspan::Errno;

use crate::os;
use crate::pci::Bdf;

/// The reason why a part of an open device cannot be used.
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
    #[error("BAR {index} of {bdf} has I/O ports, which cannot be mapped")]
    IoPorts {
        /// The device.
        bdf: Bdf,
        /// The BAR asked for.
        index: u32,
    },
    /// The kernel does not let the BAR be mapped.
    #[error(
        "the kernel does not let this process map BAR {index} of {bdf}: another device's registers \
         may share a page with it; pci=resource_alignment={bdf} on the kernel's command line gives \
         it pages of its own"
    )]
    NotMappable {
        /// The device.
        bdf: Bdf,
        /// The BAR asked for.
        index: u32,
    },
    /// Configuration space has no such register.
    #[error(
        "the configuration space of {bdf} has {len} bytes and no register of that width at \
         {offset:#x}: stay inside, and at multiples of the width"
    )]
    NoRegister {
        /// The device.
        bdf: Bdf,
        /// The offset asked for, in bytes.
        offset: u64,
        /// The length of the configuration space in bytes.
        len: u64,
    },
    /// A register that cannot be written.
    #[error(
        "the {register} of {bdf}, at {offset:#x} of configuration space, must not be written: BARs \
         would stop answering"
    )]
    Guarded {
        /// The device.
        bdf: Bdf,
        /// The offset asked for, in bytes.
        offset: u64,
        /// What the register is.
        register: &'static str,
    },
    /// No interrupts, or more than there are.
    #[error("{bdf} has {has} MSI-X vectors, not {asked}: ask for 1 to {has}")]
    NoVectors {
        /// The device.
        bdf: Bdf,
        /// How many were asked for.
        asked: u32,
        /// How many there are.
        has: u32,
    },
    /// The interrupts are on.
    #[error("the MSI-X interrupts of {bdf} are on already: drop their holder first")]
    MsixIsOn {
        /// The device.
        bdf: Bdf,
    },
    /// The device cannot be reset.
    #[error(
        "{bdf} cannot be reset alone: it has no function level reset, or shares its bus with others"
    )]
    NoReset {
        /// The device.
        bdf: Bdf,
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
            Self::NoBar { .. }
            | Self::IoPorts { .. }
            | Self::NotMappable { .. }
            | Self::NoRegister { .. }
            | Self::NoVectors { .. } => Errno::EINVAL,
            Self::Guarded { .. } => Errno::EPERM,
            Self::MsixIsOn { .. } => Errno::EBUSY,
            Self::NoReset { .. } => os::ENOTTY,
            Self::System { errno, .. } => *errno,
        }
    }
}
