//! The hooks of a domain: they tell its context bank what to forget.

use alloc::sync::Arc;
use core::fmt;

use dmaspan::iommu::{DriverOps, HardwareError, Invalidation, IommuOps, Scope, Tables};
use dmaspan::{IovaRange, PhysAddr, lg2};

use super::bank::{self, Bank};
use super::format::{Kind, Walks, low};
use super::spec::{TLBIVA_ADDRESS_BITS, TLBIVA_ASID_SHIFT};
use super::{SmmuV2, Translates};
use crate::host::Host;
use crate::mmio::Mmio;
use crate::stage::Stage;

/// The most addresses that one invalidation names. With more, all of the domain is forgotten: each
/// is a write to a register, and as many as a table of 4K has entries cost more than walking for
/// what is used of the rest (Linux, with SMMUv3: `CMDQ_MAX_TLBI_OPS`).
pub const MAX_COMMANDS: u64 = 512;

/// The hooks of a domain: its context bank. Given back when they are dropped, if hardware has let
/// go of it.
pub struct SmmuV2Ops<R: Mmio, H: Host> {
    smmu: Arc<SmmuV2<R, H>>,
    bank: Bank,
}

impl<R: Mmio, H: Host> SmmuV2Ops<R, H> {
    pub(super) fn new(smmu: Arc<SmmuV2<R, H>>, bank: Bank) -> Self {
        Self { smmu, bank }
    }

    /// The number of the context bank.
    pub fn bank(&self) -> u32 {
        self.bank.index
    }

    pub(super) fn smmu(&self) -> &Arc<SmmuV2<R, H>> {
        &self.smmu
    }

    pub(super) fn taken(&self) -> &Bank {
        &self.bank
    }

    /// The addresses to name, if they are few: one each `2^lg2` bytes.
    fn stride(&self, what: &Invalidation<'_>) -> Option<u32> {
        let Scope::Ranges(ranges) = what.scope else { return None };
        let walks = match what.tables {
            Tables::Kept => Walks::Kept,
            Tables::Detached => Walks::Forgotten,
        };
        let lg2 = self.bank.context.stride_lg2(what.leaf_sizes, walks);
        let count = |range: &IovaRange| (range.last().get() >> lg2) - (range.start().get() >> lg2);
        let commands = ranges
            .iter()
            .fold(0u64, |sum, range| sum.saturating_add(count(range)).saturating_add(1));
        (commands <= MAX_COMMANDS).then_some(lg2)
    }

    /// Begins to forget what is cached of one address.
    fn forget(&self, iova: u64, tables: Tables) {
        use super::spec::bank;
        let Bank { index, context, id } = self.bank;
        let registers = self.smmu.registers.bank(index);
        let register = match (context.stage, tables) {
            (Stage::First, Tables::Kept) => bank::TLBIVAL,
            (Stage::First, Tables::Detached) => bank::TLBIVA,
            (Stage::Second, Tables::Kept) => bank::TLBIIPAS2L,
            (Stage::Second, Tables::Detached) => bank::TLBIIPAS2,
        };
        let page = iova >> 12;
        match (context.stage, context.tables) {
            (Stage::First, Kind::AArch64) => {
                let asid = u64::from(id) << TLBIVA_ASID_SHIFT;
                registers.write64(register, page & lg2::mask(TLBIVA_ADDRESS_BITS) | asid);
            }
            // Address bits 31:12, and an ASID of 8 bits.
            (Stage::First, _) => registers.write(register, low(page << 12) | id),
            (Stage::Second, Kind::AArch64) => registers.write64(register, page),
            // Address bits 39:12.
            (Stage::Second, _) => registers.write(register, low(page)),
        }
    }
}

// SAFETY: 1. `invalidate` names each leaf and each table taken away by an address in it, or all of
// the domain's ASID or VMID, which is the domain's alone. `Ok` is returned only where hardware said
// that this is done, which includes accesses that used it (IHI 0062, SMMU_CBn_TLBSYNC and
// SMMU_sTLBGSYNC). Writing a register orders stores to tables before it (`Mmio`). 2. `detach` fails
// while a stream leads to the bank. Otherwise none can get there but by `translate`, all that the
// bank has cached is forgotten, and then it has no tables any more. 3. `root_changed` never
// succeeds; formats that grow are none of `SmmuV2Format`.
#[expect(unsafe_code, reason = "the promises of invalidation hooks")]
unsafe impl<R: Mmio, H: Host> IommuOps for SmmuV2Ops<R, H> {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        match (what.scope, self.stride(what)) {
            (Scope::Ranges(ranges), Some(lg2)) => {
                for range in ranges {
                    let (first, last) = (range.start().get() >> lg2, range.last().get() >> lg2);
                    (first..=last).for_each(|block| self.forget(block << lg2, what.tables));
                }
                self.smmu.sync_bank(self.bank.index)
            }
            _ => {
                self.bank.forget_all(&self.smmu.registers);
                match self.bank.context.stage {
                    Stage::First => self.smmu.sync_bank(self.bank.index),
                    // The bank is not what was told.
                    Stage::Second => self.smmu.sync_global(),
                }
            }
        }
    }

    /// Nothing that is absent is cached (IHI 0062), but the stores have to be seen before a device
    /// is told to go (Linux: `wmb` in drivers/iommu/io-pgtable-arm.c).
    fn sync_map(&self, _range: IovaRange) -> Result<(), HardwareError> {
        self.smmu.registers.order_stores();
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        let registers = &self.smmu.registers;
        let index = self.bank.index;
        // All under the lock, so that no stream is led here meanwhile: a bank without tables lets
        // accesses pass.
        let mut state = self.smmu.state.lock();
        if state.map.reaches(registers, index) {
            return Err(HardwareError {
                what: "a stream is still attached to this domain",
                status: 0,
            });
        }
        let Some(taken) = state.bank(index).filter(|taken| taken.translates == Translates::Yes)
        else {
            return Ok(());
        };
        self.bank.end_stalled(registers);
        self.bank.forget_all(registers);
        self.smmu.sync_global()?;
        bank::disable(registers, index);
        taken.translates = Translates::No;
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        // Each costs at least one write; the gather has places for fewer than are worth it.
        usize::try_from(MAX_COMMANDS).unwrap_or(usize::MAX)
    }
}

#[expect(unsafe_code, reason = "the promise of a driver")]
// SAFETY: they are the driver's.
unsafe impl<R: Mmio, H: Host> DriverOps for SmmuV2Ops<R, H> {
    type Driver = Self;

    fn driver(&self) -> &Self {
        self
    }
}

impl<R: Mmio, H: Host> Drop for SmmuV2Ops<R, H> {
    fn drop(&mut self) {
        let index = self.bank.index;
        let taken = self.smmu.state.lock().bank(index).copied();
        // Hardware may use what it did not say to have let go: nobody gets the bank again.
        if taken.is_some_and(|taken| taken.translates == Translates::No) {
            self.smmu.give(index);
        }
    }
}

impl<R: Mmio, H: Host> fmt::Debug for SmmuV2Ops<R, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SmmuV2Ops").field("bank", &self.bank).finish_non_exhaustive()
    }
}
