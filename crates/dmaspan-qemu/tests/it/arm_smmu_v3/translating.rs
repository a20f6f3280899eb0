//! Every stage with every granule.

use std::sync::Arc;

use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2, Half, PageTable};
use dmaspan::iommu::{Domain, FaultAccess, FaultReason};
use dmaspan::{PhysAddr, Prot, lg2};
use dmaspan_drivers::arm_smmu_v3::{OnFault, Stage};
use dmaspan_qemu::Pci;
use dmaspan_sim::bus::Bus as _;

use crate::arm_smmu_v3::rig::{Rig, Tables, WRITERS, attach, granule, map, unmap};

const RW: Prot = Prot::READ_WRITE.union(Prot::CACHE);
const R: Prot = Prot::READ.union(Prot::CACHE);

fn a_page_lands_faults_and_is_forgotten<F: Tables>() {
    let Some(mut rig) = Rig::new() else { return };
    let domain = rig.domain::<F>();
    let stream = rig.stream::<F>(WRITERS[0]);
    attach(&stream, &domain);
    let buffer = rig.page();
    let page = granule::<F>();
    let iova = 0x12_3456_0000;

    map(&domain, iova, buffer.paddr(), page, RW);
    assert!(rig.write(0, iova, &buffer));
    assert_eq!(rig.reported().0.reported, 0);
    for unmapped in [iova - 4, iova + page, 0, lg2::mask(40) - 3] {
        rig.refused(0, unmapped, &buffer, FaultReason::Translation);
    }
    // Beyond the tables. The model does not tell of an input of stage 2 that is too large.
    let beyond = domain.geometry().aperture.last().get() + 1;
    match F::STAGE {
        Stage::First => rig.refused(0, beyond, &buffer, FaultReason::Translation),
        Stage::Second => assert!(!rig.write(0, beyond, &buffer)),
    }
    rig.reported();

    // Read-only, and then nothing.
    let other = rig.page();
    map(&domain, iova + page, other.paddr(), page, R);
    rig.refused(0, iova + page, &other, FaultReason::Permission);
    assert!(rig.write(0, iova, &buffer));
    // The model has an IOTLB: what it has seen is used until it is told.
    unmap(&domain, iova, page, || assert!(rig.write(0, iova, &buffer), "there is no IOTLB"));
    rig.refused(0, iova, &buffer, FaultReason::Translation);
    unmap(&domain, iova + page, page, || ());
    rig.refused(0, iova + page, &other, FaultReason::Translation);
}

fn leaves_of_all_sizes_are_honoured<F: Tables>(sizes: &[u64]) {
    let Some(mut rig) = Rig::new() else { return };
    let domain = rig.domain::<F>();
    let stream = rig.stream::<F>(WRITERS[0]);
    attach(&stream, &domain);
    let buffer = rig.page();
    for &size in sizes {
        assert_eq!(domain.geometry().page_sizes & size, size);
        // As much of the machine's memory as one leaf has, around the buffer.
        let start = buffer.paddr().get() & !(size - 1);
        let iova = 0x100_0000_0000 + (start & (size - 1));
        map(&domain, iova, PhysAddr::new(start), size, RW);
        let at = iova + (buffer.paddr().get() - start);
        assert!(rig.write(0, at, &buffer), "{size:#x}");
        // Its last bytes reach the last bytes.
        let last = PhysAddr::new(start + size - 4);
        rig.writers[0].write(iova + size - 4, last, 4).unwrap();
        rig.refused(0, iova + size, &buffer, FaultReason::Translation);
        rig.tap.take();
        let iotlb = |rig: &mut Rig| assert!(rig.write(0, at, &buffer), "{size:#x}");
        unmap(&domain, iova, size, || iotlb(&mut rig));
        let commands = rig.tap.take();
        assert!(commands.len() == 2, "a leaf of {size:#x} by {commands:x?}");
        rig.refused(0, at, &buffer, FaultReason::Translation);
        rig.refused(0, iova + size - 4, &buffer, FaultReason::Translation);
    }
}

fn a_copy_goes_through_scattered_pages<F: Tables>() {
    let Some(mut rig) = Rig::new() else { return };
    let domain = rig.domain::<F>();
    let stream = rig.stream::<F>(5);
    attach(&stream, &domain);
    let page = granule::<F>();
    let [first, second, third] = [(); 3].map(|()| rig.page());
    let (from, to) = (0x8000_0000, 0x9000_0000);
    map(&domain, from, second.paddr(), page, R);
    map(&domain, from + page, first.paddr(), page, R);
    map(&domain, to, third.paddr(), page, RW);
    let text: Vec<u8> = (0..=255).collect();
    let ram = rig.machine.ram().clone();
    ram.write(second.paddr().wrapping_add(page - 100), &text[..100]).unwrap();
    ram.write(first.paddr(), &text[100..]).unwrap();
    rig.copier.read(from + page - 100, 256);
    rig.copier.write(to + 12, 256);
    let mut copied = vec![0; 256];
    ram.read(third.paddr().wrapping_add(12), &mut copied).unwrap();
    assert_eq!(copied, text);
    assert_eq!(rig.reported().0.reported, 0);
    // A read that is refused is reported as one, where it begins.
    rig.copier.read(from + 2 * page + 8, 4);
    let (_, reports) = rig.reported();
    let [report] = reports[..] else { panic!("{reports:?}") };
    let expected = (Pci::requester(5), from + 2 * page + 8, FaultAccess::Read);
    assert_eq!((report.stream, report.iova.get(), report.access), expected);
    assert_eq!(report.reason, FaultReason::Translation);
}

fn every_way<F: Tables>(sizes: &[u64]) {
    a_page_lands_faults_and_is_forgotten::<F>();
    leaves_of_all_sizes_are_honoured::<F>(sizes);
    a_copy_goes_through_scattered_pages::<F>();
}

const K4: [u64; 3] = [4 << 10, 2 << 20, 1 << 30];
const K16: [u64; 2] = [16 << 10, 32 << 20];
const K64: [u64; 2] = [64 << 10, 512 << 20];

#[test]
fn stage_1_with_4k() {
    every_way::<ArmLpaeS1<12>>(&K4);
}

#[test]
fn stage_1_with_16k() {
    every_way::<ArmLpaeS1<14>>(&K16);
}

#[test]
fn stage_1_with_64k() {
    every_way::<ArmLpaeS1<16>>(&K64);
}

#[test]
fn stage_2_with_4k() {
    every_way::<ArmLpaeS2<12>>(&K4);
}

#[test]
fn stage_2_with_16k() {
    every_way::<ArmLpaeS2<14>>(&K16);
}

#[test]
fn stage_2_with_64k() {
    every_way::<ArmLpaeS2<16>>(&K64);
}

#[test]
fn the_upper_half_is_translated_by_its_own_tables() {
    let Some(mut rig) = Rig::new() else { return };
    let config = rig.smmu.stage1_config(12).unwrap();
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config { half: Half::Upper, ..config }).unwrap();
    let ops = rig.smmu.ops(Stage::First, OnFault::Terminate).unwrap();
    let table = PageTable::new(format, rig.tables.clone()).unwrap();
    let domain = Arc::new(Domain::new(table, ops).unwrap());
    let stream = rig.stream::<ArmLpaeS1<12>>(WRITERS[0]);
    attach(&stream, &domain);
    let buffer = rig.page();
    let iova = 0xffff_8000_1234_5000;
    map(&domain, iova, buffer.paddr(), 0x1000, RW);
    assert!(rig.write(0, iova, &buffer));
    rig.refused(0, iova + 0x1000, &buffer, FaultReason::Translation);
    // The lower half has no tables.
    rig.refused(0, 0x1234_5000, &buffer, FaultReason::Translation);
    unmap(&domain, iova, 0x1000, || assert!(rig.write(0, iova, &buffer)));
    rig.refused(0, iova, &buffer, FaultReason::Translation);
}

#[test]
fn stage_2_grants_writes_without_reads() {
    let Some(mut rig) = Rig::new() else { return };
    let domain = rig.domain::<ArmLpaeS2<12>>();
    let stream = rig.stream::<ArmLpaeS2<12>>(5);
    attach(&stream, &domain);
    let (from, to) = (rig.page(), rig.page());
    from.set_word(0, 0x1234);
    map(&domain, 0x1000, from.paddr(), 0x1000, R);
    map(&domain, 0x2000, to.paddr(), 0x1000, Prot::WRITE.union(Prot::CACHE));
    // Before the write: the model does not speak of reads through what it has in its IOTLB.
    rig.copier.read(0x2000, 4);
    let (_, reports) = rig.reported();
    let [report] = reports[..] else { panic!("{reports:?}") };
    assert_eq!((report.access, report.reason), (FaultAccess::Read, FaultReason::Permission));
    rig.copier.read(0x1000, 8);
    rig.copier.write(0x2000, 8);
    assert_eq!(to.word(0), 0x1234);
    assert_eq!(rig.reported().0.reported, 0);
}
