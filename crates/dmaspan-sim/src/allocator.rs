//! A global allocator that counts what a thread allocates, and fails where it is told to.
//!
//! Each thread counts for itself: what other threads allocate meanwhile, those of a test harness
//! among them, is neither counted nor refused. Memory that a thread frees counts as freed by it,
//! whichever thread allocated it.
//!
//! A program has one global allocator, so a test that counts names this one:
//!
//! ```
//! use dmaspan_sim::allocator::{self, Watched};
//!
//! #[global_allocator]
//! static ALLOCATOR: Watched = Watched;
//!
//! fn main() {
//!     let (words, allocated) = allocator::allocated(|| vec![0_u64; 16]);
//!     assert_eq!((allocated.count, allocated.bytes, allocated.kept), (1, 128, 128));
//!     let ((), allocated) = allocator::allocated(|| drop(words));
//!     assert_eq!((allocated.count, allocated.kept), (0, -128));
//! }
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;

/// The system's allocator, watched: for `#[global_allocator]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Watched;

/// Says what a thread allocated in some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allocated {
    /// How many times. A reallocation is one.
    pub count: u64,
    /// The bytes of all allocations together, those that were freed again included.
    pub bytes: u64,
    /// The bytes that were allocated more than freed, at the end.
    pub kept: i64,
    /// The same at the moment when it was most; at least 0.
    pub peak: i64,
}

thread_local! {
    /// Since the thread began, or since [`allocated`] began to count anew.
    static SO_FAR: Cell<Allocated> =
        const { Cell::new(Allocated { count: 0, bytes: 0, kept: 0, peak: 0 }) };
    /// Allocations until the one that fails; 0 or below: none will.
    static LEFT: Cell<i64> = const { Cell::new(0) };
}

/// Returns what `f` returns, and what the calling thread allocated in it. All is 0 where
/// [`Watched`] is not the global allocator.
pub fn allocated<R>(f: impl FnOnce() -> R) -> (R, Allocated) {
    let before = SO_FAR.replace(Allocated::default());
    let result = f();
    let inner = SO_FAR.get();
    SO_FAR.set(Allocated {
        count: before.count + inner.count,
        bytes: before.bytes + inner.bytes,
        kept: before.kept + inner.kept,
        peak: before.peak.max(before.kept + inner.peak),
    });
    (result, inner)
}

/// Returns what `f` returns. Nothing that it allocates or frees is counted by an [`allocated`]
/// around it.
pub fn uncounted<R>(f: impl FnOnce() -> R) -> R {
    let before = SO_FAR.get();
    let result = f();
    SO_FAR.set(before);
    result
}

/// Makes the `n`-th allocation of this thread from now on fail; 0: none. How many were left until
/// the one that was to fail before; 0 or less where it has failed, or none was to.
pub fn fail(n: i64) -> i64 {
    LEFT.replace(n)
}

/// Whether an allocation of `bytes` is granted, which it counts.
fn grant(bytes: usize) -> bool {
    if LEFT.replace(LEFT.get().saturating_sub(1)) == 1 {
        return false;
    }
    let Allocated { count, bytes: sum, kept, peak } = SO_FAR.get();
    let kept = kept.saturating_add_unsigned(bytes as u64);
    let (count, bytes) = (count + 1, sum.saturating_add(bytes as u64));
    SO_FAR.set(Allocated { count, bytes, kept, peak: peak.max(kept) });
    true
}

// SAFETY: 1. Memory is the system allocator's, but for a null pointer in place of an allocation
// that is to fail, as the trait permits. 2. The thread's counters need no memory and no destructor,
// so using them allocates nothing and works until the thread has ended. 3. `realloc` is the trait's
// own, which allocates, copies and frees by the methods here.
#[expect(unsafe_code, reason = "an allocator is unsafe to implement")]
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !grant(layout.size()) {
            return ptr::null_mut();
        }
        // SAFETY: the caller promises what `System` wants.
        unsafe { System.alloc(layout) }
    }

    /// The system has zeroed memory that nobody has touched.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !grant(layout.size()) {
            return ptr::null_mut();
        }
        // SAFETY: the caller promises what `System` wants.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let before = SO_FAR.get();
        let kept = before.kept.saturating_sub_unsigned(layout.size() as u64);
        SO_FAR.set(Allocated { kept, ..before });
        // SAFETY: the caller promises what `System` wants.
        unsafe { System.dealloc(at, layout) }
    }
}
