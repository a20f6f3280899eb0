//! A made-up format: the worked example for writing one, and what keeps code from assuming that a
//! page has 4K and a table 512 entries.
//!
//! There is no manual but this. Entries are little-endian 64-bit words, tables have 256 of them in
//! 2 KiB, and translate 19 to 43 bits in one to four levels. The root has as many entries as the
//! input bits need.
//!
//! | bit | meaning |
//! |---|---|
//! | 0 | valid |
//! | 1 | leads to a table; above the lowest level only |
//! | 2, 3 | reads, writes are permitted |
//! | 4 | accesses are coherent with the CPU's caches |
//! | 5 | no instruction fetches |
//! | 6 | dirty: hardware sets it at the first write through the leaf, where it keeps dirty state |
//! | 7 | run: one of 16 equal entries that are one leaf of 16 times the size |
//! | 8 | ignored in links |
//! | 51:11 | the address of the table or of the whole leaf |
//!
//! All other bits are zero. Leaves are at the three lowest levels: 2K, 512K and 128M, and as runs
//! 32K, 8M and 2G. Runs are aligned to their size.

use dmaspan::io_pgtable::{ConfigError, DirtyTracking, Entry, Format, Geometry, Groups, Leaf};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};

const VALID: u64 = 1 << 0;
const TABLE: u64 = 1 << 1;
const READ: u64 = 1 << 2;
const WRITE: u64 = 1 << 3;
const CACHE: u64 = 1 << 4;
const NO_EXECUTE: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const RUN: u64 = 1 << 7;
const IGNORED: u64 = 1 << 8;
const ADDRESS: u64 = lg2::mask(52) & !lg2::mask(11);

/// log2 of the entries of a run.
const LG2_RUN: u32 = 4;
/// The highest level that has leaves.
const TOP_LEAF: u32 = 2;

/// The registers of a mock tree's hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MockRegisters {
    /// Where the root is.
    pub root: PhysAddr,
    /// Bits of input addresses.
    pub input_bits: u32,
    /// What it does with bit 6.
    pub dirty: DirtyTracking,
}

/// The format of this module.
#[derive(Clone, Debug)]
pub struct MockFormat {
    input_bits: u32,
    dirty: DirtyTracking,
}

impl MockFormat {
    /// Leaves that are one entry each.
    pub const PAGE_SIZES: u64 = 1 << 11 | 1 << 19 | 1 << 27;
    /// Leaves that are a run of entries.
    pub const RUN_SIZES: u64 = Self::PAGE_SIZES << LG2_RUN;

    /// A format that translates `input_bits`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for bits that are not 19 to 43.
    pub fn new(input_bits: u32, dirty: DirtyTracking) -> Result<Self, ConfigError> {
        if !(19..=43).contains(&input_bits) {
            return Err(ConfigError::InputBits { input_bits, supported: "19 to 43" });
        }
        Ok(Self { input_bits, dirty })
    }

    /// Returns what the hardware is given, for a table whose root is at `root`.
    pub const fn registers(&self, root: PhysAddr) -> MockRegisters {
        MockRegisters { root, input_bits: self.input_bits, dirty: self.dirty }
    }
}

// SAFETY: 1. A link is VALID | TABLE with the address of a table, which is aligned to 2 KiB and
// within 52 bits, so `decode` gives it back; bit 8 is in no mask. 2. No leaf has TABLE, hardware
// sets DIRTY alone, an empty entry is not VALID, and level 0 has no tables. 3. All answers follow
// from two fields that nothing changes.
#[expect(unsafe_code, reason = "the promise of a format")]
unsafe impl Format for MockFormat {
    type Word = u64;
    const GRANULE_LG2: u32 = 11;
    const LG2_ENTRIES: u32 = 8;
    const GROUPS: Groups = Groups::Repeated;
    const WRITTEN_BACK: u64 = IGNORED;
    const DIRTY: u64 = DIRTY;

    fn geometry(&self) -> Geometry {
        // The fewest levels of 8 bits above the granule's 11.
        let top_level = (self.input_bits - Self::GRANULE_LG2).div_ceil(Self::LG2_ENTRIES) - 1;
        let tree = (top_level, self.input_bits - Self::shift(top_level));
        let sizes = (Self::PAGE_SIZES | Self::RUN_SIZES) & lg2::mask(self.input_bits + 1);
        // A run needs the level of its entries.
        let sizes = sizes & lg2::mask(Self::shift(top_level + 1));
        let aperture = IovaRange::new(Iova::new(0), Iova::new(lg2::mask(self.input_bits)))
            .unwrap_or(IovaRange::point(Iova::new(0)));
        Geometry::of_tree::<Self>(aperture, 52, sizes, tree)
    }

    #[inline(always)]
    fn template(&self, level: u32, lg2: u32, prot: Prot) -> u64 {
        let bit = |right, bit| if prot.contains(right) { bit } else { 0 };
        let run = if lg2 > Self::shift(level) { RUN } else { 0 };
        let access = bit(Prot::READ, READ) | bit(Prot::WRITE, WRITE);
        VALID | run | access | bit(Prot::CACHE, CACHE) | bit(Prot::NOEXEC, NO_EXECUTE)
    }

    #[inline(always)]
    fn link(&self, _level: u32, table: PhysAddr) -> u64 {
        VALID | TABLE | table.get()
    }

    #[inline(always)]
    fn decode(&self, level: u32, word: u64) -> Entry {
        let paddr = PhysAddr::new(word & ADDRESS);
        match (word & (VALID | TABLE), level) {
            (0b11, 1..) => Entry::Table(paddr),
            (0b01, 0..=TOP_LEAF) => {
                let run = if word & RUN != 0 { LG2_RUN } else { 0 };
                Entry::Leaf(Leaf { paddr, lg2: Self::shift(level) + run })
            }
            _ if word == 0 => Entry::Empty,
            _ => Entry::Invalid,
        }
    }

    #[inline(always)]
    fn prot(&self, _level: u32, leaf: u64) -> Prot {
        let mut prot = Prot::empty();
        prot.set(Prot::READ, leaf & READ != 0);
        prot.set(Prot::WRITE, leaf & WRITE != 0);
        prot.set(Prot::CACHE, leaf & CACHE != 0);
        prot.set(Prot::NOEXEC, leaf & NO_EXECUTE != 0);
        prot
    }

    fn tracks_dirty(&self) -> bool {
        self.dirty == DirtyTracking::Hardware
    }
}
