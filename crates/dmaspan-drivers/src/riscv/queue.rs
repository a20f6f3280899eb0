//! The command queue ("Command-Queue"): commands go in as batches, and a fence behind each batch
//! says when it is done.

use core::ops::Range;

use dmaspan::PhysAddr;
use dmaspan::iommu::HardwareError;
use lock_api::{Mutex, RawMutex};

use super::GONE;
use super::spec::{
    COMMAND_LG2, CQB, CQCSR, CQCSR_ERRORS, CQCSR_ILLEGAL, CQCSR_TIMEOUT, CQH, CQT, CSR_BUSY,
    CSR_ENABLE, CSR_ON, Command, FENCE, NOTHING,
};
use super::start::{Ring, queue_base, turn_on};
use crate::Mmio;
use crate::error::Error;
use crate::host::{Host, NoMemory, Structure, poll};

/// The ring, and who is where in it.
pub(super) struct CommandQueue<S, L> {
    ring: Ring<S>,
    /// Several CPUs place commands in one ring. Nobody waits for hardware under it.
    state: Mutex<L, State>,
}

/// Places in the queue, counted from the first command ever, so that they never wrap.
struct State {
    /// Where the next command goes.
    tail: u64,
    /// The command that hardware fetches next, when it was looked at last.
    head: u64,
    /// Batches that begin before it were in the queue when an error stopped it.
    spoiled: u64,
    /// `cqcsr` at that error.
    error: u32,
}

impl<S: Structure, L: RawMutex> CommandQueue<S, L> {
    /// A ring of `2^lg2` commands.
    pub(super) fn new<H: Host<Structure = S>>(
        host: &H,
        lg2: u32,
        max_paddr: PhysAddr,
    ) -> Result<Self, NoMemory> {
        let ring = Ring::new(host, lg2, COMMAND_LG2, max_paddr)?;
        let state = State { tail: 0, head: 0, spoiled: 0, error: 0 };
        Ok(Self { ring, state: Mutex::new(state) })
    }

    /// Gives hardware the ring and turns the queue on, which is off.
    pub(super) fn start<R: Mmio>(&self, registers: &R, host: &impl Host) -> Result<(), Error> {
        queue_base(registers, CQB, &self.ring, "command queue of that size")?;
        // It has whatever value, and hardware starts with what is before it.
        registers.write32(CQT, 0);
        turn_on(registers, host, CQCSR, CSR_ENABLE, "the command queue does not start")?;
        Ok(())
    }

    /// Gives the memory back of a queue that is off.
    pub(super) fn free(&mut self) {
        self.ring.free();
    }

    /// Makes hardware execute `commands`, and waits until it has, and until every access that it
    /// processed before is seen by everybody.
    pub(super) fn run<R: Mmio>(
        &self,
        registers: &R,
        host: &impl Host,
        commands: &[Command],
    ) -> Result<(), HardwareError> {
        // One place stays empty, and one is the fence's.
        let most = usize::try_from((1u64 << self.ring.lg2()) - 2).unwrap_or(usize::MAX).max(1);
        let mut rest = commands;
        let mut start = None;
        loop {
            let (now, later) = rest.split_at(rest.len().min(most));
            let fence: &[Command] = if later.is_empty() { &[FENCE] } else { &[] };
            let place = self.place(registers, host, now, fence)?;
            let start = *start.get_or_insert(place.start);
            if later.is_empty() {
                return self.wait(registers, host, start..place.end);
            }
            rest = later;
        }
    }

    /// Puts commands into the queue as soon as there is room for all.
    fn place<R: Mmio>(
        &self,
        registers: &R,
        host: &impl Host,
        commands: &[Command],
        fence: &[Command],
    ) -> Result<Range<u64>, HardwareError> {
        let len = (commands.len() + fence.len()) as u64;
        let placed = poll(host, || {
            let mut state = self.state.lock();
            let room = |state: &State| (1 << self.ring.lg2()) - 1 - (state.tail - state.head);
            // Room is made by hardware that goes on; and where it has not passed an error yet, what
            // is placed now is not to be blamed for another one.
            if (room(&state) < len || state.head < state.spoiled)
                && let Err(error) = self.look(registers, &mut state)
            {
                return Some(Err(error));
            }
            if room(&state) < len {
                return None;
            }
            let start = state.tail;
            for command in commands.iter().chain(fence) {
                self.store(state.tail, command);
                state.tail += 1;
            }
            registers.write32(CQT, self.index(state.tail));
            Some(Ok(start..state.tail))
        });
        placed.unwrap_or_else(|| Err(stuck(registers, "the command queue stays full")))
    }

    /// Waits until hardware has passed the end of a batch, whose last command is a fence: "a
    /// IOFENCE.C command completion, as determined by cqh advancing past the index".
    fn wait<R: Mmio>(
        &self,
        registers: &R,
        host: &impl Host,
        batch: Range<u64>,
    ) -> Result<(), HardwareError> {
        let done = poll(host, || {
            let mut state = self.state.lock();
            if let Err(error) = self.look(registers, &mut state) {
                return Some(Err(error));
            }
            // Which of the batches in the queue met the error is not known for sure.
            if batch.start < state.spoiled {
                return Some(Err(stopped(state.error)));
            }
            (state.head >= batch.end).then_some(Ok(()))
        });
        done.unwrap_or_else(|| Err(stuck(registers, "a fence of the command queue is not reached")))
    }

    /// Looks how far hardware has come, and makes it go on where an error stopped it.
    fn look<R: Mmio>(&self, registers: &R, state: &mut State) -> Result<(), HardwareError> {
        let index = registers.read32(CQH);
        let passed = u64::from(index.wrapping_sub(self.index(state.head)) & self.mask());
        if index > self.mask() || passed > state.tail - state.head {
            let what = if index == u32::MAX { GONE } else { "cqh is where no command is" };
            return Err(HardwareError { what, status: index.into() });
        }
        state.head += passed;
        if state.head == state.tail {
            return Ok(());
        }
        let csr = registers.read32(CQCSR);
        if csr == u32::MAX {
            return Err(HardwareError { what: GONE, status: csr.into() });
        }
        if csr & (CSR_ON | CSR_BUSY) == 0 {
            let what = "the command queue is off";
            return Err(HardwareError { what, status: csr.into() });
        }
        // A register that is busy is not to be written.
        if csr & CQCSR_ERRORS != 0 && csr & CSR_BUSY == 0 {
            self.recover(registers, state, csr);
        }
        Ok(())
    }

    /// Makes a queue usable again that stopped at its head. Everybody who has commands in the queue
    /// is told that they failed, so none of them is executed any more.
    fn recover<R: Mmio>(&self, registers: &R, state: &mut State, csr: u32) {
        (state.head..state.tail).for_each(|place| self.store(place, &NOTHING));
        state.spoiled = state.tail;
        state.error = csr;
        registers.write32(CQCSR, CSR_ENABLE | csr & CQCSR_ERRORS);
        // Hardware may look at the queue only when the tail is written.
        registers.write32(CQT, self.index(state.tail));
    }

    fn store(&self, place: u64, command: &Command) {
        let first = self.index(place) as usize * command.len();
        for (index, &word) in (first..).zip(command) {
            self.ring.set(index, word);
        }
    }

    fn mask(&self) -> u32 {
        (1 << self.ring.lg2()) - 1
    }

    fn index(&self, place: u64) -> u32 {
        u32::try_from(place & u64::from(self.mask())).unwrap_or(0)
    }
}

/// Why the queue stopped.
fn stopped(csr: u32) -> HardwareError {
    let what = if csr & CQCSR_ILLEGAL != 0 {
        "the IOMMU refused a command"
    } else if csr & CQCSR_TIMEOUT != 0 {
        "a command of the IOMMU took too long"
    } else {
        "the IOMMU could not reach the memory of its command queue"
    };
    HardwareError { what, status: csr.into() }
}

/// What `cqcsr` says where nothing else does.
fn stuck<R: Mmio>(registers: &R, what: &'static str) -> HardwareError {
    HardwareError { what, status: registers.read32(CQCSR).into() }
}
