//! Offsets and bits of the registers, as IHI 0062 has them.

/// Global register space 0 (chapter 10, "SMMU Global Register Space 0").
pub(super) mod global0 {
    pub(in super::super) const CR0: u64 = 0x000;
    pub(in super::super) const CR2: u64 = 0x008;
    pub(in super::super) const ACR: u64 = 0x010;
    pub(in super::super) const ID0: u64 = 0x020;
    pub(in super::super) const ID7: u64 = 0x03c;
    pub(in super::super) const GFAR: u64 = 0x040;
    pub(in super::super) const GFSR: u64 = 0x048;
    pub(in super::super) const GFSRRESTORE: u64 = 0x04c;
    pub(in super::super) const GFSYNR0: u64 = 0x050;
    pub(in super::super) const GFSYNR1: u64 = 0x054;
    pub(in super::super) const GFSYNR2: u64 = 0x058;
    pub(in super::super) const TLBIVMID: u64 = 0x064;
    pub(in super::super) const TLBIALLNSNH: u64 = 0x068;
    pub(in super::super) const TLBIALLH: u64 = 0x06c;
    pub(in super::super) const TLBGSYNC: u64 = 0x070;
    pub(in super::super) const TLBGSTATUS: u64 = 0x074;
    pub(in super::super) const SMR: u64 = 0x800;
    pub(in super::super) const S2CR: u64 = 0xc00;
}

/// Global register space 1 (chapter 11).
pub(super) mod global1 {
    pub(in super::super) const CBAR: u64 = 0x000;
    pub(in super::super) const CBFRSYNRA: u64 = 0x400;
    pub(in super::super) const CBA2R: u64 = 0x800;
}

/// The registers of one translation context bank (chapter 16).
pub(super) mod bank {
    pub(in super::super) const SCTLR: u64 = 0x000;
    pub(in super::super) const ACTLR: u64 = 0x004;
    pub(in super::super) const RESUME: u64 = 0x008;
    pub(in super::super) const TCR2: u64 = 0x010;
    pub(in super::super) const TTBR0: u64 = 0x020;
    pub(in super::super) const TTBR1: u64 = 0x028;
    pub(in super::super) const TCR: u64 = 0x030;
    pub(in super::super) const CONTEXTIDR: u64 = 0x034;
    pub(in super::super) const MAIR0: u64 = 0x038;
    pub(in super::super) const MAIR1: u64 = 0x03c;
    pub(in super::super) const FSR: u64 = 0x058;
    pub(in super::super) const FSRRESTORE: u64 = 0x05c;
    pub(in super::super) const FAR: u64 = 0x060;
    pub(in super::super) const FSYNR0: u64 = 0x068;
    pub(in super::super) const FSYNR1: u64 = 0x06c;
    pub(in super::super) const IPAFAR: u64 = 0x070;
    pub(in super::super) const TLBIVA: u64 = 0x600;
    pub(in super::super) const TLBIVAA: u64 = 0x608;
    pub(in super::super) const TLBIASID: u64 = 0x610;
    pub(in super::super) const TLBIALL: u64 = 0x618;
    pub(in super::super) const TLBIVAL: u64 = 0x620;
    pub(in super::super) const TLBIVAAL: u64 = 0x628;
    pub(in super::super) const TLBIIPAS2: u64 = 0x630;
    pub(in super::super) const TLBIIPAS2L: u64 = 0x638;
    pub(in super::super) const TLBSYNC: u64 = 0x7f0;
    pub(in super::super) const TLBSTATUS: u64 = 0x7f4;
}

/// SMMU_sCR0.
pub(super) mod cr0 {
    pub(in super::super) const CLIENTPD: u32 = 1 << 0;
    pub(in super::super) const GFRE: u32 = 1 << 1;
    pub(in super::super) const GFIE: u32 = 1 << 2;
    pub(in super::super) const EXIDENABLE: u32 = 1 << 3;
    pub(in super::super) const STALLD: u32 = 1 << 8;
    pub(in super::super) const USFCFG: u32 = 1 << 10;
    pub(in super::super) const SMCFCFG: u32 = 1 << 21;
    /// Bit 30 is reserved.
    pub(in super::super) const RESERVED: u32 = 1 << 30;
    pub(in super::super) const VMID16EN: u32 = 1 << 31;
}

/// SMMU_sGFSR and SMMU_sGFSYNR0.
pub(super) mod gfsr {
    pub(in super::super) const ICF: u32 = 1 << 0;
    pub(in super::super) const USF: u32 = 1 << 1;
    pub(in super::super) const SMCF: u32 = 1 << 2;
    pub(in super::super) const UCBF: u32 = 1 << 3;
    pub(in super::super) const MULTI: u32 = 1 << 31;
    /// Every bit that is not reserved: ICF, USF, SMCF, UCBF, UCIF, CAF, EF, PF, UUT, MULTI.
    pub(in super::super) const ALL: u32 = 0x8000_01ff;

    pub(in super::super) const SYNR0_NESTED: u32 = 1 << 0;
    pub(in super::super) const SYNR0_WNR: u32 = 1 << 1;
}

/// SMMU_SMRn and SMMU_S2CRn.
pub(super) mod stream {
    pub(in super::super) const SMR_VALID: u32 = 1 << 31;
    pub(in super::super) const S2CR_EXIDVALID: u32 = 1 << 10;
    /// CBNDX, EXIDVALID, TYPE, PRIVCFG and what concerns attributes of memory.
    pub(in super::super) const S2CR_WRITABLE: u32 = 0xffff_f7ff;
}

/// SMMU_CBA2Rn.
pub(super) mod cba2r {
    pub(in super::super) const VA64: u32 = 1 << 0;
    pub(in super::super) const VMID16: u32 = 0xffff << 16;
}

/// SMMU_CBn_SCTLR.
pub(super) mod sctlr {
    pub(in super::super) const M: u32 = 1 << 0;
    pub(in super::super) const TRE: u32 = 1 << 1;
    pub(in super::super) const AFE: u32 = 1 << 2;
    pub(in super::super) const CFRE: u32 = 1 << 5;
    pub(in super::super) const CFIE: u32 = 1 << 6;
    pub(in super::super) const CFCFG: u32 = 1 << 7;
    pub(in super::super) const HUPCF: u32 = 1 << 8;
}

/// SMMU_CBn_TCR and SMMU_CBn_TCR2 of stage 1.
pub(super) mod tcr {
    pub(in super::super) const A1: u32 = 1 << 22;
    pub(in super::super) const EAE: u32 = 1 << 31;
    pub(in super::super) const TCR2_AS: u32 = 1 << 4;
}

/// SMMU_CBn_FSR and SMMU_CBn_FSYNR0.
pub(super) mod fsr {
    pub(in super::super) const TF: u32 = 1 << 1;
    pub(in super::super) const AFF: u32 = 1 << 2;
    pub(in super::super) const PF: u32 = 1 << 3;
    pub(in super::super) const EF: u32 = 1 << 4;
    pub(in super::super) const ASF: u32 = 1 << 7;
    pub(in super::super) const SS: u32 = 1 << 30;
    pub(in super::super) const MULTI: u32 = 1 << 31;
    /// TF, AFF, PF, EF, TLBMCF, TLBLKF, ASF, UUT and MULTI: what a write of ones clears.
    pub(in super::super) const FAULTS: u32 = 0x8000_01fe;
    pub(in super::super) const FORMAT: u32 = 0b11 << 9;

    pub(in super::super) const SYNR0_S1PTWF: u32 = 1 << 3;
    pub(in super::super) const SYNR0_WNR: u32 = 1 << 4;
    pub(in super::super) const SYNR0_PNU: u32 = 1 << 5;
    pub(in super::super) const SYNR0_PTWF: u32 = 1 << 10;
}

/// Bits `high..=low` of a register.
pub(super) const fn field(word: u32, high: u32, low: u32) -> u32 {
    (word >> low) & (u32::MAX >> (31 - (high - low)))
}
const _: () = assert!(field(0x1234, 11, 4) == 0x23 && field(u32::MAX, 31, 0) == u32::MAX);

/// The lower and the upper half of a register of 64 bits.
pub(super) const fn halves(word: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

/// A register of 64 bits from its halves.
pub(super) fn joined([low, high]: [u32; 2]) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// Bits 15:0 of a register.
pub(super) const fn low16(word: u32) -> u16 {
    let [a, b, ..] = word.to_le_bytes();
    u16::from_le_bytes([a, b])
}

/// Bits 15:0 of a register of 64 bits.
pub(super) const fn low16_of_u64(word: u64) -> u16 {
    let [a, b, ..] = word.to_le_bytes();
    u16::from_le_bytes([a, b])
}
