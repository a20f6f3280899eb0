//! Both stages of AArch32 state. The leaf attributes are those of AArch64.

use super::{block, read, set, tables, write};
use crate::walker::arm_lpae::*;
use crate::walker::{BadTable, Checked as _, FaultKind, TableImage};

/// TTBCR.EAE.
const EAE: u32 = 1 << 31;
/// Attribute 1 is write-back, attribute 5 device nGnRE.
const MAIR: [u32; 2] = [0xff00, 0x0400];

fn registers(ttbr: u64, ttbcr: u32, half: AddressHalf) -> Arm32S1Registers {
    Arm32S1Registers { ttbr, ttbcr: EAE | ttbcr, mair: MAIR, half, ..Default::default() }
}

fn lower(ttbr: u64, ttbcr: u32) -> Arm32LpaeS1Walker {
    Arm32LpaeS1Walker::new(registers(ttbr, ttbcr, AddressHalf::Lower)).unwrap()
}

fn upper(ttbr: u64, ttbcr: u32) -> Arm32LpaeS1Walker {
    Arm32LpaeS1Walker::new(registers(ttbr, ttbcr, AddressHalf::Upper)).unwrap()
}

fn second(vttbr: u64, vtcr: u32) -> Result<Arm32LpaeS2Walker, BadLpaeRegisters> {
    Arm32LpaeS2Walker::new(Arm32S2Registers { vttbr, vtcr })
}

/// A root of four entries at 0x1020, and tables of level 2 and 3 for the first 1G and 2M.
fn three_levels() -> TableImage {
    let image = tables(4096, &[0x1000, 0x2000, 0x3000]);
    set(&image, &[(0x1020, 0x2003), (0x2000, 0x3003)]);
    image
}

#[test]
fn all_32_bits_need_a_root_of_four_entries_aligned_to_its_size() {
    let (walker, image) = (lower(0x1020, 0), three_levels());
    // Entry 3: a block of 1G at the 40-bit address 0xff_c000_0000.
    set(&image, &[(0x1038, 0xff_c000_0745), (0x2ff8, 0x60_0745), (0x3008, 0x8747)]);
    let gig = read(&walker, &image, 0xffff_ffff).unwrap();
    assert_eq!((gig.paddr.get(), gig.leaf, gig.level), (0xff_ffff_ffff, block(3 << 30, 30), 1));
    let two_meg = read(&walker, &image, 0x3fe0_1234).unwrap();
    assert_eq!((two_meg.paddr.get(), two_meg.leaf_lg2, two_meg.level), (0x60_1234, 21, 2));
    let page = write(&walker, &image, 0x1567).unwrap();
    assert_eq!((page.paddr.get(), page.leaf_lg2, page.level), (0x8567, 12, 3));
    assert_eq!(page.prot, Prot::READ_WRITE | Prot::CACHE);
    assert_eq!(read(&walker, &image, 1 << 32), Err((FaultKind::Translation, 1)));
    assert_eq!(read(&walker, &image, 0), Err((FaultKind::Translation, 3)));
    let base = Arm32LpaeS1Walker::new(registers(0x1010, 0, AddressHalf::Lower)).unwrap_err();
    assert_eq!(base, BadLpaeRegisters::Base { ttbr: 0x1010, align_lg2: 5 });
}

#[test]
fn small_input_sizes_start_at_level_2() {
    // T0SZ = 1: 31 bits, two entries at level 1.
    assert_eq!(lower(0x1010, 1).start_level(), 1);
    // T0SZ = 2: 30 bits, a whole table. T0SZ = 7: 25 bits, 16 entries.
    assert_eq!(lower(0x1000, 2).start_level(), 2);
    let walker = lower(0x1080, 7);
    let image = tables(4096, &[0x1000]);
    set(&image, &[(0x1080 + 15 * 8, 0x20_0745)]);
    let last = read(&walker, &image, 0x1ff_ffff).unwrap();
    assert_eq!((last.paddr.get(), last.level), (0x3f_ffff, 2));
    assert_eq!(read(&walker, &image, 0x200_0000), Err((FaultKind::Translation, 1)));
    let base = Arm32LpaeS1Walker::new(registers(0x1040, 7, AddressHalf::Lower)).unwrap_err();
    assert_eq!(base, BadLpaeRegisters::Base { ttbr: 0x1040, align_lg2: 7 });
}

#[test]
fn a_half_of_size_0_gets_what_the_other_leaves() {
    let ranges = |t0sz, t1sz: u32| {
        let ttbcr = t1sz << 16 | t0sz;
        [lower(0, ttbcr), upper(0, ttbcr)].map(|walker| {
            let range = walker.input_range();
            (range.start().get(), range.last().get())
        })
    };
    assert_eq!(ranges(0, 1), [(0, 0x7fff_ffff), (0x8000_0000, 0xffff_ffff)]);
    assert_eq!(ranges(0, 3), [(0, 0xdfff_ffff), (0xe000_0000, 0xffff_ffff)]);
    assert_eq!(ranges(2, 0), [(0, 0x3fff_ffff), (0x4000_0000, 0xffff_ffff)]);
    assert_eq!(ranges(2, 2), [(0, 0x3fff_ffff), (0xc000_0000, 0xffff_ffff)]);
    // Both 0: TTBR0 has everything.
    let nothing = Arm32LpaeS1Walker::new(registers(0, 0, AddressHalf::Upper)).unwrap_err();
    assert!(matches!(nothing, BadLpaeRegisters::Reserved { field: "T1SZ", .. }));
}

#[test]
fn ttbr1_indexes_by_its_own_size() {
    // T0SZ = 2, T1SZ = 0: a root of four entries, the first of which is never used.
    let walker = upper(0x1020, 2);
    let image = three_levels();
    set(&image, &[(0x1028, 0x4000_0745)]);
    assert_eq!(read(&walker, &image, 0x4000_0010).unwrap().paddr, PhysAddr::new(0x4000_0010));
    assert_eq!(read(&walker, &image, 0), Err((FaultKind::Translation, 1)));
    // T1SZ = 2: the last 1G from level 2, whose entry 511 is for the last 2M.
    let walker = upper(0x2000, 2 << 16);
    set(&image, &[(0x2ff8, 0x60_0745)]);
    let last = read(&walker, &image, 0xffff_ffff).unwrap();
    assert_eq!((last.paddr.get(), last.level), (0x7f_ffff, 2));
}

#[test]
fn disabled_walks_fault_at_level_1() {
    let image = three_levels();
    set(&image, &[(0x3000, 0x8747)]);
    assert!(read(&lower(0x1020, 0), &image, 0).is_ok());
    // EPD0 is bit 7, EPD1 bit 23.
    assert_eq!(read(&lower(0x1020, 1 << 7), &image, 0), Err((FaultKind::Translation, 1)));
    assert!(read(&lower(0x1020, 1 << 23), &image, 0).is_ok());
    let disabled = upper(0x2000, 2 << 16 | 1 << 23);
    assert_eq!(read(&disabled, &image, 0xffff_ffff), Err((FaultKind::Translation, 1)));
}

#[test]
fn short_tables_are_refused() {
    let short = Arm32S1Registers { ttbcr: 0, ..registers(0, 0, AddressHalf::Lower) };
    let refused = Arm32LpaeS1Walker::new(short).unwrap_err();
    assert!(matches!(refused, BadLpaeRegisters::Unsupported { field: "EAE = 0", .. }));
}

#[test]
fn addresses_have_40_bits() {
    let (walker, image) = (lower(0x1020, 0), three_levels());
    set(&image, &[(0x3000, 0x100_0000_0747)]);
    assert_eq!(read(&walker, &image, 0), Err((FaultKind::AddressSize, 3)));
    set(&image, &[(0x2000, 0x100_0000_3003)]);
    assert_eq!(read(&walker, &image, 0), Err((FaultKind::AddressSize, 2)));
    let base = lower(0x100_0000_1020, 0);
    assert_eq!(read(&base, &image, 0), Err((FaultKind::AddressSize, 0)));
}

#[test]
fn permissions_of_tables_and_pages_are_those_of_stage_1() {
    let (walker, image) = (lower(0x1020, 0), three_levels());
    // Read-only (0x80), privileged (no 0x40), attribute 5 (0x14), no access flag (0x400).
    set(&image, &[(0x3000, 0x87c7), (0x3008, 0x8707), (0x3010, 0x8757), (0x3018, 0x8347)]);
    assert_eq!(write(&walker, &image, 0), Err((FaultKind::Permission, 3)));
    assert_eq!(read(&walker, &image, 0x1000), Err((FaultKind::Permission, 3)));
    let device = write(&walker, &image, 0x2000).unwrap();
    assert_eq!((device.attributes, device.prot), (0x04, Prot::READ_WRITE | Prot::MMIO));
    assert_eq!(read(&walker, &image, 0x3000), Err((FaultKind::AccessFlag, 3)));
    // APTable[1] of the root, bit 62.
    set(&image, &[(0x1020, 1 << 62 | 0x2003)]);
    assert_eq!(write(&walker, &image, 0x2000), Err((FaultKind::Permission, 3)));
}

#[test]
fn xn_is_for_everybody_and_pxn_for_the_privileged() {
    let image = three_levels();
    // XN is bit 54, PXN bit 53.
    set(&image, &[(0x3000, 1 << 54 | 0x8747), (0x3008, 1 << 53 | 0x8747), (0x3010, 0x8747)]);
    let no_exec = |privilege| {
        let registers = Arm32S1Registers { privilege, ..registers(0x1020, 0, AddressHalf::Lower) };
        let walker = Arm32LpaeS1Walker::new(registers).unwrap();
        [0, 1, 2].map(|page| read(&walker, &image, page << 12).unwrap().prot.contains(Prot::NOEXEC))
    };
    assert_eq!(no_exec(AccessPrivilege::Unprivileged), [true, false, false]);
    assert_eq!(no_exec(AccessPrivilege::Privileged), [true, true, false]);
}

#[test]
fn there_is_no_dirty_bit_modifier() {
    let (walker, image) = (lower(0x1020, 0), three_levels());
    set(&image, &[(0x3000, 1 << 51 | 0x87c7)]);
    assert_eq!(write(&walker, &image, 0), Err((FaultKind::Permission, 3)));
    let strict = walker.strict_walk(&image, Iova::new(0)).unwrap_err();
    assert!(matches!(strict, BadTable::Reserved { bits, .. } if bits == 1 << 51), "{strict}");
}

#[test]
fn sixteen_pages_are_a_contiguous_group() {
    let (walker, image) = (lower(0x1020, 0), three_levels());
    for index in 0..16 {
        set(&image, &[(0x3000 + index * 8, 1 << 52 | 0x4_0747 | index << 12)]);
    }
    let checked = walker.check_contiguous_group(&image, Iova::new(0x5000));
    assert_eq!(checked, Ok(Some(block(0, 16))));
    set(&image, &[(0x3010, 0x4_2747)]);
    let unequal = walker.check_contiguous_group(&image, Iova::new(0x5000));
    assert!(matches!(unequal, Err(BadTable::Group { .. })), "{unequal:?}");
}

#[test]
fn stage_2_has_signed_sizes_and_concatenated_roots() {
    // T0SZ = -8 with S, SL0 = 0b01: 40 bits from level 1, two tables.
    let walker = second(0x2000, 1 << 6 | 0x18).unwrap();
    assert_eq!((walker.input_range(), walker.start_level()), (block(0, 40), 1));
    let image = tables(0x2000, &[0x2000]);
    set(&image, &[(0x2000 + 1023 * 8, 0xff_c000_07fd)]);
    let last = read(&walker, &image, 0xff_ffff_ffff).unwrap();
    assert_eq!((last.paddr.get(), last.leaf_lg2), (0xff_ffff_ffff, 30));
    assert_eq!(read(&walker, &image, 1 << 40), Err((FaultKind::Translation, 1)));
    // T0SZ = -2, SL0 = 0b00: 34 bits from level 2, sixteen tables.
    let walker = second(0x1_0000, 0x1e).unwrap();
    assert_eq!((walker.input_range(), walker.start_level()), (block(0, 34), 2));
    let image = tables(0x1_0000, &[0x1_0000]);
    set(&image, &[(0x1_0000 + 8191 * 8, 0x7bd)]);
    assert_eq!(write(&walker, &image, (1 << 34) - 1).unwrap().prot, Prot::WRITE | Prot::CACHE);
    // T0SZ = 7: 25 bits, 16 entries of level 2.
    let walker = second(0x80, 7).unwrap();
    assert_eq!((walker.input_range(), walker.start_level()), (block(0, 25), 2));
}

#[test]
fn reserved_stage_2_registers_are_refused() {
    // S without the sign and the sign without S.
    for vtcr in [0x10, 0x08] {
        let refused = second(0, vtcr).unwrap_err();
        assert!(matches!(refused, BadLpaeRegisters::Reserved { field: "S", .. }));
    }
    // SL0 = 0b10; 35 bits from level 2; 30 bits from level 1.
    for vtcr in [2 << 6, 0x1d, 1 << 6 | 2] {
        assert!(matches!(second(0, vtcr).unwrap_err(), BadLpaeRegisters::StartLevel { .. }));
    }
    let base = BadLpaeRegisters::Base { ttbr: 0x1000, align_lg2: 13 };
    assert_eq!(second(0x1000, 1 << 6 | 0x18).unwrap_err(), base);
}
