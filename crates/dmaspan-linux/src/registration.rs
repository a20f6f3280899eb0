//! A registration makes a pin: memory registered with io_uring, or locked.
//!
//! A registered buffer is the long-term pin that an ordinary process can have: its pages keep their
//! frames (io_uring_register(2), `IORING_REGISTER_BUFFERS`). A pinner's pins share rings, whose
//! tables of buffers are filled and emptied slot by slot, so a pin costs no file descriptor. The
//! tables are short, and a pinner has more of them as it has more pins: for each huge page of a
//! buffer kernels before 7.2 look through all of the table, so as to charge none twice
//! (io_uring/rsrc.c, `headpage_already_acct`). So they charge a huge page twice that is in two
//! tables.
//!
//! Sparse tables need Linux 5.19. Older kernels lack them, and containers often forbid io_uring.
//! Then memory is locked (mlock(2)): it stays resident, and the kernel may still move it to other
//! frames, so nobody may use its frame numbers.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

use dmaspan::{Errno, UserRange};

use crate::mem::Memory;
use crate::os::{self, Size};
use crate::sys::uring::{Buffer, BufferTable};
use crate::sys::{self};

/// Says how memory is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PinMethod {
    /// Registered as io_uring buffers: neither swapped nor moved. Needs Linux 5.19, for sparse
    /// tables of buffers.
    IoUring,
    /// Locked with mlock(2): not swapped, but the kernel may move it.
    Mlock,
}

impl fmt::Display for PinMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::IoUring => "io_uring",
            Self::Mlock => "mlock",
        })
    }
}

/// The most slots that Linux allows a table (`IORING_MAX_REG_BUFFERS`), and that a pinner has.
pub(crate) const SLOTS: u32 = 1 << 14;
/// The slots of each of a pinner's tables. Huge pages are registered in a sixth to a tenth of the
/// time that a table of all slots takes.
const TABLE_SLOTS: u32 = 1 << 9;

/// The longest buffer, in bytes. Kernels before the limit was raised refuse more than 1 GiB, and a
/// system call for each GiB costs nothing beside pinning it. Buffers are cut at multiples of it, so
/// that no huge page is in two of them.
pub(crate) const CHUNK: u64 = 1 << 30;

/// The longest buffer of a range of up to [`SHORT_RANGE`]. The kernel writes down each page of a
/// buffer before it notes any: of 64 MiB these are 128 KiB, which stay in a CPU's cache, and base
/// pages are pinned in less time than by buffers of 1 GiB.
const SHORT_CHUNK: u64 = 64 << 20;
/// The longest range whose buffers are short.
const SHORT_RANGE: u64 = 64 << 30;

/// The longest buffer of a range, of pages of so many bytes.
fn chunk_of(range: UserRange, page_size: u64) -> u64 {
    match range.checked_len() {
        Some(..=SHORT_RANGE) if page_size <= SHORT_CHUNK => SHORT_CHUNK,
        _ => CHUNK,
    }
}

/// The reason why memory was not pinned, or cannot be. Nothing stays pinned by the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// There is no ring to register with, or none for more pins: a pinner opens another one for
    /// every 512 buffers, of 64 MiB most of them.
    #[error("io_uring cannot be used ({}): {}", os::words(*errno), setup_advice(*errno))]
    Unavailable {
        /// What the kernel answered.
        errno: Errno,
    },
    /// The process may not lock so much memory.
    #[error(
        "pinning the {} of {range} exceeds the limit of {} of locked memory (RLIMIT_MEMLOCK), of \
         which some may be in use: raise it with `ulimit -l {}` (KiB) or run with CAP_IPC_LOCK",
        Size(*needed), Size(*limit), limit.saturating_add(*needed).div_ceil(1024)
    )]
    MemlockExceeded {
        /// The range asked for.
        range: UserRange,
        /// Its length, in bytes.
        needed: u64,
        /// The limit, in bytes.
        limit: u64,
    },
    /// The kernel has no memory for the pin.
    #[error("the kernel has no memory to pin {range} with: end other programs or pin less")]
    NoMemory {
        /// The range asked for.
        range: UserRange,
    },
    /// All buffers of the pinner are in use.
    #[error(
        "pinning {range} needs {needed} of the {limit} buffers of a pinner, but only {free} are \
         free: unpin something, or use another pinner"
    )]
    TableFull {
        /// The range asked for.
        range: UserRange,
        /// How many buffers it needs.
        needed: u32,
        /// How many are free.
        free: u32,
        /// How many a pinner has.
        limit: u32,
    },
    /// The kernel refused the memory: `EFAULT` where not all of it is mapped writable, `EOPNOTSUPP`
    /// for files that cannot be pinned.
    #[error(
        "the kernel does not pin {range}: {}; pin anonymous memory or a memfd",
        os::words(*errno)
    )]
    Refused {
        /// The range asked for.
        range: UserRange,
        /// What the kernel answered.
        errno: Errno,
    },
}

impl RegisterError {
    /// The errno.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Unavailable { errno } | Self::Refused { errno, .. } => *errno,
            Self::MemlockExceeded { .. } | Self::NoMemory { .. } | Self::TableFull { .. } => {
                Errno::ENOMEM
            }
        }
    }

    /// Whether this system has no io_uring for us, so that another method must do.
    pub(crate) const fn is_missing(&self) -> bool {
        matches!(
            self,
            Self::Unavailable { errno: Errno::EPERM | os::EACCES | os::ENOSYS | Errno::EINVAL }
        )
    }

    /// What `errno` means for `range` (io_uring_register(2) and mlock(2), ERRORS).
    pub(crate) fn of(range: UserRange, errno: Errno) -> Self {
        let needed = range.checked_len().unwrap_or(u64::MAX);
        match (errno, sys::memlock_limit()) {
            (Errno::ENOMEM | Errno::EPERM | os::EAGAIN, Some(limit))
                if !os::may_lock_without_limit() =>
            {
                Self::MemlockExceeded { range, needed, limit }
            }
            (Errno::ENOMEM, _) => Self::NoMemory { range },
            _ => Self::Refused { range, errno },
        }
    }
}

/// What a user does who has no io_uring.
fn setup_advice(errno: Errno) -> &'static str {
    match errno {
        Errno::EPERM | os::EACCES => {
            "see /proc/sys/kernel/io_uring_disabled (0 allows it), or a seccomp filter of a \
             container forbids it"
        }
        os::ENOSYS => "the kernel lacks it, or a seccomp filter of a container hides it",
        Errno::EINVAL => "sparse buffer tables need Linux 5.19",
        Errno::ENOMEM => "raise the limit of locked memory with `ulimit -l`",
        os::EMFILE => "raise the limit of open files (RLIMIT_NOFILE) with `ulimit -n`",
        os::ENFILE => "raise the system's limit of open files, /proc/sys/fs/file-max",
        _ => "pin with mlock instead",
    }
}

/// Makes and ends pins, by one method.
#[derive(Debug)]
pub(crate) enum Registrar {
    IoUring(Tables),
    Mlock,
}

/// Memory that is pinned. Dropping it ends nothing: only [`Registrar::unregister`] does.
#[derive(Debug)]
#[must_use = "memory stays pinned until it is unregistered"]
pub(crate) struct Registration {
    offset: usize,
    len: usize,
    slots: Vec<u32>,
}

impl Registrar {
    /// Pins by registering with a ring.
    pub(crate) fn io_uring() -> Result<Self, RegisterError> {
        let tables = Tables::new();
        // Whether there are rings shows with the first.
        let slot = tables.take(1).map_err(|error| error.unavailable())?;
        tables.give_back(&slot);
        Ok(Self::IoUring(tables))
    }

    /// How memory is pinned.
    pub(crate) fn method(&self) -> PinMethod {
        match self {
            Self::IoUring(_) => PinMethod::IoUring,
            Self::Mlock => PinMethod::Mlock,
        }
    }

    /// Pins `range`, which is `len` bytes from `offset` of `memory`.
    pub(crate) fn register(
        &self,
        memory: &Memory,
        range: UserRange,
        offset: u64,
    ) -> Result<Registration, RegisterError> {
        let too_long = |_| RegisterError::Refused { range, errno: Errno::EINVAL };
        let len = range.checked_len().unwrap_or(u64::MAX);
        let offset = usize::try_from(offset).map_err(too_long)?;
        let len = usize::try_from(len).map_err(too_long)?;
        match self {
            Self::IoUring(tables) => {
                let slots = fill_slots(tables, memory, range)?;
                Ok(Registration { offset, len, slots })
            }
            Self::Mlock => {
                let (start, end) = pages_of(range);
                let mut locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
                locks.add(start, end);
                if let Err(errno) = memory.mapping().lock(offset, len) {
                    locks.remove(start, end, |start, end| unlock(memory, start, end));
                    return Err(RegisterError::of(range, errno));
                }
                Ok(Registration { offset, len, slots: Vec::new() })
            }
        }
    }

    /// Ends a pin of `memory` that [`register`](Self::register) of the same registrar made.
    ///
    /// On an error, which no kernel is known to give, some of it is still pinned.
    pub(crate) fn unregister(
        &self,
        memory: &Memory,
        registration: Registration,
    ) -> Result<(), Errno> {
        let Registration { offset, len, slots: filled } = registration;
        match self {
            Self::IoUring(tables) => {
                filled.into_iter().map(|slot| tables.empty(slot)).fold(Ok(()), Result::and)
            }
            Self::Mlock => {
                let Ok(range) = memory.sub_range(to_u64(offset), to_u64(len)) else {
                    return Err(Errno::EFAULT);
                };
                let (start, end) = pages_of(range);
                let mut locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
                locks.remove(start, end, |start, end| unlock(memory, start, end));
                Ok(())
            }
        }
    }
}

/// Registers a range, a slot for each chunk.
fn fill_slots(
    tables: &Tables,
    memory: &Memory,
    range: UserRange,
) -> Result<Vec<u32>, RegisterError> {
    let base = memory.user_range().start().get();
    let (mut at, last) = (range.start().get(), range.last().get());
    let take = |chunk: u64| {
        let needed = u32::try_from(last / chunk - at / chunk + 1).unwrap_or(u32::MAX);
        let taken = tables.take(needed).map_err(|error| match error {
            TakeError::Full { free } => {
                RegisterError::TableFull { range, needed, free, limit: SLOTS }
            }
            TakeError::Unavailable { errno } => RegisterError::Unavailable { errno },
        })?;
        Ok((chunk, taken))
    };
    let short = take(chunk_of(range, memory.page_size()));
    // Where slots are few, long buffers need fewer.
    let (chunk, filled) = short.or_else(|error| match error {
        RegisterError::TableFull { .. } => take(CHUNK),
        error => Err(error),
    })?;
    for (count, slot) in filled.iter().enumerate() {
        // The chunk's last byte: the top of the space is in no memory, so nothing wraps.
        let chunk_last = last.min(at | (chunk - 1));
        let offset = usize::try_from(at - base);
        let len = usize::try_from(chunk_last - at + 1);
        let result = match (offset, len) {
            (Ok(offset), Ok(len)) => memory
                .mapping()
                .part(offset, len)
                .and_then(|start| tables.fill(*slot, Buffer { start, len })),
            _ => Err(Errno::EINVAL),
        };
        if let Err(errno) = result {
            let (done, untouched) = filled.split_at(count);
            tables.give_back(untouched);
            for slot in done {
                // A slot that cannot be emptied is never used again.
                let _ = tables.empty(*slot);
            }
            return Err(RegisterError::of(range, errno));
        }
        at = chunk_last + 1;
    }
    Ok(filled)
}

/// Tables of buffers, whose slots are numbered through.
#[derive(Debug)]
pub(crate) struct Tables {
    /// Each is made when a slot of it is taken first.
    tables: Box<[OnceLock<BufferTable>]>,
    /// The slots that are free. It has room for all, so that giving back allocates nothing.
    free: Mutex<Vec<u32>>,
}

/// The reason why there are no slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TakeError {
    Full { free: u32 },
    Unavailable { errno: Errno },
}

impl TakeError {
    /// The error of the first slot, of which there are many.
    fn unavailable(self) -> RegisterError {
        match self {
            Self::Full { .. } => RegisterError::Unavailable { errno: Errno::ENOMEM },
            Self::Unavailable { errno } => RegisterError::Unavailable { errno },
        }
    }
}

impl Tables {
    fn new() -> Self {
        let tables = (0..SLOTS / TABLE_SLOTS).map(|_| OnceLock::new()).collect();
        // The lowest slot is taken first.
        Self { tables, free: Mutex::new((0..SLOTS).rev().collect()) }
    }

    /// Takes `count` slots, and makes the tables that they are of.
    fn take(&self, count: u32) -> Result<Vec<u32>, TakeError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let left = usize::try_from(count).ok().and_then(|count| free.len().checked_sub(count));
        let Some(left) = left else {
            return Err(TakeError::Full { free: u32::try_from(free.len()).unwrap_or(SLOTS) });
        };
        let taken = free.split_off(left);
        let made = taken.iter().try_for_each(|slot| match self.place(*slot) {
            Some((table, _)) if table.get().is_none() => {
                // Tables are made under the lock alone, so nobody made it meanwhile.
                BufferTable::new(TABLE_SLOTS).map(|made| _ = table.set(made))
            }
            _ => Ok(()),
        });
        match made {
            Ok(()) => Ok(taken),
            Err(errno) => {
                free.extend(taken);
                Err(TakeError::Unavailable { errno })
            }
        }
    }

    /// The table of a slot, and the slot's number there.
    fn place(&self, slot: u32) -> Option<(&OnceLock<BufferTable>, u32)> {
        let table = usize::try_from(slot / TABLE_SLOTS).ok()?;
        Some((self.tables.get(table)?, slot % TABLE_SLOTS))
    }

    /// The table of a slot that was taken, and the slot's number there.
    fn taken(&self, slot: u32) -> Result<(&BufferTable, u32), Errno> {
        let place = self.place(slot).and_then(|(table, slot)| Some((table.get()?, slot)));
        place.ok_or(Errno::EINVAL)
    }

    /// Registers memory in a slot that was taken.
    fn fill(&self, slot: u32, buffer: Buffer) -> Result<(), Errno> {
        let (table, slot) = self.taken(slot)?;
        table.fill(slot, buffer)
    }

    fn give_back(&self, slots: &[u32]) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(slots);
    }

    /// Empties a slot and gives it back. One that cannot be emptied stays taken.
    fn empty(&self, slot: u32) -> Result<(), Errno> {
        let (table, at) = self.taken(slot)?;
        table.empty(at)?;
        self.give_back(&[slot]);
        Ok(())
    }
}

/// How many pins by mlock(2) each page of this process has, as locks do not nest.
static LOCKS: Mutex<LockCounts> = Mutex::new(LockCounts { edges: BTreeMap::new() });

/// Counts of address ranges.
#[derive(Debug, Default)]
struct LockCounts {
    /// The count from an address up to the next edge. It is 0 before the first edge.
    edges: BTreeMap<u64, u32>,
}

impl LockCounts {
    fn add(&mut self, start: u64, end: u64) {
        self.split(start);
        self.split(end);
        for count in self.edges.range_mut(start..end).map(|(_, count)| count) {
            *count = count.saturating_add(1);
        }
    }

    /// Takes back one [`add`](Self::add), and passes what is counted no more to `unlock`.
    fn remove(&mut self, start: u64, end: u64, mut unlock: impl FnMut(u64, u64)) {
        self.split(start);
        self.split(end);
        let mut idle = None;
        for (at, count) in self.edges.range_mut(start..end) {
            *count = count.saturating_sub(1);
            idle = match (idle, *count) {
                (None, 0) => Some(*at),
                (Some(from), 1..) => {
                    unlock(from, *at);
                    None
                }
                (idle, _) => idle,
            };
        }
        if let Some(from) = idle {
            unlock(from, end);
        }
        self.forget_idle_edges(start, end);
    }

    /// Removes edges in `start..=end` with nothing counted on either side.
    fn forget_idle_edges(&mut self, start: u64, end: u64) {
        let mut before = self.edges.range(..start).next_back().map_or(0, |(_, count)| *count);
        let mut at = start;
        while at <= end
            && let Some((&edge, &count)) = self.edges.range(at..=end).next()
        {
            if before == 0 && count == 0 {
                self.edges.remove(&edge);
            }
            before = count;
            at = edge + 1;
        }
    }

    /// Makes `at` an edge.
    fn split(&mut self, at: u64) {
        let before = self.edges.range(..=at).next_back().map_or(0, |(_, count)| *count);
        self.edges.entry(at).or_insert(before);
    }
}

/// The pages of a range, as the address of the first and the one behind the last. A user's memory
/// ends well below the top of the space.
fn pages_of(range: UserRange) -> (u64, u64) {
    let page = sys::page_size();
    let start = os::align_down(range.start().get(), page);
    (start, os::align_down(range.last().get(), page).saturating_add(page))
}

fn unlock(memory: &Memory, start: u64, end: u64) {
    let offset = start.checked_sub(memory.user_range().start().get());
    let offset = offset.and_then(|offset| usize::try_from(offset).ok());
    if let (Some(offset), Ok(len)) = (offset, usize::try_from(end - start)) {
        // What stays locked is only not swapped; ending a pin cannot fail.
        let _ = memory.mapping().unlock(offset, len);
    }
}

/// A number of bytes in memory; `usize` has 64 bits wherever the crate builds.
fn to_u64(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
