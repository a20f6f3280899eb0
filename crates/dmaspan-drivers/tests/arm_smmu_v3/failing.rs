//! Hardware that does not do what it is told, or is gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use dmaspan::io_pgtable::{Arena, PageTable};
use dmaspan::iommu::{
    Attachment, Domain, Invalidation, IommuOps as _, Port as _, Prepared, ReservedRegions, Scope,
    Tables, Target,
};
use dmaspan::{Iova, IovaRange, PhysAddr};
use dmaspan_drivers::arm_smmu_v3::{OnFault, SmmuV3, SmmuV3Config, SmmuV3Ops, SmmuV3Stream, Stage};
use dmaspan_drivers::{Error, Mmio};
use dmaspan_sim::rng::Rng;
use parking_lot::Mutex;

use crate::hardware::{EVENTQ_PROD, Mode, Model, TestSmmu};
use crate::host::FakeHost;
use crate::setup::{Rig, S1, S2};

const ALL: Invalidation<'static> =
    Invalidation { scope: Scope::All, leaf_sizes: 1 << 12, tables: Tables::Kept };

#[test]
fn commands_that_never_complete_are_an_error_in_bounded_time() {
    let rig = Rig::new(Model::LARGE);
    let domain = rig.s1();
    rig.hardware.set(Mode::Stuck);
    // Also when the queue is full.
    for _ in 0..300 {
        rig.memory.polls();
        domain.ops().invalidate(&ALL).unwrap_err();
        assert!(rig.memory.polls() <= 200);
    }
    // What was placed is consumed once it can be, and the queue works again.
    rig.hardware.set(Mode::Well);
    domain.ops().invalidate(&ALL).unwrap();
    assert!(rig.hardware.take().len() > 100);
    domain.ops().invalidate(&ALL).unwrap();
    assert_eq!(rig.hardware.take().len(), 1);
}

#[test]
fn the_error_register_is_looked_at_when_time_runs_out() {
    let rig = Rig::new(Model::LARGE);
    let domain = rig.s1();
    rig.hardware.set(Mode::Stuck);
    rig.hardware.raise(1 << 8);
    let error = domain.ops().invalidate(&ALL).unwrap_err();
    assert_eq!(error.what, "the SMMU is in its service failure mode");
    assert_eq!(error.status, 1 << 8);
    rig.smmu.handle_faults().unwrap_err();
}

#[test]
fn a_refused_command_fails_its_batch_alone_and_the_queue_goes_on() {
    let rig = Rig::new(Model::LARGE);
    let domain = rig.s1();
    for _ in 0..600 {
        rig.hardware.set(Mode::Refuses(0x11));
        let error = domain.ops().invalidate(&ALL).unwrap_err();
        // CERROR_ILL.
        assert_eq!((error.what, error.status >> 24), ("the SMMU refused a command", 1));
        assert_eq!(rig.hardware.active(), 0);
        rig.hardware.set(Mode::Well);
        domain.ops().invalidate(&ALL).unwrap();
        assert_eq!(rig.hardware.take().len(), 1);
    }
}

#[test]
fn a_refused_command_fails_its_batch_also_where_the_sync_has_no_room_beside_it() {
    let config = SmmuV3Config { lg2_commands: 0, ..Default::default() };
    let rig = Rig::with(Model::LARGE, config);
    let domain = rig.s1();
    rig.hardware.set(Mode::Refuses(0x11));
    domain.ops().invalidate(&ALL).unwrap_err();
    rig.hardware.set(Mode::Well);
    domain.ops().invalidate(&ALL).unwrap();
}

#[test]
fn an_invalidation_is_complete_when_its_sync_is() {
    let rig = Rig::new(Model::LARGE);
    let domain = rig.s1();
    // The command itself is consumed.
    rig.hardware.set(Mode::StopsAt(0x46));
    domain.ops().invalidate(&ALL).unwrap_err();
    assert_eq!(rig.hardware.take().len(), 1);
}

#[test]
fn a_number_whose_end_was_refused_stays_taken() {
    // CFGI_STE of the stream that still has the domain; TLBI_NH_ASID.
    for opcode in [0x03, 0x11] {
        let rig = Rig::new(Model::LARGE);
        let (structures, tables) = (rig.memory.count(), rig.tables.tables());
        let domain = rig.s1();
        rig.port::<S1>(1).translate(&domain).unwrap();
        rig.hardware.set(Mode::Refuses(opcode));
        drop(domain);
        rig.hardware.set(Mode::Well);
        // The descriptor, the table of the second level, and the root.
        assert_eq!(rig.memory.count(), structures + 2, "{opcode:#x}");
        assert_eq!(rig.tables.tables(), tables + 1);
        rig.hardware.take();
        rig.s1().ops().invalidate(&ALL).unwrap();
        assert_eq!(rig.hardware.take(), [[2 << 48 | 0x11, 0]]);
    }
    // Also where no stream has it any more.
    let rig = Rig::new(Model::LARGE);
    let domain = rig.s1();
    let port = rig.port::<S1>(1);
    port.translate(&domain).unwrap();
    port.block().unwrap();
    rig.hardware.set(Mode::Refuses(0x11));
    drop(domain);
    rig.hardware.set(Mode::Well);
    rig.hardware.take();
    rig.s1().ops().invalidate(&ALL).unwrap();
    assert_eq!(rig.hardware.take(), [[2 << 48 | 0x11, 0]]);
}

#[test]
fn a_number_that_a_stream_was_given_during_a_detach_does_not_come_back() {
    let rig = Rig::new(Model::LARGE);
    let domain = rig.s1();
    let port = rig.port::<S1>(1);
    // Hardware knows the domain, and no stream has it.
    port.translate(&domain).unwrap();
    port.block().unwrap();
    rig.hardware.set(Mode::Stuck);
    let (hardware, given) = (rig.hardware.clone(), Arc::clone(&domain));
    rig.memory.meanwhile(move || {
        hardware.set(Mode::Well);
        port.translate(&given).unwrap();
    });
    domain.ops().detach().unwrap();
    // Now nobody takes it from the stream.
    rig.hardware.set(Mode::Stuck);
    drop(domain);
    rig.hardware.set(Mode::Well);
    let _ = rig.s1().ops().invalidate(&ALL);
    rig.hardware.take();
    rig.s1().ops().invalidate(&ALL).unwrap();
    assert_eq!(rig.hardware.take(), [[2 << 48 | 0x11, 0]]);
}

#[test]
fn commands_that_cannot_be_read_are_tried_again() {
    let rig = Rig::new(Model::LARGE);
    let domain = rig.s1();
    rig.hardware.set(Mode::Unreadable);
    for _ in 0..300 {
        domain.ops().invalidate(&ALL).unwrap_err();
    }
    rig.hardware.set(Mode::Well);
    // The last error is acknowledged by whoever comes next.
    let _ = domain.ops().invalidate(&ALL);
    domain.ops().invalidate(&ALL).unwrap();
}

#[test]
fn hardware_that_consumes_what_is_not_there_or_is_gone_is_an_error() {
    let rig = Rig::new(Model::LARGE);
    let domain = rig.s1();
    let port = rig.port::<S1>(1);
    for mode in [Mode::Ahead, Mode::Gone] {
        rig.hardware.set(mode);
        domain.ops().invalidate(&ALL).unwrap_err();
        port.translate(&domain).unwrap_err();
        port.block().unwrap_err();
    }
    rig.smmu.handle_faults().unwrap_err();
    rig.hardware.set(Mode::Well);
    port.block().unwrap();
}

#[test]
fn batches_longer_than_the_queue_are_cut() {
    for lg2_commands in 0..4 {
        let config = SmmuV3Config { lg2_commands, ..Default::default() };
        let rig = Rig::with(Model { idr3: 0, ..Model::LARGE }, config);
        let domain = rig.s1();
        let port = rig.port::<S1>(1);
        port.translate(&domain).unwrap();
        rig.hardware.take();
        let most = (1 << lg2_commands) - 1;
        let range = |start: u64, len: u64| IovaRange::from_len(Iova::new(start), len).unwrap();
        for pages in 1..=most {
            let ranges = [range(0, pages << 12)];
            let scope = Scope::Ranges(&ranges);
            domain.ops().invalidate(&Invalidation { scope, ..ALL }).unwrap();
            assert_eq!(rig.hardware.take().len() as u64, pages);
        }
        domain.ops().invalidate(&ALL).unwrap();
        port.block().unwrap();
    }
}

#[test]
fn threads_share_the_queue_and_nobody_waits_for_ever() {
    let config = SmmuV3Config { lg2_commands: 3, ..Default::default() };
    let rig = Rig::with(Model { idr3: 0, ..Model::LARGE }, config);
    let domain = rig.s1();
    rig.port::<S1>(1).translate(&domain).unwrap();
    rig.hardware.take();
    let hammer = || {
        let failed = AtomicU32::new(0);
        thread::scope(|scope| {
            for n in 0..4u64 {
                let (domain, failed) = (&domain, &failed);
                scope.spawn(move || {
                    for _ in 0..500 {
                        let start = Iova::new(n << 30);
                        let ranges = [IovaRange::from_len(start, (n + 1) << 12).unwrap()];
                        let scope = Scope::Ranges(&ranges);
                        let result = domain.ops().invalidate(&Invalidation { scope, ..ALL });
                        failed.fetch_add(u32::from(result.is_err()), Ordering::Relaxed);
                    }
                });
            }
        });
        failed.into_inner()
    };
    assert_eq!(hammer(), 0);
    // Each batch's commands were consumed, all of them.
    assert_eq!(rig.hardware.take().len(), 500 * (1 + 2 + 3 + 4));
    rig.hardware.set(Mode::RefusesEach(50));
    let failed = hammer();
    // Each refusal fails one batch at least, and those beside it at most.
    assert!((100..2000).contains(&failed), "{failed}");
    rig.hardware.set(Mode::Well);
    domain.ops().invalidate(&ALL).unwrap();
    domain.ops().invalidate(&ALL).unwrap();
}

#[test]
fn streams_switch_while_others_invalidate() {
    let config = SmmuV3Config { lg2_commands: 3, ..Default::default() };
    let rig = Rig::with(Model { idr3: 0, ..Model::LARGE }, config);
    let domains = [rig.s2(), rig.s2()];
    let ports = [rig.port::<S2>(1), rig.port::<S2>(2)];
    let hammer = || {
        let failed = AtomicU32::new(0);
        let count = |result: Result<(), _>| {
            failed.fetch_add(u32::from(result.is_err()), Ordering::Relaxed);
        };
        thread::scope(|scope| {
            for domain in &domains {
                let count = &count;
                scope.spawn(move || {
                    let ranges = [IovaRange::from_len(Iova::new(0), 3 << 12).unwrap()];
                    let what = Invalidation { scope: Scope::Ranges(&ranges), ..ALL };
                    (0..300).for_each(|_| count(domain.ops().invalidate(&what)));
                });
            }
            for port in &ports {
                let (count, domains) = (&count, &domains);
                scope.spawn(move || {
                    for n in 0..100 {
                        count(port.translate(&domains[n % 2]));
                        count(if n % 3 == 0 { port.block() } else { Ok(()) });
                    }
                });
            }
        });
        failed.into_inner()
    };
    assert_eq!(hammer(), 0);
    for id in [1, 2] {
        let [first, _, _, root, ..] = rig.entry(id).unwrap();
        assert_eq!((first, root), (1, domains[1].root().get()), "blocked after the last one");
    }
    rig.hardware.set(Mode::RefusesEach(37));
    assert!(hammer() > 0);
    rig.hardware.set(Mode::Well);
    let _ = domains[0].ops().invalidate(&ALL);
    for port in &ports {
        port.block().unwrap();
    }
    // Each domain is let go of, and its number comes back.
    drop((ports, domains));
    rig.hardware.take();
    rig.s2().ops().invalidate(&ALL).unwrap();
    assert_eq!(rig.hardware.take(), [[1 << 32 | 0x28, 0]]);
}

#[test]
fn numbers_and_descriptors_stay_taken_while_hardware_may_know_them() {
    let rig = Rig::new(Model::LARGE);
    let (structures, tables) = (rig.memory.count(), rig.tables.tables());
    let domain = rig.s1();
    let port = rig.port::<S1>(1);
    port.translate(&domain).unwrap();
    rig.hardware.set(Mode::Stuck);
    drop(domain);
    rig.hardware.set(Mode::Well);
    // The descriptor, the table of the second level, and the root.
    assert_eq!(rig.memory.count(), structures + 2);
    assert_eq!(rig.tables.tables(), tables + 1);
    port.block().unwrap();
    rig.hardware.take();
    let domain = rig.s1();
    domain.ops().invalidate(&ALL).unwrap();
    assert_eq!(rig.hardware.take(), [[2 << 48 | 0x11, 0]]);
}

#[test]
fn a_switch_that_fails_leaves_both_domains_known() {
    let rig = Rig::new(Model::LARGE);
    let (one, two) = (rig.s2(), rig.s2());
    let stream = Attachment::new(rig.port::<S2>(1)).unwrap();
    stream.attach(Target::Paging(Prepared::new(Arc::clone(&one)))).unwrap();
    rig.hardware.set(Mode::Stuck);
    stream.replace(Target::Paging(Prepared::new(Arc::clone(&two)))).unwrap_err();
    assert_eq!(stream.attached_to(), dmaspan::iommu::AttachedTo::Unknown);
    // Blocked in memory, or the one or the other: never a mix.
    let [first, _, third, fourth, ..] = rig.entry(1).unwrap();
    let known = [one.root().get(), two.root().get()];
    assert!(first == 1 || known.contains(&fourth), "{first:#x} {third:#x} {fourth:#x}");
    rig.hardware.set(Mode::Well);
    rig.hardware.take();
    stream.detach().unwrap();
    // Whichever it was, its translations are forgotten: all of them are.
    assert_eq!(rig.hardware.take().last(), Some(&[0x30, 0]));
}

#[test]
fn a_domain_blocks_the_streams_that_still_have_it() {
    let rig = Rig::new(Model::LARGE);
    let port = rig.port::<S2>(0x5_01);
    let other = rig.port::<S2>(0x7_ff);
    let (domain, kept) = (rig.s2(), rig.s2());
    port.translate(&domain).unwrap();
    other.translate(&kept).unwrap();
    drop(domain);
    assert_eq!(rig.entry(0x501).unwrap()[0], 1);
    assert_eq!(rig.entry(0x7ff).unwrap()[3], kept.root().get());
}

/// Registers that say what a driver waits for, or something else each time.
struct Chaos {
    state: Mutex<(Rng, u32, u32)>,
    memory: FakeHost,
    model: Model,
}

impl Mmio for Chaos {
    fn read32(&self, offset: u64) -> u32 {
        let (rng, placed, enabled) = &mut *self.state.lock();
        let random = u32::try_from(rng.next() & 0xffff_ffff).unwrap();
        match (offset, rng.below(32)) {
            (_, 0) => random,
            (0x0, _) => self.model.idr0,
            (0x4, _) => self.model.idr1,
            (0xc, _) => random,
            (0x14, _) => self.model.idr5,
            (0x44, _) => 1 << 20,
            (0x24 | 0x54, _) => *enabled,
            (0x9c, 1..28) => *placed,
            (0x9c, _) => *placed | random & 0x7f00_0000,
            (EVENTQ_PROD, _) => random & 0x8000_000f,
            (_, 1..16) => 0,
            (_, _) => random & 0x1ff,
        }
    }

    fn write32(&self, offset: u64, value: u32) {
        let (rng, placed, enabled) = &mut *self.state.lock();
        match offset {
            0x98 => *placed = value,
            0x20 | 0x50 => *enabled = value,
            _ => {}
        }
        // What it was told of, it writes anything to.
        self.memory.scribble(rng);
    }
}

/// Does everything that a driver can.
fn everything(smmu: &Arc<SmmuV3<Chaos, FakeHost>>, tables: &Arena) -> Result<(), Error> {
    let ops = smmu.ops(Stage::First, OnFault::Terminate)?;
    let format = S1::new(smmu.stage1_config(12)?).unwrap();
    let table = PageTable::new(format, tables.clone()).unwrap();
    let domain: Arc<Domain<S1, Arena, SmmuV3Ops<Chaos, FakeHost>>> =
        Arc::new(Domain::new(table, ops).unwrap());
    let port: SmmuV3Stream<Domain<S1, Arena, _>, _, _> =
        smmu.stream(0x17, ReservedRegions::new())?;
    let _ = port.translate(&domain);
    for _ in 0..20 {
        let _ = domain.ops().invalidate(&ALL);
        let _ = smmu.handle_faults();
    }
    let _ = (port.pass(crate::host::all_memory()), port.translate(&domain), port.block());
    if let Ok(stream) = Attachment::new(port) {
        let _ = stream.attach(Target::Paging(Prepared::new(Arc::clone(&domain))));
        let _ = stream.replace(Target::Blocked);
        let _ = stream.replace(Target::Paging(Prepared::new(Arc::clone(&domain))));
        let _ = stream.detach();
    }
    let _ = domain.ops().detach();
    Ok(())
}

#[test]
fn registers_and_memory_that_say_anything_lead_to_errors_and_nothing_else() {
    let (mut started, mut done) = (0, 0);
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 16 << 20);
    for seed in 0..3000 {
        let mut rng = Rng::new(seed);
        let memory = FakeHost::new(0x10_0000);
        let host = memory.clone();
        let kind = if rng.below(2) == 0 { Model::LARGE } else { Model::SMALL };
        // Stalling, forced or not, too.
        let idr0 = kind.idr0 ^ u32::try_from(rng.below(4)).unwrap() << 24;
        let (model, state) = (Model { idr0, ..kind }, Mutex::new((rng, 0, 0)));
        let registers = Chaos { state, memory, model };
        #[expect(unsafe_code, reason = "there is no hardware")]
        // SAFETY: nothing is read by these registers, and what the host allocated alone written.
        let smmu = unsafe { SmmuV3::new(registers, host, SmmuV3Config::default()) };
        let Ok(smmu) = smmu else { continue };
        started += 1;
        done += u32::from(everything(&smmu, &tables).is_ok());
    }
    assert!(started > 500 && done > 400, "{started} {done}");
}

#[test]
fn a_driver_that_cannot_stop_hardware_leaks_what_it_reads() {
    let rig = Rig::new(Model::LARGE);
    let Rig { smmu, hardware, memory, .. } = rig;
    let _: &TestSmmu = &hardware;
    let count = memory.count();
    hardware.set(Mode::Gone);
    drop(smmu);
    assert_eq!(memory.count(), count);
}
