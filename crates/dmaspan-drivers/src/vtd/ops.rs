//! The hooks of a domain: they tell hardware what to forget of it.

use alloc::sync::Arc;
use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};

use dmaspan::iommu::{DriverOps, Gather, HardwareError, Invalidation, IommuOps, Scope, Tables};
use dmaspan::{IovaRange, PhysAddr, lg2};

use super::spec::{Block, Command, PAGE_LG2, Walks};
use super::{Stage, Vtd};
use crate::blocks::blocks;
use crate::error::Error;
use crate::host::Host;
use crate::mmio::Mmio;

/// The most commands of an invalidation. Each costs hardware about as much as a few walks; with
/// more, forgetting the whole domain is cheaper, and what it maps still is walked again.
const MOST_COMMANDS: usize = 16;

/// The hooks of one domain, with its number. Made by [`Vtd::ops`].
pub struct VtdOps<R: Mmio, H: Host> {
    pub(super) iommu: Arc<Vtd<R, H>>,
    pub(super) domain: u16,
    pub(super) stage: Stage,
    /// Whether hardware has forgotten the number: then somebody else can have it.
    forgotten: AtomicBool,
}

/// Commands, as many as are worth it.
struct Commands {
    places: [Command; MOST_COMMANDS],
    len: usize,
}

impl<R: Mmio, H: Host> VtdOps<R, H> {
    pub(super) fn new(iommu: Arc<Vtd<R, H>>, stage: Stage) -> Result<Self, Error> {
        let limit = u32::from(iommu.features.last_domain()) + 1;
        let full = Error::NoIds { what: "domain IDs", limit };
        let id = iommu.ids.take().ok_or(full)?;
        let domain = u16::try_from(id).map_err(|_| full)?;
        Ok(Self { iommu, domain, stage, forgotten: AtomicBool::new(true) })
    }

    /// The number by which hardware knows the domain.
    pub fn domain_id(&self) -> u16 {
        self.domain
    }

    /// Says that hardware is about to hear of the domain.
    pub(super) fn known(&self) {
        self.forgotten.store(false, Ordering::Relaxed);
    }

    /// The command that makes hardware forget all of the domain.
    fn whole(&self) -> Command {
        match self.stage {
            Stage::First => Command::first_stage(self.domain),
            Stage::Second => Command::domain(self.domain),
        }
    }

    /// Adds the fewest commands that name all pages of `range`, in [`blocks`] of them, which are
    /// cut where hardware forgets no block so large. `None` where there are too many.
    fn name(&self, commands: &mut Commands, range: IovaRange, walks: Walks) -> Option<()> {
        let most = self.iommu.features.most_pages_lg2()?;
        let last = range.last().get() >> PAGE_LG2;
        for (address, lg2) in blocks(range) {
            let mask = lg2.saturating_sub(PAGE_LG2).min(most);
            // The pages of this block that are the range's.
            let end = (address >> PAGE_LG2) | lg2::mask(lg2.saturating_sub(PAGE_LG2));
            let mut page = lg2::align_down(address >> PAGE_LG2, mask);
            while page <= last.min(end) {
                let block = Block { address: page << PAGE_LG2, mask, walks };
                let command = match self.stage {
                    Stage::First => Command::first_stage_pages(self.domain, block),
                    Stage::Second => Command::pages(self.domain, block),
                };
                *commands.places.get_mut(commands.len)? = command;
                commands.len += 1;
                page += lg2::size(mask);
            }
        }
        Some(())
    }

    /// Makes hardware forget these ranges.
    fn forget(&self, ranges: &[IovaRange], walks: Walks) -> Result<(), HardwareError> {
        let mut commands = Commands { places: [self.whole(); MOST_COMMANDS], len: 0 };
        let mut named = ranges.iter().map(|&range| self.name(&mut commands, range, walks));
        if named.any(|named| named.is_none()) {
            return self.iommu.run(&[self.whole()]);
        }
        self.iommu.run(commands.places.get(..commands.len).unwrap_or_default())
    }
}

#[expect(unsafe_code, reason = "the promises of a driver")]
// SAFETY: 1. `run` returns when hardware has stored a number behind the commands, which name the
// scope or all of the domain, and which drain what was let through (DW and DR, which `check` asks
// for; the first stage's always do, 6.5.2.4). Writing the tail orders the stores to the tables
// before it. Walks are kept only where tables were.
// 2. `detach` blocks every stream that has the domain, and then makes hardware forget all of it.
// 3. `root_changed` is never `Ok`: these formats do not grow.
unsafe impl<R: Mmio, H: Host> IommuOps for VtdOps<R, H> {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let walks = match what.tables {
            Tables::Kept => Walks::Keep,
            Tables::Detached => Walks::Forget,
        };
        match what.scope {
            Scope::All => self.iommu.run(&[self.whole()]),
            Scope::Ranges(ranges) => self.forget(ranges, walks),
        }
    }

    /// Hardware with caching mode caches absent entries of the second stage, and those of the first
    /// never (6.1). Others may hold stores in their write buffer (6.8).
    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        let features = &self.iommu.features;
        if features.caching_mode() && self.stage == Stage::Second {
            self.forget(&[range], Walks::Forget)
        } else if features.write_buffer() {
            self.iommu.hardware.flush_write_buffer()
        } else {
            Ok(())
        }
    }

    fn detach(&self) -> Result<(), HardwareError> {
        // A stream may have been given the domain while it was detached the last time.
        self.known();
        self.iommu.block_domain(self.domain)?;
        self.iommu.run(&[self.whole()])?;
        self.forgotten.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        Gather::<()>::MAX_RANGES
    }
}

#[expect(unsafe_code, reason = "the promise of a driver")]
// SAFETY: they are the driver's.
unsafe impl<R: Mmio, H: Host> DriverOps for VtdOps<R, H> {
    type Driver = Self;

    fn driver(&self) -> &Self {
        self
    }
}

impl<R: Mmio, H: Host> Drop for VtdOps<R, H> {
    fn drop(&mut self) {
        if *self.forgotten.get_mut() {
            self.iommu.ids.give(self.domain.into());
        }
    }
}

impl<R: Mmio, H: Host> fmt::Debug for VtdOps<R, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VtdOps")
            .field("domain", &self.domain)
            .field("stage", &self.stage)
            .finish_non_exhaustive()
    }
}
