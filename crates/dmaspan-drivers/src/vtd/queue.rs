//! The invalidation queue (6.5.2).
//!
//! A batch is its commands and one wait behind them, which stores the batch's number to memory. A
//! wait is a fence, so that numbers are stored in their order: the one that is there says that all
//! batches up to it are done.
//!
//! A batch that was there when hardware stopped with an error has failed, whether or not it was the
//! one with the bad command. What is left of all of them is made harmless, and hardware goes on.

use dmaspan::PhysAddr;
use dmaspan::iommu::HardwareError;
use lock_api::{Mutex, RawMutex};

use super::hardware::{GONE, Hardware, gone};
use super::spec::{self, Command, register, status};
use crate::host::{Host, NoMemory, Structure, poll};
use crate::mmio::Mmio;
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
    words: Words<S>,
    lg2_bytes: u32,
    width: Width,
    state: Mutex<L, State>,
}

#[derive(Default)]
struct State {
    /// The commands that were placed, ever.
    tail: u64,
    /// The commands that hardware is known to have fetched, ever.
    head: u64,
    /// The number of the last batch.
    placed: u64,
    /// All batches up to this one are done, unless they failed.
    done: u64,
    /// Batches up to this one failed, if nobody had seen them done.
    failed: u64,
    /// What hardware said when they did.
    status: u32,
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
        Ok(Self { words, lg2_bytes, width, state: Mutex::new(State::default()) })
    }

    /// What IQA is told.
    pub(super) fn address(&self) -> u64 {
        let wide = if self.width == Width::Wide { spec::WIDE } else { 0 };
        self.words.paddr().get() | wide | u64::from(self.lg2_bytes - LG2_BYTES.0)
    }

    /// How many commands there is room for.
    const fn entries(&self) -> u64 {
        1 << (self.lg2_bytes - self.width.lg2())
    }

    /// The word in which hardware stores numbers.
    const fn number(&self) -> usize {
        1 << (self.lg2_bytes - 3)
    }

    /// Where that word is, or the one behind it.
    fn number_address(&self, word: u64) -> u64 {
        self.words.paddr().get() + (1 << self.lg2_bytes) + word * 8
    }

    /// Has hardware carry out `commands`, and waits until it has.
    pub(super) fn run<R: Mmio, H: Host>(
        &self,
        hardware: &Hardware<R, H>,
        commands: &[Command],
    ) -> Result<(), HardwareError> {
        // One place stays empty, since a full queue would look like an empty one (6.5.2), and one
        // is for the wait.
        let most = usize::try_from(self.entries() - 2).unwrap_or(1);
        commands.chunks(most).try_for_each(|batch| {
            let number = self.place(hardware, batch)?;
            self.wait(hardware, number)
        })
    }

    /// Places a batch whole, and returns its number.
    fn place<R: Mmio, H: Host>(
        &self,
        hardware: &Hardware<R, H>,
        batch: &[Command],
    ) -> Result<u64, HardwareError> {
        let needed = batch.len() as u64 + 1;
        let placed = poll(&hardware.host, || {
            let mut state = self.state.lock();
            match self.room(hardware, &mut state, needed) {
                Ok(true) => Some(Ok(self.store(hardware, &mut state, batch))),
                Ok(false) => self.recover(hardware, &mut state).err().map(Err),
                Err(error) => Some(Err(error)),
            }
        });
        placed.unwrap_or_else(|| {
            let status = hardware.read32(register::FSTS).into();
            Err(HardwareError { what: "the invalidation queue stays full", status })
        })
    }

    /// Whether `needed` commands can be placed.
    fn room<R: Mmio, H: Host>(
        &self,
        hardware: &Hardware<R, H>,
        state: &mut State,
        needed: u64,
    ) -> Result<bool, HardwareError> {
        let free = |state: &State| self.entries() - 1 - (state.tail - state.head);
        if free(state) < needed {
            // As many as hardware can lag behind; a garbled head makes it neither more nor less.
            let head = self.head(hardware)?;
            let behind = state.tail.wrapping_sub(head) & (self.entries() - 1);
            state.head = state.head.max(state.tail - behind.min(state.tail - state.head));
        }
        self.look(state);
        // Half a number tells batches apart as long as fewer wait. Those that hardware fetched and
        // never completes are among them.
        Ok(free(state) >= needed && state.placed - state.done < 1 << 31)
    }

    /// The place that hardware fetches from next.
    fn head<R: Mmio, H: Host>(&self, hardware: &Hardware<R, H>) -> Result<u64, HardwareError> {
        let value = hardware.read64(register::IQH);
        if value == u64::MAX {
            return Err(gone());
        }
        Ok(value >> self.width.lg2() & (self.entries() - 1))
    }

    fn store<R: Mmio, H: Host>(
        &self,
        hardware: &Hardware<R, H>,
        state: &mut State,
        batch: &[Command],
    ) -> u64 {
        state.placed += 1;
        // The number's lower half tells it from those that can be there: see `look`.
        let data = u32::try_from(state.placed & u64::from(u32::MAX)).unwrap_or(0);
        let wait = Command::wait(self.number_address(0), data);
        for &command in batch.iter().chain([&wait]) {
            self.set(state.tail, command);
            state.tail += 1;
        }
        self.ring(hardware, state);
        state.placed
    }

    /// Stores a command. The upper half of a wide one is 0 from the beginning.
    fn set(&self, position: u64, command: Command) {
        let place = (position & (self.entries() - 1)) << (self.width.lg2() - 3);
        let index = usize::try_from(place).unwrap_or(usize::MAX - 1);
        self.words.set(index, command.low);
        self.words.set(index + 1, command.high);
    }

    /// Tells hardware the tail.
    fn ring<R: Mmio, H: Host>(&self, hardware: &Hardware<R, H>, state: &State) {
        let tail = state.tail & (self.entries() - 1);
        hardware.write64(register::IQT, tail << self.width.lg2());
    }

    /// Looks which batches are done.
    fn look(&self, state: &mut State) {
        let number = self.words.get(self.number()) & u64::from(u32::MAX);
        // The largest number up to `placed` with that lower half. What is not among those that wait
        // is an old one, or nothing that hardware was told to store.
        let back = state.placed.wrapping_sub(number) & u64::from(u32::MAX);
        if back < state.placed - state.done {
            state.done = state.placed - back;
        }
    }

    /// Waits until a batch is done.
    fn wait<R: Mmio, H: Host>(
        &self,
        hardware: &Hardware<R, H>,
        number: u64,
    ) -> Result<(), HardwareError> {
        let outcome = |state: &State| match () {
            () if number <= state.failed => {
                let what = "an invalidation failed";
                Some(Err(HardwareError { what, status: state.status.into() }))
            }
            () if number <= state.done => Some(Ok(())),
            () => None,
        };
        let waited = poll(&hardware.host, || {
            let mut state = self.state.lock();
            self.look(&mut state);
            outcome(&state).or_else(|| match self.recover(hardware, &mut state) {
                Ok(()) => outcome(&state),
                Err(error) => Some(Err(error)),
            })
        });
        waited.unwrap_or_else(|| {
            let status = hardware.read32(register::FSTS).into();
            Err(HardwareError { what: "an invalidation was not completed", status })
        })
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
            // Before hardware goes on, so that nobody takes what follows for success. Batches that
            // were aborted never store their number: nobody waits for it any more.
            state.failed = state.placed;
            state.done = state.placed;
            state.status = status;
        }
        if errors & status::QUEUE != 0 {
            // The head stays at the command that hardware did not take. It and all behind it have
            // failed, and may be as bad: waits that store to where nobody looks take their places.
            let behind = state.tail.wrapping_sub(self.head(hardware)?) & (self.entries() - 1);
            for position in state.tail.saturating_sub(behind)..state.tail {
                self.set(position, Command::wait(self.number_address(1), 0));
            }
        }
        hardware.write32(register::FSTS, errors);
        // A model fetches again only when it is told a tail; hardware ignores one that it has.
        self.ring(hardware, state);
        Ok(())
    }
}
