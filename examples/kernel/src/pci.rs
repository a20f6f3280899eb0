//! PCI functions of the first bus, by the configuration space that firmware names.

use alloc::format;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;
use core::ptr::with_exposed_provenance_mut;

use dmaspan_drivers::Mmio as _;
use virtio_drivers::transport::pci::bus::{
    Cam, Command, DeviceFunction, DeviceFunctionInfo, MmioCam, PciRoot,
};

use crate::Result;
use crate::memory::registers;

pub(crate) struct Pci {
    pub(crate) root: PciRoot<MmioCam<'static>>,
    ecam: u64,
    /// Addresses for BARs that nobody has placed.
    window: Range<u64>,
}

/// A function, and where its BARs are; 0 for those that it does not have.
#[derive(Clone)]
pub(crate) struct Function {
    pub(crate) place: DeviceFunction,
    pub(crate) info: DeviceFunctionInfo,
    pub(crate) bars: [(u64, u64); 6],
}

impl Function {
    /// Its requester ID.
    pub(crate) fn id(&self) -> u16 {
        let DeviceFunction { bus, device, function } = self.place;
        u16::from(bus) << 8 | u16::from(device) << 3 | u16::from(function)
    }

    /// Vendor and device.
    pub(crate) fn is(&self, vendor: u16, device: u16) -> bool {
        (self.info.vendor_id, self.info.device_id) == (vendor, device)
    }

    /// Class, subclass and programming interface.
    pub(crate) fn class(&self) -> (u8, u8, u8) {
        (self.info.class, self.info.subclass, self.info.prog_if)
    }
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:04x}:{:04x}", self.place, self.info.vendor_id, self.info.device_id)
    }
}

impl Pci {
    /// The bus whose configuration space begins at `ecam`, and addresses for its devices.
    pub(crate) fn new(ecam: u64, window: Range<u64>) -> Self {
        let start = with_exposed_provenance_mut(ecam as usize);
        // SAFETY: firmware names the configuration space, which is mapped as registers for ever and
        // used by this value alone.
        let cam = unsafe { MmioCam::new(start, Cam::Ecam) };
        Self { root: PciRoot::new(cam), ecam, window }
    }

    /// All functions, with their registers in place and their DMA off.
    pub(crate) fn functions(&mut self) -> Result<Vec<Function>> {
        let found: Vec<_> = self.root.enumerate_bus(0).collect();
        let place = |(place, info)| {
            let bars = self.place(place)?;
            let command = self.root.get_status_command(place).1 - Command::BUS_MASTER;
            self.root.set_command(place, command | Command::MEMORY_SPACE);
            Ok(Function { place, info, bars })
        };
        found.into_iter().map(place).collect()
    }

    /// Places the BARs that nobody has placed.
    fn place(&mut self, function: DeviceFunction) -> Result<[(u64, u64); 6]> {
        let mut places = [(0, 0); 6];
        for (index, bar) in (0..).zip(self.root.bars(function)?) {
            let Some(bar) = bar else { continue };
            let Some((mut at, size)) = bar.memory_address_size() else { continue };
            if at == 0 {
                at = self.window.start.next_multiple_of(size.max(0x1000));
                self.window.start = at + size;
                if self.window.start > self.window.end {
                    return Err(format!("{function}: there are no addresses for its BARs").into());
                }
                if bar.takes_two_entries() {
                    self.root.set_bar_64(function, index, at);
                } else {
                    self.root.set_bar_32(function, index, at as u32);
                }
            }
            places[usize::from(index)] = (at, size);
        }
        Ok(places)
    }

    /// The first word of a capability, and the word at an offset in it.
    pub(crate) fn capability(&self, of: &Function, id: u8, offset: u8) -> Option<(u32, u32)> {
        let mut all = self.root.capabilities(of.place);
        let at = all.find(|capability| capability.id == id)?.offset;
        let space = registers(self.ecam + (u64::from(of.id()) << 12), 0x1000);
        Some((space.read32(at.into()), space.read32(u64::from(at) + u64::from(offset))))
    }

    /// Lets a device at memory: an IOMMU says at which.
    pub(crate) fn allow_dma(&mut self, function: &Function) {
        let command = self.root.get_status_command(function.place).1;
        self.root.set_command(function.place, command | Command::BUS_MASTER);
    }
}
