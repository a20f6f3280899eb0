//! The state behind the lock: global registers, banks, the TLB and pending invalidations.

use super::bank::{Bank, BankType};
use super::behaviour::{Behaviour, ResetValues, SmmuCounters, TakesEffect};
use super::config::{SmmuConfig, StreamMatchSupport};
use super::refused::GlobalFault;
use super::spec::{cba2r, cr0, field, gfsr, halves, low16, stream};
use super::stall::Transaction;
use super::sync::{Origin, Syncs};
use super::tlb::{Invalidation, Tlb};
use crate::rng::Rng;
use crate::walker::Access;
use crate::walker::arm_lpae::AccessPrivilege;

/// Where a stream's transactions go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Bypass,
    Bank(usize, AccessPrivilege),
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) config: SmmuConfig,
    pub(super) cr0: u32,
    pub(super) cr2: u32,
    pub(super) acr: u32,
    pub(super) gfar: u64,
    pub(super) gfsr: u32,
    pub(super) gfsynr: [u32; 2],
    pub(super) smr: Vec<u32>,
    pub(super) s2cr: Vec<u32>,
    pub(super) banks: Vec<Bank>,
    pub(super) tlb: Tlb,
    pub(super) syncs: Syncs,
    pub(super) behaviour: Behaviour,
    pub(super) counters: SmmuCounters,
    pub(super) rng: Rng,
}

impl State {
    pub(super) fn new(config: SmmuConfig, reset: ResetValues) -> Self {
        let seed = match reset {
            ResetValues::Zero => 0,
            ResetValues::Random(seed) => seed,
        };
        let groups = usize::from(config.mapping_groups);
        let mut state = Self {
            config,
            cr0: cr0::CLIENTPD | cr0::SMCFCFG,
            cr2: 0,
            acr: 0,
            gfar: 0,
            gfsr: 0,
            gfsynr: [0; 2],
            smr: vec![0; groups],
            s2cr: vec![0; groups],
            banks: (0..config.context_banks).map(|_| Bank::default()).collect(),
            tlb: Tlb::default(),
            syncs: Syncs::default(),
            behaviour: Behaviour::default(),
            counters: SmmuCounters::default(),
            rng: Rng::new(seed),
        };
        if let ResetValues::Random(_) = reset {
            state.fill();
        }
        state
    }

    /// Random bits into every register that has no reset value.
    fn fill(&mut self) {
        let rng = &mut self.rng;
        let mut word = || halves(rng.next())[0];
        (self.cr2, self.acr) = (word(), word());
        self.gfsr = word() & gfsr::ALL;
        self.gfsynr = [word(), word()];
        self.smr.iter_mut().for_each(|smr| *smr = word());
        self.s2cr.iter_mut().for_each(|s2cr| *s2cr = word());
        for bank in &mut self.banks {
            bank.fill(&mut word);
        }
        self.gfar = self.rng.next();
        // What is written is what can be there.
        for number in 0..self.smr.len() {
            self.smr[number] &= self.smr_writable();
            self.s2cr[number] &= self.s2cr_writable();
        }
        for number in 0..self.banks.len() {
            let bank = &self.banks[number];
            let (cbar, cba2r) = (bank.cbar, bank.cba2r);
            self.set_cbar(number, cbar);
            self.set_cba2r(number, cba2r);
        }
    }

    pub(super) fn set_cr0(&mut self, value: u32) {
        let without = |has: bool, bit: u32| if has { 0 } else { bit };
        let writable = !(cr0::RESERVED
            | without(self.config.extended_ids, cr0::EXIDENABLE)
            | without(self.config.vmid16, cr0::VMID16EN));
        self.cr0 = value & writable | cr0::SMCFCFG;
    }

    /// Extended stream IDs take the place of VALID.
    pub(super) fn smr_writable(&self) -> u32 {
        if self.cr0 & cr0::EXIDENABLE != 0 {
            u32::MAX
        } else {
            let ids = self.config.stream_id_mask();
            stream::SMR_VALID | ids << 16 | ids
        }
    }

    pub(super) fn s2cr_writable(&self) -> u32 {
        let ids = if self.config.extended_ids { stream::S2CR_EXIDVALID } else { 0 };
        stream::S2CR_WRITABLE & !stream::S2CR_EXIDVALID | ids
    }

    /// TYPE of a bank for stage 2 only is 0b00.
    pub(super) fn set_cbar(&mut self, number: usize, value: u32) {
        let only_stage2 = number < usize::from(self.config.stage2_banks);
        self.banks[number].cbar = if only_stage2 { value & !(0b11 << 16) } else { value };
    }

    pub(super) fn set_cba2r(&mut self, number: usize, value: u32) {
        let va64 = if self.config.granules == 0 { 0 } else { cba2r::VA64 };
        let vmid16 = if self.config.vmid16 { cba2r::VMID16 } else { 0 };
        self.banks[number].cba2r = value & (va64 | vmid16);
    }

    pub(super) fn vmid(&self, bank: usize) -> u16 {
        self.banks[bank].vmid(self.cr0)
    }

    /// The stream mapping group of a stream (IHI 0062, "Stream mapping").
    fn group(&self, id: u16) -> Result<Option<usize>, GlobalFault> {
        if self.config.streams == StreamMatchSupport::Indexing {
            let number = usize::from(id);
            return Ok(Some(number).filter(|number| *number < self.s2cr.len()));
        }
        let extended = self.cr0 & cr0::EXIDENABLE != 0;
        let matches = |number: &usize| {
            let (smr, s2cr) = (self.smr[*number], self.s2cr[*number]);
            let (valid, bits) = if extended {
                (s2cr & stream::S2CR_EXIDVALID != 0, u16::MAX)
            } else {
                (smr & stream::SMR_VALID != 0, u16::MAX >> 1)
            };
            valid && (id ^ low16(smr)) & !low16(smr >> 16) & bits == 0
        };
        let mut matching = (0..self.smr.len()).filter(matches);
        match (matching.next(), matching.next()) {
            (Some(_), Some(_)) => Err(GlobalFault::StreamMatchConflict),
            (first, _) => Ok(first),
        }
    }

    /// Where a stream's transactions go, by SMMU_S2CRn.TYPE. The reserved type is taken as fault.
    pub(super) fn route(&self, id: u16) -> Result<Route, GlobalFault> {
        let Some(group) = self.group(id)? else {
            return if self.cr0 & cr0::USFCFG == 0 {
                Ok(Route::Bypass)
            } else {
                Err(GlobalFault::UnidentifiedStream)
            };
        };
        let s2cr = self.s2cr[group];
        match field(s2cr, 17, 16) {
            0b00 => {
                let bank = usize::try_from(field(s2cr, 7, 0)).unwrap_or(usize::MAX);
                let privilege = match field(s2cr, 25, 24) {
                    0b11 => AccessPrivilege::Privileged,
                    _ => AccessPrivilege::Unprivileged,
                };
                if bank < self.banks.len() {
                    Ok(Route::Bank(bank, privilege))
                } else {
                    Err(GlobalFault::UnimplementedContextBank)
                }
            }
            0b01 => Ok(Route::Bypass),
            _ => Err(GlobalFault::InvalidContext),
        }
    }

    /// Whether the stages that a bank asks for are there.
    pub(super) fn has_stages(&self, kind: BankType) -> bool {
        let stages = self.config.stages;
        match kind {
            BankType::Two => stages.two(),
            BankType::OneBypass | BankType::OneFault => stages.one(),
            BankType::Nested => stages == super::config::Stages::Nested,
        }
    }

    /// Records a global fault; one that finds another is only MULTI.
    pub(super) fn record_global(
        &mut self,
        fault: GlobalFault,
        transaction: Transaction,
        nested: u32,
    ) {
        self.counters.global_faults += 1;
        let bit = match fault {
            GlobalFault::InvalidContext => gfsr::ICF,
            GlobalFault::UnidentifiedStream => gfsr::USF,
            GlobalFault::StreamMatchConflict => gfsr::SMCF,
            GlobalFault::UnimplementedContextBank => gfsr::UCBF,
        };
        if self.gfsr != 0 {
            self.gfsr |= gfsr::MULTI;
            return;
        }
        self.gfsr = bit;
        self.gfar = transaction.iova.get();
        let wnr = match transaction.access {
            Access::Read => 0,
            Access::Write => gfsr::SYNR0_WNR,
        };
        self.gfsynr = [wnr | nested, transaction.stream.into()];
    }

    pub(super) fn accept(&mut self, origin: Origin, what: Invalidation) {
        match self.behaviour.invalidations {
            TakesEffect::AtSync => self.syncs.accept(origin, what),
            TakesEffect::AtOnce => self.tlb.invalidate(&what),
        }
    }

    pub(super) fn sync(&mut self, origin: Origin) {
        match origin {
            Origin::Global => self.counters.global_syncs += 1,
            Origin::Bank(_) => self.counters.bank_syncs += 1,
        }
        let completed = self.syncs.begin(origin, self.behaviour.sync);
        completed.iter().for_each(|what| self.tlb.invalidate(what));
    }

    /// A read of a sync's status register, of which bit 0 says that it is active.
    pub(super) fn sync_status(&mut self, origin: Origin) -> u32 {
        self.counters.status_reads += 1;
        match self.syncs.poll(origin, self.behaviour.sync) {
            Ok(completed) => {
                completed.iter().for_each(|what| self.tlb.invalidate(what));
                0
            }
            Err(_) => 1,
        }
    }

    /// Which of the fault bits that were cleared come back at once.
    pub(super) fn storm(&mut self, cleared: u32) -> u32 {
        if cleared == 0 || self.behaviour.storm == 0 {
            return 0;
        }
        self.behaviour.storm -= 1;
        cleared
    }
}
