//! The registers of an SMMUv2, and what their bits mean. No logic.
//!
//! Source: Arm System Memory Management Unit Architecture Specification, version 2.0, IHI 0062:
//! chapter 10 "SMMU Global Register Space 0", chapter 11 "SMMU Global Register Space 1", chapter 16
//! "SMMU Translation Context Bank", each register under its name.

/// Global register space 0: page 0.
pub(super) mod gr0 {
    /// SMMU_sCR0: the configuration of all streams.
    pub(in super::super) const CR0: u64 = 0x000;
    /// SMMU_IDR0: stages, formats, stream mapping.
    pub(in super::super) const ID0: u64 = 0x020;
    /// SMMU_IDR1: the layout of the registers, context banks.
    pub(in super::super) const ID1: u64 = 0x024;
    /// SMMU_IDR2: address sizes, granules.
    pub(in super::super) const ID2: u64 = 0x028;
    /// SMMU_IDR7: the revision of the implementation.
    pub(in super::super) const ID7: u64 = 0x03c;
    /// SMMU_sGFAR, of 64 bits: the address of a global fault.
    pub(in super::super) const GFAR: u64 = 0x040;
    /// SMMU_sGFSR: what global fault there is; cleared by writing ones.
    pub(in super::super) const GFSR: u64 = 0x048;
    /// SMMU_sGFSYNR0: the access that it ended.
    pub(in super::super) const GFSYNR0: u64 = 0x050;
    /// SMMU_sGFSYNR1: the stream that it was of, in the bits of
    /// [`STREAM_ID`](super::STREAM_ID).
    pub(in super::super) const GFSYNR1: u64 = 0x054;
    /// SMMU_TLBIVMID: forget all of a VMID.
    pub(in super::super) const TLBIVMID: u64 = 0x064;
    /// SMMU_TLBIALLNSNH: forget all that is neither secure nor of a hypervisor.
    pub(in super::super) const TLBIALLNSNH: u64 = 0x068;
    /// SMMU_TLBIALLH: forget all of a hypervisor.
    pub(in super::super) const TLBIALLH: u64 = 0x06c;
    /// SMMU_sTLBGSYNC: wait for what all of these, and those of all banks, began.
    pub(in super::super) const TLBGSYNC: u64 = 0x070;
    /// SMMU_sTLBGSTATUS: whether it waits.
    pub(in super::super) const TLBGSTATUS: u64 = 0x074;
    /// SMMU_SMR0: which streams entry 0 of the stream map matches.
    pub(in super::super) const SMR: u64 = 0x800;
    /// SMMU_S2CR0: what becomes of accesses of these streams.
    pub(in super::super) const S2CR: u64 = 0xc00;
}

/// Global register space 1: page 1.
pub(super) mod gr1 {
    /// SMMU_CBAR0: what kind of context bank 0 is.
    pub(in super::super) const CBAR: u64 = 0x000;
    /// SMMU_CBFRSYNRA0: the stream of the fault in bank 0, in the bits of
    /// [`STREAM_ID`](super::STREAM_ID).
    pub(in super::super) const CBFRSYNRA: u64 = 0x400;
    /// SMMU_CBA2R0: more about bank 0.
    pub(in super::super) const CBA2R: u64 = 0x800;
}

/// The registers of a translation context bank: a page each.
pub(super) mod bank {
    /// SMMU_CBn_SCTLR.
    pub(in super::super) const SCTLR: u64 = 0x000;
    /// SMMU_CBn_RESUME: what becomes of the access that is stalled.
    pub(in super::super) const RESUME: u64 = 0x008;
    /// SMMU_CBn_TCR2: the upper half of TCR, for stage 1.
    pub(in super::super) const TCR2: u64 = 0x010;
    /// SMMU_CBn_TTBR0, of 64 bits.
    pub(in super::super) const TTBR0: u64 = 0x020;
    /// SMMU_CBn_TTBR1, of 64 bits.
    pub(in super::super) const TTBR1: u64 = 0x028;
    /// SMMU_CBn_TCR.
    pub(in super::super) const TCR: u64 = 0x030;
    /// SMMU_CBn_CONTEXTIDR: the ASID of short descriptors.
    pub(in super::super) const CONTEXTIDR: u64 = 0x034;
    /// SMMU_CBn_MAIR0, or PRRR.
    pub(in super::super) const MAIR0: u64 = 0x038;
    /// SMMU_CBn_MAIR1, or NMRR.
    pub(in super::super) const MAIR1: u64 = 0x03c;
    /// SMMU_CBn_FSR: what fault there is; cleared by writing ones.
    pub(in super::super) const FSR: u64 = 0x058;
    /// SMMU_CBn_FAR, of 64 bits: the address of the fault.
    pub(in super::super) const FAR: u64 = 0x060;
    /// SMMU_CBn_FSYNR0: the access that faulted.
    pub(in super::super) const FSYNR0: u64 = 0x068;
    /// SMMU_CBn_TLBIVA: forget entries of an address, and walks that lead to it.
    pub(in super::super) const TLBIVA: u64 = 0x600;
    /// SMMU_CBn_TLBIASID: forget all of an ASID.
    pub(in super::super) const TLBIASID: u64 = 0x610;
    /// SMMU_CBn_TLBIVAL: forget the leaf of an address.
    pub(in super::super) const TLBIVAL: u64 = 0x620;
    /// SMMU_CBn_TLBIIPAS2: `TLBIVA` of stage 2.
    pub(in super::super) const TLBIIPAS2: u64 = 0x630;
    /// SMMU_CBn_TLBIIPAS2L: `TLBIVAL` of stage 2.
    pub(in super::super) const TLBIIPAS2L: u64 = 0x638;
    /// SMMU_CBn_TLBSYNC: wait for what these began.
    pub(in super::super) const TLBSYNC: u64 = 0x7f0;
    /// SMMU_CBn_TLBSTATUS: whether it waits.
    pub(in super::super) const TLBSTATUS: u64 = 0x7f4;
}

/// SMMU_sCR0.
pub(super) mod cr0 {
    /// GFRE: a device whose access a global fault ends is told so.
    pub(in super::super) const GFRE: u32 = 1 << 1;
    /// GFIE: global faults interrupt.
    pub(in super::super) const GFIE: u32 = 1 << 2;
    /// EXIDENABLE: stream IDs of 16 bits.
    pub(in super::super) const EXIDENABLE: u32 = 1 << 3;
    /// GCFGFRE and GCFGFIE: as `GFRE` and `GFIE`, for accesses to registers.
    pub(in super::super) const GCFGFRE: u32 = 1 << 4;
    pub(in super::super) const GCFGFIE: u32 = 1 << 5;
    /// USFCFG: streams that match no entry fault; they pass without it.
    pub(in super::super) const USFCFG: u32 = 1 << 10;
    /// VMIDPNE: VMIDs are not those of the CPUs.
    pub(in super::super) const VMIDPNE: u32 = 1 << 11;
    /// PTM: what CPUs broadcast about their TLBs is no business of this one.
    pub(in super::super) const PTM: u32 = 1 << 12;
    /// SMCFCFG: streams that match several entries fault.
    pub(in super::super) const SMCFCFG: u32 = 1 << 21;
    /// VMID16EN: VMIDs of 16 bits, in CBA2R.
    pub(in super::super) const VMID16EN: u32 = 1 << 31;
}

/// SMMU_IDR0.
pub(super) mod id0 {
    pub(in super::super) const S1TS: u32 = 1 << 30;
    pub(in super::super) const S2TS: u32 = 1 << 29;
    /// SMS: streams are matched; they are indices without it.
    pub(in super::super) const SMS: u32 = 1 << 27;
    /// PTFS: no AArch32 tables at all, and no short descriptors.
    pub(in super::super) const NO_AARCH32: u32 = 1 << 25;
    pub(in super::super) const NO_SHORT: u32 = 1 << 24;
    /// CTTW: walks see the caches of CPUs.
    pub(in super::super) const CTTW: u32 = 1 << 14;
    /// NUMSIDB, bits 12:9: bits of stream IDs.
    pub(in super::super) const NUMSIDB_SHIFT: u32 = 9;
    pub(in super::super) const NUMSIDB_MASK: u32 = 0xf;
    /// EXIDS: stream IDs can have 16 bits.
    pub(in super::super) const EXIDS: u32 = 1 << 8;
    /// NUMSMRG, bits 7:0: entries of the stream map.
    pub(in super::super) const NUMSMRG_MASK: u32 = 0xff;
}

/// SMMU_IDR1.
pub(super) mod id1 {
    /// PAGESIZE: register pages of 64K, not 4K.
    pub(in super::super) const PAGES_64K: u32 = 1 << 31;
    /// NUMPAGENDXB, bits 30:28: log2 of half the pages of the global space.
    pub(in super::super) const NUMPAGENDXB_SHIFT: u32 = 28;
    pub(in super::super) const NUMPAGENDXB_MASK: u32 = 0x7;
    /// NUMS2CB, bits 23:16: banks that have stage 2 alone. They come first.
    pub(in super::super) const NUMS2CB_SHIFT: u32 = 16;
    /// NUMCB, bits 7:0: all banks.
    pub(in super::super) const NUM_MASK: u32 = 0xff;
}

/// SMMU_IDR2.
pub(super) mod id2 {
    pub(in super::super) const VMID16: u32 = 1 << 15;
    /// PTFSv8: granules.
    pub(in super::super) const GRANULE_64K: u32 = 1 << 14;
    pub(in super::super) const GRANULE_16K: u32 = 1 << 13;
    pub(in super::super) const GRANULE_4K: u32 = 1 << 12;
    /// UBS, bits 11:8: the bits of addresses that come in.
    pub(in super::super) const UBS_SHIFT: u32 = 8;
    /// OAS, bits 7:4: the bits of physical addresses.
    pub(in super::super) const OAS_SHIFT: u32 = 4;
    /// IAS, bits 3:0: the bits of addresses that stage 2 translates.
    pub(in super::super) const IAS_SHIFT: u32 = 0;
    pub(in super::super) const SIZE_MASK: u32 = 0xf;
}

/// SMMU_sGFSR. Its bits 0 to 3 are faults of a stream that reaches no context bank.
pub(super) mod gfsr {
    /// ICF, USF, SMCF, UCBF: no valid context, no entry, several, no such bank.
    pub(in super::super) const BLOCKED: u32 = 0b1111;
    /// EF: the bus refused.
    pub(in super::super) const EF: u32 = 1 << 6;
    /// PF.
    pub(in super::super) const PF: u32 = 1 << 7;
    /// MULTI: more came while one was recorded.
    pub(in super::super) const MULTI: u32 = 1 << 31;
}

/// SMMU_sGFSYNR0.
pub(super) mod gfsynr0 {
    pub(in super::super) const WRITE: u32 = 1 << 1;
    pub(in super::super) const INSTRUCTION: u32 = 1 << 3;
}

/// Bits 15:0 of SMMU_sGFSYNR1 and SMMU_CBFRSYNRAn: the stream ID.
pub(super) const STREAM_ID: u32 = 0xffff;

/// SMMU_SMRn.
pub(super) mod smr {
    /// VALID, where stream IDs have at most 15 bits.
    pub(in super::super) const VALID: u32 = 1 << 31;
    /// MASK, bits 31:16 or 30:16: bits of the ID that may be anything.
    pub(in super::super) const MASK_SHIFT: u32 = 16;
    /// ID, bits 15:0 or 14:0.
    pub(in super::super) const ID_MASK: u32 = 0xffff;
}

/// SMMU_S2CRn.
pub(super) mod s2cr {
    /// TYPE, bits 17:16: translated by the bank in CBNDX, bits 7:0.
    pub(in super::super) const TRANSLATION: u32 = 0b00 << 16;
    pub(in super::super) const BYPASS: u32 = 0b01 << 16;
    pub(in super::super) const FAULT: u32 = 0b10 << 16;
    pub(in super::super) const TYPE_MASK: u32 = 0b11 << 16;
    pub(in super::super) const BANK_MASK: u32 = 0xff;
    /// EXIDVALID: the entry is valid, where stream IDs have 16 bits.
    pub(in super::super) const EXIDVALID: u32 = 1 << 10;
}

/// SMMU_CBARn.
pub(super) mod cbar {
    /// TYPE, bits 17:16: stage 2, or stage 1 without a second one.
    pub(in super::super) const STAGE_2: u32 = 0b00 << 16;
    pub(in super::super) const STAGE_1: u32 = 0b01 << 16;
    /// BPSHCFG 0b11 and MemAttr 0b1111: what a stage 2 that is bypassed adds, which is nothing:
    /// non-shareable, write-back.
    pub(in super::super) const STAGE_2_ADDS_NOTHING: u32 = 0b11 << 8 | 0b1111 << 12;
}

/// SMMU_CBA2Rn.
pub(super) mod cba2r {
    /// VA64: tables of AArch64.
    pub(in super::super) const VA64: u32 = 1 << 0;
    /// VMID16, bits 31:16.
    pub(in super::super) const VMID16_SHIFT: u32 = 16;
}

/// SMMU_CBn_SCTLR.
pub(super) mod sctlr {
    /// M: addresses are translated; they pass without it.
    pub(in super::super) const M: u32 = 1 << 0;
    /// TRE and AFE: MAIR or PRRR and NMRR give memory types, AP\[0\] is an access flag.
    pub(in super::super) const TRE: u32 = 1 << 1;
    pub(in super::super) const AFE: u32 = 1 << 2;
    /// CFRE: a device whose access a fault ends is told so. CFIE: faults interrupt.
    pub(in super::super) const CFRE: u32 = 1 << 5;
    pub(in super::super) const CFIE: u32 = 1 << 6;
    /// CFCFG: accesses that fault stall; they end without it.
    pub(in super::super) const CFCFG: u32 = 1 << 7;
    /// HUPCF: other accesses go on while a fault is recorded.
    pub(in super::super) const HUPCF: u32 = 1 << 8;
    /// S1_ASIDPNE: ASIDs are not those of the CPUs.
    pub(in super::super) const ASIDPNE: u32 = 1 << 12;
}

/// SMMU_CBn_RESUME.
pub(super) mod resume {
    pub(in super::super) const RETRY: u32 = 0;
    pub(in super::super) const TERMINATE: u32 = 1;
}

/// SMMU_CBn_TCR2.
pub(super) mod tcr2 {
    /// AS: ASIDs of 16 bits.
    pub(in super::super) const AS: u32 = 1 << 4;
    /// SEP, bits 17:15: which bit is copied to all above it.
    pub(in super::super) const SEP_SHIFT: u32 = 15;
    /// The bits that SEP can name, from 0b000 on.
    pub(in super::super) const SEP_BITS: [u32; 6] = [31, 35, 39, 41, 43, 47];
    /// The uppermost bit that comes in.
    pub(in super::super) const SEP_UPSTREAM: u32 = 0b111;
}

/// SMMU_CBn_TTBR0 and SMMU_CBn_TTBR1, of long descriptors: where the ASID is.
pub(super) const TTBR_ASID_SHIFT: u32 = 48;

/// SMMU_CBn_TLBIVA and SMMU_CBn_TLBIVAL of AArch64: the ASID, and address bits 55:12 from bit 0 on.
pub(super) const TLBIVA_ASID_SHIFT: u32 = 48;
pub(super) const TLBIVA_ADDRESS_BITS: u32 = 44;

/// Bit 0 of SMMU_sTLBGSTATUS and SMMU_CBn_TLBSTATUS: there is something to wait for.
pub(super) const SYNC_ACTIVE: u32 = 1 << 0;

/// SMMU_CBn_FSR.
pub(super) mod fsr {
    /// TF: nothing is mapped there.
    pub(in super::super) const TF: u32 = 1 << 1;
    /// AFF: the access flag is clear.
    pub(in super::super) const AFF: u32 = 1 << 2;
    /// PF: what is mapped there does not permit it.
    pub(in super::super) const PF: u32 = 1 << 3;
    /// EF: a table could not be read, or the bus refused.
    pub(in super::super) const EF: u32 = 1 << 4;
    /// TLBMCF and TLBLKF: entries conflict, or were locked.
    pub(in super::super) const TLBMCF: u32 = 1 << 5;
    pub(in super::super) const TLBLKF: u32 = 1 << 6;
    /// ASF: an address in the tables is too large.
    pub(in super::super) const ASF: u32 = 1 << 7;
    /// UUT: the upstream bus sent what is not supported.
    pub(in super::super) const UUT: u32 = 1 << 8;
    /// SS: the access is stalled.
    pub(in super::super) const SS: u32 = 1 << 30;
    /// MULTI: more faults came while one was recorded.
    pub(in super::super) const MULTI: u32 = 1 << 31;
    /// FORMAT, bits 10:9: of the tables. No fault.
    pub(in super::super) const FORMAT: u32 = 0b11 << 9;
}

/// SMMU_CBn_FSYNR0.
pub(super) mod fsynr0 {
    pub(in super::super) const WRITE: u32 = 1 << 4;
    pub(in super::super) const INSTRUCTION: u32 = 1 << 6;
}
