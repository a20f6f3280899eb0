use super::*;

const ID: u64 = 0x20;

#[test]
fn identification_registers_tell_what_is_implemented() {
    let config = SmmuConfig {
        page_size: PageSize::Size64K,
        pages_lg2: 5,
        context_banks: 9,
        stage2_banks: 2,
        mapping_groups: 33,
        stream_id_bits: 13,
        extended_ids: true,
        granules: 1 << 12 | 1 << 16,
        aarch32: Aarch32::Long,
        upstream_bits: 44,
        ipa_bits: 40,
        output_bits: 42,
        coherent_walks: true,
        vmid16: true,
        revision: 0x12,
        ..Default::default()
    };
    let smmu = smmu_with(config);
    // S1TS 30, S2TS 29, NTS 28, SMS 27, ATOSNS 26, PTFS 25:24 = 1, CTTW 14, NUMSIDB 12:9, EXIDS 8.
    let id0 = 0b111 << 28 | 1 << 27 | 1 << 26 | 1 << 24 | 1 << 14 | 13 << 9 | 1 << 8 | 33;
    assert_eq!(smmu.read32(ID), id0);
    // PAGESIZE 31, NUMPAGENDXB 30:28 = 5 - 1, NUMS2CB 23:16, NUMCB 7:0.
    assert_eq!(smmu.read32(ID + 4), 1 << 31 | 4 << 28 | 2 << 16 | 9);
    // VMID16S 15, 64K 14, 4K 12, UBS 11:8 = 4, OAS 7:4 = 3, IAS 3:0 = 2.
    assert_eq!(smmu.read32(ID + 8), 1 << 15 | 1 << 14 | 1 << 12 | 4 << 8 | 3 << 4 | 2);
    assert_eq!([12, 16, 20, 24].map(|at| smmu.read32(ID + at)), [0; 4]);
    assert_eq!(smmu.read32(ID + 0x1c), 0x12);
}

#[test]
fn smaller_smmus_say_so() {
    let config = SmmuConfig {
        stages: Stages::Two,
        stage2_banks: 16,
        streams: StreamMatchSupport::Indexing,
        aarch32: Aarch32::None,
        granules: 1 << 14,
        coherent_walks: false,
        ..Default::default()
    };
    let smmu = smmu_with(config);
    assert_eq!(smmu.read32(ID), 1 << 29 | 1 << 26 | 2 << 24 | 15 << 9 | 48);
    assert_eq!(smmu.read32(ID + 8), 1 << 13 | 5 << 8 | 5 << 4 | 5);
}

#[test]
fn impossible_configurations_are_refused() {
    let refused = |config| Smmu::new(config, TableImage::new()).map(|_| ()).unwrap_err().field;
    let good = SmmuConfig::default();
    assert_eq!(refused(SmmuConfig { pages_lg2: 9, ..good }), "pages_lg2");
    assert_eq!(refused(SmmuConfig { context_banks: 17, ..good }), "context_banks");
    assert_eq!(refused(SmmuConfig { stage2_banks: 17, ..good }), "stage2_banks");
    assert_eq!(refused(SmmuConfig { stages: Stages::Two, ..good }), "stage2_banks");
    assert_eq!(refused(SmmuConfig { mapping_groups: 129, ..good }), "mapping_groups");
    assert_eq!(refused(SmmuConfig { stream_id_bits: 16, ..good }), "stream_id_bits");
    assert_eq!(refused(SmmuConfig { granules: 1 << 13, ..good }), "granules");
    assert_eq!(refused(SmmuConfig { upstream_bits: 48, ..good }), "upstream_bits");
    assert_eq!(refused(SmmuConfig { ipa_bits: 49, ..good }), "ipa_bits");
    assert_eq!(refused(SmmuConfig { output_bits: 52, ..good }), "output_bits");
}

#[test]
fn after_reset_clients_are_bypassed_and_all_else_is_zero() {
    let smmu = Smmu::new(SmmuConfig::default(), TableImage::new()).unwrap();
    // CLIENTPD, and SMCFCFG that reads as 1.
    assert_eq!(smmu.read32(CR0), 0x20_0001);
    let global = [0x8, 0x10, GFSR, 0x4c - 4, GFSYNR0, GFSYNR1, 0x58, GSTATUS, 0x800, 0xc00];
    assert_eq!(global.map(|at| smmu.read32(at)), [0; 10]);
    assert_eq!([cbar(0), cba2r(0), 0x1400].map(|at| smmu.read32(at)), [0; 3]);
    smmu.write32(cbar(3), 1 << 16);
    let bank = [0, 4, TCR2, TTBR0, TTBR1, TCR, CONTEXTIDR, MAIR0, MAIR1, FSR, FAR, FSYNR0, STATUS];
    assert_eq!(bank.map(|at| smmu.read32(cb(3, at))), [0; 13]);
    assert_eq!(smmu.counters().undefined_reads, 0);
    let hit = smmu.access(77, Iova::new(0xdead_b000), Access::Write).unwrap();
    assert_eq!(hit.paddr.get(), 0xdead_b000);
    assert!(!smmu.global_irq() && !smmu.context_irq(0));
    assert_eq!(smmu.counters().bypassed, 1);
}

#[test]
fn random_reset_values_spare_what_has_reset_values() {
    let config = SmmuConfig { stage2_banks: 2, ..Default::default() };
    let of = |seed| Smmu::with_reset(config, TableImage::new(), ResetValues::Random(seed)).unwrap();
    let smmu = of(1);
    assert_eq!(smmu.read32(CR0), 0x20_0001);
    assert_ne!(smmu.read32(0x800), of(2).read32(0x800));
    assert!((0..16).any(|bank| smmu.read32(cb(bank, SCTLR)) & 1 != 0));
    assert!((0..16).any(|bank| smmu.read32(cb(bank, FSR)) != 0));
    assert!((0..2).all(|bank| smmu.read32(cbar(bank)) & 3 << 16 == 0));
    assert!(smmu.access(1, Iova::new(0), Access::Read).is_ok());
}

#[test]
fn pages_of_64k_move_every_space() {
    let smmu = smmu_with(SmmuConfig { page_size: PageSize::Size64K, ..Default::default() });
    // Global space 1 at 0x1_0000, bank 3 at (16 + 3) * 0x1_0000.
    smmu.write32(0x1_0000 + 3 * 4, 1 << 16);
    smmu.write32(0x1_0800 + 3 * 4, 1);
    let bank = 0x13_0000;
    smmu.write32(bank + TCR2, 7 << 15 | 5);
    smmu.write32(bank + TCR, 1 << 23 | 25);
    smmu.write64(bank + TTBR0, 0x1000);
    smmu.write32(bank, ON);
    stream(&smmu, 1, 3);
    assert_eq!(read(&smmu, 0x1234), Ok(0x10_1234));
    smmu.write64(bank + TLBIVA, 1);
    smmu.write32(bank + SYNC, 0);
    assert_eq!((smmu.read32(bank + STATUS), smmu.read32(bank + STATUS)), (1, 0));
    assert_eq!(smmu.counters().undefined_writes, 0);
    // What was global space 1 with pages of 4K is nothing.
    smmu.write32(0x1000, 1);
    assert_eq!(smmu.counters().undefined_writes, 1);
}

#[test]
fn both_halves_of_a_register_of_64_bits_can_be_accessed() {
    let smmu = attached();
    smmu.write32(cb(0, TTBR0), 0x89ab_cdef);
    smmu.write32(cb(0, TTBR0) + 4, 0x0123_4567);
    assert_eq!(smmu.read64(cb(0, TTBR0)), 0x0123_4567_89ab_cdef);
    assert_eq!(smmu.read32(cb(0, TTBR0) + 4), 0x0123_4567);
    smmu.write64(GFAR, 1 << 40 | 7);
    assert_eq!((smmu.read32(GFAR), smmu.read32(GFAR + 4)), (7, 1 << 8));
    assert_eq!(smmu.counters().undefined_writes + smmu.counters().undefined_reads, 0);
}

#[test]
fn what_is_no_register_reads_as_zero_and_is_counted() {
    let smmu = attached();
    stage2(&smmu, 1, 0, 0x1000);
    // Reserved; misaligned; behind the last group and bank; pages of no bank; write-only registers.
    let reads = [0xc, 0x2, 0x800 + 48 * 4, 0xc00 + 48 * 4, 0x1000 + 64, 0x2000, 0x2_0000, 0x6c];
    let of_bank = [cb(0, 0xc), cb(0, TLBIVA), cb(0, SYNC), cb(0, RESUME), cb(0, IPAFAR)];
    // A bank of stage 2 has no registers of stage 1.
    let of_stage2 = [TTBR1, TCR2, MAIR0, MAIR1, CONTEXTIDR].map(|at| cb(1, at));
    let all: Vec<u64> = [&reads[..], &of_bank, &of_stage2].concat();
    assert!(all.iter().all(|at| smmu.read32(*at) == 0));
    assert_eq!(smmu.counters().undefined_reads, all.len() as u64);
    // Two registers of 32 bits are none of 64, and 64 bits must be aligned.
    assert_eq!([CR0, cb(0, TCR), cb(0, TTBR0) + 4].map(|at| smmu.read64(at)), [0; 3]);
    assert_eq!(smmu.counters().undefined_reads, all.len() as u64 + 3);

    let before = smmu.read32(cb(0, SCTLR));
    smmu.write64(cb(0, SCTLR), 0);
    smmu.write32(0x20, 0);
    smmu.write32(cb(0, TLBIIPAS2), 0);
    smmu.write64(cb(0, TLBIIPAS2), 0);
    [TLBIVA, TLBIVAL, TLBIASID, TLBIALL].iter().for_each(|at| smmu.write32(cb(1, *at), 0));
    assert_eq!(smmu.counters().undefined_writes, 8);
    assert_eq!((smmu.read32(cb(0, SCTLR)), smmu.counters().commands.total()), (before, 0));
}

#[test]
fn bits_that_are_not_implemented_cannot_be_set() {
    let small = SmmuConfig { stream_id_bits: 10, stage2_banks: 1, ..Default::default() };
    let smmu = smmu_with(small);
    smmu.write32(CR0, u32::MAX);
    // EXIDENABLE, bit 30 and VMID16EN are not there, SMCFCFG cannot be cleared.
    assert_eq!(smmu.read32(CR0), !(1 << 3 | 1 << 30 | 1 << 31));
    smmu.write32(CR0, 0);
    assert_eq!(smmu.read32(CR0), 1 << 21);
    smmu.write32(0x800, u32::MAX);
    assert_eq!(smmu.read32(0x800), 1 << 31 | 0x3ff << 16 | 0x3ff);
    smmu.write32(0xc00, u32::MAX);
    assert_eq!(smmu.read32(0xc00) & 1 << 10, 0);
    smmu.write32(cba2r(0), u32::MAX);
    assert_eq!(smmu.read32(cba2r(0)), 1);
    smmu.write32(cbar(0), 1 << 16 | 7);
    smmu.write32(cbar(1), 1 << 16 | 7);
    assert_eq!((smmu.read32(cbar(0)), smmu.read32(cbar(1))), (7, 1 << 16 | 7));

    let large = SmmuConfig { extended_ids: true, vmid16: true, ..small };
    let smmu = smmu_with(large);
    smmu.write32(CR0, u32::MAX);
    assert_eq!(smmu.read32(CR0), !(1 << 30));
    smmu.write32(0x800, u32::MAX);
    assert_eq!(smmu.read32(0x800), u32::MAX);
    smmu.write32(0xc00, 1 << 10);
    assert_eq!(smmu.read32(0xc00), 1 << 10);
    smmu.write32(cba2r(0), 0xffff_0001);
    assert_eq!(smmu.read32(cba2r(0)), 0xffff_0001);
}
