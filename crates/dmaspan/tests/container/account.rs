//! Accounts: what is charged is what is pinned, counted as the owner's account says.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use dmaspan::account::{Charge, Counting, OverLimit};
use dmaspan::container::{Attach, Error, Interrupts, MapRequest};
use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink, Stopped};
use dmaspan::{
    Account, Container, DmaSpace, Errno, Iova, IovaRange, PhysAddr, Promise, Prot, Span, UserAddr,
    UserRange,
};
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::memory::{Holes, SimMemory, SimPin, SimPinner, SimSpace};
use proptest::prelude::*;

use crate::common::{PROT, as_inner, faulty_domain, range};

const ALL: [Counting; 3] = [Counting::Ranges, Counting::Mappings, Counting::Frames];

#[test]
fn a_refused_charge_changes_nothing_and_names_the_limit() {
    let account = Account::new(10);
    let _held = account.charge(7).unwrap();
    let error = account.charge(4).unwrap_err();
    assert_eq!(error, OverLimit { asked: 4, used: 7, limit: 10 });
    assert_eq!(error.errno(), Errno::ENOMEM);
    assert_eq!(account.used(), 7);
    assert!(account.charge(3).is_ok());
}

#[test]
fn a_charge_near_the_top_of_the_numbers_does_not_wrap() {
    let account = Account::unlimited();
    let held = account.charge(u64::MAX).unwrap();
    assert!(account.charge(1).is_err());
    let byte = UserRange::point(UserAddr::new(6));
    assert!(account.charge_pin(&Pages(Knows::All), &0, byte).is_err());
    drop(held);
    let top = UserRange::new(UserAddr::new(1), UserAddr::new(u64::MAX)).unwrap();
    let pinner = Pages(Knows::Nothing);
    let held = account.charge_pin(&pinner, &u64::MAX, top).unwrap();
    assert_eq!((account.used(), held.bytes()), (u64::MAX, u64::MAX));
    assert!(account.charge_pin(&pinner, &0, byte).is_err());
    assert!(account.charge_pin(&pinner, &u64::MAX, byte).is_ok(), "charged already");
}

/// What a [`Pages`] knows.
#[derive(Clone, Copy)]
enum Knows {
    /// Which bytes are memory, and which frames.
    All,
    Nothing,
}

/// A pinner of nothing: every byte is a page.
struct Pages(Knows);

impl Pages {
    /// In the third space all is.
    fn is_memory(space: u64, at: u64) -> bool {
        space == 3 || !(space * 31 + at).is_multiple_of(5)
    }

    /// The parts of a range that are memory.
    fn memory(space: u64, user: UserRange) -> Vec<UserRange> {
        let mut parts: Vec<UserRange> = Vec::new();
        for at in user.start().get()..=user.last().get() {
            let byte = UserRange::point(UserAddr::new(at));
            match parts.last_mut().and_then(|last| Some((last.join(byte)?, last))) {
                _ if !Self::is_memory(space, at) => {}
                Some((joined, last)) => *last = joined,
                None => parts.push(byte),
            }
        }
        parts
    }

    fn frame(space: u64, at: u64) -> u64 {
        (space * 7 + at * 3) % 29
    }

    fn spans(space: u64, part: UserRange) -> Vec<Span> {
        let frame = |at| Span::new(PhysAddr::new(Self::frame(space, at)), 1).unwrap();
        (part.start().get()..=part.last().get()).map(frame).collect()
    }
}

// SAFETY: nothing is ever pinned.
unsafe impl Pinner for Pages {
    type Address = PhysAddr;
    type Space = u64;
    type Pin = ();
    type Error = Infallible;

    fn pin(
        &self,
        _space: &u64,
        range: UserRange,
        _prot: Prot,
        _sink: &mut dyn SpanSink,
    ) -> Result<(), PinFailed<(), Infallible>> {
        Err(PinFailed { range, error: PinError::Stopped, pin: None })
    }

    fn unpin(&self, _: Promise<'_>, (): &mut (), _spans: &[Span], _kind: Kind, _dirty: Dirty) {}

    fn release(&self, _: Promise<'_>, (): ()) {}

    fn space_id(&self, space: &u64) -> u64 {
        *space
    }

    fn chargeable(&self, space: &u64, user: UserRange) -> u64 {
        match self.0 {
            Knows::All => {
                let parts = Self::memory(*space, user);
                parts.iter().map(|part| part.checked_len().unwrap()).sum()
            }
            Knows::Nothing => user.checked_len().unwrap_or(u64::MAX),
        }
    }

    fn knows_frames(&self) -> bool {
        matches!(self.0, Knows::All)
    }

    fn read(&self, _space: &u64, _at: UserAddr, _bytes: &mut [u8]) -> Result<(), Infallible> {
        Ok(())
    }

    fn write(&self, _space: &u64, _at: UserAddr, _bytes: &[u8]) -> Result<(), Infallible> {
        Ok(())
    }

    fn errno(&self, error: &Infallible) -> Errno {
        match *error {}
    }
}

/// Charges a range as a container does.
fn charge_all(
    account: &Arc<Account>,
    pinner: &Pages,
    space: u64,
    user: UserRange,
) -> Result<Charge, OverLimit> {
    let mut charge = account.charge_pin(pinner, &space, user)?;
    for part in Pages::memory(space, user) {
        charge.found(&Pages::spans(space, part))?;
    }
    charge.settle(Pages::memory(space, user))?;
    Ok(charge)
}

/// What is held by an owner: a space and a range of it for each charge.
type Holding = Vec<(u64, UserRange)>;

fn modelled(counting: Counting, held: &Holding) -> u64 {
    let bytes = held.iter().flat_map(|&(space, user)| {
        let all = user.start().get()..=user.last().get();
        all.filter(move |&at| Pages::is_memory(space, at)).map(move |at| (space, at))
    });
    let count = match counting {
        Counting::Mappings => bytes.count(),
        Counting::Ranges => bytes.collect::<BTreeSet<_>>().len(),
        Counting::Frames => {
            bytes.map(|(space, at)| Pages::frame(space, at)).collect::<BTreeSet<_>>().len()
        }
    };
    u64::try_from(count).unwrap()
}

proptest! {
    #[test]
    fn owners_are_charged_as_a_model_that_knows_every_byte_says(
        limit in 4u64..60,
        operations in prop::collection::vec(
            (0usize..2, 0u64..3, 0u64..20, 0u64..12, any::<usize>()), 1..60
        )
    ) {
        for counting in ALL {
            let owner = || (Account::with_counting(limit, counting), Vec::new(), Vec::new());
            let mut owners: [(_, Vec<Charge>, Holding); 2] = [owner(), owner()];
            for &(owner, space, start, len, pick) in &operations {
                let (account, charges, held) = &mut owners[owner];
                if pick % 3 == 0 && !charges.is_empty() {
                    let place = pick % charges.len();
                    drop(charges.swap_remove(place));
                    held.swap_remove(place);
                } else {
                    let before = account.used();
                    let user = UserRange::from_len(UserAddr::new(start), len + 1).unwrap();
                    held.push((space, user));
                    let after = modelled(counting, held);
                    match charge_all(account, &Pages(Knows::All), space, user) {
                        Ok(charge) => {
                            prop_assert!(after <= limit);
                            charges.push(charge);
                        }
                        Err(error) => {
                            prop_assert!(after > limit, "{counting:?} {after} {error}");
                            prop_assert_eq!(account.used(), before);
                            prop_assert!(error.used + error.asked > error.limit);
                            held.pop();
                        }
                    }
                }
                prop_assert_eq!(account.used(), modelled(counting, held), "{:?}", counting);
            }
            for (account, charges, _) in owners {
                drop(charges);
                prop_assert_eq!(account.used(), 0);
            }
        }
    }
}

#[test]
fn what_turns_out_to_be_a_device_is_given_back() {
    let user = UserRange::from_len(UserAddr::new(0), 20).unwrap();
    for (counting, counted) in
        [(Counting::Ranges, 16), (Counting::Mappings, 32), (Counting::Frames, 16)]
    {
        let account = Account::with_counting(u64::MAX, counting);
        let pinner = Pages(Knows::Nothing);
        let charge = account.charge_pin(&pinner, &0, user).unwrap();
        assert_eq!(account.used(), 20, "nobody knows better");
        drop(charge);
        let charges = [0, 1].map(|_| charge_all(&account, &pinner, 0, user).unwrap());
        assert_eq!(account.used(), counted, "{counting:?}, without frames as ranges");
        assert_eq!(charges[0].bytes(), 16);
    }
}

#[test]
fn a_limit_is_enforced_before_anything_is_pinned_also_for_mixed_ranges() {
    let pinner = Pages(Knows::All);
    let user = UserRange::from_len(UserAddr::new(0), 20).unwrap();
    let account = Account::new(15);
    let error = account.charge_pin(&pinner, &0, user).unwrap_err();
    assert_eq!((error.asked, error.used), (16, 0));
    // What is charged already may be pinned again.
    let account = Account::new(16);
    let _held = charge_all(&account, &pinner, 0, user).unwrap();
    let _again = charge_all(&account, &pinner, 0, user).unwrap();
    assert_eq!(account.used(), 16);
}

#[test]
fn frames_that_do_not_fit_leave_a_charge_as_it_was() {
    let account = Account::with_counting(5, Counting::Frames);
    let user = |start| UserRange::from_len(UserAddr::new(start), 3).unwrap();
    let mut charge = account.charge_pin(&Pages(Knows::All), &3, user(0)).unwrap();
    charge.found(&Pages::spans(3, user(0))).unwrap();
    let error = charge.found(&Pages::spans(3, user(3))).unwrap_err();
    assert_eq!(error, OverLimit { asked: 1, used: 5, limit: 5 });
    assert_eq!((account.used(), charge.bytes()), (3, 3));
}

#[test]
fn threads_that_charge_the_same_memory_at_once_are_charged_once() {
    // 35 bytes in 29 frames.
    for (counting, limit) in [(Counting::Ranges, 35), (Counting::Frames, 29)] {
        let account = Account::with_counting(limit.into(), counting);
        let most = AtomicU32::new(0);
        thread::scope(|scope| {
            for thread in 0..4u64 {
                let (account, most) = (&account, &most);
                scope.spawn(move || {
                    let pinner = Pages(Knows::All);
                    let mut charges = Vec::new();
                    for round in 0..4000u64 {
                        let (start, len) = ((round * (thread + 3)) % 17, round % 18);
                        let user = UserRange::from_len(UserAddr::new(start), len + 1).unwrap();
                        charges.push(charge_all(account, &pinner, 3, user).unwrap());
                        most.fetch_max(u32::try_from(account.used()).unwrap(), Ordering::Relaxed);
                        if round % 7 == 0 {
                            charges.drain(..charges.len() / 2);
                        }
                    }
                });
            }
        });
        assert_eq!(account.used(), 0);
        assert!((1..=limit).contains(&most.into_inner()));
    }
}

/// A pinner to which every third frame is a device's.
pub(crate) struct Mixed(pub(crate) SimPinner, pub(crate) u32);

impl Mixed {
    pub(crate) fn kind(&self, paddr: PhysAddr) -> Kind {
        if (paddr.get() >> self.1).is_multiple_of(3) { Kind::Mmio } else { Kind::Memory }
    }

    /// Cuts a span into frames.
    fn frames(&self, span: Span) -> impl Iterator<Item = Span> {
        let (count, len) = (span.len() >> self.1, 1 << self.1);
        (0..count).map(move |n| Span::new(span.paddr().wrapping_add(n * len), len).unwrap())
    }
}

struct Sorting<'a>(&'a Mixed, &'a mut dyn SpanSink);

impl SpanSink for Sorting<'_> {
    fn push(&mut self, span: Span, _kind: Kind) -> Result<(), Stopped> {
        let Self(mixed, sink) = self;
        mixed.frames(span).try_for_each(|frame| sink.push(frame, mixed.kind(frame.paddr())))
    }
}

// SAFETY: pins and spans are the inner pinner's.
unsafe impl Pinner for Mixed {
    type Address = PhysAddr;
    type Space = Arc<SimSpace>;
    type Pin = SimPin;
    type Error = <SimPinner as Pinner>::Error;

    fn pin(
        &self,
        space: &Arc<SimSpace>,
        range: UserRange,
        prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<SimPin, PinFailed<SimPin, Self::Error>> {
        self.0.pin(space, range, prot, &mut Sorting(self, sink))
    }

    fn unpin(
        &self,
        promise: Promise<'_>,
        pin: &mut SimPin,
        spans: &[Span],
        _kind: Kind,
        dirty: Dirty,
    ) {
        self.0.unpin(promise, pin, spans, Kind::Memory, dirty);
    }

    fn chargeable(&self, space: &Arc<SimSpace>, range: UserRange) -> u64 {
        let Ok(frames) = self.resolve(space, range) else { return 0 };
        let memory = frames.iter().filter(|(_, paddr)| self.kind(*paddr) == Kind::Memory);
        u64::try_from(memory.count()).unwrap() << self.1
    }

    fn knows_frames(&self) -> bool {
        true
    }

    as_inner!(0: release space_id copies errno);
}

impl Mixed {
    /// The pages of a range, each with its frame.
    fn resolve(
        &self,
        space: &SimSpace,
        range: UserRange,
    ) -> Result<Vec<(UserAddr, PhysAddr)>, UserAddr> {
        let mut pages = Vec::new();
        for segment in space.resolve(range)? {
            let span = Span::new(segment.paddr, segment.user.checked_len().unwrap()).unwrap();
            for (frame, n) in self.frames(span).zip(0..) {
                pages.push((segment.user.start().wrapping_add(n << self.1), frame.paddr()));
            }
        }
        Ok(pages)
    }
}

const USER: u64 = 0x7f00_0000_0000;
/// Pages of a user's memory, and what behind them is a hole.
const PAGES: u64 = 700;

struct World<const BATCH: usize> {
    memory: Arc<SimMemory>,
    spaces: [Arc<SimSpace>; 2],
    containers: Vec<Container<Mixed, parking_lot::RawMutex, BATCH>>,
    /// What is mapped: container, IOVA, space and pages of it.
    mapped: Vec<(usize, IovaRange, usize, UserRange)>,
}

impl<const BATCH: usize> World<BATCH> {
    /// Two spaces, the second of which has memory of the first too, and two containers.
    fn new(account: &Arc<Account>) -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 16 << 20, 12).unwrap());
        let spaces = [0, 1].map(|_| Arc::new(SimSpace::new(Arc::clone(&memory))));
        let shared = memory.allocate_scattered(300 << 12, 5).unwrap();
        for (space, seed) in spaces.iter().zip(1..) {
            let mut spans = memory.allocate_scattered((PAGES - 300) << 12, seed).unwrap();
            spans.extend(&shared);
            space.map(UserAddr::new(USER), &spans).unwrap();
        }
        let container = |_| {
            let (domain, ..) = faulty_domain::<12>(&Faults::none());
            let inner = SimPinner::new(Arc::clone(&memory)).with_holes(Holes::FoundOnTheWay);
            let container = Container::of_batch(Mixed(inner, 12), Arc::clone(account));
            container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
            container
        };
        let containers = (0..2).map(container).collect();
        Self { memory, spaces, containers, mapped: Vec::new() }
    }

    fn modelled(&self, counting: Counting) -> u64 {
        let mixed = self.containers[0].pinner();
        let pages = self.mapped.iter().flat_map(|&(_, _, space, user)| {
            let pages = mixed.resolve(&self.spaces[space], user).unwrap();
            pages.into_iter().map(move |(at, frame)| (space, at, frame))
        });
        let memory = pages.filter(|(_, _, frame)| mixed.kind(*frame) == Kind::Memory);
        let count = match counting {
            Counting::Mappings => memory.count(),
            Counting::Ranges => {
                memory.map(|(space, at, _)| (space, at)).collect::<BTreeSet<_>>().len()
            }
            Counting::Frames => memory.map(|(.., frame)| frame).collect::<BTreeSet<_>>().len(),
        };
        u64::try_from(count).unwrap() << 12
    }

    /// Maps pages, with what may go wrong.
    fn map(&mut self, step: &Step, limit: u64, counting: Counting) {
        let Step { container, space, place, start, len, fate } = *step;
        let user = UserRange::from_len(UserAddr::new(USER + (start << 12)), len << 12).unwrap();
        let iova = Iova::new(place << 24);
        let asked = AtomicU32::new(0);
        let cancelled = || fate == Fate::Cancelled && asked.fetch_add(1, Ordering::Relaxed) > 0;
        let request = MapRequest::new(&self.spaces[space], user, iova, PROT);
        let result = self.containers[container].map_request(&request.cancelled_by(&cancelled));
        let hole = start + len > PAGES;
        let was = self.mapped.iter().any(|&(by, at, ..)| (by, at.start()) == (container, iova));
        if !was && !hole {
            let mapped = range(iova.get(), len << 12);
            self.mapped.push((container, mapped, space, user));
        }
        match result {
            Ok(_) => assert!(!was && !hole && self.modelled(counting) <= limit),
            Err(Error::Exists { .. }) => assert!(was),
            Err(error) => {
                assert!(!was);
                match error {
                    Error::Pin { .. } => assert!(hole),
                    Error::Cancelled { .. } => assert_eq!(fate, Fate::Cancelled),
                    Error::OverLimit { .. } if hole => {}
                    Error::OverLimit { .. } => assert!(self.modelled(counting) > limit),
                    error => panic!("{error}"),
                }
                if !hole {
                    self.mapped.pop();
                }
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Mapped,
    /// After the first batch.
    Cancelled,
    Unmapped,
}

#[derive(Clone, Debug)]
struct Step {
    container: usize,
    space: usize,
    place: u64,
    start: u64,
    len: u64,
    fate: Fate,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let fate = prop_oneof![
        3 => Just(Fate::Mapped),
        1 => Just(Fate::Cancelled),
        2 => Just(Fate::Unmapped)
    ];
    let step = (0usize..2, 0usize..2, 0u64..4, 0u64..PAGES, 1u64..600, fate);
    let step = step.prop_map(|(container, space, place, start, len, fate)| Step {
        container,
        space,
        place,
        start,
        len,
        fate,
    });
    prop::collection::vec(step, 1..20)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn an_owner_is_charged_for_what_two_containers_have_pinned(
        steps in steps(),
        limit in 300u64..1200,
    ) {
        let limit = limit << 12;
        for counting in ALL {
            in_batches_of::<1>(&steps, limit, counting);
            in_batches_of::<512>(&steps, limit, counting);
        }
    }
}

fn in_batches_of<const BATCH: usize>(steps: &[Step], limit: u64, counting: Counting) {
    let account = Account::with_counting(limit, counting);
    let mut world = World::<BATCH>::new(&account);
    for step in steps {
        if step.fate == Fate::Unmapped {
            let gone = range(step.place << 24, 1 << 24);
            world.containers[step.container].unmap(gone).unwrap();
            let is = |by, at| by == step.container && gone.covers(at);
            world.mapped.retain(|&(by, at, ..)| !is(by, at));
        } else {
            world.map(step, limit, counting);
        }
        assert_eq!(account.used(), world.modelled(counting), "{counting:?} {BATCH}");
    }
    drop(world.containers);
    assert_eq!((account.used(), world.memory.pinned_frames()), (0, 0));
    assert_eq!(world.memory.violations(), []);
}

#[test]
fn nothing_stays_charged_after_a_failure_of_any_step() {
    for counting in ALL {
        let faults = Faults::none();
        let account = Account::with_counting(u64::MAX, counting);
        let world = World::<256>::new(&account);
        let (domain, ..) = faulty_domain::<12>(&faults);
        let inner = Mixed(SimPinner::new(Arc::clone(&world.memory)), 12);
        let container: Container<_, parking_lot::RawMutex> =
            Container::with_domain(Faulty::new(inner, &faults), domain, Arc::clone(&account));
        let user = UserRange::from_len(UserAddr::new(USER), 300 << 12).unwrap();
        let mut iovas = 0..;
        let mut quarantined = 0;
        faults.sweep(|n| {
            let before = account.used();
            let iova = Iova::new(iovas.next().unwrap() << 30);
            let result = container.map(&world.spaces[0], user, iova, PROT);
            let stays = faults.disarm();
            if result.is_ok() {
                container.unmap(range(iova.get(), 300 << 12)).unwrap();
            }
            if container.mappings() > 0 {
                quarantined += 1;
                assert!(account.used() > 0, "what hardware may use is charged");
                container.unmap_all().unwrap();
            }
            assert_eq!(account.used(), before, "step {n}: {counting:?}");
            if stays == dmaspan_sim::fault::Fired::No {
                faults.arm(1 << 30);
            }
        });
        assert_eq!(world.memory.violations(), []);
    }
}

#[test]
fn a_front_end_is_told_of_a_limit_by_the_errno_of_linux() {
    let account = Account::with_counting(0, Counting::Mappings);
    let world = World::<256>::new(&account);
    let container = &world.containers[0];
    let user = UserRange::from_len(UserAddr::new(USER), 300 << 12).unwrap();
    let error = container.map(&world.spaces[0], user, Iova::new(0), PROT).unwrap_err();
    assert!(matches!(error, Error::OverLimit { user: named, .. } if named == user), "{error}");
    assert_eq!(container.errno(&error), Errno::ENOMEM);
    assert_eq!(world.memory.pinned_frames(), 0);
}
