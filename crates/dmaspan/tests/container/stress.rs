//! Threads that do everything at once with the same few mappings: when they are done, nothing is
//! left over, and they come to an end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use dmaspan::container::{
    Attach, BusyHook, DirtyRead, Error, GaveUp, Interrupts, UnmapNotifier, VaddrUpdate,
};
use dmaspan::io_pgtable::Arena;
use dmaspan::pin::Dirty;
use dmaspan::{Account, Container, Iova, IovaRange, PhysAddr, Prot, Span, UserAddr, UserRange};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{MapOptions, SimMemory, SimPinError, SimPinner, SimSpace};
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use crate::common::{PROT, faulty_domain, range};

const PAGE: u64 = 1 << 12;
const USER: u64 = 0x7f00_0000_0000;
/// Pages of a mapping: more than a batch of the container.
const PAGES: u64 = 20;
/// How many mappings there can be. The last is device memory.
const SLOTS: u64 = 6;
const THREADS: u64 = 6;
const STEPS: u32 = 1500;

type Stressed = Container<SimPinner, parking_lot::RawMutex, 4>;
type Refusal = Error<SimPinError>;

/// Sleeps until it is woken: a wake-up that is lost ends the test.
#[derive(Default)]
pub(crate) struct Sleeping {
    lock: Mutex<()>,
    woken: Condvar,
}

impl BusyHook for Sleeping {
    fn wait(&self, ready: &dyn Fn() -> bool) -> Result<(), GaveUp> {
        let guard = self.lock.lock().unwrap();
        drop(self.woken.wait_while(guard, |()| !ready()).unwrap());
        Ok(())
    }

    fn wake(&self) {
        drop(self.lock.lock().unwrap());
        self.woken.notify_all();
    }
}

/// A device whose pins are short.
struct Brief;

impl UnmapNotifier for Brief {
    fn unmapping(&self, _range: IovaRange) {
        thread::yield_now();
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waits {
    ByHook,
    Never,
}

/// What forbids the other: memory without addresses, or devices that need them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum With {
    Vaddr,
    Emulated,
}

struct World {
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    account: Arc<Account>,
    iotlbs: Vec<Iotlb<ArmLpaeS1Walker, Arena>>,
    container: Stressed,
}

fn slot(n: u64) -> IovaRange {
    range(n * PAGES * PAGE, PAGES * PAGE)
}

fn user(n: u64) -> UserRange {
    UserRange::from_len(UserAddr::new(USER + n * PAGES * PAGE), PAGES * PAGE).unwrap()
}

impl World {
    fn new(waits: Waits, with: With) -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 1024 * PAGE, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let frames = memory.allocate_scattered((SLOTS - 1) * PAGES * PAGE, 7).unwrap();
        space.map(UserAddr::new(USER), &frames).unwrap();
        let bar = Span::new(PhysAddr::new(1 << 42), PAGES * PAGE).unwrap();
        let at = user(SLOTS - 1).start();
        space.map_device_with(at, bar, MapOptions::default()).unwrap();
        let account = Account::new(u64::MAX);
        let pinner = SimPinner::new(Arc::clone(&memory));
        let mut container = Stressed::of_batch(pinner, Arc::clone(&account));
        if waits == Waits::ByHook {
            container = container.with_busy_hook(Box::new(Sleeping::default()));
        }
        let iotlbs = (0..2).map(|_| {
            let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
            container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
            iotlb
        });
        let iotlbs = iotlbs.collect();
        container.start_dirty().unwrap();
        if with == With::Emulated {
            container.attach_emulated(Arc::new(Brief)).unwrap();
        }
        Self { memory, space, account, iotlbs, container }
    }

    fn step(&self, random: u64) -> Result<(), Refusal> {
        let Self { space, container, iotlbs, .. } = self;
        let (n, page) = (random / 16 % SLOTS, random / 128 % PAGES);
        let at = slot(n).start();
        match random % 16 {
            0..=3 => container.map(space, user(n), at, PROT).map(|_| ()),
            4..=6 => container.unmap(slot(n)).map(|_| ()),
            7 if page == 0 => container.unmap_all().map(|_| ()),
            7 | 8 => {
                for iotlb in iotlbs {
                    let iova = at.wrapping_add(page * PAGE);
                    // Mapped or not: what counts is that it is forgotten in time.
                    let _ = iotlb.translate(iova, Access::Write);
                }
                Ok(())
            }
            9 => {
                let all = range(0, SLOTS * PAGES * PAGE);
                container.dirty_bitmap(all, PAGE, &mut [0; 2], DirtyRead::Clear)
            }
            10 => {
                let pages = range(at.get() + page * PAGE, PAGE);
                let mut spans: Vec<Span> = Vec::new();
                let pin = container.pin_external(pages, Prot::READ_WRITE, &mut spans)?;
                thread::yield_now();
                container.unpin_external(pin, Dirty::Written).unwrap();
                Ok(())
            }
            11 => {
                let (domain, ..) = faulty_domain::<12>(&Faults::none());
                let id = container.attach(domain, Attach::new(Interrupts::Isolated))?;
                while let Err(Error::Changing) = container.detach(id) {
                    thread::yield_now();
                }
                Ok(())
            }
            12 => container.revoke(space, user(SLOTS - 1)).map(|_| ()),
            13 => container.invalidate_vaddr(slot(n)).map(|_| ()),
            14 => container.update_vaddr(&VaddrUpdate::new(space, user(n), at)),
            _ => container.write(at.wrapping_add(page * PAGE + 7), &[1; 64]),
        }
    }

    /// What holds when nobody is at work.
    fn check(&self) {
        assert_eq!(self.memory.violations(), []);
        // What was written of the slots is noted in less than a page.
        assert_eq!(self.account.used() / PAGE, self.memory.pinned_frames());
        let probe = |iotlb: &Iotlb<ArmLpaeS1Walker, Arena>, iova| {
            assert_eq!(iotlb.stale_leaves(range(0, SLOTS * PAGES * PAGE)), []);
            iotlb.translate(iova, Access::Write).ok().map(|hit| hit.paddr)
        };
        let mut translated = 0;
        for page in 0..(SLOTS - 1) * PAGES {
            let iova = Iova::new(page * PAGE);
            let [first, second] = [0, 1].map(|n| probe(&self.iotlbs[n], iova));
            assert_eq!(first, second, "{iova}");
            let Some(paddr) = first else { continue };
            assert_eq!(self.memory.pins(paddr), Some(1), "{iova}");
            translated += 1;
        }
        assert_eq!(translated, self.memory.pinned_frames());
    }
}

/// What may come of an operation while others are at work.
fn is_expected(refusal: &Refusal, waits: Waits) -> bool {
    match refusal {
        Error::Busy { .. } | Error::Changing => waits == Waits::Never,
        Error::Exists { .. }
        | Error::NotMapped { .. }
        | Error::NotAttached
        | Error::NothingMapped { .. }
        | Error::NotInvalid { .. }
        | Error::StillPinned { .. }
        | Error::Emulated { .. }
        | Error::VaddrInvalid { .. }
        | Error::VaddrInvalidAlready { .. } => true,
        // The BAR cannot be copied.
        Error::Copy { .. } => true,
        _ => false,
    }
}

fn work(world: &World, waits: Waits, seed: u64, steps: &AtomicU64) {
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for _ in 0..STEPS {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        if let Err(refusal) = world.step(random >> 8) {
            assert!(is_expected(&refusal, waits), "{refusal}");
        }
        steps.fetch_add(1, Ordering::Relaxed);
    }
}

fn stress(waits: Waits, with: With) {
    let (ended, wait) = channel();
    let steps = Arc::new(AtomicU64::new(0));
    let all_steps = Arc::clone(&steps);
    let test = thread::spawn(move || {
        let world = World::new(waits, with);
        for round in 0..3 {
            thread::scope(|scope| {
                for thread in 0..THREADS {
                    let (world, steps) = (&world, &*all_steps);
                    scope.spawn(move || work(world, waits, round * THREADS + thread + 1, steps));
                }
            });
            world.check();
        }
        world.container.unmap_all().unwrap();
        world.check();
        assert_eq!((world.memory.pinned_frames(), world.container.mappings()), (0, 0));
        // Nobody is said to be at work still.
        let domains = world.container.info().domains;
        domains.into_iter().for_each(|id| world.container.detach(id).unwrap());
        ended.send(()).unwrap();
    });
    let mut seen = 0;
    while wait.recv_timeout(Duration::from_secs(60)) == Err(RecvTimeoutError::Timeout) {
        let now = steps.load(Ordering::Relaxed);
        assert_ne!(now, seen, "threads wait for each other: none has ended a step for a minute");
        seen = now;
    }
    test.join().unwrap();
}

#[test]
fn threads_that_wait_come_to_an_end_and_leave_nothing() {
    stress(Waits::ByHook, With::Vaddr);
    stress(Waits::ByHook, With::Emulated);
}

#[test]
fn threads_that_are_told_busy_leave_nothing() {
    stress(Waits::Never, With::Vaddr);
    stress(Waits::Never, With::Emulated);
}
