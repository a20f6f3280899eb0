//! Tables written out by hand, with the bits of the module's table: 0xd is a page that can be read
//! and written, 0x8d a run of such, and 0x3 leads to a table.

use dmaspan::Prot;

use super::*;
use crate::walker::testing::{block, read, set, shape, steps, update, write};
use crate::walker::{BadTable, TableImage};

fn walker(root: u64, input_lg2: u32) -> MockWalker {
    MockWalker::new(MockWalkRegisters { root, input_lg2, dirty_tracking: Switch::Off }).unwrap()
}

/// Tables of 2K at these addresses.
fn tables(at: &[u64]) -> TableImage {
    let image = TableImage::new();
    at.iter().for_each(|paddr| image.add_table(PhysAddr::new(*paddr), 256));
    image
}

#[test]
fn four_levels_resolve_eight_bits_each() {
    let image = tables(&[0x800, 0x1000, 0x1800, 0x2000]);
    // Indices 1, 2, 3, 4 at bits 35, 27, 19, 11.
    set(&image, &[(0x808, 0x1003), (0x1010, 0x1803), (0x1818, 0x2003)]);
    set(&image, &[(0x2020, 0xf_ffff_1234_580d)]);
    let iova = 1 << 35 | 2 << 27 | 3 << 19 | 4 << 11 | 0x7bc;
    let walker = walker(0x800, 43);
    let leaf = write(&walker, &image, iova).unwrap();
    assert_eq!((leaf.paddr.get(), leaf.level), (0xf_ffff_1234_5fbc, 0));
    assert_eq!(leaf.leaf, block(iova & !0x7ff, 11));
    let blocks: Vec<_> = steps(&walker, &image, iova).iter().map(|step| step.link.block).collect();
    assert_eq!(blocks, [43, 35, 27, 19].map(|lg2| block(lg2::align_down(iova, lg2), lg2)));
}

#[test]
fn the_root_is_as_low_and_as_small_as_the_input_permits() {
    for (input_lg2, level) in [(19, 0), (20, 1), (27, 1), (28, 2), (35, 2), (36, 3), (43, 3)] {
        let walker = walker(0x800, input_lg2);
        let image = TableImage::new();
        // 2^20 has two entries of 2^19, and so on.
        let entry_lg2 = 11 + 8 * u32::from(level);
        let entries = 1 << (input_lg2 - entry_lg2);
        image.add_table(PhysAddr::new(0x800), entries);
        let last = (1 << input_lg2) - 1;
        assert_eq!(read(&walker, &image, last), Err((FaultKind::Translation, level)));
        let outside = read(&walker, &image, 1 << input_lg2);
        assert_eq!(outside, Err((FaultKind::Translation, level)));
        assert_eq!(walker.input_range(), block(0, input_lg2));
    }
}

#[test]
fn leaves_and_runs_stand_at_the_lower_three_levels() {
    let image = tables(&[0x800, 0x1000]);
    set(&image, &[(0x808, 0x8000_000d)]);
    let base = 0x8000_0000;
    assert_eq!(shape(read(&walker(0x800, 19), &image, 0xabc)), (base | 0x2bc, 11, 11, 0));
    assert_eq!(shape(read(&walker(0x800, 27), &image, 0x8_1abc)), (base | 0x1abc, 19, 19, 1));
    assert_eq!(shape(read(&walker(0x800, 35), &image, 0x800_1abc)), (base | 0x1abc, 27, 27, 2));
    for index in 0..16 {
        set(&image, &[(0x800 + 8 * index, 0x8000_008d)]);
    }
    assert_eq!(shape(read(&walker(0x800, 19), &image, 0xabc)), (base | 0xabc, 11, 15, 0));
    assert_eq!(shape(read(&walker(0x800, 27), &image, 0x8_1abc)), (base | 0x8_1abc, 19, 23, 1));
    let large = read(&walker(0x800, 35), &image, 0x800_1abc);
    assert_eq!(shape(large), (base | 0x800_1abc, 27, 31, 2));
    // Level 3 has neither.
    for entry in [0xd, 0x8d] {
        set(&image, &[(0x800, entry)]);
        assert_eq!(read(&walker(0x800, 43), &image, 0), Err((FaultKind::Reserved, 3)));
    }
    // A root of eight entries has no room for a run.
    set(&image, &[(0x800, 0x8d)]);
    assert_eq!(read(&walker(0x800, 22), &image, 0), Err((FaultKind::Reserved, 1)));
    assert!(read(&walker(0x800, 23), &image, 0).is_ok());
}

#[test]
fn permissions_and_attributes_are_the_leafs() {
    let image = tables(&[0x800]);
    let walker = walker(0x800, 19);
    let outcomes = |entry| {
        set(&image, &[(0x800, entry)]);
        [read(&walker, &image, 0), write(&walker, &image, 0)]
            .map(|outcome| outcome.map(|leaf| leaf.prot))
    };
    let denied = Err((FaultKind::Permission, 0));
    assert_eq!(outcomes(0x1), [denied, denied]);
    assert_eq!(outcomes(0x5), [Ok(Prot::READ), denied]);
    assert_eq!(outcomes(0x9), [denied, Ok(Prot::WRITE)]);
    assert_eq!(outcomes(0x1d), [Ok(Prot::READ_WRITE | Prot::CACHE); 2]);
    assert_eq!(outcomes(0x2d), [Ok(Prot::READ_WRITE | Prot::NOEXEC); 2]);
    assert_eq!(outcomes(!1), [Err((FaultKind::Translation, 0)); 2]);
}

#[test]
fn bits_that_must_be_zero_and_misaligned_leaves_fault() {
    let walker = walker(0x800, 27);
    let page = |entry| {
        let image = tables(&[0x800, 0x1000]);
        set(&image, &[(0x800, 0x1003), (0x1000, entry)]);
        read(&walker, &image, 0).map(|_| ())
    };
    let pointer = |entry| {
        let image = tables(&[0x800, 0x1000]);
        set(&image, &[(0x800, entry), (0x1000, 0x80d)]);
        read(&walker, &image, 0).map(|_| ())
    };
    assert_eq!(page(0x90d), Ok(()));
    // Bit 1 at the lowest level, and the unused ones.
    for number in [1, 9, 10, 52, 63] {
        assert_eq!(page(0x80d | 1 << number), Err((FaultKind::Reserved, 0)), "bit {number}");
    }
    assert_eq!(pointer(0x1103), Ok(()));
    for number in [2, 3, 4, 5, 6, 7, 9, 10, 52, 63] {
        let reserved = Err((FaultKind::Reserved, 1));
        assert_eq!(pointer(0x1003 | 1 << number), reserved, "bit {number}");
    }
    // A leaf of 512K, a run of 32K.
    assert_eq!(pointer(0x8_080d), Err((FaultKind::Reserved, 1)));
    assert_eq!(pointer(0x4_000d), Err((FaultKind::Reserved, 1)));
    assert_eq!(page(0x488d), Err((FaultKind::Reserved, 0)));
    assert_eq!(page(0x808d), Ok(()));
}

#[test]
fn the_first_write_marks_a_leaf_dirty_where_that_is_tracked() {
    let image = tables(&[0x800]);
    set(&image, &[(0x800, 0xd), (0x808, 0x5), (0x810, 0x4d)]);
    assert_eq!(update(write(&walker(0x800, 19), &image, 0)), None);
    let registers = MockWalkRegisters { root: 0x800, input_lg2: 19, dirty_tracking: Switch::On };
    let tracking = MockWalker::new(registers).unwrap();
    let reading = read(&tracking, &image, 0).unwrap();
    assert_eq!((reading.clean, reading.update), (true, None));
    assert_eq!(update(write(&tracking, &image, 0)), Some((0x800, 0xd, 0x4d)));
    assert!(!read(&tracking, &image, 0x800).unwrap().clean);
    let marked = write(&tracking, &image, 0x1000).unwrap();
    assert_eq!((marked.clean, marked.update), (false, None));
}

#[test]
fn entries_of_a_run_that_disagree_are_found() {
    let run = || {
        let image = tables(&[0x800]);
        (16..32).for_each(|index| set(&image, &[(0x800 + 8 * index, 0x808d)]));
        image
    };
    let plain = walker(0x800, 19);
    assert_eq!(plain.census(&run(), plain.input_range()).unwrap(), [(15, 1)].into());
    for wrong in [0, 0x1_008d, 0x800d, 0x8085, 0x818d] {
        let image = run();
        set(&image, &[(0x8c0, wrong)]);
        let checked = plain.strict_walk(&image, Iova::new(0x8000));
        assert!(matches!(checked, Err(BadTable::Copies { .. })), "{wrong:#x}: {checked:?}");
    }
    // Hardware marks one entry alone.
    let image = run();
    set(&image, &[(0x8c0, 0x80cd)]);
    assert!(plain.strict_walk(&image, Iova::new(0x8000)).is_err());
    let registers = MockWalkRegisters { dirty_tracking: Switch::On, ..*plain.registers() };
    let tracking = MockWalker::new(registers).unwrap();
    assert!(tracking.strict_walk(&image, Iova::new(0x8000)).is_ok());
}

#[test]
fn reserved_register_values_are_refused() {
    let refused = |root, input_lg2| {
        let registers = MockWalkRegisters { root, input_lg2, ..Default::default() };
        MockWalker::new(registers).unwrap_err()
    };
    for input_lg2 in [0, 18, 44, 64] {
        assert!(matches!(refused(0, input_lg2), BadRegister::Reserved { .. }));
    }
    // Two entries still need 64 bytes' alignment; 2^24 has 32 entries of 2^19.
    assert_eq!(refused(0x820, 20), BadRegister::Root { root: 0x820, align_lg2: 6 });
    assert_eq!(refused(0x880, 24), BadRegister::Root { root: 0x880, align_lg2: 8 });
    assert!(matches!(refused(1 << 52, 19), BadRegister::Reserved { .. }));
    assert_eq!(walker(0x840, 20).root_level, 1);
}
