//! Programs that cargo builds for another CPU, and where guests have them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;

use super::Target;
use super::tools::Tools;

/// A program that was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// Its crate's name.
    name: String,
    /// Whether it runs tests.
    pub(super) is_test: bool,
    /// Whether it is made of a library's own modules.
    is_own: bool,
    /// Where it lies.
    pub(super) path: PathBuf,
}

/// The packages whose tests guests run.
const PACKAGES: [&str; 2] = ["dmaspan-linux", "dmaspan-cli"];

/// What the tests read, by its folder in the source.
const READ: [&str; 2] = ["crates/dmaspan-cli/tests/dumps", "docs/layouts"];

/// A file of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum File {
    /// A file, at the path that it has on this machine: tests start programs by their paths.
    Copy(PathBuf, Vec<u8>),
    /// Another name for it.
    Name(String, PathBuf),
}

/// Builds the tests of what stands on Linux, and what they start and read. Guests call those in a
/// library's modules `tests-linux`, and those of a program in `tests` by its name too:
/// `tests-linux-it`.
///
/// # Errors
///
/// What failed, in one line; cargo has said more by then.
pub(super) fn for_guests(target: &Target, tools: &Tools) -> Result<Vec<File>, String> {
    let mut files = Vec::new();
    for package in PACKAGES {
        for program in build(target, tools, package, &["--tests", "--examples"])? {
            files.push(copy(&program.path)?);
            if program.is_test {
                files.push(File::Name(program.name_in_guests(package), program.path));
            }
        }
    }
    for folder in READ {
        let folder = crate::root().join(folder);
        let unread = |error| format!("{} cannot be read: {error}", folder.display());
        for entry in fs::read_dir(&folder).map_err(unread)? {
            files.push(copy(&entry.map_err(unread)?.path())?);
        }
    }
    Ok(files)
}

fn copy(path: &Path) -> Result<File, String> {
    let read =
        fs::read(path).map_err(|error| format!("{} cannot be read: {error}", path.display()));
    Ok(File::Copy(path.to_owned(), read?))
}

impl Program {
    fn name_in_guests(&self, package: &str) -> String {
        let package = package.trim_start_matches("dmaspan-");
        match self.is_own {
            true => format!("tests-{package}"),
            false => format!("tests-{package}-{}", self.name),
        }
    }
}

/// Builds what a call of `cargo test` would run, and returns all programs.
///
/// # Errors
///
/// What failed, in one line; cargo has said more by then.
pub(super) fn build(
    target: &Target,
    tools: &Tools,
    package: &str,
    what: &[&str],
) -> Result<Vec<Program>, String> {
    let mut build = super::cargo(target, tools, &["test", "--quiet", "--no-run"]);
    build.args(["-p", package, "--message-format", "json-render-diagnostics"]).args(what);
    let built = build.stderr(Stdio::inherit()).output();
    let built = built.map_err(|error| format!("cargo did not start: {error}"))?;
    match built.status.success() {
        true => Ok(read(&String::from_utf8_lossy(&built.stdout))),
        false => Err(format!("the tests of {package} cannot be built: {}", built.status)),
    }
}

/// The programs that cargo's messages name.
fn read(messages: &str) -> Vec<Program> {
    let program = |line| {
        let message: Value = serde_json::from_str(line).ok()?;
        let of = message.get("target")?;
        Some(Program {
            name: of.get("name")?.as_str()?.to_owned(),
            is_test: message.get("profile")?.get("test")?.as_bool()?,
            is_own: of.get("kind")?.as_array()?.iter().all(|kind| kind == "lib"),
            path: message.get("executable")?.as_str()?.into(),
        })
    };
    messages.lines().filter_map(program).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_told_from_libraries_and_named_by_what_they_test() {
        let message = |kind, name, test, executable| {
            format!(
                r#"{{"target":{{"kind":["{kind}"],"name":"{name}"}},
                "profile":{{"test":{test}}},"executable":{executable}}}"#
            )
            .replace('\n', "")
        };
        let text = [
            message("lib", "dmaspan_linux", "false", "null"),
            message("lib", "dmaspan_linux", "true", r#""/a/own""#),
            message("test", "it", "true", r#""/a/it""#),
            message("example", "fixed_copy", "false", r#""/a/examples/fixed_copy""#),
            r#"{"reason":"build-finished"}"#.to_owned(),
        ];
        let programs = read(&text.join("\n"));
        let paths: Vec<_> = programs.iter().map(|it| it.path.to_str().unwrap()).collect();
        assert_eq!(paths, ["/a/own", "/a/it", "/a/examples/fixed_copy"]);
        let tests = programs.iter().filter(|it| it.is_test);
        let names: Vec<_> = tests.map(|it| it.name_in_guests("dmaspan-linux")).collect();
        assert_eq!(names, ["tests-linux", "tests-linux-it"]);
    }
}
