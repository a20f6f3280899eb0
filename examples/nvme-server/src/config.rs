//! The function's configuration space (PCI Express Base Specification 6.0, section 7.5).

use crate::bytes::put;
use crate::controller::{BAR_BYTES, Mastering, VECTORS};

/// How long it is.
pub(crate) const CONFIG_BYTES: usize = 4096;
/// Where the MSI-X table and its pending bits are in BAR 0: a client keeps both.
const TABLE: u32 = 0x2000;
const PENDING: u32 = 0x3000;

/// The command register, and its bit Bus Master Enable.
const COMMAND: usize = 0x04;
const MASTER: u8 = 1 << 2;
/// Capabilities: MSI-X, power management, PCI Express.
const MSI_X: usize = 0x40;
const POWER: usize = 0x50;
const EXPRESS: usize = 0x60;
/// Device Control of PCI Express, and its bit Initiate Function Level Reset.
const DEVICE_CONTROL: usize = EXPRESS + 8;
const RESET: u16 = 1 << 15;

/// The bytes that a guest may write: command, cache line, interrupt line, and the control words of
/// the capabilities.
const WRITABLE: [usize; 11] = [
    COMMAND,
    COMMAND + 1,
    0x0c,
    0x3c,
    MSI_X + 2,
    MSI_X + 3,
    POWER + 4,
    POWER + 5,
    DEVICE_CONTROL,
    DEVICE_CONTROL + 1,
    0x0d,
];

/// The space, as a guest has written it.
#[derive(Clone, Debug)]
pub(crate) struct Config(Vec<u8>);

impl Config {
    pub(crate) fn new() -> Self {
        let mut bytes = vec![0; CONFIG_BYTES];
        let mut put = |at: usize, what: &[u8]| put(&mut bytes, at, what);
        // The vendor and the device of QEMU's own controller, which drivers know.
        put(0x00, &[0x36, 0x1b, 0x10, 0x00]);
        // There are capabilities.
        put(0x06, &[0x10, 0x00]);
        // Revision, and the class of controllers of non-volatile memory.
        put(0x08, &[0x02, 0x02, 0x08, 0x01]);
        // BAR 0 is memory of 64 bits.
        put(0x10, &[0x04]);
        put(0x2c, &[0x36, 0x1b, 0x00, 0x11]);
        put(0x34, &[0x40]);
        put(MSI_X, &[0x11, 0x50]);
        put(MSI_X + 2, &(VECTORS - 1).to_le_bytes());
        put(MSI_X + 4, &TABLE.to_le_bytes());
        put(MSI_X + 8, &PENDING.to_le_bytes());
        put(POWER, &[0x01, 0x60, 0x03, 0x00]);
        // An endpoint that can be reset.
        put(EXPRESS, &[0x10, 0x00, 0x02, 0x00, 0x00, 0x80, 0x00, 0x10]);
        Self(bytes)
    }

    /// `len` bytes from `offset` on; `None` where there are not so many.
    pub(crate) fn read(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let at = usize::try_from(offset).ok()?;
        self.0.get(at..at.checked_add(len)?)
    }

    /// Whether a guest lets the function reach memory.
    pub(crate) fn mastering(&self) -> Mastering {
        match self.0.get(COMMAND) {
            Some(command) if command & MASTER != 0 => Mastering::On,
            _ => Mastering::Off,
        }
    }

    /// Writes what can be written, and returns whether the function is to be reset; `None` where
    /// the bytes are not all in the space.
    pub(crate) fn write(&mut self, offset: u64, new: &[u8]) -> Option<bool> {
        self.read(offset, new.len())?;
        let at = usize::try_from(offset).ok()?;
        for (place, &byte) in (at..).zip(new) {
            if WRITABLE.contains(&place) {
                put(&mut self.0, place, &[byte]);
            }
        }
        // The bit reads as 0.
        let control = self.0.get_mut(DEVICE_CONTROL + 1)?;
        let [_, high] = RESET.to_le_bytes();
        let is_reset = *control & high != 0;
        *control &= !high;
        Some(is_reset)
    }
}

const _: () = assert!(PENDING as u64 + 0x1000 <= BAR_BYTES);
