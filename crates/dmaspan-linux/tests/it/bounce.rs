//! Bounce pools of memory of a process, as a driver and its device use them.

#![expect(unsafe_code, reason = "the tests promise to keep what they map")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::swiotlb::{
    Fill, Growth, InSlot, Original, Pool, PoolConfig, PoolMemory, SlotRequest, To,
};
use dmaspan::{Direction, HostAddr, Span};
use dmaspan_linux::{BounceMemory, Memory, MemoryKind, UserPlatform};

const M1: u64 = 1 << 20;

fn page() -> u64 {
    MemoryKind::Base.page_size()
}

fn memory() -> BounceMemory {
    BounceMemory::new(MemoryKind::Base, M1).unwrap()
}

fn size(bytes: u64) -> usize {
    bytes.try_into().unwrap()
}

/// What a slot may stand in for: `len` bytes from `offset` of the memory.
fn original(memory: &Memory, offset: u64, len: u64) -> Original<HostAddr> {
    let start = HostAddr::new(memory.user_range().start().get());
    // SAFETY: every test keeps the memory until its pool is gone, and uses it by atomic words.
    unsafe { Original::new(Span::new(start.wrapping_add(offset), len).unwrap()) }
}

/// The bytes of a slot.
fn in_slot(span: Span<HostAddr>) -> InSlot<HostAddr> {
    // SAFETY: every test holds the slot until it has looked.
    unsafe { InSlot::of(span) }
}

/// A byte that tells each place from those around it.
fn pattern(len: u64) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251).to_le_bytes()[0] | 1).collect()
}

#[test]
fn bytes_go_to_the_slot_and_back_wherever_they_begin() {
    let pool = Pool::new(memory(), PoolConfig::new(1), UserPlatform).unwrap();
    let user = Memory::new(MemoryKind::Base, 4 * page()).unwrap();
    let before = pattern(4 * page());
    let keep = SlotRequest { keep_bits: page() - 1, ..SlotRequest::default() };
    for (offset, len) in
        [(0, 1), (1, 1), (7, 9), (8, 4096), (3, 4096), (5, 8191), (9, 2 * M1 / 256)]
    {
        for request in [SlotRequest::default(), keep] {
            user.write(0, &before).unwrap();
            let whole = original(&user, offset, len);
            let mapped = pool.map(whole, Direction::Bidirectional, Fill::Copy, &request).unwrap();
            let mut bytes = vec![0; size(len)];
            pool.memory().read(in_slot(mapped.span()), &mut bytes);
            let at = size(offset)..size(offset + len);
            assert_eq!(bytes, before[at.clone()]);

            bytes.iter_mut().for_each(|byte| *byte ^= 0xff);
            pool.memory().write(in_slot(mapped.span()), &bytes);
            pool.unmap(mapped).unwrap();
            let mut after = vec![0; before.len()];
            user.read(0, &mut after).unwrap();
            assert_eq!(after[at.clone()], bytes);
            assert_eq!(after[..at.start], before[..at.start]);
            assert_eq!(after[at.end..], before[at.end..]);
        }
    }
}

#[test]
fn zeros_are_written_to_the_padding_and_nowhere_else() {
    let pool = Pool::new(memory(), PoolConfig::new(1), UserPlatform).unwrap();
    let user = Memory::new(MemoryKind::Base, page()).unwrap();
    user.write(0, &pattern(page())).unwrap();
    let all = pool.memory().spans()[0];
    pool.memory().write(in_slot(all), &vec![0xa5; size(M1)]);
    let mapped = pool
        .map(original(&user, 3, 100), Direction::ToDevice, Fill::Copy, &SlotRequest::default())
        .unwrap();
    let mut bytes = vec![0; size(M1)];
    pool.memory().read(in_slot(all), &mut bytes);
    let first = size(mapped.span().start().get() - all.start().get());
    assert_eq!(bytes[first..first + 100], pattern(page())[3..103]);
    assert!(bytes[first + 100..first + 2048].iter().all(|byte| *byte == 0));
    assert!(bytes[..first].iter().chain(&bytes[first + 2048..]).all(|byte| *byte == 0xa5));
    pool.unmap(mapped).unwrap();
}

#[test]
fn a_full_pool_grows_by_memory_of_the_process() {
    let config = PoolConfig { growth: Some(Growth::new(M1, 2 * M1)), ..PoolConfig::new(1) };
    let pool = Pool::new(memory(), config, UserPlatform).unwrap();
    let user = Memory::new(MemoryKind::Base, M1).unwrap();
    let take = || pool.take(original(&user, 0, M1), &SlotRequest::default());
    let first = take().unwrap();
    pool.grow().unwrap();
    let second = take().unwrap();
    assert_eq!(pool.memory().grown_bytes(), M1);
    user.write(M1 - 1, &[9]).unwrap();
    pool.copy(&second, M1 - 1, 1, To::Slot).unwrap();
    pool.release(first).unwrap();
    pool.release(second).unwrap();
    pool.shrink();
    assert_eq!(pool.memory().grown_bytes(), 0);
}

#[test]
fn a_device_that_writes_meanwhile_tears_no_byte() {
    let pool = Pool::new(memory(), PoolConfig::new(1), UserPlatform).unwrap();
    let user = Arc::new(Memory::new(MemoryKind::Base, page()).unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let device = {
        let (user, stop) = (Arc::clone(&user), Arc::clone(&stop));
        thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                for value in [u64::MAX, 0] {
                    user.fill_words(0, page(), |_| value).unwrap();
                }
            }
        })
    };
    let mut bytes = vec![0; size(page())];
    for _ in 0..200 {
        let whole = original(&user, 0, page());
        let slot = pool.take(whole, &SlotRequest::default()).unwrap();
        pool.copy(&slot, 0, page(), To::Slot).unwrap();
        pool.memory().read(in_slot(slot.span()), &mut bytes);
        assert!(bytes.iter().all(|byte| matches!(byte, 0 | 0xff)));
        pool.release(slot).unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    device.join().unwrap();
}
