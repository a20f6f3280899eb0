//! The command line.

use clap::{Parser, Subcommand, ValueEnum};
use dmaspan_cli::hold;
use dmaspan_cli::options::{OutputFormat, Whole};
use dmaspan_linux::MemoryKind;

use crate::container::args::{CONTAINER_ABOUT, CONTAINER_EXAMPLES, ContainerArgs};
use crate::dma::args::{DMA_ABOUT, DMA_EXAMPLES, DmaArgs};
use crate::fixed::args::{FIXED_ABOUT, FIXED_EXAMPLES, FixedArgs};
use crate::io_pgtable::formats::{self, NamedFormat};
use crate::regbuf::args::{REGBUF_ABOUT, REGBUF_EXAMPLES, RegbufArgs};
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
    /// Measure IO page tables: a call for each page against one for all.
    #[command(long_about = IO_PGTABLE_ABOUT, after_help = IO_PGTABLE_EXAMPLES)]
    #[command(after_long_help = format!("Formats:\n{}\n{IO_PGTABLE_EXAMPLES}", formats::listed()))]
    IoPgtable(Printed<IoPgtableArgs>),
    /// Measure the DMA API: a call a page of a buffer against one for all.
    #[command(long_about = DMA_ABOUT, after_help = DMA_EXAMPLES, allow_negative_numbers = true)]
    Dma(Printed<DmaArgs>),
    /// Measure the container: user memory and BARs, by page and by span.
    #[command(long_about = CONTAINER_ABOUT, after_help = CONTAINER_EXAMPLES)]
    Container(Printed<ContainerArgs>),
    /// Measure bounce buffers: one lock against areas, cold slots or warm.
    #[command(long_about = SWIOTLB_ABOUT, after_help = SWIOTLB_EXAMPLES)]
    Swiotlb(Printed<SwiotlbArgs>),
    /// Measure registered buffers: a step for each page or each piece.
    #[command(long_about = REGBUF_ABOUT, after_help = REGBUF_EXAMPLES)]
    Regbuf(Printed<RegbufArgs>),
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

const IO_PGTABLE_ABOUT: &str = "\
Measure IO page tables: a call for each page against one for all.

For each format: ranges of 1, 2, 4 to 512 of the smallest pages, of 2 MiB and
4 MiB by the largest pages that fit, and a list of 80 scattered spans; with one
thread also 16 GiB (less where the format has fewer IOVAs) by each size of page
that is one entry. Threads work on disjoint regions of one table.

No IOMMU, no privilege and no memory but that of the tables is needed: nothing
is pinned and no hardware told.

With --format json each row has
  per_page_ns  a range with a call for each page: map_pages and unmap_pages of
               1 page; of the scatter list, map_spans for each span, and
               iova_to_phys and unmap_pages for each leaf
  ns           the same range with one call: map_pages and unmap_pages of all
               pages; of the scatter list, map_spans, and unmap with its spans
  speedup      per_page_ns / ns
Both are medians, over many passes and several rounds, of the time that a range
takes; a thread's wait for a CPU is thereby left out. Absolute times are the
machine's: only the ratios can be compared.";

const IO_PGTABLE_EXAMPLES: &str = "\
Examples:
  dmaspan-bench io-pgtable                          every format
  dmaspan-bench io-pgtable --format-name arm-lpae   one of them
  dmaspan-bench io-pgtable --threads 1,2 --quick    a look at everything

Exit codes: 0 done; 1 a table did not do what it should; 2 wrong usage.";

/// What a benchmark takes, and how it prints.
#[derive(Debug, clap::Args)]
pub(crate) struct Printed<A: clap::Args> {
    #[command(flatten)]
    pub(crate) args: A,

    /// Format of the output: table or json
    #[arg(long, default_value = "table", hide_possible_values = true)]
    pub(crate) format: OutputFormat,
}

/// The most threads: each has a share of the IOVAs, of which some formats have few.
const MOST_THREADS: u64 = 64;

/// Of which formats, and how.
#[derive(Debug, clap::Args)]
pub(crate) struct IoPgtableArgs {
    /// Formats, one after the other [default: all]
    #[arg(long = "format-name", value_name = "NAME,...", value_delimiter = ',')]
    #[arg(value_parser = formats::by_name)]
    pub(crate) format_names: Vec<&'static NamedFormat>,

    /// Number of threads that share a table
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,10")]
    #[arg(value_parser = Whole("--threads", 1..=MOST_THREADS))]
    pub(crate) threads: Vec<u64>,

    /// One short round, 1 GiB for 16: does all work?
    #[arg(long)]
    pub(crate) quick: bool,
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
