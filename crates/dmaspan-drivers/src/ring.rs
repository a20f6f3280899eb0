//! Four of the drivers have a ring of commands. This keeps the positions of driver and hardware in
//! it, and decides which batches an error fails.
//!
//! A driver's [`Consumer`] has what differs: how hardware is told of the tail and asked for its
//! head, how a fence is known to be done (by the head, or by a number that hardware stores), and
//! how hardware that stopped goes on.
//!
//! **Who waits for whom.** Callers place commands under a lock that is held for the stores and for
//! telling hardware, and by nobody who waits. A caller that waits looks at positions that are
//! there, and takes no lock but to place a fence. One of them at a time asks hardware, whose
//! registers answer slowly, and stores what it heard for all; where another one asks already, no
//! caller waits for it.
//! (Linux's arm-smmu-v3.c also places without a lock. Its callers then wait for each other before
//! hardware may be told, and most of what a caller does here under the lock is the same work.)
//!
//! **Fences.** A batch is done when a fence behind it is. As long as hardware has fewer than two
//! fences to do, a batch brings its own. Otherwise it waits without one until hardware is done with
//! the older fence, and one fence then stands behind the batches of all who came meanwhile. So
//! no caller waits longer than for two fences, and more batches share a fence as threads rise.
//!
//! **Recovery.** Hardware stops at a bad command. Which one that was is not known for sure, and
//! what is left in the ring may be as bad. So the driver that sees the error
//! [spoils](Locked::spoil) all that was placed, while nobody places and before it lets hardware go
//! on: each batch that began before has failed.
//!
//! These may be too many: a batch may have been done that nobody had seen done yet. Its caller then
//! takes memory for reachable that no device reaches any more. They are never too few: the batch
//! with the bad command was placed before hardware met it, and hardware does not get to that
//! batch's end before it goes on. By then the batch is among the spoiled ones, and a caller that
//! waits asks for these after it saw how far hardware is. A batch that is placed afterwards has no
//! command among those that were passed over; one that is placed in parts begins with its first
//! command.

#[cfg(test)]
mod tests;

use core::fmt;
#[cfg(not(loom))]
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use dmaspan::iommu::HardwareError;
use dmaspan::lg2;
use lock_api::{Mutex, MutexGuard};
#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::host::{Host, Look, poll_in_turn};
use crate::structure::Words;

/// How far apart the ends of what waits may be, so that half a position tells them apart.
const DISTANCE: u64 = 1 << 31;

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

    /// Returns how far all is done, as memory says: a fence that ends there or before is done.
    fn done(&self, ring: &Ring<H>) -> u64;

    /// Asks hardware whether it has stopped, and returns what it says then. Asks how far it is as
    /// well, where that is how fences are known to be done, and for [`Need::Room`].
    fn ask(&self, asking: &Asking<'_, H>, need: Need) -> Result<Option<u32>, HardwareError>;

    /// Lets hardware go on that has stopped, by what it said. The tail stays where it is.
    fn recover(&self, locked: &mut Locked<'_, H>, stopped: u32) -> Result<(), HardwareError>;

    /// The error of a batch that has failed, by what hardware said then.
    fn failed(&self, status: u32) -> HardwareError;

    /// The error of a batch that hardware had no room for, or was not done with, in time. `start`
    /// is where the batch begins, if a command of it was placed. No lock is held.
    fn stuck(&self, at: Stuck, start: Option<u64>) -> HardwareError;
}

/// What a caller has to know of hardware.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// How many commands it has fetched: there is no room.
    Room,
    /// Whether it is done with what is waited for.
    Done,
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

/// Commands that were placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    /// Where it begins.
    pub(crate) start: u64,
    /// The position behind its last command.
    pub(crate) end: u64,
    /// The end of the first fence behind it, if it brought one.
    pub(crate) fence: Option<u64>,
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
    placed: Placed<H>,
    seen: Seen<H>,
}

/// What those store who place commands. It has lines of the cache for itself.
#[repr(align(128))]
struct Placed<H: Host> {
    /// The lock of those who place commands. Nobody waits for hardware with it.
    lock: Mutex<H::Lock, ()>,
    /// Where the next command goes.
    tail: AtomicU64,
    /// The ends of the last fence and of the one before it.
    last_fence: AtomicU64,
    older_fence: AtomicU64,
    /// Callers gave up waiting for the fences up to this one, which may never be done.
    given_up: AtomicU64,
}

/// What those store who ask hardware. It has lines of the cache for itself.
#[repr(align(128))]
struct Seen<H: Host> {
    /// The lock of the one who asks hardware. Others try it; only a handler of an error, and a
    /// caller whose patience has ended, wait for it. It comes before the lock of those who place.
    lock: Mutex<H::Lock, ()>,
    /// Whether somebody has it, most probably: others look at this first, since to try a lock takes
    /// its line of the cache.
    is_asked: AtomicBool,
    /// Hardware has fetched all commands before this one, as far as was seen.
    head: AtomicU64,
    /// All before this one are done or have failed, as far as it was noted.
    done: AtomicU64,
    /// Batches that begin before this one have failed.
    spoiled: AtomicU64,
    /// What hardware said then.
    status: AtomicU32,
}

/// A ring whose hardware nobody else asks meanwhile.
pub(crate) struct Asking<'a, H: Host> {
    pub(crate) ring: &'a Ring<H>,
}

/// A ring that nobody else places commands in meanwhile, or asks the hardware of.
pub(crate) struct Locked<'a, H: Host>(Asking<'a, H>);

/// Tells others that hardware is asked, until that ends or panics.
struct Asked<'a>(&'a AtomicBool);

impl<'a> Asked<'a> {
    fn new(is_asked: &'a AtomicBool) -> Self {
        is_asked.store(true, Ordering::Relaxed);
        Self(is_asked)
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

type Guard<'a, H> = MutexGuard<'a, <H as Host>::Lock, ()>;

impl<'a, H: Host> Asking<'a, H> {
    fn new(ring: &'a Ring<H>, _asking: &'a Guard<'_, H>) -> Self {
        Self { ring }
    }

    /// Takes note of the head that hardware says, as an [index](Ring::index). `false`, and nothing,
    /// where no command is there that it was to fetch.
    #[inline]
    pub(crate) fn advance(&self, head: u64) -> bool {
        let known = self.ring.head();
        let step = self.ring.index(head.wrapping_sub(known));
        // It is loaded after hardware was asked, and so not before what hardware has fetched.
        let possible = step <= self.ring.tail() - known;
        if possible && step > 0 {
            self.ring.seen.head.store(known + step, Ordering::Release);
        }
        possible
    }
}

impl<'a, H: Host> Locked<'a, H> {
    fn new(ring: &'a Ring<H>, asking: &'a Guard<'_, H>, _placing: &'a Guard<'_, H>) -> Self {
        Self(Asking::new(ring, asking))
    }

    pub(crate) fn ring(&self) -> &'a Ring<H> {
        self.0.ring
    }

    /// How many commands hardware has not fetched whose head that is, as an [index](Ring::index).
    #[inline]
    pub(crate) fn left(&self, head: u64) -> u64 {
        self.ring().index(self.ring().tail().wrapping_sub(head))
    }

    /// Fails all batches that were placed; `status` is what hardware said. See the module.
    pub(crate) fn spoil(&mut self, status: u32) {
        let (seen, tail) = (&self.ring().seen, self.ring().tail());
        seen.status.store(status, Ordering::Relaxed);
        seen.spoiled.store(tail, Ordering::Release);
        // Fences that are not carried out never store their number. A caller that loads this end
        // also loads the two values above.
        seen.done.store(tail, Ordering::Release);
    }

    /// Drops all that is placed, at hardware that begins at the first place again. Positions go on
    /// there in a new round.
    pub(crate) fn empty(&mut self) {
        let ring = self.ring();
        let start = ring.tail().next_multiple_of(lg2::size(ring.lg2));
        // In this order no position is ever beyond the tail.
        for position in [&ring.placed.tail, &ring.seen.head, &ring.seen.done] {
            position.store(start, Ordering::Release);
        }
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
        let placed = Placed {
            lock: Mutex::new(()),
            tail: AtomicU64::new(0),
            last_fence: AtomicU64::new(0),
            older_fence: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
        };
        let seen = Seen {
            lock: Mutex::new(()),
            is_asked: AtomicBool::new(false),
            head: AtomicU64::new(0),
            done: AtomicU64::new(0),
            spoiled: AtomicU64::new(0),
            status: AtomicU32::new(0),
        };
        let capacity = lg2::size(lg2) - u64::from(full == Full::EmptyPlace);
        let indices = lg2::mask(lg2 + u32::from(full == Full::RoundBit));
        Self {
            words,
            lg2,
            lg2_place_words,
            capacity,
            places: lg2::mask(lg2),
            indices,
            placed,
            seen,
        }
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

    /// Where the next command goes.
    #[inline]
    pub(crate) fn tail(&self) -> u64 {
        self.placed.tail.load(Ordering::Acquire)
    }

    /// Hardware has fetched all commands before this one, as far as was seen.
    #[inline]
    pub(crate) fn head(&self) -> u64 {
        self.seen.head.load(Ordering::Acquire)
    }

    /// Whether a batch that begins there has failed.
    #[inline]
    pub(crate) fn is_spoiled(&self, start: u64) -> bool {
        start < self.seen.spoiled.load(Ordering::Acquire)
    }

    /// How far all is done, by the number that hardware stored last: the lower `bits` of the end of
    /// a fence, which tell it from all others as long as fewer commands are not done.
    #[inline]
    pub(crate) fn stored(&self, number: impl FnOnce() -> u64, bits: u32) -> u64 {
        // In this order none is before the one above it.
        let done = self.seen.done.load(Ordering::Acquire);
        let number = number();
        let tail = self.tail();
        // The last position up to the tail with those bits. What is not among those that are waited
        // for is an old one, or nothing that hardware was told to store.
        let back = tail.wrapping_sub(number) & lg2::mask(bits);
        if back < tail - done { tail - back } else { done }
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

    /// The first word of the command at a position.
    #[inline]
    fn word(&self, position: u64) -> usize {
        let place = (position & self.places) << self.lg2_place_words;
        usize::try_from(place).unwrap_or(usize::MAX - 1)
    }

    /// Stores a command at a position, which hardware does not look at.
    #[inline]
    pub(crate) fn set(&self, position: u64, [first, second]: [u64; 2]) {
        let word = self.word(position);
        self.words.set(word, first);
        self.words.set(word + 1, second);
    }

    /// The command at a position, for a message.
    #[cold]
    pub(crate) fn shown(&self, position: u64) -> ShownCommand {
        let word = self.word(position);
        ShownCommand([self.words.get(word), self.words.get(word + 1)])
    }

    /// Does something while nobody else places commands or asks hardware.
    pub(crate) fn locked<T>(&self, does: impl FnOnce(&mut Locked<'_, H>) -> T) -> T {
        let asking = self.seen.lock.lock();
        let placing = self.placed.lock.lock();
        does(&mut Locked::new(self, &asking, &placing))
    }

    /// Asks hardware, after all who do, and lets it go on where it has stopped.
    pub(crate) fn look(
        &self,
        consumer: &impl Consumer<H>,
        need: Need,
    ) -> Result<(), HardwareError> {
        let asking = self.seen.lock.lock();
        match need {
            Need::Room => self.ask(consumer, &asking, Some(&self.placed.lock.lock())),
            Need::Done => self.ask(consumer, &asking, None),
        }
    }

    /// Lets the caller ask hardware, if nobody does.
    #[inline]
    fn try_asking(&self) -> Option<Guard<'_, H>> {
        if self.seen.is_asked.load(Ordering::Relaxed) {
            return None;
        }
        self.seen.lock.try_lock()
    }

    /// Asks hardware, for room where the caller is `placing`, and notes how far it is.
    fn ask(
        &self,
        consumer: &impl Consumer<H>,
        asking: &Guard<'_, H>,
        placing: Option<&Guard<'_, H>>,
    ) -> Result<(), HardwareError> {
        let need = if placing.is_some() { Need::Room } else { Need::Done };
        let asked = Asked::new(&self.seen.is_asked);
        let stopped = consumer.ask(&Asking::new(self, asking), need);
        drop(asked);
        if let Some(stopped) = stopped? {
            let recover = |placing: &Guard<'_, H>| {
                consumer.recover(&mut Locked::new(self, asking, placing), stopped)
            };
            match placing {
                Some(placing) => recover(placing)?,
                None => recover(&self.placed.lock.lock())?,
            }
        }
        let done = consumer.done(self);
        if done > self.seen.done.load(Ordering::Relaxed) {
            self.seen.done.store(done, Ordering::Release);
        }
        Ok(())
    }

    /// Whether there is room for `needed` commands. Asks hardware where there was none when it was
    /// asked last, and where it has yet to pass what was spoiled: a new batch is not to be blamed
    /// for another error there.
    #[inline]
    fn has_room(
        &self,
        consumer: &impl Consumer<H>,
        placing: &Guard<'_, H>,
        needed: u64,
    ) -> Result<Look<()>, HardwareError> {
        let tail = self.tail();
        let has = || {
            self.capacity - (tail - self.head()) >= needed
                && tail - self.seen.done.load(Ordering::Acquire) < DISTANCE
        };
        if !has() || self.is_spoiled(self.head()) {
            // It is only tried: the caller that asks may wait for the lock that is held here.
            let Some(asking) = self.try_asking() else { return Ok(Look::Elsewhere) };
            self.ask(consumer, &asking, Some(placing))?;
        }
        Ok(has().then_some(()).into())
    }

    /// The end of the first fence behind a position, as far as two are known.
    #[inline]
    fn fence_behind(&self, end: u64) -> Option<u64> {
        let older = self.placed.older_fence.load(Ordering::Acquire);
        let fences = [older, self.placed.last_fence.load(Ordering::Acquire)];
        // A fence behind it ends behind it: what ends at it was there before.
        fences.into_iter().find(|&fence| fence > end)
    }

    /// Whether hardware has fewer than two fences to do.
    #[inline]
    fn may_fence(&self, consumer: &impl Consumer<H>) -> bool {
        let older = self.placed.older_fence.load(Ordering::Acquire);
        older <= consumer.done(self) || older <= self.placed.given_up.load(Ordering::Relaxed)
    }

    /// Places a fence, for which there is room, and returns the position behind it. The caller is
    /// placing.
    #[inline]
    fn set_fence(&self, consumer: &impl Consumer<H>, position: u64) -> u64 {
        let end = position + 1;
        self.set(position, consumer.fence(self, end));
        let last = self.placed.last_fence.load(Ordering::Relaxed);
        self.placed.older_fence.store(last, Ordering::Release);
        self.placed.last_fence.store(end, Ordering::Release);
        end
    }

    /// The end of a fence behind what ends there. Where there is none it is placed, if hardware has
    /// fewer than two to do.
    fn fence_for(
        &self,
        consumer: &impl Consumer<H>,
        end: u64,
    ) -> Result<Option<u64>, HardwareError> {
        let found = self.fence_behind(end);
        if found.is_some() || !self.may_fence(consumer) {
            return Ok(found);
        }
        let placing = self.placed.lock.lock();
        let found = self.fence_behind(end);
        if found.is_some() || !self.may_fence(consumer) {
            return Ok(found);
        }
        let Look::Answer(()) = self.has_room(consumer, &placing, 1)? else { return Ok(None) };
        let tail = self.set_fence(consumer, self.tail());
        self.placed.tail.store(tail, Ordering::Release);
        consumer.tell(self, tail);
        Ok(Some(tail))
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
    ) -> Result<Batch, HardwareError> {
        let mut commands = commands.into_iter();
        let mut left = Left::Commands;
        let (mut start, mut fence) = (None, None);
        let mut place = || {
            let placing = self.placed.lock.lock();
            let before = self.tail();
            let mut tail = before;
            let mut look = Look::Nothing;
            while left != Left::Nothing {
                match self.has_room(consumer, &placing, needed) {
                    Ok(Look::Answer(())) => {}
                    Ok(Look::Nothing) => break,
                    Ok(Look::Elsewhere) => {
                        look = Look::Elsewhere;
                        break;
                    }
                    Err(error) => {
                        look = Look::Answer(Err(error));
                        break;
                    }
                }
                let full = self.head() + self.capacity;
                if left == Left::Commands {
                    let room = usize::try_from(full - tail).unwrap_or(usize::MAX);
                    commands.by_ref().take(room).for_each(|command| {
                        self.set(tail, command);
                        tail += 1;
                    });
                    // A list that ends where the room does may not know it: it is asked again.
                    if tail < full || commands.size_hint().1 == Some(0) {
                        left = match behind {
                            Behind::Fence if self.may_fence(consumer) => Left::Fence,
                            // One who waits places it.
                            Behind::Fence | Behind::Nothing => Left::Nothing,
                        };
                    }
                }
                if left == Left::Fence && tail < full {
                    tail = self.set_fence(consumer, tail);
                    (left, fence) = (Left::Nothing, Some(tail));
                }
                self.placed.tail.store(tail, Ordering::Release);
            }
            if tail != before {
                start = start.or(Some(before));
                consumer.tell(self, tail);
            }
            match left {
                Left::Nothing => {
                    Look::Answer(Ok(Batch { start: start.unwrap_or(tail), end: tail, fence }))
                }
                Left::Commands | Left::Fence => look,
            }
        };
        let mut placed = poll_in_turn(consumer.host(), &mut place);
        if placed.is_none() {
            // Others may have looked last, and long ago.
            let asked = self.look(consumer, Need::Room);
            placed = match asked.map(|()| place()) {
                Err(error) => Some(Err(error)),
                Ok(Look::Answer(answer)) => Some(answer),
                Ok(Look::Nothing | Look::Elsewhere) => None,
            };
        }
        placed.unwrap_or_else(|| {
            self.give_up();
            Err(consumer.stuck(Stuck::Full, start))
        })
    }

    /// Waits until a batch is done, which is to have a fence behind it.
    #[inline]
    pub(crate) fn wait(
        &self,
        consumer: &impl Consumer<H>,
        batch: Batch,
    ) -> Result<(), HardwareError> {
        let mut fence = batch.fence;
        let mut look = || {
            if fence.is_none() {
                match self.fence_for(consumer, batch.end) {
                    Ok(found) => fence = found,
                    Err(error) => return Look::Answer(Err(error)),
                }
            }
            if let Some(outcome) = self.outcome(consumer, batch.start, fence) {
                return Look::Answer(outcome);
            }
            let Some(asking) = self.try_asking() else { return Look::Elsewhere };
            match self.ask(consumer, &asking, None) {
                Ok(()) => self.outcome(consumer, batch.start, fence).into(),
                Err(error) => Look::Answer(Err(error)),
            }
        };
        let mut waited = poll_in_turn(consumer.host(), &mut look);
        if waited.is_none() {
            // Others may have looked last, and long ago.
            waited = match self.look(consumer, Need::Done) {
                Ok(()) => self.outcome(consumer, batch.start, fence),
                Err(error) => Some(Err(error)),
            };
        }
        waited.unwrap_or_else(|| {
            self.give_up();
            Err(consumer.stuck(Stuck::Late, Some(batch.start)))
        })
    }

    /// How a batch ended with a fence behind it, if it has.
    #[inline]
    fn outcome(
        &self,
        consumer: &impl Consumer<H>,
        start: u64,
        fence: Option<u64>,
    ) -> Option<Result<(), HardwareError>> {
        // The caller learns how far all is done before it learns what has failed: see the module.
        let done = consumer.done(self);
        if self.is_spoiled(start) {
            return Some(Err(consumer.failed(self.seen.status.load(Ordering::Relaxed))));
        }
        fence.is_some_and(|fence| fence <= done).then_some(Ok(()))
    }

    /// Takes note that fences may never be done: hardware that lost them gets others.
    #[cold]
    fn give_up(&self) {
        let last = self.placed.last_fence.load(Ordering::Relaxed);
        self.placed.given_up.fetch_max(last, Ordering::Relaxed);
    }

    /// Places commands with a fence behind them, and waits until they are done.
    pub(crate) fn run(
        &self,
        consumer: &impl Consumer<H>,
        needed: u64,
        commands: impl IntoIterator<Item = [u64; 2]>,
    ) -> Result<(), HardwareError> {
        let batch = self.place(consumer, needed, commands, Behind::Fence)?;
        self.wait(consumer, batch)
    }
}
