//! The PCI devices of a machine.

use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan_drivers::Mmio;

use crate::find::Arch;
use crate::machine::{Machine, QtestMmio};

/// Offsets in configuration space (PCI Local Bus Specification 3.0, 6.1).
const ID: u16 = 0x00;
const COMMAND: u16 = 0x04;
const CLASS: u16 = 0x08;
const BAR0: u16 = 0x10;
const CAPABILITIES: u16 = 0x34;
/// Memory space and bus master.
const ENABLED: u32 = 1 << 1 | 1 << 2;
/// A memory BAR of 64 bits.
const BAR_64: u32 = 1 << 2;
/// The ports through which a PC reaches configuration space.
const PC_ADDRESS: u16 = 0xcf8;
const PC_DATA: u16 = 0xcfc;

/// Why a device cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PciError {
    /// Nothing is in the slot.
    #[error("no device in slot {slot} of bus 0")]
    Empty {
        /// Which.
        slot: u8,
    },
    /// It has no memory BAR of that number.
    #[error("the device in slot {slot} has no memory BAR {bar}")]
    NoBar {
        /// In which slot.
        slot: u8,
        /// Which BAR.
        bar: u8,
    },
    /// The device is not what it was taken for.
    #[error("the device in slot {slot} is {id:#010x}, not {expected:#010x}")]
    Other {
        /// In which slot.
        slot: u8,
        /// Device and vendor.
        id: u32,
        /// What was looked for.
        expected: u32,
    },
}

/// The PCI bus 0 of a machine. It places BARs one behind the other, in the machine's 32-bit window.
#[derive(Debug)]
pub struct Pci {
    machine: Machine,
    ecam: u64,
    next_bar: AtomicU64,
}

impl Pci {
    /// Bus 0 of a `virt` or a `q35`.
    pub fn new(machine: &Machine) -> Self {
        let (ecam, window) = match machine.arch() {
            Arch::Aarch64 => (0x40_1000_0000, 0x1000_0000),
            Arch::Riscv64 => (0x3000_0000, 0x4000_0000),
            Arch::X86_64 => (0, 0xe000_0000),
        };
        Self { machine: machine.clone(), ecam, next_bar: AtomicU64::new(window) }
    }

    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The number by which an IOMMU tells the device in `slot` apart, function 0 of bus 0.
    pub const fn requester(slot: u8) -> u32 {
        (slot as u32) << 3
    }

    /// Reads 32 bits of configuration space.
    pub fn read(&self, slot: u8, offset: u16) -> u32 {
        match self.machine.arch() {
            Arch::X86_64 => {
                self.machine.port_out(PC_ADDRESS, pc_address(slot, offset));
                self.machine.port_in(PC_DATA)
            }
            _ => self.machine.mmio(self.ecam).read32(ecam_offset(slot, offset)),
        }
    }

    /// Writes 32 bits of configuration space.
    pub fn write(&self, slot: u8, offset: u16, value: u32) {
        match self.machine.arch() {
            Arch::X86_64 => {
                self.machine.port_out(PC_ADDRESS, pc_address(slot, offset));
                self.machine.port_out(PC_DATA, value);
            }
            _ => self.machine.mmio(self.ecam).write32(ecam_offset(slot, offset), value),
        }
    }

    /// Device and vendor of what is in a slot.
    ///
    /// # Errors
    ///
    /// [`PciError::Empty`].
    pub fn id(&self, slot: u8) -> Result<u32, PciError> {
        match self.read(slot, ID) {
            u32::MAX => Err(PciError::Empty { slot }),
            id => Ok(id),
        }
    }

    /// The first slot with a device of that class: base class, subclass and interface.
    pub fn find_class(&self, class: u32) -> Option<u8> {
        let is = |&slot: &u8| self.id(slot).is_ok() && self.read(slot, CLASS) >> 8 == class;
        (0..32).find(is)
    }

    /// The offset of a device's capability with that ID.
    pub fn capability(&self, slot: u8, id: u8) -> Option<u16> {
        let mut offset = self.read(slot, CAPABILITIES) & 0xfc;
        // There is room for so many.
        for _ in 0..48 {
            let at = u16::try_from(offset).ok().filter(|&at| at >= 0x40)?;
            let header = self.read(slot, at);
            if header & 0xff == u32::from(id) {
                return Some(at);
            }
            offset = header >> 8 & 0xfc;
        }
        None
    }

    /// Places a memory BAR, lets the device answer and master the bus, and returns its registers.
    ///
    /// # Errors
    ///
    /// [`PciError::Empty`], and [`PciError::NoBar`] for one that is not there, or is of ports.
    pub fn enable(&self, slot: u8, bar: u8) -> Result<QtestMmio, PciError> {
        self.id(slot)?;
        let none = PciError::NoBar { slot, bar };
        let register = BAR0 + u16::from(bar) * 4;
        self.write(slot, register, u32::MAX);
        let mask = self.read(slot, register);
        let size = u64::from(!(mask & !0xf)) + 1;
        if mask & !0xf == 0 || mask & 1 != 0 || bar > 5 {
            return Err(none);
        }
        let place = |next: u64| Some(next.next_multiple_of(size) + size);
        let before = self.next_bar.fetch_update(Ordering::Relaxed, Ordering::Relaxed, place);
        let base = before.unwrap_or_else(|next| next).next_multiple_of(size);
        self.write(slot, register, u32::try_from(base).map_err(|_| none)?);
        if mask & BAR_64 != 0 {
            self.write(slot, register + 4, 0);
        }
        let command = self.read(slot, COMMAND) & 0xffff;
        self.write(slot, COMMAND, command | ENABLED);
        Ok(self.machine.mmio(base))
    }

    /// [`enable`](Self::enable)s BAR 0 of a device that must be of that vendor and kind.
    ///
    /// # Errors
    ///
    /// As [`enable`](Self::enable), and [`PciError::Other`].
    pub fn enable_known(&self, slot: u8, expected: u32) -> Result<QtestMmio, PciError> {
        match self.id(slot)? {
            id if id == expected => self.enable(slot, 0),
            id => Err(PciError::Other { slot, id, expected }),
        }
    }
}

fn ecam_offset(slot: u8, offset: u16) -> u64 {
    u64::from(slot) << 15 | u64::from(offset)
}

fn pc_address(slot: u8, offset: u16) -> u32 {
    1 << 31 | u32::from(slot) << 11 | u32::from(offset & 0xfc)
}
