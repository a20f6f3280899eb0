//! Four threads read a file by rings of the crate `io-uring`, with buffers of one pool that is
//! registered once.
//!
//! Each thread attaches the pool to its ring, and says when an operation is done: that is the one
//! promise, beside that of `push`. (`FixedRing` needs neither.)
//!
//! Glue: 30 lines; unsafe: 2 blocks, 0 impls.

use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use dmaspan_linux::fixed::{AttachMethod, FixedPool, InFlight, PoolOptions, RingFile};
use io_uring::IoUring;

type Failed = Box<dyn Error + Send + Sync>;

const BLOCK: usize = 16 << 10;
const BLOCKS: usize = 512;
/// How many reads a thread has in flight at most.
const DEPTH: usize = 4;

// ANCHOR: glue
/// Reads blocks of a file, in any order, and calls `each` with the number and the bytes of each.
fn read(
    pool: &FixedPool,
    file: &File,
    blocks: Range<u64>,
    mut each: impl FnMut(u64, &[u8]),
) -> Result<AttachMethod, Failed> {
    let mut ring = IoUring::new(8)?;
    let attachment = pool.attach(&ring.submitter(), 0)?;
    let mut flights: [Option<(u64, InFlight)>; DEPTH] = Default::default();
    let mut left = blocks;
    while !left.is_empty() || flights.iter().any(Option::is_some) {
        let free = (0..).zip(&mut flights).filter(|(_, flight)| flight.is_none());
        for ((place, flight), block) in free.zip(&mut left) {
            let buffer = pool.take_timeout(Duration::from_secs(60))?;
            let target = RingFile::Fd(file.as_raw_fd());
            let operation = buffer.read(&attachment, target, block * BLOCK as u64, 0..BLOCK)?;
            let entry = operation.entry().user_data(place);
            *flight = Some((block, operation)); // until its completion has come
            // SAFETY: the file is open, and the operation, which is kept, owns the buffer.
            unsafe { ring.submission().push(&entry)? };
        }
        ring.submit_and_wait(1)?;
        for done in ring.completion() {
            let flight = flights[usize::try_from(done.user_data())?].take();
            let (block, operation) = flight.ok_or("completed twice")?;
            // SAFETY: the place says that this completion is the operation's.
            let (buffer, result) = unsafe { operation.complete(&done) };
            each(block, &buffer[..result?]);
        }
    }
    Ok(attachment.method())
}
// ANCHOR_END: glue

fn main() -> Result<(), Failed> {
    if let Err(error) = IoUring::new(8) {
        println!("SKIP: io_uring: {error}");
        return Ok(());
    }
    let contents: Vec<u8> = (0..BLOCKS * BLOCK - 777).map(|n| ((n * n) >> 7) as u8).collect();
    let path = std::env::temp_dir().join(format!("dmaspan-uring-{}", std::process::id()));
    File::create_new(&path)?.write_all(&contents)?;
    let file = File::open(&path)?;
    fs::remove_file(&path)?;

    // One slice fewer than the threads want.
    let pool = FixedPool::new(&PoolOptions::new(BLOCK as u64, 4 * DEPTH as u32 - 1))?;
    let quarter = BLOCKS as u64 / 4;
    let read_quarter = |n| -> Result<_, Failed> {
        let (mut copied, mut is_right) = (0, true);
        let method = read(&pool, &file, n * quarter..(n + 1) * quarter, |block, bytes| {
            let start = usize::try_from(block).unwrap() * BLOCK;
            copied += bytes.len();
            is_right &= contents[start..].starts_with(bytes);
        })?;
        Ok((method, copied, is_right))
    };
    let read_quarter = &read_quarter;
    let done = thread::scope(|scope| {
        let threads = [0, 1, 2, 3].map(|n| scope.spawn(move || read_quarter(n)));
        threads.map(|thread| thread.join().map_err(|_| "a thread panicked"))
    });
    let done = done.into_iter().map(|result| result?).collect::<Result<Vec<_>, Failed>>()?;

    let copied: usize = done.iter().map(|(_, copied, _)| copied).sum();
    println!("read {copied} bytes by {} threads", done.len());
    println!("they are the file's: {}", done.iter().all(|(_, _, is_right)| *is_right));
    println!("{} of {} buffers are free again", pool.free_slices(), pool.slices());
    match done.iter().find(|(method, ..)| *method != AttachMethod::Cloned) {
        None => println!("registered once for all rings"),
        Some((method, ..)) => println!("SKIP: {method}"),
    }
    Ok(())
}
