//! generic_pt's vtdss.

use dmaspan::io_pgtable::{ReadOnlyLeaves, SnoopControl, VtdSs, VtdSsConfig};
use dmaspan::{Coherency, PhysAddr};
use dmaspan_sim::rng::Rng;

use super::{Asked, Made, Register, Setup, Subject, Told, any_walks, chance, one_of, width};
use crate::differences::{Difference, Expected};
use crate::linux::{Config, Kind};

/// `PT_FEAT_DMA_INCOHERENT` and `PT_FEAT_FLUSH_RANGE`.
pub(super) const INCOHERENT: u64 = 1 << 0;
pub(super) const FLUSH_RANGE: u64 = 1 << 4;
/// `PT_FEAT_VTDSS_FORCE_COHERENCE`.
const FORCE_COHERENCE: u64 = 1 << 7;
/// `PT_FEAT_VTDSS_FORCE_WRITEABLE`.
const FORCE_WRITEABLE: u64 = 1 << 8;
/// A, in leaves and links.
const ACCESSED: u64 = 1 << 8;

/// VT-d's second stage.
pub(crate) struct Vtd;

impl Subject for Vtd {
    type Format = VtdSs;
    const NAME: &'static str = "vtd_ss";
    const HAS_PAGES: bool = false;
    const SOFTWARE_BIT: u64 = 1 << 10;

    fn setup(rng: &mut Rng) -> Setup {
        let walks = any_walks(rng);
        let (input_bits, top_level) = one_of(rng, &[(39, 2), (48, 3), (57, 4)]);
        let output_bits = width(rng, &[32, 39, 46, 48, 52], 32, 52);
        let mut features = FLUSH_RANGE | if walks == Coherency::Coherent { 0 } else { INCOHERENT };
        features |= if chance(rng, 50) { FORCE_COHERENCE } else { 0 };
        features |= if chance(rng, 25) { FORCE_WRITEABLE } else { 0 };
        let bits = (input_bits, output_bits);
        let mut setup = Setup::new(rng, Kind::VtdSs, VtdSs::PAGE_SIZES, bits, walks);
        setup.linux = Config { features, top_level, ..setup.linux };
        setup.dirty = walks == Coherency::Coherent && chance(rng, 40);
        setup
    }

    fn format(setup: &Setup, page_sizes: Option<u64>, _root: &[u64]) -> Made<Self> {
        let forced = setup.has(FORCE_COHERENCE);
        let refused = setup.has(FORCE_WRITEABLE);
        VtdSs::new(VtdSsConfig {
            page_sizes,
            snoop: if forced { SnoopControl::Forced } else { SnoopControl::Absent },
            read_only: if refused { ReadOnlyLeaves::Refused } else { ReadOnlyLeaves::Allowed },
            dirty: setup.tracking(),
            walks: setup.linux.walks,
            ..VtdSsConfig::new(setup.linux.input_bits, setup.linux.output_bits)
        })
    }

    fn registers(Told { setup, format, root, .. }: Told<'_, VtdSs>) -> Vec<Register> {
        let ours = format.registers(PhysAddr::new(root[0]));
        // What Linux's driver adds: SSADE where it tracks, PWSNP where walks are coherent.
        let entry = root[0] | u64::from(setup.dirty) << 9 | root[1] << 2;
        let snooped = u64::from(!setup.non_coherent()) << 23;
        vec![
            Register { name: "PASID entry", theirs: entry, ours: ours.pasid_entry[0] },
            Register { name: "PASID entry, high", theirs: snooped, ours: ours.pasid_entry[1] },
            Register { name: "context entry", theirs: root[0], ours: ours.context_entry[0] },
            Register { name: "context entry, high", theirs: root[1], ours: ours.context_entry[1] },
        ]
    }

    fn leaf(setup: &Setup, _asked: Asked, expected: &mut Expected<'_>) {
        Self::link(setup, expected);
    }

    fn link(setup: &Setup, expected: &mut Expected<'_>) {
        if setup.dirty {
            expected.apply(Difference::StartsAccessed, |word| word | ACCESSED);
        }
    }
}
