//! A global allocator whose n-th allocation on a thread fails, and programs in which it does: each
//! failure may be the last thing that its program does.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::process::Command;

/// What tells a program which operation it runs, and which allocation fails.
const ASKED: &str = "DMASPAN_NOMEM";
/// What a program says when its allocation was not reached, or did no harm.
const NONE_FAILED: i32 = 60;
const NO_HARM: i32 = 61;

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

/// The operation, and the allocation that is to fail, of a program that runs the test `child` for
/// [`programs_that_end`]; `None` in any other.
pub(crate) fn asked() -> Option<(usize, i64)> {
    let asked = std::env::var(ASKED).ok()?;
    let (operation, n) = asked.split_once(' ').unwrap();
    Some((operation.parse().unwrap(), n.parse().unwrap()))
}

/// Ends such a program, in which all was as it should be. `left` is what [`fail`] said behind the
/// operation: where it is positive, there were fewer allocations.
pub(crate) fn done(left: i64) -> ! {
    std::process::exit(if left > 0 { NONE_FAILED } else { NO_HARM })
}

/// Runs an operation with its first allocation failing, its second, … until it has no more, each
/// time in the test `child` of a program of its own. How many ended their program.
pub(crate) fn programs_that_end(operation: usize, name: &str) -> u32 {
    let program = std::env::current_exe().unwrap();
    let mut ended = 0;
    for n in 1.. {
        let mut child = Command::new(&program);
        child.args(["--exact", "child", "--nocapture"]).env("RUST_BACKTRACE", "0");
        let output = child.env(ASKED, format!("{operation} {n}")).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        match output.status.code() {
            Some(NONE_FAILED) => break,
            Some(NO_HARM) => {}
            None if said.contains("memory allocation of") => ended += 1,
            _ => panic!("{name}, allocation {n}: {} {said}", output.status),
        }
    }
    ended
}
