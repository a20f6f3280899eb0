use super::super::check::{self, Made};
use super::*;

const PLAIN: AmdV1Config = AmdV1Config::new(64, 52);

fn configs() -> impl Iterator<Item = AmdV1> {
    let dirty = AmdV1Config { dirty: DirtyTracking::Hardware, ..PLAIN };
    [
        PLAIN,
        AmdV1Config { first_levels: 6, ..PLAIN },
        AmdV1Config::new(32, 32),
        dirty,
        AmdV1Config { encryption_bit: Some(47), ..AmdV1Config::new(64, 43) },
        AmdV1Config { encryption_bit: Some(51), output_bits: 51, ..dirty },
    ]
    .map(|config| AmdV1::new(config).unwrap())
    .into_iter()
}

#[test]
fn every_leaf_decodes_to_what_it_was_made_from() {
    for format in configs() {
        let mut made = 0;
        check::leaves(&format, |Made { level, prot, word }| {
            let granted = format.prot(level, word);
            let mut expressed = Prot::READ_WRITE | Prot::CACHE;
            expressed.set(Prot::MMIO, format.config.encryption_bit.is_some());
            assert_eq!(granted, prot & expressed);
            made += 1;
        });
        // 5 addresses for each of 48 permissions.
        let all = 5 * 48 * format.geometry().page_sizes.count_ones();
        assert!(made == all || cfg!(miri), "{made} of {all}");
    }
}

#[test]
fn leaves_have_the_manuals_bits() {
    let config = AmdV1Config { dirty: DirtyTracking::Hardware, ..AmdV1Config::new(64, 43) };
    let config = AmdV1Config { encryption_bit: Some(47), ..config };
    let leaf = |config, lg2, prot, paddr| {
        let format = AmdV1::new(config).unwrap();
        format.leaf(format.template(AmdV1::level_of(lg2), lg2, prot), PhysAddr::new(paddr))
    };
    // IW, IR and FC in bits 62:60, PR in bit 0.
    let coherent = Prot::READ_WRITE | Prot::CACHE;
    assert_eq!(leaf(PLAIN, 12, coherent, 0x12_3000), 0x7000_0000_0012_3001);
    assert_eq!(leaf(PLAIN, 21, Prot::WRITE, 0x4020_0000), 0x4000_0000_4020_0001);
    // The C-bit is 47, and of registers clear; A is bit 5.
    assert_eq!(leaf(config, 12, Prot::READ, 0x5000), 0x2000_8000_0000_5021);
    assert_eq!(leaf(config, 12, Prot::READ | Prot::MMIO, 0x5000), 0x2000_0000_0000_5021);
    // Next level 7 is 0xe00; 64K is 0111b in bits 15:12.
    assert_eq!(leaf(PLAIN, 16, Prot::READ, 0x5_0000), 0x2000_0000_0005_7e01);
}

#[test]
fn links_carry_their_level_and_every_permission() {
    configs().for_each(|format| check::links(&format));
    let format = AmdV1::new(PLAIN).unwrap();
    // PR, next level 5 in bits 11:9, the address, IR and IW in bits 61 and 62.
    assert_eq!(format.link(5, PhysAddr::new(0x12_3000)), 0x6000_0000_0012_3a01);
    // A table of a link at another level is none: levels are not skipped.
    let link = format.link(3, PhysAddr::new(0x1000));
    assert_eq!(format.decode(4, link), Entry::Invalid);
    assert_eq!(format.decode(0, link), Entry::Invalid);
    // Hardware ignores bits 4:1.
    const { assert!(AmdV1::WRITTEN_BACK != 0 && AmdV1::WRITTEN_BACK & !0b1_1110 == 0) };
}

#[test]
fn hardware_bits_do_not_change_what_an_entry_is() {
    for format in configs() {
        let paddr = PhysAddr::new(0x1234_5000);
        for level in 1..=format.geometry().top_level {
            let marked = format.link(level, paddr) | ACCESSED | DIRTY;
            assert_eq!(format.decode(level, marked), Entry::Table(paddr));
        }
        check::leaves(&format, |Made { level, word, .. }| {
            let marked = word | ACCESSED | DIRTY;
            assert_eq!(format.decode(level, marked), format.decode(level, word));
            assert_eq!(format.prot(level, marked), format.prot(level, word));
        });
    }
}

#[test]
fn sizes_are_the_manuals_examples() {
    let format = AmdV1::new(PLAIN).unwrap();
    let size_of = |level, word| match format.decode(level, word) {
        Entry::Leaf(leaf) => Some(leaf),
        _ => None,
    };
    let leaf = |paddr, lg2| Some(Leaf { paddr: PhysAddr::new(paddr), lg2 });
    // "Example Page Size Encodings": bit 12 clear is 8K; bits 15:12 of 0111b are 64K; bits 20:12 of
    // 0_1111_1111b are 2M, which is the lower level's; bits 31:12 of 0x7ffff are 4G.
    assert_eq!(size_of(0, 0x4e01), leaf(0x4000, 13));
    assert_eq!(size_of(0, 0x1_7e01), leaf(0x1_0000, 16));
    assert_eq!(size_of(0, 0xf_fe01), None);
    assert_eq!(size_of(2, 0x1_7fff_fe01), leaf(0x1_0000_0000, 32));
    // Default sizes.
    assert_eq!(size_of(0, 0x5001), leaf(0x5000, 12));
    assert_eq!(size_of(1, 0x60_0001), leaf(0x60_0000, 21));
    assert_eq!(size_of(4, 0x0003_0000_0000_0001), leaf(0x0003_0000_0000_0000, 48));
    // 512G is not used, at either level that could have it, and the top level has no leaves.
    assert_eq!(size_of(3, 0x0003_0000_0000_0001), None);
    assert_eq!(size_of(2, 0x3f_ffff_fe01), None);
    assert_eq!(size_of(5, 1), None);
    // Nor is 2^52: ones in bits 50:12.
    assert_eq!(size_of(4, 0x0007_ffff_ffff_fe01), None);
    assert_eq!(size_of(5, ADDRESS | NEXT_SIZE | PRESENT), None);
    // And back: 2^51 is a zero in bit 50 above ones.
    assert_eq!(format.template(4, 51, Prot::READ), 0x2003_ffff_ffff_fe01);
}

#[test]
fn the_cheap_questions_agree_with_decode() {
    let runs = (12..=52).map(|bits| lg2::mask(bits) & ADDRESS);
    for format in configs() {
        for address in runs.clone().chain([0x000a_5a5a_5a5a_5000, 1 << 47, 1 << 51]) {
            let lows = check::all_or_each(911, 0..1 << 12);
            for (low, level) in lows.flat_map(|low| (0..6).map(move |level| (low, level))) {
                check::agrees(&format, level, low | address);
                check::agrees(&format, level, low | address | WRITE | FORCE_COHERENT);
            }
        }
    }
}

#[test]
fn absent_entries_are_empty_or_invalid() {
    let format = AmdV1::new(PLAIN).unwrap();
    for level in 0..6 {
        assert_eq!(format.decode(level, 0), Entry::Empty);
        assert_eq!(format.decode(level, !PRESENT), Entry::Invalid);
    }
}

#[test]
fn a_device_table_entry_has_levels_root_and_flags() {
    let format = AmdV1::new(PLAIN).unwrap();
    // 2.2.2.1: V and TV in bits 1:0, Mode 3 in bits 11:9 (0x600), the root in bits 51:12, IR and
    // IW in bits 62:61 (0x6 at the top).
    let dte = format.registers(PhysAddr::new(0x1234_5000), 2).dte;
    assert_eq!(dte, 0x6000_0000_1234_5603);
    // Six levels after growing: Mode 6 is 0xc00.
    let dte = format.registers(PhysAddr::new(0x000f_ffff_ffff_f000), 5).dte;
    assert_eq!(dte, 0x600f_ffff_ffff_fc03);
    // HAD 11b in bits 8:7 is 0x180; the C-bit goes with the root's address.
    let format = AmdV1::new(AmdV1Config {
        dirty: DirtyTracking::Hardware,
        encryption_bit: Some(47),
        ..AmdV1Config::new(64, 43)
    });
    let dte = format.unwrap().registers(PhysAddr::new(0x2000), 3).dte;
    assert_eq!(dte, 0x6000_8000_0000_2983);
}

#[test]
fn a_tree_starts_low_and_grows_to_its_input_bits() {
    let shape = |config: AmdV1Config| {
        let format = AmdV1::new(config).unwrap();
        let geometry = format.geometry();
        (format.first_top_level(), geometry.top_level, geometry.aperture.last().get())
    };
    assert_eq!(shape(PLAIN), (2, 5, u64::MAX));
    assert_eq!(shape(AmdV1Config { first_levels: 6, ..PLAIN }), (5, 5, u64::MAX));
    assert_eq!(shape(AmdV1Config { input_bits: 48, ..PLAIN }), (2, 3, (1 << 48) - 1));
    // More levels than needed translate no more.
    assert_eq!(shape(AmdV1Config { input_bits: 21, ..PLAIN }), (2, 2, (1 << 21) - 1));
    assert_eq!(shape(AmdV1Config { input_bits: 57, first_levels: 1, ..PLAIN }).1, 4);
}

#[test]
fn hardware_marks_and_software_cleans() {
    let format = AmdV1::new(AmdV1Config { dirty: DirtyTracking::Hardware, ..PLAIN }).unwrap();
    assert!(format.tracks_dirty());
    assert!(!AmdV1::new(PLAIN).unwrap().tracks_dirty());
    check::leaves(&format, |Made { level, word, .. }| {
        assert!(!format.is_dirty(word));
        let marked = word | 1 << 6;
        assert!(format.is_dirty(marked));
        assert_eq!(format.clean(marked), word);
        assert_eq!(format.clean(word), word);
        assert!(format.is_single(level, marked) == format.is_single(level, word));
    });
}

#[test]
fn configurations_that_do_not_exist_are_refused() {
    let refusal = |config| AmdV1::new(config).unwrap_err();
    for input_bits in [0, 12, 65] {
        let error = ConfigError::InputBits { input_bits, supported: "13 to 64" };
        assert_eq!(refusal(AmdV1Config { input_bits, ..PLAIN }), error);
    }
    for first_levels in [0, 7] {
        let error = ConfigError::Levels { levels: first_levels, supported: "1 to 6" };
        assert_eq!(refusal(AmdV1Config { first_levels, ..PLAIN }), error);
    }
    for output_bits in [31, 53] {
        let error = ConfigError::OutputBits { output_bits, supported: "32 to 52" };
        assert_eq!(refusal(AmdV1Config { output_bits, ..PLAIN }), error);
    }
    // 512G, 2^52, less than the granule, not the granule.
    for page_sizes in [1 << 12 | 1 << 39, 1 << 12 | 1 << 52, 1 << 11 | 1 << 12, 1 << 21] {
        let error = ConfigError::PageSizes { page_sizes, supported: AmdV1::PAGE_SIZES };
        assert_eq!(refusal(AmdV1Config { page_sizes: Some(page_sizes), ..PLAIN }), error);
    }
    for encryption_bit in [51, 52, 64].map(Some) {
        let error = refusal(AmdV1Config { encryption_bit, ..PLAIN });
        assert!(matches!(error, ConfigError::Unsupported { .. }));
    }
}
