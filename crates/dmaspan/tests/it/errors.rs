//! Bad input: each a typed error that names the range and the limit, with nothing changed.

use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, ConfigError, Error, Format, PageTable};
use dmaspan::{Errno, Iova, PhysAddr, Prot, RangeError, SpanBuf};

use crate::common::{
    PROT, Table, arena, contents, for_all_granules, format, free, map, range, span, table, unmap,
    with_groups,
};

for_all_granules!(
    bad_arguments_of_map_pages_change_nothing,
    bad_arguments_of_map_spans_change_nothing,
    a_collision_anywhere_takes_everything_back,
    unmapping_a_hole_or_part_of_a_leaf_changes_nothing,
    page_unmaps_leave_a_leaf_that_would_be_split,
    an_owner_cannot_leave_its_range,
    a_group_is_split_no_more_than_a_leaf,
);

/// A table with a page at 0, a block at its own size, and a group where there are some.
fn populated<const G: u32>() -> Table<G> {
    let mut table = table::<G>();
    let block = 1u64 << (2 * G - 3);
    map(&mut table, 0, &[span(1 << G, 1 << G)], PROT).unwrap();
    map(&mut table, block, &[span(block, block)], Prot::READ).unwrap();
    table
}

/// Runs `op` on a populated table and requires that it fails so and changes nothing.
fn refused<const G: u32>(
    expected: Error,
    errno: Errno,
    op: impl FnOnce(&mut Table<G>) -> Result<(), Error>,
) {
    let mut table = populated::<G>();
    let (before, tables) = (contents(&mut table), table.memory().tables());
    assert_eq!(op(&mut table), Err(expected));
    assert_eq!(expected.errno(), errno, "{expected}");
    assert_eq!(contents(&mut table), before, "{expected}");
    assert_eq!(table.memory().tables(), tables, "{expected}");
}

fn bad_arguments_of_map_pages_change_nothing<const G: u32>() {
    let g = 1u64 << G;
    let far = 1u64 << 40;
    let page_sizes = format::<G>(48, 48).geometry().page_sizes;
    let last = PhysAddr::new((1 << 48) - 1);
    let aperture = range(0, 1 << 48);
    let pages = |iova: u64, paddr: u64, size: u64, count: u64, prot: Prot| {
        move |table: &mut Table<G>| {
            let (bytes, result) =
                table.whole().map_pages(Iova::new(iova), PhysAddr::new(paddr), size, count, prot);
            assert_eq!(bytes, 0);
            result
        }
    };
    for size in [0, 1, 3 * g, g / 2, 1 << 63] {
        let expected = Error::PageSize { page_size: size, page_sizes };
        refused::<G>(expected, Errno::EINVAL, pages(far, 0, size, 1, PROT));
    }
    let empty = Error::Range(RangeError::Empty { start: far });
    refused::<G>(empty, Errno::EINVAL, pages(far, 0, g, 0, PROT));
    let wraps = Error::Range(RangeError::Wraps { start: far, len: u64::MAX });
    refused::<G>(wraps, Errno::EOVERFLOW, pages(far, 0, g, u64::MAX, PROT));
    let top = u64::MAX - g + 1;
    let wraps = Error::Range(RangeError::Wraps { start: top, len: 2 * g });
    refused::<G>(wraps, Errno::EOVERFLOW, pages(top, 0, g, 2, PROT));
    let beyond = Error::OutsideAperture { range: range(1 << 48, g), aperture };
    refused::<G>(beyond, Errno::ERANGE, pages(1 << 48, 0, g, 1, PROT));
    let crossing = Error::OutsideAperture { range: range((1 << 48) - g, 2 * g), aperture };
    refused::<G>(crossing, Errno::ERANGE, pages((1 << 48) - g, 0, g, 2, PROT));
    let misaligned = Error::Misaligned { range: range(far + 1, g), page_size: g };
    refused::<G>(misaligned, Errno::EINVAL, pages(far + 1, 0, g, 1, PROT));
    let misaligned = Error::MisalignedSpan { span: span(g / 2, g), page_size: g };
    refused::<G>(misaligned, Errno::EINVAL, pages(far, g / 2, g, 1, PROT));
    let outside = Error::OutsideOutput { span: span(1 << 48, g), last };
    refused::<G>(outside, Errno::ERANGE, pages(far, 1 << 48, g, 1, PROT));
    // A run that crosses the limit: Linux wraps it to address 0.
    let outside = Error::OutsideOutput { span: span((1 << 48) - g, 2 * g), last };
    refused::<G>(outside, Errno::ERANGE, pages(far, (1 << 48) - g, g, 2, PROT));
    let wraps = Error::Range(RangeError::Wraps { start: top, len: 2 * g });
    refused::<G>(wraps, Errno::EOVERFLOW, pages(far, top, g, 2, PROT));
    for prot in [Prot::empty(), Prot::CACHE | Prot::NOEXEC] {
        let expected = Error::NoAccess { iova: Iova::new(far) };
        refused::<G>(expected, Errno::EINVAL, pages(far, 0, g, 1, prot));
    }
    let block = 1u64 << (2 * G - 3);
    let occupied = Error::Occupied { leaf: range(0, g) };
    refused::<G>(occupied, Errno::EEXIST, pages(0, 0, g, 1, PROT));
    refused::<G>(occupied, Errno::EEXIST, pages(0, 0, block, 1, PROT));
    let occupied = Error::Occupied { leaf: range(block, block) };
    refused::<G>(occupied, Errno::EEXIST, pages(block + 3 * g, 0, g, 1, PROT));
}

fn bad_arguments_of_map_spans_change_nothing<const G: u32>() {
    let g = 1u64 << G;
    let far = 1u64 << 40;
    let last = PhysAddr::new((1 << 48) - 1);
    let no_spans = Error::NoSpans { iova: Iova::new(far) };
    refused::<G>(no_spans, Errno::EINVAL, |table| map(table, far, &[], PROT));
    let bad = span(3 * g, g / 2);
    let misaligned = Error::MisalignedSpan { span: bad, page_size: g };
    refused::<G>(misaligned, Errno::EINVAL, |t| map(t, far, &[span(0, g), bad], PROT));
    let outside = Error::OutsideOutput { span: span((1 << 48) - g, 2 * g), last };
    refused::<G>(outside, Errno::ERANGE, |t| {
        map(t, far, &[span(0, g), span((1 << 48) - g, 2 * g)], PROT)
    });
    let crossing = range((1 << 48) - g, 2 * g);
    let beyond = Error::OutsideAperture { range: crossing, aperture: range(0, 1 << 48) };
    refused::<G>(beyond, Errno::ERANGE, |t| {
        map(t, (1 << 48) - g, &[span(0, g), span(2 * g, g)], PROT)
    });
    let misaligned = Error::Misaligned { range: range(far + 8, g), page_size: g };
    refused::<G>(misaligned, Errno::EINVAL, |t| map(t, far + 8, &[span(0, g)], PROT));
    let nothing = Error::NoAccess { iova: Iova::new(far) };
    refused::<G>(nothing, Errno::EINVAL, |t| map(t, far, &[span(0, g)], Prot::NOEXEC));
}

fn a_collision_anywhere_takes_everything_back<const G: u32>() {
    let g = 1u64 << G;
    let block = 1u64 << (2 * G - 3);
    // In the first entry, late in a table that exists, behind tables that do not, and a block.
    for (at, occupied) in
        [(0, g), (3 * g, g), (block - g, g), (2 * block, block), (9 * block + 5 * g, g)]
    {
        let mut table = table::<G>();
        map(&mut table, at, &[span(at, occupied)], PROT).unwrap();
        let (before, tables) = (contents(&mut table), table.memory().tables());
        // Scattered, so that most of it are pages, with a tail behind the collision.
        let spans: Vec<_> = (0..12).map(|n| span((2 * n + 1) * (block + g), block)).collect();
        let error = map(&mut table, 0, &spans, PROT).unwrap_err();
        assert_eq!(error, Error::Occupied { leaf: range(at, occupied) });
        assert_eq!(contents(&mut table), before);
        assert_eq!(table.memory().tables(), tables);
    }
}

fn unmapping_a_hole_or_part_of_a_leaf_changes_nothing<const G: u32>() {
    let g = 1u64 << G;
    let block = 1u64 << (2 * G - 3);
    let take = |start: u64, len: u64| {
        move |table: &mut Table<G>| unmap(table, range(start, len)).map(|_| ())
    };
    refused::<G>(Error::Hole { hole: range(g, g) }, Errno::ENOENT, take(0, 2 * g));
    refused::<G>(
        Error::Hole { hole: range(2 * block, block) },
        Errno::ENOENT,
        take(block, 2 * block),
    );
    let split = Error::WouldSplit { leaf: range(block, block) };
    refused::<G>(split, Errno::EINVAL, take(block, g));
    refused::<G>(split, Errno::EINVAL, take(block + g, block - g));
    refused::<G>(split, Errno::EINVAL, take(block + 4 * g, g));
    let misaligned = Error::Misaligned { range: range(0, g / 2), page_size: g };
    refused::<G>(misaligned, Errno::EINVAL, take(0, g / 2));
    let aperture = range(0, 1 << 48);
    let beyond = Error::OutsideAperture { range: range((1 << 48) - g, 2 * g), aperture };
    refused::<G>(beyond, Errno::ERANGE, take((1 << 48) - g, 2 * g));

    // Far behind what the buffer holds, too: all of the range is checked before the first batch.
    let mut table = table::<G>();
    let spans: Vec<_> = (0..100).map(|n| span(2 * n * g, g)).collect();
    map(&mut table, 0, &spans, PROT).unwrap();
    let before = contents(&mut table);
    let mut room = SpanBuf::room::<8>();
    let mut buf = SpanBuf::new(&mut room);
    buf.push(span(0, g)).unwrap();
    let error = table.whole().unmap(range(0, 101 * g), &mut buf).unwrap_err();
    assert_eq!(error, Error::Hole { hole: range(100 * g, g) });
    assert_eq!(buf.spans(), &[span(0, g)], "the caller's spans are untouched");
    assert_eq!(contents(&mut table), before);
}

fn page_unmaps_leave_a_leaf_that_would_be_split<const G: u32>() {
    let g = 1u64 << G;
    let block = 1u64 << (2 * G - 3);
    let mut table = table::<G>();
    map(&mut table, block - 2 * g, &[span(block - 2 * g, block + 2 * g)], PROT).unwrap();
    let unmapped = table.whole().unmap_pages(Iova::new(block - 2 * g), g, 5);
    assert_eq!(unmapped.bytes, 2 * g);
    assert_eq!(unmapped.result, Err(Error::WouldSplit { leaf: range(block, block) }));
    assert_eq!(unmapped.retired.range(), Some(range(block - 2 * g, 2 * g)));
    free(&table, unmapped.retired);
    let unmapped = table.whole().unmap_pages(Iova::new(block + g), g, 1);
    assert_eq!(unmapped.bytes, 0);
    assert_eq!(unmapped.result, Err(Error::WouldSplit { leaf: range(block, block) }));
    assert!(unmapped.retired.is_empty());
    let runs = contents(&mut table).0;
    assert_eq!(runs.len(), 1);
    assert_eq!(runs[0].range, range(block, block));
}

fn an_owner_cannot_leave_its_range<const G: u32>() {
    let g = 1u64 << G;
    let table = table::<G>();
    // SAFETY: nobody else uses the table.
    let owned = unsafe { table.claim(range(4 * g, 4 * g)) };
    let not_owned = |start, len| Error::NotOwned { range: range(start, len), owned: owned.range() };
    let (bytes, result) = owned.map_pages(Iova::new(7 * g), PhysAddr::new(0), g, 2, PROT);
    assert_eq!((bytes, result), (0, Err(not_owned(7 * g, 2 * g))));
    let error = owned.map_spans(Iova::new(3 * g), &[span(0, 2 * g)], PROT).unwrap_err();
    assert_eq!(error.error, not_owned(3 * g, 2 * g));
    assert_eq!(owned.reclaim(range(0, 5 * g)).unwrap_err(), not_owned(0, 5 * g));
    assert_eq!(owned.unmap_pages(Iova::new(0), g, 1).result, Err(not_owned(0, g)));
    assert!(owned.map_spans(Iova::new(4 * g), &[span(0, 4 * g)], PROT).is_ok());
    assert_eq!(owned.iova_to_phys(Iova::new(3 * g)), None);
    assert_eq!(owned.iova_to_phys(Iova::new(4 * g)), Some(PhysAddr::new(0)));
}

fn a_group_is_split_no_more_than_a_leaf<const G: u32>() {
    let g = 1u64 << G;
    let mut table = PageTable::new(with_groups::<G>(), arena()).unwrap();
    let group = ArmLpaeS1::<G>::CONTIGUOUS_SIZES & ArmLpaeS1::<G>::CONTIGUOUS_SIZES.wrapping_neg();
    map(&mut table, group, &[span(4 * group, group)], PROT).unwrap();
    let census = contents(&mut table).1;
    assert_eq!(census, [(group.trailing_zeros(), 1)]);
    let split = Error::WouldSplit { leaf: range(group, group) };
    for (start, len) in [(group, g), (group + g, group - g), (2 * group - g, g)] {
        assert_eq!(unmap(&mut table, range(start, len)), Err(split));
        let unmapped = table.whole().unmap_pages(Iova::new(start), g, len / g);
        assert_eq!((unmapped.bytes, unmapped.result), (0, Err(split)));
    }
    // An occupied entry in the middle of a group keeps the whole group out.
    map(&mut table, 3 * group + 2 * g, &[span(0, g)], PROT).unwrap();
    let error = map(&mut table, 3 * group, &[span(0, group)], PROT).unwrap_err();
    assert_eq!(error, Error::Occupied { leaf: range(3 * group + 2 * g, g) });
    // A call for pages makes no group.
    let pages =
        table.whole().map_pages(Iova::new(8 * group), PhysAddr::new(8 * group), g, group / g, PROT);
    assert_eq!(pages, (group, Ok(())));
    let made: Vec<_> = table.whole().census(range(8 * group, group)).sizes().collect();
    assert_eq!(made, [(G, group / g)]);
    assert_eq!(unmap(&mut table, range(group, group)).unwrap(), [span(4 * group, group)]);
}

#[test]
fn configurations_that_the_architecture_lacks_are_refused() {
    let new = |config| ArmLpaeS1::<12>::new(config).map(|_| ());
    let base = ArmLpaeS1Config::new(48, 48);
    for input_bits in [0, 12, 24, 49, 52, 64, u32::MAX] {
        let expected = ConfigError::InputBits { input_bits, supported: "25 to 48" };
        assert_eq!(new(ArmLpaeS1Config { input_bits, ..base }), Err(expected));
    }
    for output_bits in [0, 31, 39, 47, 49, 52, 64] {
        let supported = "32, 36, 40, 42, 44, 48, and 52 with the 64K granule";
        let expected = ConfigError::OutputBits { output_bits, supported };
        assert_eq!(new(ArmLpaeS1Config { output_bits, ..base }), Err(expected));
    }
    for page_sizes in [0, 1 << 21, 1 << 12 | 1 << 13] {
        let config = ArmLpaeS1Config { page_sizes: Some(page_sizes), ..base };
        assert!(matches!(new(config), Err(ConfigError::PageSizes { .. })));
    }
    let other = ArmLpaeS1::<13>::new(base).map(|_| ());
    assert_eq!(
        other,
        Err(ConfigError::Granule { granule_lg2: 13, supported: "2^12, 2^14 and 2^16" })
    );
    assert!(ArmLpaeS1::<16>::new(ArmLpaeS1Config::new(52, 52)).is_ok());
}

#[test]
fn an_arena_too_small_for_the_root_is_an_error() {
    let small = dmaspan_sim::Arena::new(PhysAddr::new(1 << 40), 1 << 20);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 36)).unwrap();
    let error = PageTable::new(format, small).unwrap_err();
    assert_eq!(error.errno(), Errno::ENOMEM);
}
