//! Reads a file through fixed buffers of io_uring: registered once, used for every read.
//!
//! Each operation owns its slice of the pool until its completion has come, so the program cannot
//! touch bytes that the kernel writes. Nothing here is unsafe.

// ANCHOR: head
use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::sync::Arc;

use dmaspan_linux::fixed::{FixedPool, FixedRing, PoolOptions};

/// What each read asks for.
const BLOCK: usize = 64 << 10;
/// How many reads there are at a time.
const DEPTH: u32 = 8;
// ANCHOR_END: head

fn main() -> Result<(), Box<dyn Error>> {
    // A file of 1 MiB and a bit, of bytes that are easily checked.
    let path = std::env::temp_dir().join(format!("dmaspan-fixed-read-{}", std::process::id()));
    let bytes: Vec<u8> = (0..(1 << 20) + 12_345u32).map(|n| (n % 251) as u8).collect();
    File::create_new(&path)?.write_all(&bytes)?;
    let read = read(&Arc::new(File::open(&path)?), bytes.len());
    fs::remove_file(&path)?;

    match read? {
        Some(read) => {
            println!("read {} bytes by reads of {BLOCK}, {DEPTH} at a time", read.len());
            println!("they are {}", if read == bytes { "right" } else { "WRONG" });
        }
        None => println!("SKIP: io_uring cannot be used here"),
    }
    Ok(())
}

// ANCHOR: read
/// Reads `len` bytes of a file, `DEPTH` blocks at a time; `None` where there can be no ring.
fn read(file: &Arc<File>, len: usize) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
    // The best memory that this machine gives: huge pages, where there are some.
    let pool = FixedPool::new(&PoolOptions::new(BLOCK as u64, DEPTH))?;
    let mut ring = match FixedRing::new(&pool, DEPTH) {
        Ok(ring) => ring,
        Err(error) => {
            eprintln!("{error}");
            return Ok(None);
        }
    };
    let mut read = vec![0; len];
    let mut next = 0;
    loop {
        // A slice for each block that is still to be read; none is left when `DEPTH` are in flight.
        while next < len {
            let Some(buffer) = pool.take() else { break };
            let block = BLOCK.min(len - next);
            ring.read(buffer, 0..block, file, next as u64, next as u64)?;
            next += block;
        }
        if ring.in_flight() == 0 {
            return Ok(Some(read));
        }
        ring.submit_and_wait(1)?;
        while let Some(done) = ring.completion() {
            let at = usize::try_from(done.token)?;
            let bytes = done.result?;
            // The buffer is the program's again, as a slice.
            read[at..at + bytes].copy_from_slice(&done.buffer[..bytes]);
        }
    }
}
// ANCHOR_END: read
