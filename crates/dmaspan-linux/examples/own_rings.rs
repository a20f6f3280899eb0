//! Fixed buffers in rings of one's own: two rings, one pool, one registration.
//!
//! An application that has rings already attaches the pool to each, and submits its own entries.
//! The operation that an entry belongs to owns its buffer until the completion has been seen, which
//! only the application can say. That is the one promise here.

#![expect(unsafe_code, reason = "the application says when its ring is done with a buffer")]

// ANCHOR: head
use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;

use dmaspan_linux::fixed::{FixedPool, InFlight, PoolOptions, RingAttachment, RingFile};
use io_uring::IoUring;

const BLOCK: usize = 4096;
// ANCHOR_END: head

// ANCHOR: ring
/// A ring of the application, with the pool in it, and what is in flight there by its number.
struct Reader {
    ring: IoUring,
    attachment: RingAttachment,
    flights: Vec<Option<InFlight>>,
}

impl Reader {
    /// `None` where io_uring cannot be used.
    fn new(pool: &FixedPool) -> Result<Option<Self>, Box<dyn Error>> {
        let Ok(ring) = IoUring::new(8) else { return Ok(None) };
        let attachment = pool.attach(&ring.submitter(), 0)?;
        Ok(Some(Self { ring, attachment, flights: Vec::new() }))
    }

    /// Queues a read of a block; `false` where every buffer is in use.
    fn read(&mut self, pool: &FixedPool, file: &File, block: u64) -> Result<bool, Box<dyn Error>> {
        let Some(buffer) = pool.take() else { return Ok(false) };
        let fd = RingFile::Fd(file.as_raw_fd());
        let operation = buffer.read(&self.attachment, fd, block * BLOCK as u64, 0..BLOCK)?;
        let entry = operation.entry().user_data(self.flights.len() as u64);
        self.flights.push(Some(operation)); // it stays there until its completion has come
        // SAFETY: the file is open, and the operation, which is kept, owns the buffer.
        unsafe { self.ring.submission().push(&entry)? };
        Ok(true)
    }

    /// Waits for all that is in flight, and calls `each` with the bytes of each read.
    fn wait(&mut self, mut each: impl FnMut(&[u8])) -> Result<(), Box<dyn Error>> {
        let count = self.flights.iter().flatten().count();
        self.ring.submit_and_wait(count)?;
        for done in self.ring.completion() {
            let number = usize::try_from(done.user_data())?;
            let operation = self.flights[number].take().ok_or("completed twice")?;
            // SAFETY: the number says that this completion is the operation's.
            let (buffer, result) = unsafe { operation.complete(&done) };
            each(&buffer[..result?]);
        }
        Ok(())
    }
}
// ANCHOR_END: ring

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::temp_dir().join(format!("dmaspan-own-rings-{}", std::process::id()));
    let bytes: Vec<u8> = (0..8).flat_map(|block| [b'a' + block; BLOCK]).collect();
    File::create_new(&path)?.write_all(&bytes)?;
    let file = File::open(&path)?;
    fs::remove_file(&path)?;

    // ANCHOR: main
    let pool = FixedPool::new(&PoolOptions::new(BLOCK as u64, 6))?;
    let (Some(mut first), Some(mut second)) = (Reader::new(&pool)?, Reader::new(&pool)?) else {
        println!("SKIP: io_uring cannot be used here");
        return Ok(());
    };
    for block in 0..4 {
        first.read(&pool, &file, block)?;
    }
    let taken =
        (4..8).map(|block| second.read(&pool, &file, block)).collect::<Result<Vec<_>, _>>()?;
    println!("the second ring got buffers: {taken:?}, of {} in the pool", pool.slices());

    let mut blocks = Vec::new();
    first.wait(|bytes| blocks.push(bytes[0] as char))?;
    second.wait(|bytes| blocks.push(bytes[0] as char))?;
    blocks.sort_unstable();
    println!("read the blocks of {}", blocks.iter().collect::<String>());
    println!("{} buffers are free again", pool.free_slices());
    Ok(())
    // ANCHOR_END: main
}
