//! A container stays as it was when there is no memory.

use std::sync::Arc;

use dmaspan::container::{Attach, DirtyRead, DomainId, Interrupts, UnmapNotifier};
use dmaspan::io_pgtable::{AmdV1, AmdV1Config, Arena, PageTable};
use dmaspan::iommu::Domain;
use dmaspan::pin::Dirty;
use dmaspan::{Account, Container, Iova, IovaRange, PhysAddr, Prot, Span, UserAddr, UserRange};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{MapOptions, SimMemory, SimPinner, SimSpace};
use dmaspan_sim::walker::amd_v1::{AmdV1WalkRegisters, AmdV1Walker};

use crate::failing::{self, Case, Ends, case, said, unchanged};

const PAGE: u64 = 4096;
const USER: u64 = 0x7f00_0000_0000;
/// Where a BAR lies in the user's memory, in pages of it.
const BAR: u64 = 16;

type Amd = Domain<AmdV1, Arena, Iotlb<AmdV1Walker, Arena>>;

struct World {
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    account: Arc<Account>,
    container: Container<SimPinner, parking_lot::RawMutex, 4>,
    tables: Vec<Arena>,
    ids: Vec<DomainId>,
    next: Option<Amd>,
    /// Room for what is asked for, which is the caller's to have.
    words: Vec<u64>,
    spans: Vec<Span>,
}

struct Idle;

impl UnmapNotifier for Idle {
    fn unmapping(&self, _range: IovaRange) {}
}

fn pages(first: u64, count: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(first * PAGE), count * PAGE).unwrap()
}

fn user(first: u64, count: u64) -> UserRange {
    UserRange::from_len(UserAddr::new(USER + first * PAGE), count * PAGE).unwrap()
}

impl World {
    /// Domains, a mapping with a BAR in the middle, and pages that an emulated device has pinned.
    fn new(domains: usize) -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 64 * PAGE, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let spans = memory.allocate_scattered(40 * PAGE, 3).unwrap();
        space.map(UserAddr::new(USER), &spans).unwrap();
        let bar = Span::new(PhysAddr::new(1 << 45), 8 * PAGE).unwrap();
        space.map_device_with(user(BAR, 8).start(), bar, MapOptions::default()).unwrap();
        let account = Account::new(u64::MAX);
        let pinner = SimPinner::new(Arc::clone(&memory));
        let container = Container::of_batch(pinner, Arc::clone(&account));
        let (tables, ids, next) = Default::default();
        let (words, spans) = (vec![0; 8], Vec::with_capacity(64));
        let mut world = Self { memory, space, account, container, tables, ids, next, words, spans };
        world.new_domain();
        for _ in 0..domains {
            world.attach().unwrap();
            world.new_domain();
        }
        world.container.attach_emulated(Arc::new(Idle)).unwrap();
        world.map(64, 0, 30).unwrap();
        world.container.pin_range(pages(64, 9), Prot::READ, &mut Vec::<Span>::new()).unwrap();
        world
    }

    fn tracking(self) -> Self {
        self.container.start_dirty().unwrap();
        self
    }

    fn new_domain(&mut self) {
        let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
        let config = AmdV1Config { first_levels: 4, ..AmdV1Config::new(48, 48) };
        let table = PageTable::new(AmdV1::new(config).unwrap(), tables.clone()).unwrap();
        let (root, level) = table.root_and_level();
        let dte = table.format().registers(root, level).dte;
        let walker = AmdV1Walker::new(AmdV1WalkRegisters { dte }).unwrap();
        self.tables.push(tables.clone());
        self.next = Some(Domain::new(table, Iotlb::new(walker, tables)).unwrap());
    }

    fn attach(&mut self) -> Result<(), String> {
        let domain = self.next.take().unwrap();
        self.ids.reserve(1);
        let id = self.container.attach(domain, Attach::new(Interrupts::Isolated)).map_err(said)?;
        self.ids.push(id);
        Ok(())
    }

    fn map(&self, at: u64, first: u64, count: u64) -> Result<(), String> {
        let (user, iova) = (user(first, count), Iova::new(at * PAGE));
        self.container.map(&self.space, user, iova, Prot::READ_WRITE).map_err(said)?;
        Ok(())
    }
}

impl failing::World for World {
    fn state(&self) -> impl PartialEq + std::fmt::Debug + use<> {
        let info = self.container.info();
        let counts = (self.container.mappings(), self.container.census());
        let pins = (self.memory.pinned_frames(), self.account.used(), self.memory.violations());
        (info, counts, pins, self.container.tracks_dirty())
    }

    fn end(self) {}
}

/// What is done.
const CASES: [Case; 13] = [
    case("map", Ends::Maybe, |n| unchanged(n, World::new(2), |world| world.map(512, 0, 40))),
    case("map in no domain", Ends::Maybe, |n| {
        unchanged(n, World::new(0), |world| world.map(512, 0, 40))
    }),
    case("map while tracking", Ends::Maybe, |n| {
        unchanged(n, World::new(1).tracking(), |world| world.map(512, 0, 40))
    }),
    case("attach the first", Ends::Maybe, |n| unchanged(n, World::new(0), World::attach)),
    case("attach the second", Ends::Maybe, |n| unchanged(n, World::new(1), World::attach)),
    case("pin", Ends::Maybe, |n| unchanged(n, World::new(1), pin)),
    case("unpin the middle", Ends::Never, |n| unchanged(n, World::new(1), unpin)),
    case("start to track", Ends::Maybe, |n| unchanged(n, World::new(1), start)),
    case("get", Ends::Never, |n| unchanged(n, World::new(1).tracking(), get)),
    case("get elsewhere", Ends::Never, |n| unchanged(n, World::new(1).tracking(), get_to)),
    case("stop to track", Ends::Never, |n| unchanged(n, World::new(1).tracking(), stop)),
    case("revoke", Ends::Never, |n| unchanged(n, World::new(2), revoke)),
    case("read and write", Ends::Maybe, |n| unchanged(n, World::new(1), copy)),
];

fn pin(world: &mut World) -> Result<(), String> {
    let World { container, spans, .. } = world;
    container.pin_range(pages(66, 20), Prot::READ, spans).map_err(said)
}

fn unpin(world: &mut World) -> Result<(), String> {
    world.container.unpin_range(pages(66, 2), Dirty::Written).map_err(said)
}

fn start(world: &mut World) -> Result<(), String> {
    world.container.start_dirty().map_err(said)
}

fn stop(world: &mut World) -> Result<(), String> {
    world.container.stop_dirty().map_err(said)
}

fn get(world: &mut World) -> Result<(), String> {
    let World { container, words, .. } = world;
    container.dirty_bitmap(pages(64, 64), PAGE, words, DirtyRead::Clear).map_err(said)
}

fn get_to(world: &mut World) -> Result<(), String> {
    let mut bytes = [0; 8];
    let sink = &mut bytes[..];
    world.container.dirty_bitmap_to(pages(64, 64), PAGE, sink, DirtyRead::Clear).map_err(said)
}

fn revoke(world: &mut World) -> Result<(), String> {
    world.container.revoke(&world.space, user(BAR + 3, 2)).map_err(said).map(|_| ())
}

fn copy(world: &mut World) -> Result<(), String> {
    let mut bytes = [0; 64];
    world.container.read(Iova::new(65 * PAGE - 9), &mut bytes).map_err(said)?;
    world.container.write(Iova::new(65 * PAGE - 9), &bytes).map_err(said)
}

#[test]
fn child() {
    failing::child(&CASES);
}

#[test]
fn an_allocation_that_fails_changes_nothing_unless_it_ends_the_program() {
    failing::sweep(module_path!(), &CASES);
}
