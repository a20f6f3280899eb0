//! A translation context bank, and what its registers say of tables.

use dmaspan::{Iova, IovaRange, lg2};

use super::config::{Aarch32, SmmuConfig, output_code};
use super::spec::{cba2r, cr0, fsr, halves, low16, low16_of_u64, sctlr, tcr};
use super::spec::{field, joined};
use super::stall::Stalls;
use crate::walker::arm_lpae::{
    AccessPrivilege, AddressHalf, Arm32LpaeS1Walker, Arm32LpaeS2Walker, Arm32S1Registers,
    Arm32S2Registers, ArmLpaeS1Walker, ArmLpaeS2Walker, ArmS1WalkRegisters, ArmS2WalkRegisters,
    LpaeWalker,
};
use crate::walker::arm_v7s::{ArmV7sWalkRegisters, ArmV7sWalker, SCTLR_AFE, SCTLR_TRE};
use crate::walker::{Translated, Walker};

/// Which registers a bank has, as SMMU_CBARn.TYPE says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BankType {
    /// 0b00: a stage 2 context.
    Two,
    /// 0b01: stage 1 and no stage 2.
    OneBypass,
    /// 0b10: stage 1; what it translates faults.
    OneFault,
    /// 0b11: stage 1, then the stage 2 context of the bank SMMU_CBARn.CBNDX.
    Nested,
}

/// The registers of a bank that are in the bank's page and in global space 1.
#[derive(Debug, Default)]
pub(super) struct Bank {
    pub(super) cbar: u32,
    pub(super) cba2r: u32,
    pub(super) frsynra: u32,
    pub(super) sctlr: u32,
    pub(super) actlr: u32,
    pub(super) tcr2: u32,
    pub(super) ttbr: [u64; 2],
    pub(super) tcr: u32,
    pub(super) contextidr: u32,
    pub(super) mair: [u32; 2],
    pub(super) fsr: u32,
    pub(super) far: u64,
    pub(super) fsynr0: u32,
    pub(super) ipafar: u64,
    /// The upper half of each invalidation by address, from TLBIVA on, until the lower is written.
    pub(super) upper: [u32; 8],
    pub(super) stalls: Stalls,
}

impl Bank {
    /// Puts words into every register.
    pub(super) fn fill(&mut self, word: &mut impl FnMut() -> u32) {
        (self.cbar, self.cba2r, self.frsynra) = (word(), word(), word());
        (self.sctlr, self.actlr, self.tcr) = (word(), word(), word());
        (self.tcr2, self.contextidr, self.fsynr0) = (word(), word(), word());
        self.fsr = word() & (fsr::FAULTS | fsr::FORMAT);
        self.mair = [word(), word()];
        self.ttbr = [joined([word(), word()]), joined([word(), word()])];
        (self.far, self.ipafar) = (joined([word(), word()]), joined([word(), word()]));
    }

    pub(super) fn kind(&self) -> BankType {
        match field(self.cbar, 17, 16) {
            0b00 => BankType::Two,
            0b01 => BankType::OneBypass,
            0b10 => BankType::OneFault,
            _ => BankType::Nested,
        }
    }

    /// The bank of stage 2 of a nested context.
    pub(super) fn stage2_bank(&self) -> usize {
        usize::try_from(field(self.cbar, 15, 8)).unwrap_or(usize::MAX)
    }

    /// Whether the tables are AArch64's.
    pub(super) fn is_aarch64(&self) -> bool {
        self.cba2r & cba2r::VA64 != 0
    }

    /// The VMID, where sCR0.VMID16EN selects SMMU_CBA2Rn.VMID16 or else SMMU_CBARn.VMID.
    pub(super) fn vmid(&self, cr0: u32) -> u16 {
        if cr0 & cr0::VMID16EN != 0 { low16(self.cba2r >> 16) } else { low16(self.cbar & 0xff) }
    }

    /// The bits of an ASID that count: 8, or 16 in AArch64 with TCR2.AS.
    pub(super) fn asid_mask(&self) -> u16 {
        if self.is_aarch64() && self.tcr2 & tcr::TCR2_AS != 0 { 0xffff } else { 0xff }
    }

    /// The current ASID: in TTBR0 or TTBR1, as TCR.A1 says, or in CONTEXTIDR for short
    /// descriptors.
    pub(super) fn asid(&self) -> u16 {
        let asid = if !self.is_aarch64() && self.tcr & tcr::EAE == 0 {
            low16(self.contextidr)
        } else {
            let [ttbr0, ttbr1] = self.ttbr;
            low16_of_u64((if self.tcr & tcr::A1 == 0 { ttbr0 } else { ttbr1 }) >> 48)
        };
        asid & self.asid_mask()
    }

    /// FSR.FORMAT: the format of the tables, for the fault that is recorded.
    pub(super) fn format(&self) -> u32 {
        let format = match (self.is_aarch64(), self.kind()) {
            (true, _) => 0b10,
            (false, BankType::Two) => 0b01,
            (false, _) if self.tcr & tcr::EAE != 0 => 0b01,
            (false, _) => 0b00,
        };
        format << fsr::FORMAT.trailing_zeros()
    }

    /// The address that stage 1 of AArch64 translates: the upstream bus has fewer bits than 64, and
    /// TCR2.SEP says which of them is the sign.
    pub(super) fn extended(&self, iova: Iova, upstream_bits: u32) -> Iova {
        let carried = iova.get() & lg2::mask(upstream_bits);
        if !self.is_aarch64() || self.kind() == BankType::Two {
            return Iova::new(carried);
        }
        let sign = match field(self.tcr2, 17, 15) {
            0 => 31,
            1 => 35,
            2 => 39,
            3 => 41,
            4 => 43,
            5 => 47,
            // 0b110 is reserved, and read as 0b111: the bit above the 48 of an address.
            _ => 48,
        };
        let negative = carried & lg2::size(sign) != 0;
        Iova::new(if negative { carried | !lg2::mask(sign) } else { carried })
    }

    /// What walks the tables of stage 1 for `va`; `None` where the registers describe no tables.
    pub(super) fn stage1(
        &self,
        config: &SmmuConfig,
        va: Iova,
        privilege: AccessPrivilege,
    ) -> Option<AnyWalker> {
        let [lower, upper] = [AddressHalf::Lower, AddressHalf::Upper].map(|half| {
            if self.is_aarch64() {
                self.stage1_aarch64(config, half, privilege)
            } else if self.tcr & tcr::EAE != 0 {
                self.stage1_long(config, half, privilege)
            } else {
                self.stage1_short(config, half, privilege)
            }
        });
        let of_half = |walker: &Option<AnyWalker>| {
            walker.as_ref().is_some_and(|walker| walker.input_range().contains(va))
        };
        if of_half(&upper) { upper } else { lower.or(upper) }
    }

    fn ttbr_of(&self, half: AddressHalf) -> u64 {
        let [ttbr0, ttbr1] = self.ttbr;
        match half {
            AddressHalf::Lower => ttbr0,
            AddressHalf::Upper => ttbr1,
        }
    }

    /// TCR2\[6:0\] is TCR_EL1\[38:32\]: PASize, AS, TBI0 and TBI1. HA and HD are not there.
    fn stage1_aarch64(
        &self,
        config: &SmmuConfig,
        half: AddressHalf,
        privilege: AccessPrivilege,
    ) -> Option<AnyWalker> {
        let pa_size = field(self.tcr2, 2, 0).min(output_code(config));
        let upper = field(self.tcr2, 6, 3) << 3 | pa_size;
        let walker = ArmLpaeS1Walker::new(ArmS1WalkRegisters {
            ttbr: self.ttbr_of(half),
            tcr: joined([self.tcr, upper]),
            mair: joined(self.mair),
            half,
            privilege,
        });
        walker.ok().filter(|walker| has_granule(config, walker.granule_lg2())).map(AnyWalker::long)
    }

    fn stage1_long(
        &self,
        config: &SmmuConfig,
        half: AddressHalf,
        privilege: AccessPrivilege,
    ) -> Option<AnyWalker> {
        let registers = Arm32S1Registers {
            ttbr: self.ttbr_of(half),
            ttbcr: self.tcr,
            mair: self.mair,
            half,
            privilege,
        };
        let walker = Arm32LpaeS1Walker::new(registers).ok()?;
        (config.aarch32 != Aarch32::None).then_some(AnyWalker::long(walker))
    }

    fn stage1_short(
        &self,
        config: &SmmuConfig,
        half: AddressHalf,
        privilege: AccessPrivilege,
    ) -> Option<AnyWalker> {
        let [ttbr, _] = halves(self.ttbr_of(half));
        let flag = |bit, as_sctlr| if self.sctlr & bit != 0 { as_sctlr } else { 0 };
        let [prrr, nmrr] = self.mair;
        let registers = ArmV7sWalkRegisters {
            ttbr,
            ttbcr: self.tcr,
            prrr,
            nmrr,
            sctlr: flag(sctlr::TRE, SCTLR_TRE) | flag(sctlr::AFE, SCTLR_AFE),
            half,
            privilege,
            ..Default::default()
        };
        let walker = ArmV7sWalker::new(registers).ok()?;
        (config.aarch32 == Aarch32::LongAndShort).then_some(AnyWalker::Short(walker))
    }

    /// What walks the tables of stage 2; `None` where the registers describe no tables.
    pub(super) fn stage2(&self, config: &SmmuConfig) -> Option<AnyWalker> {
        let [vttbr, _] = self.ttbr;
        let walker = if self.is_aarch64() {
            // PASize is in bits 18:16; bits 22:21 would be HA and HD.
            let pa_size = field(self.tcr, 18, 16).min(output_code(config));
            let vtcr = self.tcr & !(0b111 << 16 | 0b11 << 21) | pa_size << 16;
            let registers = ArmS2WalkRegisters { vttbr, vtcr: vtcr.into(), ..Default::default() };
            let walker = ArmLpaeS2Walker::new(registers).ok()?;
            has_granule(config, walker.granule_lg2()).then_some(AnyWalker::long(walker))?
        } else {
            let registers = Arm32S2Registers { vttbr, vtcr: self.tcr };
            let walker = Arm32LpaeS2Walker::new(registers).ok()?;
            (config.aarch32 != Aarch32::None).then_some(AnyWalker::long(walker))?
        };
        let last = walker.input_range().last().get();
        (last <= lg2::mask(config.ipa_bits)).then_some(walker)
    }
}

fn has_granule(config: &SmmuConfig, granule_lg2: u32) -> bool {
    config.granules & lg2::size(granule_lg2) != 0
}

/// A walker of any format of an SMMUv2.
#[derive(Clone, Copy, Debug)]
pub(super) enum AnyWalker {
    /// Long descriptors of either stage.
    Long(LpaeWalker<()>),
    /// Short descriptors, which stage 1 alone has.
    Short(ArmV7sWalker),
}

impl AnyWalker {
    fn long<R>(walker: LpaeWalker<R>) -> Self {
        Self::Long(walker.without_registers())
    }

    pub(super) fn as_dyn(&self) -> &dyn Walker {
        match self {
            Self::Long(walker) => walker,
            Self::Short(walker) => walker,
        }
    }

    fn input_range(&self) -> IovaRange {
        match self {
            Self::Long(walker) => walker.input_range(),
            Self::Short(walker) => walker.input_range(),
        }
    }

    /// Whether a leaf is for every ASID: nG is 0, which stage 2 has not.
    pub(super) fn is_global(&self, leaf: &Translated) -> bool {
        let not_global = match (self, leaf.level) {
            (Self::Long(walker), _) if walker.is_stage2() => return false,
            (Self::Long(_), _) | (Self::Short(_), 2) => 11,
            (Self::Short(_), _) => 17,
        };
        leaf.step.entry & lg2::size(not_global) == 0
    }

    /// log2 of the least that the TLB may hold of a leaf. The contiguous bit is a hint, and each
    /// entry of the group a leaf; the repeated entries of a large page and of a supersection are
    /// one.
    pub(super) fn entry_lg2(&self, leaf: &Translated) -> u32 {
        match self {
            Self::Long(_) => leaf.leaf_lg2,
            Self::Short(_) => leaf.group_lg2,
        }
    }
}
