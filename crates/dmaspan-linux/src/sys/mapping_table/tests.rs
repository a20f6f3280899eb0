use std::sync::Weak;
use std::thread;

use super::*;
use crate::mem::MemoryKind;
use crate::os;
use crate::sys::kernel_mapping::LockedBy;
use crate::sys::kernel_mapping::Source;
use crate::sys::kernel_mapping::fake::{Answer, Fake, iovas};
use crate::sys::page_size as page;

/// Between these two the IOMMU takes writes for interrupts, and maps nothing.
const MSIS: u64 = 0xfee0_0000;
const BEHIND: u64 = 0xfef0_0000;

/// `LEAKED` is the process's: the tests that change or read it take turns.
static TURN: Mutex<()> = Mutex::new(());

fn table() -> MappingTable<Fake> {
    MappingTable::new(Fake::new(), Gaps::Empty)
}

fn limits() -> Limits {
    let apertures = vec![iovas(0, MSIS - 1), iovas(BEHIND, u64::MAX)];
    Limits { apertures, page_sizes: page(), mappings_left: None }
}

fn memory(pages: u64) -> Arc<Memory> {
    Arc::new(Memory::new(MemoryKind::Base, pages * page()).unwrap())
}

fn map(table: &MappingTable<Fake>, memory: &Arc<Memory>, iova: u64) -> Result<(), Error> {
    table.map_memory(
        &limits(),
        memory,
        memory.user_range(),
        Iova::new(iova),
        Prot::READ_WRITE,
        Label::caller(),
    )
}

/// Maps memory that lives as long as the table says.
fn map_own(table: &MappingTable<Fake>, iova: u64, pages: u64) -> Weak<Memory> {
    let memory = memory(pages);
    map(table, &memory, iova).unwrap();
    Arc::downgrade(&memory)
}

/// All that a device reaches is memory that lives.
fn check_alive(table: &MappingTable<Fake>, memories: &[Weak<Memory>]) {
    for (range, source) in table.kernel().areas() {
        let Source::User(start) = source else { continue };
        let user = UserRange::from_len(start, range.checked_len().unwrap()).unwrap();
        let alive = memories.iter().filter_map(Weak::upgrade);
        assert!(alive.into_iter().any(|memory| memory.user_range().covers(user)), "{range}");
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[test]
fn any_sequence_of_requests_leaves_what_an_interval_map_has() {
    let _turn = TURN.lock();
    let errno = Errno::ENOMEM;
    for seed in 1..=40u64 {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let table = table();
        let mut memories = Vec::new();
        // First pages, and numbers of pages.
        let mut model: BTreeMap<u64, u64> = BTreeMap::new();
        for _ in 0..400 {
            let (first, pages) = (random.below(64), 1 + random.below(6));
            let fails = random.below(8) == 0;
            let answer = if fails { Answer::Fail(errno) } else { Answer::Yes };
            let part = Answer::Part(usize::try_from(random.below(4)).unwrap(), errno);
            let overlaps: Vec<(u64, u64)> = model
                .iter()
                .map(|(&at, &count)| (at, count))
                .filter(|&(at, count)| at < first + pages && first < at + count)
                .collect();
            let before = table.requests();
            if random.below(3) > 0 {
                table.kernel().answer(&[answer], &[]);
                let memory = memory(pages);
                let result = map(&table, &memory, first * page());
                memories.push(Arc::downgrade(&memory));
                let asked = u64::from(overlaps.is_empty());
                assert_eq!(table.requests().maps, before.maps + asked);
                assert_eq!(result.is_ok(), overlaps.is_empty() && !fails, "{result:?}");
                if result.is_ok() {
                    model.insert(first, pages);
                }
            } else {
                let some = if fails && overlaps.len() > 1 { part } else { answer };
                table.kernel().answer(&[], &[some]);
                let range = iovas(first * page(), (first + pages) * page() - 1);
                let result = table.unmap(range);
                let bisects =
                    overlaps.iter().any(|&(at, count)| at < first || at + count > first + pages);
                let one_by_one = if fails && overlaps.len() > 1 { overlaps.len() } else { 0 };
                let asked = usize::from(!overlaps.is_empty()) + one_by_one;
                let asked = if bisects { 0 } else { u64::try_from(asked).unwrap() };
                assert_eq!(table.requests().unmaps, before.unmaps + asked);
                if bisects {
                    assert!(matches!(result, Err(Error::Bisects { .. })));
                } else if fails && overlaps.len() == 1 {
                    assert_eq!(result.map_err(|error| error.errno()), Err(errno));
                } else {
                    // What the kernel does not unmap at once, it does one by one.
                    let bytes: u64 = overlaps.iter().map(|(_, count)| count * page()).sum();
                    assert_eq!(result, Ok(bytes));
                    model.retain(|at, _| !overlaps.iter().any(|(other, _)| other == at));
                }
            }
            let areas = table.kernel().areas();
            let areas = areas.iter().map(|(range, _)| {
                (range.start().get() / page(), (range.len_less_one() + 1) / page())
            });
            assert_eq!(areas.collect::<BTreeMap<_, _>>(), model);
            check_alive(&table, &memories);
            // Nothing is kept longer than it is mapped either.
            let alive = memories.iter().filter(|memory| memory.strong_count() > 0).count();
            assert_eq!(alive, model.len());
        }
        table.kernel().answer(&[], &[]);
        let leaked = leaked_bytes();
        drop(table);
        assert!(memories.iter().all(|memory| memory.strong_count() == 0));
        assert_eq!(leaked_bytes(), leaked);
    }
}

#[test]
fn what_cannot_be_mapped_is_refused_without_a_request() {
    let table = table();
    let memory = memory(4);
    let (user, rw) = (memory.user_range(), Prot::READ_WRITE);
    let ask = |iova, user, prot| {
        table.map_memory(&limits(), &memory, user, Iova::new(iova), prot, Label::caller())
    };
    let outside = UserRange::from_len(user.last(), 2).unwrap();
    let odd = UserRange::from_len(user.start(), page() + 1).unwrap();
    let shifted = UserRange::new(user.start().checked_add(8).unwrap(), user.last()).unwrap();
    assert!(matches!(ask(0, outside, rw), Err(Error::Outside(_))));
    assert!(matches!(ask(0, odd, rw), Err(Error::Misaligned { what: "the length", .. })));
    assert!(matches!(ask(0, shifted, rw), Err(Error::Misaligned { .. })));
    assert!(matches!(ask(8, user, rw), Err(Error::Misaligned { what: "the iova", .. })));
    assert!(matches!(ask(0, user, Prot::empty()), Err(Error::NoAccess { .. })));
    for iova in [MSIS, MSIS - page(), BEHIND - page(), MSIS - 3 * page()] {
        let error = ask(iova, user, rw).unwrap_err();
        assert!(matches!(error, Error::OutsideApertures { .. }), "{iova:#x}: {error:?}");
        assert_eq!(error.errno(), Errno::EINVAL);
    }
    assert!(matches!(ask(u64::MAX - page() + 1, user, rw), Err(Error::Range(_))));
    let full = Limits { mappings_left: Some(0), ..limits() };
    let error =
        table.map_memory(&full, &memory, user, Iova::new(0), rw, Label::caller()).unwrap_err();
    assert_eq!(error, Error::NoMappingsLeft { mappings: 0 });
    assert_eq!(table.requests(), Requests::default());
    // Those beside what is refused are mapped, and so is the top.
    for iova in [MSIS - 4 * page(), BEHIND, u64::MAX - 4 * page() + 1] {
        ask(iova, user, rw).unwrap();
    }
    assert_eq!(table.unmap(iovas(BEHIND, u64::MAX)), Ok(8 * page()));
}

#[test]
fn all_addresses_are_unmapped_by_one_request() {
    let _turn = TURN.lock();
    let table = table();
    let everywhere = Limits { apertures: vec![iovas(0, u64::MAX)], ..limits() };
    let memory = memory(1);
    for iova in [0, u64::MAX - page() + 1] {
        let (user, iova) = (memory.user_range(), Iova::new(iova));
        table.map_memory(&everywhere, &memory, user, iova, Prot::READ, Label::caller()).unwrap();
    }
    let failing = [Answer::Fail(Errno::EIO); 2];
    table.kernel().answer(&[], &failing);
    assert!(table.unmap_all().is_err());
    assert_eq!((table.mappings(), Arc::strong_count(&memory)), (2, 3));
    let before = table.requests().unmaps;
    assert_eq!(table.unmap_all(), Ok(2 * page()));
    assert_eq!((table.requests().unmaps - before, Arc::strong_count(&memory)), (1, 1));
}

#[test]
fn what_a_failed_unmap_has_taken_away_is_given_back_and_the_rest_stays_mapped() {
    let _turn = TURN.lock();
    let (busy, leaked) = (Errno::EBUSY, leaked_bytes());
    // Kernels that say of nothing that it was 0 bytes, and such that refuse.
    for table in [table(), table()] {
        for gone in 0..4 {
            let memories: Vec<_> = (0..4).map(|n| map_own(&table, n * page(), 1)).collect();
            let mut answers = vec![Answer::Part(gone, busy)];
            answers.extend(vec![Answer::Yes; gone]);
            answers.push(Answer::Fail(busy));
            table.kernel().answer(&[], &answers);
            let range = iovas(u64::try_from(gone).unwrap() * page(), 4 * page() - 1);
            let error = table.unmap(iovas(0, 4 * page() - 1)).unwrap_err();
            assert_eq!(error, Error::System { request: Fake::UNMAP, range, errno: busy });
            let alive: Vec<_> = memories.iter().map(|memory| memory.strong_count() > 0).collect();
            let stays: Vec<_> = (0..4).map(|n| n >= gone).collect();
            assert_eq!(alive, stays);
            assert_eq!(table.mappings(), u64::try_from(4 - gone).unwrap());
            check_alive(&table, &memories);
            assert_eq!(table.unmap_all(), Ok(u64::try_from(4 - gone).unwrap() * page()));
        }
        // One that failed for a moment is tried again.
        let memories: Vec<_> = (0..4).map(|n| map_own(&table, n * page(), 1)).collect();
        table.kernel().answer(&[], &[Answer::Part(2, busy)]);
        assert_eq!(table.unmap(iovas(0, 4 * page() - 1)), Ok(4 * page()));
        assert!(memories.iter().all(|memory| memory.strong_count() == 0));
        // One of several that is unmapped short does not keep those behind it.
        let memories: Vec<_> = (0..3).map(|n| map_own(&table, (8 + n) * page(), 1)).collect();
        table.kernel().answer(&[], &[Answer::Part(0, busy), Answer::Short]);
        assert!(matches!(
            table.unmap(iovas(8 * page(), 11 * page() - 1)),
            Err(Error::Short { .. })
        ));
        assert_eq!(table.unmap(iovas(9 * page(), 11 * page() - 1)), Ok(2 * page()));
        assert_eq!(memories.iter().filter(|memory| memory.strong_count() > 0).count(), 1);
    }
    assert_eq!(leaked_bytes() - leaked, 2 * page());
}

#[test]
fn a_space_that_is_dropped_frees_all_but_what_the_kernel_keeps() {
    let _turn = TURN.lock();
    // The first request is for all, the next for one of them, up to the first that fails, and those
    // behind it for one each.
    for failing in 0..6_usize {
        let table = table();
        let memories: Vec<_> = (0..4).map(|n| map_own(&table, n * 0x10_000, 1)).collect();
        let mut answers = vec![Answer::Fail(Errno::EIO)];
        answers.extend(
            (0..5).map(|n| if n < failing { Answer::Fail(Errno::EIO) } else { Answer::Yes }),
        );
        table.kernel().answer(&[], &answers);
        let leaked = leaked_bytes();
        drop(table);
        let kept = failing.saturating_sub(1);
        assert_eq!(leaked_bytes() - leaked, u64::try_from(kept).unwrap() * page());
        let alive = memories.iter().filter(|memory| memory.strong_count() > 0).count();
        assert_eq!(alive, kept);
    }
}

#[test]
fn what_was_unmapped_short_is_kept_and_does_not_keep_the_rest() {
    let _turn = TURN.lock();
    let table = table();
    let memories: Vec<_> = (0..5).map(|n| map_own(&table, n * page(), 1)).collect();
    table.kernel().answer(&[], &[Answer::Short]);
    let leaked = leaked_bytes();
    let middle = iovas(2 * page(), 3 * page() - 1);
    let error = table.unmap(middle).unwrap_err();
    assert_eq!(error, Error::Short { range: middle, mapped: page(), unmapped: page() - 1 });
    assert_eq!(table.unmap(middle), Err(Error::Lost { range: middle }));
    assert!(matches!(map(&table, &memory(1), 2 * page()), Err(Error::Overlap { .. })));
    assert_eq!(table.unmap_all(), Ok(4 * page()));
    let alive: Vec<_> = memories.iter().map(|memory| memory.strong_count() > 0).collect();
    assert_eq!(alive, [false, false, true, false, false]);
    map_own(&table, 7 * page(), 1);
    drop(table);
    assert_eq!(leaked_bytes() - leaked, page());
}

/// Maps, copies, unmaps and maps again. Whatever fails, the rest is done.
fn some_of_everything(from: &MappingTable<Fake>, to: &MappingTable<Fake>) -> Vec<Weak<Memory>> {
    let mut memories = Vec::new();
    let map_new = |memories: &mut Vec<Weak<Memory>>, iova: u64, pages: u64| {
        let memory = memory(pages);
        memories.push(Arc::downgrade(&memory));
        let mapped = map(from, &memory, iova * page()).is_ok();
        drop(memory);
        check_alive(from, memories);
        // What was refused is not kept.
        let last = memories.last().unwrap();
        assert_eq!(last.strong_count() > 0, mapped);
    };
    let unmap = |memories: &Vec<Weak<Memory>>, first: u64, last: u64| {
        let _ = from.unmap(iovas(first * page(), (last + 1) * page() - 1));
        check_alive(from, memories);
    };
    let copy = |memories: &Vec<Weak<Memory>>, first: u64, last: u64, iova: u64| {
        let source = iovas(first * page(), (last + 1) * page() - 1);
        let _ =
            to.copy(&limits(), from, source, Iova::new(iova * page()), Prot::READ, Label::caller());
        check_alive(from, memories);
    };
    for (iova, pages) in [(0, 2), (2, 1), (3, 4), (16, 2), (20, 1)] {
        map_new(&mut memories, iova, pages);
    }
    copy(&memories, 1, 4, 32);
    copy(&memories, 16, 17, 48);
    unmap(&memories, 2, 2);
    unmap(&memories, 8, 24);
    map_new(&mut memories, 2, 1);
    map_new(&mut memories, 18, 3);
    let _ = to.unmap(iovas(32 * page(), 48 * page() - 1));
    let _ = from.unmap_all();
    check_alive(from, &memories);
    map_new(&mut memories, 0, 3);
    memories
}

#[test]
fn whichever_request_fails_all_is_given_back_but_what_was_unmapped_short() {
    let _turn = TURN.lock();
    let refused = Answer::Fail(Errno::ENOMEM);
    for failing in 0..12 {
        for (of_maps, answer) in [(true, refused), (false, refused), (false, Answer::Short)] {
            for of_copies in [false, true] {
                let (from, to) = (table(), table());
                let mut answers = vec![Answer::Yes; failing];
                answers.push(answer);
                let (maps, unmaps) = if of_maps { (answers, vec![]) } else { (vec![], answers) };
                let kernel = if of_copies { to.kernel() } else { from.kernel() };
                kernel.answer(&maps, &unmaps);
                let leaked = leaked_bytes();
                let memories = some_of_everything(&from, &to);
                drop(from);
                drop(to);
                let alive = memories.iter().filter_map(Weak::upgrade);
                let alive: u64 = alive.map(|memory| memory.len()).sum();
                let leaked = leaked_bytes() - leaked;
                assert_eq!(alive > 0, leaked > 0, "{failing}, {answer:?}");
                assert!(leaked == 0 || answer == Answer::Short, "{failing}, {answer:?}");
                // Of a copy the memories behind it are kept whole.
                assert!(of_copies || alive == leaked, "{failing}: {alive} and {leaked}");
            }
        }
    }
}

#[test]
fn a_space_that_is_forgotten_frees_nothing() {
    let table = table();
    let memory = map_own(&table, 0, 1);
    std::mem::forget(table);
    assert_eq!(memory.strong_count(), 1);
}

#[test]
fn nothing_is_mapped_into_a_hole_of_what_is_being_unmapped() {
    let table = table();
    let one = map_own(&table, 0, 1);
    let other = map_own(&table, 2 * page(), 1);
    let hull = iovas(0, 3 * page() - 1);
    let third = memory(1);
    thread::scope(|scope| {
        table.kernel().hold();
        let unmapped = scope.spawn(|| table.unmap(iovas(0, 9 * page() - 1)));
        table.kernel().wait_for(1);
        assert_eq!(map(&table, &third, page()), Err(Error::Busy { range: hull }));
        assert!(matches!(map(&table, &third, 0), Err(Error::Overlap { .. })));
        assert!(matches!(table.unmap(iovas(0, page() - 1)), Err(Error::Busy { .. })));
        assert_eq!((one.strong_count(), other.strong_count()), (1, 1));
        // Behind what is mapped nothing is unmapped.
        let behind = scope.spawn(|| map(&table, &third, 4 * page()));
        table.kernel().wait_for(2);
        assert!(matches!(table.unmap(iovas(4 * page(), 5 * page() - 1)), Err(Error::Busy { .. })));
        table.kernel().go_on();
        assert_eq!(unmapped.join().unwrap(), Ok(2 * page()));
        behind.join().unwrap().unwrap();
    });
    assert_eq!((one.strong_count(), other.strong_count()), (0, 0));
    map(&table, &third, page()).unwrap();
}

#[test]
fn a_copy_keeps_what_its_source_has_and_holds_the_source_meanwhile() {
    let (from, to) = (table(), table());
    let memories = [map_own(&from, 0, 2), map_own(&from, 2 * page(), 2)];
    let source = iovas(page(), 3 * page() - 1);
    let copy =
        |source| to.copy(&limits(), &from, source, Iova::new(0), Prot::READ, Label::caller());
    thread::scope(|scope| {
        to.kernel().hold();
        let copied = scope.spawn(|| copy(source));
        to.kernel().wait_for(1);
        assert!(matches!(from.unmap_all(), Err(Error::Busy { .. })));
        to.kernel().go_on();
        copied.join().unwrap().unwrap();
    });
    assert_eq!(from.unmap_all(), Ok(4 * page()));
    assert!(memories.iter().all(|memory| memory.strong_count() == 1));
    assert!(matches!(copy(source), Err(Error::NotMapped { .. })));
    assert_eq!(to.unmap_all(), Ok(2 * page()));
    assert!(memories.iter().all(|memory| memory.strong_count() == 0));
}

#[test]
fn a_copy_from_a_table_of_another_kernel_is_refused_and_keeps_nothing() {
    let (from, to) = (MappingTable::new(Fake::of(1), Gaps::Empty), table());
    let memory = map_own(&from, 0, 1);
    let source = iovas(0, page() - 1);
    // There the number is another table's.
    let error =
        to.copy(&limits(), &from, source, Iova::new(0), Prot::READ, Label::caller()).unwrap_err();
    assert_eq!((error.errno(), to.kernel().areas().len()), (Errno::EOPNOTSUPP, 0));
    from.unmap(source).unwrap();
    assert_eq!(memory.strong_count(), 0);
}

#[test]
fn a_copy_of_what_has_a_hole_is_refused_without_a_request() {
    let (from, to) = (table(), table());
    let _memories = [map_own(&from, page(), 2), map_own(&from, 4 * page(), 1)];
    for (first, last) in [(0, 1), (1, 3), (1, 4), (3, 3), (3, 4), (4, 5), (9, 9)] {
        let source = iovas(first * page(), (last + 1) * page() - 1);
        let error = to
            .copy(&limits(), &from, source, Iova::new(0), Prot::READ, Label::caller())
            .unwrap_err();
        assert_eq!(error, Error::NotMapped { range: source });
    }
    assert_eq!(to.requests(), Requests::default());
    // A refused copy holds nothing.
    to.kernel().answer(&[Answer::Fail(Errno::EPERM)], &[]);
    let source = iovas(page(), 3 * page() - 1);
    assert!(to.copy(&limits(), &from, source, Iova::new(0), Prot::READ, Label::caller()).is_err());
    assert_eq!(from.unmap_all(), Ok(3 * page()));
}

#[test]
fn threads_that_map_and_unmap_at_once_leave_nothing_behind() {
    let _turn = TURN.lock();
    let table = table();
    let shared = memory(4);
    let leaked = leaked_bytes();
    thread::scope(|scope| {
        for seed in 1..=4u64 {
            let (table, shared) = (&table, &shared);
            scope.spawn(move || {
                let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                for _ in 0..20_000 {
                    let first = random.below(32) * page();
                    let result = match random.below(4) {
                        0..2 => map(table, shared, first),
                        2 => table.unmap(iovas(first, first + 8 * page() - 1)).map(drop),
                        _ => table.unmap_all().map(drop),
                    };
                    assert!(matches!(
                        result,
                        Ok(())
                            | Err(Error::Busy { .. }
                                | Error::Overlap { .. }
                                | Error::Bisects { .. })
                    ));
                }
            });
        }
    });
    assert_eq!(table.kernel().areas().len(), Arc::strong_count(&shared) - 1);
    table.unmap_all().unwrap();
    assert_eq!((Arc::strong_count(&shared), leaked_bytes()), (1, leaked));
}

#[test]
fn the_limit_of_locked_memory_names_a_limit_that_is_enough() {
    let range = iovas(0, 0x1f_ffff);
    let error = |locked, locked_by| {
        let needed = range.checked_len().unwrap();
        Error::MemlockLimit { needed, locked, limit: 8 << 20, locked_by }.to_string()
    };
    let process = error(7 << 20, LockedBy::Process);
    assert!(process.contains("of which 7 MiB are used"), "{process}");
    assert!(process.contains("`ulimit -l 9216`"), "{process}");
    let user = error(0, LockedBy::User);
    assert!(user.contains("others of the user count too"), "{user}");
    assert!(user.contains("`ulimit -l 10240`"), "{user}");
}

#[test]
fn a_table_lists_what_is_mapped_copied_and_lost() {
    let _turn = TURN.lock();
    let (table, from) = (table(), table());
    let memories = [0, 1, 2].map(|n| map_own(&table, n * page(), 1));
    map_own(&from, 0, 1);
    let label = Label::from("a copy");
    let at = Iova::new(8 * page());
    // The fake has two tables of one file.
    table.copy(&limits(), &from, iovas(0, page() - 1), at, Prot::READ, label).unwrap();
    table.kernel().answer(&[], &[Answer::Short]);
    table.unmap(iovas(page(), 2 * page() - 1)).unwrap_err();
    let listed: Vec<_> = crate::list::each(IovaRange::ALL, |rest| {
        table.listed_in(rest).map(|found| (found.range, found))
    })
    .collect();
    let states: Vec<_> = listed.iter().map(|m| (m.range.start().get() / page(), m.state)).collect();
    let (mapped, lost) = (SpaceState::Mapped, SpaceState::Lost);
    assert_eq!(states, [(0, mapped), (1, lost), (2, mapped), (8, mapped)]);
    let own = memories[0].upgrade().unwrap();
    assert_eq!(listed[0].user, Some(own.user_range()));
    assert_eq!((listed[0].source, listed[0].prot), (SpaceSource::Memory, Prot::READ_WRITE));
    assert!(matches!(listed[0].label, Label::Place(place) if place.file() == file!()));
    assert_eq!((listed[3].source, listed[3].user), (SpaceSource::Copy, None));
    assert_eq!((listed[3].label, listed[3].prot), (label, Prot::READ));
}

#[test]
fn what_others_have_mapped_between_stays_whatever_is_unmapped() {
    let (page, errno) = (page(), Errno::ENOMEM);
    for planted in [Gaps::Empty, Gaps::OfOthers] {
        let table = MappingTable::new(Fake::new(), planted);
        let theirs = iovas(2 * page, 3 * page - 1);
        let kept: Vec<_> = [0, 1, 4, 7].map(|at| map_own(&table, at * page, 1)).into();
        if planted == Gaps::Empty {
            // What this looks for: nobody else may have anything there.
            assert_eq!(table.unmap(iovas(0, 5 * page - 1)), Ok(3 * page));
            assert_eq!(table.requests().unmaps, 1);
            continue;
        }
        table.kernel().plant(theirs);
        let cut = table.unmap(iovas(page, 8 * page - 2));
        assert!(matches!(cut, Err(Error::Bisects { .. })), "{cut:?}");
        assert_eq!(table.mappings(), 4);
        // The second of two requests fails, and the third is not made.
        table.kernel().answer(&[], &[Answer::Yes, Answer::Fail(errno)]);
        let failed = table.unmap(iovas(0, 8 * page - 1));
        let range = iovas(4 * page, 5 * page - 1);
        assert_eq!(failed, Err(Error::System { request: Fake::UNMAP, range, errno }));
        assert_eq!((table.mappings(), table.requests().unmaps), (2, 2));
        assert_eq!(kept.iter().filter(|one| one.strong_count() > 0).count(), 2);
        check_alive(&table, &kept);
        assert_eq!(table.unmap_all(), Ok(2 * page));
        assert_eq!(table.requests().unmaps, 4);
        assert!(kept.iter().all(|one| one.strong_count() == 0));
        let left: Vec<_> = table.kernel().areas().into_iter().map(|(range, _)| range).collect();
        assert_eq!(left, [theirs]);
    }
}

#[test]
fn a_refusal_names_the_request_that_was_refused() {
    let (table, other) = (table(), table());
    let (page, limits) = (page(), limits());
    let memory = Arc::new(Memory::new(MemoryKind::Memfd, page).unwrap());
    let map = || {
        let user = memory.user_range();
        table.map_memory(&limits, &memory, user, Iova::new(0), Prot::READ, Label::caller())
    };
    let named = |result: Result<(), Error>| match result.unwrap_err() {
        Error::System { request, errno: Errno::EEXIST, .. } => request,
        error => panic!("{error}"),
    };
    let refuse = || table.kernel().answer(&[Answer::Fail(Errno::EEXIST)], &[]);
    refuse();
    assert_eq!(named(map()), "map");
    table.kernel().map_files();
    refuse();
    assert_eq!(named(map()), "map a file");
    // Of a file that the kernel does not map it is the address that was refused.
    table.kernel().answer(&[Answer::Fail(Errno::EINVAL), Answer::Fail(Errno::EEXIST)], &[]);
    assert_eq!(named(map()), "map");
    let user = memory.user_range();
    other.map_memory(&limits, &memory, user, Iova::new(0), Prot::READ, Label::caller()).unwrap();
    let source = IovaRange::from_len(Iova::new(0), page).unwrap();
    refuse();
    let copied = table.copy(&limits, &other, source, Iova::new(0), Prot::READ, Label::caller());
    assert_eq!(named(copied), "copy");
}

#[test]
fn memory_with_a_file_is_mapped_by_it_where_the_kernel_maps_that_file() {
    let page = page();
    let table = table();
    table.kernel().map_files();
    let memory = Arc::new(Memory::new(MemoryKind::Memfd, 4 * page).unwrap());
    let kept = Arc::downgrade(&memory);
    let part = memory.sub_range(page, 2 * page).unwrap();
    let map = |at: u64| {
        let (limits, label) = (limits(), Label::caller());
        table.map_memory(&limits, &memory, part, Iova::new(at * page), Prot::READ, label)
    };
    let source = |at: u64| {
        let start = Iova::new(at * page);
        table.kernel().areas().into_iter().find(|(range, _)| range.start() == start)
    };
    let is_file =
        |at| matches!(source(at), Some((_, Source::File { offset, .. })) if offset == page);
    let is_memory =
        |at| matches!(source(at), Some((_, Source::User(user))) if user == part.start());
    map(0).unwrap();
    assert!(is_file(0));
    // This file alone, once; then a limit, which the address would meet as well.
    table.kernel().answer(&[Answer::Fail(Errno::EINVAL), Answer::Yes], &[]);
    map(8).unwrap();
    assert!(is_memory(8));
    table.kernel().answer(&[Answer::Fail(Errno::ENOMEM)], &[]);
    assert!(map(16).is_err());
    map(16).unwrap();
    assert!(is_file(16));
    // No file at all, from now on; and nothing, where the address is refused, too.
    table.kernel().answer(&[Answer::Fail(os::ENOTTY), Answer::Fail(Errno::ENOMEM)], &[]);
    assert!(map(24).is_err());
    let before = table.requests().maps;
    map(24).unwrap();
    assert!(is_memory(24));
    assert_eq!(table.requests().maps, before + 1);
    drop(memory);
    assert_eq!((table.mappings(), kept.strong_count()), (4, 4));
    assert_eq!(table.unmap_all(), Ok(8 * page));
    assert_eq!(kept.strong_count(), 0);
}

#[test]
fn the_memory_behind_a_part_is_found_whole_and_in_order() {
    let page = page();
    let table = table();
    let memories = [memory(4), memory(4)];
    map(&table, &memories[0], 0).unwrap();
    map(&table, &memories[1], 4 * page).unwrap();
    let found = table.memory_in(iovas(3 * page, 6 * page - 1)).unwrap();
    let ranges: Vec<_> = found.iter().map(|(range, _)| *range).collect();
    assert_eq!(ranges, [iovas(3 * page, 4 * page - 1), iovas(4 * page, 6 * page - 1)]);
    for ((_, source), (owner, skip, pages)) in found.iter().zip([(0, 3, 1), (1, 0, 2)]) {
        let (memory, user) = source.as_ref().unwrap();
        assert!(Arc::ptr_eq(memory, &memories[owner]));
        assert_eq!(*user, memory.sub_range(skip * page, pages * page).unwrap());
    }
    let hole = iovas(3 * page, 9 * page - 1);
    assert_eq!(table.memory_in(hole).map(drop), Err(Error::NotMapped { range: hole }));
    // A copy is none of this process's memory.
    let whole = iovas(0, 8 * page - 1);
    let at = Iova::new(16 * page);
    table.copy(&limits(), &table, whole, at, Prot::READ, Label::caller()).unwrap();
    let copied = table.memory_in(iovas(16 * page, 17 * page - 1)).unwrap();
    assert!(matches!(copied.as_slice(), [(_, None)]));
    drop((found, copied));
    assert_eq!(table.unmap_all(), Ok(16 * page));
}

#[test]
fn what_the_kernel_does_not_copy_is_mapped_all_of_it_or_nothing() {
    let page = page();
    let (from, to) = (table(), table());
    let memories = [memory(4), memory(4)];
    map(&from, &memories[0], 0).unwrap();
    map(&from, &memories[1], 4 * page).unwrap();
    let source = iovas(3 * page, 6 * page - 1);
    let copy = || {
        let at = Iova::new(64 * page);
        to.copy_or_map(&limits(), &from, source, at, Prot::READ, Label::caller())
    };
    let kinds = || -> Vec<_> {
        let is_memory = |(_, source)| matches!(source, Source::User(_));
        to.kernel().areas().into_iter().map(is_memory).collect()
    };
    copy().unwrap();
    assert_eq!((kinds(), to.unmap_all()), (vec![false], Ok(3 * page)));
    for errno in [Errno::EINVAL, Errno::ENOENT] {
        to.kernel().answer(&[Answer::Fail(errno)], &[]);
        copy().unwrap();
        assert_eq!(kinds(), [true, true]);
        assert_eq!(to.unmap_all(), Ok(3 * page));
    }
    // A limit would be met again; and of what is mapped in its place the second fails.
    let no = Errno::ENOMEM;
    to.kernel().answer(&[Answer::Fail(no)], &[]);
    assert!(copy().is_err());
    assert_eq!(to.requests().maps, 1 + 2 * 3 + 1);
    to.kernel().answer(&[Answer::Fail(Errno::EINVAL), Answer::Yes, Answer::Fail(no)], &[]);
    assert!(copy().is_err());
    assert_eq!((to.mappings(), kinds()), (0, vec![]));
    drop((from, to));
    assert!(memories.iter().all(|memory| Arc::strong_count(memory) == 1));
}
