//! A format of two entries a table, so that trees are deep and loom has little to try.

use dmaspan::io_pgtable::{Entry, Format, Geometry, Groups, Leaf, TableShape};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};

/// The level of the highest root: eight pages.
pub(crate) const TOP: u32 = 2;

const VALID: u64 = 1 << 0;
const TABLE: u64 = 1 << 1;
const WRITE: u64 = 1 << 2;
const ADDRESS: u64 = lg2::mask(48) & !lg2::mask(12);

/// Pages of 4K in up to three levels of tables. A tree begins with the level `FIRST`.
#[derive(Clone, Debug)]
pub(crate) struct Tiny<const FIRST: u32>;

// SAFETY: 1. A link is VALID | TABLE with the address of a table, which is a multiple of 4K below
// 2^48, so `decode` gives it back. 2. No leaf has TABLE, and an empty entry is not VALID; level 0
// has no tables. 3. All answers are constants.
unsafe impl<const FIRST: u32> Format for Tiny<FIRST> {
    type Word = u64;
    const GRANULE_LG2: u32 = 12;
    const LG2_ENTRIES: u32 = 1;
    const GROUPS: Groups = Groups::Repeated;
    const GROWS: bool = FIRST != TOP;

    fn geometry(&self) -> Geometry {
        let max_paddr = PhysAddr::new(lg2::mask(48));
        let table = TableShape { lg2_size: 4, lg2_align: 12, max_paddr };
        Geometry {
            aperture: IovaRange::from_len(Iova::new(0), lg2::size(Self::shift(TOP + 1))).unwrap(),
            output_bits: 48,
            top_level: TOP,
            page_sizes: 1 << 12,
            root: table,
            table,
        }
    }

    fn first_top_level(&self) -> u32 {
        FIRST
    }

    fn template(&self, _level: u32, _lg2: u32, prot: Prot) -> u64 {
        if prot.contains(Prot::WRITE) { VALID | WRITE } else { VALID }
    }

    fn leaf(&self, template: u64, paddr: PhysAddr) -> u64 {
        template | paddr.get()
    }

    fn advance(&self, leaf: u64, bytes: u64) -> u64 {
        leaf.wrapping_add(bytes)
    }

    fn link(&self, _level: u32, table: PhysAddr) -> u64 {
        VALID | TABLE | table.get()
    }

    fn decode(&self, level: u32, word: u64) -> Entry {
        let paddr = PhysAddr::new(word & ADDRESS);
        match (word & (VALID | TABLE), level) {
            (0b11, 1..) => Entry::Table(paddr),
            (0b01, 0) => Entry::Leaf(Leaf { paddr, lg2: Self::GRANULE_LG2 }),
            _ if word == 0 => Entry::Empty,
            _ => Entry::Invalid,
        }
    }

    fn prot(&self, _level: u32, leaf: u64) -> Prot {
        if leaf & WRITE != 0 { Prot::READ_WRITE } else { Prot::READ }
    }
}
