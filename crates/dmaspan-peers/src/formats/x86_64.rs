//! generic_pt's x86_64: VT-d's first stage and AMD's guest tables.

use dmaspan::io_pgtable::{ExecuteDisable, Half, X86_64, X86_64Config};
use dmaspan::{Coherency, PhysAddr, Prot, lg2};
use dmaspan_sim::rng::Rng;

use super::vtd_ss::{FLUSH_RANGE, INCOHERENT};
use super::{Asked, Made, Register, Setup, Subject, Told, any_walks, chance, one_of, width};
use crate::differences::{Difference, Expected};
use crate::linux::{Config, Kind};

/// `PT_FEAT_SIGN_EXTEND`.
pub(super) const SIGN_EXTEND: u64 = 1 << 3;
/// `PT_FEAT_X86_64_AMD_ENCRYPT_TABLES`.
const ENCRYPT: u64 = 1 << 7;
/// U/S, PWT and PCD, and XD.
const USER: u64 = 1 << 2;
const UNCACHEABLE: u64 = 0b11 << 3;
const EXECUTE_DISABLE: u64 = 1 << 63;

/// x86-64's tables.
pub(crate) struct X86;

fn execute_disable(setup: &Setup) -> ExecuteDisable {
    if setup.variant == 0 { ExecuteDisable::Absent } else { ExecuteDisable::Enabled }
}

impl Subject for X86 {
    type Format = X86_64;
    const NAME: &'static str = "x86_64";
    const HAS_PAGES: bool = false;
    const SOFTWARE_BIT: u64 = 1 << 9;

    fn setup(rng: &mut Rng) -> Setup {
        let walks = any_walks(rng);
        let top_level = one_of(rng, &[3, 4]);
        let signed = chance(rng, 70);
        let upper = signed && chance(rng, 40);
        let output_bits = width(rng, &[32, 46, 48, 51, 52], 32, 52);
        let encrypted = if output_bits < 52 && chance(rng, 30) {
            1 << width(rng, &[47, 51], output_bits, 51)
        } else {
            0
        };
        let mut features = FLUSH_RANGE | if walks == Coherency::Coherent { 0 } else { INCOHERENT };
        features |= if signed { SIGN_EXTEND } else { 0 };
        features |= if encrypted == 0 { 0 } else { ENCRYPT };
        // The sign is a bit of its own where there is one.
        let input_bits = 12 + 9 * (top_level + 1) - u32::from(!signed);
        let bits = (input_bits, output_bits);
        let mut setup = Setup::new(rng, Kind::X86_64, X86_64::PAGE_SIZES, bits, walks);
        setup.linux = Config { features, top_level, encrypted, ..setup.linux };
        setup.half = if upper { Half::Upper } else { Half::Lower };
        setup.variant = u32::from(chance(rng, 50));
        setup
    }

    fn format(setup: &Setup, page_sizes: Option<u64>, _root: &[u64]) -> Made<Self> {
        let Config { top_level, output_bits, encrypted, .. } = setup.linux;
        X86_64::new(X86_64Config {
            half: setup.half,
            page_sizes,
            execute_disable: execute_disable(setup),
            encryption_bit: (encrypted != 0).then(|| lg2::floor(encrypted)),
            ..X86_64Config::new(12 + 9 * (top_level + 1), output_bits)
        })
    }

    fn registers(Told { setup, format, root, .. }: Told<'_, X86_64>) -> Vec<Register> {
        let ours = format.registers(PhysAddr::new(root[0]));
        let mode = root[1].wrapping_sub(4);
        // What Linux's drivers add: NXE where hardware has it, V and the encryption bit in GCR3.
        let no_execute = u64::from(execute_disable(setup) == ExecuteDisable::Enabled) << 5;
        let gcr3 = root[0] | setup.linux.encrypted | 1;
        let entry = root[0] | mode << 2 | no_execute;
        vec![
            Register { name: "PASID entry", theirs: entry, ours: ours.pasid_entry },
            Register { name: "GCR3", theirs: gcr3, ours: ours.gcr3_entry },
            Register { name: "DTE", theirs: mode << 54, ours: ours.device_table_entry },
        ]
    }

    fn leaf(setup: &Setup, asked: Asked, expected: &mut Expected<'_>) {
        let asks = |prot| asked.prot.contains(prot);
        if asks(Prot::PRIV) {
            expected.apply(Difference::Privilege, |word| word & !USER);
        }
        if asks(Prot::MMIO) {
            expected.apply(Difference::MemoryType, |word| word | UNCACHEABLE);
        }
        if asks(Prot::NOEXEC) && execute_disable(setup) == ExecuteDisable::Enabled {
            expected.apply(Difference::NoExecute, |word| word | EXECUTE_DISABLE);
        }
    }
}
