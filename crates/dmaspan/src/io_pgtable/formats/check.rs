//! The unit tests of all formats share these checks.

use super::super::format::{Entry, Format, Leaf};
use super::super::word::Word;
use crate::addr::PhysAddr;
use crate::lg2;
use crate::prot::Prot;

/// A leaf entry and what it was made from.
pub(super) struct Made<W> {
    pub level: u32,
    pub prot: Prot,
    pub word: W,
}

/// All of these; under Miri, which is hundreds of times slower, every `step`-th.
pub(super) fn all_or_each<T>(step: usize, all: impl Iterator<Item = T>) -> impl Iterator<Item = T> {
    all.step_by(if cfg!(miri) { step } else { 1 })
}

/// All that a caller may ask for where nothing is refused.
pub(super) fn prots() -> impl Iterator<Item = Prot> {
    let all = (0..=Prot::all().bits()).filter_map(Prot::from_bits);
    all_or_each(23, all.filter(|prot| prot.permits_access()))
}

/// The lowest and the highest address of `bits` bits that `2^lg2` divides, and some between.
fn addresses(bits: u32, lg2: u32) -> impl Iterator<Item = u64> {
    let mixed = [0x9e37_79b9_7f4a_7c15, 0x5555_5555_5555_5555, 0xaaaa_aaaa_aaaa_aaaa];
    [0, u64::MAX].into_iter().chain(mixed).map(move |value| {
        lg2::align_down(value & lg2::mask(bits), lg2) // 0 where only one block fits
    })
}

/// Makes leaf entries of all sizes and permissions at the extremes of addresses, and shows that
/// they decode to what they were made from and are nothing else. Calls `also` with each.
pub(super) fn leaves<F: Format>(format: &F, mut also: impl FnMut(Made<F::Word>)) {
    let geometry = format.geometry();
    let sizes = (0..64).filter(|&lg2| geometry.page_sizes & lg2::size(lg2) != 0);
    for lg2 in all_or_each(3, sizes) {
        let level = F::level_of(lg2);
        for (prot, paddr) in prots()
            .filter(|&prot| !format.refuses(prot))
            .flat_map(|prot| addresses(geometry.output_bits, lg2).map(move |paddr| (prot, paddr)))
        {
            let template = format.template(level, lg2, prot);
            let paddr = PhysAddr::new(paddr);
            let word = format.leaf(template, paddr);
            assert_eq!(format.decode(level, word), Entry::Leaf(Leaf { paddr, lg2 }), "{word:x?}");
            agrees(format, level, word);
            let granted = format.prot(level, word);
            assert!(granted.contains(prot & Prot::READ_WRITE), "{prot:?} as {granted:?}");
            // What was granted is granted again by the same entry.
            assert_eq!(format.template(level, lg2, granted), template, "{prot:?}");
            assert!(!format.is_dirty(word) || !format.tracks_dirty());
            assert!(!format.tracks_dirty() || format.clean(word) == word);
            let first = format.leaf(template, PhysAddr::new(0));
            assert_eq!(format.advance(first, paddr.get()), word, "{paddr} from 0 on");
            if let Some(next) = paddr.get().checked_add(lg2::size(lg2))
                && next <= lg2::mask(geometry.output_bits)
            {
                let leaf = format.leaf(template, PhysAddr::new(next));
                assert_eq!(format.advance(word, lg2::size(lg2)), leaf);
            }
            also(Made { level, prot, word });
        }
    }
}

/// Makes links of all levels and shows that they lead where they should, marked or not.
pub(super) fn links<F: Format>(format: &F) {
    let geometry = format.geometry();
    let table_bits = lg2::floor(geometry.table.max_paddr.get()) + 1;
    for level in 1..=geometry.top_level {
        for paddr in addresses(table_bits, geometry.table.lg2_align) {
            let table = PhysAddr::new(paddr);
            let link = format.link(level, table);
            for word in [link, link | F::WRITTEN_BACK] {
                assert_ne!(word, F::Word::EMPTY);
                assert_eq!(format.decode(level, word), Entry::Table(table), "{word:x?}");
                agrees(format, level, word);
            }
        }
    }
}

/// Shows that the cheap questions have the answers of `decode`.
pub(super) fn agrees<F: Format>(format: &F, level: u32, word: F::Word) {
    let entry = format.decode(level, word);
    let single = matches!(entry, Entry::Leaf(leaf) if leaf.lg2 == F::shift(level));
    assert_eq!(format.is_single(level, word), single, "{word:x?} at {level}: {entry:?}");
    let table = match entry {
        Entry::Table(table) => Some(table),
        _ => None,
    };
    if level > 0 {
        assert_eq!(format.table_of(level, word), table, "{word:x?} at {level}: {entry:?}");
    }
    assert!(level > 0 || table.is_none(), "{word:x?}: a table at level 0");
}

/// All combinations of the low `bits` bits, below nothing, everything, and some of the other bits.
pub(super) fn words(bits: u32) -> impl Iterator<Item = u64> {
    let highs = [0, u64::MAX, 0x9e37_79b9_7f4a_7c15, 0x61c8_8646_80b5_83ea];
    let lows = all_or_each(bits as usize * 97, 0..lg2::size(bits));
    lows.flat_map(move |low| highs.map(|high| lg2::align_down(high, bits) | low))
}
