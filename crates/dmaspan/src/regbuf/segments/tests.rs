use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::addr::PhysAddr;
use crate::regbuf::SegmentsBuilder;

fn span(start: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(start), len).unwrap()
}

fn segments(spans: &[Span]) -> Segments<PhysAddr> {
    let mut builder = SegmentsBuilder::new();
    for span in spans {
        builder.push(*span).unwrap();
    }
    builder.build().unwrap()
}

/// The addresses of all bytes.
fn bytes(spans: impl Iterator<Item = Span>) -> Vec<u64> {
    spans.flat_map(|span| span.start().get()..=span.last().get()).collect()
}

/// What `import` puts into room for so many pieces, and then again, until it leaves some.
fn filled(mut import: Import<'_, PhysAddr>, places: usize) -> Vec<Span> {
    let (mut all, mut room) = (Vec::new(), vec![span(0, 1); places]);
    loop {
        let filled = import.fill(&mut room);
        all.extend_from_slice(&room[..filled]);
        if filled < places {
            assert_eq!((import.bytes(), import.next()), (0, None));
            return all;
        }
    }
}

/// Gone through at once, behind the first pieces, or by batches, the pieces are those one by one.
fn check_ways(import: &Import<'_, PhysAddr>, layout: &Layout) {
    let (mut rest, mut one_by_one) = (import.clone(), Vec::new());
    loop {
        let mut all = one_by_one.clone();
        rest.clone().for_each(|piece| all.push(piece));
        assert!(import.clone().eq(all), "behind {} pieces", one_by_one.len());
        let Some(piece) = rest.next() else { break };
        one_by_one.push(piece);
    }
    // Nobody unpins nothing.
    for places in [1, 2, 3, 64].into_iter().filter(|_| import.bytes() > 0) {
        assert_eq!(filled(import.clone(), places), one_by_one, "by batches of {places}");
    }
    match (layout, &one_by_one[..]) {
        (Layout::One { .. }, [only]) => assert_eq!(import.single(), Some(*only)),
        _ => assert_eq!(import.single(), None),
    }
}

fn check(spans: &[Span]) {
    let segments = segments(spans);
    let all = bytes(spans.iter().copied());
    let len = u64::try_from(all.len()).unwrap();
    assert_eq!(segments.len(), len);
    // Miri, which is hundreds of times slower, tries every seventh.
    let step = if cfg!(miri) { 7 } else { 1 };
    for offset in (0..=len).step_by(step) {
        for part in (0..=len - offset).step_by(step) {
            let import = segments.import(offset, part).unwrap();
            let pieces = import.pieces();
            assert_eq!(import.clone().count(), pieces);
            check_ways(&import, &segments.layout);
            let range = usize::try_from(offset).unwrap()..usize::try_from(offset + part).unwrap();
            assert_eq!(bytes(import), all[range], "{offset}+{part} of {spans:?}");
        }
        assert!(segments.import(offset, len - offset + 1).is_err());
    }
    assert!(segments.import(u64::MAX, 2).is_err());
}

#[test]
fn every_part_is_found_in_one_segment() {
    check(&[span(100, 9)]);
    check(&[span(100, 3), span(103, 4)]);
    check(&[span(u64::MAX - 8, 9)]);
}

#[test]
fn every_part_is_found_in_uniform_segments() {
    let uniform = [span(3, 5), span(32, 8), span(48, 8), span(16, 2)];
    assert_eq!(segments(&uniform).uniform_len(), Some(8));
    check(&uniform);
    // The first one begins below where a whole one would: addresses are modulo 2^64.
    check(&[span(0, 1), span(100, 8), span(u64::MAX - 7, 8), span(50, 8)]);
    check(&[span(10, 3), span(0, 8)]);
    // So short that a wrong index is of another one.
    let short: Vec<_> = (0..16).rev().map(|n| span(4 * n, 2)).collect();
    assert_eq!(segments(&short).uniform_len(), Some(2));
    check(&short);
}

#[test]
fn every_part_is_found_in_mixed_segments() {
    let mixed = [span(1, 1), span(10, 7), span(100, 2), span(50, 16), span(20, 3), span(30, 1)];
    assert_eq!(segments(&mixed).uniform_len(), None);
    check(&mixed);
    check(&[span(0, 3), span(10, 1), span(20, 1), span(30, 1), span(40, 20), span(70, 1)]);
    check(&[span(0, 1), span(10, 40), span(60, 1)]);
    check(&[span(0, 40), span(50, 3), span(60, 3)]);
}

#[test]
fn narrowed_segments_are_their_middle_and_widen_again() {
    for spans in [
        vec![span(100, 20)],
        vec![span(3, 5), span(32, 8), span(48, 8)],
        vec![span(1, 3), span(10, 7), span(100, 4)],
    ] {
        let all = bytes(spans.iter().copied());
        let mut segments = segments(&spans);
        segments.narrow(2, 3);
        assert_eq!(bytes(segments.iter()), all[2..all.len() - 3]);
        assert_eq!(bytes(segments.import(1, 4).unwrap()), all[3..7]);
        assert_eq!(bytes(segments.widened(2, 3)), all);
    }
}
