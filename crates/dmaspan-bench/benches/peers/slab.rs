//! Small memory as Linux's side has it where it pins, the same as in `xtask/peers/shim/blocks.h`: a
//! list of free blocks for each size, last in, first out, as a slab's. What is larger comes from
//! the C library, as does all before [`begin`].

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

const BLOCK: usize = 64;
/// To 8 KiB, as the kernel's slabs.
const SIZES: usize = 129;
/// Of the blocks of one size. It begins on a multiple of it, with the size.
const CHUNK: usize = 64 << 10;
/// All chunks are in it, in one piece that tells blocks from other memory.
const ARENA: usize = 256 << 20;
/// No memory is there.
const NOWHERE: usize = 1 << (usize::BITS - 1);

/// Where the arena is, and how many bytes of it have chunks.
static START: AtomicUsize = AtomicUsize::new(NOWHERE);
static USED: AtomicUsize = AtomicUsize::new(0);

struct Block {
    next: *mut Self,
}

thread_local! {
    /// As a CPU's.
    static FREE: [Cell<*mut Block>; SIZES] =
        const { [const { Cell::new(ptr::null_mut()) }; SIZES] };
}

/// Has small memory come from blocks from now on.
pub(crate) fn begin() {
    if START.load(Ordering::Relaxed) != NOWHERE {
        return;
    }
    let layout = Layout::from_size_align(ARENA, CHUNK).expect("a valid layout");
    // SAFETY: it has bytes.
    let arena = unsafe { System.alloc(layout) };
    assert!(!arena.is_null(), "no room for blocks");
    START.store(arena.expose_provenance(), Ordering::Relaxed);
}

pub(crate) struct Slab;

/// How many blocks a layout takes, where it takes one size of them.
#[inline(always)]
fn size_of(layout: Layout) -> Option<usize> {
    let size = layout.size().div_ceil(BLOCK);
    (size < SIZES && layout.align() <= BLOCK).then_some(size)
}

/// Where the chunk of a block begins.
#[inline(always)]
fn chunk_of(block: *mut u8) -> Option<*mut usize> {
    let is_block = block.addr().wrapping_sub(START.load(Ordering::Relaxed)) < ARENA;
    is_block.then(|| block.map_addr(|addr| addr & !(CHUNK - 1)).cast())
}

/// Makes blocks of a size free; none where there is no room.
#[cold]
fn more_blocks(free: &Cell<*mut Block>, size: usize) {
    let used = USED.fetch_add(CHUNK, Ordering::Relaxed);
    if used >= ARENA {
        return;
    }
    let chunk = ptr::with_exposed_provenance_mut::<u8>(START.load(Ordering::Relaxed) + used);
    // SAFETY: the chunk is nobody else's, and begins on a multiple of its size.
    unsafe { chunk.cast::<usize>().write(size) };
    for nth in (0..(CHUNK / BLOCK - 1) / size).rev() {
        let block: *mut Block = chunk.wrapping_add(BLOCK + nth * size * BLOCK).cast();
        // SAFETY: blocks are apart, each larger than this and aligned to more.
        unsafe { block.write(Block { next: free.get() }) };
        free.set(block);
    }
}

// SAFETY: a block is one layout's from when it is taken from a list until it is put there, and lies
// in a chunk of blocks that are as large. All else is the C library's.
unsafe impl GlobalAlloc for Slab {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if START.load(Ordering::Relaxed) != NOWHERE
            && let Some(size) = size_of(layout)
        {
            let block = FREE.with(|free| {
                let free = &free[size];
                if free.get().is_null() {
                    more_blocks(free, size);
                }
                let block = free.get();
                if !block.is_null() {
                    // SAFETY: a free block has the next one.
                    free.set(unsafe { (*block).next });
                }
                block
            });
            if !block.is_null() {
                return block.cast();
            }
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        let Some(chunk) = chunk_of(memory) else {
            // SAFETY: it was allocated there.
            return unsafe { System.dealloc(memory, layout) };
        };
        // SAFETY: a chunk begins with the size of its blocks.
        let size = unsafe { *chunk };
        FREE.with(|free| {
            let (free, block) = (&free[size], memory.cast::<Block>());
            // SAFETY: it is a block, which nobody uses any more.
            unsafe { block.write(Block { next: free.get() }) };
            free.set(block);
        });
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if chunk_of(memory).is_none() {
            // SAFETY: it was allocated there; the caller's promise.
            return unsafe { System.realloc(memory, layout, bytes) };
        }
        let Ok(new) = Layout::from_size_align(bytes, layout.align()) else {
            return ptr::null_mut();
        };
        if size_of(new) == size_of(layout) {
            return memory;
        }
        // SAFETY: the caller's promise.
        let copy = unsafe { self.alloc(new) };
        if !copy.is_null() {
            // SAFETY: both have so many bytes, and are apart.
            unsafe { ptr::copy_nonoverlapping(memory, copy, bytes.min(layout.size())) };
            // SAFETY: it was allocated here, and is not used any more.
            unsafe { self.dealloc(memory, layout) };
        }
        copy
    }
}
