//! Four of the drivers have a ring of commands. This keeps the positions of driver and hardware in
//! it, and decides which batches an error fails.
//!
//! A driver places a batch of commands under the ring's lock, with a fence behind it by which
//! hardware says that all are done. It waits without the lock, which it takes for each look. A
//! driver's [`Consumer`] has what differs: how hardware is told of the tail and asked for its head,
//! how a fence is known to be done (by the head, or by a number that hardware stores), and how
//! hardware that stopped goes on.
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
//! asks that first, under the same lock. A batch that is placed afterwards has no command among
//! those that were passed over; one that is placed in parts begins with its first command.

use core::fmt;
use core::ops::Range;

use dmaspan::iommu::HardwareError;
use dmaspan::lg2;
use lock_api::{Mutex, MutexGuard};

use crate::host::{Host, poll};
use crate::structure::Words;

/// How hardware tells a full ring from an empty one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    /// Its indices have a bit above the place, which changes with each round.
    RoundBit,
    /// It does not: one place stays empty.
    EmptyPlace,
}

/// The hardware that takes commands out of a ring.
pub(crate) trait Consumer<H: Host> {
    /// Returns how patient a caller is.
    fn host(&self) -> &H;

    /// A command that is done when all before it are. `end` is the position behind it.
    fn fence(&self, ring: &Ring<H>, end: u64) -> [u64; 2];

    /// Tells hardware that it may take all commands before the position `tail`.
    fn tell(&self, ring: &Ring<H>, tail: u64);

    /// Returns whether there is room for `needed` commands. Asks hardware where there was none when
    /// it was asked last.
    fn has_room(&self, locked: &mut Locked<'_, H>, needed: u64) -> Result<bool, HardwareError>;

    /// Looks up to where all is done, and lets hardware go on that has stopped.
    fn look(&self, locked: &mut Locked<'_, H>, batch: &Range<u64>) -> Result<u64, HardwareError>;

    /// The error of a batch that has failed, by what hardware said then.
    fn failed(&self, status: u32) -> HardwareError;

    /// The error of a batch that hardware had no room for, or was not done with, in time. `start`
    /// is where the batch begins, if a command of it was placed. The lock is not held.
    fn stuck(&self, at: Stuck, start: Option<u64>) -> HardwareError;
}

/// A command, by its words.
pub(crate) struct ShownCommand([u64; 2]);

impl fmt::Display for ShownCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second] = self.0;
        write!(f, "{first:#018x} {second:#018x}")
    }
}

/// What hardware did not do in time.
#[derive(Clone, Copy)]
pub(crate) enum Stuck {
    /// It made no room.
    Full,
    /// It did not get to a fence.
    Late,
}

/// What is placed behind the last command.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Behind {
    Fence,
    Nothing,
}

/// The part of a batch that is not placed yet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Left {
    Commands,
    Fence,
    Nothing,
}

/// Commands of two words, and where each party is.
///
/// Positions count all commands ever placed, so that they never wrap; a place is one modulo the
/// length.
pub(crate) struct Ring<H: Host> {
    /// The commands, and whatever the driver has behind them.
    pub(crate) words: Words<H::Structure>,
    lg2: u32,
    lg2_place_words: u32,
    capacity: u64,
    /// The bits of a place, and of an [index](Self::index).
    places: u64,
    indices: u64,
    state: Mutex<H::Lock, State>,
}

/// A ring that nobody else places commands in meanwhile, or looks at.
pub(crate) struct Locked<'a, H: Host> {
    pub(crate) ring: &'a Ring<H>,
    pub(crate) state: MutexGuard<'a, H::Lock, State>,
}

/// The positions of driver and hardware in a [`Ring`].
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
    status: u32,
}

impl State {
    /// Fails all batches that were placed; `status` is what hardware said. See the module.
    pub(crate) fn spoil(&mut self, status: u32) {
        self.spoiled = self.tail;
        // Those that are not carried out never store their number.
        self.done = self.tail;
        self.status = status;
    }

    /// Takes note of a number that hardware stored: the lower `bits` of the end of a batch that is
    /// done, which tell it from all others as long as fewer commands are not.
    #[inline]
    pub(crate) fn stored(&mut self, number: u64, bits: u32) {
        // The last position up to the tail with those bits. What is not among those that are waited
        // for is an old one, or nothing that hardware was told to store.
        let back = self.tail.wrapping_sub(number) & lg2::mask(bits);
        if back < self.tail - self.done {
            self.done = self.tail - back;
        }
    }

    /// Whether nobody waits for a batch any more: it has failed, or its end was stored.
    #[inline]
    pub(crate) fn is_over(&self, batch: &Range<u64>) -> bool {
        batch.start < self.spoiled || batch.end <= self.done
    }
}

impl<H: Host> Locked<'_, H> {
    /// How many commands can be placed, as far as the head was seen.
    #[inline]
    pub(crate) fn room(&self) -> u64 {
        self.ring.capacity() - (self.state.tail - self.state.head)
    }

    /// How many commands hardware has not fetched whose head that is, as an [index](Ring::index).
    #[inline]
    pub(crate) fn left(&self, head: u64) -> u64 {
        self.ring.index(self.state.tail.wrapping_sub(head))
    }

    /// Takes note of the head that hardware says. `false`, and nothing, where no command is there
    /// that it was to fetch.
    #[inline]
    pub(crate) fn advance(&mut self, head: u64) -> bool {
        let left = self.left(head);
        let possible = left <= self.state.tail - self.state.head;
        if possible {
            self.state.head = self.state.tail - left;
        }
        possible
    }

    /// Drops all that is placed, at hardware that begins at the first place again. Positions go on
    /// there in a new round.
    pub(crate) fn empty(&mut self) {
        let start = self.state.tail.next_multiple_of(lg2::size(self.ring.lg2));
        (self.state.tail, self.state.head, self.state.done) = (start, start, start);
    }
}

impl<H: Host> Ring<H> {
    /// An empty ring of `2^lg2` places of `2^lg2_place_words` words each.
    pub(crate) fn new(
        words: Words<H::Structure>,
        lg2: u32,
        lg2_place_words: u32,
        full: Full,
    ) -> Self {
        let capacity = lg2::size(lg2) - u64::from(full == Full::EmptyPlace);
        let indices = lg2::mask(lg2 + u32::from(full == Full::RoundBit));
        let (places, state) = (lg2::mask(lg2), Mutex::new(State::default()));
        Self { words, lg2, lg2_place_words, capacity, places, indices, state }
    }

    /// log2 of the places.
    pub(crate) fn lg2(&self) -> u32 {
        self.lg2
    }

    /// log2 of the bytes of a place.
    pub(crate) fn lg2_place(&self) -> u32 {
        self.lg2_place_words + 3
    }

    /// The most commands that are in it at once.
    #[inline]
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// A position as hardware's registers count it: the place, and the round's bit if there is one.
    #[inline]
    pub(crate) fn index(&self, position: u64) -> u64 {
        position & self.indices
    }

    /// [`index`](Self::index), for a register of 32 bits.
    #[inline]
    pub(crate) fn index32(&self, position: u64) -> u32 {
        u32::try_from(self.index(position)).unwrap_or(0)
    }

    /// Stores a command at a position, which hardware does not look at.
    #[inline]
    pub(crate) fn set(&self, position: u64, [first, second]: [u64; 2]) {
        let place = (position & self.places) << self.lg2_place_words;
        let word = usize::try_from(place).unwrap_or(usize::MAX - 1);
        self.words.set(word, first);
        self.words.set(word + 1, second);
    }

    /// The command at a position, for a message.
    #[cold]
    pub(crate) fn shown(&self, position: u64) -> ShownCommand {
        let place = (position & self.places) << self.lg2_place_words;
        let word = usize::try_from(place).unwrap_or(usize::MAX - 1);
        ShownCommand([self.words.get(word), self.words.get(word + 1)])
    }

    /// Keeps others out.
    #[inline]
    pub(crate) fn lock(&self) -> Locked<'_, H> {
        Locked { ring: self, state: self.state.lock() }
    }

    /// Places commands and what is to be behind them, and says where they are. All go in under one
    /// lock if there is room for `needed`. Where these are fewer, those that fit go in, and others'
    /// commands may get between: no command depends on its neighbours.
    #[inline]
    pub(crate) fn place(
        &self,
        consumer: &impl Consumer<H>,
        needed: u64,
        commands: impl IntoIterator<Item = [u64; 2]>,
        behind: Behind,
    ) -> Result<Range<u64>, HardwareError> {
        let mut commands = commands.into_iter();
        let mut left = Left::Commands;
        let mut start = None;
        let placed = poll(consumer.host(), || {
            let mut locked = self.lock();
            let before = locked.state.tail;
            let mut tail = before;
            while left != Left::Nothing {
                match consumer.has_room(&mut locked, needed) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => return Some(Err(error)),
                }
                let full = locked.state.head + self.capacity();
                if left == Left::Commands {
                    let room = usize::try_from(full - tail).unwrap_or(usize::MAX);
                    commands.by_ref().take(room).for_each(|command| {
                        self.set(tail, command);
                        tail += 1;
                    });
                    // A list that ends where the room does may not know it: it is asked again.
                    if tail < full || commands.size_hint().1 == Some(0) {
                        left = match behind {
                            Behind::Fence => Left::Fence,
                            Behind::Nothing => Left::Nothing,
                        };
                    }
                }
                if left == Left::Fence && tail < full {
                    self.set(tail, consumer.fence(self, tail + 1));
                    tail += 1;
                    left = Left::Nothing;
                }
                locked.state.tail = tail;
            }
            if tail != before {
                start = start.or(Some(before));
                consumer.tell(self, tail);
            }
            (left == Left::Nothing).then(|| Ok(start.unwrap_or(tail)..tail))
        });
        placed.unwrap_or_else(|| Err(consumer.stuck(Stuck::Full, start)))
    }

    /// Waits until a batch is done, which has a fence at its end.
    #[inline]
    pub(crate) fn wait(
        &self,
        consumer: &impl Consumer<H>,
        batch: &Range<u64>,
    ) -> Result<(), HardwareError> {
        let waited = poll(consumer.host(), || {
            let mut locked = self.lock();
            match consumer.look(&mut locked, batch) {
                Err(error) => Some(Err(error)),
                Ok(_) if batch.start < locked.state.spoiled => {
                    Some(Err(consumer.failed(locked.state.status)))
                }
                Ok(done) => (done >= batch.end).then_some(Ok(())),
            }
        });
        waited.unwrap_or_else(|| Err(consumer.stuck(Stuck::Late, Some(batch.start))))
    }

    /// Places commands with a fence behind them, and waits until they are done.
    pub(crate) fn run(
        &self,
        consumer: &impl Consumer<H>,
        needed: u64,
        commands: impl IntoIterator<Item = [u64; 2]>,
    ) -> Result<(), HardwareError> {
        let batch = self.place(consumer, needed, commands, Behind::Fence)?;
        self.wait(consumer, &batch)
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
