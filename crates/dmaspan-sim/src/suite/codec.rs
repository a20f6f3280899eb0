//! Entries by themselves: an encoded entry decodes to the same, at all sizes and extremes.

use dmaspan::io_pgtable::{Entry, Format, Groups, Leaf, MAX_LEVELS, Word};
use dmaspan::{PhysAddr, Prot, lg2};

use super::space::Space;
use super::tree::{WordOf, granted};
use super::{Subject, each};
use crate::rng::Rng;

/// All combinations of permissions that a format maps.
pub(super) fn prots<F: Format>(format: &F) -> Vec<Prot> {
    let all = (0..=Prot::all().bits()).filter_map(Prot::from_bits);
    all.filter(|&prot| prot.permits_access() && !format.refuses(prot)).collect()
}

/// The first and the last address of a multiple of `2^lg2` below `2^bits`, and some between.
fn addresses(rng: &mut Rng, lg2: u32, bits: u32) -> [u64; 6] {
    let last = lg2::align_down(lg2::mask(bits), lg2);
    let mut any = || lg2::align_down(rng.next() & last, lg2);
    [0, last, any(), any(), any(), any()]
}

/// Tree, sizes and tables fit together, and the root translates the aperture, whole.
pub fn the_geometry_is_consistent<S: Subject>() {
    each::<S>(|format| {
        let geometry = format.geometry();
        let space = Space::of(&format);
        let lg2_bytes = <WordOf<S> as Word>::LG2_BYTES;
        let top = geometry.top_level;
        assert!(top < u32::try_from(MAX_LEVELS).unwrap());
        assert!(format.first_top_level() <= top);
        let start = geometry.aperture.start().get();
        let translated = geometry.root.lg2_size - lg2_bytes + S::Format::shift(top);
        assert_eq!(lg2::mask(space.input_bits), geometry.aperture.len_less_one());
        assert!(lg2::is_aligned(start, space.input_bits));
        assert!(translated >= space.input_bits, "the root has too few entries");
        assert!(top == 0 || S::Format::shift(top) < space.input_bits, "a level too many");
        assert_eq!(geometry.table.lg2_size, S::Format::LG2_ENTRIES + lg2_bytes);
        assert!(geometry.table.lg2_align >= geometry.table.lg2_size);
        assert!(geometry.root.lg2_align >= geometry.root.lg2_size);
        assert_ne!(geometry.page_sizes & space.granule(), 0, "the granule is a page size");
        for lg2 in (0..64).filter(|&lg2| geometry.page_sizes & lg2::size(lg2) != 0) {
            assert!((space.granule_lg2..=space.input_bits).contains(&lg2), "2^{lg2}");
            let level = S::Format::level_of(lg2);
            assert!(level <= top && S::Format::shift(level) <= lg2, "2^{lg2}");
        }
    });
}

/// Leaves of every size, permission and extreme of memory.
pub fn leaves_decode_as_they_were_encoded<S: Subject>() {
    let mut rng = Rng::new(1);
    each::<S>(|format| {
        let space = Space::of(&format);
        for lg2 in space.sizes() {
            let level = S::Format::level_of(lg2);
            let shift = S::Format::shift(level);
            // Where entries have their own addresses, each of a group's is another one.
            let encoded_lg2 = match S::Format::GROUPS {
                Groups::Consecutive => shift,
                Groups::Repeated => lg2,
            };
            for prot in prots(&format) {
                let template = format.template(level, lg2, prot);
                let expected = granted(&format, prot);
                for paddr in addresses(&mut rng, encoded_lg2, space.output_bits) {
                    let word = format.leaf(template, PhysAddr::new(paddr));
                    let Entry::Leaf(leaf) = format.decode(level, word) else {
                        panic!("{word:?} is no leaf at level {level}")
                    };
                    let found = Leaf { paddr: PhysAddr::new(paddr), lg2 };
                    assert_eq!(leaf, found, "{prot:?}, level {level}");
                    assert_eq!(format.prot(level, word), expected, "{prot:?}, level {level}");
                    assert_eq!(format.is_single(level, word), lg2 == shift);
                    assert!(level == 0 || format.table_of(level, word).is_none());
                    assert_ne!(word, WordOf::<S>::EMPTY);
                    if format.tracks_dirty() {
                        marks_come_and_go(&format, level, word);
                    }
                }
            }
        }
    });
}

/// A new leaf is clean; a mark changes nothing but itself, and is taken away without a trace.
#[track_caller]
fn marks_come_and_go<F: Format>(format: &F, level: u32, leaf: F::Word) {
    assert!(!format.is_dirty(leaf), "nobody wrote through {leaf:?}");
    assert_eq!(format.clean(leaf), leaf);
    if format.prot(level, leaf).contains(Prot::WRITE) {
        let marked = format.dirtied(leaf);
        assert!(format.is_dirty(marked), "{marked:?}");
        assert_eq!(format.clean(marked), leaf);
        assert_eq!(format.decode(level, marked), format.decode(level, leaf));
        assert_eq!(format.prot(level, marked), format.prot(level, leaf));
        assert_eq!(format.is_single(level, marked), format.is_single(level, leaf));
    }
}

/// Links to tables at the extremes of memory, with and without the bit for software.
pub fn links_decode_as_they_were_encoded<S: Subject>() {
    let mut rng = Rng::new(2);
    each::<S>(|format| {
        let table = format.geometry().table;
        let bits = 64 - table.max_paddr.get().leading_zeros();
        let empty = WordOf::<S>::EMPTY;
        for level in 0..=format.geometry().top_level {
            assert_eq!(format.decode(level, empty), Entry::Empty);
            assert!(!format.is_single(level, empty));
        }
        for level in 1..=format.geometry().top_level {
            assert_eq!(format.table_of(level, empty), None);
            for paddr in addresses(&mut rng, table.lg2_align, bits).map(PhysAddr::new) {
                let link = format.link(level, paddr);
                for word in [link, link | S::Format::WRITTEN_BACK] {
                    assert_eq!(format.decode(level, word), Entry::Table(paddr));
                    assert_eq!(format.table_of(level, word), Some(paddr));
                    assert!(!format.is_single(level, word));
                    assert_ne!(word, empty);
                    assert!(!matches!(format.decode(0, word), Entry::Table(_)));
                }
            }
        }
    });
}

/// A step of addresses in an entry is the entry of the stepped address.
pub fn addresses_advance_as_they_are_encoded<S: Subject>() {
    let mut rng = Rng::new(3);
    each::<S>(|format| {
        let space = Space::of(&format);
        for lg2 in space.sizes() {
            let level = S::Format::level_of(lg2);
            let step = match S::Format::GROUPS {
                Groups::Consecutive => S::Format::shift(level),
                Groups::Repeated => lg2,
            };
            let template = format.template(level, lg2, Prot::READ_WRITE);
            for to in addresses(&mut rng, step, space.output_bits) {
                let from = lg2::align_down(rng.below(to.saturating_add(1)), step);
                let word = format.leaf(template, PhysAddr::new(from));
                let advanced = format.advance(word, to - from);
                assert_eq!(advanced, format.leaf(template, PhysAddr::new(to)), "{from:#x}");
            }
        }
    });
}

/// The permissions that are granted are no less than was asked, are granted when asked for again,
/// and do not depend on the size.
pub fn permissions_are_granted_alike_at_all_sizes<S: Subject>() {
    each::<S>(|format| {
        for prot in prots(&format) {
            let grant = granted(&format, prot);
            assert!(grant.contains(prot & Prot::READ_WRITE), "{prot:?} grants {grant:?}");
            let restricting = Prot::NOEXEC | Prot::PRIV;
            assert!(prot.contains(grant & restricting), "{prot:?} grants {grant:?}");
            assert!(!format.refuses(grant), "{prot:?} grants {grant:?}");
            for lg2 in Space::of(&format).sizes() {
                let level = S::Format::level_of(lg2);
                let template = |prot| format.template(level, lg2, prot);
                assert_eq!(template(prot), template(grant), "{prot:?} grants {grant:?}");
            }
        }
    });
}
