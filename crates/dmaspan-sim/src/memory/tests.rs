//! The books that simulated memory keeps, and what each kind of mistake leaves in them.

use std::sync::Arc;

use dmaspan::pin::{Dirty, Kind, PinError, Pinner, SpanSink, Stopped};
use dmaspan::{PhysAddr, Prot, Span, SpanBuf, UserAddr, UserRange};

use super::*;

mod folios;

const BASE: u64 = 0x8000_0000;

fn memory(frames: u64) -> Arc<SimMemory> {
    Arc::new(SimMemory::new(PhysAddr::new(BASE), frames << 12, 12).unwrap())
}

fn span(frame: u64, frames: u64) -> Span {
    bytes(frame << 12, frames << 12)
}

fn bytes(offset: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(BASE + offset), len).unwrap()
}

fn user(start: u64, len: u64) -> UserRange {
    UserRange::from_len(UserAddr::new(start), len).unwrap()
}

/// Frames 5, 6, 2 and 9 at user address 0x1000 of sixteen frames.
fn space() -> (SimPinner, Arc<SimSpace>) {
    let memory = memory(16);
    for part in [span(5, 2), span(2, 1), span(9, 1)] {
        memory.allocate_at(part).unwrap();
    }
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    space.map(UserAddr::new(0x1000), &[span(5, 1), span(6, 1), span(2, 1), span(9, 1)]).unwrap();
    (SimPinner::new(memory), space)
}

fn pin(pinner: &SimPinner, space: &Arc<SimSpace>, range: UserRange) -> (SimPin, Vec<Span>) {
    let mut spans = Vec::new();
    let pin = pinner.pin(space, range, Prot::READ_WRITE, &mut spans).unwrap();
    (pin, spans)
}

mod pinning {
    use super::*;

    #[test]
    fn spans_come_in_user_order_and_each_frame_has_one_pin() {
        let (pinner, space) = space();
        let (mut pinned, spans) = pin(&pinner, &space, user(0x1000, 0x4000));
        assert_eq!(spans, [span(5, 2), span(2, 1), span(9, 1)]);
        assert_eq!(pinned.bytes_left(), 0x4000);
        let pins = |frame: u64| pinner.memory().pins(PhysAddr::new(BASE + (frame << 12)));
        assert_eq!(
            [2, 5, 6, 9, 4, 16].map(pins),
            [Some(1), Some(1), Some(1), Some(1), Some(0), None]
        );
        pinner.unpin(&mut pinned, &[span(6, 1), span(9, 1)], Kind::Memory, Dirty::Clean);
        assert_eq!((pins(5), pins(6), pins(9)), (Some(1), Some(0), Some(0)));
        pinner.unpin(&mut pinned, &[span(2, 1), span(5, 1)], Kind::Memory, Dirty::Written);
        pinner.release(pinned);
        assert_eq!(pinner.memory().pinned_frames(), 0);
        let dirty = |frame: u64| pinner.memory().is_dirty(PhysAddr::new(BASE + (frame << 12)));
        assert_eq!([2, 5, 6].map(dirty), [Some(true), Some(true), Some(false)]);
        assert_eq!(pinner.memory().violations(), []);
    }

    #[test]
    fn a_hole_is_an_error_with_nothing_pinned() {
        let (pinner, space) = space();
        space.unmap(user(0x3000, 0x1000));
        for (range, hole) in [
            (user(0x1000, 0x4000), 0x3000),
            (user(0x0, 0x2000), 0x0),
            (user(0x4000, 0x2000), 0x5000),
        ] {
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
        pinner.unpin(&mut pinned, &spans, Kind::Memory, Dirty::Clean);
        pinner.release(pinned);
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
        pinner.unpin(&mut pinned, sink.spans(), Kind::Memory, Dirty::Clean);
        pinner.release(pinned);
        assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
        let mut none = SpanBuf::new(&mut []);
        let error = pinner.pin(&space, user(0x1000, 0x4000), Prot::READ, &mut none).unwrap_err();
        assert!(error.pin.is_none());
        assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
    }

    #[test]
    fn a_frame_of_which_a_stopped_sink_took_a_part_stays_pinned_for_that_part() {
        let (pinner, space) = space();
        // Frame 5 in two parts, the second before another frame: nothing joins.
        space.map(UserAddr::new(0), &[bytes(0x5000, 0x800), bytes(0x9000, 0x1000)]).unwrap();
        space.map(UserAddr::new(0x1800), &[bytes(0x5800, 0x800)]).unwrap();
        let mut room = SpanBuf::room::<2>();
        let mut sink = SpanBuf::new(&mut room);
        let error = pinner.pin(&space, user(0, 0x2000), Prot::READ, &mut sink).unwrap_err();
        let mut pinned = error.pin.unwrap();
        assert_eq!(pinner.memory().pinned_frames(), 2);
        pinner.unpin(&mut pinned, &[bytes(0x5000, 0x800)], Kind::Memory, Dirty::Clean);
        assert_eq!(pinner.memory().pinned_frames(), 1);
        pinner.unpin(&mut pinned, &[bytes(0x9000, 0x1000)], Kind::Memory, Dirty::Clean);
        pinner.release(pinned);
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
        pinner.unpin(&mut pinned, &[bytes(0x5800, 0x400)], Kind::Memory, Dirty::Clean);
        assert_eq!((pins(5), pins(6)), (1, 1));
        pinner.unpin(&mut pinned, &[bytes(0x5c00, 0x600)], Kind::Memory, Dirty::Clean);
        assert_eq!((pins(5), pins(6)), (0, 1));
        pinner.unpin(&mut pinned, &[bytes(0x6200, 0x600)], Kind::Memory, Dirty::Clean);
        pinner.release(pinned);
        assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
    }

    #[test]
    fn a_frame_cut_in_two_by_unpinning_is_unpinned_once() {
        let (pinner, space) = space();
        let (mut pinned, _) = pin(&pinner, &space, user(0x1000, 0x2000));
        pinner.unpin(
            &mut pinned,
            &[bytes(0x5000, 0x1800), bytes(0x6800, 0x800)],
            Kind::Memory,
            Dirty::Clean,
        );
        pinner.release(pinned);
        assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
    }

    #[test]
    fn memory_that_a_user_maps_twice_is_pinned_twice() {
        let (pinner, space) = space();
        space.map(UserAddr::new(0x5000), &[bytes(0x5000, 0x1800), bytes(0x6800, 0x800)]).unwrap();
        let (mut pinned, spans) = pin(&pinner, &space, user(0x1000, 0x6000));
        assert_eq!(pinner.memory().pins(PhysAddr::new(BASE + 0x5000)), Some(2));
        assert_eq!(pinner.memory().pins(PhysAddr::new(BASE + 0x6000)), Some(2));
        pinner.unpin(&mut pinned, &spans, Kind::Memory, Dirty::Clean);
        pinner.release(pinned);
        assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
    }

    #[test]
    fn wrong_unpins_and_early_releases_are_recorded() {
        let (pinner, space) = space();
        let (mut pinned, _) = pin(&pinner, &space, user(0x1000, 0x2000));
        let frame = PhysAddr::new(BASE + 0x5000);
        pinner.unpin(&mut pinned, &[span(5, 1)], Kind::Memory, Dirty::Clean);
        pinner.unpin(&mut pinned, &[span(5, 1)], Kind::Memory, Dirty::Clean);
        pinner.unpin(&mut pinned, &[span(6, 2)], Kind::Memory, Dirty::Clean);
        // The second unpin of frame 5 was counted, wrongly as the caller did.
        assert_eq!(pinned.bytes_left(), 0);
        let (other, _) = pin(&pinner, &space, user(0x3000, 0x1000));
        pinner.release(other);
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
}

mod violations {
    use super::*;

    #[test]
    fn a_device_that_touches_unpinned_memory_is_recorded_and_served() {
        let memory = memory(4);
        memory.allocate_at(span(1, 2)).unwrap();
        memory.pin_frames(&[span(2, 1)]);
        let paddr = PhysAddr::new(BASE + 0x1ffe);
        Bus::write(&*memory, paddr, &[1, 2, 3, 4]).unwrap();
        let mut back = [0; 4];
        memory.cpu_read(paddr, &mut back).unwrap();
        assert_eq!(back, [1, 2, 3, 4]);
        let state = FrameState::Owned;
        let touched = Violation::TouchedUnpinned { paddr, access: Access::Write, state };
        assert_eq!(memory.violations(), [touched]);
        Bus::read(&*memory, PhysAddr::new(BASE + 4), &mut back).unwrap();
        let (paddr, state) = (PhysAddr::new(BASE + 4), FrameState::Free);
        let touched = Violation::TouchedUnpinned { paddr, access: Access::Read, state };
        assert_eq!(memory.violations()[1..], [touched]);
    }

    #[test]
    fn a_write_that_is_unpinned_as_clean_is_recorded() {
        let memory = memory(4);
        let frames = [span(0, 2)];
        memory.allocate_at(frames[0]).unwrap();
        let written = PhysAddr::new(BASE + 0x1000);
        for (dirty, expected) in [
            (Dirty::Written, vec![]),
            (Dirty::Clean, vec![Violation::WrittenButClean { frame: written }]),
        ] {
            memory.pin_frames(&frames);
            Bus::write(&*memory, written, &[1]).unwrap();
            memory.unpin_frames(&frames, dirty);
            assert_eq!(memory.violations(), expected);
        }
    }

    #[test]
    fn freeing_pinned_or_free_frames_is_recorded() {
        let memory = memory(4);
        memory.allocate_at(span(0, 2)).unwrap();
        memory.pin_frames(&[span(1, 1)]);
        memory.free(&[span(0, 2)]);
        let frame = PhysAddr::new(BASE + 0x1000);
        let mut expected = vec![Violation::FreedWhilePinned { frame, pins: 1 }];
        assert_eq!(memory.violations(), expected);
        assert_eq!(memory.frame_state(frame), Some(FrameState::Free));
        memory.free(&[span(0, 1)]);
        expected.push(Violation::FreedTwice { frame: PhysAddr::new(BASE) });
        memory.free(&[bytes(0x10, 0x1000)]);
        expected.push(Violation::NotFrames { span: bytes(0x10, 0x1000) });
        memory.unpin_frames(&[span(3, 1)], Dirty::Clean);
        expected.push(Violation::UnpinnedTwice { frame: PhysAddr::new(BASE + 0x3000) });
        memory.pin_frames(&[span(3, 2)]);
        expected.push(Violation::NotFrames { span: span(3, 2) });
        assert_eq!(memory.violations(), expected);
    }
}

mod allocation {
    use super::*;

    #[test]
    fn scattered_frames_are_distinct_and_no_two_in_a_row_are_neighbours() {
        for seed in 0..50 {
            let memory = memory(64);
            memory.allocate_at(span(10, 4)).unwrap();
            // All sixty frames that are left, so that neighbours are plenty.
            let spans = memory.allocate_scattered(60 << 12, seed).unwrap();
            let mut coalesced = spans.clone();
            coalesced.dedup_by(|next, span| span.join(*next).is_some());
            assert_eq!(coalesced.len(), 60);
            let mut frames: Vec<_> = spans.iter().map(|span| span.paddr()).collect();
            frames.sort_unstable();
            frames.dedup();
            assert_eq!(frames.len(), 60);
            assert!(spans.iter().all(|span| span.len() == 0x1000));
            assert!(memory.allocate(0x1000, 12).is_err());
        }
        let again = |seed| memory(64).allocate_scattered(60 << 12, seed).unwrap();
        assert_eq!(again(7), again(7));
        assert_ne!(again(7), again(8));
    }

    #[test]
    fn folios_are_naturally_aligned_and_do_not_overlap() {
        for seed in 0..20 {
            let memory = memory(1024);
            let orders = [9, 0, 4, 0, 4, 3];
            let folios = memory.allocate_folios(&orders, seed).unwrap();
            for (folio, order) in folios.iter().zip(orders) {
                assert_eq!(folio.len(), 0x1000 << order);
                assert_eq!(folio.paddr().get() % folio.len(), 0);
            }
            memory.free(&folios);
            assert_eq!(memory.violations(), []);
        }
        let memory = memory(1024);
        assert!(memory.allocate_folios(&[9, 9, 0], 1).is_err());
        // Nothing of the refused call stays allocated.
        assert!(memory.allocate(1024 << 12, 12).is_ok());
    }

    #[test]
    fn allocations_keep_their_alignment_and_refuse_what_is_taken() {
        let memory = memory(16);
        assert_eq!(memory.allocate(0x3000, 12).unwrap(), span(0, 3));
        assert_eq!(memory.allocate(0x1000, 14).unwrap(), span(4, 1));
        let refused = memory.allocate_at(span(2, 2));
        assert_eq!(refused, Err(MemoryError::Full { bytes: 0x2000, align_lg2: 12 }));
        assert_eq!(memory.frame_state(PhysAddr::new(BASE + 0x3000)), Some(FrameState::Free));
        assert!(memory.allocate_at(span(15, 2)).is_err());
        assert!(memory.allocate_at(bytes(0x800, 0x1000)).is_err());
        assert!(memory.allocate(0x1001, 12).is_err());
        assert!(memory.allocate(0, 12).is_err());
    }

    #[test]
    fn sizes_that_cannot_be_simulated_are_refused() {
        let new = |base, bytes, lg2| SimMemory::new(PhysAddr::new(base), bytes, lg2).unwrap_err();
        assert!(matches!(new(0, 0x1000, 2), MemoryError::Granule { .. }));
        assert!(matches!(new(0, 0x1800, 12), MemoryError::Unaligned { value: 0x1800, .. }));
        assert!(matches!(new(0, 0, 12), MemoryError::Unaligned { value: 0, .. }));
        assert!(matches!(new(u64::MAX - 0xfff, 0x2000, 12), MemoryError::TooLarge { .. }));
    }

    #[test]
    fn the_last_frame_of_the_space_is_memory() {
        let base = u64::MAX - 0x1fff;
        let memory = SimMemory::new(PhysAddr::new(base), 0x2000, 12).unwrap();
        let whole = memory.allocate(0x2000, 12).unwrap();
        assert_eq!(whole.last(), PhysAddr::new(u64::MAX));
        memory.pin_frames(&[whole]);
        Bus::write(&memory, PhysAddr::new(u64::MAX - 1), &[1, 2]).unwrap();
        let beyond = Bus::write(&memory, PhysAddr::new(u64::MAX), &[1, 2]);
        assert_eq!(beyond, Err(BusError::Nobody { paddr: PhysAddr::new(u64::MAX) }));
        memory.unpin_frames(&[whole], Dirty::Written);
        memory.free(&[whole]);
        assert_eq!(memory.violations(), []);
        assert_eq!(memory.allocate_folios(&[1], 3).unwrap(), [whole]);
    }
}

mod contents {
    use super::*;

    #[test]
    fn memory_is_zero_until_it_is_written_and_again_after_it_was_freed() {
        let memory = memory(4);
        let paddr = PhysAddr::new(BASE + 0xffe);
        let get = || {
            let mut bytes = [0xaa; 4];
            memory.cpu_read(paddr, &mut bytes).unwrap();
            bytes
        };
        assert_eq!(get(), [0; 4]);
        memory.cpu_write(paddr, &[1, 2, 3, 4]).unwrap();
        assert_eq!(get(), [1, 2, 3, 4]);
        memory.allocate_at(span(0, 1)).unwrap();
        memory.free(&[span(0, 1)]);
        assert_eq!(get(), [0, 0, 3, 4]);
    }

    #[test]
    fn accesses_outside_name_the_first_address_at_which_nothing_is() {
        let memory = memory(4);
        let error = |paddr, len| memory.cpu_write(PhysAddr::new(paddr), &vec![1; len]).unwrap_err();
        let nobody = |paddr| BusError::Nobody { paddr: PhysAddr::new(paddr) };
        assert_eq!(error(BASE + 0x3ffe, 4), nobody(BASE + 0x4000));
        assert_eq!(error(BASE - 1, 4), nobody(BASE - 1));
        assert_eq!(error(u64::MAX, 4), nobody(u64::MAX));
        assert_eq!(memory.cpu_write(PhysAddr::new(0), &[]), Ok(()));
        let mut last = [1; 2];
        memory.cpu_read(PhysAddr::new(BASE + 0x3ffe), &mut last).unwrap();
        assert_eq!(last, [0; 2]);
    }

    #[test]
    fn a_user_reads_and_writes_over_the_borders_of_spans() {
        let (pinner, space) = space();
        space.write(UserAddr::new(0x2fff), &[7, 8]).unwrap();
        let mut bytes = [0; 1];
        pinner.memory().cpu_read(PhysAddr::new(BASE + 0x2000), &mut bytes).unwrap();
        assert_eq!(bytes, [8]);
        let mut back = [0; 4];
        space.read(UserAddr::new(0x2ffe), &mut back).unwrap();
        assert_eq!(back, [0, 7, 8, 0]);
        assert_eq!(space.read(UserAddr::new(0x4ffe), &mut back), Err(UserAddr::new(0x5000)));
        assert_eq!(space.read(UserAddr::new(u64::MAX), &mut back), Err(UserAddr::new(u64::MAX)));
    }

    #[test]
    fn unmapping_cuts_segments_and_the_top_of_the_space_can_be_mapped() {
        let memory = memory(16);
        let space = Arc::new(SimSpace::new(memory));
        let top = u64::MAX - 0x3fff;
        assert_eq!(space.map(UserAddr::new(top), &[span(4, 4)]), Some(user(top, 0x4000)));
        assert_eq!(space.map(UserAddr::new(top), &[span(4, 5)]), None);
        assert_eq!(space.map(UserAddr::new(top), &[]), None);
        space.unmap(user(top + 0x1000, 0x1000));
        assert_eq!(space.resolve(user(top, 0x4000)), Err(UserAddr::new(top + 0x1000)));
        let upper =
            Segment { user: user(top + 0x2000, 0x2000), paddr: PhysAddr::new(BASE + 0x6000) };
        assert_eq!(space.resolve(upper.user), Ok(vec![upper]));
        let lower = Segment { user: user(top, 0x1000), paddr: PhysAddr::new(BASE + 0x4000) };
        assert_eq!(space.resolve(lower.user), Ok(vec![lower]));
    }
}
