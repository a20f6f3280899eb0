//! Bad input: one typed error each, with nothing changed.

use dmaspan::io_pgtable::{Error, Format as _};
use dmaspan::{Errno, Iova, IovaRange, PhysAddr, Prot, RangeError, Span, SpanBuf, lg2};

use super::space::{Space, range, span};
use super::survey;
use super::tree::{Contents, PROT, Tree, claim, free};
use super::{Subject, each};

/// A tree with a page at the start and a larger leaf further on.
struct Refusals<S: Subject> {
    tree: Tree<S>,
    /// The page.
    page: IovaRange,
    /// The larger leaf; where there is none, the page.
    leaf: IovaRange,
    /// Where nothing is mapped, aligned to any leaf that fits in a quarter of the aperture.
    far: u64,
    /// What the tree holds, and its tables: no refusal changes that.
    held: (Contents, usize),
}

impl<S: Subject> Refusals<S> {
    fn new(format: S::Format) -> Self {
        let mut tree = Tree::<S>::new(format);
        let space = tree.space.clone();
        let granule = space.granule();
        let start = space.aperture.start().get();
        let page = range(start, granule);
        tree.map(start, &[span(granule, granule)], PROT).unwrap();
        let leaf = space.large(4).map_or(page, |lg2| {
            let (iova, size) = (space.nth(lg2, 1).unwrap(), lg2::size(lg2));
            tree.map(iova, &[span(size, size)], Prot::READ_WRITE).unwrap();
            range(iova, size)
        });
        let far = space.nth(space.input_bits - 2, 3).unwrap();
        let held = (tree.contents(), tree.arena.tables());
        Self { tree, page, leaf, far, held }
    }

    /// Runs `op` and requires that it fails so and changes nothing.
    #[track_caller]
    fn refused(
        &mut self,
        expected: Error,
        errno: Errno,
        op: impl FnOnce(&mut Tree<S>) -> Result<(), Error>,
    ) {
        assert_eq!(op(&mut self.tree), Err(expected));
        assert_eq!(expected.errno(), errno, "{expected}");
        assert_eq!((self.tree.contents(), self.tree.arena.tables()), self.held, "{expected}");
    }

    #[track_caller]
    fn refused_pages(&mut self, expected: Error, errno: Errno, pages: Pages) {
        self.refused(expected, errno, |tree| {
            let Pages { iova, paddr, size, count, prot } = pages;
            let (bytes, result) = tree.map_pages(iova, paddr, size, count, prot);
            assert_eq!(bytes, 0);
            result
        });
    }

    #[track_caller]
    fn refused_spans(
        &mut self,
        expected: Error,
        errno: Errno,
        (iova, spans, prot): (u64, &[Span], Prot),
    ) {
        self.refused(expected, errno, |tree| tree.map(iova, spans, prot));
    }
}

/// The arguments of `map_pages`.
#[derive(Clone, Copy)]
struct Pages {
    iova: u64,
    paddr: u64,
    size: u64,
    count: u64,
    prot: Prot,
}

/// Ranges around the aperture: one granule below it and above it, and one that leaves it.
fn outside(space: &Space) -> Vec<IovaRange> {
    let granule = space.granule();
    let (start, last) = (space.aperture.start(), space.aperture.last());
    let below = start.get().checked_sub(granule).map(|below| range(below, granule));
    let above = last.checked_add(1).map(|above| range(above.get(), granule));
    let crossing = above.map(|above| range(above.start().get() - granule, 2 * granule));
    [below, above, crossing].into_iter().flatten().collect()
}

/// Sizes that are none, ranges that are none, what is out of reach, misaligned or not permitted.
pub fn bad_arguments_of_map_pages_change_nothing<S: Subject>() {
    each::<S>(|format| {
        let mut on = Refusals::<S>::new(format);
        let space = on.tree.space.clone();
        let (granule, page_sizes) = (space.granule(), space.page_sizes);
        let good = Pages { iova: on.far, paddr: 0, size: granule, count: 1, prot: PROT };
        let others = (0..64).map(lg2::size).filter(|size| page_sizes & size == 0);
        for size in others.chain([0, 3 * granule, page_sizes | 1]) {
            let expected = Error::PageSize { page_size: size, page_sizes };
            on.refused_pages(expected, Errno::EINVAL, Pages { size, ..good });
        }
        let empty = Error::Range(RangeError::Empty { start: good.iova });
        on.refused_pages(empty, Errno::EINVAL, Pages { count: 0, ..good });
        let wraps = Error::Range(RangeError::Wraps { start: good.iova, len: u64::MAX });
        on.refused_pages(wraps, Errno::EOVERFLOW, Pages { count: u64::MAX, ..good });
        let top = u64::MAX - (granule - 1);
        let wraps = Error::Range(RangeError::Wraps { start: top, len: 2 * granule });
        on.refused_pages(wraps, Errno::EOVERFLOW, Pages { iova: top, count: 2, ..good });
        on.refused_pages(wraps, Errno::EOVERFLOW, Pages { paddr: top, count: 2, ..good });
        for range in outside(&space) {
            let expected = Error::OutsideAperture { range, aperture: space.aperture };
            let (iova, count) = (range.start().get(), (range.len_less_one() + 1) / granule);
            on.refused_pages(expected, Errno::ERANGE, Pages { iova, count, ..good });
        }
        for lg2 in space.sizes() {
            let (size, iova) = (lg2::size(lg2), space.nth(lg2, 0).unwrap());
            let off = iova + granule / 2;
            if size <= space.aperture.last().get() - off {
                let expected = Error::Misaligned { range: range(off, size), page_size: size };
                on.refused_pages(expected, Errno::EINVAL, Pages { iova: off, size, ..good });
            }
            let paddr = size / 2;
            if size <= space.paddr_last() - paddr {
                let expected = Error::MisalignedSpan { span: span(paddr, size), page_size: size };
                on.refused_pages(expected, Errno::EINVAL, Pages { iova, paddr, size, ..good });
            }
        }
        let last = PhysAddr::new(space.paddr_last());
        // Beyond the output, and a run that crosses its limit: io-pgtable-arm wraps it to 0.
        for (paddr, count) in [(last.get() + 1, 1), (last.get() + 1 - granule, 2)] {
            let span = span(paddr, count * granule);
            let expected = Error::OutsideOutput { span, last };
            on.refused_pages(expected, Errno::ERANGE, Pages { paddr, count, ..good });
        }
    });
}

/// Permissions that permit nothing, and those that the format cannot express.
pub fn permissions_without_an_entry_are_refused<S: Subject>() {
    each::<S>(|format| {
        let mut on = Refusals::<S>::new(format.clone());
        let (iova, granule) = (Iova::new(on.far), on.tree.space.granule());
        for prot in (0..=Prot::all().bits()).filter_map(Prot::from_bits) {
            let (expected, errno) = if !prot.permits_access() {
                (Error::NoAccess { iova }, Errno::EINVAL)
            } else if format.refuses(prot) {
                (Error::Unsupported { iova, prot }, Errno::EINVAL)
            } else {
                continue;
            };
            let pages = Pages { iova: on.far, paddr: 0, size: granule, count: 1, prot };
            on.refused_pages(expected, errno, pages);
            on.refused_spans(expected, errno, (on.far, &[span(0, granule)], prot));
        }
    });
}

/// A leaf refuses every page at its start and its end, and one of its own size.
pub fn pages_over_leaves_change_nothing<S: Subject>() {
    each::<S>(|format| {
        let mut on = Refusals::<S>::new(format);
        let granule = on.tree.space.granule();
        for leaf in [on.page, on.leaf] {
            let occupied = Error::Occupied { leaf };
            let iova = leaf.start().get();
            let first = Pages { iova, paddr: 0, size: granule, count: 1, prot: PROT };
            on.refused_pages(occupied, Errno::EEXIST, first);
            let iova = leaf.last().get() - (granule - 1);
            on.refused_pages(occupied, Errno::EEXIST, Pages { iova, ..first });
            let size = leaf.len_less_one() + 1;
            on.refused_pages(occupied, Errno::EEXIST, Pages { size, ..first });
        }
    });
}

/// Lists that are empty, spans that are misaligned or out of reach, and ranges that are.
pub fn bad_arguments_of_map_spans_change_nothing<S: Subject>() {
    each::<S>(|format| {
        let mut on = Refusals::<S>::new(format);
        let space = on.tree.space.clone();
        let (granule, far) = (space.granule(), on.far);
        let one = span(0, granule);
        let last = PhysAddr::new(space.paddr_last());
        let no_spans = Error::NoSpans { iova: Iova::new(far) };
        on.refused_spans(no_spans, Errno::EINVAL, (far, &[], PROT));
        for bad in [span(3 * granule, granule / 2), span(granule / 2, granule)] {
            let expected = Error::MisalignedSpan { span: bad, page_size: granule };
            on.refused_spans(expected, Errno::EINVAL, (far, &[one, bad], PROT));
        }
        let bad = span(last.get() - (granule - 1), 2 * granule);
        let expected = Error::OutsideOutput { span: bad, last };
        on.refused_spans(expected, Errno::ERANGE, (far, &[one, bad], PROT));
        for range in outside(&space) {
            let expected = Error::OutsideAperture { range, aperture: space.aperture };
            let spans = [one, span(2 * granule, granule)];
            let count = usize::try_from((range.len_less_one() + 1) / granule).unwrap();
            let iova = range.start().get();
            on.refused_spans(expected, Errno::ERANGE, (iova, &spans[..count], PROT));
        }
        let range = range(far + 8, granule);
        let misaligned = Error::Misaligned { range, page_size: granule };
        on.refused_spans(misaligned, Errno::EINVAL, (far + 8, &[one], PROT));
    });
}

/// A leaf anywhere in the way of a mapping refuses all of it.
pub fn collisions_take_everything_back<S: Subject>() {
    each::<S>(|format| {
        let space = Space::of(&format);
        let (granule, chunk) = (space.granule(), lg2::size(space.chunk()));
        let start = space.aperture.start().get();
        // In the first entry, late in a table that exists, behind tables that do not, and larger.
        for (at, occupied) in [
            (0, granule),
            (3 * granule, granule),
            (chunk - granule, granule),
            (2 * chunk, chunk),
            (9 * chunk + 5 * granule, granule),
        ] {
            let mut tree = Tree::<S>::new(format.clone());
            tree.map(start + at, &[span(at, occupied)], PROT).unwrap();
            let before = (tree.contents(), tree.leaves(), tree.arena.tables());
            let leaf = before.1[0].range;
            // Scattered, so that most of it are pages, with a tail behind the collision.
            let spans: Vec<_> =
                (0..12).map(|n| span((2 * n + 1) * (chunk + granule), chunk)).collect();
            assert_eq!(tree.map(start, &spans, PROT), Err(Error::Occupied { leaf }));
            assert_eq!((tree.contents(), tree.leaves(), tree.arena.tables()), before);
        }
    });
}

/// The same for pages and pairs of pages whose table is there, and some of which are behind it.
pub fn collisions_in_lists_of_pages_take_everything_back<S: Subject>() {
    each::<S>(|format| {
        let space = Space::of(&format);
        let (granule, chunk) = (space.granule(), lg2::size(space.chunk()));
        let start = space.aperture.start().get() + 16 * chunk - 9 * granule;
        let spans: Vec<_> = (0..12u64)
            .map(|n| span((4 * n + 1) * granule, granule * if n % 3 == 1 { 2 } else { 1 }))
            .collect();
        // The first page, the second of a pair, those beside a border, and the last.
        for occupied in [0, 2, 8, 9, 15] {
            let mut tree = Tree::<S>::new(format.clone());
            tree.map(start - granule, &[span(0, granule)], PROT).unwrap();
            tree.map(start + occupied * granule, &[span(0, granule)], PROT).unwrap();
            let before = (tree.contents(), tree.leaves(), tree.arena.tables());
            let leaf = before.1[1].range;
            assert_eq!(tree.map(start, &spans, PROT), Err(Error::Occupied { leaf }));
            assert_eq!((tree.contents(), tree.leaves(), tree.arena.tables()), before);
        }
    });
}

/// Holes, parts of leaves, misaligned ranges and those outside of the aperture.
pub fn unmaps_of_holes_and_parts_change_nothing<S: Subject>() {
    each::<S>(|format| {
        let mut on = Refusals::<S>::new(format.clone());
        let space = on.tree.space.clone();
        let granule = space.granule();
        let take = |range: IovaRange| {
            move |tree: &mut Tree<S>| tree.unmap(range).map(|spans| assert_eq!(spans, []))
        };
        let page = on.page.start().get();
        let two = range(page, 2 * granule);
        let hole = match on.tree.unmap(two) {
            Err(Error::Hole { hole }) => hole,
            other => panic!("{other:?}"),
        };
        assert_eq!(hole.start(), Iova::new(page + granule));
        on.refused(Error::Hole { hole }, Errno::ENOENT, take(two));
        let misaligned = range(page, granule / 2);
        let expected = Error::Misaligned { range: misaligned, page_size: granule };
        on.refused(expected, Errno::EINVAL, take(misaligned));
        for range in outside(&space) {
            let expected = Error::OutsideAperture { range, aperture: space.aperture };
            on.refused(expected, Errno::ERANGE, take(range));
            // No address outside is an alias of one inside.
            for iova in [range.start(), range.last()] {
                let inside = space.aperture.contains(iova);
                assert!(inside || on.tree.table.whole().iova_to_phys(iova).is_none());
            }
        }

        // Far behind what the buffer holds, too: all of the range is checked before the first
        // batch.
        let mut tree = Tree::<S>::new(format);
        let start = space.aperture.start().get();
        let spans: Vec<_> = (0..100).map(|n| span(2 * n * granule, granule)).collect();
        tree.map(start, &spans, PROT).unwrap();
        let before = tree.contents();
        let mut room = SpanBuf::room::<8>();
        let mut buf = SpanBuf::new(&mut room);
        buf.push(span(0, granule)).unwrap();
        let error = tree.table.whole().unmap(range(start, 101 * granule), &mut buf).unwrap_err();
        let Error::Hole { hole } = error else { panic!("{error}") };
        assert!(hole.contains(Iova::new(start + 100 * granule)));
        assert_eq!(buf.spans(), &[span(0, granule)], "the caller's spans are untouched");
        assert_eq!(tree.contents(), before);
    });
}

/// An unmap that finds nothing has nothing to sync, at IOVA 0 neither (generic_pt flushes all).
pub fn nothing_to_unmap_gathers_nothing<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let space = tree.space.clone();
        for lg2 in space.sizes() {
            for iova in [space.nth(lg2, 0), space.nth_back(lg2, 0)].into_iter().flatten() {
                let whole = tree.table.whole();
                let unmapped = whole.unmap_pages(Iova::new(iova), lg2::size(lg2), 1);
                assert_eq!(unmapped.bytes, 0);
                assert!(matches!(unmapped.result, Err(Error::Hole { .. })));
                assert!(unmapped.retired.is_empty(), "nothing to sync");
                free(&tree.table, unmapped.retired);
            }
        }
    });
}

/// The owner of a part of the table works in it and nowhere else.
pub fn owners_stay_in_their_range<S: Subject>() {
    each::<S>(|format| {
        let tree = Tree::<S>::new(format);
        let granule = tree.space.granule();
        let at = |n: u64| tree.space.aperture.start().get() + n * granule;
        let owned = claim(&tree.table, range(at(4), 4 * granule));
        let not_owned = |n: u64, pages: u64| Error::NotOwned {
            range: range(at(n), pages * granule),
            owned: owned.range(),
        };
        let iova = |n: u64| Iova::new(at(n));
        let mapped = owned.map_pages(iova(7), PhysAddr::new(0), granule, 2, PROT);
        assert_eq!(mapped, (0, Err(not_owned(7, 2))));
        let failed = owned.map_spans(iova(3), &[span(0, 2 * granule)], PROT).unwrap_err();
        assert_eq!(failed.error, not_owned(3, 2));
        assert_eq!(owned.reclaim(range(at(0), 5 * granule)).unwrap_err(), not_owned(0, 5));
        assert_eq!(owned.unmap_pages(iova(0), granule, 1).result, Err(not_owned(0, 1)));
        assert!(owned.map_spans(iova(4), &[span(0, 4 * granule)], PROT).is_ok());
        assert_eq!(owned.iova_to_phys(iova(3)), None);
        assert_eq!(owned.iova_to_phys(iova(4)), Some(PhysAddr::new(0)));
        let walked = survey::translate(&tree.walker(), &tree.arena, iova(7)).unwrap();
        assert_eq!(walked.paddr.get(), 3 * granule);
    });
}
