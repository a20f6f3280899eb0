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
