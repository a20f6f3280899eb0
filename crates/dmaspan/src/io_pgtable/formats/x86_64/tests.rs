use super::*;
use crate::io_pgtable::formats::check::{self, Made};

const NEW: X86_64Config = X86_64Config::new(48, 46);

fn format(config: X86_64Config) -> X86_64 {
    X86_64::new(config).unwrap()
}

/// What a leaf says of permissions that it was asked for.
fn granted(config: X86_64Config, asked: Prot) -> Prot {
    let mut granted = asked | Prot::READ;
    granted.set(Prot::CACHE, !asked.contains(Prot::MMIO));
    if config.execute_disable == ExecuteDisable::Absent {
        granted.remove(Prot::NOEXEC);
    }
    granted
}

#[test]
fn leaves_say_what_they_were_made_with() {
    for (input_bits, output_bits) in [(48, 32), (48, 46), (57, 52)] {
        for execute_disable in [ExecuteDisable::Absent, ExecuteDisable::Enabled] {
            for dirty in [DirtyTracking::Off, DirtyTracking::Hardware] {
                for encryption_bit in [None, Some(47), Some(51)] {
                    let new = X86_64Config::new(input_bits, output_bits);
                    let config = X86_64Config { execute_disable, dirty, encryption_bit, ..new };
                    let Ok(format) = X86_64::new(config) else {
                        // There is no room for the bit.
                        assert!(output_bits == 52 && encryption_bit.is_some());
                        continue;
                    };
                    check::leaves(&format, |Made { level, prot, word }| {
                        assert_eq!(format.prot(level, word), granted(config, prot), "{prot:?}");
                    });
                }
            }
        }
    }
}

#[test]
fn entries_have_the_bits_of_the_manual() {
    let plain = format(NEW);
    // P 0, R/W 1, U/S 2, A 5, D 6; PS 7 above level 0; PWT 3 and PCD 4 for registers.
    assert_eq!(plain.template(0, 12, Prot::READ), 0x25);
    assert_eq!(plain.template(0, 12, Prot::WRITE), 0x67);
    assert_eq!(plain.template(1, 21, Prot::READ_WRITE), 0xe7);
    assert_eq!(plain.template(2, 30, Prot::READ | Prot::PRIV), 0xa1);
    assert_eq!(plain.template(0, 12, Prot::READ | Prot::MMIO | Prot::CACHE), 0x3d);
    assert_eq!(plain.link(1, PhysAddr::new(0x3fff_ffff_f000)), 0x3fff_ffff_f027);

    let encrypted = format(X86_64Config {
        execute_disable: ExecuteDisable::Enabled,
        encryption_bit: Some(51),
        ..NEW
    });
    let prot = Prot::READ | Prot::NOEXEC;
    assert_eq!(encrypted.template(0, 12, prot), 0x8008_0000_0000_0025);
    assert_eq!(encrypted.template(0, 12, prot | Prot::MMIO), 0x8000_0000_0000_003d);
    assert_eq!(encrypted.link(3, PhysAddr::new(0x1000)), 0x8_0000_0000_1027);
}

#[test]
fn links_lead_to_their_tables() {
    for (input_bits, encryption_bit) in [(48, None), (57, None), (48, Some(47)), (57, Some(51))] {
        let config = X86_64Config { encryption_bit, ..X86_64Config::new(input_bits, 46) };
        check::links(&format(config));
    }
    check::links(&format(X86_64Config::new(57, 52)));
}

#[test]
fn short_cuts_agree_with_decode() {
    for encryption_bit in [None, Some(47)] {
        let config = X86_64Config { encryption_bit, ..X86_64Config::new(57, 47) };
        let format = format(config);
        for (word, level) in check::words(13).flat_map(|word| (0..=4).map(move |at| (word, at))) {
            check::agrees(&format, level, word);
        }
    }
}

#[test]
fn hardware_marks_a_leaf_and_only_d_changes() {
    let format = format(X86_64Config { dirty: DirtyTracking::Hardware, ..NEW });
    assert!(format.tracks_dirty());
    for (level, lg2) in [(0, 12), (1, 21), (2, 30)] {
        let leaf = format.leaf(format.template(level, lg2, Prot::READ_WRITE), PhysAddr::new(0));
        // Hardware sets A (5) and D (6) (SDM 4.8).
        let marked = leaf | 1 << 5 | 1 << 6;
        assert!(!format.is_dirty(leaf) && format.is_dirty(marked));
        assert_eq!(format.clean(marked), leaf);
        assert_eq!(format.dirtied(leaf), leaf | 1 << 6);
        assert_eq!(format.decode(level, marked), format.decode(level, leaf));
        assert_eq!(format.prot(level, marked), format.prot(level, leaf));
        let link = format.link(level + 1, PhysAddr::new(0x7000));
        assert_eq!(format.table_of(level + 1, link | 1 << 5), Some(PhysAddr::new(0x7000)));
    }
}

#[test]
fn a_dirty_bit_that_is_preset_says_nothing() {
    let format = format(NEW);
    assert!(!format.tracks_dirty() && !format.is_dirty(format.template(0, 12, Prot::WRITE)));
}

#[test]
fn entries_that_no_hardware_accepts_are_invalid() {
    let format = format(X86_64Config::new(57, 52));
    // Not present but not empty; leaves of 512 GiB and more; another memory type.
    assert_eq!(format.decode(0, WRITE), Entry::Invalid);
    for level in [0, 3, 4] {
        assert_eq!(format.decode(level, PRESENT | PAGE_SIZE), Entry::Invalid);
    }
}

#[test]
fn apertures_are_the_halves_of_the_canonical_addresses() {
    let cases = [
        (48, Half::Lower, 0, 0x7fff_ffff_ffff),
        (48, Half::Upper, 0xffff_8000_0000_0000, u64::MAX),
        (57, Half::Lower, 0, 0xff_ffff_ffff_ffff),
        (57, Half::Upper, 0xff00_0000_0000_0000, u64::MAX),
    ];
    for (input_bits, half, start, last) in cases {
        let config = X86_64Config { half, ..X86_64Config::new(input_bits, 46) };
        let geometry = format(config).geometry();
        assert_eq!(geometry.aperture.start().get(), start);
        assert_eq!(geometry.aperture.last().get(), last);
        assert_eq!(geometry.top_level, if input_bits == 48 { 3 } else { 4 });
        assert_eq!(geometry.root.max_paddr.get(), 0x3fff_ffff_ffff);
    }
}

#[test]
fn registers_have_the_fields_of_the_manual() {
    let root = PhysAddr::new(0x12_3456_7000);
    // 4 levels are 00b in FSPM and in GuestPagingMode; V is bit 0 of a guest CR3.
    let registers = format(NEW).registers(root);
    assert_eq!(registers.pasid_entry, 0x12_3456_7000);
    assert_eq!(registers.gcr3_entry, 0x12_3456_7001);
    assert_eq!(registers.device_table_entry, 0);
    // 5 levels are 01b: FSPM is at 131:130, 3:2 of the third word, and GuestPagingMode at 183:182,
    // 55:54 of the third word. NXE is at 133, 5 of that word.
    let config = X86_64Config {
        execute_disable: ExecuteDisable::Enabled,
        encryption_bit: Some(47),
        ..X86_64Config::new(57, 46)
    };
    let registers = format(config).registers(root);
    assert_eq!(registers.pasid_entry, 0x12_3456_7024);
    assert_eq!(registers.gcr3_entry, 0x8012_3456_7001);
    assert_eq!(registers.device_table_entry, 0x40_0000_0000_0000);
}

#[test]
fn configurations_that_do_not_exist_are_refused() {
    let refused = |config| X86_64::new(config).unwrap_err();
    for input_bits in [0, 32, 39, 47, 49, 56, 58, 64, u32::MAX] {
        let error = refused(X86_64Config { input_bits, ..NEW });
        assert_eq!(error, ConfigError::InputBits { input_bits, supported: "48 and 57" });
    }
    for output_bits in [0, 31, 53, u32::MAX] {
        let error = refused(X86_64Config { output_bits, ..NEW });
        assert_eq!(error, ConfigError::OutputBits { output_bits, supported: "32 to 52" });
    }
    for page_sizes in [0, 1 << 30, 1 << 12 | 1 << 22, 1 << 12 | 1 << 39] {
        let error = refused(X86_64Config { page_sizes: Some(page_sizes), ..NEW });
        assert_eq!(error, ConfigError::PageSizes { page_sizes, supported: 0x4020_1000 });
    }
    for bit in [0, 12, 45, 52, 63, 64, u32::MAX] {
        let error = refused(X86_64Config { encryption_bit: Some(bit), ..NEW });
        assert!(matches!(error, ConfigError::Unsupported { .. }), "{error}");
    }
}
