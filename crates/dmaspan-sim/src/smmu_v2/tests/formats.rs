use super::*;

#[test]
fn ttbr1_translates_what_sep_extends() {
    let smmu = attached();
    tables(smmu.tables(), 0x8000);
    // 39 bits of both halves, TG1 4K (0b10). The last page of the space.
    smmu.write32(cb(0, TCR), 2 << 30 | 25 << 16 | 25);
    smmu.write64(cb(0, TTBR1), 0x8000);
    set(smmu.tables(), 0x8000 + 511 * 8, 0x9003);
    set(smmu.tables(), 0x9000 + 511 * 8, 0xa003);
    set(smmu.tables(), 0xa000 + 511 * 8, 0x33_0000 | PAGE);
    // SEP 0b111: bit 48 of the bus is the sign.
    assert_eq!(read(&smmu, 0x1_ffff_ffff_f008), Ok(0x33_0008));
    assert_eq!(read(&smmu, 0x1008), Ok(0x10_1008));
    assert_eq!(read_once(&smmu, 0xffff_ffff_f008), Err(FaultKind::Translation));
    // SEP 0b101: bit 47.
    smmu.write32(cb(0, TCR2), 5 << 15 | 1 << 4 | 5);
    assert_eq!(read_once(&smmu, 0xffff_ffff_f008), Ok(0x33_0008));
    // What is invalidated has its sign in bit 55.
    set(smmu.tables(), 0xa000 + 511 * 8, 0x34_0000 | PAGE);
    smmu.write64(cb(0, TLBIVA), 5 << 48 | ((1 << 44) - 1));
    sync(&smmu);
    assert_eq!(read(&smmu, 0xffff_ffff_f008), Ok(0x34_0008));
    // EPD1.
    smmu.write32(cb(0, TCR), 2 << 30 | 25 << 16 | 1 << 23 | 25);
    smmu.write32(cb(0, TLBIASID), 5);
    sync(&smmu);
    assert_eq!(read(&smmu, 0xffff_ffff_f008), Err(FaultKind::Translation));
    assert_eq!(smmu.read64(cb(0, FAR)), 0xffff_ffff_ffff_f008);
}

#[test]
fn the_asid_is_in_the_ttbr_that_a1_selects() {
    let smmu = attached();
    smmu.write32(cb(0, TCR), 1 << 23 | 1 << 22 | 25);
    smmu.write64(cb(0, TTBR1), 9 << 48);
    assert_eq!(read(&smmu, 0), Ok(0x10_0000));
    set(smmu.tables(), 0x3000, 0);
    smmu.write32(cb(0, TLBIASID), 5);
    sync(&smmu);
    assert_eq!(read(&smmu, 0), Ok(0x10_0000));
    smmu.write32(cb(0, TLBIASID), 9);
    sync(&smmu);
    assert_eq!(read(&smmu, 0), Err(FaultKind::Translation));
}

#[test]
fn granules_of_16k_and_64k_are_those_that_idr2_names() {
    // T0SZ 32 and TG0 16K: level 2 alone and level 3, of 2048 entries each; with 64K, level 2 of 8.
    let entry = |table: u64, index: u64| table + index * 8;
    for (tg0, lg2) in [(0b10, 14), (0b01, 16)] {
        let config = SmmuConfig { granules: 1 << lg2, ..Default::default() };
        let smmu = smmu_with(config);
        stage1(&smmu, 0, 0, 5, 0x10_0000);
        smmu.write32(cb(0, TCR), 1 << 23 | tg0 << 14 | 32);
        stream(&smmu, 1, 0);
        smmu.tables().add_table(PhysAddr::new(0x10_0000), 2048);
        smmu.tables().add_table(PhysAddr::new(0x20_0000), 8192);
        set(smmu.tables(), entry(0x10_0000, 0), 0x20_0003);
        set(smmu.tables(), entry(0x20_0000, 3), 0x700_0000 | PAGE);
        assert_eq!(read(&smmu, (3 << lg2) + 5), Ok(0x700_0005));
        assert_eq!(smmu.counters().misconfigured, 0);
        // 4K is not there.
        smmu.write32(cb(0, TCR), 1 << 23 | 32);
        assert_eq!(read(&smmu, 1 << lg2), Err(FaultKind::Translation));
        assert_eq!(smmu.counters().misconfigured, 1);
    }
}

#[test]
fn registers_that_describe_no_tables_fault_and_are_counted() {
    let cases: [fn(&TestSmmu); 3] = [
        // T0SZ 0; a base that is not aligned; TBI0.
        |smmu| smmu.write32(cb(0, TCR), 1 << 23),
        |smmu| smmu.write64(cb(0, TTBR0), 0x1010),
        |smmu| smmu.write32(cb(0, TCR2), 1 << 5),
    ];
    for case in cases {
        let smmu = attached();
        case(&smmu);
        assert_eq!(read(&smmu, 0), Err(FaultKind::Translation));
        assert_eq!((smmu.counters().misconfigured, smmu.read32(cb(0, FSYNR0))), (1, 0));
    }
    // More input bits than IAS has.
    let smmu = smmu_with(SmmuConfig { ipa_bits: 36, ..Default::default() });
    stage2(&smmu, 0, 0, 0x1000);
    stream(&smmu, 1, 0);
    assert_eq!(read(&smmu, 0), Err(FaultKind::Translation));
    assert_eq!(smmu.counters().misconfigured, 1);
}

#[test]
fn output_is_limited_by_oas() {
    let smmu = smmu_with(SmmuConfig { output_bits: 36, ..Default::default() });
    stage1(&smmu, 0, 0, 5, 0x1000);
    stream(&smmu, 1, 0);
    set(smmu.tables(), 0x3000, 1 << 36 | PAGE);
    assert_eq!(read(&smmu, 0), Err(FaultKind::AddressSize));
}

/// Stage 1 of AArch32 with long descriptors: EAE, 32 bits, tables of two levels at 0x2000; an ASID
/// of 8 bits in TTBR0\[55:48\].
fn long() -> TestSmmu {
    let smmu = smmu();
    smmu.write32(cbar(0), 1 << 16);
    // The first level has four entries of 1 GiB, and is 32 bytes at 0x1000.
    smmu.write32(cb(0, TCR), 1 << 31 | 1 << 23);
    smmu.write64(cb(0, TTBR0), 5 << 48 | 0x1000);
    smmu.write32(cb(0, MAIR0), 0xff00);
    smmu.write32(cb(0, SCTLR), ON);
    stream(&smmu, 1, 0);
    smmu
}

#[test]
fn long_descriptors_of_aarch32_are_invalidated_by_32_bits() {
    let smmu = long();
    assert_eq!(read(&smmu, 0x1004), Ok(0x10_1004));
    set(smmu.tables(), 0x3008, 0);
    // VA[31:12] and the ASID in bits 7:0.
    smmu.write32(cb(0, TLBIVA), 0x1006);
    sync(&smmu);
    assert_eq!(read(&smmu, 0x1004), Ok(0x10_1004));
    // As 64 bits, or an upper half, it is nothing.
    smmu.write64(cb(0, TLBIVA), 0x1005);
    smmu.write32(cb(0, TLBIVA) + 4, 0);
    sync(&smmu);
    assert_eq!((smmu.counters().undefined_writes, smmu.counters().commands.by_va), (2, 1));
    smmu.write32(cb(0, TLBIVA), 0x1005);
    sync(&smmu);
    assert_eq!(read_once(&smmu, 0x1004), Err(FaultKind::Translation));
    // FORMAT is long descriptors of AArch32.
    assert_eq!(smmu.read32(cb(0, FSR)), 0b01 << 9);
    assert_eq!(read(&smmu, 0x1_0000_0000), Err(FaultKind::Translation));
}

#[test]
fn stage_2_of_aarch32_has_40_bits() {
    let smmu = smmu();
    // T0SZ -8, S, SL0 1: 40 bits from level 1, two tables of 512 entries at 0x10_0000.
    smmu.write32(cbar(0), 6);
    smmu.write32(cb(0, TCR), 1 << 31 | 1 << 6 | 1 << 4 | 8);
    smmu.write64(cb(0, TTBR0), 0x10_0000);
    smmu.write32(cb(0, SCTLR), ON);
    stream(&smmu, 1, 0);
    smmu.tables().add_table(PhysAddr::new(0x10_0000), 1024);
    set(smmu.tables(), 0x10_0000 + 1023 * 8, 0x2003);
    set(smmu.tables(), 0x3000, 0x10_0000 | PAGE2);
    assert_eq!(read(&smmu, 0xff_c000_0010), Ok(0x10_0010));
    set(smmu.tables(), 0x3000, 0);
    smmu.write32(cb(0, TLBIIPAS2), 0x0ffc_0000);
    sync(&smmu);
    assert_eq!(read(&smmu, 0xff_c000_0010), Err(FaultKind::Translation));
    assert_eq!(smmu.read64(cb(0, IPAFAR)), 0xff_c000_0000);
}

/// Stage 1 of short descriptors with TEX remap and the access flag: 4096 sections at 0x10_0000, of
/// which the first has a table of small pages at 0x20_0000. The ASID is in CONTEXTIDR.
fn short() -> TestSmmu {
    let smmu = smmu();
    smmu.write32(cbar(0), 1 << 16);
    smmu.write32(cb(0, TCR), 0);
    smmu.write32(cb(0, TTBR0), 0x10_0000);
    smmu.write32(cb(0, CONTEXTIDR), 0xabcd_ef05);
    // Region 1 is normal memory, write-back.
    smmu.write32(cb(0, MAIR0), 0b10 << 2);
    smmu.write32(cb(0, MAIR1), 0b01 << 2 | 0b01 << 18);
    // AFE and TRE.
    smmu.write32(cb(0, SCTLR), ON | 1 << 2 | 1 << 1);
    stream(&smmu, 1, 0);
    let image = smmu.tables();
    image.add_table(PhysAddr::new(0x10_0000), 2048);
    image.add_table(PhysAddr::new(0x20_0000), 128);
    image.set_u32(PhysAddr::new(0x10_0000), 0x20_0001).unwrap();
    // nG 11, AP[1] 5, AF 4, B 2, small page.
    image.set_u32(PhysAddr::new(0x20_0004), 0x55_5000 | 0x836).unwrap();
    // A section: nG 17, AP[1] 11, AF 10, B 2.
    image.set_u32(PhysAddr::new(0x10_0004), 0x7000_0000 | 1 << 17 | 3 << 10 | 6).unwrap();
    smmu
}

#[test]
fn short_descriptors_translate_with_the_asid_of_contextidr() {
    let smmu = short();
    assert_eq!(read(&smmu, 0x1010), Ok(0x55_5010));
    assert_eq!(read(&smmu, 0x10_0010), Ok(0x7000_0010));
    smmu.tables().set_u32(PhysAddr::new(0x20_0004), 0).unwrap();
    smmu.tables().set_u32(PhysAddr::new(0x10_0004), 0).unwrap();
    // A section goes by any of its addresses, and nG keeps it to its ASID.
    smmu.write32(cb(0, TLBIVAL), 0x1f_f006);
    sync(&smmu);
    assert_eq!(read(&smmu, 0x10_0010), Ok(0x7000_0010));
    smmu.write32(cb(0, TLBIVAL), 0x1f_f005);
    sync(&smmu);
    assert_eq!(read_once(&smmu, 0x10_0010), Err(FaultKind::Translation));
    // FORMAT is short descriptors.
    assert_eq!(smmu.read32(cb(0, FSR)), 0);
    assert_eq!(read(&smmu, 0x1010), Ok(0x55_5010));
    smmu.write32(cb(0, TLBIASID), 5);
    sync(&smmu);
    assert_eq!(read(&smmu, 0x1010), Err(FaultKind::Translation));
    assert_eq!(smmu.read32(cb(0, FSYNR0)), 2);
}

#[test]
fn short_descriptors_without_tex_remap_are_misconfigured() {
    let smmu = short();
    smmu.write32(cb(0, SCTLR), ON | 1 << 2);
    assert_eq!(read(&smmu, 0x1010), Err(FaultKind::Translation));
    assert_eq!(smmu.counters().misconfigured, 1);
}

#[test]
fn formats_that_are_not_there_are_misconfigured() {
    let config = SmmuConfig { aarch32: Aarch32::None, granules: 0, ..Default::default() };
    let smmu = smmu_with(config);
    // VA64 cannot be set, so these are short descriptors, which are not there either.
    stage1(&smmu, 0, 0, 5, 0x1000);
    stream(&smmu, 1, 0);
    assert_eq!(smmu.read32(cba2r(0)), 0);
    assert_eq!(read(&smmu, 0), Err(FaultKind::Translation));
    assert_eq!(smmu.counters().misconfigured, 1);
}
