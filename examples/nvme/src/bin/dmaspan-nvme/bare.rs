//! A loop that is no driver: it keeps nothing but queues.
//!
//! Commands are complete when it starts, with PRPs that were written by hand for one mapping. An
//! I/O stores eight words, and one doorbell tells of several, as the driver's does; nothing is
//! checked, imported or held. Sections are of the NVM Express Base Specification 2.0.

use std::mem;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use dmaspan_nvme::Transfer;
use dmaspan_nvme::access::{Access, SharedMemory};

use crate::hand::{Fixed, PAGE};
use crate::load::{Failure, Lane};

/// Registers (section 3.1.3), and the first doorbell.
const CAP: u64 = 0;
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;
/// Enabled, with entries of 64 and 16 bytes and pages of 4 KiB.
const ENABLED: u32 = 6 << 16 | 4 << 20 | 1;
/// The phase tag in the second word of a completion.
const PHASE: u64 = 1 << 48;
/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(30);

/// A controller that does I/O with regions of one mapping.
pub(crate) struct Bare<A: Access> {
    access: A,
    io: Pair<A::Memory>,
    admin: Pair<A::Memory>,
    /// Commands without a place on the disk, one for each region.
    commands: Box<[[u64; 8]]>,
    /// Pages of PRPs, which commands point to.
    lists: Option<A::Memory>,
}

/// A submission queue and its completion queue.
struct Pair<M> {
    submission: M,
    completion: M,
    depth: u16,
    doorbells: (u64, u64),
    tail: u16,
    rung: u16,
    head: u16,
    phase: u64,
}

impl<M: SharedMemory> Pair<M> {
    fn new<A: Access<Memory = M>>(access: &A, id: u16, depth: u16) -> Result<Self, Failure> {
        let stride = 4 << (access.read64(CAP) >> 32 & 0xf);
        let first = DOORBELLS + 2 * u64::from(id) * stride;
        Ok(Self {
            submission: access.allocate(64 * u64::from(depth), PAGE)?,
            completion: access.allocate(16 * u64::from(depth), PAGE)?,
            depth,
            doorbells: (first, first + stride),
            tail: 0,
            rung: 0,
            head: 0,
            phase: PHASE,
        })
    }

    #[inline]
    fn push(&mut self, command: &[u64; 8]) {
        let (entries, _) = self.submission.words().as_chunks::<8>();
        if let Some(entry) = entries.get(usize::from(self.tail)) {
            for (place, word) in entry.iter().zip(command) {
                place.store(word.to_le(), Ordering::Relaxed);
            }
        }
        self.tail = if self.tail + 1 == self.depth { 0 } else { self.tail + 1 };
    }

    #[inline]
    fn ring<A: Access<Memory = M>>(&mut self, access: &A) {
        if self.tail != self.rung {
            self.rung = self.tail;
            fence(Ordering::Release);
            access.write32(self.doorbells.0, self.tail.into());
        }
    }

    /// The number and the status of a command that has ended.
    #[inline]
    fn pop(&mut self) -> Option<(u16, u16)> {
        let (entries, _) = self.completion.words().as_chunks::<2>();
        let second = u64::from_le(entries.get(usize::from(self.head))?[1].load(Ordering::Acquire));
        if second & PHASE != self.phase {
            return None;
        }
        self.head += 1;
        if self.head == self.depth {
            self.head = 0;
            self.phase ^= PHASE;
        }
        let bits = |shift: u32| u16::try_from(second >> shift & 0xffff).unwrap_or(0);
        Some((bits(32), bits(48) >> 1))
    }

    #[inline]
    fn popped<A: Access<Memory = M>>(&self, access: &A) {
        access.write32(self.doorbells.1, self.head.into());
    }
}

impl<A: Access> Bare<A> {
    /// Resets and starts a controller, with queues for as many I/Os as there are regions.
    pub(crate) fn new(access: A, fixed: &Fixed) -> Result<Self, Failure> {
        let cap = access.read64(CAP);
        if cap >> 48 & 0xf != 0 || cap & 0xffff < u64::from(fixed.load.regions) {
            return Err("the controller has no pages of 4 KiB, or no queue of --depth".into());
        }
        await_ready(&access, 0)?;
        let admin = Pair::new(&access, 0, 4)?;
        let io = Pair::new(&access, 1, fixed.load.regions + 1)?;
        let lists = fixed.lists(&access)?;
        access.write32(AQA, 3 << 16 | 3);
        access.write64(ASQ, admin.submission.addr().get());
        access.write64(ACQ, admin.completion.addr().get());
        let commands = commands(fixed, &fixed.prps(lists.as_ref()));
        let mut bare = Self { access, io, admin, commands, lists };
        if let Err(error) = bare.start() {
            bare.stop()?;
            return Err(error);
        }
        Ok(bare)
    }

    fn start(&mut self) -> Result<(), Failure> {
        await_ready(&self.access, ENABLED)?;
        let (depth, io) = (u64::from(self.io.depth - 1) << 16 | 1, &self.io);
        let (completion, submission) = (io.completion.addr().get(), io.submission.addr().get());
        // Create I/O Completion Queue and Create I/O Submission Queue (sections 5.4 and 5.5).
        self.admin(&[5, 0, 0, completion, 0, 1 << 32 | depth, 0, 0])?;
        self.admin(&[1, 0, 0, submission, 0, (1 << 16 | 1) << 32 | depth, 0, 0])
    }

    fn admin(&mut self, command: &[u64; 8]) -> Result<(), Failure> {
        self.admin.push(command);
        self.admin.ring(&self.access);
        let began = Instant::now();
        while began.elapsed() < LIMIT {
            if let Some((_, status)) = self.admin.pop() {
                self.admin.popped(&self.access);
                let failed = || format!("an admin command failed with status {status:#x}").into();
                return if status == 0 { Ok(()) } else { Err(failed()) };
            }
        }
        Err("the controller did not complete an admin command in time".into())
    }

    /// Stops the controller, and frees what it used. Where it does not stop, that is leaked.
    pub(crate) fn stop(self) -> Result<(), Failure> {
        let Self { access, io, admin, lists, .. } = self;
        let stopped = await_ready(&access, 0);
        if stopped.is_err() {
            mem::forget((access, io, admin, lists));
        }
        stopped
    }
}

impl<A: Access> Lane for Bare<A> {
    #[inline]
    fn submit(&mut self, region: u16, lba: u64) -> Result<(), Failure> {
        if let Some(command) = self.commands.get_mut(usize::from(region)) {
            command[5] = lba;
            self.io.push(command);
        }
        Ok(())
    }

    #[inline]
    fn reap(&mut self, mut ended: impl FnMut(u16)) -> Result<(), Failure> {
        self.io.ring(&self.access);
        let mut failed = 0;
        let mut any = false;
        while let Some((region, status)) = self.io.pop() {
            any = true;
            failed |= status;
            ended(region);
        }
        if any {
            self.io.popped(&self.access);
        }
        if failed == 0 { Ok(()) } else { Err(format!("an I/O failed: status {failed:#x}").into()) }
    }

    fn check(&self) -> Result<(), Failure> {
        // All ones have the bit of a fatal status too.
        match self.access.read32(CSTS) {
            csts if csts & 2 != 0 => {
                Err(format!("the controller has failed (CSTS {csts:#x})").into())
            }
            _ => Ok(()),
        }
    }
}

/// A command of each region, without its place on the disk.
fn commands(fixed: &Fixed, prps: &[[u64; 2]]) -> Box<[[u64; 8]]> {
    let opcode = match fixed.load.transfer {
        Transfer::Write => 1,
        Transfer::Read => 2,
    };
    let blocks = fixed.load.bytes >> fixed.load.block_lg2;
    let command = |(region, [prp1, prp2]): (u64, &[u64; 2])| {
        [opcode | region << 16 | 1 << 32, 0, 0, *prp1, *prp2, 0, blocks - 1, 0]
    };
    (0..).zip(prps).map(command).collect()
}

/// Writes CC and waits until CSTS.RDY is as CC.EN.
fn await_ready<A: Access>(access: &A, cc: u32) -> Result<(), Failure> {
    access.write32(CC, cc);
    let began = Instant::now();
    while began.elapsed() < LIMIT {
        if access.read32(CSTS) & 1 == cc & 1 {
            return Ok(());
        }
    }
    Err("the controller did not become ready in time".into())
}
