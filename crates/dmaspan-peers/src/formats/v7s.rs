//! io-pgtable-arm-v7s: short descriptors, Arm's and MediaTek's.

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::{ArmV7s, ArmV7sConfig, ArmV7sVariant};
use dmaspan_sim::rng::Rng;

use super::{Made, Register, Root, Setup, Subject, Told, any_walks, one_of};
use crate::linux::{Config, Kind};

/// `IO_PGTABLE_QUIRK_NO_PERMS`.
const NO_PERMISSIONS: u64 = 1 << 1;
/// `IO_PGTABLE_QUIRK_ARM_MTK_EXT`.
const MEDIATEK: u64 = 1 << 3;
/// `IO_PGTABLE_QUIRK_ARM_MTK_TTBR_EXT`.
const HIGH_TABLES: u64 = 1 << 4;

/// Short descriptors.
pub(crate) struct V7s;

fn variant(setup: &Setup) -> ArmV7sVariant {
    match (setup.has(MEDIATEK), setup.has(HIGH_TABLES)) {
        (false, _) => ArmV7sVariant::Arm,
        (true, false) => ArmV7sVariant::MediaTek,
        (true, true) => ArmV7sVariant::MediaTekHighTables,
    }
}

impl Subject for V7s {
    type Format = ArmV7s;
    const NAME: &'static str = "v7s";
    const HAS_PAGES: bool = true;

    fn setup(rng: &mut Rng) -> Setup {
        let walks = any_walks(rng);
        let features = one_of(
            rng,
            &[0, 0, NO_PERMISSIONS | MEDIATEK, NO_PERMISSIONS | MEDIATEK | HIGH_TABLES],
        );
        let (input_bits, output_bits) = match features {
            0 => (32, 32),
            _ => (one_of(rng, &[32, 34]), one_of(rng, &[32, 33, 34, 35])),
        };
        let table_bits = if features & HIGH_TABLES == 0 { 32 } else { output_bits };
        let bits = (input_bits, table_bits);
        let mut setup = Setup::new(rng, Kind::V7s, ArmV7s::PAGE_SIZES, bits, walks);
        setup.linux = Config { features, output_bits, ..setup.linux };
        setup
    }

    fn format(setup: &Setup, page_sizes: Option<u64>, _root: &[u64]) -> Made<Self> {
        ArmV7s::new(ArmV7sConfig {
            variant: variant(setup),
            page_sizes: page_sizes.or(Some(ArmV7s::PAGE_SIZES)),
            walks: setup.linux.walks,
            ..ArmV7sConfig::new(setup.linux.input_bits, setup.linux.output_bits)
        })
    }

    /// The first table is aligned to its size, 16K or 64K; what is below is the register's.
    fn root(setup: &Setup, root: &[u64]) -> Root {
        let high = if setup.has(MEDIATEK) { (root[0] & 0b111) << 32 } else { 0 };
        Root { paddr: root[0] & !0x3fff | high, level: None }
    }

    fn registers(Told { setup, format, root, .. }: Told<'_, ArmV7s>) -> Vec<Register> {
        let ours = format.registers(PhysAddr::new(Self::root(setup, root).paddr));
        vec![
            Register { name: "TTBR", theirs: root[0], ours: ours.ttbr.into() },
            Register { name: "TTBCR", theirs: root[1], ours: ours.tcr.into() },
            Register { name: "PRRR", theirs: root[2], ours: ours.prrr.into() },
            Register { name: "NMRR", theirs: root[3], ours: ours.nmrr.into() },
        ]
    }
}
