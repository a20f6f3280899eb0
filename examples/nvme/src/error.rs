//! The errors of the driver.

use core::time::Duration;

use dmaspan::regbuf::{ImportError, descriptors};

use crate::access::AllocateError;
use crate::spec::{Opcode, Status};

/// The reason why a controller was not started, or a command not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no memory for queues.
    #[error("there are no {bytes:#x} bytes of shared memory: {source}")]
    Allocate {
        /// How many bytes.
        bytes: u64,
        /// Why.
        source: AllocateError,
    },
    /// It does not have the NVM command set, which is the one with reads and writes of blocks.
    #[error("the controller has no NVM command set (CAP {cap:#x})")]
    CommandSet {
        /// Its capabilities.
        cap: u64,
    },
    /// The registers that it should have lie beyond those that can be reached.
    #[error("the driver needs registers up to {needed:#x}, but there are only {len:#x} bytes")]
    Registers {
        /// The end of those that are needed.
        needed: u64,
        /// How many bytes there are.
        len: u64,
    },
    /// Nothing answers at its registers.
    #[error("the controller is gone: its registers read as all ones")]
    Gone,
    /// It reports that it can do nothing more until it is reset.
    #[error("the controller has failed (CSTS {csts:#x})")]
    Fatal {
        /// Its status.
        csts: u32,
    },
    /// It did not do something in time.
    #[error("{what} took longer than {limit:?}")]
    Timeout {
        /// What.
        what: Awaited,
        /// How long it had.
        limit: Duration,
    },
    /// It completed something that it was not told to do. The queue goes on behind it.
    #[error(
        "queue {queue} has a completion of command {command} of queue {sq}, which is not in flight"
    )]
    UnexpectedCompletion {
        /// The queue that has the completion.
        queue: u16,
        /// The queue that it says it is for.
        sq: u16,
        /// The command that it says has ended.
        command: u16,
    },
    /// It refused or failed a command.
    #[error("{opcode:?} failed: {status}")]
    Command {
        /// The command.
        opcode: Opcode,
        /// Why.
        status: Status,
    },
    /// The controller has no queues of that many entries.
    #[error("a queue cannot have {depth} entries: this controller has 2 to {max}")]
    Depth {
        /// How many were asked for.
        depth: u16,
        /// How many there can be.
        max: u32,
    },
    /// A command of a queue can have only so many pages of a list.
    #[error("the list of a command cannot have {pages} pages: it has up to {max}")]
    ListPages {
        /// How many were asked for.
        pages: usize,
        /// How many there can be.
        max: usize,
    },
    /// There is no such interrupt.
    #[error("there is no interrupt vector {vector}: there are {count}")]
    Vector {
        /// Which was asked for.
        vector: u16,
        /// How many there are.
        count: u16,
    },
    /// All queues are in use.
    #[error("all {count} I/O queues that the controller grants are in use")]
    NoQueue {
        /// How many there are.
        count: u16,
    },
    /// As many commands are in flight as the queue takes.
    #[error("{in_flight} commands are in flight, which fill the queue: reap completions first")]
    Full {
        /// How many.
        in_flight: usize,
    },
    /// There is no such namespace, or it has no blocks.
    #[error("there is no namespace {id}")]
    NoNamespace {
        /// Its number.
        id: u32,
    },
    /// Its blocks are formatted in a way that this driver does not know.
    #[error("namespace {id} has blocks of 2^{block_lg2} bytes with {metadata} bytes of metadata")]
    BlockFormat {
        /// The namespace.
        id: u32,
        /// log2 of the size of a block in bytes.
        block_lg2: u32,
        /// Metadata of each, in bytes.
        metadata: u32,
    },
    /// Not whole blocks, or none.
    #[error("{bytes:#x} bytes are not whole blocks of {block:#x}")]
    NotBlocks {
        /// How many bytes.
        bytes: u64,
        /// The size of a block.
        block: u64,
    },
    /// Beyond the end of the namespace.
    #[error("{count:#x} blocks from {lba:#x} on leave the {blocks:#x} blocks of the namespace")]
    Blocks {
        /// The first block.
        lba: u64,
        /// How many.
        count: u64,
        /// How many the namespace has.
        blocks: u64,
    },
    /// More bytes than a command can have.
    #[error("a command cannot transfer {bytes:#x} bytes: it transfers up to {max:#x}")]
    TooLarge {
        /// How many.
        bytes: u64,
        /// The most.
        max: u64,
    },
    /// The buffer, the namespace or the queue belongs to another controller.
    #[error("the buffer, the namespace or the queue belongs to another controller")]
    Foreign,
    /// The buffer does not have those bytes, or not for that direction.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The controller cannot be told where the bytes are by one command.
    #[error(transparent)]
    Descriptors(#[from] descriptors::Error),
}

/// Says what a controller did not do in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// `CSTS.RDY` after it was disabled.
    Disabled,
    /// `CSTS.RDY` after it was enabled.
    Enabled,
    /// `CSTS.SHST` after it was told to shut down.
    ShutDown,
    /// The completion of a command. Its slot stays taken, since the controller may still use the
    /// memory of it, until the completion comes or the queue is deleted.
    Completion {
        /// The queue.
        queue: u16,
        /// The command.
        command: u16,
    },
}

impl core::fmt::Display for Awaited {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Disabled => f.write_str("disabling the controller"),
            Self::Enabled => f.write_str("enabling the controller"),
            Self::ShutDown => f.write_str("shutting the controller down"),
            Self::Completion { queue, command } => write!(f, "command {command} of queue {queue}"),
        }
    }
}
