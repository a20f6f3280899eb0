//! Reading and writing, one way or the other.

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

/// What is done with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Op {
    /// It is read, as fio does for randread.
    Read,
    /// It is written, as for randwrite.
    Write,
}

/// A way to give a buffer to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Way {
    /// One that the ring has registered.
    Fixed,
    /// The same one by its address: the kernel pins it for the operation.
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
    /// For the operations of a plan: a registered buffer for each at a time.
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

    /// Reads some blocks both ways and compares them. Where the plan writes, they are written
    /// before, each way anew, and compared with that, too.
    ///
    /// # Errors
    ///
    /// That they differ, or an operation's.
    pub(crate) fn check(&mut self) -> Result<(), Failed> {
        let mut places = self.offsets(0);
        for place in 0..CHECKED.min(self.plan.places()) {
            let offset = places();
            if self.plan.ops.contains(&Op::Write) {
                for (number, way) in (0..).zip(WAYS) {
                    let byte = 1 + 2 * u8::try_from(place).unwrap_or(0) + number;
                    self.once(Op::Write, way, offset, byte)?;
                    self.compare(offset, Some(byte))?;
                }
            } else {
                self.compare(offset, None)?;
            }
        }
        Ok(())
    }

    /// Reads a block both ways, and compares it with the other way's and with what it should be.
    fn compare(&mut self, offset: u64, byte: Option<u8>) -> Result<(), Failed> {
        let fixed = self.once(Op::Read, Way::Fixed, offset, FILL)?;
        let plain = self.once(Op::Read, Way::Plain, offset, FILL)?;
        let is_written = byte.is_none_or(|byte| fixed.iter().all(|found| *found == byte));
        if fixed == plain && is_written {
            return Ok(());
        }
        let what =
            if is_written { "both ways read different bytes" } else { "other bytes are read" };
        Err(self.failed(format_args!("at {offset} {what}: is somebody writing to it?")))
    }

    /// Reads or writes one block, the buffer of which has this byte everywhere before, and returns
    /// a copy of the buffer.
    fn once(&mut self, op: Op, way: Way, offset: u64, byte: u8) -> Result<Vec<u8>, Failed> {
        // Every buffer is free between two runs.
        let Some(mut buffer) = self.pool.take() else { return Ok(Vec::new()) };
        buffer.fill(byte);
        self.begin(op, way, buffer, offset)?;
        loop {
            self.wait()?;
            if let Some(done) = self.ring.completion() {
                self.moved(&done)?;
                return Ok(done.buffer[..self.plan.block_len].to_vec());
            }
        }
    }

    /// Reads or writes as many blocks as a run has, at random places, and says what that took. Both
    /// ways of a run do it at the same places.
    ///
    /// # Errors
    ///
    /// The first that failed.
    pub(crate) fn run(&mut self, op: Op, way: Way, run: u32) -> Result<Taken, Failed> {
        let mut places = self.offsets(run);
        let (mut begun, mut done) = (0, 0);
        let clocks = Clocks::start(&self.plan.source, op);
        while done < self.plan.count {
            while begun < self.plan.count
                && let Some(buffer) = self.pool.take()
            {
                self.begin(op, way, buffer, places())?;
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

    fn begin(&mut self, op: Op, way: Way, buffer: FixedBuf, at: u64) -> Result<(), Failed> {
        let (bytes, file) = (0..self.plan.block_len, &self.plan.source.file);
        let begun = match (op, way) {
            (Op::Read, Way::Fixed) => self.ring.read(buffer, bytes, file, at, at),
            (Op::Read, Way::Plain) => self.ring.read_unregistered(buffer, bytes, file, at, at),
            (Op::Write, Way::Fixed) => self.ring.write(buffer, bytes, file, at, at),
            (Op::Write, Way::Plain) => self.ring.write_unregistered(buffer, bytes, file, at, at),
        };
        let begun = begun.map_err(|RefusedOperation { error, .. }| error);
        begun.map_err(Failed::at("an operation does not begin"))
    }

    fn wait(&mut self) -> Result<(), Failed> {
        match self.ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                Err(Failed::at("io_uring failed")(words(&error)))
            }
            _ => Ok(()),
        }
    }

    /// Whether an operation moved all of its bytes.
    fn moved(&self, done: &Completion) -> Result<(), Failed> {
        let (offset, block) = (done.token, self.plan.block);
        match &done.result {
            Ok(got) if *got == self.plan.block_len => Ok(()),
            // Somebody cut it off.
            Ok(got) => Err(self.failed(format_args!(
                "at {offset} {got} bytes of {block} were moved: it became shorter"
            ))),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                Err(self.failed(format_args!(
                    "direct I/O of {} is refused at {offset}: --block must be a multiple of the \
                     blocks of its file system or disk, like 4K",
                    ByteSize::new(block)
                )))
            }
            Err(error) => Err(self.failed(format_args!(
                "at {offset} it failed: {}: dmesg may say more",
                words(error)
            ))),
        }
    }

    fn failed(&self, words: impl Display) -> Failed {
        Failed::at(self.plan.source.path.display())(words)
    }
}
