//! io-pgtable-arm: the long descriptors of AArch32, stages 1 and 2.

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::{ArmLpae32S1, ArmLpae32S2, ArmLpaeS1, ArmLpaeS2};
use dmaspan_sim::rng::Rng;

use super::lpae::{
    self, SOFTWARE, attributes, device_is_outer_shareable, execute_never_is_0b10, start_level,
    walk_fields,
};
use super::{Asked, Made, Register, Setup, Subject, Told};
use crate::differences::Expected;
use crate::linux::Kind;

/// TTBCR.EAE and VTCR bit 31.
const EXTENDED: u64 = 1 << 31;
/// TTBCR.EPD1, which Linux leaves to its drivers.
const OTHER_DISABLED: u64 = 1 << 23;

/// Stage 1.
pub(crate) struct S1;

/// Stage 2.
pub(crate) struct S2;

impl Subject for S1 {
    type Format = ArmLpae32S1;
    const NAME: &'static str = "lpae_32_s1";
    const HAS_PAGES: bool = true;
    const SOFTWARE_BIT: u64 = SOFTWARE;

    fn setup(rng: &mut Rng) -> Setup {
        lpae::setup(rng, Kind::Lpae32S1, ArmLpaeS1::<12>::PAGE_SIZES, (32, 40))
    }

    fn format(setup: &Setup, page_sizes: Option<u64>, _root: &[u64]) -> Made<Self> {
        ArmLpae32S1::new(lpae::s1_config(setup, page_sizes))
    }

    fn registers(Told { format, root, met, .. }: Told<'_, ArmLpae32S1>) -> Vec<Register> {
        let ours = format.registers(PhysAddr::new(root[0]));
        // T0SZ is 3 bits of Linux's 64 - input bits.
        let ttbcr = walk_fields(root) & !0b11_1000 | OTHER_DISABLED | EXTENDED;
        let mair = u64::from(ours.mair0) | u64::from(ours.mair1) << 32;
        vec![
            Register { name: "TTBR0", theirs: root[0], ours: ours.ttbr0 },
            Register { name: "TTBCR", theirs: ttbcr, ours: ours.ttbcr.into() },
            Register { name: "MAIR0 and MAIR1", theirs: attributes(root[7], met), ours: mair },
        ]
    }

    fn leaf(_setup: &Setup, asked: Asked, expected: &mut Expected<'_>) {
        device_is_outer_shareable(asked, expected);
    }
}

impl Subject for S2 {
    type Format = ArmLpae32S2;
    const NAME: &'static str = "lpae_32_s2";
    const HAS_PAGES: bool = true;
    const SOFTWARE_BIT: u64 = SOFTWARE;

    fn setup(rng: &mut Rng) -> Setup {
        lpae::setup(rng, Kind::Lpae32S2, ArmLpaeS2::<12>::PAGE_SIZES, (40, 40))
    }

    fn format(setup: &Setup, page_sizes: Option<u64>, root: &[u64]) -> Made<Self> {
        ArmLpae32S2::new(lpae::s2_config::<12>(setup, page_sizes, root))
    }

    /// Linux starts at level 0 where memory has fewer than 40 bits; AArch32 has no such level.
    fn refuses(_setup: &Setup, root: &[u64]) -> bool {
        start_level(12, root) == 0
    }

    fn registers(Told { format, root, .. }: Told<'_, ArmLpae32S2>) -> Vec<Register> {
        let ours = format.registers(PhysAddr::new(root[0]));
        // T0SZ with its sign is 5 bits of Linux's 64 - input bits.
        let vtcr = walk_fields(root) & !0b10_0000 | root[7] << 6 | EXTENDED;
        vec![
            Register { name: "VTTBR", theirs: root[0], ours: ours.vttbr },
            Register { name: "VTCR", theirs: vtcr, ours: ours.vtcr.into() },
        ]
    }

    fn leaf(_setup: &Setup, asked: Asked, expected: &mut Expected<'_>) {
        device_is_outer_shareable(asked, expected);
        execute_never_is_0b10(asked, expected);
    }
}
