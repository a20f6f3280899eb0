//! A stream's reach, and the moments when it changes.

use dmaspan::Prot;
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS2};
use dmaspan::iommu::{AllMemory, Attachment, FaultReason, ReservedRegions, Target};
use dmaspan_drivers::arm_smmu_v3::{OnFault, SmmuV3Config, Stage, StreamTable};
use dmaspan_drivers::{Error, Handled};
use dmaspan_qemu::Pci;

use crate::arm_smmu_v3::rig::{
    DomainOf, Rig, Smmu, Tables, WRITERS, attach, driver, machine, map, tap,
};

type S1 = ArmLpaeS1<12>;
type S2 = ArmLpaeS2<12>;
const RW: Prot = Prot::READ_WRITE.union(Prot::CACHE);
const IOVA: u64 = 0x1234_0000;

fn linear() -> SmmuV3Config {
    SmmuV3Config { stream_table: StreamTable::Linear, ..Default::default() }
}

fn two_levels() -> SmmuV3Config {
    SmmuV3Config { stream_table: StreamTable::TwoLevels, ..Default::default() }
}

/// A write that is refused and that nobody is told of.
fn refused_silently(rig: &mut Rig, writer: usize, iova: u64) {
    let buffer = rig.page();
    assert!(!rig.write(writer, iova, &buffer));
    assert_eq!(rig.reported().0.reported, 0);
}

#[test]
fn a_device_that_nobody_attached_does_no_dma() {
    // Hardware speaks of streams that have no entry, not of those whose entry blocks them.
    for (config, unclaimed) in [(linear(), 0), (two_levels(), 2)] {
        let Some(mut rig) = Rig::with(config) else { return };
        let buffer = rig.page();
        let paddr = buffer.paddr().get();
        assert!(!rig.write(0, paddr, &buffer));
        assert!(!rig.write(0, IOVA, &buffer));
        assert_eq!(rig.reported().0, Handled { unclaimed, ..Default::default() });
        let stream = rig.stream::<S1>(WRITERS[0]);
        refused_silently(&mut rig, 0, paddr);
        // Only what is attached.
        stream.attach(Target::Paging(dmaspan::iommu::Prepared::new(rig.domain::<S1>()))).unwrap();
        rig.refused(0, IOVA, &buffer, FaultReason::Translation);
        assert!(!rig.write(1, paddr, &buffer));
    }
}

fn switched<F: Tables>(config: SmmuV3Config) {
    let Some(mut rig) = Rig::with(config) else { return };
    let (first, second) = (rig.domain::<F>(), rig.domain::<F>());
    let [one, other] = [(); 2].map(|()| rig.page());
    map(&first, IOVA, one.paddr(), 0x1_0000, RW);
    map(&second, IOVA, other.paddr(), 0x1_0000, RW);
    map(&second, IOVA + 0x10_0000, other.paddr(), 0x1_0000, RW);
    let stream = rig.stream::<F>(WRITERS[0]);
    for _ in 0..2 {
        attach(&stream, &first);
        assert!(rig.write(0, IOVA, &one));
        rig.refused(0, IOVA + 0x10_0000, &other, FaultReason::Translation);
        attach(&stream, &second);
        assert!(rig.write(0, IOVA, &other));
        assert!(rig.write(0, IOVA + 0x10_0000, &other));
    }
    stream.detach().unwrap();
    refused_silently(&mut rig, 0, IOVA);
    // The same IOVA leads a second device elsewhere.
    let neighbour = rig.stream::<F>(WRITERS[1]);
    attach(&stream, &first);
    attach(&neighbour, &second);
    assert!(rig.write(0, IOVA, &one));
    assert!(rig.write(1, IOVA, &other));
    rig.refused(0, IOVA + 0x10_0000, &other, FaultReason::Translation);
    assert!(rig.write(1, IOVA + 0x10_0000, &other));
    drop(stream);
    refused_silently(&mut rig, 0, IOVA);
    assert!(rig.write(1, IOVA, &other));
}

#[test]
fn switching_takes_effect_and_domains_are_apart() {
    for config in [linear(), two_levels()] {
        switched::<S1>(config);
        switched::<ArmLpaeS1<16>>(config);
        switched::<S2>(config);
        switched::<ArmLpaeS2<14>>(config);
    }
}

#[test]
fn streams_of_one_domain_share_it_and_its_invalidations() {
    let Some(mut rig) = Rig::new() else { return };
    let domain = rig.domain::<S2>();
    let streams = WRITERS.map(|slot| rig.stream::<S2>(slot));
    streams.iter().for_each(|stream| attach(stream, &domain));
    let buffer = rig.page();
    map(&domain, IOVA, buffer.paddr(), 0x1000, RW);
    for writer in 0..2 {
        assert!(rig.write(writer, IOVA, &buffer));
    }
    crate::arm_smmu_v3::rig::unmap(&domain, IOVA, 0x1000, || ());
    for writer in 0..2 {
        rig.refused(writer, IOVA, &buffer, FaultReason::Translation);
    }
}

#[test]
fn a_stream_changes_its_stage_and_passes() {
    let Some(mut rig) = Rig::new() else { return };
    let buffer = rig.page();
    let paddr = buffer.paddr().get();
    for _ in 0..2 {
        let stream = rig.stream::<S1>(WRITERS[0]);
        let domain = rig.domain::<S1>();
        map(&domain, IOVA, buffer.paddr(), 0x1000, RW);
        attach(&stream, &domain);
        assert!(rig.write(0, IOVA, &buffer));
        #[expect(unsafe_code, reason = "the device is the test's")]
        // SAFETY: the device writes where the test says.
        let all = unsafe { AllMemory::promise() };
        stream.replace(Target::Identity(all)).unwrap();
        assert!(rig.write(0, paddr, &buffer));
        attach(&stream, &domain);
        rig.refused(0, paddr, &buffer, FaultReason::Translation);
        assert!(rig.write(0, IOVA, &buffer));
        drop(stream);
        let stream = rig.stream::<S2>(WRITERS[0]);
        refused_silently(&mut rig, 0, IOVA);
        let domain = rig.domain::<S2>();
        map(&domain, IOVA, buffer.paddr(), 0x1000, RW);
        attach(&stream, &domain);
        assert!(rig.write(0, IOVA, &buffer));
    }
}

#[test]
fn a_domain_that_goes_takes_its_streams_with_it() {
    let Some(mut rig) = Rig::new() else { return };
    let buffer = rig.page();
    let id = Pci::requester(WRITERS[0]);
    let port = rig.smmu.stream::<DomainOf<S1>>(id, ReservedRegions::new()).unwrap();
    let domain = rig.domain::<S1>();
    map(&domain, IOVA, buffer.paddr(), 0x1000, RW);
    dmaspan::iommu::Port::translate(&port, &domain).unwrap();
    assert!(rig.write(0, IOVA, &buffer));
    // The port keeps no domain; an attachment would.
    drop(domain);
    assert!(!rig.write(0, IOVA, &buffer));
    drop(port);
    assert!(!rig.write(0, IOVA, &buffer));
}

#[test]
fn a_driver_that_goes_leaves_everything_blocked_and_another_starts() {
    let Some(mut rig) = Rig::new() else { return };
    let buffer = rig.page();
    let paddr = buffer.paddr().get();
    let stream = rig.stream::<S1>(WRITERS[0]);
    #[expect(unsafe_code, reason = "the device is the test's")]
    // SAFETY: the device writes where the test says.
    let all = unsafe { AllMemory::promise() };
    stream.attach(Target::Identity(all)).unwrap();
    assert!(rig.write(0, paddr, &buffer));
    drop(stream);
    let Rig { smmu, tap, machine, mut writers, .. } = rig;
    let used = machine.ram().allocate(0x1000).unwrap().paddr();
    drop(smmu);
    assert!(writers[0].write(paddr, buffer.paddr(), 4).is_err());
    let smmu = driver(&machine, &tap, linear());
    assert!(writers[0].write(paddr, buffer.paddr(), 4).is_err());
    drop(smmu);
    assert!(machine.ram().allocate(0x1000).unwrap().paddr() <= used, "the driver leaks");
}

#[test]
fn what_firmware_left_open_is_closed() {
    let Some((machine, mut writers, _)) = machine("virt,iommu=smmuv3") else { return };
    let buffer = machine.ram().allocate(0x1000).unwrap();
    let paddr = buffer.paddr();
    assert!(writers[0].write(paddr.get(), paddr, 4).is_ok(), "an SMMU lets all pass from reset");
    let smmu = driver(&machine, &tap(&machine), SmmuV3Config::default());
    assert!(writers[0].write(paddr.get(), paddr, 4).is_err());
    drop(smmu);
    assert!(writers[0].write(paddr.get(), paddr, 4).is_err());
}

#[test]
fn domains_that_do_not_fit_are_refused() {
    let Some(rig) = Rig::new() else { return };
    let Some(other) = Rig::new() else { return };
    let stream = rig.stream::<S1>(WRITERS[0]);
    let prepared = |domain| Target::Paging(dmaspan::iommu::Prepared::new(domain));
    stream.attach(prepared(other.domain::<S1>())).unwrap_err();
    let id = Pci::requester(WRITERS[0]);
    let again = rig.smmu.stream::<DomainOf<S1>>(id, ReservedRegions::new());
    assert_eq!(again.unwrap_err(), Error::Claimed { stream: id });
    let beyond = rig.smmu.stream::<DomainOf<S1>>(0x1_0000, ReservedRegions::new());
    assert_eq!(beyond.unwrap_err(), Error::NoStream { stream: 0x1_0000, last: 0xffff });
    assert!(rig.smmu.ops(Stage::First, OnFault::Stall).is_err(), "the model cannot stall");
    drop(stream);
    let port = rig.smmu.stream::<DomainOf<S1>>(id, ReservedRegions::new()).unwrap();
    Attachment::new(port).unwrap();
}

#[test]
fn an_older_model_has_stage_1_alone() {
    let Some((machine, mut writers, _)) = machine("virt-8.2,iommu=smmuv3") else { return };
    let smmu: std::sync::Arc<Smmu> = driver(&machine, &tap(&machine), SmmuV3Config::default());
    assert!(smmu.features().stage1 && !smmu.features().stage2);
    assert!(matches!(smmu.ops(Stage::Second, OnFault::Terminate), Err(Error::Unsupported { .. })));
    assert!(matches!(smmu.stage2_config(12), Err(Error::Unsupported { .. })));
    let buffer = machine.ram().allocate(0x1000).unwrap();
    let tables = machine.ram().arena(4 << 20).unwrap();
    let table = dmaspan::io_pgtable::PageTable::new(S1::of(&smmu), tables).unwrap();
    let ops = smmu.ops(Stage::First, OnFault::Terminate).unwrap();
    let domain = std::sync::Arc::new(dmaspan::iommu::Domain::new(table, ops).unwrap());
    let stream =
        Attachment::new(smmu.stream(Pci::requester(WRITERS[0]), ReservedRegions::new()).unwrap())
            .unwrap();
    attach(&stream, &domain);
    map(&domain, IOVA, buffer.paddr(), 0x1000, RW);
    writers[0].write(IOVA, buffer.paddr(), 4).unwrap();
    let iotlb = || assert!(writers[0].write(IOVA, buffer.paddr(), 4).is_ok());
    crate::arm_smmu_v3::rig::unmap(&domain, IOVA, 0x1000, iotlb);
    assert!(writers[0].write(IOVA, buffer.paddr(), 4).is_err());
}

#[test]
fn features_are_those_of_the_model() {
    let Some(rig) = Rig::new() else { return };
    let features = rig.smmu.features();
    assert!(features.stage1 && features.stage2 && features.two_levels);
    assert!(features.range_invalidation);
    assert_eq!(features.granules, 1 << 12 | 1 << 14 | 1 << 16);
    assert_eq!((features.output_bits, features.input_bits), (44, 48));
    assert_eq!((features.asid_bits, features.vmid_bits, features.stream_bits), (16, 16, 16));
}
