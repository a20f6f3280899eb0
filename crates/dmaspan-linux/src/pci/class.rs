//! A [`Class`] is the kind of a function.

use std::fmt;

/// The class code of a function: base class, sub-class and programming interface.
///
/// Displayed as the PCI Code and ID Assignment Specification calls it, in short: the name of the
/// sub-class where it has one, else that of the base class.
///
/// ```
/// use dmaspan_linux::pci::Class;
///
/// let class = Class::from_raw(0x01_08_02);
/// assert_eq!((class.base(), class.sub(), class.interface()), (1, 8, 2));
/// assert_eq!(class.to_string(), "NVMe controller");
/// assert_eq!(Class::from_raw(0x01_99_00).to_string(), "mass storage controller");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Class(u32);

/// The base class of bridges: host, ISA, PCI and others.
const BRIDGE: u8 = 0x06;

impl Class {
    /// The class code of 24 bits, as `class` in sysfs has it. Higher bits are ignored.
    pub const fn from_raw(raw: u32) -> Self {
        Self(raw & 0xff_ffff)
    }

    /// All 24 bits.
    pub const fn raw(self) -> u32 {
        self.0
    }

    /// The base class.
    pub const fn base(self) -> u8 {
        self.0.to_be_bytes()[1]
    }

    /// The sub-class.
    pub const fn sub(self) -> u8 {
        self.0.to_be_bytes()[2]
    }

    /// The programming interface.
    pub const fn interface(self) -> u8 {
        self.0.to_be_bytes()[3]
    }

    /// Returns whether it is a bridge of some kind: to the host, to ISA, to another PCI bus.
    pub const fn is_bridge(self) -> bool {
        self.base() == BRIDGE
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        let (base, sub) = (self.base(), self.sub());
        let of_sub = SUB_CLASSES.iter().find(|(b, s, _)| (*b, *s) == (base, sub));
        let of_base = || BASE_CLASSES.iter().find(|(b, _)| *b == base).map(|(_, name)| *name);
        of_sub.map(|(_, _, name)| *name).or_else(of_base).unwrap_or("unknown class")
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Base classes (PCI Code and ID Assignment Specification, section 1).
const BASE_CLASSES: [(u8, &str); 22] = [
    (0x00, "device older than class codes"),
    (0x01, "mass storage controller"),
    (0x02, "network controller"),
    (0x03, "display controller"),
    (0x04, "multimedia device"),
    (0x05, "memory controller"),
    (0x06, "bridge"),
    (0x07, "communication controller"),
    (0x08, "system peripheral"),
    (0x09, "input device"),
    (0x0a, "docking station"),
    (0x0b, "processor"),
    (0x0c, "serial bus controller"),
    (0x0d, "wireless controller"),
    (0x0e, "intelligent I/O controller"),
    (0x0f, "satellite controller"),
    (0x10, "encryption controller"),
    (0x11, "signal processing controller"),
    (0x12, "processing accelerator"),
    (0x13, "instrumentation"),
    (0x40, "co-processor"),
    (0xff, "unclassified device"),
];

/// Sub-classes (the same, sections 1.1 to 1.20): those that machines of today have.
const SUB_CLASSES: [(u8, u8, &str); 59] = [
    (0x00, 0x01, "VGA device"),
    (0x01, 0x00, "SCSI controller"),
    (0x01, 0x01, "IDE controller"),
    (0x01, 0x04, "RAID controller"),
    (0x01, 0x05, "ATA controller"),
    (0x01, 0x06, "SATA controller"),
    (0x01, 0x07, "SAS controller"),
    (0x01, 0x08, "NVMe controller"),
    (0x01, 0x09, "UFS controller"),
    (0x02, 0x00, "Ethernet controller"),
    (0x02, 0x07, "InfiniBand controller"),
    (0x02, 0x08, "fabric controller"),
    (0x03, 0x00, "VGA controller"),
    (0x03, 0x02, "3D controller"),
    (0x04, 0x00, "video device"),
    (0x04, 0x01, "audio device"),
    (0x04, 0x03, "HD audio device"),
    (0x05, 0x00, "RAM"),
    (0x05, 0x01, "flash memory"),
    (0x05, 0x02, "CXL memory"),
    (0x06, 0x00, "host bridge"),
    (0x06, 0x01, "ISA bridge"),
    (0x06, 0x04, "PCI bridge"),
    (0x06, 0x07, "CardBus bridge"),
    (0x06, 0x09, "PCI bridge"),
    (0x06, 0x0a, "InfiniBand bridge"),
    (0x07, 0x00, "serial controller"),
    (0x07, 0x01, "parallel port"),
    (0x07, 0x02, "multiport serial"),
    (0x07, 0x03, "modem"),
    (0x07, 0x04, "GPIB controller"),
    (0x08, 0x00, "interrupt controller"),
    (0x08, 0x01, "DMA controller"),
    (0x08, 0x02, "timer"),
    (0x08, 0x03, "real-time clock"),
    (0x08, 0x04, "hot-plug controller"),
    (0x08, 0x05, "SD host controller"),
    (0x08, 0x06, "IOMMU"),
    (0x08, 0x07, "root complex events"),
    (0x09, 0x00, "keyboard"),
    (0x09, 0x02, "mouse"),
    (0x0b, 0x40, "co-processor"),
    (0x0c, 0x00, "FireWire controller"),
    (0x0c, 0x03, "USB controller"),
    (0x0c, 0x04, "Fibre Channel"),
    (0x0c, 0x05, "SMBus controller"),
    (0x0c, 0x06, "InfiniBand (old code)"),
    (0x0c, 0x07, "IPMI interface"),
    (0x0c, 0x09, "CAN controller"),
    (0x0c, 0x0a, "I3C controller"),
    (0x0d, 0x10, "RF controller"),
    (0x0d, 0x11, "Bluetooth controller"),
    (0x0d, 0x20, "Wi-Fi controller"),
    (0x0d, 0x21, "Wi-Fi controller"),
    (0x10, 0x00, "network encryption"),
    (0x11, 0x00, "DPIO module"),
    (0x11, 0x01, "performance counters"),
    (0x11, 0x20, "signal management"),
    (0x12, 0x00, "processing accelerator"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_has_one_name_and_it_fits_a_column() {
        for (at, (base, sub, name)) in SUB_CLASSES.iter().enumerate() {
            let twice = SUB_CLASSES[at + 1..].iter().any(|(b, s, _)| (b, s) == (base, sub));
            assert!(!twice && name.len() <= 24, "{base:02x}{sub:02x} {name}");
            assert!(BASE_CLASSES.iter().any(|(b, _)| b == base), "{base:02x}");
        }
    }

    #[test]
    fn a_class_without_a_name_has_that_of_its_base() {
        for (raw, name) in [
            (0x02_00_00, "Ethernet controller"),
            (0x02_80_00, "network controller"),
            (0xff_00_00, "unclassified device"),
            (0x55_00_00, "unknown class"),
        ] {
            assert_eq!(Class::from_raw(raw).to_string(), name);
        }
        assert!(Class::from_raw(0x06_01_00).is_bridge());
        assert!(!Class::from_raw(0x01_08_02).is_bridge());
    }
}
