//! Reads and writes of blocks at random, many at once, of which each has to give what was written.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use super::{PATIENCE, Result, partition};

/// Random reads and writes, by so many threads, each with one at a time.
pub(super) const OPERATIONS: u64 = 20_000;
pub(super) const DEPTH: usize = 32;
pub(super) const BLOCK: usize = 4096;
/// Blocks of the partition.
pub(super) const BLOCKS: usize = (64 << 20) / BLOCK;
/// What is in the blocks, from one step to the next.
const NOTES: &str = "/tmp/served";

/// How often each block was written. Those of 0 are not looked at.
type Turns = Vec<(usize, u8)>;

/// What the threads of a load share.
pub(super) struct Load {
    /// Operations that were done.
    done: AtomicU64,
    stop: AtomicBool,
    disk: Disk,
}

/// What a disk does under a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disk {
    /// It stays.
    Stays,
    /// It goes, which ends the load and is no error.
    Goes,
}

impl Load {
    /// Waits until so many more operations were done.
    pub(super) fn wait(&self, more: u64) -> Result {
        let (begun, from) = (Instant::now(), self.done.load(Ordering::Relaxed));
        while self.done.load(Ordering::Relaxed) < from + more {
            if begun.elapsed() > PATIENCE {
                return Err(format!("less than {more} operations in {PATIENCE:?}").into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// Does something under load, and then reads all blocks that the load wrote; returns how many
/// operations there were.
pub(super) fn under_load(work: impl FnOnce(&Load) -> Result) -> Result<u64> {
    let (done, turns) = run(Disk::Stays, work)?;
    note(turns)?;
    check_notes()?;
    Ok(done)
}

/// Does something under a load that ends with the disk. What the load wrote is noted, and
/// [`check_notes`] reads it when the disk is there again.
pub(super) fn until_it_goes(work: impl FnOnce(&Load) -> Result) -> Result {
    note(run(Disk::Goes, work)?.1)
}

fn run(disk: Disk, work: impl FnOnce(&Load) -> Result) -> Result<(u64, Turns)> {
    let path = &partition(3)?;
    let load = &Load { done: AtomicU64::new(0), stop: AtomicBool::new(false), disk };
    let (worked, turns) = thread::scope(|scope| {
        let threads: Vec<_> =
            (0..DEPTH).map(|thread| scope.spawn(move || operate(path, thread, load))).collect();
        let worked = work(load);
        load.stop.store(true, Ordering::Relaxed);
        let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
        let turns: Vec<Result<Turns>> =
            joined.map(|turns| turns.unwrap_or_else(|_| Err("a thread panicked".into()))).collect();
        (worked, turns)
    });
    let turns: Vec<Turns> = turns.into_iter().collect::<Result<_>>()?;
    worked?;
    Ok((load.done.load(Ordering::Relaxed), turns.into_iter().flatten().collect()))
}

/// Reads and writes blocks at random, of which each thread has its own, until the load stops.
fn operate(path: &Path, thread: usize, load: &Load) -> Result<Turns> {
    let disk = direct(path)?;
    let mut memory = vec![0; 2 * BLOCK];
    let page = page(&mut memory)?;
    let mut turns = vec![0_u8; BLOCKS / DEPTH];
    let mut random = Random::new(thread);
    while !load.stop.load(Ordering::Relaxed) {
        let state = random.next();
        let index = usize::try_from(state >> 32)? % turns.len();
        let turn = turns.get_mut(index).ok_or("a block of the thread")?;
        let block = index * DEPTH + thread;
        let at = u64::try_from(block * BLOCK)?;
        let done = if *turn > 0 && state & 1 == 0 {
            disk.read_exact_at(page, at)
        } else {
            *turn = turn.wrapping_add(1).max(1);
            fill(page, block, *turn);
            disk.write_all_at(page, at)
        };
        match done {
            Ok(()) => compare(page, block, *turn)?,
            // Nobody knows whether the block was written.
            Err(_) if load.disk == Disk::Goes => {
                *turn = 0;
                break;
            }
            Err(error) => return Err(format!("block {block}: {error}").into()),
        }
        load.done.fetch_add(1, Ordering::Relaxed);
    }
    Ok(turns.into_iter().enumerate().map(|(index, turn)| (index * DEPTH + thread, turn)).collect())
}

fn note(turns: Turns) -> Result {
    let mut notes = vec![0; BLOCKS];
    for (block, turn) in turns {
        *notes.get_mut(block).ok_or("a block of the partition")? = turn;
    }
    Ok(fs::write(NOTES, notes)?)
}

/// Reads all blocks that were written.
pub(super) fn check_notes() -> Result {
    let disk = direct(&partition(3)?)?;
    let mut memory = vec![0; 2 * BLOCK];
    let page = page(&mut memory)?;
    for (block, turn) in fs::read(NOTES)?.into_iter().enumerate().filter(|(_, turn)| *turn > 0) {
        disk.read_exact_at(page, u64::try_from(block * BLOCK)?)?;
        compare(page, block, turn)?;
    }
    Ok(())
}

/// The bytes of a block that was written for the `turn`th time.
fn fill(bytes: &mut [u8], block: usize, turn: u8) {
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        let [low, middle, high, ..] = block.to_le_bytes();
        let [at, above, ..] = index.to_le_bytes();
        word.copy_from_slice(&[low, middle, high, turn, at, above, 0x5a, turn ^ at]);
    }
}

fn compare(page: &[u8], block: usize, turn: u8) -> Result {
    let mut expected = vec![0; page.len()];
    fill(&mut expected, block, turn);
    match page == expected {
        true => Ok(()),
        false => Err(format!("block {block} has not what was written at turn {turn}").into()),
    }
}

/// A file or a disk without the kernel's cache.
pub(super) fn direct(path: &Path) -> io::Result<File> {
    let flags = i32::try_from(OFlags::DIRECT.bits()).map_err(io::Error::other)?;
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)
}

/// So many bytes that begin with a page.
pub(super) fn page(memory: &mut [u8]) -> Result<&mut [u8]> {
    let lead = memory.as_ptr().align_offset(BLOCK);
    let page = memory.get_mut(lead..).and_then(|memory| memory.get_mut(..BLOCK));
    page.ok_or_else(|| "no page begins in the memory".into())
}

/// Numbers that look random, the same ones for the same seed (xorshift).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: usize) -> Self {
        let seed = u64::try_from(seed).unwrap_or_default() + 1;
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
