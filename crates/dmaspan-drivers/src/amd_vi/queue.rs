//! The command buffer (2.4): a [`Ring`] whose hardware says in memory how far it is.
//!
//! A fence is a COMPLETION_WAIT, which stores a number: the position of its end, which only grows.
//! Commands are done in their order, so a number that is there says that all batches up to it are
//! done. Hardware that stopped is started again with an empty buffer.

use dmaspan::iommu::HardwareError;
use lock_api::{Mutex, RawMutex};

use super::spec::{BUFFER_LENGTH_SHIFT, Command, LG2_RECORD, control, register, status};
use crate::host::{Host, gone, poll};
use crate::mmio::Mmio;
use crate::ring::{Asking, Consumer, Full, Locked, Need, Ring, ShownCommand, Stuck};
use crate::structure::Words;

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

pub(super) struct Commands<H: Host> {
    ring: Ring<H>,
    /// Word 0 is the number of the last COMPLETION_WAIT that is done.
    done: Words<H::Structure>,
}

impl<H: Host> Commands<H> {
    pub(super) fn new(
        ring: Words<H::Structure>,
        done: Words<H::Structure>,
        lg2_entries: u32,
    ) -> Self {
        Self { ring: Ring::new(ring, lg2_entries, LG2_RECORD - 3, Full::EmptyPlace), done }
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

    /// The command at an address that hardware named, for a message.
    #[cold]
    pub(super) fn shown(&self, paddr: u64) -> ShownCommand {
        self.ring.shown(paddr.wrapping_sub(self.ring.words.paddr().get()) >> LG2_RECORD)
    }

    /// Has the commands done, and waits until they are.
    ///
    /// # Errors
    ///
    /// Hardware stopped at a command, of this batch or of another one, or was not done in time.
    pub(super) fn run(
        &self,
        registers: &impl Mmio,
        host: &H,
        control: &Control<H::Lock>,
        commands: impl IntoIterator<Item = Command>,
    ) -> Result<(), HardwareError> {
        let hardware = Hardware { commands: self, registers, host, control };
        self.ring.run(&hardware, 1, commands.into_iter().map(|Command(words)| words))
    }

    /// Starts the buffer again if hardware stopped at a command; all that wait fail.
    pub(super) fn restart_stopped(
        &self,
        registers: &impl Mmio,
        host: &H,
        control: &Control<H::Lock>,
    ) {
        let hardware = Hardware { commands: self, registers, host, control };
        self.ring.locked(|locked| {
            if registers.read32(register::STATUS) & status::COMMANDS_RUN == 0 {
                hardware.restart(locked);
            }
        });
    }
}

/// The hardware, for one caller.
struct Hardware<'a, R, H: Host> {
    commands: &'a Commands<H>,
    registers: &'a R,
    host: &'a H,
    control: &'a Control<H::Lock>,
}

impl<R: Mmio, H: Host> Consumer<H> for Hardware<'_, R, H> {
    fn host(&self) -> &H {
        self.host
    }

    #[inline]
    fn fence(&self, _ring: &Ring<H>, end: u64) -> [u64; 2] {
        Command::completion_wait(self.commands.done_paddr(), end).0
    }

    #[inline]
    fn tell(&self, ring: &Ring<H>, tail: u64) {
        self.registers.write64(register::COMMAND_TAIL, ring.index(tail) << LG2_RECORD);
    }

    #[inline]
    fn done(&self, ring: &Ring<H>) -> u64 {
        ring.stored(|| self.commands.done.get(0), u64::BITS)
    }

    fn ask(&self, asking: &Asking<'_, H>, need: Need) -> Result<Option<u32>, HardwareError> {
        if need == Need::Room {
            let head = self.registers.read64(register::COMMAND_HEAD);
            if head == u64::MAX {
                return Err(gone(head));
            }
            // One that hardware cannot be at makes no room.
            asking.advance(head >> LG2_RECORD);
        }
        // That it stopped is seen where time runs out.
        Ok(None)
    }

    /// Nothing: see [`Consumer::ask`] above.
    fn recover(&self, _locked: &mut Locked<'_, H>, _stopped: u32) -> Result<(), HardwareError> {
        Ok(())
    }

    fn failed(&self, status: u32) -> HardwareError {
        let what = "the command buffer was started again after an error";
        HardwareError { what, status: status.into() }
    }

    /// Says why hardware does not go on, and starts the buffer again, empty.
    fn stuck(&self, _at: Stuck, start: Option<u64>) -> HardwareError {
        let status = self.commands.ring.locked(|locked| {
            let status = self.registers.read32(register::STATUS);
            let is_spoiled = start.is_some_and(|start| locked.ring().is_spoiled(start));
            if status != status::GONE && !is_spoiled {
                self.restart(locked);
            }
            status
        });
        if status == status::GONE {
            return gone(status);
        }
        let what = if status & status::COMMANDS_RUN == 0 {
            "the IOMMU stopped at a command"
        } else {
            "the IOMMU did not complete its commands in time"
        };
        HardwareError { what, status: status.into() }
    }
}

impl<R: Mmio, H: Host> Hardware<'_, R, H> {
    /// Stops, empties and starts the buffer (2.4, restarting command processing).
    fn restart(&self, locked: &mut Locked<'_, H>) {
        self.control.change(self.registers, control::COMMANDS, 0);
        let stopped = poll(self.host, || {
            (self.registers.read32(register::STATUS) & status::COMMANDS_RUN == 0).then_some(())
        });
        locked.spoil(0);
        // Where it does not stop, it may fetch still: the buffer stays as it is, and whoever is
        // stuck next comes here again.
        if stopped.is_some() {
            locked.empty();
            self.commands.program(self.registers);
        }
        self.control.change(self.registers, 0, control::COMMANDS);
    }
}
