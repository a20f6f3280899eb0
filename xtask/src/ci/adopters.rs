//! Programs that adopt dmaspan, in a workspace of their own.

use super::run_all;
use crate::{Checked, cargo};

pub(super) const FOLDER: &str = "examples/adopters";
pub(super) const MANIFEST: &str = "examples/adopters/Cargo.toml";

/// Lints the programs, runs them, and counts what they cost. They share the target directory, where
/// their dependencies have been built already.
pub(super) fn check() -> Checked {
    let target = crate::target_directory();
    let mut lints = cargo(&["clippy", "--manifest-path", MANIFEST, "--all-targets", "--locked"]);
    lints.arg("--target-dir").arg(&target).args(["--", "-D", "warnings"]);
    let mut tests = cargo(&["test", "--manifest-path", MANIFEST, "--locked"]);
    tests.arg("--target-dir").arg(&target);
    run_all([&mut lints, &mut tests])
}
