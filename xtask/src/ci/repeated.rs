//! Tests that count, again and again on a machine that is busy.

use std::hint;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::quietly;
use crate::cargo;

/// How often each runs.
const ROUNDS: usize = 50;
/// The threads that do nothing but take time.
const BUSY: usize = 2;

/// The tests that count allocations, frames or time: a crate, a program of its tests, and a part of
/// their names.
const COUNTING: &[(&str, &str, &str)] = &[
    ("dmaspan", "allocations", ""),
    ("dmaspan-nvme", "it", ""),
    ("dmaspan-linux", "it", "fixed::"),
    ("dmaspan-cli", "it", "cli::"),
];

/// Tests of the same kind, of which those that take minutes each run once.
const WAITING: &[(&str, &str, &str)] =
    &[("dmaspan", "it", "soft_iommu::waiting::"), ("dmaspan-vm-memory", "waiting", "")];

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
        for &(package, program, tests) in COUNTING.iter().chain(WAITING) {
            let count = (0..ROUNDS).filter(|_| !passes(package, program, tests, &[])).count();
            let name = format!("{package}, {program} {tests}");
            let said = format!("{}: {count} of {ROUNDS}", name.trim_end());
            println!("   {said} failed");
            if count > 0 {
                failed.push(said);
            }
        }
        done.store(true, Ordering::Relaxed);
        // They are busy enough by themselves.
        for &(package, program, tests) in WAITING {
            if !passes(package, program, tests, &["--", "--ignored"]) {
                failed.push(format!("{package}, {program} {tests}: what takes minutes"));
            }
        }
        failed
    })
}

/// Whether tests of a program pass; what they printed is shown where they do not. They are
/// optimised, as they run often.
fn passes(package: &str, program: &str, tests: &str, more: &[&str]) -> bool {
    let mut test = cargo(&["test", "--release", "-q", "-p", package, "--test", program, tests]);
    test.args(more);
    quietly(&mut test).is_ok()
}
