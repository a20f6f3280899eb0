//! The proof that the core and the drivers link without the standard library.
//!
//! `xtask/no-std` is a program with its own panic handler, allocator and entry point, and without a
//! C library. If anything that the core or a driver depends on brought the standard library in, it
//! would not link.

use std::path::PathBuf;
use std::process::Command;

use crate::debian::output_of;
use crate::{Checked, Outcome};

const MANIFEST: &str = "xtask/no-std/Cargo.toml";
/// The crates that need nothing but `core` and `alloc`.
const CRATES: [&str; 3] = ["dmaspan", "dmaspan-drivers", "dmaspan-nvme"];

/// Builds the program, runs it where this machine can, and builds the crates for bare-metal targets
/// as far as they are installed. Says what was done.
///
/// # Errors
///
/// What failed, in one line; the compiler has said more by then.
pub fn check() -> Checked {
    let target = crate::target_directory().join("no-std");
    cargo(&["build", "--manifest-path", MANIFEST, "--target-dir"], &target)?;
    let mut said = String::from("no-std: core and drivers link without the standard library");
    if cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        run(&target.join("debug/no-std"))?;
        said.push_str(" and work");
    }
    let mut targets = Vec::new();
    for triple in bare_metal_targets() {
        if has_64_bit_atomics(&triple)? {
            said.push_str(&format!("; they build for {triple}"));
            targets.push(triple);
        } else {
            is_refused(&triple)?;
            said.push_str(&format!("; they refuse {triple}, which has no 64-bit atomics"));
        }
    }
    build_for(&targets)?;
    crate::say(&said);
    Ok(Outcome::Passed)
}

/// Builds the crates for targets, with their messages, which need no more than the rest. One call
/// builds for all: the crates of one target stand on each other, and those of another do not wait.
///
/// # Errors
///
/// What failed, in one line; the compiler has said more by then.
pub(crate) fn build_for(triples: &[impl AsRef<str>]) -> Result<(), String> {
    if triples.is_empty() {
        return Ok(());
    }
    let packages = CRATES.iter().flat_map(|name| ["-p", name]);
    let targets = triples.iter().flat_map(|triple| ["--target", triple.as_ref()]);
    let arguments = ["build", "--quiet", "--no-default-features"].into_iter().chain(packages);
    let messages = ["--features", "dmaspan/log,dmaspan-drivers/log", "--target-dir"];
    let arguments: Vec<_> = arguments.chain(targets).chain(messages).collect();
    cargo(&arguments, &crate::target_directory().join("no-std"))
}

/// What the core says where a CPU has no 64-bit atomics.
const REFUSAL: &str = "dmaspan needs a CPU with 64-bit atomics";

/// Whether the compiler has them for a target.
fn has_64_bit_atomics(triple: &str) -> Result<bool, String> {
    let cfg = output_of(Command::new("rustc").args(["--print", "cfg", "--target", triple]))?;
    Ok(cfg.lines().any(|line| line == "target_has_atomic=\"64\""))
}

/// Makes sure that the core does not build for a target, and says why.
///
/// # Errors
///
/// What the compiler says in its place.
pub(crate) fn is_refused(triple: &str) -> Result<(), String> {
    let mut build = crate::cargo(&["build", "-p", "dmaspan", "--target", triple, "--target-dir"]);
    let built = build.arg(crate::target_directory().join("no-std")).output();
    let built = built.map_err(|error| format!("cargo did not start: {error}"))?;
    let said = String::from_utf8_lossy(&built.stderr);
    match !built.status.success() && said.contains(REFUSAL) {
        true => Ok(()),
        false => Err(format!("the core does not say for {triple}: {REFUSAL}; it says:\n{said}")),
    }
}

fn cargo(arguments: &[&str], target: &PathBuf) -> Result<(), String> {
    let call = format!("cargo {} {}", arguments.join(" "), target.display());
    let ran = crate::run(crate::cargo(arguments).arg(target));
    ran.map_err(|why| format!("`{call}` failed: {why}"))
}

fn run(program: &PathBuf) -> Result<(), String> {
    let name = program.display();
    let status = Command::new(program).status();
    let status = status.map_err(|error| format!("{name} did not start: {error}"))?;
    match status.code() {
        Some(0) => Ok(()),
        Some(101) => Err(format!("{name} panicked")),
        Some(step) => Err(format!("{name} failed at step {step} of xtask/no-std/src/main.rs")),
        None => Err(format!("{name} was ended: {status}")),
    }
}

/// The installed targets without an operating system; none where rustup does not manage the
/// toolchain.
fn bare_metal_targets() -> Vec<String> {
    let listed = Command::new("rustup").args(["target", "list", "--installed"]).output();
    let Some(listed) = listed.ok().filter(|listed| listed.status.success()) else {
        return Vec::new();
    };
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    listed.lines().filter(|triple| is_bare_metal(triple)).map(str::to_owned).collect()
}

fn is_bare_metal(triple: &str) -> bool {
    triple.split('-').skip(1).any(|part| part.starts_with("none"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_metal_targets_are_told_from_others() {
        for triple in
            ["aarch64-unknown-none", "riscv64gc-unknown-none-elf", "thumbv7em-none-eabihf"]
        {
            assert!(is_bare_metal(triple), "{triple}");
        }
        for triple in ["x86_64-unknown-linux-gnu", "x86_64-unknown-uefi", ""] {
            assert!(!is_bare_metal(triple), "{triple}");
        }
    }
}
