//! Options that several commands share.

use std::ops::RangeInclusive;

use clap::ValueEnum;
use dmaspan_linux::MemoryKind;
use dmaspan_linux::mem::UnknownKind;

/// The most runs: more tell nothing new.
const MOST_RUNS: u32 = 1000;

/// How often something is measured.
///
/// # Errors
///
/// A text for `--runs` with the numbers that it takes.
pub fn run_count(text: &str) -> Result<u32, String> {
    let count = text.trim().parse().ok().filter(|count| (1..=MOST_RUNS).contains(count));
    count.ok_or_else(|| format!("--runs takes a whole number from 1 to {MOST_RUNS}"))
}

/// A kind of memory by its name.
///
/// # Errors
///
/// [`UnknownKind`], which lists the kinds.
pub fn memory_kind(name: &str) -> Result<MemoryKind, UnknownKind> {
    name.trim().parse()
}

/// Says how results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// Tables for people
    Table,
    /// One object for programs
    Json,
}

/// Whole numbers within limits, for the option that they are of.
#[derive(Clone, Debug)]
pub struct Whole(pub &'static str, pub RangeInclusive<u64>);

impl clap::builder::TypedValueParser for Whole {
    type Value = u64;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<u64, clap::Error> {
        let Self(option, limits) = self.clone();
        let parse = move |text: &str| {
            let number = text.trim().parse().ok().filter(|number| limits.contains(number));
            let (first, last) = (limits.start(), limits.end());
            number.ok_or_else(|| format!("{option} takes whole numbers from {first} to {last}"))
        };
        clap::builder::TypedValueParser::parse_ref(&parse, command, arg, value)
    }
}
