//! A global allocator whose n-th allocation on a thread fails.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Failing;

thread_local! {
    /// Allocations until the one that fails; 0 or below: none will.
    static LEFT: Cell<i64> = const { Cell::new(0) };
}

/// Makes the `n`-th allocation of this thread from now on fail; 0: none. How many were left until
/// the one that was to fail before: none, where it has.
pub(crate) fn fail(n: i64) -> i64 {
    LEFT.with(|left| left.replace(n))
}

// SAFETY: everything is the system allocator's, but for what fails.
#[expect(unsafe_code, reason = "an allocator is unsafe to implement")]
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if LEFT.with(|left| left.replace(left.get() - 1) == 1) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller promises what `System` wants.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller promises what `System` wants.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Failing = Failing;
