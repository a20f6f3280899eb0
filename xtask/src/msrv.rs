//! The proof that published libraries build with the oldest Rust that their manifests state.
//!
//! Everything else is built with the Rust that the workspace states, which is the one that runs
//! this program: `rust-toolchain.toml` pins it.

use std::collections::BTreeMap;
use std::io;
use std::process::{Command, Output};

use crate::published::{self, Package};
use crate::{Checked, Outcome};

/// Where the libraries are checked, below the target directory.
const FOLDER: &str = "msrv";

/// Checks the libraries, with all of their features and the dependencies of `Cargo.lock`. They are
/// skipped where rustup or the toolchain is missing.
///
/// # Errors
///
/// What failed, in one line; the compiler has said more by then.
pub fn check() -> Checked {
    let oldest = oldest(&published::packages()?, env!("CARGO_PKG_RUST_VERSION"));
    if oldest.is_empty() {
        return Err("no published library states a Rust older than the workspace's".to_owned());
    }
    for (rust, names) in oldest {
        let toolchain = format!("{rust}.0");
        let asked = Command::new("rustup").args(["run", &toolchain, "rustc", "--version"]).output();
        if let Some(why) = missing(&toolchain, asked) {
            return Ok(Outcome::Skipped(why));
        }
        let mut check = Command::new("rustup");
        check.args(["run", &toolchain, "cargo", "check", "--locked", "--lib", "--all-features"]);
        check.args(names.iter().flat_map(|name| ["-p", name]));
        check.arg("--target-dir").arg(crate::target_directory().join(FOLDER));
        // Set by the cargo that runs this program, and about that cargo alone.
        check.env_remove("CARGO").env_remove("RUSTC").env_remove("RUSTDOC");
        crate::run(check.current_dir(crate::root()))
            .map_err(|why| format!("{} do not build with Rust {rust}: {why}", names.join(", ")))?;
        crate::say(&format!("msrv: {} build with Rust {rust}", names.join(", ")));
    }
    Ok(Outcome::Passed)
}

/// The libraries that state an older Rust than the workspace, by what they state.
fn oldest(packages: &[Package], workspace: &str) -> BTreeMap<String, Vec<String>> {
    let mut oldest = BTreeMap::<String, Vec<String>>::new();
    for package in packages.iter().filter(|it| it.is_library && it.rust != workspace) {
        oldest.entry(package.rust.clone()).or_default().push(package.name.clone());
    }
    oldest
}

/// Why a toolchain cannot be used, where it cannot: `asked` is what came of asking rustup for the
/// version of its compiler.
fn missing(toolchain: &str, asked: io::Result<Output>) -> Option<String> {
    let how = format!("`rustup toolchain install {toolchain} --profile minimal`");
    match asked {
        Ok(output) if output.status.success() => None,
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.lines().next().unwrap_or_default().trim_start_matches("error: ");
            Some(format!("there is no Rust {toolchain} ({said}); {how} gets it"))
        }
        Err(error) => {
            Some(format!("rustup did not start ({error}); https://rustup.rs has it, then {how}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::path::PathBuf;
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn libraries_are_grouped_by_the_rust_that_they_state() {
        let package = |name: &str, rust: &str, is_library: bool| Package {
            name: name.to_owned(),
            version: String::new(),
            folder: PathBuf::new(),
            rust: rust.to_owned(),
            is_library,
            left_out: Vec::new(),
        };
        let packages = [
            package("a", "1.88", true),
            package("b", "1.90", true),
            package("c", "1.88", true),
            package("program", "1.88", false),
            package("newest", "1.95", true),
        ];
        let found = oldest(&packages, "1.95");
        let found: Vec<_> =
            found.iter().map(|(rust, names)| (rust.as_str(), names.join(" "))).collect();
        assert_eq!(found, [("1.88", "a c".to_owned()), ("1.90", "b".to_owned())]);
    }

    #[test]
    fn a_toolchain_is_missing_for_a_reason_and_with_the_command_that_gets_it() {
        let output = |code: i32, said: &str| {
            let stderr = said.as_bytes().to_vec();
            Ok(Output { status: ExitStatus::from_raw(code << 8), stdout: Vec::new(), stderr })
        };
        assert_eq!(missing("1.88.0", output(0, "")), None);
        let why = missing("1.88.0", output(1, "error: it is not installed\nhelp: x")).unwrap();
        assert!(why.contains("(it is not installed)"), "{why}");
        let no_rustup = missing("1.88.0", Err(io::ErrorKind::NotFound.into())).unwrap();
        for why in [why, no_rustup] {
            assert!(why.contains("`rustup toolchain install 1.88.0 --profile minimal`"), "{why}");
        }
    }
}
