//! The driver takes hardware over, and says which hardware it takes.

use std::sync::Arc;

use dmaspan::iommu::{IommuOps as _, Port as _, ReservedRegions};
use dmaspan_drivers::Error;
use dmaspan_drivers::vtd::{FaultInterrupt, Mode, Stage, VtdStream};

use crate::fake::{Broken, Fake, Tables, domain, start, stream, to};

#[test]
fn translation_goes_on_while_the_root_table_is_replaced() {
    let fake = Fake::new();
    for _ in 0..2 {
        let iommu = start(&fake, Mode::Legacy).expect("it starts");
        fake.state().watch = true;
        assert_ne!(fake.state().gsts >> 31, 0);
        drop(iommu);
        assert_ne!(fake.state().gsts >> 31, 0, "nothing passes without a driver");
    }
    assert!(!fake.state().passed);
}

#[test]
fn the_mode_changes_with_all_memory_protected_or_not_at_all() {
    for (protects, mode) in [(true, Mode::Scalable), (false, Mode::Scalable)] {
        let fake = Fake::new();
        if !protects {
            fake.state().cap &= !(3 << 5);
        }
        drop(start(&fake, Mode::Legacy).expect("it starts"));
        fake.state().watch = true;
        let started = start(&fake, mode);
        assert_eq!(started.is_ok(), protects);
        assert!(!fake.state().passed);
        assert_ne!(fake.state().gsts >> 31, 0);
        if protects {
            assert_eq!(fake.state().rtaddr >> 10 & 3, 1);
            assert_eq!(fake.state().pmen, 0);
        }
    }
}

#[test]
fn a_queue_of_somebody_else_is_empty_or_stopped_before_it_is_taken_away() {
    let fake = Fake::new();
    drop(start(&fake, Mode::Legacy).expect("it starts"));
    fake.state().busy = 100;
    drop(start(&fake, Mode::Legacy).expect("it starts"));
    assert!(!fake.state().torn);
    // It stopped with an error: there is nothing to wait for.
    let mut state = fake.state();
    (state.busy, state.fsts) = (u32::MAX, 1 << 4);
    let before = state.reads;
    drop(state);
    fake.breaks(Broken::Deaf);
    assert!(start(&fake, Mode::Legacy).is_err());
    assert!(fake.state().reads - before < 300);
}

#[test]
fn hardware_that_lacks_something_is_refused() {
    let refused = |cap: u64, ecap: u64, mode| {
        let fake = Fake::new();
        fake.state().cap &= !cap;
        fake.state().ecap &= !ecap;
        start(&fake, mode).err()
    };
    assert!(matches!(refused(0, 1 << 1, Mode::Legacy), Some(Error::Unsupported { .. })));
    assert!(matches!(refused(0, 1 << 43, Mode::Scalable), Some(Error::Unsupported { .. })));
    assert!(refused(0, 1 << 43, Mode::Legacy).is_none());
    // Without draining nobody knows when an access that was let through is over.
    for drains in [54, 55] {
        let refused = refused(1 << drains, 0, Mode::Legacy);
        assert!(matches!(refused, Some(Error::Unsupported { .. })), "{drains}");
    }
    for broken in [Broken::Gone, Broken::Deaf, Broken::Stuck, Broken::Silent] {
        let fake = Fake::new();
        fake.breaks(broken);
        assert!(matches!(start(&fake, Mode::Legacy), Err(Error::Hardware(_))));
    }
    let fake = Fake::new();
    fake.state().ecap &= !(1 << 46);
    let iommu = start(&fake, Mode::Scalable).expect("it starts");
    assert!(iommu.second_stage_config().is_err() && iommu.first_stage_config().is_ok());
}

#[test]
fn every_allocation_may_fail() {
    for mode in [Mode::Legacy, Mode::Scalable] {
        let fake = Fake::new();
        let mut started = None;
        for nth in 1.. {
            fake.memory.fail(nth);
            match start(&fake, mode) {
                Ok(iommu) => started = Some(iommu),
                Err(error) => assert!(matches!(error, Error::NoMemory(_)), "{error}"),
            }
            if started.is_some() {
                assert_eq!(nth, 3, "a queue and a root table");
                break;
            }
        }
        let iommu = started.expect("it started");
        for nth in 1..10 {
            fake.memory.fail(nth);
            let claimed = iommu.stream::<Tables>(8, Default::default());
            if claimed.is_ok() {
                break;
            }
            assert!(nth < 3, "context tables and PASIDs");
        }
        fake.memory.fail(0);
        let tables = domain(&iommu).expect("there is a number");
        stream(&iommu, 8).attach(to(&tables)).expect("it is attached");
        let structures = fake.memory.count();
        drop((tables, iommu));
        // The root table and the queue stay where hardware knows them.
        assert!(fake.memory.count() < structures);
    }
}

#[test]
fn numbers_of_domains_run_out_and_come_back() {
    let fake = Fake::new();
    fake.state().cap &= !7;
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    // Of hooks that no domain got, whether hardware answers or not.
    fake.breaks(Broken::Stuck);
    (0..100).for_each(|_| drop(iommu.ops(Stage::Second).expect("it came back")));
    fake.breaks(Broken::Not);
    let mut domains: Vec<_> = (0..14).map(|_| domain(&iommu).expect("there are 14")).collect();
    assert!(matches!(domain(&iommu), Err(Error::NoIds { limit: 16, .. })));
    let number = domains.remove(3).ops().domain_id();
    assert_eq!(domain(&iommu).expect("one came back").ops().domain_id(), number);
    // Of a domain that hardware did not let go of, it does not come back.
    let kept = domains.remove(5);
    let stream = stream(&iommu, 8);
    stream.attach(to(&kept)).expect("it is attached");
    fake.breaks(Broken::Silent);
    assert!(stream.detach().is_err());
    drop((stream, kept));
    fake.breaks(Broken::Not);
    // The one of the domain that was made and dropped above is free, and no other.
    let again = domain(&iommu).expect("one is free");
    assert!(domain(&iommu).is_err());
    drop(again);
}

#[test]
fn a_number_that_a_stream_was_given_during_a_detach_does_not_come_back() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    let tables = domain(&iommu).expect("there is a number");
    let number = tables.ops().domain_id();
    let port: VtdStream<Tables, _, _> =
        iommu.stream(8, ReservedRegions::new()).expect("nobody has it");
    fake.breaks(Broken::Stuck);
    let (hardware, given) = (fake.clone(), Arc::clone(&tables));
    fake.memory.meanwhile(move || {
        hardware.breaks(Broken::Not);
        port.translate(&given).expect("it answers");
    });
    tables.ops().detach().expect("it answers");
    // Now nobody takes it from the stream.
    fake.breaks(Broken::Silent);
    drop(tables);
    fake.breaks(Broken::Not);
    assert_ne!(domain(&iommu).expect("there is another").ops().domain_id(), number);
}

#[test]
fn a_unit_that_translates_no_dma_is_refused_by_name_and_left_as_it_was() {
    for mode in [Mode::Legacy, Mode::Scalable] {
        let fake = Fake::new();
        // SAGAW, as of a unit that is there for interrupts.
        fake.state().cap &= !(0x1f << 8);
        let error = start(&fake, mode).expect_err("it is refused");
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("no translation of DMA"), "{error}");
        assert_eq!((fake.state().gsts, fake.memory.count()), (0, 0));
    }
    // The first stage has no such field, and may translate or not.
    let fake = Fake::new();
    fake.state().cap &= !(0x1f << 8);
    fake.state().ecap &= !(1 << 46);
    start(&fake, Mode::Scalable).expect("it starts");
    fake.state().interrupts_alone = true;
    let error = start(&fake, Mode::Scalable).expect_err("it is refused");
    assert!(error.to_string().contains("no translation of DMA"), "{error}");
}

#[test]
fn an_interrupt_of_faults_is_one_that_goes_to_a_cpu() {
    for (extended, upper) in [(false, 0), (true, 0x1234_5600)] {
        let fake = Fake::new();
        fake.state().ecap |= u64::from(extended) << 4;
        let iommu = start(&fake, Mode::Legacy).expect("it starts");
        let set = |address| iommu.set_fault_interrupt(Some(FaultInterrupt { address, data: 0x31 }));
        for address in [0xfee0_1000, 0xfeef_fff0 | upper << 32] {
            set(address).expect("it is an interrupt");
            assert_eq!(fake.state().message, [0x31, address & 0xffff_ffff, address >> 32]);
            assert_eq!(fake.state().fectl, 0);
        }
        let memory = [0, 0x8000_0000, 0xfedf_fffc, 0xfef0_0000, 1 << 32, 0xfee0_1000 | 1 << 32];
        let wide = (!extended).then_some(0xfee0_1000 | 1 << 40);
        for address in memory.into_iter().chain(wide) {
            let before = fake.state().message;
            let error = set(address).expect_err("hardware would write to memory");
            assert!(matches!(error, Error::Config { .. }), "{error}");
            let state = fake.state();
            assert_eq!((state.message, state.fectl), (before, 1 << 31));
        }
    }
}
