//! A stream is attached to domains here, by its entry in the stream table.

use alloc::sync::Arc;

use dmaspan::Coherency;
use dmaspan::io_pgtable::{Format, TableMemory};
use dmaspan::iommu::{DomainOf, DriverOps, HardwareError, Incompatible, PagingDomain};

use super::SmmuV3;
use super::format::SmmuV3Format;
use super::format::sealed::SmmuV3Tables as _;
use super::ops::SmmuV3Ops;
use super::ste::{BLOCKED, PASSING};
use super::table::StreamSlot;
use crate::host::Host;
use crate::mmio::Mmio;
use crate::stream::{IommuStream, PortHooks, StreamHooks};

/// A stream of accesses that an SMMUv3 tells apart: see [`SmmuV3::stream`](super::SmmuV3::stream).
///
/// Domains of both stages are one type `D` only where their tables are one format.
pub type SmmuV3Stream<D, R, H> = IommuStream<D, SmmuV3StreamHooks<R, H>>;

/// Says what the driver knows of a stream.
#[expect(missing_debug_implementations, reason = "the stream has it, and nobody sees this")]
pub struct SmmuV3StreamHooks<R: Mmio, H: Host> {
    pub(super) smmu: Arc<SmmuV3<R, H>>,
    pub(super) slot: Arc<StreamSlot<H>>,
}

impl<R: Mmio, H: Host> StreamHooks for SmmuV3StreamHooks<R, H> {
    const NAME: &'static str = "SmmuV3Stream";
    type Lock = H::Lock;

    fn release(&self, id: u32) {
        self.smmu.streams.release(id);
    }
}

// SAFETY:
// 1. `block` gives the stream an entry that ends all accesses. `SmmuV3::switch` returns `Ok` after
//    hardware has confirmed that it forgot the entry before, with the descriptor found through it
//    (IHI 0070, 4.3.1), and the translations of the domain that the stream had; with the latter all
//    accesses that used them are complete (3.21.1). Stalled ones are ended.
// 2. `pass` and `translate` are the same with another entry. On the way hardware sees the old
//    entry, the new one or a blocked one (`ste::steps`).
// 3. The entry is written by `switch` alone, which is called by these hooks and by a domain that
//    goes, and blocks the stream then. What `switch` stores before it fails are those entries.
// 4. `switch` adds the domain to the slot's tags before it stores anything, and takes it out after
//    hardware confirmed another entry; `SmmuV3Ops` goes by them. Invalidations are by ASID or VMID
//    and concern all streams. A domain of another SMMU is refused.
#[expect(unsafe_code, reason = "the promise of a driver")]
unsafe impl<D, R: Mmio, H: Host> PortHooks<D> for SmmuV3StreamHooks<R, H>
where
    D: PagingDomain<Ops: DriverOps<Driver = SmmuV3Ops<R, H>>>,
    D::Format: SmmuV3Format,
{
    fn accepts(&self, domain: &DomainOf<D>) -> Result<(), Incompatible> {
        let features = &self.smmu.features;
        let what = if !Arc::ptr_eq(&self.smmu, &domain.ops().driver().smmu) {
            "it belongs to another SMMU"
        } else if domain.ops().driver().stage() != D::Format::STAGE {
            "its hooks and its tables are of different stages"
        } else if features.coherency == Coherency::NonCoherent
            && domain.memory().coherency() == Coherency::Coherent
        {
            "its tables are not written back to memory, where the SMMU looks"
        } else {
            return domain.format().check(features);
        };
        Err(Incompatible { what })
    }

    fn block(&self) -> Result<(), HardwareError> {
        self.smmu.switch(&self.slot, None, &BLOCKED)
    }

    fn pass(&self) -> Result<(), HardwareError> {
        self.smmu.switch(&self.slot, None, &PASSING)
    }

    fn translate(&self, domain: &DomainOf<D>) -> Result<(), HardwareError> {
        let words = domain.format().words(domain.root());
        let entry = domain.ops().driver().entry(D::Format::GRANULE_LG2, words);
        self.smmu.switch(&self.slot, Some(domain.ops().driver().tag), &entry)
    }
}
