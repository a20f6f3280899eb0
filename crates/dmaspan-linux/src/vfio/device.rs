//! A [`VfioDevice`] is an open device: its registers, configuration space, interrupts and resets.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dmaspan::Errno;
use parking_lot::Mutex;

use super::bar::Bar;
use super::config::{self, ConfigSpace};
use super::device_error::DeviceError;
use super::error::OpenError;
use super::hwpt::Binding;
use super::irq::{self, Msix};
use crate::log;
use crate::pci::Bdf;
use crate::sys::uapi::vfio as uapi;
use crate::sys::vfio::DeviceFd;

/// Says whether a device may access memory at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BusMaster {
    /// It may.
    On,
    /// It may not: what it asks for fails.
    Off,
}

/// An open device: a PCI function that belongs to this process.
///
/// It may not access memory until [`set_bus_master`](Self::set_bus_master) lets it, and not any
/// more after this is dropped. The kernel closes it, and resets it where it can, when its [`Bar`]s,
/// mappings of them and its [`Msix`] are gone too.
///
/// # Context
///
/// Any number of threads use it at once.
#[derive(Debug)]
pub struct VfioDevice {
    shared: Arc<Shared>,
    can_reset: bool,
    /// Where iommufd opened it.
    binding: Option<Binding>,
}

/// What a device's parts keep open.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) bdf: Bdf,
    pub(super) fd: DeviceFd,
    /// Where the configuration space is in the file.
    pub(super) config: Range<u64>,
    /// Whether MSI-X interrupts are on.
    pub(super) msix: AtomicBool,
    /// Held while the command register is read, changed and written.
    command: Mutex<()>,
}

/// Bits of the command register (PCI Local Bus 3.0, section 6.2.2).
const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;

impl Shared {
    /// The error of a request of the device that failed.
    pub(super) fn failed(&self, request: &'static str) -> impl Fn(Errno) -> DeviceError + use<> {
        let bdf = self.bdf;
        move |errno| DeviceError::System { request, bdf, errno }
    }

    /// The device whose configuration space is there in the file.
    fn new(bdf: Bdf, fd: DeviceFd, config: Range<u64>) -> Self {
        Self { bdf, fd, config, msix: AtomicBool::new(false), command: Mutex::new(()) }
    }

    /// Sets the command register's bit for DMA, and the one that lets BARs answer, after `before`
    /// was done. Nobody else changes the register meanwhile.
    fn set_command_after(
        &self,
        before: impl FnOnce() -> Result<(), DeviceError>,
        bus_master: BusMaster,
    ) -> Result<(), DeviceError> {
        let _turn = self.command.lock();
        before()?;
        let mut bytes = [0; 2];
        self.read_config(config::COMMAND, &mut bytes)?;
        let command = u16::from_le_bytes(bytes) | MEMORY_SPACE;
        let command = match bus_master {
            BusMaster::On => command | BUS_MASTER,
            BusMaster::Off => command & !BUS_MASTER,
        };
        self.write_config(config::COMMAND, &command.to_le_bytes())
    }

    /// The same, without anything before.
    fn set_command(&self, bus_master: BusMaster) -> Result<(), DeviceError> {
        self.set_command_after(|| Ok(()), bus_master)
    }
}

impl VfioDevice {
    pub(super) fn new(bdf: Bdf, fd: DeviceFd) -> Result<Self, OpenError> {
        let failed = |request| move |errno| OpenError::System { request, bdf, errno };
        let info = fd.info().map_err(failed("VFIO_DEVICE_GET_INFO"))?;
        if info.flags & uapi::DEVICE_IS_PCI == 0 {
            return Err(OpenError::Unsupported {
                what: "the device is not a PCI function",
                advice: "open a function that vfio-pci has",
            });
        }
        let config = fd.region(uapi::PCI_CONFIG_REGION);
        let config = config.map_err(failed("VFIO_DEVICE_GET_REGION_INFO"))?.info;
        let config = config.offset..config.offset.saturating_add(config.size);
        let shared = Shared::new(bdf, fd, config);
        let can_reset = info.flags & uapi::DEVICE_HAS_RESET != 0;
        // BARs answer from here on, until the device is closed.
        let command = shared.set_command(BusMaster::Off);
        let command = command.map_err(|error| error.errno());
        command.map_err(failed("a write of the command register"))?;
        Ok(Self { shared: Arc::new(shared), can_reset, binding: None })
    }

    /// The same, opened by iommufd.
    pub(super) fn bound(mut self, binding: Binding) -> Self {
        self.binding = Some(binding);
        self
    }

    /// What iommufd knows it by, where that opened it.
    pub(super) fn binding(&self) -> Option<&Binding> {
        self.binding.as_ref()
    }

    /// The same once more, which no address space takes.
    pub(super) fn again(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), can_reset: self.can_reset, binding: None }
    }

    /// The requests of VFIO.
    pub(super) fn fd(&self) -> &DeviceFd {
        &self.shared.fd
    }

    /// Its address.
    pub fn bdf(&self) -> Bdf {
        self.shared.bdf
    }

    /// Lets the device access memory, or forbids it. It may not after it was opened or reset.
    /// Interrupts are accesses too.
    ///
    /// # Errors
    ///
    /// [`DeviceError::System`], where the device is gone.
    pub fn set_bus_master(&self, bus_master: BusMaster) -> Result<(), DeviceError> {
        self.shared.set_command(bus_master)
    }

    /// Resets the device, which may not access memory then. BARs stay mapped and interrupts on.
    /// What maps the device's registers for others in an [`Ioas`](super::Ioas) reaches nothing any
    /// more, until it is mapped anew.
    ///
    /// # Errors
    ///
    /// [`DeviceError::NoReset`] where the device cannot be reset alone.
    pub fn reset(&self) -> Result<(), DeviceError> {
        if !self.can_reset {
            return Err(DeviceError::NoReset { bdf: self.bdf() });
        }
        let reset = || self.shared.fd.reset().map_err(self.shared.failed("VFIO_DEVICE_RESET"));
        // The kernel restores the register as it was.
        self.shared.set_command_after(reset, BusMaster::Off)
    }

    /// Its configuration space.
    pub fn config(&self) -> ConfigSpace<'_> {
        ConfigSpace::new(&self.shared)
    }

    /// Returns how many MSI-X interrupts it has; 0 where it has none.
    ///
    /// # Errors
    ///
    /// [`DeviceError::System`], where the device is gone.
    pub fn msix_vectors(&self) -> Result<u32, DeviceError> {
        irq::vectors(&self.shared)
    }

    /// Switches MSI-X vectors 0 to `count - 1` on, until what is returned is dropped.
    ///
    /// # Errors
    ///
    /// [`DeviceError`]: where there are not so many, or they are on already.
    pub fn enable_msix(&self, count: u32) -> Result<Msix, DeviceError> {
        Msix::enable(&self.shared, count)
    }

    /// Maps the registers of BAR `index`, 0 to 5.
    ///
    /// # Errors
    ///
    /// [`DeviceError`]: where there is no such BAR, it is of I/O ports, or the kernel does not let
    /// it be mapped.
    pub fn bar(&self, index: u32) -> Result<Bar, DeviceError> {
        Bar::map(&self.shared, index)
    }
}

impl Drop for VfioDevice {
    fn drop(&mut self) {
        // A device that is gone accesses nothing.
        let _ = self.set_bus_master(BusMaster::Off);
        log::info!("{} is closed and reaches nothing any more", self.bdf());
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::Ordering;
    use std::thread;

    use super::*;

    /// A device whose configuration space is a file of zeros that no path leads to.
    fn device() -> Shared {
        let name = format!("dmaspan-config-{}-{:?}", std::process::id(), thread::current().id());
        let path = std::env::temp_dir().join(name);
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(256).unwrap();
        Shared::new("0000:00:01.0".parse().unwrap(), DeviceFd::new(file), 0..256)
    }

    fn command(device: &Shared) -> u16 {
        let mut bytes = [0; 2];
        device.fd.file().read_exact_at(&mut bytes, config::COMMAND).unwrap();
        u16::from_le_bytes(bytes)
    }

    #[test]
    fn the_command_register_is_read_changed_and_written_by_one_thread_at_a_time() {
        let (device, begun) = (device(), AtomicBool::new(false));
        thread::scope(|scope| {
            let turn = device.command.lock();
            let other = scope.spawn(|| {
                begun.store(true, Ordering::Release);
                device.set_command(BusMaster::On)
            });
            while !begun.load(Ordering::Acquire) {
                thread::yield_now();
            }
            for _ in 0..10_000 {
                thread::yield_now();
                assert_eq!(command(&device), 0);
            }
            // A bit that is set meanwhile is not lost.
            device.write_config(config::COMMAND, &[0x40, 0]).unwrap();
            drop(turn);
            other.join().unwrap().unwrap();
        });
        assert_eq!(command(&device), 0x40 | MEMORY_SPACE | BUS_MASTER);
        device.set_command(BusMaster::Off).unwrap();
        assert_eq!(command(&device), 0x40 | MEMORY_SPACE);
    }
}
