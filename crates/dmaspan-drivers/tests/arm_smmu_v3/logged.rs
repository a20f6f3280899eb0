//! With the feature `log` a refused command is said with its words, and a stream with its number.

use dmaspan::iommu::{Attachment, Invalidation, IommuOps as _, Prepared, Scope, Tables, Target};
use log::Level::{Info, Warn};

use crate::capture::{assert_said, said};
use crate::hardware::{Mode, Model};
use crate::setup::{Rig, S1};

#[test]
fn a_refused_command_is_said_with_its_words() {
    let rig = Rig::new(Model::LARGE);
    let domain = rig.s1();
    rig.hardware.set(Mode::Refuses(0x11));
    let all = Invalidation { scope: Scope::All, leaf_sizes: 1 << 12, tables: Tables::Kept };
    let (refused, messages) = said(|| domain.ops().invalidate(&all).is_err());
    assert!(refused);
    // TLBI_NH_ASID.
    assert_said(&messages, Warn, &["the SMMU stopped at the command 0x", "11 0x", "(error 1)"]);
}

#[test]
fn a_stream_that_is_switched_is_said_with_its_number() {
    let rig = Rig::new(Model::LARGE);
    let domain = rig.s1();
    let stream = Attachment::new(rig.port::<S1>(7)).unwrap();
    let prepared = Prepared::new(domain);
    let (attached, messages) = said(|| stream.attach(Target::Paging(prepared)));
    attached.unwrap();
    assert_said(&messages, Info, &["stream 0x7 is attached to a domain"]);
    let (detached, messages) = said(|| stream.detach());
    detached.unwrap();
    assert_said(&messages, Info, &["stream 0x7 is blocked"]);
}
