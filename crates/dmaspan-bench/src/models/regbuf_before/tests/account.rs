use dmaspan::pin::Dirty;

use super::*;
use dmaspan_sim::memory::{SimMemory, SimSpace};

const USER: UserAddr = UserAddr::new(0x7f00_0000_0000);

fn range(offset: u64, len: u64) -> UserRange {
    UserRange::from_len(USER.wrapping_add(offset), len).unwrap()
}

/// Half of a hugepage.
fn half(pages: &[PhysAddr], second: u64) -> (UserRange, &[PhysAddr]) {
    let from = usize::try_from(second * HUGE_PAGES / 2).unwrap();
    (range(second * HUGE / 2, HUGE / 2), &pages[from..from + 256])
}

#[test]
fn a_large_folio_is_charged_whole_and_once_for_a_ring() {
    for coalescing in ALL {
        let owner = Arc::new(UserBefore::new(u64::MAX));
        let mut ring = RingBefore::new(Arc::clone(&owner), all_of(9));
        let pages = apart(2);
        let (user, first) = half(&pages, 0);
        let a = ring.register(user, first, coalescing).unwrap();
        assert_eq!(owner.charged_pages(), 512);
        let (user, second) = half(&pages, 1);
        let b = ring.register(user, second, coalescing).unwrap();
        assert_eq!(owner.charged_pages(), 512);
        let both = ring.register(range(0, 2 * HUGE), &pages, coalescing).unwrap();
        assert_eq!(owner.charged_pages(), 1024);
        for (buffer, left) in [(a, 1024), (both, 512), (b, 0)] {
            assert!(ring.unregister(buffer).is_some());
            assert_eq!(owner.charged_pages(), left);
        }
    }
}

#[test]
fn small_folios_are_charged_page_by_page_as_often_as_they_are_registered() {
    let owner = Arc::new(UserBefore::new(u64::MAX));
    let mut ring = RingBefore::new(Arc::clone(&owner), all_of(0));
    let pages = apart(1);
    let register = |ring: &mut RingBefore<_>| {
        ring.register(range(1, 3 * PAGE), &pages[..4], Coalescing::SameFolios).unwrap()
    };
    let (a, b) = (register(&mut ring), register(&mut ring));
    assert_eq!(owner.charged_pages(), 8);
    ring.unregister(a);
    assert_eq!(owner.charged_pages(), 4);
    ring.unregister(b);
    assert_eq!(owner.charged_pages(), 0);
}

#[test]
fn a_clone_of_the_only_buffer_of_a_folio_is_charged_and_given_back_once() {
    for first_ends_first in [true, false] {
        let owner = Arc::new(UserBefore::new(u64::MAX));
        let [mut one, mut two] = [0; 2].map(|_| RingBefore::new(Arc::clone(&owner), all_of(9)));
        let pages = apart(1);
        let a = one.register(range(0, HUGE), &pages, Coalescing::SameFolios).unwrap();
        let cloned = two.clone_in(&a).unwrap();
        assert_eq!(owner.charged_pages(), 512);
        if first_ends_first {
            assert!(one.unregister(a).is_none());
            assert_eq!(owner.charged_pages(), 512);
            assert!(two.unregister(cloned).is_some());
        } else {
            assert!(two.unregister(cloned).is_none());
            assert_eq!(owner.charged_pages(), 512);
            assert!(one.unregister(a).is_some());
        }
        assert_eq!(owner.charged_pages(), 0);
    }
}

#[test]
fn a_clone_that_outlives_its_original_gives_back_what_a_neighbour_still_pins() {
    let owner = Arc::new(UserBefore::new(u64::MAX));
    let [mut one, mut two] = [0; 2].map(|_| RingBefore::new(Arc::clone(&owner), all_of(9)));
    let pages = apart(1);
    let (user, first) = half(&pages, 0);
    let a = one.register(user, first, Coalescing::SameFolios).unwrap();
    let (user, second) = half(&pages, 1);
    let b = one.register(user, second, Coalescing::SameFolios).unwrap();
    let cloned = two.clone_in(&b).unwrap();
    assert_eq!(owner.charged_pages(), 512);
    assert!(one.unregister(b).is_none());
    assert_eq!(owner.charged_pages(), 512);
    assert!(two.unregister(cloned).is_some());
    assert_eq!(owner.charged_pages(), 0, "while A pins the folio");
    assert!(one.unregister(a).is_some());
    assert_eq!(owner.charged_pages(), -512);
}

#[test]
fn a_clone_beside_a_buffer_that_its_ring_registered_is_never_given_back() {
    let owner = Arc::new(UserBefore::new(u64::MAX));
    let [mut one, mut two] = [0; 2].map(|_| RingBefore::new(Arc::clone(&owner), all_of(9)));
    let pages = apart(1);
    let (user, first) = half(&pages, 0);
    let a = one.register(user, first, Coalescing::SameFolios).unwrap();
    let (user, second) = half(&pages, 1);
    let b = two.register(user, second, Coalescing::SameFolios).unwrap();
    let cloned = two.clone_in(&a).unwrap();
    assert_eq!(owner.charged_pages(), 1024);
    // The first ring's map loses the folio with a buffer that the second still has.
    assert!(one.unregister(a).is_none());
    assert!(two.unregister(cloned).is_some());
    assert!(two.unregister(b).is_some());
    assert_eq!(owner.charged_pages(), 512, "while nothing is pinned");
}

#[test]
fn a_folio_in_two_rings_that_registered_it_is_charged_twice() {
    let owner = Arc::new(UserBefore::new(u64::MAX));
    let mut rings = [0; 2].map(|_| RingBefore::new(Arc::clone(&owner), all_of(9)));
    let pages = apart(1);
    let register = |ring: &mut RingBefore<_>| {
        ring.register(range(0, HUGE), &pages, Coalescing::SameFolios).unwrap()
    };
    let buffers = rings.each_mut().map(register);
    assert_eq!(owner.charged_pages(), 1024);
    for (ring, buffer) in rings.iter_mut().zip(buffers) {
        ring.unregister(buffer);
    }
    assert_eq!(owner.charged_pages(), 0);
}

#[test]
fn what_is_over_the_limit_changes_nothing() {
    let owner = Arc::new(UserBefore::new(3 * HUGE - 1));
    let mut ring = RingBefore::new(Arc::clone(&owner), all_of(9));
    let pages = apart(4);
    let register = |ring: &mut RingBefore<_>, from: u64, count: u64| {
        let at = |n: u64| usize::try_from(n * HUGE_PAGES).unwrap();
        let pages = &pages[at(from)..at(from + count)];
        ring.register(range(0, count * HUGE), pages, Coalescing::SameFolios)
    };
    let a = register(&mut ring, 0, 2).unwrap();
    let error = register(&mut ring, 1, 2).unwrap_err();
    assert_eq!(error, RegbufBeforeError::OverLimit { asked: 512, used: 1024, limit: 1535 });
    assert_eq!(error.errno(), Errno::ENOMEM);
    ring.unregister(a);
    assert_eq!(owner.charged_pages(), 0);
    // Nothing of it is in the map.
    let b = register(&mut ring, 2, 2).unwrap();
    assert_eq!(owner.charged_pages(), 1024);
    ring.unregister(b);
    assert_eq!(owner.charged_pages(), 0);
}

#[test]
fn without_clones_each_ring_is_charged_the_folios_it_has_whatever_the_order() {
    let seed = 3;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let owner = Arc::new(UserBefore::new(u64::MAX));
    let mut ring = RingBefore::new(Arc::clone(&owner), all_of(9));
    let pages = apart(8);
    let mut held: Vec<(RegisteredBefore, std::ops::Range<u64>)> = Vec::new();
    for _ in 0..2000 {
        if rng.below(2) == 0 && held.len() < 12 {
            let first = rng.below(8 * HUGE_PAGES);
            let count = 1 + rng.below(8 * HUGE_PAGES - first);
            let at = |n: u64| usize::try_from(n).unwrap();
            let under = &pages[at(first)..at(first + count)];
            let coalescing = ALL[at(rng.below(3))];
            let buffer = ring.register(range(0, count * PAGE), under, coalescing).unwrap();
            held.push((buffer, first / HUGE_PAGES..(first + count).div_ceil(HUGE_PAGES)));
        } else if !held.is_empty() {
            let at = rng.below(u64::try_from(held.len()).unwrap());
            let (buffer, _) = held.swap_remove(usize::try_from(at).unwrap());
            assert!(ring.unregister(buffer).is_some());
        }
        let folios = (0..8).filter(|folio| held.iter().any(|(_, has)| has.contains(folio)));
        assert_eq!(owner.charged_pages(), 512 * i64::try_from(folios.count()).unwrap());
    }
    held.into_iter().for_each(|(buffer, _)| {
        ring.unregister(buffer);
    });
    assert_eq!(owner.charged_pages(), 0);
}

#[test]
fn pages_of_a_space_are_pinned_and_unpinned() {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(0), 64 << 20, 12).unwrap());
    let space = SimSpace::new(Arc::clone(&memory));
    let folios = memory.allocate_folios(&[9, 9, 4], 1).unwrap();
    let user = space.map(USER, &folios).unwrap();
    let owner = Arc::new(UserBefore::new(16 << 20));
    let of_memory = |page| {
        let alone = FolioBefore { head: page, order: 0 };
        memory
            .folio_of(page)
            .map_or(alone, |folio| FolioBefore { head: folio.span().paddr(), order: folio.order() })
    };
    let mut ring = RingBefore::new(Arc::clone(&owner), of_memory);
    for coalescing in ALL {
        for user in [user, range(3, 2 * HUGE - 9), range(HUGE - 1, 2)] {
            let buffer = ring.pin_and_register(&space, user, coalescing).unwrap();
            let pages = user.last().get() / PAGE - user.start().get() / PAGE + 1;
            assert_eq!(memory.pinned_frames(), pages);
            let buffer = ring.unregister(buffer).unwrap();
            buffer.unpin(&memory, Dirty::Written);
            assert_eq!((memory.pinned_frames(), owner.charged_pages()), (0, 0));
        }
    }
    // The user has nothing behind the folios.
    let error = ring.pin_and_register(&space, range(HUGE, 2 * HUGE), Coalescing::None);
    let error = error.unwrap_err();
    assert_eq!(error, RegbufBeforeError::Pages { pages: 528, needed: 1024 });
    assert_eq!(memory.pinned_frames(), 0);
    assert_eq!(memory.violations(), []);
}
