//! Reads and writes a second of three disks in one guest: that of a server by vfio-user, QEMU's own
//! NVMe controller, and that of QEMU's storage daemon by vhost-user-blk.
//!
//! The disks take turns, so that whatever else the machine does meets all of them. A block has its
//! number and how often it was written in each of its sectors, by which each read is verified.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::load::{BLOCK, BLOCKS, DEPTH, Random, direct, page};
use super::{MODEL, Result, names, shell};
use crate::measure::figure;

/// What QEMU's controller calls itself.
const QEMU_MODEL: &str = "QEMU NVMe Ctrl";
const VIRTIO: &str = "/dev/vda";
const SECTOR: usize = 512;
const TURNS: u32 = 3;
/// How long a turn takes.
const TURN: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

struct Disk {
    name: &'static str,
    path: PathBuf,
    /// How often each block was written.
    writes: Vec<AtomicU8>,
}

/// Measures all three, and says each beside QEMU's own controller.
pub(super) fn iops() -> Result {
    let disks = [
        Disk::new("vfio-user", Path::new("/dev").join(names(MODEL)?.1))?,
        Disk::new("nvme", Path::new("/dev").join(names(QEMU_MODEL)?.1))?,
        Disk::new("vhost-user-blk", PathBuf::from(VIRTIO))?,
    ];
    for (access, what) in [(Access::Write, "writes"), (Access::Read, "reads")] {
        for depth in [1, DEPTH] {
            let mut all = [0.0; 3];
            for turn in 1..=TURNS {
                for (disk, sum) in disks.iter().zip(&mut all) {
                    let rate = disk.rate(access, depth)?;
                    println!(
                        "turn {turn}: {} {what} at depth {depth}: {rate:.0} a second",
                        disk.name
                    );
                    *sum += rate / f64::from(TURNS);
                }
            }
            for (disk, rate) in disks.iter().zip(all) {
                figure(&format!("{what} a second, depth {depth}: {}", disk.name), rate, "");
            }
            let [served, nvme, storage] = all;
            figure(&format!("{what}, depth {depth}: vfio-user / nvme"), served / nvme, "x");
            figure(&format!("{what}, depth {depth}: vhost-user-blk / nvme"), storage / nvme, "x");
        }
    }
    Ok(())
}

impl Disk {
    /// A disk as long as the others, whose blocks are written once.
    fn new(name: &'static str, path: PathBuf) -> Result<Self> {
        let mut bytes = vec![0; BLOCKS * BLOCK];
        for (number, block) in bytes.chunks_exact_mut(BLOCK).enumerate() {
            stamp(block, mark(number, 0)?);
        }
        let mut file = OpenOptions::new()
            .write(true)
            .open(&path)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        file.write_all(&bytes).and_then(|()| file.sync_all())?;
        let len = file.seek(SeekFrom::End(0))?;
        if len != u64::try_from(bytes.len())? {
            return Err(format!("{} has {len} bytes", path.display()).into());
        }
        shell("echo 3 > /proc/sys/vm/drop_caches")?;
        Ok(Self { name, path, writes: (0..BLOCKS).map(|_| AtomicU8::new(0)).collect() })
    }

    /// Blocks a second, by so many threads, each with one at a time.
    fn rate(&self, access: Access, depth: usize) -> Result<f64> {
        let (stop, begun) = (&AtomicBool::new(false), Instant::now());
        let done: Result<u32> = thread::scope(|scope| {
            let operate = |thread| scope.spawn(move || self.operate(access, thread, depth, stop));
            let threads: Vec<_> = (0..depth).map(operate).collect();
            thread::sleep(TURN);
            stop.store(true, Ordering::Relaxed);
            let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
            joined.map(|done| done.unwrap_or_else(|_| Err("a thread panicked".into()))).sum()
        });
        Ok(f64::from(done?) / begun.elapsed().as_secs_f64())
    }

    /// Reads or writes blocks at random until `stop`; each of `depth` threads has its own.
    fn operate(
        &self,
        access: Access,
        thread: usize,
        depth: usize,
        stop: &AtomicBool,
    ) -> Result<u32> {
        let disk = direct(&self.path)?;
        let mut memory = vec![0; 2 * BLOCK];
        let page = page(&mut memory)?;
        let mut random = Random::new(thread);
        let mut done = 0;
        while !stop.load(Ordering::Relaxed) {
            let index = usize::try_from(random.next() >> 32)? % (BLOCKS / depth);
            self.one(access, &disk, index * depth + thread, page)?;
            done += 1;
        }
        Ok(done)
    }

    /// Reads or writes a block.
    fn one(&self, access: Access, disk: &File, block: usize, page: &mut [u8]) -> Result {
        let writes = self.writes.get(block).ok_or("a block of the disk")?;
        let at = u64::try_from(block * BLOCK)?;
        match access {
            Access::Write => {
                let count = writes.load(Ordering::Relaxed).wrapping_add(1);
                stamp(page, mark(block, count)?);
                disk.write_all_at(page, at)?;
                writes.store(count, Ordering::Relaxed);
            }
            Access::Read => {
                disk.read_exact_at(page, at)?;
                let mark = mark(block, writes.load(Ordering::Relaxed))?;
                if !page.chunks_exact(SECTOR).all(|sector| sector.starts_with(&mark)) {
                    return Err(
                        format!("{}: block {block} has not what was written", self.name).into()
                    );
                }
            }
        }
        Ok(())
    }
}

/// What each sector of a block begins with, that was written so often.
fn mark(block: usize, writes: u8) -> Result<[u8; 8]> {
    Ok((u64::try_from(block)? << 8 | u64::from(writes)).to_le_bytes())
}

fn stamp(block: &mut [u8], mark: [u8; 8]) {
    for sector in block.chunks_exact_mut(SECTOR) {
        sector.iter_mut().zip(mark).for_each(|(byte, new)| *byte = new);
    }
}
