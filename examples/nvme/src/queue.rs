//! A submission queue with its completion queue, and what its commands in flight hold.
//!
//! Section 3.3.1: entries go in at the tail, which a doorbell tells the controller. Completions
//! have a phase tag that turns with each pass through their queue, so that a new one is told from
//! an old one. The number of a command is its slot, so what a command holds is found at once.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;
use core::sync::atomic::{AtomicU64, Ordering, fence};
use core::time::Duration;

use crate::access::{Access, Pause, SharedMemory};
use crate::error::{Awaited, Error};
use crate::spec::{
    self, COMMAND_WORDS, COMPLETION_WORDS, Capabilities, Command, Completion, PHASE, Status,
};

/// How often a wait finds nothing before the controller's status is looked at: a read of a register
/// takes as long as many polls of memory.
const STATUS_LOOKS: u32 = 1 << 10;

/// What is told that a command has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tell {
    /// The caller that reaps.
    Reaper,
    /// The caller that waits for this command.
    Waiter,
    /// Nobody any more.
    Nobody,
}

/// A command that has ended.
#[derive(Debug)]
pub(crate) struct Done<H> {
    pub(crate) held: H,
    pub(crate) status: Status,
    pub(crate) result: u32,
}

/// A slot of a queue. What a command holds leaves it with its completion and not before: until then
/// the controller may use it.
enum Slot<H> {
    Free,
    InFlight { held: H, tell: Tell },
    Done(Done<H>),
}

/// A pair of queues, of which a command in flight holds an `H`.
///
/// It has one slot less than entries, since a queue that is full could not be told from an empty
/// one. As many completions have room, so neither queue overflows.
pub(crate) struct Queue<A: Access, H> {
    pub(crate) access: Arc<A>,
    pub(crate) id: u16,
    pub(crate) depth: u16,
    submission: A::Memory,
    completion: A::Memory,
    /// Of both queues.
    doorbells: (u64, u64),
    tail: u16,
    /// The tail that the controller was told last.
    rung: u16,
    head: u16,
    /// The head that the controller was told last.
    released: u16,
    /// The phase tag of a completion that is new.
    phase: u64,
    slots: Box<[Slot<H>]>,
    /// Slots that are free. It and `done` have room for all slots.
    free: Vec<u16>,
    /// Slots that are to be reaped and were taken by who waited for others, in the order of their
    /// completions.
    done: VecDeque<u16>,
}

impl<A: Access, H> Queue<A, H> {
    /// Queues of `depth` entries, of which the controller knows nothing yet.
    pub(crate) fn new(
        access: &Arc<A>,
        capabilities: Capabilities,
        id: u16,
        depth: u16,
    ) -> Result<Self, Error> {
        let max = capabilities.max_entries();
        if depth < 2 || u32::from(depth) > max {
            return Err(Error::Depth { depth, max });
        }
        let doorbells = capabilities.doorbells(id);
        let (needed, len) = (doorbells.1 + 4, access.registers_len());
        if needed > len {
            return Err(Error::Registers { needed, len });
        }
        let align = spec::page_bytes(capabilities.min_page());
        let entries = |words| 8 * words as u64 * u64::from(depth);
        let submission = allocate(&**access, entries(COMMAND_WORDS), align)?;
        let completion = allocate(&**access, entries(COMPLETION_WORDS), align)?;
        let slots = depth - 1;
        Ok(Self {
            access: Arc::clone(access),
            id,
            depth,
            submission,
            completion,
            doorbells,
            tail: 0,
            rung: 0,
            head: 0,
            released: 0,
            phase: PHASE,
            slots: (0..slots).map(|_| Slot::Free).collect(),
            free: (0..slots).rev().collect(),
            done: VecDeque::with_capacity(slots.into()),
        })
    }

    pub(crate) fn submission_addr(&self) -> dmaspan::DmaAddr {
        self.submission.addr()
    }

    pub(crate) fn completion_addr(&self) -> dmaspan::DmaAddr {
        self.completion.addr()
    }

    /// How many commands are in flight, or ended and not reaped.
    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The slot that the next command gets.
    #[inline]
    pub(crate) fn vacant(&self) -> Result<u16, Error> {
        self.free.last().copied().ok_or(Error::Full { in_flight: self.slots.len() })
    }

    /// Enters a command, which holds `held` until it has ended. The controller is told of it by
    /// [`ring`](Self::ring).
    #[inline]
    pub(crate) fn push(&mut self, command: Command, held: H, tell: Tell) -> Result<u16, Error> {
        let id = self.vacant()?;
        if let Some(slot) = self.slots.get_mut(usize::from(id)) {
            *slot = Slot::InFlight { held, tell };
        }
        self.free.pop();
        let (entries, _) = self.submission.words().as_chunks::<COMMAND_WORDS>();
        if let Some(entry) = entries.get(usize::from(self.tail)) {
            for (place, word) in entry.iter().zip(command.words(id)) {
                place.store(word.to_le(), Ordering::Relaxed);
            }
        }
        self.tail = if self.tail + 1 == self.depth { 0 } else { self.tail + 1 };
        Ok(id)
    }

    /// Tells the controller of commands that were entered since the last time.
    #[inline]
    pub(crate) fn ring(&mut self) {
        if self.tail != self.rung {
            self.rung = self.tail;
            // The controller reads the entries when the doorbell tells it to.
            fence(Ordering::Release);
            self.access.write32(self.doorbells.0, self.tail.into());
        }
    }

    /// Tells the controller to do a command that somebody waits for. Where no slot is free, one of
    /// a command that was given up may have become it.
    pub(crate) fn submit_awaited(&mut self, command: Command, held: H) -> Result<u16, Error> {
        self.make_room()?;
        let id = self.push(command, held, Tell::Waiter)?;
        self.ring();
        Ok(id)
    }

    /// Looks for completions where no slot is free.
    pub(crate) fn make_room(&mut self) -> Result<(), Error> {
        if self.free.is_empty() { self.poll() } else { Ok(()) }
    }

    /// Takes the completions that there are, and keeps those that are to be reaped.
    fn poll(&mut self) -> Result<(), Error> {
        self.take_completions(|queue, id, done| {
            if let Some(slot) = queue.slots.get_mut(usize::from(id)) {
                *slot = Slot::Done(done);
                queue.done.push_back(id);
            }
        })
    }

    /// Gives `each` what has ended and is to be reaped, in the order of the completions, and
    /// returns how many that was.
    #[inline]
    pub(crate) fn reap(&mut self, mut each: impl FnMut(u16, Done<H>)) -> Result<usize, Error> {
        self.ring();
        let mut count = 0;
        // These were taken by who waited for others.
        while let Some(id) = self.done.pop_front() {
            if let Some(done) = self.take(id) {
                count += 1;
                each(id, done);
            }
        }
        let taken = self.take_completions(|queue, id, done| {
            count += 1;
            queue.free.push(id);
            each(id, done);
        });
        taken.map(|()| count)
    }

    /// Takes the completions that there are, no more than the queue has entries: then the call ends
    /// whatever the controller does. `reap` gets those that are to be reaped, whose slots have
    /// nothing any more.
    #[inline]
    fn take_completions(
        &mut self,
        mut reap: impl FnMut(&mut Self, u16, Done<H>),
    ) -> Result<(), Error> {
        // Unless `reap` has panicked the last time, the controller was told already.
        self.release();
        let mut taken = 0;
        let mut ended = Ok(());
        while taken < self.depth
            && let Some(completion) = self.next_completion()
        {
            taken += 1;
            self.head += 1;
            if self.head == self.depth {
                self.head = 0;
                self.phase ^= PHASE;
            }
            match self.end(completion) {
                Ok(Some(done)) => reap(self, completion.command, done),
                Ok(None) => {}
                Err(unexpected) => {
                    ended = Err(unexpected);
                    break;
                }
            }
        }
        self.release();
        ended
    }

    /// Lets the controller use the places of completions that were taken since the last time.
    #[inline]
    fn release(&mut self) {
        if self.head != self.released {
            self.released = self.head;
            // They are read before.
            fence(Ordering::Release);
            self.access.write32(self.doorbells.1, self.head.into());
        }
    }

    /// Whether there is something to be reaped.
    pub(crate) fn has_ended(&self) -> bool {
        !self.done.is_empty() || self.next_completion().is_some()
    }

    /// The completion at the head, if it is a new one.
    #[inline]
    fn next_completion(&self) -> Option<Completion> {
        let place = usize::from(self.head) * COMPLETION_WORDS;
        let [first, second] = self.completion.words().get(place..)?.first_chunk()?;
        // The tag is written with the rest of the entry or behind it: it is read before.
        let second = u64::from_le(second.load(Ordering::Acquire));
        if second & PHASE != self.phase {
            return None;
        }
        Some(Completion::new(u64::from_le(first.load(Ordering::Relaxed)), second))
    }

    /// Ends the command that a completion is of; what it held, if that is to be reaped.
    #[inline]
    fn end(&mut self, completion: Completion) -> Result<Option<Done<H>>, Error> {
        let Completion { result, queue: sq, command, status } = completion;
        let slot = self.slots.get_mut(usize::from(command)).filter(|_| sq == self.id);
        if let Some(slot) = slot
            && let Slot::InFlight { tell, .. } = *slot
            && let Slot::InFlight { held, .. } = mem::replace(slot, Slot::Free)
        {
            let done = Done { held, status, result };
            match tell {
                Tell::Reaper => return Ok(Some(done)),
                Tell::Waiter => *slot = Slot::Done(done),
                Tell::Nobody => self.free.push(command),
            }
            return Ok(None);
        }
        Err(Error::UnexpectedCompletion { queue: self.id, sq, command })
    }

    /// What has become of a command, once it has ended; its slot is free then.
    #[inline]
    fn take(&mut self, id: u16) -> Option<Done<H>> {
        let slot = self.slots.get_mut(usize::from(id))?;
        match mem::replace(slot, Slot::Free) {
            Slot::Done(done) => {
                self.free.push(id);
                Some(done)
            }
            other => {
                *slot = other;
                None
            }
        }
    }

    /// Waits until a command has ended that was submitted for a [waiter](Tell::Waiter).
    ///
    /// Where it does not, its slot stays taken until its completion comes.
    pub(crate) fn wait(&mut self, id: u16, limit: Duration) -> Result<Done<H>, Error> {
        let access = Arc::clone(&self.access);
        let (mut failed, mut looks) = (None, 0_u32);
        let done = poll_until(&*access, limit, || {
            failed = self.poll().err();
            let done = self.take(id);
            looks += 1;
            if done.is_none() && failed.is_none() && looks.is_multiple_of(STATUS_LOOKS) {
                failed = check(&*access).err();
            }
            (done.is_some() || failed.is_some()).then_some(done)
        });
        if let Some(Some(done)) = done {
            return Ok(done);
        }
        if let Some(Slot::InFlight { tell, .. }) = self.slots.get_mut(usize::from(id)) {
            *tell = Tell::Nobody;
        }
        let awaited = Awaited::Completion { queue: self.id, command: id };
        Err(failed.unwrap_or_else(|| overdue(&*access, awaited, limit)))
    }
}

/// Looks for something until it is there, or `limit` has gone by.
pub(crate) fn poll_until<A: Access, T>(
    access: &A,
    limit: Duration,
    mut look: impl FnMut() -> Option<T>,
) -> Option<T> {
    for polls in 1..=u32::MAX {
        if let Some(found) = look() {
            return Some(found);
        }
        if access.pause(polls, limit) == Pause::GiveUp {
            break;
        }
    }
    // It may have come while the program was kept from looking.
    look()
}

/// Whether the controller's status says that it will ever do anything.
pub(crate) fn check<A: Access>(access: &A) -> Result<(), Error> {
    match access.read32(spec::CSTS) {
        spec::GONE => Err(Error::Gone),
        csts if csts & spec::CSTS_FATAL != 0 => Err(Error::Fatal { csts }),
        _ => Ok(()),
    }
}

/// Why something did not happen in time.
pub(crate) fn overdue<A: Access>(access: &A, what: Awaited, limit: Duration) -> Error {
    check(access).err().unwrap_or(Error::Timeout { what, limit })
}

/// Shared memory with nothing in it.
pub(crate) fn allocate<A: Access>(access: &A, bytes: u64, align: u64) -> Result<A::Memory, Error> {
    let memory = access.allocate(bytes, align);
    let memory = memory.map_err(|source| Error::Allocate { bytes, source })?;
    memory.words().iter().for_each(|word: &AtomicU64| word.store(0, Ordering::Relaxed));
    Ok(memory)
}
