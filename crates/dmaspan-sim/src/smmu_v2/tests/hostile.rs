use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

#[test]
fn a_sync_may_never_complete() {
    let smmu = attached();
    let never = Behaviour { sync: SyncCompletion::Never, ..Default::default() };
    assert_eq!(read(&smmu, 0), Ok(0x10_0000));
    set(smmu.tables(), 0x3000, 0);
    smmu.set_behaviour(never);
    smmu.write32(cb(0, TLBIASID), 5);
    smmu.write32(cb(0, SYNC), 0);
    smmu.write32(GSYNC, 0);
    assert!((0..1000).all(|_| smmu.read32(cb(0, STATUS)) == 1 && smmu.read32(GSTATUS) == 1));
    assert_eq!(read(&smmu, 0), Ok(0x10_0000));
    // A sync that is begun again when the SMMU has recovered.
    smmu.set_behaviour(Behaviour::default());
    sync(&smmu);
    assert_eq!(read(&smmu, 0), Err(FaultKind::Translation));
}

#[test]
fn a_cleared_fault_comes_back_for_as_long_as_the_storm_lasts() {
    let smmu = attached();
    smmu.set_behaviour(Behaviour { storm: 3, ..Default::default() });
    assert_eq!(read(&smmu, 0x8000), Err(FaultKind::Translation));
    for left in (0..3).rev() {
        let before = smmu.read64(cb(0, FAR));
        smmu.write32(cb(0, FSR), u32::MAX);
        assert_eq!((smmu.read32(cb(0, FSR)) & 2, smmu.behaviour().storm), (2, left));
        assert_ne!(smmu.read64(cb(0, FAR)), before);
        // A write that clears nothing is no part of it.
        smmu.write32(cb(0, FSR), 0);
    }
    smmu.write32(cb(0, FSR), u32::MAX);
    assert!(!smmu.context_irq(0));

    smmu.set_behaviour(Behaviour { storm: 1, ..Default::default() });
    assert!(smmu.access(9, Iova::new(0), Access::Read).is_err());
    smmu.write32(GFSR, 2);
    assert_eq!(smmu.read32(GFSR), 2);
    smmu.write32(GFSR, 2);
    assert_eq!(smmu.read32(GFSR), 0);
}

#[test]
fn any_fault_can_be_raised() {
    let smmu = attached();
    // UUT, and a reserved bit; TLBMCF.
    smmu.raise_global(1 << 8 | 1 << 20);
    assert_eq!(smmu.read32(GFSR), 1 << 8);
    assert!(smmu.global_irq());
    smmu.raise_context(0, 1 << 5 | 1 << 20);
    smmu.raise_context(99, 1 << 5);
    assert_eq!(smmu.read32(cb(0, FSR)), 1 << 5);
    assert!(smmu.context_irq(0));
}

#[test]
fn reads_may_be_ones_or_random() {
    let smmu = attached();
    smmu.set_behaviour(Behaviour { reads: Reads::Ones, ..Default::default() });
    assert_eq!((smmu.read32(0x20), smmu.read64(cb(0, TTBR0))), (u32::MAX, u64::MAX));
    smmu.set_behaviour(Behaviour { reads: Reads::Random, ..Default::default() });
    assert_ne!(smmu.read32(0x20), smmu.read32(0x20));
    assert_ne!(smmu.read64(cb(0, TTBR0)), smmu.read64(cb(0, TTBR0)));
    // Writes and translations are as ever.
    assert_eq!(read(&smmu, 0), Ok(0x10_0000));
}

/// Any registers, any accesses: nothing panics, and what does not translate is refused.
#[test]
fn random_registers_and_accesses_do_no_harm() {
    let configs = [
        SmmuConfig::default(),
        SmmuConfig { streams: StreamMatchSupport::Indexing, vmid16: true, ..Default::default() },
        SmmuConfig { stages: Stages::Two, stage2_banks: 16, ..Default::default() },
        SmmuConfig { stages: Stages::One, extended_ids: true, ..Default::default() },
    ];
    for (seed, config) in (0..40).flat_map(|seed| configs.map(|config| (seed, config))) {
        let image = TableImage::new();
        tables(&image, 0x1000);
        let smmu = Smmu::with_reset(config, image, ResetValues::Random(seed)).unwrap();
        smmu.write32(CR0, 0);
        let mut rng = crate::rng::Rng::new(seed);
        for _ in 0..500 {
            let (offset, value) = (rng.below(0x2_2000), rng.next());
            let aligned = offset & !0b11;
            match rng.below(6) {
                0 => smmu.write64(offset, value),
                1 => smmu.write32(aligned, halves(value)[0]),
                2 => drop(smmu.read32(aligned)),
                3 => drop(smmu.read64(offset & !0b111)),
                // Few values, that banks are reached.
                4 => smmu.write32(0xc00 + offset % 48 / 4 * 4, halves(value)[0] & 0xf),
                _ => drop(smmu.access(
                    spec::low16_of_u64(value) & 0x3f,
                    Iova::new(value),
                    Access::Read,
                )),
            }
        }
        let counters = smmu.counters();
        assert!(counters.undefined_reads > 0 && counters.undefined_writes > 0);
    }
}

#[test]
fn devices_and_drivers_use_it_at_once() {
    let smmu = attached();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let seen = smmu.access_with(1, Iova::new(0), Access::Read, |hit| hit.paddr);
                    let paddr = seen.unwrap().get();
                    assert!(paddr == 0x10_0000 || paddr == 0x55_0000);
                }
            });
        }
        for turn in 0..200 {
            let frame = if turn % 2 == 0 { 0x55_0000 } else { 0x10_0000 };
            set(smmu.tables(), 0x3000, frame | PAGE);
            smmu.write64(cb(0, TLBIVA), 5 << 48);
            sync(&smmu);
            assert_eq!(paddr(&smmu, 1, 0, Access::Read), Ok(frame));
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(smmu.counters().commands.by_va, 200);
}
