//! Listings of this crate's objects while others use them: a record at a time, under the object's
//! lock, which nobody holds while a record is looked at.

use std::{fmt, iter};

use dmaspan::IovaRange;

/// The records of `range` by address: `next` finds the first one in what is left, and where it is.
pub(crate) fn each<R>(
    range: IovaRange,
    next: impl Fn(IovaRange) -> Option<(IovaRange, R)>,
) -> impl Iterator<Item = R> {
    let mut rest = Some(range);
    iter::from_fn(move || {
        let (found, record) = next(rest?)?;
        rest = found.last().checked_add(1).and_then(|from| IovaRange::new(from, range.last()));
        Some(record)
    })
}

/// A picture, drawn when it is written.
pub(crate) struct Picture<F>(pub(crate) F);

impl<F: Fn(&mut fmt::Formatter<'_>) -> fmt::Result> fmt::Display for Picture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0(f)
    }
}
