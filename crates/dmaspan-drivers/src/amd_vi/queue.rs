//! The command buffer (2.4).
//!
//! A batch of commands goes in under one lock with one COMPLETION_WAIT behind it, which stores a
//! number that only grows. Commands are done in their order, so whoever finds his number or a later
//! one knows that his batch is done.

use dmaspan::iommu::HardwareError;
use dmaspan::lg2;
use lock_api::{Mutex, RawMutex};

use super::spec::{BUFFER_LENGTH_SHIFT, Command, LG2_RECORD, control, register, status};
use crate::host::{Host, Structure, poll};
use crate::mmio::Mmio;
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
    places: Mutex<L, Places>,
    ring: Words<S>,
    /// Word 0 is the number of the last COMPLETION_WAIT that is done.
    done: Words<S>,
    lg2_entries: u32,
}

/// Positions count commands from the last start on; a place in the ring is one modulo its length.
struct Places {
    /// Behind the last command.
    tail: u64,
    /// Up to here commands were fetched, as far as was seen.
    head: u64,
    /// The number of the last COMPLETION_WAIT.
    number: u64,
    /// How often the buffer was started again: what was in it before is not done.
    starts: u64,
}

/// What a batch waits for.
#[derive(Clone, Copy)]
struct Ticket {
    number: u64,
    starts: u64,
}

const STARTED_AGAIN: HardwareError =
    HardwareError { what: "the command buffer was started again after an error", status: 0 };

impl<L: RawMutex, S: Structure> Commands<L, S> {
    pub(super) fn new(ring: Words<S>, done: Words<S>, lg2_entries: u32) -> Self {
        let places = Mutex::new(Places { tail: 0, head: 0, number: 0, starts: 0 });
        Self { places, ring, done, lg2_entries }
    }

    /// Where COMPLETION_WAIT stores: a page of its own.
    pub(super) fn done_paddr(&self) -> u64 {
        self.done.paddr().get()
    }

    /// Tells hardware where the buffer is; it is empty. Nothing is fetched meanwhile.
    pub(super) fn program(&self, registers: &impl Mmio) {
        let length = u64::from(self.lg2_entries) << BUFFER_LENGTH_SHIFT;
        registers.write64(register::COMMAND_BASE, self.ring.paddr().get() | length);
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
        let mut starts = None;
        loop {
            let mut batch = [Command::default(); BATCH - 1];
            let mut len = 0;
            for (place, command) in batch.iter_mut().zip(&mut commands) {
                *place = command;
                len += 1;
            }
            let batch = batch.get(..len).unwrap_or_default();
            let placed = poll(host, || self.place(registers, batch, starts).transpose());
            let ticket = match placed {
                Some(ticket) => ticket?,
                None => return Err(self.stuck(registers, host, control, starts)),
            };
            if len < BATCH - 1 {
                return self.wait(registers, host, control, ticket);
            }
            starts = Some(ticket.starts);
        }
    }

    /// Puts the commands and a COMPLETION_WAIT into the ring, if there is room.
    fn place(
        &self,
        registers: &impl Mmio,
        batch: &[Command],
        starts: Option<u64>,
    ) -> Result<Option<Ticket>, HardwareError> {
        let mut places = self.places.lock();
        if starts.is_some_and(|starts| starts != places.starts) {
            return Err(STARTED_AGAIN);
        }
        let needed = batch.len() as u64 + 1;
        if self.room(&places) < needed {
            places.head = self.fetched(registers, &places)?;
            if self.room(&places) < needed {
                return Ok(None);
            }
        }
        places.number += 1;
        let done = Command::completion_wait(self.done.paddr().get(), places.number);
        for &Command(words) in batch.iter().chain([&done]) {
            let place = places.tail & lg2::mask(self.lg2_entries);
            // The ring has this place: its length is that of the mask.
            let word = usize::try_from(place * 2).unwrap_or(usize::MAX);
            for (offset, &value) in words.iter().enumerate() {
                self.ring.set(word.saturating_add(offset), value);
            }
            places.tail += 1;
        }
        registers.write64(register::COMMAND_TAIL, self.pointer(places.tail));
        Ok(Some(Ticket { number: places.number, starts: places.starts }))
    }

    /// The commands that can be placed: one place stays free, since equal pointers mean empty.
    fn room(&self, places: &Places) -> u64 {
        (lg2::size(self.lg2_entries) - 1).saturating_sub(places.tail - places.head)
    }

    fn pointer(&self, position: u64) -> u64 {
        (position & lg2::mask(self.lg2_entries)) << LG2_RECORD
    }

    /// Up to where hardware has fetched.
    fn fetched(&self, registers: &impl Mmio, places: &Places) -> Result<u64, HardwareError> {
        let head = registers.read64(register::COMMAND_HEAD);
        if head == u64::MAX {
            return Err(gone(head));
        }
        let left = places.tail.wrapping_sub(head >> LG2_RECORD) & lg2::mask(self.lg2_entries);
        // More than there was left to fetch is no place that hardware can be at.
        Ok(if left <= places.tail - places.head { places.tail - left } else { places.head })
    }

    fn wait<H: Host<Lock = L, Structure = S>>(
        &self,
        registers: &impl Mmio,
        host: &H,
        control: &Control<L>,
        ticket: Ticket,
    ) -> Result<(), HardwareError> {
        let done = poll(host, || {
            // Under the lock, so that no other start comes between the two looks.
            let places = self.places.lock();
            if places.starts != ticket.starts {
                return Some(Err(STARTED_AGAIN));
            }
            let number = self.done.get(0);
            (ticket.number..=places.number).contains(&number).then_some(Ok(()))
        });
        done.unwrap_or_else(|| Err(self.stuck(registers, host, control, Some(ticket.starts))))
    }

    /// Hardware does not go on: says why, and starts the buffer again, empty.
    fn stuck<H: Host<Lock = L, Structure = S>>(
        &self,
        registers: &impl Mmio,
        host: &H,
        control: &Control<L>,
        starts: Option<u64>,
    ) -> HardwareError {
        let mut places = self.places.lock();
        let status = registers.read32(register::STATUS);
        if status == status::GONE {
            return gone(status.into());
        }
        if starts.is_none_or(|starts| starts == places.starts) {
            self.restart(registers, host, control, &mut places);
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
        let mut places = self.places.lock();
        if registers.read32(register::STATUS) & status::COMMANDS_RUN == 0 {
            self.restart(registers, host, control, &mut places);
        }
    }

    /// Stops, empties and starts the buffer (2.4, restarting command processing).
    fn restart<H: Host<Lock = L, Structure = S>>(
        &self,
        registers: &impl Mmio,
        host: &H,
        control: &Control<L>,
        places: &mut Places,
    ) {
        control.change(registers, control::COMMANDS, 0);
        let stopped = poll(host, || {
            (registers.read32(register::STATUS) & status::COMMANDS_RUN == 0).then_some(())
        });
        places.starts = places.starts.wrapping_add(1);
        // Where it does not stop, it may fetch still: the buffer stays as it is, and whoever is
        // stuck next comes here again.
        if stopped.is_some() {
            (places.tail, places.head) = (0, 0);
            self.program(registers);
        }
        control.change(registers, 0, control::COMMANDS);
    }
}

/// What a device that is gone answers was read.
pub(super) fn gone(status: u64) -> HardwareError {
    HardwareError { what: "the IOMMU is gone: its registers read all ones", status }
}
