//! Reads and writes: a caller submits them to an [`IoQueue`] and reaps their completions.

use alloc::sync::Arc;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::Range;
use core::time::Duration;

use dmaspan::Direction;
use dmaspan::regbuf::descriptors::MemoryPageSize;

use crate::access::Access;
use crate::error::Error;
use crate::list::Lists;
use crate::namespace::Namespace;
use crate::queue::{self, Done, Queue, Tell};
use crate::spec::{Capabilities, Command, ControllerInfo, DataPointer, Opcode, Status};

/// How long a command may take: as long as Linux gives it (drivers/nvme/host/core.c, `io_timeout`).
const IO_LIMIT: Duration = Duration::from_secs(30);
/// The most blocks of a command, whose count has 16 bits and begins at 0.
const MAX_BLOCKS: u64 = 1 << 16;

/// Says what a pair of I/O queues is to be like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// How many entries each has. One command less can be in flight.
    pub depth: u16,
    /// Pages of each command for the list of its PRPs or scatter-gather descriptors, up to 4. With
    /// *n* of them, of 4 KiB, a command can have 511 × *n* + 1 pages wherever it begins in the
    /// first.
    pub list_pages: usize,
    /// The interrupt vector by which the controller says that commands have ended, for
    /// [`IoQueue::wait`]; `None` where it is not to say so.
    pub vector: Option<u16>,
}

impl QueueConfig {
    /// Queues of so many entries, with one page for each list, that are polled.
    pub const fn new(depth: u16) -> Self {
        Self { depth, list_pages: 1, vector: None }
    }
}

/// Says which way the bytes of a transfer go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// From blocks to memory.
    Read,
    /// From memory to blocks.
    Write,
}

/// A command in flight. Numbers are below the depth of the queue, and used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommandId(u16);

impl CommandId {
    /// The number, as an index of what the caller keeps for each command.
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// A command that has ended.
#[derive(Debug)]
pub struct Completed<B> {
    /// Which.
    pub id: CommandId,
    /// What it transferred from or to; `None` after a flush.
    pub buffer: Option<B>,
    /// Whether it succeeded.
    pub result: Result<(), Status>,
}

/// A pair of I/O queues. Threads that have one each share nothing but the [`Access`].
///
/// It ends in [`Controller::delete_queue`](crate::Controller::delete_queue) or
/// [`Controller::shutdown`](crate::Controller::shutdown). Dropped instead, it leaks its memory and
/// the buffers in flight: the controller may still use them.
#[must_use = "dropped, it leaks what the controller may still use"]
pub struct IoQueue<A: Access> {
    lent: ManuallyDrop<Lent<A>>,
    /// The controller, by its number among all.
    controller: u64,
    vector: Option<u16>,
    /// The most bytes of a command.
    max_bytes: u64,
}

/// What the controller may use.
struct Lent<A: Access> {
    queue: Queue<A, Option<A::Buffer>>,
    lists: Lists<A::Memory>,
}

impl<A: Access> IoQueue<A> {
    /// Queues of a controller that is reached so, and has that number.
    pub(crate) fn new(
        access: &Arc<A>,
        controller: u64,
        capabilities: Capabilities,
        info: &ControllerInfo,
        id: u16,
        config: QueueConfig,
    ) -> Result<Self, Error> {
        let page = MemoryPageSize::new(capabilities.min_page())?;
        let QueueConfig { depth, list_pages, vector } = config;
        let queue = Queue::new(access, capabilities, id, depth)?;
        let lists = Lists::new(access, page, info.sgls, depth - 1, list_pages)?;
        let max_bytes = info.max_transfer.unwrap_or(u64::MAX);
        let lent = ManuallyDrop::new(Lent { queue, lists });
        Ok(Self { lent, controller, vector, max_bytes })
    }

    pub(crate) fn queue(&self) -> &Queue<A, Option<A::Buffer>> {
        &self.lent.queue
    }

    /// Frees everything.
    ///
    /// # Context
    ///
    /// The controller does not use the queues any more.
    pub(crate) fn release(self) {
        drop(ManuallyDrop::into_inner(self.lent));
    }

    /// Returns how many commands can be in flight.
    pub fn slots(&self) -> usize {
        usize::from(self.lent.queue.depth) - 1
    }

    /// Returns how many commands are in flight, or ended and not reaped.
    pub fn in_flight(&self) -> usize {
        self.lent.queue.in_flight()
    }

    /// Begins to transfer `range` of a buffer from or to the blocks from `lba` on, and does not
    /// wait: [`push`](Self::push) and [`ring`](Self::ring).
    ///
    /// # Errors
    ///
    /// As of [`push`](Self::push), with nothing begun.
    #[inline]
    pub fn submit(
        &mut self,
        transfer: Transfer,
        namespace: &Namespace,
        lba: u64,
        buffer: &A::Buffer,
        range: Range<u64>,
    ) -> Result<CommandId, Error> {
        let id = self.push(transfer, namespace, lba, buffer, range)?;
        self.ring();
        Ok(id)
    }

    /// Enters a transfer of `range` of a buffer from or to the blocks from `lba` on. It begins when
    /// the controller is told: by [`ring`](Self::ring), or by whatever is called next to submit, to
    /// [`reap`](Self::reap) or to [`wait`](Self::wait). Telling it is a write to the device, which
    /// costs more than all else; a caller with several transfers enters them all first.
    ///
    /// The range is imported, which takes a few steps, and becomes PRPs or a scatter-gather list in
    /// memory that the queue has: nothing is mapped, and nothing allocated. The queue holds a clone
    /// of `buffer` until [`reap`](Self::reap) gives it back.
    ///
    /// # Errors
    ///
    /// With nothing entered: [`Error::Full`]; [`Error::NotBlocks`], [`Error::Blocks`],
    /// [`Error::TooLarge`] and [`Error::Import`] for a range that cannot be transferred by a
    /// command; [`Error::Foreign`]; [`Error::Descriptors`] where its pages need more entries than
    /// the list has, or where pieces meet amid a page and the controller takes no scatter-gather
    /// lists.
    #[inline]
    pub fn push(
        &mut self,
        transfer: Transfer,
        namespace: &Namespace,
        lba: u64,
        buffer: &A::Buffer,
        range: Range<u64>,
    ) -> Result<CommandId, Error> {
        self.enter(transfer, namespace, lba, buffer, range, Tell::Reaper).map(CommandId)
    }

    /// Enters a transfer of `bytes` by two PRPs that the caller wrote, and holds nothing for it.
    /// Everything else is as of [`push`](Self::push).
    ///
    /// It is there to measure what a registered buffer costs. A driver has no use for it.
    ///
    /// # Errors
    ///
    /// As of [`push`](Self::push).
    ///
    /// # Safety
    ///
    /// Until the command has ended, or the controller has been disabled or has deleted the queue,
    /// it may use the bytes that the PRPs tell, as [`SharedMemory`] says.
    ///
    /// [`SharedMemory`]: crate::access::SharedMemory
    #[expect(unsafe_code, reason = "the caller promises that the memory is the controller's")]
    #[inline]
    pub unsafe fn push_prps(
        &mut self,
        transfer: Transfer,
        namespace: &Namespace,
        lba: u64,
        bytes: u64,
        prps: [u64; 2],
    ) -> Result<CommandId, Error> {
        let command = self.command(transfer, namespace, lba, bytes)?;
        let command = Command { data: DataPointer::Prps(prps), ..command };
        self.lent.queue.push(command, None, Tell::Reaper).map(CommandId)
    }

    /// Tells the controller of what was entered.
    #[inline]
    pub fn ring(&mut self) {
        self.lent.queue.ring();
    }

    /// Begins to make durable what was written, and does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::Full`]; [`Error::Foreign`].
    pub fn submit_flush(&mut self, namespace: &Namespace) -> Result<CommandId, Error> {
        namespace.check_owner(self.controller)?;
        let id = self.lent.queue.push(flush(namespace), None, Tell::Reaper)?;
        self.ring();
        Ok(CommandId(id))
    }

    /// Calls `each` with the commands that have ended, in the order of their completions, and
    /// returns how many they were. It does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::UnexpectedCompletion`], after `each` was called with those before it.
    #[inline]
    pub fn reap(&mut self, mut each: impl FnMut(Completed<A::Buffer>)) -> Result<usize, Error> {
        self.lent.queue.reap(|id, Done { held, status, .. }| {
            each(Completed { id: CommandId(id), buffer: held, result: status.ok() });
        })
    }

    /// Waits for an interrupt that says that a command has ended, no longer than `limit`; not at
    /// all where there is something to [`reap`](Self::reap), or the queue has no
    /// [vector](QueueConfig::vector). It may end without anything to reap.
    pub fn wait(&mut self, limit: Duration) {
        self.ring();
        let queue = &self.lent.queue;
        if let Some(vector) = self.vector
            && !queue.has_ended()
        {
            queue.access.wait(vector, limit);
        }
    }

    /// Asks the controller's status whether commands in flight can end at all: for programs that
    /// reap and have found nothing for long. [`read`](Self::read) and its likes ask by themselves.
    ///
    /// # Errors
    ///
    /// [`Error::Fatal`] and [`Error::Gone`].
    pub fn check(&self) -> Result<(), Error> {
        queue::check(&*self.lent.queue.access)
    }

    /// Reads blocks from `lba` on into `range` of a buffer, by as many commands as that takes, one
    /// after the other. What else is in flight stays to be [reaped](Self::reap).
    ///
    /// # Errors
    ///
    /// As of [`submit`](Self::submit); [`Error::Command`]; [`Error::Timeout`], [`Error::Fatal`] or
    /// [`Error::Gone`] where a command does not end, and then the queue keeps the buffer until it
    /// has. Commands before the one that failed are done.
    pub fn read(
        &mut self,
        namespace: &Namespace,
        lba: u64,
        buffer: &A::Buffer,
        range: Range<u64>,
    ) -> Result<(), Error> {
        self.transfer(Transfer::Read, namespace, lba, buffer, range)
    }

    /// Writes `range` of a buffer to blocks from `lba` on, as [`read`](Self::read) reads.
    ///
    /// # Errors
    ///
    /// As of [`read`](Self::read).
    pub fn write(
        &mut self,
        namespace: &Namespace,
        lba: u64,
        buffer: &A::Buffer,
        range: Range<u64>,
    ) -> Result<(), Error> {
        self.transfer(Transfer::Write, namespace, lba, buffer, range)
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    ///
    /// As of [`read`](Self::read).
    pub fn flush(&mut self, namespace: &Namespace) -> Result<(), Error> {
        namespace.check_owner(self.controller)?;
        let id = self.lent.queue.submit_awaited(flush(namespace), None)?;
        self.finish(id, Opcode::Flush)
    }

    fn transfer(
        &mut self,
        transfer: Transfer,
        namespace: &Namespace,
        lba: u64,
        buffer: &A::Buffer,
        range: Range<u64>,
    ) -> Result<(), Error> {
        // All of it is judged before any of it is done.
        namespace.count(lba, range.end.saturating_sub(range.start))?;
        let block = namespace.block_bytes();
        let largest =
            whole_blocks(self.max_bytes(namespace).min(self.lent.lists.max_bytes()), block);
        let Range { mut start, end } = range;
        while start < end {
            self.lent.queue.make_room()?;
            let at = lba + (start - range.start) / block;
            let mut bytes = largest.min(end - start);
            let id = loop {
                let part = start..start + bytes;
                match self.enter(transfer, namespace, at, buffer, part, Tell::Waiter) {
                    // Fewer bytes need fewer entries, and end before pieces meet amid a page.
                    Err(Error::Descriptors(_)) if bytes > block => {
                        bytes = whole_blocks(bytes / 2, block);
                    }
                    entered => break entered?,
                }
            };
            self.ring();
            self.finish(id, opcode(transfer))?;
            start += bytes;
        }
        Ok(())
    }

    #[inline]
    fn enter(
        &mut self,
        transfer: Transfer,
        namespace: &Namespace,
        lba: u64,
        buffer: &A::Buffer,
        range: Range<u64>,
        tell: Tell,
    ) -> Result<u16, Error> {
        let bytes = range.end.saturating_sub(range.start);
        let command = self.command(transfer, namespace, lba, bytes)?;
        let direction = match transfer {
            Transfer::Read => Direction::FromDevice,
            Transfer::Write => Direction::ToDevice,
        };
        let Lent { queue, lists } = &mut *self.lent;
        let slot = queue.vacant()?;
        let mapped = queue.access.buffer(buffer).ok_or(Error::Foreign)?;
        let data = lists.describe(slot, mapped.import(range.start, bytes, direction)?)?;
        queue.push(Command { data, ..command }, Some(buffer.clone()), tell)
    }

    /// The command of a transfer, without where its bytes are.
    #[inline]
    fn command(
        &self,
        transfer: Transfer,
        namespace: &Namespace,
        lba: u64,
        bytes: u64,
    ) -> Result<Command, Error> {
        // Another one's blocks may be smaller: the controller would transfer more than `bytes`, and
        // take what follows their addresses for more of them.
        namespace.check_owner(self.controller)?;
        let count = namespace.count(lba, bytes)?;
        let max = self.max_bytes(namespace);
        if bytes > max {
            return Err(Error::TooLarge { bytes, max });
        }
        // No more than fit were let through.
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        Ok(Command::blocks(opcode(transfer), namespace.id(), lba, count))
    }

    fn finish(&mut self, id: u16, opcode: Opcode) -> Result<(), Error> {
        let done = self.lent.queue.wait(id, IO_LIMIT)?;
        done.status.ok().map_err(|status| Error::Command { opcode, status })
    }

    /// The most bytes that a command can have by its length alone.
    fn max_bytes(&self, namespace: &Namespace) -> u64 {
        self.max_bytes.min(MAX_BLOCKS * namespace.block_bytes())
    }
}

impl<A: Access> fmt::Debug for IoQueue<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queue = &self.lent.queue;
        let mut fields = f.debug_struct("IoQueue");
        fields.field("id", &queue.id).field("depth", &queue.depth);
        fields.field("in_flight", &queue.in_flight()).finish_non_exhaustive()
    }
}

fn flush(namespace: &Namespace) -> Command {
    Command { namespace: namespace.id(), ..Command::new(Opcode::Flush, [0; 3]) }
}

fn opcode(transfer: Transfer) -> Opcode {
    match transfer {
        Transfer::Read => Opcode::Read,
        Transfer::Write => Opcode::Write,
    }
}

/// As many bytes of whole blocks, one block at least.
fn whole_blocks(bytes: u64, block: u64) -> u64 {
    (bytes & !(block - 1)).max(block)
}
