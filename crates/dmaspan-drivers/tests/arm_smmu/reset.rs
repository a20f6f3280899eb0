//! What the driver makes of hardware as it finds it.

use std::sync::Arc;

use dmaspan::Prot;
use dmaspan::io_pgtable::ArmLpaeS1;
use dmaspan_drivers::Handled;
use dmaspan_drivers::arm_smmu::SmmuV2Config;
use dmaspan_sim::smmu_v2::{ResetValues, Smmu, SmmuConfig, StreamMapping};

use super::host::LeftOut;
use super::rig::{Rig, arena, map, target};

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
        let streams = if seed % 4 == 3 { StreamMapping::Indexing } else { StreamMapping::Matching };
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
