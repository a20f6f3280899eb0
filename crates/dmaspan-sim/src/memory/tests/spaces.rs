//! Ranges, tables, faults and device memory of address spaces.

use super::*;

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
    let upper = UserSpan { user: user(top + 0x2000, 0x2000), paddr: PhysAddr::new(BASE + 0x6000) };
    assert_eq!(space.resolve(upper.user), Ok(vec![upper]));
    let lower = UserSpan { user: user(top, 0x1000), paddr: PhysAddr::new(BASE + 0x4000) };
    assert_eq!(space.resolve(lower.user), Ok(vec![lower]));
}

const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;

/// A space over `2^lg2` bytes at 0 in frames of `2^granule_lg2`, with books by folio.
fn large(lg2: u32, granule_lg2: u32) -> (SimPinner, Arc<SimSpace>) {
    let bytes = 1u64 << lg2;
    let memory = SimMemory::with_books(PhysAddr::new(0), bytes, granule_lg2, Books::Folios);
    let memory = Arc::new(memory.unwrap());
    (SimPinner::new(Arc::clone(&memory)), Arc::new(SimSpace::new(memory)))
}

fn at(user: u64) -> UserAddr {
    UserAddr::new(user)
}

fn device(paddr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(paddr), len).unwrap()
}

/// Kinds and spans, joined as a container does.
#[derive(Default)]
pub(super) struct Kinds(pub(super) Vec<(Kind, Span)>);

impl SpanSink for Kinds {
    fn push(&mut self, span: Span, kind: Kind) -> Result<(), Stopped> {
        let last = self.0.last_mut().filter(|(last, _)| *last == kind);
        match last.and_then(|(_, last)| Some((last.join(span)?, last))) {
            Some((joined, last)) => *last = joined,
            None => self.0.push((kind, span)),
        }
        Ok(())
    }
}

fn error(pinner: &SimPinner, space: &Arc<SimSpace>, range: UserRange, prot: Prot) -> SimPinError {
    match pinner.pin(space, range, prot, &mut Kinds::default()) {
        Err(PinFailed { error: PinError::Failed(error), pin: None, .. }) => error,
        other => panic!("{other:?}"),
    }
}

/// Pins, gives back and returns what was pushed and how many leaves were looked up.
fn look(pinner: &SimPinner, space: &Arc<SimSpace>, range: UserRange) -> (Vec<(Kind, Span)>, u64) {
    let (before, mut kinds) = (pinner.lookups(), Kinds::default());
    let mut pinned = pinner.pin(space, range, Prot::READ_WRITE, &mut kinds).unwrap();
    for (kind, span) in &kinds.0 {
        pinner.unpin(promise(), &mut pinned, &[*span], *kind, Dirty::Clean);
    }
    pinner.release(promise(), pinned);
    assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
    (kinds.0, pinner.lookups() - before)
}

mod leaves {
    use super::*;

    #[test]
    fn they_are_as_large_as_both_addresses_and_the_folio_permit() {
        let sizes: [(u32, [u64; 4]); 3] = [
            (12, [1 << 12, 1 << 16, 1 << 21, 1 << 30]),
            (14, [1 << 14, 1 << 21, 1 << 25, 1 << 36]),
            (16, [1 << 16, 1 << 21, 1 << 29, 1 << 42]),
        ];
        for (granule_lg2, leaves) in sizes {
            let (_, space) = large(granule_lg2 + 28, granule_lg2);
            for leaf in leaves.into_iter().filter(|leaf| leaf.ilog2() <= granule_lg2 + 22) {
                let order = leaf.ilog2() - granule_lg2;
                let folio = space.memory().allocate_folio(order).unwrap().span();
                let user = at(leaf << 4);
                space.map(user, &[folio]).unwrap();
                let last = user.wrapping_add(leaf - 1);
                assert_eq!(space.frame_at(last), Some((folio.last(), leaf, Kind::Memory)));
                // One granule off, or one folio short: the smallest.
                let user = at((leaf << 5) + (1 << granule_lg2));
                space.map(user, &[folio]).unwrap();
                assert_eq!(space.frame_at(user).unwrap().1, 1 << granule_lg2);
            }
        }
    }

    #[test]
    fn a_leaf_does_not_reach_over_the_border_of_a_folio_but_a_span_does() {
        let (pinner, space) = large(30, 12);
        // Two halves of a naturally aligned 2M block, which are allocations of their own.
        let halves: Vec<Span> =
            (0..2).map(|_| space.memory().allocate_folio(8).unwrap().span()).collect();
        let mut sorted = halves.clone();
        sorted.sort_by_key(|span| span.paddr());
        let whole = sorted[0].join(sorted[1]).unwrap();
        let range = space.map(at(G1), &sorted).unwrap();
        assert_eq!(space.frame_at(at(G1)).unwrap().1, 1 << 16);
        assert_eq!(look(&pinner, &space, range), (vec![(Kind::Memory, whole)], 32));
        // The other way round they are two.
        sorted.reverse();
        let range = space.map(at(G1), &sorted).unwrap();
        let two: Vec<_> = sorted.iter().map(|span| (Kind::Memory, *span)).collect();
        assert_eq!(look(&pinner, &space, range), (two, 32));
    }

    #[test]
    fn a_limit_of_the_mapping_keeps_them_small() {
        let (pinner, space) = large(31, 12);
        let folio = space.memory().allocate_folio(18).unwrap().span();
        for (max_leaf_lg2, lookups) in [(30, 1), (29, 512), (21, 512), (20, 1 << 14), (0, 1 << 18)]
        {
            let options = MapOptions { max_leaf_lg2, ..MapOptions::default() };
            let range = space.map_with(at(G1), &[folio], options).unwrap();
            assert_eq!(look(&pinner, &space, range), (vec![(Kind::Memory, folio)], lookups));
        }
    }

    #[test]
    fn addresses_of_any_height_have_leaves() {
        let (pinner, space) = large(30, 12);
        let folio = space.memory().allocate_folio(9).unwrap().span();
        let tops = [0, 1 << 39, 1 << 47, 1 << 56, (1 << 63) - M2, u64::MAX - (M2 - 1)];
        for top in tops {
            let range = space.map(at(top), &[folio]).unwrap();
            assert_eq!(look(&pinner, &space, range), (vec![(Kind::Memory, folio)], 1));
        }
        for top in tops {
            assert_eq!(space.frame_at(at(top)).map(|(paddr, ..)| paddr), Some(folio.paddr()));
            space.unmap(user(top, M2));
            assert_eq!(space.frame_at(at(top)), None);
        }
    }

    #[test]
    fn what_stays_of_a_leaf_that_lost_a_part_is_faulted_in_by_smaller_ones() {
        let (pinner, space) = large(30, 12);
        let folio = space.memory().allocate_folio(9).unwrap().span();
        space.map(at(M2), &[folio]).unwrap();
        space.unmap(user(M2 + 0x8_1000, 0x1000));
        assert_eq!(space.frame_at(at(M2)), None);
        let below = user(M2, 0x8_1000);
        let expected = device(folio.paddr().get(), 0x8_1000);
        // Eight leaves of 64K and one of 4K.
        assert_eq!(look(&pinner, &space, below), (vec![(Kind::Memory, expected)], 9));
        assert_eq!(space.faults(), 9);
        let hole = at(M2 + 0x8_1000);
        let range = user(M2, M2);
        let refused = error(&pinner, &space, range, Prot::READ);
        assert_eq!(refused, SimPinError::Hole { range, at: hole });
    }
}

mod devices {
    use super::*;

    const BAR: u64 = 1 << 45;

    #[test]
    fn look_ups_go_by_the_leaf_whatever_the_size() {
        let (pinner, space) = large(20, 12);
        let bar = device(BAR, 32 * G1);
        for (max_leaf_lg2, lookups) in [(30, 32), (21, 16384)] {
            let options = MapOptions { max_leaf_lg2, ..MapOptions::default() };
            let range = space.map_device_with(at(1 << 46), bar, options).unwrap();
            assert_eq!(look(&pinner, &space, range), (vec![(Kind::Mmio, bar)], lookups));
        }
        let four: Vec<Span> = (0..4).map(|n| device(BAR + n * 256 * G1, 128 * G1)).collect();
        for (n, bar) in four.iter().enumerate() {
            space.map_device(at(n as u64 * 128 * G1), *bar, Rights::ReadWrite).unwrap();
        }
        let expected: Vec<_> = four.iter().map(|bar| (Kind::Mmio, *bar)).collect();
        assert_eq!(look(&pinner, &space, user(0, 512 * G1)), (expected, 512));
    }

    #[test]
    fn a_misaligned_user_address_gets_the_leaves_that_its_alignment_permits() {
        let (pinner, space) = large(20, 12);
        let bar = device(BAR, 4 * G1);
        // 2M off, in both directions the ends are cut: 2M leaves throughout.
        for (off, lookups) in [(0, 4), (M2, 2048), (512 * M2 / 2, 2048), (0x1000, 1 << 20)] {
            let range = space.map_device(at(64 * G1 + off), bar, Rights::ReadWrite).unwrap();
            assert_eq!(look(&pinner, &space, range), (vec![(Kind::Mmio, bar)], lookups));
            space.unmap(range);
        }
    }

    #[test]
    fn memory_and_devices_mix_in_one_range() {
        let (pinner, space) = large(30, 12);
        let folio = space.memory().allocate_folio(9).unwrap().span();
        let small = space.memory().allocate_folio(0).unwrap().span();
        let bar = device(BAR, M2);
        space.map(at(G1), &[folio]).unwrap();
        space.map_device(at(G1 + M2), bar, Rights::ReadWrite).unwrap();
        space.map(at(G1 + 2 * M2), &[small]).unwrap();
        let range = user(G1, 2 * M2 + 0x1000);
        let expected = vec![(Kind::Memory, folio), (Kind::Mmio, bar), (Kind::Memory, small)];
        assert_eq!(look(&pinner, &space, range), (expected, 3));
        assert_eq!(pinner.chargeable(&space, range), M2 + 0x1000);
        assert_eq!(pinner.chargeable(&space, user(G1 + M2 - 1, 2)), 1);
    }

    #[test]
    fn what_a_user_writes_is_what_other_users_and_devices_read() {
        let (pinner, space) = large(20, 12);
        let other = Arc::new(SimSpace::new(Arc::clone(space.memory())));
        space.map_device(at(0x1000), device(BAR, 0x2000), Rights::ReadWrite).unwrap();
        other.map_device(at(0x9000), device(BAR, 0x2000), Rights::ReadOnly).unwrap();
        pinner.write(&space, at(0x1ffe), &[1, 2, 3]).unwrap();
        let mut back = [0; 4];
        pinner.read(&other, at(0x9ffd), &mut back).unwrap();
        assert_eq!(back, [0, 1, 2, 3]);
        Bus::write(&**space.memory(), PhysAddr::new(BAR), &[7]).unwrap();
        space.read(at(0x1000), &mut back[..1]).unwrap();
        assert_eq!(back[0], 7);
        let refused = pinner.write(&other, at(0x9000), &[1]).unwrap_err();
        assert_eq!(refused, SimPinError::ReadOnly { range: user(0x9000, 1), at: at(0x9000) });
        let nobody = Bus::read(&**space.memory(), PhysAddr::new(BAR + 0x1fff), &mut back);
        assert!(nobody.is_err());
    }

    #[test]
    fn memory_is_no_device_and_a_device_no_memory() {
        let (_, space) = large(20, 12);
        let rights = Rights::ReadWrite;
        assert_eq!(space.map_device(at(0), device(0xf_f000, 0x2000), rights), None);
        assert_eq!(space.map(at(0), &[device(0xf_f000, 0x2000)]), None);
        assert_eq!(space.map_device(at(0x800), device(BAR, 0x1000), rights), None);
        assert_eq!(space.map_device(at(0), device(BAR + 0x800, 0x1000), rights), None);
        assert_eq!(space.map_device(at(0), device(BAR, 0x800), rights), None);
    }
}

mod faults {
    use super::*;
    use crate::walker::Access;

    const LAZY: MapOptions =
        MapOptions { rights: Rights::ReadWrite, population: Population::Lazy, max_leaf_lg2: 63 };

    #[test]
    fn a_lazy_range_is_populated_by_what_is_touched() {
        let (pinner, space) = large(30, 12);
        let folios: Vec<Span> =
            (0..4).map(|_| space.memory().allocate_folio(9).unwrap().span()).collect();
        let range = space.map_with(at(G1), &folios, LAZY).unwrap();
        assert_eq!((space.frame_at(at(G1)), space.faults()), (None, 0));
        assert_eq!(pinner.chargeable(&space, range), 4 * M2);
        assert_eq!(space.fault(at(G1 + M2 + 5), Access::Read), Ok(M2));
        space.write(at(G1 + 3 * M2 - 1), &[1, 2]).unwrap();
        assert_eq!(space.faults(), 3);
        let (_, lookups) = look(&pinner, &space, range);
        assert_eq!((lookups, space.faults()), (4, 4));
        assert_eq!((look(&pinner, &space, range).1, space.faults()), (4, 4));
    }

    #[test]
    fn faults_that_must_be_tried_again_are_and_not_for_ever() {
        let (pinner, space) = large(30, 12);
        let folio = space.memory().allocate_folio(0).unwrap().span();
        let range = space.map_with(at(0x1000), &[folio], LAZY).unwrap();
        space.inject_transient_faults(FAULT_TRIES);
        let unsettled = SimPinError::Unsettled { range, at: at(0x1000), tries: FAULT_TRIES };
        let refused = error(&pinner, &space, range, Prot::READ);
        assert_eq!((refused, pinner.errno(&refused).get()), (unsettled, 14));
        assert_eq!(space.faults(), u64::from(FAULT_TRIES));
        assert_eq!(pinner.memory().pinned_frames(), 0);
        space.inject_transient_faults(FAULT_TRIES - 1);
        assert_eq!(look(&pinner, &space, range).1, 1);
        space.unmap(range);
        assert_eq!(space.fault(at(0x1000), Access::Read), Err(FaultError::Hole { at: at(0x1000) }));
    }

    #[test]
    fn a_failed_fault_on_the_way_leaves_what_was_pushed() {
        let (pinner, space) = large(30, 12);
        let folio = space.memory().allocate_folio(0).unwrap().span();
        let bar = space.map_device(at(0), device(1 << 45, 0x1000), Rights::ReadWrite).unwrap();
        space.map_with(at(0x1000), &[folio], LAZY).unwrap();
        space.inject_transient_faults(u32::MAX);
        let mut kinds = Kinds::default();
        let failed = pinner.pin(&space, user(0, 0x2000), Prot::READ, &mut kinds).unwrap_err();
        assert!(matches!(failed.error, PinError::Failed(SimPinError::Unsettled { .. })));
        assert_eq!(failed.pin.map(|pin| (pin.range(), pin.bytes_left())), Some((bar, 0x1000)));
        assert_eq!(kinds.0, [(Kind::Mmio, device(1 << 45, 0x1000))]);
    }

    #[test]
    fn what_may_only_be_read_is_pinned_only_for_reading() {
        let (pinner, space) = large(30, 12);
        let folio = space.memory().allocate_folio(0).unwrap().span();
        let only = MapOptions { rights: Rights::ReadOnly, ..LAZY };
        for population in [Population::Lazy, Population::Eager] {
            for holes in [Holes::FoundFirst, Holes::FoundOnTheWay] {
                let pinner = pinner.clone().with_holes(holes);
                let options = MapOptions { population, ..only };
                space.map_with(at(0x1000), &[folio], options).unwrap();
                space.map_device_with(at(0x2000), device(1 << 45, 0x1000), options).unwrap();
                for page in [0x1000, 0x2000] {
                    let range = user(page + 0x10, 0x20);
                    let refused = error(&pinner, &space, range, Prot::READ_WRITE);
                    let expected = SimPinError::ReadOnly { range, at: range.start() };
                    assert_eq!((refused, pinner.errno(&refused).get()), (expected, 14));
                }
                let both = user(0x1000, 0x2000);
                assert!(pinner.pin(&space, both, Prot::READ, &mut Kinds::default()).is_ok());
                pinner.memory().unpin_span(folio, Dirty::Clean);
                assert_eq!(space.write(at(0x1000), &[1]), Err(at(0x1000)));
            }
        }
    }
}

mod revocation {
    use parking_lot::Mutex;

    use super::*;
    use crate::walker::Access;

    #[test]
    fn listeners_hear_of_a_range_before_it_goes_and_without_a_lock() {
        let (pinner, space) = large(30, 12);
        let folio = space.memory().allocate_folio(9).unwrap().span();
        let bar = space.map_device(at(G1), device(1 << 45, G1), Rights::ReadWrite).unwrap();
        let memory = space.map(at(M2), &[folio]).unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (hears, seen) = (Arc::clone(&heard), Arc::downgrade(&space));
        let id = space.on_zap(Box::new(move |range| {
            let space = seen.upgrade().unwrap();
            if !hears.lock().is_empty() {
                hears.lock().push(range);
                return;
            }
            // Not found any more, though nothing says so yet, and other ranges still are.
            let refused = pinner.pin(&space, bar, Prot::READ, &mut Kinds::default());
            let error = refused.unwrap_err().error;
            let hole = SimPinError::Hole { range: bar, at: bar.start() };
            assert_eq!(error, PinError::Failed(hole));
            assert_eq!(look(&pinner, &space, memory).1, 1);
            hears.lock().push(range);
        }));
        space.zap(bar);
        assert_eq!(*heard.lock(), [bar]);
        assert_eq!(space.frame_at(at(G1)), None);
        let revoked = FaultError::Revoked { at: at(G1) };
        assert_eq!(space.fault(at(G1), Access::Read), Err(revoked));
        // Where nothing is, nothing goes.
        space.unmap(user(0, M2));
        assert_eq!(heard.lock().len(), 1);
        space.unmap(bar);
        assert_eq!(heard.lock().len(), 2);
        space.forget_listener(id);
        space.unmap(memory);
        assert_eq!(heard.lock().len(), 2);
    }

    #[test]
    fn what_was_revoked_is_an_error_until_something_is_mapped_there() {
        let (pinner, space) = large(30, 12);
        let bar = device(1 << 45, 0x4000);
        let range = space.map_device(at(0x1000), bar, Rights::ReadWrite).unwrap();
        space.zap(user(0x2800, 0x10));
        for holes in [Holes::FoundFirst, Holes::FoundOnTheWay] {
            let pinner = pinner.clone().with_holes(holes);
            let within = user(0x2100, 0x100);
            let refused = error(&pinner, &space, within, Prot::READ);
            let expected = SimPinError::Revoked { range: within, at: within.start() };
            assert_eq!((refused, pinner.errno(&refused).get()), (expected, 14));
        }
        let refused = error(&pinner, &space, range, Prot::READ);
        assert_eq!(refused, SimPinError::Revoked { range, at: at(0x2000) });
        // Its neighbours were not revoked.
        assert_eq!(look(&pinner, &space, user(0x1000, 0x1000)).1, 1);
        assert_eq!(look(&pinner, &space, user(0x3000, 0x2000)).1, 2);
        space.map_device(at(0x1000), bar, Rights::ReadWrite).unwrap();
        assert_eq!(look(&pinner, &space, range).0, [(Kind::Mmio, bar)]);
    }

    #[test]
    fn pinned_memory_outlives_its_mapping() {
        let (pinner, space) = space();
        let (mut pinned, spans) = pin(&pinner, &space, user(0x1000, 0x4000));
        space.zap(user(0x1000, 0x4000));
        space.unmap(user(0x1000, 0x4000));
        assert_eq!(pinner.memory().pinned_frames(), 4);
        pinner.unpin(promise(), &mut pinned, &spans, Kind::Memory, Dirty::Clean);
        pinner.release(promise(), pinned);
        assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
    }
}

mod owners {
    use super::*;

    #[test]
    fn shared_memory_is_the_same_frames_in_both_spaces() {
        let (pinner, space) = space();
        let other = Arc::new(SimSpace::new(Arc::clone(space.memory())));
        let there = space.share(user(0x2000, 0x2000), &other, at(0x2_0000)).unwrap();
        assert_eq!(there, user(0x2_0000, 0x2000));
        space.write(at(0x2fff), &[1, 2]).unwrap();
        let mut back = [0; 2];
        other.read(at(0x2_0fff), &mut back).unwrap();
        assert_eq!(back, [1, 2]);
        let (_one, spans) = pin(&pinner, &space, user(0x2000, 0x2000));
        let (_two, same) = pin(&pinner, &other, there);
        assert_eq!((&same, spans), (&vec![span(6, 1), span(2, 1)], same.clone()));
        assert_eq!(pinner.memory().pins(span(6, 1).paddr()), Some(2));
        space.unmap(user(0x2000, 0x2000));
        assert!(other.read(at(0x2_0fff), &mut back).is_ok());
        let foreign = Arc::new(SimSpace::new(memory(16)));
        assert_eq!(space.share(user(0x1000, 0x1000), &foreign, at(0)), None);
        assert_eq!(space.share(user(0x1000, 0x800), &other, at(0)), None);
    }

    #[test]
    fn spaces_have_numbers_of_their_own_and_handles_share_them() {
        let (pinner, space) = space();
        let handle = Arc::clone(&space);
        assert_eq!(pinner.space_id(&space), pinner.space_id(&handle));
        let other = Arc::new(SimSpace::new(Arc::clone(space.memory())));
        assert_ne!(pinner.space_id(&space), pinner.space_id(&other));
    }
}

mod pages {
    use super::*;
    use crate::walker::Access;

    #[test]
    fn an_array_of_pages_is_filled_as_far_as_memory_and_room_go() {
        let (pinner, space) = space();
        let frame = |number: u64| PhysAddr::new(BASE + (number << 12));
        let mut pages = [PhysAddr::new(0); 8];
        let range = user(0x1800, 0x3000);
        assert_eq!(space.pin_pages(range, Access::Write, &mut pages).pages, 4);
        assert_eq!(pages[..4], [5, 6, 2, 9].map(frame));
        assert_eq!(space.pin_pages(range, Access::Write, &mut pages[..2]).pages, 2);
        assert_eq!(pinner.memory().pins(frame(6)), Some(2));
        assert_eq!(space.pin_pages(user(0x4000, 0x9000), Access::Read, &mut pages).pages, 1);
        assert_eq!(space.pin_pages(user(0x5000, 0x9000), Access::Read, &mut pages).pages, 0);
        assert_eq!(space.pin_pages(range, Access::Read, &mut []).pages, 0);
        for number in [5, 6, 2, 9, 5, 6, 9] {
            pinner.memory().unpin_page(frame(number), Dirty::Clean);
        }
        assert_eq!((pinner.memory().pinned_frames(), pinner.memory().violations()), (0, vec![]));
    }

    #[test]
    fn device_memory_and_what_may_only_be_read_end_the_array() {
        let (pinner, space) = large(30, 12);
        let folio = space.memory().allocate_folio(9).unwrap().span();
        let only = MapOptions {
            rights: Rights::ReadOnly,
            population: Population::Lazy,
            ..MapOptions::default()
        };
        space.map_with(at(0), &[folio], only).unwrap();
        space.map_device(at(M2), device(1 << 45, M2), Rights::ReadWrite).unwrap();
        let mut pages = vec![PhysAddr::new(0); 1024];
        assert_eq!(space.pin_pages(user(0, 2 * M2), Access::Write, &mut pages).pages, 0);
        assert_eq!(space.pin_pages(user(0x1000, 2 * M2), Access::Read, &mut pages).pages, 511);
        assert_eq!(pages[510], PhysAddr::new(folio.last().get() - 0xfff));
        // By folio: all pins are of one.
        assert_eq!(pinner.memory().pins(folio.paddr()), Some(511));
    }
}
