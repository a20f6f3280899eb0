//! `cargo xtask ci` checks in one command everything that must hold before a change lands.

mod adopters;
mod commands;
mod repeated;

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;
use std::{fs, io};

use Extent::{Full, Quick};

use crate::{
    Checked, Outcome, book, cargo, cross, guest, hw, kernel, msrv, mutants, no_std, package, pages,
    report, sanitize,
};

/// How much is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// What proves each kind of thing, in half an hour on two cores.
    Quick,
    /// All of it, at full length.
    Full,
}

/// A check and what it is called.
struct Check {
    name: &'static str,
    /// The least extent that it belongs to.
    from: Extent,
    run: fn(Extent) -> Checked,
}

const fn quick(name: &'static str, run: fn(Extent) -> Checked) -> Check {
    Check { name, from: Quick, run }
}

const fn full(name: &'static str, run: fn(Extent) -> Checked) -> Check {
    Check { name, from: Full, run }
}

const CHECKS: [Check; 22] = [
    quick("formatting: cargo fmt --all --check", |_| formatting()),
    quick("lints: cargo clippy --workspace --all-targets -- -D warnings", |_| lints()),
    quick("documentation: cargo doc --workspace --no-deps", |_| documentation()),
    quick("book: cargo xtask book", |_| book::check()),
    quick("tests: cargo test --workspace, with those of cargo xtask hw", |_| tests()),
    quick("adopters: the tests of examples/adopters", |_| adopters::check()),
    quick("guests: cargo xtask guest, of which a quick part", guests),
    quick("kernel: cargo xtask kernel, of which a quick part", booted),
    full("soak: ten million operations sanitized, a million packets, 200,000 clients", |_| soak()),
    quick("interleavings: the tests with loom, of the core and of the drivers' ring", |_| {
        interleavings()
    }),
    quick("instructions: cargo bench -p dmaspan-bench --bench erased -- --check", |_| {
        instructions()
    }),
    quick("core without std: cargo xtask no-std", |_| no_std::check()),
    quick("other CPUs: cargo xtask cross, of which a quick part", other_cpus),
    quick("sanitizers: cargo xtask sanitize, of which a quick part", sanitizers),
    full("mutants: cargo xtask mutants", |_| mutants::run(&mutants::Chosen::All)),
    quick("oldest Rust: cargo xtask msrv", |_| msrv::check()),
    quick("packages: cargo xtask package", |_| package::check()),
    quick("dependencies: cargo deny check licenses bans sources", |_| dependencies()),
    quick("main job: cargo run --release -q -- map 256M --runs 1 --format json", |_| main_job()),
    quick("commands: those of README.md and the book", |extent| failures(&commands::run(extent))),
    full("pages: cargo xtask pages", |_| pages::check()),
    full("repeated: tests that count, fifty times beside two busy loops", |_| {
        failures(&repeated::run())
    }),
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
            Ok(Outcome::Passed) => println!("== passed in {seconds} s"),
            Ok(Outcome::Skipped(reason)) => {
                println!("== SKIP: {reason}");
                skipped += 1;
            }
            Err(reason) => {
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
fn run_all<const N: usize>(commands: [&mut Command; N]) -> Checked {
    commands.into_iter().try_for_each(crate::run).map(|()| Outcome::Passed)
}

/// How a check ended that found this, a line each.
fn failures(found: &[String]) -> Checked {
    if found.is_empty() { Ok(Outcome::Passed) } else { Err(found.join("\n   ")) }
}

/// Runs a command, and shows what it printed where it fails; how it ended then.
fn quietly(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("it did not start: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    print!("{}", String::from_utf8_lossy(&output.stdout));
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    Err(output.status.to_string())
}

fn formatting() -> Checked {
    run_all([
        &mut cargo(&["fmt", "--all", "--check"]),
        &mut cargo(&["fmt", "--manifest-path", NO_STD, "--check"]),
        &mut cargo(&["fmt", "--manifest-path", FUZZ, "--check"]),
        &mut cargo(&["fmt", "--manifest-path", adopters::MANIFEST, "--check"]),
        &mut cargo(&["fmt", "--manifest-path", kernel::MANIFEST, "--check"]),
    ])
}

/// Programs all of whose tests are of messages.
const LOGGED: [&str; 2] = ["logged", "logger"];
/// Programs with tests of messages in a module `logged`.
const PARTLY_LOGGED: [&str; 4] = ["amd_vi", "arm_smmu_v3", "riscv", "vtd"];

/// What `command` does with test programs of libraries that send messages by the crate `log`, which
/// features turn on. As part of the workspace, only what stands on those libraries is built anew.
fn with_messages(command: &str, programs: &[&str]) -> Command {
    let features = "dmaspan/log,dmaspan-drivers/log,dmaspan-linux/log";
    let mut cargo = cargo(&[command, "--workspace", "--features", features]);
    cargo.args(programs.iter().flat_map(|name| ["--test", name]));
    cargo
}

/// Benchmarks are compiled here as well, and the libraries once more with their messages.
fn lints() -> Checked {
    let all = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    let mut logged = with_messages("clippy", &[&LOGGED[..], &PARTLY_LOGGED].concat());
    run_all([&mut cargo(&all), logged.args(["--", "-D", "warnings"])])
}

fn documentation() -> Checked {
    let mut doc = cargo(&["doc", "--workspace", "--no-deps"]);
    run_all([doc.env("RUSTDOCFLAGS", "-D warnings")])
}

/// Where there is no QEMU and none can be got, the tests that need none run, and whether that is a
/// failure is the environment's to say. Examples that must not compile have to fail with the error
/// that they name, which rustdoc looks at only where unstable features are.
fn tests() -> Checked {
    let rustdoc = rustdoc_with_error_codes();
    let rustdoc = rustdoc.map_err(|error| format!("no script for rustdoc: {error}"))?;
    let mut test = cargo(&["test", "--workspace"]);
    test.env("RUSTDOC", rustdoc);
    let without_qemu = hw::ready().map(|folder| hw::against(&mut test, &folder)).err();
    // Messages are tested by themselves: all else is tested without the feature.
    let mut logged = with_messages("test", &LOGGED);
    let mut partly_logged = with_messages("test", &PARTLY_LOGGED);
    run_all([&mut test, &mut logged, partly_logged.arg("logged")])?;
    match without_qemu {
        Some(reason) if hw::is_required() => Err(reason),
        Some(reason) => Ok(Outcome::Skipped(reason)),
        None => Ok(Outcome::Passed),
    }
}

/// A script that is rustdoc with unstable features: for cargo and all that it builds nothing
/// changes.
fn rustdoc_with_error_codes() -> io::Result<PathBuf> {
    let script = crate::target_directory().join("rustdoc-with-error-codes");
    fs::write(&script, "#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec rustdoc \"$@\"\n")?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    Ok(script)
}

/// What a device without type parameters costs more than a typed one, in instructions.
fn instructions() -> Checked {
    let valgrind = Command::new("valgrind").arg("--version").stdout(Stdio::null()).status();
    if !valgrind.is_ok_and(|status| status.success()) {
        return Ok(Outcome::Skipped("there is no valgrind, which counts instructions".into()));
    }
    let mut bench = cargo(&["bench", "-p", "dmaspan-bench", "--no-default-features"]);
    run_all([bench.args(["--bench", "erased", "--", "--check"])])
}

/// `cargo test` has a short one of each.
fn soak() -> Checked {
    let mut test = cargo(&["test", "--release", "-p", "dmaspan", "--test", "simulation", "soak"]);
    let mut packets =
        cargo(&["run", "--release", "-q", "-p", "dmaspan-sim", "--example", "packets"]);
    let mut clients = cargo(&["test", "--release", "-p", "dmaspan-nvme-server"]);
    clients.args(["--test", "sessions"]).env("DMASPAN_SESSIONS", "200000");
    run_all([test.env("DMASPAN_SOAK", "10000000"), &mut packets, &mut clients])
}

/// The core and the drivers with loom's atomics in a target directory of its own: everything is
/// built anew for the flag.
fn interleavings() -> Checked {
    let tests = [
        &["test", "-p", "dmaspan", "--test", "loom"][..],
        &["test", "-p", "dmaspan-drivers", "--lib", "ring::tests"],
    ];
    let target = crate::target_directory().join("loom");
    tests.into_iter().try_for_each(|arguments| {
        let mut test = cargo(arguments);
        // Unoptimised, the models need more stack than loom gives their threads.
        test.env("RUSTFLAGS", "--cfg loom").env("CARGO_PROFILE_TEST_OPT_LEVEL", "1");
        crate::run(test.env("CARGO_TARGET_DIR", &target))
    })?;
    Ok(Outcome::Passed)
}

fn other_cpus(extent: Extent) -> Checked {
    cross::run(&if extent == Full { cross::parse(&[])? } else { cross::quick() })
}

/// A quick part leaves out VFIO behind virtio-iommu on the newest kernel: the boots behind VT-d
/// have that kernel, and those of the kernel with iommufd have virtio-iommu. Kernels before and
/// after the five series are compared at full length alone, one guest at a time: some of it is
/// timed.
fn guests(extent: Extent) -> Checked {
    let boots = ["type1", "backends", "narrow", "virtio-iommu-backends", "counted"];
    let quick = boots.map(|boot| ["--boot", boot]).concat();
    if extent == Quick {
        return guest::run(&guest::Options::parse(&quick)?);
    }
    let usual = guest::run(&guest::Options::parse(&[])?)?;
    let series = guest::run(&guest::Options::parse(&["--series", "--jobs", "1"])?)?;
    Ok(if usual == Outcome::Passed { series } else { usual })
}

fn booted(extent: Extent) -> Checked {
    if extent == Full { kernel::check() } else { kernel::run(&kernel::quick()) }
}

fn sanitizers(extent: Extent) -> Checked {
    sanitize::run(&if extent == Full { sanitize::parse(&[])? } else { sanitize::quick() })
}

fn dependencies() -> Checked {
    let version = cargo(&["deny", "--version"]).stderr(Stdio::null()).output();
    if !version.is_ok_and(|version| version.status.success()) {
        let how = "https://github.com/EmbarkStudios/cargo-deny says how to install it";
        return Ok(Outcome::Skipped(format!("cargo-deny is not installed; {how}")));
    }
    // They have files of their own that say what may be there.
    let [mut adopters, mut kernel] = [adopters::FOLDER, kernel::FOLDER].map(|folder| {
        let mut deny = cargo(&["deny", "check", "licenses", "sources"]);
        deny.current_dir(crate::root().join(folder));
        deny
    });
    let mut own = cargo(&["deny", "check", "licenses", "bans", "sources"]);
    run_all([&mut own, &mut adopters, &mut kernel])
}

fn main_job() -> Checked {
    let output = cargo(&MAIN_JOB).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("it did not start: {error}"))?;
    let json = String::from_utf8_lossy(&output.stdout);
    print!("{json}");
    if !output.status.success() {
        return Err(output.status.to_string());
    }
    match report::check(&json, MAIN_JOB_BYTES) {
        problems if problems.is_empty() => Ok(Outcome::Passed),
        problems => Err(format!("the report is wrong:\n   {}", problems.join("\n   "))),
    }
}
