use super::super::check::{self, Made};
use super::*;

const SV48: RiscvConfig = RiscvConfig::new(RiscvMode::Sv48, 56);
const MODES: [RiscvMode; 3] = [RiscvMode::Sv39, RiscvMode::Sv48, RiscvMode::Sv57];
const STAGES: [RiscvStage; 3] =
    [RiscvStage::First(Half::Lower), RiscvStage::First(Half::Upper), RiscvStage::Second];

fn configs() -> impl Iterator<Item = Riscv> {
    let modes = MODES.into_iter().flat_map(|mode| STAGES.map(|stage| (mode, stage)));
    modes.flat_map(|(mode, stage)| {
        let plain = RiscvConfig { stage, ..RiscvConfig::new(mode, 56) };
        let full = RiscvConfig {
            page_sizes: Some(1 << 12 | 1 << 16 | 1 << 21 | 1 << 30),
            memory_types: RiscvMemoryTypes::Svpbmt,
            dirty: DirtyTracking::Hardware,
            ..plain
        };
        [plain, full, RiscvConfig { output_bits: 40, ..plain }].map(|c| Riscv::new(c).unwrap())
    })
}

#[test]
fn every_leaf_decodes_to_what_it_was_made_from() {
    for format in configs() {
        let types = format.config.memory_types == RiscvMemoryTypes::Svpbmt;
        check::leaves(&format, |Made { level, prot, word }| {
            // Writes need reads; MMIO is what it is, coherent or not; the second stage has no
            // privilege, and without Svpbmt the platform says the type.
            let mut granted = prot | Prot::READ;
            granted.set(Prot::PRIV, prot.contains(Prot::PRIV) && word & USER == 0);
            granted.set(Prot::MMIO, types && prot.contains(Prot::MMIO));
            granted.set(Prot::CACHE, !types || prot & (Prot::CACHE | Prot::MMIO) == Prot::CACHE);
            assert_eq!(format.prot(level, word), granted);
            if format.config.stage == RiscvStage::Second {
                assert_eq!(word & USER, USER);
            } else {
                assert_eq!(word & USER == 0, prot.contains(Prot::PRIV));
            }
        });
    }
}

#[test]
fn entries_are_the_manuals() {
    let config = RiscvConfig {
        page_sizes: Some(Riscv::PAGE_SIZES & lg2::mask(40) | Riscv::NAPOT_SIZES),
        memory_types: RiscvMemoryTypes::Svpbmt,
        ..SV48
    };
    let format = Riscv::new(config).unwrap();
    let leaf = |lg2, prot, paddr| {
        let level = Riscv::level_of(lg2);
        format.leaf(format.template(level, lg2, prot), PhysAddr::new(paddr))
    };
    // D A G U X W R V is 1101_1111b; address 0x8000_1000 is PPN 0x8_0001, at bit 10 0x2000_0400.
    let memory = Prot::READ_WRITE | Prot::CACHE;
    assert_eq!(leaf(12, memory, 0x8000_1000), 0x2000_04df);
    // Neither W nor D, nor X; NC is 1 in bits 62:61.
    assert_eq!(leaf(21, Prot::READ | Prot::NOEXEC, 0x8020_0000), 0x2000_0000_2008_0053);
    // No U; IO is 2 in bits 62:61.
    let io = Prot::READ_WRITE | Prot::MMIO | Prot::PRIV | Prot::NOEXEC;
    assert_eq!(leaf(30, io, 0x4000_0000), 0x4000_0000_1000_00c7);
    // N in bit 63, and 1000b below PPN 0x8_0010.
    assert_eq!(leaf(16, memory, 0x8001_0000), 0x8000_0000_2000_60df);
    // A link has V and the PPN.
    assert_eq!(format.link(3, PhysAddr::new(0x00ff_ffff_ffff_f000)), 0x003f_ffff_ffff_fc01);
}

#[test]
fn links_lead_to_their_tables() {
    configs().for_each(|format| check::links(&format));
    // Hardware ignores RSW, bits 9:8.
    const { assert!(Riscv::WRITTEN_BACK != 0 && Riscv::WRITTEN_BACK & !(0b11 << 8) == 0) };
}

#[test]
fn reserved_words_are_invalid() {
    let format = Riscv::new(SV48).unwrap();
    let page = format.template(0, 12, Prot::READ);
    for level in 0..4 {
        assert_eq!(format.decode(level, 0), Entry::Empty);
        // Not valid; W without R; X alone; reserved bits.
        for word in [!VALID, VALID | WRITE, VALID | EXECUTE | USER, page | 1 << 54, page | 1 << 60]
        {
            assert_eq!(format.decode(level, word), Entry::Invalid, "{word:#x} at {level}");
        }
        // A, D, U, N and PBMT are reserved in links, and level 0 has none.
        let link = format.link(1, PhysAddr::new(0x5000));
        for reserved in [ACCESSED, DIRTY, USER, NAPOT, PBMT_IO] {
            assert_eq!(format.decode(level, link | reserved), Entry::Invalid);
        }
        // The only group is 64K at level 0.
        for size in (0..16).filter(|&size| size != 0b1000 || level > 0) {
            let word = page | NAPOT | size << 10;
            assert_eq!(format.decode(level, word), Entry::Invalid, "{size:#x} at {level}");
        }
        let group = page | NAPOT | NAPOT_64K | 1 << 54;
        assert_eq!(format.decode(level, group), Entry::Invalid);
    }
    assert_eq!(format.decode(0, format.link(1, PhysAddr::new(0x5000))), Entry::Invalid);
}

#[test]
fn the_cheap_questions_agree_with_decode() {
    let format = Riscv::new(SV48).unwrap();
    // The ten bits of attributes, the PPN's lowest four and the ten highest bits, one at a time.
    let lows = check::all_or_each(911, 0..1 << 14);
    for (low, level) in lows.flat_map(|low| (0..5).map(move |level| (low, level))) {
        for high in (54..64).map(|bit| 1 << bit).chain([0, PBMT_MASK, PPN, PBMT_IO | NAPOT]) {
            check::agrees(&format, level, low | high);
        }
    }
}

#[test]
fn the_registers_say_mode_and_root() {
    let with = |config: RiscvConfig| Riscv::new(config).unwrap();
    // iosatp and iohgatp: the mode in bits 63:60, 8 to 10; the root's page number in bits 43:0. A
    // root at 0x8000_4000 is page 0x8_0004.
    for (mode, atp) in MODES.into_iter().zip([8 << 60, 9 << 60, 10 << 60]) {
        for stage in STAGES {
            let format = with(RiscvConfig { mode, stage, ..SV48 });
            let registers = format.registers(PhysAddr::new(0x8000_4000));
            assert_eq!(registers, RiscvRegisters { atp: atp | 0x8_0004, tc: 0 });
        }
    }
    let highest = with(SV48).registers(PhysAddr::new(0x00ff_ffff_ffff_f000));
    assert_eq!(highest.atp, 0x9000_0fff_ffff_ffff);
    // SADE is bit 8 of DC.tc, GADE bit 7.
    for (stage, tc) in STAGES.into_iter().zip([0x100, 0x100, 0x80]) {
        let format = with(RiscvConfig { stage, dirty: DirtyTracking::Hardware, ..SV48 });
        assert_eq!(format.registers(PhysAddr::new(0)).tc, tc);
    }
}

#[test]
fn apertures_and_roots_are_those_of_the_mode_and_stage() {
    let shape = |mode, stage| {
        let format = Riscv::new(RiscvConfig { stage, ..RiscvConfig::new(mode, 56) }).unwrap();
        let Geometry { aperture, top_level, root, .. } = format.geometry();
        assert_eq!(root.lg2_size, root.lg2_align);
        (aperture.start().get(), aperture.last().get(), top_level, root.lg2_size)
    };
    let [lower, upper, second] = STAGES;
    assert_eq!(shape(RiscvMode::Sv39, lower), (0, 0x3f_ffff_ffff, 2, 12));
    assert_eq!(shape(RiscvMode::Sv39, upper), (0xffff_ffc0_0000_0000, u64::MAX, 2, 12));
    assert_eq!(shape(RiscvMode::Sv39, second), (0, 0x1ff_ffff_ffff, 2, 14));
    assert_eq!(shape(RiscvMode::Sv48, lower), (0, 0x7fff_ffff_ffff, 3, 12));
    assert_eq!(shape(RiscvMode::Sv48, second), (0, 0x3_ffff_ffff_ffff, 3, 14));
    assert_eq!(shape(RiscvMode::Sv57, upper), (0xff00_0000_0000_0000, u64::MAX, 4, 12));
    assert_eq!(shape(RiscvMode::Sv57, second), (0, 0x7ff_ffff_ffff_ffff, 4, 14));
}

#[test]
fn page_sizes_are_those_of_the_levels_and_output_bits() {
    let sizes = |mode, output_bits| {
        Riscv::new(RiscvConfig::new(mode, output_bits)).unwrap().geometry().page_sizes
    };
    assert_eq!(sizes(RiscvMode::Sv39, 56), 1 << 12 | 1 << 21 | 1 << 30);
    assert_eq!(sizes(RiscvMode::Sv48, 56), 1 << 12 | 1 << 21 | 1 << 30 | 1 << 39);
    assert_eq!(sizes(RiscvMode::Sv57, 56), Riscv::PAGE_SIZES);
    assert_eq!(sizes(RiscvMode::Sv57, 47), 1 << 12 | 1 << 21 | 1 << 30 | 1 << 39);
    assert_eq!(sizes(RiscvMode::Sv57, 32), 1 << 12 | 1 << 21 | 1 << 30);
}

#[test]
fn hardware_marks_and_software_cleans() {
    for format in configs() {
        let tracks = format.config.dirty == DirtyTracking::Hardware;
        assert_eq!(format.tracks_dirty(), tracks);
        check::leaves(&format, |Made { level, word, .. }| {
            let writable = format.prot(level, word).contains(Prot::WRITE);
            // Without the hardware a writable leaf is dirty from the start, or a write would fault.
            assert_eq!(format.is_dirty(word), writable && !tracks);
            let marked = word | 1 << 7;
            assert!(format.is_dirty(marked));
            assert!(!format.is_dirty(format.clean(marked)));
            assert_eq!(format.clean(marked) | 1 << 7, marked);
            assert_eq!(format.decode(level, marked), format.decode(level, word));
        });
    }
}

#[test]
fn configurations_that_do_not_exist_are_refused() {
    let refusal = |config| Riscv::new(config).unwrap_err();
    for output_bits in [31, 57] {
        let error = ConfigError::OutputBits { output_bits, supported: "32 to 56" };
        assert_eq!(refusal(RiscvConfig { output_bits, ..SV48 }), error);
    }
    // 256T at a level that is not there, 8K, not the granule.
    let supported = 1 << 12 | 1 << 16 | 1 << 21 | 1 << 30 | 1 << 39;
    for page_sizes in [1 << 12 | 1 << 48, 1 << 12 | 1 << 13, 1 << 16] {
        let error = ConfigError::PageSizes { page_sizes, supported };
        assert_eq!(refusal(RiscvConfig { page_sizes: Some(page_sizes), ..SV48 }), error);
    }
}
