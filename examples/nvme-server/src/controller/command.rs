//! Commands, completions and their status (NVM Express Base Specification 2.0, sections 3.3.3 and
//! 4.2).

use crate::bytes::{put, u16_at, u32_at, u64_at};

/// Bytes of a command, and log2 of them.
pub(super) const COMMAND_LG2: u32 = 6;
pub(super) const COMMAND: usize = 1 << COMMAND_LG2;
/// Bytes of a completion, and log2 of them.
pub(super) const COMPLETION_LG2: u32 = 4;
const COMPLETION: usize = 1 << COMPLETION_LG2;

/// The 64 bytes of a command.
#[derive(Clone, Copy, Debug)]
pub(super) struct Command([u8; COMMAND]);

impl Command {
    pub(super) fn new(bytes: [u8; COMMAND]) -> Self {
        Self(bytes)
    }

    /// A dword of the command; there are 16.
    pub(super) fn dword(&self, n: usize) -> u32 {
        u32_at(&self.0, 4 * n).unwrap_or_default()
    }

    fn qword(&self, dword: usize) -> u64 {
        u64_at(&self.0, 4 * dword).unwrap_or_default()
    }

    pub(super) fn opcode(&self) -> u8 {
        let [opcode, ..] = self.0;
        opcode
    }

    /// Whether its data is described by anything but PRPs, or it is half of a pair.
    pub(super) fn is_unusual(&self) -> bool {
        let [_, flags, ..] = self.0;
        flags != 0
    }

    pub(super) fn id(&self) -> u16 {
        u16_at(&self.0, 2).unwrap_or_default()
    }

    pub(super) fn namespace(&self) -> u32 {
        self.dword(1)
    }

    pub(super) fn prp1(&self) -> u64 {
        self.qword(6)
    }

    pub(super) fn prp2(&self) -> u64 {
        self.qword(8)
    }

    /// The first block of a transfer, and how many.
    pub(super) fn blocks(&self) -> (u64, u64) {
        (self.qword(10), u64::from(self.dword(12) & 0xffff) + 1)
    }
}

/// How a command ended: status code type and status code, and whether it is pointless to repeat it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Status(pub(super) u16);

/// The bit Do Not Retry.
const FINAL: u16 = 1 << 14;

impl Status {
    pub(super) const SUCCESS: Self = Self(0);
    pub(super) const INVALID_OPCODE: Self = Self(0x01 | FINAL);
    pub(super) const INVALID_FIELD: Self = Self(0x02 | FINAL);
    /// The guest's memory is not there, or not for this.
    pub(super) const DATA_TRANSFER: Self = Self(0x04 | FINAL);
    pub(super) const INVALID_NAMESPACE: Self = Self(0x0b | FINAL);
    pub(super) const PRP_OFFSET: Self = Self(0x13 | FINAL);
    pub(super) const OUT_OF_RANGE: Self = Self(0x80 | FINAL);
    pub(super) const INVALID_COMPLETION_QUEUE: Self = Self(0x100 | FINAL);
    pub(super) const INVALID_QUEUE: Self = Self(0x101 | FINAL);
    pub(super) const INVALID_QUEUE_SIZE: Self = Self(0x102 | FINAL);
    pub(super) const TOO_MANY_EVENTS: Self = Self(0x105 | FINAL);
    pub(super) const INVALID_VECTOR: Self = Self(0x108 | FINAL);
    pub(super) const INVALID_LOG: Self = Self(0x109 | FINAL);
    pub(super) const INVALID_DELETION: Self = Self(0x10c | FINAL);
    pub(super) const WRITE_FAULT: Self = Self(0x280);
    pub(super) const READ_FAULT: Self = Self(0x281);
}

/// A completion without what its queue adds: the phase tag.
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    pub(super) command: u16,
    pub(super) submission: u16,
    /// Up to where the submission queue has been read.
    pub(super) head: u16,
    pub(super) result: u32,
    pub(super) status: Status,
}

impl Completion {
    pub(super) fn bytes(self, phase: u16) -> [u8; COMPLETION] {
        let mut bytes = [0; COMPLETION];
        put(&mut bytes, 0, &self.result.to_le_bytes());
        put(&mut bytes, 8, &self.head.to_le_bytes());
        put(&mut bytes, 10, &self.submission.to_le_bytes());
        put(&mut bytes, 12, &self.command.to_le_bytes());
        put(&mut bytes, 14, &(self.status.0 << 1 | phase).to_le_bytes());
        bytes
    }
}
