//! Faults: garbage, storms, and accesses that stall.

use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS2, ArmV7s, TableMemory};
use dmaspan::iommu::{
    FaultHandler, FaultReason, FaultReport, FaultResponse, FaultState, IommuOps as _, Port as _,
};
use dmaspan::{Iova, Prot};
use dmaspan_drivers::Handled;
use dmaspan_drivers::arm_smmu::{SmmuV2Config, Stalls};
use dmaspan_sim::smmu_v2::{
    Behaviour, Response, SmmuConfig, StallId, SyncCompletion, TakesEffect, Why,
};
use dmaspan_sim::walker::Access;

use super::rig::{Recorder, Rig, Tables, TestDomain, granule, map, target};

type S1 = ArmLpaeS1<12>;

const HELD: SmmuV2Config = SmmuV2Config { first_id: 0, stalls: Stalls::Held };

#[test]
fn of_several_faults_the_first_is_reported_and_the_loss_of_others_told() {
    let rig = Rig::new();
    let (stream, domain) = (rig.stream::<S1>(1), rig.domain::<S1>());
    stream.attach(target(&domain)).unwrap();
    let faults = Recorder::on(&stream);
    for iova in [0x5000, 0x6000, 0x7000] {
        assert_eq!(rig.reads(1, iova), None);
    }
    let lost = Handled { reported: 1, overflowed: true, ..Handled::default() };
    assert_eq!(rig.driver.handle_faults(), Ok(lost));
    assert_eq!(faults.take()[0].iova, Iova::new(0x5000));
    // The next one is recorded again.
    assert_eq!(rig.reads(1, 0x8000), None);
    assert_eq!(rig.driver.handle_faults().unwrap().reported, 1);
    assert_eq!(faults.take()[0].iova, Iova::new(0x8000));
    // So are those of streams that have no bank.
    for stream in [7, 8] {
        assert_eq!(rig.reads(stream, 0), None);
    }
    let lost = Handled { unclaimed: 1, overflowed: true, ..Handled::default() };
    assert_eq!(rig.driver.handle_faults(), Ok(lost));
}

#[test]
fn a_fault_of_a_stream_does_not_hold_others_of_its_domain() {
    let rig = Rig::new();
    let (streams, domain) = ([1, 2].map(|id| rig.stream::<S1>(id)), rig.domain::<S1>());
    streams.iter().for_each(|stream| stream.attach(target(&domain)).unwrap());
    map(&domain, 0, 0x8000_0000, 0x1000, Prot::READ);
    assert_eq!([rig.reads(1, 0x1000), rig.reads(2, 0)], [None, Some(0x8000_0000)]);
    assert_eq!(rig.hardware.counters().behind_fault, 0);
}

#[test]
fn interrupts_are_raised_until_faults_are_handled() {
    let rig = Rig::new();
    let (stream, domain) = (rig.stream::<S1>(1), rig.domain::<S1>());
    stream.attach(target(&domain)).unwrap();
    let bank = usize::try_from(domain.ops().bank()).unwrap();
    let interrupts = || (rig.hardware.global_irq(), rig.hardware.context_irq(bank));
    assert_eq!(interrupts(), (false, false));
    assert_eq!([rig.reads(1, 0), rig.reads(2, 0)], [None; 2]);
    assert_eq!(interrupts(), (true, true));
    rig.driver.handle_faults().unwrap();
    assert_eq!(interrupts(), (false, false));
}

#[test]
fn each_kind_of_fault_has_its_reason_and_garbage_is_passed_over() {
    let rig = Rig::new();
    let group = rig.driver.streams::<TestDomain<S1>>(0, 0x7fff, Default::default()).unwrap();
    let stream = dmaspan::iommu::Attachment::new(group).unwrap();
    let faults = Recorder::on(&stream);
    let expected = [
        (1 << 1, FaultReason::Translation),
        (1 << 2, FaultReason::Tables),
        (1 << 3, FaultReason::Permission),
        (1 << 4, FaultReason::Tables),
        (1 << 5, FaultReason::Other(1 << 5)),
        (1 << 6, FaultReason::Other(1 << 6)),
        (1 << 7, FaultReason::Tables),
        (1 << 8, FaultReason::Other(1 << 8)),
    ];
    for (bits, reason) in expected {
        for bank in [0, 15] {
            rig.hardware.raise_context(bank, bits);
            let handled = rig.driver.handle_faults().unwrap();
            // The stream is random: of 16 bits, where there are 15.
            assert_eq!(handled.reported + handled.unclaimed, 1, "{bits:#x}");
            faults.take().iter().for_each(|report| assert_eq!(report.reason, reason));
            assert_eq!(rig.driver.handle_faults(), Ok(Handled::default()));
        }
    }
    // MULTI without a fault says nothing.
    rig.hardware.raise_context(3, 1 << 31);
    let nothing = Handled { malformed: 1, overflowed: true, ..Handled::default() };
    assert_eq!(rig.driver.handle_faults(), Ok(nothing));
    for bit in 0..32 {
        rig.hardware.raise_global(1 << bit);
        let handled = rig.driver.handle_faults().unwrap();
        assert!(handled.reported + handled.unclaimed + handled.malformed <= 1, "{bit}");
        assert_eq!(rig.driver.handle_faults(), Ok(Handled::default()), "{bit}");
    }
}

#[test]
fn a_storm_of_faults_takes_bounded_time_and_ends() {
    let rig = Rig::new();
    let (stream, domain) = (rig.stream::<S1>(1), rig.domain::<S1>());
    stream.attach(target(&domain)).unwrap();
    rig.hardware.set_behaviour(Behaviour { storm: 50, ..Default::default() });
    assert_eq!(rig.reads(1, 0), None);
    let mut looks = 0;
    loop {
        let handled = rig.driver.handle_faults().unwrap();
        assert!(handled.reported <= 1);
        looks += 1;
        if !handled.more {
            break;
        }
    }
    assert_eq!(looks, 51);
    // A stream that does nothing but fault keeps no other from working.
    rig.hardware.set_behaviour(Behaviour { storm: u64::MAX, ..Default::default() });
    assert_eq!(rig.reads(1, 0), None);
    map(&domain, 0, 0x8000_0000, 0x1000, Prot::READ);
    assert_eq!(rig.reads(1, 0), Some(0x8000_0000));
    assert!(rig.driver.handle_faults().unwrap().more);
    stream.detach().unwrap();
}

fn stall(rig: &Rig, iova: u64) -> StallId {
    match rig.hardware.access(1, Iova::new(iova), Access::Write).unwrap_err().response {
        Response::Stalled(id) => id,
        other => panic!("{other:?}"),
    }
}

/// Maps what is missing, and has the access tried again.
struct Pager<F: Tables>
where
    Arena: TableMemory<F::Word>,
{
    domain: Arc<TestDomain<F>>,
}

impl<F: Tables> FaultHandler for Pager<F>
where
    Arena: TableMemory<F::Word>,
{
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        assert_eq!(report.state, FaultState::Stalled);
        let page = report.iova.get() & !(granule::<F>() - 1);
        map(&self.domain, page, 0x8000_0000, granule::<F>(), Prot::READ_WRITE);
        FaultResponse::Retry
    }
}

fn stalled_goes_on<F: Tables>()
where
    Arena: TableMemory<F::Word>,
{
    let rig = Rig::with(SmmuConfig::default(), HELD);
    let (stream, domain) = (rig.stream::<F>(1), rig.domain::<F>());
    stream.attach(target(&domain)).unwrap();
    let pager = Arc::new(Pager { domain: Arc::clone(&domain) });
    stream.port().faults().set(Some(pager));
    let id = stall(&rig, 0x12_3456);
    assert_eq!(rig.hardware.resumed(id), None);
    assert_eq!(rig.driver.handle_faults().unwrap().reported, 1);
    let offset = 0x12_3456 & (granule::<F>() - 1);
    let hit = rig.hardware.resumed(id).unwrap().unwrap();
    assert_eq!(hit.paddr.get(), 0x8000_0000 + offset, "{}", F::NAME);
    // Nobody handles it: it ends.
    stream.port().faults().set(None);
    let id = stall(&rig, 0x80_0000);
    rig.driver.handle_faults().unwrap();
    let refused = rig.hardware.resumed(id).unwrap().unwrap_err();
    assert!(matches!(refused.why, Why::Terminated { .. }), "{}", F::NAME);
}

#[test]
fn a_stalled_access_goes_on_or_ends_as_the_handler_says() {
    stalled_goes_on::<S1>();
    stalled_goes_on::<ArmLpaeS2<16>>();
    stalled_goes_on::<ArmV7s>();
}

#[test]
fn a_stalled_access_ends_when_its_stream_leaves_the_domain() {
    let rig = Rig::with(SmmuConfig::default(), HELD);
    let (stream, domain) = (rig.stream::<S1>(1), rig.domain::<S1>());
    stream.attach(target(&domain)).unwrap();
    let id = stall(&rig, 0x5000);
    // Tried again, it would reach what the domain has now.
    map(&domain, 0x5000, 0x8000_0000, 0x1000, Prot::READ_WRITE);
    stream.detach().unwrap();
    let refused = rig.hardware.resumed(id).unwrap().unwrap_err();
    assert!(matches!(refused.why, Why::Terminated { .. }));
    rig.driver.handle_faults().unwrap();
    assert_eq!(rig.driver.handle_faults(), Ok(Handled::default()));
}

/// Has the stream accesses under way that found a bank by entry 0 before the entry was changed, and
/// come to the bank's tables now.
fn late<T>(rig: &Rig, bank: u32, accesses: impl FnOnce() -> T) -> T {
    let entry = rig.hardware.read32(0xc00);
    rig.hardware.write32(0xc00, bank);
    let done = accesses();
    rig.hardware.write32(0xc00, entry);
    done
}

#[test]
fn an_access_that_stalls_while_its_stream_leaves_the_domain_ends_too() {
    // The domain that it leaves is known, or not known since hardware did not answer before.
    for answered in [true, false] {
        let rig = Arc::new(Rig::with(SmmuConfig::default(), HELD));
        let (stream, domain) = (rig.stream::<S1>(1), rig.domain::<S1>());
        stream.attach(target(&domain)).unwrap();
        if !answered {
            let sync = SyncCompletion::Never;
            rig.hardware.set_behaviour(Behaviour { sync, ..Default::default() });
            stream.detach().unwrap_err();
            rig.hardware.set_behaviour(Behaviour::default());
        }
        let (bank, weak) = (domain.ops().bank(), Arc::downgrade(&rig));
        let (send, stalled) = std::sync::mpsc::channel();
        *rig.registers.watch.lock() = Some(Box::new(move |_, offset| {
            // TLBGSYNC.
            if offset == 0x70 {
                let rig = weak.upgrade().unwrap();
                send.send(late(&rig, bank, || stall(&rig, 0x7000))).unwrap();
            }
        }));
        stream.detach().unwrap();
        rig.registers.watch.lock().take();
        let id = stalled.recv().unwrap();
        assert_eq!(rig.hardware.stalled(usize::try_from(bank).unwrap()), 0, "{answered}");
        let refused = rig.hardware.resumed(id).unwrap().unwrap_err();
        assert!(matches!(refused.why, Why::Terminated { .. }), "{answered}");
    }
}

#[test]
fn a_domain_that_is_detached_leaves_nothing_cached_or_stalled_and_no_tables_in_its_bank() {
    let rig = Arc::new(Rig::with(SmmuConfig::default(), HELD));
    let port = rig.driver.stream::<TestDomain<S1>>(1, Default::default()).unwrap();
    let domain = rig.domain::<S1>();
    map(&domain, 0, 0x8000_0000, 0x1000, Prot::READ);
    let writes = || rig.registers.writes.load(std::sync::atomic::Ordering::Relaxed);
    let told_nothing = || {
        let before = writes();
        domain.ops().detach().unwrap();
        assert_eq!(writes(), before);
    };
    told_nothing();
    port.translate(&domain).unwrap();
    let bank = domain.ops().bank();
    let stalled = move |rig: &Rig| rig.hardware.stalled(usize::try_from(bank).unwrap());
    // The stream leaves, and hardware does not say so. Accesses come to the tables after what was
    // cached of them is forgotten: one is translated, and one stalls.
    let behaviour = Behaviour { invalidations: TakesEffect::AtOnce, ..Default::default() };
    rig.hardware.set_behaviour(Behaviour { sync: SyncCompletion::Never, ..behaviour });
    let (registers, weak) = (u64::from(16 + bank) << 12, Arc::downgrade(&rig));
    *rig.registers.watch.lock() = Some(Box::new(move |_, offset| {
        // TLBIASID.
        if offset == registers + 0x610 {
            let rig = weak.upgrade().unwrap();
            late(&rig, bank, || (rig.reads(1, 0).unwrap(), stall(&rig, 0x7000)));
        }
    }));
    port.block().unwrap_err();
    rig.hardware.set_behaviour(behaviour);
    assert_eq!((rig.hardware.cached_leaves(), stalled(&rig)), (1, 1));
    let weak = Arc::downgrade(&rig);
    *rig.registers.watch.lock() = Some(Box::new(move |_, offset| {
        // TLBGSYNC, which may wait for stalled accesses.
        assert!(offset != 0x70 || stalled(&weak.upgrade().unwrap()) == 0);
    }));
    domain.ops().detach().unwrap();
    rig.registers.watch.lock().take();
    assert_eq!((rig.hardware.cached_leaves(), rig.hardware.cached_links()), (0, 0));
    // SCTLR and TTBR0.
    let [control, tables] = [0, 0x20].map(|offset| rig.hardware.read32(registers + offset));
    assert_eq!((control, tables), (0, 0));
    told_nothing();
}

#[test]
fn without_stalls_a_retry_is_not_followed() {
    let rig = Rig::new();
    let (stream, domain) = (rig.stream::<S1>(1), rig.domain::<S1>());
    stream.attach(target(&domain)).unwrap();
    let faults = Recorder::answering(&stream, FaultResponse::Retry);
    let refused = rig.hardware.access(1, Iova::new(0), Access::Read).unwrap_err();
    assert_eq!(refused.response, Response::Aborted);
    rig.driver.handle_faults().unwrap();
    assert_eq!(faults.take()[0].state, FaultState::Ended);
}
