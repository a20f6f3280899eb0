//! The books that simulated memory keeps, and what each kind of mistake leaves in them.

use std::sync::Arc;

use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink, Stopped};
use dmaspan::{PhysAddr, Promise, Prot, Span, SpanBuf, UserAddr, UserRange};

use super::*;

mod folios;
mod pinning;
mod random;
mod spaces;
mod threads;

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

#[expect(unsafe_code, reason = "the tests are the pins' users")]
fn promise() -> Promise<'static> {
    // SAFETY: no device was given the spans.
    unsafe { Promise::new() }
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
        assert_eq!(refused, Err(AllocError::Full { bytes: 0x2000, align_lg2: 12 }));
        assert_eq!(memory.frame_state(PhysAddr::new(BASE + 0x3000)), Some(FrameState::Free));
        assert!(memory.allocate_at(span(15, 2)).is_err());
        assert!(memory.allocate_at(bytes(0x800, 0x1000)).is_err());
        assert!(memory.allocate(0x1001, 12).is_err());
        assert!(memory.allocate(0, 12).is_err());
    }

    #[test]
    fn sizes_that_cannot_be_simulated_are_refused() {
        let new = |base, bytes, lg2| SimMemory::new(PhysAddr::new(base), bytes, lg2).unwrap_err();
        assert!(matches!(new(0, 0x1000, 2), AllocError::Granule { .. }));
        assert!(matches!(new(0, 0x1800, 12), AllocError::Unaligned { value: 0x1800, .. }));
        assert!(matches!(new(0, 0, 12), AllocError::Unaligned { value: 0, .. }));
        assert!(matches!(new(u64::MAX - 0xfff, 0x2000, 12), AllocError::TooLarge { .. }));
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
}
