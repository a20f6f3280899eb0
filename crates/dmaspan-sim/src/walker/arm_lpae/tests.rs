//! Tables written out by hand. Each descriptor is derived from the manual where it stands.
//!
//! The leaf attributes used throughout (DDI 0487, D8.3.1): AttrIndx 1 is 0x4, AP\[1\] (unprivileged
//! too) 0x40, AP\[2\] (read-only) 0x80, SH inner 0x300, AF 0x400; bits 1:0 are 0b11 for a page or a
//! table and 0b01 for a block. So 0x747 is a writable page, 0x7c7 a read-only one, 0x745 a block.

use dmaspan::{Iova, IovaRange, PhysAddr, Prot};

use super::*;
use crate::walker::testing::steps;
use crate::walker::{BadTable, Checked as _, NotATable, TableImage, Translated, Walker};

mod aarch32;
mod stage2;

/// Attribute 0 is normal non-cacheable, 1 write-back, 2 device nGnRE.
const MAIR: u64 = 0x04_ff_44;
/// IPS = 0b101, 48 bits.
const IPS_48: u64 = 5 << 32;
/// 4K granule (TG0 = 0b00), T0SZ = 25: 39 bits, start level 1.
const TCR_4K_39: u64 = IPS_48 | 25;

fn walker(ttbr: u64, tcr: u64) -> ArmLpaeS1Walker {
    let registers = ArmS1WalkRegisters { ttbr, tcr, mair: MAIR, ..Default::default() };
    ArmLpaeS1Walker::new(registers).unwrap()
}

/// Tables at these addresses, of one granule each.
fn tables(granule: usize, at: &[u64]) -> TableImage {
    let image = TableImage::new();
    at.iter().for_each(|paddr| image.add_table(PhysAddr::new(*paddr), granule / 8));
    image
}

fn set(image: &TableImage, words: &[(u64, u64)]) {
    words.iter().for_each(|(paddr, word)| image.set(PhysAddr::new(*paddr), *word).unwrap());
}

fn read<W: Walker>(
    walker: &W,
    image: &TableImage,
    iova: u64,
) -> Result<Translated, (FaultKind, u8)> {
    walker.walk(image, Iova::new(iova), Access::Read).map_err(|fault| (fault.kind, fault.level))
}

fn write<W: Walker>(
    walker: &W,
    image: &TableImage,
    iova: u64,
) -> Result<Translated, (FaultKind, u8)> {
    walker.walk(image, Iova::new(iova), Access::Write).map_err(|fault| (fault.kind, fault.level))
}

fn block(start: u64, lg2: u32) -> IovaRange {
    IovaRange::from_len(Iova::new(start), 1 << lg2).unwrap()
}

/// Three levels of 4K tables: the table of level 2 is for 0..1G, that of level 3 for 0..2M.
fn three_levels() -> (ArmLpaeS1Walker, TableImage) {
    let image = tables(4096, &[0x1000, 0x2000, 0x3000]);
    set(&image, &[(0x1000, 0x2003), (0x2000, 0x3003)]);
    (walker(0x1000, TCR_4K_39), image)
}

mod granules {
    use super::*;

    #[test]
    fn four_levels_of_4k_resolve_nine_bits_each() {
        // T0SZ = 16: 48 bits, start level 0. Indices 1, 2, 3, 4 at bits 39, 30, 21, 12.
        let walker = walker(0x1000, IPS_48 | 16);
        let image = tables(4096, &[0x1000, 0x2000, 0x3000, 0x4000]);
        set(&image, &[(0x1008, 0x2003), (0x2010, 0x3003), (0x3018, 0x4003)]);
        set(&image, &[(0x4020, 0xdead_f747)]);
        let leaf = write(&walker, &image, 0x80_8060_4abc).unwrap();
        assert_eq!(leaf.paddr, PhysAddr::new(0xdead_fabc));
        assert_eq!((leaf.leaf, leaf.leaf_lg2, leaf.level), (block(0x80_8060_4000, 12), 12, 3));
        assert_eq!((leaf.group, leaf.group_lg2), (leaf.leaf, 12));
        assert_eq!(leaf.prot, Prot::READ | Prot::WRITE | Prot::CACHE);
        assert_eq!((leaf.attributes, leaf.shareability), (0xff, Shareability::Inner));
        let visited: Vec<_> = steps(&walker, &image, 0x80_8060_4abc)
            .iter()
            .map(|step| (step.link.table.get(), step.link.block))
            .collect();
        assert_eq!(
            visited,
            [
                (0x1000, block(0, 48)),
                (0x2000, block(0x80_0000_0000, 39)),
                (0x3000, block(0x80_8000_0000, 30)),
                (0x4000, block(0x80_8060_0000, 21)),
            ]
        );
    }

    #[test]
    fn blocks_of_4k_are_at_levels_1_and_2_only() {
        let (walker, image) = three_levels();
        // Level 1, index 5: a 1G block at 256G. Level 2, index 3: a 2M block at 6M.
        set(&image, &[(0x1028, 0x40_0000_0745), (0x2018, 0x60_0745)]);
        let gig = read(&walker, &image, 0x1_4123_4567).unwrap();
        assert_eq!((gig.paddr, gig.leaf_lg2, gig.level), (PhysAddr::new(0x40_0123_4567), 30, 1));
        let two_meg = read(&walker, &image, 0x61_2345).unwrap();
        assert_eq!((two_meg.paddr, two_meg.leaf), (PhysAddr::new(0x61_2345), block(0x60_0000, 21)));
        // Level 3 with bits 1:0 = 0b01 is reserved.
        set(&image, &[(0x3000, 0x8000_0745)]);
        assert_eq!(read(&walker, &image, 0), Err((FaultKind::Translation, 3)));
        // A block at level 0 needs FEAT_LPA2.
        let walker = super::walker(0x1000, IPS_48 | 16);
        set(&image, &[(0x1000, 0x745)]);
        assert_eq!(read(&walker, &image, 0), Err((FaultKind::Translation, 0)));
    }

    #[test]
    fn tables_of_16k_resolve_eleven_bits_and_have_32m_blocks() {
        // TG0 = 0b10, T0SZ = 28: 36 bits, start level 2. Index 3 at bit 25, index 5 at bit 14.
        let walker = walker(0x8000, IPS_48 | 0x8000 | 28);
        let image = tables(0x4000, &[0x8000, 0xc000]);
        set(&image, &[(0x8018, 0xc003), (0xc028, 0x1234_4747)]);
        let page = write(&walker, &image, 0x601_5234).unwrap();
        assert_eq!((page.paddr, page.leaf_lg2), (PhysAddr::new(0x1234_5234), 14));
        // Index 4 of level 2: a block at 0x600_0000.
        set(&image, &[(0x8020, 0x600_0745)]);
        let large = read(&walker, &image, 0x812_3456).unwrap();
        assert_eq!((large.paddr, large.leaf), (PhysAddr::new(0x612_3456), block(0x800_0000, 25)));
    }

    #[test]
    fn a_16k_root_of_two_entries_is_at_level_0_and_level_1_has_no_blocks() {
        // T0SZ = 16: one bit is left for level 0, so the root has 16 bytes and 64 bytes' alignment.
        let walker = walker(0x40, IPS_48 | 0x8000 | 16);
        let image = tables(0x4000, &[0, 0x8000]);
        assert_eq!(walker.start_level(), 0);
        set(&image, &[(0x48, 0x8003), (0x8000, 0x745)]);
        assert_eq!(read(&walker, &image, 1 << 47), Err((FaultKind::Translation, 1)));
    }

    #[test]
    fn tables_of_64k_resolve_thirteen_bits_and_have_512m_blocks() {
        // TG0 = 0b01, T0SZ = 22: 42 bits, start level 2. Index 7 at bit 29, index 9 at bit 16.
        let walker = walker(0x1_0000, IPS_48 | 0x4000 | 22);
        let image = tables(0x1_0000, &[0x1_0000, 0x2_0000]);
        set(&image, &[(0x1_0038, 0x2_0003), (0x2_0048, 0xabcd_0747), (0x1_0040, 0x4000_0745)]);
        let page = write(&walker, &image, 0xe009_beef).unwrap();
        assert_eq!((page.paddr, page.leaf_lg2), (PhysAddr::new(0xabcd_beef), 16));
        let large = read(&walker, &image, 0x1_0000_1234).unwrap();
        assert_eq!((large.paddr, large.leaf_lg2), (PhysAddr::new(0x4000_1234), 29));
        // A 4T block at level 1 needs 52-bit addresses: T0SZ = 16 has a root at level 1.
        let walker = super::walker(0x1_0000, IPS_48 | 0x4000 | 16);
        set(&image, &[(0x1_0000, 0x745)]);
        assert_eq!(read(&walker, &image, 0), Err((FaultKind::Translation, 1)));
    }

    #[test]
    fn with_64k_and_52_bits_the_upper_address_bits_are_in_15_12_and_in_the_base_register() {
        // IPS = 0b110. TTBR bits 5:2 are bits 51:48 of the base 0xf_0000_0001_0000.
        let tcr = 6 << 32 | 0x4000 | 22;
        let walker = walker(0x1_0000 | 0xf << 2, tcr);
        let image = tables(0x1_0000, &[0xf_0000_0001_0000, 0xe_0000_0002_0000]);
        // Level 2, index 0: a table at 0xe_0000_0002_0000. Level 3, index 0: 0x5_0000_abcd_0000.
        set(&image, &[(0xf_0000_0001_0000, 0x2_e003), (0xe_0000_0002_0000, 0xabcd_5747)]);
        let page = read(&walker, &image, 0x1234).unwrap();
        assert_eq!(page.paddr, PhysAddr::new(0x5_0000_abcd_1234));
        // With 48 bits the same leaf is out of reach.
        let walker = super::walker(0x1_0000, IPS_48 | 0x4000 | 22);
        let image = tables(0x1_0000, &[0x1_0000, 0x2_0000]);
        set(&image, &[(0x1_0000, 0x2_0003), (0x2_0000, 0xabcd_5747)]);
        assert_eq!(read(&walker, &image, 0), Err((FaultKind::AddressSize, 3)));
    }

    #[test]
    fn with_52_bits_of_input_the_64k_root_has_1024_entries_and_4t_blocks() {
        // T0SZ = 12. Level 1, index 1023 at bit 42: a block at 4T.
        let walker = walker(0x1_0000, 6 << 32 | 0x4000 | 12);
        let image = tables(0x1_0000, &[0x1_0000]);
        set(&image, &[(0x1_0000 + 1023 * 8, 0x400_0000_0745)]);
        let leaf = read(&walker, &image, 0xf_ffff_ffff_ffff).unwrap();
        assert_eq!((leaf.paddr, leaf.leaf_lg2), (PhysAddr::new(0x7ff_ffff_ffff), 42));
        assert_eq!(read(&walker, &image, 0x10_0000_0000_0000), Err((FaultKind::Translation, 0)));
    }

    #[test]
    fn one_level_is_enough_for_small_input_sizes() {
        // 4K, T0SZ = 44: 20 bits, 256 pages, so the root is at level 3.
        let walker = walker(0x800, IPS_48 | 44);
        let image = tables(4096, &[0]);
        set(&image, &[(0x800 + 255 * 8, 0x7_0747)]);
        assert_eq!(read(&walker, &image, 0xf_f123).unwrap().paddr, PhysAddr::new(0x7_0123));
        assert_eq!(walker.start_level(), 3);
    }
}

mod ranges {
    use super::*;

    #[test]
    fn beyond_the_input_range_nothing_is_read() {
        let (walker, image) = three_levels();
        set(&image, &[(0x3000, 0x8747)]);
        assert!(read(&walker, &image, 0).is_ok());
        assert_eq!(read(&walker, &image, 1 << 39), Err((FaultKind::Translation, 0)));
        assert_eq!(read(&walker, &image, u64::MAX), Err((FaultKind::Translation, 0)));
        assert_eq!(walker.input_range(), block(0, 39));
    }

    #[test]
    fn the_upper_half_ends_at_the_top_address() {
        // TG1 = 0b10 (4K), T1SZ = 25; T0SZ and TG0 are nonsense and not looked at.
        let registers = ArmS1WalkRegisters {
            ttbr: 0x1000,
            tcr: IPS_48 | 2 << 30 | 25 << 16 | 0xc03f,
            mair: MAIR,
            half: AddressHalf::Upper,
            privilege: AccessPrivilege::Unprivileged,
        };
        let walker = ArmLpaeS1Walker::new(registers).unwrap();
        let image = tables(4096, &[0x1000, 0x2000, 0x3000]);
        // Index 511 at every level.
        set(&image, &[(0x1ff8, 0x2003), (0x2ff8, 0x3003), (0x3ff8, 0x5_5747)]);
        let leaf = read(&walker, &image, u64::MAX).unwrap();
        assert_eq!(leaf.paddr, PhysAddr::new(0x5_5fff));
        assert_eq!(leaf.leaf.last(), Iova::new(u64::MAX));
        assert_eq!(read(&walker, &image, 0xffff_ff7f_ffff_ffff), Err((FaultKind::Translation, 0)));
        assert_eq!(read(&walker, &image, 0x7f_ffff_f000), Err((FaultKind::Translation, 0)));
        assert_eq!(walker.census(&image, walker.input_range()).unwrap(), [(12, 1)].into());
    }

    #[test]
    fn disabled_walks_fault_before_any_table_is_read() {
        let (_, image) = three_levels();
        set(&image, &[(0x3000, 0x8747)]);
        // EPD0 is bit 7; EPD1, bit 23, is for the other half.
        let disabled = walker(0x1000, TCR_4K_39 | 1 << 7);
        assert_eq!(read(&disabled, &image, 0), Err((FaultKind::Translation, 0)));
        assert!(read(&walker(0x1000, TCR_4K_39 | 1 << 23), &image, 0).is_ok());
    }

    #[test]
    fn addresses_beyond_the_output_size_fault_at_the_level_that_has_them() {
        // IPS = 0b000: 32 bits.
        let walker = walker(0x1000, 25);
        let image = tables(4096, &[0x1000, 0x2000, 0x3000]);
        set(&image, &[(0x1000, 0x2003), (0x2000, 0x3003), (0x3000, 0x1_0000_0747)]);
        assert_eq!(read(&walker, &image, 0), Err((FaultKind::AddressSize, 3)));
        set(&image, &[(0x3000, 0xffff_f747)]);
        assert!(read(&walker, &image, 0).is_ok());
        set(&image, &[(0x2000, 0x1_0000_3003)]);
        assert_eq!(read(&walker, &image, 0), Err((FaultKind::AddressSize, 2)));
        let high = super::walker(0x1_0000_1000, 25);
        assert_eq!(read(&high, &image, 0), Err((FaultKind::AddressSize, 0)));
    }

    #[test]
    fn a_table_that_cannot_be_read_aborts_the_walk() {
        let (walker, image) = three_levels();
        set(&image, &[(0x3000, 0x8747)]);
        image.free_table(PhysAddr::new(0x3000));
        let freed = NotATable::Freed { paddr: PhysAddr::new(0x3000) };
        assert_eq!(read(&walker, &image, 0), Err((FaultKind::ExternalAbort(freed), 3)));
        set(&image, &[(0x2000, 0x9003)]);
        let outside = NotATable::Outside { paddr: PhysAddr::new(0x9000) };
        assert_eq!(read(&walker, &image, 0), Err((FaultKind::ExternalAbort(outside), 3)));
    }
}

mod permissions {
    use super::*;

    #[test]
    fn read_only_and_privileged_pages_refuse_what_they_say() {
        let (walker, image) = three_levels();
        // Page 0 is read-only (0x80); page 1 lacks AP[1] (0x40).
        set(&image, &[(0x3000, 0x87c7), (0x3008, 0x8707)]);
        assert_eq!(read(&walker, &image, 0).unwrap().prot, Prot::READ | Prot::CACHE);
        assert_eq!(write(&walker, &image, 0), Err((FaultKind::Permission, 3)));
        assert_eq!(read(&walker, &image, 0x1000), Err((FaultKind::Permission, 3)));
        let registers =
            ArmS1WalkRegisters { privilege: AccessPrivilege::Privileged, ..walker.registers };
        let privileged = ArmLpaeS1Walker::new(registers).unwrap();
        let leaf = write(&privileged, &image, 0x1000).unwrap();
        assert_eq!(leaf.prot, Prot::READ_WRITE | Prot::PRIV | Prot::CACHE);
        assert_eq!(write(&privileged, &image, 0), Err((FaultKind::Permission, 3)));
    }

    #[test]
    fn tables_take_permissions_from_everything_below_unless_that_is_disabled() {
        let (walker, image) = three_levels();
        set(&image, &[(0x3000, 0x8747)]);
        // APTable[1], bit 62, in the entry of level 1: no writes.
        set(&image, &[(0x1000, 1 << 62 | 0x2003)]);
        assert_eq!(write(&walker, &image, 0), Err((FaultKind::Permission, 3)));
        assert!(read(&walker, &image, 0).is_ok());
        // APTable[0], bit 61, at level 2 too: nothing unprivileged.
        set(&image, &[(0x2000, 1 << 61 | 0x3003)]);
        assert_eq!(read(&walker, &image, 0), Err((FaultKind::Permission, 3)));
        // HPD0 is bit 41.
        let disabled = super::walker(0x1000, TCR_4K_39 | 1 << 41);
        assert!(write(&disabled, &image, 0).is_ok());
    }

    #[test]
    fn execute_never_is_reported_for_who_accesses() {
        let (walker, image) = three_levels();
        let registers =
            ArmS1WalkRegisters { privilege: AccessPrivilege::Privileged, ..walker.registers };
        let privileged = ArmLpaeS1Walker::new(registers).unwrap();
        let no_exec =
            |walker, iova| read(walker, &image, iova).unwrap().prot.contains(Prot::NOEXEC);
        // UXN is bit 54, PXN bit 53.
        set(&image, &[(0x3000, 1 << 54 | 0x8747), (0x3008, 1 << 53 | 0x8747)]);
        assert_eq!((no_exec(&walker, 0), no_exec(&privileged, 0)), (true, false));
        assert_eq!((no_exec(&walker, 0x1000), no_exec(&privileged, 0x1000)), (false, true));
        // PXNTable is bit 59.
        set(&image, &[(0x1000, 1 << 59 | 0x2003)]);
        assert_eq!((no_exec(&walker, 0), no_exec(&privileged, 0)), (true, true));
    }

    #[test]
    fn the_attribute_index_selects_a_byte_of_mair() {
        let (walker, image) = three_levels();
        // AttrIndx 0, 2 and 7 instead of 1; SH non-shareable and outer shareable.
        set(&image, &[(0x3000, 0x8443), (0x3008, 0x864b), (0x3010, 0x875f)]);
        let plain = read(&walker, &image, 0).unwrap();
        assert_eq!((plain.attributes, plain.shareability), (0x44, Shareability::NonShareable));
        assert_eq!(plain.prot, Prot::READ_WRITE);
        let device = read(&walker, &image, 0x1000).unwrap();
        assert_eq!((device.attributes, device.shareability), (0x04, Shareability::Outer));
        assert_eq!(device.prot, Prot::READ_WRITE | Prot::MMIO);
        assert_eq!(read(&walker, &image, 0x2000).unwrap().attributes, 0);
    }

    #[test]
    fn a_clear_access_flag_faults_unless_hardware_sets_it() {
        let (walker, image) = three_levels();
        set(&image, &[(0x3000, 0x8347)]);
        assert_eq!(read(&walker, &image, 0), Err((FaultKind::AccessFlag, 3)));
        // HA is bit 39.
        let setting = super::walker(0x1000, TCR_4K_39 | 1 << 39);
        let update = read(&setting, &image, 0).unwrap().update.unwrap();
        assert_eq!((update.entry_paddr.get(), update.old, update.new), (0x3000, 0x8347, 0x8747));
    }

    #[test]
    fn the_first_write_of_a_writable_clean_page_clears_its_read_only_bit() {
        let (plain, image) = three_levels();
        // DBM is bit 51; AP[2] = 1 says clean.
        let clean = 1 << 51 | 0x87c7;
        set(&image, &[(0x3000, clean)]);
        assert_eq!(write(&plain, &image, 0), Err((FaultKind::Permission, 3)));
        // HD, bit 40, needs HA.
        let without_flag = walker(0x1000, TCR_4K_39 | 1 << 40);
        assert_eq!(write(&without_flag, &image, 0), Err((FaultKind::Permission, 3)));
        let tracking = walker(0x1000, TCR_4K_39 | 3 << 39);
        let reading = read(&tracking, &image, 0).unwrap();
        assert_eq!((reading.clean, reading.update), (true, None));
        let update = write(&tracking, &image, 0).unwrap().update.unwrap();
        assert_eq!((update.old, update.new), (clean, 1 << 51 | 0x8747));
        // Read-only without DBM stays read-only.
        set(&image, &[(0x3000, 0x87c7)]);
        assert_eq!(write(&tracking, &image, 0), Err((FaultKind::Permission, 3)));
    }
}

mod checks {
    use super::*;

    /// Sixteen pages of 4K as one group of 64K at iova 64K, output 0x4_0000. Bit 52 is Contiguous.
    fn group() -> (ArmLpaeS1Walker, TableImage) {
        let (walker, image) = three_levels();
        for index in 0..16 {
            let entry = 1 << 52 | 0x4_0747 | index << 12;
            set(&image, &[(0x3000 + (16 + index) * 8, entry)]);
        }
        (walker, image)
    }

    #[test]
    fn a_contiguous_group_is_reported_beside_the_leaf() {
        let (walker, image) = group();
        let leaf = read(&walker, &image, 0x1_5678).unwrap();
        assert_eq!((leaf.leaf, leaf.leaf_lg2), (block(0x1_5000, 12), 12));
        assert_eq!((leaf.group, leaf.group_lg2), (block(0x1_0000, 16), 16));
        assert_eq!(leaf.paddr, PhysAddr::new(0x4_5678));
        let checked = walker.check_contiguous_group(&image, Iova::new(0x1_5678));
        assert_eq!(checked, Ok(Some(leaf.group)));
        assert_eq!(walker.census(&image, walker.input_range()).unwrap(), [(16, 1)].into());
    }

    #[test]
    fn group_sizes_follow_granule_and_level() {
        let sizes = |tcr| {
            let walker = walker(0, tcr);
            [1, 2, 3].map(|level| walker.group_lg2(level))
        };
        assert_eq!(sizes(IPS_48 | 16), [Some(34), Some(25), Some(16)]);
        assert_eq!(sizes(IPS_48 | 0x8000 | 16), [None, Some(30), Some(21)]);
        assert_eq!(sizes(IPS_48 | 0x4000 | 16), [None, Some(34), Some(21)]);
    }

    #[test]
    fn every_disagreement_in_a_group_is_found() {
        // Another output, other permissions, no Contiguous bit, an invalid entry.
        for wrong in [1 << 52 | 0x9_9747, 1 << 52 | 0x4_77c7, 0x4_7747, 0] {
            let (walker, image) = group();
            set(&image, &[(0x3000 + 23 * 8, wrong)]);
            let checked = walker.check_contiguous_group(&image, Iova::new(0x1_0000));
            let Err(BadTable::Group { entry_paddr, entry, expected, .. }) = checked else {
                panic!("{wrong:#x} passed: {checked:?}");
            };
            assert_eq!((entry_paddr.get(), entry), (0x3000 + 23 * 8, wrong));
            assert_eq!(expected, 1 << 52 | 0x4_7747);
            assert!(walker.survey(&image, walker.input_range(), |_| ()).is_err());
        }
    }

    #[test]
    fn a_leaf_without_the_bit_among_leaves_with_it_is_found_from_itself() {
        let (walker, image) = group();
        set(&image, &[(0x3000 + 16 * 8, 0x4_0747)]);
        assert!(walker.check_contiguous_group(&image, Iova::new(0x1_0000)).is_err());
        // Pages that merely follow each other are no group.
        let (walker, image) = three_levels();
        set(&image, &[(0x3000, 0x4_0747), (0x3008, 0x4_1747)]);
        assert_eq!(walker.check_contiguous_group(&image, Iova::new(0)), Ok(None));
    }

    #[test]
    fn a_group_at_a_misaligned_output_is_found() {
        let (walker, image) = three_levels();
        for index in 0..16 {
            set(&image, &[(0x3000 + index * 8, 1 << 52 | (0x4_1747 + (index << 12)))]);
        }
        let checked = walker.check_contiguous_group(&image, Iova::new(0));
        assert!(matches!(checked, Err(BadTable::GroupAlignment { .. })), "{checked:?}");
    }

    #[test]
    fn hardware_updates_do_not_make_a_group_disagree() {
        let (_, image) = group();
        let tracking = walker(0x1000, TCR_4K_39 | 3 << 39);
        for index in 0..16 {
            // DBM with AP[2] clear, as the first write leaves it, in every other page.
            let clean = (index & 1) << 7;
            let entry = 1 << 52 | 1 << 51 | 0x4_0747 | index << 12 | clean;
            set(&image, &[(0x3000 + (16 + index) * 8, entry)]);
        }
        let group = block(0x1_0000, 16);
        assert_eq!(tracking.check_contiguous_group(&image, Iova::new(0x1_0000)), Ok(Some(group)));
        let plain = walker(0x1000, TCR_4K_39);
        assert!(plain.check_contiguous_group(&image, Iova::new(0x1_0000)).is_err());
    }

    fn reserved_bits(walker: &ArmLpaeS1Walker, image: &TableImage, iova: u64) -> u64 {
        match walker.strict_walk(image, Iova::new(iova)) {
            Ok(_) => 0,
            Err(BadTable::Reserved { bits, .. }) => bits,
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn res0_bits_are_found_in_tables_pages_and_blocks() {
        let (walker, image) = three_levels();
        set(&image, &[(0x3000, 0x8747), (0x2008, 0x20_0745)]);
        assert_eq!(reserved_bits(&walker, &image, 0), 0);
        // Ignored bits: of a table 11:2 and 58:51, of a leaf 58:55 and 63:59.
        set(&image, &[(0x2000, 0xff << 51 | 0x3fff), (0x3000, 0x1ff << 55 | 0x8747)]);
        assert_eq!(reserved_bits(&walker, &image, 0), 0);
        // A hardware walk takes no offence.
        set(&image, &[(0x3000, 1 << 48 | 0x8747)]);
        assert!(read(&walker, &image, 0).is_ok());
        assert_eq!(reserved_bits(&walker, &image, 0), 1 << 48);
        set(&image, &[(0x3000, 0x8747), (0x1000, 1 << 50 | 0x2003)]);
        assert_eq!(reserved_bits(&walker, &image, 0), 1 << 50);
        // A 2M block at an address that is only aligned to 64K, and with bit 16.
        set(&image, &[(0x1000, 0x2003), (0x2008, 0x23_0745)]);
        assert_eq!(reserved_bits(&walker, &image, 0x20_0000), 0x3_0000);
    }

    #[test]
    fn res0_bits_of_16k_and_64k_follow_the_granule() {
        let large = walker(0x8000, IPS_48 | 0x8000 | 28);
        let image = tables(0x4000, &[0x8000, 0xc000]);
        set(&image, &[(0x8000, 0xd003), (0xc000, 0x1_0747)]);
        assert_eq!(reserved_bits(&large, &image, 0), 0x1000);
        set(&image, &[(0x8000, 0xc003), (0xc000, 0x1_2747)]);
        assert_eq!(reserved_bits(&large, &image, 0), 0x2000);
        let larger = walker(0x1_0000, 6 << 32 | 0x4000 | 22);
        let image = tables(0x1_0000, &[0x1_0000]);
        // Bits 15:12 are address bits; bit 20 of a 512M block is not.
        set(&image, &[(0x1_0000, 0x4000_f745), (0x1_0008, 0x4010_0745)]);
        assert_eq!(reserved_bits(&larger, &image, 0), 0);
        assert_eq!(reserved_bits(&larger, &image, 0x2000_0000), 0x10_0000);
    }

    #[test]
    fn the_reserved_shareability_is_found() {
        let (walker, image) = three_levels();
        set(&image, &[(0x3000, 0x8547)]);
        assert_eq!(read(&walker, &image, 0).unwrap().shareability, Shareability::Reserved);
        let strict = walker.strict_walk(&image, Iova::new(0));
        assert!(matches!(strict, Err(BadTable::ReservedValue { field: "SH", .. })), "{strict:?}");
    }

    #[test]
    fn a_survey_visits_every_leaf_in_order_and_passes_over_holes() {
        let (walker, image) = group();
        set(&image, &[(0x3000, 0x8747), (0x3ff8, 0x9747), (0x2ff8, 0x20_0745)]);
        set(&image, &[(0x1ff8, 0x4000_0745)]);
        let mut leaves = Vec::new();
        walker.survey(&image, walker.input_range(), |leaf| leaves.push(leaf.leaf)).unwrap();
        let mut expected: Vec<_> =
            (0..16).map(|page| block(0x1_0000 + page * 0x1000, 12)).collect();
        expected.insert(0, block(0, 12));
        expected.extend([block(0x1f_f000, 12), block(511 << 21, 21), block(511 << 30, 30)]);
        assert_eq!(leaves, expected);
        let census = walker.census(&image, walker.input_range()).unwrap();
        assert_eq!(census, [(12, 2), (16, 1), (21, 1), (30, 1)].into());
    }

    #[test]
    fn a_survey_ends_at_a_table_that_was_freed() {
        let (walker, image) = three_levels();
        image.free_table(PhysAddr::new(0x3000));
        let survey = walker.survey(&image, walker.input_range(), |_| ());
        assert!(matches!(survey, Err(BadTable::Fault(_))), "{survey:?}");
        image.free_table(PhysAddr::new(0x1000));
        assert!(walker.survey(&image, walker.input_range(), |_| ()).is_err());
    }
}

mod registers {
    use super::*;

    fn bad(ttbr: u64, tcr: u64, half: AddressHalf) -> BadLpaeRegisters {
        let registers = ArmS1WalkRegisters { ttbr, tcr, mair: MAIR, half, ..Default::default() };
        ArmLpaeS1Walker::new(registers).unwrap_err()
    }

    #[test]
    fn reserved_values_are_refused() {
        let granule = bad(0x1000, IPS_48 | 0xc000 | 25, AddressHalf::Lower);
        assert!(matches!(granule, BadLpaeRegisters::Granule { .. }));
        // TG1 = 0b00 is reserved, though TG0 = 0b00 is 4K.
        let granule = bad(0x1000, IPS_48 | 25 << 16, AddressHalf::Upper);
        assert!(matches!(granule, BadLpaeRegisters::Granule { .. }));
        let size = bad(0x1000, 7 << 32 | 25, AddressHalf::Lower);
        assert!(matches!(size, BadLpaeRegisters::OutputSize { .. }));
        let input = bad(0x1000, IPS_48 | 15, AddressHalf::Lower);
        assert_eq!(input, BadLpaeRegisters::InputSize { txsz: 15, min: 16, max: 48 });
        let input = bad(0x1000, IPS_48 | 49, AddressHalf::Lower);
        assert_eq!(input, BadLpaeRegisters::InputSize { txsz: 49, min: 16, max: 48 });
        for number in [37, 38, 59] {
            let unsupported = bad(0x1000, TCR_4K_39 | 1 << number, AddressHalf::Lower);
            assert!(matches!(unsupported, BadLpaeRegisters::Unsupported { .. }), "bit {number}");
        }
    }

    #[test]
    fn the_base_is_aligned_to_the_root_table() {
        assert!(matches!(
            bad(0x1800, TCR_4K_39, AddressHalf::Lower),
            BadLpaeRegisters::Base { .. }
        ));
        // T0SZ = 32: four entries at level 1, which still need 64 bytes.
        let base = bad(0x1020, IPS_48 | 32, AddressHalf::Lower);
        assert_eq!(base, BadLpaeRegisters::Base { ttbr: 0x1020, align_lg2: 6 });
        assert_eq!(walker(0x1040, IPS_48 | 32).start_level(), 1);
        // The ASID in bits 63:48 and CnP in bit 0 are no address.
        let image = tables(4096, &[0x1000]);
        set(&image, &[(0x1000, 0x745)]);
        assert!(read(&walker(0xabcd_0000_0000_1001, TCR_4K_39), &image, 0).is_ok());
    }

    #[test]
    fn the_output_size_is_52_bits_with_the_64k_granule_only() {
        let image = tables(4096, &[0x1000]);
        set(&image, &[(0x1000, 0x8000_0000_0745)]);
        let walker = walker(0x1000, 6 << 32 | 25);
        assert_eq!(walker.config.output_lg2, 48);
        assert_eq!(read(&walker, &image, 0).unwrap().paddr, PhysAddr::new(0x8000_0000_0000));
    }

    #[test]
    fn start_levels_are_those_of_the_manual() {
        let level = |tg0: u64, txsz: u64| walker(0, IPS_48 | tg0 << 14 | txsz).start_level();
        // 4K: 48..40 bits, 39..31, 30..22, 21..16.
        let four_k = [16, 24, 25, 33, 34, 42, 43, 48].map(|txsz| level(0b00, txsz));
        assert_eq!(four_k, [0, 0, 1, 1, 2, 2, 3, 3]);
        // 16K: 48 bits, 47..37, 36..26, 25..16.
        let sixteen_k = [16, 17, 27, 28, 38, 39, 48].map(|txsz| level(0b10, txsz));
        assert_eq!(sixteen_k, [0, 1, 1, 2, 2, 3, 3]);
        // 64K: 52..43 bits, 42..30, 29..17.
        let sixty_four_k = [12, 21, 22, 34, 35, 47].map(|txsz| level(0b01, txsz));
        assert_eq!(sixty_four_k, [1, 1, 2, 2, 3, 3]);
    }
}
