//! The lists of free blocks beside a map of free frames.

use super::super::FrameState::{self, Free, Owned};
use super::*;
use crate::rng::Rng;

/// Neither end is aligned to more than a frame.
const PFNS: Range<u64> = (1 << 20) - 37..(1 << 20) + 1500;

/// How many free blocks of each order there are where all that can be joined is.
fn joined(frames: &[FrameState]) -> Vec<u64> {
    let mut blocks = vec![0; 33];
    let mut pfn = PFNS.start;
    let is_free = |pfn: u64, order: u32| {
        let behind = pfn + lg2::size(order);
        behind <= PFNS.end
            && frames[at(pfn - PFNS.start)..at(behind - PFNS.start)].iter().all(|f| *f == Free)
    };
    while pfn < PFNS.end {
        let order = (0..=lg2::alignment(pfn).min(32)).rev().find(|order| is_free(pfn, *order));
        if let Some(order) = order {
            blocks[at(order)] += 1;
        }
        pfn += lg2::size(order.unwrap_or(0));
    }
    let used = blocks.iter().rposition(|blocks| *blocks > 0).map_or(0, |last| last + 1);
    blocks.truncate(used);
    blocks
}

fn set(frames: &mut [FrameState], pfn: u64, order: u32, to: FrameState) {
    for frame in &mut frames[at(pfn - PFNS.start)..at(pfn - PFNS.start + lg2::size(order))] {
        assert_ne!(*frame, to, "frame {pfn:#x} of order {order}");
        *frame = to;
    }
}

#[test]
fn whatever_is_taken_and_given_back_what_is_free_is_joined_as_far_as_it_can_be() {
    for seed in 0..20 {
        let (mut buddy, mut rng) = (Buddy::new(PFNS), Rng::new(seed));
        let mut frames = vec![Free; at(PFNS.end - PFNS.start)];
        let mut taken: Vec<(u64, u32)> = Vec::new();
        let initial = buddy.by_order();
        assert_eq!(initial, joined(&frames));
        for _ in 0..600 {
            let order = u32::try_from(rng.below(11)).unwrap();
            match rng.below(5) {
                0 | 1 if !taken.is_empty() => {
                    let one = at(rng.below(taken.len() as u64));
                    let (pfn, order) = taken.swap_remove(one);
                    set(&mut frames, pfn, order, Free);
                    buddy.give(pfn, order);
                }
                2 => {
                    let place = PFNS.start + rng.below(PFNS.end - PFNS.start);
                    let pfn = lg2::align_down(place, order);
                    let inside = PFNS.start <= pfn && pfn + lg2::size(order) <= PFNS.end;
                    let block = pfn..pfn + lg2::size(order);
                    let is_free =
                        inside && block.clone().all(|p| frames[at(p - PFNS.start)] == Free);
                    assert_eq!(inside && buddy.first_taken(block).is_none(), is_free);
                    assert_eq!(buddy.take_at(pfn, order).is_some(), is_free);
                    if is_free {
                        set(&mut frames, pfn, order, Owned);
                        taken.push((pfn, order));
                    }
                }
                _ => {
                    let possible = buddy.by_order().len() > at(order);
                    let got = buddy.take(order);
                    assert_eq!(got.is_some(), possible);
                    if let Some(pfn) = got {
                        assert!(lg2::is_aligned(pfn, order));
                        set(&mut frames, pfn, order, Owned);
                        taken.push((pfn, order));
                    }
                }
            }
            assert_eq!(buddy.by_order(), joined(&frames), "seed {seed}");
        }
        taken.iter().for_each(|(pfn, order)| buddy.give(*pfn, *order));
        assert_eq!(buddy.by_order(), initial);
        let listed = (0..33).map(|order| buddy.blocks(order).count() as u64).collect::<Vec<_>>();
        assert_eq!(listed[..initial.len()], initial);
    }
}

#[test]
fn the_smallest_block_is_cut_and_what_was_given_back_last_is_taken_first() {
    let mut buddy = Buddy::new(0..1024);
    assert_eq!((buddy.take(0), buddy.take(3)), (Some(0), Some(8)));
    assert_eq!(buddy.by_order(), [1, 1, 1, 0, 1, 1, 1, 1, 1, 1]);
    buddy.give(8, 3);
    assert_eq!((buddy.take(2), buddy.take(2)), (Some(4), Some(8)));
    assert_eq!((buddy.take(10), buddy.take(33), buddy.take(u32::MAX)), (None, None, None));
    assert_eq!(buddy.free_up_to(2), 1 + 2 + 4);
    assert_eq!(buddy.free_up_to(u32::MAX), 1024 - 1 - 8);
}

#[test]
fn a_range_is_the_fewest_aligned_pieces() {
    let of = |pfns: Range<u64>| pieces(pfns).collect::<Vec<_>>();
    assert_eq!(of(5..17), [(5, 0), (6, 1), (8, 3), (16, 0)]);
    assert_eq!(of(0..512), [(0, 9)]);
    assert_eq!(of(3..3), []);
}
