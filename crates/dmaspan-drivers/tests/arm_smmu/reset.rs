//! The driver takes over hardware in whatever state it finds it.

use std::sync::Arc;

use dmaspan::io_pgtable::ArmLpaeS1;
use dmaspan::{Iova, Prot};
use dmaspan_drivers::arm_smmu::{SmmuV2, SmmuV2Config};
use dmaspan_drivers::{Error, Handled};
use dmaspan_sim::smmu_v2::{
    Behaviour, ResetValues, Smmu, SmmuConfig, StreamMatchSupport, SyncCompletion,
};
use dmaspan_sim::walker::Access;

use super::host::{Hardware, LeftOut, Registers, TestHost};
use super::rig::{Driver, Rig, arena, map, target};

type S1 = ArmLpaeS1<12>;

/// All streams that there are, or a sample of many.
fn streams() -> impl Iterator<Item = u16> {
    (0..0x200).chain((0..=u16::MAX).step_by(97)).chain([0x7fff, u16::MAX])
}

fn blocked(rig: &Rig, what: &str) {
    for stream in streams() {
        for iova in [0, 0x8000_0000, 0xffff_f000] {
            assert_eq!(rig.reads(stream, iova), None, "{what}: stream {stream:#x}");
        }
    }
    assert_eq!(rig.hardware.counters().bypassed, 0, "{what}");
}

#[test]
fn nothing_passes_whatever_was_in_the_registers() {
    for seed in 0..40u64 {
        let streams =
            if seed % 4 == 3 { StreamMatchSupport::Indexing } else { StreamMatchSupport::Matching };
        let hardware = SmmuConfig {
            streams,
            stream_id_bits: if seed % 4 == 3 { 7 } else { 15 },
            mapping_groups: 128,
            extended_ids: seed % 2 == 1,
            vmid16: seed % 3 == 1,
            ..SmmuConfig::default()
        };
        let tables = arena();
        let smmu = Smmu::with_reset(hardware, tables.clone(), ResetValues::Random(seed)).unwrap();
        let hardware = Arc::new(smmu);
        // Firmware enabled it, or left it as it was.
        if seed % 2 == 0 {
            hardware.write32(0, u32::try_from(seed & 0xff).unwrap() << 4);
        }
        let rig = Rig::over(hardware, tables, SmmuV2Config::new(), LeftOut::Nothing);
        blocked(&rig, &format!("seed {seed}"));
        rig.driver.handle_faults().unwrap();
        assert_eq!(rig.driver.handle_faults(), Ok(Handled::default()), "seed {seed}");
        // It works, too, and leads to its tables alone.
        let (stream, domain) = (rig.stream::<S1>(0x17), rig.domain::<S1>());
        stream.attach(target(&domain)).unwrap();
        map(&domain, 0, 0x8000_0000, 0x1000, Prot::READ);
        assert_eq!(rig.reads(0x17, 0x10), Some(0x8000_0010), "seed {seed}");
        assert_eq!(rig.reads(0x18, 0x10), None, "seed {seed}");
        assert_eq!(rig.hardware.counters().misconfigured, 0);
    }
}

#[test]
fn everything_stays_blocked_when_the_driver_is_gone() {
    let rig = Rig::new();
    let (stream, domain) = (rig.stream::<S1>(1), rig.domain::<S1>());
    stream.attach(target(&domain)).unwrap();
    drop((stream, domain));
    let Rig { hardware, registers, driver, tables, ram } = rig;
    assert_eq!(Arc::strong_count(&driver), 1);
    drop(driver);
    for stream in streams() {
        assert!(
            hardware
                .access(stream, dmaspan::Iova::new(0), dmaspan_sim::walker::Access::Read)
                .is_err()
        );
    }
    // Another one can have it.
    drop((registers, ram));
    let rig = Rig::over(hardware, tables, SmmuV2Config::new(), LeftOut::Nothing);
    let (stream, domain) = (rig.stream::<S1>(1), rig.domain::<S1>());
    map(&domain, 0, 0x8000_0000, 0x1000, Prot::READ);
    stream.attach(target(&domain)).unwrap();
    assert_eq!(rig.reads(1, 0), Some(0x8000_0000));
}

#[test]
fn all_is_blocked_before_accesses_are_decided_about() {
    // While CLIENTPD is set everything passes, and what passes then is blocked by the one write
    // that clears it: no stream is ever translated by what firmware left.
    let tables = arena();
    let smmu =
        Smmu::with_reset(SmmuConfig::default(), tables.clone(), ResetValues::Random(3)).unwrap();
    let rig = Rig::over(Arc::new(smmu), tables, SmmuV2Config::new(), LeftOut::Nothing);
    assert_eq!(rig.hardware.read32(0) & 1, 0);
    assert_eq!(rig.hardware.read32(0) >> 10 & 1, 1);
    for entry in 0..48 {
        assert_eq!(rig.hardware.read32(0xc00 + 4 * entry) >> 16 & 0b11, 0b10, "S2CR{entry}");
        assert_eq!(rig.hardware.read32(0x800 + 4 * entry), 0, "SMR{entry}");
    }
    // No bank has tables.
    for bank in 16..32 {
        assert_eq!(rig.hardware.read32(bank << 12) & 1, 0, "SCTLR{bank}");
    }
}

/// Hardware of which firmware blocks stream 5 and lets those pass that have no entry; its stream
/// IDs may have 16 bits.
fn with_firmware(stream_ids: u32) -> Arc<Hardware> {
    let config = SmmuConfig { extended_ids: true, ..SmmuConfig::default() };
    let hardware = Smmu::new(config, arena()).unwrap();
    let extended = stream_ids == 16;
    let exid_valid = if extended { 1 << 10 } else { 0 };
    hardware.write32(0, if extended { 1 << 3 } else { 0 });
    hardware.write32(0x800, if extended { 5 } else { 1 << 31 | 5 });
    hardware.write32(0xc00, 0b10 << 16 | exid_valid);
    assert!(hardware.access(5, Iova::new(0x1000), Access::Read).is_err());
    assert!(hardware.access(6, Iova::new(0x1000), Access::Read).is_ok());
    Arc::new(hardware)
}

fn make(registers: &Registers) -> Result<Arc<Driver>, Error> {
    #[expect(unsafe_code, reason = "the promise to drive the hardware alone")]
    // SAFETY: the model is used by this driver alone.
    unsafe {
        SmmuV2::new(registers.clone(), TestHost, SmmuV2Config::new())
    }
}

#[test]
fn what_firmware_blocked_is_blocked_while_the_driver_takes_over() {
    for stream_ids in [15, 16] {
        let hardware = with_firmware(stream_ids);
        let registers = Registers::new(Arc::clone(&hardware), LeftOut::Nothing);
        *registers.watch.lock() = Some(Box::new(move |hardware, offset| {
            let passed = hardware.access(5, Iova::new(0x1000), Access::Read).is_ok();
            assert!(!passed, "{stream_ids} bits: after the write of {offset:#x}");
        }));
        make(&registers).unwrap();
    }
}

#[test]
fn nothing_passes_where_the_driver_cannot_take_over() {
    for stream_ids in [15, 16] {
        let hardware = with_firmware(stream_ids);
        hardware.set_behaviour(Behaviour { sync: SyncCompletion::Never, ..Default::default() });
        let registers = Registers::new(Arc::clone(&hardware), LeftOut::Nothing);
        assert!(matches!(make(&registers), Err(Error::Hardware(_))));
        for stream in streams() {
            let passed = hardware.access(stream, Iova::new(0x1000), Access::Read).is_ok();
            assert!(!passed, "{stream_ids} bits: stream {stream:#x}");
        }
    }
}

#[test]
fn banks_of_firmware_translate_until_nothing_is_under_way_through_them() {
    let hardware = with_firmware(15);
    let registers = Registers::new(Arc::clone(&hardware), LeftOut::Nothing);
    let first_bank = 16u64;
    *registers.watch.lock() = Some(Box::new(move |hardware, offset| {
        // SCTLR: without its M an access that has found its bank passes.
        if offset >> 12 >= first_bank && offset & 0xfff == 0 {
            assert_eq!(hardware.counters().commands.all, 1);
            assert_eq!(hardware.counters().global_syncs, 1);
            assert_eq!(hardware.pending_invalidations(), 0);
        }
    }));
    make(&registers).unwrap();
}
