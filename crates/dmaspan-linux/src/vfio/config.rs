//! The configuration space of a device.

use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::device::Shared;
use super::device_error::DeviceError;
use crate::os;

/// The registers of the header that this crate uses (PCI Local Bus 3.0, section 6.1).
pub(super) const COMMAND: u64 = 0x04;
const BAR0: u64 = 0x10;
const CAPABILITIES: u64 = 0x34;

/// The power management capability, and its control and status register in it (PCI Bus Power
/// Management Interface 1.2, section 3.2).
const POWER_MANAGEMENT: u8 = 1;
const POWER_CONTROL: u64 = 4;

/// The configuration space of a device, as the kernel shows it: some registers are the kernel's own
/// copies.
///
/// All are little-endian; values are the CPU's. An offset is in bytes, and a multiple of the
/// access's width. Of a device that was pulled out all bits are ones.
///
/// What would make BARs stop answering cannot be written: the command register, whose bit for DMA
/// is [`set_bus_master`](super::VfioDevice::set_bus_master)'s, and the control of power management.
#[derive(Clone, Copy, Debug)]
pub struct ConfigSpace<'a> {
    device: &'a Shared,
}

macro_rules! accesses {
    ($($read:ident, $write:ident, $type:ty, $bits:literal;)*) => {$(
        #[doc = concat!("Reads the ", $bits, " bits at `offset`.")]
        ///
        /// # Errors
        ///
        /// [`DeviceError::NoRegister`], and what the kernel answers.
        pub fn $read(&self, offset: u64) -> Result<$type, DeviceError> {
            let mut bytes = [0; size_of::<$type>()];
            self.device.read_config(offset, &mut bytes)?;
            Ok(<$type>::from_le_bytes(bytes))
        }

        #[doc = concat!("Writes the ", $bits, " bits at `offset`.")]
        ///
        /// # Errors
        ///
        /// [`DeviceError::NoRegister`], [`DeviceError::Guarded`], and what the kernel answers.
        pub fn $write(&self, offset: u64, value: $type) -> Result<(), DeviceError> {
            self.check_write(offset, size_of::<$type>() as u64)?;
            self.device.write_config(offset, &value.to_le_bytes())
        }
    )*};
}

impl<'a> ConfigSpace<'a> {
    pub(super) fn new(device: &'a Shared) -> Self {
        Self { device }
    }

    /// Its length in bytes: 256, or 4096 for PCI Express.
    #[expect(clippy::len_without_is_empty, reason = "no configuration space is empty")]
    pub fn len(&self) -> u64 {
        self.device.config.end - self.device.config.start
    }

    accesses! {
        read8, write8, u8, "8";
        read16, write16, u16, "16";
        read32, write32, u32, "32";
    }

    /// Returns where the first capability with that number is (PCI Local Bus 3.0, section 6.7);
    /// `None` where there is none.
    ///
    /// # Errors
    ///
    /// What the kernel answers.
    pub fn capability(&self, id: u8) -> Result<Option<u64>, DeviceError> {
        let mut at = u64::from(self.read8(CAPABILITIES)? & !3);
        // There is room for 48 in 256 bytes: a list that is longer goes in circles.
        for _ in 0..48 {
            if at == 0 {
                break;
            }
            let [found, next] = self.read16(at)?.to_le_bytes();
            if found == id {
                return Ok(Some(at));
            }
            at = u64::from(next & !3);
        }
        Ok(None)
    }

    /// Whether `len` bytes from `offset` may be written.
    fn check_write(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        let guarded = |register: u64| {
            // Registers of 16 bits, and aligned accesses of no more than 32.
            offset < register + 2 && register < offset.saturating_add(len)
        };
        let bdf = self.device.bdf;
        if guarded(COMMAND) {
            return Err(DeviceError::Guarded { bdf, offset, register: "command register" });
        }
        let power = self.capability(POWER_MANAGEMENT)?;
        if power.is_some_and(|capability| guarded(capability + POWER_CONTROL)) {
            let register = "control of power management";
            return Err(DeviceError::Guarded { bdf, offset, register });
        }
        Ok(())
    }
}

impl Shared {
    /// Reads configuration space, one register.
    pub(super) fn read_config(&self, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let at = self.register(offset, bytes.len())?;
        let read = self.fd.file().read_exact_at(bytes, at);
        read.map_err(|error| self.failed("a read of configuration space")(os::errno(&error)))
    }

    /// Writes configuration space, one register.
    pub(super) fn write_config(&self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let at = self.register(offset, bytes.len())?;
        let written = self.fd.file().write_all_at(bytes, at);
        written.map_err(|error| self.failed("a write of configuration space")(os::errno(&error)))
    }

    /// Where a register is in the file.
    fn register(&self, offset: u64, len: usize) -> Result<u64, DeviceError> {
        register(&self.config, offset, len).ok_or(DeviceError::NoRegister {
            bdf: self.bdf,
            offset,
            len: self.config.end - self.config.start,
        })
    }

    /// Where a BAR of memory, 0 to 5, begins on the bus (PCI Local Bus 3.0, section 6.2.5.1).
    pub(super) fn bar_address(&self, bar: u32) -> Result<u64, DeviceError> {
        let config = ConfigSpace::new(self);
        let at = BAR0 + 4 * u64::from(bar);
        let low = config.read32(at)?;
        // Bits 2 and 1 say how wide it is: 10 for 64 bits, of which the next register has the rest.
        let high = if low & 0b110 == 0b100 { config.read32(at + 4)? } else { 0 };
        Ok(u64::from(high) << 32 | u64::from(low & !0xf))
    }

    /// Whether a BAR, 0 to 5, is of I/O ports (PCI Local Bus 3.0, section 6.2.5.1).
    pub(super) fn has_io_ports(&self, bar: u32) -> bool {
        let register = ConfigSpace::new(self).read32(BAR0 + 4 * u64::from(bar));
        register.is_ok_and(|register| register & 1 != 0)
    }
}

/// Where the register of `len` bytes at `offset` is, in the space that is at `config`.
fn register(config: &Range<u64>, offset: u64, len: usize) -> Option<u64> {
    let len = u64::try_from(len).ok()?;
    let at = config.start.checked_add(offset)?;
    let inside = at.checked_add(len).is_some_and(|end| end <= config.end);
    (inside && offset.is_multiple_of(len)).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_aligned_and_inside() {
        let config = 7 << 40..(7 << 40) + 256;
        for (offset, len, is_one) in [
            (0, 1, true),
            (255, 1, true),
            (254, 2, true),
            (252, 4, true),
            (256, 1, false),
            (255, 2, false),
            (254, 4, false),
            (2, 4, false),
            (1, 2, false),
            (u64::MAX, 1, false),
            (u64::MAX - (7 << 40), 1, false),
        ] {
            let at = register(&config, offset, len);
            assert_eq!(at, is_one.then(|| (7 << 40) + offset), "{offset}, {len}");
        }
    }
}
