use super::*;

fn global(fault: GlobalFault) -> Result<u64, Why> {
    Err(Why::Global(fault))
}

#[test]
fn an_unmatched_stream_faults_or_passes_by_usfcfg() {
    let smmu = attached();
    let outcome = paddr(&smmu, 2, 0x5008, Access::Write);
    assert_eq!(outcome, global(GlobalFault::UnidentifiedStream));
    // USF; WNR; the stream.
    assert_eq!((smmu.read32(GFSR), smmu.read64(GFAR)), (1 << 1, 0x5008));
    assert_eq!((smmu.read32(GFSYNR0), smmu.read32(GFSYNR1)), (1 << 1, 2));
    smmu.write32(CR0, ENABLED & !(1 << 10));
    assert_eq!(paddr(&smmu, 2, 0x5008, Access::Write), Ok(0x5008));
}

#[test]
fn types_of_s2cr_translate_pass_and_fault() {
    let smmu = attached();
    assert_eq!(paddr(&smmu, 1, 0x1008, Access::Read), Ok(0x10_1008));
    smmu.write32(0xc04, 1 << 16);
    assert_eq!(paddr(&smmu, 1, 0x1008, Access::Read), Ok(0x1008));
    for fault_or_reserved in [2 << 16, 3 << 16] {
        smmu.write32(0xc04, fault_or_reserved);
        let outcome = paddr(&smmu, 1, 0x1008, Access::Read);
        assert_eq!(outcome, global(GlobalFault::InvalidContext));
        assert_eq!((smmu.read32(GFSR), smmu.read32(GFSYNR0)), (1, 0));
        smmu.write32(GFSR, u32::MAX);
    }
    smmu.write32(0xc04, 16);
    let outcome = paddr(&smmu, 1, 0x1008, Access::Read);
    assert_eq!(outcome, global(GlobalFault::UnimplementedContextBank));
    assert_eq!(smmu.read32(GFSR), 1 << 3);
}

#[test]
fn masks_of_smr_match_many_streams_and_conflicts_fault() {
    let smmu = attached();
    // Streams 0x100 to 0x10f, and 0x10f again.
    smmu.write32(0xc00 + 8, 0);
    smmu.write32(0x800 + 8, 1 << 31 | 0xf << 16 | 0x100);
    smmu.write32(0xc00 + 12, 0);
    smmu.write32(0x800 + 12, 1 << 31 | 0x10f);
    assert_eq!(paddr(&smmu, 0x100, 0, Access::Read), Ok(0x10_0000));
    assert_eq!(paddr(&smmu, 0x10e, 0, Access::Read), Ok(0x10_0000));
    let unidentified = global(GlobalFault::UnidentifiedStream);
    assert_eq!(paddr(&smmu, 0x110, 0, Access::Read), unidentified);
    smmu.write32(GFSR, u32::MAX);
    let conflict = global(GlobalFault::StreamMatchConflict);
    assert_eq!(paddr(&smmu, 0x10f, 0, Access::Read), conflict);
    assert_eq!((smmu.read32(GFSR), smmu.read32(GFSYNR1)), (1 << 2, 0x10f));
    // Without VALID there is no conflict.
    smmu.write32(0x800 + 12, 0x10f);
    assert_eq!(paddr(&smmu, 0x10f, 0, Access::Read), Ok(0x10_0000));
}

#[test]
fn extended_stream_ids_have_16_bits_and_are_valid_in_s2cr() {
    let smmu = smmu_with(SmmuConfig { extended_ids: true, ..Default::default() });
    stage1(&smmu, 0, 0, 5, 0x1000);
    smmu.write32(CR0, ENABLED | 1 << 3);
    smmu.write32(0x800, 0x00ff_8000);
    let unidentified = global(GlobalFault::UnidentifiedStream);
    assert_eq!(paddr(&smmu, 0x8001, 0, Access::Read), unidentified);
    smmu.write32(0xc00, 1 << 10);
    assert_eq!(paddr(&smmu, 0x8001, 0, Access::Read), Ok(0x10_0000));
    assert_eq!(paddr(&smmu, 1, 0, Access::Read), unidentified);
}

#[test]
fn stream_indexing_takes_the_stream_as_the_group() {
    let smmu =
        smmu_with(SmmuConfig { streams: StreamMatchSupport::Indexing, ..Default::default() });
    stage1(&smmu, 0, 0, 5, 0x1000);
    smmu.write32(0xc00 + 4, 0);
    smmu.write32(0xc00 + 8, 1 << 16);
    assert_eq!(paddr(&smmu, 1, 0, Access::Read), Ok(0x10_0000));
    assert_eq!(paddr(&smmu, 2, 0, Access::Read), Ok(0));
    let unidentified = global(GlobalFault::UnidentifiedStream);
    assert_eq!(paddr(&smmu, 48, 0, Access::Read), unidentified);
    // There are no SMRs.
    smmu.write32(0x800, 0);
    assert_eq!(smmu.counters().undefined_writes, 1);
}

#[test]
fn a_disabled_context_passes() {
    let smmu = attached();
    smmu.write32(cb(0, SCTLR), ON & !1);
    assert_eq!(paddr(&smmu, 1, 0x7_0000_1008, Access::Read), Ok(0x7_0000_1008));
}

#[test]
fn stage_2_translates_and_reports_the_ipa() {
    let smmu = smmu();
    stage2(&smmu, 2, 9, 0x1000);
    set(smmu.tables(), 0x3000, 0x20_0000 | PAGE2);
    set(smmu.tables(), 0x3008, 0x20_1000 | PAGE2 & !(1 << 7));
    stream(&smmu, 1, 2);
    assert_eq!(paddr(&smmu, 1, 0x123, Access::Write), Ok(0x20_0123));
    assert_eq!(paddr(&smmu, 1, 0x1123, Access::Read), Ok(0x20_1123));
    let Err(Why::Context { bank: 2, fault }) = paddr(&smmu, 1, 0x1123, Access::Write) else {
        panic!("a page that can be read was written")
    };
    assert_eq!((fault.kind, fault.level), (FaultKind::Permission, 3));
    // PF, FORMAT AArch64; WNR, level 3.
    assert_eq!(smmu.read32(cb(2, FSR)), 1 << 3 | 0b10 << 9);
    assert_eq!(smmu.read32(cb(2, FSYNR0)), 1 << 4 | 3);
    assert_eq!(smmu.read64(cb(2, FAR)), 0x1123);
    assert_eq!(smmu.read64(cb(2, IPAFAR)), 0x1000);
}

#[test]
fn stage_1_with_stage_2_fault_ends_in_an_invalid_context_fault() {
    let smmu = attached();
    smmu.write32(cbar(0), 2 << 16);
    let outcome = paddr(&smmu, 1, 0x1008, Access::Read);
    assert_eq!(outcome, global(GlobalFault::InvalidContext));
    // ICF; Nested.
    assert_eq!((smmu.read32(GFSR), smmu.read32(GFSYNR0)), (1, 1));
    // What stage 1 refuses is its own fault.
    smmu.write32(GFSR, u32::MAX);
    assert_eq!(read(&smmu, 0x9000), Err(FaultKind::Translation));
    assert_eq!(smmu.read32(GFSR), 0);
}

/// Stage 1 in bank 4 with tables at IPA 0x1000, stage 2 in bank 2 with tables at 0x8000 that maps
/// IPA 0 to 0x5fff one to one, and what stage 1 maps page 0 to.
fn nested() -> TestSmmu {
    let smmu = smmu();
    tables(smmu.tables(), 0x8000);
    for page in 0..6 {
        set(smmu.tables(), 0xa000 + page * 8, (page * 0x1000) | PAGE2);
    }
    set(smmu.tables(), 0x3000, 0x4000 | PAGE);
    set(smmu.tables(), 0xa000 + 4 * 8, 0x77_0000 | PAGE2);
    stage1(&smmu, 4, 3, 5, 0x1000);
    stage2(&smmu, 2, 3, 0x8000);
    smmu.write32(cbar(4), 3 << 16 | 2 << 8 | 3);
    stream(&smmu, 1, 4);
    smmu
}

#[test]
fn nested_contexts_translate_twice() {
    let smmu = nested();
    let hit = smmu.access(1, Iova::new(0x10), Access::Write).unwrap();
    assert_eq!((hit.paddr.get(), hit.block.last().get()), (0x77_0010, 0xfff));
    // Stage 1's own output is an IPA that stage 2 does not map.
    let Err(Why::Context { bank: 2, fault }) = paddr(&smmu, 1, 0x1010, Access::Write) else {
        panic!("stage 2 was not asked")
    };
    assert_eq!((fault.kind, fault.iova.get()), (FaultKind::Translation, 0x10_1010));
    // S1CBNDX 4, WNR, level 3. FAR has the VA, IPAFAR the IPA's page.
    assert_eq!(smmu.read32(cb(2, FSYNR0)), 4 << 16 | 1 << 4 | 3);
    assert_eq!(smmu.read64(cb(2, FAR)), 0x1010);
    assert_eq!(smmu.read64(cb(2, IPAFAR)), 0x10_1000);
    assert_eq!(smmu.read32(cb(4, FSR)), 0);
}

#[test]
fn a_nested_translation_is_as_large_as_the_smaller_of_both() {
    let last = |smmu: &TestSmmu, iova: u64| {
        let hit = smmu.access(1, Iova::new(iova), Access::Read).unwrap();
        (hit.paddr.get(), hit.block.start().get(), hit.block.last().get())
    };
    // A page of stage 1 within 2 MiB of stage 2, and 2 MiB of stage 1 over pages of stage 2.
    let smmu = nested();
    set(smmu.tables(), 0x9008, 0x4000_0000 | PAGE2 & !2);
    set(smmu.tables(), 0x3000, 0x20_7000 | PAGE);
    assert_eq!(last(&smmu, 0x10), (0x4000_7010, 0, 0xfff));
    set(smmu.tables(), 0x2008, PAGE & !2);
    assert_eq!(last(&smmu, 0x20_4010), (0x77_0010, 0x20_4000, 0x20_4fff));
}

#[test]
fn tables_of_a_nested_stage_1_are_read_through_stage_2() {
    let smmu = nested();
    set(smmu.tables(), 0xa000 + 3 * 8, 0);
    let Err(Why::Context { bank: 2, fault }) = paddr(&smmu, 1, 0, Access::Read) else {
        panic!("a table was read at its IPA")
    };
    assert_eq!((fault.kind, fault.iova.get()), (FaultKind::Translation, 0x3000));
    // S1CBNDX 4, S1PTWF, level 3.
    assert_eq!(smmu.read32(cb(2, FSYNR0)), 4 << 16 | 1 << 3 | 3);
}

#[test]
fn a_nested_context_needs_a_bank_of_stage_2() {
    let smmu = nested();
    smmu.write32(cbar(4), 3 << 16 | 16 << 8);
    let outcome = paddr(&smmu, 1, 0, Access::Read);
    assert_eq!(outcome, global(GlobalFault::UnimplementedContextBank));
    smmu.write32(cbar(4), 3 << 16 | 4 << 8);
    assert_eq!(paddr(&smmu, 1, 0, Access::Read), global(GlobalFault::InvalidContext));
}

#[test]
fn a_stage_that_is_not_there_is_misconfigured() {
    let smmu = smmu_with(SmmuConfig { stages: Stages::One, ..Default::default() });
    stage2(&smmu, 0, 0, 0x1000);
    stream(&smmu, 1, 0);
    assert_eq!(paddr(&smmu, 1, 0, Access::Read), global(GlobalFault::InvalidContext));
    assert_eq!(smmu.counters().misconfigured, 1);
}

#[test]
fn privileged_pages_are_for_streams_that_s2cr_makes_privileged() {
    let smmu = attached();
    set(smmu.tables(), 0x3000, 0x10_0000 | PAGE & !(1 << 6));
    assert_eq!(read_once(&smmu, 0), Err(FaultKind::Permission));
    smmu.write32(0xc04, 3 << 24);
    assert_eq!(read_once(&smmu, 0), Ok(0x10_0000));
}
