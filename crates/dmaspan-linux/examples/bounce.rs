//! A bounce pool: what a confidential guest shares with its host, and nothing else.
//!
//! The host's devices reach the pool's memory alone. A buffer that goes to a device is copied into
//! a slot, and what a device wrote is copied back. The example plays the host: it looks into the
//! shared memory, and lies about how much it wrote.

// ANCHOR: head
use std::error::Error;

use dmaspan::Direction;
use dmaspan::swiotlb::{Fill, Pool, PoolConfig, SlotRequest};
use dmaspan_linux::{BounceMemory, Memory, MemoryKind, UserPlatform};

const SECRET: u64 = 0x5ec7_e75e_c7e7_5ec7;

/// How many words of the shared memory are the secret.
fn secrets(shared: &Memory) -> Result<usize, Box<dyn Error>> {
    let mut secrets = 0;
    for offset in (0..shared.len()).step_by(8) {
        secrets += usize::from(shared.read_u64(offset)? == SECRET);
    }
    Ok(secrets)
}
// ANCHOR_END: head

fn main() -> Result<(), Box<dyn Error>> {
    // ANCHOR: pool
    // 1 MiB that is shared with the host, in two areas, so that two CPUs do not share a lock.
    let shared = BounceMemory::new(MemoryKind::Base, 1 << 20)?;
    let pool = Pool::new(shared, PoolConfig::new(2), UserPlatform)?;
    let seen = |at: u64| pool.memory().memory().read_u64(at - pool.reach().start().get());

    // The guest's own memory, which lives for ever: a pool copies it while a slot stands for it.
    let private: &Memory = Box::leak(Box::new(Memory::new(MemoryKind::Base, 1 << 16)?));
    for offset in (0..private.len()).step_by(8) {
        private.write_u64(offset, SECRET)?;
    }
    // ANCHOR_END: pool

    // ANCHOR: write
    // A block goes to the device: the host sees that block, and no neighbour of it.
    private.write_u64(0x2000, 7)?;
    let any = SlotRequest::default();
    let block = private.original(0x2000, 8)?;
    let block = pool.map(block, Direction::ToDevice, Fill::Copy, &any)?;
    println!("the host reads {}", seen(block.span().start().get())?);
    println!("it sees {} words of the guest's secrets", secrets(pool.memory().memory())?);
    pool.unmap(block)?;
    // ANCHOR_END: write

    // ANCHOR: read
    // A device reports how much it wrote, and lies: 512 bytes, of which it wrote none. The slot was
    // filled before, so what comes back is what the guest had, and nobody else's bytes.
    let block = private.original(0x4000, 512)?;
    let block = pool.map(block, Direction::FromDevice, Fill::Copy, &any)?;
    pool.unmap_written(block, 512)?;
    println!("the block is unchanged: {}", private.read_u64(0x4000)? == SECRET);

    // How full it is, and the longest buffer that it takes in one piece.
    let large = private.original(0, 1 << 16)?;
    let kept = pool.map(large, Direction::ToDevice, Fill::Copy, &any)?;
    println!("in use: {:?}", pool.stats());
    pool.unmap(kept)?;
    println!("at most {:#x} bytes fit in one piece", pool.max_len(&any));
    println!("in use in the end: {}", pool.stats().used);
    Ok(())
    // ANCHOR_END: read
}
