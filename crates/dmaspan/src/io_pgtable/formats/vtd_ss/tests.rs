use super::*;
use crate::io_pgtable::formats::check::{self, Made};

const NEW: VtdSsConfig = VtdSsConfig::new(48, 46);

fn format(config: VtdSsConfig) -> VtdSs {
    VtdSs::new(config).unwrap()
}

/// What a leaf says of permissions that it was asked for.
fn granted(config: VtdSsConfig, asked: Prot) -> Prot {
    let cached = match config.snoop {
        SnoopControl::Absent | SnoopControl::Forced => true,
        SnoopControl::Cached => asked.contains(Prot::CACHE),
    };
    asked & Prot::READ_WRITE | if cached { Prot::CACHE } else { Prot::empty() }
}

#[test]
fn leaves_say_what_they_were_made_with() {
    for (input_bits, output_bits) in [(39, 32), (39, 39), (48, 46), (57, 52)] {
        for snoop in [SnoopControl::Absent, SnoopControl::Cached, SnoopControl::Forced] {
            for dirty in [DirtyTracking::Off, DirtyTracking::Hardware] {
                for read_only in [ReadOnlyLeaves::Allowed, ReadOnlyLeaves::Refused] {
                    let new = VtdSsConfig::new(input_bits, output_bits);
                    let config = VtdSsConfig { snoop, dirty, read_only, ..new };
                    let format = format(config);
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
    let page = PhysAddr::new(0x3f_ffff_f000);
    // R in 0, W in 1, the address in place (9.8, SS-PTE).
    assert_eq!(plain.leaf(plain.template(0, 12, Prot::READ), page), 0x3f_ffff_f001);
    assert_eq!(plain.leaf(plain.template(0, 12, Prot::WRITE), page), 0x3f_ffff_f002);
    // PS in 7 for 2M and 1G (9.8, SS-PDE and SS-PDPTE).
    assert_eq!(plain.template(1, 21, Prot::READ_WRITE), 0x83);
    assert_eq!(plain.template(2, 30, Prot::READ_WRITE), 0x83);
    assert_eq!(plain.link(3, PhysAddr::new(0x1234_5000)), 0x1234_5003);

    // SNP in 11; A in 8, also of links, where hardware would set it.
    let config = VtdSsConfig { snoop: SnoopControl::Cached, dirty: DirtyTracking::Hardware, ..NEW };
    let full = format(config);
    assert_eq!(full.template(0, 12, Prot::READ_WRITE | Prot::CACHE), 0x903);
    assert_eq!(full.template(0, 12, Prot::READ_WRITE), 0x103);
    assert_eq!(full.link(1, PhysAddr::new(0x1000)), 0x1103);
}

#[test]
fn links_lead_to_their_tables() {
    for input_bits in [39, 48, 57] {
        for dirty in [DirtyTracking::Off, DirtyTracking::Hardware] {
            let config = VtdSsConfig { dirty, ..VtdSsConfig::new(input_bits, 52) };
            check::links(&format(config));
        }
    }
}

#[test]
fn short_cuts_agree_with_decode() {
    let format = format(VtdSsConfig::new(57, 52));
    for (word, level) in check::words(13).flat_map(|word| (0..=4).map(move |at| (word, at))) {
        check::agrees(&format, level, word);
    }
}

#[test]
fn entries_that_permit_nothing_are_not_present() {
    let format = format(NEW);
    assert_eq!(format.decode(0, 0), Entry::Empty);
    // X alone (bit 2), and an address alone.
    for word in [0x4, 0x1000, PAGE_SIZE] {
        for level in 0..=3 {
            assert_eq!(format.decode(level, word), Entry::Invalid);
        }
    }
}

#[test]
fn a_leaf_of_512_gib_is_invalid() {
    assert_eq!(format(NEW).decode(3, PRESENT | PAGE_SIZE), Entry::Invalid);
}

#[test]
fn hardware_marks_a_leaf_and_only_d_changes() {
    let format = format(VtdSsConfig { dirty: DirtyTracking::Hardware, ..NEW });
    assert!(format.tracks_dirty());
    for (level, lg2) in [(0, 12), (1, 21), (2, 30)] {
        let leaf = format.leaf(format.template(level, lg2, Prot::READ_WRITE), PhysAddr::new(0));
        // Hardware sets A (8) and D (9) (3.7.2).
        let marked = leaf | 1 << 8 | 1 << 9;
        assert!(!format.is_dirty(leaf) && format.is_dirty(marked));
        assert_eq!(format.clean(marked), leaf);
        assert_eq!(format.dirtied(leaf), leaf | 1 << 9);
        assert_eq!(format.decode(level, marked), format.decode(level, leaf));
        assert_eq!(format.prot(level, marked), format.prot(level, leaf));
        let link = format.link(level + 1, PhysAddr::new(0x7000));
        assert_eq!(format.table_of(level + 1, link | 1 << 8), Some(PhysAddr::new(0x7000)));
    }
}

#[test]
fn read_only_leaves_are_refused_where_hardware_has_none() {
    let strict = format(VtdSsConfig { read_only: ReadOnlyLeaves::Refused, ..NEW });
    assert!(strict.refuses(Prot::READ) && strict.refuses(Prot::READ | Prot::CACHE));
    assert!(!strict.refuses(Prot::WRITE) && !strict.refuses(Prot::READ_WRITE));
    assert!(!format(NEW).refuses(Prot::READ));
}

#[test]
fn geometry_is_that_of_the_address_width() {
    for (input_bits, top_level) in [(39, 2), (48, 3), (57, 4)] {
        let geometry = format(VtdSsConfig::new(input_bits, 46)).geometry();
        assert_eq!(geometry.top_level, top_level);
        assert_eq!(geometry.aperture.last().get(), lg2::mask(input_bits));
        assert_eq!(geometry.page_sizes, 0x4020_1000);
        assert_eq!(geometry.root, geometry.table);
        assert_eq!(geometry.root.max_paddr.get(), 0x3fff_ffff_ffff);
    }
}

#[test]
fn registers_have_the_fields_of_the_manual() {
    let root = PhysAddr::new(0x12_3456_7000);
    // AW 001b in bits 4:2 is 0x04; PWSNP is bit 87, 23 of the second word (9.6). AW is in bits 2:0
    // of the context entry's second word (9.3).
    let registers = format(VtdSsConfig::new(39, 46)).registers(root);
    assert_eq!(registers.pasid_entry, [0x12_3456_7004, 0x80_0000]);
    assert_eq!(registers.context_entry, [0x12_3456_7000, 1]);
    // AW 010b in bits 4:2 is 0x08, without PWSNP.
    let config = VtdSsConfig { walks: Coherency::NonCoherent, ..NEW };
    let registers = format(config).registers(root);
    assert_eq!(registers.pasid_entry, [0x12_3456_7008, 0]);
    assert_eq!(registers.context_entry, [0x12_3456_7000, 2]);
    // AW 011b in bits 4:2 is 0x0c; SSADE is bit 9, 0x200.
    let config = VtdSsConfig { dirty: DirtyTracking::Hardware, ..VtdSsConfig::new(57, 52) };
    let registers = format(config).registers(root);
    assert_eq!(registers.pasid_entry, [0x12_3456_720c, 0x80_0000]);
    assert_eq!(registers.context_entry, [0x12_3456_7000, 3]);
}

#[test]
fn configurations_that_do_not_exist_are_refused() {
    let refused = |config| VtdSs::new(config).unwrap_err();
    for input_bits in [0, 12, 30, 38, 40, 47, 52, 58, 64, u32::MAX] {
        let error = refused(VtdSsConfig { input_bits, ..NEW });
        assert_eq!(error, ConfigError::InputBits { input_bits, supported: "39, 48 and 57" });
    }
    for output_bits in [0, 31, 53, u32::MAX] {
        let error = refused(VtdSsConfig { output_bits, ..NEW });
        assert_eq!(error, ConfigError::OutputBits { output_bits, supported: "32 to 52" });
    }
    for page_sizes in [0, 1 << 21, 1 << 12 | 1 << 16, 1 << 12 | 1 << 39] {
        let error = refused(VtdSsConfig { page_sizes: Some(page_sizes), ..NEW });
        assert_eq!(error, ConfigError::PageSizes { page_sizes, supported: 0x4020_1000 });
    }
    assert!(VtdSs::new(VtdSsConfig { page_sizes: Some(1 << 12 | 1 << 21), ..NEW }).is_ok());
}
