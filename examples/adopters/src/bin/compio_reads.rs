//! Tasks of compio read a file into buffers of a pool, by fixed reads of compio's own ring.
//!
//! The runtime shows its ring by its file alone, which is enough to attach the pool. compio has no
//! fixed read, but runs operations of others: ours owns the buffer until compio has seen the
//! completion, also where the task that waited is gone. For compio's own operations a `Block`
//! implements the traits of its buffers, with nothing unsafe.
//!
//! Glue: 33 lines; unsafe: 3 blocks, 1 impl.

use std::error::Error;
use std::fs::{self, File};
use std::future::Future;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use compio::BufResult;
use compio::buf::{IoBuf, IoBufMut, SetLen};
use compio::driver::{Extra, OpCode, OpEntry};
use compio::io::AsyncReadAt;
use compio::runtime::{Runtime, submit};
use dmaspan::Errno;
use dmaspan_linux::fixed::{
    AttachMethod, FixedBuf, FixedPool, InFlight, PoolOptions, RingAttachError, RingAttachment,
    RingFile,
};

const BLOCK: usize = 16 << 10;
const BLOCKS: usize = 100;

// ANCHOR: glue
/// Puts a pool into the ring of a runtime.
fn attach(pool: &FixedPool, runtime: &Runtime) -> Result<RingAttachment, RingAttachError> {
    // SAFETY: the runtime keeps its ring open.
    let ring = unsafe { BorrowedFd::borrow_raw(runtime.as_raw_fd()) };
    // SAFETY: compio registers no buffers, so that the slots are nobody else's.
    unsafe { pool.attach_fd(ring, 0) }
}

/// A read that compio runs.
struct FixedRead {
    flight: Option<InFlight>,
    buffer: Option<FixedBuf>,
    /// Open until the read is done.
    _file: Arc<OwnedFd>,
}

// SAFETY: the entry is the operation's, which owns its buffer for as long as the kernel uses it.
unsafe impl OpCode for FixedRead {
    type Control = ();

    fn create_entry(&mut self, (): &mut ()) -> OpEntry {
        self.flight.as_ref().map_or(OpEntry::Blocking, |flight| flight.entry().into())
    }

    unsafe fn set_result(&mut self, (): &mut (), result: &io::Result<usize>, _: &Extra) {
        let errno = |error: &io::Error| -error.raw_os_error().unwrap_or(Errno::EIO.get());
        let raw = result.as_ref().map_or_else(errno, |len| i32::try_from(*len).unwrap_or(i32::MAX));
        // SAFETY: compio says that the kernel has done the operation, or never got it.
        let landed = self.flight.take().map(|flight| unsafe { flight.complete_with(raw) });
        self.buffer = landed.map(|(buffer, _)| buffer);
    }
}

/// Reads into a whole buffer, by the slots of the pool in the runtime's ring.
async fn read(
    at: &RingAttachment,
    file: &Arc<OwnedFd>,
    offset: u64,
    buffer: FixedBuf,
) -> io::Result<(usize, FixedBuf)> {
    let (target, bytes) = (RingFile::Fd(file.as_raw_fd()), 0..buffer.byte_len());
    let flight = buffer.read(at, target, offset, bytes).map_err(io::Error::other)?;
    let read = FixedRead { flight: Some(flight), buffer: None, _file: Arc::clone(file) };
    let BufResult(result, read) = submit(read).await;
    Ok((result?, read.buffer.ok_or(io::ErrorKind::Other)?))
}
// ANCHOR_END: glue

/// A buffer for compio's own operations, and how much of it is filled.
struct Block {
    buffer: FixedBuf,
    len: usize,
}

impl IoBuf for Block {
    fn as_init(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

impl SetLen for Block {
    unsafe fn set_len(&mut self, len: usize) {
        self.len = len;
    }
}

impl IoBufMut for Block {
    fn as_uninit(&mut self) -> &mut [MaybeUninit<u8>] {
        self.buffer[..].as_uninit()
    }
}

/// Reads all blocks by a task each, of which those without a buffer wait for one.
async fn read_all(at: &RingAttachment, file: &Arc<OwnedFd>) -> Result<Vec<u8>, Box<dyn Error>> {
    let task = |block: usize| {
        let (at, file) = (at.clone(), Arc::clone(file));
        compio::runtime::spawn(async move {
            let buffer = at.pool().take_async().await;
            let (len, buffer) = read(&at, &file, (block * BLOCK) as u64, buffer).await?;
            Ok::<_, io::Error>(buffer[..len].to_vec())
        })
    };
    let tasks: Vec<_> = (0..BLOCKS).map(task).collect();
    let mut found = Vec::new();
    for task in tasks {
        found.extend(task.await.map_err(|_| "a task panicked")??);
    }
    Ok(found)
}

/// Gives a read up while the kernel has it, and gets its buffer again.
async fn give_up(at: &RingAttachment) -> Result<(), Box<dyn Error>> {
    let (reader, mut writer) = io::pipe()?;
    let reader = Arc::new(OwnedFd::from(reader));
    let mut taken = Vec::new();
    while let Some(buffer) = at.pool().take() {
        taken.push(buffer);
    }
    let buffer = taken.pop().ok_or("no buffer is free")?;
    let place = buffer.index();
    {
        let mut waiting = pin!(read(at, &reader, u64::MAX, buffer));
        std::future::poll_fn(|context| Poll::Ready(waiting.as_mut().poll(context).is_ready()))
            .await;
    }
    println!("free while the kernel has it: {}", at.pool().free_slices());
    let again = at.pool().take_async().await;
    println!("free when it is done: {}", again.index() == place);
    writer.write_all(b"late")?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let runtime = match Runtime::new() {
        Ok(runtime) if runtime.driver_type().is_iouring() => runtime,
        _ => {
            println!("SKIP: compio has no io_uring here");
            return Ok(());
        }
    };
    let contents: Vec<u8> = (0..BLOCKS * BLOCK - 777).map(|n| ((n * n) >> 7) as u8).collect();
    let path = std::env::temp_dir().join(format!("dmaspan-compio-{}", std::process::id()));
    File::create_new(&path)?.write_all(&contents)?;
    let file = Arc::new(OwnedFd::from(File::open(&path)?));

    let pool = FixedPool::new(&PoolOptions::new(BLOCK as u64, 8))?;
    let at = attach(&pool, &runtime)?;
    runtime.block_on(async {
        let found = read_all(&at, &file).await?;
        println!("read {} bytes by {BLOCKS} tasks", found.len());
        println!("they are the file's: {}", found == contents);
        give_up(&at).await?;

        // An operation of compio's.
        let block = Block { buffer: pool.take_async().await, len: 0 };
        let BufResult(result, block) = compio::fs::File::open(&path).await?.read_at(block, 7).await;
        let is_right = contents[7..].starts_with(block.as_init());
        println!("compio read {} bytes, the file's: {is_right}", result?);
        Ok::<_, Box<dyn Error>>(())
    })?;
    fs::remove_file(&path)?;
    println!("{} of {} buffers are free again", pool.free_slices(), pool.slices());
    match at.method() {
        AttachMethod::Cloned => println!("registered once for all rings"),
        method => println!("SKIP: {method}"),
    }
    Ok(())
}
