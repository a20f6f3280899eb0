//! The manual's registers, commands, structures and events. No logic.
//!
//! Source: Arm System Memory Management Unit Architecture Specification, version 3, IHI 0070: 6.3
//! "Register formats", 4 "Commands", 5 "Data structure formats" and 7.3 "Event records".

/// Registers by their offset (6.2).
pub(super) mod reg {
    pub(crate) const IDR0: u64 = 0x0;
    pub(crate) const IDR1: u64 = 0x4;
    pub(crate) const IDR3: u64 = 0xc;
    pub(crate) const IDR5: u64 = 0x14;
    pub(crate) const CR0: u64 = 0x20;
    pub(crate) const CR0ACK: u64 = 0x24;
    pub(crate) const CR1: u64 = 0x28;
    pub(crate) const CR2: u64 = 0x2c;
    pub(crate) const GBPA: u64 = 0x44;
    pub(crate) const IRQ_CTRL: u64 = 0x50;
    pub(crate) const IRQ_CTRLACK: u64 = 0x54;
    pub(crate) const GERROR: u64 = 0x60;
    pub(crate) const GERRORN: u64 = 0x64;
    pub(crate) const GERROR_IRQ_CFG0: u64 = 0x68;
    pub(crate) const STRTAB_BASE: u64 = 0x80;
    pub(crate) const STRTAB_BASE_CFG: u64 = 0x88;
    pub(crate) const CMDQ_BASE: u64 = 0x90;
    pub(crate) const CMDQ_PROD: u64 = 0x98;
    pub(crate) const CMDQ_CONS: u64 = 0x9c;
    pub(crate) const EVENTQ_BASE: u64 = 0xa0;
    pub(crate) const EVENTQ_IRQ_CFG0: u64 = 0xb0;
    /// In the second page of 64K.
    pub(crate) const EVENTQ_PROD: u64 = 0x1_00a8;
    pub(crate) const EVENTQ_CONS: u64 = 0x1_00ac;
}

/// SMMU_IDR0 (6.3.1).
pub(super) mod idr0 {
    pub(crate) const S2P: u32 = 1 << 0;
    pub(crate) const S1P: u32 = 1 << 1;
    /// TTF, bits 3:2: bit 3 is AArch64 tables.
    pub(crate) const TTF_AARCH64: u32 = 1 << 3;
    pub(crate) const COHACC: u32 = 1 << 4;
    /// HTTU, bits 7:6: 0b10 is access flag and dirty state.
    pub(crate) const HTTU_SHIFT: u32 = 6;
    pub(crate) const HTTU_DIRTY: u32 = 0b10;
    pub(crate) const HYP: u32 = 1 << 9;
    pub(crate) const ATS: u32 = 1 << 10;
    pub(crate) const ASID16: u32 = 1 << 12;
    pub(crate) const VMID16: u32 = 1 << 18;
    /// TTENDIAN, bits 22:21: 0b11 is big-endian tables only.
    pub(crate) const TTENDIAN_SHIFT: u32 = 21;
    pub(crate) const TTENDIAN_BIG: u32 = 0b11;
    /// STALL_MODEL, bits 25:24.
    pub(crate) const STALL_MODEL_SHIFT: u32 = 24;
    pub(crate) const STALL_MODEL_BOTH: u32 = 0b00;
    pub(crate) const STALL_MODEL_FORCED: u32 = 0b10;
    /// ST_LEVEL, bits 28:27: 0b01 is two levels besides linear ones.
    pub(crate) const ST_LEVEL_SHIFT: u32 = 27;
    pub(crate) const ST_LEVEL_TWO: u32 = 0b01;
}

/// SMMU_IDR1 (6.3.2).
pub(super) mod idr1 {
    /// SIDSIZE, bits 5:0.
    pub(crate) const SIDSIZE_BITS: u32 = 6;
    /// EVENTQS, bits 20:16, and CMDQS, bits 25:21.
    pub(crate) const EVENTQS_SHIFT: u32 = 16;
    pub(crate) const CMDQS_SHIFT: u32 = 21;
    pub(crate) const QUEUES_PRESET: u32 = 1 << 29;
    pub(crate) const TABLES_PRESET: u32 = 1 << 30;
}

/// SMMU_IDR3 (6.3.4).
pub(super) mod idr3 {
    pub(crate) const FWB: u32 = 1 << 8;
    pub(crate) const STT: u32 = 1 << 9;
    pub(crate) const RIL: u32 = 1 << 10;
    /// BBML, bits 12:11: 0b10 is level 2.
    pub(crate) const BBML_SHIFT: u32 = 11;
    pub(crate) const BBML_2: u32 = 0b10;
}

/// SMMU_IDR5 (6.3.6).
pub(super) mod idr5 {
    /// GRAN4K, GRAN16K and GRAN64K.
    pub(crate) const GRAN4K: u32 = 1 << 4;
    pub(crate) const GRAN16K: u32 = 1 << 5;
    pub(crate) const GRAN64K: u32 = 1 << 6;
    /// VAX, bits 11:10: 0b01 is 52 bits.
    pub(crate) const VAX_SHIFT: u32 = 10;
    pub(crate) const VAX_52: u32 = 0b01;
    /// OAS, bits 2:0, by its value.
    pub(crate) const OUTPUT_BITS: [u32; 7] = [32, 36, 40, 42, 44, 48, 52];
}

/// SMMU_CR0 (6.3.9) and SMMU_CR0ACK.
pub(super) mod cr0 {
    pub(crate) const SMMUEN: u32 = 1 << 0;
    pub(crate) const EVENTQEN: u32 = 1 << 2;
    pub(crate) const CMDQEN: u32 = 1 << 3;
    /// Translated transactions of ATS are checked against the stream table.
    pub(crate) const ATSCHK: u32 = 1 << 4;
}

/// SMMU_CR1 (6.3.11): how tables and queues are accessed.
pub(super) mod cr1 {
    /// TABLE_SH, TABLE_OC, TABLE_IC, QUEUE_SH, QUEUE_OC and QUEUE_IC: inner shareable and
    /// write-back.
    pub(crate) const CACHED: u32 = 0b11 << 10 | 1 << 8 | 1 << 6 | 0b11 << 4 | 1 << 2 | 1;
    /// The same: outer shareable and non-cacheable.
    pub(crate) const NON_CACHEABLE: u32 = 0b10 << 10 | 0b10 << 4;
}

/// SMMU_CR2 (6.3.12).
pub(super) mod cr2 {
    /// Accesses by streams that the table has no entry for are recorded.
    pub(crate) const RECINVSID: u32 = 1 << 1;
    /// CPUs' broadcast invalidations are not for the SMMU.
    pub(crate) const PTM: u32 = 1 << 2;
}

/// SMMU_GBPA (6.3.15): what becomes of accesses while SMMUEN is clear.
pub(super) mod gbpa {
    pub(crate) const ABORT: u32 = 1 << 20;
    pub(crate) const UPDATE: u32 = 1 << 31;
}

/// SMMU_IRQ_CTRL (6.3.16).
pub(super) mod irq_ctrl {
    pub(crate) const GERROR: u32 = 1 << 0;
    pub(crate) const EVENTQ: u32 = 1 << 2;
}

/// SMMU_GERROR (6.3.18): an error is active where it differs from SMMU_GERRORN.
pub(super) mod gerror {
    pub(crate) const CMDQ_ERR: u32 = 1 << 0;
    pub(crate) const EVENTQ_ABT_ERR: u32 = 1 << 2;
    pub(crate) const SFM_ERR: u32 = 1 << 8;
}

/// SMMU_STRTAB_BASE and SMMU_STRTAB_BASE_CFG (6.3.24, 6.3.25).
pub(super) mod strtab {
    /// Reads may allocate in caches.
    pub(crate) const READ_ALLOCATE: u64 = 1 << 62;
    /// FMT, bits 17:16, and SPLIT, bits 10:6; LOG2SIZE is bits 5:0.
    pub(crate) const FMT_TWO_LEVEL: u32 = 0b01 << 16;
    pub(crate) const SPLIT_SHIFT: u32 = 6;
}

/// Queues (3.5.1, 6.3.26 to 6.3.31).
pub(super) mod queue {
    /// In the base: accesses may allocate in caches. LOG2SIZE is bits 4:0.
    pub(crate) const ALLOCATE: u64 = 1 << 62;
    /// The most places that an index can tell apart, log2.
    pub(crate) const MAX_LG2: u32 = 19;
    /// CMDQ_CONS.ERR, bits 30:24.
    pub(crate) const ERR_SHIFT: u32 = 24;
    pub(crate) const ERR_MASK: u32 = 0x7f;
    /// The command is one that the SMMU does not know (7.1). It has to be replaced.
    pub(crate) const CERROR_ILL: u32 = 1;
    /// EVENTQ_PROD.OVFLG and EVENTQ_CONS.OVACKFLG: records were lost while they differ.
    pub(crate) const OVERFLOW: u32 = 1 << 31;
}

/// Commands (4.1 to 4.7): two words, the opcode in bits 7:0.
pub(super) mod cmd {
    pub(crate) const CFGI_STE: u64 = 0x03;
    /// CFGI_STE_RANGE of all streams.
    pub(crate) const CFGI_ALL: u64 = 0x04;
    pub(crate) const CFGI_ALL_RANGE: u64 = 31;
    pub(crate) const TLBI_NH_ASID: u64 = 0x11;
    pub(crate) const TLBI_NH_VA: u64 = 0x12;
    pub(crate) const TLBI_EL2_ALL: u64 = 0x20;
    pub(crate) const TLBI_S12_VMALL: u64 = 0x28;
    pub(crate) const TLBI_S2_IPA: u64 = 0x2a;
    pub(crate) const TLBI_NSNH_ALL: u64 = 0x30;
    pub(crate) const RESUME: u64 = 0x44;
    pub(crate) const STALL_TERM: u64 = 0x45;
    pub(crate) const SYNC: u64 = 0x46;

    /// The stream, bits 63:32 of word 0.
    pub(crate) const SID_SHIFT: u32 = 32;
    /// VMID, bits 47:32, and ASID, bits 63:48, of word 0.
    pub(crate) const VMID_SHIFT: u32 = 32;
    pub(crate) const ASID_SHIFT: u32 = 48;
    /// NUM, bits 16:12, and SCALE, bits 24:20, of word 0: `(NUM + 1) * 2^SCALE` granules.
    pub(crate) const NUM_SHIFT: u32 = 12;
    pub(crate) const SCALE_SHIFT: u32 = 20;
    pub(crate) const MAX_SCALE: u32 = 31;
    /// Only the last level of what is cached, bit 0 of word 1. The address is bits 63:12.
    pub(crate) const LEAF: u64 = 1 << 0;
    /// TTL, bits 9:8, the leaves' level, and TG, bits 11:10, the granule, of word 1.
    pub(crate) const TTL_SHIFT: u32 = 8;
    pub(crate) const TG_SHIFT: u32 = 10;
    /// RESUME: Ac, bit 12, tries again; Ab, bit 13, ends with an abort.
    pub(crate) const RESUME_RETRY: u64 = 1 << 12;
    pub(crate) const RESUME_ABORT: u64 = 1 << 13;
}

/// Stream table entries (5.2), of eight words, and the descriptors of the first level (5.1).
pub(super) mod ste {
    /// log2 of an entry's bytes and words.
    pub(crate) const LG2_SIZE: u32 = 6;
    pub(crate) const LG2_WORDS: u32 = 3;

    pub(crate) const VALID: u64 = 1 << 0;
    /// Config, bits 3:1 of word 0.
    pub(crate) const CONFIG: u64 = 0b111 << 1;
    pub(crate) const ABORT: u64 = 0b000 << 1;
    pub(crate) const BYPASS: u64 = 0b100 << 1;
    pub(crate) const STAGE_1: u64 = 0b101 << 1;
    pub(crate) const STAGE_2: u64 = 0b110 << 1;

    /// S1CIR, S1COR and S1CSH, bits 3:2, 5:4 and 7:6 of word 1: how context descriptors are read.
    /// Write-back and inner shareable, or non-cacheable and outer shareable.
    pub(crate) const CD_CACHED: u64 = 0b01 << 2 | 0b01 << 4 | 0b11 << 6;
    pub(crate) const CD_NON_CACHEABLE: u64 = 0b10 << 6;
    /// S2FWB, bit 25 of word 1.
    pub(crate) const S2FWB: u64 = 1 << 25;
    /// SHCFG, bits 45:44 of word 1: as the access says.
    pub(crate) const SHCFG_INCOMING: u64 = 0b01 << 44;

    /// VTCR_EL2's bits 18:0 at bits 50:32 of word 2; S2VMID is bits 15:0.
    pub(crate) const VTCR_SHIFT: u32 = 32;
    pub(crate) const VTCR_BITS: u32 = 19;
    pub(crate) const S2AA64: u64 = 1 << 51;
    pub(crate) const S2HD: u64 = 1 << 55;
    pub(crate) const S2HA: u64 = 1 << 56;
    pub(crate) const S2S: u64 = 1 << 57;
    pub(crate) const S2R: u64 = 1 << 58;

    /// What is looked at, by word, whatever else there is: the entry's kind.
    pub(crate) const USED_ALWAYS: [u64; 4] = [VALID | CONFIG, 0, 0, 0];
    /// MTCFG, MemAttr, ALLOCCFG, SHCFG, NSCFG, PRIVCFG and INSTCFG.
    pub(crate) const USED_BYPASS: [u64; 4] = [0, 0x000f_f1ff_0000_0000, 0, 0];
    /// All of word 0; S1DSS to S1CSH, DRE to MEV, S1MPAM, S1STALLD, EATS and STRW; S2VMID.
    pub(crate) const USED_STAGE_1: [u64; 4] = [u64::MAX, 0xfc0f_00ff, 0xffff, 0];
    /// S2HWU, DRE to MEV, S2FWB, S1MPAM and EATS; all of words 2 and 3.
    pub(crate) const USED_STAGE_2: [u64; 4] = [0, 0x360f_0f00, u64::MAX, u64::MAX];

    /// Span, bits 4:0 of a first-level descriptor: `2^(Span - 1)` entries.
    pub(crate) const fn span(lg2_entries: u32) -> u64 {
        lg2_entries as u64 + 1
    }
}

/// Context descriptors (5.4), of eight words.
pub(super) mod cd {
    pub(crate) const LG2_SIZE: u32 = 6;

    /// TxSZ, IRx, ORx and SHx of either half, where TCR_EL1 has them, and IPS.
    pub(crate) const AS_IN_TCR: u64 = 0x7_3f3f_3f3f;
    /// TG0 and TG1, at bits 15:14 and 31:30 of TCR_EL1, are 8 bits lower.
    pub(crate) const TCR_TG: u64 = 0xc000_c000;
    pub(crate) const TG_DOWN: u32 = 8;
    /// EPD0 and EPD1, at bits 7 and 23 of TCR_EL1, are 7 bits higher.
    pub(crate) const TCR_EPD: u64 = 1 << 7 | 1 << 23;
    pub(crate) const EPD_UP: u32 = 7;
    /// HA and HD of TCR_EL1.
    pub(crate) const TCR_HA: u64 = 1 << 39;
    pub(crate) const TCR_HD: u64 = 1 << 40;

    pub(crate) const VALID: u64 = 1 << 31;
    pub(crate) const AA64: u64 = 1 << 41;
    pub(crate) const HD: u64 = 1 << 42;
    pub(crate) const HA: u64 = 1 << 43;
    /// Accesses that fault are stalled.
    pub(crate) const S: u64 = 1 << 44;
    /// Faults are recorded.
    pub(crate) const R: u64 = 1 << 45;
    /// Accesses that are terminated end with an abort.
    pub(crate) const A: u64 = 1 << 46;
    /// The ASID is the SMMU's own, not that of a process.
    pub(crate) const ASET: u64 = 1 << 47;
    pub(crate) const ASID_SHIFT: u32 = 48;
}

/// Fields of VTCR_EL2 that an entry has elsewhere (DDI 0487, D24).
pub(super) mod vtcr {
    pub(crate) const HA: u64 = 1 << 21;
    pub(crate) const HD: u64 = 1 << 22;
}

/// Event records (7.3), of four words.
pub(super) mod event {
    pub(crate) const LG2_SIZE: u32 = 5;
    pub(crate) const LG2_WORDS: u32 = 2;

    pub(crate) const F_UUT: u32 = 0x01;
    pub(crate) const C_BAD_STREAMID: u32 = 0x02;
    pub(crate) const F_STE_FETCH: u32 = 0x03;
    pub(crate) const C_BAD_STE: u32 = 0x04;
    pub(crate) const F_BAD_ATS_TREQ: u32 = 0x05;
    pub(crate) const F_STREAM_DISABLED: u32 = 0x06;
    pub(crate) const F_TRANSL_FORBIDDEN: u32 = 0x07;
    pub(crate) const C_BAD_SUBSTREAMID: u32 = 0x08;
    pub(crate) const F_CD_FETCH: u32 = 0x09;
    pub(crate) const C_BAD_CD: u32 = 0x0a;
    pub(crate) const F_WALK_EABT: u32 = 0x0b;
    pub(crate) const F_TRANSLATION: u32 = 0x10;
    pub(crate) const F_ADDR_SIZE: u32 = 0x11;
    pub(crate) const F_ACCESS: u32 = 0x12;
    pub(crate) const F_PERMISSION: u32 = 0x13;
    pub(crate) const F_TLB_CONFLICT: u32 = 0x20;
    pub(crate) const F_CFG_CONFLICT: u32 = 0x21;
    pub(crate) const F_VMS_FETCH: u32 = 0x25;

    /// The number, bits 7:0 of word 0, and the stream, bits 63:32.
    pub(crate) const NUMBER: u64 = 0xff;
    pub(crate) const SID_SHIFT: u32 = 32;
    /// STAG, bits 15:0 of word 1.
    pub(crate) const STAG: u64 = 0xffff;
    pub(crate) const STALL: u64 = 1 << 31;
    /// InD: an instruction fetch. RnW: a read.
    pub(crate) const IND: u64 = 1 << 34;
    pub(crate) const RNW: u64 = 1 << 35;
}
