//! With the feature `log` a refused command is said with its words.

use dmaspan_drivers::vtd::Mode;
use log::Level::Warn;

use crate::capture::{assert_said, said};
use crate::fake::{Broken, Fake, domain, map, start, unmap};

#[test]
fn a_refused_command_is_said_with_its_words() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    let tables = domain(&iommu).expect("there is a number");
    assert!(map(&tables, 0, 0x1000));
    fake.breaks(Broken::Picky);
    let (unmapped, messages) = said(|| unmap(&tables, 0, 0x1000));
    assert!(!unmapped);
    assert_said(&messages, Warn, &["the IOMMU refused the command 0x", "fault status 0x"]);
    fake.breaks(Broken::Not);
}
