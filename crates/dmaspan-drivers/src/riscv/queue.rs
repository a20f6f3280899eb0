//! The command queue ("Command-Queue"): commands go in as batches, and a fence behind each batch
//! says when it is done.

use core::ops::Range;

use dmaspan::PhysAddr;
use dmaspan::iommu::HardwareError;
use lock_api::RawMutex;

use super::GONE;
use super::spec::{
    COMMAND_LG2, CQB, CQCSR, CQCSR_ERRORS, CQCSR_ILLEGAL, CQCSR_TIMEOUT, CQH, CQT, CSR_BUSY,
    CSR_ENABLE, CSR_ON, Command, FENCE, NOTHING,
};
use super::start::{lg2_bytes, queue_base, turn_on};
use crate::Mmio;
use crate::error::Error;
use crate::host::{Host, NoMemory, Structure};
use crate::ring::{Full, Ring, State};
use crate::structure::Words;

pub(super) struct CommandQueue<S, L> {
    /// Several CPUs place commands in one ring.
    ring: Ring<S, L>,
}

impl<S: Structure, L: RawMutex> CommandQueue<S, L> {
    /// A ring of `2^lg2` commands.
    pub(super) fn new<H: Host<Structure = S>>(
        host: &H,
        lg2: u32,
        max_paddr: PhysAddr,
    ) -> Result<Self, NoMemory> {
        let words = Words::new(host, lg2_bytes(lg2, COMMAND_LG2), max_paddr)?;
        Ok(Self { ring: Ring::new(words, lg2, COMMAND_LG2 - 3, Full::EmptyPlace) })
    }

    /// Gives hardware the ring and turns the queue on, which is off.
    pub(super) fn start<R: Mmio>(&self, registers: &R, host: &impl Host) -> Result<(), Error> {
        let Ring { words, .. } = &self.ring;
        queue_base(registers, CQB, words, self.ring.lg2(), "command queue of that size")?;
        // It has whatever value, and hardware starts with what is before it.
        registers.write32(CQT, 0);
        turn_on(registers, host, CQCSR, CSR_ENABLE, "the command queue does not start")?;
        Ok(())
    }

    /// Gives the memory back of a queue that is off.
    pub(super) fn free(&mut self) {
        self.ring.words.free_in_place();
    }

    /// Makes hardware execute `commands`, and waits until it has, and until every access that it
    /// processed before is seen by everybody.
    pub(super) fn run<R: Mmio>(
        &self,
        registers: &R,
        host: &impl Host,
        commands: &[Command],
    ) -> Result<(), HardwareError> {
        // One place is the fence's.
        let most = usize::try_from(self.ring.capacity() - 1).unwrap_or(usize::MAX).max(1);
        let mut rest = commands;
        let mut start = None;
        loop {
            let (now, later) = rest.split_at(rest.len().min(most));
            let fence: &[Command] = if later.is_empty() { &[FENCE] } else { &[] };
            let place = self.place(registers, host, now, fence)?;
            let start = *start.get_or_insert(place.start);
            if later.is_empty() {
                return self.wait(registers, host, &(start..place.end));
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
        let placed = self.ring.place(host, |state| {
            // Room is made by hardware that goes on; and where it has not passed an error yet, what
            // is placed now is not to be blamed for another one.
            if self.ring.room(state) < len || state.head < state.spoiled {
                self.look(registers, state)?;
            }
            if self.ring.room(state) < len {
                return Ok(false);
            }
            for &command in commands.iter().chain(fence) {
                self.ring.push(state, command);
            }
            registers.write32(CQT, self.index(state.tail));
            Ok(true)
        });
        placed.unwrap_or_else(|| Err(stuck(registers, "the command queue stays full")))
    }

    /// Waits until hardware has passed the end of a batch, whose last command is a fence: "a
    /// IOFENCE.C command completion, as determined by cqh advancing past the index".
    fn wait<R: Mmio>(
        &self,
        registers: &R,
        host: &impl Host,
        batch: &Range<u64>,
    ) -> Result<(), HardwareError> {
        let look = |state: &mut State| self.look(registers, state).map(|()| state.head);
        let done = self.ring.wait(host, batch, look, stopped);
        done.unwrap_or_else(|| Err(stuck(registers, "a fence of the command queue is not reached")))
    }

    /// Looks how far hardware has come, and makes it go on where an error stopped it.
    fn look<R: Mmio>(&self, registers: &R, state: &mut State) -> Result<(), HardwareError> {
        let index = registers.read32(CQH);
        let is_place = self.ring.index(index.into()) == u64::from(index);
        if !is_place || !self.ring.advance(state, index.into()) {
            let what = if index == u32::MAX { GONE } else { "cqh is where no command is" };
            return Err(HardwareError { what, status: index.into() });
        }
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
        (state.head..state.tail).for_each(|position| self.ring.set(position, NOTHING));
        state.spoil(csr.into());
        registers.write32(CQCSR, CSR_ENABLE | csr & CQCSR_ERRORS);
        // Hardware may look at the queue only when the tail is written.
        registers.write32(CQT, self.index(state.tail));
    }

    fn index(&self, position: u64) -> u32 {
        u32::try_from(self.ring.index(position)).unwrap_or(0)
    }
}

/// Why the queue stopped.
fn stopped(csr: u64) -> HardwareError {
    let what = if csr & u64::from(CQCSR_ILLEGAL) != 0 {
        "the IOMMU refused a command"
    } else if csr & u64::from(CQCSR_TIMEOUT) != 0 {
        "a command of the IOMMU took too long"
    } else {
        "the IOMMU could not reach the memory of its command queue"
    };
    HardwareError { what, status: csr }
}

/// What `cqcsr` says where nothing else does.
fn stuck<R: Mmio>(registers: &R, what: &'static str) -> HardwareError {
    HardwareError { what, status: registers.read32(CQCSR).into() }
}
