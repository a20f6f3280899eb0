//! A failure leaves nothing behind: no pin, no charge, no slot.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use dmaspan::account::Counting;
use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink};
use dmaspan::regbuf::{BufferRequest, CloneRequest, Existing, Pinned, Registry};
use dmaspan::{Account, Errno, Promise, Prot, Span, UserAddr, UserRange};
use dmaspan_sim::fault::{Faults, Faulty, Fired};
use dmaspan_sim::memory::{Holes, SimPinner};

use crate::common::{Of, Rng, USER, World, part, span, user};

const PAGE: u64 = 0x1000;
const ALL: [Counting; 3] = [Counting::Ranges, Counting::Mappings, Counting::Frames];

/// A huge page, two pages that are not neighbours of it, and another huge page.
fn world(counting: Counting) -> (World, UserRange) {
    let world = World::new(16 << 20, 12);
    let whole = world.map_blocks(&[(512, 512), (0, 1), (2, 1), (2048, 512)]);
    (World { account: Account::with_counting(u64::MAX, counting), ..world }, whole)
}

fn registry(world: &World, faults: &Faults) -> Of<Faulty<SimPinner>> {
    let pinner = Faulty::new(world.pinner().with_holes(Holes::FoundOnTheWay), faults);
    let (space, account) = (Arc::clone(&world.space), Arc::clone(&world.account));
    Registry::new(Pinned::new(Arc::new(pinner), space, account, 12))
}

/// What there is: frames pinned, bytes charged, and what slots have.
fn state(world: &World, registry: &Of<Faulty<SimPinner>>) -> (u64, u64, Vec<Option<UserRange>>) {
    assert_eq!(world.memory.violations(), []);
    let slots = (0..registry.slots()).map(|index| Some(registry.get(index).ok()?.user()));
    (world.memory.pinned_frames(), world.account.used(), slots.collect())
}

/// Three buffers: of all blocks, of parts of some, of one page.
fn three(whole: UserRange) -> [BufferRequest; 3] {
    let len = whole.checked_len().unwrap();
    [part(whole, 5, len - 9), part(whole, 510 * PAGE, 8 * PAGE), part(whole, 0, 1)]
        .map(BufferRequest::new)
}

#[test]
fn a_registration_of_which_any_step_fails_leaves_nothing() {
    for counting in ALL {
        let ((world, whole), faults) = (world(counting), Faults::none());
        let mut registry = registry(&world, &faults);
        let steps = faults.sweep(|n| {
            let result = registry.register(&three(whole));
            let reached = result.is_err();
            let what = format!("step {n}, {counting:?}: {result:?}");
            if reached {
                assert_eq!(result.unwrap_err().errno(), Errno::ENOMEM, "{what}");
                assert_eq!(state(&world, &registry), (0, 0, vec![]), "{what}");
            } else {
                assert_eq!(registry.slots(), 3, "{what}");
            }
        });
        // A pin each, and a run of pages each.
        assert!(steps > 3 + 4 + 4, "{steps}");
        registry.unregister().unwrap();
        world.assert_idle();
    }
}

#[test]
fn an_update_of_which_any_step_fails_keeps_what_slots_had() {
    for counting in ALL {
        let faults = Faults::none();
        for n in 1.. {
            let (world, whole) = world(counting);
            let mut registry = registry(&world, &faults);
            registry.register(&[BufferRequest::new(part(whole, PAGE, PAGE)); 3]).unwrap();
            let before = state(&world, &registry);
            faults.arm(n);
            let result = registry.update(0, &three(whole));
            let fired = faults.disarm();
            let (pinned, used, slots) = state(&world, &registry);
            let done = match result {
                Ok(done) => done,
                Err(error) => {
                    assert_eq!(error.errno(), Errno::ENOMEM);
                    assert_eq!((pinned, used, slots.clone()), before);
                    0
                }
            };
            assert_eq!(done == 3, fired == Fired::No);
            for (index, slot) in slots.iter().enumerate() {
                let user = if index < done { three(whole)[index].user } else { before.2[index] };
                assert_eq!(*slot, user);
            }
            drop(registry);
            world.assert_idle();
            if fired == Fired::No {
                assert!(n > 12, "{n}");
                break;
            }
        }
    }
}

#[test]
fn clones_and_what_takes_away_have_no_step_of_the_pinner_that_fails() {
    let ((world, whole), faults) = (world(Counting::Ranges), Faults::none());
    let (mut one, mut two) = (registry(&world, &faults), registry(&world, &faults));
    one.register(&three(whole)).unwrap();
    faults.arm(1);
    let replace = CloneRequest { existing: Existing::Replace, ..CloneRequest::default() };
    two.clone_from(&one, &replace).unwrap();
    two.clone_within(&CloneRequest { index: 1, count: 3, ..replace }).unwrap();
    one.update(0, &[BufferRequest::VACANT]).unwrap();
    one.unregister().unwrap();
    drop(two);
    assert_eq!(faults.disarm(), Fired::No);
    world.assert_idle();
}

#[test]
fn a_pin_that_stops_half_way_is_undone() {
    for counting in ALL {
        let (world, whole) = world(counting);
        let mut registry = registry(&world, &Faults::none());
        let len = whole.checked_len().unwrap();
        let beyond = BufferRequest::new(part(whole, 5, len));
        let error = registry.register(&[three(whole)[1], beyond]).unwrap_err();
        assert_eq!(error.errno(), Errno::EFAULT);
        world.assert_idle();
        let bar = span(1 << 45, 4 * PAGE);
        let behind = UserAddr::new(whole.start().get() + len);
        world.space.map_device_with(behind, bar, Default::default()).unwrap();
        let error = registry.register(&[three(whole)[1], beyond]).unwrap_err();
        assert_eq!(error.errno(), Errno::EFAULT);
        world.assert_idle();
    }
}

#[test]
fn a_limit_that_is_reached_after_memory_was_pinned_leaves_nothing() {
    let frames = Counting::Frames;
    for limit in [0, 1, 511, 512, 513, 1025] {
        let (world, whole) = world(frames);
        let world = World { account: Account::with_counting(limit * PAGE, frames), ..world };
        let mut registry = registry(&world, &Faults::none());
        let error = registry.register(&[BufferRequest::new(whole)]).unwrap_err();
        assert_eq!(error.errno(), Errno::ENOMEM);
        assert_eq!(state(&world, &registry), (0, 0, vec![]), "{limit}");
    }
}

/// How a [`Script`] ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Pinned,
    Fails,
    /// And keeps nothing: no span was taken.
    FailsWithoutPin,
    /// It says that the sink stopped it.
    Stops,
}

/// Pushes what it was told to, whatever it is asked for, and keeps books.
struct Script {
    pushes: Vec<(Span, Kind)>,
    end: End,
    /// What it says may be charged.
    estimate: u64,
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    /// Pins by page.
    pages: BTreeMap<u64, i64>,
    pins: i64,
}

impl Books {
    fn count(&mut self, span: Span, pins: i64) {
        for page in span.paddr().get() / PAGE..=span.last().get() / PAGE {
            *self.pages.entry(page).or_default() += pins;
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the script fails")]
struct Failed;

// SAFETY: nothing uses the memory.
unsafe impl Pinner for Script {
    type Address = <SimPinner as Pinner>::Address;
    type Space = ();
    type Pin = ();
    type Error = Failed;

    fn pin(
        &self,
        (): &(),
        range: UserRange,
        _prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<(), PinFailed<(), Failed>> {
        let mut books = self.books.lock().unwrap();
        let mut pin = None;
        for (span, kind) in &self.pushes {
            if let Err(stopped) = sink.push(*span, *kind) {
                books.pins += i64::from(pin.is_some());
                return Err(PinFailed { range, error: stopped.into(), pin });
            }
            pin = Some(());
            books.count(*span, 1);
        }
        let error = match self.end {
            End::Pinned => {
                books.pins += 1;
                return Ok(());
            }
            End::Stops => PinError::Stopped,
            End::Fails | End::FailsWithoutPin => PinError::Failed(Failed),
        };
        let pin = pin.filter(|()| self.end != End::FailsWithoutPin);
        books.pins += i64::from(pin.is_some());
        Err(PinFailed { range, error, pin })
    }

    fn unpin(&self, _: Promise<'_>, (): &mut (), spans: &[Span], kind: Kind, _dirty: Dirty) {
        assert_eq!(kind, Kind::Memory);
        let mut books = self.books.lock().unwrap();
        spans.iter().for_each(|span| books.count(*span, -1));
    }

    fn release(&self, _: Promise<'_>, (): ()) {
        let mut books = self.books.lock().unwrap();
        assert!(books.pages.values().all(|pins| *pins == 0), "unpinned before: {books:?}");
        books.pins -= 1;
    }

    fn space_id(&self, (): &()) -> u64 {
        1
    }

    fn chargeable(&self, (): &(), _range: UserRange) -> u64 {
        self.estimate
    }

    fn knows_frames(&self) -> bool {
        true
    }

    fn read(&self, (): &(), _at: UserAddr, _bytes: &mut [u8]) -> Result<(), Failed> {
        Err(Failed)
    }

    fn write(&self, (): &(), _at: UserAddr, _bytes: &[u8]) -> Result<(), Failed> {
        Err(Failed)
    }

    fn errno(&self, Failed: &Failed) -> Errno {
        Errno::ENODEV
    }
}

/// Asks a script for four pages; what is kept when nothing is left.
fn ask(pushes: &[(u64, u64, Kind)], end: End, counting: Counting) -> Result<(), Errno> {
    ask_for(4, pushes, end, counting)
}

/// The same for so many pages.
fn ask_for(
    pages: u64,
    pushes: &[(u64, u64, Kind)],
    end: End,
    counting: Counting,
) -> Result<(), Errno> {
    let pushes = pushes.iter().map(|(first, len, kind)| (span(first * PAGE, *len), *kind));
    let script =
        Script { pushes: pushes.collect(), end, estimate: pages * PAGE, books: Mutex::default() };
    let (script, account) = (Arc::new(script), Account::with_counting(u64::MAX, counting));
    let source = Pinned::new(Arc::clone(&script), (), Arc::clone(&account), 12);
    let result = source.buffer(user(USER + 7, pages * PAGE - 9), Prot::READ_WRITE);
    if let Ok(buffer) = &result {
        assert_eq!((account.used(), buffer.len()), (pages * PAGE, pages * PAGE - 9));
        assert_eq!(script.books.lock().unwrap().pins, 1);
    }
    let result = result.map(drop).map_err(|error| error.errno());
    let books = script.books.lock().unwrap();
    assert!(books.pages.values().all(|pins| *pins == 0), "{books:?}");
    assert_eq!((books.pins, account.used()), (0, 0), "{books:?}");
    result
}

#[test]
fn a_pinner_that_pushes_something_else_is_undone() {
    let (memory, mmio) = (Kind::Memory, Kind::Mmio);
    for counting in ALL {
        let ask = |pushes: &[_], end| ask(pushes, end, counting);
        assert_eq!(ask(&[(1, 4 * PAGE, memory)], End::Pinned), Ok(()));
        assert_eq!(ask(&[(9, 3 * PAGE, memory), (1, PAGE, memory)], End::Pinned), Ok(()));
        let fault = Err(Errno::EFAULT);
        // Too little, and too much.
        assert_eq!(ask(&[(1, 3 * PAGE, memory)], End::Pinned), fault);
        assert_eq!(ask(&[(1, 5 * PAGE, memory)], End::Pinned), fault);
        assert_eq!(ask(&[(9, 3 * PAGE, memory), (1, 2 * PAGE, memory)], End::Pinned), fault);
        assert_eq!(ask(&[], End::Pinned), fault);
        // A device's, first or later.
        assert_eq!(ask(&[(1, 4 * PAGE, mmio)], End::Pinned), fault);
        assert_eq!(ask(&[(1, 2 * PAGE, memory), (3, 2 * PAGE, mmio)], End::Pinned), fault);
        // Failed, with all, some or none taken.
        let failed = Err(Errno::ENODEV);
        assert_eq!(ask(&[(1, 4 * PAGE, memory)], End::Fails), failed);
        assert_eq!(ask(&[(1, PAGE, memory), (3, PAGE, memory)], End::Fails), failed);
        assert_eq!(ask(&[], End::FailsWithoutPin), failed);
        assert_eq!(ask(&[], End::Fails), failed);
        // Stopped, says it, and nobody did.
        assert_eq!(ask(&[(1, 4 * PAGE, memory)], End::Stops), fault);
        assert_eq!(ask(&[], End::Stops), fault);
        // As many spans as are unpinned at once, and one less and more.
        for count in [31, 32, 33, 64, 65] {
            let many: Vec<_> = (0..count).map(|n| (2 * n + 1, PAGE, memory)).collect();
            assert_eq!(ask(&many, End::Pinned), fault, "{count}");
            assert_eq!(ask(&many, End::Fails), failed, "{count}");
        }
    }
}

#[test]
fn what_a_pinner_could_not_tell_before_is_charged_behind() {
    for counting in ALL {
        for (estimate, limit) in
            [(0, 4), (PAGE, 4), (4 * PAGE, 4), (0, 3), (PAGE, 3), (3 * PAGE, 3), (3 * PAGE, 0)]
        {
            let account = Account::with_counting(limit * PAGE, counting);
            let (pushes, end) = (vec![(span(PAGE, 4 * PAGE), Kind::Memory)], End::Pinned);
            let script = Arc::new(Script { pushes, end, estimate, books: Mutex::default() });
            let source = Pinned::new(Arc::clone(&script), (), Arc::clone(&account), 12);
            let result = source.buffer(user(USER, 4 * PAGE), Prot::READ);
            match result {
                Ok(buffer) => {
                    assert_eq!((limit, account.used()), (4, 4 * PAGE), "{counting:?}");
                    drop(buffer);
                }
                Err(error) => assert_eq!((limit < 4, error.errno()), (true, Errno::ENOMEM)),
            }
            let books = script.books.lock().unwrap();
            assert!(books.pages.values().all(|pins| *pins == 0), "{books:?}");
            assert_eq!((books.pins, account.used()), (0, 0), "{estimate}, {limit}, {counting:?}");
        }
    }
}

#[test]
fn buffers_of_more_spans_than_are_unpinned_at_once_are_unpinned() {
    for pages in [31, 32, 33, 63, 64, 65, 100] {
        for counting in ALL {
            let world = World::new(512 * PAGE, 12);
            let spans = world.memory.allocate_scattered(pages * PAGE, pages).unwrap();
            let whole = world.space.map(UserAddr::new(USER), &spans).unwrap();
            let world = World { account: Account::with_counting(pages * PAGE, counting), ..world };
            let buffer = world.buffer(part(whole, 1, pages * PAGE - 2));
            assert_eq!((world.account.used(), world.memory.pinned_frames()), (pages * PAGE, pages));
            drop(buffer);
            world.assert_idle();
        }
    }
}

#[test]
fn spans_of_any_lengths_are_unpinned_once_however_far_a_pinner_came() {
    let mut rng = Rng::new(3);
    for round in 0..if cfg!(miri) { 20 } else { 1000 } {
        let counting = ALL[rng.index(3)];
        // Some are uniform, or but for the first one, and some are of any lengths.
        let (longest, usual) = (1 + rng.below(4), 1 << rng.below(3));
        let (mut pages, mut at, mut pushes) = (0, 0, Vec::new());
        for _ in 0..1 + rng.below(150) {
            let len = if rng.below(9) < 8 { usual } else { 1 + rng.below(longest) };
            // Some join the one before.
            at += rng.below(8).min(1);
            pushes.push((at, len * PAGE, Kind::Memory));
            (at, pages) = (at + len, pages + len);
        }
        assert_eq!(ask_for(pages, &pushes, End::Pinned, counting), Ok(()), "{round}");
        let end = [End::Fails, End::Stops, End::Pinned][rng.index(3)];
        let asked = pages + u64::from(end == End::Pinned);
        assert!(ask_for(asked, &pushes, end, counting).is_err(), "{round}");
        pushes.push((at + 1, PAGE, Kind::Mmio));
        assert_eq!(ask_for(pages + 1, &pushes, end, counting), Err(Errno::EFAULT), "{round}");
    }
}
