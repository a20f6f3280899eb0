//! The invalidation queue (6.5.2).
//!
//! A batch is its commands and one wait behind them, which stores the batch's number to memory: the
//! lower half of the position of its end. A wait is a fence, so that numbers are stored in their
//! order: the one that is there says that all batches up to it are done.
//!
//! Where hardware stops with an error, what is left in the queue is made harmless, and hardware
//! goes on.

use core::ops::Range;

use dmaspan::PhysAddr;
use dmaspan::iommu::HardwareError;
use lock_api::RawMutex;

use super::hardware::{GONE, Hardware, gone};
use super::spec::{self, Command, register, status};
use crate::host::{Host, NoMemory, Structure};
use crate::mmio::Mmio;
use crate::ring::{Full, Ring, State};
use crate::structure::Words;

/// log2 of the least and the most bytes of a queue (IQA.QS).
pub(super) const LG2_BYTES: (u32, u32) = (12, 19);

/// How wide commands are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// 128 bits: legacy mode.
    Narrow,
    /// 256 bits: scalable mode.
    Wide,
}

impl Width {
    /// log2 of the bytes of a command.
    const fn lg2(self) -> u32 {
        match self {
            Self::Narrow => 4,
            Self::Wide => 5,
        }
    }
}

pub(super) struct Queue<S, L> {
    /// The commands; behind them the word of the batch's number, and a word for nothing.
    ring: Ring<S, L>,
    lg2_bytes: u32,
    width: Width,
}

impl<S: Structure, L: RawMutex> Queue<S, L> {
    /// A queue that hardware is not told of yet.
    pub(super) fn new<H: Host<Structure = S>>(
        host: &H,
        lg2_bytes: u32,
        width: Width,
        max_paddr: PhysAddr,
    ) -> Result<Self, NoMemory> {
        let words = Words::new(host, lg2_bytes + 1, max_paddr)?;
        // The upper half of a wide command is 0 from the beginning.
        let ring = Ring::new(words, lg2_bytes - width.lg2(), width.lg2() - 3, Full::EmptyPlace);
        Ok(Self { ring, lg2_bytes, width })
    }

    /// What IQA is told.
    pub(super) fn address(&self) -> u64 {
        let wide = if self.width == Width::Wide { spec::WIDE } else { 0 };
        self.ring.words.paddr().get() | wide | u64::from(self.lg2_bytes - LG2_BYTES.0)
    }

    /// The word in which hardware stores numbers.
    const fn number(&self) -> usize {
        1 << (self.lg2_bytes - 3)
    }

    /// Where that word is, or the one behind it.
    fn number_address(&self, word: u64) -> u64 {
        self.ring.words.paddr().get() + (1 << self.lg2_bytes) + word * 8
    }

    /// Has hardware carry out `commands`, and waits until it has.
    pub(super) fn run<R: Mmio, H: Host>(
        &self,
        hardware: &Hardware<R, H>,
        commands: &[Command],
    ) -> Result<(), HardwareError> {
        // One place is for the wait.
        let most = usize::try_from(self.ring.capacity() - 1).unwrap_or(1);
        commands.chunks(most).try_for_each(|commands| {
            let batch = self.place(hardware, commands)?;
            self.wait(hardware, &batch)
        })
    }

    /// Places a batch whole, and says where it is.
    fn place<R: Mmio, H: Host>(
        &self,
        hardware: &Hardware<R, H>,
        commands: &[Command],
    ) -> Result<Range<u64>, HardwareError> {
        let needed = commands.len() as u64 + 1;
        let placed = self.ring.place(&hardware.host, |state| {
            if self.room(hardware, state, needed)? {
                self.fill(hardware, state, commands);
                return Ok(true);
            }
            self.recover(hardware, state).map(|()| false)
        });
        placed.unwrap_or_else(|| Err(stuck(hardware, "the invalidation queue stays full")))
    }

    /// Whether `needed` commands can be placed.
    fn room<R: Mmio, H: Host>(
        &self,
        hardware: &Hardware<R, H>,
        state: &mut State,
        needed: u64,
    ) -> Result<bool, HardwareError> {
        if self.ring.room(state) < needed {
            // A garbled head makes it neither more nor less.
            self.ring.advance(state, self.head(hardware)?);
        }
        self.look(state);
        // Half a number tells batches apart as long as fewer commands wait. Those that hardware
        // fetched and never completes are among them.
        Ok(self.ring.room(state) >= needed && state.tail - state.done < 1 << 31)
    }

    /// The place that hardware fetches from next.
    fn head<R: Mmio, H: Host>(&self, hardware: &Hardware<R, H>) -> Result<u64, HardwareError> {
        let value = hardware.read64(register::IQH);
        if value == u64::MAX {
            return Err(gone());
        }
        Ok(self.ring.index(value >> self.width.lg2()))
    }

    /// Places commands and the wait behind them. There is room.
    fn fill<R: Mmio, H: Host>(
        &self,
        hardware: &Hardware<R, H>,
        state: &mut State,
        commands: &[Command],
    ) {
        for command in commands {
            self.ring.push(state, command.words());
        }
        let number = u32::try_from((state.tail + 1) & u64::from(u32::MAX)).unwrap_or(0);
        self.ring.push(state, Command::wait(self.number_address(0), number).words());
        self.tell(hardware, state);
    }

    /// Tells hardware the tail.
    fn tell<R: Mmio, H: Host>(&self, hardware: &Hardware<R, H>, state: &State) {
        hardware.write64(register::IQT, self.ring.index(state.tail) << self.width.lg2());
    }

    /// Looks which batches are done.
    fn look(&self, state: &mut State) {
        state.stored(self.ring.words.get(self.number()), 32);
    }

    /// Waits until a batch is done.
    fn wait<R: Mmio, H: Host>(
        &self,
        hardware: &Hardware<R, H>,
        batch: &Range<u64>,
    ) -> Result<(), HardwareError> {
        let look = |state: &mut State| {
            self.look(state);
            if !state.is_over(batch) {
                self.recover(hardware, state)?;
            }
            Ok(state.done)
        };
        let failed = |status| HardwareError { what: "an invalidation failed", status };
        let waited = self.ring.wait(&hardware.host, batch, look, failed);
        waited.unwrap_or_else(|| Err(stuck(hardware, "an invalidation was not completed")))
    }

    /// Looks whether hardware stopped with an error, and makes it go on (7.2.3 and 11.4.9).
    fn recover<R: Mmio, H: Host>(
        &self,
        hardware: &Hardware<R, H>,
        state: &mut State,
    ) -> Result<(), HardwareError> {
        let status = hardware.read32(register::FSTS);
        if status == GONE {
            return Err(gone());
        }
        let errors = status & (status::QUEUE | status::COMPLETION | status::TIMEOUT);
        if errors == 0 {
            return Ok(());
        }
        if errors & (status::QUEUE | status::TIMEOUT) != 0 {
            state.spoil(status.into());
        }
        if errors & status::QUEUE != 0 {
            // The head stays at the command that hardware did not take. It and all behind it have
            // failed, and may be as bad: waits that store to where nobody looks take their places.
            let behind = self.ring.index(state.tail.wrapping_sub(self.head(hardware)?));
            for position in state.tail.saturating_sub(behind)..state.tail {
                self.ring.set(position, Command::wait(self.number_address(1), 0).words());
            }
        }
        hardware.write32(register::FSTS, errors);
        // A model fetches again only when it is told a tail; hardware ignores one that it has.
        self.tell(hardware, state);
        Ok(())
    }
}

/// What hardware says where nothing else does.
fn stuck<R: Mmio, H: Host>(hardware: &Hardware<R, H>, what: &'static str) -> HardwareError {
    HardwareError { what, status: hardware.read32(register::FSTS).into() }
}
