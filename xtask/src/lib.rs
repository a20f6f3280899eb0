//! The project's own checks.
//!
//! [`tidy`] holds the rules about the source tree, [`no_std`] proves that the core links without
//! the standard library, and [`ci`] runs everything that must hold before a change lands. The rules
//! of `tidy` are tests of this crate too, so `cargo test --workspace` is enough to hear of a
//! violation. [`hw`] runs the tests against QEMU's IOMMUs, [`guest`] boots kernels with VFIO and
//! runs dmaspan in them, [`msrv`] and [`package`] prove that others can build what is published,
//! [`cross`] builds for other CPUs and runs there, [`kernel`] boots the operating system of the
//! examples, [`sanitize`] looks for undefined behaviour and races, [`mutants`] changes the program
//! where a test has to notice, [`peers`] compares dmaspan with Linux's own page tables, [`lines`]
//! counts lines of code, [`book`] builds the book, and [`picture`] draws the picture in it.
//! [`pages`] opens the program's reports in a browser.

pub mod book;
pub mod ci;
pub mod cross;
mod debian;
pub mod guest;
pub mod hw;
pub mod kernel;
pub mod lexer;
pub mod lines;
pub mod msrv;
pub mod mutants;
pub mod no_std;
pub mod package;
pub mod pages;
pub mod parts;
pub mod peers;
pub mod picture;
mod planted;
pub mod problem;
pub mod published;
pub mod report;
pub mod sanitize;
pub mod tidy;
pub mod tree;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{self, Command};

/// How a check ended where nothing failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything that was asked for ran.
    Passed,
    /// Something could not run here, or nothing; why.
    Skipped(String),
}

/// How a check ended, or in one line why it failed.
pub type Checked = Result<Outcome, String>;

/// The directory of the workspace.
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// Prints a line. Where nobody reads what this program prints any more it ends, as programs do that
/// leave SIGPIPE alone (signal(7)).
pub fn say(line: &str) {
    let mut out = io::stdout().lock();
    let said = out.write_all(line.as_bytes()).and_then(|()| out.write_all(b"\n"));
    if said.and_then(|()| out.flush()).is_err_and(|it| it.kind() == io::ErrorKind::BrokenPipe) {
        process::exit(128 + 13);
    }
}

/// Where cargo builds, for checks that have a directory of their own there.
pub fn target_directory() -> PathBuf {
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// Runs a command to its end.
///
/// # Errors
///
/// That it does not start, or how it ended, in one line.
pub fn run(command: &mut Command) -> Result<(), String> {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{name} ended with {status}")),
        Err(error) => Err(format!("{name} did not start: {error}")),
    }
}

/// A call of the cargo that runs this program, in the workspace's directory.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root());
    command
}

/// What a file hashes to, as coreutils say it.
pub(crate) fn sha256(file: &Path) -> Result<String, String> {
    let said = debian::output_of(Command::new("sha256sum").arg(file))?;
    Ok(said.split_whitespace().next().ok_or("sha256sum says nothing")?.to_owned())
}
