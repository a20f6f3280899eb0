extern crate std;

use alloc::alloc::alloc_zeroed;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::ops::Range;
use core::sync::atomic::Ordering;

use super::*;
use crate::platform::Flag;

/// Frames of the heap at made-up addresses, handed out from the lowest on. What is free is filled
/// with other bytes at once.
#[derive(Default)]
struct Heap(Mutex<Flag, State>);

struct State {
    next: u64,
    out: BTreeMap<u64, (NonNull<u8>, TableShape)>,
    /// How many more frames there are.
    left: usize,
    written_back: Vec<Range<usize>>,
    coherency: Coherency,
    /// What the bytes of a frame are when it is handed out.
    fill: u8,
}

#[expect(unsafe_code, reason = "a test's memory")]
// SAFETY: the pointers lead to memory of the heap.
unsafe impl Send for State {}

impl Default for State {
    fn default() -> Self {
        let coherency = Coherency::Coherent;
        Self {
            next: 0x10_0000,
            out: BTreeMap::new(),
            left: 1000,
            written_back: Vec::new(),
            coherency,
            fill: 0,
        }
    }
}

fn layout(shape: TableShape) -> Layout {
    Layout::from_size_align(1 << shape.lg2_size, 1 << shape.lg2_align).unwrap()
}

#[expect(unsafe_code, reason = "a test's memory")]
// SAFETY: 1. Each frame is a piece of the heap with addresses of its own. 2. It leads there.
unsafe impl FrameAlloc for Heap {
    type Lock = Flag;

    fn allocate(&self, shape: TableShape) -> Option<PhysAddr> {
        assert!(shape.lg2_size >= 12 && shape.lg2_align >= 12);
        let mut state = self.0.lock();
        let frame = lg2::align_up(state.next, shape.lg2_align.max(shape.lg2_size))?;
        if state.left == 0 || frame + lg2::mask(shape.lg2_size) > shape.max_paddr.get() {
            return None;
        }
        // SAFETY: the size is not 0.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout(shape)) })?;
        // SAFETY: it is so large.
        unsafe { memory.write_bytes(state.fill, 1 << shape.lg2_size) };
        state.left -= 1;
        state.next = frame + lg2::size(shape.lg2_size);
        state.out.insert(frame, (memory, shape));
        Some(PhysAddr::new(frame))
    }

    fn free(&self, _promise: Promise<'_>, frames: PhysAddr, shape: TableShape) {
        let mut state = self.0.lock();
        let (memory, allocated) = state.out.remove(&frames.get()).expect("freed once");
        assert_eq!((shape.lg2_size, shape.lg2_align), (allocated.lg2_size, allocated.lg2_align));
        state.left += 1;
        // SAFETY: `allocate` took it in this shape, and it is not out any more.
        unsafe { dealloc(memory.as_ptr(), layout(allocated)) };
    }

    fn pointer(&self, paddr: PhysAddr) -> NonNull<u8> {
        let state = self.0.lock();
        let (&frame, &(memory, shape)) = state.out.range(..=paddr.get()).next_back().unwrap();
        let offset = paddr.get() - frame;
        assert!(offset < lg2::size(shape.lg2_size), "{paddr} is in no frame that is out");
        // SAFETY: it is within the frame.
        unsafe { memory.add(usize::try_from(offset).unwrap()) }
    }

    fn coherency(&self) -> Coherency {
        self.0.lock().coherency
    }

    fn write_back(&self, start: NonNull<u8>, len: usize) {
        let start = start.addr().get();
        self.0.lock().written_back.push(start..start + len);
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        let out = &self.0.get_mut().out;
        assert!(out.is_empty() || std::thread::panicking(), "{} frames are out", out.len());
    }
}

type Memory = FrameTables<Heap>;

fn memory() -> Memory {
    FrameTables::new(Heap::default())
}

fn shape(lg2_size: u32) -> TableShape {
    TableShape { lg2_size, lg2_align: lg2_size, max_paddr: PhysAddr::new(lg2::mask(32)) }
}

fn out(memory: &Memory) -> usize {
    memory.frames.0.lock().out.len()
}

fn reserve(memory: &Memory, shape: TableShape, count: usize) -> Result<FrameList, NoTables> {
    TableMemory::<u64>::reserve(memory, shape, count)
}

fn free(memory: &Memory, shape: TableShape, list: FrameList) {
    TableMemory::<u64>::free(memory, Promise::kept(), shape, list);
}

/// Takes a table, fills it with `word` and publishes it.
fn publish(memory: &Memory, shape: TableShape, list: &mut FrameList, word: u64) -> PhysAddr {
    let mut fresh = TableMemory::<u64>::take(memory, Promise::kept(), shape, list).unwrap();
    assert_eq!(fresh.words().len(), 1 << (shape.lg2_size - 3));
    fresh.words().fill(word.to_le());
    let paddr = fresh.paddr();
    memory.publish(fresh);
    paddr
}

fn retire(memory: &Memory, list: &mut FrameList, paddr: PhysAddr, shape: TableShape) {
    TableMemory::<u64>::retire(memory, list, TableAddr::new(paddr, shape.lg2_size));
}

fn entries(memory: &Memory, paddr: PhysAddr, shape: TableShape) -> Vec<u64> {
    let table = TableAddr::new(paddr, shape.lg2_size);
    TableMemory::<u64>::entries(memory, &table).iter().map(u64::load).collect()
}

#[test]
fn tables_of_all_shapes_are_aligned_and_disjoint_and_their_frames_go_back() {
    let memory = memory();
    let wide = |lg2_size, lg2_align| TableShape { lg2_align, ..shape(lg2_size) };
    // A quarter of a frame, a line of one, concatenated roots, and more aligned than large.
    let shapes = [10, 6, 12, 14, 16, 10, 3, 11, 10].map(shape);
    let shapes: Vec<_> =
        shapes.into_iter().chain([wide(4, 12), wide(5, 10), wide(12, 14)]).collect();
    // Miri is hundreds of times slower.
    let (most, each) = if cfg!(miri) { (10, 5) } else { (16, 9) };
    let shapes: Vec<_> = shapes.into_iter().filter(|shape| shape.lg2_size <= most).collect();
    let mut tables = Vec::new();
    for (word, &shape) in shapes.iter().enumerate() {
        let mut list = reserve(&memory, shape, each).unwrap();
        for _ in 0..each {
            let paddr = publish(&memory, shape, &mut list, word as u64);
            assert!(lg2::is_aligned(paddr.get(), shape.lg2_align), "{paddr}");
            tables.push((paddr, shape, word as u64));
        }
        assert!(TableMemory::<u64>::take(&memory, Promise::kept(), shape, &mut list).is_none());
    }
    for &(paddr, shape, word) in &tables {
        let words = entries(&memory, paddr, shape);
        assert!(words.iter().all(|&found| found == word), "{paddr} is another's, too");
    }
    // In another order than they were taken.
    tables.sort_by_key(|&(paddr, ..)| paddr.get().reverse_bits());
    for (paddr, shape, _) in tables {
        let mut list = FrameList::default();
        retire(&memory, &mut list, paddr, shape);
        free(&memory, shape, list);
    }
    assert_eq!(out(&memory), 0);
}

#[test]
fn a_frame_goes_back_with_the_last_of_the_tables_that_share_it() {
    let memory = memory();
    let quarter = shape(10);
    let mut list = reserve(&memory, quarter, 6).unwrap();
    let tables: Vec<_> = (0..6).map(|n| publish(&memory, quarter, &mut list, n)).collect();
    assert_eq!(out(&memory), 2);
    let [first, rest @ .., _, _] = &tables[..] else { unreachable!() };
    for &paddr in rest {
        retire(&memory, &mut list, paddr, quarter);
    }
    free(&memory, quarter, list);
    assert_eq!(out(&memory), 2, "one table of the first frame is left");
    let again = reserve(&memory, quarter, 5).unwrap();
    assert_eq!(out(&memory), 2, "three places of the first frame, and two of the second");
    free(&memory, quarter, again);
    let mut list = FrameList::default();
    retire(&memory, &mut list, *first, quarter);
    free(&memory, quarter, list);
    assert_eq!(out(&memory), 1);
    for &paddr in &tables[4..] {
        let mut list = FrameList::default();
        retire(&memory, &mut list, paddr, quarter);
        free(&memory, quarter, list);
    }
    assert_eq!(out(&memory), 0);
}

#[test]
fn a_reservation_is_all_or_nothing_wherever_frames_run_out() {
    for size in [10, 12, 13] {
        let memory = memory();
        let held = reserve(&memory, shape(size), 3).unwrap();
        for left in 0..4 {
            memory.frames.0.lock().left = left;
            let before = out(&memory);
            assert_eq!(reserve(&memory, shape(size), 20).unwrap_err(), NoTables { asked: 20 });
            assert_eq!((out(&memory), memory.frames.0.lock().left), (before, left));
        }
        free(&memory, shape(size), held);
        assert_eq!(out(&memory), 0);
    }
}

#[test]
fn tables_lie_below_their_limit_also_where_they_share_a_frame() {
    let memory = memory();
    let high = reserve(&memory, shape(10), 5).unwrap();
    let low = TableShape { max_paddr: PhysAddr::new(0x10_0fff), ..shape(10) };
    assert!(reserve(&memory, low, 1).is_err(), "the place left is in the second frame");
    free(&memory, shape(10), high);
    memory.frames.0.lock().next = 0x10_0000;
    let high = reserve(&memory, shape(10), 1).unwrap();
    let list = reserve(&memory, low, 3).unwrap();
    assert!(reserve(&memory, low, 1).is_err());
    free(&memory, low, list);
    free(&memory, shape(10), high);
}

#[test]
fn lists_are_joined_and_a_dropped_one_leaks_its_tables() {
    let memory = memory();
    let page = shape(12);
    let append = |list: &mut FrameList, other| {
        TableMemory::<u64>::append(&memory, Promise::kept(), list, other);
    };
    let mut list = FrameList::default();
    append(&mut list, FrameList::default());
    append(&mut list, reserve(&memory, page, 2).unwrap());
    append(&mut list, reserve(&memory, page, 1).unwrap());
    append(&mut list, FrameList::default());
    append(&mut list, reserve(&memory, page, 2).unwrap());
    let first = publish(&memory, page, &mut list, 0);
    retire(&memory, &mut list, first, page);
    let mut seen = Vec::new();
    while let Some(fresh) = TableMemory::<u64>::take(&memory, Promise::kept(), page, &mut list) {
        seen.push(fresh.paddr());
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 5);
    for paddr in seen {
        retire(&memory, &mut list, paddr, page);
    }
    drop(list);
    assert_eq!(out(&memory), 5, "hardware may read them still");
    // For the sake of the test's heap.
    let leaked = memory.frames.0.lock().out.clone();
    for (frame, _) in leaked {
        memory.give_back(PhysAddr::new(frame), page);
    }
}

#[test]
fn a_table_retired_twice_takes_no_other_ones_node() {
    let memory = memory();
    let page = shape(12);
    let mut list = reserve(&memory, page, 1).unwrap();
    let paddr = publish(&memory, page, &mut list, 0);
    retire(&memory, &mut list, paddr, page);
    // As two links to it would have it, which a device wrote.
    retire(&memory, &mut list, paddr, page);
    free(&memory, page, list);
    assert_eq!(out(&memory), 0);
}

#[test]
fn what_is_published_and_written_is_written_back_for_hardware_that_does_not_see_caches() {
    for coherency in [Coherency::Coherent, Coherency::NonCoherent] {
        let memory = memory();
        memory.frames.0.lock().coherency = coherency;
        let quarter = shape(10);
        let mut list = reserve(&memory, quarter, 1).unwrap();
        let paddr = publish(&memory, quarter, &mut list, 0);
        let table = TableAddr::new(paddr, 10);
        let cells = TableMemory::<u64>::entries(&memory, &table);
        TableMemory::<u64>::written(&memory, Promise::kept(), &cells[3..5]);
        let start = cells.as_ptr().addr();
        let expected = match coherency {
            Coherency::Coherent => Vec::new(),
            Coherency::NonCoherent => Vec::from([start..start + 1024, start + 24..start + 40]),
        };
        assert_eq!(memory.frames.0.lock().written_back, expected);
        retire(&memory, &mut list, paddr, quarter);
        free(&memory, quarter, list);
    }
}

#[test]
fn words_of_frames_are_zeroed_and_go_back_when_they_are_dropped() {
    let tables = Arc::new(FrameTables::new(Heap::default()));
    let most = PhysAddr::new(u64::MAX);
    for (lg2_size, frames) in [(3, 1), (12, 1), (14, 4)] {
        let words = tables.words(lg2_size, most).unwrap();
        assert_eq!(words.words().len(), frames * 512);
        assert_eq!(words.paddr().get() % (512 * 8 * frames as u64), 0);
        assert!(words.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
        words.words()[frames * 512 - 1].store(7, Ordering::Relaxed);
        assert_eq!(tables.frames().0.lock().out.len(), 1);
        drop(words);
        assert!(tables.frames().0.lock().out.is_empty());
    }
    assert!(tables.words(12, PhysAddr::new(0xfff)).is_none());
    assert!(tables.words(2, most).is_none() && tables.words(63, most).is_none());
}

#[test]
fn words_are_not_what_the_frames_had_before() {
    let tables = Arc::new(FrameTables::new(Heap::default()));
    tables.frames().0.lock().fill = 0xa5;
    let words = tables.words(13, PhysAddr::new(u64::MAX)).unwrap();
    assert!(words.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
}
