//! Findings are printed, also where the test's own assertion ends it.

use std::process::Command;

use super::*;

/// In a process of its own, which the next test starts, this fails before it looks at findings.
#[test]
fn fails_by_its_own_assertion_where_it_is_asked_to() {
    let Ok(what) = std::env::var("DMASPAN_FAILS") else { return };
    let (sanitizer, _, _domain, device) = dma(Flush::Strict);
    // The panic leaves it mapped, which is no finding.
    let memory = memory(&sanitizer, frames(0, 1));
    let _mapped = device.map_single(memory, Direction::FromDevice).unwrap();
    if what != "rightly" {
        sanitizer.on_dma(Iova::new(0x50_0000), 64, Access::Write);
    }
    if what == "shown" {
        println!("{sanitizer}");
    }
    let received: &[u8] = &[];
    assert_eq!(received, b"packet", "the test's own assertion");
}

/// What a process prints to standard error that runs that test.
fn printed(what: &str) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "--nocapture"]);
    child.arg("sanitizer::reported::fails_by_its_own_assertion_where_it_is_asked_to");
    let output = child.env("DMASPAN_FAILS", what).output().unwrap();
    assert!(!output.status.success());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("the test's own assertion"), "{stderr}");
    stderr
}

#[test]
fn a_report_is_printed_once_where_the_tests_own_assertion_ends_it() {
    let stderr = printed("silently");
    assert_eq!(stderr.matches("ERROR: DMA to nothing").count(), 1, "{stderr}");
    assert_eq!(stderr.matches("errors: 1, advice: 0, events: ").count(), 1, "{stderr}");
    assert!(!stderr.contains("leak"), "{stderr}");
    // Not where the test has shown it, nor where nothing was found before the panic.
    assert!(!printed("shown").contains("ERROR"));
    assert!(!printed("rightly").contains("ERROR"));
}
