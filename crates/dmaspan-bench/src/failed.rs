//! The reason why a benchmark ended early, in the words that its user reads.

use std::error::Error;
use std::fmt::{self, Display};

/// A line that says what failed, the cause included: nobody but a reader asks it for more.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failed(Box<str>);

impl Failed {
    /// In these words.
    #[cold]
    pub(crate) fn new(words: impl Display) -> Self {
        Self(words.to_string().into())
    }

    /// What says of an error where it was met.
    pub(crate) fn at<E: Display>(place: impl Display) -> impl FnOnce(E) -> Self {
        move |error| Self::new(format_args!("{place}: {error}"))
    }
}

impl<E: Error> From<E> for Failed {
    #[cold]
    fn from(error: E) -> Self {
        Self::new(error)
    }
}

impl Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
