//! Buffers at the ends of what numbers can say, and of what a memory has.

use std::sync::Arc;

use dmaspan::account::Counting;
use dmaspan::regbuf::{
    BufferRequest, CloneRequest, Error, Existing, MAX_BUFFER_LEN, MAX_BUFFERS, Pinned, Registry,
};
use dmaspan::{Account, Direction, Errno, Prot, UserAddr, UserRange};
use dmaspan_sim::memory::SimPinner;

use crate::common::{BASE, Of, USER, World, part, requests, span, user};

const PAGE: u64 = 0x1000;
const ALL: [Counting; 3] = [Counting::Ranges, Counting::Mappings, Counting::Frames];
const BOTH: Direction = Direction::Bidirectional;

fn world(counting: Counting) -> World {
    let world = World::new(64 * PAGE, 12);
    World { account: Account::with_counting(u64::MAX, counting), ..world }
}

/// Two pages at `start`, which are not neighbours in memory.
fn two_pages(world: &World, start: u64) -> UserRange {
    let spans = [span(BASE, PAGE), span(BASE + 8 * PAGE, PAGE)];
    spans.iter().for_each(|span| world.memory.allocate_at(*span).unwrap());
    world.space.map(UserAddr::new(start), &spans).unwrap()
}

#[test]
fn buffers_lie_at_both_ends_of_the_users_space() {
    for start in [0, 0u64.wrapping_sub(2 * PAGE)] {
        for counting in ALL {
            let world = world(counting);
            let whole = two_pages(&world, start);
            for (before, behind) in
                [(0, 0), (1, 0), (0, 1), (2 * PAGE - 1, 0), (0, 2 * PAGE - 1), (PAGE - 1, PAGE - 1)]
            {
                let asked = part(whole, before, 2 * PAGE - before - behind);
                let buffer = world.buffer(asked);
                let len = buffer.len();
                assert!(buffer.segments().iter().eq(world.runs(asked)), "{asked}");
                for (offset, asked) in [(0, len), (len - 1, 1), (len, 0)] {
                    let import = buffer.import(offset, asked, BOTH).unwrap();
                    assert_eq!(import.bytes(), asked);
                }
                for (offset, asked) in
                    [(len, 1), (len + 1, 0), (0, len + 1), (u64::MAX, 1), (1, u64::MAX)]
                {
                    let error = buffer.import(offset, asked, BOTH).unwrap_err();
                    assert_eq!(error.errno(), Errno::EFAULT, "{error}");
                }
                let ends = [UserRange::point(asked.last()), UserRange::point(asked.start()), asked];
                let import = buffer.import_vectored(&ends, BOTH).unwrap();
                assert_eq!(import.map(|piece| piece.len()).sum::<u64>(), len + 2);
                // The other end of the space is not next to this one.
                let other = UserRange::point(UserAddr::new(!whole.last().get()));
                assert!(buffer.import_user(other, BOTH).is_err(), "{other}");
                drop(buffer);
                world.assert_idle();
            }
        }
    }
}

fn with_pages(world: &World, page_lg2: u32) -> Of<SimPinner> {
    let (space, account) = (Arc::clone(&world.space), Arc::clone(&world.account));
    Registry::new(Pinned::new(Arc::new(world.pinner()), space, account, page_lg2))
}

#[test]
fn pages_larger_than_the_pinners_are_pinned_and_charged_whole() {
    for counting in ALL {
        let world = world(counting);
        let whole = world.map_blocks(&[(0, 5), (32, 11)]);
        let mut registry = with_pages(&world, 14);
        let parts = [part(whole, 5 * PAGE + 7, 3 * PAGE), part(whole, 5 * PAGE + 9, 1)];
        registry.register(&requests(&parts)).unwrap();
        let pages = if counting == Counting::Mappings { 12 } else { 8 };
        assert_eq!(world.account.used(), pages * PAGE, "{counting:?}");
        assert_eq!(world.memory.pinned_frames(), 8);
        let node = registry.get(0).unwrap();
        assert!(node.segments().iter().eq(world.runs(parts[0])));
        drop(registry);
        world.assert_idle();
        // There are 16 pages, and half of the one of 32.
        let error = with_pages(&world, 17).register(&requests(&parts)).unwrap_err();
        assert_eq!(error.errno(), Errno::EFAULT);
        world.assert_idle();
        for page_lg2 in [63, 64, u32::MAX] {
            with_pages(&world, page_lg2).register(&requests(&parts)).unwrap_err();
            world.assert_idle();
        }
    }
}

#[test]
fn frames_that_a_buffer_has_twice_are_pinned_for_each_and_charged_once() {
    for counting in ALL {
        let world = world(counting);
        let spans = [span(BASE + 8 * PAGE, 3 * PAGE), span(BASE, 2 * PAGE)];
        spans.iter().for_each(|span| world.memory.allocate_at(*span).unwrap());
        // And what overlaps comes in falling order.
        let (last, middle) = (span(BASE + 10 * PAGE, PAGE), span(BASE + 8 * PAGE, 2 * PAGE));
        let twice = [spans[0], spans[1], last, middle, spans[0]];
        let whole = world.space.map(UserAddr::new(USER), &twice).unwrap();
        let charged = if counting == Counting::Frames { 5 } else { 11 };
        let account = Account::with_counting(charged * PAGE, counting);
        let world = World { account, ..world };
        let buffer = world.buffer(part(whole, 1, 11 * PAGE - 2));
        assert!(buffer.segments().iter().eq(world.runs(buffer.user())));
        assert_eq!(world.account.used(), charged * PAGE);
        assert_eq!(world.memory.pins(spans[0].paddr()), Some(3));
        drop(buffer);
        world.assert_idle();
        let account = Account::with_counting(charged * PAGE - 1, counting);
        let world = World { account, ..world };
        let error = world.source().buffer(whole, Prot::READ_WRITE).unwrap_err();
        assert_eq!(error.errno(), Errno::ENOMEM);
        world.assert_idle();
    }
}

#[test]
fn the_longest_buffer_and_the_largest_table_are_asked_for_and_no_more() {
    let world = world(Counting::Ranges);
    let mut registry = world.registry();
    let longest = BufferRequest::new(user(PAGE, MAX_BUFFER_LEN));
    // It is not refused for its length, but as nothing is there.
    let error = registry.register(&[longest]).unwrap_err();
    assert!(matches!(error, Error::Buffer { errno: Errno::EFAULT, .. }), "{error}");
    for too_long in [MAX_BUFFER_LEN + 1, u64::MAX - PAGE] {
        let error = registry.register(&[BufferRequest::new(user(PAGE, too_long))]).unwrap_err();
        assert_eq!(error, Error::TooLong { len: too_long, limit: MAX_BUFFER_LEN });
    }
    let space = UserRange::new(UserAddr::new(0), UserAddr::new(u64::MAX)).unwrap();
    let error = registry.register(&[BufferRequest::new(space)]).unwrap_err();
    assert_eq!(error, Error::TooLong { len: u64::MAX, limit: MAX_BUFFER_LEN });
    world.assert_idle();

    let most = usize::try_from(MAX_BUFFERS).unwrap();
    let error = registry.register(&vec![BufferRequest::VACANT; most + 1]).unwrap_err();
    assert_eq!(error.errno(), Errno::EINVAL);
    world.map_blocks(&[(0, 16)]);
    registry.register(&vec![BufferRequest::new(user(USER + 5, 9)); most]).unwrap();
    assert_eq!((registry.slots(), world.account.used()), (MAX_BUFFERS, PAGE));
    assert_eq!(registry.nodes().count(), most);
    let (count, existing) = (MAX_BUFFERS, Existing::Replace);
    let request = CloneRequest { index: 1, count, existing, ..CloneRequest::default() };
    assert_eq!(registry.clone_within(&request).unwrap_err().errno(), Errno::EINVAL);
    drop(registry);
    world.assert_idle();
}
