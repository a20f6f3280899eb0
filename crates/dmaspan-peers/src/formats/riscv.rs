//! generic_pt's riscv64: first stages.

use dmaspan::io_pgtable::{Half, Riscv, RiscvConfig, RiscvMode, RiscvStage};
use dmaspan::{Coherency, PhysAddr, Prot, lg2};
use dmaspan_sim::rng::Rng;

use super::vtd_ss::FLUSH_RANGE;
use super::x86_64::SIGN_EXTEND;
use super::{Asked, Made, Register, Setup, Subject, Told, chance, one_of, width};
use crate::differences::{Difference, Expected};
use crate::linux::Kind;

/// `PT_FEAT_DETAILED_GATHER`, which Linux's tables always have.
const DETAILED_GATHER: u64 = 1 << 6;
/// `PT_FEAT_RISCV_SVNAPOT_64K`.
const NAPOT: u64 = 1 << 7;
/// U.
const USER: u64 = 1 << 4;

/// RISC-V's first stage.
pub(crate) struct Rv64;

impl Subject for Rv64 {
    type Format = Riscv;
    const NAME: &'static str = "riscv64";
    const HAS_PAGES: bool = false;

    fn setup(rng: &mut Rng) -> Setup {
        let input_bits = one_of(rng, &[39, 48, 57]);
        let output_bits = width(rng, &[32, 48, 56], 32, 56);
        let napot = chance(rng, 60);
        let half = if chance(rng, 30) { Half::Upper } else { Half::Lower };
        let sizes = Riscv::PAGE_SIZES | if napot { Riscv::NAPOT_SIZES } else { 0 };
        let bits = (input_bits, output_bits);
        let mut setup = Setup::new(rng, Kind::Riscv64, sizes, bits, Coherency::Coherent);
        let features = FLUSH_RANGE | SIGN_EXTEND | DETAILED_GATHER;
        setup.linux.features = features | if napot { NAPOT } else { 0 };
        setup.linux.top_level = (input_bits - 12) / 9 - 1;
        Setup { half, ..setup }
    }

    fn format(setup: &Setup, page_sizes: Option<u64>, _root: &[u64]) -> Made<Self> {
        let mode = match setup.linux.input_bits {
            39 => RiscvMode::Sv39,
            48 => RiscvMode::Sv48,
            _ => RiscvMode::Sv57,
        };
        let all = setup.linux.page_sizes & (Riscv::PAGE_SIZES | Riscv::NAPOT_SIZES);
        let within = all & lg2::mask(setup.linux.input_bits.min(setup.linux.output_bits + 1));
        Riscv::new(RiscvConfig {
            stage: RiscvStage::First(setup.half),
            page_sizes: page_sizes.or(Some(within)),
            ..RiscvConfig::new(mode, setup.linux.output_bits)
        })
    }

    fn registers(Told { format, root, .. }: Told<'_, Riscv>) -> Vec<Register> {
        let ours = format.registers(PhysAddr::new(root[0]));
        let atp = root[1] << 60 | root[0] >> 12;
        vec![
            Register { name: "iosatp", theirs: atp, ours: ours.atp },
            Register { name: "DC.tc", theirs: 0, ours: ours.tc },
        ]
    }

    fn leaf(_setup: &Setup, asked: Asked, expected: &mut Expected<'_>) {
        if asked.prot.contains(Prot::PRIV) {
            expected.apply(Difference::Privilege, |word| word & !USER);
        }
    }
}
