//! The stream map.

use std::sync::Arc;
use std::thread;

use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2, PageTable, S2MemoryTypes};
use dmaspan::iommu::{
    Attachment, Domain, FaultReason, Incompatible, IommuOps, PagingDomain, Port, Prepared,
    ReservedRegions, Target,
};
use dmaspan::{Coherency, PhysAddr, Prot, Span};
use dmaspan_drivers::arm_smmu::{Has, SmmuV2Config, SmmuV2Stream, StreamMapping};
use dmaspan_drivers::{Error, Handled};
use dmaspan_sim::sanitizer::{Cause, FindingKind, Hardware, Sanitized, Sanitizer};
use dmaspan_sim::smmu_v2::{self, SmmuConfig};
use dmaspan_sim::walker::Access;

use super::liar::{self, Liar};
use super::rig::{Ops, Recorder, Rig, Stream, Tables, map, range, target};

type S1 = ArmLpaeS1<12>;

fn claim(rig: &Rig, id: u32, mask: u32) -> Result<Stream<S1>, Error> {
    rig.driver.streams(id, mask, ReservedRegions::new())
}

#[test]
fn streams_that_would_match_two_entries_are_refused() {
    let rig = Rig::new();
    // 0x120 to 0x12f, without odd ones.
    let group = claim(&rig, 0x120, 0x0e).unwrap();
    for (id, mask) in [(0x120, 0), (0x12e, 0), (0x100, 0xff), (0x124, 1), (0x20, 0x100)] {
        let refused = claim(&rig, id, mask).unwrap_err();
        assert_eq!(refused, Error::Claimed { stream: 0x120 }, "{id:#x} {mask:#x}");
    }
    let odd = claim(&rig, 0x12f, 0xe).unwrap();
    assert_eq!((group.id(), odd.id()), (0x120, 0x121));
    drop(group);
    assert_eq!(claim(&rig, 0x124, 0).unwrap().id(), 0x124);
}

#[test]
fn a_group_of_streams_is_one_and_each_is_named_in_its_faults() {
    let rig = Rig::new();
    let group = Attachment::new(claim(&rig, 0x120, 0x0f).unwrap()).unwrap();
    let domain = rig.domain::<S1>();
    let faults = Recorder::on(&group);
    map(&domain, 0, 0x8000_0000, 0x1000, Prot::READ);
    group.attach(target(&domain)).unwrap();
    for id in 0x120..0x130 {
        assert_eq!(rig.reads(id, 8), Some(0x8000_0008));
        assert_eq!(rig.reads(id, 0x1000), None);
        rig.driver.handle_faults().unwrap();
        let [report] = faults.take()[..] else { panic!("not one fault") };
        assert_eq!((report.stream, report.iova.get()), (id.into(), 0x1000));
    }
    for id in [0x11f, 0x130, 0x1120] {
        assert_eq!(rig.reads(id, 8), None);
        let unclaimed = Handled { unclaimed: 1, ..Handled::default() };
        assert_eq!(rig.driver.handle_faults(), Ok(unclaimed), "{id:#x}");
    }
}

#[test]
fn what_entries_can_match_is_found_out_by_writing_them() {
    for stream_id_bits in [1, 7, 15] {
        let rig =
            Rig::with(SmmuConfig { stream_id_bits, ..Default::default() }, Default::default());
        let last = (1 << stream_id_bits) - 1;
        let features = rig.driver.features();
        assert_eq!(features.last_stream, last);
        assert_eq!(features.mapping, StreamMapping::Matched { mask_bits: last });
        let refused = claim(&rig, last + 1, 0).unwrap_err();
        assert_eq!(refused, Error::NoStream { stream: last + 1, last });
        let refused = claim(&rig, 0, last + 1).unwrap_err();
        let (value, limit) = (u64::from(last) + 1, last.into());
        assert_eq!(refused, Error::Config { what: "the mask of stream IDs", value, limit });
    }
}

#[test]
fn sixteen_bits_of_stream_ids_are_used_where_hardware_has_them() {
    let rig =
        Rig::with(SmmuConfig { extended_ids: true, ..Default::default() }, SmmuV2Config::new());
    assert_eq!(rig.driver.features().wide_streams, Has::Yes);
    let streams = [0xffff, 0x7fff].map(|id| rig.stream::<S1>(id));
    let domain = rig.domain::<S1>();
    map(&domain, 0, 0x8000_0000, 0x1000, Prot::READ);
    streams[0].attach(target(&domain)).unwrap();
    assert_eq!([0xffff, 0x7fff].map(|id| rig.reads(id, 0)), [Some(0x8000_0000), None]);
    let [wide, narrow] = streams;
    narrow.attach(target(&domain)).unwrap();
    drop(wide);
    assert_eq!([0xffff, 0x7fff].map(|id| rig.reads(id, 0)), [None, Some(0x8000_0000)]);
}

#[test]
fn stream_ids_are_indices_where_hardware_matches_none() {
    let hardware = SmmuConfig {
        streams: smmu_v2::StreamMatchSupport::Indexing,
        stream_id_bits: 5,
        mapping_groups: 32,
        ..Default::default()
    };
    let rig = Rig::with(hardware, SmmuV2Config::new());
    assert_eq!(rig.driver.features().mapping, StreamMapping::Indexed);
    let domain = rig.domain::<S1>();
    map(&domain, 0, 0x8000_0000, 0x1000, Prot::READ);
    let streams: Vec<_> = (0..32).map(|id| rig.stream::<S1>(id)).collect();
    streams[31].attach(target(&domain)).unwrap();
    for id in 0..32 {
        assert_eq!(rig.reads(id, 0).is_some(), id == 31, "{id}");
    }
    let again: Result<Stream<S1>, _> = rig.driver.stream(7, ReservedRegions::new());
    assert_eq!(again.unwrap_err(), Error::Claimed { stream: 7 });
    assert!(claim(&rig, 0, 1).is_err());
    assert_eq!(claim(&rig, 32, 0).unwrap_err(), Error::NoStream { stream: 32, last: 31 });
    // Index registers were written alone: there are no others.
    assert_eq!(rig.hardware.counters().undefined_writes, 0);
}

#[test]
fn entries_run_out_and_come_back() {
    let rig = Rig::with(SmmuConfig { mapping_groups: 3, ..Default::default() }, Default::default());
    let mut taken: Vec<_> = (0..3).map(|id| claim(&rig, id, 0).unwrap()).collect();
    let none = Error::NoIds { what: "entries of the stream map", limit: 3 };
    assert_eq!(claim(&rig, 3, 0).unwrap_err(), none);
    drop(taken.remove(1));
    assert_eq!(claim(&rig, 3, 0).unwrap().id(), 3);
}

#[test]
fn a_stream_that_is_not_known_to_be_blocked_is_never_given_again() {
    use dmaspan_sim::smmu_v2::{Behaviour, SyncCompletion};
    let rig = Rig::new();
    let (stream, domain) = (rig.stream::<S1>(1), rig.domain::<S1>());
    stream.attach(target(&domain)).unwrap();
    rig.hardware.set_behaviour(Behaviour { sync: SyncCompletion::Never, ..Default::default() });
    drop(stream);
    rig.hardware.set_behaviour(Behaviour::default());
    assert_eq!(claim(&rig, 1, 0).unwrap_err(), Error::Claimed { stream: 1 });
    // It leads nowhere all the same.
    assert_eq!(rig.reads(1, 0), None);
    rig.driver.handle_faults().unwrap();
}

#[test]
fn domains_that_the_hardware_does_not_walk_are_refused() {
    let hardware =
        SmmuConfig { upstream_bits: 40, output_bits: 40, ipa_bits: 40, ..Default::default() };
    let rig = Rig::with(hardware, SmmuV2Config::new());
    let stream = rig.stream::<S1>(1);
    let fitting = rig.driver.features().stage_1_config();
    assert_eq!((fitting.input_bits, fitting.walks), (40, Coherency::Coherent));
    let refused = |rig: &Rig, config: ArmLpaeS1Config| {
        let domain = rig.domain_of(S1::new(config).unwrap());
        let Incompatible { what } = stream.port().accepts(&domain).unwrap_err();
        what
    };
    assert_eq!(stream.port().accepts(&rig.domain::<S1>()), Ok(()));
    assert!(refused(&rig, ArmLpaeS1Config { input_bits: 42, ..fitting }).contains("translates"));
    assert!(refused(&rig, ArmLpaeS1Config { output_bits: 42, ..fitting }).contains("physical"));
    let half = dmaspan::io_pgtable::Half::Upper;
    assert!(refused(&rig, ArmLpaeS1Config { half, ..fitting }).contains("lower half"));
    let dirty = dmaspan::io_pgtable::DirtyTracking::Hardware;
    assert!(refused(&rig, ArmLpaeS1Config { dirty, ..fitting }).contains("dirty"));
    let break_before_make = dmaspan::io_pgtable::BreakBeforeMake::NotNeeded;
    assert!(refused(&rig, ArmLpaeS1Config { break_before_make, ..fitting }).contains("break"));
    assert!(refused(&Rig::new(), fitting).contains("another SMMU"));

    let stage_2 = rig.stream::<ArmLpaeS2<12>>(2);
    let mut config = rig.driver.features().stage_2_config();
    config.memory_types = S2MemoryTypes::Forced;
    let domain = rig.domain_of(ArmLpaeS2::<12>::new(config).unwrap());
    assert!(stage_2.port().accepts(domain.domain()).unwrap_err().what.contains("memory types"));
}

#[test]
fn tables_in_caches_that_walks_do_not_see_are_refused() {
    let hardware = SmmuConfig { coherent_walks: false, ..Default::default() };
    let rig = Rig::with(hardware, SmmuV2Config::new());
    let stream = rig.stream::<S1>(1);
    let walks_in_memory = rig.driver.features().stage_1_config();
    assert_eq!(walks_in_memory.walks, Coherency::NonCoherent);
    let walks_in_caches = ArmLpaeS1Config { walks: Coherency::Coherent, ..walks_in_memory };
    // Of these the second would be walked where the CPU's stores do not arrive: the arena says that
    // it needs not write them back.
    for (config, says) in [(walks_in_caches, "CPU's caches"), (walks_in_memory, "back")] {
        let domain = rig.domain_of(S1::new(config).unwrap());
        let refused = stream.attach(target(&domain)).unwrap_err().to_string();
        assert!(refused.contains(says), "{refused}");
    }
}

#[test]
fn hooks_for_another_format_are_refused() {
    use dmaspan::io_pgtable::PageTable;
    use dmaspan::iommu::Domain;
    let rig = Rig::new();
    let format = S1::new(rig.driver.features().stage_1_config()).unwrap();
    let table = PageTable::new(format, rig.tables.clone()).unwrap();
    let ops = rig.driver.ops::<ArmLpaeS2<12>>().unwrap();
    let domain = Arc::new(Domain::new(table, ops).unwrap());
    let stream = rig.stream::<S1>(1);
    assert!(stream.port().accepts(&domain).unwrap_err().what.contains("another format"));
    // Neither without the attachment, which asks.
    assert!(stream.port().translate(&domain).unwrap_err().what.contains("another format"));
    assert_eq!(rig.reads(1, 0), None);
}

#[test]
fn a_stream_is_not_led_to_the_bank_that_a_domain_of_another_smmu_has_there() {
    let (rig, other) = (Rig::new(), Rig::new());
    let (port, victim) = (claim(&rig, 1, 0).unwrap(), rig.stream::<S1>(2));
    let (ours, theirs) = (rig.domain::<S1>(), other.domain::<S1>());
    assert_eq!(ours.ops().bank(), theirs.ops().bank());
    map(&ours, 0, 0x8000_0000, 0x1000, Prot::READ);
    victim.attach(target(&ours)).unwrap();
    port.block().unwrap();
    assert!(port.translate(&theirs).unwrap_err().what.contains("another SMMU"));
    assert_eq!([1, 2].map(|id| rig.reads(id, 0)), [None, Some(0x8000_0000)]);
}

#[test]
fn hooks_of_a_stream_that_run_at_once_leave_what_the_driver_says_they_do() {
    let rig = Rig::new();
    let port = claim(&rig, 1, 0).unwrap();
    let (first, second) = (rig.domain::<S1>(), rig.domain::<S1>());
    for (domain, paddr) in [(&first, 0x8000_0000), (&second, 0x9000_0000)] {
        map(domain, 0, paddr, 0x1000, Prot::READ);
    }
    port.translate(&first).unwrap();
    thread::scope(|scope| {
        // While the stream is taken away from the first domain it is given the second.
        let (port, second, rig) = (&port, &second, &rig);
        let (forget, forgotten) = std::sync::mpsc::channel();
        let (done, translated) = std::sync::mpsc::channel();
        let mut once = Some(forget);
        *rig.registers.watch.lock() = Some(Box::new(move |_, offset| {
            // TLBIASID of a bank: the route is changed, and the wait is to come.
            if let Some(forget) = once.take_if(|_| offset >> 12 >= 16 && offset & 0xfff == 0x610) {
                forget.send(()).unwrap();
                let _ = translated.recv_timeout(std::time::Duration::from_millis(200));
            }
        }));
        let blocks = scope.spawn(move || port.block());
        forgotten.recv().unwrap();
        port.translate(second).unwrap();
        let _ = done.send(());
        blocks.join().unwrap().unwrap();
    });
    assert_eq!(rig.reads(1, 0), Some(0x9000_0000));
    // Its tables are not given back while the stream has them.
    assert!(second.ops().detach().is_err());
    assert_eq!(rig.reads(1, 0), Some(0x9000_0000));
    port.block().unwrap();
    assert_eq!(rig.reads(1, 0), None);
}

#[test]
fn an_entry_that_is_given_back_matches_no_other_stream() {
    for extended_ids in [false, true] {
        let config = SmmuConfig { extended_ids, ..Default::default() };
        let rig = Rig::with(config, SmmuV2Config::new());
        let domain = rig.domain::<S1>();
        map(&domain, 0, 0x8000_0000, 0x1000, Prot::READ);
        let zero = rig.stream::<S1>(0);
        zero.attach(target(&domain)).unwrap();
        *rig.registers.watch.lock() = Some(Box::new(move |hardware, offset| {
            let hit = hardware.access(0, dmaspan::Iova::new(0), Access::Read);
            assert!(hit.is_ok(), "{extended_ids}: {hit:?} after the write of {offset:#x}");
        }));
        drop(claim(&rig, 5, 0).unwrap());
        rig.registers.watch.lock().take();
    }
}

#[test]
fn a_blocked_stream_is_told_of_its_accesses() {
    let rig = Rig::new();
    let stream = rig.stream::<S1>(5);
    let faults = Recorder::on(&stream);
    assert_eq!(rig.reads(5, 0x1234), None);
    rig.driver.handle_faults().unwrap();
    let [report] = faults.take()[..] else { panic!("not one fault") };
    assert_eq!((report.stream, report.iova.get()), (5, 0x1234));
    assert_eq!(report.reason, FaultReason::Blocked);
}

#[test]
fn a_domain_that_lies_does_not_lead_a_stream_to_the_bank_of_another() {
    let (rig, other) = (Rig::new(), Rig::new());
    let (ours, theirs) = (rig.domain::<S1>(), other.domain::<S1>());
    let (victim, own) = (rig.stream::<S1>(2), rig.domain::<S1>());
    // The other SMMU's bank has the number of the victim's.
    assert_eq!(ours.ops().bank(), theirs.ops().bank());
    map(&ours, 0, 0x8000_0000, 0x1000, Prot::READ);
    victim.attach(target(&ours)).unwrap();
    let stream: SmmuV2Stream<Liar<_, _, _>, _, _> =
        rig.driver.stream(1, ReservedRegions::new()).unwrap();
    let stream = Attachment::new(stream).unwrap();
    liar::attach(&stream, [&own, &theirs], || rig.reads(1, 0).is_some());
}

#[test]
fn a_domain_whose_hooks_a_sanitizer_sees_is_attached_as_one_with_the_drivers_own() {
    let rig = Rig::new();
    let sanitizer = Sanitizer::default();
    let table = PageTable::new(S1::fitting(rig.driver.features()), rig.tables.clone()).unwrap();
    let hooks = rig.driver.ops::<S1>().unwrap().sanitized(&sanitizer);
    let domain = Arc::new(Domain::new(table, hooks).unwrap());
    let stream: SmmuV2Stream<Domain<S1, _, Sanitized<Ops>>, _, _> =
        rig.driver.stream(3, ReservedRegions::new()).unwrap();
    let stream = Attachment::new(stream).unwrap();
    stream.attach(Target::Paging(Prepared::new(Arc::clone(&domain)))).unwrap();
    let at = range(0x4000, 0x1000);
    let memory = Span::new(PhysAddr::new(0x8000_0000), 0x1000).unwrap();
    #[expect(unsafe_code, reason = "simulated memory, one thread a range")]
    // SAFETY: nobody else works on the range, and the memory is simulated.
    unsafe { domain.map_spans(at.start(), &[memory], Prot::READ) }.unwrap();
    let read = || {
        sanitizer.on_dma(at.start(), 1, Access::Read);
        rig.reads(3, 0x4000)
    };
    assert_eq!(read(), Some(0x8000_0000));
    #[expect(unsafe_code, reason = "simulated memory, one thread a range")]
    // SAFETY: as above.
    let unsynced = unsafe { domain.remove(at) }.unwrap();
    assert_eq!(read(), Some(0x8000_0000), "the TLB has it");
    let _ = unsynced.sync().unwrap();
    assert_eq!(read(), None);
    stream.detach().unwrap();
    drop((stream, domain));
    let (access, cause) = (Access::Read, Cause::NoFlush);
    let before = FindingKind::UseAfterUnmap { access, cause };
    let after = FindingKind::UseAfterFlush { access, unmapped: 4, flushed: 6 };
    let kinds: Vec<_> = sanitizer.finish().iter().map(|finding| finding.kind).collect();
    assert_eq!(kinds, [before, after], "{sanitizer}");
}
