//! A pin holds its frames until it goes.

use super::*;

#[test]
fn spans_come_in_user_order_and_each_frame_has_one_pin() {
    let (pinner, space) = space();
    let (mut pinned, spans) = pin(&pinner, &space, user(0x1000, 0x4000));
    assert_eq!(spans, [span(5, 2), span(2, 1), span(9, 1)]);
    assert_eq!(pinned.bytes_left(), 0x4000);
    let pins = |frame: u64| pinner.memory().pins(PhysAddr::new(BASE + (frame << 12)));
    assert_eq!([2, 5, 6, 9, 4, 16].map(pins), [Some(1), Some(1), Some(1), Some(1), Some(0), None]);
    pinner.unpin(promise(), &mut pinned, &[span(6, 1), span(9, 1)], Kind::Memory, Dirty::Clean);
    assert_eq!((pins(5), pins(6), pins(9)), (Some(1), Some(0), Some(0)));
    pinner.unpin(promise(), &mut pinned, &[span(2, 1), span(5, 1)], Kind::Memory, Dirty::Written);
    pinner.release(promise(), pinned);
    assert_eq!(pinner.memory().pinned_frames(), 0);
    let dirty = |frame: u64| pinner.memory().is_dirty(PhysAddr::new(BASE + (frame << 12)));
    assert_eq!([2, 5, 6].map(dirty), [Some(true), Some(true), Some(false)]);
    assert_eq!(pinner.memory().violations(), []);
}

#[test]
fn a_hole_is_an_error_with_nothing_pinned() {
    let (pinner, space) = space();
    space.unmap(user(0x3000, 0x1000));
    for (range, hole) in
        [(user(0x1000, 0x4000), 0x3000), (user(0x0, 0x2000), 0x0), (user(0x4000, 0x2000), 0x5000)]
    {
        let mut spans: Vec<Span> = Vec::new();
        let error = pinner.pin(&space, range, Prot::READ, &mut spans).unwrap_err();
        let at = UserAddr::new(hole);
        assert_eq!(error.error, PinError::Failed(SimPinError::Hole { range, at }));
        assert!(error.pin.is_none());
        assert!(spans.is_empty());
        assert_eq!(pinner.memory().pinned_frames(), 0);
    }
}

#[test]
fn a_hole_found_on_the_way_leaves_what_was_pushed_pinned() {
    let (pinner, space) = space();
    let pinner = pinner.with_holes(Holes::FoundOnTheWay);
    space.unmap(user(0x3000, 0x1000));
    let range = user(0x1000, 0x4000);
    let mut spans: Vec<Span> = Vec::new();
    let error = pinner.pin(&space, range, Prot::READ, &mut spans).unwrap_err();
    let at = UserAddr::new(0x3000);
    assert_eq!(error.error, PinError::Failed(SimPinError::Hole { range, at }));
    assert_eq!(spans, [span(5, 2)]);
    let mut pinned = error.pin.unwrap();
    assert_eq!((pinned.range(), pinned.bytes_left()), (user(0x1000, 0x2000), 0x2000));
    assert_eq!(pinner.memory().pinned_frames(), 2);
    pinner.unpin(promise(), &mut pinned, &spans, Kind::Memory, Dirty::Clean);
    pinner.release(promise(), pinned);
    assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
    // A hole right at the start leaves nothing.
    let error = pinner.pin(&space, user(0x3000, 0x2000), Prot::READ, &mut spans).unwrap_err();
    assert!(error.pin.is_none());
}

#[test]
fn a_sink_that_stops_keeps_what_it_took_and_nothing_else() {
    let (pinner, space) = space();
    // Frames 5 and 6 join and frame 2 has a place; frame 9 has none.
    let mut room = SpanBuf::room::<2>();
    let mut sink = SpanBuf::new(&mut room);
    let error = pinner.pin(&space, user(0x1000, 0x4000), Prot::READ, &mut sink).unwrap_err();
    assert_eq!(error.error, PinError::Stopped);
    let mut pinned = error.pin.unwrap();
    assert_eq!((pinned.range(), pinned.bytes_left()), (user(0x1000, 0x3000), 0x3000));
    let pins = |frame: u64| pinner.memory().pins(PhysAddr::new(BASE + (frame << 12)));
    assert_eq!([5, 6, 2, 9].map(pins), [Some(1), Some(1), Some(1), Some(0)]);
    pinner.unpin(promise(), &mut pinned, sink.spans(), Kind::Memory, Dirty::Clean);
    pinner.release(promise(), pinned);
    assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
    let mut none = SpanBuf::new(&mut []);
    let error = pinner.pin(&space, user(0x1000, 0x4000), Prot::READ, &mut none).unwrap_err();
    assert!(error.pin.is_none());
    assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
}

/// Frame 5, frame 9 and frame 5 again, of which a pin of two pages from 0x800 on has all but the
/// first and the last half page.
fn frame_5_twice() -> (SimPinner, Arc<SimSpace>, UserRange) {
    let (pinner, space) = space();
    space.map(UserAddr::new(0), &[span(5, 1), span(9, 1), span(5, 1)]).unwrap();
    (pinner, space, user(0x800, 0x2000))
}

#[test]
fn a_frame_of_which_a_stopped_sink_took_a_part_stays_pinned_for_that_part() {
    let (pinner, space, range) = frame_5_twice();
    let mut room = SpanBuf::room::<2>();
    let mut sink = SpanBuf::new(&mut room);
    let error = pinner.pin(&space, range, Prot::READ, &mut sink).unwrap_err();
    let mut pinned = error.pin.unwrap();
    assert_eq!(pinner.memory().pinned_frames(), 2);
    pinner.unpin(promise(), &mut pinned, &[bytes(0x5800, 0x800)], Kind::Memory, Dirty::Clean);
    assert_eq!(pinner.memory().pinned_frames(), 1);
    pinner.unpin(promise(), &mut pinned, &[bytes(0x9000, 0x1000)], Kind::Memory, Dirty::Clean);
    pinner.release(promise(), pinned);
    assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
}

#[test]
fn a_frame_at_both_ends_of_a_range_is_unpinned_with_the_last_of_its_parts() {
    let (pinner, space, range) = frame_5_twice();
    let (mut pinned, spans) = pin(&pinner, &space, range);
    assert_eq!(spans, [bytes(0x5800, 0x800), span(9, 1), bytes(0x5000, 0x800)]);
    let frame = PhysAddr::new(BASE + 0x5000);
    pinner.unpin(promise(), &mut pinned, &spans[..2], Kind::Memory, Dirty::Clean);
    assert_eq!(pinner.memory().pins(frame), Some(1));
    pinner.unpin(promise(), &mut pinned, &spans[2..], Kind::Memory, Dirty::Clean);
    assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
}

#[test]
fn frames_are_pinned_when_the_sink_hears_of_them() {
    struct Looks<'a>(&'a SimMemory);
    impl SpanSink for Looks<'_> {
        fn push(&mut self, span: Span, _kind: Kind) -> Result<(), Stopped> {
            if self.0.pins(span.paddr()) == Some(1) { Ok(()) } else { Err(Stopped) }
        }
    }
    let (pinner, space) = space();
    let mut sink = Looks(pinner.memory());
    assert!(pinner.pin(&space, user(0x1000, 0x4000), Prot::READ, &mut sink).is_ok());
}

#[test]
fn a_frame_pinned_in_parts_is_unpinned_with_its_last_byte() {
    let (pinner, space) = space();
    let (mut pinned, spans) = pin(&pinner, &space, user(0x1800, 0x1000));
    assert_eq!(spans, [bytes(0x5800, 0x1000)]);
    let pins = |frame: u64| pinner.memory().pins(PhysAddr::new(BASE + (frame << 12))).unwrap();
    pinner.unpin(promise(), &mut pinned, &[bytes(0x5800, 0x400)], Kind::Memory, Dirty::Clean);
    assert_eq!((pins(5), pins(6)), (1, 1));
    pinner.unpin(promise(), &mut pinned, &[bytes(0x5c00, 0x600)], Kind::Memory, Dirty::Clean);
    assert_eq!((pins(5), pins(6)), (0, 1));
    pinner.unpin(promise(), &mut pinned, &[bytes(0x6200, 0x600)], Kind::Memory, Dirty::Clean);
    pinner.release(promise(), pinned);
    assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
}

#[test]
fn a_frame_cut_in_two_by_unpinning_is_unpinned_once() {
    let (pinner, space) = space();
    let (mut pinned, _) = pin(&pinner, &space, user(0x1000, 0x2000));
    pinner.unpin(
        promise(),
        &mut pinned,
        &[bytes(0x5000, 0x1800), bytes(0x6800, 0x800)],
        Kind::Memory,
        Dirty::Clean,
    );
    pinner.release(promise(), pinned);
    assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
}

#[test]
fn memory_that_a_user_maps_twice_is_pinned_twice() {
    let (pinner, space) = space();
    space.map(UserAddr::new(0x5000), &[span(5, 1), span(6, 1)]).unwrap();
    let (mut pinned, spans) = pin(&pinner, &space, user(0x1000, 0x6000));
    assert_eq!(pinner.memory().pins(PhysAddr::new(BASE + 0x5000)), Some(2));
    assert_eq!(pinner.memory().pins(PhysAddr::new(BASE + 0x6000)), Some(2));
    pinner.unpin(promise(), &mut pinned, &spans, Kind::Memory, Dirty::Clean);
    pinner.release(promise(), pinned);
    assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
}

#[test]
fn wrong_unpins_and_early_releases_are_recorded() {
    let (pinner, space) = space();
    let (mut pinned, _) = pin(&pinner, &space, user(0x1000, 0x2000));
    let frame = PhysAddr::new(BASE + 0x5000);
    pinner.unpin(promise(), &mut pinned, &[span(5, 1)], Kind::Memory, Dirty::Clean);
    pinner.unpin(promise(), &mut pinned, &[span(5, 1)], Kind::Memory, Dirty::Clean);
    pinner.unpin(promise(), &mut pinned, &[span(6, 2)], Kind::Memory, Dirty::Clean);
    // The second unpin of frame 5 was counted, wrongly as the caller did.
    assert_eq!(pinned.bytes_left(), 0);
    let (other, _) = pin(&pinner, &space, user(0x3000, 0x1000));
    pinner.release(promise(), other);
    assert_eq!(
        pinner.memory().violations(),
        [
            Violation::UnpinnedTwice { frame },
            Violation::UnpinnedForeign { span: span(6, 2) },
            Violation::ReleasedWhilePinned { bytes_left: 0x1000 },
        ]
    );
}

#[test]
fn memory_of_somebody_else_is_not_pinned() {
    let (pinner, _) = space();
    let (_, foreign) = space();
    let range = user(0x1000, 0x1000);
    let mut spans: Vec<Span> = Vec::new();
    let error = pinner.pin(&foreign, range, Prot::READ, &mut spans).unwrap_err();
    let foreign = matches!(error.error, PinError::Failed(SimPinError::Foreign { .. }));
    assert!(foreign && error.pin.is_none(), "{error:?}");
}
