//! A client's memory as a server has it mapped. No memory is there: the tests look at addresses.

use std::fmt::{self, Write as _};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use dmaspan::regbuf::{
    BufferRequest, CloneRequest, Error, HostMemory, HostSlice, Outside, RegionError, Regions,
    Registry, RemoteMemory,
};
use dmaspan::{Direction, Errno, HostAddr, Prot, Span, UserAddr, UserRange};

/// A mapping that is not there.
#[derive(Debug)]
struct Mapped(Span<HostAddr>);

// SAFETY: nobody accesses it.
unsafe impl HostMemory for Mapped {
    fn slice(&self) -> HostSlice<'_> {
        let start = usize::try_from(self.0.start().get()).unwrap();
        let start = NonNull::new(ptr::without_provenance_mut(start)).unwrap();
        HostSlice::new(start, self.0.len().try_into().unwrap())
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Outside> {
        Err(Outside { offset, len: bytes.len().try_into().unwrap(), buffer: 0 })
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Outside> {
        Err(Outside { offset, len: bytes.len().try_into().unwrap(), buffer: 0 })
    }
}

/// A mapping that is not there, and only read.
#[derive(Debug)]
struct ReadOnly(Mapped);

// SAFETY: nobody accesses it.
unsafe impl HostMemory for ReadOnly {
    fn slice(&self) -> HostSlice<'_> {
        self.0.slice()
    }

    fn access(&self) -> Prot {
        Prot::READ
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Outside> {
        self.0.read(offset, bytes)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Outside> {
        self.0.write(offset, bytes)
    }
}

#[test]
fn a_region_permits_no_more_than_its_mapping() {
    let (regions, memory) = (Of::new(), Arc::new(ReadOnly(Mapped(host(0x1000, 0x1000)))));
    for wanted in [Prot::WRITE, BOTH] {
        let refused = regions.insert(at(0x8000), wanted, memory.clone()).unwrap_err();
        let (range, mapped) = (region(0x8000, 0x1000), READ);
        assert_eq!(refused, Refused::Memory { range, wanted, mapped });
        assert_eq!((refused.errno(), regions.count()), (Errno::EACCES, 0));
    }
    regions.insert(at(0x8000), READ, memory).unwrap();
    drop(regions.hold(at(0x8000), 8, READ).unwrap());
    assert!(matches!(regions.hold(at(0x8000), 8, BOTH), Err(Refused::Access { .. })));
}

type Of = Regions<UserAddr, parking_lot::RawMutex>;
type Refused = RegionError<UserAddr>;

const READ: Prot = Prot::READ;
const BOTH: Prot = Prot::READ_WRITE;

fn at(start: u64) -> UserAddr {
    UserAddr::new(start)
}

/// The same addresses, as a request has them and as regions do.
fn user(start: u64, len: u64) -> UserRange {
    UserRange::from_len(at(start), len).unwrap()
}

fn region(start: u64, len: u64) -> Span<UserAddr> {
    Span::new(at(start), len).unwrap()
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
        assert_eq!(regions.insert(at(start), access, memory(host, len)), Ok(region(start, len)));
    }
    regions
}

fn spans(of: &Of, start: u64, len: u64) -> Result<Vec<Span<HostAddr>>, Refused> {
    of.buffer(user(start, len), BOTH).map(|buffer| buffer.segments().iter().collect())
}

/// Unmaps what is held by nobody.
fn unmap(of: &Of, start: u64, len: u64) -> Result<u64, Refused> {
    let mut unmapping = of.unmap(at(start), len)?;
    assert!(unmapping.is_done());
    Ok(unmapping.bytes())
}

/// A writer that is behind memory of the client that it writes about.
struct Behind<'r>(&'r Of, String);

impl fmt::Write for Behind<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let _held = self.0.hold(at(10), 1, READ).map_err(|_| fmt::Error)?;
        self.1.push_str(text);
        Ok(())
    }
}

#[test]
fn a_writer_that_holds_memory_of_the_client_can_be_told_of_its_regions() {
    let regions = regions(&[(10, 100, 5, BOTH), (u64::MAX - 9, 300, 10, READ)]);
    let mut writer = Behind(&regions, String::new());
    write!(writer, "{regions:?}").unwrap();
    let (first, last) = (region(10, 5), region(u64::MAX - 9, 10));
    assert_eq!(writer.1, format!("{{{first:?}: {BOTH:?}, {last:?}: {READ:?}}}"));
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
                    let hole = region(first, missing.count().try_into().unwrap());
                    assert_eq!(error, RegionError::Hole { range: region(start, len), hole });
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
        let (range, existing) = (region(start, len), region(lowest, 10));
        assert_eq!(refused, RegionError::Overlaps { range, existing });
        assert_eq!(refused.errno(), Errno::EEXIST);
    }
    assert_eq!(regions.count(), 2);
    // What touches does not overlap.
    for (start, len) in [(20, 10), (0, 10), (40, 1)] {
        assert_eq!(regions.insert(at(start), BOTH, memory(900, len)), Ok(region(start, len)));
    }
    assert_eq!(regions.count(), 5);
}

#[test]
fn an_unmap_takes_all_the_regions_that_it_covers_and_cuts_none() {
    let regions = regions(&[(10, 100, 10, BOTH), (20, 200, 10, BOTH), (40, 300, 10, BOTH)]);
    for (start, len, cut) in [
        (10, 9, 10),
        (11, 9, 10),
        (10, 11, 20),
        (0, 11, 10),
        (29, 1, 20),
        (15, 40, 10),
        (12, 3, 10),
    ] {
        let refused = regions.unmap(at(start), len).unwrap_err();
        let (range, cut) = (region(start, len), region(cut, 10));
        assert_eq!(refused, RegionError::Cuts { range, region: cut });
        assert_eq!(refused.errno(), Errno::EINVAL);
    }
    assert_eq!(regions.count(), 3);
    // Nothing is there.
    for (start, len) in [(0, 10), (30, 10), (50, u64::MAX - 49), (u64::MAX, 1)] {
        assert_eq!(unmap(&regions, start, len), Ok(0));
    }
    assert_eq!(unmap(&regions, 5, 30), Ok(20));
    assert_eq!((regions.count(), spans(&regions, 40, 10).unwrap()), (1, vec![host(300, 10)]));
    assert!(spans(&regions, 20, 1).is_err());
    assert_eq!(unmap(&regions, 0, u64::MAX), Ok(10), "all but the last address");
    let mut all = regions.unmap_all();
    assert_eq!((all.bytes(), all.regions(), all.is_done()), (0, 0, true));
}

#[test]
fn ranges_that_are_none_are_refused_and_change_nothing() {
    let regions = regions(&[(10, 100, 10, BOTH)]);
    let start = at(10);
    assert_eq!(regions.unmap(start, 0).unwrap_err(), RegionError::Empty { start });
    assert_eq!(regions.hold(start, 0, READ).unwrap_err(), RegionError::Empty { start });
    assert_eq!(RegionError::Empty { start }.errno(), Errno::EINVAL);
    let len = u64::MAX - 8;
    for refused in [
        regions.unmap(start, len).unwrap_err(),
        regions.hold(start, len, READ).unwrap_err(),
        regions.insert_remote(start, len, BOTH, Arc::new(Nobody)).unwrap_err(),
    ] {
        assert_eq!(refused, RegionError::Wraps { start, len });
        assert_eq!(refused.errno(), Errno::EOVERFLOW);
    }
    let empty = regions.insert_remote(at(50), 0, BOTH, Arc::new(Nobody)).unwrap_err();
    assert_eq!(empty, RegionError::Empty { start: at(50) });
    let nothing = regions.hold(start, 1, Prot::CACHE).unwrap_err();
    assert_eq!(nothing, RegionError::NoAccess { start, access: Prot::empty() });
    let whole = UserRange::new(at(0), at(u64::MAX)).unwrap();
    assert_eq!(regions.buffer(whole, READ).unwrap_err().errno(), Errno::EOVERFLOW);
    // Up to the top, with its last byte.
    assert_eq!(unmap(&regions, 10, u64::MAX - 9), Ok(10));
}

/// A client that does not answer.
struct Nobody;

impl RemoteMemory for Nobody {
    fn read(&self, _offset: u64, _bytes: &mut [u8]) -> Result<(), Errno> {
        Err(Errno::EIO)
    }

    fn write(&self, _offset: u64, _bytes: &[u8]) -> Result<(), Errno> {
        Err(Errno::EIO)
    }
}

#[test]
fn no_buffer_is_of_memory_that_is_not_mapped_here() {
    let regions = regions(&[(0, 100, 8, BOTH), (16, 116, 8, BOTH)]);
    regions.insert_remote(at(8), 8, BOTH, Arc::new(Nobody)).unwrap();
    let refused = spans(&regions, 4, 16).unwrap_err();
    let (range, region) = (region(4, 16), region(8, 8));
    assert_eq!(refused, RegionError::NotMapped { range, region });
    assert_eq!(refused.errno(), Errno::EOPNOTSUPP);
    assert_eq!(unmap(&regions, 0, 24), Ok(24), "what was refused holds nothing");
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
        let (range, region) = (region(0, 24), region(lowest, 8));
        assert_eq!(refused, RegionError::Access { range, wanted, region, access });
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
        let shared: Arc<Mapped> = Arc::clone(&memory);
        regions.insert(at(start), BOTH, shared).unwrap();
        memory
    });
    let mut registry = Registry::new(Arc::clone(&regions));
    registry.register(&[BufferRequest::new(user(4, 8))]).unwrap();
    let mut unmapping = regions.unmap(at(0), 24).unwrap();
    let handles = || [&first, &second, &other].map(Arc::strong_count);
    assert_eq!(handles(), [2, 2, 1], "one is held by nobody");
    let node = registry.get(0).unwrap().clone();
    registry.unregister().unwrap();
    assert_eq!((handles(), unmapping.held()), ([2, 2, 1], Some(region(0, 8))));
    let pieces: Vec<_> = node.import(1, 6, Direction::FromDevice).unwrap().collect();
    assert_eq!(pieces, [host(105, 3), host(200, 3)]);
    drop(node);
    assert_eq!((handles(), unmapping.is_done()), ([1, 1, 1], true));
    // A refused buffer keeps nothing.
    let shared: Arc<Mapped> = Arc::clone(&first);
    regions.insert(at(0), BOTH, shared).unwrap();
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
    let error = RegionError::Hole { range: region(60, 8), hole: region(64, 4) };
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
                let shared: Arc<Mapped> = Arc::clone(&moving);
                regions.insert(at(64), BOTH, shared).unwrap();
                let mut unmapping = regions.unmap(at(64), 64).unwrap();
                while !unmapping.is_done() {
                    std::thread::yield_now();
                }
                assert_eq!(Arc::strong_count(&moving), 1, "let go before it is said");
            }
        });
        for _ in 0..2000 {
            match spans(&regions, 32, 64) {
                Ok(spans) => assert_eq!(spans, [host(1032, 32), host(5000, 32)]),
                Err(error) => {
                    let (range, hole) = (region(32, 64), region(64, 32));
                    assert_eq!(error, RegionError::Hole { range, hole });
                }
            }
        }
    });
    assert_eq!((regions.count(), Arc::strong_count(&moving)), (1, 1));
}
