//! The pinner for kernels and VMMs, which follows page tables by leaf: judged by the simulator's
//! own pinner, its books, and walks of what was mapped.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use dmaspan::container::{Attach, Error, Interrupts};
use dmaspan::follow::{FOLLOW_TRIES, FaultIn, LeafError, LeafPinner, UserLeaf, UserTables};
use dmaspan::io_pgtable::Arena;
use dmaspan::pin::{Dirty, Kind, PinError, Pinner, SpanSink, Stopped};
use dmaspan::{
    Account, Container, Errno, HostAddr, Iova, PhysAddr, Promise, Prot, Span, UserAddr, UserRange,
};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{
    FaultError, MapOptions, Population, Rights, SimMemory, SimPinner, SimSpace, SimTables,
};
use dmaspan_sim::rng::Rng;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use dmaspan_sim::walker::{Access, Walker};

use crate::common::{PROT, faulty_domain};

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;
/// Where users have their memory, and where BARs are: beyond all memory.
const USER: u64 = 1 << 44;
const BAR: u64 = 1 << 42;

type Following = LeafPinner<SimTables>;

struct World {
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    tables: Arena,
    iotlb: Iotlb<ArmLpaeS1Walker, Arena>,
    account: Arc<Account>,
    container: Arc<Container<Following, parking_lot::RawMutex>>,
}

fn world() -> World {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 64 << 20, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let (domain, tables, iotlb) = faulty_domain::<12>(&Faults::none());
    let account = Account::new(64 << 20);
    let pinner = LeafPinner::new(SimTables::new(Arc::clone(&memory)));
    let container = Container::new(pinner, Arc::clone(&account));
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    World { memory, space, tables, iotlb, account, container: Arc::new(container) }
}

impl World {
    fn leads_to(&self, iova: u64) -> Option<u64> {
        let found = self.iotlb.walker().walk(&self.tables, Iova::new(iova), Access::Write);
        found.ok().map(|leaf| leaf.paddr.get())
    }

    fn pinner(&self) -> &Following {
        self.container.pinner()
    }
}

fn span(paddr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(paddr), len).unwrap()
}

fn user(start: u64, len: u64) -> UserRange {
    UserRange::from_len(UserAddr::new(start), len).unwrap()
}

/// Takes spans with their kinds, joined, as many as `room` has.
struct Taken {
    spans: Vec<(Span, Kind)>,
    room: usize,
}

impl Taken {
    fn new(room: usize) -> Self {
        Self { spans: Vec::new(), room }
    }

    fn of(&self, kind: Kind) -> Vec<Span> {
        let spans = self.spans.iter();
        spans.filter(|(_, of)| *of == kind).map(|(span, _)| *span).collect()
    }
}

impl SpanSink for Taken {
    fn push(&mut self, span: Span, kind: Kind) -> Result<(), Stopped> {
        if let Some((last, of)) = self.spans.last_mut()
            && *of == kind
            && let Some(joined) = last.join(span)
        {
            *last = joined;
            return Ok(());
        }
        if self.spans.len() == self.room {
            return Err(Stopped);
        }
        self.spans.push((span, kind));
        Ok(())
    }
}

/// Unpins what a sink took and ends the pin.
fn end<P: Pinner<Address = PhysAddr>>(pinner: &P, mut pin: P::Pin, taken: &Taken) {
    for kind in [Kind::Memory, Kind::Mmio] {
        // SAFETY: no device reaches the spans.
        let promise = unsafe { Promise::new() };
        pinner.unpin(promise, &mut pin, &taken.of(kind), kind, Dirty::Clean);
    }
    // SAFETY: as above.
    pinner.release(unsafe { Promise::new() }, pin);
}

#[test]
fn a_bar_takes_a_look_up_a_leaf_whatever_its_size() {
    for (gib, leaf_lg2, lookups) in [(32u64, 30, 32), (32, 21, 16384), (512, 30, 512)] {
        let world = world();
        let options = MapOptions { max_leaf_lg2: leaf_lg2, ..MapOptions::default() };
        let bar = span(BAR, gib * G1);
        let bar = world.space.map_device_with(UserAddr::new(USER), bar, options).unwrap();
        let before = world.pinner().tables().lookups();
        let mapped = world.container.map(&world.space, bar, Iova::new(1 << 40), PROT).unwrap();
        assert_eq!(world.pinner().tables().lookups() - before, lookups, "{gib} GiB");
        assert_eq!((mapped.spans, mapped.mmio, mapped.memory), (1, gib * G1, 0));
        assert_eq!(world.account.used(), 0, "device memory is not charged");
        assert_eq!(world.container.census().sizes().collect::<Vec<_>>(), [(30, gib)]);
        assert_eq!(world.container.unmap_all().unwrap(), gib * G1);
        assert_eq!((world.tables.tables(), world.memory.violations().len()), (1, 0));
    }
}

/// Memory in pieces of any size and BARs, one behind the other, some lazily.
fn fill(world: &World, rng: &mut Rng) -> UserRange {
    let mut at = USER;
    for _ in 0..12 {
        let population = if rng.below(2) == 0 { Population::Lazy } else { Population::Eager };
        let options = MapOptions { population, ..MapOptions::default() };
        let pages = 1 + rng.below(700);
        if rng.below(3) == 0 {
            let bar = span(BAR + (at & (G1 - 1)), pages * PAGE);
            world.space.map_device_with(UserAddr::new(at), bar, options).unwrap();
        } else {
            let spans = match rng.below(2) {
                0 => world.memory.allocate_scattered(pages * PAGE, rng.next()).unwrap(),
                _ => vec![world.memory.allocate(pages * PAGE, 12).unwrap()],
            };
            world.space.map_with(UserAddr::new(at), &spans, options).unwrap();
        }
        at += pages * PAGE;
    }
    user(USER, at - USER)
}

#[test]
fn spans_and_pins_are_those_of_a_pinner_that_was_written_for_the_simulator() {
    for seed in 0..12 {
        let (world, mut rng) = (world(), Rng::new(seed));
        let whole = fill(&world, &mut rng);
        let judge = SimPinner::new(Arc::clone(&world.memory));
        let pages = whole.checked_len().unwrap() / PAGE;
        for _ in 0..20 {
            let first = rng.below(pages);
            let part = user(USER + first * PAGE, (1 + rng.below(pages - first)) * PAGE);
            let (mut expected, mut found) = (Taken::new(usize::MAX), Taken::new(usize::MAX));
            let pin = judge.pin(&world.space, part, PROT, &mut expected).unwrap();
            let pinned = world.memory.pinned_frames();
            end(&judge, pin, &expected);
            let pin = world.pinner().pin(&world.space, part, PROT, &mut found).unwrap();
            assert_eq!(found.spans, expected.spans, "{part}");
            assert_eq!(world.memory.pinned_frames(), pinned);
            let memory: u64 = found.of(Kind::Memory).iter().map(|span| span.len()).sum();
            assert_eq!((pin.user_range(), pin.pinned()), (part, memory));
            end(world.pinner(), pin, &found);
            assert_eq!((world.memory.pinned_frames(), world.memory.violations()), (0, vec![]));
        }
        // And what a container makes of them.
        let mapped = world.container.map(&world.space, whole, Iova::new(USER), PROT).unwrap();
        assert_eq!(world.account.used(), mapped.memory);
        for page in 0..pages {
            let at = USER + page * PAGE;
            let frame = world.space.frame_at(UserAddr::new(at)).map(|(paddr, ..)| paddr.get());
            assert_eq!(world.leads_to(at), frame, "page {page}");
        }
        assert_eq!(world.container.unmap_all().unwrap(), pages * PAGE);
        assert_eq!((world.memory.pinned_frames(), world.account.used()), (0, 0));
        assert_eq!(world.memory.violations(), []);
    }
}

#[test]
fn a_sink_that_stops_anywhere_leaves_pinned_what_it_took_and_no_more() {
    let (world, mut rng) = (world(), Rng::new(7));
    let whole = fill(&world, &mut rng);
    let mut all = Taken::new(usize::MAX);
    let pin = world.pinner().pin(&world.space, whole, PROT, &mut all).unwrap();
    end(world.pinner(), pin, &all);
    for room in [0, 1, 2, 3, all.spans.len() / 2, all.spans.len() - 1] {
        let mut taken = Taken::new(room);
        let failed = world.pinner().pin(&world.space, whole, PROT, &mut taken).unwrap_err();
        assert_eq!((failed.range, &failed.error), (whole, &PinError::Stopped));
        assert_eq!(taken.spans, all.spans[..room]);
        let memory: u64 = taken.of(Kind::Memory).iter().map(|span| span.len()).sum();
        assert_eq!(world.memory.pinned_frames() * PAGE, memory);
        assert_eq!(failed.pin.is_some(), room > 0);
        assert_eq!(failed.to_string().contains("stays pinned"), room > 0, "{failed}");
        if let Some(pin) = failed.pin {
            end(world.pinner(), pin, &taken);
        }
        assert_eq!((world.memory.pinned_frames(), world.memory.violations()), (0, vec![]));
    }
}

/// The error of a map, which leaves nothing.
fn refused(world: &World, range: UserRange, prot: Prot) -> LeafError<FaultError> {
    let error = world.container.map(&world.space, range, Iova::new(0), prot).unwrap_err();
    assert_eq!((world.container.mappings(), world.tables.tables()), (0, 1));
    assert_eq!((world.account.used(), world.memory.pinned_frames()), (0, 0));
    match error {
        Error::Pin { source, .. } => source,
        error => panic!("{error}"),
    }
}

#[test]
fn what_cannot_be_followed_is_named_by_its_address_and_leaves_nothing() {
    let world = world();
    let frames = world.memory.allocate(8 * PAGE, 12).unwrap();
    let whole = world.space.map(UserAddr::new(USER), &[frames]).unwrap();
    let at = UserAddr::new(USER + 8 * PAGE);
    let range = user(USER, 9 * PAGE);
    let hole = LeafError::Hole { range, at };
    assert_eq!((refused(&world, range, PROT), hole.errno()), (hole, Errno::EFAULT));

    let bar = span(BAR, M2);
    world.space.map_device(at, bar, Rights::ReadOnly).unwrap();
    let both = user(USER, 8 * PAGE + M2);
    let (wanted, permitted) = (PROT & Prot::READ_WRITE, Prot::READ);
    let denied = LeafError::Access { range: both, at, wanted, permitted };
    assert_eq!(refused(&world, both, PROT), denied);
    world.container.map(&world.space, both, Iova::new(0), Prot::READ).unwrap();
    world.container.unmap_all().unwrap();

    // The tables' own reason.
    world.space.zap(user(at.get(), M2));
    let failed = refused(&world, both, Prot::READ);
    let error = FaultError::Revoked { at };
    assert_eq!(failed, LeafError::Tables { range: both, at, error, errno: Errno::EFAULT });
    assert_eq!(failed.to_string(), format!("{at} of {both}: what was mapped at {at} was revoked"));

    // Not of whole frames: asked directly, as a container has granules of its own.
    for range in [user(USER + 1, PAGE), user(USER, PAGE - 1), user(USER + 8, 8)] {
        let failed = world.pinner().pin(&world.space, range, PROT, &mut Taken::new(9)).unwrap_err();
        let misaligned = LeafError::Misaligned { range, frame: PAGE };
        assert_eq!(
            (failed.error, misaligned.errno()),
            (PinError::Failed(misaligned), Errno::EINVAL)
        );
    }
    // A space of another memory.
    let other = Arc::new(SimMemory::new(PhysAddr::new(1 << 41), 1 << 20, 12).unwrap());
    let frames = other.allocate(PAGE, 12).unwrap();
    let foreign = Arc::new(SimSpace::new(other));
    let range = foreign.map(UserAddr::new(USER), &[frames]).unwrap();
    let failed = world.pinner().pin(&foreign, range, PROT, &mut Taken::new(9)).unwrap_err();
    let at = range.start();
    assert_eq!(failed.error, PinError::Failed(LeafError::Hole { range, at }));
    // What is there is still pinned and mapped.
    world.container.map(&world.space, whole, Iova::new(0), PROT).unwrap();
    world.container.unmap_all().unwrap();
    assert_eq!(world.memory.violations(), []);
}

#[test]
fn faults_are_tried_again_up_to_the_bound_and_not_once_more() {
    let world = world();
    let options = MapOptions { population: Population::Lazy, ..MapOptions::default() };
    let bar = span(BAR, 4 * M2);
    let bar = world.space.map_device_with(UserAddr::new(USER), bar, options).unwrap();
    world.space.inject_transient_faults(FOLLOW_TRIES);
    let (at, tries) = (bar.start(), FOLLOW_TRIES);
    assert_eq!(refused(&world, bar, PROT), LeafError::Unsettled { range: bar, at, tries });
    assert_eq!(world.space.faults(), u64::from(FOLLOW_TRIES));
    // The last look-up but one finds nothing, its fault works, and the last finds it.
    world.space.inject_transient_faults(FOLLOW_TRIES - 2);
    world.container.map(&world.space, bar, Iova::new(0), PROT).unwrap();
    assert_eq!(world.leads_to(0), Some(BAR));
}

/// Memory that moves the first times that it is pinned, by addresses of this process.
struct Moving {
    moves: AtomicU32,
    pinned: AtomicU64,
}

// SAFETY: the frames are of no memory, and no device of these tests touches them.
unsafe impl UserTables for Moving {
    type Space = ();
    type Address = HostAddr;
    type Error = Infallible;

    fn leaf(&self, (): &(), _at: UserAddr) -> Option<UserLeaf<HostAddr>> {
        let moved = u64::from(self.moves.load(Ordering::Relaxed)) * G1;
        // The whole space, less what would lead beyond the top.
        let user = UserRange::new(UserAddr::new(0), UserAddr::new(u64::MAX)).unwrap();
        let (start, kind, prot) = (HostAddr::new(moved), Kind::Memory, Prot::READ);
        Some(UserLeaf { user, start, kind, prot })
    }

    fn pin(
        &self,
        (): &(),
        _leaf: &UserLeaf<HostAddr>,
        _at: UserAddr,
        frames: Span<HostAddr>,
        _access: Prot,
    ) -> bool {
        let fewer = |moves: u32| moves.checked_sub(1);
        let moves = self.moves.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer);
        if moves.is_err() {
            self.pinned.fetch_add(frames.len(), Ordering::Relaxed);
        }
        moves.is_err()
    }

    fn unpin(&self, _: Promise<'_>, frames: Span<HostAddr>, _dirty: Dirty) {
        self.pinned.fetch_sub(frames.len(), Ordering::Relaxed);
    }

    fn fault_in(&self, (): &(), _at: UserAddr, _prot: Prot) -> Result<FaultIn, Infallible> {
        Ok(FaultIn::LookAgain)
    }

    fn space_id(&self, (): &()) -> u64 {
        0
    }

    fn read(&self, (): &(), _at: UserAddr, _bytes: &mut [u8]) -> Result<(), Infallible> {
        Ok(())
    }

    fn write(&self, (): &(), _at: UserAddr, _bytes: &[u8]) -> Result<(), Infallible> {
        Ok(())
    }

    fn errno(&self, error: &Infallible) -> Errno {
        match *error {}
    }
}

#[test]
fn memory_that_moves_between_look_up_and_pin_is_looked_up_again() {
    let pinner = LeafPinner::new(Moving { moves: 3.into(), pinned: 0.into() });
    let range = user(5 * PAGE, 7 * PAGE);
    let mut spans = Vec::new();
    let pin = pinner.pin(&(), range, Prot::READ, &mut spans).unwrap();
    let there = Span::new(HostAddr::new(5 * PAGE), 7 * PAGE).unwrap();
    assert_eq!((spans, pin.pinned()), (vec![there], 7 * PAGE), "where it is at last");
    drop(pin);
    // It never stays, and never permits writes.
    for (moves, prot) in [(u32::MAX, Prot::READ), (0, Prot::READ_WRITE)] {
        pinner.tables().moves.store(moves, Ordering::Relaxed);
        let failed = pinner.pin(&(), range, prot, &mut Vec::new()).unwrap_err();
        let (at, tries) = (range.start(), FOLLOW_TRIES);
        assert_eq!(failed.error, PinError::Failed(LeafError::Unsettled { range, at, tries }));
        assert!(failed.pin.is_none());
        assert_eq!(pinner.tables().pinned.load(Ordering::Relaxed), 7 * PAGE, "of the first pin");
    }
    // The whole space is 2^64 bytes, more than a span has: the last byte is one of its own.
    pinner.tables().moves.store(0, Ordering::Relaxed);
    let whole = UserRange::new(UserAddr::new(0), UserAddr::new(u64::MAX)).unwrap();
    let mut spans = Vec::new();
    let _ = pinner.pin(&(), whole, Prot::READ, &mut spans).unwrap();
    let lens: Vec<u64> = spans.iter().map(|span| span.len()).collect();
    assert_eq!(lens, [u64::MAX, 1]);
}

#[test]
fn device_memory_is_out_of_reach_before_it_goes_however_maps_and_revocations_meet() {
    let world = world();
    let (container, is_over) = (Arc::clone(&world.container), AtomicBool::new(false));
    let weak = Arc::downgrade(&world.space);
    // The listener is called when look-ups find the range no more, and before it is gone.
    world.space.on_zap(Box::new(move |zapped| {
        let Some(space) = weak.upgrade() else { return };
        while let Err(error) = container.revoke(&space, zapped) {
            assert!(matches!(error, Error::Busy { .. } | Error::Changing), "{error}");
            std::thread::yield_now();
        }
    }));
    let len = 8 * PAGE;
    let (range, bar) = (user(USER, len), span(BAR, len));
    let (tries, mapped, failed) = (AtomicU64::new(0), AtomicU32::new(0), AtomicU32::new(0));
    std::thread::scope(|scope| {
        for lane in 0..2u64 {
            let (world, is_over, mapped, failed) = (&world, &is_over, &mapped, &failed);
            let tries = &tries;
            scope.spawn(move || {
                let iova = Iova::new(lane * G1);
                while !is_over.load(Ordering::Relaxed) {
                    tries.fetch_add(1, Ordering::Relaxed);
                    match world.container.map(&world.space, range, iova, PROT) {
                        Ok(_) => {
                            mapped.fetch_add(1, Ordering::Relaxed);
                            while world.container.unmap_all().is_err() {
                                std::thread::yield_now();
                            }
                        }
                        Err(Error::Pin { .. }) => {
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(Error::Busy { .. } | Error::Changing | Error::Exists { .. }) => {
                            std::thread::yield_now();
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        for _ in 0..100 {
            world.space.map_device(range.start(), bar, Rights::ReadWrite).unwrap();
            // However busy the machine is, a thread begins to map what is to go.
            let before = tries.load(Ordering::Relaxed);
            while tries.load(Ordering::Relaxed) == before {
                std::thread::yield_now();
            }
            world.space.zap(range);
            // It is gone: nothing leads there.
            for iova in [0, G1] {
                assert_eq!(world.leads_to(iova), None);
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert!(mapped.load(Ordering::Relaxed) + failed.load(Ordering::Relaxed) > 0);
    while world.container.unmap_all().is_err() {}
    assert_eq!((world.account.used(), world.memory.violations()), (0, vec![]));
}
