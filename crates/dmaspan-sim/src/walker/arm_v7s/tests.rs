//! Tables written out by hand. Each descriptor is derived from the manual where it stands.
//!
//! The leaf attributes (DDI 0406C, B3.5.1): C is 0x8, B 0x4; AP\[1:0\] is 0xc00 in a section and
//! 0x30 in a page, AP\[2\] 0x8000 and 0x200, S 0x1_0000 and 0x400, nG 0x2_0000 and 0x800. With the
//! access flag AP\[0\] is that flag, AP\[1\] says unprivileged too and AP\[2\] read-only. So 0x43e
//! is a small page to read and write, shared, with C and B, and 0x1_0c0e a section of that kind.

use dmaspan::{Iova, PhysAddr, Prot};

use super::*;
use crate::walker::arm_lpae::AddressHalf;
use crate::walker::testing::{block, read, steps, write};
use crate::walker::{BadTable, Checked as _, NotATable, TableImage, Translated};

const SMALL: u32 = 0x43e;
const LARGE: u32 = 0x43d;
const SECTION: u32 = 0x1_0c0e;
const SUPERSECTION: u32 = 1 << 18 | SECTION;

/// Region 0 (TEX\[0\], C, B) is normal, 1 device, 3 normal, 4 normal; DS0, DS1, NS1; NOS3.
const PRRR: u32 = 2 << 8 | 2 << 6 | 1 << 2 | 2 | 0b1011 << 16 | 1 << 27;
/// Region 3 is write-back inside and outside; region 4 write-back inside only.
const NMRR: u32 = 1 << 6 | 1 << 22 | 1 << 8;

fn registers(ttbr: u32, ttbcr: u32) -> ArmV7sWalkRegisters {
    ArmV7sWalkRegisters {
        ttbr,
        ttbcr,
        prrr: PRRR,
        nmrr: NMRR,
        sctlr: SCTLR_TRE | SCTLR_AFE,
        ..Default::default()
    }
}

fn walker(ttbr: u32, ttbcr: u32) -> ArmV7sWalker {
    ArmV7sWalker::new(registers(ttbr, ttbcr)).unwrap()
}

fn media_tek(ttbr: u32, input_lg2: u32) -> ArmV7sWalker {
    let variant = Variant::MediaTek { input_lg2 };
    ArmV7sWalker::new(ArmV7sWalkRegisters { variant, ..registers(ttbr, 0) }).unwrap()
}

/// A root at 0x4000 and a table at 0x400 for the first MiB.
fn two_levels() -> (ArmV7sWalker, TableImage) {
    let image = TableImage::new();
    image.add_table(PhysAddr::new(0x4000), 2048);
    image.add_table(PhysAddr::new(0x400), 128);
    set(&image, &[(0x4000, 0x401)]);
    (walker(0x4000, 0), image)
}

fn set(image: &TableImage, words: &[(u64, u32)]) {
    words.iter().for_each(|(paddr, word)| image.set_u32(PhysAddr::new(*paddr), *word).unwrap());
}

/// Sixteen entries that are the same.
fn repeat(image: &TableImage, at: u64, word: u32) {
    (0..16).for_each(|index| set(image, &[(at + index * 4, word)]));
}

fn strict(walker: &ArmV7sWalker, image: &TableImage, iova: u64) -> Result<Translated, BadTable> {
    walker.strict_walk(image, Iova::new(iova))
}

mod sizes {
    use super::*;

    #[test]
    fn a_small_page_is_behind_two_levels() {
        let (walker, image) = two_levels();
        // Page 0x85 of the first MiB.
        set(&image, &[(0x400 + 0x85 * 4, 0xabcd_e000 | SMALL)]);
        let page = write(&walker, &image, 0x8_5123).unwrap();
        assert_eq!(
            (page.paddr.get(), page.leaf, page.level),
            (0xabcd_e123, block(0x8_5000, 12), 2)
        );
        assert_eq!((page.group, page.leaf_lg2, page.group_lg2), (page.leaf, 12, 12));
        assert_eq!(page.prot, Prot::READ_WRITE | Prot::CACHE);
        assert_eq!((page.clean, page.update), (false, None));
        let visited: Vec<_> = steps(&walker, &image, 0x8_5123)
            .iter()
            .map(|step| (step.link.table.get(), step.link.block, step.entry))
            .collect();
        let expected =
            [(0x4000, block(0, 32), 0x401), (0x400, block(0, 20), 0xabcd_e000 | u64::from(SMALL))];
        assert_eq!(visited, expected);
    }

    #[test]
    fn a_large_page_is_sixteen_entries_that_are_the_same() {
        let (walker, image) = two_levels();
        repeat(&image, 0x400 + 0x20 * 4, 0x1234_0000 | LARGE);
        let page = read(&walker, &image, 0x2_f567).unwrap();
        assert_eq!(
            (page.paddr.get(), page.leaf, page.level),
            (0x1234_f567, block(0x2_f000, 12), 2)
        );
        assert_eq!((page.group, page.leaf_lg2, page.group_lg2), (block(0x2_0000, 16), 12, 16));
        assert!(strict(&walker, &image, 0x2_f567).is_ok());
        assert_eq!(walker.census(&image, walker.input_range()).unwrap(), [(16, 1)].into());
    }

    #[test]
    fn a_section_is_one_entry_of_the_first_level() {
        let (walker, image) = two_levels();
        set(&image, &[(0x4000 + 4095 * 4, 0xfff0_0000 | SECTION)]);
        let section = write(&walker, &image, 0xffff_ffff).unwrap();
        let block = block(0xfff0_0000, 20);
        assert_eq!((section.paddr.get(), section.leaf, section.level), (0xffff_ffff, block, 1));
    }

    #[test]
    fn a_supersection_is_sixteen_entries_with_a_40_bit_address() {
        let (walker, image) = two_levels();
        // Bits 35:32 of the address, 0xa, are in 23:20 and bits 39:36, 0x5, in 8:5.
        let entry = 0x1200_0000 | 0xa << 20 | 0x5 << 5 | SUPERSECTION;
        repeat(&image, 0x4000 + 0x30 * 4, entry);
        let large = write(&walker, &image, 0x345_6789).unwrap();
        assert_eq!((large.paddr.get(), large.group), (0x5a_1245_6789, block(0x300_0000, 24)));
        assert_eq!((large.leaf_lg2, large.group_lg2, large.level), (20, 24, 1));
        assert_eq!(walker.census(&image, walker.input_range()).unwrap(), [(24, 1)].into());
        // Bits 8:5 of a section are its domain.
        set(&image, &[(0x4010, 0x10_0000 | 0xf << 5 | SECTION)]);
        assert_eq!(read(&walker, &image, 0x40_0000).unwrap().paddr, PhysAddr::new(0x10_0000));
    }

    #[test]
    fn what_is_invalid_faults_at_its_level() {
        let (walker, image) = two_levels();
        // Bits 1:0 are 0, whatever the others are.
        set(&image, &[(0x4004, 0xffff_fffc), (0x400, 0xffff_fffc)]);
        assert_eq!(read(&walker, &image, 0), Err((FaultKind::Translation, 2)));
        assert_eq!(read(&walker, &image, 0x10_0000), Err((FaultKind::Translation, 1)));
        assert_eq!(read(&walker, &image, 1 << 32), Err((FaultKind::Translation, 1)));
    }

    #[test]
    fn a_table_that_cannot_be_read_aborts_the_walk() {
        let (walker, image) = two_levels();
        image.free_table(PhysAddr::new(0x400));
        let freed = NotATable::Freed { paddr: PhysAddr::new(0x400) };
        assert_eq!(read(&walker, &image, 0), Err((FaultKind::ExternalAbort(freed), 2)));
    }

    #[test]
    fn tables_of_hostile_words_never_lead_far() {
        let (walker, image) = two_levels();
        for word in [u32::MAX, 0xffff_fffd, 0x5555_5555, 0xaaaa_aaaa] {
            (0..4096).for_each(|index| set(&image, &[(0x4000 + index * 4, word)]));
            let _ = read(&walker, &image, 0x1234_5678);
            let _ = walker.census(&image, block(0, 24));
        }
    }
}

mod halves {
    use super::*;

    #[test]
    fn ttbr0_has_what_n_leaves_it() {
        // N = 7: 32 MiB, 32 entries, aligned to 128 bytes.
        let walker = walker(0x4080, 7);
        assert_eq!(walker.input_range(), block(0, 25));
        let (_, image) = two_levels();
        set(&image, &[(0x4080 + 31 * 4, 0x10_0000 | SECTION)]);
        assert_eq!(read(&walker, &image, 0x1ff_ffff).unwrap().paddr, PhysAddr::new(0x1f_ffff));
        assert_eq!(read(&walker, &image, 0x200_0000), Err((FaultKind::Translation, 1)));
    }

    #[test]
    fn ttbr1_has_the_rest_and_a_whole_root() {
        let upper = ArmV7sWalkRegisters { half: AddressHalf::Upper, ..registers(0x4000, 1) };
        let walker = ArmV7sWalker::new(upper).unwrap();
        let (_, image) = two_levels();
        set(&image, &[(0x4000 + 0x800 * 4, 0x10_0000 | SECTION)]);
        assert_eq!(read(&walker, &image, 0x8000_0042).unwrap().paddr, PhysAddr::new(0x10_0042));
        assert_eq!(read(&walker, &image, 0x7fff_ffff), Err((FaultKind::Translation, 1)));
        assert_eq!(walker.census(&image, walker.input_range()).unwrap(), [(20, 1)].into());
    }

    #[test]
    fn disabled_walks_fault_at_level_1() {
        let (_, image) = two_levels();
        set(&image, &[(0x400, SMALL)]);
        // PD0 is bit 4, PD1 bit 5.
        assert_eq!(read(&walker(0x4000, 1 << 4), &image, 0), Err((FaultKind::Translation, 1)));
        assert!(read(&walker(0x4000, 1 << 5), &image, 0).is_ok());
    }

    #[test]
    fn reserved_registers_are_refused() {
        let bad = |registers| ArmV7sWalker::new(registers).unwrap_err();
        let good = registers(0x4000, 0);
        let media_tek = |input_lg2| Variant::MediaTek { input_lg2 };
        assert_eq!(
            bad(ArmV7sWalkRegisters { ttbcr: 1 << 31, ..good }),
            BadV7sRegisters::Control { ttbcr: 1 << 31 }
        );
        assert_eq!(
            bad(ArmV7sWalkRegisters { ttbcr: 1, variant: media_tek(32), ..good }),
            BadV7sRegisters::Control { ttbcr: 1 }
        );
        let no_remap = bad(ArmV7sWalkRegisters { sctlr: SCTLR_AFE, ..good });
        assert!(matches!(no_remap, BadV7sRegisters::NoRemap { .. }));
        let prrr = PRRR | 3 << 14;
        assert_eq!(bad(ArmV7sWalkRegisters { prrr, ..good }), BadV7sRegisters::MemoryType { prrr });
        assert_eq!(
            bad(ArmV7sWalkRegisters { half: AddressHalf::Upper, ..good }),
            BadV7sRegisters::Unused
        );
        let size = bad(ArmV7sWalkRegisters { variant: media_tek(35), ..good });
        assert_eq!(size, BadV7sRegisters::InputSize { input_lg2: 35 });
        let base = BadV7sRegisters::Base { ttbr: 0x2000, align_lg2: 14 };
        assert_eq!(bad(registers(0x2000, 0)), base);
        // Attributes of the walk in bits 6:0 are no address.
        assert!(ArmV7sWalker::new(registers(0x407f, 0)).is_ok());
    }
}

mod permissions {
    use super::*;

    /// What a page with each value of AP\[2:0\] permits, for each kind of requester.
    fn by_ap(sctlr: u32, privilege: AccessPrivilege) -> [Option<Prot>; 8] {
        let (_, image) = two_levels();
        let registers = ArmV7sWalkRegisters { sctlr, privilege, ..registers(0x4000, 0) };
        let walker = ArmV7sWalker::new(registers).unwrap();
        [0, 1, 2, 3, 4, 5, 6, 7].map(|ap: u32| {
            let entry = 0x40e | (ap >> 2) << 9 | (ap & 3) << 4;
            set(&image, &[(0x400, entry)]);
            // The same in a section.
            set(&image, &[(0x4004, 0x1_000e | (ap >> 2) << 15 | (ap & 3) << 10)]);
            let answers = [0, 0x10_0000].map(|iova| {
                let may_read = read(&walker, &image, iova);
                let may_write = write(&walker, &image, iova);
                let mut prot = Prot::empty();
                prot.set(Prot::READ, may_read.is_ok());
                prot.set(Prot::WRITE, may_write.is_ok());
                let flag_fault = matches!(may_read, Err((FaultKind::AccessFlag, _)));
                (!flag_fault).then_some(prot)
            });
            assert_eq!(answers[0], answers[1], "AP {ap:#b}");
            answers[0]
        })
    }

    #[test]
    fn with_the_access_flag_ap_2_and_1_are_read_only_and_unprivileged() {
        let sctlr = SCTLR_TRE | SCTLR_AFE;
        let (none, read) = (Some(Prot::empty()), Some(Prot::READ));
        let both = Some(Prot::READ_WRITE);
        // AP[0] = 0 is an access flag fault.
        let unprivileged = [None, none, None, both, None, none, None, read];
        assert_eq!(by_ap(sctlr, AccessPrivilege::Unprivileged), unprivileged);
        let privileged = [None, both, None, both, None, read, None, read];
        assert_eq!(by_ap(sctlr, AccessPrivilege::Privileged), privileged);
    }

    #[test]
    fn without_the_access_flag_ap_has_three_bits() {
        let (none, read) = (Some(Prot::empty()), Some(Prot::READ));
        let both = Some(Prot::READ_WRITE);
        let unprivileged = [none, none, read, both, none, none, read, read];
        assert_eq!(by_ap(SCTLR_TRE, AccessPrivilege::Unprivileged), unprivileged);
        let privileged = [none, both, both, both, none, read, read, read];
        assert_eq!(by_ap(SCTLR_TRE, AccessPrivilege::Privileged), privileged);
    }

    #[test]
    fn privileged_pages_say_so() {
        let (_, image) = two_levels();
        let registers = registers(0x4000, 0);
        let privileged =
            ArmV7sWalkRegisters { privilege: AccessPrivilege::Privileged, ..registers };
        let walker = ArmV7sWalker::new(privileged).unwrap();
        // AP[1], 0x20, is clear.
        set(&image, &[(0x400, 0x41e), (0x404, SMALL)]);
        let cached = Prot::READ_WRITE | Prot::CACHE;
        assert_eq!(read(&walker, &image, 0).unwrap().prot, cached | Prot::PRIV);
        assert_eq!(read(&walker, &image, 0x1000).unwrap().prot, cached);
    }

    #[test]
    fn xn_is_in_another_place_in_each_kind_of_leaf() {
        let (walker, image) = two_levels();
        set(&image, &[(0x400, SMALL), (0x404, SMALL | 1)]);
        repeat(&image, 0x440, LARGE);
        repeat(&image, 0x480, LARGE | 1 << 15);
        set(&image, &[(0x4004, SECTION), (0x4008, SECTION | 1 << 4)]);
        repeat(&image, 0x4040, SUPERSECTION | 1 << 4);
        let no_exec = [0, 0x1000, 0x1_0000, 0x2_0000, 0x10_0000, 0x20_0000, 0x100_0000]
            .map(|iova| strict(&walker, &image, iova).unwrap().prot.contains(Prot::NOEXEC));
        assert_eq!(no_exec, [false, true, false, true, false, true, true]);
    }

    #[test]
    fn pxn_of_a_table_and_of_a_section_is_for_the_privileged() {
        let (_, image) = two_levels();
        // PXN is bit 2 of a table and bit 0 of a section.
        set(&image, &[(0x4000, 0x405), (0x400, SMALL), (0x4004, SECTION | 1)]);
        let no_exec = |privilege| {
            let registers = ArmV7sWalkRegisters { privilege, ..registers(0x4000, 0) };
            let walker = ArmV7sWalker::new(registers).unwrap();
            [0, 0x10_0000]
                .map(|iova| read(&walker, &image, iova).unwrap().prot.contains(Prot::NOEXEC))
        };
        assert_eq!(no_exec(AccessPrivilege::Unprivileged), [false, false]);
        assert_eq!(no_exec(AccessPrivilege::Privileged), [true, true]);
    }

    #[test]
    fn prrr_and_nmrr_say_the_memory_type() {
        let (walker, image) = two_levels();
        // TEX[0] of a small page is bit 6, C bit 3, B bit 2; S, bit 10, is clear in the last one.
        let pages = [0x432, 0x436, 0x43e, 0x472, 0x43a, 0x03e];
        for (index, page) in (0u64..).zip(pages) {
            set(&image, &[(0x400 + index * 4, page)]);
        }
        let of = |page: u64| {
            let found = read(&walker, &image, page << 12).unwrap();
            (found.attributes, found.prot - Prot::READ_WRITE, found.shareability)
        };
        let (none, outer) = (Shareability::NonShareable, Shareability::Outer);
        // Region 0: normal, non-cacheable. Region 1: device. Region 3: normal, write-back, NOS.
        assert_eq!(of(0), (0b10_00_00, Prot::empty(), outer));
        assert_eq!(of(1), (0b01_00_00, Prot::MMIO, outer));
        assert_eq!(of(2), (0b10_01_01, Prot::CACHE, Shareability::Inner));
        // Region 4: cacheable inside only. Region 2: strongly ordered.
        assert_eq!(of(3), (0b10_00_01, Prot::empty(), outer));
        assert_eq!(of(4), (0, Prot::MMIO, outer));
        // NS0 is 0.
        assert_eq!(of(5), (0b10_01_01, Prot::CACHE, none));
    }

    #[test]
    fn tex_0_is_bit_12_of_a_section_and_of_a_large_page() {
        let (walker, image) = two_levels();
        // Region 4 without C and B.
        set(&image, &[(0x4004, (SECTION & !0xc) | 1 << 12)]);
        repeat(&image, 0x400, (LARGE & !0xc) | 1 << 12);
        for iova in [0, 0x10_0000] {
            assert_eq!(read(&walker, &image, iova).unwrap().attributes, 0b10_00_01);
        }
    }
}

mod media_tek {
    use super::*;

    /// Bits 32, 33 and 34 of an address in its entry: 9, 4 and 5.
    const HIGH: [u32; 3] = [1 << 9, 1 << 4, 1 << 5];

    #[test]
    fn three_bits_of_every_address_are_in_9_4_and_5() {
        let walker = super::media_tek(0x4000, 32);
        let image = TableImage::new();
        image.add_table(PhysAddr::new(0x4000), 2048);
        for (high, bit) in (32..).zip(HIGH) {
            let table = 0x400 | 1 << high;
            image.add_table(PhysAddr::new(table), 128);
            set(&image, &[(0x4000, 0x401 | bit), (table, 0x5000 | 2 | bit)]);
            repeat(&image, table + 0x40, 0x2_0001 | bit);
            set(&image, &[(0x4004, 0x30_0002 | bit)]);
            repeat(&image, 0x4040, 0x700_0000 | 1 << 18 | 2 | bit);
            let of = |iova| strict(&walker, &image, iova).unwrap().paddr.get() - (1 << high);
            assert_eq!(of(0x123), 0x5123);
            assert_eq!(of(0x1_0123), 0x2_0123);
            assert_eq!(of(0x10_0123), 0x30_0123);
            assert_eq!(of(0x100_0123), 0x700_0123);
        }
    }

    #[test]
    fn bits_34_to_32_of_the_root_are_in_2_to_0_of_ttbr() {
        let walker = super::media_tek(0x4005, 32);
        let image = TableImage::new();
        image.add_table(PhysAddr::new(0x5_0000_4000), 2048);
        set(&image, &[(0x5_0000_4000, 0x10_0002)]);
        assert_eq!(read(&walker, &image, 0).unwrap().paddr, PhysAddr::new(0x10_0000));
    }

    #[test]
    fn a_root_for_34_bits_has_16384_entries() {
        let walker = super::media_tek(0x1_0000, 34);
        let image = TableImage::new();
        image.add_table(PhysAddr::new(0x1_0000), 8192);
        set(&image, &[(0x1_0000 + 16383 * 4, 0x10_0002)]);
        let last = read(&walker, &image, 0x3_ffff_ffff).unwrap();
        assert_eq!((last.paddr.get(), last.leaf), (0x1f_ffff, block(0x3_fff0_0000, 20)));
        assert_eq!(read(&walker, &image, 1 << 34), Err((FaultKind::Translation, 1)));
        let variant = Variant::MediaTek { input_lg2: 34 };
        let misaligned = ArmV7sWalkRegisters { variant, ..registers(0x4000, 0) };
        let base = BadV7sRegisters::Base { ttbr: 0x4000, align_lg2: 16 };
        assert_eq!(ArmV7sWalker::new(misaligned).unwrap_err(), base);
    }

    #[test]
    fn there_are_no_permissions_and_no_access_flag() {
        let (_, image) = two_levels();
        let walker = super::media_tek(0x4000, 32);
        set(&image, &[(0x400, 0x5002), (0x4004, 0x8002)]);
        for iova in [0, 0x10_0000] {
            assert_eq!(write(&walker, &image, iova).unwrap().prot, Prot::READ_WRITE);
        }
    }
}

mod checks {
    use super::*;

    #[test]
    fn an_entry_that_does_not_repeat_the_others_is_found_from_every_one() {
        let (walker, image) = two_levels();
        repeat(&image, 0x440, 0x1234_0000 | LARGE);
        repeat(&image, 0x4040, 0x700_0000 | SUPERSECTION);
        // Another address, another attribute, no entry at all; a large page and a supersection.
        for wrong in [0x1235_0000 | LARGE, 0x1234_0000 | LARGE | 1 << 9, 0] {
            set(&image, &[(0x440 + 7 * 4, wrong)]);
            let found = strict(&walker, &image, 0x1_0000).unwrap_err();
            let BadTable::Copies { group, entry_paddr, entry, expected } = found else {
                panic!("{found}");
            };
            assert_eq!((group, entry_paddr.get()), (block(0x1_0000, 16), 0x440 + 7 * 4));
            let words = (u64::from(wrong), u64::from(0x1234_0000 | LARGE));
            assert_eq!((entry, expected), words);
            assert!(walker.census(&image, walker.input_range()).is_err());
        }
        // A page of another kind in the middle, seen from itself, is no large page.
        set(&image, &[(0x440 + 7 * 4, 0x9000 | SMALL)]);
        assert!(strict(&walker, &image, 0x1_7000).is_ok());
        assert!(walker.survey(&image, block(0x1_0000, 16), |_| ()).is_err());
        set(&image, &[(0x4040 + 15 * 4, 0x700_0000 | SUPERSECTION | 1 << 20)]);
        for iova in [0x100_0000, 0x1ff_ffff] {
            let found = strict(&walker, &image, iova);
            assert!(matches!(found, Err(BadTable::Copies { .. })), "{found:?}");
        }
    }

    fn reserved_bits(walker: &ArmV7sWalker, image: &TableImage, iova: u64) -> u64 {
        match strict(walker, image, iova) {
            Ok(_) => 0,
            Err(BadTable::Reserved { bits, .. }) => bits,
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn bits_that_should_be_zero_are_found_in_tables_and_large_pages() {
        let (walker, image) = two_levels();
        repeat(&image, 0x440, LARGE | 1 << 7);
        assert_eq!(reserved_bits(&walker, &image, 0x1_0000), 1 << 7);
        // Bit 9 and the domain in 8:5 are none of them.
        set(&image, &[(0x400, SMALL), (0x4000, 0x401 | 1 << 9 | 0xf << 5)]);
        assert_eq!(reserved_bits(&walker, &image, 0), 0);
        set(&image, &[(0x4000, 0x411)]);
        assert_eq!(reserved_bits(&walker, &image, 0), 1 << 4);
        // MediaTek's supersections have no extended base.
        let walker = super::media_tek(0x4000, 32);
        repeat(&image, 0x4040, 1 << 20 | 1 << 18 | 2);
        assert_eq!(reserved_bits(&walker, &image, 0x100_0000), 1 << 20);
    }

    #[test]
    fn the_reserved_permission_is_found_where_there_is_no_access_flag() {
        let (with_flag, image) = two_levels();
        // AP[2:0] = 0b100.
        set(&image, &[(0x400, 0x60e)]);
        let registers = ArmV7sWalkRegisters { sctlr: SCTLR_TRE, ..registers(0x4000, 0) };
        let without = ArmV7sWalker::new(registers).unwrap();
        let found = strict(&without, &image, 0);
        assert!(matches!(found, Err(BadTable::Reserved { bits: 0x200, .. })), "{found:?}");
        assert!(matches!(strict(&with_flag, &image, 0), Err(BadTable::Fault(_))));
    }

    #[test]
    fn a_survey_visits_every_leaf_in_order_and_passes_over_holes() {
        let (walker, image) = two_levels();
        set(&image, &[(0x404, SMALL), (0x7fc, SMALL), (0x4008, SECTION)]);
        repeat(&image, 0x4040, SUPERSECTION);
        let mut leaves = Vec::new();
        walker.survey(&image, walker.input_range(), |leaf| leaves.push(leaf.group)).unwrap();
        assert_eq!(leaves.len(), 3 + 16);
        leaves.dedup();
        let expected =
            [block(0x1000, 12), block(0xf_f000, 12), block(0x20_0000, 20), block(1 << 24, 24)];
        assert_eq!(leaves, expected);
    }
}
