//! A stream is the accesses of one requester ID. It is attached to domains here.

use alloc::sync::Arc;

use dmaspan::Coherency;
use dmaspan::io_pgtable::{Format, TableMemory};
use dmaspan::iommu::{DomainOf, DriverOps, HardwareError, Incompatible, PagingDomain};

use super::format::{self, Entry, VtdFormat};
use super::ops::VtdOps;
use super::spec::{Command, NO_DOMAIN, PASS_DOMAIN};
use super::tables::{Device, Has};
use super::{Mode, Vtd};
use crate::host::Host;
use crate::mmio::Mmio;
use crate::stream::{IommuStream, PortHooks, StreamHooks, require};

/// The accesses of one requester ID: the bus in 15:8 of the number, device and function in 7:0.
/// Made by [`Vtd::stream`].
pub type VtdStream<D, R, H> = IommuStream<D, VtdStreamHooks<R, H>>;

/// Says what the driver knows of a stream.
#[expect(missing_debug_implementations, reason = "the stream has it, and nobody sees this")]
pub struct VtdStreamHooks<R: Mmio, H: Host> {
    pub(super) iommu: Arc<Vtd<R, H>>,
    pub(super) device: Arc<Device<H::Structure, H::Lock>>,
}

impl<R: Mmio, H: Host> StreamHooks for VtdStreamHooks<R, H> {
    const NAME: &'static str = "VtdStream";
    type Lock = H::Lock;

    fn release(&self, id: u32) {
        self.iommu.streams.release(id);
    }
}

#[expect(unsafe_code, reason = "the promises of a driver")]
// SAFETY: 1. `Vtd::block` makes the entry absent, makes hardware forget it and what was cached
// through it, with all accesses completed, and returns when it has.
// 2. `Vtd::switch` does the same for what the stream had.
// 3. Hooks store an entry whole or none. One that fails may leave hardware with the entry that it
// had cached; the next one then begins by making it forget everything.
// 4. The invalidations of `VtdOps` name the domain's number, which is in the entry.
unsafe impl<D, R, H> PortHooks<D> for VtdStreamHooks<R, H>
where
    R: Mmio,
    H: Host,
    D: PagingDomain<Ops: DriverOps<Driver = VtdOps<R, H>>>,
    D::Format: VtdFormat,
{
    fn accepts(&self, domain: &DomainOf<D>) -> Result<(), Incompatible> {
        let (iommu, ops) = (&*self.iommu, domain.ops().driver());
        let is_own = Arc::ptr_eq(&self.iommu, &ops.iommu);
        let stage = ops.stage == <D::Format as format::sealed::Walked>::STAGE;
        let bits = domain.format().geometry().output_bits <= iommu.config.host_address_bits;
        let seen = iommu.walks() == Coherency::Coherent
            || domain.memory().coherency() == Coherency::NonCoherent;
        require(&[
            (is_own, "it belongs to another IOMMU"),
            (stage, "its hooks and its tables are of different stages"),
            (bits, "its physical addresses have more bits than the IOMMU's"),
            (seen, "its tables are in the CPU's caches, which the IOMMU does not see"),
        ])?;
        format::sealed::Walked::fits(domain.format(), &iommu.features, iommu.mode)
    }

    fn passes(&self) -> bool {
        self.iommu.features.pass_through()
    }

    fn block(&self) -> Result<(), HardwareError> {
        self.iommu.block(&self.device, &mut self.device.has.lock())
    }

    fn pass(&self) -> Result<(), HardwareError> {
        if !self.iommu.features.pass_through() {
            let what = "the IOMMU lets no accesses pass untranslated";
            return Err(HardwareError { what, status: self.iommu.features.extended });
        }
        let entry = format::pass(&self.iommu.features, self.iommu.mode);
        self.iommu.switch(&self.device, entry, PASS_DOMAIN)
    }

    fn translate(&self, domain: &DomainOf<D>) -> Result<(), HardwareError> {
        let (iommu, root, ops) = (&*self.iommu, domain.root(), domain.ops().driver());
        let entry = format::sealed::Walked::entry(
            domain.format(),
            root,
            ops.domain,
            &iommu.features,
            iommu.mode,
        );
        ops.known();
        iommu.switch(&self.device, entry, ops.domain)
    }
}

impl<R: Mmio, H: Host> Vtd<R, H> {
    /// Makes hardware forget what a stream had, or everything where that is not known, and what it
    /// cached of absent entries.
    fn forget(
        &self,
        device: &Device<H::Structure, H::Lock>,
        had: Option<u16>,
        has: &mut Has,
    ) -> Result<(), HardwareError> {
        let confirmed = core::mem::replace(&mut has.confirmed, false);
        let domain = had.unwrap_or(NO_DOMAIN);
        // A write buffer is flushed by what invalidates (6.8).
        let result = match (confirmed, self.mode) {
            (false, mode) => self.run(everything(mode)),
            (true, Mode::Legacy) => self.run(&[
                Command::context(device.stream, domain),
                // Absent entries are tagged with that number (6.1).
                Command::context(device.stream, NO_DOMAIN),
                Command::domain(domain),
            ]),
            (true, Mode::Scalable) => self.run(&[
                Command::context(device.stream, NO_DOMAIN),
                Command::pasid(domain),
                Command::first_stage(domain),
                Command::domain(domain),
            ]),
        };
        has.confirmed = result.is_ok();
        result
    }

    /// Blocks a stream.
    pub(super) fn block(
        &self,
        device: &Device<H::Structure, H::Lock>,
        has: &mut Has,
    ) -> Result<(), HardwareError> {
        let had = has.domain;
        device.clear(has);
        self.forget(device, had, has)
    }

    /// Gives a stream the entry of a domain in the place of what it has.
    fn switch(
        &self,
        device: &Device<H::Structure, H::Lock>,
        entry: Entry,
        domain: u16,
    ) -> Result<(), HardwareError> {
        let mut has = device.has.lock();
        // Where hardware may use the other directory, too, that is not written either.
        if !has.confirmed || (self.mode == Mode::Legacy && has.domain.is_some()) {
            self.block(device, &mut has)?;
        }
        let had = has.domain;
        device.store(&mut has, entry, domain);
        self.forget(device, had, &mut has)
    }

    /// Blocks all streams that have a domain.
    pub(super) fn block_domain(&self, domain: u16) -> Result<(), HardwareError> {
        let mut from = Some(0);
        while let Some(device) = from.and_then(|from| self.tables.next_device(from)) {
            let mut has = device.has.lock();
            if has.domain == Some(domain) {
                self.block(&device, &mut has)?;
            } else if !has.confirmed {
                // It may have been this domain that hardware was to forget.
                let has_now = has.domain;
                self.forget(&device, has_now, &mut has)?;
            }
            from = device.stream.checked_add(1);
        }
        Ok(())
    }
}

/// The commands that make hardware forget everything.
pub(super) const fn everything(mode: Mode) -> &'static [Command] {
    match mode {
        Mode::Legacy => &[Command::CONTEXTS, Command::EVERYTHING],
        Mode::Scalable => &[Command::CONTEXTS, Command::PASIDS, Command::EVERYTHING],
    }
}
