//! io-pgtable-arm: 64-bit LPAE, stages 1 and 2.

use dmaspan::io_pgtable::{
    ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2, ArmLpaeS2Config, Half, OuterWalks, S2MemoryTypes,
};
use dmaspan::{PhysAddr, Prot, lg2};
use dmaspan_sim::rng::Rng;

use super::{Asked, Made, Register, Setup, Subject, Told, any_walks, chance, one_of, width};
use crate::differences::{Difference, Expected, Met};
use crate::linux::Kind;

/// `IO_PGTABLE_QUIRK_ARM_TTBR1`.
pub(crate) const TTBR1: u64 = 1 << 5;
/// `IO_PGTABLE_QUIRK_ARM_OUTER_WBWA`.
const OUTER_WBWA: u64 = 1 << 6;
/// `IO_PGTABLE_QUIRK_ARM_HD`.
const HARDWARE_DIRTY: u64 = 1 << 7;
/// `IO_PGTABLE_QUIRK_ARM_S2FWB`.
const FORCED: u64 = 1 << 8;
/// `IO_PGTABLE_QUIRK_NO_WARN`.
pub(crate) const NO_WARN: u64 = 1 << 9;
/// Linux's mark of links that it wrote back, in both stages.
pub(super) const SOFTWARE: u64 = 1 << 55;
/// SH: 0b10 is outer shareable.
const SHAREABILITY: u64 = 0b11 << 8;
const OUTER: u64 = 0b10 << 8;

/// Stage 1 with a granule of `2^G` bytes.
pub(crate) struct S1<const G: u32>;

/// Stage 2 with a granule of `2^G` bytes.
pub(crate) struct S2<const G: u32>;

/// The most bits of addresses that a granule allows.
const fn most_bits(granule_lg2: u32) -> u32 {
    if granule_lg2 == 16 { 52 } else { 48 }
}

/// A configuration of either stage: its widths, its sizes and its memory.
pub(super) fn setup(rng: &mut Rng, kind: Kind, sizes: u64, most: (u32, u32)) -> Setup {
    let input_bits = width(rng, &[32, 36, 39, 40, 42, 44, 48, 52], 25, most.0);
    let widths = [32, 36, 40, 42, 44, 48, 52];
    let possible = widths.iter().filter(|&&bits| bits <= most.1).count();
    let output_bits = one_of(rng, &widths[..possible]);
    let walks = any_walks(rng);
    let mut setup = Setup::new(rng, kind, sizes, (input_bits, output_bits), walks);
    setup.linux.features = NO_WARN;
    setup
}

/// The walk's fields of TCR and VTCR, as Linux has them: TxSZ, IRGN, ORGN and SH.
pub(super) fn walk_fields(root: &[u64]) -> u64 {
    root[1] | root[2] << 8 | root[3] << 10 | root[4] << 12
}

/// The leaf differences of both stages.
pub(super) fn device_is_outer_shareable(asked: Asked, expected: &mut Expected<'_>) {
    let outer = |word: u64| word & !SHAREABILITY | OUTER;
    if asked.prot.contains(Prot::MMIO | Prot::CACHE) {
        expected.apply(Difference::DeviceShareability, outer);
    }
}

/// XN of stage 2: 0b10 for Linux's 0b11.
pub(super) fn execute_never_is_0b10(asked: Asked, expected: &mut Expected<'_>) {
    if asked.prot.contains(Prot::NOEXEC) {
        expected.apply(Difference::Stage2ExecuteNever, |word| word & !(1 << 53));
    }
}

/// MAIR: no leaf names the attributes 4 to 7.
pub(super) fn attributes(mair: u64, met: &mut Met) -> u64 {
    let mut expected = Expected::of(mair, met);
    if mair >> 32 == lg2::mask(32) {
        expected.apply(Difference::UnusedAttributes, |mair| mair & lg2::mask(32));
    }
    expected.word
}

/// TTBR or VTTBR: Linux has the address as it is.
fn base_address(setup: &Setup, paddr: u64, met: &mut Met) -> u64 {
    let mut expected = Expected::of(paddr, met);
    let moved = |paddr: u64| paddr & ((1 << 48) - 1) | (paddr >> 48 & 0xf) << 2;
    if setup.linux.output_bits == 52 {
        expected.apply(Difference::BaseAddress, moved);
    }
    expected.word
}

impl<const G: u32> Subject for S1<G> {
    type Format = ArmLpaeS1<G>;
    const NAME: &'static str = match G {
        12 => "lpae_s1_4k",
        14 => "lpae_s1_16k",
        _ => "lpae_s1_64k",
    };
    const HAS_PAGES: bool = true;
    const SOFTWARE_BIT: u64 = SOFTWARE;

    fn setup(rng: &mut Rng) -> Setup {
        let most = most_bits(G);
        let mut setup = setup(rng, Kind::LpaeS1, ArmLpaeS1::<G>::PAGE_SIZES, (most, most));
        if chance(rng, 25) {
            setup.half = Half::Upper;
            setup.linux.features |= TTBR1;
        }
        if setup.non_coherent() {
            setup.linux.features |= if chance(rng, 40) { OUTER_WBWA } else { 0 };
        } else if setup.half == Half::Lower && chance(rng, 40) {
            setup.dirty = true;
            setup.linux.features |= HARDWARE_DIRTY;
        }
        setup
    }

    fn format(setup: &Setup, page_sizes: Option<u64>, _root: &[u64]) -> Made<Self> {
        ArmLpaeS1::new(s1_config(setup, page_sizes))
    }

    fn registers(told: Told<'_, ArmLpaeS1<G>>) -> Vec<Register> {
        let Told { setup, format, at: (at, _), root, met } = told;
        let ours = format.registers(at);
        let there = format.registers(PhysAddr::new(root[0]));
        let (half, other_disabled) = match setup.half {
            Half::Lower => (0, 1 << 23),
            Half::Upper => (16, 1 << 7),
        };
        // What Linux leaves to its drivers: EPDx of the other half, HA and HD.
        let managed = if setup.dirty { 0b11 << 39 } else { 0 };
        let tcr = (walk_fields(root) | root[5] << 14) << half | root[6] << 32;
        let ttbr = base_address(setup, root[0], met);
        vec![
            Register { name: "TTBR", theirs: ttbr, ours: there.ttbr },
            Register { name: "TCR", theirs: tcr | other_disabled | managed, ours: ours.tcr },
            Register { name: "MAIR", theirs: attributes(root[7], met), ours: ours.mair },
        ]
    }

    fn leaf(setup: &Setup, asked: Asked, expected: &mut Expected<'_>) {
        device_is_outer_shareable(asked, expected);
        if setup.dirty && asked.fresh && asked.prot.contains(Prot::WRITE) {
            expected.apply(Difference::StartsClean, |word| word | 1 << 7);
        }
    }
}

impl<const G: u32> Subject for S2<G> {
    type Format = ArmLpaeS2<G>;
    const NAME: &'static str = match G {
        12 => "lpae_s2_4k",
        14 => "lpae_s2_16k",
        _ => "lpae_s2_64k",
    };
    const HAS_PAGES: bool = true;
    const SOFTWARE_BIT: u64 = SOFTWARE;

    fn setup(rng: &mut Rng) -> Setup {
        let most = most_bits(G);
        let mut setup = setup(rng, Kind::LpaeS2, ArmLpaeS2::<G>::PAGE_SIZES, (most, most));
        // Few tables translate more than memory has.
        if setup.linux.input_bits > setup.linux.output_bits && chance(rng, 90) {
            setup.linux.input_bits = width(rng, &[32, 36, 40, 42], 25, setup.linux.output_bits);
        }
        setup.linux.features |= if chance(rng, 30) { FORCED } else { 0 };
        setup
    }

    fn format(setup: &Setup, page_sizes: Option<u64>, root: &[u64]) -> Made<Self> {
        ArmLpaeS2::new(s2_config::<G>(setup, page_sizes, root))
    }

    /// AArch64.S2MinTxSZ: a table translates no more than there is memory.
    fn refuses(setup: &Setup, _root: &[u64]) -> bool {
        setup.linux.input_bits > setup.linux.output_bits
    }

    fn registers(told: Told<'_, ArmLpaeS2<G>>) -> Vec<Register> {
        let Told { setup, format, at: (at, _), root, met } = told;
        let vtcr = walk_fields(root) | root[7] << 6 | root[5] << 14 | root[6] << 16 | 1 << 31;
        let vttbr = base_address(setup, root[0], met);
        let there = format.registers(PhysAddr::new(root[0]));
        vec![
            Register { name: "VTTBR", theirs: vttbr, ours: there.vttbr },
            Register { name: "VTCR", theirs: vtcr, ours: format.registers(at).vtcr },
        ]
    }

    fn leaf(_setup: &Setup, asked: Asked, expected: &mut Expected<'_>) {
        device_is_outer_shareable(asked, expected);
        execute_never_is_0b10(asked, expected);
    }
}

/// The manual's level of Linux's root, out of VTCR.SL0.
pub(super) fn start_level(granule_lg2: u32, root: &[u64]) -> u32 {
    let start = u32::try_from(!root[7] & 0b11).unwrap_or(0);
    // With 4K the field counts from level 2 on, and 0b11 is level 3.
    if granule_lg2 == 12 { start.wrapping_sub(1) & 0b11 } else { start }
}

/// What this side is told of a first stage.
pub(super) fn s1_config(setup: &Setup, page_sizes: Option<u64>) -> ArmLpaeS1Config {
    let outer = setup.has(OUTER_WBWA);
    ArmLpaeS1Config {
        page_sizes,
        half: setup.half,
        walks: setup.linux.walks,
        outer_walks: if outer { OuterWalks::WriteBack } else { OuterWalks::AsInner },
        dirty: setup.tracking(),
        ..ArmLpaeS1Config::new(setup.linux.input_bits, setup.linux.output_bits)
    }
}

/// What this side is told of a second stage.
pub(super) fn s2_config<const G: u32>(
    setup: &Setup,
    page_sizes: Option<u64>,
    root: &[u64],
) -> ArmLpaeS2Config {
    let forced = setup.has(FORCED);
    ArmLpaeS2Config {
        page_sizes,
        walks: setup.linux.walks,
        start_level: Some(start_level(G, root)),
        memory_types: if forced { S2MemoryTypes::Forced } else { S2MemoryTypes::Combined },
        ..ArmLpaeS2Config::new(setup.linux.input_bits, setup.linux.output_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_levels_are_read_as_the_field_has_them() {
        let sl0 = |sl0| [0, 0, 0, 0, 0, 0, 0, sl0];
        assert_eq!([2, 1, 0, 3].map(|field| start_level(12, &sl0(field))), [0, 1, 2, 3]);
        assert_eq!([3, 2, 1, 0].map(|field| start_level(16, &sl0(field))), [0, 1, 2, 3]);
    }
}
