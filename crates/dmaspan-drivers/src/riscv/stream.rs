//! A stream is the accesses of one device ID. It is attached to domains here.

use alloc::sync::Arc;

use dmaspan::Coherency;
use dmaspan::io_pgtable::{DirtyTracking, Riscv, RiscvMemoryTypes, RiscvStage, TableMemory};
use dmaspan::iommu::{
    DomainOf, DriverOps, HardwareError, Incompatible, PagingDomain, ReservedRegions,
};
use lock_api::Mutex;

use super::RiscvIommu;
use super::context::{BLOCKED, Context, PASSING, StreamState};
use super::ops::{RiscvOps, Tag};
use super::spec::{Capabilities, TC_VALID, gscid_field, pscid_field};
use crate::Mmio;
use crate::error::Error;
use crate::host::Host;
use crate::stream::{IommuStream, PortHooks, StreamHooks, require};

/// The accesses of one device, which an [`Attachment`](dmaspan::iommu::Attachment) attaches.
///
/// A stream that is dropped with a domain keeps that domain's tables for ever.
pub type RiscvStream<D, R, H> = IommuStream<D, RiscvStreamHooks<R, H>>;

/// Says what the driver knows of a stream.
#[expect(missing_debug_implementations, reason = "the stream has it, and nobody sees this")]
pub struct RiscvStreamHooks<R: Mmio, H: Host> {
    iommu: Arc<RiscvIommu<R, H>>,
    id: u32,
    /// Hardware is waited for under it, as under that of the attachment.
    state: Mutex<H::Lock, StreamState>,
}

impl<R: Mmio, H: Host> StreamHooks for RiscvStreamHooks<R, H> {
    const NAME: &'static str = "RiscvStream";
    type Lock = H::Lock;

    fn release(&self, id: u32) {
        self.iommu.streams.release(id);
    }
}

impl<R: Mmio, H: Host> RiscvIommu<R, H> {
    /// The stream of a device ID, the caller's until it is dropped; for a PCI device the ID is its
    /// requester ID unless firmware says otherwise. Allocates the tables of the device directory
    /// that lead to it.
    ///
    /// # Errors
    ///
    /// [`Error::NoStream`] for a number that the directory has no place for, [`Error::Claimed`],
    /// [`Error::NoMemory`].
    pub fn stream<D>(
        self: &Arc<Self>,
        id: u32,
        regions: ReservedRegions,
    ) -> Result<RiscvStream<D, R, H>, Error>
    where
        D: PagingDomain<Format = Riscv, Ops: DriverOps<Driver = RiscvOps<R, H>>>,
    {
        let bits = self.features().device_id_bits;
        if id >> bits != 0 {
            return Err(Error::NoStream { stream: id, last: (1 << bits) - 1 });
        }
        let claimed = self.streams.claim(id, regions)?;
        let reached = self.directory.reach(&self.host, id, self.max_paddr());
        reached.inspect_err(|_| self.streams.release(id))?;
        let state = StreamState::new(self.directory.context(id));
        let (iommu, state) = (Arc::clone(self), Mutex::new(state));
        Ok(IommuStream::new(RiscvStreamHooks { iommu, id, state }, claimed))
    }
}

/// The context that translates by the tables of `domain`.
fn context<D, R: Mmio, H: Host>(domain: &DomainOf<D>) -> Context
where
    D: PagingDomain<Format = Riscv, Ops: DriverOps<Driver = RiscvOps<R, H>>>,
{
    let registers = domain.format().registers(domain.root());
    let tc = TC_VALID | registers.tc;
    match domain.ops().driver().space.tag {
        Tag::First(pscid) => [tc, 0, pscid_field(pscid), registers.atp],
        Tag::Second(gscid) => [tc, registers.atp | gscid_field(gscid), 0, 0],
    }
}

#[expect(unsafe_code, reason = "the promise of a port")]
// SAFETY: 1. and 2. `switch` returns `Ok` when memory has the context asked for, and hardware has
// forgotten the one before with all that it translated through it, behind a fence that waits for
// the accesses processed before; a stream that was blocked had neither. A context is valid only
// where it is that of a domain that was checked, or lets all pass. 3. `switch` stores a word of the
// new context only where hardware sees it alone change, or where the context is not valid, so where
// it fails in between hardware has the old context, the new one, or none. Nothing else stores
// contexts: the stream is claimed once, and its hooks take turns under its lock. 4. The context has
// the PSCID or GSCID that the domain's hooks name, and the domain's address space counts the stream
// from before the context is stored.
unsafe impl<D, R, H> PortHooks<D> for RiscvStreamHooks<R, H>
where
    D: PagingDomain<Format = Riscv, Ops: DriverOps<Driver = RiscvOps<R, H>>>,
    R: Mmio,
    H: Host,
{
    fn accepts(&self, domain: &DomainOf<D>) -> Result<(), Incompatible> {
        let (ops, config) = (domain.ops().driver(), domain.format().config());
        let features = self.iommu.features();
        let is_own = Arc::ptr_eq(&ops.iommu, &self.iommu);
        let stage = matches!(
            (config.stage, ops.space.tag),
            (RiscvStage::First(_), Tag::First(_)) | (RiscvStage::Second, Tag::Second(_))
        );
        let walks = features.walks(config.stage, config.mode);
        let fits = config.output_bits <= features.output_bits;
        let types = config.memory_types == RiscvMemoryTypes::Platform
            || features.capabilities.contains(Capabilities::SVPBMT);
        let dirty = config.dirty == DirtyTracking::Off
            || features.capabilities.contains(Capabilities::AMO_HWAD);
        let seen = self.iommu.walks == Coherency::Coherent
            || domain.memory().coherency() == Coherency::NonCoherent;
        require(&[
            (is_own, "it belongs to another IOMMU"),
            (stage, "its hooks and its tables are of different stages"),
            (walks, "the IOMMU does not walk tables of its mode"),
            (fits, "its addresses have more bits than the IOMMU's"),
            (types, "the IOMMU has no Svpbmt"),
            (dirty, "the IOMMU sets no dirty bits"),
            (seen, "its tables are in the CPU's caches, which the IOMMU does not see"),
        ])
    }

    fn block(&self) -> Result<(), HardwareError> {
        self.iommu.switch(self.id, &mut self.state.lock(), &BLOCKED, None)
    }

    fn pass(&self) -> Result<(), HardwareError> {
        self.iommu.switch(self.id, &mut self.state.lock(), &PASSING, None)
    }

    fn translate(&self, domain: &DomainOf<D>) -> Result<(), HardwareError> {
        let (context, space) = (context::<D, R, H>(domain), &domain.ops().driver().space);
        self.iommu.switch(self.id, &mut self.state.lock(), &context, Some(space))
    }
}
