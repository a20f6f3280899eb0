//! Everything that must hold before a change lands, in one command.

use std::process::{Command, Stdio};
use std::time::Instant;

use crate::{cargo, guest, hw, no_std, report};

/// How a check ended.
enum Outcome {
    Passed,
    /// It could not run here; why.
    Skipped(String),
    /// It failed; why.
    Failed(String),
}

/// A check and what it is called.
struct Check {
    name: &'static str,
    run: fn() -> Outcome,
}

const CHECKS: [Check; 11] = [
    Check { name: "formatting: cargo fmt --all --check", run: formatting },
    Check { name: "lints: cargo clippy --workspace --all-targets -- -D warnings", run: lints },
    Check { name: "documentation: cargo doc --workspace --no-deps", run: documentation },
    Check { name: "tests: cargo test --workspace --exclude dmaspan-qemu", run: tests },
    Check { name: "hardware: cargo xtask hw", run: hardware },
    Check { name: "guests: cargo xtask guest", run: guests },
    Check { name: "soak: ten million operations under the sanitizer", run: soak },
    Check { name: "interleavings: cargo test -p dmaspan --test loom", run: interleavings },
    Check { name: "core without std: cargo xtask no-std", run: core_without_std },
    Check { name: "dependencies: cargo deny check licenses bans sources", run: dependencies },
    Check { name: "main job: cargo run --release -q -- map 256M --format json", run: main_job },
];

const FUZZ: &str = "fuzz/Cargo.toml";
const NO_STD: &str = "xtask/no-std/Cargo.toml";
const MAIN_JOB: [&str; 8] = ["run", "--release", "-q", "--", "map", "256M", "--format", "json"];
const MAIN_JOB_BYTES: u64 = 256 << 20;

/// Runs all checks, each announced by a line, and returns whether none failed. A check that fails
/// does not keep the others from running.
pub fn run() -> bool {
    let mut failed = Vec::new();
    let mut skipped = 0;
    for check in &CHECKS {
        println!("== {}", check.name);
        let started = Instant::now();
        let outcome = (check.run)();
        let seconds = started.elapsed().as_secs();
        match outcome {
            Outcome::Passed => println!("== passed in {seconds} s"),
            Outcome::Skipped(reason) => {
                println!("== SKIP: {reason}");
                skipped += 1;
            }
            Outcome::Failed(reason) => {
                println!("== FAILED: {reason}");
                failed.push(check.name);
            }
        }
    }
    let passed = CHECKS.len() - failed.len() - skipped;
    println!("== ci: {passed} passed, {skipped} skipped, {} failed", failed.len());
    for name in &failed {
        println!("   FAILED {name}");
    }
    failed.is_empty()
}

/// Runs commands one after the other, until one fails.
fn commands<const N: usize>(commands: [&mut Command; N]) -> Outcome {
    for command in commands {
        match command.status() {
            Ok(status) if status.success() => {}
            Ok(status) => return Outcome::Failed(status.to_string()),
            Err(error) => return Outcome::Failed(format!("it did not start: {error}")),
        }
    }
    Outcome::Passed
}

fn formatting() -> Outcome {
    commands([
        &mut cargo(&["fmt", "--all", "--check"]),
        &mut cargo(&["fmt", "--manifest-path", NO_STD, "--check"]),
        &mut cargo(&["fmt", "--manifest-path", FUZZ, "--check"]),
    ])
}

/// Benchmarks are compiled here as well.
fn lints() -> Outcome {
    commands([&mut cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])])
}

fn documentation() -> Outcome {
    let mut doc = cargo(&["doc", "--workspace", "--no-deps"]);
    commands([doc.env("RUSTDOCFLAGS", "-D warnings")])
}

/// `cargo test --workspace` without what [`hardware`] runs.
fn tests() -> Outcome {
    commands([&mut cargo(&["test", "--workspace", "--exclude", "dmaspan-qemu"])])
}

/// Where there is no QEMU and none can be got, the tests that need none run, and whether that is a
/// failure is the environment's to say.
fn hardware() -> Outcome {
    match hw::ready() {
        Ok(folder) => commands([&mut hw::tests(&folder)]),
        Err(reason) if hw::is_required() => Outcome::Failed(reason),
        Err(reason) => match commands([&mut hw::tests_without_qemu()]) {
            Outcome::Passed => Outcome::Skipped(reason),
            outcome => outcome,
        },
    }
}

fn guests() -> Outcome {
    match guest::Options::parse(&[]).and_then(|options| guest::check(&options)) {
        Ok(guest::Outcome::Passed) => Outcome::Passed,
        Ok(guest::Outcome::Skipped(reason)) if hw::is_required() => Outcome::Failed(reason),
        Ok(guest::Outcome::Skipped(reason)) => Outcome::Skipped(reason),
        Err(error) => Outcome::Failed(error),
    }
}

/// `cargo test` has a short one.
fn soak() -> Outcome {
    let mut test = cargo(&["test", "--release", "-p", "dmaspan-sim"]);
    test.args(["--test", "soak", "--test", "pool_soak"]);
    commands([test.env("DMASPAN_SOAK", "10000000")])
}

/// The core with loom's atomics in a target directory of its own: everything is built anew for the
/// flag.
fn interleavings() -> Outcome {
    let mut test = cargo(&["test", "-p", "dmaspan", "--test", "loom", "--target-dir"]);
    let target = crate::target_directory().join("loom");
    commands([test.arg(target).env("RUSTFLAGS", "--cfg loom")])
}

fn core_without_std() -> Outcome {
    match no_std::check() {
        Ok(said) => {
            println!("{said}");
            Outcome::Passed
        }
        Err(error) => Outcome::Failed(error),
    }
}

fn dependencies() -> Outcome {
    let version = cargo(&["deny", "--version"]).stderr(Stdio::null()).output();
    if !version.is_ok_and(|version| version.status.success()) {
        let how = "https://github.com/EmbarkStudios/cargo-deny says how to install it";
        return Outcome::Skipped(format!("cargo-deny is not installed; {how}"));
    }
    commands([&mut cargo(&["deny", "check", "licenses", "bans", "sources"])])
}

fn main_job() -> Outcome {
    let output = match cargo(&MAIN_JOB).stderr(Stdio::inherit()).output() {
        Ok(output) => output,
        Err(error) => return Outcome::Failed(format!("it did not start: {error}")),
    };
    let json = String::from_utf8_lossy(&output.stdout);
    print!("{json}");
    if !output.status.success() {
        return Outcome::Failed(output.status.to_string());
    }
    match report::check(&json, MAIN_JOB_BYTES) {
        problems if problems.is_empty() => Outcome::Passed,
        problems => Outcome::Failed(format!("the report is wrong:\n   {}", problems.join("\n   "))),
    }
}
