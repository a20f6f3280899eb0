//! The bench compares the driver with itself, with PRPs that were written by hand.
//!
//! They are written once, for one mapping that stays. Then an I/O imports nothing, describes
//! nothing and holds nothing, and does all else that the driver does.
#![expect(unsafe_code, reason = "PRPs that are written by hand are promised to be right")]

use std::sync::atomic::Ordering;

use dmaspan_nvme::access::{Access, SharedMemory};
use dmaspan_nvme::vfio::VfioAccess;
use dmaspan_nvme::{CommandId, Error, IoQueue, Namespace};

use crate::load::{Failure, Load};

/// The size of a page of PRPs.
pub(crate) const PAGE: u64 = 4096;

/// What is transferred to and from where.
pub(crate) struct Fixed {
    /// The I/Os.
    pub(crate) load: Load,
    /// Where the controller finds the first region.
    pub(crate) start: u64,
}

impl Fixed {
    /// Pages with the PRPs of each region, where two of them do not do.
    pub(crate) fn lists<A: Access>(&self, access: &A) -> Result<Option<A::Memory>, Failure> {
        if self.load.bytes <= 2 * PAGE {
            return Ok(None);
        }
        let memory = access.allocate(u64::from(self.load.regions) * PAGE, PAGE)?;
        for (region, page) in (0..self.load.regions).zip(memory.words().as_chunks::<512>().0) {
            let start = self.region(region);
            for (place, at) in
                page.iter().zip((1..self.load.bytes / PAGE).map(|n| start + n * PAGE))
            {
                place.store(at.to_le(), Ordering::Relaxed);
            }
        }
        Ok(Some(memory))
    }

    fn region(&self, region: u16) -> u64 {
        self.start + u64::from(region) * self.load.bytes
    }

    /// The PRPs of each region, with those lists.
    pub(crate) fn prps<M: SharedMemory>(&self, lists: Option<&M>) -> Box<[[u64; 2]]> {
        let lists = lists.map_or(0, |memory| memory.addr().get());
        let prps = |region: u16| {
            let prp1 = self.region(region);
            let prp2 = match self.load.bytes {
                ..=PAGE => 0,
                bytes if bytes <= 2 * PAGE => prp1 + PAGE,
                _ => lists + u64::from(region) * PAGE,
            };
            [prp1, prp2]
        };
        (0..self.load.regions).map(prps).collect()
    }
}

/// Enters the transfer of a region by the PRPs that were written for it.
pub(crate) fn push(
    namespace: Namespace,
    fixed: &Fixed,
    prps: Box<[[u64; 2]]>,
) -> impl Fn(&mut IoQueue<VfioAccess>, u16, u64) -> Result<CommandId, Error> + use<> {
    let Load { transfer, bytes, .. } = fixed.load;
    #[inline]
    move |queue, region, lba| {
        // SAFETY: the IOMMU lets the controller reach what is mapped in its space alone, which are
        // atomic bytes of memory that its mapping owns.
        unsafe { queue.push_prps(transfer, &namespace, lba, bytes, prps[usize::from(region)]) }
    }
}
