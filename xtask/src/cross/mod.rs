//! `cargo xtask cross`: other CPUs, and other sizes of pages.
//!
//! | part | what |
//! |---|---|
//! | `bare` | the crates without the standard library, for CPUs without an operating system |
//! | `registers` | by which instructions registers of devices are read and written |
//! | `quick` | tests of the drivers and of the core's own modules, under an emulator of programs |
//! | `user` | all tests of core, models, drivers and NVMe, likewise; on 32 bits those in modules |
//! | `copies` | what a bounce copy costs beside the C library's, in instructions |
//! | `guest` | kernels of Arm with pages of 4, 16 and 64 KiB, and in them programs and tests |

mod copies;
mod programs;
mod registers;
mod tools;

use std::process::Command;

use crate::debian::output_of;
use crate::parts::Parts;
use crate::{Checked, Outcome, guest, hw, no_std};
use tools::Tools;

pub(crate) use programs::File;

/// A CPU whose programs are built here and emulated.
#[derive(Debug)]
struct Target {
    /// What Rust calls it.
    triple: &'static str,
    /// What QEMU calls it.
    machine: &'static str,
    /// What GNU calls it.
    gnu: &'static str,
    /// What Debian calls it.
    debian: &'static str,
    /// What it is called without an operating system.
    bare: &'static str,
    /// Whether it has 64 bits, as what stands on Linux needs.
    is_64_bits: bool,
}

const TARGETS: [Target; 3] = [
    Target {
        triple: "aarch64-unknown-linux-gnu",
        machine: "aarch64",
        gnu: "aarch64-linux-gnu",
        debian: "arm64",
        bare: "aarch64-unknown-none",
        is_64_bits: true,
    },
    Target {
        triple: "riscv64gc-unknown-linux-gnu",
        machine: "riscv64",
        gnu: "riscv64-linux-gnu",
        debian: "riscv64",
        bare: "riscv64gc-unknown-none-elf",
        is_64_bits: true,
    },
    Target {
        triple: "armv7-unknown-linux-gnueabihf",
        machine: "arm",
        gnu: "arm-linux-gnueabihf",
        debian: "armhf",
        bare: "armv7a-none-eabi",
        is_64_bits: false,
    },
];

/// CPUs that everything without the standard library builds for.
const BARE: [&str; 4] = [
    "aarch64-unknown-none",
    "riscv64gc-unknown-none-elf",
    "x86_64-unknown-none",
    "armv7a-none-eabi",
];

/// CPUs without 64-bit atomics, for which the core says so in place of building.
const REFUSED: [&str; 2] = ["thumbv7em-none-eabi", "riscv32imac-unknown-none-elf"];

/// Tests that an emulator of programs cannot pass: their names, and what it lacks.
const NOT_EMULATED: [(&str, &str); 3] = [
    ("_nomem::", STARTS_A_PROGRAM),
    ("words::an_error_is_one_line_with_its_cause", STARTS_A_PROGRAM),
    ("words::output_that_is_lost_is_a_failure_that_is_said", STARTS_A_PROGRAM),
];
const STARTS_A_PROGRAM: &str =
    "it starts its own or the NVMe program, which the machine's kernel does not run";

/// Kernels of Arm with pages of each size.
const GUESTS: [&str; 6] = ["--kernel", "arm64", "--kernel", "arm64-16k", "--kernel", "arm64-64k"];

/// The parts, by name.
const PARTS: [&str; 6] = ["bare", "registers", "quick", "user", "copies", "guest"];
/// What runs where nothing is named: `quick` is a part of `user`.
const ALL: [&str; 5] = ["bare", "registers", "user", "copies", "guest"];
/// What runs in the quick form of `cargo xtask ci`.
const QUICK: [&str; 2] = ["bare", "registers"];

/// Reads the command line's arguments behind `cross`.
///
/// # Errors
///
/// What is wrong with them, in one line.
pub fn parse(arguments: &[&str]) -> Result<Parts, String> {
    Parts::parse(arguments, &PARTS, &ALL)
}

/// The parts that take a minute or two.
pub(crate) fn quick() -> Parts {
    Parts::of(&QUICK)
}

/// Does what was asked for. Where rustup cannot be had, nothing runs, for that reason. What needs
/// other tools that cannot be had is skipped with the reason, unless the environment says that this
/// is a failure.
///
/// # Errors
///
/// What failed, in one line; more was said by then.
pub fn run(parts: &Parts) -> Checked {
    let mut skipped = Vec::new();
    if let Err(why) = add_targets() {
        return Ok(Outcome::Skipped(why));
    }
    for part in parts.iter() {
        crate::say(&format!("cross: {part}"));
        let outcome = match part {
            "bare" => bare()?,
            "guest" => guest::run(&guest::Options::parse(&GUESTS)?)?,
            _ => match Tools::ready() {
                Err(why) => cannot(why)?,
                Ok(tools) => {
                    with_tools(part, &tools)?;
                    Outcome::Passed
                }
            },
        };
        if let Outcome::Skipped(why) = outcome {
            skipped.push(format!("{part}: {why}"));
        }
    }
    match skipped.is_empty() {
        true => Ok(Outcome::Passed),
        false => Ok(Outcome::Skipped(skipped.join("; "))),
    }
}

fn with_tools(part: &str, tools: &Tools) -> Result<(), String> {
    TARGETS.iter().try_for_each(|target| match part {
        "registers" => registers::check(target, tools),
        "copies" if target.is_64_bits => copies::check(target, tools),
        "copies" => Ok(()),
        "quick" => emulated(target, tools, &QUICK_TESTS),
        _ if target.is_64_bits => emulated(target, tools, &TESTS),
        // What is other there are halves of words, which the tests of modules show.
        _ => emulated(target, tools, &TESTS_OF_32_BITS),
    })
}

fn cannot(why: String) -> Checked {
    if hw::is_required() { Err(why) } else { Ok(Outcome::Skipped(why)) }
}

/// Has rustup fetch the compiler's libraries for all CPUs.
fn add_targets() -> Result<(), String> {
    let others = TARGETS.iter().map(|target| target.triple);
    let mut rustup = Command::new("rustup");
    rustup.args(["target", "add"]).args(BARE.into_iter().chain(REFUSED).chain(others));
    output_of(rustup.current_dir(crate::root())).map(drop)
}

fn bare() -> Checked {
    no_std::build_for(&BARE)?;
    REFUSED.iter().try_for_each(|triple| no_std::is_refused(triple))?;
    crate::say(&format!("   without 64-bit atomics, refused: {}", REFUSED.join(", ")));
    Ok(Outcome::Passed)
}

const QUICK_TESTS: [&str; 5] = ["-p", "dmaspan-drivers", "--lib", "--test", "riscv"];
const TESTS: [&str; 11] = [
    "-p",
    "dmaspan",
    "-p",
    "dmaspan-sim",
    "-p",
    "dmaspan-drivers",
    "-p",
    "dmaspan-nvme",
    "--lib",
    "--bins",
    "--tests",
];
const TESTS_OF_32_BITS: [&str; 9] =
    ["-p", "dmaspan", "-p", "dmaspan-sim", "-p", "dmaspan-drivers", "--lib", "--test", "swiotlb"];

/// Runs tests under the emulator of programs.
fn emulated(target: &Target, tools: &Tools, tests: &[&str]) -> Result<(), String> {
    let mut test = cargo(target, tools, &["test", "--quiet"]);
    test.args(tests).arg("--");
    for (name, why) in NOT_EMULATED {
        crate::say(&format!("   SKIP {name}: {why}"));
        test.args(["--skip", name]);
    }
    crate::run(&mut test).map_err(|why| format!("tests of {} failed: {why}", target.triple))
}

/// Builds the tests of what stands on Linux, for guests of Arm.
///
/// # Errors
///
/// What failed, in one line; cargo has said more by then.
pub(crate) fn tests_for_guests() -> Result<Vec<File>, String> {
    let [target, ..] = &TARGETS;
    programs::for_guests(target, &Tools::ready()?)
}

/// A call of cargo for another CPU. Programs stand on nothing but a kernel, or its emulator.
fn cargo(target: &Target, tools: &Tools, arguments: &[&str]) -> Command {
    let mut cargo = crate::cargo(arguments);
    cargo.args(["--target", target.triple, "--target-dir"]);
    cargo.arg(crate::target_directory().join("cross"));
    build_for(&mut cargo, target, tools);
    // An emulator runs what is not optimised for minutes.
    cargo.env("CARGO_PROFILE_TEST_OPT_LEVEL", "1");
    cargo
}

fn build_for(cargo: &mut Command, target: &Target, tools: &Tools) {
    let (compiler, emulator) = (tools.compiler(target.gnu), tools.emulator(target.machine));
    let own = target.triple.replace('-', "_");
    let name = |what: &str| format!("CARGO_TARGET_{}_{what}", own.to_uppercase());
    cargo.env(name("LINKER"), &compiler).env(name("RUNNER"), emulator);
    cargo.env(name("RUSTFLAGS"), "-C target-feature=+crt-static");
    cargo.env(format!("CC_{own}"), compiler);
}

/// Prepares a call of cargo that builds programs of Arm.
///
/// # Errors
///
/// Why there are no tools for it, in one line.
pub(crate) fn for_arm64(cargo: &mut Command) -> Result<&'static str, String> {
    let [target, ..] = &TARGETS;
    add_targets()?;
    build_for(cargo, target, &Tools::ready()?);
    Ok(target.triple)
}

/// How the names of the programs that build for Arm begin, with their folder.
///
/// # Errors
///
/// Why there are none, in one line.
pub(crate) fn compilers_of_arm64() -> Result<String, String> {
    let [target, ..] = &TARGETS;
    Ok(Tools::ready()?.prefix(target.gnu).display().to_string())
}
