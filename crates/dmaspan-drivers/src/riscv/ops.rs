//! The hooks of a domain: they tell hardware what to forget of it.

use alloc::sync::Arc;
use core::fmt;
use core::sync::atomic::{AtomicU32, Ordering};

use dmaspan::io_pgtable::RiscvStage;
use dmaspan::iommu::{DriverOps, HardwareError, Invalidation, IommuOps, Scope, Tables};
use dmaspan::{IovaRange, PhysAddr};

use super::RiscvIommu;
use super::spec::{Capabilities, Command, at, in_block, inval_gscid, inval_pscid, with_tables};
use crate::Mmio;
use crate::blocks::blocks;
use crate::error::Error;
use crate::host::Host;

/// How many addresses one invalidation names at most; beyond, everything of the domain is
/// forgotten. A command names one address, and each is fetched and looked up by itself, while
/// forgetting all is one command, after which each page in use costs a walk.
const MOST_ADDRESSES: usize = 32;
/// log2 of the bytes between two addresses that are named. One in each leaf is enough by the manual
/// ("IOTINVAL.VMA operands and operations"); hardware that keeps a leaf in pieces of a page, and
/// forgets the piece that is named, is QEMU's model. Linux goes by pages, too.
const STEP_LG2: u32 = 12;

/// An address space as hardware tells it apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// A first stage, of the host: its PSCID.
    First(u32),
    /// A second stage: its GSCID.
    Second(u32),
}

impl Tag {
    /// Makes hardware forget all of the address space.
    pub(super) const fn forget(self) -> Command {
        match self {
            Self::First(pscid) => inval_pscid(pscid),
            Self::Second(gscid) => inval_gscid(gscid),
        }
    }
}

/// An address space, and how many streams hardware may translate through it.
#[derive(Debug)]
pub(super) struct AddressSpace {
    pub(super) tag: Tag,
    pub(super) streams: AtomicU32,
}

/// The hooks of a domain that streams of a [`RiscvIommu`] can be attached to.
///
/// It has a PSCID or a GSCID, which comes back when the hooks are dropped and hardware has
/// forgotten all that it is in.
pub struct RiscvOps<R: Mmio, H: Host> {
    pub(super) iommu: Arc<RiscvIommu<R, H>>,
    pub(super) space: Arc<AddressSpace>,
}

impl<R: Mmio, H: Host> RiscvOps<R, H> {
    pub(super) fn new(iommu: Arc<RiscvIommu<R, H>>, tag: Tag) -> Self {
        let space = Arc::new(AddressSpace { tag, streams: AtomicU32::new(0) });
        Self { iommu, space }
    }

    /// The IOMMU whose hooks they are.
    pub fn iommu(&self) -> &Arc<RiscvIommu<R, H>> {
        &self.iommu
    }

    /// Forgets all of the address space, if no stream has it.
    fn let_go(&self) -> Result<(), HardwareError> {
        let streams = self.space.streams.load(Ordering::Acquire);
        if streams != 0 {
            let what = "a stream is still attached to this domain";
            return Err(HardwareError { what, status: streams.into() });
        }
        self.iommu.run(&[self.space.tag.forget()])
    }
}

impl<R: Mmio, H: Host> Drop for RiscvOps<R, H> {
    fn drop(&mut self) {
        // Also after `detach`: a stream may have had the domain since. Where hardware does not
        // answer, the number is lost.
        if self.let_go().is_ok() {
            match self.space.tag {
                Tag::First(pscid) => self.iommu.pscids.give(pscid),
                Tag::Second(gscid) => self.iommu.gscids.give(gscid),
            }
        }
    }
}

impl<R: Mmio, H: Host> fmt::Debug for RiscvOps<R, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RiscvOps").field("space", &self.space).finish_non_exhaustive()
    }
}

/// The addresses of one invalidation, each as a command.
struct Addresses {
    commands: [Command; MOST_ADDRESSES],
    len: usize,
}

impl Addresses {
    fn none(forget: Command) -> Self {
        Self { commands: [forget; MOST_ADDRESSES], len: 0 }
    }

    /// `None` where there is no place.
    fn push(&mut self, command: Command) -> Option<()> {
        *self.commands.get_mut(self.len)? = command;
        self.len += 1;
        Some(())
    }

    /// One for each page of the ranges; `None` where there are too many.
    fn pages(forget: Command, ranges: &[IovaRange]) -> Option<Self> {
        let mut addresses = Self::none(forget);
        for range in ranges {
            let first = range.start().get() >> STEP_LG2;
            let pages = (range.last().get() >> STEP_LG2) - first;
            for page in 0..=pages.min(MOST_ADDRESSES as u64) {
                // There is no place for the page behind the last one.
                addresses.push(at(forget, (first + page) << STEP_LG2))?;
            }
        }
        Some(addresses)
    }

    /// One or two for each range, for hardware that forgets blocks; `None` where there are too
    /// many.
    fn blocks(forget: Command, ranges: &[IovaRange]) -> Option<Self> {
        let mut addresses = Self::none(forget);
        for (address, lg2) in ranges.iter().flat_map(|&range| blocks(range)) {
            addresses.push(in_block(forget, address, lg2))?;
        }
        Some(addresses)
    }

    fn commands(&self) -> &[Command] {
        self.commands.get(..self.len).unwrap_or(&[])
    }
}

impl<R: Mmio, H: Host> RiscvOps<R, H> {
    /// The commands that name what is to be forgotten; `None` where all of the address space is.
    fn named(&self, what: &Invalidation<'_>) -> Option<Addresses> {
        let has = self.iommu.features().capabilities;
        let forget = match what.tables {
            Tables::Kept => self.space.tag.forget(),
            Tables::Detached if has.contains(Capabilities::NL) => {
                with_tables(self.space.tag.forget())
            }
            Tables::Detached => return None,
        };
        match what.scope {
            Scope::All => None,
            Scope::Ranges(ranges) if has.contains(Capabilities::S) => {
                Addresses::blocks(forget, ranges)
            }
            Scope::Ranges(ranges) => Addresses::pages(forget, ranges),
        }
    }
}

#[expect(unsafe_code, reason = "the promise of invalidation hooks")]
// SAFETY: 1. All streams that translate through the address space have its PSCID or GSCID in
// their context, and the commands name that number: with AV=0 they make hardware forget all that it
// took from tables of any level, with AV=1 what it took from the leaves at an address, and with NL
// from tables of any level there. Each page of each range is named by itself, or lies in a block
// that is (S). Where hardware has no NL, tables that were detached are forgotten with AV=0 alone. A
// context may be switched meanwhile: translations are found by the number that was in it. `run`
// returns `Ok` only when a fence behind the commands was passed, which has PR and PW: every access
// that was processed before is seen by everybody. The CPU's stores to the tables are before the
// write to `cqt`, which `Mmio` orders behind them. 2. `detach` refuses while a stream has the
// domain: each is counted from the begin of its `translate` until a later hook of it has succeeded,
// which is when hardware has forgotten the old context. 3. The root of such tables does not change.
unsafe impl<R: Mmio, H: Host> IommuOps for RiscvOps<R, H> {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        match &self.named(what) {
            Some(addresses) => self.iommu.run(addresses.commands()),
            None => self.iommu.run(&[self.space.tag.forget()]),
        }
    }

    /// Nothing that is absent is cached ("Caching invalid entries"), but the stores have to be seen
    /// before a device is told to go.
    fn sync_map(&self, _range: IovaRange) -> Result<(), HardwareError> {
        self.iommu.registers.order_stores();
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.let_go()
    }

    /// As many as a gather has places for.
    fn max_ranges(&self) -> usize {
        MOST_ADDRESSES
    }
}

#[expect(unsafe_code, reason = "the promise of a driver")]
// SAFETY: they are the driver's.
unsafe impl<R: Mmio, H: Host> DriverOps for RiscvOps<R, H> {
    type Driver = Self;

    fn driver(&self) -> &Self {
        self
    }
}

impl<R: Mmio, H: Host> RiscvIommu<R, H> {
    /// The hooks of a new domain, whose tables are of that stage.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the hardware does not have the stage, and [`Error::NoIds`]
    /// where all numbers are taken.
    pub fn ops(self: &Arc<Self>, stage: RiscvStage) -> Result<RiscvOps<R, H>, Error> {
        // The hardware has it.
        self.config(stage)?;
        let (ids, what) = match stage {
            RiscvStage::First(_) => (&self.pscids, "PSCIDs"),
            RiscvStage::Second => (&self.gscids, "GSCIDs"),
        };
        let id = ids.take().ok_or(Error::NoIds { what, limit: super::LAST_ID })?;
        let tag = match stage {
            RiscvStage::First(_) => Tag::First(id),
            RiscvStage::Second => Tag::Second(id),
        };
        Ok(RiscvOps::new(Arc::clone(self), tag))
    }
}
