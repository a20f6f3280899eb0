use super::*;
use crate::memory::SimMemory;

// Bits of SCTLR.
const CFRE: u32 = 1 << 5;
const CFIE: u32 = 1 << 6;
const CFCFG: u32 = 1 << 7;
const HUPCF: u32 = 1 << 8;
// Bits of FSR; FORMAT is AArch64.
const TF: u32 = 1 << 1;
const AFF: u32 = 1 << 2;
const PF: u32 = 1 << 3;
const ASF: u32 = 1 << 7;
const FORMAT: u32 = 0b10 << 9;
const SS: u32 = 1 << 30;
const MULTI: u32 = 1 << 31;

fn response(smmu: &TestSmmu, iova: u64) -> Response {
    smmu.access(1, Iova::new(iova), Access::Read).unwrap_err().response
}

#[test]
fn context_faults_are_recorded_with_their_syndrome() {
    let smmu = attached();
    set(smmu.tables(), 0x3008, 0x10_0000 | PAGE & !(1 << 10));
    set(smmu.tables(), 0x3010, 0x10_0000 | READ_ONLY);
    set(smmu.tables(), 0x3018, 1 << 47 | PAGE);
    // 40 bits of output: PASize is 2.
    smmu.write32(cb(0, TCR2), 7 << 15 | 1 << 4 | 2);
    let cases = [
        (0x8123, Access::Write, TF, 1 << 4 | 3),
        (0x1123, Access::Read, AFF, 3),
        (0x2123, Access::Write, PF, 1 << 4 | 3),
        (0x3123, Access::Read, ASF, 3),
        (0x20_0000, Access::Read, TF, 2),
        (0x4000_0000, Access::Write, TF, 1 << 4 | 1),
        // Beyond the 39 bits: level 0.
        (0x80_0000_0000, Access::Read, TF, 0),
    ];
    for (iova, access, bit, fsynr0) in cases {
        assert!(matches!(paddr(&smmu, 1, iova, access), Err(Why::Context { bank: 0, .. })));
        assert_eq!((smmu.read32(cb(0, FSR)), smmu.read64(cb(0, FAR))), (bit | FORMAT, iova));
        assert_eq!((iova, smmu.read32(cb(0, FSYNR0))), (iova, fsynr0));
        // CBFRSYNRA has the stream.
        assert_eq!(smmu.read32(0x1400), 1);
        assert!(smmu.context_irq(0) && !smmu.context_irq(1) && !smmu.global_irq());
        smmu.write32(cb(0, FSR), bit);
        assert!(!smmu.context_irq(0));
    }
    assert_eq!(smmu.counters().context_faults, 7);
}

#[test]
fn ones_clear_the_bits_they_are_written_to() {
    let smmu = attached();
    assert_eq!(read(&smmu, 0x8000), Err(FaultKind::Translation));
    smmu.write32(cb(0, FSR), !TF);
    assert_eq!(smmu.read32(cb(0, FSR)), TF | FORMAT);
    smmu.write32(cb(0, FSR), TF);
    assert_eq!(smmu.read32(cb(0, FSR)), FORMAT);
    // FSRRESTORE writes it.
    smmu.write32(cb(0, 0x5c), PF | MULTI | 0b01 << 9);
    assert_eq!(smmu.read32(cb(0, FSR)), PF | MULTI | 0b01 << 9);
    smmu.write32(cb(0, FSR), PF);
    assert_eq!(smmu.read32(cb(0, FSR)), MULTI | 0b01 << 9);

    assert!(smmu.access(9, Iova::new(0), Access::Read).is_err());
    smmu.write32(GFSR, !2);
    assert_eq!(smmu.read32(GFSR), 2);
    smmu.write32(GFSR, 2);
    assert_eq!(smmu.read32(GFSR), 0);
    smmu.write32(0x4c, 1 << 31 | 1 << 2);
    assert_eq!(smmu.read32(GFSR), 1 << 31 | 1 << 2);
}

#[test]
fn a_second_fault_is_multi_and_keeps_the_first_syndrome() {
    let smmu = attached();
    smmu.write32(cb(0, SCTLR), ON | HUPCF);
    assert_eq!(read(&smmu, 0x8000), Err(FaultKind::Translation));
    set(smmu.tables(), 0x3008, 0x10_0000 | PAGE & !(1 << 10));
    assert_eq!(read(&smmu, 0x1000), Err(FaultKind::AccessFlag));
    assert_eq!(smmu.read32(cb(0, FSR)), MULTI | TF | FORMAT);
    assert_eq!(smmu.read64(cb(0, FAR)), 0x8000);
    // HUPCF: what does not fault goes on.
    assert_eq!(read(&smmu, 0), Ok(0x10_0000));

    for stream in [8, 9] {
        assert!(smmu.access(stream, Iova::new(stream.into()), Access::Read).is_err());
    }
    assert_eq!((smmu.read32(GFSR), smmu.read64(GFAR)), (MULTI | 2, 8));
    assert_eq!(smmu.read32(GFSYNR1), 8);
    let counters = smmu.counters();
    assert_eq!((counters.context_faults, counters.global_faults), (2, 2));
}

#[test]
fn without_hupcf_nothing_passes_an_outstanding_fault() {
    let smmu = attached();
    assert_eq!(read(&smmu, 0x8000), Err(FaultKind::Translation));
    assert_eq!(paddr(&smmu, 1, 0, Access::Read), Err(Why::Outstanding { bank: 0 }));
    assert_eq!(smmu.counters().behind_fault, 1);
    // Other banks go on.
    stage1(&smmu, 1, 0, 6, 0x1000);
    stream(&smmu, 2, 1);
    assert_eq!(paddr(&smmu, 2, 0, Access::Read), Ok(0x10_0000));
    smmu.write32(cb(0, FSR), TF);
    assert_eq!(read(&smmu, 0), Ok(0x10_0000));
}

#[test]
fn reports_and_interrupts_are_enabled_one_by_one() {
    let smmu = attached();
    for (enabled, expected) in [(CFRE, Response::Aborted), (CFIE, Response::Ignored)] {
        smmu.write32(cb(0, SCTLR), 1 | enabled);
        assert_eq!(response(&smmu, 0x8000), expected);
        assert_eq!(smmu.context_irq(0), enabled == CFIE);
        smmu.write32(cb(0, FSR), u32::MAX);
    }
    for (enabled, expected) in [(1 << 1, Response::Aborted), (1 << 2, Response::Ignored)] {
        smmu.write32(CR0, 1 << 10 | enabled);
        assert_eq!(smmu.access(9, Iova::new(0), Access::Read).unwrap_err().response, expected);
        assert_eq!(smmu.global_irq(), enabled == 1 << 2);
        smmu.write32(GFSR, u32::MAX);
    }
}

fn stalled() -> (TestSmmu, StallId) {
    let smmu = attached();
    smmu.write32(cb(0, SCTLR), ON | CFCFG);
    let Response::Stalled(id) = response(&smmu, 0x8000) else { panic!("it did not stall") };
    (smmu, id)
}

#[test]
fn a_stalled_transaction_is_retried() {
    let (smmu, id) = stalled();
    assert_eq!((smmu.resumed(id), smmu.stalled(0), id.bank()), (None, 1, 0));
    assert_eq!(smmu.read32(cb(0, FSR)), SS | TF | FORMAT);
    set(smmu.tables(), 0x3040, 0x44_0000 | PAGE);
    smmu.write32(cb(0, FSR), u32::MAX);
    // SS is no bit to clear, and holds the interrupt.
    assert_eq!(smmu.read32(cb(0, FSR)), SS | FORMAT);
    assert!(smmu.context_irq(0));
    assert_eq!(smmu.resumed(id), None);
    smmu.write32(cb(0, RESUME), 0);
    assert!(!smmu.context_irq(0));
    assert_eq!(smmu.resumed(id).unwrap().unwrap().paddr.get(), 0x44_0000);
    assert_eq!((smmu.resumed(id), smmu.stalled(0)), (None, 0));
}

#[test]
fn a_stalled_transaction_is_terminated() {
    let (smmu, id) = stalled();
    // It is taken up where the driver forgot to clear FSR, too.
    smmu.write32(cb(0, RESUME), 1);
    let refused = smmu.resumed(id).unwrap().unwrap_err();
    assert_eq!((refused.why, refused.response), (Why::Terminated { bank: 0 }, Response::Aborted));
    assert_eq!(smmu.read32(cb(0, FSR)), TF | FORMAT);
}

#[test]
fn a_retried_transaction_that_faults_again_stalls_again() {
    let (smmu, id) = stalled();
    smmu.write32(cb(0, FSR), u32::MAX);
    smmu.write32(cb(0, RESUME), 0);
    let refused = smmu.resumed(id).unwrap().unwrap_err();
    assert!(matches!(refused.why, Why::Context { bank: 0, .. }));
    let Response::Stalled(again) = refused.response else { panic!("it did not stall") };
    assert_ne!(id, again);
    assert_eq!(smmu.read32(cb(0, FSR)), SS | TF | FORMAT);
}

#[test]
fn transactions_behind_a_stalled_one_stall_too() {
    let (smmu, first) = stalled();
    let Response::Stalled(second) = response(&smmu, 0) else { panic!("it did not stall") };
    assert_eq!(smmu.stalled(0), 2);
    smmu.write32(cb(0, FSR), u32::MAX);
    smmu.write32(cb(0, RESUME), 0);
    assert_eq!(smmu.resumed(second).unwrap().unwrap().paddr.get(), 0x10_0000);
    assert!(smmu.resumed(first).unwrap().is_err());
}

#[test]
fn a_fault_that_is_terminated_leaves_the_stalled_one_stalled() {
    let (smmu, id) = stalled();
    smmu.write32(cb(0, FSR), u32::MAX);
    smmu.write32(cb(0, SCTLR), ON | HUPCF);
    assert_eq!(response(&smmu, 0x9000), Response::Aborted);
    assert_eq!(smmu.read32(cb(0, FSR)), SS | TF | FORMAT);
    assert_eq!((smmu.resumed(id), smmu.stalled(0)), (None, 1));
}

#[test]
fn stalls_can_be_disabled_for_all() {
    let smmu = attached();
    smmu.write32(cb(0, SCTLR), ON | CFCFG);
    // STALLD.
    smmu.write32(CR0, ENABLED | 1 << 8);
    assert_eq!(response(&smmu, 0x8000), Response::Aborted);
}

#[test]
fn data_goes_where_it_is_mapped_and_stops_at_a_fault() {
    let smmu = attached();
    let memory = SimMemory::new(PhysAddr::new(0x10_0000), 0x8000, 12).unwrap();
    let frame = memory.allocate(0x4000, 12).unwrap();
    memory.pin_frames(&[frame]);
    let data: Vec<u8> = (0..=255).collect();
    smmu.write(&memory, 1, Iova::new(0x1f80), &data).unwrap();
    let mut seen = [0; 256];
    memory.cpu_read(PhysAddr::new(0x10_1f80), &mut seen).unwrap();
    assert_eq!(seen[..], data[..]);
    smmu.read(&memory, 1, Iova::new(0x1f80), &mut seen).unwrap();
    assert_eq!(seen[..], data[..]);
    let refused = smmu.write(&memory, 1, Iova::new(0x3fc0), &data).unwrap_err();
    let Fault { kind, level, iova, access } = match refused {
        DmaError::Fault { done: 0x40, fault } => fault,
        other => panic!("{other}"),
    };
    assert_eq!((kind, level, iova.get()), (FaultKind::Translation, 3, 0x4000));
    assert_eq!(access, Access::Write);
    let unidentified = smmu.read(&memory, 9, Iova::new(0x10), &mut seen).unwrap_err();
    assert!(matches!(unidentified, DmaError::Fault { done: 0, .. }));
    assert!(memory.violations().is_empty());
}
