//! Firmware's description of the machine.

use core::ops::Range;

use dmaspan_drivers::firmware::IommuMap;

use crate::Result;

#[cfg(target_arch = "x86_64")]
mod acpi;
#[cfg(not(target_arch = "x86_64"))]
mod tree;

#[cfg(target_arch = "x86_64")]
pub(crate) use acpi::{Firmware, MemoryRange};
#[cfg(not(target_arch = "x86_64"))]
pub(crate) use tree::Firmware;

/// What the kernel wants to know of a machine, whose memory it has found already.
pub(crate) struct Machine {
    /// Where the configuration space of PCI is.
    pub(crate) ecam: u64,
    /// Addresses for BARs that nobody has placed.
    pub(crate) window: Range<u64>,
    /// How many bits a physical address has, at most.
    pub(crate) address_bits: u32,
    /// Which IOMMU serves which device.
    pub(crate) iommus: Result<IommuMap>,
}

/// What is done to a description before it is read, as the command line asks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Damage {
    None,
    Truncated,
    Nonsense,
}

impl Damage {
    fn of(options: &str) -> Self {
        match options.split(' ').find_map(|one| one.strip_prefix("firmware=")) {
            Some("truncated") => Self::Truncated,
            Some("nonsense") => Self::Nonsense,
            _ => Self::None,
        }
    }
}
