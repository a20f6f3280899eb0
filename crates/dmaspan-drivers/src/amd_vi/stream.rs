//! A stream is the accesses of one device ID, and it is attached to domains here.

use alloc::sync::Arc;
use core::iter;
use core::sync::atomic::Ordering;

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::{AmdV1, Format as _};
use dmaspan::iommu::{DomainOf, DriverOps, HardwareError, Incompatible, PagingDomain};
use dmaspan::lg2;
use lock_api::Mutex;

use super::AmdVi;
use super::ops::AmdViOps;
use super::spec::{Command, device_entry};
use super::tables::{BLOCKED, PASSING};
use crate::host::Host;
use crate::mmio::Mmio;
use crate::stream::{IommuStream, PortHooks, StreamHooks, require};

/// The accesses of one device ID, which a PCI device puts its bus, device and function in.
pub type AmdViStream<D, R, H> = IommuStream<D, AmdViStreamHooks<R, H>>;

/// Says what the driver knows of a stream.
#[expect(missing_debug_implementations, reason = "the stream has it, and nobody sees this")]
pub struct AmdViStreamHooks<R: Mmio, H: Host> {
    pub(super) iommu: Arc<AmdVi<R, H>>,
    pub(super) device: u16,
    /// Held while the stream is switched: its entry is closed and opened by one thread at a time.
    pub(super) switching: Mutex<H::Lock, ()>,
}

impl<R: Mmio, H: Host> StreamHooks for AmdViStreamHooks<R, H> {
    const NAME: &'static str = "AmdViStream";
    type Lock = H::Lock;

    fn release(&self, id: u32) {
        self.iommu.streams.release(id);
    }
}

impl<D, R: Mmio, H: Host> AmdViStream<D, R, H> {
    /// The device ID.
    pub fn device_id(&self) -> u16 {
        self.hooks.device
    }

    /// Tells hardware what firmware says of the device: the DTE setting of its IVHD entry, which
    /// has the interrupts and system management messages that pass (48882, 5.2.2.1). None do at
    /// first.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where hardware was not seen to take it.
    pub fn set_firmware_setting(&self, setting: u8) -> Result<(), HardwareError> {
        let AmdViStreamHooks { iommu, device, .. } = &self.hooks;
        iommu.devices.lock().set_setting(*device, setting);
        iommu.run([Command::invalidate_device(*device)])
    }
}

impl<R: Mmio, H: Host> AmdViStreamHooks<R, H> {
    /// Gives the device an entry of `domain`; `word` is asked for under the lock of the table.
    fn switch(&self, domain: u16, word: impl FnOnce() -> u64) -> Result<(), HardwareError> {
        let _switching = self.switching.lock();
        let devices = &self.iommu.devices;
        let before = devices.domain(self.device);
        let stays = before == domain;
        if !stays && before != BLOCKED {
            devices.lock().set_translation(self.device, devices.closed());
            self.forget(Some(before))?;
        }
        devices.lock().open(self.device, domain, word());
        // What a closed entry permitted is not cached.
        self.forget(stays.then_some(domain))
    }

    /// Has hardware forget the entry, and all that is cached of a domain.
    fn forget(&self, domain: Option<u16>) -> Result<(), HardwareError> {
        let entry = Command::invalidate_device(self.device);
        self.iommu.run(iter::once(entry).chain(domain.map(Command::invalidate_domain)))
    }
}

#[expect(unsafe_code, reason = "the contract with an attachment")]
// SAFETY: 1. `block` closes the entry and has it and all of the domain that the table says
// invalidated. The COMPLETION_WAIT behind both is not done before the accesses that went through
// them are (2.4.1). A closed entry permits neither reads nor writes.
// 2. `switch` closes the old entry like that before another domain is stored; of an entry that
// stays in its domain, the one store is followed by the invalidation of both.
// 3. A step that fails leaves the entry closed, as it was or as it was to be, in the table, and
// hardware has an entry that was in the table. Only these hooks open an entry.
// 4. The domain is in the entry before its tables are, so what is cached through them is of that
// domain, and the hooks of the domain find the entry in the table.
unsafe impl<D, R, H> PortHooks<D> for AmdViStreamHooks<R, H>
where
    D: PagingDomain<Format = AmdV1, Ops: DriverOps<Driver = AmdViOps<R, H>>>,
    R: Mmio,
    H: Host,
{
    fn accepts(&self, domain: &DomainOf<D>) -> Result<(), Incompatible> {
        let features = &self.iommu.features;
        let geometry = domain.geometry();
        let nowhere = domain.format().registers(PhysAddr::new(0), 0);
        let encrypted = nowhere.dte & device_entry::ROOT;
        let is_own = Arc::ptr_eq(&self.iommu, &domain.ops().driver().iommu);
        let inputs = geometry.aperture.last().get() <= lg2::mask(features.input_bits);
        let outputs = geometry.output_bits <= features.output_bits;
        let marks = features.dirty || !domain.format().tracks_dirty();
        let encrypts = encrypted == self.iommu.encrypted;
        let levels = geometry.top_level < features.levels;
        require(&[
            (is_own, "it belongs to another IOMMU"),
            (levels, "its tree has more levels than the IOMMU walks"),
            (inputs, "its addresses have more bits than the IOMMU's"),
            (outputs, "its physical addresses have more bits than the IOMMU's"),
            (marks, "the IOMMU sets no dirty bits"),
            (encrypts, "its tables are not encrypted as the IOMMU's driver was told"),
        ])
    }

    fn block(&self) -> Result<(), HardwareError> {
        self.switch(BLOCKED, || self.iommu.devices.closed())
    }

    fn pass(&self) -> Result<(), HardwareError> {
        self.switch(PASSING, || device_entry::PASSING)
    }

    fn translate(&self, domain: &DomainOf<D>) -> Result<(), HardwareError> {
        let ops = domain.ops().driver();
        ops.known.store(true, Ordering::Release);
        self.switch(ops.domain, || {
            let (root, level) = domain.root_and_level();
            domain.format().registers(root, level).dte
        })
    }
}
