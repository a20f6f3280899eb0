//! Tests that count, again and again on a machine that is busy.

use std::hint;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::cargo;

/// How often each runs.
const ROUNDS: usize = 50;
/// The threads that do nothing but take time.
const BUSY: usize = 2;

/// The programs that count allocations, frames or time, by crate.
const COUNTING: &[(&str, &[&str])] = &[
    (
        "dmaspan-sim",
        &[
            "container_memory",
            "container_nomem",
            "mapped_nomem",
            "pin_memory",
            "pool_nomem",
            "regbuf_bytes",
            "regbuf_nomem",
        ],
    ),
    ("dmaspan-nvme", &["driver"]),
    ("dmaspan-linux", &["fixed"]),
    ("dmaspan-cli", &["bench_dma", "cli"]),
];

/// Runs them all, and returns what failed, a line each.
pub(super) fn run() -> Vec<String> {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..BUSY {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    hint::spin_loop();
                }
            });
        }
        let mut failed = Vec::new();
        for &(package, tests) in COUNTING {
            for test in tests {
                let count = (0..ROUNDS).filter(|_| !passes(package, test)).count();
                println!("   {package}, {test}: {count} of {ROUNDS} failed");
                if count > 0 {
                    failed.push(format!("{package}, {test}: {count} of {ROUNDS}"));
                }
            }
        }
        done.store(true, Ordering::Relaxed);
        failed
    })
}

/// Whether a test program passes; what it printed is shown where it does not.
fn passes(package: &str, test: &str) -> bool {
    match cargo(&["test", "-q", "-p", package, "--test", test]).output() {
        Ok(output) if output.status.success() => true,
        Ok(output) => {
            print!("{}", String::from_utf8_lossy(&output.stdout));
            eprint!("{}", String::from_utf8_lossy(&output.stderr));
            false
        }
        Err(_) => false,
    }
}
