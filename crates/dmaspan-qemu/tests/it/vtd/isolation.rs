//! The reach of each device: devices apart, domains switched, the driver's own beginning and end.

use dmaspan::iommu::{AllMemory, Attachment, FaultReason, Port as _, ReservedRegions, Target};
use dmaspan::{Iova, IovaRange};
use dmaspan_drivers::vtd::{Vtd, VtdConfig};
use dmaspan_drivers::{Error, Mmio as _};
use dmaspan_qemu::{Pci, QemuHost, TestDev};

use crate::vtd::rig::{
    Kind, RW, Rig, machine, machine_with, map, of_every_kind, reaches, to, unmap,
};

of_every_kind!(
    two_devices_in_two_domains_do_not_reach_each_others_memory,
    a_domain_goes_on_for_the_streams_that_stay,
    a_switch_takes_effect_at_once,
    a_switch_without_the_invalidation_of_entries_is_found_out,
    what_may_pass_passes_until_it_is_detached,
    whatever_was_translated_before_is_blocked_by_a_new_driver,
    numbers_of_domains_come_back,
    a_write_where_interrupts_are_reaches_no_memory_and_no_driver_hears_of_it,
);

const IOVA: u64 = 0x7654_3000;

fn two_devices_in_two_domains_do_not_reach_each_others_memory<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let (first, heard) = rig.stream::<K::Format>(1);
    let (second, other) = rig.stream::<K::Format>(2);
    let domains = [rig.domain::<K>(), rig.domain::<K>()];
    let buffers = [rig.buffer(0x1000), rig.buffer(0x1000)];
    first.attach(to(&domains[0])).expect("it is attached");
    second.attach(to(&domains[1])).expect("it is attached");
    map(&domains[0], IOVA, buffers[0].span(), RW);
    map(&domains[1], IOVA, buffers[1].span(), RW);
    map(&domains[1], IOVA + 0x1000, buffers[1].span(), RW);
    for device in 0..2 {
        let own = &buffers[device];
        let foreign = &buffers[1 - device];
        foreign.set_word(0, 7);
        assert!(reaches(&mut rig.devices[device], IOVA, own));
        assert_eq!(foreign.word(0), 7);
    }
    assert!(!reaches(&mut rig.devices[0], IOVA + 0x1000, &buffers[1]));
    assert!(reaches(&mut rig.devices[1], IOVA + 0x1000, &buffers[1]));
    assert_eq!(rig.faults(&heard).len(), 1);
    assert_eq!(rig.faults(&other), []);
    // One forgets, the other goes on, by what it has cached.
    unmap(&domains[0], IOVA, 0x1000);
    assert!(!reaches(&mut rig.devices[0], IOVA, &buffers[0]));
    assert!(reaches(&mut rig.devices[1], IOVA, &buffers[1]));
}

fn a_domain_goes_on_for_the_streams_that_stay<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let (first, _) = rig.stream::<K::Format>(1);
    let (second, _) = rig.stream::<K::Format>(2);
    let domain = rig.domain::<K>();
    let buffer = rig.buffer(0x1000);
    map(&domain, IOVA, buffer.span(), RW);
    first.attach(to(&domain)).expect("it is attached");
    second.attach(to(&domain)).expect("it is attached");
    for device in &mut rig.devices {
        assert!(reaches(device, IOVA, &buffer));
    }
    drop(first);
    assert!(!reaches(&mut rig.devices[0], IOVA, &buffer));
    assert!(reaches(&mut rig.devices[1], IOVA, &buffer));
    unmap(&domain, IOVA, 0x1000);
    assert!(!reaches(&mut rig.devices[1], IOVA, &buffer));
}

fn a_switch_takes_effect_at_once<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let (stream, heard) = rig.stream::<K::Format>(1);
    let domains = [rig.domain::<K>(), rig.domain::<K>()];
    let buffers = [rig.buffer(0x1000), rig.buffer(0x1000)];
    for (domain, buffer) in domains.iter().zip(&buffers) {
        map(domain, IOVA, buffer.span(), RW);
    }
    for turn in 0..6 {
        let now = turn % 2;
        stream.replace(to(&domains[now])).expect("it is switched");
        buffers[1 - now].set_word(0, 7);
        assert!(rig.reaches(IOVA, &buffers[now]));
        assert_eq!(buffers[1 - now].word(0), 7);
    }
    assert_eq!(rig.faults(&heard), []);
}

/// Without the commands for context entries and PASIDs the model uses what the stream had: so the
/// test before this one is one of them.
fn a_switch_without_the_invalidation_of_entries_is_found_out<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let (stream, _) = rig.stream::<K::Format>(1);
    let domains = [rig.domain::<K>(), rig.domain::<K>()];
    let buffers = [rig.buffer(0x1000), rig.buffer(0x1000)];
    for (domain, buffer) in domains.iter().zip(&buffers) {
        map(domain, IOVA, buffer.span(), RW);
    }
    stream.attach(to(&domains[0])).expect("it is attached");
    assert!(rig.reaches(IOVA, &buffers[0]));
    rig.tap.set_edit(Some(Box::new(|command| {
        if matches!(command[0] & 0xf, 0x1 | 0x7) {
            // An invalidation of a domain that nobody has.
            command[0] = 0x2 | 2 << 4 | 0xffff << 16;
        }
    })));
    stream.replace(to(&domains[1])).expect("the model was not told all");
    assert!(rig.reaches(IOVA, &buffers[0]), "it uses the entry that it knows");
}

fn what_may_pass_passes_until_it_is_detached<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let (stream, heard) = rig.stream::<K::Format>(1);
    let domain = rig.domain::<K>();
    let buffer = rig.buffer(0x1000);
    let paddr = buffer.paddr().get();
    map(&domain, IOVA, buffer.span(), RW);
    stream.attach(to(&domain)).expect("it is attached");
    assert!(!rig.reaches(paddr, &buffer));
    rig.faults(&heard);
    #[expect(unsafe_code, reason = "lets the model's device at all of the machine's memory")]
    // SAFETY: the device writes where the test tells it.
    let all = unsafe { AllMemory::promise() };
    stream.replace(Target::Identity(all)).expect("the model can");
    assert!(rig.reaches(paddr, &buffer));
    stream.replace(to(&domain)).expect("it is attached");
    assert!(!rig.reaches(paddr, &buffer));
    assert!(rig.reaches(IOVA, &buffer));
    stream.replace(Target::Identity(all)).expect("the model can");
    stream.detach().expect("it is detached");
    rig.faults(&heard);
    assert!(!rig.reaches(paddr, &buffer));
    assert_eq!(rig.faults(&heard)[0].reason, FaultReason::Blocked);
}

fn whatever_was_translated_before_is_blocked_by_a_new_driver<K: Kind>() {
    let Some((machine, tap)) = machine::<K>() else { return };
    // Without anybody driving the hardware every access passes.
    let buffer = machine.ram().allocate(0x1000).expect("there is RAM");
    let mut device = TestDev::new(&Pci::new(&machine), 1).expect("it is there");
    assert!(reaches(&mut device, buffer.paddr().get(), &buffer));
    let mut rig = Rig::over::<K>(machine.clone(), tap.clone());
    assert!(!rig.reaches(buffer.paddr().get(), &buffer), "blocked by default");

    let (stream, _) = rig.stream::<K::Format>(1);
    let domain = rig.domain::<K>();
    map(&domain, IOVA, buffer.span(), RW);
    stream.attach(to(&domain)).expect("it is attached");
    assert!(rig.reaches(IOVA, &buffer));
    // As a system that ends without a word.
    std::mem::forget((stream, domain));
    drop(rig);
    let mut rig = Rig::over::<K>(machine, tap);
    assert!(!rig.reaches(IOVA, &buffer));
    assert!(!rig.reaches(buffer.paddr().get(), &buffer));
    // And one that ends in order leaves everything blocked.
    drop(rig.stream::<K::Format>(1));
    let Rig { mut devices, tap, iommu, .. } = rig;
    drop(iommu);
    assert_ne!(tap.read32(0x1c) >> 31, 0, "it translates still");
    assert!(!reaches(&mut devices[0], buffer.paddr().get(), &buffer));
}

fn numbers_of_domains_come_back<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let (stream, _) = rig.stream::<K::Format>(1);
    let buffer = rig.buffer(0x1000);
    let mut numbers = Vec::new();
    for _ in 0..4 {
        let domain = rig.domain::<K>();
        map(&domain, IOVA, buffer.span(), RW);
        stream.replace(to(&domain)).expect("it is attached");
        assert!(rig.reaches(IOVA, &buffer));
        numbers.push(domain.ops().domain_id());
    }
    // The one before goes when the next is attached: two take turns.
    assert!(numbers.iter().all(|number| (2..4).contains(number)), "{numbers:?}");
    let domain = rig.domain::<K>();
    stream.detach().expect("it is detached");
    let tables = rig.tables.tables();
    drop(domain);
    assert_eq!(rig.tables.tables(), tables - 1, "its root");

    // Nobody else has it meanwhile.
    let claim =
        || rig.iommu.stream::<crate::vtd::rig::Tables<K::Format>>(8, ReservedRegions::new());
    assert!(claim().is_err());
    drop(stream);
    assert!(Attachment::new(claim().expect("it was given back")).is_ok());
}

/// Which is why a stream keeps these addresses out of its domains.
fn a_write_where_interrupts_are_reaches_no_memory_and_no_driver_hears_of_it<K: Kind>() {
    let Some(mut rig) = Rig::new::<K>() else { return };
    let (stream, heard) = rig.stream::<K::Format>(1);
    let reserved = stream.port().reserved_regions();
    let (domain, buffer) = (rig.domain::<K>(), rig.buffer(0x1000));
    stream.attach(to(&domain)).expect("it is attached");
    for inside in [0xfee0_0000, 0xfeef_f000] {
        assert!(reserved.first_in(IovaRange::point(Iova::new(inside))).is_some());
        map(&domain, inside, buffer.span(), RW);
        buffer.set_word(0, 0);
        let _ = rig.devices[0].write(inside, buffer.paddr(), 4);
        assert_eq!((buffer.word(0), rig.faults(&heard)), (0, Vec::new()), "{inside:#x}");
    }
    for beside in [0xfedf_f000, 0xfef0_0000] {
        assert_eq!(reserved.first_in(IovaRange::point(Iova::new(beside))), None);
        map(&domain, beside, buffer.span(), RW);
        assert!(rig.reaches(beside, &buffer), "{beside:#x}");
    }
}

#[test]
fn a_unit_that_is_there_for_interrupts_alone_is_refused_by_name() {
    for properties in ["aw-bits=48", "aw-bits=39", "scalable-mode=on", "scalable-mode=on,fsts=on"] {
        let properties = format!("dma-translation=off,{properties}");
        let Some((machine, tap)) = machine_with(&properties) else { return };
        let host = QemuHost::new(&machine);
        #[expect(unsafe_code, reason = "hands hardware to its driver")]
        // SAFETY: the model's registers are used by this driver alone, and reach the host's memory.
        let refused = unsafe { Vtd::new(tap, host, VtdConfig::new(39)) };
        let error = refused.expect_err("it translates nothing");
        assert!(matches!(error, Error::Unsupported { .. }), "{properties}: {error}");
        assert!(error.to_string().contains("no translation of DMA"), "{properties}: {error}");
    }
}
