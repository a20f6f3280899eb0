//! What was found is said, also where the test's own assertion ends it.

use std::process::Command;

use super::*;

/// In a process of its own, a test that fails before it looks at what was found.
#[test]
#[ignore = "it fails; another test runs it"]
fn fails_by_its_own_assertion() {
    let sanitizer = Sanitizer::default();
    let device = sanitizer.named("nic0");
    device.on_dma(Iova::new(0x5000), 64, Access::Write);
    if std::env::var_os("DMASPAN_SHOWS_ITS_REPORT").is_some() {
        println!("{sanitizer}");
    }
    let received: &[u8] = &[];
    assert_eq!(received, b"packet", "the test's own assertion");
}

/// What a process prints to standard error that runs that test.
fn printed(shows: bool) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--ignored", "--exact", "--nocapture"]);
    child.arg("sanitizer::reported::fails_by_its_own_assertion");
    child.env_remove("DMASPAN_SHOWS_ITS_REPORT");
    if shows {
        child.env("DMASPAN_SHOWS_ITS_REPORT", "1");
    }
    let output = child.output().unwrap();
    assert!(!output.status.success());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("the test's own assertion"), "{stderr}");
    stderr
}

#[test]
fn a_report_is_printed_once_where_the_tests_own_assertion_ends_it() {
    let stderr = printed(false);
    assert_eq!(stderr.matches("ERROR: DMA to nothing").count(), 1, "{stderr}");
    assert_eq!(stderr.matches("errors: 1, advice: 0, events: 1").count(), 1, "{stderr}");
    // Not where the test has shown it.
    assert!(!printed(true).contains("ERROR"));
}

#[test]
fn nothing_is_printed_of_a_program_without_findings_or_without_a_panic() {
    let panicking = |sanitizer: Sanitizer| {
        let unwound = std::panic::catch_unwind(move || {
            let _in_use = sanitizer;
            panic!("on purpose");
        });
        assert!(unwound.is_err());
    };
    // Of these two nothing is seen here: they must not panic again.
    panicking(Sanitizer::default());
    let sanitizer = Sanitizer::default();
    sanitizer.on_dma(Iova::new(0x5000), 64, Access::Write);
    panicking(sanitizer.clone());
    assert_eq!(sanitizer.found(), 1);
}
