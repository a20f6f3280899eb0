use std::sync::Arc;

use dmaspan::Span;
use parking_lot::RawMutex;

use super::*;
use dmaspan_sim::memory::SimMemory;
use dmaspan_sim::pool_memory::{POISON, SimPoolMemory};
use dmaspan_sim::rng::Rng;

const BASE: u64 = 0x10_0000;
/// Where originals are, beside the pool.
const USER: u64 = 0x80_0000;
const SEGMENTS: usize = 4;
const SLOTS: usize = SEGMENTS * SEGMENT;

type Before = PoolBefore<SimPoolMemory, RawMutex>;

fn span(addr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(addr), len).unwrap()
}

fn pool() -> Before {
    patched(Patches::NONE)
}

/// With some of the series, or all of it.
fn patched(patches: Patches) -> Before {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(BASE), 16 << 20, 12).unwrap());
    memory.allocate_at(span(USER, 8 << 20)).unwrap();
    let slots = span(BASE, SLOTS as u64 * SLOT);
    PoolBefore::patched(SimPoolMemory::new(memory, vec![slots]).unwrap(), patches).unwrap()
}

#[expect(unsafe_code, reason = "the memory is simulated")]
fn original(addr: u64, len: u64) -> Original {
    // SAFETY: the simulated memory is there as long as the test, and nothing refers to it.
    unsafe { Original::new(span(addr, len)) }
}

fn slot_addr(slot: u64) -> u64 {
    BASE + slot * SLOT
}

impl Before {
    /// Maps bytes that begin on a page, for a device that reads.
    fn plain(&self, len: u64) -> Option<u64> {
        let addr = self.map(original(USER, len), Direction::ToDevice, &SlotRequest::default());
        addr.map(PhysAddr::get)
    }

    fn end(&self, addr: u64, len: u64) {
        self.end_towards(addr, len, Direction::ToDevice);
    }

    #[expect(unsafe_code, reason = "the tests end what they mapped, once")]
    fn end_towards(&self, addr: u64, len: u64, direction: Direction) {
        // SAFETY: every test ends what it mapped so, once, in one thread.
        unsafe { self.unmap(PhysAddr::new(addr), len, direction) };
    }

    fn write(&self, addr: u64, bytes: &[u8]) {
        self.memory().memory().cpu_write(PhysAddr::new(addr), bytes).unwrap();
    }

    fn read<const N: usize>(&self, addr: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory().memory().cpu_read(PhysAddr::new(addr), &mut bytes).unwrap();
        bytes
    }

    /// Run lengths or bits, recounted from which slots are held.
    fn check_runs(&self, held: &[bool]) {
        assert_eq!(self.used(), held.iter().filter(|held| **held).count());
        if self.patches.bitmap {
            for (slot, held) in held.iter().enumerate() {
                let is_free = self.free_bits(slot) >> (slot % SEGMENT) & 1 == 1;
                assert_eq!(is_free, !held, "slot {slot}");
            }
            return;
        }
        for (segment, records) in self.records.chunks(SEGMENT).enumerate() {
            let mut run = 0;
            for (inner, record) in records.iter().enumerate().rev() {
                run = if held[segment * SEGMENT + inner] { 0 } else { run + 1 };
                assert_eq!(record.run.load(Ordering::Relaxed), run, "slot {segment}:{inner}");
            }
        }
    }
}

#[test]
fn runs_bits_and_counts_are_as_recounted_after_any_history_with_any_patch() {
    for areas in [1, 2, 3] {
        for (bitmap, latest) in [(false, false), (true, false), (false, true), (true, true)] {
            any_history(&patched(Patches { areas, bitmap, latest }));
        }
    }
}

fn any_history(pool: &Before) {
    let mut rng = Rng::new(6);
    let mut held = vec![false; SLOTS];
    let mut mappings: Vec<(u64, u64)> = Vec::new();
    for _ in 0..4000 {
        if rng.below(100) < 55 {
            let (at, len) = (USER + rng.below(5000), 1 + rng.below(6 * SLOT));
            let keep_bits = [0, 0xfff, 0x7f, 0x1fff][usize::try_from(rng.below(4)).unwrap()];
            let request = SlotRequest { keep_bits, ..SlotRequest::default() };
            let Some(addr) = pool.map(original(at, len), Direction::ToDevice, &request) else {
                continue;
            };
            assert_eq!(addr.get() & keep_bits, at & keep_bits);
            let first = pool.index(addr);
            let last = pool.index(addr.wrapping_add(len - 1));
            assert_eq!(first / SEGMENT, last / SEGMENT, "a run within a segment");
            for slot in &mut held[first..=last] {
                assert!(!*slot, "a slot is given out twice");
                *slot = true;
            }
            mappings.push((addr.get(), len));
        } else if !mappings.is_empty() {
            let which = usize::try_from(rng.below(mappings.len() as u64)).unwrap();
            let (addr, len) = mappings.swap_remove(which);
            pool.end(addr, len);
            let (addr, last) = (PhysAddr::new(addr), PhysAddr::new(addr + (len - 1)));
            held[pool.index(addr)..=pool.index(last)].fill(false);
        }
        pool.check_runs(&held);
    }
    assert!(!mappings.is_empty());
}

#[test]
fn what_was_released_last_is_taken_first_where_that_is_patched() {
    for bitmap in [false, true] {
        let pool = patched(Patches { bitmap, latest: true, ..Patches::NONE });
        let slots: Vec<u64> = (0..4).map(|_| pool.plain(SLOT).unwrap()).collect();
        for slot in [slots[2], slots[0]] {
            pool.end(slot, SLOT);
        }
        assert_eq!([pool.plain(SLOT), pool.plain(SLOT)], [Some(slots[0]), Some(slots[2])]);
        // Neither a run of one slot nor what is in no place for it stands in for two.
        pool.end(slots[1], SLOT);
        assert_eq!(pool.plain(2 * SLOT), Some(slot_addr(4)));
    }
}

#[test]
fn a_thread_finds_the_slots_of_all_areas_where_the_lock_is_split() {
    let pool = patched(Patches { areas: 4, ..Patches::NONE });
    let mut all: Vec<u64> = (0..SEGMENTS).map(|_| pool.plain(MAX_LEN).unwrap()).collect();
    assert_eq!((pool.plain(1), pool.used()), (None, SLOTS));
    all.sort_unstable();
    assert_eq!(all, (0..SEGMENTS as u64).map(|n| BASE + n * MAX_LEN).collect::<Vec<_>>());
}

#[test]
fn a_search_goes_round_and_leaves_the_latest_slot_for_last() {
    let pool = pool();
    for slot in 0..SLOTS as u64 {
        let addr = pool.plain(SLOT).unwrap();
        assert_eq!(addr, slot_addr(slot));
        pool.end(addr, SLOT);
    }
    assert_eq!(pool.plain(SLOT), Some(slot_addr(0)));
}

#[test]
fn pages_begin_on_pages_and_granules_on_granules() {
    let pool = pool();
    assert_eq!(pool.plain(100), Some(slot_addr(0)));
    assert_eq!(pool.plain(PAGE), Some(slot_addr(2)));
    assert_eq!(pool.plain(PAGE - 1), Some(slot_addr(4)));
    assert_eq!(pool.plain(100), Some(slot_addr(6)));
    let request = SlotRequest { granule: 0x4000, ..SlotRequest::default() };
    let addr = pool.map(original(USER, 100), Direction::ToDevice, &request).unwrap();
    assert_eq!(addr.get(), slot_addr(8));
}

#[test]
fn a_boundary_is_not_crossed() {
    let pool = pool();
    let request = SlotRequest { boundary: Some(4 * SLOT), ..SlotRequest::default() };
    let map = |len| pool.map(original(USER, len), Direction::ToDevice, &request);
    assert_eq!(map(SLOT).unwrap().get(), slot_addr(0));
    assert_eq!(map(4 * SLOT).unwrap().get(), slot_addr(4));
    assert_eq!(map(3 * SLOT).unwrap().get(), slot_addr(8));
    assert_eq!(map(2 * SLOT).unwrap().get(), slot_addr(12));
    assert_eq!(map(5 * SLOT), None);
}

#[test]
fn no_mapping_is_longer_than_a_segment() {
    let pool = pool();
    let whole = pool.plain(MAX_LEN).unwrap();
    assert_eq!(pool.plain(MAX_LEN + 1), None);
    pool.end(whole, MAX_LEN);
    // Behind half a segment it takes the next one whole.
    assert_eq!(pool.plain(MAX_LEN / 2), Some(slot_addr(128)));
    assert_eq!(pool.plain(MAX_LEN), Some(slot_addr(256)));
    assert_eq!(pool.used(), 192);
}

#[test]
fn a_full_pool_refuses_until_something_is_released() {
    let pool = pool();
    let all: Vec<u64> = (0..SEGMENTS).map(|_| pool.plain(MAX_LEN).unwrap()).collect();
    assert_eq!((pool.plain(1), pool.used()), (None, SLOTS));
    pool.check_runs(&[true; SLOTS]);
    pool.end(all[2], MAX_LEN);
    assert_eq!(pool.plain(1), Some(all[2]));
}

#[test]
fn freed_neighbours_are_one_run_again() {
    let pool = pool();
    let parts: Vec<u64> = (0..SEGMENT).map(|_| pool.plain(SLOT).unwrap()).collect();
    let (even, odd): (Vec<u64>, Vec<u64>) =
        parts.iter().partition(|at| (**at / SLOT).is_multiple_of(2));
    let others: Vec<u64> = (1..SEGMENTS).map(|_| pool.plain(MAX_LEN).unwrap()).collect();
    even.iter().for_each(|addr| pool.end(*addr, SLOT));
    assert_eq!(pool.plain(2 * SLOT), None);
    odd.iter().for_each(|addr| pool.end(*addr, SLOT));
    assert_eq!(pool.plain(MAX_LEN), Some(slot_addr(0)));
    assert_eq!((others.len(), pool.plain(1)), (SEGMENTS - 1, None));
}

#[test]
fn bytes_are_copied_in_always_and_out_where_the_device_writes() {
    let pool = pool();
    let at = USER + 0x123;
    let request = SlotRequest { keep_bits: 0xfff, ..SlotRequest::default() };
    for direction in [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional] {
        pool.write(at, b"before");
        let addr = pool.map(original(at, 6), direction, &request).unwrap().get();
        assert_eq!((&pool.read(addr), addr & 0xfff), (b"before", 0x123));
        pool.write(addr, b"device");
        pool.end_towards(addr, 6, direction);
        let after = if direction == Direction::ToDevice { b"before" } else { b"device" };
        assert_eq!(&pool.read(at), after);
        assert_eq!(pool.read(USER + 0x122), [0]);
        assert_eq!(pool.read(at + 6), [0]);
    }
}

#[test]
#[expect(unsafe_code, reason = "the test syncs what it mapped")]
fn any_part_is_synced_and_no_byte_beyond_the_mapping() {
    let pool = pool();
    let (at, len) = (USER + 0x700, 3 * SLOT);
    let request = SlotRequest { keep_bits: 0xfff, ..SlotRequest::default() };
    let addr = pool.map(original(at, len), Direction::Bidirectional, &request).unwrap();
    // Before the original's offset in a later slot, and to the end.
    for offset in [0, 0x100, 0x900, 0x1234, len - 4] {
        pool.write(addr.get() + offset, b"new!");
        // SAFETY: the bytes are of a mapping of this pool with this direction.
        unsafe { pool.sync_for_cpu(addr.wrapping_add(offset), 4, Direction::Bidirectional) };
        assert_eq!(&pool.read(at + offset), b"new!");
        pool.write(at + offset, b"cpu.");
        // SAFETY: as before.
        unsafe { pool.sync_for_device(addr.wrapping_add(offset), 4, Direction::Bidirectional) };
        assert_eq!(&pool.read(addr.get() + offset), b"cpu.");
    }
    // SAFETY: as before; what is asked for beyond the mapping is cut off.
    unsafe { pool.sync_for_cpu(addr.wrapping_add(len - 4), 64, Direction::Bidirectional) };
    assert_eq!(pool.read(at + len), [0; 60]);
    pool.write(addr.get(), b"new!");
    // SAFETY: as before; with the other direction nothing is copied.
    unsafe { pool.sync_for_cpu(addr, 4, Direction::ToDevice) };
    assert_eq!(&pool.read(at), b"cpu.");
    // SAFETY: as before.
    unsafe { pool.sync_for_device(addr, 4, Direction::FromDevice) };
    assert_eq!(&pool.read(addr.get()), b"new!");
}

#[test]
fn padding_is_left_as_it_was() {
    let pool = pool();
    let addr = pool.plain(4).unwrap();
    assert_eq!(pool.read(addr + 4), [POISON; 16]);
}

#[test]
fn what_the_device_does_not_reach_is_released_again() {
    let pool = pool();
    let reach = |last| SlotRequest { last, ..SlotRequest::default() };
    let map = |last| pool.map(original(USER, SLOT), Direction::ToDevice, &reach(last));
    assert_eq!(map(BASE + SLOT - 2), None);
    pool.check_runs(&[false; SLOTS]);
    assert_eq!(map(BASE + 2 * SLOT - 1).unwrap().get(), slot_addr(1));
}

#[test]
fn low_bits_that_no_slot_has_end_the_search() {
    let pool = pool();
    let request = SlotRequest { keep_bits: (1 << 40) - 1, ..SlotRequest::default() };
    assert_eq!(pool.map(original(USER, 1), Direction::ToDevice, &request), None);
    pool.check_runs(&[false; SLOTS]);
}

#[test]
fn masks_that_are_none_are_refused() {
    let pool = pool();
    let [keep_bits, granule] = [2 * SLOT, 3 * SLOT];
    for request in [
        SlotRequest { keep_bits, ..SlotRequest::default() },
        SlotRequest { granule, ..SlotRequest::default() },
    ] {
        assert_eq!(pool.map(original(USER, 1), Direction::ToDevice, &request), None);
    }
    pool.check_runs(&[false; SLOTS]);
}

#[test]
fn memory_without_whole_segments_is_refused() {
    let new = |spans| {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(BASE), 16 << 20, 11).unwrap());
        let memory = SimPoolMemory::new(memory, spans).unwrap();
        PoolBefore::<_, RawMutex>::patched(memory, Patches::NONE).err().unwrap()
    };
    let (short, odd) = (span(BASE, MAX_LEN - SLOT), span(BASE + SLOT, MAX_LEN));
    assert_eq!(new(vec![short]), Error::PoolSpan { span: short, slot: MAX_LEN });
    assert_eq!(new(vec![odd]), Error::PoolSpan { span: odd, slot: MAX_LEN });
    assert_eq!(new(vec![]), Error::Spans { max: 1 });
}
