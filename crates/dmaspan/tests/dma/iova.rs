//! Spaces of IOVAs against a model of all granules, and against threads.

mod edges;
mod listing;

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use dmaspan::iommu::iova::{Align, Error, IntoRawFailed, Iovas, Request, Space};
use dmaspan::{Errno, Iova, IovaRange, Platform};
use proptest::prelude::*;

const PAGE: u64 = 0x1000;
const LOW_LAST: u64 = 0xffff_ffff;

thread_local! {
    static CPU: Cell<usize> = const { Cell::new(0) };
}

/// Threads say on which CPU they are.
struct Machine;

impl Platform for Machine {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        CPU.get()
    }

    fn now(&self) -> u64 {
        0
    }
}

fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), len).unwrap()
}

fn space(aperture: IovaRange, cpus: usize) -> Space<Machine> {
    CPU.set(0);
    Space::new(aperture, 12, cpus, Machine).unwrap()
}

fn pages(count: u64, limit: u64) -> Request {
    Request { bytes: count * PAGE, align: Align::Natural, limit: Iova::new(limit) }
}

fn exhausted(request: Request, align: u64) -> Error {
    Error::Exhausted { bytes: request.bytes, align, limit: request.limit }
}

/// Half of the model's granules are below 4 GiB.
const GRANULES: u64 = 64;
const FIRST: u64 = (1 << 32) - GRANULES / 2 * PAGE;

#[derive(Clone, Debug)]
enum Step {
    Alloc(Request),
    Free(prop::sample::Index),
    Reserve(IovaRange),
    Raw(prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let align = prop_oneof![
        4 => Just(Align::Natural),
        1 => (10u32..16).prop_map(|lg2| Align::NaturalAndTo(1 << lg2)),
        1 => (10u32..16).prop_map(|lg2| Align::To(1 << lg2)),
    ];
    let limit = prop_oneof![
        2 => Just(u64::MAX),
        1 => Just(LOW_LAST),
        1 => (0..GRANULES * PAGE).prop_map(|offset| FIRST + offset),
    ];
    let alloc = (1..=9 * PAGE, align, limit).prop_map(|(bytes, align, limit)| {
        Step::Alloc(Request { bytes, align, limit: Iova::new(limit) })
    });
    let reserve = (0..GRANULES * PAGE, 1..=2 * PAGE)
        .prop_map(|(offset, len)| Step::Reserve(range(FIRST + offset, len)));
    let step = prop_oneof![
        10 => alloc,
        9 => any::<prop::sample::Index>().prop_map(Step::Free),
        1 => reserve,
        2 => any::<prop::sample::Index>().prop_map(Step::Raw),
    ];
    prop::collection::vec((0usize..3, step), 1..120)
}

/// What is free for certain: a live range may take as much as the next power of two.
struct Model {
    live: Vec<Iovas>,
    reserved: Vec<bool>,
}

impl Model {
    fn index(iova: u64) -> u64 {
        (iova - FIRST) / PAGE
    }

    /// The granules that are certainly taken for a live range.
    fn taken(range: IovaRange) -> std::ops::Range<u64> {
        let first = Self::index(range.start().get());
        first..Self::index(range.last().get()) + 1
    }

    /// The granules that may be taken for it.
    fn touched(range: IovaRange) -> std::ops::Range<u64> {
        let taken = Self::taken(range);
        taken.start..taken.start + (taken.end - taken.start).next_power_of_two()
    }

    fn is_free(&self, granules: std::ops::Range<u64>) -> bool {
        granules.end <= GRANULES
            && granules.clone().all(|at| !self.reserved[usize::try_from(at).unwrap()])
            && self.live.iter().all(|live| {
                let live = Self::touched(live.range());
                live.end <= granules.start || granules.end <= live.start
            })
    }

    fn align(request: Request) -> u64 {
        let natural = request.bytes.div_ceil(PAGE).next_power_of_two() * PAGE;
        match request.align {
            Align::Natural => natural,
            Align::NaturalAndTo(align) => natural.max(align),
            Align::To(align) => align.max(PAGE),
        }
    }

    fn has_fit(&self, request: Request) -> bool {
        let count = request.bytes.div_ceil(PAGE);
        (0..GRANULES).any(|at| {
            let start = FIRST + at * PAGE;
            start.is_multiple_of(Self::align(request))
                && start + (count * PAGE - 1) <= request.limit.get()
                && self.is_free(at..at + count)
        })
    }

    fn check_new(&self, new: &Iovas, request: Request) {
        let range = new.range();
        let count = request.bytes.div_ceil(PAGE);
        assert_eq!(range.checked_len(), Some(count * PAGE));
        assert_eq!(range.start().get() % Self::align(request), 0, "{range} for {request:?}");
        assert!(range.last() <= request.limit, "{range} for {request:?}");
        for at in Self::taken(range) {
            assert!(!self.reserved[usize::try_from(at).unwrap()], "{range} is reserved");
        }
        for live in &self.live {
            assert_eq!(live.range().intersection(range), None);
        }
    }
}

proptest! {
    /// Ranges are disjoint, aligned, below the limit and never reserved; one is
    /// found if one fits after all caches are drained; and in the end all is free again.
    #[test]
    fn ranges_are_apart_aligned_and_found_where_they_fit(steps in steps()) {
        let space = space(range(FIRST, GRANULES * PAGE), 3);
        let reserved = (0..GRANULES).map(|_| false).collect();
        let mut model = Model { live: Vec::new(), reserved };
        for (cpu, step) in steps {
            CPU.set(cpu);
            match step {
                Step::Alloc(request) => match space.alloc(request) {
                    Ok(new) => {
                        model.check_new(&new, request);
                        model.live.push(new);
                    }
                    Err(error) => {
                        prop_assert_eq!(error, exhausted(request, Model::align(request)));
                        prop_assert!(!model.has_fit(request), "{:?} fits", request);
                    }
                },
                Step::Free(index) if !model.live.is_empty() => {
                    let live = model.live.swap_remove(index.index(model.live.len()));
                    prop_assert_eq!(space.free(live), Ok(()));
                }
                Step::Raw(index) if !model.live.is_empty() => {
                    let live = model.live.swap_remove(index.index(model.live.len()));
                    let raw = space.into_raw(live).unwrap();
                    model.live.push(space.from_raw(raw).unwrap());
                }
                Step::Reserve(wanted) => {
                    let meets = |range: fn(IovaRange) -> std::ops::Range<u64>| {
                        let wanted = Model::taken(wanted);
                        model.live.iter().map(|live| range(live.range())).any(|live| {
                            live.start < wanted.end && wanted.start < live.end
                        })
                    };
                    match space.reserve(wanted) {
                        Ok(()) => {
                            prop_assert!(!meets(Model::taken));
                            let granules = Model::taken(wanted).filter(|at| *at < GRANULES);
                            for at in granules {
                                model.reserved[usize::try_from(at).unwrap()] = true;
                            }
                        }
                        Err(error) => {
                            prop_assert_eq!(error.errno(), Errno::EADDRINUSE);
                            prop_assert!(meets(Model::touched));
                        }
                    }
                }
                Step::Free(_) | Step::Raw(_) => {}
            }
            prop_assert_eq!(space.stats().live, model.live.len());
        }
        for live in model.live.drain(..) {
            space.free(live).unwrap();
        }
        all_is_free(&space, model.reserved.iter().filter(|is| **is).count() as u64 * PAGE);
    }
}

/// Nothing is live, and caches give all back to whoever needs it.
fn all_is_free(space: &Space<Machine>, reserved: u64) {
    let aperture = space.aperture();
    let bytes = aperture.checked_len().unwrap();
    // It may fit where nothing is reserved, and then there is nothing to be collected for it.
    let request = Request { bytes, align: Align::To(1), limit: aperture.last() };
    if let Ok(all) = space.alloc(request) {
        assert_eq!(all.range(), aperture);
        space.free(all).unwrap();
    }
    let stats = space.stats();
    assert_eq!((stats.live, stats.cached), (0, 0));
    assert_eq!((stats.free, stats.reserved), (bytes - reserved, reserved));
}

/// Four threads on two CPUs take, pass on and give back; nobody ever has what another has.
#[test]
fn threads_never_share_a_granule() {
    const PAGES: u64 = 4096;
    let aperture = range((1 << 32) - PAGES / 2 * PAGE, PAGES * PAGE);
    let space = Arc::new(space(aperture, 2));
    let owned: Arc<Vec<AtomicBool>> =
        Arc::new((0..PAGES).map(|_| AtomicBool::new(false)).collect());
    let granules = move |iovas: &Iovas| {
        let index =
            |iova: Iova| usize::try_from((iova.get() - aperture.start().get()) / PAGE).unwrap();
        index(iovas.range().start())..=index(iovas.range().last())
    };
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..4).map(|_| mpsc::channel()).unzip();
    let threads = receivers.into_iter().enumerate().map(|(number, receiver)| {
        let (space, owned) = (Arc::clone(&space), Arc::clone(&owned));
        let next: mpsc::Sender<Iovas> = senders[(number + 1) % 4].clone();
        thread::spawn(move || {
            CPU.set(number % 2);
            let give_back = |iovas: Iovas| {
                granules(&iovas).for_each(|at| assert!(owned[at].swap(false, Ordering::Relaxed)));
                space.free(iovas).unwrap();
            };
            let mut random = 1 + number as u64;
            let mut mine = Vec::new();
            for _ in 0..30_000 {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let limit = if random >> 60 & 1 == 0 { LOW_LAST } else { u64::MAX };
                if let Ok(iovas) = space.alloc(pages(1 + (random >> 40) % 70, limit)) {
                    assert!(iovas.range().last() <= Iova::new(limit));
                    granules(&iovas)
                        .for_each(|at| assert!(!owned[at].swap(true, Ordering::Relaxed)));
                    mine.push(iovas);
                }
                if mine.len() > 20 {
                    give_back(mine.swap_remove((random >> 33) as usize % 20));
                    let _ = next.send(mine.swap_remove(0));
                }
                receiver.try_iter().for_each(give_back);
            }
            drop(next);
            mine.into_iter().for_each(give_back);
            receiver.iter().for_each(give_back);
        })
    });
    let threads: Vec<_> = threads.collect();
    drop(senders);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    all_is_free(&space, 0);
}

#[test]
fn a_size_that_is_cached_comes_back_from_the_cache() {
    let space = space(range(0, 1 << 40), 1);
    for count in [1, 2, 3, 64, 100, 1024] {
        let first = space.alloc(pages(count, u64::MAX)).unwrap();
        let start = first.range().start();
        space.free(first).unwrap();
        assert_eq!(space.stats().cached, 1, "{count} pages");
        let again = space.alloc(pages(count, u64::MAX)).unwrap();
        assert_eq!(again.range(), range(start.get(), count * PAGE));
        assert_eq!(space.stats().cached, 0);
        space.reserve(range(1 << 39, PAGE)).unwrap();
        drop(again);
    }
}

#[test]
fn caches_hold_a_bounded_number_and_few_large_ones() {
    for (count, most) in [(1, 4 * 64), (512, 4 * 64), (1024, 4 * 32)] {
        let space = space(range(0, 1 << 40), 1);
        let all: Vec<_> = (0..1000).map(|_| space.alloc(pages(count, u64::MAX)).unwrap()).collect();
        all.into_iter().for_each(|iovas| space.free(iovas).unwrap());
        let cached = space.stats().cached;
        assert!(1 <= cached && cached <= most, "{cached} of {count} pages");
    }
}

#[test]
fn caches_hold_a_quarter_of_a_small_space_at_most_and_give_all_of_it_back() {
    let space = space(range(0, 1 << 30), 2);
    // The granule of IOVA 0 takes the first place of 1024 pages.
    let (count, places) = (1024, 255);
    let alloc = || space.alloc(pages(count, u64::MAX)).unwrap();
    for _ in 0..2 {
        let all: Vec<_> = (0..places).map(|_| alloc()).collect();
        all.into_iter().for_each(|iovas| space.free(iovas).unwrap());
        assert!((1..=64).contains(&space.stats().cached), "{}", space.stats().cached);
    }
}

#[test]
fn what_one_cpu_freed_is_found_by_another() {
    let space = space(range(PAGE, 4 * PAGE), 4);
    let all: Vec<_> = (0..4).map(|_| space.alloc(pages(1, u64::MAX)).unwrap()).collect();
    for (cpu, iovas) in all.into_iter().enumerate() {
        CPU.set(cpu);
        space.free(iovas).unwrap();
    }
    assert_eq!(space.stats().cached, 4);
    CPU.set(0);
    let two = space.alloc(pages(2, u64::MAX)).unwrap();
    assert_eq!(two.range(), range(2 * PAGE, 2 * PAGE));
}

#[test]
fn low_addresses_come_first_and_alone_where_a_device_has_32_bits() {
    let space = space(range((1 << 32) - 2 * PAGE, 4 * PAGE), 1);
    let all: Vec<_> = (0..4).map(|_| space.alloc(pages(1, u64::MAX)).unwrap()).collect();
    let starts: Vec<_> = all.iter().map(|iovas| iovas.range().start().get()).collect();
    let first = (1u64 << 32) - 2 * PAGE;
    assert_eq!(starts, [first, first + PAGE, first + 2 * PAGE, first + 3 * PAGE]);
    let [low, _, _, high] = <[Iovas; 4]>::try_from(all).unwrap();
    space.free(high).unwrap();
    let request = pages(1, LOW_LAST);
    assert_eq!(space.alloc(request), Err(exhausted(request, PAGE)));
    space.free(low).unwrap();
    assert_eq!(space.alloc(request).unwrap().range(), range(first, PAGE));
}

#[test]
fn a_cached_range_beyond_the_limit_stays_where_it_is() {
    let space = space(range(0, 1 << 32), 1);
    let [low, high] = [0, 1].map(|_| space.alloc(pages(1, LOW_LAST)).unwrap());
    let limit = low.range().last().get();
    space.free(low).unwrap();
    // On top of the other.
    space.free(high).unwrap();
    assert_eq!(space.alloc(pages(1, limit)).unwrap().range(), range(PAGE, PAGE));
}

#[test]
fn between_apertures_nothing_is_handed_out() {
    let apertures = [range(0x9000, 0x1800), range(0, 0x3000), range(0x2000, 0x2000)];
    let space = Space::with_apertures(&apertures, 12, 1, Machine).unwrap();
    assert_eq!(space.aperture(), range(PAGE, 9 * PAGE));
    let starts = [(); 4].map(|()| space.alloc(pages(1, u64::MAX)).unwrap().range().start().get());
    assert_eq!(starts, [0x1000, 0x2000, 0x3000, 0x9000]);
    assert!(space.alloc(pages(1, u64::MAX)).is_err());
    assert_eq!(space.stats().reserved, 5 * PAGE);

    let none = Space::with_apertures(&[], 12, 1, Machine).unwrap_err();
    assert_eq!(none, Error::NoAperture);
    let sliver = range(0x800, 0xfff);
    let none = Space::with_apertures(&[sliver], 12, 1, Machine).unwrap_err();
    assert_eq!(none, Error::Config { aperture: sliver, granule_lg2: 12 });
}

#[test]
fn reserving_takes_cached_ranges_and_no_live_ones() {
    let space = space(range(PAGE, 8 * PAGE), 1);
    let [first, second] = [0, 1].map(|_| space.alloc(pages(1, u64::MAX)).unwrap());
    let (wanted, taken) = (range(PAGE, 2 * PAGE), second.range());
    space.free(first).unwrap();
    assert_eq!(space.reserve(wanted), Err(Error::Taken { range: wanted, taken }));
    space.free(second).unwrap();
    assert_eq!(space.stats().cached, 2 - 1);
    assert_eq!(space.reserve(wanted), Ok(()));
    assert_eq!(space.alloc(pages(1, u64::MAX)).unwrap().range(), range(3 * PAGE, PAGE));
}

#[test]
fn a_given_range_is_taken_from_caches_and_from_nobody() {
    let space = space(range(PAGE, 8 * PAGE), 1);
    let [first, second] = [0, 1].map(|_| space.alloc(pages(1, u64::MAX)).unwrap());
    space.free(first).unwrap();
    let wanted = range(PAGE, 2 * PAGE);
    let error = Error::Taken { range: wanted, taken: second.range() };
    assert_eq!(space.alloc_at(wanted), Err(error));
    space.free(second).unwrap();
    let uneven = range(PAGE + 1, PAGE);
    let error = Error::Unaligned { range: uneven, granule: PAGE };
    assert_eq!(space.alloc_at(uneven), Err(error));
    let both = space.alloc_at(wanted).unwrap();
    assert_eq!(both.range(), wanted);
    space.free(both).unwrap();
    assert_eq!(space.stats().live, 0);
    let outside = range(8 * PAGE, 2 * PAGE);
    assert_eq!(space.alloc_at(outside).unwrap_err().errno(), Errno::EADDRINUSE);
    all_is_free(&space, 0);
}

#[test]
fn a_request_that_is_none_is_refused_by_what_is_wrong_with_it() {
    let space = space(range(1 << 20, 1 << 20), 1);
    let request = |bytes, align, limit| Request { bytes, align, limit: Iova::new(limit) };
    let top = u64::MAX;
    let empty = space.alloc(request(0, Align::Natural, top)).unwrap_err();
    assert!(matches!(empty, Error::Range(_)) && empty.errno() == Errno::EINVAL);
    for align in [0, 3, top] {
        for of in [Align::NaturalAndTo(align), Align::To(align)] {
            assert_eq!(space.alloc(request(PAGE, of, top)), Err(Error::Align { align }));
        }
    }
    for bytes in [1 << 21, 1 << 63, (1 << 63) + 1, top] {
        for align in [Align::Natural, Align::To(PAGE), Align::NaturalAndTo(1 << 63)] {
            let error = space.alloc(request(bytes, align, top)).unwrap_err();
            assert!(matches!(error, Error::Exhausted { limit, .. } if limit == Iova::new(top)));
        }
    }
    let low = request(PAGE, Align::Natural, (1 << 20) - 1);
    assert_eq!(space.alloc(low), Err(exhausted(low, PAGE)));
    let whole = space.alloc(request(1 << 20, Align::Natural, top)).unwrap();
    assert_eq!(whole.range(), space.aperture());
}

#[test]
fn large_leaves_stay_possible() {
    let space = space(range(0, 1 << 40), 1);
    for align in [2 << 20, 1 << 30] {
        for bytes in [PAGE, 3 << 20] {
            let request =
                Request { bytes, align: Align::NaturalAndTo(align), limit: Iova::new(u64::MAX) };
            let iovas = space.alloc(request).unwrap();
            assert_eq!(iovas.range().start().get() % align, 0);
            space.free(iovas).unwrap();
            let again = space.alloc(request).unwrap();
            assert_eq!(again.range().start().get() % align, 0);
        }
    }
}

#[test]
fn another_space_takes_no_iovas_and_hands_them_back() {
    let [one, other] = [0, 1].map(|_| space(range(0, 1 << 20), 1));
    let iovas = one.alloc(pages(3, u64::MAX)).unwrap();
    let before = other.stats();
    let iovas = other.free(iovas).unwrap_err().iovas;
    let Err(IntoRawFailed::Foreign(foreign)) = other.into_raw(iovas) else { panic!("not foreign") };
    assert_eq!(other.stats(), before);
    let raw = one.into_raw(foreign.iovas).unwrap();
    assert_eq!(other.from_raw(raw), Err(Error::NotRaw { range: raw }));
    one.free(one.from_raw(raw).unwrap()).unwrap();
    assert_eq!(one.stats().live, 0);
}

#[test]
fn what_another_space_refuses_becomes_an_error_that_names_it() {
    let [one, other] = [0, 1].map(|_| space(range(0, 1 << 20), 1));
    // As a user writes it.
    let free = |iovas| -> Result<(), Error> { Ok(other.free(iovas)?) };
    let into_raw = |iovas| -> Result<IovaRange, Error> { Ok(other.into_raw(iovas)?) };
    let [first, second] = [0, 1].map(|_| one.alloc(pages(3, u64::MAX)).unwrap());
    let ranges = [first.range(), second.range()];
    let failed = [free(first).unwrap_err(), into_raw(second).unwrap_err()];
    assert_eq!(failed, ranges.map(|range| Error::Foreign { range }));
    assert_eq!(failed[0].to_string(), format!("the IOVAs {} belong to another space", ranges[0]));
    assert_eq!(failed.map(|error| error.errno()), [Errno::EINVAL; 2]);
    assert_eq!(one.stats().live, 2, "what is dropped stays in use");
}

#[test]
fn only_what_was_given_out_raw_comes_back_and_once() {
    let space = space(range(0, 1 << 20), 1);
    let [raw, handle, cached] = [0, 1, 2].map(|_| space.alloc(pages(4, u64::MAX)).unwrap());
    let cached_range = cached.range();
    space.free(cached).unwrap();
    let raw = space.into_raw(raw).unwrap();
    let before = space.stats();
    let (start, last) = (raw.start().get(), raw.last().get());
    let wrong = [
        range(start, 3 * PAGE),
        range(start, 5 * PAGE),
        range(start + PAGE, 3 * PAGE),
        range(last, 1),
        handle.range(),
        cached_range,
        range(0x8_0000, 4 * PAGE),
        range(0, 1 << 20),
    ];
    for range in wrong {
        assert_eq!(space.from_raw(range), Err(Error::NotRaw { range }));
        assert_eq!(space.stats(), before);
    }
    let back = space.from_raw(raw).unwrap();
    assert_eq!(space.from_raw(raw), Err(Error::NotRaw { range: raw }));
    space.free(back).unwrap();
    assert_eq!(space.from_raw(raw), Err(Error::NotRaw { range: raw }));
    assert_eq!(space.stats().live, 1);
}

/// What waits in caches is no reason to refuse, however often that happens.
#[test]
fn freeing_and_refusing_in_turn_loses_nothing() {
    let space = space(range(PAGE, 64 * PAGE), 2);
    let mut all: Vec<_> = (0..64).map(|_| space.alloc(pages(1, u64::MAX)).unwrap()).collect();
    let mut odd: Vec<_> = Vec::new();
    while let Some(iovas) = all.pop() {
        odd.extend(all.pop());
        CPU.set(all.len() / 2 % 2);
        space.free(iovas).unwrap();
        assert!(space.alloc(pages(2, u64::MAX)).is_err());
        assert_eq!(space.stats().cached, 0);
    }
    odd.into_iter().for_each(|iovas| space.free(iovas).unwrap());
    all_is_free(&space, 0);
}
