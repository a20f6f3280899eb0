//! The hooks of a domain: they make the commands that tell the SMMU what to forget.

use alloc::sync::Arc;
use core::fmt;
use core::iter;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use dmaspan::iommu::{DriverOps, Gather, HardwareError, Invalidation, IommuOps, Scope};
use dmaspan::{IovaRange, PhysAddr};

use super::Stage;
use super::command::{Command, Tag};
use super::features::StallModel;
use super::spec::{cd, ste};
use super::ste::Entry;
use super::tlbi::Forget;
use super::{OnFault, SmmuV3};
use crate::error::Error;
use crate::host::Host;
use crate::mmio::Mmio;
use crate::structure::Words;

/// Whether hardware may know the domain's ASID or VMID, and its context descriptor.
mod known {
    /// No stream ever had it.
    pub(super) const NEVER: u8 = 0;
    pub(super) const MAYBE: u8 = 1;
    /// All streams have let go, and nothing of it is cached.
    pub(super) const FORGOTTEN: u8 = 2;
}

/// The hooks through which a domain tells an SMMUv3 what changed: see
/// [`SmmuV3::ops`](super::SmmuV3::ops).
///
/// It has an ASID or a VMID and, for stage 1, a context descriptor. Dropped before hardware has
/// forgotten them, they are never used again.
pub struct SmmuV3Ops<R: Mmio, H: Host> {
    pub(super) smmu: Arc<SmmuV3<R, H>>,
    pub(super) tag: Tag,
    /// For stage 1.
    descriptor: Option<Words<H::Structure>>,
    on_fault: OnFault,
    /// log2 of the granule; 0 while no stream had the domain.
    granule_lg2: AtomicU32,
    known: AtomicU8,
}

impl<R: Mmio, H: Host> SmmuV3Ops<R, H> {
    pub(super) fn new(
        smmu: Arc<SmmuV3<R, H>>,
        stage: Stage,
        on_fault: OnFault,
    ) -> Result<Self, Error> {
        smmu.features.check_stage(stage)?;
        let on_fault = match (smmu.features.stalls, on_fault) {
            (StallModel::Forced, _) => OnFault::Stall,
            (StallModel::Terminate, OnFault::Stall) => {
                return Err(Error::unsupported("stalled accesses", 0u32));
            }
            (_, on_fault) => on_fault,
        };
        let (tag, descriptor) = match stage {
            Stage::First => {
                let descriptor = Words::new(&smmu.hardware.host, cd::LG2_SIZE, smmu.max_paddr())?;
                match smmu.asids.take() {
                    Some(asid) => (Tag::Asid(number(asid)), Some(descriptor)),
                    None => {
                        descriptor.free();
                        let limit = (1 << smmu.features.asid_bits) - 1;
                        return Err(Error::NoIds { what: "ASIDs", limit });
                    }
                }
            }
            Stage::Second => match smmu.vmids.take() {
                Some(vmid) => (Tag::Vmid(number(vmid)), None),
                None => {
                    let limit = (1 << smmu.features.vmid_bits) - 1;
                    return Err(Error::NoIds { what: "VMIDs", limit });
                }
            },
        };
        let (granule_lg2, known) = (AtomicU32::new(0), AtomicU8::new(known::NEVER));
        Ok(Self { smmu, tag, descriptor, on_fault, granule_lg2, known })
    }

    /// Returns which stage the domain is.
    pub fn stage(&self) -> Stage {
        match self.tag {
            Tag::Asid(_) => Stage::First,
            Tag::Vmid(_) => Stage::Second,
        }
    }

    /// The entry of a stream that is about to have the domain, with what `words` say of its tables.
    ///
    /// All calls for one domain have the same words, so that it does not matter which of several at
    /// once stores the descriptor first.
    pub(super) fn entry(&self, granule_lg2: u32, words: [u64; 4]) -> Entry {
        // Before hardware can cache anything.
        self.granule_lg2.store(granule_lg2, Ordering::SeqCst);
        self.known.store(known::MAYBE, Ordering::SeqCst);
        match (self.tag, &self.descriptor) {
            (Tag::Asid(asid), Some(descriptor)) => {
                let [first, rest @ ..] = words;
                let stall = if self.on_fault == OnFault::Stall { cd::S } else { 0 };
                let first = first | stall | u64::from(asid) << cd::ASID_SHIFT;
                rest.iter().zip(1..).for_each(|(&word, index)| descriptor.set(index, word));
                descriptor.set(0, first);
                let read = match self.smmu.features.coherency {
                    dmaspan::Coherency::Coherent => ste::CD_CACHED,
                    dmaspan::Coherency::NonCoherent => ste::CD_NON_CACHEABLE,
                };
                let place = ste::VALID | ste::STAGE_1 | descriptor.paddr().get();
                [place, ste::SHCFG_INCOMING | read, 0, 0]
            }
            (Tag::Vmid(vmid), _) => {
                let stall = if self.on_fault == OnFault::Stall { ste::S2S } else { 0 };
                let [first, second, third, fourth] = words;
                [first, second, third | stall | u64::from(vmid), fourth]
            }
            // `new` makes no such hooks.
            (Tag::Asid(_), None) => super::ste::BLOCKED,
        }
    }

    /// Makes hardware forget all of the domain.
    fn forget_all(&self) -> Result<(), HardwareError> {
        self.smmu.run(iter::once(Command::domain(self.tag)))
    }
}

// SAFETY:
// 1. `invalidate`: TLB entries and cached walks carry the ASID or the VMID of the domain (IHI 0070,
//    3.17), which nobody else has while the hooks live: `Ids` gives a number to one owner, and
//    `drop` gives it back only if hardware knows nothing of it. The commands cover each range of
//    the scope whole: `Forget` counts granules, or leaves of the smallest size that was taken away,
//    from the one that has the first address to the one that has the last; walks are left out only
//    where all tables are in place. `run` returns `Ok` after a CMD_SYNC behind them was consumed
//    and no error was seen since they were placed; then the invalidation is complete, and so are
//    accesses that used what was forgotten (4.7.3, 3.21.1). The write of CMDQ_PROD orders the
//    stores to the tables before (`Mmio`). No device asks for translations to keep itself: EATS is
//    0, and translated accesses are checked (ATSCHK).
// 2. `detach` goes through all streams that may have the domain, which `Slot::tags` says from
//    before an entry leads to it until hardware has confirmed another, gives each the entry of a
//    blocked one, and makes hardware forget entry, descriptor and translations.
// 3. The root does not change: no format of `SmmuV3Format` grows.
#[expect(unsafe_code, reason = "the promise of a driver")]
unsafe impl<R: Mmio, H: Host> IommuOps for SmmuV3Ops<R, H> {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let granule_lg2 = self.granule_lg2.load(Ordering::SeqCst);
        let ranges = match what.scope {
            Scope::Ranges(ranges) if granule_lg2 != 0 && !ranges.is_empty() => ranges,
            _ => return self.forget_all(),
        };
        let forget = Forget::new(self.tag, granule_lg2, what, &self.smmu.features);
        let commands = ranges.iter().flat_map(|&range| forget.range(range));
        match commands.clone().nth(self.smmu.most_commands) {
            Some(_) => self.forget_all(),
            None => self.smmu.run(commands),
        }
    }

    /// Nothing that is absent is cached (IHI 0070, 3.21.1), but the stores have to be seen before a
    /// device is told to go (Linux: `wmb` in drivers/iommu/io-pgtable-arm.c).
    fn sync_map(&self, _range: IovaRange) -> Result<(), HardwareError> {
        self.smmu.hardware.registers.order_stores();
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        if self.known.load(Ordering::SeqCst) == known::NEVER {
            return Ok(());
        }
        self.known.store(known::MAYBE, Ordering::SeqCst);
        self.smmu.block_all(self.tag)?;
        self.forget_all()?;
        self.known.store(known::FORGOTTEN, Ordering::SeqCst);
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        Gather::<()>::MAX_RANGES
    }
}

#[expect(unsafe_code, reason = "the promise of a driver")]
// SAFETY: they are the driver's.
unsafe impl<R: Mmio, H: Host> DriverOps for SmmuV3Ops<R, H> {
    type Driver = Self;

    fn driver(&self) -> &Self {
        self
    }
}

impl<R: Mmio, H: Host> Drop for SmmuV3Ops<R, H> {
    fn drop(&mut self) {
        if *self.known.get_mut() == known::MAYBE {
            return;
        }
        if let Some(descriptor) = self.descriptor.take() {
            descriptor.free();
        }
        match self.tag {
            Tag::Asid(asid) => self.smmu.asids.give(asid.into()),
            Tag::Vmid(vmid) => self.smmu.vmids.give(vmid.into()),
        }
    }
}

impl<R: Mmio, H: Host> fmt::Debug for SmmuV3Ops<R, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SmmuV3Ops")
            .field("tag", &self.tag)
            .field("on_fault", &self.on_fault)
            .finish_non_exhaustive()
    }
}

/// A number of at most 16 bits, which is what there are.
fn number(id: u32) -> u16 {
    u16::try_from(id).unwrap_or(u16::MAX)
}
