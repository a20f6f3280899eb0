//! Listings of objects while others use them.
//!
//! All listings are of one kind. A listing is an iterator that goes in steps: it takes the lock of
//! its object, copies up to [`STEP`] records in the order of their addresses, lets go of the lock,
//! and hands them out. The next step begins behind the last record, whatever has changed by then.
//! So
//!
//! - no lock is held while a record is looked at, and none for longer than a step;
//! - a listing allocates nothing, and can be made where nothing may be allocated;
//! - what was there all the time is listed once, what came or went meanwhile may be, and what never
//!   was there is not;
//! - records come sorted.

use core::fmt;

use crate::prot::Prot;

/// Records that are copied under a lock at once, at most.
pub(crate) const STEP: usize = 16;

/// The records of a step.
pub(crate) struct Step<R> {
    records: [Option<R>; STEP],
    len: usize,
    taken: usize,
}

impl<R> Step<R> {
    const fn new() -> Self {
        Self { records: [const { None }; STEP], len: 0, taken: 0 }
    }

    /// Adds a record; whether there is room for another one.
    pub(crate) fn push(&mut self, record: R) -> bool {
        if let Some(place) = self.records.get_mut(self.len) {
            *place = Some(record);
            self.len += 1;
        }
        self.len < STEP
    }

    /// Whether there is room for another one.
    pub(crate) fn has_room(&self) -> bool {
        self.len < STEP
    }

    /// The records so far.
    pub(crate) fn records(&mut self) -> impl Iterator<Item = &mut R> {
        self.records[..self.len].iter_mut().flatten()
    }

    fn next(&mut self) -> Option<R> {
        let record = self.records.get_mut(self.taken)?.take();
        self.taken += usize::from(record.is_some());
        record
    }
}

/// A listing from `first` on. `take` adds the records from a place on to a step and returns where
/// the next step begins; `None` behind the last.
pub(crate) fn in_steps<R, A>(
    first: Option<A>,
    take: impl FnMut(A, &mut Step<R>) -> Option<A>,
) -> impl Iterator<Item = R> {
    InSteps { take, at: first, step: Step::new() }
}

struct InSteps<R, A, F> {
    take: F,
    at: Option<A>,
    step: Step<R>,
}

impl<R, A, F: FnMut(A, &mut Step<R>) -> Option<A>> Iterator for InSteps<R, A, F> {
    type Item = R;

    fn next(&mut self) -> Option<R> {
        loop {
            if let Some(record) = self.step.next() {
                return Some(record);
            }
            let at = self.at.take()?;
            (self.step.len, self.step.taken) = (0, 0);
            self.at = (self.take)(at, &mut self.step);
        }
    }
}

/// A picture of an object, drawn when it is written.
pub(crate) struct Picture<F>(pub(crate) F);

impl<F: Fn(&mut fmt::Formatter<'_>) -> fmt::Result> fmt::Display for Picture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0(f)
    }
}

/// What a mapping permits, in four letters: read, write, execute, cached; `m` for device registers
/// instead of `c`.
pub(crate) struct Rights(pub(crate) Prot);

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = |is: bool, letter| if is { letter } else { '-' };
        let Self(prot) = *self;
        let memory =
            if prot.contains(Prot::MMIO) { 'm' } else { letter(prot.contains(Prot::CACHE), 'c') };
        let letters = [
            letter(prot.contains(Prot::READ), 'r'),
            letter(prot.contains(Prot::WRITE), 'w'),
            letter(!prot.contains(Prot::NOEXEC), 'x'),
            memory,
        ];
        letters.iter().try_for_each(|letter| write!(f, "{letter}"))
    }
}
