//! The arguments of `dmaspan-bench fixed`.

use std::path::PathBuf;

use dmaspan_linux::MemoryKind;

use dmaspan_cli::options::{Whole, memory_kind, run_count};
use dmaspan_cli::size::ByteSize;

pub(crate) const FIXED_ABOUT: &str = "\
Measure reads and writes by this machine's kernel: buffers registered or not.

Reads blocks of a file or a disk at random places, past the page cache
(O_DIRECT), so many at a time by one io_uring, both ways in turn over the same
memory and the same places:
  fixed  buffers registered with the ring, one for each read of the depth
  plain  the same buffers by their addresses: pinned anew for each read
With --write it also writes so: everything in the file or disk is lost.

From Linux 6.12 on a registered buffer of several huge pages is kept as a few
large pieces. Before, it was kept as one for each 4K page: the disk's driver
gets many small requests for a large read. REQUESTS shows that, where the disk
counts them.

Without --write nothing is written. Before anything is timed, some blocks are
read both ways, and must be the same; with --write some are written both ways
before, and must be read as they were written.

This is the series' own fio: -rw=randread or randwrite -direct=1 -bs=8M
-iodepth=64 -mem=shmhuge -hugepage-size=2M -fixedbufs. What a profile showed
there stands beside; this program has no profiler.

With --format json each way has op, read or write, and for one of them medians
of the runs:
  wall_ns    the time of a run / its reads
  thread_ns  CPU time of the thread that submits and waits
  cpu_ns     CPU time of the process, the kernel's threads for it too
  busy_ns    time that the machine's CPUs were not idle, interrupts and other
             processes too; in steps of 10 ms / reads
  requests   how many the disk got, or null
A fixed way also has series: the shares of functions in the series' profile.";

pub(crate) const FIXED_EXAMPLES: &str = "\
Examples:
  dmaspan-bench fixed /dev/nvme0n1               8M, 64 at a time, 2M pages
  dmaspan-bench fixed /dev/nvme0n1 --depth 16 --count 512
  dmaspan-bench fixed FILE --memory thp --block 1M
  dmaspan-bench fixed /dev/nvme0n1 --write       overwrites the disk

Exit codes: 0 done; 1 a read or write failed, or both ways differ; 2 wrong
usage.";

/// The most at a time: what a ring can have.
const MOST_DEPTH: u64 = 1 << 15;
/// The most reads or writes of a run.
const MOST_READS: u64 = 1 << 32;

/// What is read or written, and how often.
#[derive(Debug, clap::Args)]
pub(crate) struct FixedArgs {
    /// A file, or a disk like /dev/nvme0n1: it is only read,
    /// but for --write
    #[arg(verbatim_doc_comment, value_name = "FILE|DEVICE")]
    pub(crate) path: PathBuf,

    /// Bytes of a read
    #[arg(long, value_name = "SIZE", default_value = "8M")]
    pub(crate) block: ByteSize,

    /// Number of requests at a time
    /// [default: 64, or fewer where memory is short]
    #[arg(long, verbatim_doc_comment, value_name = "N")]
    #[arg(value_parser = Whole("--depth", 1..=MOST_DEPTH))]
    pub(crate) depth: Option<u64>,

    /// Reads of a run, or writes, each way
    #[arg(long, value_name = "N", default_value = "256")]
    #[arg(value_parser = Whole("--count", 1..=MOST_READS))]
    pub(crate) count: u64,

    /// Memory of the buffers: memfd-hugetlb, hugetlb,
    /// hugetlb-1g, thp, base or memfd
    #[arg(long, verbatim_doc_comment, value_name = "KIND", value_parser = memory_kind)]
    #[arg(default_value = "memfd-hugetlb")]
    pub(crate) memory: MemoryKind,

    /// Write as well: what is in the file or disk is lost
    #[arg(long)]
    pub(crate) write: bool,

    /// Number of timed runs, for medians
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = run_count)]
    pub(crate) runs: u32,
}
