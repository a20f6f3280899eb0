//! The command buffer (2.4).
//!
//! A batch of commands goes in under one lock with one COMPLETION_WAIT behind it, which stores the
//! batch's number: the position of its end, which only grows. Commands are done in their order, so
//! a number that is there says that all batches up to it are done.

use core::ops::Range;

use dmaspan::iommu::HardwareError;
use lock_api::{Mutex, RawMutex};

use super::spec::{BUFFER_LENGTH_SHIFT, Command, LG2_RECORD, control, register, status};
use crate::host::{Host, Structure, poll};
use crate::mmio::Mmio;
use crate::ring::{Full, Ring, State};
use crate::structure::Words;

/// The most commands that go in under one lock, with their COMPLETION_WAIT.
const BATCH: usize = 32;

/// The control register, which several parts of the driver change.
pub(super) struct Control<L>(Mutex<L, u64>);

impl<L: RawMutex> Control<L> {
    pub(super) fn new(value: u64) -> Self {
        Self(Mutex::new(value))
    }

    /// Writes it with these bits cleared and those set.
    pub(super) fn change(&self, registers: &impl Mmio, clear: u64, set: u64) {
        let mut value = self.0.lock();
        *value = *value & !clear | set;
        registers.write64(register::CONTROL, *value);
    }
}

pub(super) struct Commands<L, S> {
    ring: Ring<S, L>,
    /// Word 0 is the number of the last COMPLETION_WAIT that is done.
    done: Words<S>,
}

const STARTED_AGAIN: HardwareError =
    HardwareError { what: "the command buffer was started again after an error", status: 0 };

impl<L: RawMutex, S: Structure> Commands<L, S> {
    pub(super) fn new(ring: Words<S>, done: Words<S>, lg2_entries: u32) -> Self {
        Self { ring: Ring::new(ring, lg2_entries, 1, Full::EmptyPlace), done }
    }

    /// Where COMPLETION_WAIT stores: a page of its own.
    pub(super) fn done_paddr(&self) -> u64 {
        self.done.paddr().get()
    }

    /// Tells hardware where the buffer is; it is empty. Nothing is fetched meanwhile.
    pub(super) fn program(&self, registers: &impl Mmio) {
        let length = u64::from(self.ring.lg2()) << BUFFER_LENGTH_SHIFT;
        registers.write64(register::COMMAND_BASE, self.ring.words.paddr().get() | length);
        registers.write64(register::COMMAND_HEAD, 0);
        registers.write64(register::COMMAND_TAIL, 0);
    }

    /// Has the commands done, and waits until they are.
    ///
    /// # Errors
    ///
    /// Hardware stopped at a command, of this batch or of another one, or was not done in time.
    pub(super) fn run<H: Host<Lock = L, Structure = S>>(
        &self,
        registers: &impl Mmio,
        host: &H,
        control: &Control<L>,
        commands: impl IntoIterator<Item = Command>,
    ) -> Result<(), HardwareError> {
        let mut commands = commands.into_iter().fuse();
        let mut first = None;
        loop {
            let mut batch = [Command::default(); BATCH - 1];
            let mut len = 0;
            for (place, command) in batch.iter_mut().zip(&mut commands) {
                *place = command;
                len += 1;
            }
            let batch = batch.get(..len).unwrap_or_default();
            let placed = self.ring.place(host, |state| self.fill(registers, state, batch, first));
            let placed = match placed {
                Some(placed) => placed?,
                None => return Err(self.stuck(registers, host, control, first)),
            };
            let start = *first.get_or_insert(placed.start);
            if len < BATCH - 1 {
                return self.wait(registers, host, control, &(start..placed.end));
            }
        }
    }

    /// Puts the commands and a COMPLETION_WAIT into the ring, if there is room. What they belong to
    /// has begun at `first`.
    fn fill(
        &self,
        registers: &impl Mmio,
        state: &mut State,
        batch: &[Command],
        first: Option<u64>,
    ) -> Result<bool, HardwareError> {
        if first.is_some_and(|first| first < state.spoiled) {
            return Err(STARTED_AGAIN);
        }
        let needed = batch.len() as u64 + 1;
        if self.ring.room(state) < needed {
            let head = registers.read64(register::COMMAND_HEAD);
            if head == u64::MAX {
                return Err(gone(head));
            }
            // One that hardware cannot be at changes nothing.
            self.ring.advance(state, head >> LG2_RECORD);
            if self.ring.room(state) < needed {
                return Ok(false);
            }
        }
        for &Command(words) in batch {
            self.ring.push(state, words);
        }
        let Command(words) = Command::completion_wait(self.done_paddr(), state.tail + 1);
        self.ring.push(state, words);
        let pointer = self.ring.index(state.tail) << LG2_RECORD;
        registers.write64(register::COMMAND_TAIL, pointer);
        Ok(true)
    }

    fn wait<H: Host<Lock = L, Structure = S>>(
        &self,
        registers: &impl Mmio,
        host: &H,
        control: &Control<L>,
        batch: &Range<u64>,
    ) -> Result<(), HardwareError> {
        let look = |state: &mut State| {
            state.stored(self.done.get(0), u64::BITS);
            Ok(state.done)
        };
        let waited = self.ring.wait(host, batch, look, |_| STARTED_AGAIN);
        waited.unwrap_or_else(|| Err(self.stuck(registers, host, control, Some(batch.start))))
    }

    /// Hardware does not go on: says why, and starts the buffer again, empty, unless that was done
    /// since `first` was placed.
    fn stuck<H: Host<Lock = L, Structure = S>>(
        &self,
        registers: &impl Mmio,
        host: &H,
        control: &Control<L>,
        first: Option<u64>,
    ) -> HardwareError {
        let mut state = self.ring.lock();
        let status = registers.read32(register::STATUS);
        if status == status::GONE {
            return gone(status.into());
        }
        if first.is_none_or(|first| first >= state.spoiled) {
            self.restart(registers, host, control, &mut state);
        }
        let what = if status & status::COMMANDS_RUN == 0 {
            "the IOMMU stopped at a command"
        } else {
            "the IOMMU was not done with its commands in time"
        };
        HardwareError { what, status: status.into() }
    }

    /// Starts the buffer again if hardware stopped at a command; all that wait fail.
    pub(super) fn restart_stopped<H: Host<Lock = L, Structure = S>>(
        &self,
        registers: &impl Mmio,
        host: &H,
        control: &Control<L>,
    ) {
        let mut state = self.ring.lock();
        if registers.read32(register::STATUS) & status::COMMANDS_RUN == 0 {
            self.restart(registers, host, control, &mut state);
        }
    }

    /// Stops, empties and starts the buffer (2.4, restarting command processing).
    fn restart<H: Host<Lock = L, Structure = S>>(
        &self,
        registers: &impl Mmio,
        host: &H,
        control: &Control<L>,
        state: &mut State,
    ) {
        control.change(registers, control::COMMANDS, 0);
        let stopped = poll(host, || {
            (registers.read32(register::STATUS) & status::COMMANDS_RUN == 0).then_some(())
        });
        state.spoil(0);
        // Where it does not stop, it may fetch still: the buffer stays as it is, and whoever is
        // stuck next comes here again.
        if stopped.is_some() {
            self.ring.empty(state);
            self.program(registers);
        }
        control.change(registers, 0, control::COMMANDS);
    }
}

/// What a device that is gone answers was read.
pub(super) fn gone(status: u64) -> HardwareError {
    HardwareError { what: "the IOMMU is gone: its registers read all ones", status }
}
