//! Tables written out by hand. Bits of an entry (SDM 3A, 4.5.4): P 0x1, R/W 0x2, U/S 0x4, PWT 0x8,
//! PCD 0x10, A 0x20, D 0x40, PS or PAT 0x80. So 0x7 is a table or a page for everything, 0x87 a
//! large page.

use dmaspan::Prot;

use super::*;
use crate::walker::TableImage;
use crate::walker::testing::{block, read, set, shape, steps, tables, update, write};

const ROOT: X86_64WalkRegisters = X86_64WalkRegisters {
    root: 0x1000,
    levels: 4,
    physical_lg2: 46,
    encryption_mask: 0,
    pat: X86_64WalkRegisters::PAT_AT_RESET,
    nxe: Switch::On,
    wp: Switch::On,
    pages_1g: Switch::On,
    updates: Switch::Off,
    requester: Requester::User,
};
const SUPERVISOR: X86_64WalkRegisters =
    X86_64WalkRegisters { requester: Requester::Supervisor, ..ROOT };

fn walker(registers: X86_64WalkRegisters) -> X86Walker {
    X86Walker::new(registers).unwrap()
}

/// The tables of address 0; the page is at 0x9000.
fn four_levels() -> TableImage {
    let image = tables(&[0x1000, 0x2000, 0x3000, 0x4000]);
    set(&image, &[(0x1000, 0x2007), (0x2000, 0x3007), (0x3000, 0x4007), (0x4000, 0x9007)]);
    image
}

#[test]
fn four_and_five_levels_resolve_nine_bits_each() {
    let image = tables(&[0x1000, 0x2000, 0x3000, 0x4000, 0x5000]);
    set(&image, &[(0x1008, 0x2007), (0x2010, 0x3007), (0x3018, 0x4007), (0x4020, 0x5007)]);
    set(&image, &[(0x5028, 0x3fff_1234_5007)]);
    let iova = 1 << 48 | 2 << 39 | 3 << 30 | 4 << 21 | 5 << 12 | 0xabc;
    let five = walker(X86_64WalkRegisters { levels: 5, ..ROOT });
    let leaf = write(&five, &image, iova).unwrap();
    assert_eq!((leaf.paddr.get(), leaf.level), (0x3fff_1234_5abc, 1));
    assert_eq!(leaf.leaf, block(iova & !0xfff, 12));
    assert_eq!(leaf.prot, Prot::READ_WRITE | Prot::CACHE);
    let levels: Vec<_> = steps(&five, &image, iova).iter().map(|step| step.link.level).collect();
    assert_eq!(levels, [5, 4, 3, 2, 1]);
    let four = walker(X86_64WalkRegisters { root: 0x2000, ..ROOT });
    assert_eq!(shape(read(&four, &image, iova & lg2::mask(48))), (0x3fff_1234_5abc, 12, 12, 1));
}

#[test]
fn the_upper_half_is_reached_by_canonical_addresses_only() {
    let image = four_levels();
    // Entry 511 of each level, and 256 of the root.
    set(&image, &[(0x1ff8, 0x2007), (0x2ff8, 0x3007), (0x3ff8, 0x4007), (0x4ff8, 0x5007)]);
    set(&image, &[(0x1800, 0x2007)]);
    let four = walker(ROOT);
    let last = read(&four, &image, u64::MAX).unwrap();
    assert_eq!((last.paddr.get(), last.leaf.last()), (0x5fff, Iova::new(u64::MAX)));
    assert_eq!(steps(&four, &image, u64::MAX)[0].entry_paddr.get(), 0x1ff8);
    assert!(read(&four, &image, 0xffff_8000_0000_0000).is_ok());
    for iova in [1 << 47, 1 << 48, 0xffff_7fff_ffff_ffff, 1 << 63] {
        assert_eq!(read(&four, &image, iova), Err((FaultKind::Translation, 4)), "{iova:#x}");
    }
    let five = walker(X86_64WalkRegisters { levels: 5, ..ROOT });
    for iova in [1 << 56, 0xfeff_ffff_ffff_ffff] {
        assert_eq!(read(&five, &image, iova), Err((FaultKind::Translation, 5)), "{iova:#x}");
    }
    assert_eq!(read(&five, &image, 0xff00_0000_0000_0000).unwrap_err().1, 1);
}

#[test]
fn pages_of_2m_and_1g_have_ps() {
    let image = four_levels();
    set(&image, &[(0x2008, 0x7_4000_0087), (0x3010, 0x6_0040_0087)]);
    let four = walker(ROOT);
    assert_eq!(shape(write(&four, &image, 0x4567_89ab)), (0x7_4567_89ab, 30, 30, 3));
    assert_eq!(shape(write(&four, &image, 0x51_2345)), (0x6_0051_2345, 21, 21, 2));
    let without = walker(X86_64WalkRegisters { pages_1g: Switch::Off, ..ROOT });
    assert_eq!(read(&without, &image, 0x4567_89ab), Err((FaultKind::Reserved, 3)));
    // There is no PS in a PML4E or PML5E.
    set(&image, &[(0x1000, 0x2087)]);
    assert_eq!(read(&four, &image, 0), Err((FaultKind::Reserved, 4)));
    let five = walker(X86_64WalkRegisters { levels: 5, ..ROOT });
    assert_eq!(read(&five, &image, 0), Err((FaultKind::Reserved, 5)));
}

#[test]
fn absent_entries_fault_at_their_level() {
    for (level, paddr) in [(4, 0x1000), (3, 0x2000), (2, 0x3000), (1, 0x4000)] {
        let image = four_levels();
        set(&image, &[(paddr, !1)]);
        assert_eq!(read(&walker(ROOT), &image, 0), Err((FaultKind::Translation, level)));
    }
}

#[test]
fn rights_are_needed_at_every_level() {
    for paddr in [0x1000, 0x2000, 0x3000, 0x4000] {
        let entry = if paddr == 0x4000 { 0x9007 } else { paddr + 0x1007 };
        let image = four_levels();
        set(&image, &[(paddr, entry & !2)]);
        assert_eq!(write(&walker(ROOT), &image, 0), Err((FaultKind::Permission, 1)));
        assert_eq!(read(&walker(ROOT), &image, 0).unwrap().prot, Prot::READ | Prot::CACHE);
        assert_eq!(write(&walker(SUPERVISOR), &image, 0), Err((FaultKind::Permission, 1)));
        // Without WP a supervisor writes everywhere.
        let unprotected = walker(X86_64WalkRegisters { wp: Switch::Off, ..SUPERVISOR });
        assert!(write(&unprotected, &image, 0).is_ok());
        let user = walker(X86_64WalkRegisters { wp: Switch::Off, ..ROOT });
        assert_eq!(write(&user, &image, 0), Err((FaultKind::Permission, 1)));

        set(&image, &[(paddr, entry & !4)]);
        assert_eq!(read(&walker(ROOT), &image, 0), Err((FaultKind::Permission, 1)));
        let private = write(&walker(SUPERVISOR), &image, 0).unwrap().prot;
        assert_eq!(private, Prot::READ_WRITE | Prot::CACHE | Prot::PRIV);

        set(&image, &[(paddr, entry | 1 << 63)]);
        assert!(write(&walker(ROOT), &image, 0).unwrap().prot.contains(Prot::NOEXEC));
    }
}

#[test]
fn reserved_bits_fault_at_their_level() {
    let four = walker(ROOT);
    for (level, paddr) in [(4, 0x1000), (3, 0x2000), (2, 0x3000), (1, 0x4000)] {
        let entry = if paddr == 0x4000 { 0x9007 } else { paddr + 0x1007 };
        let with = |registers, number: u32| {
            let image = four_levels();
            set(&image, &[(paddr, entry | 1 << number)]);
            read(&walker(registers), &image, 0).map(|_| ())
        };
        // Above the 46 bits of MAXPHYADDR.
        assert_eq!(with(ROOT, 46), Err((FaultKind::Reserved, level)));
        assert_eq!(with(ROOT, 51), Err((FaultKind::Reserved, level)));
        // Ignored bits.
        for number in [9, 10, 11, 52, 62] {
            assert_eq!(with(ROOT, number), Ok(()), "bit {number}");
        }
        let without_nx = X86_64WalkRegisters { nxe: Switch::Off, ..ROOT };
        assert_eq!(with(without_nx, 63), Err((FaultKind::Reserved, level)));
        assert_eq!(with(ROOT, 63), Ok(()));
    }
    // The offset in a large page, but for bit 12, which is PAT.
    let image = four_levels();
    for (paddr, level, wrong) in [(0x3000, 2, 1 << 13), (0x3000, 2, 1 << 20), (0x2000, 3, 1 << 29)]
    {
        set(&image, &[(paddr, 0x4000_0087 | wrong)]);
        assert_eq!(read(&four, &image, 0), Err((FaultKind::Reserved, level)));
        set(&image, &[(paddr, 0x4000_1087)]);
        assert_eq!(shape(read(&four, &image, 0x123)).0, 0x4000_0123);
    }
}

#[test]
fn the_pat_gives_the_memory_type() {
    let image = four_levels();
    // WB, WC, UC-, UC, WT, WP, UC, WB from index 0 up.
    let four = walker(X86_64WalkRegisters { pat: 0x0600_0504_0007_0106, ..ROOT });
    let types = |entry_paddr, base: u64, pat: u64| {
        [0, 0x8, 0x10, 0x18].map(|select| {
            set(&image, &[(entry_paddr, base | pat | select)]);
            let leaf = read(&four, &image, 0).unwrap();
            (leaf.attributes, leaf.prot & (Prot::CACHE | Prot::MMIO))
        })
    };
    let lower = [(6, Prot::CACHE), (1, Prot::empty()), (7, Prot::MMIO), (0, Prot::MMIO)];
    let upper = [(4, Prot::CACHE), (5, Prot::CACHE), (0, Prot::MMIO), (6, Prot::CACHE)];
    assert_eq!(types(0x4000, 0x9007, 0), lower);
    assert_eq!(types(0x4000, 0x9007, 0x80), upper);
    assert_eq!(types(0x3000, 0x20_0087, 0), lower);
    assert_eq!(types(0x3000, 0x20_0087, 0x1000), upper);
}

#[test]
fn hardware_sets_accessed_and_at_the_first_write_dirty() {
    let image = four_levels();
    set(&image, &[(0x4008, 0x9005), (0x4010, 0x9067), (0x3008, 0x20_0087)]);
    assert_eq!(update(write(&walker(ROOT), &image, 0)), None);
    let updating = walker(X86_64WalkRegisters { updates: Switch::On, ..ROOT });
    assert_eq!(update(read(&updating, &image, 0)), Some((0x4000, 0x9007, 0x9027)));
    assert!(read(&updating, &image, 0).unwrap().clean);
    assert_eq!(update(write(&updating, &image, 0)), Some((0x4000, 0x9007, 0x9067)));
    assert_eq!(update(write(&updating, &image, 0x20_0000)), Some((0x3008, 0x20_0087, 0x20_00e7)));
    let read_only = read(&updating, &image, 0x1000).unwrap();
    assert_eq!((read_only.clean, read_only.update.unwrap().new), (false, 0x9025));
    assert_eq!(update(write(&updating, &image, 0x2000)), None);
}

#[test]
fn the_encryption_bit_is_no_address() {
    let image = four_levels();
    // Bit 47 is above MAXPHYADDR.
    let c_bit = 1 << 47;
    let entries = [(0x1000, 0x2007), (0x2000, 0x3007), (0x3000, 0x4007), (0x4000, 0x9007)];
    set(&image, &entries.map(|(paddr, entry)| (paddr, entry | c_bit)));
    assert_eq!(read(&walker(ROOT), &image, 0), Err((FaultKind::Reserved, 4)));
    let root = 0x1000 | c_bit;
    let encrypting = walker(X86_64WalkRegisters { encryption_mask: c_bit, root, ..ROOT });
    assert_eq!(shape(read(&encrypting, &image, 0xabc)), (0x9abc, 12, 12, 1));
}

#[test]
fn reserved_register_values_are_refused() {
    let refused = |registers| {
        let outcome = X86Walker::new(registers);
        matches!(outcome, Err(BadRegister::Reserved { .. }))
    };
    assert!(refused(X86_64WalkRegisters { levels: 3, ..ROOT }));
    assert!(refused(X86_64WalkRegisters { levels: 6, ..ROOT }));
    assert!(refused(X86_64WalkRegisters { physical_lg2: 53, ..ROOT }));
    assert!(refused(X86_64WalkRegisters { root: 1 << 46, ..ROOT }));
    assert!(refused(X86_64WalkRegisters { encryption_mask: 1 << 52, ..ROOT }));
    // Memory types 2 and 3 are reserved.
    assert!(refused(X86_64WalkRegisters { pat: 0x0007_0406_0007_0206, ..ROOT }));
    // CR3's low bits are PCD, PWT and the PCID.
    assert!(!refused(X86_64WalkRegisters { root: 0x1fff, ..ROOT }));
}

#[test]
fn a_survey_covers_both_halves() {
    let image = four_levels();
    set(&image, &[(0x1ff8, 0x2007), (0x2ff8, 0x4000_0087)]);
    let four = walker(ROOT);
    let mut leaves = Vec::new();
    let all = IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).unwrap();
    four.survey(&image, all, |leaf| leaves.push((leaf.leaf.start().get(), leaf.leaf_lg2))).unwrap();
    let upper = 0xffff_ff80_0000_0000;
    let expected = [(0, 12), (511 << 30, 30), (upper, 12), (upper | 511 << 30, 30)];
    assert_eq!(leaves, expected);
}
