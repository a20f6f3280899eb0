//! A check finds problems.

use std::fmt;

/// One violation of a rule: where, what is wrong, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The file, from the workspace's directory on.
    pub path: String,
    /// The line, from 1.
    pub line: usize,
    /// What is wrong and what to do.
    pub what: String,
}

impl Problem {
    /// A problem at a line.
    pub fn new(path: &str, line: usize, what: String) -> Self {
        Self { path: path.to_owned(), line, what }
    }

    /// A problem of a whole file.
    pub fn of_file(path: &str, what: String) -> Self {
        Self::new(path, 1, what)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}
