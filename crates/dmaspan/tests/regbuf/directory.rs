//! Segments of any lengths are found as a walk from the first one finds them.

use dmaspan::regbuf::{BuildError, Segments, SegmentsBuilder};
use dmaspan::{Errno, HostAddr, Span};

use crate::common::Rng;

type Host = Span<HostAddr>;

/// Segments of these lengths, none of which touches the next.
fn spans(lens: &[u64]) -> Vec<Host> {
    let mut at = 1 << 20;
    let place = |len: &u64| {
        let span = Span::new(HostAddr::new(at), *len).unwrap();
        at += len + 1;
        span
    };
    lens.iter().map(place).collect()
}

fn build(spans: &[Host]) -> Segments<HostAddr> {
    let mut builder = SegmentsBuilder::new();
    assert!(builder.is_empty());
    spans.iter().for_each(|span| builder.push(*span).unwrap());
    assert!(builder.spans().eq(spans.iter().copied()));
    builder.build().unwrap()
}

/// From `offset` on, by a walk.
fn walk(spans: &[Host], mut offset: u64, mut len: u64) -> Vec<Host> {
    let mut found = Vec::new();
    for span in spans {
        match span.skip(offset) {
            _ if len == 0 => break,
            None => offset -= span.len(),
            Some(rest) => {
                let taken = rest.len().min(len);
                found.push(Span::new(rest.start(), taken).unwrap());
                (offset, len) = (0, len - taken);
            }
        }
    }
    found
}

fn check(lens: &[u64], name: &str) {
    let spans = spans(lens);
    let segments = build(&spans);
    let total: u64 = lens.iter().sum();
    assert_eq!((segments.len(), segments.count()), (total, lens.len()), "{name}");
    assert!(segments.footprint() <= 20 * lens.len() + 128, "{name}: {}", segments.footprint());
    let mut rng = Rng::new(total);
    // Around borders, and anywhere.
    let borders = lens.iter().scan(0, |end: &mut u64, len| {
        *end += len;
        Some(*end)
    });
    let near = borders.flat_map(|end| [end - 1, end, (end + 1).min(total)]);
    let few = 1 + lens.len() / 200;
    let mut offsets: Vec<u64> = near.step_by(few).collect();
    offsets.extend((0..500).map(|_| rng.below(total)));
    for offset in offsets {
        let left = total - offset;
        let any = rng.below(left + 1);
        for len in [0, 1, 2, any, any.min(1000), left] {
            if len <= left {
                let import = segments.import(offset, len).unwrap();
                let expected = walk(&spans, offset, len);
                assert_eq!(import.pieces(), expected.len(), "{name}: {offset}+{len}");
                assert!(import.eq(expected), "{name}: {offset}+{len}");
            }
        }
        assert!(segments.import(offset, left + 1).is_err(), "{name}: {offset}");
    }
}

fn primes(count: usize) -> Vec<u64> {
    let is_prime = |n: &u64| (2..).take_while(|d| d * d <= *n).all(|d| !n.is_multiple_of(d));
    (2..).filter(is_prime).take(count).collect()
}

#[test]
fn segments_of_every_kind_of_lengths_are_found() {
    let tiny = vec![1; 300];
    let with = |huge: u64, at: usize| {
        let mut lens = tiny.clone();
        lens.insert(at, huge);
        lens
    };
    check(&with(1 << 40, 0), "huge, then tiny");
    check(&with(1 << 40, 300), "tiny, then huge");
    check(&with((1 << 40) + 1, 150), "huge among tiny");
    check(&with(3, 1), "one longer");
    check(&tiny, "bytes");
    check(&(0..40).map(|n| 1 << n).collect::<Vec<_>>(), "powers");
    check(&(0..40).rev().map(|n| 1 << n).collect::<Vec<_>>(), "falling powers");
    check(&primes(400), "primes");
    check(&[3; 100], "threes");
    check(&[4096; 100], "pages");
    check(&[1 << 40, 1, 1 << 40, 1], "huge and tiny in turn");
    check(&[1, 1 << 40, 1, 1 << 40, 1], "tiny and huge in turn");
    check(&[5], "one");
    check(&[1 << 45], "one power");
}

#[test]
fn few_segments_of_all_short_lengths_are_found() {
    for first in 1..=9 {
        for second in 1..=9 {
            check(&[first, second], "two");
            for third in [1, 2, 3, 4, 7, 8, 9] {
                check(&[first, second, third], "three");
                check(&[first, second, second, third], "four");
            }
        }
    }
}

#[test]
fn segments_of_random_lengths_are_found() {
    for seed in 1..=60 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let count = 1 + rng.index(400);
        let most = 1 + rng.below(36);
        let lens: Vec<u64> = (0..count)
            .map(|_| {
                let bound = 1 << rng.below(most);
                1 + rng.below(bound)
            })
            .collect();
        check(&lens, "random");
    }
}

#[test]
fn uniform_segments_take_a_word_each() {
    for (lens, unit) in [
        (vec![4096; 1000], Some(4096)),
        (vec![1, 8, 8, 8, 8, 3], Some(8)),
        (vec![8, 8, 1], Some(8)),
        (vec![1, 8], Some(8)),
        (vec![8, 1], Some(8)),
        (vec![3, 2], Some(4)),
        (vec![9, 8, 8], None),
        (vec![8, 8, 9], None),
        (vec![8, 8, 4, 8], None),
        (vec![6, 6, 6], None),
        (vec![7], None),
    ] {
        let segments = build(&spans(&lens));
        assert_eq!(segments.uniform_len(), unit, "{lens:?}");
        if unit.is_some() {
            assert!(segments.footprint() <= 8 * lens.len() + size_of::<Segments<HostAddr>>());
        }
    }
    assert_eq!(build(&spans(&[7])).footprint(), size_of::<Segments<HostAddr>>());
    assert!(size_of::<Segments<HostAddr>>() <= 128);
}

#[test]
fn segments_at_both_ends_of_the_space_are_found() {
    let host = |start, len| Span::new(HostAddr::new(start), len).unwrap();
    for spans in [
        vec![host(u64::MAX, 1), host(0, 1)],
        vec![host(0, 3), host(u64::MAX - 7, 8), host(9, 8), host(0, 5)],
        vec![host(u64::MAX - 4, 5), host(0, 7), host(u64::MAX - 2, 3)],
    ] {
        let segments = build(&spans);
        assert!(segments.iter().eq(spans.iter().copied()));
        for offset in 0..segments.len() {
            for len in 0..=segments.len() - offset {
                let import = segments.import(offset, len).unwrap();
                assert!(import.eq(walk(&spans, offset, len)), "{offset}+{len} of {spans:?}");
            }
        }
    }
}

#[test]
fn spans_that_touch_are_one_segment_and_others_are_not() {
    let host = |start, len| Span::new(HostAddr::new(start), len).unwrap();
    let mut builder = SegmentsBuilder::new();
    for span in [host(8, 8), host(16, 1), host(17, 3), host(4, 4), host(8, 2), host(11, 1)] {
        builder.push(span).unwrap();
    }
    assert!(builder.spans().eq([host(8, 12), host(4, 6), host(11, 1)]));
    assert_eq!(builder.len(), 19);
    let segments = builder.build().unwrap();
    assert!(segments.iter().eq([host(8, 12), host(4, 6), host(11, 1)]));
    assert!((&segments).into_iter().eq(segments.iter()));
}

#[test]
fn no_segments_are_made_of_nothing_or_of_more_than_a_space() {
    let mut builder = SegmentsBuilder::<HostAddr>::new();
    let error = builder.build().unwrap_err();
    assert_eq!((error, error.errno()), (BuildError::Empty, Errno::EINVAL));
    let half = Span::new(HostAddr::new(0), 1 << 63).unwrap();
    builder.push(half).unwrap();
    let error = builder.push(half).unwrap_err();
    assert_eq!((error, error.errno()), (BuildError::TooLong, Errno::EOVERFLOW));
    assert!(builder.len() == 1 << 63 && builder.spans().eq([half]));
    let rest = Span::new(HostAddr::new(5), (1 << 63) - 1).unwrap();
    builder.push(rest).unwrap();
    let segments = builder.build().unwrap();
    assert_eq!(segments.len(), u64::MAX);
    assert!(segments.iter().eq([half, rest]));
    assert!(segments.import(u64::MAX, 0).is_ok());
    assert!(segments.import(u64::MAX, 1).is_err());
    let error = segments.import(2, u64::MAX).unwrap_err();
    assert_eq!((error.offset, error.len, error.errno()), (2, u64::MAX, Errno::EFAULT));
}
