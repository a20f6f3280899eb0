//! Device memory in mappings: followed by the CPU's leaves, mixed with memory, and revoked.

use std::cell::Cell;
use std::sync::Arc;

use dmaspan::container::{Alignment, Attach, Error, Interrupts};
use dmaspan::io_pgtable::Arena;
use dmaspan::{
    Account, Container, DmaSpace, Errno, Iova, PhysAddr, Prot, Span, UserAddr, UserRange,
};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{
    MapOptions, Population, Rights, SimMemory, SimPinError, SimPinner, SimSpace,
};
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use dmaspan_sim::walker::{Access, Walker};

use crate::common::{PROT, faulty_domain, range};

const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;
/// Where BARs are: beyond all memory.
const BAR: u64 = 1 << 42;

struct World<const BATCH: usize> {
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    tables: Arena,
    iotlb: Iotlb<ArmLpaeS1Walker, Arena>,
    account: Arc<Account>,
    container: Arc<Container<SimPinner, parking_lot::RawMutex, BATCH>>,
}

fn world<const BATCH: usize>() -> World<BATCH> {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 64 << 20, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let (domain, tables, iotlb) = faulty_domain::<12>(&Faults::none());
    let account = Account::new(64 << 20);
    let container = Container::of_batch(SimPinner::new(Arc::clone(&memory)), Arc::clone(&account));
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    World { memory, space, tables, iotlb, account, container: Arc::new(container) }
}

fn span(paddr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(paddr), len).unwrap()
}

fn user(start: u64, len: u64) -> UserRange {
    UserRange::from_len(UserAddr::new(start), len).unwrap()
}

impl<const BATCH: usize> World<BATCH> {
    fn bar(&self, at: u64, paddr: u64, len: u64, max_leaf_lg2: u32) -> UserRange {
        let options = MapOptions { max_leaf_lg2, ..MapOptions::default() };
        self.space.map_device_with(UserAddr::new(at), span(paddr, len), options).unwrap()
    }

    /// Where a device's write to an IOVA goes.
    fn leads_to(&self, iova: u64) -> Option<u64> {
        let found = self.iotlb.walker().walk(&self.tables, Iova::new(iova), Access::Write);
        found.ok().map(|leaf| leaf.paddr.get())
    }
}

#[test]
fn a_bar_is_followed_by_the_leaves_of_the_cpu_whatever_its_size() {
    for (gib, leaf_lg2, lookups, leaves) in
        [(32u64, 30, 32, 32), (32, 21, 16384, 32), (128, 30, 128, 128), (512, 30, 512, 512)]
    {
        let World { space, tables, account, container, memory, .. } = &world::<256>();
        let options = MapOptions { max_leaf_lg2: leaf_lg2, ..MapOptions::default() };
        let bar = span(BAR, gib * G1);
        let user = space.map_device_with(UserAddr::new(1 << 44), bar, options).unwrap();
        let before = container.pinner().lookups();
        let mapped = container.map(space, user, Iova::new(1 << 40), PROT).unwrap();
        assert_eq!(container.pinner().lookups() - before, lookups, "{gib} GiB");
        assert_eq!((mapped.spans, mapped.mmio, mapped.memory), (1, gib * G1, 0));
        assert_eq!(mapped.better, None);
        assert_eq!(account.used(), 0, "device memory is not charged");
        assert_eq!(container.census().sizes().collect::<Vec<_>>(), [(30, leaves)]);
        assert_eq!(container.unmap_all().unwrap(), gib * G1);
        assert_eq!((tables.tables(), memory.violations().len()), (1, 0));
    }
}

#[test]
fn a_misaligned_bar_is_mapped_and_the_report_says_what_alignment_would_bring() {
    let world = world::<256>();
    // The user's address is 4 KiB off the device's, so that the CPU has small leaves only.
    let bar = world.bar((1 << 44) + 0x1000, BAR, 4 * M2, 30);
    let before = world.container.pinner().lookups();
    let mapped = world.container.map(&world.space, bar, Iova::new(G1), PROT).unwrap();
    assert_eq!(world.container.pinner().lookups() - before, 4 * 512);
    let better = Alignment { leaf: M2, bytes: 4 * M2, iova: 0, user: M2 - 0x1000 };
    assert_eq!(mapped.better, Some(better));
    world.container.unmap_all().unwrap();
    // The IOVA is 8 KiB off.
    let bar = world.bar(1 << 44, BAR, 4 * M2, 30);
    let mapped = world.container.map(&world.space, bar, Iova::new(G1 + 0x2000), PROT).unwrap();
    let better = Alignment { leaf: M2, bytes: 4 * M2, iova: M2 - 0x2000, user: 0 };
    assert_eq!(mapped.better, Some(better));
    assert_eq!(world.container.census().sizes().collect::<Vec<_>>()[0].0, 12);
    // Doing as it says brings them.
    world.container.unmap_all().unwrap();
    let iova = Iova::new(G1 + 0x2000 + better.iova);
    assert_eq!(world.container.map(&world.space, bar, iova, PROT).unwrap().better, None);
    assert_eq!(world.container.census().sizes().collect::<Vec<_>>(), [(21, 4)]);
}

/// Memory, a BAR and memory again, in one range; memory in scattered pages.
fn mixed<const BATCH: usize>(world: &World<BATCH>) -> (UserRange, Vec<u64>) {
    let start = 1 << 44;
    let pages = world.memory.allocate_scattered(64 << 12, 5).unwrap();
    let (low, high) = pages.split_at(32);
    world.space.map(UserAddr::new(start), low).unwrap();
    world.bar(start + (32 << 12), BAR + (32 << 12), M2, 30);
    world.space.map(UserAddr::new(start + (32 << 12) + M2), high).unwrap();
    let device = (0..512).map(|n| BAR + ((32 + n) << 12));
    let frames = low.iter().map(|span| span.paddr().get());
    let frames = frames.chain(device).chain(high.iter().map(|span| span.paddr().get()));
    (user(start, (64 << 12) + M2), frames.collect())
}

fn kinds_mix<const BATCH: usize>() -> Vec<(u32, u64)> {
    let world = world::<BATCH>();
    let (user, frames) = mixed(&world);
    let mapped = world.container.map(&world.space, user, Iova::new(0), PROT).unwrap();
    assert_eq!((mapped.memory, mapped.mmio), (64 << 12, M2));
    assert_eq!(world.account.used(), 64 << 12, "memory alone is charged");
    assert_eq!(world.memory.pinned_frames(), 64);
    for (n, frame) in (0u64..).zip(&frames) {
        assert_eq!(world.leads_to(n << 12), Some(*frame), "page {n}");
    }
    let leaves = world.container.census().sizes().collect();
    let all = (64 << 12) + M2;
    assert_eq!(world.container.unmap(range(0, all)).unwrap(), all);
    assert_eq!((world.account.used(), world.memory.pinned_frames()), (0, 0));
    assert_eq!(world.memory.violations(), []);
    assert_eq!(world.tables.tables(), 1);
    leaves
}

#[test]
fn kinds_mix_within_a_mapping_whatever_the_batch() {
    let leaves = kinds_mix::<256>();
    assert_eq!(kinds_mix::<1>(), leaves);
    assert_eq!(kinds_mix::<2>(), leaves);
    assert_eq!(kinds_mix::<3>(), leaves);
    assert_eq!(kinds_mix::<512>(), leaves);
}

#[test]
fn device_memory_that_may_only_be_read_is_not_mapped_for_writing() {
    let world = world::<256>();
    let at = UserAddr::new(1 << 44);
    let bar = world.space.map_device(at, span(BAR, M2), Rights::ReadOnly).unwrap();
    let error = world.container.map(&world.space, bar, Iova::new(0), PROT).unwrap_err();
    assert!(matches!(error, Error::Pin { source: SimPinError::ReadOnly { .. }, .. }), "{error}");
    assert_eq!(world.container.errno(&error), Errno::EFAULT);
    assert_eq!((world.container.mappings(), world.tables.tables()), (0, 1));
    world.container.map(&world.space, bar, Iova::new(0), Prot::READ).unwrap();
}

#[test]
fn device_memory_is_faulted_in_and_transient_faults_are_tried_again_up_to_a_bound() {
    let world = world::<256>();
    let options = MapOptions { population: Population::Lazy, ..MapOptions::default() };
    let (at, bar) = (UserAddr::new(1 << 44), span(BAR, 4 * M2));
    let bar = world.space.map_device_with(at, bar, options).unwrap();
    world.space.inject_transient_faults(2);
    world.container.map(&world.space, bar, Iova::new(0), PROT).unwrap();
    assert!(world.space.faults() > 0);
    world.container.unmap_all().unwrap();
    world.space.zap(bar);
    let bar = world.space.map_device_with(at, span(BAR, 4 * M2), options).unwrap();
    world.space.inject_transient_faults(u32::MAX);
    let error = world.container.map(&world.space, bar, Iova::new(0), PROT).unwrap_err();
    assert_eq!(world.container.errno(&error), Errno::EFAULT);
    assert_eq!((world.container.mappings(), world.tables.tables()), (0, 1));
}

#[test]
fn a_zapped_bar_is_out_of_the_devices_reach_before_it_is_gone_and_memory_stays() {
    let world = world::<4>();
    let (user, frames) = mixed(&world);
    world.container.map(&world.space, user, Iova::new(0), PROT).unwrap();
    world.container.map(&world.space, user, Iova::new(G1), Prot::READ).unwrap();
    let charged = world.account.used();
    let (container, space) = (Arc::clone(&world.container), Arc::downgrade(&world.space));
    let told = Arc::new(std::sync::Mutex::new(Vec::new()));
    let tell = Arc::clone(&told);
    world.space.on_zap(Box::new(move |zapped| {
        let Some(space) = space.upgrade() else { return };
        tell.lock().unwrap().push(container.revoke(&space, zapped).unwrap());
    }));
    let bar = UserRange::from_len(user.start().wrapping_add(32 << 12), M2).unwrap();
    world.space.zap(bar);
    assert_eq!(*told.lock().unwrap(), [2 * M2], "of both mappings");
    for (n, frame) in (0u64..).zip(&frames) {
        let expected = (!(32..544).contains(&n)).then_some(*frame);
        assert_eq!(world.leads_to(n << 12), expected, "page {n}");
        assert!(world.iotlb.stale_leaves(range(n << 12, 1 << 12)).is_empty());
    }
    assert_eq!((world.account.used(), world.memory.pinned_frames()), (charged, 64));
    // What is revoked already is nothing more to revoke.
    assert_eq!(world.container.revoke(&world.space, bar).unwrap(), 0);
    let all = (64 << 12) + M2;
    assert_eq!(world.container.unmap(range(0, all)).unwrap(), all);
    assert_eq!(world.container.unmap_all().unwrap(), all);
    assert_eq!((world.account.used(), world.memory.pinned_frames()), (0, 0));
    assert_eq!((world.memory.violations(), world.tables.tables()), (vec![], 1));
}

#[test]
fn of_two_bars_that_follow_each_other_one_is_revoked() {
    for (first, second) in [(0, 1), (1, 0)] {
        let world = world::<1>();
        let start = 1u64 << 44;
        let bars = [(start, BAR), (start + M2, BAR + 64 * M2)];
        for (at, paddr) in bars {
            world.bar(at, paddr, M2, 30);
        }
        let whole = user(start, 2 * M2);
        world.container.map(&world.space, whole, Iova::new(0), PROT).unwrap();
        let iova = |n: usize| if n == 0 { 0 } else { M2 };
        // A byte of it is enough: its leaf cannot be cut.
        let byte = user(bars[first].0 + 5, 1);
        assert_eq!(world.container.revoke(&world.space, byte).unwrap(), M2);
        assert_eq!(world.leads_to(iova(first)), None);
        assert_eq!(world.leads_to(iova(second)), Some(bars[second].1));
        assert_eq!(world.container.revoke(&world.space, whole).unwrap(), M2);
        assert_eq!(world.leads_to(iova(second)), None);
        assert_eq!(world.container.unmap_all().unwrap(), 2 * M2);
        assert_eq!(world.tables.tables(), 1);
    }
}

#[test]
fn another_space_and_memory_are_not_revoked() {
    let world = world::<256>();
    let (user, _) = mixed(&world);
    world.container.map(&world.space, user, Iova::new(0), PROT).unwrap();
    let other = Arc::new(SimSpace::new(Arc::clone(&world.memory)));
    assert_eq!(world.container.revoke(&other, user).unwrap(), 0);
    let low = UserRange::from_len(user.start(), 32 << 12).unwrap();
    assert_eq!(world.container.revoke(&world.space, low).unwrap(), 0);
    assert!(world.leads_to(32 << 12).is_some());
}

#[test]
fn device_memory_that_hardware_does_not_forget_is_said_to_stay_until_it_does() {
    let world = world::<256>();
    let bar = world.bar(1 << 44, BAR, M2, 30);
    world.container.map(&world.space, bar, Iova::new(0), PROT).unwrap();
    world.iotlb.fail_next_invalidations(u64::MAX);
    for _ in 0..2 {
        let error = world.container.revoke(&world.space, bar).unwrap_err();
        let Error::NotForgotten { range: found, .. } = error else { panic!("{error}") };
        assert_eq!((found, world.leads_to(0)), (range(0, M2), None));
    }
    let error = world.container.unmap_all().unwrap_err();
    assert!(matches!(error, Error::NotForgotten { .. }), "{error}");
    let error = world.container.map(&world.space, bar, Iova::new(0), PROT).unwrap_err();
    assert!(matches!(error, Error::Quarantined { .. }), "{error}");
    world.iotlb.fail_next_invalidations(0);
    assert_eq!(world.container.revoke(&world.space, bar).unwrap(), 0, "nothing is left");
    assert_eq!(world.container.mappings(), 0);
}

#[test]
fn a_cancelled_map_gives_everything_back() {
    let world = world::<4>();
    let (user, _) = mixed(&world);
    let mut last = 0;
    for asked in 1.. {
        let left = Cell::new(asked);
        let cancelled = || {
            left.set(left.get() - 1);
            left.get() == 0
        };
        let request = dmaspan::container::MapRequest::new(&world.space, user, Iova::new(0), PROT)
            .cancelled_by(&cancelled);
        let Err(error) = world.container.map_request(&request) else {
            assert!(asked > 64 / 4, "asked {asked} times for batches of four");
            break;
        };
        let Error::Cancelled { mapped, .. } = error else { panic!("{error}") };
        assert!(mapped >= last, "later and later");
        last = mapped;
        assert_eq!(world.container.errno(&error), Errno::EINTR);
        assert_eq!((world.account.used(), world.memory.pinned_frames()), (0, 0));
        assert_eq!((world.container.mappings(), world.tables.tables()), (0, 1));
    }
    assert_eq!(world.memory.violations(), []);
}
