//! The NVMe driver over VFIO: what a device does to memory that is mapped for it, and to memory
//! that is not.
//!
//! Each word of the disk holds its tag and its own offset. What cases write is behind the first
//! MiB, which stays as it is.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dmaspan::{DmaSpace as _, Iova, IovaRange, Prot};
use dmaspan_linux::plan::{Mapper, Region};
use dmaspan_linux::vfio::VfioSpace;
use dmaspan_linux::{Memory, MemoryKind};
use dmaspan_nvme::vfio::{VfioAccess, VfioBuffer};
use dmaspan_nvme::{Controller, Error, IoQueue, Namespace, QueueConfig, Transfer};

use super::{BACKEND, Case, Context, MIB, Need, Outcome, Result, case, page};

/// What the words of the disk hold besides their offset.
const TAG: u64 = 0xfeed_0000_0000_0000;
/// The part of the disk that cases write to.
const SCRATCH: u64 = 32 * MIB;

const HUGEPAGES: &[Need] = &[Need::Backend, Need::Hugepages(4)];

pub(super) const CASES: &[Case] = &[
    // DMA in both directions, of each kind of memory.
    case("nvme/dma_both_ways_with_thp", BACKEND, |at| both_ways(at, MemoryKind::Thp)),
    case("nvme/dma_both_ways_with_base", BACKEND, |at| both_ways(at, MemoryKind::Base)),
    case("nvme/dma_both_ways_with_hugetlb", HUGEPAGES, |at| both_ways(at, MemoryKind::Hugetlb2M)),
    case("nvme/dma_both_ways_with_hugetlb-1g", BACKEND, |at| both_ways(at, MemoryKind::Hugetlb1G)),
    case("nvme/dma_both_ways_with_memfd", BACKEND, |at| both_ways(at, MemoryKind::Memfd)),
    case("nvme/dma_both_ways_with_memfd-hugetlb", HUGEPAGES, |at| {
        both_ways(at, MemoryKind::MemfdHugetlb2M)
    }),
    // Memory that was unmapped stays as it is, and its neighbours are reached.
    case("nvme/unmapped_memory_is_out_of_reach", BACKEND, out_of_reach),
    // Of memory that is mapped elsewhere, a part at an odd page of it.
    case("nvme/a_copy_of_a_part_is_what_the_device_reaches", super::iommufd::NEEDS, copied_part),
    // Lists of PRPs, from odd pages on.
    case("nvme/lists_reach_odd_pages", BACKEND, odd_pages),
    // 32 reads in flight.
    case("nvme/depth_keeps_reads_apart", BACKEND, depth),
    // MSI-X.
    case("nvme/interrupts_say_that_reads_have_ended", BACKEND, interrupts),
    // What a device may only read.
    case("nvme/a_buffer_is_for_its_direction", BACKEND, directions),
];

/// A controller that was started.
struct Rig {
    space: Mapper<VfioSpace>,
    controller: Controller<VfioAccess>,
    namespace: Namespace,
    queue: IoQueue<VfioAccess>,
}

impl Rig {
    fn new(context: &Context, config: QueueConfig) -> Result<Self> {
        let (space, access) = VfioAccess::open(context.backend, context.device.parse()?)?;
        let access = match config.vector {
            Some(vector) => access.with_interrupts(vector + 1)?,
            None => access,
        };
        let mut controller = Controller::new(access, 1)?;
        let namespace = controller.namespace(1)?;
        let queue = controller.create_queue(config)?;
        Ok(Self { space, controller, namespace, queue })
    }

    /// Memory of a kind, mapped for reading and writing.
    fn memory(&self, kind: MemoryKind, len: u64) -> Result<Mapped> {
        let len = len.next_multiple_of(kind.page_size());
        let memory = Arc::new(Memory::new(kind, len)?);
        let buffer = VfioBuffer::new(&self.space, Region::whole(&memory, Prot::READ_WRITE))?;
        Ok(Mapped { memory, buffer })
    }

    fn block(&self, byte: u64) -> u64 {
        byte / self.namespace.block_bytes()
    }

    /// Shuts the controller down, and closes everything.
    fn end(self) -> Result {
        self.controller.shutdown([self.queue])?;
        Ok(Outcome::Passed)
    }
}

struct Mapped {
    memory: Arc<Memory>,
    buffer: VfioBuffer,
}

/// What the disk has from `byte` on.
pub(super) fn tagged(byte: u64) -> impl FnMut(u64) -> u64 {
    move |word| TAG | (byte + 8 * word)
}

/// DMA in both directions, of memory of this kind.
fn both_ways(context: &Context, kind: MemoryKind) -> Result {
    let rig = Rig::new(context, QueueConfig::new(4))?;
    match rig.memory(kind, 2 * MIB) {
        Ok(there) => moves(rig, there),
        Err(error) if kind == MemoryKind::Hugetlb1G => {
            rig.end()?;
            Ok(Outcome::Skipped(error.to_string()))
        }
        Err(error) => Err(error),
    }
}

/// DMA in both directions, of the first 2 MiB of memory that is there already.
pub(super) fn both_ways_of(context: &Context, memory: Memory) -> Result {
    let rig = Rig::new(context, QueueConfig::new(4))?;
    let memory = Arc::new(memory);
    let buffer = VfioBuffer::new(&rig.space, Region::whole(&memory, Prot::READ_WRITE))?;
    moves(rig, Mapped { memory, buffer })
}

/// The disk's first MiB comes in; what is written from memory comes back into other memory. Once it
/// is unmapped, neither does.
fn moves(mut rig: Rig, there: Mapped) -> Result {
    let Rig { queue, namespace, .. } = &mut rig;
    queue.read(namespace, 0, &there.buffer, 0..MIB)?;
    there.memory.check_words(0, MIB, tagged(0))?;
    // Nothing that an earlier case has left there.
    let salt = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() << 32
        | u64::from(std::process::id());
    let value = |word: u64| salt ^ word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    there.memory.fill_words(0, 2 * MIB, value)?;
    let lba = SCRATCH / namespace.block_bytes();
    queue.write(namespace, lba, &there.buffer, 0..2 * MIB)?;
    queue.flush(namespace)?;
    let back = rig.memory(MemoryKind::Base, 2 * MIB)?;
    rig.queue.read(&rig.namespace, lba, &back.buffer, 0..2 * MIB)?;
    back.memory.check_words(0, 2 * MIB, value)?;
    cut_off(&mut rig, &there, &back)?;
    drop(there);
    drop(back);
    match rig.space.leaked_bytes() {
        0 => rig.end(),
        leaked => Err(format!("{leaked:#x} bytes were not unmapped").into()),
    }
}

/// Unmaps memory behind the back of its buffer, which does not know: what is read does not arrive
/// there, and what is written does not come from there. Maps it again, and both do.
fn cut_off(rig: &mut Rig, there: &Mapped, back: &Mapped) -> Result<()> {
    const LEN: u64 = 0x1_0000;
    let segment = there.buffer.buffer().segments().iter().next().ok_or("there is no segment")?;
    let range = IovaRange::from_len(Iova::new(segment.start().get()), segment.len())?;
    let unmapped = rig.space.space().unmap(range)?;
    if unmapped != segment.len() {
        return Err(format!("{unmapped:#x} bytes were unmapped of {:#x}", segment.len()).into());
    }
    let secret = |word: u64| !(TAG ^ word);
    there.memory.fill_words(0, LEN, secret)?;
    let (queue, namespace) = (&mut rig.queue, &rig.namespace);
    let lba = SCRATCH / namespace.block_bytes();
    refused_or_not(queue.read(namespace, 0, &there.buffer, 0..LEN))?;
    there.memory.check_words(0, LEN, secret)?;
    refused_or_not(queue.write(namespace, lba, &there.buffer, 0..LEN))?;
    queue.read(namespace, lba, &back.buffer, 0..LEN)?;
    for word in 0..LEN / 8 {
        if back.memory.read_u64(8 * word)? == secret(word) {
            return Err(format!("word {word} was read from memory that is not mapped").into());
        }
    }
    let user = there.buffer.buffer().user();
    rig.space.space().map(&there.memory, user, range.start(), Prot::READ_WRITE)?;
    queue.write(namespace, lba, &there.buffer, 0..LEN)?;
    queue.read(namespace, lba, &back.buffer, 0..LEN)?;
    back.memory.check_words(0, LEN, secret)?;
    queue.read(namespace, 0, &there.buffer, 0..LEN)?;
    Ok(there.memory.check_words(0, LEN, tagged(0))?)
}

/// QEMU's controller says that it succeeded where it reaches nothing; others say that it did not.
fn refused_or_not(told: Result<(), Error>) -> Result<()> {
    match told {
        Ok(()) | Err(Error::Command { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Where a buffer was, a part of other memory is copied to, which is mapped in an address space
/// without devices: the controller reaches that part alone.
fn copied_part(context: &Context) -> Result {
    const LEN: u64 = 0x1_0000;
    let mut rig = Rig::new(context, QueueConfig::new(4))?;
    let old = rig.memory(MemoryKind::Base, LEN)?;
    old.memory.fill_words(0, LEN, |word| !word)?;
    let segment = old.buffer.buffer().segments().iter().next().ok_or("there is no segment")?;
    let there = IovaRange::from_len(Iova::new(segment.start().get()), LEN)?;
    let VfioSpace::Ioas(space) = rig.space.space() else {
        return Err("the space is not iommufd's".into());
    };
    let holding = space.iommufd().ioas()?;
    let held = Arc::new(Memory::new(MemoryKind::Thp, 4 * MIB)?);
    held.fill_words(0, 4 * MIB, |word| word)?;
    holding.map(&held, held.user_range(), Iova::new(0), Prot::READ_WRITE)?;
    let skip = MIB + 3 * page();
    space.unmap(there)?;
    let from = IovaRange::from_len(Iova::new(skip), LEN)?;
    space.copy(&holding, from, there.start(), Prot::READ_WRITE)?;
    rig.queue.read(&rig.namespace, 0, &old.buffer, 0..LEN)?;
    held.check_words(skip, LEN, tagged(0))?;
    held.check_words(0, skip, |word| word)?;
    held.check_words(skip + LEN, 4 * MIB - skip - LEN, |word| word + (skip + LEN) / 8)?;
    old.memory.check_words(0, LEN, |word| !word)?;
    // It stays when what it is a copy of goes.
    holding.unmap_all()?;
    rig.queue.read(&rig.namespace, rig.block(LEN), &old.buffer, 0..LEN)?;
    held.check_words(skip, LEN, tagged(LEN))?;
    let VfioSpace::Ioas(space) = rig.space.space() else {
        return Err("the space is not iommufd's".into());
    };
    space.unmap(there)?;
    let user = old.buffer.buffer().user();
    rig.space.space().map(&old.memory, user, there.start(), Prot::READ_WRITE)?;
    drop(old);
    rig.end()
}

/// Of two buffers one is unmapped the usual way, and its IOVAs given to another memory: the
/// controller reaches that one and not the old one. The neighbour stays.
fn out_of_reach(context: &Context) -> Result {
    const LEN: u64 = 0x1_0000;
    let mut rig = Rig::new(context, QueueConfig::new(4))?;
    let (old, neighbour) = (rig.memory(MemoryKind::Base, LEN)?, rig.memory(MemoryKind::Base, LEN)?);
    rig.queue.read(&rig.namespace, 0, &old.buffer, 0..LEN)?;
    old.memory.check_words(0, LEN, tagged(0))?;
    let start = |of: &Mapped| of.buffer.buffer().segments().iter().next().map(|span| span.start());
    let at = start(&old).ok_or("there is no segment")?;
    let Mapped { memory, buffer } = old;
    drop(buffer);
    memory.fill_words(0, LEN, |word| !word)?;
    let next = Arc::new(Memory::new(MemoryKind::Base, LEN)?);
    let region = Region::whole(&next, Prot::READ_WRITE).at(Iova::new(at.get()));
    let next = Mapped { buffer: VfioBuffer::new(&rig.space, region)?, memory: next };
    for there in [&next, &neighbour] {
        rig.queue.read(&rig.namespace, 0, &there.buffer, 0..LEN)?;
        there.memory.check_words(0, LEN, tagged(0))?;
    }
    memory.check_words(0, LEN, |word| !word)?;
    rig.end()
}

/// Transfers of 128 KiB and 1 MiB that begin at odd pages, and amid one.
fn odd_pages(context: &Context) -> Result {
    let mut rig = Rig::new(context, QueueConfig::new(4))?;
    for kind in [MemoryKind::Base, MemoryKind::Thp] {
        let there = rig.memory(kind, 4 * MIB)?;
        for (offset, len) in
            [(0x3000, 0x2_0000), (0x5200, 0x2_0000), (0x7000, MIB), (0x1_1e00, MIB)]
        {
            there.memory.fill_words(0, 4 * MIB, |word| !word)?;
            rig.queue.read(&rig.namespace, 8, &there.buffer, offset..offset + len)?;
            let at = 8 * rig.namespace.block_bytes();
            there.memory.check_words(offset, len, tagged(at))?;
            // Nothing beside it was written.
            there.memory.check_words(0, offset, |word| !word)?;
            let (end, behind) = (offset + len, 0x1000);
            there.memory.check_words(end, behind, |word| !(end / 8 + word))?;
        }
    }
    rig.end()
}

/// 32 reads in flight, each of its own place to its own.
fn depth(context: &Context) -> Result {
    let mut rig = Rig::new(context, QueueConfig::new(33))?;
    let there = rig.memory(MemoryKind::Base, 32 * 0x1000)?;
    // 13 has no factor in common with 32: each place once.
    let place = |n: u64| (n * 13 % 32) * 0x1000;
    for round in 0..8 {
        there.memory.fill_words(0, 32 * 0x1000, |word| !word)?;
        for n in 0..32 {
            let (lba, at) = (rig.block((round * 32 + n) * 0x1000), place(n));
            let (queue, buffer) = (&mut rig.queue, &there.buffer);
            queue.submit(Transfer::Read, &rig.namespace, lba, buffer, at..at + 0x1000)?;
        }
        let mut failed = None;
        let began = Instant::now();
        while rig.queue.in_flight() > 0 && began.elapsed() < Duration::from_secs(120) {
            rig.queue.reap(|done| failed = failed.or(done.result.err()))?;
        }
        if let Some(status) = failed {
            return Err(format!("a read failed: {status}").into());
        }
        for n in 0..32 {
            there.memory.check_words(place(n), 0x1000, tagged((round * 32 + n) * 0x1000))?;
        }
    }
    rig.end()
}

/// A wait ends by the controller's interrupt, long before its time is up, and at once where
/// something has ended already.
fn interrupts(context: &Context) -> Result {
    const LONG: Duration = Duration::from_secs(120);
    let config = QueueConfig { vector: Some(1), ..QueueConfig::new(4) };
    let mut rig = Rig::new(context, config)?;
    let there = rig.memory(MemoryKind::Base, page())?;
    let began = Instant::now();
    for n in 0..16 {
        let lba = rig.block(n * 0x1000);
        rig.queue.submit(Transfer::Read, &rig.namespace, lba, &there.buffer, 0..0x1000)?;
        let mut reaped = 0;
        while reaped == 0 && began.elapsed() < LONG {
            rig.queue.wait(LONG);
            reaped += rig.queue.reap(|_| ())?;
        }
        there.memory.check_words(0, 0x1000, tagged(n * 0x1000))?;
    }
    if began.elapsed() >= LONG {
        return Err("no interrupt came".into());
    }
    // Nothing is in flight, so the time is up, but for interrupts of reads that were seen to have
    // ended before their interrupt came: each ends one wait.
    let pause = Duration::from_millis(50);
    let lasts = |_| {
        let began = Instant::now();
        rig.queue.wait(pause);
        began.elapsed() >= pause
    };
    if !(0..=16).any(lasts) {
        return Err("a wait ended for no reason".into());
    }
    rig.end()
}

/// A buffer that the device may only read is not read into, and can be written from.
fn directions(context: &Context) -> Result {
    let mut rig = Rig::new(context, QueueConfig::new(4))?;
    let memory = Arc::new(Memory::new(MemoryKind::Base, page())?);
    memory.fill_words(0, 0x1000, |word| word)?;
    let readable = VfioBuffer::new(&rig.space, Region::whole(&memory, Prot::READ))?;
    match rig.queue.read(&rig.namespace, 0, &readable, 0..0x1000) {
        Err(Error::Import(_)) => {}
        other => return Err(format!("a read into what may be read alone: {other:?}").into()),
    }
    let lba = rig.block(SCRATCH);
    rig.queue.write(&rig.namespace, lba, &readable, 0..0x1000)?;
    memory.check_words(0, 0x1000, |word| word)?;
    rig.end()
}
