//! The bench: the driver and, in turn, what it is compared with.

use std::mem;
use std::sync::Arc;

use dmaspan_linux::Memory;
use dmaspan_nvme::vfio::{VfioAccess, VfioBuffer};
use dmaspan_nvme::{
    CommandId, Completed, Controller, Error, IoQueue, Namespace, QueueConfig, Transfer,
};

use crate::args::BenchArgs;
use crate::bare::Bare;
use crate::hand::{self, Fixed};
use crate::latency::Latencies;
use crate::load::{Failure, Lane, Load, Turn, Until, Words};
use crate::report::{Report, Row};
use crate::space::Space;

/// What the bench works on.
struct Bench<'a> {
    args: &'a BenchArgs,
    space: Space,
    regions: Registered,
    /// What the disk has, from its start on.
    disk: Registered,
}

/// Memory, and what it is for the controller.
struct Registered {
    memory: Arc<Memory>,
    buffer: VfioBuffer,
}

impl Registered {
    fn new(args: &BenchArgs, space: &Space, len: u64) -> Result<Self, Failure> {
        let len = len.next_multiple_of(args.memory.page_size());
        let memory = Arc::new(Memory::new(args.memory, len)?);
        let buffer = space.buffer(&memory)?;
        Ok(Self { memory, buffer })
    }
}

/// The turns of the driver, or of what it is compared with.
struct Side {
    name: &'static str,
    turns: Vec<Turn>,
    latencies: Latencies,
}

impl Side {
    fn new(name: &'static str) -> Self {
        Self { name, turns: Vec::new(), latencies: Latencies::new() }
    }
}

/// A controller that was started, its namespace, and a queue.
type Started = (Controller<VfioAccess>, Namespace, IoQueue<VfioAccess>);

/// Measures what is asked for.
pub(crate) fn run(args: &BenchArgs) -> Result<Report, Failure> {
    args.check()?;
    let (space, access) = Space::open(&args.target)?;
    let regions = Registered::new(args, &space, u64::from(args.depth) * args.block)?;
    let disk = Registered::new(args, &space, args.span)?;
    let bench = Bench { args, space, regions, disk };
    let [mut driver, mut hand, mut bare] = ["dmaspan", "hand-written", "bare loop"].map(Side::new);
    let (mut access, mut span) = (Some(access), args.span);
    for turn in 0..args.turns {
        let namespace = bench.driver_turn(bench.access(access.take())?, turn, &mut driver)?;
        span = bench.span(&namespace);
        if args.hand_written {
            bench.hand_turn(bench.access(None)?, turn, &mut hand)?;
            bench.bare_turn(bench.access(None)?, &namespace, turn, &mut bare)?;
        }
    }
    let rows: Vec<Row> = [driver, hand, bare]
        .iter()
        .filter(|side| !side.turns.is_empty())
        .map(|side| Row::new(side.name, args.block, &side.turns, &side.latencies))
        .collect();
    Ok(Report::new(args, span, rows))
}

impl Bench<'_> {
    /// The controller: the one that was opened, or opened again.
    fn access(&self, open: Option<VfioAccess>) -> Result<VfioAccess, Failure> {
        if let Some(access) = open {
            return Ok(access);
        }
        self.space.access(&self.args.target)
    }

    fn transfer(&self) -> Transfer {
        if self.args.write { Transfer::Write } else { Transfer::Read }
    }

    /// What each of either's turns does: the same.
    fn load(&self, namespace: &Namespace, turn: u64) -> Load {
        let (count, turns) = (self.args.count, self.args.turns);
        let until = match self.args.seconds {
            Some(time) => Until::Time(time / u32::try_from(turns).unwrap_or(u32::MAX)),
            None => Until::Count(count / turns + u64::from(turn < count % turns)),
        };
        Load {
            transfer: self.transfer(),
            bytes: self.args.block,
            block_lg2: namespace.block_bytes().trailing_zeros(),
            regions: self.args.depth,
            until,
            seed: turn,
        }
    }

    fn words(&self, span: u64) -> Result<Words<'_>, Failure> {
        let disk = self.disk.memory.words();
        let span = usize::try_from(span / 8)?;
        Ok(Words { regions: self.regions.memory.words(), disk: disk.get(..span).unwrap_or(disk) })
    }

    /// The driver, as it is.
    fn driver_turn(
        &self,
        access: VfioAccess,
        turn: u64,
        side: &mut Side,
    ) -> Result<Namespace, Failure> {
        let (controller, namespace, mut queue) = self.start(access)?;
        let span = self.span(&namespace);
        if turn == 0 {
            queue.read(&namespace, 0, &self.disk.buffer, 0..span)?;
        }
        let load = self.load(&namespace, turn);
        let (Load { transfer, bytes, .. }, buffer) = (load, &self.regions.buffer);
        let mut lane = Driver::new(queue, &load, move |queue: &mut IoQueue<_>, region, lba| {
            let start = u64::from(region) * bytes;
            queue.push(transfer, &namespace, lba, buffer, start..start + bytes)
        });
        side.turns.push(load.run(&mut lane, self.words(span)?, &mut side.latencies)?);
        let mut queue = lane.queue;
        if self.args.write {
            self.check_written(&namespace, &mut queue, span)?;
        }
        controller.shutdown([queue])?;
        Ok(namespace)
    }

    /// The same driver, with PRPs that were written by hand.
    fn hand_turn(&self, access: VfioAccess, turn: u64, side: &mut Side) -> Result<(), Failure> {
        let (controller, namespace, queue) = self.start(access)?;
        let load = self.load(&namespace, turn);
        let fixed = self.fixed(load);
        let lists = fixed.lists(controller.access())?;
        let prps = fixed.prps(lists.as_ref());
        let mut lane = Driver::new(queue, &load, hand::push(namespace, &fixed, prps));
        let words = self.words(self.span(&namespace))?;
        let ran = load.run(&mut lane, words, &mut side.latencies);
        if let Err(error) = controller.shutdown([lane.queue]) {
            // The controller may still read them.
            mem::forget(lists);
            return Err(error.into());
        }
        side.turns.push(ran?);
        Ok(())
    }

    /// The loop that is no driver.
    fn bare_turn(
        &self,
        access: VfioAccess,
        namespace: &Namespace,
        turn: u64,
        side: &mut Side,
    ) -> Result<(), Failure> {
        let load = self.load(namespace, turn);
        let mut lane = Bare::new(access, &self.fixed(load))?;
        let words = self.words(self.span(namespace))?;
        let ran = load.run(&mut lane, words, &mut side.latencies);
        lane.stop()?;
        side.turns.push(ran?);
        Ok(())
    }

    fn start(&self, access: VfioAccess) -> Result<Started, Failure> {
        let mut controller = Controller::new(access, 1)?;
        let namespace = controller.namespace(1)?;
        let queue = controller.create_queue(QueueConfig::new(self.args.depth + 1))?;
        if self.args.block < namespace.block_bytes() {
            controller.shutdown([queue])?;
            let bytes = namespace.block_bytes();
            return Err(format!("--block is less than a block of the disk, {bytes} bytes").into());
        }
        Ok((controller, namespace, queue))
    }

    /// What PRPs are written for.
    fn fixed(&self, load: Load) -> Fixed {
        let segments = self.regions.buffer.buffer().segments();
        let start = segments.iter().next().map_or(0, |segment| segment.start().get());
        Fixed { load, start }
    }

    /// As much of the disk as is used.
    fn span(&self, namespace: &Namespace) -> u64 {
        let disk = namespace.blocks().saturating_mul(namespace.block_bytes());
        let span = self.args.span.min(disk);
        span - span % self.args.block
    }

    /// Reads all of it again, and compares the first and the last word of each I/O's blocks.
    fn check_written(
        &self,
        namespace: &Namespace,
        queue: &mut IoQueue<VfioAccess>,
        span: u64,
    ) -> Result<(), Failure> {
        let read = Registered::new(self.args, &self.space, span)?;
        queue.read(namespace, 0, &read.buffer, 0..span)?;
        for block in (0..span).step_by(usize::try_from(self.args.block)?) {
            for at in [block, block + self.args.block - 8] {
                if read.memory.read_u64(at)? != self.disk.memory.read_u64(at)? {
                    return Err(format!(
                        "the disk does not have at byte {at:#x} what was written there"
                    )
                    .into());
                }
            }
        }
        Ok(())
    }
}

/// The driver, as something that does I/O with regions of memory.
struct Driver<P> {
    queue: IoQueue<VfioAccess>,
    /// Enters the I/O of a region, and of the blocks from an LBA on.
    push: P,
    /// Of each command.
    regions: Vec<u16>,
}

impl<P> Driver<P> {
    fn new(queue: IoQueue<VfioAccess>, load: &Load, push: P) -> Self {
        Self { queue, push, regions: vec![0; usize::from(load.regions)] }
    }
}

impl<P> Lane for Driver<P>
where
    P: Fn(&mut IoQueue<VfioAccess>, u16, u64) -> Result<CommandId, Error>,
{
    #[inline]
    fn submit(&mut self, region: u16, lba: u64) -> Result<(), Failure> {
        let id = (self.push)(&mut self.queue, region, lba)?;
        self.regions[id.index()] = region;
        Ok(())
    }

    #[inline]
    fn reap(&mut self, mut ended: impl FnMut(u16)) -> Result<(), Failure> {
        let mut failed = None;
        let regions = &self.regions;
        self.queue.reap(|Completed { id, result, .. }| {
            failed = failed.or(result.err());
            ended(regions[id.index()]);
        })?;
        failed.map_or(Ok(()), |status| Err(format!("an I/O failed: {status}").into()))
    }

    fn check(&self) -> Result<(), Failure> {
        Ok(self.queue.check()?)
    }
}
