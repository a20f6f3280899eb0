//! The charges and pins are those of the live buffers, whoever shares them and in whatever order
//! they go.

use std::collections::BTreeSet;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use dmaspan::account::Counting;
use dmaspan::regbuf::{BufferRequest, CloneRequest, Existing, Node, Pinned, Registry};
use dmaspan::{Account, Errno, PhysAddr, UserAddr, UserRange};
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};

use crate::common::{BASE, Of, Rng, USER, World, part, requests, size, user};
use crate::errnos::{Owner, linux_clone};

const PAGE: u64 = 0x1000;
const HUGE: u64 = 512 * PAGE;
const ALL: [Counting; 3] = [Counting::Ranges, Counting::Mappings, Counting::Frames];

/// A huge page, and an account of at most `limit` bytes.
fn huge_page(counting: Counting, limit: u64) -> (World, UserRange) {
    let world = World::new(8 << 20, 12);
    let whole = world.map_blocks(&[(512, 512)]);
    (World { account: Account::with_counting(limit, counting), ..world }, whole)
}

/// Linux 7.2 takes the account of a huge page away with the last clone of B, as its rings count
/// huge pages each for itself and buffers are charged with what was new.
#[test]
fn a_huge_page_stays_charged_while_any_of_its_buffers_is_pinned() {
    for (a, b) in [((0, 300), (200, 312)), ((0, 256), (256, 256)), ((0, 512), (0, 512))] {
        for counting in [Counting::Ranges, Counting::Frames] {
            let (world, whole) = huge_page(counting, u64::MAX);
            let [a, b] = [a, b].map(|(at, len)| part(whole, at * PAGE, len * PAGE));
            let (mut one, mut two) = (world.registry(), world.registry());
            one.register(&requests(&[a, b])).unwrap();
            assert_eq!(world.account.used(), HUGE);
            let request = CloneRequest { source_index: 1, count: 1, ..CloneRequest::default() };
            two.clone_from(&one, &request).unwrap();
            assert_eq!(world.account.used(), HUGE);
            one.update(1, &[BufferRequest::VACANT]).unwrap();
            assert_eq!(world.account.used(), HUGE);
            two.unregister().unwrap();
            assert_eq!(world.account.used(), a.checked_len().unwrap());
            assert_eq!(world.memory.pinned_frames() * PAGE, a.checked_len().unwrap());
            one.unregister().unwrap();
            world.assert_idle();
        }
    }
}

#[test]
fn a_huge_page_in_two_registries_is_charged_once() {
    for counting in [Counting::Ranges, Counting::Frames] {
        let (world, whole) = huge_page(counting, HUGE);
        let (mut one, mut two) = (world.registry(), world.registry());
        one.register(&requests(&[whole])).unwrap();
        two.register(&requests(&[whole, part(whole, 5, 9)])).unwrap();
        assert_eq!(world.account.used(), HUGE);
        drop(one);
        assert_eq!(world.account.used(), HUGE);
        drop(two);
        world.assert_idle();
    }
}

#[test]
fn part_of_a_huge_page_is_charged_by_the_page() {
    for counting in ALL {
        let (world, whole) = huge_page(counting, 3 * PAGE);
        let mut registry = world.registry();
        registry.register(&requests(&[part(whole, 9 * PAGE + 100, 2 * PAGE)])).unwrap();
        assert_eq!((world.account.used(), world.memory.pinned_frames()), (3 * PAGE, 3));
        drop(registry);
        world.assert_idle();
    }
}

#[test]
fn an_owner_who_counts_mappings_is_charged_for_each() {
    let (world, whole) = huge_page(Counting::Mappings, 2 * HUGE);
    let (mut one, mut two) = (world.registry(), world.registry());
    one.register(&requests(&[whole, whole])).unwrap();
    assert_eq!(world.account.used(), 2 * HUGE);
    // A clone is the same buffer.
    two.clone_from(&one, &CloneRequest::default()).unwrap();
    assert_eq!(world.account.used(), 2 * HUGE);
    let error = two.update(0, &requests(&[part(whole, 0, 1)])).unwrap_err();
    assert_eq!(error.errno(), Errno::ENOMEM);
    drop(one);
    assert_eq!(world.account.used(), 2 * HUGE);
    two.update(0, &[BufferRequest::VACANT]).unwrap();
    assert_eq!(world.account.used(), HUGE);
    drop(two);
    world.assert_idle();
}

#[test]
fn what_fits_exactly_is_registered_and_a_page_more_is_not() {
    for counting in ALL {
        // 5 + 7 pages, and 2 that both have.
        let all = if counting == Counting::Mappings { 12 } else { 10 };
        for limit in 0..=all {
            let (world, whole) = huge_page(counting, limit * PAGE);
            let both = [part(whole, 0, 5 * PAGE), part(whole, 3 * PAGE + 1, 7 * PAGE - 1)];
            let mut registry = world.registry();
            let result = registry.register(&requests(&both));
            if limit < all {
                assert_eq!(result.unwrap_err().errno(), Errno::ENOMEM, "{limit}, {counting:?}");
                assert_eq!(registry.slots(), 0);
                world.assert_idle();
            } else {
                result.unwrap();
                assert_eq!(world.account.used(), all * PAGE);
            }
        }
    }
}

#[test]
fn what_a_limit_refuses_is_not_even_pinned() {
    for counting in [Counting::Ranges, Counting::Mappings] {
        let (world, whole) = huge_page(counting, HUGE - 1);
        let pinner = world.pinner();
        let lookups = pinner.clone();
        let (space, account) = (Arc::clone(&world.space), Arc::clone(&world.account));
        let mut registry = Registry::new(Pinned::new(Arc::new(pinner), space, account, 12));
        let error = registry.register(&requests(&[whole])).unwrap_err();
        assert_eq!((error.errno(), lookups.lookups()), (Errno::ENOMEM, 0), "{counting:?}");
        registry.register(&requests(&[part(whole, 0, PAGE)])).unwrap();
        assert!(lookups.lookups() > 0);
    }
}

/// A buffer, as long as anything refers to it.
#[derive(Debug)]
struct Part {
    place: usize,
    /// User pages.
    pages: std::ops::RangeInclusive<u64>,
}

/// Whose memory: an account and a space, by number.
const PLACES: [(usize, usize); 3] = [(0, 0), (0, 1), (1, 1)];
/// Of which place a registry is.
const REGISTRIES: [usize; 6] = [0, 0, 0, 1, 2, 2];
const PAGES: u64 = 40;
const LIMITS: [u64; 2] = [26 * PAGE, 17 * PAGE];

/// Registries of several owners, and what they must have.
struct Random {
    rng: Rng,
    memory: Arc<SimMemory>,
    counting: Counting,
    accounts: Vec<Arc<Account>>,
    spaces: Vec<Arc<SimSpace>>,
    registries: Vec<Of<SimPinner>>,
    slots: Vec<Vec<Option<Rc<Part>>>>,
    nodes: Vec<(Node<PhysAddr>, Rc<Part>)>,
    parts: Vec<Weak<Part>>,
    refused: u32,
}

impl Random {
    fn new(seed: u64, counting: Counting) -> Self {
        let bytes = 128 * PAGE;
        let memory = Arc::new(SimMemory::new(PhysAddr::new(BASE), bytes, 12).unwrap());
        let space = || Arc::new(SimSpace::new(Arc::clone(&memory)));
        let spaces = vec![space(), space()];
        let orders = [3, 0, 0, 2, 0, 4, 1, 0, 0, 2, 0];
        let folios = memory.allocate_folios(&orders, seed).unwrap();
        let whole = spaces[0].map(UserAddr::new(USER), &folios).unwrap();
        assert!(whole.checked_len().unwrap() >= PAGES * PAGE);
        // Half of what the other has is the same memory, one page further on.
        let own = memory.allocate_scattered(PAGES * PAGE, seed).unwrap();
        spaces[1].map(UserAddr::new(USER), &own).unwrap();
        let half = user(USER, PAGES / 2 * PAGE);
        spaces[0].share(half, &spaces[1], UserAddr::new(USER + PAGE)).unwrap();
        let accounts = LIMITS.map(|limit| Account::with_counting(limit, counting)).to_vec();
        let (registries, slots) = (Vec::new(), vec![Vec::new(); REGISTRIES.len()]);
        let (nodes, parts) = Default::default();
        let rng = Rng::new(seed);
        let mut random = Self {
            rng,
            memory,
            counting,
            accounts,
            spaces,
            registries,
            slots,
            nodes,
            parts,
            refused: 0,
        };
        random.registries = REGISTRIES.iter().map(|place| random.registry(*place)).collect();
        random
    }

    fn registry(&self, place: usize) -> Of<SimPinner> {
        let (account, space) = PLACES[place];
        let world = World {
            memory: Arc::clone(&self.memory),
            space: Arc::clone(&self.spaces[space]),
            account: Arc::clone(&self.accounts[account]),
            page_lg2: 12,
        };
        world.registry()
    }

    fn live(&self) -> impl Iterator<Item = Rc<Part>> {
        self.parts.iter().filter_map(Weak::upgrade)
    }

    fn frame(&self, space: usize, page: u64) -> u64 {
        let (paddr, ..) = self.spaces[space].frame_at(UserAddr::new(page * PAGE)).unwrap();
        (paddr.get() - BASE) / PAGE
    }

    /// What must be charged.
    fn used(&self, account: usize) -> u64 {
        let mine = self.live().filter(|part| PLACES[part.place].0 == account);
        let pages = mine.flat_map(|part| part.pages.clone().map(move |page| (part.place, page)));
        let pages = pages.map(|(place, page)| (PLACES[place].1, page));
        let count = match self.counting {
            Counting::Mappings => pages.count(),
            Counting::Ranges => pages.collect::<BTreeSet<_>>().len(),
            Counting::Frames => {
                let frames = pages.map(|(space, page)| self.frame(space, page));
                frames.collect::<BTreeSet<_>>().len()
            }
        };
        u64::try_from(count).unwrap() * PAGE
    }

    fn check(&self) {
        for (number, account) in self.accounts.iter().enumerate() {
            assert_eq!(account.used(), self.used(number));
        }
        let mut pins = vec![0; 128];
        for part in self.live() {
            for page in part.pages.clone() {
                pins[size(self.frame(PLACES[part.place].1, page))] += 1;
            }
        }
        for (frame, expected) in (0..).zip(pins) {
            let paddr = PhysAddr::new(BASE + frame * PAGE);
            assert_eq!(self.memory.pins(paddr), Some(expected), "frame {frame}");
        }
        assert_eq!(self.memory.violations(), []);
        for (registry, slots) in self.registries.iter().zip(&self.slots) {
            assert_eq!(size(registry.slots().into()), slots.len());
            for (index, slot) in (0..).zip(slots) {
                let node = registry.get(index).ok();
                let first = node.map(|node| node.user().start().get() / PAGE);
                assert_eq!(first, slot.as_ref().map(|part| *part.pages.start()));
            }
        }
    }

    fn request(&mut self) -> BufferRequest {
        if self.rng.below(6) == 0 {
            return BufferRequest::VACANT;
        }
        let start = self.rng.below((PAGES - 1) * PAGE);
        let most = if self.rng.below(8) == 0 { PAGES } else { 6 };
        let len = 1 + self.rng.below((PAGES * PAGE - start).min(most * PAGE));
        BufferRequest::new(user(USER + start, len))
    }

    /// What a slot gets, or nothing where the limit does not permit it.
    fn make(&mut self, place: usize, request: &BufferRequest) -> Result<Option<Rc<Part>>, Errno> {
        let Some(user) = request.user else { return Ok(None) };
        let pages = user.start().get() / PAGE..=user.last().get() / PAGE;
        let part = Rc::new(Part { place, pages });
        self.parts.retain(|part| part.strong_count() > 0);
        self.parts.push(Rc::downgrade(&part));
        let (account, _) = PLACES[place];
        if self.used(account) <= LIMITS[account] { Ok(Some(part)) } else { Err(Errno::ENOMEM) }
    }

    fn register(&mut self, at: usize) {
        let count = 1 + self.rng.below(4);
        let requests: Vec<_> = (0..count).map(|_| self.request()).collect();
        let result = self.registries[at].register(&requests).map_err(|error| error.errno());
        if !self.slots[at].is_empty() {
            return assert_eq!(result, Err(Errno::EBUSY));
        }
        let mut made = Vec::new();
        for request in &requests {
            match self.make(REGISTRIES[at], request) {
                Ok(part) => made.push(part),
                Err(errno) => {
                    self.refused += 1;
                    return assert_eq!(result, Err(errno));
                }
            }
        }
        assert_eq!(result, Ok(()));
        self.slots[at] = made;
    }

    fn update(&mut self, at: usize) {
        let requests: Vec<_> = (0..1 + self.rng.below(3)).map(|_| self.request()).collect();
        let index = self.rng.index(4);
        let number = u32::try_from(index).unwrap();
        let result = self.registries[at].update(number, &requests).map_err(|error| error.errno());
        if self.slots[at].is_empty() {
            return assert_eq!(result, Err(Errno::ENXIO));
        }
        if index + requests.len() > self.slots[at].len() {
            return assert_eq!(result, Err(Errno::EINVAL));
        }
        let mut expected = Ok(0);
        for (done, request) in requests.iter().enumerate() {
            match self.make(REGISTRIES[at], request) {
                Ok(part) => self.slots[at][index + done] = part,
                Err(errno) => {
                    self.refused += 1;
                    expected = if done == 0 { Err(errno) } else { Ok(done) };
                    break;
                }
            }
            expected = Ok(done + 1);
        }
        assert_eq!(result, expected);
    }

    fn clone_request(&mut self) -> CloneRequest {
        let mut small = || u32::try_from(self.rng.below(4)).unwrap();
        let (source_index, index, count) = (small(), small(), small());
        let existing = if small() == 0 { Existing::Refuse } else { Existing::Replace };
        if small() == 0 {
            return CloneRequest { existing, ..CloneRequest::default() };
        }
        CloneRequest { source_index, index, count, existing, task: None }
    }

    fn clone_slots(&mut self, from: usize, to: usize) {
        let request = self.clone_request();
        let (a, b) = (PLACES[REGISTRIES[from]], PLACES[REGISTRIES[to]]);
        let owner = match (a == b, a.0 == b.0) {
            (true, _) => Owner::Same,
            (_, true) => Owner::OtherSpace,
            _ => Owner::Other,
        };
        let result = if from == to {
            self.registries[to].clone_within(&request)
        } else {
            let mut other = self.registry(REGISTRIES[to]);
            std::mem::swap(&mut other, &mut self.registries[to]);
            let result = other.clone_from(&self.registries[from], &request);
            self.registries[to] = other;
            result
        };
        let count = |slots: &Vec<_>| u32::try_from(slots.len()).unwrap();
        let (theirs, mine) = (count(&self.slots[from]), count(&self.slots[to]));
        let expected = linux_clone(&request, owner, theirs, mine);
        assert_eq!(result.err().map(|error| error.errno()), expected);
        if expected.is_some() {
            return;
        }
        let [first, index, all] =
            [request.source_index, request.index, request.count].map(|n| size(n.into()));
        let all = if all == 0 { self.slots[from].len() } else { all };
        let cloned = self.slots[from][first..first + all].to_vec();
        let slots = &mut self.slots[to];
        slots.resize(slots.len().max(index + all), None);
        slots.splice(index..index + all, cloned);
    }

    fn take_node(&mut self, at: usize) {
        if self.slots[at].is_empty() {
            return;
        }
        let index = self.rng.index(self.slots[at].len());
        if let Some(part) = self.slots[at][index].clone() {
            let node = self.registries[at].get(u32::try_from(index).unwrap()).unwrap();
            self.nodes.push((node.clone(), part));
        }
    }

    fn step(&mut self) {
        let (at, other) = (self.rng.index(REGISTRIES.len()), self.rng.index(REGISTRIES.len()));
        match self.rng.below(20) {
            0..5 => self.register(at),
            5..9 => self.update(at),
            9..10 => {
                let result = self.registries[at].unregister();
                assert_eq!(result.is_err(), self.slots[at].is_empty());
                self.slots[at].clear();
            }
            10..13 => self.clone_slots(at, other),
            13..14 => self.clone_slots(at, at),
            14..16 => self.take_node(at),
            16..19 if !self.nodes.is_empty() => {
                let gone = self.rng.index(self.nodes.len());
                drop(self.nodes.swap_remove(gone));
            }
            19 => {
                self.registries[at] = self.registry(REGISTRIES[at]);
                self.slots[at].clear();
            }
            _ => {}
        }
    }
}

#[test]
fn under_any_operations_what_live_buffers_have_is_charged_and_pinned() {
    for counting in ALL {
        let mut refused = 0;
        for seed in 1..=12 {
            println!("{counting:?}, seed {seed}");
            let mut random = Random::new(seed, counting);
            for _ in 0..250 {
                random.step();
                random.check();
            }
            // What is left goes in any order.
            while !random.registries.is_empty() || !random.nodes.is_empty() {
                if random.rng.below(2) == 0 {
                    random.registries.pop();
                    random.slots.pop();
                } else {
                    random.nodes.pop();
                }
                random.check();
            }
            assert_eq!(random.memory.pinned_frames(), 0);
            assert!(random.accounts.iter().all(|account| account.used() == 0));
            refused += random.refused;
        }
        assert!(refused > 50, "{counting:?}: {refused}");
    }
}
