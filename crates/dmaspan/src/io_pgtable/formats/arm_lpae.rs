//! Both stages of Arm's long-descriptor formats share this code.
//!
//! Source: Arm Architecture Reference Manual for A-profile, DDI 0487, chapter D8 "The AArch64
//! Virtual Memory System Architecture", D8.3 "Translation table descriptor formats", and the fields
//! that TCR_EL1 and VTCR_EL2 share (D24).

use super::{ConfigError, config};
use crate::addr::PhysAddr;
use crate::io_pgtable::format::{Entry, Format, Leaf, sizes_within};
use crate::lg2;
use crate::prot::Coherency;

/// Bit 0: the descriptor is valid (D8.3.1).
pub(super) const VALID: u64 = 1 << 0;
/// Bit 1: a table above level 0, a page at level 0; a block has it clear (D8.3.1).
pub(super) const TABLE_OR_PAGE: u64 = 1 << 1;
/// Bits 9:8: shareability (D8.6).
pub(super) const SH_OUTER: u64 = 0b10 << 8;
pub(super) const SH_INNER: u64 = 0b11 << 8;
/// Bit 10, AF: accessed; a clear one makes hardware fault or set it (D8.5.1).
pub(super) const ACCESSED: u64 = 1 << 10;
/// Bit 51, DBM: hardware may turn writable-clean into writable-dirty (D8.5, FEAT_HAFDBS).
pub(super) const DIRTY_MODIFIER: u64 = 1 << 51;
/// Bit 52: one of a group of contiguous descriptors (D8.7.1).
pub(super) const CONTIGUOUS: u64 = 1 << 52;
/// Bit 55: for software, in tables and leaves (D8.3.1).
pub(super) const SOFTWARE: u64 = 1 << 55;

/// The long descriptors of a granule of `2^G` bytes: where they have addresses, and what kinds
/// there are.
pub(super) enum Descriptor<const G: u32> {}

impl<const G: u32> Descriptor<G> {
    /// Leaves that are one descriptor each: pages, and blocks where the granule has them (D8.3.1).
    pub(super) const PAGE_SIZES: u64 = match G {
        12 => 1 << 12 | 1 << 21 | 1 << 30,
        14 => 1 << 14 | 1 << 25,
        // Blocks of 4T need 52 output bits.
        _ => 1 << 16 | 1 << 29 | 1 << 42,
    };

    /// Leaves that are a group of contiguous descriptors (D8.7.1): 16 of them with 4K; 128 pages or
    /// 32 blocks with 16K; 32 with 64K.
    pub(super) const CONTIGUOUS_SIZES: u64 = match G {
        12 => 1 << 16 | 1 << 25 | 1 << 34,
        14 => 1 << 21 | 1 << 30,
        _ => 1 << 21 | 1 << 34,
    };

    /// Bits 47 down to the granule's.
    const ADDRESS: u64 = lg2::mask(48) & !lg2::mask(G);

    /// All bits of a descriptor that are its address.
    const ADDRESS_BITS: u64 = Self::ADDRESS | if G == 16 { 0xf000 } else { 0 };

    /// The highest level that has leaves: with 16K there is only one level of blocks (D8.3.1).
    const TOP_LEAF: u32 = if G == 14 { 1 } else { 2 };

    /// Whether there are tables with this granule and these widths.
    pub(super) fn check(input_bits: u32, output_bits: u32) -> Result<(), ConfigError> {
        if !matches!(G, 12 | 14 | 16) {
            let supported = "2^12, 2^14 and 2^16";
            return Err(ConfigError::Granule { granule_lg2: G, supported });
        }
        let most = if G == 16 { 52 } else { 48 };
        if !(25..=most).contains(&input_bits) {
            let supported = if G == 16 { "25 to 52" } else { "25 to 48" };
            return Err(ConfigError::InputBits { input_bits, supported });
        }
        if output_size(output_bits).is_none() || output_bits > most {
            let supported = "32, 36, 40, 42, 44, 48, and 52 with the 64K granule";
            return Err(ConfigError::OutputBits { output_bits, supported });
        }
        Ok(())
    }

    /// The leaf sizes of a table of `F` whose root is at `top_level`: those asked for, or all that
    /// are one descriptor each.
    pub(super) fn page_sizes<F: Format>(
        asked: Option<u64>,
        input_bits: u32,
        output_bits: u32,
        top_level: u32,
    ) -> Result<u64, ConfigError> {
        // What the root's entries reach beyond another level is concatenation: no larger leaves.
        let input_bits = input_bits.min(F::shift(top_level + 1));
        // Without 52-bit addresses the 64K granule has no blocks of 4T (D8.3.1).
        let singles = Self::PAGE_SIZES & if output_bits == 52 { u64::MAX } else { lg2::mask(42) };
        // A group of 16G is more than the memory that 32 bits reach.
        let possible = (singles | Self::CONTIGUOUS_SIZES) & lg2::mask(output_bits + 1);
        let supported = sizes_within::<F>(possible, input_bits);
        config::page_sizes(asked, sizes_within::<F>(singles, input_bits), supported, G)
    }

    /// An address as a descriptor has it. With 64K, bits 51:48 are in bits 15:12 (D8.3.1).
    #[inline(always)]
    pub(super) const fn encode(paddr: PhysAddr) -> u64 {
        let paddr = paddr.get();
        if G == 16 { paddr & Self::ADDRESS | (paddr >> 36) & 0xf000 } else { paddr }
    }

    #[inline(always)]
    const fn address(descriptor: u64) -> PhysAddr {
        let high = if G == 16 { (descriptor & 0xf000) << 36 } else { 0 };
        PhysAddr::new(descriptor & Self::ADDRESS | high)
    }

    /// The leaf `bytes` further on.
    #[inline(always)]
    pub(super) const fn advance(leaf: u64, bytes: u64) -> u64 {
        if G == 16 {
            // Bits 51:48 of the address do not follow bits 47:16 in the descriptor.
            let paddr = Self::address(leaf).wrapping_add(bytes);
            return leaf & !Self::ADDRESS_BITS | Self::encode(paddr);
        }
        leaf.wrapping_add(bytes)
    }

    /// A leaf's kind bits, and the hint if it is of `2^lg2` bytes: a group where its level's
    /// entries have `2^shift`.
    #[inline(always)]
    pub(super) const fn leaf(level: u32, lg2: u32, shift: u32) -> u64 {
        let kind = if level == 0 { VALID | TABLE_OR_PAGE } else { VALID };
        kind | if lg2 > shift { CONTIGUOUS } else { 0 }
    }

    /// The descriptor of a table.
    #[inline(always)]
    pub(super) const fn link(table: PhysAddr) -> u64 {
        Self::encode(table) | TABLE_OR_PAGE | VALID
    }

    /// What a descriptor means at `level`, whose entries are of `2^shift` bytes.
    #[inline(always)]
    pub(super) const fn decode(level: u32, shift: u32, word: u64) -> Entry {
        let paddr = Self::address(word);
        match (word & (VALID | TABLE_OR_PAGE), level) {
            (0b11, 1..) => Entry::Table(paddr),
            (0b11, 0) | (0b01, 1..) if level <= Self::TOP_LEAF => {
                let group = if word & CONTIGUOUS != 0 { Self::contiguous_lg2(level) } else { 0 };
                Entry::Leaf(Leaf { paddr, lg2: shift + group })
            }
            _ if word == 0 => Entry::Empty,
            _ => Entry::Invalid,
        }
    }

    /// The table that a descriptor above level 0 leads to.
    #[inline(always)]
    pub(super) fn table_of(word: u64) -> Option<PhysAddr> {
        let is_table = word & (VALID | TABLE_OR_PAGE) == VALID | TABLE_OR_PAGE;
        is_table.then(|| Self::address(word))
    }

    /// Whether a descriptor is a leaf of its own.
    #[inline(always)]
    pub(super) const fn is_single(level: u32, word: u64) -> bool {
        let kind = if level == 0 { VALID | TABLE_OR_PAGE } else { VALID };
        word & (VALID | TABLE_OR_PAGE | CONTIGUOUS) == kind
    }

    /// log2 of the entries of a contiguous group at `level`.
    #[inline(always)]
    const fn contiguous_lg2(level: u32) -> u32 {
        match (G, level) {
            (12, _) => 4,
            (14, 0) => 7,
            _ => 5,
        }
    }
}

/// What `Format` has of both stages with a granule of `2^$granule` bytes: all but the permissions,
/// the memory types and the marks of writes. `self` has a `config` with what is asked of it here.
macro_rules! long_descriptors {
    ($granule:ident) => {
        type Word = u64;
        const GRANULE_LG2: u32 = $granule;
        const LG2_ENTRIES: u32 = $granule - 3;
        const GROUPS: Groups = Groups::Consecutive;
        const WRITTEN_BACK: u64 = SOFTWARE;

        #[inline(always)]
        fn leaf(&self, template: u64, paddr: PhysAddr) -> u64 {
            template | Descriptor::<$granule>::encode(paddr)
        }

        #[inline(always)]
        fn advance(&self, leaf: u64, bytes: u64) -> u64 {
            Descriptor::<$granule>::advance(leaf, bytes)
        }

        #[inline(always)]
        fn link(&self, _level: u32, table: PhysAddr) -> u64 {
            Descriptor::<$granule>::link(table)
        }

        #[inline(always)]
        fn decode(&self, level: u32, word: u64) -> Entry {
            Descriptor::<$granule>::decode(level, Self::shift(level), word)
        }

        #[inline(always)]
        fn table_of(&self, _level: u32, word: u64) -> Option<PhysAddr> {
            Descriptor::<$granule>::table_of(word)
        }

        #[inline(always)]
        fn is_single(&self, level: u32, word: u64) -> bool {
            Descriptor::<$granule>::is_single(level, word)
        }

        #[inline(always)]
        fn tracks_dirty(&self) -> bool {
            self.config.dirty == DirtyTracking::Hardware
        }

        /// Where entries of different sizes for one address may be cached at once, hardware may do
        /// anything with them (D8, "Using break-before-make when updating translation table
        /// entries").
        fn needs_break(&self) -> bool {
            self.config.break_before_make == BreakBeforeMake::Needed
        }

        /// A change of the memory type or cacheability wants it at every level of FEAT_BBM, and the
        /// entries of a contiguous group must never differ (the same section, and "The Contiguous
        /// bit").
        fn breaks_to_change(&self) -> bool {
            true
        }
    };
}
pub(super) use long_descriptors;

/// TCR_EL1.IPS and VTCR_EL2.PS for a number of output bits.
pub(super) const fn output_size(output_bits: u32) -> Option<u64> {
    Some(match output_bits {
        32 => 0,
        36 => 1,
        40 => 2,
        42 => 3,
        44 => 4,
        48 => 5,
        52 => 6,
        _ => return None,
    })
}

/// One of the values for 4K, 16K and 64K.
pub(super) const fn granule_field(granule_lg2: u32, values: [u64; 3]) -> u64 {
    match granule_lg2 {
        12 => values[0],
        14 => values[1],
        _ => values[2],
    }
}

/// The address field of TTBR and VTTBR: with 52 output bits, address bits 51:48 are in bits 5:2.
pub(super) const fn base_address(root: PhysAddr, output_bits: u32) -> u64 {
    let root = root.get();
    if output_bits == 52 { root & lg2::mask(48) | (root >> 46) & 0b11_1100 } else { root }
}

/// IRGN0, ORGN0 and SH0 at bits 9:8, 11:10 and 13:12 of TCR_EL1, VTCR_EL2, TTBCR and VTCR: how
/// walks are cached.
///
/// Write-back and inner shareable, or non-cacheable and outer shareable.
pub(super) const fn walk_fields(walks: Coherency) -> u64 {
    match walks {
        Coherency::Coherent => 0b01 << 8 | ORGN_WRITE_BACK | 0b11 << 12,
        Coherency::NonCoherent => 0b10 << 12,
    }
}

/// ORGN0 (bits 11:10): walks are outer write-back and write-allocate.
pub(super) const ORGN_WRITE_BACK: u64 = 0b01 << 10;

/// What the tests of every such format check.
#[cfg(test)]
pub(super) mod tests {
    use super::super::check;
    use super::*;
    use crate::prot::Prot;

    /// What is encoded reads back; `granted` is what a permission becomes.
    pub(in super::super) fn reads_back<F: Format<Word = u64>>(
        format: &F,
        granted: impl Fn(Prot) -> Prot,
    ) {
        check::leaves(format, |made| {
            assert_eq!(format.prot(made.level, made.word), granted(made.prot));
            assert_eq!(format.clean(made.word), made.word);
        });
        check::links(format);
    }

    /// What hardware makes of a writable leaf at the first write, `written`, is seen and undone;
    /// it changes nothing else that the leaf says. No other leaf is ever marked.
    pub(in super::super) fn writes_are_seen<F: Format<Word = u64>>(
        format: &F,
        written: impl Fn(u64) -> u64,
    ) {
        assert!(format.tracks_dirty());
        check::leaves(format, |made| {
            let check::Made { level, prot, word: leaf } = made;
            assert!(!format.is_dirty(leaf));
            if !prot.contains(Prot::WRITE) {
                assert_eq!(format.dirtied(leaf), leaf);
                return;
            }
            let dirty = written(leaf);
            assert_ne!(dirty, leaf);
            assert!(format.is_dirty(dirty));
            assert_eq!((format.clean(dirty), format.dirtied(leaf)), (leaf, dirty));
            assert_eq!(format.decode(level, dirty), format.decode(level, leaf));
            assert_eq!(format.prot(level, dirty), format.prot(level, leaf));
        });
    }
}
