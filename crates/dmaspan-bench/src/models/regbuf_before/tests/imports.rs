use super::*;

/// Imports and compares with the pages; `offset` is where the buffer begins in them.
fn check(buffer: &BufferBefore, pages: &[PhysAddr], begins: u64, offset: u64, len: u64) {
    let import = buffer.import(offset, len, Direction::FromDevice).unwrap();
    assert_eq!(import.bytes_left(), len);
    let entries = joined(import);
    assert_eq!(entries, expected(pages, begins + offset, len), "{len} at {begins} + {offset}");
    let walked = BufferBefore::of_kernel(buffer.bvecs().to_vec(), Direction::Bidirectional);
    let walked = walked.import(offset, len, Direction::FromDevice).unwrap();
    let sought = buffer.import(offset, len, Direction::FromDevice).unwrap();
    assert!(walked.eq(sought), "{len} at {begins} + {offset}");
}

#[test]
fn bytes_through_bvecs_are_bytes_through_pages_at_every_edge() {
    // Folios of two pages, of which no two touch.
    let folio = |n: u64| Span::new(PhysAddr::new(n * PAGE), 2 * PAGE).unwrap();
    let pages = pages_of(&[20, 8, 14, 2].map(folio));
    for coalescing in ALL {
        for begins in [0, 1, PAGE - 1, PAGE, PAGE + 7, 2 * PAGE - 1] {
            let len = 6 * PAGE - 3;
            let buffer = buffer(&pages, begins, len, all_of(1), coalescing);
            let page_ends = (0..=8).map(|n| n * PAGE);
            let edges = page_ends.flat_map(|end| (0..5).map(move |n| end + n));
            let edges: Vec<u64> =
                edges.filter_map(|edge| (edge + 2).checked_sub(4 + begins)).collect();
            let ends = || edges.iter().copied().chain([0, len]).filter(|edge| *edge <= len);
            for start in ends() {
                for end in ends().filter(|end| *end >= start) {
                    check(&buffer, &pages, begins, start, end - start);
                }
            }
        }
    }
}

#[test]
fn bytes_through_bvecs_are_bytes_through_pages_in_large_buffers() {
    let seed = 7;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    for round in 0..60 {
        let order = u32::try_from(rng.below(10)).unwrap();
        let size = PAGE << order;
        let head = |n: u64| PhysAddr::new(n * size);
        let spans: Vec<_> = (0..1 + rng.below(20))
            .map(|_| Span::new(head(rng.below(1 << 20)), size).unwrap())
            .collect();
        let pages = pages_of(&spans);
        let total = u64::try_from(pages.len()).unwrap() * PAGE;
        let begins = rng.below(size);
        let len = 1 + rng.below(total - begins);
        let buffer = buffer(&pages, begins, len, all_of(order), ALL[round % 3]);
        for _ in 0..50 {
            let offset = rng.below(len);
            check(&buffer, &pages, begins, offset, rng.below(len - offset + 1));
        }
    }
}

#[test]
fn bvecs_of_any_lengths_are_walked() {
    let lens = [3u32, 4096, 1, 512, 70000];
    let bvec = |(n, len): (u64, u32)| BvecBefore { page: PhysAddr::new(n << 20), len, offset: 9 };
    let bvecs: Vec<_> = (1..).zip(lens).map(bvec).collect();
    let buffer = BufferBefore::of_kernel(bvecs.clone(), Direction::ToDevice);
    let bytes: Vec<u64> = bvecs
        .iter()
        .flat_map(|bvec| (0..u64::from(bvec.len)).map(|n| bvec.page.get() + 9 + n))
        .collect();
    assert_eq!(buffer.len(), u64::try_from(bytes.len()).unwrap());
    for offset in [0, 1, 2, 3, 4, 4098, 4099, 4100, 4611, 4612, 4613, 74_611] {
        let len = buffer.len() - offset;
        let import = buffer.import(offset, len, Direction::ToDevice).unwrap();
        let found: Vec<u64> = import
            .flat_map(|entry| (0..u64::from(entry.len)).map(move |n| entry.addr + n))
            .collect();
        assert_eq!(found, bytes[usize::try_from(offset).unwrap()..], "{offset}");
    }
}

#[test]
fn imports_stay_within_their_buffer_and_direction() {
    let pages = apart(1);
    let buffer = buffer(&pages, 5, 10_000, all_of(9), Coalescing::SameFolios);
    let import = |offset, len| buffer.import(offset, len, Direction::ToDevice);
    for (offset, len) in [(10_000, 1), (0, 10_001), (9_999, 2), (u64::MAX, 1), (1, u64::MAX)] {
        let error = import(offset, len).unwrap_err();
        assert_eq!(error.errno(), Errno::EFAULT, "{len} at {offset}");
    }
    assert_eq!(import(10_000, 0).unwrap().next(), None);
    assert_eq!(import(9_999, 1).unwrap().count(), 1);

    let long = apart(1024);
    let long = super::buffer(&long, 0, MAX_IMPORT + 1, all_of(9), Coalescing::SameFolios);
    assert!(long.import(0, MAX_IMPORT + 1, Direction::ToDevice).is_err());
    assert_eq!(long.import(1, MAX_IMPORT, Direction::ToDevice).unwrap().count(), 1024);

    let bvec = BvecBefore { page: PhysAddr::new(PAGE), len: 8, offset: 0 };
    let buffer = BufferBefore::of_kernel(vec![bvec], Direction::FromDevice);
    let (asked, has) = (Direction::ToDevice, Direction::FromDevice);
    let refused = buffer.import(0, 8, asked).unwrap_err();
    assert_eq!(refused, RegbufBeforeError::Direction { asked, has });
    assert_eq!(buffer.import(0, 8, has).unwrap().count(), 1);
}
