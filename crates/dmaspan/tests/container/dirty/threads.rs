//! Reads beside each other, beside a device and beside unmaps.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::container::{DirtyRead, Error};
use dmaspan::{Account, Container, Iova, PhysAddr, UserAddr, UserRange};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};
use dmaspan_sim::rng::Rng;
use dmaspan_sim::walker::Access;
use lock_api::RawMutex;
use parking_lot::Mutex;

use super::{Hardware, World, bits, words_for};
use crate::common::{PROT, for_all_granules, marking_domain, range};

for_all_granules!(
    an_unmap_at_every_point_of_a_read_loses_nothing,
    reads_and_unmaps_beside_each_other_lose_nothing,
);

const PAGES: u64 = 400;

/// What happens, and before which lock.
type Interruption = (u32, Box<dyn FnOnce()>);

thread_local! {
    /// What happens before a lock of this thread, and how many locks until then.
    static BEFORE_LOCK: RefCell<Option<Interruption>> = const { RefCell::new(None) };
}

/// A lock that lets something else happen first.
struct Interrupted(parking_lot::RawMutex);

// SAFETY: locks and unlocks are the inner lock's.
unsafe impl RawMutex for Interrupted {
    const INIT: Self = Self(parking_lot::RawMutex::INIT);
    type GuardMarker = <parking_lot::RawMutex as RawMutex>::GuardMarker;

    fn lock(&self) {
        let due = BEFORE_LOCK.with_borrow_mut(|before| {
            if let Some((left, _)) = before {
                *left -= 1;
            }
            before.take_if(|(left, _)| *left == 0)
        });
        if let Some((_, happens)) = due {
            happens();
        }
        self.0.lock();
    }

    fn try_lock(&self) -> bool {
        self.0.try_lock()
    }

    unsafe fn unlock(&self) {
        // SAFETY: the caller holds this lock, and so the inner one.
        unsafe { self.0.unlock() }
    }
}

/// Others unmap what is being read, map there anew and write: at each point where the read does not
/// hold a lock.
fn an_unmap_at_every_point_of_a_read_loses_nothing<const G: u32>() {
    // More pages than are read at once.
    let pages = 5u64 << 13;
    for n in 1.. {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), (2 * pages) << G, G).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let span = memory.allocate(pages << G, 2 * G - 3).unwrap();
        let user = space.map(UserAddr::new(1 << 44), &[span]).unwrap();
        let (domain, _, iotlb) = marking_domain::<G>(&Faults::none());
        let pinner = SimPinner::new(Arc::clone(&memory));
        let container: Arc<Container<_, Interrupted>> =
            Arc::new(Container::with_domain(pinner, domain, Account::new(u64::MAX)));
        container.start_dirty().unwrap();
        container.map(&space, user, Iova::new(0), PROT).unwrap();
        let write = move |page: u64| iotlb.translate(Iova::new(page << G), Access::Write).unwrap();
        let (early, late) = (0, pages - 1);
        write(early);
        write(late);
        let told = Arc::new(Mutex::new(vec![0; words_for(pages)]));
        let asked = range(0, pages << G);
        let others = {
            let (container, space) = (Arc::clone(&container), Arc::clone(&space));
            let (told, write) = (Arc::clone(&told), write.clone());
            move || {
                let mut told = told.lock();
                let unmapped = container.unmap_dirty(asked, 1 << G, &mut told);
                assert_eq!(unmapped.unwrap(), pages << G);
                container.map(&space, user, Iova::new(0), PROT).unwrap();
                write(late);
            }
        };
        BEFORE_LOCK.set(Some((n, Box::new(others))));
        let mut words = vec![0; words_for(pages)];
        container.dirty_bitmap(asked, 1 << G, &mut words, DirtyRead::Clear).unwrap();
        if BEFORE_LOCK.take().is_some() {
            assert!(n > 6, "{n} locks");
            break;
        }
        let has = |words: &[u64], page: u64| bits(words).contains(&page);
        for page in [early, late] {
            assert!(has(&words, page) || has(&told.lock(), page), "{page:#x} at lock {n}");
        }
        // The first lock is that by which the read begins: all was over then.
        let over = n == 1 && has(&words, late);
        container.dirty_bitmap(asked, 1 << G, &mut words, DirtyRead::Clear).unwrap();
        assert!(over || has(&words, late), "written anew at lock {n}");
        assert!(!has(&words, early), "at lock {n}");
        container.unmap_all().unwrap();
        assert_eq!(memory.violations(), []);
    }
}

/// What one reader was told, until `done`.
fn read_on(world: &World, first: u64, count: u64, done: &AtomicBool) -> BTreeSet<u64> {
    let mut told = BTreeSet::new();
    let mut words = vec![0; words_for(count)];
    loop {
        // Looked at first: one more read follows.
        let last = done.load(Ordering::Acquire);
        let asked = world.pages(first, count);
        match world.container.dirty_bitmap(asked, world.g, &mut words, DirtyRead::Clear) {
            Ok(()) => told.extend(bits(&words).iter().map(|page| page + first)),
            Err(Error::Busy { .. }) => continue,
            Err(error) => panic!("{error}"),
        }
        if last {
            return told;
        }
    }
}

fn reads_and_unmaps_beside_each_other_lose_nothing<const G: u32>() {
    let world = World::new::<G>(Hardware::Marks, 4 * PAGES);
    let users: Vec<UserRange> = (0..3).map(|n| world.scattered(PAGES, n)).collect();
    let at = [0, 1000, 2000];
    world.map(users[0], at[0]);
    world.map(users[1], at[1]);
    world.container.start_dirty().unwrap();
    let done = AtomicBool::new(false);
    let (mut written, mut told) = (BTreeSet::new(), BTreeSet::new());
    thread::scope(|scope| {
        let world = &world;
        let readers = [(at[0], PAGES), (at[1], at[2] + PAGES - at[1])].map(|(first, count)| {
            scope.spawn({
                let done = &done;
                move || read_on(world, first, count, done)
            })
        });
        let device = scope.spawn(|| {
            let mut rng = Rng::new(1);
            let mut written = BTreeSet::new();
            for _ in 0..6000 {
                let page = at[usize::try_from(rng.below(3)).unwrap()] + rng.below(PAGES);
                // The third mapping comes and goes.
                let iova = Iova::new(page * world.g);
                if world.iotlb.translate(iova, Access::Write).is_ok() {
                    written.insert(page);
                }
            }
            written
        });
        let third = world.pages(at[2], PAGES);
        let mut words = vec![0; words_for(PAGES)];
        while !device.is_finished() {
            let iova = Iova::new(at[2] * world.g);
            match world.container.map(&world.space, users[2], iova, PROT) {
                Ok(_) => {}
                Err(error) => panic!("{error}"),
            }
            thread::yield_now();
            // A read in its way does not refuse it.
            let bytes = world.container.unmap_dirty(third, world.g, &mut words).unwrap();
            assert_eq!(bytes, PAGES * world.g);
            told.extend(bits(&words).iter().map(|page| page + at[2]));
        }
        written = device.join().unwrap();
        done.store(true, Ordering::Release);
        for reader in readers {
            told.extend(reader.join().unwrap());
        }
    });
    assert!(written.len() > 300, "{} pages", written.len());
    assert_eq!(told, written);
    assert_eq!(world.memory.violations(), []);
}
