//! Registries of one owner on several threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use dmaspan::Account;
use dmaspan::account::Counting;
use dmaspan::regbuf::{BufferRequest, CloneRequest, Existing, Node};
use dmaspan::{Errno, PhysAddr, UserRange};

use crate::common::{Rng, USER, World, requests, user};

const PAGE: u64 = 0x1000;
const LIMIT: u64 = 48 * PAGE;

fn any_range(rng: &mut Rng) -> UserRange {
    let start = rng.below(63 * PAGE);
    let len = 1 + rng.below((64 * PAGE - start).min(12 * PAGE));
    user(USER + start, len)
}

/// Registers, updates, clones from everybody's registry, and drops what others have in flight.
fn run(
    world: &World,
    seed: u64,
    nodes: &Mutex<Vec<Node<PhysAddr>>>,
    shared: &Mutex<crate::common::Of<dmaspan_sim::memory::SimPinner>>,
    refused: &AtomicU32,
) {
    let (mut rng, slot) = (Rng::new(seed), u32::try_from(seed % 4).unwrap());
    let mut mine = world.registry();
    for _ in 0..400 {
        let all = [any_range(&mut rng), any_range(&mut rng)];
        let result = match rng.below(6) {
            0 | 1 => mine.register(&requests(&all)),
            2 => mine.update(0, &requests(&all)).map(|_| ()),
            3 => mine.unregister(),
            4 => shared.lock().unwrap().update(slot, &requests(&all[..1])).map(|_| ()),
            _ => {
                let existing = Existing::Replace;
                let request = CloneRequest { existing, ..CloneRequest::default() };
                mine.clone_from(&shared.lock().unwrap(), &request)
            }
        };
        if let Err(error) = result {
            let errno = error.errno();
            assert!([Errno::EBUSY, Errno::ENXIO, Errno::ENOMEM].contains(&errno), "{error}");
            refused.fetch_add(u32::from(errno == Errno::ENOMEM), Ordering::Relaxed);
        }
        assert!(world.account.used() <= LIMIT);
        if let Ok(node) = mine.get(u32::try_from(rng.below(2)).unwrap()) {
            nodes.lock().unwrap().push(node.clone());
        }
        // Dropped without the lock.
        let gone = {
            let mut nodes = nodes.lock().unwrap();
            let at = rng.index(nodes.len() + 4);
            (at < nodes.len()).then(|| nodes.swap_remove(at))
        };
        drop(gone);
    }
}

#[test]
fn one_account_is_right_whichever_thread_drops_what() {
    for counting in [Counting::Ranges, Counting::Mappings, Counting::Frames] {
        let world = World::new(128 * PAGE, 12);
        world.map_folios(&[5, 3, 0, 0, 2, 4, 1], 7);
        let world = World { account: Account::with_counting(LIMIT, counting), ..world };
        let (nodes, refused) = (Mutex::default(), AtomicU32::new(0));
        let mut shared = world.registry();
        shared.register(&[BufferRequest::VACANT; 4]).unwrap();
        let shared = Mutex::new(shared);
        thread::scope(|scope| {
            for seed in 1..=4 {
                let (world, nodes, shared, refused) = (&world, &nodes, &shared, &refused);
                scope.spawn(move || run(world, seed, nodes, shared, refused));
            }
        });
        drop((nodes, shared));
        world.assert_idle();
        println!("{counting:?}: {refused:?} refused");
    }
}
