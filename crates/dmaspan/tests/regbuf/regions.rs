//! A client's memory as a server has it mapped. No memory is there: the tests look at addresses.

use std::sync::Arc;

use dmaspan::regbuf::{
    BufferRequest, CloneRequest, Error, HostMemory, RegionError, Regions, Registry, Source,
};
use dmaspan::{Direction, Errno, HostAddr, Prot, Span, UserAddr, UserRange};

/// A mapping that is not there.
#[derive(Debug)]
struct Mapped(Span<HostAddr>);

// SAFETY: nobody accesses it.
unsafe impl HostMemory for Mapped {
    fn span(&self) -> Span<HostAddr> {
        self.0
    }
}

type Of = Regions<Mapped, parking_lot::RawMutex>;

const READ: Prot = Prot::READ;
const BOTH: Prot = Prot::READ_WRITE;

fn at(start: u64) -> UserAddr {
    UserAddr::new(start)
}

fn user(start: u64, len: u64) -> UserRange {
    UserRange::from_len(at(start), len).unwrap()
}

fn host(start: u64, len: u64) -> Span<HostAddr> {
    Span::new(HostAddr::new(start), len).unwrap()
}

fn memory(start: u64, len: u64) -> Arc<Mapped> {
    Arc::new(Mapped(host(start, len)))
}

/// Regions of a client: its address, that of this process, the length, and the access.
fn regions(of: &[(u64, u64, u64, Prot)]) -> Arc<Of> {
    let regions = Arc::new(Of::new());
    for &(start, host, len, access) in of {
        assert_eq!(regions.insert(at(start), access, memory(host, len)), Ok(user(start, len)));
    }
    regions
}

fn spans(of: &Of, start: u64, len: u64) -> Result<Vec<Span<HostAddr>>, RegionError> {
    of.buffer(user(start, len), BOTH).map(|buffer| buffer.segments().iter().collect())
}

#[test]
fn every_range_over_regions_is_where_each_byte_of_it_is() {
    // Two that touch in both spaces, one that touches in the client's alone, a hole of 3, and two
    // that touch here in the wrong order; inserted in no order.
    let map = [
        (27, 500, 4, BOTH),
        (10, 100, 5, BOTH),
        (19, 300, 5, BOTH),
        (31, 490, 6, BOTH),
        (15, 105, 4, BOTH),
    ];
    let regions = regions(&map);
    let place = |byte: u64| {
        let found = map.iter().find(|(start, _, len, _)| (*start..start + len).contains(&byte));
        found.map(|(start, host, ..)| host + (byte - start))
    };
    let mut holes = 0;
    for start in 5..42_u64 {
        for len in 1..=42 - start {
            let expected: Option<Vec<u64>> = (start..start + len).map(place).collect();
            match (spans(&regions, start, len), expected) {
                (Ok(spans), Some(expected)) => {
                    let bytes = |span: &Span<HostAddr>| span.start().get()..=span.last().get();
                    assert_eq!(spans.iter().flat_map(bytes).collect::<Vec<_>>(), expected);
                    let apart = spans.windows(2).all(|two| two[0].join(two[1]).is_none());
                    assert!(apart, "{spans:?} of {start}, {len}");
                }
                (Err(error), None) => {
                    let first = (start..start + len).find(|byte| place(*byte).is_none()).unwrap();
                    let missing = (first..start + len).take_while(|byte| place(*byte).is_none());
                    let hole = user(first, missing.count().try_into().unwrap());
                    assert_eq!(error, RegionError::Hole { user: user(start, len), hole });
                    assert_eq!(error.errno(), Errno::EFAULT);
                    holes += 1;
                }
                (found, expected) => panic!("{start}, {len}: {found:?}, and not {expected:?}"),
            }
        }
    }
    assert!(holes > 100);
    assert_eq!(spans(&regions, 10, 9).unwrap(), [host(100, 9)], "joined over two regions");
}

#[test]
fn regions_that_overlap_are_refused_by_the_lowest_that_is_there() {
    let regions = regions(&[(10, 100, 10, BOTH), (30, 200, 10, BOTH)]);
    for (start, len, lowest) in [
        (0, 11, 10),
        (19, 1, 10),
        (10, 10, 10),
        (12, 3, 10),
        (0, 100, 10),
        (20, 11, 30),
        (39, 9, 30),
    ] {
        let refused = regions.insert(at(start), BOTH, memory(900, len)).unwrap_err();
        let (range, existing) = (user(start, len), user(lowest, 10));
        assert_eq!(refused, RegionError::Overlaps { range, existing });
        assert_eq!(refused.errno(), Errno::EEXIST);
    }
    assert_eq!(regions.count(), 2);
    // What touches does not overlap.
    for (start, len) in [(20, 10), (0, 10), (40, 1)] {
        assert_eq!(regions.insert(at(start), BOTH, memory(900, len)), Ok(user(start, len)));
    }
    assert_eq!(regions.count(), 5);
}

#[test]
fn a_region_is_removed_by_exactly_its_range() {
    let regions = regions(&[(10, 100, 10, BOTH), (20, 200, 10, BOTH)]);
    for range in [user(10, 9), user(11, 9), user(10, 20), user(0, 10), user(30, 10), user(10, 11)] {
        let refused = regions.remove(range).unwrap_err();
        assert_eq!(refused, RegionError::NoRegion { range });
        assert_eq!(refused.errno(), Errno::ENOENT);
    }
    assert_eq!(regions.remove(user(20, 10)).unwrap().span(), host(200, 10));
    assert_eq!(regions.count(), 1);
    assert_eq!(spans(&regions, 10, 10).unwrap(), [host(100, 10)]);
    assert!(spans(&regions, 20, 1).is_err());
}

#[test]
fn a_region_of_the_last_byte_of_the_space_is_found() {
    let top = u64::MAX - 9;
    let regions = regions(&[(top, 100, 10, BOTH), (top - 5, 95, 5, BOTH)]);
    assert_eq!(spans(&regions, top - 5, 15).unwrap(), [host(95, 15)]);
    assert_eq!(spans(&regions, u64::MAX, 1).unwrap(), [host(109, 1)]);
    let wraps = regions.insert(at(u64::MAX), BOTH, memory(1, 2)).unwrap_err();
    assert_eq!(wraps, RegionError::Wraps { start: at(u64::MAX), len: 2 });
    assert_eq!(wraps.errno(), Errno::EOVERFLOW);
}

#[test]
fn a_buffer_is_permitted_what_all_its_regions_are() {
    let regions = regions(&[(0, 100, 8, BOTH), (8, 108, 8, READ), (16, 116, 8, Prot::WRITE)]);
    // Only reads and writes count.
    let buffer = regions.buffer(user(0, 16), READ | Prot::CACHE).unwrap();
    assert_eq!(buffer.access(), READ);
    assert!(buffer.import(0, 16, Direction::ToDevice).is_ok());
    assert!(buffer.import(0, 16, Direction::FromDevice).is_err());
    for (wanted, lowest, access) in [(BOTH, 8, READ), (READ, 16, Prot::WRITE)] {
        let refused = regions.buffer(user(0, 24), wanted).unwrap_err();
        let (user, region) = (user(0, 24), user(lowest, 8));
        assert_eq!(refused, RegionError::Access { user, wanted, region, access });
        assert_eq!(refused.errno(), Errno::EFAULT);
    }
    let none = regions.insert(at(50), Prot::CACHE, memory(1, 1)).unwrap_err();
    assert_eq!(none, RegionError::NoAccess { start: at(50), access: Prot::empty() });
    assert_eq!(none.errno(), Errno::EINVAL);
}

#[test]
fn memory_stays_while_a_buffer_or_an_operation_has_some_of_it() {
    let regions = Arc::new(Of::new());
    let [first, second, other] = [(0, 100), (8, 200), (16, 300)].map(|(start, host)| {
        let memory = memory(host, 8);
        regions.insert(at(start), BOTH, Arc::clone(&memory)).unwrap();
        memory
    });
    let mut registry = Registry::new(Arc::clone(&regions));
    registry.register(&[BufferRequest::new(user(4, 8))]).unwrap();
    for range in [user(0, 8), user(8, 8), user(16, 8)] {
        drop(regions.remove(range).unwrap());
    }
    let handles = || [&first, &second, &other].map(Arc::strong_count);
    assert_eq!(handles(), [2, 2, 1]);
    let node = registry.get(0).unwrap().clone();
    registry.unregister().unwrap();
    assert_eq!(handles(), [2, 2, 1]);
    let pieces: Vec<_> = node.import(1, 6, Direction::FromDevice).unwrap().collect();
    assert_eq!(pieces, [host(105, 3), host(200, 3)]);
    drop(node);
    assert_eq!(handles(), [1, 1, 1]);
    // A refused buffer keeps nothing.
    regions.insert(at(0), BOTH, Arc::clone(&first)).unwrap();
    assert!(regions.buffer(user(4, 8), BOTH).is_err());
    assert_eq!(handles(), [2, 1, 1]);
}

#[test]
fn queues_of_one_client_share_buffers_and_no_others() {
    let client = regions(&[(0, 100, 64, BOTH)]);
    let mut queue = Registry::new(Arc::clone(&client));
    queue.register(&[BufferRequest::new(user(0, 64))]).unwrap();
    let mut second = Registry::new(Arc::clone(&client));
    second.clone_from(&queue, &CloneRequest::default()).unwrap();
    assert!(Arc::ptr_eq(second.get(0).unwrap().buffer(), queue.get(0).unwrap().buffer()));
    let mut other = Registry::new(regions(&[(0, 100, 64, BOTH)]));
    let refused = other.clone_from(&queue, &CloneRequest::default());
    assert_eq!(refused, Err(Error::OtherOwner));
}

#[test]
fn a_registry_says_which_slot_has_no_memory_and_why() {
    let mut queue = Registry::new(regions(&[(0, 100, 64, BOTH)]));
    let requests = [BufferRequest::new(user(0, 64)), BufferRequest::new(user(60, 8))];
    let refused = queue.register(&requests).unwrap_err();
    let error = RegionError::Hole { user: user(60, 8), hole: user(64, 4) };
    assert_eq!(refused, Error::Buffer { index: 1, error, errno: Errno::EFAULT });
    assert_eq!(queue.slots(), 0);
}

#[test]
fn regions_come_and_go_while_buffers_are_registered() {
    let regions = regions(&[(0, 1000, 64, BOTH)]);
    let moving = memory(5000, 64);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..2000 {
                let range = regions.insert(at(64), BOTH, Arc::clone(&moving)).unwrap();
                drop(regions.remove(range).unwrap());
            }
        });
        for _ in 0..2000 {
            match spans(&regions, 32, 64) {
                Ok(spans) => assert_eq!(spans, [host(1032, 32), host(5000, 32)]),
                Err(error) => {
                    let (user, hole) = (user(32, 64), user(64, 32));
                    assert_eq!(error, RegionError::Hole { user, hole });
                }
            }
        }
    });
    assert_eq!((regions.count(), Arc::strong_count(&moving)), (1, 1));
}
