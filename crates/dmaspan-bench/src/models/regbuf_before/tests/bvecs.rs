use super::*;

/// Which folio each of ten pages is of: one of four pages, two of two, and two alone.
fn mixed(page: PhysAddr) -> FolioBefore {
    let at = |head: u64, order| FolioBefore { head: PhysAddr::new(head * PAGE), order };
    match page.get() / PAGE {
        0..4 => at(0, 2),
        number @ 4..8 => at(number & !1, 1),
        number => at(number, 0),
    }
}

/// Whether pages lie in large folios of one size so that the page at each place is where it would
/// be if the folios were one, and the user's memory began in the middle of it.
fn are_whole(pages: &[PhysAddr]) -> bool {
    let folios: Vec<_> = pages.iter().map(|page| mixed(*page)).collect();
    let index = |n: usize| (pages[n].get() - folios[n].head.get()) / PAGE;
    (0..pages.len()).all(|n| {
        let place = (index(0) + u64::try_from(n).unwrap()) % folios[0].pages();
        let goes_on = n == 0 || place == 0 || folios[n] == folios[n - 1];
        folios[n].order == folios[0].order && folios[0].order > 0 && index(n) == place && goes_on
    })
}

fn check(pages: &[PhysAddr], coalescing: Coalescing) {
    let count = u64::try_from(pages.len()).unwrap();
    let (offset, len) = (5, count * PAGE - 5 - 7);
    let buffer = buffer(pages, offset, len, mixed, coalescing);
    let bvecs = buffer.bvecs();
    let all = buffer.import(0, len, Direction::ToDevice).unwrap();
    assert_eq!(joined(all), expected(pages, offset, len), "{pages:?}, {coalescing:?}");
    assert_eq!(bvecs.iter().map(|bvec| u64::from(bvec.len)).sum::<u64>(), len);
    assert!(bvecs[1..].iter().all(|bvec| bvec.offset == 0));
    let size = lg2::size(buffer.folio_shift().unwrap());
    let inner = bvecs.get(1..bvecs.len() - 1).unwrap_or_default();
    assert!(inner.iter().all(|bvec| u64::from(bvec.len) == size));

    let folio = mixed(pages[0]);
    let coalesced = pages.len() > 1
        && are_whole(pages)
        && match coalescing {
            Coalescing::None => false,
            Coalescing::SingleHugepage => {
                // A folio that is pinned twice is two runs.
                let neighbours = pages.windows(2).all(|two| two[0].get() + PAGE == two[1].get());
                neighbours && pages.iter().all(|page| mixed(*page) == folio)
            }
            Coalescing::SameFolios => true,
        };
    let first = (pages[0].get() - folio.head.get()) / PAGE;
    let bvec_count = if coalesced { (first + count).div_ceil(folio.pages()) } else { count };
    assert_eq!(u64::try_from(bvecs.len()).unwrap(), bvec_count, "{pages:?}, {coalescing:?}");
}

#[test]
fn every_short_array_of_pages_is_coalesced_where_it_is_whole_folios_and_nowhere_else() {
    for count in 1..=5 {
        for mut choice in 0..10u32.pow(count) {
            let mut pages = Vec::new();
            for _ in 0..count {
                pages.push(PhysAddr::new(u64::from(choice % 10) * PAGE));
                choice /= 10;
            }
            ALL.into_iter().for_each(|coalescing| check(&pages, coalescing));
        }
    }
}

fn counts(
    pages: &[PhysAddr],
    offset: u64,
    len: u64,
    folios: impl Fn(PhysAddr) -> FolioBefore + Copy,
) -> [usize; 3] {
    ALL.map(|coalescing| buffer(pages, offset, len, folios, coalescing).bvecs().len())
}

#[test]
fn hugepages_at_odd_offsets_are_a_bvec_each() {
    let pages = apart(5);
    assert_eq!(counts(&pages, 0, 4 * HUGE, all_of(9)), [2048, 2048, 4]);
    assert_eq!(counts(&pages, 0x234, 4 * HUGE - 0x234, all_of(9)), [2048, 2048, 4]);
    assert_eq!(counts(&pages, 0x234, 4 * HUGE, all_of(9)), [2049, 2049, 5]);
    // From the last byte of a hugepage to the first of another.
    assert_eq!(counts(&pages, HUGE - 1, 2, all_of(9)), [2, 2, 2]);
    assert_eq!(counts(&pages, HUGE - 1, 2 * HUGE + 2, all_of(9)), [1026, 1026, 4]);
    // Within one, which is entered in its middle and left early.
    assert_eq!(counts(&pages, 0x1234, HUGE - 0x2000, all_of(9)), [511, 1, 1]);
    assert_eq!(counts(&pages, 0x1234, PAGE - 0x234, all_of(9)), [1, 1, 1]);
}

#[test]
fn folios_of_two_sizes_are_not_coalesced() {
    let pages = apart(2);
    let second_is_small = |page: PhysAddr| {
        let order = if page.get() < 2 * HUGE { 9 } else { 4 };
        all_of(order)(page)
    };
    assert_eq!(counts(&pages, 0, 2 * HUGE, second_is_small), [1024; 3]);
    assert_eq!(counts(&pages, 0, HUGE, second_is_small), [512, 1, 1]);
    assert_eq!(counts(&pages, HUGE, HUGE, second_is_small), [512, 512, 32]);
}

#[test]
fn a_hugepage_between_base_pages_is_not_coalesced() {
    let pages = apart(3);
    let middle_is_huge = |page: PhysAddr| {
        let order = if page.get() / HUGE == 3 { 9 } else { 0 };
        all_of(order)(page)
    };
    assert_eq!(counts(&pages, 0, 3 * HUGE, middle_is_huge), [1536; 3]);
    assert_eq!(counts(&pages, HUGE - PAGE, HUGE + 2 * PAGE, middle_is_huge), [514; 3]);
    assert_eq!(counts(&pages, HUGE, HUGE + 1, middle_is_huge), [513; 3]);
    assert_eq!(counts(&pages, HUGE, HUGE, middle_is_huge), [512, 1, 1]);
    assert_eq!(counts(&pages, 0, HUGE, middle_is_huge), [512; 3]);
}

#[test]
fn a_hugepage_without_one_of_its_pages_is_not_coalesced() {
    for gap in [1, 255, 510] {
        let mut pages = apart(2);
        pages.remove(gap);
        assert_eq!(counts(&pages, 0, 2 * HUGE - PAGE, all_of(9)), [1023; 3], "{gap}");
    }
    // Without its last page, which another hugepage goes on behind.
    let mut pages = apart(2);
    pages.remove(511);
    assert_eq!(counts(&pages, 0, 2 * HUGE - PAGE, all_of(9)), [1023; 3]);
    // Without its first page where it is not the first of the buffer.
    let mut pages = apart(2);
    pages.remove(512);
    assert_eq!(counts(&pages, 0, 2 * HUGE - PAGE, all_of(9)), [1023; 3]);
}

#[test]
fn a_folio_longer_than_a_bvec_can_say_is_not_coalesced() {
    let pages = pages_of(&[Span::new(PhysAddr::new(1 << 40), HUGE).unwrap()]);
    assert_eq!(counts(&pages, 0, HUGE, all_of(19)), [512, 1, 1]);
    assert_eq!(counts(&pages, 0, HUGE, all_of(20)), [512; 3]);
}

#[test]
fn bookkeeping_is_sixteen_bytes_a_bvec_and_eight_a_page_for_a_while() {
    let pages = apart(4);
    let kept = |coalescing| buffer(&pages, 0, 4 * HUGE, all_of(9), coalescing).bytes().kept;
    assert_eq!(kept(Coalescing::None) - kept(Coalescing::SameFolios), 16 * 2044);
    let bytes = buffer(&pages, 0, 4 * HUGE, all_of(9), Coalescing::SameFolios).bytes();
    assert_eq!(bytes.temporary, 8 * 2048);
}

#[test]
fn too_long_buffers_and_wrong_pages_are_refused() {
    let pages = apart(1);
    let new = |len, count: usize| {
        let user = UserRange::from_len(UserAddr::new(1), len).unwrap();
        BufferBefore::new(user, &pages[..count], &all_of(9), Coalescing::SameFolios).unwrap_err()
    };
    assert_eq!(new(2 * PAGE, 2), RegbufBeforeError::Pages { pages: 2, needed: 3 });
    assert_eq!(new(2 * PAGE, 4).errno(), Errno::EFAULT);
    assert_eq!(new(MAX_LEN + 1, 4).errno(), Errno::EINVAL);
}
