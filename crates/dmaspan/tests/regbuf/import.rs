//! Bytes through segments are those through pages, for every offset and length.

use std::sync::Arc;

use dmaspan::regbuf::{Buffer, ImportError};
use dmaspan::{Account, Direction, PhysAddr, Span, UserAddr, UserRange};
use dmaspan_sim::memory::{Books, SimMemory};

use crate::common::{BASE, Rng, USER, World, part, size, user, walk};

const BOTH: Direction = Direction::Bidirectional;

/// Small memory, all of its bytes, and where those of a user are.
struct Bytes {
    world: World,
    /// The address of each byte, by the page list.
    addresses: Vec<u64>,
    written: Vec<u8>,
    memory: Vec<u8>,
}

impl Bytes {
    /// The user has written all of a range.
    fn new(world: World, whole: UserRange) -> Self {
        let len = size(whole.checked_len().unwrap());
        let written: Vec<u8> = (0..len).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect();
        world.space.write(whole.start(), &written).unwrap();
        let pages = world.page_list(whole);
        let addresses = pages.iter().flat_map(|page| *page..*page + world.page()).collect();
        let mut memory = vec![0; 1024];
        world.memory.cpu_read(PhysAddr::new(BASE), &mut memory).unwrap();
        Self { world, addresses, written, memory }
    }

    fn byte(&self, address: u64) -> u8 {
        self.memory[size(address - BASE)]
    }

    /// A piece for each run of bytes, each as long as can be.
    fn check(&self, pieces: &[Span], first: usize, len: usize, what: &str) {
        let found: Vec<u64> =
            pieces.iter().flat_map(|span| span.paddr().get()..=span.last().get()).collect();
        assert_eq!(found, self.addresses[first..first + len], "{what}");
        let bytes = found.iter().map(|address| self.byte(*address));
        assert!(bytes.eq(self.written[first..first + len].iter().copied()), "{what}");
        let touch = |pair: &[Span]| pair[0].join(pair[1]).is_some();
        assert!(!pieces.windows(2).any(touch), "{what}: {pieces:?}");
    }

    /// Every part of a buffer that begins `first` bytes behind the whole.
    fn check_buffer(&self, buffer: &Buffer<PhysAddr>, first: usize) {
        let all = buffer.len();
        assert_eq!(buffer.segments().iter().map(Span::len).sum::<u64>(), all);
        assert_eq!(buffer.segments().count(), self.world.runs(buffer.user()).len());
        for offset in 0..=all {
            for len in 0..=all - offset {
                let what = format!("{offset}+{len} of {buffer:?}");
                let mut import = buffer.import(offset, len, BOTH).unwrap();
                let pieces: Vec<Span> = import.clone().collect();
                assert_eq!((import.bytes(), import.pieces()), (len, pieces.len()), "{what}");
                assert_eq!(import.size_hint(), (pieces.len(), Some(pieces.len())), "{what}");
                self.check(&pieces, first + size(offset), size(len), &what);
                if let Some(unit) = buffer.segments().uniform_len()
                    && pieces.len() > 2
                {
                    let inner = &pieces[1..pieces.len() - 1];
                    assert!(inner.iter().all(|piece| piece.len() == unit), "{what}");
                }
                if let Some(taken) = import.next() {
                    assert_eq!(import.bytes(), len - taken.len(), "{what}");
                    assert_eq!(import.len(), pieces.len() - 1, "{what}");
                    let range = part(buffer.user(), offset, len);
                    assert!(buffer.import_user(range, BOTH).unwrap().eq(pieces), "{what}");
                }
            }
            assert!(buffer.import(offset, all - offset + 1, BOTH).is_err());
        }
    }
}

/// Pages of 8 bytes; the buffer begins and ends in any byte of the first and the last three.
fn exhaustive(world: World, whole: UserRange) {
    let bytes = Bytes::new(world, whole);
    let len = whole.checked_len().unwrap();
    let edge = len.min(18);
    for before in [0, 1, 3, 7, 8, 9, 12, 15, 16, 17] {
        for behind in [0, 1, 4, 7, 8, 9, 16] {
            if before < edge && behind < edge && before + behind < len {
                let buffer = bytes.world.buffer(part(whole, before, len - before - behind));
                bytes.check_buffer(&buffer, size(before));
            }
        }
    }
    bytes.world.assert_idle();
}

#[test]
fn every_part_of_blocks_at_chosen_places_has_the_bytes_of_its_pages() {
    let layouts: [&[(u64, u64)]; 14] = [
        &[(5, 1)],
        &[(4, 4)],
        // Neighbours, in order and not.
        &[(4, 1), (5, 1), (6, 2)],
        &[(6, 2), (5, 1), (4, 1)],
        &[(8, 4), (12, 4), (32, 4)],
        // Uniform ones; entered in the middle and left early.
        &[(8, 4), (16, 4), (0, 4)],
        &[(10, 2), (16, 4), (24, 2)],
        &[(11, 1), (16, 4), (0, 4), (24, 3)],
        &[(16, 1), (18, 1), (20, 1), (0, 1), (2, 1)],
        // The last, the first, or one in the middle is longer than the others.
        &[(8, 1), (16, 1), (32, 4)],
        &[(32, 5), (8, 2), (16, 2)],
        &[(8, 1), (32, 6), (16, 1), (20, 1)],
        // Mixed ones.
        &[(8, 3), (1, 2), (16, 1), (64, 2)],
        &[(100, 1), (90, 5), (80, 1), (1, 1)],
    ];
    for blocks in layouts {
        let world = World::new(1024, 3);
        let whole = world.map_blocks(blocks);
        exhaustive(world, whole);
    }
}

#[test]
fn every_part_of_folios_of_any_orders_has_the_bytes_of_its_pages() {
    let layouts: [&[u32]; 10] = [
        &[0, 0, 0, 0],
        &[1, 1, 1, 1],
        &[2, 2, 2],
        &[3, 3],
        &[2, 0, 1],
        &[3, 0, 0],
        &[0, 2, 0, 1],
        &[1, 2, 0, 0, 1],
        &[0, 3],
        &[0, 0, 2, 1, 0],
    ];
    for (seed, orders) in (1..).zip(layouts) {
        let world = World::new(1024, 3);
        let whole = world.map_folios(orders, seed);
        exhaustive(world, whole);
    }
}

/// Gigabytes of folios of any order, some of them neighbours.
fn large(seed: u64) -> (World, UserRange) {
    let mut rng = Rng::new(seed);
    let bytes = 4 << 30;
    let books = Books::Folios;
    let memory = SimMemory::with_books(PhysAddr::new(BASE), bytes, 12, books).unwrap();
    let world = World::of(Arc::new(memory), Account::unlimited());
    // All of one order, of two, or of any.
    let kinds = 1 + rng.below(3);
    let order = 9 - u32::try_from(rng.below(5)).unwrap();
    let mut spans = Vec::new();
    while spans.iter().map(|span: &Span| span.len()).sum::<u64>() < 256 << 20 {
        let order = match (kinds, rng.below(8)) {
            (1, _) | (2, 1..) => order,
            (2, 0) => 3,
            (_, any) => u32::try_from(any).unwrap() + 2,
        };
        spans.extend(world.memory.allocate_folios(&[order], rng.next()).unwrap());
        if kinds == 3 && rng.below(8) == 0 {
            // Neighbours in the order of addresses, as a fresh machine gives them.
            spans.push(world.memory.allocate(1 << 20, 12).unwrap());
        }
    }
    let whole = world.space.map(UserAddr::new(USER), &spans).unwrap();
    (world, whole)
}

#[test]
fn any_part_of_a_large_buffer_has_the_bytes_of_its_pages() {
    for seed in 1..=12 {
        println!("seed {seed}");
        let (world, whole) = large(seed);
        let mut rng = Rng::new(seed);
        let (before, behind) = (rng.below(3 << 20), rng.below(3 << 20));
        let len = whole.checked_len().unwrap() - before - behind;
        let buffer = world.buffer(part(whole, before, len));
        let runs = world.runs(buffer.user());
        assert!(buffer.segments().iter().eq(runs.iter().copied()));
        for n in 0..300 {
            let offset = rng.below(len);
            let most = if n % 2 == 0 { 1 << rng.below(28) } else { len };
            let asked = rng.below((len - offset).min(most)) + 1;
            let import = buffer.import(offset, asked, BOTH).unwrap();
            let pieces = walk(&runs, offset, asked);
            assert_eq!(import.pieces(), pieces.len());
            assert!(import.clone().eq(pieces), "{offset:#x}+{asked:#x}");
        }
        for _ in 0..20 {
            let (offset, asked) = (rng.below(len - 0x3000), rng.below(0x3000) + 1);
            let mut written = vec![0; size(asked)];
            written.fill_with(|| rng.next().to_le_bytes()[0]);
            let at = part(buffer.user(), offset, asked).start();
            world.space.write(at, &written).unwrap();
            let mut read = Vec::new();
            for piece in buffer.import(offset, asked, Direction::ToDevice).unwrap() {
                let mut bytes = vec![0; size(piece.len())];
                world.memory.cpu_read(piece.paddr(), &mut bytes).unwrap();
                read.extend(bytes);
            }
            assert_eq!(read, written);
        }
        drop(buffer);
        world.assert_idle();
    }
}

#[test]
fn several_ranges_have_the_bytes_of_each() {
    for (seed, blocks) in
        (1..).zip([&[(4, 8)][..], &[(8, 4), (16, 4), (0, 4)], &[(8, 3), (1, 2), (16, 1), (64, 2)]])
    {
        println!("seed {seed}");
        let (world, mut rng) = (World::new(1024, 3), Rng::new(seed));
        let whole = world.map_blocks(blocks);
        let len = whole.checked_len().unwrap() - 8;
        let buffer = world.buffer(part(whole, 3, len));
        for _ in 0..2000 {
            let ranges: Vec<_> = (0..rng.below(6))
                .map(|_| {
                    let offset = rng.below(len);
                    part(buffer.user(), offset, rng.below(len - offset) + 1)
                })
                .collect();
            let one_by_one: Vec<Span> =
                ranges.iter().flat_map(|range| buffer.import_user(*range, BOTH).unwrap()).collect();
            let mut import = buffer.import_vectored(&ranges, BOTH).unwrap();
            let mut left = ranges.iter().map(|range| range.checked_len().unwrap()).sum::<u64>();
            assert_eq!(import.bytes(), left);
            assert!(import.clone().eq(one_by_one.iter().copied()));
            while let Some(piece) = import.next() {
                left -= piece.len();
                assert_eq!(import.bytes(), left);
            }
            assert_eq!((left, import.next()), (0, None));
        }
        drop(buffer);
        world.assert_idle();
    }
}

#[test]
fn nothing_is_at_any_offset_of_a_buffer_and_not_beyond() {
    let world = World::new(1024, 3);
    let buffer = world.buffer(part(world.map_blocks(&[(8, 4), (16, 4), (0, 4)]), 5, 40));
    for offset in 0..=40 {
        let mut import = buffer.import(offset, 0, BOTH).unwrap();
        assert_eq!((import.pieces(), import.bytes(), import.next()), (0, 0, None));
    }
    assert!(buffer.import(41, 0, BOTH).is_err());
    assert_eq!(buffer.import_vectored(&[], BOTH).unwrap().count(), 0);
}

#[test]
fn ranges_outside_are_refused_on_both_sides() {
    let world = World::new(1024, 3);
    let whole = world.map_blocks(&[(8, 4), (16, 4)]);
    let buffer = world.buffer(part(whole, 9, 40));
    for (offset, len) in [(8, 1), (8, 41), (8, 50), (9, 41), (48, 2), (49, 1), (0, 9)] {
        let range = part(whole, offset, len);
        let error = buffer.import_user(range, BOTH).unwrap_err();
        let (of, len) = (Some(buffer.user()), buffer.len());
        assert_eq!(error, ImportError::Outside { range, buffer: of, len });
        assert!(buffer.import_vectored(&[range], BOTH).is_err(), "{range}");
        let good = part(whole, 10, 1);
        assert!(buffer.import_vectored(&[good, range], BOTH).is_err(), "{range}");
    }
    assert!(buffer.import_user(user(0, 1), BOTH).is_err());
    assert!(buffer.import_user(user(u64::MAX, 1), BOTH).is_err());
    let below = UserRange::new(UserAddr::new(0), UserAddr::new(u64::MAX)).unwrap();
    assert!(buffer.import_user(below, BOTH).is_err());
}
