//! generic_pt's riscv64: first stages.

use dmaspan::io_pgtable::{ConfigError, Half, Riscv, RiscvConfig, RiscvMode, RiscvStage};
use dmaspan::{Coherency, PhysAddr, Prot, lg2};
use dmaspan_sim::rng::Rng;

use super::vtd_ss::FLUSH_RANGE;
use super::x86_64::SIGN_EXTEND;
use super::{Asked, Register, Root, Setup, Subject, chance, one_of, place, some_sizes, width};
use crate::differences::{Difference, Expected, Met};
use crate::linux::{Config, Kind};

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
        Setup {
            linux: Config {
                kind: Kind::Riscv64,
                features: FLUSH_RANGE
                    | SIGN_EXTEND
                    | DETAILED_GATHER
                    | if napot { NAPOT } else { 0 },
                page_sizes: some_sizes(rng, sizes),
                input_bits,
                output_bits,
                coherent: true,
                top_level: (input_bits - 12) / 9 - 1,
                tables: place(rng, output_bits),
                encrypted: 0,
            },
            half,
            walks: Coherency::Coherent,
            dirty: false,
            variant: 0,
        }
    }

    fn format(setup: &Setup, page_sizes: Option<u64>, _root: &[u64]) -> Result<Riscv, ConfigError> {
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

    fn listed_sizes(setup: &Setup, sizes: u64) -> u64 {
        let Config { input_bits, output_bits, .. } = setup.linux;
        sizes & !lg2::mask((input_bits - 1).min(output_bits))
    }

    fn root(setup: &Setup, root: &[u64]) -> Root {
        Root { paddr: root[0], level: Some(setup.linux.top_level) }
    }

    fn registers(
        _setup: &Setup,
        format: &Riscv,
        _at: (PhysAddr, u32),
        root: &[u64],
        _met: &mut Met,
    ) -> Vec<Register> {
        let ours = format.registers(PhysAddr::new(root[0]));
        let atp = root[1] << 60 | root[0] >> 12;
        vec![
            Register { name: "iosatp", theirs: atp, ours: ours.atp },
            Register { name: "DC.tc", theirs: 0, ours: ours.tc },
        ]
    }

    fn leaf(_setup: &Setup, asked: Asked, expected: &mut Expected<'_>) {
        let privileged = asked.prot.contains(Prot::PRIV);
        if privileged {
            expected.apply(Difference::Privilege, |word| word & !USER);
        }
    }
}
