//! generic_pt's amdv1.

use dmaspan::io_pgtable::{AmdV1, AmdV1Config};
use dmaspan::{Coherency, PhysAddr, Prot, lg2};
use dmaspan_sim::rng::Rng;

use super::{Asked, Made, Register, Root, Setup, Subject, Told, chance, width};
use crate::differences::{Difference, Expected};
use crate::linux::{Config, Kind};

/// `PT_FEAT_DYNAMIC_TOP`, `PT_FEAT_AMDV1_ENCRYPT_TABLES` and `PT_FEAT_AMDV1_FORCE_COHERENCE`, which
/// Linux's tables always have, and `PT_FEAT_FLUSH_RANGE`.
pub(crate) const FEATURES: u64 = 1 << 2 | 1 << 7 | 1 << 8 | 1 << 4;
/// FC of a leaf, and A.
const FORCE_COHERENT: u64 = 1 << 60;
const ACCESSED: u64 = 1 << 5;

/// AMD's host tables.
pub(crate) struct Amd;

impl Subject for Amd {
    type Format = AmdV1;
    const NAME: &'static str = "amd_v1";
    const HAS_PAGES: bool = false;
    const DIRTY_LACKS_LAST: bool = true;

    fn setup(rng: &mut Rng) -> Setup {
        let input_bits = width(rng, &[32, 39, 40, 48, 57, 64], 22, 64);
        let output_bits = width(rng, &[32, 40, 48, 51, 52], 32, 52);
        // Levels that the widest address needs.
        let most = (input_bits - 12).div_ceil(9) - 1;
        let encrypted = if output_bits < 52 && chance(rng, 40) {
            1 << width(rng, &[47, 51], output_bits, 51)
        } else {
            0
        };
        let top_level = width(rng, &[2], 1, most);
        let bits = (input_bits, output_bits);
        let mut setup = Setup::new(rng, Kind::AmdV1, AmdV1::PAGE_SIZES, bits, Coherency::Coherent);
        setup.linux = Config { features: FEATURES, top_level, encrypted, ..setup.linux };
        setup.dirty = chance(rng, 40);
        setup
    }

    fn format(setup: &Setup, page_sizes: Option<u64>, _root: &[u64]) -> Made<Self> {
        let Config { input_bits, output_bits, top_level, encrypted, .. } = setup.linux;
        AmdV1::new(AmdV1Config {
            first_levels: top_level + 1,
            page_sizes,
            dirty: setup.tracking(),
            encryption_bit: (encrypted != 0).then(|| lg2::floor(encrypted)),
            ..AmdV1Config::new(input_bits, output_bits)
        })
    }

    fn root(_setup: &Setup, root: &[u64]) -> Root {
        Root { paddr: root[0], level: u32::try_from(root[1]).ok().and_then(|m| m.checked_sub(1)) }
    }

    fn registers(told: Told<'_, AmdV1>) -> Vec<Register> {
        let Told { setup, format, at: (_, level), root, .. } = told;
        let ours = format.registers(PhysAddr::new(root[0]), level).dte;
        // What Linux's driver adds to the root and its mode: V, TV, IR and IW, HAD where it tracks.
        let driver = 0b11 | 0b11 << 61 | if setup.dirty { 0b11 << 7 } else { 0 };
        let dte = root[0] | setup.linux.encrypted | root[1] << 9 | driver;
        vec![Register { name: "DTE", theirs: dte, ours }]
    }

    fn leaf(setup: &Setup, asked: Asked, expected: &mut Expected<'_>) {
        if !asked.prot.contains(Prot::CACHE) {
            expected.apply(Difference::ForcedCoherence, |word| word & !FORCE_COHERENT);
        }
        if setup.dirty {
            expected.apply(Difference::StartsAccessed, |word| word | ACCESSED);
        }
    }
}
