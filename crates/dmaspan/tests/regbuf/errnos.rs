//! Errors are Linux's, and where two apply, the one that Linux finds first.

use std::sync::Arc;

use dmaspan::regbuf::{
    Buffer, BufferRequest, CloneRequest, Existing, ImportError, Keep, MAX_BUFFER_LEN, MAX_BUFFERS,
    MAX_IMPORT, PinBufferError, Segments,
};
use dmaspan::{Account, Direction, Errno, PhysAddr, Prot, UserAddr, UserRange};
use dmaspan_sim::memory::{
    Books, Holes, MapOptions, Rights, SimMemory, SimPinError, SimPinner, SimSpace,
};

use crate::common::{BASE, Of, USER, World, part, requests, span, user};

const PAGE: u64 = 0x1000;

type Error = dmaspan::regbuf::Error<PinBufferError<SimPinError>>;

fn world() -> World {
    let world = World::new(64 * PAGE, 12);
    world.map_blocks(&[(0, 16)]);
    world
}

fn page(number: u64) -> BufferRequest {
    BufferRequest::new(user(USER + number * PAGE, PAGE))
}

/// Beyond what the user has.
const NOWHERE: u64 = 40;

fn errno<T: std::fmt::Debug>(result: Result<T, Error>) -> Errno {
    let error = result.unwrap_err();
    assert!(!error.to_string().is_empty());
    error.errno()
}

#[test]
fn iovecs_are_checked_as_linux_checks_them() {
    let of = |base, len| BufferRequest::from_iovec::<PinBufferError<SimPinError>>(base, len);
    assert_eq!(of(0, 0).unwrap(), BufferRequest::VACANT);
    assert_eq!(errno(of(0, 1)), Errno::EFAULT);
    // Without an address, and too long: no address is found first.
    assert_eq!(errno(of(0, u64::MAX)), Errno::EFAULT);
    assert_eq!(errno(of(0x1000, 0)), Errno::EFAULT);
    assert_eq!(errno(of(0x1000, MAX_BUFFER_LEN + 1)), Errno::EINVAL);
    assert!(of(0x1000, MAX_BUFFER_LEN).is_ok());
    // Too long, and it wraps: the length is checked first.
    assert_eq!(errno(of(u64::MAX, MAX_BUFFER_LEN + 1)), Errno::EINVAL);
    assert_eq!(errno(of(u64::MAX - 0xfff, 0x1001)), Errno::EOVERFLOW);
    let request = of(0x1234, 0x10).unwrap();
    assert_eq!(request, BufferRequest::new(user(0x1234, 0x10)));
    assert_eq!((request.access, request.tag), (Prot::READ_WRITE, 0));
}

#[test]
fn a_table_that_cannot_be_registered_has_linux_errno() {
    let world = world();
    let mut registry = world.registry();
    assert_eq!(errno(registry.register(&[])), Errno::EINVAL);
    assert_eq!(errno(registry.register_sparse(0)), Errno::EINVAL);
    assert_eq!(errno(registry.register_sparse(MAX_BUFFERS + 1)), Errno::EINVAL);
    let too_many = vec![BufferRequest::VACANT; 16385];
    assert_eq!(errno(registry.register(&too_many)), Errno::EINVAL);
    registry.register(&too_many[1..]).unwrap();
    assert_eq!(registry.slots(), 16384);
    // A table exists: found before a bad length.
    for result in [
        registry.register(&[page(0)]),
        registry.register(&[]),
        registry.register(&too_many),
        registry.register_sparse(0),
    ] {
        assert_eq!(errno(result), Errno::EBUSY);
    }
    registry.unregister().unwrap();
    assert_eq!(errno(registry.unregister()), Errno::ENXIO);
    world.assert_idle();
}

#[test]
fn a_request_that_cannot_be_had_has_linux_errno() {
    let world = world();
    let long = UserRange::from_len(UserAddr::new(USER), MAX_BUFFER_LEN + 1).unwrap();
    let all = UserRange::new(UserAddr::new(0), UserAddr::new(u64::MAX)).unwrap();
    for (request, expected) in [
        (page(NOWHERE), Errno::EFAULT),
        // The last page of it is nowhere.
        (BufferRequest::new(user(USER, 16 * PAGE + 1)), Errno::EFAULT),
        (BufferRequest { tag: 1, ..BufferRequest::VACANT }, Errno::EINVAL),
        (BufferRequest::new(long), Errno::EINVAL),
        (BufferRequest::new(all), Errno::EINVAL),
        (BufferRequest { access: Prot::CACHE, ..page(0) }, Errno::EINVAL),
    ] {
        let mut registry = world.registry();
        assert_eq!(errno(registry.register(&[page(1), request])), expected, "{request:?}");
        assert_eq!(registry.slots(), 0);
        world.assert_idle();
        registry.register_sparse(3).unwrap();
        assert_eq!(errno(registry.update(1, &[request])), expected, "{request:?}");
        world.assert_idle();
        // The first one that is wrong.
        let both = [request, BufferRequest { tag: 1, ..BufferRequest::VACANT }];
        assert_eq!(errno(registry.update(1, &both)), expected);
    }
    let error = world.registry().register(&[page(0), page(NOWHERE)]).unwrap_err();
    assert!(matches!(error, Error::Buffer { index: 1, errno: Errno::EFAULT, .. }), "{error:?}");
}

#[test]
fn what_no_buffer_is_made_of_has_linux_errno() {
    let world = world().with_limit(4 * PAGE);
    let bar = span(1 << 45, 4 * PAGE);
    let at = UserAddr::new(USER + 16 * PAGE);
    world.space.map_device_with(at, bar, MapOptions::default()).unwrap();
    let source = world.source();
    let of = |user, access| source.buffer(user, access).map(|_| ()).unwrap_err();
    let error = of(user(USER, 4 * PAGE + 1), Prot::READ_WRITE);
    assert!(matches!(error, PinBufferError::OverLimit { .. }), "{error}");
    assert_eq!(error.errno(), Errno::ENOMEM);
    for range in [user(USER + 16 * PAGE, 1), user(USER + 14 * PAGE, 3 * PAGE)] {
        let error = of(range, Prot::READ_WRITE);
        assert!(matches!(error, PinBufferError::NotMemory { .. }), "{error}");
        assert_eq!(error.errno(), Errno::EFAULT);
        world.assert_idle();
    }
    let holes = world.pinner().with_holes(Holes::FoundOnTheWay);
    let (space, account) = (Arc::clone(&world.space), Account::unlimited());
    let late = dmaspan::regbuf::Pinned::new(Arc::new(holes), space, account, 12);
    let error = late.buffer(user(USER + 19 * PAGE, 2 * PAGE), Prot::READ).map(|_| ());
    assert_eq!(error.unwrap_err().errno(), Errno::EFAULT);
    let frames = world.memory.allocate(PAGE, 12).unwrap();
    let options = MapOptions { rights: Rights::ReadOnly, ..MapOptions::default() };
    let read_only = world.space.map_with(UserAddr::new(USER + (1 << 30)), &[frames], options);
    let error = of(read_only.unwrap(), Prot::WRITE);
    assert!(matches!(error, PinBufferError::Pinner { errno: Errno::EFAULT, .. }), "{error}");
    world.assert_idle();
}

#[test]
fn updates_are_refused_in_the_order_of_linux() {
    let world = world();
    let mut registry = world.registry();
    let two = [page(0), page(1)];
    // Nothing to update: found before there is no table, and before the sum.
    for index in [0, 5, u32::MAX] {
        assert_eq!(errno(registry.update(index, &[])), Errno::EINVAL);
    }
    // The sum of the numbers: found before there is no table.
    assert_eq!(errno(registry.update(u32::MAX, &two)), Errno::EOVERFLOW);
    assert_eq!(errno(registry.update(u32::MAX - 2, &two)), Errno::ENXIO);
    assert_eq!(errno(registry.update(0, &two)), Errno::ENXIO);
    registry.register_sparse(4).unwrap();
    assert_eq!(errno(registry.update(u32::MAX, &two)), Errno::EOVERFLOW);
    assert_eq!(errno(registry.update(u32::MAX - 2, &two)), Errno::EINVAL);
    assert_eq!(errno(registry.update(3, &two)), Errno::EINVAL);
    assert_eq!(errno(registry.update(4, &two[..1])), Errno::EINVAL);
    // Slots that are not there: found before what cannot be had.
    assert_eq!(errno(registry.update(4, &[page(NOWHERE)])), Errno::EINVAL);
    assert_eq!(errno(registry.update(0, &[])), Errno::EINVAL);
    let text = registry.update(0, &[]).unwrap_err().to_string();
    assert_eq!(text, "no slots were asked for, of the table of 4");
    let text = registry.update(3, &two).unwrap_err().to_string();
    assert_eq!(text, "2 slots from 3 on leave the table of 4");
    world.assert_idle();
    assert_eq!(registry.update(2, &two).unwrap(), 2);
}

#[test]
fn an_empty_slot_and_one_that_does_not_exist_have_no_buffer() {
    let world = world();
    let mut registry = world.registry();
    assert_eq!(errno(registry.get(0)), Errno::EFAULT);
    registry.register(&[page(0), BufferRequest::VACANT]).unwrap();
    for index in [1, 2, u32::MAX] {
        assert_eq!(errno(registry.get(index)), Errno::EFAULT);
    }
    assert_eq!(errno(registry.take_back(u32::MAX)), Errno::EINVAL);
}

/// What `io_register_clone_buffers` and `io_clone_buffers` answer, in their order.
pub(crate) fn linux_clone(
    request: &CloneRequest,
    owner: Owner,
    from: u32,
    to: u32,
) -> Option<Errno> {
    let CloneRequest { source_index, index, count, existing, task } = *request;
    if existing == Existing::Refuse && to > 0 {
        return Some(Errno::EBUSY);
    }
    match owner {
        Owner::SameTask(issuer) if task != Some(issuer) => return Some(Errno::EEXIST),
        Owner::Other | Owner::OtherSpace => return Some(Errno::EINVAL),
        _ => {}
    }
    if count == 0 && (source_index > 0 || index > 0) {
        return Some(Errno::EINVAL);
    }
    if from == 0 {
        return Some(Errno::ENXIO);
    }
    let all = if count == 0 { from } else { count };
    if all > from {
        return Some(Errno::EINVAL);
    }
    let end = u64::from(all) + u64::from(source_index);
    let other_end = u64::from(all) + u64::from(index);
    if end > u64::from(from) || other_end > u64::from(u32::MAX) {
        return Some(Errno::EOVERFLOW);
    }
    (other_end > u64::from(MAX_BUFFERS)).then_some(Errno::EINVAL)
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Owner {
    Same,
    /// The source belongs to one task.
    SameTask(u64),
    /// Another one is charged.
    Other,
    OtherSpace,
}

impl Owner {
    fn source(self, world: &World) -> Of<SimPinner> {
        let (memory, account) = (Arc::clone(&world.memory), Arc::clone(&world.account));
        match self {
            Self::Same => world.registry(),
            Self::SameTask(task) => world.registry().with_issuer(task),
            Self::Other => {
                let space = Arc::clone(&world.space);
                World { space, ..World::of(memory, Account::unlimited()) }.registry()
            }
            Self::OtherSpace => World::of(memory, account).registry(),
        }
    }
}

/// Tables as registries have them, of so many slots.
fn table(mut registry: Of<SimPinner>, slots: u32) -> Of<SimPinner> {
    if slots > 0 {
        registry.register_sparse(slots).unwrap();
    }
    registry
}

fn clone_requests() -> Vec<CloneRequest> {
    let numbers = [0, 1, 2, 3, 4, MAX_BUFFERS - 1, MAX_BUFFERS, u32::MAX - 1, u32::MAX];
    let mut all = Vec::new();
    for source_index in numbers {
        for index in numbers {
            for count in [0, 1, 2, 3, 4, MAX_BUFFERS, MAX_BUFFERS + 1, u32::MAX] {
                for existing in [Existing::Refuse, Existing::Replace] {
                    for task in [None, Some(3), Some(4)] {
                        let places = CloneRequest { source_index, index, ..Default::default() };
                        all.push(CloneRequest { count, existing, task, ..places });
                    }
                }
            }
        }
    }
    all
}

#[test]
fn clones_are_refused_in_the_order_of_linux() {
    let world = world();
    let mut refused = std::collections::BTreeSet::new();
    for owner in [Owner::Same, Owner::SameTask(3), Owner::Other, Owner::OtherSpace] {
        for (from, to) in [(0, 0), (0, 2), (3, 0), (3, 2), (2, 4)] {
            let source = table(owner.source(&world), from);
            for request in clone_requests() {
                let mut registry = table(world.registry(), to);
                let result = registry.clone_from(&source, &request);
                let expected = linux_clone(&request, owner, from, to);
                let got = result.as_ref().err().map(Error::errno);
                assert_eq!(got, expected, "{request:?} of {owner:?}, {from} to {to}: {result:?}");
                let slots = match expected {
                    Some(errno) => {
                        refused.insert(errno.to_string());
                        to
                    }
                    None => {
                        let count = if request.count == 0 { from } else { request.count };
                        (request.index + count).max(to)
                    }
                };
                assert_eq!(registry.slots(), slots, "{request:?}");
            }
        }
    }
    assert_eq!(refused.len(), 5, "{refused:?}");
}

#[test]
fn clones_within_a_table_are_refused_in_the_order_of_linux() {
    let world = world();
    for slots in [0, 3] {
        for request in clone_requests() {
            let mut registry = table(world.registry().with_issuer(5), slots);
            let got = registry.clone_within(&request).err().map(|error| error.errno());
            assert_eq!(got, linux_clone(&request, Owner::Same, slots, slots), "{request:?}");
        }
    }
}

#[test]
fn a_registry_knows_its_task() {
    let registry = world().registry();
    assert_eq!(registry.issuer(), None);
    assert_eq!(registry.with_issuer(7).issuer(), Some(7));
}

#[test]
fn imports_are_refused_with_linux_errno() {
    let memory = SimMemory::with_books(PhysAddr::new(BASE), 4 << 30, 12, Books::Folios).unwrap();
    let world = World::of(Arc::new(memory), Account::unlimited());
    let frames = world.memory.allocate(4 << 30, 12).unwrap();
    let whole = world.space.map(UserAddr::new(USER), &[frames]).unwrap();
    let range = part(whole, 0x100, (3 << 30) + 5);
    let len = range.checked_len().unwrap();
    let buffer = world.buffer(range);
    let both = Direction::Bidirectional;
    assert_eq!(MAX_IMPORT, (1 << 31) - 4096);
    assert_eq!(buffer.import(7, MAX_IMPORT, both).unwrap().bytes(), MAX_IMPORT);
    let error = |offset, len| buffer.import(offset, len, both).unwrap_err();
    let too_long = error(0, MAX_IMPORT + 1);
    assert!(matches!(too_long, ImportError::TooLong { limit: MAX_IMPORT, .. }), "{too_long}");
    assert!(matches!(error(len, 1), ImportError::Outside { .. }));
    assert!(matches!(error(len - 1, 2), ImportError::Outside { .. }));
    assert!(matches!(error(len + 1, 0), ImportError::Outside { .. }));
    assert!(matches!(error(u64::MAX, 2), ImportError::Wraps { .. }));
    assert!(matches!(error(u64::MAX - range.start().get(), 2), ImportError::Wraps { .. }));
    for (offset, count) in
        [(0, MAX_IMPORT + 1), (len, 1), (u64::MAX, 2), (5, u64::MAX), (0, u64::MAX)]
    {
        let error = error(offset, count);
        assert_eq!(error.errno(), Errno::EFAULT, "{error}");
    }
    let half = part(range, 0, 1 << 30);
    let errno = |ranges: &[_]| buffer.import_vectored(ranges, both).unwrap_err().errno();
    assert_eq!(errno(&[half, half]), Errno::EINVAL);
    let rest = part(range, 9, (1 << 30) - 4096);
    assert_eq!(buffer.import_vectored(&[half, rest], both).unwrap().bytes(), MAX_IMPORT);
    assert_eq!(errno(&[half, part(range, 0, (1 << 30) - 4095)]), Errno::EINVAL);
    // Each range is checked before their sum.
    assert_eq!(errno(&[half, half, part(whole, 0, 8)]), Errno::EFAULT);
    assert_eq!(errno(&[half, part(whole, 0, 8), half]), Errno::EFAULT);
    assert_eq!(errno(&[part(range, 0, MAX_IMPORT + 1)]), Errno::EFAULT);
}

struct Nothing;

impl Keep<PhysAddr> for Nothing {
    fn end(&mut self, _segments: &Segments<PhysAddr>) {}
}

#[test]
fn errors_say_what_was_asked_for_and_what_there_is() {
    let world = world();
    let mut registry = world.registry();
    let nothing = registry.update(0, &[page(0)]).unwrap_err();
    assert_eq!(nothing, Error::NoTable);
    registry.register_sparse(3).unwrap();
    let error = registry.update(2, &[page(0), page(1)]).unwrap_err();
    assert_eq!(error, Error::Index { index: 2, count: 2, slots: 3 });
    assert_eq!(registry.get(2).unwrap_err(), Error::Vacant { index: 2 });
    // SAFETY: nothing uses the memory.
    let lent = unsafe {
        Buffer::new(Segments::one(span(0, 8)), user(0, 8), Prot::READ, Box::new(Nothing))
    };
    registry.lend(0, lent.unwrap()).unwrap();
    registry.update(1, &[page(0)]).unwrap();
    assert_eq!(registry.take_back(1).unwrap_err(), Error::NotLent { index: 1 });
    let error = registry.take_back(2).unwrap_err();
    assert_eq!((&error, error.errno()), (&Error::NothingLent { index: 2 }, Errno::EINVAL));
    let error = registry.take_back(3).unwrap_err();
    assert_eq!(error, Error::Index { index: 3, count: 1, slots: 3 });
    let error = registry.register(&requests(&[])).unwrap_err();
    assert_eq!(error, Error::TableExists { slots: 3 });
    let other = SimSpace::new(Arc::clone(&world.memory));
    let foreign = World { space: Arc::new(other), ..World::new(16 * PAGE, 12) };
    let error = foreign.registry().register(&[page(0)]).unwrap_err();
    assert!(error.to_string().starts_with("slot 0: "), "{error}");
}

#[test]
fn iovecs_of_a_vectored_import_are_checked_as_linux_checks_them() {
    let world = world();
    let buffer = world.buffer(user(USER, 8 * PAGE));
    let of = |base, len| buffer.range_from_iovec(base, len);
    assert_eq!(of(USER + 5, 9), Ok(user(USER + 5, 9)));
    let empty = of(USER, 0).unwrap_err();
    assert_eq!((empty, empty.errno()), (ImportError::Empty { start: USER }, Errno::EFAULT));
    // An address of 0 is one as any other.
    assert_eq!(of(0, 0).unwrap_err(), ImportError::Empty { start: 0 });
    for base in [u64::MAX, USER] {
        let error = of(base, u64::MAX).unwrap_err();
        let (offset, user) = (base - USER, buffer.user());
        assert_eq!(error, ImportError::Wraps { offset, len: u64::MAX, user });
        assert_eq!(error.errno(), Errno::EFAULT);
    }
    let ranges = [of(USER, 1).unwrap(), of(0, 1).unwrap()];
    let error = buffer.import_vectored(&ranges, Direction::ToDevice).unwrap_err();
    assert_eq!(error.errno(), Errno::EFAULT);
}
