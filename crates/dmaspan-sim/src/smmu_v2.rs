//! A register model of an SMMUv2, with a TLB that keeps what it may.
//!
//! Source: Arm System Memory Management Unit Architecture Specification, SMMU architecture version
//! 2.0 (IHI 0062, issue D). Registers are named as there; each item names its section. The model
//! knows nothing of any driver: it reads what was written to its registers, and tables through the
//! [walkers](crate::walker). But the driver in `dmaspan-drivers` has the same author, who read the
//! manual once: what the two agree on may be wrong all the same.
//!
//! A driver gets at the registers by [`Smmu::read32`] and its like, offsets being those from the
//! SMMU's base address. A device uses [`Smmu::access`], or [`Smmu::read`] and [`Smmu::write`].
//!
//! # What is modelled
//!
//! - Both global register spaces and the context banks, with pages of 4 and of 64 KiB, as
//!   [`SmmuConfig`] says and SMMU_IDR0 to SMMU_IDR7 tell. Registers of 64 bits can be read and
//!   written by halves; registers of 32 bits by 32 bits alone. Anything else reads as 0, is ignored
//!   when written, and is counted.
//! - Stream mapping by matching and by indexing, extended stream IDs, all types of SMMU_S2CRn and
//!   of SMMU_CBARn, nested ones included.
//! - Translation by long descriptors of AArch64 and AArch32, of both stages, and by short
//!   descriptors with TEX remap.
//! - A TLB that forgets nothing by itself. Leaves and tables are tagged with VMID, stage and ASID
//!   but not with the bank, since the architecture lets banks share entries: two banks with one
//!   ASID and one VMID see each other's. Stage 1 leaves with nG = 0 are for every ASID.
//! - Invalidations that take effect when a sync completes them, or at once, as [`TakesEffect`]
//!   says. SMMU_CBn_TLBSYNC completes what was written to its bank, SMMU_sTLBGSYNC everything.
//! - Faults with their syndromes, MULTI, termination and stalls, interrupts as levels.
//!
//! # What is not modelled
//!
//! - Secure state and what is banked for it, SMMU_SCR1, the secure invalidations, SSD indices.
//! - The hypervisor's contexts (SMMU_CBARn.HYPC, SMMU_TLBIVAH64) and the monitor's
//!   (SMMU_CBA2Rn.MONC), SMMU_TLBIVMIDS1, address translation operations, performance monitors,
//!   the identification registers of components, and all registers that are IMPLEMENTATION
//!   DEFINED: SMMU_sACR and SMMU_CBn_ACTLR hold what is written, SMMU_sGFSYNR2 and SMMU_CBn_FSYNR1
//!   are 0.
//! - Memory attributes: MemAttr, SHCFG, NSCFG, RACFG, WACFG, BPSHCFG, FB, BSU, PTM and the like
//!   hold what is written. The coherency of walks can be set and changes nothing.
//! - VMIDPNE and ASIDPNE, since no TLB maintenance of CPUs is broadcast to the SMMU; GSE.
//! - Instruction fetches, and S2CR's INSTCFG; of PRIVCFG only 0b11 does anything. Devices are
//!   unprivileged otherwise.
//! - TCR2.TBI0 and TBI1, which make a context faulty, SCTLR.AFFD, SCTLR.E and memory types without
//!   TEX remap, which make one with short descriptors faulty.
//! - TLB entries that combine both stages: each stage has its own.
//! - The size of bypassed addresses against SMMU_IDR2.OAS.
//!
//! # Where the text leaves a choice or was not certain
//!
//! - SMMU_sCR0.SMCFCFG reads as 1 and cannot be written, as implementations may have it.
//! - Faults of transactions are reported by GFRE and GFIE. GCFGFRE and GCFGFIE are taken to be for
//!   accesses to registers that may not be made, of which there are none here.
//! - SMMU_CBn_FSR.SS is cleared by SMMU_CBn_RESUME alone and holds the interrupt. FORMAT stays when
//!   the fault is cleared, so that FSR need not be 0 afterwards.
//! - SMMU_CBn_RESUME is for all transactions of its bank that stall.
//! - While HUPCF is 0 and a fault is outstanding, a transaction is not looked at: it can neither
//!   succeed nor set MULTI. Of a nested context that goes for a fault in the bank of stage 1.
//! - Where registers describe no tables, which is UNPREDICTABLE, there is a translation fault of
//!   level 0, and a counter.
//!
//! # Example
//!
//! ```
//! use dmaspan::Iova;
//! use dmaspan_sim::smmu_v2::{Smmu, SmmuConfig};
//! use dmaspan_sim::walker::{Access, TableImage};
//!
//! fn main() -> Result<(), dmaspan_sim::smmu_v2::BadConfig> {
//!     let smmu = Smmu::new(SmmuConfig::default(), TableImage::new())?;
//!     // sCR0.CLIENTPD is 1 after a reset: everything passes.
//!     assert_eq!(smmu.read32(0) & 1, 1);
//!     assert!(smmu.access(7, Iova::new(0x1000), Access::Write).is_ok());
//!     // Without it, with USFCFG, GFRE and GFIE, a stream that nothing is said of faults.
//!     smmu.write32(0, 1 << 10 | 1 << 2 | 1 << 1);
//!     assert!(smmu.access(7, Iova::new(0x1000), Access::Write).is_err());
//!     assert_eq!(smmu.read32(0x48), 1 << 1);
//!     assert!(smmu.global_irq());
//!     Ok(())
//! }
//! ```

use std::fmt;

use dmaspan::{Iova, lg2};
use parking_lot::{Mutex, RwLock};

use crate::bus::Bus;
use crate::device::{DmaError, Step, Stepped, in_pieces};
use crate::iotlb::Hit;
use crate::walker::{Access, TableWords};

mod bank;
mod behaviour;
mod config;
mod invalidate;
mod refused;
mod registers;
mod spec;
mod stall;
mod state;
mod sync;
#[cfg(test)]
mod tests;
mod tlb;
mod translate;

pub use behaviour::{
    Behaviour, Commands, Reads, ResetValues, SmmuCounters, SyncCompletion, TakesEffect,
};
pub use config::{Aarch32, BadConfig, PageSize, SmmuConfig, Stages, StreamMatchSupport};
pub use refused::{GlobalFault, RefusedTransaction, Response, Why};
pub use stall::StallId;

use registers::{RegisterPlace, Undefined};
use spec::{cr0, fsr, gfsr, halves, sctlr};
use stall::{Outcome, Transaction};
use state::State;
use translate::Behind;

/// An SMMUv2 that reads tables from `T`. To share it, put it into an [`Arc`](std::sync::Arc).
///
/// Lock order: the accesses in flight before the state. The completion of a sync waits for every
/// access that runs inside [`access_with`](Self::access_with), as the manual has it: transactions
/// that used an invalidated entry are done by then.
pub struct Smmu<T> {
    tables: T,
    /// Held for reading while an access uses its translation, and for writing where a sync may
    /// complete.
    in_flight: RwLock<()>,
    state: Mutex<State>,
}

impl<T: TableWords> Smmu<T> {
    /// An SMMU after its reset, with zeros in registers that have no reset value.
    ///
    /// # Errors
    ///
    /// [`BadConfig`].
    pub fn new(config: SmmuConfig, tables: T) -> Result<Self, BadConfig> {
        Self::with_reset(config, tables, ResetValues::Zero)
    }

    /// An SMMU after its reset.
    ///
    /// # Errors
    ///
    /// [`BadConfig`].
    pub fn with_reset(
        config: SmmuConfig,
        tables: T,
        reset: ResetValues,
    ) -> Result<Self, BadConfig> {
        config.check()?;
        let state = Mutex::new(State::new(config, reset));
        Ok(Self { tables, in_flight: RwLock::new(()), state })
    }

    /// Returns what the SMMU reads tables from.
    pub fn tables(&self) -> &T {
        &self.tables
    }

    /// Returns what the SMMU does at present; [`Behaviour::storm`] is what is left of it.
    pub fn behaviour(&self) -> Behaviour {
        self.state.lock().behaviour
    }

    /// Changes what the SMMU does from now on.
    pub fn set_behaviour(&self, behaviour: Behaviour) {
        self.state.lock().behaviour = behaviour;
    }

    /// Returns what was done so far.
    pub fn counters(&self) -> SmmuCounters {
        self.state.lock().counters
    }

    /// Returns how many leaves are cached.
    pub fn cached_leaves(&self) -> usize {
        self.state.lock().tlb.len().0
    }

    /// Returns how many tables are cached, besides roots.
    pub fn cached_links(&self) -> usize {
        self.state.lock().tlb.len().1
    }

    /// Returns how many invalidations no sync has completed.
    pub fn pending_invalidations(&self) -> usize {
        self.state.lock().syncs.pending()
    }

    /// Reads a register of 32 bits, or half of one of 64 bits.
    ///
    /// # Context
    ///
    /// Not within [`access_with`](Self::access_with): the read of a sync's status waits for it.
    pub fn read32(&self, offset: u64) -> u32 {
        let value = self.with_register(offset, 2, State::read_narrow);
        halves(self.seen(value.map(u64::from)))[0]
    }

    /// Reads a register of 64 bits.
    pub fn read64(&self, offset: u64) -> u64 {
        let value = self.with_register(offset, 3, State::read_wide);
        self.seen(value)
    }

    /// Writes a register of 32 bits, or half of one of 64 bits. The lower half of an invalidation
    /// by address begins it.
    ///
    /// # Context
    ///
    /// As [`read32`](Self::read32).
    pub fn write32(&self, offset: u64, value: u32) {
        let written =
            self.with_register(offset, 2, |state, place| state.write_narrow(place, value));
        self.count_write(written);
    }

    /// Writes a register of 64 bits.
    pub fn write64(&self, offset: u64, value: u64) {
        let written = self.with_register(offset, 3, |state, place| state.write_wide(place, value));
        self.count_write(written);
    }

    /// What a read returns, as the behaviour has it.
    fn seen(&self, value: Result<u64, Undefined>) -> u64 {
        let mut state = self.state.lock();
        if value.is_err() {
            state.counters.undefined_reads += 1;
        }
        match state.behaviour.reads {
            Reads::Registers => value.unwrap_or(0),
            Reads::Ones => u64::MAX,
            Reads::Random => state.rng.next(),
        }
    }

    fn count_write(&self, written: Result<(), Undefined>) {
        if written.is_err() {
            self.state.lock().counters.undefined_writes += 1;
        }
    }

    fn with_register<R>(
        &self,
        offset: u64,
        width_lg2: u32,
        f: impl FnOnce(&mut State, RegisterPlace) -> Result<R, Undefined>,
    ) -> Result<R, Undefined> {
        if !lg2::is_aligned(offset, width_lg2) {
            return Err(Undefined);
        }
        let place = self.state.lock().place(offset).ok_or(Undefined)?;
        let _accesses_done = place.sync().map(|_| self.in_flight.write());
        f(&mut self.state.lock(), place)
    }

    /// Translates an address of a stream's transaction.
    ///
    /// The answer may be stale as soon as this returns; an access that must not outlive a sync goes
    /// through [`access_with`](Self::access_with).
    ///
    /// # Errors
    ///
    /// [`RefusedTransaction`]; the registers say so, too.
    pub fn access(
        &self,
        stream: u16,
        iova: Iova,
        access: Access,
    ) -> Result<Hit, RefusedTransaction> {
        let transaction = Transaction { stream, iova, access };
        self.state.lock().transact(&self.tables, transaction, Behind::Waits)
    }

    /// Translates and calls `f` with the answer. No sync completes while `f` runs.
    ///
    /// # Context
    ///
    /// `f` must use neither the SMMU's registers nor its translations: it may wait for itself.
    ///
    /// # Errors
    ///
    /// [`RefusedTransaction`]; then `f` is not called.
    pub fn access_with<R>(
        &self,
        stream: u16,
        iova: Iova,
        access: Access,
        f: impl FnOnce(Hit) -> R,
    ) -> Result<R, RefusedTransaction> {
        let _accessing = self.in_flight.read();
        self.access(stream, iova, access).map(f)
    }

    /// Reads memory of `bus` from `iova` on, as a device of this stream.
    ///
    /// # Errors
    ///
    /// [`DmaError`], with the bytes that were read before. Of a stalled transaction it is the
    /// fault; the rest is not done later.
    pub fn read(
        &self,
        bus: &impl Bus,
        stream: u16,
        iova: Iova,
        buf: &mut [u8],
    ) -> Result<(), DmaError> {
        let translate = |at, step: Step<'_>| self.step(stream, at, Access::Read, step);
        in_pieces(iova, buf.len(), translate, |paddr, from, to| bus.read(paddr, &mut buf[from..to]))
    }

    /// Writes memory of `bus` from `iova` on, as a device of this stream.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn write(
        &self,
        bus: &impl Bus,
        stream: u16,
        iova: Iova,
        buf: &[u8],
    ) -> Result<(), DmaError> {
        let translate = |at, step: Step<'_>| self.step(stream, at, Access::Write, step);
        in_pieces(iova, buf.len(), translate, |paddr, from, to| bus.write(paddr, &buf[from..to]))
    }

    fn step(&self, stream: u16, at: Iova, access: Access, step: Step<'_>) -> Stepped {
        self.access_with(stream, at, access, step).map_err(|refused| refused.fault())
    }

    /// Returns what became of a stalled transaction (IHI 0062, "SMMU_CBn_RESUME, Transaction Resume
    /// register"): `None` while it stalls, and where this was told before.
    ///
    /// One that is retried is processed here, and may stall again under another number.
    pub fn resumed(&self, id: StallId) -> Option<Result<Hit, RefusedTransaction>> {
        let mut state = self.state.lock();
        let (transaction, outcome) = state.banks.get_mut(id.bank)?.stalls.take(id)?;
        Some(match outcome {
            Outcome::Retry => state.transact(&self.tables, transaction, Behind::Retried),
            Outcome::Waiting | Outcome::Terminate => Err(state.terminated(transaction, id.bank)),
        })
    }

    /// Returns how many transactions of a bank stall.
    pub fn stalled(&self, bank: usize) -> usize {
        self.state.lock().banks.get(bank).map_or(0, |bank| bank.stalls.waiting())
    }

    /// The level of the global fault interrupt: a fault is recorded and sCR0.GFIE is 1.
    pub fn global_irq(&self) -> bool {
        let state = self.state.lock();
        state.gfsr & gfsr::ALL != 0 && state.cr0 & cr0::GFIE != 0
    }

    /// The level of the interrupt of a context bank: a fault is recorded or transactions stall, and
    /// SCTLR.CFIE is 1.
    pub fn context_irq(&self, bank: usize) -> bool {
        let state = self.state.lock();
        state.banks.get(bank).is_some_and(|bank| {
            bank.fsr & (fsr::FAULTS | fsr::SS) != 0 && bank.sctlr & sctlr::CFIE != 0
        })
    }

    /// Sets bits of SMMU_sGFSR, with random syndromes: a fault of another kind, or of a broken
    /// device.
    pub fn raise_global(&self, bits: u32) {
        let state = &mut *self.state.lock();
        state.gfsr |= bits & gfsr::ALL;
        state.gfar = state.rng.next();
        state.gfsynr = halves(state.rng.next());
    }

    /// Sets fault bits of a bank's SMMU_CBn_FSR, with random syndromes: a fault of another kind, or
    /// of a broken device.
    pub fn raise_context(&self, bank: usize, bits: u32) {
        let state = &mut *self.state.lock();
        if let Some(bank) = state.banks.get_mut(bank) {
            bank.fsr |= bits & (fsr::FAULTS | fsr::FORMAT);
            (bank.far, bank.ipafar) = (state.rng.next(), state.rng.next());
            [bank.fsynr0, bank.frsynra] = halves(state.rng.next());
        }
    }
}

impl<T> fmt::Debug for Smmu<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Smmu").field("state", &*self.state.lock()).finish_non_exhaustive()
    }
}
