//! This decides which QEMU serves the tests.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The processors that there are tests for; each has a program of its own.
pub(super) const MACHINES: [&str; 4] = ["aarch64", "arm", "riscv64", "x86_64"];

/// The least version, major and minor: the first with `iommu-testdev` on all machines.
const LEAST: (u32, u32) = (11, 1);

/// The least version, to be read.
pub(super) fn least() -> String {
    format!("{}.{}", LEAST.0, LEAST.1)
}

/// What the program of a machine is called.
pub(crate) fn program(machine: &str) -> String {
    format!("qemu-system-{machine}")
}

/// Whether a folder has one of the programs.
pub(super) fn is_any_in(folder: &Path) -> bool {
    MACHINES.iter().any(|machine| folder.join(program(machine)).is_file())
}

/// The version of a folder's programs, where all of them serve.
///
/// # Errors
///
/// What is wrong with the first that does not.
pub(super) fn check(folder: &Path) -> Result<String, String> {
    let mut version = String::new();
    for name in MACHINES.map(program) {
        version =
            check_program(&folder.join(&name)).map_err(|problem| format!("{name} {problem}"))?;
    }
    Ok(version)
}

fn check_program(program: &PathBuf) -> Result<String, String> {
    if !program.is_file() {
        return Err("is missing".to_owned());
    }
    let output = Command::new(program).arg("--version").stderr(Stdio::null()).output();
    let output = output.map_err(|error| format!("did not start: {error}"))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let version = version(&said).ok_or("does not run, or says no version")?;
    if !is_new_enough(version) {
        return Err(format!("is version {version}, but the tests need {} or newer", least()));
    }
    if !has_qtest(program) {
        return Err(format!("is version {version}, but built without the qtest accelerator"));
    }
    Ok(version.to_owned())
}

/// Starts a machine without anything under qtest, and ends it. The accelerator stands in no list
/// that QEMU prints.
fn has_qtest(program: &PathBuf) -> bool {
    let mut command = Command::new(program);
    command.args(["-accel", "qtest", "-M", "none", "-nodefaults", "-display", "none"]);
    command.args(["-monitor", "stdio"]);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let Ok(mut child) = child else {
        return false;
    };
    if let Some(mut monitor) = child.stdin.take() {
        // Where it has ended by itself, its status says so.
        let _ = monitor.write_all(b"quit\n");
    }
    child.wait().is_ok_and(|status| status.success())
}

/// The version in what `--version` prints.
fn version(said: &str) -> Option<&str> {
    let (_, behind) = said.lines().next()?.split_once("QEMU emulator version ")?;
    behind.split_whitespace().next()
}

fn is_new_enough(version: &str) -> bool {
    let mut numbers = version.split('.').map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(LEAST.0), Some(LEAST.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared_as_numbers() {
        let said = "QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1~bpo13+1)\nCopyright";
        assert_eq!(version(said), Some("11.1.3"));
        assert_eq!(version("QEMU emulator version 12.0\n"), Some("12.0"));
        for none in ["", "QEMU emulator version ", "bash: not found\n"] {
            assert_eq!(version(none), None, "{none}");
        }
        for new in ["11.1.0", "11.1", "11.2.50", "11.10.0", "12.0.0", "100.0"] {
            assert!(is_new_enough(new), "{new}");
        }
        for old in ["11.0.90", "11", "10.2.1", "7.2.17", "9.1.0", "2.11.1", "", "x.y"] {
            assert!(!is_new_enough(old), "{old}");
        }
    }

    #[test]
    fn a_folder_without_the_programs_does_not_serve() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(!is_any_in(folder));
        assert_eq!(check(folder), Err("qemu-system-aarch64 is missing".to_owned()));
    }
}
