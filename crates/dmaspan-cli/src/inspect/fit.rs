//! The fit of a dump's entries to a format, and the other format that they fit better.
//!
//! Most entries are something in most formats: one of VT-d's is one of x86-64's too. But an entry
//! of a format has the bits that its maker had to set for that format, and few others. So each
//! entry is decoded and made again: the bits that differ are odd ones.

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::{Entry, ForeignMemory, Format, Leaf, Word};
use dmaspan::lg2;

use super::tables::TableKind;

/// How many tables are looked at: what is odd is so everywhere.
const MOST_TABLES: usize = 64;

/// What tables may be instead, as `--iommu` names it. Levels of AMD's below 3 are not among them:
/// few links are then seen as what they are.
const KINDS: [&str; 16] = [
    "vtd",
    "vtd,bits=39",
    "vtd,bits=57",
    "vtd,stage=1",
    "vtd,stage=1,bits=57",
    "amd",
    "amd,levels=4",
    "amd,levels=5",
    "amd,levels=6",
    "smmuv3",
    "smmuv3,granule=64k",
    "smmuv3,stage=2",
    "riscv",
    "riscv,bits=48",
    "riscv,bits=57",
    "riscv,stage=2",
];

/// How many entries were looked at, and their odd bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fit {
    entries: u64,
    odd_bits: u64,
}

impl Fit {
    /// Looks at the first tables of a tree.
    pub(crate) fn of<F: Format>(format: &F, root: PhysAddr, memory: &dyn ForeignMemory) -> Self {
        let geometry = format.geometry();
        let top = if F::GROWS { format.first_top_level() } else { geometry.top_level };
        let mut fit = Self::default();
        let mut tables = vec![(root, top, geometry.root)];
        let mut next = 0;
        while let Some(&(table, level, shape)) = tables.get(next) {
            next += 1;
            let size = usize::try_from(lg2::size(shape.lg2_size)).unwrap_or(0);
            let mut bytes = vec![0; size];
            if !lg2::is_aligned(table.get(), shape.lg2_align) || !memory.read(table, &mut bytes) {
                fit.add(u64::MAX);
                continue;
            }
            for bytes in bytes.chunks(1 << F::Word::LG2_BYTES) {
                let word = F::Word::of_bytes(bytes);
                let again = match format.decode(level, word) {
                    _ if word == F::Word::EMPTY => continue,
                    Entry::Table(below) if level != 0 => {
                        if tables.len() < MOST_TABLES {
                            tables.push((below, level - 1, geometry.table));
                        }
                        format.link(level, below)
                    }
                    Entry::Leaf(Leaf { paddr, lg2 }) => {
                        let template = format.template(level, lg2, format.prot(level, word));
                        // What is below the leaf's size is odd.
                        let paddr = lg2::align_down(paddr.get(), F::shift(level).min(lg2));
                        format.leaf(template, PhysAddr::new(paddr))
                    }
                    _ => {
                        fit.add(u64::MAX);
                        continue;
                    }
                };
                fit.add(word.bits() ^ again.bits());
            }
        }
        fit
    }

    fn add(&mut self, odd: u64) {
        self.entries += 1;
        self.odd_bits += u64::from(odd.count_ones());
    }

    /// Whether entries have so many fewer odd bits than in the other that luck is no reason: less
    /// than half as many, where that has more than one each.
    fn is_better_than(&self, other: &Self) -> bool {
        let ours = self.odd_bits * other.entries;
        let theirs = other.odd_bits * self.entries;
        self.entries != 0 && other.odd_bits > other.entries && 2 * ours < theirs
    }
}

/// The format that a tree looks like much more than like `kind`, as `--iommu` names it.
pub(crate) fn better(
    kind: TableKind,
    root: u64,
    memory: &dyn ForeignMemory,
) -> Option<&'static str> {
    let root = PhysAddr::new(root);
    let of = |kind: TableKind| Some(kind.tables().ok()?.fit(root, memory));
    let asked = of(kind)?;
    let mut best = None;
    for name in KINDS {
        let fit = name.parse().ok().and_then(of)?;
        let than = best.map_or(asked, |(_, best)| best);
        // Of two that fit as well, the first is the more usual one.
        let is_first = best.is_none() && fit.is_better_than(&asked);
        let is_closer = best.is_some() && fit.odd_bits * than.entries < than.odd_bits * fit.entries;
        if fit.entries != 0 && (is_first || is_closer) {
            best = Some((name, fit));
        }
    }
    best.map(|(name, _)| name)
}
