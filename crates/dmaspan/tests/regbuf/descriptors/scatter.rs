//! Scatter-gather entries, against all ways to cut the bytes.

use dmaspan::regbuf::descriptors::{Error, Need, ScatterEntry, SegmentLimits};
use dmaspan::{DmaAddr, Errno, PhysAddr, Span};
use proptest::prelude::*;

use super::common::{bytes, joined, joined_spans, limits, lists, small_lists, span, total};

fn entry(addr: u64, len: u32) -> ScatterEntry {
    ScatterEntry { addr: DmaAddr::new(addr), len }
}

/// The fewest segments that bytes can be cut into: over all ways.
fn fewest(bytes: &[u64], max: usize, boundary: Option<u64>) -> usize {
    let window = |byte: u64| boundary.map_or(0, |boundary| byte / boundary);
    let mut best = vec![0; bytes.len() + 1];
    for start in (0..bytes.len()).rev() {
        let mut fewest = usize::MAX;
        for end in start + 1..=bytes.len() {
            let segment = &bytes[start..end];
            let (first, last) = (segment[0], segment[segment.len() - 1]);
            let follow = segment.windows(2).all(|two| two[0] != u64::MAX && two[0] + 1 == two[1]);
            if segment.len() <= max && follow && window(first) == window(last) {
                fewest = fewest.min(1 + best[end]);
            }
        }
        best[start] = fewest;
    }
    best[0]
}

fn check(spans: &[Span<DmaAddr>], limits: SegmentLimits) -> Vec<ScatterEntry> {
    let entries: Vec<_> = limits.entries(spans.iter().copied()).collect();
    let max = limits.max_segment().get();
    for entry in &entries {
        assert!((1..=max).contains(&entry.len), "{entry:?} under {limits:?}");
        let last = entry.addr.get() + u64::from(entry.len - 1);
        let crosses = limits.boundary().is_some_and(|of| entry.addr.get() / of != last / of);
        assert!(!crosses, "{entry:?} under {limits:?}");
    }
    let pieces = entries.iter().map(|entry| (entry.addr.get(), u64::from(entry.len)));
    assert_eq!(joined(pieces), joined_spans(spans));
    let need = Need { entries: entries.len(), bytes: total(spans) };
    assert_eq!(limits.need(spans.iter().copied()), need);

    let mut one_by_one = limits.entries(spans.iter().copied());
    let mut taken: Vec<_> = one_by_one.by_ref().take(entries.len() / 2).collect();
    one_by_one.for_each(|entry| taken.push(entry));
    assert_eq!(taken, entries);

    let mut room = vec![entry(7, 7); entries.len() + 1];
    assert_eq!(limits.write(spans.iter().copied(), &mut room), Ok(entries.len()));
    assert_eq!(room[..entries.len()], entries);
    assert_eq!(room[entries.len()], entry(7, 7));
    entries
}

#[test]
fn small_spans_are_cut_as_rarely_as_the_limits_allow() {
    for base in [0, 1 << 32, u64::MAX - 5] {
        for spans in small_lists(base, 1, 6, 3) {
            for max in 1..=6 {
                for boundary in [None, Some(1), Some(2), Some(4)] {
                    let entries = check(&spans, limits(max, boundary));
                    let fewest = fewest(&bytes(&spans), max as usize, boundary);
                    assert_eq!(entries.len(), fewest, "{spans:?} by {max} and {boundary:?}");
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn large_spans_keep_their_bytes(
        spans in lists(512, 64, 64),
        max in prop_oneof![1..4096_u32, Just(4096), 1..1_u32 << 20, Just(u32::MAX)],
        boundary in prop_oneof![Just(None), (0_u32..40).prop_map(|lg2| Some(1 << lg2))],
    ) {
        // So that no list is cut into millions.
        let boundary = boundary.map(|boundary: u64| boundary.max(64));
        check(&spans, limits(max.max(64), boundary));
    }
}

#[test]
fn a_boundary_of_4_kib_is_not_crossed_by_a_span_that_does() {
    let entries = check(&[span(0x1f00, 0x1200)], limits(u32::MAX, Some(0x1000)));
    assert_eq!(entries, [entry(0x1f00, 0x100), entry(0x2000, 0x1000), entry(0x3000, 0x100)]);
}

#[test]
fn spans_beyond_a_length_of_32_bits_are_cut() {
    let four_gib = [span(0, 1 << 32)];
    assert_eq!(check(&four_gib, limits(u32::MAX, None)), [entry(0, u32::MAX), entry(!0 >> 32, 1)]);
    // Without limits of its own, no page is.
    let last_page = (1 << 32) - 0x1000;
    let expected = [entry(0, 0xffff_f000), entry(last_page, 0x1000)];
    assert_eq!(check(&four_gib, SegmentLimits::default()), expected);
}

#[test]
fn the_whole_space_is_counted_without_going_through_it() {
    let half = 1 << 63;
    let whole = [span(0, half), span(half, half)];
    let by = |max, boundary| limits(max, boundary).need(whole).entries as u128;
    assert_eq!(by(1 << 20, None), 1 << 44);
    assert_eq!(by(1 << 31, Some(1 << 12)), 1 << 52);
    // Each of 2^32 windows by two.
    assert_eq!(by(u32::MAX, Some(1 << 32)), 1 << 33);
    assert_eq!(by(1, None), usize::MAX as u128);
    assert_eq!(by(3, Some(1)), usize::MAX as u128);
    let last = limits(u32::MAX, Some(1 << 32)).entries([span(u64::MAX - 1, 2)]).last();
    assert_eq!(last, Some(entry(u64::MAX - 1, 2)));
}

#[test]
fn behind_the_top_of_the_space_lies_nothing() {
    let spans = [span(u64::MAX, 1), span(0, 1)];
    assert_eq!(check(&spans, limits(8, None)), [entry(u64::MAX, 1), entry(0, 1)]);
}

#[test]
fn too_little_room_is_refused_with_the_number_that_is_needed() {
    let spans = [span(0, 10), span(20, 10)];
    let mut room = [entry(7, 7); 5];
    let error = limits(4, None).write(spans, &mut room).unwrap_err();
    assert_eq!((error, error.errno()), (Error::Room { needed: 6, room: 5 }, Errno::ENOSPC));
    let whole = limits(1, None).write([span(0, 1 << 40)], &mut room).unwrap_err();
    assert_eq!(whole, Error::Room { needed: 1 << 40, room: 5 });
}

#[test]
fn a_boundary_is_a_power_of_two() {
    for boundary in [0, 3, 0xfff, u64::MAX] {
        let error = SegmentLimits::default().with_boundary(boundary).unwrap_err();
        assert_eq!((error, error.errno()), (Error::Boundary { boundary }, Errno::EINVAL));
    }
    assert_eq!(limits(1, Some(1 << 63)).boundary(), Some(1 << 63));
    assert_eq!(limits(1, None).boundary(), None);
}

#[test]
fn physical_addresses_do_where_nothing_translates() {
    let spans = [Span::new(PhysAddr::new(0x1000), 0x800).unwrap()];
    assert_eq!(SegmentLimits::default().entries(spans).next(), Some(entry(0x1000, 0x800)));
    let nothing: [Span; 0] = [];
    assert_eq!(SegmentLimits::default().entries(nothing).next(), None);
}
