//! Registered buffers stay as they were when there is no memory.

use std::sync::Arc;

use dmaspan::regbuf::{BufferRequest, CloneRequest, Existing, Pinned, Registry, SegmentsBuilder};
use dmaspan::{Account, Direction, HostAddr, PhysAddr, Span, UserAddr, UserRange};
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};

use crate::failing::{self, Case, Ends, case, said, unchanged};

const PAGE: u64 = 4096;
const USER: u64 = 0x7f00_0000_0000;

struct World {
    memory: Arc<SimMemory>,
    account: Arc<Account>,
    registry: Registry<Pinned<SimPinner>>,
    other: Registry<Pinned<SimPinner>>,
}

fn pages(first: u64, count: u64) -> UserRange {
    UserRange::from_len(UserAddr::new(USER + first * PAGE), count * PAGE).unwrap()
}

fn requests() -> [BufferRequest; 3] {
    [
        BufferRequest::new(pages(0, 40)),
        BufferRequest::new(pages(30, 10)),
        BufferRequest::new(pages(5, 1)),
    ]
}

impl World {
    /// Scattered pages, and a registry without a table.
    fn new() -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 128 * PAGE, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let mut spans = memory.allocate_scattered(30 * PAGE, 3).unwrap();
        spans.extend(memory.allocate_folios(&[3, 1], 3).unwrap());
        space.map(UserAddr::new(USER), &spans).unwrap();
        let account = Account::new(u64::MAX);
        let pinner = Arc::new(SimPinner::new(Arc::clone(&memory)));
        let registry = || {
            let (pinner, account) = (Arc::clone(&pinner), Arc::clone(&account));
            Registry::new(Pinned::new(pinner, Arc::clone(&space), account, 12))
        };
        let (registry, other) = (registry(), registry());
        Self { memory, account, registry, other }
    }

    fn registered() -> Self {
        let mut world = Self::new();
        world.registry.register(&requests()).unwrap();
        world
    }

    fn sparse() -> Self {
        let mut world = Self::new();
        world.registry.register_sparse(100).unwrap();
        world
    }
}

impl failing::World for World {
    fn state(&self) -> impl PartialEq + std::fmt::Debug + use<> {
        let pins = self.memory.pinned_frames();
        assert_eq!(pins * PAGE, self.account.used());
        assert_eq!(self.memory.violations(), []);
        let slots = |registry: &Registry<Pinned<SimPinner>>| -> Vec<_> {
            let user = |index| registry.get(index).ok().map(|node| node.user());
            (0..registry.slots()).map(user).collect()
        };
        (pins, slots(&self.registry), slots(&self.other))
    }

    fn end(self) {
        drop((self.registry, self.other));
        assert_eq!((self.memory.pinned_frames(), self.account.used()), (0, 0));
    }
}

/// What is done.
const CASES: [Case; 11] = [
    case("register", Ends::Maybe, |n| unchanged(n, World::new(), register)),
    case("register empty slots", Ends::Never, |n| unchanged(n, World::new(), register_sparse)),
    case("update", Ends::Maybe, |n| unchanged(n, World::registered(), update)),
    case("clone", Ends::Maybe, |n| unchanged(n, World::registered(), clone)),
    case("clone empty slots", Ends::Never, |n| unchanged(n, World::sparse(), clone)),
    case("clone empty slots within", Ends::Never, |n| unchanged(n, World::sparse(), clone_within)),
    case("empty slots", Ends::Never, |n| unchanged(n, World::registered(), empty)),
    case("unregister", Ends::Never, |n| unchanged(n, World::registered(), unregister)),
    case("import", Ends::Never, |n| unchanged(n, World::registered(), import)),
    case("build uniform segments", Ends::Never, |n| unchanged(n, World::new(), |_| build(4096))),
    case("build mixed segments", Ends::Never, |n| unchanged(n, World::new(), |_| build(4097))),
];

fn register(world: &mut World) -> Result<(), String> {
    world.registry.register(&requests()).map_err(said)
}

fn register_sparse(world: &mut World) -> Result<(), String> {
    world.registry.register_sparse(1000).map_err(said)
}

fn update(world: &mut World) -> Result<(), String> {
    world.registry.update(1, &[BufferRequest::new(pages(7, 22))]).map_err(said).map(|_| ())
}

fn clone(world: &mut World) -> Result<(), String> {
    let World { registry, other, .. } = world;
    other.clone_from(registry, &CloneRequest::default()).map_err(said)
}

fn clone_within(world: &mut World) -> Result<(), String> {
    let existing = Existing::Replace;
    let request = CloneRequest { index: 50, count: 100, existing, ..CloneRequest::default() };
    world.registry.clone_within(&request).map_err(said)
}

fn empty(world: &mut World) -> Result<(), String> {
    world.registry.update(0, &[BufferRequest::VACANT; 3]).map_err(said).map(|_| ())
}

fn unregister(world: &mut World) -> Result<(), String> {
    world.registry.unregister().map_err(said)
}

fn import(world: &mut World) -> Result<(), String> {
    let node = world.registry.get(0).map_err(said)?;
    let ranges = [pages(3, 9), pages(20, 20)];
    let import = node.import_vectored(&ranges, Direction::Bidirectional).map_err(said)?;
    assert_eq!(import.map(|span| span.len()).sum::<u64>(), 29 * PAGE);
    Ok(())
}

/// Segments of this length, the first ten of one page.
fn build(len: u64) -> Result<(), String> {
    let mut builder = SegmentsBuilder::new();
    for n in 0..40 {
        let len = if n < 10 { PAGE } else { len };
        let span = Span::new(HostAddr::new(n << 20), len).unwrap();
        builder.push(span).map_err(said)?;
    }
    builder.build().map_err(said).map(|segments| assert_eq!(segments.count(), 40))
}

#[test]
fn child() {
    failing::child(&CASES);
}

#[test]
fn an_allocation_that_fails_changes_nothing_unless_it_ends_the_program() {
    failing::sweep(module_path!(), &CASES);
}
