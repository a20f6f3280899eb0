//! Parts of a client's memory that are held: real bytes, checked against a model, over regions that
//! come and go.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::mem;
use std::ops::Range;
use std::pin::Pin;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

use dmaspan::regbuf::{
    Held, HeldError, HostMemory, HostSlice, Outside, RegionError, Regions, RemoteMemory, Unmapping,
};
use dmaspan::{Errno, Iova, Prot, Span};
use dmaspan_sim::rng::Rng;

use crate::common::size;

type Client = Regions<Iova, parking_lot::RawMutex>;
type ClientHeld = Held<Iova, parking_lot::RawMutex>;
type ClientUnmapping = Unmapping<Iova, parking_lot::RawMutex>;

const READ: Prot = Prot::READ;
const WRITE: Prot = Prot::WRITE;
const BOTH: Prot = Prot::READ_WRITE;

fn at(start: u64) -> Iova {
    Iova::new(start)
}

fn span(start: u64, len: u64) -> Span<Iova> {
    Span::new(at(start), len).unwrap()
}

/// Bytes of this program, and whether they exist still.
#[derive(Debug)]
struct Bytes {
    bytes: Box<[AtomicU8]>,
    is_mapped: Arc<AtomicBool>,
}

impl Bytes {
    fn new(bytes: impl IntoIterator<Item = u8>) -> (Arc<Self>, Arc<AtomicBool>) {
        let is_mapped = Arc::new(AtomicBool::new(true));
        let bytes = bytes.into_iter().map(AtomicU8::new).collect();
        (Arc::new(Self { bytes, is_mapped: Arc::clone(&is_mapped) }), is_mapped)
    }

    fn part(&self, offset: u64, len: usize) -> Result<&[AtomicU8], Outside> {
        assert!(self.is_mapped.load(Ordering::SeqCst), "memory that is unmapped was reached");
        let buffer = self.bytes.len().try_into().unwrap();
        let outside = Outside { offset, len: len.try_into().unwrap(), buffer };
        self.bytes.get(size(offset)..size(offset) + len).ok_or(outside)
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.is_mapped.store(false, Ordering::SeqCst);
    }
}

// SAFETY: the bytes stay where they are while the value exists, and are reached atomically alone.
unsafe impl HostMemory for Bytes {
    fn slice(&self) -> HostSlice<'_> {
        HostSlice::new(NonNull::from(&self.bytes[0]).cast(), self.bytes.len())
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Outside> {
        let source = self.part(offset, bytes.len())?;
        bytes.iter_mut().zip(source).for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Outside> {
        let target = self.part(offset, bytes.len())?;
        bytes.iter().zip(target).for_each(|(from, to)| to.store(*from, Ordering::Relaxed));
        Ok(())
    }
}

/// A client that is asked, and may be told not to answer.
struct Asked {
    bytes: Mutex<Vec<u8>>,
    asked: AtomicUsize,
    fails: Option<Errno>,
}

impl Asked {
    fn new(bytes: Vec<u8>, fails: Option<Errno>) -> Arc<Self> {
        Arc::new(Self { bytes: Mutex::new(bytes), asked: AtomicUsize::new(0), fails })
    }
}

impl RemoteMemory for Asked {
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Errno> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        bytes.copy_from_slice(&self.bytes.lock().unwrap()[size(offset)..][..bytes.len()]);
        self.fails.map_or(Ok(()), Err)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.bytes.lock().unwrap()[size(offset)..][..bytes.len()].copy_from_slice(bytes);
        self.fails.map_or(Ok(()), Err)
    }
}

fn read(held: &ClientHeld, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    held.read(offset, &mut bytes).unwrap();
    bytes
}

/// Counts how often a task is woken.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn poll(unmapping: &mut ClientUnmapping, woken: &Arc<Woken>) -> Poll<u64> {
    let waker = Waker::from(Arc::clone(woken));
    Pin::new(unmapping).poll(&mut Context::from_waker(&waker))
}

#[test]
fn bytes_over_several_regions_are_read_written_and_found_in_order() {
    let client = Client::new();
    let (first, _) = Bytes::new(0..16);
    let (third, _) = Bytes::new(32..48);
    let asked = Asked::new((16..32).collect(), None);
    client.insert(at(0x100), BOTH, Arc::<Bytes>::clone(&first)).unwrap();
    client.insert_remote(at(0x110), 16, BOTH, Arc::<Asked>::clone(&asked)).unwrap();
    client.insert(at(0x120), BOTH, Arc::<Bytes>::clone(&third)).unwrap();
    for start in 0..48 {
        for len in 1..=48 - start {
            let held = client.hold(at(0x100 + start), len, READ).unwrap();
            assert_eq!((held.range(), held.access()), (span(0x100 + start, len), READ));
            let expected: Vec<u8> =
                (start..start + len).map(|byte| byte.try_into().unwrap()).collect();
            assert_eq!(read(&held, 0, size(len)), expected);
            let half = len / 2;
            assert_eq!(read(&held, half, size(len - half)), expected[size(half)..]);
        }
    }
    let held = client.hold(at(0x10c), 24, BOTH).unwrap();
    held.write(2, &[0x80; 20]).unwrap();
    let written: Vec<u8> = [12, 13].into_iter().chain([0x80; 20]).chain([34, 35]).collect();
    assert_eq!(read(&held, 0, 24), written);
    assert_eq!(asked.bytes.lock().unwrap()[..], [0x80; 16]);
    // Where it is, as far as it is here.
    let part = span(0x110, 16);
    assert_eq!(held.slices(0, 24).unwrap_err(), HeldError::NotMapped { part });
    let slices: Vec<_> = held.slices(1, 3).unwrap().collect();
    assert_eq!(slices, [first.slice().part(13, 3).unwrap()]);
    assert_eq!(held.slices(20, 4).unwrap().next(), third.slice().part(0, 4));
    assert_eq!(held.slices(24, 0).unwrap().count(), 0);
}

#[test]
fn slices_are_the_bytes_themselves() {
    let client = Client::new();
    for (start, bytes) in [(0, 0..8_u8), (8, 8..16)] {
        client.insert(at(start), BOTH, Bytes::new(bytes).0).unwrap();
    }
    let held = client.hold(at(3), 10, BOTH).unwrap();
    let mut found = Vec::new();
    for slice in held.slices(1, 8).unwrap() {
        for offset in 0..slice.len() {
            // SAFETY: the slice has so many bytes, which are held, for reads and writes.
            let byte = unsafe { AtomicU8::from_ptr(slice.as_ptr().wrapping_add(offset)) };
            found.push(byte.fetch_add(1, Ordering::Relaxed));
        }
    }
    assert_eq!(found, [4, 5, 6, 7, 8, 9, 10, 11]);
    assert_eq!(read(&held, 0, 10), [3, 5, 6, 7, 8, 9, 10, 11, 12, 12]);
}

#[test]
fn what_is_outside_or_not_permitted_is_refused_and_changes_nothing() {
    let client = Client::new();
    client.insert(at(0), BOTH, Bytes::new([7; 8]).0).unwrap();
    client.insert(at(8), READ, Bytes::new([9; 8]).0).unwrap();
    let range = span(4, 8);
    let refused = client.hold(at(4), 8, BOTH).unwrap_err();
    let (region, access) = (span(8, 8), READ);
    assert_eq!(refused, RegionError::Access { range, wanted: BOTH, region, access });
    let held = client.hold(at(4), 8, READ).unwrap();
    let refused = held.write(0, &[1]).unwrap_err();
    assert_eq!(refused, HeldError::Access { held: range, wanted: WRITE, access: READ });
    assert_eq!(refused.errno(), Errno::EACCES);
    for (offset, len) in [(0, 9), (8, 1), (7, 2), (u64::MAX, 1), (1, u64::MAX)] {
        let outside = HeldError::Outside { offset, len, held: range };
        assert_eq!(held.slices(offset, len).unwrap_err(), outside);
        assert_eq!(outside.errno(), Errno::EFAULT);
        if let Ok(len) = usize::try_from(len.min(64)) {
            let mut bytes = vec![0xee; len];
            assert!(matches!(held.read(offset, &mut bytes), Err(HeldError::Outside { .. })));
            assert_eq!(bytes, vec![0xee; len]);
        }
    }
    let writes = client.hold(at(0), 4, WRITE).unwrap();
    let refused = writes.read(0, &mut [0]).unwrap_err();
    assert_eq!(refused, HeldError::Access { held: span(0, 4), wanted: READ, access: WRITE });
    assert_eq!(read(&held, 0, 8), [7, 7, 7, 7, 9, 9, 9, 9]);
}

#[test]
fn a_client_that_does_not_answer_is_named_with_what_was_asked() {
    let client = Client::new();
    client.insert(at(0), BOTH, Bytes::new([1; 8]).0).unwrap();
    let asked = Asked::new(vec![2; 8], Some(Errno::EREMOTEIO));
    client.insert_remote(at(8), 8, BOTH, asked).unwrap();
    let held = client.hold(at(2), 10, BOTH).unwrap();
    let error = held.read(0, &mut [0; 10]).unwrap_err();
    assert_eq!(error, HeldError::Remote { part: span(8, 4), errno: Errno::EREMOTEIO });
    assert_eq!(error.to_string(), "the client does not give access to 0x8..=0xb: EREMOTEIO");
    assert_eq!(held.write(7, &[5; 2]).unwrap_err().errno(), Errno::EREMOTEIO);
    assert_eq!(read(&held, 0, 6), [1; 6], "what is mapped is there");
}

#[test]
fn an_unmap_ends_when_the_last_holder_is_gone_and_wakes_who_waits() {
    let client = Client::new();
    let mapped = [0, 8, 16].map(|start| {
        let (bytes, is_mapped) = Bytes::new([0; 8]);
        client.insert(at(start), BOTH, bytes).unwrap();
        is_mapped
    });
    let is_mapped = || [0, 1, 2].map(|at| mapped[at].load(Ordering::SeqCst));
    let low = client.hold(at(0), 4, READ).unwrap();
    let both = client.hold(at(4), 8, READ).unwrap();
    let mut unmapping = client.unmap(at(0), 24).unwrap();
    assert_eq!((unmapping.bytes(), unmapping.regions(), client.count()), (24, 3, 0));
    assert_eq!(is_mapped(), [true, true, false], "nobody held the third");
    // Nobody gets any of it.
    let hole = client.hold(at(0), 1, READ).unwrap_err();
    assert_eq!(hole, RegionError::Hole { range: span(0, 1), hole: span(0, 1) });
    // The client may use the addresses anew meanwhile.
    client.insert(at(4), BOTH, Bytes::new([3; 8]).0).unwrap();
    assert_eq!(read(&client.hold(at(4), 1, READ).unwrap(), 0, 1), [3]);
    assert_eq!(read(&both, 0, 8), [0; 8]);

    let woken = Arc::new(Woken::default());
    assert_eq!(poll(&mut unmapping, &woken), Poll::Pending);
    drop(low);
    assert_eq!((woken.0.load(Ordering::SeqCst), unmapping.held()), (0, Some(span(0, 8))));
    drop(both);
    assert_eq!(woken.0.load(Ordering::SeqCst), 1);
    assert_eq!(is_mapped(), [false; 3], "let go before anybody is told");
    assert_eq!(poll(&mut unmapping, &woken), Poll::Ready(24));
    assert!(unmapping.is_done());
}

/// Memory that notes how often somebody was woken before it went.
struct Noting {
    byte: AtomicU8,
    woken: Arc<Woken>,
    noted: Arc<AtomicUsize>,
}

impl Drop for Noting {
    fn drop(&mut self) {
        self.noted.store(self.woken.0.load(Ordering::SeqCst), Ordering::SeqCst);
    }
}

// SAFETY: the byte stays where it is while the value is in its `Arc`, and nobody accesses it.
unsafe impl HostMemory for Noting {
    fn slice(&self) -> HostSlice<'_> {
        HostSlice::new(NonNull::from(&self.byte).cast(), 1)
    }

    fn read(&self, _offset: u64, _bytes: &mut [u8]) -> Result<(), Outside> {
        Ok(())
    }

    fn write(&self, _offset: u64, _bytes: &[u8]) -> Result<(), Outside> {
        Ok(())
    }
}

#[test]
fn memory_is_let_go_before_who_waits_for_it_is_woken() {
    let (client, woken) = (Client::new(), Arc::new(Woken::default()));
    let noted = Arc::new(AtomicUsize::new(usize::MAX));
    let memory = Noting { byte: 0.into(), woken: Arc::clone(&woken), noted: Arc::clone(&noted) };
    client.insert(at(0), BOTH, Arc::new(memory)).unwrap();
    let held = client.hold(at(0), 1, READ).unwrap();
    let mut unmapping = client.unmap_all();
    assert!(poll(&mut unmapping, &woken).is_pending());
    assert_eq!(noted.load(Ordering::SeqCst), usize::MAX, "it is there");
    drop(held);
    assert_eq!((noted.load(Ordering::SeqCst), woken.0.load(Ordering::SeqCst)), (0, 1));
}

#[test]
fn what_is_forgotten_keeps_its_memory_and_the_unmap_waits_for_ever() {
    let client = Client::new();
    let (bytes, is_mapped) = Bytes::new([0; 8]);
    client.insert(at(0), BOTH, bytes).unwrap();
    mem::forget(client.hold(at(2), 1, READ).unwrap());
    let mut unmapping = client.unmap_all();
    let woken = Arc::new(Woken::default());
    for _ in 0..3 {
        assert_eq!(poll(&mut unmapping, &woken), Poll::Pending);
    }
    assert_eq!(unmapping.held(), Some(span(0, 8)));
    drop((unmapping, client));
    assert!(is_mapped.load(Ordering::SeqCst));
    assert_eq!(woken.0.load(Ordering::SeqCst), 0);
}

#[test]
fn regions_that_nobody_waits_for_go_with_their_holders() {
    let client = Client::new();
    let (bytes, is_mapped) = Bytes::new([5; 8]);
    client.insert(at(0), BOTH, bytes).unwrap();
    let held = client.hold(at(2), 3, READ).unwrap();
    drop(client.unmap_all());
    drop(client);
    assert_eq!(read(&held, 0, 3), [5; 3], "it outlives the regions");
    drop(held);
    assert!(!is_mapped.load(Ordering::SeqCst));
}

#[test]
fn an_unmap_of_very_many_regions_needs_no_stack_for_them() {
    let client = Client::new();
    let (bytes, _) = Bytes::new([0; 1]);
    for start in 0..100_000 {
        client.insert(at(start), BOTH, Arc::<Bytes>::clone(&bytes)).unwrap();
    }
    let held = client.hold(at(99_999), 1, READ).unwrap();
    let mut unmapping = client.unmap_all();
    assert_eq!((unmapping.held(), Arc::strong_count(&bytes)), (Some(span(99_999, 1)), 2));
    drop(held);
    assert!(unmapping.is_done());
    for start in 0..100_000 {
        client.insert(at(start), BOTH, Arc::<Bytes>::clone(&bytes)).unwrap();
    }
    drop(client.unmap_all());
    assert_eq!(Arc::strong_count(&bytes), 1);
}

/// A region as the model has it. Whatever has some of it has a count of it, as the memory has.
struct ModelRegion {
    range: Span<Iova>,
    access: Prot,
    bytes: RefCell<Vec<u8>>,
    is_mapped: Arc<AtomicBool>,
}

/// Bytes of a region of the model.
type ModelPart = (Rc<ModelRegion>, Range<usize>);

#[derive(Default)]
struct World {
    client: Client,
    /// By first address.
    regions: BTreeMap<u64, Rc<ModelRegion>>,
    held: Vec<(ClientHeld, Vec<ModelPart>)>,
    unmappings: Vec<(ClientUnmapping, Vec<Rc<ModelRegion>>)>,
    refused: usize,
    waited: usize,
}

/// The client's addresses that are tried.
const SPACE: u64 = 96;

impl World {
    /// The regions that have some of a range, the lowest first.
    fn overlapping(&self, range: Span<Iova>) -> Vec<Rc<ModelRegion>> {
        let overlaps = |region: &&Rc<ModelRegion>| {
            region.range.start() <= range.last() && range.start() <= region.range.last()
        };
        self.regions.values().filter(overlaps).cloned().collect()
    }

    fn insert(&mut self, rng: &mut Rng, range: Span<Iova>, access: Prot) {
        let bytes = rng.bytes(size(range.len()));
        let (memory, is_mapped) = Bytes::new(bytes.iter().copied());
        let inserted = self.client.insert(range.start(), access, memory);
        if let Some(existing) = self.overlapping(range).first() {
            let existing = existing.range;
            assert_eq!(inserted, Err(RegionError::Overlaps { range, existing }));
            assert!(!is_mapped.load(Ordering::SeqCst), "what is refused is not kept");
            self.refused += 1;
            return;
        }
        assert_eq!(inserted, Ok(range));
        let region = ModelRegion { range, access, bytes: RefCell::new(bytes), is_mapped };
        self.regions.insert(range.start().get(), Rc::new(region));
    }

    fn unmap(&mut self, range: Span<Iova>) {
        let result = self.client.unmap(range.start(), range.len());
        let covered = self.overlapping(range);
        let is_cut = |region: &&Rc<ModelRegion>| {
            region.range.start() < range.start() || region.range.last() > range.last()
        };
        if let Some(region) = covered.iter().find(is_cut).map(|region| region.range) {
            assert_eq!(result.unwrap_err(), RegionError::Cuts { range, region });
            self.refused += 1;
            return;
        }
        let unmapping = result.unwrap();
        let bytes: u64 = covered.iter().map(|region| region.range.len()).sum();
        assert_eq!((unmapping.bytes(), unmapping.regions()), (bytes, covered.len()));
        self.regions.retain(|_, region| !covered.iter().any(|gone| Rc::ptr_eq(gone, region)));
        self.unmappings.push((unmapping, covered));
    }

    fn hold(&mut self, range: Span<Iova>, access: Prot) {
        let result = self.client.hold(range.start(), range.len(), access);
        let (mut next, mut parts) = (range.start().get(), Vec::new());
        let last = range.last().get();
        let mut expected = Ok(());
        for region in self.overlapping(range) {
            let (first, end) = (region.range.start().get(), region.range.last().get());
            if first > next {
                break;
            }
            if !region.access.contains(access) {
                let (region, permitted) = (region.range, region.access);
                expected =
                    Err(RegionError::Access { range, wanted: access, region, access: permitted });
                break;
            }
            let to = end.min(last) + 1;
            parts.push((region, size(next - first)..size(to - first)));
            next = to;
        }
        if expected.is_ok() && next <= last {
            let behind = self.regions.range(next..=last).next().map_or(last + 1, |(at, _)| *at);
            let hole = span(next, behind - next);
            expected = Err(RegionError::Hole { range, hole });
        }
        match (result, expected) {
            (Ok(held), Ok(())) => self.held.push((held, parts)),
            (result, expected) => {
                assert_eq!(result.map(drop), expected);
                self.refused += 1;
            }
        }
    }

    fn write(&mut self, rng: &mut Rng, index: usize) {
        let Some((held, parts)) = self.held.get(index) else { return };
        let bytes = rng.bytes(size(held.len()));
        if !held.access().contains(WRITE) {
            assert!(matches!(held.write(0, &bytes), Err(HeldError::Access { .. })));
            return;
        }
        held.write(0, &bytes).unwrap();
        let mut rest = &bytes[..];
        for (region, part) in parts {
            let (here, behind) = rest.split_at(part.len());
            region.bytes.borrow_mut()[part.clone()].copy_from_slice(here);
            rest = behind;
        }
    }

    /// Everything that is held is as the model has it, and everything that nobody has is gone.
    fn check(&mut self) {
        for (held, parts) in self.held.iter().filter(|(held, _)| held.access().contains(READ)) {
            let bytes = |(region, part): &ModelPart| region.bytes.borrow()[part.clone()].to_vec();
            let expected: Vec<u8> = parts.iter().flat_map(bytes).collect();
            assert_eq!(read(held, 0, size(held.len())), expected);
        }
        for (unmapping, regions) in &mut self.unmappings {
            let is_held = |region: &&Rc<ModelRegion>| Rc::strong_count(region) > 1;
            let expected = regions.iter().find(is_held).map(|region| region.range);
            assert_eq!(unmapping.held(), expected);
            self.waited += usize::from(expected.is_some());
            for region in regions {
                let is_held = Rc::strong_count(region) > 1;
                assert_eq!(region.is_mapped.load(Ordering::SeqCst), is_held);
            }
        }
        self.unmappings.retain_mut(|(unmapping, _)| !unmapping.is_done());
        let is_mapped = |region: &Rc<ModelRegion>| region.is_mapped.load(Ordering::SeqCst);
        assert!(self.regions.values().all(is_mapped));
        assert_eq!(self.client.count(), self.regions.len());
    }
}

#[test]
fn random_maps_unmaps_and_holds_are_as_a_model_has_them() {
    let (mut refused, mut waited) = (0, 0);
    for seed in 0..64 {
        let (mut rng, mut world) = (Rng::new(seed), World::default());
        for _ in 0..400 {
            let range = span(rng.below(SPACE), 1 + rng.below(24));
            let access = [READ, WRITE, BOTH, BOTH][size(rng.below(4))];
            let index = size(rng.below(12));
            match rng.below(8) {
                0..=2 => world.insert(&mut rng, range, access),
                3 => world.unmap(span(range.start().get(), range.len() * 3)),
                4 | 5 => world.hold(range, access),
                6 => world.write(&mut rng, index),
                _ if index < world.held.len() => drop(world.held.swap_remove(index)),
                _ => {}
            }
            world.check();
        }
        world.held.clear();
        world.check();
        assert!(world.unmappings.is_empty());
        refused += world.refused;
        waited += world.waited;
    }
    assert!(refused > 5000 && waited > 1000, "{refused} {waited}");
}

#[test]
fn holders_on_other_threads_never_reach_memory_that_was_unmapped() {
    const HOLDERS: usize = 3;
    let client = Client::new();
    let (ended, begin) = (AtomicUsize::new(0), Barrier::new(HOLDERS + 1));
    thread::scope(|scope| {
        for lane in 0..HOLDERS {
            let (client, ended, begin) = (&client, &ended, &begin);
            scope.spawn(move || {
                let mut rng = Rng::new(lane.try_into().unwrap());
                begin.wait();
                // `Bytes` asserts that it is mapped whenever it is reached.
                for _ in 0..4000 {
                    let (start, len) = (rng.below(64), 1 + rng.below(24));
                    let Ok(held) = client.hold(at(start), len, BOTH) else { continue };
                    let bytes = vec![held.range().start().get().try_into().unwrap(); size(len)];
                    held.write(0, &bytes).unwrap();
                    assert_eq!(read(&held, 0, size(len)).len(), size(len));
                    if rng.below(4) == 0 {
                        thread::yield_now();
                    }
                }
                ended.fetch_add(1, Ordering::SeqCst);
            });
        }
        begin.wait();
        loop {
            let flags: Vec<_> = (0..64)
                .step_by(16)
                .map(|start| {
                    let (bytes, is_mapped) = Bytes::new([0; 16]);
                    client.insert(at(start), BOTH, bytes).unwrap();
                    is_mapped
                })
                .collect();
            thread::yield_now();
            let mut unmapping = client.unmap(at(0), 64).unwrap();
            while !unmapping.is_done() {
                thread::yield_now();
            }
            assert!(flags.iter().all(|is_mapped| !is_mapped.load(Ordering::SeqCst)));
            if ended.load(Ordering::SeqCst) == HOLDERS {
                break;
            }
        }
    });
}
