//! Folios, what keeps them, and memory that was cut up.

use super::*;

const BOTH: [Books; 2] = [Books::Exact, Books::Folios];

fn with_books(frames: u64, books: Books) -> SimMemory {
    SimMemory::with_books(PhysAddr::new(BASE), frames << 12, 12, books).unwrap()
}

fn paddr(frame: u64) -> PhysAddr {
    PhysAddr::new(BASE + (frame << 12))
}

#[test]
fn every_frame_of_a_folio_of_any_order_leads_to_it() {
    for granule_lg2 in [3, 5, 12, 14, 16, 20] {
        // Neither end is aligned to more than a frame.
        let base = PhysAddr::new((1 << 50) - (3 << granule_lg2));
        let memory =
            SimMemory::with_books(base, (1 << 20) << granule_lg2, granule_lg2, Books::Folios);
        let memory = memory.unwrap();
        let initial = memory.free_blocks();
        let mut folios = Vec::new();
        for order in (0..=18).chain((0..=18).rev()) {
            folios.push(memory.allocate_folio(order).unwrap());
        }
        for (folio, order) in folios.iter().zip((0..=18).chain((0..=18).rev())) {
            let span = folio.span();
            assert_eq!((folio.order(), span.len()), (order, 1 << (order + granule_lg2)));
            assert_eq!(span.paddr().get() % span.len(), 0);
            let middle = span.paddr().wrapping_add(span.len() / 2);
            for inside in [span.paddr(), middle, span.last()] {
                assert_eq!(memory.folio_of(inside), Some(*folio));
            }
            assert_eq!(memory.counts(span.last()), Some(FolioCounts { refs: 1, pins: 0 }));
        }
        let mut spans: Vec<Span> = folios.iter().map(|folio| folio.span()).collect();
        spans.sort_unstable_by_key(|span| span.paddr());
        assert!(spans.windows(2).all(|two| two[0].last() < two[1].paddr()));
        for folio in folios {
            memory.free_folio(folio);
            assert_eq!(memory.folio_of(folio.span().last()), None);
        }
        assert_eq!((memory.free_blocks(), memory.violations()), (initial, vec![]));
    }
}

#[test]
fn a_folio_that_does_not_fit_is_refused_and_nothing_is_allocated() {
    let memory = with_books(1000, Books::Folios);
    let initial = memory.free_blocks();
    let full = AllocError::Full { bytes: 1 << 22, align_lg2: 22 };
    assert_eq!(memory.allocate_folio(10), Err(full));
    assert!(memory.allocate_folio(u32::MAX).is_err());
    assert!(memory.allocate_folios(&[3, u32::MAX], 1).is_err());
    assert_eq!((memory.free_blocks(), memory.violations()), (initial, vec![]));
    assert_eq!(memory.folio_of(PhysAddr::new(BASE - 1)), None);
    assert_eq!(memory.folio_of(paddr(1000)), None);
}

#[test]
fn the_last_holder_of_a_folio_frees_it_be_it_a_reference_or_a_pin() {
    for books in BOTH {
        let memory = with_books(64, books);
        let initial = memory.free_blocks();
        let folio = memory.allocate_folio(3).unwrap();
        let (start, last) = (folio.span().paddr(), folio.span().last());
        memory.get(last, 5);
        memory.put(start, 6);
        assert_eq!((memory.folio_of(start), memory.free_blocks()), (None, initial.clone()));
        let folio = memory.allocate_folio(3).unwrap();
        memory.cpu_write(last, &[9]).unwrap();
        memory.pin_span(folio.span());
        memory.pin_page(last);
        assert_eq!(memory.counts(start), Some(FolioCounts { refs: 1, pins: 9 }));
        memory.put(last, 1);
        memory.unpin_span(folio.span(), Dirty::Clean);
        let mut byte = [0];
        memory.cpu_read(last, &mut byte).unwrap();
        assert_eq!((memory.folio_of(start), byte), (Some(folio), [9]));
        memory.unpin_page(last, Dirty::Written);
        memory.cpu_read(last, &mut byte).unwrap();
        assert_eq!((memory.folio_of(start), byte), (None, [0]));
        assert_eq!((memory.free_blocks(), memory.violations()), (initial, vec![]));
        assert_eq!((memory.pinned_frames(), memory.is_dirty(last)), (0, Some(false)));
    }
}

#[test]
fn folios_count_what_their_frames_do_however_pins_are_cut() {
    let (exact, lean) = (with_books(4096, Books::Exact), with_books(4096, Books::Folios));
    let orders = [9, 0, 0, 4, 1, 0, 9, 3];
    let folios = exact.allocate_folios(&orders, 5).unwrap();
    assert_eq!(lean.allocate_folios(&orders, 5).unwrap(), folios);
    let both = [&exact, &lean];
    let mut rng = crate::rng::Rng::new(3);
    let mut pinned: Vec<Span> = Vec::new();
    let check = || {
        for folio in &folios {
            let frames = (0..folio.len() >> 12).map(|n| folio.paddr().wrapping_add(n << 12));
            let pins: u64 = frames.map(|frame| u64::from(exact.pins(frame).unwrap())).sum();
            let counts = Some(FolioCounts { refs: 1, pins });
            assert_eq!(both.map(|memory| memory.counts(folio.last())), [counts; 2]);
            assert_eq!(lean.pins(folio.paddr()).map(u64::from), Some(pins));
        }
        assert_eq!(lean.pinned_frames() > 0, exact.pinned_frames() > 0);
    };
    for _ in 0..300 {
        let folio = folios[at(rng.below(folios.len() as u64))];
        if rng.below(2) == 0 || pinned.is_empty() {
            // Any bytes: the frames under them are pinned.
            let part = folio.skip(rng.below(folio.len())).unwrap();
            let part = Span::new(part.paddr(), 1 + rng.below(part.len())).unwrap();
            both.iter().for_each(|memory| memory.pin_span(part));
            pinned.push(part);
        } else {
            let part = pinned.swap_remove(at(rng.below(pinned.len() as u64)));
            both.iter().for_each(|memory| memory.unpin_span(part, Dirty::Clean));
        }
        check();
    }
    for part in pinned {
        // Frame by frame, as a page array is unpinned.
        let (first, last) = (part.paddr().get() >> 12, part.last().get() >> 12);
        for frame in first..=last {
            let frame = PhysAddr::new(frame << 12);
            both.iter().for_each(|memory| memory.unpin_page(frame, Dirty::Written));
        }
    }
    assert_eq!(both.map(SimMemory::pinned_frames), [0; 2]);
    assert_eq!(both.map(SimMemory::violations), [vec![], vec![]]);
}

#[test]
fn pins_of_several_threads_end_at_zero_and_nothing_is_lost_on_the_way() {
    for books in BOTH {
        let memory = with_books(2048, books);
        let initial = memory.free_blocks();
        let folios = [memory.allocate_folio(9).unwrap(), memory.allocate_folio(0).unwrap()];
        let [large, small] = folios.map(Folio::span);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let memory = &memory;
                scope.spawn(move || {
                    let own = large.paddr().wrapping_add(thread << 12);
                    memory.get(own, 1);
                    for _ in 0..500 {
                        memory.pin_span(large);
                        memory.pin_page(own);
                        memory.pin_page(small.paddr());
                        // Its own pins are there whatever the others do.
                        let counts = memory.counts(own).unwrap();
                        assert!(counts.refs >= 2 && counts.pins >= 513, "{counts:?}");
                        memory.unpin_span(large, Dirty::Written);
                        memory.unpin_page(own, Dirty::Clean);
                        memory.unpin_page(small.paddr(), Dirty::Clean);
                        let other = memory.allocate_folio(2).unwrap();
                        memory.put(other.span().last(), 1);
                    }
                    memory.put(own, 1);
                });
            }
        });
        let counts = folios.map(|folio| memory.counts(folio.span().paddr()));
        assert_eq!(counts, [Some(FolioCounts { refs: 1, pins: 0 }); 2]);
        folios.iter().for_each(|folio| memory.put(folio.span().paddr(), 1));
        assert_eq!((memory.free_blocks(), memory.violations()), (initial, vec![]));
    }
}

#[test]
fn a_tebibyte_in_large_folios_has_records_of_blocks_only() {
    let memory = SimMemory::with_books(PhysAddr::new(0), 1 << 40, 12, Books::Folios).unwrap();
    let blocks = 1 << (40 - 21);
    let empty = memory.metadata_bytes();
    assert!(empty <= 64 * blocks, "{empty}");
    let whole = Span::new(PhysAddr::new(0), 1 << 39).unwrap();
    memory.allocate_at(whole).unwrap();
    assert_eq!(memory.folio_of(whole.last()).unwrap().order(), 27);
    let gibibytes: Vec<Folio> = (0..256).map(|_| memory.allocate_folio(18).unwrap()).collect();
    let small = (0..1000).map(|_| memory.allocate_folio(9).unwrap()).collect::<Vec<_>>();
    for folio in gibibytes.iter().chain(&small) {
        memory.pin_span(folio.span());
    }
    memory.pin_span(whole);
    assert_eq!(memory.counts(whole.last()), Some(FolioCounts { refs: 1, pins: 1 << 27 }));
    assert_eq!(memory.metadata_bytes(), empty);
    // A single frame has one block cut up, as have ones beside it.
    for frame in [0; 512].map(|_| memory.allocate_folio(0).unwrap()) {
        memory.pin_span(frame.span());
    }
    let cut_up = memory.metadata_bytes() - empty;
    assert!(0 < cut_up && cut_up <= 14 << 10, "{cut_up}");
    assert_eq!(memory.violations(), []);
}

#[test]
fn memory_is_fragmented_to_the_order_and_the_share_that_are_asked_for() {
    for (percent, highest) in [(0, 4), (30, 0), (50, 8), (75, 3), (100, 6), (100, 8), (200, 2)] {
        for seed in 0..3 {
            let memory = with_books(1 << 14, Books::Folios);
            memory.allocate_at(span(3, 700)).unwrap();
            let initial = memory.free_blocks();
            let frames = memory.fragment(percent, highest, seed);
            let in_order = |(order, blocks): (usize, &u64)| blocks << order;
            let free = memory.free_blocks();
            let sum: u64 = free.iter().enumerate().map(in_order).sum();
            let low: u64 = free.iter().enumerate().take(at(highest) + 1).map(in_order).sum();
            let percent = u64::from(percent.min(100));
            assert!(low * 100 >= sum * percent, "{percent} {highest}: {free:?}");
            // Not by one block more than it takes.
            assert!(low * 100 <= sum * percent + (200 << (highest + 1)) || frames.is_empty());
            let larger = memory.allocate_folio(highest + 1);
            assert_eq!(larger.is_err(), percent == 100);
            let larger = larger.map(Folio::span).into_iter();
            memory.free(&larger.chain(frames).collect::<Vec<_>>());
            assert_eq!(memory.free_blocks(), initial);
            assert_eq!(memory.violations(), []);
        }
    }
    let fragmented = |seed| with_books(4096, Books::Folios).fragment(60, 2, seed);
    assert_eq!(fragmented(1), fragmented(1));
    assert_ne!(fragmented(1), fragmented(2));
}

#[test]
fn what_is_left_of_a_folio_that_is_freed_in_part_stays_as_smaller_ones() {
    for books in BOTH {
        let memory = with_books(64, books);
        let initial = memory.free_blocks();
        memory.allocate_at(span(16, 16)).unwrap();
        memory.get(paddr(16), 2);
        memory.put(paddr(16), 2);
        memory.free(&[span(21, 3)]);
        let folio = |frame| memory.folio_of(paddr(frame)).map(Folio::span);
        assert_eq!(
            [16, 20, 21, 23, 24].map(folio),
            [Some(span(16, 4)), Some(span(20, 1)), None, None, Some(span(24, 8))]
        );
        assert_eq!(memory.counts(paddr(31)), Some(FolioCounts { refs: 1, pins: 0 }));
        memory.free(&[span(16, 5), span(24, 8)]);
        assert_eq!((memory.free_blocks(), memory.violations()), (initial, vec![]));
    }
    // Pins of the rest go with it where they are known.
    let memory = with_books(64, Books::Exact);
    memory.allocate_at(span(16, 16)).unwrap();
    memory.pin_span(span(24, 6));
    memory.free(&[span(16, 9)]);
    let frame = paddr(24);
    assert_eq!(memory.violations(), [Violation::FreedWhilePinned { frame, pins: 1 }]);
    let pins = |frame| memory.counts(paddr(frame)).map(|counts| counts.pins);
    assert_eq!([25, 26, 28].map(pins), [Some(1), Some(2), Some(2)]);
    memory.unpin_span(span(25, 5), Dirty::Clean);
    assert_eq!([25, 26, 28].map(pins), [Some(0), Some(0), Some(0)]);
    assert_eq!(memory.violations().len(), 1);
}

#[test]
fn holding_what_is_free_and_giving_back_what_nobody_holds_is_recorded() {
    for books in BOTH {
        let memory = with_books(64, books);
        memory.pin_span(span(43, 2));
        memory.get(paddr(45), 1);
        memory.put(paddr(46), 1);
        let mut expected = vec![
            Violation::HeldFree { frame: paddr(43) },
            Violation::HeldFree { frame: paddr(45) },
            Violation::PutTwice { frame: paddr(46) },
        ];
        let folio = memory.allocate_folio(2).unwrap().span().paddr();
        let frame = folio.wrapping_add(0x1fff);
        let whole = folio.wrapping_add(0x1000);
        memory.put(frame, 2);
        expected.push(Violation::PutTwice { frame: whole });
        memory.get(frame, folio::MAX_REFS);
        expected.push(Violation::TooManyReferences { frame: whole });
        memory.get(frame, u32::MAX);
        expected.push(Violation::TooManyReferences { frame: whole });
        assert_eq!(memory.counts(frame), Some(FolioCounts { refs: 1, pins: 0 }));
        memory.unpin_page(frame, Dirty::Clean);
        expected.push(Violation::UnpinnedTwice { frame: whole });
        memory.get(frame, 3);
        memory.free(&[Span::new(folio, 0x4000).unwrap()]);
        expected.push(Violation::FreedWhileReferenced { frame: folio, refs: 3 });
        memory.pin_page(paddr(64));
        memory.put(PhysAddr::new(BASE - 1), 1);
        memory.pin_span(span(63, 2));
        let outside = |paddr, len| Span::new(PhysAddr::new(paddr), len).unwrap();
        expected.push(Violation::NotFrames { span: outside(BASE + (64 << 12), 1) });
        expected.push(Violation::NotFrames { span: outside(BASE - 1, 1) });
        expected.push(Violation::NotFrames { span: span(63, 2) });
        assert_eq!(memory.violations(), expected);
    }
}

#[test]
fn books_of_folios_notice_mistakes_by_folio() {
    let memory = with_books(64, Books::Folios);
    let folio = memory.allocate_folio(4).unwrap();
    let (frame, last) = (folio.span().paddr(), folio.span().last());
    memory.pin_page(last);
    memory.unpin_span(folio.span(), Dirty::Clean);
    let mut expected = vec![Violation::UnpinnedTwice { frame }];
    assert_eq!(memory.pins(frame), Some(1));
    Bus::write(&memory, frame, &[1]).unwrap();
    memory.unpin_page(last, Dirty::Clean);
    expected.push(Violation::WrittenButClean { frame });
    memory.pin_page(frame);
    Bus::write(&memory, last, &[1]).unwrap();
    memory.unpin_page(frame, Dirty::Written);
    assert_eq!(memory.is_dirty(last), Some(true));
    let state = FrameState::Owned;
    Bus::write(&memory, last, &[1]).unwrap();
    let access = Access::Write;
    expected.push(Violation::TouchedUnpinned { paddr: last, access, state });
    memory.pin_span(folio.span());
    assert_eq!(memory.pinned_frames(), 16);
    memory.free_folio(folio);
    expected.push(Violation::FreedWhilePinned { frame, pins: 16 });
    memory.free_folio(folio);
    expected.push(Violation::FreedTwice { frame });
    assert_eq!(memory.violations(), expected);
    assert_eq!((memory.pinned_frames(), memory.free_blocks().len()), (0, 7));
}
