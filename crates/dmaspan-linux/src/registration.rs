//! A registration makes a pin: memory registered with io_uring, or locked.
//!
//! A registered buffer is the long-term pin that an ordinary process can have: its pages keep their
//! frames (io_uring_register(2), `IORING_REGISTER_BUFFERS`). A pinner's pins share rings, whose
//! tables of buffers are filled and emptied slot by slot, so a pin costs no file descriptor. Of
//! which table a buffer is says its address: parts of 512 MiB have tables in turn, up to 64. That
//! has two reasons. For each huge page of a buffer kernels before 7.2 look through all of its
//! table, so as to charge none twice (io_uring/rsrc.c, `headpage_already_acct`); and a ring's lock
//! lets one thread register at a time, so several threads register a long range, each a part.
//!
//! Sparse tables need Linux 5.19. Older kernels lack them, and containers often forbid io_uring.
//! Then memory is locked (mlock(2)): it stays resident, and the kernel may still move it to other
//! frames, so nobody may use its frame numbers.

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use dmaspan::{Errno, UserRange};

use crate::mem::{Memory, MemoryKind};
use crate::os::{self, Size};
use crate::parts;
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
/// The slots of each of a pinner's tables.
const TABLE_SLOTS: u32 = 1 << 8;
/// How many tables a pinner has at most.
const TABLES: u32 = SLOTS / TABLE_SLOTS;

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

/// The memory whose buffers are in one table. 8 GiB of huge pages are registered in a quarter of
/// the time that one table of all takes.
const PART: u64 = 512 << 20;

/// The most threads that register one range.
const THREADS_MOST: usize = 4;
/// What they are called.
const THREAD_NAME: &str = "dmaspan-pin";

/// The bytes of base pages for which a thread that registers them is worth its start: some
/// milliseconds of work, as much as a busy machine lets a new thread wait for a CPU.
const PIN_LEAST: u64 = 512 << 20;
/// The same of huge pages, which are registered in a tenth of the time.
const PIN_HUGE_LEAST: u64 = 4 << 30;
/// The same for a thread that ends the registrations of base pages. Those of huge pages end in
/// microseconds.
const UNPIN_LEAST: u64 = 1 << 30;

/// The [`PART`] of this memory. No page of up to 1 GiB is in two parts, as each ring charges its
/// pages. A page that two pins reach by parts of other sizes, or where a table is short of slots,
/// may be in two rings, and is charged in each.
fn part_of(memory: &Memory) -> u64 {
    let least = if memory.kind() == MemoryKind::Adopted { CHUNK } else { PART };
    least.max(memory.page_size())
}

/// Whether memory has base pages alone.
fn has_base_pages(memory: &Memory) -> bool {
    memory.kind().leaf_size() == sys::page_size()
}

/// How many threads gain with `len` bytes, of at least `least` each.
fn threads_for(len: u64, least: u64) -> usize {
    match usize::try_from(len / least).unwrap_or(THREADS_MOST).min(THREADS_MOST) {
        0 | 1 => 1,
        most => thread::available_parallelism().map_or(1, NonZero::get).min(most),
    }
}

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
    /// There is no ring to register with, or none for more pins: a pinner opens up to 64, as it
    /// pins memory in more places or has more buffers.
    #[error("io_uring cannot be used ({}): {}", os::words(*errno), setup_advice(*errno))]
    Unavailable {
        /// What the kernel answered.
        errno: Errno,
    },
    /// The process may not lock so much memory.
    #[error(
        "pinning the {} of {range} exceeds the limit of {} of locked memory (RLIMIT_MEMLOCK), of \
         which some may be in use: raise it with `ulimit -l {}` (KiB) or run with CAP_IPC_LOCK{}",
        Size(*needed), Size(*limit), limit.saturating_add(*needed).div_ceil(1024), os::outside()
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
        let slot = tables.take(&[(Some(0), 1)]).map_err(|error| error.unavailable())?;
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
                let empty = |slots: &&[u32]| {
                    slots.iter().map(|slot| tables.empty(*slot)).fold(Ok(()), Result::and)
                };
                let parts = filled.chunk_by(|slot, next| table_of(*slot) == table_of(*next));
                let least = if has_base_pages(memory) { UNPIN_LEAST } else { u64::MAX };
                let threads = threads_for(to_u64(len), least);
                parts::for_each(THREAD_NAME, threads, &parts.collect::<Vec<_>>(), empty)
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

/// Registers a range, a slot for each chunk, by several threads where that gains.
fn fill_slots(
    tables: &Tables,
    memory: &Memory,
    range: UserRange,
) -> Result<Vec<u32>, RegisterError> {
    let chunk = chunk_of(range, memory.page_size());
    let len = range.checked_len().unwrap_or(u64::MAX);
    // A range of one part gains nothing by another ring, whose own memory is locked, too.
    let part = match part_of(memory).max(chunk) {
        part if len <= part => u64::MAX,
        part => part,
    };
    let filling = Filling::take(tables, range, chunk, part).or_else(|_| {
        // Where slots or rings are few, long buffers need fewer, of the rings that there are.
        Filling::take(tables, range, CHUNK, u64::MAX)
    })?;
    let least = if has_base_pages(memory) { PIN_LEAST } else { PIN_HUGE_LEAST };
    let threads = threads_for(len, least);
    filling.fill(memory, threads).map_err(|errno| RegisterError::of(range, errno))?;
    Ok(filling.keep())
}

/// A range that is being registered. Unless it is kept, its slots are emptied and given back.
#[derive(Debug)]
struct Filling<'t> {
    tables: &'t Tables,
    chunk: u64,
    /// What the buffers of a table are of, as addresses and lengths, one behind the other.
    parts: Vec<(u64, u64)>,
    /// A slot for each chunk.
    slots: Vec<u32>,
}

impl<'t> Filling<'t> {
    /// Takes the slots, for each `part` bytes of the address space of another table.
    fn take(
        tables: &'t Tables,
        range: UserRange,
        chunk: u64,
        part: u64,
    ) -> Result<Self, RegisterError> {
        let parts: Vec<_> = pieces(range.start().get(), range.last().get(), part).collect();
        let wanted = parts.iter().map(|&(start, len)| {
            let table = u32::try_from(start / part % u64::from(TABLES)).ok();
            let table = table.filter(|_| part != u64::MAX);
            (table, pieces(start, start + (len - 1), chunk).count())
        });
        let wanted: Vec<_> = wanted.collect();
        match tables.take(&wanted) {
            Ok(slots) => Ok(Self { tables, chunk, parts, slots }),
            Err(TakeError::Full { free }) => {
                let needed = wanted.iter().map(|(_, count)| count).sum::<usize>();
                let needed = u32::try_from(needed).unwrap_or(u32::MAX);
                Err(RegisterError::TableFull { range, needed, free, limit: SLOTS })
            }
            Err(TakeError::Unavailable { errno }) => Err(RegisterError::Unavailable { errno }),
        }
    }

    /// Registers all of it by so many threads, or less where something fails.
    fn fill(&self, memory: &Memory, threads: usize) -> Result<(), Errno> {
        let failed = AtomicBool::new(false);
        parts::for_each(THREAD_NAME, threads, &self.parts, |&(start, len)| {
            for (start, len) in pieces(start, start + (len - 1), self.chunk) {
                if failed.load(Ordering::Relaxed) {
                    break;
                }
                let filled = self.fill_chunk(memory, start, len);
                if filled.is_err() {
                    failed.store(true, Ordering::Relaxed);
                    return filled;
                }
            }
            Ok(())
        })
    }

    /// Registers what begins at `start` in the slot of its chunk.
    fn fill_chunk(&self, memory: &Memory, start: u64, len: u64) -> Result<(), Errno> {
        let begin = self.parts.first().map_or(start, |(begin, _)| *begin);
        let place = usize::try_from(start / self.chunk - begin / self.chunk);
        let offset = usize::try_from(start - memory.user_range().start().get());
        let slot = place.ok().and_then(|place| self.slots.get(place));
        let (Some(slot), Ok(offset), Ok(len)) = (slot, offset, usize::try_from(len)) else {
            return Err(Errno::EINVAL);
        };
        let start = memory.mapping().part(offset, len)?;
        self.tables.fill(*slot, Buffer { start, len })
    }

    /// The slots, which stay filled.
    fn keep(mut self) -> Vec<u32> {
        mem::take(&mut self.slots)
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        for slot in &self.slots {
            // The kernel also empties a slot that nothing is in. One that cannot be emptied is
            // never used again.
            let _ = self.tables.empty(*slot);
        }
    }
}

/// The pieces of `first..=last` between multiples of `step`, as addresses and lengths. User memory
/// is not at the top of the space, so nothing wraps.
fn pieces(first: u64, last: u64, step: u64) -> impl Iterator<Item = (u64, u64)> {
    (first / step..=last / step).map(move |number| {
        let start = first.max(number * step);
        (start, last.min(number * step + (step - 1)) - start + 1)
    })
}

/// Tables of buffers, whose slots are numbered through.
#[derive(Debug)]
pub(crate) struct Tables {
    /// Each is made when a slot of it is taken first.
    tables: Box<[OnceLock<BufferTable>]>,
    /// The slots of each table that are free. There is room for all, so that giving back allocates
    /// nothing.
    free: Mutex<Box<[Vec<u32>]>>,
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
        let tables = (0..TABLES).map(|_| OnceLock::new()).collect();
        // The lowest slot of a table is taken first.
        let slots = |table| (0..TABLE_SLOTS).rev().map(|at| table * TABLE_SLOTS + at).collect();
        Self { tables, free: Mutex::new((0..TABLES).map(slots).collect()) }
    }

    /// Takes so many slots of a table, or of those behind it where it has fewer, for each that is
    /// wanted, and makes the tables that they are of. Where no table is wanted, those that are made
    /// come first.
    fn take(&self, wanted: &[(Option<u32>, usize)]) -> Result<Vec<u32>, TakeError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let needed = wanted.iter().map(|(_, count)| count).sum();
        let left = free.iter().map(Vec::len).sum::<usize>();
        if needed > left {
            return Err(TakeError::Full { free: u32::try_from(left).unwrap_or(SLOTS) });
        }
        let mut taken = Vec::with_capacity(needed);
        for (table, count) in wanted {
            let end = taken.len() + count;
            let first = table.map_or(0, |table| table_of(table * TABLE_SLOTS));
            let mut order: Vec<_> = (first..free.len()).chain(0..first).collect();
            if table.is_none() {
                order
                    .sort_by_key(|at| self.tables.get(*at).is_none_or(|made| made.get().is_none()));
            }
            for slots in order {
                let Some(slots) = free.get_mut(slots) else { continue };
                let left = slots.len().saturating_sub(end - taken.len());
                taken.extend(slots.drain(left..).rev());
            }
        }
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
                give_back_to(&mut free, &taken);
                Err(TakeError::Unavailable { errno })
            }
        }
    }

    /// The table of a slot, and the slot's number there.
    fn place(&self, slot: u32) -> Option<(&OnceLock<BufferTable>, u32)> {
        Some((self.tables.get(table_of(slot))?, slot % TABLE_SLOTS))
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
        give_back_to(&mut self.free.lock().unwrap_or_else(PoisonError::into_inner), slots);
    }

    /// Empties a slot and gives it back. One that cannot be emptied stays taken.
    fn empty(&self, slot: u32) -> Result<(), Errno> {
        let (table, at) = self.taken(slot)?;
        table.empty(at)?;
        self.give_back(&[slot]);
        Ok(())
    }
}

/// The number of a slot's table.
fn table_of(slot: u32) -> usize {
    // It is below 64.
    usize::try_from(slot / TABLE_SLOTS).unwrap_or(0)
}

fn give_back_to(free: &mut [Vec<u32>], slots: &[u32]) {
    for slot in slots.iter().rev() {
        if let Some(free) = free.get_mut(table_of(*slot)) {
            free.push(*slot);
        }
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
