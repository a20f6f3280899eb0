//! The program's words, and the stream that they go to, without a controller.

use std::process::{Command, Output};

const PROGRAM: &str = env!("CARGO_BIN_EXE_dmaspan-nvme");

/// Runs a line of a shell, in which `"$0"` is the program.
fn shell(line: &str) -> Output {
    Command::new("sh").args(["-c", line, PROGRAM]).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn output_that_is_lost_is_a_failure_that_is_said() {
    for args in ["--help", "--version", "bench --help"] {
        for (to, why) in [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
        {
            let output = shell(&format!("\"$0\" {args} {to}"));
            let error = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{args} {to}: {error}");
            let says = "error: the output cannot be written: ";
            assert!(error.starts_with(says) && error.contains(why), "{error}");
        }
        assert_eq!(shell(&format!("\"$0\" {args} >/dev/null")).status.code(), Some(0));
    }
}

#[test]
fn a_locale_without_utf_8_gets_ascii() {
    for args in ["--help", "bench --help", "read --help", "identify 0000:00:1f.7"] {
        let output = shell(&format!("LC_ALL=C \"$0\" {args}"));
        assert!(output.stdout.is_ascii() && output.stderr.is_ascii(), "{args}");
    }
}

#[test]
fn an_error_is_one_line_with_its_cause() {
    let output = shell("\"$0\" identify ffffffff:ff:1f.7");
    let error = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.lines().count() == 1 && error.contains("there is no PCI function"), "{error}");
}
