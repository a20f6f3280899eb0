use super::*;
use crate::MemoryKind;

fn memory(pages: u64) -> Memory {
    Memory::new(MemoryKind::Base, pages * sys::page_size()).unwrap()
}

/// A registrar with rings, where the system has any.
fn rings() -> Option<Registrar> {
    Registrar::io_uring().inspect_err(|error| eprintln!("SKIP: {error}")).ok()
}

fn removed(counts: &mut LockCounts, start: u64, end: u64) -> Vec<(u64, u64)> {
    let mut ranges = Vec::new();
    counts.remove(start, end, |start, end| ranges.push((start, end)));
    ranges
}

#[test]
fn only_pages_that_no_pin_has_are_unlocked() {
    let mut counts = LockCounts::default();
    counts.add(0, 10);
    counts.add(4, 6);
    counts.add(8, 20);
    assert_eq!(removed(&mut counts, 0, 10), [(0, 4), (6, 8)]);
    assert_eq!(removed(&mut counts, 4, 6), [(4, 6)]);
    assert_eq!(removed(&mut counts, 8, 20), [(8, 20)]);
    assert!(counts.edges.is_empty(), "{counts:?}");
}

#[test]
fn neighbouring_locks_keep_the_edge_between_them() {
    let mut counts = LockCounts::default();
    counts.add(0, 5);
    counts.add(5, 9);
    assert_eq!(removed(&mut counts, 0, 5), [(0, 5)]);
    assert_eq!(removed(&mut counts, 5, 9), [(5, 9)]);
    assert!(counts.edges.is_empty(), "{counts:?}");
}

#[test]
fn lock_counts_agree_with_one_count_for_each_page() {
    let (mut counts, mut model) = (LockCounts::default(), [0_u32; 32]);
    let (mut held, mut seed) = (Vec::new(), 12345_u64);
    let mut random = |bound: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % bound
    };
    for _ in 0..5000 {
        if held.is_empty() || (held.len() < 12 && random(2) == 0) {
            let start = random(31);
            let end = start + 1 + random(32 - start - 1).min(9);
            counts.add(start, end);
            model[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()]
                .iter_mut()
                .for_each(|count| *count += 1);
            held.push((start, end));
        } else {
            let place = random(u64::try_from(held.len()).unwrap());
            let (start, end) = held.swap_remove(usize::try_from(place).unwrap());
            let mut expected = Vec::new();
            for page in start..end {
                let count = &mut model[usize::try_from(page).unwrap()];
                *count -= 1;
                if *count == 0 {
                    expected.push(page);
                }
            }
            let pages = removed(&mut counts, start, end).into_iter().flat_map(|(s, e)| s..e);
            assert_eq!(pages.collect::<Vec<_>>(), expected);
        }
    }
    while let Some((start, end)) = held.pop() {
        let _ = removed(&mut counts, start, end);
    }
    assert!(counts.edges.is_empty(), "{counts:?}");
}

/// How many slots are free.
#[test]
fn where_any_table_will_do_those_that_are_made_come_first() {
    let Some(Registrar::IoUring(tables)) = rings() else { return };
    let all = |slots: u32| usize::try_from(slots).unwrap();
    let made = || tables.tables.iter().filter(|table| table.get().is_some()).count();
    let other = tables.take(&[(Some(9), 1)]).unwrap();
    let taken = tables.take(&[(None, all(2 * TABLE_SLOTS - 1))]).unwrap();
    assert_eq!((taken[0], taken[255], taken[256]), (0, 255, 9 * TABLE_SLOTS + 1));
    assert_eq!(made(), 2, "no ring was opened for it");
    let more = tables.take(&[(None, 1)]).unwrap();
    assert_eq!((&*more, made()), (&[TABLE_SLOTS][..], 3));
    [other, taken, more].iter().for_each(|slots| tables.give_back(slots));
}

fn free(tables: &Tables) -> usize {
    tables.free.lock().unwrap().iter().map(Vec::len).sum()
}

#[test]
fn full_tables_are_refused_and_say_how_many_slots_are_free() {
    let Some(Registrar::IoUring(tables)) = rings() else { return };
    let made = || tables.tables.iter().filter(|table| table.get().is_some()).count();
    let all = |slots: u32| usize::try_from(slots).unwrap();
    assert_eq!(made(), 1);
    let first = tables.take(&[(Some(0), all(TABLE_SLOTS))]).unwrap();
    assert_eq!((made(), first[0], first[255]), (1, 0, 255));
    // Of a table that is full the next one takes the place, and the first that of the last.
    let next = tables.take(&[(Some(0), 1), (Some(TABLES - 1), 1)]).unwrap();
    assert_eq!((&*next, made()), (&[TABLE_SLOTS, SLOTS - TABLE_SLOTS][..], 3));
    let rest = tables.take(&[(Some(TABLES - 1), all(SLOTS - TABLE_SLOTS - 3))]).unwrap();
    assert_eq!((rest[0], rest[255]), (SLOTS - TABLE_SLOTS + 1, TABLE_SLOTS + 1));
    assert_eq!(tables.take(&[(Some(3), 1), (Some(4), 1)]), Err(TakeError::Full { free: 1 }));
    [first, next, rest].iter().for_each(|slots| tables.give_back(slots));
    assert_eq!(tables.take(&[(Some(5), all(SLOTS))]).unwrap().len(), 1 << 14);
}

#[test]
fn memory_of_each_table_is_pinned_and_let_go() {
    let Some(registrar) = rings() else { return };
    let Registrar::IoUring(tables) = &registrar else { unreachable!() };
    let memory = memory(1);
    let pins = || (0..TABLE_SLOTS + 2).map(|_| registrar.register(&memory, memory.user_range(), 0));
    let pins: Vec<_> = pins().map(Result::unwrap).collect();
    // A short range takes the ring that is there, and the next one where that is full.
    assert_eq!(pins[0].slots, [0]);
    assert_eq!(pins[255].slots, [255]);
    assert_eq!(pins.last().unwrap().slots, [TABLE_SLOTS + 1]);
    let made = tables.tables.iter().filter(|table| table.get().is_some()).count();
    assert_eq!(made, 2);
    for pin in pins {
        registrar.unregister(&memory, pin).unwrap();
    }
    assert_eq!(free(tables), 1 << 14);
    // A slot that holds memory still cannot be had: the same number is taken again at once.
    let again = registrar.register(&memory, memory.user_range(), 0).unwrap();
    registrar.unregister(&memory, again).unwrap();
}

#[test]
fn pieces_end_at_multiples_and_leave_nothing_out() {
    let of = |first, last, step| pieces(first, last, step).collect::<Vec<_>>();
    assert_eq!(of(3, 9, 4), [(3, 1), (4, 4), (8, 2)]);
    assert_eq!(of(4, 7, 4), [(4, 4)]);
    assert_eq!(of(5, 5, 4), [(5, 1)]);
    assert_eq!(of(5, 1 << 50, u64::MAX), [(5, (1 << 50) - 4)]);
}

/// What is registered of 64 pages in chunks of 2 pages and in parts of 8.
fn filling<'t>(tables: &'t Tables, memory: &Memory) -> Filling<'t> {
    let page = sys::page_size();
    Filling::take(tables, memory.user_range(), 2 * page, 8 * page).unwrap()
}

#[test]
fn parts_are_in_tables_of_their_own_whichever_thread_registers_them() {
    let Some(Registrar::IoUring(tables)) = rings() else { return };
    let (memory, page) = (memory(64), sys::page_size());
    for threads in [1, 2, 4] {
        let filling = filling(&tables, &memory);
        filling.fill(&memory, threads).unwrap();
        let (start, last) = (memory.user_range().start().get(), memory.user_range().last().get());
        for (at, _) in pieces(start, last, 2 * page) {
            let place = usize::try_from(at / (2 * page) - start / (2 * page)).unwrap();
            let table = at / (8 * page) % u64::from(TABLES);
            assert_eq!(u64::from(filling.slots[place] / TABLE_SLOTS), table, "{at:#x}");
        }
        assert!(free(&tables) <= (1 << 14) - 32);
        drop(filling);
        assert_eq!(free(&tables), 1 << 14);
    }
}

#[test]
fn whichever_registration_fails_all_slots_are_free_again() {
    let Some(Registrar::IoUring(tables)) = rings() else { return };
    let memory = memory(64);
    for threads in [1, 4] {
        for fails in 0..32 {
            let mut filling = filling(&tables, &memory);
            // There is no such slot.
            let slot = std::mem::replace(&mut filling.slots[fails], u32::MAX);
            assert_eq!(filling.fill(&memory, threads), Err(Errno::EINVAL));
            drop(filling);
            tables.give_back(&[slot]);
            assert_eq!(free(&tables), 1 << 14, "{fails}");
        }
    }
}

#[test]
fn a_panic_leaves_no_slot_taken() {
    let Some(Registrar::IoUring(tables)) = rings() else { return };
    let memory = memory(64);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let filling = filling(&tables, &memory);
        filling.fill(&memory, 2).unwrap();
        assert!(free(&tables) < 1 << 14);
        panic!("while memory is registered");
    }));
    assert!(panicked.is_err());
    assert_eq!(free(&tables), 1 << 14);
}

#[test]
fn no_page_is_in_two_parts() {
    assert_eq!(part_of(&memory(1)), PART);
    let file = Memory::new(MemoryKind::Memfd, 1 << 20).unwrap();
    assert_eq!(part_of(&file), PART);
}

#[test]
fn buffers_are_short_where_their_pages_and_ranges_are() {
    let range = |len: u64| UserRange::from_len(dmaspan::UserAddr::new(0), len).unwrap();
    let chunk = |len, page_size| chunk_of(range(len), page_size);
    assert_eq!((chunk(4096, 4096), chunk(64 << 30, 2 << 20)), (64 << 20, 64 << 20));
    assert_eq!((chunk((64 << 30) + 4096, 4096), chunk(1 << 46, 4096)), (1 << 30, 1 << 30));
    assert_eq!(chunk(1 << 30, 1 << 30), 1 << 30);
}

#[test]
fn long_buffers_are_used_where_slots_are_few() {
    let Some(registrar) = rings() else { return };
    let Registrar::IoUring(tables) = &registrar else { unreachable!() };
    let memory = Memory::new(MemoryKind::Base, 130 << 20).unwrap();
    let start = memory.user_range().start().get();
    let end = start + (130 << 20);
    // Short buffers are cut at the first multiple of 64 MiB that is none of a GiB, long ones not.
    let mut boundary = start.next_multiple_of(64 << 20);
    if boundary.is_multiple_of(1 << 30) {
        boundary += 64 << 20;
    }
    assert!(start < boundary && boundary < end, "{start:#x}");
    let page = sys::page_size();
    let around = dmaspan::UserAddr::new(boundary - page);
    let range = UserRange::from_len(around, 2 * page).unwrap();
    let offset = boundary - page - start;
    let two = registrar.register(&memory, range, offset).unwrap();
    assert_eq!(two.slots.len(), 2);
    registrar.unregister(&memory, two).unwrap();
    let taken = tables.take(&[(Some(0), usize::try_from(SLOTS - 1).unwrap())]).unwrap();
    let one = registrar.register(&memory, range, offset).unwrap();
    assert_eq!(one.slots.len(), 1);
    registrar.unregister(&memory, one).unwrap();
    tables.give_back(&taken);
}

#[test]
fn slots_of_a_failed_registration_are_free_again() {
    let Some(registrar) = rings() else { return };
    let memory = memory(4);
    let Registrar::IoUring(tables) = &registrar else { unreachable!() };
    let free = || free(tables);
    let before = free();
    // The kernel refuses what is not mapped; this range starts in the memory and ends beyond it.
    let whole = memory.user_range();
    let beyond = UserRange::from_len(whole.start(), 3 << 30).unwrap();
    let error = fill_slots(tables, &memory, beyond).unwrap_err();
    assert!(matches!(error, RegisterError::Refused { errno: Errno::EFAULT, .. }), "{error}");
    assert_eq!(free(), before);
    let registration = registrar.register(&memory, whole, 0).unwrap();
    assert_eq!(free(), before - registration.slots.len());
    registrar.unregister(&memory, registration).unwrap();
    assert_eq!(free(), before);
}

#[test]
fn every_setup_error_says_what_to_do() {
    for errno in [Errno::EPERM, os::ENOSYS, Errno::EINVAL, Errno::ENOMEM, Errno::EIO] {
        let text = RegisterError::Unavailable { errno }.to_string();
        assert!(text.starts_with("io_uring cannot be used"), "{text}");
        assert!(!setup_advice(errno).is_empty());
    }
    let text = RegisterError::Unavailable { errno: Errno::EPERM }.to_string();
    assert!(text.contains("/proc/sys/kernel/io_uring_disabled"), "{text}");
    let text = RegisterError::Unavailable { errno: os::EMFILE }.to_string();
    assert!(text.contains("RLIMIT_NOFILE"), "{text}");
}

#[test]
fn refusals_name_the_range_and_the_reason() {
    let range = memory(1).user_range();
    for (errno, part) in [
        (Errno::EFAULT, "Bad address"),
        (Errno::from_raw(libc::EOPNOTSUPP), "not supported"),
        (Errno::ENOMEM, ""),
    ] {
        let text = RegisterError::of(range, errno).to_string();
        assert!(text.contains(&range.to_string()) && text.contains(part), "{text}");
    }
}
