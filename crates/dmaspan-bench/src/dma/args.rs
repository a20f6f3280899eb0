//! The arguments of `dmaspan-bench dma`: the letters of Linux's tools/dma/dma_map_benchmark.c.

use clap::ValueEnum;
use dmaspan::Direction;

use dmaspan_cli::options::Whole;

pub(crate) const DMA_ABOUT: &str = "\
Measure mapping and unmapping a buffer for a device: one call for each page
against one call for the buffer.

This is Linux's dma_map_benchmark (kernel/dma/map_benchmark.c, tools/dma) over
the DMA API of dmaspan: threads fill a buffer, map it, wait, unmap it, and
begin again. With none of -t, -g and -s the whole grid is measured: buffers of
1, 2, 4 to 1024 pages with 1 and with 10 threads, each case for a short time.
With any of them it is one case, whose other values are Linux's defaults.

Both ways are measured in the same run, in turn, each half of the time:
  by page  what Linux did before 5.15: IOVAs allocated once, a call to the page
           table for each page (or block of 2 MiB, where the buffer has some) to
           map and to unmap it, a command for each unmapped one, and one sync
  batched  the DMA API: map_single and unmap, or for a list map_list and
           unmap_list: one call and one command for all of it

Neither an IOMMU nor privilege is needed. Buffers, IOVAs, page tables (Arm
stage 1, 4K pages) and the flush queue are real; there is no device and no
hardware: what hardware would be told is counted and not waited for.

With --format json each row has averages in microseconds: map_us, unmap_us,
per_page_map_us, per_page_unmap_us, speedup_map and speedup_unmap (per_page /
batched); the same names with _stddev_us and _percentiles_us; and for each
unmap invalidations_per_unmap and syncs_per_unmap.";

pub(crate) const DMA_EXAMPLES: &str = "\
Examples:
  dmaspan-bench dma                          the grid, in about half a minute
  dmaspan-bench dma --lazy                   the grid through the flush queue
  dmaspan-bench dma -t 2 -g 64 -s 5          2 threads, 64 pages, 5 seconds
  dmaspan-bench dma -g 16 -s 3 --mode sg     a list of 16 pages
  dmaspan-bench dma --quick --format json    a look at everything, for scripts

Exit codes: 0 done; 1 the check or a mapping failed; 2 wrong usage.";

/// What is mapped, how and how long.
#[derive(Debug, clap::Args)]
pub(crate) struct DmaArgs {
    /// Threads that map at the same time, 1 to 1024 [default: 1]
    #[arg(short, long, value_name = "N", value_parser = Whole("-t", 1..=1024))]
    #[arg(conflicts_with = "quick")]
    pub(crate) threads: Option<u64>,

    /// Pages of a buffer, 1 to 1024 [default: 1]
    #[arg(short, long, value_name = "PAGES", value_parser = Whole("-g", 1..=1024))]
    #[arg(conflicts_with = "quick")]
    pub(crate) granule: Option<u64>,

    /// Seconds of measurement for both ways together, 1 to 300 [default: 20]
    #[arg(short, long, value_name = "S", value_parser = Whole("-s", 1..=300))]
    #[arg(conflicts_with = "quick")]
    pub(crate) seconds: Option<u64>,

    /// Direction of the data: 0 or bidirectional, 1 or to-device,
    /// 2 or from-device (then buffers are not filled)
    #[arg(short, long, verbatim_doc_comment, value_name = "DIR", default_value = "0")]
    #[arg(value_parser = direction)]
    pub(crate) direction: Direction,

    /// Bits of an address that the device can use, 20 to 64
    #[arg(short, long, value_name = "BITS", default_value = "32")]
    #[arg(value_parser = Whole("-b", 20..=64))]
    pub(crate) bits: u64,

    /// Nanoseconds between map and unmap, up to 10000000: the
    /// device at work
    #[arg(short = 'x', long, value_name = "NS", default_value = "0")]
    #[arg(value_parser = Whole("-x", 0..=10_000_000))]
    pub(crate) delay: u64,

    /// The NUMA node of the threads: only -1, which is any
    #[arg(short, long, value_name = "NODE", default_value = "-1")]
    #[arg(allow_hyphen_values = true, value_parser = node)]
    pub(crate) node: i64,

    /// Kind of a buffer: single (or 0), contiguous pages, or
    /// sg (or 1), a list of pages that lie apart
    #[arg(
        short,
        long,
        verbatim_doc_comment,
        value_name = "MODE",
        default_value = "single",
        hide_possible_values = true
    )]
    pub(crate) mode: Mode,

    /// Unmaps wait in the flush queue and are synced together
    #[arg(long, conflicts_with = "strict")]
    pub(crate) lazy: bool,

    /// Each unmap is synced at once: the default, as Linux's on
    /// Arm, whose tables these are
    #[arg(long, verbatim_doc_comment)]
    pub(crate) strict: bool,

    /// The grid with one short round: does all work?
    #[arg(long)]
    pub(crate) quick: bool,
}

/// What a buffer is (`map_mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// Contiguous pages
    #[value(alias = "0")]
    Single,
    /// A list of pages that lie apart
    #[value(alias = "1")]
    Sg,
}

/// How a direction is called.
pub(crate) const fn direction_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Bidirectional => "bidirectional",
        Direction::ToDevice => "to-device",
        Direction::FromDevice => "from-device",
    }
}

fn direction(text: &str) -> Result<Direction, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "0" | "bidirectional" => Ok(Direction::Bidirectional),
        "1" | "to-device" => Ok(Direction::ToDevice),
        "2" | "from-device" => Ok(Direction::FromDevice),
        _ => Err("-d takes 0 (bidirectional), 1 (to-device) or 2 (from-device)".to_owned()),
    }
}

fn node(text: &str) -> Result<i64, String> {
    match text.trim() {
        "-1" => Ok(-1),
        _ => Err("-n takes only -1: threads are not bound to a NUMA node".to_owned()),
    }
}
