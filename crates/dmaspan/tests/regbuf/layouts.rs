//! Into how many segments buffers are coalesced: the cases of liburing's tests of registered
//! buffers, and what is beyond them.

use dmaspan::regbuf::{Buffer, Segments};
use dmaspan::{Direction, Errno, PhysAddr, Span, UserRange};

use crate::common::{BASE, Rng, USER, World, part, requests, user, walk};

const HUGE: u64 = 2 << 20;
/// Pages of a huge page.
const PAGES: u64 = 512;

fn world() -> World {
    World::new(64 << 20, 12)
}

/// The buffer has one segment for each run of pages, and its parts are those of a walk.
fn coalesced(world: &World, user: UserRange) -> Buffer<PhysAddr> {
    let buffer = world.buffer(user);
    let runs = world.runs(user);
    assert!(buffer.segments().iter().eq(runs.iter().copied()), "{:?}", buffer.segments());
    let mut rng = Rng::new(user.start().get());
    for _ in 0..200 {
        let offset = rng.below(buffer.len());
        let len = rng.below(buffer.len() - offset) + 1;
        let import = buffer.import(offset, len, Direction::FromDevice).unwrap();
        assert!(import.eq(walk(&runs, offset, len)));
    }
    let pages = world.page_list(user).len();
    assert_eq!(world.memory.pinned_frames(), u64::try_from(pages).unwrap());
    buffer
}

fn shape(world: &World, user: UserRange) -> (usize, Option<u64>) {
    let buffer = coalesced(world, user);
    let shape = (buffer.segments().count(), buffer.segments().uniform_len());
    drop(buffer);
    world.assert_idle();
    shape
}

/// Huge pages that are not neighbours.
fn four_huge(world: &World) -> UserRange {
    world.map_blocks(&[(0, PAGES), (4 * PAGES, PAGES), (2 * PAGES, PAGES), (6 * PAGES, PAGES)])
}

#[test]
fn four_huge_pages_are_four_segments_instead_of_2048() {
    let world = world();
    let whole = four_huge(&world);
    let buffer = coalesced(&world, whole);
    assert_eq!(world.page_list(whole).len(), 2048);
    assert_eq!(buffer.segments().count(), 4);
    assert_eq!(buffer.segments().uniform_len(), Some(HUGE));
    let constant = size_of::<Segments<PhysAddr>>();
    assert_eq!(buffer.segments().footprint(), constant + 4 * size_of::<u64>());
}

#[test]
fn huge_pages_that_are_neighbours_are_fewer_segments() {
    let world = world();
    let whole = world.map_blocks(&[(0, PAGES), (PAGES, PAGES), (4 * PAGES, PAGES)]);
    assert_eq!(shape(&world, whole), (2, Some(2 * HUGE)));
    assert_eq!(shape(&world, part(whole, 0, 2 * HUGE)), (1, None));
}

#[test]
fn huge_pages_are_coalesced_at_odd_offsets() {
    let world = world();
    let whole = four_huge(&world);
    for start in [1, 0x1234, 0x1000, HUGE - 0x1000, HUGE - 1, 0x5678] {
        for cut in [0, 1, 0x1000, 0x4321, HUGE - 1] {
            let range = part(whole, start, 4 * HUGE - start - cut);
            assert_eq!(shape(&world, range), (4, Some(HUGE)), "{range}");
        }
    }
}

#[test]
fn huge_pages_that_are_used_in_part_are_coalesced() {
    let world = world();
    let whole = four_huge(&world);
    let page = 0x1000;
    // In the middle of one.
    assert_eq!(shape(&world, part(whole, 3 * page + 5, 9 * page)), (1, None));
    // The end of one and the beginning of the next.
    assert_eq!(shape(&world, part(whole, HUGE - page, 2 * page)).0, 2);
    // The end of one, a whole one, and the beginning of the next.
    let (start, len) = (HUGE - 7 * page, 7 * page + HUGE + 3 * page);
    assert_eq!(shape(&world, part(whole, start, len)), (3, Some(HUGE)));
}

#[test]
fn a_huge_page_among_base_pages_stays_one_segment() {
    let world = world();
    let base = [(8 * PAGES, 1), (8 * PAGES + 2, 1), (8 * PAGES + 4, 1)];
    let blocks = [base[0], base[1], (0, PAGES), base[2], (2 * PAGES, PAGES)];
    let whole = world.map_blocks(&blocks);
    assert_eq!(shape(&world, whole), (5, None));
    // Huge pages behind one base page.
    assert_eq!(shape(&world, part(whole, 0x1000, HUGE + 0x1000)), (2, Some(HUGE)));
    // And before one.
    assert_eq!(shape(&world, part(whole, 0x2000, HUGE + 0x1000)), (2, Some(HUGE)));
}

#[test]
fn a_huge_page_with_one_page_replaced_is_what_is_left_and_that_page() {
    for (replaced, segments) in [(0, 2), (1, 3), (200, 3), (511, 2)] {
        let world = world();
        let whole = world.map_blocks(&[(0, PAGES)]);
        let other = world.memory.allocate_folios(&[0], replaced).unwrap();
        world.space.map(part(whole, replaced * 0x1000, 0x1000).start(), &other).unwrap();
        assert_eq!(shape(&world, whole).0, segments, "{replaced}");
        assert_eq!(shape(&world, part(whole, 5, HUGE - 9)).0, segments, "{replaced}");
    }
}

#[test]
fn folios_of_64k_are_a_segment_each() {
    let world = world();
    let blocks: Vec<_> = (0..16).rev().map(|n| (n * 32, 16)).collect();
    let whole = world.map_blocks(&blocks);
    assert_eq!(shape(&world, whole), (16, Some(64 << 10)));
    assert_eq!(shape(&world, part(whole, 0x3001, (1 << 20) - 0x5000)), (16, Some(64 << 10)));
}

#[test]
fn folios_of_different_orders_are_coalesced_too() {
    let world = world();
    let whole = world.map_blocks(&[(64, 16), (2 * PAGES, PAGES), (0, 4), (4 * PAGES, PAGES)]);
    assert_eq!(shape(&world, whole), (4, None));
    // And base pages that happen to be neighbours.
    let pages: Vec<_> = (0..40).map(|n| (6 * PAGES + n, 1)).collect();
    let spans: Vec<Span> = pages
        .iter()
        .map(|(first, count)| crate::common::span(BASE + first * 0x1000, count * 0x1000))
        .collect();
    spans.iter().for_each(|span| world.memory.allocate_at(*span).unwrap());
    let start = dmaspan::UserAddr::new(USER + (1 << 30));
    let neighbours = world.space.map(start, &spans).unwrap();
    assert_eq!(shape(&world, neighbours), (1, None));
}

#[test]
fn scattered_base_pages_are_a_segment_each() {
    let world = world();
    let spans = world.memory.allocate_scattered(100 << 12, 3).unwrap();
    let whole = world.space.map(dmaspan::UserAddr::new(USER), &spans).unwrap();
    assert_eq!(shape(&world, whole), (100, Some(0x1000)));
    assert_eq!(shape(&world, part(whole, 0xfff, 2)), (2, Some(0x1000)));
}

#[test]
fn more_than_the_limit_is_refused_and_the_registry_stays_usable() {
    let world = world().with_limit(2 * HUGE);
    let whole = four_huge(&world);
    let mut registry = world.registry();
    let error = registry.register(&requests(&[part(whole, 0, 2 * HUGE + 1)])).unwrap_err();
    assert_eq!(error.errno(), Errno::ENOMEM);
    assert!(error.to_string().contains("slot 0"), "{error}");
    world.assert_idle();
    // A page too many by its first byte only.
    let odd = requests(&[part(whole, 0xfff, 2 * HUGE)]);
    assert_eq!(registry.register(&odd).unwrap_err().errno(), Errno::ENOMEM);
    world.assert_idle();
    registry.register(&requests(&[part(whole, 0, 2 * HUGE)])).unwrap();
    assert_eq!(world.account.used(), 2 * HUGE);
    let error = registry.update(0, &requests(&[user(USER + 3 * HUGE, 1)])).unwrap_err();
    assert_eq!(error.errno(), Errno::ENOMEM);
    assert_eq!(registry.get(0).unwrap().user(), part(whole, 0, 2 * HUGE));
    registry.unregister().unwrap();
    world.assert_idle();
}
