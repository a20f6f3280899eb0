//! Streams: what a requester ID reaches.

use alloc::sync::Arc;
use core::fmt;
use core::marker::PhantomData;

use dmaspan::Coherency;
use dmaspan::io_pgtable::{Format, TableMemory};
use dmaspan::iommu::{
    AllMemory, DomainOf, FaultHook, HardwareError, Incompatible, PagingDomain, Port,
    ReservedRegions,
};

use super::format::{self, Entry, VtdFormat};
use super::ops::VtdOps;
use super::spec::{Command, NO_DOMAIN, PASS_DOMAIN};
use super::tables::{Device, Has};
use super::{Mode, Vtd};
use crate::faults::Claimed;
use crate::host::Host;
use crate::mmio::Mmio;

/// The accesses of one requester ID. Made by [`Vtd::stream`]; dropped, others can claim the ID, and
/// it keeps what it has.
pub struct VtdStream<D, R: Mmio, H: Host> {
    iommu: Arc<Vtd<R, H>>,
    claimed: Arc<Claimed<H::Lock>>,
    device: Arc<Device<H::Structure, H::Lock>>,
    domains: PhantomData<fn(&D)>,
}

impl<D, R: Mmio, H: Host> VtdStream<D, R, H> {
    pub(super) fn new(
        iommu: Arc<Vtd<R, H>>,
        claimed: Arc<Claimed<H::Lock>>,
        device: Arc<Device<H::Structure, H::Lock>>,
    ) -> Self {
        Self { iommu, claimed, device, domains: PhantomData }
    }

    /// The requester ID: the bus in 15:8, device and function in 7:0.
    pub fn id(&self) -> u32 {
        self.claimed.id
    }
}

#[expect(unsafe_code, reason = "the promises of a driver")]
// SAFETY: 1. `Vtd::block` makes the entry absent, makes hardware forget it and what was cached
// through it, with all accesses completed, and returns when it has.
// 2. `Vtd::switch` does the same for what the stream had.
// 3. Hooks store an entry whole or none. One that fails may leave hardware with the entry that it
// had cached; the next one then begins by making it forget everything.
// 4. The invalidations of `VtdOps` name the domain's number, which is in the entry.
unsafe impl<D, R, H> Port for VtdStream<D, R, H>
where
    R: Mmio,
    H: Host,
    D: PagingDomain<Ops = VtdOps<R, H>>,
    D::Format: VtdFormat,
{
    type Paging = D;
    type Lock = H::Lock;

    fn reserved_regions(&self) -> &ReservedRegions {
        &self.claimed.regions
    }

    fn faults(&self) -> &FaultHook<H::Lock> {
        &self.claimed.faults
    }

    fn accepts(&self, domain: &DomainOf<D>) -> Result<(), Incompatible> {
        let refuse = |what| Err(Incompatible { what });
        let (iommu, ops) = (&*self.iommu, domain.ops());
        if !Arc::ptr_eq(&self.iommu, &ops.iommu) {
            return refuse("it is another IOMMU's");
        }
        if ops.stage != <D::Format as format::sealed::Walked>::STAGE {
            return refuse("its hooks are for the other stage");
        }
        if domain.format().geometry().output_bits > iommu.config.host_address_bits {
            return refuse("its physical addresses are wider than the IOMMU's");
        }
        let seen = iommu.walks() == Coherency::Coherent;
        if domain.memory().coherency() == Coherency::Coherent && !seen {
            return refuse("the IOMMU does not see its tables in the CPU's caches");
        }
        format::sealed::Walked::fits(domain.format(), &iommu.features, iommu.mode)
    }

    fn passes(&self) -> bool {
        self.iommu.features.pass_through()
    }

    fn block(&self) -> Result<(), HardwareError> {
        self.iommu.block(&self.device, &mut self.device.has.lock())
    }

    fn pass(&self, _promise: AllMemory) -> Result<(), HardwareError> {
        if !self.passes() {
            let what = "the IOMMU lets no accesses pass untranslated";
            return Err(HardwareError { what, status: self.iommu.features.extended });
        }
        let entry = format::pass(&self.iommu.features, self.iommu.mode);
        self.iommu.switch(&self.device, entry, PASS_DOMAIN)
    }

    fn translate(&self, domain: &DomainOf<D>) -> Result<(), HardwareError> {
        self.accepts(domain)?;
        let (iommu, root, ops) = (&*self.iommu, domain.root(), domain.ops());
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

impl<D, R: Mmio, H: Host> Drop for VtdStream<D, R, H> {
    fn drop(&mut self) {
        self.iommu.streams.release(self.claimed.id);
    }
}

impl<D, R: Mmio, H: Host> fmt::Debug for VtdStream<D, R, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VtdStream").field("id", &self.claimed.id).finish_non_exhaustive()
    }
}
