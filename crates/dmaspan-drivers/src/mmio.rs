//! [`Mmio`] is the registers of a device, and [`MmioRegion`] is registers that are mapped.

#[expect(unsafe_code, reason = "instructions that access registers and order memory")]
mod cpu;

use core::fmt;
use core::ops::Deref;
use core::ptr::NonNull;

/// The registers of a device, by their offset in bytes. All are little-endian; values are the
/// CPU's.
///
/// What a driver loaded from and stored to memory before a write is done when the device sees that,
/// and what it loads after a read is not older than it: an implementation on Arm needs barriers for
/// both (Linux: Documentation/memory-barriers.txt, `readl` and `writel`; the latter orders stores
/// alone, and a place in a queue is given back only after it was read).
///
/// Nothing is undefined whatever it returns: a driver takes nothing on trust from a register. That
/// the registers are those of the hardware, in that order, is promised to the driver when it is
/// made.
pub trait Mmio: Send + Sync {
    /// Reads the 32 bits at `offset`, with one access.
    fn read32(&self, offset: u64) -> u32;

    /// Writes the 32 bits at `offset`, with one access.
    fn write32(&self, offset: u64, value: u32);

    /// Reads the 64 bits at `offset`, with one access where the bus can. Where it cannot, the lower
    /// half is read first.
    fn read64(&self, offset: u64) -> u64 {
        let low = self.read32(offset);
        u64::from(low) | u64::from(self.read32(offset.wrapping_add(4))) << 32
    }

    /// Writes the 64 bits at `offset`, with one access where the bus can. Where it cannot, the
    /// upper half is written first: a driver sets the bit that starts something in the lower one.
    fn write64(&self, offset: u64, value: u64) {
        let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
        self.write32(offset.wrapping_add(4), u32::from_le_bytes([e, f, g, h]));
        self.write32(offset, u32::from_le_bytes([a, b, c, d]));
    }

    /// Makes what was stored to memory seen by devices before what is stored to memory or to
    /// registers from now on: an IOMMU may look at a new entry of a table as soon as a device is
    /// told of it, and that is by another driver. The default is the CPU's barrier for it (Linux:
    /// `wmb`, which its drivers have behind the stores of a map).
    fn order_stores(&self) {
        cpu::order_stores();
    }
}

/// What leads to registers is those registers: a reference, a `Box`, an `Arc`.
impl<P: Deref<Target: Mmio> + Send + Sync + ?Sized> Mmio for P {
    fn read32(&self, offset: u64) -> u32 {
        (**self).read32(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        (**self).write32(offset, value);
    }

    fn read64(&self, offset: u64) -> u64 {
        (**self).read64(offset)
    }

    fn write64(&self, offset: u64, value: u64) {
        (**self).write64(offset, value);
    }

    fn order_stores(&self) {
        (**self).order_stores();
    }
}

/// Registers that are mapped into the CPU's address space.
///
/// An access outside of them, or one that is not aligned, is not made: it reads all ones, as a bus
/// answers where nobody is.
pub struct MmioRegion {
    start: NonNull<u8>,
    len: u64,
}

#[expect(unsafe_code, reason = "registers are reached through a pointer")]
mod access {
    use core::ptr::NonNull;

    use super::{MmioRegion, cpu};

    // SAFETY: the pointer is to registers, which any thread may access; what accesses from several
    // threads do to the device is the driver's business, which orders them.
    unsafe impl Send for MmioRegion {}
    // SAFETY: as for `Send`.
    unsafe impl Sync for MmioRegion {}

    impl MmioRegion {
        /// The registers at `start`, `len` bytes.
        ///
        /// # Safety
        ///
        /// While the value exists, the bytes from `start` on are mapped as the device's registers:
        /// as device memory, read and written with volatile accesses alone, and aligned to 8 bytes.
        pub const unsafe fn new(start: NonNull<u8>, len: u64) -> Self {
            Self { start, len }
        }

        /// Where a register of that type is, if it is among these.
        fn register<T>(&self, offset: u64) -> Option<NonNull<T>> {
            let size = size_of::<T>() as u64;
            let end = offset.checked_add(size)?;
            if end > self.len || !offset.is_multiple_of(size) {
                return None;
            }
            let offset = usize::try_from(offset).ok()?;
            // SAFETY: the offset is within the registers, which are mapped.
            let register = unsafe { self.start.add(offset) };
            Some(register.cast())
        }

        pub(super) fn load32(&self, offset: u64) -> Option<u32> {
            let register = self.register::<u32>(offset)?;
            // SAFETY: `register` gives registers that are mapped and aligned.
            let value = unsafe { cpu::load32(register.as_ptr()) };
            cpu::order_all();
            Some(value)
        }

        pub(super) fn store32(&self, offset: u64, value: u32) {
            let Some(register) = self.register::<u32>(offset) else { return };
            cpu::order_all();
            // SAFETY: `register` gives registers that are mapped and aligned.
            unsafe { cpu::store32(register.as_ptr(), value) }
        }

        #[cfg(target_pointer_width = "64")]
        pub(super) fn load64(&self, offset: u64) -> Option<u64> {
            let register = self.register::<u64>(offset)?;
            // SAFETY: `register` gives registers that are mapped and aligned.
            let value = unsafe { cpu::load64(register.as_ptr()) };
            cpu::order_all();
            Some(value)
        }

        #[cfg(target_pointer_width = "64")]
        pub(super) fn store64(&self, offset: u64, value: u64) {
            let Some(register) = self.register::<u64>(offset) else { return };
            cpu::order_all();
            // SAFETY: `register` gives registers that are mapped and aligned.
            unsafe { cpu::store64(register.as_ptr(), value) }
        }

        /// The halves: no instruction of these CPUs is one access of 64 bits to a device.
        #[cfg(not(target_pointer_width = "64"))]
        pub(super) fn load64(&self, offset: u64) -> Option<u64> {
            self.register::<u64>(offset)?;
            let low = u64::from(u32::from_le(self.load32(offset)?));
            let high = u64::from(u32::from_le(self.load32(offset + 4)?));
            Some((low | high << 32).to_le())
        }

        /// The halves, the upper one first.
        #[cfg(not(target_pointer_width = "64"))]
        pub(super) fn store64(&self, offset: u64, value: u64) {
            if self.register::<u64>(offset).is_some() {
                let [a, b, c, d, e, f, g, h] = u64::from_le(value).to_le_bytes();
                self.store32(offset + 4, u32::from_le_bytes([e, f, g, h]).to_le());
                self.store32(offset, u32::from_le_bytes([a, b, c, d]).to_le());
            }
        }
    }
}

impl Mmio for MmioRegion {
    fn read32(&self, offset: u64) -> u32 {
        self.load32(offset).map_or(u32::MAX, u32::from_le)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.store32(offset, value.to_le());
    }

    fn read64(&self, offset: u64) -> u64 {
        self.load64(offset).map_or(u64::MAX, u64::from_le)
    }

    fn write64(&self, offset: u64, value: u64) {
        self.store64(offset, value.to_le());
    }
}

impl fmt::Debug for MmioRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MmioRegion({:p}, {:#x} bytes)", self.start, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_outside_of_the_region_are_not_made() {
        let mut words = [0x1122_3344_5566_7788u64.to_le(), 0];
        let start = NonNull::from(&mut words).cast();
        #[expect(unsafe_code, reason = "memory in the place of registers")]
        // SAFETY: the words outlive the region and are used through it alone meanwhile.
        let region = unsafe { MmioRegion::new(start, 12) };
        assert_eq!(region.read32(4), 0x1122_3344);
        assert_eq!(region.read64(0), 0x1122_3344_5566_7788);
        region.write32(8, 7);
        assert_eq!(region.read32(8), 7);
        for offset in [8, 4, u64::MAX, u64::MAX - 7] {
            assert_eq!(region.read64(offset), u64::MAX, "{offset:#x}");
            region.write64(offset, 1);
        }
        for offset in [12, 2, 9, u64::MAX - 3] {
            assert_eq!(region.read32(offset), u32::MAX, "{offset:#x}");
        }
        assert_eq!(words.map(u64::from_le), [0x1122_3344_5566_7788, 7]);
    }
}
