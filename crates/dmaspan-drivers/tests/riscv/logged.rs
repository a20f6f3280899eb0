//! With the feature `log` a refused command is said with its words.

use dmaspan::iommu::{Invalidation, IommuOps as _, Scope, Tables};
use log::Level::Warn;

use crate::capture::{assert_said, said};
use crate::hardware::{BASE_FORMAT, CMD_ILL, FIRST, Fake, Fault, domain};

#[test]
fn a_refused_command_is_said_with_its_words() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    let domain = domain(&iommu, FIRST);
    fake.set(Fault::Refuses(1, CMD_ILL));
    let all = Invalidation { scope: Scope::All, leaf_sizes: 1 << 12, tables: Tables::Kept };
    let (refused, messages) = said(|| domain.ops().invalidate(&all).is_err());
    assert!(refused);
    // IOTINVAL.VMA of the domain's number.
    let words = ["the IOMMU stopped at the command 0x0000000100001001 0x0000000000000000", "cqcsr"];
    assert_said(&messages, Warn, &words);
}
