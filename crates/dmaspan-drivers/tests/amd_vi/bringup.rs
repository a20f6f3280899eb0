//! Whatever was there before, nothing passes afterwards, and a failure leaves nothing behind.

use std::sync::atomic::Ordering;

use dmaspan_drivers::Error;
use dmaspan_drivers::amd_vi::AmdViConfig;

use crate::fake::{
    CAPABILITY, CONTROL, DEVICE_TABLE, ENABLE, EXCLUSION_BASE, FEATURES, Fake, Memory, STATUS,
    config, start,
};

/// V, TV, Mode 1, and neither IR nor IW (48882, 2.2.2.1).
pub(crate) fn is_closed([word, domain]: [u64; 2]) -> bool {
    word & (0b11 << 61 | 0b111 << 9 | 0b11) == 1 << 9 | 0b11 && domain == 1
}

#[test]
fn every_entry_is_closed_before_translation_is_enabled() {
    let memory = Memory::new();
    let fake = Fake::new(&memory);
    fake.poke(EXCLUSION_BASE, 0xdead_0003);
    let iommu = start(&memory, &fake, config()).unwrap();
    let writes = fake.take_writes();
    let at = |register, value: &dyn Fn(u64) -> bool| {
        writes.iter().position(|&(at, written)| at == register && value(written)).unwrap()
    };
    let enabled = at(CONTROL, &|value| value & ENABLE != 0);
    assert!(at(DEVICE_TABLE, &|_| true) < enabled);
    assert!(at(EXCLUSION_BASE, &|value| value & 0b11 == 0) < enabled);
    assert_eq!(fake.peek(EXCLUSION_BASE) & 0xfff, 0);
    assert_eq!(fake.peek(DEVICE_TABLE) & 0xfff, 7, "1024 entries are 8 pages");
    assert!((0..0x400).all(|device| is_closed(fake.entry(device))));
    // The table that closed entries have is empty.
    let root = fake.entry(0)[0] & 0x000f_ffff_ffff_f000;
    assert!((0..512).all(|word| memory.word(root + word * 8) == 0));
    drop(iommu);
    assert_eq!(memory.live.load(Ordering::Relaxed), 5, "hardware has its memory still");
    assert_ne!(fake.peek(CONTROL) & ENABLE, 0);
}

#[test]
fn hardware_forgets_every_device_and_domain_with_one_command_or_without() {
    for features in [FEATURES, FEATURES & !(1 << 6)] {
        let memory = Memory::new();
        let fake = Fake::new(&memory);
        fake.poke(0x30, features);
        start(&memory, &fake, config()).unwrap();
        let seen = fake.take();
        let named = |kind, shift: u32| {
            let of_kind = seen.iter().filter(|seen| seen.opcode() == kind);
            of_kind.map(|seen| seen.command[0] >> shift & 0xffff).collect::<Vec<_>>()
        };
        let all = seen.iter().filter(|seen| seen.opcode() == 8).count();
        if features == FEATURES {
            assert_eq!(all, 1);
            assert!(named(2, 0).into_iter().eq(0..=0x3ff));
        } else {
            assert_eq!(all, 0);
            assert!(named(2, 0).into_iter().eq(0..=0xffff), "firmware may have had them all");
            assert!(named(3, 32).into_iter().eq(0..=0xffff));
        }
    }
}

#[test]
fn more_commands_than_the_ring_holds_go_through_slow_hardware() {
    let memory = Memory::new();
    let fake = Fake::new(&memory);
    fake.behave(|how| how.slow = 5);
    start(&memory, &fake, config()).unwrap();
    let seen = fake.take();
    // 1024 devices, one command for everything, and one wait behind them.
    let waits = seen.iter().filter(|seen| seen.opcode() == 1).count();
    assert_eq!((seen.len(), waits), (1025 + 1, 1));
}

#[test]
fn translation_that_firmware_enabled_is_never_off() {
    let memory = Memory::new();
    let fake = Fake::new(&memory);
    fake.poke(CONTROL, ENABLE | 1 << 12 | 1 << 2 | 1 << 13 | 1 << 28);
    fake.poke(STATUS, 1 << 3 | 1 << 4);
    let iommu = start(&memory, &fake, config()).unwrap();
    let writes = fake.take_writes();
    let controls: Vec<_> = writes.iter().filter(|write| write.0 == CONTROL).collect();
    assert!(controls.iter().all(|&&(_, value)| value & ENABLE != 0), "{controls:x?}");
    // Firmware's queues are stopped before their place is written.
    assert_eq!(writes[0].0, CONTROL);
    assert_eq!(writes[0].1 & (1 << 12 | 1 << 2 | 1 << 13 | 1 << 28), 0);
    drop(iommu);
}

#[test]
fn what_firmware_enabled_besides_does_not_go_around_the_device_table() {
    // DualPprLogEn and DualEventLogEn: logs of firmware's. DevTblSegEn: tables of firmware's for
    // the upper devices. MarcEn: apertures that are not translated. VCmdEn and VIommuEn.
    let around: [u64; 5] = [0b11 << 30, 0b11 << 32, 0b111 << 34, 1 << 40, 0b11 << 52];
    let around = around.iter().fold(0, |all, bits| all | bits);
    // InvTimeOut, PassPW.
    let kept = 0b101 << 5 | 1 << 8;
    let memory = Memory::new();
    let fake = Fake::new(&memory);
    fake.poke(CONTROL, ENABLE | around | kept);
    let _iommu = start(&memory, &fake, config()).unwrap();
    let writes = fake.take_writes();
    assert_eq!(writes[0].0, CONTROL, "before it has the table");
    for (_, value) in writes.iter().filter(|write| write.0 == CONTROL) {
        assert_eq!(value & (around | kept | ENABLE), kept | ENABLE, "{value:#x}");
    }
}

#[test]
fn no_memory_for_any_structure_is_an_error_that_leaks_nothing() {
    for allowed in 0..=5 {
        let memory = Memory::new();
        let fake = Fake::new(&memory);
        memory.allowed.store(allowed, Ordering::Relaxed);
        let result = start(&memory, &fake, config());
        if allowed == 5 {
            result.unwrap();
        } else {
            assert!(matches!(result.unwrap_err(), Error::NoMemory(_)));
            assert_eq!(memory.live.load(Ordering::Relaxed), 0, "{allowed} allowed");
            assert!(fake.take_writes().is_empty(), "hardware was not told of anything");
        }
    }
}

#[test]
fn hardware_that_does_not_answer_is_an_error_in_bounded_time() {
    let memory = Memory::new();
    let fake = Fake::new(&memory);
    fake.behave(|how| how.gone = true);
    assert!(matches!(start(&memory, &fake, config()).unwrap_err(), Error::Hardware(_)));
    fake.behave(|how| how.gone = false);
    // The queues of firmware do not stop.
    fake.behave(|how| how.reads = [(STATUS, 1 << 4)].into());
    assert!(matches!(start(&memory, &fake, config()).unwrap_err(), Error::Hardware(_)));
    fake.behave(|how| how.reads.clear());
    fake.behave(|how| how.lost_waits = usize::MAX);
    assert!(matches!(start(&memory, &fake, config()).unwrap_err(), Error::Hardware(_)));
    fake.behave(|how| how.lost_waits = 0);
    start(&memory, &fake, config()).unwrap();
}

#[test]
fn what_the_hardware_does_not_have_is_refused() {
    let memory = Memory::new();
    let fake = Fake::new(&memory);
    let refused = |config| start(&memory, &fake, config).unwrap_err();
    let unsupported = |error| matches!(error, Error::Unsupported { .. });
    assert!(unsupported(refused(AmdViConfig::new(CAPABILITY, 0))));
    assert!(unsupported(refused(AmdViConfig::new(CAPABILITY, 48 << 15 | 60 << 8))));
    assert!(unsupported(refused(AmdViConfig::new(CAPABILITY, 127 << 15 | 48 << 8))));
    let is_config = |error| matches!(error, Error::Config { .. });
    assert!(is_config(refused(AmdViConfig { lg2_commands: 7, ..config() })));
    assert!(is_config(refused(AmdViConfig { lg2_events: 16, ..config() })));
    assert!(is_config(refused(AmdViConfig { last_domain: 2, ..config() })));
    fake.poke(0x30, FEATURES | 3 << 10);
    assert!(unsupported(refused(config())));
    // Without EFRSup the register is not looked at.
    let plain = AmdViConfig { capability: 0x0f, ..config() };
    let iommu = start(&memory, &fake, plain).unwrap();
    let features = *iommu.features();
    assert_eq!((features.extended, features.levels), (0, 4));
    let wide = AmdViConfig::new(0x0f, 64 << 15 | 52 << 8);
    let features = *start(&memory, &fake, wide).unwrap().features();
    assert_eq!((features.input_bits, features.output_bits), (48, 52));
}
