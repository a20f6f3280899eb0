//! A container allocates little to map terabytes, and nothing to unmap them.

use std::sync::Arc;

use dmaspan::account::Counting;
use dmaspan::container::{Attach, Interrupts};
use dmaspan::pin::Dirty;
use dmaspan::{Account, Container, Iova, IovaRange, PhysAddr, Prot, Span, UserAddr, UserRange};
use dmaspan_sim::memory::{Books, MapOptions, SimMemory, SimPinner, SimSpace};

use crate::{allocated, domain};

/// The memory of a domain's tables.
const TABLES: u64 = 64 << 20;

struct World {
    space: Arc<SimSpace>,
    user: UserRange,
    memory: Arc<SimMemory>,
    account: Arc<Account>,
    container: Container<SimPinner, parking_lot::RawMutex>,
}

impl World {
    /// Folios of one order, no two of which are one span.
    fn new(bytes: u64, folio_lg2: u32, counting: Counting) -> Self {
        let physical = PhysAddr::new(0);
        let memory = SimMemory::with_books(physical, 2 * bytes, 12, Books::Folios).unwrap();
        let memory = Arc::new(memory);
        let mut folios: Vec<Span> = (0..bytes >> folio_lg2)
            .map(|_| memory.allocate_folio(folio_lg2 - 12).unwrap().span())
            .collect();
        folios.sort_unstable_by_key(|span| std::cmp::Reverse(span.paddr()));
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let user = space.map(UserAddr::new(1 << 46), &folios).unwrap();
        let account = Account::with_counting(u64::MAX, counting);
        let pinner = SimPinner::new(Arc::clone(&memory));
        let container = Container::new(pinner, Arc::clone(&account));
        Self { space, user, memory, account, container }
    }

    fn map(&self) {
        self.container.map(&self.space, self.user, Iova::new(0), Prot::READ_WRITE).unwrap();
    }
}

/// Bytes that a map, an attach and a pin allocate. Whatever takes translations and pins away
/// allocates nothing.
fn costs(bytes: u64, folio_lg2: u32, counting: Counting) -> [u64; 3] {
    let world = World::new(bytes, folio_lg2, counting);
    let (container, memory, account) = (&world.container, &world.memory, &world.account);
    let how = || Attach::new(Interrupts::Isolated);
    let (first, tables) = domain(TABLES);
    let id = container.attach(first, how()).unwrap();
    let empty = tables.tables();
    let ((), map) = allocated(|| world.map());
    let leaves = bytes >> folio_lg2;
    assert_eq!(container.census().sizes().collect::<Vec<_>>(), [(folio_lg2, leaves)]);
    assert_eq!((memory.pinned_frames() << 12, account.used()), (bytes, bytes));

    let all = IovaRange::from_len(Iova::new(0), bytes).unwrap();
    let (unmapped, unmap) = allocated(|| container.unmap(all).unwrap());
    assert_eq!((unmapped, unmap, tables.tables()), (bytes, 0, empty));

    // Again with a second domain, which copies from the first.
    world.map();
    let (second, tables) = domain(TABLES);
    let (_, attach) = allocated(|| container.attach(second, how()).unwrap());
    assert!(tables.tables() > empty);
    // The list of where mappings may lie is made anew, for one domain.
    let (_, detach) = allocated(|| container.detach(id).unwrap());
    assert!(detach <= 256, "{detach}");
    let (unmapped, unmap) = allocated(|| container.unmap_all().unwrap());
    assert_eq!((unmapped, unmap, tables.tables()), (bytes, 0, empty));

    world.map();
    let World { container, memory, account, .. } = world;
    let ((), dropped) = allocated(|| drop(container));
    assert_eq!((dropped, memory.pinned_frames(), account.used()), (0, 0, 0));
    assert_eq!(memory.violations(), []);
    [map, attach, pin(bytes, folio_lg2, counting)]
}

/// Bytes that an emulated device's pin of everything allocates, which is by span.
fn pin(bytes: u64, folio_lg2: u32, counting: Counting) -> u64 {
    let world = World::new(bytes, folio_lg2, counting);
    let device = Arc::new(Idle);
    world.container.attach_emulated(device).unwrap();
    world.map();
    let all = IovaRange::from_len(Iova::new(0), bytes).unwrap();
    let mut spans: Vec<Span> = Vec::with_capacity(usize::try_from(bytes >> folio_lg2).unwrap());
    let pinned = || world.container.pin_external(all, Prot::READ_WRITE, &mut spans).unwrap();
    let (pin, cost) = allocated(pinned);
    assert_eq!(world.memory.pinned_frames() << 12, bytes);
    let unpin = || world.container.unpin_external(pin, Dirty::Written).unwrap();
    assert_eq!(allocated(unpin).1, 0);
    assert_eq!(world.memory.pinned_frames(), 0);
    cost
}

struct Idle;

impl dmaspan::container::UnmapNotifier for Idle {
    fn unmapping(&self, _range: IovaRange) {}
}

#[test]
fn mapping_a_terabyte_of_large_folios_allocates_as_much_as_mapping_a_gibibyte() {
    for counting in [Counting::Ranges, Counting::Mappings] {
        let [map, attach, _] = costs(1 << 30, 21, counting);
        assert!(map < 8 << 10, "{map}");
        assert!(attach < 8 << 10, "{attach}");
        for folio_lg2 in [21, 30] {
            let [map_tib, attach_tib, pin] = costs(1 << 40, folio_lg2, counting);
            assert_eq!((map_tib, attach_tib), (map, attach), "folios of 2^{folio_lg2}");
            // Some words for each span, of which there are as many as folios.
            let folios = 1u64 << (40 - folio_lg2);
            assert!(pin <= (8 << 10) + 96 * folios, "{pin}");
        }
    }
}

#[test]
fn counting_frames_costs_memory_for_spans_and_not_for_pages() {
    for (bytes_lg2, folio_lg2) in [(36, 21), (40, 30)] {
        let [map, ..] = costs(1 << bytes_lg2, folio_lg2, Counting::Frames);
        let folios = 1u64 << (bytes_lg2 - folio_lg2);
        assert!(map <= (8 << 10) + 512 * folios, "{map}");
    }
}

#[test]
fn unmapping_allocates_nothing_whatever_is_mapped() {
    for counting in [Counting::Ranges, Counting::Mappings, Counting::Frames] {
        let world = World::new(64 << 20, 21, counting);
        let World { container, space, .. } = &world;
        container.attach(domain(TABLES).0, Attach::new(Interrupts::Isolated)).unwrap();
        container.start_dirty().unwrap();
        // A BAR in the middle, in leaves of its own.
        let bar = Span::new(PhysAddr::new(1 << 45), 4 << 20).unwrap();
        let at = world.user.start().wrapping_add(30 << 20);
        space.map_device_with(at, bar, MapOptions::default()).unwrap();
        // The same memory many times, by ranges that overlap in every way.
        let map = |n: u64, first: u64, pages: u64| {
            let start = world.user.start().wrapping_add(first << 12);
            let user = UserRange::from_len(start, pages << 12).unwrap();
            container.map(space, user, Iova::new(n << 30), Prot::READ_WRITE).unwrap();
        };
        for n in 0..64 {
            map(n, n * 100, 9000 - n * 50);
            map(64 + n, n * 200 + 7, 1 + n % 3);
        }
        for n in (0..128).map(|n| n * 37 % 128) {
            let range = IovaRange::from_len(Iova::new(n << 30), 1 << 30).unwrap();
            let (unmapped, cost) = allocated(|| container.unmap(range).unwrap());
            assert!(unmapped > 0);
            assert_eq!(cost, 0, "{counting:?}, {n}");
        }
        assert_eq!((world.memory.pinned_frames(), world.account.used()), (0, 0));
    }
}
