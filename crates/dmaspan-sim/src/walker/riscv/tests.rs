//! Tables written out by hand. Bits of an entry: V 0x1, R 0x2, W 0x4, X 0x8, U 0x10, G 0x20,
//! A 0x40, D 0x80; the address is shifted right by two. 0xd7 is a marked page that a user may
//! write, and 0x801 leads to the table at 0x2000.

use dmaspan::Prot;

use super::*;
use crate::walker::testing::{block, read, set, shape, steps, tables, update, write};
use crate::walker::{BadTable, TableImage, Translated};

const SV39: u64 = 8 << 60;
const SV48: u64 = 9 << 60;
const SV57: u64 = 10 << 60;

/// Every extension, no hardware updates, the root at 0x1000.
fn first(mode: u64) -> RiscvWalkRegisters {
    RiscvWalkRegisters {
        stage: RiscvRoot::First { fsc: mode | 1 },
        updates: Switch::Off,
        svnapot: Switch::On,
        svpbmt: Switch::On,
        requester: Requester::User,
        sum: Switch::Off,
    }
}

/// The root of 16K at 0x4000.
fn second(mode: u64) -> RiscvWalkRegisters {
    // GSCID is no part of the address.
    RiscvWalkRegisters {
        stage: RiscvRoot::Second { iohgatp: mode | 0xffff << 44 | 4 },
        ..first(SV39)
    }
}

fn walker(registers: RiscvWalkRegisters) -> RiscvWalker {
    RiscvWalker::new(registers).unwrap()
}

/// Sv39: the tables of the first 1G and the first 2M.
fn three_levels() -> (RiscvWalker, TableImage) {
    let image = tables(&[0x1000, 0x2000, 0x3000]);
    set(&image, &[(0x1000, 0x801), (0x2000, 0xc01)]);
    (walker(first(SV39)), image)
}

mod levels {
    use super::*;

    #[test]
    fn sv39_sv48_and_sv57_resolve_nine_bits_a_level() {
        let image = tables(&[0x1000, 0x2000, 0x3000, 0x4000, 0x5000]);
        // Indices 1, 2, 3, 4, 5 at bits 48, 39, 30, 21, 12.
        set(&image, &[(0x1008, 0x801), (0x2010, 0xc01), (0x3018, 0x1001), (0x4020, 0x1401)]);
        // The highest page of 56 bits but its own bits: PPN bit 43 is bit 53.
        set(&image, &[(0x5028, 1 << 53 | 0x12345 << 10 | 0xd7)]);
        let iova = 1 << 48 | 2 << 39 | 3 << 30 | 4 << 21 | 5 << 12 | 0xabc;
        let paddr = 1 << 55 | 0x1234_5abc;
        let five = walker(first(SV57));
        let leaf = write(&five, &image, iova).unwrap();
        assert_eq!((leaf.paddr.get(), leaf.level), (paddr, 0));
        assert_eq!(leaf.leaf, block(iova & !0xfff, 12));
        assert_eq!(leaf.prot, Prot::READ_WRITE | Prot::CACHE | Prot::NOEXEC);
        let levels: Vec<_> =
            steps(&five, &image, iova).iter().map(|step| step.link.level).collect();
        assert_eq!(levels, [4, 3, 2, 1, 0]);
        let at = |mode, ppn| {
            walker(RiscvWalkRegisters {
                stage: RiscvRoot::First { fsc: mode | ppn },
                ..first(mode)
            })
        };
        let low = |lg2| iova & lg2::mask(lg2);
        assert_eq!(shape(read(&at(SV48, 2), &image, low(48))), (paddr, 12, 12, 0));
        assert_eq!(shape(read(&at(SV39, 3), &image, low(39))), (paddr, 12, 12, 0));
    }

    #[test]
    fn leaves_stand_at_every_level() {
        let image = tables(&[0x1000]);
        let five = walker(first(SV57));
        for (levels, lg2) in [(1, 48u32), (2, 39), (3, 30), (4, 21)] {
            // One chain through the same tables, with the leaf at its end.
            let image = tables(&[0x1000, 0x2000, 0x3000, 0x4000]);
            for table in 1..levels {
                set(&image, &[(table * 0x1000, (table + 1) << 10 | 1)]);
            }
            let iova = 1 << lg2 | 0xabc;
            set(&image, &[(levels * 0x1000 + 8, 1 << (48 - 2) | 0xd7)]);
            let level = u8::try_from(5 - levels).unwrap();
            assert_eq!(shape(read(&five, &image, iova)), (1 << 48 | 0xabc, lg2, lg2, level));
            // Misaligned by one page, and by half.
            for wrong in [12, lg2 - 1] {
                set(&image, &[(levels * 0x1000 + 8, 1 << (wrong - 2) | 0xd7)]);
                assert_eq!(read(&five, &image, iova), Err((FaultKind::Reserved, level)));
            }
        }
        assert_eq!(read(&five, &image, 0), Err((FaultKind::Translation, 4)));
    }

    #[test]
    fn the_first_stage_sign_extends_its_addresses() {
        let (three, image) = three_levels();
        set(&image, &[(0x1ff8, 0x4000_0000 >> 2 | 0xd7)]);
        assert_eq!(shape(read(&three, &image, u64::MAX)), (0x7fff_ffff, 30, 30, 2));
        for iova in [1 << 38, 1 << 39, 1 << 63, 0xffff_ffbf_ffff_ffff] {
            assert_eq!(read(&three, &image, iova), Err((FaultKind::Translation, 2)));
        }
        for (mode, bits, level) in [(SV48, 48, 3), (SV57, 57, 4)] {
            let walker = walker(first(mode));
            assert_eq!(walker.input_ranges()[0], block(0, bits - 1));
            let outside = read(&walker, &image, 1 << (bits - 1));
            assert_eq!(outside, Err((FaultKind::Translation, level)));
        }
    }

    #[test]
    fn the_second_stage_has_a_root_of_four_tables_and_zero_extends() {
        let image = TableImage::new();
        image.add_table(PhysAddr::new(0x4000), 2048);
        // Entry 2047 of the root: a superpage.
        set(&image, &[(0x4000 + 2047 * 8, 0x4000_0000 >> 2 | 0xd7)]);
        let x4 = walker(second(SV39));
        let last = (1 << 41) - 1;
        assert_eq!(shape(read(&x4, &image, last)), (0x7fff_ffff, 30, 30, 2));
        for iova in [1 << 41, 1 << 63, u64::MAX] {
            assert_eq!(read(&x4, &image, iova), Err((FaultKind::Translation, 2)));
        }
        let reach = |mode| walker(second(mode)).input_ranges();
        assert_eq!(reach(SV39), [block(0, 41)]);
        assert_eq!(reach(SV48), [block(0, 50)]);
        assert_eq!(reach(SV57), [block(0, 59)]);
    }

    #[test]
    fn the_lower_levels_of_the_second_stage_are_single_tables() {
        let image = tables(&[0x4000, 0x8000, 0x9000]);
        set(&image, &[(0x4000, 0x2001), (0x8008, 0x2401), (0x9028, 0x10 << 10 | 0xd7)]);
        let x4 = walker(second(SV39));
        assert_eq!(shape(write(&x4, &image, 0x20_5abc)), (0x1_0abc, 12, 12, 0));
    }
}

mod entries {
    use super::*;

    /// The outcome with this entry as the page of address 0.
    fn page(registers: RiscvWalkRegisters, entry: u64) -> Result<Translated, (FaultKind, u8)> {
        let (_, image) = three_levels();
        set(&image, &[(0x3000, entry)]);
        read(&walker(registers), &image, 0)
    }

    #[test]
    fn permissions_are_the_leafs() {
        let (three, image) = three_levels();
        let outcomes = |entry: u64| {
            set(&image, &[(0x3000, 0x8000 >> 2 | 0xd1 | entry)]);
            [read(&three, &image, 0).is_ok(), write(&three, &image, 0).is_ok()]
        };
        assert_eq!(outcomes(0x2), [true, false]);
        assert_eq!(outcomes(0x6), [true, true]);
        // Execute only.
        assert_eq!(outcomes(0x8), [false, false]);
        assert_eq!(read(&three, &image, 0), Err((FaultKind::Permission, 0)));
        assert!(!page(first(SV39), 0x20df).unwrap().prot.contains(Prot::NOEXEC));
        // Writing without reading is reserved, with and without execution.
        for entry in [0x20d5, 0x20dd] {
            assert_eq!(page(first(SV39), entry), Err((FaultKind::Reserved, 0)));
        }
        // V clear: nothing else counts.
        assert_eq!(page(first(SV39), !1), Err((FaultKind::Translation, 0)));
    }

    #[test]
    fn a_user_needs_u_and_a_supervisor_needs_it_clear_or_sum() {
        let supervisor = RiscvWalkRegisters { requester: Requester::Supervisor, ..first(SV39) };
        let sum = RiscvWalkRegisters { sum: Switch::On, ..supervisor };
        let denied = Err((FaultKind::Permission, 0));
        let outcomes = |entry| {
            [first(SV39), supervisor, sum]
                .map(|registers| page(registers, entry).map(|leaf| leaf.prot.contains(Prot::PRIV)))
        };
        assert_eq!(outcomes(0x20d7), [Ok(false), denied, Ok(false)]);
        assert_eq!(outcomes(0x20c7), [denied, Ok(true), Ok(true)]);
    }

    #[test]
    fn the_second_stage_takes_everybody_for_a_user() {
        let image = tables(&[0x4000]);
        let supervisor = RiscvWalkRegisters { requester: Requester::Supervisor, ..second(SV39) };
        set(&image, &[(0x4000, 0xd7)]);
        assert!(read(&walker(supervisor), &image, 0).is_ok());
        set(&image, &[(0x4000, 0xc7)]);
        for registers in [supervisor, second(SV39)] {
            assert_eq!(read(&walker(registers), &image, 0), Err((FaultKind::Permission, 2)));
        }
    }

    #[test]
    fn reserved_bits_fault() {
        for number in 54..=60 {
            let entry = 0x20d7 | 1 << number;
            assert_eq!(page(first(SV39), entry), Err((FaultKind::Reserved, 0)));
        }
        let plain = RiscvWalkRegisters { svnapot: Switch::Off, svpbmt: Switch::Off, ..first(SV39) };
        for number in 61..=63 {
            assert_eq!(page(plain, 0x20d7 | 1 << number), Err((FaultKind::Reserved, 0)));
        }
        // RSW and G are free.
        assert!(page(plain, 0x23f7).is_ok());
        // A pointer at the last level; what only leaves have, in a pointer.
        assert_eq!(page(first(SV39), 0x2001), Err((FaultKind::Reserved, 0)));
        for number in [4, 6, 7, 54, 61, 62, 63] {
            let (three, image) = three_levels();
            set(&image, &[(0x2000, 0xc01 | 1 << number)]);
            assert_eq!(read(&three, &image, 0), Err((FaultKind::Reserved, 1)), "bit {number}");
        }
    }

    #[test]
    fn svpbmt_gives_the_memory_type() {
        let kind = |pbmt: u64| {
            let leaf = page(first(SV39), 0x20d7 | pbmt << 61)?;
            Ok(leaf.prot & (Prot::CACHE | Prot::MMIO))
        };
        assert_eq!(kind(0), Ok(Prot::CACHE));
        assert_eq!(kind(1), Ok(Prot::empty()));
        assert_eq!(kind(2), Ok(Prot::MMIO));
        assert_eq!(kind(3), Err((FaultKind::Reserved, 0)));
    }

    #[test]
    fn without_updates_clear_flags_fault() {
        let (three, image) = three_levels();
        let flags = |entry: u64| {
            set(&image, &[(0x3000, 0x2000 | entry)]);
            [read(&three, &image, 0).err(), write(&three, &image, 0).err()]
        };
        let fault = Some((FaultKind::AccessFlag, 0));
        assert_eq!(flags(0x17), [fault, fault]);
        assert_eq!(flags(0x57), [None, fault]);
        assert_eq!(flags(0x97), [fault, fault]);
        assert_eq!(flags(0xd7), [None, None]);
        // Permission comes before D.
        assert_eq!(flags(0x53), [None, Some((FaultKind::Permission, 0))]);
    }

    #[test]
    fn with_updates_hardware_sets_a_and_at_the_first_write_d() {
        let (_, image) = three_levels();
        let updating = walker(RiscvWalkRegisters { updates: Switch::On, ..first(SV39) });
        set(&image, &[(0x3000, 0x2017), (0x3008, 0x2013), (0x2008, 0x20_0000 >> 2 | 0x17)]);
        assert_eq!(update(read(&updating, &image, 0)), Some((0x3000, 0x2017, 0x2057)));
        assert!(read(&updating, &image, 0).unwrap().clean);
        assert_eq!(update(write(&updating, &image, 0)), Some((0x3000, 0x2017, 0x20d7)));
        assert_eq!(update(write(&updating, &image, 0x20_0000)), Some((0x2008, 0x8_0017, 0x8_00d7)));
        assert!(!read(&updating, &image, 0x1000).unwrap().clean);
    }
}

mod napot {
    use super::*;

    /// Bit 63, the output 0x12_0000, PPN bits 3:0 0b1000.
    const PAGE_64K: u64 = 1 << 63 | 0x128 << 10 | 0xd7;

    /// Sixteen entries for 64K at iova 64K.
    fn sixteen() -> (RiscvWalker, TableImage) {
        let (three, image) = three_levels();
        (16..32).for_each(|index| set(&image, &[(0x3000 + 8 * index, PAGE_64K)]));
        (three, image)
    }

    #[test]
    fn a_page_of_64k_takes_its_low_bits_from_the_address() {
        let (three, image) = sixteen();
        assert_eq!(shape(read(&three, &image, 0x1_5678)), (0x12_5678, 12, 16, 0));
        assert_eq!(read(&three, &image, 0x1_5678).unwrap().group, block(0x1_0000, 16));
        assert_eq!(three.census(&image, block(0, 38)).unwrap(), [(16, 1)].into());
    }

    #[test]
    fn other_encodings_and_levels_are_reserved() {
        for low in (0..16).filter(|low| *low != 8) {
            let (three, image) = sixteen();
            set(&image, &[(0x3080, 1 << 63 | (0x120 | low) << 10 | 0xd7)]);
            assert_eq!(read(&three, &image, 0x1_0000), Err((FaultKind::Reserved, 0)));
        }
        let (three, image) = three_levels();
        set(&image, &[(0x2008, 1 << 63 | 0xd7), (0x2010, 1 << 63 | 8 << 10 | 0xd7)]);
        assert_eq!(read(&three, &image, 0x20_0000), Err((FaultKind::Reserved, 1)));
        assert_eq!(read(&three, &image, 0x40_0000), Err((FaultKind::Reserved, 1)));
    }

    #[test]
    fn entries_that_disagree_are_found() {
        for wrong in [0, PAGE_64K & !4, PAGE_64K ^ 1 << 20, 0x125 << 10 | 0xd7] {
            let (three, image) = sixteen();
            set(&image, &[(0x3000 + 8 * 21, wrong)]);
            let checked = three.strict_walk(&image, Iova::new(0x1_0000));
            let Err(BadTable::Copies { entry_paddr, entry, .. }) = checked else {
                panic!("{wrong:#x} passed: {checked:?}");
            };
            assert_eq!((entry_paddr.get(), entry), (0x30a8, wrong));
        }
    }
}

#[test]
fn g_is_ignored_by_the_second_stage_and_found_by_the_check() {
    let image = tables(&[0x4000]);
    set(&image, &[(0x4000, 0xf7)]);
    let x4 = walker(second(SV39));
    assert!(read(&x4, &image, 0).is_ok());
    let checked = x4.strict_walk(&image, Iova::new(0));
    assert!(matches!(checked, Err(BadTable::Reserved { bits: 0x20, .. })), "{checked:?}");
}

#[test]
fn reserved_register_values_are_refused() {
    let refused =
        |stage| RiscvWalker::new(RiscvWalkRegisters { stage, ..first(SV39) }).unwrap_err();
    for mode in [0, 1, 7, 11, 15] {
        let bad = refused(RiscvRoot::First { fsc: mode << 60 | 1 });
        assert_eq!(bad, BadRegister::Reserved { field: "MODE", value: mode });
    }
    let bad = refused(RiscvRoot::First { fsc: SV39 | 1 << 44 });
    assert!(matches!(bad, BadRegister::Reserved { field: "bits 59:44", .. }));
    let bad = refused(RiscvRoot::Second { iohgatp: SV39 | 2 });
    assert_eq!(bad, BadRegister::Root { root: 0x2000, align_lg2: 14 });
}
