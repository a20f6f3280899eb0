//! The arguments of `dmaspan-bench container`.

use dmaspan_cli::options::run_count;
use dmaspan_cli::size::ByteSize;

pub(crate) const CONTAINER_ABOUT: &str = "\
Measure the container: user memory and BARs, page by page against by span.

Maps and unmaps what a VFIO user gives a device: memory as transparent huge
pages, base pages, hugetlb pages and 64K folios, and the BARs of devices.

Both ways are measured in the same run, in turn:
  by page  what Linux's VFIO container did before it knew large folios and huge
           pfnmaps: arrays of 512 pages, counted and released one by one, and a
           look-up for each page of a pfnmap and of an unmap
  by span  the container: spans as long as memory is contiguous

It divides a model by a model. Physical memory, folios, the CPU's page tables
and the pins are simulated (dmaspan-sim), the same for both ways; page tables
(Arm stage 1, 4K pages), gathers and the container are real. There is no kernel
and no hardware in any time. Linux's own figures stand beside for orientation.

MADV_HUGEPAGE is in folios of 2M as a buddy allocator hands them out of fresh
memory, most of them neighbours; in 2M apart they lie anywhere. So do those of
4K for MAP_POPULATE, of 1G for HUGETLBFS and of 64K for 64K; 4K in blocks is in
base pages block by block of 2M, half of each in any order. With threads=N,
N threads map their share of the 64K folios into one container.

With --format json each row has
  case, op          what is mapped, and map or unmap
  per_page_ns, ns   nanoseconds by page and by span: medians
  speedup           per_page_ns / ns
  lookups_per_page, lookups
                    leaves looked up in the CPU's tables to map, or steps over
                    the IOMMU's to unmap
  leaves            the entries that map it in the IOMMU's tables
  gibps             GiB a second by span
and where instructions can be counted per_page_instructions_per_4k and
instructions_per_4k.";

pub(crate) const CONTAINER_EXAMPLES: &str = "\
Examples:
  dmaspan-bench container                        everything, in about a minute
  dmaspan-bench container --size 4G --runs 9     less memory, more often
  dmaspan-bench container --quick --format json  a look, for scripts

Exit codes: 0 done; 1 a mapping failed or left something; 2 wrong usage.";

/// How much is mapped and how often.
#[derive(Debug, clap::Args)]
pub(crate) struct ContainerArgs {
    /// Size of the mapped memory, in whole GiB: like 4G
    /// [default: 16G, or 1G with --quick]
    #[arg(long, verbatim_doc_comment, value_name = "SIZE")]
    pub(crate) size: Option<ByteSize>,

    /// Number of timed runs, for medians [default: 5]
    #[arg(long, value_name = "N", value_parser = run_count)]
    #[arg(conflicts_with = "quick")]
    pub(crate) runs: Option<u32>,

    /// 1G of memory, timed once: does all work?
    #[arg(long)]
    pub(crate) quick: bool,
}
