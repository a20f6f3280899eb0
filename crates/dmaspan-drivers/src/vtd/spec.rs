//! Registers, commands and structures, as the manual has them.
//!
//! Source: Intel Virtualization Technology for Directed I/O, Architecture Specification, D51397,
//! revision 4: sections 6.5.2 "Queued Invalidation Interface", 7 "Fault handling", 9 "Translation
//! Structure Formats" and 11.4 "Register Descriptions".

/// Offsets of registers (11.4).
pub(super) mod register {
    /// Version: 7:4 the major number.
    pub(crate) const VER: u64 = 0x00;
    /// Capabilities, 64 bits.
    pub(crate) const CAP: u64 = 0x08;
    /// Extended capabilities, 64 bits.
    pub(crate) const ECAP: u64 = 0x10;
    /// Global command: [`super::global`].
    pub(crate) const GCMD: u64 = 0x18;
    /// Global status: [`super::global`].
    pub(crate) const GSTS: u64 = 0x1c;
    /// The root table, 64 bits.
    pub(crate) const RTADDR: u64 = 0x20;
    /// Fault status: [`super::status`].
    pub(crate) const FSTS: u64 = 0x34;
    /// Fault event control: the interrupt's mask.
    pub(crate) const FECTL: u64 = 0x38;
    /// Fault event data, address and its upper half: the interrupt's message.
    pub(crate) const FEDATA: u64 = 0x3c;
    pub(crate) const FEADDR: u64 = 0x40;
    pub(crate) const FEUADDR: u64 = 0x44;
    /// Protected memory: whether it is, and the two regions.
    pub(crate) const PMEN: u64 = 0x64;
    pub(crate) const PLMBASE: u64 = 0x68;
    pub(crate) const PLMLIMIT: u64 = 0x6c;
    pub(crate) const PHMBASE: u64 = 0x70;
    pub(crate) const PHMLIMIT: u64 = 0x78;
    /// Where hardware fetches next in the invalidation queue, 64 bits.
    pub(crate) const IQH: u64 = 0x80;
    /// Where software places next, 64 bits.
    pub(crate) const IQT: u64 = 0x88;
    /// The invalidation queue, 64 bits.
    pub(crate) const IQA: u64 = 0x90;
}

/// Bits of GCMD and of GSTS (11.4.4).
pub(super) mod global {
    /// Translation is enabled.
    pub(crate) const TRANSLATION: u32 = 1 << 31;
    /// The root table pointer is set.
    pub(crate) const ROOT_TABLE: u32 = 1 << 30;
    /// The write buffer is flushed; 0 in the status when done.
    pub(crate) const WRITE_BUFFER: u32 = 1 << 27;
    /// Queued invalidation is enabled.
    pub(crate) const QUEUE: u32 = 1 << 26;
    /// The bits that are states rather than one-time actions: the others are written as 0 unless
    /// the action is asked for (11.4.4.1). They are 31, 28, 26, 25 and 23.
    pub(crate) const STATES: u32 = TRANSLATION | 1 << 28 | QUEUE | 1 << 25 | 1 << 23;
}

/// Bits of FSTS (11.4.9).
pub(super) mod status {
    /// PFO: faults came while all records were taken.
    pub(crate) const OVERFLOW: u32 = 1 << 0;
    /// PPF: there is a record.
    pub(crate) const PENDING: u32 = 1 << 1;
    /// IQE: hardware does not understand a command, or could not fetch it.
    pub(crate) const QUEUE: u32 = 1 << 4;
    /// ICE: a device answered what nobody asked for.
    pub(crate) const COMPLETION: u32 = 1 << 5;
    /// ITE: a device did not answer in time; commands that wait were aborted.
    pub(crate) const TIMEOUT: u32 = 1 << 6;
    /// Everything that is cleared by writing 1.
    pub(crate) const CLEAR: u32 = 0xfd;
    /// FRI, 15:8: the oldest record.
    pub(crate) const fn first(value: u32) -> u32 {
        value >> 8 & 0xff
    }
}

/// FECTL.IM: no interrupts (11.4.10).
pub(super) const INTERRUPT_MASK: u32 = 1 << 31;
/// RTADDR.TTM, 11:10: scalable mode (11.4.5).
pub(super) const SCALABLE: u64 = 1 << 10;
/// RTADDR.TTM, whole.
pub(super) const TABLE_MODE: u64 = 3 << 10;
/// IQA.DW: commands of 256 bits (11.4.19).
pub(super) const WIDE: u64 = 1 << 11;
/// PMEN.EPM and PMEN.PRS: protected memory is asked for, and is in force (11.4.13).
pub(super) const PROTECT: u32 = 1 << 31;
pub(super) const PROTECTED: u32 = 1 << 0;

/// The pass-through domain and those of page tables are tagged with numbers of 16 bits at most. 0
/// is what hardware with caching mode tags absent entries with (6.1).
pub(super) const NO_DOMAIN: u16 = 0;
/// What accesses that pass untranslated are tagged with.
pub(super) const PASS_DOMAIN: u16 = 1;

/// A command for the invalidation queue. In a queue of 256-bit commands the upper half is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Command {
    pub(super) low: u64,
    pub(super) high: u64,
}

/// log2 of the bytes of a leaf that a page-selective command counts in.
pub(super) const PAGE_LG2: u32 = 12;

/// Whether cached walks are kept (IH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Walks {
    Keep,
    Forget,
}

/// An aligned block of `2^mask` pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) mask: u32,
    pub(super) walks: Walks,
}

impl Block {
    /// AM in 5:0, IH in 6, ADDR in 63:12 (6.5.2.3 and 6.5.2.4).
    fn encode(self) -> u64 {
        self.address | u64::from(self.walks == Walks::Keep) << 6 | u64::from(self.mask & 0x3f)
    }
}

/// 23:16 and on, DID.
fn tag(domain: u16) -> u64 {
    u64::from(domain) << 16
}

/// DW and DR: reads and writes that were let through are completed first (6.5.2.3).
const DRAIN: u64 = 1 << 6 | 1 << 7;

impl Command {
    /// Context-cache invalidation, global (6.5.2.1).
    pub(super) const CONTEXTS: Self = Self { low: 0x1 | 1 << 4, high: 0 };
    /// IOTLB invalidation, global (6.5.2.3).
    pub(super) const EVERYTHING: Self = Self { low: 0x2 | 1 << 4 | DRAIN, high: 0 };
    /// PASID-cache invalidation, global (6.5.2.2).
    pub(super) const PASIDS: Self = Self { low: 0x7 | 3 << 4, high: 0 };

    /// Context-cache invalidation of one device, whose entry had that domain (6.5.2.1).
    pub(super) fn context(stream: u16, domain: u16) -> Self {
        Self { low: 0x1 | 3 << 4 | tag(domain) | u64::from(stream) << 32, high: 0 }
    }

    /// PASID-cache invalidation of PASID 0 in a domain (6.5.2.2).
    pub(super) fn pasid(domain: u16) -> Self {
        Self { low: 0x7 | 1 << 4 | tag(domain), high: 0 }
    }

    /// IOTLB invalidation of a domain (6.5.2.3).
    pub(super) fn domain(domain: u16) -> Self {
        Self { low: 0x2 | 2 << 4 | DRAIN | tag(domain), high: 0 }
    }

    /// IOTLB invalidation of a block of a domain (6.5.2.3).
    pub(super) fn pages(domain: u16, block: Block) -> Self {
        Self { low: 0x2 | 3 << 4 | DRAIN | tag(domain), high: block.encode() }
    }

    /// PASID-based IOTLB invalidation of PASID 0 in a domain (6.5.2.4).
    pub(super) fn first_stage(domain: u16) -> Self {
        Self { low: 0x6 | 2 << 4 | tag(domain), high: 0 }
    }

    /// PASID-based IOTLB invalidation of a block of PASID 0 in a domain (6.5.2.4).
    pub(super) fn first_stage_pages(domain: u16, block: Block) -> Self {
        Self { low: 0x6 | 3 << 4 | tag(domain), high: block.encode() }
    }

    /// Invalidation wait: once all before it is done, and before anything behind it begins (FN),
    /// `data` is written to `address` (SW) (6.5.2.8).
    pub(super) fn wait(address: u64, data: u32) -> Self {
        Self { low: 0x5 | 1 << 5 | 1 << 6 | u64::from(data) << 32, high: address }
    }

    /// Its words, in their order in memory.
    pub(super) const fn words(self) -> [u64; 2] {
        [self.low, self.high]
    }
}

/// P of root entries, context entries and entries of PASID directories and tables (9.1 to 9.6).
pub(super) const PRESENT: u64 = 1 << 0;

/// The address in entries of the first stage, 51:12 (9.7).
pub(super) const ADDRESS: u64 = (1 << 52) - (1 << 12);

/// SNP of second-stage leaves, 11: reserved without snoop control (9.8).
pub(super) const SNOOP: u64 = 1 << 11;

/// Legacy mode's context entries (9.3).
pub(super) mod context {
    /// TT, 3:2: accesses pass.
    pub(crate) const PASS: u64 = 0b10 << 2;
    /// DID, 87:72.
    pub(crate) fn domain(id: u16) -> u64 {
        u64::from(id) << 8
    }
}

/// Entries of PASID tables (9.6).
pub(super) mod pasid {
    /// PGTT, 8:6.
    pub(crate) const FIRST_STAGE: u64 = 0b001 << 6;
    pub(crate) const SECOND_STAGE: u64 = 0b010 << 6;
    pub(crate) const PASS: u64 = 0b100 << 6;
    /// PWSNP, 87: walks snoop the CPU's caches.
    pub(crate) const SNOOPED_WALKS: u64 = 1 << (87 - 64);
    /// DID, 79:64.
    pub(crate) fn domain(id: u16) -> u64 {
        id.into()
    }
    /// AW, 4:2: the levels less 2. It is the second stage's; models look at it for the first, too.
    pub(crate) fn width(levels: u32) -> u64 {
        u64::from(levels.saturating_sub(2) & 7) << 2
    }
}

/// Fault records (11.4.14), of two 64-bit words.
pub(super) mod record {
    use dmaspan::iommu::{FaultAccess, FaultReason};

    /// The bytes of one.
    pub(crate) const BYTES: u64 = 16;
    /// The offsets of the upper word's halves.
    pub(crate) const THIRD: u64 = 8;
    pub(crate) const LAST: u64 = 12;
    /// F, 127, in the last 32 bits: there is a fault; written to clear it.
    pub(crate) const FAULT: u32 = 1 << 31;
    /// FI, 63:12 of the lower word: the page.
    pub(crate) const PAGE: u64 = !0xfff;

    /// SID, 79:64.
    pub(crate) fn stream(high: u64) -> u32 {
        u32::try_from(high & 0xffff).unwrap_or(0)
    }

    /// T1 in 126 and T2 in 92: 00b a write, 10b a read, 11b an atomic operation; EXE in 94. A page
    /// request, 01b, is none of these.
    pub(crate) fn access(high: u64) -> Option<FaultAccess> {
        match (high >> 62 & 1, high >> 28 & 1) {
            (0, 0) | (1, 1) => Some(FaultAccess::Write),
            (1, 0) if high >> 30 & 1 != 0 => Some(FaultAccess::Execute),
            (1, 0) => Some(FaultAccess::Read),
            _ => None,
        }
    }

    /// FR, 103:96 (7.1.3, "Fault Conditions"); `None` for what is no fault of translation.
    ///
    /// The second stage has no present bit: an absent entry and one that does not permit the access
    /// are the same to hardware, and it says that the permission is missing.
    pub(crate) fn reason(high: u64) -> Option<FaultReason> {
        let code = u32::try_from(high >> 32 & 0xff).unwrap_or(0);
        Some(match code {
            // Absent root and context entries; those of scalable mode; of PASIDs.
            0x01 | 0x02 | 0x39 | 0x41 | 0x51 | 0x59 => FaultReason::Blocked,
            // Beyond the width of addresses; absent; not canonical; beyond it again.
            0x04 | 0x71 | 0x80 | 0x83 | 0x84 => FaultReason::Translation,
            // No write, no read permission; supervisor's, no execution, no write, no read.
            0x05 | 0x06 | 0x79 | 0x81 | 0x82 | 0x85 | 0x86 => FaultReason::Permission,
            // Structures and tables that are wrong or could not be read.
            0x03 | 0x07..=0x0c | 0x30 | 0x38 | 0x3a | 0x40 | 0x42 | 0x43 | 0x48 => {
                FaultReason::Tables
            }
            0x50 | 0x52 | 0x58 | 0x5a | 0x5b | 0x70 | 0x72..=0x78 | 0x7a..=0x7c | 0x90 => {
                FaultReason::Tables
            }
            0 => return None,
            // Interrupt requests that were refused are no accesses (0x20 to 0x26).
            0x20..=0x2f => return None,
            other => FaultReason::Other(other),
        })
    }
}
