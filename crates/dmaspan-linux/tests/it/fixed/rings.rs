//! Several rings on one pool.

use std::thread;

use dmaspan_linux::fixed::{AttachMethod, FixedRing, OperationError, Sharing};

use crate::fixed::support::{Random, again, base, charged, file_with, pattern, pinned, ring, wait};

const FILE_LEN: usize = 2 << 20;
const READ: usize = 12_345;

fn read_at_random(ring: &mut FixedRing, file: &std::sync::Arc<std::fs::File>, seed: u64) {
    let (mut random, mut begun, mut ended) = (Random(seed), 0, 0);
    let pool = ring.attachment().pool().clone();
    while ended < 800 {
        while begun < 800
            && ring.in_flight() < ring.depth()
            && let Some(buffer) = pool.take()
        {
            let offset = u64::try_from(random.below(FILE_LEN - READ)).unwrap();
            ring.read(buffer, 7..7 + READ, file, offset, offset).unwrap();
            begun += 1;
        }
        if ring.in_flight() == 0 {
            // The other rings have all slices.
            thread::yield_now();
            continue;
        }
        let done = wait(ring);
        assert_eq!(done.result.unwrap(), READ);
        let offset = usize::try_from(done.token).unwrap();
        let read = done.buffer[7..7 + READ].iter().enumerate();
        assert!(read.into_iter().all(|(n, byte)| *byte == pattern(offset + n)), "{seed:#x}");
        ended += 1;
    }
}

#[test]
fn rings_of_several_threads_share_slices_and_one_registration() {
    if again("rings::rings_of_several_threads_share_slices_and_one_registration").is_some() {
        return;
    }
    let before = pinned();
    let pool = base(16 << 10, 20);
    let bytes: Vec<u8> = (0..FILE_LEN).map(pattern).collect();
    let file = file_with(&bytes, 0).unwrap();
    let mut rings: Vec<_> = (0..4).filter_map(|_| ring(&pool, 8)).collect();
    if rings.iter().any(|ring| ring.attachment().method() != AttachMethod::Cloned) {
        eprintln!("SKIP: buffers are not shared: {}", rings[0].attachment().method());
    } else {
        // Four rings, and the memory is pinned once.
        assert_eq!(pinned() - before, charged(20 * (16 << 10)));
    }
    thread::scope(|scope| {
        for (seed, ring) in (1..).zip(&mut rings) {
            let file = &file;
            scope.spawn(move || read_at_random(ring, file, seed));
        }
    });
    assert_eq!(pool.free_slices(), 20);
    drop((rings, pool));
    assert_eq!(pinned(), before);
}

#[test]
fn a_ring_outlives_the_first_ring_and_the_pool() {
    let pool = base(4096, 2);
    let Some(first) = ring(&pool, 2) else { return };
    let mut second = FixedRing::new(&pool, 2).unwrap();
    let buffer = pool.take().unwrap();
    drop((first, pool));
    let file = file_with(b"still there", 0).unwrap();
    second.read(buffer, 1..12, &file, 0, 0).unwrap();
    let done = wait(&mut second);
    drop(second);
    assert_eq!(&done.buffer[1..12], b"still there");
}

#[test]
fn registering_again_is_said_and_counted() {
    if again("rings::registering_again_is_said_and_counted").is_some() {
        return;
    }
    let before = pinned();
    let pool = base(64 << 10, 4);
    let Some(first) = ring(&pool, 2) else { return };
    let second = FixedRing::with(&pool, 2, Sharing::Register).unwrap();
    assert_eq!(pinned() - before, charged(2 * (256 << 10)));
    let text = second.attachment().method().to_string();
    assert!(text.contains("for this ring alone"), "{text}");
    drop((first, second, pool));
    assert_eq!(pinned(), before);
}

#[test]
fn an_unregistered_write_leaves_the_same_bytes_and_needs_the_ring_s_own_pool() {
    let pool = base(16 << 10, 2);
    let file = file_with(&vec![0; FILE_LEN], 0).unwrap();
    let Some(mut ring) = ring(&pool, 2) else { return };
    let mut buffer = pool.take().unwrap();
    buffer.fill(0xa5);
    ring.write_unregistered(buffer, 7..7 + READ, &file, 99, 1).unwrap();
    assert_eq!(wait(&mut ring).result.unwrap(), READ);
    ring.read(pool.take().unwrap(), 0..READ + 2, &file, 98, 2).unwrap();
    let done = wait(&mut ring);
    assert_eq!(done.result.unwrap(), READ + 2);
    assert!(done.buffer[0] == 0 && done.buffer[READ + 1] == 0, "nothing else was written");
    assert_eq!(done.buffer[1..=READ], vec![0xa5; READ]);
    let other = base(16 << 10, 1);
    let refused = ring.write_unregistered(other.take().unwrap(), 0..1, &file, 0, 3).unwrap_err();
    assert_eq!(refused.error, OperationError::OtherPool);
}

#[test]
fn an_unregistered_read_finds_the_same_bytes_and_needs_the_ring_s_own_pool() {
    let pool = base(16 << 10, 2);
    let bytes: Vec<u8> = (0..FILE_LEN).map(pattern).collect();
    let file = file_with(&bytes, 0).unwrap();
    let Some(mut ring) = ring(&pool, 2) else { return };
    ring.read(pool.take().unwrap(), 7..7 + READ, &file, 99, 1).unwrap();
    ring.read_unregistered(pool.take().unwrap(), 7..7 + READ, &file, 99, 2).unwrap();
    for done in [wait(&mut ring), wait(&mut ring)] {
        assert_eq!(done.result.unwrap(), READ);
        assert_eq!(done.buffer[7..7 + READ], bytes[99..99 + READ], "{}", done.token);
    }
    assert_eq!(pool.free_slices(), 2);
    let other = base(16 << 10, 1);
    let refused = ring.read_unregistered(other.take().unwrap(), 0..1, &file, 0, 3).unwrap_err();
    assert_eq!(refused.error, OperationError::OtherPool);
    let beyond = 0..pool.slice_len() + 1;
    let refused = ring.read_unregistered(pool.take().unwrap(), beyond, &file, 0, 3).unwrap_err();
    assert!(matches!(refused.error, OperationError::Outside { .. }));
}
