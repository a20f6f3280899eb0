//! The program as its users run it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

#[test]
fn a_list_whose_reader_goes_away_ends_quietly() {
    for args in [&["guest", "--list"][..], &["--help"]] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_xtask"))
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Gone before the program has printed, or after its first line.
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        assert_ne!(output.status.code(), Some(101), "{args:?}");
    }
    let whole = Command::new(env!("CARGO_BIN_EXE_xtask")).args(["guest", "--list"]).output();
    let lines = BufReader::new(whole.unwrap().stdout.as_slice()).lines().count();
    assert!(lines > 8, "{lines} lines");
}

#[test]
fn checks_are_run_by_name_and_an_unknown_name_runs_none() {
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_xtask")).args(args).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, out, _) = run(&["ci", "formatting"]);
    assert_eq!(code, Some(0), "{out}");
    assert!(out.contains("== ci: 1 passed, 0 skipped, 0 failed"), "{out}");
    let (code, out, err) = run(&["ci", "formatting", "repeated"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    // A check of `--full`, which the quick ones do not have.
    assert!(err.contains("no check `repeated`; there are: formatting, lints"), "{err}");
}
