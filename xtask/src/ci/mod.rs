//! `cargo xtask ci` checks in one command everything that must hold before a change lands.

mod readme;
mod repeated;

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;
use std::{fs, io};

use Extent::{Full, Quick};

use crate::{cargo, guest, hw, msrv, no_std, package, report};

/// How much is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// What proves each kind of thing, in half an hour on two cores.
    Quick,
    /// All of it, at full length.
    Full,
}

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
    /// The least extent that it belongs to.
    from: Extent,
    run: fn(Extent) -> Outcome,
}

const CHECKS: [Check; 15] = [
    Check { name: "formatting: cargo fmt --all --check", from: Quick, run: |_| formatting() },
    Check {
        name: "lints: cargo clippy --workspace --all-targets -- -D warnings",
        from: Quick,
        run: |_| lints(),
    },
    Check {
        name: "documentation: cargo doc --workspace --no-deps",
        from: Quick,
        run: |_| documentation(),
    },
    Check {
        name: "tests: cargo test --workspace --exclude dmaspan-qemu",
        from: Quick,
        run: |_| tests(),
    },
    Check { name: "hardware: cargo xtask hw", from: Quick, run: |_| hardware() },
    Check { name: "guests: cargo xtask guest", from: Quick, run: |_| guests() },
    Check { name: "soak: ten million operations under the sanitizer", from: Full, run: |_| soak() },
    Check {
        name: "interleavings: cargo test -p dmaspan --test loom",
        from: Quick,
        run: |_| interleavings(),
    },
    Check {
        name: "core without std: cargo xtask no-std",
        from: Quick,
        run: |_| core_without_std(),
    },
    Check { name: "oldest Rust: cargo xtask msrv", from: Quick, run: |_| outcome(msrv::check()) },
    Check { name: "packages: cargo xtask package", from: Quick, run: |_| packages() },
    Check {
        name: "dependencies: cargo deny check licenses bans sources",
        from: Quick,
        run: |_| dependencies(),
    },
    Check {
        name: "main job: cargo run --release -q -- map 256M --runs 1 --format json",
        from: Quick,
        run: |_| main_job(),
    },
    Check { name: "commands: those of README.md", from: Quick, run: readme_commands },
    Check {
        name: "repeated: tests that count, fifty times beside two busy loops",
        from: Full,
        run: |_| failures(&repeated::run()),
    },
];

const FUZZ: &str = "fuzz/Cargo.toml";
const NO_STD: &str = "xtask/no-std/Cargo.toml";
/// One run: its times add up, which medians of several need not.
const MAIN_JOB: [&str; 10] =
    ["run", "--release", "-q", "--", "map", "256M", "--runs", "1", "--format", "json"];
const MAIN_JOB_BYTES: u64 = 256 << 20;

/// Runs the checks of an extent that `names` name, or all where there are no names, and returns
/// whether none failed. A check's name is what stands before its colon. Each is announced by a
/// line; one that fails does not keep the others from running.
///
/// # Errors
///
/// The names that no check of the extent has, in one line; nothing ran.
pub fn run(extent: Extent, names: &[&str]) -> Result<bool, String> {
    let begin = Instant::now();
    let mut failed = Vec::new();
    let mut skipped = 0;
    let of_extent = || CHECKS.iter().filter(|check| extent == Full || check.from == Quick);
    let is_one = |check: &Check, name: &str| check.name.split(':').next() == Some(name);
    let unknown = names.iter().find(|name| !of_extent().any(|check| is_one(check, name)));
    if let Some(unknown) = unknown {
        let known: Vec<_> = of_extent().filter_map(|check| check.name.split(':').next()).collect();
        return Err(format!("there is no check `{unknown}`; there are: {}", known.join(", ")));
    }
    let checks = || {
        let asked =
            |check: &&Check| names.is_empty() || names.iter().any(|name| is_one(check, name));
        of_extent().filter(asked)
    };
    for check in checks() {
        println!("== {}", check.name);
        let started = Instant::now();
        let outcome = (check.run)(extent);
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
    let passed = checks().count() - failed.len() - skipped;
    let seconds = begin.elapsed().as_secs();
    println!("== ci: {passed} passed, {skipped} skipped, {} failed in {seconds} s", failed.len());
    for name in &failed {
        println!("   FAILED {name}");
    }
    Ok(failed.is_empty())
}

/// Runs commands one after the other, until one fails.
fn commands<const N: usize>(commands: [&mut Command; N]) -> Outcome {
    match commands.into_iter().try_for_each(crate::run) {
        Ok(()) => Outcome::Passed,
        Err(why) => Outcome::Failed(why),
    }
}

/// How a check ended that found this, a line each.
fn failures(found: &[String]) -> Outcome {
    match found.is_empty() {
        true => Outcome::Passed,
        false => Outcome::Failed(found.join("\n   ")),
    }
}

fn readme_commands(extent: Extent) -> Outcome {
    failures(&readme::run(extent))
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

/// `cargo test --workspace` without what [`hardware`] runs. Examples that must not compile have to
/// fail with the error that they name, which rustdoc looks at only where unstable features are.
fn tests() -> Outcome {
    let rustdoc = match rustdoc_with_error_codes() {
        Ok(rustdoc) => rustdoc,
        Err(error) => return Outcome::Failed(format!("no script for rustdoc: {error}")),
    };
    let mut test = cargo(&["test", "--workspace", "--exclude", "dmaspan-qemu"]);
    commands([test.env("RUSTDOC", rustdoc)])
}

/// A script that is rustdoc with unstable features: for cargo and all that it builds nothing
/// changes.
fn rustdoc_with_error_codes() -> io::Result<PathBuf> {
    let script = crate::target_directory().join("rustdoc-with-error-codes");
    fs::write(&script, "#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec rustdoc \"$@\"\n")?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    Ok(script)
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
    let ended = guest::Options::parse(&[]).and_then(|options| guest::check(&options));
    match outcome(ended) {
        Outcome::Skipped(reason) if hw::is_required() => Outcome::Failed(reason),
        outcome => outcome,
    }
}

fn outcome(ended: Result<crate::Outcome, String>) -> Outcome {
    match ended {
        Ok(crate::Outcome::Passed) => Outcome::Passed,
        Ok(crate::Outcome::Skipped(reason)) => Outcome::Skipped(reason),
        Err(error) => Outcome::Failed(error),
    }
}

/// `cargo test` has a short one of each.
fn soak() -> Outcome {
    let mut test = cargo(&["test", "--release", "-p", "dmaspan", "--test", "simulation", "soak"]);
    commands([test.env("DMASPAN_SOAK", "10000000")])
}

/// The core with loom's atomics in a target directory of its own: everything is built anew for the
/// flag.
fn interleavings() -> Outcome {
    let mut test = cargo(&["test", "-p", "dmaspan", "--test", "loom", "--target-dir"]);
    let target = crate::target_directory().join("loom");
    // Unoptimised, the models need more stack than loom gives their threads.
    test.arg(target).env("RUSTFLAGS", "--cfg loom").env("CARGO_PROFILE_TEST_OPT_LEVEL", "1");
    commands([&mut test])
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

fn packages() -> Outcome {
    outcome(package::check().map(|()| crate::Outcome::Passed))
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
