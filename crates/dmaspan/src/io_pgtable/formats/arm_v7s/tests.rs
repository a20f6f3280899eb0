use super::*;
use crate::io_pgtable::formats::check::{self, Made};

const NEW: ArmV7sConfig =
    ArmV7sConfig { page_sizes: Some(ArmV7s::PAGE_SIZES), ..ArmV7sConfig::new(32, 32) };

fn format(config: ArmV7sConfig) -> ArmV7s {
    ArmV7s::new(config).unwrap()
}

/// All configurations but for the coherency of walks.
fn configs() -> impl Iterator<Item = ArmV7sConfig> {
    let variants = [ArmV7sVariant::MediaTek, ArmV7sVariant::MediaTekHighTables];
    let mediatek = variants.into_iter().flat_map(|variant| {
        let bits = [(32, 32), (32, 33), (34, 34), (34, 35)];
        bits.map(|(input_bits, output_bits)| ArmV7sConfig {
            variant,
            input_bits,
            output_bits,
            ..NEW
        })
    });
    mediatek.chain([NEW])
}

/// What a leaf says of permissions that it was asked for.
fn granted(config: ArmV7sConfig, asked: Prot) -> Prot {
    let mut granted = asked | Prot::READ;
    if config.variant != ArmV7sVariant::Arm {
        granted.insert(Prot::WRITE);
        granted.remove(Prot::PRIV | Prot::NOEXEC);
    }
    if asked.contains(Prot::MMIO) {
        granted.remove(Prot::CACHE);
    }
    granted
}

#[test]
fn leaves_say_what_they_were_made_with() {
    for config in configs() {
        let format = format(config);
        check::leaves(&format, |Made { level, prot, word }| {
            assert_eq!(format.prot(level, word), granted(config, prot), "{prot:?}");
        });
    }
}

#[test]
fn links_lead_to_their_tables() {
    for config in configs() {
        check::links(&format(config));
    }
}

#[test]
fn short_cuts_agree_with_decode() {
    let variant = ArmV7sVariant::MediaTekHighTables;
    for config in [NEW, ArmV7sConfig { variant, input_bits: 34, output_bits: 35, ..NEW }] {
        // The low 19 bits of a descriptor are all that say what it is.
        let format = format(config);
        for word in check::words(19).map(low_half) {
            check::agrees(&format, 0, word);
            check::agrees(&format, 1, word);
        }
    }
}

#[test]
fn entries_have_the_bits_of_the_manual() {
    let format = format(NEW);
    let cached = Prot::READ_WRITE | Prot::CACHE;
    // Small page: nG 11, S 10, AP[2] 9, TEX[0] 6, AP[1:0] 5:4, C 3, B 2, 1, XN 0.
    let page = format.leaf(format.template(0, 12, cached), PhysAddr::new(0xffff_f000));
    assert_eq!(page, 0xffff_f000 | 0b1100_0111_1110);
    assert_eq!(format.template(0, 12, Prot::READ | Prot::NOEXEC), 0b1110_0111_0011);
    assert_eq!(format.template(0, 12, cached | Prot::PRIV), 0b1100_0101_1110);
    // Large page: XN 15, TEX[0] 12, nG 11, S 10, AP[2] 9, AP[1:0] 5:4, C 3, B 2, 01b.
    assert_eq!(format.template(0, 16, cached), 0b0001_1100_0011_1101);
    assert_eq!(format.template(0, 16, Prot::READ | Prot::NOEXEC), 0b1001_1110_0011_0001);
    // Section: nG 17, S 16, AP[2] 15, TEX[0] 12, AP[1:0] 11:10, XN 4, C 3, B 2, 10b; bit 18 set is
    // a supersection. Device memory has B alone.
    assert_eq!(format.template(1, 20, cached), 0b11_0001_1100_0000_1110);
    let registers = Prot::READ | Prot::NOEXEC | Prot::MMIO;
    assert_eq!(format.template(1, 20, registers), 0b11_1000_1100_0001_0110);
    assert_eq!(format.template(1, 24, cached), 0b111_0001_1100_0000_1110);
    assert_eq!(format.link(1, PhysAddr::new(0xffff_fc00)), 0xffff_fc01);
}

#[test]
fn mediatek_has_the_high_address_bits_where_arm_has_permissions() {
    let config = ArmV7sConfig {
        variant: ArmV7sVariant::MediaTekHighTables,
        input_bits: 34,
        output_bits: 35,
        ..NEW
    };
    let format = format(config);
    // Bit 32 is bit 9, bit 33 bit 4, bit 34 bit 5.
    for (high, bits) in [(1, 1 << 9), (2, 1 << 4), (4, 1 << 5), (7, 0b10_0011_0000)] {
        for (level, lg2) in [(0, 12), (0, 16), (1, 20), (1, 24)] {
            let template = format.template(level, lg2, Prot::READ_WRITE);
            let leaf = format.leaf(template, PhysAddr::new(high << 32));
            assert_eq!(leaf, template | bits, "2^{lg2}");
            // The step to it carries out of bit 31.
            let below = format.leaf(template, PhysAddr::new((high << 32) - lg2::size(lg2)));
            assert_eq!(format.advance(below, lg2::size(lg2)), leaf, "2^{lg2}");
        }
        assert_eq!(format.link(1, PhysAddr::new(high << 32 | 0x400)), 0x401 | bits);
    }
}

#[test]
fn tables_are_where_links_can_lead() {
    for config in configs() {
        let geometry = format(config).geometry();
        let highest = match config.variant {
            ArmV7sVariant::MediaTekHighTables => lg2::mask(config.output_bits),
            _ => 0xffff_ffff,
        };
        assert_eq!(geometry.table.max_paddr.get(), highest);
        assert_eq!(geometry.root.max_paddr.get(), highest);
    }
}

#[test]
fn the_root_has_a_word_for_each_mebibyte() {
    // 4096 words are 16 KiB, 16384 are 64 KiB; the others are 256 words, 1 KiB.
    for config in configs() {
        let geometry = format(config).geometry();
        let lg2_size = if config.input_bits == 34 { 16 } else { 14 };
        assert_eq!((geometry.root.lg2_size, geometry.root.lg2_align), (lg2_size, lg2_size));
        assert_eq!((geometry.table.lg2_size, geometry.table.lg2_align), (10, 10));
        assert_eq!(geometry.aperture.last().get(), lg2::mask(config.input_bits));
    }
}

#[test]
fn descriptors_that_are_never_written_are_invalid() {
    let format = format(NEW);
    for level in [0, 1] {
        assert_eq!(format.decode(level, 0), Entry::Empty);
        // Bits 1:0 say that it is none, whatever else is there.
        assert_eq!(format.decode(level, 0x1000), Entry::Invalid);
    }
    // A section with PXN (B3.5.1).
    assert_eq!(format.decode(1, 0b11), Entry::Invalid);
}

#[test]
fn a_large_page_is_no_table() {
    // Bits 1:0 are those of a link.
    let format = format(NEW);
    let leaf = format.leaf(format.template(0, 16, Prot::READ), PhysAddr::new(0x1_0000));
    assert_eq!(leaf & 0b11, TABLE);
    assert_eq!(format.table_of(0, leaf), None);
}

#[test]
fn registers_have_the_fields_of_the_manual() {
    let root = PhysAddr::new(0x8765_4000);
    // IRGN 01b is bit 6, NOS bit 5, RGN 01b bit 3, S bit 1: 0x6a.
    let registers = format(NEW).registers(root);
    assert_eq!(registers.ttbr, 0x8765_406a);
    assert_eq!(registers.tcr, 0);
    // TR1 01b is 0x4, TR4 10b 0x200, TR7 10b 0x8000; DS0, DS1 and NS1 are bits 16, 17 and 19; NOS7
    // is bit 31. IR7 01b is 0x4000, OR7 01b 0x4000_0000.
    assert_eq!((registers.prrr, registers.nmrr), (0x800b_8204, 0x4000_4000));
    // Non-cacheable walks: S alone.
    let config = ArmV7sConfig { walks: Coherency::NonCoherent, ..NEW };
    assert_eq!(format(config).registers(root).ttbr, 0x8765_4002);
    // MediaTek: bits 34:32 in bits 2:0.
    let variant = ArmV7sVariant::MediaTekHighTables;
    let config = ArmV7sConfig { variant, output_bits: 35, ..NEW };
    assert_eq!(format(config).registers(PhysAddr::new(0x5_8765_4000)).ttbr, 0x8765_4005);
}

#[test]
fn configurations_that_do_not_exist_are_refused() {
    let refused = |config| ArmV7s::new(config).unwrap_err();
    let mediatek = ArmV7sConfig { variant: ArmV7sVariant::MediaTek, ..NEW };
    for (config, supported, all) in [
        (NEW, "32", &[0, 12, 20, 31, 33, 34, 64, u32::MAX][..]),
        (mediatek, "32 and 34", &[0, 20, 31, 33, 35, 64, u32::MAX][..]),
    ] {
        for &input_bits in all {
            let error = refused(ArmV7sConfig { input_bits, ..config });
            assert_eq!(error, ConfigError::InputBits { input_bits, supported });
        }
    }
    for (config, supported, all) in [
        (NEW, "32", &[0, 31, 33, 35, 40, u32::MAX][..]),
        (mediatek, "32 to 35", &[0, 31, 36, u32::MAX][..]),
    ] {
        for &output_bits in all {
            let error = refused(ArmV7sConfig { output_bits, ..config });
            assert_eq!(error, ConfigError::OutputBits { output_bits, supported });
        }
    }
    for page_sizes in [0, 1 << 16, 1 << 12 | 1 << 21] {
        let error = refused(ArmV7sConfig { page_sizes: Some(page_sizes), ..NEW });
        assert_eq!(error, ConfigError::PageSizes { page_sizes, supported: 0x111_1000 });
    }
}

#[test]
fn supersections_are_made_only_where_asked_for() {
    assert_eq!(format(ArmV7sConfig::new(32, 32)).geometry().page_sizes, 0x11_1000);
}
