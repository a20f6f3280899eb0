//! The driver reads here which features an IOMMU has.

use super::spec::{capability, feature};
use crate::error::Error;

/// Says how an IOMMU is to be driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AmdViConfig {
    /// The header of the capability block in the IOMMU's PCI configuration space, at offset 0 of
    /// the block (48882, 3.2).
    pub capability: u32,
    /// Its Miscellaneous Information Register 0, at offset 10h.
    pub miscellaneous: u32,
    /// The last device ID that the device table has: what comes behind is refused. The table takes
    /// 32 bytes a device, rounded up to a power of two.
    ///
    /// QEMU does not look at the length of the table: there it has to have every device.
    pub last_device: u16,
    /// The last domain ID to use, at least 3; 1 and 2 are of devices without a domain.
    pub last_domain: u16,
    /// log2 of the entries of the command buffer: 8 to 15.
    pub lg2_commands: u32,
    /// log2 of the entries of the event log: 8 to 15.
    pub lg2_events: u32,
    /// The address bit of encrypted memory, where the tables of domains are in such: the C-bit of
    /// CPUID function 8000_001Fh, 32 to 51.
    pub encryption_bit: Option<u32>,
}

impl AmdViConfig {
    /// All devices and domains, queues of 512 entries, as Linux has them, and plain memory.
    pub const fn new(capability: u32, miscellaneous: u32) -> Self {
        Self {
            capability,
            miscellaneous,
            last_device: u16::MAX,
            last_domain: u16::MAX,
            lg2_commands: 9,
            lg2_events: 9,
            encryption_bit: None,
        }
    }
}

/// Says what an IOMMU has, as its registers say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AmdViFeatures {
    /// The Extended Feature Register (48882, 3.4); 0 where there is none.
    pub extended: u64,
    /// Levels of host tables that it walks: 4 to 6.
    pub levels: u32,
    /// Bits of the addresses that devices use: 32 to 64.
    pub input_bits: u32,
    /// Bits of physical addresses: 32 to 52.
    pub output_bits: u32,
    /// Whether one command makes it forget everything (IASup).
    pub invalidate_all: bool,
    /// Whether registers hold an event that could not be logged (HESup).
    pub hardware_events: bool,
    /// Whether it marks leaves that it reads or writes through (HASup and HDSup).
    pub dirty: bool,
    /// Whether it caches absent entries (NpCache).
    pub caches_absent: bool,
}

impl AmdViFeatures {
    /// Whether registers have to be read for it.
    pub(super) const fn has_extended(config: &AmdViConfig) -> bool {
        config.capability & capability::EXTENDED_FEATURES != 0
    }

    pub(super) fn new(config: &AmdViConfig, extended: u64) -> Result<Self, Error> {
        let bits = |shift: u32| config.miscellaneous >> shift & capability::BITS_MASK;
        let output_bits = bits(capability::PHYSICAL_BITS_SHIFT);
        if !(32..=52).contains(&output_bits) {
            let what = "physical addresses of 32 to 52 bits";
            return Err(Error::unsupported(what, config.miscellaneous));
        }
        let virtual_bits = bits(capability::VIRTUAL_BITS_SHIFT);
        if !(32..=64).contains(&virtual_bits) {
            let what = "device addresses of 32 to 64 bits";
            return Err(Error::unsupported(what, config.miscellaneous));
        }
        let more = extended >> feature::LEVELS_SHIFT & feature::LEVELS_MASK;
        let levels = match more {
            0 => 4,
            1 => 5,
            2 => 6,
            _ => return Err(Error::unsupported("host tables", extended)),
        };
        let both = feature::ACCESSED | feature::DIRTY;
        Ok(Self {
            extended,
            levels,
            input_bits: virtual_bits.min(12 + 9 * levels),
            output_bits,
            invalidate_all: extended & feature::INVALIDATE_ALL != 0,
            hardware_events: extended & feature::HARDWARE_EVENTS != 0,
            dirty: extended & both == both,
            caches_absent: config.capability & capability::NP_CACHE != 0,
        })
    }
}
