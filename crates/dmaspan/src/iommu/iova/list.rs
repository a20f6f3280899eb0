//! A space lists the IOVAs that are in use.

use core::fmt;

use super::Space;
use super::shared::try_for_long;
use super::tree::Kind;
use crate::addr::Iova;
use crate::list::{self, Picture, Step};
use crate::platform::Platform;
use crate::range::IovaRange;

/// Says who has IOVAs that are not free for everybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IovaState {
    /// They are handed out.
    InUse,
    /// They are free, and lie in a magazine: a CPU's, or a full one that all share.
    Cached,
    /// They are kept from being handed out.
    Reserved,
}

impl fmt::Display for IovaState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::InUse => "in use",
            Self::Cached => "cached",
            Self::Reserved => "reserved",
        })
    }
}

/// IOVAs that a space does not have in its tree of free ones, from [`Space::list`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListedIovas {
    /// Which. Sizes that are cached are rounded up inside to powers of two granules, so that what
    /// is handed out may be shorter.
    pub range: IovaRange,
    /// Their holder.
    pub state: IovaState,
}

impl<P: Platform> Space<P> {
    /// The IOVAs that are handed out, cached or reserved, by address; what lies between them is
    /// free.
    ///
    /// The space is used meanwhile: what is handed out all the time is listed once as in use, and
    /// what changes hands is listed as it was at some moment. What lies in the magazines of a CPU
    /// that is at them, or was interrupted there, is listed as in use.
    ///
    /// # Context
    ///
    /// Takes the lock of the space for a few ranges at a time, with a look at what all magazines
    /// have, and holds none while one is looked at. Allocates nothing.
    pub fn list(&self) -> impl Iterator<Item = ListedIovas> {
        self.list_in(IovaRange::ALL)
    }

    /// Those of which an address lies in `range`, whole; see [`list`](Self::list).
    pub fn list_in(&self, range: IovaRange) -> impl Iterator<Item = ListedIovas> {
        list::in_steps(Some(range.start()), move |from, step| self.step(from, range.last(), step))
    }

    fn step(&self, from: Iova, last: Iova, step: &mut Step<ListedIovas>) -> Option<Iova> {
        let depot = self.depot.lock();
        let mut behind = None;
        for (range, kind) in depot.tree.from(from).take_while(|(range, _)| range.start() <= last) {
            behind = range.last().checked_add(1);
            let state = match kind {
                Kind::Allocated => IovaState::InUse,
                Kind::Reserved => IovaState::Reserved,
            };
            if !step.push(ListedIovas { range, state }) {
                break;
            }
        }
        // The tree holds what lies in magazines as well: all of a range, by its first address.
        let mut is_cached = |start: u64| {
            if start >= from.get() && behind.is_none_or(|behind| start < behind.get()) {
                let start = Iova::new(start);
                let found = step.records().find(|listed| listed.range.start() == start);
                found.into_iter().for_each(|listed| listed.state = IovaState::Cached);
            }
        };
        depot.starts().for_each(&mut is_cached);
        for own in self.cpus.iter().filter_map(|own| try_for_long(own)) {
            own.starts().for_each(&mut is_cached);
        }
        behind
    }

    /// A picture for people: neighbours that are alike in one line, and how much is where.
    ///
    /// # Context
    ///
    /// As [`list`](Self::list).
    pub fn dump(&self) -> impl fmt::Display {
        Picture(|f: &mut fmt::Formatter<'_>| {
            let mut line: Option<(ListedIovas, u64)> = None;
            let write = |f: &mut fmt::Formatter<'_>, line: Option<(ListedIovas, u64)>| match line {
                Some((ListedIovas { range, state }, 1)) => writeln!(f, "{range} {state}"),
                Some((ListedIovas { range, state }, count)) => {
                    writeln!(f, "{range} {state}, {count} ranges")
                }
                None => Ok(()),
            };
            for listed in self.list() {
                let joined = line.filter(|(before, _)| before.state == listed.state);
                let joined = joined.and_then(|(before, count)| {
                    Some((before.range.join(listed.range)?, count + 1))
                });
                if let Some((range, count)) = joined {
                    line = Some((ListedIovas { range, ..listed }, count));
                } else {
                    write(f, line)?;
                    line = Some((listed, 1));
                }
            }
            write(f, line)?;
            let stats = self.stats();
            writeln!(
                f,
                "{}: {} ranges in use, {} cached, {:#x} bytes free, {:#x} bytes reserved",
                self.aperture, stats.live, stats.cached, stats.free, stats.reserved
            )
        })
    }
}
