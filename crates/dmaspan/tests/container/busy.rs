//! Requests of others while a mapping is under construction.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use dmaspan::container::{BusyHook, Error, GaveUp};
use dmaspan::pin::{Dirty, Kind, PinFailed, Pinner, SpanSink};
use dmaspan::{
    Account, Container, DmaSpace, Errno, Iova, PhysAddr, Prot, Span, UserAddr, UserRange,
};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::memory::{SimMemory, SimPin, SimPinner, SimSpace};
use parking_lot::Mutex;

use crate::common::{PROT, as_inner, faulty_domain, for_all_granules, range};

for_all_granules!(
    a_mapping_under_construction_is_busy_and_keeps_its_tables,
    unmapping_elsewhere_goes_on_meanwhile,
    whoever_has_a_hook_waits_for_the_mapping_under_construction,
);

/// A pinner that waits in the middle of its next pin.
struct Paused {
    inner: SimPinner,
    gate: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

impl Paused {
    /// Makes the next pin say that it began, and wait until it is told to go on.
    fn arm(&self) -> (Receiver<()>, Sender<()>) {
        let ((began, wait_began), (go, wait_go)) = (channel(), channel());
        *self.gate.lock() = Some((began, wait_go));
        (wait_began, go)
    }
}

// SAFETY: pins and spans are the inner pinner's.
unsafe impl Pinner for Paused {
    type Address = PhysAddr;
    type Space = Arc<SimSpace>;
    type Pin = SimPin;
    type Error = <SimPinner as Pinner>::Error;

    fn pin(
        &self,
        space: &Arc<SimSpace>,
        range: UserRange,
        prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<SimPin, PinFailed<SimPin, Self::Error>> {
        let gate = self.gate.lock().take();
        if let Some((began, go)) = gate {
            began.send(()).unwrap();
            go.recv().unwrap();
        }
        self.inner.pin(space, range, prot, sink)
    }

    as_inner!(inner: unpin release space_id counts copies errno);
}

struct World {
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    tables: dmaspan::io_pgtable::Arena,
    container: Container<Paused, parking_lot::RawMutex>,
}

fn world<const G: u32>() -> World {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 64 << G, G).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let (domain, tables, _) = faulty_domain::<G>(&Faults::none());
    let inner = SimPinner::new(Arc::clone(&memory));
    let pinner = Paused { inner, gate: Mutex::new(None) };
    let container = Container::with_domain(pinner, domain, Account::new(u64::MAX));
    World { memory, space, tables, container }
}

fn a_mapping_under_construction_is_busy_and_keeps_its_tables<const G: u32>() {
    let g = 1u64 << G;
    // The mapping under construction lies before its neighbour, and behind it, in one table.
    for (busy, neighbour) in [(0, 4), (4, 0)] {
        let World { memory, space, tables, container } = world::<G>();
        let spans = memory.allocate_scattered(4 * g, 1).unwrap();
        let user = space.map(UserAddr::new(1 << 32), &spans).unwrap();
        let map = |at: u64| container.map(&space, user, Iova::new(at * g), PROT);
        map(neighbour).unwrap();
        let before = tables.tables();
        let (began, go) = container.pinner().arm();
        thread::scope(|scope| {
            let mapping = scope.spawn(|| map(busy));
            began.recv().unwrap();
            let error = map(busy + 1).unwrap_err();
            assert!(matches!(error, Error::Busy { busy: b, .. } if b == range(busy * g, 4 * g)));
            assert_eq!(container.errno(&error), Errno::EBUSY);
            let error = container.unmap(range(busy * g, 4 * g)).unwrap_err();
            assert!(matches!(error, Error::Busy { .. }), "{error}");
            assert!(matches!(container.unmap_all(), Err(Error::Busy { .. })));
            assert_eq!(container.census().total(), 4, "nothing was unmapped");
            // The table that both share is about to be used, and stays.
            assert_eq!(container.unmap(range(neighbour * g, 4 * g)).unwrap(), 4 * g);
            assert_eq!(tables.tables(), before);
            go.send(()).unwrap();
            mapping.join().unwrap().unwrap();
        });
        assert_eq!(container.census().total(), 4);
        assert_eq!(container.unmap_all().unwrap(), 4 * g);
        assert_eq!((tables.tables(), memory.pinned_frames()), (1, 0));
        assert_eq!(memory.violations(), []);
    }
}

fn unmapping_elsewhere_goes_on_meanwhile<const G: u32>() {
    let (g, block) = (1u64 << G, 1u64 << (2 * G - 3));
    let World { memory, space, tables, container } = world::<G>();
    let spans = memory.allocate_scattered(4 * g, 1).unwrap();
    let user = space.map(UserAddr::new(1 << 32), &spans).unwrap();
    container.map(&space, user, Iova::new(64 * block), PROT).unwrap();
    let (began, go) = container.pinner().arm();
    thread::scope(|scope| {
        let mapping = scope.spawn(|| container.map(&space, user, Iova::new(0), PROT));
        began.recv().unwrap();
        let with_table = tables.tables();
        assert_eq!(container.unmap(range(64 * block, 4 * g)).unwrap(), 4 * g);
        assert!(tables.tables() < with_table, "a table that is nobody else's goes");
        go.send(()).unwrap();
        mapping.join().unwrap().unwrap();
    });
    assert_eq!(container.unmap_all().unwrap(), 4 * g);
    assert_eq!(tables.tables(), 1);
}

/// Says that it waits, and looks again and again; or gives up at once.
struct Looks {
    waits: Mutex<Sender<()>>,
    gives_up: bool,
}

impl BusyHook for Looks {
    fn wait(&self, ready: &dyn Fn() -> bool) -> Result<(), GaveUp> {
        self.waits.lock().send(()).unwrap();
        while !self.gives_up && !ready() {
            thread::yield_now();
        }
        if self.gives_up { Err(GaveUp) } else { Ok(()) }
    }

    fn wake(&self) {}
}

fn whoever_has_a_hook_waits_for_the_mapping_under_construction<const G: u32>() {
    let g = 1u64 << G;
    for gives_up in [false, true] {
        let World { memory, space, container, .. } = world::<G>();
        let (waits, waited) = channel();
        let waits = Mutex::new(waits);
        let container = container.with_busy_hook(Box::new(Looks { waits, gives_up }));
        let user = space.map(UserAddr::new(0), &memory.allocate_scattered(4 * g, 1).unwrap());
        let map = || container.map(&space, user.unwrap(), Iova::new(0), PROT);
        let (began, go) = container.pinner().arm();
        thread::scope(|scope| {
            let mapping = scope.spawn(map);
            began.recv().unwrap();
            let (again, unmap) = (scope.spawn(map), scope.spawn(|| container.unmap_all()));
            (0..2).for_each(|_| waited.recv().unwrap());
            if gives_up {
                assert!(matches!(again.join().unwrap(), Err(Error::Busy { .. })));
                assert!(matches!(unmap.join().unwrap(), Err(Error::Busy { .. })));
                go.send(()).unwrap();
                mapping.join().unwrap().unwrap();
                return;
            }
            go.send(()).unwrap();
            mapping.join().unwrap().unwrap();
            let unmapped = unmap.join().unwrap().unwrap();
            match again.join().unwrap() {
                Ok(_) => assert_eq!(container.unmap_all().unwrap(), 4 * g),
                Err(Error::Exists { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            assert_eq!(unmapped, 4 * g);
        });
        drop(container);
        assert_eq!(memory.pinned_frames(), 0);
        assert_eq!(memory.violations(), []);
    }
}
