//! [`Format`] says how entries are encoded: all that the walker does not know itself.

use core::fmt::Debug;

use super::error::Error;
use super::manual::Manual;
use super::memory::TableShape;
use super::word::Word;
use crate::addr::PhysAddr;
use crate::lg2;
use crate::prot::Prot;
use crate::range::IovaRange;

/// The most levels of any format.
pub const MAX_LEVELS: usize = 6;

/// Says how the entries of a leaf that fills several of them look.
///
/// A leaf of a size between two levels' blocks is a *group* of `2^n` neighbouring entries of the
/// lower level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Groups {
    /// Each entry has its own address, and a hint that its neighbours belong to it (Arm's
    /// contiguous bit).
    Consecutive,
    /// All entries are the same word, with the address of the whole leaf (Arm's short descriptors,
    /// AMD v1, RISC-V Svnapot).
    Repeated,
}

/// The shape of a table tree: what the walker needs to know besides the entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Which IOVAs the tree can translate.
    pub aperture: IovaRange,
    /// Physical addresses of leaves have this many bits.
    pub output_bits: u32,
    /// The level of the root; level 0 has the smallest leaves.
    pub top_level: u32,
    /// The leaf sizes that calls may use and choose from, bit n for 2^n bytes. The
    /// [granule](Format::GRANULE_LG2) is the smallest of them: what operations are given is made
    /// of it.
    pub page_sizes: u64,
    /// What the root looks like.
    pub root: TableShape,
    /// What every other table looks like.
    pub table: TableShape,
}

impl Geometry {
    /// The geometry of a tree of `F` that has this top level and so many entries in its root
    /// (log2): every table is aligned to its size, a small root to 64 bytes, and lies within the
    /// output bits.
    pub const fn of_tree<F: Format>(
        aperture: IovaRange,
        output_bits: u32,
        page_sizes: u64,
        (top_level, root_lg2_entries): (u32, u32),
    ) -> Self {
        let max_paddr = PhysAddr::new(lg2::mask(output_bits));
        let lg2_size = root_lg2_entries.saturating_add(F::Word::LG2_BYTES);
        let lg2_align = if lg2_size < 6 { 6 } else { lg2_size };
        let root = TableShape { lg2_size, lg2_align, max_paddr };
        let lg2_size = F::LG2_ENTRIES + F::Word::LG2_BYTES;
        let table = TableShape { lg2_size, lg2_align: lg2_size, max_paddr };
        Self { aperture, output_bits, top_level, page_sizes, root, table }
    }

    /// Refuses page sizes of which the granule is not the smallest.
    pub(super) fn check(&self, granule_lg2: u32) -> Result<(), Error> {
        let (page_size, page_sizes) = (lg2::size(granule_lg2), self.page_sizes);
        match page_sizes & lg2::mask(granule_lg2 + 1) == page_size {
            true => Ok(()),
            false => Err(Error::PageSize { page_size, page_sizes }),
        }
    }
}

/// Says what an entry means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Nothing is mapped.
    Empty,
    /// Leads to a table of the next lower level.
    Table(PhysAddr),
    /// A leaf, or one entry of a group that is one.
    Leaf(Leaf),
    /// No word that this format writes.
    Invalid,
}

/// The meaning of a leaf entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The address in the entry: of the entry's block ([`Groups::Consecutive`]) or of the whole
    /// leaf ([`Groups::Repeated`]). Rounded down to the leaf's size it is the leaf's in both.
    pub paddr: PhysAddr,
    /// The size of the whole leaf, log2 of bytes.
    pub lg2: u32,
}

/// An IO page-table format: how entries are encoded. One generic walker does the rest.
///
/// A format is a value: its fields are what may differ between two tables of it. Its methods are
/// small, inlined into the walker's loops and free of branches where the format is.
///
/// # Safety
///
/// Memory is read and written where [`table_of`](Self::table_of) says, so:
///
/// 1. Of a word that [`link`](Self::link) made for a level, `table_of` and
///    [`decode`](Self::decode) at that level give the address of the table, and it is not
///    [`EMPTY`](Word::EMPTY), also with [`WRITTEN_BACK`](Self::WRITTEN_BACK) set.
/// 2. Of no other word that the format makes for that level do they give a table, nor of an empty
///    one; neither do they after hardware set accessed and dirty bits. At level 0 `decode` gives
///    none for any word, and `table_of` is not asked.
/// 3. The answers do not change while a value lives, [`geometry`](Self::geometry) included, and a
///    clone gives the same.
/// 4. The geometry is that of the tables which hardware walks: the smallest of its page sizes is
///    the granule, and each is of entries at one of its levels.
/// 5. A word that [`leaf`](Self::leaf) or [`advance`](Self::advance) made leads hardware to the
///    address that it was made for, over as many bytes, and to no access but what its template
///    permits; `decode` says the same of it, and of such words as hardware marks them. What is
///    mapped and what is unpinned are these addresses.
#[expect(unsafe_code, reason = "a contract: what a format says is dereferenced")]
pub unsafe trait Format: Debug + Send + Sync + 'static {
    /// What an entry is.
    type Word: Word;

    /// log2 of the smallest leaf, that of level 0.
    const GRANULE_LG2: u32;
    /// log2 of the entries of every table but the root.
    const LG2_ENTRIES: u32;
    /// How leaves of several entries look.
    const GROUPS: Groups;
    /// A bit that hardware ignores in links, set when a link has been written back from the CPU's
    /// caches to memory. [`EMPTY`](Word::EMPTY) where the format has none to spare.
    const WRITTEN_BACK: Self::Word = Self::Word::EMPTY;
    /// The bit that hardware sets in a leaf entry through which it writes. [`EMPTY`](Word::EMPTY)
    /// where hardware sets none, or marks otherwise.
    const DIRTY: Self::Word = Self::Word::EMPTY;
    /// Whether the tree can get more levels while it is used. Then [`Geometry::top_level`] is the
    /// highest that it can have, and the root has the shape of all other tables.
    const GROWS: bool = false;

    /// The shape of the tree.
    fn geometry(&self) -> Geometry;

    /// The top level of a new tree, for formats that [grow](Self::GROWS).
    fn first_top_level(&self) -> u32 {
        self.geometry().top_level
    }

    /// All of a leaf entry but its address, for leaves of `2^lg2` bytes at `level`.
    ///
    /// `lg2` is one of the page sizes, `level` the level of its entries, and `prot` permits access
    /// and is not [refused](Self::refuses).
    fn template(&self, level: u32, lg2: u32, prot: Prot) -> Self::Word;

    /// Whether the format can neither express these permissions nor grant more instead.
    fn refuses(&self, _prot: Prot) -> bool {
        false
    }

    /// A leaf entry from its template and address. `paddr` is within the output bits and aligned to
    /// the entry's block; with [`Groups::Repeated`] to the leaf.
    ///
    /// As it is provided, a leaf has each bit of the address where the address has it.
    #[inline(always)]
    fn leaf(&self, template: Self::Word, paddr: PhysAddr) -> Self::Word {
        template | Self::Word::of_bits(paddr.get())
    }

    /// The leaf entry with the same attributes whose address is `bytes` further on: one addition in
    /// most formats, as it is provided. The address stays within the output bits, or the entry is
    /// only compared with.
    #[inline(always)]
    fn advance(&self, leaf: Self::Word, bytes: u64) -> Self::Word {
        Self::Word::of_bits(leaf.bits().wrapping_add(bytes))
    }

    /// An entry at `level`, above 0, that leads to a table of the next lower level.
    fn link(&self, level: u32, table: PhysAddr) -> Self::Word;

    /// Returns what an entry at `level` means.
    fn decode(&self, level: u32, word: Self::Word) -> Entry;

    /// The table that an entry at `level`, above 0, leads to: what [`decode`](Self::decode) says,
    /// at the price of a test. Every step down the tree is this.
    #[inline(always)]
    fn table_of(&self, level: u32, word: Self::Word) -> Option<PhysAddr> {
        match self.decode(level, word) {
            Entry::Table(paddr) => Some(paddr),
            _ => None,
        }
    }

    /// Whether an entry at `level` is a leaf that fills no other entry: what
    /// [`decode`](Self::decode) says, at the price of a test. Long loops ask this of every entry.
    #[inline(always)]
    fn is_single(&self, level: u32, word: Self::Word) -> bool {
        matches!(self.decode(level, word), Entry::Leaf(leaf) if leaf.lg2 == Self::shift(level))
    }

    /// Returns what a leaf entry permits.
    fn prot(&self, level: u32, leaf: Self::Word) -> Prot;

    /// Whether hardware marks the leaf entries through which it writes.
    fn tracks_dirty(&self) -> bool {
        false
    }

    /// Whether hardware marked this leaf entry. Of a leaf of several entries it may mark any.
    #[inline(always)]
    fn is_dirty(&self, leaf: Self::Word) -> bool {
        leaf & Self::DIRTY != Self::Word::EMPTY
    }

    /// The leaf entry as it was before hardware marked it.
    #[inline(always)]
    fn clean(&self, leaf: Self::Word) -> Self::Word {
        leaf & !Self::DIRTY
    }

    /// The leaf entry as hardware marks it.
    #[inline(always)]
    fn dirtied(&self, leaf: Self::Word) -> Self::Word {
        leaf | Self::DIRTY
    }

    /// What the manual calls tables, entries and fields, for [dumps](super::PageTable::dump).
    fn manual(&self) -> Manual {
        Manual::PLAIN
    }

    /// Whether an entry that hardware may have cached must be emptied and hardware made to forget
    /// it before an entry of another size is written in its place.
    fn needs_break(&self) -> bool {
        false
    }

    /// Whether a leaf must be emptied, and hardware made to forget it, also before it is rewritten
    /// with another memory type and, where it fills several entries, with anything else.
    fn breaks_to_change(&self) -> bool {
        false
    }

    /// log2 of the bytes that one entry at `level` covers.
    #[inline(always)]
    fn shift(level: u32) -> u32 {
        Self::GRANULE_LG2 + level * Self::LG2_ENTRIES
    }

    /// The level at which leaves of `2^lg2` bytes (at least the granule) have their entries.
    #[inline(always)]
    fn level_of(lg2: u32) -> u32 {
        (lg2 - Self::GRANULE_LG2) / Self::LG2_ENTRIES
    }
}

/// The shape of a tree that translates `input_bits` by `F`: its top level and its root's entries
/// (log2). `input_bits` is above the granule's bits.
pub(super) fn tree_of<F: Format>(input_bits: u32) -> (u32, u32) {
    let top = (input_bits - F::GRANULE_LG2).div_ceil(F::LG2_ENTRIES) - 1;
    (top, input_bits - F::shift(top))
}

/// Those of `page_sizes` that a tree which translates `input_bits` by `F` can have: no larger than
/// what it translates, and of entries at its levels.
pub(super) fn sizes_within<F: Format>(page_sizes: u64, input_bits: u32) -> u64 {
    let (top, _) = tree_of::<F>(input_bits);
    page_sizes & lg2::mask(input_bits + 1) & lg2::mask(F::shift(top + 1))
}
