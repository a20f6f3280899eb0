//! Tables written out by hand. Bits of an entry (D51397, 9.8): R 0x1, W 0x2, PS 0x80, A 0x100,
//! D 0x200, SNP 0x800.

use dmaspan::Prot;

use super::*;
use crate::walker::TableImage;
use crate::walker::testing::{block, read, set, shape, steps, tables, update, write};

/// Three levels with the root at 0x1000, 46 bits of host address, 2M and 1G pages.
const THREE: VtdSsWalkRegisters = VtdSsWalkRegisters {
    ssptptr: 0x1000,
    aw: 1,
    ssade: Switch::Off,
    host_lg2: 46,
    sslps: 3,
    snoop_control: Switch::On,
};

fn walker(registers: VtdSsWalkRegisters) -> VtdSsWalker {
    VtdSsWalker::new(registers).unwrap()
}

/// The tables of the first 1G and the first 2M.
fn three_levels() -> (VtdSsWalker, TableImage) {
    let image = tables(&[0x1000, 0x2000, 0x3000]);
    set(&image, &[(0x1000, 0x2003), (0x2000, 0x3003)]);
    (walker(THREE), image)
}

#[test]
fn each_address_width_has_its_levels() {
    let image = tables(&[0x1000, 0x2000, 0x3000, 0x4000, 0x5000]);
    // Indices 1, 2, 3, 4, 5 at bits 48, 39, 30, 21, 12.
    set(&image, &[(0x1008, 0x2003), (0x2010, 0x3003), (0x3018, 0x4003), (0x4020, 0x5003)]);
    set(&image, &[(0x5028, 0x3fff_1234_5003)]);
    let iova = 1 << 48 | 2 << 39 | 3 << 30 | 4 << 21 | 5 << 12 | 0xabc;
    let five = walker(VtdSsWalkRegisters { aw: 3, ..THREE });
    let leaf = write(&five, &image, iova).unwrap();
    assert_eq!(leaf.paddr.get(), 0x3fff_1234_5abc);
    assert_eq!((leaf.leaf, leaf.leaf_lg2, leaf.level), (block(iova & !0xfff, 12), 12, 1));
    assert_eq!(leaf.prot, Prot::READ_WRITE);
    let blocks: Vec<_> = steps(&five, &image, iova).iter().map(|step| step.link.block).collect();
    let expected = [57, 48, 39, 30, 21].map(|lg2| block(lg2::align_down(iova, lg2), lg2));
    assert_eq!(blocks, expected);
    // The same tables from the second and the third on.
    let four = walker(VtdSsWalkRegisters { aw: 2, ssptptr: 0x2000, ..THREE });
    assert_eq!(shape(read(&four, &image, iova & lg2::mask(48))), (0x3fff_1234_5abc, 12, 12, 1));
    let three = walker(VtdSsWalkRegisters { ssptptr: 0x3000, ..THREE });
    assert_eq!(shape(read(&three, &image, iova & lg2::mask(39))), (0x3fff_1234_5abc, 12, 12, 1));
}

#[test]
fn addresses_above_the_width_fault_at_the_root() {
    let (three, image) = three_levels();
    for iova in [1 << 39, 1 << 57, u64::MAX] {
        assert_eq!(read(&three, &image, iova), Err((FaultKind::Translation, 3)));
    }
    let five = walker(VtdSsWalkRegisters { aw: 3, ..THREE });
    assert_eq!(read(&five, &image, 1 << 57), Err((FaultKind::Translation, 5)));
    assert_eq!(read(&five, &image, (1 << 57) - 1), Err((FaultKind::Translation, 5)));
}

#[test]
fn pages_of_2m_and_1g_have_ps() {
    let (three, image) = three_levels();
    set(&image, &[(0x1008, 0x7_4000_0083), (0x2010, 0x6_0040_0083)]);
    assert_eq!(shape(write(&three, &image, 0x4567_89ab)), (0x7_4567_89ab, 30, 30, 3));
    assert_eq!(shape(write(&three, &image, 0x51_2345)), (0x6_0051_2345, 21, 21, 2));
    // Where the hardware has no such pages PS is reserved.
    let small = walker(VtdSsWalkRegisters { sslps: 0, ..THREE });
    assert_eq!(read(&small, &image, 0x4567_89ab), Err((FaultKind::Reserved, 3)));
    assert_eq!(read(&small, &image, 0x51_2345), Err((FaultKind::Reserved, 2)));
    let two_meg = walker(VtdSsWalkRegisters { sslps: 1, ..THREE });
    assert_eq!(read(&two_meg, &image, 0x4567_89ab), Err((FaultKind::Reserved, 3)));
    assert!(read(&two_meg, &image, 0x51_2345).is_ok());
    // PS is ignored in an SS-PTE, and reserved in an SS-PML4E.
    set(&image, &[(0x3000, 0x9083)]);
    assert_eq!(shape(read(&three, &image, 0)), (0x9000, 12, 12, 1));
    let four = walker(VtdSsWalkRegisters { aw: 2, ..THREE });
    assert_eq!(read(&four, &image, 1 << 39), Err((FaultKind::Reserved, 4)));
}

#[test]
fn an_entry_is_present_with_either_permission_and_both_are_needed_on_the_way() {
    let (three, image) = three_levels();
    let outcomes = |top: u64, middle: u64, page: u64| {
        set(&image, &[(0x1000, 0x2000 | top), (0x2000, 0x3000 | middle), (0x3000, page)]);
        (read(&three, &image, 0).map(|_| ()), write(&three, &image, 0).map(|_| ()))
    };
    let denied = Err((FaultKind::Permission, 1));
    assert_eq!(outcomes(3, 3, 3), (Ok(()), Ok(())));
    assert_eq!(outcomes(3, 3, 1), (Ok(()), denied));
    assert_eq!(outcomes(3, 3, 2), (denied, Ok(())));
    assert_eq!(outcomes(1, 3, 3), (Ok(()), denied));
    assert_eq!(outcomes(3, 2, 3), (denied, Ok(())));
    assert_eq!(outcomes(1, 2, 3), (denied, denied));
    for (level, entries) in [(1, (3, 3, 0)), (2, (3, 0, 3)), (3, (0, 3, 3))] {
        let absent = Err((FaultKind::Translation, level));
        assert_eq!(outcomes(entries.0, entries.1, entries.2), (absent, absent));
    }
    // Whatever else is in an absent entry does not count.
    set(&image, &[(0x1000, 0x2003), (0x2000, 0x3003), (0x3000, !3)]);
    assert_eq!(read(&three, &image, 0), Err((FaultKind::Translation, 1)));
}

#[test]
fn reserved_bits_fault_at_their_level() {
    let (three, image) = three_levels();
    let outcome = |paddr, entry| {
        set(&image, &[(0x1000, 0x2003), (0x2000, 0x3003), (0x3000, 0x9003), (paddr, entry)]);
        read(&three, &image, 0).map(|_| ())
    };
    for (level, paddr, entry) in [(3, 0x1000, 0x2003), (2, 0x2000, 0x3003), (1, 0x3000, 0x9003)] {
        // Above the 46 bits of the host; bit 62.
        for number in [46, 51, 62] {
            let reserved = Err((FaultKind::Reserved, level));
            assert_eq!(outcome(paddr, entry | 1 << number), reserved, "bit {number}");
        }
        for number in [10, 52, 61, 63] {
            assert_eq!(outcome(paddr, entry | 1 << number), Ok(()), "bit {number}");
        }
    }
    // Bit 11 is SNP of a page and reserved above.
    assert_eq!(outcome(0x3000, 0x9803), Ok(()));
    assert_eq!(outcome(0x2000, 0x3803), Err((FaultKind::Reserved, 2)));
    assert_eq!(outcome(0x1000, 0x2803), Err((FaultKind::Reserved, 3)));
    // The offset in a large page.
    assert_eq!(outcome(0x2000, 0x20_0083), Ok(()));
    assert_eq!(outcome(0x2000, 0x30_0083), Err((FaultKind::Reserved, 2)));
    assert_eq!(outcome(0x2000, 0x20_1083), Err((FaultKind::Reserved, 2)));
    assert_eq!(outcome(0x1000, 0x4000_0083), Ok(()));
    assert_eq!(outcome(0x1000, 0x6000_0083), Err((FaultKind::Reserved, 3)));
}

#[test]
fn snp_makes_a_page_coherent_where_the_hardware_has_it() {
    let (three, image) = three_levels();
    set(&image, &[(0x3000, 0x9803), (0x2008, 0x20_0883)]);
    let coherent = Prot::READ_WRITE | Prot::CACHE;
    assert_eq!(read(&three, &image, 0).unwrap().prot, coherent);
    assert_eq!(read(&three, &image, 0x20_0000).unwrap().prot, coherent);
    let without = walker(VtdSsWalkRegisters { snoop_control: Switch::Off, ..THREE });
    assert_eq!(read(&without, &image, 0), Err((FaultKind::Reserved, 1)));
}

#[test]
fn ssade_sets_accessed_and_at_the_first_write_dirty() {
    let (plain, image) = three_levels();
    set(&image, &[(0x3000, 0x9003), (0x3008, 0x9001), (0x3010, 0x9303), (0x2008, 0x20_0083)]);
    assert_eq!(update(write(&plain, &image, 0)), None);
    assert!(!write(&plain, &image, 0).unwrap().clean);
    let tracking = walker(VtdSsWalkRegisters { ssade: Switch::On, ..THREE });
    assert_eq!(update(read(&tracking, &image, 0)), Some((0x3000, 0x9003, 0x9103)));
    assert!(read(&tracking, &image, 0).unwrap().clean);
    assert_eq!(update(write(&tracking, &image, 0)), Some((0x3000, 0x9003, 0x9303)));
    assert_eq!(update(write(&tracking, &image, 0x20_0000)), Some((0x2008, 0x20_0083, 0x20_0383)));
    // A page that cannot be written is not clean, and a marked one needs nothing.
    assert!(!read(&tracking, &image, 0x1000).unwrap().clean);
    let marked = write(&tracking, &image, 0x2000).unwrap();
    assert_eq!((marked.clean, marked.update), (false, None));
}

#[test]
fn reserved_register_values_are_refused() {
    let refused = |registers| VtdSsWalker::new(registers).unwrap_err();
    for aw in [0, 4] {
        let bad = refused(VtdSsWalkRegisters { aw, ..THREE });
        assert_eq!(bad, BadRegister::Reserved { field: "AW", value: aw.into() });
    }
    let bad = refused(VtdSsWalkRegisters { ssptptr: 0x1800, ..THREE });
    assert_eq!(bad, BadRegister::Root { root: 0x1800, align_lg2: 12 });
    let bad = refused(VtdSsWalkRegisters { ssptptr: 1 << 46, ..THREE });
    assert_eq!(bad, BadRegister::Reserved { field: "SSPTPTR", value: 1 << 46 });
    assert!(matches!(
        refused(VtdSsWalkRegisters { host_lg2: 53, ..THREE }),
        BadRegister::Reserved { .. }
    ));
    assert!(matches!(
        refused(VtdSsWalkRegisters { sslps: 4, ..THREE }),
        BadRegister::Reserved { .. }
    ));
}

#[test]
fn a_survey_visits_every_leaf_and_stops_at_reserved_bits() {
    let (three, image) = three_levels();
    set(&image, &[(0x3000, 0x9003), (0x3ff8, 0x9001), (0x2ff8, 0x20_0083)]);
    set(&image, &[(0x1ff8, 0x4000_0083)]);
    let census = three.census(&image, three.input_range()).unwrap();
    assert_eq!(census, [(12, 2), (21, 1), (30, 1)].into());
    set(&image, &[(0x2ff8, 0x20_1083)]);
    let survey = three.survey(&image, three.input_range(), |_| ());
    let Err(crate::walker::BadTable::Fault(fault)) = survey else { panic!("{survey:?}") };
    assert_eq!((fault.kind, fault.iova), (FaultKind::Reserved, Iova::new(511 << 21)));
}
