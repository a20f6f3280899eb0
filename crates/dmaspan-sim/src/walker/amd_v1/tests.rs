//! Tables written out by hand. Fields of an entry (48882, 2.2.3): PR bit 0, A 5, D 6, Next Level
//! 11:9, FC 60, IR 61, IW 62. The low bits are 0x1 for a page of its level's size, 0xe01 for one of
//! another size, and 0x201, 0x401, … for a table of level 1, 2, ….

use dmaspan::Prot;

use super::*;
use crate::walker::testing::{block, read, set, shape, steps, tables, update, write};
use crate::walker::{BadTable, TableImage};

/// IR and IW, in entries and in the DTE.
const RW: u64 = 3 << 61;

/// V, TV, IR and IW with the root at 0x1000.
fn dte(mode: u64) -> u64 {
    RW | 0x1003 | mode << 9
}

fn walker(dte: u64) -> AmdV1Walker {
    AmdV1Walker::new(AmdV1WalkRegisters { dte }).unwrap()
}

/// Mode 3: the tables of the first 1G and the first 2M.
fn three_levels() -> (AmdV1Walker, TableImage) {
    let image = tables(&[0x1000, 0x2000, 0x3000]);
    set(&image, &[(0x1000, RW | 0x2401), (0x2000, RW | 0x3201)]);
    (walker(dte(3)), image)
}

mod levels {
    use super::*;

    #[test]
    fn six_levels_resolve_all_64_bits() {
        let image = tables(&[0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000]);
        // Indices 0x7f, 1, 2, 3, 4, 5 at bits 57, 48, 39, 30, 21, 12.
        set(&image, &[(0x13f8, RW | 0x2a01), (0x2008, RW | 0x3801), (0x3010, RW | 0x4601)]);
        set(&image, &[(0x4018, RW | 0x5401), (0x5020, RW | 0x6201)]);
        set(&image, &[(0x6028, RW | 0xf_ffff_1234_5001)]);
        let iova = 0x7f << 57 | 1 << 48 | 2 << 39 | 3 << 30 | 4 << 21 | 5 << 12 | 0xabc;
        let six = walker(dte(6));
        let leaf = write(&six, &image, iova).unwrap();
        assert_eq!((leaf.paddr.get(), leaf.level), (0xf_ffff_1234_5abc, 1));
        assert_eq!(leaf.leaf, block(iova & !0xfff, 12));
        assert_eq!(leaf.prot, Prot::READ_WRITE);
        let steps = steps(&six, &image, iova);
        let levels: Vec<_> = steps.iter().map(|step| step.link.level).collect();
        assert_eq!(levels, [6, 5, 4, 3, 2, 1]);
        let root = steps[0].link.block;
        assert_eq!(root, IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).unwrap());
    }

    #[test]
    fn each_mode_has_its_reach_and_faults_above() {
        let image = tables(&[0x1000]);
        for (mode, bits) in [(1u8, 21), (2, 30), (3, 39), (4, 48), (5, 57)] {
            let walker = walker(dte(mode.into()));
            assert_eq!(walker.input_range(), block(0, bits));
            for iova in [1 << bits, 1 << 63, u64::MAX] {
                assert_eq!(read(&walker, &image, iova), Err((FaultKind::Translation, mode)));
            }
        }
        // The page at 0x5000 by a root of level 1.
        set(&image, &[(0x1028, RW | 0x9001)]);
        assert_eq!(shape(read(&walker(dte(1)), &image, 0x5123)), (0x9123, 12, 12, 1));
    }

    #[test]
    fn entries_lead_to_lower_levels_only() {
        let (three, image) = three_levels();
        for (next, paddr, level) in [(2, 0x2000, 2), (3, 0x2000, 2), (6, 0x2000, 2), (1, 0x3000, 1)]
        {
            let (_, image) = three_levels();
            set(&image, &[(paddr, RW | 0x3001 | next << 9)]);
            assert_eq!(read(&three, &image, 0), Err((FaultKind::Reserved, level)));
        }
        assert_eq!(read(&three, &image, 0), Err((FaultKind::Translation, 1)));
    }

    #[test]
    fn levels_may_be_skipped_where_the_address_bits_are_zero() {
        let image = tables(&[0x1000, 0x2000]);
        // Level 4 leads to level 1: bits 38:21 are left out.
        set(&image, &[(0x1008, RW | 0x2201), (0x2028, RW | 0x9001)]);
        let four = walker(dte(4));
        let leaf = read(&four, &image, 1 << 39 | 0x5678).unwrap();
        assert_eq!((leaf.paddr.get(), leaf.leaf_lg2, leaf.level), (0x9678, 12, 1));
        assert_eq!(leaf.step.link.block, block(1 << 39, 21));
        for number in [21, 30, 38] {
            let skipped = 1 << 39 | 1 << number | 0x5678;
            assert_eq!(read(&four, &image, skipped), Err((FaultKind::Translation, 4)));
        }
        let census = four.census(&image, four.input_range()).unwrap();
        assert_eq!(census, [(12, 1)].into());
    }

    #[test]
    fn absent_entries_fault_at_their_level() {
        for (level, paddr) in [(3, 0x1000), (2, 0x2000), (1, 0x3000)] {
            let (three, image) = three_levels();
            set(&image, &[(0x3000, RW | 0x9001)]);
            set(&image, &[(paddr, !1)]);
            assert_eq!(read(&three, &image, 0), Err((FaultKind::Translation, level)));
        }
    }
}

mod sizes {
    use super::*;

    #[test]
    fn next_level_0_is_a_page_of_the_entry_size() {
        let image = tables(&[0x1000]);
        let page = |level: u64, iova: u64| {
            set(&image, &[(0x1008, RW | 0x4_0000_0000_0001)]);
            shape(read(&walker(dte(level)), &image, iova))
        };
        assert_eq!(page(1, 0x1abc), (0x4_0000_0000_0abc, 12, 12, 1));
        assert_eq!(page(2, 0x2a_bcde), (0x4_0000_000a_bcde, 21, 21, 2));
        assert_eq!(page(3, 0x4abc_def0), (0x4_0000_0abc_def0, 30, 30, 3));
        assert_eq!(page(4, 1 << 39 | 0xabc), (0x4_0000_0000_0abc, 39, 39, 4));
        assert_eq!(page(5, 1 << 48 | 0xabc), (0x4_0000_0000_0abc, 48, 48, 5));
        assert_eq!(read(&walker(dte(6)), &image, 1 << 57).unwrap_err(), (FaultKind::Reserved, 6));
    }

    /// Checks one page of another size by a root of its level: the address bits `size`, and what
    /// the walk of its last byte but one entry finds.
    fn check_size(level: u64, address: u64, size_lg2: u32, paddr: u64) {
        let image = tables(&[0x1000]);
        let entry_lg2 = 12 + 9 * (u32::try_from(level).unwrap() - 1);
        let copies = 1u64 << (size_lg2 - entry_lg2);
        for index in copies..2 * copies {
            set(&image, &[(0x1000 + 8 * index, RW | 0xe01 | address)]);
        }
        let walker = walker(dte(level));
        let last = (2 << size_lg2) - 1;
        let leaf = walker.strict_walk(&image, Iova::new(last)).unwrap();
        assert_eq!((leaf.leaf_lg2, leaf.group_lg2), (entry_lg2, size_lg2));
        assert_eq!(leaf.group, block(1 << size_lg2, size_lg2));
        assert_eq!(leaf.paddr.get(), paddr);
    }

    #[test]
    fn next_level_7_has_the_size_in_the_lowest_clear_address_bit() {
        // 8K: bit 12 clear. 16K: bit 12 set, 13 clear. And so on.
        check_size(1, 0x8000_2000, 13, 0x8000_3fff);
        check_size(1, 0x8000_1000, 14, 0x8000_3fff);
        check_size(1, 0x8000_3000, 15, 0x8000_7fff);
        check_size(1, 0x8000_7000, 16, 0x8000_ffff);
        check_size(1, 0x8007_f000, 20, 0x800f_ffff);
        // 4M and 512M at level 2, 2G and 256G at level 3.
        check_size(2, 0x801f_f000, 22, 0x803f_ffff);
        check_size(2, 0x8fff_f000, 29, 0x9fff_ffff);
        check_size(3, 0x3fff_f000, 31, 0x7fff_ffff);
        check_size(3, 0x1f_ffff_f000, 38, 0x3f_ffff_ffff);
        // 1T at level 4, 2^51 at level 5.
        check_size(4, 0x7f_ffff_f000, 40, 0xff_ffff_ffff);
        check_size(5, 0x3_ffff_ffff_f000, 51, 0x7_ffff_ffff_ffff);
    }

    #[test]
    fn sizes_that_are_not_of_the_level_are_reserved() {
        let size = |level: u8, address: u64| {
            let image = tables(&[0x1000]);
            set(&image, &[(0x1000, RW | 0xe01 | address)]);
            read(&walker(dte(level.into())), &image, 0).map(|leaf| leaf.group_lg2)
        };
        // 2M at level 1, and at level 2, where next level 0 says it; 8K at level 2; 1G.
        assert_eq!(size(1, 0xf_f000), Err((FaultKind::Reserved, 1)));
        assert_eq!(size(2, 0xf_f000), Err((FaultKind::Reserved, 2)));
        assert_eq!(size(2, 0), Err((FaultKind::Reserved, 2)));
        assert_eq!(size(2, 0x1fff_f000), Err((FaultKind::Reserved, 2)));
        assert_eq!(size(5, ADDRESS), Err((FaultKind::Reserved, 5)));
        assert_eq!(size(6, ADDRESS), Err((FaultKind::Reserved, 6)));
        assert_eq!(size(2, 0xfff_f000), Ok(29));
    }
}

mod permissions {
    use super::*;

    #[test]
    fn reading_and_writing_are_permitted_by_every_level_and_the_dte() {
        let allowed = |dte, top: u64, middle: u64, page: u64| {
            let image = tables(&[0x1000, 0x2000, 0x3000]);
            set(&image, &[(0x1000, top << 61 | 0x2401), (0x2000, middle << 61 | 0x3201)]);
            set(&image, &[(0x3000, page << 61 | 0x9001)]);
            let denied = Err((FaultKind::Permission, 1));
            [read(&walker(dte), &image, 0), write(&walker(dte), &image, 0)].map(|outcome| {
                let outcome = outcome.map(|_| ());
                assert!(outcome.is_ok() || outcome == denied, "{outcome:?}");
                outcome.is_ok()
            })
        };
        assert_eq!(allowed(dte(3), 3, 3, 3), [true, true]);
        for entries in [(1, 3, 3), (3, 1, 3), (3, 3, 1)] {
            assert_eq!(allowed(dte(3), entries.0, entries.1, entries.2), [true, false]);
        }
        for entries in [(2, 3, 3), (3, 2, 3), (3, 3, 2)] {
            assert_eq!(allowed(dte(3), entries.0, entries.1, entries.2), [false, true]);
        }
        assert_eq!(allowed(dte(3), 3, 0, 3), [false, false]);
        assert_eq!(allowed(dte(3) & !(1 << 61), 3, 3, 3), [false, true]);
        assert_eq!(allowed(dte(3) & !(1 << 62), 3, 3, 3), [true, false]);
    }

    #[test]
    fn fc_makes_a_page_coherent() {
        let (three, image) = three_levels();
        set(&image, &[(0x3000, RW | 1 << 60 | 0x9001)]);
        assert_eq!(read(&three, &image, 0).unwrap().prot, Prot::READ_WRITE | Prot::CACHE);
    }

    #[test]
    fn reserved_bits_fault_at_their_level() {
        for (paddr, entry, level, reserved, free) in [
            (0x3000, 0x9001, 1, &[52, 58][..], &[1, 4, 7, 8, 59, 60, 63][..]),
            (0x2000, 0x3201, 2, &[52, 58, 59, 60], &[1, 4, 7, 8, 63]),
            (0x1000, 0x2401, 3, &[52, 58, 59, 60], &[1, 4, 7, 8, 63]),
        ] {
            let with = |number: u32| {
                let (three, image) = three_levels();
                set(&image, &[(0x3000, RW | 0x9001), (paddr, RW | entry | 1 << number)]);
                read(&three, &image, 0).map(|_| ())
            };
            for number in reserved {
                assert_eq!(with(*number), Err((FaultKind::Reserved, level)), "bit {number}");
            }
            for number in free {
                assert_eq!(with(*number), Ok(()), "bit {number}");
            }
        }
    }

    #[test]
    fn had_enables_the_accessed_bit_and_the_dirty_bit() {
        let (plain, image) = three_levels();
        set(&image, &[(0x3000, RW | 0x9001), (0x3008, 1 << 61 | 0x9001)]);
        assert_eq!(update(write(&plain, &image, 0)), None);
        let accessed = walker(dte(3) | 1 << 7);
        let touched = Some((0x3000, RW | 0x9001, RW | 0x9021));
        assert_eq!(update(write(&accessed, &image, 0)), touched);
        assert!(!write(&accessed, &image, 0).unwrap().clean);
        let tracking = walker(dte(3) | 3 << 7);
        assert_eq!(update(read(&tracking, &image, 0)), touched);
        assert!(read(&tracking, &image, 0).unwrap().clean);
        let written = Some((0x3000, RW | 0x9001, RW | 0x9061));
        assert_eq!(update(write(&tracking, &image, 0)), written);
        assert!(!read(&tracking, &image, 0x1000).unwrap().clean);
    }
}

mod checks {
    use super::*;

    /// A page of 16K at iova 16K, output 0x8000.
    fn four_copies() -> TableImage {
        let image = tables(&[0x1000]);
        (4..8).for_each(|index| set(&image, &[(0x1000 + 8 * index, RW | 0x9e01)]));
        image
    }

    #[test]
    fn all_copies_of_a_page_agree() {
        let one = walker(dte(1));
        let image = four_copies();
        assert_eq!(shape(read(&one, &image, 0x6123)), (0xa123, 12, 14, 1));
        assert_eq!(one.census(&image, one.input_range()).unwrap(), [(14, 1)].into());
        for wrong in [0, RW | 0xbe01, RW | 0x9001, 1 << 61 | 0x9e01, RW | 0x9e41] {
            set(&image, &[(0x1030, wrong)]);
            let Err(BadTable::Copies { group, entry_paddr, entry, expected }) =
                one.strict_walk(&image, Iova::new(0x4000))
            else {
                panic!("{wrong:#x} passed");
            };
            assert_eq!((group, entry_paddr.get()), (block(0x4000, 14), 0x1030));
            assert_eq!((entry, expected), (wrong, RW | 0x9e01));
            assert!(one.survey(&image, one.input_range(), |_| ()).is_err());
        }
    }

    #[test]
    fn hardware_marks_one_copy_alone() {
        let image = four_copies();
        let tracking = walker(dte(1) | 3 << 7);
        let marked = update(write(&tracking, &image, 0x6000));
        assert_eq!(marked, Some((0x1030, RW | 0x9e01, RW | 0x9e61)));
        set(&image, &[(0x1030, RW | 0x9e61)]);
        assert!(tracking.strict_walk(&image, Iova::new(0x4000)).is_ok());
        assert!(walker(dte(1)).strict_walk(&image, Iova::new(0x4000)).is_err());
    }

    #[test]
    fn a_misaligned_page_is_found_though_hardware_takes_it() {
        let image = tables(&[0x1000]);
        let two = walker(dte(2));
        set(&image, &[(0x1000, RW | 0x21_0001)]);
        assert_eq!(shape(read(&two, &image, 0)), (0x20_0000, 21, 21, 2));
        let checked = two.strict_walk(&image, Iova::new(0));
        assert!(matches!(checked, Err(BadTable::Reserved { bits: 0x1_0000, .. })), "{checked:?}");
    }
}

#[test]
fn a_dte_without_host_tables_is_refused() {
    let field = |dte| match AmdV1Walker::new(AmdV1WalkRegisters { dte }) {
        Err(BadRegister::Reserved { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(dte(3) & !1), "V and TV");
    assert_eq!(field(dte(3) & !2), "V and TV");
    assert_eq!(field(dte(0)), "Mode");
    assert_eq!(field(dte(7)), "Mode");
    assert_eq!(field(dte(3) | 2 << 7), "HAD");
    assert_eq!(field(dte(3) | 1 << 55), "GV");
    assert_eq!(field(dte(3) | 4), "bits 6:2 and 63");
}
