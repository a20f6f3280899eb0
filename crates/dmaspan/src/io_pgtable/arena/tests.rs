extern crate std;

use super::*;

const PAGE: TableShape =
    TableShape { lg2_size: 12, lg2_align: 12, max_paddr: PhysAddr::new(lg2::mask(48)) };

fn arena() -> Arena {
    Arena::new(PhysAddr::new(0x4000_0000), 1 << 20)
}

fn reserve(arena: &Arena, shape: TableShape, count: usize) -> Result<ArenaList, NoTables> {
    TableMemory::<u64>::reserve(arena, shape, count)
}

#[expect(unsafe_code, reason = "a test calls what the walker calls")]
fn promise() -> Promise<'static> {
    // SAFETY: the tests hand in lists of the arena, of one shape, that no hardware reads.
    unsafe { Promise::new() }
}

fn free(arena: &Arena, shape: TableShape, list: ArenaList) {
    TableMemory::<u64>::free(arena, promise(), shape, list);
}

fn take<'a>(arena: &'a Arena, shape: TableShape, list: &mut ArenaList) -> Fresh<'a, u64> {
    TableMemory::<u64>::take(arena, promise(), shape, list).unwrap()
}

#[test]
fn the_table_freed_last_is_the_next_one_taken() {
    let arena = arena();
    let mut list = reserve(&arena, PAGE, 3).unwrap();
    let paddr = take(&arena, PAGE, &mut list).paddr();
    free(&arena, PAGE, list);
    let mut list = ArenaList::default();
    list.push(&arena.shared, arena.unit_of(paddr));
    free(&arena, PAGE, list);
    assert_eq!(arena.tables(), 0);
    let mut list = reserve(&arena, PAGE, 1).unwrap();
    assert_eq!(take(&arena, PAGE, &mut list).paddr(), paddr);
}

#[test]
fn a_reservation_is_all_or_nothing() {
    let arena = arena();
    let held = reserve(&arena, PAGE, 250).unwrap();
    assert_eq!(reserve(&arena, PAGE, 7).unwrap_err(), NoTables { asked: 7 });
    assert_eq!(arena.tables(), 250);
    assert_eq!(arena.table_bytes(), 250 << 12);
    let rest = reserve(&arena, PAGE, 6).unwrap();
    free(&arena, PAGE, rest);
    free(&arena, PAGE, held);
    assert_eq!(arena.tables(), 0);
}

#[test]
fn tables_lie_where_hardware_reaches_them() {
    let arena = arena();
    let low = TableShape { max_paddr: PhysAddr::new(0x4000_1fff), ..PAGE };
    assert!(reserve(&arena, low, 3).is_err());
    let list = reserve(&arena, low, 2).unwrap();
    assert!(reserve(&arena, low, 1).is_err());
    assert!(reserve(&arena, PAGE, 1).is_ok());
    free(&arena, low, list);
    assert!(reserve(&arena, low, 2).is_ok());
}

#[test]
fn tables_of_all_sizes_are_aligned_and_disjoint() {
    let arena = arena();
    let mut ranges = Vec::new();
    // Miri takes minutes for the larger ones.
    let sizes: &[u32] = if cfg!(miri) { &[6, 10, 12, 10] } else { &[6, 10, 16, 12, 14, 10, 17] };
    for &lg2_size in sizes {
        let shape = TableShape { lg2_size, lg2_align: lg2_size, ..PAGE };
        let mut list = reserve(&arena, shape, 1).unwrap();
        let mut fresh = take(&arena, shape, &mut list);
        assert!(lg2::is_aligned(fresh.paddr().get(), lg2_size));
        assert_eq!(fresh.words().len() << 3, 1 << lg2_size);
        fresh.words().fill(u64::from(lg2_size).to_le());
        ranges.push((fresh.paddr().get(), lg2_size));
        TableMemory::<u64>::publish(&arena, fresh);
    }
    for (paddr, lg2_size) in ranges {
        for word in (paddr..paddr + lg2::size(lg2_size)).step_by(8) {
            assert_eq!(arena.load::<u64>(PhysAddr::new(word)), Ok(lg2_size.into()));
        }
    }
}

#[test]
fn a_table_is_read_by_the_words_that_it_was_published_with_and_by_no_others() {
    let arena = arena();
    let mut list = reserve(&arena, PAGE, 2).unwrap();
    let (long, short) = (take(&arena, PAGE, &mut list).paddr(), take(&arena, PAGE, &mut list));
    let short = short.paddr();
    for times in 0..2 {
        // Each is of both in turn: its unit has been of the other words before.
        let (long, short) = if times == 0 { (long, short) } else { (short, long) };
        arena.shared.publish::<u64>(arena.unit_of(long));
        arena.shared.publish::<u32>(arena.unit_of(short));
        for at in [0, 4, 8, 4092] {
            let (at_long, at_short) = (long.wrapping_add(at), short.wrapping_add(at));
            let other = |paddr, lg2_bytes| NotInTree::OtherWord { paddr, lg2_bytes };
            assert_eq!(arena.load::<u32>(at_long), Err(other(at_long, 3)));
            let refused = arena.exchange::<u32>(promise(), at_long, 0, 1);
            assert_eq!(refused, Err(other(at_long, 3)));
            assert!(arena.load::<u32>(at_short).is_ok());
            if at % 8 == 0 {
                assert!(arena.load::<u64>(at_long).is_ok());
                assert_eq!(arena.load::<u64>(at_short), Err(other(at_short, 2)));
            }
        }
        for (at, lg2_size) in [long, short].into_iter().flat_map(|at| [(at, 11), (at, 12)]) {
            let table = TableAddr::new(at, lg2_size);
            let words = TableMemory::<u64>::entries(&arena, &table).len();
            assert_eq!(words, if at == long { 1 << (lg2_size - 3) } else { 0 });
            let words = TableMemory::<u32>::entries(&arena, &table).len();
            assert_eq!(words, if at == short { 1 << (lg2_size - 2) } else { 0 });
        }
    }
    // What a corrupt link of the other tree leads to is not detached from its own.
    let mut detached = ArenaList::default();
    TableMemory::<u64>::retire(&arena, &mut detached, TableAddr::new(long, 12));
    TableMemory::<u32>::retire(&arena, &mut detached, TableAddr::new(short, 12));
    assert!(detached.pop(&arena.shared).is_none());
    let between = long.wrapping_add(10);
    assert_eq!(arena.load::<u32>(between), Err(NotInTree::Outside { paddr: between }));
}

/// A table of words that one thread changes as the walker does, while others read by both sizes.
#[test]
fn a_clone_that_reads_by_other_words_beside_the_owner_is_refused_and_races_with_nothing() {
    let arena = arena();
    let mut list = reserve(&arena, PAGE, 1).unwrap();
    let fresh = take(&arena, PAGE, &mut list);
    let (paddr, clone) = (fresh.paddr(), arena.clone());
    TableMemory::<u64>::publish(&arena, fresh);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for at in (0..64).step_by(4).map(|at| paddr.wrapping_add(at)) {
                let other = NotInTree::OtherWord { paddr: at, lg2_bytes: 3 };
                assert_eq!(clone.load::<u32>(at), Err(other));
            }
        });
        scope.spawn(|| {
            let entries = TableMemory::<u64>::entries(&arena, &TableAddr::new(paddr, 12));
            for word in &entries[..8] {
                u64::install(word, 1).unwrap();
                assert_eq!(u64::exchange(word, 2), 1);
            }
        });
    });
    assert_eq!(arena.load::<u64>(paddr), Ok(2));
}

#[test]
#[expect(unsafe_code, reason = "memory of a test")]
fn an_arena_over_lent_memory_stays_in_it_and_lets_it_go() {
    let layout = Layout::from_size_align(8 << 20, 1 << LARGEST_LG2).unwrap();
    // SAFETY: the layout's size is not 0.
    let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
    let kept = Arc::new(());
    let over = |memory, base, bytes| {
        // SAFETY: the memory is freed at the end of the test, and one arena is used.
        unsafe { Arena::over(memory, PhysAddr::new(base), bytes, Box::new(kept.clone())) }
    };
    assert!(over(memory, 1 << 20, 8 << 20).is_none());
    assert!(over(memory, 0, 2 << 20).is_none());
    assert!(over(memory, 0, (8 << 20) - 1).is_none());
    assert!(over(memory, 0u64.wrapping_sub(2 << 20), 8 << 20).is_none());
    let arena = over(memory, 1 << 30, 8 << 20).unwrap();
    let shape = TableShape { lg2_size: 21, lg2_align: 21, max_paddr: PhysAddr::new(u64::MAX) };
    assert!(reserve(&arena, shape, 4).is_err());
    let mut list = reserve(&arena, shape, 3).unwrap();
    for _ in 0..3 {
        let mut fresh = take(&arena, shape, &mut list);
        let offset = fresh.paddr().get() - (1 << 30);
        assert!(offset <= 4 << 20, "{offset:#x}");
        // Miri takes minutes for all of them.
        let filled = if cfg!(miri) { 64 } else { fresh.words().len() };
        fresh.words()[..filled].fill(7);
        TableMemory::<u64>::publish(&arena, fresh);
    }
    assert_eq!(Arc::strong_count(&kept), 2);
    drop(arena);
    assert_eq!(Arc::strong_count(&kept), 2, "hardware may read the tables that were published");
    let other = over(memory, 1 << 30, 8 << 20).unwrap();
    let list = reserve(&other, PAGE, 1).unwrap();
    free(&other, PAGE, list);
    assert_eq!(Arc::strong_count(&kept), 3);
    drop(other);
    assert_eq!(Arc::strong_count(&kept), 2);
    // SAFETY: it was allocated above, and no arena is left.
    unsafe { dealloc(memory.as_ptr(), layout) };
}

#[test]
fn a_list_of_an_arena_that_is_gone_is_refused_by_every_later_one() {
    let gone = arena();
    let mut list = reserve(&gone, PAGE, 2).unwrap();
    drop(gone);
    // The allocator gives the same memory again soon, if not at once.
    let later: Vec<_> = (0..if cfg!(miri) { 4 } else { 64 }).map(|_| arena()).collect();
    for arena in &later {
        let _own = reserve(arena, PAGE, 2).unwrap();
        let taken = TableMemory::<u64>::take(arena, promise(), PAGE, &mut list);
        assert!(taken.is_none(), "one table is had twice: {taken:?}");
    }
    free(&later[0], PAGE, list);
    assert_eq!(later[0].tables(), 2);
}

#[test]
fn a_table_that_lost_a_race_is_not_read_while_it_is_filled_again() {
    let arena = arena();
    let mut list = reserve(&arena, PAGE, 1).unwrap();
    let fresh = take(&arena, PAGE, &mut list);
    let paddr = fresh.paddr();
    assert_eq!(arena.load::<u64>(paddr), Err(NotInTree::Freed { paddr }));
    TableMemory::<u64>::publish(&arena, fresh);
    // As the walker takes back what another thread's link came before.
    arena.shared.set(arena.unit_of(paddr), State::Retired);
    list.push(&arena.shared, arena.unit_of(paddr));
    assert!(arena.load::<u64>(paddr).is_ok());
    let _filled = take(&arena, PAGE, &mut list);
    assert_eq!(arena.load::<u64>(paddr), Err(NotInTree::Freed { paddr }));
}

#[test]
fn reading_a_freed_table_is_refused() {
    let arena = arena();
    let mut list = reserve(&arena, PAGE, 1).unwrap();
    let fresh = take(&arena, PAGE, &mut list);
    let paddr = fresh.paddr();
    TableMemory::<u64>::publish(&arena, fresh);
    assert!(arena.load::<u64>(paddr).is_ok());
    list.push(&arena.shared, arena.unit_of(paddr));
    free(&arena, PAGE, list);
    assert_eq!(arena.load::<u64>(paddr), Err(NotInTree::Freed { paddr }));
    let outside = PhysAddr::new(0x1000);
    assert_eq!(arena.load::<u64>(outside), Err(NotInTree::Outside { paddr: outside }));
}

#[test]
#[cfg_attr(miri, ignore = "Miri takes minutes for its megabytes")]
fn an_arena_at_the_top_of_physical_addresses_ends_there() {
    for base in [u64::MAX, LAST_BASE, LAST_BASE - (2 << 20) + 1] {
        let arena = Arena::new(PhysAddr::new(base), 16 << 20);
        let any = TableShape { max_paddr: PhysAddr::new(u64::MAX), ..PAGE };
        assert!(reserve(&arena, any, 512).is_err(), "the last page has the last address");
        let mut list = reserve(&arena, any, 511).unwrap();
        let mut last = 0;
        for _ in 0..511 {
            let fresh = take(&arena, any, &mut list);
            last = last.max(fresh.paddr().get());
            TableMemory::<u64>::publish(&arena, fresh);
        }
        assert_eq!(last, u64::MAX - 0x1fff);
    }
}

#[test]
fn marks_are_set_as_hardware_sets_them() {
    let arena = arena();
    let mut list = reserve(&arena, PAGE, 1).unwrap();
    let mut fresh = take(&arena, PAGE, &mut list);
    fresh.words().fill(0x10u64.to_le());
    let paddr = fresh.paddr();
    assert_eq!(arena.exchange(promise(), paddr, 0u64, 1), Err(NotInTree::Freed { paddr }));
    TableMemory::<u64>::publish(&arena, fresh);
    assert_eq!(arena.exchange(promise(), paddr, 0x11u64, 0x12), Ok(0x10));
    assert_eq!(arena.load::<u64>(paddr), Ok(0x10));
    assert_eq!(arena.exchange(promise(), paddr, 0x10u64, 0x12), Ok(0x10));
    assert_eq!(arena.load::<u64>(paddr), Ok(0x12));
}
