//! Properties of every walker that shares the way down, whatever the tables hold.

use dmaspan::{Iova, PhysAddr, lg2};

use super::amd_v1::{AmdV1WalkRegisters, AmdV1Walker};
use super::mock::{MockWalkRegisters, MockWalker};
use super::riscv::{RiscvRoot, RiscvWalkRegisters, RiscvWalker};
use super::vtd_ss::{VtdSsWalkRegisters, VtdSsWalker};
use super::x86_64::{X86_64WalkRegisters, X86Walker};
use super::{Access, Checked, NotATable, Requester, Switch, TableWords, WalkPath};
use crate::rng::Rng;

/// Memory full of tables: each word follows from its address. Most bits are clear, or hardly an
/// entry would pass for valid.
struct Noise {
    seed: u64,
    /// Bits that are set in every other word.
    frequent: u64,
}

impl TableWords for Noise {
    fn read_u64(&self, paddr: PhysAddr) -> Result<u64, NotATable> {
        let mut rng = Rng::new(self.seed ^ paddr.get());
        let sparse = rng.next() & rng.next() & rng.next() & rng.next() & rng.next();
        // Bit 0 makes an entry valid or readable.
        Ok(sparse | (rng.next() & self.frequent) | 0x1)
    }
}

/// Bits 3:1, in most formats permissions.
const PERMISSIONS: u64 = 0xe;
/// The level to which an entry of AMD's leads.
const NEXT_LEVEL: u64 = 0xe00;

/// Walks random addresses through noise and checks what a translation promises. Returns how many
/// leaves were found.
fn wander<W: Checked>(walker: &W, levels: usize, frequent: u64) -> usize {
    let mut rng = Rng::new(7);
    let mut found = 0;
    for round in 0..4000 {
        let noise = Noise { seed: round, frequent };
        let reach = walker.input_ranges();
        let range = if rng.below(2) == 0 { reach[0] } else { reach[reach.len() - 1] };
        let offset = rng.next() & range.len_less_one();
        let iova = Iova::new(range.start().get() | offset);
        let root = walker.root(iova, Access::Write).unwrap();
        let mut path = WalkPath::new();
        let walked = walker.walk_from(&noise, root, iova, Access::Write, &mut path);
        assert!((1..=levels).contains(&path.len()), "{path:?}");
        assert!(path.iter().all(|step| step.link.block.contains(iova)));
        let Ok(leaf) = walked else { continue };
        found += 1;
        assert!(leaf.leaf.contains(iova) && leaf.group.covers(leaf.leaf));
        let mask = lg2::mask(leaf.group_lg2);
        assert_eq!(leaf.paddr.get() & mask, iova.get() & mask);
        // Copies in noise hardly agree; the check must end all the same.
        let _checked = walker.strict_walk(&noise, iova);
    }
    found
}

#[test]
fn walks_of_arbitrary_words_end_and_translate_what_they_say() {
    let vtd = VtdSsWalkRegisters {
        ssptptr: 0,
        aw: 3,
        ssade: Switch::On,
        host_lg2: 52,
        sslps: 3,
        snoop_control: Switch::On,
    };
    assert!(wander(&VtdSsWalker::new(vtd).unwrap(), 5, PERMISSIONS) > 0);
    let x86 = X86_64WalkRegisters { levels: 5, ..Default::default() };
    assert!(wander(&X86Walker::new(x86).unwrap(), 5, PERMISSIONS) > 0);
    for mode in 1..=6u8 {
        let registers = AmdV1WalkRegisters { dte: 3 << 61 | 3 << 7 | u64::from(mode) << 9 | 3 };
        let walker = AmdV1Walker::new(registers).unwrap();
        assert!(wander(&walker, mode.into(), NEXT_LEVEL) > 0, "mode {mode}");
    }
    let riscv = RiscvWalkRegisters {
        stage: RiscvRoot::First { fsc: 10 << 60 },
        updates: Switch::On,
        svnapot: Switch::On,
        svpbmt: Switch::On,
        requester: Requester::User,
        sum: Switch::Off,
    };
    assert!(wander(&RiscvWalker::new(riscv).unwrap(), 5, PERMISSIONS) > 0);
    let stage = RiscvRoot::Second { iohgatp: 8 << 60 };
    assert!(
        wander(&RiscvWalker::new(RiscvWalkRegisters { stage, ..riscv }).unwrap(), 3, PERMISSIONS)
            > 0
    );
    for input_lg2 in [19, 24, 32, 43] {
        let registers = MockWalkRegisters { root: 0, input_lg2, dirty_tracking: Switch::On };
        assert!(
            wander(&MockWalker::new(registers).unwrap(), 4, PERMISSIONS) > 0,
            "{input_lg2} bits"
        );
    }
}
