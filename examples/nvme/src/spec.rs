//! Registers, commands and structures, as bits.
//!
//! Sections are of the NVM Express Base Specification 2.0, unless they say otherwise.

use alloc::string::String;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

use dmaspan::DmaAddr;

/// Controller Capabilities (section 3.1.3.1).
pub(crate) const CAP: u64 = 0x00;
/// Controller Configuration (section 3.1.3.5).
pub(crate) const CC: u64 = 0x14;
/// Controller Status (section 3.1.3.6).
pub(crate) const CSTS: u64 = 0x1c;
/// Admin Queue Attributes (section 3.1.3.8).
pub(crate) const AQA: u64 = 0x24;
/// Admin Submission Queue Base Address (section 3.1.3.9).
pub(crate) const ASQ: u64 = 0x28;
/// Admin Completion Queue Base Address (section 3.1.3.10).
pub(crate) const ACQ: u64 = 0x30;
/// The first doorbell (NVMe over PCIe Transport Specification 1.0, section 3.1.2).
pub(crate) const DOORBELLS: u64 = 0x1000;

/// `CC.EN`.
pub(crate) const CC_ENABLE: u32 = 1;
/// `CC.SHN`, and its value for a normal shutdown.
pub(crate) const CC_SHUTDOWN: u32 = 3 << 14;
pub(crate) const CC_SHUTDOWN_NORMAL: u32 = 1 << 14;
/// `CC.IOSQES` and `CC.IOCQES`: log2 of the size of entries.
const CC_ENTRY_SIZES: u32 = 6 << 16 | 4 << 20;

/// What enables a controller with memory pages of 2^(12 + `mps`) bytes, the NVM command set and
/// round robin.
pub(crate) const fn cc_enabled(mps: u32) -> u32 {
    CC_ENABLE | mps << 7 | CC_ENTRY_SIZES
}

/// `CSTS.RDY`.
pub(crate) const CSTS_READY: u32 = 1;
/// `CSTS.CFS`.
pub(crate) const CSTS_FATAL: u32 = 1 << 1;
/// `CSTS.SHST`, and its value when a shutdown is complete.
pub(crate) const CSTS_SHUTDOWN: u32 = 3 << 2;
pub(crate) const CSTS_SHUTDOWN_DONE: u32 = 2 << 2;
/// What any register reads where nothing answers.
pub(crate) const GONE: u32 = u32::MAX;

/// The size of a memory page, by `CC.MPS`.
pub(crate) const fn page_bytes(mps: u32) -> u64 {
    1 << (12 + mps)
}

/// The bits of `value` from `shift` on that `mask` has.
fn field(value: u64, shift: u32, mask: u32) -> u32 {
    // What is masked fits.
    u32::try_from(value >> shift & u64::from(mask)).unwrap_or(mask)
}

/// The register CAP.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capabilities(pub(crate) u64);

impl Capabilities {
    /// The most entries of a queue: `MQES`, which counts from 0.
    pub(crate) fn max_entries(self) -> u32 {
        field(self.0, 0, 0xffff) + 1
    }

    /// How long enabling and disabling take at most: `TO`, in 500 ms.
    pub(crate) fn timeout(self) -> Duration {
        Duration::from_millis(500 * u64::from(field(self.0, 24, 0xff).max(1)))
    }

    /// The distance between doorbells, in bytes: `DSTRD`.
    fn doorbell_stride(self) -> u64 {
        4 << field(self.0, 32, 0xf)
    }

    /// Where the doorbells of a queue are: the submission queue's, and the completion queue's.
    pub(crate) fn doorbells(self, queue: u16) -> (u64, u64) {
        let submission = DOORBELLS + 2 * u64::from(queue) * self.doorbell_stride();
        (submission, submission + self.doorbell_stride())
    }

    /// Whether it has the NVM command set: `CSS`, bit 0.
    pub(crate) fn has_nvm(self) -> bool {
        field(self.0, 37, 1) != 0
    }

    /// The smallest memory page, as `CC.MPS` has it: `MPSMIN`.
    pub(crate) fn min_page(self) -> u32 {
        field(self.0, 48, 0xf)
    }
}

/// Says what a command does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Opcode {
    /// Delete I/O Submission Queue (section 5.7).
    DeleteSubmissionQueue,
    /// Create I/O Submission Queue (section 5.5).
    CreateSubmissionQueue,
    /// Delete I/O Completion Queue (section 5.6).
    DeleteCompletionQueue,
    /// Create I/O Completion Queue (section 5.4).
    CreateCompletionQueue,
    /// Identify (section 5.17).
    Identify,
    /// Set Features (section 5.27).
    SetFeatures,
    /// Flush (section 7.1).
    Flush,
    /// Write (NVM Command Set Specification 1.0, section 3.2.6).
    Write,
    /// Read (NVM Command Set Specification 1.0, section 3.2.4).
    Read,
}

impl Opcode {
    const fn code(self) -> u64 {
        match self {
            Self::DeleteSubmissionQueue | Self::Flush => 0x00,
            Self::CreateSubmissionQueue | Self::Write => 0x01,
            Self::Read => 0x02,
            Self::DeleteCompletionQueue => 0x04,
            Self::CreateCompletionQueue => 0x05,
            Self::Identify => 0x06,
            Self::SetFeatures => 0x09,
        }
    }
}

/// Where the bytes of a command are: the field DPTR, and which kind it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataPointer {
    None,
    Prps([u64; 2]),
    Sgl([u64; 2]),
}

/// A submission queue entry of 64 bytes, as eight words (section 3.3.3.1).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Command {
    pub(crate) opcode: Opcode,
    pub(crate) namespace: u32,
    pub(crate) data: DataPointer,
    /// CDW10, CDW11 and CDW12.
    pub(crate) dwords: [u32; 3],
}

impl Command {
    pub(crate) const fn new(opcode: Opcode, dwords: [u32; 3]) -> Self {
        Self { opcode, namespace: 0, data: DataPointer::None, dwords }
    }

    /// Identify: `CNS` 0 is of a namespace, 1 of the controller.
    pub(crate) const fn identify(cns: u32, namespace: u32, page: DmaAddr) -> Self {
        let data = DataPointer::Prps([page.get(), 0]);
        Self { namespace, data, ..Self::new(Opcode::Identify, [cns, 0, 0]) }
    }

    /// Asks for so many I/O queues of either kind: feature 07h, which counts from 0 (section
    /// 5.27.1.5).
    pub(crate) fn number_of_queues(count: u16) -> Self {
        let count = u32::from(count.max(1)) - 1;
        Self::new(Opcode::SetFeatures, [0x07, count << 16 | count, 0])
    }

    /// A completion queue that is contiguous, with interrupts by that vector, or without any.
    pub(crate) fn create_completion_queue(
        id: u16,
        depth: u16,
        at: DmaAddr,
        vector: Option<u16>,
    ) -> Self {
        // PC, bit 0; IEN, bit 1; and IV, bits 31:16 of CDW11.
        let interrupts = vector.map_or(0, |vector| u32::from(vector) << 16 | 1 << 1);
        let dwords = [queue_dword(id, depth), interrupts | 1, 0];
        let data = DataPointer::Prps([at.get(), 0]);
        Self { data, ..Self::new(Opcode::CreateCompletionQueue, dwords) }
    }

    /// A submission queue that is contiguous, with the completion queue of the same number.
    pub(crate) fn create_submission_queue(id: u16, depth: u16, at: DmaAddr) -> Self {
        let dwords = [queue_dword(id, depth), u32::from(id) << 16 | 1, 0];
        let data = DataPointer::Prps([at.get(), 0]);
        Self { data, ..Self::new(Opcode::CreateSubmissionQueue, dwords) }
    }

    pub(crate) fn delete_queue(opcode: Opcode, id: u16) -> Self {
        Self::new(opcode, [u32::from(id), 0, 0])
    }

    /// A read or a write of so many blocks, at least one.
    #[inline]
    pub(crate) fn blocks(opcode: Opcode, namespace: u32, lba: u64, count: u32) -> Self {
        let [low, high] = [field(lba, 0, u32::MAX), field(lba, 32, u32::MAX)];
        Self { namespace, ..Self::new(opcode, [low, high, count.saturating_sub(1)]) }
    }

    /// The entry, before it is made little-endian.
    #[inline]
    pub(crate) fn words(self, id: u16) -> [u64; 8] {
        // PSDT, bits 15:14 of the first dword.
        let (kind, [low, high]) = match self.data {
            DataPointer::None => (0, [0; 2]),
            DataPointer::Prps(pointer) => (0, pointer),
            DataPointer::Sgl(pointer) => (1 << 14, pointer),
        };
        let first = self.opcode.code() | kind | u64::from(id) << 16;
        let [cdw10, cdw11, cdw12] = self.dwords.map(u64::from);
        let namespace = u64::from(self.namespace) << 32;
        [first | namespace, 0, 0, low, high, cdw10 | cdw11 << 32, cdw12, 0]
    }
}

/// CDW10 of creating a queue: its number, and its size, which counts from 0.
fn queue_dword(id: u16, depth: u16) -> u32 {
    u32::from(depth.saturating_sub(1)) << 16 | u32::from(id)
}

/// Words of a submission queue entry.
pub(crate) const COMMAND_WORDS: usize = 8;
/// Words of a completion queue entry.
pub(crate) const COMPLETION_WORDS: usize = 2;

/// A completion queue entry of 16 bytes (section 3.3.3.2).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    /// DW0: what the command answers.
    pub(crate) result: u32,
    /// The submission queue that it was in.
    pub(crate) queue: u16,
    pub(crate) command: u16,
    pub(crate) status: Status,
}

/// The phase tag in the second word of an entry.
pub(crate) const PHASE: u64 = 1 << 48;

impl Completion {
    #[inline]
    pub(crate) fn new(first: u64, second: u64) -> Self {
        let bits = |shift: u32| u16::try_from(second >> shift & 0xffff).unwrap_or(0);
        Self {
            result: field(first, 0, u32::MAX),
            queue: bits(16),
            command: bits(32),
            status: Status(bits(48) >> 1),
        }
    }
}

/// Says how a command ended: the status field of its completion (section 3.3.3.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(u16);

impl Status {
    /// `SCT`: 0 is generic, 1 of this command, 2 of the medium or of data integrity.
    pub const fn kind(self) -> u8 {
        self.0.to_le_bytes()[1] & 7
    }

    /// `SC`: what happened, of its kind.
    pub const fn code(self) -> u8 {
        self.0.to_le_bytes()[0]
    }

    /// Nothing went wrong.
    pub const fn is_success(self) -> bool {
        self.kind() == 0 && self.code() == 0
    }

    /// `DNR`: it would fail again.
    pub const fn is_final(self) -> bool {
        self.0 & 1 << 14 != 0
    }

    /// The status as a result.
    ///
    /// # Errors
    ///
    /// Itself, if it is no success.
    pub const fn ok(self) -> Result<(), Self> {
        if self.is_success() { Ok(()) } else { Err(self) }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let retry = if self.is_final() { ", do not retry" } else { "" };
        write!(f, "status type {:#x}, code {:#x}{retry}", self.kind(), self.code())
    }
}

/// A structure that Identify gives, in memory that the controller has written.
pub(crate) struct Identified<'m>(pub(crate) &'m [AtomicU64]);

impl Identified<'_> {
    /// How many bytes it has.
    pub(crate) const BYTES: u64 = 4096;

    /// The byte at an offset.
    fn byte(&self, offset: usize) -> u8 {
        let word = self.0.get(offset / 8).map_or(0, |word| word.load(Ordering::Relaxed));
        // Memory has it little-endian.
        word.to_ne_bytes().get(offset % 8).copied().unwrap_or(0)
    }

    fn number(&self, offset: usize, bytes: usize) -> u64 {
        (offset..offset + bytes).rev().fold(0, |high, at| high << 8 | u64::from(self.byte(at)))
    }

    /// Text, which is padded with spaces (section 1.4.2).
    fn text(&self, offset: usize, bytes: usize) -> String {
        let printable = |byte: u8| if matches!(byte, b' '..=b'~') { char::from(byte) } else { '?' };
        let text: String = (offset..offset + bytes).map(|at| printable(self.byte(at))).collect();
        text.trim().into()
    }
}

/// The report of a controller about itself (section 5.17.2.1).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ControllerInfo {
    /// `SN`.
    pub serial: String,
    /// `MN`.
    pub model: String,
    /// The most bytes of a command, as `MDTS` says; `None` where there is no limit.
    pub max_transfer: Option<u64>,
    /// Which scatter-gather lists it takes, as `SGLS` says.
    pub sgls: Sgls,
}

/// Says which scatter-gather lists a controller takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sgls {
    /// None.
    None,
    /// Of any bytes.
    Bytes,
    /// Of whole dwords.
    Dwords,
}

impl ControllerInfo {
    /// `MDTS` counts in the smallest pages, of 2^(12 + `min_page`) bytes.
    pub(crate) fn new(page: &Identified<'_>, min_page: u32) -> Self {
        let max_transfer = match page.byte(77) {
            0 => None,
            mdts => 1_u64.checked_shl(12 + min_page + u32::from(mdts)),
        };
        let sgls = match page.byte(536) & 3 {
            1 => Sgls::Bytes,
            2 => Sgls::Dwords,
            _ => Sgls::None,
        };
        Self { serial: page.text(4, 20), model: page.text(24, 40), max_transfer, sgls }
    }
}

/// What a namespace says of its blocks (NVM Command Set Specification 1.0, section 4.1.5.1).
pub(crate) struct NamespaceInfo {
    /// `NSZE`.
    pub(crate) blocks: u64,
    /// `LBADS` of the format that it has.
    pub(crate) block_lg2: u32,
    /// `MS` of it.
    pub(crate) metadata: u32,
}

impl NamespaceInfo {
    pub(crate) fn new(page: &Identified<'_>) -> Self {
        // FLBAS: bits 6:5 are the high ones of the index.
        let flbas = usize::from(page.byte(26));
        let format = 128 + 4 * (flbas & 0xf | flbas >> 1 & 0x30);
        Self {
            blocks: page.number(0, 8),
            block_lg2: page.byte(format + 2).into(),
            metadata: field(page.number(format, 2), 0, 0xffff),
        }
    }
}
