//! A context bank translates for one domain: the driver sets it up here, and tells it what to
//! forget.

use dmaspan::PhysAddr;

use super::Stalls;
use super::features::{Has, SmmuV2Features};
use super::format::sealed::SmmuTables;
use super::format::{Context, Kind, Values, sign_position};
use super::registers::Registers;
use super::spec::{TTBR_ASID_SHIFT, bank, cba2r, cbar, fsr, gr0, gr1, resume, sctlr, tcr2};
use crate::mmio::Mmio;
use crate::stage::Stage;

/// A context bank that a domain has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bank {
    /// Its number.
    pub(super) index: u32,
    pub(super) context: Context,
    /// The ASID at stage 1, the VMID at stage 2.
    pub(super) id: u32,
}

impl Bank {
    /// Says what kind of bank it is. It translates nothing yet.
    pub(super) fn prepare<R: Mmio>(&self, registers: &Registers<R>, features: &SmmuV2Features) {
        let va64 = if self.context.tables == Kind::AArch64 { cba2r::VA64 } else { 0 };
        // Banks of stage 1 have VMID 0, which no bank of stage 2 has.
        let (kind, vmid) = match self.context.stage {
            Stage::First => (cbar::STAGE_1 | cbar::STAGE_2_ADDS_NOTHING, 0),
            Stage::Second => (cbar::STAGE_2, self.id),
        };
        let (cba2r, cbar) = match features.wide_vmids {
            Has::Yes => (va64 | vmid << cba2r::VMID16_SHIFT, kind),
            Has::No => (va64, kind | vmid),
        };
        registers.bank(self.index).write(bank::SCTLR, 0);
        registers.write_attribute(gr1::CBA2R, self.index, cba2r);
        registers.write_attribute(gr1::CBAR, self.index, cbar);
    }

    /// Gives the bank its tables, and lets it translate.
    pub(super) fn translate<R: Mmio, F: SmmuTables>(
        &self,
        registers: &Registers<R>,
        features: &SmmuV2Features,
        (format, root): (&F, PhysAddr),
        stalls: Stalls,
    ) {
        let Values { ttbr0, tcr, output_size, mair, .. } = format.values(root);
        let asid = u64::from(self.id) << TTBR_ASID_SHIFT;
        let bank = registers.bank(self.index);
        let mut control = sctlr::M | sctlr::TRE | sctlr::AFE;
        control |= sctlr::CFRE | sctlr::CFIE | sctlr::HUPCF;
        if stalls == Stalls::Held {
            control |= sctlr::CFCFG;
        }
        bank.write(bank::TCR, tcr);
        match (self.context.stage, self.context.tables) {
            (Stage::Second, _) => bank.write64(bank::TTBR0, ttbr0),
            (Stage::First, tables) => {
                let wide = tables == Kind::AArch64;
                let tcr2 = if wide { self.upper_tcr(tcr, output_size, features) } else { 0 };
                bank.write(bank::TCR2, tcr2);
                // The ASID of short descriptors is elsewhere.
                let asid = if tables == Kind::AArch32Short { 0 } else { asid };
                bank.write64(bank::TTBR0, ttbr0 | asid);
                bank.write64(bank::TTBR1, asid);
                if tables == Kind::AArch32Short {
                    bank.write(bank::CONTEXTIDR, self.id);
                }
                bank.write(bank::MAIR0, mair[0]);
                bank.write(bank::MAIR1, mair[1]);
                control |= sctlr::ASIDPNE;
            }
        }
        bank.write(bank::SCTLR, control);
    }

    /// TCR2 of AArch64.
    fn upper_tcr(&self, tcr: u32, output_size: u32, features: &SmmuV2Features) -> u32 {
        // T0SZ, bits 5:0.
        let input_bits = 64 - (tcr & 0b11_1111);
        let sign = sign_position(input_bits, features.upstream_bits);
        output_size | tcr2::AS | sign << tcr2::SEP_SHIFT
    }

    /// Begins to forget all of the bank's ASID or VMID. The global sync completes it, and that of
    /// the bank for stage 1.
    pub(super) fn forget_all<R: Mmio>(&self, registers: &Registers<R>) {
        match self.context.stage {
            Stage::First => registers.bank(self.index).write(bank::TLBIASID, self.id),
            Stage::Second => registers.write(gr0::TLBIVMID, self.id),
        }
    }

    /// Ends the access that is stalled, if there is one. Tried again, it would be translated by the
    /// bank once more, whatever its stream has meanwhile.
    pub(super) fn end_stalled<R: Mmio>(&self, registers: &Registers<R>) {
        let bank = registers.bank(self.index);
        if bank.read(bank::FSR) & fsr::SS != 0 {
            bank.write(bank::RESUME, resume::TERMINATE);
        }
    }
}

/// Ends what firmware's tables stalled, and takes its faults out.
pub(super) fn end_faults<R: Mmio>(registers: &Registers<R>, index: u32) {
    let bank = registers.bank(index);
    let faults = bank.read(bank::FSR);
    bank.write(bank::FSR, faults);
    if faults & fsr::SS != 0 {
        bank.write(bank::RESUME, resume::TERMINATE);
    }
}

/// Takes a bank's tables away. Nothing leads to it, and nothing is under way through it.
pub(super) fn disable<R: Mmio>(registers: &Registers<R>, index: u32) {
    let bank = registers.bank(index);
    bank.write(bank::SCTLR, 0);
    bank.write64(bank::TTBR0, 0);
    end_faults(registers, index);
}
