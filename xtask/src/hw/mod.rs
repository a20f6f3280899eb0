//! The tests against QEMU's IOMMUs, and the QEMU that they need.
//!
//! A folder serves where a program for each processor is in it, all new enough and able to run
//! tests. The first of these counts: the folder that `DMASPAN_QEMU` names, `qemu/bin` in cargo's
//! target directory, those of `PATH`. Where none serves, Debian's packages fill the second one. The
//! harness, `dmaspan-qemu`, looks in the same places.

mod install;
mod qemu;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Checked, Outcome};

pub(crate) use qemu::program;

/// The variable of the environment that names the folder of QEMU's programs.
pub const FOLDER: &str = "DMASPAN_QEMU";
/// Says whether tests may be skipped for want of QEMU.
const SKIPS: &str = "DMASPAN_HW";
/// The value of [`SKIPS`] with which they may not.
const NO_SKIPS: &str = "require";

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Options {
    /// Only to have QEMU.
    Install,
    /// To run the tests, with these arguments for `cargo test`.
    Test(Vec<String>),
}

impl Options {
    /// Reads the command line's arguments behind `hw`.
    ///
    /// # Errors
    ///
    /// What is wrong with them, in one line.
    pub fn parse(arguments: &[&str]) -> Result<Self, String> {
        match arguments {
            [] => Ok(Self::Test(Vec::new())),
            ["--install"] => Ok(Self::Install),
            ["--", rest @ ..] => {
                Ok(Self::Test(rest.iter().map(|&argument| argument.to_owned()).collect()))
            }
            ["--install", other, ..] | [other, ..] => {
                Err(format!("`{other}` is not understood; arguments for cargo test stand after --"))
            }
        }
    }
}

/// Gets QEMU ready and does what was asked for: prints its folder, or runs the tests.
///
/// # Errors
///
/// What is missing or failed, in one line; the tests have said more by then.
pub fn run(options: &Options) -> Checked {
    let folder = ready()?;
    match options {
        Options::Install => println!("{}", folder.display()),
        Options::Test(arguments) => {
            let mut tests = crate::cargo(&["test", "-p", "dmaspan-qemu"]);
            against(&mut tests, &folder);
            crate::run(tests.args(arguments)).map_err(|why| format!("the tests failed: {why}"))?;
        }
    }
    Ok(Outcome::Passed)
}

/// The folder of a QEMU that serves; installs one where there is none.
///
/// # Errors
///
/// Why there is none, in one line, and what to do.
pub fn ready() -> Result<PathBuf, String> {
    let (folder, version) = match find() {
        Some(found) => found,
        None => install::install(&installed()).map_err(|why| {
            format!(
                "there is no QEMU {} or newer, and none could be installed: {why}; install one \
                 from the distribution, or name the folder of its programs in {FOLDER}",
                qemu::least()
            )
        })?,
    };
    eprintln!("hw: QEMU {version} in {}", folder.display());
    Ok(folder)
}

/// Has tests run against a QEMU that is ready: those that need it fail without it, where they are
/// skipped else.
pub fn against(tests: &mut Command, folder: &Path) {
    tests.env(FOLDER, folder).env(SKIPS, NO_SKIPS);
}

/// Whether the environment says that a test that is skipped for want of QEMU has failed.
pub fn is_required() -> bool {
    env::var_os(SKIPS).is_some_and(|value| value == NO_SKIPS)
}

/// The folder of a QEMU that serves, where there is one.
pub fn found() -> Option<PathBuf> {
    Some(find()?.0)
}

/// The first folder that serves, with its version. Says why others do not.
fn find() -> Option<(PathBuf, String)> {
    for folder in candidates() {
        match qemu::check(&folder) {
            Ok(version) => return Some((folder, version)),
            Err(why) => eprintln!("hw: the QEMU in {} does not serve: {why}", folder.display()),
        }
    }
    None
}

/// The folders to look at, in their order: the one that the user names, and those that have
/// anything of QEMU.
fn candidates() -> Vec<PathBuf> {
    let named = env::var_os(FOLDER).filter(|folder| !folder.is_empty());
    let named = named.map(|folder| std::path::absolute(&folder).unwrap_or_else(|_| folder.into()));
    let path = env::var_os("PATH").unwrap_or_default();
    let others = [bin(&installed())].into_iter().chain(env::split_paths(&path));
    let mut folders: Vec<PathBuf> = named.into_iter().collect();
    for folder in others.filter_map(|folder| fs::canonicalize(folder).ok()) {
        if qemu::is_any_in(&folder) && !folders.contains(&folder) {
            folders.push(folder);
        }
    }
    folders
}

/// Where QEMU is installed.
fn installed() -> PathBuf {
    crate::target_directory().join("qemu")
}

/// The programs of an installed QEMU.
fn bin(place: &Path) -> PathBuf {
    place.join("bin")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_understood_and_bad_ones_refused() {
        let parse = |line: &str| Options::parse(&line.split_whitespace().collect::<Vec<_>>());
        let test = |arguments: &[&str]| {
            Ok(Options::Test(arguments.iter().map(|&argument| argument.to_owned()).collect()))
        };
        assert_eq!(parse(""), test(&[]));
        assert_eq!(parse("--"), test(&[]));
        assert_eq!(parse("-- --test it -- vtd"), test(&["--test", "it", "--", "vtd"]));
        assert_eq!(parse("--install"), Ok(Options::Install));
        for (line, named) in [("vtd", "`vtd`"), ("--install x", "`x`"), ("--fast -- a", "`--fast`")]
        {
            assert!(parse(line).is_err_and(|why| why.contains(named)), "{line}");
        }
    }
}
