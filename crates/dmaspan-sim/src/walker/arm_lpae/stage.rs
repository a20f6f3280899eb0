//! The stages of translation make permissions and memory types of a descriptor's attributes.
//!
//! DDI 0487, issue K.a: D8.3.1 for the places of the fields, D8.4, "Memory access control", and
//! D8.6, "Memory region attributes". Their counterparts for AArch32 state are in G5.6 and G5.7.

use dmaspan::Prot;

use super::registers::{FlagUpdate, State, bit, field};
use super::{DIRTY_MODIFIER, DIRTY_STATE};

/// Attribute bits 63:59 of a table descriptor of stage 1: NSTable, APTable, UXNTable, PXNTable.
const HIERARCHICAL: u64 = 0b1_1111 << 59;
/// APTable\[1\]: no writes below.
const AP_TABLE_READ_ONLY: u32 = 62;
/// APTable\[0\]: no unprivileged accesses below.
const AP_TABLE_PRIVILEGED: u32 = 61;
const UXN_TABLE: u32 = 60;
const PXN_TABLE: u32 = 59;

const AP_UNPRIVILEGED: u32 = 6;
const PXN: u32 = 53;
const UXN: u32 = 54;

const S2AP_READ: u32 = 6;

/// As whom a device accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum AccessPrivilege {
    /// As EL0 does.
    #[default]
    Unprivileged,
    /// As EL1 does.
    Privileged,
}

/// Whose the memory type of a stage 2 descriptor is: HCR_EL2.FWB, or S2FWB of an SMMUv3's STE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum MemAttr {
    /// FWB = 0: stage 2 names a type, with which that of stage 1 is combined.
    #[default]
    Combined,
    /// FWB = 1: stage 2 may force a type upon stage 1.
    Forced,
}

/// Says how a stage 2 descriptor forbids execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ExecuteNever {
    /// XN, bit 54, is for everybody and bit 53 is RES0.
    #[default]
    ForAll,
    /// XN\[1:0\], bits 54:53, tell EL1 and EL0 apart (FEAT_XNX).
    ByPrivilege,
}

/// HPD0 and HPD1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hierarchical {
    Honoured,
    Disabled,
}

/// A stage of translation, with what it needs to read attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Stage 1 of AArch64's EL1&0 or AArch32's PL1&0.
    One { mair: u64, privilege: AccessPrivilege, hierarchical: Hierarchical, state: State },
    /// Stage 2.
    Two { mem_attr: MemAttr, execute_never: ExecuteNever, privilege: AccessPrivilege },
}

impl Stage {
    /// What a table descriptor takes from everything below. Stage 2 has no such bits.
    pub(super) fn imposed(self, entry: u64) -> u64 {
        match self {
            Self::One { hierarchical: Hierarchical::Honoured, .. } => entry & HIERARCHICAL,
            _ => 0,
        }
    }

    /// Permissions of a leaf, and whether it is writable-clean (D8.5).
    pub(super) fn permissions(self, entry: u64, inherited: u64, dirty: FlagUpdate) -> (Prot, bool) {
        let modifier = dirty == FlagUpdate::Hardware && bit(entry, DIRTY_MODIFIER);
        let mut prot = Prot::empty();
        let clean = match self {
            Self::One { .. } => {
                let read_only = bit(entry, DIRTY_STATE);
                let writable = !bit(inherited, AP_TABLE_READ_ONLY) && (!read_only || modifier);
                let unprivileged =
                    bit(entry, AP_UNPRIVILEGED) && !bit(inherited, AP_TABLE_PRIVILEGED);
                prot.insert(Prot::READ);
                prot.set(Prot::WRITE, writable);
                prot.set(Prot::PRIV, !unprivileged);
                writable && read_only
            }
            Self::Two { .. } => {
                let written = bit(entry, DIRTY_STATE);
                prot.set(Prot::READ, bit(entry, S2AP_READ));
                prot.set(Prot::WRITE, written || modifier);
                modifier && !written
            }
        };
        prot.set(Prot::NOEXEC, self.execute_never(entry, inherited));
        (prot, clean)
    }

    fn execute_never(self, entry: u64, inherited: u64) -> bool {
        match self {
            Self::One { privilege, state, .. } => {
                let unprivileged = bit(entry, UXN) || bit(inherited, UXN_TABLE);
                let privileged = bit(entry, PXN) || bit(inherited, PXN_TABLE);
                match (privilege, state) {
                    (AccessPrivilege::Unprivileged, _) => unprivileged,
                    (AccessPrivilege::Privileged, State::AArch64) => privileged,
                    // In AArch32 state bit 54 is XN, which is for every privilege (G5.6).
                    (AccessPrivilege::Privileged, State::AArch32) => privileged || unprivileged,
                }
            }
            Self::Two { execute_never: ExecuteNever::ForAll, .. } => bit(entry, UXN),
            Self::Two { execute_never: ExecuteNever::ByPrivilege, privilege, .. } => {
                match field(entry, 54, 53) {
                    0b00 => false,
                    0b01 => privilege == AccessPrivilege::Privileged,
                    0b10 => true,
                    _ => privilege == AccessPrivilege::Unprivileged,
                }
            }
        }
    }

    /// Whether the device may use a leaf with these permissions at all.
    pub(super) fn reaches(self, prot: Prot) -> bool {
        match self {
            Self::One { privilege: AccessPrivilege::Unprivileged, .. } => {
                !prot.contains(Prot::PRIV)
            }
            _ => true,
        }
    }

    /// The memory attributes, and what they say of coherency: the byte of MAIR that AttrIndx
    /// selects at stage 1, MemAttr\[3:0\] at stage 2.
    pub(super) fn memory(self, entry: u64) -> (u8, Prot) {
        match self {
            Self::One { mair, .. } => {
                let index = field(entry, 4, 2);
                let [byte, ..] = (mair >> (8 * index)).to_le_bytes();
                (byte, mair_type(byte))
            }
            Self::Two { mem_attr, .. } => {
                let [attributes, ..] = field(entry, 5, 2).to_le_bytes();
                let memory_type = match mem_attr {
                    MemAttr::Combined => combined_type(attributes),
                    MemAttr::Forced => forced_type(attributes),
                };
                (attributes, memory_type)
            }
        }
    }

    /// The field of a leaf that has a reserved value, if one has.
    pub(super) fn reserved_value(self, entry: u64) -> Option<&'static str> {
        if field(entry, 9, 8) == 0b01 {
            return Some("SH");
        }
        let mem_attr = field(entry, 5, 2);
        let reserved = match self {
            Self::One { .. } => false,
            // Without FEAT_MTE_PERM an inner half of 0b00 is for device memory alone.
            Self::Two { mem_attr: MemAttr::Combined, .. } => mem_attr > 3 && mem_attr & 3 == 0,
            Self::Two { mem_attr: MemAttr::Forced, .. } => mem_attr & 7 == 0b100,
        };
        reserved.then_some("MemAttr")
    }

    /// RES0 bits of a table descriptor beside its address.
    pub(super) fn reserved_in_table(self) -> u64 {
        match self {
            Self::One { .. } => 0,
            Self::Two { .. } => HIERARCHICAL,
        }
    }

    /// RES0 bits of a leaf beside its address. At stage 2, without FEAT_XS, nothing is in the place
    /// of nG.
    pub(super) fn reserved_in_leaf(self) -> u64 {
        let Self::Two { mem_attr, execute_never, .. } = self else { return 0 };
        let fourth = match mem_attr {
            MemAttr::Combined => 0,
            MemAttr::Forced => 1 << 5,
        };
        let below_xn = match execute_never {
            ExecuteNever::ForAll => 1 << PXN,
            ExecuteNever::ByPrivilege => 0,
        };
        1 << 11 | fourth | below_xn
    }
}

/// What an attribute byte of MAIR says of coherency (MAIR_EL1): device memory has an upper half of
/// 0, and normal memory is cacheable where neither half is 0b0100, non-cacheable.
fn mair_type(attributes: u8) -> Prot {
    match (attributes >> 4, attributes & 0xf) {
        (0, _) => Prot::MMIO,
        (0b0100, _) | (_, 0b0100) => Prot::empty(),
        _ => Prot::CACHE,
    }
}

/// MemAttr\[3:0\] without FWB: an outer half of 0b00 is device memory, and 0b01 in either half is
/// non-cacheable.
fn combined_type(attributes: u8) -> Prot {
    match (attributes >> 2, attributes & 3) {
        (0, _) => Prot::MMIO,
        (1, _) | (_, 1) => Prot::empty(),
        _ => Prot::CACHE,
    }
}

/// MemAttr\[2:0\] with FWB: 0b0xx is device memory, 0b101 non-cacheable, 0b110 write-back. 0b111
/// leaves the type to stage 1; here there is none, so it is the device's own, taken as write-back.
fn forced_type(attributes: u8) -> Prot {
    match attributes & 7 {
        0b000..=0b011 => Prot::MMIO,
        0b110 | 0b111 => Prot::CACHE,
        _ => Prot::empty(),
    }
}
