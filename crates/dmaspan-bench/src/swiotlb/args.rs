//! The arguments of `dmaspan-bench swiotlb`.

use dmaspan_cli::options::Whole;
use dmaspan_cli::size::ByteSize;

pub(crate) const SWIOTLB_ABOUT: &str = "\
Measure bounce buffers: one lock and run lengths against areas and bitmaps.

Jobs map a buffer, which takes a slot of the pool and copies, and unmap it
again. Both pools are measured in the same run, in turn, by the same load:
  vanilla  what Linux did before its series for swiotlb performance (5.19): one
           lock, the length of the free run in a record of each slot, and a
           search from where the last one ended
  now      the pool of dmaspan: areas with locks of their own, bitmaps, and the
           slots released last taken first

The load of the first tables is that of the series, fio's: each job has 256
buffers of 4K out, and when the oldest is unmapped it is mapped again. A read
copies in and out, in both pools, and a write copies in. In the row read,
overwritten the device says that it wrote all of the buffer, so that nothing is
copied in; vanilla cannot. Then come pairs (a buffer mapped and unmapped) and
bursts (so many mapped and then unmapped) of reads, with copies and without.

Reads and writes are also measured with each patch of the series alone, and with
all three, over vanilla: the lock split by areas (lock), free slots in a bitmap
(bitmap), and the slots released last taken first (order).

Pools, locks and copies are real, in memory of this process. There is no device
and no driver: an I/O is the map and the unmap of its buffer, which takes less
than the I/O of a guest, and gains more. There are no more jobs than CPUs, but
for --oversubscribe: then jobs are CPUs of a guest that has more of them than
its host, and locks spin, as a kernel's do. So who waits for a lock whose holder
has no CPU uses its own for nothing.

With --format json each row has
  case, threads       what is done, and by how many at once
  vanilla_ns, ns      nanoseconds of a job's I/O: medians
  speedup             vanilla_ns / ns
  mbps, kiops         10^6 bytes and 1000 I/Os a second of all jobs; with
                      vanilla_ before them those of vanilla
  cpu_ns, vanilla_cpu_ns
                      CPU time of an I/O
  vanilla_cpu_percent, cpu_percent
                      CPU time of all jobs, by the time: 100 is one CPU
  patches             of reads and writes, for lock, bitmap, order and all: ns,
                      cpu_ns, kiops and mbps
  area_high_water     bytes that each area of now held at most
  waits, vanilla_waits
                      with --oversubscribe how often a lock was waited for in a
                      million I/Os
and where instructions can be counted instructions and vanilla_instructions, of
an I/O. growth has the CPU time of an I/O of the most jobs by that of one.";

pub(crate) const SWIOTLB_EXAMPLES: &str = "\
Examples:
  dmaspan-bench swiotlb                        everything, in a minute
  dmaspan-bench swiotlb --oversubscribe        four jobs for each CPU
  dmaspan-bench swiotlb --block 64K --jobs 2   the first tables of larger I/Os
  dmaspan-bench swiotlb --quick --format json  a look at everything, for scripts

Exit codes: 0 done; 1 a buffer held the wrong bytes or a pool refused; 2 wrong
usage.";

/// What the jobs do.
#[derive(Debug, clap::Args)]
pub(crate) struct SwiotlbArgs {
    /// Number of jobs at once, one run after the other, up to as
    /// many as there are CPUs [default: 1 and all CPUs, or 4
    /// where there are more; for pairs and bursts 1, 2, 4, ...]
    #[arg(long, verbatim_doc_comment, value_name = "N,...", value_delimiter = ',')]
    #[arg(value_parser = Whole("--jobs", 1..=1024))]
    pub(crate) jobs: Vec<u64>,

    /// More jobs than CPUs, and locks that spin; the first
    /// tables alone [default jobs: 1 and four for each CPU]
    #[arg(long, verbatim_doc_comment)]
    pub(crate) oversubscribe: bool,

    /// Areas of the pools that have some: up to 128
    /// [default: CPUs, or with --oversubscribe the most jobs]
    #[arg(long, verbatim_doc_comment, value_name = "N")]
    #[arg(value_parser = Whole("--areas", 1..=128))]
    pub(crate) areas: Option<u64>,

    /// Buffers that a job has out, in the first tables
    #[arg(long, value_name = "N", default_value = "256")]
    #[arg(value_parser = Whole("--iodepth", 1..=65536))]
    pub(crate) iodepth: u64,

    /// Bytes of a buffer, in the first tables: up to 256K
    #[arg(long, value_name = "SIZE", default_value = "4K")]
    pub(crate) block: ByteSize,

    /// Bytes of each pool: whole MiB
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub(crate) pool: ByteSize,

    /// One short round: does all work?
    #[arg(long)]
    pub(crate) quick: bool,
}
