//! The ring of commands that four of the drivers have: who is where in it, and which batches an
//! error fails.
//!
//! A driver places a batch of commands under the ring's lock, with one behind it by which hardware
//! says that all are done. It waits without the lock, which it takes for each look. What differs
//! from driver to driver is given to [`Ring::place`] and [`Ring::wait`]: how hardware is told of
//! the tail and asked for its head, how a batch is known to be done (by the head, or by a number
//! that hardware stores), and how hardware that stopped goes on.
//!
//! **Recovery.** Hardware stops at a bad command. Which one that was is not known for sure, and
//! what is left in the ring may be as bad. So the driver that sees the error [spoils](State::spoil)
//! all that was placed, under the lock and before it lets hardware go on: each batch that began
//! before has failed.
//!
//! These may be too many: a batch may have been done that nobody had seen done yet. Its caller then
//! takes memory for reachable that no device reaches any more. They are never too few: the batch
//! with the bad command was placed before hardware met it, and hardware does not get to that
//! batch's end before it goes on. By then the batch is among the spoiled ones, and [`Ring::wait`]
//! asks that first, under the same lock.

use core::ops::Range;

use dmaspan::iommu::HardwareError;
use dmaspan::lg2;
use lock_api::{Mutex, MutexGuard, RawMutex};

use crate::host::{Host, Structure, poll};
use crate::structure::Words;

/// How hardware tells a full ring from an empty one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    /// Its indices have a bit above the place, which changes with each round.
    RoundBit,
    /// It does not: one place stays empty.
    EmptyPlace,
}

/// Commands of two words, and where each party is.
///
/// Positions count all commands ever placed, so that they never wrap; a place is one modulo the
/// length.
pub(crate) struct Ring<S, L> {
    /// The commands, and whatever the driver has behind them.
    pub(crate) words: Words<S>,
    lg2: u32,
    lg2_place_words: u32,
    full: Full,
    state: Mutex<L, State>,
}

/// Who is where in a [`Ring`].
#[derive(Default)]
pub(crate) struct State {
    /// Where the next command goes.
    pub(crate) tail: u64,
    /// Hardware has fetched all commands before this one, as far as was seen.
    pub(crate) head: u64,
    /// All before this one are done or have failed, as far as hardware has
    /// [stored](Self::stored) it.
    pub(crate) done: u64,
    /// Batches that begin before this one have failed.
    pub(crate) spoiled: u64,
    /// What hardware said then.
    status: u64,
}

impl State {
    /// Fails all batches that were placed; `status` is what hardware said. See the module.
    pub(crate) fn spoil(&mut self, status: u64) {
        self.spoiled = self.tail;
        // Those that are not carried out never store their number.
        self.done = self.tail;
        self.status = status;
    }

    /// Takes note of a number that hardware stored: the lower `bits` of the end of a batch that is
    /// done, which tell it from all others as long as fewer commands are not.
    pub(crate) fn stored(&mut self, number: u64, bits: u32) {
        // The last position up to the tail with those bits. What is not among those that are waited
        // for is an old one, or nothing that hardware was told to store.
        let back = self.tail.wrapping_sub(number) & lg2::mask(bits);
        if back < self.tail - self.done {
            self.done = self.tail - back;
        }
    }

    /// Whether nobody waits for a batch any more: it has failed, or its end was stored.
    pub(crate) fn is_over(&self, batch: &Range<u64>) -> bool {
        batch.start < self.spoiled || batch.end <= self.done
    }
}

impl<S: Structure, L: RawMutex> Ring<S, L> {
    /// An empty ring of `2^lg2` places of `2^lg2_place_words` words each.
    pub(crate) fn new(words: Words<S>, lg2: u32, lg2_place_words: u32, full: Full) -> Self {
        Self { words, lg2, lg2_place_words, full, state: Mutex::new(State::default()) }
    }

    /// log2 of the places.
    pub(crate) fn lg2(&self) -> u32 {
        self.lg2
    }

    /// The most commands that are in it at once.
    #[inline]
    pub(crate) fn capacity(&self) -> u64 {
        lg2::size(self.lg2) - u64::from(self.full == Full::EmptyPlace)
    }

    /// How many commands can be placed, as far as the head was seen.
    #[inline]
    pub(crate) fn room(&self, state: &State) -> u64 {
        self.capacity() - (state.tail - state.head)
    }

    /// A position as hardware's registers count it: the place, and the round's bit if there is one.
    #[inline]
    pub(crate) fn index(&self, position: u64) -> u64 {
        position & lg2::mask(self.lg2 + u32::from(self.full == Full::RoundBit))
    }

    /// Places a command, which hardware is not told of yet. There is room.
    #[inline]
    pub(crate) fn push(&self, state: &mut State, command: [u64; 2]) {
        self.set(state.tail, command);
        state.tail += 1;
    }

    /// Stores a command in the place of one that hardware does not look at.
    #[inline]
    pub(crate) fn set(&self, position: u64, [first, second]: [u64; 2]) {
        let place = (position & lg2::mask(self.lg2)) << self.lg2_place_words;
        let word = usize::try_from(place).unwrap_or(usize::MAX - 1);
        self.words.set(word, first);
        self.words.set(word + 1, second);
    }

    /// Takes note of the head that hardware says, as an [index](Self::index). `false`, and nothing,
    /// where no command is there that it was to fetch.
    #[inline]
    pub(crate) fn advance(&self, state: &mut State, head: u64) -> bool {
        let left = self.index(state.tail.wrapping_sub(head));
        let possible = left <= state.tail - state.head;
        if possible {
            state.head = state.tail - left;
        }
        possible
    }

    /// Drops all that is placed, at hardware that begins at the first place again. Positions go on
    /// there in a new round.
    pub(crate) fn empty(&self, state: &mut State) {
        state.tail = state.tail.next_multiple_of(lg2::size(self.lg2));
        (state.head, state.done) = (state.tail, state.tail);
    }

    /// Who is where, for the time being.
    pub(crate) fn lock(&self) -> MutexGuard<'_, L, State> {
        self.state.lock()
    }

    /// Lets `fill` place commands, under the lock, until it says that all are; says where those of
    /// the last time are. `None` where the host has lost patience.
    pub(crate) fn place(
        &self,
        host: &impl Host,
        mut fill: impl FnMut(&mut State) -> Result<bool, HardwareError>,
    ) -> Option<Result<Range<u64>, HardwareError>> {
        poll(host, || {
            let mut state = self.state.lock();
            let start = state.tail;
            fill(&mut state).map(|placed| placed.then_some(start..state.tail)).transpose()
        })
    }

    /// Waits until a batch is done: `look` says, under the lock, up to where all are. A batch that
    /// has failed is `failed`, by what hardware said. `None` where the host has lost patience.
    pub(crate) fn wait(
        &self,
        host: &impl Host,
        batch: &Range<u64>,
        mut look: impl FnMut(&mut State) -> Result<u64, HardwareError>,
        failed: impl Fn(u64) -> HardwareError,
    ) -> Option<Result<(), HardwareError>> {
        poll(host, || {
            let mut state = self.state.lock();
            match look(&mut state) {
                Err(error) => Some(Err(error)),
                Ok(_) if batch.start < state.spoiled => Some(Err(failed(state.status))),
                Ok(done) => (done >= batch.end).then_some(Ok(())),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_that_of_a_batch_that_waits_or_changes_nothing() {
        let mut state = State { tail: (1 << 32) + 5, done: (1 << 32) - 3, ..State::default() };
        for number in [(1 << 32) - 3, (1 << 32) - 4, 6, 1 << 31] {
            state.stored(number, 32);
            assert_eq!(state.done, (1 << 32) - 3, "{number:#x}");
        }
        state.stored(2, 32);
        assert_eq!(state.done, (1 << 32) + 2);
        state.stored(4, u64::BITS);
        assert_eq!(state.done, (1 << 32) + 2);
        state.stored((1 << 32) + 5, u64::BITS);
        assert_eq!(state.done, (1 << 32) + 5);
    }

    #[test]
    fn what_began_before_an_error_has_failed_and_nothing_after() {
        let mut state = State { tail: 9, head: 4, done: 2, ..State::default() };
        state.spoil(7);
        assert!(state.is_over(&(8..12)));
        assert!(!state.is_over(&(9..12)));
    }
}
