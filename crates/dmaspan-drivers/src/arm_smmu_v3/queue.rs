//! The command queue (IHI 0070, 3.5 and 4.1).

use core::iter::{self, Peekable};
use core::ops::Range;

use dmaspan::PhysAddr;
use dmaspan::iommu::HardwareError;

use super::command::Command;
use super::hardware::{self, Hardware};
use super::spec::{gerror, queue, reg};
use crate::error::Error;
use crate::host::Host;
use crate::mmio::Mmio;
use crate::ring::{Full, Ring, State};
use crate::structure::Words;

/// log2 of a command's bytes.
const LG2_COMMAND: u32 = 4;

/// Where commands are placed.
pub(super) struct CommandQueue<H: Host> {
    ring: Ring<H::Structure, H::Lock>,
}

impl<H: Host> CommandQueue<H> {
    /// A queue of `2^lg2` places, which hardware has not been told of.
    pub(super) fn new(host: &H, lg2: u32, max_paddr: PhysAddr) -> Result<Self, Error> {
        let places = Words::new(host, lg2 + LG2_COMMAND, max_paddr)?;
        Ok(Self { ring: Ring::new(places, lg2, 1, Full::RoundBit) })
    }

    /// Tells hardware of it. CMDQEN is clear.
    pub(super) fn program(&self, registers: &impl Mmio) {
        let base = self.ring.words.paddr().get() | u64::from(self.ring.lg2());
        registers.write64(reg::CMDQ_BASE, queue::ALLOCATE | base);
        registers.write32(reg::CMDQ_PROD, 0);
        registers.write32(reg::CMDQ_CONS, 0);
    }

    /// Gives the memory back. CMDQEN is clear.
    pub(super) fn free(&mut self) {
        self.ring.words.free_in_place();
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
        let batch = self.place(hardware, commands)?;
        let look = |state: &mut State| {
            if state.head < batch.end {
                self.observe(hardware, state)?;
            }
            Ok(state.head)
        };
        self.ring
            .wait(&hardware.host, &batch, look, refused)
            .unwrap_or_else(|| Err(hardware.why("the SMMU did not complete its commands in time")))
    }

    /// Places commands whose completion nobody waits for, and says where they are, with what others
    /// placed between them.
    pub(super) fn place<R: Mmio>(
        &self,
        hardware: &Hardware<R, H>,
        commands: impl IntoIterator<Item = Command>,
    ) -> Result<Range<u64>, HardwareError> {
        let mut commands = commands.into_iter().peekable();
        let mut first = None;
        let placed = self.ring.place(&hardware.host, |state| {
            first.get_or_insert(state.tail);
            self.fill(hardware, state, &mut commands)?;
            Ok(commands.peek().is_none())
        });
        let last =
            placed.unwrap_or_else(|| Err(hardware.why("the SMMU's command queue stayed full")))?;
        Ok(first.unwrap_or(last.start)..last.end)
    }

    /// Lets hardware go on if it has stopped.
    pub(super) fn look<R: Mmio>(&self, hardware: &Hardware<R, H>) -> Result<(), HardwareError> {
        self.observe(hardware, &mut self.ring.lock())
    }

    /// Places as many commands as there is room for, and tells hardware.
    fn fill<R: Mmio>(
        &self,
        hardware: &Hardware<R, H>,
        state: &mut State,
        commands: &mut Peekable<impl Iterator<Item = Command>>,
    ) -> Result<(), HardwareError> {
        let before = state.tail;
        while commands.peek().is_some() {
            if self.ring.room(state) == 0 {
                self.observe(hardware, state)?;
            }
            if self.ring.room(state) == 0 {
                break;
            }
            if let Some(Command(words)) = commands.next() {
                self.ring.push(state, words);
            }
        }
        if state.tail != before {
            let index = u32::try_from(self.ring.index(state.tail)).unwrap_or(0);
            hardware.registers.write32(reg::CMDQ_PROD, index);
        }
        Ok(())
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
        if !self.ring.advance(state, consumer.into()) {
            let what = "the SMMU says that it consumed commands that were never placed";
            return Err(HardwareError { what, status: consumer.into() });
        }
        // ERR says why it stopped last, also when it has gone on since.
        if consumer >> queue::ERR_SHIFT & queue::ERR_MASK != 0 {
            self.recover(hardware, state, consumer);
        }
        Ok(())
    }

    /// Where hardware has stopped at a command, makes it go on.
    ///
    /// A command that is illegal is replaced by one that does nothing. Where hardware could not
    /// read it, it tries again (7.1).
    fn recover<R: Mmio>(&self, hardware: &Hardware<R, H>, state: &mut State, consumer: u32) {
        if hardware.active_errors() & gerror::CMDQ_ERR == 0 {
            return;
        }
        if consumer >> queue::ERR_SHIFT & queue::ERR_MASK == queue::CERROR_ILL {
            self.ring.set(state.head, Command::SYNC.0);
        }
        state.spoil(consumer.into());
        hardware.acknowledge(gerror::CMDQ_ERR);
    }
}

/// The SMMU stopped at a command of the batch, or at one near it.
fn refused(status: u64) -> HardwareError {
    HardwareError { what: "the SMMU refused a command", status }
}
