//! The arguments of `dmaspan-bench regbuf`.

use clap::ValueEnum;

use dmaspan_cli::options::run_count;
use dmaspan_cli::size::ByteSize;

pub(crate) const REGBUF_ABOUT: &str = "\
Measure registered buffers: page at a time against by segment.

A buffer is registered once and used often: an I/O says which bytes of it, and
gets descriptors for a device. Both ways are measured in the same run, in turn,
over the same frames:
  by page     what Linux's io_uring did before it coalesced: 16 bytes for each
              page, and a step for each page of an I/O
  by segment  the buffers of dmaspan: 8 bytes for each contiguous piece, or up
              to 20 where lengths differ, and a step for each piece of an I/O

8m-4x2m is the case of Linux's series: 8 MiB in four huge pages of 2 MiB. The
others are of --size: base pages, transparent huge pages (thp), hugetlb pages,
and blocks of 2 MiB by huge and by base pages in turn (mixed).

Memory is this machine's, pinned for the run, where the kernel shows its frames
(CAP_SYS_ADMIN) and has such pages. Where not, and with --model, frames are
those of a model in which no two pages of a case are neighbours; the output
says so. No time of ours has the kernel's work in it: pages are pinned before.
What the kernel itself takes to register the same memory stands beside.

With --format json each row has
  case             what is registered
  segments_per_page, segments
                   pieces that it is kept in; segments_single and
                   segments_linux72 are those of Linux where it coalesced a
                   single huge page, and of Linux 7.2
  bytes            what keeps track of them; bytes_per_page by page
  register_ns      making that of pinned pages; register_per_page_ns by page;
                   kernel_register_ns the kernel's IORING_REGISTER_BUFFERS
                   with its pins, or null
  import_ns        finding the first piece at a random offset
  descriptor_ns    import and scatter-gather entries of an 8 MiB I/O at a
                   random offset; per_page_descriptor_ns by page,
                   linux72_descriptor_ns as Linux 7.2 keeps the buffer
  speedup          per_page_descriptor_ns / descriptor_ns
  sgl_ns, prp_ns   the same with NVMe SGLs and PRP lists; prp_stores_ns is a
                   loop that does nothing but as many stores
Times are medians, over many passes and several runs; a thread's wait for a CPU
is thereby left out.";

pub(crate) const REGBUF_EXAMPLES: &str = "\
Examples:
  dmaspan-bench regbuf                        everything, in some seconds
  dmaspan-bench regbuf --case thp,base --size 4G
  dmaspan-bench regbuf --model                all apart: the worst case
  dmaspan-bench regbuf --quick --format json  a look at everything, for scripts

Exit codes: 0 done; 1 a way refused, or both differ; 2 wrong usage.";

/// What is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RegbufCase {
    /// 8 MiB in four huge pages
    #[value(name = "8m-4x2m")]
    FourHuge,
    /// Base pages
    Base,
    /// Transparent huge pages
    Thp,
    /// Hugetlb pages of 2 MiB
    Hugetlb,
    /// Transparent huge pages and base pages in turn
    Mixed,
}

/// What is registered and how often.
#[derive(Debug, clap::Args)]
pub(crate) struct RegbufArgs {
    /// Cases, one after the other: 8m-4x2m, base, thp, hugetlb,
    /// mixed [default: all]
    #[arg(long = "case", verbatim_doc_comment, value_name = "NAME,...", value_delimiter = ',')]
    #[arg(hide_possible_values = true)]
    pub(crate) cases: Vec<RegbufCase>,

    /// Bytes of all cases but 8m-4x2m: multiples of 4M
    /// [default: 1G, or less where the machine has less]
    #[arg(long, verbatim_doc_comment, value_name = "SIZE")]
    pub(crate) size: Option<ByteSize>,

    /// Number of timed runs, for medians [default: 31]
    #[arg(long, value_name = "N", value_parser = run_count)]
    #[arg(conflicts_with = "quick")]
    pub(crate) runs: Option<u32>,

    /// Frames of a model, all apart, instead of this machine's
    #[arg(long)]
    pub(crate) model: bool,

    /// 64M, timed once and shortly: does all work?
    #[arg(long)]
    pub(crate) quick: bool,
}
