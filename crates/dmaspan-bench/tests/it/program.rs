//! Running a benchmark as its users do.

use std::process::{Command, Output};

use serde_json::Value;

/// `dmaspan-bench` with these arguments, the benchmark's name first.
pub(crate) fn run(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmaspan-bench"));
    command.args(args).env_remove("NO_COLOR").output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The object that `--format json` prints.
pub(crate) fn json(args: &[&str]) -> Value {
    let output = run(&[args, &["--format", "json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Checks that arguments are refused as wrong usage, in one line that has these parts.
pub(crate) fn is_refused(args: &[&str], parts: &[&str]) {
    let output = run(args);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!((output.status.code(), out.as_str()), (Some(2), ""), "{args:?}: {err}");
    assert!(err.starts_with("error: ") && err.lines().count() == 1, "{args:?}: {err}");
    for part in parts {
        assert!(err.contains(part), "{args:?}: {part} is not in {err}");
    }
}

/// What is printed, which has these parts and fits a terminal.
pub(crate) fn shown(args: &[&str], parts: &[&str]) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    let shown = text(&output.stdout);
    assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
    for part in parts {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    shown
}

/// The same of tables, the lines of which end where their last word does.
pub(crate) fn tables(args: &[&str], parts: &[&str]) -> String {
    let shown = shown(args, parts);
    assert!(shown.lines().all(|line| line == line.trim_end()), "{shown}");
    shown
}
