//! The state of a controller: registers, queues, and the work that there is.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use dmaspan_linux::client::ClientEvent;

use super::command::Completion;

/// The most entries of a queue (`CAP.MQES`, which counts from 0, and one).
pub(super) const MOST_ENTRIES: u32 = 1024;
/// How many pairs of I/O queues there can be.
pub(super) const PAIRS: u16 = 16;
/// Interrupt vectors: the admin queue's, and one for each pair.
pub(crate) const VECTORS: u16 = PAIRS + 1;

/// `CSTS.RDY`, `CSTS.CFS` and `CSTS.SHST` for a shutdown that is complete.
const READY: u32 = 1;
const FATAL: u32 = 1 << 1;
const SHUT_DOWN: u32 = 2 << 2;
/// `CC.EN`, `CC.SHN`, and the fields of an enabled controller that must be 0: command set and page
/// size.
const ENABLE: u32 = 1;
const SHUTDOWN: u32 = 3 << 14;
const UNSUPPORTED: u32 = 0x7f << 4;

#[derive(Debug)]
pub(super) struct SubmissionQueue {
    pub(super) base: u64,
    pub(super) size: u32,
    pub(super) completion: u16,
    pub(super) head: u32,
    pub(super) tail: u32,
    /// Whether it is among the work, or a worker reads a command of it. One does at a time, so that
    /// what is behind the head has been read.
    is_busy: bool,
    /// Commands that were read and have no completion yet.
    in_flight: usize,
    /// It goes when its last command has a completion.
    is_deleted: bool,
}

#[derive(Debug)]
pub(super) struct CompletionQueue {
    pub(super) base: u64,
    pub(super) size: u32,
    pub(super) vector: Option<u16>,
    head: u32,
    tail: u32,
    phase: u16,
    /// What found no room. Meanwhile no command is read whose completion would go here.
    waiting: VecDeque<Completion>,
}

/// What a worker does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Read a command of this queue, and do it.
    Command(u16),
    /// Write completions that waited for room in this queue.
    Completions(u16),
}

/// A place of a completion, and what else is needed to write it.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) address: u64,
    /// The phase tag, 0 or 1.
    pub(super) phase: u16,
    pub(super) interrupt: Option<Arc<ClientEvent>>,
}

/// Whether the function is a master of its bus. One that is not reaches no memory, and signals no
/// interrupt (PCI Express Base Specification 6.0, section 7.5.1.1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) enum Mastering {
    #[default]
    Off,
    On,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) cc: u32,
    pub(super) aqa: u32,
    pub(super) asq: u64,
    pub(super) acq: u64,
    is_fatal: bool,
    is_shut_down: bool,
    pub(super) mastering: Mastering,
    /// Grows with each reset: what was begun before has no completion.
    pub(super) generation: u64,
    pub(super) submissions: BTreeMap<u16, SubmissionQueue>,
    pub(super) completions: BTreeMap<u16, CompletionQueue>,
    pub(super) work: VecDeque<Work>,
    /// Workers that do something, of any generation.
    pub(super) running: usize,
    /// Requests for events, of which there are none.
    pub(super) events: u32,
    pub(super) vectors: Vec<Option<Arc<ClientEvent>>>,
    pub(super) is_stopped: bool,
}

impl State {
    pub(super) fn new() -> Self {
        Self { vectors: vec![None; usize::from(VECTORS)], ..Self::default() }
    }

    pub(super) fn csts(&self) -> u32 {
        let mut csts = 0;
        let is_enabled = self.cc & ENABLE != 0;
        // A controller is disabled when nothing of it reaches memory any more.
        if is_enabled && !self.is_fatal || !is_enabled && self.running > 0 {
            csts |= READY;
        }
        if self.is_fatal {
            csts |= FATAL;
        }
        if self.is_shut_down && self.running == 0 {
            csts |= SHUT_DOWN;
        }
        csts
    }

    pub(super) fn configure(&mut self, cc: u32) {
        let was = std::mem::replace(&mut self.cc, cc);
        match (was & ENABLE != 0, cc & ENABLE != 0) {
            (false, true) => self.enable(),
            (true, false) => self.disable(),
            _ => {}
        }
        self.is_shut_down = cc & SHUTDOWN != 0;
    }

    fn enable(&mut self) {
        let (submissions, completions) = ((self.aqa & 0xfff) + 1, (self.aqa >> 16 & 0xfff) + 1);
        let is_aligned = (self.asq | self.acq).is_multiple_of(4096);
        if self.cc & UNSUPPORTED != 0 || !is_aligned || submissions < 2 || completions < 2 {
            self.is_fatal = true;
            return;
        }
        self.completions.insert(0, CompletionQueue::new(self.acq, completions, Some(0)));
        self.submissions.insert(0, SubmissionQueue::new(self.asq, submissions, 0));
    }

    /// Forgets all queues; the registers of the admin queues stay.
    fn disable(&mut self) {
        self.generation += 1;
        (self.is_fatal, self.is_shut_down, self.events) = (false, false, 0);
        self.submissions.clear();
        self.completions.clear();
        self.work.clear();
    }

    /// As after power-on, but for the interrupts.
    pub(super) fn reset(&mut self) {
        self.disable();
        self.mastering = Mastering::Off;
        (self.cc, self.aqa, self.asq, self.acq) = (0, 0, 0, 0);
    }

    /// What a worker does now: nothing while the function is no master of its bus.
    pub(super) fn begin(&mut self) -> Option<Work> {
        let work = match self.mastering {
            Mastering::Off => None,
            Mastering::On => self.work.pop_front(),
        }?;
        self.running += 1;
        Some(work)
    }

    /// The guest's memory does not have a queue: the guest has to reset the controller.
    pub(super) fn fail(&mut self) {
        self.is_fatal = true;
        self.work.clear();
    }

    /// The guest has put commands into a queue up to `tail`.
    pub(super) fn submitted(&mut self, id: u16, tail: u32) {
        if let Some(queue) = self.submissions.get_mut(&id).filter(|queue| tail < queue.size) {
            queue.tail = tail;
        }
        self.feed(id);
    }

    /// The guest has taken completions out of a queue up to `head`.
    pub(super) fn completed(&mut self, id: u16, head: u32) {
        let Some(queue) = self.completions.get_mut(&id).filter(|queue| head < queue.size) else {
            return;
        };
        queue.head = head;
        let work = Work::Completions(id);
        if !queue.waiting.is_empty() && !self.is_fatal && !self.work.contains(&work) {
            self.work.push_back(work);
        }
    }

    /// Makes a queue part of the work where it has commands that may be read.
    pub(super) fn feed(&mut self, id: u16) {
        if self.is_fatal {
            return;
        }
        let Some(queue) = self.submissions.get_mut(&id) else { return };
        let completions = self.completions.get(&queue.completion);
        let has_room = completions.is_some_and(|completions| completions.waiting.is_empty());
        if queue.head != queue.tail && !queue.is_busy && !queue.is_deleted && has_room {
            queue.is_busy = true;
            self.work.push_back(Work::Command(id));
        }
    }

    /// A worker has read the command at the head; whether it is to be done.
    pub(super) fn fetched(&mut self, id: u16) -> bool {
        let Some(queue) = self.submissions.get_mut(&id) else { return false };
        queue.is_busy = false;
        if queue.is_deleted {
            return false;
        }
        queue.head = (queue.head + 1) % queue.size;
        queue.in_flight += 1;
        self.feed(id);
        true
    }

    /// No further command of a queue is read; `false` where there is no such queue.
    pub(super) fn delete(&mut self, id: u16) -> bool {
        let Some(queue) = self.submissions.get_mut(&id).filter(|queue| !queue.is_deleted) else {
            return false;
        };
        queue.is_deleted = true;
        let waits = self.work.len();
        self.work.retain(|work| *work != Work::Command(id));
        // No worker has begun with it.
        queue.is_busy &= self.work.len() == waits;
        true
    }

    /// A command of a queue has its completion, or will never have one.
    pub(super) fn ended(&mut self, id: u16) {
        if let Some(queue) = self.submissions.get_mut(&id) {
            queue.in_flight = queue.in_flight.saturating_sub(1);
        }
    }

    /// Where a completion goes; `None` where there is no room, and it waits.
    pub(super) fn place(&mut self, completion: Completion) -> Option<Place> {
        let queue = self.submissions.get(&completion.submission)?;
        let completions = self.completions.get_mut(&queue.completion)?;
        let head = u16::try_from(queue.head).unwrap_or_default();
        let completion = Completion { head, ..completion };
        if completions.waiting.is_empty()
            && let Some((address, phase)) = completions.next()
        {
            let vector = completions.vector.map(usize::from);
            let interrupt = vector.and_then(|vector| self.vectors.get(vector)?.clone());
            return Some(Place { address, phase, interrupt });
        }
        completions.waiting.push_back(completion);
        None
    }

    /// A completion that waited, and its place; `None` where there is none, or no room.
    pub(super) fn unblocked(&mut self, id: u16) -> Option<(Completion, Place)> {
        let queue = self.completions.get_mut(&id)?;
        let first = *queue.waiting.front()?;
        let (address, phase) = queue.next()?;
        queue.waiting.pop_front();
        let vector = queue.vector.map(usize::from);
        let interrupt = vector.and_then(|vector| self.vectors.get(vector)?.clone());
        if queue.waiting.is_empty() {
            let ids: Vec<u16> = self.submissions.keys().copied().collect();
            ids.into_iter().for_each(|id| self.feed(id));
        }
        Some((first, Place { address, phase, interrupt }))
    }
}

impl SubmissionQueue {
    /// Whether a worker reads or does a command of it.
    pub(super) fn is_in_use(&self) -> bool {
        self.is_busy || self.in_flight > 0
    }

    pub(super) fn new(base: u64, size: u32, completion: u16) -> Self {
        Self {
            base,
            size,
            completion,
            head: 0,
            tail: 0,
            is_busy: false,
            in_flight: 0,
            is_deleted: false,
        }
    }
}

impl CompletionQueue {
    pub(super) fn new(base: u64, size: u32, vector: Option<u16>) -> Self {
        Self { base, size, vector, head: 0, tail: 0, phase: 1, waiting: VecDeque::new() }
    }

    /// The next place and its phase tag, which is taken; `None` where the queue is full.
    fn next(&mut self) -> Option<(u64, u16)> {
        let behind = (self.tail + 1) % self.size;
        if behind == self.head {
            return None;
        }
        let at = u64::from(self.tail) << super::command::COMPLETION_LG2;
        let (address, phase) = (self.base.checked_add(at)?, self.phase);
        self.tail = behind;
        self.phase ^= u16::from(behind == 0);
        Some((address, phase))
    }
}
