//! The command queue (IHI 0070, 3.5 and 4.1).

use core::iter::{self, Peekable};

use dmaspan::iommu::HardwareError;
use dmaspan::{PhysAddr, lg2};
use lock_api::Mutex;

use super::command::Command;
use super::hardware::{self, Hardware};
use super::spec::{gerror, queue, reg};
use crate::error::Error;
use crate::host::{Host, poll};
use crate::mmio::Mmio;
use crate::structure::Words;

/// log2 of a command's bytes.
const LG2_COMMAND: u32 = 4;

/// Where commands are placed. Positions count all commands ever placed, so that they never wrap;
/// the registers have their lower bits.
pub(super) struct CommandQueue<H: Host> {
    places: Words<H::Structure>,
    lg2: u32,
    state: Mutex<H::Lock, State>,
}

struct State {
    /// Where the next command goes.
    producer: u64,
    /// What was seen consumed: all commands before.
    consumer: u64,
    /// An error concerns all commands before this one.
    failed: u64,
    /// CMDQ_CONS when that error was seen.
    status: u32,
}

impl<H: Host> CommandQueue<H> {
    /// A queue of `2^lg2` places, which hardware has not been told of.
    pub(super) fn new(host: &H, lg2: u32, max_paddr: PhysAddr) -> Result<Self, Error> {
        let places = Words::new(host, lg2 + LG2_COMMAND, max_paddr)?;
        let state = State { producer: 0, consumer: 0, failed: 0, status: 0 };
        Ok(Self { places, lg2, state: Mutex::new(state) })
    }

    /// Tells hardware of it. CMDQEN is clear.
    pub(super) fn program(&self, registers: &impl Mmio) {
        let base = queue::ALLOCATE | self.places.paddr().get() | u64::from(self.lg2);
        registers.write64(reg::CMDQ_BASE, base);
        registers.write32(reg::CMDQ_PROD, 0);
        registers.write32(reg::CMDQ_CONS, 0);
    }

    /// Gives the memory back. CMDQEN is clear.
    pub(super) fn free(&mut self) {
        self.places.free_in_place();
    }

    /// Places commands and a sync behind them, and waits until that is complete.
    ///
    /// The commands stand together in the queue if there is room. Where there is not, those that
    /// fit go in, and others' commands may get between: no command depends on its neighbours.
    pub(super) fn run<R: Mmio>(
        &self,
        hardware: &Hardware<R, H>,
        commands: impl IntoIterator<Item = Command>,
    ) -> Result<(), HardwareError> {
        let commands = commands.into_iter().chain(iter::once(Command::SYNC));
        let (start, end) = self.place(hardware, commands)?;
        let look = || {
            let mut state = self.state.lock();
            if state.consumer < end
                && let Err(error) = self.observe(hardware, &mut state)
            {
                return Some(Err(error));
            }
            if start < state.failed {
                return Some(Err(refused(state.status)));
            }
            (state.consumer >= end).then_some(Ok(()))
        };
        poll(&hardware.host, look)
            .unwrap_or_else(|| Err(hardware.why("the SMMU did not complete its commands in time")))
    }

    /// Places commands whose completion nobody waits for, and says where the first one and what is
    /// behind the last one are.
    pub(super) fn place<R: Mmio>(
        &self,
        hardware: &Hardware<R, H>,
        commands: impl IntoIterator<Item = Command>,
    ) -> Result<(u64, u64), HardwareError> {
        let mut commands = commands.into_iter().peekable();
        let mut start = None;
        let look = || {
            let mut state = self.state.lock();
            let start = *start.get_or_insert(state.producer);
            if let Err(error) = self.fill(hardware, &mut state, &mut commands) {
                return Some(Err(error));
            }
            commands.peek().is_none().then_some(Ok((start, state.producer)))
        };
        poll(&hardware.host, look)
            .unwrap_or_else(|| Err(hardware.why("the SMMU's command queue stayed full")))
    }

    /// Lets hardware go on if it has stopped.
    pub(super) fn look<R: Mmio>(&self, hardware: &Hardware<R, H>) -> Result<(), HardwareError> {
        self.observe(hardware, &mut self.state.lock())
    }

    /// Places as many commands as there is room for, and tells hardware.
    fn fill<R: Mmio>(
        &self,
        hardware: &Hardware<R, H>,
        state: &mut State,
        commands: &mut Peekable<impl Iterator<Item = Command>>,
    ) -> Result<(), HardwareError> {
        let places = lg2::size(self.lg2);
        let before = state.producer;
        while commands.peek().is_some() {
            if state.producer - state.consumer >= places {
                self.observe(hardware, state)?;
            }
            if state.producer - state.consumer >= places {
                break;
            }
            if let Some(command) = commands.next() {
                self.store(state.producer, command);
                state.producer += 1;
            }
        }
        if state.producer != before {
            hardware.registers.write32(reg::CMDQ_PROD, self.index(state.producer));
        }
        Ok(())
    }

    fn store(&self, position: u64, Command([first, second]): Command) {
        let place = usize::try_from(position & lg2::mask(self.lg2)).unwrap_or(0);
        self.places.set(place * 2, first);
        self.places.set(place * 2 + 1, second);
    }

    /// A position as the registers have it: the place, and a bit that changes with each round.
    fn index(&self, position: u64) -> u32 {
        u32::try_from(position & lg2::mask(self.lg2 + 1)).unwrap_or(0)
    }

    /// Looks how far hardware is, and lets it go on where it stopped because of an error.
    fn observe<R: Mmio>(
        &self,
        hardware: &Hardware<R, H>,
        state: &mut State,
    ) -> Result<(), HardwareError> {
        let consumer = hardware.registers.read32(reg::CMDQ_CONS);
        if consumer == u32::MAX {
            return Err(hardware::gone(consumer));
        }
        let ahead = u64::from(consumer).wrapping_sub(state.consumer) & lg2::mask(self.lg2 + 1);
        if ahead > state.producer - state.consumer {
            let what = "the SMMU says that it consumed commands that were never placed";
            return Err(HardwareError { what, status: consumer.into() });
        }
        state.consumer += ahead;
        // ERR says why it stopped last, also when it has gone on since.
        if consumer >> queue::ERR_SHIFT & queue::ERR_MASK != 0 {
            self.recover(hardware, state, consumer);
        }
        Ok(())
    }

    /// Where hardware has stopped at a command, makes it go on. All commands that are in the queue
    /// count as failed: who waits for one of them cannot know which it was.
    ///
    /// A command that is illegal is replaced by one that does nothing. Where hardware could not
    /// read it, it tries again (7.1).
    fn recover<R: Mmio>(&self, hardware: &Hardware<R, H>, state: &mut State, consumer: u32) {
        if hardware.active_errors() & gerror::CMDQ_ERR == 0 {
            return;
        }
        if consumer >> queue::ERR_SHIFT & queue::ERR_MASK == queue::CERROR_ILL {
            self.store(state.consumer, Command::SYNC);
        }
        state.failed = state.producer;
        state.status = consumer;
        hardware.acknowledge(gerror::CMDQ_ERR);
    }
}

/// The SMMU stopped at a command of the batch, or at one near it.
fn refused(status: u32) -> HardwareError {
    HardwareError { what: "the SMMU refused a command", status: status.into() }
}
