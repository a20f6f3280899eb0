//! A queue lists what waits in it.

use core::fmt;

use super::FlushQueue;
use crate::list;
use crate::platform::Platform;

/// What an unmap waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueuedFor {
    /// A flush.
    Flush {
        /// In the queue of this CPU.
        cpu: usize,
        /// Since when the oldest entry of that queue waits.
        since: u64,
    },
    /// Hardware that did not answer to one.
    Hardware,
}

impl<P: Platform, L, T> FlushQueue<P, L, T> {
    /// What waits, by CPU and in the order in which it came, and then what is in quarantine: each
    /// as `look` sees it.
    pub(crate) fn list<R>(&self, look: impl Fn(&T, QueuedFor) -> R) -> impl Iterator<Item = R> {
        list::in_steps(Some((0, 0)), move |(cpu, from): (usize, usize), step| {
            let mut add = |held: &[T], state| {
                let rest = held.iter().enumerate().skip(from);
                let mut more = rest.skip_while(|(_, held)| step.push(look(held, state)));
                more.next().map(|(at, _)| at + 1)
            };
            match self.slots.get(cpu) {
                Some(slot) => {
                    let batch = slot.waiting.lock();
                    let next = add(&batch.held, QueuedFor::Flush { cpu, since: batch.since });
                    Some(next.map_or((cpu + 1, 0), |next| (cpu, next)))
                }
                None => {
                    let batch = self.quarantine.waiting.lock();
                    add(&batch.held, QueuedFor::Hardware).map(|next| (cpu, next))
                }
            }
        })
    }

    /// What [`waiting`](Self::waiting) says, of what nobody is at.
    pub(crate) fn try_waiting(&self) -> (usize, usize) {
        let slots = self.slots.iter().filter_map(|slot| slot.waiting.try_lock());
        let quarantined = self.quarantine.waiting.try_lock();
        let quarantined = quarantined.map_or(0, |batch| batch.held.len());
        (slots.map(|batch| batch.held.len()).sum(), quarantined)
    }
}

impl<P: Platform, L, T> fmt::Debug for FlushQueue<P, L, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (waiting, quarantined) = self.try_waiting();
        f.debug_struct("FlushQueue")
            .field("config", &self.config)
            .field("waiting", &waiting)
            .field("quarantined", &quarantined)
            .finish_non_exhaustive()
    }
}
