//! Commands as the hardware reads them (IHI 0070, 4).

use super::spec::cmd;

/// A command of two words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Command(pub(super) [u64; 2]);

/// By what cached translations are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// Those of a stage-1 domain. Their VMID is 0.
    Asid(u16),
    /// Those of a stage-2 domain.
    Vmid(u16),
}

impl Tag {
    fn fields(self) -> u64 {
        match self {
            Self::Asid(asid) => u64::from(asid) << cmd::ASID_SHIFT,
            Self::Vmid(vmid) => u64::from(vmid) << cmd::VMID_SHIFT,
        }
    }
}

impl Command {
    /// Waits for all before it (4.7.3). Consumed, it has; no interrupt, no message.
    pub(super) const SYNC: Self = Self([cmd::SYNC, 0]);
    /// The configuration of all streams is forgotten (4.3.2).
    pub(super) const CONFIGURATION: Self = Self([cmd::CFGI_ALL, cmd::CFGI_ALL_RANGE]);
    /// All translations but the hypervisor's and those of Secure streams are forgotten (4.4.2).
    pub(super) const TRANSLATIONS: Self = Self([cmd::TLBI_NSNH_ALL, 0]);
    /// The hypervisor's translations are forgotten (4.4.3).
    pub(super) const HYPERVISOR: Self = Self([cmd::TLBI_EL2_ALL, 0]);

    /// The configuration of a stream is forgotten: its entry, the context descriptors that were
    /// found through it and, since Leaf is 0, that there was no second-level table for it (4.3.1).
    pub(super) fn stream(id: u32) -> Self {
        Self([cmd::CFGI_STE | u64::from(id) << cmd::SID_SHIFT, 0])
    }

    /// All translations of a domain are forgotten (4.4.1, 4.4.4).
    pub(super) fn domain(tag: Tag) -> Self {
        let opcode = match tag {
            Tag::Asid(_) => cmd::TLBI_NH_ASID,
            Tag::Vmid(_) => cmd::TLBI_S12_VMALL,
        };
        Self([opcode | tag.fields(), 0])
    }

    /// Translations of a domain that lie at an address are forgotten; `range` and `address` are
    /// fields of word 0 and 1 (4.4.1, 4.4.4).
    pub(super) fn address(tag: Tag, range: u64, address: u64) -> Self {
        let opcode = match tag {
            Tag::Asid(_) => cmd::TLBI_NH_VA,
            Tag::Vmid(_) => cmd::TLBI_S2_IPA,
        };
        Self([opcode | tag.fields() | range, address])
    }

    /// Goes on with a stalled access (4.6.1); `response` says how.
    pub(super) fn resume(id: u32, tag: u64, response: u64) -> Self {
        Self([cmd::RESUME | response | u64::from(id) << cmd::SID_SHIFT, tag])
    }

    /// Ends all stalled accesses of a stream (4.6.2).
    pub(super) fn end_stalls(id: u32) -> Self {
        Self([cmd::STALL_TERM | u64::from(id) << cmd::SID_SHIFT, 0])
    }
}
