//! Methods that move bytes of one memory, each on two threads and beside every other one, at every
//! alignment and length, as in `crates/dmaspan/tests/at_once`: Miri runs them over memory of the
//! heap, and natively they run the assembly.
#![expect(unsafe_code, reason = "the tests promise to keep memory that they leak")]

use std::alloc::{Layout, alloc_zeroed};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use dmaspan::iommu::soft::Bus;
use dmaspan::regbuf::HostMemory;
use dmaspan::swiotlb::{InSlot, PoolMemory, To, Transfer};
use dmaspan::{HostAddr, PhysAddr, Span};

use super::Memory;
use crate::bounce::BounceMemory;
use crate::sys;
use crate::sys::direct_map::DirectMap;

/// Two pages of the heap, which leak.
fn memory() -> Memory {
    let page = sys::page_size();
    let bytes = usize::try_from(2 * page).unwrap();
    let layout = Layout::from_size_align(bytes, bytes / 2).unwrap();
    // SAFETY: the size is not 0.
    let start = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
    // SAFETY: it is never freed, and nobody else has it.
    unsafe { Memory::foreign(start, 2 * page, ()) }.unwrap()
}

type Mover<'a> = (&'static str, Box<dyn Fn(u64, u64) + Send + Sync + 'a>);

fn mover<'a>(name: &'static str, run: impl Fn(u64, u64) + Send + Sync + 'a) -> Mover<'a> {
    (name, Box::new(run))
}

/// Each of them on two threads, all at once, at all places.
fn at_once(movers: &[Mover<'_>]) {
    for _ in 0..if cfg!(miri) { 1 } else { 50 } {
        thread::scope(|scope| {
            for (name, run) in movers.iter().chain(movers) {
                let places = (0..=8).flat_map(|at| (1..=17).map(move |len| (at, len)));
                // As for the core.
                let places = places.filter(|(at, len)| !cfg!(miri) || (3 * at + len) % 8 == 0);
                let run = move || places.for_each(|(at, len)| run(at, len));
                thread::Builder::new().name((*name).to_owned()).spawn_scoped(scope, run).unwrap();
            }
        });
    }
}

const WRITTEN: [u8; 17] = [7; 17];

fn written(len: u64) -> &'static [u8] {
    &WRITTEN[..usize::try_from(len).unwrap()]
}

fn read(len: u64, run: impl FnOnce(&mut [u8])) {
    let mut bytes = [1; 17];
    let bytes = &mut bytes[..usize::try_from(len).unwrap()];
    run(bytes);
    assert!(bytes.iter().all(|byte| [0, 7].contains(byte)), "{bytes:?}");
}

/// The word around a place, and the bytes from there on that are whole words.
fn words(at: u64, len: u64) -> (u64, u64) {
    (at / 8 * 8, len.next_multiple_of(8))
}

/// Bytes behind all places were not written.
fn is_whole_beside(memory: &Memory) -> bool {
    let mut end = [1; 32];
    memory.read(32, &mut end).unwrap();
    end == [0; 32]
}

#[test]
fn bytes_of_a_memory_are_read_and_written_on_two_threads() {
    let memory = memory();
    let start = memory.user_range().start().get();
    let host = |at: u64| HostAddr::new(start + at);
    let seven = u64::from_ne_bytes([7; 8]);
    let order = Ordering::Relaxed;
    at_once(&[
        mover("Memory::read", |at, len| read(len, |into| memory.read(at, into).unwrap())),
        mover("Memory::write", |at, len| memory.write(at, written(len)).unwrap()),
        mover("Memory::read_u64", |at, _| assert_ne!(memory.read_u64(at / 8 * 8), Ok(1))),
        mover("Memory::write_u64", |at, _| memory.write_u64(at / 8 * 8, seven).unwrap()),
        mover("Memory::fill_words", |at, len| {
            let (at, len) = words(at, len);
            memory.fill_words(at, len.min(32 - at), |_| seven).unwrap();
        }),
        mover("Memory::check_words", |at, len| {
            let (at, len) = words(at, len);
            let _ = memory.check_words(at, len, |_| seven);
        }),
        mover("Memory::words", |at, _| {
            let word = &memory.words()[usize::try_from(at / 8).unwrap()];
            assert_ne!(word.load(order), 1);
            word.store(seven, order);
        }),
        mover("Mapping::touch", |at, _| {
            memory.mapping().touch(usize::try_from(at).unwrap()).unwrap();
        }),
        mover("HostBytes::read", |at, len| {
            read(len, |into| memory.bytes().read(host(at), into).unwrap());
        }),
        mover("HostBytes::write", |at, len| {
            memory.bytes().write(host(at), written(len)).unwrap();
        }),
        mover("HostMemory::read", |at, len| {
            read(len, |into| HostMemory::read(&memory, at, into).unwrap());
        }),
        mover("HostMemory::write", |at, len| {
            HostMemory::write(&memory, at, written(len)).unwrap();
        }),
    ]);
    assert!(is_whole_beside(&memory));
}

#[test]
fn memory_of_a_pool_is_moved_on_two_threads_beside_the_memory_itself() {
    let (pool, original) = (BounceMemory::over(memory()), memory());
    let [slots, originals] =
        [pool.memory(), &original].map(|memory| memory.user_range().start().get());
    let span = |at: u64, len| Span::new(HostAddr::new(slots + at), len).unwrap();
    // SAFETY: this test has all slots.
    let slot = |at, len| unsafe { InSlot::of(span(at, len)) };
    let between = |at, len, to| {
        let [slot, original] = [slots, originals].map(|start| HostAddr::new(start + at));
        // SAFETY: this test has all slots, and the original.
        unsafe { Transfer::between(slot, original, len, to) }
    };
    at_once(&[
        mover("BounceMemory::copy", |at, len| {
            pool.copy(between(at, len, To::Slot));
            pool.copy(between(at, len, To::Original));
        }),
        mover("BounceMemory::zero", |at, len| pool.zero(slot(at, len))),
        mover("BounceMemory::read", |at, len| read(len, |into| pool.read(slot(at, len), into))),
        mover("BounceMemory::write", |at, len| pool.write(slot(at, len), written(len))),
        mover("BounceMemory::memory", |at, len| pool.memory().write(at, written(len)).unwrap()),
        mover("Memory::write", |at, len| original.write(at, written(len)).unwrap()),
    ]);
    assert!(is_whole_beside(pool.memory()) && is_whole_beside(&original));
}

#[test]
fn pinned_memory_is_moved_on_two_threads_by_its_physical_addresses() {
    let (map, [slots, originals]) = (DirectMap::new(), [memory(), memory()].map(Arc::new));
    let at = |start: u64, at| PhysAddr::new((start << 32) + at);
    let page = sys::page_size();
    map.add(&slots, &[Span::new(at(1, 0), page).unwrap()]).unwrap();
    // Of two spans, which meet within the places.
    map.add(
        &originals,
        &[(2, 8), (3, page - 8)].map(|(start, len)| Span::new(at(start, 0), len).unwrap()),
    )
    .unwrap();
    let slot = |offset, len| {
        // SAFETY: this test has all slots.
        unsafe { InSlot::of(Span::new(at(1, offset), len).unwrap()) }
    };
    let between = |offset, len, to| {
        // SAFETY: this test has all slots, and the originals.
        unsafe { Transfer::between(at(1, offset), at(3, offset), len, to) }
    };
    at_once(&[
        mover("DirectMap::transfer", |at, len| {
            map.transfer(&between(at, len, To::Slot));
            map.transfer(&between(at, len, To::Original));
        }),
        mover("DirectMap::zero", |at, len| map.zero(&slot(at, len))),
        mover("DirectMap::read", |at, len| read(len, |into| map.read(&slot(at, len), into))),
        mover("DirectMap::write", |at, len| map.write(&slot(at, len), written(len))),
        mover("Memory::write", |at, len| {
            slots.write(at, written(len)).unwrap();
            originals.write(8 + at, written(len)).unwrap();
        }),
    ]);
    assert!(is_whole_beside(&slots));
}
