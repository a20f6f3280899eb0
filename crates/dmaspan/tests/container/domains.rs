//! Several domains: attached and detached at any time, they translate the same.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use dmaspan::container::{Attach, BusyHook, DomainId, Error, GaveUp, Interrupts, MapRequest};
use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, Arena, ArmLpaeS1, ArmLpaeS1Config, Format, PageTable, TableMemory, Word,
};
use dmaspan::iommu::{Domain, IommuOps};
use dmaspan::{
    Account, Container, DmaSpace as _, Errno, Iova, PhysAddr, Prot, Span, UserAddr, UserRange,
};
use dmaspan_sim::fault::{Faults, Faulty, Fired};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{MapOptions, SimMemory, SimPinner, SimSpace};
use dmaspan_sim::walker::amd_v1::{AmdV1WalkRegisters, AmdV1Walker};
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use dmaspan_sim::walker::{Access, Walker};

use parking_lot::Mutex;

use crate::common::{PROT, range, walker};

/// Granules of 16K: the least that all these domains have.
const G: u32 = 14;
const PAGE: u64 = 1 << G;

type Tried<const BATCH: usize> = Container<Faulty<SimPinner>, parking_lot::RawMutex, BATCH>;

/// What a device behind a domain sees.
trait View {
    fn probe(&self, iova: u64) -> Option<PhysAddr>;
    fn prot(&self, iova: u64) -> Option<Prot>;
    fn fail_next_invalidations(&self, count: u64);
    fn invalidations(&self) -> u64;
    fn tables(&self) -> usize;
}

struct Seen<W> {
    iotlb: Iotlb<W, Arena>,
    tables: Arena,
}

impl<W: Walker> View for Seen<W> {
    fn probe(&self, iova: u64) -> Option<PhysAddr> {
        self.iotlb.translate(Iova::new(iova), Access::Read).ok().map(|hit| hit.paddr)
    }

    fn prot(&self, iova: u64) -> Option<Prot> {
        self.iotlb.translate(Iova::new(iova), Access::Read).ok().map(|hit| hit.prot)
    }

    fn fail_next_invalidations(&self, count: u64) {
        self.iotlb.fail_next_invalidations(count);
    }

    fn invalidations(&self) -> u64 {
        let counters = self.iotlb.counters();
        counters.invalidations_by_range + counters.invalidations_of_all
    }

    fn tables(&self) -> usize {
        self.tables.tables()
    }
}

fn arena() -> Arena {
    Arena::new(PhysAddr::new(0x4000_0000), 64 << 20)
}

type Arm<const LG2: u32> =
    Domain<ArmLpaeS1<LG2>, Faulty<Arena>, Faulty<Iotlb<ArmLpaeS1Walker, Arena>>>;
type Amd = Domain<AmdV1, Faulty<Arena>, Faulty<Iotlb<AmdV1Walker, Arena>>>;

/// Arm's, with leaves of `2^LG2` bytes and larger.
fn arm<const LG2: u32>(faults: &Faults, input_bits: u32) -> (Arm<LG2>, Arc<dyn View>) {
    let tables = arena();
    let config = ArmLpaeS1Config::new(input_bits, 48);
    let sizes = ArmLpaeS1::<LG2>::PAGE_SIZES | ArmLpaeS1::<LG2>::CONTIGUOUS_SIZES;
    let config = ArmLpaeS1Config { page_sizes: Some(sizes), ..config };
    let format = ArmLpaeS1::<LG2>::new(config).unwrap();
    let table = PageTable::new(format, Faulty::new(tables.clone(), faults)).unwrap();
    let walker = walker(&table);
    finish(table, walker, tables, faults)
}

/// AMD's, with leaves of every power of two.
fn amd(faults: &Faults) -> (Amd, Arc<dyn View>) {
    let tables = arena();
    let format = AmdV1::new(AmdV1Config { first_levels: 4, ..AmdV1Config::new(48, 48) }).unwrap();
    let table = PageTable::new(format, Faulty::new(tables.clone(), faults)).unwrap();
    let (root, level) = table.root_and_level();
    let dte = table.format().registers(root, level).dte;
    let walker = AmdV1Walker::new(AmdV1WalkRegisters { dte }).unwrap();
    finish(table, walker, tables, faults)
}

type Faulted<F, W> = Domain<F, Faulty<Arena>, Faulty<Iotlb<W, Arena>>>;

fn finish<F: Format, W: Walker + 'static>(
    table: PageTable<F, Faulty<Arena>>,
    walker: W,
    tables: Arena,
    faults: &Faults,
) -> (Faulted<F, W>, Arc<dyn View>)
where
    Faulty<Arena>: TableMemory<F::Word>,
    Iotlb<W, Arena>: IommuOps<Address = PhysAddr>,
    F::Word: Word,
{
    let iotlb = Iotlb::new(walker, tables.clone());
    let domain = Domain::new(table, Faulty::new(iotlb.clone(), faults)).unwrap();
    (domain, Arc::new(Seen { iotlb, tables }))
}

struct World<const BATCH: usize> {
    faults: Faults,
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    account: Arc<Account>,
    container: Tried<BATCH>,
    /// What is mapped: for each first IOVA the spans.
    model: BTreeMap<u64, Vec<Span>>,
    attached: Vec<(DomainId, Arc<dyn View>)>,
}

impl<const BATCH: usize> World<BATCH> {
    fn new() -> Self {
        let faults = Faults::none();
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 8192 << G, G).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let account = Account::new(u64::MAX);
        let pinner = Faulty::new(SimPinner::new(Arc::clone(&memory)), &faults);
        // Users with pages of 16K, so that what is mapped suits all formats.
        let container = Container::of_batch(pinner, Arc::clone(&account)).with_page_size(PAGE);
        let (model, attached) = (BTreeMap::new(), Vec::new());
        Self { faults, memory, space, account, container, model, attached }
    }

    /// Memory of that many granules, contiguous or scattered; a place for each IOVA.
    fn user(&self, iova: u64, granules: u64, seed: u64) -> (UserRange, Vec<Span>) {
        let bytes = granules << G;
        let scattered = || self.memory.allocate_scattered(bytes, seed).unwrap();
        let contiguous =
            seed.is_multiple_of(3).then(|| self.memory.allocate(bytes, G).ok()).flatten();
        let spans = contiguous.map_or_else(scattered, |span| vec![span]);
        let at = UserAddr::new((1 << 46) + iova);
        (self.space.map(at, &spans).unwrap(), spans)
    }

    fn map(&mut self, iova: u64, granules: u64, seed: u64) {
        let (user, spans) = self.user(iova, granules, seed);
        self.container.map(&self.space, user, Iova::new(iova), PROT).unwrap();
        self.model.insert(iova, spans);
    }

    fn unmap(&mut self, iova: u64) {
        let Some(spans) = self.model.remove(&iova) else { return };
        let bytes = spans.iter().map(|span| span.len()).sum();
        assert_eq!(self.container.unmap(range(iova, bytes)).unwrap(), bytes);
        self.space.unmap(UserRange::from_len(UserAddr::new((1 << 46) + iova), bytes).unwrap());
        self.memory.free(&spans);
    }

    fn attach(&mut self, kind: u64) -> DomainId {
        let how = Attach::new(Interrupts::Isolated);
        let (id, view) = match kind % 2 {
            0 => {
                let (domain, view) = arm::<14>(&self.faults, 48);
                (self.container.attach(domain, how).unwrap(), view)
            }
            _ => {
                let (domain, view) = amd(&self.faults);
                (self.container.attach(domain, how).unwrap(), view)
            }
        };
        self.attached.push((id, view));
        id
    }

    fn detach(&mut self, n: usize) -> Arc<dyn View> {
        let (id, view) = self.attached.remove(n);
        self.container.detach(id).unwrap();
        if self.attached.is_empty() {
            self.model.clear();
        }
        view
    }

    /// Every domain translates what is mapped, to where it is, and nothing else; pins and charges
    /// are those of what is mapped.
    fn check(&self) {
        let bytes: u64 = self.model.values().flatten().map(|span| span.len()).sum();
        let held = if self.attached.is_empty() { 0 } else { bytes };
        assert_eq!(self.memory.pinned_frames() << G, held);
        assert_eq!(self.account.used(), held);
        assert_eq!(self.container.mappings(), self.model.len());
        assert_eq!(self.memory.violations(), []);
        for (_, view) in &self.attached {
            for (&start, spans) in &self.model {
                let mut at = start;
                let below = start.wrapping_sub(1);
                assert_eq!(view.probe(below).is_some(), self.is_mapped(below));
                for span in spans {
                    for offset in (0..span.len()).step_by(1 << G) {
                        let expected = span.paddr().wrapping_add(offset + 5);
                        assert_eq!(view.probe(at + offset + 5), Some(expected));
                    }
                    at += span.len();
                }
                assert_eq!(view.probe(at).is_some(), self.is_mapped(at));
            }
        }
    }

    fn is_mapped(&self, iova: u64) -> bool {
        self.model
            .range(..=iova)
            .next_back()
            .is_some_and(|(&start, spans)| iova - start < spans.iter().map(|span| span.len()).sum())
    }

    /// All that a failed operation must leave alone.
    fn state(&self) -> impl PartialEq + std::fmt::Debug + use<BATCH> {
        let views: Vec<_> = self.attached.iter().map(|(_, view)| view.tables()).collect();
        let container = &self.container;
        let pins = (self.memory.pinned_frames(), self.account.used());
        (views, container.info(), container.census(), container.mappings(), pins)
    }
}

/// The n-th choice of a sequence.
fn mix(seed: u64) -> u64 {
    let mixed = (seed ^ 0x5851_f42d).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33
}

/// Random maps, unmaps, attaches and detaches; returns the leaves after each.
fn domains_stay_equal<const BATCH: usize>(seed: u64) -> Vec<Vec<(u32, u64)>> {
    let mut world = World::<BATCH>::new();
    let mut leaves = Vec::new();
    for step in 0..60 {
        let choice = mix(seed * 1000 + step);
        // Places are 256 granules apart.
        let iova = (1 + choice % 13) << (G + 8);
        match choice / 13 % 8 {
            0..=3 if !world.model.contains_key(&iova) => {
                world.map(iova, 1 + choice / 128 % 200, choice / 128);
            }
            0..=4 => world.unmap(iova),
            5 | 6 if world.attached.len() < 3 => {
                world.attach(choice / 128);
            }
            _ if !world.attached.is_empty() => {
                let n = usize::try_from(choice / 128).unwrap() % world.attached.len();
                let spans: Vec<_> = world.model.clone().into_iter().collect();
                let last = world.attached.len() == 1;
                let view = world.detach(n);
                assert_eq!(view.tables(), 0, "a domain that is detached is freed");
                if last {
                    for (iova, spans) in spans {
                        let bytes = spans.iter().map(|span| span.len()).sum();
                        let at = UserAddr::new((1 << 46) + iova);
                        world.space.unmap(UserRange::from_len(at, bytes).unwrap());
                        world.memory.free(&spans);
                    }
                }
            }
            _ => {}
        }
        world.check();
        leaves.push(world.container.census().sizes().collect());
    }
    leaves
}

#[test]
fn domains_translate_the_same_after_any_history_and_for_any_size_of_batch() {
    for seed in 0..12 {
        let leaves = domains_stay_equal::<512>(seed);
        assert_eq!(domains_stay_equal::<1>(seed), leaves, "seed {seed}");
        assert_eq!(domains_stay_equal::<2>(seed), leaves, "seed {seed}");
    }
}

#[test]
fn the_first_domain_pins_and_charges_and_the_next_do_not() {
    let mut world = World::<4>::new();
    for n in 0..5 {
        world.map(n << (G + 8), 100, n);
    }
    world.check();
    assert_eq!(world.memory.pinned_frames(), 0, "nobody reaches it yet");
    world.attach(0);
    world.check();
    world.attach(1);
    world.check();
}

#[test]
fn large_leaves_of_one_format_are_copied_into_those_of_another() {
    let mut world = World::<4>::new();
    // 16 MiB at a multiple of that: Arm has leaves of 2M, AMD one of 16M.
    let span = world.memory.allocate(1024 << G, 24).unwrap();
    let user = world.space.map(UserAddr::new(1 << 46), &[span]).unwrap();
    world.attach(0);
    world.container.map(&world.space, user, Iova::new(1 << 30), PROT).unwrap();
    let leaves: Vec<_> = world.container.census().sizes().collect();
    assert_eq!(leaves, [(21, 8)]);
    world.attach(1);
    world.detach(0);
    let leaves: Vec<_> = world.container.census().sizes().collect();
    assert_eq!(leaves, [(24, 1)], "the second domain is the first now");
    world.attach(0);
    world.model.insert(1 << 30, vec![span]);
    world.check();
    assert_eq!(world.container.unmap_all().unwrap(), 16 << 20);
    world.model.clear();
    world.check();
}

#[test]
fn a_mapping_of_more_spans_than_pages_that_all_domains_have_is_unmapped_whole() {
    let mut world = World::<256>::new();
    let (small, view) = arm::<12>(&world.faults, 48);
    let id = world.container.attach(small, Attach::new(Interrupts::Isolated)).unwrap();
    world.attached.push((id, view));
    world.attach(0);
    // Their granules are two, and of their leaves those of 2 MiB are the least in both.
    let both = 2 << 20;
    assert_eq!(world.container.info().page_sizes.trailing_zeros(), 21);
    world.map(both, both >> G, 1);
    assert!(world.model[&both].len() > 1);
    world.check();
    world.unmap(both);
    assert_eq!(world.attached[0].1.probe(2 * both - 1), None);
    world.check();
}

#[test]
fn what_is_no_memory_is_copied_as_such() {
    let mut world = World::<2>::new();
    let at = |n: u64| UserAddr::new((1 << 46) + (n << G));
    for n in [0, 2] {
        let spans = world.memory.allocate_scattered(1 << G, n).unwrap();
        world.space.map(at(n), &spans).unwrap();
        let bar = Span::new(PhysAddr::new((1 << 46) + (n << G)), 1 << G).unwrap();
        world.space.map_device_with(at(n + 1), bar, MapOptions::default()).unwrap();
    }
    let user = UserRange::from_len(at(0), 4 << G).unwrap();
    world.attach(0);
    world.container.map(&world.space, user, Iova::new(0), PROT).unwrap();
    world.attach(0);
    let [(_, first), (_, next)] = world.attached.as_slice() else { panic!() };
    let prots = |view: &Arc<dyn View>| [0, 1, 2, 3].map(|n: u64| view.prot(n << G).unwrap());
    let mmio = prots(first).map(|prot| prot.contains(Prot::MMIO));
    assert_eq!(mmio, [false, true, false, true]);
    assert_eq!(prots(first), prots(next));
    assert_eq!(first.probe(3 << G), Some(PhysAddr::new((1 << 46) + (2 << G))));
    assert_eq!(first.probe(3 << G), next.probe(3 << G));
    assert_eq!(world.container.unmap_all().unwrap(), 4 << G);
    assert_eq!((prots_left(first), prots_left(next)), (0, 0));
    world.check();
}

fn prots_left(view: &Arc<dyn View>) -> usize {
    (0..4u64).filter(|n| view.prot(n << G).is_some()).count()
}

#[test]
fn an_attach_over_the_limit_of_an_owner_changes_nothing() {
    let mut world = World::<8>::new();
    world.map(0, 30, 1);
    let (user, _) = world.user(1 << (G + 8), 30, 2);
    let poor = Account::new(29 << G);
    let iova = Iova::new(1 << (G + 8));
    let request = MapRequest::new(&world.space, user, iova, PROT).owner(&poor);
    world.container.map_request(&request).unwrap();
    let before = world.state();
    let (domain, view) = amd(&world.faults);
    let error = world.container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap_err();
    assert!(matches!(error, Error::OverLimit { user: named, .. } if named == user), "{error}");
    assert_eq!(world.container.errno(&error), Errno::ENOMEM);
    assert_eq!(world.state(), before);
    assert_eq!((view.tables(), poor.used()), (0, 0));
}

/// Attaches with every step failing once; all is as before then. Returns how many steps there are.
fn survives_attach(domains: u64) -> u32 {
    let mut world = with_mappings(domains);
    let before = world.state();
    for n in 1.. {
        let (domain, view) = amd(&world.faults);
        world.faults.arm(n);
        let result = world.container.attach(domain, Attach::new(Interrupts::Isolated));
        let fired = world.faults.disarm();
        if let Ok(id) = result {
            world.attached.push((id, view));
            world.check();
            if fired == Fired::No {
                return n - 1;
            }
            // It did without what it asked for.
            world = with_mappings(domains);
            continue;
        }
        assert_eq!(world.state(), before, "step {n}");
        // With one failure, hardware lets go: nothing can be left.
        assert_eq!(view.tables(), 0, "step {n}");
        world.check();
    }
    unreachable!()
}

fn with_mappings(domains: u64) -> World<8> {
    let mut world = World::new();
    for n in 0..domains {
        world.attach(n);
    }
    for n in 1..4 {
        world.map(n << (G + 8), 30, n);
    }
    world
}

#[test]
fn an_attach_that_fails_at_any_step_changes_nothing() {
    assert!(survives_attach(0) > 60, "pins and tables");
    assert!(survives_attach(1) > 5);
    assert!(survives_attach(2) > 5);
}

#[test]
fn a_detach_whose_hardware_does_not_answer_once_leaves_nothing_in_use() {
    for (domains, n) in [(1, 0), (2, 0), (2, 1), (3, 1)] {
        for step in 1.. {
            let mut world = with_mappings(domains);
            let (id, view) = world.attached.remove(n);
            world.faults.arm(step);
            let result = world.container.detach(id);
            if world.faults.disarm() == Fired::No {
                assert_eq!(step, 2, "letting go is the only step");
                assert_eq!(view.tables(), 0);
                result.unwrap();
                break;
            }
            result.unwrap();
            if world.attached.is_empty() {
                world.model.clear();
            }
            assert_eq!(view.probe(1 << (G + 8)), None);
            world.check();
            assert!(view.tables() > 0, "its tables leak");
        }
    }
}

#[test]
fn what_a_detached_domain_may_still_use_stays_pinned_when_it_is_unmapped() {
    let mut world = with_mappings(2);
    let (id, view) = world.attached.remove(1);
    for n in 1..4u64 {
        assert!(view.probe(n << (G + 8)).is_some(), "hardware knows it");
    }
    // Hardware answers neither to letting go nor to an invalidation.
    view.fail_next_invalidations(u64::MAX);
    let first = range(1 << (G + 8), 30 << G);
    let is_first = |error: &Error<_>, bytes: u64| {
        let Error::NotForgotten { range, kept, .. } = *error else { return false };
        (range, kept) == (first, bytes)
    };
    let error = world.container.detach(id).unwrap_err();
    assert!(is_first(&error, 90 << G), "{error}");
    assert_eq!(world.container.errno(&error), Errno::EIO);
    assert_eq!(world.container.info().domains.len(), 1);
    // The other domain translates all, and what the mappings have stays when they go.
    world.check();
    for _ in 0..2 {
        let error = world.container.unmap_all().unwrap_err();
        assert!(is_first(&error, 90 << G), "{error}");
        assert_eq!((world.memory.pinned_frames(), world.account.used()), (90, 90 << G));
        for n in 1..4u64 {
            assert_eq!(world.attached[0].1.probe(n << (G + 8)), None);
        }
    }
    view.fail_next_invalidations(0);
    assert_eq!(world.container.unmap_all().unwrap(), 90 << G);
    assert_eq!((world.memory.pinned_frames(), world.account.used()), (0, 0));
    assert_eq!((world.container.mappings(), view.tables()), (0, 0), "it has let go at last");
    assert_eq!(world.memory.violations(), []);
}

#[test]
fn an_attach_that_cannot_be_taken_back_keeps_what_its_hardware_may_use() {
    for domains in [0, 1] {
        let steps = survives_attach(domains);
        for step in 1..=steps {
            let mut world = with_mappings(domains);
            let (domain, view) = amd(&world.faults);
            view.fail_next_invalidations(u64::MAX);
            world.faults.arm(step);
            let how = Attach::new(Interrupts::Isolated);
            let result = world.container.attach(domain, how);
            assert_eq!(world.faults.disarm(), Fired::Yes);
            if result.is_ok() {
                continue;
            }
            if domains == 1 {
                world.check();
            }
            let unmapped = world.container.unmap_all();
            // The first step comes before the first mapping, and the last behind all of them.
            let pinned = world.memory.pinned_frames();
            match step {
                1 => assert_eq!(pinned, 0),
                step if step == steps => assert_eq!(pinned, 90),
                _ => assert!(pinned <= 90),
            }
            assert_eq!(unmapped.is_ok(), pinned == 0);
            assert!(pinned << G <= world.account.used(), "a mapping is charged whole");
            assert_eq!(world.account.used() % (30 << G), 0);
            assert_eq!(world.memory.violations(), []);
            view.fail_next_invalidations(0);
            world.container.unmap_all().unwrap();
            assert_eq!((world.memory.pinned_frames(), world.account.used()), (0, 0));
            assert_eq!(world.memory.violations(), []);
            world.model.clear();
        }
    }
}

#[test]
fn unmapping_where_one_of_the_domains_does_not_answer_keeps_the_memory() {
    for domains in 2..4 {
        for failing in 0..domains {
            let mut world = with_mappings(domains as u64);
            let before: Vec<_> =
                world.attached.iter().map(|(_, view)| view.invalidations()).collect();
            world.attached[failing].1.fail_next_invalidations(1);
            let first = range(1 << (G + 8), 30 << G);
            let error = world.container.unmap(first).unwrap_err();
            assert!(matches!(error, Error::NotForgotten { .. }), "{error}");
            for (n, (_, view)) in world.attached.iter().enumerate() {
                assert!(n == failing || view.invalidations() > before[n], "all domains are told");
            }
            // Of the batch that was not confirmed, and charged with all of its mapping.
            assert_eq!(world.memory.pinned_frames(), 60 + 8);
            assert_eq!(world.account.used(), 90 << G);
            world.attached[failing].1.fail_next_invalidations(u64::MAX);
            let error = world.container.unmap_all().unwrap_err();
            let Error::NotForgotten { range, kept, unmapped, .. } = error else {
                panic!("{error}")
            };
            assert_eq!((range, kept, unmapped), (first, 90 << G, 0));
            assert_eq!(world.account.used(), 90 << G);
            world.attached[failing].1.fail_next_invalidations(0);
            assert_eq!(world.container.unmap_all().unwrap(), 90 << G);
            assert_eq!((world.memory.pinned_frames(), world.account.used()), (0, 0));
            assert_eq!(world.memory.violations(), []);
            world.model.clear();
        }
    }
}

#[test]
fn detaching_the_last_domain_unmaps_everything_and_another_one_begins_anew() {
    let mut world = with_mappings(3);
    world.detach(1);
    world.check();
    world.detach(0);
    world.check();
    world.detach(0);
    world.check();
    assert_eq!(world.container.mappings(), 0);
    let id = world.attach(0);
    assert_eq!(world.container.info().domains.len(), 1);
    world.container.detach(id).unwrap();
    let error = world.container.detach(id).unwrap_err();
    assert!(matches!(error, Error::NoDomain { id: named } if named == id), "{error}");
    assert_eq!(world.container.errno(&error), Errno::ENODEV);
}

#[test]
fn an_attach_can_be_cancelled_between_batches() {
    for domains in [0, 1] {
        let world = with_mappings(domains);
        let before = world.state();
        let calls = std::cell::Cell::new(0);
        let cancelled = || calls.replace(calls.get() + 1) == 5;
        let how = Attach::new(Interrupts::Isolated).cancelled_by(&cancelled);
        let (domain, view) = amd(&world.faults);
        let error = world.container.attach(domain, how).unwrap_err();
        assert!(matches!(error, Error::Cancelled { .. }), "{error}");
        assert_eq!(calls.get(), 6);
        assert_eq!((world.state() == before, view.tables()), (true, 0));
        world.check();
    }
}

#[test]
fn nobody_maps_while_domains_change_and_nothing_changes_while_somebody_maps() {
    let mut world = with_mappings(1);
    let (user, _) = world.user(9 << (G + 8), 30, 1);
    let container = &world.container;
    let attach = || {
        let (domain, _) = amd(&world.faults);
        container.attach(domain, Attach::new(Interrupts::Isolated))
    };
    let is_changing = |error: &Error<_>| matches!(error, Error::Changing);
    let cancelled = || {
        let error = attach().unwrap_err();
        assert!(is_changing(&error), "{error}");
        assert_eq!(container.errno(&error), Errno::EBUSY);
        assert!(is_changing(&container.detach(world.attached[0].0).unwrap_err()));
        true
    };
    let iova = Iova::new(9 << (G + 8));
    let request = MapRequest::new(&world.space, user, iova, PROT).cancelled_by(&cancelled);
    assert!(matches!(container.map_request(&request), Err(Error::Cancelled { .. })));
    let cancelled = || {
        assert!(is_changing(&container.map(&world.space, user, iova, PROT).unwrap_err()));
        let others = range(3 << (G + 8), 30 << G);
        assert!(is_changing(&container.unmap(others).unwrap_err()));
        assert!(is_changing(&attach().unwrap_err()));
        assert!(is_changing(&container.detach(world.attached[0].0).unwrap_err()));
        assert_eq!(container.info().domains.len(), 1);
        true
    };
    let (domain, _) = amd(&world.faults);
    let how = Attach::new(Interrupts::Isolated).cancelled_by(&cancelled);
    assert!(matches!(container.attach(domain, how), Err(Error::Cancelled { .. })));
    world.check();
    world.attach(1);
    world.check();
}

/// Says that somebody waits.
struct Waits(Mutex<Sender<()>>);

impl BusyHook for Waits {
    fn wait(&self, ready: &dyn Fn() -> bool) -> Result<(), GaveUp> {
        self.0.lock().send(()).unwrap();
        while !ready() {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn wake(&self) {}
}

#[test]
fn with_a_hook_a_map_waits_until_a_domain_is_attached() {
    let World { container, space, faults, memory, .. } = World::<8>::new();
    let (told, waits) = channel();
    let container = container.with_busy_hook(Box::new(Waits(Mutex::new(told))));
    let spans = memory.allocate_scattered(60 << G, 3).unwrap();
    let user = space.map(UserAddr::new(1 << 46), &spans).unwrap();
    container.map(&space, user, Iova::new(0), PROT).unwrap();
    let (domain, view) = amd(&faults);
    std::thread::scope(|scope| {
        let cell = std::cell::Cell::new(false);
        let cancelled = || {
            if !cell.replace(true) {
                scope.spawn(|| container.map(&space, user, Iova::new(1 << 30), PROT).unwrap());
                waits.recv().unwrap();
            }
            false
        };
        let how = Attach::new(Interrupts::Isolated).cancelled_by(&cancelled);
        container.attach(domain, how).unwrap();
    });
    assert_eq!(view.probe(1 << 30), Some(spans[0].paddr()));
    assert_eq!(container.unmap_all().unwrap(), 120 << G);
    assert_eq!(memory.violations(), []);
}
