//! `cargo xtask sanitize`: what the language forbids and the compiler does not see.
//!
//! | part | what it looks for, and where |
//! |---|---|
//! | `planted` | what the others have to find: a race, a wrong alias, and wrong accesses to bytes |
//! | `miri` | undefined behaviour of any kind, in the core and in what of linux it can run |
//! | `at-once` | races and mixed sizes, in all methods that move shared bytes, on two threads |
//! | `big-endian` | wrong tables and undefined behaviour, on a CPU with the upper byte first |
//! | `thread` | data races, in concurrent tests of core and linux |
//! | `address` | accesses out of bounds, or to what was freed, in tests of linux and qemu |
//!
//! All of it needs nightly Rust with its sources and Miri, which rustup fetches.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::debian::{cannot_write, output_of};
use crate::parts::Parts;
use crate::{Checked, Outcome, hw, planted};

/// The parts, in the order in which they run.
const PARTS: [&str; 6] = ["planted", "miri", "at-once", "big-endian", "thread", "address"];
/// What runs in the quick form of `cargo xtask ci`.
const QUICK: [&str; 2] = ["at-once", "big-endian"];

/// What is read as built for the machine's own CPU.
const HOST: &str = "x86_64-unknown-linux-gnu";
/// A CPU whose words have the upper byte first.
const BIG_ENDIAN: &str = "s390x-unknown-linux-gnu";

/// Tests for Miri: which programs of whose, and by what the tests' names have; all without such.
struct Tests {
    of: &'static [&'static str],
    named: &'static [&'static str],
}

/// All modules of the core; what is erased and has other types again; and of linux what maps no
/// memory, which Miri does not do as it is needed.
const MIRI: [Tests; 3] = [
    Tests { of: &["-p", "dmaspan", "--lib"], named: &[] },
    Tests {
        of: &["-p", "dmaspan", "--test", "dma"],
        named: &["erased::memory_of_any", "erased::a_plain_error"],
    },
    Tests {
        of: &["-p", "dmaspan-linux", "--lib"],
        named: &[
            "sys::bytes",
            "sys::kernel_mapping",
            "sys::request",
            "sys::stdio",
            "plan::",
            "fixed::",
            "mem::kind",
            "vfio::backend",
            "vfio::config",
            "vfio::dirty",
            "wait::",
        ],
    },
];
/// The methods that move shared bytes, of core and linux, each beside itself and the others.
const AT_ONCE: [Tests; 2] = [
    Tests { of: &["-p", "dmaspan", "--test", "at_once"], named: &[] },
    Tests { of: &["-p", "dmaspan-linux", "--lib"], named: &["mem::at_once"] },
];
/// What is run for the other order of bytes, and so in the quick form of `cargo xtask ci`: the
/// modules that make references out of raw memory, or store words in it.
const BYTES_IN_MEMORY: [Tests; 1] =
    [Tests { of: &["-p", "dmaspan", "--lib"], named: &["arena", "bytes::", "word::", "frames::"] }];

/// A race of two threads, for what finds races. Both have begun before either goes on, since
/// ThreadSanitizer may miss the race of a thread that has ended; what they wait by orders nothing.
const RACE: &str = "\
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

fn main() {
    static BEGUN: AtomicU32 = AtomicU32::new(0);
    static mut COUNT: u64 = 0;
    let add = || {
        BEGUN.fetch_add(1, Relaxed);
        while BEGUN.load(Relaxed) < 2 { std::thread::yield_now() }
        for _ in 0..1000 { unsafe { COUNT = std::hint::black_box(COUNT + 1) } }
    };
    std::thread::scope(|scope| { scope.spawn(add); scope.spawn(add); });
}
";
/// A pointer that is used after a newer reference has taken its place, for what finds that.
const ALIASING: &str = "\
fn main() {
    let mut word = 0u64;
    let old = &raw mut word;
    let old = unsafe { &mut *old };
    let new = &raw mut *old;
    *old = 1;
    unsafe { *new = 2 };
    let late = unsafe { &mut *new };
    *old = 3;
    *late = 4;
}
";

/// What is leaked on purpose, as memory is that a device may still reach, is no error.
pub(crate) const MIRI_FLAGS: &str =
    "-Zmiri-permissive-provenance -Zmiri-disable-isolation -Zmiri-ignore-leaks";

/// Reads the command line's arguments behind `sanitize`.
///
/// # Errors
///
/// What is wrong with them, in one line.
pub fn parse(arguments: &[&str]) -> Result<Parts, String> {
    Parts::parse(arguments, &PARTS, &PARTS)
}

/// The parts that take a minute or two.
pub(crate) fn quick() -> Parts {
    Parts::of(&QUICK)
}

/// Does what was asked for. Without nightly Rust it is skipped with the reason.
///
/// # Errors
///
/// What was found, in one line; the tool has said more by then.
pub fn run(parts: &Parts) -> Checked {
    if let Err(why) = add_components() {
        return Ok(Outcome::Skipped(why));
    }
    for part in parts.iter() {
        crate::say(&format!("sanitize: {part}"));
        match part {
            "planted" => planted()?,
            "miri" => miri(HOST, &MIRI)?,
            "at-once" => miri(HOST, &AT_ONCE)?,
            "big-endian" => miri(BIG_ENDIAN, &BYTES_IN_MEMORY)?,
            "thread" => thread()?,
            _ => address()?,
        }
    }
    Ok(Outcome::Passed)
}

fn add_components() -> Result<(), String> {
    let mut rustup = Command::new("rustup");
    rustup.args(["toolchain", "install", "nightly", "--no-self-update", "--profile", "minimal"]);
    for component in ["miri", "rust-src"] {
        rustup.args(["--component", component]);
    }
    // What is there serves, however old.
    let there = output_of(&mut nightly(&["miri", "--version"]));
    if there.is_ok() { Ok(()) } else { output_of(&mut rustup).map(drop) }
}

/// A call of nightly's cargo, in the workspace's directory.
fn nightly(arguments: &[&str]) -> Command {
    let mut cargo = Command::new("rustup");
    cargo.args(["run", "nightly", "cargo"]).args(arguments).current_dir(crate::root());
    cargo.env("MIRIFLAGS", MIRI_FLAGS);
    cargo.args(["--target-dir"]).arg(crate::target_directory().join("sanitize"));
    cargo
}

/// Makes sure that the tools find what they are for.
fn planted() -> Result<(), String> {
    let folder = crate::target_directory().join("planted");
    write_planted(&folder).map_err(|error| cannot_write(&folder, &error))?;
    let race = ["run", "--quiet", "--bin", "race"];
    let aliasing = ["miri", "run", "--quiet", "--bin", "aliasing"];
    let miris = ["miri", "run", "--quiet", "--bin", "race"];
    let mut thread = nightly(&race);
    with_sanitizer(&mut thread, "thread");
    for (mut command, name, wanted) in [
        (thread, "ThreadSanitizer, the race", "ThreadSanitizer: data race"),
        (nightly(&miris), "Miri, the race", "Data race detected"),
        (nightly(&aliasing), "Miri, the wrong alias", "Undefined Behavior"),
    ] {
        command.current_dir(&folder);
        finds(command, name, wanted)?;
    }
    planted::run(nightly)
}

/// Whether a tool finds what was planted, of which it says what is wanted.
pub(crate) fn finds(mut command: Command, name: &str, wanted: &str) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("rustup did not start: {error}"))?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    if output.status.success() || !said.contains(wanted) {
        return Err(format!("not found by {name}, which was planted; it says:\n{said}"));
    }
    crate::say(&format!("   found by {name}: {wanted}"));
    Ok(())
}

fn write_planted(folder: &Path) -> std::io::Result<()> {
    let bins = folder.join("src/bin");
    fs::create_dir_all(&bins)?;
    let manifest = "[package]\nname = \"planted\"\nedition = \"2024\"\n\n[workspace]\n";
    fs::write(folder.join("Cargo.toml"), manifest)?;
    fs::write(bins.join("race.rs"), RACE)?;
    fs::write(bins.join("aliasing.rs"), ALIASING)
}

/// Tests that are too long have fewer steps under Miri, or say there why they are left out.
fn miri(cpu: &str, tests: &[Tests]) -> Result<(), String> {
    tests.iter().try_for_each(|Tests { of, named }| {
        let mut test = nightly(&["miri", "test", "--quiet"]);
        // Nothing is linked, so that the machine's own compiler serves the C code of a dependency.
        test.args(*of).args(["--target", cpu]).env("CC_s390x_unknown_linux_gnu", "cc");
        // A dependency of tests knows the kernel's structures for other CPUs alone; none is used.
        test.env("RUSTFLAGS", "--cfg=io_uring_skip_arch_check");
        let of = of.join(" ");
        crate::run(test.arg("--").args(*named))
            .map_err(|why| format!("Miri found something in `{of}` for {cpu}: {why}"))
    })
}

/// Builds everything, the standard library too, for a sanitizer.
fn with_sanitizer(cargo: &mut Command, sanitizer: &str) {
    cargo.args(["-Zbuild-std", "--target", HOST]);
    cargo.env("RUSTFLAGS", format!("-Zsanitizer={sanitizer}"));
    // What is not optimised at all runs for an hour under them.
    cargo.env("CARGO_PROFILE_TEST_OPT_LEVEL", "1");
}

/// Tests of core and linux in which threads share something, by what their names have.
const CONCURRENT: [&str; 14] = [
    "thread",
    "concurrent",
    "meanwhile",
    "while_others",
    "at_once",
    "share",
    "stress",
    "busy",
    "interrupted",
    "precedence",
    "race",
    "beside",
    "live_listing",
    "come_and_go",
];
/// The programs that have them.
const PROGRAMS: [&str; 11] = [
    "--lib",
    "--test",
    "it",
    "--test",
    "dma",
    "--test",
    "container",
    "--test",
    "regbuf",
    "--test",
    "swiotlb",
];

/// What ThreadSanitizer takes for a race and is none: several devices write a client's memory by
/// system calls at once, as hardware may, and no Rust code looks at those bytes meanwhile.
const NO_RACES: &str = "race:dmaspan_linux::sys::vectored::\n";

fn thread() -> Result<(), String> {
    let suppressions = crate::target_directory().join("no-races.txt");
    fs::write(&suppressions, NO_RACES).map_err(|error| cannot_write(&suppressions, &error))?;
    let options = format!("halt_on_error=1 suppressions={}", suppressions.display());
    let mut test = nightly(&["test", "--quiet", "-p", "dmaspan", "-p", "dmaspan-linux"]);
    test.args(PROGRAMS);
    with_sanitizer(&mut test, "thread");
    crate::run(test.env("TSAN_OPTIONS", options).arg("--").args(CONCURRENT))
        .map_err(|why| format!("ThreadSanitizer found something: {why}"))
}

/// Tests that AddressSanitizer does not let pass: their names, and why.
const NOT_WITH_ADDRESS: [(&str, &str); 1] =
    [("overlapping_pins_end_one_by_one", "mlock(2) does nothing under the sanitizer")];

fn address() -> Result<(), String> {
    let mut test = nightly(&["test", "--quiet", "-p", "dmaspan-linux", "-p", "dmaspan-qemu"]);
    test.args(["--lib", "--tests", "--no-fail-fast"]);
    with_sanitizer(&mut test, "address");
    hw::against(&mut test, &hw::ready()?);
    test.arg("--");
    for (name, why) in NOT_WITH_ADDRESS {
        crate::say(&format!("   SKIP {name}: {why}"));
        test.args(["--skip", name]);
    }
    // As for Miri.
    crate::run(test.env("ASAN_OPTIONS", "detect_leaks=0"))
        .map_err(|why| format!("AddressSanitizer found something: {why}"))
}
