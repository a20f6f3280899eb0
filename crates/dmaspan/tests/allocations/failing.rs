//! Programs in which the n-th allocation of a thread fails: each failure may be the last thing that
//! its program does.

use std::fmt::Debug;
use std::process::{Command, exit};

pub(crate) use dmaspan_sim::allocator::fail;

/// What tells a program which case it runs, and which allocation fails.
const ASKED: &str = "DMASPAN_NOMEM";
/// What a program says when its allocation was not reached, or did no harm.
const NONE_FAILED: i32 = 60;
const NO_HARM: i32 = 61;

/// An operation, one of whose allocations fails.
pub(crate) struct Case {
    name: &'static str,
    ends: Ends,
    /// Runs it with its `n`-th allocation failing, asserts that all is as it should be then, and
    /// returns what [`fail`] said behind it: where it is positive, there were fewer allocations.
    run: fn(n: i64) -> i64,
}

pub(crate) const fn case(name: &'static str, ends: Ends, run: fn(n: i64) -> i64) -> Case {
    Case { name, ends, run }
}

/// How many allocations of an operation end the program where there is no memory, in small memory
/// of its own, or in the simulated memory.
#[derive(Debug)]
pub(crate) enum Ends {
    Maybe,
    Never,
    Times(u32),
}

/// What an operation that fails leaves as it was.
pub(crate) trait World {
    /// What is compared.
    fn state(&self) -> impl PartialEq + Debug + use<Self>;

    /// Asserts what holds once it has ended.
    fn end(self);
}

/// [`Case::run`] of an operation that changes nothing where it fails.
pub(crate) fn unchanged<W: World, E>(
    n: i64,
    mut world: W,
    operation: impl FnOnce(&mut W) -> Result<(), E>,
) -> i64 {
    let before = world.state();
    fail(n);
    let result = operation(&mut world);
    let left = fail(0);
    let after = world.state();
    if result.is_err() {
        assert_eq!(after, before);
    }
    world.end();
    left
}

/// What an error says. Nothing fails any more, as that may need memory.
pub(crate) fn said(error: impl std::error::Error) -> String {
    fail(0);
    error.to_string()
}

/// What the test `child` of a module does: nothing but in the programs of [`sweep`], which end
/// here.
pub(crate) fn child(cases: &[Case]) {
    let Ok(asked) = std::env::var(ASKED) else { return };
    let (case, n) = asked.split_once(' ').unwrap();
    let left = (cases[case.parse::<usize>().unwrap()].run)(n.parse().unwrap());
    exit(if left > 0 { NONE_FAILED } else { NO_HARM })
}

/// Runs each case of a module with its first allocation failing, its second, … until it has no
/// more, each time in the test `child` of a program of its own.
pub(crate) fn sweep(module: &str, cases: &[Case]) {
    let (_, module) = module.split_once("::").unwrap();
    let child = format!("{module}::child");
    for (number, Case { name, ends, .. }) in cases.iter().enumerate() {
        let ended = programs_that_end(&child, number, name);
        let is_right = match ends {
            Ends::Maybe => true,
            Ends::Never => ended == 0,
            Ends::Times(count) => ended == *count,
        };
        assert!(is_right, "{name}: {ended} allocations end the program, of {ends:?}");
    }
}

fn programs_that_end(test: &str, case: usize, name: &str) -> u32 {
    let program = std::env::current_exe().unwrap();
    let mut ended = 0;
    for n in 1.. {
        let mut child = Command::new(&program);
        child.args(["--exact", test, "--nocapture"]).env("RUST_BACKTRACE", "0");
        let output = child.env(ASKED, format!("{case} {n}")).output().unwrap();
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
