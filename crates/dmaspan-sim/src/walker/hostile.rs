//! Arm's walkers over register values and table words of any kind.

use dmaspan::{Iova, PhysAddr};
use proptest::prelude::*;

use super::arm_lpae::{
    AccessPrivilege, AddressHalf, Arm32LpaeS1Walker, Arm32LpaeS2Walker, Arm32S1Registers,
    Arm32S2Registers, ArmLpaeS1Walker, ArmLpaeS2Walker, ArmS1WalkRegisters, ArmS2WalkRegisters,
    LpaeWalker, MemAttr,
};
use super::arm_v7s::{ArmV7sWalkRegisters, ArmV7sWalker, SCTLR_TRE, Variant};
use super::{Access, Checked as _, NotATable, TableWords, Translated, Walker};

/// A word at every address, mostly one that goes on: each follows from its address and a seed.
struct Noise(u64);

impl TableWords for Noise {
    fn read_u64(&self, paddr: PhysAddr) -> Result<u64, NotATable> {
        let mixed = (paddr.get() ^ self.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = mixed ^ mixed >> 32;
        // The upper address bits are mostly clear: they end a walk early.
        Ok(if mixed >> 62 == 0 { mixed } else { mixed & !(0xffff << 40) | 1 | 1 << 32 })
    }
}

/// What holds of every answer: the leaf has the address, the group has the leaf, and only a walker
/// with permission gets one.
fn check<W: Walker>(walker: &W, seed: u64, iova: u64) {
    for access in [Access::Read, Access::Write] {
        let Ok(found) = walker.walk(&Noise(seed), Iova::new(iova), access) else { continue };
        let Translated { leaf, group, leaf_lg2, .. } = found;
        assert!(leaf.contains(Iova::new(iova)) && group.covers(leaf));
        assert_eq!(leaf.len_less_one() + 1, 1 << leaf_lg2);
        let last = found.step;
        assert_eq!((last.link.level, found.iova.get()), (found.level, iova));
        assert!(found.update.is_none_or(|update| update.old != update.new));
    }
}

fn check_long<R>(walker: &LpaeWalker<R>, seed: u64, offset: u64) {
    let range = walker.input_range();
    let iova = range.start().get() + offset % (range.len_less_one() + 1);
    check(walker, seed, iova);
    let _ = walker.check_contiguous_group(&Noise(seed), Iova::new(iova));
}

fn half() -> impl Strategy<Value = AddressHalf> {
    prop_oneof![Just(AddressHalf::Lower), Just(AddressHalf::Upper)]
}

fn privilege() -> impl Strategy<Value = AccessPrivilege> {
    prop_oneof![Just(AccessPrivilege::Unprivileged), Just(AccessPrivilege::Privileged)]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn long_descriptors_of_aarch64_never_lead_astray(
        tcr: u64, ttbr: u64, mair: u64, half in half(), privilege in privilege(),
        seed: u64, offset: u64,
    ) {
        // Without what is not supported, and with a base that is aligned mostly.
        let (tcr, ttbr) = (tcr & !(1 << 59 | 3 << 37 | 1 << 7 | 1 << 23), ttbr & !0xf_ffff);
        let registers = ArmS1WalkRegisters { ttbr, tcr, mair, half, privilege };
        if let Ok(walker) = ArmLpaeS1Walker::new(registers) {
            check_long(&walker, seed, offset);
        }
        for mem_attr in [MemAttr::Combined, MemAttr::Forced] {
            let vtcr = tcr & !(3 << 32);
            let registers =
                ArmS2WalkRegisters { vttbr: ttbr, vtcr, mem_attr, privilege, ..Default::default() };
            if let Ok(walker) = ArmLpaeS2Walker::new(registers) {
                check_long(&walker, seed, offset);
            }
        }
    }

    #[test]
    fn long_descriptors_of_aarch32_never_lead_astray(
        ttbr in 0u64..1 << 40, tcr: u32, mair: [u32; 2], half in half(),
        privilege in privilege(), seed: u64, offset: u64,
    ) {
        let ttbr = ttbr & !0xffff;
        let ttbcr = tcr & !(1 << 7 | 1 << 23) | 1 << 31;
        let registers = Arm32S1Registers { ttbr, ttbcr, mair, half, privilege };
        if let Ok(walker) = Arm32LpaeS1Walker::new(registers) {
            check_long(&walker, seed, offset);
        }
        // S is the sign of T0SZ.
        let vtcr = tcr & !0x90 | (tcr & 8) << 1;
        if let Ok(walker) = Arm32LpaeS2Walker::new(Arm32S2Registers { vttbr: ttbr, vtcr }) {
            check_long(&walker, seed, offset);
        }
    }

    #[test]
    fn short_descriptors_never_lead_astray(
        ttbr: u32, n in 0u32..8, prrr: u32, nmrr: u32, sctlr: u32, half in half(),
        privilege in privilege(), input_lg2 in 31u32..36, seed: u64, offset: u64,
    ) {
        // No reserved memory types.
        let (ttbr, prrr, sctlr) = (ttbr & !0xfff8, prrr & !0xaaaa, sctlr | SCTLR_TRE);
        for variant in [Variant::Arm, Variant::MediaTek { input_lg2 }] {
            let ttbcr = if variant == Variant::Arm { n } else { 0 };
            let registers =
                ArmV7sWalkRegisters { ttbr, ttbcr, prrr, nmrr, sctlr, half, privilege, variant };
            let Ok(walker) = ArmV7sWalker::new(registers) else { continue };
            let range = walker.input_range();
            let iova = range.start().get() + offset % (range.len_less_one() + 1);
            check(&walker, seed, iova);
            let _ = walker.strict_walk(&Noise(seed), Iova::new(iova));
        }
    }
}
