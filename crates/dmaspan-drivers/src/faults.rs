//! Every driver keeps here which streams are claimed, and reports their faults.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;

use core::ops::RangeInclusive;

use dmaspan::iommu::{
    FaultHook, FaultReport, FaultResponse, RegionKind, ReservedRegion, ReservedRegions,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot};
use lock_api::{Mutex, RawMutex};

use crate::error::Error;
use crate::host::NoMemory;
use crate::log;

/// Where writes of devices of a PC are interrupts, whatever tables say (VT-d, 3.14; AMD 48882,
/// 2.1.4.2).
pub(crate) const INTERRUPTS: RangeInclusive<u64> = 0xfee0_0000..=0xfeef_ffff;

/// What no device can have mapped there.
pub(crate) fn region(range: RangeInclusive<u64>, kind: RegionKind) -> Option<ReservedRegion> {
    let range = IovaRange::new(Iova::new(*range.start()), Iova::new(*range.end()))?;
    Some(ReservedRegion { range, kind, prot: Prot::WRITE })
}

/// Says what a look at the faults of an IOMMU found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Handled {
    /// Faults that were reported to the stream that caused them.
    pub reported: u32,
    /// Faults of streams that nobody claimed: terminated, as all are, and reported to nobody.
    pub unclaimed: u32,
    /// Records that say nothing that the manual knows. They are passed over.
    pub malformed: u32,
    /// Hardware had faults that it had no room for: some were lost.
    pub overflowed: bool,
    /// There were more than one look takes: look again.
    pub more: bool,
}

/// A stream that somebody claimed.
#[derive(Debug)]
pub(crate) struct ClaimedStream<L> {
    pub(crate) id: u32,
    pub(crate) regions: ReservedRegions,
    pub(crate) faults: FaultHook<L>,
}

/// The streams of an IOMMU that somebody claimed.
pub(crate) struct Streams<L>(Mutex<L, BTreeMap<u32, Arc<ClaimedStream<L>>>>);

impl<L: RawMutex> Streams<L> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// [`claim`](Self::claim), with more regions, none of which is mapped.
    pub(crate) fn claim_with(
        &self,
        id: u32,
        mut regions: ReservedRegions,
        more: impl Iterator<Item = ReservedRegion>,
    ) -> Result<Arc<ClaimedStream<L>>, Error> {
        for region in more {
            // For want of memory alone: none of them is direct.
            let no_memory = NoMemory { lg2_size: 6, max_paddr: PhysAddr::new(u64::MAX) };
            regions.insert(region).map_err(|_| no_memory)?;
        }
        self.claim(id, regions)
    }

    /// Makes a stream the caller's, until it is [released](Self::release).
    pub(crate) fn claim(
        &self,
        id: u32,
        regions: ReservedRegions,
    ) -> Result<Arc<ClaimedStream<L>>, Error> {
        let claimed = Arc::new(ClaimedStream { id, regions, faults: FaultHook::new() });
        let mut streams = self.0.lock();
        if streams.contains_key(&id) {
            return Err(Error::Claimed { stream: id });
        }
        streams.insert(id, Arc::clone(&claimed));
        Ok(claimed)
    }

    /// Takes the claim of a stream back.
    pub(crate) fn release(&self, id: u32) {
        let released = self.0.lock().remove(&id);
        drop(released);
    }

    /// Reports a fault to its stream, and counts it.
    pub(crate) fn report(&self, fault: &FaultReport, handled: &mut Handled) -> FaultResponse {
        let claimed = self.0.lock().get(&fault.stream).cloned();
        report(claimed, fault, handled)
    }
}

/// Reports a fault to the stream that somebody claimed, if anybody has, and counts it. No lock is
/// held: a handler may take its time.
pub(crate) fn report<L: RawMutex>(
    claimed: Option<Arc<ClaimedStream<L>>>,
    fault: &FaultReport,
    handled: &mut Handled,
) -> FaultResponse {
    match claimed {
        Some(claimed) => {
            handled.reported = handled.reported.saturating_add(1);
            claimed.faults.report(fault)
        }
        None => {
            handled.unclaimed = handled.unclaimed.saturating_add(1);
            log::warn!("{fault}, and nobody claimed the stream");
            FaultResponse::Terminate
        }
    }
}
