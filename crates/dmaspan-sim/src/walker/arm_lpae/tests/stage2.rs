//! Stage 2 of AArch64 state.
//!
//! The leaf attributes (DDI 0487, D8.3.1): MemAttr 0b1111, write-back, is 0x3c, S2AP 0b01 (read)
//! 0x40 and 0b10 (write) 0x80, SH inner 0x300, AF 0x400. So 0x7ff is a page to read and write,
//! 0x77f one to read, 0x7bf one to write, 0x7fd a block.

use super::{block, read, set, tables, write};
use crate::walker::arm_lpae::*;
use crate::walker::{BadTable, Checked as _, FaultKind, TableImage};

/// PS = 0b101, 48 bits.
const PS_48: u64 = 5 << 16;
/// 4K, T0SZ = 25, SL0 = 0b01: 39 bits from level 1.
const VTCR_4K_39: u64 = PS_48 | 1 << 6 | 25;
const HA: u64 = 1 << 21;
const HD: u64 = 1 << 22;

fn registers(vttbr: u64, vtcr: u64) -> ArmS2WalkRegisters {
    ArmS2WalkRegisters { vttbr, vtcr, ..Default::default() }
}

fn walker(vttbr: u64, vtcr: u64) -> ArmLpaeS2Walker {
    ArmLpaeS2Walker::new(registers(vttbr, vtcr)).unwrap()
}

/// Three levels of 4K tables: the table of level 2 is for 0..1G, that of level 3 for 0..2M.
fn three_levels() -> (ArmLpaeS2Walker, TableImage) {
    let image = tables(4096, &[0x1000, 0x2000, 0x3000]);
    set(&image, &[(0x1000, 0x2003), (0x2000, 0x3003)]);
    (walker(0x1000, VTCR_4K_39), image)
}

#[test]
fn sl0_says_the_start_level_of_each_granule() {
    // TG0, SL0, T0SZ; the start level and log2 of what an entry of the root covers.
    let cases = [
        (0b00, 0b10, 16, 0, 39),
        (0b00, 0b01, 25, 1, 30),
        (0b00, 0b00, 34, 2, 21),
        (0b00, 0b11, 43, 3, 12),
        (0b10, 0b10, 17, 1, 36),
        (0b10, 0b01, 28, 2, 25),
        (0b10, 0b00, 39, 3, 14),
        (0b01, 0b10, 16, 1, 42),
        (0b01, 0b01, 22, 2, 29),
        (0b01, 0b00, 35, 3, 16),
    ];
    for (tg0, sl0, t0sz, level, entry_lg2) in cases {
        let walker = walker(1 << 20, PS_48 | tg0 << 14 | sl0 << 6 | t0sz);
        assert_eq!(walker.start_level(), level);
        assert_eq!(walker.input_range(), block(0, u32::try_from(64 - t0sz).unwrap()));
        let image = tables(0x1_0000, &[1 << 20, 2 << 20, 3 << 20, 4 << 20]);
        // Entry 1 of the root, entry 0 of every table below.
        let tables_below = u64::from(3 - level);
        for depth in 0..=tables_below {
            let entry = if depth == tables_below { 0xab_0000_07ff } else { (depth + 2) << 20 | 3 };
            let index = u64::from(depth == 0);
            set(&image, &[(((depth + 1) << 20) + index * 8, entry)]);
        }
        let page = write(&walker, &image, (1 << entry_lg2) + 0x123).unwrap();
        assert_eq!((page.paddr, page.level), (PhysAddr::new(0xab_0000_0123), 3));
        assert_eq!(read(&walker, &image, 0), Err((FaultKind::Translation, level)));
    }
}

#[test]
fn a_root_is_up_to_sixteen_tables_one_behind_the_other() {
    // 4K, level 1: 40 bits are two tables and 43 bits sixteen.
    for (t0sz, entries) in [(24, 1024), (21, 8192)] {
        let walker = walker(0x10_0000, PS_48 | 1 << 6 | t0sz);
        let image = TableImage::new();
        image.add_table(PhysAddr::new(0x10_0000), entries);
        let last = (entries as u64 - 1) << 30;
        set(&image, &[(0x10_0000 + (entries as u64 - 1) * 8, 0x40_0000_07fd)]);
        let leaf = read(&walker, &image, last + 0x1234).unwrap();
        assert_eq!((leaf.paddr.get(), leaf.leaf), (0x40_0000_1234, block(last, 30)));
        let beyond = read(&walker, &image, last + (1 << 30));
        assert_eq!(beyond, Err((FaultKind::Translation, 0)));
    }
    // 16K, level 1: 48 bits are two tables of 2048 entries. Entry 2048 has a table below.
    let large = walker(0x8000, PS_48 | 2 << 14 | 2 << 6 | 16);
    let image = tables(0x8000, &[0x8000, 0x1_0000]);
    set(&image, &[(0x8000 + 2048 * 8, 0x1_0003), (0x1_0000, 0x7fd)]);
    assert_eq!(read(&large, &image, 1 << 47).unwrap().leaf, block(1 << 47, 25));
    // 64K, level 3: 33 bits are sixteen tables of 8192 pages.
    let larger = walker(0x10_0000, PS_48 | 1 << 14 | 31);
    let image = tables(0x10_0000, &[0x10_0000]);
    set(&image, &[(0x1f_fff8, 0x5_07ff)]);
    assert_eq!(read(&larger, &image, 0x1_ffff_0042).unwrap().paddr, PhysAddr::new(0x5_0042));
}

#[test]
fn start_levels_that_do_not_fit_the_input_size_are_refused() {
    let start_level = |tg0: u64, sl0: u64, t0sz: u64| {
        let vtcr = PS_48 | tg0 << 14 | sl0 << 6 | t0sz;
        match ArmLpaeS2Walker::new(registers(0, vtcr)) {
            Ok(_) => true,
            Err(BadLpaeRegisters::StartLevel { .. }) => false,
            Err(other) => panic!("{other}"),
        }
    };
    // 4K from level 1: 31 to 43 bits. 30 bits would be one entry, 44 bits 32 tables.
    assert_eq!([33, 21, 34, 20].map(|t0sz| start_level(0, 1, t0sz)), [true, true, false, false]);
    // From level 2: 22 to 34 bits.
    assert_eq!([42, 30, 43, 29].map(|t0sz| start_level(0, 0, t0sz)), [true, true, false, false]);
    // 0b11 is reserved with 16K and 64K.
    assert_eq!([start_level(2, 3, 20), start_level(1, 3, 20)], [false, false]);
}

#[test]
fn reserved_registers_and_misaligned_roots_are_refused() {
    let bad = |vttbr, vtcr| ArmLpaeS2Walker::new(registers(vttbr, vtcr)).unwrap_err();
    assert!(matches!(bad(0, VTCR_4K_39 | 3 << 14), BadLpaeRegisters::Granule { .. }));
    assert!(matches!(bad(0, VTCR_4K_39 | 7 << 16), BadLpaeRegisters::OutputSize { .. }));
    for number in [32, 33] {
        assert!(matches!(bad(0, VTCR_4K_39 | 1 << number), BadLpaeRegisters::Unsupported { .. }));
    }
    let input = BadLpaeRegisters::InputSize { txsz: 15, min: 16, max: 48 };
    assert_eq!(bad(0, PS_48 | 2 << 6 | 15), input);
    // Two tables of 4K are aligned to 8K.
    let base = BadLpaeRegisters::Base { ttbr: 0x1000, align_lg2: 13 };
    assert_eq!(bad(0x1000, PS_48 | 1 << 6 | 24), base);
    // The VMID in bits 63:48 and CnP in bit 0 are no address.
    let image = tables(0x2000, &[0x2000]);
    set(&image, &[(0x2000, 0x7fd)]);
    let walker = walker(0xabcd_0000_0000_2001, PS_48 | 1 << 6 | 24);
    assert!(read(&walker, &image, 0).is_ok());
}

#[test]
fn with_64k_and_52_bits_the_upper_address_bits_are_in_15_12_and_in_the_base_register() {
    // PS = 0b110, TG0 = 0b01, SL0 = 0b01 (level 2), T0SZ = 22.
    let walker = walker(0x1_0000 | 0xf << 2, 6 << 16 | 1 << 14 | 1 << 6 | 22);
    let image = tables(0x1_0000, &[0xf_0000_0001_0000, 0xe_0000_0002_0000]);
    set(&image, &[(0xf_0000_0001_0000, 0x2_e003), (0xe_0000_0002_0000, 0xabcd_57ff)]);
    let page = read(&walker, &image, 0x1234).unwrap();
    assert_eq!(page.paddr, PhysAddr::new(0x5_0000_abcd_1234));
}

#[test]
fn pages_can_be_read_only_write_only_both_or_neither() {
    let (walker, image) = three_levels();
    set(&image, &[(0x3000, 0x87ff), (0x3008, 0x877f), (0x3010, 0x87bf), (0x3018, 0x873f)]);
    let denied = Err((FaultKind::Permission, 3));
    assert_eq!(write(&walker, &image, 0).unwrap().prot, Prot::READ_WRITE | Prot::CACHE);
    assert_eq!(read(&walker, &image, 0x1000).unwrap().prot, Prot::READ | Prot::CACHE);
    assert_eq!(write(&walker, &image, 0x1000), denied);
    assert_eq!(write(&walker, &image, 0x2000).unwrap().prot, Prot::WRITE | Prot::CACHE);
    assert_eq!(read(&walker, &image, 0x2000), denied);
    assert_eq!((read(&walker, &image, 0x3000), write(&walker, &image, 0x3000)), (denied, denied));
}

#[test]
fn tables_take_no_permissions_away() {
    let (walker, image) = three_levels();
    // What would be APTable and XNTable of stage 1 is RES0.
    set(&image, &[(0x1000, 0x7800_0000_0000_2003), (0x3000, 0x87ff)]);
    assert!(write(&walker, &image, 0).is_ok());
    let strict = walker.strict_walk(&image, Iova::new(0)).unwrap_err();
    assert!(matches!(strict, BadTable::Reserved { bits: 0x7800_0000_0000_0000, level: 1, .. }));
}

#[test]
fn hardware_sets_the_access_flag_where_it_is_told_to() {
    let (plain, image) = three_levels();
    set(&image, &[(0x3000, 0x83ff)]);
    assert_eq!(read(&plain, &image, 0), Err((FaultKind::AccessFlag, 3)));
    let setting = walker(0x1000, VTCR_4K_39 | HA);
    let update = read(&setting, &image, 0).unwrap().update.unwrap();
    assert_eq!((update.entry_paddr.get(), update.old, update.new), (0x3000, 0x83ff, 0x87ff));
}

#[test]
fn the_first_write_of_a_writable_clean_page_sets_its_write_bit() {
    let (plain, image) = three_levels();
    // DBM is bit 51; S2AP[1] = 0 says clean. Page 1 has neither bit of S2AP: it is for writes.
    let clean = 1 << 51 | 0x877f;
    set(&image, &[(0x3000, clean), (0x3008, 1 << 51 | 0x873f), (0x3010, 0x877f)]);
    assert_eq!(write(&plain, &image, 0), Err((FaultKind::Permission, 3)));
    let without_flag = walker(0x1000, VTCR_4K_39 | HD);
    assert_eq!(write(&without_flag, &image, 0), Err((FaultKind::Permission, 3)));
    let tracking = walker(0x1000, VTCR_4K_39 | HA | HD);
    let reading = read(&tracking, &image, 0).unwrap();
    assert_eq!((reading.clean, reading.update), (true, None));
    let update = write(&tracking, &image, 0).unwrap().update.unwrap();
    assert_eq!((update.old, update.new), (clean, 1 << 51 | 0x87ff));
    assert_eq!(read(&tracking, &image, 0x1000), Err((FaultKind::Permission, 3)));
    let update = write(&tracking, &image, 0x1000).unwrap().update.unwrap();
    assert_eq!(update.new, 1 << 51 | 0x87bf);
    // Without DBM it stays read-only, and a dirty page is not written again.
    assert_eq!(write(&tracking, &image, 0x2000), Err((FaultKind::Permission, 3)));
    set(&image, &[(0x3000, 1 << 51 | 0x87ff)]);
    let dirty = write(&tracking, &image, 0).unwrap();
    assert_eq!((dirty.clean, dirty.update), (false, None));
}

/// What MemAttr says in a page, and whether the value is reserved.
fn memory(mem_attr: MemAttr, value: u64) -> (Prot, bool) {
    let (walker, image) = three_levels();
    let registers = ArmS2WalkRegisters { mem_attr, ..*walker.registers() };
    let walker = ArmLpaeS2Walker::new(registers).unwrap();
    set(&image, &[(0x3000, 0x87c3 | value << 2)]);
    let page = read(&walker, &image, 0).unwrap();
    assert_eq!(u64::from(page.attributes), value);
    let reserved = match walker.strict_walk(&image, Iova::new(0)) {
        Ok(_) => false,
        Err(BadTable::ReservedValue { field: "MemAttr", .. }) => true,
        Err(other) => panic!("{other}"),
    };
    (page.prot - Prot::READ_WRITE, reserved)
}

#[test]
fn mem_attr_names_a_type_to_combine_with_stage_1() {
    let of = |value| memory(MemAttr::Combined, value);
    // Device, all four kinds.
    assert!([0b0000, 0b0001, 0b0010, 0b0011].iter().all(|&v| of(v) == (Prot::MMIO, false)));
    // Non-cacheable outside, inside or both.
    assert!([0b0101, 0b1101, 0b0111].iter().all(|&v| of(v) == (Prot::empty(), false)));
    // Write-through and write-back.
    assert!([0b1010, 0b1111, 0b1011].iter().all(|&v| of(v) == (Prot::CACHE, false)));
    assert!([0b0100, 0b1000, 0b1100].iter().all(|&v| of(v).1));
}

#[test]
fn mem_attr_with_fwb_forces_a_type() {
    let of = |value| memory(MemAttr::Forced, value);
    assert_eq!(of(0b001), (Prot::MMIO, false));
    assert!(of(0b100).1);
    assert_eq!(of(0b101), (Prot::empty(), false));
    assert_eq!(of(0b110), (Prot::CACHE, false));
    assert_eq!(of(0b111), (Prot::CACHE, false));
    // MemAttr[3] is RES0: what was write-back without FWB.
    let (walker, image) = three_levels();
    let registers = ArmS2WalkRegisters { mem_attr: MemAttr::Forced, ..*walker.registers() };
    let walker = ArmLpaeS2Walker::new(registers).unwrap();
    set(&image, &[(0x3000, 0x87ff)]);
    let strict = walker.strict_walk(&image, Iova::new(0)).unwrap_err();
    assert!(matches!(strict, BadTable::Reserved { bits: 0x20, .. }), "{strict}");
}

#[test]
fn execute_never_is_one_bit_or_a_field_of_two() {
    let (walker, image) = three_levels();
    for index in 0..4 {
        set(&image, &[(0x3000 + index * 8, index << 53 | 0x87ff)]);
    }
    let no_exec = |execute_never, privilege| {
        let registers = ArmS2WalkRegisters { execute_never, privilege, ..*walker.registers() };
        let walker = ArmLpaeS2Walker::new(registers).unwrap();
        [0, 1, 2, 3].map(|page| {
            let page = read(&walker, &image, page << 12).unwrap();
            page.prot.contains(Prot::NOEXEC)
        })
    };
    let (el0, el1) = (AccessPrivilege::Unprivileged, AccessPrivilege::Privileged);
    assert_eq!(no_exec(ExecuteNever::ForAll, el0), [false, false, true, true]);
    assert_eq!(no_exec(ExecuteNever::ByPrivilege, el0), [false, false, true, true]);
    assert_eq!(no_exec(ExecuteNever::ByPrivilege, el1), [false, true, true, false]);
    // Without FEAT_XNX bit 53 is RES0.
    let strict = walker.strict_walk(&image, Iova::new(0x1000)).unwrap_err();
    assert!(matches!(strict, BadTable::Reserved { bits, .. } if bits == 1 << 53), "{strict}");
}

#[test]
fn res0_bits_of_a_leaf_are_found() {
    let (walker, image) = three_levels();
    // Bits 58:55 are software's and 63:59 ignored.
    set(&image, &[(0x3000, 0x1ff << 55 | 0x87ff)]);
    assert!(walker.strict_walk(&image, Iova::new(0)).is_ok());
    // Nothing is in the place of nG; a 2M block has no bit 12.
    set(&image, &[(0x3008, 1 << 11 | 0x87ff), (0x2008, 0x20_17fd)]);
    for (iova, expected) in [(0x1000, 1 << 11), (0x20_0000, 1 << 12)] {
        let strict = walker.strict_walk(&image, Iova::new(iova)).unwrap_err();
        assert!(matches!(strict, BadTable::Reserved { bits, .. } if bits == expected), "{strict}");
    }
}

#[test]
fn a_contiguous_group_may_differ_in_what_hardware_writes_only() {
    let (plain, image) = three_levels();
    // Sixteen pages at 64K with DBM; every other one was written.
    for index in 0..16 {
        let entry = 1 << 52 | 1 << 51 | 0x4_077f | index << 12 | (index & 1) << 7;
        set(&image, &[(0x3000 + (16 + index) * 8, entry)]);
    }
    let (group, inside) = (block(0x1_0000, 16), Iova::new(0x1_5678));
    let tracking = walker(0x1000, VTCR_4K_39 | HA | HD);
    assert_eq!(tracking.check_contiguous_group(&image, inside), Ok(Some(group)));
    assert_eq!(tracking.census(&image, tracking.input_range()).unwrap(), [(16, 1)].into());
    let unequal = plain.check_contiguous_group(&image, inside);
    assert!(matches!(unequal, Err(BadTable::Group { .. })), "{unequal:?}");
}
