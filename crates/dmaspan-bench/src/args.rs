//! The command line.

use clap::{Parser, Subcommand, ValueEnum};
use dmaspan_cli::hold;
use dmaspan_cli::options::OutputFormat;
use dmaspan_linux::MemoryKind;

use crate::fixed::args::{FIXED_ABOUT, FIXED_EXAMPLES, FixedArgs};
use crate::swiotlb::args::{SWIOTLB_ABOUT, SWIOTLB_EXAMPLES, SwiotlbArgs};

/// Measures each part of the stack by itself.
#[derive(Debug, Parser)]
#[command(name = "dmaspan-bench", version, arg_required_else_help = true)]
pub(crate) struct Args {
    /// Which part.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What is measured.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure bounce buffers: one lock against areas, cold slots or warm.
    #[command(long_about = SWIOTLB_ABOUT, after_help = SWIOTLB_EXAMPLES)]
    Swiotlb(Printed<SwiotlbArgs>),
    /// Measure reads of a disk: buffers registered once, or not.
    #[command(long_about = FIXED_ABOUT, after_help = FIXED_EXAMPLES)]
    Fixed(Printed<FixedArgs>),
    /// Hold hugetlb pages until standard input ends: what the others start.
    #[command(name = hold::COMMAND, hide = true)]
    HoldHugetlb {
        /// The kind of memory that they are for.
        kind: MemoryKind,
        /// Its length in bytes.
        bytes: u64,
    },
}

/// What a benchmark takes, and how it prints.
#[derive(Debug, clap::Args)]
pub(crate) struct Printed<A: clap::Args> {
    #[command(flatten)]
    pub(crate) args: A,

    /// Format of the output: table or json
    #[arg(long, default_value = "table", hide_possible_values = true)]
    pub(crate) format: OutputFormat,
}

/// Numbers in their order, each once.
pub(crate) fn sorted(numbers: &[u64]) -> Vec<u64> {
    let mut numbers = numbers.to_vec();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// What the command line calls something.
pub(crate) fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}
