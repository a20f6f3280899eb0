//! Overflow, storms, refused commands, and what invalidations cost.

use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2, PageTable};
use dmaspan::iommu::{Domain, FaultReason, Invalidation, IommuOps as _, Scope, Tables as Walks};
use dmaspan::{PhysAddr, Prot};
use dmaspan_drivers::Handled;
use dmaspan_drivers::arm_smmu_v3::{OnFault, SmmuV3Config};

use crate::arm_smmu_v3::rig::{Rig, Tables, WRITERS, attach, map, unmap};

const RW: Prot = Prot::READ_WRITE.union(Prot::CACHE);
const IOVA: u64 = 0x4000_0000;

#[test]
fn a_storm_of_faults_overflows_and_the_queue_works_afterwards() {
    let config = SmmuV3Config { lg2_events: 4, ..Default::default() };
    let Some(mut rig) = Rig::with(config) else { return };
    let stream = rig.stream::<ArmLpaeS1<12>>(WRITERS[0]);
    attach(&stream, &rig.domain());
    let buffer = rig.page();
    for round in 0..3 {
        for n in 0..20 {
            assert!(!rig.write(0, IOVA + n * 0x1000, &buffer));
        }
        let (handled, reports) = rig.reported();
        let expected = Handled { reported: 16, overflowed: true, ..Default::default() };
        assert_eq!(handled, expected, "round {round}");
        let addresses: Vec<u64> = reports.iter().map(|report| report.iova.get()).collect();
        assert_eq!(addresses, (0..16).map(|n| IOVA + n * 0x1000).collect::<Vec<_>>());
        assert_eq!(rig.reported().0, Handled::default());
        rig.refused(0, IOVA, &buffer, FaultReason::Translation);
    }
}

#[test]
fn a_command_that_hardware_refuses_is_an_error_and_the_next_one_works() {
    let Some(mut rig) = Rig::new() else { return };
    let (domain, stream) = (rig.domain::<ArmLpaeS1<12>>(), rig.stream(WRITERS[0]));
    attach(&stream, &domain);
    let buffer = rig.page();
    map(&domain, IOVA, buffer.paddr(), 0x1000, RW);
    assert!(rig.write(0, IOVA, &buffer));
    let all = Invalidation { scope: Scope::All, leaf_sizes: 1 << 12, tables: Walks::Kept };
    for _ in 0..300 {
        rig.tap.set_edit(Some(Box::new(|command| {
            if command[0] & 0xff == 0x11 {
                command[0] |= 0xff;
            }
        })));
        let error = domain.ops().invalidate(&all).unwrap_err();
        assert_eq!(error.what, "the SMMU refused a command");
        rig.tap.set_edit(None);
        domain.ops().invalidate(&all).unwrap();
    }
    assert!(rig.write(0, IOVA, &buffer));
    unmap(&domain, IOVA, 0x1000, || ());
    rig.refused(0, IOVA, &buffer, FaultReason::Translation);
}

/// The commands for it.
fn unmapping_1_gib_of_pages<F: Tables>(format: F, rig: &Rig) -> Vec<Vec<u64>> {
    let ops = rig.smmu.ops(F::STAGE, OnFault::Terminate).unwrap();
    let table = PageTable::new(format, rig.tables.clone()).unwrap();
    let domain = std::sync::Arc::new(Domain::new(table, ops).unwrap());
    let stream = rig.stream::<F>(WRITERS[0]);
    attach(&stream, &domain);
    map(&domain, IOVA, PhysAddr::new(0x4000_0000), 1 << 30, RW);
    rig.tap.take();
    unmap(&domain, IOVA, 1 << 30, || ());
    rig.tap.take()
}

#[test]
fn unmapping_1_gib_of_pages_takes_one_command_and_a_sync() {
    let Some(rig) = Rig::new() else { return };
    let config = rig.smmu.stage1_config(12).unwrap();
    let config = ArmLpaeS1Config { page_sizes: Some(1 << 12), ..config };
    let format = ArmLpaeS1::<12>::new(config).unwrap();
    assert_eq!(unmapping_1_gib_of_pages(format, &rig).len(), 2);
    let config = rig.smmu.stage1_config(16).unwrap();
    let config = ArmLpaeS1Config { page_sizes: Some(1 << 16), ..config };
    let format = ArmLpaeS1::<16>::new(config).unwrap();
    assert_eq!(unmapping_1_gib_of_pages(format, &rig).len(), 2);
    let mut config = rig.smmu.stage2_config(12).unwrap();
    config.page_sizes = Some(1 << 12);
    let format = ArmLpaeS2::<12>::new(config).unwrap();
    assert_eq!(unmapping_1_gib_of_pages(format, &rig).len(), 2);
}

#[test]
fn ranges_of_any_length_are_forgotten_whole() {
    let Some(mut rig) = Rig::new() else { return };
    let (domain, stream) = (rig.domain::<ArmLpaeS2<12>>(), rig.stream(WRITERS[0]));
    attach(&stream, &domain);
    let buffer = rig.machine.ram().allocate(0x40_0000).unwrap();
    let target = rig.page();
    let mut rng = 0x9e37_79b9u64;
    for _ in 0..30 {
        rng = rng.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let (pages, first) = ((rng >> 33) % 1000 + 1, (rng >> 50) & 0xff);
        let iova = IOVA + first * 0x1000;
        map(&domain, iova, buffer.paddr(), pages * 0x1000, RW);
        let places = [0, pages / 3, pages / 2, pages - 1].map(|page| iova + page * 0x1000);
        for place in places {
            let paddr = buffer.paddr().wrapping_add(place - iova);
            rig.writers[0].write(place, paddr, 4).unwrap();
        }
        rig.tap.take();
        unmap(&domain, iova, pages * 0x1000, || ());
        assert!(rig.tap.take().len() <= 4, "{pages} pages");
        for place in places {
            rig.refused(0, place, &target, FaultReason::Translation);
        }
    }
}
