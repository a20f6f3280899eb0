//! Reading, one way or the other.

use std::fmt::Display;
use std::io;

use clap::ValueEnum;
use dmaspan_linux::fixed::{
    AttachMethod, Completion, FixedBuf, FixedPool, FixedRing, MemoryChoice, PoolOptions,
    RefusedOperation,
};
use dmaspan_sim::rng::Rng;

use super::clocks::{Clocks, Taken};
use super::plan::Plan;
use super::source::words;
use crate::failed::Failed;
use dmaspan_cli::size::ByteSize;

/// How many blocks are compared.
const CHECKED: u64 = 4;
/// What is in a buffer before that: any bytes.
const FILL: u8 = 0xa5;

/// A way to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Way {
    /// Into a buffer that the ring has registered.
    Fixed,
    /// Into the same buffer, which the kernel pins for the read.
    Plain,
}

/// Both, in the order of the report.
pub(crate) const WAYS: [Way; 2] = [Way::Fixed, Way::Plain];

/// Buffers and a ring.
pub(crate) struct Reader<'a> {
    plan: &'a Plan,
    pool: FixedPool,
    ring: FixedRing,
}

impl<'a> Reader<'a> {
    /// For the reads of a plan: a registered buffer for each at a time.
    pub(crate) fn new(plan: &'a Plan) -> Result<Self, Failed> {
        let options = PoolOptions::new(plan.buffer, plan.depth)
            .memory(MemoryChoice::Only(plan.memory))
            .buffer_len(plan.buffer);
        let pool = FixedPool::new(&options).map_err(Failed::at("no buffers"))?;
        let ring = FixedRing::new(&pool, plan.depth).map_err(Failed::at("no ring"))?;
        Ok(Self { plan, pool, ring })
    }

    /// How many buffers are registered.
    pub(crate) fn buffers(&self) -> u32 {
        self.pool.buffers()
    }

    /// How the ring got them.
    pub(crate) fn method(&self) -> AttachMethod {
        self.ring.attachment().method()
    }

    /// Reads some blocks both ways and compares them.
    ///
    /// # Errors
    ///
    /// That they differ, or a read's.
    pub(crate) fn check(&mut self) -> Result<(), Failed> {
        let mut places = self.offsets(0);
        for _ in 0..CHECKED.min(self.plan.places()) {
            let offset = places();
            let fixed = self.once(Way::Fixed, offset)?;
            let plain = self.once(Way::Plain, offset)?;
            if fixed != plain {
                return Err(self.failed(format_args!(
                    "at {offset} both ways read different bytes: is somebody writing to it?"
                )));
            }
        }
        Ok(())
    }

    /// Reads one block, and returns a copy of it.
    fn once(&mut self, way: Way, offset: u64) -> Result<Vec<u8>, Failed> {
        // Every buffer is free between two runs.
        let Some(mut buffer) = self.pool.take() else { return Ok(Vec::new()) };
        buffer.fill(FILL);
        self.begin(way, buffer, offset)?;
        loop {
            self.wait()?;
            if let Some(done) = self.ring.completion() {
                self.moved(&done)?;
                return Ok(done.buffer[..self.plan.block_len].to_vec());
            }
        }
    }

    /// Reads as many blocks as a run has, at random places, and says what that took. Both ways of
    /// a run read at the same places.
    ///
    /// # Errors
    ///
    /// The first read's that failed.
    pub(crate) fn run(&mut self, way: Way, run: u32) -> Result<Taken, Failed> {
        let mut places = self.offsets(run);
        let (mut begun, mut done) = (0, 0);
        let clocks = Clocks::start(&self.plan.source);
        while done < self.plan.count {
            while begun < self.plan.count
                && let Some(buffer) = self.pool.take()
            {
                self.begin(way, buffer, places())?;
                begun += 1;
            }
            self.wait()?;
            while let Some(completion) = self.ring.completion() {
                self.moved(&completion)?;
                done += 1;
            }
        }
        Ok(clocks.stop())
    }

    /// Random places, the same for each number.
    fn offsets(&self, seed: u32) -> impl FnMut() -> u64 + use<> {
        let (mut numbers, plan) = (Rng::new(u64::from(seed)), self.plan);
        let (places, block) = (plan.places(), plan.block);
        // Every place is in the file, whose length is a u64.
        move || numbers.below(places) * block
    }

    fn begin(&mut self, way: Way, buffer: FixedBuf, at: u64) -> Result<(), Failed> {
        let (bytes, file) = (0..self.plan.block_len, &self.plan.source.file);
        let begun = match way {
            Way::Fixed => self.ring.read(buffer, bytes, file, at, at),
            Way::Plain => self.ring.read_unregistered(buffer, bytes, file, at, at),
        };
        let begun = begun.map_err(|RefusedOperation { error, .. }| error);
        begun.map_err(Failed::at("a read does not begin"))
    }

    fn wait(&mut self) -> Result<(), Failed> {
        match self.ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                Err(Failed::at("io_uring failed")(words(&error)))
            }
            _ => Ok(()),
        }
    }

    /// Whether a read moved all of its bytes.
    fn moved(&self, done: &Completion) -> Result<(), Failed> {
        let (offset, block) = (done.token, self.plan.block);
        match &done.result {
            Ok(got) if *got == self.plan.block_len => Ok(()),
            // Somebody cut it off.
            Ok(got) => Err(self.failed(format_args!(
                "reading at {offset} gave {got} bytes of {block}: it became shorter"
            ))),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                Err(self.failed(format_args!(
                    "direct reads of {} are refused at {offset}: --block must be a multiple of the \
                     blocks of its file system or disk, like 4K",
                    ByteSize::new(block)
                )))
            }
            Err(error) => Err(self.failed(format_args!(
                "reading at {offset} failed: {}: dmesg may say more",
                words(error)
            ))),
        }
    }

    fn failed(&self, words: impl Display) -> Failed {
        Failed::at(self.plan.source.path.display())(words)
    }
}
