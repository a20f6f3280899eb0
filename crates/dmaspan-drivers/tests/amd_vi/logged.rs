//! With the feature `log` refused commands and faults that nobody claims are said.

use log::Level::Warn;

use crate::capture::{assert_said, said};
use crate::fake::Rig;

#[test]
fn a_refused_command_is_said_with_its_words_and_its_address() {
    let rig = Rig::new();
    let domain = rig.domain();
    rig.fake.log([5 << 60, 0x1000]);
    let (refused, messages) = said(|| rig.iommu.handle_faults().is_err());
    assert!(refused);
    assert_said(&messages, Warn, &["the IOMMU refused the command 0x", "at 0x1000"]);
    drop(domain);
}

#[test]
fn a_fault_of_a_stream_that_nobody_claimed_is_said() {
    let rig = Rig::new();
    rig.fake.log([2 << 60 | 1 << 53 | 9, 0x5000]);
    let (handled, messages) = said(|| rig.iommu.handle_faults());
    assert_eq!(handled.unwrap().unclaimed, 1);
    let words = ["stream 0x9", "a write of 0x5000", "nobody claimed"];
    assert_said(&messages, Warn, &words);
}
