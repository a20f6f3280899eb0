//! Hardware that answers again: nothing is lost, forgotten or released too early on the way there.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dmaspan::container::{
    Attach, DirtyRead, DomainId, Error, Interrupts, MapRequest, UnmapNotifier, Version,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::pin::Kind;
use dmaspan::{Account, Container, Iova, IovaRange, PhysAddr, Span, UserAddr, UserRange};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{MapOptions, SimMemory, SimPinner, SimSpace};
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use crate::common::{PROT, faulty_domain, range, walker};
use crate::emulated::{Model, PAGE, pages};
use crate::hooked::{Hooking, Owner, size};

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;

fn attach(container: &Hooking) -> (DomainId, Tlb) {
    let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
    (container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap(), iotlb)
}

#[test]
fn what_waits_for_a_domain_that_has_gone_is_unmapped_once_its_hardware_answers() {
    for one_by_one in [false, true] {
        let owner = Owner::new(16);
        let container = owner.with_domain();
        let (id, iotlb) = attach(&container);
        for n in [0, 4, 8] {
            container.map(&owner.space, owner.pages(n, 4), Iova::new(n * PAGE), PROT).unwrap();
        }
        iotlb.fail_next_invalidations(u64::MAX);
        assert!(matches!(container.detach(id), Err(Error::NotForgotten { .. })));
        iotlb.fail_next_invalidations(0);
        if one_by_one {
            for n in [0, 4, 8] {
                assert_eq!(container.unmap(pages(n, 4)).unwrap(), 4 * PAGE);
            }
        }
        let left = if one_by_one { 0 } else { 12 * PAGE };
        assert_eq!(container.unmap_all().unwrap(), left);
        assert_eq!(container.mappings(), 0);
        owner.assert_untouched();
    }
}

/// A container with an emulated device, whose only domain went without an answer.
fn kept_for_emulated(owner: &Owner) -> (Arc<Model>, Arc<Hooking>, Tlb) {
    let (model, container, _) = Model::attach(owner.container());
    let (id, iotlb) = attach(&container);
    container.map(&owner.space, owner.pages(0, 8), Iova::new(0), PROT).unwrap();
    iotlb.fail_next_invalidations(u64::MAX);
    assert!(matches!(container.detach(id), Err(Error::NotForgotten { .. })));
    assert_eq!(container.mappings(), 1);
    (model, container, iotlb)
}

#[test]
fn what_stays_for_emulated_devices_is_unmapped_with_all_while_hardware_is_waited_for() {
    let owner = Owner::new(16);
    let (_model, container, iotlb) = kept_for_emulated(&owner);
    iotlb.fail_next_invalidations(0);
    assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
    assert_eq!(container.mappings(), 0);
    owner.assert_untouched();

    // Asked for while hardware does not answer, it goes when that does.
    let (_model, container, iotlb) = kept_for_emulated(&owner);
    assert!(matches!(container.unmap_all(), Err(Error::NotForgotten { .. })));
    iotlb.fail_next_invalidations(0);
    assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
    assert_eq!(container.mappings(), 0);
    owner.assert_untouched();
}

#[test]
fn emulated_devices_are_told_of_what_waits_for_hardware_too() {
    let owner = Owner::new(16);
    let (model, container, _) = Model::attach(owner.container());
    let (id, iotlb) = attach(&container);
    container.map(&owner.space, owner.pages(0, 8), Iova::new(0), PROT).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    let pin = container.pin_external(pages(2, 2), PROT, &mut spans).unwrap();
    iotlb.fail_next_invalidations(u64::MAX);
    assert!(container.detach(id).is_err());
    model.pins.lock().push(pin);
    iotlb.fail_next_invalidations(0);
    assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
    assert_eq!(model.told(), [pages(0, 8)]);
    assert_eq!(container.mappings(), 0);
    owner.assert_untouched();
}

#[test]
fn a_domain_has_all_that_stays_mapped_or_is_refused() {
    let owner = Owner::new(16);
    let (_model, container, iotlb) = kept_for_emulated(&owner);
    let (domain, ..) = faulty_domain::<12>(&Faults::none());
    let refused = container.attach(domain, Attach::new(Interrupts::Isolated));
    assert!(matches!(refused, Err(Error::Quarantined { .. })), "{refused:?}");
    iotlb.fail_next_invalidations(0);
    let (_, iotlb) = attach(&container);
    let first = iotlb.translate(Iova::new(0), dmaspan_sim::walker::Access::Write);
    assert_eq!(first.unwrap().paddr, owner.frames[0]);
    assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
    owner.assert_untouched();
}

#[test]
fn device_memory_that_waits_for_hardware_is_not_said_to_be_revoked() {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 1 << 20, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let bar = Span::new(PhysAddr::new(1 << 42), 8 * PAGE).unwrap();
    let at = UserAddr::new(1 << 44);
    let user = space.map_device_with(at, bar, MapOptions::default()).unwrap();
    let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
    let container: Container<_, parking_lot::RawMutex> =
        Container::with_domain(SimPinner::new(memory), domain, Account::new(u64::MAX));
    container.map(&space, user, Iova::new(0), PROT).unwrap();
    iotlb.fail_next_invalidations(u64::MAX);
    assert!(container.unmap_all().is_err());
    let error = container.revoke(&space, user).unwrap_err();
    assert!(matches!(error, Error::NotForgotten { .. }), "{error}");
    let other = UserRange::from_len(UserAddr::new(1 << 46), PAGE).unwrap();
    assert_eq!(container.revoke(&space, other).unwrap(), 0);
    iotlb.fail_next_invalidations(0);
    container.revoke(&space, user).unwrap();
    assert_eq!(container.mappings(), 0, "it was unmapped");
}

#[test]
fn what_waits_for_hardware_hides_nothing_from_an_unmap_of_version_1() {
    let owner = Owner::new(16);
    let container = owner.container().with_version(Version::V1);
    let (_, iotlb) = attach(&container);
    for n in [0, 4] {
        container.map(&owner.space, owner.pages(n, 4), Iova::new(n * PAGE), PROT).unwrap();
    }
    assert_eq!(container.unmap(pages(2, 6)).unwrap(), 0, "a mapping hides what is behind it");
    iotlb.fail_next_invalidations(u64::MAX);
    assert!(container.unmap(pages(0, 4)).is_err());
    iotlb.fail_next_invalidations(0);
    assert_eq!(container.unmap(pages(2, 6)).unwrap(), 4 * PAGE);
    assert_eq!(container.mappings(), 0);
    owner.assert_untouched();
}

#[test]
fn an_unmap_reports_as_written_what_an_earlier_one_could_not_release() {
    let owner = Owner::new(16);
    let container = owner.container();
    let (_, iotlb) = attach(&container);
    container.map(&owner.space, owner.pages(0, 4), Iova::new(0), PROT).unwrap();
    container.start_dirty().unwrap();
    iotlb.fail_next_invalidations(u64::MAX);
    let mut words = [0];
    assert!(container.unmap_dirty(pages(0, 64), PAGE, &mut words).is_err());
    assert_eq!(words, [0xf]);
    iotlb.fail_next_invalidations(0);
    // A device may have written since it was told.
    assert_eq!(container.unmap_dirty(pages(0, 64), PAGE, &mut words).unwrap(), 4 * PAGE);
    assert_eq!(words, [0xf]);
    owner.assert_untouched();
}

#[test]
fn a_pinner_that_panics_over_what_hardware_confirmed_is_not_asked_again() {
    let owner = Owner::new(16);
    let container = owner.container();
    let (_, iotlb) = attach(&container);
    container.map(&owner.space, owner.pages(0, 4), Iova::new(0), PROT).unwrap();
    iotlb.fail_next_invalidations(u64::MAX);
    assert!(container.unmap_all().is_err());
    iotlb.fail_next_invalidations(0);
    *container.pinner().on_unpin.lock() = Some(Box::new(|| panic!("in the middle of an unpin")));
    let caught = catch_unwind(AssertUnwindSafe(|| container.unmap_all()));
    assert!(caught.is_err());
    let error = container.unmap_all().unwrap_err();
    assert!(matches!(error, Error::NotForgotten { .. }), "{error}");
    let (unpinned, _) = *container.pinner().unpinned.lock();
    assert!(unpinned < 4 * PAGE, "nobody knows whether the first piece was unpinned");
    assert_eq!(owner.memory.violations(), []);
}

/// Hardware that never confirms an invalidation, and lets go of its tables.
struct LetsGo(Tlb);

/// A domain of such hardware.
fn lets_go() -> (Domain<ArmLpaeS1<12>, Arena, LetsGo>, Arena) {
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 64 << 20);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let table = PageTable::new(format, tables.clone()).unwrap();
    let iotlb = Iotlb::new(walker(&table), tables.clone());
    (Domain::new(table, LetsGo(iotlb)).unwrap(), tables)
}

// SAFETY: all is done by the simulated hardware, or not confirmed.
unsafe impl IommuOps for LetsGo {
    type Address = PhysAddr;

    fn invalidate(&self, _what: &Invalidation<'_>) -> Result<(), HardwareError> {
        Err(HardwareError { what: "no answer", status: 1 })
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.0.detach()
    }

    fn max_ranges(&self) -> usize {
        self.0.max_ranges()
    }
}

#[test]
fn hardware_that_lets_go_at_the_end_leaves_nothing_pinned_though_no_more_could_wait_for_it() {
    const MAPPINGS: u64 = 2048;
    for dropped in [false, true] {
        let owner = Owner::new(2);
        let (domain, tables) = lets_go();
        let container = Container::<_, parking_lot::RawMutex, 4>::of_batch(
            owner.pinner(),
            Arc::clone(&owner.account),
        );
        let id = container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
        for n in 0..MAPPINGS {
            let at = Iova::new(n * 2 * PAGE);
            container.map(&owner.space, owner.pages(0, 2), at, PROT).unwrap();
        }
        let all = range(0, MAPPINGS * 2 * PAGE);
        let error = container.unmap(all).unwrap_err();
        let Error::NotForgotten { kept, unmapped, .. } = error else { panic!("{error}") };
        assert_eq!((kept, unmapped), (MAPPINGS * 2 * PAGE, 0));
        let refused = container.map(&owner.space, owner.pages(0, 2), Iova::new(1 << 40), PROT);
        assert!(matches!(refused, Err(Error::QuarantineFull { .. })), "{refused:?}");
        assert_eq!(owner.memory.pinned_frames(), 2);
        if !dropped {
            container.detach(id).unwrap();
            assert_eq!((container.mappings(), owner.account.used()), (0, 0));
        }
        drop(container);
        assert_eq!(tables.tables(), 0);
        owner.assert_untouched();
    }
}

#[test]
fn a_failed_map_that_could_not_be_taken_back_is_no_mapping() {
    const TABLES: u64 = 16;
    let owner = Owner::new(16);
    let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
    let container = Container::<_, parking_lot::RawMutex, 1>::of_batch(
        owner.pinner(),
        Arc::clone(&owner.account),
    );
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    // No table is empty: nothing but leaves is to be forgotten.
    let place = |table: u64, n: u64| Iova::new((table << 21) + n * 4 * PAGE);
    for table in 0..TABLES {
        container.map(&owner.space, owner.pages(15, 1), place(table, 0), PROT).unwrap();
    }
    iotlb.fail_next_invalidations(u64::MAX);
    let map = |at, calls| {
        let asked = Cell::new(0);
        let cancelled = || asked.replace(asked.get() + 1) == calls;
        let request = MapRequest::new(&owner.space, owner.pages(0, 3), at, PROT);
        container.map_request(&request.cancelled_by(&cancelled)).map(|_| ())
    };
    let mut failed = 0;
    for at in (0..TABLES).flat_map(|table| (1..128).map(move |n| place(table, n))) {
        // With a batch mapped, and less and less room to take it back.
        let cancelled = map(at, 1);
        assert!(matches!(cancelled, Err(Error::Cancelled { .. })), "{failed}: {cancelled:?}");
        let again = map(at, u32::MAX);
        assert!(matches!(again, Err(Error::Quarantined { .. })), "{failed}: {again:?}");
        failed += 1;
    }
    iotlb.fail_next_invalidations(0);
    assert_eq!(container.unmap_all().unwrap(), (TABLES + failed * 3) * PAGE);
    owner.assert_untouched();
}

/// A device that has nothing pinned.
struct Idle;

impl UnmapNotifier for Idle {
    fn unmapping(&self, _range: IovaRange) {}
}

#[test]
fn neither_a_map_that_failed_nor_a_mapping_that_was_to_go_stays_for_emulated_devices() {
    const TABLES: u64 = 9;
    let owner = Owner::new(16);
    let (domain, _) = lets_go();
    let container = Container::<_, parking_lot::RawMutex, 1>::of_batch(
        owner.pinner(),
        Arc::clone(&owner.account),
    );
    container.attach_emulated(Arc::new(Idle)).unwrap();
    let id = container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    // These stay, and no table is empty.
    let place = |table: u64, n: u64| Iova::new((table << 21) + n * 4 * PAGE);
    for table in 0..TABLES {
        container.map(&owner.space, owner.pages(15, 1), place(table, 0), PROT).unwrap();
    }
    let gone = place(0, 1);
    container.map(&owner.space, owner.pages(0, 3), gone, PROT).unwrap();
    for at in (0..TABLES).flat_map(|table| (2..128).map(move |n| place(table, n))) {
        let asked = Cell::new(0);
        let cancelled = || asked.replace(asked.get() + 1) == 1;
        let request = MapRequest::new(&owner.space, owner.pages(0, 3), at, PROT);
        let error = container.map_request(&request.cancelled_by(&cancelled)).unwrap_err();
        assert!(matches!(error, Error::Cancelled { .. }), "{at}: {error}");
    }
    let unmap = |at: Iova| match container.unmap(range(at.get(), 3 * PAGE)) {
        Err(Error::NotForgotten { source, .. }) => source.what,
        other => panic!("{other:?}"),
    };
    // There is room for a part of it, and for nothing of another then.
    assert_eq!(unmap(gone), "no answer");
    assert!(unmap(place(TABLES - 1, 127)).contains("too many unmaps wait"));
    // The hardware lets go now.
    container.detach(id).unwrap();
    assert_eq!(container.mappings() as u64, TABLES);
    assert_eq!(container.unmap_all().unwrap(), TABLES * PAGE);
    owner.assert_untouched();
}

#[test]
fn what_stays_though_a_detach_had_no_room_for_it_at_first_was_written_all_of_it() {
    const COUNT: u64 = 1200;
    let owner = Owner::new(COUNT);
    let container = Container::<_, parking_lot::RawMutex, 1>::of_batch(
        owner.pinner(),
        Arc::clone(&owner.account),
    );
    container.attach_emulated(Arc::new(Idle)).unwrap();
    let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
    let id = container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    container.map(&owner.space, owner.pages(0, COUNT), Iova::new(0), PROT).unwrap();
    iotlb.fail_next_invalidations(u64::MAX);
    assert!(matches!(container.detach(id), Err(Error::NotForgotten { .. })));
    assert_eq!(container.info().domains, [id], "there is no room for all that would wait");
    iotlb.fail_next_invalidations(0);
    // Whatever waits is confirmed by that, and a part is mapped.
    assert_eq!(container.unmap(pages(1 << 20, 1)).unwrap(), 0);
    assert!((1..COUNT).contains(&owner.memory.pinned_frames()));
    container.start_dirty().unwrap();
    container.detach(id).unwrap();
    let mut words = [0; 19];
    container.dirty_bitmap(pages(0, 19 * 64), PAGE, &mut words, DirtyRead::Clear).unwrap();
    let written: u32 = words.iter().map(|word: &u64| word.count_ones()).sum();
    assert_eq!(u64::from(written), COUNT, "nobody asked hardware");
    assert_eq!(container.unmap_all().unwrap(), COUNT * PAGE);
    owner.assert_untouched();
}

#[test]
fn an_unmap_that_finds_no_room_leaves_mappings_as_they_are_and_says_which() {
    const COUNT: u64 = 1100;
    let owner = Owner::new(COUNT);
    let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
    let container = Container::<_, parking_lot::RawMutex, 1>::of_batch(
        owner.pinner(),
        Arc::clone(&owner.account),
    );
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    let map = |first, count| {
        container.map(&owner.space, owner.pages(0, count), Iova::new(first * PAGE), PROT)
    };
    map(0, COUNT).unwrap();
    map(1 << 20, 3).unwrap();
    map((1 << 20) + 3, 2).unwrap();
    iotlb.fail_next_invalidations(u64::MAX);
    assert!(container.unmap(pages(0, COUNT)).is_err());
    assert!(matches!(map(0, 1), Err(Error::Quarantined { .. })), "a part is gone");
    // All room is taken.
    let error = container.unmap(pages(1 << 20, 5)).unwrap_err();
    let Error::NotForgotten { range, source, kept, unmapped } = error else { panic!("{error}") };
    assert_eq!((range, kept, unmapped), (pages(1 << 20, 3), 5 * PAGE, 0));
    assert_eq!(source.status, 0, "no hardware was asked");
    let error = container.unmap_all().unwrap_err();
    let Error::NotForgotten { range, kept, unmapped, .. } = error else { panic!("{error}") };
    assert_eq!((range, kept, unmapped), (pages(0, COUNT), (COUNT + 5) * PAGE, 0));
    for first in [1 << 20, (1 << 20) + 3] {
        assert!(matches!(map(first, 1), Err(Error::Exists { .. })));
        iotlb.translate(Iova::new(first * PAGE), dmaspan_sim::walker::Access::Write).unwrap();
    }
    iotlb.fail_next_invalidations(0);
    assert_eq!(container.unmap(pages(1 << 20, 5)).unwrap(), 5 * PAGE);
    assert_eq!(container.unmap_all().unwrap(), COUNT * PAGE);
    assert!(format!("{container:?}").contains("quarantined: 0"), "{container:?}");
    owner.assert_untouched();
}

#[test]
fn what_waits_for_a_domain_that_has_gone_takes_room_as_what_waits_for_others() {
    const COUNT: u64 = 1100;
    let owner = Owner::new(COUNT);
    let container = Container::<_, parking_lot::RawMutex, 1>::of_batch(
        owner.pinner(),
        Arc::clone(&owner.account),
    );
    let [(_, kept), (id, lost)] = [(), ()].map(|()| {
        let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
        (container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap(), iotlb)
    });
    container.map(&owner.space, owner.pages(0, COUNT), Iova::new(0), PROT).unwrap();
    lost.fail_next_invalidations(u64::MAX);
    assert!(container.detach(id).is_err());
    assert!(container.unmap_all().is_err());
    let last = kept.translate(Iova::new((COUNT - 1) * PAGE), dmaspan_sim::walker::Access::Write);
    assert_eq!(last.unwrap().paddr, owner.frames[size(COUNT - 1)], "there is no room for it");
    assert_eq!(owner.memory.pinned_frames(), COUNT);
    lost.fail_next_invalidations(0);
    // Whatever waits is confirmed by that.
    assert_eq!(container.unmap(pages(1 << 20, 1)).unwrap(), 0);
    assert_eq!(container.unmap_all().unwrap(), COUNT * PAGE);
    owner.assert_untouched();
}

#[test]
fn an_unmap_of_one_mapping_and_of_many_asks_hardware_again_what_it_did_not_confirm() {
    for count in 1..4 {
        let owner = Owner::new(16);
        let container = owner.container();
        let (_, iotlb) = attach(&container);
        for n in 0..=count {
            container.map(&owner.space, owner.pages(n, 1), Iova::new(n * PAGE), PROT).unwrap();
        }
        iotlb.fail_next_invalidations(1);
        assert!(container.unmap(pages(0, 1)).is_err());
        assert_eq!(container.unmap(pages(1, count)).unwrap(), count * PAGE);
        assert_eq!(container.mappings(), 0, "with {count}");
        assert!(format!("{container:?}").contains("quarantined: 0"), "{container:?}");
        owner.assert_untouched();
    }
}

#[test]
fn what_stays_for_emulated_devices_is_not_unmapped_with_a_part_of_it() {
    let owner = Owner::new(16);
    let (model, container, _) = Model::attach(owner.container());
    let (id, iotlb) = attach(&container);
    container.map(&owner.space, owner.pages(0, 8), Iova::new(0), PROT).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    let pin = container.pin_external(pages(2, 2), PROT, &mut spans).unwrap();
    iotlb.fail_next_invalidations(u64::MAX);
    assert!(container.detach(id).is_err());
    let error = container.unmap(pages(0, 4)).unwrap_err();
    assert!(matches!(error, Error::NotForgotten { .. }), "{error}");
    assert_eq!(model.told(), [], "it does not go");
    iotlb.fail_next_invalidations(0);
    assert_eq!(container.unmap(pages(32, 1)).unwrap(), 0);
    assert!(matches!(container.unmap(pages(0, 4)), Err(Error::Bisects { .. })));
    model.pins.lock().push(pin);
    assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
    owner.assert_untouched();
}

#[test]
fn what_was_unmapped_in_part_is_unmapped_whole_when_hardware_answers() {
    let owner = Owner::new(1100);
    let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
    let container = Container::<_, parking_lot::RawMutex, 1>::of_batch(
        owner.pinner(),
        Arc::clone(&owner.account),
    );
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    container.map(&owner.space, owner.pages(0, 500), Iova::new(0), PROT).unwrap();
    container.map(&owner.space, owner.pages(0, 1100), Iova::new(1 << 30), PROT).unwrap();
    iotlb.fail_next_invalidations(u64::MAX);
    let large = range(1 << 30, 1100 * PAGE);
    assert!(container.unmap(pages(0, 500)).is_err());
    assert!(container.unmap(large).is_err());
    iotlb.fail_next_invalidations(0);
    assert_eq!(container.unmap(large).unwrap(), 1100 * PAGE);
    assert_eq!(container.mappings(), 0);
    owner.assert_untouched();
}

#[test]
fn version_1_unmaps_nothing_that_is_being_copied() {
    let owner = Owner::new(16);
    let container = Arc::new(owner.container().with_version(Version::V1));
    container.map(&owner.space, owner.pages(0, 16), Iova::new(0), PROT).unwrap();
    let inner = Arc::downgrade(&container);
    *container.pinner().on_copy.lock() = Some(Box::new(move || {
        // The range ends in the mapping.
        assert!(inner.upgrade().unwrap().unmap(pages(0, 8)).is_err());
    }));
    container.read(Iova::new(0), &mut [0; 4]).unwrap();
    assert_eq!(container.unmap(pages(0, 8)).unwrap(), 16 * PAGE);
}

#[test]
fn a_revocation_that_is_called_again_asks_hardware_again() {
    let owner = Owner::new(16);
    let mut pinner = owner.pinner();
    pinner.odd = Kind::Mmio;
    let container = Hooking::new(pinner, Arc::clone(&owner.account));
    let (_, iotlb) = attach(&container);
    container.map(&owner.space, owner.pages(0, 16), Iova::new(0), PROT).unwrap();
    iotlb.fail_next_invalidations(u64::MAX);
    assert!(container.revoke(&owner.space, owner.user).is_err());
    assert!(container.revoke(&owner.space, owner.user).is_err());
    iotlb.fail_next_invalidations(0);
    assert_eq!(container.revoke(&owner.space, owner.user).unwrap(), 0, "it was taken away");
    let devices = owner.frames.iter().filter(|frame| frame.get() >> 12 & 1 == 1).count();
    assert_eq!(container.pinner().unpinned.lock().1, PAGE * devices as u64);
    assert_eq!(container.unmap_all().unwrap(), 16 * PAGE);
    owner.assert_untouched();
}

/// Hardware that confirms nothing, and lets go of its tables when it is asked again.
struct LetsGoLater(Tlb, AtomicBool);

// SAFETY: all is done by the simulated hardware, or not confirmed.
unsafe impl IommuOps for LetsGoLater {
    type Address = PhysAddr;

    fn invalidate(&self, _what: &Invalidation<'_>) -> Result<(), HardwareError> {
        Err(HardwareError { what: "no answer", status: 1 })
    }

    fn detach(&self) -> Result<(), HardwareError> {
        if self.1.swap(true, Ordering::Relaxed) {
            return self.0.detach();
        }
        Err(HardwareError { what: "not yet", status: 1 })
    }

    fn max_ranges(&self) -> usize {
        self.0.max_ranges()
    }
}

#[test]
fn a_dropped_container_asks_hardware_of_domains_that_have_gone_to_let_go() {
    let owner = Owner::new(16);
    let container = owner.with_domain();
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 64 << 20);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let table = PageTable::new(format, tables.clone()).unwrap();
    let iotlb = Iotlb::new(walker(&table), tables.clone());
    let later = LetsGoLater(iotlb, AtomicBool::new(false));
    let domain = Domain::new(table, later).unwrap();
    let id = container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    container.map(&owner.space, owner.pages(0, 4), Iova::new(0), PROT).unwrap();
    assert!(matches!(container.detach(id), Err(Error::NotForgotten { .. })));
    drop(container);
    assert_eq!(tables.tables(), 0);
    owner.assert_untouched();
}

#[test]
fn what_waits_for_one_domain_does_not_wait_for_what_another_failed_to_confirm_later() {
    let owner = Owner::new(16);
    let container = owner.container();
    let [(_, one), (other_id, other)] = [(), ()].map(|()| attach(&container));
    for n in 0..2 {
        container.map(&owner.space, owner.pages(4 * n, 4), Iova::new(4 * n * PAGE), PROT).unwrap();
    }
    // It is asked again by the next unmap, in vain.
    one.fail_next_invalidations(2);
    assert!(container.unmap(pages(0, 4)).is_err());
    other.fail_next_invalidations(u64::MAX);
    assert!(container.unmap(pages(4, 4)).is_err());
    assert_eq!(owner.memory.pinned_frames(), 8);
    assert_eq!(container.unmap(pages(32, 1)).unwrap(), 0);
    assert_eq!((owner.memory.pinned_frames(), container.mappings()), (4, 1));

    // A domain that goes may use what is unmapped already, for all that is known.
    other.fail_next_invalidations(0);
    assert_eq!(container.unmap_all().unwrap(), 4 * PAGE);
    container.map(&owner.space, owner.pages(0, 4), Iova::new(0), PROT).unwrap();
    one.fail_next_invalidations(2);
    assert!(container.unmap(pages(0, 4)).is_err());
    other.fail_next_invalidations(u64::MAX);
    assert!(container.detach(other_id).is_err());
    for _ in 0..2 {
        assert_eq!(container.unmap(pages(32, 1)).unwrap(), 0);
        assert_eq!((owner.memory.pinned_frames(), container.mappings()), (4, 1));
    }
    other.fail_next_invalidations(0);
    assert_eq!(container.unmap_all().unwrap(), 4 * PAGE);
    owner.assert_untouched();
}

#[test]
fn what_waits_for_a_domain_that_has_gone_waits_whatever_others_fail_to_confirm_later() {
    let owner = Owner::new(16);
    let container = owner.container();
    let [(_, one), (gone, other)] = [(), ()].map(|()| attach(&container));
    for n in 0..2 {
        container.map(&owner.space, owner.pages(4 * n, 4), Iova::new(4 * n * PAGE), PROT).unwrap();
    }
    other.fail_next_invalidations(u64::MAX);
    assert!(container.unmap(pages(0, 4)).is_err());
    assert!(container.detach(gone).is_err());
    one.fail_next_invalidations(u64::MAX);
    assert!(container.unmap(pages(4, 4)).is_err());
    assert_eq!(container.unmap(pages(32, 1)).unwrap(), 0);
    assert_eq!((owner.memory.pinned_frames(), container.mappings()), (8, 2));
    other.fail_next_invalidations(0);
    one.fail_next_invalidations(0);
    assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
    owner.assert_untouched();
}

#[test]
fn what_hardware_forgot_is_reported_as_it_was_marked_beside_what_it_did_not_forget() {
    let owner = Owner::new(16);
    let container = Container::<_, parking_lot::RawMutex, 1>::of_batch(
        owner.pinner(),
        Arc::clone(&owner.account),
    );
    let (domain, _, iotlb) = crate::common::marking_domain::<12>(&Faults::none());
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    for n in 0..2 {
        container.map(&owner.space, owner.pages(4 * n, 2), Iova::new(4 * n * PAGE), PROT).unwrap();
    }
    container.start_dirty().unwrap();
    iotlb.translate(Iova::new(5 * PAGE), dmaspan_sim::walker::Access::Write).unwrap();
    iotlb.fail_next_invalidations(1);
    let mut words = [0];
    assert!(container.unmap_dirty(pages(0, 64), PAGE, &mut words).is_err());
    assert_eq!(words, [0b10_0011]);
    container.unmap_all().unwrap();
    owner.assert_untouched();
}

#[test]
fn an_unmap_of_what_is_newer_asks_hardware_of_a_domain_that_has_gone_again() {
    let owner = Owner::new(16);
    let container = owner.with_domain();
    let (gone, other) = attach(&container);
    container.map(&owner.space, owner.pages(0, 4), Iova::new(0), PROT).unwrap();
    other.fail_next_invalidations(u64::MAX);
    assert!(container.detach(gone).is_err());
    assert!(container.unmap(pages(0, 4)).is_err());
    container.map(&owner.space, owner.pages(4, 1), Iova::new(32 * PAGE), PROT).unwrap();
    other.fail_next_invalidations(0);
    assert_eq!(container.unmap(pages(32, 1)).unwrap(), PAGE);
    assert_eq!(container.mappings(), 0);
    owner.assert_untouched();
}
