//! Hardware that answers again: nothing is lost, forgotten or released too early on the way there.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use dmaspan::container::{Attach, DomainId, Error, Interrupts, MapRequest, UnmapNotifier, Version};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::{Account, Container, Iova, IovaRange, PhysAddr, Span, UserAddr, UserRange};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{MapOptions, SimMemory, SimPinner, SimSpace};
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use crate::common::{PROT, faulty_domain, range, walker};
use crate::emulated::{Model, PAGE, pages};
use crate::hooked::{Hooking, Owner};

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
    // There is room for a part of it.
    let error = container.unmap(range(gone.get(), 3 * PAGE)).unwrap_err();
    assert!(matches!(error, Error::NotForgotten { .. }), "{error}");
    // The hardware lets go now.
    container.detach(id).unwrap();
    assert_eq!(container.mappings() as u64, TABLES);
    assert_eq!(container.unmap_all().unwrap(), TABLES * PAGE);
    owner.assert_untouched();
}
