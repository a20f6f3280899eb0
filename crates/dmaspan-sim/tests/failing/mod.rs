//! Programs in which the n-th allocation of a thread fails: each failure may be the last thing that
//! its program does.

use std::process::Command;

use dmaspan_sim::allocator::Watched;
pub(crate) use dmaspan_sim::allocator::fail;

/// What tells a program which operation it runs, and which allocation fails.
const ASKED: &str = "DMASPAN_NOMEM";
/// What a program says when its allocation was not reached, or did no harm.
const NONE_FAILED: i32 = 60;
const NO_HARM: i32 = 61;

#[global_allocator]
static ALLOCATOR: Watched = Watched;

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
